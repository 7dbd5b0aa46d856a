--- One attempt of a run as its runner sees it: staged, started, watched, ended, and what is said of it.
--
-- The gang does the work on the workers; here are the runner's signals, the logs, the lines that a person reads, and
-- the verdict.
local attempt = require("ciranda.run.attempt")
local cause = require("ciranda.run.cause")
local err = require("ciranda.io.error")
local gangs = require("ciranda.run.gang")
local leases = require("ciranda.run.lease")
local logs_of = require("ciranda.run.logs")
local nodeset = require("ciranda.fleet.nodeset")
local output = require("ciranda.run.output")
local report = require("ciranda.run.report")
local steps = require("ciranda.run.steps")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Exit statuses when the runner itself was told to stop, and when it leaves the job alone.
local STOPPED = { SIGINT = 130, SIGTERM = 143 }
local DETACHED = 129

--- States of a node after which its worker was preempted, and seconds that asking for the state may take.
local PREEMPTED = { PREEMPTED = true, TERMINATED = true, gone = true }
local ASK_NODE = 15

--- States of a node whose machines run, and seconds for which an answer about a node stands for all its workers.
local RUNNING = { READY = true, STATE_UNSPECIFIED = true, UNKNOWN = true }
local ANSWER_LASTS = 10

--- Seconds between two lines on how staging goes.
local STATUS_EVERY = 2

--- Up to so many workers every log is followed while it grows; of more, the first one's and those that are shown.
local FOLLOW_ALL = 64

--- Log lines shown of the worker that failed first.
local TAIL_LINES = 20

---@class ciranda.run.Round
---@field options ciranda.run.LaunchOptions
---@field journal ciranda.Journal
---@field id string the attempt's name
---@field directory string where COMMAND runs, below the login directory
---@field running boolean the command has been told to start
---@field result ciranda.run.LaunchResult? once it has ended
---@field private steps ciranda.run.Steps
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
    node_states = {},
    wake = task.event(),
    running = false,
  }, Round)
  round.steps = steps.new({
    fleet = options.fleet,
    directory = options.checkpoint_directory,
    base = round.directory,
    say = function(...)
      round:say(...)
    end,
    on_saved = function(step)
      journal:append("saved", { attempt = id, step = step })
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
---@return "finished"|"stop"|"detach"
function Round:wait(finished)
  while true do
    if finished:is_set() then
      return "finished"
    elseif self.request.detach then
      return "detach"
    elseif self.request.stop and not self.stopping then
      return "stop"
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
--- one leaves, SIGHUP leaves at once. Before the command runs they cancel, as everywhere.
---@private
---@param name string
---@return boolean handled
function Round:signalled(name)
  if not self.running then
    return false
  elseif name == "SIGHUP" or (STOPPED[name] and self.request.stop) then
    self.request.detach = name
  elseif STOPPED[name] then
    self.request.stop = name
  else
    return false
  end
  self.wake:set()
  return true
end

---@private
function Round:status_line(gang)
  if not gang.started then
    -- Called at every step of every worker: the others are looked at only when there may be something to say.
    local now = uv.hrtime() / 1e9
    local due = now - (self.status_at or 0) >= STATUS_EVERY
    local staged = 0
    for _, member in ipairs(gang.members) do
      if member.attempt.phase == "staged" then
        staged = staged + 1
      elseif not due then
        return
      end
    end
    self.status_at = now
    local laggards = gang:laggards("staged")
    self.options.progress:status(
      ("Staging: %d of %d workers%s"):format(
        staged,
        #gang.members,
        laggards ~= "" and "; waiting for " .. laggards or ""
      )
    )
  end
end

--- Watches the gang and obeys the runner's signals.
---@private
---@return ciranda.run.LaunchResult
function Round:watch(gang)
  local scope <close> = task.scope()
  local finished = task.event()
  local verdict
  local watching = scope:spawn(function()
    verdict = gang:watch()
    finished:set()
  end)
  local lines = scope:spawn(function()
    self.logs:show_lines()
  end)
  local screen = scope:spawn(function()
    self.output:run()
  end)
  local before
  while true do
    local what = self:wait(finished)
    if what == "finished" then
      break
    elseif what == "detach" then
      watching:cancel("detached")
      lines:cancel("detached")
      screen:cancel("detached")
      return {
        status = DETACHED,
        kind = "detached",
        message = ("Detached: the job goes on on the workers. `ciranda attach %s` takes it up again."):format(
          self.options.run
        ),
      }
    end
    self.stopping = self.request.stop
    local grace = self.options.grace or 300
    self:say(
      "%s: TERM to every worker, KILL after %g s; once more to leave at once (the stop goes on)",
      self.stopping,
      grace
    )
    before = self.steps:look_before()
    gang:stop(grace, self.stopping .. " to the runner")
  end
  lines:cancel("the end")
  screen:cancel("the end")
  self.output:flush()
  return self:conclude(verdict, before)
end

--- Asks the cloud about the node of a worker that was lost: one that was preempted is no failure of the machine.
---@private
---@param verdict ciranda.run.Cause
function Round:ask_about_lost(verdict)
  local failed = verdict.first
  if not failed or not failed.lost or not self.options.node_state then
    return
  end
  local ok, state = pcall(task.timeout, ASK_NODE, self.options.node_state, failed.worker)
  if not ok then
    if not err.is(state) or err.is(state, "cancelled", "misuse", "internal") then
      error(state, 0)
    end
    return
  end
  if not failed.lost:find("its node", 1, true) then
    failed.lost = ("%s; its node %s is %s"):format(failed.lost, failed.worker.node or "", state)
  end
  if PREEMPTED[state] then
    verdict.kind = "preempted"
  end
end

--- The verdict on a gang that was stopped, and not from here.
---@private
---@param verdict ciranda.run.Cause
---@param saved integer? the step that is on disk since the stop
---@return ciranda.run.LaunchResult
function Round:stopped_elsewhere(verdict, saved)
  local reasons = {}
  for _, outcome in ipairs(verdict.stopped) do
    reasons[outcome.reason or ""] = outcome
  end
  local who = nodeset.fold(self.options.fleet:workers())
  if reasons[attempt.TAKEN] then
    return {
      status = 1,
      kind = "infra",
      final = true,
      reason = "another attempt took the workers",
      message = ("infra: %s were taken by another attempt; logs located in: %s/"):format(
        who,
        self.logs_directory
      ),
    }
  elseif reasons[attempt.SHUTDOWN] then
    local worker = reasons[attempt.SHUTDOWN].worker
    return {
      status = 1,
      kind = "infra",
      worker = worker,
      reason = ("slice %d worker %d was shut down"):format(worker.slice, worker.index),
      message = ("infra: slice %d worker %d was shut down; logs located in: %s/"):format(
        worker.slice,
        worker.index,
        self.logs_directory
      ),
    }
  end
  local reason = next(reasons)
  local saving = not self.options.checkpoint_directory and ""
    or saved and ("saved step %d, "):format(saved)
    or "not saved, "
  return {
    status = STOPPED.SIGTERM,
    kind = "stopped",
    reason = reason,
    message = ("stopped: by %s, %sexit status %d; logs located in: %s/"):format(
      reason ~= "" and reason or "others",
      saving,
      STOPPED.SIGTERM,
      self.logs_directory
    ),
  }
end

--- Why a worker that does not answer will not come back as it was, by what the cloud says of its node.
---@private
---@param worker ciranda.Worker
---@return string?
function Round:machine_gone(worker)
  local now = uv.hrtime() / 1e9
  local known = self.node_states[worker.node]
  if not known or now - known.at > ANSWER_LASTS then
    local ok, state, address = pcall(task.timeout, ASK_NODE, self.options.node_state, worker)
    if not ok then
      if not err.is(state) or err.is(state, "cancelled", "misuse", "internal") then
        error(state, 0)
      end
      return nil
    end
    -- The address is that of the worker that was asked about.
    known = { at = now, state = state, address = address, worker = worker }
    self.node_states[worker.node] = known
  end
  if not RUNNING[known.state] then
    return ("the machine does not answer, and its node %s is %s"):format(worker.node, known.state)
  elseif known.worker == worker and known.address and known.address ~= worker.internal_address then
    return ("the machine does not answer, and its node %s has others now"):format(worker.node)
  end
  return nil
end

--- Says how it ended.
---@private
---@param verdict ciranda.run.Cause
---@param before ciranda.checkpoint.Watch?
---@return ciranda.run.LaunchResult
function Round:conclude(verdict, before)
  local directory = self.logs_directory
  local failed = verdict.first
  self:ask_about_lost(verdict)
  if failed then
    -- What was named first may have been a consequence of something seen later.
    if self.named and self.named.worker ~= failed.worker then
      self:say("%s", cause.failure_line(failed))
    end
    for _, line in ipairs(report.failure(verdict)) do
      self:say("%s", line)
    end
    for _, line in ipairs(report.tail(failed.worker, self.logs:tail(failed.worker, TAIL_LINES))) do
      self:say("%s", line)
    end
  end
  for _, line in ipairs(report.stopped(verdict)) do
    self:say("%s", line)
  end
  local asked_at
  for _, outcome in ipairs(verdict.stopped) do
    asked_at = math.min(asked_at or math.huge, outcome.stopped_at or math.huge)
  end
  local there, lost = {}, {}
  for _, outcome in ipairs(failed and { failed, table.unpack(verdict.consequences) } or {}) do
    lost[outcome.worker] = outcome.lost ~= nil
  end
  for _, worker in ipairs(self.options.fleet:workers()) do
    there[#there + 1] = not lost[worker] and worker or nil
  end
  local elsewhere = not failed and not self.stopping and #verdict.stopped > 0
  local preempted = not self.stopping and not elsewhere and self.steps:obeyed_a_signal()
  local saved
  if failed or self.stopping or preempted or elsewhere then
    saved = self.steps:tell(before, {
      stopped = self.stopping ~= nil or elsewhere,
      obeyed = preempted,
      since = elsewhere and asked_at or nil,
      there = there,
    })
  end
  if failed then
    self:say("Main command finished with errors, check the logs located in: %s/", directory)
    local kind = preempted and "preempted" or verdict.kind
    local how = ("exit status %s, from slice %d worker %d"):format(
      cause.describe_status(failed),
      failed.worker.slice,
      failed.worker.index
    )
    return {
      status = verdict.status,
      kind = kind,
      final = self.stopping ~= nil,
      worker = failed.worker,
      reason = ("slice %d worker %d%s"):format(
        failed.worker.slice,
        failed.worker.index,
        failed.lost and " lost: " .. failed.lost or ""
      ),
      message = ("%s: %s"):format(kind, how),
    }
  elseif self.stopping then
    return {
      status = STOPPED[self.stopping],
      kind = "interrupted",
      message = ("interrupted: stopped by %s, exit status %d; logs located in: %s/"):format(
        self.stopping,
        STOPPED[self.stopping],
        directory
      ),
    }
  elseif elsewhere then
    return self:stopped_elsewhere(verdict, saved)
  elseif preempted then
    return {
      status = STOPPED.SIGTERM,
      kind = "preempted",
      message = (
        "preempted: a SIGTERM that did not come from here stopped the command%s, exit status %d; the same "
        .. "command goes on from its last checkpoint"
      ):format(
        self.steps.sync_point and (" at step %d"):format(self.steps.sync_point) or "",
        STOPPED.SIGTERM
      ),
    }
  end
  return { status = 0, kind = "done", message = self.options.success or "Finished." }
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
  elseif not err.is(problem) or err.is(problem, "cancelled", "misuse", "internal") then
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

--- Writes down how it ended.
---@private
---@param result ciranda.run.LaunchResult
function Round:ended(result)
  self.result = result
  self.journal:append("attempt_end", {
    attempt = self.id,
    status = result.status,
    kind = result.kind,
    reason = result.reason,
    worker = result.worker and { slice = result.worker.slice, worker = result.worker.index } or nil,
  })
end

--- Watches to the end and writes it down.
---@private
---@return ciranda.run.LaunchResult
function Round:finish(gang)
  local result = self:watch(gang)
  if result.kind ~= "detached" then
    self:ended(result)
  end
  return result
end

--- Whether a worker's log is brought home while it grows.
---@private
---@param worker ciranda.Worker
---@return boolean
function Round:follows(worker)
  local options = self.options
  local how = (options.watch or {}).follow or "auto"
  local workers = options.fleet:workers()
  return how == "all"
    or how == "auto" and #workers <= FOLLOW_ALL
    or options.on_bytes ~= nil
    or worker == workers[1]
    or self.logs:is_shown(worker)
end

---@private
---@return ciranda.run.Gang
function Round:make_gang()
  local options = self.options
  local staging = options.staging or {}
  local watch = options.watch or {}
  return gangs.new({
    fleet = options.fleet,
    run = options.run,
    id = self.id,
    command = options.command,
    directory = self.directory,
    guard = attempt.guard(),
    journal = self.journal,
    environment = options.environment,
    environment_of = options.environment_of,
    machine_gone = options.node_state and function(worker)
      return worker.node and self:machine_gone(worker)
    end,
    bundle = options.bundle,
    use_existing = options.use_existing,
    stage_timeout = options.stage_timeout,
    failure_grace = options.failure_grace,
    lease = leases.new(options.run, self.journal, staging.take),
    setup = staging.setup,
    kill = staging.kill,
    device_check = staging.device_check,
    strict_fingerprint = staging.strict_fingerprint,
    on_note = function(text)
      self:say("%s", text)
    end,
    keep = watch.log_keep,
    leader_only = watch.leader_only,
    stall = watch.stall,
    live = function(worker)
      return self:follows(worker)
    end,
    on_gap = function(worker, from, to)
      self.logs:skip(worker, to)
      self:say(
        "The log of slice %d worker %d: bytes %d to %d are gone, its machine keeps only the end (--LOG_KEEP)",
        worker.slice,
        worker.index,
        from,
        to - 1
      )
    end,
    on_stall = function(stall)
      self:say(
        "No worker has written anything for %.0f s; their guards answer. ciranda stacks %s shows where they wait.",
        stall.seconds,
        options.run
      )
      if options.on_stall then
        options.on_stall(stall)
      end
    end,
    on_change = function(gang)
      self:status_line(gang)
    end,
    on_bytes = function(worker, bytes)
      self.logs:take(worker, bytes)
      self.steps:read(worker, bytes)
      if options.on_bytes then
        options.on_bytes(worker, bytes)
      end
    end,
    on_outcome = function(outcome)
      self.logs:finish(outcome.worker)
    end,
    on_failure = function(outcome)
      self.named = outcome
      self:say("%s", cause.failure_line(outcome))
    end,
  })
end

---@private
function Round:open_logs()
  local options = self.options
  self.output = output.new(1)
  self.logs = logs_of.open({
    directory = ("%s/%s"):format(self.journal.directory, self.id),
    links = logs_of.link_directory(options.run),
    workers = options.fleet:workers(),
    show = options.show,
    raw = not options.json and function(bytes)
      self.output:write(bytes)
    end or nil,
    lines = function(text)
      self:say("%s", (text:gsub("\n$", "")))
    end,
    limit = (options.watch or {}).log_limit,
    on_full = function()
      self:say(
        "The logs here have reached their limit (--LOG_LIMIT): what comes now stays on the workers, where ciranda "
          .. "logs %s --show=... reads it",
        options.run
      )
    end,
  })
  self.logs_directory = logs_of.link_directory(options.run)
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
  local gang = self:make_gang()
  if not self:try("staging", "nothing was started", gang.stage, gang) then
    return self.result
  end
  self:open_logs()
  self:say("Running main command, logs located in: %s/", self.logs_directory)
  self.running = true
  if not self:try("infra", "those that were started were stopped", gang.go, gang) then
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
  return self:finish(gang)
end

--- Takes up what an earlier runner has started, and watches it to the end.
---@async
---@return ciranda.run.LaunchResult
function Round:rejoin()
  self:open_logs()
  local gang = self:make_gang()
  self:say("Taking up run %s, logs located in: %s/", self.options.run, self.logs_directory)
  self.running = true
  gang:rejoin(function(worker)
    return self.logs:size(worker)
  end)
  return self:finish(gang)
end

return M
