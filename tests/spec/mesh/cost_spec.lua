local mesh = require("ciranda.mesh")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local cost = mesh.cost

--- Within a part of a thousand, or of what is given.
local function near(expected, actual, part)
  local ok = math.abs(actual - expected) <= math.abs(expected) * (part or 1e-3)
  assert(ok, ("expected %.6g, got %.6g"):format(expected, actual))
end

describe("least tokens for data parallelism over DCN", function()
  it("are the guide's for v4: 22,000 FLOP a bit, 176k and 352k, 350k and 700k with margin", function()
    local two = cost.guide({ type = "v4", slices = 2 })
    assert.are.equal(22000, two.intensity)
    assert.are.equal(32, two.bits)
    assert.are.equal(176000, two.tokens)
    assert.are.equal(350000, two.with_margin)
    local many = cost.guide({ type = "v4-4096", slices = 16 })
    assert.are.equal(64, many.bits)
    assert.are.equal(352000, many.tokens)
    assert.are.equal(700000, many.with_margin)
    assert.are.equal("Multislice guide", many.arithmetic)
  end)

  it("are the book's for each chip", function()
    for name, tokens in pairs({ v4 = 44000, v5e = 63040, v5p = 73440, v6e = 73440, tpu7x = 184560 }) do
      local book = cost.book({ type = name })
      near(tokens, book.tokens, 1e-9)
      assert.are.equal("scaling-book", book.arithmetic)
    end
    assert.are.equal(22000, cost.book({ type = "v4", slices = 2, exact = true }).tokens)
    assert.are.equal(88000, cost.book({ type = "v4", gradient_bytes = 4 }).tokens)
  end)

  it("differ for v4 by the bandwidth only: four times in bits, and what is counted", function()
    local guide, book = cost.guide({ type = "v4", slices = 2 }), cost.book({ type = "v4" })
    assert.are.equal(4, book.bandwidth / guide.bandwidth)
    assert.are.equal(176000, cost.book({ type = "v4", bandwidth = guide.bandwidth }).tokens)
  end)

  it("halve with twice the bandwidth, in both", function()
    for _, arithmetic in ipairs({ cost.guide, cost.book }) do
      for _, name in ipairs({ "v4", "v5e", "v5p", "v6e", "tpu7x" }) do
        local once = arithmetic({ type = name, slices = 4, bandwidth = 1e11 })
        local twice = arithmetic({ type = name, slices = 4, bandwidth = 2e11 })
        near(once.tokens / 2, twice.tokens, 1e-12)
      end
    end
  end)

  it("are none for one slice", function()
    assert.are.equal(0, cost.guide({ type = "v4", slices = 1 }).tokens)
    assert.are.equal(0, cost.guide({ type = "v4", slices = 1 }).with_margin)
  end)

  it("need a bandwidth where none is documented", function()
    assert.are.equal("unsupported", S.refusal(cost.guide, { type = "v2" }).code)
    assert.is_true(cost.guide({ type = "v2", bandwidth = 1e10 }).tokens > 0)
    assert.are.equal("misuse", S.refusal(cost.guide, { type = "v4", slice = 2 }).code)
    for _, wrong in ipairs({ 0, -1, "50" }) do
      assert.are.equal("misuse", S.refusal(cost.guide, { type = "v4", bandwidth = wrong }).code)
      assert.are.equal("misuse", S.refusal(cost.book, { type = "v4", bandwidth = wrong }).code)
      local options = { type = "v4-8", backward_seconds = 1, parameters = 1e9, bandwidth = wrong }
      assert.are.equal("misuse", S.refusal(cost.dcn, options).code)
      assert.are.equal("misuse", S.refusal(cost.guide, { type = "v4", slices = wrong }).code)
    end
  end)

  it("can be had for any model by the time of its backward pass", function()
    -- 16 hosts of 50 Gbit/s carry 32 bits for each of 1e9 parameters in 40 ms.
    local fits = cost.dcn({ type = "v4-128", backward_seconds = 0.05, parameters = 1e9, slices = 2 })
    near(0.04, fits.seconds, 1e-9)
    assert.is_true(fits.hidden)
    near(0.8, fits.ratio, 1e-9)
    assert.are.equal(8e11, fits.bandwidth)
    assert.is_false(
      cost.dcn({ type = "v4-128", backward_seconds = 0.05, parameters = 1e9, slices = 4 }).hidden
    )
    near(
      0.02,
      cost.dcn({ type = "v4-128", backward_seconds = 1, parameters = 1e9, bandwidth = 1e11 }).seconds,
      1e-9
    )
    assert.are.equal("misuse", S.refusal(cost.dcn, { type = "v4-8", parameters = 1e9 }).code)
  end)

  it("agree with the step: at the guide's tokens DCN takes as long as the backward pass", function()
    local tokens = cost.guide({ type = "v4", slices = 2 }).tokens
    local step = cost.step({
      type = "v4-128",
      ici = { fsdp = 64 },
      dcn = { data = 2 },
      model = { parameters = 1e9 },
      tokens = 2 * tokens,
    })
    near(step.backward_seconds, step.dcn.data.seconds, 1e-9)
  end)
end)

describe("limits inside a slice", function()
  it("are the book's intensities", function()
    for name, value in pairs({ v4 = 3056, v5p = 2550, v5e = 2189, v6e = 5100 }) do
      near(value, cost.intensity(name), 2e-4)
    end
  end)

  it("are the least tokens a chip for FSDP", function()
    assert.are.equal(2550, cost.fsdp_limit({ type = "v5p" }))
    assert.are.equal(850, cost.fsdp_limit({ type = "v5p", axes = 3 }))
    -- LLaMA-2 13B on 16x16x16: 3M tokens are too few.
    near(3.48e6, cost.fsdp_limit({ type = "v5p", axes = 3 }) * 4096)
    assert.is_true(cost.fsdp_limit({ type = "v5p", axes = 3 }) * 4096 > 3e6)
  end)

  it("let 8 ways of tensor parallelism work for LLaMA 70B and 16 not; 19 for Gemma 7B", function()
    local llama = cost.tensor_limit({ type = "v5p", ff = 28672 })
    assert.is_true(8 < llama and llama < 16)
    assert.are.equal(19, cost.tensor_limit({ type = "v5p", ff = 49152 }) // 1)
  end)

  it("find the best split of FSDP and tensor parallelism", function()
    local llama = cost.mixed({ type = "v5p", ff = 28672, tokens = 4.19e6, chips = 8960 })
    near(1618, llama.fsdp)
    near(453, llama.tokens_per_chip, 2e-3)
    assert.is_true(llama.compute_bound)
    assert.are.same({ fsdp = 2048, tensor = 4 }, llama.layout)
    near(468, 4.19e6 / 8960)
    local small = cost.mixed({ type = "v5p", ff = 32768, tokens = 48000, chips = 64 })
    near(13.69, small.fsdp)
    near(396.9, small.tokens_per_chip)
    assert.are.same({ fsdp = 16, tensor = 4 }, small.layout)
    near(940, cost.mixed({ type = "v5p", ff = 13824, tokens = 3e6, chips = 4096 }).tokens_per_chip)
    assert.is_false(cost.mixed({ type = "v5p", ff = 13824, tokens = 3e6, chips = 4096 }).compute_bound)
  end)

  it("count FLOP and bytes of a layer", function()
    local layer = cost.layer({ tokens = 100, width = 10, ff = 40, fsdp = 2, tensor = 4 })
    assert.are.same({ forward = 4 * 100 * 400, backward = 8 * 100 * 400 }, layer.flops)
    assert.are.same({ forward = 0, backward = 3200 }, layer.bytes.data)
    assert.are.same({ forward = 1600, backward = 3200 }, layer.bytes.fsdp)
    assert.are.same({ forward = 4000, backward = 4000 }, layer.bytes.tensor)
    assert.are.equal(4000 / 2 + 1600 / 4, layer.bytes.both.forward)
    assert.are.equal(8000 / 2 + 3200 / 4, layer.bytes.both.backward)
  end)

  it("count what context parallelism gathers", function()
    assert.are.equal(8192, cost.context_intensity({ sequence = 4096, heads = 64, kv_heads = 8, context = 4 }))
  end)
end)

describe("pipelines", function()
  it("stand still for the bubble", function()
    near(0.42857, cost.bubble({ stages = 4, microbatches = 4 }), 1e-4)
    near(0.27273, cost.bubble({ stages = 4, microbatches = 8 }), 1e-4)
    near(0.15789, cost.bubble({ stages = 4, microbatches = 8, repeats = 2 }), 1e-4)
    near(0.12727, cost.bubble({ stages = 8, microbatches = 16, repeats = 3 }), 1e-4)
    near(0.2, cost.bubble({ stages = 2, microbatches = 4 }), 1e-9)
    near(0.2, cost.bubble({ stages = 2 }), 1e-9)
    assert.are.equal(0, cost.bubble({ stages = 1 }))
  end)

  it("have MaxText's intensity", function()
    assert.are.equal(1.5 * 8 * 28672, cost.pipeline_intensity({ layers_per_stage = 8, ff = 28672 }))
    assert.are.equal(
      3 * 8 * 1024,
      cost.pipeline_intensity({ layers_per_stage = 8, ff = 1024, experts_per_token = 2 })
    )
  end)
end)

describe("whole pods and runs", function()
  it("are the book's", function()
    local v5p = cost.pod("v5p")
    assert.are.equal(2240, v5p.hosts)
    near(4.11e18, v5p.flops)
    near(5.6e13, v5p.dcn)
    near(73440, v5p.flops / v5p.dcn)
    local v5e = cost.pod("v5e")
    assert.are.equal(32, v5e.hosts)
    assert.are.equal(256, v5e.cores)
    near(5.1e16, v5e.flops, 0.02)
    near(4e12, v5e.hbm, 0.03)
  end)

  it("train LLaMA-3 70B in 44 days", function()
    local run =
      cost.training({ type = "v5p", parameters = 70e9, tokens = 15e12, chips = 8960, utilization = 0.4 })
    near(4.2e11, run.flops_per_token)
    near(6.3e24, run.flops)
    near(3.8e6, run.seconds, 0.01)
    near(44, run.seconds / 86400, 0.01)
  end)

  it("move an array from corner to corner of a v5e 4x4 in 194 us", function()
    local move = cost.transfer({ type = "v5e", bytes = 1.7e7, hops = 6 })
    near(188e-6, move.bandwidth_seconds, 0.01)
    near(194e-6, move.seconds, 0.01)
  end)

  it("keep checkpoints of 70B parameters in 60.4 GB a host", function()
    local kept = cost.checkpoint({ parameters = 70e9, hosts = 32 })
    near(840e9, kept.bytes)
    near(26.25e9, kept.per_host)
    near(60.4e9, kept.ram)
    near(52.5e9, cost.checkpoint({ parameters = 70e9, hosts = 32, margin = 1 }).ram)
  end)

  it("say whether a checkpoint fits in the grace", function()
    local fits = cost.grace({ step_seconds = 10, bytes_per_host = 26.25e9, write_bandwidth = 1e9 })
    near(47.25, fits.seconds)
    assert.is_true(fits.fits)
    assert.is_false(
      cost.grace({ step_seconds = 10, bytes_per_host = 26.25e9, write_bandwidth = 1e9, limit = 15 }).fits
    )
    near(
      60.25,
      cost.grace({
        step_seconds = 10,
        bytes_per_host = 26.25e9,
        write_bandwidth = 1e9,
        skew = 1,
        barrier_seconds = 3,
      }).seconds
    )
  end)

  it("cite the source of every rate", function()
    for _, name in ipairs({ "v3", "v4", "v5e", "v5p", "v6e", "tpu7x" }) do
      local chip = cost.chip(name)
      assert.is_true(#chip.sources.bf16_flops > 5)
      assert.is_true(#chip.sources.hbm_bytes > 5)
      assert.is_true(#chip.sources.ici_link > 5)
      assert.are.equal(2 * chip.link, chip.ici)
    end
    assert.are.equal("invalid", S.refusal(cost.chip, "v9").code)
  end)
end)

describe("models", function()
  local LLAMA_13B = { layers = 40, width = 5120, ff = 13824, heads = 40, head_size = 128, vocabulary = 32000 }
  local LLAMA_70B = {
    layers = 80,
    width = 8192,
    ff = 28672,
    heads = 64,
    kv_heads = 8,
    head_size = 128,
    vocabulary = 128256,
  }

  it("have the parameters of LLaMA-2 13B and LLaMA-3 70B", function()
    local small = cost.model(LLAMA_13B)
    near(8.5e9, small.parts.ff, 5e-3)
    near(4.2e9, small.parts.attention, 5e-3)
    near(0.33e9, small.parts.vocabulary, 1e-2)
    near(13.1e9, small.parameters, 1e-2)
    local large = cost.model(LLAMA_70B)
    near(56.3e9, large.parts.ff, 2e-3)
    near(12e9, large.parts.attention, 1e-2)
    near(2.1e9, large.parts.vocabulary, 1e-2)
    near(70.4e9, large.parameters, 3e-3)
  end)

  it("may be given by their number of parameters, or again", function()
    assert.are.equal(7e9, cost.model({ parameters = 7e9 }).parameters)
    local model = cost.model(LLAMA_13B)
    assert.are.equal(model, cost.model(model))
    assert.are.equal(2 / 3, cost.model({
      layers = 1,
      width = 8,
      heads = 2,
      gated = false,
    }).parts.ff / cost.model({ layers = 1, width = 8, heads = 2 }).parts.ff)
  end)

  it("are refused without sizes", function()
    assert.are.equal("invalid", S.refusal(cost.model, { layers = 4 }).code)
    assert.are.equal("invalid", S.refusal(cost.model, { parameters = -1 }).code)
    assert.are.equal("misuse", S.refusal(cost.model, { params = 1e9 }).code)
  end)

  it("need 130 GB for 13B in pure data parallelism: too much for v5p", function()
    local memory = cost.memory({ type = "v5p", model = LLAMA_13B, data = 16 })
    near(130e9, memory.state, 5e-3)
    assert.is_false(memory.fits)
    near(9e9, cost.largest_replicated("v5p"), 0.06)
  end)

  it("need 140 GB of parameters and 560 GB of optimizer for 70B", function()
    local memory = cost.memory({ type = "v5p", model = { parameters = 70e9 } })
    near(140e9, memory.parameters)
    near(560e9, memory.optimizer)
    assert.is_nil(memory.activations)
  end)

  it("keep the book's activations", function()
    local whole = cost.memory({ type = "v5p", model = LLAMA_13B, tokens = 16e6 })
    near(4.2e13, whole.activations, 2e-3)
    near(7.86e12, cost.memory({ type = "v5p", model = LLAMA_13B, tokens = 3e6 }).activations, 1e-3)
    local less = cost.memory({ type = "v5p", model = LLAMA_13B, tokens = 3e6, remat = "full" })
    near(7.86e12 * 5120 / (5120 + 2 * 13824), less.activations, 1e-3)
    assert.are.equal(
      "misuse",
      S.refusal(cost.memory, { type = "v5p", model = LLAMA_13B, tokens = 1, remat = "x" }).code
    )
  end)

  it("halve their state with twice the fsdp, and the optimizer with ZeRO-1", function()
    local once = cost.memory({ type = "v5p", model = LLAMA_70B, fsdp = 8, tokens = 1e6 })
    local twice = cost.memory({ type = "v5p", model = LLAMA_70B, fsdp = 16, tokens = 1e6 })
    near(once.state / 2, twice.state, 1e-12)
    near(once.activations / 2, twice.activations, 1e-12)
    near(2 * cost.model(LLAMA_70B).parameters / 80, once.gathered, 1e-12)
    local zero = cost.memory({ type = "v5p", model = LLAMA_70B, fsdp = 8, data = 4, shard_optimizer = true })
    near(once.optimizer / 4, zero.optimizer, 1e-12)
  end)

  it("give each device of a TPU7x half of its chip's memory", function()
    near(96 * 2 ^ 30, cost.memory({ type = "tpu7x", model = { parameters = 1e9 } }).hbm, 1e-12)
  end)

  it("count shardings.py as the script does", function()
    local run = cost.shardings({ devices = 16 })
    assert.are.equal(2 * 4 * 2048 * 2048 * 4, run.parameters)
    assert.are.equal(2 * run.parameters, run.parameter_bytes)
    assert.are.equal(2 * 16 * 131072 * 5 * 2048 * 4, run.activation_bytes)
    near(6 * run.parameters * 131072 / 1e12, run.tflop, 1e-12)
  end)
end)

describe("a step", function()
  local function step(more)
    local options = {
      type = "v4-128",
      ici = { fsdp = 64 },
      dcn = { data = 4 },
      model = { parameters = 10e9, layers = 32, width = 4096 },
      tokens = 4e6,
    }
    for key, value in pairs(more or {}) do
      options[key] = value
    end
    return cost.step(options)
  end

  it("takes 6 FLOP a parameter and token", function()
    local one = step()
    near(6 * 10e9 * 4e6 / (256 * 2.75e14), one.compute_seconds, 1e-12)
    near(one.compute_seconds * 2 / 3, one.backward_seconds, 1e-12)
    assert.are.equal("compute", one.bound)
    assert.are.equal(1, one.utilization)
  end)

  it("moves bytes by axis over ICI and DCN", function()
    local one = step()
    near(6 * 10e9 * 63 / 64, one.ici.fsdp.bytes, 1e-12)
    assert.are.equal(0, one.ici.tensor.bytes)
    assert.are.equal(10e9 * 64 / 8, one.dcn.data.bytes)
    assert.are.equal(10e9 * 32 / 8, step({ dcn = { data = 2 } }).dcn.data.bytes)
    near(8 * 10e9 * 3 / 4, step({ dcn = { fsdp = 4 } }).dcn.fsdp.bytes, 1e-12)
    near(
      16 * 4e6 / 4 * 4096 * 32 / 16 * 3 / 4,
      step({ ici = { fsdp = 16, tensor = 4 } }).ici.tensor.bytes,
      1e-12
    )
  end)

  it("waits half as long with twice the bandwidth", function()
    local slow = step({ bandwidth = 1e9 })
    local fast = step({ bandwidth = 2e9 })
    near(slow.dcn.data.seconds / 2, fast.dcn.data.seconds, 1e-12)
    assert.are.equal("DCN", slow.bound)
    assert.is_true(slow.seconds > fast.seconds)
    assert.is_true(slow.utilization < 1)
  end)

  it("is bound by ICI when the batch is small, less with more of the torus", function()
    local one = step({ tokens = 1e5, dcn = { data = 1 } })
    assert.are.equal("ICI", one.bound)
    local three = step({ tokens = 1e5, dcn = { data = 1 }, torus_axes = { fsdp = 3 } })
    near(one.ici.fsdp.seconds / 3, three.ici.fsdp.seconds, 1e-12)
  end)

  it("takes longer by the bubble of a pipeline", function()
    local piped = step({ dcn = { data = 2, stage = 2 }, microbatches = 4 })
    near(0.2, piped.bubble, 1e-12)
    near(step().compute_seconds / 0.8, piped.compute_seconds, 1e-12)
    near(10e9 / 2 * 32 / 8, piped.dcn.data.bytes, 1e-12)
    assert.is_true(piped.dcn.stage.bytes > 0)
  end)

  it("takes twice as long over a line as over a ring", function()
    local line =
      cost.step({ type = "v4-64", ici = { fsdp = 32 }, model = { parameters = 1e9 }, tokens = 1e6 })
    local ring =
      cost.step({ type = "v4-128", ici = { fsdp = 64 }, model = { parameters = 1e9 }, tokens = 2e6 })
    near(2 * ring.ici.fsdp.seconds * (31 / 32) / (63 / 64), line.ici.fsdp.seconds, 1e-12)
  end)

  it("is refused where there is no formula", function()
    assert.are.equal("unsupported", S.refusal(step, { ici = { expert = 64 } }).code)
    assert.are.equal("invalid", S.refusal(step, { ici = { tensor = 64 }, model = { parameters = 1e9 } }).code)
    assert.are.equal(
      "unsupported",
      S.refusal(cost.step, {
        type = "v2-8",
        ici = { fsdp = 8 },
        model = { parameters = 1e9 },
        tokens = 1e6,
      }).code
    )
    assert.are.equal(
      "unsupported",
      S.refusal(cost.step, {
        type = "v3-8",
        ici = { fsdp = 8 },
        dcn = { data = 2 },
        model = { parameters = 1e9 },
        tokens = 1e6,
      }).code
    )
    assert.are.equal("misuse", S.refusal(step, { ici = { fsdp = 0 } }).code)
  end)
end)
