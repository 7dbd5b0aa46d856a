--- One training job of JAX and Orbax, stopped in every way there is, on two simulated slices of two workers.
---
--- The save interval is 1000, so a step on disk between two multiples was made by a signal. Each case starts the same
--- command, lets it train, stops it in its own way, and looks at what is on disk; the next case resumes from there.
--- Every loss that is printed is held against a run that was never stopped. Jobs that do not save come last, and must
--- be reported as such. What was seen goes to evidence.json; the exit status is 0 only when every expectation holds.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local PLACE = assert(os.getenv("CIRANDA_E2E"), "CIRANDA_E2E names the directory of the test")
local SHORT = os.getenv("CIRANDA_SHORT") == "1"
local NAME, SLICES, WORKERS = "jax", 2, 2
local ZONE = "us-central2-b"
--- Steps that every process does before it is stopped, and those of the run that was never stopped.
local STEPS, REFERENCE = 6, 1200
--- The largest difference of a loss, as a part of it: sums in another order differ by less, a lost state by far more.
local TOLERANCE = 1e-3
--- Seconds: for JAX to start and do STEPS, for a stop, and for everything.
local START, STOP, LIMIT = 300, 180, SHORT and 900 or 3000

local failures, evidence = {}, { cases = json.array({}), negative = json.array({}) }
local simulator, environment, checkpoints, python
local reference = {}

local function say(format, ...)
  io.stdout:write(format:format(...), "\n")
  io.stdout:flush()
end

--- Checks one expectation; what fails is told at the end.
local function expect(holds, format, ...)
  if not holds then
    local text = format:format(...)
    failures[#failures + 1] = text
    say("  FAILED: %s", text)
  end
  return holds
end

-- The cloud --------------------------------------------------------------------------------------------------------

--- A request to the simulator, decoded.
local function ask(method, path, body)
  local response = http.request({
    method = method,
    url = environment.CIRANDA_SIM_URL .. path,
    timeout = 60,
    headers = {
      Authorization = "Bearer " .. fs.read(environment.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE):match("%S+"),
      ["Content-Type"] = "application/json",
    },
    body = body and json.encode(body) or nil,
  })
  assert(response.status == 200, ("%s %s: HTTP %d %s"):format(method, path, response.status, response.body))
  return json.decode(response.body)
end

local function node_path(version, slice)
  return ("/%s/projects/%s/locations/%s/nodes/%s-%d"):format(
    version,
    environment.CLOUDSDK_CORE_PROJECT,
    ZONE,
    NAME,
    slice
  )
end

--- Waits until both slices are READY, and have been for a moment.
local function wait_until_ready()
  task.timeout(STOP, function()
    local ready = 0
    while ready < 3 do
      local all = true
      for slice = 0, SLICES - 1 do
        all = all and ask("GET", node_path("v2", slice)).state == "READY"
      end
      ready = all and ready + 1 or 0
      task.sleep(0.3)
    end
  end)
end

--- Runs `ciranda ...` to its end.
local function ciranda(...)
  say("$ ciranda %s", table.concat({ ... }, " "))
  return process.run({
    BINARY,
    env = environment,
    stdout = process.INHERIT,
    stderr = process.INHERIT,
    timeout = START,
    ...,
  })
end

local function create_slices()
  local result = ciranda(
    "qr",
    "create",
    NAME,
    "--node-count=" .. SLICES,
    "--node-prefix=" .. NAME,
    "--accelerator-type=v4-16",
    "--runtime-version=tpu-ubuntu2204-base",
    "--autocheckpoint-enabled",
    "--spot"
  )
  assert(result.code == 0, "qr create ended with " .. tostring(result.code))
end

-- The job ----------------------------------------------------------------------------------------------------------

--- A port of this machine that nobody uses now, nor is given to a connection until it is listened on: those come from
--- 32768 on.
local function free_port()
  while true do
    local socket, port = uv.new_tcp(), math.random(20000, 29999)
    -- On all addresses, as JAX's coordinator will: one that listens on any of them is in its way.
    local free = socket:bind("0.0.0.0", port) and socket:listen(1, function() end)
    socket:close()
    if free then
      return port
    end
  end
end

--- The logs as the runner has them: "SLICE/WORKER" -> text.
local function logs_of(run)
  local logs = {}
  for slice = 0, SLICES - 1 do
    for worker = 0, WORKERS - 1 do
      local path = ("%s/%s/output_slice_%04d_worker_%04d.txt"):format(os.getenv("TMPDIR"), run, slice, worker)
      local ok, text = pcall(fs.read, path)
      logs[slice .. "/" .. worker] = ok and text or ""
    end
  end
  return logs
end

--- The steps that a log says were completed, in order, with their losses.
local function steps_in(text)
  local steps = {}
  for step, loss in text:gmatch("completed step: (%d+), seconds: [%d.]+, loss: (%S+)") do
    steps[#steps + 1] = { step = math.tointeger(tonumber(step)), loss = tonumber(loss) }
  end
  return steps
end

--- Finished steps on disk, in order; and the names of unfinished ones.
local function steps_on_disk(directory)
  local steps, unfinished = {}, {}
  local ok, entries = pcall(fs.list, directory)
  for _, entry in ipairs(ok and entries or {}) do
    local step = math.tointeger(tonumber(entry.name:match("^%d+$")))
    if step then
      steps[#steps + 1] = step
    elseif entry.name:find("tmp", 1, true) then
      unfinished[#unfinished + 1] = entry.name
    end
  end
  table.sort(steps)
  return steps, unfinished
end

--- The processes of the trainer: "SLICE/WORKER" -> pid. There is one that is Python on each worker.
local function trainers()
  local found = {}
  for _, entry in ipairs(fs.list("/proc")) do
    local pid = math.tointeger(tonumber(entry.name))
    local read, command = pcall(fs.read, ("/proc/%s/cmdline"):format(entry.name))
    if
      pid
      and read
      and command:find("/venv/bin/python%zt?r?a?i?n?%.?p?y?")
      and command:find(checkpoints, 1, true)
    then
      local ok, variables = pcall(fs.read, ("/proc/%d/environ"):format(pid))
      local slice = ok and variables:match("%zCIRANDA_SLICE_ID=(%d+)")
      local worker = ok and variables:match("%zCIRANDA_WORKER_ID=(%d+)")
      if slice and worker then
        found[slice .. "/" .. worker] = pid
      end
    end
  end
  return found
end

---@class e2e.Running a job under way
---@field run string
---@field program table the runner
---@field output string what it has said so far is in this file
local Running = {}
Running.__index = Running

--- Starts a command of ours whose words are kept in a file.
local function start_program(run, words)
  say("$ ciranda %s", table.concat(words, " "))
  local path = ("%s/state/%s.%d.txt"):format(PLACE, run, #evidence.cases + #evidence.negative)
  local output = assert(uv.fs_open(path, "a", 384))
  local program =
    process.spawn({ BINARY, env = environment, stdout = output, stderr = output, table.unpack(words) })
  uv.fs_close(output)
  return program, path
end

--- Starts the job through multihost_runner.
---@param run string
---@param options { directory: string?, trainer: string?, flags: string[]? }
local function start(run, options)
  local directory = options.directory or checkpoints
  local settings = "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2"
  local command = ("%s %s train.py --checkpoint_dir=%s --coordinator=127.0.0.1:%d %s"):format(
    settings,
    python,
    directory,
    free_port(),
    options.trainer or ""
  )
  local program, output = start_program(run, {
    "multihost_runner",
    "--TPU_PREFIX=" .. NAME,
    "--RUN_NAME=" .. run,
    "--SCRIPT_DIR=tests/e2e/jax",
    "--COMMAND=" .. command,
    table.unpack(options.flags or {}),
  })
  return setmetatable({ run = run, program = program, output = output, directory = directory }, Running)
end

--- What the runner has said.
function Running:said()
  local ok, text = pcall(fs.read, self.output)
  return ok and text or ""
end

--- Waits until every process has completed so many steps.
function Running:train(count)
  local ok, problem = pcall(task.timeout, START, function()
    while true do
      -- Asked before the logs are read: a runner that ends in between has left them complete.
      local lives = uv.kill(self.program.pid, 0)
      local least = math.huge
      for _, text in pairs(logs_of(self.run)) do
        least = math.min(least, #steps_in(text))
      end
      if least >= count then
        return
      end
      assert(lives, "the runner has ended")
      task.sleep(0.1)
    end
  end)
  if not ok then
    say("%s", self:said())
    for place, text in pairs(logs_of(self.run)) do
      say("--- %s\n%s", place, text:sub(-2000))
    end
    error(problem, 0)
  end
end

--- Waits for the runner's end; returns its status.
function Running:finish()
  local ok, result = pcall(task.timeout, STOP, self.program.wait, self.program)
  if not ok then
    self.program:signal("SIGKILL")
    say("%s", self:said())
    error(("the runner of %s has not ended within %d s"):format(self.run, STOP), 0)
  end
  return result.code
end

--- The first and last steps of all processes, whether they are the same everywhere, and the largest difference of a
--- loss from that of the run that was never stopped.
local function trained(run)
  local first, last, same, gap = nil, nil, true, 0
  for _, text in pairs(logs_of(run)) do
    local steps = steps_in(text)
    if #steps == 0 then
      return nil, nil, false, math.huge
    end
    first, last = first or steps[1].step, last or steps[#steps].step
    same = same and steps[1].step == first and steps[#steps].step == last
    for _, entry in ipairs(steps) do
      local expected = reference[entry.step]
      gap = math.max(gap, expected and math.abs(entry.loss - expected) / expected or math.huge)
    end
  end
  return first, last, same, gap
end

-- The cases --------------------------------------------------------------------------------------------------------

local number = 0

--- Starts the job, checks that it resumes from what is on disk, stops it with `act`, looks again.
---@param name string
---@param act fun(running: e2e.Running): integer? the step that the last attempt resumed from, where there were two
---@param expected { status: integer[], saved: boolean?, trainer: string?, flags: string[]?, says: string[]? }
local function case(name, act, expected)
  number = number + 1
  say("\n== %s", name)
  local before = steps_on_disk(checkpoints)
  local newest = before[#before]
  local running = start(("jax-%02d"):format(number), {
    trainer = expected.trainer,
    flags = expected.flags,
  })
  running:train(STEPS)
  newest = act(running) or newest
  local status = running:finish()
  local said = running:said()
  local after = steps_on_disk(checkpoints)
  local first, last, same, gap = trained(running.run)
  local entry = {
    case = name,
    status = status,
    resumed_from = newest or json.null,
    first_step = first or json.null,
    last_step = last or json.null,
    newest_on_disk = after[#after] or json.null,
    loss_gap = gap,
    saved = after[#after] ~= newest,
  }
  table.insert(evidence.cases, entry)
  expect(
    first == (newest and newest + 1 or 0),
    "%s: began at step %s with %s on disk",
    name,
    tostring(first),
    tostring(newest)
  )
  expect(gap <= TOLERANCE, "%s: a loss is off by %g of it", name, gap)
  if expected.saved ~= false then
    entry.same_step = same and last == after[#after]
    expect(
      entry.same_step and last % 1000 ~= 0,
      "%s: the processes ended at step %s (the same: %s), on disk is %s",
      name,
      tostring(last),
      tostring(same),
      tostring(after[#after])
    )
  end
  local good = false
  for _, wanted in ipairs(expected.status) do
    good = good or status == wanted
  end
  expect(good, "%s: the runner ended with %s", name, tostring(status))
  for _, text in ipairs(expected.says or {}) do
    text = text:gsub("STEP", tostring(after[#after]))
    expect(said:find(text, 1, true), "%s: the runner did not say %q:\n%s", name, text, said)
  end
  return entry
end

--- A job that does not save fails its drill, which says why.
---@param name string
---@param trainer string
---@param grace integer seconds
---@param why string[] what the drill's last line says
local function negative(name, trainer, grace, why)
  number = number + 1
  say("\n== %s", name)
  local directory = ("%s-%d"):format(checkpoints, number)
  local running = start(("jax-%02d"):format(number), {
    directory = directory,
    trainer = trainer,
    flags = { "--GRACE=" .. grace },
  })
  running:train(STEPS)
  local program, output = start_program(running.run .. "-drill", {
    "autocheckpoint",
    "drill",
    running.run,
    "--GRACE=" .. grace,
    "--RESUME_TIMEOUT=" .. START,
  })
  local status = task.timeout(STOP + START, program.wait, program).code
  local said = fs.read(output)
  say("%s", said)
  running:finish()
  local steps, unfinished = steps_on_disk(directory)
  local reported = said:match("Checkpoint: (not saved[^\n]*)")
  local verdict = said:match("drill failed: [^\n]*")
  table.insert(evidence.negative, {
    case = name,
    status = status,
    reported = reported or json.null,
    verdict = verdict or json.null,
    newest_on_disk = steps[#steps] or json.null,
    unfinished = json.array(unfinished),
  })
  expect(status == 1, "%s: the drill ended with %s", name, tostring(status))
  expect(reported, "%s: was not reported as not saved:\n%s", name, said)
  expect(steps[#steps] == 0, "%s: step %s is on disk", name, tostring(steps[#steps]))
  for _, words in ipairs(why) do
    expect((verdict or ""):find(words), "%s: the verdict does not say %q: %s", name, words, tostring(verdict))
  end
  -- The drill has left it running.
  expect(ciranda("stop", running.run, "--GRACE=1").code == 0, "%s: it could not be stopped", name)
end

--- Waits until a run's second attempt trains; gives the step that it has to resume from. The first one has ended when
--- the next is announced, and what is on disk then counts.
local function next_attempt(running)
  task.timeout(START, function()
    while not running:said():find("Another attempt in", 1, true) do
      task.sleep(0.05)
    end
  end)
  local steps = steps_on_disk(checkpoints)
  task.timeout(START, function()
    while select(2, running:said():gsub("Running main command", "")) < 2 do
      task.sleep(0.1)
    end
  end)
  running:train(STEPS)
  return steps[#steps]
end

--- A drill that succeeds; gives the step that it says was saved and resumed from.
local function drill(running, ...)
  local program, output = start_program(running.run .. "-drill", {
    "autocheckpoint",
    "drill",
    running.run,
    "--RESUME_TIMEOUT=" .. START,
    ...,
  })
  local status = task.timeout(STOP + START, program.wait, program).code
  local said = fs.read(output)
  say("%s", said)
  expect(status == 0, "the drill ended with %s", tostring(status))
  expect(said:find("A save should take: 2 steps of", 1, true), "the drill did not do its arithmetic")
  local step = math.tointeger(
    tonumber(said:match("drill: step (%d+) was saved in [%d.]+ s and training resumed from it"))
  )
  assert(step, "the drill has failed")
  local steps = steps_on_disk(checkpoints)
  expect(step == steps[#steps], "the drill saved %d, on disk is %s", step, tostring(steps[#steps]))
  return step
end

local function to_runner(running)
  running.program:signal("SIGTERM")
end

local function to_one_process(signal)
  return function()
    local pid = trainers()["1/0"]
    assert(pid, "slice 1 worker 0 has no trainer")
    uv.kill(pid, signal)
  end
end

--- Runs the job without stopping it, as one process: what every loss should be.
local function make_reference()
  local result = process.run({
    PLACE .. "/venv/bin/python",
    "tests/e2e/jax/train.py",
    "--step-time=0",
    "--steps=" .. REFERENCE,
    env = { JAX_PLATFORMS = "cpu", JAX_NUM_CPU_DEVICES = "8" },
    timeout = START,
  })
  assert(result.code == 0, result.stderr)
  evidence.jax, evidence["orbax-checkpoint"] = result.stdout:match("^jax (%S+), orbax%-checkpoint (%S+)")
  for _, entry in ipairs(steps_in(result.stdout)) do
    reference[entry.step] = entry.loss
  end
  assert(reference[REFERENCE - 1], "the reference run is not complete")
  say("jax %s, orbax-checkpoint %s", evidence.jax, evidence["orbax-checkpoint"])
end

--- Does Python itself lie where isolated workers have directories of their own?
local function python_is_hidden()
  local script = "import sys; print(sys.base_prefix)"
  local prefix = process.run({ PLACE .. "/venv/bin/python", "-c", script, timeout = 30 }).stdout
  return prefix:find("^/home/") or prefix:find("^/root/") or prefix:find("^/tmp/") or prefix:find("^/run/")
end

--- The virtual environment where every worker sees it: hard links, when the file system lets us.
local function share_python()
  local target = environment.CIRANDA_SIM_SHARED .. "/venv"
  local source = PLACE .. "/venv"
  local linked = process.run({ "cp", "-al", source, target, timeout = 60 })
  if linked.code ~= 0 then
    process.run({ "rm", "-rf", target, timeout = 60 })
    local copied = process.run({ "cp", "-a", source, target, timeout = 300 })
    assert(copied.code == 0, copied.stderr)
  end
  return target .. "/bin/python"
end

--- The last run finishes by itself.
local function finish_training()
  number = number + 1
  say("\n== the rest of the training")
  local before = steps_on_disk(checkpoints)
  local newest = before[#before]
  local steps = newest + 1 + STEPS
  local running = start(("jax-%02d"):format(number), { trainer = "--steps=" .. steps })
  running:train(STEPS)
  local status = running:finish()
  local first, last, same, gap = trained(running.run)
  evidence.finished = { status = status, first_step = first, last_step = last, loss_gap = gap }
  expect(status == 0, "the last run ended with %s:\n%s", tostring(status), running:said())
  expect(first == newest + 1 and last == steps - 1 and same, "the last run did steps %s to %s", first, last)
  expect(gap <= TOLERANCE, "the last run: a loss is off by %g of it", gap)
end

local function main()
  make_reference()
  local private <close> = sim.start({
    zone = ZONE,
    scale = 600,
    grace = { notice = 5 },
    isolation = python_is_hidden() and "none" or "auto",
  })
  simulator, environment = private, {}
  for name, value in pairs(simulator.env) do
    environment[name] = value
  end
  for _, note in ipairs(simulator.notes) do
    say("note: %s", note)
  end
  create_slices()
  python = share_python()
  checkpoints = environment.CIRANDA_SIM_SHARED .. "/checkpoints"

  case("SIGTERM to the runner", to_runner, { status = { 143 }, says = { "saved: step STEP is on disk" } })
  if not SHORT then
    local preempted =
      { status = { 143 }, says = { "Checkpoint: saved: step STEP is on disk", "preempted: " } }
    case("SIGTERM to one process", to_one_process("sigterm"), preempted)
    case("a maintenance event", function()
      ask("POST", node_path("v2alpha1", 0) .. ":simulateMaintenanceEvent", { workerIds = { "0" } })
    end, preempted)
    wait_until_ready()
    case("SIGKILL of a worker's process", function(running)
      running:train(15)
      to_one_process("sigkill")()
    end, {
      status = { 137 },
      saved = false,
      trainer = "--save-interval=5",
      flags = { "--FAILURE_GRACE=5" },
      says = { "slice 1 worker 0 with error code 137 (SIGKILL)", "Last step on disk: STEP" },
    })
    case("SIGKILL of the runner, then attach", function(running)
      running.program:signal("SIGKILL")
      running.program:wait()
      local reached = #steps_in(logs_of(running.run)["0/0"])
      running.program, running.output = start_program(running.run, { "attach", running.run })
      running:train(reached + STEPS)
      running.program:signal("SIGTERM")
    end, { status = { 143 }, says = { "saved: step STEP is on disk" } })
    case("a drill", function(running)
      local drilled = drill(running)
      running.program:wait()
      local reached = #steps_in(logs_of(running.run)["0/0"])
      running.program, running.output = start_program(running.run, { "attach", running.run })
      running:train(reached + STEPS) -- more than the drill has left in the logs: the new runner is there
      running.program:signal("SIGTERM")
      return drilled
    end, { status = { 143 }, says = { "saved: step STEP is on disk" } })
    case("repair under a live run", function(running)
      running:train(15)
      ask("POST", ("/sim/v1/nodes/%s-1:lose"):format(NAME))
      local from = next_attempt(running)
      running.program:signal("SIGTERM")
      return from
    end, {
      status = { 143 },
      trainer = "--save-interval=5",
      flags = { "--INFRA_RESTARTS=2", "--PREEMPTION_RESTARTS=1", "--FAILURE_GRACE=5" },
      says = { "The machines: " .. NAME .. " is ACTIVE", "saved: step STEP is on disk", "Attempt 1 (" },
    })
    case("a drill by a maintenance event: the runner goes on by itself", function(running)
      local drilled = drill(running, "--BY=maintenance", "--WORKERS=slice1/worker1")
      expect(drilled % 1000 ~= 0, "the event has made step %d", drilled)
      running:train(STEPS)
      running.program:signal("SIGTERM")
      return drilled
    end, {
      status = { 143 },
      flags = { "--PREEMPTION_RESTARTS=1" },
      says = { "Attempt 1 (", "preempted", "saved: step STEP is on disk" },
    })
    wait_until_ready()
    case("preemption of a spot slice", function()
      ask("POST", ("/sim/v1/nodes/%s-1:preempt"):format(NAME), { notice = 30 })
    end, preempted)
    assert(ciranda("qr", "delete", NAME, "--force").code == 0)
    create_slices()
  end
  finish_training()
  -- Periodic saves are a thousand steps apart, so all three go on from step 0.
  local nothing, elsewhere = "not saved: nothing was saved", "it resumed at step 1, not at %d+"
  local exceeded = "slice[^;]* did not end within the grace of %d+ s"
  negative("autocheckpoint off", "--variant=no-policy", 60, { nothing, elsewhere })
  if not SHORT then
    negative(
      "a saver slower than the grace",
      "--variant=slow-saver --save-seconds=60",
      8,
      { nothing, exceeded }
    )
    negative("a trainer that never asks", "--variant=ignores-term", 4, { nothing, exceeded })
  end
end

local ok, problem = pcall(task.timeout, LIMIT, main)
if not ok then
  failures[#failures + 1] = tostring(problem)
end
evidence.failures = json.array(failures)
fs.write(PLACE .. "/state/evidence.json", json.encode(evidence, { indent = true }) .. "\n")
say("\nevidence: %s/state/evidence.json", PLACE)
for _, failure in ipairs(failures) do
  io.stderr:write("e2e-jax: ", failure, "\n")
end
local saves, same, resumed, gap = 0, true, json.array({}), 0
for _, entry in ipairs(evidence.cases) do
  saves = saves + (entry.same_step and 1 or 0)
  same = same and entry.same_step ~= false
  table.insert(resumed, entry.first_step)
  gap = math.max(gap, entry.loss_gap)
end
if evidence.finished then
  table.insert(resumed, evidence.finished.first_step)
  gap = math.max(gap, evidence.finished.loss_gap)
end
print(json.encode({
  e2e = "jax",
  ok = #failures == 0,
  cases = #evidence.cases + #evidence.negative,
  saves = saves,
  same_step = same,
  resumed_at = resumed,
  loss_gap = gap,
  jax = evidence.jax,
  ["orbax-checkpoint"] = evidence["orbax-checkpoint"],
}))
os.exit(#failures == 0 and 0 or 1)
