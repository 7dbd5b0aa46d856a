--- A live run is told to save, and what came of it is looked at: for `autocheckpoint save` and its rehearsal, `drill`.
--
-- The stop goes to the guards on the workers, so it does not matter whether the run's own runner is there: when it is,
-- it sees its command end; when it is not, what happened is written into the journal here.
local attempts = require("ciranda.run.attempt")
local checkpoint = require("ciranda.run.checkpoint")
local err = require("ciranda.io.error")
local gangs = require("ciranda.run.gang")
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local launch = require("ciranda.run.launch")
local nodeset = require("ciranda.provider.nodeset")
local report = require("ciranda.run.report")
local task = require("ciranda.task")
local uv = require("luv")

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
--- Once a process has shown where it resumes, seconds the others get to say the same.
local COMPANY = 5
--- Seconds the run's own runner gets to see the end and leave.
local RUNNER_LEAVES = 60

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

---@return number seconds on a clock that only grows
local function now()
  return uv.hrtime() / 1e9
end

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
    row.sync_point, row.synced_after = step, self.asked_at and now() - self.asked_at
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
  self.options.progress:status(report.stop_state("Saving", rows, now() - self.asked_at))
end

---@class ciranda.drill.Saved
---@field saved boolean decided by looking at the disk
---@field step integer? the newest step on disk
---@field took number? seconds from the request to the end of the last worker
---@field seen_after number? seconds until a new step was first seen on disk
---@field grace number
---@field killed ciranda.Worker[] did not end within the grace
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
    if not ok and (not err.is(listing) or err.is(listing, "cancelled")) then
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
  local before = checkpoint.before(self.fleet, self.directory, self.look)
  local journal <close> = journal_of(self.options)
  self.gang.options.journal = journal
  local seen_after, verdict
  self.asked_at = now()
  self.gang:stop(grace, reason)
  do
    local scope <close> = task.scope()
    local is_there = self:watch_disk(before)
    local watching = scope:spawn(function()
      while not is_there() do
        task.sleep(LOOK_EVERY)
        self:show()
      end
      seen_after = now() - self.asked_at
    end)
    verdict = self.gang:watch()
    watching:cancel("the end")
  end
  local sync_point
  for _, row in pairs(self.rows) do
    if row.sync_point then
      sync_point = math.max(sync_point or 0, row.sync_point)
    end
  end
  local after = before:after(sync_point)
  local result = {
    saved = after.saved,
    step = after.step,
    grace = grace,
    killed = {},
    lost = {},
    seen_after = seen_after,
  }
  for _, member in ipairs(self.gang.members) do
    local outcome = member.outcome
    if outcome.lost then
      table.insert(result.lost, member.worker)
    elseif outcome.killed then
      table.insert(result.killed, member.worker)
    end
    result.took = math.max(result.took or 0, outcome.took or 0)
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
    journal:append("attempt_end", {
      attempt = self.last.attempt,
      status = verdict.first and verdict.status or 143,
      kind = "interrupted",
    })
    journal:close(0, "interrupted")
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
      outcome.took and ("%.1f s"):format(outcome.took) or "-",
      outcome.lost and "lost: " .. outcome.lost
        or outcome.killed and "killed: the grace was over"
        or tostring(outcome.code or outcome.signal and 128 + outcome.signal)
    )
  end
  return lines
end

--- Closes the connections.
function Session:close()
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

--- Waits until the run's own runner has seen the end and left.
local function wait_for_runner(run)
  local deadline = now() + RUNNER_LEAVES
  while true do
    local ok, journal = pcall(journals.open, run)
    if ok then
      journal:close(0, "interrupted")
      return
    elseif not err.is(journal, "busy") or now() > deadline then
      error(journal, 0)
    end
    task.sleep(0.5)
  end
end

--- Does an event come within so many seconds?
---@param event ciranda.task.Event
---@param seconds number
---@return boolean
local function comes(event, seconds)
  local ok, problem = pcall(task.timeout, seconds, event.wait, event)
  if not ok and not err.is(problem, "timeout") then
    error(problem, 0)
  end
  return ok
end

---@class ciranda.drill.Resumed
---@field first integer? the first step that was done
---@field disagree boolean workers began at different steps
---@field ended ciranda.run.LaunchResult? the command ended before it had done a step

--- Starts the same command again in its directory, until it has shown at which step it begins; then leaves it alone.
---@async
---@param seconds number how long to wait for a step
---@return ciranda.drill.Resumed
function Session:resume(seconds)
  local last, options = self.last, self.options
  wait_for_runner(options.run)
  local first, tails, resumed, handler = {}, {}, { disagree = false }, nil
  local seen, all = task.event(), task.event()
  local count = 0
  local function on_bytes(worker, bytes)
    if first[worker] then
      return
    end
    tails[worker] = ((tails[worker] or "") .. bytes):sub(-65536)
    local step = math.tointeger(tonumber(tails[worker]:match("completed step: (%d+)[^%d]")))
    if step then
      first[worker] = step
      count = count + 1
      resumed.disagree = resumed.disagree or resumed.first ~= nil and resumed.first ~= step
      resumed.first = resumed.first or step
      seen:set()
      if count == #self.fleet then
        all:set()
      end
    end
  end
  local scope <close> = task.scope()
  local waiting = scope:spawn(function()
    if comes(seen, seconds) then
      comes(all, COMPANY)
    end
    if handler then
      handler("SIGHUP", 1)
    end
  end)
  local result = launch.run({
    fleet = self.fleet,
    run = options.run,
    recipe = "autocheckpoint",
    command = last.command,
    directory = last.directory,
    connection = last.connection,
    use_existing = true,
    progress = options.progress,
    json = true,
    on_interrupt = function(given)
      handler = given
      return function()
        handler = nil
      end
    end,
    checkpoint_directory = self.directory,
    grace = last.grace,
    failure_grace = last.failure_grace,
    on_bytes = on_bytes,
  })
  waiting:cancel("the end")
  if result.kind ~= "detached" then
    resumed.ended = result
  end
  return resumed
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
    say("nothing was saved")
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
    if not resumed.first then
      say(
        "the command was started again and did no step%s",
        resumed.ended and ": it ended with status " .. resumed.ended.status or " in time"
      )
    elseif resumed.disagree then
      say("the workers resumed at different steps")
    elseif saved.step and resumed.first ~= saved.step + 1 then
      say("it resumed at step %d, not at %d, the one after the step saved", resumed.first, saved.step + 1)
    end
  end
  return { ok = #problems == 0, problems = problems, saved = saved, resumed = resumed }
end

return M
