--- The devices that are placed as one mesh: one slice, or all there are.
--
-- A granule answers what jax's placing asks: its devices in the order they are listed, or sorted by coordinates, and
-- the physical array. A grid answers by arithmetic, a list by walking its columns.
local fault = require("ciranda.mesh.fault")
local python = require("ciranda.mesh.python")
local view = require("ciranda.mesh.view")

local M = {}

---@class ciranda.mesh.Granule
---@field count integer
---@field first_kind string  decides the physical array
---@field last_kind string   decides which order applies
---@field platform string

---@class ciranda.mesh.Physical
---@field shape integer[]              [x, y, z], [x, y, core] or [x, y, z, core]
---@field axes ciranda.mesh.Axis[]     strides of the slots, or of the positions in `lookup`
---@field base integer
---@field lookup integer[]?            slots by row-major position, when they have no strides

--- Whether devices of a kind form a four-dimensional array, with the cores of a chip last.
local function has_core_axis(kind, cores, rules)
  if kind == "TPU7x" then
    return rules.tpu7x ~= false
  elseif kind == "TPU7" then
    return rules.tpu7
  elseif kind == "TPU8i" then
    return rules.tpu8i
  elseif kind == "TPU v5p" then
    return rules.v5p_cores and cores == 2
  elseif kind == "TPU v5" then
    return rules.v5_kind and cores == 2
  end
  return false
end

local function has_two_dimensions(kind)
  return kind == "TPU v2" or kind == "TPU v3"
end

-- ---------------------------------------------------------------------------------------------------------------

---@class ciranda.mesh.ListGranule : ciranda.mesh.Granule
local ListGranule = {}
ListGranule.__index = ListGranule

--- Part of a list of devices.
---@param devices ciranda.mesh.Devices
---@param slots integer[] in list order
---@return ciranda.mesh.ListGranule
function M.of_list(devices, slots)
  local last = slots[#slots]
  return setmetatable({
    devices = devices,
    slots = slots,
    count = #slots,
    first_kind = devices.kinds[slots[1]],
    last_kind = devices.kinds[last],
    platform = devices.platforms[last],
  }, ListGranule)
end

function ListGranule:listed()
  return self.slots
end

--- The greatest coordinates as a tuple: the corner of a cuboid, whatever of anything else.
function ListGranule:corner()
  local devices = self.devices
  local xs, ys, zs = devices.x, devices.y, devices.z
  local x, y, z = math.mininteger, math.mininteger, math.mininteger
  for index = 1, self.count do
    local slot = self.slots[index]
    local a, b, c = xs[slot], ys[slot], zs[slot]
    if a > x or (a == x and (b > y or (b == y and c > z))) then
      x, y, z = a, b, c
    end
  end
  return x, y, z
end

function ListGranule:by_coordinates()
  local devices, place = self.devices, {}
  local xs, ys, zs = devices.x, devices.y, devices.z
  local sorted = table.move(self.slots, 1, self.count, 1, {})
  for index = 1, self.count do
    place[self.slots[index]] = index
  end
  table.sort(sorted, function(a, b)
    if zs[a] ~= zs[b] then
      return zs[a] < zs[b]
    elseif ys[a] ~= ys[b] then
      return ys[a] < ys[b]
    elseif xs[a] ~= xs[b] then
      return xs[a] < xs[b]
    end
    return place[a] < place[b]
  end)
  return sorted
end

local function reprs(granule)
  local parts = {}
  for index, slot in ipairs(granule.slots) do
    parts[index] = granule.devices:repr(slot)
  end
  return "[" .. table.concat(parts, ", ") .. "]"
end

--- The physical array, with jax's refusals of what is no cuboid.
---@param rules ciranda.mesh.Rules
---@return ciranda.mesh.Physical
function ListGranule:physical(rules)
  local devices, slots, count = self.devices, self.slots, self.count
  local xs, ys, zs, core = devices.x, devices.y, devices.z, devices.core
  local first = slots[1]
  local x0, y0, z0, c0 = xs[first], ys[first], zs[first], core[first]
  local x1, y1, z1, c1 = x0, y0, z0, c0
  for index = 2, count do
    local slot = slots[index]
    local x, y, z, c = xs[slot], ys[slot], zs[slot], core[slot]
    if x < x0 then
      x0 = x
    elseif x > x1 then
      x1 = x
    end
    if y < y0 then
      y0 = y
    elseif y > y1 then
      y1 = y
    end
    if z < z0 then
      z0 = z
    elseif z > z1 then
      z1 = z
    end
    if c < c0 then
      c0 = c
    elseif c > c1 then
      c1 = c
    end
  end
  local dims, cores = { x1 - x0 + 1, y1 - y0 + 1, z1 - z0 + 1 }, c1 - c0 + 1
  if count ~= dims[1] * dims[2] * dims[3] * cores then
    fault.jax(
      "AssertionError",
      "jax_devices=%s dims=%s cores_per_chip=%d",
      reprs(self),
      python.tuple(dims),
      cores
    )
  end

  local kind = self.first_kind
  local shape, lookup = dims, {}
  local filled = 0
  if has_two_dimensions(kind) then
    shape = { dims[1], dims[2], cores }
    for index = 1, count do
      local slot = slots[index]
      if zs[slot] ~= 0 then
        fault.jax("AssertionError", "%s", devices:repr(slot))
      end
      local at = ((xs[slot] - x0) * dims[2] + ys[slot] - y0) * cores + core[slot] - c0 + 1
      filled = lookup[at] and filled or filled + 1
      lookup[at] = slot
    end
  elseif has_core_axis(kind, cores, rules) then
    shape = { dims[1], dims[2], dims[3], cores }
    for index = 1, count do
      local slot = slots[index]
      local at = (((xs[slot] - x0) * dims[2] + ys[slot] - y0) * dims[3] + zs[slot] - z0) * cores
        + core[slot]
        - c0
        + 1
      filled = lookup[at] and filled or filled + 1
      lookup[at] = slot
    end
  else
    for index = 1, count do
      local slot = slots[index]
      if core[slot] ~= 0 then
        fault.jax(
          "AssertionError",
          'Creating meshes for TPU >v3 requires one device per chip ("megacore" mode). '
            .. "Got device id %d for a device of kind %s: %s.",
          core[slot],
          kind,
          devices:repr(slot)
        )
      end
      local at = ((xs[slot] - x0) * dims[2] + ys[slot] - y0) * dims[3] + zs[slot] - z0 + 1
      filled = lookup[at] and filled or filled + 1
      lookup[at] = slot
    end
  end
  if filled ~= view.product(shape) then
    fault.jax(
      "AssertionError",
      'Constructed mesh contains a "hole"; probable cause: coordinates of jax_devices are not a contiguous '
        .. "cuboid: %s",
      reprs(self)
    )
  end
  return { shape = shape, axes = view.row_major(shape), base = 0, lookup = lookup }
end

-- ---------------------------------------------------------------------------------------------------------------

---@class ciranda.mesh.GridGranule : ciranda.mesh.Granule
local GridGranule = {}
GridGranule.__index = GridGranule

--- The first slice of a grid; the others are the same, further on.
---@param devices ciranda.mesh.Devices
---@return ciranda.mesh.GridGranule
function M.of_grid(devices)
  return setmetatable({
    devices = devices,
    count = devices.per_slice,
    first_kind = devices.kind,
    last_kind = devices.kind,
    platform = devices.platform,
  }, GridGranule)
end

function GridGranule:listed()
  local slots = self.devices:slots()
  return #slots == self.count and slots or table.move(slots, 1, self.count, 1, {})
end

function GridGranule:corner()
  local dims = self.devices.dims
  return dims[1] - 1, dims[2] - 1, dims[3] - 1
end

function GridGranule:by_coordinates()
  return view.fill({ { self.count, 1 } })
end

---@param rules ciranda.mesh.Rules
---@return ciranda.mesh.Physical
function GridGranule:physical(rules)
  local devices = self.devices
  local dims, cores = devices.dims, devices.cores
  local strides = { cores, cores * dims[1], cores * dims[1] * dims[2] }
  local axes = { { dims[1], strides[1] }, { dims[2], strides[2] }, { dims[3], strides[3] } }
  local shape = { dims[1], dims[2], dims[3] }
  if has_two_dimensions(self.first_kind) and dims[3] == 1 then
    shape[3], axes[3] = cores, { cores, 1 }
  elseif has_core_axis(self.first_kind, cores, rules) then
    shape[4], axes[4] = cores, { cores, 1 }
  elseif has_two_dimensions(self.first_kind) or cores > 1 then
    -- Only to be refused, in the words that name the device.
    local list = devices:as_list()
    return M.of_list(list, table.move(list:slots(), 1, self.count, 1, {})):physical(rules)
  end
  return { shape = shape, axes = axes, base = 0 }
end

return M
