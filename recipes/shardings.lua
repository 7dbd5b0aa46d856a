--- shardings: checks a sharding against the slices, then runs MaxText's shardings example on all of them.
local err = require("ciranda.io.error")
local framework = require("ciranda.run.framework")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local mesh = require("ciranda.mesh")
local runner = require("recipes.multihost_runner")
local shell = require("ciranda.io.shell")
local throughput = require("ciranda.run.throughput")
local uv = require("luv")

-- The example has moved: as a module of an installed MaxText, and as a file of its repository.
local MODULES =
  { "maxtext.examples.shardings", "pedagogical_examples.shardings", "MaxText.examples.shardings" }
local FILES = { "src/maxtext/examples/shardings.py", "pedagogical_examples/shardings.py", "shardings.py" }

local M = {
  summary = "check a sharding against the slices, then run MaxText's shardings example on them",
  description = "Takes the flags of MaxText's shardings.py. The sizes are checked against the slices before "
    .. "anything is sent: ICI sizes must multiply to the devices of a slice, DCN sizes to the number of "
    .. "slices, and the example wants the slices on dcn_data. One size a side may be -1. Then the example "
    .. "runs on every worker as multihost_runner runs a command, and the TFLOP/s they printed are compared: least, "
    .. "median, laggard. With --plan nothing runs: the mesh is drawn, and what bounds a step and what would be better "
    .. "is told.",
}

-- { name, short, default as the example has it }
local SIZES = {
  { "dcn_data_parallelism", "-dd", "1" },
  { "dcn_fsdp_parallelism", "-df", "1" },
  { "dcn_tensor_parallelism", "-dt", "1" },
  { "ici_data_parallelism", "-id", "1" },
  { "ici_fsdp_parallelism", "-if", "4" },
  { "ici_tensor_parallelism", "-it", "1" },
}
local OTHERS = {
  { "embedding_dimension", "-d", "2048" },
  { "batch_size", "-b", "131072" },
  { "num_layers", "-n", "4" },
}

M.flags = {}
for _, list in ipairs({ SIZES, OTHERS }) do
  for _, entry in ipairs(list) do
    table.insert(M.flags, {
      name = entry[1],
      short = entry[2],
      type = "integer",
      help = ("As in shardings.py (%s)."):format(entry[3]),
    })
  end
end
table.insert(
  M.flags,
  { name = "profiler_path", short = "-p", help = "As in shardings.py: where to write a profile." }
)
table.insert(
  M.flags,
  { name = "TPU_TYPE", help = "Accelerator type of each slice, where the fleet does not say it." }
)
table.insert(M.flags, { name = "PROGRAM", help = "A module or file in place of MaxText's example." })
table.insert(M.flags, {
  name = "plan",
  type = "boolean",
  default = false,
  help = "Check, draw and advise, and run nothing: for the slices found, or for TPU_TYPE and NUM_SLICES.",
})
table.insert(M.flags, {
  name = "svg",
  help = "Of --plan: a file for the mesh as a picture; a better order goes beside it, as NAME-best.svg.",
})
table.insert(
  M.flags,
  { name = "NUM_SLICES", type = "integer", help = "Of --plan without a fleet: how many slices (1)." }
)
for _, flag in ipairs(runner.flags) do
  if flag.name ~= "COMMAND" and flag.name ~= "CHECKPOINT_DIR" then
    table.insert(M.flags, flag)
  end
end

--- The command that finds the example on the worker and becomes it.
---@param arguments string[]
---@param program string?
---@return string
function M.command(arguments, program)
  local tail = shell.words(arguments)
  if program then
    local how = program:match("%.py$") and "python3 " or "python3 -m "
    return ("exec %s%s %s"):format(how, shell.words({ program }), tail)
  end
  return table.concat({
    ("for module in %s; do"):format(table.concat(MODULES, " ")),
    'if python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)" "$module"',
    ("2>/dev/null; then exec python3 -m $module %s; fi; done;"):format(tail),
    ("for file in %s; do"):format(table.concat(FILES, " ")),
    ("if [ -f $file ]; then exec python3 $file %s; fi; done;"):format(tail),
    'echo "MaxText\'s shardings example is not here: send its repository (--SCRIPT_DIR), or say --PROGRAM" >&2;',
    "exit 127",
  }, " ")
end

--- Checks the sizes.
---@param context ciranda.cli.Context
---@param slices integer|table[] how many, or the live ones
---@param accelerator string
---@return ciranda.mesh.Mesh
-- Raises "usage" for what does not fit.
local function check(context, slices, accelerator)
  local flags = context.flags
  local values = {}
  for _, list in ipairs({ SIZES, OTHERS }) do
    for _, entry in ipairs(list) do
      values[entry[1]] = flags[entry[1]]
    end
  end
  for _, entry in ipairs(OTHERS) do
    local value = flags[entry[1]]
    if value and value < 1 then
      err.raise({ code = "usage", message = ("--%s is %d, but must be at least 1"):format(entry[1], value) })
    end
  end
  values.profiler_path = flags.profiler_path
  return framework.fits(
    "shardings",
    mesh.check.shardings,
    { slices = slices, type = accelerator, values = values }
  )
end

--- What was checked, as lines.
---@param fits ciranda.mesh.Mesh
---@return string[]
local function checked(fits)
  local lines = { fits.table }
  for _, note in ipairs(fits.notes) do
    lines[#lines + 1] = ("%s: %s"):format(note.level, note.text)
  end
  if fits.slices > 1 then
    lines[#lines + 1] = ("%s in place of %s"):format(fits.jax_line, fits.instead_of)
  else
    lines[#lines + 1] = fits.jax_line
  end
  return lines
end

--- Whether standard output shows colours, and how wide it is.
---@return boolean colour
---@return integer? columns nil where it is no terminal
local function terminal()
  if uv.guess_handle(1) ~= "tty" then
    return false, nil
  end
  local columns
  local tty = uv.new_tty(1, false)
  if tty then
    columns = tty:get_winsize()
    tty:close()
  end
  local no_colour, term = os.getenv("NO_COLOR"), os.getenv("TERM") or "dumb"
  -- A terminal that nobody has told its size says 0.
  return (no_colour or "") == "" and term ~= "dumb", columns and columns > 0 and columns or nil
end

--- The example as a model: its parameters, and sizes with which the estimate of memory keeps the 5 * D values a layer
--- and token that the example itself keeps (D and 4D), as one of D and two of `ff`.
---@param flags table
---@param devices integer
---@return table model
---@return integer tokens of a step
local function model_of(flags, devices)
  local width, layers = flags.embedding_dimension or 2048, flags.num_layers or 4
  local counted = mesh.cost.shardings({ embedding_dimension = width, num_layers = layers, devices = devices })
  local model = { parameters = counted.parameters, layers = layers, width = width, ff = 2 * width }
  return model, (flags.batch_size or 131072) * devices
end

--- All layouts ranked; without times and memory where a rate of the chip is not known.
---@param fits ciranda.mesh.Mesh
---@param flags table
---@return ciranda.mesh.Plan
---@return string? why there are no times
local function ranked(fits, flags)
  local model, tokens = model_of(flags, fits.devices)
  local options = { topology = fits.topology, slices = fits.slices, model = model, tokens = tokens }
  local ok, plan = pcall(mesh.plan, options)
  if ok then
    return plan
  elseif not err.is(plan, "unsupported") then
    error(plan, 0)
  end
  return mesh.plan({ topology = fits.topology, slices = fits.slices }), plan.message
end

--- Where this layout stands among all.
---@param plan ciranda.mesh.Plan
---@param fits ciranda.mesh.Mesh
---@return integer place
---@return ciranda.mesh.Layout
local function place_of(plan, fits)
  local wanted = table.concat(fits.ici, ",") .. "/" .. table.concat(fits.dcn, ",")
  for place, layout in ipairs(plan.layouts) do
    if table.concat(layout.ici, ",") .. "/" .. table.concat(layout.dcn, ",") == wanted then
      return place, layout
    end
  end
  err.raise({ code = "internal", message = ("the layout %s is not among those ranked"):format(wanted) })
end

---@param value number
---@return string "535 ms"
local function duration(value)
  return value >= 1 and ("%.3g s"):format(value) or ("%.3g ms"):format(value * 1000)
end

--- What bounds a step of this layout.
---@param fits ciranda.mesh.Mesh
---@param layout ciranda.mesh.Layout
---@param unknown string? why there are no times
---@return string[]
local function cost_lines(fits, layout, unknown)
  local step, memory = layout.step, layout.memory
  if not step then
    return { ("What bounds a step cannot be said: %s"):format(unknown) }
  end
  local text = ("A step takes at least %s, bound by %s at %.0f %% of peak: compute %s, ICI %s"):format(
    duration(step.seconds),
    step.bound,
    100 * step.utilization,
    duration(step.compute_seconds),
    duration(step.ici_seconds)
  )
  if fits.slices > 1 then
    text = ("%s, DCN %s beside a backward pass of %s"):format(
      text,
      duration(step.dcn.data.seconds),
      duration(step.backward_seconds)
    )
  end
  return {
    text,
    ("Memory: about %.1f of %.1f GB a device%s"):format(
      memory.total / 1e9,
      memory.hbm / 1e9,
      memory.fits and "" or ", which is too much: lower --batch_size"
    ),
  }
end

--- Devices up to which a better order is printed as the array to give JAX; a longer one is in the record of --json.
local PRINTED_DEVICES = 64

--- The pictures of JAX's order and, where there is one, of a better one.
---@param jax ciranda.mesh.Order
---@param best ciranda.mesh.Order
---@param names string[]
---@return string[]
local function pictures(jax, best, names)
  local colour, columns = terminal()
  local options = { names = names, colour = colour, width = columns }
  local lines = { "", mesh.draw.text(jax, options), "" }
  if not best.improved then
    lines[#lines + 1] = "JAX's order is the best one found: no other crosses fewer links."
    return lines
  end
  lines[#lines + 1] = mesh.draw.text(best, options)
  if #best.placement.ids <= PRINTED_DEVICES then
    lines[#lines + 1] = "As the array for jax.sharding.Mesh:"
    lines[#lines + 1] = "  " .. mesh.order_python(best)
  else
    lines[#lines + 1] =
      "The array of devices for jax.sharding.Mesh is in the output of ciranda --json (best.python)."
  end
  return lines
end

--- Writes the pictures; returns the files.
---@param path string
---@param jax ciranda.mesh.Order
---@param best ciranda.mesh.Order
---@param names string[]
---@return string[]
local function write_svg(path, jax, best, names)
  local files = { path }
  fs.write(path, mesh.draw.svg(jax, { names = names }))
  if best.improved then
    files[2] = path:gsub("%.svg$", "") .. "-best.svg"
    fs.write(files[2], mesh.draw.svg(best, { names = names }))
  end
  return files
end

--- An order as a record.
---@param order ciranda.mesh.Order
---@param names string[]
---@return table
local function order_record(order, names)
  local hops = {}
  for axis, name in ipairs(names) do
    local own = order.hops[axis]
    hops[name] = { size = own.size, rings = own.rings, links = own.total, longest = own.longest }
  end
  return { hops = hops, devices = order.placement.ids, python = mesh.order_python(order) }
end

--- Shows where everything is, what it costs and what would be better: on standard output, since it is what was asked
--- for.
---@param context ciranda.cli.Context
---@param fits ciranda.mesh.Mesh
local function show_plan(context, fits)
  local names = fits.names
  local spec = { topology = fits.topology, slices = fits.slices, ici = fits.ici, dcn = fits.dcn }
  local jax, best = mesh.jax_order(spec), mesh.best_order(spec)
  local plan, unknown = ranked(fits, context.flags)
  local place, layout = place_of(plan, fits)
  local costs = cost_lines(fits, layout, unknown)
  local files = context.flags.svg and write_svg(context.flags.svg, jax, best, names) or {}
  local first = {}
  for index = 1, math.min(3, #plan.layouts) do
    first[index] = plan.layouts[index].why
  end
  if context.json then
    context.progress:event({
      event = "plan",
      names = names,
      ici = fits.ici,
      dcn = fits.dcn,
      devices = fits.devices,
      flags = fits.flags.shardings,
      jax_line = fits.jax_line,
      jax = order_record(jax, names),
      best = best.improved and order_record(best, names) or nil,
      cost = costs,
      place = place,
      layouts = plan.count,
      first = first,
      advice = json.array(plan.advice),
      one_more = plan.one_more,
      svg = json.array(files),
    })
    return
  end
  local lines = checked(fits)
  local function add(list, prefix)
    for _, line in ipairs(list) do
      lines[#lines + 1] = (prefix or "") .. line
    end
  end
  add(pictures(jax, best, names))
  lines[#lines + 1] = ""
  add(costs)
  lines[#lines + 1] = ""
  lines[#lines + 1] = ("This layout is number %d of %d%s. The first:"):format(
    place,
    plan.count,
    plan.usable < plan.count and (", of which %d can run"):format(plan.usable) or ""
  )
  for index, why in ipairs(first) do
    lines[#lines + 1] = ("  %d. %s"):format(index, why)
  end
  add(plan.advice)
  lines[#lines + 1] = "One more slice:"
  add(plan.one_more, "  ")
  for _, file in ipairs(files) do
    lines[#lines + 1] = "Picture: " .. file
  end
  io.write(table.concat(lines, "\n"), "\n")
end

--- The peak of a device, as the programs count TFLOP/s.
---@param topology ciranda.mesh.Topology
---@return number? TFLOP/s of bf16
---@return string what it is of
local function peak_of(topology)
  local flops = mesh.types.constant(topology.generation, "bf16_flops")
  local each = topology.devices_per_chip
  local what = ("a %s %s"):format(topology.generation, each > 1 and "device" or "chip")
  return flops and flops / each / 1e12, what
end

---@param context ciranda.cli.Context
---@return integer? status
function M.run(context)
  local flags = context.flags
  local has_fleet = flags.TPU_PREFIX or flags.HOSTS or flags.HOSTS_FILE
  if flags.svg and not flags.plan then
    err.raise({ code = "usage", message = "--svg is for --plan, which draws the mesh and runs nothing" })
  elseif flags.plan and not has_fleet then
    if not flags.TPU_TYPE then
      err.raise({
        code = "usage",
        message = "--plan needs --TPU_TYPE (and --NUM_SLICES), or a fleet: --TPU_PREFIX",
      })
    end
    show_plan(context, check(context, flags.NUM_SLICES or 1, flags.TPU_TYPE))
    return 0
  elseif flags.NUM_SLICES then
    err.raise({
      code = "usage",
      message = "--NUM_SLICES is for --plan without a fleet; --SLICES chooses among slices",
    })
  end
  local fits, collector
  return runner.run(context, {
    command = function(found)
      local live, accelerator = framework.live_slices(found, flags.TPU_TYPE)
      if not accelerator then
        err.raise({
          code = "usage",
          message = "the fleet does not say what its slices are; give --TPU_TYPE, such as v5litepod-16",
        })
      end
      fits = check(context, live, accelerator)
      if flags.plan then
        show_plan(context, fits)
        return nil
      end
      for _, line in ipairs(checked(fits)) do
        context.progress:say("%s", line)
      end
      collector = throughput.collector(found.fleet:workers())
      return M.command(fits.flags.shardings, flags.PROGRAM)
    end,
    on_bytes = function(worker, bytes)
      collector:feed(worker, bytes)
    end,
    ended = function(result)
      local peak, chip = peak_of(fits.topology)
      local summary = collector:summary(peak)
      -- Of a run that did not come to its end, only what it did print is worth a word.
      if #summary.values == 0 and result.status ~= 0 then
        return
      end
      context.progress:event(throughput.record(summary))
      if not context.json then
        for _, line in ipairs(throughput.lines(summary, chip)) do
          context.progress:say("%s", line)
        end
      end
    end,
  })
end

return M
