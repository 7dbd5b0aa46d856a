--- SFTP, version 3 (draft-ietf-secsh-filexfer-02) with OpenSSH's extensions, over a channel.
---
--- Requests are numbered, so that many may be under way at once: a file is read and written with a window of requests,
--- and several tasks may use one client. libssh2's own SFTP allows one operation at a time and aborts the process on
--- some malformed answers, which is why this speaks the protocol itself.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")

local M = {}

-- Message types.
local INIT, VERSION = 1, 2
local OPEN, CLOSE, READ, WRITE = 3, 4, 5, 6
local LSTAT, FSTAT, SETSTAT, FSETSTAT = 7, 8, 9, 10
local OPENDIR, READDIR, REMOVE, MKDIR, RMDIR = 11, 12, 13, 14, 15
local REALPATH, STAT, RENAME, READLINK, SYMLINK = 16, 17, 18, 19, 20
local STATUS, HANDLE, DATA, NAME, ATTRS = 101, 102, 103, 104, 105
local EXTENDED = 200

local STATUS_OK, STATUS_EOF = 0, 1

-- What a status means in our words.
local CODES = {
  [2] = "not_found",
  [3] = "permission",
  [4] = "failed",
  [5] = "protocol",
  [6] = "closed",
  [7] = "closed",
  [8] = "unsupported",
  [11] = "exists",
  [14] = "no_space",
  [15] = "no_space",
}

local OPEN_FLAGS = { r = 1, w = 2, a = 4, creat = 8, trunc = 16, excl = 32 }
local MODES = {
  r = OPEN_FLAGS.r,
  w = OPEN_FLAGS.w | OPEN_FLAGS.creat | OPEN_FLAGS.trunc,
  wx = OPEN_FLAGS.w | OPEN_FLAGS.creat | OPEN_FLAGS.excl,
  ["r+"] = OPEN_FLAGS.r | OPEN_FLAGS.w,
  ["w+"] = OPEN_FLAGS.w | OPEN_FLAGS.creat, -- written where it is told, the rest stays
}

--- Bytes a request reads or writes: what every server takes.
M.CHUNK = 32 * 1024

--- Requests of one file that are under way at once: 2 MiB, what a channel's window holds.
M.WINDOW = 64

-- No message is longer; a length beyond it is not SFTP (text of a login script, for example).
local MAX_MESSAGE = 256 * 1024

-- Attributes -------------------------------------------------------------------------------------------------------

local ATTR_SIZE, ATTR_OWNER, ATTR_MODE, ATTR_TIMES, ATTR_EXTENDED = 1, 2, 4, 8, 0x80000000

local TYPES = {
  [tonumber("040000", 8)] = "directory",
  [tonumber("100000", 8)] = "file",
  [tonumber("120000", 8)] = "link",
  [tonumber("010000", 8)] = "fifo",
  [tonumber("140000", 8)] = "socket",
  [tonumber("020000", 8)] = "char",
  [tonumber("060000", 8)] = "block",
}

---@class ciranda.ssh.Attributes
---@field type string?     "file", "directory", "link", ...
---@field size integer?    bytes
---@field mode integer?    the twelve permission bits
---@field uid integer?
---@field gid integer?
---@field atime integer?   seconds since 1970
---@field mtime integer?

local function unpack_attributes(data, at)
  local flags
  flags, at = (">I4"):unpack(data, at)
  local attributes = {}
  if flags & ATTR_SIZE ~= 0 then
    attributes.size, at = (">i8"):unpack(data, at)
  end
  if flags & ATTR_OWNER ~= 0 then
    attributes.uid, attributes.gid, at = (">I4I4"):unpack(data, at)
  end
  if flags & ATTR_MODE ~= 0 then
    local mode
    mode, at = (">I4"):unpack(data, at)
    attributes.mode = mode & tonumber("7777", 8)
    attributes.type = TYPES[mode & tonumber("170000", 8)] or "unknown"
  end
  if flags & ATTR_TIMES ~= 0 then
    attributes.atime, attributes.mtime, at = (">I4I4"):unpack(data, at)
  end
  if flags & ATTR_EXTENDED ~= 0 then
    local count
    count, at = (">I4"):unpack(data, at)
    for _ = 1, count do
      local _, _, after = (">s4s4"):unpack(data, at)
      at = after
    end
  end
  return attributes, at
end

local function pack_attributes(attributes)
  local flags, parts = 0, {}
  if attributes.size then
    flags = flags | ATTR_SIZE
    parts[#parts + 1] = (">i8"):pack(attributes.size)
  end
  if attributes.uid then
    flags = flags | ATTR_OWNER
    parts[#parts + 1] = (">I4I4"):pack(attributes.uid, attributes.gid)
  end
  if attributes.mode then
    flags = flags | ATTR_MODE
    parts[#parts + 1] = (">I4"):pack(attributes.mode)
  end
  if attributes.mtime then
    flags = flags | ATTR_TIMES
    local mtime = math.floor(attributes.mtime)
    parts[#parts + 1] = (">I4I4"):pack(math.floor(attributes.atime or mtime), mtime)
  end
  return (">I4"):pack(flags) .. table.concat(parts)
end

-- The client -------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.Sftp
---@field target string   the host, for messages
---@field extensions table<string, string>
---@field private channel ciranda.ssh.Channel
---@field private waiting table<integer, fun(err: any, kind: integer?, body: string?)>
local Sftp = {}
Sftp.__index = Sftp

--- Start a client on a connection.
---@async
---@param connection ciranda.ssh.Connection
---@param timeout number seconds to wait for the server's version
---@return ciranda.ssh.Sftp
--- Raises `refused` (the server has no SFTP), `protocol`, `timeout`, or what ended the connection.
function M.open(connection, timeout)
  local channel = connection:subsystem("sftp")
  local self = setmetatable({
    target = connection.label,
    channel = channel,
    waiting = {},
    number = 0,
    parts = {},
    have = 0,
    need = 4,
    extensions = {},
  }, Sftp)
  local ok, err = pcall(function()
    task.timeout(timeout, function()
      scheduler.await(function(done)
        self.waiting[-1] = done
        self:_receive_from(channel)
        self:_send(string.char(INIT) .. (">I4"):pack(3))
        return function()
          self.waiting[-1] = nil
          return true
        end
      end, "the version of the SFTP server")
    end)
  end)
  if not ok then
    channel:close()
    if errors.is(err, "timeout") then
      self:_raise({ code = "timeout", message = ("no answer to SFTP within %g s"):format(timeout) })
    end
    error(err, 0)
  end
  return self
end

function Sftp:__tostring()
  return ("sftp on %s (%s)"):format(self.target, self.ended and "closed" or "open")
end

---@private
function Sftp:_raise(err, op, path)
  err = errors.wrap(err)
  errors.raise(
    errors.wrap(err, { op = "sftp." .. (op or "open"), target = ("%s:%s"):format(self.target, path or "") })
  )
end

--- Take what the channel delivers, in the engine's callback: no task stands between the socket and the waiting ones.
---@private
function Sftp:_receive_from(channel)
  channel.raw:read_start(function(err, data, stream)
    if not data then
      self:_end(err or { code = "closed", message = "the SFTP server has ended" })
    elseif stream == 1 then
      self.parts[#self.parts + 1] = data
      self.have = self.have + #data
      if self.have >= self.need then
        self:_split()
      end
    end
  end)
end

--- Cut what has come into messages.
---@private
function Sftp:_split()
  local text = table.concat(self.parts)
  local at = 1
  self.need = 4
  while #text - at + 1 >= 4 do
    local size = (">I4"):unpack(text, at)
    if size == 0 or size > MAX_MESSAGE then
      return self:_end({
        code = "protocol",
        message = "what the server sends is not SFTP; does a login script (.bashrc) print something?",
      })
    end
    if #text - at + 1 < 4 + size then
      self.need = 4 + size
      break
    end
    local ok, err = pcall(self._take, self, text, at + 4, at + 3 + size)
    if not ok then
      return self:_end({
        code = "protocol",
        message = "a message of the SFTP server is malformed: " .. errors.text(err),
      })
    end
    at = at + 4 + size
  end
  local rest = text:sub(at)
  self.parts = rest ~= "" and { rest } or {}
  self.have = #rest
end

--- Give one message, text[from..to], to the one who waits for it.
---@private
function Sftp:_take(text, from, to)
  local kind = text:byte(from)
  if kind == VERSION then
    local at = from + 5
    while at < to do
      local name, value
      name, value, at = (">s4s4"):unpack(text, at)
      self.extensions[name] = value
    end
    local done = self.waiting[-1]
    self.waiting[-1] = nil
    return done and done()
  end
  local number = (">I4"):unpack(text, from + 1)
  local done = self.waiting[number]
  self.waiting[number] = nil
  if done then
    done(nil, kind, text:sub(from + 5, to))
  end
end

--- Nothing more will come: everybody who waits is told.
---@private
function Sftp:_end(err)
  if self.ended then
    return
  end
  self.ended = err
  local waiting = self.waiting
  self.waiting = {}
  for _, done in pairs(waiting) do
    done(errors.wrap(err))
  end
  self.channel:close()
end

---@private
function Sftp:_send(message)
  local accepted = self.channel.raw:write((">s4"):pack(message), function() end)
  if not accepted and not self.ended then
    self:_end({ code = "closed", message = "the SFTP server has ended" })
  end
end

--- Send a request; `done(err, kind, body)` is called with its answer. Returns its number.
---@private
function Sftp:_request(kind, body, done)
  if self.ended then
    done(errors.wrap(self.ended))
    return nil
  end
  self.number = (self.number + 1) & 0xffffffff
  self.waiting[self.number] = done
  local number = self.number
  self:_send((">BI4"):pack(kind, number) .. body)
  return number
end

--- The error of a status message, or nil when it says that all is well.
local function status_error(body)
  local status, at = (">I4"):unpack(body)
  if status == STATUS_OK then
    return nil
  end
  local ok, text = pcall(string.unpack, ">s4", body, at)
  text = ok and text ~= "" and text or ("status %d"):format(status)
  return {
    code = status == STATUS_EOF and "closed" or CODES[status] or "failed",
    sftp = status,
    message = text:gsub("[%c]", "?"),
  }
end

--- Send a request and wait for its answer.
---@private
---@return integer kind, string body
function Sftp:_call(op, path, kind, body)
  local ok, err, answer, content = pcall(scheduler.await, function(done)
    local number = self:_request(kind, body, function(err, answer, content)
      done(nil, err, answer, content)
    end)
    return function()
      -- The answer comes all the same, and is nobody's then.
      if number and self.waiting[number] then
        self.waiting[number] = function() end
      end
      return true
    end
  end, ("sftp.%s %s"):format(op, path))
  if not ok then
    error(err, 0)
  end
  if err then
    self:_raise(err, op, path)
  end
  if answer == STATUS then
    local problem = status_error(content)
    if problem then
      self:_raise(problem, op, path)
    end
  end
  return answer, content
end

--- Raise unless an answer has the type that was asked for.
---@private
function Sftp:_expect(op, path, wanted, answer)
  if answer ~= wanted then
    self:_raise({ code = "protocol", message = ("an answer of type %d"):format(answer) }, op, path)
  end
end

local function pack(path)
  return (">s4"):pack(path)
end

-- Paths ------------------------------------------------------------------------------------------------------------

---@private
function Sftp:_attributes(op, kind, path)
  local answer, body = self:_call(op, path, kind, pack(path))
  self:_expect(op, path, ATTRS, answer)
  return (unpack_attributes(body, 1))
end

--- What a path is; a link is followed.
---@async
---@param path string relative to the login directory unless absolute
---@return ciranda.ssh.Attributes
--- Raises `not_found`, `permission`, `failed`, ..., as every method here; or what ended the connection.
function Sftp:stat(path)
  return self:_attributes("stat", STAT, path)
end

--- What a path is; a link is not followed.
---@async
---@param path string
---@return ciranda.ssh.Attributes
function Sftp:lstat(path)
  return self:_attributes("lstat", LSTAT, path)
end

--- The type of what is at a path, or nil when there is nothing.
---@async
---@param path string
---@return string?
function Sftp:exists(path)
  local ok, result = pcall(self.stat, self, path)
  if ok then
    return result.type
  elseif errors.is(result, "not_found") then
    return nil
  end
  error(result, 0)
end

--- Change size, owner, mode or times.
---@async
---@param path string
---@param attributes ciranda.ssh.Attributes
function Sftp:setstat(path, attributes)
  self:_call("setstat", path, SETSTAT, pack(path) .. pack_attributes(attributes))
end

---@async
---@param path string
---@param mode integer? permission bits, less the umask there; 755 octal
function Sftp:mkdir(path, mode)
  local attributes = { mode = mode or tonumber("755", 8) }
  self:_call("mkdir", path, MKDIR, pack(path) .. pack_attributes(attributes))
end

--- Make a directory and those above it that are missing.
---@async
---@param path string
---@param mode integer? of those that are made
function Sftp:mkdir_p(path, mode)
  local kind = self:exists(path)
  if kind == "directory" then
    return
  end
  if kind then
    self:_raise({ code = "exists", message = "it is there and no directory" }, "mkdir_p", path)
  end
  local parent = path:match("^(.*[^/])/+[^/]+/*$")
  if parent then
    self:mkdir_p(parent, mode)
  end
  local ok, err = pcall(self.mkdir, self, path, mode)
  -- Another one may have been faster: servers answer that with a plain failure.
  if not ok and not (errors.is(err, "failed", "exists") and self:exists(path) == "directory") then
    error(err, 0)
  end
end

---@async
---@param path string an empty directory
function Sftp:rmdir(path)
  self:_call("rmdir", path, RMDIR, pack(path))
end

---@async
---@param path string a file or a link
function Sftp:remove(path)
  self:_call("remove", path, REMOVE, pack(path))
end

--- Rename; what is at the new name is replaced, if the server can (OpenSSH can).
---@async
---@param from string
---@param to string
function Sftp:rename(from, to)
  if self.extensions["posix-rename@openssh.com"] then
    self:_call("rename", from, EXTENDED, pack("posix-rename@openssh.com") .. pack(from) .. pack(to))
  else
    self:_call("rename", from, RENAME, pack(from) .. pack(to))
  end
end

--- Make a symbolic link at `path` that says `target`.
---@async
---@param target string
---@param path string
function Sftp:symlink(target, path)
  -- OpenSSH's server has the arguments the other way round than the draft, and everyone follows it.
  self:_call("symlink", path, SYMLINK, pack(target) .. pack(path))
end

---@private
function Sftp:_one_name(op, kind, path)
  local answer, body = self:_call(op, path, kind, pack(path))
  self:_expect(op, path, NAME, answer)
  return ((">s4"):unpack(body, 5))
end

--- What a symbolic link says.
---@async
---@param path string
---@return string
function Sftp:readlink(path)
  return self:_one_name("readlink", READLINK, path)
end

--- The absolute path.
---@async
---@param path string
---@return string
function Sftp:realpath(path)
  return self:_one_name("realpath", REALPATH, path)
end

--- The entries of a directory, without "." and "..", sorted by name.
---@async
---@param path string
---@return { name: string, attributes: ciranda.ssh.Attributes }[]
function Sftp:list(path)
  local answer, body = self:_call("list", path, OPENDIR, pack(path))
  self:_expect("list", path, HANDLE, answer)
  local handle = (">s4"):unpack(body)
  local entries = {}
  local ok, err = pcall(function()
    while true do
      local kind, names
      local good, problem = pcall(function()
        kind, names = self:_call("list", path, READDIR, pack(handle))
      end)
      if not good then
        if problem.sftp == STATUS_EOF then
          return
        end
        error(problem, 0)
      end
      self:_expect("list", path, NAME, kind)
      local count, at = (">I4"):unpack(names)
      for _ = 1, count do
        local name, attributes, _
        name, _, at = (">s4s4"):unpack(names, at)
        attributes, at = unpack_attributes(names, at)
        if name ~= "." and name ~= ".." then
          entries[#entries + 1] = { name = name, attributes = attributes }
        end
      end
    end
  end)
  self:_request(CLOSE, pack(handle), function() end)
  if not ok then
    error(err, 0)
  end
  table.sort(entries, function(a, b)
    return a.name < b.name
  end)
  return entries
end

-- Files ------------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.RemoteFile
---@field path string
---@field private sftp ciranda.ssh.Sftp
---@field private handle string?
local File = {}
File.__index = File

--- Open a file: `local f <close> = sftp:open("log")`.
---@async
---@param path string
---@param flags "r"|"r+"|"w"|"wx"|"w+"|nil "r"; x: it must not exist yet; w+: it is made, and what is there stays
---@param mode integer? permission bits of a new file, less the umask there; 644 octal
---@return ciranda.ssh.RemoteFile
function Sftp:open(path, flags, mode)
  local bits = MODES[flags or "r"]
  if not bits then
    errors.misuse(2, "sftp:open: unknown flags '%s'", tostring(flags))
  end
  local attributes = bits & OPEN_FLAGS.creat ~= 0 and { mode = mode or tonumber("644", 8) } or {}
  local answer, body =
    self:_call("open", path, OPEN, (">s4I4"):pack(path, bits) .. pack_attributes(attributes))
  self:_expect("open", path, HANDLE, answer)
  return setmetatable({ sftp = self, path = path, handle = (">s4"):unpack(body) }, File)
end

function File:__tostring()
  return ("remote file %s:%s (%s)"):format(self.sftp.target, self.path, self.handle and "open" or "closed")
end

---@async
---@return ciranda.ssh.Attributes
function File:stat()
  local answer, body = self.sftp:_call("stat", self.path, FSTAT, pack(self.handle))
  self.sftp:_expect("stat", self.path, ATTRS, answer)
  return (unpack_attributes(body, 1))
end

---@async
---@param attributes ciranda.ssh.Attributes
function File:setstat(attributes)
  self.sftp:_call("setstat", self.path, FSETSTAT, pack(self.handle) .. pack_attributes(attributes))
end

--- Put what has been written on the server's disk. Returns false when the server cannot do that.
---@async
---@return boolean
function File:sync()
  if not self.sftp.extensions["fsync@openssh.com"] then
    return false
  end
  self.sftp:_call("sync", self.path, EXTENDED, pack("fsync@openssh.com") .. pack(self.handle))
  return true
end

--- Close the file. Whether all was written is known after that.
---@async
function File:close()
  local handle = self.handle
  self.handle = nil
  if handle then
    self.sftp:_call("close", self.path, CLOSE, pack(handle))
  end
end

--- At the end of a block nobody waits for the answer.
function File:__close()
  local handle = self.handle
  self.handle = nil
  if handle then
    self.sftp:_request(CLOSE, pack(handle), function() end)
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
    slot.request(READ, pack(self.handle) .. (">i8I4"):pack(slot.offset, slot.size))
    return true
  end, function(slot, kind, body)
    if kind == STATUS then
      local problem = status_error(body)
      if problem and problem.sftp == STATUS_EOF then
        return false
      end
      self.sftp:_raise(problem or { code = "protocol", message = "no data" }, "read", self.path)
    end
    self.sftp:_expect("read", self.path, DATA, kind)
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
  local request = pack(self.handle) .. (">i8I4"):pack(offset, math.min(size, M.CHUNK))
  local ok, answer, body = pcall(self.sftp._call, self.sftp, "read", self.path, READ, request)
  if not ok then
    if answer.sftp == STATUS_EOF then
      return ""
    end
    error(answer, 0)
  end
  self.sftp:_expect("read", self.path, DATA, answer)
  return ((">s4"):unpack(body))
end

--- Write at a place what `source()` returns, piece by piece, until it returns nil or "". It may wait.
---@async
---@param offset integer
---@param source fun(): string?
---@return integer count bytes that were written
function File:write_from(offset, source)
  local header = pack(self.handle)
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
    slot.request(WRITE, header .. (">i8s4"):pack(offset + total, chunk))
    total = total + #chunk
    return true
  end, function(_, kind, body)
    self.sftp:_expect("write", self.path, STATUS, kind)
    local problem = status_error(body)
    if problem then
      self.sftp:_raise(problem, "write", self.path)
    end
    if piece and at > #piece then
      fetch()
    end
  end)
  return total
end

--- Close the client and its channel.
function Sftp:close()
  self:_end({ code = "closed", message = "the SFTP client has been closed" })
end

Sftp.__close = Sftp.close

return M
