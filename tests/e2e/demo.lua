--- The demonstration: the commands a person would type, on the simulated cloud, and evidence of what they did.
---
--- Two slices of four workers are asked for and waited for; a small training job runs on all eight; on SIGTERM it
--- saves a checkpoint at one step; the slices are deleted. What can be seen from outside is written to evidence.json,
--- and each expectation of it is checked here: the exit status is 0 only when all hold.
local engine = require("ciranda.core.engine")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local DEMO = assert(os.getenv("CIRANDA_DEMO"), "CIRANDA_DEMO names the directory of the demonstration")
local REPOSITORY = assert(uv.cwd())
local NAME, RUN, SLICES, WORKERS = "demo", "demo-run", 2, 4
--- Steps that every process must have done before it is told to stop; the job itself would go on much longer.
local STEPS_BEFORE_STOP = 12
local LIMIT, PATIENCE = 900, 180 -- s, for everything and for one step of it

local function say(format, ...)
  io.stdout:write(string.format(format, ...), "\n")
  io.stdout:flush()
end

-- What is on the machine -------------------------------------------------------------------------------------------

--- A file of /proc, or "" when it is gone.
local function proc(format, ...)
  local handle = io.open(format:format(...), "rb")
  local text = handle and handle:read("a") or ""
  if handle then
    handle:close()
  end
  return text
end

--- Pids that exist now.
local function pids()
  local found = {}
  for _, entry in ipairs(fs.list("/proc")) do
    local pid = math.tointeger(tonumber(entry.name))
    if pid then
      found[pid] = true
    end
  end
  return found
end

--- The processes that belong to this demonstration: those that were told its directory, less this program.
local function own_processes()
  local found = {}
  for pid in pairs(pids()) do
    if pid ~= uv.os_getpid() and proc("/proc/%d/environ", pid):find(DEMO, 1, true) then
      found[pid] = true
    end
  end
  return found
end

--- Whether another ciranda than this demonstration's is running on the machine: it has files in the shared places too.
local function others_run()
  for pid in pairs(pids()) do
    local program = (uv.fs_readlink(("/proc/%d/exe"):format(pid)) or ""):gsub(" %(deleted%)$", "")
    local environment = proc("/proc/%d/environ", pid)
    if pid ~= uv.os_getpid() and program:find("/ciranda$") and not environment:find(DEMO, 1, true) then
      return true
    end
  end
  return false
end

--- Local addresses and ports that somebody listens on, with the socket's inode.
local function listening_sockets()
  local found = {}
  for _, path in ipairs({ "/proc/net/tcp", "/proc/net/tcp6" }) do
    for line in proc(path):gmatch("[^\n]+") do
      -- sl local rem st tx:rx tr:tm retrnsmt uid timeout inode
      local address, inode = line:match("^%s*%d+: (%x+:%x+) %x+:%x+ 0A" .. ("%s+%S+"):rep(5) .. "%s+(%d+)")
      if address then
        found[address] = inode
      end
    end
  end
  return found
end

--- Those that the processes of this demonstration hold.
local function own_sockets()
  local inodes, found = {}, {}
  for pid in pairs(own_processes()) do
    local ok, entries = pcall(fs.list, ("/proc/%d/fd"):format(pid))
    for _, entry in ipairs(ok and entries or {}) do
      local link = uv.fs_readlink(("/proc/%d/fd/%s"):format(pid, entry.name)) or ""
      inodes[link:match("^socket:%[(%d+)%]$") or ""] = true
    end
  end
  for address, inode in pairs(listening_sockets()) do
    if inodes[inode] then
      found[address] = inode
    end
  end
  return found
end

--- Names in the places where a program might leave something: everything in the repository, in the places that all
--- programs share what carries our name (unless another ciranda works there), and what ciranda keeps under the
--- account's true home.
local function files_outside(shared)
  local found = {}
  local function look(directory, pattern)
    local ok, entries = pcall(fs.list, directory)
    for _, entry in ipairs(ok and entries or {}) do
      if entry.name:find(pattern) then
        found[directory .. "/" .. entry.name] = true
      end
    end
  end
  for _, directory in ipairs(shared and { "/tmp", "/var/tmp", "/dev/shm", "/run" } or {}) do
    look(directory, "ciranda")
  end
  look(REPOSITORY, ".")
  look(DEMO .. "/..", ".")
  local home = uv.os_get_passwd().homedir
  look(home .. "/.ssh", ".")
  for _, directory in ipairs({ ".ciranda", ".config/ciranda", ".local/state/ciranda", ".cache/ciranda" }) do
    look(home .. "/" .. directory, ".")
  end
  return found
end

--- What is in `after` and not in `before`, sorted.
local function added(before, after)
  local list = {}
  for key in pairs(after) do
    if not before[key] then
      table.insert(list, tostring(key))
    end
  end
  table.sort(list)
  return json.array(list)
end

--- Start of a process in seconds since boot: field 22 of stat, in ticks of 1/100 s (Linux's USER_HZ).
local function start_time(pid)
  local index = 2
  for word in (proc("/proc/%d/stat", pid):match("^.*%) (.*)$") or ""):gmatch("%S+") do
    index = index + 1
    if index == 22 then
      return tonumber(word) / 100
    end
  end
end

--- Notes the trainers that run now in `seen`: pid -> {start, last}, in seconds since boot.
local function watch_trainers(seen)
  local now = tonumber(proc("/proc/uptime"):match("^%S+"))
  for pid in pairs(own_processes()) do
    local command = proc("/proc/%d/cmdline", pid)
    if command:find("^python3%z[^%z]*train%.py%z") then
      seen[pid] = seen[pid] or { start = start_time(pid) }
      seen[pid].last = now
    end
  end
end

-- The commands -----------------------------------------------------------------------------------------------------

--- Runs `ciranda ...` as a person would, its output ours; returns its status.
local function ciranda(environment, ...)
  say("\n$ ciranda %s", table.concat({ ... }, " "))
  return process.run({
    BINARY,
    env = environment,
    stdout = process.INHERIT,
    stderr = process.INHERIT,
    timeout = PATIENCE,
    ...,
  }).code
end

--- Starts the simulated cloud; returns the process and the variables that it printed.
local function start_simulator(scope)
  local simulator = process.spawn({
    BINARY,
    "sim",
    "--scale=600",
    "--events=false",
    stdout = process.PIPE,
    stderr = process.INHERIT,
  })
  local environment, text, ready = {}, "", task.event()
  scope:spawn(function()
    for chunk in simulator.stdout:values() do
      text = text .. chunk
      for name, value in chunk:gmatch("export ([%w_]+)=([^\n]*)\n") do
        environment[name] = value
      end
      if text:find("\nready\n", 1, true) then
        ready:set()
      end
    end
  end)
  task.timeout(PATIENCE, ready.wait, ready)
  for name, value in text:gmatch("export ([%w_]+)=([^\n]*)\n") do
    environment[name] = value
  end
  return simulator, environment
end

--- The header that the simulated project asks for.
local function authorization(environment)
  return { Authorization = "Bearer " .. fs.read(environment.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE):match("%S+") }
end

--- A GET of the simulator, decoded.
local function ask(environment, path)
  local response = http.request({
    url = environment.CIRANDA_SIM_URL .. path,
    timeout = PATIENCE,
    headers = authorization(environment),
  })
  assert(response.status == 200, ("GET %s: HTTP %d"):format(path, response.status))
  return json.decode(response.body)
end

--- Reads the run's directory on a worker through OpenSSH's own client, the host key pinned from the guest attributes.
local function read_worker(environment, node, slice, worker, known_hosts)
  local endpoint = node.networkEndpoints[worker + 1]
  local script = ("cd %s && pwd -P && ls && cat ../.ciranda/%s/*/exit"):format(RUN, RUN)
  local result = process.run({
    "ssh",
    "-F",
    "/dev/null",
    "-p",
    environment.CIRANDA_SSH_PORT,
    "-i",
    os.getenv("HOME") .. "/.ssh/google_compute_engine",
    "-o",
    "IdentitiesOnly=yes",
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "UserKnownHostsFile=" .. known_hosts,
    uv.os_get_passwd().username .. "@" .. endpoint.ipAddress,
    script,
    timeout = PATIENCE,
  })
  assert(result.code == 0, ("ssh to slice %d worker %d: %s"):format(slice, worker, result.stderr))
  local directory, listing, record = result.stdout:match("^([^\n]+)\n(.-)(%b{})%s*$")
  return {
    slice = slice,
    worker = worker,
    address = endpoint.ipAddress,
    directory = directory,
    has_trainer = listing ~= nil and listing:find("train.py", 1, true) ~= nil,
    exit = record and json.decode(record) or json.null,
  }
end

--- A known_hosts file of the keys that the API publishes for the workers of these nodes.
local function pin_host_keys(environment, zone, nodes)
  local lines = {}
  for _, node in ipairs(nodes) do
    local name = node.name:match("[^/]+$")
    local headers = authorization(environment)
    headers["Content-Type"] = "application/json"
    local endpoint = environment.CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU
    local response = http.request({
      method = "POST",
      url = ("%sv2/%s/nodes/%s:getGuestAttributes"):format(endpoint, zone, name),
      headers = headers,
      body = json.encode({ queryPath = "hostkeys/" }),
      timeout = PATIENCE,
    })
    for worker, attributes in ipairs(json.decode(response.body).guestAttributes) do
      for _, item in ipairs(attributes.queryValue.items) do
        table.insert(
          lines,
          ("[%s]:%s %s %s"):format(
            node.networkEndpoints[worker].ipAddress,
            environment.CIRANDA_SSH_PORT,
            item.key,
            item.value
          )
        )
      end
    end
  end
  local path = DEMO .. "/known_hosts"
  fs.write(path, table.concat(lines, "\n") .. "\n")
  return path
end

--- Steps with all shards on disk, in order.
local function finished_steps(directory)
  local steps = {}
  local ok, entries = pcall(fs.list, directory)
  for _, entry in ipairs(ok and entries or {}) do
    local step = math.tointeger(tonumber(entry.name:match("^%d+$")))
    if step then
      local shards = #fs.list(directory .. "/" .. entry.name)
      table.insert(steps, { step = step, shards = shards })
    end
  end
  table.sort(steps, function(a, b)
    return a.step < b.step
  end)
  return json.array(steps)
end

--- The newest step that any worker has printed, from the logs that came home.
local function step_reached()
  local most = -1
  local directory = ("%s/%s"):format(os.getenv("TMPDIR"), RUN)
  local ok, entries = pcall(fs.list, directory)
  for _, entry in ipairs(ok and entries or {}) do
    if entry.name:find("^output_slice_") then
      for step in fs.read(directory .. "/" .. entry.name):gmatch("step[ :=]+(%d+)") do
        most = math.max(most, tonumber(step))
      end
    end
  end
  return most
end

--- Runs the job, stops it with SIGTERM in the middle; returns the runner's status and what was seen meanwhile.
local function train(environment, checkpoints)
  local arguments = {
    "multihost_runner",
    "--TPU_PREFIX=" .. NAME,
    "--RUN_NAME=" .. RUN,
    "--SCRIPT_DIR=tests/fixtures/trainer",
    ("--COMMAND=python3 train.py --checkpoint_dir=%s --steps=100000 --save-every=1000000"):format(
      checkpoints
    ),
  }
  say("\n$ ciranda %s", table.concat(arguments, " "):gsub("%-%-COMMAND=(.*)$", "--COMMAND='%1'"))
  local trainers = {}
  local runner <close> = process.spawn({
    BINARY,
    env = environment,
    stdout = process.INHERIT,
    stderr = process.INHERIT,
    table.unpack(arguments),
  })
  local scope <close> = task.scope()
  local watching = scope:spawn(function()
    while true do
      watch_trainers(trainers)
      task.sleep(0.1)
    end
  end)
  task.timeout(PATIENCE, function()
    while step_reached() < STEPS_BEFORE_STOP do
      task.sleep(0.2)
    end
  end)
  local signalled_at = step_reached()
  say("\n(the job has done %d steps: SIGTERM to the runner)", signalled_at)
  runner:signal("SIGTERM")
  local result = task.timeout(PATIENCE, runner.wait, runner)
  watching:cancel()
  return result.code, trainers, signalled_at
end

-- The evidence -----------------------------------------------------------------------------------------------------

local failures = {}

--- Checks one expectation; what fails is told at the end.
local function expect(holds, format, ...)
  if not holds then
    table.insert(failures, format:format(...))
  end
  return holds
end

local function main()
  local evidence = { slices = SLICES, workers = WORKERS }
  local before = { processes = own_processes(), sockets = own_sockets(), files = files_outside(true) }
  local others = others_run()

  local held = {} -- the sockets that we listened on, by address
  do
    local scope <close> = task.scope()
    say("$ ciranda sim   # a simulated project; its variables go to what follows")
    local simulator <close>, environment = start_simulator(scope)
    local zone = ("projects/%s/locations/%s"):format(
      environment.CLOUDSDK_CORE_PROJECT,
      environment.CLOUDSDK_COMPUTE_ZONE
    )

    local status = ciranda(
      environment,
      "qr",
      "create",
      NAME,
      "--node-count=" .. SLICES,
      "--node-prefix=" .. NAME,
      "--accelerator-type=v5litepod-16",
      "--runtime-version=v2-alpha-tpuv5-lite"
    )
    expect(status == 0, "qr create ended with %s", status)
    status = ciranda(environment, "qr", "wait", NAME)
    expect(status == 0, "qr wait ended with %s", status)

    local checkpoints = environment.CIRANDA_SIM_SHARED .. "/checkpoints"
    local trainers, signalled_at
    evidence.runner_status, trainers, signalled_at = train(environment, checkpoints)
    expect(evidence.runner_status == 143, "the runner ended with %s, not 143", evidence.runner_status)

    -- Alive together: the latest start lies before the earliest end.
    local latest_start, earliest_end, count = 0, math.huge, 0
    for _, seen in pairs(trainers) do
      count = count + 1
      latest_start, earliest_end = math.max(latest_start, seen.start), math.min(earliest_end, seen.last)
    end
    evidence.trainers = { count = count, latest_start = latest_start, earliest_end = earliest_end }
    expect(count == SLICES * WORKERS, "%d trainer processes were seen, not %d", count, SLICES * WORKERS)
    expect(latest_start < earliest_end, "the trainers were not alive together")

    evidence.steps_on_disk, evidence.signalled_at_step = finished_steps(checkpoints), signalled_at
    local last = evidence.steps_on_disk[#evidence.steps_on_disk]
    expect(
      last and last.step >= signalled_at and last.shards == SLICES * WORKERS,
      "no finished step from %d on with %d shards is on disk",
      signalled_at,
      SLICES * WORKERS
    )

    local nodes = ask(environment, "/v2/" .. zone .. "/nodes").nodes
    table.sort(nodes, function(a, b)
      return a.name < b.name
    end)
    local known_hosts = pin_host_keys(environment, zone, nodes)
    evidence.run_directories = json.array({})
    local places = {}
    for slice, node in ipairs(nodes) do
      for worker = 0, #node.networkEndpoints - 1 do
        local seen = read_worker(environment, node, slice - 1, worker, known_hosts)
        table.insert(evidence.run_directories, seen)
        places[seen.address .. seen.directory] = true
        expect(seen.has_trainer, "slice %d worker %d has no train.py", slice - 1, worker)
      end
    end
    local different = 0
    for _ in pairs(places) do
      different = different + 1
    end
    expect(different == SLICES * WORKERS, "%d run directories were read, not %d", different, SLICES * WORKERS)

    evidence.sockets_held = 0
    for address, inode in pairs(own_sockets()) do
      held[address], evidence.sockets_held = inode, evidence.sockets_held + 1
    end
    expect(evidence.sockets_held > 0, "no listening socket of the simulated cloud was seen")
    status = ciranda(environment, "qr", "delete", NAME, "--force")
    expect(status == 0, "qr delete ended with %s", status)
    evidence.creates, evidence.deletes = 0, 0
    for _, request in ipairs(ask(environment, "/sim/v1/requests").requests) do
      if request.method == "queuedResources.create" then
        evidence.creates = evidence.creates + 1
      elseif request.method == "queuedResources.delete" then
        evidence.deletes = evidence.deletes + 1
      end
    end
    expect(evidence.creates == 1, "%d creates were asked for", evidence.creates)
    expect(evidence.deletes == 1, "%d deletes were asked for", evidence.deletes)

    simulator:signal("SIGTERM")
    simulator:wait()
  end

  local still = {}
  for address, inode in pairs(listening_sockets()) do
    still[address] = held[address] == inode or nil
  end
  evidence.left = {
    processes = added(before.processes, own_processes()),
    sockets = added(before.sockets, still),
    files = added(before.files, files_outside(not (others or others_run()))),
  }
  for what, list in pairs(evidence.left) do
    expect(#list == 0, "%s are left: %s", what, table.concat(list, ", "))
  end
  evidence.failures = json.array(failures)
  fs.write(DEMO .. "/evidence.json", json.encode(evidence, { indent = true }) .. "\n")
  say("\nevidence: %s/evidence.json", DEMO)
  for _, failure in ipairs(failures) do
    io.stderr:write("demo: ", failure, "\n")
  end
  return #failures == 0
end

engine.on_blocked(nil) -- /proc is read without waiting, and nothing else runs in this process
local ok = task.timeout(LIMIT, main)
print(json.encode({ e2e = "demo", ok = ok, failures = #failures }))
os.exit(ok and 0 or 1)
