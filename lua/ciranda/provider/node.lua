--- A fleet from TPU nodes (TPU VMs), found by name or by prefix.
--
-- The exact name wins and is then alone; else `PREFIX-<digits>`, ordered by number. The number is the slice's
-- own: a gap stays a gap.
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- The last segment of a resource name.
---@param name string
---@return string
function M.short_name(name)
  return name:match("[^/]*$")
end

--- The zone in "projects/P/locations/Z/nodes/N".
---@param name string
---@return string?
local function zone_of(name)
  return name:match("/locations/([^/]+)/")
end

--- The nodes that a prefix names, in order, each with its slice number.
---@param nodes table[] Node messages
---@param prefix string
---@return { node: table, index: integer }[]
function M.matching(nodes, prefix)
  local numbered = {}
  for _, node in ipairs(nodes) do
    local name = M.short_name(node.name)
    if name == prefix then
      return { { node = node, index = 0 } }
    end
    if name:sub(1, #prefix + 1) == prefix .. "-" then
      local digits = name:sub(#prefix + 2):match("^%d+$")
      if digits and #digits <= 9 then
        numbered[#numbered + 1] = { node = node, index = math.tointeger(tonumber(digits)) }
      end
    end
  end
  table.sort(numbered, function(a, b)
    return a.index < b.index
  end)
  return numbered
end

--- The host keys and the host name among one worker's guest attributes.
---@param attributes table? a GuestAttributes message
---@return string[]? pins, string? hostname
local function from_guest_attributes(attributes)
  local value = attributes and attributes.queryValue
  local pins, hostname = {}, nil
  for _, item in ipairs(value and value.items or {}) do
    if item.namespace == "hostkeys" and item.key and item.value then
      pins[#pins + 1] = item.key .. " " .. item.value:match("^%s*(.-)%s*$")
    elseif item.key == "hostname" then
      hostname = item.value
    end
  end
  return #pins > 0 and pins or nil, hostname
end

--- The accelerator type that a node's config means, such as v5litepod-16; nil for one the table does not have.
---@param config { type: string?, topology: string? }
---@return string?
local function type_of(config)
  for _, generation in pairs(require("ciranda.mesh.types").generations) do
    if generation.api_type == config.type and config.topology then
      local ok, name = pcall(require("ciranda.mesh.topology").to_type, generation.name, config.topology)
      return ok and name or nil
    end
  end
  return nil
end

--- Notes on each worker how many chips it has, where the slice's type says so.
---@param slice ciranda.Slice
local function count_chips(slice)
  local topologies = require("ciranda.mesh.topology")
  local ok, shape = pcall(topologies.of, { type = slice.accelerator, topology = slice.topology })
  local share = ok and slice.accelerator and #slice.workers > 0 and shape.chips / #slice.workers
  for _, worker in ipairs(slice.workers) do
    worker.chips = share and math.tointeger(share) or nil
  end
end

--- One slice from a node.
---@param node table a Node message
---@param index integer the slice's number
---@param guest_attributes table[]? GuestAttributes, one a worker, in order
---@return ciranda.Slice
function M.slice(node, index, guest_attributes)
  local config = node.acceleratorConfig or {}
  -- With n networks worker i is endpoint i*n.
  local networks = math.max(1, #(node.networkConfigs or {}))
  local endpoints = node.networkEndpoints or {}
  local slice = {
    index = index,
    name = M.short_name(node.name),
    zone = zone_of(node.name),
    accelerator = node.acceleratorType or type_of(config),
    topology = config.topology,
    generation = config.type,
    state = node.state,
    health = node.health,
    node_uid = node.id,
    queued_resource = node.queuedResource and M.short_name(node.queuedResource),
    multislice = node.multisliceNode or nil,
    symptoms = node.symptoms,
    metadata = node.metadata,
    upcoming_maintenance = node.upcomingMaintenance,
    -- Only v2alpha1 tells it, and only when it is true.
    autocheckpoint = node.autocheckpointEnabled,
    workers = {},
  }
  for place = 1, #endpoints, networks do
    local endpoint = endpoints[place]
    local number = (place - 1) // networks
    local external = endpoint.accessConfig and endpoint.accessConfig.externalIp
    local pins, hostname = from_guest_attributes(guest_attributes and guest_attributes[number + 1])
    slice.workers[#slice.workers + 1] = {
      slice = index,
      index = number,
      node = slice.name,
      name = ("%s-w-%d"):format(slice.name, number),
      address = external ~= "" and external or endpoint.ipAddress,
      internal_address = endpoint.ipAddress,
      has_external = external ~= nil and external ~= "",
      hostname = hostname,
      pins = pins,
    }
  end
  count_chips(slice)
  return slice
end

--- A table of nodes for a person: name, state, health, type, workers, queued resource.
---@param slices ciranda.Slice[]
---@return string
function M.table_text(slices)
  local rows = { { "SLICE", "NAME", "STATE", "HEALTH", "TYPE", "WORKERS", "QUEUED RESOURCE" } }
  for _, slice in ipairs(slices) do
    rows[#rows + 1] = {
      tostring(slice.index),
      slice.name,
      slice.state or "-",
      slice.health or "-",
      slice.accelerator or ("%s %s"):format(slice.generation or "-", slice.topology or ""),
      tostring(#slice.workers),
      slice.queued_resource or "-",
    }
  end
  local widths = {}
  for _, row in ipairs(rows) do
    for column, cell in ipairs(row) do
      widths[column] = math.max(widths[column] or 0, #cell)
    end
  end
  for place, row in ipairs(rows) do
    for column, cell in ipairs(row) do
      row[column] = cell .. (" "):rep(widths[column] - #cell)
    end
    rows[place] = table.concat(row, "  "):gsub("%s+$", "")
  end
  return table.concat(rows, "\n")
end

--- Why these slices should not be run on as they are, or nil.
--
-- Each of these hangs a job for its whole time limit when it is not said beforehand: a gap in the numbers, nodes of
-- several queued resources, mixed types, unequal worker counts, a node that is not READY.
---@param slices ciranda.Slice[]
---@return string?
function M.problem(slices)
  local first = slices[1]
  local function differs(what, field)
    for _, slice in ipairs(slices) do
      if slice[field] ~= first[field] then
        return ("%s: %s has %s, %s has %s"):format(
          what,
          first.name,
          tostring(first[field] or "none"),
          slice.name,
          tostring(slice[field] or "none")
        )
      end
    end
  end
  for _, slice in ipairs(slices) do
    if slice.state and slice.state ~= "READY" then
      return ("%s is %s, not READY"):format(slice.name, slice.state)
    end
  end
  for place, slice in ipairs(slices) do
    if #slice.workers == 0 then
      return ("%s has no workers yet"):format(slice.name)
    elseif #slice.workers ~= #first.workers then
      return ("unequal worker counts: %s has %d, %s has %d"):format(
        first.name,
        #first.workers,
        slice.name,
        #slice.workers
      )
    elseif #slices > 1 and slice.index ~= place - 1 then
      return ("there is a gap in the numbers: slice %d is missing"):format(place - 1)
    end
  end
  return differs("mixed types", "accelerator")
    or differs("mixed topologies", "topology")
    or differs("more than one queued resource", "queued_resource")
end

--- Guest attributes that cannot be had are not a failure of the fleet: a policy may forbid them. Then known_hosts
--- decides whether a host key is right.
local NO_ATTRIBUTES = { "not_found", "permission", "unsupported", "precondition", "invalid" }

--- Makes slices of nodes, reading each one's guest attributes (host keys, host names) at once.
---@async
---@param tpu ciranda.gcp.Tpu
---@param found { node: table, index: integer }[]
---@param pins boolean? false: leave the guest attributes alone
---@return ciranda.Slice[]
function M.with_pins(tpu, found, pins)
  return task.map(found, function(entry)
    local attributes
    if pins ~= false and entry.node.state == "READY" then
      local ok, answer = pcall(tpu.guest_attributes, tpu, M.short_name(entry.node.name))
      if ok then
        attributes = answer
      elseif not err.is(answer, table.unpack(NO_ATTRIBUTES)) then
        error(answer, 0)
      end
    end
    return M.slice(entry.node, entry.index, attributes)
  end, 16)
end

--- A worker's host keys, asked for again: those of a node that was made anew are others.
---@async
---@param tpu ciranda.gcp.Tpu
---@param worker ciranda.Worker
---@return string[]? pins nil when the API does not tell
function M.pins(tpu, worker)
  local ok, answer = pcall(tpu.guest_attributes, tpu, worker.node)
  if not ok then
    if not err.is(answer, table.unpack(NO_ATTRIBUTES)) then
      error(answer, 0)
    end
    return nil
  end
  return (from_guest_attributes(answer[worker.index + 1]))
end

--- The slices of all nodes with a name or prefix.
---@async
---@param options { tpu: ciranda.gcp.Tpu, prefix: string, pins: boolean? } pins: read the host keys from the guest
---  attributes (true)
---@return ciranda.Slice[]
-- Raises "usage" for an empty prefix, "not_found" when no node has it, and what the API's calls raise.
function M.slices(options)
  err.check_options(options, { tpu = true, prefix = true, pins = true }, "provider.node")
  local prefix, tpu = options.prefix, options.tpu
  if type(prefix) ~= "string" or prefix == "" then
    -- An empty prefix would name every node of the project.
    err.raise({ code = "usage", op = "provider.node", message = "the name or prefix of the nodes is empty" })
  end
  local nodes = tpu:list_nodes()
  local found = M.matching(nodes, prefix)
  if #found == 0 then
    local names = {}
    for place, node in ipairs(nodes) do
      names[place] = M.short_name(node.name)
    end
    table.sort(names)
    err.raise({
      code = "not_found",
      op = "provider.node",
      target = prefix,
      message = ("no TPU node is called %s or %s-<number> in zone %s of project %s; %s"):format(
        prefix,
        prefix,
        tpu.zone,
        tpu.project,
        #names == 0
            and "there is none at all; the zone may be another: ciranda tpu_vm list --zone=- shows all"
          or ("there %s %s%s"):format(
            #names == 1 and "is" or "are",
            table.concat(names, ", ", 1, math.min(#names, 20)),
            #names > 20 and (" and %d more"):format(#names - 20) or ""
          )
      ),
    })
  end
  return M.with_pins(tpu, found, options.pins)
end

return M
