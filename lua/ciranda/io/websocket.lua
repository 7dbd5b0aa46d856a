--- WebSocket (RFC 6455): the handshake, and a connection that sends and receives messages by callbacks.
---
---     local ws = websocket.connect { url = "wss://example.com/x", headers = { Authorization = "Bearer ..." } }
---     ws:start { on_message = function(data) end, on_end = function(code, reason) end }
---     ws:send("hello")
---     ws:close()
---
--- Messages are bounded, pings are answered, a close is answered and waited for. What has been sent and is not with
--- the kernel yet is counted in `pending`: who sends much waits for `on_drain`.

local core = require("ciranda.core.http")
local crypto = require("ciranda.io.crypto")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local frame = require("ciranda.io.websocket_frame")
local http = require("ciranda.io.http")
local task = require("ciranda.task")
local url = require("ciranda.io.url")
local uv = require("luv")

local M = {}

--- Seconds for the connection, and from there to the answer to the handshake.
M.CONNECT_TIMEOUT = 15
M.TIMEOUT = 30

--- Seconds that the peer has to answer a close.
M.CLOSE_TIMEOUT = 5

--- Bytes of a message.
M.MAX_MESSAGE = 1 << 20

-- Bytes of the answer to a handshake, and of the text with which one is refused.
local MAX_HEAD, MAX_REFUSAL = 32 * 1024, 4096

-- Bytes that may wait to be sent when a ping is to be answered: a peer that pings and does not read is no good.
local MAX_UNREAD = 8 << 20

-- Of RFC 6455, section 1.3.
local GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

local function accept_of(key)
  return crypto.base64(crypto.digest("sha1", key .. GUID))
end

---@class ciranda.websocket.Stream what carries the bytes: a socket of the engine's, or luv's
---@field read_start fun(self, callback: fun(err: any, data: string?))
---@field read_stop fun(self)
---@field write fun(self, data: string, callback: fun(err: any)): boolean
---@field close fun(self)

---@class ciranda.WebSocket
---@field pending integer bytes that were sent and are not with the kernel yet
---@field protocol string? the subprotocol that was agreed on
---@field private stream ciranda.websocket.Stream
local Socket = {}
Socket.__index = Socket
Socket.__name = "ciranda.WebSocket"

--- Make a connection of a stream after the handshake.
---@param stream ciranda.websocket.Stream
---@param options { server: boolean?, early: string?, max_message: integer?, protocol: string? }? server: what comes is
---  masked and what is sent is not; early: bytes that came with the handshake
---@return ciranda.WebSocket
function M.new(stream, options)
  options = options or {}
  return setmetatable({
    stream = stream,
    server = options.server or false,
    early = options.early or "",
    protocol = options.protocol,
    reader = frame.reader({
      masked = options.server or false,
      max_message = options.max_message or M.MAX_MESSAGE,
    }),
    out = {},
    pending = 0,
    state = "open",
    paused = false,
  }, Socket)
end

local flush

--- The end, told once.
local function finish(self, code, reason)
  if self.state == "ended" then
    return
  end
  self.state = "ended"
  if self.timer and not self.timer:is_closing() then
    self.timer:close()
  end
  self.out, self.pending = {}, 0
  self.stream:close()
  if self.on_end then
    self.on_end(code, reason)
  end
end

local function send_frame(self, opcode, payload)
  local bytes = frame.encode(opcode, payload, not self.server and crypto.random(4) or nil)
  self.out[#self.out + 1] = bytes
  self.pending = self.pending + #bytes
  flush(self)
end

--- Give the kernel what there is, one write at a time.
function flush(self)
  if self.writing or #self.out == 0 or self.state == "ended" then
    return
  end
  local data = table.concat(self.out)
  self.out = {}
  self.writing = true
  local open = self.stream:write(data, function(err)
    self.writing = false
    if self.state == "ended" then
      return
    elseif err then
      return finish(self, frame.ABNORMAL, errors.text(errors.wrap(err)))
    end
    self.pending = self.pending - #data
    flush(self)
    if self.pending == 0 and self.last_sent then
      return finish(self, self.last_sent.code, self.last_sent.reason)
    elseif self.on_drain and self.state == "open" then
      self.on_drain()
    end
  end)
  if not open then
    finish(self, frame.ABNORMAL, "the connection is closed")
  end
end

--- Say that we close, and give the peer a moment to do the same.
local function begin_close(self, code, reason)
  if self.state ~= "open" then
    return
  end
  send_frame(self, frame.CLOSE, frame.close_payload(code, reason))
  if self.state == "ended" then
    return
  end
  self.state = "closing"
  self.timer = uv.new_timer()
  self.timer:start(math.ceil(M.CLOSE_TIMEOUT * 1000), 0, function()
    finish(self, code, reason or "")
  end)
end

local function on_control(self, opcode, payload)
  if opcode == frame.PING then
    if self.pending > MAX_UNREAD then
      return finish(self, frame.ABNORMAL, "the peer does not read what it is sent")
    end
    if self.state == "open" then
      send_frame(self, frame.PONG, payload)
    end
  elseif opcode == frame.CLOSE then
    local code, reason = frame.parse_close(payload)
    if self.state == "open" then
      begin_close(self, code == frame.NO_STATUS and frame.NORMAL or code)
      self.last_sent = { code = code, reason = reason } -- the end comes when our answer has gone
    else
      finish(self, code, reason)
    end
  end
end

local function take(self, bytes)
  local ok, err = pcall(self.reader.feed, self.reader, bytes, function(opcode, payload)
    if opcode >= frame.CLOSE then
      on_control(self, opcode, payload)
    elseif self.state == "open" then
      self.on_message(payload, opcode)
    end
    return self.state ~= "ended" and not self.paused
  end)
  if not ok then
    if not errors.is(err, "protocol") then
      error(err, 0)
    end
    if self.state == "open" then
      begin_close(self, err.close_code or frame.PROTOCOL_ERROR, err.message)
      self.last_sent = { code = frame.ABNORMAL, reason = err.message }
    else
      finish(self, frame.ABNORMAL, err.message)
    end
    self.stream:read_stop()
  end
end

local function read(self)
  self.stream:read_start(function(err, data)
    if self.state == "ended" then
      return
    elseif data then
      return take(self, data)
    end
    local reason = err and errors.text(errors.wrap(err)) or "the connection ended without a close"
    finish(self, frame.ABNORMAL, reason)
  end)
end

--- Begin to receive. All three are called in callbacks of the loop and must not wait.
---@param handlers { on_message: fun(data: string, opcode: integer), on_end: fun(code: integer, reason: string)?,
---  on_drain: fun()? } on_end: once, with the peer's close code, or 1006 when there was none
function Socket:start(handlers)
  self.on_message, self.on_end, self.on_drain = handlers.on_message, handlers.on_end, handlers.on_drain
  local early = self.early
  self.early = ""
  if early ~= "" then
    take(self, early)
  end
  if self.state ~= "ended" and not self.paused then
    read(self)
  end
end

--- Send one binary message.
---@param data string
---@return boolean accepted false when the connection is closed or closing
function Socket:send(data)
  if self.state ~= "open" then
    return false
  end
  send_frame(self, frame.BINARY, data)
  return self.state == "open"
end

--- No messages until `resume`.
function Socket:pause()
  if not self.paused and self.state == "open" then
    self.paused = true
    self.stream:read_stop()
  end
end

--- Go on where `pause` stopped. May be called from within `on_message`.
function Socket:resume()
  if not self.paused then
    return
  end
  self.paused = false
  if self.resuming or self.state == "ended" then
    return
  end
  -- What has been read already comes first, on a later turn: never from inside the caller.
  self.resuming = true
  local timer = uv.new_timer()
  timer:start(0, 0, function()
    timer:close()
    self.resuming = false
    if self.paused or self.state == "ended" then
      return
    end
    take(self, "")
    if not self.paused and self.state ~= "ended" and not (self.last_sent and self.state == "closing") then
      read(self)
    end
  end)
end

--- Close: what was sent goes out first. `on_end` follows.
---@param code integer? 1000
---@param reason string?
function Socket:close(code, reason)
  if self.state ~= "open" then
    return
  end
  begin_close(self, code or frame.NORMAL, reason)
  if self.paused then -- the peer's answer is behind what was not read
    self.last_sent = { code = code or frame.NORMAL, reason = reason or "" }
  end
end

--- End the connection now, without a word.
function Socket:abort()
  finish(self, frame.ABNORMAL, "the connection was given up")
end

Socket.__close = Socket.abort

-- The handshake ----------------------------------------------------------------------------------------------------

local function split_url(address)
  local scheme, place = address:match("^(wss?)://([^/?#]+)")
  if not scheme then
    errors.misuse(3, "websocket.connect: %q is no ws:// or wss:// URL", address)
  end
  local target = address:sub(#scheme + 3 + #place + 1)
  if target:sub(1, 1) ~= "/" then
    target = "/" .. target
  end
  return (scheme == "wss" and "https://" or "http://") .. place, place, target
end

local function request_text(options, place, target, key)
  local lines = {
    ("GET %s HTTP/1.1"):format(target),
    "Host: " .. place,
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " .. key,
    "User-Agent: ciranda/" .. engine.version,
  }
  if options.protocol then
    lines[#lines + 1] = "Sec-WebSocket-Protocol: " .. options.protocol
  end
  local names = {}
  for name in pairs(options.headers or {}) do
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    if (name .. options.headers[name]):find("[\r\n%z]") then
      errors.misuse(3, "websocket.connect: the header %s has a line break", name)
    end
    lines[#lines + 1] = ("%s: %s"):format(name, options.headers[name])
  end
  return table.concat(lines, "\r\n") .. "\r\n\r\n"
end

--- The status and the headers of an answer's head.
local function parse_head(head)
  local status = math.tointeger(tonumber(head:match("^HTTP/1%.1 (%d%d%d)[ \r]")))
  local headers = {}
  for name, value in head:gmatch("\r\n([^:\r\n]+):[ \t]*([^\r\n]*)") do
    headers[#headers + 1] = { name, (value:gsub("%s+$", "")) }
  end
  return status, http.headers(headers)
end

-- Codes of ciranda.io.error for a refusal.
local REFUSALS = { [401] = "auth", [403] = "permission", [404] = "not_found", [429] = "rate_limit" }

--- Read the head of the answer, and of a refusal what it says.
local function read_answer(stream)
  return task.await(function(done)
    local data = ""
    local function finish_with(err)
      stream:read_stop()
      done(err, data)
    end
    stream:read_start(function(err, piece)
      if not piece then
        local _, last = data:find("\r\n\r\n", 1, true)
        return finish_with(not last and (err and errors.wrap(err) or errors.new({
          code = "closed",
          message = "the connection ended before the answer",
        })) or nil)
      end
      data = data .. piece
      local _, last = data:find("\r\n\r\n", 1, true)
      if not last and #data > MAX_HEAD then
        return finish_with(errors.new({ code = "protocol", message = "the answer's head is too large" }))
      elseif last then
        local status, headers = parse_head(data:sub(1, last))
        local length = tonumber(headers["content-length"] or "") or 0
        if status == 101 or #data - last >= math.min(length, MAX_REFUSAL) then
          finish_with()
        end
      end
    end)
    return function()
      stream:read_stop()
      return true
    end
  end, "the answer to a handshake")
end

local function write(stream, data)
  task.await(function(done)
    local open = stream:write(data, function(err)
      done(err and errors.wrap(err))
    end)
    if not open then
      done(errors.new({ code = "closed", message = "the connection was closed" }))
    end
    return function()
      stream:close()
      return false
    end
  end, "a handshake to be sent")
end

--- Is the answer what the handshake asked for? Raises what is wrong with it.
local function judge(data, key, options)
  local _, last = data:find("\r\n\r\n", 1, true)
  local status, headers = parse_head(data:sub(1, last))
  if status ~= 101 then
    local text = data:sub(last + 1, last + MAX_REFUSAL):gsub("%s+", " "):match("^ ?(.-) ?$")
    errors.raise({
      code = REFUSALS[status]
        or status and status >= 500 and "unavailable"
        or status and "invalid"
        or "protocol",
      status = status,
      message = status
          and ("the upgrade was refused with HTTP %d%s"):format(status, text ~= "" and ": " .. text or "")
        or "the answer is not HTTP/1.1",
    })
  end
  local function has(name, wanted)
    return (headers[name] or ""):lower():find(wanted, 1, true) ~= nil
  end
  if not has("upgrade", "websocket") or not has("connection", "upgrade") then
    errors.raise({ code = "protocol", message = "the answer 101 does not upgrade to WebSocket" })
  elseif headers["sec-websocket-accept"] ~= accept_of(key) then
    errors.raise({
      code = "protocol",
      message = "the answer's Sec-WebSocket-Accept is wrong: is a cache in between?",
    })
  elseif headers["sec-websocket-extensions"] then
    errors.raise({ code = "protocol", message = "the answer has extensions that were not asked for" })
  elseif (headers["sec-websocket-protocol"] or nil) ~= options.protocol then
    errors.raise({ code = "protocol", message = "the answer's subprotocol is not the one that was asked for" })
  end
  return data:sub(last + 1)
end

local function open_stream(base, options)
  return task.await(function(done)
    local handle = core.connect({
      url = base,
      timeout_ms = math.ceil((options.connect_timeout or M.CONNECT_TIMEOUT) * 1000),
      ca_file = options.ca_file,
      proxy = options.proxy,
    }, function(err, stream)
      done(err and errors.wrap(err), stream)
    end)
    return function()
      handle:cancel()
      return false
    end
  end, "a connection to " .. base)
end

local OPTIONS = {}
for name in ([[url headers protocol connect_timeout timeout ca_file proxy max_message]]):gmatch("%S+") do
  OPTIONS[name] = true
end

---@class ciranda.websocket.Options
---@field url string              ws:// or wss://
---@field headers table<string, string>?
---@field protocol string?        the subprotocol, which the server must agree to
---@field connect_timeout number? seconds to resolve, connect and finish TLS; 15
---@field timeout number?         seconds from there to the answer; 30
---@field ca_file string?
---@field proxy string?
---@field max_message integer?    bytes; 1 MiB

--- Connect and shake hands. Nothing is received before `start`.
---@async
---@param options ciranda.websocket.Options
---@return ciranda.WebSocket
--- Raises `resolve`, `refused`, `unreachable`, `timeout`, `reset`, `closed`, `protocol`; and for a refusal, with its
--- HTTP `status`: `auth` (401), `permission` (403), `not_found` (404), `rate_limit` (429), `unavailable` (5xx),
--- `invalid`. Each has `phase`: "connect" (or the engine's own) or "handshake".
function M.connect(options)
  errors.check_options(options, OPTIONS, "websocket.connect")
  local base, place, target = split_url(options.url)
  local key = crypto.base64(crypto.random(16))
  local text = request_text(options, place, target, key)
  local shown = url.shown(options.url)
  local stream
  local function step(phase, fn, ...)
    local result = table.pack(pcall(fn, ...))
    if not result[1] then
      if stream then
        stream:close()
      end
      local err = errors.wrap(result[2], { op = "websocket.connect", target = shown })
      if err.code ~= "cancelled" then
        err.phase = err.phase or phase
        err.message = ("%s: %s"):format(shown, err.message)
      end
      error(err, 0)
    end
    return table.unpack(result, 2, result.n)
  end
  stream = step("connect", open_stream, base, options)
  local early = step("handshake", task.timeout, options.timeout or M.TIMEOUT, function()
    write(stream, text)
    return judge(read_answer(stream), key, options)
  end)
  return M.new(stream, { early = early, max_message = options.max_message, protocol = options.protocol })
end

--- A luv stream in the shape of the engine's.
local function of_luv(handle)
  local stream = {}
  function stream:read_start(callback) -- luacheck: ignore 212
    if not handle:is_closing() then
      handle:read_start(callback)
    end
  end
  function stream:read_stop() -- luacheck: ignore 212
    if not handle:is_closing() then
      handle:read_stop()
    end
  end
  function stream:write(data, callback) -- luacheck: ignore 212
    return not handle:is_closing() and handle:write(data, callback) ~= nil
  end
  function stream:close() -- luacheck: ignore 212
    if not handle:is_closing() then
      handle:close()
    end
  end
  return stream
end

--- The headers that answer a client's handshake, for a server's `upgrade`; nil and why it is none.
---@param headers ciranda.http.Headers of the request
---@param protocol string? the subprotocol that is spoken here
---@return { [1]: string, [2]: string }[]? headers, string? problem
function M.answer(headers, protocol)
  local key = headers["sec-websocket-key"]
  if (headers["upgrade"] or ""):lower() ~= "websocket" or not key then
    return nil, "a WebSocket handshake is expected"
  elseif headers["sec-websocket-version"] ~= "13" then
    return nil, "WebSocket of version 13 is expected"
  elseif protocol and headers["sec-websocket-protocol"] ~= protocol then
    return nil, ("the subprotocol %s is expected"):format(protocol)
  end
  local answer = { { "Upgrade", "websocket" }, { "Sec-WebSocket-Accept", accept_of(key) } }
  if protocol then
    answer[#answer + 1] = { "Sec-WebSocket-Protocol", protocol }
  end
  return answer
end

--- The server's side of a connection whose handshake was answered.
---@param descriptor integer of an upgraded connection (see ciranda.io.server)
---@param options { early: string?, max_message: integer?, protocol: string? }?
---@return ciranda.WebSocket
--- Raises `io`.
function M.accept(descriptor, options)
  options = options or {}
  local handle = uv.new_tcp()
  local ok, problem = handle:open(descriptor)
  if not ok then
    handle:close()
    errors.raise(errors.wrap(problem, { op = "websocket.accept" }))
  end
  return M.new(of_luv(handle), {
    server = true,
    early = options.early,
    max_message = options.max_message,
    protocol = options.protocol,
  })
end

return M
