--- How an object gets to Cloud Storage: in one request, or through a session in chunks. ciranda.gcp.storage checks what
--- came of it.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local url = require("ciranda.io.url")

local M = {}

--- Bytes of a chunk, and the size beyond which an upload is resumable.
M.CHUNK = 8 << 20

--- Seconds in which a transfer must move.
M.IDLE = 60

--- How often a transfer that breaks off is taken up again without progress between.
M.RESUMES = 8

--- Codes with which a transfer breaks off without being lost.
M.BROKEN = { "timeout", "reset", "closed", "refused", "unreachable", "resolve", "unavailable", "rate_limit" }

--- The query parameters of preconditions.
---@param options ciranda.gcp.Preconditions
---@return table
function M.conditions(options)
  return {
    ifGenerationMatch = options.if_generation_match,
    ifGenerationNotMatch = options.if_generation_not_match,
    ifMetagenerationMatch = options.if_metageneration_match,
    generation = options.generation,
  }
end

--- Send everything in one request: metadata, with the checksum for the server to verify, and the bytes.
---@param self ciranda.gcp.Storage
---@param bucket string
---@param resource table the object's metadata
---@param data string
---@param options ciranda.gcp.UploadOptions
---@return table object
function M.once(self, bucket, resource, data, options)
  local boundary = "ciranda-" .. crypto.uuid4()
  local body = table.concat {
    ("--%s\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"):format(boundary),
    json.encode(resource),
    ("\r\n--%s\r\nContent-Type: %s\r\n\r\n"):format(boundary, resource.contentType),
    data,
    ("\r\n--%s--\r\n"):format(boundary),
  }
  local query = M.conditions(options)
  query.uploadType = "multipart"
  return (
    self.client:json {
      method = "POST",
      url = ("%supload/storage/v1/b/%s/o"):format(self.endpoint, url.escape(bucket)),
      query = query,
      headers = { ["Content-Type"] = "multipart/related; boundary=" .. boundary },
      body = body,
      idempotent = options.repeatable or options.if_generation_match ~= nil,
    }
  )
end

--- Begin a resumable upload; the session's URL, which is as good as a credential for a week.
local function open_session(self, bucket, resource, total, options)
  local query = M.conditions(options)
  query.uploadType, query.name = "resumable", resource.name
  local response = self.client:request {
    method = "POST",
    url = ("%supload/storage/v1/b/%s/o"):format(self.endpoint, url.escape(bucket)),
    query = query,
    headers = {
      ["X-Upload-Content-Type"] = resource.contentType,
      ["X-Upload-Content-Length"] = ("%d"):format(total),
    },
    json = resource,
    idempotent = true, -- a session that nobody uses makes nothing
  }
  local session = response.headers.location
  if not session then
    errors.raise {
      code = "protocol",
      op = "storage.upload",
      message = response.target .. ": no upload session was given",
    }
  end
  return session
end

--- How many bytes the answer to a chunk or a status query confirms.
local function confirmed(response)
  local range = response.headers.range
  local last = range and range:match("^bytes=0%-(%d+)$")
  return last and math.tointeger(last) + 1 or 0
end

local INCOMPLETE = { [308] = true }

--- Ask a session how far it is: the object when it is done, else the confirmed bytes.
local function ask_session(self, session, total)
  local response = self.client:request {
    method = "PUT",
    url = session,
    headers = { ["Content-Range"] = ("bytes */%d"):format(total) },
    body = "",
    accept = INCOMPLETE,
    idempotent = true,
  }
  if response.status == 308 then
    return nil, confirmed(response)
  end
  return response:json(), total
end

--- Send one chunk; the object when it was the last, else the confirmed bytes.
local function send_chunk(self, session, source, first, size, total, checksum)
  local last = first + size == total
  local headers = {
    ["Content-Range"] = size > 0 and ("bytes %d-%d/%d"):format(first, first + size - 1, total)
      or ("bytes */%d"):format(total),
    ["X-Goog-Hash"] = last and "crc32c=" .. checksum or nil,
  }
  local response = self.client:request {
    method = "PUT",
    url = session,
    headers = headers,
    file = source.path and { path = source.path, offset = first, length = size } or nil,
    body = not source.path and source.data:sub(first + 1, first + size) or nil,
    accept = INCOMPLETE,
    timeout = false,
    idle_timeout = M.IDLE,
    idempotent = false, -- what of it arrived is asked before anything is sent again
  }
  if response.status == 308 then
    return nil, confirmed(response)
  end
  return response:json(), total
end

--- Send all chunks through one session, asking how far it is when one breaks off.
---@return table? object nil when the session is lost
local function send_all(self, session, source, total, checksum, options)
  local chunk = options.chunk or M.CHUNK
  local position, failures = 0, 0
  while true do
    local size = math.min(chunk, total - position)
    local sent, object, reached = pcall(send_chunk, self, session, source, position, size, total, checksum)
    if not sent then
      local err = object
      if errors.is(err, "not_found") then
        return nil
      elseif not errors.is(err, table.unpack(M.BROKEN)) or failures >= M.RESUMES then
        error(err, 0)
      end
      failures = failures + 1
      task.sleep(
        self.client.random() * math.min(self.client.most_wait, self.client.first_wait * 2 ^ failures)
      )
      local asked
      asked, object, reached = pcall(ask_session, self, session, total)
      if not asked then
        if errors.is(object, "not_found") then
          return nil
        end
        error(object, 0)
      end
    elseif reached > position then
      failures = 0
    else
      failures = failures + 1
    end
    if object then
      if options.on_progress then
        options.on_progress(total, total)
      end
      return object
    end
    if reached > total or failures > M.RESUMES then
      errors.raise {
        code = "protocol",
        op = "storage.upload",
        message = ("the upload does not move: %d of %d bytes are confirmed"):format(reached, total),
      }
    end
    if options.on_progress and reached ~= position then
      options.on_progress(reached, total)
    end
    position = reached
  end
end

--- Send in chunks, from the beginning again when the session is lost.
---@param self ciranda.gcp.Storage
---@param bucket string
---@param resource table the object's metadata
---@param source { data: string?, path: string? }
---@param total integer bytes
---@param checksum string CRC-32C in base64
---@param options ciranda.gcp.UploadOptions
---@return table object
function M.resumable(self, bucket, resource, source, total, checksum, options)
  for _ = 1, 3 do
    local session = open_session(self, bucket, resource, total, options)
    local object = send_all(self, session, source, total, checksum, options)
    if object then
      return object
    end
  end
  return errors.raise {
    code = "unavailable",
    op = "storage.upload",
    message = "the upload session was lost three times",
  }
end

return M
