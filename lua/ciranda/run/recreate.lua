--- The queued resource of a run asked for again, when its machines were taken away for good.
--
-- Nothing more comes of a queued resource that is SUSPENDED or FAILED: it must be deleted before the same can be asked
-- for. That is done only for who has said so, as often as the budget for preemptions allows, and what will be asked for
-- is in the journal before the old one is deleted; so a runner that dies in between loses nothing.
local err = require("ciranda.io.error")
local ledger = require("ciranda.run.ledger")
local task = require("ciranda.task")
local templates = require("ciranda.gcp.template")
local tpus = require("ciranda.gcp.tpu")

local M = {}

--- Seconds that the new request may take to become machines, when nobody has said it.
M.WAIT = 86400
--- Seconds before the second request of a run, doubled with each further one up to the most: what is taken away at once
--- is not to be had now.
local PAUSE, MOST_PAUSE = 30, 600
--- Seconds before what FAILED with some slices up is asked for again ("some minutes", Google's Multislice guide).
local FAILED_PAUSE = 300
--- Seconds that a queued resource whose node was taken away may take to be SUSPENDED.
local SETTLE = 900
--- The flag by which a runner has said so.
local BUDGET = "--PREEMPTION_RESTARTS"

--- States in which nothing more comes.
local DEAD = { SUSPENDED = true, FAILED = true }
--- Those in which nothing has come yet.
local QUEUED = { CREATING = true, ACCEPTED = true, WAITING_FOR_RESOURCES = true }

---@class ciranda.run.RecreateOptions
---@field journal ciranda.Journal
---@field cloud ciranda.run.Cloud
---@field attempt string the last one
---@field series string the run's first attempt
---@field limit integer how often in a run
---@field wait number? seconds that the new one may take to come up (a day)
---@field budget string? the flag that said so ("--PREEMPTION_RESTARTS")
---@field pause number? seconds before the second request (30)
---@field failed_pause number? seconds at least before each, when some of the slices were up (300)
---@field go_on string? the command that goes on waiting ("ciranda attach RUN")
---@field tpu ciranda.gcp.Tpu? connected when it is not given
---@field say fun(format: string, ...)

---@class ciranda.run.Recreate
---@field options ciranda.run.RecreateOptions
---@field wait number? seconds that the machines may take; nil before anything was asked for again
local Recreate = {}
Recreate.__index = Recreate

---@param options ciranda.run.RecreateOptions
---@return ciranda.run.Recreate
function M.new(options)
  return setmetatable({ options = options }, Recreate)
end

---@private
---@param fields table?
---@return ciranda.gcp.QueuedResource
function Recreate:queued_resource(fields)
  local options = self.options
  local cloud = options.cloud
  self.tpu = self.tpu or options.tpu or tpus.connect({ project = cloud.project, zone = cloud.zone })
  return self.tpu:queued_resource(cloud.queued_resource, fields)
end

--- What this run has asked for again so far.
---@private
---@return table[] facts
function Recreate:done()
  local list = {}
  for _, fact in ipairs(self.options.journal:state().recreations) do
    if fact.series == self.options.series then
      list[#list + 1] = fact
    end
  end
  return list
end

--- Deletes what is there and asks again, as a fact on the disk says; every step may be repeated.
---@private
---@param fact table
function Recreate:carry_out(fact)
  local options = self.options
  local journal, name = options.journal, fact.request.id
  local object = journal:state().objects["queued_resource " .. name]
  local asked = object and (object.phase == "intent" or object.phase == "created") and object.us >= fact.us
  local qr = self:queued_resource({ version = fact.request.version })
  local state = not asked and qr:state() or nil
  if state and not DEAD[state] and state ~= "DELETING" then
    options.say("%s is %s: somebody else has asked for it again", name, state)
  else
    if state then
      ledger.delete(journal, qr)
    end
    if fact.pause > 0 and not asked then
      options.say("Asking again for %s in %.0f s", name, fact.pause)
      task.sleep(fact.pause)
    end
    ledger.create_again(journal, self.tpu, fact.request, "in place of what the run was started on")
    options.say(
      "%s is asked for again; it has %.0f s to come up. Should this program end before: %s goes on "
        .. "waiting, ciranda qr delete %s gives it up",
      name,
      options.wait or M.WAIT,
      options.go_on or "ciranda attach " .. journal.run,
      name
    )
  end
  journal:append("recreated", { attempt = options.attempt, series = options.series, name = name })
  self.wait = options.wait or M.WAIT
end

--- Goes on with what an earlier runner was doing when it died, if anything.
---@async
---@return boolean whether there was something to do
function Recreate:resume()
  local list = self:done()
  local last = list[#list]
  if not last then
    return false
  end
  -- What was asked for may still be waiting for capacity.
  self.wait = self.options.wait or M.WAIT
  if last.recreated then
    return false
  end
  self:carry_out(last)
  return true
end

--- Waits until nothing more will come of it, which may be some minutes after its first machine was taken away.
---@private
---@param problem table
---@return string? state
function Recreate:settled(problem)
  if DEAD[problem.state] or not err.is(problem, "preempted") then
    return problem.state
  end
  local qr = self:queued_resource()
  local ok, why = pcall(qr.wait, qr, "SUSPENDED", { timeout = SETTLE })
  if not ok and err.is_fatal(why) then
    error(why, 0)
  end
  return ok and "SUSPENDED" or why.state
end

--- Why it must not be asked for again, if anything.
---@private
---@param problem table
---@param message table
---@return string?
function Recreate:objection(problem, message)
  local options = self.options
  local used = #self:done()
  local nodes = message.tpu and message.tpu.nodeSpec
  if message.state.stateInitiator == "USER" then
    return "a user has suspended it"
  elseif problem.ready_nodes and nodes and options.cloud.nodes and #nodes > #options.cloud.nodes then
    return ("%d of its slices are up, and this run does not use all of them"):format(problem.ready_nodes)
  elseif used >= options.limit then
    return ("%s=%d is used up"):format(options.budget or BUDGET, options.limit)
  end
  return nil
end

--- Asks again after an error that says that the machines will not come back.
---@async
---@param problem ciranda.Error what waiting for them raised
---@return boolean asked
-- Raises "unsupported" when the same cannot be asked for, and what calls raise.
function Recreate:after(problem)
  local options = self.options
  local name = options.cloud.queued_resource
  if not name or not DEAD[self:settled(problem)] then
    return false
  end
  local template, message = templates.of(self:queued_resource().tpu, name)
  local why = self:objection(problem, message)
  if why then
    options.say("%s is %s and is not asked for again: %s", name, message.state.state, why)
    return false
  end
  local number, up = #self:done() + 1, problem.ready_nodes or 0
  options.say(
    "%s is %s: %s. Deleting it and asking for it again (%d of %s=%d)",
    name,
    message.state.state,
    up > 0 and ("%d of its slices are up"):format(up) or "its machines and what was on their disks are gone",
    number,
    options.budget or BUDGET,
    options.limit
  )
  local pause = number > 1 and math.min(MOST_PAUSE, (options.pause or PAUSE) * 2 ^ (number - 2)) or 0
  if up > 0 then
    pause = math.max(pause, options.failed_pause or FAILED_PAUSE)
  end
  options.journal:intent("recreate", {
    attempt = options.attempt,
    series = options.series,
    request = template,
    pause = pause,
  })
  local list = self:done()
  self:carry_out(list[#list])
  return true
end

--- Gives up what was asked for and has not come: capacity that comes when nobody waits for it costs money.
---@async
function Recreate:give_up()
  local qr = self:queued_resource()
  if QUEUED[qr:state()] then
    self.options.say("Giving up %s, which has not come up: deleting it", qr.id)
    ledger.delete(self.options.journal, qr)
  end
end

return M
