--- Uploads to the simulated Cloud Storage: in one piece, with metadata in a multipart body, and resumable.
--
-- A resumable session takes chunks in order. What has been stored is told in multiples of 256 KiB, as by the real
-- service: a chunk that is not the last may be stored in part, and the client goes on from where the answer says. A
-- chunk that begins before that point is skipped as far as it is known; one that begins beyond it stores nothing. A
-- question about the state (`bytes */N`) never changes it.

local crypto = require("ciranda.io.crypto")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local objects = require("ciranda.sim.storage_object")

local M = {}

M.GRANULARITY = 256 * 1024

-- Seconds that a session is good for.
local SESSION_LIFETIME = 7 * 86400

local function parse_json(text)
  if not text:find("%S") then
    return {}
  end
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    objects.refuse(400, "parseError", "Parse Error")
  end
  return value
end

M.parse_json = parse_json

-- The name of the object and what else the metadata says.
local function description(request, metadata, content_type)
  local name = metadata.name or request.query.name
  if type(name) ~= "string" or name == "" or #name > 1024 then
    objects.refuse(400, "required", "Required parameter: name", "name")
  end
  local said = {
    contentType = content_type or "application/octet-stream",
    contentEncoding = request.query.contentEncoding,
  }
  objects.say(said, metadata)
  return {
    name = name,
    said = said,
    metadata = objects.metadata(nil, metadata),
    hashes = { crc32c = metadata.crc32c, md5Hash = metadata.md5Hash },
  }
end

-- What X-Goog-Hash says is checked like what the metadata says.
local function merge_hashes(hashes, header)
  local more = objects.hashes_of(header)
  return { crc32c = hashes.crc32c or more.crc32c, md5Hash = hashes.md5Hash or more.md5Hash }
end

local function store_whole(storage, request, bucket, about, data)
  objects.check_conditions(request.query, bucket.objects[about.name])
  about.crc32c, about.md5 = crypto.digest("crc32c", data), crypto.digest("md5", data)
  objects.check_hashes(merge_hashes(about.hashes, request.headers["X-Goog-Hash"]), about.crc32c, about.md5)
  about.path, about.size = storage:new_path(), #data
  fs.write(about.path, data, { sync = false })
  return objects.answer(200, objects.message(storage:put(bucket, about), request.base))
end

local function simple(storage, request, bucket)
  local about = description(request, {}, request.headers["Content-Type"])
  return store_whole(storage, request, bucket, about, request.body)
end

-- The two parts of a multipart/related body (RFC 2387).
local function split_multipart(content_type, body)
  local boundary = content_type:match('boundary="([^"]+)"') or content_type:match("boundary=([^%s;]+)")
  if not boundary then
    objects.refuse(400, "badContent", "Missing boundary in the multipart content type")
  end
  -- A delimiter is a line of its own; the first may be the body's first line. What merely begins like one is data.
  local delimiter = "\r\n--" .. boundary
  local text = "\r\n" .. body
  local parts, start, at = {}, nil, 1
  while true do
    local from, to = text:find(delimiter, at, true)
    if not from then
      break
    end
    local beyond = text:match("^[ \t]*\r\n()", to + 1)
    local last = text:sub(to + 1, to + 2) == "--"
    if beyond or last then
      if start then
        parts[#parts + 1] = text:sub(start, from - 1)
      end
      start = beyond
    end
    if last then
      break
    end
    at = to + 1
  end
  if #parts ~= 2 then
    objects.refuse(400, "badContent", ("A multipart upload has two parts, this one has %d"):format(#parts))
  end
  local result = {}
  for i, part in ipairs(parts) do
    -- A part may have no headers: then it begins with the empty line.
    local head, data = ("\r\n" .. part):match("^(.-)\r\n\r\n(.*)$")
    if not head then
      objects.refuse(400, "badContent", "A part of the multipart upload has no end of its headers")
    end
    result[i] = { type = head:lower():match("\r\ncontent%-type:%s*([^\r\n]+)"), data = data }
  end
  return result[1], result[2]
end

local function multipart(storage, request, bucket)
  local first, second = split_multipart(request.headers["Content-Type"] or "", request.body)
  local about = description(request, parse_json(first.data), second.type)
  return store_whole(storage, request, bucket, about, second.data)
end

local function start_session(storage, request, bucket)
  local about = description(request, parse_json(request.body), request.headers["X-Upload-Content-Type"])
  objects.check_conditions(request.query, bucket.objects[about.name])
  local id = crypto.hex(crypto.random(24))
  local path = storage:new_path()
  fs.write(path, "", { sync = false })
  storage.sessions[id] = {
    bucket = bucket,
    about = about,
    query = request.query,
    path = path,
    total = tonumber(request.headers["X-Upload-Content-Length"]),
    received = 0,
    crc32c = crypto.start("crc32c"),
    md5 = crypto.start("md5"),
    expires = storage.world.clock:now() + SESSION_LIFETIME,
  }
  return {
    status = 200,
    headers = {
      Location = ("%s/upload/storage/v1/b/%s/o?uploadType=resumable&upload_id=%s"):format(
        request.base,
        bucket.name,
        id
      ),
      ["X-GUploader-UploadID"] = id,
      ["X-Goog-Upload-Chunk-Granularity"] = tostring(M.GRANULARITY),
      ["Content-Length"] = nil,
    },
    body = "",
  }
end

-- 308 Resume Incomplete with what is stored; as 200 for clients whose HTTP library would follow it.
local function incomplete(session, request)
  local headers = {}
  if session.received > 0 then
    headers.Range = ("bytes=0-%d"):format(session.received - 1)
  end
  if request.headers["X-Guploader-No-308"] then
    headers["X-Http-Status-Code-Override"] = "308"
    return { status = 200, headers = headers, body = "" }
  end
  return { status = 308, headers = headers, body = "" }
end

-- Content-Range: first byte, last byte and total; nil for what is "*".
local function parse_range(header)
  if not header then
    return nil
  end
  local first, last, total = header:match("^bytes (%d+)%-(%d+)/([%d*]+)$")
  if first then
    return { first = tonumber(first), last = tonumber(last), total = tonumber(total) }
  end
  total = header:match("^bytes %*/([%d*]+)$")
  if total then
    return { total = tonumber(total), question = true }
  end
  return objects.refuse(400, "badRequest", ("Failed to parse Content-Range header: %s"):format(header))
end

local function append(session, data)
  if data == "" then
    return
  end
  local file <close> = fs.open(session.path, "a")
  file:write(data)
  session.crc32c:update(data)
  session.md5:update(data)
  session.received = session.received + #data
end

local function finish(storage, session, request)
  local about = session.about
  -- Digests end once; a client that asks again after a refusal gets the same refusal.
  session.sums = session.sums or { session.crc32c:finish(), session.md5:finish() }
  about.crc32c, about.md5 = session.sums[1], session.sums[2]
  objects.check_conditions(session.query, session.bucket.objects[about.name])
  objects.check_hashes(merge_hashes(about.hashes, request.headers["X-Goog-Hash"]), about.crc32c, about.md5)
  about.path, about.size = session.path, session.received
  session.done = objects.message(storage:put(session.bucket, about), request.base)
  return objects.answer(200, session.done)
end

local function put_chunk(storage, session, request)
  local range = parse_range(request.headers["Content-Range"])
  if session.done then
    return objects.answer(200, session.done)
  end
  if range and range.total then
    if session.total and session.total ~= range.total or range.total < session.received then
      objects.refuse(400, "badRequest", "The total size in Content-Range is not the upload's")
    end
    session.total = range.total
  end
  if range and range.question then
    if session.total == session.received and session.total ~= nil then
      return finish(storage, session, request)
    end
    return incomplete(session, request)
  end
  local first = range and range.first or session.received
  local data = request.body
  if range and range.last - range.first + 1 ~= #data then
    objects.refuse(400, "badRequest", "Content-Range does not go with the length of the chunk")
  end
  if not range then
    session.total = session.received + #data
  end
  if first > session.received then
    return incomplete(session, request)
  end
  data = data:sub(session.received - first + 1)
  local reached = session.received + #data
  if session.total and reached > session.total then
    objects.refuse(400, "badRequest", "The chunk goes beyond the end of the upload")
  elseif session.total == reached then
    append(session, data)
    return finish(storage, session, request)
  end
  append(session, data:sub(1, #data - reached % M.GRANULARITY))
  return incomplete(session, request)
end

--- Answer a call to an upload address.
---@async
---@param storage ciranda.sim.StorageService
---@param request table
---@param bucket_name string
---@return table answer
function M.handle(storage, request, bucket_name)
  local id = request.query.upload_id
  if id then
    local session = storage.sessions[id]
    if not session or session.expires < storage.world.clock:now() then
      objects.refuse(404, "notFound", "Upload session not found")
    elseif request.method == "DELETE" then
      storage.sessions[id] = nil
      if not session.done then
        fs.remove(session.path, { missing_ok = true })
      end
      return { status = 499, headers = {}, body = "" }
    elseif request.method ~= "PUT" and request.method ~= "POST" then
      objects.refuse(405, "methodNotAllowed", "Method Not Allowed")
    elseif session.busy then
      objects.refuse(503, "backendError", "Another chunk of this upload is being stored")
    end
    session.busy = true
    local ok, answer = pcall(put_chunk, storage, session, request)
    session.busy = false
    if not ok then
      error(answer, 0)
    end
    return answer
  end
  if request.method ~= "POST" and request.method ~= "PUT" then
    objects.refuse(405, "methodNotAllowed", "Method Not Allowed")
  end
  local kinds = { media = simple, multipart = multipart, resumable = start_session }
  local kind = kinds[request.query.uploadType or ""]
  if not kind then
    objects.refuse(400, "invalid", "Invalid uploadType", "uploadType")
  end
  return kind(storage, request, storage:bucket_for_writing(bucket_name))
end

return M
