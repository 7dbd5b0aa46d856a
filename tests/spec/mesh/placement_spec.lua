local placement = require("ciranda.mesh.placement")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local function ids(kind, topology, shape, options, cores)
  local devices = placement.grid({ kind = kind, topology = topology, cores = cores or 1 })
  return placement.create_device_mesh(shape, devices, options).ids
end

local function numbers(text)
  local out = {}
  for number in text:gmatch("%d+") do
    out[#out + 1] = math.tointeger(tonumber(number))
  end
  return out
end

local crc = dofile("tests/fixtures/crc32.lua")

-- Kind, topology, shape, ids or CRC-32, options, devices a chip.
local SPLIT = { allow_split_physical_axes = true }
local CONTIGUOUS = { contiguous_submeshes = true }
local VALUES = {
  { "TPU v3", { 2, 2, 1 }, { 8 }, "0 1 2 3 6 7 4 5", nil, 2 },
  { "TPU v3", { 2, 2, 1 }, { 2, 4 }, "0 1 2 3 6 7 4 5", nil, 2 },
  {
    "TPU v3",
    { 4, 4, 1 },
    { 4, 8 },
    "0 1 2 3 10 11 8 9 4 5 6 7 14 15 12 13 16 17 18 19 26 27 24 25 20 21 22 23 30 31 28 29",
    nil,
    2,
  },
  { "TPU v3", { 4, 2, 1 }, { 2, 8 }, "0 1 2 3 10 11 8 9 4 5 6 7 14 15 12 13", nil, 2 },
  { "TPU v5 lite", { 4, 2, 1 }, { 8 }, "0 1 2 3 7 6 5 4" },
  { "TPU v5 lite", { 2, 2, 2 }, { 8 }, "0 4 2 6 1 5 3 7" },
  { "TPU7x", { 1, 1, 1 }, { 1, 1, 2 }, "0 1", nil, 2 },
  { "TPU7x", { 2, 2, 1 }, { 2, 1, 4 }, "0 1 2 3 6 7 4 5", nil, 2 },
  { "TPU7", { 2, 2, 1 }, { 4, 1, 2 }, "0 1 2 3 6 7 4 5", nil, 2 },
  { "TPU7x", { 2, 2, 2 }, { 2, 8 }, "0 1 2 3 6 7 4 5 8 9 10 11 14 15 12 13", nil, 2 },
  {
    "TPU7x",
    { 2, 2, 4 },
    { 8, 4 },
    "0 1 2 3 6 7 4 5 8 9 10 11 14 15 12 13 16 17 18 19 22 23 20 21 24 25 26 27 30 31 28 29",
    nil,
    2,
  },
  { "TPU v4 lite", { 2, 2, 1 }, { 4 }, "0 1 3 2" },
  { "TPU8i", { 2, 2, 1 }, { 2, 2 }, "0 1 3 2" },
  { "TPU v4", { 2, 2, 1 }, { 1, 1, 4 }, "0 2 1 3" },
  { "TPU v4", { 2, 2, 4 }, { 1, 4, 4 }, "0 2 1 3 4 6 5 7 8 10 9 11 12 14 13 15" },
  { "TPU v4", { 2, 2, 4 }, { 2, 8 }, "0 4 8 12 1 5 9 13 2 6 10 14 3 7 11 15" },
  { "TPU v4", { 2, 2, 4 }, { 4, 2, 2 }, "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15" },
  { "TPU v4", { 2, 2, 2 }, { 2, 4 }, "0 2 1 3 4 6 5 7" },
  { "TPU v4", { 2, 2, 2 }, { 8 }, "0 4 2 6 1 5 3 7" },
  { "TPU v4", { 4, 4, 8 }, { 1, 16, 8 }, crc = "63c15829" },
  { "TPU v4", { 4, 4, 8 }, { 1, 8, 16 }, crc = "fab403f4" },
  { "TPU v4", { 4, 8, 8 }, { 1, 32, 8 }, crc = "dd505679" },
  { "TPU v4", { 8, 8, 8 }, { 1, 64, 8 }, crc = "e585a1be" },
  { "TPU v4", { 8, 8, 16 }, { 1, 64, 16 }, crc = "1ab32d93" },
  { "TPU v4", { 4, 4, 8 }, { 2, 2, 8, 4 }, nil, SPLIT, crc = "f645fa42" },
  { "TPU v4", { 4, 8, 8 }, { 1, 128, 2 }, nil, SPLIT, crc = "55418a17" },
  { "TPU v5 lite", { 2, 2, 1 }, { 4 }, "0 1 3 2" },
  { "TPU v6 lite", { 2, 2, 1 }, { 2, 2 }, "0 1 3 2" },
  { "TPU v6 lite", { 2, 4, 1 }, { 8 }, "0 1 2 3 7 6 5 4" },
  { "TPU v5 lite", { 4, 2, 1 }, { 4, 2 }, "0 1 2 3 7 6 5 4" },
  { "TPU v6 lite", { 4, 2, 1 }, { 2, 4 }, "0 1 2 3 7 6 5 4" },
  { "TPU v5 lite", { 4, 4, 1 }, { 16 }, "0 1 2 3 7 6 5 9 10 11 15 14 13 12 8 4" },
  { "TPU v5 lite", { 4, 4, 1 }, { 4, 4 }, "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15" },
  { "TPU v5 lite", { 4, 4, 1 }, { 8, 2 }, "0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15", SPLIT },
  { "TPU v6 lite", { 4, 4, 1 }, { 2, 8 }, "0 4 1 5 2 6 3 7 8 12 9 13 10 14 11 15", SPLIT },
  { "TPU v5 lite", { 16, 16, 1 }, { 256 }, crc = "db7bee14" },
  { "TPU v5 lite", { 16, 16, 1 }, { 128, 2 }, nil, SPLIT, crc = "032214f9" },
  { "TPU v6 lite", { 16, 16, 1 }, { 64, 4 }, nil, SPLIT, crc = "761d8b60" },
  { "TPU v5 lite", { 16, 16, 1 }, { 32, 8 }, nil, SPLIT, crc = "a4cad97d" },
  { "TPU v5 lite", { 8, 16, 1 }, { 128 }, crc = "ba811514" },
  { "TPU v6 lite", { 8, 16, 1 }, { 64, 2 }, nil, SPLIT, crc = "0635df16" },
  { "TPU v5 lite", { 8, 16, 1 }, { 32, 4 }, nil, SPLIT, crc = "16b3666f" },
  { "TPU v5 lite", { 8, 16, 1 }, { 16, 8 }, crc = "90d5523a" },
  { "TPU v5", { 2, 2, 2 }, { 8 }, "0 1 3 2 6 7 5 4" },
  { "TPU v5p", { 2, 2, 2 }, { 2, 2, 2 }, "0 1 3 2 6 7 5 4" },
  { "TPU v5", { 2, 2, 4 }, { 4, 4 }, "0 2 1 3 4 6 5 7 8 10 9 11 12 14 13 15" },
  { "TPU7x", { 4, 4, 4 }, { 64, 2 }, nil, { jax = "0.11.0" }, 2, crc = "48005071" },
  { "TPU7x", { 4, 4, 4 }, { 16, 8 }, nil, { jax = "0.11.0" }, 2, crc = "3e0e7501" },
  { "TPU7x", { 4, 4, 4 }, { 32, 4 }, nil, { jax = "0.11.0" }, 2, crc = "d784f3f9" },
  { "TPU v4", { 2, 2, 1 }, { 2, 2 }, nil, CONTIGUOUS, crc = "278eafa9" },
  { "TPU v4", { 2, 2, 4 }, { 4, 4 }, nil, CONTIGUOUS, crc = "b4265e52" },
  { "TPU v4", { 4, 4, 4 }, { 16, 4 }, nil, CONTIGUOUS, crc = "c98e9147" },
  { "TPU v4", { 4, 8, 8 }, { 64, 4 }, nil, CONTIGUOUS, crc = "f0e359bb" },
  { "TPU v4", { 4, 8, 8 }, { 1, 4, 64 }, nil, CONTIGUOUS, crc = "dd505679" },
  { "TPU v4", { 8, 8, 8 }, { 64, 1, 8 }, nil, CONTIGUOUS, crc = "6feca6e2" },
  { "TPU v4", { 8, 16, 16 }, { 256, 8 }, nil, CONTIGUOUS, crc = "ac2000c7" },
  { "TPU v4", { 8, 16, 16 }, { 8, 256 }, nil, CONTIGUOUS, crc = "e9a3bad9" },
}

describe("create_device_mesh", function()
  for _, case in ipairs(VALUES) do
    local kind, topology, shape, text, options, cores = table.unpack(case, 1, 6)
    it(("%s %s as %s"):format(kind, table.concat(topology, "x"), table.concat(shape, ",")), function()
      local made = ids(kind, topology, shape, options, cores)
      if text then
        assert.are.same(numbers(text), made)
      else
        assert.are.equal(case.crc, crc(made))
      end
    end)
  end

  it("orders 16 v3 devices as the page of jax.make_mesh says", function()
    local list = {}
    for index = 0, 15 do
      list[index + 1] =
        { id = index, kind = "TPU v3", coords = { index // 2 % 4, index // 8, 0 }, core = index % 2 }
    end
    local devices = placement.list(list)
    assert.are.same(
      numbers("0 1 2 3 6 7 4 5 8 9 10 11 14 15 12 13"),
      placement.create_device_mesh({ 2, 8 }, devices).ids
    )
    assert.are.same(
      numbers("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
      placement.create_device_mesh({ 4, 4 }, devices).ids
    )
  end)

  it("places TPU7x beside its core axis since 0.11.1", function()
    assert.are.same(
      numbers("0 4 8 12 2 6 10 14"),
      table.move(ids("TPU7x", { 2, 4, 4 }, { 8, 8 }, { jax = "0.11.0" }, 2), 1, 8, 1, {})
    )
    assert.are.same(
      numbers("0 1"),
      table.move(ids("TPU7x", { 2, 4, 4 }, { 32, 2 }, { jax = "0.11.1" }, 2), 1, 2, 1, {})
    )
  end)

  it("has an order for TPU7x slices of up to 32 devices and 2x2 in x and y", function()
    local function handler(topology, shape, release)
      local devices = placement.grid({ kind = "TPU7x", topology = topology, cores = 2 })
      return placement.create_device_mesh(shape, devices, { jax = release }).handler
    end
    assert.are.equal("blocks", handler({ 2, 2, 4 }, { 32 }))
    assert.is_nil(handler({ 2, 4, 1 }, { 16 }))
    assert.is_nil(handler({ 4, 2, 1 }, { 16 }))
    assert.is_nil(handler({ 2, 2, 8 }, { 64 }))
    local err = S.refusal(handler, { 2, 4, 1 }, { 16 }, "0.8.0")
    assert.are.equal("AssertionError", err.exception)
    assert.are.equal("Unexpected physical mesh shape: (2, 4, 1, 2).", err.message)
  end)

  it("orders kinds only in releases that know them", function()
    assert.are.same(numbers("0 1 3 2"), ids("TPU v6 lite", { 2, 2, 1 }, { 4 }, { jax = "0.6.1" }))
    assert.are.same(numbers("0 2 1 3"), ids("TPU v6 lite", { 2, 2, 1 }, { 4 }, { jax = "0.6.0" }))
    assert.are.same(numbers("0 1 2 3 7 6 5 4"), ids("TPU7x", { 2, 2, 1 }, { 8 }, { jax = "0.7.2" }, 2))
    assert.are.same(numbers("0 1 2 3 6 7 4 5"), ids("TPU7x", { 2, 2, 1 }, { 8 }, { jax = "0.8.0" }, 2))
  end)

  it("has the shapes of the larger TPU7x slices", function()
    local list = placement.grid({ kind = "TPU7x", topology = { 2, 4, 4 }, cores = 2 }):as_list()
    for _, first in ipairs({ 1, 33 }) do
      local part = {}
      for slot = first, first + 31 do
        part[#part + 1] = list:device(slot)
      end
      local made = placement.create_device_mesh({ 1, 32 }, placement.list(part))
      assert.are.same({ 1, 32 }, made.shape)
      assert.are.equal(32, #made.ids)
    end
  end)

  it("refuses a wrong product, and what are no integers", function()
    local devices = placement.grid({ kind = "TPU v4", topology = { 2, 2, 1 } })
    local err = S.refusal(placement.create_device_mesh, { 1, 8, 1 }, devices)
    assert.are.equal("ValueError", err.exception)
    assert.are.equal("Number of devices 4 must equal the product of mesh_shape (1, 8, 1)", err.message)
    err = S.refusal(placement.create_device_mesh, { 2, "two" }, devices)
    assert.are.equal(
      "`mesh_shape` passed to `create_device_mesh` should be a sequence of ints. Got (2, 'two')",
      err.message
    )
    assert.are.equal("ValueError", S.refusal(placement.create_device_mesh, { -2, -2 }, devices).exception)
    assert.are.equal(
      "Number of devices 4 must equal the product of mesh_shape (0, 4)",
      S.refusal(placement.create_device_mesh, { 0, 4 }, devices).message
    )
    -- As int() does.
    assert.are.equal(4, #placement.create_device_mesh({ 2.9, "2" }, devices).ids)
    assert.are.equal("misuse", S.refusal(placement.create_device_mesh, {}, devices).code)
    assert.are.equal("misuse", S.refusal(placement.create_device_mesh, { 4 }).code)
    assert.are.equal("misuse", S.refusal(placement.create_hybrid_device_mesh, { 4 }, { 2 }, {}).code)
    assert.are.equal("misuse", S.refusal(placement.create_device_mesh, { 4 }, devices, { split = true }).code)
  end)

  it("refuses contiguous submeshes in jax's words", function()
    local err = S.refusal(ids, "TPU v4", { 4, 4, 8 }, { 16, 8 }, CONTIGUOUS)
    assert.are.equal(
      "create_device_mesh cannot create contiguous submeshes for physical mesh topology (4, 4, 8)",
      err.message
    )
    err = S.refusal(ids, "TPU v4", { 4, 8, 8 }, { 1, 128, 2 }, CONTIGUOUS)
    assert.are.equal(
      "create_device_mesh cannot create contiguous submeshes for mesh_shape (1, 128, 2) and physical mesh topology "
        .. "(4, 8, 8). Available mesh_shapes: [(64, 4), (4, 64)]",
      err.message
    )
    assert.are.equal("ValueError", err.exception)
  end)

  it("refuses two devices a chip where there may be one", function()
    local err = S.refusal(ids, "TPU v4", { 2, 2, 1 }, { 8 }, nil, 2)
    assert.are.equal("AssertionError", err.exception)
    assert.are.equal(
      'Creating meshes for TPU >v3 requires one device per chip ("megacore" mode). Got device id 1 for a device of '
        .. "kind TPU v4: TpuDevice(id=1, process_index=0, coords=(0,0,0), core_on_chip=1).",
      err.message
    )
  end)

  it("knows which kinds may have two devices a chip, and since when", function()
    local function accepted(kind, release)
      local devices = placement.grid({ kind = kind, topology = { 2, 2, 1 }, cores = 2 })
      return (placement.accepts({ 4, 2 }, devices, { jax = release }))
    end
    assert.is_true(accepted("TPU v5p"))
    assert.is_true(accepted("TPU v5p", "0.8.0"))
    assert.is_false(accepted("TPU v5p", "0.7.2"))
    assert.is_true(accepted("TPU v5", "0.11.1"))
    assert.is_false(accepted("TPU v5", "0.11.0"))
    assert.is_true(accepted("TPU8i", "0.10.1"))
    assert.is_false(accepted("TPU8i", "0.10.0"))
    assert.is_true(accepted("TPU7", "0.9.1"))
    assert.is_false(accepted("TPU7", "0.9.0"))
    assert.is_false(accepted("TPU v4"))
  end)

  it("refuses sub-slices with a hole", function()
    local list = {}
    for slot = 1, 8 do
      list[slot] = placement.grid({ kind = "TPU v4", topology = { 2, 2, 2 } }):as_list():device(slot)
    end
    local seven = table.move(list, 1, 7, 1, {})
    local err = S.refusal(placement.create_device_mesh, { 7 }, placement.list(seven))
    assert.are.equal("AssertionError", err.exception)
    assert.matches("dims=%(2, 2, 2%) cores_per_chip=1$", err.message)
    list[8] = list[7]
    err = S.refusal(placement.create_device_mesh, { 8 }, placement.list(list))
    assert.are.equal("AssertionError", err.exception)
    assert.matches('contains a "hole"; probable cause', err.message, 1, true)
    assert.matches("not a contiguous cuboid", err.message)
  end)

  it("accepts cuboids that do not start at 0", function()
    local list = {}
    for index, device in ipairs({ { 3, 3, 4 }, { 3, 4, 4 } }) do
      list[index] = { id = index + 10, kind = "TPU v4", coords = device }
    end
    assert.are.same({ 11, 12 }, placement.create_device_mesh({ 1, 2 }, placement.list(list)).ids)
  end)

  it("sorts GPUs by id, and leaves CPUs as they are", function()
    local gpus, cpus = {}, {}
    for index, id in ipairs({ 2, 0, 3, 1 }) do
      gpus[index] = { id = id, kind = "NVIDIA H100", platform = "gpu" }
      cpus[index] = { id = id, kind = "cpu", platform = "cpu" }
    end
    assert.are.same({ 0, 1, 2, 3 }, placement.create_device_mesh({ 2, 2 }, placement.list(gpus)).ids)
    assert.are.same(
      { 2, 0, 3, 1 },
      placement.create_device_mesh({ 2, 2 }, placement.list(gpus), { jax = "0.10.1" }).ids
    )
    assert.are.same({ 2, 0, 3, 1 }, placement.create_device_mesh({ 2, 2 }, placement.list(cpus)).ids)
  end)

  it("follows releases before 0.7.0 where they trip", function()
    local list = {}
    for slot, device in ipairs({ { 1, 1, 1 }, { 0, 1, 1 } }) do
      list[slot] = { id = slot, kind = "TPU v5p", coords = device }
    end
    local err = S.refusal(placement.create_device_mesh, { 2 }, placement.list(list), { jax = "0.6.2" })
    assert.are.equal("IndexError", err.exception)
    assert.are.equal("index 3 is out of bounds for axis 0 with size 2", err.message)
    assert.are.same({ 2, 1 }, placement.create_device_mesh({ 2 }, placement.list(list)).ids)
  end)

  it("follows the wrong prime factors of releases before 0.11.1", function()
    local err = S.refusal(
      ids,
      "TPU v5 lite",
      { 20, 4, 1 },
      { 8, 10 },
      { jax = "0.11.0", allow_split_physical_axes = true }
    )
    assert.are.equal("ValueError", err.exception)
    assert.matches("^cannot reshape array of size 80 into shape", err.message)
    local made = ids(
      "TPU v5 lite",
      { 20, 4, 1 },
      { 8, 10 },
      { jax = "0.11.1", allow_split_physical_axes = true }
    )
    table.sort(made)
    assert.are.equal(80, #made)
    for index, id in ipairs(made) do
      assert.are.equal(index - 1, id)
    end
  end)

  it("finds devices by their place in the mesh", function()
    local made =
      placement.create_device_mesh({ 2, 4 }, placement.grid({ kind = "TPU v4", topology = { 2, 2, 2 } }))
    assert.are.equal(0, made:at(0, 0))
    assert.are.equal(7, made:at(1, 3))
    assert.are.equal(5, made:at(1, 2))
    assert.are.equal("misuse", S.refusal(made.at, made, 0, 4).code)
  end)

  it("says whether a mesh is accepted, without laying it out", function()
    local devices = placement.grid({ kind = "TPU v5 lite", topology = { 4, 4, 1 } })
    assert.is_true(placement.accepts({ 4, 4 }, devices))
    local accepted, refusal = placement.accepts({ 8, 2 }, devices)
    assert.is_false(accepted)
    assert.are.equal("NotImplementedError", refusal.exception)
    assert.is_true(placement.accepts({ 8, 2 }, devices, { allow_split_physical_axes = true }))
    assert.is_false(placement.accepts({ 8, 4 }, devices))
  end)
end)

describe("create_hybrid_device_mesh", function()
  local function hybrid(slices, ici, dcn, options)
    local devices = placement.grid({ kind = "TPU v5 lite", topology = { 2, 2, 1 }, slices = slices })
    return placement.create_hybrid_device_mesh(ici, dcn, devices, options)
  end

  it("puts DCN outside and ICI inside of each axis", function()
    assert.are.same(numbers("0 1 3 2 4 5 7 6"), hybrid(2, { 1, 4, 1 }, { 2, 1, 1 }).ids)
    assert.are.same(numbers("0 1 3 2 4 5 7 6"), hybrid(2, { 1, 4, 1 }, { 1, 2, 1 }).ids)
    assert.are.same({ 1, 8, 1 }, hybrid(2, { 1, 4, 1 }, { 1, 2, 1 }).shape)
    assert.are.same(numbers("0 1 3 2 4 5 7 6 8 9 11 10 12 13 15 14"), hybrid(4, { 1, 2, 2 }, { 2, 2, 1 }).ids)
    assert.are.same(numbers("0 1 4 5 3 2 7 6 8 9 12 13 11 10 15 14"), hybrid(4, { 1, 2, 2 }, { 2, 1, 2 }).ids)
  end)

  it("has the elementwise product as its shape", function()
    local devices = placement.grid({ kind = "TPU v4", topology = { 4, 4, 4 }, slices = 2 })
    local first = placement.create_hybrid_device_mesh({ 1, 16, 4 }, { 2, 1, 1 }, devices)
    assert.are.same({ 2, 16, 4 }, first.shape)
    assert.are.equal("fa87a892", crc(first.ids))
    assert.are.same(
      { 1, 8, 16 },
      placement.create_hybrid_device_mesh({ 1, 4, 16 }, { 1, 2, 1 }, devices).shape
    )
  end)

  it("has the golden values of large slices", function()
    local devices = placement.grid({ kind = "TPU v6 lite", topology = { 16, 16, 1 }, slices = 2 })
    assert.are.equal(
      "c42a32c1",
      crc(placement.create_hybrid_device_mesh({ 1, 256, 1 }, { 2, 1, 1 }, devices).ids)
    )
    assert.are.equal(
      "6feca6e2",
      crc(placement.create_hybrid_device_mesh({ 1, 16, 16 }, { 2, 1, 1 }, devices).ids)
    )
    assert.are.equal(
      "NotImplementedError",
      S.refusal(placement.create_hybrid_device_mesh, { 1, 64, 4 }, { 2, 1, 1 }, devices).exception
    )
  end)

  it("pads the shorter shape with 1s in front, as numpy does", function()
    assert.are.same({ 2, 4, 1 }, hybrid(2, { 4, 1 }, { 2, 1, 1 }).shape)
    assert.are.same({ 1, 8, 1 }, hybrid(2, { 1, 4, 1 }, { 2, 1 }).shape)
  end)

  local function listed(order)
    local grid = placement.grid({ kind = "TPU v5 lite", topology = { 2, 2, 1 }, slices = 2 }):as_list()
    local list = {}
    for _, slice in ipairs(order) do
      for slot = 1 + 4 * slice, 4 + 4 * slice do
        list[#list + 1] = grid:device(slot)
      end
    end
    return placement.list(list)
  end

  it("sorts slices, or keeps the order in which they are seen", function()
    local function make(order, sort)
      return placement.create_hybrid_device_mesh(
        { 1, 2, 2 },
        { 2, 1, 1 },
        listed(order),
        { should_sort_granules_by_key = sort }
      ).ids
    end
    assert.are.same(make({ 0, 1 }, false), make({ 1, 0 }, true))
    assert.are.same(numbers("4 5 7 6 0 1 3 2"), make({ 1, 0 }, false))
  end)

  it("treats processes as slices when told to", function()
    local devices =
      placement.grid({ kind = "TPU v5 lite", topology = { 4, 2, 1 }, slices = 1, slice_index = false })
    local err = S.refusal(placement.create_hybrid_device_mesh, { 4 }, { 2 }, devices)
    assert.are.equal(
      "Device TpuDevice(id=0, process_index=0, coords=(0,0,0), core_on_chip=0) does not have attribute slice_index. "
        .. "See `process_is_granule` option.",
      err.message
    )
    local made = placement.create_hybrid_device_mesh({ 4 }, { 2 }, devices, { process_is_granule = true })
    assert.are.same({ 8 }, made.shape)
    assert.are.same(numbers("0 1 5 4"), table.move(made.ids, 1, 4, 1, {}))
  end)

  it("refuses another number of slices", function()
    local err = S.refusal(hybrid, 2, { 1, 4, 1 }, { 3, 1, 1 })
    assert.are.equal("ValueError", err.exception)
    assert.are.equal("Number of slices 2 must equal the product of dcn_mesh_shape (3, 1, 1)", err.message)
    assert.are.equal("ValueError", S.refusal(hybrid, 2, { 1, 4, 1 }, { -1, -2, 1 }).exception)
    assert.are.equal("misuse", S.refusal(hybrid, 2, { 1, 4, 1 }, { 2.0, 1, 1 }).code)
  end)

  it("refuses a device without slice_index in the middle", function()
    local list = {}
    for index = 0, 7 do
      list[index + 1] = {
        id = index,
        kind = "TPU v5 lite",
        coords = { index % 2, index // 2 % 2, 0 },
        slice_index = index ~= 5 and index // 4 or nil,
      }
    end
    local err = S.refusal(placement.create_hybrid_device_mesh, { 4 }, { 2 }, placement.list(list))
    assert.are.equal("AttributeError", err.exception)
  end)

  it("gathers slices whose devices are listed in turn", function()
    local grid = placement.grid({ kind = "TPU v5 lite", topology = { 2, 2, 1 }, slices = 2 })
    local whole, list = grid:as_list(), {}
    for slot = 1, 4 do
      list[#list + 1] = whole:device(slot)
      list[#list + 1] = whole:device(slot + 4)
    end
    assert.are.same(
      placement.create_hybrid_device_mesh({ 2, 2 }, { 2, 1 }, grid).ids,
      placement.create_hybrid_device_mesh({ 2, 2 }, { 2, 1 }, placement.list(list)).ids
    )
  end)
end)

describe("device sets", function()
  it("number and list devices as jax's tests do", function()
    local grid = placement.grid({ kind = "TPU7x", topology = { 4, 2, 2 }, cores = 2, slices = 2 })
    assert.are.equal(64, grid.count)
    assert.are.same(numbers("0 1 2 3 8 9 10 11 4 5 6 7"), table.move(grid:slots(), 1, 12, 1, {}))
    local device = grid:device(grid:slots()[45])
    assert.are.equal(1, device.slice_index)
    assert.are.same({ 2, 1, 0 }, grid:device(13 - 1).coords)
    assert.are.equal(5, device.process_index)
  end)

  it("come from accelerator types", function()
    local grid = placement.grid({ type = "v6e-8", slices = 2 })
    assert.are.equal("TPU v6 lite", grid.kind)
    assert.are.same({ 2, 4, 1 }, grid.host)
    assert.are.equal(16, grid.count)
    assert.are.equal(1, grid:device(15).process_index)
  end)

  it("refuse what cannot be", function()
    assert.are.equal("misuse", S.refusal(placement.grid, { kind = "TPU v4", topology = { 0, 2, 1 } }).code)
    assert.are.equal("misuse", S.refusal(placement.grid, { kind = "TPU v4" }).code)
    assert.are.equal("misuse", S.refusal(placement.grid, { type = "v4-8", slices = 0 }).code)
    assert.are.equal("misuse", S.refusal(placement.grid, { kind = "TPU v4", topology = { 3, 2, 1 } }).code)
    assert.are.equal("misuse", S.refusal(placement.list, {}).code)
    assert.are.equal("misuse", S.refusal(placement.list, { { id = 0, kind = "TPU v4" } }).code)
    assert.are.equal("misuse", S.refusal(placement.list, { { kind = "TPU v4" } }).code)
  end)
end)
