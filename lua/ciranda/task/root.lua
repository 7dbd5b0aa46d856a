--- The root task: running it from the main program, interrupting it, and noticing that nothing can go on.

local uv = require("luv")
local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local trace = require("ciranda.task.trace")

local FINAL = scheduler.FINAL
local M = {}

--- Cancel the root task. A program that is told to leave calls it.
---@param reason any?
---@return ciranda.Error? err the cancellation, or nil when nothing runs
function M.cancel(reason)
  local root = scheduler.root
  if not root or FINAL[root.state] then
    return nil
  end
  root:cancel(reason)
  return root.cancelled and root.cancelled.err or root.err
end

--- Ctrl-C: cancel the root task. Called by a signal's callback, or by a hook in running code, which then
--- raises what this returns.
---@param signal string? its name; "SIGINT"
---@return ciranda.Error
function M.interrupt(signal)
  signal = signal or "SIGINT"
  local err = errors.new({ code = "interrupted", message = "interrupted by " .. signal })
  err.signal = signal
  M.cancel(err)
  local task = scheduler.current
  return task and scheduler.interrupted(task, err) or err
end

--- Nothing can wake any task: say who waits for what, and unwind.
local function deadlock(root)
  local err = errors.new({
    code = "failed",
    message = ("deadlock: %s waits, and nothing is left that could wake it\n%s"):format(
      tostring(root),
      trace.dump(scheduler)
    ),
  })
  if scheduler.on_deadlock and scheduler.on_deadlock(err) then
    return
  end
  if root.cancelled then
    -- It was unwinding already, and now even that cannot go on.
    root.deadlock = root.deadlock or err
    scheduler.kill(root, err, "failed")
  else
    root.deadlock = err
    root:cancel(err)
  end
end

--- Run a function as the root task and drive the loop until it has ended, in the main program.
---@param fn function
---@param ... any
---@return boolean ok
---@return any ... its values; or the error, and the traceback for an error that carries none
function M.run(fn, ...)
  if type(fn) ~= "function" then
    errors.misuse(scheduler.user_level(), "task.run: a function expected, got %s", type(fn))
  end
  if scheduler.current then
    errors.misuse(
      scheduler.user_level(),
      "task.run_main: %s runs already; use task.run",
      tostring(scheduler.current)
    )
  elseif uv.loop_mode() then
    errors.misuse(
      scheduler.user_level(),
      "task.run: the loop is running already; a callback cannot run it again"
    )
  end
  local root = scheduler.new_task(nil, "main", fn, ...)
  scheduler.root = root
  while not FINAL[root.state] do
    -- What libuv says after the turn counts: a callback of this turn may have started something.
    if not uv.run("once") and not FINAL[root.state] and not scheduler.has_ready() then
      deadlock(root)
    end
  end
  scheduler.root = nil
  if root.deadlock then
    return false, root.deadlock, root.traceback
  end
  if root.state == "done" then
    return table.unpack(root.values, 1, root.values.n)
  end
  local cause = root.state == "cancelled" and root.err.cause
  if errors.is(cause, "interrupted") then
    return false, cause, root.traceback
  end
  return false, root.err, root.traceback
end

return M
