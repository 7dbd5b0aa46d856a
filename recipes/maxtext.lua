--- maxtext: trains with MaxText on all slices, its parallelism checked before anything is sent.
local err = require("ciranda.io.error")
local framework = require("ciranda.run.framework")
local mesh = require("ciranda.mesh")
local mesh_maxtext = require("ciranda.mesh.maxtext")
local shell = require("ciranda.io.shell")

-- The trainer has moved: into a package, and the package into src/. Newest first.
local MODULES = { "maxtext.trainers.pre_train.train", "MaxText.train" }
local CONFIG_ROOTS = { "", "MaxText/", "src/MaxText/", "src/maxtext/" }

-- Prints the first of these modules that is there, and its package's directory. It looks at files and imports nothing:
-- MaxText's package imports JAX, whose own errors belong into the run.
local FINDER = table.concat({
  "import importlib.util as u, os, sys;",
  'w = lambda n: getattr(u.find_spec(n.partition(".")[0]), "submodule_search_locations", None) or [];',
  'print(*[n + " " + d for n in sys.argv[1:] for d in w(n)',
  'if os.path.isfile(os.path.join(d, *n.split(".")[1:]) + ".py")][:1])',
}, " ")

local RUNNERS = {
  multihost_runner = require("recipes.multihost_runner"),
  multihost_job = require("recipes.multihost_job"),
}

local OWN = {
  {
    name = "CONFIG",
    default = "configs/base.yml",
    help = "Configuration file: in the directory sent, or below MaxText's own.",
  },
  { name = "MODEL", help = "MaxText's model_name, such as llama2-7b." },
  {
    name = "BASE_OUTPUT_DIRECTORY",
    help = "MaxText's base_output_directory, gs://BUCKET/PATH or a directory that all workers share.",
  },
  {
    name = "ENABLE_AUTOCHECKPOINT",
    type = "boolean",
    help = "Save on SIGTERM: sets enable_autocheckpoint=true, and has multihost_job ask the platform for its half. "
      .. "Otherwise as the slices have it.",
  },
  { name = "PROGRAM", help = "A module or file in place of MaxText's trainer." },
}
for _, name in ipairs(mesh_maxtext.parameters) do
  OWN[#OWN + 1] = { name = name, type = "integer", help = "As in MaxText." }
end
OWN[#OWN + 1] =
  { name = "SETTING", positional = true, many = true, help = "KEY=VALUE: any parameter of MaxText." }

local M = {
  summary = "train with MaxText on all slices, by either runner",
  description = "Makes MaxText's command line and has multihost_runner or multihost_job run it. The parallelism is "
    .. "checked against the slices before anything is sent; run_name is RUN_NAME, so a further attempt resumes from "
    .. "its checkpoints. SETTING is KEY=VALUE, any parameter of MaxText; it wins over what is set here.",
  flags = framework.all_flags(OWN, RUNNERS),
}

--- The command that finds the trainer and its configuration on the worker and becomes it.
---@param options { config: string, words: string[], program: string? }
---@return string
function M.command(options)
  local tail = ('"$config" %s'):format(shell.words(options.words))
  local config = shell.words({ options.config })
  local roots = {}
  for place, root in ipairs(options.config:find("^/") and { "" } or CONFIG_ROOTS) do
    roots[place] = root .. config
  end
  local parts = {
    "if [ -d src/maxtext ] || [ -d src/MaxText ]; then",
    'PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"; export PYTHONPATH; fi;',
    ("found=$(python3 -c %s %s);"):format(shell.quote(FINDER), table.concat(MODULES, " ")),
    ('for config in %s "${found#* }"/%s; do if [ -f "$config" ]; then break; fi; done;'):format(
      table.concat(roots, " "),
      config
    ),
    'if ! [ -f "$config" ]; then',
    ('echo "the configuration "%s" is neither here nor in MaxText" >&2; exit 127; fi;'):format(config),
  }
  if options.program then
    local how = options.program:match("%.py$") and "python3" or "python3 -m"
    parts[#parts + 1] = ("exec %s %s %s"):format(how, shell.words({ options.program }), tail)
    return table.concat(parts, " ")
  end
  for _, part in ipairs({
    -- Until April 2025 its files imported each other by bare names, which works only when it is run as a file.
    'if grep -Eqs "^import (max_utils|pyconfig)" MaxText/train.py; then',
    ("exec python3 MaxText/train.py %s; fi;"):format(tail),
    ('if [ -n "$found" ]; then exec python3 -m "${found%%%% *}" %s; fi;'):format(tail),
    ("if [ -f MaxText/train.py ]; then exec python3 MaxText/train.py %s; fi;"):format(tail),
    'echo "MaxText is not here: send its repository (--SCRIPT_DIR), install it (--SETUP), or say --PROGRAM" >&2;',
    "exit 127",
  }) do
    parts[#parts + 1] = part
  end
  return table.concat(parts, " ")
end

--- KEY=VALUE words as a table.
---@param words string[]
---@return table<string, string>
-- Raises "usage" for another word.
local function settings_of(words)
  local settings = {}
  for _, word in ipairs(words) do
    local key, value = word:match("^([%a_][%w_.]*)=(.*)$")
    if not key then
      err.raise({
        code = "usage",
        op = "maxtext",
        message = ("'%s' is no parameter of MaxText: they are written KEY=VALUE, without dashes"):format(
          word
        ),
      })
    end
    settings[key] = value
  end
  return settings
end

---@param text string?
---@return boolean
local function is_true(text)
  return text ~= nil and (text:lower() == "true" or text == "1")
end

--- Checks the parallelism; what to pass of it.
---@param flags table
---@param settings table<string, string>
---@param place ciranda.run.FrameworkPlace
---@return string[] words
-- Raises "usage" for what does not fit.
local function parallelism(flags, settings, place)
  local values, typed = {}, {}
  for _, name in ipairs(mesh_maxtext.parameters) do
    local text = settings[name]
    if text and flags[name] then
      err.raise({ code = "usage", op = "maxtext", message = ("%s is given twice"):format(name) })
    end
    values[name] = flags[name] or text
    if flags[name] then
      typed[#typed + 1] = ("%s=%d"):format(name, flags[name])
    end
  end
  if not place.type then
    place.say("What the slices are is not known (--TPU_TYPE): the parallelism is not checked")
    return typed
  elseif settings.mesh_axes or settings.custom_mesh and settings.custom_mesh ~= "" then
    place.say("A mesh of its own (mesh_axes, custom_mesh): the parallelism is not checked")
    return typed
  end
  local fits = framework.fits("maxtext", mesh.check.maxtext, {
    slices = place.slices,
    type = place.type,
    values = values,
    allow_split = is_true(settings.allow_split_physical_axes),
  })
  place.say("%s", fits.table)
  for _, note in ipairs(fits.notes) do
    place.say("%s: %s", note.level, note.text)
  end
  return typed
end

---@async
---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  local typed = flags.SETTING or {}
  local settings = settings_of(typed)
  return framework.run(context, RUNNERS, OWN, function(place)
    local words = {}
    local function set(key, value)
      if value and settings[key] == nil then
        settings[key] = value
        words[#words + 1] = ("%s=%s"):format(key, value)
      end
    end
    set("run_name", place.run)
    set("base_output_directory", flags.BASE_OUTPUT_DIRECTORY)
    set("model_name", flags.MODEL)
    local autocheckpoint = flags.ENABLE_AUTOCHECKPOINT
    if autocheckpoint == nil then
      autocheckpoint = place.autocheckpoint
    end
    set("enable_autocheckpoint", autocheckpoint and "true" or nil)
    for _, list in ipairs({ parallelism(flags, settings, place), typed }) do
      table.move(list, 1, #list, #words + 1, words)
    end
    local base = settings.base_output_directory
    local directory = base
      and (settings.enable_checkpointing or ""):lower() ~= "false"
      and ("%s/%s/checkpoints"):format(base:gsub("/+$", ""), settings.run_name)
    return M.command({ config = flags.CONFIG, words = words, program = flags.PROGRAM }), directory or nil
  end)
end

return M
