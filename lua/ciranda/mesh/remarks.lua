--- Remarks on a mesh that fits: what will be slow in it, and what would be better. Each says why.
local order = require("ciranda.mesh.order")

local M = {}

-- How much traffic an axis carries, of those whose order matters (MaxText orders its mesh like this).
local INTENSITY = {
  diloco = 1,
  data = 2,
  stage = 2,
  fsdp = 3,
  fsdp_transpose = 3,
  sequence = 4,
  context = 4,
  context_usp_ulysses = 4,
  context_autoregressive = 4,
  expert = 5,
  tensor = 6,
  model = 6,
  tensor_sequence = 6,
  autoregressive = 6,
}

-- Axes whose collectives run in every layer, between every two of its steps.
local NEVER_OVER_DCN = {
  tensor = "activations cross DCN several times in every layer",
  model = "activations cross DCN several times in every layer",
  tensor_sequence = "activations cross DCN several times in every layer",
  sequence = "activations cross DCN in every layer",
  autoregressive = "every decoding step waits for DCN",
}

---@class ciranda.mesh.Note
---@field level "warning"|"advice"
---@field side "ICI"|"DCN"|nil
---@field axis string?
---@field text string   what, and why

-- What its axes say.
local function axis_notes(context, ici, dcn)
  local notes = {}
  local function note(level, side, axis, text)
    notes[#notes + 1] = { level = level, side = side, axis = axis, text = text }
  end
  for index, name in ipairs(context.names) do
    if name == "data" and ici[index] > 1 then
      note(
        "advice",
        "ICI",
        name,
        (
          "ici_data=%d keeps a whole copy of the parameters on every %s of a slice; ICI is fast enough that fsdp "
          .. "costs about the same and divides them"
        ):format(ici[index], context.topology.devices_per_chip > 1 and "device" or "chip")
      )
    end
    if (name == "fsdp" or name == "fsdp_transpose") and dcn[index] > 1 then
      note(
        "warning",
        "DCN",
        name,
        (
          "dcn_%s=%d gathers the parameters over DCN in the forward and again in the backward pass, where compute "
          .. "waits for them; it pays when memory forces it, with a larger batch a slice"
        ):format(name, dcn[index])
      )
    end
    if NEVER_OVER_DCN[name] and dcn[index] > 1 then
      note(
        "warning",
        "DCN",
        name,
        ("dcn_%s=%d: %s, and DCN is tens of times slower than ICI; keep it at 1"):format(
          name,
          dcn[index],
          NEVER_OVER_DCN[name]
        )
      )
    end
  end
  local strongest
  for index, name in ipairs(context.names) do
    if ici[index] > 1 and INTENSITY[name] then
      if strongest and INTENSITY[name] < INTENSITY[context.names[strongest]] then
        note(
          "warning",
          "ICI",
          name,
          (
            "axis %s stands after %s, but JAX gives the best links to the last axis: put the axis with the most "
            .. "traffic last"
          ):format(name, context.names[strongest])
        )
      else
        strongest = index
      end
    end
  end
  for _, text in ipairs(context.topology.notes) do
    note("warning", nil, nil, text)
  end
  return notes
end

-- Whether the rings could be shorter.
local function ring_notes(context, ici, notes)
  local best = order.best_order({
    devices = context.slice,
    ici = ici,
    allow_split = context.allow_split,
    jax = context.jax,
  })
  if not best.improved or not best.jax then
    return
  end
  for index, name in ipairs(context.names) do
    local now, could = best.jax.hops[index], best.hops[index]
    if could.total < now.total then
      notes[#notes + 1] = {
        level = "advice",
        side = "ICI",
        axis = name,
        text = ("the rings of %s cross %d links in JAX's order and %d in the best one (mesh.best_order)"):format(
          name,
          now.total // now.rings,
          could.total // could.rings
        ),
      }
    end
  end
end

--- All remarks on a mesh.
---@param context table what `ciranda.mesh.check` knows of it: names, topology, slice (its devices), allow_split, jax
---@param ici integer[] sizes inside a slice, one an axis
---@param dcn integer[] sizes across slices
---@return ciranda.mesh.Note[]
function M.of(context, ici, dcn)
  local notes = axis_notes(context, ici, dcn)
  ring_notes(context, ici, notes)
  return notes
end

return M
