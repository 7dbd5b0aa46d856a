--- A queued resource from the request to slices that are up, with a budget for the rare end in between.
--
-- Google's Multislice guide: a queued resource may be FAILED while some of its slices are ACTIVE; delete what was made
-- and try again in some minutes. That is done here, as often as the budget allows, and told each time; so it is for
-- what was preempted, when that is asked for. No other end is tried again: quota is not freed and capacity not found
-- by asking the same again.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local ledger = require("ciranda.run.ledger")
local task = require("ciranda.task")

local M = {}

--- How often a request is made in all, and the seconds between two ("some minutes").
M.TRIES = 3
M.PAUSE = 300
--- Seconds before what was preempted is asked for again, doubled each time.
M.PREEMPTION_PAUSE = 30

---@class ciranda.run.ProvisionOptions
---@field journal ciranda.Journal
---@field tpu ciranda.gcp.Tpu
---@field request ciranda.gcp.Request
---@field keep string? as for `ledger.create`
---@field tries integer? in all (3)
---@field pause number? seconds between two (300)
---@field preemptions integer? how often what was preempted is asked for again (0)
---@field on_note fun(text: string) takes what a person should know
---@field on_gone fun()? called when one is gone and before another is asked for

---@class ciranda.run.Provision
---@field queued_resource ciranda.gcp.QueuedResource the one that was asked for last
---@field tries integer how many have been made
---@field preempted integer how many of them were made because the one before was preempted
local Provision = {}
Provision.__index = Provision

local OPTIONS = {
  journal = true,
  tpu = true,
  request = true,
  keep = true,
  tries = true,
  pause = true,
  preemptions = true,
  on_note = true,
  on_gone = true,
}

local function ask(self)
  local options = self.options
  self.tries = self.tries + 1
  self.queued_resource = ledger.create(options.journal, options.tpu, options.request, options.keep)
end

--- Deletes what there is, waits, asks once more.
local function ask_again(self, pause)
  local options = self.options
  ledger.delete(options.journal, self.queued_resource)
  if options.on_gone then
    options.on_gone()
  end
  task.sleep(pause)
  ask(self)
  return true
end

--- Asks for a queued resource.
---@async
---@param options ciranda.run.ProvisionOptions
---@return ciranda.run.Provision
-- Raises what `ledger.create` raises.
function M.start(options)
  err.check_options(options, OPTIONS, "provision.start")
  local self = setmetatable({ options = options, tries = 0, preempted = 0 }, Provision)
  ask(self)
  return self
end

--- Asks once more for what was preempted, within its budget.
local function after_preemption(self)
  local options = self.options
  local budget = options.preemptions or 0
  if self.preempted >= budget then
    return false
  end
  local pause = (options.pause or M.PREEMPTION_PAUSE) * 2 ^ self.preempted
  self.preempted = self.preempted + 1
  options.on_note(
    ("%s was preempted: deleting it, and asking again in %g s (%d of %d times)"):format(
      tostring(self.queued_resource),
      pause,
      self.preempted,
      budget
    )
  )
  return ask_again(self, pause)
end

--- Asks once more after an end that asking again may mend: tells it, deletes what there is, with force, and waits some
--- minutes first.
---@async
---@param reason any what a wait raised
---@param deadline number? no further try from then on (seconds of `io.clock.now`)
---@return boolean whether it was asked again
function Provision:again(reason, deadline)
  local options = self.options
  if err.is(reason, "preempted") then
    return after_preemption(self)
  end
  local up = err.is(reason) and reason.ready_nodes
  if not up or up < 1 then
    return false
  end
  local of, pause = options.tries or M.TRIES, options.pause or M.PAUSE
  local slices = options.request.slices or 1
  local left = self.tries < of and not (deadline and clock.now() + pause >= deadline)
  options.on_note(
    ("%s is FAILED and %d of its %d slices are up: deleting it with force%s"):format(
      tostring(self.queued_resource),
      up,
      slices,
      left and (", then asking again in %g s (%d of %d)"):format(pause, self.tries + 1, of) or ""
    )
  )
  if not left then
    ledger.delete(options.journal, self.queued_resource)
    return false
  end
  return ask_again(self, pause)
end

--- Waits until the slices are up, asking again as `again` does.
---@async
---@param options ciranda.gcp.WaitOptions? `timeout` is for all tries together
---@return table message, table[] nodes
-- Raises what the wait raises when it is not to be tried again, or the budget is used up.
function Provision:wait(options)
  local wait = {}
  for name, value in pairs(options or {}) do
    wait[name] = value
  end
  local deadline = wait.timeout and clock.now() + wait.timeout
  while true do
    if deadline then
      wait.timeout = math.max(0.001, deadline - clock.now())
    end
    local ok, message, nodes = pcall(self.queued_resource.wait, self.queued_resource, "ACTIVE", wait)
    if ok then
      return message, nodes
    elseif not self:again(message, deadline) then
      error(message, 0)
    end
  end
end

return M
