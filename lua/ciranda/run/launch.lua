--- A run from its fleet to its verdict, for recipes: the journal, and attempts until one ends it.
--
-- Recipes that run one command on every worker differ in how they come by fleet, bundle and command; from there on
-- they are the same, and that is here and in `ciranda.run.round`. `attach` takes up a run whose runner is gone.
local budgets = require("ciranda.run.budget")
local err = require("ciranda.io.error")
local hooks = require("ciranda.run.hooks")
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local leases = require("ciranda.run.lease")
local node_states = require("ciranda.run.node_state")
local rounds = require("ciranda.run.round")
local runs = require("ciranda.run.runs")
local signals = require("ciranda.fleet.signals")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

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
---@field node_state ciranda.run.NodeState? what is said of a worker's node; its state is "gone" when there is none
---@field nodes (fun(): table[])? the cloud's nodes, asked when a worker has failed
---@field staging { take: boolean?, kill: "mine"|"all"|nil, setup: table?, device_check: boolean?,
---  strict_fingerprint: boolean? }? see `ciranda.run.gang`
---@field watch ciranda.run.Watching? how the workers are watched; kept for `attach`
---@field on_stall (fun(stall: ciranda.run.Stall))? nobody has written anything for `watch.stall` seconds
---@field on_bytes fun(worker: ciranda.Worker, bytes: string)? a piece of a worker's log
---@field success string? the line that says that all is well
---@field restarts { user: integer?, infra: integer?, preempted: integer? }? further attempts, by how the last one ended
---@field restart_pause number? seconds before the first further attempt (5)
---@field cloud ciranda.run.Cloud? where the machines come from; `attach` needs it to renew them
---@field renew (fun(timeout: number?): ciranda.Fleet, string?, function?)? before an attempt that follows a failure of
---  the machines: waits until they are back; the fleet as it is now (closed by the run), a note, and `environment_of`
---@field recreate { wait: number?, pause: number? }? what is SUSPENDED or FAILED for good is deleted and asked for
---  again, within `restarts.preempted`; see `ciranda.run.recreate`
---@field notices boolean? the workers have a metadata server that tells of maintenance and preemption
---@field autocheckpoint boolean? the platform sends SIGTERM itself before maintenance
---@field hooks table<string, fun(happening: ciranda.run.Happening): any>? see `ciranda.run.hooks`
---@field hooks_file string? where they are from, for `attach`
---@field chips integer? of all slices, for the chip-hours lost
---@field further ciranda.run.Steps|true|nil this is not the first attempt; what the logs of the one before spoke of
---@field environment_of (fun(worker: ciranda.Worker): table<string, string>)? besides `environment`, for one worker
---@field once boolean? `restarts` are for whoever takes the run up later: this runner makes one attempt
---@field unknown_environment boolean? there was an `environment_of` that this runner does not have: `renew` gives it

---@class ciranda.run.Watching
---@field follow "auto"|"all"|"first"|nil whose logs are followed while they grow (auto: all of up to 64 workers)
---@field stall number? seconds without output after which the runner says so (never)
---@field leader_only boolean? a worker has ended when COMMAND's shell has
---@field log_limit integer? bytes of logs on this machine (no limit)
---@field log_keep integer? bytes of each log that are kept on its worker at least (all)

---@class ciranda.run.LaunchResult
---@field status integer
---@field kind "done"|"user"|"infra"|"preempted"|"stopped"|"staging"|"deadline"|"interrupted"|"detached"
---@field message string the last line
---@field final boolean? there must be no further attempt
---@field told boolean? a notice came first, and its hook was called then
---@field worker ciranda.Worker? who fell first
---@field innocent boolean? and is not to blame for it
---@field reason string? why, in a few words
---@field steps ciranda.run.Steps? what its logs spoke of

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

--- What an attempt fact keeps of the bundle: enough to send it again.
---@param bundle ciranda.archive.Manifest?
---@return table?
local function remembered_bundle(bundle)
  return bundle
    and {
      archive = bundle.archive,
      archive_size = bundle.archive_size,
      archive_sha256 = bundle.archive_sha256,
      size = bundle.size,
    }
end

--- Writes the attempt down and runs it.
---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@param series string? the run's first attempt
---@return ciranda.run.LaunchResult
local function run_attempt(options, journal, series)
  local round <close> = rounds.new(options, journal, journal:new_attempt_id())
  local workers = {}
  for place, worker in ipairs(options.fleet:workers()) do
    workers[place] = remembered(worker)
  end
  local fact = known.kept(options)
  fact.attempt, fact.series = round.id, series or round.id
  fact.directory, fact.workers = round.directory, workers
  fact.bundle = remembered_bundle(options.bundle)
  fact.environment_of = options.environment_of and true or nil
  journal:append("attempt", fact)
  return round:run()
end

--- What the budgets know: how the attempts of this run have ended so far.
---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@return ciranda.run.Budget budget, table last the last attempt, as the journal has it
local function budget_of(options, journal)
  local all = journal:state().attempts
  local last = all[#all]
  local budget = budgets.new(options.restarts or {}, options.restart_pause)
  for _, attempt in ipairs(all) do
    local ended = attempt.ended
    if ended and attempt.series == last.series then
      budget:note({
        attempt = attempt.attempt,
        kind = ended.kind,
        status = ended.status,
        lasted = (ended.us - (attempt.gone or ended.us)) / 1e6,
        worker = ended.worker,
        reason = ended.reason,
      })
    end
  end
  return budget, last
end

--- Says what ends a run after its last attempt.
---@param options ciranda.run.LaunchOptions
---@param budget ciranda.run.Budget
---@param result ciranda.run.LaunchResult
---@param used string? which budget is used up
---@return ciranda.run.LaunchResult
local function conclude(options, budget, result, used)
  for _, line in ipairs(budget:summary()) do
    options.progress:say("%s", line)
  end
  if used then
    result.message = ("%s; %s"):format(result.message, used)
  end
  return result
end

--- Calls what may fail as the cloud fails.
---@return any? problem an error for a person
local function problem_of(fn, ...)
  local ok, problem = pcall(fn, ...)
  if ok then
    return nil
  elseif err.is_fatal(problem) then
    error(problem, 0)
  end
  return problem
end

--- The hooks that are told of an attempt's end.
local HOOKS =
  { user = "on_failure", infra = "on_failure", staging = "on_failure", preempted = "on_preempted" }

--- Tells a hook of an attempt's end.
---@param options ciranda.run.LaunchOptions
---@param name string
---@param attempt string
---@param result { message: string, kind: string?, status: integer?, worker: ciranda.Worker? }
---@return any
local function tell(options, name, attempt, result)
  return hooks.call(options.hooks, name, {
    run = options.run,
    attempt = attempt,
    text = result.message,
    kind = result.kind,
    status = result.status,
    worker = result.worker,
  }, function(...)
    options.progress:say(...)
  end)
end

--- The same of the last attempt: a signal ends the hook, and changes nothing of what the run has come to.
---@async
---@param options ciranda.run.LaunchOptions
local function tell_last(options, ...)
  local left = task.event()
  local remove = options.on_interrupt(function(name)
    if not (signals.STOPPED[name] or name == "SIGHUP") then
      return false
    end
    left:set()
    return true
  end)
  local _ <close> = setmetatable({}, { __close = remove })
  local arguments = table.pack(options, ...)
  local first = task.race({
    function()
      tell(table.unpack(arguments, 1, arguments.n))
    end,
    function()
      left:wait()
    end,
  })
  if first == 2 then
    options.progress:say("Leaving a hook that has not ended")
  end
end

--- The machines for another attempt, as they are now: waits for them, has the user's hook have them made again, or asks
--- for them again.
---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@param last table the last attempt, as the journal has it
---@return string? why there are none
---@return string? kind of end
local function renew(options, journal, last)
  local again = options.recreate
    and require("ciranda.run.recreate").new({
      journal = journal,
      cloud = options.cloud,
      attempt = last.attempt,
      series = last.series,
      limit = (options.restarts or {}).preempted or 0,
      wait = options.recreate.wait,
      pause = options.recreate.pause,
      say = function(...)
        options.progress:say(...)
      end,
    })
  local problem = again and problem_of(again.resume, again)
  local helped = false
  while true do
    problem = problem
      or problem_of(function()
        local fleet, note, environment_of = options.renew(again and again.wait)
        options.fleet, options.environment_of = fleet, environment_of
        if note then
          options.progress:say("%s", note)
        end
      end)
    if not problem then
      return nil
    end
    local kind = (err.is(problem, "preempted", "not_found") or problem.state == "SUSPENDED") and "preempted"
      or "infra"
    if
      kind == "preempted"
      and not helped
      and tell(options, "on_preempted", last.attempt, { message = problem.message }) == true
    then
      helped, problem = true, nil -- the hook has had them made again
    elseif again and err.is(problem, "timeout") and again.wait then
      return (problem_of(again.give_up, again) or problem).message, kind
    elseif again then
      local asked
      local trouble = problem_of(function()
        asked = again:after(problem)
      end)
      if not asked then
        return (trouble or problem).message, kind
      end
      problem = nil
    else
      return problem.message, kind
    end
  end
end

--- Gives the workers back. A Ctrl-C too many must not leave them taken, nor hide how the run ended: nobody waits long
--- for what is left to do. The next one is heard.
---@async
---@param options ciranda.run.LaunchOptions
---@param lease ciranda.run.Lease
---@param over boolean the run has ended by itself
local function give_back(options, lease, over)
  local heard = not over
  local remove = options.on_interrupt(function(name)
    local first = not heard and signals.STOPPED[name] ~= nil
    heard = heard or first
    return first
  end)
  local _ <close> = setmetatable({}, { __close = remove })
  task.shield(lease.release, lease, leases.links_of(options.fleet), options.unconnected)
end

--- Attempts until one has ended the run: done, stopped, or beyond its budget.
---@param options ciranda.run.LaunchOptions fleet and environment_of change with the machines
---@param journal ciranda.Journal
---@param result ciranda.run.LaunchResult of the attempt so far
---@return ciranda.run.LaunchResult
local function continue(options, journal, result)
  local given = options.fleet
  local lease = leases.new(options.run, journal)
  local idle = true -- nothing runs on the workers, or what runs there is no longer ours
  local scope <close> = task.scope()
  local keeper = scope:spawn(function()
    while true do
      task.sleep(leases.RENEW)
      if idle then
        lease:renew(leases.links_of(options.fleet))
      end
    end
  end)
  local _ <close> = setmetatable({}, {
    __close = function(_, problem)
      keeper:cancel("the run is over")
      if idle and result.kind ~= "detached" then
        give_back(options, lease, problem == nil)
      end
      if options.fleet ~= given then
        options.fleet:close()
      end
    end,
  })
  while result.kind ~= "detached" do
    local budget, last = budget_of(options, journal)
    local bad = result.kind == "infra" and budget:bad()
    if bad then
      options.progress:say("Bad: %s, with two infrastructure failures in the last three attempts", bad)
      journal:note("bad", { attempt = last.attempt, workers = bad })
    end
    local pause, used
    if not result.final and not options.once then
      pause, used = budget:again()
    end
    local hook = HOOKS[result.kind]
    if hook and not result.final and not result.told then
      (pause and tell or tell_last)(options, hook, last.attempt, result)
    end
    if not pause then
      return conclude(options, budget, result, used)
    end
    options.progress:say("%s", result.message)
    options.progress:say("Another attempt in %.0f s (%s)", pause, used)
    task.sleep(pause * (0.75 + math.random() * 0.5))
    if options.renew and (result.kind ~= "user" or options.unknown_environment) then
      local before = options.fleet
      local why, kind = renew(options, journal, last)
      options.unknown_environment = nil
      if why then
        return conclude(options, budget, {
          status = 1,
          kind = kind,
          message = ("%s: there are no machines for another attempt: %s"):format(kind, why),
        })
      elseif before ~= given then
        before:close()
      end
    end
    options.further = result.steps or true
    idle = false
    result = run_attempt(options, journal, last.series)
    idle = true
  end
  return result
end

--- Finds out whether the workers to be shown are there before anything is done.
---@param fleet ciranda.Fleet
---@param show string?
local function check_show(fleet, show)
  local ok, problem = pcall(fleet.select, fleet, show or "all")
  if not ok then
    err.raise({ code = "usage", op = "launch", message = ("--show=%s: %s"):format(show, err.text(problem)) })
  end
end

--- What a run that is cut short before COMMAND was started says when it leaves: how, as its attempt has it; or on the
--- way to another attempt, which is over when a signal says so, and waits for `attach` when the terminal is lost.
---@param journal ciranda.Journal
---@param options ciranda.run.LaunchOptions|ciranda.run.AttachOptions
---@return table to be closed before the journal
local function farewell(journal, options)
  local stopped
  local remove = options.on_interrupt(function(name, count)
    if count > 1 and signals.STOPPED[name] then -- without clean-up
      options.progress:say("`ciranda stop %s` gives back what is still taken", journal.run)
    end
    stopped = signals.STOPPED[name]
    return false
  end)
  return setmetatable({}, {
    __close = function(_, problem)
      remove()
      local attempts = journal:state().attempts
      local ended = problem and #attempts > 0 and attempts[#attempts].ended
      if ended and (stopped or ended.kind == "interrupted") then
        journal:close(stopped or ended.status, "interrupted")
      end
    end,
  })
end

--- Says goodbye. A disk that is full must not hide how the run ended.
---@param journal ciranda.Journal
---@param result ciranda.run.LaunchResult
---@param progress ciranda.cli.Progress
local function leave(journal, result, progress)
  local ok, problem = pcall(journal.close, journal, result.status, result.kind)
  if not ok then
    if not err.is(problem, "no_space") then
      error(problem, 0)
    end
    progress:say(
      "How the run ends could not be written down: %s. When there is room again, ciranda attach %s does it",
      tostring(problem),
      journal.run
    )
  end
end

--- Runs a command on every worker of a fleet, from staging to the verdict, and again within the budgets.
---@async
---@param options ciranda.run.LaunchOptions
---@return ciranda.run.LaunchResult
-- Raises "busy" when another runner has the run, "usage" when `show` names no worker; what `renew` raises.
function M.run(options)
  check_show(options.fleet, options.show)
  local journal <close> =
    journals.open(options.run, { recipe = options.recipe, arguments = options.arguments })
  local _ <close> = farewell(journal, options)
  local mine = setmetatable({}, { __index = options })
  local result = continue(mine, journal, run_attempt(mine, journal))
  leave(journal, result, options.progress)
  return result
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
---@field stops boolean? it is taken up to be stopped: other programs that want that wait for it

--- The user's hooks for a run that is taken up. A file that is gone since, or was broken, must not keep anybody from
--- the run.
---@param file string
---@param progress ciranda.cli.Progress
---@param json boolean? standard output belongs to the JSON lines
---@return table<string, function>?
local function hooks_again(file, progress, json)
  local ok, loaded = pcall(hooks.load, file, json and progress or nil)
  if ok then
    return loaded
  elseif not err.is(loaded, "usage") then
    error(loaded, 0)
  end
  progress:say("No hooks are told: %s", err.text(loaded))
end

--- Takes up a run whose runner is gone: follows its last attempt to the end, and goes on as that runner would have,
--- also when that was on its way to another attempt.
---@async
---@param options ciranda.run.AttachOptions
---@return ciranda.run.LaunchResult
-- Raises "not_found" when there is no such run or nothing of it is running; "busy" when its runner is alive.
function M.attach(options)
  local found, last = pcall(known.find, options.run, "attach", true)
  if not found then
    if err.is(last, "not_found") and M.give_back(options) then
      last.message = last.message .. ": its runner was gone before that; its workers are given back"
    end
    error(last, 0)
  end
  local fleet <close> = known.fleet(last, options.connect_options)
  check_show(fleet, options.show)
  local journal <close> = journals.open(options.run, { take = options.take, stops = options.stops })
  local _ <close> = farewell(journal, options)
  local mine = known.kept(last)
  mine.fleet, mine.run, mine.directory = fleet, options.run, last.directory
  mine.progress, mine.json, mine.show = options.progress, options.json, options.show
  mine.on_interrupt = options.on_interrupt
  mine.grace = options.grace or last.grace
  mine.notices = last.cloud ~= nil
  if last.cloud then
    mine.node_state, mine.nodes = node_states.of(function()
      local project, zone = last.cloud.project, last.cloud.zone
      return require("ciranda.gcp.tpu").connect({ project = project, zone = zone })
    end)
  end
  mine.hooks = last.hooks_file and hooks_again(last.hooks_file, options.progress, options.json) or nil
  -- What each worker was told besides is not kept: it is found out again before another attempt.
  mine.unknown_environment = last.environment_of
  -- The archive may be gone from here; then the workers go on with what they have.
  mine.bundle = last.bundle and uv.fs_stat(last.bundle.archive) and last.bundle or nil
  mine.use_existing = mine.bundle == nil
  mine.renew = last.cloud
    and function(timeout)
      return known.renew(last, options.connect_options, options.progress, timeout)
    end
  mine.success = "Finished successfully."
  local result
  if last.ended then
    -- That runner had the workers, and this one has no connection to any yet.
    mine.unconnected = true
    result = {
      status = last.ended.status,
      kind = last.ended.kind,
      message = ("Attempt %s had ended before: %s, exit status %d"):format(
        last.attempt,
        last.ended.kind,
        last.ended.status
      ),
    }
  else
    local round <close> = rounds.new(mine, journal, last.attempt)
    round.stop_begun = runs.stop_begun(last)
    result = round:rejoin()
  end
  result = continue(mine, journal, result)
  leave(journal, result, options.progress)
  return result
end

--- Ends a run whose runner was gone before COMMAND was started, or before it had said how the run ended: gives its
--- workers back, and stops its SETUP. What does not answer is left alone; the lease there expires.
---@async
---@param options { run: string, connect_options: table?, take: boolean? } as for `attach`
---@return boolean given whether the run was such a one
-- Raises "busy" when a runner has the run.
function M.give_back(options)
  local state = journals.read(options.run)
  local last = state and (runs.unstarted(state) or runs.unfinished(state))
  if not last then
    return false
  end
  local fleet <close> = known.fleet(last, options.connect_options or {})
  local journal <close> = journals.open(options.run, { take = options.take })
  local setup = not last.gone and (last.staging or {}).setup
  if setup then
    require("ciranda.run.setup").stop(fleet, setup.hash)
  end
  leases.new(options.run, journal):release(leases.links_of(fleet), true)
  local ended = last.ended
  if not ended then
    ended = {
      attempt = last.attempt,
      status = 1,
      kind = "staging",
      reason = "its runner was gone before the start",
    }
    journal:append("attempt_end", ended)
  end
  journal:close(ended.status, ended.kind)
  return true
end

return M
