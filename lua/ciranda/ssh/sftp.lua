--- SFTP, version 3 (draft-ietf-secsh-filexfer-02) with OpenSSH's extensions, over a channel.
---
--- Requests are numbered, so that many may be under way at once: a file is read and written with a window of requests,
--- and several tasks may use one client. libssh2's own SFTP allows one operation at a time and aborts the process on
--- some malformed answers, which is why this speaks the protocol itself.

local errors = require("ciranda.io.error")
local files = require("ciranda.ssh.sftp_file")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")
local wire = require("ciranda.ssh.sftp_wire")

local M = {}

-- No message is longer; a length beyond it is not SFTP (text of a login script, for example).
local MAX_MESSAGE = 256 * 1024

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
        self:_send(string.char(wire.INIT) .. (">I4"):pack(3))
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
  if kind == wire.VERSION then
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

--- Send a request and wait for its answer.
---@private
---@return integer kind, string body
function Sftp:_call(op, path, kind, body)
  local err, answer, content = scheduler.await(function(done)
    local number = self:_request(kind, body, function(...)
      done(nil, ...)
    end)
    return function()
      -- The answer comes all the same, and is nobody's then.
      if number and self.waiting[number] then
        self.waiting[number] = function() end
      end
      return true
    end
  end, ("sftp.%s %s"):format(op, path))
  if err then
    self:_raise(err, op, path)
  end
  if answer == wire.STATUS then
    local problem = wire.status_error(content)
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

-- Paths ------------------------------------------------------------------------------------------------------------

---@private
function Sftp:_attributes(op, kind, path)
  local answer, body = self:_call(op, path, kind, wire.pack(path))
  self:_expect(op, path, wire.ATTRS, answer)
  return (wire.unpack_attributes(body, 1))
end

--- What a path is; a link is followed.
---@async
---@param path string relative to the login directory unless absolute
---@return ciranda.ssh.Attributes
--- Raises `not_found`, `permission`, `failed`, ..., as every method here; or what ended the connection.
function Sftp:stat(path)
  return self:_attributes("stat", wire.STAT, path)
end

--- What a path is; a link is not followed.
---@async
---@param path string
---@return ciranda.ssh.Attributes
function Sftp:lstat(path)
  return self:_attributes("lstat", wire.LSTAT, path)
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
  self:_call("setstat", path, wire.SETSTAT, wire.pack(path) .. wire.pack_attributes(attributes))
end

---@async
---@param path string
---@param mode integer? permission bits, less the umask there; 755 octal
function Sftp:mkdir(path, mode)
  local attributes = { mode = mode or tonumber("755", 8) }
  self:_call("mkdir", path, wire.MKDIR, wire.pack(path) .. wire.pack_attributes(attributes))
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
  self:_call("rmdir", path, wire.RMDIR, wire.pack(path))
end

---@async
---@param path string a file or a link
function Sftp:remove(path)
  self:_call("remove", path, wire.REMOVE, wire.pack(path))
end

--- Rename; what is at the new name is replaced, if the server can (OpenSSH can).
---@async
---@param from string
---@param to string
function Sftp:rename(from, to)
  if self.extensions["posix-rename@openssh.com"] then
    self:_call(
      "rename",
      from,
      wire.EXTENDED,
      wire.pack("posix-rename@openssh.com") .. wire.pack(from) .. wire.pack(to)
    )
  else
    self:_call("rename", from, wire.RENAME, wire.pack(from) .. wire.pack(to))
  end
end

--- Make a symbolic link at `path` that says `target`.
---@async
---@param target string
---@param path string
function Sftp:symlink(target, path)
  -- OpenSSH's server has the arguments the other way round than the draft, and everyone follows it.
  self:_call("symlink", path, wire.SYMLINK, wire.pack(target) .. wire.pack(path))
end

---@private
function Sftp:_one_name(op, kind, path)
  local answer, body = self:_call(op, path, kind, wire.pack(path))
  self:_expect(op, path, wire.NAME, answer)
  return ((">s4"):unpack(body, 5))
end

--- What a symbolic link says.
---@async
---@param path string
---@return string
function Sftp:readlink(path)
  return self:_one_name("readlink", wire.READLINK, path)
end

--- The absolute path.
---@async
---@param path string
---@return string
function Sftp:realpath(path)
  return self:_one_name("realpath", wire.REALPATH, path)
end

--- The entries of a directory, without "." and "..", sorted by name.
---@async
---@param path string
---@return { name: string, attributes: ciranda.ssh.Attributes }[]
function Sftp:list(path)
  local answer, body = self:_call("list", path, wire.OPENDIR, wire.pack(path))
  self:_expect("list", path, wire.HANDLE, answer)
  local handle = (">s4"):unpack(body)
  local entries = {}
  local ok, err = pcall(function()
    while true do
      local kind, names
      local good, problem = pcall(function()
        kind, names = self:_call("list", path, wire.READDIR, wire.pack(handle))
      end)
      if not good then
        if problem.sftp == wire.STATUS_EOF then
          return
        end
        error(problem, 0)
      end
      self:_expect("list", path, wire.NAME, kind)
      local count, at = (">I4"):unpack(names)
      for _ = 1, count do
        local name, attributes, _
        name, _, at = (">s4s4"):unpack(names, at)
        attributes, at = wire.unpack_attributes(names, at)
        if name ~= "." and name ~= ".." then
          entries[#entries + 1] = { name = name, attributes = attributes }
        end
      end
    end
  end)
  self:_request(wire.CLOSE, wire.pack(handle), function() end)
  if not ok then
    error(err, 0)
  end
  table.sort(entries, function(a, b)
    return a.name < b.name
  end)
  return entries
end

--- Open a file: `local f <close> = sftp:open("log")`.
---@async
---@param path string
---@param flags "r"|"r+"|"w"|"wx"|"w+"|nil "r"; x: it must not exist yet; w+: it is made, and what is there stays
---@param mode integer? permission bits of a new file, less the umask there; 644 octal
---@return ciranda.ssh.RemoteFile
function Sftp:open(path, flags, mode)
  local bits = wire.OPEN_MODES[flags or "r"]
  if not bits then
    errors.misuse(2, "sftp:open: unknown flags '%s'", tostring(flags))
  end
  local attributes = bits & wire.OPEN_CREATES ~= 0 and { mode = mode or tonumber("644", 8) } or {}
  local answer, body =
    self:_call("open", path, wire.OPEN, (">s4I4"):pack(path, bits) .. wire.pack_attributes(attributes))
  self:_expect("open", path, wire.HANDLE, answer)
  return files.new(self, path, ((">s4"):unpack(body)))
end

--- Close the client and its channel.
function Sftp:close()
  self:_end({ code = "closed", message = "the SFTP client has been closed" })
end

Sftp.__close = Sftp.close

return M
