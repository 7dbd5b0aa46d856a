--- gcloud's flags of a create as flags of a recipe that has other verbs, too (qr, tpu_vm).
local err = require("ciranda.io.error")

local M = {}

local function key_of(flag)
  return (flag.name:gsub("%-", "_"))
end

--- Adds the flags to those of a recipe.
---@param flags ciranda.cli.Flag[] the recipe's
---@param create ciranda.provider.GcloudFlag[]
function M.declare(flags, create)
  for _, flag in ipairs(create) do
    table.insert(flags, {
      name = flag.name,
      type = flag.switch and "boolean" or nil,
      many = flag.repeated,
      help = "Of create: " .. flag.help,
    })
  end
end

--- The request that the flags make, for `ciranda.gcp.tpu`.
---@param context ciranda.cli.Context
---@param create ciranda.provider.GcloudFlag[]
---@return table
-- Raises "usage" for a value that a flag cannot have.
function M.request(context, create)
  local request = { id = context.flags.NAME }
  for _, flag in ipairs(create) do
    local key = key_of(flag)
    local value = context.flags[key]
    if context.given[key] and value ~= false then
      for _, text in ipairs(type(value) == "table" and value or { value }) do
        flag.put(request, flag.name, not flag.switch and text or nil)
      end
    end
  end
  return request
end

--- Refuses the flags where the verb is another one.
---@param context ciranda.cli.Context
---@param create ciranda.provider.GcloudFlag[]
-- Raises "usage".
function M.refuse(context, create)
  for _, flag in ipairs(create) do
    if context.given[key_of(flag)] then
      err.raise({ code = "usage", message = ("--%s is for create"):format(flag.name) })
    end
  end
end

return M
