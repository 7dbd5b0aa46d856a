--- Ways to run several functions at once, or one within limits. Each opens a scope of its own.

local uv = require("luv")
local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local scopes = require("ciranda.task.scope")
local trace = require("ciranda.task.trace")

local await = scheduler.await
local unpack = table.unpack
local M = {}

-- libuv counts milliseconds in 64 bits; more than this (285,000 years) is "for ever".
local LONGEST_MS = 9007199254740992

--- Seconds as whole milliseconds, never rounded down: a wait is not shorter than asked for.
local function milliseconds(seconds, what)
  if type(seconds) ~= "number" or seconds ~= seconds or seconds < 0 then
    errors.misuse(
      scheduler.user_level(),
      "%s: seconds must be a number of at least 0, got %s",
      what,
      tostring(seconds)
    )
  end
  return math.tointeger(math.ceil(math.min(seconds * 1000, LONGEST_MS)))
end

--- Call a function once after a time. Returns a function that stops it, which may be called again.
local function after(ms, fn)
  local timer = uv.new_timer()
  uv.update_time()
  timer:start(ms, 0, function()
    timer:close()
    fn()
  end)
  return function()
    if not timer:is_closing() then
      timer:close()
    end
    return true
  end
end

--- Wait for a time.
---@async
---@param seconds number at least 0; math.huge waits until the task is cancelled
function M.sleep(seconds)
  local ms = milliseconds(seconds, "task.sleep")
  await(function(done)
    return after(ms, done)
  end, ("sleep of %g s"):format(seconds))
end

local function yield_start(done)
  done()
end

--- Let the other tasks and the loop run, then go on.
---@async
function M.yield()
  await(yield_start, "its turn")
end

--- Run a function during which the present task is not cancelled: a cancellation waits until the first wait
--- after it, and the grace begins then. The function needs a deadline of its own.
---@async
---@generic T
---@param fn fun(...): T
---@return T
function M.shield(fn, ...)
  local task = scheduler.check_can_wait()
  task.shielded = (task.shielded or 0) + 1
  local _ <close> = setmetatable({}, {
    __close = function()
      task.shielded = task.shielded - 1
      if task.shielded == 0 then
        scheduler.shield_ended(task)
      end
    end,
  })
  return fn(...)
end

local function check_functions(list, what)
  if type(list) ~= "table" then
    errors.misuse(scheduler.user_level(), "%s: a list of functions expected, got %s", what, type(list))
  end
  for index = 1, #list do
    if type(list[index]) ~= "function" then
      errors.misuse(
        scheduler.user_level(),
        "%s: entry %d must be a function, got %s",
        what,
        index,
        type(list[index])
      )
    end
  end
end

--- Run functions at once and wait for all. The first failure cancels the others and rises.
---@async
---@param list (fun(): any)[]
---@return any[] values the first value of each, in order; `n` is their number, since values may be nil
function M.all(list)
  check_functions(list, "task.all")
  local count = #list
  local tasks = {}
  do
    local scope <close> = scopes.new()
    for index = 1, count do
      tasks[index] = scope:spawn(list[index])
    end
  end
  local values = { n = count }
  for index = 1, count do
    values[index] = tasks[index].values[2]
  end
  return values
end

--- Call a function for each entry of a list, at most `limit` at once. The first failure cancels the rest and
--- rises.
---@async
---@generic T, R
---@param list T[]
---@param fn fun(entry: T, index: integer): R
---@param limit integer? at least 1; without one, all at once
---@return R[] values the first value of each, in order; `n` is their number
function M.map(list, fn, limit)
  if type(list) ~= "table" then
    errors.misuse(2, "task.map: a list expected, got %s", type(list))
  end
  if type(fn) ~= "function" then
    errors.misuse(2, "task.map: a function expected, got %s", type(fn))
  end
  if limit ~= nil and (math.type(limit) ~= "integer" or limit < 1) then
    errors.misuse(2, "task.map: the limit must be a positive integer, got %s", tostring(limit))
  end
  local count = #list
  local values = { n = count }
  local name = scheduler.default_name(fn)
  local taken = 0
  local function worker()
    while taken < count do
      taken = taken + 1
      local index = taken
      values[index] = fn(list[index], index)
    end
  end
  do
    local scope <close> = scopes.new()
    for _ = 1, math.min(limit or count, count) do
      scope:spawn(name, worker)
    end
  end
  return values
end

--- Run functions at once; the first to end decides. The others are cancelled and waited for; what they raise
--- in their clean-up does not count.
---@async
---@param list (fun(): any)[] at least one
---@return integer index of the first that ended
---@return any ... its values; raises what it raised when it failed
function M.race(list)
  check_functions(list, "task.race")
  if #list == 0 then
    errors.misuse(2, "task.race: at least one function expected")
  end
  local index_of = {}
  local winner, tell
  do
    local scope <close> = scopes.new(function(task)
      if not winner then
        winner = task
        if tell then
          tell()
        end
      end
    end)
    for index = 1, #list do
      index_of[scope:spawn(list[index])] = index
    end
    await(function(done)
      tell = done
      return function()
        return true
      end
    end, "the first of a race")
    scope:cancel("another one of the race was first")
  end
  if winner.state == "done" then
    return index_of[winner], unpack(winner.values, 2, winner.values.n)
  end
  scheduler.current.rising = { err = winner.err, text = winner.traceback }
  error(winner.err, 0)
end

--- Run a function with a limit of time. It runs as a task of its own, which is cancelled when the time is up;
--- the call returns when its clean-up has ended.
---@async
---@param seconds number at least 0
---@param fn function
---@param ... any its arguments
---@return any ... its values; raises what it raised, or the error "timeout"
function M.timeout(seconds, fn, ...)
  local ms = milliseconds(seconds, "task.timeout")
  if type(fn) ~= "function" then
    errors.misuse(2, "task.timeout: a function expected, got %s", type(fn))
  end
  local task, expired, where, tell
  do
    local scope <close> = scopes.new(function()
      if tell then
        tell()
      end
    end)
    task = scope:spawn(fn, ...)
    local stop
    await(function(done)
      tell = done
      stop = after(ms, function()
        expired = true
        done()
      end)
      return stop
    end, ("%s, for at most %g s"):format(tostring(task), seconds))
    stop()
    if expired and not task:ended() then
      where = trace.with_waiters(task, trace.of_task(task))
      task:cancel(("the time limit of %g s is over"):format(seconds))
    end
  end
  if task.state == "done" and not (task.cancelled and task.cancelled.raised) then
    return unpack(task.values, 2, task.values.n)
  end
  if expired and where then
    errors.raise({
      code = "timeout",
      message = ("%s did not end within %g s"):format(tostring(task), seconds),
      cause = task.state == "failed" and task.err or nil,
      traceback = where,
    })
  end
  scheduler.current.rising = { err = task.err, text = task.traceback }
  error(task.err, 0)
end

return M
