--- Bytes that each axis moves in a step, and what bounds it.
--
-- Inside a slice the book's counts hold: collectives overlap with compute, so a step takes the longer of the two.
-- Between slices each slice sends one copy: gradients hide behind the backward pass (guide), gathered parameters
-- behind the whole step, activations behind nothing.
local cost = require("ciranda.mesh.cost")
local fault = require("ciranda.mesh.fault")
local model_room = require("ciranda.mesh.model")
local topology = require("ciranda.mesh.topology")

local M = {}

M.AXES = { "data", "fsdp", "tensor", "stage" }

local OPTIONS = {
  type = true,
  topology = true,
  ici = true,
  dcn = true,
  model = true,
  tokens = true,
  bandwidth = true,
  torus_axes = true,
  microbatches = true,
}

local function ways(side, name)
  local value = side[name] or 1
  if math.type(value) ~= "integer" or value < 1 then
    fault.misuse("step: %s must be a positive integer, got %s", name, tostring(value))
  end
  return value
end

--- The share of an array that has to move to or from a ring of n.
local function moved(n)
  return (n - 1) / n
end

---@class ciranda.mesh.Step
---@field ici table<string, { bytes: number, seconds: number }>  by axis: what each device sends
---@field dcn table<string, { bytes: number, seconds: number }>  by axis: what each slice sends
---@field compute_seconds number    at peak, with the pipeline's bubble
---@field backward_seconds number   of it
---@field ici_seconds number
---@field dcn_exposed_seconds number   what of DCN nothing hides
---@field seconds number            of the step
---@field bubble number
---@field bound "compute"|"ICI"|"DCN"
---@field utilization number        of peak FLOP/s, 0 to 1

--- Estimates a step.
---@param options { type: string?, topology: ciranda.mesh.Topology?, ici: table<string, integer>,
---       dcn: table<string, integer>?, model: ciranda.mesh.Model|table, tokens: number, bandwidth: number?,
---       torus_axes: table<string, number>?, microbatches: integer? }
---       `ici` and `dcn` ways by axis (data, fsdp, tensor, stage); `tokens` of the whole step; `bandwidth` bits/s of
---       DCN a host; `torus_axes` how many axes of the torus each logical one has, 1 when absent
---@return ciranda.mesh.Step
--- Raises "unsupported" for axes it has no formula for, or a generation whose ICI is not known.
function M.estimate(options)
  options = fault.options(options, OPTIONS, "step")
  local shape = topology.of(options.topology or options.type)
  local chip, model, tokens = cost.chip(shape), model_room.of(options.model), options.tokens
  local ici, dcn = options.ici, options.dcn or {}
  for _, side in ipairs({ ici, dcn }) do
    for name, size in pairs(side) do
      if size ~= 1 and name ~= "data" and name ~= "fsdp" and name ~= "tensor" and name ~= "stage" then
        fault.raise({
          code = "unsupported",
          op = "step",
          message = ("there is no cost formula for axis '%s'; known are %s"):format(
            name,
            table.concat(M.AXES, ", ")
          ),
        })
      end
    end
  end
  if not chip.ici then
    fault.raise({
      code = "unsupported",
      op = "step",
      message = ("the ICI bandwidth of %s is not known"):format(chip.generation),
    })
  end
  local d, f, t, s = ways(ici, "data"), ways(ici, "fsdp"), ways(ici, "tensor"), ways(ici, "stage")
  local dd, df, dt, ds = ways(dcn, "data"), ways(dcn, "fsdp"), ways(dcn, "tensor"), ways(dcn, "stage")
  local slices, stages = dd * df * dt * ds, s * ds
  local devices = shape.devices * slices
  local activations = model.layers and model.width
  if (t * dt > 1 or stages > 1) and not activations then
    fault.raise({ op = "step", message = "tensor and pipeline parallelism need the model's layers and width" })
  end

  -- Parameters of the stage, of a slice, and of one tensor shard of it.
  local staged = model.parameters / stages
  local in_slice = staged / (dt * df)
  local local_tokens = tokens / (d * f * dd * df)
  local layer_bytes = activations and model.width * model.layers / stages or 0

  local sent = {
    data = 2 * 2 * in_slice / (f * t) * moved(d),
    fsdp = (2 + 2 + 2) * in_slice / t * moved(f),
    -- Attention and feed-forward each gather and scatter their activations, forward and backward.
    tensor = 2 * (4 + 4) * local_tokens * layer_bytes * moved(t),
    stage = s > 1 and 2 * 2 * local_tokens / t * model.width or 0,
  }
  local of_ici, ici_seconds = {}, 0
  for _, name in ipairs(M.AXES) do
    local axes = options.torus_axes and options.torus_axes[name] or 1
    -- A line moves half of what a ring does.
    local rate = chip.ici * axes / shape.devices_per_chip
    if not (shape.wrap[1] or shape.wrap[2] or shape.wrap[3]) then
      rate = rate / 2
    end
    local seconds = sent[name] / rate
    of_ici[name] = { bytes = sent[name], seconds = seconds }
    ici_seconds = ici_seconds + seconds
  end

  local across = {
    data = dd > 1 and in_slice * cost.bits_per_parameter(dd) / 8 or 0,
    fsdp = (2 + 2 + 4) * staged / dt * moved(df),
    tensor = 2 * (4 + 4) * tokens / (dd * df) * layer_bytes * moved(dt),
    stage = ds > 1 and 2 * 2 * tokens / (dd * df) * model.width or 0,
  }
  local of_dcn = {}
  local host = options.bandwidth or chip.dcn_guide
  if slices > 1 and not host then
    fault.raise({
      code = "unsupported",
      op = "step",
      message = ("the DCN bandwidth of %s is not known; pass bandwidth="):format(chip.generation),
    })
  end
  for _, name in ipairs(M.AXES) do
    local rate = host and host / 8 * shape.chips / math.min(chip.chips_per_host, shape.chips)
    of_dcn[name] = { bytes = across[name], seconds = rate and across[name] / rate or 0 }
  end

  local rate = devices * chip.flops / shape.devices_per_chip
  local pure = (cost.FORWARD + cost.BACKWARD) * model.parameters * tokens / rate
  local bubble = stages > 1 and cost.bubble({ stages = stages, microbatches = options.microbatches }) or 0
  local compute = pure / (1 - bubble)
  local backward = compute * cost.BACKWARD / (cost.FORWARD + cost.BACKWARD)
  local exposed = math.max(0, of_dcn.data.seconds - backward)
    + math.max(0, of_dcn.fsdp.seconds + of_dcn.stage.seconds - compute)
    + of_dcn.tensor.seconds
  local inside = math.max(compute, ici_seconds)
  local bound = "compute"
  if exposed > 0 and exposed >= inside - compute then
    bound = "DCN"
  elseif inside > compute then
    bound = "ICI"
  end
  local seconds = inside + exposed
  return {
    ici = of_ici,
    dcn = of_dcn,
    compute_seconds = compute,
    backward_seconds = backward,
    ici_seconds = ici_seconds,
    dcn_exposed_seconds = exposed,
    seconds = seconds,
    bubble = bubble,
    bound = bound,
    utilization = pure / seconds,
  }
end

return M
