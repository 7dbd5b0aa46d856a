--- A live run is told to save, and what came of it is looked at: for `autocheckpoint save` and its rehearsal, `drill`.
--
-- The stop goes to the guards on the workers, so it does not matter whether the run's own runner is there: when it is,
-- it sees its command end; when it is not, what happened is written into the journal here. A drill by a maintenance
-- event (drill_event.lua) stops nobody itself.
local attempts = require("ciranda.run.attempt")
local checkpoint = require("ciranda.run.checkpoint")
local clock = require("ciranda.io.clock")
local drill_event = require("ciranda.run.drill_event")
local err = require("ciranda.io.error")
local gangs = require("ciranda.run.gang")
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local leases = require("ciranda.run.lease")
local nodeset = require("ciranda.provider.nodeset")
local report = require("ciranda.run.report")
local signals = require("ciranda.fleet.signals")
local task = require("ciranda.task")

local M = {}

--- Seconds that a worker has to save, by the cause.
M.GRACE = require("ciranda.run.notices").GRACE

--- Steps that pass until all processes stand at the one they have agreed on: the largest that any has reached, plus
--- one, and one more that is under way.
local SYNC_STEPS = 2
--- Seconds between two looks of XLA's notifier at its flag (xla/tsl/distributed_runtime/preemption).
local NOTIFIER_POLL = 1
--- Seconds between two looks at the disk while a save is awaited.
local LOOK_EVERY = 1

---@class ciranda.drill.Options
---@field run string
---@field progress ciranda.cli.Progress
---@field connect_options table? for `fleet.new`
---@field directory string? where COMMAND saves; else what the run was started with
---@field step_of (fun(name: string): integer?)? the step in the name of a finished checkpoint
---@field take boolean? as for `attach`

---@class ciranda.drill.Session
---@field last table the attempt as the journal has it
---@field fleet ciranda.Fleet
---@field private gang ciranda.run.Gang
local Session = {}
Session.__index = Session

--- The run's journal when no other runner has it.
local function journal_of(options)
  local ok, journal = pcall(journals.open, options.run, { take = options.take })
  if ok then
    return journal
  elseif err.is(journal, "busy") then
    return nil
  end
  error(journal, 0)
end

--- A live run.
---@async
---@param options ciranda.drill.Options
---@return ciranda.drill.Session to be closed
-- Raises "not_found" when there is no such run or nothing of it is running, "usage" when nobody says where it saves.
function M.open(options)
  local last = known.find(options.run, "autocheckpoint")
  local directory = options.directory or last.checkpoint_directory or checkpoint.directory_in(last.command)
  if not directory then
    err.raise({
      code = "usage",
      op = "autocheckpoint",
      target = options.run,
      message = "where does COMMAND save? Give --CHECKPOINT_DIR: a save is decided by looking there",
    })
  end
  local session = setmetatable({
    options = options,
    last = last,
    directory = directory,
    look = { base = last.directory, step_of = options.step_of },
    rows = {},
    fleet = known.fleet(last, options.connect_options or {}),
  }, Session)
  local ok, problem = pcall(session.join, session)
  if not ok then
    session:close()
    error(problem, 0)
  end
  return session
end

--- Finds the attempt on every worker, and where its log ends now.
---@private
function Session:join()
  local last = self.last
  self.gang = gangs.new({
    fleet = self.fleet,
    run = self.options.run,
    id = last.attempt,
    command = last.command,
    directory = last.directory,
    guard = attempts.guard(),
    on_bytes = function(worker, bytes)
      self:read_log(worker, bytes)
    end,
    on_outcome = function(outcome)
      self.rows[outcome.worker].outcome = outcome
      self:show()
    end,
  })
  local running, sizes = 0, {}
  task.map(self.gang.members, function(member)
    local status = member.attempt:status()
    running = running + ((status.state == "running" or status.state == "stopping") and 1 or 0)
    local record = type(status.record) == "table" and status.record or status
    sizes[member.worker] = math.tointeger(record.log_bytes) or 0
    self.rows[member.worker] = { tail = "" }
  end)
  if running == 0 then
    err.raise({
      code = "not_found",
      op = "autocheckpoint",
      target = self.options.run,
      message = ("nothing of run %s is running on its workers"):format(self.options.run),
    })
  end
  self.gang:rejoin(function(worker)
    return sizes[worker]
  end)
end

--- Notes the step at which a worker says that it saves and stops.
---@private
function Session:read_log(worker, bytes)
  local row = self.rows[worker]
  local text = row.tail .. bytes
  local cut = text:match("^.*\n()") or 1
  local step = checkpoint.sync_point(text:sub(1, cut - 1))
  row.tail = text:sub(cut):sub(-4096)
  if step and not row.sync_point then
    row.sync_point, row.synced_after = step, self.asked_at and clock.now() - self.asked_at
    self:show()
  end
end

--- The state of the stop, workers of one state together.
---@private
function Session:show()
  if not self.asked_at then
    return
  end
  local rows = {}
  for place, member in ipairs(self.gang.members) do
    local row = self.rows[member.worker]
    rows[place] = { worker = member.worker, ended = row.outcome ~= nil, synced = row.sync_point ~= nil }
  end
  self.options.progress:status(report.stop_state("Saving", rows, clock.now() - self.asked_at))
end

---@class ciranda.drill.Saved
---@field saved boolean decided by looking at the disk
---@field step integer? the newest step on disk
---@field took number? seconds from the request to the end of the last worker
---@field seen_after number? seconds until a new step was first seen on disk
---@field grace number
---@field synced integer? the step at which the workers said that they stop, the largest of them
---@field disagree boolean? they named different ones
---@field killed ciranda.Worker[] did not end within the grace
---@field running ciranda.Worker[] had not ended when the watch over a maintenance event did
---@field lost ciranda.Worker[]
---@field text string one line

--- What is seen on disk first while the stop is under way; nil when nothing new comes.
---@private
---@return fun(): boolean
function Session:watch_disk(before)
  local one = { self.fleet:workers()[1] }
  local part = self.fleet:select(nodeset.fold(one))
  local base = checkpoint.newest(before.listing)
  return function()
    local ok, listing = pcall(checkpoint.look, part, self.directory, self.look)
    if not ok and err.is_fatal(listing) then
      error(listing, 0)
    end
    local step = ok and checkpoint.newest(listing)
    return step ~= nil and step ~= false and (base == nil or step > base)
  end
end

--- Tells every worker to save and stop, waits for the end, looks at the disk.
---@async
---@param grace number seconds between TERM and KILL
---@param reason string
---@return ciranda.drill.Saved
function Session:save(grace, reason)
  return self:observe(grace, "interrupted", function()
    self.gang:stop(grace, reason)
    return self.gang:watch()
  end)
end

--- Has the API send workers a maintenance event, waits for the end that it brings, looks at the disk.
---@async
---@param grace number seconds from the notice on the worker
---@param set string? who is to see it: a node set, one worker a slice; the first worker by default
---@return ciranda.drill.Saved
-- Raises what `drill_event.act` raises: nothing has been done then, but for "timeout".
function Session:save_by_event(grace, set)
  return self:observe(grace, "preempted", function(journal)
    self.event = drill_event.act(self, grace, set, journal == nil)
    return self.event.verdict
  end)
end

--- Looks at the disk, lets `act` bring about the end, looks again.
---@private
---@param kind string what an end is in the journal when it is written here
---@param act fun(journal: ciranda.Journal?): ciranda.run.Cause?
---@return ciranda.drill.Saved
function Session:observe(grace, kind, act)
  local before = checkpoint.before(self.fleet, self.directory, self.look)
  local journal <close> = journal_of(self.options)
  self.gang.options.journal = journal
  local seen_after, verdict
  self.asked_at = clock.now()
  do
    local scope <close> = task.scope()
    local is_there = self:watch_disk(before)
    local watching = scope:spawn(function()
      while not is_there() do
        task.sleep(LOOK_EVERY)
        self:show()
      end
      seen_after = clock.now() - self.asked_at
    end)
    verdict = act(journal)
    watching:cancel("the end")
  end
  local result = {
    grace = grace,
    killed = {},
    running = {},
    lost = {},
    seen_after = seen_after,
  }
  for _, row in pairs(self.rows) do
    if row.sync_point then
      result.disagree = result.disagree or result.synced ~= nil and result.synced ~= row.sync_point
      result.synced = math.max(result.synced or 0, row.sync_point)
    end
  end
  local after = before:after(result.synced)
  result.saved, result.step = after.saved, after.step
  for _, member in ipairs(self.gang.members) do
    local outcome = member.outcome
    if not outcome then
      table.insert(result.running, member.worker)
    elseif outcome.lost then
      -- After an event the machine restarts as soon as COMMAND has ended: its record may not be written by then.
      if not (self.event and after.saved and self.rows[member.worker].sync_point) then
        table.insert(result.lost, member.worker)
      end
    elseif outcome.killed then
      table.insert(result.killed, member.worker)
    end
    result.took = math.max(result.took or 0, outcome and outcome.took or 0)
  end
  result.text = checkpoint.describe(after, self.directory)
  if after.saved and #result.killed > 0 then
    result.text = ("%s, but %s went on after it and had to be killed: saved, still running"):format(
      result.text,
      nodeset.fold(result.killed)
    )
  end
  if journal then
    if after.saved then
      journal:append("saved", { attempt = self.last.attempt, step = after.step })
    end
    local status = 0
    if verdict then
      status = verdict.first and verdict.status or signals.STOPPED.SIGTERM
      journal:append("attempt_end", { attempt = self.last.attempt, status = status, kind = kind })
    end
    -- The workers were that runner's; unless the command goes on they are given back at the end.
    self.lease = verdict and leases.new(self.options.run, journal)
    journal:close(status, verdict and kind or "interrupted")
  end
  return result
end

--- A line a worker on how the stop went.
---@return string[]
function Session:table_lines()
  local lines = { ("%-20s %-10s %-12s %s"):format("WORKER", "SYNC STEP", "ENDED AFTER", "STATUS") }
  for _, member in ipairs(self.gang.members) do
    local row, outcome = self.rows[member.worker], member.outcome
    lines[#lines + 1] = ("%-20s %-10s %-12s %s"):format(
      nodeset.fold({ member.worker }),
      row.sync_point and tostring(row.sync_point) or "-",
      outcome and outcome.took and ("%.1f s"):format(outcome.took) or "-",
      not outcome and "still running"
        or outcome.lost and "lost: " .. outcome.lost
        or outcome.killed and "killed: the grace was over"
        or tostring(outcome.code or outcome.signal and 128 + outcome.signal)
    )
  end
  return lines
end

--- Gives the workers back that nobody else has now, and closes the connections.
function Session:close()
  if self.lease then
    self.lease:release(leases.links_of(self.fleet))
  end
  self.fleet:close()
end

Session.__close = Session.close

-- The rehearsal -----------------------------------------------------------------------------------------------------

---@class ciranda.drill.Estimate all in seconds
---@field step number? of the slowest worker, from its log
---@field agree number? until all stand at the agreed step
---@field write number?
---@field commit number
---@field total number? nil when the step time is not known
---@field bytes integer? a host's part of the newest checkpoint, if all hosts write to one directory

--- The time of a step as a log has it: `completed step: 12, seconds: 0.5, ...`. The median, since one of them may have
--- been compiled.
---@param text string
---@return number? seconds
function M.step_time(text)
  local times = {}
  for seconds in text:gmatch("completed step: %d+, seconds: ([%d.]+)") do
    times[#times + 1] = tonumber(seconds)
  end
  table.sort(times)
  return times[(#times + 1) // 2]
end
--- How long a save should take, from what can be seen of the run now.
---@async
---@param options { bandwidth: number, commit: number, step_time: number? } bytes a second and host; seconds
---@return ciranda.drill.Estimate
function Session:estimate(options)
  local estimate = { step = options.step_time, commit = options.commit }
  if not estimate.step then
    local path = (".ciranda/%s/%s/log"):format(self.options.run, self.last.attempt)
    for _, result in ipairs(self.fleet:run("tail -c 4096 " .. path, { timeout = 30 })) do
      local seconds = not result.err and M.step_time(result.stdout or "")
      if seconds then
        estimate.step = math.max(estimate.step or 0, seconds)
      end
    end
  end
  local listing = checkpoint.look(self.fleet, self.directory, self.look)
  estimate.bytes = checkpoint.size(self.fleet, self.directory, checkpoint.newest(listing), self.look)
  estimate.write = estimate.bytes and estimate.bytes / options.bandwidth
  if estimate.step then
    estimate.agree = estimate.step * SYNC_STEPS + NOTIFIER_POLL
    estimate.total = estimate.agree + (estimate.write or 0) + estimate.commit
  end
  return estimate
end

--- The arithmetic, for a person.
---@param estimate ciranda.drill.Estimate
---@param bandwidth number
---@param grace number
---@return string
function M.arithmetic(estimate, bandwidth, grace)
  local write = estimate.bytes
      and ("%.1f s to write (%.3g MB a host at %.3g MB/s)"):format(
        estimate.write,
        estimate.bytes / 1e6,
        bandwidth / 1e6
      )
    or "? s to write (no earlier checkpoint to measure)"
  if not estimate.total then
    return (
      "A save should take: ? s (no step time in the logs; --STEP_TIME gives it) + %s + %.1f s commit; "
      .. "the grace is %g s"
    ):format(write, estimate.commit, grace)
  end
  return (
    "A save should take: %d steps of %.3g s + %g s notifier + %s + %.1f s commit = %.1f s; "
    .. "the grace is %g s"
  ):format(SYNC_STEPS, estimate.step, NOTIFIER_POLL, write, estimate.commit, estimate.total, grace)
end

--- Has the same command go on, until it has shown at which step it begins: see `ciranda.run.drill_resume`.
---@async
---@param seconds number how long to wait for a step
---@return ciranda.drill.Resumed
function Session:resume(seconds)
  return require("ciranda.run.drill_resume").resume(self, seconds)
end

---@class ciranda.drill.Verdict
---@field ok boolean
---@field problems string[] why not
---@field saved ciranda.drill.Saved
---@field resumed ciranda.drill.Resumed?

--- What the drill has shown. Pure.
---@param saved ciranda.drill.Saved
---@param resumed ciranda.drill.Resumed?
---@return ciranda.drill.Verdict
function M.judge(saved, resumed)
  local problems = {}
  local function say(format, ...)
    problems[#problems + 1] = format:format(...)
  end
  if not saved.saved then
    say("not saved: nothing was saved after the signal")
  elseif saved.disagree then
    say("the workers stopped at different steps")
  end
  if #(saved.running or {}) > 0 then
    say("%s had not ended long after the grace of %g s", nodeset.fold(saved.running), saved.grace)
  end
  if #saved.killed > 0 then
    say("%s did not end within the grace of %g s", nodeset.fold(saved.killed), saved.grace)
  elseif saved.took and saved.took > saved.grace then
    say("it took %.1f s, longer than the grace of %g s", saved.took, saved.grace)
  end
  if #saved.lost > 0 then
    say("%s was lost", nodeset.fold(saved.lost))
  end
  if resumed then
    -- Where nothing was saved, what it should have gone on from is the step at which it stopped.
    local from = saved.saved and saved.step or saved.synced
    if not resumed.first then
      say(
        "the command was started again and did no step%s",
        resumed.ended and ": it ended with status " .. resumed.ended.status or " in time; it is left running"
      )
    elseif resumed.disagree then
      say("the workers resumed at different steps")
    elseif from and resumed.first ~= from + 1 then
      say(
        "it resumed at step %d, not at %d, the one after the step %s",
        resumed.first,
        from + 1,
        saved.saved and "saved" or "at which it stopped"
      )
    end
  end
  return { ok = #problems == 0, problems = problems, saved = saved, resumed = resumed }
end

return M
