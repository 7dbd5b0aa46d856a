local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local patience = dofile("tests/fixtures/patience.lua")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

local function on_close(fn)
  return setmetatable({}, { __close = fn })
end

--- What a misuse says, and that it says where.
local function misuse(pattern, fn)
  local ok, err = pcall(fn)
  assert.is_false(ok)
  assert.is_true(errors.is(err, "misuse"))
  assert.matches("combine_spec%.lua:%d+: ", err.message)
  assert.matches(pattern, err.message)
end

describe("task.all", function()
  it(
    "gives the values in order, whatever the order of the ends",
    within(function()
      local values = task.all({
        function()
          task.sleep(0.005)
          return "slow"
        end,
        function()
          return "quick", "dropped"
        end,
        function() end,
      })
      assert.same({ "slow", "quick", n = 3 }, values)
      assert.same({ n = 0 }, task.all({}))
    end)
  )

  it(
    "cancels the others when one fails",
    within(function()
      local log = {}
      local ok, err = pcall(task.all, {
        function()
          local _ <close> = on_close(function()
            log[#log + 1] = "cleaned"
          end)
          task.sleep(60)
        end,
        function()
          task.sleep(0.001)
          error("boom", 0)
        end,
      })
      assert.is_false(ok)
      assert.equal("boom", err)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "refuses what is no list of functions",
    within(function()
      misuse("entry 2 must be a function, got string", function()
        task.all({ function() end, "x" })
      end)
      misuse("a list of functions expected, got nil", function()
        task.all(nil)
      end)
    end)
  )
end)

describe("task.map", function()
  it(
    "never has more than the limit at once, and keeps the order",
    within(function()
      local now, most = 0, 0
      local list = {}
      for index = 1, 20 do
        list[index] = index
      end
      local values = task.map(list, function(entry, index)
        now = now + 1
        most = math.max(most, now)
        task.sleep(0.001)
        now = now - 1
        assert.equal(entry, index)
        return entry * 2
      end, 3)
      assert.equal(3, most)
      assert.equal(20, values.n)
      assert.equal(40, values[20])
    end)
  )

  it(
    "takes all at once without a limit",
    within(function()
      local now, most = 0, 0
      task.map({ 1, 2, 3, 4, 5 }, function()
        now = now + 1
        most = math.max(most, now)
        task.sleep(0.001)
        now = now - 1
      end)
      assert.equal(5, most)
    end)
  )

  it(
    "stops at the first failure",
    within(function()
      local started = 0
      local ok, err = pcall(task.map, { 1, 2, 3, 4, 5, 6 }, function(entry)
        started = started + 1
        task.sleep(0.001)
        if entry == 2 then
          error("boom", 0)
        end
        task.sleep(60)
      end, 2)
      assert.is_false(ok)
      assert.equal("boom", err)
      assert.equal(2, started)
    end)
  )

  it(
    "refuses a limit below 1",
    within(function()
      misuse("the limit must be a positive integer, got 0", function()
        task.map({ 1 }, function() end, 0)
      end)
    end)
  )
end)

describe("task.race", function()
  it(
    "gives the first, cancels the others and waits for them",
    within(function()
      local log = {}
      local index, a, b = task.race({
        function()
          local _ <close> = on_close(function()
            task.sleep(0.002)
            log[#log + 1] = "cleaned"
          end)
          task.sleep(60)
        end,
        function()
          task.sleep(0.001)
          return "first", nil
        end,
      })
      assert.equal(2, index)
      assert.equal("first", a)
      assert.is_nil(b)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "raises when the first to end failed",
    within(function()
      local failure = {}
      local ok, err = pcall(task.race, {
        function()
          task.sleep(60)
        end,
        function()
          error(failure)
        end,
      })
      assert.is_false(ok)
      assert.equal(failure, err)
    end)
  )

  it(
    "lets nothing count that the losers raise",
    within(function()
      local index, value = task.race({
        function()
          pcall(task.sleep, 60)
          error("a loser's clean-up failed")
        end,
        function()
          return "winner"
        end,
      })
      assert.equal(2, index)
      assert.equal("winner", value)
    end)
  )

  it(
    "is cancelled with its task",
    within(function()
      local log = {}
      local child
      pcall(function()
        local scope <close> = task.scope()
        child = scope:spawn(function()
          task.race({
            function()
              local _ <close> = on_close(function()
                log[#log + 1] = "cleaned"
              end)
              task.sleep(60)
            end,
          })
        end)
        patience.settle()
        child:cancel()
      end)
      assert.equal("cancelled", child:status())
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "needs somebody to race",
    within(function()
      misuse("at least one function", function()
        task.race({})
      end)
    end)
  )
end)

describe("task.timeout", function()
  it(
    "gives the values when the function ends in time",
    within(function()
      assert.same(
        { 1, nil, 3, n = 3 },
        table.pack(task.timeout(60, function(...)
          task.sleep(0.001)
          return ...
        end, 1, nil, 3))
      )
    end)
  )

  it(
    "raises 'timeout' with where the function waited, after its clean-up",
    within(function()
      local log = {}
      local function stuck()
        local _ <close> = on_close(function()
          task.sleep(0.002)
          log[#log + 1] = "cleaned"
        end)
        task.sleep(60)
      end
      local ok, err = pcall(task.timeout, 0.005, stuck)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "timeout"))
      assert.matches("did not end within 0.005 s", err.message)
      assert.matches("combine_spec%.lua:%d+: in function", err.traceback)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "raises it also when the function swallows the cancellation",
    within(function()
      local ok, err = pcall(task.timeout, 0.002, function()
        pcall(task.sleep, 60)
        return "as if nothing had happened"
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "timeout"))
    end)
  )

  it(
    "raises what the function raises",
    within(function()
      local failure = {}
      local ok, err = pcall(task.timeout, 60, function()
        task.sleep(0.001)
        error(failure)
      end)
      assert.is_false(ok)
      assert.equal(failure, err)
    end)
  )

  it(
    "can be nested: the inner one's error passes through the outer one",
    within(function()
      local ok, err = pcall(task.timeout, 60, task.timeout, 0.002, task.sleep, 60)
      assert.is_false(ok)
      assert.matches("within 0.002 s", err.message)
      ok, err = pcall(task.timeout, 0.002, task.timeout, 60, task.sleep, 60)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "timeout"))
      assert.matches("within 0.002 s", err.message)
    end)
  )

  it(
    "leaves no timer behind",
    within(function()
      local uv = require("luv")
      local function timers()
        local count = 0
        uv.walk(function(handle)
          if uv.handle_get_type(handle) == "timer" and handle:is_active() and not handle:is_closing() then
            count = count + 1
          end
        end)
        return count
      end
      local before = timers()
      task.timeout(60, function() end)
      pcall(task.timeout, 0.001, task.sleep, 60)
      assert.equal(before, timers())
    end)
  )

  it(
    "refuses seconds that are none",
    within(function()
      for _, seconds in ipairs({ -1, 0 / 0, "1" }) do
        misuse("seconds must be a number of at least 0", function()
          task.timeout(seconds, function() end)
        end)
        misuse("seconds must be a number of at least 0", function()
          task.sleep(seconds)
        end)
      end
    end)
  )
end)

describe("task.sleep", function()
  it(
    "never returns early, even when the turn of the loop took long",
    within(function()
      local uv = require("luv")
      local busy_until = uv.hrtime() + 20e6
      while uv.hrtime() < busy_until do
      end
      local before = uv.hrtime()
      task.sleep(0.01)
      assert.is_true(uv.hrtime() - before >= 9e6)
    end)
  )

  it(
    "may be for ever",
    within(function()
      local index = task.race({
        function()
          task.sleep(math.huge)
        end,
        function()
          task.sleep(0.001)
        end,
      })
      assert.equal(2, index)
    end)
  )
end)

describe("task.yield", function()
  it(
    "lets others run",
    within(function()
      local log = {}
      task.all({
        function()
          log[#log + 1] = "a1"
          task.yield()
          log[#log + 1] = "a2"
        end,
        function()
          log[#log + 1] = "b1"
          task.yield()
          log[#log + 1] = "b2"
        end,
      })
      assert.same({ "a1", "b1", "a2", "b2" }, log)
    end)
  )
end)
