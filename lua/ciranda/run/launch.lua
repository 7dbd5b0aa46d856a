--- A run from its fleet to its verdict: journal, staging, start, logs, signals, the end and what is said of it.
--
-- Recipes that run one command on every worker differ in how they come by fleet, bundle and command; from there on
-- they are the same, and that is here. `attach` takes up a run whose runner is gone.
local attempt = require("ciranda.run.attempt")
local cause = require("ciranda.run.cause")
local checkpoint = require("ciranda.run.checkpoint")
local err = require("ciranda.io.error")
local gangs = require("ciranda.run.gang")
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local logs_of = require("ciranda.run.logs")
local nodeset = require("ciranda.fleet.nodeset")
local output = require("ciranda.run.output")
local report = require("ciranda.run.report")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Exit statuses when the runner itself was told to stop, and when it leaves the job alone.
local STOPPED = { SIGINT = 130, SIGTERM = 143 }
local DETACHED = 129

--- Seconds that looking at the checkpoints may hold up a signal.
local LOOK_BEFORE = 5

--- States of a node after which its worker was preempted, and seconds that asking for the state may take.
local PREEMPTED = { PREEMPTED = true, TERMINATED = true, gone = true }
local ASK_NODE = 15

--- Seconds between two lines on how staging goes.
local STATUS_EVERY = 2

--- Log lines shown of the worker that failed first.
local TAIL_LINES = 20

---@class ciranda.run.LaunchOptions
---@field fleet ciranda.Fleet
---@field run string
---@field command string
---@field directory string? where it runs, below the login directory (the run's name)
---@field bundle ciranda.archive.Manifest?
---@field use_existing boolean?
---@field environment table<string, string>?
---@field recipe string
---@field arguments string[]?
---@field connection table? what `attach` needs to connect again: user, port, internal_ip, key
---@field progress ciranda.cli.Progress
---@field json boolean? standard output belongs to the JSON lines
---@field on_interrupt fun(handler: fun(signal: string, count: integer): boolean?): fun()
---@field show string? node set whose lines are shown
---@field checkpoint_directory string?
---@field grace number? seconds a stop by the user gives (300)
---@field failure_grace number? (30)
---@field stage_timeout number? (600)
---@field node_state (fun(worker: ciranda.Worker): string)? the state of a worker's node, "gone" when there is none
---@field on_bytes fun(worker: ciranda.Worker, bytes: string)? a piece of a worker's log
---@field success string? the line that says that all is well

---@class ciranda.run.LaunchResult
---@field status integer
---@field kind "done"|"user"|"infra"|"preempted"|"staging"|"deadline"|"interrupted"|"detached"
---@field message string the last line

--- The state of one launch.
---@class ciranda.run.Launch
local Launch = {}
Launch.__index = Launch

---@param format string
function Launch:say(format, ...)
  self.options.progress:say(format, ...)
end

--- Waits until `fn` is done or a signal asks for something; returns what it asks for.
---@private
---@param finished ciranda.task.Event
---@return "finished"|"stop"|"detach"
function Launch:wait(finished)
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
function Launch:signalled(name)
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

--- Takes note of the steps that the logs speak of, and of a stop that the command was told of by others.
---@private
function Launch:count_steps(worker, bytes)
  local text = (self.step_partial[worker] or "") .. bytes
  local cut = text:match("^.*\n()") or 1
  local lines = text:sub(1, cut - 1)
  local step = checkpoint.last_step(lines)
  if step and step > (self.last_step or -1) then
    self.last_step = step
  end
  self.sync_point = checkpoint.sync_point(lines) or self.sync_point
  self.told_to_stop = self.told_to_stop or checkpoint.stopped_by_signal(lines)
  self.step_partial[worker] = text:sub(cut):sub(-4096)
end

--- Looks at the checkpoints before a signal; a look that fails must not keep the signal back.
---@private
---@return ciranda.checkpoint.Watch?
function Launch:look_before()
  local directory = self.options.checkpoint_directory
  if not directory then
    return nil
  end
  local ok, watch = pcall(checkpoint.before, self.options.fleet, directory, {
    base = self.directory,
    timeout = LOOK_BEFORE,
  })
  if ok then
    return watch
  elseif not err.is(watch) or err.is(watch, "cancelled") then
    error(watch, 0)
  end
  self:say("The checkpoints could not be looked at before the signal: %s", tostring(watch))
  return nil
end

--- Did the command stop because somebody else sent it SIGTERM: the platform before maintenance, or a person on a
--- worker? Its exit status does not say it; a job that trained on after its sync point was not stopped by it.
---@private
---@return boolean
function Launch:was_preempted()
  return not self.stopping
    and (self.told_to_stop or self.sync_point ~= nil and self.sync_point >= (self.last_step or 0))
end

--- The lines on what is on disk after the end.
---@private
---@param watch ciranda.checkpoint.Watch? what was there before the signal
function Launch:tell_checkpoint(watch)
  local directory = self.options.checkpoint_directory
  if not directory then
    if self.last_step or self.stopping then
      self:say(
        "Checkpoints: not looked at, since nobody said where they are (--CHECKPOINT_DIR)%s",
        self.last_step and ("; the logs had reached step %d"):format(self.last_step) or ""
      )
    end
    return
  end
  local ok, problem = pcall(function()
    if watch then
      local said = watch:after(self.sync_point)
      self:say("Checkpoint: %s", checkpoint.describe(said, directory, self.last_step))
      if said.saved then
        self.journal:append("saved", { attempt = self.id, step = said.step })
      end
      return
    end
    local listing = checkpoint.look(self.options.fleet, directory, { base = self.directory })
    if listing.answered == 0 then
      self:say("Last step on disk: nobody could be asked about %s", directory)
      return
    end
    local step = checkpoint.newest(listing)
    if self:was_preempted() and self.sync_point and step == self.sync_point then
      self:say("Checkpoint: saved: step %d is on disk in %s", step, directory)
      self.journal:append("saved", { attempt = self.id, step = step })
      return
    end
    local lost = self.last_step and self.last_step - (step or -1)
    self:say(
      "Last step on disk: %s in %s%s",
      step and tostring(step) or "none",
      directory,
      lost
          and ("; %d step%s lost (the logs had reached step %d)"):format(
            math.max(lost, 0),
            lost == 1 and "" or "s",
            self.last_step
          )
        or ""
    )
  end)
  if not ok then
    if not err.is(problem) or err.is(problem, "cancelled") then
      error(problem, 0)
    end
    self:say("Checkpoint: nobody can say what is in %s: %s", directory, tostring(problem))
  end
end

---@private
function Launch:status_line(gang)
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
function Launch:watch(gang)
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
    before = self:look_before()
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
function Launch:ask_about_lost(verdict)
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
  failed.lost = ("%s; its node %s is %s"):format(failed.lost, failed.worker.node or "", state)
  if PREEMPTED[state] then
    verdict.kind = "preempted"
  end
end

--- Says how it ended.
---@private
---@param verdict ciranda.run.Cause
---@param before ciranda.checkpoint.Watch?
---@return ciranda.run.LaunchResult
function Launch:conclude(verdict, before)
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
  local preempted = self:was_preempted()
  if failed or self.stopping or preempted then
    self:tell_checkpoint(before)
  end
  if failed then
    self:say("Main command finished with errors, check the logs located in: %s/", directory)
    return {
      status = verdict.status,
      kind = preempted and "preempted" or verdict.kind,
      message = ("%s: exit status %s, from slice %d worker %d"):format(
        preempted and "preempted" or verdict.kind,
        cause.describe_status(failed),
        failed.worker.slice,
        failed.worker.index
      ),
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
  elseif #verdict.stopped > 0 then
    -- Another runner's attempt took the workers.
    return {
      status = 1,
      kind = "infra",
      message = ("infra: %s were stopped from elsewhere; logs located in: %s/"):format(
        nodeset.fold(self.options.fleet:workers()),
        directory
      ),
    }
  end
  if preempted then
    return {
      status = STOPPED.SIGTERM,
      kind = "preempted",
      message = (
        "preempted: a SIGTERM that did not come from here stopped the command%s, exit status %d; the same "
        .. "command goes on from its last checkpoint"
      ):format(self.sync_point and (" at step %d"):format(self.sync_point) or "", STOPPED.SIGTERM),
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
function Launch:try(kind, consequence, step, ...)
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
  self.result = {
    status = status,
    kind = kind,
    message = ("%s: %s, exit status %d"):format(kind, consequence, status),
  }
  return false
end

--- Watches to the end and writes it down.
---@private
---@return ciranda.run.LaunchResult
function Launch:finish(gang)
  local result = self:watch(gang)
  self.result = result
  if result.kind ~= "detached" then
    self.journal:append("attempt_end", { attempt = self.id, status = result.status, kind = result.kind })
  end
  return result
end

---@private
---@return ciranda.run.Gang
function Launch:make_gang()
  local options = self.options
  return gangs.new({
    fleet = options.fleet,
    run = options.run,
    id = self.id,
    command = options.command,
    directory = self.directory,
    guard = attempt.guard(),
    journal = self.journal,
    environment = options.environment,
    bundle = options.bundle,
    use_existing = options.use_existing,
    stage_timeout = options.stage_timeout,
    failure_grace = options.failure_grace,
    on_change = function(gang)
      self:status_line(gang)
    end,
    on_bytes = function(worker, bytes)
      self.logs:take(worker, bytes)
      self:count_steps(worker, bytes)
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
function Launch:open_logs()
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
  })
  self.logs_directory = logs_of.link_directory(options.run)
end

---@private
function Launch:close()
  if self.remove_handler then
    self.remove_handler()
  end
  if self.logs then
    self.logs:close()
  end
  if self.output then
    self.output:close()
  end
  self.journal:close(self.result and self.result.status, self.result and self.result.kind)
end

Launch.__close = Launch.close

--- A worker as the journal keeps it: what `attach` needs to find it again.
---@param worker ciranda.Worker
---@return table
local function remembered(worker)
  local kept = {}
  for name, value in pairs(worker) do
    if type(value) ~= "table" then
      kept[name] = value
    end
  end
  kept.pins = worker.pins and table.move(worker.pins, 1, #worker.pins, 1, {})
  return kept
end

---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@param id string
---@return ciranda.run.Launch
local function new(options, journal, id)
  local launch = setmetatable({
    options = options,
    journal = journal,
    id = id,
    directory = options.directory or options.run,
    request = {},
    wake = task.event(),
    step_partial = {},
    running = false,
  }, Launch)
  launch.remove_handler = options.on_interrupt(function(name)
    return launch:signalled(name)
  end)
  return launch
end

--- Runs a command on every worker of a fleet, from staging to the verdict.
---@param options ciranda.run.LaunchOptions
---@return ciranda.run.LaunchResult
-- Raises "busy" when another runner has the run.
function M.run(options)
  local journal = journals.open(options.run, { recipe = options.recipe, arguments = options.arguments })
  local launch <close> = new(options, journal, journal:new_attempt_id())
  local workers = {}
  for place, worker in ipairs(options.fleet:workers()) do
    workers[place] = remembered(worker)
  end
  journal:append("attempt", {
    attempt = launch.id,
    command = options.command,
    directory = launch.directory,
    workers = workers,
    connection = options.connection,
    checkpoint_directory = options.checkpoint_directory,
    grace = options.grace,
    failure_grace = options.failure_grace,
  })
  local gang = launch:make_gang()
  if not launch:try("staging", "nothing was started", gang.stage, gang) then
    return launch.result
  end
  launch:open_logs()
  options.progress:say("Running main command, logs located in: %s/", launch.logs_directory)
  launch.running = true
  if not launch:try("infra", "those that were started were stopped", gang.go, gang) then
    return launch.result
  end
  return launch:finish(gang)
end

---@class ciranda.run.AttachOptions
---@field run string
---@field connect_options table for `fleet.new`: keys, agent, ...
---@field progress ciranda.cli.Progress
---@field json boolean?
---@field on_interrupt fun(handler: function): fun()
---@field show string?
---@field grace number? seconds a stop by the user gives (what the run was started with)
---@field take boolean? take the run from a runner on another machine that never said goodbye

--- Takes up a run whose runner is gone: follows its last attempt to the end.
---@param options ciranda.run.AttachOptions
---@return ciranda.run.LaunchResult
-- Raises "not_found" when there is no such run or nothing of it is running; "busy" when its runner is alive.
function M.attach(options)
  local last = known.find(options.run, "attach")
  local fleet <close> = known.fleet(last, options.connect_options)
  local journal = journals.open(options.run, { take = options.take })
  local launch <close> = new({
    fleet = fleet,
    run = options.run,
    command = last.command,
    directory = last.directory,
    progress = options.progress,
    json = options.json,
    on_interrupt = options.on_interrupt,
    show = options.show,
    checkpoint_directory = last.checkpoint_directory,
    grace = options.grace or last.grace,
    failure_grace = last.failure_grace,
    success = "Finished successfully.",
  }, journal, last.attempt)
  launch:open_logs()
  local gang = launch:make_gang()
  options.progress:say("Taking up run %s, logs located in: %s/", options.run, launch.logs_directory)
  launch.running = true
  gang:rejoin(function(worker)
    return launch.logs:size(worker)
  end)
  launch.result = launch:watch(gang)
  if launch.result.kind ~= "detached" then
    journal:append(
      "attempt_end",
      { attempt = launch.id, status = launch.result.status, kind = launch.result.kind }
    )
  end
  return launch.result
end

return M
