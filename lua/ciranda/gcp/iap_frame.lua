--- The messages of IAP's relay, one in each binary message of its WebSocket. Integers are big-endian.
---
--- A tag of two bytes says what a message is; tags that are not known here are to be ignored (gcloud does).

local errors = require("ciranda.io.error")

local M = {}

M.CONNECT_SUCCESS_SID, M.RECONNECT_SUCCESS_ACK, M.DATA, M.ACK = 0x0001, 0x0002, 0x0004, 0x0007

--- The subprotocol of the WebSocket.
M.PROTOCOL = "relay.tunnel.cloudproxy.app"

--- Bytes of one DATA message.
M.MAX_DATA = 16384

---@param data string at most MAX_DATA bytes
---@return string
function M.data(data)
  return string.pack(">I2s4", M.DATA, data)
end

---@param total integer bytes received since the tunnel was made
---@return string
function M.ack(total)
  return string.pack(">I2i8", M.ACK, total)
end

---@param sid string
---@return string
function M.connected(sid)
  return string.pack(">I2s4", M.CONNECT_SUCCESS_SID, sid)
end

---@param total integer
---@return string
function M.reconnected(total)
  return string.pack(">I2i8", M.RECONNECT_SUCCESS_ACK, total)
end

local TEXT = { [M.CONNECT_SUCCESS_SID] = true, [M.DATA] = true }
local NUMBER = { [M.RECONNECT_SUCCESS_ACK] = true, [M.ACK] = true }

--- What a message says.
---@param message string
---@return integer tag
---@return string|integer|nil value the bytes or the total; nil for a tag that is not known
--- Raises `protocol`.
function M.parse(message)
  if #message >= 2 then
    local tag = string.unpack(">I2", message)
    if TEXT[tag] then
      local size = #message >= 6 and string.unpack(">I4", message, 3)
      if size and size == #message - 6 and (tag ~= M.DATA or size <= M.MAX_DATA) then
        return tag, message:sub(7)
      end
    elseif NUMBER[tag] then
      local total = #message == 10 and string.unpack(">i8", message, 3)
      if total and total >= 0 then
        return tag, total
      end
    else
      return tag, nil
    end
  end
  return errors.raise({
    code = "protocol",
    op = "iap",
    message = ("the relay sent a malformed message (%d bytes, %s)"):format(
      #message,
      message:sub(1, 2):gsub(".", function(byte)
        return ("%02x"):format(byte:byte())
      end)
    ),
  })
end

return M
