--- Where a job goes on after a drill: at which step it begins, once it has been stopped and started again.
local clock = require("ciranda.io.clock")
local drill_event = require("ciranda.run.drill_event")
local err = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local launch = require("ciranda.run.launch")
local repair = require("ciranda.run.repair")
local task = require("ciranda.task")

local M = {}

--- Once a process has shown where it resumes, seconds the others get to say the same.
local COMPANY = 5
--- Seconds between two looks at the journal or a log.
local LOOK_EVERY = 0.5
--- Seconds the run's own runner gets to see the end, and to leave when it does not go on.
local RUNNER_LEAVES = 60
--- Bytes of a log's beginning in which the first step is looked for.
local HEAD = 65536

--- Waits until the run's runner has gone on with another attempt, or has left.
---@async
---@param session ciranda.drill.Session
---@return table? attempt the runner's next one as the journal has it; nil when nobody has the run now
-- Raises "busy" when it does neither in time.
local function after_runner(session)
  local run, last = session.options.run, session.last
  local patient = session.event and last.restarts and (last.restarts.preempted or 0) > 0
  local deadline = clock.now() + (patient and repair.TIMEOUT or 0) + RUNNER_LEAVES
  while true do
    local ok, journal = pcall(journals.open, run)
    if ok then
      journal:close(0, "interrupted")
      return nil
    elseif not err.is(journal, "busy") then
      error(journal, 0)
    end
    local state = journals.read(run)
    local newest = state and state.attempts[#state.attempts]
    if newest and newest.attempt ~= last.attempt and newest.gone then
      return newest
    elseif clock.now() > deadline then
      error(journal, 0)
    end
    task.sleep(LOOK_EVERY)
  end
end

--- Looks at the logs of an attempt that somebody else follows until they have shown a step.
---@async
---@param session ciranda.drill.Session
---@param attempt table as the journal has it
---@param note fun(worker: ciranda.Worker, step: integer): boolean whether all have shown one
---@return { status: integer }? ended it ended before; cancelled otherwise
local function watch_logs(session, attempt, note)
  local run = session.options.run
  local fleet <close> = known.fleet(attempt, session.options.connect_options or {})
  local command = ("head -c %d .ciranda/%s/%s/log"):format(HEAD, run, attempt.attempt)
  while true do
    for _, result in ipairs(fleet:run(command, { timeout = 30 })) do
      local step = not result.err and (result.stdout or ""):match("completed step: (%d+)[^%d]")
      if step and note(result.worker, math.tointeger(tonumber(step))) then
        return nil
      end
    end
    for _, other in ipairs((journals.read(run) or { attempts = {} }).attempts) do
      if other.attempt == attempt.attempt and other.ended then
        return { status = other.ended.status }
      end
    end
    task.sleep(LOOK_EVERY)
  end
end

---@class ciranda.drill.Resumed
---@field first integer? the first step that was done
---@field disagree boolean workers began at different steps
---@field ended { status: integer }? the command ended before it had done a step
---@field by_runner boolean? the run's own runner started it, and has it

--- Waits for first steps: `note` takes them, `wait` returns when all have shown one, or one has and the others not
--- soon after.
---@param count integer workers
---@return { resumed: ciranda.drill.Resumed, note: function, wait: fun(seconds: number) }
local function first_steps(count)
  local first, resumed = {}, { disagree = false }
  local seen, all = task.event(), task.event()
  return {
    resumed = resumed,
    note = function(worker, step)
      if not first[worker] then
        first[worker], count = step, count - 1
        resumed.disagree = resumed.disagree or resumed.first ~= nil and resumed.first ~= step
        resumed.first = resumed.first or step
        seen:set()
      end
      if count == 0 then
        all:set()
      end
      return count == 0
    end,
    has = function(worker)
      return first[worker] ~= nil
    end,
    wait = function(seconds)
      if drill_event.comes(seen, seconds) then
        drill_event.comes(all, COMPANY)
      end
    end,
  }
end

--- Sees where the runner's next attempt begins.
---@param session ciranda.drill.Session
---@param attempt table as the journal has it
---@param seconds number
---@return ciranda.drill.Resumed
local function watch_runner(session, attempt, seconds)
  local steps = first_steps(#attempt.workers)
  steps.resumed.by_runner = true
  task.race({
    function()
      steps.wait(seconds)
    end,
    function()
      steps.resumed.ended = watch_logs(session, attempt, steps.note)
    end,
  })
  return steps.resumed
end

--- Starts the command again.
---@async
---@param session ciranda.drill.Session
---@param seconds number
---@return ciranda.drill.Resumed
local function start_again(session, seconds)
  local last, options = session.last, session.options
  local connect_options = options.connect_options or {}
  local environment_of
  if session.event or last.environment_of then
    -- The machines restart, and what each was told besides is not in the journal.
    local fleet, note, found = known.renew(last, connect_options, options.progress)
    session.fleet:close()
    session.fleet, environment_of = fleet, found
    if note then
      options.progress:say("%s", note)
    end
  end
  local steps, tails, handler = first_steps(#session.fleet), {}, nil
  local function on_bytes(worker, bytes)
    if not steps.has(worker) then
      tails[worker] = ((tails[worker] or "") .. bytes):sub(-HEAD)
      local step = tails[worker]:match("completed step: (%d+)[^%d]")
      if step then
        steps.note(worker, math.tointeger(tonumber(step)))
      end
    end
  end
  local scope <close> = task.scope()
  local waiting = scope:spawn(function()
    steps.wait(seconds)
    -- While workers are still staged the launch has no use for a signal.
    while not (handler and handler("SIGHUP", 1)) do
      task.sleep(LOOK_EVERY)
    end
  end)
  -- Whoever takes it up (`attach`) finds all that the run was started with.
  local again = known.kept(last)
  again.fleet, again.run, again.directory = session.fleet, options.run, last.directory
  again.recipe, again.once, again.use_existing = "autocheckpoint", true, true
  again.environment_of = environment_of
  again.checkpoint_directory = session.directory
  again.progress, again.json = options.progress, true
  again.on_interrupt = function(given)
    handler = given
    return function()
      handler = nil
    end
  end
  again.on_bytes = on_bytes
  session.lease = nil -- it is that run's now
  local result = launch.run(again)
  waiting:cancel("the end")
  if result.kind ~= "detached" then
    steps.resumed.ended = result
  end
  return steps.resumed
end

--- Has the same command go on in its directory until it has shown at which step it begins; then leaves it alone. It is
--- started here, unless the run's own runner does so after a maintenance event.
---@async
---@param session ciranda.drill.Session
---@param seconds number how long to wait for a step
---@return ciranda.drill.Resumed
-- Raises "busy" when the runner stays and does nothing; what `repair.renew` raises.
function M.resume(session, seconds)
  local attempt = after_runner(session)
  return attempt and watch_runner(session, attempt, seconds) or start_again(session, seconds)
end

return M
