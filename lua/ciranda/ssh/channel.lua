--- A command, a subsystem or a tunnel that runs on a connection.
---
--- Output is taken from the network only while somebody reads: a command that writes faster waits. Standard output and
--- standard error are told apart, and bytes are kept as they are.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")

local M = {}

-- Bytes that are kept for a reader who does not come, before the command has to wait; and when it goes on.
local HIGH_WATER, LOW_WATER = 256 * 1024, 64 * 1024

--- Milliseconds that a server has to answer a close before its channel is left to the end of the connection.
M.CLOSE_MS = 10000

local STREAMS = { "stdout", "stderr" }

---@class ciranda.ssh.Exit
---@field code integer?    exit status; nil when a signal ended the command, and when none was received
---@field signal string?   "KILL" and the like, without SIG
---@field message string?  what the server said about the signal

---@class ciranda.ssh.Channel
---@field what string      for messages
---@field target string    the host, for messages
---@field raw userdata     the engine's channel
---@field private chunks table
local Channel = {}
Channel.__index = Channel

---@param raw userdata
---@param target string
---@param what string
---@param on_close fun(err: table?)
---@return ciranda.ssh.Channel
function M.new(raw, target, what, on_close)
  local self = setmetatable({
    raw = raw,
    target = target,
    what = what,
    chunks = {},
    first = 1,
    last = 0,
    size = 0,
    reading = false,
  }, Channel)
  local function closed(err)
    self.closed = true
    self.err = self.err or err
    self:_wake()
    on_close(err)
  end
  if not raw:on_close(closed) then
    closed(select(2, raw:status()) or { code = "closed", message = "the channel has been closed" })
  end
  return self
end

function Channel:__tostring()
  return ("%s on %s (%s)"):format(self.what, self.target, self.closed and "closed" or "open")
end

---@private
function Channel:_wake()
  local waiting = self.waiting
  self.waiting = nil
  if waiting then
    waiting()
  end
end

--- Raise what ended the channel, with the host named.
---@private
function Channel:_raise(err)
  errors.raise(errors.wrap(errors.wrap(err), { op = "ssh.exec", target = self.target }))
end

---@private
function Channel:_start_reading()
  self.on_data = self.on_data
    or function(err, data, stream)
      if data then
        local last = self.last + 1
        self.last = last
        self.chunks[last] = { data, STREAMS[stream] }
        self.size = self.size + #data
        if self.size >= HIGH_WATER and self.reading then
          self.reading = false
          self.raw:read_stop()
        end
      else
        self.ended = true
        self.err = self.err or err
      end
      self:_wake()
    end
  self.reading = true
  if not self.raw:read_start(self.on_data) then
    self.ended = true
  end
end

---@private
function Channel:_wait(what)
  scheduler.await(function(done)
    self.waiting = done
    return function()
      self.waiting = nil
      return true
    end
  end, what)
end

--- The next piece of output, in the order in which it came. One task reads a channel.
---@async
---@return string? data nil at the end of both streams
---@return "stdout"|"stderr"|nil stream
--- Raises what ended the connection, if that came first: `closed`, `reset`, `lost`, ...
function Channel:read()
  while true do
    local first = self.first
    local chunk = self.chunks[first]
    if chunk then
      self.chunks[first] = nil
      self.first = first + 1
      self.size = self.size - #chunk[1]
      if not self.reading and not self.ended and self.size <= LOW_WATER then
        self:_start_reading()
      end
      return chunk[1], chunk[2]
    end
    if self.ended then
      if self.err then
        self:_raise(self.err)
      end
      return nil
    end
    if not self.reading then
      self:_start_reading()
    end
    if not self.ended and not self.chunks[self.first] then
      self:_wait("output of " .. self.what)
    end
  end
end

--- Send bytes to the command's standard input; returns when they are on their way.
---@async
---@param data string
--- Raises `closed` when the command takes no more, or what ended the connection.
function Channel:write(data)
  local err = scheduler.await(function(done)
    local accepted = self.raw:write(data, function(err)
      done(nil, err)
    end)
    if not accepted then
      local _, fault = self.raw:status()
      done(nil, fault or { code = "closed", message = ("%s takes no more input"):format(self.what) })
    end
    -- What has been queued is sent with the rest or goes with the channel: nobody need wait for it.
    return function()
      return true
    end
  end, "input of " .. self.what)
  if err then
    self:_raise(err)
  end
end

--- End the command's standard input, after what has been written.
function Channel:close_stdin()
  self.raw:shutdown()
end

--- Send a signal. The protocol has no answer to it: OpenSSH's server ignores it for logins as root and for forced
--- commands, and says nothing. `fleet:signal` goes by the guard, which confirms it.
---@param name string "TERM", "INT", "KILL", "USR1", ...; "SIGTERM" is understood
---@return boolean sent false when the command has ended
function Channel:signal(name)
  return self.raw:signal((name:gsub("^SIG", "")))
end

--- Tell a new size of the terminal.
---@param columns integer
---@param rows integer
function Channel:resize(columns, rows)
  self.raw:resize(columns, rows)
end

--- Wait for the end of the command. Read its output first: one that nobody reads may never end. A child that it left
--- behind may hold its output open for longer.
---@async
---@return ciranda.ssh.Exit exit both code and signal are nil when none was received
--- Raises what ended the connection, if that came first.
function Channel:wait()
  local code, signal, message = self.raw:exit()
  if not code and not signal and not self.closed then
    local err
    err, code, signal, message = scheduler.await(function(done)
      local waits = self.raw:on_exit(function(...)
        done(nil, ...)
      end)
      if not waits then
        done(nil, nil, self.raw:exit())
      end
      return function()
        return true
      end
    end, "the end of " .. self.what)
    if err then
      self:_raise(err)
    end
  elseif self.err and not code and not signal then
    self:_raise(self.err)
  end
  return { code = code, signal = signal, message = message ~= "" and message or nil }
end

--- Close the channel. Unread output is dropped. The command is not ended by it, but loses its streams.
function Channel:close()
  self.raw:close(M.CLOSE_MS)
end

--- End the command, as far as a channel can: TERM, then the channel is closed. For clean-up; does not wait.
function Channel:abort()
  if not self.closed then
    self.raw:signal("TERM")
    self:close()
  end
end

Channel.__close = Channel.close

return M
