--- Local forwarding (as `ssh -L`): what connects to a port here reaches a place that the server can reach, a profiler
--- or a dashboard for example.

local errors = require("ciranda.io.error")
local log = require("ciranda.io.log")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

-- Bytes from a local client that may wait for the server, before the client has to.
local HIGH_WATER = 256 * 1024

---@class ciranda.ssh.Forward
---@field address string
---@field port integer    where it listens
---@field accepted integer  connections so far
---@field failed integer    of them, those whose place could not be reached
local Forward = {}
Forward.__index = Forward

--- Write to a local socket and wait for it.
local function write(client, data)
  scheduler.await(function(done)
    local request, problem = client:write(data, function(err)
      done(err)
    end)
    if not request then
      done(problem)
    end
  end, "a client of a forwarded port")
end

--- What the client sends, piece by piece, with back-pressure; nil at its end.
local function reader(client)
  local pieces, size, ended, waiting, paused = {}, 0, false, nil, false
  local function wake()
    local done = waiting
    waiting = nil
    if done then
      done()
    end
  end
  local function on_data(err, data)
    if data then
      table.insert(pieces, data)
      size = size + #data
      if size >= HIGH_WATER then
        paused = true
        client:read_stop()
      end
    else
      ended = true
      pieces.err = err
    end
    wake()
  end
  client:read_start(on_data)
  return function()
    while #pieces == 0 and not ended do
      scheduler.await(function(done)
        waiting = done
        return function()
          waiting = nil
          return true
        end
      end, "a client of a forwarded port")
    end
    local data = table.remove(pieces, 1)
    if data then
      size = size - #data
      if paused and size < HIGH_WATER / 2 and not client:is_closing() then
        paused = false
        client:read_start(on_data)
      end
    end
    return data
  end
end

--- Carry the bytes of one client until both directions have ended.
---@private
function Forward:_serve(client)
  local _ <close> = setmetatable({}, {
    __close = function()
      if not client:is_closing() then
        client:close()
      end
    end,
  })
  local ok, tunnel = pcall(self.connection.tunnel, self.connection, self.host, self.to_port)
  if not ok then
    if errors.is(tunnel, "cancelled") then
      error(tunnel, 0)
    end
    self.failed = self.failed + 1
    log.warn("%s:%d: %s", self.address, self.port, errors.text(tunnel))
    return
  end
  local channel <close> = tunnel
  local scope <close> = task.scope()
  scope:spawn("to " .. self.host, function()
    for data in reader(client) do
      channel:write(data)
    end
    channel:close_stdin()
  end)
  for data in channel.read, channel do
    write(client, data)
  end
  -- The other side has ended: tell the client, which may still be sending.
  if not client:is_closing() then
    client:shutdown()
  end
end

--- Listen here, and carry each connection to a place over the SSH connection.
---@async
---@param scope ciranda.Scope  in which the forwarding runs: it ends with it
---@param connection ciranda.ssh.Connection
---@param options { host: string, to_port: integer, address: string?, port: integer? } the place as the server sees it;
---  where to listen: 127.0.0.1, and a free port when none is given
---@return ciranda.ssh.Forward forward `forward:close()` ends it earlier
--- Raises `busy` or `permission` when the port cannot be had.
function M.listen(scope, connection, options)
  errors.check_options(
    options,
    { host = true, to_port = true, address = true, port = true },
    "forward.listen"
  )
  local address = options.address or "127.0.0.1"
  local listener = uv.new_tcp()
  local self = setmetatable({
    connection = connection,
    host = options.host,
    to_port = options.to_port,
    address = address,
    listener = listener,
    accepted = 0,
    failed = 0,
  }, Forward)
  local waiting, queue = nil, {}
  local ok, problem = listener:bind(address, options.port or 0)
  if ok then
    ok, problem = listener:listen(128, function(err)
      if err then
        return
      end
      local client = uv.new_tcp()
      listener:accept(client)
      client:nodelay(true)
      table.insert(queue, client)
      local done = waiting
      waiting = nil
      if done then
        done()
      end
    end)
  end
  if not ok then
    listener:close()
    errors.raise(errors.wrap(problem, {
      op = "ssh.forward",
      target = ("%s:%d"):format(address, options.port or 0),
    }))
  end
  self.port = listener:getsockname().port
  local started = false
  local going = scope:spawn(("forwarding of port %d"):format(self.port), function()
    local _ <close> = setmetatable({}, {
      __close = function()
        self:close()
        for _, client in ipairs(queue) do
          client:close()
        end
      end,
    })
    local clients <close> = task.scope()
    started = true
    while not self.closed do
      while queue[1] do
        self.accepted = self.accepted + 1
        clients:spawn("a client of port " .. self.port, function(client)
          local good, err = pcall(self._serve, self, client)
          if not good then
            if errors.is_fatal(err) then
              error(err, 0)
            end
            log.debug("%s:%d: %s", self.address, self.port, errors.text(err))
          end
        end, table.remove(queue, 1))
      end
      scheduler.await(function(done)
        waiting = done
        self.wake = done
        return function()
          waiting, self.wake = nil, nil
          return true
        end
      end, ("connections to port %d"):format(self.port))
    end
    clients:cancel("the forwarding is closed")
  end)
  -- A task that is cancelled before it runs cleans nothing up: it is seen to begin.
  local ok_so_far, err = pcall(function()
    while not started and not going:ended() do
      task.yield()
    end
  end)
  if not ok_so_far or not started then
    self:close()
    errors.raise(ok_so_far and { code = "cancelled", message = "the scope has ended" } or err)
  end
  return self
end

--- Stop listening and end what is being carried.
function Forward:close()
  if self.closed then
    return
  end
  self.closed = true
  self.listener:close()
  local wake = self.wake
  self.wake = nil
  if wake then
    wake()
  end
end

Forward.__close = Forward.close

return M
