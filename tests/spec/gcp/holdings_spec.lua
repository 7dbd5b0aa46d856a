-- What queued resources and nodes hold.
local holdings = require("ciranda.gcp.holdings")

local function queued(name, state, node, count, more)
  local message = {
    name = "projects/p/locations/z/queuedResources/" .. name,
    createTime = "2026-01-01T00:00:00Z",
    state = { state = state },
    tpu = { nodeSpec = {} },
  }
  for slice = 1, count do
    message.tpu.nodeSpec[slice] = { nodeId = name .. "-" .. slice, node = node }
  end
  for key, value in pairs(more or {}) do
    message[key] = value
  end
  return message
end

local V5E = { acceleratorType = "v5litepod-16" }

describe("ciranda.gcp.holdings", function()
  it("counts slices and chips, however they are spelled", function()
    local now = 1767225600 + 90
    assert.same(
      { slices = 3, chips = 48, generation = "v5e", age = 90 },
      holdings.of(queued("a", "ACTIVE", V5E, 3), now)
    )
    local spec = { multisliceParams = { nodeCount = 2 }, node = { acceleratorType = "v4-8" } }
    assert.same(
      { slices = 2, chips = 8, generation = "v4" },
      holdings.of({ tpu = { nodeSpec = { spec } } }, now)
    )
    local node = { name = "n", acceleratorConfig = { type = "V5P", topology = "2x2x2" } }
    assert.same({ slices = 1, chips = 8, generation = "v5p" }, holdings.of(node, now))
    assert.same({ slices = 1 }, holdings.of({ acceleratorType = "v99-8" }, now))
    for _, odd in ipairs {
      { tpu = {} },
      { tpu = { nodeSpec = 7 } },
      { tpu = { nodeSpec = { 7 } } },
      { createTime = 7 },
    } do
      assert.is_table(holdings.of(odd, now))
    end
  end)

  it("says what a waiting request asks for, and what holds the quota meanwhile", function()
    local own = queued("own", "WAITING_FOR_RESOURCES", V5E, 1, { spot = {} })
    assert.equal(
      "Capacity: it asks for 1 slice of v5e (16 chips), spot, in z.",
      holdings.situation(own, nil, "z")
    )
    local all = {
      own = own,
      a = queued("a", "ACTIVE", V5E, 2),
      b = queued("b", "FAILED", V5E, 1),
      c = queued("c", "SUSPENDED", V5E, 1),
      d = queued("d", "WAITING_FOR_RESOURCES", V5E, 4),
      e = queued("e", "ACTIVE", { acceleratorType = "v4-8" }, 1),
    }
    local text = holdings.situation(own, all, "z")
    assert.matches(
      "Quota: 3 other queued resources of this project hold 64 chips there, of which b, c are FAILED or "
        .. "SUSPENDED and hold quota until deleted: ciranda qr delete b.",
      text,
      1,
      true
    )
    for more, kind in pairs { [{ reservationName = "r" }] = "reserved", [{ guaranteed = {} }] = "guaranteed" } do
      assert.matches(
        ", " .. kind .. ",",
        holdings.situation(queued("x", "", V5E, 1, more), nil, "z"),
        1,
        true
      )
    end
  end)

  it("writes ages shortly", function()
    for seconds, text in pairs {
      [0] = "0s",
      [119.7] = "119s",
      [120] = "2m",
      [7199] = "119m",
      [7200] = "2h",
      [172800] = "2d",
    } do
      assert.equal(text, holdings.age_text(seconds))
    end
    assert.equal("-", holdings.age_text(nil))
  end)
end)
