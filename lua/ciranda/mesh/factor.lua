--- Ordered factorisations: every way to write a number as a product of a given number of sizes.
local torus = require("ciranda.mesh.torus")

local M = {}

--- How many there are, without making them: for each prime p^e, the ways to share e among the axes.
---@param number integer
---@param axes integer
---@return integer
function M.count(number, axes)
  local exponents = {}
  for _, prime in ipairs(torus.prime_factors(number)) do
    exponents[prime] = (exponents[prime] or 0) + 1
  end
  local total = 1
  for _, exponent in pairs(exponents) do
    -- (exponent + axes - 1) choose (axes - 1)
    local ways = 1
    for k = 1, axes - 1 do
      ways = ways * (exponent + k) // k
    end
    total = total * ways
  end
  return total
end

local function divisors(number)
  local small, large = {}, {}
  local candidate = 1
  while candidate * candidate <= number do
    if number % candidate == 0 then
      small[#small + 1] = candidate
      if candidate * candidate ~= number then
        large[#large + 1] = number // candidate
      end
    end
    candidate = candidate + 1
  end
  for index = #large, 1, -1 do
    small[#small + 1] = large[index]
  end
  return small
end

--- All of them, in lexicographic order.
---@param number integer
---@param axes integer
---@return integer[][]
function M.all(number, axes)
  local out, sizes, known = {}, {}, {}
  local function extend(axis, rest)
    if axis == axes then
      sizes[axis] = rest
      out[#out + 1] = table.move(sizes, 1, axes, 1, {})
      return
    end
    known[rest] = known[rest] or divisors(rest)
    for _, size in ipairs(known[rest]) do
      sizes[axis] = size
      extend(axis + 1, rest // size)
    end
  end
  extend(1, number)
  return out
end

return M
