--- autocheckpoint: tells a live run to save and stop, or rehearses it: save, stop, start again, resume.
local drill = require("ciranda.run.drill")
local err = require("ciranda.io.error")

local M = {
  summary = "have a live run save a checkpoint and stop, or rehearse it",
  description = "autocheckpoint save RUN: every worker gets SIGTERM and time to save; what is on disk afterwards "
    .. "decides, not an exit status. autocheckpoint drill RUN: the same on purpose, then the same COMMAND is started "
    .. "again, must go on from the step saved, and is left running (`ciranda attach RUN`). Ends with 1 when nothing "
    .. "was saved, when the grace would have been exceeded, or when it resumed elsewhere. The run's own runner, "
    .. "where there is one, sees its command end. drill RUN --BY=maintenance has the API simulate a maintenance event "
    .. "on the run's nodes and sends no signal itself: the runner and the platform have to act.",
}

M.flags = {
  {
    name = "VERB",
    positional = true,
    required = true,
    choices = { "save", "drill" },
    help = "save or drill.",
  },
  { name = "RUN", positional = true, required = true, help = "Name of the run." },
  {
    name = "CHECKPOINT_DIR",
    help = "Where COMMAND saves on the workers (else what the run was started with).",
  },
  {
    name = "BY",
    default = "signal",
    choices = { "signal", "maintenance" },
    help = "Of drill: what stops the run, our SIGTERM to every worker or the API's simulateMaintenanceEvent.",
  },
  {
    name = "WORKERS",
    help = "Of --BY=maintenance: who sees the event, one worker a slice, such as slice[0-1]/worker0 (the first).",
  },
  {
    name = "CAUSE",
    choices = { "maintenance", "spot", "user", "failure" },
    help = "Whose grace to give: maintenance 290 s, spot 30 s, user 300 s, failure 30 s (user, or that of BY).",
  },
  {
    name = "GRACE",
    type = "duration",
    help = "Time between TERM and KILL (that of CAUSE); of --BY=maintenance, what is judged from the notice on.",
  },
  {
    name = "STEP_NAME",
    help = "Lua pattern of a finished checkpoint's name, its step in parentheses, such as 'ckpt_(%d+)'.",
  },
  { name = "STEP_TIME", type = "duration", help = "Of drill: time of a step (what the logs say)." },
  {
    name = "BANDWIDTH",
    type = "number",
    default = 100,
    help = "Of drill: MB a second that a host writes, assumed in the arithmetic beforehand.",
  },
  { name = "COMMIT", type = "duration", default = 2, help = "Of drill: time to commit, assumed." },
  {
    name = "RESUME_TIMEOUT",
    type = "duration",
    default = 600,
    help = "Of drill: how long COMMAND may take from its second start to a step.",
  },
  {
    name = "TAKE",
    type = "boolean",
    default = false,
    help = "Take the run although a runner on another machine never said goodbye.",
  },
}

--- The step in a name, by the user's pattern.
local function step_of(pattern)
  if not pattern then
    return nil
  end
  local function refuse(why)
    err.raise({ code = "usage", message = ("--STEP_NAME=%s: %s"):format(pattern, why) })
  end
  if not pattern:find("%(.+%)") then
    refuse("the step must be in parentheses, as in 'ckpt_(%d+)'")
  end
  return function(name)
    -- Lua reads a pattern as it matches, so one that is malformed is found out here.
    local ok, digits = pcall(string.match, name, "^" .. pattern .. "$")
    if not ok then
      refuse((tostring(digits):gsub("^.-: ", "")))
    end
    return math.tointeger(tonumber(digits))
  end
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags, progress = context.flags, context.progress
  local rehearsal = flags.VERB == "drill"
  local by_event = flags.BY == "maintenance"
  if by_event and not rehearsal then
    err.raise({
      code = "usage",
      message = "--BY=maintenance is of drill: an event brings the end of the machines too",
    })
  elseif by_event and flags.CAUSE and flags.CAUSE ~= "maintenance" then
    err.raise({ code = "usage", message = "--BY=maintenance gives maintenance's grace: leave --CAUSE out" })
  elseif flags.WORKERS and not by_event then
    err.raise({ code = "usage", message = "--WORKERS is of --BY=maintenance; SIGTERM goes to every worker" })
  end
  local grace = flags.GRACE or drill.GRACE[flags.CAUSE or by_event and "maintenance" or "user"]
  local session <close> = drill.open({
    run = flags.RUN,
    progress = progress,
    directory = flags.CHECKPOINT_DIR,
    step_of = step_of(flags.STEP_NAME),
    take = flags.TAKE,
  })
  if rehearsal then
    local bandwidth = flags.BANDWIDTH * 1e6
    local estimate =
      session:estimate({ bandwidth = bandwidth, commit = flags.COMMIT, step_time = flags.STEP_TIME })
    progress:say("%s", drill.arithmetic(estimate, bandwidth, grace))
    if estimate.total and estimate.total > grace then
      progress:say("Warning: that is more than the grace; the last periodic checkpoint will have to do")
    end
  end
  local saved
  if by_event then
    progress:say("Maintenance event for %s, %g s from its notice", flags.WORKERS or "the first worker", grace)
    saved = session:save_by_event(grace, flags.WORKERS)
  else
    progress:say("TERM to %d workers, KILL after %g s", #session.fleet, grace)
    saved = session:save(grace, "autocheckpoint " .. flags.VERB)
  end
  for _, line in ipairs(session:table_lines()) do
    progress:say("%s", line)
  end
  progress:say(
    "Checkpoint: %s%s",
    saved.text,
    saved.seen_after and ("; seen there after %.1f s"):format(saved.seen_after) or ""
  )
  local resumed
  if rehearsal and #saved.running == 0 then
    progress:say(
      by_event and "Waiting for the machines, and for the same command" or "Starting the same command again"
    )
    resumed = session:resume(flags.RESUME_TIMEOUT)
    if resumed.first then
      progress:say(
        "It goes on at step %d; %s",
        resumed.first,
        resumed.by_runner and "its runner has it" or "it is left running: ciranda attach " .. flags.RUN
      )
    end
  end
  local verdict = drill.judge(saved, resumed)
  local status = verdict.ok and 0 or 1
  context.finish({
    kind = verdict.ok and "done" or "failed",
    status = status,
    message = verdict.ok and ("%s: step %d%s"):format(
      flags.VERB,
      saved.step,
      rehearsal and (" was saved in %.1f s and training resumed from it"):format(saved.took)
        or (" was saved in %.1f s"):format(saved.took)
    ) or ("%s failed: %s"):format(flags.VERB, table.concat(verdict.problems, "; ")),
  })
  return status
end

return M
