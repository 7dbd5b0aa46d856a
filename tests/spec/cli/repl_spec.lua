-- The REPL in a real terminal (tmux): what a person sees.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local repl = require("ciranda.cli.repl")
local task = require("ciranda.task")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local HAVE_TMUX = process.run({ "sh", "-c", "command -v tmux" }).code == 0

describe("the line editor", function()
  it("refuses options that it does not know, and values that are none", function()
    local start = require("ciranda.core.edit").start
    assert.matches("unknown option 'historie'", select(2, pcall(start, { historie = "x" }, print)))
    assert.matches("option 'history' must be a string", select(2, pcall(start, { history = {} }, print)))
    assert.matches("function expected", select(2, pcall(start, { complete = "x" }, print)))
  end)
end)

describe("the REPL in a terminal", function()
  local directory, socket

  local function tmux(...)
    return process.run { "tmux", "-S", socket, "-f", "/dev/null", timeout = 60, ... }
  end

  local function screen()
    return tmux("capture-pane", "-p", "-t", "repl").stdout
  end

  --- Waits until the screen shows a text, and returns the screen.
  local function until_shown(text, seconds)
    local last
    local ok = pcall(task.timeout, seconds or 60, function()
      while true do
        last = screen()
        if last:find(text, 1, true) then
          return
        end
        task.sleep(0.05)
      end
    end)
    assert(ok, ("the screen never showed %q; it shows:\n%s"):format(text, last or ""))
    return last
  end

  local function type_line(text)
    tmux("send-keys", "-t", "repl", "-l", text)
    tmux("send-keys", "-t", "repl", "Enter")
  end

  before_each(function()
    if not HAVE_TMUX then
      pending("the REPL in a terminal: needs tmux (apt-get install tmux)")
    end
    directory = fs.tempdir()
    socket = directory .. "/tmux"
    local start = tmux(
      "new-session",
      "-d",
      "-s",
      "repl",
      "-x",
      "100",
      "-y",
      "40",
      ("env HOME=%s XDG_STATE_HOME=%s/state PS1='$ ' TERM=screen sh -c '%s repl; echo status $?; sleep 60'"):format(
        directory,
        directory,
        BINARY
      )
    )
    assert(start.code == 0, start.stderr)
    until_shown("\n>")
  end)

  after_each(function()
    if directory then
      tmux("kill-server")
      fs.remove_tree(directory)
      directory = nil
    end
  end)

  it("prints values, remembers the last one, goes on over lines", function()
    type_line("1 + 1, 'two'")
    until_shown("\n2       two\n")
    type_line("{ 1, a = { b = true } }")
    until_shown("{ 1, a = { b = true } }\n")
    type_line("_.a.b")
    until_shown("\ntrue\n")
    type_line("function f(x)")
    until_shown("\n>>")
    type_line("return x * 2 end")
    type_line("f(21)")
    until_shown("\n42\n")
  end)

  it("shows mistakes and goes on", function()
    type_line("x = = 1")
    until_shown("unexpected symbol")
    type_line("error('boom')")
    until_shown("boom")
    type_line("require('ciranda.io.error').raise { code = 'quota', message = 'none left' }")
    until_shown("none left")
    type_line(".bogus")
    until_shown("there is no .bogus; .help lists what there is")
    type_line("'still ' .. 'here'")
    until_shown("still here")
  end)

  it("waits in a line while background work goes on and prints above what is typed", function()
    type_line("spawn(function() task.sleep(0.6) print('from ' .. 'behind') end)")
    until_shown("task 'repl:1'")
    tmux("send-keys", "-t", "repl", "-l", "half a li")
    until_shown("from behind")
    local shown
    local ok = pcall(task.timeout, 60, function()
      repeat
        shown = screen()
      until shown:find("from behind\n.*half a li[^\n]*\n*$")
    end)
    assert(ok, shown)
  end)

  it("cancels the running line with Ctrl-C, a busy one too, and drops a typed one", function()
    type_line("print('nap' .. 'ping') task.sleep(60)")
    until_shown("napping\n")
    tmux("send-keys", "-t", "repl", "C-c")
    until_shown("cancelled")
    type_line("print('turn' .. 'ing') while true do end")
    until_shown("turning\n")
    tmux("send-keys", "-t", "repl", "C-c")
    until_shown("interrupted\n")
    tmux("send-keys", "-t", "repl", "-l", "this is dropped")
    until_shown("this is dropped")
    tmux("send-keys", "-t", "repl", "C-c")
    task.timeout(60, function()
      while not screen():find("this is dropped[^\n]*\n>%s*$") do
        task.sleep(0.05)
      end
    end)
    type_line("'after ' .. 'all'")
    until_shown("after all\n")
  end)

  it("completes names, keeps a history that only the user can read, and leaves with Ctrl-D", function()
    tmux("send-keys", "-t", "repl", "-l", "ciranda.vers")
    tmux("send-keys", "-t", "repl", "Tab")
    until_shown("ciranda.version")
    tmux("send-keys", "-t", "repl", "Enter")
    until_shown(require("ciranda.core.engine").version .. "\n")
    tmux("send-keys", "-t", "repl", "C-d")
    until_shown("status 0")
    local history = directory .. "/state/ciranda/history"
    assert.matches("ciranda.version", (fs.read(history):gsub("\\040", " ")), 1, true)
    assert.equal("600", ("%o"):format(fs.stat(history).mode & 511))
  end)
end)

describe("a secret that is asked for", function()
  it("is read without being shown", function()
    if not HAVE_TMUX then
      pending("a secret at the prompt: needs tmux (apt-get install tmux)")
    end
    local directory = fs.tempdir()
    local socket = directory .. "/tmux"
    local function tmux(...)
      return process.run({ "tmux", "-S", socket, "-f", "/dev/null", timeout = 60, ... })
    end
    local _ <close> = setmetatable({}, {
      __close = function()
        tmux("kill-server")
        fs.remove_tree(directory)
      end,
    })
    local chunk = 'local s = require("ciranda.cli.prompt").secret("Word: ") print(#s .. " letters")'
    fs.write(directory .. "/ask.lua", chunk)
    -- A terminal that takes its time to be told, and somebody who answers at the first sight of the question.
    local slow = '#!/bin/sh\nsleep 0.3\nPATH=${PATH#*:} exec stty "$@"\n'
    fs.mkdir_p(directory .. "/bin")
    fs.write(directory .. "/bin/stty", slow, { mode = tonumber("755", 8) })
    tmux(
      "new-session",
      "-d",
      "-s",
      "ask",
      "-x",
      "80",
      ("sh -c 'PATH=%s/bin:$PATH %s %s/ask.lua; sleep 60'"):format(directory, BINARY, directory)
    )
    local function until_shown(text)
      local shown = ""
      task.timeout(60, function()
        while not shown:find(text, 1, true) do
          task.sleep(0.05)
          shown = tmux("capture-pane", "-p", "-t", "ask").stdout
        end
      end)
      return shown
    end
    until_shown("Word:")
    tmux("send-keys", "-t", "ask", "-l", "sesame")
    tmux("send-keys", "-t", "ask", "Enter")
    local shown = until_shown("6 letters")
    assert.not_matches("sesame", shown)
  end)
end)

describe("the REPL without a terminal", function()
  it("runs lines as they come and prints values", function()
    local result = process.run {
      BINARY,
      "repl",
      stdin = "1 + 1\nfunction f()\nreturn 'x' end\nf()\nx = = 1\n'on'\n",
      timeout = 100,
    }
    assert.equal(0, result.code)
    assert.matches("^2\nx\n", result.stdout)
    assert.matches("unexpected symbol", result.stdout)
    assert.matches("on\n$", result.stdout)
  end)

  it("says when the input ends in the middle of a statement", function()
    local result = process.run { BINARY, "repl", stdin = "function f()\n", timeout = 100 }
    assert.matches("ended in the middle", result.stdout)
  end)
end)

describe("completion", function()
  local env = { ciranda = { version = 1, verify = 2, task = { sleep = 1, spawn = 2 } }, text = "x" }
  setmetatable(env, { __index = { inherited = true } })

  it("looks along dots, colons and __index, and calls nothing", function()
    assert.same({ "ciranda.verify", "ciranda.version" }, repl.complete("ciranda.ver", env))
    assert.same({ "ciranda.task.sleep", "ciranda.task.spawn" }, repl.complete("ciranda.task.s", env))
    assert.same({ "inherited" }, repl.complete("inh", env))
    assert.same({ "text:upper" }, repl.complete("text:upp", env))
    assert.same({}, repl.complete("nothing.at.all", env))
  end)
end)
