--- The messages of SFTP, version 3: their numbers, attributes and statuses.

local M = {}

--- Types of messages.
M.INIT = 1
M.VERSION = 2
M.OPEN = 3
M.CLOSE = 4
M.READ = 5
M.WRITE = 6
M.LSTAT = 7
M.FSTAT = 8
M.SETSTAT = 9
M.FSETSTAT = 10
M.OPENDIR = 11
M.READDIR = 12
M.REMOVE = 13
M.MKDIR = 14
M.RMDIR = 15
M.REALPATH = 16
M.STAT = 17
M.RENAME = 18
M.READLINK = 19
M.SYMLINK = 20
M.STATUS = 101
M.HANDLE = 102
M.DATA = 103
M.NAME = 104
M.ATTRS = 105
M.EXTENDED = 200

--- Statuses that are no failure.
M.STATUS_OK, M.STATUS_EOF = 0, 1

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
--- What the flags of `open` mean, as in io.open; x: it must not be there; w+: what is there stays.
M.OPEN_MODES = {
  r = OPEN_FLAGS.r,
  w = OPEN_FLAGS.w | OPEN_FLAGS.creat | OPEN_FLAGS.trunc,
  wx = OPEN_FLAGS.w | OPEN_FLAGS.creat | OPEN_FLAGS.excl,
  ["r+"] = OPEN_FLAGS.r | OPEN_FLAGS.w,
  ["w+"] = OPEN_FLAGS.w | OPEN_FLAGS.creat,
}

--- The bit among them that says that a file may be made.
M.OPEN_CREATES = OPEN_FLAGS.creat

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

--- Read attributes.
---@param data string
---@param at integer
---@return ciranda.ssh.Attributes
---@return integer next
function M.unpack_attributes(data, at)
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

---@param attributes ciranda.ssh.Attributes those that are to be set
---@return string
function M.pack_attributes(attributes)
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

--- The error of a status message, or nil when it says that all is well.
---@param body string
---@return { code: string, sftp: integer, message: string }?
function M.status_error(body)
  local status, at = (">I4"):unpack(body)
  if status == M.STATUS_OK then
    return nil
  end
  local ok, text = pcall(string.unpack, ">s4", body, at)
  text = ok and text ~= "" and text or ("status %d"):format(status)
  return {
    code = status == M.STATUS_EOF and "closed" or CODES[status] or "failed",
    sftp = status,
    message = text:gsub("[%c]", "?"),
  }
end

--- A string as the protocol writes it.
---@param text string
---@return string
function M.pack(text)
  return (">s4"):pack(text)
end

return M
