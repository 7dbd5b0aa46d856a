--- Units that can be held up to a limit: chips of a zone, a quota. Without a limit there is always enough.

local M = {}

---@class ciranda.sim.Pool
---@field private limits table<string, integer>
---@field private used table<string, integer>
---@field private held table<any, { place: string, units: integer }>
local Pool = {}
Pool.__index = Pool

---@param limits table<string, integer>? by place
---@return ciranda.sim.Pool
function M.new(limits)
  local copy = {}
  for place, limit in pairs(limits or {}) do
    copy[place] = limit
  end
  return setmetatable({ limits = copy, used = {}, held = {} }, Pool)
end

--- The limit of a place, nil when there is none.
---@param place string
---@return integer?
function Pool:limit(place)
  return self.limits[place]
end

---@param place string
---@param units integer? nil takes the limit away
function Pool:set_limit(place, units)
  self.limits[place] = units
end

--- What is held at a place.
---@param place string
---@return integer
function Pool:in_use(place)
  return self.used[place] or 0
end

--- Whether so many more units can be held.
---@param place string
---@param units integer
---@return boolean
function Pool:fits(place, units)
  local limit = self.limits[place]
  return limit == nil or self:in_use(place) + units <= limit
end

--- Hold units, if there are enough. A holder holds at one place at a time; what it held before is given back first.
---@param holder any
---@param place string
---@param units integer
---@return boolean whether they are held now
function Pool:take(holder, place, units)
  self:release(holder)
  if not self:fits(place, units) then
    return false
  end
  self.held[holder] = { place = place, units = units }
  self.used[place] = self:in_use(place) + units
  return true
end

--- Give back what a holder holds, if anything.
---@param holder any
function Pool:release(holder)
  local held = self.held[holder]
  if held then
    self.used[held.place] = self.used[held.place] - held.units
    self.held[holder] = nil
  end
end

--- Every place with a limit or a use, for a report.
---@return table<string, { limit: integer?, in_use: integer }>
function Pool:report()
  local result = {}
  for place, limit in pairs(self.limits) do
    result[place] = { limit = limit, in_use = self:in_use(place) }
  end
  for place, units in pairs(self.used) do
    if units > 0 and not result[place] then
      result[place] = { in_use = units }
    end
  end
  return result
end

return M
