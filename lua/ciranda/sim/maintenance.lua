--- Host maintenance: who is told, who is waited for, and what happens to the slice.
--
-- With autocheckpoint the service sends SIGTERM to the processes that hold the TPU devices and waits until they have
-- ended, for at most five minutes; without it maintenance starts at once. The machines then boot anew, and in a
-- Multislice environment so do those of all other slices, since none can go on without this one.

local clock = require("ciranda.sim.clock")

local M = {}

local TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"

local function upcoming(world, status, kind)
  local now = world.clock:now()
  return {
    type = kind,
    maintenanceStatus = status,
    canReschedule = false,
    windowStartTime = clock.timestamp(now),
    windowEndTime = clock.timestamp(now + world.grace.maintenance),
    latestWindowStartTime = clock.timestamp(now),
  }
end

local function restart_others(world, node)
  local queued_resource = node.queued_resource
  if not queued_resource then
    return
  end
  for slice = 0, queued_resource.count - 1 do
    local other = queued_resource.nodes[slice]
    if other and other ~= node and other.message.state == "READY" then
      world.nodes:restart(other, function() end)
    end
  end
end

--- Maintain a node now.
---@param world table
---@param node ciranda.sim.Node READY
---@param done fun(err: ciranda.sim.Status?)
---@param kind string? SCHEDULED (the default) or UNSCHEDULED
function M.perform(world, node, done, kind)
  local epoch = node.epoch
  node.message.upcomingMaintenance = upcoming(world, "ONGOING", kind or "SCHEDULED")
  world.events:add("node", node.name, "maintenance")
  world.machines:announce(node, nil, TERMINATE)
  local function maintain()
    if node.epoch ~= epoch then
      return done()
    end
    node.message.health = "UNHEALTHY_MAINTENANCE"
    world.nodes:restart(node, function(err)
      node.message.upcomingMaintenance = nil
      world.machines:announce(node, nil, "NONE")
      restart_others(world, node)
      done(err)
    end)
  end
  if node.message.autocheckpointEnabled then
    world.machines:quiesce(node, world.grace.maintenance, maintain)
  else
    maintain()
  end
end

--- Let a worker see a maintenance event, as a drill: the notice first, the maintenance of its node after it.
---@param world table
---@param node ciranda.sim.Node READY
---@param worker integer
---@param done fun(err: ciranda.sim.Status?) when the event has been announced
function M.simulate(world, node, worker, done)
  local epoch = node.epoch
  node.message.upcomingMaintenance = upcoming(world, "PENDING", "UNSCHEDULED")
  world.machines:announce(node, worker, TERMINATE)
  world.events:add("node", node.name, ("maintenance event simulated on worker %d"):format(worker))
  world.clock:after(world.grace.notice, function()
    if node.epoch == epoch and node.message.state == "READY" then
      M.perform(world, node, function() end, "UNSCHEDULED")
    end
  end)
  world.clock:after(0, done)
end

return M
