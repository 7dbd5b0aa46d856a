--- A gang before its start: every worker claimed, staged, set up and compared; all of them or none.
local checks = require("ciranda.run.checks")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local leases = require("ciranda.run.lease")
local link_of = require("ciranda.fleet.link")
local task = require("ciranda.task")

local M = {}

--- Seconds that the others may take to say who has them, when a gang is refused anyway.
local LOOK = 20
--- Machines about which the cloud is asked at once.
local ASKED = 8

--- The links of all members.
---@param gang ciranda.run.Gang
---@return ciranda.fleet.Link[]
local function links_of(gang)
  local links = {}
  for place, member in ipairs(gang.members) do
    links[place] = member.attempt.link
  end
  return links
end

--- When other runs have workers, who has the others is asked too, so that the message is about all of them.
---@param gang ciranda.run.Gang
---@param failures { member: ciranda.run.GangMember, problem: any }[]
local function refuse_held(gang, failures)
  local held, asked = {}, {}
  for _, failure in ipairs(failures) do
    if type(failure.problem) == "table" and failure.problem.held then
      held[failure.member.worker] = failure.problem.held
    end
  end
  if not next(held) then
    return
  end
  for _, member in ipairs(gang.members) do
    if not held[member.worker] then
      asked[#asked + 1] = member
    end
  end
  -- Who cannot be asked is left out; what is known is reason enough.
  gang:everyone(LOOK, function(member)
    local holders = gang.options.lease:look(member.attempt.link)
    held[member.worker] = #holders > 0 and holders or nil
  end, asked)
  local problem = leases.error(held)
  problem.message = problem.message .. ". Nothing was started on any worker."
  error(problem, 0)
end

--- Adds those whose machines are gone by what the cloud says: when a slice is lost the platform restarts the others as
--- well, and their SETUP is the first that is seen to have ended.
---@param gang ciranda.run.Gang
---@param failures { member: ciranda.run.GangMember, problem: any, gone: boolean? }[]
---@param members ciranda.run.GangMember[]
local function add_gone(gang, failures, members)
  local machine_gone = gang.options.machine_gone
  if #failures == 0 or not machine_gone then
    return
  end
  local known, silent = {}, {}
  for _, failure in ipairs(failures) do
    known[failure.member] = failure
  end
  for _, member in ipairs(members) do
    silent[#silent + 1] = not member.attempt.link:connected() and member or nil
  end
  local ok, problem = pcall(task.timeout, LOOK, task.map, silent, function(member)
    local why, state = machine_gone(member.worker)
    if why and state ~= "RESTARTING" then
      local title = link_of.title(member.worker)
      local failure = known[member] or { member = member }
      failures[#failures + 1] = not known[member] and failure or nil
      failure.gone = true
      failure.problem = err.new({
        code = "lost",
        op = "setup",
        target = title,
        message = ("SETUP on %s is lost: %s"):format(title, why),
      })
    end
  end, ASKED)
  if not ok and err.is_fatal(problem) then
    error(problem, 0)
  end
end

--- Does the SETUP where it has not been done yet.
---@param gang ciranda.run.Gang
local function set_up(gang)
  local setups = require("ciranda.run.setup")
  local options = gang.options
  local timeout = options.setup.timeout or 1800
  local directory = setups.directory(options.journal, options.id)
  local members = {}
  for _, member in ipairs(gang.members) do
    if not member.attempt.setup_done then
      members[#members + 1] = member
    end
  end
  local began = clock.now()
  -- Its own deadline comes first; this one is for a worker that is gone.
  local failures = gang:everyone(timeout + 180, function(member)
    setups.run(member.attempt, timeout, directory)
  end, members)
  add_gone(gang, failures, members)
  gang:refuse(failures, "set up", "COMMAND was started on no worker")
  gang:remark(
    ("SETUP: done on %d worker%s%s"):format(
      #members,
      #members == 1 and "" or "s",
      #members == 0 and ", had been done on all before"
        or (" in %.1f s%s"):format(
          clock.now() - began,
          #members < #gang.members and (", had been done on %d before"):format(#gang.members - #members) or ""
        )
    )
  )
end

--- Stages and sets up; `stage` says what is done when it fails.
---@param gang ciranda.run.Gang
---@param scope ciranda.task.Scope for what is done meanwhile
local function stage_all(gang, scope)
  local options = gang.options
  local seconds = gang.stage_timeout
  local nothing = "Nothing was started on any worker"
  -- One worker first: a wrong key is told once, a passphrase is asked for once, and of two gangs one goes on.
  local connecting = {}
  local failures = gang:everyone(seconds, function(member)
    member.attempt:connect()
    -- Connecting changes nothing on a worker, and takes the others as long as looking around takes this one.
    for place = 2, #gang.members do
      local other = gang.members[place]
      connecting[other] = scope:spawn(pcall, other.attempt.connect, other.attempt)
    end
    member.attempt:claim()
  end, { gang.members[1] })
  refuse_held(gang, failures)
  gang:refuse(failures, "staged", nothing)
  failures = gang:everyone(seconds, function(member)
    if connecting[member] then
      local ok, problem = connecting[member]:wait()
      if not ok then
        error(problem, 0)
      end
    end
    member.attempt:stage()
    gang:note("staged", {
      slice = member.worker.slice,
      worker = member.worker.index,
      clock_offset = member.attempt.clock_offset,
    })
  end)
  refuse_held(gang, failures)
  gang:refuse(failures, "staged", nothing)
  if options.lease then
    local void = {}
    for _, member in ipairs(gang.members) do
      void[member.worker] = member.attempt.facts.void
    end
    for _, line in ipairs(leases.void_lines(void)) do
      gang:remark(line)
    end
  end
  if options.setup then
    set_up(gang)
  end
  local list = {}
  for place, member in ipairs(gang.members) do
    list[place] = { worker = member.worker, facts = member.attempt.facts }
  end
  local odd = checks.odd_ones(list)
  if #odd > 0 and options.strict_fingerprint then
    err.raise({
      code = "precondition",
      op = "stage",
      message = ("the workers are not the same: %s; make them so, or leave --STRICT_FINGERPRINT out. %s."):format(
        table.concat(odd, "; "),
        nothing
      ),
    })
  end
  for _, line in ipairs(odd) do
    gang:remark("Warning: " .. line)
  end
end

--- Stages every worker: lease, connection, checks, guard, bundle, directory, SETUP. Nothing is started.
---@async
---@param gang ciranda.run.Gang
-- Raises when one cannot be staged: its own error's code, or "deadline"; the message names it and why. The leases are
-- given back then.
function M.stage(gang)
  local lease = gang.options.lease
  local scope <close> = task.scope()
  if lease then
    scope:spawn(function()
      while true do
        task.sleep(leases.RENEW)
        lease:renew(links_of(gang))
      end
    end)
  end
  local ok, problem = pcall(stage_all, gang, scope)
  scope:cancel("staged")
  if not ok then
    if lease then
      task.shield(lease.release, lease, links_of(gang))
    end
    error(problem, 0)
  end
end

return M
