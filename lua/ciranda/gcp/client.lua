--- One client for all of Google's APIs: credentials, deadlines, repetition, errors.
---
--- What may be repeated is. A call that changes something is repeated only when the caller says that repeating is
--- harmless (`idempotent`), or when it certainly has not been carried out: the connection was never made, or the API
--- says that it counts calls (429). Waiting is exponential with full jitter, and never shorter than the API asks for.

local clock = require("ciranda.io.clock")
local credentials = require("ciranda.gcp.credentials")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local failure = require("ciranda.gcp.failure")
local http = require("ciranda.io.http")
local log = require("ciranda.io.log")
local task = require("ciranda.task")

local M = {}

local type = type -- for lists of many items

--- The waits between attempts, in seconds: a random time up to FIRST * 2^n, at most MOST. gcloud and Google's
--- libraries begin at 1 s and stop at 32 to 64 s.
M.FIRST_WAIT = 1
M.MOST_WAIT = 32

--- Seconds that a call may take with all its attempts, and each attempt, unless the caller says otherwise.
M.DEADLINE = 300
M.ATTEMPT = 60

--- Seconds of trying without an answer before it is told, and between two tellings.
local TELL_AFTER, TELL_AGAIN = 5, 60

--- Bytes of an answer in JSON. The largest page of the TPU API's lists is a fraction of it.
local MAX_BODY = 64 << 20

local RETRIED_STATUS = { [408] = true, [429] = true, [500] = true, [502] = true, [503] = true, [504] = true }

-- Transport failures in which the request cannot have reached anyone.
local UNSENT_PHASES = { resolve = true, connect = true, tls = true }
local RETRIED_CODES =
  { timeout = true, reset = true, closed = true, refused = true, unreachable = true, resolve = true }

---@class ciranda.gcp.Client
---@field credentials ciranda.gcp.Credentials
---@field private told number?  when it was last told that there is no answer
---@field calls integer         that were made, repetitions included
---@field random fun(): number
---@field first_wait number
---@field most_wait number
local Client = {}
Client.__index = Client
Client.__name = "ciranda.gcp.Client"

local OPTIONS = { credentials = true, random = true, first_wait = true, most_wait = true }

--- Make a client.
---@async
---@param options { credentials: ciranda.gcp.Credentials?, random: (fun(): number)?, first_wait: number?,
---       most_wait: number? }? credentials are found when none are given; waits are seconds
---@return ciranda.gcp.Client
function M.new(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "gcp.client.new")
  return setmetatable({
    credentials = options.credentials or credentials.find(),
    random = options.random or math.random,
    first_wait = options.first_wait or M.FIRST_WAIT,
    most_wait = options.most_wait or M.MOST_WAIT,
    calls = 0,
  }, Client)
end

---@class ciranda.gcp.Call
---@field method string?        GET by default
---@field url string
---@field query table?
---@field headers table<string, string>?
---@field json any?
---@field body string?
---@field file table?           as ciranda.io.http's
---@field idempotent boolean?   whether repeating is harmless; true for GET and HEAD, false for the others
---@field deadline number?      seconds for the call with all its attempts
---@field timeout number|false|nil  seconds for each attempt
---@field idle_timeout number?
---@field accept table<integer, true>?  statuses, besides 200 to 299, that are answers
---@field on_response fun(response: ciranda.http.Response)?  with `on_data`: the head of a success
---@field on_data fun(chunk: string)?  takes the body of a success; once it has had some, the call is not repeated

local CALL = {}
for name in
  ([[method url query headers json body file idempotent deadline timeout idle_timeout accept on_response
  on_data]]):gmatch("%S+")
do
  CALL[name] = true
end

--- The receivers of a download: what is no success is collected as an answer's body, not given to the caller.
local function receivers(call)
  if not call.on_data then
    return nil
  end
  local state = { error_body = {} }
  function state.on_response(head)
    state.success = head.status >= 200 and head.status < 300
    if state.success and call.on_response then
      call.on_response(head)
    end
  end
  function state.on_data(chunk)
    if state.success then
      state.delivered = true
      call.on_data(chunk)
    elseif #state.error_body < 16 then
      table.insert(state.error_body, chunk)
    end
  end
  return state
end

--- One attempt: the answer, or nil and the error.
local function attempt(self, call, idempotent, timeout, receiver)
  local found, headers, token = pcall(self.credentials.headers, self.credentials)
  if not found then
    if errors.is(headers) then
      headers.unsent = true
    end
    return nil, headers
  end
  headers["User-Agent"] = "ciranda/" .. engine.version
  for name, value in pairs(call.headers or {}) do
    headers[name] = value
  end
  self.calls = self.calls + 1
  local sent, response = pcall(http.request, {
    method = call.method or "GET",
    url = call.url,
    query = call.query,
    headers = headers,
    json = call.json,
    body = call.body,
    file = call.file,
    once = not idempotent,
    timeout = timeout,
    idle_timeout = call.idle_timeout,
    max_body = MAX_BODY,
    accept_encoding = not receiver and "gzip" or nil,
    on_response = receiver and receiver.on_response,
    on_data = receiver and receiver.on_data,
  })
  if not sent then
    return nil, response, token
  end
  if receiver and not receiver.success then
    response.body = table.concat(receiver.error_body)
  end
  log.debug(("%s: %d in %d ms"):format(response.target, response.status, response.time_ms))
  if (response.status >= 200 and response.status < 300) or (call.accept and call.accept[response.status]) then
    return response
  end
  return nil, failure.of_response(response), token
end

--- Whether a failed attempt may be followed by another.
local function may_repeat(err, idempotent)
  if err.unsent then -- there was no token to send it with
    return RETRIED_CODES[err.code] or err.code == "unavailable"
  end
  if err.http_status then
    if err.code == "quota" or err.code == "stockout" then
      return false -- waiting some seconds does not make more
    end
    if err.http_status == 429 then
      return true -- it was counted, not carried out
    end
    return idempotent and RETRIED_STATUS[err.http_status] == true
  end
  if not RETRIED_CODES[err.code] then
    return false
  end
  return idempotent or UNSENT_PHASES[err.phase] == true or err.code == "refused" or err.code == "resolve"
end

--- Tells now and then that calls are not answered: who waits for minutes wants to know for what.
---@private
---@param err ciranda.Error
---@param began number
---@param deadline number
function Client:tell(err, began, deadline)
  local now = self:now()
  if now - began >= TELL_AFTER and now - (self.told or -math.huge) >= TELL_AGAIN then
    self.told = now
    log.warn(("%s; trying again, for %.0f s at most"):format(tostring(err), deadline - now))
  end
end

--- What helps when credentials of a kind are refused.
local RENEWED_BY = {
  access_token = "; it has expired, or is none: get a new one",
  authorized_user = "; log in again: gcloud auth application-default login",
  gcloud = "; log in again: gcloud auth login",
}

--- Whose call it was, when that is why it failed.
---@private
---@param err ciranda.gcp.Failure
function Client:name_caller(err)
  local who = self.credentials
  if err.http_status and (err.code == "auth" or err.code == "permission") and who.where then
    local remedy = err.code == "auth" and RENEWED_BY[who.kind] or ""
    err.message = ("%s (asked with the %s)%s"):format(err.message, tostring(who), remedy)
  end
end

--- Make a call and return the answer, whose status is 200 to 299 or accepted.
---@async
---@param call ciranda.gcp.Call
---@return ciranda.http.Response
--- Raises ciranda.gcp.Failure (`auth`, `permission`, `not_found`, `exists`, `quota`, `stockout`, `rate_limit`,
--- `invalid`, `precondition`, `unavailable`, ...) and what a request raises. A `timeout`, `reset` or `closed` of a call
--- that changes something leaves open whether it was carried out: look before repeating.
function Client:request(call)
  errors.check_options(call, CALL, "client:request")
  local method = call.method or "GET"
  local idempotent = call.idempotent
  if idempotent == nil then
    idempotent = method == "GET" or method == "HEAD"
  end
  local began = self:now()
  local deadline = began + (call.deadline or M.DEADLINE)
  local tries, refreshed = 0, false
  while true do
    tries = tries + 1
    local timeout = call.timeout
    if timeout == nil then
      timeout = M.ATTEMPT
    end
    if timeout then
      timeout = math.max(0.001, math.min(timeout, deadline - self:now()))
    end
    local receiver = receivers(call)
    local response, err, token = attempt(self, call, idempotent, timeout, receiver)
    if response then
      return response
    end
    if errors.is_fatal(err) then
      error(err, 0)
    end
    local wait
    if err.http_status == 401 and not refreshed and token then
      refreshed, wait = true, 0
      self.credentials:reject(token)
    elseif (receiver and receiver.delivered) or not may_repeat(err, idempotent) then
      wait = nil
    else
      local most = math.min(self.most_wait, self.first_wait * 2 ^ (tries - 1))
      wait = math.max(self.random() * most, err.retry_after or 0)
    end
    if not wait or self:now() + wait >= deadline then
      if tries > 1 then
        err.message = ("%s (tried %d times in %.0f s)"):format(err.message, tries, self:now() - began)
      end
      if errors.is(err, "resolve") then
        err.message = err.message
          .. " (is this machine in a network that resolves names? a proxy of the environment is not used)"
      end
      self:name_caller(err)
      err.traceback = nil
      errors.raise(err)
    end
    if wait > 0 then
      log.debug(("%s; again in %.1f s"):format(tostring(err), wait))
      self:tell(err, began, deadline)
      task.sleep(wait)
    end
  end
end

--- Seconds of a clock that only goes forward.
function Client:now() -- luacheck: ignore 212
  return clock.now()
end

--- Make a call whose answer is a JSON object.
---@async
---@param call ciranda.gcp.Call
---@return table value
---@return ciranda.http.Response response
--- Raises what `request` raises, and `protocol` for an answer that is something else.
function Client:json(call)
  local response = self:request(call)
  local ok, value = pcall(response.json, response)
  if not ok or type(value) ~= "table" then
    errors.raise {
      code = "protocol",
      op = "gcp",
      target = response.target,
      message = ("%s: the answer (status %d, %d bytes) is not a JSON object%s"):format(
        response.target,
        response.status,
        #response.body,
        ok and "" or ": " .. (errors.is(value) and value.message or errors.text(value))
      ),
    }
  end
  return value, response
end

--- All pages of a list.
---@async
---@param call ciranda.gcp.Call
---@param field string the list's name in the answer
---@param on_page (fun(page: table))? sees each page, for its other fields
---@return table[] items
---@return string[] unreachable locations that could not be asked
function Client:pages(call, field, on_page)
  local items, unreachable, seen = {}, {}, {}
  local query = {}
  for name, value in pairs(call.query or {}) do
    query[name] = value
  end
  local paged = {}
  for name, value in pairs(call) do
    paged[name] = value
  end
  paged.query = query
  while true do
    local page, response = self:json(paged)
    local list = page[field]
    if list ~= nil and type(list) ~= "table" then
      errors.raise {
        code = "protocol",
        op = "gcp",
        target = response.target,
        message = ("%s: '%s' in the answer is no list"):format(response.target, field),
      }
    end
    local count = #items
    for place = 1, list and #list or 0 do
      local item = list[place]
      if type(item) == "table" then
        count = count + 1
        items[count] = item
      end
    end
    for _, place in ipairs(type(page.unreachable) == "table" and page.unreachable or {}) do
      unreachable[#unreachable + 1] = tostring(place)
    end
    if on_page then
      on_page(page)
    end
    local token = page.nextPageToken
    if type(token) ~= "string" or token == "" then
      return items, unreachable
    end
    if seen[token] then
      errors.raise {
        code = "protocol",
        op = "gcp",
        target = response.target,
        message = response.target .. ": the list goes in circles: a page's token came twice",
      }
    end
    seen[token] = true
    query.pageToken = token
  end
end

return M
