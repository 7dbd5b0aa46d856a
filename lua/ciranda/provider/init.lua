--- Where a fleet comes from. Each provider gives slices, in order, for `fleet.new`.
--
--     local provider = require("ciranda.provider")
--     local slices = provider.node({ tpu = tpu, prefix = "job" })
--     local slices = provider.queued_resource({ tpu = tpu, id = "job" })
--     local slices = provider.hosts({ hosts = "10.0.0.[1-4]" })
local M = {}

--- Slices of TPU nodes, by name or prefix. See ciranda.provider.node.
---@async
---@param options { tpu: ciranda.gcp.Tpu, prefix: string, pins: boolean? }
---@return ciranda.Slice[]
function M.node(options)
  return require("ciranda.provider.node").slices(options)
end

--- Slices of a queued resource. See ciranda.provider.queued_resource.
---@async
---@param options { tpu: ciranda.gcp.Tpu, id: string, pins: boolean? }
---@return ciranda.Slice[]
---@return string state
function M.queued_resource(options)
  return require("ciranda.provider.queued_resource").slices(options)
end

--- Slices of whatever has a name: a queued resource, a node, a prefix. See ciranda.provider.named.
---@async
---@param options { tpu: ciranda.gcp.Tpu, name: string }
---@return ciranda.Slice[]
---@return string[] missing
function M.named(options)
  return require("ciranda.provider.named").slices(options)
end

--- Slices of a list of hosts. See ciranda.provider.hosts.
---@param options table
---@return ciranda.Slice[]
function M.hosts(options)
  return require("ciranda.provider.hosts").slices(options)
end

return M
