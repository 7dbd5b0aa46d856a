--- A job that runs by itself, seen from afar: what its bucket says of it, and following it to its end.
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local ledger = require("ciranda.run.ledger")
local task = require("ciranda.task")

local M = {}

--- Seconds between two looks at the bucket when following.
local LOOK_EVERY = 10
--- Bytes at the end of a log in which a step is looked for.
local TAIL = 4096
--- Objects read at once.
local AT_ONCE = 16

---@class ciranda.run.JobWorker what the bucket says of a worker
---@field slice integer
---@field worker integer
---@field status integer? its exit status, when it has finished this generation
---@field stage string? "identity", "fetch", "environment", "running", "interrupted", "failed", "finished"
---@field attempt integer?
---@field time string? of the last stage
---@field log { name: string, size: integer }?

local function by_number(a, b)
  if a.slice ~= b.slice then
    return a.slice < b.slice
  end
  return a.worker < b.worker
end

--- An object's content; one that is being replaced, or is not JSON, says nothing yet.
local function read(storage, place, name)
  local ok, value = pcall(function()
    return json.decode((storage:download(place.bucket, name)))
  end)
  if not ok and not err.is(value, "not_found", "parse") then
    error(value, 0)
  end
  return ok and type(value) == "table" and value or {}
end

--- Looks at a job's objects.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace with its generation
---@param known table<string, table>? contents read before, by name and version; new ones are added
---@return ciranda.run.JobWorker[] workers that have left something, in order
---@return integer finished how many have a status
function M.look(storage, place, known)
  known = known or {}
  local workers, by_place, contents = {}, {}, {}
  for _, object in ipairs((storage:list(place.bucket, { prefix = place.prefix .. "/" }))) do
    local kind, slice, worker =
      object.name:sub(#place.prefix + 2):match("^(%l[%l_]*)_slice_(%d+)_worker_(%d+)$")
    if kind == "status" or kind == "stage" or kind == "main_command_log" then
      local key = slice .. "/" .. worker
      local entry = by_place[key]
      if not entry then
        entry = { slice = math.tointeger(tonumber(slice)), worker = math.tointeger(tonumber(worker)) }
        by_place[key] = entry
        workers[#workers + 1] = entry
      end
      if kind == "main_command_log" then
        entry.log = { name = object.name, size = math.tointeger(tonumber(object.size)) or 0 }
      else
        contents[#contents + 1] =
          { entry = entry, name = object.name, key = ("%s#%s"):format(object.name, object.generation) }
      end
    end
  end
  local finished = 0
  task.map(contents, function(item)
    known[item.key] = known[item.key] or read(storage, place, item.name)
    local value, entry = known[item.key], item.entry
    -- What an older generation has left says nothing of this one.
    if value.generation ~= place.generation then
      return
    elseif value.stage then
      entry.stage, entry.attempt, entry.time = value.stage, value.attempt, value.time
    elseif value.status then
      entry.status = math.tointeger(value.status) or 1
      finished = finished + 1
    end
  end, AT_ONCE)
  table.sort(workers, by_number)
  return workers, finished
end

--- The last step that a worker's log speaks of.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace
---@param worker ciranda.run.JobWorker
---@return integer?
function M.step(storage, place, worker)
  local log = worker.log
  if not log or log.size == 0 then
    return nil
  end
  local text = storage:download(place.bucket, log.name, {
    first = math.max(0, log.size - TAIL),
    last = log.size - 1,
  })
  local step
  for digits in text:gmatch("step[:=]?%s+(%d+)") do
    step = math.tointeger(tonumber(digits))
  end
  return step
end

--- Who failed first, as the workers have settled it.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace
---@param workers ciranda.run.JobWorker[]
---@return { slice: integer, worker: integer, status: integer }? nil when nobody failed
function M.first_failure(storage, place, workers)
  local first = read(storage, place, ("%s/failed-%d"):format(place.prefix, place.generation))
  if first.status then
    return first
  end
  for _, worker in ipairs(workers) do
    if (worker.status or 0) ~= 0 then
      return worker --[[@as table]]
    end
  end
  return nil
end

--- Brings the first worker's log up to date on standard output.
local function show_log(storage, place, first, shown)
  local log = first and first.slice == 0 and first.worker == 0 and first.log
  if not log or log.size <= shown then
    return shown
  end
  local bytes = storage:download(place.bucket, log.name, { first = shown, last = log.size - 1 })
  io.stdout:write(bytes)
  io.stdout:flush()
  return shown + #bytes
end

---@class ciranda.run.FollowOptions
---@field storage ciranda.gcp.Storage
---@field queued_resource ciranda.gcp.QueuedResource
---@field place ciranda.run.JobPlace
---@field progress ciranda.cli.Progress
---@field journal ciranda.Journal
---@field json boolean?
---@field shown integer? bytes of the first worker's log that are there from before
---@field every number? seconds between two looks
---@field again (fun(reason: any): ciranda.gcp.QueuedResource?)? asks for the slices once more when their end is one
---  after which that may help

local function delete(options, queued_resource)
  ledger.delete(options.journal, queued_resource, {
    on_change = function(change)
      options.progress:status(("Deleting %s: %s"):format(queued_resource.id, change))
    end,
  })
end

--- Why a queued resource will not be ACTIVE any more.
---@async
---@param queued_resource ciranda.gcp.QueuedResource
---@return any reason
function M.reason_of(queued_resource)
  local ok, reason = pcall(queued_resource.wait, queued_resource, "ACTIVE", { timeout = 60, not_yet = 0 })
  if not ok and err.is_fatal(reason) then
    error(reason, 0)
  end
  return not ok and reason or ("%s was dead and is ACTIVE now"):format(tostring(queued_resource))
end

--- Takes away what the workers of an earlier request have settled: that they have finished, failed, been told.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace
function M.forget(storage, place)
  for _, object in ipairs((storage:list(place.bucket, { prefix = place.prefix .. "/" }))) do
    local kind = object.name:sub(#place.prefix + 2):match("^(%l+)[-_]")
    if kind == "status" or kind == "finished" or kind == "failed" or kind == "interruption" then
      storage:delete(place.bucket, object.name, { generation = object.generation })
    end
  end
end

--- Asks for the slices once more.
---@return ciranda.gcp.QueuedResource
-- Raises the reason, with what it means for the job, when that would not help.
local function renew(options, queued_resource, finished)
  local place, reason = options.place, M.reason_of(queued_resource)
  local renewed = options.again and options.again(reason)
  if not renewed then
    err.raise({
      code = err.is(reason) and reason.code or "failed",
      op = "follow",
      target = queued_resource.id,
      cause = reason,
      message = ("%s, and only %d of %d workers have finished; its logs are in gs://%s/%s/"):format(
        err.text(reason),
        finished,
        place.workers,
        place.bucket,
        place.prefix
      ),
    })
  end
  return renewed
end

--- Follows a job until every worker has finished, then deletes its queued resource.
---@async
---@param options ciranda.run.FollowOptions
---@return { status: integer, kind: string, message: string }
-- Raises "failed", "preempted", "quota" and the like when the queued resource ends before the job.
function M.follow(options)
  local storage, place, progress = options.storage, options.place, options.progress
  local queued_resource = options.queued_resource
  local known, shown, state = {}, options.shown or 0, nil
  local workers, finished
  while true do
    -- The state comes first: a queued resource that goes after it was asked for has its last objects in the bucket.
    local now = queued_resource:state()
    workers, finished = M.look(storage, place, known)
    if not options.json then
      shown = show_log(storage, place, workers[1], shown)
    end
    if finished >= place.workers then
      break
    end
    if now ~= state then
      state = now
      progress:say("%s is %s", tostring(queued_resource), state or "gone")
    end
    if state == nil or state == "FAILED" or state == "SUSPENDED" or state == "DELETING" then
      queued_resource, known, state = renew(options, queued_resource, finished), {}, nil
    end
    progress:status(("%d of %d workers have finished"):format(finished, place.workers))
    task.sleep(options.every or LOOK_EVERY)
  end
  delete(options, queued_resource)
  local failure = M.first_failure(storage, place, workers)
  if not failure then
    return { status = 0, kind = "done", message = "Multihost job finished successfully!" }
  end
  progress:say(
    "Main command failed on slice %d worker %d with error code %d, see logs for details",
    failure.slice,
    failure.worker,
    failure.status
  )
  return {
    status = failure.status,
    kind = "user",
    message = ("user: exit status %d, from slice %d worker %d; logs in gs://%s/%s/"):format(
      failure.status,
      failure.slice,
      failure.worker,
      place.bucket,
      place.prefix
    ),
  }
end

return M
