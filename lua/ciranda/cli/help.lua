--- `ciranda help`: the commands, the built-in recipes, a recipe's flags.
local engine = require("ciranda.core.engine")

local M = {}

--- The commands that are no recipes.
---@type table<string, string>
M.commands = {
  run = [[
Usage: ciranda run [--sim] [--sim-slices=N] [--sim-type=TYPE] [--sim-seed=N] RECIPE|FILE.lua [--FLAG=value ...]

Runs a recipe, built in or of your own (docs/cli.md says how one is written); `ciranda help RECIPE` and
`ciranda help FILE.lua` list its flags. --sim runs it on a private simulated cloud, which ends with it: two
slices of v5litepod-16, named after --TPU_PREFIX ("sim"), unless the recipe makes its own.]],
  repl = [[
Usage: ciranda repl

Reads lines of Lua and runs each as a task, so that it may wait; `.help` at its prompt says more. It is what
`ciranda` alone does on a terminal. Lines may come from a file or a pipe, too.]],
  eval = [[
Usage: ciranda eval CODE [ARGUMENT...]

Runs a piece of Lua as a script: `...` and `arg` are the arguments, and it prints what it is told to print, as
in ciranda eval 'print(require("ciranda").version)'. `ciranda -e CODE` is the same.]],
  test = [[
Usage: ciranda test [--filter=PATTERN] [--output=TAP ...] PATH...

Runs Busted specs, each test as a task; Busted's own options work. Status 1 when a test failed.]],
  completion = [[
Usage: ciranda completion bash|zsh|fish

Prints what the shell needs to complete commands and flags. For this shell: eval "$(ciranda completion bash)";
for all to come, add that line to ~/.bashrc.]],
  help = [[
Usage: ciranda help [RECIPE|COMMAND]

Lists commands and recipes, or says more on one.]],
  version = [[
Usage: ciranda version

Prints the version.]],
}

--- Names of the built-in recipes, as they are typed.
---@return string[]
function M.recipes()
  local names = {}
  for _, name in ipairs(engine.embedded()) do
    local recipe = name:match("^recipes%.([%w_]+)$")
    if recipe then
      table.insert(names, recipe)
    end
  end
  return names
end

--- Prints the general help, a command's, or a recipe's. Returns the exit status.
---@param recipe_name? string
---@param usage string
---@return integer
function M.show(recipe_name, usage)
  if M.commands[recipe_name] then
    io.write(M.commands[recipe_name], "\n")
    return 0
  elseif recipe_name then
    local recipes = require("ciranda.cli.recipe")
    local ok, recipe = pcall(recipes.load, recipe_name)
    if not ok then
      io.stderr:write("ciranda: ", tostring(recipe), "\n")
      return 2
    end
    io.write(require("ciranda.cli.flags").help(recipe_name, recipe), "\n")
    return 0
  end
  io.write(usage, "\nrecipes:\n")
  for _, name in ipairs(M.recipes()) do
    local ok, recipe = pcall(require, "recipes." .. name)
    io.write(
      ("  %-18s %s\n"):format(name, ok and recipe.summary or "(cannot be loaded: " .. tostring(recipe) .. ")")
    )
  end
  return 0
end

return M
