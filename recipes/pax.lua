--- pax: trains with Pax (paxml) on all slices so that it saves and leaves on SIGTERM.
local err = require("ciranda.io.error")
local framework = require("ciranda.run.framework")
local mesh = require("ciranda.mesh")
local shell = require("ciranda.io.shell")

--- The first release that saves on SIGTERM.
local OLDEST = { 1, 1, 0 }

local RUNNERS = {
  multihost_runner = require("recipes.multihost_runner"),
  multihost_job = require("recipes.multihost_job"),
}

local OWN = {
  { name = "exp", required = true, help = "The experiment, such as tasks.lm.params.lm_cloud.LmCloudSpmd2B." },
  {
    name = "job_log_dir",
    required = true,
    help = "Where Pax writes: gs://BUCKET/PATH or a shared directory.",
  },
  {
    name = "ICI_MESH_SHAPE",
    type = "list",
    help = "What the experiment's class has as ICI_MESH_SHAPE, such as 1,8,1: checked against a slice.",
  },
  {
    name = "DCN_MESH_SHAPE",
    type = "list",
    help = "What it has as DCN_MESH_SHAPE, such as 2,1,1: checked against the number of slices.",
  },
  { name = "LOG", default = "pax_logs.txt", help = "File on the worker that the output goes to as well." },
  {
    name = "ARGUMENT",
    positional = true,
    many = true,
    help = "Behind `--`: more arguments of paxml's main.",
  },
}

local M = {
  summary = "train with Pax on all slices, saving on SIGTERM, by either runner",
  description = "Runs paxml's main with --jax_fully_async_checkpoint=1 and --exit_after_ondemand_checkpoint=1. paxml "
    .. "must be 1.1.0 or newer, which every worker looks at first. Pax leaves with 1 after such a save: what counts as "
    .. "saved is what is on disk in JOB_LOG_DIR/checkpoints.",
  flags = framework.all_flags(OWN, RUNNERS),
}

-- Prints the release of paxml; ends with 1 when there is none and with 3 when it is older than its arguments.
local LOOK = table.concat({
  "import re, sys;",
  "from importlib.metadata import version;",
  'v = version("paxml");',
  "print(v);",
  'sys.exit(3 * ([int(n) for n in re.findall("[0-9]+", v)[:3]] < [int(n) for n in sys.argv[1:]]))',
}, " ")

--- The command that looks at paxml and runs it. Pipes keep the trainer's status, which only some shells can.
---@param options { exp: string, job_log_dir: string, log: string, arguments: string[]? }
---@return string
function M.command(options)
  local words = {
    "--jax_fully_async_checkpoint=1",
    "--exit_after_ondemand_checkpoint=1",
    "--exp=" .. options.exp,
    "--job_log_dir=" .. options.job_log_dir,
  }
  table.move(options.arguments or {}, 1, #(options.arguments or {}), #words + 1, words)
  local oldest = table.concat(OLDEST, ".")
  local script = table.concat({
    ("release=$(python3 -c %s %s 2>/dev/null);"):format(shell.quote(LOOK), table.concat(OLDEST, " ")),
    "case $? in 0) ;;",
    '3) echo "paxml is $release here, and saving on SIGTERM needs',
    ('%s or newer: pip install -U paxml" >&2; exit 126;;'):format(oldest),
    '*) echo "paxml is not installed for python3 here: pip install paxml (--SETUP)" >&2; exit 127;; esac;',
    ("python3 -m paxml.main %s"):format(shell.words(words)),
  }, " ")
  if options.log ~= "" then
    script = ("%s 2>&1 | tee -a %s"):format(script, shell.words({ options.log }))
  end
  return "exec bash -o pipefail -c " .. shell.quote(script)
end

--- The sizes that a list flag has.
---@param list string[]
---@param name string
---@return integer[]
-- Raises "usage" for what is no positive integer.
local function sizes_of(list, name)
  local sizes = {}
  for place, text in ipairs(list) do
    -- As Python writes it, [1, 8, 1], too.
    local size = math.tointeger(tonumber((text:gsub("^%[", ""):gsub("%]$", ""))))
    if not size or size < 1 then
      err.raise({
        code = "usage",
        op = "pax",
        message = ("--%s has '%s', but takes positive whole numbers, such as 1,8,1"):format(name, text),
      })
    end
    sizes[place] = size
  end
  return sizes
end

--- Checks the shapes against the slices.
---@param flags table
---@param place ciranda.run.FrameworkPlace
-- Raises "usage" for what does not fit.
local function check(flags, place)
  if not flags.ICI_MESH_SHAPE then
    if flags.DCN_MESH_SHAPE then
      err.raise({ code = "usage", op = "pax", message = "--DCN_MESH_SHAPE needs --ICI_MESH_SHAPE" })
    end
    place.say("The experiment's mesh is not checked: --ICI_MESH_SHAPE and --DCN_MESH_SHAPE do not say it")
    return
  end
  local ici = sizes_of(flags.ICI_MESH_SHAPE, "ICI_MESH_SHAPE")
  local dcn = flags.DCN_MESH_SHAPE and sizes_of(flags.DCN_MESH_SHAPE, "DCN_MESH_SHAPE")
  if not place.type then
    place.say("What the slices are is not known (--TPU_TYPE): the mesh is not checked")
    return
  end
  local names = { "replica", "data", "mdl" }
  if #ici ~= #names then
    names = {}
    for axis = 1, #ici do
      names[axis] = "axis" .. axis
    end
  end
  local fits = framework.fits("pax", mesh.check.mesh, {
    what = "Pax",
    slices = place.slices,
    type = place.type,
    names = names,
    ici = ici,
    dcn = dcn,
    label = function(side, index)
      return ("%s_MESH_SHAPE[%d]"):format(side, index - 1)
    end,
  })
  -- The remarks are for axes as MaxText means them; Pax shards weights over `data`.
  place.say("%s", fits.table)
end

---@async
---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  return framework.run(context, RUNNERS, OWN, function(place)
    check(flags, place)
    local command = M.command({
      exp = flags.exp,
      job_log_dir = flags.job_log_dir,
      log = flags.LOG,
      arguments = flags.ARGUMENT,
    })
    return command, (flags.job_log_dir:gsub("/+$", "")) .. "/checkpoints"
  end)
end

return M
