--- Queued resources: the queue, the states, and what each state does to the nodes.
--
--   CREATING -> WAITING_FOR_RESOURCES -> PROVISIONING -> ACTIVE
--                       |                    |              |
--                       v                    v              v
--                     FAILED  <---------  SUSPENDING --> SUSPENDED
--
-- All slices are provisioned or none. Capacity is held from PROVISIONING until the machines are gone; quota from
-- PROVISIONING until the queued resource is deleted, dead or not. A request for which there is no capacity waits, one
-- for which there is no quota fails. SUSPENDED and FAILED are ends: only a delete leads out of them.

local catalog = require("ciranda.sim.catalog")
local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local named = require("ciranda.sim.named")

local M = {}

---@class ciranda.sim.QueuedResource
---@field name string full resource name
---@field id string
---@field zone string
---@field parent string "projects/P/locations/Z"
---@field message table what the client asked for: tier, policy, reservation
---@field template table the Node that every slice is made from
---@field node_ids string[]
---@field count integer
---@field accelerator ciranda.sim.Accelerator
---@field preemptible boolean
---@field reserved boolean
---@field version string
---@field state string
---@field initiator string? USER or SERVICE
---@field failure ciranda.sim.Status?
---@field nodes ciranda.sim.Node[] the slices that exist, by place (may have gaps)
---@field epoch integer

---@class ciranda.sim.QueuedResources: ciranda.sim.Named
---@field private world table
---@field find fun(self, name: string): ciranda.sim.QueuedResource?
---@field get fun(self, name: string): ciranda.sim.QueuedResource
---@field list fun(self, matches: fun(name: string): boolean): ciranda.sim.QueuedResource[]
local QueuedResources = setmetatable({}, { __index = named })
QueuedResources.__index = QueuedResources

---@param world table clock, random, nodes, events, quota, capacity, faults, delay
---@return ciranda.sim.QueuedResources
function M.new(world)
  return setmetatable({ world = world, by_name = {}, queue = {}, repairs = {} }, QueuedResources)
end

local function set_state(self, queued_resource, state, initiator)
  queued_resource.state = state
  queued_resource.initiator = initiator
  self.world.events:add("queuedResource", queued_resource.name, state)
end

-- Run `fn` after a delay of the cloud, unless the queued resource has moved on.
local function later(self, queued_resource, delay, fn)
  queued_resource.epoch = queued_resource.epoch + 1
  local epoch = queued_resource.epoch
  self.world.clock:after(delay, function()
    if queued_resource.epoch == epoch then
      fn()
    end
  end)
end

local function remaining(queued_resource)
  local list = {}
  for slice = 0, queued_resource.count - 1 do
    list[#list + 1] = queued_resource.nodes[slice]
  end
  return list
end

local function delete_slice(self, node, done)
  self.repairs[node] = nil
  self.world.capacity:release(node)
  self.world.nodes:delete(node, function()
    local nodes = node.queued_resource.nodes
    if nodes[node.slice] == node then
      nodes[node.slice] = nil
    end
    done()
  end)
end

-- Take all nodes away, then call `finish`.
local function clear(self, queued_resource, finish)
  local nodes = remaining(queued_resource)
  local waiting = #nodes
  if waiting == 0 then
    return later(self, queued_resource, self.world.delay "forget", finish)
  end
  queued_resource.epoch = queued_resource.epoch + 1
  local epoch = queued_resource.epoch
  for _, node in ipairs(nodes) do
    delete_slice(self, node, function()
      waiting = waiting - 1
      if waiting == 0 and queued_resource.epoch == epoch then
        finish()
      end
    end)
  end
end

local function release_capacity(self, queued_resource)
  self.world.capacity:release(queued_resource)
  self.world.clock:after(0, function()
    self:allocate()
  end)
end

local function fail(self, queued_resource, err)
  queued_resource.failure = err
  set_state(self, queued_resource, "FAILED")
  release_capacity(self, queued_resource)
end

-- FAILED by way of SUSPENDING, since nodes have to go first.
local function fail_slowly(self, queued_resource, err)
  set_state(self, queued_resource, "SUSPENDING", "SERVICE")
  clear(self, queued_resource, function()
    fail(self, queued_resource, err)
  end)
end

local function capacity_place(queued_resource)
  local place = queued_resource.zone .. "/" .. queued_resource.accelerator.prefix
  return queued_resource.reserved and place .. "/reserved" or place
end

-- A slice could not be had: everything goes back, or, where that is what is being simulated, the others stay.
local function slice_failed(self, queued_resource, node, err, keep)
  if keep then
    delete_slice(self, node, function() end)
    queued_resource.epoch = queued_resource.epoch + 1
    return fail(self, queued_resource, err)
  end
  fail_slowly(self, queued_resource, err)
end

local function provision(self, queued_resource)
  local world = self.world
  set_state(self, queued_resource, "PROVISIONING")
  queued_resource.epoch = queued_resource.epoch + 1
  local epoch = queued_resource.epoch
  for slice, id in ipairs(queued_resource.node_ids) do
    local name = queued_resource.parent .. "/nodes/" .. id
    if world.nodes:find(name) then
      return fail_slowly(self, queued_resource, errors.already_exists(name))
    end
    queued_resource.nodes[slice - 1] = world.nodes:insert(
      name,
      queued_resource.zone,
      world.copy(queued_resource.template),
      queued_resource.accelerator,
      queued_resource.version,
      queued_resource,
      slice - 1
    )
  end
  local fault = world.faults:provisioning(queued_resource)
  if fault and not fault.slice then
    return later(self, queued_resource, world.delay "provision" / 2, function()
      fail_slowly(self, queued_resource, fault.error)
    end)
  end
  local nodes = remaining(queued_resource)
  for _, node in ipairs(nodes) do
    local allocated, err = pcall(world.nodes.allocate, world.nodes, node)
    if not allocated then
      return fail_slowly(self, queued_resource, err)
    end
  end
  local waiting = #nodes
  for _, node in ipairs(nodes) do
    world.nodes:provision(node, function(err)
      if queued_resource.epoch ~= epoch then
        return
      end
      waiting = waiting - 1
      if fault and fault.slice == node.slice then
        slice_failed(self, queued_resource, node, fault.error, true)
      elseif err then
        slice_failed(self, queued_resource, node, err, false)
      elseif waiting == 0 then
        set_state(self, queued_resource, "ACTIVE")
        local run = queued_resource.message.runDuration
        if run and run.maxRunDuration then
          later(self, queued_resource, clock.parse_duration(run.maxRunDuration), function()
            self:suspend(queued_resource, "SERVICE")
          end)
        end
      end
    end)
  end
end

-- Begin what can begin: the request at the head, and any behind it that fits into what is left.
function QueuedResources:allocate()
  local world = self.world
  local still = {}
  for _, queued_resource in ipairs(self.queue) do
    if
      self.by_name[queued_resource.name] == queued_resource
      and queued_resource.state == "WAITING_FOR_RESOURCES"
    then
      local units = queued_resource.accelerator.size * queued_resource.count
      local quota = catalog.quota_id(queued_resource.accelerator, queued_resource.preemptible)
      local place = queued_resource.zone .. "/" .. quota
      if not world.quota:take(queued_resource, place, units) then
        fail(
          self,
          queued_resource,
          errors.quota_exhausted(quota, world.quota:limit(place), queued_resource.zone)
        )
      elseif not world.capacity:take(queued_resource, capacity_place(queued_resource), units) then
        world.quota:release(queued_resource)
        if queued_resource.reserved then
          fail(self, queued_resource, errors.reservation_stockout(world.random:hex(15)))
        else
          still[#still + 1] = queued_resource
        end
      else
        provision(self, queued_resource)
      end
    end
  end
  self.queue = still
  for node in pairs(self.repairs) do
    self:repair(node)
  end
end

local function expiry(message, created)
  local policy = message.queueingPolicy or {}
  local interval = policy.validInterval or {}
  local after = policy.validAfterTime or interval.startTime
  local until_time = policy.validUntilTime or interval.endTime
  return after and clock.parse_timestamp(after)
    or policy.validAfterDuration and created + clock.parse_duration(policy.validAfterDuration),
    until_time and clock.parse_timestamp(until_time)
      or policy.validUntilDuration and created + clock.parse_duration(policy.validUntilDuration)
end

--- Put a checked request into the queue.
---@param request ciranda.sim.QueuedResource name, id, zone, parent, message, template, node_ids, count, accelerator,
---  preemptible, reserved and version; the rest is set here
---@param accepted fun(queued_resource: ciranda.sim.QueuedResource) when the create operation may end
---@return ciranda.sim.QueuedResource
function QueuedResources:insert(request, accepted)
  local world = self.world
  local queued_resource = request
  local now = world.clock:now()
  queued_resource.nodes = {}
  queued_resource.epoch = 0
  queued_resource.created = clock.timestamp(now)
  self.by_name[queued_resource.name] = queued_resource
  set_state(self, queued_resource, "CREATING")
  local valid_after, valid_until = expiry(queued_resource.message, now)
  later(self, queued_resource, world.delay "accept", function()
    set_state(self, queued_resource, "WAITING_FOR_RESOURCES")
    accepted(queued_resource)
    local wait = world.delay "wait"
    if valid_after then
      wait = math.max(wait, valid_after - world.clock:now())
    end
    later(self, queued_resource, wait, function()
      self.queue[#self.queue + 1] = queued_resource
      self:allocate()
    end)
  end)
  if valid_until then
    world.clock:after(valid_until - now, function()
      local waiting = queued_resource.state == "CREATING" or queued_resource.state == "WAITING_FOR_RESOURCES"
      if self.by_name[queued_resource.name] == queued_resource and waiting then
        queued_resource.epoch = queued_resource.epoch + 1
        fail(
          self,
          queued_resource,
          errors.new(
            "DEADLINE_EXCEEDED",
            "The queued resource was not provisioned before its validity ended."
          )
        )
      end
    end)
  end
  return queued_resource
end

local NO_NODES_NEEDED = {
  CREATING = true,
  ACCEPTED = true,
  WAITING_FOR_RESOURCES = true,
  FAILED = true,
  SUSPENDED = true,
}

--- Delete a queued resource, with its nodes where `force` says so.
---@param queued_resource ciranda.sim.QueuedResource
---@param force boolean
---@param done fun()
--- Raises ciranda.sim.Status FAILED_PRECONDITION when it has nodes and may not take them along.
function QueuedResources:delete(queued_resource, force, done)
  if queued_resource.state == "DELETING" then
    table.insert(queued_resource.deleted, done)
    return
  end
  if not force and not NO_NODES_NEEDED[queued_resource.state] and #remaining(queued_resource) > 0 then
    errors.raise(
      "FAILED_PRECONDITION",
      ("Queued resource '%s' is in state %s and still has nodes. Delete its nodes first, or use force."):format(
        queued_resource.name,
        queued_resource.state
      )
    )
  end
  queued_resource.deleted = { done }
  queued_resource.failure = nil
  set_state(self, queued_resource, "DELETING")
  clear(self, queued_resource, function()
    self.by_name[queued_resource.name] = nil
    self.world.quota:release(queued_resource)
    release_capacity(self, queued_resource)
    self.world.events:add("queuedResource", queued_resource.name, "deleted")
    for _, callback in ipairs(queued_resource.deleted) do
      callback()
    end
  end)
end

--- Boot every machine of an ACTIVE queued resource anew.
---@param queued_resource ciranda.sim.QueuedResource
---@param done fun(err: ciranda.sim.Status?)
--- Raises ciranda.sim.Status FAILED_PRECONDITION in any other state.
function QueuedResources:reset(queued_resource, done)
  if queued_resource.state ~= "ACTIVE" then
    errors.raise(
      "FAILED_PRECONDITION",
      ("Queued resource '%s' can only be reset in state ACTIVE, not %s."):format(
        queued_resource.name,
        queued_resource.state
      )
    )
  end
  local nodes = remaining(queued_resource)
  local waiting, failure = #nodes, nil
  for _, node in ipairs(nodes) do
    self.world.nodes:restart(node, function(err)
      failure = failure or err
      waiting = waiting - 1
      if waiting == 0 then
        done(failure)
      end
    end)
  end
end

--- Take the machines of a queued resource away for good: preemption, the end of a run duration.
---@param queued_resource ciranda.sim.QueuedResource
---@param initiator string USER or SERVICE
function QueuedResources:suspend(queued_resource, initiator)
  set_state(self, queued_resource, "SUSPENDING", initiator)
  clear(self, queued_resource, function()
    set_state(self, queued_resource, "SUSPENDED", initiator)
    release_capacity(self, queued_resource)
  end)
end

--- A slice is preempted: its machines are gone at once, the rest follows.
---@param node ciranda.sim.Node one of a queued resource
function QueuedResources:preempt(node)
  self.world.nodes:take_away(node, "PREEMPTED")
  self:suspend(node.queued_resource, "SERVICE")
end

--- The user deletes one node of a queued resource: SUSPENDING until none is left, then SUSPENDED.
---@param node ciranda.sim.Node
---@param done fun()
function QueuedResources:delete_node(node, done)
  local queued_resource = node.queued_resource
  if queued_resource.state == "ACTIVE" or queued_resource.state == "PROVISIONING" then
    queued_resource.epoch = queued_resource.epoch + 1
    set_state(self, queued_resource, "SUSPENDING", "USER")
  end
  delete_slice(self, node, function()
    if #remaining(queued_resource) == 0 and queued_resource.state == "SUSPENDING" then
      set_state(self, queued_resource, "SUSPENDED", "USER")
      release_capacity(self, queued_resource)
    end
    done()
  end)
end

--- Replace a broken slice and, once the new one is up, reset all others. Without capacity for a new one it waits, and
--- the rest with it.
---@param node ciranda.sim.Node one of a queued resource
function QueuedResources:repair(node)
  local world, queued_resource = self.world, node.queued_resource
  if node.message.state ~= "REPAIRING" then
    world.nodes:take_away(node, "REPAIRING")
  end
  -- The broken slice keeps its chips occupied until the new one is there.
  if not world.capacity:take(node, capacity_place(queued_resource), node.accelerator.size) then
    if not self.repairs[node] then
      self.repairs[node] = true
      world.events:add("queuedResource", queued_resource.name, "no capacity to replace " .. node.id)
    end
    return
  end
  self.repairs[node] = nil
  world.nodes:replace(node, function(err)
    world.capacity:release(node)
    if err then
      return fail_slowly(self, queued_resource, err)
    end
    for _, other in ipairs(remaining(queued_resource)) do
      if other ~= node and other.message.state == "READY" then
        world.nodes:restart(other, function() end)
      end
    end
  end)
end

local DATA_FIELD = {
  CREATING = "creatingData",
  ACCEPTED = "acceptedData",
  PROVISIONING = "provisioningData",
  FAILED = "failedData",
  DELETING = "deletingData",
  ACTIVE = "activeData",
  SUSPENDING = "suspendingData",
  SUSPENDED = "suspendedData",
}

--- The QueuedResource message as the API shows it: one nodeSpec a node.
---@param queued_resource ciranda.sim.QueuedResource
---@return table
function M.message(queued_resource)
  local result = {}
  for field, value in pairs(queued_resource.message) do
    result[field] = value
  end
  result.name = queued_resource.name
  result.createTime = queued_resource.created
  result.tpu = { nodeSpec = {} }
  for i, id in ipairs(queued_resource.node_ids) do
    result.tpu.nodeSpec[i] = { parent = queued_resource.parent, nodeId = id, node = queued_resource.template }
  end
  result.state = { state = queued_resource.state, stateInitiator = queued_resource.initiator }
  local data = DATA_FIELD[queued_resource.state]
  if data then
    result.state[data] = {}
    if queued_resource.state == "FAILED" then
      result.state[data].error = errors.rpc(queued_resource.failure)
    end
  end
  return result
end

return M
