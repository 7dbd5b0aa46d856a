--- A simulated project: everything its services share.
--
-- A world is made of options and of `machines`, which stand behind the nodes: real ones in a simulator, none in a
-- spec. It starts no process and opens no socket.

local catalog = require("ciranda.sim.catalog")
local errors = require("ciranda.sim.errors")
local events = require("ciranda.sim.events")
local faults = require("ciranda.sim.faults")
local nodes = require("ciranda.sim.nodes")
local operations = require("ciranda.sim.operations")
local os_login = require("ciranda.sim.os_login")
local pool = require("ciranda.sim.pool")
local queued_resources = require("ciranda.sim.queued_resources")
local random = require("ciranda.sim.random")

local M = {}

-- How long the cloud takes, in seconds, divided by the world's scale. Provisioning, deleting and resetting are the
-- guide's figures (1 to 5, 2 to 5 and 1 to 2 minutes); the others are of the order that users report.
M.DELAYS = {
  accept = { 1, 3 },
  create_operation = 0,
  wait = { 5, 30 },
  provision = { 60, 300 },
  delete = { 120, 300 },
  forget = { 2, 10 },
  reset = { 60, 120 },
  repair = { 120, 300 },
  stop = { 30, 60 },
  start = { 60, 120 },
  patch = { 3, 10 },
}

-- What processes on a worker are given, in seconds that are not scaled: they need real time to save their work.
-- Maintenance: the autocheckpoint page. Notice: what Compute Engine documents for preemption, 30 s.
M.GRACE = { maintenance = 300, notice = 30 }

-- A repeated request id means the same request for this long, in seconds.
local REPLAY_WINDOW = 3600

local Replays = {}
Replays.__index = Replays

function Replays:find(key)
  local entry = self.entries[key]
  if entry and entry.time + REPLAY_WINDOW > self.clock:now() then
    return entry.operation
  end
  self.entries[key] = nil
  return nil
end

function Replays:keep(key, operation)
  self.entries[key] = { operation = operation, time = self.clock:now() }
end

local function copy(value)
  if type(value) ~= "table" then
    return value
  end
  local result = {}
  for key, item in pairs(value) do
    result[key] = copy(item)
  end
  return result
end

-- Limits are given by the prefix of an accelerator type ("v5litepod"), for quota also with "-spot", or as one number
-- for all of them.
local function each_prefix(limits, all, apply)
  for prefix in pairs(all) do
    local limit = type(limits) == "number" and limits or limits[prefix]
    if limit then
      apply(prefix, limit)
    end
  end
end

local function set_quota(self, limits)
  local samples = {}
  for _, name in ipairs(self.catalog.names) do
    local accelerator = self.catalog:accelerator(name)
    samples[accelerator.prefix] = samples[accelerator.prefix] or {}
    table.insert(samples[accelerator.prefix], accelerator)
  end
  for _, preemptible in ipairs { false, true } do
    for prefix, accelerators in pairs(samples) do
      local limit = type(limits) == "number" and limits or limits[preemptible and prefix .. "-spot" or prefix]
      for _, accelerator in ipairs(limit and accelerators or {}) do
        for _, zone in ipairs(self.catalog.zones) do
          self.quota:set_limit(zone .. "/" .. catalog.quota_id(accelerator, preemptible), limit)
        end
      end
    end
  end
end

local function set_capacity(self, limits)
  local prefixes = {}
  for _, name in ipairs(self.catalog.names) do
    prefixes[self.catalog:accelerator(name).prefix] = true
  end
  each_prefix(limits, prefixes, function(prefix, limit)
    for _, zone in ipairs(self.catalog.zones) do
      self.capacity:set_limit(zone .. "/" .. prefix, limit)
    end
  end)
end

local function set_reservations(self, list)
  self.reservations = {}
  for i, reservation in ipairs(list) do
    local place = ("%s/%s/reserved"):format(reservation.zone, reservation.prefix)
    self.capacity:set_limit(place, reservation.size)
    self.reservations[i] = {
      name = reservation.name,
      zone = reservation.zone,
      size = reservation.size,
      type = reservation.prefix,
      units = reservation.units or "CHIPS",
      place = place,
    }
  end
end

---@class ciranda.sim.WorldOptions
---@field clock ciranda.sim.Clock
---@field machines table what stands behind the nodes, see docs/sim.md
---@field oauth table `check(request)`, raises when the credentials are no good
---@field seed integer?
---@field project string?
---@field project_number string?
---@field zone string? where the client's own machine is
---@field spawn (fun(name: string, fn: fun()))? runs what may wait; without it nothing may
---@field scale number? how many times faster than the real one the cloud is
---@field delays table? replaces entries of DELAYS
---@field grace table? replaces entries of GRACE
---@field quota integer|table<string, integer>? units (the number in a type's name) by prefix
---@field capacity integer|table<string, integer>?
---@field reservations table[]? { name, zone, prefix, size, units? }
---@field creates_per_minute integer?
---@field zones string[]?
---@field types table<string, string[]>?
---@field extra_types string[]?
---@field runtimes string[]?

--- Make a world.
---@param options ciranda.sim.WorldOptions
---@return table world
function M.new(options)
  local self = {
    clock = options.clock,
    machines = options.machines,
    oauth = options.oauth,
    random = random.new(options.seed or 1),
    zone = options.zone or "us-west4-a",
    project = {
      id = options.project or "simulated-project",
      number = options.project_number or "123456789012",
      metadata = {},
      created = options.clock:now(),
    },
    catalog = catalog.new(options),
    quota = pool.new(),
    capacity = pool.new(),
    create_rate = { per_minute = options.creates_per_minute, times = {} },
    replays = setmetatable({ clock = options.clock, entries = {} }, Replays),
    copy = copy,
  }
  local delays = setmetatable(copy(options.delays or {}), { __index = M.DELAYS })
  self.grace = setmetatable(copy(options.grace or {}), { __index = M.GRACE })
  local scale = options.scale or 1
  self.scale = scale
  self.spawn = options.spawn or function(_, fn)
    fn()
  end
  local chance = self.random:fork "delays"
  function self.delay(name)
    local range = delays[name] or error("no delay is called " .. tostring(name))
    return chance:between(range) / scale
  end
  -- From now on, in seconds of the cloud's; nil: what it was at first.
  function self.set_delay(name, seconds)
    if not M.DELAYS[name] then
      local names = {}
      for known in pairs(M.DELAYS) do
        names[#names + 1] = known
      end
      table.sort(names)
      local text = ("there is no delay '%s'; there are %s"):format(name, table.concat(names, ", "))
      errors.raise(errors.invalid(text, name))
    end
    delays[name] = seconds or (options.delays or {})[name]
  end
  self.events = events.new(self.clock)
  set_quota(self, options.quota or {})
  set_capacity(self, options.capacity or {})
  set_reservations(self, options.reservations or {})
  self.faults = faults.new(self)
  self.operations = operations.new(self)
  self.nodes = nodes.new(self)
  self.os_login = os_login.new(self)
  self.queued_resources = queued_resources.new(self)
  return self
end

return M
