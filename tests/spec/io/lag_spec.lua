-- The clock that stands still while the program does not run.
local lag = require("ciranda.io.lag")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

describe("io.lag", function()
  local delay

  before_each(function()
    delay = lag.delay
    lag.clock(true)
  end)

  after_each(function()
    lag.delay = delay
    lag.clock(true)
  end)

  --- How far a function lets this clock and the other go: the other is looked at before and after each look at this
  --- one, between which the program may have been held up.
  ---@return number passed
  ---@return number most of the other
  ---@return number least of the other
  local function measure(fn)
    local before_first, lag_began, after_first = uv.hrtime(), lag.clock(true), uv.hrtime()
    fn()
    local before_last, lag_ended, after_last = uv.hrtime(), lag.clock(true), uv.hrtime()
    return lag_ended - lag_began, (after_last - before_first) / 1e9, (before_last - after_first) / 1e9
  end

  it("goes on while there is nothing to do", function()
    local before = delay()
    local passed, real, slept = measure(function()
      for _ = 1, 6 do
        task.sleep(0.1)
      end
    end)
    -- Less only what the kernel says that there was no processor for, and what lay beyond a second on a busy machine.
    local least = slept - (delay() - before) - math.max(0, real - 1) - 0.001
    assert.is_true(passed <= real)
    assert.is_true(passed >= least, ("%f of %f, and not %f"):format(passed, real, least))
    assert.is_true(passed > 0)
  end)

  it("stands still in a turn that takes long, but for the second between two looks", function()
    local turn
    local passed, real = measure(function()
      local began = uv.hrtime()
      uv.sleep(2500)
      turn = (uv.hrtime() - began) / 1e9
      assert.is_true(lag.clock() <= lag.clock(true) + 0.001)
    end)
    assert.is_true(turn >= 2.5)
    assert.is_true(passed <= 1.001 + real - turn, ("%f of %f with a turn of %f"):format(passed, real, turn))
  end)

  it("stands still while the kernel has no processor for it, in however short pieces", function()
    -- Nine tenths of all time, at whatever moment the clock asks: it looks once a second by itself.
    local said, began = delay(), uv.hrtime()
    lag.delay = function()
      return said + 0.9 * (uv.hrtime() - began) / 1e9
    end
    lag.clock(true)
    local passed, real = measure(function()
      for _ = 1, 10 do
        task.sleep(0.05)
      end
    end)
    assert.is_true(passed <= 0.3 * real, ("%f of %f"):format(passed, real))
    assert.is_true(passed > 0)
    -- A kernel cannot take more than there is, and never gives back.
    passed = measure(function()
      said = said + 1000
    end)
    assert.is_true(passed > -0.1 and passed < 1, tostring(passed))
  end)

  it("keeps no program from its end", function()
    local answer = process.run({
      require("ciranda.core.engine").executable,
      "-e",
      "require('ciranda.io.lag').clock() print('over')",
      timeout = 60,
    })
    assert.equal("over\n", answer.stdout, answer.stderr)
  end)
end)
