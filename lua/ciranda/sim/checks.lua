--- What the simulated TPU API checks of a request before it does anything.
--
-- Every function raises a ciranda.sim.Status, INVALID_ARGUMENT unless it says otherwise, that names the field.

local catalog = require("ciranda.sim.catalog")
local errors = require("ciranda.sim.errors")
local schema = require("ciranda.sim.schema")

local M = {}

-- Compute Engine's limits for instance metadata: 256 KB a value, 512 KB in all.
M.METADATA_VALUE = 256 * 1024
M.METADATA_TOTAL = 512 * 1024

-- "Multislice: at most 256 slices" (the guide).
M.MAX_SLICES = 256

local function refuse(field, format, ...)
  errors.raise(errors.invalid(format:format(...), field))
end

--- The id of a resource to be made.
---@param id string?
---@param field string
---@return string
function M.resource_id(id, field)
  if not id or id == "" then
    refuse(field, "%s is required", field)
  elseif #id > 63 or not (id:match "^%l[%l%d-]*$" and id:match "[%l%d]$") then
    refuse(
      field,
      "Invalid %s '%s': it must match '[a-z]([a-z0-9-]*[a-z0-9])?', at most 63 characters",
      field,
      id
    )
  end
  return id --[[@as string]]
end

--- The Location message of a zone.
---@param call ciranda.sim.Call
---@param zone string
---@return table
function M.location(call, zone)
  return {
    name = ("projects/%s/locations/%s"):format(call.project, zone),
    locationId = zone,
    displayName = zone,
    labels = { ["cloud.googleapis.com/region"] = catalog.region(zone) },
  }
end

--- Whether an item passes a list's filter. `field=value`, `field:value` and `field!=value` are understood.
---@param call ciranda.sim.Call
---@param item table
---@return boolean
function M.filter(call, item)
  local text = call.query.filter
  if not text or text == "" then
    return true
  end
  local field, operator, value = text:match '^%s*([%w_.]+)%s*([:=!]=?)%s*"?([^"]*)"?%s*$'
  if
    not field
    or type(item[field]) ~= "string"
    or not (operator == "=" or operator == ":" or operator == "!=")
  then
    refuse("filter", "Invalid list filter: '%s'", text)
  end
  if operator == ":" then
    return item[field]:find(value, 1, true) ~= nil
  end
  return (item[field] == value) == (operator == "=")
end

--- Lists are sorted by name; no other order is offered.
---@param call ciranda.sim.Call
function M.order(call)
  local order = call.query.orderBy
  if order and order ~= "" and order ~= "name" and order ~= "name asc" then
    refuse("order_by", "Invalid order_by: '%s'", order)
  end
end

local function check_labels(labels, path)
  for key, value in pairs(labels or {}) do
    if #key > 63 or not key:match "^%l[%l%d_-]*$" then
      refuse(path .. ".labels", "Invalid label key '%s': it must match '[a-z][a-z0-9_-]{0,62}'", key)
    elseif #value > 63 or not value:match "^[%l%d_-]*$" then
      refuse(
        path .. ".labels",
        "Invalid value '%s' of label '%s': it must match '[a-z0-9_-]{0,63}'",
        value,
        key
      )
    end
  end
end

local function check_metadata(metadata, path)
  local total = 0
  for key, value in pairs(metadata or {}) do
    if #key > 128 or not key:match "^[%w_-]+$" then
      refuse(path .. ".metadata", "Invalid metadata key '%s': it must match '[a-zA-Z0-9-_]{1,128}'", key)
    elseif #value > M.METADATA_VALUE then
      local format = "Metadata value of '%s' is too large: %d bytes, at most %d"
      refuse(path .. ".metadata", format, key, #value, M.METADATA_VALUE)
    end
    total = total + #key + #value
  end
  if total > M.METADATA_TOTAL then
    refuse(path .. ".metadata", "Metadata is too large: %d bytes in all, at most %d", total, M.METADATA_TOTAL)
  end
end

--- The fields of a node that a user sets, at creation and by a patch.
---@param node table Node
---@param path string where it stands in the request
function M.node_fields(node, path)
  if node.description and utf8.len(node.description) and utf8.len(node.description) > 512 then
    refuse(path .. ".description", "description has more than 512 characters")
  end
  check_labels(node.labels, path)
  check_metadata(node.metadata, path)
  for _, tag in ipairs(node.tags or {}) do
    if #tag > 63 or not (tag:match "^%l[%l%d-]*$" and tag:match "[%l%d]$") then
      refuse(path .. ".tags", "Invalid tag '%s': it must match '[a-z]([-a-z0-9]*[a-z0-9])?'", tag)
    end
  end
  for i, disk in ipairs(node.dataDisks or {}) do
    if not disk.sourceDisk then
      refuse(("%s.data_disks[%d].source_disk"):format(path, i - 1), "source_disk is required")
    end
  end
end

-- What only the server sets; what a client sends there is ignored.
local SERVER_SET = {
  "name",
  "id",
  "state",
  "health",
  "healthDescription",
  "createTime",
  "apiVersion",
  "networkEndpoints",
  "symptoms",
  "multisliceNode",
  "queuedResource",
  "upcomingMaintenance",
}

--- A node that is to be made.
---@param call ciranda.sim.Call
---@param node table Node; the fields that only the server sets are taken out
---@param path string?
---@return ciranda.sim.Accelerator
function M.node(call, node, path)
  path = path or "node"
  for _, field in ipairs(SERVER_SET) do
    node[field] = nil
  end
  local accelerator = call.world.catalog:resolve(node, call.location, call.schema)
  call.world.catalog:check_runtime(node.runtimeVersion, call.location)
  if node.networkConfig and node.networkConfigs then
    refuse(path .. ".network_configs", "network_config and network_configs cannot both be set")
  end
  M.node_fields(node, path)
  return accelerator
end

--- Refuse what no amount of waiting would allow: more than the quota's limit.
---@param call ciranda.sim.Call
---@param accelerator ciranda.sim.Accelerator
---@param count integer slices
---@param preemptible boolean
---@return string place the quota's place in `world.quota`
--- Raises RESOURCE_EXHAUSTED.
function M.quota(call, accelerator, count, preemptible)
  local quota = catalog.quota_id(accelerator, preemptible)
  local place = call.location .. "/" .. quota
  local limit = call.world.quota:limit(place)
  if limit and accelerator.size * count > limit then
    errors.raise(errors.quota_limit(quota, limit, catalog.region(call.location)))
  end
  return place
end

--- Count a create against the calls a minute, where they are limited.
---@param call ciranda.sim.Call
--- Raises RESOURCE_EXHAUSTED.
function M.create_rate(call)
  local rate = call.world.create_rate
  if not rate.per_minute then
    return
  end
  local now = call.world.clock:now()
  while rate.times[1] and rate.times[1] <= now - 60 do
    table.remove(rate.times, 1)
  end
  if #rate.times >= rate.per_minute then
    errors.raise(errors.rate_limit(rate.times[1] + 60 - now))
  end
  table.insert(rate.times, now)
end

local function only_one(fields, names, path)
  local found
  for _, name in ipairs(names) do
    if fields[name] ~= nil then
      if found then
        refuse(
          path == "" and schema.snake(name) or path .. "." .. schema.snake(name),
          "only one of %s and %s can be set",
          schema.snake(found),
          schema.snake(name)
        )
      end
      found = name
    end
  end
  return found
end

local function check_parent(call, spec, path)
  local project, zone = (spec.parent or ""):match "^projects/([^/]+)/locations/([^/]+)$"
  local known = project == call.world.project.id or project == call.world.project.number
  if not known or zone ~= call.location then
    refuse(path .. ".parent", "parent '%s' must be '%s'", spec.parent or "", call.parent)
  end
end

local function node_ids(call, spec, accelerator, path)
  local multi = spec.multiNodeParams or spec.multisliceParams
  local field = call.schema:has("NodeSpec", "multiNodeParams") and "multi_node_params" or "multislice_params"
  if multi and spec.nodeId then
    refuse(path .. "." .. field, "node_id and %s cannot both be set", field)
  elseif not multi then
    return { M.resource_id(spec.nodeId, "node_id") }
  end
  local count = multi.nodeCount or 0
  if count < 2 or count > M.MAX_SLICES then
    refuse(
      path .. "." .. field .. ".node_count",
      "node_count is %d; it must be from 2 to %d",
      count,
      M.MAX_SLICES
    )
  elseif not accelerator.multislice then
    local format = "Multislice is not supported for accelerator type '%s'; it needs v4 or newer"
    refuse(path .. "." .. field, format, accelerator.type)
  end
  local prefix = multi.nodeIdPrefix or call.query.queuedResourceId
  if not prefix:match "^[%w_.~+%%-]+$" or #prefix > 59 then
    refuse(path .. "." .. field .. ".node_id_prefix", "Invalid node_id_prefix '%s'", prefix)
  end
  local ids = {}
  for i = 1, count do
    ids[i] = ("%s-%d"):format(prefix, i - 1)
  end
  return ids
end

local function check_reservation(name, location)
  local kind, zone = name:match "^(%l+)/[^/]+/locations/([^/]+)/reservations/[^/]+$"
  if not (kind == "projects" or kind == "folders" or kind == "organizations") or zone ~= location then
    refuse(
      "queued_resource.reservation_name",
      "Invalid reservation_name '%s': it must be {projects|folders|organizations}/X/locations/%s/reservations/R",
      name,
      location
    )
  end
end

--- A queued resource that is to be made.
---@param call ciranda.sim.Call
---@param message table QueuedResource
---@return ciranda.sim.QueuedResource what `QueuedResources:insert` takes
function M.queued_resource(call, message)
  local id = M.resource_id(call.query.queuedResourceId, "queued_resource_id")
  message.name, message.state, message.createTime = nil, nil, nil
  local specs = message.tpu and message.tpu.nodeSpec or {}
  if #specs ~= 1 then
    refuse("queued_resource.tpu.node_spec", "exactly one node_spec is supported, got %d", #specs)
  end
  local spec, path = specs[1], "queued_resource.tpu.node_spec[0]"
  check_parent(call, spec, path)
  if not spec.node then
    refuse(path .. ".node", "node is required")
  end
  local tier = only_one(message, { "bestEffort", "guaranteed", "spot" }, "queued_resource")
  only_one(
    message.queueingPolicy or {},
    { "validUntilDuration", "validUntilTime", "validAfterDuration", "validAfterTime", "validInterval" },
    "queued_resource.queueing_policy"
  )
  local accelerator = M.node(call, spec.node, path .. ".node")
  if message.reservationName then
    check_reservation(message.reservationName, call.location)
  end
  if message.provisioningModel == "FLEX_START" and not (message.runDuration or {}).maxRunDuration then
    refuse("queued_resource.run_duration", "run_duration.max_run_duration is required with FLEX_START")
  end
  local preemptible = tier == "spot" or tier == "bestEffort" or message.provisioningModel == "SPOT"
  local reserved = message.reservationName ~= nil
    or tier == "guaranteed" and message.guaranteed.reserved == true
    or message.provisioningModel == "RESERVATION_BOUND"
  local ids = node_ids(call, spec, accelerator, path)
  local template = spec.node
  template.schedulingConfig = template.schedulingConfig
    or preemptible and { preemptible = true, spot = true }
    or reserved and { reserved = true }
    or nil
  message.tpu = nil
  return {
    name = ("%s/queuedResources/%s"):format(call.parent, id),
    id = id,
    zone = call.location,
    parent = call.parent,
    message = message,
    template = template,
    node_ids = ids,
    count = #ids,
    accelerator = accelerator,
    preemptible = preemptible,
    reserved = reserved,
    version = call.version,
  }
end

return M
