--- What TPU clients call of Resource Manager, versions 1 and 3: which project this is, and what one may do in it.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")
local rest_service = require("ciranda.sim.rest_service")

local M = {}

-- A project that one may not see and one that does not exist are refused alike.
local function check(call, name)
  local project = call.world.project
  if name ~= project.id and name ~= project.number then
    errors.raise("PERMISSION_DENIED", "The caller does not have permission")
  end
end

local function message_1(call)
  local project = call.world.project
  return {
    projectId = project.id,
    projectNumber = project.number,
    name = project.id,
    lifecycleState = "ACTIVE",
    createTime = clock.timestamp(project.created),
  }
end

local function message_3(call)
  local project = call.world.project
  return {
    name = "projects/" .. project.number,
    projectId = project.id,
    displayName = project.id,
    state = "ACTIVE",
    createTime = clock.timestamp(project.created),
    updateTime = clock.timestamp(project.created),
  }
end

local function get(message)
  return function(call, name)
    check(call, name)
    return message(call)
  end
end

local function list(message)
  return function(call)
    return { projects = { message(call) } }
  end
end

-- Whoever has a token here may do everything.
local function test_permissions(call, name)
  check(call, name)
  local asked = call.body.permissions
  if type(asked) ~= "table" or #asked == 0 then
    errors.raise(errors.invalid("At least one permission must be specified.", "permissions"))
  end
  return { permissions = json.array(asked) }
end

--- The service.
---@param world table
---@return table service
function M.new(world)
  local id = "cloudresourcemanager.projects."
  return rest_service.new(world, {
    { verb = "GET", path = "^/v1/projects/([^/:]+)$", id = id .. "get", handle = get(message_1) },
    { verb = "GET", path = "^/v3/projects/([^/:]+)$", id = id .. "get", handle = get(message_3) },
    { verb = "GET", path = "^/v1/projects$", id = id .. "list", handle = list(message_1) },
    { verb = "GET", path = "^/v3/projects:search$", id = id .. "search", handle = list(message_3) },
    {
      verb = "POST",
      path = "^/v[13]/projects/([^/:]+):testIamPermissions$",
      id = id .. "testIamPermissions",
      handle = test_permissions,
    },
  })
end

return M
