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

  --- How far a function lets this clock and the other go.
  local function measure(fn)
    local began, lag_began = uv.hrtime() / 1e9, lag.clock(true)
    fn()
    local passed = lag.clock(true) - lag_began
    return passed, uv.hrtime() / 1e9 - began
  end

  it("goes on while there is nothing to do", function()
    local before = delay()
    local passed, real = measure(function()
      for _ = 1, 6 do
        task.sleep(0.1)
      end
    end)
    -- Less only what the kernel says that there was no processor for, and what lay beyond a second on a busy machine.
    local least = real - (delay() - before) - math.max(0, real - 1) - 0.02
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
    local said = delay()
    lag.delay = function()
      return said
    end
    lag.clock(true)
    local passed, real = measure(function()
      for _ = 1, 10 do
        local began = uv.hrtime()
        task.sleep(0.05)
        said = said + 0.9 * (uv.hrtime() - began) / 1e9
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
