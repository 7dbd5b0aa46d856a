--- A drill by a maintenance event that the API simulates: the notice goes to workers of the job, and whoever acts in
--- a real one acts here.
--
-- That is the run's runner, which tells every worker, and with autocheckpoint the platform, which signals the processes
-- that hold the accelerators of that node. Nothing is sent from here: a drill that helped would prove too little.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local notices = require("ciranda.run.notices")
local task = require("ciranda.task")
local tpus = require("ciranda.gcp.tpu")

local M = {}

--- Seconds from the API's answer until a worker must have seen the notice.
local NOTICE_COMES = 180
--- Seconds after the platform's five minutes in which the machines must have gone down with whoever still runs.
local RESTART_COMES = 300
--- Seconds that the operation may take.
local ACCEPTED = 300

local function refuse(run, format, ...)
  err.raise({ code = "usage", op = "autocheckpoint", target = run, message = format:format(...) })
end

--- Whom the event is for: the first worker, or those named, of which the API takes one a node.
---@param session ciranda.drill.Session
---@param set string? a node set
---@return ciranda.Worker[]
-- Raises "usage" where no cloud API knows the machines, and for two workers of one slice.
function M.targets(session, set)
  local run = session.options.run
  if not session.last.cloud then
    refuse(run, "run %s is on hosts of a list, and no cloud API can send them a maintenance event", run)
  end
  local workers = set and session.fleet:select(set):workers() or { session.fleet:workers()[1] }
  local seen = {}
  for _, worker in ipairs(workers) do
    if seen[worker.node] then
      refuse(
        run,
        "%s are on one node: the API lets one worker of a node see a simulated event",
        nodeset.fold({ seen[worker.node], worker })
      )
    end
    seen[worker.node] = worker
  end
  return workers
end

--- Looks whether anybody would tell COMMAND of the event.
---@async
---@param session ciranda.drill.Session
---@param tpu ciranda.gcp.Tpu
---@param workers ciranda.Worker[]
---@param has_runner boolean
-- Raises "usage" when nobody would, or a node is not READY, or is in maintenance already.
function M.check(session, tpu, workers, has_runner)
  local run = session.options.run
  task.map(workers, function(worker)
    -- Only v2alpha1 says whether autocheckpoint is on.
    local node = tpu:call("nodes.get", { node = worker.node, version = "v2alpha1" })
    local upcoming = type(node.upcomingMaintenance) == "table" and node.upcomingMaintenance or {}
    if node.state ~= "READY" or upcoming.maintenanceStatus == "ONGOING" then
      refuse(
        run,
        "node %s is %s: a drill needs it READY",
        worker.node,
        node.state ~= "READY" and node.state or "in maintenance"
      )
    elseif not has_runner and node.autocheckpointEnabled ~= true then
      refuse(
        run,
        "nobody would tell COMMAND of the event: run %s has no runner now (ciranda attach %s), and autocheckpoint is "
          .. "off on node %s",
        run,
        run,
        worker.node
      )
    end
  end, 16)
end

--- Has the API simulate the event on each node, one request for each.
---@async
---@param tpu ciranda.gcp.Tpu
---@param workers ciranda.Worker[] of different nodes
-- Raises what the API refuses.
function M.fire(tpu, workers)
  task.map(workers, function(worker)
    local operation = tpu:call("nodes.simulateMaintenanceEvent", {
      version = "v2alpha1",
      node = worker.node,
      body = { workerIds = { ("%d"):format(worker.index) } },
    })
    tpu:wait_operation(operation, { timeout = ACCEPTED })
  end, 16)
end

--- Does an event come within so many seconds?
---@async
---@param event ciranda.task.Event
---@param seconds number
---@return boolean
function M.comes(event, seconds)
  return task.race({
    function()
      event:wait()
    end,
    function()
      task.sleep(seconds)
    end,
  }) == 1
end

---@class ciranda.drill.Event
---@field at number when the first worker saw the notice: seconds since 1970 on our clock
---@field verdict ciranda.run.Cause? nil when somebody never ended

--- Sends the event and watches the gang to its end. Each member's `took` then counts from the notice.
---@async
---@param session ciranda.drill.Session
---@param grace number seconds
---@param set string? whom it is for
---@param has_runner boolean
---@return ciranda.drill.Event
-- Raises what `targets`, `check` and `fire` raise; "timeout" when no worker sees a notice.
function M.act(session, grace, set, has_runner)
  local gang, cloud = session.gang, session.last.cloud
  local workers = M.targets(session, set)
  local tpu = tpus.connect({ project = cloud.project, zone = cloud.zone })
  M.check(session, tpu, workers, has_runner)
  local noticed, ended = task.event(), task.event()
  local event, fired = {}, nil
  local scope <close> = task.scope()
  local children = {
    scope:spawn(notices.watch, session.fleet, function(notice)
      if notice.cause ~= "maintenance" or not fired or event.at then
        return
      end
      for _, member in ipairs(gang.members) do
        if member.worker == notice.worker then
          event.at = notice.at - member.attempt.clock_offset
        end
      end
      session.options.progress:say(
        "Notice: %s, slice %d worker %d",
        notice.text,
        notice.worker.slice,
        notice.worker.index
      )
      noticed:set()
    end),
    scope:spawn(function()
      gang:expect_stop(grace, "a simulated maintenance event")
      event.verdict = gang:watch()
      ended:set()
    end),
  }
  fired = clock.wall()
  M.fire(tpu, workers)
  task.race({
    function()
      M.comes(noticed, NOTICE_COMES)
    end,
    function()
      ended:wait()
    end,
  })
  if not noticed:is_set() and not ended:is_set() then
    err.raise({
      code = "timeout",
      op = "autocheckpoint",
      target = session.options.run,
      message = ("the API took the event, and no worker has seen a notice within %d s; the job goes on"):format(
        NOTICE_COMES
      ),
    })
  end
  event.at = event.at or fired
  M.comes(ended, math.max(grace, notices.GRACE.maintenance) + RESTART_COMES)
  for _, child in ipairs(children) do
    child:cancel("the end")
  end
  for _, member in ipairs(gang.members) do
    local outcome = member.outcome
    if outcome and not outcome.lost and outcome.at then
      outcome.took = math.max(0, outcome.at - event.at)
    end
  end
  return event
end

return M
