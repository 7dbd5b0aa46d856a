local mesh = require("ciranda.mesh")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local NAMES = { "data", "fsdp", "tensor" }

local function count(text, pattern)
  local _, found = text:gsub(pattern, "")
  return found
end

--- Checks that elements nest and close, and returns how many of each there are.
local function elements(svg)
  local open, found = {}, {}
  for slash, name, rest in svg:gmatch("<(/?)(%a+)([^>]*)>") do
    if slash == "/" then
      assert.are.equal(name, table.remove(open))
    else
      found[name] = (found[name] or 0) + 1
      if rest:sub(-1) ~= "/" then
        open[#open + 1] = name
      end
    end
  end
  assert.are.same({}, open)
  return found
end

describe("a mesh in the terminal", function()
  it("shows which shard is on which chip", function()
    local text =
      mesh.draw.text(mesh.jax_order({ type = "v5litepod-16", ici = { 1, 4, 4 } }), { names = NAMES })
    assert.matches("v5litepod%-16 4x4, 16 chips: JAX's order", text)
    assert.matches("each chip: fsdp %(4%) %. tensor %(4%)", text)
    assert.matches("\n0%.0 0%.1  0%.2 0%.3\n1%.0 1%.1  1%.2 1%.3\n", text)
    assert.matches("fsdp: 4 rings of 4 devices, 6 links a ring, longest step 3", text)
  end)

  it("compares a better order with JAX's", function()
    local text = mesh.draw.text(mesh.best_order({ type = "v6e-8", ici = { 8 } }), { names = { "fsdp" } })
    assert.matches("ciranda's order", text)
    assert.matches("\n0 7\n1 6\n2 5\n3 4\n", text)
    assert.matches("8 links a ring, longest step 1 %(JAX's: 12, longest 2%)", text)
  end)

  it("tells slices apart", function()
    local text = mesh.draw.text(
      mesh.jax_order({ type = "v5litepod-16", slices = 4, ici = { 1, 16, 1 }, dcn = { 2, 2, 1 } }),
      { names = NAMES }
    )
    assert.matches("DCN: data 2 x fsdp 2 over 4 slices", text)
    assert.matches("slice 2: data 1, fsdp 0", text)
    local many = mesh.draw.text(
      mesh.jax_order({ type = "v5litepod-4", slices = 40, ici = { 1, 4, 1 }, dcn = { 40, 1, 1 } }),
      { names = NAMES }
    )
    assert.matches("%.%.%. slice 39", many)
  end)

  it("draws each plane, and no line is wider than the terminal", function()
    for _, case in ipairs({
      { "v4-8", { 1, 4, 1 } },
      { "v4-1024", { 1, 64, 8 } },
      { "v5litepod-256", { 1, 256, 1 } },
    }) do
      local order = mesh.jax_order({ type = case[1], ici = case[2] })
      local text = mesh.draw.text(order, { names = NAMES, width = 100 })
      for line in text:gmatch("[^\n]+") do
        assert.is_true(#line <= 100)
      end
      if order.dims[3] > 1 then
        assert.are.equal(order.dims[3], count(text, "z = %d"))
      end
    end
  end)

  it("has both devices of a chip", function()
    local text =
      mesh.draw.text(mesh.jax_order({ type = "tpu7x-8", ici = { 4, 2 } }), { names = { "fsdp", "tensor" } })
    assert.matches("0%.0/0%.1 1%.0/1%.1", text)
    assert.matches("its two devices with /", text)
  end)

  it("is plain unless colours are asked for", function()
    local order = mesh.jax_order({ type = "v5litepod-16", ici = { 1, 4, 4 } })
    assert.is_nil(mesh.draw.text(order, { names = NAMES }):find("\27", 1, true))
    local coloured = mesh.draw.text(order, { names = NAMES, colour = true, axis = "tensor" })
    assert.are.equal(16, count(coloured, "\27%[48;2;"))
    assert.are.equal(16, count(coloured, "\27%[0m"))
    assert.matches("coloured by tensor", coloured)
    local colours = {}
    for colour in coloured:gmatch("\27%[48;2;([%d;]+)m") do
      colours[colour] = true
    end
    local different = 0
    for _ in pairs(colours) do
      different = different + 1
    end
    assert.are.equal(4, different)
    assert.are.equal(
      mesh.draw.text(order, { names = NAMES }):gsub("; coloured.-\n", "\n"),
      (coloured:gsub("\27%[[%d;]*m", ""):gsub("; coloured.-\n", "\n"))
    )
  end)

  it("refuses names that do not fit", function()
    local order = mesh.jax_order({ type = "v4-8", ici = { 4 } })
    assert.are.equal("misuse", S.refusal(mesh.draw.text, order, { names = NAMES }).code)
    assert.are.equal("misuse", S.refusal(mesh.draw.text, order, { axis = "fsdp" }).code)
    assert.are.equal("misuse", S.refusal(mesh.draw.text).code)
    assert.are.equal("misuse", S.refusal(mesh.draw.svg, {}).code)
    assert.are.equal("misuse", S.refusal(mesh.draw.text, order, { colours = true }).code)
    assert.matches("axis 0 %(4%)", mesh.draw.text(order))
  end)
end)

describe("a mesh as SVG", function()
  local CASES = {
    { "v4-8", { 1, 4, 1 }, 4 },
    { "v5litepod-16", { 1, 4, 4 }, 16 },
    { "v5litepod-64", { 1, 64, 1 }, 64 },
    { "v5litepod-256", { 1, 16, 16 }, 256 },
    { "v4-1024", { 1, 64, 8 }, 512 },
  }
  for _, case in ipairs(CASES) do
    it(("of %d chips is well formed, with each chip in the panel of each axis"):format(case[3]), function()
      local order = mesh.jax_order({ type = case[1], slices = 2, ici = case[2], dcn = { 2, 1, 1 } })
      local svg = mesh.draw.svg(order, { names = NAMES })
      elements(svg)
      local panels = 0
      for _, size in ipairs(case[2]) do
        panels = panels + (size > 1 and 1 or 0)
      end
      assert.are.equal(case[3] * panels, count(svg, 'stroke%-width="0.8"/>') - count(svg, "<circle"))
      assert.matches("DCN: data 2", svg)
      assert.are.equal(2, count(svg, ">slice %d<"))
      assert.is_nil(svg:find("nan", 1, true))
      assert.is_nil(svg:find("inf", 1, true))
    end)
  end

  it("draws single links dark and long steps red, with their number", function()
    local long = mesh.draw.svg(mesh.jax_order({ type = "v4-8", ici = { 4 } }), { names = { "fsdp" } })
    assert.are.equal(2, count(long, '<path d="M'))
    assert.are.equal(2, count(long, ">2</text>") - 1)
    assert.are.equal(2, count(long, '<path d="M[^>]*stroke="#c62828"'))
    local ring = mesh.draw.svg(mesh.best_order({ type = "v4-8", ici = { 4 } }), { names = { "fsdp" } })
    assert.are.equal(0, count(ring, '<path d="M'))
    assert.matches("JAX's order: 6 links, longest step 2", ring)
  end)

  it("leaves the plane where an axis wraps around", function()
    local svg =
      mesh.draw.svg(mesh.jax_order({ type = "v4-128", ici = { 16, 4 } }), { names = { "fsdp", "tensor" } })
    assert.is_true(count(svg, 'stroke%-dasharray="3 2"') > 0)
    assert.matches("triangles: a step to another plane", svg)
  end)

  it("escapes names and titles", function()
    local svg =
      mesh.draw.svg(mesh.jax_order({ type = "v4-8", ici = { 4 } }), { names = { "a<b" }, title = 'R&D "x"' })
    elements(svg)
    assert.matches("R&amp;D &quot;x&quot;", svg)
    assert.matches("a&lt;b", svg)
  end)

  it("draws one device, and the slices it stands for", function()
    local svg = mesh.draw.svg(
      mesh.jax_order({ type = "v5litepod-1", slices = 3, ici = { 1 }, dcn = { 3 } }),
      { names = { "data" } }
    )
    elements(svg)
    assert.are.equal(3, count(svg, ">slice %d<"))
  end)

  it("names at most as many slices as fit", function()
    local svg = mesh.draw.svg(
      mesh.jax_order({ type = "v5litepod-16", slices = 256, ici = { 1, 16, 1 }, dcn = { 256, 1, 1 } }),
      { names = NAMES }
    )
    assert.is_true(count(svg, ">slice %d+<") <= 12)
    assert.matches("256 slices, each like the one drawn, %d+ shown", svg)
  end)
end)
