--- Scopes: no task outlives the block that started it.
---
--- A scope ends when its children have ended. The first child that fails cancels its siblings, interrupts the
--- block, and rises from the end of the scope after everybody's clean-up.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")

local M = {}

---@class ciranda.Scope
---@field owner ciranda.Task        the task that opened it
---@field children table<integer, ciranda.Task>  by id
---@field where string              file:line where it was opened
---@field failure { err: any, traceback: string?, task: ciranda.Task }?  the first failure of a child
local Scope = {}
Scope.__index = Scope
Scope.__name = "ciranda.Scope"

function Scope:__tostring()
  return ("the scope opened at %s (%d tasks)"):format(self.where, self.count)
end

--- Open a scope in the present task. Write `local s <close> = task.scope()`: its end waits for the children.
---@param on_child_end fun(task: ciranda.Task)? takes the place of "the first failure cancels the others"; for
---       combinators, which decide themselves what a failure means
---@return ciranda.Scope
function M.new(on_child_end)
  local owner = scheduler.current
  if not owner then
    errors.misuse(
      scheduler.user_level(),
      "task.scope: only a task can open a scope; use task.run(function() ... end)"
    )
  end
  local info = debug.getinfo(scheduler.user_level(), "Sl")
  local scope = setmetatable({
    owner = owner,
    children = {},
    count = 0,
    state = "open",
    where = info and ("%s:%d"):format(info.short_src, info.currentline) or "?",
    on_child_end = on_child_end,
  }, Scope)
  owner.scopes = owner.scopes or {}
  table.insert(owner.scopes, scope)
  return scope
end

--- Start a task in the scope. It begins to run when the present task waits.
---@param name string? what messages call it; without one it is "file:line" of the function
---@param fn function
---@param ... any arguments of the function
---@return ciranda.Task
---@overload fun(self: ciranda.Scope, fn: function, ...): ciranda.Task
function Scope:spawn(name, fn, ...)
  if type(name) == "function" then
    return self:spawn(false, name, fn, ...)
  end
  if name and type(name) ~= "string" then
    fn = name
  end
  if type(fn) ~= "function" then
    errors.misuse(scheduler.user_level(), "scope:spawn: a function expected, got %s", type(fn))
  end
  -- While its end waits for children, these may start others.
  if self.state ~= "open" and not (self.state == "closing" and self.count > 0) then
    errors.misuse(
      scheduler.user_level(),
      "scope:spawn: the scope opened at %s has ended; no task can be started in it",
      self.where
    )
  end
  local task = scheduler.new_task(self, name or nil, fn, ...)
  self.children[task.id] = task
  self.count = self.count + 1
  if self.cancelled then
    task:cancel(self.cancelled)
  end
  return task
end

--- Cancel every child, and those yet to be started. The scope's end still waits for them.
---@param reason any? a string, or an error
function Scope:cancel(reason)
  self.cancelled = self.cancelled or reason or "its scope was cancelled"
  local ids = {}
  for id in pairs(self.children) do
    ids[#ids + 1] = id
  end
  table.sort(ids)
  for index = #ids, 1, -1 do -- the youngest first, and in the same order every time
    local task = self.children[ids[index]]
    if task then
      task:cancel(reason)
    end
  end
end

--- A child failed first: its siblings are cancelled, and the block too, unless it waits for them already.
local function fail(self, task)
  self.failure = { err = task.err, traceback = task.traceback, task = task }
  local reason = errors.new({
    code = "cancelled",
    message = ("%s failed: %s"):format(tostring(task), errors.text(task.err)),
    cause = task.err,
  })
  self:cancel(reason)
  local owner = self.owner
  if self.state == "open" and not (owner.op and owner.op.scope == self) then
    self.request = { task = owner, err = scheduler.cancel_error(reason, tostring(owner)), scope = self }
    scheduler.push_request(self.request)
  end
end

--- The scheduler tells of a child that has ended.
---@param task ciranda.Task
function Scope:_ended(task)
  self.children[task.id] = nil
  self.count = self.count - 1
  if self.on_child_end then
    self.on_child_end(task)
  elseif task.state == "failed" then
    if not self.failure then
      fail(self, task)
    elseif errors.is(self.failure.err) and not rawequal(self.failure.err, task.err) then
      local first = self.failure.err
      first.suppressed = first.suppressed or {}
      table.insert(first.suppressed, task.err)
    end
  end
  if self.count == 0 and self.idle_waiters then
    local waiters = self.idle_waiters
    self.idle_waiters = nil
    for _, waiter in ipairs(waiters) do
      waiter()
    end
  end
end

--- Wait until no child is left. Cancelling the wait cancels the children, and is raised when they have ended.
local function wait_for_children(self)
  local interrupted = false
  scheduler.await(function(done)
    if self.count == 0 then
      done() -- still a wait: a loop around it lets others run
      return nil
    end
    scheduler.current.op.scope = self
    self.idle_waiters = self.idle_waiters or {}
    table.insert(self.idle_waiters, function()
      done(interrupted and "interrupted" or nil)
    end)
    return function()
      interrupted = true
      self:cancel("the task that waits for it was cancelled")
      return false
    end
  end, self)
end

--- Wait until no child is left, whatever is asked of the waiting task meanwhile.
---@return any cancellation the first that was raised
local function outlast_children(self)
  local cancellation
  while self.count > 0 do
    local ok, err = pcall(wait_for_children, self)
    if not ok then
      cancellation = cancellation or err
      self:cancel("the task that waits for it was cancelled")
    end
  end
  return cancellation
end

--- Raise the failure of a child in the present task, keeping its traceback.
local function raise_failure(self)
  local failure = self.failure
  local task = scheduler.current
  if task then
    task.rising = { err = failure.err, text = failure.traceback }
  end
  error(failure.err, 0)
end

--- Wait until every child has ended; the scope stays open.
---@async
--- Raises what the first failed child raised.
function Scope:wait()
  if self.state ~= "open" then
    errors.misuse(scheduler.user_level(), "scope:wait: the scope opened at %s has ended", self.where)
  end
  wait_for_children(self)
  if self.failure then
    raise_failure(self)
  end
end

local function forget(self)
  self.state = "closed"
  if self.request then
    scheduler.withdraw(self.request)
  end
  local scopes = self.owner.scopes
  for index = scopes and #scopes or 0, 1, -1 do
    if scopes[index] == self then
      table.remove(scopes, index)
      break
    end
  end
  if scopes and #scopes == 0 then
    self.owner.scopes = nil
  end
end

--- End the scope: wait for the children, and raise the first failure. `<close>` calls it; so may you, once.
---@async
---@param err any? what is leaving the block: the children are cancelled first
function Scope:close(err)
  if self.state ~= "open" then
    return
  end
  self.state = "closing"
  if self.request then
    scheduler.withdraw(self.request)
  end
  local failed_before = self.failure ~= nil
  if err ~= nil then
    self:cancel("the block of its scope failed: " .. errors.text(err))
  end
  if self.owner.closing then
    -- The grace is over: the children were closed before their owner, and nothing can wait any more.
    return forget(self)
  end
  if self.count > 0 then
    local can_wait, obstacle = pcall(scheduler.check_can_wait)
    if not can_wait then
      -- As inside coroutine.close. The end of the owner waits for the children instead.
      self.state = "left"
      self:cancel("its scope ended where nothing can wait")
      error(obstacle, 0)
    end
    local cancellation = outlast_children(self)
    if cancellation ~= nil and err == nil and not failed_before then
      forget(self)
      error(cancellation, 0)
    end
  end
  forget(self)
  if self.failure and (err == nil or failed_before) then
    raise_failure(self)
  end
end

function Scope:__close(err)
  return self:close(err)
end

--- End a scope whose owner's function has ended without closing it.
function Scope:_abandon()
  self.state = "closing"
  self:cancel("the task that opened its scope has ended")
  outlast_children(self)
  forget(self)
end

return M
