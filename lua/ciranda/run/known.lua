--- A run that somebody else started, found again by its name: its last attempt and the fleet that it is on.
local err = require("ciranda.io.error")
local fleets = require("ciranda.fleet")
local journals = require("ciranda.run.journal")
local runs = require("ciranda.run.runs")

local M = {}

--- What an attempt was started with, of `ciranda.run.LaunchOptions`, that the journal keeps as it is: with these
--- somebody else goes on with it as its runner would have.
local KEPT = {
  "command",
  "connection",
  "cloud",
  "checkpoint_directory",
  "grace",
  "failure_grace",
  "autocheckpoint",
  "hooks_file",
  "restarts",
  "recreate",
  "staging",
  "environment",
  "chips",
  "watch",
}

--- The options of an attempt that are kept: of a launch for the journal, and back.
---@param from table options of a launch, or an attempt as the journal has it
---@return table kept a new one
function M.kept(from)
  local kept = {}
  for _, name in ipairs(KEPT) do
    kept[name] = from[name]
  end
  return kept
end

--- The last attempt of a run, which must have been started and not have ended.
---@param run string
---@param op string for the error
---@param between boolean? it may have ended when its runner was gone before the run had: on its way to another attempt
---@return table attempt as the journal has it
---@return ciranda.journal.State state
-- Raises "not_found" when there is no such run, when it has started nothing, or when nothing of it is running; "usage"
-- for what is no name.
function M.find(run, op, between)
  local state = runs.read(run)
  local found = runs.open_attempt(state) or between and runs.unfinished(state)
  if found then
    return found, state
  elseif state.job then
    err.raise({
      code = "not_found",
      op = op,
      target = run,
      message = (
        "run %s is a job that runs by itself: ciranda job_status %s shows it, and the command that "
        .. "gave it, with --follow=true, follows it"
      ):format(run, run),
    })
  end
  local last = state.attempts[#state.attempts]
  local message = not (last and last.gone) and ("run %s has started no command"):format(run)
    or ("run %s has ended: %s, exit status %s; its logs are in %s/%s"):format(
      run,
      last.ended.kind,
      last.ended.status,
      (journals.path(run):gsub("/journal.jsonl$", "")),
      last.attempt
    )
  err.raise({ code = "not_found", op = op, target = run, message = message })
end

--- The fleet of an attempt. Nothing is connected to yet.
---@param attempt table as the journal has it
---@param connect_options table for `fleet.new`; what the attempt's own connection says is added to it
---@return ciranda.Fleet fleet to be closed
function M.fleet(attempt, connect_options)
  local slices, by_number = {}, {}
  for _, worker in ipairs(attempt.workers) do
    local slice = by_number[worker.slice]
    if not slice then
      slice = { index = worker.slice, name = worker.node or ("slice" .. worker.slice), workers = {} }
      by_number[worker.slice] = slice
      slices[#slices + 1] = slice
    end
    table.insert(slice.workers, worker)
  end
  for name, value in pairs(attempt.connection or {}) do
    if connect_options[name] == nil then
      connect_options[name] = value
    end
  end
  return fleets.new(slices, connect_options)
end

--- Lets the key of an attempt in on machines that were made anew, as the runner that started it did.
---@param tpu ciranda.gcp.Tpu
---@param connect_options table
---@param progress ciranda.cli.Progress
---@return fun(fleet: ciranda.Fleet)
local function login(tpu, connect_options, progress)
  local access = require("ciranda.provider.access")
  return function(fleet)
    local _, public = access.key(connect_options.keys)
    access.ensure({
      tpu = tpu,
      fleet = fleet,
      user = access.user(connect_options.user),
      user_given = true,
      public = public,
      on_note = function(text)
        progress:say("%s", text)
      end,
    })
  end
end

--- The machines of an attempt as they are now, once the cloud has them all.
---@async
---@param attempt table as the journal has it, with `cloud`
---@param connect_options table for `fleet.new`, as `fleet` has completed it
---@param progress ciranda.cli.Progress
---@param timeout number? as for `repair.renew`
---@return ciranda.Fleet fleet to be closed
---@return string? note
---@return (fun(worker: ciranda.Worker): table<string, string>)? environment_of
-- Raises what `repair.renew` raises.
function M.renew(attempt, connect_options, progress, timeout)
  local repair = require("ciranda.run.repair")
  local cloud = attempt.cloud
  local tpu = require("ciranda.gcp.tpu").connect({ project = cloud.project, zone = cloud.zone })
  local fleet, slices = repair.renew({
    cloud = cloud,
    tpu = tpu,
    fleet_options = connect_options,
    login = login(tpu, connect_options, progress),
    timeout = timeout,
    say = function(...)
      progress:say(...)
    end,
  })
  local environment_of, note = repair.multislice(fleet, slices)
  return fleet, note, environment_of
end

return M
