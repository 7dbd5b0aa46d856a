--- The metadata server of a machine in Google's cloud.
---
--- The variables of Google's libraries point it elsewhere: GCE_METADATA_HOST (host or host:port; the older
--- GCE_METADATA_ROOT), GCE_METADATA_IP for the first contact, GCE_METADATA_TIMEOUT (seconds), NO_GCE_CHECK.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local task = require("ciranda.task")

local M = {}

local FLAVOR = { ["Metadata-Flavor"] = "Google" }

--- Where Linux tells who made the machine.
local PRODUCT_FILE = "/sys/class/dmi/id/product_name"

---@class ciranda.gcp.Metadata
---@field host string
---@field timeout number
---@field private env fun(name: string): string?
local Metadata = {}
Metadata.__index = Metadata

local function set(env, name)
  local value = env(name)
  return value ~= "" and value or nil
end

--- The metadata server that the environment names. Nothing is asked of it yet.
---@param options { env: (fun(name: string): string?)? }?
---@return ciranda.gcp.Metadata
function M.new(options)
  local env = options and options.env or os.getenv
  return setmetatable({
    env = env,
    host = set(env, "GCE_METADATA_HOST") or set(env, "GCE_METADATA_ROOT") or "metadata.google.internal",
    timeout = tonumber(set(env, "GCE_METADATA_TIMEOUT")) or 3,
  }, Metadata)
end

--- Whether there is one: the environment names it, the machine says that Google made it, or it answers as one.
---@async
---@return boolean
function Metadata:present()
  if set(self.env, "GCE_METADATA_HOST") or set(self.env, "GCE_METADATA_ROOT") then
    return true
  end
  if set(self.env, "NO_GCE_CHECK") == "true" then
    return false
  end
  local ok, product = pcall(fs.read, PRODUCT_FILE)
  if ok and product:find("^Google") then
    return true
  end
  local address = set(self.env, "GCE_METADATA_IP") or "169.254.169.254"
  for _ = 1, tonumber(set(self.env, "GCE_METADATA_DETECT_RETRIES")) or 1 do
    local reached, response = pcall(http.get, ("http://%s/"):format(address), {
      headers = FLAVOR,
      timeout = self.timeout,
    })
    if reached then
      return response.status == 200 and response.headers["metadata-flavor"] == "Google"
    elseif errors.is(response, "cancelled") then
      error(response, 0)
    end
  end
  return false
end

--- What the server says under a path, as text; nil when there is no such path.
---@async
---@param path string below /computeMetadata/v1/, such as "instance/attributes/tpu-env"
---@param options { query: table?, timeout: number? }?
---@return string? value
---@return string? etag
--- Raises `unavailable` and what a request raises.
function Metadata:get(path, options)
  options = options or {}
  local address = ("http://%s/computeMetadata/v1/%s"):format(self.host, path)
  for attempt = 1, 3 do
    local response = http.get(address, {
      headers = FLAVOR,
      query = options.query,
      timeout = options.timeout or self.timeout,
    })
    if response.status == 200 then
      return response.body, response.headers.etag
    elseif response.status == 404 then
      return nil
    elseif response.status < 500 or attempt == 3 then
      errors.raise {
        code = response.status < 500 and "failed" or "unavailable",
        op = "metadata.get",
        target = path,
        message = ("the metadata server at %s answered %d for %s"):format(self.host, response.status, path),
      }
    end
    task.sleep(attempt * 0.5)
  end
end

--- The same, as decoded JSON.
---@async
---@param path string
---@param options { query: table?, timeout: number? }?
---@return any? value
---@return string? etag
function Metadata:json(path, options)
  options = options or {}
  local query = { alt = "json" }
  for name, value in pairs(options.query or {}) do
    query[name] = value
  end
  local text, etag = self:get(path, { query = query, timeout = options.timeout })
  return text and json.decode(text, "metadata " .. path), etag
end

--- Wait until what is under a path changes.
---@async
---@param path string
---@param etag string? of the value that is known; without one, the next change
---@param timeout number? seconds until the value is given although it is the same; 60 by default
---@return string? value
---@return string? etag
function Metadata:wait_for_change(path, etag, timeout)
  timeout = timeout or 60
  return self:get(path, {
    query = { wait_for_change = true, last_etag = etag, timeout_sec = math.ceil(timeout) },
    timeout = timeout + self.timeout,
  })
end

--- An access token of the machine's service account.
---@async
---@param scopes string[]?
---@return { access_token: string, expires_in: integer, token_type: string }
--- Raises `auth` when the machine has no service account.
function Metadata:token(scopes)
  local path = "instance/service-accounts/default/token"
  local text = self:get(path, { query = scopes and { scopes = table.concat(scopes, ",") } })
  if not text then
    errors.raise {
      code = "auth",
      op = "metadata.token",
      message = ("the machine has no service account: the metadata server at %s has no %s"):format(
        self.host,
        path
      ),
    }
  end
  return json.decode(text, "the metadata server's token")
end

--- The project that the machine belongs to.
---@async
---@return string?
function Metadata:project()
  return (self:get("project/project-id"))
end

return M
