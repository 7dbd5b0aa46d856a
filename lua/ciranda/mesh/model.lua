--- A transformer's parameters, and the memory each chip needs for it.
local cost = require("ciranda.mesh.cost")
local fault = require("ciranda.mesh.fault")

local M = {}

--- Marks what `of` made, so that it can be given again.
local Model = {}

---@class ciranda.mesh.Model
---@field parameters number
---@field layers integer?
---@field width integer?        D
---@field ff integer?           F
---@field parts { ff: number, attention: number, vocabulary: number }?  parameters of each, when counted

-- Values a layer keeps for the backward pass, as multiples of D and of F (scaling-book transformers.md for "block";
-- "full" keeps a layer's input, "none" everything a gated layer computes). Estimates.
M.REMAT = { full = { 1, 0 }, block = { 1, 2 }, none = { 8, 3 } }

local SHAPE = {
  parameters = true,
  layers = true,
  width = true,
  ff = true,
  heads = true,
  kv_heads = true,
  head_size = true,
  vocabulary = true,
  gated = true,
}

--- Reads a model: its sizes, or its number of parameters, or both.
---@param spec ciranda.mesh.Model|{ parameters: number?, layers: integer?, width: integer?, ff: integer?,
---       heads: integer?, kv_heads: integer?, head_size: integer?, vocabulary: integer?, gated: boolean? }
---       `ff` is 4 * width when absent, `kv_heads` as `heads`, `head_size` width/heads, `vocabulary` 0;
---       `gated = false` for two matrices a feed-forward layer instead of three
---@return ciranda.mesh.Model
--- Raises "invalid" when neither parameters nor layers, width and heads are given.
function M.of(spec)
  if getmetatable(spec) == Model then
    return spec
  end
  spec = fault.options(spec, SHAPE, "model")
  for name, value in pairs(spec) do
    if name ~= "gated" and (type(value) ~= "number" or value <= 0 or value ~= value) then
      fault.raise({
        op = "model",
        message = ("%s must be a positive number, got %s"):format(name, tostring(value)),
      })
    end
  end
  local d, l = spec.width, spec.layers
  local f = spec.ff or (d and 4 * d)
  local parts
  if d and l and spec.heads then
    local head = spec.head_size or d / spec.heads
    local kv = spec.kv_heads or spec.heads
    parts = {
      ff = (spec.gated == false and 2 or 3) * l * d * f,
      attention = 2 * l * d * head * (spec.heads + kv),
      vocabulary = 2 * (spec.vocabulary or 0) * d,
    }
  elseif not spec.parameters then
    fault.raise({ op = "model", message = "a model needs parameters=, or layers=, width= and heads=" })
  end
  return setmetatable({
    parameters = spec.parameters or parts.ff + parts.attention + parts.vocabulary,
    layers = l,
    width = d,
    ff = f,
    parts = parts,
  }, Model)
end

--- What MaxText's shardings.py runs: layers of two matrices D x 4D, as the script itself counts them.
---@param options { embedding_dimension: integer?, num_layers: integer?, batch_size: integer?, devices: integer }
---       `batch_size` a device; the script's defaults when absent
---@return { parameters: number, parameter_bytes: number, activation_bytes: number, tflop: number }
---        bytes of all devices together; `tflop` of a step, each device
function M.shardings(options)
  options = fault.options(options, {
    embedding_dimension = true,
    num_layers = true,
    batch_size = true,
    devices = true,
  }, "model.shardings")
  local d, layers = options.embedding_dimension or 2048, options.num_layers or 4
  local each = options.batch_size or 131072
  local parameters = 2 * 4 * d * d * layers
  return {
    parameters = parameters,
    parameter_bytes = 2 * parameters,
    activation_bytes = 2 * each * options.devices * (4 * d + d) * layers,
    tflop = (cost.FORWARD + cost.BACKWARD) * parameters * each / 1e12,
  }
end

local MEMORY = {
  type = true,
  model = true,
  data = true,
  fsdp = true,
  tensor = true,
  stages = true,
  tokens = true,
  remat = true,
  parameter_bytes = true,
  optimizer_bytes = true,
  gradient_bytes = true,
  shard_optimizer = true,
}

--- Bytes of HBM each chip needs.
--
-- State is 10 bytes a parameter: bf16 parameters and two fp32 moments (scaling-book training.md). Activations are an
-- estimate by what is kept for the backward pass.
---@param options { type: string, model: ciranda.mesh.Model|table, data: integer?, fsdp: integer?, tensor: integer?,
---       stages: integer?, tokens: number?, remat: string?, parameter_bytes: number?, optimizer_bytes: number?,
---       gradient_bytes: number?, shard_optimizer: boolean? }
---       ways of each parallelism over ICI and DCN together; `tokens` of a whole step; `remat` one of `M.REMAT`,
---       "block" when absent; 2, 8 and 2 bytes a parameter for parameters, optimizer and gradients; `shard_optimizer`
---       spreads the optimizer over data too (ZeRO-1)
---@return { parameters: number, optimizer: number, gradients: number, gathered: number, activations: number?,
---        total: number, hbm: number, fits: boolean, state: number }
---        a device each; `state` is parameters and optimizer; `activations` nil when the model's layers and width are
---        not known
function M.memory(options)
  options = fault.options(options, MEMORY, "model.memory")
  local model, chip = M.of(options.model), cost.chip(options.type)
  local data, fsdp = options.data or 1, options.fsdp or 1
  local tensor, stages = options.tensor or 1, options.stages or 1
  local shards = fsdp * tensor * stages
  local parameters = model.parameters / shards * (options.parameter_bytes or 2)
  local optimizer = model.parameters / shards * (options.optimizer_bytes or 8)
  if options.shard_optimizer then
    optimizer = optimizer / data
  end
  local gradients = model.parameters / shards * (options.gradient_bytes or 2)
  local gathered, activations = 0, nil
  if fsdp > 1 and model.layers then
    gathered = 2 * model.parameters / model.layers / tensor
  end
  if options.tokens and model.layers and model.width then
    local kept = M.REMAT[options.remat or "block"]
    if not kept then
      fault.misuse("model.memory: remat is 'full', 'block' or 'none', not '%s'", tostring(options.remat))
    end
    local here = options.tokens / (data * fsdp * tensor)
    activations = 2 * here * (kept[1] * model.width + kept[2] * model.ff) * model.layers / stages
  end
  local total = parameters + optimizer + gradients + gathered + (activations or 0)
  local hbm = chip.hbm / require("ciranda.mesh.types").generations[chip.generation].devices_per_chip
  return {
    parameters = parameters,
    optimizer = optimizer,
    state = parameters + optimizer,
    gradients = gradients,
    gathered = gathered,
    activations = activations,
    total = total,
    hbm = hbm,
    fits = total <= hbm,
  }
end

--- The largest model that pure data parallelism can hold: HBM / 10 bytes.
---@param name string a generation or accelerator type
---@return number parameters
function M.largest_replicated(name)
  return cost.chip(name).hbm / 10
end

return M
