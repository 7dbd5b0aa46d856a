--- Recipes that start a framework's trainer: they make the COMMAND, and one of the runners runs it.
--
-- Such a recipe has its own flags and those of both runners; --RUNNER says which one it is handed to. Each runner gets
-- the flags that it declares and refuses the other's, so nothing that was typed is without effect.
local err = require("ciranda.io.error")

local M = {}

--- Under which name a flag's value is found.
---@param flag ciranda.cli.Flag
---@return string
local function key_of(flag)
  return (flag.name:gsub("%-", "_"))
end

---@alias ciranda.run.Runners table<string, table> recipes by name: multihost_runner, multihost_job

local NAMES = { "multihost_runner", "multihost_job" }
-- Made here, so not to be typed.
local HIDDEN = { COMMAND = true }

---@type ciranda.cli.Flag[]
M.flags = {
  {
    name = "RUNNER",
    choices = NAMES,
    default = NAMES[1],
    help = "Who runs it: multihost_runner on slices that are there, multihost_job on slices that it asks for.",
  },
  { name = "DRY_RUN", type = "boolean", default = false, help = "Check, print COMMAND and run nothing." },
  {
    name = "TPU_TYPE",
    help = "Accelerator type of each slice: for multihost_job, or where the fleet does not say it.",
  },
}

--- The flags of a recipe: its own, those above, then those of the runners that are not among these.
---@param own ciranda.cli.Flag[]
---@param runners ciranda.run.Runners
---@return ciranda.cli.Flag[]
function M.all_flags(own, runners)
  local all, seen = {}, {}
  local function add(flag)
    if not seen[flag.name] and not HIDDEN[flag.name] then
      seen[flag.name] = flag
      all[#all + 1] = flag
    end
  end
  for _, list in ipairs({ own, M.flags }) do
    for _, flag in ipairs(list) do
      add(flag)
    end
  end
  local owner = {}
  for _, name in ipairs(NAMES) do
    for _, flag in ipairs(runners[name].flags) do
      owner[flag.name] = owner[flag.name] and "both" or name
    end
  end
  for _, name in ipairs(NAMES) do
    for _, flag in ipairs(runners[name].flags) do
      local copy = {}
      for key, value in pairs(flag) do
        copy[key] = value
      end
      copy.required = nil -- that depends on the runner chosen
      if owner[flag.name] == name then
        copy.help = ("%s (%s)"):format(flag.help, name)
      end
      add(copy)
    end
  end
  return all
end

--- Calls a check of `ciranda.mesh`; what does not fit is a usage error here.
---@param op string the recipe
---@param check function
---@param options table
---@return ciranda.mesh.Mesh
-- Raises "usage".
function M.fits(op, check, options)
  local ok, fits = pcall(check, options)
  if not ok then
    if err.is(fits, "invalid", "usage") then
      err.raise({ code = "usage", op = op, message = fits.message, cause = fits })
    end
    error(fits, 0)
  end
  return fits
end

--- The context for the chosen runner: its own flags, what was typed or its defaults.
---@param context ciranda.cli.Context
---@param runners ciranda.run.Runners
---@param own ciranda.cli.Flag[] the recipe's, which are no runner's unless both declare them
---@return ciranda.cli.Context
-- Raises "usage" for a flag of the other runner, and when one is missing.
local function context_for(context, runners, own)
  local name = context.flags.RUNNER
  local values, known = {}, {}
  for _, list in ipairs({ own, M.flags, runners[name].flags }) do
    for _, flag in ipairs(list) do
      known[key_of(flag)] = true
    end
  end
  for _, flag in ipairs(runners[name].flags) do
    local key = key_of(flag)
    values[key] = flag.default
    if context.given[key] then
      values[key] = context.flags[key]
    elseif flag.required and not HIDDEN[flag.name] then
      err.raise({ code = "usage", message = ("--RUNNER=%s needs --%s"):format(name, flag.name) })
    end
  end
  local other = name == NAMES[1] and NAMES[2] or NAMES[1]
  for _, flag in ipairs(runners[other].flags) do
    local key = key_of(flag)
    if context.given[key] and not known[key] then
      err.raise({
        code = "usage",
        message = ("--%s is no flag of %s; --RUNNER=%s has it"):format(flag.name, name, other),
      })
    end
  end
  return setmetatable({ flags = values }, { __index = context })
end

---@class ciranda.run.FrameworkPlace
---@field run string name of the run
---@field slices integer|table[] how many, or the live ones, for the checks of `ciranda.mesh`
---@field type string? accelerator type; nil when nobody knows it
---@field autocheckpoint boolean? does the platform send SIGTERM before maintenance? nil when nobody knows it
---@field say fun(format: string, ...) tells the user

--- The slices found, as the checks of `ciranda.mesh` take them.
---@param found ciranda.run.Target
---@param given string? --TPU_TYPE
---@return table[] slices
---@return string? type nil when a slice's is not known
function M.live_slices(found, given)
  local counts = {}
  for _, worker in ipairs(found.fleet:workers()) do
    counts[worker.slice] = (counts[worker.slice] or 0) + 1
  end
  local live, unknown = {}, false
  for _, slice in ipairs(found.slices) do
    if counts[slice.index] then
      local accelerator = slice.accelerator or given
      unknown = unknown or not accelerator
      live[#live + 1] = {
        index = slice.index,
        name = slice.name,
        accelerator = accelerator,
        topology = slice.topology,
        workers = counts[slice.index],
      }
    end
  end
  return live, not unknown and live[1].accelerator or nil
end

--- Runs a trainer through the runner that was chosen.
---@async
---@param context ciranda.cli.Context
---@param runners ciranda.run.Runners
---@param own ciranda.cli.Flag[] the recipe's own flags
---@param make fun(place: ciranda.run.FrameworkPlace): string, string? makes COMMAND, and says where it saves
---@return integer status
-- Raises "usage" for flags that do not fit, and what the runner raises.
function M.run(context, runners, own, make)
  local name = context.flags.RUNNER
  local runner = runners[name]
  local inner = context_for(context, runners, own)
  -- Trainers keep their checkpoints under the run's name: it is made before COMMAND is.
  local run = runner.run_name(inner)
  inner.flags.RUN_NAME = run

  --- COMMAND, or nil when it was to be printed only.
  local function command_for(place)
    place.run = run
    function place.say(...)
      context.progress:say(...)
    end
    local command, directory = make(place)
    if name == "multihost_runner" then
      inner.flags.CHECKPOINT_DIR = inner.flags.CHECKPOINT_DIR or directory
    end
    if context.flags.DRY_RUN then
      for _, warning in
        ipairs(require("ciranda.run.checkpoint_flags").warnings(command, place.autocheckpoint))
      do
        context.progress:say("Warning: %s", warning)
      end
      if context.json then
        context.progress:event({ event = "command", command = command, checkpoint_dir = directory })
      else
        io.write(command, "\n")
      end
      return nil
    end
    return command
  end

  if name == "multihost_job" then
    local flags = inner.flags
    flags.COMMAND = command_for({
      slices = flags.NUM_SLICES,
      type = flags.TPU_TYPE,
      autocheckpoint = flags.ENABLE_AUTOCHECKPOINT
        or flags.CQR_EXTRA_ARGS:find("--autocheckpoint-enabled", 1, true) ~= nil,
    })
    return flags.COMMAND and runner.run(inner) or 0
  end
  return runner.run(inner, {
    command = function(found)
      local live, accelerator = M.live_slices(found, context.flags.TPU_TYPE)
      return command_for({
        slices = live,
        type = accelerator,
        autocheckpoint = found.slices[1].autocheckpoint,
      })
    end,
  })
end

return M
