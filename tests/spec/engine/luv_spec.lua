-- What the program mends in luv, whose loop it shares.
local uv = require("luv")

describe("luv in the program", function()
  it("walks its own handles, whatever else is given", function()
    local timer = uv.new_timer()
    local found = false
    uv.walk(function(handle)
      found = found or handle == timer
    end, "ignored")
    timer:close()
    assert.is_true(found)
  end)

  it("leaves SIGINT to the engine, however it is written", function()
    local signal = uv.new_signal()
    for _, name in ipairs { "sigint", 2, 2.0, "2" } do
      for _, start in ipairs { signal.start, uv.signal_start, uv.signal_start_oneshot } do
        local ok, err = pcall(start, signal, name, print)
        assert.is_false(ok, tostring(name))
        assert.matches("SIGINT belongs to the engine", err)
      end
    end
    signal:close()
  end)
end)
