--- A connection whose user is authenticated: commands, files and tunnels on it.

local channels = require("ciranda.ssh.channel")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local log = require("ciranda.io.log")
local scheduler = require("ciranda.task.scheduler")
local shell = require("ciranda.io.shell")
local slots_of = require("ciranda.ssh.slots")
local task = require("ciranda.task")

local M = {}

--- Output kept by `exec` when nobody takes it; more is an error.
M.MAX_OUTPUT = 64 * 1024 * 1024

-- Bytes of a file read at once for a command's standard input.
local FILE_PIECE = 262144

-- Connection -------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.Connection
---@field host string        the name it was asked for by
---@field port integer
---@field user string
---@field label string       "user@host:port", for messages
---@field key string?        what the user was authenticated with, for messages
---@field host_key { type: string, blob: string, trust: "pinned"|"known"|"added" }
---@field private session userdata
---@field private slots table
---@field private had_channel boolean? the server has given one
local Connection = {}
Connection.__index = Connection

-- What waits for a channel waits for this.
local SLOT = "a channel of the connection"

-- Seconds before each further try where a server that had a channel for us has none now, and we have none open: sshd
-- counts one that has just been closed until it comes round to it.
local REFUSED_PAUSES = { 0.01, 0.03, 0.1, 0.3, 1 }

---@param session userdata the engine's
---@param fields { host: string, port: integer, user: string, label: string, max_channels: integer,
---  channel_timeout: number, send_env: string[][], key: string?, host_key: table, under: any } becomes the connection
---@return ciranda.ssh.Connection
function M.new(session, fields)
  local self = setmetatable(fields, Connection)
  self.session = session
  self.channel_ms = math.max(1, math.floor(fields.channel_timeout * 1000))
  -- Channels that may be open at once. OpenSSH's MaxSessions is 10; a server with a lower one teaches us its limit.
  self.slots = slots_of.new(fields.max_channels)
  local waits = session:on_close(function(err)
    self.ended = err
    self:_let_go()
  end)
  if not waits then
    self.ended = select(2, session:status())
    self:_let_go()
  end
  return self
end

function Connection:__tostring()
  return ("ssh connection to %s (%s)"):format(self.label, self.ended and "closed" or "open")
end

--- What carried this connection (a jump host, a proxy command) is no longer needed.
---@private
function Connection:_let_go()
  local under = self.under
  self.under = nil
  if under then
    under:close()
  end
end

--- Whether the connection can still be used, as far as is known.
---@return boolean
function Connection:is_open()
  return self.ended == nil
end

---@private
function Connection:_raise(err, op)
  errors.raise(errors.wrap(errors.wrap(err), { op = op or "ssh.exec", target = self.label }))
end

--- Open a channel for a session. Waits while as many are open as the server allows.
---@private
---@param request table
---@param what string
---@return ciranda.ssh.Channel
function Connection:_open(request, what)
  request.timeout = self.channel_ms
  local slots = self.slots
  local refused = 0 -- with no channel of ours open
  while true do
    slots:acquire(SLOT)
    local ok, raw = pcall(task.call, self.session.exec, self.session, request)
    if ok then
      self.had_channel = true
      return channels.new(raw, self.label, what, function()
        slots:release()
      end)
    end
    local others = slots.used - 1
    slots:release()
    if raw.reason ~= "channel_refused" then
      self:_raise(raw)
    elseif others > 0 then
      -- The server's MaxSessions is below our limit: wait for one of the others to end.
      slots.limit = math.min(slots.limit, others)
      log.debug("%s allows %d channels at once", self.label, slots.limit)
    else
      -- The others have ended since the server refused this one, or it has never allowed any.
      refused = refused + 1
      if not self.had_channel or not REFUSED_PAUSES[refused] then
        self:_raise(raw)
      end
      task.sleep(REFUSED_PAUSES[refused])
    end
  end
end

--- The command with variables in its environment. Servers accept few by the protocol (AcceptEnv), so that `env` sets
--- them, and the login shell runs the command as it would have.
local function with_environment(command, env, level)
  local names = {}
  for name, value in pairs(env) do
    if type(name) ~= "string" or not name:find("^[%a_][%w_]*$") or type(value) ~= "string" then
      errors.misuse(level + 1, "ssh: 'env' must map names of variables to strings")
    end
    names[#names + 1] = name
  end
  if #names == 0 then
    return command
  end
  table.sort(names)
  local words = {}
  for index, name in ipairs(names) do
    words[index] = shell.quote(name .. "=" .. env[name])
  end
  return ('exec env %s "$SHELL" -c %s'):format(table.concat(words, " "), shell.quote(command))
end

local START_OPTIONS = { env = true, pty = true }

---@class ciranda.ssh.StartOptions
---@field env table<string, string>?  added to the command's environment. Not for secrets: for a moment they can be
---                                   seen in the list of processes
---@field pty boolean|{ term: string?, columns: integer?, rows: integer? }?  a terminal; both streams then are one

--- Start a command by the user's login shell and return at once.
---@async
---@param command string
---@param options ciranda.ssh.StartOptions?
---@return ciranda.ssh.Channel channel to be closed; a `<close>` variable may hold it
--- Raises `refused` (the server), `timeout`, or what ended the connection.
function Connection:start(command, options)
  options = options or {}
  if type(command) ~= "string" then
    errors.misuse(2, "connection:start takes a command as a string, not a %s", type(command))
  end
  errors.check_options(options, START_OPTIONS, "connection:start")
  return self:_start(command, options)
end

-- A request of the engine's says of itself what is waited for.
local Request = {
  __tostring = function(request)
    return ("%q"):format(request.command)
  end,
}

--- The engine's request for a command.
---@private
function Connection:_request(command, options)
  local request = setmetatable({
    command = options.env and with_environment(command, options.env, 4) or command,
    env = self.send_env,
    timeout = self.channel_ms,
  }, Request)
  local pty = options.pty
  if pty then
    pty = type(pty) == "table" and pty or {}
    request.term = pty.term or os.getenv("TERM") or "xterm"
    request.columns, request.rows = pty.columns, pty.rows
  end
  return request
end

---@private
function Connection:_start(command, options)
  return self:_open(self:_request(command, options), ("%q"):format(command))
end

--- Start a subsystem, such as "sftp".
---@async
---@param name string
---@return ciranda.ssh.Channel
--- Raises as `start` does.
function Connection:subsystem(name)
  return self:_open({ subsystem = name }, "the subsystem " .. name)
end

--- Open a connection from the server to another place (as `ssh -W`): a channel that carries its bytes.
---@async
---@param host string
---@param port integer
---@return ciranda.ssh.Channel
--- Raises `refused`, `timeout`, or what ended the connection.
function Connection:tunnel(host, port)
  -- It is no session, of which servers allow few (MaxSessions): a jump host carries a whole fleet.
  local request = { host = host, port = port, timeout = self.channel_ms }
  local ok, raw = pcall(task.call, self.session.tunnel, self.session, request)
  if not ok then
    self:_raise(raw)
  end
  return channels.new(raw, self.label, ("the tunnel to %s:%d"):format(host, port), function() end)
end

--- Listen on a port here and carry what connects to it to a place that the server can reach (as `ssh -L`).
---@async
---@param scope ciranda.Scope in which it runs
---@param options { host: string, to_port: integer, address: string?, port: integer? } see ciranda.ssh.forward
---@return ciranda.ssh.Forward
function Connection:forward(scope, options)
  return require("ciranda.ssh.forward").listen(scope, self, options)
end

local EXEC_OPTIONS = {
  stdin = true,
  on_stdout = true,
  on_stderr = true,
  timeout = true,
  first_byte = true,
  env = true,
  pty = true,
  max_output = true,
}

---@class ciranda.ssh.ExecOptions: ciranda.ssh.StartOptions
---@field stdin string|{ path: string }|(fun(): string?)|nil  what the command reads: bytes, a local file, or a function
---                                          that is called for more until it returns nil. Without it the command
---                                          reads end of file
---@field on_stdout (fun(bytes: string))?    called in the calling task with what comes, in order; the command waits
---                                          meanwhile
---@field on_stderr (fun(bytes: string))?
---@field timeout number?                    seconds until it is given up: TERM, then its channel is closed
---@field first_byte number?                 seconds until something must have come, or the command have ended
---@field max_output integer?                bytes kept of each stream; 64 MiB

---@class ciranda.ssh.Result
---@field code integer?    exit status
---@field signal string?   "KILL" and the like; both nil means that neither was received
---@field message string?  what the server said about the signal
---@field stdout string    "" where a function took it
---@field stderr string
local Result = {}
Result.__index = Result
Result.__name = "ciranda.ssh.Result"

--- How the command ended, for messages.
---@return string
function Result:reason()
  return self.code and ("exit status %d"):format(self.code)
    or self.signal and "SIG" .. self.signal
    or "no exit status"
end

--- Raise unless the exit status is 0.
---@return ciranda.ssh.Result self
--- Raises `failed`.
function Result:check()
  if self.code == 0 then
    return self
  end
  local said = self.stderr ~= "" and self.stderr or self.stdout
  said = said:sub(-2000):gsub("%s+$", "")
  errors.raise({
    code = "failed",
    op = "ssh.exec",
    target = self.target,
    message = ("%s ended with %s%s"):format(self.command, self:reason(), said ~= "" and ": " .. said or ""),
    result = self,
  })
  return self
end

--- Feed standard input. A command that ends without reading it all is no failure of ours.
local function feed(channel, stdin)
  local ok, err = pcall(function()
    if type(stdin) == "string" then
      channel:write(stdin)
    elseif type(stdin) == "table" then
      local file <close> = fs.open(stdin.path, "r")
      local piece = file:read(FILE_PIECE)
      while piece ~= "" do
        channel:write(piece)
        piece = file:read(FILE_PIECE)
      end
    else
      for piece in stdin do
        channel:write(piece)
      end
    end
    channel:close_stdin()
  end)
  if not ok and not (errors.is(err, "closed") and (channel.closed or channel.ended)) then
    error(err, 0)
  end
end

--- The common case, a command with no input and nobody who takes its output as it comes: everything happens in the
--- engine's callbacks, and the task is woken once. Returns nil when the server has no channel for it now.
---@private
function Connection:_exec_at_once(command, options)
  local slots = self.slots
  slots:acquire(SLOT)
  local kept = {} -- pieces by stream, with their `size`
  local limit = options.max_output or M.MAX_OUTPUT
  local request = self:_request(command, options)
  local channel, problem, err
  scheduler.await(function(done)
    local function on_close(close_err)
      slots:release()
      err = close_err
      done()
    end
    local function on_data(_, data, stream)
      if not data then
        return
      end
      local pieces = kept[stream]
      if not pieces then
        pieces = { size = 0 }
        kept[stream] = pieces
      end
      pieces.size = pieces.size + #data
      if pieces.size <= limit then
        pieces[#pieces + 1] = data
      elseif not problem then
        problem = stream
        channel:signal("TERM")
        channel:close(channels.CLOSE_MS)
      end
    end
    local operation = self.session:exec(request, function(open_err, raw)
      if open_err then
        return on_close(open_err)
      end
      channel = raw
      self.had_channel = true
      if not raw:on_close(on_close) then
        return on_close({ code = "closed", message = "the channel has been closed" })
      end
      raw:shutdown()
      raw:read_start(on_data)
    end)
    return function()
      if channel then
        channel:signal("TERM")
        channel:close(channels.CLOSE_MS)
        -- Its slot comes back when the server has closed it; nobody waits for that.
        return true
      end
      operation:cancel()
      return false
    end
  end, request)
  if not channel and err.reason == "channel_refused" then
    return nil
  end
  if problem then
    self:_too_much(command, problem == 1 and "stdout" or "stderr", limit)
  end
  if err then
    self:_raise(err)
  end
  local code, signal, message = channel:exit()
  return {
    code = code,
    signal = signal,
    message = message ~= "" and message or nil,
    stdout = kept[1] and table.concat(kept[1]) or "",
    stderr = kept[2] and table.concat(kept[2]) or "",
    command = command,
    target = self.label,
  }
end

---@private
function Connection:_too_much(command, stream, limit)
  errors.raise({
    code = "invalid",
    op = "ssh.exec",
    target = self.label,
    message = ("%s has written more than the %d bytes kept; give on_%s"):format(command, limit, stream),
  })
end

--- A reader whose first piece must come in time.
---@private
function Connection:_first(command, seconds)
  local first = true
  return function(channel)
    if not first then
      return channel:read()
    end
    first = false
    local values = table.pack(pcall(task.timeout, seconds, channel.read, channel))
    if values[1] then
      return table.unpack(values, 2, values.n)
    elseif not errors.is(values[2], "timeout") or values[2].phase then
      error(values[2], 0)
    end
    return errors.raise({
      code = "timeout",
      phase = "first_byte",
      op = "ssh.exec",
      target = self.label,
      message = ("%s has said nothing for %g s on %s; it was sent TERM and may live on"):format(
        command,
        seconds,
        self.label
      ),
    })
  end
end

---@private
function Connection:_exec(command, options)
  if not options.stdin and not options.first_byte and not options.on_stdout and not options.on_stderr then
    local result = self:_exec_at_once(command, options)
    if result then
      return setmetatable(result, Result)
    end
  end
  local channel = self:_start(command, options)
  -- Whatever ends this call early ends the command too, as far as can be.
  local _ <close> = setmetatable({}, {
    __close = function()
      channel:abort()
    end,
  })
  local stdin = options.stdin
  local scope <close> = task.scope()
  if stdin == nil or stdin == "" then
    channel:close_stdin()
  else
    scope:spawn("standard input", feed, channel, stdin)
  end
  local sinks = { stdout = options.on_stdout, stderr = options.on_stderr }
  local kept, sizes = { stdout = {}, stderr = {} }, { stdout = 0, stderr = 0 }
  local limit = options.max_output or M.MAX_OUTPUT
  local read = options.first_byte and self:_first(command, options.first_byte) or channel.read
  for data, stream in read, channel do
    local sink = sinks[stream]
    if sink then
      sink(data)
    else
      sizes[stream] = sizes[stream] + #data
      if sizes[stream] > limit then
        self:_too_much(command, stream, limit)
      end
      table.insert(kept[stream], data)
    end
  end
  local exit = channel:wait()
  scope:cancel("the command has ended")
  return setmetatable({
    code = exit.code,
    signal = exit.signal,
    message = exit.message,
    stdout = table.concat(kept.stdout),
    stderr = table.concat(kept.stderr),
    command = command,
    target = self.label,
  }, Result)
end

--- Run a command by the user's login shell and wait for its end and that of its output.
---@async
---@param command string
---@param options ciranda.ssh.ExecOptions?
---@return ciranda.ssh.Result result the exit status is data: `result:check()` raises
--- Raises `timeout`, `refused`, `invalid` (too much output), or what ended the connection.
function Connection:exec(command, options)
  options = options or {}
  if type(command) ~= "string" then
    errors.misuse(2, "connection:exec takes a command as a string, not a %s", type(command))
  end
  errors.check_options(options, EXEC_OPTIONS, "connection:exec")
  if not options.timeout then
    return self:_exec(command, options)
  end
  local ok, result = pcall(task.timeout, options.timeout, self._exec, self, command, options)
  if ok then
    return result
  end
  if errors.is(result, "timeout") and not result.phase then
    errors.raise({
      code = "timeout",
      phase = "exec",
      op = "ssh.exec",
      target = self.label,
      message = ("%s has not ended within %g s on %s; it was sent TERM and may live on"):format(
        command,
        options.timeout,
        self.label
      ),
      traceback = result.traceback,
    })
  end
  error(result, 0)
end

--- Start an SFTP client: `local files <close> = connection:sftp()`. See ciranda.ssh.sftp.
---@async
---@return ciranda.ssh.Sftp
--- Raises `refused` (the server has no SFTP), `protocol`, `timeout`, or what ended the connection.
function Connection:sftp()
  return require("ciranda.ssh.sftp").open(self, require("ciranda.ssh.transfer").START_TIMEOUT)
end

--- Send a file, or data, to a path there. See ciranda.ssh.transfer.
---@async
---@param source string|{ data: string }
---@param remote string
---@param options ciranda.ssh.TransferOptions?
function Connection:put(source, remote, options)
  return require("ciranda.ssh.transfer").put(self, source, remote, options)
end

--- Fetch a file from there; without a target its content is returned.
---@async
---@param remote string
---@param target string?
---@param options ciranda.ssh.TransferOptions?
---@return string
function Connection:get(remote, target, options)
  return require("ciranda.ssh.transfer").get(self, remote, target, options)
end

--- Send everything in a directory.
---@async
---@param directory string
---@param remote string
---@param options ciranda.ssh.TreeOptions?
function Connection:put_tree(directory, remote, options)
  return require("ciranda.ssh.transfer").put_tree(self, directory, remote, options)
end

--- Fetch everything in a directory there.
---@async
---@param remote string
---@param directory string
---@param options ciranda.ssh.TreeOptions?
function Connection:get_tree(remote, directory, options)
  return require("ciranda.ssh.transfer").get_tree(self, remote, directory, options)
end

--- Ask the server for signs of life: an interval without a byte from it is asked about, and after `count` unanswered
--- ones the connection ends with the error "lost".
---@param interval number seconds; 0 turns it off
---@param count integer? 3
function Connection:keepalive(interval, count)
  if not self.ended then
    self.session:keepalive(math.floor(interval * 1000), count or 3)
  end
end

--- Close the connection. Commands that still run are not ended by it.
function Connection:close()
  self.session:close("the connection has been closed")
end

Connection.__close = Connection.close

return M
