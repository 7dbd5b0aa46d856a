--- Runs a recipe: finds it, parses its flags, gives it a context, turns what it returns into an exit status.
---
--- A recipe is a module that returns `{summary, description, flags, run}`; `run(context)` is a task and returns an exit
--- status, or nothing for 0.
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local flags = require("ciranda.cli.flags")
local json = require("ciranda.io.json")
local progress = require("ciranda.cli.progress")
local session = require("ciranda.cli.session")

local M = {}

---@class ciranda.cli.Context
---@field name string the recipe's name
---@field flags table<string, any> values by flag name ("-" as "_")
---@field given table<string, true> the flags that were typed
---@field args string[] what followed the recipe's name, as typed
---@field json boolean whether --json was given
---@field progress ciranda.cli.Progress
---@field on_interrupt fun(handler: fun(signal: string, count: integer): boolean?)
---@field finish fun(result: {kind: string, status?: integer, message?: string})

--- What people type who come from gcloud and MaxText's scripts.
local MEANT =
  { queuedresources = "qr", queuedresource = "qr", tpus = "tpu_vm", tpu = "tpu_vm", list = "runs" }

--- How many letters must be changed, added or taken away to make one word of the other.
---@param from string
---@param to string
---@return integer
local function distance(from, to)
  local row = {}
  for column = 0, #to do
    row[column] = column
  end
  for i = 1, #from do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #to do
      local change = diagonal + (from:byte(i) == to:byte(j) and 0 or 1)
      diagonal = row[j]
      row[j] = math.min(change, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#to]
end

--- The message for a name that is no recipe.
---@param name string
---@return string
local function unknown_recipe(name)
  local recipes = require("ciranda.cli.help").recipes()
  local function fold(text)
    return (text:lower():gsub("%.py$", ""):gsub("[-_]", ""))
  end
  local meant, least = MEANT[fold(name)], 3
  for _, recipe in ipairs(meant and {} or recipes) do
    local far = distance(fold(recipe), fold(name))
    if far < least and far * 2 < #name then
      meant, least = recipe, far
    end
  end
  return ("there is no recipe '%s'; %s (a file is given with its .lua)"):format(
    name,
    meant and ("did you mean '%s'? `ciranda help` lists all"):format(meant)
      or "the built-in ones are: " .. table.concat(recipes, ", ")
  )
end

--- Finds a recipe by name (built in) or by file (a name with "/" or ending in ".lua").
---@param name string
---@return table recipe
---@return string? directory of the file, for modules beside it
---@error code "usage" when there is none
function M.load(name)
  local recipe, directory
  if name:find("/") or name:find("%.lua$") then
    directory = name:match("^(.*)/[^/]*$") or "."
    require("ciranda.cli.paths").install { beside = directory }
    local chunk, problem = loadfile(name)
    if not chunk then
      errors.raise { code = "usage", message = ("the recipe cannot be read: %s"):format(problem) }
    end
    recipe = chunk(name)
  else
    local known = name:gsub("%-", "_")
    if not engine.load("recipes." .. known) then
      errors.raise { code = "usage", message = unknown_recipe(name) }
    end
    recipe = require("recipes." .. known)
  end
  if type(recipe) ~= "table" or type(recipe.run) ~= "function" then
    local form =
      "%s is no recipe: it must return a table with a function `run` (a script is run as: ciranda %s)"
    errors.raise { code = "usage", message = form:format(name, name) }
  end
  return recipe, directory
end

--- Starts a private simulated cloud and points this process at it.
---@param options table from --sim-slices and the like
---@param values table the recipe's flags: TPU_PREFIX names the slices, and is set where nothing says whom to run on
---@param creates? boolean the recipe makes its own slices: without --sim-slices there are none
---@return table simulator with close()
local function start_simulator(options, values, creates)
  local uv = require("luv")
  local settings = {
    slices = math.tointeger(tonumber(options.slices or (creates and 0 or 2))),
    type = options.type,
    prefix = values.TPU_PREFIX or "sim",
    seed = options.seed and math.tointeger(tonumber(options.seed)),
  }
  for key in pairs(options) do
    if key ~= "slices" and key ~= "type" and key ~= "seed" then
      errors.raise { code = "usage", message = ("there is no option --sim-%s"):format(key) }
    end
  end
  if not settings.slices or settings.slices < 0 then
    errors.raise {
      code = "usage",
      message = ("--sim-slices is '%s', but takes a whole number"):format(options.slices),
    }
  end
  if not (creates or values.HOSTS or values.HOSTS_FILE) then
    values.TPU_PREFIX = settings.prefix
  end
  local simulator = require("ciranda.sim").start(settings)
  for name, value in pairs(simulator.env) do
    uv.os_setenv(name, value)
  end
  return simulator
end

--- The last line and the --json record.
local function announce(context, result)
  if context.json then
    io.write(
      json.encode {
        event = "end",
        recipe = context.name,
        kind = result.kind,
        status = result.status,
        message = result.message,
      },
      "\n"
    )
    io.flush()
  elseif result.message then
    context.progress:say("%s", result.message)
  end
end

--- What an error that reached the top is called, and its status.
---@param err any
---@return string kind
---@return integer status
local function kind_of(err)
  local code = errors.is(err) and err.code or nil
  if code == "usage" then
    return "usage", 2
  elseif code == "deadline" then
    return "deadline", 124
  elseif code == "preempted" then
    return "preempted", 1
  end
  return "failed", 1
end

--- A message handler: errors of the library carry their traceback; a plain string, which is a mistake in the recipe,
--- gets one that ends where the recipe begins.
local function with_traceback(err)
  if type(err) ~= "string" then
    return err
  end
  local trace = debug.traceback(nil, 2):gsub("\n%s*%[C%]: in function 'xpcall'.*", "")
  return errors.new { code = "internal", message = err, traceback = trace }
end

--- What a recipe calls a flag: MaxText's have capitals, gcloud's have not.
---@param recipe table
---@param name string
---@return string
local function own_flag(recipe, name)
  for _, flag in ipairs(recipe.flags or {}) do
    if flag.name:lower() == name then
      return flag.name
    end
  end
  return name
end

--- What was printed must be there: a list that a full disk has cut looks like a short one. A recipe with a verdict of
--- its own keeps it.
---@param judged boolean
---@return boolean lost it is not all there, and that has been told
local function check_output(judged)
  local lost = require("ciranda.io.stdio").lost()
  if lost then
    local message = ("what was printed is not all there: standard output: %s"):format(lost)
    if not judged then
      errors.raise { code = "io", message = message }
    end
    io.stderr:write("ciranda: ", message, "\n")
  end
  return lost ~= nil
end

--- What must be right before a recipe runs: that it is there, its flags, its simulated cloud.
---@param command ciranda.cli.Command
---@return table? recipe nil when its help was all that was wanted
---@return table values
---@return table<string, true> given
---@return table? simulator to be closed
local function prepare(command)
  local recipe = M.load(command.name)
  local values, given = flags.parse(command.name, recipe, command.args)
  if values.help then
    io.write(flags.help(command.name, recipe), "\n")
    check_output(false)
    return nil, values, given
  end
  require("ciranda.cli.prompt").install()
  return recipe, values, given, command.sim and start_simulator(command.sim, values, recipe.creates) or nil
end

--- The last record of what has failed. Raises it.
---@param context ciranda.cli.Context
---@param problem any
local function fail(context, problem)
  if errors.is(problem, "cancelled") or errors.is(problem, "interrupted") then
    local code, signal = session.interrupted_status()
    local message = ("interrupted: by %s, exit status %d"):format(signal or "the program", code)
    announce(context, { kind = "interrupted", status = code, message = message })
  else
    local kind, code = kind_of(problem)
    announce(context, { kind = kind, status = code, message = context.json and tostring(problem) or nil })
  end
  error(problem, 0)
end

--- Runs a recipe from its command line.
---@param command ciranda.cli.Command
---@return integer status
function M.main(command)
  session.patience = 1
  -- It asks a run to save. Before the run is there it must not end what is about to take the run up.
  engine.catch_signal("SIGUSR1")
  return session.run(function()
    local result
    local context = {
      name = command.name,
      args = command.args,
      json = command.json,
      progress = progress.new { json = command.json },
      on_interrupt = session.on_interrupt,
      finish = function(given_result)
        result = given_result
      end,
    }
    local prepared, recipe, values, given, simulator = xpcall(prepare, with_traceback, command)
    if not prepared then
      fail(context, recipe)
    elseif not recipe then
      return 0
    end
    context.flags, context.given = values, given
    local _ <close> = simulator
    local ok, status = xpcall(recipe.run, with_traceback, context)
    context.progress:close()
    if errors.is(status, "usage") and status.flag then
      status.message = status.message:gsub("%-%-" .. status.flag, "--" .. own_flag(recipe, status.flag))
    end
    if not ok then
      fail(context, status)
    end
    local judged = result ~= nil or (status or 0) ~= 0
    local lost = check_output(judged)
    result = result or { kind = (status or 0) == 0 and "done" or "failed" }
    result.status = status or result.status or 0
    announce(context, result)
    if not lost then
      check_output(judged) -- that was the last record
    end
    return result.status
  end)
end

return M
