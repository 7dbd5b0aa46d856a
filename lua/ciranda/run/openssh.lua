--- A session on one worker by OpenSSH's own ssh: a terminal, escapes and forwardings as its users know them, with what
--- this program knows of the worker.
local access = require("ciranda.provider.access")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local shell = require("ciranda.io.shell")
local signals = require("ciranda.fleet.signals")
local uv = require("luv")

local M = {}

--- A path as an option's value: ssh splits words, strips quotes and expands % in it.
local function path_value(path)
  return '"' .. path:gsub("%%", "%%%%"):gsub('[\\"]', "\\%0") .. '"'
end

--- The arguments of ssh for a worker.
---@param worker ciranda.Worker
---@param settings { user: string?, port: integer?, key: string?, policy: string?, known: string?, proxy: string? }
---  known: a file that has the worker's own keys under the name of `alias`; proxy: a command that leads there
---@return string[]
function M.arguments(worker, settings)
  local words = { "ssh" }
  local function option(text)
    words[#words + 1] = "-o"
    words[#words + 1] = text
  end
  if settings.known then
    option("UserKnownHostsFile=" .. path_value(settings.known))
    option("GlobalKnownHostsFile=/dev/null")
    option("HostKeyAlias=" .. M.alias(worker))
    option("StrictHostKeyChecking=yes")
    option("CheckHostIP=no")
  elseif settings.policy then
    option("StrictHostKeyChecking=" .. (settings.policy == "strict" and "yes" or settings.policy))
  end
  if settings.proxy then
    option("ProxyCommand=" .. settings.proxy)
  end
  if settings.key then
    option("IdentitiesOnly=yes")
    option("IdentityFile=" .. path_value(settings.key)) -- not -i, which looks for the file before it expands %
  end
  local port = worker.port or settings.port
  if port then
    words[#words + 1] = "-p"
    words[#words + 1] = ("%d"):format(port)
  end
  if settings.user then
    words[#words + 1] = "-l"
    words[#words + 1] = settings.user
  end
  return words
end

--- The command that leads to a worker through IAP.
---@param worker ciranda.Worker
---@param tunnel { project: string, zone: string }
---@return string
function M.proxy(worker, tunnel)
  local function quoted(text)
    return shell.quote((text:gsub("%%", "%%%%")))
  end
  return ("%s iap %s %%p --project=%s --zone=%s"):format(
    quoted(uv.exepath()),
    quoted(worker.hostname),
    quoted(tunnel.project),
    quoted(tunnel.zone)
  )
end

--- The name under which a worker's keys are in the file made for the session.
---@param worker ciranda.Worker
---@return string
function M.alias(worker)
  return "ciranda-" .. worker.name
end

--- Opens a session in the foreground and waits for its end.
---@async
---@param context ciranda.cli.Context
---@param found ciranda.run.Target of one worker
---@param extra string[] more arguments for ssh
---@return integer status ssh's own
-- Raises "not_found" when there is no ssh, "auth" and the like when the key is not let in.
function M.session(context, found, extra)
  local worker = found.fleet:workers()[1]
  local address = worker.address
  local key = found.connection.keys
  if found.tpu then
    -- This lets the key in where it is not known yet, and finds out which address answers.
    found.login()
    key = access.key(key)
    address = found.answered[worker] or address
  end
  found.fleet:close()
  local directory
  local _ <close> = setmetatable({}, {
    __close = function()
      if directory then
        fs.remove_tree(directory)
      end
    end,
  })
  if worker.pins then
    directory = fs.tempdir("ciranda-ssh")
    local lines = {}
    for place, pin in ipairs(worker.pins) do
      lines[place] = ("%s %s\n"):format(M.alias(worker), pin)
    end
    fs.write(directory .. "/known_hosts", table.concat(lines), { mode = 384 })
  end
  local variable = os.getenv("CIRANDA_SSH_PORT")
  local words = M.arguments(worker, {
    user = found.connection.user,
    port = found.connection.port or (variable and math.tointeger(tonumber(variable))),
    key = key,
    policy = found.connection.host_key_policy,
    known = directory and directory .. "/known_hosts",
    proxy = found.tunnelled[worker] and M.proxy(worker, found.connection.tunnel) or nil,
  })
  -- ssh takes options after the host too, and then a command.
  words[#words + 1] = address
  table.move(extra, 1, #extra, #words + 1, words)
  context.progress:close()
  -- What the terminal sends is for the session.
  local remove = context.on_interrupt(function(name)
    return name == "SIGINT"
  end)
  local _ <close> = setmetatable({}, { __close = remove })
  words.stdin, words.stdout, words.stderr = process.INHERIT, process.INHERIT, process.INHERIT
  words.foreground = true
  local result = process.run(words)
  return result.code or 128 + (signals.number(result.signal) or 1)
end

return M
