--- stop: ends a run in order, wherever its runner is, or without one.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local launch = require("ciranda.run.launch")
local runs = require("ciranda.run.runs")
local task = require("ciranda.task")
local uv = require("luv")

local M = {
  summary = "stop a run: TERM, time to save, KILL",
  description = "A run with a runner on this machine is stopped by it, as its first Ctrl-C would: every worker gets "
    .. "TERM and time to save. A run whose runner is gone is taken up and stopped in the same way, and its logs are "
    .. "brought home. A run that has ended is left alone. Status 0 means that nothing of it runs any more.",
  flags = {
    { name = "RUN", positional = true, required = true, help = "Name of the run." },
    {
      name = "GRACE",
      type = "duration",
      help = "Of a run without a runner: time between TERM and KILL (what it was started with).",
    },
    {
      name = "TAKE",
      type = "boolean",
      default = false,
      help = "Stop the run although a runner on another machine never said goodbye.",
    },
  },
}

--- Seconds that a runner may take beyond the grace, and between two looks at its journal.
local BEYOND, LOOK = 150, 0.2
--- Seconds that another program which has taken the run up may need until it stops it.
local TAKEN = 5
--- The grace of a run that does not say.
local GRACE = require("ciranda.run.notices").GRACE.user

---@param run string
---@param text string what has not happened in time
-- Raises "deadline".
local function refuse_late(run, text)
  err.raise({ code = "deadline", op = "stop", target = run, message = ("run %s: %s"):format(run, text) })
end

--- Whoever has taken the run up may be another stop, which one more signal would have it leave: waits until that one
--- has begun. One that says of itself that it stops is waited for: its workers may be long in answering.
---@async
---@param context ciranda.cli.Context
---@param state ciranda.journal.State
---@param limit number until when, on the clock that only grows
---@return ciranda.journal.State
-- Raises "deadline".
local function settled(context, state, limit)
  local awaited
  while true do
    local open, runner = runs.open_attempt(state), runs.runner(state)
    if
      not open
      or not runner
      or runner.us <= open.gone
      or runs.stop_begun(open)
      or not runner.stops and os.time() > runner.us / 1e6 + TAKEN
    then
      return state
    elseif clock.now() > limit then
      refuse_late(state.run, ("the stop by process %d has not begun in time"):format(runner.pid))
    elseif runner.stops and awaited ~= runner.id then
      awaited = runner.id
      context.progress:say("Run %s: process %d has taken it up to stop it", state.run, runner.pid)
      uv.kill(runner.pid, "sigcont") -- Ctrl-Z may have suspended it
    end
    task.sleep(LOOK)
    state = runs.read(state.run)
  end
end

--- The time between TERM and KILL that a run's runner gives.
---@param state ciranda.journal.State
---@return number seconds
local function grace_of(state)
  local begun = runs.stop_begun(runs.open_attempt(state))
  return (begun or state.attempts[#state.attempts] or {}).grace or GRACE
end

--- Asks the runner on this machine to stop, unless somebody has done so (one more signal would have it leave the stop),
--- and waits until it has left.
---@async
---@return ciranda.journal.State? now nil when the run has ended
local function stop_runner(context, state, runner)
  local begun = runs.stop_begun(runs.open_attempt(state))
  local grace = grace_of(state)
  context.progress:say(
    begun and "Run %s: its runner (process %d) is stopping it already%s"
      or "Run %s: asking its runner (process %d) to stop%s",
    state.run,
    runner.pid,
    context.flags.GRACE
        and ("; it gives %g s, as it was told (--GRACE is for a run without a runner)"):format(grace)
      or ""
  )
  if not begun then
    local ok, problem, name = uv.kill(runner.pid, "sigterm")
    if not ok and name ~= "ESRCH" then -- one that has ended meanwhile needs no signal
      err.raise(err.wrap(problem, { op = "stop", target = "process " .. runner.pid }))
    end
  end
  uv.kill(runner.pid, "sigcont") -- one that Ctrl-Z has suspended hears nothing before
  local deadline = grace + BEYOND
  local now
  local left, why = pcall(task.timeout, deadline, function()
    local other
    repeat
      task.sleep(LOOK)
      now = runs.read(state.run)
      other = runs.runner(now)
    until not other or other.id ~= runner.id -- who has taken it up meanwhile has not been asked
  end)
  if not left then
    if not err.is(why, "timeout") then
      error(why, 0)
    end
    refuse_late(state.run, ("its runner (process %d) has not ended within %d s"):format(runner.pid, deadline))
  end
  if runs.open_attempt(now) then
    return now -- it left the job alone: detached, or died of it
  end
  local standing = runs.standing(state.run)
  context.progress:say(
    "Run %s has ended: %s, exit status %s",
    state.run,
    standing.kind or "-",
    standing.status or "-"
  )
end

--- Takes the run up, and stops it as its own runner would.
local function take_up(context, run)
  local scope <close> = task.scope()
  local handler
  local stopping = scope:spawn(function()
    -- Until the run is taken up the launch has no use for a signal.
    while not (handler and handler("SIGTERM", 1)) do
      task.sleep(0.02)
    end
  end)
  local result = launch.attach({
    run = run,
    connect_options = {},
    progress = context.progress,
    json = true, -- the logs are brought home, and not shown
    grace = context.flags.GRACE,
    take = context.flags.TAKE,
    stops = true,
    on_interrupt = function(fn)
      handler = fn
      return context.on_interrupt(fn)
    end,
  })
  stopping:cancel("it is over")
  return result
end

--- Stops it; begins anew when somebody else has taken the run up meanwhile, until the time of a stop is over.
---@async
---@param context ciranda.cli.Context
---@param limit number? when that is, on the clock that only grows
---@return integer status
local function stop(context, limit)
  local flags = context.flags
  local state = runs.read(flags.RUN)
  local now = clock.now()
  limit = limit or now + grace_of(state) + BEYOND
  if now > limit then
    local seconds = grace_of(state) + BEYOND
    refuse_late(state.run, ("not stopped within %d s: others take it up and leave it again"):format(seconds))
  end
  local runner, life = runs.runner(state)
  if life == "unknown" and not flags.TAKE then
    err.raise({
      code = "busy",
      op = "stop",
      target = state.run,
      message = (
        "run %s is in the hands of process %d on %s; stop it there, or, if that machine is gone, add "
        .. "--TAKE=true"
      ):format(state.run, runner.pid, runner.host),
    })
  elseif life == "alive" then
    state = settled(context, state, limit)
    runner = runs.runner(state)
    if not runner then
      return stop(context, limit)
    end
    state = stop_runner(context, state, runner)
    if not state then
      return 0
    elseif runs.runner(state) then
      return stop(context, limit)
    end
  end
  if not runs.open_attempt(state) then
    local standing = runs.standing(state.run)
    if standing.state == "job" then
      err.raise({
        code = "unsupported",
        op = "stop",
        target = state.run,
        message = ("run %s is a job that runs by itself: ciranda qr delete %s ends it with its machines"):format(
          state.run,
          table.concat(standing.objects, " ")
        ),
      })
    end
    local given = launch.give_back({ run = state.run, take = flags.TAKE })
    context.progress:say(
      given and "Nothing of run %s is running; its workers are given back" or "Nothing of run %s is running",
      state.run
    )
    return 0
  end
  local ok, result = pcall(take_up, context, state.run)
  if not ok then
    life = select(2, runs.runner(runs.read(state.run)))
    if err.is(result, "busy") and result.op == "journal" and life ~= "unknown" then
      return stop(context, limit) -- somebody else was first, and is waited for
    end
    error(result, 0)
  end
  if result.kind == "interrupted" or result.kind == "done" then
    context.finish({ kind = "done", status = 0, message = ("Run %s is stopped"):format(state.run) })
    return 0
  end
  context.finish(result)
  return result.status
end

---@async
---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  return stop(context)
end

return M
