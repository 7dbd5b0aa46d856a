--- What each method of the simulated TPU API does, by its id in the schema.
--
-- A handler gets a call whose query and body have been read and checked against the schema, and returns the answer as
-- a message. It never waits: what takes time is an operation. A refusal is raised as a ciranda.sim.Status.

local checks = require("ciranda.sim.checks")
local errors = require("ciranda.sim.errors")
local maintenance = require("ciranda.sim.maintenance")
local paging = require("ciranda.sim.paging")
local queued_resources = require("ciranda.sim.queued_resources")

---@type table<string, fun(call: ciranda.sim.Call): table>
local handlers = {}

-- The test of a resource's name against a parent whose zone may be "-".
local function under(call, collection)
  local prefix = ("projects/%s/locations/"):format(call.project)
  local zone = call.location
  return function(name)
    local where, kind = name:match("^" .. prefix:gsub("%p", "%%%0") .. "([^/]+)/([^/]+)/")
    return kind == collection and (zone == "-" or where == zone)
  end
end

local function by_name(item)
  return item.name
end

local function list_page(call, field, items, make)
  local page, token = paging.page(items, by_name, call.query.pageSize, call.query.pageToken)
  local result = {}
  for i, item in ipairs(page) do
    result[i] = make and make(item) or item
  end
  return { [field] = result, nextPageToken = token }
end

local function node_message(node)
  return node.message
end

local function start(call, verb, target)
  local operation = call.world.operations:start(call.parent, call.version, verb, target)
  operation.late = call.world.faults:on_operation(call.method)
  call.operation = operation
  return operation
end

-- Ends the operation with a node, or with the refusal that stopped it.
local function end_with_node(call, operation, node)
  return function(err)
    if err then
      call.world.operations:fail(operation, err)
    else
      call.world.operations:succeed(operation, "Node", node.message)
    end
  end
end

handlers["locations.list"] = function(call)
  local locations = {}
  for i, zone in ipairs(call.world.catalog.zones) do
    locations[i] = checks.location(call, zone)
  end
  return list_page(call, "locations", locations)
end

handlers["locations.get"] = function(call)
  return checks.location(call, call.location)
end

handlers["locations.generateServiceIdentity"] = function(call)
  return {
    identity = {
      email = ("service-%s@cloud-tpu.iam.gserviceaccount.com"):format(call.world.project.number),
    },
  }
end

local function accelerator_type(call, name)
  local accelerator = call.world.catalog:accelerator(name)
  return {
    name = ("%s/acceleratorTypes/%s"):format(call.parent, name),
    type = name,
    acceleratorConfigs = call.version ~= "v1" and {
      { type = accelerator.config_type, topology = accelerator.topology },
    } or nil,
  }
end

local function listed(call, field, names, make)
  local items = {}
  for _, name in ipairs(names) do
    local item = make(call, name)
    if checks.filter(call, item) then
      items[#items + 1] = item
    end
  end
  checks.order(call)
  return list_page(call, field, items)
end

handlers["acceleratorTypes.list"] = function(call)
  return listed(
    call,
    "acceleratorTypes",
    call.world.catalog:types(call.location, call.schema),
    accelerator_type
  )
end

handlers["acceleratorTypes.get"] = function(call)
  local wanted = call.name:match "[^/]+$"
  for _, name in ipairs(call.world.catalog:types(call.location, call.schema)) do
    if name == wanted then
      return accelerator_type(call, name)
    end
  end
  return errors.raise(errors.not_found(call.name))
end

local function runtime_version(call, name)
  return { name = ("%s/runtimeVersions/%s"):format(call.parent, name), version = name }
end

handlers["runtimeVersions.list"] = function(call)
  return listed(call, "runtimeVersions", call.world.catalog.runtimes, runtime_version)
end

handlers["runtimeVersions.get"] = function(call)
  local wanted = call.name:match "[^/]+$"
  for _, name in ipairs(call.world.catalog.runtimes) do
    if name == wanted then
      return runtime_version(call, name)
    end
  end
  return errors.raise(errors.not_found(call.name))
end

handlers["reservations.list"] = function(call)
  local list = {}
  for _, reservation in ipairs(call.world.reservations) do
    if call.location == "-" or reservation.zone == call.location then
      list[#list + 1] = {
        name = ("projects/%s/locations/%s/reservations/%s"):format(
          call.project,
          reservation.zone,
          reservation.name
        ),
        state = "ACTIVE",
        standard = {
          size = reservation.size,
          capacityUnits = reservation.units,
          resourceType = reservation.type,
          usage = { total = call.world.capacity:in_use(reservation.place) },
        },
      }
    end
  end
  table.sort(list, function(a, b)
    return a.name < b.name
  end)
  return list_page(call, "reservations", list)
end

handlers["nodes.get"] = function(call)
  return call.world.nodes:get(call.name).message
end

handlers["nodes.list"] = function(call)
  return list_page(call, "nodes", call.world.nodes:list(under(call, "nodes")), node_message)
end

handlers["nodes.create"] = function(call)
  local world = call.world
  local id = checks.resource_id(call.query.nodeId, "node_id")
  local name = call.parent .. "/nodes/" .. id
  local message = call.body
  local accelerator = checks.node(call, message)
  if world.nodes:find(name) then
    errors.raise(errors.already_exists(name))
  end
  checks.create_rate(call)
  local scheduling = message.schedulingConfig or {}
  local preemptible = scheduling.preemptible or scheduling.spot or scheduling.provisioningModel == "SPOT"
  local quota_place = checks.quota(call, accelerator, 1, preemptible)
  local node = world.nodes:insert(name, call.location, message, accelerator, call.version)
  node.preemptible = preemptible
  local operation = start(call, "create", name)
  local function give_up(err)
    world.operations:fail(operation, err)
    world.nodes:delete(node, function()
      world.quota:release(node)
      world.capacity:release(node)
    end)
  end
  local fault = world.faults:provisioning(node)
  if fault then
    give_up(fault.error)
  elseif not world.quota:take(node, quota_place, accelerator.size) then
    give_up(errors.quota_exhausted(quota_place:match "[^/]+$", world.quota:limit(quota_place), call.location))
  elseif not world.capacity:take(node, call.location .. "/" .. accelerator.prefix, accelerator.size) then
    give_up(errors.stockout(call.location, world.random:hex(16)))
  else
    local allocated, err = pcall(world.nodes.allocate, world.nodes, node)
    if not allocated then
      give_up(err)
    else
      world.nodes:provision(node, function(problem)
        if problem then
          give_up(problem)
        else
          world.operations:succeed(operation, "Node", node.message)
        end
      end)
    end
  end
  return operation
end

handlers["nodes.delete"] = function(call)
  local world = call.world
  local node = world.nodes:get(call.name)
  local operation = start(call, "delete", call.name)
  local function gone()
    world.operations:succeed(operation)
  end
  if node.queued_resource then
    world.queued_resources:delete_node(node, gone)
  else
    world.nodes:delete(node, function()
      world.quota:release(node)
      world.capacity:release(node)
      gone()
    end)
  end
  return operation
end

handlers["nodes.patch"] = function(call)
  local world = call.world
  local node = world.nodes:get(call.name)
  local state = node.message.state
  if state ~= "READY" and state ~= "STOPPED" then
    local refused = start(call, "update", call.name)
    world.operations:fail(refused, errors.unsupported_state("update", state, world.random:hex(16)))
    return refused
  end
  checks.node_fields(call.body, "node")
  local operation
  world.nodes:patch(node, call.query.updateMask or "", call.body, function()
    world.operations:succeed(operation, "Node", node.message)
  end)
  operation = start(call, "update", call.name)
  return operation
end

local function single_host(call, node, verb)
  if node.accelerator.workers > 1 then
    errors.raise(
      "FAILED_PRECONDITION",
      ("Cloud TPU received a bad request. %s is only supported for single-host nodes, "):format(verb)
        .. ("'%s' has %d workers [EID: 0x%s]"):format(
          node.name,
          node.accelerator.workers,
          call.world.random:hex(16)
        )
    )
  end
end

local function in_state(call, node, verb, state)
  if node.message.state ~= state then
    errors.raise(errors.unsupported_state(verb, node.message.state, call.world.random:hex(16)))
  end
end

handlers["nodes.stop"] = function(call)
  local node = call.world.nodes:get(call.name)
  single_host(call, node, "stop")
  in_state(call, node, "stop", "READY")
  local operation = start(call, "stop", call.name)
  call.world.nodes:stop(node, end_with_node(call, operation, node))
  return operation
end

handlers["nodes.start"] = function(call)
  local node = call.world.nodes:get(call.name)
  in_state(call, node, "start", "STOPPED")
  local operation = start(call, "start", call.name)
  call.world.nodes:start(node, end_with_node(call, operation, node))
  return operation
end

local function matching_items(items, query_path)
  local namespace, key = query_path:match "^/?([^/]*)/?([^/]*)/?$"
  local result = {}
  for _, item in ipairs(items) do
    local in_namespace = namespace == "" or item.namespace == namespace
    if in_namespace and (key == "" or item.key == key) then
      result[#result + 1] = item
    end
  end
  return result
end

-- A request names workers by number; none, or the empty string that gcloud sends, means all of them.
local function wanted_workers(call, node)
  local workers = {}
  for _, text in ipairs(call.body.workerIds or {}) do
    if text ~= "" then
      local worker = math.tointeger(tonumber(text))
      if not worker or worker < 0 or worker >= node.accelerator.workers then
        errors.raise(errors.invalid(("'%s' has no worker '%s'"):format(node.name, text), "worker_ids"))
      end
      workers[#workers + 1] = worker
    end
  end
  if #workers == 0 then
    for worker = 0, node.accelerator.workers - 1 do
      workers[#workers + 1] = worker
    end
  end
  return workers
end

handlers["nodes.getGuestAttributes"] = function(call)
  local node = call.world.nodes:get(call.name)
  in_state(call, node, "getGuestAttributes", "READY")
  local query_path = call.body.queryPath or ""
  local list = {}
  for _, worker in ipairs(wanted_workers(call, node)) do
    local items = matching_items(call.world.machines:guest_attributes(node, worker), query_path)
    list[#list + 1] = { queryPath = query_path, queryValue = { items = items } }
  end
  return { guestAttributes = list }
end

handlers["nodes.performMaintenance"] = function(call)
  local node = call.world.nodes:get(call.name)
  in_state(call, node, "performMaintenance", "READY")
  local operation = start(call, "performMaintenance", call.name)
  maintenance.perform(call.world, node, end_with_node(call, operation, node))
  return operation
end

handlers["nodes.simulateMaintenanceEvent"] = function(call)
  local node = call.world.nodes:get(call.name)
  in_state(call, node, "simulateMaintenanceEvent", "READY")
  local worker = call.body.workerIds and call.body.workerIds[1] and wanted_workers(call, node)[1] or 0
  local operation = start(call, "simulateMaintenanceEvent", call.name)
  maintenance.simulate(call.world, node, worker, end_with_node(call, operation, node))
  return operation
end

handlers["queuedResources.get"] = function(call)
  return queued_resources.message(call.world.queued_resources:get(call.name))
end

handlers["queuedResources.list"] = function(call)
  local items = call.world.queued_resources:list(under(call, "queuedResources"))
  return list_page(call, "queuedResources", items, queued_resources.message)
end

handlers["queuedResources.create"] = function(call)
  local world = call.world
  local request = checks.queued_resource(call, call.body)
  if world.queued_resources:find(request.name) then
    errors.raise(errors.already_exists(request.name))
  end
  for _, id in ipairs(request.node_ids) do
    local name = call.parent .. "/nodes/" .. id
    if world.nodes:find(name) then
      errors.raise(errors.already_exists(name))
    end
  end
  checks.create_rate(call)
  checks.quota(call, request.accelerator, request.count, request.preemptible)
  local operation = start(call, "create", request.name)
  world.queued_resources:insert(request, function(queued_resource)
    world.clock:after(world.delay "create_operation", function()
      world.operations:succeed(operation, "QueuedResource", queued_resources.message(queued_resource))
    end)
  end)
  return operation
end

handlers["queuedResources.delete"] = function(call)
  local world = call.world
  local queued_resource = world.queued_resources:get(call.name)
  local operation
  world.queued_resources:delete(queued_resource, call.query.force or false, function()
    world.operations:succeed(operation)
  end)
  operation = start(call, "delete", call.name)
  return operation
end

handlers["queuedResources.reset"] = function(call)
  local world = call.world
  local queued_resource = world.queued_resources:get(call.name)
  local operation
  world.queued_resources:reset(queued_resource, function(err)
    if err then
      world.operations:fail(operation, err)
    else
      world.operations:succeed(operation, "QueuedResource", queued_resources.message(queued_resource))
    end
  end)
  operation = start(call, "reset", call.name)
  return operation
end

handlers["queuedResources.getMaintenanceInfo"] = function(call)
  local queued_resource = call.world.queued_resources:get(call.name)
  local list = {}
  for slice = 0, queued_resource.count - 1 do
    local node = queued_resource.nodes[slice]
    if node and node.message.upcomingMaintenance then
      list[#list + 1] = {
        nodeName = node.name,
        nodeUid = node.uid,
        upcomingMaintenance = node.message.upcomingMaintenance,
      }
    end
  end
  return { nodeUpcomingMaintenances = list }
end

handlers["queuedResources.performMaintenanceQueuedResource"] = function(call)
  local world = call.world
  local queued_resource = world.queued_resources:get(call.name)
  local chosen = {}
  for _, name in ipairs(call.body.nodeNames or {}) do
    local id = name:match "[^/]+$"
    local found
    for slice = 0, queued_resource.count - 1 do
      local node = queued_resource.nodes[slice]
      if node and node.id == id then
        found = node
      end
    end
    if not found then
      errors.raise(errors.not_found(call.parent .. "/nodes/" .. tostring(id)))
    end
    in_state(call, found, "performMaintenance", "READY")
    chosen[#chosen + 1] = found
  end
  if #chosen == 0 then
    errors.raise(errors.invalid("node_names must name at least one node", "node_names"))
  end
  local operation = start(call, "performMaintenance", call.name)
  local waiting, failure = #chosen, nil
  for _, node in ipairs(chosen) do
    maintenance.perform(world, node, function(err)
      failure = failure or err
      waiting = waiting - 1
      if waiting == 0 and failure then
        world.operations:fail(operation, failure)
      elseif waiting == 0 then
        world.operations:succeed(operation, "QueuedResource", queued_resources.message(queued_resource))
      end
    end)
  end
  return operation
end

handlers["operations.get"] = function(call)
  return call.world.operations:get(call.name)
end

handlers["operations.list"] = function(call)
  return list_page(call, "operations", call.world.operations:list(under(call, "operations")))
end

handlers["operations.cancel"] = function(call)
  call.world.operations:cancel(call.name)
  return {}
end

handlers["operations.delete"] = function(call)
  call.world.operations:delete(call.name)
  return {}
end

return handlers
