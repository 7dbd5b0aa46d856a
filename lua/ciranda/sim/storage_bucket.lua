--- Buckets of the simulated Cloud Storage: their names, what a client may say of them, their messages.
--
-- What has no effect here (lifecycle rules, access, soft deletion) is kept and shown as it was said, since
-- clients read back what they have set. Versions of objects are refused: a client that relied on them would
-- lose data.

local crypto = require("ciranda.io.crypto")
local json = require("ciranda.io.json")
local objects = require("ciranda.sim.storage_object")

local M = {}

---@class ciranda.sim.Bucket
---@field name string
---@field created number
---@field updated number
---@field metageneration integer
---@field said table<string, any> what the client has set, by the API's names
---@field objects table<string, ciranda.sim.StoredObject>

-- What a client may set, with the type in JSON.
local SETTABLE = {
  autoclass = "table",
  cors = "table",
  defaultEventBasedHold = "boolean",
  hierarchicalNamespace = "table",
  iamConfiguration = "table",
  labels = "table",
  lifecycle = "table",
  location = "string",
  logging = "table",
  rpo = "string",
  softDeletePolicy = "table",
  storageClass = "string",
  website = "table",
}

-- What is fixed when a bucket is made.
local FIXED = { hierarchicalNamespace = true, location = true }

--- Whether a bucket may be called that.
---@param name any
---@return boolean
function M.valid_name(name)
  return type(name) == "string"
    and #name >= 3
    and #name <= 63
    and name:match("^[%l%d][%l%d._-]*[%l%d]$") ~= nil
end

-- Put what is said into what was said, field by field; null takes away (RFC 7396).
local function merge(target, patch)
  for key, value in pairs(patch) do
    if value == json.null then
      target[key] = nil
    elseif type(value) == "table" and json.kind(value) ~= "array" then
      target[key] = merge(type(target[key]) == "table" and target[key] or json.object({}), value)
    else
      target[key] = value
    end
  end
  return target
end

local function check(body)
  for name, value in pairs(body) do
    local wanted = SETTABLE[name]
    if wanted and value ~= json.null and type(value) ~= wanted then
      objects.refuse(400, "invalid", ("Invalid value for field '%s'"):format(name), name)
    end
  end
  for key, value in pairs(type(body.labels) == "table" and body.labels or {}) do
    if value ~= json.null and type(value) ~= "string" then
      objects.refuse(400, "invalid", ("Invalid value of label '%s'"):format(tostring(key)), "labels")
    end
  end
  local versioning = body.versioning
  if type(versioning) == "table" and versioning.enabled == true then
    objects.refuse(400, "invalid", "Simulated buckets keep no versions of their objects", "versioning")
  end
end

--- A new bucket.
---@param name string valid
---@param body table what is said of it, decoded JSON
---@param now number
---@return ciranda.sim.Bucket
--- Raises a refusal.
function M.new(name, body, now)
  check(body)
  local said = { location = "US", storageClass = "STANDARD" }
  for field in pairs(SETTABLE) do
    merge(said, { [field] = body[field] })
  end
  said.location = said.location:upper()
  return { name = name, created = now, updated = now, metageneration = 1, said = said, objects = {} }
end

--- Change what is said of a bucket.
---@param bucket ciranda.sim.Bucket
---@param body table decoded JSON
---@param whole boolean what is not said goes (update), or stays (patch)
---@param now number
--- Raises a refusal.
function M.change(bucket, body, whole, now)
  check(body)
  for field in pairs(SETTABLE) do
    if not FIXED[field] then
      if whole and field ~= "storageClass" then
        bucket.said[field] = nil
      end
      merge(bucket.said, { [field] = body[field] })
    end
  end
  bucket.metageneration = bucket.metageneration + 1
  bucket.updated = now
end

-- The places that Cloud Storage calls multi-regions; the others are regions.
local MULTI_REGIONS = { ASIA = true, EU = true, US = true }

--- The Bucket message.
---@param bucket ciranda.sim.Bucket
---@param project_number string
---@param base string "http://address:port"
---@return table
function M.message(bucket, project_number, base)
  local message = {
    kind = "storage#bucket",
    id = bucket.name,
    name = bucket.name,
    selfLink = ("%s/storage/v1/b/%s"):format(base, bucket.name),
    projectNumber = project_number,
    metageneration = tostring(bucket.metageneration),
    locationType = MULTI_REGIONS[bucket.said.location] and "multi-region" or "region",
    etag = crypto.base64(("%d"):format(bucket.metageneration)),
    timeCreated = objects.time(bucket.created),
    updated = objects.time(bucket.updated),
  }
  for field, value in pairs(bucket.said) do
    message[field] = value
  end
  return message
end

return M
