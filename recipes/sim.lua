--- sim: the simulated cloud in the foreground.
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local shell = require("ciranda.io.shell")
local sim = require("ciranda.sim")

local M = {
  summary = "run the simulated cloud in the foreground, for any client",
  description = "Prints the variables that point gcloud, Google's libraries and this program at a private "
    .. "simulated project, then `ready`, and goes on until it is interrupted: eval the lines, or paste them into "
    .. "another terminal. What happens in the cloud is told on standard error, and on a page at the address in "
    .. "CIRANDA_SIM_URL. Its workers are real: an sshd each, on addresses of their own. Nothing of it is left when "
    .. "this program ends, however it ends.",
}

M.flags = {
  { name = "slices", type = "integer", default = 0, help = "Slices that are there from the beginning." },
  { name = "type", default = "v5litepod-16", help = "Their accelerator type." },
  {
    name = "prefix",
    default = "sim",
    help = "Their names: PREFIX-0, PREFIX-1, ...; PREFIX when there is one.",
  },
  { name = "ssh-key", help = "Who may log in to them: [USER:]FILE, a public key; several with commas." },
  { name = "zone", default = "us-west4-a", help = "The zone, in CLOUDSDK_COMPUTE_ZONE too." },
  { name = "project", default = "simulated-project", help = "The project's id." },
  {
    name = "quota",
    help = "Limits in the units of the types' names: 64, or v5litepod=64,v5litepod-spot=32,v4=128.",
  },
  { name = "capacity", help = "What each zone has, in the same form: what is beyond it waits." },
  {
    name = "reservation",
    many = true,
    help = "Reserved capacity of the zone: NAME:TYPE=UNITS, such as mine:v5p=64.",
  },
  { name = "creates-per-minute", type = "integer", help = "More creates than this are refused with 429." },
  {
    name = "delay",
    many = true,
    help = "How long the cloud takes: NAME=SECONDS or NAME=FROM-TO, such as provision=60-300.",
  },
  {
    name = "grace",
    many = true,
    help = "What programs are given: notice=SECONDS before a preemption, maintenance=SECONDS.",
  },
  {
    name = "fault",
    many = true,
    help = "What goes wrong: KIND[,FIELD=VALUE...], such as error,method=nodes.*,status=UNAVAILABLE,"
      .. "probability=0.1 or lose,every=3600.",
  },
  { name = "bucket", help = "Buckets of Cloud Storage that are there; several with commas." },
  { name = "seed", type = "integer", default = 1, help = "The same seed gives the same day." },
  {
    name = "scale",
    type = "number",
    default = 60,
    help = "How many times faster than the real cloud it is; 1 provisions in minutes.",
  },
  { name = "state-dir", help = "Where it keeps its files, and leaves them: an absent or empty directory." },
  {
    name = "isolation",
    default = "auto",
    choices = { "auto", "namespaces", "none" },
    help = "Whether workers have a root, /tmp, devices and processes of their own.",
  },
  { name = "events", type = "boolean", default = true, help = "Tell what happens on standard error." },
}

-- "64", or "v4=128,v5litepod-spot=32".
local function limits(flag, text)
  if not text then
    return nil
  end
  local all = text:match("^%d+$")
  if all then
    return math.tointeger(tonumber(all))
  end
  local result = {}
  for entry in text:gmatch("[^,]+") do
    local prefix, number = entry:match("^([%w-]+)=(%d+)$")
    if not prefix then
      errors.raise({
        code = "usage",
        message = ("--%s: '%s' is neither a number nor PREFIX=NUMBER, such as v5litepod=64"):format(
          flag,
          entry
        ),
      })
    end
    result[prefix] = math.tointeger(tonumber(number))
  end
  return result
end

local function usage(flag, format, ...)
  errors.raise({ code = "usage", message = ("--%s: "):format(flag) .. format:format(...) })
end

-- { NAME = seconds or { from, to } } of NAME=SECONDS and NAME=FROM-TO.
local function times(flag, list, known)
  local result = {}
  for _, entry in ipairs(list or {}) do
    local name, from, to = entry:match("^([%w_]+)=([%d.]+)%-?([%d.]*)$")
    local low, high = tonumber(from), to ~= "" and tonumber(to) or nil
    if not low or to ~= "" and (not high or high < low) then
      usage(flag, "'%s' is neither NAME=SECONDS nor NAME=FROM-TO, such as provision=60-300", entry)
    elseif known[name] == nil then
      local names = {}
      for each in pairs(known) do
        names[#names + 1] = each
      end
      table.sort(names)
      usage(flag, "there is no '%s'; there are %s", name, table.concat(names, ", "))
    end
    result[name] = high and { low, high } or low
  end
  return result
end

local function reservations(list, zone)
  local result = {}
  for i, entry in ipairs(list or {}) do
    local name, prefix, size = entry:match("^([%w-]+):(%w+)=(%d+)$")
    if not name then
      usage("reservation", "'%s' is not NAME:TYPE=UNITS, such as mine:v5p=64", entry)
    end
    result[i] = { name = name, prefix = prefix, size = math.tointeger(tonumber(size)), zone = zone }
  end
  return result
end

-- Faults of KIND[,FIELD=VALUE...]. A comma that no FIELD= follows belongs to the value.
local function faults(list)
  local types = require("ciranda.sim.faults").TYPES
  local result = {}
  for i, entry in ipairs(list or {}) do
    local kind, rest = entry:match("^(%w[%w_]*)(.*)$")
    local fault = { kind = kind or entry }
    rest = (rest or ""):gsub(",(%l[%w_]*)=", "\0%1=")
    for field in rest:gmatch("%Z+") do
      local name, value = field:match("^(%l[%w_]*)=(.*)$")
      if not name then
        usage("fault", "'%s' is not KIND[,FIELD=VALUE...]", entry)
      elseif types[name] == "any" then
        fault[name] = json.decode(value, "--fault: " .. name)
      elseif types[name] == "integer" or types[name] == "number" then
        fault[name] = math.tointeger(tonumber(value)) or tonumber(value) or value
      else
        fault[name] = value
      end
    end
    result[i] = fault
  end
  return result
end

-- The text of "ssh-keys" from [USER:]FILE,...
local function ssh_keys(text)
  if not text then
    return nil
  end
  local lines = {}
  for entry in text:gmatch("[^,]+") do
    local user, path = entry:match("^([%w._-]+):(.+)$")
    path = path or entry
    local key = fs.read(path):match("^%s*(%S+%s+%S+[^\n]*)")
    if not key or key:find("PRIVATE KEY", 1, true) then
      errors.raise({ code = "usage", message = ("--ssh-key: %s is no public key"):format(path) })
    end
    lines[#lines + 1] = ("%s:%s"):format(user or require("ciranda.io.account").user(), key)
  end
  return table.concat(lines, "\n")
end

local function names(text)
  local list = {}
  for name in (text or ""):gmatch("[^,]+") do
    list[#list + 1] = name
  end
  return list
end

local function print_environment(simulator)
  local variables = {}
  for name in pairs(simulator.env) do
    variables[#variables + 1] = name
  end
  table.sort(variables)
  for _, name in ipairs(variables) do
    print(("export %s"):format(name .. "=" .. shell.words({ simulator.env[name] })))
  end
  print("ready")
  io.stdout:flush()
end

function M.run(context)
  local flags = context.flags
  local function tell(event)
    context.progress:say("%s %s %s", event.time:sub(12, 23), event.subject:match("[^/]*$"), event.text)
  end
  local on_event = flags.events and tell or nil
  local world = require("ciranda.sim.world")
  local simulator <close> = sim.start({
    slices = flags.slices,
    type = flags.type,
    prefix = flags.prefix,
    ssh_keys = ssh_keys(flags.ssh_key),
    zone = flags.zone,
    project = flags.project,
    quota = limits("quota", flags.quota),
    capacity = limits("capacity", flags.capacity),
    reservations = reservations(flags.reservation, flags.zone),
    creates_per_minute = flags.creates_per_minute,
    delays = times("delay", flags.delay, world.DELAYS),
    grace = times("grace", flags.grace, world.GRACE),
    faults = faults(flags.fault),
    buckets = names(flags.bucket),
    make_buckets = false,
    seed = flags.seed,
    scale = flags.scale,
    state_directory = flags.state_dir,
    isolation = flags.isolation,
    on_event = on_event,
  })
  for _, note in ipairs(simulator.notes) do
    context.progress:say("note: %s", note)
  end
  print_environment(simulator)
  simulator:wait(on_event)
  errors.raise({ code = "failed", message = "the simulator has ended by itself" })
end

return M
