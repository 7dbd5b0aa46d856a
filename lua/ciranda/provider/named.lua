--- A fleet from one name, whatever it is the name of: a node, a queued resource, or the prefix of nodes.
local err = require("ciranda.io.error")
local nodes = require("ciranda.provider.node")
local queued_resources = require("ciranda.provider.queued_resource")

local M = {}

--- The queued resource's message, nil when there is none of that name.
---@param tpu ciranda.gcp.Tpu
---@param name string
---@return table?
local function queued_resource(tpu, name)
  local ok, message = pcall(function()
    return tpu:queued_resource(name):get()
  end)
  if ok then
    return message
  elseif err.is(message, "not_found") then
    return nil
  end
  error(message, 0)
end

--- The slices that a name means: those of the queued resource of that name, else the node of that name, else the nodes
--- `NAME-<number>`.
---@async
---@param options { tpu: ciranda.gcp.Tpu, name: string }
---@return ciranda.Slice[]
---@return string[] missing names of nodes that the queued resource says it has, and that are not there
-- Raises "usage" for an empty name, "not_found", "precondition" for a queued resource without nodes yet,
-- and what the API's calls raise.
function M.slices(options)
  err.check_options(options, { tpu = true, name = true }, "provider.named")
  local tpu, name = options.tpu, options.name
  local message = name ~= "" and queued_resource(tpu, name)
  if not message then
    local ok, slices = pcall(nodes.slices, { tpu = tpu, prefix = name })
    if ok then
      return slices, {}
    elseif err.is(slices, "not_found") then
      err.raise({
        code = "not_found",
        op = "provider.named",
        target = name,
        message = "there is no queued resource of that name, and " .. slices.message,
      })
    end
    error(slices, 0)
  end
  local slices = queued_resources.slices({ tpu = tpu, id = name })
  local there, missing = {}, {}
  for _, slice in ipairs(slices) do
    there[slice.name] = true
  end
  for _, entry in ipairs(queued_resources.node_ids(message)) do
    if not there[entry.id] then
      missing[#missing + 1] = entry.id
    end
  end
  return slices, missing
end

return M
