--- Where each device of a mesh is: jax's create_device_mesh and create_hybrid_device_mesh, device for device.
local devices_room = require("ciranda.mesh.devices")
local fault = require("ciranda.mesh.fault")
local granules = require("ciranda.mesh.granule")
local handlers = require("ciranda.mesh.handlers")
local python = require("ciranda.mesh.python")
local releases = require("ciranda.mesh.releases")
local torus = require("ciranda.mesh.torus")
local view = require("ciranda.mesh.view")

local M = {}

M.grid = devices_room.grid
M.list = devices_room.list
M.rules = releases.rules

-- Topology, then mesh shape without its 1s, then how the axes are put (from 1). In jax's own order.
local CONTIGUOUS = {
  ["2x2x1"] = { { { 2, 2 }, { 1, 2, 3 } } },
  ["2x2x4"] = { { { 4, 4 }, { 1, 2, 3 } } },
  ["4x4x4"] = { { { 16, 4 }, { 1, 3, 2 } } },
  ["4x8x8"] = { { { 64, 4 }, { 1, 3, 2 } }, { { 4, 64 }, { 1, 3, 2 } } },
  ["8x8x8"] = { { { 64, 8 }, { 1, 3, 2 } } },
  ["8x16x16"] = { { { 256, 8 }, { 1, 3, 2 } }, { { 8, 256 }, { 1, 3, 2 } } },
}

---@class ciranda.mesh.Placement
---@field shape integer[]
---@field count integer
---@field slots integer[]          row-major over the shape; see ciranda.mesh.devices
---@field ids integer[]            device ids, row-major over the shape
---@field devices ciranda.mesh.Devices
---@field handler string?          name of the order the device kind has of its own
---@field physical integer[]?      shape of the physical array, when the torus decided
---@field assignment integer[][]?  sizes by physical and logical axis, when the torus decided
---@field release string           the jax release whose rules were followed
---@field ici integer[]?           of a hybrid mesh: the mesh inside a slice
---@field dcn integer[]?           of a hybrid mesh: the mesh of slices
local Placement = {}
Placement.__index = Placement

--- The id of the device at a place of the mesh.
---@param ... integer one index an axis, from 0
---@return integer
function Placement:at(...)
  local at = 0
  for axis, size in ipairs(self.shape) do
    local index = select(axis, ...)
    if math.type(index) ~= "integer" or index < 0 or index >= size then
      fault.misuse("placement:at: axis %d has indices 0 to %d, got %s", axis, size - 1, tostring(index))
    end
    at = at * size + index
  end
  return self.ids[at + 1]
end

--- Sizes as Python's int() reads them, or jax's refusal.
local function canonical(mesh_shape)
  if type(mesh_shape) ~= "table" or #mesh_shape == 0 then
    fault.misuse("mesh_shape must be a list of at least one size")
  end
  local shape = {}
  for index = 1, #mesh_shape do
    shape[index] = python.int(mesh_shape[index])
    if not shape[index] then
      fault.jax(
        "ValueError",
        "`mesh_shape` passed to `create_device_mesh` should be a sequence of ints. Got %s",
        python.tuple(mesh_shape)
      )
    end
  end
  return shape
end

--- A product of negative sizes can equal the number of devices; numpy's texts for it vary, this one is ours.
local function refuse_negative(shape, what)
  for _, size in ipairs(shape) do
    if size < 1 then
      fault.jax("ValueError", "%s %s has a size below 1", what, python.tuple(shape))
    end
  end
end

--- jax's _transpose_trick: puts the physical axes so that each process's devices are a contiguous part.
local function contiguous(physical, shape)
  local tricks = CONTIGUOUS[table.concat(physical.shape, "x")]
  if not tricks then
    fault.jax(
      "ValueError",
      "create_device_mesh cannot create contiguous submeshes for physical mesh topology %s",
      python.tuple(physical.shape)
    )
  end
  local plain = {}
  for _, size in ipairs(shape) do
    if size ~= 1 then
      plain[#plain + 1] = size
    end
  end
  local known = {}
  for index, trick in ipairs(tricks) do
    if table.concat(trick[1], ",") == table.concat(plain, ",") then
      local axes, sizes = {}, {}
      for k, axis in ipairs(trick[2]) do
        axes[k], sizes[k] = physical.axes[axis], physical.shape[axis]
      end
      return { shape = sizes, axes = axes, base = physical.base, lookup = physical.lookup }
    end
    known[index] = python.tuple(trick[1])
  end
  fault.jax(
    "ValueError",
    "create_device_mesh cannot create contiguous submeshes for mesh_shape %s and physical mesh topology %s. "
      .. "Available mesh_shapes: [%s]",
    python.tuple(shape),
    python.tuple(physical.shape),
    table.concat(known, ", ")
  )
end

--- What decides where a granule's devices go: an order of its own, or an assignment to the torus. Refuses what JAX
-- refuses, before anything is laid out.
---@return integer[]? slots, table how, ciranda.mesh.Physical? physical, ciranda.mesh.Axis[]? axes of the mesh
local function decide(granule, shape, options, rules)
  if view.product(shape) ~= granule.count then
    fault.jax(
      "ValueError",
      "Number of devices %d must equal the product of mesh_shape %s",
      granule.count,
      python.tuple(shape)
    )
  end
  refuse_negative(shape, "mesh_shape")
  local slots, name = handlers.order(granule, shape, rules)
  if slots then
    return slots, { handler = name }
  end
  if granule.platform == "gpu" and rules.gpu_by_id then
    local id = granule.devices.id
    slots = table.move(granule:listed(), 1, granule.count, 1, {})
    table.sort(slots, id and function(a, b)
      return id[a] < id[b]
    end or nil)
    return slots, {}
  elseif granule.platform ~= "tpu" then
    return granule:listed(), {}
  end

  local physical = granule:physical(rules)
  if options.contiguous_submeshes then
    physical = contiguous(physical, shape)
  end
  local matrix = torus.assign(physical.shape, shape, {
    split = options.allow_split_physical_axes,
    rules = rules,
    core_first = rules.core_first and (granule.first_kind == "TPU7x" or granule.first_kind == "TPU7"),
  })
  return nil, { assignment = matrix, physical = physical.shape }, physical, torus.view(matrix, physical.axes)
end

--- Places one granule. Returns its slots row-major over the shape, and what decided.
local function place(granule, shape, options, rules)
  local slots, how, physical, axes = decide(granule, shape, options, rules)
  if slots then
    return slots, how
  end
  slots = view.fill(axes, physical.base)
  local lookup = physical.lookup
  if lookup then
    for index = 1, #slots do
      slots[index] = lookup[slots[index] + 1]
    end
  end
  return slots, how
end

local function result(devices, shape, slots, how, rules)
  return setmetatable({
    shape = shape,
    count = #slots,
    slots = slots,
    ids = devices:ids_of(slots),
    devices = devices,
    handler = how.handler,
    physical = how.physical,
    assignment = how.assignment,
    release = rules.release,
    ici = how.ici,
    dcn = how.dcn,
  }, Placement)
end

--- A placement from slots that were found another way.
---@param devices ciranda.mesh.Devices
---@param shape integer[]
---@param slots integer[] row-major over the shape
---@param how table fields of the placement
---@return ciranda.mesh.Placement
function M.from_slots(devices, shape, slots, how)
  return result(devices, shape, slots, how, { release = how.release })
end

--- Whether JAX places a mesh on one slice of a grid, without laying it out.
---@param mesh_shape integer[]
---@param devices ciranda.mesh.Devices a grid
---@param options { allow_split_physical_axes: boolean?, jax: string|ciranda.mesh.Rules|nil }?
---@return boolean accepted, ciranda.Error? refusal
function M.accepts(mesh_shape, devices, options)
  options = options or {}
  local ok, refusal =
    pcall(decide, granules.of_grid(devices), mesh_shape, options, releases.rules(options.jax))
  return ok, not ok and refusal or nil
end

local PLAIN = { contiguous_submeshes = true, allow_split_physical_axes = true, jax = true }

--- Devices are made by `mesh.devices`.
local function need_devices(devices)
  if type(devices) ~= "table" or not devices.as_list then
    fault.misuse("devices expected, as mesh.devices.grid and mesh.devices.list make them")
  end
end

--- jax.experimental.mesh_utils.create_device_mesh.
---@param mesh_shape integer[] axes by increasing network intensity: the last carries the most traffic
---@param devices ciranda.mesh.Devices
---@param options { contiguous_submeshes: boolean?, allow_split_physical_axes: boolean?,
---       jax: string|ciranda.mesh.Rules|nil }? `jax` is the release to follow, the newest known when absent
---@return ciranda.mesh.Placement
--- Raises what JAX raises: `exception` is its type, `message` its text.
function M.create_device_mesh(mesh_shape, devices, options)
  options = fault.options(options, PLAIN, "create_device_mesh")
  local rules = releases.rules(options.jax)
  local shape = canonical(mesh_shape)
  need_devices(devices)
  local granule
  if devices.regular and devices.slices == 1 then
    granule = granules.of_grid(devices)
  else
    devices = devices:as_list()
    granule = granules.of_list(devices, devices:slots())
  end
  local slots, how = place(granule, shape, options, rules)
  return result(devices, shape, slots, how, rules)
end

--- A shape with 1s in front of it.
local function padded(shape, rank)
  local out = {}
  for index = 1, rank - #shape do
    out[index] = 1
  end
  return table.move(shape, 1, #shape, #out + 1, out)
end

--- Puts the slices' meshes together (numpy.block): DCN is the outer part of every axis, ICI the inner.
--
-- Where the mesh of slices has only 1s left, the elements of one granule stand in a row: those runs are copied whole.
---@param orders integer[][] slots of each granule, row-major over `ici`; one alone stands for all, `stride` apart
---@param stride integer?
---@param ici integer[]
---@param dcn integer[]
---@return integer[] slots row-major over the whole mesh
---@return integer[] shape
function M.block(orders, stride, ici, dcn)
  local rank = math.max(#ici, #dcn)
  ici, dcn = padded(ici, rank), padded(dcn, rank)
  local last = 0
  for axis = 1, rank do
    if dcn[axis] > 1 then
      last = axis
    end
  end
  local shape = {}
  for axis = 1, rank do
    shape[axis] = ici[axis] * dcn[axis]
  end
  if last == 0 then
    return orders[1], shape
  end

  local count = view.product(ici)
  local inner, outer = view.row_major(ici), {}
  local slices = view.row_major(dcn)
  for axis = 1, last do
    outer[#outer + 1] = { dcn[axis], slices[axis][2] * count }
    if axis < last then
      outer[#outer + 1] = inner[axis]
    end
  end
  local run = ici[last] * inner[last][2]
  local out, filled = {}, 0
  local shared = #orders == 1 and orders[1]
  for _, first in ipairs(view.fill(outer)) do
    local start = first % count
    if shared then
      local shift = first // count * stride
      for k = start + 1, start + run do
        filled = filled + 1
        out[filled] = shared[k] + shift
      end
    else
      table.move(orders[first // count + 1], start + 1, start + run, filled + 1, out)
      filled = filled + run
    end
  end
  return out, shape
end

--- The granules of a list, by slice or by process, as jax.experimental.mesh_utils makes them.
---@param devices ciranda.mesh.Devices a list
---@param by_process boolean?
---@param sorted boolean by their key; else in the order first seen
---@return integer[][] slots of each
function M.split(devices, by_process, sorted)
  local key = by_process and devices.process or devices.slice
  if key[1] == nil then
    fault.jax(
      "ValueError",
      "Device %s does not have attribute slice_index. See `process_is_granule` option.",
      devices:repr(1)
    )
  end
  local parts, counts, keys = {}, {}, {}
  for index = 1, devices.count do
    local value = key[index]
    local count = counts[value]
    if not count then
      if value == nil then
        fault.jax("AttributeError", "device %s has no slice_index", devices:repr(index))
      end
      parts[value], count = {}, 0
      keys[#keys + 1] = value
    end
    parts[value][count + 1] = index
    counts[value] = count + 1
  end
  if sorted then
    table.sort(keys)
  end
  for index, value in ipairs(keys) do
    keys[index] = parts[value]
  end
  return keys
end

local HYBRID = {
  process_is_granule = true,
  should_sort_granules_by_key = true,
  allow_split_physical_axes = true,
  jax = true,
}

--- jax.experimental.mesh_utils.create_hybrid_device_mesh.
--
-- As in JAX, the two shapes may differ in rank; `ciranda.mesh.check` refuses that.
---@param mesh_shape integer[] inside a slice (ICI), by increasing network intensity
---@param dcn_mesh_shape integer[] across slices (DCN), axes in the same order
---@param devices ciranda.mesh.Devices
---@param options { process_is_granule: boolean?, should_sort_granules_by_key: boolean?,
---       allow_split_physical_axes: boolean?, jax: string|ciranda.mesh.Rules|nil }?
---@return ciranda.mesh.Placement
--- Raises what JAX raises: `exception` is its type, `message` its text.
function M.create_hybrid_device_mesh(mesh_shape, dcn_mesh_shape, devices, options)
  options = fault.options(options, HYBRID, "create_hybrid_device_mesh")
  local rules = releases.rules(options.jax)
  if type(dcn_mesh_shape) ~= "table" or #dcn_mesh_shape == 0 then
    fault.misuse("dcn_mesh_shape must be a list of at least one size")
  end
  for index = 1, #dcn_mesh_shape do
    if math.type(dcn_mesh_shape[index]) ~= "integer" then
      fault.misuse("dcn_mesh_shape must be a list of integers, got %s", python.tuple(dcn_mesh_shape))
    end
  end

  need_devices(devices)
  local regular = devices.regular and devices.has_slice and not options.process_is_granule
  local count, parts = devices.slices, nil
  if not regular then
    devices = devices:as_list()
    parts = M.split(devices, options.process_is_granule, options.should_sort_granules_by_key ~= false)
    count = #parts
  end
  if view.product(dcn_mesh_shape) ~= count then
    fault.jax(
      "ValueError",
      "Number of slices %d must equal the product of dcn_mesh_shape %s",
      count,
      python.tuple(dcn_mesh_shape)
    )
  end
  refuse_negative(dcn_mesh_shape, "dcn_mesh_shape")

  local shape = canonical(mesh_shape)
  local orders, how = {}, nil
  if regular then
    orders[1], how = place(granules.of_grid(devices), shape, options, rules)
  else
    for index, slots in ipairs(parts) do
      orders[index], how = place(granules.of_list(devices, slots), shape, options, rules)
    end
  end
  local slots, whole = M.block(orders, devices.per_slice, shape, dcn_mesh_shape)
  how.ici, how.dcn = shape, dcn_mesh_shape
  return result(devices, whole, slots, how, rules)
end

return M
