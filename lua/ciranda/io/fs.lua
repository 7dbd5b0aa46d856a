--- Files and directories. In a task every call waits while the thread pool works; elsewhere it blocks.
---
--- Failures raise an error with the code ("not_found", "exists", "permission", "no_space", ...), the
--- operation and the path. A path is a string of bytes; a NUL in it is refused. Sizes are bytes, modes are
--- the twelve permission bits (420 is rw-r--r--), times are seconds since 1970.

local uv = require("luv")
local combine = require("ciranda.task.combine")
local errors = require("ciranda.io.error")
local fs_call = require("ciranda.io.fs_call")
local fs_file = require("ciranda.io.fs_file")
local scheduler = require("ciranda.task.scheduler")
local sync = require("ciranda.task.sync")

local M = {}

local MODE_DIRECTORY = tonumber("755", 8)
local MODE_PRIVATE = tonumber("700", 8)
local call, call_if_found, check_path, clean_up =
  fs_call.call, fs_call.call_if_found, fs_call.check_path, fs_call.clean_up

--- `fs.open(path, flags, mode)`: an open file, of a room of its own.
M.open = fs_file.open

-- Paths -----------------------------------------------------------------------------------------------------

--- Join parts of a path with single slashes; an absolute part starts anew.
---@param ... string
---@return string
function M.join(...)
  local result = ""
  for index = 1, select("#", ...) do
    local part = (select(index, ...))
    if part:sub(1, 1) == "/" or result == "" then
      result = part
    elseif part ~= "" then
      result = (result:gsub("/+$", "")) .. "/" .. part
    end
  end
  return result
end

--- The directory part: "/a/b" -> "/a", "b" -> ".", "/" -> "/".
---@param path string
---@return string
function M.dirname(path)
  local stripped = #path > 1 and path:gsub("/+$", "") or path
  local parent = stripped:match("^(.*)/[^/]*$")
  if not parent then
    return "."
  end
  return parent == "" and "/" or parent
end

--- The last part: "/a/b" -> "b", "/a/b/" -> "b".
---@param path string
---@return string
function M.basename(path)
  return path:gsub("/+$", ""):match("([^/]*)$")
end

-- What is there ---------------------------------------------------------------------------------------------

local function stat_of(op, fn, path, options)
  check_path(path, op)
  options = options or {}
  errors.check_options(options, { missing_ok = true }, "fs." .. op, 3)
  local raw = (options.missing_ok and call_if_found or call)(op, path, fn, path)
  return raw and fs_call.to_stat(raw)
end

--- What a path is; a symbolic link is followed.
---@async
---@param path string
---@param options { missing_ok: boolean? }?
---@return ciranda.Stat nil when there is nothing and that is allowed
function M.stat(path, options)
  return stat_of("stat", uv.fs_stat, path, options)
end

--- What a path is; a symbolic link is not followed.
---@async
---@param path string
---@param options { missing_ok: boolean? }?
---@return ciranda.Stat nil when there is nothing and that is allowed
function M.lstat(path, options)
  return stat_of("lstat", uv.fs_lstat, path, options)
end

--- The type of what a path leads to, or nil when there is nothing. Other failures (a directory that may not
--- be searched) raise.
---@async
---@param path string
---@return string? type as in `stat`
function M.exists(path)
  check_path(path, "exists")
  local stat = call_if_found("exists", path, uv.fs_stat, path)
  return stat and stat.type
end

--- The absolute path without symbolic links.
---@async
---@param path string
---@return string
function M.realpath(path)
  check_path(path, "realpath")
  return call("realpath", path, uv.fs_realpath, path)
end

--- What a symbolic link says.
---@async
---@param path string
---@return string
function M.readlink(path)
  check_path(path, "readlink")
  return call("readlink", path, uv.fs_readlink, path)
end

-- Files -----------------------------------------------------------------------------------------------------

--- Read a whole file, also those of /proc, whose size says 0.
---@async
---@param path string
---@param limit integer? more bytes than this raise "invalid"
---@return string
function M.read(path, limit)
  check_path(path, "read")
  local file <close> = M.open(path)
  local parts, size = {}, 0
  while true do
    local data = file:read()
    if data == "" then
      return table.concat(parts)
    end
    parts[#parts + 1] = data
    size = size + #data
    if limit and size > limit then
      errors.raise({
        code = "invalid",
        op = "fs.read",
        target = path,
        message = ("it has more than the %d bytes allowed"):format(limit),
      })
    end
  end
end

--- Put the entries of a directory on disk: a rename is not safe before.
local function sync_directory(path)
  local directory <close> = M.open(path)
  local ok, err = pcall(directory.sync, directory)
  -- Some file systems cannot; then the rename is as safe as it gets.
  if not ok and not errors.is(err, "invalid", "unsupported") then
    error(err, 0)
  end
end

local temporary_count = 0

local function temporary_name(path)
  temporary_count = temporary_count + 1
  local unique = ("%d.%d.%x"):format(uv.os_getpid(), temporary_count, uv.hrtime())
  return ("%s/.%s.%s.tmp"):format(M.dirname(path), M.basename(path):sub(1, 100), unique)
end

--- Write a whole file so that a reader, or a crash, finds the old content or the new, never a part: a
--- temporary file beside it is written, put on disk and renamed. A symbolic link keeps pointing to where it
--- did.
---@async
---@param path string
---@param data string
---@param options { mode: integer?, sync: boolean? }? mode: of the file; without one that of the old file,
---       else 644 octal less the umask. sync = false: do not wait for the disk
function M.write(path, data, options)
  check_path(path, "write")
  if type(data) ~= "string" then
    errors.misuse(2, "fs.write: a string expected, got %s", type(data))
  end
  options = options or {}
  errors.check_options(options, { mode = true, sync = true }, "fs.write")
  local mode = options.mode
  local before = M.lstat(path, { missing_ok = true })
  if before and before.type == "link" and M.exists(path) then
    path = M.realpath(path)
    before = M.stat(path)
  end
  local kind = before and before.type
  if kind == "directory" then
    errors.raise({ code = "invalid", op = "fs.write", target = path, message = "it is a directory (EISDIR)" })
  end
  if kind and kind ~= "file" and kind ~= "link" then
    -- A device or a pipe is written to, not replaced.
    local file <close> = M.open(path, "r+")
    return file:write(data)
  end
  local chosen = mode or (kind == "file" and before.mode) or nil
  local temporary = temporary_name(path)
  local kept = false
  local _ <close> = setmetatable({}, {
    __close = function()
      if not kept then
        clean_up(pcall, call, "remove", temporary, uv.fs_unlink, temporary)
      end
    end,
  })
  do
    local fd = call("write", path, uv.fs_open, temporary, "wx", chosen or fs_file.MODE)
    local file <close> = fs_file.of(fd, path)
    if chosen then
      call("chmod", path, uv.fs_fchmod, file.fd, chosen) -- the umask does not count then
    end
    file:write(data)
    if options.sync ~= false then
      file:sync()
    end
  end
  call("write", path, uv.fs_rename, temporary, path)
  kept = true
  if options.sync ~= false then
    sync_directory(M.dirname(path))
  end
end

--- Add bytes to the end of a file, which is made when absent.
---@async
---@param path string
---@param data string
---@param mode integer? permission bits of a new file; 644 octal
function M.append(path, data, mode)
  check_path(path, "append")
  local file <close> = M.open(path, "a", mode)
  file:write(data)
end

---@class ciranda.Appender
---@field path string
local Appender = {}
Appender.__index = Appender

--- Open a file to add records that must survive a crash: `local journal <close> = fs.appender(path)`.
---@async
---@param path string made when absent
---@param mode integer? permission bits of a new file; 644 octal
---@return ciranda.Appender
function M.appender(path, mode)
  check_path(path, "appender")
  local existed = M.exists(path) ~= nil
  local file = M.open(path, "a", mode)
  if not existed then
    local ok, err = pcall(sync_directory, M.dirname(path))
    if not ok then
      file:close()
      error(err, 0)
    end
  end
  return setmetatable({ path = path, file = file, turn = sync.semaphore(1) }, Appender)
end

--- Add a record; returns when it is on disk. When the disk is full nothing of it is left behind. Several
--- tasks may call it; their records do not mix.
---@async
---@param data string
function Appender:append(data)
  if type(data) ~= "string" then
    errors.misuse(2, "appender:append: a string expected, got %s", type(data))
  end
  local function add()
    local before = self.file:stat().size
    local ok, err = pcall(function()
      self.file:write(data)
      self.file:sync(true)
    end)
    if not ok then
      pcall(self.file.truncate, self.file, before)
      error(err, 0)
    end
  end
  if scheduler.can_wait() then
    -- Half a record is worse than a late cancellation.
    return combine.shield(self.turn.with, self.turn, add)
  end
  return add()
end

--- Close; a second time does nothing.
---@async
function Appender:close()
  self.file:close()
end

function Appender:__close()
  self:close()
end

--- Copy a file with its permission bits. An existing target is overwritten.
---@async
---@param from string
---@param to string
function M.copy(from, to)
  check_path(from, "copy")
  check_path(to, "copy")
  call("copy", from .. " to " .. to, uv.fs_copyfile, from, to)
end

--- Rename; an existing target file is replaced.
---@async
---@param from string
---@param to string
function M.rename(from, to)
  check_path(from, "rename")
  check_path(to, "rename")
  call("rename", from .. " to " .. to, uv.fs_rename, from, to)
end

--- Set the permission bits.
---@async
---@param path string
---@param mode integer
function M.chmod(path, mode)
  check_path(path, "chmod")
  call("chmod", path, uv.fs_chmod, path, mode)
end

--- Make a symbolic link.
---@async
---@param target string what the link says
---@param path string where the link is made
function M.symlink(target, path)
  check_path(target, "symlink")
  check_path(path, "symlink")
  call("symlink", path, uv.fs_symlink, target, path)
end

--- Remove a file or a symbolic link.
---@async
---@param path string
---@param options { missing_ok: boolean? }?
---@return boolean removed false when there was nothing and that is allowed
function M.remove(path, options)
  check_path(path, "remove")
  options = options or {}
  errors.check_options(options, { missing_ok = true }, "fs.remove")
  if options.missing_ok then
    return call_if_found("remove", path, uv.fs_unlink, path) ~= nil
  end
  call("remove", path, uv.fs_unlink, path)
  return true
end

-- Directories -----------------------------------------------------------------------------------------------

--- Make a directory.
---@async
---@param path string
---@param mode integer? 755 octal less the umask
function M.mkdir(path, mode)
  check_path(path, "mkdir")
  call("mkdir", path, uv.fs_mkdir, path, mode or MODE_DIRECTORY)
end

--- Make a directory and those above it that are missing. One that exists already is fine.
---@async
---@param path string
---@param mode integer? of those made; 755 octal less the umask
function M.mkdir_p(path, mode)
  check_path(path, "mkdir_p")
  local _, err = fs_call.try("mkdir", path, uv.fs_mkdir, path, mode or MODE_DIRECTORY)
  if not err then
    return
  end
  if errors.is(err, "not_found") and err.errno == "ENOENT" and M.dirname(path) ~= path then
    M.mkdir_p(M.dirname(path), mode)
    -- Once more only: in /proc, and in a directory that has been removed, what is above is there and nothing helps.
    _, err = fs_call.try("mkdir", path, uv.fs_mkdir, path, mode or MODE_DIRECTORY)
    if not err then
      return
    end
  end
  if errors.is(err, "exists", "permission", "invalid") and M.exists(path) == "directory" then
    return
  end
  errors.raise(err)
end

---@class ciranda.Entry
---@field name string
---@field type string as in `stat`, of the entry itself: a symbolic link is "link"

--- The entries of a directory, by name.
---@async
---@param path string
---@return ciranda.Entry[]
function M.list(path)
  check_path(path, "list")
  local scan = call("list", path, uv.fs_scandir, path)
  local entries = {}
  while true do
    local name, kind = uv.fs_scandir_next(scan)
    if not name then
      break
    end
    entries[#entries + 1] = { name = name, type = kind }
  end
  for place = #entries, 1, -1 do
    local entry = entries[place]
    if entry.type == nil or entry.type == "unknown" then
      -- This file system does not tell in its listing; what is gone meanwhile (a process in /proc) is not there.
      local ok, stat = pcall(M.lstat, M.join(path, entry.name))
      if ok then
        entry.type = stat.type
      elseif errors.is(stat, "not_found") then
        table.remove(entries, place)
      else
        error(stat, 0)
      end
    end
  end
  table.sort(entries, function(a, b)
    return a.name < b.name
  end)
  return entries
end

--- Iterate over everything below a directory, a directory before what is in it, by name. Links are not
--- followed.
---
---     for path, entry, relative in fs.walk("/etc") do ... end
---
---@async
---@param root string
---@param enter (fun(path: string, entry: ciranda.Entry): boolean)? false: do not go into this directory
---@return fun(): string?, ciranda.Entry?, string?
function M.walk(root, enter)
  check_path(root, "walk")
  local stack = {}
  local function push(directory, relative)
    local entries = M.list(directory)
    for index = #entries, 1, -1 do
      local entry = entries[index]
      stack[#stack + 1] = {
        path = M.join(directory, entry.name),
        entry = entry,
        relative = relative == "" and entry.name or relative .. "/" .. entry.name,
      }
    end
  end
  push(root, "")
  local pending
  return function()
    if pending then
      local directory = pending
      pending = nil
      if not enter or enter(directory.path, directory.entry) then
        push(directory.path, directory.relative)
      end
    end
    local top = table.remove(stack)
    if not top then
      return nil
    end
    if top.entry.type == "directory" then
      pending = top
    end
    return top.path, top.entry, top.relative
  end
end

--- Remove whatever a path is, with everything below it. A symbolic link is removed, never followed.
---@async
---@param path string
---@return boolean existed
function M.remove_tree(path)
  check_path(path, "remove_tree")
  local stat = M.lstat(path, { missing_ok = true })
  if not stat then
    return false
  end
  if stat.type ~= "directory" then
    return M.remove(path, { missing_ok = true })
  end
  for _, entry in ipairs(M.list(path)) do
    M.remove_tree(M.join(path, entry.name))
  end
  call_if_found("remove_tree", path, uv.fs_rmdir, path)
  return true
end

--- Make a new private directory under TMPDIR, or /tmp.
---@async
---@param prefix string? of its name; "ciranda-"
---@return string path
function M.tempdir(prefix)
  local parent = os.getenv("TMPDIR")
  if not parent or parent == "" then
    parent = "/tmp"
  end
  local template = M.join(parent, (prefix or "ciranda-") .. "XXXXXX")
  local path = call("tempdir", template, uv.fs_mkdtemp, template)
  call("chmod", path, uv.fs_chmod, path, MODE_PRIVATE)
  return path
end

return M
