--- What bounds a step: rates of the chips, least tokens for data parallelism over DCN, limits of each parallelism.
--
-- Two arithmetics are kept apart and named. "guide" is the Multislice guide's: FLOP per bit of DCN, 32 bits a
-- parameter for two slices and up to 64 for more, only the backward pass hides it. "book" is scaling-book's: FLOP per
-- byte, bf16 gradients, one copy a slice. They differ mostly in the bandwidth of a v4 host (50 Gbit/s and 2.5e10
-- bytes/s). Advice follows the guide until somebody measures; the bandwidth is always an argument.
--
-- Symbols, as in the book: B tokens, D width, F width of the feed-forward part, P parameters, L layers, C FLOP/s of a
-- chip, W bytes/s of one ICI axis both ways, a = C/W.
local fault = require("ciranda.mesh.fault")
local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local M = {}

--- FLOP of a training step: 2 a parameter and token forward, 4 backward (guide; scaling-book transformers.md).
M.FORWARD, M.BACKWARD = 2, 4
local STEP = M.FORWARD + M.BACKWARD

---@class ciranda.mesh.Chip
---@field generation string
---@field flops number            bf16 FLOP/s
---@field hbm number              bytes
---@field link number?            bytes/s of an ICI link, one way
---@field ici number?             bytes/s of an ICI axis, both ways (W)
---@field chips_per_host integer
---@field dcn_guide number?       bits/s a host
---@field dcn_book number?        bytes/s a host
---@field sources table<string, string>

--- The rates of a chip.
---@param name string|ciranda.mesh.Topology an accelerator type, a generation or a topology
---@return ciranda.mesh.Chip
--- Raises "invalid" when the generation is not known.
function M.chip(name)
  local generation
  if getmetatable(name) == topology.Topology then
    generation = types.generations[name.generation]
  else
    generation = types.generation_of(name)
  end
  if not generation then
    generation = types.generations[types.get(name).generation]
  end
  local own = generation.name
  local function constant(key)
    return (types.constant(own, key))
  end
  local chip = {
    generation = own,
    flops = constant("bf16_flops"),
    hbm = constant("hbm_bytes"),
    link = constant("ici_link"),
    chips_per_host = generation.chips_per_host,
    dcn_guide = constant("dcn_host_guide"),
    dcn_book = constant("dcn_host_book"),
    sources = {},
  }
  for _, key in ipairs({
    "bf16_flops",
    "hbm_bytes",
    "ici_link",
    "dcn_host_guide",
    "dcn_host_book",
    "dcn_chip",
  }) do
    local _, _, source = types.constant(own, key)
    chip.sources[key] = source
  end
  chip.ici = chip.link and 2 * chip.link
  local per_chip = constant("dcn_chip")
  if per_chip then
    chip.dcn_guide = chip.dcn_guide or per_chip * chip.chips_per_host
    chip.dcn_book = chip.dcn_book or per_chip / 8 * chip.chips_per_host
  end
  return chip
end

local function need(value, what, name)
  if not value then
    fault.raise({
      code = "unsupported",
      op = "cost",
      message = ("%s of %s is not known; pass it"):format(what, name),
    })
  end
  return value
end

local function positive(options, name, what)
  local value = options[name]
  if type(value) ~= "number" or value <= 0 then
    fault.misuse("%s: %s must be a positive number, got %s", what, name, tostring(value))
  end
  return value
end

--- An option that may be absent.
local function positive_or_nil(options, name, what)
  return options[name] ~= nil and positive(options, name, what) or nil
end

-- ------------------------------------------------------------------------------- data parallelism over DCN

--- Bits that cross DCN for each parameter in a step (guide): 32 between two slices, up to 64 between more.
---@param slices integer
---@return integer
function M.bits_per_parameter(slices)
  return slices <= 1 and 0 or slices == 2 and 32 or 64
end

--- Two significant figures, as the guide writes its limits.
local function rounded(number)
  if number == 0 then
    return 0
  end
  local unit = 10 ^ (math.floor(math.log(number, 10)) - 1)
  return math.floor(number / unit + 0.5) * unit
end

local TOKENS = { type = true, slices = true, bandwidth = true, exact = true, gradient_bytes = true }

--- Least tokens a slice needs in a step so that DCN hides behind the backward pass, in the guide's arithmetic.
---@param options { type: string, slices: integer?, bandwidth: number? } `bandwidth` bits/s a host; `slices` 2
---@return { arithmetic: string, intensity: number, bits: integer, tokens: number, with_margin: number,
---        bandwidth: number }
---        `intensity` FLOP per bit of DCN; `with_margin` is twice the tokens, in two figures: DCN drops packets
function M.guide(options)
  options = fault.options(options, TOKENS, "cost.guide")
  local chip = M.chip(options.type)
  local bandwidth = positive_or_nil(options, "bandwidth", "cost.guide")
    or need(chip.dcn_guide, "the DCN bandwidth", chip.generation)
  local intensity = chip.flops * chip.chips_per_host / bandwidth
  local bits = M.bits_per_parameter(positive_or_nil(options, "slices", "cost.guide") or 2)
  local tokens = intensity * bits / M.BACKWARD
  return {
    arithmetic = "Multislice guide",
    intensity = intensity,
    bits = bits,
    tokens = tokens,
    with_margin = rounded(2 * tokens),
    bandwidth = bandwidth,
  }
end

--- The same in the book's arithmetic: C * chips a host / bytes/s a host, whatever the size of the slice.
---@param options { type: string, slices: integer?, bandwidth: number?, exact: boolean?, gradient_bytes: number? }
---       `bandwidth` bits/s a host; `exact` counts the ring's (N-1)/N of N slices; `gradient_bytes` 2, fp32 doubles it
---@return { arithmetic: string, intensity: number, tokens: number, bandwidth: number } `intensity` FLOP per byte
function M.book(options)
  options = fault.options(options, TOKENS, "cost.book")
  local chip = M.chip(options.type)
  local bits = positive_or_nil(options, "bandwidth", "cost.book")
  local bytes = bits and bits / 8 or need(chip.dcn_book, "the DCN bandwidth", chip.generation)
  local slices = positive_or_nil(options, "slices", "cost.book") or 2
  local intensity = chip.flops * chip.chips_per_host / bytes
  local tokens = intensity * (options.gradient_bytes or 2) / 2
  if options.exact then
    tokens = tokens * (slices - 1) / slices
  end
  return { arithmetic = "scaling-book", intensity = intensity, tokens = tokens, bandwidth = bytes * 8 }
end

--- For any model: whether the reduction over DCN hides behind a backward pass that was measured or counted.
---@param options { type: string?, topology: ciranda.mesh.Topology?, backward_seconds: number, parameters: number,
---       slices: integer?, bandwidth: number?, bits: number? }
---       `backward_seconds` of one slice; `parameters` a slice reduces; `bandwidth` bits/s a host; `bits` a parameter
---@return { seconds: number, hidden: boolean, ratio: number, bits: number, bandwidth: number }
---        `seconds` of the reduction, `ratio` to the backward pass, `bandwidth` bits/s of the slice
function M.dcn(options)
  options = fault.options(options, {
    type = true,
    topology = true,
    backward_seconds = true,
    parameters = true,
    slices = true,
    bandwidth = true,
    bits = true,
  }, "cost.dcn")
  local shape = topology.of(options.topology or options.type)
  local chip = M.chip(shape)
  local backward = positive(options, "backward_seconds", "cost.dcn")
  local parameters = positive(options, "parameters", "cost.dcn")
  local host = positive_or_nil(options, "bandwidth", "cost.dcn")
    or need(chip.dcn_guide, "the DCN bandwidth", chip.generation)
  local bits = positive_or_nil(options, "bits", "cost.dcn")
    or M.bits_per_parameter(positive_or_nil(options, "slices", "cost.dcn") or 2)
  local bandwidth = host * shape.chips / math.min(chip.chips_per_host, shape.chips)
  local seconds = parameters * bits / bandwidth
  return {
    seconds = seconds,
    hidden = seconds <= backward,
    ratio = seconds / backward,
    bits = bits,
    bandwidth = bandwidth,
  }
end

-- -------------------------------------------------------------------------------------- limits inside a slice

--- a = C/W: FLOP a chip does while a byte crosses one ICI axis (scaling-book training.md).
---@param name string|ciranda.mesh.Topology
---@return number
function M.intensity(name)
  local chip = M.chip(name)
  return chip.flops / need(chip.ici, "the ICI bandwidth", chip.generation)
end

--- Least tokens a chip for data parallelism or FSDP to be bound by compute: a / axes.
---@param options { type: string, axes: integer? } `axes` of the torus the collective uses, 1 when absent
---@return number
function M.fsdp_limit(options)
  options = fault.options(options, { type = true, axes = true }, "cost.fsdp_limit")
  return M.intensity(options.type) / (options.axes or 1)
end

--- Most ways of tensor parallelism that stay bound by compute: axes * F / a.
---@param options { type: string, ff: number, axes: integer? }
---@return number
function M.tensor_limit(options)
  options = fault.options(options, { type = true, ff = true, axes = true }, "cost.tensor_limit")
  return (options.axes or 1) * positive(options, "ff", "cost.tensor_limit") / M.intensity(options.type)
end

--- FSDP and tensor parallelism together: the best split, and the least tokens a chip.
---@param options { type: string, ff: number, tokens: number, chips: integer, fsdp_axes: integer?,
---       tensor_axes: integer? } axes of the torus for each, 2 and 1 when absent
---@return { fsdp: number, tokens_per_chip: number, compute_bound: boolean, layout: { fsdp: integer, tensor: integer } }
---        `fsdp` the best number of ways, `layout` the powers of two nearest to it
function M.mixed(options)
  options = fault.options(options, {
    type = true,
    ff = true,
    tokens = true,
    chips = true,
    fsdp_axes = true,
    tensor_axes = true,
  }, "cost.mixed")
  local ff, tokens = positive(options, "ff", "cost.mixed"), positive(options, "tokens", "cost.mixed")
  local chips = positive(options, "chips", "cost.mixed")
  local mx, my = options.fsdp_axes or 2, options.tensor_axes or 1
  local a = M.intensity(options.type)
  local best = math.sqrt(tokens / ff * mx / my * chips)
  local least = 4 * a * a / (mx * my * ff)
  local fsdp = 2 ^ math.floor(math.log(best, 2) + 0.5)
  local tensor = 2 ^ math.max(0, math.floor(math.log(chips / fsdp, 2) + 0.5))
  return {
    fsdp = best,
    tokens_per_chip = least,
    compute_bound = tokens / chips > least,
    layout = { fsdp = math.tointeger(fsdp), tensor = math.tointeger(tensor) },
  }
end

--- FLOP and bytes of one feed-forward layer (scaling-book training.md), bf16, over all chips of the axis.
---@param options { tokens: number, width: number, ff: number, fsdp: integer?, tensor: integer? }
---@return { flops: { forward: number, backward: number }, bytes: table<string, { forward: number, backward: number }> }
---        bytes of "data", "fsdp", "tensor" and "both"
function M.layer(options)
  options = fault.options(
    options,
    { tokens = true, width = true, ff = true, fsdp = true, tensor = true },
    "cost.layer"
  )
  local b, d = positive(options, "tokens", "cost.layer"), positive(options, "width", "cost.layer")
  local f = positive(options, "ff", "cost.layer")
  local x, y = options.fsdp or 1, options.tensor or 1
  return {
    flops = { forward = 4 * b * d * f, backward = 8 * b * d * f },
    bytes = {
      data = { forward = 0, backward = 8 * d * f },
      fsdp = { forward = 4 * d * f, backward = 8 * d * f },
      tensor = { forward = 4 * b * d, backward = 4 * b * d },
      both = { forward = 4 * b * d / x + 4 * d * f / y, backward = 8 * b * d / x + 8 * d * f / y },
    },
  }
end

--- FLOP a byte of gathering keys and values for context parallelism (MaxText docs, sharding.md).
---@param options { sequence: number, heads: number, kv_heads: number, context: integer }
---@return number
function M.context_intensity(options)
  options = fault.options(
    options,
    { sequence = true, heads = true, kv_heads = true, context = true },
    "cost.context_intensity"
  )
  return positive(options, "sequence", "cost.context_intensity")
    * positive(options, "heads", "cost.context_intensity")
    / (
      positive(options, "kv_heads", "cost.context_intensity")
      * positive(options, "context", "cost.context_intensity")
    )
end

-- -------------------------------------------------------------------------------------------- pipelines

--- The part of the time stages stand still: (stages-1) / (repeats*microbatches + stages-1).
---@param options { stages: integer, microbatches: integer?, repeats: integer? } microbatches are 2 a stage when
---       absent, as MaxText recommends; repeats above 1 are the circular schedule
---@return number
function M.bubble(options)
  options = fault.options(options, { stages = true, microbatches = true, repeats = true }, "cost.bubble")
  local stages = positive(options, "stages", "cost.bubble")
  local idle = stages - 1
  return idle / ((options.repeats or 1) * (options.microbatches or 2 * stages) + idle)
end

--- FLOP a byte that crosses between stages: 3/2 * layers a stage * F * experts a token (MaxText docs, sharding.md).
---@param options { layers_per_stage: integer, ff: number, experts_per_token: integer? }
---@return number
function M.pipeline_intensity(options)
  options = fault.options(
    options,
    { layers_per_stage = true, ff = true, experts_per_token = true },
    "cost.pipeline_intensity"
  )
  return 1.5
    * positive(options, "layers_per_stage", "cost.pipeline_intensity")
    * positive(options, "ff", "cost.pipeline_intensity")
    * (options.experts_per_token or 1)
end

-- ------------------------------------------------------------------------------------- whole pods and runs

--- A whole pod.
---@param name string a generation or an accelerator type
---@return { chips: integer, hosts: integer, cores: integer, flops: number, hbm: number, dcn: number? }
---        `dcn` bytes/s out of the pod, in the book's figures
function M.pod(name)
  local chip = M.chip(name)
  local generation = types.generations[chip.generation]
  local hosts = generation.pod_chips // generation.chips_per_host
  return {
    chips = generation.pod_chips,
    hosts = hosts,
    cores = generation.pod_chips * generation.cores_per_chip,
    flops = generation.pod_chips * chip.flops,
    hbm = generation.pod_chips * chip.hbm,
    dcn = chip.dcn_book and hosts * chip.dcn_book,
  }
end

--- How long training takes: 6 FLOP a parameter and token.
---@param options { type: string, parameters: number, tokens: number, chips: integer, utilization: number }
---       `utilization` of the peak, 0 to 1
---@return { flops_per_token: number, flops: number, seconds: number }
function M.training(options)
  options = fault.options(options, {
    type = true,
    parameters = true,
    tokens = true,
    chips = true,
    utilization = true,
  }, "cost.training")
  local per_token = STEP * positive(options, "parameters", "cost.training")
  local flops = per_token * positive(options, "tokens", "cost.training")
  local rate = positive(options, "chips", "cost.training") * M.chip(options.type).flops
  return {
    flops_per_token = per_token,
    flops = flops,
    seconds = flops / (rate * positive(options, "utilization", "cost.training")),
  }
end

--- Moving an array from one chip to another (scaling-book tpus.md): bytes over the links it leaves by, and a
-- microsecond a hop.
---@param options { type: string, bytes: number, hops: integer, links: integer?, hop_seconds: number? } `links` 2
---@return { bandwidth_seconds: number, seconds: number }
function M.transfer(options)
  options = fault.options(options, {
    type = true,
    bytes = true,
    hops = true,
    links = true,
    hop_seconds = true,
  }, "cost.transfer")
  local chip = M.chip(options.type)
  local seconds = positive(options, "bytes", "cost.transfer")
    / ((options.links or 2) * need(chip.link, "the ICI bandwidth", chip.generation))
  return {
    bandwidth_seconds = seconds,
    seconds = seconds + (options.hops or 0) * (options.hop_seconds or 1e-6),
  }
end

--- RAM that checkpoints in memory take on each host (MaxText multi-tier checkpointing): fp32 parameters and both
-- moments, 12 bytes a parameter, two of them, 15 % more.
---@param options { parameters: number, hosts: integer, bytes_per_parameter: number?, copies: number?, margin: number? }
---@return { bytes: number, per_host: number, ram: number }
function M.checkpoint(options)
  options = fault.options(options, {
    parameters = true,
    hosts = true,
    bytes_per_parameter = true,
    copies = true,
    margin = true,
  }, "cost.checkpoint")
  local bytes = positive(options, "parameters", "cost.checkpoint") * (options.bytes_per_parameter or 12)
  local per_host = bytes / positive(options, "hosts", "cost.checkpoint")
  return {
    bytes = bytes,
    per_host = per_host,
    ram = per_host * (options.copies or 2) * (options.margin or 1.15),
  }
end

--- Whether a checkpoint can be on disk before the machine goes: up to two steps and the skew between workers, one
-- second of polling, the write, the commit.
---@param options { step_seconds: number, bytes_per_host: number, write_bandwidth: number, skew: number?,
---       barrier_seconds: number?, limit: number? } `skew` in steps; `limit` 300 s (autocheckpoint); GKE Spot has 15
---@return { seconds: number, limit: number, fits: boolean }
function M.grace(options)
  options = fault.options(options, {
    step_seconds = true,
    bytes_per_host = true,
    write_bandwidth = true,
    skew = true,
    barrier_seconds = true,
    limit = true,
  }, "cost.grace")
  local seconds = positive(options, "step_seconds", "cost.grace") * (2 + (options.skew or 0))
    + 1
    + positive(options, "bytes_per_host", "cost.grace") / positive(options, "write_bandwidth", "cost.grace")
    + (options.barrier_seconds or 0)
  local limit = options.limit or 300
  return { seconds = seconds, limit = limit, fits = seconds < limit }
end

return M
