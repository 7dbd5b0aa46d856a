--- How each kind of credential becomes an access token.
---
--- A kind is made of the decoded credential file and gives a source: a table with `fetch()`, which asks for a token and
--- returns it with the time when it expires. Nothing is kept here; ciranda.gcp.credentials shares and refreshes.
---
--- The exchanges are those of google-auth (2026-03), which documents them in its source:
--- `google/oauth2/_client.py`, `google/auth/identity_pool.py`, `google/auth/impersonated_credentials.py`.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local log = require("ciranda.io.log")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local url = require("ciranda.io.url")

local M = {}

M.SCOPE = "https://www.googleapis.com/auth/cloud-platform"
local TOKEN_ENDPOINT = "https://oauth2.googleapis.com/token"
local STS_ENDPOINT = "https://sts.googleapis.com/v1/token"

--- google-auth: one hour is the longest that a token may live; a token endpoint is asked three times.
local LIFETIME = 3600
local TRIES = 3

---@class ciranda.gcp.TokenSource
---@field fetch fun(): string, number  the token and when it expires (seconds since 1970)
---@field kind string
---@field project string?
---@field quota_project string?
---@field account string?

---@class ciranda.gcp.KindContext
---@field config ciranda.gcp.Config
---@field where string       where the credentials come from, for messages
---@field now fun(): number  seconds since 1970

local function fail(code, context, format, ...)
  errors.raise {
    code = code,
    op = "credentials",
    message = ("%s: "):format(context.where) .. format:format(...),
  }
end

--- A field of the file that must be there.
local function field(data, name, context)
  local value = data[name]
  if type(value) ~= "string" or value == "" then
    fail("auth", context, "the field '%s' is missing", name)
  end
  return value
end

--- A field that must not be shown anywhere.
local function secret(data, name, context)
  local value = field(data, name, context)
  log.secret(value)
  return value
end

local RETRIED = { [408] = true, [429] = true, [500] = true, [503] = true, [504] = true }
local RETRIED_ERRORS = { internal_failure = true, server_error = true, temporarily_unavailable = true }

--- The answer of a token endpoint as JSON, or nil with its error's word and text.
local function decode_answer(response)
  local ok, answer = pcall(response.json, response)
  if not ok or type(answer) ~= "table" then
    return nil, "no JSON", ("status %d"):format(response.status)
  end
  if response.status == 200 then
    return answer
  end
  if type(answer.error) == "table" then -- Google's APIs, not OAuth's form
    return nil, tostring(answer.error.status), tostring(answer.error.message)
  end
  return nil, tostring(answer.error or response.status), tostring(answer.error_description or "")
end

--- POST to a token endpoint, again when it fails in passing.
---@param address string
---@param request { form: table?, json: any?, headers: table? }
---@param context ciranda.gcp.KindContext
---@return table answer
local function exchange(address, request, context)
  local word, text, passing
  for attempt = 1, TRIES do
    if attempt > 1 then
      task.sleep(2 ^ (attempt - 2) * (0.9 + math.random() * 0.2))
    end
    local sent, response = pcall(http.request, {
      method = "POST",
      url = address,
      form = request.form,
      json = request.json,
      headers = request.headers,
      timeout = 30,
    })
    if sent then
      local answer
      answer, word, text = decode_answer(response)
      if answer then
        return answer
      end
      passing = RETRIED[response.status] or RETRIED_ERRORS[word]
      if not passing then
        break
      end
    elseif errors.is(response, "cancelled", "misuse") or attempt == TRIES then
      error(response, 0)
    end
  end
  if word == "invalid_grant" then
    fail(
      "auth",
      context,
      "the credentials were refused (%s); log in again: gcloud auth application-default login",
      text ~= "" and text or word
    )
  end
  return fail(
    passing and "unavailable" or "auth",
    context,
    "no token from %s: %s %s",
    url.shown(address),
    word,
    text
  )
end

--- The token and its end in an OAuth answer.
local function token_of(answer, context)
  local token = answer.access_token
  if type(token) ~= "string" or token == "" then
    fail("auth", context, "the answer holds no access token")
  end
  log.secret(token)
  return token, context.now() + (tonumber(answer.expires_in) or LIFETIME)
end

--- The value of an Authorization header for a client of OAuth.
local function basic(id, password)
  local value = "Basic " .. crypto.base64(id .. ":" .. password)
  log.secret(value)
  return value
end

local kinds = {}

function kinds.authorized_user(data, context)
  local id = field(data, "client_id", context)
  local client_secret = secret(data, "client_secret", context)
  local refresh = secret(data, "refresh_token", context)
  local endpoint = context.config:get("auth/token_host") or data.token_uri or TOKEN_ENDPOINT
  return {
    account = data.account,
    fetch = function()
      return token_of(
        exchange(endpoint, {
          form = {
            grant_type = "refresh_token",
            client_id = id,
            client_secret = client_secret,
            refresh_token = refresh,
          },
        }, context),
        context
      )
    end,
  }
end

--- A JWT of a service account, signed.
---@param data table the credential file
---@param claims table
---@return string
function M.sign_jwt(data, claims)
  local head = json.encode { typ = "JWT", alg = "RS256", kid = data.private_key_id }
  local signed = crypto.base64url(head) .. "." .. crypto.base64url(json.encode(claims))
  return signed .. "." .. crypto.base64url(crypto.rs256_sign(data.private_key, signed))
end

function kinds.service_account(data, context)
  local email = field(data, "client_email", context)
  secret(data, "private_key", context)
  local endpoint = field(data, "token_uri", context)
  return {
    account = email,
    project = data.project_id,
    fetch = function()
      local now = math.floor(context.now())
      local ok, assertion = pcall(M.sign_jwt, data, {
        iat = now,
        exp = now + LIFETIME,
        iss = email,
        aud = TOKEN_ENDPOINT, -- also for a token_uri elsewhere, as google-auth has it
        scope = M.SCOPE,
      })
      if not ok then
        fail("auth", context, "its private_key cannot sign: %s", errors.text(assertion))
      end
      log.secret(assertion)
      return token_of(
        exchange(endpoint, {
          form = { grant_type = "urn:ietf:params:oauth:grant-type:jwt-bearer", assertion = assertion },
        }, context),
        context
      )
    end,
  }
end

--- What `format` says about a subject token's text.
local function subject_in(text, format, context)
  if type(format) == "table" and format.type == "json" then
    local value = json.decode(text, context.where .. ": the subject token")
    local name = field(format, "subject_token_field_name", context)
    if type(value) ~= "table" or type(value[name]) ~= "string" then
      fail("auth", context, "the subject token's JSON has no text '%s'", name)
    end
    return value[name]
  end
  return (text:gsub("%s+$", ""))
end

--- What to do about a source of subject tokens that is not supported.
local INSTEAD = "; give a token that another program gets, such as `gcloud auth print-access-token`, in the file that "
  .. "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE names, or use a service account's key (GOOGLE_APPLICATION_CREDENTIALS)"

--- Refuse a source of subject tokens by name, before anything is asked.
---@return table source
local function check_source(data, context)
  local source = data.credential_source
  local aws = type(source) == "table" and source.environment_id
  if aws or data.subject_token_type == "urn:ietf:params:aws:token-type:aws4_request" then
    fail(
      "unsupported",
      context,
      "its subject tokens come from AWS%s, which is not supported%s",
      aws and (" (environment_id '%s')"):format(tostring(aws)) or "",
      INSTEAD
    )
  elseif type(source) ~= "table" then
    fail("auth", context, "the field 'credential_source' is missing")
  elseif source.certificate then
    fail("unsupported", context, "its credential_source is a certificate, which is not supported%s", INSTEAD)
  elseif source.executable then
    if context.config.env("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES") ~= "1" then
      fail(
        "auth",
        context,
        "its subject token comes from a program (%s); when you trust it, set "
          .. "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1",
        tostring(type(source.executable) == "table" and source.executable.command)
      )
    end
  elseif not source.file and not source.url then
    fail("unsupported", context, "its credential_source is neither file, url nor executable%s", INSTEAD)
  end
  return source
end

--- Run the executable of a credential source and read its answer.
local function subject_from_executable(source, data, context)
  local command = field(source, "command", context)
  local result = process.run {
    "/bin/sh",
    "-c",
    command,
    timeout = (tonumber(source.timeout_millis) or 30000) / 1000,
    env = {
      GOOGLE_EXTERNAL_ACCOUNT_AUDIENCE = data.audience,
      GOOGLE_EXTERNAL_ACCOUNT_TOKEN_TYPE = data.subject_token_type,
      GOOGLE_EXTERNAL_ACCOUNT_INTERACTIVE = "0",
    },
  }
  if result.code ~= 0 then
    fail("auth", context, "its program for the subject token failed: %s", result:reason())
  end
  local answer = json.decode(result.stdout, context.where .. ": the program's answer")
  local token = type(answer) == "table" and (answer.id_token or answer.saml_response)
  if type(answer) ~= "table" or answer.success ~= true or type(token) ~= "string" then
    fail(
      "auth",
      context,
      "its program for the subject token says no: %s",
      tostring(type(answer) == "table" and answer.message or "no token")
    )
  end
  return token
end

--- The subject token of an external account.
local function subject_token(data, context)
  local source = data.credential_source
  local token
  if source.file then
    token = subject_in(fs.read(source.file, 1 << 20), source.format, context)
  elseif source.url then
    local response = http.get(source.url, { headers = source.headers, timeout = 30 })
    if response.status ~= 200 then
      fail(
        "auth",
        context,
        "the source of the subject token, %s, answered %d",
        url.shown(source.url),
        response.status
      )
    end
    token = subject_in(response.body, source.format, context)
  else
    token = subject_from_executable(source.executable, data, context)
  end
  log.secret(token)
  return token
end

--- Let a source's token act for a service account.
---@param source ciranda.gcp.TokenSource
---@param address string the URL of generateAccessToken
---@param delegates string[]?
---@param lifetime integer? seconds
---@param context ciranda.gcp.KindContext
---@return ciranda.gcp.TokenSource
function M.impersonate(source, address, delegates, lifetime, context)
  local principal = address:match("([^/]+):generateAccessToken$")
  if not principal then
    fail("auth", context, "'%s' is no URL of generateAccessToken", url.shown(address))
  end
  return {
    kind = "impersonated_service_account",
    account = principal,
    project = source.project,
    quota_project = source.quota_project,
    fetch = function()
      local token = source.fetch()
      local answer = exchange(address, {
        json = {
          delegates = json.array(delegates or {}),
          scope = { M.SCOPE },
          lifetime = ("%ds"):format(lifetime or LIFETIME),
        },
        headers = { Authorization = "Bearer " .. token },
      }, context)
      local expiry = M.parse_time(answer.expireTime)
      if type(answer.accessToken) ~= "string" or not expiry then
        fail("auth", context, "the answer of generateAccessToken holds no token")
      end
      log.secret(answer.accessToken)
      return answer.accessToken, expiry
    end,
  }
end

--- Seconds since 1970 of an RFC 3339 time with Z, nil for anything else.
---@param text any
---@return number?
function M.parse_time(text)
  if type(text) ~= "string" then
    return nil
  end
  local year, month, day, hour, minute, second =
    text:match("^(%d%d%d%d)-(%d%d)-(%d%d)T(%d%d):(%d%d):(%d%d)[.%d]*Z$")
  if not year then
    return nil
  end
  year, month, day = math.tointeger(year), math.tointeger(month), math.tointeger(day)
  -- days since 1970-01-01 of the proleptic Gregorian calendar, years beginning in March
  local shifted = month > 2 and year or year - 1
  local months = (month + 9) % 12
  local days = 365 * shifted
    + shifted // 4
    - shifted // 100
    + shifted // 400
    + (153 * months + 2) // 5
    + day
    - 719469
  return days * 86400 + math.tointeger(hour) * 3600 + math.tointeger(minute) * 60 + math.tointeger(second)
end

function kinds.external_account(data, context)
  local audience = field(data, "audience", context)
  local token_type = field(data, "subject_token_type", context)
  local endpoint = data.token_url or STS_ENDPOINT
  check_source(data, context)
  local headers = data.client_id and { Authorization = basic(data.client_id, data.client_secret or "") }
    or nil
  local source = {
    kind = "external_account",
    fetch = function()
      return token_of(
        exchange(endpoint, {
          headers = headers,
          form = {
            grant_type = "urn:ietf:params:oauth:grant-type:token-exchange",
            audience = audience,
            scope = M.SCOPE,
            requested_token_type = "urn:ietf:params:oauth:token-type:access_token",
            subject_token = subject_token(data, context),
            subject_token_type = token_type,
            options = data.workforce_pool_user_project and json.encode {
              userProject = data.workforce_pool_user_project,
            } or nil,
          },
        }, context),
        context
      )
    end,
  }
  if data.service_account_impersonation_url then
    local settings = data.service_account_impersonation or {}
    return M.impersonate(
      source,
      data.service_account_impersonation_url,
      nil,
      math.tointeger(settings.token_lifetime_seconds),
      context
    )
  end
  return source
end

function kinds.external_account_authorized_user(data, context)
  local id = field(data, "client_id", context)
  local password = secret(data, "client_secret", context)
  local refresh = secret(data, "refresh_token", context)
  local endpoint = field(data, "token_url", context)
  return {
    fetch = function()
      local answer = exchange(endpoint, {
        headers = { Authorization = basic(id, password) },
        form = { grant_type = "refresh_token", refresh_token = refresh },
      }, context)
      if type(answer.refresh_token) == "string" then
        refresh = answer.refresh_token
        log.secret(refresh)
      end
      return token_of(answer, context)
    end,
  }
end

function kinds.impersonated_service_account(data, context)
  if type(data.source_credentials) ~= "table" then
    fail("auth", context, "the field 'source_credentials' is missing")
  end
  return M.impersonate(
    M.of(data.source_credentials, context),
    field(data, "service_account_impersonation_url", context),
    data.delegates,
    nil,
    context
  )
end

--- The source that a decoded credential file describes.
---@param data table
---@param context ciranda.gcp.KindContext
---@return ciranda.gcp.TokenSource
--- Raises `auth` when a field is missing, `unsupported` for a kind that Ciranda does not know.
function M.of(data, context)
  if type(data) ~= "table" then
    fail("auth", context, "it is no JSON object")
  end
  local make = type(data.type) == "string" and kinds[data.type]
  if data.type == "gdch_service_account" then
    fail(
      "unsupported",
      context,
      "credentials of type 'gdch_service_account' are for Google Distributed Cloud%s",
      INSTEAD
    )
  end
  if not make then
    local names = {}
    for name in pairs(kinds) do
      names[#names + 1] = name
    end
    table.sort(names)
    fail(
      "unsupported",
      context,
      "credentials of type '%s' are not supported (supported: %s)",
      tostring(data.type),
      table.concat(names, ", ")
    )
  end
  local source = make(data, context)
  source.kind = source.kind or data.type
  source.quota_project = source.quota_project or data.quota_project_id
  return source
end

return M
