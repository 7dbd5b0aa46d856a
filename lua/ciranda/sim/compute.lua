--- What TPU clients call of Compute Engine: the project's common metadata, where its ssh keys are.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")
local rest_service = require("ciranda.sim.rest_service")

local M = {}

local function fingerprint(state)
  return ("sim%09d="):format(state.version)
end

local function check(call, name)
  local project = call.world.project
  if name ~= project.id and name ~= project.number then
    errors.raise("NOT_FOUND", ("The resource 'projects/%s' was not found"):format(name))
  end
end

local function get_project(state)
  return function(call, name)
    check(call, name)
    local project = call.world.project
    local items, names = json.array({}), {}
    for key in pairs(project.metadata) do
      names[#names + 1] = key
    end
    table.sort(names)
    for i, key in ipairs(names) do
      items[i] = { key = key, value = project.metadata[key] }
    end
    return {
      kind = "compute#project",
      id = project.number,
      name = project.id,
      creationTimestamp = clock.timestamp(project.created),
      defaultServiceAccount = call.world.oauth.default_account,
      commonInstanceMetadata = {
        kind = "compute#metadata",
        fingerprint = fingerprint(state),
        items = #items > 0 and items or nil,
      },
    }
  end
end

local function read_items(body)
  local metadata = {}
  for _, item in ipairs(type(body.items) == "table" and body.items or {}) do
    if type(item) ~= "table" or type(item.key) ~= "string" or type(item.value or "") ~= "string" then
      errors.raise(errors.invalid("Invalid value for field 'resource.items'."))
    end
    metadata[item.key] = item.value or ""
  end
  return metadata
end

local function set_metadata(state)
  return function(call, name)
    check(call, name)
    local world = call.world
    if call.body.fingerprint and call.body.fingerprint ~= fingerprint(state) then
      local err =
        errors.new("FAILED_PRECONDITION", "Supplied fingerprint does not match current metadata fingerprint.")
      err.http, err.reason = 412, "conditionNotMet"
      errors.raise(err)
    end
    world.project.metadata = read_items(call.body)
    state.version = state.version + 1
    for _, node in
      ipairs(world.nodes:list(function()
        return true
      end))
    do
      world.machines:reconfigure(node)
    end
    world.events:add("project", world.project.id, "metadata changed")
    local operation = {
      kind = "compute#operation",
      id = tostring(state.version),
      name = "operation-" .. world.random:hex(13),
      operationType = "compute.projects.setCommonInstanceMetadata",
      insertTime = clock.timestamp(world.clock:now()),
      endTime = clock.timestamp(world.clock:now()),
      status = "DONE",
      progress = 100,
    }
    state.operations[operation.name] = operation
    return operation
  end
end

-- Every operation has ended before its answer is read.
local function get_operation(state)
  return function(call, name, id)
    check(call, name)
    return state.operations[id]
      or errors.raise(
        "NOT_FOUND",
        ("The resource 'projects/%s/global/operations/%s' was not found"):format(name, id)
      )
  end
end

--- The service.
---@param world table
---@return table service
function M.new(world)
  local state = { version = 0, operations = {} }
  local project = "^/compute/v1/projects/([^/]+)"
  local operation = project .. "/global/operations/([^/]+)"
  return rest_service.new(world, {
    { verb = "GET", path = project .. "$", id = "compute.projects.get", handle = get_project(state) },
    {
      verb = "POST",
      path = project .. "/setCommonInstanceMetadata$",
      id = "compute.projects.setCommonInstanceMetadata",
      handle = set_metadata(state),
    },
    {
      verb = "GET",
      path = operation .. "$",
      id = "compute.globalOperations.get",
      handle = get_operation(state),
    },
    {
      verb = "POST",
      path = operation .. "/wait$",
      id = "compute.globalOperations.wait",
      handle = get_operation(state),
    },
  }, { prefix = "^/compute/v1/", refusal = errors.legacy_body })
end

return M
