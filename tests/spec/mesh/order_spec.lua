local factor = require("ciranda.mesh.factor")
local mesh = require("ciranda.mesh")
local order = require("ciranda.mesh.order")
local topology = require("ciranda.mesh.topology")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local function coords_of(shape, devices_per_chip)
  return function(id)
    local chip = id // devices_per_chip
    return {
      chip % shape.dims[1],
      chip // shape.dims[1] % shape.dims[2],
      chip // (shape.dims[1] * shape.dims[2]),
    }
  end
end

--- Counts an order's hops again, link by link, and compares.
local function recount(made, shape, links)
  local coords = coords_of(shape, shape.devices_per_chip)
  local ids = made.placement.ids
  local seen = {}
  for _, id in ipairs(ids) do
    assert.is_nil(seen[id])
    seen[id] = true
  end
  assert.are.equal(shape.devices, #ids)
  for axis, hops in ipairs(made.hops) do
    if made.ici[axis] > 1 then
      local total, longest = S.rings(ids, made.ici, axis, coords, links)
      assert.are.equal(total, hops.total)
      assert.are.equal(longest, hops.longest)
      assert.are.equal(made.ici[axis], #hops.ring)
      assert.are.equal(#ids // hops.size, hops.rings)
    else
      assert.are.equal(0, hops.total)
    end
  end
end

describe("jax_order", function()
  it("has the hops that were measured", function()
    local v5e = mesh.jax_order({ type = "v5litepod-8", ici = { 8 } })
    assert.are.same({ 1, 2, 1, 2, 1, 2, 1, 2 }, v5e.hops[1].ring)
    local wide = mesh.jax_order({
      devices = mesh.devices.grid({ kind = "TPU v5 lite", topology = { 4, 2, 1 } }),
      ici = { 8 },
    })
    assert.are.same({ 1, 1, 1, 1, 1, 1, 1, 1 }, wide.hops[1].ring)
    assert.are.same({ 1, 2, 1, 2 }, mesh.jax_order({ type = "v4-8", ici = { 4 } }).hops[1].ring)
    assert.are.same({ 0, 2, 1, 3 }, mesh.jax_order({ type = "v4-8", ici = { 4 } }).placement.ids)
    local square = mesh.jax_order({ type = "v5litepod-16", ici = { 16 } })
    assert.are.equal(16, square.hops[1].total)
    assert.are.equal(1, square.hops[1].longest)
  end)

  it("counts the links of an order that is no placement of JAX's", function()
    -- MaxText's optimize_mesh_for_tpu_v6e turns v6e-8 into 0 to 7.
    local shape = topology.of("v6e-8")
    local hops = order.measure(
      mesh.devices.grid({ type = "v6e-8" }),
      { 0, 1, 2, 3, 4, 5, 6, 7 },
      { 8 },
      shape.dims,
      shape.wrap
    )
    assert.are.same({ 1, 2, 1, 2, 1, 2, 1, 4 }, hops[1].ring)
  end)

  it("passes JAX's refusals on", function()
    local err = S.refusal(mesh.jax_order, { type = "v5litepod-16", ici = { 8, 2 } })
    assert.are.equal("NotImplementedError", err.exception)
  end)

  it("refuses sides of different rank, and what is no TPU", function()
    local err = S.refusal(mesh.jax_order, { type = "v4-8", slices = 2, ici = { 4, 1 }, dcn = { 2, 1, 1 } })
    assert.are.equal("invalid", err.code)
    assert.matches("ici has 2 axes and dcn 3", err.message)
    local cpus = mesh.devices.list({ { id = 0, kind = "cpu", platform = "cpu" } })
    assert.are.equal("unsupported", S.refusal(mesh.jax_order, { devices = cpus, ici = { 1 } }).code)
    assert.are.equal("misuse", S.refusal(mesh.jax_order, { type = "v4-8" }).code)
    assert.are.equal("misuse", S.refusal(mesh.jax_order, { ici = { 4 } }).code)
  end)
end)

describe("best_order", function()
  it("is strictly better where JAX's order is no ring", function()
    local eight = mesh.best_order({ type = "v5litepod-8", ici = { 8 } })
    assert.is_true(eight.improved)
    assert.are.equal(12, eight.jax.hops[1].total)
    assert.are.equal(8, eight.hops[1].total)
    assert.are.same({ 0, 2, 4, 6, 7, 5, 3, 1 }, eight.placement.ids)
    local four = mesh.best_order({ type = "v4-8", ici = { 4 } })
    assert.are.equal(6, four.jax.hops[1].total)
    assert.are.equal(4, four.hops[1].total)
    local trillium = mesh.best_order({ type = "v6e-8", ici = { 1, 8, 1 } })
    assert.are.equal(12, trillium.jax.hops[2].total)
    assert.are.equal(8, trillium.hops[2].total)
    assert.are.equal(1, trillium.hops[2].longest)
  end)

  it("is JAX's own order where that is a ring", function()
    local square = mesh.best_order({ type = "v5litepod-16", ici = { 16 } })
    assert.is_false(square.improved)
    assert.are.same(square.jax.placement.ids, square.placement.ids)
  end)

  it("cannot be beaten by any order of four or eight devices", function()
    for _, case in ipairs({
      { "v4-8", 4 },
      { "v5litepod-4", 4 },
      { "v6e-8", 8 },
      { "v4-16", 8 },
      { "tpu7x-8", 8 },
    }) do
      local shape = topology.of(case[1])
      local coords = coords_of(shape, shape.devices_per_chip)
      local links = S.links(shape.dims, shape.wrap)
      local least, used = math.huge, { [0] = true }
      local function visit(count, last, total)
        if total >= least then
          return
        elseif count == case[2] then
          least = math.min(least, total + links(coords(last), coords(0)))
          return
        end
        for id = 1, case[2] - 1 do
          if not used[id] then
            used[id] = true
            visit(count + 1, id, total + links(coords(last), coords(id)))
            used[id] = false
          end
        end
      end
      visit(1, 0, 0)
      assert.are.equal(least, mesh.best_order({ type = case[1], ici = { case[2] } }).hops[1].total)
    end
  end)

  -- Every layout of three axes on slices of each kind, with and without splitting.
  for _, name in ipairs({
    "v4-8",
    "v4-32",
    "v4-64",
    "v5litepod-8",
    "v6e-16",
    "v5litepod-32",
    "v5p-128",
    "tpu7x-16",
    "v3-8",
  }) do
    it("is never worse than JAX's on any axis of " .. name, function()
      local shape = topology.of(name)
      local links = S.links(shape.dims, shape.wrap)
      local refused, better = 0, 0
      for _, split in ipairs({ false, true }) do
        for _, ici in ipairs(factor.all(shape.devices, 3)) do
          local best = mesh.best_order({ type = name, ici = ici, allow_split = split })
          recount(best, shape, links)
          if best.jax then
            recount(best.jax, shape, links)
            local sum, jax = 0, 0
            for axis = 1, 3 do
              assert.is_true(best.hops[axis].total <= best.jax.hops[axis].total)
              assert.is_true(best.hops[axis].longest <= best.jax.hops[axis].longest)
              sum, jax = sum + best.hops[axis].total, jax + best.jax.hops[axis].total
            end
            assert.are.equal(best.improved, sum < jax)
            better = better + (best.improved and 1 or 0)
          else
            assert.are.equal("NotImplementedError", best.refusal.exception)
            assert.is_true(best.improved)
            refused = refused + 1
          end
        end
      end
      assert.is_true(better > 0 or refused > 0)
    end)
  end

  it("spans slices: each is walked alike, DCN outside", function()
    local best = mesh.best_order({ type = "v6e-8", slices = 2, ici = { 1, 8, 1 }, dcn = { 2, 1, 1 } })
    assert.are.same({ 0, 2, 4, 6, 7, 5, 3, 1, 8, 10, 12, 14, 15, 13, 11, 9 }, best.placement.ids)
    assert.are.same({ 2, 8, 1 }, best.placement.shape)
    assert.are.equal(8, best.hops[2].total)
    local inner = mesh.best_order({ type = "v6e-8", slices = 2, ici = { 8 }, dcn = { 2 } })
    assert.are.same({ 16 }, inner.placement.shape)
    assert.are.equal(12, inner.jax.hops[1].total)
  end)

  it("works for devices that are listed one by one, whatever their ids", function()
    local list = {}
    for chip = 0, 7 do
      list[chip + 1] = { id = 100 - chip, kind = "TPU v6 lite", coords = { chip % 2, chip // 2, 0 } }
    end
    local best = mesh.best_order({ devices = mesh.devices.list(list), ici = { 8 } })
    assert.are.same({ 100, 98, 96, 94, 93, 95, 97, 99 }, best.placement.ids)
    assert.are.equal("misuse", S.refusal(mesh.order_python, best).code)
  end)

  it("passes other refusals on", function()
    assert.are.equal("ValueError", S.refusal(mesh.best_order, { type = "v4-8", ici = { 8 } }).exception)
  end)

  it("can be written as a line of Python", function()
    assert.are.equal(
      'numpy.array(sorted(jax.devices(), key=lambda d: (getattr(d, "slice_index", 0), *d.coords[::-1], '
        .. "d.core_on_chip)))[[0, 2, 3, 1]].reshape((1, 4))",
      mesh.order_python(mesh.best_order({ type = "v4-8", ici = { 1, 4 } }))
    )
  end)

  it("improves the largest slices too", function()
    local best = mesh.best_order({ type = "v5litepod-256", ici = { 256 } })
    assert.are.equal(272, best.jax.hops[1].total)
    assert.are.equal(256, best.hops[1].total)
    best = mesh.best_order({ type = "v5p-17920", ici = { 35, 256 }, allow_split = true })
    for axis = 1, 2 do
      assert.is_true(best.hops[axis].total <= best.jax.hops[axis].total)
    end
  end)
end)
