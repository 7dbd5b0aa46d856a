-- The command line, from outside: recipes given as files, help, mistakes.
local fs = require("ciranda.io.fs")
local help = require("ciranda.cli.help")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

describe("the command line", function()
  local directory
  before_each(function()
    directory = fs.tempdir()
    fs.write(directory .. "/helper.lua", "return { word = 'helped' }")
    fs.write(
      directory .. "/mine.lua",
      [[
      local helper = require("helper")
      return {
        summary = "a recipe of my own",
        flags = { { name = "STATUS", type = "integer", default = 0 }, { name = "RAISE" } },
        run = function(context)
          if context.flags.RAISE then
            require("ciranda.io.error").raise { code = context.flags.RAISE, message = "as asked" }
          end
          print(helper.word, context.flags.STATUS)
          context.finish { kind = "user", message = "the last line" }
          return context.flags.STATUS
        end,
      }]]
    )
  end)
  after_each(function()
    fs.remove_tree(directory)
  end)

  local function ciranda(...)
    return process.run { BINARY, timeout = 100, ... }
  end

  it("does not take for printed what a full disk has lost", function()
    local function into(target, ...)
      return process.run {
        "sh",
        "-c",
        '{ "$0" "$@"; echo "status $?" >&2; } ' .. target,
        BINARY,
        timeout = 100,
        ...,
      }.stderr
    end
    local LOST = "what was printed is not all there: standard output: No space left on device\nstatus "
    assert.matches(LOST .. "1\n", into(">/dev/full", "runs", "--help"), 1, true)
    -- Records too, of which each is written by itself.
    assert.matches(LOST .. "1\n", into(">/dev/full", "--json", "runs"), 1, true)
    -- A verdict of its own stays.
    fs.write(
      directory .. "/judged.lua",
      'return { run = function(context) io.write("x") context.finish { kind = "done" } end }'
    )
    local judged = into(">/dev/full", "run", directory .. "/judged.lua")
    assert.matches("not all there", judged, 1, true)
    assert.matches("status 0\n$", judged)
    -- Nobody who reads is no failure.
    assert.equal("status 0\n", into("| true", "runs", "--help"))
  end)

  it("runs a recipe from a file, with modules beside it", function()
    local result = ciranda("run", directory .. "/mine.lua", "--STATUS=4")
    assert.equal("helped\t4\n", result.stdout)
    assert.equal("the last line\n", result.stderr)
    assert.equal(4, result.code)
  end)

  it("ends with a JSON record when asked to", function()
    local result = ciranda("--json", "run", directory .. "/mine.lua", "--STATUS=4")
    local record = json.decode(result.stdout:match("([^\n]+)\n$"))
    assert.equal("end", record.event)
    assert.equal("the last line", record.message)
    assert.equal("user", record.kind)
    assert.equal(4, record.status)
  end)

  it("ends with that record also where the recipe was not come to", function()
    for _, words in ipairs {
      { "nosuch" },
      { "logs" },
      { "run", directory .. "/mine.lua", "--NONE=1" },
      { "run", directory .. "/helper.lua" },
      { "run", "--sim", "--sim-nosuch=1", "runs" },
    } do
      local result = ciranda("--json", table.unpack(words))
      local record = json.decode(result.stdout)
      assert.same({ "end", "usage", 2 }, { record.event, record.kind, record.status })
      assert.equal("ciranda: " .. record.message .. "\n", result.stderr)
      assert.equal(2, result.code)
    end
  end)

  it("says in the last line by which signal it was interrupted", function()
    local recipe = directory .. "/waits.lua"
    fs.write(
      recipe,
      [[return { summary = "waits", run = function()
        local uv = require("luv")
        uv.kill(uv.os_getpid(), "sigterm")
        require("ciranda.task").sleep(60)
      end }]]
    )
    local result = ciranda("run", recipe)
    assert.same({ 143, "interrupted: by SIGTERM, exit status 143\n" }, { result.code, result.stderr })
    local record = json.decode(ciranda("--json", "run", recipe).stdout:match("([^\n]+)\n$"))
    assert.same({ "interrupted", 143 }, { record.kind, record.status })
    -- Of one that leaves by itself the record has the program's status too.
    fs.write(recipe, "return { run = function() os.exit(7) end }")
    result = ciranda("--json", "run", recipe)
    assert.same({ 7, 7 }, { result.code, json.decode(result.stdout:match("([^\n]+)\n$")).status })
  end)

  it("is not ended by a request to save that comes before there is what could save", function()
    local recipe = directory .. "/early.lua"
    fs.write(
      recipe,
      [[return { summary = "is asked early", run = function(context)
        local uv = require("luv")
        uv.kill(uv.os_getpid(), "sigusr1")
        local asked
        context.on_interrupt(function(signal)
          asked = signal
          return true
        end)
        uv.kill(uv.os_getpid(), "sigusr1")
        for _ = 1, 3000 do
          if not asked then
            require("ciranda.task").sleep(0.02)
          end
        end
        context.finish { kind = "done", message = tostring(asked) }
      end }]]
    )
    local result = ciranda("run", recipe)
    assert.same({ 0, "SIGUSR1\n" }, { result.code, result.stderr })
  end)

  it("gives 2 for usage, 124 for a deadline, 1 for the rest", function()
    local recipe = directory .. "/mine.lua"
    for code, status in pairs { usage = 2, deadline = 124, failed = 1, quota = 1 } do
      local result = ciranda("run", recipe, "--RAISE=" .. code)
      assert.equal(status, result.code)
      assert.matches("as asked", result.stderr)
    end
    assert.equal(2, ciranda("run", recipe, "--NONE=1").code)
  end)

  it("says what is wrong with a command line", function()
    for _, case in ipairs {
      { { "nosuch" }, "no recipe 'nosuch'; the built%-in ones are: attach" },
      { { "multihost_runner.py" }, "did you mean 'multihost_runner'" },
      { { "multihost_runer", "--COMMAND=ls" }, "did you mean 'multihost_runner'" },
      { { "help", "atach" }, "did you mean 'attach'" },
      { { "qr" }, "needs VERB %(create, list, describe" },
      { { "queued-resources", "list" }, "did you mean 'qr'" },
      { { "--nosuch" }, "no option %-%-nosuch" },
      { { "eval" }, "needs a piece of Lua" },
      { { "run" }, "run needs a recipe" },
      { { "run", directory .. "/helper.lua" }, "is no recipe" },
      { { "--path" }, "needs a directory" },
    } do
      local result = ciranda(table.unpack(case[1]))
      assert.equal(2, result.code)
      assert.matches(case[2], result.stderr)
    end
  end)

  it("lists its recipes, and a recipe's flags", function()
    local all = ciranda("help")
    assert.equal(0, all.code)
    assert.matches("multihost_runner", all.stdout)
    local recipe = ciranda("help", "multihost_runner")
    assert.equal(0, recipe.code)
    assert.matches("%-%-TPU_PREFIX", recipe.stdout)
    assert.matches("^Usage: ciranda multihost_runner %-%-COMMAND=string %[%-%-FLAG", recipe.stdout)
    local verbs = ciranda("qr", "--help").stdout
    assert.matches("^Usage: ciranda qr %[%-%-FLAG=value ...%] VERB %[NAME%] %[STATE%]\n", verbs)
    assert.matches("Arguments:\n +VERB +create, list", verbs)
  end)

  it("has help for the commands that are no recipes, asked for in either way", function()
    for name in pairs(help.commands) do
      for _, words in ipairs { { "help", name }, { name, "--help" } } do
        local result = ciranda(table.unpack(words))
        assert.equal(0, result.code)
        assert.matches(words[2] == name and "^Usage: ciranda " .. name or "^[Uu]sage: ciranda", result.stdout)
      end
    end
  end)

  it("shows a mistake in a recipe with the recipe's own lines", function()
    fs.write(directory .. "/wrong.lua", "return { run = function()\n  nothing()\nend }")
    local result = ciranda("run", directory .. "/wrong.lua")
    assert.equal(1, result.code)
    assert.matches("wrong.lua:2: attempt to call a nil value", result.stderr, 1, true)
    assert.equal(1, select(2, result.stderr:gsub("stack traceback", "")), result.stderr)
    assert.not_matches("xpcall", result.stderr)
  end)

  it("writes completions for bash, zsh and fish, and names them when asked for another", function()
    for _, shell in ipairs({ "bash", "zsh", "fish" }) do
      local result = ciranda("completion", shell)
      assert.equal(0, result.code)
      assert.matches("multihost_runner", result.stdout)
      assert.matches("TPU_PREFIX", result.stdout)
    end
    local result = ciranda("completion", "tcsh")
    assert.equal(2, result.code)
    assert.matches("bash, zsh and fish", result.stderr)
  end)

  it("finds modules of --path and CIRANDA_PATH", function()
    assert.equal("helped\n", ciranda("--path", directory, "eval", "print(require('helper').word)").stdout)
    local result = process.run {
      BINARY,
      "eval",
      "print(require('helper').word, ...)",
      "x",
      env = { CIRANDA_PATH = directory },
    }
    assert.equal("helped\tx\n", result.stdout)
  end)
end)
