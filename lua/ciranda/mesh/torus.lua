--- Assigning logical axes to the physical axes of a torus, as jax's mesh_utils does.
--
-- An assignment is a matrix `a[physical][logical]` of sizes: its rows multiply to the physical shape, its columns
-- to the logical one. Logical axes are ordered by increasing network intensity, so the last is served first.
local fault = require("ciranda.mesh.fault")
local python = require("ciranda.mesh.python")
local view = require("ciranda.mesh.view")

local M = {}

--- Every way to choose `count` of the numbers 1..n, in lexicographic order (itertools.combinations).
local function combinations(n, count)
  local out, chosen = {}, {}
  local function extend(from, depth)
    if depth > count then
      out[#out + 1] = table.move(chosen, 1, count, 1, {})
      return
    end
    for value = from, n - (count - depth) do
      chosen[depth] = value
      extend(value + 1, depth + 1)
    end
  end
  extend(1, 1)
  return out
end

-- By number of axes, and by whether the core axis (the fourth) goes first.
local candidate_cache = {}

--- Sets of physical axes in the order jax tries them: larger sets first, for bandwidth.
local function candidates(rank, core_first)
  local key = core_first and -rank or rank
  if candidate_cache[key] then
    return candidate_cache[key]
  end
  local out = {}
  for count = rank, 1, -1 do
    local sets = combinations(rank, count)
    if core_first then
      -- x, y, z rank 1, 2, 3 and core 0: by the best rank in the set, then by their sum, else as they were.
      local function ranks(set)
        local best, sum = math.huge, 0
        for _, axis in ipairs(set) do
          local value = axis == 4 and 0 or axis
          best, sum = math.min(best, value), sum + value
        end
        return best, sum
      end
      local place = {}
      for index, set in ipairs(sets) do
        place[set] = index
      end
      table.sort(sets, function(a, b)
        local best_a, sum_a = ranks(a)
        local best_b, sum_b = ranks(b)
        if best_a ~= best_b then
          return best_a < best_b
        elseif sum_a ~= sum_b then
          return sum_a < sum_b
        end
        return place[a] < place[b]
      end)
    end
    table.move(sets, 1, #sets, #out + 1, out)
  end
  candidate_cache[key] = out
  return out
end

local function ones(rows, columns)
  local matrix = {}
  for row = 1, rows do
    matrix[row] = {}
    for column = 1, columns do
      matrix[row][column] = 1
    end
  end
  return matrix
end

--- Whole physical axes only.
---@return integer[][]? matrix, integer[][] sets the physical axes of each logical one, integer? failed logical axis
local function assign_whole(physical, logical, core_first)
  local rank = #physical
  local remaining = table.move(physical, 1, rank, 1, {})
  local sets = {}
  for index = #logical, 1, -1 do
    local size, found = logical[index], nil
    for _, set in ipairs(candidates(rank, core_first and rank == 4)) do
      local product = 1
      for k = 1, #set do
        product = product * remaining[set[k]]
      end
      if product == size then
        found = set
        break
      end
    end
    if found then
      for _, axis in ipairs(found) do
        remaining[axis] = 0
      end
    elseif size > 1 then
      return nil, remaining, index
    end
    sets[index] = found or {}
  end
  local matrix = ones(rank, #logical)
  for index, set in ipairs(sets) do
    for _, axis in ipairs(set) do
      matrix[axis][index] = physical[axis]
    end
  end
  return matrix, sets
end

--- Prime factors in increasing order.
---@param number integer
---@param exact boolean? false: as jax before 0.11.1, which lost factors in front of a large prime (10 -> {5})
---@return integer[]
function M.prime_factors(number, exact)
  local factors, rest = {}, number
  if exact == false then
    local root = math.floor(math.sqrt(number))
    while root * root > number do
      root = root - 1
    end
    while (root + 1) * (root + 1) <= number do
      root = root + 1
    end
    for prime = 2, root + 1 do
      while rest % prime == 0 do
        factors[#factors + 1] = prime
        rest = rest // prime
      end
      if rest == 1 then
        return factors
      end
    end
    return { rest }
  end
  local prime = 2
  while prime * prime <= rest do
    while rest % prime == 0 do
      factors[#factors + 1] = prime
      rest = rest // prime
    end
    prime = prime + 1
  end
  if rest > 1 then
    factors[#factors + 1] = rest
  end
  return factors
end

--- Counts equal neighbours: {2, 2, 3} -> {2, 3}, {[2] = 2, [3] = 1}.
local function multiplicities(factors)
  local primes, counts = {}, {}
  for _, factor in ipairs(factors) do
    if not counts[factor] then
      primes[#primes + 1] = factor
      counts[factor] = 0
    end
    counts[factor] = counts[factor] + 1
  end
  return primes, counts
end

--- The ways to write a logical axis as sizes on the physical axes that still divide what is left of them.
---@param physical integer[]
---@param taken integer[] product of what each physical axis has given already
---@param size integer
---@param exact boolean? see `prime_factors`
---@return integer[][] vectors, in no particular order
function M.feasible(physical, taken, size, exact)
  local rank = #physical
  local primes, wanted = multiplicities(M.prime_factors(size, exact))
  local available = {}
  for axis = 1, rank do
    local _, counts = multiplicities(M.prime_factors(physical[axis] // taken[axis], exact))
    available[axis] = counts
  end

  local out, vector = {}, {}
  for axis = 1, rank do
    vector[axis] = 1
  end
  local function spread(which, axis, left)
    local prime = primes[which]
    if not prime then
      out[#out + 1] = table.move(vector, 1, rank, 1, {})
      return
    end
    if axis > rank then
      if left == 0 then
        spread(which + 1, 1, wanted[primes[which + 1]])
      end
      return
    end
    local before = vector[axis]
    for exponent = 0, math.min(left, available[axis][prime] or 0) do
      spread(which, axis + 1, left - exponent)
      vector[axis] = vector[axis] * prime
    end
    vector[axis] = before
  end
  spread(1, 1, wanted[primes[1]])
  return out
end

--- Whether jax prefers one vector to another for a logical axis.
---@param a integer[]
---@param b integer[]
---@param physical integer[]
---@param taken integer[] product of what each physical axis has given already
---@return boolean
function M.prefers(a, b, physical, taken)
  local function whole(vector)
    local size, count = 1, 0
    for axis = 1, #physical do
      if vector[axis] == physical[axis] then
        size = size * vector[axis]
        if vector[axis] > 1 then
          count = count + 1
        end
      end
    end
    return size, count
  end
  local size_a, count_a = whole(a)
  local size_b, count_b = whole(b)
  if size_a ~= size_b then
    return size_a > size_b
  elseif count_a ~= count_b then
    return count_a > count_b
  end
  -- jax's comment says it avoids axes that are in use, its code prefers them; the code is what places devices.
  local used_a, used_b = 1, 1
  for axis = 1, #physical do
    if taken[axis] > 1 then
      used_a, used_b = used_a * a[axis], used_b * b[axis]
    end
  end
  if used_a ~= used_b then
    return used_a > used_b
  end
  for axis = 1, #physical do
    if a[axis] ~= b[axis] then
      return a[axis] > b[axis]
    end
  end
  return false
end

--- Physical axes may be shared between logical ones.
local function assign_split(physical, logical, exact)
  if view.product(physical) ~= view.product(logical) then
    fault.jax(
      "ValueError",
      "The number of devices in physical mesh %s does not match the number of devices in logical mesh %s.",
      python.tuple(physical),
      python.tuple(logical)
    )
  end
  local matrix, taken = ones(#physical, #logical), {}
  for axis = 1, #physical do
    taken[axis] = 1
  end
  for index = #logical, 1, -1 do
    local best
    for _, vector in ipairs(M.feasible(physical, taken, logical[index], exact)) do
      if not best or M.prefers(vector, best, physical, taken) then
        best = vector
      end
    end
    if not best then
      -- What numpy says when jax stores None: only the old prime factors get here.
      fault.jax(
        "TypeError",
        "int() argument must be a string, a bytes-like object or a real number, not 'NoneType'"
      )
    end
    for axis = 1, #physical do
      matrix[axis][index] = best[axis]
      taken[axis] = taken[axis] * best[axis]
    end
  end
  return matrix
end

--- Assigns a logical mesh to a physical one.
---@param physical integer[]
---@param logical integer[]
---@param options { split: boolean?, rules: ciranda.mesh.Rules?, core_first: boolean? }?
---       `split`: jax's allow_split_physical_axes
---@return integer[][] matrix sizes by physical and logical axis
---@return integer[][]? sets the physical axes of each logical one when none was split
--- Raises "unsupported" (NotImplementedError) when physical axes would have to be split and may not be.
function M.assign(physical, logical, options)
  options = options or {}
  local matrix, sets, failed = assign_whole(physical, logical, options.core_first)
  if matrix then
    return matrix, sets
  end
  if not options.split then
    fault.jax(
      "NotImplementedError",
      "Failed to find assignment for logical_axis_index %d of size %d with remaining assignable mesh %s. The size of "
        .. "each axis in your logical mesh must be equal to the product of some subset of the physical mesh axis "
        .. "sizes. E.g. logical mesh (4, 16) is compatible with physical mesh 4x4x4 since 4=4 and 16=4x4. If you "
        .. "want to split physical axes, set  allow_split_physical_axes to True.",
      failed - 1,
      logical[failed],
      python.list(sets)
    )
  end
  return assign_split(physical, logical, not options.rules or options.rules.prime_factors)
end

--- The axes of the logical mesh over the physical array, row-major.
--
-- A physical axis that several logical ones share gives its outermost part to the first of them: the most intensive
-- one steps between neighbours.
---@param matrix integer[][]
---@param axes ciranda.mesh.Axis[] of the physical array
---@return ciranda.mesh.Axis[]
function M.view(matrix, axes)
  local sizes, total, wanted = {}, 1, 1
  for physical, row in ipairs(matrix) do
    wanted = wanted * axes[physical][1]
    for _, size in ipairs(row) do
      total = total * size
      sizes[#sizes + 1] = size
    end
  end
  if total ~= wanted then
    fault.jax(
      "ValueError",
      "cannot reshape array of size %d into shape %s",
      wanted,
      python.numpy_shape(sizes)
    )
  end
  local out = {}
  for logical = 1, #matrix[1] do
    for physical, row in ipairs(matrix) do
      if row[logical] > 1 then
        local stride = axes[physical][2]
        for later = logical + 1, #row do
          stride = stride * row[later]
        end
        out[#out + 1] = { row[logical], stride }
      end
    end
  end
  return out
end

return M
