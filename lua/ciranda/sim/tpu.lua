--- The simulated TPU API: from an HTTP request to an HTTP answer, in both versions.
--
-- The methods, their parameters and their messages are those of the schema's tables; ciranda.sim.methods has what each
-- does.

local errors = require("ciranda.sim.errors")
local fieldmask = require("ciranda.sim.fieldmask")
local json = require("ciranda.io.json")
local methods = require("ciranda.sim.methods")
local operations = require("ciranda.sim.operations")
local router = require("ciranda.sim.router")
local schema = require("ciranda.sim.schema")

local M = {}

---@class ciranda.sim.Call
---@field world table
---@field version string
---@field schema ciranda.sim.Schema
---@field method string
---@field project string the project's id, whatever the client wrote
---@field location string? zone, or "-" in a list
---@field parent string? "projects/P/locations/Z"
---@field name string? full name of the resource
---@field query table<string, any>
---@field body table? the message of the request

-- Query parameters that every method has.
local SYSTEM = {
  ["$.xgafv"] = true,
  ["$alt"] = true,
  access_token = true,
  alt = true,
  callback = true,
  fields = true,
  key = true,
  oauth_token = true,
  prettyPrint = true,
  quotaUser = true,
  uploadType = true,
  upload_protocol = true,
}

-- What gcloud asks of version 1, in its commands that have no alpha in their names: where there are TPUs, and which.
local VERSION_1 = { "locations.list", "locations.get", "acceleratorTypes.list", "acceleratorTypes.get" }

-- From the message of the schema to the table that is encoded.
local function write(call, message, value)
  if message == "Operation" then
    return operations.message(value, call.schema, function(definition, name, response)
      return definition:write(name, response, call.enum_numbers)
    end)
  elseif message == "ListOperationsResponse" then
    local list = json.array {}
    for i, operation in ipairs(value.operations) do
      list[i] = write(call, "Operation", operation)
    end
    return json.object { operations = #list > 0 and list or nil, nextPageToken = value.nextPageToken }
  end
  return call.schema:write(message, value, call.enum_numbers)
end

-- Where a request's body stands in the messages that refuse its fields: a resource is a field of the request, a
-- message of its own is the whole request.
local function body_path(message)
  if message:find "Request$" then
    return ""
  end
  return schema.snake(message:sub(1, 1):lower() .. message:sub(2))
end

local function read_query(call, definition, query)
  local known = {}
  for name, kind in pairs(definition.query or {}) do
    known[name], known[schema.snake(name)] = { name, kind }, { name, kind }
  end
  call.query = {}
  for name, text in pairs(query) do
    local parameter = known[name]
    if parameter then
      call.query[parameter[1]] = schema.read_query(parameter[2], name, text)
    elseif not SYSTEM[name] then
      local message = ('Invalid JSON payload received. Unknown name "%s": Cannot bind query parameter. '):format(
        name
      ) .. ("Field '%s' could not be found in request message."):format(name)
      errors.raise(errors.invalid(message, name))
    end
  end
  local alt = query["$alt"] or query.alt or "json"
  call.enum_numbers = alt == "json;enum-encoding=int"
  if alt ~= "json" and not call.enum_numbers then
    errors.raise(errors.invalid(("Unsupported Output Format. '%s'"):format(alt), "alt"))
  end
end

local function read_body(call, definition, body)
  if not definition.body then
    return
  end
  local text = body or ""
  if text:find "^%s*$" then
    text = "{}"
  end
  local decoded, value = pcall(json.decode, text)
  if not decoded then
    errors.raise(errors.invalid("Invalid JSON payload received. " .. tostring(value)))
  end
  call.body = call.schema:read(definition.body, value, body_path(definition.body))
end

-- The call's project and zone, checked, and the names that follow from them.
local function read_names(call, variables, definition)
  local world = call.world
  if variables.project ~= world.project.id and variables.project ~= world.project.number then
    errors.raise(errors.permission("tpu." .. call.method, "projects/" .. tostring(variables.project)))
  end
  call.project = world.project.id
  call.location = variables.location
  if not call.location then
    return
  end
  call.parent = ("projects/%s/locations/%s"):format(call.project, call.location)
  local any_zone = call.location == "-" and call.method:find "%.list$" ~= nil
  if not any_zone and not world.catalog:has_zone(call.location) then
    errors.raise(errors.unauthorized_location(call.parent))
  end
  local collection, last = definition.path:match "/([^/]+)/{(%w+)}[^/]*$"
  if collection and last ~= "location" then
    call.name = ("%s/%s/%s"):format(call.parent, collection, variables[last])
  end
end

-- A repeated request answers with the operation of the first one.
local function replayed(call)
  local id = call.query.requestId
  if not id or id == "" then
    return nil
  end
  if not id:match "^%x%x%x%x%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$" then
    errors.raise(errors.invalid(("request_id '%s' is not a UUID"):format(id), "request_id"))
  end
  return call.world.replays:find(call.method .. " " .. id)
end

local Service = {}
Service.__index = Service

---@class ciranda.sim.TpuService
---@field private world table
---@field private routers table<string, ciranda.sim.Router>

---@param world table see ciranda.sim.world
---@return ciranda.sim.TpuService
function M.new(world)
  local routers = {}
  for _, version in ipairs { "v2", "v2alpha1" } do
    routers[version] = router.new(schema.load(version).methods)
  end
  local first = {}
  for _, name in ipairs(VERSION_1) do
    first[name] = schema.load("v2").methods[name]
  end
  routers.v1 = router.new(first)
  return setmetatable({ world = world, routers = routers }, Service)
end

local function answer(status, value, compact, headers)
  return {
    status = status,
    headers = headers or { ["Content-Type"] = "application/json; charset=UTF-8" },
    body = json.encode(value, { indent = not compact }) .. "\n",
  }
end

--- The answer to a refusal.
---@param err ciranda.sim.Status
---@return table response
function M.refusal(err)
  return answer(err.http, errors.http_body(err), false, errors.headers(err))
end

--- Whether a path belongs to this service.
---@param path string
---@return boolean
function Service:serves(path)
  local version, rest = path:match "^/(v%w+)/projects(.*)$"
  if version == "v1" then -- other services are at /v1/projects, too
    return rest:find "^/[^/]+/locations" ~= nil
  end
  return self.routers[version or ""] ~= nil
end

local function dispatch(self, request, version, route)
  local world = self.world
  if not route then
    errors.raise("NOT_FOUND", ("Method not found: %s %s"):format(request.method, request.path))
  end
  local call = {
    world = world,
    version = version,
    schema = schema.load(version == "v1" and "v2" or version),
    method = route.method,
  }
  world.oauth:check(request)
  local fault = world.faults:on_call(route.method)
  read_query(call, route.definition, request.query)
  read_names(call, route.variables, route.definition)
  read_body(call, route.definition, request.body)
  local value = replayed(call)
  if not value then
    value = methods[route.method](call)
    if call.operation and call.query.requestId and call.query.requestId ~= "" then
      world.replays:keep(route.method .. " " .. call.query.requestId, value)
    end
  end
  local result = write(call, route.definition.response, value)
  if request.query.fields then
    result = fieldmask.apply(fieldmask.parse(request.query.fields), result)
  end
  return answer(200, result, request.query.prettyPrint == "false"), fault
end

--- Answer a request. Sets `request.called` to the method's id, when there is such a method.
---@param request table `method`, `path` (not decoded), `query` (decoded), `headers` (lower-case names), `body`
---@return table response `status`, `headers`, `body`
---@return ciranda.sim.Fault? fault what is to go wrong with the answer itself
function Service:handle(request)
  local version, path = request.path:match("^/(%w+)(/.*)$")
  local route = self.routers[version]:match(request.method, path)
  request.called = route and route.method
  local ok, response, fault = pcall(dispatch, self, request, version, route)
  if ok then
    return response, fault
  elseif errors.is(response) then
    return M.refusal(response)
  end
  return error(response, 0)
end

return M
