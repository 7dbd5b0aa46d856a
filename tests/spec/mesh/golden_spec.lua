-- Every placement and refusal that jax computed (tests/fixtures/mesh_golden.json). The file was made with jax's source
-- of 2026-08-08: after 0.11.0, before the core axis of TPU7x came first (0.11.1).
local placement = require("ciranda.mesh.placement")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")

local function read_json(path)
  local file = assert(io.open(path))
  local text = file:read("a")
  file:close()
  for _, name in ipairs({ "cjson", "dkjson" }) do
    local ok, json = pcall(require, name)
    if ok then
      return json.decode(text)
    end
  end
  error("neither cjson nor dkjson is installed")
end

local function rules_of_fixture()
  local rules = {}
  for key, value in pairs(placement.rules("0.11.1")) do
    rules[key] = value
  end
  rules.core_first = false
  return rules
end

local crc = dofile("tests/fixtures/crc32.lua")

local function flatten(value, out)
  if type(value) == "table" then
    for _, item in ipairs(value) do
      flatten(item, out)
    end
  else
    out[#out + 1] = math.tointeger(value)
  end
  return out
end

local function integers(list)
  local out = {}
  for index, value in ipairs(list) do
    out[index] = math.tointeger(value)
  end
  return out
end

local function place(case, rules, one_by_one)
  if case.case then
    assert.are.equal("ragged: slice1 has 3 devices", case.case)
    local list = {}
    for slice = 0, 1 do
      for index = 0, slice == 0 and 3 or 2 do
        list[#list + 1] = {
          id = #list,
          kind = "TPU v5 lite",
          coords = { index % 2, index // 2, 0 },
          slice_index = slice,
        }
      end
    end
    return placement.create_hybrid_device_mesh(
      { 1, 4, 1 },
      { 2, 1, 1 },
      placement.list(list),
      { jax = rules }
    )
  end
  local devices = placement.grid({
    kind = case.kind,
    topology = integers(case.topology),
    cores = math.tointeger(case.cores),
    slices = math.tointeger(case.num_slices or 1),
  })
  if one_by_one then
    devices = devices:as_list()
  end
  if case.fn == "create_device_mesh" then
    return placement.create_device_mesh(
      integers(case.mesh_shape),
      devices,
      { allow_split_physical_axes = case.allow_split, jax = rules }
    )
  end
  assert.is_false(case.reversed_input)
  return placement.create_hybrid_device_mesh(integers(case.ici), integers(case.dcn), devices, {
    allow_split_physical_axes = case.allow_split,
    should_sort_granules_by_key = case.sort,
    jax = rules,
  })
end

local function compare(case, made)
  assert.are.equal(case.crc32_i4le, crc(made.ids))
  assert.are.same(integers(case.head), table.move(made.ids, 1, #case.head, 1, {}))
  if case.ids then
    assert.are.same(flatten(case.ids, {}), made.ids)
  end
  if case.shape then
    assert.are.same(integers(case.shape), made.shape)
  end
  if case.handler_used ~= nil then
    assert.are.equal(case.handler_used, made.handler ~= nil)
  end
  if case.slice_index_head then
    local slices = {}
    for index = 1, #case.slice_index_head do
      slices[index] = made.devices:device(made.slots[index]).slice_index
    end
    assert.are.same(integers(case.slice_index_head), slices)
  end
  if case.nd_assignment and made.assignment then
    for row, sizes in ipairs(case.nd_assignment) do
      assert.are.same(integers(sizes), made.assignment[row])
    end
  end
end

describe("placements computed by jax", function()
  local cases = read_json(HERE .. "/../../fixtures/mesh_golden.json")
  local rules = rules_of_fixture()

  it("are 200 and hold refusals", function()
    local refusals = 0
    for _, case in ipairs(cases) do
      refusals = refusals + (case.error and 1 or 0)
    end
    assert.are.equal(200, #cases)
    assert.are.equal(21, refusals)
  end)

  for number, case in ipairs(cases) do
    local name = ("case %d: %s %s"):format(
      number,
      case.kind or case.case,
      table.concat(case.mesh_shape or case.ici or {}, ",")
    )
    it(name, function()
      for _, one_by_one in ipairs({ false, true }) do
        local ok, made = pcall(place, case, rules, one_by_one)
        if case.error then
          assert.is_false(ok)
          assert.are.equal(case.error, made.exception)
          assert.are.equal(case.message, made.message)
        else
          assert(ok, made)
          compare(case, made)
        end
      end
    end)
  end
end)
