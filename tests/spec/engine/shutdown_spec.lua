-- The end of the program: what is still under way, and finalisers that run when there is little left to use.
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

--- Runs a chunk to its end.
local function run(chunk, ...)
  return process.run { BINARY, "-e", chunk, ..., timeout = 40 }
end

describe("the end of the program", function()
  it("leaves work of the thread pool that does not end, also after a slow finaliser", function()
    local fifo = os.tmpname()
    os.remove(fifo)
    assert(os.execute("mkfifo " .. fifo))
    local result = run(([[
      local uv = require("luv")
      collectgarbage("stop")
      uv.fs_open(%q, "r", 0, function() end)
      setmetatable({}, { __gc = function()
        local start = uv.hrtime()
        while uv.hrtime() - start < 5e8 do end
      end })
      print("over")]]):format(fifo))
    os.remove(fifo)
    assert.equal(0, result.code)
    assert.equal("over\n", result.stdout)
  end)

  it("does not call back into a state that is closed", function()
    for _, start in ipairs {
      [[local timer = uv.new_timer() timer:start(0, 0, function() print("late") end)]],
      [[uv.fs_stat("/", function() print("late") end)]],
      [[require("ciranda.core.crypto").digest_file("/etc/passwd", { md5 = true }, function() print("late") end)]],
      [[http.request({ url = "http://127.0.0.1:1/" }, function() print("late") end)]],
    } do
      local result = run(([[
        local uv, http = require("luv"), require("ciranda.core.http")
        http.request({ url = "http://127.0.0.1:1/" }, function() end)
        KEPT = setmetatable({}, { __gc = function() %s end })
        print("over")]]):format(start))
      assert.equal(0, result.code, start .. result.stderr)
      assert.equal("over\n", result.stdout)
    end
  end)
end)
