--- What goes wrong, from a seed and by request.
--
-- A fault is an entry with a kind, what it applies to, and how often: `count` times, or with a `probability` each time
-- for as long as it is there. Each service asks this module at the one point where the fault would show.
--
--   { kind = "error", method = "nodes.get", status = "UNAVAILABLE", message = , retry_after = , count = 1 }
--   { kind = "reset" | "truncate" | "hang" | "slow", method = , seconds = , count = }
--   { kind = "slow_operation", method = "queuedResources.create", seconds = , count = }
--   { kind = "alter", method = , field = "nodes.*.id", value = , count = }
--   { kind = "stockout" | "internal" | "quota" | "reservation", name = "qr or node name or nil", slice = , count = }
--   { kind = "ssh_refuse" | "ssh_hang" | "ssh_reset", name = "node", worker = , count = }
--   { kind = "relay_drop" | "relay_close" | "relay_mute" | "relay_slow", name = "node", worker = , bytes = , code = ,
--     message = , seconds = , count = }
--   { kind = "preempt" | ... of ciranda.sim.accidents, name = , worker = , after = seconds, every = seconds, count = }
--
-- `method` is a method's id ("nodes.get", "storage.objects.insert"); "*" or a name ending in "*" fits several.

local accidents = require("ciranda.sim.accidents")
local errors = require("ciranda.sim.errors")

local M = {}

local CALL_KINDS = { alter = true, error = true, reset = true, truncate = true, hang = true, slow = true }
local OPERATION_KINDS = { slow_operation = true }
local PROVISION_KINDS = { stockout = true, internal = true, quota = true, reservation = true }
local SSH_KINDS = { ssh_refuse = true, ssh_hang = true, ssh_reset = true }
local RELAY_KINDS = { relay_drop = true, relay_close = true, relay_mute = true, relay_slow = true }
local KINDS =
  { CALL_KINDS, OPERATION_KINDS, PROVISION_KINDS, SSH_KINDS, RELAY_KINDS, accidents.nodes, accidents.workers }

---@class ciranda.sim.Fault
---@field id integer
---@field kind string
---@field method string?
---@field name string?
---@field worker integer?
---@field slice integer?
---@field count integer?
---@field probability number?
---@field status string?
---@field message string?
---@field retry_after number?
---@field seconds number?
---@field bytes integer? of data, after which a relay's connection ends
---@field code integer? with which it is closed
---@field field string? of the answer, see ciranda.sim.alter
---@field value any
---@field after number? of an accident: seconds until it strikes
---@field every number? of an accident: the mean of the seconds from one to the next
---@field free integer? of fillDisk
---@field notice number? of preempt

---@class ciranda.sim.Faults
---@field private list ciranda.sim.Fault[]
---@field private chances table<ciranda.sim.Fault, ciranda.sim.Random>
local Faults = {}
Faults.__index = Faults

---@param world { random: ciranda.sim.Random, events: ciranda.sim.Events }
---@return ciranda.sim.Faults
function M.new(world)
  local random = world.random:fork "faults"
  return setmetatable({ world = world, random = random, list = {}, chances = {}, last_id = 0 }, Faults)
end

local TYPES = {
  kind = "string",
  method = "string",
  name = "string",
  status = "string",
  message = "string",
  worker = "integer",
  slice = "integer",
  count = "integer",
  probability = "number",
  retry_after = "number",
  seconds = "number",
  bytes = "integer",
  code = "integer",
  field = "string",
  value = "any",
  after = "number",
  every = "number",
  free = "integer",
  notice = "number",
}
M.TYPES = TYPES

local function has_type(value, wanted)
  if wanted == "any" then
    return true
  elseif wanted == "integer" then
    return math.type(value) == "integer" or type(value) == "number" and math.tointeger(value) ~= nil
  end
  return type(value) == wanted
end

local function known_kinds()
  local names = {}
  for _, kinds in ipairs(KINDS) do
    for name in pairs(kinds) do
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return table.concat(names, ", ")
end

local function is_known(kind)
  for _, kinds in ipairs(KINDS) do
    if kinds[kind] then
      return true
    end
  end
  return false
end

local function refuse(field, format, ...)
  errors.raise(errors.invalid(format:format(...), field))
end

--- Refuse what is no fault.
---@param fault table as above
--- Raises ciranda.sim.Status INVALID_ARGUMENT.
function M.check(fault)
  for key, value in pairs(fault) do
    if not TYPES[key] then
      refuse(key, "a fault has no field '%s'", key)
    elseif not has_type(value, TYPES[key]) then
      refuse(key, "a fault's %s must be a %s", key, TYPES[key])
    elseif (key == "after" or key == "every" or key == "free") and value < 0 then
      refuse(key, "a fault's %s must be at least 0", key)
    end
  end
  local kind = fault.kind or ""
  if not is_known(kind) then
    refuse("kind", "there is no fault of the kind '%s'; there are %s", kind, known_kinds())
  elseif kind == "alter" and not (fault.field or ""):find("[^.]") then
    refuse("field", "an altered answer needs a field, such as nodes.*.id")
  elseif kind == "error" and not errors.known(fault.status) then
    refuse("status", "'%s' is no status, such as UNAVAILABLE", fault.status or "")
  elseif fault.every and fault.every < 1 then
    refuse("every", "an accident may strike every second at most")
  end
end

-- The node that an accident strikes: the one that is named, else one that is up.
local function victim(self, fault, chance)
  local world = self.world
  if fault.name then
    return accidents.find_node(world, fault.name)
  end
  local able = {}
  for _, node in
    ipairs(world.nodes:list(function()
      return true
    end))
  do
    local request = node.queued_resource
    local preemptible = request and request.preemptible or node.preemptible
    if node.message.state == "READY" and (fault.kind ~= "preempt" or preemptible) then
      able[#able + 1] = node
    end
  end
  return #able > 0 and able[chance:integer(1, #able)] or nil
end

-- An accident strikes, or finds nobody.
local function happen(self, fault, chance)
  local world, machine = self.world, nil
  local node = victim(self, fault, chance)
  if node and accidents.workers[fault.kind] then
    machine = world.machines:find(node, fault.worker or chance:integer(0, node.accelerator.workers - 1))
  end
  if not node or accidents.workers[fault.kind] and not machine then
    world.events:add("fault", fault.name or "nobody", fault.kind .. ": there is no such node or worker")
    return
  end
  world.spawn(fault.kind .. " " .. node.id, function()
    local ok, err = pcall(accidents.strike, world, fault.kind, node, machine, fault)
    if not ok and errors.is(err) then
      world.events:add("fault", node.name, ("%s: %s"):format(fault.kind, err.message))
    elseif not ok then
      error(err, 0)
    end
  end)
end

-- Put an accident on the clock. It is over when it has struck as often as it should, or was taken back.
local function schedule(self, fault, chance, delay)
  self.world.clock:after(delay / self.world.scale, function()
    local place
    for i, entry in ipairs(self.list) do
      place = entry == fault and i or place
    end
    if not place then
      return
    end
    if fault.count then
      fault.count = fault.count - 1
      if fault.count <= 0 then
        table.remove(self.list, place)
      end
    end
    if not fault.count or fault.count > 0 then
      schedule(self, fault, chance, -math.log(1 - chance:number()) * (fault.every or 0))
    end
    happen(self, fault, chance)
  end)
end

--- Add a fault.
---@param fault table as above
---@return ciranda.sim.Fault
--- Raises ciranda.sim.Status INVALID_ARGUMENT when it is none that there is.
function Faults:add(fault)
  M.check(fault)
  self.last_id = self.last_id + 1
  local entry = { id = self.last_id }
  for key, value in pairs(fault) do
    entry[key] = value
  end
  local accident = accidents.nodes[entry.kind] or accidents.workers[entry.kind]
  if not entry.count and not entry.probability and not (accident and entry.every) then
    entry.count = 1
  end
  self.list[#self.list + 1] = entry
  -- A chance of its own: how often clients call does not shift what else happens.
  local chance = self.random:fork(tostring(entry.id))
  self.chances[entry] = chance
  if accident then
    local first = entry.after or entry.every and -math.log(1 - chance:number()) * entry.every or 0
    schedule(self, entry, chance, first)
  end
  return entry
end

--- The faults that are still to come.
---@return ciranda.sim.Fault[]
function Faults:pending()
  return self.list
end

--- Take all faults back.
function Faults:clear()
  self.list, self.chances = {}, {}
end

local function fits(pattern, name)
  if pattern == nil or pattern == "*" or pattern == name then
    return true
  end
  local stem = pattern:match "^(.*)%*$"
  return stem ~= nil and name:sub(1, #stem) == stem
end

-- The first fault that applies and strikes; a counted one is used up.
local function strike(self, applies)
  for i, fault in ipairs(self.list) do
    if applies(fault) and (not fault.probability or self.chances[fault]:number() < fault.probability) then
      if fault.count then
        fault.count = fault.count - 1
        if fault.count <= 0 then
          table.remove(self.list, i)
        end
      end
      return fault
    end
  end
  return nil
end

--- What happens to a call.
---@param method string
---@return ciranda.sim.Fault? for every kind but "error"
--- Raises the ciranda.sim.Status of a fault of the kind "error".
function Faults:on_call(method)
  local fault = strike(self, function(entry)
    return CALL_KINDS[entry.kind] and fits(entry.method, method)
  end)
  if not fault then
    return nil
  end
  self.world.events:add("fault", method, fault.kind .. (fault.status and " " .. fault.status or ""))
  if fault.kind ~= "error" then
    return fault
  end
  local details
  if fault.retry_after then
    details = {
      {
        ["@type"] = "type.googleapis.com/google.rpc.RetryInfo",
        retryDelay = ("%gs"):format(fault.retry_after),
      },
    }
  end
  local err = errors.new(fault.status, fault.message or errors.unavailable().message, details)
  err.retry_after = fault.retry_after
  return errors.raise(err)
end

-- Seconds by which an operation is late without a figure in the fault.
local LATE = 60

--- What happens to an operation that a call begins.
---@param method string
---@return number? seconds for which the end of what it does is not told
function Faults:on_operation(method)
  local fault = strike(self, function(entry)
    return OPERATION_KINDS[entry.kind] and fits(entry.method, method)
  end)
  if not fault then
    return nil
  end
  self.world.events:add("fault", method, fault.kind)
  return fault.seconds or LATE
end

--- What happens when a queued resource or a node is provisioned.
---@param request ciranda.sim.QueuedResource|ciranda.sim.Node
---@return { slice: integer?, error: ciranda.sim.Status }?
function Faults:provisioning(request)
  local fault = strike(self, function(entry)
    return PROVISION_KINDS[entry.kind] and (not entry.name or entry.name == request.id)
  end)
  if not fault then
    return nil
  end
  self.world.events:add("fault", request.name, fault.kind)
  local random = self.random
  local err
  if fault.kind == "stockout" then
    err = errors.stockout(request.zone, random:hex(16))
  elseif fault.kind == "reservation" then
    err = errors.reservation_stockout(random:hex(15))
  elseif fault.kind == "quota" then
    local quota = require("ciranda.sim.catalog").quota_id(request.accelerator, request.preemptible or false)
    err = errors.quota_exhausted(quota, 0, request.zone)
  else
    err = errors.internal()
  end
  return { slice = fault.slice, error = err }
end

local function on_worker(self, kinds, node, worker)
  local fault = strike(self, function(entry)
    return kinds[entry.kind] and fits(entry.name, node) and (not entry.worker or entry.worker == worker)
  end)
  if fault then
    self.world.events:add("fault", ("%s worker %d"):format(node, worker), fault.kind)
  end
  return fault
end

--- What happens to a connection to a worker's sshd.
---@param node string short name
---@param worker integer
---@return ciranda.sim.Fault?
function Faults:on_ssh(node, worker)
  return on_worker(self, SSH_KINDS, node, worker)
end

--- What happens to a WebSocket of IAP's relay, a new tunnel's or one that takes a tunnel up again.
---@param node string short name
---@param worker integer
---@return ciranda.sim.Fault?
function Faults:on_relay(node, worker)
  return on_worker(self, RELAY_KINDS, node, worker)
end

return M
