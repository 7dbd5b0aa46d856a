--- Credentials of the simulated cloud: tokens, who they were given to, and the endpoints that give them.
--
-- Tokens are opaque and real in one respect: only those that were given out are accepted, and only until they expire.
-- `/token` exchanges a refresh token or a service account's signed JWT, `/v1/token` a subject token of workload
-- identity, `:generateAccessToken` impersonates.

local clock = require("ciranda.sim.clock")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

--- Seconds that a token lives, as Google's do.
M.LIFETIME = 3599

local SCOPE = "https://www.googleapis.com/auth/cloud-platform"

---@class ciranda.sim.OAuth
---@field default_account string
---@field private tokens table<string, { account: string, expires: number }>
local OAuth = {}
OAuth.__index = OAuth

---@param options { clock: ciranda.sim.Clock, project: string, project_number: string, open: boolean? }
---  `open`: calls without credentials are let through
---@return ciranda.sim.OAuth
function M.new(options)
  return setmetatable({
    clock = options.clock,
    open = options.open,
    default_account = options.project_number .. "-compute@developer.gserviceaccount.com",
    tokens = {},
    service_accounts = {},
    users = {},
  }, OAuth)
end

--- Give out a token.
---@param account string
---@param lifetime number? seconds
---@return string token
function OAuth:issue(account, lifetime)
  local token = "ya29.sim." .. crypto.base64url(crypto.random(48))
  self.tokens[token] = { account = account, expires = self.clock:now() + (lifetime or M.LIFETIME) }
  return token
end

--- What the metadata server says when it is asked for a token.
---@param account string
---@return table
function OAuth:token_answer(account)
  return { access_token = self:issue(account), expires_in = M.LIFETIME, token_type = "Bearer" }
end

--- An identity token. It is signed by nobody: the simulated services do not check them.
---@param account string
---@param audience string?
---@return string
function OAuth:identity(account, audience)
  local now = math.floor(self.clock:now())
  local claims = {
    aud = audience or "",
    email = account,
    iat = now,
    exp = now + 3600,
    iss = "https://accounts.google.com",
  }
  return table.concat({
    crypto.base64url(json.encode({ alg = "none", typ = "JWT" })),
    crypto.base64url(json.encode(claims)),
    "",
  }, ".")
end

--- Make a service account with a key, and the file that Google's libraries read.
---@async
---@param email string
---@param project string
---@param token_uri string
---@return table file of type service_account
function OAuth:make_service_account(email, project, token_uri)
  local pair = crypto.rsa_generate(2048)
  local key_id = crypto.hex(crypto.random(20))
  self.service_accounts[email] = { key_id = key_id, public_key = pair.public_key }
  return {
    type = "service_account",
    project_id = project,
    private_key_id = key_id,
    private_key = pair.private_key,
    client_email = email,
    client_id = "100000000000000000000",
    token_uri = token_uri,
    universe_domain = "googleapis.com",
  }
end

--- Make a user's credentials, as `gcloud auth application-default login` would write them.
---@param email string
---@return table file of type authorized_user
function OAuth:make_user(email)
  local file = {
    type = "authorized_user",
    client_id = "simulated.apps.googleusercontent.com",
    client_secret = crypto.base64url(crypto.random(18)),
    refresh_token = "1//sim-" .. crypto.base64url(crypto.random(32)),
    universe_domain = "googleapis.com",
  }
  self.users[file.refresh_token] =
    { email = email, client_id = file.client_id, client_secret = file.client_secret }
  return file
end

-- The parts of a JWT that one of our service accounts has signed, or nil and what is wrong with it.
local function read_jwt(self, text)
  local header, claims, signature = text:match("^([%w_-]+)%.([%w_-]+)%.([%w_-]+)$")
  if not header then
    return nil, "not a JWT"
  end
  local ok, fields = pcall(function()
    return {
      header = json.decode(crypto.unbase64url(header)),
      claims = json.decode(crypto.unbase64url(claims)),
      signature = crypto.unbase64url(signature),
    }
  end)
  if not ok or type(fields.header) ~= "table" or type(fields.claims) ~= "table" then
    return nil, "Invalid JWT: not JSON"
  end
  local account = self.service_accounts[fields.claims.iss]
  if not account then
    return nil, "Invalid grant: account not found"
  elseif fields.header.alg ~= "RS256" or fields.header.kid and fields.header.kid ~= account.key_id then
    return nil, "Invalid JWT Signature."
  elseif not crypto.rs256_verify(account.public_key, header .. "." .. claims, fields.signature) then
    return nil, "Invalid JWT Signature."
  end
  local now = self.clock:now()
  local issued, expires = tonumber(fields.claims.iat), tonumber(fields.claims.exp)
  if not issued or not expires or expires <= now or issued > now + 300 or expires - issued > 3660 then
    return nil,
      "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
        .. "Check your iat and exp values in the JWT claim."
  end
  return fields.claims
end

--- Check that a call brings credentials that are good now.
---@param request table `headers`, `query`
---@return string account
--- Raises ciranda.sim.Status UNAUTHENTICATED.
function OAuth:check(request)
  local header = request.headers["authorization"] or request.headers["Authorization"]
  local token = header and header:match("^[Bb]earer%s+(%S+)$") or (request.query or {}).access_token
  if not token then
    if self.open then
      return "anonymous"
    end
    errors.raise(errors.unauthenticated(true))
  end
  local known = self.tokens[token]
  if known and known.expires > self.clock:now() then
    return known.account
  elseif token:find(".", 1, true) and not known then
    -- A JWT that a service account has signed for itself needs no exchange.
    local claims = read_jwt(self, token)
    if claims and (claims.scope or claims.aud) then
      return claims.iss
    end
  end
  return errors.raise(errors.unauthenticated(false))
end

local function answer(status, fields)
  return {
    status = status,
    headers = {
      ["Content-Type"] = "application/json; charset=utf-8",
      ["Cache-Control"] = "no-cache, no-store",
    },
    body = json.encode(fields) .. "\n",
  }
end

local function refusal(code, description)
  return answer(code == "invalid_client" and 401 or 400, { error = code, error_description = description })
end

local function granted(self, account, extra)
  local fields = { access_token = self:issue(account), expires_in = M.LIFETIME, token_type = "Bearer" }
  for key, value in pairs(extra or {}) do
    fields[key] = value
  end
  return answer(200, fields)
end

-- The client that asks, in the form or by HTTP Basic (RFC 6749, section 2.3.1).
local function identify(request, form)
  local encoded = (request.headers["Authorization"] or ""):match("^[Bb]asic%s+(%S+)$")
  local ok, text = pcall(crypto.unbase64, encoded or "")
  local id, secret = (ok and text or ""):match("^([^:]*):(.*)$")
  if id then
    form.client_id, form.client_secret = id, secret
  end
end

local grants = {}

function grants.refresh_token(self, form)
  local user = self.users[form.refresh_token or ""]
  if not user then
    return refusal("invalid_grant", "Token has been expired or revoked.")
  elseif user.client_id ~= form.client_id or user.client_secret ~= form.client_secret then
    return refusal("invalid_client", "The OAuth client was not found.")
  end
  return granted(self, user.email, { scope = form.scope or SCOPE })
end

grants["urn:ietf:params:oauth:grant-type:jwt-bearer"] = function(self, form)
  local claims, problem = read_jwt(self, form.assertion or "")
  if not claims then
    return refusal("invalid_grant", problem)
  elseif type(claims.scope) ~= "string" or claims.scope == "" then
    return refusal("invalid_scope", "Invalid OAuth scope or ID token audience provided.")
  end
  return granted(self, claims.sub or claims.iss)
end

grants["urn:ietf:params:oauth:grant-type:token-exchange"] = function(self, form)
  for _, name in ipairs({ "subject_token", "subject_token_type", "requested_token_type" }) do
    if not form[name] or form[name] == "" then
      return refusal("invalid_request", "Missing required parameter: " .. name)
    end
  end
  if not (form.audience or ""):match("^//iam%.googleapis%.com/.+/providers/[^/]+$") then
    return refusal("invalid_target", 'The target service indicated by the "audience" parameters is invalid.')
  end
  return granted(self, "principal:" .. form.audience, {
    issued_token_type = "urn:ietf:params:oauth:token-type:access_token",
  })
end

local TOKEN_PATHS = {
  ["/token"] = "oauth.token",
  ["/v1/token"] = "sts.token",
  ["/v1/oauth/token"] = "sts.oauthtoken",
}

local IMPERSONATION = "^/v1/projects/%-/serviceAccounts/([^/:]+):generateAccessToken$"

--- The method that a path of these endpoints stands for.
---@param path string
---@return string? nil when the path is none of theirs
function M.method_of(path)
  if path:find(IMPERSONATION) then
    return "iamcredentials.generateAccessToken"
  end
  return TOKEN_PATHS[path]
end

-- How the token endpoints name what passes; anything else is "server_error".
local PASSING = { UNAVAILABLE = "temporarily_unavailable", INTERNAL = "internal_failure" }

--- A refusal as the token endpoints write it.
---@param err ciranda.sim.Status
---@return table answer
function M.refusal(err)
  return answer(err.http, { error = PASSING[err.status] or "server_error", error_description = err.message })
end

local function generate_access_token(self, request)
  self:check(request)
  local ok, body = pcall(json.decode, request.body)
  local lifetime = ok and type(body) == "table" and clock.parse_duration(body.lifetime or "3600s")
  if not lifetime or lifetime <= 0 or lifetime > 43200 or type(body.scope) ~= "table" then
    errors.raise(errors.invalid("Invalid lifetime or scope", "lifetime"))
  end
  local email = request.path:match(IMPERSONATION):gsub("%%40", "@")
  return answer(200, {
    accessToken = self:issue(email, lifetime),
    expireTime = os.date("!%Y-%m-%dT%H:%M:%SZ", math.floor(self.clock:now() + lifetime)),
  })
end

--- Answer the token endpoints.
---@param request ciranda.server.Request
---@return table? answer nil when the path is none of theirs
--- Raises ciranda.sim.Status when an impersonation is refused.
function OAuth:handle(request)
  if not TOKEN_PATHS[request.path] then
    return M.method_of(request.path) and generate_access_token(self, request)
  elseif request.method ~= "POST" then
    return refusal("invalid_request", "The request method must be POST")
  end
  local form = request:form()
  identify(request, form)
  local grant = grants[form.grant_type or ""]
  if not grant then
    return refusal("unsupported_grant_type", "Invalid grant_type: " .. tostring(form.grant_type))
  end
  return grant(self, form)
end

return M
