--- A run from its fleet to its verdict, for recipes: the journal, and the attempt that it is about.
--
-- Recipes that run one command on every worker differ in how they come by fleet, bundle and command; from there on
-- they are the same, and that is here and in `ciranda.run.round`. `attach` takes up a run whose runner is gone.
local journals = require("ciranda.run.journal")
local known = require("ciranda.run.known")
local rounds = require("ciranda.run.round")

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
---@field node_state (fun(worker: ciranda.Worker): string)? the state of a worker's node, "gone" when there is none
---@field on_bytes fun(worker: ciranda.Worker, bytes: string)? a piece of a worker's log
---@field success string? the line that says that all is well

---@class ciranda.run.LaunchResult
---@field status integer
---@field kind "done"|"user"|"infra"|"preempted"|"staging"|"deadline"|"interrupted"|"detached"
---@field message string the last line

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

--- Writes the attempt down and runs it.
---@param options ciranda.run.LaunchOptions
---@param journal ciranda.Journal
---@return ciranda.run.LaunchResult
local function run_attempt(options, journal)
  local round <close> = rounds.new(options, journal, journal:new_attempt_id())
  local workers = {}
  for place, worker in ipairs(options.fleet:workers()) do
    workers[place] = remembered(worker)
  end
  journal:append("attempt", {
    attempt = round.id,
    command = options.command,
    directory = round.directory,
    workers = workers,
    connection = options.connection,
    checkpoint_directory = options.checkpoint_directory,
    grace = options.grace,
    failure_grace = options.failure_grace,
  })
  return round:run()
end

--- Runs a command on every worker of a fleet, from staging to the verdict.
---@async
---@param options ciranda.run.LaunchOptions
---@return ciranda.run.LaunchResult
-- Raises "busy" when another runner has the run.
function M.run(options)
  local journal <close> =
    journals.open(options.run, { recipe = options.recipe, arguments = options.arguments })
  local result = run_attempt(options, journal)
  journal:close(result.status, result.kind)
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

--- Takes up a run whose runner is gone: follows its last attempt to the end.
---@async
---@param options ciranda.run.AttachOptions
---@return ciranda.run.LaunchResult
-- Raises "not_found" when there is no such run or nothing of it is running; "busy" when its runner is alive.
function M.attach(options)
  local last = known.find(options.run, "attach")
  local fleet <close> = known.fleet(last, options.connect_options)
  local journal <close> = journals.open(options.run, { take = options.take })
  local round <close> = rounds.new({
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
  local result = round:rejoin()
  journal:close(result.status, result.kind)
  return result
end

return M
