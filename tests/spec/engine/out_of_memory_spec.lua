-- Lua without memory: a call into the engine raises and leaves nothing behind, and where an error would leave a library
-- in the middle of its work the program ends. Lua itself is made to fail, by tests/fixtures/out_of_memory/memory.c.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local FIXTURES = "tests/fixtures/out_of_memory/"

describe("without memory", function()
  local directory, library
  setup(function()
    directory = fs.tempdir("ciranda-out-of-memory-spec")
    library = directory .. "/memory.so"
    local flags = process.run({ "pkg-config", "--cflags", "lua5.4" }):check().stdout
    local command = { "cc", "-shared", "-fPIC", "-Wl,-z,nodelete", "-o", library, FIXTURES .. "memory.c" }
    for flag in flags:gmatch("%S+") do
      table.insert(command, flag)
    end
    process.run(command):check()
  end)

  teardown(function()
    fs.remove_tree(directory)
  end)

  it("every binding raises, calls nobody back and keeps nothing, or does its work", function()
    local result = process.run { BINARY, FIXTURES .. "bindings.lua", library, timeout = 120 }
    assert.equal(0, result.code, result.stderr)
    assert.is_true(tonumber(result.stdout:match("^(%d+) calls without memory\n$")) > 100, result.stdout)
  end)

  it("so do the methods of sessions and channels", function()
    local support = dofile("tests/spec/ssh/support.lua")
    local server = support.server()
    local result = process.run {
      BINARY,
      FIXTURES .. "bindings.lua",
      library,
      server.address,
      tostring(server.port),
      server.user,
      support.key("ed25519"),
      timeout = 120,
    }
    server:stop()
    support.clean()
    assert.equal(0, result.code, result.stderr)
    assert.is_true(tonumber(result.stdout:match("^(%d+) calls without memory\n$")) > 40, result.stdout)
  end)

  it("the program ends where nobody can be told, and says why", function()
    for _, n in ipairs { 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144 } do
      local result = process.run { BINARY, FIXTURES .. "loop.lua", library, tostring(n), timeout = 60 }
      assert.equal(1, result.code, ("%d: %s"):format(n, result.stderr))
      assert.matches("not enough memory", result.stderr)
      assert.not_matches("Sanitizer", result.stderr)
    end
  end)
end)
