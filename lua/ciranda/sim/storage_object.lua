--- Objects of the simulated Cloud Storage: their messages, preconditions, refusals.

local crypto = require("ciranda.io.crypto")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.StoredObject
---@field bucket string
---@field name string
---@field generation integer
---@field metageneration integer
---@field size integer
---@field crc32c string raw, four bytes big-endian
---@field md5 string? raw; absent on composites
---@field path string file with the bytes
---@field said table<string, string> contentType, cacheControl, ... by the API's names
---@field metadata table<string, string>?
---@field created number
---@field updated number
---@field holds integer how many read the bytes now
---@field gone boolean? replaced or deleted

-- What a client may say of an object besides its metadata.
local SETTABLE = {
  "cacheControl",
  "contentDisposition",
  "contentEncoding",
  "contentLanguage",
  "contentType",
  "customTime",
  "storageClass",
}

local Refusal = { __name = "ciranda.sim.StorageRefusal" }

--- Raise a refusal in the form of Google's older APIs.
---@param status integer
---@param reason string
---@param message string
---@param location string? what of the request it is about
function M.refuse(status, reason, message, location)
  error(
    setmetatable({ status = status, reason = reason, message = message, location = location }, Refusal),
    0
  )
end

---@param value any
---@return boolean
function M.is_refusal(value)
  return getmetatable(value) == Refusal
end

--- The answer to a refusal.
---@param refusal table
---@return table
function M.refusal_answer(refusal)
  if refusal.status == 304 then
    return { status = 304, headers = {}, body = "" }
  end
  local entry = { message = refusal.message, domain = "global", reason = refusal.reason }
  if refusal.location then
    entry.locationType, entry.location = "parameter", refusal.location
  end
  return M.answer(refusal.status, {
    error = { code = refusal.status, message = refusal.message, errors = { entry } },
  })
end

--- Take over what a client says of an object, field by field; null takes away.
---@param said table<string, string> contentType, cacheControl, ... is changed
---@param body table decoded JSON
--- Raises a refusal.
function M.say(said, body)
  for _, field in ipairs(SETTABLE) do
    local value = body[field]
    if value == json.null then
      said[field] = nil
    elseif value ~= nil and type(value) ~= "string" then
      M.refuse(400, "invalid", ("Invalid value for field '%s'"):format(field), field)
    elseif value ~= nil then
      said[field] = value
    end
  end
end

--- Take over a client's own metadata, entry by entry; null takes away.
---@param metadata table<string, string>? what is there
---@param body table decoded JSON
---@param whole boolean? what is not said goes
---@return table<string, string>?
--- Raises a refusal.
function M.metadata(metadata, body, whole)
  if whole or body.metadata == json.null then
    metadata = nil
  end
  if body.metadata == nil or body.metadata == json.null then
    return metadata
  elseif type(body.metadata) ~= "table" then
    M.refuse(400, "invalid", "Invalid value for field 'metadata'", "metadata")
  end
  local result = {}
  for key, value in pairs(metadata or {}) do
    result[key] = value
  end
  for key, value in pairs(body.metadata) do
    if value ~= json.null and type(value) ~= "string" then
      M.refuse(400, "invalid", ("Invalid value of metadata '%s'"):format(tostring(key)), "metadata")
    end
    result[key] = value ~= json.null and value or nil
  end
  return next(result) and result or nil
end

--- An answer in JSON.
---@param status integer
---@param value table
---@param headers table?
---@return table
function M.answer(status, value, headers)
  headers = headers or {}
  headers["Content-Type"] = "application/json; charset=UTF-8"
  return { status = status, headers = headers, body = json.encode(value) .. "\n" }
end

--- A time as Cloud Storage writes it: milliseconds.
---@param seconds number
---@return string
function M.time(seconds)
  local whole = math.floor(seconds)
  return os.date("!%Y-%m-%dT%H:%M:%S", whole) .. (".%03dZ"):format(math.floor((seconds - whole) * 1000))
end

--- Percent-encode a name as one segment of a path.
---@param name string
---@return string
function M.encode(name)
  return (name:gsub("[^%w._~-]", function(char)
    return ("%%%02X"):format(char:byte())
  end))
end

--- The Object message.
---@param object ciranda.sim.StoredObject
---@param base string "http://address:port"
---@return table
function M.message(object, base)
  local path = ("/storage/v1/b/%s/o/%s"):format(object.bucket, M.encode(object.name))
  local etag = crypto.base64(("%d/%d"):format(object.generation, object.metageneration))
  local message = {
    kind = "storage#object",
    id = ("%s/%s/%d"):format(object.bucket, object.name, object.generation),
    selfLink = base .. path,
    mediaLink = ("%s/download%s?generation=%d&alt=media"):format(base, path, object.generation),
    name = object.name,
    bucket = object.bucket,
    generation = tostring(object.generation),
    metageneration = tostring(object.metageneration),
    storageClass = "STANDARD",
    size = tostring(object.size),
    md5Hash = object.md5 and crypto.base64(object.md5) or nil,
    crc32c = crypto.base64(object.crc32c),
    componentCount = object.components,
    etag = etag,
    timeCreated = M.time(object.created),
    updated = M.time(object.updated),
    timeStorageClassUpdated = M.time(object.created),
    metadata = object.metadata and json.object(object.metadata) or nil,
  }
  for field, value in pairs(object.said) do
    message[field] = value
  end
  return message
end

local function number_of(query, name)
  local text = query[name]
  if text == nil then
    return nil
  end
  local number = math.tointeger(tonumber(text))
  if not number or number < 0 then
    M.refuse(400, "invalid", ("Invalid value '%s' for %s"):format(text, name), name)
  end
  return number
end

M.number_of = number_of

--- Check the conditions of a call against what is there. Generation 0 stands for nothing.
---@param query table<string, string>
---@param object ciranda.sim.StoredObject?
---@param reading boolean? a failed NotMatch is 304 then, else 412
---@param prefix string? "ifSource" for the source of a copy; "if" by default
--- Raises a refusal.
function M.check_conditions(query, object, reading, prefix)
  prefix = prefix or "if"
  local generation = object and object.generation or 0
  local metageneration = object and object.metageneration or 0
  for _, condition in ipairs({
    { prefix .. "GenerationMatch", generation, true },
    { prefix .. "GenerationNotMatch", generation, false },
    { prefix .. "MetagenerationMatch", metageneration, true },
    { prefix .. "MetagenerationNotMatch", metageneration, false },
  }) do
    local wanted = number_of(query, condition[1])
    if wanted and (wanted == condition[2]) ~= condition[3] then
      local status = reading and not condition[3] and 304 or 412
      M.refuse(
        status,
        "conditionNotMet",
        "At least one of the pre-conditions you specified did not hold.",
        condition[1]
      )
    end
  end
end

--- Check what a client says the bytes are, in the metadata or in X-Goog-Hash ("crc32c=...,md5=...").
---@param said { crc32c: string?, md5Hash: string? } base64
---@param crc32c string raw
---@param md5 string raw
--- Raises a refusal.
function M.check_hashes(said, crc32c, md5)
  local pairs_of = { { "crc32c", "CRC32C", said.crc32c, crc32c }, { "md5Hash", "MD5", said.md5Hash, md5 } }
  for _, check in ipairs(pairs_of) do
    local actual = crypto.base64(check[4])
    if check[3] and check[3] ~= actual then
      M.refuse(
        400,
        "invalid",
        ('Provided %s hash "%s" doesn\'t match calculated %s hash "%s".'):format(
          check[2],
          check[3],
          check[2],
          actual
        ),
        check[1]
      )
    end
  end
end

--- The hashes in an X-Goog-Hash header.
---@param header string?
---@return { crc32c: string?, md5Hash: string? }
function M.hashes_of(header)
  return {
    crc32c = header and header:match("crc32c=([%w+/=]+)"),
    md5Hash = header and header:match("md5=([%w+/=]+)"),
  }
end

return M
