--- The machines behind the nodes: what `world.machines` is in a simulator.
--
-- The state machines call these functions from timers, where nothing may wait; so each node has a task that does one
-- thing after another and calls back when it is done. What is asked of a node while something is under way waits its
-- turn: a node that is deleted while it boots is first booted, then destroyed.

local errors = require("ciranda.io.error")
local machine = require("ciranda.sim.machine")
local metadata = require("ciranda.sim.metadata")
local processes = require("ciranda.sim.processes")
local refusals = require("ciranda.sim.errors")
local server = require("ciranda.io.server")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

-- How many workers are made, booted or destroyed at once, for each processor of this machine.
local PER_PROCESSOR = 4

-- Seconds between two looks at who still holds a device.
local HOLDER_POLL = 0.2

-- Seconds until a host goes down once nobody holds its devices: not in the same instant, so that whoever watched over
-- those processes can still write down how they ended.
local GOING_DOWN = 2

---@class ciranda.sim.Machines
---@field private settings table
---@field private hosts table<ciranda.sim.Node, table>
local Machines = {}
Machines.__index = Machines

---@class ciranda.sim.MachinesSettings
---@field scope ciranda.Scope where the nodes' tasks live
---@field addresses ciranda.sim.Addresses
---@field isolation ciranda.sim.Isolation
---@field directory string for the machines' directories
---@field shared string a directory that every worker sees
---@field ssh_ports integer[]
---@field metadata_port integer
---@field report fun(format: string, ...) for what nobody else will hear of

--- Machines for a world. `attach` must be called before the first node is made.
---@param settings ciranda.sim.MachinesSettings
---@return ciranda.sim.Machines
function M.new(settings)
  local processors = math.max(1, #(uv.cpu_info() or {}))
  return setmetatable({
    settings = settings,
    hosts = {},
    last_ordinal = 0,
    slots = task.semaphore(PER_PROCESSOR * processors),
  }, Machines)
end

--- Tell the machines whose they are.
---@param world table
function Machines:attach(world)
  self.world = world
end

local function wants_external(node)
  local network = node.message.networkConfig or (node.message.networkConfigs or {})[1] or {}
  return network.enableExternalIps == true
end

--- Addresses for the workers of a node.
---@param node ciranda.sim.Node
---@return ciranda.sim.Endpoint[]
--- Raises ciranda.sim.Status when there are none left.
function Machines:allocate(node)
  local addresses = self.settings.addresses
  local list = {}
  for worker = 1, node.accelerator.workers do
    local ok, address = pcall(addresses.take, addresses)
    if not ok then
      for _, endpoint in ipairs(list) do
        addresses:give_back(endpoint.address)
      end
      refusals.raise(refusals.stockout(node.zone, self.world.random:hex(16)))
    end
    list[worker] = {
      address = address,
      external = wants_external(node) and addresses:external(address) or nil,
    }
  end
  return list
end

-- A worker's metadata server answers on the worker's own address, which is how it knows who asks.
local function serve_metadata(self, host)
  local function handler(request)
    local who = host.by_address[request.local_address]
    if not who then
      return { status = 404, body = "" }
    end
    return metadata.answer(function()
      return metadata.worker(self.world, who)
    end, request)
  end
  for _, who in ipairs(host.machines) do
    host.by_address[who.address] = who
    if not host.server then
      host.server = server.listen({
        address = who.address,
        port = self.settings.metadata_port,
        handler = handler,
        deadline = metadata.LONGEST_WAIT + 10,
        name = "metadata of " .. host.node.id,
      })
    else
      host.server:listen(who.address, self.settings.metadata_port)
    end
    if self.settings.metadata_on_80 then
      host.server:listen(who.address, 80)
    end
  end
end

-- Do something with every machine of a node; as many at once, over all nodes, as there are slots.
local function with_each(self, host, fn)
  task.map(host.machines, function(who)
    self.slots:with(fn, who)
  end)
end

local actions = {}

function actions.create(self, host)
  local node = host.node
  host.machines, host.by_address = {}, {}
  for worker = 0, node.accelerator.workers - 1 do
    self.last_ordinal = self.last_ordinal + 1
    host.machines[worker + 1] = machine.new({
      world = self.world,
      isolation = self.settings.isolation,
      directory = ("%s/%s-w-%d.%d"):format(self.settings.directory, node.id, worker, self.last_ordinal),
      shared = self.settings.shared,
      ssh_ports = self.settings.ssh_ports,
      metadata_port = self.settings.metadata_port,
      ordinal = self.last_ordinal,
    }, node, worker)
  end
  serve_metadata(self, host)
  with_each(self, host, function(who)
    who:create()
    who:boot(host.scope)
  end)
end

function actions.restart(self, host)
  with_each(self, host, function(who)
    who:halt()
    who:boot(host.scope)
  end)
end

function actions.halt(self, host)
  with_each(self, host, function(who)
    who:halt()
  end)
end

function actions.reconfigure(_, host)
  for _, who in ipairs(host.machines) do
    who:reconfigure()
  end
end

function actions.destroy(self, host)
  if host.server then
    host.server:close()
    host.server = nil
  end
  with_each(self, host, function(who)
    who:destroy()
  end)
  for _, who in ipairs(host.machines) do
    self.settings.addresses:give_back(who.address)
  end
  host.machines, host.by_address = {}, {}
end

function actions.change_host_key(_, host, worker)
  host.machines[worker + 1]:change_host_key()
end

-- SIGTERM to whoever holds the devices, then wait until nobody does.
function actions.quiesce(self, host, grace)
  local told = {}
  local deadline = self.world.clock:now() + grace
  while true do
    local holding = 0
    for _, who in ipairs(host.machines) do
      for _, found in ipairs(who:holders()) do
        holding = holding + 1
        local key = ("%d %s"):format(found.pid, found.start)
        if not told[key] then
          told[key] = true
          processes.signal(found, "sigterm")
        end
      end
    end
    if holding == 0 and next(told) then
      task.sleep(GOING_DOWN)
    end
    if holding == 0 or self.world.clock:now() >= deadline then
      return
    end
    task.sleep(HOLDER_POLL)
  end
end

-- What a client is told of a failure of the simulator's own; the whole of it goes to the terminal and the events.
local function refusal_of(self, host, err)
  if refusals.is(err) then
    return err
  end
  local text = errors.text(err)
  self.settings.report("%s: %s", host.node.name, text)
  self.world.events:add("machine", host.node.name, text)
  return refusals.internal()
end

-- The task of a node: what it is asked, one after another, until it is destroyed.
local function live(self, host)
  local scope <close> = task.scope()
  host.scope = scope
  while true do
    while #host.requests == 0 do
      host.wake = task.event()
      host.wake:wait()
    end
    local request = table.remove(host.requests, 1)
    local ok, err = pcall(actions[request.action], self, host, request.argument)
    if not ok and errors.is(err, "cancelled") then
      error(err, 0)
    end
    local refusal = not ok and refusal_of(self, host, err) or nil
    if request.action == "destroy" then
      if self.hosts[host.node] == host and #host.requests == 0 then
        self.hosts[host.node] = nil
        scope:cancel("the node is gone")
        request.done(refusal)
        return
      end
    end
    request.done(refusal)
  end
end

-- However the node's task ends, its machines go with it.
local function run(self, host)
  local _ <close> = setmetatable({}, {
    __close = function()
      task.shield(function()
        task.map(host.machines, function(who)
          pcall(who.halt, who)
        end)
      end)
    end,
  })
  live(self, host)
end

local function request(self, node, action, argument, done)
  local host = self.hosts[node]
  if not host then
    host = { node = node, requests = {}, machines = {}, by_address = {} }
    self.hosts[node] = host
    self.settings.scope:spawn("node " .. node.id, run, self, host)
  end
  table.insert(host.requests, { action = action, argument = argument, done = done or function() end })
  if host.wake then
    host.wake:set()
  end
end

---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Machines:create(node, done)
  request(self, node, "create", nil, done)
end

---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Machines:restart(node, done)
  request(self, node, "restart", nil, done)
end

---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Machines:halt(node, done)
  request(self, node, "halt", nil, done)
end

--- Take the machines of a node away. One that has none is destroyed already.
---@param node ciranda.sim.Node
---@param done fun(err: ciranda.sim.Status?)
function Machines:destroy(node, done)
  if not self.hosts[node] then
    self.world.clock:after(0, done)
    return
  end
  request(self, node, "destroy", nil, done)
end

--- Send SIGTERM to the processes that hold the TPU devices, and wait until they have ended.
---@param node ciranda.sim.Node
---@param grace number seconds to wait at most
---@param done fun()
function Machines:quiesce(node, grace, done)
  request(self, node, "quiesce", grace, done)
end

--- Give a worker another host key without telling anybody.
---@param node ciranda.sim.Node
---@param worker integer
---@param done fun(err: ciranda.sim.Status?)
function Machines:change_host_key(node, worker, done)
  request(self, node, "change_host_key", worker, done)
end

--- The node's metadata or network has changed.
---@param node ciranda.sim.Node
function Machines:reconfigure(node)
  for _, endpoint in ipairs(node.endpoints) do
    endpoint.external = wants_external(node) and self.settings.addresses:external(endpoint.address) or nil
  end
  if self.hosts[node] then
    request(self, node, "reconfigure")
  end
end

--- What the metadata server of a worker says of maintenance.
---@param node ciranda.sim.Node
---@param worker integer? nil for all
---@param event string "NONE" or an event of Compute Engine
function Machines:announce(node, worker, event)
  for _, who in ipairs(self.hosts[node] and self.hosts[node].machines or {}) do
    if worker == nil or who.worker == worker then
      who.maintenance_event = event
    end
  end
end

---@param node ciranda.sim.Node
---@param worker integer
---@return { namespace: string, key: string, value: string }[]
function Machines:guest_attributes(node, worker)
  local who = self:find(node, worker)
  return who and who:guest_attributes() or {}
end

---@param node ciranda.sim.Node
---@param worker integer
---@return ciranda.sim.Machine?
function Machines:find(node, worker)
  local host = self.hosts[node]
  return host and host.machines[worker + 1]
end

return M
