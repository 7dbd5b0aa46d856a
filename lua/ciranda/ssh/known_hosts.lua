--- Which host keys a person has seen before: OpenSSH's known_hosts files.
---
--- Understood: plain and hashed names, `[host]:port`, lists, `*` and `?`, negation, `@revoked` (refused whatever else
--- the files and the caller say) and `@cert-authority` (host certificates are not supported, which is said when
--- nothing else vouches for the host). Nothing here asks or decides: `ciranda.ssh.hostkey` does.

local account = require("ciranda.io.account")
local crypto = require("ciranda.io.crypto")
local file_cache = require("ciranda.ssh.file_cache")
local fs = require("ciranda.io.fs")

local M = {}

-- A file larger than this is no known_hosts file; it would only exhaust memory.
local MAX_FILE = 64 * 1024 * 1024

---@class ciranda.ssh.KnownHost  one line of a file
---@field marker "revoked"|"cert-authority"|nil
---@field names table<string, true>?  the names without wildcards, lower case; not of a hashed one
---@field globs string[]?      its patterns, lower case, negated ones with their "!"
---@field salt string?        of a hashed name
---@field hash string?        of a hashed name
---@field type string         "ssh-ed25519" and the like
---@field blob string         the public key in bytes
---@field where string        "path:line"

-- Lua patterns by shell pattern: every worker of a fleet is compared with the same few.
local lua_patterns = {}

--- The Lua pattern of a shell pattern with `*` and `?`.
local function to_lua_pattern(glob)
  local pattern = lua_patterns[glob]
  if not pattern then
    pattern = glob:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0"):gsub("%*", ".*"):gsub("%?", ".")
    pattern = "^" .. pattern .. "$"
    lua_patterns[glob] = pattern
  end
  return pattern
end

--- Whether a name matches a comma-separated list of shell patterns, of which one with "!" forbids it.
---@param patterns string[] lower case
---@param name string lower case
---@return boolean
function M.matches(patterns, name)
  local found = false
  for _, pattern in ipairs(patterns) do
    local negated = pattern:sub(1, 1) == "!"
    if name:find(to_lua_pattern(negated and pattern:sub(2) or pattern)) then
      if negated then
        return false
      end
      found = true
    end
  end
  return found
end

--- The key in a line's last fields, or nil when they hold none that can be read.
local function parse_key(key_type, text)
  local ok, blob = pcall(crypto.unbase64, text)
  if not ok or #blob < 4 then
    return nil
  end
  local length = (">I4"):unpack(blob)
  if length ~= #key_type or blob:sub(5, 4 + length) ~= key_type then
    return nil
  end
  return blob
end

--- Read the text of a file. Lines that cannot be understood are left out, as OpenSSH does.
---@param text string
---@param path string for messages
---@return ciranda.ssh.KnownHost[]
function M.parse(text, path)
  local entries = {}
  local number = 0
  for line in text:gmatch("([^\n]*)\n?") do
    number = number + 1
    local marker, rest = line:match("^%s*@(%S+)%s+(.*)$")
    local names, key_type, key = (rest or line):match("^%s*([^%s#]%S*)%s+(%S+)%s+(%S+)")
    local blob = key and parse_key(key_type, key)
    if blob and (marker == nil or marker == "revoked" or marker == "cert-authority") then
      local entry = { marker = marker, type = key_type, blob = blob, where = ("%s:%d"):format(path, number) }
      local salt, hash = names:match("^|1|([^|]+)|([^|]+)$")
      if salt then
        local good_salt, salt_bytes = pcall(crypto.unbase64, salt)
        local good_hash, hash_bytes = pcall(crypto.unbase64, hash)
        entry.salt = good_salt and salt_bytes or nil
        entry.hash = good_hash and hash_bytes or nil
      else
        entry.names, entry.globs = {}, {}
        for pattern in names:lower():gmatch("[^,]+") do
          if pattern:find("[*?!]") then
            table.insert(entry.globs, pattern)
          else
            entry.names[pattern] = true
          end
        end
      end
      if entry.names or (entry.salt and entry.hash) then
        entries[#entries + 1] = entry
      end
    end
  end
  return entries
end

---@param entry ciranda.ssh.KnownHost
---@param name string lower case, in the form the files use
local function names(entry, name)
  if not entry.names then
    return crypto.hmac("sha1", entry.salt, name) == entry.hash
  end
  if #entry.globs == 0 then
    return entry.names[name] == true
  end
  local forbidden = false
  for _, glob in ipairs(entry.globs) do
    forbidden = forbidden or (glob:sub(1, 1) == "!" and M.matches({ glob:sub(2) }, name))
  end
  return not forbidden and (entry.names[name] == true or M.matches(entry.globs, name))
end

--- How the files write a host: its name alone for port 22, else "[name]:port".
---@param host string
---@param port integer
---@return string
function M.name(host, port)
  host = host:lower()
  return port == 22 and host or ("[%s]:%d"):format(host, port)
end

---@class ciranda.ssh.Known
---@field keys ciranda.ssh.KnownHost[]         plain keys of the host
---@field fallback ciranda.ssh.KnownHost[]     keys of the same name at port 22: they vouch, and never contradict
---@field revoked ciranda.ssh.KnownHost[]
---@field authorities ciranda.ssh.KnownHost[]

-- What `lookup` knows of lists of entries: places by name, and those of entries with wildcards or a hash, which every
-- name is compared with. A fleet of a thousand workers is looked up in as many lines.
local indexes = setmetatable({}, { __mode = "k" })

local function index_of(entries)
  local index = indexes[entries]
  if not index then
    index = { named = {}, others = {} }
    for place, entry in ipairs(entries) do
      if entry.names and #entry.globs == 0 then
        for name in pairs(entry.names) do
          index.named[name] = index.named[name] or {}
          table.insert(index.named[name], place)
        end
      else
        table.insert(index.others, place)
      end
    end
    indexes[entries] = index
  end
  return index
end

-- What is known where there are no entries.
local NOTHING = { keys = {}, fallback = {}, revoked = {}, authorities = {} }

--- What the entries say of a host. Neither they nor the answer is to be written to.
---@param entries ciranda.ssh.KnownHost[]
---@param host string a name or an address
---@param port integer
---@return ciranda.ssh.Known
function M.lookup(entries, host, port)
  if #entries == 0 then
    return NOTHING
  end
  local known = { keys = {}, fallback = {}, revoked = {}, authorities = {} }
  local name = M.name(host, port)
  local bare = host:lower()
  local index = index_of(entries)
  local places = table.move(index.others, 1, #index.others, 1, {})
  for _, list in ipairs({ index.named[name] or {}, name ~= bare and index.named[bare] or {} }) do
    table.move(list, 1, #list, #places + 1, places)
  end
  table.sort(places)
  for position, place in ipairs(places) do
    local entry = entries[place]
    local direct = names(entry, name)
    if place ~= places[position - 1] and (direct or (name ~= bare and names(entry, bare))) then
      if entry.marker == "revoked" then
        table.insert(known.revoked, entry)
      elseif entry.marker == "cert-authority" then
        table.insert(known.authorities, entry)
      else
        table.insert(direct and known.keys or known.fallback, entry)
      end
    end
  end
  return known
end

local files = file_cache.of_files(M.parse, MAX_FILE)
local NO_ENTRIES = {}

-- The entries of several files in one list, by the files' names: the same list while the files stay as they are.
local joined = {}

--- The entries of the files, in order; a file that does not exist has none.
---@async
---@param paths string[]
---@return ciranda.ssh.KnownHost[] entries not to be written to
--- Raises `permission` or `io` when a file is there and cannot be read.
function M.load(paths)
  local name = table.concat(paths, "\0")
  local whole = joined[name] or { parts = {} }
  for place, path in ipairs(paths) do
    local entries = files:get(path) or NO_ENTRIES
    if whole.parts[place] ~= entries then
      whole.parts[place] = entries
      whole.all = nil
    end
  end
  if not whole.all then
    whole.all = {}
    for _, entries in ipairs(whole.parts) do
      table.move(entries, 1, #entries, #whole.all + 1, whole.all)
    end
    joined[name] = whole
  end
  return whole.all
end

--- Add a key for a host at the end of a file, which is made (mode 600, its directory 700) when it is not there.
---@async
---@param path string
---@param host string
---@param port integer
---@param key_type string
---@param blob string
function M.add(path, host, port, key_type, blob)
  local directory = fs.dirname(path)
  if not fs.exists(directory) then
    fs.mkdir_p(directory, tonumber("700", 8))
  end
  -- A last line without its end would swallow the first of ours.
  local text = fs.exists(path) and fs.read(path, MAX_FILE) or ""
  local lead = text ~= "" and text:sub(-1) ~= "\n" and "\n" or ""
  local line = ("%s%s %s %s\n"):format(lead, M.name(host, port), key_type, crypto.base64(blob))
  fs.append(path, line, tonumber("600", 8))
  files:forget(path)
end

--- The files that OpenSSH reads when nothing else is said.
---@return string[]
function M.default_files()
  local home = account.home()
  return {
    home .. "/.ssh/known_hosts",
    home .. "/.ssh/known_hosts2",
    "/etc/ssh/ssh_known_hosts",
    "/etc/ssh/ssh_known_hosts2",
  }
end

return M
