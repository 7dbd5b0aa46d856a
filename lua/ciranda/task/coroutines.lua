--- Coroutines inside tasks: a wait in a generator suspends the task, not the generator.
---
--- Lua has one yield for two purposes: a generator gives a value to its consumer, and a task gives way to the
--- scheduler. `install` replaces coroutine.create, wrap, resume, close and yield by versions that pass the
--- scheduler's sentinel outwards, coroutine by coroutine, and go on where they were. Outside tasks they do
--- what the stock functions do.
---
--- The body of a coroutine made inside a task runs under xpcall, so that its `<close>` variables are closed
--- while it can still wait: an error that nothing catches leaves them to lua_resetthread, which cannot
--- suspend. That costs C stack, of which Lua allows 200 levels, so coroutines nested deeper than
--- GUARDED_DEPTH go without: more than 150 can be nested, and the `<close>` of the deepest cannot wait when
--- an error leaves them.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local trace = require("ciranda.task.trace")

local M = {}

local WAIT = scheduler.WAIT
local stock_create, stock_resume, stock_yield = coroutine.create, coroutine.resume, coroutine.yield
local stock_close, stock_running, stock_status = coroutine.close, coroutine.running, coroutine.status

local GUARDED_DEPTH = 32

-- Coroutines that wait, each with the task that runs it. Nobody else may resume or close them.
---@type table<thread, ciranda.Task>
local held = setmetatable({}, { __mode = "k" })

local function pass_result(ok, ...)
  if ok then
    return ...
  end
  error((...), 0)
end

local function protect(fn)
  return function(...)
    return pass_result(xpcall(fn, scheduler.note_error, ...))
  end
end

--- Refuse an argument in the stock library's words, at the line of the user.
local function check_type(value, expected, name)
  if type(value) ~= expected then
    local what = expected == "thread" and "coroutine" or expected
    error(("bad argument #1 to '%s' (%s expected, got %s)"):format(name, what, type(value)), 3)
  end
end

local function create(fn)
  local task = scheduler.current
  if task and #(task.chain or "") < GUARDED_DEPTH then
    return stock_create(protect(fn))
  end
  return stock_create(fn)
end

--- coroutine.create.
---@param fn function
---@return thread
function M.create(fn)
  check_type(fn, "function", "create")
  return create(fn)
end

--- A nested coroutine has stopped running: note its consumer's frames when it failed.
local function leave(task, co, ok, err)
  local chain = task.chain
  chain[#chain] = nil
  held[co] = nil
  scheduler.set_running(stock_running())
  local rising = task.rising
  if not ok and rising and rawequal(rising.err, err) then
    rising.text = rising.text .. "\n" .. trace.clean(debug.traceback(nil, 2))
    if errors.is(err) and err.traceback then
      err.traceback = err.traceback .. "\n" .. trace.clean(debug.traceback(nil, 2))
    end
  end
end

local function passed(task, co, ok, first, ...)
  if ok and rawequal(first, WAIT) then
    stock_yield(WAIT)
    scheduler.set_running(co)
    return passed(task, co, stock_resume(co))
  end
  leave(task, co, ok, first)
  return ok, first, ...
end

--- coroutine.resume.
---@param co thread
function M.resume(co, ...)
  check_type(co, "thread", "resume")
  local task = scheduler.current
  if not task then
    return stock_resume(co, ...)
  end
  if stock_status(co) ~= "suspended" then
    return stock_resume(co, ...)
  end
  local holder = held[co]
  if holder then
    return false, ("cannot resume a coroutine that waits in %s"):format(tostring(holder))
  end
  local chain = task.chain
  if not chain then
    chain = {}
    task.chain = chain
  end
  chain[#chain + 1] = co
  held[co] = task
  scheduler.set_running(co)
  return passed(task, co, stock_resume(co, ...))
end

--- The position of the caller of a wrapped function, as luaL_where gives it. `unwrap` is tail-called by that
--- function, so the caller is the next one on the stack.
local function where()
  local info = debug.getinfo(3, "Sl")
  return info and info.currentline > 0 and ("%s:%d: "):format(info.short_src, info.currentline) or ""
end

local function unwrap(co, ok, first, ...)
  if ok then
    return first, ...
  end
  local err = first
  local status = stock_status(co)
  if status == "dead" then
    local closed, failure = stock_close(co)
    if not closed then
      err = failure
    end
  end
  if type(err) == "string" then
    local task = scheduler.current
    local rising = task and task.rising
    local raised = where() .. err
    if rising and rawequal(rising.err, err) then
      rising.err = raised
    end
    err = raised
  end
  error(err, 0)
end

--- coroutine.wrap.
---@param fn function
---@return function
function M.wrap(fn)
  check_type(fn, "function", "wrap")
  local co = create(fn)
  return function(...)
    return unwrap(co, M.resume(co, ...))
  end
end

--- coroutine.close. Its `__close` metamethods cannot wait.
---@param co thread
function M.close(co)
  check_type(co, "thread", "close")
  local holder = held[co]
  if holder then
    errors.misuse(2, "cannot close a coroutine that waits in %s; cancel the task", tostring(holder))
  end
  return stock_close(co)
end

--- coroutine.yield. At the top of a task there is nobody to take the value.
function M.yield(...)
  local task = scheduler.current
  if task and stock_running() == task.co then
    errors.misuse(
      2,
      "coroutine.yield at the top of %s: nothing resumes it; use task.yield() to let others run, "
        .. "or coroutine.wrap around the generator",
      tostring(task)
    )
  end
  return stock_yield(...)
end

--- Put the replacements in place. Once a process: the second call finds the first one's.
function M.install()
  local registry = debug.getregistry()
  if registry["ciranda.task.coroutines"] then
    return
  end
  registry["ciranda.task.coroutines"] = M
  for _, name in ipairs({ "create", "wrap", "resume", "close", "yield" }) do
    rawset(coroutine, name, M[name])
  end
end

return M
