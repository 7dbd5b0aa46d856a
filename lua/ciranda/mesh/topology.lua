--- One slice's shape: chips, hosts, links, and which worker holds which chips.
--
-- Coordinates are x, y, z from 0; two-dimensional slices have z = 0. Workers tile the slice with the chips of a
-- VM, x fastest, then y, then z; a worker's own chips are in the same order.
local fault = require("ciranda.mesh.fault")
local types = require("ciranda.mesh.types")

local M = {}

-- Largest slice in cubes of 4x4x4 (xpk system_characteristics). Dimensions must not decrease, except on v4.
local CUBE_LIMIT = { v4 = 64, v5p = 140, tpu7x = 144 }
local ANY_ORDER = { v4 = true }

---@class ciranda.mesh.Topology
---@field type string              accelerator type, "v4-8"
---@field generation string        "v4"
---@field name string              "2x2x1"
---@field dims integer[]           {x, y, z}
---@field chips integer
---@field cores integer            TensorCores
---@field devices integer          as JAX counts them: len(jax.devices()) on one slice
---@field devices_per_chip integer
---@field hosts integer            VMs
---@field chips_per_host integer   chips a VM
---@field vm_bounds integer[]      chips of a VM along x, y, z
---@field host_bounds integer[]    VMs along x, y, z
---@field wrap boolean[]           whether x, y, z close into a ring
---@field twistable boolean        offered as a twisted torus; hops are always those of the plain one
---@field listed boolean           whether this is the type's own topology in the table
---@field jax_kind string          JAX's device_kind
---@field notes string[]           what is unusual about it
local Topology = {}
Topology.__index = Topology
M.Topology = Topology

---@param dims integer[]
---@param count integer how many to write, 2 or 3
---@return string
function M.format(dims, count)
  return table.concat(dims, "x", 1, count)
end

--- Near valid topologies, as "v4-8 (2x2x1)".
local function near_text(generation, chips)
  local known = types.generations[generation]
  local number = known.suffix == "cores" and chips * known.cores_per_chip or chips
  local near, text = types.near(generation, number), {}
  for index, name in ipairs(near) do
    text[index] = ("%s (%s)"):format(name, types.by_name[name].topology)
  end
  return near, table.concat(text, ", ")
end

local function refuse(generation, name, chips, why)
  local near, text = near_text(generation, chips)
  fault.raise({
    op = "topology",
    target = name,
    near = near,
    message = ("topology %s is not valid for %s: %s; near it: %s"):format(name, generation, why, text),
  })
end

local function twistable(dims)
  local sorted = { dims[1], dims[2], dims[3] }
  table.sort(sorted)
  local n = sorted[1]
  return n % 4 == 0 and sorted[3] == 2 * n and (sorted[2] == n or sorted[2] == 2 * n)
end

--- Which axes of a slice close into a ring, by the rule the table follows: v5e and v6e only along 16 chips, the
-- three-dimensional generations only when the slice is made of whole 4x4x4 cubes; v2 and v3 do not say.
---@param kind string a generation or JAX's device_kind
---@param dims integer[]
---@return boolean[]
function M.wrap_of(kind, dims)
  local generation = types.generation_of(kind)
  local wrap = { false, false, false }
  if generation and generation.name ~= "v2" and generation.name ~= "v3" then
    local cubes = dims[1] % 4 == 0 and dims[2] % 4 == 0 and dims[3] % 4 == 0
    for axis = 1, 3 do
      wrap[axis] = generation.dimensions == 3 and cubes or generation.dimensions == 2 and dims[axis] == 16
    end
  end
  return wrap
end

--- Makes the object from what a row of the table, or the rule for cubes, gives.
local function make(entry, listed)
  local generation = types.generations[entry.generation]
  local self = setmetatable({
    type = entry.name,
    generation = entry.generation,
    name = entry.topology,
    dims = types.parse_bounds(entry.topology),
    chips = entry.chips,
    cores = entry.cores,
    devices = entry.chips * generation.devices_per_chip,
    devices_per_chip = generation.devices_per_chip,
    hosts = entry.vms,
    chips_per_host = entry.chips_per_vm,
    vm_bounds = entry.vm_bounds,
    host_bounds = entry.host_bounds,
    wrap = entry.wrap,
    twistable = entry.twistable,
    listed = listed,
    jax_kind = generation.jax_kind,
    notes = {},
  }, Topology)
  if self.chips > generation.largest_slice then
    self.notes[#self.notes + 1] = ("%d chips is more than the largest %s slice Google documents (%d chips)"):format(
      self.chips,
      self.generation,
      generation.largest_slice
    )
  end
  if not generation.multislice then
    self.notes[#self.notes + 1] = ("%s cannot be part of a multislice"):format(self.generation)
  end
  return self
end

--- A topology that is not the default of any type: whole cubes, put together by optical switches.
local function of_cubes(generation, name, dims)
  local chips = dims[1] * dims[2] * dims[3]
  local limit = CUBE_LIMIT[generation.name]
  if not limit then
    refuse(generation.name, name, chips, "only the listed topologies exist")
  end
  for axis = 1, 3 do
    if dims[axis] % 4 ~= 0 then
      refuse(
        generation.name,
        name,
        chips,
        "beyond the small slices (up to 2x4x4) every dimension is a multiple of 4"
      )
    end
  end
  if chips > limit * 64 then
    refuse(generation.name, name, chips, ("a slice has at most %d cubes of 4x4x4"):format(limit))
  end
  if not ANY_ORDER[generation.name] and (dims[1] > dims[2] or dims[2] > dims[3]) then
    refuse(generation.name, name, chips, "dimensions must not decrease")
  end
  local number = generation.suffix == "cores" and chips * generation.cores_per_chip or chips
  return make({
    name = ("%s-%d"):format(generation.api_prefix, number),
    generation = generation.name,
    topology = name,
    chips = chips,
    cores = chips * generation.cores_per_chip,
    vms = chips // 4,
    chips_per_vm = 4,
    vm_bounds = { 2, 2, 1 },
    host_bounds = { dims[1] // 2, dims[2] // 2, dims[3] },
    wrap = { true, true, true },
    twistable = generation.name ~= "tpu7x" and twistable(dims),
  }, false)
end

--- The topology of a generation's slice: `from_config("V4", "2x2x1")`, as in the API's AcceleratorConfig.
---@param generation string a generation, an API prefix or AcceleratorConfig's type
---@param name string "2x2x1"
---@return ciranda.mesh.Topology
--- Raises "invalid", with near valid types, when the topology does not exist.
function M.from_config(generation, name)
  local known = types.generation_of(generation)
  if not known then
    fault.raise({
      op = "topology",
      target = name,
      near = {},
      message = ("TPU generation '%s' is not known"):format(generation),
    })
  end
  local dims = types.parse_bounds(name)
  if not dims then
    fault.raise({
      op = "topology",
      target = name,
      near = {},
      message = ("topology '%s' is not written like 2x4 or 4x4x8"):format(name),
    })
  end
  for _, entry in ipairs(types.list) do
    if entry.generation == known.name then
      local own = types.parse_bounds(entry.topology)
      if own[1] == dims[1] and own[2] == dims[2] and own[3] == dims[3] then
        return make(entry, true)
      end
    end
  end
  return of_cubes(known, name, dims)
end

local KNOWN = { type = true, topology = true, generation = true }

--- The topology of a slice.
---@param spec string|ciranda.mesh.Topology|{ type: string?, generation: string?, topology: string? }
---       "v4-8", or {type=} with another topology of as many chips, or {generation=, topology=}
---@return ciranda.mesh.Topology
--- Raises "invalid" with near valid types.
function M.of(spec)
  if type(spec) == "string" then
    return make(types.get(spec), true)
  end
  if getmetatable(spec) == Topology then
    return spec
  end
  spec = fault.options(spec, KNOWN, "topology.of")
  if spec.type and not spec.topology then
    return make(types.get(spec.type), true)
  end
  if not spec.topology or not (spec.type or spec.generation) then
    fault.misuse("topology.of needs type=, or generation= and topology=")
  end
  local made = M.from_config(spec.generation or types.get(spec.type).generation, spec.topology)
  if spec.type and made.type ~= spec.type then
    local entry = types.get(spec.type)
    fault.raise({
      op = "topology",
      target = spec.topology,
      near = { entry.name },
      message = ("%s has %d chips and topology %s, but topology %s has %d (that is %s)"):format(
        entry.name,
        entry.chips,
        entry.topology,
        spec.topology,
        made.chips,
        made.type
      ),
    })
  end
  return made
end

--- The accelerator type of a topology: `to_type("v4", "2x2x4")` is "v4-32".
---@param generation string
---@param name string
---@return string
function M.to_type(generation, name)
  return M.from_config(generation, name).type
end

--- The chips of a worker, in its own order, and where the worker sits.
---@param index integer from 0
---@return { index: integer, host: integer[], chips: integer[][] }
--- Raises "invalid" when the slice has no such worker.
function Topology:worker(index)
  if math.type(index) ~= "integer" or index < 0 or index >= self.hosts then
    fault.raise({
      op = "topology",
      target = self.type,
      message = ("%s has workers 0 to %d, not %s"):format(self.type, self.hosts - 1, tostring(index)),
    })
  end
  local across, down = self.host_bounds[1], self.host_bounds[2]
  local host = { index % across, index // across % down, index // (across * down) }
  local chips = {}
  for z = 0, self.vm_bounds[3] - 1 do
    for y = 0, self.vm_bounds[2] - 1 do
      for x = 0, self.vm_bounds[1] - 1 do
        chips[#chips + 1] = {
          host[1] * self.vm_bounds[1] + x,
          host[2] * self.vm_bounds[2] + y,
          host[3] * self.vm_bounds[3] + z,
        }
      end
    end
  end
  return { index = index, host = host, chips = chips }
end

--- The worker that holds a chip.
---@param x integer
---@param y integer
---@param z integer
---@return integer index from 0
function Topology:worker_of(x, y, z)
  local vm, hosts = self.vm_bounds, self.host_bounds
  return x // vm[1] + hosts[1] * (y // vm[2] + hosts[2] * (z // vm[3]))
end

--- How many links a message crosses between two chips on the plain torus.
---@param a integer[] coordinates
---@param b integer[]
---@return integer
function Topology:hops(a, b)
  local total = 0
  for axis = 1, 3 do
    local distance = math.abs(a[axis] - b[axis])
    if self.wrap[axis] then
      distance = math.min(distance, self.dims[axis] - distance)
    end
    total = total + distance
  end
  return total
end

--- One line for a person.
---@return string
function Topology:describe()
  local axes = {}
  for axis, letter in ipairs({ "x", "y", "z" }) do
    if self.wrap[axis] then
      axes[#axes + 1] = letter
    end
  end
  return ("%s: %s, %d chip%s (%d TensorCores), %d worker%s of %d, %d JAX device%s, %s%s"):format(
    self.type,
    self.name,
    self.chips,
    self.chips == 1 and "" or "s",
    self.cores,
    self.hosts,
    self.hosts == 1 and "" or "s",
    self.chips_per_host,
    self.devices,
    self.devices == 1 and "" or "s",
    #axes == 0 and "no wraparound" or "rings along " .. table.concat(axes, ", "),
    self.twistable and ", can be twisted" or ""
  )
end

return M
