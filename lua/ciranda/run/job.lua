--- A job that runs by itself: its name, its place in a bucket, its start-up script, and following it from afar.
local err = require("ciranda.io.error")
local job_script = require("ciranda.run.job_script")
local json = require("ciranda.io.json")
local ledger = require("ciranda.run.ledger")
local request_checks = require("ciranda.gcp.request_checks")
local task = require("ciranda.task")
local types = require("ciranda.mesh.types")
local vocabulary = require("ciranda.gcp.vocabulary")

local M = {}

--- Seconds between two uploads of a log that has grown.
local UPLOAD_EVERY = 30
--- Seconds between two looks at the bucket when following.
local LOOK_EVERY = 10
--- The longest name: nodes are called NAME-<slice>, within 63 characters.
local NAME_LIMIT = 58

--- A name for a queued resource made of any text: small letters, digits and "-", a letter first.
---@param text string
---@return string
function M.legal_name(text)
  local name = text:lower():gsub("[^%l%d-]+", "-"):gsub("%-+", "-"):gsub("^[^%l]+", ""):gsub("%-+$", "")
  name = name:sub(1, NAME_LIMIT):gsub("%-+$", "")
  return name ~= "" and name or "job"
end

--- The runtime version that is usual for an accelerator type, nil for an unknown one.
---@param accelerator string
---@return string?
function M.usual_runtime(accelerator)
  local generation = types.generation_of(accelerator)
  return generation and request_checks.RUNTIMES[generation.name]
end

--- Checks a request as it will be checked when it is made, before anything is uploaded.
---@param request ciranda.gcp.Request
---@param tpu ciranda.gcp.Tpu
-- Raises "usage".
function M.check(request, tpu)
  vocabulary.queued_resource(request, { project = tpu.project, zone = tpu.zone })
end

---@class ciranda.run.JobPlace where a job's objects are
---@field bucket string
---@field prefix string
---@field bundle string?
---@field bundle_sha256 string?
---@field guard string?
---@field guard_sha256 string?
---@field workers integer? how many workers there will be

--- The place of a run's objects.
---@param options { bucket: string, directory: string?, run: string } with or without gs:// and slashes
---@return ciranda.run.JobPlace
-- Raises "usage" for names that are none.
function M.place(options)
  local bucket = options.bucket:gsub("^gs://", ""):gsub("/+$", "")
  local directory = (options.directory or ""):gsub("^gs://", ""):gsub("^/+", ""):gsub("/+$", "")
  -- BUCKET_NAME and BUCKET_DIR may both begin with the bucket, as people copy them.
  if directory == bucket then
    directory = ""
  elseif directory:sub(1, #bucket + 1) == bucket .. "/" then
    directory = directory:sub(#bucket + 2)
  end
  if not bucket:match("^[%l%d][%l%d._-]+[%l%d]$") then
    err.raise({
      code = "usage",
      message = ("BUCKET_NAME is %q, but takes a bucket's name (without a directory: that is BUCKET_DIR)"):format(
        options.bucket
      ),
    })
  elseif directory:match("[^%w/._-]") then
    err.raise({
      code = "usage",
      message = ("BUCKET_DIR is %q, but takes letters, digits, '/', '.', '_' and '-'"):format(
        options.directory
      ),
    })
  end
  return { bucket = bucket, prefix = (directory ~= "" and directory .. "/" or "") .. options.run }
end

--- The start-up script.
---@param options { place: ciranda.run.JobPlace, command: string, run: string, tpu: ciranda.gcp.Tpu,
---  storage: ciranda.gcp.Storage, slices: integer, delete: boolean } delete: the first worker deletes the queued
---  resource when all have finished
---@return string
function M.script(options)
  local place = options.place
  return job_script.text({
    RUN = options.run,
    COMMAND = options.command,
    BUCKET = place.bucket,
    PREFIX = place.prefix,
    STORAGE = options.storage.endpoint,
    TPU = options.tpu.endpoint,
    VERSION = "v2",
    BUNDLE = place.bundle,
    BUNDLE_SHA256 = place.bundle_sha256,
    GUARD = place.guard,
    GUARD_SHA256 = place.guard_sha256,
    PROJECT = options.tpu.project,
    ZONE = options.tpu.zone,
    QUEUED_RESOURCE = options.delete and options.run or "",
    NUM_SLICES = options.slices,
    NUM_WORKERS = place.workers,
    UPLOAD_EVERY = UPLOAD_EVERY,
  })
end

---@class ciranda.run.JobView what the bucket says of a job
---@field statuses { slice: integer, worker: integer, status: integer }[] of those that have finished, in order
---@field logs { slice: integer, worker: integer, size: integer, name: string }[]

--- Looks at a job's objects.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace
---@param known table<string, integer>? statuses read before, by object name; new ones are added
---@return ciranda.run.JobView
function M.look(storage, place, known)
  known = known or {}
  local view = { statuses = {}, logs = {} }
  local statuses = {}
  for _, object in ipairs((storage:list(place.bucket, { prefix = place.prefix .. "/" }))) do
    local kind, slice, worker =
      object.name:sub(#place.prefix + 2):match("^(%l[%l_]*)_slice_(%d+)_worker_(%d+)$")
    slice, worker = math.tointeger(tonumber(slice)), math.tointeger(tonumber(worker))
    if kind == "status" then
      statuses[#statuses + 1] = { slice = slice, worker = worker, name = object.name }
    elseif kind == "main_command_log" then
      table.insert(view.logs, {
        slice = slice,
        worker = worker,
        name = object.name,
        size = math.tointeger(tonumber(object.size)) or 0,
      })
    end
  end
  task.map(statuses, function(entry)
    if not known[entry.name] then
      local value = json.decode((storage:download(place.bucket, entry.name)))
      known[entry.name] = math.tointeger(value.status) or 1
    end
    entry.status = known[entry.name]
  end, 16)
  local function by_number(a, b)
    if a.slice ~= b.slice then
      return a.slice < b.slice
    end
    return a.worker < b.worker
  end
  table.sort(statuses, by_number)
  table.sort(view.logs, by_number)
  view.statuses = statuses
  return view
end

--- Brings the first worker's log up to date on standard output.
local function show_log(storage, place, view, shown)
  local log = view.logs[1]
  if not log or log.slice ~= 0 or log.worker ~= 0 or log.size <= shown then
    return shown
  end
  local bytes = storage:download(place.bucket, log.name, { first = shown, last = log.size - 1 })
  io.stdout:write(bytes)
  io.stdout:flush()
  return shown + #bytes
end

--- Why a queued resource will not be ACTIVE any more.
local function reason_of(queued_resource)
  local ok, reason = pcall(queued_resource.wait, queued_resource, "ACTIVE", { timeout = 60, not_yet = 0 })
  if not ok and err.is(reason, "cancelled") then
    error(reason, 0)
  end
  return not ok and reason or ("%s was dead and is ACTIVE now"):format(tostring(queued_resource))
end

--- Follows a job until every worker has finished, then deletes its queued resource.
---@async
---@param options { storage: ciranda.gcp.Storage, queued_resource: ciranda.gcp.QueuedResource,
---  place: ciranda.run.JobPlace, progress: ciranda.cli.Progress, json: boolean?, journal: ciranda.Journal,
---  every: number?, again: (fun(reason: any): ciranda.gcp.QueuedResource?)? } every: seconds between two looks; again:
---  asks for the slices once more when their end is one after which that may help
---@return { status: integer, kind: string, message: string }
-- Raises "failed", "preempted", "quota" and the like when the queued resource ends before the job.
function M.follow(options)
  local storage, place, progress = options.storage, options.place, options.progress
  local known, shown, state = {}, 0, nil
  local view
  while true do
    view = M.look(storage, place, known)
    if not options.json then
      shown = show_log(storage, place, view, shown)
    end
    if #view.statuses >= place.workers then
      break
    end
    local now = options.queued_resource:state()
    if now ~= state then
      state = now
      progress:say("%s is %s", tostring(options.queued_resource), state or "gone")
    end
    if state == nil or state == "FAILED" or state == "SUSPENDED" or state == "DELETING" then
      local reason = reason_of(options.queued_resource)
      local renewed = options.again and options.again(reason)
      if not renewed then
        err.raise({
          code = err.is(reason) and reason.code or "failed",
          op = "follow",
          target = options.queued_resource.id,
          cause = reason,
          message = ("%s, and only %d of %d workers have finished; its logs are in gs://%s/%s/"):format(
            err.text(reason),
            #view.statuses,
            place.workers,
            place.bucket,
            place.prefix
          ),
        })
      end
      -- What slices of the failed request have finished counts for nothing.
      for _, entry in ipairs(view.statuses) do
        storage:delete(place.bucket, entry.name)
      end
      options.queued_resource, known, state = renewed, {}, nil
    end
    progress:status(("%d of %d workers have finished"):format(#view.statuses, place.workers))
    task.sleep(options.every or LOOK_EVERY)
  end
  ledger.delete(options.journal, options.queued_resource, {
    on_change = function(change)
      progress:status(("Deleting %s: %s"):format(options.queued_resource.id, change))
    end,
  })
  for _, entry in ipairs(view.statuses) do
    if entry.status ~= 0 then
      progress:say(
        "Main command failed on slice %d worker %d with error code %d, see logs for details",
        entry.slice,
        entry.worker,
        entry.status
      )
      return {
        status = entry.status,
        kind = "user",
        message = ("user: exit status %d, from slice %d worker %d; logs in gs://%s/%s/"):format(
          entry.status,
          entry.slice,
          entry.worker,
          place.bucket,
          place.prefix
        ),
      }
    end
  end
  return { status = 0, kind = "done", message = "Multihost job finished successfully!" }
end

return M
