local torus = require("ciranda.mesh.torus")
local view = require("ciranda.mesh.view")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

--- Physical axes, from 0, of each logical one.
local function sets_of(physical, logical)
  local _, sets = torus.assign(physical, logical)
  local out = {}
  for index, set in ipairs(sets) do
    out[index] = {}
    for k, axis in ipairs(set) do
      out[index][k] = axis - 1
    end
  end
  return out
end

local WHOLE = {
  { { 2, 2, 1 }, { 1, 1, 4 }, { {}, {}, { 0, 1, 2 } } },
  { { 2, 2, 4 }, { 1, 4, 4 }, { {}, { 2 }, { 0, 1 } } },
  { { 4, 4, 4 }, { 1, 16, 4 }, { {}, { 1, 2 }, { 0 } } },
  { { 4, 4, 8 }, { 1, 16, 8 }, { {}, { 0, 1 }, { 2 } } },
  { { 4, 4, 8 }, { 1, 8, 16 }, { {}, { 2 }, { 0, 1 } } },
  { { 4, 4, 8 }, { 16, 8, 1 }, { { 0, 1 }, { 2 }, {} } },
  { { 4, 8, 8 }, { 1, 32, 8 }, { {}, { 0, 2 }, { 1 } } },
  { { 8, 8, 8 }, { 1, 64, 8 }, { {}, { 1, 2 }, { 0 } } },
  { { 8, 8, 16 }, { 1, 64, 16 }, { {}, { 0, 1 }, { 2 } } },
  { { 8, 8, 1 }, { 8, 8 }, { { 1 }, { 0, 2 } } },
}

local SPLIT = {
  { { 4, 4, 4 }, { 2, 1, 32 }, { { 1, 1, 4 }, { 1, 1, 4 }, { 2, 1, 2 } } },
  { { 4, 4, 4 }, { 8, 8, 1 }, { { 1, 4, 1 }, { 2, 2, 1 }, { 4, 1, 1 } } },
  { { 4, 4, 8 }, { 2, 2, 8, 4 }, { { 1, 1, 1, 4 }, { 2, 2, 1, 1 }, { 1, 1, 8, 1 } } },
  { { 4, 4, 8 }, { 2, 4, 1, 16 }, { { 1, 1, 1, 4 }, { 1, 1, 1, 4 }, { 2, 4, 1, 1 } } },
  { { 4, 8, 8 }, { 1, 128, 2 }, { { 1, 2, 2 }, { 1, 8, 1 }, { 1, 8, 1 } } },
  { { 8, 8, 1 }, { 2, 1, 32, 1 }, { { 1, 1, 8, 1 }, { 2, 1, 4, 1 }, { 1, 1, 1, 1 } } },
}

local function sorted(vectors)
  local out = {}
  for index, vector in ipairs(vectors) do
    out[index] = table.concat(vector, "")
  end
  table.sort(out)
  return out
end

describe("assignment of whole axes", function()
  for _, case in ipairs(WHOLE) do
    it(("%s on %s"):format(table.concat(case[2], ","), table.concat(case[1], "x")), function()
      assert.are.same(case[3], sets_of(case[1], case[2]))
    end)

    it(
      ("%s on %s is what the splitting routine finds too"):format(
        table.concat(case[2], ","),
        table.concat(case[1], "x")
      ),
      function()
        local whole = torus.assign(case[1], case[2])
        local taken, matrix = { 1, 1, 1 }, { {}, {}, {} }
        for index = #case[2], 1, -1 do
          local best
          for _, vector in ipairs(torus.feasible(case[1], taken, case[2][index])) do
            if not best or torus.prefers(vector, best, case[1], taken) then
              best = vector
            end
          end
          for axis = 1, 3 do
            matrix[axis][index] = best[axis]
            taken[axis] = taken[axis] * best[axis]
          end
        end
        assert.are.same(whole, matrix)
      end
    )
  end

  it("is refused in jax's words when an axis would have to be split", function()
    local err = S.refusal(torus.assign, { 4, 4, 8 }, { 2, 4, 1, 16 })
    assert.are.equal("unsupported", err.code)
    assert.are.equal("NotImplementedError", err.exception)
    assert.are.equal(
      "Failed to find assignment for logical_axis_index 1 of size 4 with remaining assignable mesh [0, 0, 8]. The "
        .. "size of each axis in your logical mesh must be equal to the product of some subset of the physical mesh "
        .. "axis sizes. E.g. logical mesh (4, 16) is compatible with physical mesh 4x4x4 since 4=4 and 16=4x4. If "
        .. "you want to split physical axes, set  allow_split_physical_axes to True.",
      err.message
    )
  end)

  it("tries the core axis first when told to", function()
    -- jax PR 39340: fsdp 32 over y, z and core instead of x, y and z.
    local plain = torus.assign({ 2, 4, 4, 2 }, { 2, 32 })
    local first = torus.assign({ 2, 4, 4, 2 }, { 2, 32 }, { core_first = true })
    assert.are.same({ { 1, 2 }, { 1, 4 }, { 1, 4 }, { 2, 1 } }, plain)
    assert.are.same({ { 2, 1 }, { 1, 4 }, { 1, 4 }, { 1, 2 } }, first)
  end)
end)

describe("assignment of parts of axes", function()
  for _, case in ipairs(SPLIT) do
    it(("%s on %s"):format(table.concat(case[2], ","), table.concat(case[1], "x")), function()
      assert.are.same(case[3], (torus.assign(case[1], case[2], { split = true })))
    end)
  end

  it("enumerates the feasible vectors", function()
    assert.are.same({}, torus.feasible({ 2, 2, 1 }, { 1, 2, 1 }, 4))
    assert.are.same({ "312", "321", "611" }, sorted(torus.feasible({ 12, 4, 4 }, { 2, 2, 1 }, 6)))
    assert.are.same({ "114", "122", "212", "221" }, sorted(torus.feasible({ 4, 4, 8 }, { 2, 2, 2 }, 4)))
    assert.are.same({ "111" }, sorted(torus.feasible({ 4, 4, 8 }, { 4, 1, 1 }, 1)))
  end)

  it("prefers as jax does", function()
    local none = { 1, 1, 1 }
    assert.is_true(torus.prefers({ 1, 2, 1 }, { 1, 1, 2 }, { 2, 2, 4 }, none))
    assert.is_false(torus.prefers({ 1, 1, 2 }, { 1, 2, 1 }, { 2, 2, 4 }, none))
    assert.is_true(torus.prefers({ 4, 4, 1 }, { 1, 1, 16 }, { 4, 4, 16 }, none))
    assert.is_true(torus.prefers({ 2, 1 }, { 1, 2 }, { 2, 4 }, { 1, 2 }))
    assert.is_false(torus.prefers({ 2, 1 }, { 2, 1 }, { 2, 4 }, { 1, 2 }))
    -- Axes in use, against jax's comment but with its code.
    assert.is_true(torus.prefers({ 1, 2 }, { 2, 1 }, { 4, 4 }, { 1, 2 }))
    assert.is_true(torus.prefers({ 2, 1 }, { 1, 2 }, { 4, 4 }, { 1, 1 }))
  end)

  it("factors numbers", function()
    local expected = {
      [1] = {},
      [2] = { 2 },
      [4] = { 2, 2 },
      [8] = { 2, 2, 2 },
      [6] = { 2, 3 },
      [16] = { 2, 2, 2, 2 },
      [12] = { 2, 2, 3 },
      [121] = { 11, 11 },
      [43] = { 43 },
      [10] = { 2, 5 },
      [14] = { 2, 7 },
      [22] = { 2, 11 },
      [26] = { 2, 13 },
    }
    for number, factors in pairs(expected) do
      assert.are.same(factors, torus.prime_factors(number))
    end
    for number = 1, 2000 do
      assert.are.equal(number, S.product(torus.prime_factors(number)))
    end
  end)

  it("factors numbers as wrongly as jax before 0.11.1 did, when told to", function()
    assert.are.same({ 5 }, torus.prime_factors(10, false))
    assert.are.same({ 7 }, torus.prime_factors(14, false))
    assert.are.same({ 11 }, torus.prime_factors(22, false))
    assert.are.same({ 2, 3 }, torus.prime_factors(6, false))
    assert.are.same({ 2, 2, 2, 7 }, torus.prime_factors(56, false))
  end)

  it("refuses products that differ", function()
    local err = S.refusal(torus.assign, { 4, 4, 1 }, { 3, 5 }, { split = true })
    assert.are.equal("ValueError", err.exception)
    assert.are.equal(
      "The number of devices in physical mesh (4, 4, 1) does not match the number of devices in logical mesh (3, 5).",
      err.message
    )
  end)
end)

describe("the view of an assignment", function()
  -- Each element is found again from its logical index by mixed radix over both sides of the matrix.
  local CASES = {
    { { 2, 2, 1 }, { 1, 2, 2, 1 }, { { 1, 2, 1, 1 }, { 1, 1, 2, 1 }, { 1, 1, 1, 1 } } },
    { { 4, 4, 4 }, { 2, 1, 32 }, { { 1, 1, 4 }, { 2, 1, 2 }, { 1, 1, 4 } } },
    { { 12, 4, 8 }, { 2, 8, 24 }, { { 2, 2, 3 }, { 1, 2, 4 }, { 1, 2, 2 } } },
  }
  for _, case in ipairs(CASES) do
    it(("%s on %s"):format(table.concat(case[2], ","), table.concat(case[1], "x")), function()
      local physical, logical, matrix = table.unpack(case)
      local filled = view.fill(torus.view(matrix, view.row_major(physical)))
      assert.are.equal(S.product(physical), #filled)
      for position, element in ipairs(filled) do
        local parts, rest = {}, position - 1
        for index = #logical, 1, -1 do
          local own = rest % logical[index]
          rest = rest // logical[index]
          for axis = #physical, 1, -1 do
            parts[axis] = parts[axis] or {}
            parts[axis][index] = own % matrix[axis][index]
            own = own // matrix[axis][index]
          end
        end
        local at = 0
        for axis, size in ipairs(physical) do
          local coordinate = 0
          for index = 1, #logical do
            coordinate = coordinate * matrix[axis][index] + parts[axis][index]
          end
          at = at * size + coordinate
        end
        assert.are.equal(at, element)
      end
    end)
  end
end)
