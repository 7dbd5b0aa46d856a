--- One run of the root task: signals, os.exit, the report of what went wrong, the exit status.
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")

local M = {}

--- KiB that may be allocated before the first cycle begins: a short program ends before it, and what it has loaded by
--- then would be looked at for nothing.
local FIRST_CYCLE = 8192

--- Exit statuses by signal: 128+n, and 129 for a terminal that went away.
local SIGNAL_STATUS = { SIGINT = 130, SIGTERM = 143, SIGHUP = 129 }

--- Lines of what is still running that somebody who leaves at once is shown.
local STILL = 20

local handlers = {} -- what recipes have put in front of the default, last first
local counts = {} -- how often each signal has come
local interrupted_by -- the signal that cancelled the root task
local exit_status -- what os.exit was given

--- Puts a handler in front of the default for SIGINT, SIGTERM, SIGHUP and, in a recipe, SIGUSR1, which means nothing
--- without a handler. It is called outside of tasks, must not wait, and returns true when it has dealt with the signal.
---@param handler fun(signal: string, count: integer): boolean?
---@return fun() remove takes it away again
function M.on_interrupt(handler)
  table.insert(handlers, 1, handler)
  return function()
    for i, other in ipairs(handlers) do
      if other == handler then
        table.remove(handlers, i)
        return
      end
    end
  end
end

--- The status for what ended the root task: a signal, or os.exit.
---@return integer status
---@return string? signal its name
function M.interrupted_status()
  if exit_status then
    return exit_status
  end
  return SIGNAL_STATUS[interrupted_by] or 130, interrupted_by
end

--- Tells who is in a `fleet:run`, unless that has been told since it began.
---@return boolean told
function M.tell_running()
  local running = package.loaded["ciranda.fleet.running"]
  return running ~= nil and running.tell()
end

local function on_signal(name)
  counts[name] = (counts[name] or 0) + 1
  if name == "SIGQUIT" then
    io.stderr:write(task.dump(), "\n")
    return
  end
  for _, handler in ipairs(handlers) do
    if handler(name, counts[name]) then
      return
    end
  end
  if not SIGNAL_STATUS[name] or (name == "SIGINT" and #handlers == 0 and M.tell_running()) then
    return
  end
  local stdio = package.loaded["ciranda.io.stdio"]
  if name == "SIGINT" and stdio and stdio.has_foreground() then
    return -- the program of os.execute that has the terminal got it as well, and it is meant for that one
  end
  if interrupted_by then
    io.stderr:write(
      ("ciranda: %s again: leaving without clean-up; still running:\n%s\n"):format(name, task.dump(STILL))
    )
    engine.exit_now(SIGNAL_STATUS[name])
  end
  interrupted_by = name
  task.cancel_root(("interrupted by %s"):format(name))
end

--- os.exit as an orderly shutdown: the root task is cancelled, its clean-up runs, the loop is drained. Where a task on
--- the way to the root does not have it, it is an error of who calls it.
local function orderly_exit(code)
  local one = task.current()
  while one do
    if one.no_exit then
      errors.raise { code = "failed", message = one.no_exit }
    end
    one = one.scope and one.scope.owner
  end
  if code == nil or code == true then
    code = 0
  elseif code == false then
    code = 1
  end
  exit_status = exit_status or math.tointeger(code) or 1
  task.cancel_root("os.exit")
  if task.current() then
    task.await(function()
      return function()
        return true
      end
    end)
  end
  errors.raise { code = "cancelled", message = "os.exit" }
end

--- Seconds that a turn of the loop may take before it is a warning. The engine tells from 0.1 s on, which a busy
--- machine alone can take; whoever writes a script wants to know, whoever runs a recipe can do nothing about it.
M.patience = 0

--- A turn of the loop that took long holds up whatever else is running; alone it harms nobody.
local reported = {}
local function on_blocked(traceback, seconds)
  local first = next(scheduler.live)
  if not (first and next(scheduler.live, first)) or reported[traceback] then
    return
  end
  reported[traceback] = true
  require("ciranda.io.log")[seconds < M.patience and "debug" or "warn"](
    ("the loop was held up for %.0f ms by:\n%s"):format(seconds * 1000, traceback)
  )
end

--- What an uncaught error looks like to a person.
---@param err any
---@param trace? string for a value that carries no traceback of its own
---@return integer status
local function report(err, trace)
  local code = errors.is(err) and err.code or nil
  if code == "usage" then
    io.stderr:write("ciranda: ", err.message, "\n")
    return 2
  end
  io.stderr:write("ciranda: ", errors.text(err), "\n")
  local traceback = type(err) == "table" and err.traceback or trace
  if
    traceback and (code == nil or code == "misuse" or code == "internal" or os.getenv("CIRANDA_TRACEBACK"))
  then
    io.stderr:write(traceback, "\n")
  end
  return code == "deadline" and 124 or 1
end

--- Runs fn as the root task.
---@param fn fun(): integer? its value is the exit status, nil is 0
---@return integer status
function M.run(fn)
  -- A cycle begins when memory has grown fourfold, not twofold: most programs are short and small.
  collectgarbage("incremental", 400, 0, 0)
  collectgarbage("restart")
  collectgarbage("step", -FIRST_CYCLE) -- as if so much had been freed
  require("ciranda.io.stdio").install()
  require("ciranda.task.loader").install()
  rawset(os, "exit", orderly_exit)
  engine.on_signal(on_signal)
  engine.on_blocked(on_blocked)
  engine.on_fatal(function(err)
    if exit_status and errors.is(err, "cancelled") then
      return -- os.exit in a callback: there is no task to unwind
    end
    report(err)
    exit_status = exit_status or 1
    task.cancel_root("an error in a callback")
  end)
  for _, name in ipairs { "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT" } do
    engine.catch_signal(name)
  end
  local ok, value, traceback = task.run_main(fn)
  io.stdout:flush()
  if exit_status then
    return exit_status
  elseif ok then
    return math.tointeger(value) or 0
  elseif interrupted_by or errors.is(value, "interrupted") then
    return (M.interrupted_status())
  end
  return report(value, traceback)
end

return M
