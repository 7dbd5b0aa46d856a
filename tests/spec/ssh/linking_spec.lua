local core = require("ciranda.core.ssh")
local engine = require("ciranda.core.engine")
local process = require("ciranda.io.process")

describe("libssh2", function()
  it("is new enough for RSA keys and signals", function()
    local major, minor = core.version:match("^(%d+)%.(%d+)")
    assert.is_true(tonumber(major) * 100 + tonumber(minor) >= 111, core.version)
  end)

  it("of ours is invisible to libcurl, which brings its own", function()
    local said = process.run({ "nm", "-D", "--defined-only", engine.executable }):check().stdout
    assert.is_truthy(
      said:find(" T lua_pushstring\n", 1, true),
      "nm lists the symbols that the program exports"
    )
    assert.is_nil(said:find("libssh2_", 1, true))
  end)
end)
