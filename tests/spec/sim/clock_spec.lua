local clock = require("ciranda.sim.clock")

describe("the simulated cloud's clock", function()
  it("runs what falls due in order, each at its own time", function()
    local c = clock.manual(1000)
    local seen = {}
    local function at(label)
      return function()
        seen[#seen + 1] = label .. "@" .. (c:now() - 1000)
      end
    end
    c:after(5, at "b")
    c:after(2, function()
      at "a"()
      c:after(1, at "nested")
    end)
    c:after(5, at "c")
    c:after(50, at "late")
    c:advance(10)
    assert.are.same({ "a@2", "nested@3", "b@5", "c@5" }, seen)
    assert.are.equal(1010, c:now())
  end)

  it("does not run what was cancelled", function()
    local c = clock.manual()
    local ran = false
    local timer = c:after(1, function()
      ran = true
    end)
    c:cancel(timer)
    c:advance(2)
    assert.is_false(ran)
  end)

  it("keeps thousands of timers in order", function()
    local c = clock.manual(0)
    local delays, seen = {}, {}
    for i = 1, 3000 do
      delays[i] = (i * 7919) % 3001
      c:after(delays[i], function()
        seen[#seen + 1] = c:now()
      end)
    end
    c:advance(4000)
    table.sort(delays)
    assert.are.same(delays, seen)
  end)

  it("cannot be moved back", function()
    assert.has_error(function()
      clock.manual():advance(-1)
    end)
  end)

  it("writes times as the APIs do and reads what clients write", function()
    assert.are.equal("2026-01-01T00:00:00.250000000Z", clock.timestamp(1767225600.25))
    assert.are.equal(1767225600, clock.parse_timestamp "2026-01-01T00:00:00Z")
    assert.are.equal(1767225600, clock.parse_timestamp "2026-01-01T02:30:00+02:30")
    assert.are.equal(1767225600.5, clock.parse_timestamp "2026-01-01T00:00:00.500000000Z")
    assert.are.equal(951782400, clock.parse_timestamp "2000-02-29T00:00:00Z")
    for _, text in ipairs {
      "2026-01-01",
      "2026-13-01T00:00:00Z",
      "2026-01-01T00:00:00",
      "2026-01-01 00:00:00Z",
      "2026-01-01T00:00:00.1234567890Z",
      "2026-01-01T25:00:00Z",
      "",
    } do
      assert.is_nil(clock.parse_timestamp(text), text)
    end
  end)

  it("reads durations", function()
    assert.are.equal(3600, clock.parse_duration "3600s")
    assert.are.equal(1.5, clock.parse_duration "1.5s")
    for _, text in ipairs { "3600", "1h", "s", "1.s", "1.2.3s", "" } do
      assert.is_nil(clock.parse_duration(text), text)
    end
  end)
end)
