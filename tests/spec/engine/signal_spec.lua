-- Signals to the program: what is interrupted, what is cleaned, with what status it ends.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

--- Whether a signal waits to be taken by a process: a second one of its kind would be lost until then.
local function is_pending(pid, signal)
  local file <close> = io.open(("/proc/%d/status"):format(pid))
  local bit = 1 << (uv.constants[signal] - 1)
  for mask in (file and file:read("a") or ""):gmatch("S%a+Pnd:%s*(%x+)") do
    if tonumber(mask, 16) & bit ~= 0 then
      return true
    end
  end
  return false
end

--- Starts a chunk that prints "ready", sends it signals, calls `taken(program)` when it has them; its result.
local function interrupt(chunk, signals, gap, taken)
  local out = {}
  local ready = task.event()
  return task.timeout(60, function()
    local scope <close> = task.scope()
    local program <close> = process.spawn { BINARY, "-e", chunk, stdout = process.PIPE }
    local reading = scope:spawn(function()
      for text in program.stdout:values() do
        table.insert(out, text)
        if table.concat(out):find("ready") then
          ready:set()
        end
      end
    end)
    ready:wait()
    for i, signal in ipairs(signals) do
      task.sleep(i > 1 and gap or 0.05)
      program:signal(signal)
      patience.wait_for(signal .. " is taken", function()
        return not is_pending(program.pid, signal)
      end)
    end
    if taken then
      taken(program)
    end
    local result = program:wait()
    reading:wait()
    return { code = result.code, signal = result.signal, stdout = table.concat(out), stderr = result.stderr }
  end)
end

local READY = "io.write('ready\\n') io.flush() "

describe("SIGINT", function()
  it("ends a wait, after clean-up, with 130", function()
    local result = interrupt(
      [[local task = require("ciranda.task")
      local guard <close> = setmetatable({}, { __close = function() task.sleep(0.05) print("cleaned") end }) ]]
        .. READY
        .. "task.sleep(60)",
      { "SIGINT" }
    )
    assert.equal(130, result.code)
    assert.matches("cleaned", result.stdout)
  end)

  it("interrupts a loop without end", function()
    assert.equal(130, interrupt(READY .. "while true do end", { "SIGINT" }).code)
  end)

  it("interrupts a loop without end in a nested coroutine", function()
    local result = interrupt(READY .. "coroutine.wrap(function() while true do end end)()", { "SIGINT" })
    assert.equal(130, result.code)
  end)

  it("can be caught by pcall around a busy loop, once", function()
    local result = interrupt(
      "local ok, err = pcall(function() " .. READY .. "while true do end end) print(ok, err.code)",
      { "SIGINT" }
    )
    assert.matches("false\tinterrupted", result.stdout, 1, true)
  end)

  it("does not come at the end of a C function, whose results would be lost", function()
    local result = interrupt([[local uv, lost = require("luv"), false
        local ok, err = pcall(function() ]] .. READY .. [[
          xpcall(uv.sleep, function() lost = true end, 1000)
          while true do end
        end)
        print(ok, err.code, lost)]], { "SIGINT" })
    assert.matches("false\tinterrupted\tfalse", result.stdout, 1, true)
  end)

  it("is not raised in short turns that the machine has no processor for", function()
    local chunk = [[local task, told = require("ciranda.task"), false
      require("ciranda.cli.session").on_interrupt(function()
        told = true
        return true
      end) ]] .. READY .. [[
      repeat
        local began = os.clock()
        repeat until os.clock() - began > 0.03
        task.sleep(0)
      until told
      print("told")]]
    local result = interrupt(chunk, {}, nil, function(program)
      -- Whatever the main thread does takes a hundred times as long while another has its processor.
      local pid = tostring(program.pid)
      local processor = process.run({ "taskset", "-c", "-p", pid }):check().stdout:match("(%d+)%s*$")
      process.run({ "taskset", "-c", "-p", processor, pid }):check()
      process.run({ "chrt", "-i", "-p", "0", pid }):check()
      local _ <close> = process.spawn({ "taskset", "-c", processor, "sh", "-c", "while :; do :; done" })
      task.sleep(0.3)
      program:signal("SIGINT")
      task.sleep(3)
      process.run({ "chrt", "-o", "-p", "0", pid })
    end)
    assert.same({ 0, "ready\ntold\n" }, { result.code, result.stdout }, result.stderr)
  end)

  it("leaves by itself when a C function does not return and a second one comes", function()
    local chunk = READY .. "string.rep('a', 1 << 16):find(string.rep('a*', 60) .. 'b')"
    local result = interrupt(chunk, { "SIGINT", "SIGINT" }, 0.3)
    assert.equal(130, result.code)
  end)

  it("leaves at once when clean-up takes long and a second one comes", function()
    local result = interrupt(
      [[local task = require("ciranda.task")
      local guard <close> = setmetatable({}, { __close = function() task.sleep(8) print("cleaned") end }) ]]
        .. READY
        .. "task.sleep(60)",
      { "SIGINT", "SIGINT" },
      0.3
    )
    assert.equal(130, result.code)
    assert.not_matches("cleaned", result.stdout)
    assert.matches("still running", result.stderr)
  end)
end)

describe("other signals", function()
  it("SIGTERM ends with 143 and SIGHUP with 129, after clean-up", function()
    for signal, status in pairs { SIGTERM = 143, SIGHUP = 129 } do
      local result = interrupt(
        [[local guard <close> = setmetatable({}, { __close = function() print("cleaned") end }) ]]
          .. READY
          .. [[require("ciranda.task").sleep(60)]],
        { signal }
      )
      assert.equal(status, result.code)
      assert.matches("cleaned", result.stdout)
    end
  end)

  it("SIGQUIT prints the tasks and goes on", function()
    local directory = fs.tempdir()
    local chunk = ([[local task = require("ciranda.task")
      repeat task.sleep(0.02) until io.open(%q)
      task.sleep(0.1)
      print("went on")]]):format(directory .. "/go")
    local result = interrupt(READY .. chunk, { "SIGQUIT" }, nil, function()
      fs.write(directory .. "/go", "")
    end)
    fs.remove_tree(directory)
    assert.equal(0, result.code)
    assert.matches("went on", result.stdout)
    assert.matches("main", result.stderr)
  end)
end)

describe("a turn of the loop that takes long", function()
  local BUSY = "local t = os.clock() while os.clock() - t < 0.4 do end"

  it("is reported with the culprit when others wait", function()
    local result = process.run {
      BINARY,
      "-e",
      ('local task = require("ciranda.task") task.all { function() %s end, function() task.sleep(0.6) end }'):format(
        BUSY
      ),
    }
    assert.equal(0, result.code)
    assert.matches("held up", result.stderr)
    assert.matches("command line%)?:1", result.stderr)
  end)

  it("computes what it would have, also when its traceback is long", function()
    local directory = fs.tempdir()
    local path = ("%s/%s.lua"):format(directory, ("name"):rep(40))
    -- The loop has no calls: the traceback is taken in the frame of a function that returns nothing, and of one that
    -- returns less than is asked of it.
    fs.write(
      path,
      [[local task = require("ciranda.task")
      local clock = os.clock
      local function nothing(n)
        for i = 1, n do
        end
      end
      local function one(n)
        for i = 1, n do
        end
        return 1
      end
      local n = 1000000
      local function deep(levels, f)
        if levels == 0 then
          local a, b, c = f(n)
          return a, b, c
        end
        local a, b, c = deep(levels - 1, f)
        return a, b, c
      end
      local function other()
        task.sleep(0.01)
      end
      for _, f in ipairs({ nothing, one }) do
        local took
        repeat -- as many rounds as last long enough: what one run took says little of the next
          n = n * 2
          task.all({
            function()
              local t = clock()
              local a, b, c = deep(20, f)
              took = clock() - t
              if took > 0.4 or a ~= (f == one and 1 or nil) or b or c then
                print(a, b, c)
              end
            end,
            other,
          })
        until took > 0.4
      end]]
    )
    local result = process.run({ BINARY, path, timeout = 60 })
    fs.remove_tree(directory)
    assert.equal("nil\tnil\tnil\n1\tnil\tnil\n", result.stdout)
    assert.equal(0, result.code)
    local _, reports = result.stderr:gsub("held up", "")
    assert.is_true(reports >= 2, result.stderr)
  end)

  it("is no warning in a recipe when it was short", function()
    local directory = fs.tempdir()
    -- What is short is for the session to say: on a machine that is busy enough no turn is sure to be.
    fs.write(
      directory .. "/busy.lua",
      ([[return { summary = "busy", flags = { { name = "PATIENCE", type = "number" } }, run = function(context)
        local session, task = require("ciranda.cli.session"), require("ciranda.task")
        print(session.patience)
        session.patience = context.flags.PATIENCE
        local function busy() %s end
        task.all { busy, function() task.sleep(0.6) end }
      end }]]):format(BUSY)
    )
    local function run(patience_s, env)
      local flag = ("--PATIENCE=%g"):format(patience_s)
      return process.run { BINARY, "run", directory .. "/busy.lua", flag, env = env, timeout = 120 }
    end
    local short, told, long = run(1000), run(1000, { CIRANDA_LOG = "debug" }), run(0.1)
    fs.remove_tree(directory)
    assert.same({ 0, "1\n", "" }, { short.code, short.stdout, short.stderr })
    assert.matches("debug the loop was held up", told.stderr, 1, true)
    assert.matches("warn  the loop was held up", long.stderr, 1, true)
  end)

  it("is nobody's business when nothing else runs", function()
    local result = process.run { BINARY, "-e", BUSY }
    assert.equal("", result.stderr)
  end)
end)
