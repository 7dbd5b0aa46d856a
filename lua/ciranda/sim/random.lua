--- The simulated cloud's chance: a seeded generator, so that the same seed gives the same day.
--
-- splitmix64 (Steele, Lea and Flood 2014): 64 bits of state, every seed as good as another. It is no source of
-- secrets; tokens and keys that guard something real come from elsewhere.

local M = {}

---@class ciranda.sim.Random
---@field private state integer
local Random = {}
Random.__index = Random

--- A generator that starts from `seed`.
---@param seed integer
---@return ciranda.sim.Random
function M.new(seed)
  return setmetatable({ state = math.tointeger(seed) or 0 }, Random)
end

--- The next 64 bits.
---@return integer
function Random:bits()
  self.state = self.state + 0x9E3779B97F4A7C15
  local z = self.state
  z = (z ~ (z >> 30)) * 0xBF58476D1CE4E5B9
  z = (z ~ (z >> 27)) * 0x94D049BB133111EB
  return z ~ (z >> 31)
end

--- A number in [0, 1).
---@return number
function Random:number()
  return (self:bits() >> 11) * 2.0 ^ -53
end

--- An integer from `low` to `high`, both included.
---@param low integer
---@param high integer
---@return integer
function Random:integer(low, high)
  return low + math.floor(self:number() * (high - low + 1))
end

--- A number between the two ends of a range `{ low, high }`; a plain number is itself.
---@param range number|number[]
---@return number
function Random:between(range)
  if type(range) == "number" then
    return range
  end
  return range[1] + self:number() * (range[2] - range[1])
end

--- `digits` lower-case hexadecimal digits.
---@param digits integer
---@return string
function Random:hex(digits)
  local parts = {}
  for i = 1, digits do
    parts[i] = string.format("%x", self:bits() & 15)
  end
  return table.concat(parts)
end

--- A generator of its own for one part of the simulation: what that part draws does not shift the others' draws.
---@param label string
---@return ciranda.sim.Random
function Random:fork(label)
  local seed = self.state
  for i = 1, #label do
    seed = (seed ~ label:byte(i)) * 0x100000001B3
  end
  return M.new(seed)
end

return M
