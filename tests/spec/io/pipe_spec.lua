--- Standard input as a whole, of whatever kind it is.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

--- A program that says how much it has read; another task of it says that it lives.
local READS = [[
  local task = require("ciranda.task")
  local scope <close> = task.scope()
  scope:spawn("alive", function()
    task.sleep(0.01)
    io.stderr:write("alive\n")
  end)
  local text = require("ciranda.io.pipe").input(100000)
  print(#text, text:sub(1, 5))
]]

describe("standard input", function()
  local directory

  before_each(function()
    directory = fs.tempdir()
    fs.write(directory .. "/reads.lua", READS, { sync = false })
  end)

  after_each(function()
    fs.remove_tree(directory)
  end)

  --- A shell's line with `read` for the program.
  local function sh(line)
    local define = ("read() { '%s' reads.lua; }; "):format(BINARY)
    return process.run({ "bash", "-c", define .. line, cwd = directory, timeout = 60 })
  end

  it("is read to its end from a pipe, a file, a socket and nothing", function()
    assert.equal("100000\tyyyyy\n", sh("yes '' | tr '\\n' y | head -c 100000 | read"):check().stdout)
    assert.equal("6\tAbcde\n", sh("printf Abcdef | read"):check().stdout)
    local rest = "printf abcdef >file; { dd bs=1 count=2 of=/dev/null 2>/dev/null; read; } <file"
    assert.equal("4\tcdef\n", sh(rest):check().stdout)
    assert.equal("0\t\n", sh("read </dev/null"):check().stdout)
    assert.equal("0\t\n", sh("read <&-"):check().stdout)
    -- process.run gives a socket.
    local argv = { BINARY, directory .. "/reads.lua", stdin = "hello", timeout = 60 }
    assert.equal("5\thello\n", process.run(argv):check().stdout)
  end)

  it("that is too long, or has no end, is refused", function()
    for _, endless in ipairs({ "yes | read", "read </dev/zero" }) do
      local result = sh(endless)
      assert.equal(1, result.code, endless)
      assert.matches("standard input: it holds more than the 100000 bytes allowed", result.stderr, 1, true)
    end
  end)

  it("that nobody writes to holds up no other task, nor a Ctrl-C", function()
    process.run({ "mkfifo", directory .. "/fifo" }):check()
    local held = assert(uv.fs_open(directory .. "/fifo", "r+", 0)) -- nobody waits for a writer, and none ends
    for _, from in ipairs({ "exec '%s' reads.lua", "exec '%s' reads.lua <fifo" }) do
      local program <close> = process.spawn({
        "sh",
        "-c",
        from:format(BINARY),
        cwd = directory,
        stdin = process.PIPE,
        stderr = process.PIPE,
      })
      assert.equal("alive\n", task.timeout(60, program.stderr.read, program.stderr))
      program:signal("INT")
      local ended = task.timeout(60, program.wait, program)
      assert.equal(130, ended.code, from)
    end
    uv.fs_close(held)
  end)
end)
