--- multihost_job: asks for slices that run a command by themselves, as MaxText's script of that name does.
local account = require("ciranda.io.account")
local attempt = require("ciranda.run.attempt")
local bundle = require("ciranda.run.bundle")
local checkpoint_flags = require("ciranda.run.checkpoint_flags")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_flags = require("ciranda.provider.gcloud_flags")
local job = require("ciranda.run.job")
local job_view = require("ciranda.run.job_view")
local journals = require("ciranda.run.journal")
local ledger = require("ciranda.run.ledger")
local provisions = require("ciranda.run.provision")
local topology = require("ciranda.mesh.topology")

local M = {
  summary = "ask for TPU slices whose start-up script runs a command, and return",
  creates = true, -- run --sim begins without slices
  description = "Puts SCRIPT_DIR into a bucket and asks for a queued resource whose machines fetch it and run COMMAND "
    .. "as root in /RUN_NAME, a virtual environment active, at every boot until it has finished: it goes on after "
    .. "maintenance, repair and reset. Returns when the request has been accepted; --follow=true stays until the end, "
    .. "and asks again for what was preempted. Logs and exit statuses are in the bucket, in "
    .. "BUCKET_DIR/RUN_NAME/main_command_log_slice_S_worker_W and .../status_slice_S_worker_W, written while the job "
    .. "runs (`ciranda job_status RUN_NAME`); they do not go to Cloud Logging. When one worker fails the others are "
    .. "stopped, with time to save; when every worker has finished they delete the queued resource. `ciranda gc` finds "
    .. "one that was left.",
  flags = {
    { name = "TPU_TYPE", default = "v4-8", help = "Accelerator type of each slice." },
    { name = "VERSION", help = "Runtime version (the usual one for TPU_TYPE)." },
    { name = "NUM_SLICES", type = "integer", default = 2, help = "How many slices." },
    { name = "COMMAND", required = true, help = "What to run on every worker, by bash." },
    { name = "BUCKET_NAME", required = true, help = "Bucket for the code and the logs." },
    { name = "BUCKET_DIR", default = "", help = "Directory in the bucket." },
    { name = "PROJECT", help = "Google Cloud project (else gcloud's)." },
    { name = "ZONE", help = "Zone (else gcloud's)." },
    {
      name = "RUN_NAME",
      help = "Name of the run, of the queued resource and of its nodes (your name and the time).",
    },
    {
      name = "CQR_EXTRA_ARGS",
      default = "",
      help = "More flags of `gcloud alpha compute tpus queued-resources create`, as one string.",
    },
    {
      name = "ENABLE_AUTOCHECKPOINT",
      type = "boolean",
      default = false,
      help = "Have the platform signal COMMAND before maintenance, and wait up to five minutes.",
    },
    {
      name = "follow",
      type = "boolean",
      default = false,
      help = "Stay: show the first worker's log, end with the job.",
    },
    {
      name = "PREEMPTIONS",
      type = "integer",
      default = 3,
      help = "How often a preempted queued resource is deleted and asked for again, by whoever is there to see it.",
    },
    {
      name = "UPDATE",
      type = "boolean",
      default = false,
      help = "Give the machines of RUN_NAME, which are there, this code and COMMAND at their next boot.",
    },
  },
}
table.move(bundle.flags, 1, #bundle.flags, #M.flags + 1, M.flags)

--- The run's name, which is the queued resource's too: RUN_NAME made legal, else the user's name and the present time.
---@param context ciranda.cli.Context
---@return string
function M.run_name(context)
  local given = context.flags.RUN_NAME
  local name = job.legal_name(given or ("%s-%s"):format(account.user(), os.date("%Y-%m-%d-%H-%M-%S")))
  if given and given ~= name then
    context.progress:say("RUN_NAME %s is no name for a queued resource: it is %s", given, name)
  end
  return name
end

--- The request that the flags make, and what it says about the runtime.
local function make_request(flags, run)
  local request, global = gcloud_flags.parse(gcloud_flags.shell_words(flags.CQR_EXTRA_ARGS), {})
  for _, field in ipairs({ "node_id", "node_prefix", "slices", "accelerator", "runtime" }) do
    if request[field] ~= nil then
      err.raise({
        code = "usage",
        message = ("CQR_EXTRA_ARGS says what this recipe says itself (%s); use its own flags"):format(field),
      })
    end
  end
  if
    request.metadata and request.metadata["startup-script"]
    or request.metadata_from_file and request.metadata_from_file["startup-script"]
  then
    err.raise({
      code = "usage",
      message = "CQR_EXTRA_ARGS has a startup-script: that is where this job runs; put it into COMMAND",
    })
  end
  request.id = run
  request.slices = flags.NUM_SLICES
  request.accelerator = flags.TPU_TYPE
  request.runtime = flags.VERSION
  request.autocheckpoint = flags.ENABLE_AUTOCHECKPOINT or request.autocheckpoint
  return request, global
end

--- What is there under the name already? Its machines read what is in the bucket.
---@return "killed"|"given"|nil before a program of this run has asked for it: it was killed, or had done its work
---@return string? state of the queued resource
local function look_before(flags, tpu, run)
  local state = tpu:queued_resource(run):state()
  local earlier = state and journals.read(run)
  local object = earlier and earlier.objects["queued_resource " .. run]
  if flags.UPDATE and not state then
    err.raise({
      code = "usage",
      message = ("--UPDATE: there is no queued resource %s in %s"):format(run, tpu.zone),
    })
  end
  return object and (earlier.ended and "given" or "killed") or nil, state
end

--- Makes the bundle and puts everything that the machines fetch into the bucket, when `check` does not refuse: machines
--- that are there would take it up.
local function upload(context, storage, run, place, before, state, check)
  local flags = context.flags
  local temporary = fs.tempdir("ciranda-job")
  local _ <close> = setmetatable({}, {
    __close = function()
      fs.remove_tree(temporary)
    end,
  })
  local archive = ("script_dir_zip_%s.tar.gz"):format(run)
  local manifest = bundle.from_flags(context, temporary .. "/" .. archive, flags.COMMAND)
  local entries = {}
  for index, entry in ipairs(manifest.entries) do
    entries[index] = { path = entry.path, mode = entry.mode, size = entry.size, sha256 = entry.sha256 }
  end
  local content = {
    command = flags.COMMAND,
    bundle = { name = archive, path = manifest.archive, sha256 = manifest.archive_sha256 },
    manifest = entries,
    guard = attempt.guard(),
  }
  -- The same command again is the same job; another one would be taken up by machines that do something else.
  local same = before and not flags.UPDATE and job.is_published(storage, place, content)
  if not same and state and not flags.UPDATE and before ~= "killed" then
    err.raise({
      code = "exists",
      target = run,
      message = (
        "queued resource %s exists already and is %s: give another --RUN_NAME; or --UPDATE=true, which gives "
        .. "its machines this code at their next boot; or delete it: ciranda qr delete %s --force"
      ):format(run, state, run),
    })
  end
  if not flags.UPDATE then
    check()
  end
  if same then
    return
  end
  job.publish(storage, place, content)
  context.progress:say(
    "%s is in gs://%s/%s/",
    bundle.size_text(manifest.archive_size),
    place.bucket,
    place.prefix
  )
end

--- How much of the first worker's log is there from before.
local function log_size(storage, place)
  local object = storage:stat(place.bucket, place.prefix .. "/main_command_log_slice_0_worker_0")
  return object and math.tointeger(tonumber(object.size)) or 0
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags, progress = context.flags, context.progress
  local run = M.run_name(context)
  local request, global = make_request(flags, run)
  local tpu = require("ciranda.gcp.tpu").connect({
    project = flags.PROJECT or global.project,
    zone = flags.ZONE or global.zone,
  })
  local storage = require("ciranda.gcp.storage").connect()
  if not flags.VERSION then
    local runtime = job.usual_runtime(flags.TPU_TYPE)
    if runtime then
      progress:say("Runtime version: %s, the usual one for %s", runtime, flags.TPU_TYPE)
    end
  end
  job.check(request, tpu)
  for _, warning in ipairs(checkpoint_flags.warnings(flags.COMMAND, request.autocheckpoint or false)) do
    progress:say("Warning: %s", warning)
  end
  local shape = topology.of({ type = request.accelerator, topology = request.topology })
  local place = job.place({ bucket = flags.BUCKET_NAME, directory = flags.BUCKET_DIR, run = run })
  place.slices, place.workers = request.slices, shape.hosts * request.slices
  local before, state = look_before(flags, tpu, run)
  local journal <close> = journals.open(run, { recipe = context.name, arguments = context.args })
  request.startup_script = job.script({ place = place, run = run, tpu = tpu, storage = storage })
  upload(context, storage, run, place, before, state, function()
    ledger.check(journal, tpu, request)
  end)
  journal:append("job", {
    bucket = place.bucket,
    prefix = place.prefix,
    slices = place.slices,
    workers = place.workers,
    generation = place.generation,
    project = tpu.project,
    zone = tpu.zone,
  })
  if flags.UPDATE then
    journal:close(0, "detached")
    context.finish({
      kind = "done",
      status = 0,
      message = ("Generation %d is there, and is taken up at the next boot: ciranda qr reset %s --zone=%s"):format(
        place.generation,
        run,
        tpu.zone
      ),
    })
    return 0
  end
  local shown = log_size(storage, place)
  local provision = provisions.start({
    journal = journal,
    tpu = tpu,
    request = request,
    keep = "job",
    preemptions = flags.PREEMPTIONS,
    on_note = function(text)
      progress:say("%s", text)
    end,
    on_gone = function()
      job_view.forget(storage, place)
    end,
  })
  if not flags.follow and (state == "SUSPENDED" or state == "FAILED") then
    -- Nobody stays who would see that it is dead.
    local reason = job_view.reason_of(provision.queued_resource)
    if not provision:again(reason) then
      error(reason, 0)
    end
  end
  local made = provision.queued_resource
  progress:say(
    "Queued resource %s was accepted: %d slices of %s",
    made.id,
    request.slices,
    request.accelerator
  )
  progress:say("Logs: gs://%s/%s/main_command_log_slice_S_worker_W", place.bucket, place.prefix)
  if flags.follow then
    local _ <close> = setmetatable({}, {
      __close = function(_, problem)
        if err.is(problem, "cancelled") then
          local form = "Nobody follows run %s now; it goes on by itself: ciranda job_status %s shows it, the same "
            .. "command follows it again, ciranda qr delete %s --force ends it"
          progress:say(form, run, run, made.id)
        end
      end,
    })
    local result = job_view.follow({
      storage = storage,
      queued_resource = made,
      place = place,
      progress = progress,
      json = context.json,
      journal = journal,
      shown = shown,
      again = function(reason)
        return provision:again(reason) and provision.queued_resource or nil
      end,
    })
    journal:close(result.status, result.kind)
    context.finish(result)
    return result.status
  end
  journal:close(0, "detached")
  context.finish({
    kind = "done",
    status = 0,
    message = ("The job runs by itself; see it with: ciranda job_status %s"):format(run),
  })
  return 0
end

return M
