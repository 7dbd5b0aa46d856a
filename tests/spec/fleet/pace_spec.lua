local err = require("ciranda.io.error")
local paces = require("ciranda.fleet.pace")
local task = require("ciranda.task")

describe("fleet.pace", function()
  local function slow(phase)
    err.raise({ code = "timeout", phase = phase or "kex", message = "no answer" })
  end

  it("lets in as many as it may, first come, first served", function()
    local pace = paces.new(2)
    local order, running, most = {}, 0, 0
    task.map({ 1, 2, 3, 4, 5 }, function(number)
      return pace:with(function()
        order[#order + 1] = number
        running = running + 1
        most = math.max(most, running)
        task.yield()
        running = running - 1
        return number
      end)
    end)
    assert.same({ 1, 2, 3, 4, 5 }, order)
    assert.equal(2, most)
  end)

  it("gets through where so many at once never would: each takes longer the more there are", function()
    -- A server that does 8 handshakes in the time that one may take, and nothing of those that were given up.
    local pace = paces.new(64)
    local inside, tries = 0, 0
    local done = task.map(
      (function()
        local list = {}
        for number = 1, 64 do
          list[number] = number
        end
        return list
      end)(),
      function()
        while true do
          local ok, problem = pcall(pace.with, pace, function()
            inside, tries = inside + 1, tries + 1
            local crowd = inside
            task.sleep(0.001)
            crowd = math.max(crowd, inside)
            inside = inside - 1
            if crowd > 8 then
              slow()
            end
            return true
          end)
          if ok then
            return true
          end
          assert.is_true(err.is(problem, "timeout"))
        end
      end
    )
    assert.equal(64, #done)
    assert.is_true(pace.limit <= 16, tostring(pace.limit))
    assert.is_true(tries < 600, tostring(tries))
  end)

  it("is cut once for all that had begun, never below four, and grows again", function()
    local pace = paces.new(32)
    task.map({ 1, 2, 3, 4, 5, 6 }, function()
      pcall(pace.with, pace, function()
        task.yield()
        slow()
      end)
    end)
    assert.equal(16, pace.limit)
    for _ = 1, 10 do
      pcall(pace.with, pace, slow)
    end
    assert.equal(4, pace.limit)
    for _ = 1, 1000 do
      pace:with(function() end)
    end
    assert.equal(32, pace.limit)
  end)

  it("is not slowed down by hosts that are not there, or that refuse", function()
    local pace = paces.new(32)
    pcall(pace.with, pace, function()
      slow("connect")
    end)
    pcall(pace.with, pace, function()
      err.raise({ code = "auth", phase = "auth", message = "no" })
    end)
    assert.equal(32, pace.limit)
  end)

  it("loses no turn with those that are cancelled", function()
    local pace = paces.new(1)
    local gate, got = task.event(), nil
    task.all({
      function()
        pace:with(function()
          gate:wait()
        end)
      end,
      function()
        assert.is_false(pcall(task.timeout, 0.01, pace.with, pace, error))
        gate:set()
        got = pace:with(function()
          return "in"
        end)
      end,
    })
    assert.equal("in", got)
  end)
end)
