--- The simulated Cloud Storage: its JSON API, with the bytes on disk.
--
-- Buckets without object versions, objects with generations, preconditions, ranges, listings with delimiters, compose
-- and rewrite, and the three kinds of upload (ciranda.sim.storage_upload). Like the public emulators it asks for no
-- credentials; those that are sent must be good.

local buckets = require("ciranda.sim.storage_bucket")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.sim.errors")
local fieldmask = require("ciranda.sim.fieldmask")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local objects = require("ciranda.sim.storage_object")
local upload = require("ciranda.sim.storage_upload")

local M = {}

-- The most that a page of a list holds.
local MAX_RESULTS = 1000

-- Bytes read at once when an object is sent.
local CHUNK = 256 * 1024

---@class ciranda.sim.StorageService
---@field world table
---@field directory string
---@field buckets table<string, ciranda.sim.Bucket>
---@field sessions table<string, table>
local Service = {}
Service.__index = Service

---@param world table
---@param directory string for the bytes; must exist
---@param options { buckets: string[]?, make_buckets: boolean? }?  buckets that are there; whether an upload to one that
---  is not makes it
---@return ciranda.sim.StorageService
function M.new(world, directory, options)
  options = options or {}
  local self = setmetatable({
    world = world,
    directory = directory,
    make_buckets = options.make_buckets or false,
    buckets = {},
    sessions = {},
    last_file = 0,
    last_generation = 0,
  }, Service)
  for _, name in ipairs(options.buckets or {}) do
    self:make_bucket(name, {})
  end
  return self
end

---@param path string
---@return boolean
function Service:serves(path)
  return path:find("^/storage/v1/") ~= nil
    or path:find("^/download/storage/v1/") ~= nil
    or path:find("^/upload/storage/v1/") ~= nil
    or path:find("^/resumable/upload/storage/v1/") ~= nil
end

---@param name string
---@param body table what is said of it
---@return ciranda.sim.Bucket
function Service:make_bucket(name, body)
  self.buckets[name] = buckets.new(name, body, self.world.clock:now())
  return self.buckets[name]
end

---@param name string
---@return ciranda.sim.Bucket
function Service:bucket(name)
  return self.buckets[name] or objects.refuse(404, "notFound", "The specified bucket does not exist.")
end

---@param name string
---@return ciranda.sim.Bucket
function Service:bucket_for_writing(name)
  if not self.buckets[name] and self.make_buckets and buckets.valid_name(name) then
    return self:make_bucket(name, {})
  end
  return self:bucket(name)
end

--- A path for the bytes of a new object.
---@return string
function Service:new_path()
  self.last_file = self.last_file + 1
  return ("%s/%d"):format(self.directory, self.last_file)
end

-- The bytes of objects stay while somebody reads them, even when one is replaced or deleted meanwhile. What
-- this returns is closed when the reading has ended; an answer that is never begun leaves the bytes to the
-- simulator's end.
local function hold(list)
  for _, object in ipairs(list) do
    object.holds = object.holds + 1
  end
  return setmetatable({}, {
    __close = function()
      for _, object in ipairs(list) do
        object.holds = object.holds - 1
        if object.gone and object.holds == 0 then
          fs.remove(object.path, { missing_ok = true })
        end
      end
    end,
  })
end

-- Nobody is to find these bytes any more.
local function discard(object)
  object.gone = true
  if object.holds == 0 then
    fs.remove(object.path, { missing_ok = true })
  end
end

--- Put an object into a bucket, in the place of one of the same name.
---@async
---@param bucket table
---@param about table name, path, size, crc32c, md5, components, said, metadata
---@return ciranda.sim.StoredObject
function Service:put(bucket, about)
  local now = self.world.clock:now()
  -- A generation is a time in microseconds, and always a new one.
  local generation = math.max(math.floor(now * 1e6), self.last_generation + 1)
  self.last_generation = generation
  local before = bucket.objects[about.name]
  local object = {
    bucket = bucket.name,
    name = about.name,
    generation = generation,
    metageneration = 1,
    size = about.size,
    crc32c = about.crc32c,
    md5 = about.md5,
    components = about.components,
    path = about.path,
    said = about.said,
    metadata = about.metadata,
    holds = 0,
    created = now,
    updated = now,
  }
  bucket.objects[about.name] = object
  if before then
    discard(before)
  end
  return object
end

local function find_object(bucket, name, query)
  local object = bucket.objects[name]
  local generation = query and objects.number_of(query, "generation")
  if not object or generation and generation ~= object.generation then
    objects.refuse(404, "notFound", ("No such object: %s/%s"):format(bucket.name, name))
  end
  return object
end

-- The methods' ids, by verb and form of the path: for the log and for faults.
local METHODS = {
  ["GET b"] = "storage.buckets.list",
  ["POST b"] = "storage.buckets.insert",
  ["GET b/B"] = "storage.buckets.get",
  ["DELETE b/B"] = "storage.buckets.delete",
  ["PATCH b/B"] = "storage.buckets.patch",
  ["PUT b/B"] = "storage.buckets.update",
  ["GET b/B/o"] = "storage.objects.list",
  ["GET b/B/o/O"] = "storage.objects.get",
  ["DELETE b/B/o/O"] = "storage.objects.delete",
  ["PATCH b/B/o/O"] = "storage.objects.patch",
  ["PUT b/B/o/O"] = "storage.objects.update",
  ["POST b/B/o/O/compose"] = "storage.objects.compose",
  ["POST b/B/o/O/rewriteTo/b/B/o/O"] = "storage.objects.rewrite",
  ["POST b/B/o/O/copyTo/b/B/o/O"] = "storage.objects.copy",
}

local handlers = {}

local function bucket_answer(self, bucket, request)
  return objects.answer(200, buckets.message(bucket, self.world.project.number, request.base))
end

-- The number of items on a page, and the name after which it begins.
local function page_of(query)
  local size = objects.number_of(query, "maxResults") or MAX_RESULTS
  local token = query.pageToken
  if not token or token == "" then
    token = nil
  else
    token = crypto.unbase64url(token) or objects.refuse(400, "invalid", "Invalid argument.", "pageToken")
  end
  return math.min(size == 0 and MAX_RESULTS or size, MAX_RESULTS), token
end

handlers["GET b"] = function(self, request)
  local prefix = request.query.prefix or ""
  local size, after = page_of(request.query)
  local names = {}
  for name in pairs(self.buckets) do
    if name:sub(1, #prefix) == prefix and (not after or name > after) then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  local items = json.array({})
  for i = 1, math.min(size, #names) do
    items[i] = buckets.message(self.buckets[names[i]], self.world.project.number, request.base)
  end
  return objects.answer(200, {
    kind = "storage#buckets",
    items = #items > 0 and items or nil,
    nextPageToken = #names > size and crypto.base64url(names[size]) or nil,
  })
end

handlers["POST b"] = function(self, request)
  local body = upload.parse_json(request.body)
  local name = body.name
  if not buckets.valid_name(name) then
    objects.refuse(400, "invalid", ("Invalid bucket name: '%s'"):format(tostring(name)), "name")
  elseif self.buckets[name] then
    objects.refuse(
      409,
      "conflict",
      "Your previous request to create the named bucket succeeded and you already own it."
    )
  end
  return bucket_answer(self, self:make_bucket(name, body), request)
end

handlers["GET b/B"] = function(self, request, name)
  local bucket = self:bucket(name)
  objects.check_conditions(request.query, bucket, true)
  return bucket_answer(self, bucket, request)
end

local function change_bucket(self, request, name, whole)
  local bucket = self:bucket(name)
  objects.check_conditions(request.query, bucket)
  buckets.change(bucket, upload.parse_json(request.body), whole, self.world.clock:now())
  return bucket_answer(self, bucket, request)
end

handlers["PATCH b/B"] = function(self, request, name)
  return change_bucket(self, request, name, false)
end

handlers["PUT b/B"] = function(self, request, name)
  return change_bucket(self, request, name, true)
end

handlers["DELETE b/B"] = function(self, request, name)
  local bucket = self:bucket(name)
  objects.check_conditions(request.query, bucket)
  if next(bucket.objects) then
    objects.refuse(409, "conflict", "The bucket you tried to delete is not empty.")
  end
  self.buckets[name] = nil
  return { status = 204, headers = {}, body = "" }
end

-- A glob of objects.list as a Lua pattern: * and ? stay within a directory, ** does not.
local function glob_pattern(glob)
  local pattern = glob:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0")
  pattern = pattern:gsub("%*%*", "\1"):gsub("%*", "[^/]*"):gsub("%?", "[^/]"):gsub("\1", ".*")
  return "^" .. pattern .. "$"
end

-- The names and common prefixes of a listing, in order, each once.
local function listing(bucket, query)
  local prefix, delimiter = query.prefix or "", query.delimiter
  local pattern = query.matchGlob and glob_pattern(query.matchGlob)
  local entries, seen = {}, {}
  for name, object in pairs(bucket.objects) do
    local wanted = name:sub(1, #prefix) == prefix
      and (not query.startOffset or name >= query.startOffset)
      and (not query.endOffset or name < query.endOffset)
      and (not pattern or name:find(pattern) ~= nil)
    local at = wanted and delimiter and delimiter ~= "" and name:find(delimiter, #prefix + 1, true)
    local directory = at and name:sub(1, at + #delimiter - 1)
    if directory and not seen[directory] then
      seen[directory] = true
      entries[#entries + 1] = { name = directory, prefix = true }
    end
    if wanted and (not directory or directory == name and query.includeTrailingDelimiter == "true") then
      entries[#entries + 1] = { name = name, object = object }
    end
  end
  table.sort(entries, function(a, b)
    if a.name ~= b.name then
      return a.name < b.name
    end
    return a.prefix ~= nil and b.prefix == nil
  end)
  return entries
end

handlers["GET b/B/o"] = function(self, request, name)
  local query = request.query
  local entries = listing(self:bucket(name), query)
  local size, after = page_of(query)
  local items, prefixes, last = json.array({}), json.array({}), nil
  local token
  for _, entry in ipairs(entries) do
    if not after or entry.name > after then
      if #items + #prefixes == size then
        token = crypto.base64url(last)
        break
      end
      if entry.prefix then
        prefixes[#prefixes + 1] = entry.name
      else
        items[#items + 1] = objects.message(entry.object, request.base)
      end
      last = entry.name
    end
  end
  return objects.answer(200, {
    kind = "storage#objects",
    items = #items > 0 and items or nil,
    prefixes = #prefixes > 0 and prefixes or nil,
    nextPageToken = token,
  })
end

-- The first and last byte that a Range header asks for; nil for all of them.
local function range_of(header, size)
  local first, last = (header or ""):match("^bytes=(%d*)%-(%d*)$")
  if not first or first == "" and last == "" then
    return nil
  end
  if first == "" then
    first, last = math.max(0, size - tonumber(last)), size - 1
  else
    first, last = tonumber(first), math.min(tonumber(last) or size - 1, size - 1)
  end
  if first >= size or first > last then
    objects.refuse(416, "requestedRangeNotSatisfiable", "The requested range cannot be satisfied.")
  end
  return first, last
end

local function send(object, request)
  local first, last = range_of(request.headers["Range"], object.size)
  local headers = {
    ["Accept-Ranges"] = "bytes",
    ["Content-Type"] = object.said.contentType,
    ["Content-Encoding"] = object.said.contentEncoding,
    ["Content-Disposition"] = object.said.contentDisposition,
    ["Content-Language"] = object.said.contentLanguage,
    ["Cache-Control"] = object.said.cacheControl,
    ETag = ('"%d"'):format(object.generation),
    ["X-Goog-Generation"] = object.generation,
    ["X-Goog-Metageneration"] = object.metageneration,
    ["X-Goog-Hash"] = "crc32c=" .. crypto.base64(object.crc32c) .. (object.md5 and ",md5=" .. crypto.base64(
      object.md5
    ) or ""),
    ["X-Goog-Stored-Content-Encoding"] = "identity",
    ["X-Goog-Stored-Content-Length"] = object.size,
  }
  if first then
    headers["Content-Range"] = ("bytes %d-%d/%d"):format(first, last, object.size)
  end
  local at = first or 0
  local beyond = (last or object.size - 1) + 1
  local held = hold({ object })
  return {
    status = first and 206 or 200,
    headers = headers,
    length = beyond - at,
    body = function(write)
      local _ <close> = held
      local file <close> = fs.open(object.path)
      while at < beyond do
        local data = file:read(math.min(CHUNK, beyond - at), at)
        if data == "" then
          error("the bytes of " .. object.name .. " are gone", 0)
        end
        write(data)
        at = at + #data
      end
    end,
  }
end

handlers["GET b/B/o/O"] = function(self, request, bucket_name, name)
  local object = find_object(self:bucket(bucket_name), name, request.query)
  objects.check_conditions(request.query, object, true)
  if request.query.alt == "media" then
    return send(object, request)
  end
  return objects.answer(200, objects.message(object, request.base))
end

handlers["DELETE b/B/o/O"] = function(self, request, bucket_name, name)
  local bucket = self:bucket(bucket_name)
  local object = find_object(bucket, name, request.query)
  objects.check_conditions(request.query, object)
  bucket.objects[name] = nil
  discard(object)
  return { status = 204, headers = {}, body = "" }
end

local function change(self, request, bucket_name, name, whole)
  local object = find_object(self:bucket(bucket_name), name, request.query)
  objects.check_conditions(request.query, object)
  local body = upload.parse_json(request.body)
  -- The class of an object is changed by rewriting it.
  body.storageClass = nil
  objects.say(object.said, body)
  object.metadata = objects.metadata(object.metadata, body, whole)
  object.metageneration = object.metageneration + 1
  object.updated = self.world.clock:now()
  return objects.answer(200, objects.message(object, request.base))
end

handlers["PATCH b/B/o/O"] = function(self, request, bucket_name, name)
  return change(self, request, bucket_name, name, false)
end

handlers["PUT b/B/o/O"] = function(self, request, bucket_name, name)
  return change(self, request, bucket_name, name, true)
end

handlers["POST b/B/o/O/compose"] = function(self, request, bucket_name, name)
  local bucket = self:bucket(bucket_name)
  local body = upload.parse_json(request.body)
  objects.check_conditions(request.query, bucket.objects[name])
  local sources = body.sourceObjects
  if type(sources) ~= "table" or #sources == 0 or #sources > 32 then
    objects.refuse(400, "invalid", "A composite object has from 1 to 32 sources", "sourceObjects")
  end
  local parts = {}
  for i, source in ipairs(sources) do
    local conditions = source.objectPreconditions or {}
    local wanted = source.generation or conditions.ifGenerationMatch
    parts[i] = find_object(bucket, source.name or "", { generation = wanted and tostring(wanted) })
  end
  local _ <close> = hold(parts)
  local path, size, components = self:new_path(), 0, 0
  local sum = crypto.start("crc32c")
  do
    local file <close> = fs.open(path, "w")
    for _, part in ipairs(parts) do
      local data = fs.read(part.path)
      file:write(data)
      sum:update(data)
      size, components = size + #data, components + (part.components or 1)
    end
  end
  local destination = type(body.destination) == "table" and body.destination or {}
  local said = { contentType = parts[1].said.contentType }
  objects.say(said, destination)
  local object = self:put(bucket, {
    name = name,
    path = path,
    size = size,
    crc32c = sum:finish(),
    components = components,
    said = said,
    metadata = objects.metadata(nil, destination),
  })
  return objects.answer(200, objects.message(object, request.base))
end

local function copy(self, request, from_bucket, from_name, to_bucket, to_name)
  local source =
    find_object(self:bucket(from_bucket), from_name, { generation = request.query.sourceGeneration })
  objects.check_conditions(request.query, source, false, "ifSource")
  local bucket = self:bucket(to_bucket)
  objects.check_conditions(request.query, bucket.objects[to_name])
  local body = upload.parse_json(request.body)
  local about = { name = to_name, path = self:new_path(), size = source.size, crc32c = source.crc32c }
  about.md5, about.components = source.md5, source.components
  about.said = self.world.copy(source.said)
  objects.say(about.said, body)
  about.metadata = body.metadata == nil and source.metadata or objects.metadata(nil, body)
  do
    local _ <close> = hold({ source })
    fs.copy(source.path, about.path)
  end
  return objects.message(self:put(bucket, about), request.base)
end

handlers["POST b/B/o/O/rewriteTo/b/B/o/O"] = function(self, request, ...)
  local resource = copy(self, request, ...)
  return objects.answer(200, {
    kind = "storage#rewriteResponse",
    done = true,
    objectSize = resource.size,
    totalBytesRewritten = resource.size,
    resource = resource,
  })
end

handlers["POST b/B/o/O/copyTo/b/B/o/O"] = function(self, request, ...)
  return objects.answer(200, copy(self, request, ...))
end

handlers["upload b/B/o"] = upload.handle

local function decode(segment)
  return (segment:gsub("%%(%x%x)", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

-- The form of a path, "b/B/o/O", and the names in it. After "b" comes a bucket, after "o" an object, whose name may
-- hold slashes when a client has not encoded them.
local function shape_of(path)
  local form, names, after = {}, {}, nil
  for segment in path:gmatch("[^/]+") do
    if after == "b" or after == "o" then
      form[#form + 1] = after:upper()
      names[#names + 1] = decode(segment)
      after = nil
    else
      form[#form + 1] = segment
      after = segment
    end
  end
  return table.concat(form, "/"), names
end

-- What a call asks for: the method's id, the form of its path as in METHODS, and the names in the path.
local function called(request)
  local form, names = shape_of(request.path:match("/storage/v1/(.*)$"))
  if request.path:find("/upload/storage/v1/", 1, true) then
    return "storage.objects.insert", "upload " .. form, names
  end
  local verb = request.method == "HEAD" and "GET" or request.method
  local shape = verb .. " " .. form
  return METHODS[shape], shape, names
end

local function dispatch(self, request)
  local method, shape, names = called(request)
  request.called = method
  if request.headers["Authorization"] then
    self.world.oauth:check(request)
  end
  local handler = handlers[shape]
  if not handler then
    objects.refuse(404, "notFound", "Not Found")
  end
  request.base = ("http://%s"):format(request.headers["Host"] or "localhost")
  if request.path:find("^/download/") then
    request.query.alt = "media"
  end
  local fault = self.world.faults:on_call(method)
  local answer = handler(self, request, table.unpack(names))
  if
    request.query.fields
    and answer.status == 200
    and type(answer.body) == "string"
    and answer.body ~= ""
  then
    local mask = fieldmask.parse(request.query.fields)
    answer = objects.answer(200, fieldmask.apply(mask, json.decode(answer.body)), answer.headers)
  end
  return answer, fault
end

--- Answer a request. Sets `request.called` to the method's id, when there is such a method.
---@async
---@param request table `method`, `path` (not decoded), `query`, `headers`, `body`
---@return table answer
---@return ciranda.sim.Fault? fault
function Service:handle(request)
  local ok, answer, fault = pcall(dispatch, self, request)
  if ok then
    return answer, fault
  elseif objects.is_refusal(answer) then
    return objects.refusal_answer(answer)
  elseif errors.is(answer) then -- bad credentials, or a fault
    return objects.answer(answer.http, errors.legacy_body(answer), errors.headers(answer))
  end
  return error(answer, 0)
end

return M
