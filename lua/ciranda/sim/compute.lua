--- What TPU clients call of Compute Engine: the project's common metadata, where its ssh keys are.

local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.ComputeService
local Service = {}
Service.__index = Service

---@param world table
---@return ciranda.sim.ComputeService
function M.new(world)
  return setmetatable({ world = world, version = 0 }, Service)
end

---@param path string
---@return boolean
function Service:serves(path)
  return path:find("^/compute/v1/") ~= nil
end

local function respond(status, value, headers)
  return {
    status = status,
    headers = headers or { ["Content-Type"] = "application/json; charset=UTF-8" },
    body = json.encode(value) .. "\n",
  }
end

-- Google's older APIs name a refusal by reason, in a list.
local function refuse(status, reason, message)
  return respond(status, {
    error = {
      code = status,
      message = message,
      errors = { { message = message, domain = "global", reason = reason } },
    },
  })
end

local function fingerprint(self)
  return ("sim%09d="):format(self.version)
end

local function project_message(self)
  local project = self.world.project
  local items = json.array({})
  local names = {}
  for name in pairs(project.metadata) do
    names[#names + 1] = name
  end
  table.sort(names)
  for i, name in ipairs(names) do
    items[i] = { key = name, value = project.metadata[name] }
  end
  return {
    kind = "compute#project",
    id = project.number,
    name = project.id,
    defaultServiceAccount = self.world.oauth.default_account,
    commonInstanceMetadata = { kind = "compute#metadata", fingerprint = fingerprint(self), items = items },
  }
end

local function set_metadata(self, body)
  local ok, value = pcall(json.decode, body)
  if not ok or type(value) ~= "table" then
    return refuse(400, "parseError", "Parse Error")
  elseif value.fingerprint and value.fingerprint ~= fingerprint(self) then
    return refuse(412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint.")
  end
  local metadata = {}
  for _, item in ipairs(value.items or {}) do
    if type(item) ~= "table" or type(item.key) ~= "string" or type(item.value or "") ~= "string" then
      return refuse(400, "invalid", "Invalid value for field 'resource.items'.")
    end
    metadata[item.key] = item.value or ""
  end
  self.world.project.metadata = metadata
  self.version = self.version + 1
  for _, node in
    ipairs(self.world.nodes:list(function()
      return true
    end))
  do
    self.world.machines:reconfigure(node)
  end
  self.world.events:add("project", self.world.project.id, "metadata changed")
  return respond(200, {
    kind = "compute#operation",
    id = tostring(self.version),
    name = "operation-" .. self.world.random:hex(13),
    operationType = "compute.projects.setCommonInstanceMetadata",
    status = "DONE",
    progress = 100,
  })
end

local METHODS = {
  ["GET "] = "compute.projects.get",
  ["POST /setCommonInstanceMetadata"] = "compute.projects.setCommonInstanceMetadata",
}

local function dispatch(self, request)
  local name, rest = request.path:match("^/compute/v1/projects/([^/]+)(.*)$")
  request.called = METHODS[("%s %s"):format(request.method, rest)]
  self.world.oauth:check(request)
  if not request.called then
    errors.raise("NOT_FOUND", ("Method not found: %s %s"):format(request.method, request.path))
  elseif name ~= self.world.project.id and name ~= self.world.project.number then
    errors.raise("NOT_FOUND", ("The resource 'projects/%s' was not found"):format(name))
  end
  local fault = self.world.faults:on_call(request.called)
  if request.method == "GET" then
    return respond(200, project_message(self)), fault
  end
  return set_metadata(self, request.body), fault
end

--- Answer a request. Sets `request.called` to the method's id, when there is such a method.
---@param request table
---@return table answer
---@return ciranda.sim.Fault? fault
function Service:handle(request)
  local ok, answer, fault = pcall(dispatch, self, request)
  if ok then
    return answer, fault
  elseif errors.is(answer) then
    return respond(answer.http, errors.legacy_body(answer), errors.headers(answer))
  end
  return error(answer, 0)
end

return M
