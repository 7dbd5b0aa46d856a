--- `ciranda completion SHELL`: what a shell needs to complete recipes and their flags.
local argparse = require("argparse")
local errors = require("ciranda.io.error")
local flags = require("ciranda.cli.flags")
local help = require("ciranda.cli.help")

local M = {}

local WRITERS = { bash = "get_bash_complete", zsh = "get_zsh_complete", fish = "get_fish_complete" }

--- The script for a shell.
---@param shell string "bash", "zsh" or "fish"
---@return string
---@error code "usage" for another shell
function M.script(shell)
  local writer = WRITERS[shell]
  if not writer then
    errors.raise {
      code = "usage",
      message = ("completion is for bash, zsh and fish, not for '%s'"):format(tostring(shell)),
    }
  end
  local parser = argparse("ciranda", "Runs Cloud TPU Multislice.")
  for name in pairs(help.commands) do
    parser:command(name):add_help(false)
  end
  for _, name in ipairs(help.recipes()) do
    local recipe = require("recipes." .. name)
    local command = parser:command(name, recipe.summary)
    command:add_help(false)
    flags.declare(command, name, recipe)
  end
  return parser[writer](parser)
end

return M
