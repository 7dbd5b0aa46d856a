--- What carries a connection that does not go straight to its host: jump hosts and proxy commands.
---
--- A place is `{ request =, attach =, close = }`: options for the engine's `open`, a function that is given the
--- engine's session before any byte goes, and the end of it all. A caller's own carrier (the option `carrier`: a relay,
--- for example) returns one too:
---
---     request = { write = fn, drained = fn }  -- write(data) sends a piece, then calls session:written(), once it has
---                                             -- gone; drained() lets the input come again
---     attach(session)                         -- from then on session:feed(data), which returns false when it is full,
---                                             -- and session:feed_end()
---     close()                                 -- the session has ended
---     blame(problem)                          -- may be absent: what is told in place of a problem with the host's
---                                             -- first words, when the carrier is at fault; a task, which may wait
---
--- All of these are called in callbacks of the loop and must not wait.

local errors = require("ciranda.io.error")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Options that a jump host shares with the host behind it.
local SHARED = {
  "keys",
  "certificates",
  "agent",
  "passphrase",
  "known_hosts",
  "host_key_policy",
  "timeouts",
  "config",
  "match_exec",
  "keepalive",
}

--- "[user@]host[:port]" or "ssh://[user@]host[:port]".
---@param text string
---@return { host: string, user: string?, port: integer? }
--- Raises `usage`.
function M.parse_hop(text)
  local rest = text:gsub("^ssh://", ""):gsub("/$", "")
  local user, place = rest:match("^(.*)@([^@]*)$")
  place = place or rest
  local host, port = place:match("^%[([^%]]+)%]:?(%d*)$")
  if not host then
    host, port = place:match("^([^:]+):?(%d*)$")
  end
  local number = port and port ~= "" and math.tointeger(tonumber(port)) or nil
  if not host or user == "" or (port ~= "" and not (number and number >= 1 and number <= 65535)) then
    errors.raise({
      code = "usage",
      op = "ssh.connect",
      message = ("%q is no jump host; one looks like user@host:port"):format(text),
    })
  end
  return { host = host, user = user, port = number }
end

--- A connection through another one.
---@param jump ciranda.ssh.Connection
---@param settings table
---@param on_close fun()
local function through(jump, settings, on_close)
  local channel = jump:tunnel(settings.address, settings.port)
  local raw = channel.raw
  local session
  local function on_data(_, data, stream)
    if not data then
      session:feed_end()
    elseif stream == 1 and not session:feed(data) then
      raw:read_stop() -- `drained` goes on
    end
  end
  return {
    request = {
      write = function(data)
        local accepted = raw:write(data, function(err)
          if not err then
            session:written()
          end
        end)
        if not accepted then
          session:feed_end()
        end
      end,
      drained = function()
        raw:read_start(on_data)
      end,
    },
    attach = function(engine_session)
      session = engine_session
      if not raw:read_start(on_data) then
        session:feed_end()
      end
    end,
    close = function()
      channel:close()
      on_close()
    end,
  }
end

-- Jump hosts are shared by the connections that go through them: { connection, users, asked }, by what was asked for.
-- Tables in that are told apart by their addresses: who was asked for is kept with it, so that no other keys can come
-- to have the address of these.
local shared = {}
local locks = {}

local function release(key, entry)
  entry.users = entry.users - 1
  if entry.users == 0 then
    if shared[key] == entry then
      shared[key] = nil
    end
    entry.connection:close()
  end
end

--- The connection to a jump host: one that is there, or a new one.
local function acquire(key, hop, make)
  locks[key] = locks[key] or task.semaphore(1)
  return locks[key]:with(function()
    local entry = shared[key]
    if not entry or not entry.connection:is_open() then
      entry = { connection = make(hop), users = 0, asked = hop }
      shared[key] = entry
    end
    entry.users = entry.users + 1
    return entry
  end)
end

--- The hosts of a chain, "a,b,c", the last of which reaches the target.
local function through_chain(chain, settings, connect, options)
  local before, last = chain:match("^(.*),([^,]+)$")
  local hop = M.parse_hop(last or chain)
  hop.jump = before
  local parts = { chain }
  for _, name in ipairs(SHARED) do
    hop[name] = options[name]
    parts[#parts + 1] = tostring(options[name])
  end
  local key = table.concat(parts, "\0")
  -- The jump hosts that this one is to be reached through, those that ssh_config adds included.
  hop.via = { [key] = true }
  for known in pairs(options.via or {}) do
    hop.via[known] = true
  end
  if options.via and options.via[key] then
    errors.raise({
      code = "usage",
      op = "ssh.connect",
      target = settings.label,
      message = ("%s: ProxyJump in ssh_config goes in circles (%s)"):format(settings.label, chain),
    })
  end
  local entry = acquire(key, hop, connect)
  local ok, place = pcall(through, entry.connection, settings, function()
    release(key, entry)
  end)
  if not ok then
    release(key, entry)
    error(errors.wrap(place, { op = "ssh.connect", target = settings.label .. " through " .. chain }), 0)
  end
  return place
end

--- What a command says when it ends before the host's first words, which is not the host's doing.
---@async
---@param problem ciranda.Error
---@param ended ciranda.task.Event set once it has ended
---@param outcome { code: integer?, signal: integer? }
---@param label string
---@return ciranda.Error
local function blame_command(problem, ended, outcome, label)
  -- The end of its output is seen before its own.
  local known, why = pcall(task.timeout, 1, ended.wait, ended)
  if errors.is(why, "cancelled") then
    error(why, 0)
  elseif not known or outcome.code == 0 and outcome.signal == 0 then
    return problem
  end
  -- What a shell says of a program that is not there, or is none.
  local never = outcome.code == 126 or outcome.code == 127
  local how = outcome.signal ~= 0 and "signal " .. outcome.signal or "exit status " .. outcome.code
  return errors.new({
    code = never and "failed" or problem.code,
    phase = never and "connect" or problem.phase,
    op = "ssh.connect",
    target = label,
    message = ("%s: the proxy command %s (%s)%s"):format(
      label,
      never and "cannot be started" or "ended before the host had said who it is",
      how,
      never and "; look for its name in ProxyCommand" or ""
    ),
  })
end

--- A command whose standard input and output are the connection; what it says on standard error is shown.
local function command(line, settings)
  local pair = uv.socketpair("stream", nil, {}, {})
  local ended, outcome = task.event(), {}
  local handle, problem = uv.spawn("/bin/sh", {
    args = { "-c", "exec " .. line },
    stdio = { pair[2], pair[2], 2 },
  }, function(code, signal)
    outcome.code, outcome.signal = code, signal
    ended:set()
  end)
  uv.fs_close(pair[2])
  if not handle then
    uv.fs_close(pair[1])
    errors.raise({
      code = "failed",
      phase = "connect",
      op = "ssh.connect",
      target = settings.label,
      message = ("%s: the proxy command cannot be started: %s"):format(settings.label, tostring(problem)),
    })
  end
  return {
    request = { descriptor = pair[1] },
    blame = function(failure)
      return blame_command(failure, ended, outcome, settings.label)
    end,
    close = function()
      if handle:is_active() then
        handle:kill("sighup")
      end
      if not handle:is_closing() then
        handle:close()
      end
    end,
  }
end

--- What the settings ask for, or nil when the host is connected to directly.
---@async
---@param settings table of ciranda.ssh.connect
---@param connect fun(options: table): ciranda.ssh.Connection
---@param options ciranda.ssh.ConnectOptions
---@return { request: table, attach: function?, close: function }?
function M.open(settings, connect, options)
  if settings.carrier then
    return settings.carrier(settings.address, settings.port)
  end
  local jump = settings.jump
  if type(jump) == "table" then
    return through(jump, settings, function() end)
  end
  if jump and jump ~= "none" then
    return through_chain(jump, settings, connect, options)
  end
  if settings.proxy_command then
    return command(settings.proxy_command, settings)
  end
  return nil
end

return M
