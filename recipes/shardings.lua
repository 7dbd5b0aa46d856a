--- shardings: checks a sharding against the slices, then runs MaxText's shardings example on all of them.
local err = require("ciranda.io.error")
local mesh = require("ciranda.mesh")
local runner = require("recipes.multihost_runner")

-- The example has moved: as a module of an installed MaxText, and as a file of its repository.
local MODULES =
  { "maxtext.examples.shardings", "pedagogical_examples.shardings", "MaxText.examples.shardings" }
local FILES = { "src/maxtext/examples/shardings.py", "pedagogical_examples/shardings.py", "shardings.py" }

local M = {
  summary = "check a sharding against the slices, then run MaxText's shardings example on them",
  description = "Takes the flags of MaxText's shardings.py. The sizes are checked against the slices before "
    .. "anything is sent: ICI sizes must multiply to the devices of a slice, DCN sizes to the number of "
    .. "slices, and the example wants the slices on dcn_data. One size a side may be -1. Then the example "
    .. "runs on every worker as multihost_runner runs a command.",
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
  help = "Check and run nothing: against the slices found, or against TPU_TYPE and NUM_SLICES.",
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

---@param text string
---@return string
local function quote(text)
  return text:match("^[%w_./=-]+$") and text or "'" .. text:gsub("'", "'\\''") .. "'"
end

--- The command that finds the example on the worker and becomes it.
---@param arguments string[]
---@param program string?
---@return string
function M.command(arguments, program)
  local words = {}
  for place, word in ipairs(arguments) do
    words[place] = quote(word)
  end
  local tail = table.concat(words, " ")
  if program then
    local how = program:match("%.py$") and "python3 " or "python3 -m "
    return ("exec %s%s %s"):format(how, quote(program), tail)
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

--- The slices of a fleet as it was chosen.
---@param found ciranda.run.Target
---@param type_given string?
---@return table[]
local function live_slices(found, type_given)
  local counts = {}
  for _, worker in ipairs(found.fleet:workers()) do
    counts[worker.slice] = (counts[worker.slice] or 0) + 1
  end
  local live = {}
  for _, slice in ipairs(found.slices) do
    if counts[slice.index] then
      local accelerator = slice.accelerator or type_given
      if not accelerator then
        err.raise({
          code = "usage",
          message = "the fleet does not say what its slices are; give --TPU_TYPE, such as v5litepod-16",
        })
      end
      live[#live + 1] = {
        index = slice.index,
        name = slice.name,
        accelerator = accelerator,
        topology = slice.topology,
        workers = counts[slice.index],
      }
    end
  end
  return live
end

--- Checks the sizes and shows them; returns the example's arguments.
---@param context ciranda.cli.Context
---@param slices integer|table[] how many, or the live ones
---@param accelerator string
---@return string[]
local function check(context, slices, accelerator)
  local flags = context.flags
  local values = {}
  for _, list in ipairs({ SIZES, OTHERS }) do
    for _, entry in ipairs(list) do
      values[entry[1]] = flags[entry[1]]
    end
  end
  values.profiler_path = flags.profiler_path
  local ok, fits = pcall(mesh.check.shardings, { slices = slices, type = accelerator, values = values })
  if not ok then
    if err.is(fits, "invalid", "usage") then
      err.raise({ code = "usage", op = "shardings", message = fits.message, cause = fits })
    end
    error(fits, 0)
  end
  context.progress:say("%s", fits.table)
  for _, note in ipairs(fits.notes) do
    context.progress:say("%s: %s", note.level, note.text)
  end
  context.progress:say("%s", fits.jax_line)
  return fits.flags.shardings
end

---@param context ciranda.cli.Context
---@return integer? status
function M.run(context)
  local flags = context.flags
  local has_fleet = flags.TPU_PREFIX or flags.HOSTS or flags.HOSTS_FILE
  if flags.plan and not has_fleet then
    if not flags.TPU_TYPE then
      err.raise({
        code = "usage",
        message = "--plan needs --TPU_TYPE (and --NUM_SLICES), or a fleet: --TPU_PREFIX",
      })
    end
    check(context, flags.NUM_SLICES or 1, flags.TPU_TYPE)
    return 0
  elseif flags.NUM_SLICES then
    err.raise({
      code = "usage",
      message = "--NUM_SLICES is for --plan without a fleet; --SLICES chooses among slices",
    })
  end
  return runner.run(context, {
    command = function(found)
      local live = live_slices(found, flags.TPU_TYPE)
      local arguments = check(context, live, live[1].accelerator)
      return not flags.plan and M.command(arguments, flags.PROGRAM) or nil
    end,
  })
end

return M
