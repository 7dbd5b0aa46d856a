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
--
-- `method` is a method's id ("nodes.get", "storage.objects.insert"); "*" or a name ending in "*" fits several.

local errors = require("ciranda.sim.errors")

local M = {}

local CALL_KINDS = { alter = true, error = true, reset = true, truncate = true, hang = true, slow = true }
local OPERATION_KINDS = { slow_operation = true }
local PROVISION_KINDS = { stockout = true, internal = true, quota = true, reservation = true }
local SSH_KINDS = { ssh_refuse = true, ssh_hang = true, ssh_reset = true }

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
---@field field string? of the answer, see ciranda.sim.alter
---@field value any

---@class ciranda.sim.Faults
---@field private list ciranda.sim.Fault[]
local Faults = {}
Faults.__index = Faults

---@param world { random: ciranda.sim.Random, events: ciranda.sim.Events }
---@return ciranda.sim.Faults
function M.new(world)
  return setmetatable({ world = world, random = world.random:fork "faults", list = {}, last_id = 0 }, Faults)
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
  field = "string",
  value = "any",
}

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
  for _, kinds in ipairs({ CALL_KINDS, OPERATION_KINDS, PROVISION_KINDS, SSH_KINDS }) do
    for name in pairs(kinds) do
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return table.concat(names, ", ")
end

--- Add a fault.
---@param fault table as above
---@return ciranda.sim.Fault
--- Raises ciranda.sim.Status INVALID_ARGUMENT when it is none that there is.
function Faults:add(fault)
  for key, value in pairs(fault) do
    if not TYPES[key] then
      errors.raise(errors.invalid(("a fault has no field '%s'"):format(key), key))
    elseif not has_type(value, TYPES[key]) then
      errors.raise(errors.invalid(("a fault's %s must be a %s"):format(key, TYPES[key]), key))
    end
  end
  local kind = fault.kind or ""
  if not (CALL_KINDS[kind] or OPERATION_KINDS[kind] or PROVISION_KINDS[kind] or SSH_KINDS[kind]) then
    errors.raise(
      errors.invalid(
        ("there is no fault of the kind '%s'; there are %s"):format(tostring(kind), known_kinds()),
        "kind"
      )
    )
  elseif kind == "alter" and not (fault.field or ""):find("[^.]") then
    errors.raise(errors.invalid("an altered answer needs a field, such as nodes.*.id", "field"))
  end
  if kind == "error" and not errors.known(fault.status) then
    errors.raise(
      errors.invalid(("'%s' is no status, such as UNAVAILABLE"):format(fault.status or ""), "status")
    )
  end
  self.last_id = self.last_id + 1
  local entry = { id = self.last_id }
  for key, value in pairs(fault) do
    entry[key] = value
  end
  if not entry.count and not entry.probability then
    entry.count = 1
  end
  self.list[#self.list + 1] = entry
  return entry
end

--- The faults that are still to come.
---@return ciranda.sim.Fault[]
function Faults:pending()
  return self.list
end

--- Take all faults back.
function Faults:clear()
  self.list = {}
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
    if applies(fault) and (not fault.probability or self.random:number() < fault.probability) then
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

--- What happens to a connection to a worker's sshd.
---@param node string short name
---@param worker integer
---@return ciranda.sim.Fault?
function Faults:on_ssh(node, worker)
  local fault = strike(self, function(entry)
    return SSH_KINDS[entry.kind] and fits(entry.name, node) and (not entry.worker or entry.worker == worker)
  end)
  if fault then
    self.world.events:add("fault", ("%s worker %d"):format(node, worker), fault.kind)
  end
  return fault
end

return M
