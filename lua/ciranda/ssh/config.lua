--- ssh_config: what a person has written about a host for OpenSSH, read as OpenSSH reads it.
---
--- The first value found for a keyword counts; identity files and variables add up. `Host` and `Match` (all, host,
--- originalhost, user, localuser, final; `exec` only when asked for, since it runs a program, and else never matches),
--- patterns and negation, `Include` with wildcards, quotes, comments, the tokens of each keyword. Keywords that concern
--- other things (forwarding, multiplexing, terminals, algorithms) are left alone.

local account = require("ciranda.io.account")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local files = require("ciranda.ssh.config_file")
local fs = require("ciranda.io.fs")
local known_hosts = require("ciranda.ssh.known_hosts")
local log = require("ciranda.io.log")
local process = require("ciranda.io.process")
local uv = require("luv")
local values = require("ciranda.ssh.config_value")

local M = {}

-- OpenSSH's limits.
local MAX_DEPTH, MAX_FILES = 16, 100

-- Seconds that a program of `Match exec` may take.
local EXEC_SECONDS = 30

-- Keywords whose values add up, each a file, and their field.
local FILES = { identityfile = "identity_files", certificatefile = "certificate_files" }

-- Evaluation -------------------------------------------------------------------------------------------------------

--- Whether a name matches shell patterns given as separate words or lists, as match_pattern_list does. Case counts
--- for `Host`; names are compared as they were typed.
local function matches(patterns, name)
  local list = {}
  for _, word in ipairs(patterns) do
    for pattern in word:gmatch("[^,]+") do
      list[#list + 1] = pattern
    end
  end
  return known_hosts.matches(list, name)
end

local user_name

--- The one who runs this: looked up once, since it is asked for with every host.
local function local_user()
  user_name = user_name or account.login_name() or account.user()
  return user_name
end

--- Replace %-tokens. An unknown one is an error of the configuration.
local function expand_tokens(text, tokens, what)
  return (
    text:gsub("%%(.?)", function(letter)
      local value = letter == "%" and "%" or tokens[letter]
      if not value then
        errors.raise({
          code = "usage",
          op = "ssh.config",
          message = ("ssh_config: %s: %q holds the unknown token %%%s"):format(what, text, letter),
        })
      end
      return value
    end)
  )
end

-- What the tokens mean. Most hosts need none of them.
local TOKENS = {
  h = function(_, raw, host)
    return raw.hostname or host
  end,
  n = function(_, _, host)
    return host
  end,
  p = function(_, raw, _, options)
    return tostring(options.port or raw.port or 22)
  end,
  r = function(_, raw, _, options)
    return options.user or raw.user or local_user()
  end,
  k = function(_, raw, host)
    return raw.host_key_alias or host
  end,
  l = uv.os_gethostname,
  L = function(tokens)
    return tokens.l:match("^[^.]*")
  end,
  u = local_user,
  d = account.home,
  i = function()
    return tostring(uv.getuid())
  end,
  C = function(tokens, raw)
    local jump = raw.proxy_jump ~= "none" and raw.proxy_jump or ""
    return crypto.hex(crypto.digest("sha1", tokens.l .. tokens.h .. tokens.p .. tokens.r .. jump))
  end,
}

--- The tokens that paths and commands may hold.
---@param raw table what has been found so far
---@param host string as it was typed
---@param options { user: string?, port: integer? }
---@return table<string, string>
local function tokens_of(raw, host, options)
  return setmetatable({}, {
    __index = function(tokens, letter)
      local meaning = TOKENS[letter]
      return meaning and meaning(tokens, raw, host, options)
    end,
  })
end

local Reader = {}
Reader.__index = Reader

--- The host's name so far: HostName with %h, else what was typed.
function Reader:hostname()
  local name = self.found.hostname
  return name and (name:gsub("%%(.)", { h = self.original, ["%"] = "%" })) or self.original
end

--- Whether the program of a `Match exec` ends well.
function Reader:runs_well(line, command)
  local tokens =
    tokens_of(setmetatable({ hostname = self:hostname() }, { __index = self.found }), self.original, self)
  command = expand_tokens(command, tokens, "Match exec")
  local ok, result = pcall(process.run, {
    os.getenv("SHELL") or "/bin/sh",
    "-c",
    command,
    timeout = EXEC_SECONDS,
  })
  if not ok then
    if errors.is(result, "timeout") then
      values.bad(line, ("%s has not ended within %d s"):format(command, EXEC_SECONDS))
    end
    error(result, 0)
  end
  return result.code == 0
end

--- Whether a Match line matches.
function Reader:match(line)
  local args = line.args
  local index, result = 1, true
  if #args == 0 then
    values.bad(line, "criteria are missing")
  end
  while index <= #args do
    local word, value = args[index]:match("^([^=]+)=?(.*)$")
    local negated = word:sub(1, 1) == "!"
    local criterion = (negated and word:sub(2) or word):lower()
    local hit
    if criterion == "all" then
      hit = true
    elseif criterion == "final" then
      self.wants_final = true
      hit = self.final == true
    elseif criterion == "canonical" then
      hit = self.final == true
    else
      if value == "" then
        index = index + 1
        value = args[index]
      end
      if not value then
        values.bad(line, ("%s lacks a value"):format(criterion))
      end
      if criterion == "host" then
        hit = matches({ value }, self:hostname())
      elseif criterion == "originalhost" then
        hit = matches({ value }, self.original)
      elseif criterion == "user" then
        hit = matches({ value }, self.user or self.found.user or local_user())
      elseif criterion == "localuser" then
        hit = matches({ value }, local_user())
      elseif criterion == "exec" and self.exec then
        -- As ssh does: a program runs only where everything before it matches.
        hit = result and self.outer and self:runs_well(line, value)
        negated = result and negated
      else
        log.debug("%s: Match %s is not looked at and does not match", line.where, criterion)
        hit, negated = false, false
      end
    end
    if hit == negated then
      result = false
    end
    index = index + 1
  end
  return result
end

--- A keyword that adds up or has its own form. Returns whether it was one.
function Reader:special(line)
  local keyword, args, found = line.keyword, line.args, self.found
  local files_of = FILES[keyword]
  if files_of then
    local list = found[files_of] or {}
    found[files_of] = list
    local known = false
    for _, path in ipairs(list) do
      known = known or path == args[1]
    end
    if not known and #list < MAX_FILES then
      table.insert(list, args[1])
    end
  elseif keyword == "userknownhostsfile" then
    found.user_known_hosts = found.user_known_hosts or args
  elseif keyword == "globalknownhostsfile" then
    found.global_known_hosts = found.global_known_hosts or args
  elseif keyword == "proxyjump" then
    if not found.proxy_jump and not found.proxy_command then
      found.proxy_jump = args[1]
    end
  elseif keyword == "proxycommand" then
    if not found.proxy_jump and not found.proxy_command then
      found.proxy_command = line.rest
    end
  elseif keyword == "sendenv" then
    for _, pattern in ipairs(args) do
      if pattern:sub(1, 1) == "-" then
        for index = #found.send_patterns, 1, -1 do
          if known_hosts.matches({ pattern:sub(2) }, found.send_patterns[index]) then
            table.remove(found.send_patterns, index)
          end
        end
      else
        table.insert(found.send_patterns, pattern)
      end
    end
  elseif keyword == "setenv" then
    if not found.set_env then
      found.set_env = {}
      for _, word in ipairs(args) do
        local name, value = word:match("^([^=]+)=(.*)$")
        if not name then
          values.bad(line, ("NAME=VALUE is expected, not %q"):format(word))
        end
        table.insert(found.set_env, { name, value })
      end
    end
  else
    return false
  end
  return true
end

--- Take the lines of one file. `active` says whether the block that they are in counts; `base` is where relative
--- includes are.
function Reader:take(lines, active, base, depth)
  for _, line in ipairs(lines) do
    local keyword, args = line.keyword, line.args
    if keyword == "host" then
      active = self.outer and matches(args, self.host)
    elseif keyword == "match" then
      active = self:match(line) and self.outer
    elseif keyword == "include" then
      self:include(line, active, base, depth)
    elseif active and (values.SINGLE[keyword] or #args > 0) then
      if #args == 0 then
        values.bad(line, "its value is missing")
      end
      local single = values.SINGLE[keyword]
      if single then
        local field, convert = single[1], single[2]
        local value = convert(line, args[1])
        if self.found[field] == nil then
          self.found[field] = value
        end
      else
        self:special(line)
      end
    end
  end
end

function Reader:include(line, active, base, depth)
  if depth >= MAX_DEPTH then
    values.bad(line, "files include each other too deeply")
  end
  for _, pattern in ipairs(line.args) do
    pattern = files.home(pattern)
    if pattern:sub(1, 1) ~= "/" then
      pattern = base .. "/" .. pattern
    end
    for _, path in ipairs(files.glob(pattern)) do
      local lines = files.read(path)
      if lines then
        -- Inside a block that does not count, neither do the Host and Match lines of the included file.
        local outer = self.outer
        self.outer = outer and active
        self:take(lines, active, base, depth + 1)
        self.outer = outer
      end
    end
  end
end

-- Tokens -----------------------------------------------------------------------------------------------------------

--- ${NAME} of the environment.
local function expand_variables(text, what)
  return (
    text:gsub("%${([^}]*)}", function(name)
      local value = os.getenv(name)
      if not value then
        errors.raise({
          code = "usage",
          op = "ssh.config",
          message = ("ssh_config: %s: the variable %s in %q is not set"):format(what, name, text),
        })
      end
      return value
    end)
  )
end

local function expand_path(text, tokens, what)
  return files.home(expand_variables(expand_tokens(text, tokens, what), what))
end

---@class ciranda.ssh.Found  what ssh_config says of a host; nil where it says nothing
---@field hostname string?
---@field port integer?
---@field user string?
---@field host_key_alias string?
---@field host_key_policy "strict"|"accept-new"|nil
---@field connect_timeout number?      seconds
---@field keepalive { interval: number, count: integer }|false|nil
---@field identity_files string[]?     those that exist
---@field certificate_files string[]?  those that exist
---@field identity_agent string|false|nil
---@field identities_only boolean?
---@field known_hosts string[]?
---@field bind_address string?
---@field address_family "inet"|"inet6"|nil
---@field proxy_jump string?
---@field proxy_command string?        tokens replaced
---@field send_env string[][]          {{name, value}, ...}

--- The raw values, as `ssh -G` shows them: for tests and `resolve`.
---@async
---@param host string
---@param options { file: string|false|nil, user: string?, port: integer?, exec: boolean? } exec: `Match exec` counts
---@return table
function M.evaluate(host, options)
  local home = account.home()
  local places = { { home .. "/.ssh/config", home .. "/.ssh" }, { "/etc/ssh/ssh_config", "/etc/ssh" } }
  if options.file == false then
    places = {}
  elseif options.file then
    places = { { files.home(options.file), home .. "/.ssh", true } }
  end
  local reader = setmetatable({
    original = host,
    host = host, -- what Host lines are compared with: in the final pass, the resolved name
    user = options.user,
    port = options.port,
    exec = options.exec,
    found = { send_patterns = {} },
    outer = true,
  }, Reader)
  local function pass()
    for _, file in ipairs(places) do
      local lines = files.read(file[1])
      if lines then
        reader:take(lines, true, file[2], 0)
      elseif file[3] then
        errors.raise({
          code = "usage",
          op = "ssh.config",
          target = file[1],
          message = ("the ssh_config file %s does not exist"):format(file[1]),
        })
      end
    end
  end
  pass()
  local name = reader:hostname()
  -- As ssh does: addresses keep their spelling.
  if not name:find("^[%d.]+$") and not name:find(":", 1, true) then
    name = name:lower()
  end
  if reader.found.hostname or reader.wants_final then
    reader.found.hostname = name
  end
  if reader.wants_final then
    reader.final = true
    reader.host = name
    pass()
  end
  return reader.found
end

-- Whether a variable is sent, by the patterns of SendEnv and its name: a fleet's hosts ask for the same ones.
local sent = {}

--- Whether a variable's name matches one of the patterns.
local function is_sent(patterns, name)
  local list = table.concat(patterns, " ")
  local names = sent[list] or {}
  sent[list] = names
  if names[name] == nil then
    names[name] = false
    for _, pattern in ipairs(patterns) do
      names[name] = names[name] or known_hosts.matches({ pattern }, name)
    end
  end
  return names[name]
end

--- The variables that SendEnv and SetEnv ask for, sorted.
local function environment(found)
  local variables, seen = {}, {}
  for _, pair in ipairs(found.set_env or {}) do
    if not seen[pair[1]] then
      seen[pair[1]] = true
      table.insert(variables, pair)
    end
  end
  if #found.send_patterns > 0 then
    for name, value in pairs(uv.os_environ()) do
      if not seen[name] and is_sent(found.send_patterns, name) then
        table.insert(variables, { name, value })
      end
    end
  end
  table.sort(variables, function(a, b)
    return a[1] < b[1]
  end)
  return variables
end

-- What is found where nothing is read.
local NOTHING = { send_env = {} }

--- What ssh_config says of a host, ready for use. Not to be written to.
---@async
---@param host string as it was typed
---@param options { file: string|false|nil, user: string?, port: integer?, exec: boolean? }? what is known already;
---  exec: run the programs of `Match exec`
---@return ciranda.ssh.Found
--- Raises `usage` for a configuration that cannot be read.
function M.resolve(host, options)
  options = options or {}
  if options.file == false then
    return NOTHING
  end
  local raw = M.evaluate(host, options)
  local jump = raw.proxy_jump and raw.proxy_jump ~= "none" and raw.proxy_jump or nil
  local tokens = tokens_of(raw, host, options)

  local found = {
    hostname = raw.hostname,
    port = raw.port,
    user = raw.user,
    host_key_alias = raw.host_key_alias,
    host_key_policy = raw.host_key_policy,
    connect_timeout = raw.connect_timeout ~= 0 and raw.connect_timeout or nil, -- 0 is the system's own
    identities_only = raw.identities_only,
    bind_address = raw.bind_address,
    address_family = raw.address_family ~= "any" and raw.address_family or nil,
    send_env = environment(raw),
  }
  if raw.alive_interval then
    found.keepalive = raw.alive_interval > 0
      and { interval = raw.alive_interval, count = math.max(1, raw.alive_count or 3) }
  end
  for keyword, field in pairs(FILES) do
    for _, path in ipairs(raw[field] or {}) do
      if path:lower() ~= "none" then
        path = expand_path(path, tokens, keyword)
        found[field] = found[field] or {}
        if fs.exists(path) then
          table.insert(found[field], path)
        end
      end
    end
  end
  local agent = raw.identity_agent
  if agent == "none" then
    found.identity_agent = false
  elseif agent and agent:sub(1, 1) == "$" and agent:sub(2, 2) ~= "{" then
    found.identity_agent = os.getenv(agent:sub(2))
  elseif agent and agent ~= "SSH_AUTH_SOCK" then
    found.identity_agent = expand_path(agent, tokens, "IdentityAgent")
  end
  if raw.user_known_hosts or raw.global_known_hosts then
    local defaults = known_hosts.default_files()
    found.known_hosts = {}
    local lists = {
      raw.user_known_hosts or { defaults[1], defaults[2] },
      raw.global_known_hosts or { defaults[3], defaults[4] },
    }
    for _, list in ipairs(lists) do
      for _, path in ipairs(list) do
        if path:lower() ~= "none" then
          table.insert(found.known_hosts, expand_path(path, tokens, "UserKnownHostsFile"))
        end
      end
    end
  end
  local own = { h = tokens.h, n = host, p = tokens.p, r = tokens.r }
  found.proxy_jump = jump and expand_tokens(jump, own, "ProxyJump")
  if raw.proxy_command and raw.proxy_command:lower() ~= "none" then
    found.proxy_command = expand_tokens(raw.proxy_command, own, "ProxyCommand")
  end
  return found
end

return M
