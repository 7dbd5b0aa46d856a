--- The simulator's process: the services on loopback addresses, and the workers behind them.
--
-- It is started by its keeper (ciranda.sim.keeper), is told what to simulate in one JSON argument, says one line of
-- JSON on standard output when it is ready or cannot be, and lives until its standard input ends or it is signalled.

local accounts = require("ciranda.io.account")
local addresses = require("ciranda.sim.addresses")
local clock = require("ciranda.sim.clock")
local compute = require("ciranda.sim.compute")
local control = require("ciranda.sim.control")
local disk = require("ciranda.sim.disk")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local faults = require("ciranda.sim.faults")
local fs = require("ciranda.io.fs")
local gateway = require("ciranda.sim.gateway")
local iap = require("ciranda.sim.iap")
local isolation = require("ciranda.sim.isolation")
local json = require("ciranda.io.json")
local keeper = require("ciranda.core.keeper")
local machines = require("ciranda.sim.machines")
local os_login = require("ciranda.sim.os_login")
local oauth = require("ciranda.sim.oauth")
local request_log = require("ciranda.sim.request_log")
local resource_manager = require("ciranda.sim.resource_manager")
local server = require("ciranda.io.server")
local session = require("ciranda.cli.session")
local sshd = require("ciranda.sim.sshd")
local status_page = require("ciranda.sim.status_page")
local storage = require("ciranda.sim.storage")
local task = require("ciranda.task")
local tpu = require("ciranda.sim.tpu")
local uv = require("luv")
local worlds = require("ciranda.sim.world")

local M = {}

-- The first port that is tried for each service; workers and services have addresses of their own.
local API_PORT = 8470
local SSH_PORT = 2222

-- Whose token is in the file.
local OWNER = "owner@example.com"

-- A token in a file must outlive a day's work; those that are exchanged live as long as Google's.
local TOKEN_FILE_LIFETIME = 7 * 86400

-- Seconds of a handler: longer than an answer that is made to hang.
local HANDLER_DEADLINE = 3700

-- Bytes of one request's body: an upload in one piece.
local MAX_BODY = 1 << 30

-- Whether somebody still reads standard output for what went wrong.
local ready = false

local function say(value)
  io.stdout:write(json.encode(value), "\n")
  io.stdout:flush()
end

local function report(format, ...)
  io.stderr:write("simulator: ", format:format(...), "\n")
end

-- The runtime version that goes with an accelerator type.
local function runtime_for(accelerator)
  local by_generation = {
    v5e = "v2-alpha-tpuv5-lite",
    v5p = "v2-alpha-tpuv5",
    v6e = "v2-alpha-tpuv6e",
    tpu7x = "v2-alpha-tpuv6e",
  }
  return by_generation[accelerator.generation] or "tpu-ubuntu2204-base"
end

-- The body of the queued resource that is there from the beginning.
local function first_request(world, settings)
  local accelerator = world.catalog:accelerator(settings.type)
  if not accelerator then
    errors.raise({
      code = "usage",
      message = ("there is no accelerator type '%s', such as v5litepod-16"):format(settings.type),
    })
  end
  local spec = {
    parent = ("projects/%s/locations/%s"):format(world.project.id, settings.zone),
    node = {
      acceleratorType = settings.type,
      runtimeVersion = runtime_for(accelerator),
      networkConfig = { enableExternalIps = settings.external },
      metadata = json.object({ ["ssh-keys"] = settings.ssh_keys }),
    },
  }
  if settings.slices > 1 then
    spec.multiNodeParams = { nodeCount = settings.slices, nodeIdPrefix = settings.prefix }
  else
    spec.nodeId = settings.prefix
  end
  return { tpu = { nodeSpec = { spec } } }
end

-- Make the slices that are asked for, by the API like everybody else, and wait until they are ACTIVE.
local function make_slices(world, service, settings, token)
  local name = ("projects/%s/locations/%s/queuedResources/%s"):format(
    world.project.id,
    settings.zone,
    settings.prefix
  )
  local answer = service:handle({
    method = "POST",
    path = ("/v2alpha1/projects/%s/locations/%s/queuedResources"):format(world.project.id, settings.zone),
    query = { queuedResourceId = settings.prefix },
    headers = { authorization = "Bearer " .. token },
    body = json.encode(first_request(world, settings)),
  })
  if answer.status ~= 200 then
    errors.raise({
      code = "failed",
      op = "sim.start",
      target = name,
      message = json.decode(answer.body).error.message,
    })
  end
  local ended = task.event()
  world.events:watch(function(event)
    if event.subject == name and (event.text == "ACTIVE" or event.text == "FAILED") then
      ended:set()
    end
  end)
  ended:wait()
  local made = world.queued_resources:find(name)
  if not made or made.state ~= "ACTIVE" then
    errors.raise({
      code = "failed",
      op = "sim.start",
      target = name,
      message = made and made.failure and made.failure.message or "the slices could not be made",
    })
  end
end

-- What points other clients at the simulator.
local function environment(settings, url, host, ssh_port)
  local directory = settings.directory
  return {
    CIRANDA_IAP_URL = (url:gsub("^http", "ws")),
    CIRANDA_SIM_SHARED = directory .. "/shared",
    CIRANDA_SIM_URL = url,
    CIRANDA_SSH_PORT = tostring(ssh_port),
    CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER = url .. "/",
    CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE = url .. "/compute/v1/",
    CLOUDSDK_API_ENDPOINT_OVERRIDES_OSLOGIN = url .. "/",
    CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE = url .. "/storage/v1/",
    CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU = url .. "/",
    CLOUDSDK_AUTH_ACCESS_TOKEN_FILE = directory .. "/access_token",
    CLOUDSDK_CORE_ACCOUNT = OWNER,
    CLOUDSDK_COMPUTE_ZONE = settings.zone,
    CLOUDSDK_CORE_PROJECT = settings.project,
    GCE_METADATA_HOST = host,
    GCE_METADATA_IP = host,
    GCE_METADATA_ROOT = host,
    GOOGLE_APPLICATION_CREDENTIALS = directory .. "/credentials.json",
    GOOGLE_CLOUD_PROJECT = settings.project,
    STORAGE_EMULATOR_HOST = url,
  }
end

local function write_token(credentials, settings)
  local token = credentials:issue(OWNER, TOKEN_FILE_LIFETIME)
  fs.write(settings.directory .. "/access_token", token, { mode = 384, sync = false })
  return token
end

-- A service account's key takes some tenths of a second to find.
local function write_key(credentials, settings, url)
  local email = ("runner@%s.iam.gserviceaccount.com"):format(settings.project)
  local file = credentials:make_service_account(email, settings.project, url .. "/token")
  fs.write(settings.directory .. "/credentials.json", json.encode(file), { mode = 384, sync = false })
end

-- What the workers lack here, for the terminal.
local function notes_of(place, tools)
  local notes = {}
  if place.kind == "user" then
    notes[#notes + 1] = ("start-up scripts run as root of a user namespace, which is %s outside of it"):format(
      accounts.login_name() or uv.getuid()
    )
  end
  if place.kind == "none" then
    notes[#notes + 1] = ("workers share this machine's /tmp, /dev and process list (no namespaces: %s)"):format(
      place.reason
    )
    notes[#notes + 1] = "start-up scripts run as the worker's own user, not as root"
    if not tools.wrapper then
      notes[#notes + 1] = ("only the user %s can log in to the workers: install libnss-wrapper"):format(
        accounts.login_name() or uv.getuid()
      )
    end
  end
  return notes
end

-- What is wrong with a fault is said before anything is made.
local function check_faults(list)
  for _, fault in ipairs(list or {}) do
    local ok, err = pcall(faults.check, fault)
    if not ok then
      errors.raise({ code = "usage", op = "sim.start", message = "fault: " .. (err.message or tostring(err)) })
    end
  end
end

local DEFAULTS = {
  slices = 0,
  type = "v5litepod-16",
  prefix = "sim",
  zone = "us-west4-a",
  project = "simulated-project",
  project_number = "123456789012",
  seed = 1,
  scale = 1,
  external = true,
  isolation = "auto",
}

local function run(settings)
  local scope <close> = task.scope()
  local tools = sshd.probe()
  for _, name in ipairs({ "machines", "shared", "storage" }) do
    fs.mkdir_p(settings.directory .. "/" .. name)
  end
  fs.chmod(settings.directory .. "/shared", 1023)
  if uv.getuid() == 0 then
    -- rwx--x--x: the workers' users go through it; what is secret in it has a mode of its own.
    fs.chmod(settings.directory, 457)
  end
  local shared = settings.directory .. "/shared"
  local place = isolation.probe(settings.directory, shared, settings.isolation)
  if place.kind == "none" and uv.getuid() == 0 then
    fs.mkdir_p("/run/sshd", 493) -- sshd's own, of its package; a root sshd refuses to start without it
  end
  local block = addresses.claim()
  local ssh_port = block:port(settings.ssh_port or SSH_PORT, "the workers' sshd")
  local api_port = block:port(settings.port or API_PORT, "the API")
  local time = clock.real()
  local credentials =
    oauth.new({ clock = time, project = settings.project, project_number = settings.project_number })
  local fleet = machines.new({
    scope = scope,
    addresses = block,
    isolation = place,
    directory = settings.directory .. "/machines",
    shared = shared,
    -- Clients that cannot be told a port go to 22; where that can be had it is served too.
    ssh_ports = block:available(22) and { ssh_port, 22 } or { ssh_port },
    metadata_port = api_port,
    metadata_on_80 = block:available(80),
    report = report,
  })
  local world = worlds.new({
    clock = time,
    machines = fleet,
    oauth = credentials,
    seed = settings.seed,
    project = settings.project,
    project_number = settings.project_number,
    zone = settings.zone,
    scale = settings.scale,
    delays = settings.delays,
    grace = settings.grace,
    quota = settings.quota,
    capacity = settings.capacity,
    reservations = settings.reservations,
    creates_per_minute = settings.creates_per_minute,
    types = settings.types,
    extra_types = { settings.type },
    spawn = function(name, fn)
      scope:spawn(name, fn)
    end,
  })
  check_faults(settings.faults)
  fleet:attach(world)
  local requests = request_log.new(time)
  local service = tpu.new(world)
  local front <close> = server.listen({
    address = block:main(),
    port = api_port,
    deadline = HANDLER_DEADLINE,
    max_body = MAX_BODY,
    handler = gateway.new({
      world = world,
      oauth = credentials,
      requests = requests,
      services = {
        control.new(world, requests),
        service,
        storage.new(world, settings.directory .. "/storage", {
          buckets = settings.buckets,
          make_buckets = settings.make_buckets,
        }),
        compute.new(world),
        resource_manager.new(world),
        os_login.service(world),
        iap.new(world),
        status_page.new(),
      },
    }),
  })
  local token = write_token(credentials, settings)
  local key = scope:spawn("a service account's key", write_key, credentials, settings, front.url)
  if settings.events then
    world.events:watch(function(event)
      say({ event = event })
    end)
  end
  if settings.slices > 0 then
    make_slices(world, service, settings, token)
  end
  for _, fault in ipairs(settings.faults or {}) do
    world.faults:add(fault)
  end
  key:wait()
  say({
    ready = true,
    url = front.url,
    directory = settings.directory,
    isolation = place.kind,
    notes = notes_of(place, tools),
    env = environment(settings, front.url, ("%s:%d"):format(block:main(), api_port), ssh_port),
  })
  ready = true
  task.await(function()
    return function()
      time:close()
      block:close()
      return true
    end
  end, "the end of the simulation")
end

-- End when the keeper has gone, which shows in several ways, or says so. Once: the signal of a parent's death comes
-- for each thread of it that ends, and a second request must not cut the clean-up short. An impatient keeper kills.
---@param simulation ciranda.Task
local function end_with_keeper(simulation)
  local ending = false
  local function stop()
    if not ending then
      ending = true
      simulation:cancel("the keeper has gone")
    end
    return true
  end
  session.on_interrupt(stop)
  -- It holds the other end of our standard input.
  local pipe = uv.new_pipe(false)
  pipe:open(0)
  pipe:read_start(function(err, data)
    if err or not data then
      pipe:close()
      stop()
    end
  end)
end

--- Run the simulator. `ciranda.sim.keeper` starts this, nobody else.
---@async
---@param text string settings, as JSON
---@param parent string pid of the keeper
---@return integer status
function M.main(text, parent)
  local keeper_pid = tonumber(parent)
  engine.on_blocked(nil) -- a busy machine is no news to whoever watches a simulated cloud
  local settings = json.decode(text)
  for name, value in pairs(DEFAULTS) do
    if settings[name] == nil then
      settings[name] = value
    end
  end
  -- A task of its own is cancelled, so that what comes after it takes as long as it has to.
  local scope <close> = task.scope()
  local simulation = scope:spawn("the simulation", pcall, run, settings)
  end_with_keeper(simulation)
  if keeper.die_with_parent(uv.constants.SIGTERM) ~= keeper_pid then
    simulation:cancel("the keeper has gone")
  end
  local ended, ok, err = pcall(simulation.wait, simulation)
  if not ended then
    ok, err = false, ok
  end
  if not ok and not errors.is(err, "cancelled") then
    if ready then
      report("%s", errors.text(err))
    end
    say({ error = errors.text(err), code = errors.is(err) and err.code or nil })
  end
  -- The keeper does it too, if it lives; while one dies, thread by thread, nobody can tell.
  if not settings.keep_directory then
    disk.remove(settings.directory)
  end
  return ok and 0 or 1
end

return M
