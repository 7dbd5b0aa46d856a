--- Ring orders: how to walk a box of chips and come back to the start over as few links as can be.
--
-- A box has up to four dimensions; a step along dimension `d` moves by `step` chips of a physical axis of `length`
-- chips, which may wrap around. A tour lists every point of the box once; its cost is the links crossed by all its
-- steps and by the one from the last point to the first.
--
-- Tours come from constructions: rows one after the other, rows forth and back, and rows forth and back with one
-- lane kept free for the way home, over every order of the dimensions. The last one costs one link a step whenever
-- the box has an even side and steps are one chip long. What is left (odd by odd boxes) is improved by reversing
-- parts of the tour while that helps, up to a size.
local M = {}

--- Points up to which a tour that misses the lower bound is improved.
local POLISH_LIMIT = 144

---@class ciranda.mesh.Dimension
---@field size integer     points
---@field step integer     chips between neighbouring points; 0 when they are cores of one chip
---@field length integer   chips of the whole physical axis
---@field wrap boolean

--- Links between two points of a dimension.
local function distance(dimension, a, b)
  local away = a > b and a - b or b - a
  away = away * dimension.step
  if dimension.wrap and dimension.length - away < away then
    return dimension.length - away
  end
  return away
end

--- Links of the shortest step along a dimension.
local function step_cost(dimension)
  return distance(dimension, 0, 1)
end

--- The cost of a closed tour, and its longest step.
---@param dimensions ciranda.mesh.Dimension[]
---@param tour integer[][] points
---@return integer cost, integer longest
function M.cost(dimensions, tour)
  local total, longest = 0, 0
  local previous = tour[#tour]
  for _, point in ipairs(tour) do
    local step = 0
    for d, dimension in ipairs(dimensions) do
      if point[d] ~= previous[d] then
        step = step + distance(dimension, point[d], previous[d])
      end
    end
    total, longest = total + step, math.max(longest, step)
    previous = point
  end
  return total, longest
end

--- What no tour can go below.
---@param dimensions ciranda.mesh.Dimension[]
---@return integer
function M.lower_bound(dimensions)
  local points, used, cheapest, only = 1, 0, math.huge, nil
  for _, dimension in ipairs(dimensions) do
    if dimension.size > 1 then
      points, used = points * dimension.size, used + 1
      cheapest = math.min(cheapest, step_cost(dimension))
      only = dimension
    end
  end
  if used == 0 then
    return 0
  elseif used == 1 and not only.wrap then
    return 2 * distance(only, 0, 1) * (only.size - 1)
  end
  return points * cheapest
end

--- All points of some dimensions, the last one moving fastest; forth and back when `snake`, so that neighbours in
-- the list are neighbours in the box.
local function walk(dimensions, order, snake)
  local points = { {} }
  for _, d in ipairs(order) do
    local longer = {}
    for index, point in ipairs(points) do
      local back = snake and index % 2 == 0
      for position = 0, dimensions[d].size - 1 do
        local copy = table.move(point, 1, #point, 1, {})
        copy[#copy + 1] = back and dimensions[d].size - 1 - position or position
        longer[#longer + 1] = copy
      end
    end
    points = longer
  end
  return points
end

--- Puts the coordinates of a walk over `order` back at their dimensions.
local function placed(points, order, rank)
  local out = {}
  for index, point in ipairs(points) do
    local full = {}
    for d = 1, rank do
      full[d] = 0
    end
    for k, d in ipairs(order) do
      full[d] = point[k]
    end
    out[index] = full
  end
  return out
end

--- Rows forth and back over all columns but the first, then home along the first. When both numbers are odd no tour
-- has only single steps; the last two rows are then taken column by column, which leaves one step of two.
local function comb(rows, columns, row_order, column_order, rank)
  local out = {}
  local function visit(row, column)
    local full = {}
    for d = 1, rank do
      full[d] = 0
    end
    for k, d in ipairs(row_order) do
      full[d] = rows[row][k]
    end
    for k, d in ipairs(column_order) do
      full[d] = columns[column][k]
    end
    out[#out + 1] = full
  end
  visit(1, 1)
  local plain = #rows % 2 == 0 and #rows or #rows - 2
  for row = 1, plain do
    local first, last, by = 2, #columns, 1
    if row % 2 == 0 then
      first, last, by = #columns, 2, -1
    end
    for column = first, last, by do
      visit(row, column)
    end
  end
  if plain < #rows then
    local above, below = plain + 1, plain + 2
    for column = #columns, 2, -1 do
      visit(above, column)
      visit(below, column)
      above, below = below, above
    end
  end
  for row = #rows, 2, -1 do
    visit(row, 1)
  end
  return out
end

local function permutations(list)
  if #list <= 1 then
    return { list }
  end
  local out = {}
  for index, item in ipairs(list) do
    local rest = {}
    for other, value in ipairs(list) do
      if other ~= index then
        rest[#rest + 1] = value
      end
    end
    for _, tail in ipairs(permutations(rest)) do
      out[#out + 1] = { item, table.unpack(tail) }
    end
  end
  return out
end

--- Reverses parts of a tour while that makes it cheaper (2-opt). Deterministic; the first point stays.
local function polish(dimensions, tour)
  local count = #tour
  local between = {}
  for i = 1, count do
    between[i] = {}
    for j = 1, count do
      local total = 0
      for d, dimension in ipairs(dimensions) do
        total = total + distance(dimension, tour[i][d], tour[j][d])
      end
      between[i][j] = total
    end
  end
  local at = {}
  for index = 1, count do
    at[index] = index
  end
  local improved = true
  while improved do
    improved = false
    for i = 1, count - 2 do
      for j = i + 2, count do
        local after = j < count and at[j + 1] or at[1]
        local now = between[at[i]][at[i + 1]] + between[at[j]][after]
        if between[at[i]][at[j]] + between[at[i + 1]][after] < now then
          local low, high = i + 1, j
          while low < high do
            at[low], at[high] = at[high], at[low]
            low, high = low + 1, high - 1
          end
          improved = true
        end
      end
    end
  end
  local out = {}
  for index = 1, count do
    out[index] = tour[at[index]]
  end
  return out
end

--- The cheapest of the constructed tours; of equals, the one that comes first, beginning with plain rows.
local function construct(dimensions, bound)
  local rank, long = #dimensions, {}
  for d, dimension in ipairs(dimensions) do
    if dimension.size > 1 then
      long[#long + 1] = d
    end
  end
  local best = placed(walk(dimensions, long, false), long, rank)
  local cost = M.cost(dimensions, best)
  local function consider(tour)
    local other = M.cost(dimensions, tour)
    if other < cost then
      best, cost = tour, other
    end
    return cost <= bound
  end
  if cost <= bound or #long < 2 then
    return best, cost
  end
  for _, order in ipairs(permutations(long)) do
    for cut = 1, #order - 1 do
      local row_order = table.move(order, 1, cut, 1, {})
      local column_order = table.move(order, cut + 1, #order, 1, {})
      local rows = walk(dimensions, row_order, true)
      local columns = walk(dimensions, column_order, true)
      if #rows % 2 == 0 or (#rows > 2 and #columns % 2 == 1) then
        if consider(comb(rows, columns, row_order, column_order, rank)) then
          return best, cost
        end
      end
    end
    if consider(placed(walk(dimensions, order, true), order, rank)) then
      return best, cost
    end
    if consider(placed(walk(dimensions, order, false), order, rank)) then
      return best, cost
    end
  end
  return best, cost
end

--- A row walked over every second point and back over the others: as many links as straight on and home in one
-- step, but no step is longer than two.
---@param dimensions ciranda.mesh.Dimension[]
---@return integer[][]? tour nil unless exactly one dimension has more than one point
function M.folded(dimensions)
  local only
  for d, dimension in ipairs(dimensions) do
    if dimension.size > 1 then
      if only then
        return nil
      end
      only = d
    end
  end
  if not only then
    return nil
  end
  local points, size = {}, dimensions[only].size
  for position = 0, size - 1, 2 do
    points[#points + 1] = { position }
  end
  for position = size % 2 == 0 and size - 1 or size - 2, 1, -2 do
    points[#points + 1] = { position }
  end
  return placed(points, { only }, #dimensions)
end

--- The cheapest tour known.
---@param dimensions ciranda.mesh.Dimension[]
---@return integer[][] tour points, from 0, one coordinate a dimension
---@return integer cost
function M.best(dimensions)
  local bound = M.lower_bound(dimensions)
  local tour, cost = construct(dimensions, bound)
  if cost > bound and #tour <= POLISH_LIMIT then
    tour = polish(dimensions, tour)
    cost = M.cost(dimensions, tour)
  end
  return tour, cost
end

return M
