--- job_status: where a job that runs by itself stands, as its bucket and its queued resource say.
local err = require("ciranda.io.error")
local job = require("ciranda.run.job")
local job_view = require("ciranda.run.job_view")
local journals = require("ciranda.run.journal")
local tables = require("ciranda.cli.table")
local task = require("ciranda.task")

local M = {
  summary = "where a job of multihost_job stands: stage, step, exit status, log of each worker",
  description = "What the workers have left in the bucket, and the state of the queued resource. A job that was given "
    .. "from this machine is known by its name; for another one say --BUCKET_NAME and --BUCKET_DIR as they were given. "
    .. "Ends with the exit status of the job when all have finished, else with 0.",
  flags = {
    { name = "RUN", positional = true, required = true, help = "Name of the job." },
    { name = "BUCKET_NAME", help = "Its bucket (else what this machine's journal says)." },
    { name = "BUCKET_DIR", default = "", help = "Directory in the bucket." },
    { name = "PROJECT", help = "Google Cloud project (else the journal's, else gcloud's)." },
    { name = "ZONE", help = "Zone (else the journal's, else gcloud's)." },
  },
}
table.move(tables.flags, 1, #tables.flags, #M.flags + 1, M.flags)

local COLUMNS = {
  { "SLICE", "slice" },
  { "WORKER", "worker" },
  { "STAGE", "stage" },
  { "ATTEMPT", "attempt" },
  { "STEP", "step" },
  { "STATUS", "status" },
  { "LOG_BYTES", "logBytes" },
  { "SINCE", "time" },
}

--- The job's place: from the flags, else from the journal.
local function place_of(flags, storage)
  local known = journals.valid_name(flags.RUN) and journals.read(flags.RUN)
  known = known and known.job or nil
  local place
  if flags.BUCKET_NAME then
    place = job.place({ bucket = flags.BUCKET_NAME, directory = flags.BUCKET_DIR, run = flags.RUN })
    place.workers = known and known.prefix == place.prefix and known.workers or nil
  elseif known then
    place = { bucket = known.bucket, prefix = known.prefix, workers = known.workers }
  else
    err.raise({
      code = "usage",
      message = ("this machine has started no job %s: say --BUCKET_NAME, and --BUCKET_DIR, as it was given"):format(
        flags.RUN
      ),
    })
  end
  place.generation = job.generation(storage, place)
  if place.generation == 0 then
    err.raise({
      code = "not_found",
      target = flags.RUN,
      message = ("there is no job at gs://%s/%s/"):format(place.bucket, place.prefix),
    })
  end
  return place, known
end

--- The state of the queued resource; what cannot be asked is said, and is no reason to show nothing.
local function queued_resource_state(context, known)
  local flags = context.flags
  local ok, state = pcall(function()
    local tpu = require("ciranda.gcp.tpu").connect({
      project = flags.PROJECT or known and known.project,
      zone = flags.ZONE or known and known.zone,
    })
    return tpu:queued_resource(flags.RUN):state() or "gone"
  end)
  if not ok then
    if err.is_fatal(state) then
      error(state, 0)
    end
    context.progress:say("The queued resource cannot be asked for: %s", state.message)
    return "unknown"
  end
  return state
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  tables.check(flags)
  local storage = require("ciranda.gcp.storage").connect()
  local place, known = place_of(flags, storage)
  local workers, finished = job_view.look(storage, place)
  task.map(workers, function(worker)
    worker.step = job_view.step(storage, place, worker)
    worker.logBytes = worker.log and worker.log.size
    worker.log = worker.log and ("gs://%s/%s"):format(place.bucket, worker.log.name)
  end, 16)
  tables.print(workers, {
    columns = COLUMNS,
    filter = flags.filter,
    format = flags.format,
    event = context.json and "worker" or nil,
  })
  local total = place.workers or #workers
  local state = queued_resource_state(context, known)
  local all = finished > 0 and finished >= total
  local failure = all and job_view.first_failure(storage, place, workers)
  context.finish({
    kind = failure and "user" or "done",
    status = failure and failure.status or 0,
    message = ("%d of %d workers have finished generation %d%s; queued resource %s is %s"):format(
      finished,
      total,
      place.generation,
      failure
          and (", the first failure being slice %d worker %d with status %d"):format(
            failure.slice,
            failure.worker,
            failure.status
          )
        or "",
      flags.RUN,
      state
    ),
  })
  return failure and failure.status or 0
end

return M
