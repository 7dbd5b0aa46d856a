local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

describe("topology", function()
  it("goes from every type to its topology and back", function()
    for _, entry in ipairs(types.list) do
      local shape = topology.of(entry.name)
      assert.are.equal(entry.topology, shape.name)
      assert.are.equal(entry.name, topology.to_type(entry.generation, entry.topology))
      assert.is_true(shape.listed)
    end
    assert.are.equal("v4-32", topology.to_type("V4", "2x2x4"))
    assert.are.equal("v5litepod-16", topology.from_config("V5LITE_POD", "4x4").type)
  end)

  it("counts devices as JAX does", function()
    assert.are.equal(8, topology.of("v4-16").devices)
    assert.are.equal(4 * 8, 4 * topology.of("v4-16").devices)
    assert.are.equal(8, topology.of("tpu7x-8").devices)
    assert.are.equal(8, topology.of("v3-8").devices)
    assert.are.equal(16, topology.of("v5litepod-16").devices)
  end)

  it("knows that two v5e slices of 16 are 8 VMs and 32 chips", function()
    local shape = topology.of("v5litepod-16")
    assert.are.equal(8, 2 * shape.hosts)
    assert.are.equal(32, 2 * shape.chips)
  end)

  it("gives every chip to one worker, in the worker's order", function()
    for _, name in ipairs({
      "v4-8",
      "v4-64",
      "v5litepod-8",
      "v6e-16",
      "v5litepod-256",
      "v5p-384",
      "tpu7x-2",
      "v3-32",
    }) do
      local shape = topology.of(name)
      local seen, count = {}, 0
      for index = 0, shape.hosts - 1 do
        local worker = shape:worker(index)
        assert.are.equal(shape.chips_per_host, #worker.chips)
        for _, chip in ipairs(worker.chips) do
          local key = table.concat(chip, ",")
          assert.is_nil(seen[key])
          seen[key] = true
          count = count + 1
          assert.are.equal(index, shape:worker_of(chip[1], chip[2], chip[3]))
        end
      end
      assert.are.equal(shape.chips, count)
    end
  end)

  it("orders workers and chips with x fastest", function()
    local shape = topology.of("v5litepod-16")
    assert.are.same({ { 2, 0, 0 }, { 3, 0, 0 }, { 2, 1, 0 }, { 3, 1, 0 } }, shape:worker(1).chips)
    assert.are.same({ 0, 1, 0 }, shape:worker(2).host)
    assert.are.same(
      { { 0, 0, 0 }, { 1, 0, 0 }, { 0, 1, 0 }, { 1, 1, 0 } },
      topology.of("v4-16"):worker(0).chips
    )
    assert.are.same({ 0, 0, 1 }, topology.of("v4-16"):worker(1).host)
    local eight = topology.of("v6e-8"):worker(0)
    assert.are.same(
      { { 0, 0, 0 }, { 1, 0, 0 }, { 0, 1, 0 } },
      { eight.chips[1], eight.chips[2], eight.chips[3] }
    )
    assert.are.equal(8, #eight.chips)
  end)

  it("refuses a worker that is not there", function()
    assert.matches(
      "workers 0 to 3, not 4",
      S.refusal(topology.of("v5litepod-16").worker, topology.of("v5litepod-16"), 4).message
    )
  end)

  it("accepts whole cubes that no type has by default", function()
    local shape = topology.of({ type = "v4-512", topology = "4x4x16" })
    assert.are.equal(256, shape.chips)
    assert.are.equal(64, shape.hosts)
    assert.is_false(shape.listed)
    assert.are.same({ true, true, true }, shape.wrap)
    assert.are.equal("v4-512", topology.from_config("v4", "16x4x4").type)
    assert.is_true(topology.from_config("v5p", "8x8x16").twistable)
    assert.is_false(topology.from_config("v5p", "8x8x8").twistable)
  end)

  it("refuses what does not exist, with near ones", function()
    local err = S.refusal(topology.from_config, "v5p", "8x4x4")
    assert.matches("must not decrease", err.message)
    assert.matches("v5p%-256 %(4x4x8%)", err.message)
    assert.matches("multiple of 4", S.refusal(topology.from_config, "v4", "3x3x3").message)
    assert.are.equal("v5litepod-8", S.refusal(topology.from_config, "v5e", "4x2").near[1])
    assert.matches("at most 64 cubes", S.refusal(topology.from_config, "v4", "16x16x20").message)
    assert.matches("is not written like", S.refusal(topology.from_config, "v4", "4by4").message)
    assert.matches("is not written like", S.refusal(topology.from_config, "v4", "0x4").message)
    assert.matches("'v9' is not known", S.refusal(topology.from_config, "v9", "2x2").message)
    err = S.refusal(topology.of, { type = "v4-512", topology = "4x4x8" })
    assert.matches("has 256 chips and topology 4x8x8", err.message)
    assert.matches("that is v4%-256", err.message)
  end)

  it("says what is unusual", function()
    assert.matches("more than the largest v5p slice", topology.of("v5p-17920").notes[1])
    assert.matches("cannot be part of a multislice", topology.of("v3-8").notes[1])
    assert.are.same({}, topology.of("v4-8").notes)
  end)

  it("refuses options it does not know", function()
    assert.are.equal("misuse", S.refusal(topology.of, { typ = "v4-8" }).code)
    assert.are.equal("misuse", S.refusal(topology.of, { generation = "v4" }).code)
  end)

  it("counts links as a walk over them does", function()
    for _, name in ipairs({ "v4-32", "v4-128", "v5litepod-64", "v6e-8" }) do
      local shape = topology.of(name)
      local links = S.links(shape.dims, shape.wrap)
      for a = 0, shape.chips - 1 do
        for b = 0, shape.chips - 1 do
          local function at(chip)
            return {
              chip % shape.dims[1],
              chip // shape.dims[1] % shape.dims[2],
              chip // (shape.dims[1] * shape.dims[2]),
            }
          end
          assert.are.equal(links(at(a), at(b)), shape:hops(at(a), at(b)))
        end
      end
    end
  end)

  it("describes itself in a line", function()
    assert.are.equal(
      "v4-16: 2x2x2, 8 chips (16 TensorCores), 2 workers of 4, 8 JAX devices, no wraparound",
      topology.of("v4-16"):describe()
    )
    assert.matches("rings along x, y, z, can be twisted", topology.of("v4-512"):describe())
  end)
end)
