--- The machines of a run after one of them was lost: wait until the cloud has them all again, then a fleet of them as
--- they are now.
--
-- A slice that is repaired comes back with other addresses and other host keys, and the service then restarts its
-- neighbours; so nothing that was known of a machine holds. The API is asked, and every machine must let us in, before
-- another attempt is staged.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local fleets = require("ciranda.fleet")
local shell = require("ciranda.io.shell")
local nodeset = require("ciranda.provider.nodeset")
local node_provider = require("ciranda.provider.node")
local task = require("ciranda.task")

local M = {}

--- Seconds that the machines may take to come back: a replacement waits for capacity.
M.TIMEOUT = 3600
--- Seconds between two looks, and the longest that all machines may take to let us in before the API is asked again:
--- the service may not yet know what we know.
local LOOK, CONNECT = 5, 60
--- Seconds that a maintenance which may begin at any time is waited for; it may also come hours later.
local PENDING = 600

---@class ciranda.run.Cloud where a run's machines come from; kept in its journal
---@field project string
---@field zone string
---@field nodes { name: string, index: integer }[] in the order of the slices
---@field queued_resource string?

---@class ciranda.run.RepairOptions
---@field cloud ciranda.run.Cloud
---@field tpu ciranda.gcp.Tpu? connected when it is not given
---@field fleet_options table for `fleet.new`
---@field set string? the part of the fleet that the run is on
---@field say fun(format: string, ...)
---@field login fun(fleet: ciranda.Fleet)? has the key let in
---@field timeout number? seconds (3600)
---@field look number? seconds between two looks (5)

--- What of a run's slices the journal keeps to find them again.
---@param tpu ciranda.gcp.Tpu
---@param slices ciranda.Slice[]
---@return ciranda.run.Cloud
function M.cloud(tpu, slices)
  local cloud = { project = tpu.project, zone = tpu.zone, nodes = {} }
  for place, slice in ipairs(slices) do
    cloud.nodes[place] = { name = slice.name, index = slice.index }
    cloud.queued_resource = slice.queued_resource
  end
  return cloud
end

--- Why a READY node is not to be used yet: the service is about to restart it.
---@param node table a Node message
---@param patient boolean wait for a maintenance too that has not begun
---@return string?
local function unsettled(node, patient)
  local upcoming = node.upcomingMaintenance
  if type(upcoming) == "table" then
    local begins = require("ciranda.gcp.credential_kinds").parse_time(upcoming.windowStartTime)
    if upcoming.maintenanceStatus == "ONGOING" or (patient and begins and begins <= os.time()) then
      return "maintenance"
    end
  end
  return node.health == "UNHEALTHY_MAINTENANCE" and "maintenance" or nil
end

--- The nodes, once all are READY and the queued resource ACTIVE.
---@param tpu ciranda.gcp.Tpu
---@param options ciranda.run.RepairOptions
---@param left fun(): number seconds
---@return { node: table, index: integer }[]
local function wait_for_nodes(tpu, options, left)
  local cloud = options.cloud
  local began, told = clock.now(), {}
  local function tell(about, text)
    if told[about] ~= text then
      told[about] = text
      options.say("The machines: %s", text)
    end
  end
  while true do
    local waiting = {
      timeout = math.max(1, left()),
      first_poll = options.look or LOOK,
      on_change = function(state)
        tell("state", ("%s is %s"):format(cloud.queued_resource or "the slice", state))
      end,
    }
    local nodes
    if cloud.queued_resource then
      local by_name = {}
      for _, node in ipairs(select(2, tpu:queued_resource(cloud.queued_resource):wait("ACTIVE", waiting))) do
        by_name[node_provider.short_name(node.name)] = node
      end
      nodes = function(name)
        return by_name[name]
          or err.raise({
            code = "not_found",
            op = "repair",
            target = name,
            message = ("node %s is no longer one of %s"):format(name, cloud.queued_resource),
          })
      end
    else
      nodes = function(name)
        return tpu:wait_node(name, "READY", { timeout = waiting.timeout, first_poll = waiting.first_poll })
      end
    end
    local why
    local found = task.map(cloud.nodes, function(known)
      local node = nodes(known.name)
      why = why or unsettled(node, clock.now() - began < PENDING)
      return { node = node, index = known.index }
    end, 16)
    if not why then
      return found
    end
    tell("why", "waiting for the end of " .. why)
    task.sleep(options.look or LOOK)
    if left() <= 0 then
      err.raise({ code = "timeout", op = "repair", message = "the machines are in " .. why })
    end
  end
end

--- Waits until the machines of a run can be used again.
---@async
---@param options ciranda.run.RepairOptions
---@return ciranda.Fleet to be closed; every worker of it is connected to
---@return ciranda.Slice[]
-- Raises "preempted" when they have been taken away for good, "not_found", "failed" and the like for what the API says
-- of them, "timeout".
function M.renew(options)
  local cloud = options.cloud
  local tpu = options.tpu
    or require("ciranda.gcp.tpu").connect({ project = cloud.project, zone = cloud.zone })
  local deadline = clock.now() + (options.timeout or M.TIMEOUT)
  local function left()
    return deadline - clock.now()
  end
  while true do
    local slices = node_provider.with_pins(tpu, wait_for_nodes(tpu, options, left))
    local settings = { retry_for = CONNECT }
    for name, value in pairs(options.fleet_options) do
      settings[name] = value
    end
    local fleet = fleets.new(slices, settings)
    if options.set then
      fleet = fleet:select(options.set)
      fleet.part = nil -- nobody else holds the whole
    end
    local ok, problem = pcall(task.timeout, math.min(2 * CONNECT, math.max(1, left())), function()
      if options.login then
        options.login(fleet)
      end
      fleet:connect()
    end)
    if ok then
      return fleet, slices
    end
    fleet:close()
    if err.is_fatal(problem) or left() <= 0 then
      error(problem, 0)
    end
    options.say("The machines: not all let us in yet: %s", tostring(problem))
    task.sleep(options.look or LOOK)
  end
end

--- What is asked of a worker about its platform's Multislice settings.
local ASK = [[curl -sf -m 5 -H Metadata-Flavor:Google ]]
  .. [[http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes/tpu-env]]

--- What Multislice's variables must be where the platform's do not fit the machines: a coordinator that was replaced
--- has another address, and a part of the slices, or one alone, is fewer than the platform speaks of (JAX would
--- wait for the others). Nothing when the platform is right, and when it cannot be asked or says nothing.
---@async
---@param fleet ciranda.Fleet
---@param slices ciranda.Slice[]
---@return (fun(worker: ciranda.Worker): table<string, string>)? environment
---@return string? note what was wrong and where, for a person
function M.multislice(fleet, slices)
  local first = slices[1] and slices[1].workers[1]
  if not first then
    return nil
  end
  local address, count, places = first.internal_address or first.address, tostring(#slices), {}
  for place, slice in ipairs(slices) do
    places[slice.index] = tostring(place - 1)
  end
  local port, wrong, order = "", {}, {}
  local function compare(worker, format, said, is)
    if said and said ~= is then
      local text = format:format(said, is)
      if not wrong[text] then
        wrong[text] = {}
        order[#order + 1] = text
      end
      table.insert(wrong[text], worker)
    end
  end
  for _, result in ipairs(fleet:run(shell.sh(ASK), { timeout = 30 })) do
    local function said(name)
      return not result.err and (result.stdout or ""):match(("MEGASCALE_%s: '([^']*)'"):format(name)) or nil
    end
    local coordinator = said("COORDINATOR_ADDRESS")
    local own_port = (coordinator or ""):match(":%d+$") or ""
    port = port ~= "" and port or own_port
    compare(result.worker, "coordinator %s in place of %s", coordinator, address .. own_port)
    compare(result.worker, "%s slices in place of %s", said("NUM_SLICES"), count)
    compare(result.worker, "slice %s in place of %s", said("SLICE_ID"), places[result.worker.slice])
  end
  if #order == 0 then
    return nil
  end
  for place, text in ipairs(order) do
    order[place] = ("%s on %s"):format(text, nodeset.fold(wrong[text]))
  end
  return function(worker)
    return {
      MEGASCALE_COORDINATOR_ADDRESS = address .. port,
      MEGASCALE_NUM_SLICES = count,
      MEGASCALE_SLICE_ID = places[worker.slice],
    }
  end,
    ("The platform's Multislice settings are not those of the run: %s. COMMAND is told what is so"):format(
      table.concat(order, "; ")
    )
end

return M
