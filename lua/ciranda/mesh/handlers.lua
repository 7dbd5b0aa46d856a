--- The orders jax gives to small slices of some device kinds before it looks at the torus.
local fault = require("ciranda.mesh.fault")
local python = require("ciranda.mesh.python")

local M = {}

-- Positions in a list of devices, from 0.
local TRAY = { 0, 1, 2, 3, 6, 7, 4, 5 }
local SQUARE = { 0, 1, 3, 2 }
local RING_8 = { 0, 1, 2, 3, 7, 6, 5, 4 }
local RING_16 = { 0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4 }
local CUBE_V5E = { 0, 4, 2, 6, 1, 5, 3, 7 }
local CUBE_V5P = { 0, 1, 3, 2, 6, 7, 5, 4 }
local BLOCK_7X = { ["2x4"] = RING_8, ["2x2x2"] = TRAY }

--- Takes blocks of a list in another order.
local function permute(list, order)
  local out, width = {}, #order
  for first = 0, #list - 1, width do
    for k = 1, width do
      out[first + k] = list[first + order[k] + 1]
    end
  end
  return out
end

local function v2_v3(granule, shape)
  local listed = granule:listed()
  if granule.count == 8 or shape[#shape] == 8 then
    return permute(listed, TRAY), "tray"
  end
  return listed, "listed"
end

local function square(granule)
  if granule.count == 4 then
    return permute(granule:listed(), SQUARE), "square"
  end
end

local function v5e(granule, shape)
  if granule.count ~= 4 and granule.count ~= 8 and granule.count ~= 16 then
    return nil
  end
  local x, y, z = granule:corner()
  if granule.count == 4 and x == 1 and y == 1 and z == 0 then
    return permute(granule:by_coordinates(), SQUARE), "square"
  elseif granule.count == 8 then
    if x == 1 and y == 1 and z == 1 then
      return permute(granule:by_coordinates(), CUBE_V5E), "cube"
    end
    return permute(granule:by_coordinates(), RING_8), "ring8"
  elseif granule.count == 16 and x == 3 and y == 3 and z == 0 then
    -- Only when the whole mesh is one axis.
    for _, size in ipairs(shape) do
      if size == 16 then
        return permute(granule:by_coordinates(), RING_16), "ring16"
      end
    end
  end
  return nil
end

local function v5p(granule, shape, rules)
  if rules.v5p_exact and granule.count ~= 8 then
    return nil
  end
  local x, y, z = granule:corner()
  if x ~= 1 or y ~= 1 or z ~= 1 then
    return nil
  end
  -- Before 0.7.0 any set whose corner is (1, 1, 1) got here; numpy refused what are not 8 devices.
  if granule.count < 8 then
    for _, position in ipairs(CUBE_V5P) do
      if position >= granule.count then
        fault.jax("IndexError", "index %d is out of bounds for axis 0 with size %d", position, granule.count)
      end
    end
  elseif granule.count > 8 then
    fault.jax("ValueError", "cannot reshape array of size 8 into shape %s", python.numpy_shape(shape))
  end
  return permute(granule:by_coordinates(), CUBE_V5P), "cube"
end

local function tpu7x(granule, _, rules)
  local block = BLOCK_7X[rules.tpu7x_ring]
  if rules.tpu7x == "tray" then
    if granule.count == 8 then
      return permute(granule:listed(), block), "blocks"
    end
    return nil
  end
  if granule.count % 8 ~= 0 or granule.count > 32 then
    return nil
  end
  local shape = granule:physical(rules).shape
  if shape[1] > 2 or shape[2] > 2 then
    if rules.tpu7x == "strict" then
      fault.jax("AssertionError", "Unexpected physical mesh shape: %s.", python.tuple(shape))
    end
    return nil
  end
  return permute(granule:listed(), block), "blocks"
end

--- By device kind: the function, and the rule that must hold for the release to know the kind.
local HANDLERS = {
  ["TPU v2"] = { v2_v3 },
  ["TPU v3"] = { v2_v3 },
  ["TPU v4 lite"] = { square, "v4_lite" },
  ["TPU v5 lite"] = { v5e },
  ["TPU v5e"] = { v5e, "v5e_kind" },
  ["TPU v5p"] = { v5p },
  ["TPU v5"] = { v5p, "v5_kind" },
  ["TPU v6 lite"] = { v5e, "v6e_ring" },
  ["TPU7x"] = { tpu7x, "tpu7x" },
  ["TPU7"] = { tpu7x, "tpu7" },
  ["TPU8i"] = { square, "tpu8i" },
}

--- The order of a granule's devices, when its kind has one of its own.
---@param granule ciranda.mesh.Granule
---@param shape integer[]
---@param rules ciranda.mesh.Rules
---@return integer[]? slots row-major over the shape, string? name of the order
function M.order(granule, shape, rules)
  local handler = HANDLERS[granule.last_kind]
  if handler and (not handler[2] or rules[handler[2]]) then
    return handler[1](granule, shape, rules)
  end
end

return M
