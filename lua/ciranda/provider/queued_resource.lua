--- A fleet from a queued resource: the nodes it has made, in the order of their numbers.
--
-- The queued resource itself says which nodes are its own; so a node that was deleted is noticed as a gap, and one
-- of another queued resource with a similar name is not taken in.
local checks = require("ciranda.gcp.request_checks")
local err = require("ciranda.io.error")
local node_provider = require("ciranda.provider.node")

local M = {}

--- The node ids that a queued resource names, each with its slice number.
---@param message table a QueuedResource message
---@return { id: string, index: integer }[]
function M.node_ids(message)
  local ids = {}
  local specs = type(message.tpu) == "table" and message.tpu.nodeSpec or {}
  for place, spec in ipairs(specs) do
    local several = spec.multisliceParams or spec.multiNodeParams
    if several then
      local prefix = several.nodeIdPrefix or node_provider.short_name(message.name)
      for index = 0, math.min(several.nodeCount or 0, checks.MAX_SLICES) - 1 do
        ids[#ids + 1] = { id = ("%s-%d"):format(prefix, index), index = index }
      end
    elseif spec.nodeId then
      -- The service may expand several slices into one spec a node: PREFIX-<slice>.
      local digits = #specs > 1 and spec.nodeId:match("%-(%d+)$")
      ids[#ids + 1] = { id = spec.nodeId, index = math.tointeger(tonumber(digits)) or place - 1 }
    end
  end
  table.sort(ids, function(a, b)
    return a.index < b.index
  end)
  return ids
end

--- The slices of a queued resource.
---@async
---@param options { tpu: ciranda.gcp.Tpu, id: string, pins: boolean? } pins: read the host keys from the guest
---  attributes (true)
---@return ciranda.Slice[] those whose node exists
---@return string state of the queued resource
-- Raises "not_found" when there is no such queued resource, "precondition" when it has no node yet.
function M.slices(options)
  err.check_options(options, { tpu = true, id = true, pins = true }, "provider.queued_resource")
  local tpu = options.tpu
  local message = tpu:queued_resource(options.id):get()
  local state = type(message.state) == "table" and message.state.state or "STATE_UNSPECIFIED"
  local by_name = {}
  for _, node in ipairs(tpu:list_nodes()) do
    by_name[node_provider.short_name(node.name)] = node
  end
  local found = {}
  for _, entry in ipairs(M.node_ids(message)) do
    local node = by_name[entry.id]
    if node then
      found[#found + 1] = { node = node, index = entry.index }
    end
  end
  if #found == 0 then
    err.raise({
      code = "precondition",
      op = "provider.queued_resource",
      target = options.id,
      message = ("queued resource %s is %s and has no node yet; wait for it: ciranda qr wait %s"):format(
        options.id,
        state,
        options.id
      ),
    })
  end
  return node_provider.with_pins(tpu, found, options.pins), state
end

return M
