local errors = require("ciranda.io.error")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

--- Run with a short grace, and put the old one back.
local function with_grace(seconds, fn)
  return within(function()
    local previous = task.set_grace(seconds)
    local _ <close> = setmetatable({}, {
      __close = function()
        task.set_grace(previous)
      end,
    })
    return fn()
  end)
end

local function on_close(fn)
  return setmetatable({}, { __close = fn })
end

--- Spawn a function, let it come to its first wait, cancel it, and wait for its end.
---@return string status
---@return any err
---@return ciranda.Task
local function cancelled(fn, reason)
  local child
  pcall(function()
    local scope <close> = task.scope()
    child = scope:spawn("child", fn)
    patience.settle()
    child:cancel(reason)
    child:cancel("a second reason, which does not count")
  end)
  return child:status(), child.err, child
end

describe("cancelling a task", function()
  it(
    "raises the error 'cancelled' with the reason at its wait",
    within(function()
      local seen
      local status, err = cancelled(function()
        local ok
        ok, seen = pcall(task.sleep, 60)
        assert.is_false(ok)
        error(seen, 0)
      end, "no longer wanted")
      assert.equal("cancelled", status)
      assert.equal(seen, err)
      assert.is_true(errors.is(seen, "cancelled"))
      assert.matches("task 'child' was cancelled: no longer wanted", seen.message)
    end)
  )

  it(
    "raises it once: from then on waits work as usual",
    within(function()
      local waits = 0
      local status = cancelled(function()
        local ok, err = pcall(task.sleep, 60)
        assert.is_false(ok)
        for _ = 1, 5 do
          assert.is_true(pcall(task.sleep, 0.001))
          waits = waits + 1
        end
        error(err, 0)
      end)
      assert.equal(5, waits)
      assert.equal("cancelled", status)
    end)
  )

  it(
    "lets <close> wait and do its work",
    within(function()
      local log = {}
      local status = cancelled(function()
        local _ <close> = on_close(function(_, err)
          log[#log + 1] = err.code
          task.sleep(0.005)
          log[#log + 1] = "cleaned"
        end)
        task.sleep(60)
      end)
      assert.equal("cancelled", status)
      assert.same({ "cancelled", "cleaned" }, log)
    end)
  )

  it(
    "does not spin in a loop around pcall",
    with_grace(0.05, function()
      local rounds = 0
      local status, err = cancelled(function()
        while true do
          pcall(task.sleep, 0.01)
          rounds = rounds + 1
        end
      end)
      assert.equal("cancelled", status)
      assert.is_true(rounds < 50)
      assert.matches("did not end within 0.05 s of being cancelled", err.message)
    end)
  )

  it(
    "a task that returns all the same has done its work",
    within(function()
      local status, _, child = cancelled(function()
        pcall(task.sleep, 60)
        return "value"
      end)
      assert.equal("done", status)
      assert.equal("value", child:wait())
    end)
  )

  it(
    "a task that raises something else has failed",
    within(function()
      local status, err = cancelled(function()
        pcall(task.sleep, 60)
        error("clean-up failed", 0)
      end)
      assert.equal("failed", status)
      assert.equal("clean-up failed", err)
    end)
  )

  it(
    "before it has begun means that it never begins",
    within(function()
      local ran = false
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        ran = true
      end)
      child:cancel("too late")
      assert.equal("cancelled", child:status())
      assert.is_false(pcall(child.wait, child))
      assert.is_false(ran)
    end)
  )

  it(
    "of itself is raised at its next wait",
    within(function()
      local log = {}
      pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          task.current():cancel("of itself")
          log[#log + 1] = "goes on"
          task.sleep(60)
          log[#log + 1] = "not reached"
        end)
      end)
      assert.same({ "goes on" }, log)
    end)
  )

  it(
    "from within the start of its own wait is raised at that wait",
    within(function()
      local seen
      pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          local _
          _, seen = pcall(task.await, function()
            task.current():cancel("now")
            return function()
              return true
            end
          end)
        end)
      end)
      assert.is_true(errors.is(seen, "cancelled"))
    end)
  )

  it(
    "that has ended does nothing",
    within(function()
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        return 1
      end)
      assert.equal(1, child:wait())
      child:cancel()
      assert.equal("done", child:status())
    end)
  )

  it(
    "never loses a result that came first: it is raised at the next wait instead",
    within(function()
      local got, second
      local finish
      cancelled(function()
        local timer = uv.new_timer()
        got = task.await(function(done)
          finish = done
          timer:start(3, 0, function()
            timer:close()
            done(nil, "precious")
          end)
          return function()
            finish(nil, "precious") -- the operation succeeds although it is asked to end
            return false
          end
        end)
        second = select(2, pcall(task.sleep, 60))
      end)
      assert.equal("precious", got)
      assert.is_true(errors.is(second, "cancelled"))
    end)
  )

  it(
    "waits for an operation that takes time to end",
    within(function()
      local log = {}
      cancelled(function()
        local _ <close> = on_close(function()
          log[#log + 1] = "unwound"
        end)
        task.await(function(done)
          return function()
            local timer = uv.new_timer()
            timer:start(5, 0, function()
              timer:close()
              log[#log + 1] = "operation over"
              done("aborted")
            end)
            return false
          end
        end)
      end)
      assert.same({ "operation over", "unwound" }, log)
    end)
  )

  it(
    "outlives a cancel function that raises, and notes what it raised",
    within(function()
      local status, err = cancelled(function()
        task.await(function()
          return function()
            error("cannot cancel", 0)
          end
        end)
      end)
      assert.equal("cancelled", status)
      assert.same({ "cannot cancel" }, err.suppressed)
    end)
  )

  it(
    "reaches its children, and waits for them",
    within(function()
      local log = {}
      cancelled(function()
        local _ <close> = on_close(function()
          log[#log + 1] = "parent"
        end)
        local scope <close> = task.scope()
        scope:spawn(function()
          local _ <close> = on_close(function()
            task.sleep(0.005)
            log[#log + 1] = "child"
          end)
          task.sleep(60)
        end)
      end)
      assert.same({ "child", "parent" }, log)
    end)
  )

  it(
    "stops the block after a scope whose children it cancelled",
    within(function()
      local passed = false
      local status = cancelled(function()
        do
          local scope <close> = task.scope()
          scope:spawn(task.sleep, 60)
        end
        passed = true
      end)
      assert.is_false(passed)
      assert.equal("cancelled", status)
    end)
  )
end)

describe("in nested coroutines a cancellation", function()
  it(
    "is raised inside, where <close> may wait, and comes out",
    within(function()
      local log = {}
      local status = cancelled(function()
        local _ <close> = on_close(function()
          log[#log + 1] = "outer"
        end)
        local generator = coroutine.wrap(function()
          local _ <close> = on_close(function()
            task.sleep(0.002)
            log[#log + 1] = "inner"
          end)
          coroutine.yield(1)
          task.sleep(60)
        end)
        assert.equal(1, generator())
        generator()
      end)
      assert.equal("cancelled", status)
      assert.same({ "inner", "outer" }, log)
    end)
  )

  it(
    "can be caught inside",
    within(function()
      local inside
      local status = cancelled(function()
        local generator = coroutine.wrap(function()
          local _
          _, inside = pcall(task.sleep, 60)
          task.sleep(0.001)
          return "from the generator"
        end)
        return generator()
      end)
      assert.is_true(errors.is(inside, "cancelled"))
      assert.equal("done", status)
    end)
  )
end)

describe("after the grace", function()
  it(
    "coroutines are closed, the innermost first, and their clean-up cannot wait",
    with_grace(0.02, function()
      local log = {}
      local function stubborn(name)
        return on_close(function()
          local ok, err = pcall(task.sleep, 0)
          log[#log + 1] = ("%s %s %s"):format(name, tostring(ok), err.code)
        end)
      end
      local status = cancelled(function()
        local _ <close> = stubborn("task")
        local outer = coroutine.wrap(function()
          local _ <close> = stubborn("outer")
          local inner = coroutine.wrap(function()
            local _ <close> = stubborn("inner")
            pcall(task.sleep, 60)
            while true do
              task.sleep(60)
            end
          end)
          inner()
        end)
        outer()
      end)
      assert.equal("cancelled", status)
      assert.same({ "inner false cancelled", "outer false cancelled", "task false cancelled" }, log)
    end)
  )

  it(
    "children are ended before their parent",
    with_grace(0.02, function()
      local log = {}
      local status = cancelled(function()
        local _ <close> = on_close(function()
          log[#log + 1] = "parent"
        end)
        local scope <close> = task.scope()
        scope:spawn(function()
          local _ <close> = on_close(function()
            log[#log + 1] = "child"
          end)
          while true do
            pcall(task.sleep, 60)
          end
        end)
        while true do
          pcall(scope.wait, scope)
        end
      end)
      assert.equal("cancelled", status)
      assert.same({ "child", "parent" }, log)
    end)
  )

  it(
    "a block that swallows the failure of its child is ended with it",
    with_grace(0.02, function()
      local rounds = 0
      local ok, err = pcall(function()
        local outer <close> = task.scope()
        outer:spawn("parent", function()
          local scope <close> = task.scope()
          scope:spawn(function()
            error("boom", 0)
          end)
          while true do
            pcall(task.sleep, 0.005)
            rounds = rounds + 1
          end
        end)
      end)
      assert.is_false(ok)
      assert.is_true(rounds > 1)
      assert.equal("boom", err.cause)
      assert.matches("task 'parent' did not end within 0.02 s", err.message)
    end)
  )

  it(
    "a late completion of what it waited for is dropped",
    with_grace(0.01, function()
      local finish
      local status = cancelled(function()
        task.await(function(done)
          finish = done
          return function()
            return false -- and never ends
          end
        end)
      end)
      assert.equal("cancelled", status)
      finish(nil, "late")
      task.sleep(0)
    end)
  )

  it(
    "nothing is lost that it was about to be given, or is given late",
    with_grace(0.01, function()
      local given_back = {}
      local finish
      cancelled(function()
        pcall(task.sleep, 60)
        task.await(function(done)
          finish = done
          return function()
            return false -- cannot be called back
          end, function(...)
            table.insert(given_back, table.concat({ ... }, " "))
          end
        end)
      end)
      finish(nil, "a", "late one")
      finish(nil, "again")
      assert.same({ "a late one", "again" }, given_back)

      local semaphore, queue = task.semaphore(1), task.queue(1)
      semaphore:acquire()
      local scope <close> = task.scope()
      local parent = scope:spawn(function()
        local inner <close> = task.scope()
        for _, take in ipairs({ semaphore.acquire, queue.get }) do
          inner:spawn(function()
            pcall(task.sleep, 60)
            take(take == queue.get and queue or semaphore)
            while true do
              pcall(task.sleep, 60)
            end
          end)
        end
      end)
      patience.settle()
      parent:cancel()
      patience.settle()
      -- Both are given something, and closed with their parent before they can run.
      scope:spawn("killer", function()
        task.yield()
        local err = errors.new({ code = "cancelled", message = "now" })
        require("ciranda.task.scheduler").kill(parent, err, "cancelled")
      end)
      task.yield()
      semaphore:release()
      queue:put("value")
      assert.equal("value", task.timeout(10, queue.get, queue))
      task.timeout(10, semaphore.acquire, semaphore)
    end)
  )

  it(
    "errors of clean-up are noted",
    with_grace(0.01, function()
      local _, err = cancelled(function()
        local _ <close> = on_close(function()
          error("no luck", 0)
        end)
        pcall(task.sleep, 60)
        task.sleep(60)
      end)
      assert.same({ "no luck" }, err.suppressed)
    end)
  )
end)

describe("task.shield", function()
  it(
    "keeps a cancellation out until the first wait after it",
    within(function()
      local log = {}
      local status = cancelled(function()
        task.shield(function()
          task.sleep(0.01)
          log[#log + 1] = "shielded work done"
        end)
        log[#log + 1] = "after the shield"
        task.sleep(60)
        log[#log + 1] = "not reached"
      end)
      assert.equal("cancelled", status)
      assert.same({ "shielded work done", "after the shield" }, log)
    end)
  )

  it(
    "passes arguments and values, and errors as they are",
    within(function()
      assert.same({ 1, nil, 3 }, {
        task.shield(function(...)
          return ...
        end, 1, nil, 3),
      })
      local failure = {}
      local ok, err = pcall(task.shield, function()
        error(failure)
      end)
      assert.is_false(ok)
      assert.equal(failure, err)
    end)
  )

  it(
    "holds while the grace of the task would be over",
    with_grace(0.01, function()
      local finished = false
      local status = cancelled(function()
        local ok, err = pcall(function()
          task.shield(function()
            task.sleep(0.05)
            finished = true
          end)
          task.sleep(60)
        end)
        assert.is_false(ok)
        error(err, 0)
      end)
      assert.is_true(finished)
      assert.equal("cancelled", status)
    end)
  )

  it(
    "can be nested",
    within(function()
      local log = {}
      cancelled(function()
        task.shield(function()
          task.shield(task.sleep, 0.005)
          task.sleep(0.001)
          log[#log + 1] = "still shielded"
        end)
        task.sleep(60)
      end)
      assert.same({ "still shielded" }, log)
    end)
  )
end)

describe("an interruption of running code", function()
  it(
    "becomes the cancellation of that task: it is raised once, and clean-up may wait",
    within(function()
      local log = {}
      local child
      do
        local scope <close> = task.scope()
        child = scope:spawn(function()
          local _ <close> = on_close(function(_, err)
            log[#log + 1] = ("task %s %s"):format(err.code, err.cause.code)
          end)
          coroutine.wrap(function()
            local _ <close> = on_close(function()
              task.sleep(0.005)
              log[#log + 1] = "inner cleaned"
            end)
            error({ code = "interrupted", message = "interrupted" }) -- as the host's hook does
          end)()
        end)
        task.sleep(0.001)
        scope:cancel("the signal has reached the loop")
      end
      assert.equal("cancelled", child:status())
      assert.same({ "inner cleaned", "task cancelled interrupted" }, log)
    end)
  )
end)
