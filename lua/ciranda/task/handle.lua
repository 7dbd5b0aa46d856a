--- What a program holds of a task: wait for it, cancel it, ask how it is.

local errors = require("ciranda.io.error")

local unpack = table.unpack

---@class ciranda.Task
---@field id integer
---@field name string
---@field co thread
---@field state "ready"|"running"|"waiting"|"done"|"failed"|"cancelled"
---@field scope ciranda.Scope?       where it was spawned; nil for the root
---@field op table?                  what it waits for
---@field chain thread[]?            nested coroutines that are running or waiting, innermost last
---@field scopes ciranda.Scope[]?    scopes it opened that have not ended, innermost last
---@field requests table[]?          cancellations not yet raised
---@field cancelled table?           the request that cancelled the task as a whole
---@field shielded integer?          how many shields are around its present code
---@field values table?              what its function returned, from index 2
---@field err any                    what it failed with
---@field traceback string?          where it failed and who was waiting
---@field no_exit string?            os.exit does not end the program from within it, and says so
---@field rising table?              the error that is on its way through the task, and where it came from

--- Make the class for a scheduler.
---@param scheduler ciranda.Scheduler
---@return table Task
return function(scheduler)
  local FINAL = scheduler.FINAL
  local Task = { __name = "ciranda.Task" }
  Task.__index = Task

  function Task:__tostring()
    return ("task '%s'"):format(self.name)
  end

  --- "ready", "running", "waiting", "done", "failed" or "cancelled".
  ---@return string
  function Task:status()
    return self.state
  end

  --- Whether the task has ended.
  ---@return boolean
  function Task:ended()
    return FINAL[self.state] == true
  end

  --- Call a function when the task has ended; at once when it already has. The function must not wait.
  ---@param fn fun(task: ciranda.Task)
  function Task:_on_end(fn)
    if FINAL[self.state] then
      return fn(self)
    end
    self.waiters = self.waiters or {}
    table.insert(self.waiters, fn)
  end

  --- Forget a function given to `_on_end`.
  function Task:_forget(fn)
    local list = self.waiters
    for index = 1, list and #list or 0 do
      if list[index] == fn then
        table.remove(list, index)
        return
      end
    end
  end

  --- Refuse a wait that could never end: for oneself, directly or through other tasks, or for a task that
  --- waits for us because we run in its scope.
  local function check_circle(target)
    local waiter = scheduler.current
    local seen = target
    while waiter and seen do
      if seen == waiter then
        errors.misuse(
          scheduler.user_level(),
          "%s would wait for itself%s",
          tostring(waiter),
          seen == target and "" or ", through " .. tostring(target)
        )
      end
      seen = seen.op and seen.op.target
    end
    local scope = waiter and waiter.scope
    while scope do
      if scope.owner == target then
        errors.misuse(
          scheduler.user_level(),
          "%s would wait for %s, which cannot end before it",
          tostring(waiter),
          tostring(target)
        )
      end
      scope = scope.owner.scope
    end
  end

  --- Wait until the task has ended. Any number of tasks may wait for one.
  ---@async
  ---@return any ... what its function returned; raises what it raised, or the error "cancelled"
  function Task:wait()
    check_circle(self)
    return scheduler.await(function(done)
      local op = scheduler.current.op
      op.target = self
      local function ended(task)
        if task.state == "done" then
          return done(nil, unpack(task.values, 2, task.values.n))
        end
        op.from = task
        return done(task.err)
      end
      self:_on_end(ended)
      return function()
        self:_forget(ended)
        return true
      end
    end, self)
  end

  --- Ask the task to end: its present or next wait raises the error with code "cancelled", once. One that has
  --- not begun never begins. The first reason counts; a task that has ended is left alone.
  ---@param reason any? a string, or an error
  function Task:cancel(reason)
    if not FINAL[self.state] and not self.cancelled then
      self.cancelled = { task = self, err = scheduler.cancel_error(reason, tostring(self)) }
      scheduler.request_end(self, self.cancelled)
    end
  end

  return Task
end
