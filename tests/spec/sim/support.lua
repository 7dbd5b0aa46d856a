-- A simulated project without machines, on a clock that stands still, and a client that calls it directly.
local clock = require("ciranda.sim.clock")
local json = require("ciranda.io.json")
local tpu = require("ciranda.sim.tpu")
local world = require("ciranda.sim.world")

local M = {}

local Machines = {}
Machines.__index = Machines

local function note(self, what, node)
  self.log[#self.log + 1] = what .. " " .. node.id
end

function Machines:allocate(node)
  local list = {}
  for worker = 0, node.accelerator.workers - 1 do
    self.addresses = self.addresses + 1
    local external = (node.message.networkConfig or {}).enableExternalIps and "198.51.100." .. self.addresses
      or nil
    list[worker + 1] = { address = "192.0.2." .. self.addresses, external = external }
  end
  return list
end

-- Work ends at once, unless `hold` says that it is to wait until the spec calls what is in `held`.
local function finish(self, what, node, done)
  note(self, what, node)
  if self.hold[what] then
    table.insert(self.held, done)
  else
    done(self.failures[what .. " " .. node.id])
  end
end

for _, what in ipairs { "create", "destroy", "restart", "halt" } do
  Machines[what] = function(self, node, done)
    finish(self, what, node, done)
  end
end

function Machines:quiesce(node, _, done)
  note(self, "quiesce", node)
  done()
end

function Machines:reconfigure(node)
  note(self, "reconfigure", node)
end

function Machines:announce(node, worker, event)
  self.announced[("%s/%s"):format(node.id, worker or "*")] = event
end

function Machines:guest_attributes(node, worker)
  return {
    { namespace = "hostkeys", key = "ssh-ed25519", value = ("key of %s/%d"):format(node.id, worker) },
    { namespace = "guestInventory", key = "Hostname", value = "host" },
  }
end

function Machines:find(node, worker)
  local log = self.log
  return {
    worker = worker,
    running = true,
    address = node.endpoints[worker + 1] and node.endpoints[worker + 1].address,
    halt = function()
      log[#log + 1] = ("halt %s/%d"):format(node.id, worker)
    end,
  }
end

function M.machines()
  return setmetatable(
    { log = {}, addresses = 0, hold = {}, held = {}, failures = {}, announced = {} },
    Machines
  )
end

---@param options table? of the world
---@return table project world, machines, clock, call
function M.project(options)
  local settings = { project = "p", project_number = "42", seed = 7 }
  for key, value in pairs(options or {}) do
    settings[key] = value
  end
  local project = { clock = clock.manual(), machines = M.machines() }
  settings.clock, settings.machines = project.clock, project.machines
  settings.oauth = settings.oauth or { check = function() end }
  project.world = world.new(settings)
  project.service = tpu.new(project.world)

  --- Call the API: `call("GET", "/v2/projects/p/...?query", body)` -> status, decoded body, headers.
  function project.call(verb, target, body)
    local path, query_text = target:match "^([^?]*)%??(.*)$"
    local query = {}
    for name, value in query_text:gmatch "([^&=]+)=([^&]*)" do
      query[name] = value
    end
    local answer, fault = project.service:handle {
      method = verb,
      path = path,
      query = query,
      headers = {},
      body = type(body) == "table" and json.encode(body) or body or "",
    }
    return answer.status, json.decode(answer.body), answer.headers, fault
  end

  --- Let time pass until nothing is scheduled within a day.
  function project.settle()
    project.clock:advance(86400)
  end

  return project
end

M.ZONE = "projects/p/locations/us-west4-a"

--- The body of a queued resource of v2, with `count` slices when it is more than one.
function M.queued_resource(count, node, fields)
  local spec = {
    parent = M.ZONE,
    node = { acceleratorType = "v5litepod-16", runtimeVersion = "v2-alpha-tpuv5-lite" },
  }
  for key, value in pairs(node or {}) do
    spec.node[key] = value
  end
  if count > 1 then
    spec.multisliceParams = { nodeCount = count, nodeIdPrefix = "job" }
  else
    spec.nodeId = "job"
  end
  local body = { tpu = { nodeSpec = { spec } } }
  for key, value in pairs(fields or {}) do
    body[key] = value
  end
  return body
end

return M
