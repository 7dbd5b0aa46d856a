--- What Google's APIs mean when they refuse, in our codes.
---
--- An HTTP answer carries `{error = {code = <HTTP>, status = "NAME", message, details}}`; an operation or a queued
--- resource's failedData carries a bare google.rpc.Status whose `code` is the RPC number: two code spaces. Cloud
--- Storage and OAuth have forms of their own. All, and answers that are none of these, become one error value.

local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")

local M = {}

-- google/rpc/code.proto
local RPC_NAMES = {
  [1] = "CANCELLED",
  [2] = "UNKNOWN",
  [3] = "INVALID_ARGUMENT",
  [4] = "DEADLINE_EXCEEDED",
  [5] = "NOT_FOUND",
  [6] = "ALREADY_EXISTS",
  [7] = "PERMISSION_DENIED",
  [8] = "RESOURCE_EXHAUSTED",
  [9] = "FAILED_PRECONDITION",
  [10] = "ABORTED",
  [11] = "OUT_OF_RANGE",
  [12] = "UNIMPLEMENTED",
  [13] = "INTERNAL",
  [14] = "UNAVAILABLE",
  [15] = "DATA_LOSS",
  [16] = "UNAUTHENTICATED",
}

local CODE_OF_NAME = {
  CANCELLED = "failed",
  UNKNOWN = "failed",
  INVALID_ARGUMENT = "invalid",
  DEADLINE_EXCEEDED = "unavailable",
  NOT_FOUND = "not_found",
  ALREADY_EXISTS = "exists",
  PERMISSION_DENIED = "permission",
  RESOURCE_EXHAUSTED = "rate_limit",
  FAILED_PRECONDITION = "precondition",
  ABORTED = "busy",
  OUT_OF_RANGE = "invalid",
  UNIMPLEMENTED = "unsupported",
  INTERNAL = "unavailable",
  UNAVAILABLE = "unavailable",
  DATA_LOSS = "failed",
  UNAUTHENTICATED = "auth",
}

local CODE_OF_HTTP = {
  [400] = "invalid",
  [401] = "auth",
  [403] = "permission",
  [404] = "not_found",
  [408] = "unavailable",
  [409] = "exists",
  [410] = "not_found",
  [412] = "precondition",
  [413] = "invalid",
  [416] = "invalid",
  [429] = "rate_limit",
  [499] = "failed",
  [500] = "unavailable",
  [501] = "unsupported",
  [502] = "unavailable",
  [503] = "unavailable",
  [504] = "unavailable",
}

--- Longest message of a server that is shown.
local LONGEST = 2000

---@class ciranda.gcp.Quota
---@field metric string?   the quota's id, such as "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"
---@field limit number?
---@field where string?    region or zone
---@field kind "queued-resource"|"TPU"|nil  what it counts

--- A text that is safe to print: one line of UTF-8, no control characters, not endless.
local function plain(text)
  text = tostring(text)
  local short = text:sub(1, LONGEST):gsub("%c+", " ")
  return json.utf8(short) .. (#text > LONGEST and " ..." or "")
end

--- The details of a kind ("ErrorInfo", "RetryInfo", ...) in a Status.
local function details_of(status, kind)
  local found = {}
  if type(status.details) == "table" then
    for _, detail in ipairs(status.details) do
      if
        type(detail) == "table"
        and type(detail["@type"]) == "string"
        and detail["@type"]:match("([^./]+)$") == kind
      then
        found[#found + 1] = detail
      end
    end
  end
  return found
end

--- The quota that a message names, in the forms that the TPU API and its queue have been seen to use.
---@param message string
---@return ciranda.gcp.Quota?
local function quota_in(message)
  local metric, limit, kind, where =
    message:match("Quota limit '([^']+)' has been exceeded%. Limit: (%d+) in (%a+) ([%w-]+)")
  if not metric then
    metric, limit, kind, where = message:match("Quota '([^']+)' exhausted%. Limit (%d+) in (%a+) ([%w-]+)")
  end
  if metric then
    return { metric = metric, limit = tonumber(limit), where = kind .. " " .. where }
  end
  if message:find("[Qq]uota") and not message:find("per minute", 1, true) then
    return { metric = message:match("[Qq]uota '([^']+)'") }
  end
  return nil
end

--- The quota that the details name.
local function quota_of_details(status)
  for _, info in ipairs(details_of(status, "ErrorInfo")) do
    local meta = type(info.metadata) == "table" and info.metadata or {}
    local unit = tostring(meta.quota_unit or meta.quota_limit or "")
    local per_time = unit:find("/min", 1, true)
      or unit:find("PerMinute", 1, true)
      or unit:find("/d/", 1, true)
    if meta.quota_metric and not per_time then
      return {
        metric = tostring(meta.quota_limit or meta.quota_metric),
        limit = tonumber(meta.quota_limit_value),
        where = meta.quota_location and tostring(meta.quota_location) or nil,
      }
    end
  end
  return nil
end

--- A protobuf duration ("3.5s") in seconds.
local function seconds(text)
  return type(text) == "string" and tonumber(text:match("^(%d+%.?%d*)s$")) or nil
end

-- What a person can do about it.
local HINTS = {
  quota = "free some of it (queued resources that are FAILED or SUSPENDED still count until they are deleted) or ask "
    .. "for more under IAM & Admin, Quotas",
  stockout = "leave the request in the queue, or try another zone, a smaller slice or another kind of capacity",
}

--- What a quota counts: queued resources, or TPU chips and cores.
local function quota_kind(quota)
  local metric = (quota.metric or ""):lower():gsub("[^%l]", "")
  return metric:find("queuedresource", 1, true) and "queued-resource"
    or metric:find("tpu", 1, true) and "TPU"
    or nil
end

--- The code for a named status and its message.
local function classify(name, message, status)
  if message:find("no more capacity", 1, true) or message:find("Insufficient reserved capacity", 1, true) then
    return "stockout"
  end
  if name == "RESOURCE_EXHAUSTED" or name == "PERMISSION_DENIED" then
    local quota = quota_of_details(status) or quota_in(message)
    if quota and (name == "RESOURCE_EXHAUSTED" or quota.metric) then
      return "quota", quota
    end
  end
  return CODE_OF_NAME[name] or "failed"
end

--- Put what a Status says into an error's fields.
local function describe(fields, status, name)
  local message = type(status.message) == "string" and status.message ~= "" and plain(status.message)
    or "no reason given"
  local code, quota = classify(name, message, status)
  fields.code = code or fields.code
  fields.quota = quota
  fields.status = name
  fields.api_message = message
  fields.details = type(status.details) == "table" and status.details or nil
  local info = details_of(status, "ErrorInfo")[1]
  fields.reason = info and info.reason and plain(info.reason) or nil
  local retry = details_of(status, "RetryInfo")[1]
  fields.retry_after = retry and seconds(retry.retryDelay) or fields.retry_after
  local hint = HINTS[fields.code]
  if quota then
    quota.kind = quota_kind(quota)
    hint = (quota.kind and ("this is the %s quota: "):format(quota.kind) or "") .. hint
  end
  fields.message = ("%s%s%s"):format(
    fields.target and fields.target .. ": " or "",
    message,
    hint and "; " .. hint or ""
  )
  return fields
end

---@class ciranda.gcp.Failure: ciranda.Error
---@field http_status integer?
---@field status string?         the canonical name, "NOT_FOUND"
---@field reason string?         ErrorInfo's or Cloud Storage's word
---@field api_message string?    the API's own words
---@field retry_after number?    seconds that the API asks to wait
---@field quota ciranda.gcp.Quota?
---@field details table[]?

--- The error for a google.rpc.Status with an RPC code: of an operation, or of failedData.
---@param status table
---@param target string? what failed, for the message
---@return ciranda.gcp.Failure
function M.of_status(status, target)
  if type(status) ~= "table" then
    status = {}
  end
  local name = RPC_NAMES[status.code] or "UNKNOWN"
  local fields = describe({ op = "gcp", target = target }, status, name)
  if name == "INTERNAL" then
    -- "an internal error has occurred": in practice how a spot request that finds no capacity ends.
    fields.code, fields.reason = "stockout", fields.reason or "internal"
    fields.message = fields.message .. " (code 13, which in practice means: no capacity now)"
  end
  return errors.new(fields)
end

--- Seconds in a Retry-After header: a number, or an HTTP date.
local function retry_after(value, now)
  if not value then
    return nil
  end
  local number = tonumber(value:match("^%s*(%d+)%s*$"))
  if number then
    return number
  end
  local day, month, year, hour, minute, second =
    value:match("(%d%d) (%a%a%a) (%d%d%d%d) (%d%d):(%d%d):(%d%d) GMT")
  local place = month and ("JanFebMarAprMayJunJulAugSepOctNovDec"):find(month, 1, true)
  if not place then
    return nil
  end
  local fields = {
    year = year,
    month = (place + 2) // 3,
    day = day,
    hour = hour,
    min = minute,
    sec = second,
    isdst = false,
  }
  local here = os.time(fields)
  local utc = os.date("!*t", here)
  utc.isdst = false
  local offset = here - os.time(utc) -- os.time reads local time
  return math.max(0, here + offset - now)
end

--- The error for an HTTP answer that is no success.
---@param response ciranda.http.Response
---@param now number? seconds since 1970
---@return ciranda.gcp.Failure
function M.of_response(response, now)
  local fields = {
    op = "gcp",
    target = response.target,
    http_status = response.status,
    code = CODE_OF_HTTP[response.status] or (response.status >= 500 and "unavailable" or "failed"),
    retry_after = retry_after(response.headers["retry-after"], now or os.time()),
  }
  local ok, body = pcall(response.json, response)
  local status = ok and type(body) == "table" and body.error
  if type(status) == "table" then
    local name = CODE_OF_NAME[status.status] and status.status
    local legacy = type(status.errors) == "table" and type(status.errors[1]) == "table" and status.errors[1]
      or {}
    local code = fields.code
    describe(fields, status, name or "UNKNOWN")
    fields.status = name or nil
    fields.reason = fields.reason or type(legacy.reason) == "string" and plain(legacy.reason) or nil
    if not name and fields.code == "failed" then
      fields.code = code
    end
    if legacy.domain == "usageLimits" then
      fields.code = (legacy.reason == "quotaExceeded" and fields.quota) and "quota" or "rate_limit"
    end
  else
    local said = ok and type(body) == "table" and type(body.error) == "string" and body.error
      or response.body
      or ""
    said = plain(said:sub(1, 200))
    fields.message = ("%s: status %d%s"):format(
      response.target,
      response.status,
      said ~= "" and ": " .. said or ""
    )
  end
  return errors.new(fields)
end

return M
