local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local ROOT = HERE .. "/../../.."
local S = dofile(HERE .. "/support.lua")

describe("accelerator types", function()
  it("are those of the table: the generated module is what the generator makes", function()
    local written = {}
    local environment = setmetatable({
      io = {
        open = io.open,
        write = function(...)
          for _, text in ipairs({ ... }) do
            written[#written + 1] = text
          end
        end,
      },
    }, { __index = _G })
    assert(loadfile(ROOT .. "/cmake/accelerators/generate.lua", "t", environment))(
      ROOT .. "/cmake/accelerators"
    )
    local file = assert(io.open(ROOT .. "/lua/ciranda/data/accelerators.lua"))
    local committed = file:read("a")
    file:close()
    assert.are.equal(committed, table.concat(written))
  end)

  it("hold every row, and each adds up", function()
    local counts = {}
    for _, entry in ipairs(types.list) do
      local generation = types.generations[entry.generation]
      counts[entry.generation] = (counts[entry.generation] or 0) + 1
      local dims = types.parse_bounds(entry.topology)
      assert.are.equal(entry.chips, S.product(dims))
      assert.are.equal(entry.cores, entry.chips * generation.cores_per_chip)
      assert.are.equal(entry.vms, S.product(entry.host_bounds))
      assert.are.equal(entry.chips_per_vm, S.product(entry.vm_bounds))
      for axis = 1, 3 do
        assert.are.equal(dims[axis], entry.vm_bounds[axis] * entry.host_bounds[axis])
      end
      assert.are.equal(("%s-%d"):format(generation.api_prefix, types.number(entry)), entry.name)
      assert.are.equal(entry, types.get(entry.name))
      if entry.wrap_documented then
        assert.are.same(entry.wrap, topology.wrap_of(entry.generation, dims))
      end
    end
    assert.are.same({ v2 = 5, v3 = 8, v4 = 13, v5e = 8, v5p = 96, v6e = 8, tpu7x = 99 }, counts)
  end)

  it("know what their number counts", function()
    assert.are.equal(4, types.get("v4-8").chips)
    assert.are.equal(8, types.get("v5litepod-8").chips)
    assert.are.equal(8, types.get("v6e-8").chips)
    assert.are.equal(4, types.get("tpu7x-8").chips)
  end)

  it("are refused with near ones", function()
    local err = S.refusal(types.get, "v4-12")
    assert.are.equal("invalid", err.code)
    assert.are.same({ "v4-16", "v4-8", "v4-32" }, err.near)
    assert.matches("counts TensorCores", err.message)
    assert.are.same({ "v5litepod-16" }, S.refusal(types.get, "v5e-16").near)
    assert.are.same({ "v5litepod-16" }, S.refusal(types.get, "v5lite-16").near)
    assert.matches("types are v2%-N", S.refusal(types.get, "h100-8").message)
    assert.are.equal("misuse", S.refusal(types.get, 8).code)
  end)

  it("are found by the names in use", function()
    for _, name in ipairs({ "v5e", "v5litepod", "V5LITE_POD", "TPU v5 lite", "v5litepod-16", "TPU v5e" }) do
      assert.are.equal("v5e", types.generation_of(name).name)
    end
    assert.are.equal("v5p", types.generation_of("TPU v5").name)
    assert.are.equal("tpu7x", types.generation_of("TPU7x").name)
    assert.is_nil(types.generation_of("TPU v9"))
  end)

  it("have constants with a unit and a source", function()
    for _, generation in ipairs(types.generation_list) do
      local value, unit, source = types.constant(generation.name, "bf16_flops")
      assert.is_true(value > 1e13)
      assert.are.equal("FLOP/s/chip", unit)
      assert.is_true(#source > 5)
    end
    assert.is_nil(types.constant("v4", "colour"))
  end)
end)
