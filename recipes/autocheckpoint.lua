--- autocheckpoint: tells a live run to save and stop, or rehearses it: save, stop, start again, resume.
local drill = require("ciranda.run.drill")
local err = require("ciranda.io.error")

local M = {
  summary = "have a live run save a checkpoint and stop, or rehearse it",
  description = "autocheckpoint save RUN: every worker gets SIGTERM and time to save; what is on disk afterwards "
    .. "decides, not an exit status. autocheckpoint drill RUN: the same on purpose, then the same COMMAND is started "
    .. "again, must go on from the step saved, and is left running (`ciranda attach RUN`). Ends with 1 when nothing "
    .. "was saved, when the grace would have been exceeded, or when it resumed elsewhere. The run's own runner, "
    .. "where there is one, sees its command end.",
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
    name = "CAUSE",
    default = "user",
    choices = { "maintenance", "spot", "user", "failure" },
    help = "Whose grace to give: maintenance 290 s, spot 30 s, user 300 s, failure 30 s.",
  },
  { name = "GRACE", type = "duration", help = "Time between TERM and KILL (that of CAUSE)." },
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
  local grace = flags.GRACE or drill.GRACE[flags.CAUSE]
  local session <close> = drill.open({
    run = flags.RUN,
    progress = progress,
    directory = flags.CHECKPOINT_DIR,
    step_of = step_of(flags.STEP_NAME),
    take = flags.TAKE,
  })
  local rehearsal = flags.VERB == "drill"
  if rehearsal then
    local bandwidth = flags.BANDWIDTH * 1e6
    local estimate =
      session:estimate({ bandwidth = bandwidth, commit = flags.COMMIT, step_time = flags.STEP_TIME })
    progress:say("%s", drill.arithmetic(estimate, bandwidth, grace))
    if estimate.total and estimate.total > grace then
      progress:say("Warning: that is more than the grace; the last periodic checkpoint will have to do")
    end
  end
  progress:say("TERM to %d workers, KILL after %g s", #session.fleet, grace)
  local saved = session:save(grace, "autocheckpoint " .. flags.VERB)
  for _, line in ipairs(session:table_lines()) do
    progress:say("%s", line)
  end
  progress:say(
    "Checkpoint: %s%s",
    saved.text,
    saved.seen_after and ("; seen there after %.1f s"):format(saved.seen_after) or ""
  )
  local resumed
  if rehearsal then
    progress:say("Starting the same command again")
    resumed = session:resume(flags.RESUME_TIMEOUT)
    if resumed.first then
      progress:say("It goes on at step %d; it is left running: ciranda attach %s", resumed.first, flags.RUN)
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
