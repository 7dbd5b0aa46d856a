local errors = require("ciranda.io.error")
local stdio = require("ciranda.io.stdio")
local task = require("ciranda.task")

local patience = dofile("tests/fixtures/patience.lua")

-- Under plain Busted nothing is installed; the host has done it already.
stdio.install()

--- Every test runs in a task, and where it is (outside of one under plain Busted), so that both give the same.
local function both(name, fn)
  it(name .. " (here)", fn)
  it(name .. " (in a task)", function()
    task.run(fn)
  end)
end

--- `run(line)` runs a shell's line that ends only when another task has gone on meanwhile.
local function lets_others_run(run)
  local path = os.tmpname()
  local said
  local index = task.race({
    function()
      run(("for i in $(seq 3000); do [ -e '%s' ] || exit 0; sleep 0.01; done"):format(path))
      said = io.open(path) and "the program ran out of patience" or "the program has ended"
    end,
    function()
      for _ = 1, 4 do
        task.sleep(0.005)
      end
      os.remove(path)
      task.sleep(60)
    end,
  })
  os.remove(path)
  assert.same({ 1, "the program has ended" }, { index, said })
end

describe("os.execute", function()
  both("gives what the stock one gives", function()
    assert.same({ true, "exit", 0 }, { os.execute("true") })
    assert.same({ nil, "exit", 3 }, { os.execute("exit 3") })
    assert.same({ nil, "signal", 9 }, { os.execute("kill -9 $$") })
    assert.is_true(os.execute())
    assert.same({ nil, "exit", 127 }, { os.execute("exec /no/such/program 2>/dev/null") })
  end)

  it("lets other tasks run", function()
    task.run(lets_others_run, os.execute)
  end)

  it("serves where a task cannot wait, as the stock one", function()
    task.run(function()
      local result
      table.sort({ 2, 1 }, function(a, b)
        result = { os.execute("exit 4") }
        return a < b
      end)
      assert.same({ nil, "exit", 4 }, result)
    end)
  end)

  it("ends its program when the task is cancelled", function()
    task.run(function()
      local ok, err = pcall(task.timeout, 0.05, os.execute, "exec sleep 60")
      assert.is_false(ok)
      assert.is_true(errors.is(err, "timeout"))
    end)
  end)
end)

describe("io.popen", function()
  both("reads in every format", function()
    local file = io.popen("printf '12 0x1F -3.5e2 word\\nline\\n\\nlast'")
    assert.equal("file", io.type(file))
    assert.matches("^file %(0x", tostring(file))
    assert.same({ 12, 31, -350.0 }, { file:read("n", "n", "n") })
    assert.same({ " word", "line\n", "" }, { file:read("l", "L", "*l") })
    assert.same({ "la", "", "st" }, { file:read(2, 0, "a") })
    assert.same({ "", nil, n = 2 }, table.pack(file:read("a", "l")))
    assert.is_nil(file:read(0))
    assert.is_nil(file:read("n"))
    assert.same({ true, "exit", 0 }, { file:close() })
    assert.equal("closed file", io.type(file))
    assert.equal("file (closed)", tostring(file))
  end)

  both("reads lines in a for loop, also with formats", function()
    local lines = {}
    for line in io.popen("seq 3"):lines() do
      lines[#lines + 1] = line
    end
    assert.same({ "1", "2", "3" }, lines)
    lines = {}
    for line in io.popen("printf 'a\\nb'"):lines("L") do
      lines[#lines + 1] = line
    end
    assert.same({ "a\n", "b" }, lines)
    local char, rest = io.popen("printf abc"):lines(1, "a")()
    assert.equal("a", char)
    assert.equal("bc", rest)
  end)

  both("gives the status at close", function()
    assert.same({ nil, "exit", 5 }, { io.popen("exit 5"):close() })
    assert.same({ nil, "signal", 15 }, { io.popen("kill $$"):close() })
    assert.same({ nil, "exit", 127 }, { io.popen("exec /no/such 2>/dev/null"):close() })
  end)

  both("writes", function()
    local path = os.tmpname()
    local file = io.popen("cat > " .. path .. "; exit 4", "w")
    assert.equal(file, file:write("text ", 42, " ", 1.5, "\n"))
    file:flush()
    assert.same({ nil, "exit", 4 }, { file:close() })
    local back <close> = assert(io.open(path))
    assert.equal("text 42 1.5\n", back:read("a"))
    os.remove(path)
  end)

  both("is a file for io.input, io.read, io.lines and io.close", function()
    local before = io.input()
    local file = io.popen("printf 'one\\ntwo\\nthree\\n'")
    assert.equal(file, io.input(file))
    assert.equal(file, io.input())
    assert.equal("one", io.read())
    local rest = {}
    for line in io.lines() do
      rest[#rest + 1] = line
    end
    assert.same({ "two", "three" }, rest)
    io.input(before)
    assert.same({ true, "exit", 0 }, { io.close(file) })
    assert.equal(before, io.input())
  end)

  both("is a file for io.output and io.write", function()
    local path = os.tmpname()
    local before = io.output()
    local file = io.popen("cat > " .. path, "w")
    io.output(file)
    io.write("through ", "io.write")
    io.output(before)
    file:close()
    local back <close> = assert(io.open(path))
    assert.equal("through io.write", back:read("a"))
    os.remove(path)
  end)

  both("refuses what the stock one refuses", function()
    assert.has_error(function()
      io.popen("true", "rw")
    end)
    assert.has_error(function()
      io.popen({})
    end)
    local file = io.popen("true")
    file:close()
    for _, method in ipairs({ "read", "lines", "close", "flush", "write" }) do
      local ok, err = pcall(file[method], file)
      assert.is_false(ok)
      assert.matches("attempt to use a closed file", err)
    end
    local open = io.popen("echo x")
    assert.has_error(function()
      open:read("x")
    end)
    open:close()
    assert.is_nil(io.type("no file"))
    assert.equal("file", io.type(io.stdout))
  end)

  it("lets other tasks run while it reads", function()
    task.run(lets_others_run, function(line)
      for _ in io.popen("echo begun; " .. line):lines() do
      end
    end)
  end)

  it("gives a number as soon as it is there, not when the program ends", function()
    task.run(function()
      local file <close> = io.popen("echo 42; exec sleep 60")
      assert.equal(42, task.timeout(10, file.read, file, "n"))
    end)
  end)

  it("ends its program when the block of a <close> is left, and when its task is cancelled", function()
    task.run(function()
      local pid
      do
        local file <close> = io.popen("echo $$; exec sleep 60")
        pid = file:read("n")
      end
      assert.is_nil(io.open("/proc/" .. pid .. "/stat"))
      pid = nil
      local scope <close> = task.scope()
      local reading = scope:spawn(function()
        local file = io.popen("echo $$; exec sleep 600")
        pid = file:read("n")
        file:read("a")
      end)
      patience.wait_for("the program's number", function()
        return pid
      end)
      reading:cancel()
      assert.is_false(pcall(reading.wait, reading))
      patience.wait_for("the program's end", function()
        local file <close> = io.open("/proc/" .. pid .. "/stat")
        return not file
      end)
    end)
  end)

  it("gives nil and a message when nobody reads any more", function()
    task.run(function()
      local file = io.popen("exit 0", "w")
      task.sleep(0.1)
      local ok, message
      for _ = 1, 100 do
        ok, message = file:write(("x"):rep(10000))
        if not ok then
          break
        end
      end
      assert.is_nil(ok)
      assert.matches("nobody reads it", message)
      file:close()
    end)
  end)
end)
