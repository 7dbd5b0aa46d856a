--- A gang while it runs: its logs followed, its failures and silences seen, until every member has ended.
--
-- What one member's end means for the others is decided here: the first failure stops them, and is named when those
-- that failed with it have had the time to say so.
local cause = require("ciranda.run.cause")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local lag = require("ciranda.io.lag")
local nodeset = require("ciranda.provider.nodeset")
local task = require("ciranda.task")

local M = {}

--- Seconds in which everybody is to have been told to start.
M.GO = 120
--- Seconds after a first failure in which the failures of others are awaited, before the first one by time is
--- named; longer when all that is known so far are consequences, and nobody is stopped until then.
local WINDOW, CONSEQUENCE_WINDOW = 2, 10
--- Seconds without an answer after which a person is told, beyond those in which a quiet worker says how it stands.
local SILENCE = 30
--- Seconds beyond a grace after which a worker that has not ended counts as lost.
local AFTER_GRACE = 90
--- Seconds by which a worker's clock, as corrected, may still be wrong, where nothing more is known of it.
local CLOCKS = 0.05
--- Seconds between two looks at who has no connection, and how long one must have had none before it is asked whether
--- its machine is gone.
local LOOK_FOR_GONE, SILENT = 2, 3
--- Seconds between two looks at whether the logs still come of those who have ended, when a stop is over.
local LATE_LOOK = 0.5
--- Seconds between two looks at who does not answer, at least.
local LOOK_FOR_SILENT = 1
--- Logs of ended workers that are fetched at the same time.
local FETCHES = 32
--- Seconds between two looks for a silence that has lasted, but of which not everybody has been heard yet.
local STALL_LOOK = 0.5
--- Bytes of a log's end that are kept for the search for the cause.
local TAIL = 65536

---@class ciranda.run.Watch
---@field gang ciranda.run.Gang
---@field fetching ciranda.task.Semaphore
---@field followers table<ciranda.run.GangMember, ciranda.Task>
---@field running integer members that have not ended
---@field failures integer members that have failed by themselves
---@field victims integer of these, those that look like a consequence of something
---@field looked number? when it was last looked who does not answer
---@field silent table<ciranda.run.GangMember, boolean?> who does not answer, as has been told
---@field stalled number? when the silence began that has been told last
local Watch = {}
Watch.__index = Watch

--- Keeps the end of a log: pieces, joined only when there are twice as many bytes as are wanted.
local function keep_tail(member, bytes)
  member.tail[#member.tail + 1] = bytes
  member.tail_size = member.tail_size + #bytes
  if member.tail_size > 2 * TAIL then
    local text = table.concat(member.tail):sub(-TAIL)
    member.tail, member.tail_size = { text }, #text
  end
end

--- Says that a leader has ended while its tree goes on.
---@param gang ciranda.run.Gang
---@param worker ciranda.Worker
---@param leader { code: integer?, signal: integer? }
function M.leader_ended(gang, worker, leader)
  if not gang.options.leader_only then
    local how = type(leader.signal) == "number" and "signal " .. leader.signal or tostring(leader.code)
    local kind = ("COMMAND's shell has ended with %s, what it started goes on"):format(how)
    gang:remark_on(
      worker,
      kind,
      ("slice %d worker %d: %s (--LEADER_ONLY=true waits for the shell only)"):format(
        worker.slice,
        worker.index,
        kind
      )
    )
  end
end

--- Says that a log is not all here.
---@private
---@param worker ciranda.Worker
---@param why string
function Watch:log_cut(worker, why)
  local text = "The log of slice %d worker %d is not all here: %s"
  self.gang:remark_on(
    worker,
    "their logs are not all here either",
    text:format(worker.slice, worker.index, why)
  )
end

--- The log of a member that has ended, which was not followed while it ran.
---@private
function Watch:fetch(member, take)
  local record, why = self.fetching:with(member.attempt.follow, member.attempt, take)
  if not record then
    self:log_cut(member.worker, why)
  end
end

--- A member has ended, or is given up.
---@private
---@param member ciranda.run.GangMember
---@param outcome ciranda.run.Outcome
function Watch:ended(member, outcome)
  local gang = self.gang
  member.outcome = outcome
  self.running = self.running - 1
  if cause.failed(outcome) and not outcome.stopped then
    self.failures = self.failures + 1
    self.victims = self.victims + (cause.follows(outcome) and 1 or 0)
  end
  gang:note("exit", {
    slice = member.worker.slice,
    worker = member.worker.index,
    code = outcome.code,
    signal = outcome.signal,
    lost = outcome.lost,
    stopped = outcome.stopped,
    reason = outcome.reason,
    at = outcome.at,
  })
  if member.joining then
    member.joining:set()
  end
  gang:tell()
  gang.changed:set()
end

--- Finds what an earlier runner staged on a member's machine, and starts it if that runner had not.
---@private
---@param member ciranda.run.GangMember
---@return string? why it is lost
function Watch:join(member)
  local attempt, why = member.attempt, nil
  local ok, problem = pcall(function()
    if attempt:rejoin() then
      attempt:go(self.gang.options.go_timeout or M.GO)
    else
      why = "the machine was made anew: the attempt is not there"
    end
  end)
  if not ok and err.is_fatal(problem) then
    error(problem, 0)
  elseif ok and not why then
    member.joining:set()
  end
  return why or not ok and tostring(problem) or nil
end

--- Adds to how a member ended what the end of its log says, and whether our stop was it.
---@private
---@param member ciranda.run.GangMember
---@param outcome ciranda.run.Outcome changed
function Watch:complete(member, outcome)
  outcome.tail = table.concat(member.tail):sub(-TAIL)
  member.tail, member.tail_size = {}, 0
  cause.read(outcome)
  local stopping = self.gang.stopping
  -- After a failure the order of all ends is what tells the cause: there no doubt of the clocks may hide one.
  local doubt = stopping and stopping.failure and CLOCKS or math.max(CLOCKS, member.attempt.clock_error or 0)
  if stopping and not outcome.lost and outcome.at and outcome.at >= stopping.wall - doubt then
    -- Members that agree on their last step may end before our word has reached each of them.
    outcome.stopped = true
    outcome.took = outcome.took or math.max(0, outcome.at - stopping.wall)
  end
end

--- One member's log followed to its end, and what it ended with.
---@private
function Watch:follow(member)
  local options = self.gang.options
  local live = not options.live or options.live(member.worker)
  local function take(bytes)
    if not member.outcome then
      keep_tail(member, bytes)
    end
    if options.on_bytes then
      options.on_bytes(member.worker, bytes)
    end
  end
  local record
  local why = member.joining and self:join(member)
  if not why then
    record, why = member.attempt:follow(live and take or nil)
    if not record and member.record then
      record = member.record
      if live then
        self:log_cut(member.worker, why)
      end
    end
  end
  local outcome = member.attempt:outcome(record, why)
  if record and cause.failed(outcome) and not outcome.stopped then
    member.attempt:look_at_clock()
    outcome = member.attempt:outcome(record)
  end
  if not live and record and cause.failed(outcome) then
    local ok, text = pcall(member.attempt.remote_tail, member.attempt, TAIL)
    if ok then
      keep_tail(member, text)
    elseif err.is_fatal(text) then
      error(text, 0)
    end
  end
  self:complete(member, outcome)
  self:ended(member, outcome)
  -- The others are told to stop meanwhile.
  if not live and record then
    self:fetch(member, take)
  end
  if options.on_outcome then
    options.on_outcome(outcome)
  end
end

--- Tells, once, when nobody has written anything for too long. What counts is what is known: the silence between who
--- wrote last and who has been heard of least, since an answer that is late says nothing of the log.
---@private
---@param now number
---@param scope ciranda.task.Scope
---@return number? seconds after which to look again
function Watch:look_for_stall(now, scope)
  local options = self.gang.options
  if not options.stall or options.stall <= 0 or self.gang.stopping then
    return nil
  end
  local last, seen, running = nil, now, {}
  for _, member in ipairs(self.gang.members) do
    if not member.outcome then
      seen = math.min(seen, member.attempt.seen)
      running[#running + 1] = member.worker
      if not last or member.attempt.grew > last.attempt.grew then
        last = member
      end
    end
  end
  if not last then
    return nil
  end
  local quiet = seen - last.attempt.grew
  if quiet < options.stall then
    return math.max(STALL_LOOK, options.stall - (now - last.attempt.grew) + 0.01)
  end
  -- What has been told is told again only of a silence that began after it; times from a status line may differ a bit.
  local began = last.attempt.grew
  if not self.stalled or began > self.stalled + options.stall / 2 then
    self.stalled = began
    if options.on_stall then
      scope:spawn(options.on_stall, { seconds = quiet, worker = last.worker, workers = running })
    end
  end
  return options.stall
end

--- Says who has not answered for a while, and who answers again.
---@private
function Watch:look_for_silence()
  local gang, now = self.gang, lag.clock()
  -- Not at each of a thousand ends.
  if self.looked and now - self.looked < math.min(LOOK_FOR_SILENT, gang.options.silence or SILENCE) then
    return
  end
  self.looked = now
  local silent, back, longest = {}, {}, 0
  for _, member in ipairs(gang.members) do
    local one = member.attempt
    local quiet = now - math.max(one.heard, one.followed or 0)
    local limit = (gang.options.silence or SILENCE) + (one.link:connected() and one.idle or 0)
    if not member.outcome and (quiet > limit) ~= (self.silent[member] or false) then
      self.silent[member] = quiet > limit
      longest = quiet > limit and math.max(longest, quiet) or longest
      table.insert(quiet > limit and silent or back, member.worker)
    end
  end
  if #silent > 0 then
    gang:remark(
      ("%s: no answer for %.0f s%s"):format(
        nodeset.fold(silent),
        longest,
        gang.stopping and "" or (", lost after %.0f s"):format(gang.members[1].attempt.lost_after)
      )
    )
  end
  if #back > 0 then
    gang:remark(nodeset.fold(back) .. ": answers again")
  end
end

--- What is known so far.
---@private
---@return ciranda.run.Cause
function Watch:verdict()
  local ended = {}
  for _, member in ipairs(self.gang.members) do
    ended[#ended + 1] = member.outcome
  end
  return cause.first(ended)
end

--- Ends a member's part with what is known, whatever its follower is doing.
---@private
---@param member ciranda.run.GangMember
---@param record table? nil: it counts as lost
---@param why string
---@param gone boolean? its machine is no more
function Watch:give_up(member, record, why, gone)
  self.followers[member]:cancel(why)
  if member.outcome then
    return
  end
  local outcome = member.attempt:outcome(record, why)
  outcome.gone = gone
  if record then
    self:complete(member, outcome)
    self:log_cut(member.worker, why)
  end
  self:ended(member, outcome)
  if self.gang.options.on_outcome then
    self.gang.options.on_outcome(outcome)
  end
end

--- The time for a stop is over: who has not ended counts as lost. Who has, as its guard has said, is only behind with
--- its log: that is waited for as long as it comes.
---@private
---@param patience number seconds in which nothing may come
function Watch:give_up_late(patience)
  for member in pairs(self.followers) do
    local silent = lag.clock() - member.attempt.heard
    if member.record and not member.outcome then
      if silent > patience then
        self:give_up(member, member.record, ("nothing of it has come for %.0f s"):format(silent))
      end
    elseif not member.outcome then
      local why = member.told and "it did not end after KILL"
        or member.refusal and "it could not be told to stop: " .. member.refusal
        or ("it could not be told to stop, and has not answered for %.0f s"):format(silent)
      self:give_up(member, nil, why)
    end
  end
end

--- Asks about machines that do not let us in: one that the platform has taken away need not be waited for.
---@private
function Watch:look_for_gone()
  local since = {}
  while true do
    task.sleep(LOOK_FOR_GONE)
    local now = clock.now()
    for member in pairs(self.followers) do
      if member.outcome or member.attempt.link:connected() then
        since[member] = nil
      else
        since[member] = since[member] or now
        if now - since[member] >= SILENT then
          local why = self.gang.options.machine_gone(member.worker)
          if why and not member.outcome then
            self:give_up(member, member.record, why, not member.record)
          end
        end
      end
    end
  end
end

--- Watches until every member has ended; stops the others when one fails.
---@param gang ciranda.run.Gang
---@return ciranda.run.Cause verdict
local function watch(gang)
  local options = gang.options
  local self = setmetatable({
    gang = gang,
    followers = {},
    silent = {},
    fetching = task.semaphore(FETCHES),
    running = #gang.members,
    failures = 0,
    victims = 0,
  }, Watch)
  local scope <close> = task.scope()
  for _, member in ipairs(gang.members) do
    self.followers[member] = scope:spawn(self.follow, self, member)
  end
  -- What must not outlast the last member: asking for machines, and asking one to stop that does not answer.
  local aside = options.machine_gone and { scope:spawn(self.look_for_gone, self) } or {}
  local first_seen, told, deadline
  while true do
    local running, now = self.running, clock.now()
    first_seen = first_seen or self.failures > 0 and now or nil
    if first_seen and not told then
      local victims = self.victims == self.failures
      local window =
        math.max(options.window or WINDOW, victims and (options.victims_window or CONSEQUENCE_WINDOW) or 0)
      local over = running == 0 or now - first_seen >= window
      -- The cause may still be winding up; a signal now would make it look like one that was stopped.
      if not gang.stopping and running > 0 and (over or not victims) then
        gang:stop(gang.failure_grace, "another worker has failed")
        gang.stopping.failure = true
      end
      if over then
        told = self:verdict().first
        if options.on_failure then
          options.on_failure(told)
        end
      end
    end
    if running == 0 then
      for _, child in ipairs(aside) do
        child:cancel("the end")
      end
      return self:verdict()
    end
    if gang.stopping and not gang.stopping.asked then
      local request = gang.stopping
      request.asked = true
      deadline = now + request.grace + (options.after_grace or AFTER_GRACE)
      gang:note("stop", { grace = request.grace, reason = request.reason })
      aside[#aside + 1] = scope:spawn(gang.stop_all, gang, request.grace, request.reason)
    end
    if deadline and now > deadline then
      self:give_up_late(options.after_grace or AFTER_GRACE)
    end
    self:look_for_silence()
    local wait = math.min(30, options.silence or SILENCE)
    if first_seen and not told then
      wait = 0.2
    elseif deadline then
      wait = math.min(wait, math.max(deadline - now + 0.1, LATE_LOOK))
    end
    wait = math.min(wait, self:look_for_stall(now, scope) or wait)
    if gang.remark_at and now >= gang.remark_at then
      gang:remark_together()
    elseif gang.remark_at then
      wait = math.min(wait, gang.remark_at - now + 0.01)
    end
    local ok, problem = pcall(task.timeout, wait, gang.changed.wait, gang.changed)
    if not ok and not err.is(problem, "timeout") then
      error(problem, 0)
    end
    gang.changed = task.event()
  end
end

--- Watches until every member has ended and its log is here; stops the others when one fails.
---@async
---@param gang ciranda.run.Gang
---@return ciranda.run.Cause verdict
function M.until_ended(gang)
  local verdict = watch(gang)
  gang:remark_together()
  return verdict
end

return M
