--- Who may log in to a worker: the users that the ssh-keys of its metadata name, each with a home and its keys.
--
-- `USER:ssh-ed25519 AAAA... comment`, one key a line; with `google-ssh {"userName":...,"expireOn":...}` behind the key
-- it is good until then. The project's own keys count too unless the node says block-project-ssh-keys.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local uv = require("luv")

local M = {}

-- The first id of the simulated workers' users when root runs the simulator; each worker has a range of its own.
M.FIRST_UID = 20000
M.USERS_PER_WORKER = 16

--- The id of a worker's first user, when root runs the simulator.
---@param ordinal integer number of the worker
---@return integer
function M.first_uid(ordinal)
  return M.FIRST_UID + ordinal * M.USERS_PER_WORKER
end

local function expired(rest, now)
  local object = rest:match("google%-ssh%s+({.*})%s*$")
  if not object then
    return false
  end
  local ok, fields = pcall(json.decode, object)
  local text = ok and type(fields) == "table" and fields.expireOn
  if type(text) ~= "string" then
    return false
  end
  local time = clock.parse_timestamp((text:gsub("([+-]%d%d)(%d%d)$", "%1:%2")))
  return time ~= nil and time <= now
end

--- The users and their keys, in the order in which they are first named.
---@param metadata table<string, string>? the node's
---@param project_keys string? the project's ssh-keys
---@param now number
---@return { name: string, keys: string[] }[]
function M.parse(metadata, project_keys, now)
  metadata = metadata or {}
  local texts = { metadata["ssh-keys"] or "", metadata["sshKeys"] or "" }
  if (metadata["block-project-ssh-keys"] or ""):lower() ~= "true" then
    texts[#texts + 1] = project_keys or ""
  end
  local users, by_name = {}, {}
  for line in (table.concat(texts, "\n") .. "\n"):gmatch("([^\n]*)\n") do
    local name, key = line:match("^%s*([%w_][%w._-]*):%s*(%S+%s+%S+.-)%s*$")
    if name and #name <= 32 and not expired(key, now) then
      local user = by_name[name]
      if not user then
        user = { name = name, keys = {} }
        by_name[name] = user
        users[#users + 1] = user
      end
      user.keys[#user.keys + 1] = key
    end
  end
  return users
end

-- The lines of a system file that do not name one of these users.
local function others(path, named)
  local ok, text = pcall(fs.read, path)
  local kept = {}
  for line in (ok and text or ""):gmatch("[^\n]+") do
    if not named[line:match("^[^:]*")] then
      kept[#kept + 1] = line .. "\n"
    end
  end
  return table.concat(kept)
end

-- sshd gives a terminal to the group tty where there is one, which only root may do unless it is that group's already.
-- It is where /dev/pts was mounted so; elsewhere an ordinary user's worker goes without the group.
local function terminals_are_tty(place)
  if place.own_terminals then
    return false
  end
  local ok, mounts = pcall(fs.read, "/proc/self/mounts")
  return ok and mounts:find("/dev/pts devpts [^\n]*gid=%d") ~= nil
end

-- The file is bound into a running worker: it is written in place, since a new file in its place would not be seen. All
-- of it by one call, and cut afterwards: an sshd that starts and finds it empty ends at once.
local function rewrite(path, text, mode)
  local fd = assert(uv.fs_open(path, uv.constants.O_RDWR | uv.constants.O_CREAT, mode or 420))
  assert(uv.fs_write(fd, text, 0))
  assert(uv.fs_ftruncate(fd, #text))
  uv.fs_close(fd)
end

---@class ciranda.sim.AccountPlace
---@field etc string directory for passwd, group and keys/
---@field home string directory of the homes, as the simulator sees it
---@field home_inside string the same as the worker sees it
---@field ordinal integer number of the worker, for its range of ids
---@field own_terminals boolean the worker has a /dev/pts of its own

--- Bring a worker's accounts into step.
---@async
---@param place ciranda.sim.AccountPlace
---@param users { name: string, keys: string[] }[]
function M.write(place, users)
  local root = uv.getuid() == 0
  local passwd, group, shadow, named = {}, {}, {}, {}
  for i, user in ipairs(users) do
    local uid, gid = uv.getuid(), uv.getgid()
    if root and user.name ~= "root" then
      uid = M.first_uid(place.ordinal) + (i - 1) % M.USERS_PER_WORKER
      gid = uid
    end
    named[user.name] = true
    local home = place.home .. "/" .. user.name
    passwd[i] = ("%s:x:%d:%d::%s/%s:/bin/bash\n"):format(user.name, uid, gid, place.home_inside, user.name)
    group[i] = ("%s:x:%d:\n"):format(user.name, gid)
    -- No password, which is not the same as locked: sshd refuses who is not here and has "!" elsewhere.
    shadow[i] = ("%s:*:1:0:99999:7:::\n"):format(user.name)
    if not fs.exists(home) then
      fs.mkdir_p(home, 448)
      if root then
        local ok, err = uv.fs_chown(home, uid, gid)
        if not ok then
          errors.raise({ code = "io", op = "sim.accounts", target = home, message = tostring(err) })
        end
      end
    end
    fs.write(
      place.etc .. "/keys/" .. user.name,
      table.concat(user.keys, "\n") .. "\n",
      { mode = 420, sync = false }
    )
  end
  for _, entry in ipairs(fs.list(place.etc .. "/keys")) do
    if not named[entry.name] then
      fs.remove(place.etc .. "/keys/" .. entry.name)
    end
  end
  rewrite(place.etc .. "/shadow", table.concat(shadow), 384)
  rewrite(place.etc .. "/passwd", table.concat(passwd) .. others("/etc/passwd", named))
  named.tty = not root and not terminals_are_tty(place) or nil
  rewrite(place.etc .. "/group", table.concat(group) .. others("/etc/group", named))
end

return M
