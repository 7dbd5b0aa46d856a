--- A file on an SFTP server: read and written with a window of requests.

local scheduler = require("ciranda.task.scheduler")
local wire = require("ciranda.ssh.sftp_wire")

local M = {}

--- Bytes a request reads or writes: what every server takes.
M.CHUNK = 32 * 1024

--- Requests of one file that are under way at once: 2 MiB, what a channel's window holds.
M.WINDOW = 64

---@class ciranda.ssh.RemoteFile
---@field path string
---@field private sftp ciranda.ssh.Sftp
---@field private handle string?
local File = {}
File.__index = File

function File:__tostring()
  return ("remote file %s:%s (%s)"):format(self.sftp.target, self.path, self.handle and "open" or "closed")
end

---@async
---@return ciranda.ssh.Attributes
function File:stat()
  local answer, body = self.sftp:_call("stat", self.path, wire.FSTAT, wire.pack(self.handle))
  self.sftp:_expect("stat", self.path, wire.ATTRS, answer)
  return (wire.unpack_attributes(body, 1))
end

---@async
---@param attributes ciranda.ssh.Attributes
function File:setstat(attributes)
  self.sftp:_call(
    "setstat",
    self.path,
    wire.FSETSTAT,
    wire.pack(self.handle) .. wire.pack_attributes(attributes)
  )
end

--- Put what has been written on the server's disk. Returns false when the server cannot do that.
---@async
---@return boolean
function File:sync()
  if not self.sftp.extensions["fsync@openssh.com"] then
    return false
  end
  self.sftp:_call("sync", self.path, wire.EXTENDED, wire.pack("fsync@openssh.com") .. wire.pack(self.handle))
  return true
end

--- Close the file. Whether all was written is known after that.
---@async
function File:close()
  local handle = self.handle
  self.handle = nil
  if handle then
    self.sftp:_call("close", self.path, wire.CLOSE, wire.pack(handle))
  end
end

--- At the end of a block nobody waits for the answer.
function File:__close()
  local handle = self.handle
  self.handle = nil
  if handle then
    self.sftp:_request(wire.CLOSE, wire.pack(handle), function() end)
  end
end

--- Many requests of one file under way, the answers taken in order. `issue(slot)` sends the next request by calling
--- `slot.request(kind, body)` and returns true, nil when there is none yet, false when there will be none;
--- `take(slot, kind, body)` is given each answer, may wait, and returns false to end.
local function pipeline(file, op, issue, take)
  local sftp = file.sftp
  local slots, first, last = {}, 1, 0
  local waiting
  local finished = false
  local function send_more()
    while not finished and last - first + 1 < M.WINDOW do
      local slot = {}
      slot.request = function(kind, body)
        last = last + 1
        slots[last] = slot
        sftp:_request(kind, body, function(err, answer, content)
          slot.err, slot.answer, slot.body, slot.done = err, answer, content, true
          if waiting and slots[first] == slot then
            local done = waiting
            waiting = nil
            done()
          end
        end)
      end
      local sent = issue(slot)
      finished = sent == false
      if not sent then
        return
      end
    end
  end
  send_more()
  while first <= last do
    local slot = slots[first]
    if not slot.done then
      scheduler.await(function(done)
        waiting = done
        return function()
          waiting = nil
          return true
        end
      end, ("sftp.%s %s"):format(op, file.path))
    end
    if slot.err then
      sftp:_raise(slot.err, op, file.path)
    end
    slots[first] = nil
    first = first + 1
    if take(slot, slot.answer, slot.body) == false then
      return
    end
    send_more()
  end
end

--- Read from a place to the end of the file, or `length` bytes: `sink(bytes)` is called with each piece, in order, and
--- may wait.
---@async
---@param offset integer
---@param length integer? bytes; to the end without it
---@param sink fun(bytes: string)
---@return integer count bytes that were read
function File:read_to(offset, length, sink)
  local next_offset, total = offset, 0
  local limit = length and offset + length or math.maxinteger
  pipeline(self, "read", function(slot)
    if next_offset >= limit then
      return false
    end
    slot.offset = next_offset
    slot.size = math.min(M.CHUNK, limit - next_offset)
    next_offset = next_offset + slot.size
    slot.request(wire.READ, wire.pack(self.handle) .. (">i8I4"):pack(slot.offset, slot.size))
    return true
  end, function(slot, kind, body)
    if kind == wire.STATUS then
      local problem = wire.status_error(body)
      if problem and problem.sftp == wire.STATUS_EOF then
        return false
      end
      self.sftp:_raise(problem or { code = "protocol", message = "no data" }, "read", self.path)
    end
    self.sftp:_expect("read", self.path, wire.DATA, kind)
    local data = (">s4"):unpack(body)
    -- A server may give less than was asked for, and mean no end by it: the rest is asked for again.
    while #data < slot.size do
      local more = self:read(slot.offset + #data, slot.size - #data)
      if more == "" then
        total = total + #data
        if data ~= "" then
          sink(data)
        end
        return false
      end
      data = data .. more
    end
    total = total + #data
    sink(data)
  end)
  return total
end

--- Read up to `size` bytes at a place.
---@async
---@param offset integer
---@param size integer at most 32 KiB are read at once
---@return string data "" at the end of the file
function File:read(offset, size)
  local request = wire.pack(self.handle) .. (">i8I4"):pack(offset, math.min(size, M.CHUNK))
  local ok, answer, body = pcall(self.sftp._call, self.sftp, "read", self.path, wire.READ, request)
  if not ok then
    if answer.sftp == wire.STATUS_EOF then
      return ""
    end
    error(answer, 0)
  end
  self.sftp:_expect("read", self.path, wire.DATA, answer)
  return ((">s4"):unpack(body))
end

--- Write at a place what `source()` returns, piece by piece, until it returns nil or "". It may wait.
---@async
---@param offset integer
---@param source fun(): string?
---@return integer count bytes that were written
function File:write_from(offset, source)
  local header = wire.pack(self.handle)
  local total = 0
  local piece, at
  -- The source may wait, which must not happen while a request is made: it is asked between the answers.
  local function fetch()
    piece, at = source(), 1
    if piece == "" then
      piece = nil
    end
  end
  fetch()
  pipeline(self, "write", function(slot)
    if not piece then
      return false
    elseif at > #piece then
      return nil
    end
    local chunk = piece:sub(at, at + M.CHUNK - 1)
    at = at + #chunk
    slot.request(wire.WRITE, header .. (">i8s4"):pack(offset + total, chunk))
    total = total + #chunk
    return true
  end, function(_, kind, body)
    self.sftp:_expect("write", self.path, wire.STATUS, kind)
    local problem = wire.status_error(body)
    if problem then
      self.sftp:_raise(problem, "write", self.path)
    end
    if piece and at > #piece then
      fetch()
    end
  end)
  return total
end

--- A file that has been opened.
---@param sftp ciranda.ssh.Sftp
---@param path string
---@param handle string the server's
---@return ciranda.ssh.RemoteFile
function M.new(sftp, path, handle)
  return setmetatable({ sftp = sftp, path = path, handle = handle }, File)
end

return M
