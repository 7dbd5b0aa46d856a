--- multihost_runner: runs a command on every worker of existing slices, as MaxText's script of that name does.
local budget = require("ciranda.run.budget")
local bundle = require("ciranda.run.bundle")
local checkpoint = require("ciranda.run.checkpoint")
local checkpoint_flags = require("ciranda.run.checkpoint_flags")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local logs = require("ciranda.run.logs")
local run_hooks = require("ciranda.run.hooks")
local target = require("ciranda.run.target")
local task = require("ciranda.task")

local M = {
  summary = "run a command on every worker of existing TPU slices, together",
  description = "Sends SCRIPT_DIR to every worker, starts COMMAND on all of them in the same moment, brings the logs "
    .. "and the exit status home. COMMAND runs by your login shell in ~/RUN_NAME. It lives on the workers: a "
    .. "lost connection is made again, and when this program is gone `ciranda attach RUN_NAME` takes the run "
    .. "up. When one worker fails the others are stopped (TERM, a grace, KILL) and its exit status is "
    .. "returned. Ctrl-C or SIGTERM: every worker gets TERM and time to save; once more leaves at once.",
}

M.flags = table.move(target.flags, 1, #target.flags, 1, {})
table.move(bundle.flags, 1, #bundle.flags, #M.flags + 1, M.flags)
for _, flag in ipairs({
  { name = "COMMAND", required = true, help = "What to run, by the login user's shell." },
  { name = "RUN_NAME", help = "Name of the run and of the directory on the workers (the present time)." },
  {
    name = "USE_EXISTING_FOLDER",
    type = "boolean",
    default = false,
    help = "Send nothing: run in ~/RUN_NAME as it is there. Needs RUN_NAME.",
  },
  {
    name = "SCP_TIMEOUT_SECS",
    type = "integer",
    default = 600,
    help = "Seconds one worker may take until everything is there.",
  },
  {
    name = "STAGE_TIMEOUT",
    type = "duration",
    help = "The same, in other units; it counts when both are given.",
  },
  {
    name = "SETUP",
    help = "What makes a machine ready, such as 'bash setup.sh': done in ~/RUN_NAME before COMMAND is started "
      .. "anywhere, once a machine as long as SETUP and the directory sent are the same.",
  },
  { name = "SETUP_TIMEOUT", type = "duration", default = 1800, help = "Longest time SETUP may take." },
  {
    name = "KILL",
    choices = { "mine", "all" },
    help = "End who holds the accelerators: your own programs, or everybody's (else only what earlier runs left).",
  },
  {
    name = "TAKE",
    type = "boolean",
    default = false,
    help = "Take the workers from another run that has them, and end it there.",
  },
  {
    name = "STRICT_FINGERPRINT",
    type = "boolean",
    default = false,
    help = "Stop when jax, libtpu, Python or the kernel differ between workers (else that is a warning).",
  },
  {
    name = "DEVICE_CHECK",
    type = "boolean",
    default = true,
    help = "Stop when a worker's device files are not as many as its topology says.",
  },
  {
    name = "show",
    help = "Show these workers' output with a prefix: a node set such as slice[0-1]/worker0, or all.",
  },
  {
    name = "CHECKPOINT_DIR",
    help = "Where COMMAND saves on the workers; else read from COMMAND's checkpoint_dir.",
  },
  {
    name = "GRACE",
    type = "duration",
    default = 300,
    help = "Time to save between TERM and KILL when you stop it.",
  },
  {
    name = "FAILURE_GRACE",
    type = "duration",
    default = 30,
    help = "Time between TERM and KILL for the others when one worker has failed.",
  },
  {
    name = "detach",
    type = "boolean",
    default = false,
    help = "Return when COMMAND runs on the workers; the runner goes on without this terminal.",
  },
  {
    name = "LEADER_ONLY",
    type = "boolean",
    default = false,
    help = "A worker is finished when COMMAND's shell has ended, whatever it has left running.",
  },
  {
    name = "STALL",
    type = "duration",
    default = 900,
    help = "Say so when no worker has written anything for so long (0: never).",
  },
  {
    name = "FOLLOW",
    choices = { "auto", "all", "first" },
    default = "auto",
    help = "Whose logs come while they grow: all, or the first worker's and those shown; the others' come at the "
      .. "end. auto: all of up to 64 workers.",
  },
  {
    name = "LOG_LIMIT",
    type = "size",
    default = 20 << 30,
    help = "Bytes of logs that this machine takes; the rest stays on the workers (0: no limit).",
  },
  {
    name = "LOG_KEEP",
    type = "size",
    default = 0,
    help = "Bytes of its log that a worker keeps at least, in place of all (0: all).",
  },
  {
    name = "RESTARTS",
    type = "integer",
    default = 0,
    help = "Further attempts after COMMAND has failed. It must resume by itself, from its last checkpoint.",
  },
  {
    name = "INFRA_RESTARTS",
    type = "integer",
    default = 0,
    help = "Further attempts after a machine was lost; the runner waits until it has been repaired.",
  },
  {
    name = "PREEMPTION_RESTARTS",
    type = "integer",
    default = 0,
    help = "Further attempts after maintenance or a preemption.",
  },
  {
    name = "RECREATE",
    type = "boolean",
    default = false,
    help = "Delete the queued resource and ask for it again when it is SUSPENDED or FAILED for good, at most "
      .. "--PREEMPTION_RESTARTS times.",
  },
  {
    name = "RECREATE_TIMEOUT",
    type = "duration",
    default = 86400,
    help = "Of --RECREATE: how long what is asked for again may take to come up; then it is given up.",
  },
  {
    name = "HOOKS",
    help = "A Lua file that returns functions: on_stall, on_failure, on_preempted, on_maintenance, on_checkpoint.",
  },
}) do
  table.insert(M.flags, flag)
end

--- The name of the run: RUN_NAME, else the present time.
---@param context ciranda.cli.Context
---@return string
-- Raises "usage" for a name that cannot be one.
function M.run_name(context)
  local flags = context.flags
  if flags.USE_EXISTING_FOLDER and not context.given.RUN_NAME then
    err.raise({ code = "usage", message = "--USE_EXISTING_FOLDER needs --RUN_NAME: which folder?" })
  end
  local name = flags.RUN_NAME or os.date("%Y-%m-%d-%H-%M-%S")
  if not journal.valid_name(name) then
    err.raise({
      code = "usage",
      message = ("--RUN_NAME is %q, but takes letters, digits, '_', '-' and '.', not beginning with '-' or '.'"):format(
        name
      ),
    })
  end
  return name
end

--- How many further attempts there may be.
---@param flags table
---@return { user: integer, infra: integer, preempted: integer }
local function restarts(flags)
  local limits = {}
  for kind, name in pairs(budget.FLAGS) do
    if flags[name] and flags[name] < 0 then
      err.raise({ code = "usage", message = ("--%s is %d, but counts from 0"):format(name, flags[name]) })
    end
    limits[kind] = flags[name]
  end
  return limits
end

--- Whether the slices are made again, and how long that may take.
---@param flags table
---@param found ciranda.run.Target
---@return { wait: number }?
local function recreate_of(flags, found)
  if not flags.RECREATE then
    return nil
  end
  local why = not found.cloud and "is for slices of a cloud, not for hosts"
    or not found.cloud.queued_resource and "is for slices of a queued resource; these are nodes by themselves"
    or flags.PREEMPTION_RESTARTS < 1 and "goes by --PREEMPTION_RESTARTS, which is 0"
  if why then
    err.raise({ code = "usage", message = "--RECREATE " .. why })
  end
  return { wait = flags.RECREATE_TIMEOUT }
end

--- Makes the bundle and says what stays.
---@param context ciranda.cli.Context
---@param run string
---@param command string
---@return ciranda.archive.Manifest?
local function make_bundle(context, run, command)
  if context.flags.USE_EXISTING_FOLDER then
    return nil
  end
  journal.check_free(run) -- its archive has that name, and goes to machines that are repaired
  local directory = logs.make_link_directory(run)
  return bundle.from_flags(context, ("%s/script_dir_zip_%s.tar.gz"):format(directory, run), command)
end

--- What staging is told by the flags.
---@param flags table
---@param run string
---@param manifest ciranda.archive.Manifest?
---@return table
local function staging_of(flags, run, manifest)
  return {
    kill = flags.KILL,
    take = flags.TAKE,
    device_check = flags.DEVICE_CHECK,
    strict_fingerprint = flags.STRICT_FINGERPRINT,
    setup = flags.SETUP and {
      command = flags.SETUP,
      hash = require("ciranda.run.setup").hash(flags.SETUP, manifest, run),
      timeout = flags.SETUP_TIMEOUT,
    } or nil,
  }
end

--- Runs it. Another recipe may run through this one: `context.flags` then has its flags, and `hooks.command(found)`
--- makes the command once the fleet is known (nil: run nothing), `hooks.on_bytes` gets the pieces of the workers' logs,
--- `hooks.ended(result)` may say something before the last line.
---@param context ciranda.cli.Context
---@param hooks { command: (fun(found: ciranda.run.Target): string?),
---       on_bytes: fun(worker: ciranda.Worker, bytes: string)?, ended: fun(result: ciranda.run.LaunchResult)? }?
---@return integer status
function M.run(context, hooks)
  local flags = context.flags
  local run = M.run_name(context)
  local limits = restarts(flags)
  local hooks_of_user = flags.HOOKS and run_hooks.load(flags.HOOKS, context.json and context.progress or nil)
    or nil
  if flags.detach then
    return require("ciranda.run.detach").run(context, run)
  end
  local found <close> = target.open(context)
  local command = flags.COMMAND
  if hooks then
    command = hooks.command(found)
    if not command then
      return 0
    end
  end
  for _, warning in ipairs(checkpoint_flags.warnings(command, found.slices[1].autocheckpoint)) do
    context.progress:say("Warning: %s", warning)
  end
  local recreate = recreate_of(flags, found)
  local manifest
  task.all({
    found.login,
    function()
      manifest = make_bundle(context, run, command)
    end,
  })
  local environment_of, note = found.multislice()
  if note then
    context.progress:say("%s", note)
  end
  local result = launch.run({
    fleet = found.fleet,
    environment_of = environment_of,
    connection = found.connection,
    node_state = found.node_state,
    nodes = found.nodes,
    cloud = found.cloud,
    chips = found.chips,
    renew = found.renew,
    restarts = limits,
    recreate = recreate,
    watch = {
      follow = flags.FOLLOW,
      stall = flags.STALL,
      leader_only = flags.LEADER_ONLY,
      log_limit = flags.LOG_LIMIT,
      log_keep = flags.LOG_KEEP > 0 and flags.LOG_KEEP or nil,
    },
    notices = found.tpu ~= nil,
    autocheckpoint = found.slices[1].autocheckpoint,
    hooks = hooks_of_user,
    hooks_file = flags.HOOKS and fs.realpath(flags.HOOKS),
    run = run,
    recipe = context.name,
    arguments = context.args,
    command = command,
    bundle = manifest,
    use_existing = flags.USE_EXISTING_FOLDER,
    progress = context.progress,
    json = context.json,
    on_interrupt = context.on_interrupt,
    show = flags.show,
    checkpoint_directory = flags.CHECKPOINT_DIR or checkpoint.directory_in(command),
    grace = flags.GRACE,
    failure_grace = flags.FAILURE_GRACE,
    stage_timeout = flags.STAGE_TIMEOUT or flags.SCP_TIMEOUT_SECS,
    staging = staging_of(flags, run, manifest),
    on_bytes = hooks and hooks.on_bytes,
    success = "Multihost runner finished successfully!",
  })
  if hooks and hooks.ended then
    hooks.ended(result)
  end
  context.finish(result)
  return result.status
end

return M
