--- A directory as a manifest and one archive: what is pushed to workers, and what goes to a bucket.
--
-- The manifest says of every entry its path, type, mode, size and SHA-256. Each file is read once: the bytes
-- that are hashed are the bytes that are archived. The manifest's own hash leaves times out, so that a fresh
-- clone of the same code has the same hash; the archive keeps them, because Python decides by a source's time
-- whether its compiled file is stale.
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local process = require("ciranda.io.process")
local tar = require("ciranda.fleet.tar")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local CHUNK = 1048576
--- Bytes of files up to which a directory is compressed quickly and in memory: level 6 takes three times the time of
--- level 1, and what it saves of a source tree, a fifth, is soon sent.
local QUICK = 16777216
--- Nanoseconds that a walk or a copy may hold the loop before others get their turn.
local TURN = 10000000
--- Entries of left-out directories that are counted before "more than" is said.
local COUNT_LIMIT = 50000

---@class ciranda.archive.Manifest
---@field directory string
---@field entries ciranda.tar.Entry[] sorted by path; files have sha256
---@field size integer bytes of all files
---@field sha256 string of the entries: path, type, mode, size, content
---@field left_out { files: integer, bytes: integer, more: boolean, paths: string[] } paths: the topmost ones;
---  a directory's ends in "/"
---@field skipped string[] sockets, devices and the like
---@field archive string? path of the .tar.gz
---@field archive_size integer?
---@field archive_sha256 string?
---@field archive_fd integer? the archive that was written, whatever has its name by now

--- Gives others a turn when this task has held the loop for a while.
---@return fun()
local function breather()
  local last = uv.hrtime()
  return function()
    if uv.hrtime() - last > TURN then
      task.yield()
      last = uv.hrtime()
    end
  end
end

---@param message string
---@param path string
local function fail(message, path)
  err.raise(err.wrap(message, { op = "archive", target = path }))
end

--- The names in a directory, sorted.
---@param path string
---@return { name: string, type: string? }[]
local function list(path)
  local scan, message = uv.fs_scandir(path)
  if not scan then
    fail(message, path)
  end
  local names = {}
  while true do
    local name = uv.fs_scandir_next(scan)
    if not name then
      break
    end
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end

--- Counts what is below a path that is left out.
---@param left_out table
---@param path string
---@param breathe fun()
local function count_left_out(left_out, path, breathe)
  breathe()
  local stat = uv.fs_lstat(path)
  if not stat or left_out.more then
    return
  elseif stat.type ~= "directory" then
    left_out.files = left_out.files + 1
    left_out.bytes = left_out.bytes + (stat.type == "file" and stat.size or 0)
    left_out.more = left_out.files >= COUNT_LIMIT
    return
  end
  local scan = uv.fs_scandir(path)
  while scan do
    local name = uv.fs_scandir_next(scan)
    if not name then
      break
    end
    count_left_out(left_out, path .. "/" .. name, breathe)
  end
end

--- Walks a directory.
---@param directory string
---@param filter fun(path: string, is_directory: boolean): "keep"|"leave"|"inside" "inside": leave the
---  directory out but look at what is in it
---@return ciranda.archive.Manifest without hashes
function M.walk(directory, filter)
  local manifest = {
    directory = directory,
    entries = {},
    size = 0,
    left_out = { files = 0, bytes = 0, more = false, paths = {} },
    skipped = {},
  }
  local breathe = breather()
  local function visit(prefix)
    for _, name in ipairs(list(directory .. "/" .. prefix)) do
      breathe()
      local path = prefix .. name
      local whole = directory .. "/" .. path
      local stat = uv.fs_lstat(whole)
      -- What has gone since the directory was read was nobody's to keep.
      if stat then
        local is_directory = stat.type == "directory"
        local verdict = filter(path, is_directory)
        if verdict == "leave" then
          table.insert(manifest.left_out.paths, is_directory and path .. "/" or path)
          count_left_out(manifest.left_out, whole, breathe)
        elseif is_directory or stat.type == "file" or stat.type == "link" then
          if verdict == "keep" then
            local entry = {
              path = path,
              type = stat.type,
              mode = stat.mode & 4095,
              size = stat.type == "file" and stat.size or 0,
              mtime = stat.mtime.sec,
            }
            if stat.type == "link" then
              local target, message = uv.fs_readlink(whole)
              entry.target = target or fail(message, whole)
            end
            manifest.size = manifest.size + entry.size
            table.insert(manifest.entries, entry)
          end
          if is_directory then
            visit(path .. "/")
          end
        else
          table.insert(manifest.skipped, path)
        end
      end
    end
  end
  visit("")
  return manifest
end

--- What writes an archive: small pieces are put together.
---@param fd integer
---@param path string
---@return fun(bytes: string?) write nil: what is held back is written
local function writer(fd, path)
  local held, size = {}, 0
  return function(bytes)
    if bytes then
      held[#held + 1] = bytes
      size = size + #bytes
      if size < CHUNK then
        return
      end
    end
    local whole = table.concat(held)
    held, size = {}, 0
    local done = 0
    while done < #whole do
      local written, message = uv.fs_write(fd, done == 0 and whole or whole:sub(done + 1), -1)
      if not written then
        fail(message, path)
      end
      done = done + written
    end
  end
end

--- Reads a file once, into its hash and into the archive.
---@return boolean there false when the file has gone
local function copy_file(manifest, entry, write, breathe)
  local path = manifest.directory .. "/" .. entry.path
  local fd, message, name = uv.fs_open(path, "r", 0)
  if not fd then
    if name == "ENOENT" then
      return false
    end
    fail(message, path)
  end
  local closer <close> = setmetatable({}, {
    __close = function()
      uv.fs_close(fd)
    end,
  })
  local _ = closer
  -- What is appended from here on is not part of it.
  entry.size = uv.fs_fstat(fd).size
  write(tar.header(entry))
  local hash = crypto.start("sha256")
  local left = entry.size
  while left > 0 do
    local bytes, problem = uv.fs_read(fd, math.min(CHUNK, left))
    if not bytes then
      fail(problem, path)
    elseif bytes == "" then
      err.raise({
        code = "invalid",
        op = "archive",
        target = path,
        message = path
          .. " became shorter while it was being read; let whatever writes it finish, and try again",
      })
    end
    hash:update(bytes)
    write(bytes)
    left = left - #bytes
    breathe()
  end
  write(tar.padding(entry.size))
  entry.sha256 = crypto.hex(hash:finish())
  return true
end

--- The hash of a manifest: of one line an entry, NUL between its fields.
---@param manifest ciranda.archive.Manifest
---@return string
local function hash_entries(manifest)
  local hash = crypto.start("sha256")
  for _, entry in ipairs(manifest.entries) do
    hash:update(table.concat({
      entry.path,
      entry.type,
      ("%o"):format(entry.mode),
      tostring(entry.size),
      entry.sha256 or entry.target or "",
    }, "\0") .. "\n")
  end
  return crypto.hex(hash:finish())
end

--- The SHA-256 and size of a file, read on another thread.
---@param path string
---@return string hex, integer size
function M.hash_file(path)
  local answer = crypto.digest_file(path, { "sha256" })
  return crypto.hex(answer.sha256), answer.size
end

--- Hashes the files of a walked directory: for who wants to know before there is an archive. What has gone or may not
--- be read has no hash.
---@async
---@param manifest ciranda.archive.Manifest from `walk`
function M.hash(manifest)
  for _, entry in ipairs(manifest.entries) do
    if entry.type == "file" then
      local ok, hex = pcall(M.hash_file, manifest.directory .. "/" .. entry.path)
      if not ok and not err.is(hex, "not_found", "permission") then
        error(hex, 0)
      end
      entry.sha256 = ok and hex or nil
    end
  end
end

--- Reads the files of a manifest, those that are still there, into an archive.
---@param manifest ciranda.archive.Manifest its entries and size become what was read
---@param write fun(bytes: string)
local function read_files(manifest, write)
  local breathe = breather()
  local kept = {}
  manifest.size = 0
  for _, entry in ipairs(manifest.entries) do
    local there = true
    if entry.type == "file" then
      there = copy_file(manifest, entry, write, breathe)
    else
      write(tar.header(entry))
    end
    if there then
      kept[#kept + 1] = entry
      manifest.size = manifest.size + entry.size
    end
  end
  manifest.entries = kept
  write(tar.trailer())
end

--- Opens a file, has `fn` write into it, and closes it; a file that is not whole is removed.
---@param path string
---@param fn fun(write: fun(bytes: string?))
local function with_file(path, fn)
  local fd, message = uv.fs_open(path, "w", 384)
  if not fd then
    fail(message, path)
  end
  local write = writer(fd, path)
  local ok, problem = pcall(function()
    fn(write)
    write(nil)
  end)
  uv.fs_close(fd)
  if not ok then
    uv.fs_unlink(path)
    error(problem, 0)
  end
end

--- Writes the archive of a walked directory and completes its manifest.
---@async
---@param manifest ciranda.archive.Manifest from `walk`
---@param output string path of the .tar.gz; a file there is replaced
---@param level integer? of gzip, 1 (quick) to 9 (1 for up to 16 MiB of files, else 6)
---@return ciranda.archive.Manifest the same
-- Raises "permission" for a file that may not be read, "no_space" when the archive does not fit.
function M.write(manifest, output, level)
  -- Another program may be making, or reading, one of that name.
  local own = ("%s.%d"):format(output:gsub("%.gz$", ""), math.tointeger(uv.os_getpid()))
  local size = 0
  for _, entry in ipairs(manifest.entries) do
    size = size + entry.size
  end
  if size <= QUICK then
    local pieces = {}
    read_files(manifest, function(bytes)
      pieces[#pieces + 1] = bytes
    end)
    local packed = crypto.gzip(table.concat(pieces), level or 1)
    with_file(own, function(write)
      write(packed)
    end)
    manifest.archive_sha256, manifest.archive_size = crypto.hex(crypto.sha256(packed)), #packed
  else
    with_file(own, function(write)
      read_files(manifest, write)
    end)
    local gzip = process.run({ "gzip", "-n", "-f", ("-%d"):format(level or 6), own })
    if gzip.code ~= 0 then
      uv.fs_unlink(own)
      err.raise({
        code = "failed",
        op = "archive",
        target = output,
        message = "gzip failed: "
          .. (gzip.stderr ~= "" and gzip.stderr or ("exit status %s"):format(gzip.code)),
      })
    end
    own = own .. ".gz"
    manifest.archive_sha256, manifest.archive_size = M.hash_file(own)
  end
  local renamed, problem = uv.fs_rename(own, output)
  if not renamed then
    uv.fs_unlink(own)
    fail(problem, output)
  end
  manifest.sha256 = hash_entries(manifest)
  manifest.archive = output
  return manifest
end

return M
