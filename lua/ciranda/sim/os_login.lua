--- OS Login: the ssh keys of accounts, and the users that they are on workers.
--
-- Where the metadata of a node or of the project says `enable-oslogin`, the keys in metadata do not count and every
-- account that has imported a key may log in as the user that its profile names.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")
local rest_service = require("ciranda.sim.rest_service")

local M = {}

---@class ciranda.sim.LoginKey
---@field key string
---@field expires integer? microseconds since the epoch

---@class ciranda.sim.OsLogin
---@field private world table
---@field private profiles table<string, { email: string, uid: integer, keys: table<string, ciranda.sim.LoginKey> }>
local OsLogin = {}
OsLogin.__index = OsLogin

---@param world table
---@return ciranda.sim.OsLogin
function M.new(world)
  return setmetatable({ world = world, profiles = {}, last_uid = 700000000 }, OsLogin)
end

local function username(profile)
  if profile.email:find("%.gserviceaccount%.com$") then
    return ("sa_%d"):format(profile.uid)
  end
  return (profile.email:lower():gsub("[^%l%d]", "_"):sub(1, 32))
end

local function profile_of(self, email)
  local profile = self.profiles[email]
  if not profile then
    self.last_uid = self.last_uid + 1
    profile = { email = email, uid = self.last_uid, keys = {} }
    self.profiles[email] = profile
  end
  return profile
end

local function current(self, entry)
  return not entry.expires or entry.expires > self.world.clock:now() * 1e6
end

--- The users of a node by OS Login.
---@param metadata table<string, string>? the node's
---@return { name: string, keys: string[] }[]? nil when OS Login is not enabled there
function OsLogin:users(metadata)
  local enabled = (metadata or {})["enable-oslogin"] or self.world.project.metadata["enable-oslogin"]
  if (enabled or ""):lower() ~= "true" then
    return nil
  end
  local users = {}
  for _, profile in pairs(self.profiles) do
    local user = { name = username(profile), keys = {} }
    for _, entry in pairs(profile.keys) do
      if current(self, entry) then
        user.keys[#user.keys + 1] = entry.key
      end
    end
    table.sort(user.keys)
    if #user.keys > 0 then
      users[#users + 1] = user
    end
  end
  table.sort(users, function(a, b)
    return a.name < b.name
  end)
  return users
end

local function key_message(profile, fingerprint)
  local entry = profile.keys[fingerprint]
  return {
    name = ("users/%s/sshPublicKeys/%s"):format(profile.email, fingerprint),
    key = entry.key,
    fingerprint = fingerprint,
    expirationTimeUsec = entry.expires and ("%d"):format(entry.expires) or nil,
  }
end

local function profile_message(self, profile)
  local project, keys = self.world.project, {}
  for fingerprint, entry in pairs(profile.keys) do
    if current(self, entry) then
      keys[fingerprint] = key_message(profile, fingerprint)
    end
  end
  local user = username(profile)
  return {
    name = profile.email,
    posixAccounts = {
      {
        primary = true,
        name = ("users/%s/projects/%s"):format(profile.email, project.id),
        username = user,
        uid = tostring(profile.uid),
        gid = tostring(profile.uid),
        homeDirectory = "/home/" .. user,
        accountId = project.id,
        operatingSystemType = "LINUX",
      },
    },
    sshPublicKeys = next(keys) and json.object(keys) or nil,
  }
end

local function changed(world)
  for _, node in
    ipairs(world.nodes:list(function()
      return true
    end))
  do
    world.machines:reconfigure(node)
  end
end

-- What a body says of a key: `type base64 comment`.
local function read_key(body)
  local text = type(body.key) == "string" and body.key:match("^%s*(.-)%s*$") or ""
  local ok, blob = pcall(crypto.unbase64, text:match("^[%w@.-]+ +([%w+/]+=*)") or "!")
  if not ok or text:find("%c") then
    errors.raise(errors.invalid("Invalid SSH public key", "ssh_public_key.key"))
  end
  local expires = body.expirationTimeUsec ~= nil and math.tointeger(tonumber(body.expirationTimeUsec)) or nil
  if body.expirationTimeUsec ~= nil and not expires then
    errors.raise(errors.invalid("Invalid expiration_time_usec", "ssh_public_key.expiration_time_usec"))
  end
  return crypto.hex(crypto.digest("sha256", blob)), { key = text, expires = expires }
end

-- Everybody has a profile; it is for its owner alone.
local function own_profile(call, email)
  if email ~= call.account then
    errors.raise("PERMISSION_DENIED", ("The caller does not have permission on 'users/%s'"):format(email))
  end
  return profile_of(call.world.os_login, email)
end

local function own_key(call, email, fingerprint)
  local profile = own_profile(call, email)
  if not profile.keys[fingerprint] then
    errors.raise(errors.not_found(("users/%s/sshPublicKeys/%s"):format(email, fingerprint)))
  end
  return profile
end

local function check_project(call)
  local id, project = call.query.projectId, call.world.project
  if id and id ~= project.id and id ~= project.number then
    errors.raise(errors.permission("compute.projects.get", "projects/" .. id))
  end
end

local function import(call, email)
  check_project(call)
  local profile = own_profile(call, email)
  local fingerprint, entry = read_key(call.body)
  profile.keys[fingerprint] = entry
  changed(call.world)
  return { loginProfile = profile_message(call.world.os_login, profile) }
end

local function login_profile(call, email)
  check_project(call)
  return profile_message(call.world.os_login, own_profile(call, email))
end

local function create(call, email)
  local profile = own_profile(call, email)
  local fingerprint, entry = read_key(call.body)
  if profile.keys[fingerprint] then
    errors.raise(errors.already_exists(("users/%s/sshPublicKeys/%s"):format(email, fingerprint)))
  end
  profile.keys[fingerprint] = entry
  changed(call.world)
  return key_message(profile, fingerprint)
end

local function get(call, email, fingerprint)
  return key_message(own_key(call, email, fingerprint), fingerprint)
end

-- The key itself is what it is named by; only its expiry can be changed.
local function patch(call, email, fingerprint)
  local profile = own_key(call, email, fingerprint)
  local entry = profile.keys[fingerprint]
  entry.expires = math.tointeger(tonumber(call.body.expirationTimeUsec or ""))
  changed(call.world)
  return key_message(profile, fingerprint)
end

local function delete(call, email, fingerprint)
  own_key(call, email, fingerprint).keys[fingerprint] = nil
  changed(call.world)
  return json.object({})
end

--- The service.
---@param world table
---@return table service
function M.service(world)
  local user, id = "^/v1/users/([^/:]+)", "oslogin.users."
  local keys = user .. "/sshPublicKeys"
  local one = keys .. "/([^/:]+)$"
  return rest_service.new(world, {
    {
      verb = "POST",
      path = user .. ":importSshPublicKey$",
      id = id .. "importSshPublicKey",
      handle = import,
    },
    { verb = "GET", path = user .. "/loginProfile$", id = id .. "getLoginProfile", handle = login_profile },
    { verb = "POST", path = keys .. "$", id = id .. "sshPublicKeys.create", handle = create },
    { verb = "GET", path = one, id = id .. "sshPublicKeys.get", handle = get },
    { verb = "PATCH", path = one, id = id .. "sshPublicKeys.patch", handle = patch },
    { verb = "DELETE", path = one, id = id .. "sshPublicKeys.delete", handle = delete },
  })
end

return M
