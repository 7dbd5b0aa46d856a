--- e2e-kill: the runner SIGKILLed in many places, half of them at random times, half before and after the calls that
--- matter; then `ciranda attach` until it is done. What is counted is counted from outside: COMMAND writes a line to a
--- file when it starts and keeps a copy of every byte it prints; the simulated cloud says what is there. The last line
--- is JSON; `lost`, `doubled`, `run_twice`, `forgotten` and `unfinished` must all be 0.
---
--- The control: the same walk with a journal that notes an intent after the call has to fail.
local cloud = require("kill.cloud")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local late_journal = require("kill.late_journal")
local place_of = require("kill.place")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local SCRATCH = assert(arg[1], "a scratch directory is expected")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local KILLS = math.tointeger(tonumber(os.getenv("CIRANDA_KILLS") or (SHORT and 20 or 200)))
local SEED = math.tointeger(tonumber(os.getenv("CIRANDA_SEED") or os.time()))
local LIMIT = 300 + 30 * KILLS -- s, for everything
local COMMAND_LIMIT = 90 -- s, for one command
local WORKERS = 4
local LINES = 50 -- that COMMAND prints, a hundredth of a second apart
local TRIES = 8 -- how often a run is taken up, and a place looked for

--- What a crash point is before or after, and which programs come to it.
local CLASSES = { "write", "fsync", "http", "mkdir", "go" }

local SOURCE = SCRATCH .. "/source"
local RUNS = os.getenv("XDG_STATE_HOME") .. "/ciranda/runs"

local function say(format, ...)
  io.stderr:write(string.format(format, ...), "\n")
end

--- What is being counted.
local function new_counts()
  return {
    kills = 0,
    random = 0,
    attach_kills = 0,
    by_point = {},
    lost = 0,
    doubled = 0,
    run_twice = 0,
    forgotten = 0,
    unfinished = 0,
  }
end

---@class Walk a program under test and the cloud it sees
---@field environment table<string, string>
---@field shared string directory that the workers see too
---@field counts table
---@field duration number seconds that an undisturbed run takes
---@field gate string? a file that COMMAND waits for once it has started
local Walk = {}
Walk.__index = Walk

---@param simulator ciranda.Simulator
---@param lua_directory string? a tree of modules in place of the program's own
---@return Walk
local function new_walk(simulator, lua_directory)
  local environment = { CIRANDA_LUA_DIR = lua_directory }
  for name, value in pairs(simulator.env) do
    environment[name] = value
  end
  return setmetatable({
    simulator = simulator,
    environment = environment,
    shared = environment.CIRANDA_SIM_SHARED,
    counts = new_counts(),
    number = 0,
    baselines = {},
  }, Walk)
end

-- The two programs that are killed ----------------------------------------------------------------------------------

--- COMMAND: a line for its start, then lines that nobody could guess, each also kept in a file.
function Walk:command(run)
  local base = ("%s/%s.$CIRANDA_SLICE_ID.$CIRANDA_WORKER_ID"):format(self.shared, run)
  local gate = self.gate and ("until [ -e %s ]; do sleep 0.05; done; "):format(self.gate) or ""
  return ("echo $CIRANDA_ATTEMPT >> %s.starts; %sfor i in $(seq %d); do "):format(base, gate, LINES)
    .. ("echo line $i $(od -An -N8 -tx8 /dev/urandom); sleep 0.01; done | tee -a %s.$CIRANDA_ATTEMPT.bytes"):format(
      base
    )
end

function Walk:runner(name)
  return {
    BINARY,
    "multihost_runner",
    "--TPU_PREFIX=kill",
    "--RUN_NAME=" .. name,
    "--SCRIPT_DIR=" .. SOURCE,
    "--COMMAND=" .. self:command(name),
  }
end

local function creator(name)
  return {
    BINARY,
    "qr",
    "create",
    name,
    "--node-id=" .. name,
    "--accelerator-type=v5litepod-4",
    "--runtime-version=v2-alpha-tpuv5-lite",
    "--async",
  }
end

--- A name that has not been used, and the program with it: "run" is a job on the workers, "create" asks the cloud.
function Walk:fresh(kind)
  self.number = self.number + 1
  local name = ("%s-%d"):format(kind, self.number)
  return name, kind == "run" and self:runner(name) or creator(name)
end

--- Runs `ciranda ...` to its end.
function Walk:ciranda(...)
  return process.run({ BINARY, env = self.environment, timeout = COMMAND_LIMIT, ... })
end

-- Where calls are ---------------------------------------------------------------------------------------------------

--- Counts of the calls of an undisturbed program, from which places are drawn.
function Walk:baseline(kind)
  if self.baselines[kind] then
    return self.baselines[kind]
  end
  local name, argv = self:fresh(kind)
  local lines = place_of.record(argv, self.environment, "write,fsync,mkdir,sendto", SCRATCH)
  local found = { write = 0, fsync = 0, mkdir = 0, http = 0, sends = 0 }
  local threads = {}
  for _, line in ipairs(lines) do
    local thread, call = line:match("^(%d+)%s+(%w+)%(")
    local in_journal = line:find(name .. "/journal.jsonl>", 1, true)
    if call == "write" and in_journal then
      found.write = found.write + 1
      if line:find('\\"fact\\":\\"go\\"', 1, true) then
        found.go_write = found.write
      end
    elseif call == "fsync" and in_journal then
      found.fsync = found.fsync + 1
      if found.go_write and not found.go_fsync then
        found.go_fsync, found.go_send = found.fsync, found.sends + 1
      end
    elseif call == "mkdir" then
      threads[thread] = (threads[thread] or 0) + 1
      found.mkdir = math.max(found.mkdir, threads[thread])
    elseif call == "sendto" then
      found.sends = found.sends + 1
      if line:find('"GET /', 1, true) or line:find('"POST /', 1, true) or line:find('"PATCH /', 1, true) then
        found.http = found.sends
      end
    end
  end
  assert(found.write > 0 and found.fsync > 0 and found.mkdir > 0 and found.http > 0, "calls are missing")
  assert(kind ~= "run" or found.go_fsync, "the go is missing")
  self.baselines[kind] = found
  self:settle(kind, name)
  return found
end

--- Draws a place of a class in a program that is to be called `name`.
function Walk:draw(class, side, kind, name)
  local found = self:baseline(kind)
  local journal = ("%s/%s/journal.jsonl"):format(RUNS, name)
  local place = { side = side }
  if class == "write" or class == "fsync" then
    place.call, place.path, place.when = class, journal, math.random(found[class])
  elseif class == "mkdir" then
    place.call, place.when = "mkdir", math.random(found.mkdir)
  elseif class == "http" then
    place.call, place.when = "sendto", math.random(found.http)
  elseif side == "before" then
    -- The go is being written, or is not on the disk yet.
    place.path = journal
    place.call = math.random(2) == 1 and "write" or "fsync"
    place.when = found["go_" .. place.call]
  elseif math.random(3) == 1 then
    place.call, place.path, place.when = "fsync", journal, found.go_fsync
  else
    -- It is on its way to some of the workers; what is sent for it are a few packets a worker.
    place.call, place.when = "sendto", found.go_send + math.random(0, 3 * WORKERS)
    place.side = math.random(2) == 1 and "before" or "after"
  end
  return place
end

-- After the kill ----------------------------------------------------------------------------------------------------

local function lines_of(path)
  local count = 0
  for _ in (fs.exists(path) and fs.read(path) or ""):gmatch("[^\n]*\n") do
    count = count + 1
  end
  return count
end

--- Compares what a worker's COMMAND printed with the runner's copy of it.
function Walk:compare(original, copy, what)
  if original == copy then
    return
  end
  local same = 0
  while same < #original and original:byte(same + 1) == copy:byte(same + 1) do
    same = same + 1
  end
  self.counts.lost = self.counts.lost + #original - same
  self.counts.doubled = self.counts.doubled + #copy - same
  say("  %s: %d bytes were printed, %d are here, the first %d agree", what, #original, #copy, same)
end

--- Takes a run up until it is done, as a person would: what had not been started is started again.
function Walk:take_up(name, kill_too)
  if kill_too then
    local argv = { BINARY, "attach", name }
    if place_of.kill_after(argv, self.environment, math.random() * 1.2) then
      self.counts.attach_kills = self.counts.attach_kills + 1
    end
  end
  local said
  for _ = 1, TRIES do
    local result = self:ciranda("attach", name)
    if result.code == 0 or result.stderr:find("has ended: done, exit status 0", 1, true) then
      return true
    end
    said = result.stderr
    if said:find("there is no run", 1, true) or said:find("has started no command", 1, true) then
      local again = self:runner(name)
      again.env, again.timeout = self.environment, COMMAND_LIMIT
      result = process.run(again)
      if result.code == 0 then
        return true
      end
      said = result.stderr
    end
    task.sleep(0.3)
  end
  say("  %s could not be brought to its end:\n%s", name, said)
  return false
end

--- A job after its runner was killed: it is brought to its end, and what it did is counted.
function Walk:settle_run(name, kill_too)
  local counts = self.counts
  if not self:take_up(name, kill_too) then
    counts.unfinished = counts.unfinished + 1
  end
  for worker = 0, WORKERS - 1 do
    local base = ("%s/%s.0.%d"):format(self.shared, name, worker)
    local starts = lines_of(base .. ".starts")
    if starts == 0 then
      counts.unfinished = counts.unfinished + 1
      say("  %s: worker %d never ran", name, worker)
    elseif starts > 1 then
      counts.run_twice = counts.run_twice + starts - 1
      say("  %s: worker %d was started %d times", name, worker, starts)
    end
    for attempt in (fs.exists(base .. ".starts") and fs.read(base .. ".starts") or ""):gmatch("%S+") do
      local copy = ("%s/%s/%s/output_slice_0000_worker_%04d.txt"):format(RUNS, name, attempt, worker)
      local original = ("%s.%s.bytes"):format(base, attempt)
      -- One that was stopped when it had only just started has not made its file yet.
      self:compare(
        fs.exists(original) and fs.read(original) or "",
        fs.exists(copy) and fs.read(copy) or "",
        ("%s, worker %d"):format(name, worker)
      )
    end
  end
end

--- The names of the queued resources that are there and that this walk asked for.
function Walk:there()
  local names = {}
  for _, resource in ipairs(cloud.list(self.simulator, "queuedResources")) do
    local name = resource.name:match("[^/]+$")
    if name:find("^create%-") then
      names[#names + 1] = name
    end
  end
  return names
end

--- A create after its program was killed: what is there is known, and can be deleted by who knows it.
function Walk:settle_create()
  local counts = self.counts
  local there = self:there()
  local result = self:ciranda("run", "--json", "gc", "--DELETE=true", "--ALL=true")
  if result.code ~= 0 then
    counts.unfinished = counts.unfinished + 1
    say("  gc ended with %s: %s%s", result.code or result.signal, result.stdout, result.stderr)
  end
  local known = {}
  for line in result.stdout:gmatch("[^\n]+") do
    local event = json.decode(line)
    if event.event == "object" then
      known[event.name] = true
    end
  end
  for _, name in ipairs(there) do
    if not known[name] then
      counts.forgotten = counts.forgotten + 1
      say("  %s is there, and gc does not know it", name)
    end
  end
  for _, name in ipairs(next(there) and self:there() or {}) do
    if known[name] then
      counts.unfinished = counts.unfinished + 1
      say("  %s is there although gc has deleted it", name)
    else
      self:ciranda("qr", "delete", name, "--force")
    end
  end
end

function Walk:settle(kind, name, kill_too)
  if kind == "run" then
    self:settle_run(name, kill_too)
  else
    self:settle_create()
  end
end

-- The walk ----------------------------------------------------------------------------------------------------------

--- Kills a program in a place of a class; draws another place when it does not come there.
function Walk:at_point(class, side, kind)
  for _ = 1, TRIES do
    local name, argv = self:fresh(kind)
    local place = self:draw(class, side, kind, name)
    local killed = place_of.kill_at(argv, self.environment, place, SCRATCH)
    say("%s: %s %s, %s %d %s", name, side, class, place.call, place.when, killed and "killed" or "never came")
    self:settle(kind, name)
    if killed then
      local point = side .. "_" .. class
      self.counts.kills = self.counts.kills + 1
      self.counts.by_point[point] = (self.counts.by_point[point] or 0) + 1
      return
    end
  end
  error(("no %s came to a place %s its %s"):format(kind, side, class), 0)
end

--- Kills a program at a random time.
function Walk:at_random(kind)
  local longest = kind == "run" and self.duration or 0.15
  for _ = 1, TRIES do
    local name, argv = self:fresh(kind)
    local seconds = math.random() * longest
    local killed = place_of.kill_after(argv, self.environment, seconds)
    say("%s: after %.3f s %s", name, seconds, killed and "killed" or "it had ended")
    self:settle(kind, name, kind == "run" and math.random(3) == 1)
    if killed then
      self.counts.kills = self.counts.kills + 1
      self.counts.random = self.counts.random + 1
      return
    end
    longest = longest * 0.7
  end
  error(("every %s ends before it can be killed"):format(kind), 0)
end

--- The whole walk: every class in turn, a kill at a random time after each.
function Walk:run(kills)
  local turn = 0
  for _ = 1, (kills + 1) // 2 do
    local class = CLASSES[turn // 2 % #CLASSES + 1]
    local side = turn % 2 == 0 and "before" or "after"
    local round = turn // (2 * #CLASSES)
    local kind = class ~= "go" and (class == "http" or round % 2 == 1) and "create" or "run"
    if class == "http" and round % 4 == 3 then
      kind = "run"
    end
    self:at_point(class, side, kind)
    if self.counts.kills < kills then
      self:at_random(turn % 4 == 3 and "create" or "run")
    end
    turn = turn + 1
  end
end

-- The control -------------------------------------------------------------------------------------------------------

--- The walk with that journal: a create killed when its request has gone, runners killed while the job runs.
local function control(simulator)
  local walk = new_walk(simulator, late_journal.tree(SCRATCH))
  walk.number = 100000
  local found = walk:baseline("create")
  local name, argv = walk:fresh("create")
  place_of.kill_at(argv, walk.environment, {
    call = "sendto",
    when = found.http,
    side = "after",
  }, SCRATCH)
  -- The request that has gone is answered although nobody waits.
  task.timeout(COMMAND_LIMIT, function()
    repeat
      task.sleep(0.05)
    until (" %s "):format(table.concat(walk:there(), " ")):find((" %s "):format(name), 1, true)
  end)
  say("%s: the control", name)
  walk:settle("create", name)
  -- The job cannot end before its runner does, however late the kill comes.
  walk.gate = walk.shared .. "/gate"
  name, argv = walk:fresh("run")
  local list = table.move(argv, 1, #argv, 1, {})
  list.env, list.stdout, list.stderr = walk.environment, process.DISCARD, process.DISCARD
  local child <close> = process.spawn(list)
  task.timeout(COMMAND_LIMIT, function()
    for worker = 0, WORKERS - 1 do
      while lines_of(("%s/%s.0.%d.starts"):format(walk.shared, name, worker)) == 0 do
        task.sleep(0.02)
      end
    end
  end)
  child:signal("SIGKILL")
  task.timeout(COMMAND_LIMIT, child.wait, child)
  fs.write(walk.gate, "")
  say("%s: the control", name)
  walk:settle("run", name)
  return { forgotten = walk.counts.forgotten, run_twice = walk.counts.run_twice }
end

local function main()
  math.randomseed(SEED)
  say("seed %d", SEED)
  fs.mkdir_p(SOURCE)
  process.run({ "cp", "-R", "tests/fixtures/trainer", SOURCE, timeout = 60 }):check()
  local simulator <close> = sim.start({ slices = 1, prefix = "kill" })
  local walk = new_walk(simulator)
  -- The first run also makes the key and lets it in: places are counted in those that follow.
  local name, argv = walk:fresh("run")
  argv.env, argv.timeout = walk.environment, COMMAND_LIMIT
  local began = uv.hrtime()
  process.run(argv):check()
  walk.duration = (uv.hrtime() - began) / 1e9
  walk:settle("run", name)
  walk:run(KILLS)
  local late = control(simulator)

  local counts, failures = walk.counts, {}
  for _, key in ipairs({ "lost", "doubled", "run_twice", "forgotten", "unfinished" }) do
    if counts[key] ~= 0 then
      table.insert(failures, key)
    end
  end
  if late.forgotten == 0 or late.run_twice == 0 then
    table.insert(failures, "the control passed")
  end
  local fewest = KILLS // 40
  for _, class in ipairs(CLASSES) do
    for _, side in ipairs({ "before", "after" }) do
      if (counts.by_point[side .. "_" .. class] or 0) < math.max(fewest, KILLS >= 20 and 1 or 0) then
        table.insert(failures, ("too few kills %s a %s"):format(side, class))
      end
    end
  end
  counts.e2e, counts.seed, counts.control, counts.failures = "kill", SEED, late, json.array(failures)
  print(json.encode(counts))
  return #failures == 0
end

local ok = task.timeout(LIMIT, main)
os.exit(ok and 0 or 1)
