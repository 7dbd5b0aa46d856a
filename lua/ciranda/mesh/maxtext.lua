--- MaxText's parallelism parameters, and whether MaxText would accept them.
--
-- Parameters are ici_X_parallelism and dcn_X_parallelism. MaxText fills in one -1 a side; by default dcn_data and
-- ici_fsdp are -1 and all others 1.
local check = require("ciranda.mesh.check")
local fault = require("ciranda.mesh.fault")
local python = require("ciranda.mesh.python")

local M = {}

--- The axes of MaxText's mesh (configs/base.yml), least traffic first.
M.names = {
  "diloco",
  "data",
  "stage",
  "fsdp",
  "fsdp_transpose",
  "context",
  "context_usp_ulysses",
  "context_autoregressive",
  "tensor",
  "tensor_sequence",
  "expert",
  "autoregressive",
}

-- Parameters whose axis has another name.
local PARAMETER_OF = { stage = "pipeline", model = "tensor" }
-- Axes of serving meshes that MaxText sets itself.
local ALWAYS_ONE = { attn_dp = true, attn_dp_expert = true }

local PARAMETERS = {
  "diloco",
  "data",
  "pipeline",
  "fsdp",
  "fsdp_transpose",
  "sequence",
  "context",
  "context_usp_ulysses",
  "context_autoregressive",
  "tensor",
  "tensor_transpose",
  "tensor_sequence",
  "expert",
  "autoregressive",
}

--- The names of all parallelism parameters.
M.parameters = {}
local KNOWN = {}
for _, name in ipairs(PARAMETERS) do
  for _, side in ipairs({ "ici", "dcn" }) do
    local whole = ("%s_%s_parallelism"):format(side, name)
    KNOWN[whole] = 1
    table.insert(M.parameters, whole)
  end
end
KNOWN.ici_fsdp_parallelism = -1
KNOWN.dcn_data_parallelism = -1

local function parameter(side, axis)
  return ("%s_%s_parallelism"):format(side, PARAMETER_OF[axis] or axis)
end

--- With pipelining, stage comes before data.
local function ordered(names, pipelined)
  local out = table.move(names, 1, #names, 1, {})
  if not pipelined then
    return out
  end
  local data, stage
  for index, name in ipairs(out) do
    data, stage = name == "data" and index or data, name == "stage" and index or stage
  end
  if data and stage and data < stage then
    out[data], out[stage] = "stage", "data"
  end
  return out
end

--- dcn_diloco = -1 is resolved before anything else, by the other sizes that are given.
local function resolve_diloco(sides, names, slices)
  local at, product = nil, 1
  for index, name in ipairs(names) do
    local size = math.tointeger(tonumber(sides.dcn[index]) or 0)
    if name == "diloco" then
      at = index
    elseif size and size > 0 then
      product = product * size
    end
  end
  if not at or tonumber(sides.dcn[at]) ~= -1 then
    return
  end
  if slices % product ~= 0 then
    fault.raise({
      op = "MaxText",
      side = "DCN",
      exception = "AssertionError",
      message = (
        "DCN: dcn_diloco=-1 cannot be filled in: %d slices are not divisible by the product of the other "
        .. "DCN sizes (%d)"
      ):format(slices, product),
    })
  end
  sides.dcn[at] = slices // product
end

--- What pipelining asks of layers and batch.
---@param options { stages: integer, layers: integer, layers_per_stage: integer?, repeats: integer?,
---       microbatches: integer?, micro_batch: integer?, delayed: boolean? }
---       `layers` of the decoder; `layers_per_stage` 1 and `repeats` whatever they leave when absent; `microbatches`
---       as many as stages (twice with `delayed` forwarding) when absent; `micro_batch` the batch they are cut from
---@return { stages: integer, layers_per_stage: integer, repeats: integer, microbatches: integer, bubble: number }
--- Raises "invalid" where MaxText stops.
function M.pipeline(options)
  options = fault.options(options, {
    stages = true,
    layers = true,
    layers_per_stage = true,
    repeats = true,
    microbatches = true,
    micro_batch = true,
    delayed = true,
  }, "check.pipeline")
  local stages, layers = options.stages, options.layers
  local per_stage = options.layers_per_stage or 1
  local function refuse(format, ...)
    fault.raise({ op = "MaxText pipeline", message = format:format(...) })
  end
  for name, value in pairs(options) do
    if name ~= "delayed" and (math.type(value) ~= "integer" or value < 1) then
      refuse("%s must be a positive integer, got %s", name, python.repr(value))
    end
  end
  if not stages or not layers then
    fault.misuse("check.pipeline needs stages= and layers=")
  end
  if layers % (stages * per_stage) ~= 0 then
    refuse("%d layers cannot be shared by %d stages of %d layers each", layers, stages, per_stage)
  end
  local repeats = options.repeats or layers // (stages * per_stage)
  if stages * repeats * per_stage ~= layers then
    refuse(
      "%d stages x %d repeats x %d layers a stage are %d layers, not %d",
      stages,
      repeats,
      per_stage,
      stages * repeats * per_stage,
      layers
    )
  end
  local microbatches = options.microbatches or stages * (options.delayed and 2 or 1)
  if microbatches % stages ~= 0 then
    refuse("%d microbatches are no multiple of %d stages", microbatches, stages)
  end
  if options.micro_batch and options.micro_batch % microbatches ~= 0 then
    refuse("a batch of %d cannot be cut into %d microbatches", options.micro_batch, microbatches)
  end
  if options.delayed and microbatches < 2 * stages then
    refuse("delayed forwarding needs %d microbatches (two a stage), not %d", 2 * stages, microbatches)
  end
  return {
    stages = stages,
    layers_per_stage = per_stage,
    repeats = repeats,
    microbatches = microbatches,
    bubble = (stages - 1) / (repeats * microbatches + stages - 1),
  }
end

local OPTIONS = {
  type = true,
  topology = true,
  slices = true,
  values = true,
  mesh_axes = true,
  allow_split = true,
  jax = true,
  per_device_batch_size = true,
  gradient_accumulation_steps = true,
}

--- Refuses names that are no parallelism parameters.
---@param given table<string, integer|string>
local function check_names(given)
  for name in pairs(given) do
    if not KNOWN[name] then
      fault.raise({
        code = "usage",
        op = "MaxText",
        message = (
          "'%s' is no parallelism parameter of MaxText; they are ici_X_parallelism and dcn_X_parallelism "
          .. "for X in %s"
        ):format(tostring(name), table.concat(PARAMETERS, ", ")),
      })
    end
  end
end

--- A parameter's value: the given one, else MaxText's default.
---@param given table<string, integer|string>
---@param name string
---@return integer|string|nil
local function value_of(given, name)
  local own = given[name]
  return own == nil and KNOWN[name] or own
end

--- The sizes of both sides, one an axis.
---@param given table<string, integer|string>
---@param names string[] the axes
---@return { ici: any[], dcn: any[] }
--- Raises "usage" for an axis without a parameter, "invalid" for a parameter without an axis.
local function place_values(given, names)
  local sides, placed = { ici = {}, dcn = {} }, {}
  for index, axis in ipairs(names) do
    for _, side in ipairs({ "ici", "dcn" }) do
      local name = parameter(side, axis)
      if ALWAYS_ONE[axis] then
        sides[side][index] = 1
      elseif KNOWN[name] == nil then
        fault.raise({
          code = "usage",
          op = "MaxText",
          message = ("mesh axis '%s' has no parallelism parameter in MaxText"):format(axis),
        })
      else
        sides[side][index] = value_of(given, name)
        placed[name] = true
      end
    end
  end
  for name, size in pairs(given) do
    if not placed[name] and tonumber(size) ~= 1 then
      fault.raise({
        op = "MaxText",
        side = name:sub(1, 3):upper(),
        message = ("%s: %s=%s is ignored by MaxText: the mesh has no such axis (%s)"):format(
          name:sub(1, 3):upper(),
          name,
          tostring(size),
          table.concat(names, ", ")
        ),
      })
    end
  end
  return sides
end

--- MaxText fills DCN only when there are several slices.
---@param sides { ici: any[], dcn: any[] }
---@param names string[]
--- Raises "invalid" for a DCN size of one slice.
local function close_dcn(sides, names)
  for index, axis in ipairs(names) do
    if tonumber(sides.dcn[index]) == -1 then
      sides.dcn[index] = 1
    elseif axis ~= "diloco" and (tonumber(sides.dcn[index]) or 0) > 1 then
      fault.raise({
        op = "MaxText",
        side = "DCN",
        exception = "ValueError",
        message = ("DCN: %s=%s, but there is one slice; leave DCN sizes at 1, or ask for more slices"):format(
          parameter("dcn", axis),
          tostring(sides.dcn[index])
        ),
      })
    end
  end
end

--- The parameters to pass for a mesh.
---@param mesh ciranda.mesh.Mesh
---@param names string[]
---@return string[]
local function parameters_of(mesh, names)
  local flags = {}
  for _, side in ipairs({ "dcn", "ici" }) do
    for index, axis in ipairs(names) do
      local name, size = parameter(side, axis), mesh[side][index]
      if not ALWAYS_ONE[axis] and (size ~= 1 or KNOWN[name] ~= 1) then
        flags[#flags + 1] = ("%s=%d"):format(name, size)
      end
    end
  end
  if mesh.allow_split then
    flags[#flags + 1] = "allow_split_physical_axes=true"
  end
  return flags
end

--- Sequences a step.
---@param mesh ciranda.mesh.Mesh
---@param options { per_device_batch_size: number, gradient_accumulation_steps: integer? }
---@return integer
--- Raises "invalid" when they are no whole number.
local function global_batch(mesh, options)
  local batch = options.per_device_batch_size * mesh.devices * (options.gradient_accumulation_steps or 1)
  local whole = math.tointeger(batch)
  if not whole or whole < 1 then
    fault.raise({
      op = "MaxText",
      message = ("per_device_batch_size=%s on %d devices is %s sequences a step, which is no whole number"):format(
        python.repr(options.per_device_batch_size),
        mesh.devices,
        python.repr(batch)
      ),
    })
  end
  return whole
end

--- Checks MaxText's parameters against slices.
---@param options { type: string?, topology: string|ciranda.mesh.Topology|nil, slices: integer|table[]|nil,
---       values: table<string, integer|string>?, mesh_axes: string[]?, allow_split: boolean?, jax: string?,
---       per_device_batch_size: number?, gradient_accumulation_steps: integer? }
---       `values` by parameter name; what is absent has MaxText's default; `mesh_axes` of a custom mesh;
---       `allow_split` is MaxText's allow_split_physical_axes
---@return ciranda.mesh.Mesh with flags.maxtext, the parameters to pass, and global_batch when the batch is given
--- Raises "usage" for unknown parameters, "invalid" for what does not fit.
function M.check(options)
  options = fault.options(options, OPTIONS, "check.maxtext")
  local given = options.values or {}
  check_names(given)
  local slices = options.slices
  if type(slices) == "table" then
    slices = #slices
  end
  slices = slices or 1
  local pipelined = false
  for _, side in ipairs({ "ici", "dcn" }) do
    local size = tonumber(value_of(given, parameter(side, "stage")))
    pipelined = pipelined or size ~= 1
  end
  local names = ordered(options.mesh_axes or M.names, pipelined)

  local sides = place_values(given, names)
  if slices == 1 then
    close_dcn(sides, names)
  elseif math.type(slices) == "integer" and slices > 1 then
    resolve_diloco(sides, names, slices)
  end

  local mesh = check.mesh({
    what = "MaxText",
    type = options.type,
    topology = options.topology,
    slices = options.slices,
    jax = options.jax,
    allow_split = options.allow_split,
    names = names,
    ici = sides.ici,
    dcn = sides.dcn,
    split_hint = "allow_split_physical_axes=true allows it, or on 16x16 custom_mesh=hybrid_ring_64x4 or _32x8",
    label = function(side, index)
      return parameter(side:lower(), names[index])
    end,
  })

  mesh.flags.maxtext = parameters_of(mesh, names)
  if options.per_device_batch_size then
    mesh.global_batch = global_batch(mesh, options)
  end
  return mesh
end

return M
