--- The frames of WebSocket (RFC 6455, section 5): bytes to messages and back. Nothing here waits.
---
---     local reader = frame.reader { masked = false, max_message = 65536 }
---     reader:feed(bytes, function(opcode, payload) end)
---     local bytes = frame.encode(frame.BINARY, "hello", crypto.random(4))

local errors = require("ciranda.io.error")

local M = {}

M.CONTINUATION, M.TEXT, M.BINARY, M.CLOSE, M.PING, M.PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

--- Close codes (section 7.4.1).
M.NORMAL, M.GOING_AWAY, M.PROTOCOL_ERROR, M.NO_STATUS, M.ABNORMAL, M.TOO_BIG =
  1000, 1001, 1002, 1005, 1006, 1009

--- Bytes of a control frame's payload (section 5.5).
M.MAX_CONTROL = 125

-- Words of eight bytes that are masked in one step; string.unpack puts each on the stack.
local WORDS = 64
local BLOCK = ("<" .. ("i8"):rep(WORDS))

--- Mask or unmask: the same operation (section 5.3).
---@param data string
---@param key string four bytes
---@return string
function M.mask(data, key)
  local word = string.unpack("<i8", key .. key)
  local pieces, position, size = {}, 1, #data
  while size - position + 1 >= WORDS * 8 do
    local words = { string.unpack(BLOCK, data, position) }
    for place = 1, WORDS do
      words[place] = words[place] ~ word
    end
    pieces[#pieces + 1] = string.pack(BLOCK, table.unpack(words, 1, WORDS))
    position = position + WORDS * 8
  end
  while position <= size do
    local rest = data:sub(position, position + 7)
    local value = string.unpack("<i8", rest .. ("\0"):rep(8 - #rest)) ~ word
    pieces[#pieces + 1] = string.pack("<i8", value):sub(1, #rest)
    position = position + 8
  end
  return table.concat(pieces)
end

--- One frame.
---@param opcode integer
---@param payload string
---@param key string? four random bytes: what a client sends is masked
---@param more boolean? the message goes on in another frame
---@return string
function M.encode(opcode, payload, key, more)
  local size, bit = #payload, key and 0x80 or 0
  local first = opcode | (more and 0 or 0x80)
  local head
  if size < 126 then
    head = string.pack(">BB", first, bit | size)
  elseif size < 65536 then
    head = string.pack(">BBI2", first, bit | 126, size)
  else
    head = string.pack(">BBI8", first, bit | 127, size)
  end
  return key and head .. key .. M.mask(payload, key) or head .. payload
end

--- The payload of a close frame.
---@param code integer
---@param reason string? cut to what fits
---@return string
function M.close_payload(code, reason)
  return string.pack(">I2", code) .. (reason or ""):sub(1, M.MAX_CONTROL - 2)
end

local function fail(close_code, format, ...)
  errors.raise({ code = "protocol", op = "websocket", close_code = close_code, message = format:format(...) })
end

--- The code and the reason of a close frame. Without a payload there is no code: 1005.
---@param payload string
---@return integer code, string reason
--- Raises `protocol`.
function M.parse_close(payload)
  if payload == "" then
    return M.NO_STATUS, ""
  elseif #payload == 1 then
    fail(M.PROTOCOL_ERROR, "a close frame with half a code")
  end
  local code = string.unpack(">I2", payload)
  if code < 1000 or code >= 5000 or (code >= 1004 and code <= 1006) or code == 1015 then
    fail(M.PROTOCOL_ERROR, "a close frame with the code %d, which nobody may send", code)
  end
  return code, payload:sub(3)
end

---@class ciranda.websocket.Reader
---@field private masked boolean
---@field private max_message integer
---@field private rest string what has come of the next frame
local Reader = {}
Reader.__index = Reader

--- Something that is fed bytes and gives messages.
---@param options { masked: boolean, max_message: integer } masked: what frames must be; bytes of a message's payload
---@return ciranda.websocket.Reader
function M.reader(options)
  return setmetatable({
    masked = options.masked,
    max_message = options.max_message,
    pieces = {},
    size = 0,
    needed = 2,
  }, Reader)
end

--- The head of a frame at `position`: nil and the bytes it takes when it is not all there.
local function parse_head(self, data, position)
  local have = #data - position + 1
  if have < 2 then
    return nil, 2
  end
  local first, second = data:byte(position, position + 1)
  local opcode, size, masked = first & 0x0F, second & 0x7F, second & 0x80 ~= 0
  local control = opcode >= 0x8
  if first & 0x70 ~= 0 then
    fail(M.PROTOCOL_ERROR, "a frame with reserved bits, which no extension gave a meaning")
  elseif opcode > M.PONG or (opcode > M.BINARY and opcode < M.CLOSE) then
    fail(M.PROTOCOL_ERROR, "a frame of the unknown kind %d", opcode)
  elseif masked ~= self.masked then
    fail(
      M.PROTOCOL_ERROR,
      masked and "a frame of the server's is masked" or "a frame of the client's is not masked"
    )
  elseif control and (size > M.MAX_CONTROL or first & 0x80 == 0) then
    fail(M.PROTOCOL_ERROR, "a control frame that is too long or in parts")
  end
  local length = size < 126 and 2 or size == 126 and 4 or 10
  local head = length + (masked and 4 or 0)
  if have < head then
    return nil, head
  end
  if size >= 126 then
    local least = size == 126 and 126 or 65536
    size = string.unpack(size == 126 and ">I2" or ">i8", data, position + 2)
    if size < least then
      fail(M.PROTOCOL_ERROR, "a frame whose length is written longer than it must be")
    end
  end
  local before = not control and self.message and self.message.size or 0
  if not control and before + size > self.max_message then
    fail(M.TOO_BIG, "a message of more than %d bytes", self.max_message)
  end
  return {
    opcode = opcode,
    final = first & 0x80 ~= 0,
    size = size,
    key = masked and data:sub(position + length, position + head - 1) or nil,
    length = head,
  }
end

--- A whole frame: a control frame and the end of a message are told.
local function take(self, head, payload, on_message)
  if head.key then
    payload = M.mask(payload, head.key)
  end
  if head.opcode >= M.CLOSE then
    return on_message(head.opcode, payload)
  end
  local message = self.message
  if head.opcode == M.CONTINUATION then
    if not message then
      fail(M.PROTOCOL_ERROR, "a continuation without a beginning")
    end
  elseif message then
    fail(M.PROTOCOL_ERROR, "a message begins in the middle of another")
  elseif head.final then
    return on_message(head.opcode, payload)
  else
    message = { opcode = head.opcode, size = 0 }
    self.message = message
  end
  message.size = message.size + #payload
  if payload ~= "" then
    message[#message + 1] = payload
  elseif not head.final then
    -- Empty parts cost nothing to send: they must cost nothing to keep, and are no way to keep us busy for ever.
    message.empty = (message.empty or 0) + 1
    if message.empty > 1000 then
      fail(M.PROTOCOL_ERROR, "a message of nothing but empty parts")
    end
  end
  if head.final then
    self.message = nil
    on_message(message.opcode, table.concat(message))
  end
end

--- Take bytes; each message and control frame that they complete is told. `on_message` may return false: what was
--- read is then kept, and the next call, with "" for example, goes on.
---@param bytes string
---@param on_message fun(opcode: integer, payload: string): boolean?
--- Raises `protocol`, with `close_code` for the peer; nothing can be read after that.
function Reader:feed(bytes, on_message)
  if bytes ~= "" then
    self.pieces[#self.pieces + 1] = bytes
    self.size = self.size + #bytes
  end
  if self.size < self.needed then
    return -- a large frame comes in many pieces: they are put together once
  end
  local data = table.concat(self.pieces)
  local position, wanted = 1, true
  self.needed = 2
  while wanted ~= false do
    local head, needed = parse_head(self, data, position)
    if not head then
      self.needed = needed
      break
    end
    local last = position + head.length + head.size
    if last - 1 > #data then
      self.needed = head.length + head.size
      break
    end
    local payload = data:sub(position + head.length, last - 1)
    position = last
    wanted = take(self, head, payload, on_message)
  end
  local rest = data:sub(position)
  self.pieces, self.size = { rest }, #rest
end

return M
