--- Shapes that fit, near one that does not.
local factor = require("ciranda.mesh.factor")

local M = {}

-- Which axis to change first, when several would do.
local PREFERENCE = {
  ICI = { "fsdp", "tensor", "data" },
  DCN = { "data", "stage", "fsdp" },
}

--- How far a shape is from what was asked: axes changed, then how much, then which.
local function distance(side, names, wanted, shape)
  local changed, ratio, rank = 0, 0, 0
  for index, size in ipairs(shape) do
    local from = wanted[index]
    if from ~= size and from ~= -1 then
      changed = changed + 1
      local base = math.type(from) == "integer" and from >= 1 and from or 1
      ratio = ratio + math.abs(math.log(size / base, 2))
      local place = #PREFERENCE[side] + 1
      for position, name in ipairs(PREFERENCE[side]) do
        if names[index] == name then
          place = position
        end
      end
      rank = rank + place * math.abs(math.log(size / base, 2))
    end
  end
  return changed, ratio, rank
end

--- Which axes a suggestion may change: those in use, and the side's usual one.
local function active_axes(side, names, wanted)
  local active, seen = {}, {}
  local function add(index)
    if not seen[index] and #active < 4 then
      seen[index] = true
      active[#active + 1] = index
    end
  end
  for index in ipairs(names) do
    if wanted[index] ~= 1 then
      add(index)
    end
  end
  for _, preferred in ipairs(PREFERENCE[side]) do
    for index, name in ipairs(names) do
      if name == preferred and #active < 3 then
        add(index)
      end
    end
  end
  if #active == 0 then
    add(1)
  end
  table.sort(active)
  return active
end

--- Shapes near what was asked that fit.
---@param side "ICI"|"DCN"
---@param names string[]
---@param wanted any[] what was asked
---@param target integer what the sizes must multiply to
---@param fits (fun(shape: integer[]): boolean)?
---@return integer[][] up to three, nearest first
function M.nearest(side, names, wanted, target, fits)
  local active = active_axes(side, names, wanted)
  local candidates = {}
  for _, sizes in ipairs(factor.all(target, #active)) do
    local shape = {}
    for index = 1, #names do
      shape[index] = 1
    end
    for k, index in ipairs(active) do
      shape[index] = sizes[k]
    end
    local changed, ratio, rank = distance(side, names, wanted, shape)
    candidates[#candidates + 1] =
      { shape = shape, changed = changed, ratio = ratio, rank = rank, at = #candidates }
  end
  table.sort(candidates, function(a, b)
    if a.changed ~= b.changed then
      return a.changed < b.changed
    elseif math.abs(a.ratio - b.ratio) > 1e-9 then
      return a.ratio < b.ratio
    elseif math.abs(a.rank - b.rank) > 1e-9 then
      return a.rank < b.rank
    end
    return a.at < b.at
  end)
  local out = {}
  for _, candidate in ipairs(candidates) do
    if #out == 3 then
      break
    elseif not fits or fits(candidate.shape) then
      out[#out + 1] = candidate.shape
    end
  end
  return out
end

return M
