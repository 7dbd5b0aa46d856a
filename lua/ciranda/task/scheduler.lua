--- The scheduler: tasks are coroutines, and one luv handle drains the queue of those that can go on.
---
--- A task gives up control in one place only, `await`, by yielding one sentinel. A completion never resumes
--- it: it stores its result and puts the task on the ready queue, which an idle handle of the loop drains. So
--- a completion that comes at once needs no special case, and nothing re-enters.
---
--- What a task can still do to stall the rest: compute without waiting, call a C function that blocks (a
--- pattern match without end, a read from a slow device), or use a blocking function of another library.
---
--- There is one scheduler a process. A test runner that loads this module again gets the same one.

local REGISTRY_KEY = "ciranda.task.scheduler"
local registry = debug.getregistry()
if registry[REGISTRY_KEY] then
  return registry[REGISTRY_KEY]
end

local uv = require("luv")
local errors = require("ciranda.io.error")
local graces = require("ciranda.task.grace")
local trace = require("ciranda.task.trace")

local co_create, co_resume, co_yield = coroutine.create, coroutine.resume, coroutine.yield
local co_status, co_close = coroutine.status, coroutine.close
local pack, unpack = table.pack, table.unpack

---@class ciranda.Scheduler
local M = {
  --- The task whose code is running, or nil (main program, callbacks of the loop).
  ---@type ciranda.Task?
  current = nil,
  --- What a waiting task yields. Coroutines inside a task pass it outwards.
  WAIT = setmetatable({}, {
    __tostring = function()
      return "a wait of the scheduler"
    end,
  }),
  --- Seconds a cancelled task has for its clean-up (design: 10 s). Tests set it.
  grace = 10,
  --- The states in which a task has ended.
  FINAL = { done = true, failed = true, cancelled = true },
  --- Every task that has not ended, by id.
  ---@type table<integer, ciranda.Task>
  live = {},
  --- The task that root.run drives.
  ---@type ciranda.Task?
  root = nil,
  --- Called with the error when nothing can wake any task; returns true when it has done something about it.
  ---@type (fun(err: ciranda.Error): boolean?)?
  on_deadlock = nil,
}
registry[REGISTRY_KEY] = M

-- The host wants to know which coroutine runs, so that a signal can interrupt it; plain Lua has no such
-- thing.
local set_running = function() end
if package.preload["ciranda.core.engine"] then
  set_running = require("ciranda.core.engine").set_running or set_running
end

--- Tell the host which coroutine runs from here on. The pass-through of nested coroutines calls it too.
M.set_running = set_running

local FINAL = M.FINAL
local Task = require("ciranda.task.handle")(M)
require("ciranda.task.waitable")(M)

local ready, ready_count = {}, 0
local idle
local next_id = 0
local grace -- of the requests that are being obeyed

local step -- forward

--- Resume every task that was ready when the turn began. Those that become ready meanwhile go in the next
--- turn, so that a loop of operations that complete at once does not keep the loop from its other work.
local function drain()
  local batch, count = ready, ready_count
  ready, ready_count = {}, 0
  for index = 1, count do
    step(batch[index])
  end
  if ready_count == 0 then
    idle:stop()
  end
end

---@param task ciranda.Task
local function make_ready(task)
  task.state = "ready"
  ready_count = ready_count + 1
  ready[ready_count] = task
  if ready_count == 1 then
    if not idle or idle:is_closing() then
      idle = uv.new_idle()
    end
    if not idle:is_active() then
      idle:start(drain)
    end
  end
end

--- Whether a task will run in the next turn.
---@return boolean
function M.has_ready()
  return ready_count > 0
end

--- Close the scheduler's own handles. For the host's shutdown, after the last task has ended.
function M.shutdown()
  if idle and not idle:is_closing() then
    idle:close()
  end
  idle = nil
  grace:close()
end

-- Operations ------------------------------------------------------------------------------------------------

-- States of an operation: starting (its start function runs), waiting, cancelling (asked to end, has not
-- yet), done (its result lies here, the task is on the ready queue), void (nobody wants its result any more).

--- Store the result of an operation. A second or a late completion is dropped.
local function complete(op, err, ...)
  local state = op.state
  if state == "void" and err == nil and op.give_back then
    return op.give_back(...)
  elseif state ~= "starting" and state ~= "waiting" and state ~= "cancelling" then
    return
  end
  op.err = err
  if err == nil and select("#", ...) > 0 then
    op.values = pack(...)
  end
  if state == "cancelling" and err == nil then
    -- It succeeded after all: the value must not be lost, and the cancellation is raised at the next wait.
    op.request = nil
  end
  op.state = "done"
  if state ~= "starting" then
    make_ready(op.task)
  end
end

--- Remove a request from the list of those still to be raised.
local function take_request(task, request)
  local list = task.requests
  for index = 1, list and #list or 0 do
    if list[index] == request then
      table.remove(list, index)
      break
    end
  end
  if list and #list == 0 then
    task.requests = nil
  end
end

--- Raise a request in the running task.
local function raise_request(task, request)
  take_request(task, request)
  request.raised = true
  error(request.err, 0)
end

--- Ask the operation a task waits for to end, because of a request.
local function cancel_wait(task, request)
  local op = task.op
  if not op or op.state ~= "waiting" then
    return
  end
  op.state = "cancelling"
  op.request = request
  local ok, over = true, true
  if op.cancel then
    ok, over = pcall(op.cancel)
  end
  if not ok then
    request.err.suppressed = request.err.suppressed or {}
    table.insert(request.err.suppressed, over)
  end
  if (over == true or not ok) and op.state == "cancelling" then
    op.err = request.err
    op.state = "done"
    make_ready(task)
  end
end

--- Take a request back: its scope has ended, or its task.
---@param request table
function M.withdraw(request)
  take_request(request.task, request)
  grace:stop(request)
end

--- Have a cancellation raised in a task: at its present wait, else at its next one. Its grace begins.
---@param request { task: ciranda.Task, err: ciranda.Error, scope: ciranda.Scope? }
function M.push_request(request)
  local task = request.task
  task.requests = task.requests or {}
  table.insert(task.requests, request)
  if (task.shielded or 0) == 0 then
    grace:start(request, M.grace)
    cancel_wait(task, request)
  end
end

--- A shield of the task has ended: what came meanwhile is raised at the next wait, and its grace begins.
---@param task ciranda.Task
function M.shield_ended(task)
  for _, request in ipairs(not task.closing and task.requests or {}) do
    grace:start(request, M.grace)
  end
end

--- A cancellation as an error value.
---@param reason any a string or an error
---@param what string? who is cancelled
---@return ciranda.Error
function M.cancel_error(reason, what)
  local text = reason ~= nil and errors.text(reason) or nil
  return errors.new({
    code = "cancelled",
    message = (what and what .. " was cancelled" or "cancelled") .. (text and ": " .. text or ""),
    cause = type(reason) == "table" and reason or nil,
  })
end

--- The one wait. `start(done)` begins an operation and returns a function that cancels it.
---
--- `done(err, values...)` completes it, at any time, even before `start` has returned. The cancel function
--- returns true when the operation is over at once; otherwise `done` must follow, and the task waits for it.
--- No cancel function means that the operation may simply be abandoned.
---@async
--- A second function that `start` returns is called with the values of a completion that nobody will receive,
--- because the task was closed: it gives back a permit, or closes what was opened.
---@async
---@param start fun(done: fun(err: any, ...)): (fun(): boolean?)?, fun(...)?
---@param what any? for `task.dump`: a string, a task, or anything with `__tostring`
---@return any ... what `done` was given after its error
function M.await(start, what)
  local task = M.check_can_wait()
  local requests = task.requests
  if requests and (task.shielded or 0) == 0 then
    raise_request(task, requests[1])
  end

  -- The nils make room: a table that grows is made twice.
  local op = { task = task, what = what, state = "starting", since = uv.now(), cancel = nil, values = nil }
  task.op = op
  op.cancel, op.give_back = start(function(...)
    return complete(op, ...)
  end)
  if op.state == "starting" then
    op.state = "waiting"
    task.state = "waiting"
    if task.requests and (task.shielded or 0) == 0 then
      cancel_wait(task, task.requests[1]) -- it came from within the start function
    end
  else
    make_ready(task)
  end
  co_yield(M.WAIT)
  task.op = nil

  if op.request then
    raise_request(task, op.request)
  end
  local err = op.err
  if err ~= nil then
    local from = op.from
    if from then
      task.rising = { err = err, text = from.traceback }
    elseif errors.is(err) and not err.traceback then
      err.traceback = debug.traceback(nil, 2)
    end
    error(err, 0)
  end
  local values = op.values
  if values then
    return unpack(values, 1, values.n)
  end
end

-- Life of a task --------------------------------------------------------------------------------------------

--- The running code of a task was interrupted: the task is cancelled, and the error that the interruption
--- raised there becomes that cancellation, so that it is not raised a second time during clean-up.
---@param task ciranda.Task
---@param cause ciranda.Error
---@return ciranda.Error
function M.interrupted(task, cause)
  task:cancel(cause)
  local request = task.cancelled
  take_request(task, request)
  request.raised = true
  return request.err
end

--- For message handlers: keep the frames of an error, which are gone when somebody else sees it.
---@param err any
---@return any err what shall be raised
function M.note_error(err)
  local task = M.current
  if not task then
    return err
  end
  if type(err) == "table" and err.code == "interrupted" and not errors.is(err) then
    -- The host's hook raised it in code that did not wait.
    return M.interrupted(task, errors.wrap(err))
  end
  local rising = task.rising
  local known = rising and rawequal(rising.err, err)
  if not known and not (task.cancelled and errors.is(err, "cancelled")) then
    task.rising = { err = err, text = trace.clean(debug.traceback(nil, 2)) }
  end
  return err
end

--- The message handler of a task.
local function handler(err)
  if err == nil then
    err = errors.new({ code = "failed", message = "nil was raised as an error: error(nil)" })
  end
  return M.note_error(err)
end

--- End the scopes a task left open: their children are cancelled and waited for.
---@return table? first the first scope that was left open
local function end_scopes(task)
  local first
  while task.scopes and #task.scopes > 0 do
    local scope = task.scopes[#task.scopes]
    first = first or (scope.state == "open" and scope) or nil
    scope:_abandon()
  end
  return first
end

--- What a task's coroutine runs.
local function body(task)
  local args = task.args
  task.args = nil
  local result
  if args then
    result = pack(xpcall(task.fn, handler, unpack(args, 1, args.n)))
  else
    result = pack(xpcall(task.fn, handler))
  end
  task.result = result
  if task.scopes then
    local left = end_scopes(task)
    if left and result[1] then
      local message = ("%s: this scope was still open when %s ended"):format(left.where, tostring(task))
        .. "; write: local s <close> = task.scope()"
      task.result = { false, errors.new({ code = "misuse", message = message }) }
    end
  end
end

--- Everything that must happen once when a task has ended, however it ended. Resumes nobody.
local function finish(task, state)
  task.state = state
  M.live[task.id] = nil
  task.fn, task.args, task.op, task.chain, task.result, task.rising = nil, nil, nil, nil, nil, nil
  local list = task.requests
  for index = list and #list or 0, 1, -1 do
    M.withdraw(list[index])
  end
  if task.cancelled then
    M.withdraw(task.cancelled)
  end
  local waiters = task.waiters
  task.waiters = nil
  for index = 1, waiters and #waiters or 0 do
    waiters[index](task)
  end
  if task.scope then
    task.scope:_ended(task)
  end
end

--- Read the result of a body that has run to its end.
local function conclude(task)
  local result = task.result
  if result[1] then
    task.values = result
    return finish(task, "done")
  end
  local err = result[2]
  task.err = err
  if task.cancelled and errors.is(err, "cancelled") then
    return finish(task, "cancelled")
  end
  local rising = task.rising
  local own = rising and rawequal(rising.err, err) and rising.text or nil
  if errors.is(err) then
    own = err.traceback or own
    task.traceback = trace.with_waiters(task, own)
    err.traceback = task.traceback
  else
    task.traceback = trace.with_waiters(task, own)
  end
  return finish(task, "failed")
end

--- Close a task's coroutines, innermost first, and end it. Its clean-up can no longer wait.
local function close_now(task, state, err)
  task.closing = err
  local previous = M.current
  M.current = task
  local chain = task.chain or {}
  local function close(co)
    if co_status(co) ~= "dead" then
      set_running(co)
      local ok, failure = co_close(co)
      if not ok and not rawequal(failure, err) then
        err.suppressed = err.suppressed or {}
        table.insert(err.suppressed, failure)
      end
    end
  end
  for index = #chain, 1, -1 do
    close(chain[index])
  end
  close(task.co)
  set_running(nil)
  M.current = previous
  task.err = err
  finish(task, state)
end

--- End a task that outlived its grace: its children first, then itself. It is not resumed again.
---@param task ciranda.Task
---@param err ciranda.Error
---@param state "cancelled"|"failed"
function M.kill(task, err, state)
  if FINAL[task.state] then
    return
  end
  local scopes = task.scopes or {}
  for index = #scopes, 1, -1 do
    for _, child in pairs(scopes[index].children) do
      M.kill(child, M.cancel_error(err, tostring(child)), "cancelled")
    end
  end
  local op = task.op
  if op then
    local before = op.state
    op.state = "void"
    if before == "waiting" and op.cancel then
      pcall(op.cancel)
    elseif before == "done" and op.err == nil and op.give_back then
      local values = op.values or {}
      pcall(op.give_back, unpack(values, 1, values.n))
    end
  end
  err.traceback = err.traceback or trace.of_task(task)
  close_now(task, state, err)
end

--- Do what a cancellation asks for: raise it at the task's wait, or let a task that has not begun never
--- begin.
---@param task ciranda.Task
---@param request table
function M.request_end(task, request)
  if task.started then
    return M.push_request(request)
  end
  task.err = request.err
  return finish(task, "cancelled")
end

grace = graces.new(function(request)
  local task = request.task
  if FINAL[task.state] then
    return false
  end
  if task.state == "ready" and not request.last_turn then
    -- It is about to be given a result, perhaps a permit or a connection: it must not be lost.
    request.last_turn = true
    return true
  end
  local failure = request.scope and request.scope.failure
  local err = errors.new({
    code = "cancelled",
    message = ("%s did not end within %g s of being cancelled"):format(tostring(task), M.grace),
    cause = failure and failure.err or request.err,
  })
  M.kill(task, err, task.cancelled and "cancelled" or "failed")
  return false
end)

--- Let a task run until its next wait or its end.
function step(task)
  if task.state ~= "ready" then
    return -- ended while it was on the queue
  end
  task.state = "running"
  local co = task.co
  M.current = task
  local ok, yielded
  if task.started then
    -- The innermost coroutine is the one that will run: the ones around it only pass the wait outwards.
    local chain = task.chain
    set_running(chain and chain[#chain] or co)
    ok, yielded = co_resume(co)
  else
    task.started = true
    set_running(co)
    ok, yielded = co_resume(co, task)
  end
  set_running(nil)
  M.current = nil

  if co_status(co) == "dead" then
    if ok then
      return conclude(task)
    end
    -- Only what goes wrong outside the protected part gets here, such as an error while errors are handled.
    task.result = { false, yielded }
    return conclude(task)
  end
  if not rawequal(yielded, M.WAIT) then
    local err = errors.new({
      code = "misuse",
      message = ("%s yielded %s to the scheduler, which takes only waits"):format(
        tostring(task),
        errors.text(yielded == nil and "nothing" or yielded)
      ),
    })
    err.traceback = trace.with_waiters(task, trace.of_task(task))
    task.traceback = err.traceback
    M.kill(task, err, "failed")
  end
end

--- "file:line" of a function: the name of a task that was given none.
---@param fn function
---@return string
function M.default_name(fn)
  local info = debug.getinfo(fn, "S")
  return info.linedefined > 0 and ("%s:%d"):format(info.short_src, info.linedefined) or "function"
end

--- Make a task and put it on the ready queue. Nothing of it runs before the caller waits.
---@param scope ciranda.Scope?
---@param name string?
---@param fn function
---@param ... any its arguments
---@return ciranda.Task
function M.new_task(scope, name, fn, ...)
  next_id = next_id + 1
  local task = setmetatable({
    id = next_id,
    name = name or M.default_name(fn),
    fn = fn,
    args = select("#", ...) > 0 and pack(...) or nil,
    co = co_create(body),
    scope = scope,
  }, Task)
  M.live[next_id] = task
  make_ready(task)
  return task
end

return M
