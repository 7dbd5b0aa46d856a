--- How the values of ssh_config's keywords are read. See ciranda.ssh.config.

local errors = require("ciranda.io.error")

local M = {}

--- Raises that a line cannot be read.
---@param line table where, keyword
---@param what string
--- Raises "usage".
function M.bad(line, what)
  errors.raise({
    code = "usage",
    op = "ssh.config",
    target = line.where,
    message = ("%s: %s: %s"):format(line.where, line.keyword, what),
  })
end

--- "10", "1m30s", "2h": seconds.
local function seconds(line, text)
  local total, rest = 0, text:lower()
  local units = { [""] = 1, s = 1, m = 60, h = 3600, d = 86400, w = 604800 }
  if rest == "" then
    M.bad(line, "a time is missing")
  end
  while rest ~= "" do
    local number, unit, left = rest:match("^(%d+)([smhdw]?)(.*)$")
    if not number then
      M.bad(line, ("%q is no time"):format(text))
    end
    total = total + tonumber(number) * units[unit]
    rest = left
  end
  return total
end

local YES = { yes = true, ["true"] = true, no = false, ["false"] = false }

local function yes_no(line, text)
  local value = YES[text]
  if value == nil then
    M.bad(line, ("yes or no is expected, not %q"):format(text))
  end
  return value
end

local CHECKING = {
  yes = "strict",
  ["true"] = "strict",
  ask = "strict",
  ["accept-new"] = "accept-new",
  no = "accept-new", -- a changed key is refused all the same
  ["false"] = "accept-new",
  off = "accept-new",
}

local FAMILY = { any = "any", inet = "inet", inet6 = "inet6" }

local function choice(set)
  return function(line, text)
    if set[text:lower()] == nil then
      M.bad(line, ("%q is no choice"):format(text))
    end
    return set[text:lower()]
  end
end

local function integer(lowest, highest)
  return function(line, text)
    local value = math.tointeger(tonumber(text))
    if not value or value < lowest or value > highest then
      M.bad(line, ("an integer from %d to %d is expected, not %q"):format(lowest, highest, text))
    end
    return value
  end
end

local function text_of(_, text)
  return text
end

--- Keywords of one value: the field, and how its text is read.
---@type table<string, { [1]: string, [2]: fun(line: table, text: string): any }>
M.SINGLE = {
  hostname = { "hostname", text_of },
  port = { "port", integer(1, 65535) },
  user = { "user", text_of },
  hostkeyalias = { "host_key_alias", text_of },
  stricthostkeychecking = { "host_key_policy", choice(CHECKING) },
  connecttimeout = {
    "connect_timeout",
    function(line, text)
      -- "none" leaves the place to a later value, as in OpenSSH.
      if text ~= "none" then
        return seconds(line, text)
      end
      return nil
    end,
  },
  serveraliveinterval = { "alive_interval", seconds },
  serveralivecountmax = { "alive_count", integer(0, 1000) },
  identitiesonly = { "identities_only", yes_no },
  identityagent = { "identity_agent", text_of },
  bindaddress = { "bind_address", text_of },
  addressfamily = { "address_family", choice(FAMILY) },
}

return M
