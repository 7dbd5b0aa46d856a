--- ssh.connect: from a name to a connection whose host key is verified and whose user is authenticated.
---
--- Every phase (resolve, connect, banner, key exchange, authentication) has a deadline of its own, whose clock starts
--- when the phase starts. Every error names the phase, the host and what to do.

local account = require("ciranda.io.account")
local config = require("ciranda.ssh.config")
local connections = require("ciranda.ssh.connection")
local core = require("ciranda.core.ssh")
local errors = require("ciranda.io.error")
local hostkey = require("ciranda.ssh.hostkey")
local known_hosts = require("ciranda.ssh.known_hosts")
local login = require("ciranda.ssh.login")
local scheduler = require("ciranda.task.scheduler")
local slots = require("ciranda.ssh.slots")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Seconds a phase may take.
M.TIMEOUTS = { resolve = 20, connect = 15, banner = 20, kex = 20, auth = 60, channel = 30 }

--- Seconds between questions to a silent server, and how many may stay unanswered.
M.KEEPALIVE = { interval = 30, count = 3 }

--- Connections to one address that are not authenticated yet: OpenSSH begins to drop them at 10 (MaxStartups).
M.MAX_STARTING = 8

--- Commands at once on a connection: OpenSSH allows 10 (MaxSessions).
M.MAX_CHANNELS = 8

-- Seconds between attempts at a server that hangs up first, each with jitter.
local RETRY_PAUSES = { 0.1, 0.3, 0.9 }

-- What is offered, best first. Group exchange with SHA-1, CBC and SHA-1 MACs are left out; group14 costs four times
-- what curve25519 does and comes last. Ciphers in the order of libssh2's speed with bulk data. The host key's
-- algorithms depend on the host.
local METHODS = {
  kex = "curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256,ecdh-sha2-nistp384,ecdh-sha2-nistp521,"
    .. "diffie-hellman-group-exchange-sha256,diffie-hellman-group16-sha512,diffie-hellman-group14-sha256",
  cipher = "chacha20-poly1305@openssh.com,aes128-ctr,aes192-ctr,aes256-ctr,aes128-gcm@openssh.com,"
    .. "aes256-gcm@openssh.com",
  mac = "hmac-sha2-256-etm@openssh.com,hmac-sha2-512-etm@openssh.com,hmac-sha2-256,hmac-sha2-512",
  sign = "rsa-sha2-512,rsa-sha2-256,ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521",
}

local OPTIONS = {
  host = true,
  address = true,
  port = true,
  user = true,
  keys = true,
  certificates = true,
  agent = true,
  passphrase = true,
  identities_only = true,
  pins = true,
  known_hosts = true,
  host_key_alias = true,
  host_key_policy = true,
  timeouts = true,
  config = true,
  match_exec = true,
  jump = true,
  via = true, -- of ciranda.ssh.proxy: the jump hosts passed so far
  proxy_command = true,
  carrier = true,
  bind_address = true,
  keepalive = true,
  max_channels = true,
}

---@class ciranda.ssh.ConnectOptions
---@field host string              the name: looked up in ssh_config and known_hosts, and in every message
---@field address string?          where it is, when that is not its name: an address or another name
---@field port integer?            else CIRANDA_SSH_PORT, ssh_config's Port, 22
---@field user string?             else ssh_config's User, the local user
---@field keys (string|ciranda.ssh.Key)[]|string|nil  files (`~` allowed) or keys from `ssh.key`; else ssh_config's
---                                IdentityFile, else gcloud's and OpenSSH's default files
---@field certificates string|string[]|nil  files with certificates of those keys; else ssh_config's CertificateFile.
---                                The one beside a key, PATH-cert.pub, needs no mention
---@field agent boolean|string|nil false: none; a path: that socket; else IdentityAgent, SSH_AUTH_SOCK
---@field passphrase ciranda.ssh.Passphrase?  for encrypted files
---@field identities_only boolean? no key of the agent beyond the named ones
---@field pins string[]?           the host's keys, "ssh-ed25519 AAAA...": these and no others
---@field known_hosts string|string[]|false|nil  files instead of the default ones; false: none
---@field host_key_alias string?   the name for known_hosts
---@field host_key_policy "strict"|"accept-new"|nil  "strict"
---@field timeouts table<string, number>?  seconds: resolve, connect, banner, kex, auth, channel
---@field config string|false|nil  an ssh_config file instead of the default ones; false: none
---@field match_exec boolean?     run the programs of `Match exec`; otherwise such a Match never matches
---@field jump string|ciranda.ssh.Connection|false|nil  "[user@]host[:port],..." to go through; false: none
---@field proxy_command string?    a command whose standard streams carry the connection
---@field carrier (fun(address: string, port: integer): table)?  carries the bytes itself: see ciranda.ssh.proxy
---@field bind_address string?     the numeric local address to connect from
---@field keepalive { interval: number, count: integer }|false|nil
---@field max_channels integer?    8

-- Messages ---------------------------------------------------------------------------------------------------------

-- What to do about a failure, by phase and code, after what failed.
local REMEDIES = {
  ["connect refused"] = "Nothing listens there: is sshd running, and is this its port?",
  ["connect timeout"] = "A firewall, a machine that is down, or an address that cannot be reached from here?",
  ["connect unreachable"] = "There is no way to this address from here.",
  ["connect io"] = "If files are too many: raise their limit (ulimit -n).",
  ["banner timeout"] = "It accepted the connection and has not said who it is: it is overloaded, or no SSH server.",
  ["banner closed"] = "Too many connections at once (MaxStartups), or this address is not let in.",
  ["banner reset"] = "Too many connections at once (MaxStartups), or this address is not let in.",
  ["kex unsupported"] = "Its algorithms are too old, or too new, for libssh2 " .. core.version .. ".",
  ["kex timeout"] = "It is overloaded, or the network drops large packets (MTU).",
}

local PHASES = {
  connect = "connecting",
  banner = "waiting for its identification",
  kex = "the key exchange",
  auth = "authentication",
}

--- An error of the engine's, with the host, the phase and the remedy in its message.
local function explain(err, settings)
  if errors.is(err, "cancelled") then
    return err
  end
  local phase = err.phase or "connect"
  local remedy = REMEDIES[phase .. " " .. err.code]
  return errors.new({
    code = err.code,
    phase = phase,
    reason = err.reason,
    op = "ssh.connect",
    target = settings.label,
    cause = err,
    message = ("%s%s: %s failed: %s%s"):format(
      settings.label,
      settings.address ~= settings.host and (" (%s)"):format(settings.address) or "",
      PHASES[phase] or phase,
      err.message,
      remedy and ". " .. remedy or ""
    ),
  })
end

-- Settings ---------------------------------------------------------------------------------------------------------

--- A list of what may be given alone: a path, or a key, which is a table of its own.
local function as_list(value)
  if value == nil or (type(value) == "table" and value.handle == nil) then
    return value
  end
  return { value }
end

local function check_port(port, where)
  if math.type(port) ~= "integer" or port < 1 or port > 65535 then
    errors.raise({
      code = "usage",
      op = "ssh.connect",
      message = ("%s must be a port from 1 to 65535, not %s"):format(where, tostring(port)),
    })
  end
  return port
end

local function choose_port(options, found)
  if options.port then
    return check_port(options.port, "'port'")
  end
  local variable = os.getenv("CIRANDA_SSH_PORT")
  if variable and variable ~= "" then
    return check_port(math.tointeger(tonumber(variable)) or variable, "CIRANDA_SSH_PORT")
  end
  return found.port or 22
end

--- Everything that is known before the first packet, from the options, ssh_config and the defaults.
---@param options ciranda.ssh.ConnectOptions
local function settle(options)
  local user = options.user
  local found = config.resolve(options.host, {
    file = options.config,
    user = user,
    port = options.port,
    exec = options.match_exec,
  })
  local policy = options.host_key_policy or found.host_key_policy or "strict"
  if policy ~= "strict" and policy ~= "accept-new" then
    errors.misuse(3, 'ssh.connect: \'host_key_policy\' must be "strict" or "accept-new"')
  end
  local timeouts = M.TIMEOUTS
  if options.timeouts or found.connect_timeout then
    timeouts = setmetatable({ connect = found.connect_timeout }, { __index = M.TIMEOUTS })
    for phase, seconds in pairs(options.timeouts or {}) do
      timeouts[phase] = seconds
    end
  end
  local files = options.known_hosts
  if files == nil then
    files = found.known_hosts or known_hosts.default_files()
  end
  local settings = {
    host = options.host,
    address = options.address or found.hostname or options.host,
    port = choose_port(options, found),
    user = user or found.user or account.user(),
    alias = options.host_key_alias or found.host_key_alias,
    name = options.address and options.host or found.hostname or options.host,
    policy = policy,
    timeouts = timeouts,
    known_hosts = files and as_list(files) or {},
    keys = as_list(options.keys) or found.identity_files,
    certificates = as_list(options.certificates) or found.certificate_files,
    agent = options.agent,
    passphrase = options.passphrase,
    identities_only = options.identities_only,
    bind = options.bind_address or found.bind_address,
    family = found.address_family,
    send_env = found.send_env,
    jump = options.jump,
    proxy_command = options.proxy_command,
    carrier = options.carrier,
    keepalive = options.keepalive,
    max_channels = options.max_channels or M.MAX_CHANNELS,
  }
  if settings.agent == nil then
    settings.agent = found.identity_agent
  end
  if settings.identities_only == nil then
    settings.identities_only = found.identities_only
  end
  if settings.keepalive == nil then
    settings.keepalive = found.keepalive or M.KEEPALIVE
  end
  if settings.jump == nil and settings.proxy_command == nil then
    settings.jump, settings.proxy_command = found.proxy_jump, found.proxy_command
  end
  settings.label = ("%s@%s:%d"):format(settings.user, settings.host, settings.port)
  return settings
end

-- Phases -----------------------------------------------------------------------------------------------------------

local function is_numeric(address)
  return address:find("^%d+%.%d+%.%d+%.%d+$") ~= nil or address:find(":", 1, true) ~= nil
end

--- The numeric addresses of a name.
local function resolve(settings)
  local address = settings.address
  if is_numeric(address) then
    return { address }
  end
  local family = settings.family
  local ok, list = pcall(task.timeout, settings.timeouts.resolve, scheduler.await, function(done)
    local request, problem = uv.getaddrinfo(address, nil, {
      socktype = "stream",
      family = family,
    }, function(err, found)
      done(err, found)
    end)
    if not request then
      done(problem)
      return nil
    end
    return function()
      uv.cancel(request)
      return true -- a resolver that is stuck in the pool is not waited for
    end
  end, "the addresses of " .. address)
  local addresses = {}
  if ok then
    for _, entry in ipairs(list) do
      addresses[#addresses + 1] = entry.addr
    end
    if #addresses > 0 then
      return addresses
    end
  elseif errors.is(list, "cancelled") then
    error(list, 0)
  end
  local timed_out = not ok and errors.is(list, "timeout")
  errors.raise({
    code = timed_out and "timeout" or "resolve",
    phase = "resolve",
    op = "ssh.connect",
    target = settings.label,
    message = ("%s: the name %s %s"):format(
      settings.label,
      address,
      timed_out
          and ("has not been resolved within %g s: the name server does not answer"):format(
            settings.timeouts.resolve
          )
        or ("cannot be resolved%s: is it spelt right, and known here (ssh_config HostName, /etc/hosts, DNS)?"):format(
          ok and "" or (" (%s)"):format(errors.text(list))
        )
    ),
  })
end

local function milliseconds(seconds)
  return math.max(1, math.floor(seconds * 1000))
end

-- METHODS with the host key's algorithms, by those: a fleet's hosts have few different lists of them.
local methods_by_hostkey = {}

--- What is offered to a host.
---@param expected ciranda.ssh.HostKeys
local function methods(expected)
  local algorithms = hostkey.algorithms(expected)
  local list = methods_by_hostkey[algorithms]
  if not list then
    list = { hostkey = algorithms }
    for kind, names in pairs(METHODS) do
      list[kind] = names
    end
    methods_by_hostkey[algorithms] = list
  end
  return list
end

--- Connect, exchange identifications and keys, and, when that can be done without waiting for anything else, verify the
--- host key and offer the first key. `request` says how the host is reached; the rest is added to it.
---@return userdata session the engine's
---@return string? trust
---@return table? begun see login.begin
local function open(settings, expected, request, attach)
  local timeouts = settings.timeouts
  request.methods = methods(expected)
  request.connect_ms = milliseconds(timeouts.connect)
  request.banner_ms = milliseconds(timeouts.banner)
  request.kex_ms = milliseconds(timeouts.kex)
  return scheduler.await(function(done)
    local function on_open(err, session)
      if err then
        return done(explain(errors.wrap(err), settings))
      end
      local ok, trust = pcall(hostkey.judge, expected, settings.policy, session:host_key())
      local begun = ok
        and trust ~= "new"
        and login.begin(session, settings, function(outcome)
          done(nil, session, trust, outcome)
        end)
      if not begun then
        done(nil, session)
      end
    end
    local _, session = core.open(request, on_open)
    if attach then
      attach(session)
    end
    return function()
      session:close("cancelled") -- whatever is under way then ends, and `done` is called
    end
  end, "a connection to " .. settings.label)
end

--- Try the addresses one after the other; what the first failed with is raised when all fail.
local function open_any(settings, expected, under)
  if under then
    return open(settings, expected, under.request, under.attach)
  end
  local first
  for _, address in ipairs(resolve(settings)) do
    local request = { address = address, port = settings.port, bind = settings.bind }
    local ok, session, trust, begun = pcall(open, settings, expected, request)
    if ok then
      return session, trust, begun
    end
    if not errors.is(session, "refused", "unreachable", "timeout", "reset", "closed") then
      error(session, 0)
    end
    first = first or session
  end
  error(first, 0)
end

-- Those that are not authenticated yet, by address.
local entrances = {}

-- One's turn at an address, from `enter` to its `<close>`.
local Turn = {}

function Turn:__close()
  local entrance = entrances[self.place]
  entrance:release()
  if entrance.used == 0 then
    entrances[self.place] = nil
  end
end

--- Wait until one may be one of the few that are not authenticated yet at this address.
---@async
---@return table turn to be closed
local function enter(settings)
  local place = settings.address .. ":" .. settings.port
  local entrance = entrances[place] or slots.new(M.MAX_STARTING)
  entrances[place] = entrance
  entrance:acquire("its turn at " .. place)
  return setmetatable({ place = place }, Turn)
end

-- What must be closed unless everything went well: `guarded.thing`.
local Guarded = {
  __close = function(box)
    if box.thing then
      box.thing:close()
    end
  end,
}

local function guarded()
  return setmetatable({}, Guarded)
end

--- Open a session; a server that hangs up before it says who it is has had too many at once, most likely, and is tried
--- again after a moment. `under` holds what carries the session.
local function open_patiently(settings, expected, under, options)
  for attempt = 1, math.huge do
    if settings.carrier or settings.jump or settings.proxy_command then
      under.thing = require("ciranda.ssh.proxy").open(settings, M.connect, options)
    end
    local ok, session, trust, begun = pcall(open_any, settings, expected, under.thing)
    if ok then
      return session, trust, begun
    end
    local hung_up = session.phase == "banner" and errors.is(session, "closed", "reset")
    if hung_up and under.thing and under.thing.blame then
      session = under.thing.blame(session)
    end
    local pause = RETRY_PAUSES[attempt]
    if not pause or not hung_up or errors.is(session, "failed") then
      error(session, 0)
    end
    if under.thing then
      under.thing:close()
      under.thing = nil
    end
    task.sleep(pause * (0.5 + math.random()))
  end
end

--- Connect to a host and log in.
---@async
---@param options ciranda.ssh.ConnectOptions
---@return ciranda.ssh.Connection connection to be closed; a `<close>` variable may hold it
--- Raises, with `phase`: `resolve`, `refused`, `unreachable`, `timeout`, `closed`, `reset` (connect, banner, kex),
--- `unsupported` (no common algorithm), `hostkey`, `auth`, `permission` (a key file that others may read), `usage`
--- (ssh_config), `protocol`.
function M.connect(options)
  if type(options) ~= "table" or type(options.host) ~= "string" or options.host == "" then
    errors.misuse(2, "ssh.connect: a table with 'host' is expected")
  end
  errors.check_options(options, OPTIONS, "ssh.connect")
  local settings = settle(options)
  local alias = settings.alias
  local expected = hostkey.expect({
    host = alias or settings.name,
    port = alias and 22 or settings.port, -- an alias stands for the host and its port, as in OpenSSH
    address = not alias and settings.address or nil,
    label = ("%s:%d"):format(settings.name, settings.port),
    pins = options.pins,
    files = settings.known_hosts,
  })
  local under <close> = guarded()
  local session <close> = guarded()
  local key_type, blob, trust, key
  do
    local _ <close> = enter(settings)
    local begun
    session.thing, trust, begun = open_patiently(settings, expected, under, options)
    key_type, blob = session.thing:host_key()
    if not key_type and not begun then
      errors.raise(explain(errors.wrap(select(2, session.thing:status())), settings))
    end
    trust = trust or hostkey.verify(expected, key_type, blob, settings.policy)
    key = login.authenticate(session.thing, settings, begun)
  end

  local connection = connections.new(session.thing, {
    host = settings.host,
    port = settings.port,
    user = settings.user,
    label = settings.label,
    key = key,
    host_key = { type = key_type, blob = blob, trust = trust },
    under = under.thing,
    send_env = settings.send_env,
    channel_timeout = settings.timeouts.channel,
    max_channels = settings.max_channels,
  })
  session.thing, under.thing = nil, nil
  if settings.keepalive then
    connection:keepalive(settings.keepalive.interval, settings.keepalive.count)
  end
  return connection
end

return M
