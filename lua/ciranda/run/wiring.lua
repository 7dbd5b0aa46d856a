--- Where what a gang tells goes: into the logs, the steps, the hooks, and the lines that a person reads.
local attempt = require("ciranda.run.attempt")
local cause = require("ciranda.run.cause")
local clock = require("ciranda.io.clock")
local gangs = require("ciranda.run.gang")
local leases = require("ciranda.run.lease")
local logs_of = require("ciranda.run.logs")
local node_state = require("ciranda.run.node_state")
local notices = require("ciranda.run.notices")
local output = require("ciranda.run.output")
local report = require("ciranda.run.report")
local task = require("ciranda.task")

local M = {}

--- Seconds between two lines on how staging goes.
local STATUS_EVERY = 2

--- Says how far staging is, or the search for what an earlier runner started.
---@param round ciranda.run.Round
---@param gang ciranda.run.Gang
local function status_line(round, gang)
  local what, phase = "Staging", "staged"
  if gang.started then
    if not round.joining or round.stopping then
      return
    end
    what, phase = "Taking up", "running"
  end
  -- Called at every step of every worker: the others are looked at only when there may be something to say.
  local now = clock.now()
  local due = now - (round.status_at or 0) >= STATUS_EVERY
  local ready = 0
  for _, member in ipairs(gang.members) do
    if member.attempt.phase == phase then
      ready = ready + 1
    elseif not due then
      return
    end
  end
  round.status_at = now
  round.joining = round.joining and ready < #gang.members
  local laggards = gang:laggards(phase)
  local text = ("%s: %d of %d workers%s"):format(
    what,
    ready,
    #gang.members,
    laggards ~= "" and "; waiting for " .. laggards or ""
  )
  round.options.progress:status(text, report.part(text, what, ready, #gang.members))
end

--- Keeps saying how far it is, also while nothing changes: who holds it up is to be seen. Until cancelled.
---@async
---@param round ciranda.run.Round
---@param gang ciranda.run.Gang
function M.keep_status(round, gang)
  while true do
    task.sleep(STATUS_EVERY)
    status_line(round, gang)
  end
end

--- Whether a worker's log is brought home while it grows.
---@param round ciranda.run.Round
---@param worker ciranda.Worker
---@return boolean
local function follows(round, worker)
  local options = round.options
  local workers = options.fleet:workers()
  return logs_of.follows_all((options.watch or {}).follow, #workers)
    or options.on_bytes ~= nil
    or worker == workers[1]
    or round.logs:is_shown(worker)
end

--- The gang of an attempt.
---@param round ciranda.run.Round
---@return ciranda.run.Gang
function M.gang(round)
  local options = round.options
  local staging = options.staging or {}
  local watch = options.watch or {}
  local gang
  gang = gangs.new({
    fleet = options.fleet,
    run = options.run,
    id = round.id,
    command = options.command,
    directory = round.directory,
    guard = attempt.guard(),
    journal = round.journal,
    environment = options.environment,
    environment_of = options.environment_of,
    machine_gone = options.node_state and node_state.gone(options.node_state),
    bundle = options.bundle,
    use_existing = options.use_existing,
    stage_timeout = options.stage_timeout,
    failure_grace = options.failure_grace,
    lease = leases.new(options.run, round.journal, staging.take),
    setup = staging.setup,
    kill = staging.kill,
    device_check = staging.device_check,
    strict_fingerprint = staging.strict_fingerprint,
    on_note = function(text)
      round:say("%s", text)
    end,
    keep = watch.log_keep,
    leader_only = watch.leader_only,
    stall = watch.stall,
    live = function(worker)
      return follows(round, worker)
    end,
    on_gap = function(worker, from, to)
      round.logs:skip(worker, to)
      gang:remark_on(
        worker,
        "bytes of their logs are gone, too",
        ("The log of slice %d worker %d: bytes %d to %d are gone from its machine%s"):format(
          worker.slice,
          worker.index,
          from,
          to - 1,
          watch.log_keep and ", which keeps only the end (--LOG_KEEP)" or ""
        )
      )
    end,
    on_stall = function(stall)
      round:say(
        "No worker has written anything for %.0f s; their guards answer. ciranda stacks %s shows where they wait.",
        stall.seconds,
        options.run
      )
      round:happen("on_stall", {
        seconds = stall.seconds,
        worker = stall.worker,
        text = ("no worker has written anything for %.0f s"):format(stall.seconds),
      })
      if options.on_stall then
        options.on_stall(stall)
      end
    end,
    on_change = function(changed)
      status_line(round, changed)
    end,
    on_bytes = function(worker, bytes)
      round.logs:take(worker, bytes)
      round.steps:read(worker, bytes)
      if options.on_bytes then
        options.on_bytes(worker, bytes)
      end
    end,
    on_outcome = function(outcome)
      round.logs:finish(outcome.worker)
      if outcome.reason == attempt.SHUTDOWN and not gang.stopping then
        gang:stop(notices.GRACE.spot, "the machine of another worker shuts down")
      end
    end,
    on_failure = function(outcome)
      round.named = outcome
      round:say("%s", cause.failure_line(outcome))
      round.logs:name_failure()
      round.failure:set()
    end,
  })
  return gang
end

--- Opens an attempt's logs, and its standard output.
---@param round ciranda.run.Round
-- Raises what `ciranda.run.logs` raises.
function M.open_logs(round)
  local options = round.options
  round.output = output.new(1, function()
    options.progress:clear()
  end)
  round.logs = logs_of.open({
    directory = ("%s/%s"):format(round.journal.directory, round.id),
    links = logs_of.link_directory(options.run),
    workers = options.fleet:workers(),
    show = options.show,
    raw = not options.json and function(bytes)
      round.output:write(bytes)
    end or nil,
    lines = function(text)
      round:say("%s", (text:gsub("\n$", "")))
    end,
    limit = (options.watch or {}).log_limit,
    on_full = function(problem)
      round:say(
        "%s: what comes now stays on the workers, where ciranda logs %s --show=... reads it",
        problem and tostring(problem) or "The logs here have reached their limit (--LOG_LIMIT)",
        options.run
      )
    end,
  })
  round.logs_directory = logs_of.link_directory(options.run)
end

return M
