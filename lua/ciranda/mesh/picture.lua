--- What the drawings have in common: where each device of the first slice stands, in the torus and in the mesh.
local fault = require("ciranda.mesh.fault")

local M = {}

---@class ciranda.mesh.Picture
---@field title string
---@field names string[]
---@field dims integer[]
---@field wrap boolean[]
---@field host integer[]            chips of a host along x, y, z
---@field axes integer[]            axes with more than one device inside a slice
---@field across integer[]          axes with more than one slice
---@field slices integer
---@field order ciranda.mesh.Order
---@field chips table<integer, { x: integer, y: integer, z: integer, devices: integer[][] }>  by x, then y, then z;
---       `devices` the indices along every axis of each device on the chip

--- Prepares an order for drawing.
---@param order ciranda.mesh.Order
---@param names string[]? axis names; "axis 0", ... when absent
---@param title string?
---@return ciranda.mesh.Picture
function M.of(order, names, title)
  if type(order) ~= "table" or not order.placement then
    fault.misuse("draw: an order expected, as mesh.jax_order and mesh.best_order give it")
  end
  local rank = #order.ici
  if names and #names ~= rank then
    fault.misuse("draw: %d names for %d axes", #names, rank)
  end
  local own = {}
  for axis = 1, rank do
    own[axis] = names and names[axis] or "axis " .. axis - 1
  end
  local devices, dims = order.placement.devices, order.dims
  local picture = {
    names = own,
    dims = dims,
    wrap = order.wrap,
    host = devices.host or { math.min(dims[1], 2), math.min(dims[2], 2), 1 },
    axes = {},
    across = {},
    slices = 1,
    order = order,
    chips = {},
  }
  for axis = 1, rank do
    if order.ici[axis] > 1 then
      picture.axes[#picture.axes + 1] = axis
    end
    if order.dcn[axis] > 1 then
      picture.across[#picture.across + 1] = axis
    end
    picture.slices = picture.slices * order.dcn[axis]
  end

  local lowest
  for _, slot in ipairs(order.slots) do
    local x, y, z = devices:position(slot)
    lowest = lowest or { x, y, z }
    lowest[1], lowest[2], lowest[3] = math.min(lowest[1], x), math.min(lowest[2], y), math.min(lowest[3], z)
  end
  for at, slot in ipairs(order.slots) do
    local x, y, z, core = devices:position(slot)
    x, y, z = x - lowest[1], y - lowest[2], z - lowest[3]
    local place = 1 + x + dims[1] * (y + dims[2] * z)
    local chip = picture.chips[place] or { x = x, y = y, z = z, devices = {} }
    picture.chips[place] = chip
    local index, rest = {}, at - 1
    for axis = rank, 1, -1 do
      index[axis] = rest % order.ici[axis]
      rest = rest // order.ici[axis]
    end
    chip.devices[core + 1] = index
  end
  local chips = dims[1] * dims[2] * dims[3]
  picture.title = title
    or ("%s%s, %d chip%s%s"):format(
      devices.topology and devices.topology.type .. " " or "",
      devices.topology and devices.topology.name or ("%dx%dx%d"):format(dims[1], dims[2], dims[3]),
      chips,
      chips == 1 and "" or "s",
      picture.slices > 1 and (", %d slices"):format(picture.slices) or ""
    )
  return picture
end

--- Whose order it is.
---@param order ciranda.mesh.Order
---@return string
function M.source(order)
  if order.improved then
    return "ciranda's order"
  end
  return ("JAX's order (jax %s)"):format(order.placement.release)
end

--- "fsdp: 1 ring of 16 devices, 16 links a ring, longest step 1".
---@param picture ciranda.mesh.Picture
---@param axis integer
---@return string
function M.rings(picture, axis)
  local hops = picture.order.hops[axis]
  local text = ("%s: %d ring%s of %d devices, %.4g link%s a ring, longest step %d"):format(
    picture.names[axis],
    hops.rings,
    hops.rings == 1 and "" or "s",
    hops.size,
    hops.total / hops.rings,
    hops.total == hops.rings and "" or "s",
    hops.longest
  )
  local jax = picture.order.improved and picture.order.jax
  if jax then
    local other = jax.hops[axis]
    text = text .. (" (JAX's: %.4g, longest %d)"):format(other.total / other.rings, other.longest)
  end
  return text
end

--- The DCN indices of a slice.
---@param picture ciranda.mesh.Picture
---@param slice integer from 0
---@return integer[] by axis
function M.slice_index(picture, slice)
  local dcn, index = picture.order.dcn, {}
  for axis = #dcn, 1, -1 do
    index[axis] = slice % dcn[axis]
    slice = slice // dcn[axis]
  end
  return index
end

--- A colour of its own for each of n, around the colour wheel.
---@param index integer from 0
---@param count integer
---@param saturation number 0 to 1
---@param lightness number 0 to 1
---@return integer red, integer green, integer blue 0 to 255
function M.hue(index, count, saturation, lightness)
  local hue = 6 * index / math.max(count, 1)
  local chroma = (1 - math.abs(2 * lightness - 1)) * saturation
  local second = chroma * (1 - math.abs(hue % 2 - 1))
  local base = lightness - chroma / 2
  local parts = ({
    { chroma, second, 0 },
    { second, chroma, 0 },
    { 0, chroma, second },
    { 0, second, chroma },
    { second, 0, chroma },
    { chroma, 0, second },
  })[math.floor(hue) % 6 + 1]
  local function byte(value)
    return math.floor((value + base) * 255 + 0.5)
  end
  return byte(parts[1]), byte(parts[2]), byte(parts[3])
end

return M
