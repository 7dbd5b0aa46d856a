--- The simulated cloud, started and stopped.
--
--     local simulator <close> = require("ciranda.sim").start({ slices = 2, type = "v5litepod-16", prefix = "demo" })
--     for name, value in pairs(simulator.env) do ... end   -- points any client at it
--
-- The simulator is a process of its own under a keeper; it ends with the program that started it, however that ends.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local keeper = require("ciranda.sim.keeper")
local process = require("ciranda.io.process")
local task = require("ciranda.task")

local M = {}

-- Seconds until the simulator must have said that it is ready, and more for each slice, whose workers are made first.
M.START_DEADLINE = 120
M.SLICE_DEADLINE = 10

-- Seconds until its keeper must have ended: longer than the keeper's own deadlines, for processes and for its disk.
M.CLOSE_DEADLINE = 400

-- A private simulator is there for somebody who waits: a minute of the cloud passes in 60 ms.
M.QUICK = 1000

---@class ciranda.sim.Options
---@field slices integer?          slices that are there from the beginning; 0 by default
---@field type string?             their accelerator type; "v5litepod-16"
---@field prefix string?           their names are PREFIX-0, PREFIX-1, ..., or PREFIX when there is one; "sim"
---@field ssh_keys string?         the "ssh-keys" of their metadata: lines of USER:KEY
---@field external boolean?        whether they have external addresses; true
---@field zone string?             "us-west4-a"
---@field project string?          "simulated-project"
---@field project_number string?   digits
---@field seed integer?            the same seed gives the same day
---@field scale number?            how many times faster than the real cloud this one is; 1000
---@field delays table<string, number|number[]>?  seconds or { from, to } in place of ciranda.sim.world's
---@field grace table<string, number>?  seconds: "maintenance", "notice"
---@field quota integer|table<string, integer>?   units (the number in a type's name), for all or by prefix
---@field capacity integer|table<string, integer>?
---@field reservations table[]?    { name, zone, prefix, size }
---@field creates_per_minute integer?
---@field faults table[]?         what goes wrong from the beginning, as POST /sim/v1/faults takes them
---@field types table<string, string[]>?  what a zone has; every zone has everything by default
---@field buckets string[]?        buckets of Cloud Storage that are there from the beginning
---@field make_buckets boolean?    whether an upload to a bucket that is not there makes it; true
---@field isolation string?        "auto", "none", or "namespaces", which fails where there can be none
---@field state_directory string?  kept afterwards; must be absent or empty. By default a temporary one, removed
---@field ssh_port integer?        the first port to try
---@field port integer?            of the API, the first to try
---@field on_event fun(event: ciranda.sim.Event)?  called in a task with everything that happens

local OPTIONS = {}
for name in
  ([[slices type prefix ssh_keys external zone project project_number seed scale delays grace quota capacity
  reservations creates_per_minute faults types buckets make_buckets isolation state_directory ssh_port port
  on_event]]):gmatch("%S+")
do
  OPTIONS[name] = true
end

---@class ciranda.Simulator
---@field env table<string, string>   variables for other clients
---@field url string                  of the API and everything else
---@field directory string            where the workers' directories are
---@field isolation string            "root" or "user": workers have namespaces; "none"
---@field notes string[]              what the workers lack on this machine
local Simulator = {}
Simulator.__index = Simulator
Simulator.__name = "ciranda.Simulator"

local function state_directory(wanted)
  if not wanted then
    return fs.realpath(fs.tempdir("ciranda-sim-"))
  end
  fs.mkdir_p(wanted)
  if #fs.list(wanted) > 0 then
    errors.raise({
      code = "exists",
      op = "sim.start",
      target = wanted,
      message = ("the state directory %s is not empty"):format(wanted),
    })
  end
  return fs.realpath(wanted)
end

-- The lines of JSON that come from the simulator.
local function lines(reader)
  local buffer = ""
  return function()
    while true do
      local line, rest = buffer:match("^([^\n]*)\n(.*)$")
      if line then
        buffer = rest
        return line
      end
      local chunk = reader:read()
      if not chunk then
        return nil
      end
      buffer = buffer .. chunk
    end
  end
end

local function read_ready(next_line, on_event)
  while true do
    local line = next_line()
    if not line then
      errors.raise({
        code = "failed",
        op = "sim.start",
        message = "the simulator ended before it was ready",
      })
    end
    local message = json.decode(line)
    if message.error then
      errors.raise({
        code = message.code or "failed",
        op = "sim.start",
        message = message.error,
      })
    elseif message.ready then
      return message
    elseif on_event then
      on_event(message.event)
    end
  end
end

--- Start a simulator.
---@async
---@param options ciranda.sim.Options?
---@return ciranda.Simulator
--- Raises what stands in the way: `unsupported` (no sshd, with what to install), `busy` (no addresses), `usage`,
--- `timeout`.
function M.start(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "sim.start")
  local directory = state_directory(options.state_directory)
  local settings =
    { directory = directory, scale = options.scale or M.QUICK, events = options.on_event ~= nil }
  settings.make_buckets = true
  settings.keep_directory = options.state_directory ~= nil
  for name, value in pairs(options) do
    if name ~= "state_directory" and name ~= "on_event" then
      settings[name] = value
    end
  end
  local argv = keeper.command(
    "ciranda.sim.keeper",
    json.encode(settings),
    directory,
    options.state_directory and "keep" or "remove"
  )
  argv.stdin, argv.stdout, argv.stderr = process.PIPE, process.PIPE, process.INHERIT
  local self = setmetatable({ process = process.spawn(argv) }, Simulator)
  local next_line = lines(self.process.stdout)
  local deadline = M.START_DEADLINE + M.SLICE_DEADLINE * (options.slices or 0)
  local ok, ready = pcall(task.timeout, deadline, read_ready, next_line, options.on_event)
  if not ok then
    self:close()
    error(ready, 0)
  end
  self.env, self.url, self.directory = ready.env, ready.url, ready.directory
  self.isolation, self.notes = ready.isolation, ready.notes
  self.next_line = next_line
  return self
end

--- Wait until the simulator ends by itself, passing on what happens.
---@async
---@param on_event fun(event: ciranda.sim.Event)?
function Simulator:wait(on_event)
  for line in self.next_line do
    local message = json.decode(line)
    if on_event and message.event then
      on_event(message.event)
    end
  end
  self.process:wait()
end

--- End the simulator and wait until nothing of it is left. A second call does nothing.
---@async
function Simulator:close()
  if self.closed then
    return
  end
  self.closed = true
  task.shield(function()
    self.process.stdin:close()
    pcall(task.timeout, M.CLOSE_DEADLINE, self.process.wait, self.process)
    self.process:close()
  end)
end

Simulator.__close = Simulator.close

return M
