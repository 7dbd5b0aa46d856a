--- Structured concurrency: straight-line code that waits, in tasks that no block outlives.
---
---     local task = require("ciranda.task")
---
---     task.run(function()
---       local scope <close> = task.scope()
---       local a = scope:spawn(fetch, "a")
---       local b = scope:spawn(fetch, "b")
---       print(a:wait(), b:wait())
---     end)                            -- the scope's end waits for both; a failure of one cancels the other

local combine = require("ciranda.task.combine")
local coroutines = require("ciranda.task.coroutines")
local errors = require("ciranda.io.error")
local root = require("ciranda.task.root")
local scheduler = require("ciranda.task.scheduler")
local scopes = require("ciranda.task.scope")
local sync = require("ciranda.task.sync")
local trace = require("ciranda.task.trace")

coroutines.install()

local M = {
  all = combine.all,
  map = combine.map,
  race = combine.race,
  timeout = combine.timeout,
  sleep = combine.sleep,
  yield = combine.yield,
  shield = combine.shield,
  await = scheduler.await,
  semaphore = sync.semaphore,
  queue = sync.queue,
  event = sync.event,
  run_main = root.run,
  cancel_root = root.cancel,
  interrupt = root.interrupt,
  shutdown = scheduler.shutdown,
}

--- Open a scope: `local s <close> = task.scope()`. The block's end waits for the tasks started in it.
---@return ciranda.Scope
function M.scope()
  return scopes.new()
end

--- Start a task in the innermost open scope of the present task.
---@param name string?
---@param fn function
---@param ... any
---@return ciranda.Task
---@overload fun(fn: function, ...): ciranda.Task
function M.spawn(name, fn, ...)
  local task = scheduler.current
  local list = task and task.scopes
  local scope = list and list[#list]
  if not scope or scope.state ~= "open" then
    errors.misuse(
      2,
      "task.spawn: no scope is open here, and a task must not outlive the block that starts it; "
        .. "write first: local s <close> = task.scope()"
    )
  end
  return scope:spawn(name, fn, ...)
end

--- The running task, or nil outside tasks.
---@return ciranda.Task?
function M.current()
  return scheduler.current
end

--- Wait for a function of the engine, whose last argument is a callback `function(err, value)` and which
--- returns a handle with `:cancel()`.
---@async
---@param fn function
---@param ... any its arguments before the callback
---@return any value
function M.call(fn, ...)
  local args = table.pack(...)
  return scheduler.await(function(done)
    args[args.n + 1] = function(err, ...)
      if err ~= nil then
        return done(errors.wrap(err))
      end
      return done(nil, ...)
    end
    local handle = fn(table.unpack(args, 1, args.n + 1))
    return function()
      if handle then
        handle:cancel()
      end
      return false
    end
  end, "an engine call")
end

--- Run a function as the root task and drive the loop until it has ended. Inside a task it runs as a task of
--- its own, which is waited for.
---@param fn function
---@param ... any
---@return any ... its values; raises what it raised
function M.run(fn, ...)
  if scheduler.current then
    local scope <close> = scopes.new()
    return scope:spawn(fn, ...):wait()
  end
  local result = table.pack(root.run(fn, ...))
  if result[1] then
    return table.unpack(result, 2, result.n)
  end
  error(result[2], 0)
end

--- A text with every task: what it waits for, its frames, its children. For SIGQUIT, and for a deadlock.
---@param most integer? lines that are shown; how many more there are is then said
---@return string
function M.dump(most)
  return trace.dump(scheduler, most)
end

--- The seconds a cancelled task has for its clean-up.
---@return number
function M.grace()
  return scheduler.grace
end

--- Set the seconds that tasks cancelled from now on have for their clean-up.
---@param seconds number at least 0
---@return number previous
function M.set_grace(seconds)
  if type(seconds) ~= "number" or seconds ~= seconds or seconds < 0 then
    errors.misuse(2, "task.set_grace: a number of at least 0 expected, got %s", tostring(seconds))
  end
  local previous = scheduler.grace
  scheduler.grace = seconds
  return previous
end

return M
