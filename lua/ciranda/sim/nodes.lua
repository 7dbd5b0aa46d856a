--- TPU nodes and their states.
--
-- A node's message is the API's Node; its `state` moves here and nowhere else. What happens to the machines behind it
-- is asked of `world.machines`, whose functions take a callback: a state that stands for work ends when both the time
-- that the cloud takes and the work itself have passed. Whatever supersedes a node's state also supersedes what was
-- under way (`epoch`), so that a node deleted while it is created never becomes READY.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local named = require("ciranda.sim.named")

local M = {}

---@class ciranda.sim.Endpoint
---@field address string
---@field external string?

---@class ciranda.sim.Node
---@field name string full resource name
---@field id string last part of the name
---@field zone string
---@field uid integer the message's `id`
---@field message table Node
---@field accelerator ciranda.sim.Accelerator
---@field queued_resource ciranda.sim.QueuedResource?
---@field slice integer place in the queued resource, from 0
---@field epoch integer
---@field updating boolean a patch is under way
---@field endpoints ciranda.sim.Endpoint[]

---@class ciranda.sim.Nodes: ciranda.sim.Named
---@field private world table
---@field find fun(self, name: string): ciranda.sim.Node?
---@field get fun(self, name: string): ciranda.sim.Node
---@field list fun(self, matches: fun(name: string): boolean): ciranda.sim.Node[]
local Nodes = setmetatable({}, { __index = named })
Nodes.__index = Nodes

---@param world table clock, random, machines, events, delay
---@return ciranda.sim.Nodes
function M.new(world)
  return setmetatable({ world = world, random = world.random:fork "nodes", by_name = {} }, Nodes)
end

local function set_state(self, node, state)
  node.message.state = state
  self.world.events:add("node", node.name, state)
end

-- Call `finish(err)` when the time and the work have both passed, unless the node has been superseded meanwhile.
local function both(self, node, seconds, work, finish)
  node.epoch = node.epoch + 1
  local epoch, waiting, failure = node.epoch, 2, nil
  local function one_ended(err)
    failure = failure or err
    waiting = waiting - 1
    if waiting == 0 and node.epoch == epoch then
      finish(failure)
    end
  end
  self.world.clock:after(seconds, one_ended)
  work(one_ended)
end

local function set_endpoints(node)
  local networks = node.message.networkConfigs and math.max(1, #node.message.networkConfigs) or 1
  local list = {}
  for _, endpoint in ipairs(node.endpoints) do
    for network = 1, networks do
      local entry = { ipAddress = endpoint.address, port = 8470 }
      if network == 1 and endpoint.external then
        entry.accessConfig = { externalIp = endpoint.external }
      end
      list[#list + 1] = entry
    end
  end
  node.message.networkEndpoints = list
end

local function ready(self, node)
  node.message.health = "HEALTHY"
  node.message.healthDescription = nil
  set_endpoints(node)
  set_state(self, node, "READY")
end

--- Make the record of a node, in state CREATING. Its machines are not made yet.
---@param name string full resource name
---@param zone string
---@param message table Node, checked; the fields that the server sets are overwritten
---@param accelerator ciranda.sim.Accelerator
---@param version string of the API
---@param queued_resource ciranda.sim.QueuedResource?
---@param slice integer?
---@return ciranda.sim.Node
function Nodes:insert(name, zone, message, accelerator, version, queued_resource, slice)
  local node = {
    name = name,
    id = name:match "[^/]+$",
    zone = zone,
    uid = self.random:bits() & 0x7fffffffffffffff,
    message = message,
    accelerator = accelerator,
    queued_resource = queued_resource,
    slice = slice or 0,
    epoch = 0,
    updating = false,
    endpoints = {},
  }
  message.name = name
  message.id = node.uid
  message.createTime = clock.timestamp(self.world.clock:now())
  message.apiVersion = version == "v2" and "V2" or "V2_ALPHA1"
  message.acceleratorType = accelerator.type
  message.acceleratorConfig = { type = accelerator.config_type, topology = accelerator.topology }
  message.queuedResource = queued_resource and queued_resource.name
  message.multisliceNode = queued_resource ~= nil and queued_resource.count > 1
  message.networkConfig = message.networkConfig or not message.networkConfigs and {} or nil
  if message.networkConfig then
    message.networkConfig.network = message.networkConfig.network or "default"
    message.networkConfig.subnetwork = message.networkConfig.subnetwork or "default"
  end
  self.by_name[name] = node
  set_state(self, node, "CREATING")
  return node
end

--- Give a node its addresses. All slices of a queued resource get theirs before any of them boots, since every worker
--- is told where slice 0 is.
---@param node ciranda.sim.Node
--- Raises ciranda.sim.Status when there are none left.
function Nodes:allocate(node)
  node.endpoints = self.world.machines:allocate(node)
end

--- Make the machines of a node. It is READY when they are up and the time has passed.
---@param node ciranda.sim.Node allocated
---@param done fun(err: ciranda.sim.Status?)
function Nodes:provision(node, done)
  both(self, node, self.world.delay "provision", function(made)
    self.world.machines:create(node, made)
  end, function(err)
    if not err then
      ready(self, node)
    end
    done(err)
  end)
end

--- Take a node away: its machines at once, its name when the time has passed.
---@param node ciranda.sim.Node
---@param done fun()
---@param state string? DELETING by default
function Nodes:delete(node, done, state)
  set_state(self, node, state or "DELETING")
  both(self, node, self.world.delay "delete", function(gone)
    self.world.machines:destroy(node, gone)
  end, function()
    if self.by_name[node.name] == node then
      self.by_name[node.name] = nil
    end
    self.world.events:add("node", node.name, "deleted")
    done()
  end)
end

--- Boot all machines of a node anew: processes end, disks stay, start-up scripts run.
---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Nodes:restart(node, done)
  set_state(self, node, "RESTARTING")
  both(self, node, self.world.delay "reset", function(booted)
    self.world.machines:restart(node, booted)
  end, function(err)
    if not err then
      ready(self, node)
    end
    done(err)
  end)
end

--- Replace the machines of a node by new ones: empty disks, new host keys, addresses and boot ids.
---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Nodes:replace(node, done)
  set_state(self, node, "REPAIRING")
  node.message.health = "UNHEALTHY_MAINTENANCE"
  node.message.networkEndpoints = nil
  local machines = self.world.machines
  both(self, node, self.world.delay "repair", function(made)
    local epoch = node.epoch
    machines:destroy(node, function()
      if node.epoch ~= epoch then
        return
      end
      local allocated, err = pcall(self.allocate, self, node)
      if allocated then
        machines:create(node, made)
      else
        made(err)
      end
    end)
  end, function(err)
    if not err then
      ready(self, node)
    end
    done(err)
  end)
end

---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Nodes:stop(node, done)
  set_state(self, node, "STOPPING")
  both(self, node, self.world.delay "stop", function(halted)
    self.world.machines:halt(node, halted)
  end, function(err)
    if not err then
      set_state(self, node, "STOPPED")
    end
    done(err)
  end)
end

---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Nodes:start(node, done)
  set_state(self, node, "STARTING")
  both(self, node, self.world.delay "start", function(booted)
    self.world.machines:restart(node, booted)
  end, function(err)
    if not err then
      ready(self, node)
    end
    done(err)
  end)
end

--- The machines of a node are taken away by the service. The node keeps its name, in the given state.
---@param node ciranda.sim.Node
---@param state string PREEMPTED or TERMINATED
---@param done fun()?
function Nodes:take_away(node, state, done)
  node.epoch = node.epoch + 1
  node.message.health = nil
  node.message.networkEndpoints = nil
  set_state(self, node, state)
  self.world.machines:destroy(node, done or function() end)
end

-- What a patch may change; what it is for a machine that is up.
local PATCHABLE = {
  description = true,
  tags = true,
  labels = true,
  metadata = true,
  dataDisks = true,
  ["networkConfig.enableExternalIps"] = true,
}

local function camel(path)
  return (path:gsub("_(%l)", string.upper))
end

--- Change the fields of a node that a mask names.
---@param node ciranda.sim.Node
---@param mask string comma-separated paths, either spelling
---@param message table Node
---@param done fun()
--- Raises ciranda.sim.Status: ABORTED while another patch is under way, INVALID_ARGUMENT for a mask that is not ours.
function Nodes:patch(node, mask, message, done)
  local paths = {}
  for path in mask:gmatch "[^,%s]+" do
    local name = camel(path)
    if not PATCHABLE[name] then
      errors.raise(
        errors.invalid(("update_mask path '%s' is not supported for nodes"):format(path), "update_mask")
      )
    end
    paths[#paths + 1] = name
  end
  if #paths == 0 then
    errors.raise(errors.invalid("update_mask must name at least one field", "update_mask"))
  end
  if node.updating then
    errors.raise(
      errors.new(
        "ABORTED",
        ("Another update of '%s' is in progress. Please try again later."):format(node.name)
      )
    )
  end
  node.updating = true
  self.world.clock:after(self.world.delay "patch", function()
    node.updating = false
    for _, path in ipairs(paths) do
      if path == "networkConfig.enableExternalIps" then
        node.message.networkConfig = node.message.networkConfig or {}
        node.message.networkConfig.enableExternalIps = (message.networkConfig or {}).enableExternalIps
      else
        node.message[path] = message[path]
      end
    end
    self.world.machines:reconfigure(node)
    if node.message.state == "READY" then
      set_endpoints(node)
    end
    self.world.events:add("node", node.name, "updated " .. table.concat(paths, ", "))
    done()
  end)
end

return M
