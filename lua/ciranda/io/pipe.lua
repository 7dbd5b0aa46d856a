--- Reading and writing a stream of luv (a pipe, a socket, a terminal) from a task, with back-pressure both
--- ways.

local uv = require("luv")
local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")

local M = {}

-- Bytes that are kept for a reader who does not come, before the stream is left to fill up.
local HIGH_WATER = 256 * 1024

---@class ciranda.Reader
local Reader = {}
Reader.__index = Reader

--- Read from a stream. It is read in advance up to a limit, then the writer at the other end has to wait.
---@param stream userdata a uv_stream_t; the reader owns and closes it
---@param what string for messages
---@param on_end fun()? called once when the stream has ended, failed or been closed
---@return ciranda.Reader
function M.reader(stream, what, on_end)
  return setmetatable({
    stream = stream,
    what = what,
    on_end = on_end,
    chunks = {},
    first = 1,
    last = 0,
    size = 0,
    ended = false,
    reading = false,
  }, Reader)
end

local function finish(self, err)
  if self.ended then
    return
  end
  self.ended = true
  self.err = err
  self.reading = false
  if not self.stream:is_closing() then
    self.stream:close()
  end
  local waiting = self.waiting
  self.waiting = nil
  if waiting then
    waiting()
  end
  if self.on_end then
    self.on_end()
  end
end

--- Let the stream be read from now on. Called by `read`; before that nothing is taken from it.
function Reader:start()
  if self.reading or self.ended then
    return
  end
  self.reading = true
  local ok, message, name = self.stream:read_start(function(err, chunk)
    if err or not chunk then
      return finish(self, err)
    end
    if self.sink then
      return self.sink(chunk)
    end
    self.last = self.last + 1
    self.chunks[self.last] = chunk
    self.size = self.size + #chunk
    local waiting = self.waiting
    self.waiting = nil
    if waiting then
      waiting()
    end
    if self.size >= HIGH_WATER and self.reading then
      self.reading = false
      self.stream:read_stop()
    end
  end)
  if not ok then
    finish(self, name or message)
  end
end

--- Take the next bytes, as many as have come.
---@async
---@return string? chunk nil at the end
function Reader:read()
  while true do
    if self.first <= self.last then
      local chunk = self.chunks[self.first]
      self.chunks[self.first] = nil
      self.first = self.first + 1
      self.size = self.size - #chunk
      if not self.reading and self.size < HIGH_WATER / 2 then
        self:start()
      end
      return chunk
    end
    if self.ended then
      if self.err then
        local name = tostring(self.err)
        errors.raise({
          code = errors.code_of(name),
          op = "read",
          target = self.what,
          message = "reading failed: " .. name,
        })
      end
      return nil
    end
    if self.waiting then
      errors.misuse(errors.level_outside("ciranda/io/"), "%s: another task is reading it already", self.what)
    end
    self:start()
    scheduler.await(function(done)
      if self.first <= self.last or self.ended then
        done()
        return nil
      end
      self.waiting = done
      return function()
        self.waiting = nil
        return true
      end
    end, "data from " .. self.what)
  end
end

--- Put bytes back in front of what comes next.
---@param chunk string
function Reader:unread(chunk)
  if chunk ~= "" then
    self.first = self.first - 1
    self.chunks[self.first] = chunk
    self.size = self.size + #chunk
  end
end

--- Read all up to the end.
---@async
---@return string
function Reader:read_all()
  local parts = {}
  for chunk in self:values() do
    parts[#parts + 1] = chunk
  end
  return table.concat(parts)
end

--- `for chunk in reader:values() do`
---@async
function Reader:values()
  return function()
    return self:read()
  end
end

--- Give every chunk to a function instead, which must not wait.
---@param sink fun(chunk: string)
function Reader:drain(sink)
  self.sink = sink
  self:start()
end

--- Read up to the end and throw it away, so that the writer is not held up.
function Reader:discard()
  self.chunks, self.first, self.last, self.size = {}, 1, 0, 0
  self:drain(function() end)
end

--- Stop reading and close the stream.
function Reader:close()
  finish(self, nil)
end

Reader.__close = Reader.close

--- A reader of standard input where that is no file.
local function open_input(kind)
  -- Opened anew where it can be (a socket cannot): who shares ours does not find it nonblocking.
  local fd = uv.fs_open("/dev/stdin", "r", 0) or 0
  local stream = kind == "tty" and assert(uv.new_tty(fd, true))
    or kind == "tcp" and uv.new_tcp()
    or uv.new_pipe(false)
  if kind ~= "tty" then
    assert(stream:open(fd))
  end
  return M.reader(stream, "standard input")
end

--- Everything that standard input holds. While somebody is still writing it other tasks go on, and this one can be
--- cancelled.
---@async
---@param limit integer bytes
---@return string
-- Raises "invalid" when it holds more, else what reading raises.
function M.input(limit)
  local kind = uv.guess_handle(0)
  local reader <close> = kind ~= "file" and open_input(kind) or nil
  local function read()
    if reader then
      return reader:read()
    end
    return io.read(HIGH_WATER)
  end
  local parts, size = {}, 0
  for piece in read do
    parts[#parts + 1], size = piece, size + #piece
    if size > limit then
      errors.raise({
        code = "invalid",
        op = "read",
        target = "standard input",
        message = ("it holds more than the %d bytes allowed"):format(limit),
      })
    end
  end
  return table.concat(parts)
end

---@class ciranda.Writer
local Writer = {}
Writer.__index = Writer

-- The host ignores SIGPIPE. In plain Lua a handler that does nothing keeps a write to a closed pipe from
-- killing us.
local sigpipe

local function survive_sigpipe()
  if not sigpipe and not package.preload["ciranda.core.engine"] then
    sigpipe = uv.new_signal()
    sigpipe:start("sigpipe", function() end)
    sigpipe:unref()
  end
end

--- Write to a stream.
---@param stream userdata a uv_stream_t; the writer owns and closes it
---@param what string for messages
---@return ciranda.Writer
function M.writer(stream, what)
  survive_sigpipe()
  return setmetatable({ stream = stream, what = what, closed = false }, Writer)
end

--- Write bytes; returns when the system has taken them. Raises "closed" when nobody reads them any more.
---@async
---@param data string
function Writer:write(data)
  if type(data) ~= "string" then
    errors.misuse(
      errors.level_outside("ciranda/io/"),
      "%s: write: a string expected, got %s",
      self.what,
      type(data)
    )
  end
  if self.closed then
    errors.raise({ code = "closed", op = "write", target = self.what, message = "it was closed" })
  end
  scheduler.await(function(done)
    local request, message, name = self.stream:write(data, function(err)
      if err then
        return done(errors.new({
          code = errors.code_of(err),
          op = "write",
          target = self.what,
          message = err == "EPIPE" and "nobody reads it any more (EPIPE)" or "writing failed: " .. err,
        }))
      end
      return done()
    end)
    if not request then
      done(errors.new({
        code = errors.code_of(name),
        op = "write",
        target = self.what,
        message = tostring(message),
      }))
    end
    return function()
      self:close() -- what was not written yet is given up; the callback follows
      return not request
    end
  end, "writing to " .. self.what)
end

--- Close the stream: the reader at the other end sees its end.
function Writer:close()
  if not self.closed then
    self.closed = true
    if not self.stream:is_closing() then
      self.stream:close()
    end
  end
end

return M
