--- Sets of devices, as `jax.devices()` would list them.
--
-- Two kinds: `grid`, whole equal slices, kept as numbers only (nothing is made a device, so 65,536 of them cost
-- nothing); and `list`, any devices one by one, kept as columns. Placing works on *slots*: the id of a grid's
-- device, the position in the list of any other. A *granule* is the part of a set that is placed as one mesh.
local fault = require("ciranda.mesh.fault")
local python = require("ciranda.mesh.python")
local topology = require("ciranda.mesh.topology")

local M = {}

---@class ciranda.mesh.Devices
---@field count integer
---@field regular boolean
---@field dims integer[]?         of a grid: chips along x, y, z of one slice
---@field cores integer?          of a grid: devices a chip
---@field slices integer?         of a grid
---@field host integer[]?         of a grid: chips of a host along x, y, z
---@field topology ciranda.mesh.Topology?  of a grid made from an accelerator type
local Devices = {}
Devices.__index = Devices

local GRID = {
  type = true,
  topology = true,
  slices = true,
  kind = true,
  platform = true,
  cores = true,
  host = true,
  slice_index = true,
}

local function positive(value, what)
  if math.type(value) ~= "integer" or value < 1 then
    fault.misuse("devices.grid: %s must be a positive integer, got %s", what, tostring(value))
  end
  return value
end

--- Whole, equal slices. Ids count cores, then x, y, z, then slices, which is how jax's own tests number devices;
-- the list goes host by host, as jax.devices() does.
---@param options { type: string?, topology: integer[]|string|ciranda.mesh.Topology|nil, slices: integer?,
---       kind: string?, platform: string?, cores: integer?, host: integer[]?, slice_index: boolean? }
---       either `type` (an accelerator type), or `kind` (jax's device_kind) and `topology` ({x, y, z});
---       `cores` devices a chip, 1 when absent; `host` the chips of a host, 2x2x1 when absent;
---       `slice_index = false` for devices that do not know their slice
---@return ciranda.mesh.Devices
function M.grid(options)
  options = fault.options(options, GRID, "devices.grid")
  local self = {
    regular = true,
    platform = options.platform or "tpu",
    slices = positive(options.slices or 1, "slices"),
    has_slice = options.slice_index ~= false,
  }
  if options.type or getmetatable(options.topology) == topology.Topology then
    local shape = topology.of(options.type or options.topology)
    self.topology = shape
    self.kind = options.kind or shape.jax_kind
    self.dims, self.cores, self.host = shape.dims, shape.devices_per_chip, shape.vm_bounds
  else
    if type(options.kind) ~= "string" or type(options.topology) ~= "table" then
      fault.misuse("devices.grid needs type=, or kind= and topology={x, y, z}")
    end
    self.kind = options.kind
    self.dims = {}
    for axis = 1, 3 do
      self.dims[axis] = positive(options.topology[axis] or 1, "topology")
    end
    self.cores = positive(options.cores or 1, "cores")
    self.host = options.host or { math.min(self.dims[1], 2), math.min(self.dims[2], 2), 1 }
    for axis = 1, 3 do
      if self.dims[axis] % positive(self.host[axis] or 1, "host") ~= 0 then
        fault.misuse(
          "devices.grid: hosts of %s do not tile %s",
          python.list(self.host),
          python.list(self.dims)
        )
      end
    end
  end
  self.per_slice = self.dims[1] * self.dims[2] * self.dims[3] * self.cores
  self.count = self.per_slice * self.slices
  return setmetatable(self, Devices)
end

--- Any devices, in the order JAX lists them.
---@param list { id: integer, kind: string, platform: string?, coords: integer[]?, core: integer?,
---       slice_index: integer?, process_index: integer? }[] `platform` is "tpu" when absent, `core` 0
---@return ciranda.mesh.Devices
function M.list(list)
  if type(list) ~= "table" or #list == 0 then
    fault.misuse("devices.list: a non-empty list of devices expected")
  end
  local id, kind, platform, core, slice, process = {}, {}, {}, {}, {}, {}
  local x, y, z = {}, {}, {}
  for index, device in ipairs(list) do
    if math.type(device.id) ~= "integer" or type(device.kind) ~= "string" then
      fault.misuse("devices.list: device %d needs an integer id and a kind", index)
    end
    id[index], kind[index] = device.id, device.kind
    platform[index] = device.platform or "tpu"
    core[index] = device.core or 0
    process[index] = device.process_index or 0
    slice[index] = device.slice_index
    local coords = device.coords
    if coords then
      x[index], y[index], z[index] = coords[1], coords[2], coords[3] or 0
    elseif platform[index] == "tpu" then
      fault.misuse("devices.list: device %d (id %d) is a TPU without coords", index, device.id)
    else
      x[index], y[index], z[index] = 0, 0, 0
    end
  end
  return setmetatable({
    regular = false,
    count = #list,
    id = id,
    kinds = kind,
    platforms = platform,
    core = core,
    slice = slice,
    process = process,
    x = x,
    y = y,
    z = z,
    has_slice = slice[1] ~= nil,
  }, Devices)
end

--- Everything there is to know of a device, by slot.
---@param slot integer
---@return { id: integer, kind: string, platform: string, coords: integer[], core: integer, slice_index: integer?,
---        process_index: integer }
function Devices:device(slot)
  if not self.regular then
    return {
      id = self.id[slot],
      kind = self.kinds[slot],
      platform = self.platforms[slot],
      coords = { self.x[slot], self.y[slot], self.z[slot] },
      core = self.core[slot],
      slice_index = self.slice[slot],
      process_index = self.process[slot],
    }
  end
  local dims, host = self.dims, self.host
  local rest, core = slot // self.cores, slot % self.cores
  local x, y = rest % dims[1], rest // dims[1] % dims[2]
  local z, slice = rest // (dims[1] * dims[2]) % dims[3], slot // self.per_slice
  local across, down, deep = dims[1] // host[1], dims[2] // host[2], dims[3] // host[3]
  return {
    id = slot,
    kind = self.kind,
    platform = self.platform,
    coords = { x, y, z },
    core = core,
    slice_index = self.has_slice and slice or nil,
    process_index = x // host[1] + across * (y // host[2] + down * (z // host[3] + deep * slice)),
  }
end

--- x, y, z, core, slice of a slot, without making a table.
---@param slot integer
---@return integer x, integer y, integer z, integer core, integer slice
function Devices:position(slot)
  if not self.regular then
    return self.x[slot], self.y[slot], self.z[slot], self.core[slot], self.slice[slot] or 0
  end
  local dims = self.dims
  local rest = slot // self.cores
  return rest % dims[1],
    rest // dims[1] % dims[2],
    rest // (dims[1] * dims[2]) % dims[3],
    slot % self.cores,
    slot // self.per_slice
end

--- The device as JAX prints it.
---@param slot integer
---@return string
function Devices:repr(slot)
  local device = self:device(slot)
  local coords = device.coords
  if device.platform ~= "tpu" then
    return ("%sDevice(id=%d)"):format(device.platform == "cpu" and "Cpu" or "Cuda", device.id)
  end
  return ("TpuDevice(id=%d, process_index=%d, coords=(%d,%d,%d), core_on_chip=%d)"):format(
    device.id,
    device.process_index,
    coords[1],
    coords[2],
    coords[3],
    device.core
  )
end

--- The slots in the order JAX lists the devices.
---@return integer[]
function Devices:slots()
  local out = {}
  if not self.regular then
    for index = 1, self.count do
      out[index] = index
    end
    return out
  end
  local dims, host, cores = self.dims, self.host, self.cores
  local count = 0
  for slice = 0, self.slices - 1 do
    for hz = 0, dims[3] - 1, host[3] do
      for hy = 0, dims[2] - 1, host[2] do
        for hx = 0, dims[1] - 1, host[1] do
          for z = hz, hz + host[3] - 1 do
            for y = hy, hy + host[2] - 1 do
              for x = hx, hx + host[1] - 1 do
                local first = cores * (x + dims[1] * (y + dims[2] * z)) + slice * self.per_slice
                for core = 0, cores - 1 do
                  count = count + 1
                  out[count] = first + core
                end
              end
            end
          end
        end
      end
    end
  end
  return out
end

--- The same devices one by one, in the same order.
---@return ciranda.mesh.Devices
function Devices:as_list()
  if not self.regular then
    return self
  end
  local list = {}
  for index, slot in ipairs(self:slots()) do
    list[index] = self:device(slot)
  end
  return M.list(list)
end

--- Ids of slots.
---@param slots integer[]
---@return integer[] the same table for a grid, whose slots are ids
function Devices:ids_of(slots)
  if self.regular then
    return slots
  end
  local id, out = self.id, {}
  for index = 1, #slots do
    out[index] = id[slots[index]]
  end
  return out
end

return M
