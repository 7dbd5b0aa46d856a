--- What the simulated APIs answer when they refuse: google.rpc.Status in its two code spaces, and the messages that
-- the real services have been seen to send, word for word.
--
-- A refusal is a value of this module, raised with `errors.raise` by whatever handles a call and caught by the
-- service. In an HTTP answer `code` is the HTTP status and `status` the canonical name; inside an operation or a
-- queued resource's failedData `code` is the RPC number and there is no name.

local M = {}

-- google/rpc/code.proto: the number, and the HTTP status that stands for it.
local CODES = {
  CANCELLED = { 1, 499 },
  UNKNOWN = { 2, 500 },
  INVALID_ARGUMENT = { 3, 400 },
  DEADLINE_EXCEEDED = { 4, 504 },
  NOT_FOUND = { 5, 404 },
  ALREADY_EXISTS = { 6, 409 },
  PERMISSION_DENIED = { 7, 403 },
  RESOURCE_EXHAUSTED = { 8, 429 },
  FAILED_PRECONDITION = { 9, 400 },
  ABORTED = { 10, 409 },
  OUT_OF_RANGE = { 11, 400 },
  UNIMPLEMENTED = { 12, 501 },
  INTERNAL = { 13, 500 },
  UNAVAILABLE = { 14, 503 },
  DATA_LOSS = { 15, 500 },
  UNAUTHENTICATED = { 16, 401 },
}

---@class ciranda.sim.Status
---@field status string canonical name, "NOT_FOUND"
---@field code integer RPC number
---@field http integer HTTP status
---@field message string
---@field details table[]?
---@field retry_after number? seconds
---@field reason string? in a refusal of the older APIs; what goes with the status by default
local Status = {
  __name = "ciranda.sim.Status",
  __tostring = function(self)
    return self.status .. ": " .. self.message
  end,
}
Status.__index = Status

--- A refusal.
---@param status string canonical name; an unknown one is a programming error and raises
---@param message string
---@param details table[]? google.protobuf.Any values, each with its "@type"
---@return ciranda.sim.Status
function M.new(status, message, details)
  local code = CODES[status] or error("unknown status " .. tostring(status), 2)
  return setmetatable(
    { status = status, code = code[1], http = code[2], message = message, details = details },
    Status
  )
end

--- Whether a name is one of the canonical ones.
---@param status any
---@return boolean
function M.known(status)
  return CODES[status] ~= nil
end

--- Whether a value is a refusal of this module.
---@param value any
---@return boolean
function M.is(value)
  return getmetatable(value) == Status
end

--- Raise a refusal: `errors.raise("NOT_FOUND", "...")`, or one that exists.
---@param status string|ciranda.sim.Status
---@param message string?
---@param details table[]?
function M.raise(status, message, details)
  error(M.is(status) and status or M.new(status --[[@as string]], message --[[@as string]], details), 0)
end

--- The body of an HTTP answer.
---@param err ciranda.sim.Status
---@return table
function M.http_body(err)
  return { error = { code = err.http, message = err.message, status = err.status, details = err.details } }
end

-- What Google's older APIs call the reason of a refusal, in place of a canonical name.
local REASONS = {
  ABORTED = "conflict",
  ALREADY_EXISTS = "conflict",
  CANCELLED = "cancelled",
  DATA_LOSS = "backendError",
  DEADLINE_EXCEEDED = "gatewayTimeout",
  FAILED_PRECONDITION = "failedPrecondition",
  INTERNAL = "backendError",
  INVALID_ARGUMENT = "invalid",
  NOT_FOUND = "notFound",
  OUT_OF_RANGE = "invalid",
  PERMISSION_DENIED = "forbidden",
  RESOURCE_EXHAUSTED = "rateLimitExceeded",
  UNAUTHENTICATED = "authError",
  UNAVAILABLE = "backendError",
  UNIMPLEMENTED = "notImplemented",
  UNKNOWN = "backendError",
}

--- The body of an HTTP answer in the form of Google's older APIs: Cloud Storage, Compute Engine.
---@param err ciranda.sim.Status
---@return table
function M.legacy_body(err)
  local entry = { message = err.message, domain = "global", reason = err.reason or REASONS[err.status] }
  if err.status == "UNAUTHENTICATED" then
    entry.locationType, entry.location = "header", "Authorization"
  end
  return { error = { code = err.http, message = err.message, errors = { entry } } }
end

--- The headers of an HTTP answer.
---@param err ciranda.sim.Status
---@return table<string, string>
function M.headers(err)
  return {
    ["Content-Type"] = "application/json; charset=UTF-8",
    ["Retry-After"] = err.retry_after and ("%d"):format(math.ceil(err.retry_after)) or nil,
  }
end

--- The Status message of an operation or of failedData.
---@param err ciranda.sim.Status
---@return table
function M.rpc(err)
  return { code = err.code, message = err.message, details = err.details }
end

local function resource_info(name)
  return { { ["@type"] = "type.googleapis.com/google.rpc.ResourceInfo", resourceName = name } }
end

--- A request whose fields are wrong.
---@param message string
---@param field string? path of the field, as the service names it (snake_case)
---@return ciranda.sim.Status
function M.invalid(message, field)
  local details
  if field then
    details = {
      {
        ["@type"] = "type.googleapis.com/google.rpc.BadRequest",
        fieldViolations = { { field = field, description = message } },
      },
    }
  end
  return M.new("INVALID_ARGUMENT", message, details)
end

---@param name string full resource name
---@return ciranda.sim.Status
function M.not_found(name)
  return M.new("NOT_FOUND", ("Resource '%s' was not found"):format(name), resource_info(name))
end

--- Seen in the answers to node creates.
---@param name string full resource name
---@return ciranda.sim.Status
function M.already_exists(name)
  return M.new("ALREADY_EXISTS", ("Resource '%s' already exists"):format(name), resource_info(name))
end

--- No capacity: the error of a create operation.
---@param zone string
---@param eid string 16 hexadecimal digits, the service's own mark of the incident
---@return ciranda.sim.Status
function M.stockout(zone, eid)
  return M.new(
    "RESOURCE_EXHAUSTED",
    ('There is no more capacity in the zone "%s"; you can try in another zone '):format(zone)
      .. "where Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions) "
      .. ("[EID: 0x%s]"):format(eid)
  )
end

--- A reservation that has no more to give.
---@param eid string
---@return ciranda.sim.Status
function M.reservation_stockout(eid)
  return M.new(
    "FAILED_PRECONDITION",
    "Insufficient reserved capacity. Contact customer support to increase your reservation. "
      .. ("[EID: 0x%s]"):format(eid)
  )
end

--- What a call answers that does not go with a node's state.
---@param verb string as the service names it, "update"
---@param state string
---@param eid string
---@return ciranda.sim.Status
function M.unsupported_state(verb, state, eid)
  return M.new(
    "INVALID_ARGUMENT",
    ("Cloud TPU received a bad request. %s is not supported while in state %s [EID: 0x%s]"):format(
      verb,
      state,
      eid
    )
  )
end

--- What a spot request often ends with when there is no capacity for it.
---@return ciranda.sim.Status
function M.internal()
  return M.new("INTERNAL", "an internal error has occurred")
end

--- More than the quota could ever give, refused at the call.
---@param quota string quota id
---@param limit integer
---@param region string
---@return ciranda.sim.Status
function M.quota_limit(quota, limit, region)
  local message = ("Quota limit '%s' has been exceeded. Limit: %d in region %s."):format(quota, limit, region)
  return M.new("RESOURCE_EXHAUSTED", message, {
    {
      ["@type"] = "type.googleapis.com/google.rpc.QuotaFailure",
      violations = { { subject = "quota:" .. quota, description = message } },
    },
  })
end

--- The quota is in use, found at provisioning: failedData of a queued resource, error of an operation.
---@param quota string
---@param limit integer
---@param zone string
---@return ciranda.sim.Status
function M.quota_exhausted(quota, limit, zone)
  return M.new("RESOURCE_EXHAUSTED", ("Quota '%s' exhausted. Limit %d in zone %s"):format(quota, limit, zone))
end

--- Too many calls a minute.
---@param retry_after number seconds until the next may succeed
---@return ciranda.sim.Status
function M.rate_limit(retry_after)
  return M.new("RESOURCE_EXHAUSTED", "Maximum number of CreateNode requests per minute", {
    {
      ["@type"] = "type.googleapis.com/google.rpc.RetryInfo",
      retryDelay = ("%ds"):format(math.ceil(retry_after)),
    },
  })
end

--- An accelerator type that the zone does not have. The real service ends its list with a comma, too.
---@param accelerator string
---@param zone string
---@param valid string[]
---@return ciranda.sim.Status
function M.invalid_accelerator(accelerator, zone, valid)
  local list = {}
  for i, name in ipairs(valid) do
    list[i] = name .. ", "
  end
  return M.new(
    "INVALID_ARGUMENT",
    ('CloudTpu received an invalid AcceleratorType, "%s" for zone "%s". Valid values are "%s".'):format(
      accelerator,
      zone,
      table.concat(list)
    )
  )
end

---@param permission string "tpu.nodes.list"
---@param resource string
---@return ciranda.sim.Status
function M.permission(permission, resource)
  return M.new("PERMISSION_DENIED", ("Permission '%s' denied on '%s'"):format(permission, resource))
end

--- A zone that does not exist or may not be used.
---@param name string "projects/P/locations/Z"
---@return ciranda.sim.Status
function M.unauthorized_location(name)
  return M.new("PERMISSION_DENIED", ("Location '%s' is not found or access is unauthorized."):format(name))
end

--- A passing failure: the same call may succeed in a moment.
---@return ciranda.sim.Status
function M.unavailable()
  return M.new("UNAVAILABLE", "Internal error. Please try again")
end

--- A call without credentials, or with ones that mean nothing.
---@param missing boolean no credentials at all
---@return ciranda.sim.Status
function M.unauthenticated(missing)
  return M.new(
    "UNAUTHENTICATED",
    (
      missing and "Request is missing required authentication credential."
      or "Request had invalid authentication credentials."
    )
      .. " Expected OAuth 2 access token, login cookie or other valid authentication credential. "
      .. "See https://developers.google.com/identity/sign-in/web/devconsole-project.",
    {
      {
        ["@type"] = "type.googleapis.com/google.rpc.ErrorInfo",
        reason = missing and "CREDENTIALS_MISSING" or "ACCESS_TOKEN_TYPE_UNSUPPORTED",
        domain = "googleapis.com",
      },
    }
  )
end

return M
