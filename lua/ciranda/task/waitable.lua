--- Whether the running code may wait, and if not, what to tell whoever wrote it.

local errors = require("ciranda.io.error")
local trace = require("ciranda.task.trace")

local co_running, co_isyieldable = coroutine.running, coroutine.isyieldable

--- Add the checks to a scheduler.
---@param scheduler ciranda.Scheduler
return function(scheduler)
  --- What stands between the running code and a wait, or nil when it may wait.
  ---@param task ciranda.Task
  ---@return string? culprit for people
  local function obstacle(task)
    local chain = task.chain
    local running = co_running()
    local known = running == (chain and chain[#chain] or task.co)
    if not co_isyieldable() then
      return known and trace.culprit(running, 3) or "coroutine.close (a __close metamethod)"
    elseif not known then
      return "a coroutine that was resumed with a coroutine.resume taken before ciranda.task was loaded"
    end
    -- The coroutines around it have to pass the wait on.
    for index = chain and #chain - 1 or 0, 1, -1 do
      if not co_isyieldable(chain[index]) then
        return trace.culprit(chain[index], 0)
      end
    end
    if running ~= task.co and not co_isyieldable(task.co) then
      return trace.culprit(task.co, 0)
    end
    return nil
  end

  --- The level, for errors.misuse, of the first function outside this room.
  local function user_level()
    return errors.level_outside("ciranda/task/") - 1
  end
  scheduler.user_level = user_level

  --- Raise a misuse unless the running code may wait. The line named is the first one outside this room.
  ---@return ciranda.Task
  function scheduler.check_can_wait()
    local task = scheduler.current
    if not task then
      errors.misuse(user_level(), "cannot wait outside a task; run this inside task.run(function() ... end)")
    end
    if task.closing then
      error(task.closing, 0)
    end
    local culprit = obstacle(task)
    if culprit then
      errors.misuse(
        user_level(),
        "cannot wait inside %s, which cannot be suspended; collect the values first and wait outside of it",
        culprit
      )
    end
    return task
  end

  --- Whether the running code may wait: it is in a task, and nothing that cannot be suspended stands between.
  ---@return boolean
  function scheduler.can_wait()
    local task = scheduler.current
    if not task or task.closing then
      return false
    end
    return obstacle(task) == nil
  end
end
