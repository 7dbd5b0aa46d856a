-- `ciranda FILE.lua` does what `lua FILE.lua` does; what differs is in the docs (module search, waiting).
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

describe("a script", function()
  local directory

  before_each(function()
    directory = fs.tempdir()
  end)
  after_each(function()
    fs.remove_tree(directory)
  end)

  --- Writes a script and runs it; the result of process.run.
  local function run(text, args, options)
    local path = directory .. "/script.lua"
    fs.write(path, text)
    local argv = { BINARY, path, timeout = 20 }
    for _, word in ipairs(args or {}) do
      table.insert(argv, word)
    end
    for key, value in pairs(options or {}) do
      argv[key] = value
    end
    return process.run(argv)
  end

  it("sees its arguments as lua gives them", function()
    local text = [[
      print(arg[0], arg[1], arg[2], #arg, ...)
      print(arg[-1] ~= nil)
    ]]
    local ours = run(text, { "a", "b c" })
    local path = directory .. "/script.lua"
    local theirs = process.run { "lua5.4", path, "a", "b c" }
    assert.equal(theirs.stdout, ours.stdout)
    assert.equal(0, ours.code)
  end)

  it("ends with the status it gives os.exit", function()
    for _, case in ipairs { { "", 0 }, { "os.exit(7)", 7 }, { "os.exit(true)", 0 }, { "os.exit(false)", 1 } } do
      assert.equal(case[2], run(case[1]).code)
    end
  end)

  it("works where standard streams are closed", function()
    local path = directory .. "/closed.lua"
    fs.write(path, 'print("printed")\nio.stderr:write("said\\n")\nos.exit(io.read() == nil and 3)')
    for closed, wanted in pairs {
      ["<&-"] = { "printed\n", "said\n" },
      [">&-"] = { "", "said\n" },
      ["2>&-"] = { "printed\n", "" },
      ["<&- >&- 2>&-"] = { "", "" },
    } do
      local line = '{ "$0" "$1" ' .. closed .. "; } </dev/null; exit $?"
      local result = process.run { "sh", "-c", line, BINARY, path, timeout = 20 }
      assert.same({ wanted[1], wanted[2], 3 }, { result.stdout, result.stderr, result.code }, closed)
    end
  end)

  it("ends with 1 and a traceback when it raises", function()
    local result = run("local function inner() error('boom') end\ninner()")
    assert.equal(1, result.code)
    assert.matches("script.lua:1: boom", result.stderr, 1, true)
    assert.matches("script.lua:2:", result.stderr, 1, true)
  end)

  it("says where a syntax error is", function()
    local result = run("x = = 1")
    assert.equal(1, result.code)
    assert.matches("script.lua:1:", result.stderr, 1, true)
  end)

  it("names a file that is not there", function()
    local result = process.run { BINARY, directory .. "/none.lua" }
    assert.equal(1, result.code)
    assert.matches("none.lua", result.stderr, 1, true)
  end)

  it("comes from standard input when it is - or nothing and no terminal", function()
    for _, argv in ipairs { { BINARY, "-" }, { BINARY } } do
      argv.stdin = "print('from', 'stdin')"
      assert.equal("from\tstdin\n", process.run(argv).stdout)
    end
  end)

  it("keeps standard output and standard error apart, and bytes as they are", function()
    local result = run("io.write('a\\0b\\xff') io.stderr:write('err')")
    assert.equal("a\0b\xff", result.stdout)
    assert.equal("err", result.stderr)
  end)

  it("finds modules beside it, never in the working directory", function()
    fs.write(directory .. "/neighbour.lua", "return 'beside'")
    assert.equal("beside\n", run("print((require('neighbour')))", nil, { cwd = "/" }).stdout)
    fs.mkdir(directory .. "/cwd")
    fs.write(directory .. "/cwd/stray.lua", "return 'stray'")
    local result = run("print(require('stray'))", nil, { cwd = directory .. "/cwd" })
    assert.equal(1, result.code)
    assert.matches("stray", result.stderr, 1, true)
  end)

  it("ignores LUA_PATH unless it is asked for", function()
    fs.mkdir(directory .. "/lib")
    fs.write(directory .. "/lib/hijack.lua", "return 'hijacked'")
    local env = { LUA_PATH = directory .. "/lib/?.lua" }
    local path = directory .. "/script.lua"
    fs.write(path, "print((select(2, pcall(require, 'hijack'))))")
    assert.matches("not found", process.run({ BINARY, path, env = env }).stdout)
    assert.equal("hijacked\n", process.run({ BINARY, "--use-lua-path", path, env = env }).stdout)
  end)

  it("may wait anywhere, and shares its loop with luv", function()
    local result = run([[
      local task, uv = require("ciranda.task"), require("luv")
      local order = {}
      uv.new_timer():start(20, 0, function() order[#order + 1] = "luv" end)
      task.sleep(0.05)
      order[#order + 1] = "task"
      print(table.concat(order, " "))
    ]])
    assert.equal("luv task\n", result.stdout)
    assert.equal(0, result.code)
  end)

  it("ends in order when os.exit is called in a luv callback with a closing timer", function()
    local result = run([[
      local uv, task = require("luv"), require("ciranda.task")
      local t = uv.new_timer()
      t:start(10, 0, function() t:close() os.exit(5) end)
      local guard <close> = setmetatable({}, { __close = function() print("cleaned") end })
      task.sleep(10)
    ]])
    assert.equal(5, result.code)
    assert.equal("cleaned\n", result.stdout)
  end)

  it("ends with 1 when a luv callback raises", function()
    local result = run([[
      require("luv").new_timer():start(1, 0, function() error({ code = "E1", message = "in a callback" }) end)
      require("ciranda.task").sleep(10)
    ]])
    assert.equal(1, result.code)
    assert.matches("in a callback", result.stderr, 1, true)
  end)

  it("survives a reader that goes away (SIGPIPE)", function()
    local path = directory .. "/script.lua"
    fs.write(path, "for i = 1, 1e5 do if not io.write(i, '\\n') then os.exit(9) end end")
    local result = process.run { "sh", "-c", '"$0" "$1" | head -n 1; exit 0', BINARY, path, timeout = 20 }
    assert.equal("1\n", result.stdout)
  end)

  it("walks luv's handles without meeting the engine's own", function()
    local result = run([[
      local uv = require("luv")
      local timer, count = uv.new_timer(), 0
      uv.walk(function(handle) if handle == timer then count = count + 1 end end)
      print(count)
    ]])
    assert.equal("1\n", result.stdout)
  end)

  it("is refused SIGINT in luv, which belongs to the engine", function()
    local result = run([[print(pcall(function() require("luv").new_signal():start("sigint", print) end))]])
    assert.matches("^false\t.*belongs to the engine", result.stdout)
  end)

  it("may open as many files as the hard limit lets it, whatever the soft one", function()
    local chunk = "print((io.open('/proc/self/limits'):read('a'):match('Max open files%s+(%d+)')))"
    local line = 'ulimit -Sn 256 && ulimit -Hn 3000 && exec "$0" -e "$1"'
    local result = process.run({ "sh", "-c", line, BINARY, chunk, timeout = 20 })
    assert.equal("3000\n", result.stdout)
  end)
end)
