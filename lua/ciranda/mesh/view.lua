--- Strided views of integer arrays: what transposing and reshaping a regular array comes down to.
--
-- A view is a list of axes `{size, stride}` in row-major order, the last one innermost. Filling it gives the
-- element `base + sum(index * stride)` for every index. Placing 65,536 devices is one such fill.
local M = {}

---@alias ciranda.mesh.Axis { [1]: integer, [2]: integer } size, stride

--- Row-major axes of a shape.
---@param shape integer[]
---@return ciranda.mesh.Axis[]
function M.row_major(shape)
  local axes, stride = {}, 1
  for index = #shape, 1, -1 do
    axes[index] = { shape[index], stride }
    stride = stride * shape[index]
  end
  return axes
end

--- The elements of a view, row-major. One addition an element.
---@param axes ciranda.mesh.Axis[]
---@param base integer? the first element, 0 when absent
---@return integer[]
function M.fill(axes, base)
  local out, filled = { base or 0 }, 1
  for index = #axes, 1, -1 do
    local size, stride = axes[index][1], axes[index][2]
    local at, delta = filled, stride
    for _ = 2, size do
      for k = 1, filled do
        out[at + k] = out[k] + delta
      end
      at = at + filled
      delta = delta + stride
    end
    filled = at
  end
  return out
end

--- The product of a list.
---@param list integer[]
---@return integer
function M.product(list)
  local product = 1
  for index = 1, #list do
    product = product * list[index]
  end
  return product
end

return M
