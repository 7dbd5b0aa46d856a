--- Ways to workers without an external address: TCP through Google's Identity-Aware Proxy (IAP).
---
---     local carrier = iap.carrier { project = "p", zone = "us-west4-a", instance = "t1v-n-1234-w-0",
---       credentials = credentials.find() }
---     ssh.connect { host = "t1v-n-1234-w-0", carrier = carrier }
---
--- What a tunnel is, is in ciranda.gcp.iap_tunnel; this is how it is asked for, and what its failures mean.

local errors = require("ciranda.io.error")
local frame = require("ciranda.gcp.iap_frame")
local log = require("ciranda.io.log")
local task = require("ciranda.task")
local tunnels = require("ciranda.gcp.iap_tunnel")
local url = require("ciranda.io.url")
local websocket = require("ciranda.io.websocket")

local M = {}

--- The relay, unless CIRANDA_IAP_URL names another.
M.URL = "wss://tunnel.cloudproxy.app"

--- Where the relay's connections to workers come from: the firewall has to let them in.
M.SOURCES = "35.235.240.0/20"

-- Attempts at a first WebSocket that the relay answers with 5xx or 429, or that is lost before it is up.
local ATTEMPTS = 3

--- The relay's close codes. Google documents 4003 and 4004 in gcloud's source; the others are known from clients.
---@type table<integer, { [1]: string, [2]: string }> our code, what it means
M.CLOSE_CODES = {
  [4000] = { "unavailable", "an unknown error of the relay's" },
  [4001] = { "lost", "the relay does not know the tunnel any more" },
  [4002] = { "busy", "the relay holds the tunnel's last connection still" },
  [4003] = { "refused", "the relay cannot connect to the worker's port" },
  [4004] = { "auth", "the access token has expired" },
  [4005] = { "protocol", "the relay did not accept an acknowledgement" },
  [4006] = { "protocol", "the relay did not accept an acknowledgement" },
  [4007] = { "protocol", "the relay did not accept a frame" },
  [4008] = { "protocol", "the relay did not accept a message" },
  [4009] = { "closed", "the worker's side takes no more" },
  [4010] = { "closed", "the worker's side has ended" },
  [4013] = { "protocol", "the relay did not accept a message" },
  [4033] = { "permission", "the relay does not let you in" },
  [4047] = { "not_found", "the relay does not find the instance" },
  [4051] = { "unavailable", "the relay does not find the tunnel's connection for the moment" },
  [4074] = { "lost", "the relay has not kept what was to be sent again" },
}

--- Failures after which a tunnel that was up is taken up again: the relay's, the network's, a token's.
local PASSING = {
  "unavailable",
  "rate_limit",
  "busy",
  "auth",
  "reset",
  "closed",
  "timeout",
  "unreachable",
  "refused",
  "resolve",
}

local function remedies(settings)
  return {
    auth = "Sign in again: gcloud auth application-default login.",
    permission = (
      "The role iap.tunnelResourceAccessor is needed (the permission iap.tunnelInstances.accessViaIAP) "
      .. "on project %s, and the IAP API."
    ):format(settings.project),
    refused = ("Does something listen on port %d of the worker, and does a firewall rule let %s in?"):format(
      settings.port,
      M.SOURCES
    ),
    timeout = ("Does a firewall rule let %s in to port %d, and is the worker up?"):format(
      M.SOURCES,
      settings.port
    ),
    not_found = ("Is %s an instance of zone %s in project %s?"):format(
      settings.instance,
      settings.zone,
      settings.project
    ),
  }
end

--- An error with the place, what happened and the remedy.
local function explain(settings, err, phase)
  if errors.is(err, "cancelled") then
    return err
  end
  -- "refused" and "timeout" mean the worker's port where the relay says so, and else the relay itself.
  local of_relay = err.close_code == nil and err.status == nil and err.op ~= "iap"
  local remedy = not of_relay and remedies(settings)[err.code]
    or of_relay and "Can this machine reach the relay (a proxy, a firewall, CIRANDA_IAP_URL)?"
  return errors.new({
    code = err.code,
    phase = phase,
    op = "iap",
    target = settings.instance,
    status = err.status,
    close_code = err.close_code,
    cause = err,
    message = ("%s: the tunnel through IAP, %s: %s%s"):format(
      settings.label,
      phase,
      err.message,
      remedy and ". " .. remedy or ""
    ),
  })
end

--- What a WebSocket's end means.
local function of_close(code, reason)
  local known = M.CLOSE_CODES[code]
  local text = known and known[2]
    or code == 1006 and "the connection to the relay was lost"
    or "the relay closed"
  local said = reason ~= "" and " (" .. reason .. ")" or ""
  return errors.new({
    code = known and known[1] or code == 1000 and "closed" or code == 1002 and "protocol" or "unavailable",
    close_code = code ~= 1006 and code or nil,
    op = known and "iap" or "websocket",
    message = code == 1006 and text .. said or ("%s: code %d%s"):format(text, code, said),
  })
end

--- The address of a new tunnel, or of the one with an id.
local function address_of(settings, sid, received)
  local base = settings.url:gsub("/+$", "")
  if sid then
    return ("%s/v4/reconnect?%s"):format(
      base,
      url.query({ sid = sid, ack = ("%d"):format(received), newWebsocket = "True", zone = settings.zone })
    )
  end
  return ("%s/v4/connect?%s"):format(
    base,
    url.query({
      project = settings.project,
      zone = settings.zone,
      instance = settings.instance,
      interface = settings.interface,
      port = ("%d"):format(settings.port),
      newWebsocket = "True",
    })
  )
end

--- Open a WebSocket. A token that is refused is thrown away, and another one is tried once.
local function connect(settings, sid, received)
  for attempt = 1, 2 do
    local token = settings.credentials:token()
    local ok, ws = pcall(websocket.connect, {
      url = address_of(settings, sid, received),
      protocol = frame.PROTOCOL,
      headers = { Authorization = token and "Bearer " .. token or nil, Origin = "bot:iap-tunneler" },
      connect_timeout = settings.timeouts.connect,
      timeout = settings.timeouts.handshake,
      ca_file = settings.ca_file,
      proxy = settings.proxy,
    })
    if ok then
      settings.token = token
      return ws
    elseif attempt == 2 or not errors.is(ws, "auth") then
      error(ws, 0)
    end
    settings.credentials:reject(token)
  end
end

--- A tunnel, from its settings and the receiver of its bytes.
local function open(settings, on_data, on_end)
  local refused = 0
  return tunnels.open({
    connect = function(sid, received)
      return connect(settings, sid, received)
    end,
    on_data = on_data,
    on_end = function(err)
      on_end(err and explain(settings, err, "while it was up"))
    end,
    explain = function(code, reason)
      local err = of_close(code, reason)
      if err.code == "auth" then
        settings.credentials:reject(settings.token)
      end
      return err
    end,
    passing = function(err)
      -- A worker whose port is closed, or that has closed its side, stays so; and tokens are renewed, but not for ever.
      if err.close_code == 4003 or err.close_code == 4009 or err.close_code == 4010 then
        return false
      end
      refused = err.code == "auth" and refused + 1 or 0
      return refused <= 2 and errors.is(err, table.unpack(PASSING))
    end,
    on_note = function(err)
      log.debug(("%s: taking the tunnel through IAP up again: %s"):format(settings.label, err.message))
    end,
    timeouts = settings.timeouts,
    reconnect = settings.reconnect,
    max_kept = settings.max_kept,
  })
end

--- A first attempt that the relay could not serve is repeated a few times; so is one with a token that had expired.
local function open_patiently(settings, on_data, on_end)
  for attempt = 1, ATTEMPTS do
    local ok, tunnel = pcall(open, settings, on_data, on_end)
    if ok then
      return tunnel
    elseif attempt == ATTEMPTS or not errors.is(tunnel, "unavailable", "rate_limit", "auth", "reset") then
      error(explain(settings, errors.wrap(tunnel), tunnel.phase or "opening"), 0)
    elseif not errors.is(tunnel, "auth") then
      task.sleep(attempt * (0.5 + math.random()))
    end
  end
end

local OPTIONS = {}
for name in
  ([[project zone instance interface credentials url timeouts reconnect max_kept ca_file proxy label]]):gmatch(
    "%S+"
  )
do
  OPTIONS[name] = true
end

---@class ciranda.gcp.iap.Options
---@field project string
---@field zone string
---@field instance string         the machine's name: a TPU worker's guest attribute `hostname`
---@field interface string?       "nic0"
---@field credentials { token: (fun(self): string?), reject: fun(self, token: string?) }  asked for a token whenever a
---  WebSocket is opened, and told when one was refused
---@field url string?             ws:// or wss://; else CIRANDA_IAP_URL, else iap.URL
---@field timeouts { connect: number?, handshake: number?, open: number?, ack: number? }?  seconds, see iap_tunnel
---@field reconnect table?        see iap_tunnel
---@field max_kept integer?
---@field ca_file string?
---@field proxy string?
---@field label string?           the worker's name in messages; else the instance

---@param options ciranda.gcp.iap.Options
---@param port integer
local function settle(options, port)
  local settings = {}
  for name, value in pairs(options) do
    settings[name] = value
  end
  local variable = os.getenv("CIRANDA_IAP_URL")
  settings.url = options.url or variable ~= "" and variable or M.URL
  if not settings.url:find("^wss?://[^/?#]") then
    errors.raise({
      code = "usage",
      op = "iap",
      message = ("the relay's URL must begin with wss:// or ws:// (CIRANDA_IAP_URL), not %q"):format(
        settings.url
      ),
    })
  end
  settings.interface = options.interface or "nic0"
  settings.timeouts = options.timeouts or {}
  settings.label = options.label or options.instance
  settings.port = port
  return settings
end

--- Check the options of a tunnel.
local function check(options, what)
  errors.check_options(options, OPTIONS, what, 3)
  for _, name in ipairs({ "project", "zone", "instance" }) do
    if type(options[name]) ~= "string" or options[name] == "" then
      errors.misuse(3, "%s: '%s' is missing", what, name)
    end
  end
  if type(options.credentials) ~= "table" then
    errors.misuse(3, "%s: 'credentials' is missing", what)
  end
end

--- A tunnel to a port.
---@async
---@param options ciranda.gcp.iap.Options
---@param port integer
---@param on_data fun(data: string): boolean called in callbacks; false: no more until `tunnel:resume()`
---@param on_end fun(err: ciranda.Error?) once, nil for a normal end
---@return ciranda.gcp.iap.Tunnel
--- Raises, with `phase` and the remedy in the message: `auth`, `permission`, `not_found`, `refused` (nothing listens,
--- or the firewall), `timeout`, `unavailable`, and what connecting to the relay raises.
function M.open(options, port, on_data, on_end)
  check(options, "iap.open")
  return open_patiently(settle(options, port), on_data, on_end)
end

--- What carries an SSH connection through IAP: the option `carrier` of `ssh.connect`.
---@param options ciranda.gcp.iap.Options
---@return fun(address: string, port: integer): table
function M.carrier(options)
  check(options, "iap.carrier")
  return function(_, port)
    local session, ended
    local early = {}
    local tunnel = M.open(options, port, function(data)
      if not session then
        early[#early + 1] = data
        return true
      end
      return session:feed(data)
    end, function(err)
      if err then
        log.warn(err.message)
      end
      ended = true
      if session then
        session:feed_end()
      end
    end)
    return {
      request = {
        write = function(data)
          tunnel:write(data, function()
            session:written()
          end)
        end,
        drained = function()
          tunnel:resume()
        end,
      },
      attach = function(engine_session)
        session = engine_session
        for _, data in ipairs(early) do
          session:feed(data)
        end
        if ended then
          session:feed_end()
        end
      end,
      close = function()
        tunnel:close()
      end,
    }
  end
end

return M
