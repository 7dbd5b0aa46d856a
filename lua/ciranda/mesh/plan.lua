--- Which layout for these slices: all of them looked at, ranked, the first ones explained, and what else the guide
-- would say.
--
-- A layout gives data, fsdp and tensor parallelism a size inside a slice (ICI) and across slices (DCN). All ordered
-- factorisations are looked at. The order of preference is the Multislice guide's: what JAX can place and memory can
-- hold; data parallelism alone across slices, then fsdp across slices, tensor parallelism never; inside a slice fsdp
-- rather than data; then the time of a step, and what the links carry.
local check = require("ciranda.mesh.check")
local cost = require("ciranda.mesh.cost")
local devices_room = require("ciranda.mesh.devices")
local factor = require("ciranda.mesh.factor")
local fault = require("ciranda.mesh.fault")
local model_room = require("ciranda.mesh.model")
local placement = require("ciranda.mesh.placement")
local step = require("ciranda.mesh.step")
local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local M = {}

M.names = { "data", "fsdp", "tensor" }

local OPTIONS = {
  type = true,
  topology = true,
  slices = true,
  model = true,
  tokens = true,
  max_tokens = true,
  bandwidth = true,
  allow_split = true,
  remat = true,
  jax = true,
}

---@class ciranda.mesh.Layout
---@field ici integer[]          data, fsdp, tensor
---@field dcn integer[]
---@field placed boolean         whether JAX places it
---@field memory table?          see model.memory
---@field step ciranda.mesh.Step?
---@field usable boolean         placed, and not known to exceed memory
---@field why string?            of the first three

---@class ciranda.mesh.Plan
---@field layouts ciranda.mesh.Layout[]  all, best first
---@field count integer          how many were looked at
---@field expected integer       how many there are, in closed form
---@field usable integer         how many can run
---@field advice string[]        in the guide's order
---@field one_more string[]      what one more slice changes
---@field topology ciranda.mesh.Topology
---@field slices integer

--- Tokens as the guide writes them: 352k; millions with M.
local function thousands(number)
  if number >= 1e6 then
    return ("%.4gM"):format(number / 1e6)
  elseif number >= 1e4 then
    return ("%dk"):format(math.floor(number / 1000 + 0.5))
  end
  return tostring(math.floor(number + 0.5))
end

local function seconds(number)
  if number >= 1 then
    return ("%.3g s"):format(number)
  end
  return ("%.3g ms"):format(number * 1000)
end

local function gigabytes(bytes)
  return ("%.1f"):format(bytes / 1e9)
end

--- How many axes of the torus each logical axis has, from JAX's assignment: a part of an axis counts as one.
local function torus_axes(slice, ici, options)
  local ok, made = pcall(placement.create_device_mesh, ici, slice, options)
  if not ok or not made.assignment then
    return {}
  end
  local axes = {}
  for index, name in ipairs(M.names) do
    local count = 0
    for axis, row in ipairs(made.assignment) do
      if axis <= 3 and row[index] > 1 then
        count = count + 1
      end
    end
    axes[name] = math.max(count, 1)
  end
  return axes
end

--- What ranks before what: numbers to compare in turn, smaller is better. A step that cannot be estimated comes
-- after those that can.
local function rank_of(layout, estimated)
  local across = 0
  if layout.dcn[3] > 1 then
    across = 2
  elseif layout.dcn[2] > 1 then
    across = 1
  end
  local unusable = 0
  if not layout.usable then
    unusable = layout.placed and 1 or 2
  end
  local estimate, carried = layout.step, 0
  if estimate then
    for _, name in ipairs(M.names) do
      carried = carried + estimate.ici[name].seconds + estimate.dcn[name].seconds
    end
  end
  return {
    unusable,
    across,
    layout.ici[1] > 1 and 1 or 0,
    estimate and estimate.seconds or estimated and math.huge or 0,
    layout.ici[3] > 1 and 1 or 0,
    carried,
    layout.dcn[2],
    layout.dcn[3],
    layout.ici[1],
    layout.ici[3],
  }
end

local function precedes(a, b)
  for index, value in ipairs(a) do
    if value ~= b[index] then
      return value < b[index]
    end
  end
  return false
end

--- One part of a sentence: "fsdp 64 and tensor 4".
local function ways(sizes)
  local parts = {}
  for index, name in ipairs(M.names) do
    if sizes[index] > 1 then
      parts[#parts + 1] = ("%s %d"):format(name, sizes[index])
    end
  end
  return table.concat(parts, " with ")
end

--- Why a layout stands where it does.
local function explain(layout, plan, options)
  local parts = {}
  if plan.slices > 1 then
    if layout.dcn[3] > 1 then
      parts[1] = ("%s across slices: sends activations over DCN, which is never worth it"):format(
        ways(layout.dcn)
      )
    elseif layout.dcn[2] > 1 then
      parts[1] = ("%s across slices: divides the parameters further, for memory, but gathers them over DCN"):format(
        ways(layout.dcn)
      )
    else
      parts[1] = ("data parallelism alone across %d slices: only gradients cross DCN, once a step"):format(
        plan.slices
      )
    end
  end
  local inside = "one device a slice"
  if layout.ici[1] > 1 then
    inside = ("inside a slice %s, which keeps %d copies of the parameters there"):format(
      ways(layout.ici),
      layout.ici[1]
    )
  elseif layout.ici[3] > 1 then
    inside = ("inside a slice %s, which divides the layers too but sends activations over ICI in each"):format(
      ways(layout.ici)
    )
  elseif layout.ici[2] > 1 then
    inside = ("inside a slice %s, which divides parameters, optimizer and batch"):format(ways(layout.ici))
  end
  parts[#parts + 1] = inside
  if layout.step then
    local estimate = layout.step
    local limit = ("%s a step, bound by %s at %d %% of peak"):format(
      seconds(estimate.seconds),
      estimate.bound,
      math.floor(estimate.utilization * 100 + 0.5)
    )
    if plan.slices > 1 and layout.dcn[1] > 1 then
      limit = limit
        .. (" (DCN takes %s, the backward pass %s)"):format(
          seconds(estimate.dcn.data.seconds),
          seconds(estimate.backward_seconds)
        )
    end
    parts[#parts + 1] = limit
  end
  if layout.memory then
    parts[#parts + 1] = ("%s of %s GB a device%s"):format(
      gigabytes(layout.memory.total),
      gigabytes(layout.memory.hbm),
      layout.memory.fits and "" or ", which is too much"
    )
  end
  if not layout.placed then
    parts[#parts + 1] = options.allow_split and "JAX refuses it"
      or "JAX places it only with allow_split_physical_axes=True"
  end
  local text = table.concat(parts, "; ")
  return text:sub(1, 1):upper() .. text:sub(2) .. "."
end

--- Tokens a slice has and needs, and pipelines when the batch cannot grow.
local function batch_advice(plan, options, out)
  if plan.slices == 1 or not options.tokens then
    return
  end
  local slices = plan.slices
  local guide = cost.guide({ type = plan.topology.type, slices = slices, bandwidth = options.bandwidth })
  local book = cost.book({ type = plan.topology.type, slices = slices, bandwidth = options.bandwidth })
  local each = options.tokens / slices
  local verdict
  if each >= guide.with_margin then
    verdict = "enough, with the margin for lost packets"
  elseif each >= guide.tokens then
    verdict = "enough while DCN loses no packets"
  else
    verdict = ("too few: data parallelism waits for DCN %.1f times as long as the backward pass takes"):format(
      guide.tokens / each
    )
  end
  out[#out + 1] = (
    "Data parallelism first: each slice has %s tokens a step and needs %s (%s with margin) in the "
    .. "arithmetic of Google's Multislice guide, %s in that of the scaling book: %s."
  ):format(
    thousands(each),
    thousands(guide.tokens),
    thousands(guide.with_margin),
    thousands(book.tokens),
    verdict
  )
  if each >= guide.tokens then
    return
  end
  local most = options.max_tokens or options.tokens
  local wanted = guide.with_margin * slices
  if most >= wanted then
    out[#out + 1] = ("Raise the batch to %s tokens a step: then DCN hides behind the backward pass."):format(
      thousands(wanted)
    )
    return
  end
  local depth = 2
  while slices % depth == 0 do
    local replicas = slices // depth
    local least = cost.guide({ type = plan.topology.type, slices = replicas, bandwidth = options.bandwidth })
    local tokens = most * depth / slices
    if tokens >= least.tokens then
      out[#out + 1] = (
        "The batch cannot grow past %s tokens, so pipeline: depth %d with %d replica%s gives %s tokens "
        .. "a pipeline, which DCN can hide behind (%s); the price is a bubble of %d %% with two microbatches a "
        .. "stage."
      ):format(
        thousands(most),
        depth,
        replicas,
        replicas == 1 and "" or "s",
        thousands(tokens),
        replicas == 1 and "no gradients cross DCN" or thousands(least.tokens) .. " needed",
        math.floor(cost.bubble({ stages = depth }) * 100 + 0.5)
      )
      return
    end
    depth = depth * 2
  end
  out[#out + 1] = (
    "The batch cannot grow past %s tokens, and no pipeline depth that divides %d slices gets enough of "
    .. "them: use fewer slices, or larger ones."
  ):format(thousands(most), slices)
end

local function memory_advice(plan, options, out)
  if not options.model then
    return
  end
  local replicated, divided
  for _, layout in ipairs(plan.layouts) do
    if layout.placed and layout.memory.fits then
      replicated = replicated or (layout.dcn[2] == 1 and layout.dcn[3] == 1)
      divided = true
    end
  end
  if not divided then
    out[#out + 1] = (
      "Memory: no layout of %d slice%s of %s holds the model; use more or larger slices, a smaller batch, "
      .. "or keep less for the backward pass (remat 'full')."
    ):format(plan.slices, plan.slices == 1 and "" or "s", plan.topology.type)
  elseif not replicated then
    out[#out + 1] = "Memory: one slice cannot hold a whole copy, so fsdp has to span slices. Give each slice a larger "
      .. "batch for it: the parameters cross DCN forward and backward, whatever the batch."
  end
end

--- One slice of the same size, when there is one.
local function size_advice(plan, out)
  if plan.slices == 1 then
    return
  end
  local generation = types.generations[plan.topology.generation]
  local chips = plan.topology.chips * plan.slices
  if chips > generation.largest_slice then
    return
  end
  for _, entry in ipairs(types.list) do
    if entry.generation == generation.name and entry.chips == chips then
      out[#out + 1] = (
        "One slice rather than many: %d chips are within one %s slice (up to %d chips), so %s (%s) would "
        .. "keep all traffic on ICI. Several small slices are easier to get, and start sooner."
      ):format(chips, generation.name, generation.largest_slice, entry.name, entry.topology)
      return
    end
  end
end

--- What one more slice changes.
local function one_more(plan, options)
  local out = {}
  local now, more = plan.slices, plan.slices + 1
  if now >= check.SLICE_LIMIT then
    return {
      ("%d slices are the most a queued resource takes: grow the slices instead."):format(check.SLICE_LIMIT),
    }
  end
  if not types.generations[plan.topology.generation].multislice then
    return { ("%s slices cannot be joined."):format(plan.topology.generation) }
  end
  out[#out + 1] = (
    "%d slices are %d devices: dcn_data is %d, and at the same batch a slice a step does %.2f times the "
    .. "work in about the same time."
  ):format(more, plan.topology.devices * more, more, more / now)
  local before, after = cost.bits_per_parameter(now), cost.bits_per_parameter(more)
  if before ~= after then
    out[#out + 1] = now == 1 and "Gradients start to cross DCN: 32 bits a parameter and step."
      or ("DCN carries up to %d bits a parameter and step instead of %d."):format(after, before)
  end
  if options.tokens then
    local guide = cost.guide({ type = plan.topology.type, slices = more, bandwidth = options.bandwidth })
    local each = options.tokens / more
    out[#out + 1] = ("With the batch kept at %s tokens a slice has %s instead of %s and needs %s: %s."):format(
      thousands(options.tokens),
      thousands(each),
      thousands(options.tokens / now),
      thousands(guide.tokens),
      each >= guide.tokens and "still enough" or "too few; let the batch grow with the slices"
    )
  end
  return out
end

--- Looks at every layout and ranks them.
---@param options { type: string?, topology: string|ciranda.mesh.Topology|nil, slices: integer?,
---       model: ciranda.mesh.Model|table|nil, tokens: number?, max_tokens: number?, bandwidth: number?,
---       allow_split: boolean?, remat: string?, jax: string? }
---       `model` as for model.of; `tokens` of a whole step; `max_tokens` the largest batch that still converges well;
---       `bandwidth` bits/s of DCN a host; `allow_split` is jax's allow_split_physical_axes
---@return ciranda.mesh.Plan
--- Raises "invalid" when the type does not exist.
function M.rank(options)
  options = fault.options(options, OPTIONS, "plan.rank")
  local shape
  if type(options.topology) == "string" then
    shape = topology.of({ type = options.type, topology = options.topology })
  else
    shape = topology.of(options.topology or options.type)
  end
  local slices = options.slices or 1
  if math.type(slices) ~= "integer" or slices < 1 then
    fault.misuse("plan.rank: slices must be a positive integer, got %s", tostring(slices))
  end
  for _, name in ipairs({ "tokens", "max_tokens", "bandwidth" }) do
    local value = options[name]
    if value ~= nil and (type(value) ~= "number" or value <= 0) then
      fault.misuse("plan.rank: %s must be a positive number, got %s", name, tostring(value))
    end
  end
  local model = options.model and model_room.of(options.model)

  local slice = devices_room.grid({ topology = shape })
  local jax = { allow_split_physical_axes = options.allow_split, jax = options.jax }
  local across = factor.all(slices, 3)
  local layouts, ranks, usable = {}, {}, 0
  for _, ici in ipairs(factor.all(shape.devices, 3)) do
    local placed = placement.accepts(ici, slice, jax)
    local axes = placed and model and options.tokens and torus_axes(slice, ici, jax) or {}
    for _, dcn in ipairs(across) do
      local layout = { ici = ici, dcn = dcn, placed = placed }
      if model then
        layout.memory = model_room.memory({
          type = shape.type,
          model = model,
          data = ici[1] * dcn[1],
          fsdp = ici[2] * dcn[2],
          tensor = ici[3] * dcn[3],
          tokens = options.tokens,
          remat = options.remat,
        })
        local needs_layers = ici[3] * dcn[3] > 1
        if options.tokens and (not needs_layers or (model.layers and model.width)) then
          layout.step = step.estimate({
            topology = shape,
            ici = { data = ici[1], fsdp = ici[2], tensor = ici[3] },
            dcn = { data = dcn[1], fsdp = dcn[2], tensor = dcn[3] },
            model = model,
            tokens = options.tokens,
            bandwidth = options.bandwidth,
            torus_axes = axes,
          })
        end
      end
      layout.usable = placed and (not layout.memory or layout.memory.fits)
      usable = usable + (layout.usable and 1 or 0)
      ranks[layout] = rank_of(layout, model and options.tokens)
      layouts[#layouts + 1] = layout
    end
  end
  table.sort(layouts, function(a, b)
    return precedes(ranks[a], ranks[b])
  end)

  local plan = {
    layouts = layouts,
    count = #layouts,
    expected = factor.count(shape.devices, 3) * factor.count(slices, 3),
    usable = usable,
    topology = shape,
    slices = slices,
    advice = {},
  }
  local given = { model = model, tokens = options.tokens, max_tokens = options.max_tokens }
  given.bandwidth = options.bandwidth
  for index = 1, math.min(3, #layouts) do
    layouts[index].why = explain(layouts[index], plan, options)
  end
  batch_advice(plan, given, plan.advice)
  memory_advice(plan, given, plan.advice)
  size_advice(plan, plan.advice)
  plan.one_more = one_more(plan, given)
  return plan
end

return M
