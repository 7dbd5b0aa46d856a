local clock = require("ciranda.io.clock")
local task = require("ciranda.task")

describe("ciranda.io.clock", function()
  it("tells the time of day in seconds since 1970", function()
    local before = os.time()
    local wall = clock.wall()
    -- os.time is behind by up to a tick of the kernel's, also when a second has just begun.
    assert.is_true(before <= wall and wall < os.time() + 2, tostring(wall))
  end)

  it("measures in seconds with a clock that only goes forward", function()
    task.run(function()
      local began, wall = clock.now(), clock.wall()
      task.sleep(0.05)
      local took = clock.now() - began
      assert.is_true(took >= 0.049, tostring(took)) -- the loop counts in whole milliseconds
      -- In the same unit as the time of day, unless somebody has just set that.
      assert.is_true(took <= clock.wall() - wall + 1, tostring(took))
    end)
  end)
end)
