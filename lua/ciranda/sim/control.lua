--- The simulator's own interface, under /sim/v1: what happened, what is there, and what is to go wrong.
--
-- It is no part of any cloud and asks for no credentials; like everything else of a simulator it is only reachable on
-- loopback addresses.

local accidents = require("ciranda.sim.accidents")
local credential_files = require("ciranda.sim.credential_files")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.Control
local Control = {}
Control.__index = Control

---@param world table
---@param requests ciranda.sim.RequestLog
---@return ciranda.sim.Control
function M.new(world, requests)
  return setmetatable({ world = world, requests = requests }, Control)
end

---@param path string
---@return boolean
function Control:serves(path)
  return path:find("^/sim/v1/") ~= nil
end

local function node_summary(world, node)
  local workers = json.array({})
  for worker = 0, node.accelerator.workers - 1 do
    local machine = world.machines:find(node, worker)
    workers[worker + 1] = {
      index = worker,
      address = machine and machine.address or nil,
      external = machine and machine.external or nil,
      hostname = machine and machine.hostname or nil,
      running = machine ~= nil and machine.running,
      diskFull = machine and machine.disk_full or nil,
      directory = machine and machine.directory or nil,
    }
  end
  return {
    name = node.name,
    id = node.id,
    zone = node.zone,
    slice = node.slice,
    state = node.message.state,
    health = node.message.health,
    acceleratorType = node.accelerator.type,
    queuedResource = node.queued_resource and node.queued_resource.id or nil,
    workers = workers,
  }
end

local function everything()
  return true
end

--- What is there now.
---@return table
function Control:status()
  local world = self.world
  local nodes, queued = json.array({}), json.array({})
  for i, node in ipairs(world.nodes:list(everything)) do
    nodes[i] = node_summary(world, node)
  end
  for i, queued_resource in ipairs(world.queued_resources:list(everything)) do
    queued[i] = {
      name = queued_resource.name,
      id = queued_resource.id,
      zone = queued_resource.zone,
      state = queued_resource.state,
      initiator = queued_resource.initiator,
      acceleratorType = queued_resource.accelerator.type,
      slices = queued_resource.count,
      error = queued_resource.failure and queued_resource.failure.message or nil,
    }
  end
  return {
    project = world.project.id,
    time = require("ciranda.sim.clock").timestamp(world.clock:now()),
    nodes = nodes,
    queuedResources = queued,
    quota = world.quota:report(),
    capacity = world.capacity:report(),
    faults = json.array(world.faults:pending()),
  }
end

local function find_node(self, id)
  return accidents.find_node(self.world, id) or errors.raise(errors.not_found("nodes/" .. id))
end

local function whole(value, field, least)
  local number = math.tointeger(tonumber(value))
  if not number or number < (least or 0) then
    errors.raise(errors.invalid(("%s must be a whole number from %d"):format(field, least or 0), field))
  end
  return number
end

local function find_worker(self, node, text)
  local machine = self.world.machines:find(node, whole(text, "worker"))
  return machine or errors.raise(errors.not_found(("%s worker %s"):format(node.name, text)))
end

-- Set the limits of a pool from { place = number or null }. A place that is a prefix alone means every zone.
local function set_limits(self, pool, body, places_of)
  for place, value in pairs(body) do
    local limit = value ~= json.null and whole(value, place) or nil
    for _, each in ipairs(places_of(place)) do
      pool:set_limit(each, limit)
    end
  end
  self.world.queued_resources:allocate()
  return pool:report()
end

local function check_action(actions, name, of)
  if actions[name] then
    return
  end
  local names = {}
  for known in pairs(actions) do
    names[#names + 1] = known
  end
  table.sort(names)
  local text = ("there is no action '%s' on a %s; there are %s"):format(name, of, table.concat(names, ", "))
  errors.raise(errors.invalid(text, "action"))
end

local routes = {}

function routes.GET(self, path, _, request)
  local query = request.query
  if path == "status" then
    return self:status()
  elseif path == "requests" then
    return { requests = self.requests:since(tonumber(query.since)) }
  elseif path == "events" then
    return { events = json.array(self.world.events:since(tonumber(query.since))) }
  elseif path == "faults" then
    return { faults = json.array(self.world.faults:pending()) }
  end
  return nil
end

function routes.DELETE(self, path)
  if path == "faults" then
    self.world.faults:clear()
    return {}
  end
  return nil
end

function routes.PUT(self, path, body)
  local zones = self.world.catalog.zones
  local function places_of(place)
    if place:find("/", 1, true) then
      return { place }
    end
    local list = {}
    for i, zone in ipairs(zones) do
      list[i] = zone .. "/" .. place
    end
    return list
  end
  if path == "capacity" then
    return set_limits(self, self.world.capacity, body, places_of)
  elseif path == "quota" then
    return set_limits(self, self.world.quota, body, places_of)
  elseif path == "delays" then
    for name, seconds in pairs(body) do
      self.world.set_delay(name, seconds ~= json.null and whole(seconds, name) or nil)
    end
    return {}
  end
  return nil
end

function routes.POST(self, path, body, request)
  if path == "faults" then
    return self.world.faults:add(body)
  elseif path == "credentials" then
    return credential_files.make({
      oauth = self.world.oauth,
      project = self.world.project,
      url = "http://" .. (request.headers["Host"] or "localhost"),
      email = body.email,
    }, body.type)
  elseif path == "clock" then
    local seconds = tonumber(body.advance)
    if not seconds or seconds < 0 then
      errors.raise(errors.invalid("advance must be a number of seconds from 0", "advance"))
    end
    self.world.events:add("clock", "clock", ("advanced by %g s"):format(seconds))
    self.world.clock:advance(seconds)
    return {}
  end
  local id, worker, action
  id, action = path:match("^nodes/([^/:]+):(%a+)$")
  if not id then
    id, worker, action = path:match("^nodes/([^/:]+)/workers/(%d+):(%a+)$")
  end
  if id then
    check_action(worker and accidents.workers or accidents.nodes, action, worker and "worker" or "node")
    local node = find_node(self, id)
    accidents.strike(self.world, action, node, worker and find_worker(self, node, worker), body)
    return {}
  end
  return nil
end

--- Answer a request.
---@async
---@param request table
---@return table answer
--- Raises ciranda.sim.Status.
function Control:handle(request)
  local path = request.path:match("^/sim/v1/(.*)$")
  local body = {}
  if request.body and request.body:find("%S") then
    local ok, value = pcall(json.decode, request.body)
    if not ok or type(value) ~= "table" then
      errors.raise(errors.invalid("the body must be a JSON object"))
    end
    body = value
  end
  local route = routes[request.method]
  local result = route and route(self, path, body, request)
  if not result then
    errors.raise("NOT_FOUND", ("there is no %s %s"):format(request.method, request.path))
  end
  return {
    status = 200,
    headers = { ["Content-Type"] = "application/json; charset=UTF-8" },
    body = json.encode(result) .. "\n",
  }
end

return M
