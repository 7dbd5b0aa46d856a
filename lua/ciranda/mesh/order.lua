--- Which devices stand next to each other along an axis, how many links that costs, and a better order.
--
-- Collectives along a mesh axis run around a ring: each device sends to the next along the axis, the last to the
-- first. `measure` counts the links each step of those rings crosses on the torus. JAX assigns whole physical axes
-- and walks them row by row, so its rings often have long steps; `best` looks for an assignment and a walk whose
-- rings cross fewer links, and never gives an axis more than JAX does.
--
-- Rings are counted inside a slice. Between slices there is no torus: an axis that spans slices crosses DCN, whatever
-- the order.
local devices_room = require("ciranda.mesh.devices")
local fault = require("ciranda.mesh.fault")
local granules = require("ciranda.mesh.granule")
local placement = require("ciranda.mesh.placement")
local python = require("ciranda.mesh.python")
local releases = require("ciranda.mesh.releases")
local ring = require("ciranda.mesh.ring")
local topology = require("ciranda.mesh.topology")
local torus = require("ciranda.mesh.torus")
local view = require("ciranda.mesh.view")

local M = {}

--- How many assignments, and how many with another nesting, are looked at; jax's own comes first.
local ASSIGNMENT_LIMIT = 2000
local CANDIDATE_LIMIT = 20000

---@class ciranda.mesh.AxisHops
---@field size integer      devices along the axis inside a slice
---@field rings integer     how many rings the axis has in a slice
---@field total integer     links all steps of all those rings cross
---@field longest integer   links of the longest step
---@field ring integer[]    links of each step of the first ring; its last is the step home

---@class ciranda.mesh.Order
---@field placement ciranda.mesh.Placement
---@field hops ciranda.mesh.AxisHops[]  by axis of the mesh inside a slice
---@field ici integer[]
---@field dcn integer[]
---@field slots integer[]               of the first slice, row-major over `ici`
---@field dims integer[]                chips of a slice along x, y, z
---@field wrap boolean[]                whether x, y, z close into a ring
---@field jax ciranda.mesh.Order?       of a better order: JAX's
---@field refusal ciranda.Error?        of a better order: why JAX places nothing
---@field improved boolean              whether this is better than JAX's

--- Links that the rings of every axis cross.
---@param devices ciranda.mesh.Devices
---@param slots integer[] of one slice, row-major over the shape
---@param shape integer[]
---@param dims integer[] chips along x, y, z
---@param wrap boolean[]
---@return ciranda.mesh.AxisHops[]
function M.measure(devices, slots, shape, dims, wrap)
  local count = #slots
  local xs, ys, zs = {}, {}, {}
  for index = 1, count do
    xs[index], ys[index], zs[index] = devices:position(slots[index])
  end
  local function along(values, axis, a, b)
    local away = math.abs(values[a] - values[b])
    return wrap[axis] and math.min(away, dims[axis] - away) or away
  end
  local function links(a, b)
    return along(xs, 1, a, b) + along(ys, 2, a, b) + along(zs, 3, a, b)
  end

  local out, stride = {}, 1
  for axis = #shape, 1, -1 do
    local size = shape[axis]
    local hops = { size = size, rings = count // size, total = 0, longest = 0, ring = {} }
    if size > 1 then
      for outer = 0, count - 1, stride * size do
        for inner = outer + 1, outer + stride do
          local last = inner + (size - 1) * stride
          local at = inner
          for step = 1, size do
            local nearby = at < last and at + stride or inner
            local crossed = links(at, nearby)
            hops.total = hops.total + crossed
            hops.longest = math.max(hops.longest, crossed)
            if inner == 1 then
              hops.ring[step] = crossed
            end
            at = nearby
          end
        end
      end
    end
    out[axis] = hops
    stride = stride * size
  end
  return out
end

local SPEC = {
  type = true,
  topology = true,
  slices = true,
  devices = true,
  ici = true,
  dcn = true,
  allow_split = true,
  jax = true,
}

--- Reads what both public functions take.
local function resolve(spec, what)
  spec = fault.options(spec, SPEC, what)
  local devices = spec.devices
  if not devices then
    if not (spec.type or spec.topology) then
      fault.misuse("%s needs type=, topology= or devices=", what)
    end
    devices = devices_room.grid({ type = spec.type, topology = spec.topology, slices = spec.slices })
  end
  if type(spec.ici) ~= "table" or #spec.ici == 0 then
    fault.misuse("%s needs ici=, the mesh inside a slice", what)
  end
  local dcn = spec.dcn
  if not dcn then
    dcn = {}
    for axis = 1, #spec.ici do
      dcn[axis] = 1
    end
  elseif #dcn ~= #spec.ici then
    fault.raise({
      op = what,
      message = (
        "ici has %d axes and dcn %d; JAX would pad the shorter one with 1s in front, which is never what "
        .. "is meant"
      ):format(#spec.ici, #dcn),
    })
  end
  return { devices = devices, ici = spec.ici, dcn = dcn, split = spec.allow_split or false, jax = spec.jax }
end

--- The slices of the devices: of a grid one stands for all.
local function slices_of(devices)
  if devices.regular then
    return { granules.of_grid(devices) }
  elseif not devices.has_slice then
    return { granules.of_list(devices, devices:slots()) }
  end
  local out = {}
  for index, slots in ipairs(placement.split(devices, false, true)) do
    out[index] = granules.of_list(devices, slots)
  end
  return out
end

--- Chips along x, y, z and wraparound of a slice, from its physical array.
local function torus_of(devices, granule, physical)
  if devices.regular and devices.topology then
    return devices.dims, devices.topology.wrap
  end
  local shape = physical.shape
  local two = granule.first_kind == "TPU v2" or granule.first_kind == "TPU v3"
  local dims = { shape[1], shape[2], two and 1 or shape[3] }
  return dims, topology.wrap_of(granule.first_kind, dims)
end

local function refuse_others(granule)
  if granule.platform ~= "tpu" then
    fault.raise({
      code = "unsupported",
      op = "order",
      message = ("devices of platform '%s' are not on a torus; only TPUs have hops"):format(granule.platform),
    })
  end
end

local function jax_order(wanted)
  local devices, rules = wanted.devices, releases.rules(wanted.jax)
  local parts = slices_of(devices)
  refuse_others(parts[1])
  local many = view.product(wanted.dcn) > 1 or #parts > 1 or (devices.regular and devices.slices > 1)
  local options = { allow_split_physical_axes = wanted.split, jax = rules }
  local placed
  if many then
    placed = placement.create_hybrid_device_mesh(wanted.ici, wanted.dcn, devices, options)
  else
    placed = placement.create_device_mesh(wanted.ici, devices, options)
    placed.ici, placed.dcn = placed.shape, wanted.dcn
  end
  local dims, wrap = torus_of(devices, parts[1], parts[1]:physical(rules))
  -- The first slice alone: its indices of DCN are all zero.
  local axes = {}
  for axis = #placed.shape, 1, -1 do
    local stride = axis == #placed.shape and 1 or axes[axis + 1][3]
    axes[axis] = { wanted.ici[axis], stride, stride * placed.shape[axis] }
  end
  local slots = view.fill(axes, 1)
  for index = 1, #slots do
    slots[index] = placed.slots[slots[index]]
  end
  return {
    placement = placed,
    hops = M.measure(placed.devices, slots, wanted.ici, dims, wrap),
    ici = wanted.ici,
    dcn = wanted.dcn,
    slots = slots,
    dims = dims,
    wrap = wrap,
    improved = false,
  }
end

--- JAX's own order, with the links its rings cross.
---@param spec { type: string?, topology: ciranda.mesh.Topology?, slices: integer?, devices: ciranda.mesh.Devices?,
---       ici: integer[], dcn: integer[]?, allow_split: boolean?, jax: string|ciranda.mesh.Rules|nil }
---       `ici` the mesh inside a slice and `dcn` the mesh of slices, axes by increasing network intensity;
---       `allow_split` is jax's allow_split_physical_axes
---@return ciranda.mesh.Order
--- Raises what JAX raises; "invalid" when ici and dcn differ in rank, "unsupported" for devices other than TPUs.
function M.jax_order(spec)
  return jax_order(resolve(spec, "jax_order"))
end

--- Tables of exponents with given sums of rows and columns, one prime's share of an assignment.
local function spread(rows, columns, each)
  local table_ = {}
  for r = 1, #rows do
    table_[r] = {}
  end
  local left = table.move(columns, 1, #columns, 1, {})
  local function cell(r, c, row_left)
    if r > #rows then
      return each(table_)
    end
    if c == #columns then
      -- The last column takes what the row still has.
      if row_left > left[c] then
        return true
      end
      table_[r][c] = row_left
      left[c] = left[c] - row_left
      local more = cell(r + 1, 1, rows[r + 1])
      left[c] = left[c] + row_left
      return more
    end
    for take = math.min(row_left, left[c]), 0, -1 do
      table_[r][c] = take
      left[c] = left[c] - take
      local more = cell(r, c + 1, row_left - take)
      left[c] = left[c] + take
      if not more then
        return false
      end
    end
    return true
  end
  return cell(1, 1, rows[1])
end

--- Every assignment of the physical axes to the logical ones, up to the limit, jax's first.
local function assignments(physical, logical)
  local out = { (torus.assign(physical, logical, { split = true })) }
  local primes, seen = {}, {}
  for _, size in ipairs(physical) do
    for _, prime in ipairs(torus.prime_factors(size)) do
      if not seen[prime] then
        seen[prime] = true
        primes[#primes + 1] = prime
      end
    end
  end
  local function exponents(sizes, prime)
    local list = {}
    for index, size in ipairs(sizes) do
      list[index] = 0
      while size % prime == 0 do
        size, list[index] = size // prime, list[index] + 1
      end
    end
    return list
  end
  local matrix = {}
  for axis = 1, #physical do
    matrix[axis] = {}
    for index = 1, #logical do
      matrix[axis][index] = 1
    end
  end
  local function prime_at(which)
    local prime = primes[which]
    if not prime then
      local copy = {}
      for axis = 1, #physical do
        copy[axis] = table.move(matrix[axis], 1, #logical, 1, {})
      end
      out[#out + 1] = copy
      return #out < ASSIGNMENT_LIMIT
    end
    return spread(exponents(physical, prime), exponents(logical, prime), function(powers)
      for axis = 1, #physical do
        for index = 1, #logical do
          for _ = 1, powers[axis][index] do
            matrix[axis][index] = matrix[axis][index] * prime
          end
        end
      end
      local more = prime_at(which + 1)
      for axis = 1, #physical do
        for index = 1, #logical do
          for _ = 1, powers[axis][index] do
            matrix[axis][index] = matrix[axis][index] // prime
          end
        end
      end
      return more
    end)
  end
  prime_at(1)
  return out
end

--- Which logical axis is outside which where they share a physical axis: jax's way first.
local function nestings(count)
  local own = {}
  for index = 1, count do
    own[index] = index
  end
  local out = { own }
  if count > 4 then
    return out
  end
  local function extend(chosen, used)
    if #chosen == count then
      out[#out + 1] = table.move(chosen, 1, count, 1, {})
      return
    end
    for index = 1, count do
      if not used[index] then
        used[index] = true
        chosen[#chosen + 1] = index
        extend(chosen, used)
        chosen[#chosen] = nil
        used[index] = false
      end
    end
  end
  extend({}, {})
  return out
end

--- Chips between neighbours of each logical axis on each physical one.
local function spacings(matrix, nesting)
  local out = {}
  for axis, row in ipairs(matrix) do
    out[axis] = {}
    local inside = 1
    for place = #nesting, 1, -1 do
      out[axis][nesting[place]] = inside
      inside = inside * row[nesting[place]]
    end
  end
  return out
end

--- Searches assignments, nestings and walks. A ring of an axis may cross `limits[axis].total` links at most, and
-- `limits[axis].longest` in one step.
---@return { tours: integer[][][], spacing: integer[][] }? nil when nothing is within the limits and below `goal`
local function search(physical, logical, dims, wrap, cores_from, limits, goal)
  local tours, found = {}, nil
  local function dimensions_of(matrix, spacing, index)
    local out = {}
    for axis = 1, #physical do
      local core = axis >= cores_from
      out[axis] = {
        size = matrix[axis][index],
        step = core and 0 or spacing[axis][index],
        length = core and physical[axis] or dims[axis],
        wrap = not core and wrap[axis],
      }
    end
    return out
  end
  local function tour_of(dimensions, limit)
    local key = {}
    for axis, dimension in ipairs(dimensions) do
      key[axis] = dimension.size .. ":" .. dimension.step
    end
    key = table.concat(key, " ")
    if not tours[key] then
      local tour = ring.best(dimensions)
      local cost, longest = ring.cost(dimensions, tour)
      tours[key] = { { tour = tour, cost = cost, longest = longest } }
      local folded = ring.folded(dimensions)
      if folded then
        cost, longest = ring.cost(dimensions, folded)
        tours[key][2] = { tour = folded, cost = cost, longest = longest }
      end
    end
    for _, walk in ipairs(tours[key]) do
      if walk.cost <= limit.total and walk.longest <= limit.longest then
        return walk
      end
    end
    return nil
  end

  local looked = 0
  for _, matrix in ipairs(assignments(physical, logical)) do
    for _, nesting in ipairs(nestings(#logical)) do
      looked = looked + 1
      if looked > CANDIDATE_LIMIT then
        return found
      end
      local spacing = spacings(matrix, nesting)
      local boxes, bound, allowed = {}, 0, true
      for index, size in ipairs(logical) do
        boxes[index] = dimensions_of(matrix, spacing, index)
        local least = ring.lower_bound(boxes[index])
        bound = bound + least / size
        allowed = allowed and least <= limits[index].total
      end
      if allowed and bound < goal - 1e-9 then
        local sum, walks = 0, {}
        for index, size in ipairs(logical) do
          local walk = tour_of(boxes[index], limits[index])
          if not walk then
            allowed = false
            break
          end
          sum = sum + walk.cost / size
          walks[index] = walk.tour
        end
        if allowed and sum < goal - 1e-9 then
          goal = sum
          found = { tours = walks, spacing = spacing }
        end
      end
    end
  end
  return found
end

--- Slots of a granule walked as found: the sum of where each axis stands.
local function walk_slots(physical, found)
  local slots, filled = { physical.base }, 1
  for index = #found.tours, 1, -1 do
    local grown, at = {}, 0
    for _, point in ipairs(found.tours[index]) do
      local shift = 0
      for axis, position in ipairs(point) do
        shift = shift + position * found.spacing[axis][index] * physical.axes[axis][2]
      end
      for k = 1, filled do
        grown[at + k] = slots[k] + shift
      end
      at = at + filled
    end
    slots, filled = grown, at
  end
  if physical.lookup then
    for index = 1, filled do
      slots[index] = physical.lookup[slots[index] + 1]
    end
  end
  return slots
end

--- An order whose rings cross fewer links than JAX's, or JAX's own when there is none.
--
-- No axis gets more links than JAX gives it, nor a longer step. Where JAX refuses the mesh (it would have to split
-- physical axes and may not), the order is given all the same and `refusal` says why.
---@param spec table see `jax_order`
---@return ciranda.mesh.Order with `jax` (or `refusal`) and `improved`
--- Raises "invalid" when the mesh does not have as many devices as the slice.
function M.best_order(spec)
  local wanted = resolve(spec, "best_order")
  local devices, rules = wanted.devices, releases.rules(wanted.jax)
  local ok, jax = pcall(jax_order, wanted)
  local refusal
  if not ok then
    if type(jax) ~= "table" or jax.exception ~= "NotImplementedError" then
      error(jax, 0)
    end
    refusal, jax = jax, nil
  end

  local parts = slices_of(devices)
  local physical = parts[1]:physical(rules)
  local dims, wrap = torus_of(devices, parts[1], physical)
  local two = #physical.shape == 3 and (parts[1].first_kind == "TPU v2" or parts[1].first_kind == "TPU v3")
  local logical, limits, goal = {}, {}, 0
  for axis, size in ipairs(wanted.ici) do
    if size > 1 then
      logical[#logical + 1] = size
      local hops = jax and jax.hops[axis]
      limits[#limits + 1] = {
        total = hops and hops.total / hops.rings or math.huge,
        longest = hops and hops.longest or math.huge,
      }
      goal = goal + limits[#limits].total / size
    end
  end
  local found
  if #logical > 0 then
    found = search(physical.shape, logical, dims, wrap, two and 3 or 4, limits, goal)
  end
  if not found then
    return {
      placement = jax.placement,
      hops = jax.hops,
      ici = jax.ici,
      dcn = jax.dcn,
      jax = jax,
      improved = false,
    }
  end

  local orders = {}
  for index, part in ipairs(parts) do
    orders[index] = walk_slots(part:physical(rules), found)
  end
  local slots, shape = placement.block(orders, devices.per_slice, wanted.ici, wanted.dcn)
  return {
    placement = placement.from_slots(devices, shape, slots, {
      release = rules.release,
      ici = wanted.ici,
      dcn = wanted.dcn,
    }),
    hops = M.measure(devices, orders[1], wanted.ici, dims, wrap),
    ici = wanted.ici,
    dcn = wanted.dcn,
    slots = orders[1],
    dims = dims,
    wrap = wrap,
    jax = jax,
    refusal = refusal,
    improved = true,
  }
end

--- The order as one line of Python: the array for jax.sharding.Mesh. Devices are found by slice and coordinates, so
-- it does not matter how the platform numbers them.
---@param order ciranda.mesh.Order of a grid
---@return string
--- Raises a misuse for an order of devices that were listed one by one: their numbers are not of a whole slice.
function M.python(order)
  local placed = order.placement
  if not placed.devices.regular then
    fault.misuse("order.python: only whole slices have an order that can be written down")
  end
  return (
    'numpy.array(sorted(jax.devices(), key=lambda d: (getattr(d, "slice_index", 0), *d.coords[::-1], '
    .. "d.core_on_chip)))[[%s]].reshape(%s)"
  ):format(table.concat(placed.ids, ", "), python.tuple(placed.shape))
end

return M
