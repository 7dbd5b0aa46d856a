--- `ciranda help`: the commands, the built-in recipes, a recipe's flags.
local engine = require("ciranda.core.engine")

local M = {}

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

--- Prints the general help, or a recipe's. Returns the exit status.
---@param recipe_name? string
---@param usage string
---@return integer
function M.show(recipe_name, usage)
  if recipe_name then
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
