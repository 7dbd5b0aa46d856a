--- One walk: a simulated cloud, a job on it, and what the plan says befalls them; what is seen is seen from outside.
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local logs = require("jobwalk.logs")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")
local waiting = require("ciranda.gcp.waiting")

local M = {}

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local NAME, BUCKET = "walk", "bucket"
local LIMIT = 420 -- s that a job may take to go on, or to end
local LOOK = 0.3 -- s between two looks
local IDLE_LIMIT = 120 -- s from the end of training until the chips are given back

---@class jobwalk.Walk
---@field plan jobwalk.Plan
---@field root string
---@field simulator ciranda.Simulator
---@field life integer how often the job has been given
---@field runner table? the program, while it is there
---@field problems string[]
local Walk = {}
Walk.__index = Walk

function Walk:problem(format, ...)
  self.problems[#self.problems + 1] = format:format(...)
end

--- Something of the simulator's own interface, which no fault strikes.
function Walk:control(method, path, body)
  local answer = http.request({
    method = method,
    url = self.simulator.url .. "/sim/v1/" .. path,
    body = body and json.encode(body),
    timeout = 60,
  })
  return answer.status, json.decode(answer.body)
end

--- The state of the job's queued resource, nil when it is gone.
function Walk:state()
  local _, status = self:control("GET", "status")
  for _, queued_resource in ipairs(status.queuedResources) do
    if queued_resource.id == NAME then
      return queued_resource.state, queued_resource.error
    end
  end
  return nil
end

-- The person at the terminal ---------------------------------------------------------------------------------------

--- COMMAND: what it prints is also kept in a copy; it holds the worker's accelerator; it trains.
function Walk:command()
  local copy = ("%s/$SLICE_ID.$WORKER_ID.$(date +%%s%%N).%d-$CIRANDA_ATTEMPT"):format(self.copies, self.life)
  return table.concat({
    ("umask 0; exec > >(trap '' TERM; exec tee -a %s) 2>&1;"):format(copy),
    "for d in ${CIRANDA_SIM_DEVICES:-/dev/accel /dev/vfio/}; do [ ! -e ${d}0 ] || exec 9<${d}0; done;",
    "exec python3 train.py --step-time=0.1 --peer-timeout=120 --checkpoint_dir=" .. self.checkpoints,
    ("--until=%s --save-every=%d"):format(self.enough, self.plan.save_every),
    ("--attempt=%d-$CIRANDA_ATTEMPT"):format(self.life),
  }, " ")
end

--- Starts `ciranda ...`, its words in a file.
function Walk:start(words)
  self.started = (self.started or 0) + 1
  local path = ("%s/said.%d"):format(self.root, self.started)
  local output = assert(uv.fs_open(path, "w", 384))
  local environment = { TMPDIR = self.root, XDG_STATE_HOME = self.root .. "/state" }
  for name, value in pairs(self.simulator.env) do
    environment[name] = value
  end
  local program = process.spawn({
    BINARY,
    cwd = self.root .. "/code",
    env = environment,
    stdin = process.DISCARD,
    stdout = output,
    stderr = output,
    table.unpack(words),
  })
  uv.fs_close(output)
  return { program = program, path = path }
end

--- Gives the job, as the plan says or watched; the same words again are the same job.
function Walk:give(follow)
  local plan = self.plan
  self.given_at = uv.hrtime() / 1e9
  local words = {
    "multihost_job",
    "--RUN_NAME=" .. NAME,
    "--BUCKET_NAME=" .. BUCKET,
    "--TPU_TYPE=" .. plan.type,
    "--NUM_SLICES=" .. plan.slices,
    "--ENABLE_AUTOCHECKPOINT=" .. tostring(plan.autocheckpoint),
    "--PREEMPTIONS=9",
    "--follow=" .. tostring(follow),
    "--COMMAND=" .. self:command(),
  }
  if plan.spot then
    words[#words + 1] = "--CQR_EXTRA_ARGS=--spot"
  end
  local runner = self:start(words)
  if follow then
    self.runner = runner
    return
  end
  local result = task.timeout(LIMIT, runner.program.wait, runner.program)
  if result.code ~= 0 then
    error({ walk = "a job given: " .. result:reason() }, 0)
  end
end

--- Has the program that watches the job ended?
function Walk:runner_gone()
  return not self.runner or not uv.kill(self.runner.program.pid, 0)
end

--- Waits until something holds; whoever should be there looks after the job meanwhile.
function Walk:wait(what, holds)
  local ok, problem = pcall(task.timeout, LIMIT, function()
    while not holds() do
      task.sleep(LOOK)
      -- Nobody is there to ask for preempted slices again, until somebody looks and types the same again.
      if not self.runner and self:state() == "SUSPENDED" then
        self:give(self.plan.seed % 2 == 0)
      end
    end
  end)
  if not ok and errors.is(problem, "timeout") then
    error({ walk = what }, 0)
  elseif not ok then
    error(problem, 0)
  end
end

-- The training -----------------------------------------------------------------------------------------------------

--- The places of all workers, "SLICE.WORKER".
function Walk:places()
  local list = {}
  for slice = 0, self.plan.slices - 1 do
    for worker = 0, self.plan.workers - 1 do
      list[#list + 1] = ("%d.%d"):format(slice, worker)
    end
  end
  return list
end

--- How many attempts every worker has begun, and how many steps each has done in its newest.
function Walk:progress()
  local began, least = {}, math.huge
  for _, place in ipairs(self:places()) do
    local attempts = logs.attempts(self.copies, place)
    local newest = attempts[#attempts]
    began[place] = #attempts
    least = math.min(least, newest and newest.first and newest.last - newest.first + 1 or 0)
  end
  return began, least
end

--- Waits until all have done so many steps in an attempt that was begun after those of `before`.
function Walk:train(count, before)
  local what = ("%d steps of all workers"):format(count)
  self:wait(what, function()
    if self:runner_gone() and not self:state() then
      error({ walk = what }, 0)
    end
    local began, least = self:progress()
    for place, number in pairs(began) do
      if number <= (before[place] or 0) then
        return false
      end
    end
    return least >= count
  end)
end

--- The process of a worker's trainer.
function Walk:trainer(event)
  for _, entry in ipairs(fs.list("/proc")) do
    local pid = math.tointeger(tonumber(entry.name))
    local ok, command = pcall(fs.read, ("/proc/%s/cmdline"):format(entry.name))
    if pid and ok and command:find("^python3%ztrain%.py%z") and command:find(self.checkpoints, 1, true) then
      local readable, variables = pcall(fs.read, ("/proc/%d/environ"):format(pid))
      if
        readable
        and variables:find(("\0CIRANDA_SLICE_ID=%d\0"):format(event.slice), 1, true)
        and variables:find(("\0CIRANDA_WORKER_ID=%d\0"):format(event.worker), 1, true)
      then
        return pid
      end
    end
  end
  return nil
end

-- What befalls it --------------------------------------------------------------------------------------------------

--- A call of the API by whoever is not under test: until it is taken, since faults strike it too.
function Walk:call(path, body)
  local token = fs.read(self.simulator.env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE):match("%S+")
  self:wait(path, function()
    local ok, answer = pcall(http.request, {
      method = "POST",
      url = ("%s/v2alpha1/projects/%s/locations/%s/%s"):format(
        self.simulator.url,
        self.simulator.env.CLOUDSDK_CORE_PROJECT,
        self.simulator.env.CLOUDSDK_COMPUTE_ZONE,
        path
      ),
      headers = { Authorization = "Bearer " .. token, ["Content-Type"] = "application/json" },
      body = json.encode(body),
      timeout = 30,
    })
    return ok and answer.status < 429
  end)
end

local EVENTS = {}

for _, action in ipairs({ "maintain", "lose", "preempt" }) do
  EVENTS[action] = function(walk, event)
    local path = ("nodes/%s:%s"):format(walk:node(event.slice), action)
    local status, answer = walk:control("POST", path, {})
    assert(status == 200, path .. ": " .. json.encode(answer))
  end
end

function EVENTS.simulate(walk, event)
  local body = { workerIds = { tostring(event.worker) } }
  walk:call(("nodes/%s:simulateMaintenanceEvent"):format(walk:node(event.slice)), body)
end

function EVENTS.reset(walk)
  local reset = walk:start({ "qr", "reset", NAME })
  local result = task.timeout(LIMIT, reset.program.wait, reset.program)
  if result.code ~= 0 then
    error({ walk = ("qr reset, which ended with %s"):format(result:reason()) }, 0)
  end
end

function EVENTS.kill(walk, event)
  local pid = walk:trainer(event)
  if not pid then
    error({ walk = "a process to kill" }, 0)
  end
  uv.kill(pid, "sigkill")
  walk:ended(137, event)
  -- It is the job's own failure. Somebody looks into it, and gives the job again: no sooner than a machine could really
  -- have come and gone, since until then a request that is not there may still be on its way.
  task.sleep(math.max(0, waiting.NOT_YET + 10 - (uv.hrtime() / 1e9 - walk.given_at)))
  walk.life = walk.life + 1
  walk:give(walk.plan.runner ~= "gone")
end

function Walk:node(slice)
  return self.plan.slices == 1 and NAME or ("%s-%d"):format(NAME, slice)
end

--- One event of the plan, when the time for it has come.
function Walk:strike(index, event, before)
  self:train(event.after, before)
  local began = self:progress()
  self.at = ("event %d, %s"):format(index, event.kind)
  if self.plan.runner == "killed" and index == 1 then
    self.runner.program:signal("SIGKILL")
    self.runner.program:wait()
    self.runner = nil
  end
  EVENTS[event.kind](self, event)
  if self.plan.runner == "killed" and index == 1 and event.kind ~= "kill" then
    self:give(true)
  end
  return began
end

-- The end ----------------------------------------------------------------------------------------------------------

--- Waits until the queued resource is gone, and its runner, which must say how the job ended.
function Walk:ended(status, event)
  self.trained = nil
  self:wait("the queued resource is gone", function()
    local state = self:state()
    if not self.trained and status == 0 then
      local finished = 0
      for _, place in ipairs(self:places()) do
        local attempts = logs.attempts(self.copies, place)
        local newest = attempts[#attempts]
        finished = finished + (newest and newest.printed:find("training finished", 1, true) and 1 or 0)
      end
      self.trained = finished == #self:places() and uv.hrtime() / 1e9 or nil
    end
    return state == nil
  end)
  if self.runner then
    local result = task.timeout(LIMIT, self.runner.program.wait, self.runner.program)
    local said = fs.read(self.runner.path)
    if result.code ~= status then
      self:problem("the runner ended with %s, not %d:\n%s", result:reason(), status, said)
    elseif
      event
      and not said:find(("slice %d worker %d with error code 137"):format(event.slice, event.worker), 1, true)
    then
      self:problem("the runner does not name slice %d worker %d:\n%s", event.slice, event.worker, said)
    end
    self.runner = nil
  end
end

--- An object of the bucket, as its bytes; "" when there is none, or it does not come.
function Walk:object(name)
  local ok, answer = pcall(http.request, {
    url = ("%s/storage/v1/b/%s/o/%s?alt=media"):format(
      self.simulator.url,
      BUCKET,
      (("%s/%s"):format(NAME, name):gsub("/", "%%2F"))
    ),
    timeout = 60,
  })
  return ok and answer.status == 200 and answer.body or ""
end

--- All have finished, and then a machine is lost, or all are reset, before the queued resource can be deleted.
function Walk:strike_late()
  self.at = "after the end, " .. self.plan.late
  local fault = { kind = "error", method = "queuedResources.delete", status = "UNAVAILABLE", probability = 1 }
  self:control("POST", "faults", fault)
  fs.write(self.enough, "", { sync = false })
  local function all(what, object, text)
    self:wait(what, function()
      for _, place in ipairs(self:places()) do
        local name = object .. "_slice_" .. place:gsub("%.", "_worker_")
        if not self:object(name):find(text, 1, true) then
          return false
        end
      end
      return true
    end)
  end
  all("all have finished", "status", '"status":0,')
  EVENTS[self.plan.late](self, { slice = 0, worker = 0 })
  all("nobody runs it again", "main_command_log", "it is not run again")
  self:control("DELETE", "faults")
end

--- Processes that are left of the workers'.
function Walk:left()
  local list = {}
  for _, entry in ipairs(fs.list("/proc")) do
    local ok, variables = pcall(fs.read, ("/proc/%s/environ"):format(entry.name))
    if
      entry.name:find("^%d+$")
      and ok
      and variables:find("CIRANDA_SIM_SHARED=" .. self.simulator.env.CIRANDA_SIM_SHARED .. "\0", 1, true)
    then
      local named, command = pcall(fs.read, ("/proc/%s/cmdline"):format(entry.name))
      list[#list + 1] = named and command:gsub("%z", " ") or entry.name
    end
  end
  return list
end

--- How many attempts may end without their last bytes in the bucket: those whose machine was taken away.
function Walk:cuts(slice)
  local count = 0
  for _, event in ipairs(self.plan.events) do
    if event.kind == "preempt" or event.kind == "lose" and event.slice == slice then
      count = count + 1
    end
  end
  return count
end

--- Looks at everything that is left of the job.
function Walk:look()
  self:control("DELETE", "faults")
  local figures = { log_bytes = 0, missing_bytes = 0, starts = 0 }
  local workers = {}
  for _, place in ipairs(self:places()) do
    local slice, worker = place:match("(%d+)%.(%d+)")
    local suffix = ("slice_%s_worker_%s"):format(slice, worker)
    local log, status = self:object("main_command_log_" .. suffix), self:object("status_" .. suffix)
    local attempts = logs.attempts(self.copies, place)
    logs.read_log(attempts, log)
    workers[place] = attempts
    figures.log_bytes = figures.log_bytes + #log
    figures.starts = figures.starts + #attempts
    if not status:find('"status":0,', 1, true) then
      self:problem("%s: the status in the bucket is %q", place, status)
    end
    local after = log:match("multihost_job finished main command on [^\n]* with exit status 0%.\n(.*)$")
    if not after then
      self:problem("%s: the log does not say that it finished", place)
    elseif after:find("multihost_job attempt ", 1, true) and self:cuts(-1) == 0 then
      self:problem("%s: it was run again after it had finished", place)
    end
    local cut = 0
    for number, attempt in ipairs(attempts) do
      local missing = logs.missing(attempt)
      if not missing then
        self:problem("%s: the log has other bytes than attempt %d printed", place, number)
      elseif missing > 0 then
        cut, figures.missing_bytes = cut + 1, figures.missing_bytes + missing
      end
    end
    if cut > self:cuts(tonumber(slice)) then
      self:problem("%s: %d attempts have bytes that are not in the bucket", place, cut)
    end
  end
  local steps = logs.check_steps(workers, self.problems)
  for name, value in pairs(steps) do
    figures[name] = value
  end
  local _, status = self:control("GET", "status")
  if #status.nodes > 0 then
    self:problem("%d nodes are left", #status.nodes)
  end
  for _, command in ipairs(self:left()) do
    self:problem("a process is left: %s", command)
  end
  local _, events = self:control("GET", "events")
  figures.faults = 0
  for _, event in ipairs(events.events) do
    figures.faults = figures.faults + (event.kind == "fault" and event.text:find("^%l+ ?%u*") and 1 or 0)
  end
  return figures
end

--- What is there for whoever has to find out why.
function Walk:explain()
  self:control("DELETE", "faults")
  local parts = { self.at or "", fs.read(self.root .. "/plan") }
  for number = 1, self.started or 0 do
    parts[#parts + 1] = ("--- program %d\n%s"):format(
      number,
      logs.brief(fs.read(("%s/said.%d"):format(self.root, number)))
    )
  end
  for _, place in ipairs(self:places()) do
    local log = self:object("main_command_log_slice_" .. place:gsub("%.", "_worker_"))
    parts[#parts + 1] = ("--- log of %s\n%s"):format(place, logs.brief(log))
  end
  local _, events = self:control("GET", "events")
  for _, event in ipairs(events.events) do
    if event.kind ~= "fault" then
      parts[#parts + 1] = ("%s %s %s"):format(event.time, event.subject:match("[^/]*$"), event.text)
    end
  end
  return table.concat(parts, "\n")
end

function Walk:run()
  self:give(self.plan.runner ~= "gone")
  local before = {}
  for index, event in ipairs(self.plan.events) do
    before = self:strike(index, event, before)
  end
  self.at = "the end"
  self:train(2, before)
  if self.plan.late then
    self:strike_late()
  else
    fs.write(self.enough, "", { sync = false })
  end
  self:ended(0)
  local gone = uv.hrtime() / 1e9
  local figures = self:look()
  figures.idle = self.trained and not self.plan.late and gone - self.trained or 0
  if figures.idle > IDLE_LIMIT then
    self:problem("the chips were idle for %.0f s", figures.idle)
  end
  return figures
end

--- Walks through a plan.
---@param plan jobwalk.Plan
---@param root string a directory of its own
---@param text string the plan in a line
---@return table figures
---@return string[] problems
---@return string? explanation when there are problems
function M.run(plan, root, text)
  for _, directory in ipairs({ "", "/code" }) do
    fs.mkdir_p(root .. directory)
  end
  fs.write(root .. "/plan", text .. "\n", { sync = false })
  fs.write(root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"), { sync = false })
  local simulator <close> = sim.start({
    buckets = { BUCKET },
    seed = plan.seed,
    faults = plan.faults,
    grace = { maintenance = 60, notice = 10 },
  })
  local shared = simulator.env.CIRANDA_SIM_SHARED
  local walk = setmetatable({
    plan = plan,
    root = root,
    simulator = simulator,
    checkpoints = shared .. "/checkpoints",
    copies = shared .. "/copies",
    enough = shared .. "/enough",
    life = 1,
    problems = {},
  }, Walk)
  for _, directory in ipairs({ walk.checkpoints, walk.copies }) do
    fs.mkdir(directory)
    fs.chmod(directory, 511)
  end
  local ok, figures = pcall(walk.run, walk)
  if not ok and type(figures) == "table" and figures.walk then
    walk:problem("never: %s; the queued resource is %s", figures.walk, (walk:state()))
  elseif not ok then
    error(figures, 0)
  end
  local explanation = #walk.problems > 0 and walk:explain() or nil
  if walk.runner then
    walk.runner.program:signal("SIGKILL")
  end
  return ok and figures or {}, walk.problems, explanation
end

return M
