local factor = require("ciranda.mesh.factor")
local mesh = require("ciranda.mesh")
local types = require("ciranda.mesh.types")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local LLAMA_70B =
  { layers = 80, width = 8192, ff = 28672, heads = 64, kv_heads = 8, head_size = 128, vocabulary = 128256 }

local function text(list)
  return table.concat(list, "\n")
end

describe("factorisations", function()
  it("are as many as the closed form says, all different, all right", function()
    for _, number in ipairs({ 1, 2, 4, 12, 16, 35, 60, 256, 384, 8960, 9216 }) do
      for axes = 1, 4 do
        local all = factor.all(number, axes)
        assert.are.equal(factor.count(number, axes), #all)
        local seen = {}
        for _, sizes in ipairs(all) do
          assert.are.equal(number, S.product(sizes))
          local key = table.concat(sizes, ",")
          assert.is_nil(seen[key])
          seen[key] = true
        end
      end
    end
    assert.are.equal(45, factor.count(256, 3))
  end)
end)

describe("a plan", function()
  it("looks at every layout of 256 slices of v5litepod-256", function()
    local plan = mesh.plan({ type = "v5litepod-256", slices = 256 })
    assert.are.equal(45 * 45, plan.count)
    assert.are.equal(plan.count, plan.expected)
    assert.are.equal(plan.count, #plan.layouts)
    local seen = {}
    for _, layout in ipairs(plan.layouts) do
      assert.are.equal(256, S.product(layout.ici))
      assert.are.equal(256, S.product(layout.dcn))
      local key = table.concat(layout.ici, ",") .. ";" .. table.concat(layout.dcn, ",")
      assert.is_nil(seen[key])
      seen[key] = true
    end
    assert.matches("most a queued resource takes", plan.one_more[1])
  end)

  it("counts as the closed form for every type", function()
    for _, entry in ipairs(types.list) do
      if entry.chips <= 192 then
        local plan = mesh.plan({ type = entry.name, slices = 3 })
        assert.are.equal(plan.expected, plan.count)
      end
    end
  end)

  it("refuses figures that are none", function()
    for _, name in ipairs({ "tokens", "max_tokens", "bandwidth" }) do
      for _, wrong in ipairs({ 0, -1, "many" }) do
        local problem = S.refusal(mesh.plan, { type = "v4-8", slices = 2, [name] = wrong })
        assert.are.equal("misuse", problem.code)
        assert.matches(name .. " must be a positive number", problem.message, 1, true)
      end
    end
  end)

  it("puts data parallelism across slices and fsdp inside first", function()
    local plan = mesh.plan({ type = "v5litepod-16", slices = 2 })
    assert.are.same({ 1, 16, 1 }, plan.layouts[1].ici)
    assert.are.same({ 2, 1, 1 }, plan.layouts[1].dcn)
    for index = 1, 3 do
      assert.is_true(plan.layouts[index].usable)
      local _, sentences = plan.layouts[index].why:gsub("%.$", "")
      assert.are.equal(1, sentences)
      assert.matches("^Data parallelism alone across 2 slices", plan.layouts[index].why)
    end
    assert.is_nil(plan.layouts[4].why)
  end)

  it("ranks what cannot run last, and fsdp and tensor across slices after data", function()
    local plan = mesh.plan({ type = "v5litepod-16", slices = 4 })
    local worst = 0
    local unusable = false
    for _, layout in ipairs(plan.layouts) do
      if not layout.usable then
        unusable = true
      else
        assert.is_false(unusable)
        local class = layout.dcn[3] > 1 and 2 or layout.dcn[2] > 1 and 1 or 0
        assert.is_true(class >= worst)
        worst = class
      end
    end
    assert.is_true(unusable)
    assert.are.equal(2, worst)
  end)

  it("agrees with JAX on what can be placed", function()
    local slice = mesh.devices.grid({ type = "v5litepod-32" })
    for _, layout in ipairs(mesh.plan({ type = "v5litepod-32" }).layouts) do
      local ok = pcall(mesh.placement.create_device_mesh, layout.ici, slice)
      assert.are.equal(ok, layout.placed)
    end
    for _, layout in ipairs(mesh.plan({ type = "v5litepod-32", allow_split = true }).layouts) do
      assert.is_true(layout.placed)
    end
  end)

  it("spans slices with fsdp only when memory forces it", function()
    local plenty =
      mesh.plan({ type = "v5litepod-16", slices = 2, model = { parameters = 1e9 }, tokens = 4e5 })
    assert.are.same({ 2, 1, 1 }, plenty.layouts[1].dcn)
    local tight =
      mesh.plan({ type = "v5litepod-16", slices = 2, model = { parameters = 33e9 }, tokens = 4e5 })
    assert.are.same({ 1, 2, 1 }, tight.layouts[1].dcn)
    assert.matches("one slice cannot hold a whole copy", text(tight.advice))
    assert.matches("larger batch", text(tight.advice))
    local none =
      mesh.plan({ type = "v5litepod-16", slices = 2, model = { parameters = 500e9 }, tokens = 4e5 })
    assert.are.equal(0, none.usable)
    assert.matches("no layout of 2 slices of v5litepod%-16 holds the model", text(none.advice))
    assert.matches("which is too much", none.layouts[1].why)
  end)

  it("compares the tokens of a slice with the guide's and the book's", function()
    local function advice(tokens)
      return text(mesh.plan({ type = "v4-512", slices = 2, model = LLAMA_70B, tokens = tokens }).advice)
    end
    assert.matches("has 500k tokens a step and needs 176k %(350k with margin%)", advice(1e6))
    assert.matches("44k in that of the scaling book: enough, with the margin", advice(1e6))
    assert.matches("enough while DCN loses no packets", advice(4e5))
    assert.matches("too few: data parallelism waits for DCN 1.8 times", advice(2e5))
  end)

  it("asks for a larger batch before it asks for a pipeline", function()
    local plan = mesh.plan({ type = "v4-512", slices = 2, model = LLAMA_70B, tokens = 2e5, max_tokens = 1e6 })
    assert.matches("Raise the batch to 700k tokens", text(plan.advice))
    assert.is_nil(text(plan.advice):find("pipeline:", 1, true))
  end)

  it("pipelines with the least depth that hides DCN, when the batch cannot grow", function()
    local function advice(slices, most)
      return text(mesh.plan({
        type = "v4-512",
        slices = slices,
        model = LLAMA_70B,
        tokens = most,
        max_tokens = most,
      }).advice)
    end
    -- Depth 2 with N/2 replicas.
    assert.matches("depth 2 with 4 replicas gives 400k tokens a pipeline", advice(8, 1.6e6))
    assert.matches("bubble of 20 %% with two", advice(8, 1.6e6))
    -- Depth 4 with N/4: two replicas need 176k only.
    assert.matches("depth 4 with 2 replicas gives 200k tokens a pipeline", advice(8, 4e5))
    assert.matches("depth 8 with 1 replica gives 80k tokens a pipeline", advice(8, 8e4))
    assert.matches("no pipeline depth that divides 3 slices", advice(3, 3e5))
  end)

  it("says that one slice is better than many while one is large enough", function()
    assert.matches(
      "One slice rather than many: 1024 chips are within one v4 slice",
      text(mesh.plan({
        type = "v4-512",
        slices = 4,
      }).advice)
    )
    assert.matches("v4%-2048 %(8x8x16%)", text(mesh.plan({ type = "v4-512", slices = 4 }).advice))
    assert.is_nil(text(mesh.plan({ type = "v4-4096", slices = 4 }).advice):find("One slice", 1, true))
    assert.is_nil(text(mesh.plan({ type = "v4-512" }).advice):find("One slice", 1, true))
  end)

  it("says what one more slice changes", function()
    local one = text(mesh.plan({ type = "v4-512", slices = 1 }).one_more)
    assert.matches("2 slices are 512 devices: dcn_data is 2", one)
    assert.matches("start to cross DCN: 32 bits", one)
    local two = text(mesh.plan({ type = "v4-512", slices = 2, model = LLAMA_70B, tokens = 9e5 }).one_more)
    assert.matches("1.50 times the work", two)
    assert.matches("up to 64 bits a parameter and step instead of 32", two)
    assert.matches("a slice has 300k instead of 450k and needs 352k: too few", two)
    local three = text(mesh.plan({ type = "v4-512", slices = 3 }).one_more)
    assert.is_nil(three:find("bits", 1, true))
    assert.matches("cannot be joined", mesh.plan({ type = "v3-8" }).one_more[1])
  end)

  it("estimates with the numbers of cost", function()
    local plan = mesh.plan({ type = "v4-512", slices = 4, model = LLAMA_70B, tokens = 2e6 })
    local first = plan.layouts[1]
    local memory = mesh.cost.memory({
      type = "v4-512",
      model = LLAMA_70B,
      data = first.ici[1] * first.dcn[1],
      fsdp = first.ici[2] * first.dcn[2],
      tensor = first.ici[3] * first.dcn[3],
      tokens = 2e6,
    })
    assert.are.equal(memory.total, first.memory.total)
    assert.is_true(first.step.seconds > 0)
    assert.matches("of 32.0 GB a device", first.why)
  end)

  it("refuses what does not exist", function()
    assert.are.equal("invalid", S.refusal(mesh.plan, { type = "v4-12" }).code)
    assert.are.equal("misuse", S.refusal(mesh.plan, { type = "v4-8", slices = 0 }).code)
    assert.are.equal("misuse", S.refusal(mesh.plan, { type = "v4-8", slice = 2 }).code)
  end)
end)
