local engine = require("ciranda.core.engine")
local process = require("ciranda.io.process")
local uv = require("luv")

local CODE = [[
  local account = require("ciranda.io.account")
  for _, name in ipairs(arg) do
    local ok, value = pcall(account[name])
    print(ok and value or value.code .. ": " .. value.message)
  end
]]

--- What a program says of its account, in an environment.
local function said(env, number)
  local argv = { engine.executable, "-e", CODE, "home", "user", env = env }
  if number then
    -- By number alone: it has no account.
    argv = { "setpriv", "--reuid", number, "--clear-groups", table.unpack(argv) }
    argv.env = env
  end
  return process.run(argv):check().stdout
end

describe("ciranda.io.account", function()
  local own = uv.os_get_passwd()

  it("goes by the environment, and by the system's accounts where that says nothing", function()
    assert.equal("/h\nu\n", said({ HOME = "/h", USER = "u", LOGNAME = "l" }))
    assert.equal("/h\nl\n", said({ HOME = "/h", USER = "", LOGNAME = "l" }))
    for _, nothing in ipairs({ "", false }) do
      assert.equal(
        ("%s\n%s\n"):format(own.homedir, own.username),
        said({ HOME = nothing, USER = nothing, LOGNAME = nothing })
      )
    end
    assert.equal(own.homedir .. "\nu\n", said({ HOME = "relative", USER = "u" }))
  end)

  it("says what to set where there is no account", function()
    if uv.getuid() ~= 0 then
      return -- only root may become somebody else
    end
    local text = said({ HOME = false, USER = false, LOGNAME = false }, "54321")
    assert.matches(
      "^failed: there is no home directory: .*uid 54321 .*set HOME\nfailed: who is this%?.*set USER\n$",
      text
    )
    assert.equal("/h\nu\n", said({ HOME = "/h", USER = "u" }, "54321"))
  end)
end)
