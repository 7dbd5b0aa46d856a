--- e2e-crash: what asks the cloud for something, or deletes it, SIGKILLed before and after each write and fsync of the
--- journal, each mkdir, rename and connect and each HTTP request; then what a person does: the same command again, or
--- `ciranda gc`. Points are counted in a traced run that nothing disturbs. What is there is read from the simulated
--- cloud's own lists, what is known from the journals' text. The last line is JSON; `created_twice`, `forgotten`,
--- `left`, `unfinished` and `early` must be 0.
---
--- The control: a program that notes an intent after the call has to fail, in the walk and in the order of its calls.
local cloud = require("kill.cloud")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local late_journal = require("kill.late_journal")
local place_of = require("kill.place")
local points_of = require("crash.points")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local SCRATCH = assert(arg[1], "a scratch directory is expected")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local SAMPLE = math.tointeger(tonumber(os.getenv("CIRANDA_POINTS") or (SHORT and 12 or math.maxinteger)))
local SEED = math.tointeger(tonumber(os.getenv("CIRANDA_SEED") or os.time()))
local COMMAND_LIMIT = 90 -- s, for one command
local POINT_LIMIT = 240 -- s, for one point with all its commands
local GONE_LIMIT = 60 -- s, until the cloud has deleted something

--- Slices never come to be within the walk: a start-up script would run, and a job delete itself.
local DELAYS = { provision = { 1e8, 1e8 } }

local function say(format, ...)
  io.stderr:write(string.format(format, ...), "\n")
end

-- The programs that are killed --------------------------------------------------------------------------------------

local TYPE = "v5litepod-4"

---@class Kind
---@field argv fun(name: string): string[] what is killed
---@field before (fun(name: string): string[])? what is done before
---@field leaves boolean whether it leaves something in the cloud

---@type table<string, Kind>
local KINDS = {
  qr_create = {
    leaves = true,
    argv = function(name)
      return { "qr", "create", name, "--node-id=" .. name, "--accelerator-type=" .. TYPE, "--async" }
    end,
  },
  node_create = {
    leaves = true,
    argv = function(name)
      return { "tpu_vm", "create", name, "--accelerator-type=" .. TYPE, "--async" }
    end,
  },
  job = {
    leaves = true,
    argv = function(name)
      return {
        "multihost_job",
        "--RUN_NAME=" .. name,
        "--TPU_TYPE=" .. TYPE,
        "--NUM_SLICES=1",
        "--BUCKET_NAME=crash-bucket",
        "--SCRIPT_DIR=tests/fixtures/trainer",
        "--COMMAND=true",
      }
    end,
  },
  qr_delete = {
    argv = function(name)
      return { "qr", "delete", name }
    end,
  },
  node_delete = {
    argv = function(name)
      return { "tpu_vm", "delete", name }
    end,
  },
  gc = {
    argv = function()
      return { "gc", "--DELETE=true", "--ALL=true" }
    end,
  },
}
KINDS.qr_delete.before = KINDS.qr_create.argv
KINDS.gc.before = KINDS.qr_create.argv
KINDS.node_delete.before = KINDS.node_create.argv

local ORDER = { "qr_create", "qr_delete", "node_create", "node_delete", "job", "gc" }

-- What is there and what is known -----------------------------------------------------------------------------------

---@class Crash
---@field simulator ciranda.Simulator
---@field lua_directory string? modules in place of the program's own
---@field counts table<string, integer>
local Crash = {}
Crash.__index = Crash

local function new_crash(simulator, lua_directory)
  return setmetatable({
    simulator = simulator,
    lua_directory = lua_directory,
    number = 0,
    counts = { kills = 0, missed = 0, created_twice = 0, forgotten = 0, left = 0, unfinished = 0 },
  }, Crash)
end

--- A name that was not used before, with an environment whose journals are its own.
function Crash:fresh(kind)
  self.number = self.number + 1
  local name = ("%s-%s%d"):format(kind:gsub("_", "-"), self.lua_directory and "late-" or "", self.number)
  local state = SCRATCH .. "/state/" .. name
  local environment = { XDG_STATE_HOME = state, CIRANDA_LUA_DIR = self.lua_directory }
  for key, value in pairs(self.simulator.env) do
    environment[key] = value
  end
  return name, environment, ("%s/ciranda/runs/%s/journal.jsonl"):format(state, name)
end

local function command(words)
  return { BINARY, table.unpack(words) }
end

--- Runs `ciranda ...` to its end; one that fails is counted.
function Crash:ciranda(environment, words)
  local argv = command(words)
  argv.env, argv.timeout = environment, COMMAND_LIMIT
  local result = process.run(argv)
  if result.code ~= 0 then
    self.counts.unfinished = self.counts.unfinished + 1
    local status = tostring(result.code or result.signal)
    say("  ciranda %s ended with %s: %s", table.concat(words, " "), status, result.stderr)
  end
end

--- How often the cloud has made something under a name, by its operations, and whether it is there.
function Crash:seen(name)
  local there, made = false, 0
  for _, list in ipairs({ "queuedResources", "nodes" }) do
    for _, message in ipairs(cloud.list(self.simulator, list)) do
      there = there or message.name:match("[^/]+$") == name
    end
  end
  for _, operation in ipairs(cloud.list(self.simulator, "operations")) do
    local metadata = operation.metadata
    if metadata.verb == "create" and metadata.target:match("[^/]+$") == name and not operation.error then
      made = made + 1
    end
  end
  return there, made
end

--- Does the journal, read as text, know of something that may be there?
local function is_known(journal, name)
  local known = false
  for line in (fs.exists(journal) and fs.read(journal) or ""):gmatch("[^\n]+") do
    local ok, fact = pcall(json.decode, line)
    if ok and fact.fact == "object" and fact.name == name then
      known = fact.phase ~= "gone" and fact.phase ~= "failed"
    end
  end
  return known
end

--- Counts what is there and not known, and what was made more than once. Returns whether it is there, and known.
function Crash:check(name, journal)
  local there, made = self:seen(name)
  local known = is_known(journal, name)
  if there and not known then
    self.counts.forgotten = self.counts.forgotten + 1
    say("  %s is there, and its journal does not know it", name)
  end
  if made > 1 then
    self.counts.created_twice = self.counts.created_twice + made - 1
    say("  %s was made %d times", name, made)
  end
  return there, known
end

--- Deletes what is left of a point by `gc` alone.
function Crash:clean(name, environment, journal)
  local there, known = self:check(name, journal)
  if there and not known then
    return -- gc cannot do it, and it was counted
  end
  local gone = pcall(task.timeout, GONE_LIMIT, function()
    while there do
      self:ciranda(environment, { "gc", "--DELETE=true", "--ALL=true", "--async=true" })
      task.sleep(0.3)
      there = self:seen(name)
    end
  end)
  if not gone then
    self.counts.left = self.counts.left + 1
    say("  %s is there although gc has deleted it", name)
  end
end

--- Does again what was killed.
function Crash:repeat_it(kind, name, environment, journal)
  self:ciranda(environment, KINDS[kind].argv(name))
  local there = self:check(name, journal)
  if there ~= (KINDS[kind].leaves or false) then
    self.counts.left = self.counts.left + 1
    say("  %s is %s", name, there and "there although it was deleted again" or "not there")
  end
end

-- The walk ----------------------------------------------------------------------------------------------------------

--- Runs a kind undisturbed and returns its calls, and the journal's path.
function Crash:trace(kind)
  local name, environment, journal = self:fresh(kind)
  if KINDS[kind].before then
    self:ciranda(environment, KINDS[kind].before(name))
  end
  local lines = place_of.record(command(KINDS[kind].argv(name)), environment, points_of.CALLS, SCRATCH)
  self:clean(name, environment, journal)
  return lines, journal
end

--- Kills a kind at a point, and mends it: by the same command again, or by gc alone.
---@return boolean killed false when it did not come there
function Crash:kill(kind, point, side, again)
  local name, environment, journal = self:fresh(kind)
  if KINDS[kind].before then
    self:ciranda(environment, KINDS[kind].before(name))
  end
  local place = { call = point.call, when = point.when, side = side, path = point.path and journal }
  local killed = place_of.kill_at(command(KINDS[kind].argv(name)), environment, place, SCRATCH)
  local result = killed and "killed" or "never came"
  say("%s: %s %s %d, %s; %s", name, side, point.call, point.when, result, again and "again" or "gc")
  self:check(name, journal)
  if again then
    self:repeat_it(kind, name, environment, journal)
  end
  self:clean(name, environment, journal)
  return killed
end

--- All points of all kinds, twice each: before and after.
function Crash:points()
  local list, sent, early = {}, 0, 0
  for _, kind in ipairs(ORDER) do
    local lines, journal = self:trace(kind)
    local requests, too_early = points_of.order(lines, journal)
    assert(requests > 0, kind .. " has asked for nothing")
    sent, early = sent + requests, early + too_early
    for _, point in ipairs(points_of.of(lines, journal)) do
      list[#list + 1] = { kind = kind, point = point, side = "before" }
      list[#list + 1] = { kind = kind, point = point, side = "after" }
    end
  end
  return list, sent, early
end

--- Some of the points: every class in turn, one of it at random.
local function sample(list, count)
  if count >= #list then
    return list
  end
  local by_class, classes = {}, {}
  for _, entry in ipairs(list) do
    local class = entry.side .. "_" .. entry.point.class
    if not by_class[class] then
      by_class[class] = {}
      classes[#classes + 1] = class
    end
    table.insert(by_class[class], entry)
  end
  local chosen, turn = {}, 0
  while #chosen < count do
    local entries = by_class[classes[turn % #classes + 1]]
    turn = turn + 1
    if #entries > 0 then
      chosen[#chosen + 1] = table.remove(entries, math.random(#entries))
    end
  end
  return chosen
end

--- A create by a program that notes its intents too late, killed when its request has gone.
local function control(simulator)
  local crash = new_crash(simulator, late_journal.tree(SCRATCH))
  local lines, journal = crash:trace("qr_create")
  local _, early = points_of.order(lines, journal)
  for _, point in ipairs(points_of.of(lines, journal)) do
    if point.class == "http" then
      crash:kill("qr_create", point, "after", false)
    end
  end
  return { early = early, forgotten = crash.counts.forgotten }
end

local function main()
  math.randomseed(SEED)
  say("seed %d", SEED)
  local simulator <close> = sim.start({ slices = 0, prefix = "crash", delays = DELAYS })
  local crash = new_crash(simulator)
  local points, sent, early = crash:points()
  local chosen = sample(points, SAMPLE)
  say("%d points, %d of them are walked", #points, #chosen)
  local counts = crash.counts
  counts.by_point, counts.by_kind = {}, {}
  for place, entry in ipairs(chosen) do
    local killed =
      task.timeout(POINT_LIMIT, crash.kill, crash, entry.kind, entry.point, entry.side, place % 3 ~= 0)
    if killed then
      local class = entry.side .. "_" .. entry.point.class
      counts.kills = counts.kills + 1
      counts.by_point[class] = (counts.by_point[class] or 0) + 1
      counts.by_kind[entry.kind] = (counts.by_kind[entry.kind] or 0) + 1
    else
      counts.missed = counts.missed + 1
    end
  end
  local late = control(simulator)

  counts.points, counts.requests, counts.early = #points, sent, early
  counts.control, counts.control_failed = late, late.forgotten > 0 and late.early > 0
  local failures = {}
  for _, key in ipairs({ "created_twice", "forgotten", "left", "unfinished", "early" }) do
    if counts[key] ~= 0 then
      table.insert(failures, key)
    end
  end
  if not counts.control_failed then
    table.insert(failures, "the control passed")
  end
  if counts.missed > #chosen // 10 then
    table.insert(failures, "too many points were not come to")
  end
  counts.e2e, counts.seed, counts.failures = "crash", SEED, json.array(failures)
  print(json.encode(counts))
  return #failures == 0
end

os.exit(main() and 0 or 1)
