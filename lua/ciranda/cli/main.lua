--- The command line: from the process's arguments to an exit status. The engine calls boot() once.
---
--- Everything that runs is a task: a script, a recipe, a line of the REPL. Modules are loaded when their command is
--- used, so that starting the program costs little.
local engine = require("ciranda.core.engine")

local M = {}

local USAGE = [[
usage: ciranda [OPTION...] COMMAND [ARGUMENT...]

  ciranda RECIPE [--FLAG=value ...]       run a built-in recipe (ciranda help lists them)
  ciranda run [--sim] RECIPE|FILE ...     the same; --sim runs it on a private simulated cloud
  ciranda FILE.lua [ARGUMENT...]          run a script, as lua would; - reads it from standard input
  ciranda repl                            read lines and run them; the default on a terminal
  ciranda eval CODE [ARGUMENT...]         run a piece of Lua (-e CODE too)
  ciranda test [PATH...]                  run Busted specs
  ciranda completion SHELL                print completions for bash, zsh or fish
  ciranda help [RECIPE|COMMAND]           this text, a recipe's flags, or more on a command
  ciranda version

options, before the command:
  --path DIR         look for modules in DIR first (may be repeated; CIRANDA_PATH is a list separated by ':')
  --use-lua-path     look in LUA_PATH and LUA_CPATH too
  --lua-dir DIR      read built-in modules from DIR (lua/ and recipes/ below it) where they are there
  --json             a recipe prints JSON lines
]]

---@class ciranda.cli.Command
---@field kind "script"|"chunk"|"recipe"|"repl"|"test"|"help"|"version"|"completion"
---@field name? string file, recipe or code
---@field args string[] what follows; [0] and below as lua has them
---@field paths string[]
---@field use_lua_path boolean
---@field json boolean

--- A mistake in the command line: told in one or two lines, status 2.
---@param format string
---@param ... any
local function usage_error(format, ...)
  io.stderr:write("ciranda: ", string.format(format, ...), "\n")
  io.stderr:write("Try 'ciranda help'.\n")
  return nil
end

--- What follows `run`: its own options, the recipe, the recipe's words.
---@param command ciranda.cli.Command completed
---@param words string[] consumed
---@return ciranda.cli.Command? command nil after a usage error
local function run_command(command, words)
  local sim = {}
  while words[1] and words[1]:sub(1, 1) == "-" do
    local option = table.remove(words, 1)
    if option == "--json" then
      command.json = true
    elseif option == "--sim" or option:find("^%-%-sim%-[%w-]+=") then
      local key, value = option:match("^%-%-sim%-([%w-]+)=(.*)$")
      if key then
        sim[key] = value
      end
      command.sim = sim
    else
      return usage_error("run has no option %s; a recipe's own flags follow its name", option)
    end
  end
  if not words[1] then
    return usage_error("run needs a recipe: a built-in one (ciranda help) or a file")
  end
  command.kind, command.name, command.args = "recipe", table.remove(words, 1), words
  return command
end

--- What stands before the command, and which command it is.
---@param argv string[] from 0
---@return ciranda.cli.Command? command nil after a usage error
local function parse(argv)
  local command = { paths = {}, use_lua_path = false, json = false, args = {} }
  local i = 1
  --- The value of an option that takes one: from `--name=value` or the next word.
  local function value_of(word, name)
    local value = word:match("^" .. name:gsub("%-", "%%-") .. "=(.*)$")
    if value then
      return value
    end
    i = i + 1
    return argv[i]
  end
  local function rest(from, offset)
    local args = {}
    for k = from, #argv do
      args[k - offset] = argv[k]
    end
    return args
  end
  while argv[i] do
    local word = argv[i]
    if word == "--path" or word:find("^%-%-path=") then
      local value = value_of(word, "--path")
      if not value then
        return usage_error("--path needs a directory")
      end
      table.insert(command.paths, value)
    elseif word == "--lua-dir" or word:find("^%-%-lua%-dir=") then
      if not value_of(word, "--lua-dir") then
        return usage_error("--lua-dir needs a directory")
      end
    elseif word == "--use-lua-path" then
      command.use_lua_path = true
    elseif word == "--json" then
      command.json = true
    elseif word == "--help" or word == "-h" then
      command.kind = "help"
      return command
    elseif word == "--version" or word == "-v" then
      command.kind = "version"
      return command
    elseif word == "-e" then
      if not argv[i + 1] then
        return usage_error("-e needs a piece of Lua")
      end
      command.kind, command.name, command.args = "chunk", argv[i + 1], rest(i + 2, i + 1)
      command.args[0] = "-e"
      return command
    elseif word:sub(1, 1) == "-" and word ~= "-" then
      return usage_error("there is no option %s before the command", word)
    else
      break
    end
    i = i + 1
  end

  local word = argv[i]
  local following = argv[i + 1]
  local asks = following == "--help" or following == "-h"
  if asks and require("ciranda.cli.help").commands[word] then
    command.kind, command.name = "help", word ~= "help" and word or nil
  elseif not word then
    command.kind = "default"
  elseif word == "repl" or word == "version" then
    command.kind, command.args = word, rest(i + 1, i)
  elseif word == "help" or word == "completion" then
    command.kind, command.name = word, argv[i + 1]
  elseif word == "eval" then
    if not argv[i + 1] then
      return usage_error("eval needs a piece of Lua: ciranda eval 'print(1)'")
    end
    command.kind, command.name, command.args = "chunk", argv[i + 1], rest(i + 2, i + 1)
    command.args[0] = "eval"
  elseif word == "test" then
    command.kind, command.args = "test", rest(i + 1, i)
  elseif word == "run" then
    return run_command(command, rest(i + 1, i))
  elseif word == "-" or word:find("%.lua$") or word:find("/") then
    command.kind, command.name, command.args = "script", word, rest(i, i)
    for k = 0, i - 1 do
      command.args[k - i] = argv[k]
    end
  else
    command.kind, command.name, command.args = "recipe", word, rest(i + 1, i)
  end
  return command
end

--- The directory part of a path, "." without one.
local function directory_of(path)
  return path:match("^(.*)/[^/]*$") or "."
end

--- The status that `fn`, run as the root task, ends with.
---@param fn fun(): integer?
---@return integer
local function as_task(fn)
  return require("ciranda.cli.session").run(fn)
end

---@param command ciranda.cli.Command
local function run_script(command)
  local name = command.name
  _G.arg = command.args
  local paths = require("ciranda.cli.paths")
  paths.install { beside = name ~= "-" and directory_of(name) or nil, command = command }
  local chunk, problem
  if name == "-" then
    chunk, problem = load(io.read("a"), "=stdin")
  else
    chunk, problem = loadfile(name)
  end
  if not chunk then
    io.stderr:write("ciranda: ", problem, "\n")
    return 1
  end
  return as_task(function()
    chunk(table.unpack(command.args))
  end)
end

---@param command ciranda.cli.Command
local function run_chunk(command)
  local chunk, problem = load(command.name, "=(command line)")
  if not chunk then
    io.stderr:write("ciranda: ", problem, "\n")
    return 1
  end
  if command.name:find("^%s*$") then
    return 0
  end
  _G.arg = command.args
  require("ciranda.cli.paths").install { command = command }
  return as_task(function()
    chunk(table.unpack(command.args))
  end)
end

--- Called by the engine.
---@return integer status the process's exit status
function M.boot()
  local command = parse(engine.argv)
  if not command then
    return 2
  end
  if command.kind == "default" then
    command.kind = require("luv").guess_handle(0) == "tty" and "repl" or "script"
    if command.kind == "script" then
      command.name, command.args = "-", { [0] = "-" }
    end
  end
  if command.kind == "chunk" then
    return run_chunk(command)
  elseif command.kind == "script" then
    return run_script(command)
  elseif command.kind == "version" then
    print("ciranda " .. engine.version)
    return 0
  elseif command.kind == "help" then
    return require("ciranda.cli.help").show(command.name, USAGE)
  end
  require("ciranda.cli.paths").install { command = command }
  if command.kind == "repl" then
    return as_task(function()
      return require("ciranda.cli.repl").run()
    end)
  elseif command.kind == "completion" then
    return as_task(function()
      print(require("ciranda.cli.completion").script(command.name))
    end)
  elseif command.kind == "test" then
    return as_task(function()
      engine.on_blocked(nil) -- specs compute and read files without waiting, and nobody else is held up
      return require("ciranda.cli.testing").run(command.args)
    end)
  end
  return require("ciranda.cli.recipe").main(command)
end

return M
