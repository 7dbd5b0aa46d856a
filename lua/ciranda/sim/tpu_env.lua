--- What a worker is told about itself: its tpu-env, its metadata attributes, and the variables of its sessions.
--
-- All of it follows from the node's record, so that it is right after a patch, a repair or a move of slice 0.

local M = {}

local function dimensions(text)
  return (text:gsub("x", ","))
end

-- "4x4" of the API has no third dimension; the guest's variables always have three.
local function three(text)
  local list = dimensions(text)
  local _, commas = list:gsub(",", "")
  return list .. (",1"):rep(2 - commas)
end

local function wrap(accelerator)
  local flags = accelerator.wrap or "FFF"
  return (flags:gsub(".", { T = "true,", F = "false," }):gsub(",$", ""))
end

local function addresses(node)
  local list = {}
  for i, endpoint in ipairs(node.endpoints) do
    list[i] = endpoint.address
  end
  return list
end

--- Where the coordinator of a Multislice environment is: worker 0 of slice 0. Nil for a single slice.
---@param node ciranda.sim.Node
---@return string? address, integer? slices
function M.coordinator(node)
  local queued_resource = node.queued_resource
  if not queued_resource or queued_resource.count < 2 then
    return nil
  end
  local first = queued_resource.nodes[0]
  local endpoint = first and first.endpoints[1]
  return endpoint and endpoint.address or "", queued_resource.count
end

--- The name of a worker's virtual machine: "t1v-n-1a2b3c4d-w-0".
---@param node ciranda.sim.Node
---@param worker integer
---@return string
function M.vm_name(node, worker)
  return ("t1v-n-%08x-w-%d"):format(node.uid & 0xffffffff, worker)
end

--- The keys and values of a worker's tpu-env, in order.
---@param world table
---@param node ciranda.sim.Node
---@param worker integer
---@return { [1]: string, [2]: string }[]
function M.entries(world, node, worker)
  local accelerator = node.accelerator
  local scheduling = node.message.schedulingConfig or {}
  local host, hosts = three(accelerator.chips_per_host_bounds), three(accelerator.host_bounds)
  local preemptible = scheduling.preemptible or scheduling.spot or false
  local entries = {
    { "ACCELERATOR_TYPE", accelerator.type },
    { "ALT", "false" },
    { "CHIPS_PER_HOST_BOUNDS", host },
    { "CONSUMER_PROJECT_ID", world.project.id },
    { "CONSUMER_PROJECT_NUMBER", world.project.number },
    { "ENABLE_ICI_RESILIENCY", "true" },
    { "ENABLE_MEMCACHED", "false" },
    { "HOST_BOUNDS", hosts },
    { "INFERENCE_MODE", "false" },
    { "INTERNAL", "false" },
    { "MAINTENANCE_ACTION_FLAG", "unhealthy-maintenance" },
    { "NODE_ID", node.id },
    { "PREEMPTIBLE", tostring(preemptible) },
    { "RUNTIME_VERSION", node.message.runtimeVersion },
    { "SERVICE_NAME", "tpu.googleapis.com" },
    { "TOPOLOGY", accelerator.topology },
    { "TPU_CHIPS_PER_PROCESS_BOUNDS", host },
    { "TPU_PROCESS_BOUNDS", hosts },
    { "TPU_RUNTIME_METRICS_PORTS", "8431,8432,8433,8434" },
    { "TPU_TOPOLOGY_ALT", "false" },
    { "TPU_TOPOLOGY_WRAP", wrap(accelerator) },
    { "TYPE", accelerator.config_type },
    { "UID", tostring(node.uid) },
    { "WORKER_ID", tostring(worker) },
    { "WRAP", wrap(accelerator) },
    { "ZONE", node.zone },
  }
  local coordinator, slices = M.coordinator(node)
  if coordinator then
    table.insert(entries, { "MEGASCALE_COORDINATOR_ADDRESS", coordinator })
    table.insert(entries, { "MEGASCALE_NUM_SLICES", tostring(slices) })
    table.insert(entries, { "MEGASCALE_SLICE_ID", tostring(node.slice) })
  end
  return entries
end

--- A worker's tpu-env as the metadata server gives it: lines of KEY: 'value'.
---@param world table
---@param node ciranda.sim.Node
---@param worker integer
---@return string
function M.text(world, node, worker)
  local lines = {}
  for i, entry in ipairs(M.entries(world, node, worker)) do
    lines[i] = ("%s: '%s'\n"):format(entry[1], entry[2])
  end
  return table.concat(lines)
end

--- The instance attributes of a worker: the platform's, and the user's metadata.
---@param world table
---@param node ciranda.sim.Node
---@param worker integer
---@return table<string, string>
function M.attributes(world, node, worker)
  local result = {}
  for key, value in pairs(node.message.metadata or {}) do
    result[key] = value
  end
  local endpoints = {}
  for i, address in ipairs(addresses(node)) do
    endpoints[i] = "unknown:unknown:" .. address
  end
  result["accelerator-type"] = node.accelerator.type
  result["agent-worker-number"] = tostring(worker)
  result["worker-id"] = tostring(worker)
  result["worker-network-endpoints"] = table.concat(endpoints, ",")
  result["instance-id"] = node.id
  result["tpu-env"] = M.text(world, node, worker)
  return result
end

--- The variables that a session on a worker begins with. A machine of the cloud gets them from its metadata and its
--- devices; a simulated one, which has no TPU on its bus, has them set by its sshd.
---@param node ciranda.sim.Node
---@param worker integer
---@param metadata string "address:port" of the worker's metadata server
---@return table<string, string>
function M.environment(node, worker, metadata)
  local accelerator = node.accelerator
  local coordinator, slices = M.coordinator(node)
  return {
    GCE_METADATA_HOST = metadata,
    GCE_METADATA_IP = metadata,
    GCE_METADATA_ROOT = metadata,
    MEGASCALE_COORDINATOR_ADDRESS = coordinator,
    MEGASCALE_NUM_SLICES = coordinator and tostring(slices),
    MEGASCALE_SLICE_ID = coordinator and tostring(node.slice),
    TPU_ACCELERATOR_TYPE = accelerator.type,
    TPU_TOPOLOGY = accelerator.topology,
    TPU_WORKER_HOSTNAMES = table.concat(addresses(node), ","),
    TPU_WORKER_ID = tostring(worker),
  }
end

--- The device files of a worker.
---@param node ciranda.sim.Node
---@return string[]
function M.devices(node)
  local list = {}
  for chip = 0, node.accelerator.chips_per_worker - 1 do
    list[chip + 1] = node.accelerator.device:format(chip)
  end
  return list
end

return M
