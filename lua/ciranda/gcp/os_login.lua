--- OS Login: ssh keys that belong to an account of Google's and not to a machine's metadata.
---
---     local user = require("ciranda.gcp.os_login").import(tpu, "ssh-ed25519 AAAA... me")
---
--- Where the metadata of a node, or else of the project, has `enable-oslogin` as TRUE, keys in metadata do not count:
--- the key is imported into the account's profile, which also names the user to log in as.

local errors = require("ciranda.io.error")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local log = require("ciranda.io.log")
local metadata = require("ciranda.gcp.metadata")
local url = require("ciranda.io.url")

local M = {}

M.ENDPOINT = "https://oslogin.googleapis.com/"
M.COMPUTE_ENDPOINT = "https://compute.googleapis.com/compute/v1/"

---@class ciranda.gcp.OsLoginOptions
---@field config ciranda.gcp.Config?
---@field account string? whose profile; that of the credentials, else gcloud's active one

--- What a table of metadata says about OS Login; nil when it says nothing.
---@param values table<string, string>?
---@return boolean?
function M.said(values)
  local value = values and values["enable-oslogin"]
  if type(value) ~= "string" or value == "" then
    return nil
  end
  return value:lower() == "true"
end

--- Whether OS Login is on for machines: their own metadata decides, else the project's.
---@async
---@param tpu ciranda.gcp.Tpu
---@param values table<string, string>? the node's metadata
---@param options ciranda.gcp.OsLoginOptions?
---@return boolean
function M.enabled(tpu, values, options)
  local said = M.said(values)
  if said ~= nil then
    return said
  end
  local config = options and options.config or gcloud_config.load()
  local ok, project = pcall(tpu.client.json, tpu.client, {
    url = ("%sprojects/%s"):format(config:endpoint("compute", M.COMPUTE_ENDPOINT), url.escape(tpu.project)),
    query = { fields = "commonInstanceMetadata/items" },
  })
  if not ok then
    if not errors.is(project, "permission", "not_found") then
      error(project, 0)
    end
    log.info(
      ("the project's metadata cannot be read, which may turn OS Login on: %s"):format(errors.text(project))
    )
    return false
  end
  local common = type(project.commonInstanceMetadata) == "table" and project.commonInstanceMetadata.items
  for _, item in ipairs(type(common) == "table" and common or {}) do
    if type(item) == "table" and item.key == "enable-oslogin" then
      return M.said({ ["enable-oslogin"] = item.value }) or false
    end
  end
  return false
end

--- Whose profile it is.
---@async
---@param tpu ciranda.gcp.Tpu
---@param config ciranda.gcp.Config
---@return string email
local function account_of(tpu, config)
  local credentials = tpu.client.credentials
  local account = credentials.account ~= "" and credentials.account or nil
  if not account and credentials.kind == "metadata" then
    account = metadata.new({ env = config.env }):get("instance/service-accounts/default/email")
  end
  account = account or config:account()
  if not account then
    errors.raise {
      code = "usage",
      op = "os_login",
      message = "OS Login is on, and whose profile the key belongs to is not known; type: "
        .. "gcloud config set account YOU@EXAMPLE.COM",
    }
  end
  return account
end

--- Import a public key into the account's profile. An imported key may be imported again.
---@async
---@param tpu ciranda.gcp.Tpu its project and client
---@param public string "ssh-ed25519 AAAA... comment"
---@param options ciranda.gcp.OsLoginOptions?
---@return string user whom to log in as: the primary POSIX account's name
---@return string account
--- Raises `usage` when the account is not known, `permission`, `protocol`, and what a request raises.
function M.import(tpu, public, options)
  local config = options and options.config or gcloud_config.load()
  local account = options and options.account or account_of(tpu, config)
  local ok, answer = pcall(tpu.client.json, tpu.client, {
    method = "POST",
    url = ("%sv1/users/%s:importSshPublicKey"):format(
      config:endpoint("oslogin", M.ENDPOINT),
      url.escape(account)
    ),
    query = { projectId = tpu.project },
    json = { key = public },
    idempotent = true,
  })
  if not ok then
    if errors.is(answer, "permission") then
      answer.message = answer.message
        .. "; OS Login needs the role compute.osLogin or compute.osAdminLogin, and iam.serviceAccountUser"
    end
    error(answer, 0)
  end
  local profile = type(answer.loginProfile) == "table" and answer.loginProfile or {}
  local first
  for _, posix in ipairs(type(profile.posixAccounts) == "table" and profile.posixAccounts or {}) do
    if type(posix) == "table" and type(posix.username) == "string" and posix.username ~= "" then
      if posix.primary == true then
        return posix.username, account
      end
      first = first or posix.username
    end
  end
  if not first then
    errors.raise {
      code = "protocol",
      op = "os_login",
      target = account,
      message = ("the OS Login profile of %s names no user"):format(account),
    }
  end
  return first, account
end

return M
