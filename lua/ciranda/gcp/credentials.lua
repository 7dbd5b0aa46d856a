--- Who we are towards Google's APIs, found as Google's own libraries find it, with none of them.
---
---     local credentials = credentials.find()
---     http.get(address, { headers = credentials:headers() })
---
--- In this order: an access token given outright (auth/access_token, auth/access_token_file); the file named by
--- auth/credential_file_override or GOOGLE_APPLICATION_CREDENTIALS; gcloud's application default credentials; the
--- active account of `gcloud auth login`; the metadata server; `gcloud auth print-access-token`. A property of gcloud
--- is also a variable, such as CLOUDSDK_AUTH_ACCESS_TOKEN_FILE. auth/impersonate_service_account applies to any.
---
--- A token is refreshed before it expires, once for however many tasks wait for it.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local json = require("ciranda.io.json")
local kinds = require("ciranda.gcp.credential_kinds")
local log = require("ciranda.io.log")
local metadata = require("ciranda.gcp.metadata")
local process = require("ciranda.io.process")
local task = require("ciranda.task")

local M = {}

--- A token is refreshed when it has less than this left (google-auth: 3 min 45 s).
M.REFRESH_BEFORE = 225

---@class ciranda.gcp.Credentials
---@field kind string           "authorized_user", "service_account", "metadata", "access_token", "none", ...
---@field where string          where they were found, for people
---@field account string?
---@field project string?       the project that they belong to
---@field quota_project string?
---@field private source ciranda.gcp.TokenSource
---@field private now fun(): number
local Credentials = {}
Credentials.__index = Credentials
Credentials.__name = "ciranda.gcp.Credentials"

function Credentials:__tostring()
  return ("%s credentials of %s (%s)"):format(self.kind, self.account or "an unnamed account", self.where)
end

--- Fetch a token for all who wait.
local function fetch(self)
  local refresh = { done = task.event() }
  self.refresh_under_way = refresh
  local ok, token, expiry = pcall(self.source.fetch)
  self.refresh_under_way = nil
  if ok then
    self.access_token, self.expiry = token, expiry
  elseif not errors.is(token, "cancelled") then
    refresh.err = token
  end
  refresh.done:set()
  if not ok then
    error(token, 0)
  end
end

--- An access token that is good for some minutes yet.
---@async
---@return string? token nil for credentials of kind "none"
--- Raises `auth` and what a request raises.
function Credentials:token()
  if not self.source then
    return nil
  end
  while not self.access_token or self.now() >= self.expiry - M.REFRESH_BEFORE do
    local refresh = self.refresh_under_way
    if refresh then
      refresh.done:wait()
      if refresh.err then
        error(refresh.err, 0)
      end
      -- When the one who fetched was cancelled there is still no token: the next to come here fetches.
    else
      fetch(self)
      if self.now() >= self.expiry - M.REFRESH_BEFORE then
        break -- what was fetched is as old as a new one can be: the metadata server gives out its cached token
      end
    end
  end
  return self.access_token
end

--- Forget a token that an API has refused, so that the next use fetches another.
---@param token string? only when it is still this one
function Credentials:reject(token)
  if self.access_token == token or token == nil then
    self.access_token, self.expiry = nil, nil
  end
end

--- The headers that a request needs.
---@async
---@return table<string, string>
---@return string? token
function Credentials:headers()
  local token = self:token()
  if not token then
    return {}
  end
  return { Authorization = "Bearer " .. token, ["x-goog-user-project"] = self.quota_project }, token
end

---@param source ciranda.gcp.TokenSource
---@param where string
---@param now fun(): number
---@return ciranda.gcp.Credentials
local function new(source, where, now)
  return setmetatable({
    kind = source.kind,
    where = where,
    account = source.account,
    project = source.project,
    quota_project = source.quota_project,
    source = source,
    now = now,
  }, Credentials)
end

--- No credentials, for servers that want none, such as an emulator of Cloud Storage.
---@return ciranda.gcp.Credentials
function M.none()
  return setmetatable({ kind = "none", where = "nowhere", now = os.time }, Credentials)
end

--- A token that never changes: who gave it renews it.
local function fixed(read)
  return {
    kind = "access_token",
    fetch = function()
      local token = read()
      log.secret(token)
      return token, math.huge
    end,
  }
end

--- The word that an explicit token consists of.
local function token_word(text, where)
  local word = text:match("^%s*(%S+)%s*$")
  if not word then
    errors.raise { code = "auth", op = "credentials", message = where .. " holds no access token" }
  end
  return word
end

--- A decoded credential file.
local function read_file(path, where)
  local data = json.decode(fs.read(path, 1 << 20), where)
  return data
end

local find = {}

function find.explicit(context)
  local token, source = context.config:get("auth/access_token")
  if token then
    context.where = source
    return fixed(function()
      return token_word(token, source)
    end)
  end
  local path
  path, source = context.config:get("auth/access_token_file")
  if path then
    context.where = ("the token in %s (%s)"):format(path, source)
    return fixed(function()
      return token_word(fs.read(path, 1 << 16), path)
    end)
  end
end

function find.named_file(context)
  local path, source = context.config:get("auth/credential_file_override")
  if not path then
    path, source = context.config.env("GOOGLE_APPLICATION_CREDENTIALS"), "GOOGLE_APPLICATION_CREDENTIALS"
  end
  if not path or path == "" then
    return nil
  end
  context.where = ("the file %s (%s)"):format(path, source)
  if not fs.exists(path) then
    errors.raise {
      code = "auth",
      op = "credentials",
      target = path,
      message = ("%s names %s, which does not exist"):format(source, path),
    }
  end
  return kinds.of(read_file(path, context.where), context)
end

function find.application_default(context)
  local directory = context.config.directory
  local path = directory and fs.join(directory, "application_default_credentials.json")
  if not path or not fs.exists(path) then
    return nil
  end
  context.where = "the file " .. path
  return kinds.of(read_file(path, context.where), context)
end

function find.gcloud_account(context)
  local directory, account = context.config.directory, context.config:account()
  local path = directory and account and fs.join(directory, "legacy_credentials", account, "adc.json")
  if not path or not fs.exists(path) then
    return nil
  end
  context.where = ("gcloud's account %s (%s)"):format(account, path)
  local source = kinds.of(read_file(path, context.where), context)
  source.account = source.account or account
  return source
end

function find.metadata_server(context)
  local server = metadata.new { env = context.config.env }
  if not server:present() then
    return nil
  end
  context.where = "the metadata server " .. server.host
  local ok, project = pcall(server.project, server)
  if not ok and errors.is(project, "cancelled") then
    error(project, 0)
  end
  return {
    kind = "metadata",
    project = ok and project or nil,
    fetch = function()
      local answer = server:token()
      if type(answer) ~= "table" or type(answer.access_token) ~= "string" then
        errors.raise { code = "auth", op = "credentials", message = context.where .. " gives no access token" }
      end
      log.secret(answer.access_token)
      return answer.access_token, context.now() + (tonumber(answer.expires_in) or 0)
    end,
  }
end

function find.gcloud_program(context)
  local found = false
  for directory in (context.config.env("PATH") or ""):gmatch("[^:]+") do
    found = found or fs.exists(fs.join(directory, "gcloud")) ~= nil
  end
  if not found or not context.config:account() then
    return nil
  end
  context.where = "gcloud auth print-access-token"
  return {
    kind = "gcloud",
    account = context.config:account(),
    fetch = function()
      local result = process.run { "gcloud", "auth", "print-access-token", timeout = 60 }
      if result.code ~= 0 then
        errors.raise {
          code = "auth",
          op = "credentials",
          message = "gcloud auth print-access-token failed: " .. (result.stderr or ""):match("^%s*(.-)%s*$"),
        }
      end
      local token = token_word(result.stdout, context.where)
      log.secret(token)
      return token, context.now() + 3600
    end,
  }
end

local ORDER =
  { "explicit", "named_file", "application_default", "gcloud_account", "metadata_server", "gcloud_program" }

local OPTIONS = { config = true, now = true }

--- Find the credentials. No token is fetched yet.
---@async
---@param options { config: ciranda.gcp.Config?, now: (fun(): number)? }?
---@return ciranda.gcp.Credentials
--- Raises `auth` when there are none, or the ones that are named cannot be used; `unsupported` for their kind.
function M.find(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "credentials.find")
  local context =
    { config = options.config or gcloud_config.load(), now = options.now or os.time, where = "" }
  for _, name in ipairs(ORDER) do
    local source = find[name](context)
    if source then
      local where = context.where
      local account = context.config:get("auth/impersonate_service_account")
      if account then
        local base = context.config:endpoint("iamcredentials", "https://iamcredentials.googleapis.com/")
        local address = ("%sv1/projects/-/serviceAccounts/%s:generateAccessToken"):format(base, account)
        source = kinds.impersonate(source, address, nil, nil, context)
        where = ("%s, acting for %s"):format(where, account)
      end
      local quota_project = context.config.env("GOOGLE_CLOUD_QUOTA_PROJECT")
      if quota_project and quota_project ~= "" then
        source.quota_project = quota_project
      end
      return new(source, where, context.now)
    end
  end
  return errors.raise {
    code = "auth",
    op = "credentials",
    message = "there are no Google Cloud credentials here; type: gcloud auth application-default login "
      .. "(or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file)",
  }
end

return M
