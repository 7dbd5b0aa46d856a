--- Placing a sharding: does this parallelism fit these slices, where does each shard sit, what bounds the step, does it
-- fit in memory, and what would be better. Arithmetic only: nothing here does I/O.
--
--     local mesh = require("ciranda.mesh")
--     local fits = mesh.check.shardings({ type = "v5litepod-16", slices = 2, argv = { "-dd", "2", "-if", "16" } })
--     print(fits.table, fits.jax_line)
--     print(mesh.draw.text(mesh.best_order({ type = "v6e-8", ici = { 8 } })))
local check = require("ciranda.mesh.check")
local cost = require("ciranda.mesh.cost")
local devices = require("ciranda.mesh.devices")
local draw_svg = require("ciranda.mesh.draw_svg")
local draw_text = require("ciranda.mesh.draw_text")
local maxtext = require("ciranda.mesh.maxtext")
local model = require("ciranda.mesh.model")
local order = require("ciranda.mesh.order")
local placement = require("ciranda.mesh.placement")
local plan = require("ciranda.mesh.plan")
local shardings = require("ciranda.mesh.shardings")
local step = require("ciranda.mesh.step")
local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")

local M = {}

M.types = types
M.topology = topology

--- Sets of devices: `grid` of whole slices, `list` of any.
M.devices = { grid = devices.grid, list = devices.list }

--- Does it fit? `mesh` for any axes, `shardings` and `maxtext` for the flags of those programs, `slices` for live
-- slices, `pipeline` for MaxText's rules of layers and microbatches.
M.check = {
  mesh = check.mesh,
  slices = check.slices,
  shardings = shardings.check,
  maxtext = maxtext.check,
  pipeline = maxtext.pipeline,
}

--- Where JAX puts each device.
M.placement = placement

M.jax_order = order.jax_order
M.best_order = order.best_order
--- The array for jax.sharding.Mesh that makes an order.
M.order_python = order.python

--- What bounds a step; `model`, `memory`, `step` and `shardings` for whole models.
M.cost = setmetatable({
  model = model.of,
  memory = model.memory,
  largest_replicated = model.largest_replicated,
  shardings = model.shardings,
  step = step.estimate,
}, { __index = cost })

M.plan = plan.rank

M.draw = { text = draw_text.text, svg = draw_svg.svg }

return M
