--- orbax: runs a JAX script that saves with Orbax on all slices, after a look at whether it would save on SIGTERM.
local err = require("ciranda.io.error")
local framework = require("ciranda.run.framework")
local fs = require("ciranda.io.fs")
local shell = require("ciranda.io.shell")

local RUNNERS = {
  multihost_runner = require("recipes.multihost_runner"),
  multihost_job = require("recipes.multihost_job"),
}

local OWN = {
  { name = "SCRIPT", required = true, help = "The Python script, in the directory sent (SCRIPT_DIR)." },
  {
    name = "CHECKPOINT_DIR",
    required = true,
    help = "Where the script saves: gs://BUCKET/PATH or a directory that all workers share.",
  },
  {
    name = "CHECKPOINT_FLAG",
    default = "checkpoint_dir",
    help = "The script's flag for it, without dashes; empty: it has none.",
  },
  { name = "ARGUMENT", positional = true, many = true, help = "Behind `--`: more arguments of the script." },
}

local M = {
  summary = "run a JAX script that saves with Orbax on all slices, by either runner",
  description = "Runs python3 SCRIPT --checkpoint_dir=CHECKPOINT_DIR ARGUMENT... on every worker. The script's text is "
    .. "looked at first: without jax.distributed.initialize and reached_preemption nothing is saved on SIGTERM, which "
    .. "is said before anything is sent.",
  flags = framework.all_flags(OWN, RUNNERS),
}

--- What a script lacks to save on SIGTERM, by its text. Modules that it imports are not looked at.
---@param text string
---@return string[] warnings one sentence each, without a full stop
function M.warnings(text)
  -- What only a comment speaks of is not done.
  local code = ("\n" .. text):gsub("\n[ \t]*#[^\n]*", "\n")
  local warnings = {}
  if not code:find("distributed%.initialize") then
    warnings[#warnings + 1] =
      "it has no jax.distributed.initialize: nothing catches SIGTERM, which ends it unsaved"
  end
  if not code:find("reached_preemption") then
    warnings[#warnings + 1] = "it has no reached_preemption: it does not leave after a save on SIGTERM, "
      .. "and is killed when the grace is over"
  end
  if code:find("signal%.signal%(%s*signal%.SIGTERM") or code:find("signal%.signal%(%s*SIGTERM") then
    warnings[#warnings + 1] = "it sets a handler for SIGTERM of its own: behind jax.distributed.initialize that takes "
      .. "JAX's place, and the processes no longer agree on a step"
  end
  return warnings
end

--- The command.
---@param options { script: string, directory: string, flag: string, arguments: string[]? }
---@return string
function M.command(options)
  local words = { options.script }
  if options.flag ~= "" then
    words[2] = ("--%s=%s"):format(options.flag, options.directory)
  end
  table.move(options.arguments or {}, 1, #(options.arguments or {}), #words + 1, words)
  return "exec python3 " .. shell.words(words)
end

---@async
---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  local path = ("%s/%s"):format(flags.SCRIPT_DIR or ".", flags.SCRIPT)
  if fs.exists(path) == "file" then
    for _, warning in ipairs(M.warnings(fs.read(path))) do
      context.progress:say("Warning: %s: %s", flags.SCRIPT, warning)
    end
  elseif not flags.USE_EXISTING_FOLDER then
    err.raise({
      code = "usage",
      op = "orbax",
      message = ("--SCRIPT=%s: there is no such file in %s, which is what is sent (--SCRIPT_DIR)"):format(
        flags.SCRIPT,
        flags.SCRIPT_DIR or "the working directory"
      ),
    })
  end
  return framework.run(context, RUNNERS, OWN, function()
    return M.command({
      script = flags.SCRIPT,
      directory = flags.CHECKPOINT_DIR,
      flag = flags.CHECKPOINT_FLAG:gsub("^%-+", ""),
      arguments = flags.ARGUMENT,
    })
  end)
end

return M
