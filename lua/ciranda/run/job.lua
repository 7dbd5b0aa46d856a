--- A job that runs by itself: its name, its place in a bucket, what is put there, its start-up script.
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local job_script = require("ciranda.run.job_script")
local json = require("ciranda.io.json")
local request_checks = require("ciranda.gcp.request_checks")
local task = require("ciranda.task")
local types = require("ciranda.mesh.types")
local vocabulary = require("ciranda.gcp.vocabulary")

local M = {}

--- Seconds between two uploads of a log that has grown.
local UPLOAD_EVERY = 30
--- Seconds between two looks at whether another worker has failed.
local PEERS_EVERY = 10
--- Seconds that another worker's notice may take from its metadata server through the bucket to the others.
local SETTLE = 5
--- Seconds between TERM and KILL when another worker has failed: what the platform gives before maintenance.
local GRACE = 300
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
---@field slices integer? how many slices there will be
---@field workers integer? how many workers there will be, of all slices
---@field generation integer? of what is to be run there

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

-- The generation ---------------------------------------------------------------------------------------------------
--
-- What is to be run is named by one small object, `generation`, which every machine reads at every boot. A job that is
-- given again under its name is a new generation: what an older one has left finished counts for nothing.

--- The number of the generation that is in the bucket, and what makes replacing it safe.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace
---@return integer number 0 when there is none
---@return string version of the object, for a precondition
---@return string text of the object
function M.generation(storage, place)
  local object = storage:stat(place.bucket, place.prefix .. "/generation")
  if not object then
    return 0, "0", ""
  end
  local text = storage:download(place.bucket, place.prefix .. "/generation")
  return math.tointeger(tonumber(text:match("GENERATION=(%d+)"))) or 0, object.generation, text
end

---@class ciranda.run.JobContent what a generation is made of
---@field command string
---@field bundle { name: string, path: string, sha256: string }
---@field manifest { path: string, mode: integer, size: integer, sha256: string }[]
---@field guard { bytes: string, sha256: string }

--- The object that names a generation.
---@param content ciranda.run.JobContent
---@param number integer
---@return string text, string command name of COMMAND's object, string guard name of the guard's
local function named(content, number)
  local command_sha256 = crypto.hex(crypto.sha256(content.command .. "\n"))
  local guard = "ciranda-guard-" .. content.guard.sha256
  local lines = {
    ("GENERATION=%d"):format(number),
    "BUNDLE=" .. content.bundle.name,
    "BUNDLE_SHA256=" .. content.bundle.sha256,
    "COMMAND_SHA256=" .. command_sha256,
    "GUARD=" .. guard,
    "GUARD_SHA256=" .. content.guard.sha256,
  }
  return table.concat(lines, "\n") .. "\n", "command-" .. command_sha256, guard
end

--- Is this what is to be run there now?
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace its `generation` is set when it is
---@param content ciranda.run.JobContent
---@return boolean
function M.is_published(storage, place, content)
  local number, _, text = M.generation(storage, place)
  if number == 0 or text ~= named(content, number) then
    return false
  end
  place.generation = number
  return true
end

--- Puts a generation into the bucket; the object that names it comes last.
---@async
---@param storage ciranda.gcp.Storage
---@param place ciranda.run.JobPlace its `generation` is set
---@param content ciranda.run.JobContent
-- Raises "precondition" when somebody else did so at the same time.
function M.publish(storage, place, content)
  local number, version = M.generation(storage, place)
  local text, command, guard = named(content, number + 1)
  local function put(name, source, options)
    storage:upload(place.bucket, place.prefix .. "/" .. name, source, options or { repeatable = true })
  end
  task.all({
    function()
      put(content.bundle.name, { path = content.bundle.path })
    end,
    function()
      put(guard, content.guard.bytes)
    end,
    function()
      put("manifest.json", json.encode(json.array(content.manifest)))
    end,
    function()
      put(command, content.command .. "\n")
    end,
  })
  put("generation", text, { if_generation_match = version })
  place.generation = number + 1
end

--- The start-up script.
---@param options { place: ciranda.run.JobPlace, run: string, tpu: ciranda.gcp.Tpu, storage: ciranda.gcp.Storage }
---@return string
function M.script(options)
  local place = options.place
  return job_script.text({
    RUN = options.run,
    BUCKET = place.bucket,
    PREFIX = place.prefix,
    STORAGE = options.storage.endpoint,
    TPU = options.tpu.endpoint,
    VERSION = "v2",
    PROJECT = options.tpu.project,
    ZONE = options.tpu.zone,
    QUEUED_RESOURCE = options.run,
    NUM_SLICES = place.slices,
    NUM_WORKERS = place.workers,
    UPLOAD_EVERY = UPLOAD_EVERY,
    PEERS_EVERY = PEERS_EVERY,
    SETTLE = SETTLE,
    GRACE = GRACE,
  })
end

return M
