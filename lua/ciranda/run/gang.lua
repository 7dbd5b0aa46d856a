--- A gang: one command on every worker of a fleet, started together, watched, and ended together.
--
-- Every worker is staged before any is started; if one cannot be staged nobody starts, and the laggard is
-- named. After that the gang lives on the workers and not in its connections: a connection that breaks is made
-- again and the log is followed from where it was. When one worker fails, the others are stopped in order.
local attempt = require("ciranda.run.attempt")
local checks = require("ciranda.run.checks")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local link_of = require("ciranda.fleet.link")
local muster = require("ciranda.run.muster")
local nodeset = require("ciranda.provider.nodeset")
local notices = require("ciranda.run.notices")
local task = require("ciranda.task")
local watch = require("ciranda.run.watch")

local M = {}

--- Seconds to stage one worker, when nobody has said it.
local STAGE = 600
--- Once one worker has failed to stage, seconds the others get to say that they failed as well.
local STAGE_COMPANY = 2
--- Remarks of one kind that are told as they come, and seconds in which further ones are gathered.
local ALONE, GATHER = 4, 2
--- Reasons that are told of workers which could not be staged.
local REASONS = 5

---@class ciranda.run.GangOptions
---@field fleet ciranda.Fleet
---@field run string
---@field id string the attempt's name
---@field command string
---@field directory string where it runs, below the login directory
---@field guard ciranda.run.Guard
---@field journal ciranda.Journal?
---@field environment table<string, string>? for every worker, besides CIRANDA_*
---@field environment_of (fun(worker: ciranda.Worker): table<string, string>)? for one worker
---@field bundle ciranda.archive.Manifest?
---@field use_existing boolean?
---@field lease ciranda.run.Lease? taken on every worker; without one nobody is asked whose they are
---@field setup { command: string, hash: string, timeout: number? }? done on every machine before the start (1800 s)
---@field kill "mine"|"all"|nil whose processes may be ended that hold the accelerators
---@field device_check boolean?
---@field strict_fingerprint boolean? different versions are a reason to stop
---@field stage_timeout number? seconds to stage one worker (600)
---@field go_timeout number? seconds to start all (120)
---@field lost_after number? seconds without an answer after which a worker is lost (180)
---@field failure_grace number? seconds between TERM and KILL for the others when one has failed (30)
---@field window number? seconds after a first failure in which those of others are awaited before one is named (2)
---@field victims_window number? the same while all that is known are consequences; nobody is stopped until then (10)
---@field silence number? seconds without an answer after which a person is told (30, beyond those in which a quiet
---  worker says how it stands)
---@field after_grace number? seconds beyond a grace after which one that has not ended counts as lost (90)
---@field machine_gone (fun(worker: ciranda.Worker): string?, string?)? why a worker that does not answer will not come
---  back as it was, and its node's state; asked while it does not answer
---@field live (fun(worker: ciranda.Worker): boolean)? whose log is followed while it runs (all); the others' arrive
---  when they have ended
---@field keep integer? bytes of each log that are kept on the worker at least (all)
---@field leader_only boolean? a worker has ended when its leader has
---@field stall number? seconds in which no worker has written anything, after which `on_stall` is told
---@field on_stall fun(stall: ciranda.run.Stall)? once, until somebody writes again; a task of the gang's
---@field on_note fun(text: string)? something that a person should know
---@field on_gap fun(worker: ciranda.Worker, from: integer, to: integer)? bytes of a log that its worker has given up
---@field on_change fun(gang: ciranda.run.Gang)? a phase has changed
---@field on_bytes fun(worker: ciranda.Worker, bytes: string)? a piece of a worker's log
---@field on_outcome fun(outcome: ciranda.run.Outcome)? a worker has ended
---@field on_failure fun(outcome: ciranda.run.Outcome)? the first failure, called once

---@class ciranda.run.Stall
---@field seconds number since anybody has written anything
---@field worker ciranda.Worker who did last
---@field workers ciranda.Worker[] who is still running; their guards answer

---@class ciranda.run.GangMember
---@field worker ciranda.Worker
---@field attempt ciranda.run.Attempt
---@field tail string[] pieces of its log's end
---@field tail_size integer
---@field outcome ciranda.run.Outcome?
---@field told boolean? it has been asked to stop
---@field record table? how it has ended, as its guard said to the stop: its log may still be on its way
---@field refusal string? why it could not be asked
---@field gone boolean? it has answered the go
---@field joining ciranda.task.Event? it has still to be found, and started if it was not; set when that is over

---@class ciranda.run.Gang
---@field members ciranda.run.GangMember[]
---@field options ciranda.run.GangOptions
---@field started boolean
---@field stage_timeout number seconds
---@field failure_grace number seconds
---@field changed ciranda.task.Event something has happened that the watch must look at
---@field private remarks table<string, { told: integer, others: ciranda.Worker[] }> by kind
---@field remark_at number? when what has been gathered is to be said
---@field skew { seconds: number, error: number, first: ciranda.Worker, last: ciranda.Worker }? how far apart the
---  workers started, by their clocks
---@field stopping { grace: number, reason: string, at: number, wall: number, asked: boolean,
---  told: ciranda.task.Event, failure: boolean? }?
---  at: monotonic, wall: since 1970, of the first request; told: all have been asked, or could not be; failure: it was
---  a worker's failure that began it
local Gang = {}
Gang.__index = Gang

--- What COMMAND sees of the gang. TPU_* and MEGASCALE_* are left alone: setting some of them would make JAX look for
--- its peers in another way.
---@param options ciranda.run.GangOptions
---@param worker ciranda.Worker
---@param place integer from 1
---@param slices integer
---@return table<string, string>
local function environment_of(options, worker, place, slices)
  local environment = {
    CIRANDA_RUN = options.run,
    CIRANDA_ATTEMPT = options.id,
    CIRANDA_SLICE_ID = tostring(worker.slice),
    CIRANDA_WORKER_ID = tostring(worker.index),
    CIRANDA_NUM_SLICES = tostring(slices),
    CIRANDA_NUM_WORKERS = tostring(#options.fleet),
    CIRANDA_PROCESS_ID = tostring(place - 1),
  }
  for _, more in ipairs({
    options.environment_of and options.environment_of(worker) or {},
    options.environment or {},
  }) do
    for name, value in pairs(more) do
      environment[name] = value
    end
  end
  return environment
end

--- A gang on a fleet. Nothing happens on the workers yet.
---@param options ciranda.run.GangOptions
---@return ciranda.run.Gang
function M.new(options)
  local gang = setmetatable({
    options = options,
    members = {},
    started = false,
    stage_timeout = options.stage_timeout or STAGE,
    failure_grace = options.failure_grace or notices.GRACE.failure,
    changed = task.event(),
    remarks = {},
  }, Gang)
  local seen, slices = {}, 0
  for _, worker in ipairs(options.fleet:workers()) do
    if not seen[worker.slice] then
      seen[worker.slice] = true
      slices = slices + 1
    end
  end
  for place, worker in ipairs(options.fleet:workers()) do
    local one = attempt.new({
      run = options.run,
      id = options.id,
      worker = worker,
      link = options.fleet:link(worker),
      command = options.command,
      directory = options.directory,
      environment = environment_of(options, worker, place, slices),
      bundle = options.bundle,
      use_existing = options.use_existing,
      guard = options.guard,
      lost_after = options.lost_after,
      stage_timeout = gang.stage_timeout,
      lease = options.lease,
      setup = options.setup,
      kill = options.kill,
      device_check = options.device_check,
      keep = options.keep,
      leader_only = options.leader_only,
      idle = options.stall and options.stall > 0 and math.max(1, math.min(60, options.stall / 2)) or nil,
      on_leader = function(leader)
        watch.leader_ended(gang, worker, leader)
      end,
      on_gap = function(from, to)
        if options.on_gap then
          options.on_gap(worker, from, to)
        end
      end,
      on_phase = function()
        gang:tell()
      end,
    })
    gang.members[place] = { worker = worker, attempt = one, tail = {}, tail_size = 0 }
  end
  return gang
end

---@package
function Gang:note(kind, fields)
  local journal = self.options.journal
  if journal then
    fields = fields or {}
    fields.attempt = self.options.id
    journal:note(kind, fields)
  end
end

--- Members by what they are doing: "sending the guard" -> workers.
---@return { phase: string, workers: ciranda.Worker[] }[] the largest group last
function Gang:phases()
  local groups, by_phase = {}, {}
  for _, member in ipairs(self.members) do
    local phase = member.outcome and "ended" or member.attempt.phase
    local group = by_phase[phase]
    if not group then
      group = { phase = phase, workers = {} }
      by_phase[phase] = group
      groups[#groups + 1] = group
    end
    table.insert(group.workers, member.worker)
  end
  table.sort(groups, function(a, b)
    return #a.workers < #b.workers
  end)
  return groups
end

--- What the members that are not in `phase` do, for a person: "slice1/worker2 (connecting)".
---@param phase string
---@return string
function Gang:laggards(phase)
  local pieces = {}
  for _, group in ipairs(self:phases()) do
    if group.phase ~= phase then
      pieces[#pieces + 1] = ("%s (%s)"):format(nodeset.fold(group.workers), group.phase)
    end
  end
  return table.concat(pieces, ", ")
end

--- Says what a person should know.
---@package
---@param text string
function Gang:remark(text)
  if self.options.on_note then
    self.options.on_note(text)
  end
end

--- Says something of one worker: of its kind the first few as they come, of hundreds who have the same to say together.
---@param worker ciranda.Worker
---@param kind string what is said of them together, after their names
---@param text string what is said of this one alone
function Gang:remark_on(worker, kind, text)
  local group = self.remarks[kind] or { told = 0, others = {} }
  self.remarks[kind] = group
  if group.told < ALONE then
    group.told = group.told + 1
    return self:remark(text)
  end
  table.insert(group.others, worker)
  self.remark_at = self.remark_at or clock.now() + GATHER
  self.changed:set()
end

--- Says what has been gathered.
---@package
function Gang:remark_together()
  self.remark_at = nil
  local kinds = {}
  for kind, group in pairs(self.remarks) do
    kinds[#kinds + 1] = #group.others > 0 and kind or nil
  end
  table.sort(kinds)
  for _, kind in ipairs(kinds) do
    local group = self.remarks[kind]
    self:remark(("%s: %s"):format(nodeset.fold(group.others), kind))
    group.others = {}
  end
end

---@package
function Gang:tell()
  if self.options.on_change then
    self.options.on_change(self)
  end
end

--- Runs `step` on every member, or on some, with a deadline each; collects failures.
---@package
---@param seconds number
---@param step fun(member: ciranda.run.GangMember)
---@param members ciranda.run.GangMember[]?
---@return { member: ciranda.run.GangMember, problem: any }[]
function Gang:everyone(seconds, step, members)
  members = members or self.members
  local failures = {}
  local failed = task.event()
  local left = #members
  if left == 0 then
    return failures
  end
  local done = task.event()
  local scope <close> = task.scope()
  local children = {}
  for _, member in ipairs(members) do
    children[#children + 1] = scope:spawn(function()
      local own -- the step may have raised a timeout of its own
      local ok, problem = pcall(task.timeout, seconds, function()
        local well, raised = pcall(step, member)
        if not well then
          own = raised
          error(raised, 0)
        end
      end)
      if not ok then
        if err.is_fatal(problem) then
          error(problem, 0)
        end
        if err.is(problem, "timeout") and not rawequal(problem, own) then
          problem = err.new({
            code = "deadline",
            op = "stage",
            target = link_of.title(member.worker),
            message = ("%s was not ready within %g s; it was %s"):format(
              link_of.title(member.worker),
              seconds,
              member.attempt.phase
            ),
            cause = problem,
          })
        end
        failures[#failures + 1] = { member = member, problem = problem }
        failed:set()
      end
      left = left - 1
      if left == 0 then
        done:set()
      end
      self:tell()
    end)
  end
  local first = task.race({
    function()
      done:wait()
    end,
    function()
      failed:wait()
      task.sleep(STAGE_COMPANY)
    end,
  })
  if first == 2 then
    for _, child in ipairs(children) do
      child:cancel("another worker has failed")
    end
  end
  scope:wait()
  return failures
end

--- What failures of one kind have in common: their words without the worker and without numbers.
---@param failure { member: ciranda.run.GangMember, problem: any }
---@return string
local function kind_of(failure)
  local words = tostring(failure.problem)
  local title = link_of.title(failure.member.worker)
  local from, to = words:find(title, 1, true)
  while from do
    words = words:sub(1, from - 1) .. words:sub(to + 1)
    from, to = words:find(title, from, true)
  end
  return (words:gsub("%d+", "#"))
end

--- Raises the failures of a step as one error, of each kind the first: before others those whose machines are gone.
---@package
function Gang:refuse(failures, what, consequence)
  if #failures == 0 then
    return
  end
  table.sort(failures, function(a, b)
    local x, y = a.member.worker, b.member.worker
    if a.gone ~= b.gone then
      return a.gone == true
    elseif x.slice ~= y.slice then
      return x.slice < y.slice
    end
    return x.index < y.index
  end)
  local first = failures[1]
  local workers, groups, by_kind = {}, {}, {}
  for place, failure in ipairs(failures) do
    workers[place] = failure.member.worker
    local kind = kind_of(failure)
    if not by_kind[kind] then
      by_kind[kind] = { first = failure, workers = {} }
      groups[#groups + 1] = by_kind[kind]
    end
    table.insert(by_kind[kind].workers, failure.member.worker)
  end
  local deadline = err.is(first.problem, "deadline")
  local pieces = {}
  for place = 1, math.min(#groups, REASONS) do
    local group = groups[place]
    local reason = tostring(group.first.problem):gsub("%.$", "")
    pieces[place] = ("%s could not be %s%s: %s%s"):format(
      nodeset.fold(group.workers),
      what,
      #group.workers > 1 and (" (%d workers; the first one's reason)"):format(#group.workers) or "",
      reason,
      (reason:find("\n", 1, true) or #groups > 1) and "\n" or ". "
    )
  end
  if #groups > REASONS then
    pieces[#pieces + 1] = ("And %d further reasons on other workers.\n"):format(#groups - REASONS)
  end
  err.raise({
    code = deadline and "deadline" or first.problem.code,
    op = what,
    target = nodeset.fold(workers),
    message = table.concat(pieces) .. consequence .. ".",
    cause = first.problem,
    failures = failures,
  })
end

--- Stages every worker: lease, connection, checks, guard, bundle, directory, SETUP. Nothing is started.
-- Raises when one cannot be staged: its own error's code, or "deadline"; the message names it and why. The leases are
-- given back then.
function Gang:stage()
  muster.stage(self)
end

--- Takes up an attempt that an earlier runner started: nothing is staged, and what was started is not started again.
--- Nothing is asked yet; `watch` does it, worker by worker, so that one which does not answer holds up nobody. A member
--- whose machine no longer has the attempt counts as lost.
---@param received fun(worker: ciranda.Worker): integer bytes of its log that are here already
function Gang:rejoin(received)
  self.started = true
  for _, member in ipairs(self.members) do
    member.attempt.received = received(member.worker)
    member.joining = task.event()
  end
end

--- Goes on after a `go` that was cut short: `watch` starts those of which it is not known whether they were.
function Gang:go_on()
  for _, member in ipairs(self.members) do
    member.joining = not member.gone and task.event() or nil
  end
end

--- Says go to every worker at once. Before the first one the intent is on the disk.
-- Raises when one could not be started; the others have then been stopped.
function Gang:go()
  local journal = self.options.journal
  if journal then
    journal:intent("go", { attempt = self.options.id })
  end
  self.started = true
  local seconds = self.options.go_timeout or watch.GO
  local failures = self:everyone(seconds, function(member)
    member.attempt:go(seconds)
    member.gone = true
  end)
  if #failures > 0 then
    local untold = self:stop_all(self.failure_grace, "another worker could not be started")
    local but = #untold > 0
        and ("; %s could not be told to stop, and what was started there may go on"):format(
          nodeset.fold(untold)
        )
      or ""
    self:refuse(failures, "started", "The others were stopped" .. but)
  end
  local attempts = {}
  for place, member in ipairs(self.members) do
    attempts[place] = member.attempt
  end
  self.skew = checks.skew(attempts)
  if self.skew then
    self:note("started", { skew_ms = self.skew.seconds * 1000, error_ms = self.skew.error * 1000 })
  end
end

--- Asks every member that has not ended to stop.
---@package
---@param grace number
---@param reason string
---@return ciranda.Worker[] untold those that could not be asked
function Gang:stop_all(grace, reason)
  local untold, told = {}, self.stopping and self.stopping.told
  local pending, left = {}, #self.members
  for _, member in ipairs(self.members) do
    pending[member] = true
  end
  local function settled(member)
    if pending[member] then
      pending[member], left = nil, left - 1
    end
    if left == 0 and told then
      told:set()
    end
  end
  task.map(self.members, function(member)
    if member.joining then
      member.joining:wait()
    end
    if member.outcome then
      return settled(member)
    end
    local ok, answer = pcall(member.attempt.stop, member.attempt, grace, reason, function()
      member.told = true
      settled(member)
    end)
    settled(member)
    if ok then
      member.record = answer
    elseif err.is_fatal(answer) then
      error(answer, 0)
    else
      member.refusal = tostring(answer)
      untold[#untold + 1] = not member.told and member.worker or nil
    end
  end)
  return untold
end

--- How long it would be to the KILL if the gang were stopped now: a stop that is under way may come to it sooner.
---@param grace number seconds
---@return number seconds what is left of the other stop, to a tenth
function Gang:until_kill(grace)
  local left = self.stopping and self.stopping.at + self.stopping.grace - clock.now() or grace
  return left >= grace and grace or math.max(0, math.floor(left * 10 + 0.5) / 10)
end

--- Stops the gang: TERM to everybody now, KILL when the grace is over. Returns at once; `watch` sees the end.
--- A second call may only shorten the grace.
---@param grace number seconds
---@param reason string
function Gang:stop(grace, reason)
  local at = clock.now()
  if self.stopping and self.stopping.at + self.stopping.grace <= at + grace then
    return
  end
  local before = self.stopping or {}
  self.stopping = {
    grace = grace,
    reason = reason,
    at = at,
    wall = before.wall or clock.wall(),
    asked = false,
    told = task.event(),
    failure = before.failure,
  }
  self.changed:set()
end

--- Somebody else has the gang stop: who ends from now on was stopped, and nobody is told anything from here.
---@param grace number seconds
---@param reason string
function Gang:expect_stop(grace, reason)
  self:stop(grace, reason)
  self.stopping.asked = true
  for _, member in ipairs(self.members) do
    member.told = true
  end
end

--- Watches until every member has ended; stops the others when one fails.
---@return ciranda.run.Cause verdict
function Gang:watch()
  return watch.until_ended(self)
end

return M
