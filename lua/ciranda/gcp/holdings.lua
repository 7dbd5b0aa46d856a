--- What queued resources and nodes hold of a project's quota, and a wait's situation in words.

local kinds = require("ciranda.gcp.credential_kinds")
local topologies = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local M = {}

--- States in which a queued resource never runs again, and holds quota until it is deleted.
M.DEAD = { FAILED = true, SUSPENDED = true }

--- The generation that a node asks for, and its chips; nil for what the table does not have.
---@param node table? a Node message
---@return ciranda.mesh.Generation?
---@return integer? chips
local function shape_of(node)
  if type(node) ~= "table" then
    return nil
  elseif type(node.acceleratorType) == "string" then
    local found, entry = pcall(types.get, node.acceleratorType)
    return found and types.generations[entry.generation] or nil, found and entry.chips or nil
  end
  local config = type(node.acceleratorConfig) == "table" and node.acceleratorConfig or {}
  for _, generation in ipairs(types.generation_list) do
    if generation.api_type == config.type and type(config.topology) == "string" then
      local found, shape = pcall(topologies.of, { generation = generation.name, topology = config.topology })
      return generation, found and shape.chips or nil
    end
  end
  return nil
end

---@class ciranda.gcp.Holding
---@field slices integer
---@field chips integer?      of all slices; nil when the table does not have the type
---@field generation string?  "v5e"
---@field age number?         seconds since it was made

--- What a QueuedResource or a Node message stands for.
---@param message table
---@param now number seconds since 1970
---@return ciranda.gcp.Holding
function M.of(message, now)
  local created = kinds.parse_time(message.createTime)
  local holding = { slices = 0, age = created and math.max(0, now - created) or nil }
  local tpu = type(message.tpu) == "table" and message.tpu or nil
  local specs = tpu and type(tpu.nodeSpec) == "table" and tpu.nodeSpec
    or not tpu and { { node = message } }
    or {}
  for _, spec in ipairs(specs) do
    local multi = type(spec) == "table" and (spec.multisliceParams or spec.multiNodeParams)
    local count = type(multi) == "table" and math.tointeger(multi.nodeCount) or 1
    local generation, chips = shape_of(type(spec) == "table" and spec.node)
    holding.slices = holding.slices + count
    holding.generation = generation and generation.name or holding.generation
    holding.chips = chips and (holding.chips or 0) + chips * count or holding.chips
  end
  return holding
end

--- The kind of capacity that a QueuedResource message asks for.
---@param message table
---@return string
local function capacity_of(message)
  if message.spot ~= nil or message.provisioningModel == "SPOT" then
    return "spot"
  elseif message.bestEffort ~= nil then
    return "best-effort"
  elseif message.reservationName ~= nil or message.provisioningModel == "RESERVATION_BOUND" then
    return "reserved"
  elseif message.provisioningModel == "FLEX_START" then
    return "flex-start"
  end
  return message.guaranteed ~= nil and "guaranteed" or "on-demand"
end

--- What a person should know of a request that waits: what it asks of capacity, and what holds the project's quota.
---@param message table the QueuedResource that waits
---@param all table<string, table>? every queued resource of the zone, by its short name
---@param zone string
---@return string
function M.situation(message, all, zone)
  local own = M.of(message, 0)
  local text = ("Capacity: it asks for %d slice%s%s%s, %s, in %s."):format(
    own.slices,
    own.slices == 1 and "" or "s",
    own.generation and " of " .. own.generation or "",
    own.chips and (" (%d chips)"):format(own.chips) or "",
    capacity_of(message),
    zone
  )
  if not all then
    return text
  end
  local count, chips, dead = 0, 0, {}
  for name, other in pairs(all) do
    local holding = M.of(other, 0)
    local state = type(other.state) == "table" and other.state.state
    if other.name ~= message.name and holding.generation == own.generation then
      if M.DEAD[state] then
        dead[#dead + 1] = name
      end
      if M.DEAD[state] or state == "ACTIVE" or state == "PROVISIONING" or state == "SUSPENDING" then
        count, chips = count + 1, chips + (holding.chips or 0)
      end
    end
  end
  text = text
    .. (" Quota: %d other queued resource%s of this project hold%s %d chips there"):format(
      count,
      count == 1 and "" or "s",
      count == 1 and "s" or "",
      chips
    )
  if #dead == 0 then
    return text .. "."
  end
  table.sort(dead)
  return ("%s, of which %s %s FAILED or SUSPENDED and hold%s quota until deleted: ciranda qr delete %s."):format(
    text,
    table.concat(dead, ", ", 1, math.min(#dead, 8)),
    #dead == 1 and "is" or "are",
    #dead == 1 and "s" or "",
    dead[1]
  )
end

--- A length of time as lists show it: 45s, 12m, 5h, 3d.
---@param seconds number?
---@return string
function M.age_text(seconds)
  if not seconds then
    return "-"
  end
  for _, unit in ipairs { { 172800, 86400, "d" }, { 7200, 3600, "h" }, { 120, 60, "m" } } do
    if seconds >= unit[1] then
      return ("%d%s"):format(seconds // unit[2], unit[3])
    end
  end
  return ("%ds"):format(seconds // 1)
end

return M
