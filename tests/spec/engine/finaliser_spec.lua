-- Lua calls finalisers in an order of its own: one may use a handle of the engine that was finalised before it.
local core = require("ciranda.core.ssh")
local crypto = require("ciranda.core.crypto")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/ssh/support.lua")
local task = require("ciranda.task")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

--- Every method of a finalised handle raises; those named are quiet.
local function assert_refused(handle, quiet)
  local class = getmetatable(handle)
  class.__gc(handle)
  for name, method in pairs(class) do
    if type(method) == "function" then
      local ok, err = pcall(method, handle, quiet[name])
      if quiet[name] then
        assert.is_true(ok, name .. ": " .. tostring(err))
      else
        assert.matches("finalised already", ok and name .. " did not raise" or err, name)
      end
    end
  end
end

describe("a handle that was finalised", function()
  it("is refused by the finaliser that comes later", function()
    local result = process.run {
      BINARY,
      "-e",
      [[
      local core, task = require("ciranda.core.ssh"), require("ciranda.task")
      local older = setmetatable({}, { __gc = function(self)
        print(pcall(self.session.bytes, self.session))
        print(pcall(self.session.close, self.session))
      end })
      local over
      local options = { write = function() end, methods = { kex = "curve25519-sha256" } }
      local operation, session = core.open(options, function() over = true end)
      older.session = session
      operation:cancel()
      repeat task.sleep(0.01) until over
      older, operation, session = nil, nil, nil
      collectgarbage()
      collectgarbage()]],
      timeout = 60,
    }
    assert.equal(0, result.code, result.stderr)
    assert.matches("^false\t.*finalised already.*\ntrue\n$", result.stdout)
  end)

  it("is refused as a session, a channel, a key and a digest", function()
    local server = support.server()
    local connection <close> = require("ciranda.ssh").connect(server:options())
    local session = connection.session
    local channel = task.call(session.exec, session, { command = "sleep 60" })
    local key = task.call(core.key_read, support.key("ed25519"), nil)
    local ok, err = pcall(assert_refused, channel, { close = 0, __close = 0, __gc = 0 })
    local other = select(
      2,
      core.open({ write = function() end, methods = { kex = "curve25519-sha256" } }, function() end)
    )
    local digest = crypto.start("sha256")
    server:stop()
    support.clean()
    assert.is_true(ok, tostring(err))
    assert_refused(other, { close = "over", __close = 0, __gc = 0 })
    assert_refused(key, { __gc = 0 })
    getmetatable(digest).__gc(digest)
    assert.matches("finished", select(2, pcall(digest.finish, digest)))
  end)
end)
