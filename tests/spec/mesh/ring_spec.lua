local ring = require("ciranda.mesh.ring")

local function dimension(size, step, length, wrap)
  return { size = size, step = step or 1, length = length or 64, wrap = wrap or false }
end

--- The cheapest tour there is, by trying all.
local function exhaustive(dimensions)
  local points = { {} }
  for d = 1, #dimensions do
    local longer = {}
    for _, point in ipairs(points) do
      for position = 0, dimensions[d].size - 1 do
        local copy = { table.unpack(point) }
        copy[#copy + 1] = position
        longer[#longer + 1] = copy
      end
    end
    points = longer
  end
  local function between(a, b)
    local total = 0
    for d, own in ipairs(dimensions) do
      local away = math.abs(a[d] - b[d]) * own.step
      total = total + (own.wrap and math.min(away, own.length - away) or away)
    end
    return total
  end
  local best, used = math.huge, {}
  local function visit(count, last, cost)
    if cost >= best then
      return
    elseif count == #points then
      best = math.min(best, cost + between(points[last], points[1]))
      return
    end
    for index = 2, #points do
      if not used[index] then
        used[index] = true
        visit(count + 1, index, cost + between(points[last], points[index]))
        used[index] = false
      end
    end
  end
  visit(1, 1, 0)
  return best
end

local function visits_all_once(tour, dimensions)
  local seen = {}
  for _, point in ipairs(tour) do
    local key = table.concat(point, ",")
    assert.is_nil(seen[key])
    seen[key] = true
    for d, own in ipairs(dimensions) do
      assert.is_true(point[d] >= 0 and point[d] < own.size)
    end
  end
  local points = 1
  for _, own in ipairs(dimensions) do
    points = points * own.size
  end
  assert.are.equal(points, #tour)
end

describe("ring orders", function()
  it("are the cheapest there are, in every box of up to nine points", function()
    local compared = 0
    for a = 1, 4 do
      for b = 1, 4 do
        for c = 1, 2 do
          if a * b * c <= 9 then
            for _, step in ipairs({ 0, 1, 2 }) do
              for _, wrap in ipairs({ false, true }) do
                local dimensions = {
                  dimension(a, step, wrap and a * math.max(step, 1) or 64, wrap),
                  dimension(b, 2),
                  dimension(c),
                }
                local tour, cost = ring.best(dimensions)
                visits_all_once(tour, dimensions)
                assert.are.equal(exhaustive(dimensions), cost)
                compared = compared + 1
              end
            end
          end
        end
      end
    end
    assert.is_true(compared > 100)
  end)

  it("cross one link a step wherever a box has an even side", function()
    for _, sizes in ipairs({ { 2, 4 }, { 4, 3 }, { 5, 6 }, { 16, 16 }, { 2, 2, 2 }, { 3, 5, 2 }, { 8, 8, 8 } }) do
      local dimensions, points = {}, 1
      for d, size in ipairs(sizes) do
        dimensions[d] = dimension(size)
        points = points * size
      end
      local tour, cost = ring.best(dimensions)
      visits_all_once(tour, dimensions)
      assert.are.equal(points, cost)
    end
  end)

  it("cross one link more when all sides are odd", function()
    for _, sizes in ipairs({ { 3, 3 }, { 5, 5 }, { 3, 7 }, { 9, 11 }, { 3, 3, 3 } }) do
      local dimensions, points = {}, 1
      for d, size in ipairs(sizes) do
        dimensions[d] = dimension(size)
        points = points * size
      end
      local tour, cost = ring.best(dimensions)
      visits_all_once(tour, dimensions)
      assert.are.equal(points + 1, cost)
    end
  end)

  it("never go below the lower bound", function()
    for a = 1, 6 do
      for b = 1, 6 do
        for _, wrap in ipairs({ false, true }) do
          local dimensions = { dimension(a, 2, 2 * a, wrap), dimension(b, 1, 8, wrap) }
          local _, cost = ring.best(dimensions)
          assert.is_true(ring.lower_bound(dimensions) <= cost)
        end
      end
    end
  end)

  it("close over the wraparound", function()
    assert.are.equal(16, select(2, ring.best({ dimension(16, 1, 16, true) })))
    assert.are.equal(30, select(2, ring.best({ dimension(16) })))
    assert.are.equal(256, select(2, ring.best({ dimension(16, 1, 16, true), dimension(16, 1, 16, true) })))
  end)

  it("fold a row: as many links, no step longer than two", function()
    for size = 2, 9 do
      local dimensions = { dimension(1), dimension(size) }
      local tour = ring.folded(dimensions)
      visits_all_once(tour, dimensions)
      local cost, longest = ring.cost(dimensions, tour)
      assert.are.equal(2 * (size - 1), cost)
      assert.is_true(longest <= 2)
    end
    assert.is_nil(ring.folded({ dimension(2), dimension(2) }))
    assert.is_nil(ring.folded({ dimension(1) }))
  end)
end)
