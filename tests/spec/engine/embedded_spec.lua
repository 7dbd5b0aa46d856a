-- What is built into the program, and what it shows to libraries that it loads.
local engine = require("ciranda.core.engine")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or engine.executable)

describe("the built-in modules", function()
  it("are those of the source tree", function()
    local expected = { "argparse", "dkjson" }
    for _, room in ipairs { "lua/ciranda", "recipes" } do
      for path, kind in fs.walk(room) do
        local relative = path:gsub("^lua/", "")
        if relative:find("%.lua$") and not relative:find("/_meta/") then
          local name = relative:gsub("%.lua$", ""):gsub("/init$", ""):gsub("/", ".")
          table.insert(expected, name)
        end
        assert(kind)
      end
    end
    table.sort(expected)
    local found = engine.embedded()
    table.sort(found)
    assert.same(expected, found)
  end)

  it("keep their line numbers", function()
    local result = process.run {
      BINARY,
      "-e",
      'print(select(2, pcall(require("ciranda.cli.flags").parse, "x", { flags = { { name = 1 } } }, {})))'
        .. ' print(debug.getinfo(require("ciranda.cli.flags").parse, "S").source)',
    }
    assert.matches("@lua/ciranda/cli/flags.lua", result.stdout, 1, true)
  end)

  it("are read from a directory with --lua-dir", function()
    local directory = fs.tempdir()
    fs.mkdir_p(directory .. "/lua/ciranda/cli")
    fs.write(
      directory .. "/lua/ciranda/cli/inspect.lua",
      "return { text = function() return 'from disk' end }"
    )
    local result = process.run {
      BINARY,
      "--lua-dir",
      directory,
      "-e",
      'print(require("ciranda.cli.inspect").text(1))',
    }
    fs.remove_tree(directory)
    assert.equal("from disk\n", result.stdout)
  end)
end)

describe("the program's symbols", function()
  it("show Lua's to C modules, and none of libssh2's to libcurl", function()
    local symbols = process.run({ "nm", "-D", "--defined-only", BINARY }):check().stdout
    assert.matches(" T lua_pcallk\n", symbols, 1, true)
    assert.not_matches("libssh2_", symbols, 1, true)
  end)

  it("load libcurl and libmicrohttpd only when they are used", function()
    local needed = process.run({ "readelf", "-d", BINARY }):check().stdout
    assert.not_matches("libcurl", needed, 1, true)
    assert.not_matches("libmicrohttpd", needed, 1, true)
  end)

  it("refuse the test of blindness: nm does list what is exported", function()
    local own = process.run({ "nm", "-D", "--defined-only", BINARY }):check().stdout
    assert.is_true(select(2, own:gsub("\n", "")) > 100)
  end)
end)
