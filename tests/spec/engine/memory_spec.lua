-- The Lua state's memory: small pieces from lists by size, the rest from malloc; and warn(), whose function comes with
-- it.
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

describe("the state's memory", function()
  it("keeps what is in blocks that grow and shrink across the sizes of pieces", function()
    local strings, arrays = {}, {}
    for round = 1, 3 do
      for size = 1, 700 do
        strings[size] = string.char(33 + (size + round) % 90):rep(size)
        local array = {}
        for place = 1, size do
          array[place] = place * round
        end
        for place = size, 2, -1 do
          array[place] = nil
        end
        array.name = size -- has the table made again, smaller
        arrays[size] = array
      end
      collectgarbage()
      for size = 1, 700 do
        assert.equal(string.char(33 + (size + round) % 90):rep(size), strings[size])
        assert.equal(round, arrays[size][1])
        assert.equal(size, arrays[size].name)
      end
    end
  end)

  it("uses again what has been given back", function()
    local result = process.run({
      BINARY,
      "-e",
      [[local uv = require("luv")
        local function churn()
          for place = 1, 100000 do local _ = { tostring(place) } end
          collectgarbage()
          return uv.resident_set_memory()
        end
        churn()
        local before = churn()
        for _ = 1, 5 do churn() end
        print((uv.resident_set_memory() - before) / (1 << 20))]],
      env = { ASAN_OPTIONS = "quarantine_size_mb=1" }, -- else AddressSanitizer holds back what was freed
      timeout = 60,
    })
    assert.equal(0, result.code, result.stderr)
    assert.is_true(tonumber(result.stdout) < 8, result.stdout)
  end)
end)

describe("warn", function()
  it("is off, obeys orders, and puts pieces together", function()
    local result = process.run({
      BINARY,
      "-e",
      [[warn("never") warn("@on") warn("one ", "and ", "two") warn("@unknown") warn("@off") warn("never")
        warn("@", "on") warn("never")]],
      timeout = 30,
    })
    assert.equal(0, result.code, result.stderr)
    assert.equal("Lua warning: one and two\n", result.stderr)
  end)
end)
