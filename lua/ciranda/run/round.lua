--- One attempt of a run as its runner sees it: staged, started, watched, ended, and what is said of it.
--
-- The gang does the work on the workers; here are the runner's signals, the logs, the lines that a person reads, and
-- the verdict.
local clock = require("ciranda.io.clock")
local ending = require("ciranda.run.ending")
local err = require("ciranda.io.error")
local hooks = require("ciranda.run.hooks")
local leases = require("ciranda.run.lease")
local notices = require("ciranda.run.notices")
local steps = require("ciranda.run.steps")
local stopping = require("ciranda.run.stopping")
local task = require("ciranda.task")
local uv = require("luv")
local wiring = require("ciranda.run.wiring")

local M = {}

local STOPPED = require("ciranda.fleet.signals").STOPPED

--- Seconds in which the platform's own SIGTERM may act before ours is sent.
local PLATFORM_FIRST = 5

--- Seconds that stopping SETUP may take when the runner is interrupted.
local SETUP_STOP = 8

---@class ciranda.run.Round
---@field options ciranda.run.LaunchOptions
---@field journal ciranda.Journal
---@field id string the attempt's name
---@field directory string where COMMAND runs, below the login directory
---@field running boolean the command has been told to start
---@field result ciranda.run.LaunchResult? once it has ended
---@field steps ciranda.run.Steps
---@field stopping string? the signal upon which it stops
---@field stop_begun { reason: string, grace: number }? an earlier runner's stop by its user, to be carried on
---@field notice ciranda.run.Notice? upon which it stops
---@field named ciranda.run.Outcome? the failure that has been told
---@field failure ciranda.task.Event it has
---@field at_once ciranda.task.Event who leaves a stop is to leave at once
---@field joining boolean? what an earlier runner started is still being found
---@field over boolean? the command has ended everywhere
local Round = {}
Round.__index = Round

--- An attempt; nothing happens yet.
---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@param id string
---@return ciranda.run.Round to be closed
function M.new(options, journal, id)
  local round = setmetatable({
    options = options,
    journal = journal,
    id = id,
    directory = options.directory or options.run,
    request = {},
    wake = task.event(),
    at_once = task.event(),
    failure = task.event(),
    running = false,
  }, Round)
  round.steps = steps.new({
    fleet = options.fleet,
    directory = options.checkpoint_directory,
    base = round.directory,
    chips = options.chips,
    say = function(...)
      round:say(...)
    end,
    on_saved = function(step)
      journal:note("saved", { attempt = id, step = step })
      round:saved(step)
    end,
  })
  round.remove_handler = options.on_interrupt(function(name)
    return round:signalled(name)
  end)
  return round
end

---@param format string
function Round:say(format, ...)
  self.options.progress:say(format, ...)
end

--- Waits until `fn` is done or a signal asks for something; returns what it asks for.
---@private
---@param finished ciranda.task.Event
---@return "finished"|"stop"|"notice"|"save"|"detach"
function Round:wait(finished)
  while true do
    if finished:is_set() then
      return "finished"
    elseif self.request.stop and not self.stopping then
      return "stop" -- before anybody leaves: two signals may come in one moment
    elseif self.request.detach then
      return "detach"
    elseif self.request.notice and not self.notice and not self.stopping then
      return "notice"
    elseif self.request.save then
      return "save"
    end
    task.race({
      function()
        finished:wait()
      end,
      function()
        self.wake:wait()
      end,
    })
    if self.wake:is_set() then
      self.wake = task.event()
    end
  end
end

--- What the signals of the runner mean while the command runs: the first Ctrl-C or SIGTERM saves and stops, the next
--- one leaves, SIGHUP leaves at once, SIGUSR1 saves and goes on. Before the command runs they cancel, as everywhere,
--- and SIGUSR1 means nothing.
---@private
---@param name string
---@return boolean handled
function Round:signalled(name)
  if name == "SIGUSR1" then
    self.request.save = self.running
  elseif not self.running then
    self.interrupted_by = name
    return false
  elseif name == "SIGHUP" or (STOPPED[name] and (self.request.stop or self.request.detach)) then
    if self.request.detach or self.over then
      self.at_once:set()
    end
    self.request.detach = name
  elseif STOPPED[name] then
    self.request.stop = name
  else
    return false
  end
  self.wake:set()
  return true
end

--- Tells a hook of something.
---@private
---@param name string
---@param fields table
function Round:happen(name, fields)
  if self.happenings then
    fields.run, fields.attempt = self.options.run, self.id
    fields.step = fields.step or self.steps.last_step
    self.happenings:put(name, fields)
  end
end

--- A save is on disk: one by a signal, or by the command itself.
---@private
---@param step integer
function Round:saved(step)
  if self.told_step ~= step then
    self.told_step = step
    self:happen("on_checkpoint", { step = step, text = ("step %d is on disk"):format(step) })
  end
end

--- A worker has learned from its platform what will happen to its machine.
---@private
---@param gang ciranda.run.Gang
---@param notice ciranda.run.Notice
function Round:noticed(gang, notice)
  for _, member in ipairs(gang.members) do
    if member.worker == notice.worker then
      notice.at = notice.at - member.attempt.clock_offset
    end
  end
  local worker = notice.worker
  local kind = "Notice: " .. notice.text
  notice.text = ("%s, slice %d worker %d"):format(notice.text, worker.slice, worker.index)
  gang:remark_on(worker, kind, "Notice: " .. notice.text)
  self.journal:note("notice", {
    attempt = self.id,
    slice = worker.slice,
    worker = worker.index,
    cause = notice.cause,
    text = notice.text,
    at = notice.at,
  })
  local hook = notice.cause == "spot" and "on_preempted" or "on_maintenance"
  self:happen(hook, { worker = worker, text = notice.text })
  if notice.cause and not self.request.notice then
    self.request.notice = notice
    self.wake:set()
  end
end

--- Stops the gang because of a notice: the clock of its grace began at the notice.
---@private
---@param gang ciranda.run.Gang
---@param notice ciranda.run.Notice
---@param finished ciranda.task.Event
---@return ciranda.checkpoint.Watch? before
function Round:obey(gang, notice, finished)
  self.notice = notice
  local before
  if notice.cause ~= "spot" then
    before = self.steps:look_before()
  end
  if self.options.autocheckpoint then
    -- The platform sends its own SIGTERM; ours comes only after it, for a framework that takes one.
    task.race({
      function()
        finished:wait()
      end,
      function()
        task.sleep(PLATFORM_FIRST)
      end,
    })
  end
  local passed = math.max(0, clock.wall() - notice.at)
  local grace = math.max(1, notices.GRACE[notice.cause] - passed)
  self:say("TERM to every worker, KILL after %.0f s", gang:until_kill(grace))
  gang:stop(grace, notice.text)
  return before
end

--- Watches the gang, the platform's notices and the runner's signals to the end, and writes that down.
---@private
---@return ciranda.run.LaunchResult
function Round:watch(gang)
  local options = self.options
  local scope <close> = task.scope()
  local finished = task.event()
  local verdict
  self.happenings = hooks.happenings(options.hooks)
  local aside = {}
  local function beside(fn, ...)
    aside[#aside + 1] = scope:spawn(fn, ...)
  end
  local watching = scope:spawn(function()
    verdict = gang:watch()
    finished:set()
  end)
  beside(function()
    self.logs:show_lines()
  end)
  -- Not aside: what it is about to write at the end is still to be written.
  local writing = scope:spawn(self.output.run, self.output)
  beside(stopping.show, self, gang)
  if self.joining then
    beside(wiring.keep_status, self, gang)
  end
  if options.notices then
    beside(notices.watch, options.fleet, function(notice)
      self:noticed(gang, notice)
    end)
  end
  local gathering = scope:spawn(function()
    self.failure:wait()
    return require("ciranda.run.evidence").gather(gang, self.named.worker, options.nodes)
  end)
  if options.hooks and options.hooks.on_checkpoint and options.checkpoint_directory then
    beside(self.steps.watch_saves, self.steps, function(step)
      self:saved(step)
    end)
  end
  local calling = scope:spawn(self.happenings.run, self.happenings, function(...)
    self:say(...)
  end)
  local function end_aside()
    for _, child in ipairs(aside) do
      child:cancel("the end")
    end
  end
  local before
  -- A runner that was killed in the middle of a user's stop may not have told all; who knows of it takes it once.
  local begun = self.stop_begun
  if begun then
    self.stopping = begun.reason:match("^%S+")
    self:say("%s is taken up: TERM to whoever has not had it, KILL after %g s", begun.reason, begun.grace)
    before = self.steps:look_before()
    gang:stop(begun.grace, begun.reason)
  end
  while true do
    local what = self:wait(finished)
    if what == "finished" then
      break
    elseif what == "detach" then
      local result = stopping.leave(self, gang, finished)
      if not result then
        break
      end
      watching:cancel("detached")
      writing:cancel("detached")
      gathering:cancel("detached")
      end_aside()
      calling:cancel("detached")
      return result
    elseif what == "save" then
      self.request.save = false
      beside(require("ciranda.run.save_on_demand").save, gang, self.steps, function(...)
        self:say(...)
      end)
    elseif what == "notice" then
      before = self:obey(gang, self.request.notice, finished)
    else
      self.stopping = self.request.stop
      local grace = options.grace or notices.GRACE.user
      self:say(
        "%s: TERM to every worker, KILL after %g s; once more to leave at once (the stop goes on)",
        self.stopping,
        gang:until_kill(grace)
      )
      before = self.steps:look_before()
      gang:stop(grace, self.stopping .. " to the runner")
    end
  end
  end_aside()
  local result = self:conclude(verdict, before, gathering)
  writing:cancel("the end")
  gathering:cancel("the end")
  if result.kind ~= "detached" then
    self:ended(result)
  end
  self.happenings:close()
  local waited = task.race({
    function()
      calling:wait()
    end,
    function()
      self.at_once:wait()
    end,
    function()
      task.sleep(hooks.LIMIT)
    end,
  })
  if waited ~= 1 then
    self:say("Leaving hooks that have not ended")
    calling:cancel("the end")
  end
  return result
end

--- What is left to do when the command has ended: nothing of it waits for a standard output that nobody reads when a
--- signal comes, nor at all when whoever leaves leaves at once.
---@private
---@param verdict ciranda.run.Cause
---@param before ciranda.checkpoint.Watch?
---@param gathering ciranda.Task what machines and cloud know of a failure
---@return ciranda.run.LaunchResult
function Round:conclude(verdict, before, gathering)
  self.over = true
  self.wake = task.event()
  task.race({
    function()
      self.output:flush()
    end,
    function()
      self.wake:wait()
    end,
  })
  self.logs:show_rest()
  local result
  task.race({
    function()
      result = ending.conclude(self, verdict, before, self.failure:is_set() and gathering:wait() or nil)
    end,
    function()
      self.at_once:wait()
    end,
  })
  return result or stopping.left(self, "Detached: the command has ended. `ciranda attach %s` says how.")
end

--- Runs a step whose failure ends the run; sets the result when it fails.
---@private
---@param kind string what the failure is, when it is no deadline
---@param consequence string
---@param step function
---@return boolean done
function Round:try(kind, consequence, step, ...)
  local ok, problem = pcall(step, ...)
  if ok then
    return true
  elseif err.is(problem, "cancelled") and self.interrupted_by and not self.running then
    self:interrupted()
    error(problem, 0)
  elseif err.is_fatal(problem) then
    error(problem, 0)
  end
  local status = 1
  if err.is(problem, "deadline") then
    kind, status = "deadline", 124
  end
  self:say("%s", problem.message)
  -- In a further attempt what could be staged before and cannot now is a machine.
  self:ended({
    status = status,
    kind = self.options.further and "infra" or kind,
    reason = consequence,
    worker = problem.failures and problem.failures[1].member.worker or nil,
    message = ("%s: %s, exit status %d"):format(kind, consequence, status),
  })
  return false
end

--- The runner leaves before COMMAND was started: a SETUP under way is stopped by whoever stops the runner; a lost
--- terminal leaves it to the next run.
---@private
function Round:interrupted()
  local options, name = self.options, self.interrupted_by
  local setup = STOPPED[name] and (options.staging or {}).setup
  self:say("%s: COMMAND was started on no worker", name)
  self:ended({
    status = 128 + uv.constants[name],
    kind = "interrupted",
    reason = name,
    message = "interrupted",
  })
  if setup then
    pcall(task.timeout, SETUP_STOP, require("ciranda.run.setup").stop, options.fleet, setup.hash)
  end
end

--- Writes down how it ended.
---@private
---@param result ciranda.run.LaunchResult
function Round:ended(result)
  self.result = result
  result.steps = self.steps
  self.journal:note("attempt_end", {
    attempt = self.id,
    status = result.status,
    kind = result.kind,
    reason = result.reason,
    worker = result.worker and not result.innocent and {
      slice = result.worker.slice,
      worker = result.worker.index,
    } or nil,
  })
end

---@private
function Round:close()
  if self.remove_handler then
    self.remove_handler()
  end
  if self.logs then
    self.logs:close()
  end
  if self.output then
    self.output:close()
  end
end

Round.__close = Round.close

--- Stages every worker, tells all to go, watches to the end.
---@async
---@return ciranda.run.LaunchResult
function Round:run()
  local gang = wiring.gang(self)
  do
    local scope <close> = task.scope()
    local showing = scope:spawn(wiring.keep_status, self, gang)
    local staged = self:try("staging", "nothing was started", gang.stage, gang)
    showing:cancel("staged")
    if not staged then
      return self.result
    end
  end
  -- What is raised from here on (no room for the logs, say) must not leave the workers taken.
  local _ <close> = setmetatable({}, {
    __close = function(_, problem)
      if problem and not gang.started then
        local lease = gang.options.lease
        task.shield(lease.release, lease, leases.links_of(self.options.fleet))
      end
    end,
  })
  if self.options.further then
    self.steps:tell_start(self.options.further ~= true and self.options.further or nil)
  end
  wiring.open_logs(self)
  self:say("Running main command, logs located in: %s/", self.logs_directory)
  self.running = true
  local gone
  local which = task.race({
    function()
      gone = self:try("infra", "those that were started were stopped", gang.go, gang)
    end,
    function()
      while not self.request.stop do
        self.wake:wait()
        self.wake = task.event()
      end
    end,
  })
  if which == 2 then
    gang:go_on() -- and stops
  elseif not gone then
    return self.result
  end
  if gang.skew and #gang.members > 1 then
    self:say(
      "Started on %d workers within %.0f ms, by their clocks (known to %.0f ms)",
      #gang.members,
      gang.skew.seconds * 1000,
      gang.skew.error * 1000
    )
  end
  return self:watch(gang)
end

--- Takes up what an earlier runner has started, and watches it to the end.
---@async
---@return ciranda.run.LaunchResult
function Round:rejoin()
  wiring.open_logs(self)
  local gang = wiring.gang(self)
  self:say("Taking up run %s, logs located in: %s/", self.options.run, self.logs_directory)
  self.running, self.joining, self.status_at = true, true, clock.now()
  gang:rejoin(function(worker)
    return self.logs:size(worker)
  end)
  return self:watch(gang)
end

return M
