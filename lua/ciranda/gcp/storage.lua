--- Cloud Storage's JSON API: objects up, down, listed, deleted; checksums both ways.
---
---     local storage = require("ciranda.gcp.storage").connect()
---     storage:upload("bucket", "runs/1/bundle.tar.gz", { path = "bundle.tar.gz" })
---     local text = storage:download("bucket", "runs/1/log")
---
--- STORAGE_EMULATOR_HOST (a URL, or host:port) points it at an emulator, which needs no credentials; so does gcloud's
--- own override api_endpoint_overrides/storage, with credentials.

local credentials = require("ciranda.gcp.credentials")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local gcp_client = require("ciranda.gcp.client")
local task = require("ciranda.task")
local upload = require("ciranda.gcp.storage_upload")
local url = require("ciranda.io.url")

local M = {}

M.ENDPOINT = "https://storage.googleapis.com/"

--- Chunks of a resumable upload are multiples of this (Cloud Storage: 256 KiB).
M.GRANULE = 256 * 1024

---@class ciranda.gcp.Storage
---@field client ciranda.gcp.Client
---@field endpoint string  ends with a slash
local Storage = {}
Storage.__index = Storage
Storage.__name = "ciranda.gcp.Storage"

--- The base of an address in whichever of its usual forms.
local function base_of(address)
  if not address:find("://", 1, true) then
    address = "http://" .. address
  end
  return (address:gsub("/+$", ""):gsub("/storage/v1$", "")) .. "/"
end

local OPTIONS = { client = true, config = true, endpoint = true }

--- Connect. Nothing is asked of it yet.
---@async
---@param options { client: ciranda.gcp.Client?, config: ciranda.gcp.Config?, endpoint: string? }?
---@return ciranda.gcp.Storage
--- Raises `auth` without credentials.
function M.connect(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "storage.connect")
  local config = options.config or gcloud_config.load()
  local emulator = config.env("STORAGE_EMULATOR_HOST")
  if emulator == "" then
    emulator = nil
  end
  local client = options.client
    or gcp_client.new { credentials = emulator and credentials.none() or credentials.find { config = config } }
  local endpoint = options.endpoint or emulator or config:endpoint("storage", M.ENDPOINT)
  return setmetatable({ client = client, endpoint = base_of(endpoint) }, Storage)
end

--- "gs://bucket/a/b" or "bucket/a/b" -> "bucket", "a/b".
---@param address string
---@return string bucket
---@return string name "" without one
--- Raises `usage`.
function M.parse(address)
  local bucket, name = address:gsub("^gs://", ""):match("^([^/]+)/?(.*)$")
  if not bucket or not bucket:match("^[%w][%w._-]*[%w]$") then
    errors.raise {
      code = "usage",
      op = "storage",
      target = address,
      message = ("'%s' is no place in Cloud Storage; it is gs://BUCKET/NAME"):format(address),
    }
  end
  return bucket, name
end

local function object_url(self, bucket, name)
  return ("%sstorage/v1/b/%s/o/%s"):format(self.endpoint, url.escape(bucket), url.escape(name))
end

--- Where an object's bytes are, for a program that fetches them by itself.
---@param bucket string
---@param name string
---@return string
function Storage:media_url(bucket, name)
  return object_url(self, bucket, name) .. "?alt=media"
end

--- What messages call an object.
local function shown(bucket, name)
  return ("gs://%s/%s"):format(bucket, name)
end

--- Name the object in a failure.
local function named(bucket, name, fn, ...)
  local result = table.pack(pcall(fn, ...))
  if result[1] then
    return table.unpack(result, 2, result.n)
  end
  local err = result[2]
  if errors.is(err) and not errors.is(err, "cancelled", "misuse") then
    local absent = (err.api_message or ""):find("bucket does not exist", 1, true)
    err.message = ("%s: %s%s"):format(
      shown(bucket, name),
      absent and err.message:gsub("%.$", "") or err.message,
      absent and "; make it with: gcloud storage buckets create gs://" .. bucket or ""
    )
    err.target = shown(bucket, name)
  end
  return error(err, 0)
end

---@class ciranda.gcp.Preconditions
---@field if_generation_match integer|string|nil  0: the object must not exist
---@field if_generation_not_match integer|string|nil
---@field if_metageneration_match integer|string|nil
---@field generation integer|string|nil           of this one version

-- Metadata ----------------------------------------------------------------------------------------------------------

--- The object's resource: size (a string of digits), generation, crc32c, metadata, ...
---@async
---@param bucket string
---@param name string
---@param options ciranda.gcp.Preconditions?
---@return table? object nil when there is none
function Storage:stat(bucket, name, options)
  local found, object = pcall(self.client.json, self.client, {
    url = object_url(self, bucket, name),
    query = upload.conditions(options or {}),
  })
  if found then
    return object
  elseif errors.is(object, "not_found") then
    return nil
  end
  return error(object, 0)
end

---@class ciranda.gcp.ListOptions
---@field prefix string?
---@field delimiter string?  "/": what lies deeper is given as prefixes
---@field page_size integer?

--- The objects of a bucket, in the order of their names.
---@async
---@param bucket string
---@param options ciranda.gcp.ListOptions?
---@return table[] objects
---@return string[] prefixes
function Storage:list(bucket, options)
  options = options or {}
  local prefixes = {}
  local objects = self.client:pages(
    {
      url = ("%sstorage/v1/b/%s/o"):format(self.endpoint, url.escape(bucket)),
      query = { prefix = options.prefix, delimiter = options.delimiter, maxResults = options.page_size },
    },
    "items",
    function(page)
      for _, prefix in ipairs(type(page.prefixes) == "table" and page.prefixes or {}) do
        prefixes[#prefixes + 1] = prefix
      end
    end
  )
  return objects, prefixes
end

--- Delete an object.
---@async
---@param bucket string
---@param name string
---@param options ciranda.gcp.Preconditions? with a generation the call may be repeated without harm
---@return boolean deleted false when there was none
function Storage:delete(bucket, name, options)
  options = options or {}
  local done, err = pcall(self.client.request, self.client, {
    method = "DELETE",
    url = object_url(self, bucket, name),
    query = upload.conditions(options),
    idempotent = options.generation ~= nil or options.if_generation_match ~= nil,
  })
  if done then
    return true
  elseif errors.is(err, "not_found") then
    return false
  end
  return error(err, 0)
end

-- Upload -------------------------------------------------------------------------------------------------------------

---@class ciranda.gcp.UploadOptions: ciranda.gcp.Preconditions
---@field content_type string?              "application/octet-stream" by default
---@field metadata table<string, string>?   custom metadata
---@field chunk integer?                    bytes of a chunk, a multiple of storage.GRANULE
---@field repeatable boolean?               nobody else writes this object, so that a lost answer may be asked for again
---@field on_progress (fun(sent: integer, total: integer))?  bytes that Cloud Storage has confirmed

local UPLOAD = {
  content_type = true,
  metadata = true,
  chunk = true,
  repeatable = true,
  on_progress = true,
  if_generation_match = true,
  if_generation_not_match = true,
  if_metageneration_match = true,
}

--- The object was made, as far as its checksum says, by an earlier try whose answer was lost.
local function is_same(object, size, checksum)
  return object and object.crc32c == checksum and tonumber(object.size) == size
end

--- Refuse an object that is not what was sent. It is deleted: a wrong object must not be taken for the right one.
local function check_upload(self, bucket, name, object, checksum)
  if object.crc32c == checksum then
    return object
  end
  pcall(self.delete, self, bucket, name, { generation = object.generation })
  return errors.raise {
    code = "io",
    op = "storage.upload",
    target = shown(bucket, name),
    message = ("%s: Cloud Storage has stored something else (CRC-32C %s, expected %s); it was deleted again"):format(
      shown(bucket, name),
      tostring(object.crc32c),
      checksum
    ),
  }
end

--- Upload an object. Its checksum is verified by Cloud Storage and again here.
---@async
---@param bucket string
---@param name string
---@param source string|{ path: string } the bytes, or a file
---@param options ciranda.gcp.UploadOptions?
---@return table object
--- Raises `precondition` when an if_... does not hold, `io` when what was stored is not what was sent, and what a call
--- raises.
function Storage:upload(bucket, name, source, options)
  options = options or {}
  errors.check_options(options, UPLOAD, "storage:upload")
  if options.chunk and (options.chunk <= 0 or options.chunk % M.GRANULE ~= 0) then
    errors.misuse(2, "storage:upload: 'chunk' must be a multiple of %d bytes", M.GRANULE)
  end
  local from, total, digest
  if type(source) == "table" then
    from = { path = source.path }
    local read = crypto.digest_file(source.path, { "crc32c" })
    total, digest = read.size, read.crc32c
  else
    from = { data = source }
    total, digest = #source, crypto.digest("crc32c", source)
  end
  local checksum = crypto.base64(digest)
  local resource = {
    name = name,
    contentType = options.content_type or "application/octet-stream",
    metadata = options.metadata,
    crc32c = checksum,
  }
  return named(bucket, name, function()
    local done, object
    if total <= (options.chunk or upload.CHUNK) then
      local data = from.data or fs.read(from.path)
      done, object = pcall(upload.once, self, bucket, resource, data, options)
    else
      done, object = pcall(upload.resumable, self, bucket, resource, from, total, checksum, options)
    end
    if done then
      return check_upload(self, bucket, name, object, checksum)
    end
    local err = object
    if errors.is(err, "precondition") and options.if_generation_match then
      object = self:stat(bucket, name)
      if is_same(object, total, checksum) then
        return object
      end
    end
    return error(err, 0)
  end)
end

-- Download ----------------------------------------------------------------------------------------------------------

--- The CRC-32C in X-Goog-Hash headers, in base64.
local function checksum_of(headers)
  for _, pair in ipairs(headers) do
    if pair[1]:lower() == "x-goog-hash" then
      local value = pair[2]:match("crc32c=([%w+/=]+)")
      if value then
        return value
      end
    end
  end
  return nil
end

---@class ciranda.gcp.DownloadOptions: ciranda.gcp.Preconditions
---@field path string?      write to this file, which appears whole or not at all
---@field first integer?    the first byte wanted, from 0
---@field last integer?     the last byte wanted; to the end by default
---@field on_progress (fun(received: integer))?

local DOWNLOAD = {
  path = true,
  first = true,
  last = true,
  on_progress = true,
  generation = true,
  if_generation_match = true,
  if_generation_not_match = true,
  if_metageneration_match = true,
}

--- Receive the bytes, taking the transfer up where it broke off, always of the same generation.
---@param write fun(chunk: string)
---@return string? checksum what the server says of the whole object
---@return string generation
local function receive(self, bucket, name, options, write)
  local first = options.first or 0
  local received, failures = 0, 0
  local generation, checksum
  while true do
    local before = received
    local query = upload.conditions(options)
    query.alt = "media"
    query.generation = generation or query.generation
    local from = first + received
    local range
    if options.last then
      range = ("bytes=%d-%d"):format(from, options.last)
    elseif from > 0 then
      range = ("bytes=%d-"):format(from)
    end
    local done, err = pcall(self.client.request, self.client, {
      url = object_url(self, bucket, name),
      query = query,
      headers = { Range = range, ["Accept-Encoding"] = "gzip" }, -- the bytes as they are stored
      timeout = false,
      idle_timeout = upload.IDLE,
      on_response = function(head)
        generation = generation or head.headers["x-goog-generation"]
        checksum = checksum or checksum_of(head.headers)
        if range and head.status ~= 206 then
          errors.raise {
            code = "protocol",
            op = "storage.download",
            message = "a part was asked for, the whole came",
          }
        end
      end,
      on_data = function(chunk)
        received = received + #chunk
        write(chunk)
        if options.on_progress then
          options.on_progress(received)
        end
      end,
    })
    if done then
      return checksum, generation
    elseif errors.is(err, "invalid") and err.http_status == 416 and received > 0 then
      return checksum, generation -- everything had come when the connection broke
    elseif not errors.is(err, table.unpack(upload.BROKEN)) then
      error(err, 0)
    end
    failures = received > before and 0 or failures + 1
    if failures > upload.RESUMES then
      error(err, 0)
    end
    if failures > 0 then
      task.sleep(
        self.client.random() * math.min(self.client.most_wait, self.client.first_wait * 2 ^ failures)
      )
    end
  end
end

--- Download an object. A whole one is verified against its CRC-32C.
---@async
---@param bucket string
---@param name string
---@param options ciranda.gcp.DownloadOptions?
---@return string? data nil with `path`
---@return string? generation
--- Raises `not_found`; `io` when what came is not what is stored; what a call raises.
function Storage:download(bucket, name, options)
  options = options or {}
  errors.check_options(options, DOWNLOAD, "storage:download")
  local partial = (options.first or 0) > 0 or options.last ~= nil
  local digest = crypto.start("crc32c")
  local chunks, file, temporary = {}, nil, nil
  if options.path then
    temporary = ("%s.%s.part"):format(options.path, crypto.hex(crypto.random(4)))
    file = fs.open(temporary, "wx", 420)
  end
  local done, checksum, generation = pcall(
    named,
    bucket,
    name,
    receive,
    self,
    bucket,
    name,
    options,
    function(chunk)
      digest:update(chunk)
      if file then
        file:write(chunk)
      else
        chunks[#chunks + 1] = chunk
      end
    end
  )
  local err = not done and checksum or nil
  if done and not partial and checksum and crypto.base64(digest:finish()) ~= checksum then
    err = errors.new {
      code = "io",
      op = "storage.download",
      target = shown(bucket, name),
      message = ("%s: what came is not what is stored: its CRC-32C is not %s"):format(
        shown(bucket, name),
        checksum
      ),
    }
  end
  if file then
    task.shield(function()
      if not err then
        local synced, problem = pcall(file.sync, file)
        err = not synced and problem or nil
      end
      file:close()
      if err then
        pcall(fs.remove, temporary)
      else
        fs.rename(temporary, options.path)
      end
    end)
  end
  if err then
    error(err, 0)
  end
  return not file and table.concat(chunks) or nil, generation
end

return M
