local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local patience = dofile("tests/fixtures/patience.lua")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

describe("a semaphore", function()
  it(
    "lets in as many as it has permits, first come, first served",
    within(function()
      local semaphore = task.semaphore(2)
      local now, most, order = 0, 0, {}
      do
        local scope <close> = task.scope()
        for index = 1, 6 do
          scope:spawn(function()
            semaphore:acquire()
            order[#order + 1] = index
            now = now + 1
            most = math.max(most, now)
            task.sleep(0.001)
            now = now - 1
            semaphore:release()
          end)
        end
      end
      assert.equal(2, most)
      assert.same({ 1, 2, 3, 4, 5, 6 }, order)
    end)
  )

  it(
    "gives the permit back however :with ends, and returns the values",
    within(function()
      local semaphore = task.semaphore(1)
      assert.same({ 1, nil, 3 }, {
        semaphore:with(function(...)
          return ...
        end, 1, nil, 3),
      })
      assert.is_false(pcall(semaphore.with, semaphore, error, "boom"))
      semaphore:acquire()
      semaphore:release()
    end)
  )

  it(
    "loses no permit to a task that is cancelled while it waits, nor when one comes at that moment",
    within(function()
      local semaphore = task.semaphore(1)
      semaphore:acquire()
      local scope <close> = task.scope()
      local log = {}
      local function user(name)
        return scope:spawn(function()
          semaphore:with(function()
            log[#log + 1] = name
          end)
        end)
      end
      local waiting, granted = user("waiting"), user("granted")
      patience.settle()
      waiting:cancel()
      semaphore:release() -- goes to the second; its cancellation comes before it has run again
      granted:cancel()
      assert.is_false(pcall(waiting.wait, waiting))
      pcall(granted.wait, granted)
      assert.same({ "granted" }, log)
      semaphore:acquire()
      semaphore:release()
    end)
  )

  it(
    "refuses to be given more than was taken",
    within(function()
      local semaphore = task.semaphore(1)
      local ok, err = pcall(function()
        semaphore:release()
      end)
      assert.is_false(ok)
      assert.matches("sync_spec%.lua:%d+: semaphore:release", err.message)
      ok, err = pcall(task.semaphore, 0)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
    end)
  )
end)

describe("a queue", function()
  it(
    "holds at most its capacity and keeps the order",
    within(function()
      local queue = task.queue(2)
      local put, got = 0, {}
      local scope <close> = task.scope()
      scope:spawn(function()
        for value = 1, 10 do
          queue:put(value)
          put = value
        end
        queue:close()
      end)
      patience.settle()
      assert.equal(2, put)
      for value in queue:values() do
        got[#got + 1] = value
        assert.is_true(put - value <= 3)
      end
      assert.same({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, got)
      assert.is_nil(queue:get())
    end)
  )

  it(
    "hands values to those who wait, first come, first served; false is a value",
    within(function()
      local queue = task.queue(1)
      local got = {}
      local scope <close> = task.scope()
      for index = 1, 3 do
        scope:spawn(function()
          got[index] = queue:get()
        end)
      end
      patience.settle()
      queue:put("a")
      queue:put(false)
      queue:put("c")
      scope:wait()
      assert.same({ "a", false, "c" }, got)
    end)
  )

  it(
    "wakes everybody when it is closed",
    within(function()
      local empty, full = task.queue(1), task.queue(1)
      full:put(1)
      local got, err = "nothing yet", nil
      local scope <close> = task.scope()
      scope:spawn(function()
        got = empty:get()
      end)
      scope:spawn(function()
        local _
        _, err = pcall(full.put, full, 2)
      end)
      patience.settle()
      empty:close()
      full:close()
      full:close()
      scope:wait()
      assert.is_nil(got)
      assert.is_true(errors.is(err, "closed"))
      assert.equal(1, full:get())
      assert.is_nil(full:get())
      local ok, late = pcall(full.put, full, 3)
      assert.is_false(ok)
      assert.is_true(errors.is(late, "closed"))
    end)
  )

  it(
    "forgets a putter and a getter that are cancelled",
    within(function()
      local queue = task.queue(1)
      queue:put("first")
      local scope <close> = task.scope()
      local putter = scope:spawn(function()
        queue:put("never")
      end)
      patience.settle()
      putter:cancel()
      pcall(putter.wait, putter)
      assert.equal("first", queue:get())
      local getter = scope:spawn(function()
        return queue:get()
      end)
      patience.settle()
      getter:cancel()
      pcall(getter.wait, getter)
      queue:put("second")
      assert.equal("second", queue:get())
    end)
  )

  it(
    "refuses nil and a capacity that is none",
    within(function()
      local ok, err = pcall(function()
        task.queue(1):put(nil)
      end)
      assert.is_false(ok)
      assert.matches("close the queue", err.message)
      for _, capacity in ipairs({ 0, 1.5, "1" }) do
        assert.is_false(pcall(task.queue, capacity))
      end
    end)
  )
end)

describe("an event", function()
  it(
    "lets everybody go on, now and later",
    within(function()
      local event = task.event()
      local passed = 0
      local scope <close> = task.scope()
      for _ = 1, 3 do
        scope:spawn(function()
          event:wait()
          passed = passed + 1
        end)
      end
      patience.settle()
      assert.equal(0, passed)
      assert.is_false(event:is_set())
      event:set()
      event:set()
      scope:wait()
      assert.equal(3, passed)
      assert.is_true(event:is_set())
      event:wait()
    end)
  )

  it(
    "may be set by a callback of the loop",
    within(function()
      local uv = require("luv")
      local event = task.event()
      local timer = uv.new_timer()
      timer:start(1, 0, function()
        timer:close()
        event:set()
      end)
      event:wait()
    end)
  )
end)
