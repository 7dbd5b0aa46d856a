--- What befalls nodes and workers: preemption, a lost host, maintenance, a machine that goes off, a disk that is full.
--
-- Each may be asked for at once (ciranda.sim.control) or stand in a fault with a time of its own (ciranda.sim.faults).

local errors = require("ciranda.sim.errors")
local maintenance = require("ciranda.sim.maintenance")

local M = {}

--- What befalls a whole node: fn(world, node, body).
---@type table<string, fun(world: table, node: ciranda.sim.Node, body: table)>
M.nodes = {}

--- A spot slice is taken away with its notice: the guest sees it for `world.grace.notice` seconds, then it is gone. The
--- notice is an ACPI soft-off, upon which the guest's own shutdown sends SIGTERM to what runs on it.
function M.nodes.preempt(world, node, body)
  if not node.queued_resource and not node.preemptible then
    errors.raise("FAILED_PRECONDITION", ("'%s' is not preemptible"):format(node.name))
  end
  local notice = tonumber(body.notice) or world.grace.notice
  local epoch = node.epoch
  for worker = 0, node.accelerator.workers - 1 do
    local machine = world.machines:find(node, worker)
    if machine then
      machine.preempted = true
    end
  end
  world.events:add("node", node.name, "preemption notice")
  world.machines:quiesce(node, notice, function() end)
  world.clock:after(notice, function()
    if node.epoch ~= epoch then
      return
    elseif node.queued_resource then
      world.queued_resources:preempt(node)
    else
      world.nodes:take_away(node, "PREEMPTED")
    end
  end)
end

--- A host of the slice is lost for good: the service repairs it, then resets the others.
function M.nodes.lose(world, node)
  if not node.queued_resource then
    world.nodes:take_away(node, "TERMINATED")
    return
  end
  world.queued_resources:repair(node)
end

--- Maintenance, with what the node's schedule gives its workers beforehand.
function M.nodes.maintain(world, node)
  maintenance.perform(world, node, function() end)
end

--- What befalls one worker: fn(machine, body). It may wait.
---@type table<string, fun(machine: ciranda.sim.Machine, body: table)>
M.workers = {}

--- The machine goes off, and nobody is told.
function M.workers.halt(machine)
  machine:halt()
end

--- The machine has another host key from now on, as after a repair that nobody announced.
function M.workers.changeHostKey(machine)
  machine:change_host_key()
end

--- Nothing more can be written, but for `free` bytes, until the machine boots anew.
function M.workers.fillDisk(machine, body)
  machine:fill_disk(math.tointeger(tonumber(body.free)) or 0)
end

---@param world table
---@param id string
---@return ciranda.sim.Node? the first of that name in any zone
function M.find_node(world, id)
  return world.nodes:list(function(name)
    return name:match("[^/]*$") == id
  end)[1]
end

--- Let something befall a node or a worker, and say so as an event.
---@async
---@param world table
---@param action string a name in `nodes` or `workers`
---@param node ciranda.sim.Node
---@param machine ciranda.sim.Machine? for an action on a worker
---@param body table
--- Raises ciranda.sim.Status.
function M.strike(world, action, node, machine, body)
  local subject = machine and ("%s worker %d"):format(node.id, machine.worker) or node.name
  world.events:add("fault", subject, action)
  if machine then
    M.workers[action](machine, body)
  else
    M.nodes[action](world, node, body)
  end
end

return M
