--- Open files, as `ciranda.io.fs` gives them.
local errors = require("ciranda.io.error")
local fs_call = require("ciranda.io.fs_call")
local uv = require("luv")

local M = {}

local call = fs_call.call

--- Permission bits of a new file, less the umask.
M.MODE = tonumber("644", 8)

local CHUNK = 64 * 1024

---@class ciranda.File
---@field path string
local File = {}
File.__index = File

function File:__tostring()
  return ("file %s (%s)"):format(self.path, self.fd and "open" or "closed")
end

local FLAGS =
  { r = true, ["r+"] = true, w = true, wx = true, ["w+"] = true, a = true, ax = true, ["a+"] = true }

--- A file of a descriptor.
---@param fd integer
---@param path string
---@return ciranda.File
function M.of(fd, path)
  return setmetatable({ fd = fd, path = path }, File)
end

--- Open a file: `local f <close> = fs.open(path)`.
---@async
---@param path string
---@param flags "r"|"r+"|"w"|"wx"|"w+"|"a"|"ax"|"a+"|nil "r"; x: it must not exist yet
---@param mode integer? permission bits of a new file, less the umask; 644 octal
---@return ciranda.File
function M.open(path, flags, mode)
  fs_call.check_path(path, "open")
  flags = flags or "r"
  if not FLAGS[flags] then
    errors.misuse(2, "fs.open: unknown flags '%s'", tostring(flags))
  end
  return M.of(call("open", path, uv.fs_open, path, flags, mode or M.MODE), path)
end

--- The descriptor of an open file; refuses a closed one.
---@param self ciranda.File
---@param op string for the message
---@return integer
local function descriptor(self, op)
  if not self.fd then
    errors.misuse(errors.level_outside("ciranda/io/fs"), "file:%s: %s is closed", op, self.path)
  end
  return self.fd
end

--- Read at most `size` bytes; fewer come before the end of the file only from pipes and devices.
---@async
---@param size integer? 64 KiB
---@param offset integer? where to read; the present position when absent
---@return string data "" at the end
function File:read(size, offset)
  return call("read", self.path, uv.fs_read, descriptor(self, "read"), size or CHUNK, offset or -1)
end

--- Write all bytes.
---@async
---@param data string
---@param offset integer? where to write; the present position (or the end, for "a") when absent
function File:write(data, offset)
  local fd = descriptor(self, "write")
  while #data > 0 do
    local written = call("write", self.path, uv.fs_write, fd, data, offset or -1)
    data = data:sub(written + 1)
    offset = offset and offset + written
  end
end

--- Have the system put everything on disk.
---@async
---@param only_data boolean? not its times
function File:sync(only_data)
  call("sync", self.path, only_data and uv.fs_fdatasync or uv.fs_fsync, descriptor(self, "sync"))
end

---@async
---@return ciranda.Stat
function File:stat()
  return fs_call.to_stat(call("stat", self.path, uv.fs_fstat, descriptor(self, "stat")))
end

--- Set the length.
---@async
---@param size integer bytes
function File:truncate(size)
  call("truncate", self.path, uv.fs_ftruncate, descriptor(self, "truncate"), size)
end

--- Close; a second time does nothing.
---@async
function File:close()
  local fd = self.fd
  if fd then
    self.fd = nil
    fs_call.clean_up(call, "close", self.path, uv.fs_close, fd)
  end
end

function File:__close()
  self:close()
end

return M
