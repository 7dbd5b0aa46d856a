--- Files and directories over SFTP, both ways.
---
--- A file appears under its name only when all of it is there: it is written beside it and renamed. With `resume` the
--- part that a broken transfer has left is kept and gone on with.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local scheduler = require("ciranda.task.scheduler")
local sftp = require("ciranda.ssh.sftp")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Seconds to wait for the server's SFTP to start.
M.START_TIMEOUT = 30

-- Files of a directory that are transferred at once, on one channel.
local AT_ONCE = 16

-- Bytes read from a local file at once.
local PIECE = 256 * 1024

local PERMISSIONS = tonumber("777", 8)

---@class ciranda.ssh.TransferOptions
---@field mode integer?      permission bits of the file; a local file's own, 644 octal for data
---@field times boolean?     keep the time of modification
---@field resume boolean?    go on with what an earlier transfer of the same file has left
---@field direct boolean?    write to the name itself: for devices, and directories that cannot be written
---@field sync boolean?      put it on the disk there before it appears
---@field parents boolean?   make missing directories
---@field progress (fun(done: integer, total: integer))?  bytes; called as they are confirmed
---@field sftp ciranda.ssh.Sftp?  a client to use; else one is started and closed

local OPTIONS = {
  mode = true,
  times = true,
  resume = true,
  direct = true,
  sync = true,
  parents = true,
  progress = true,
  sftp = true,
}

--- Call `fn(client)` with the options' client or one of its own.
local function with_client(connection, options, fn)
  if options.sftp then
    return fn(options.sftp)
  end
  local client <close> = sftp.open(connection, M.START_TIMEOUT)
  return fn(client)
end

local function dirname(path)
  return path:match("^(.*[^/])/+[^/]*$") or path:match("^/") or "."
end

local function basename(path)
  return path:match("([^/]+)/*$") or path
end

--- The name a transfer writes to: one that a later try finds again, or one that no other transfer uses.
local function part_name(path, resume)
  local name = resume and ".part" or "." .. crypto.hex(crypto.random(4)) .. ".part"
  return (dirname(path) == "." and path:sub(1, 1) ~= "/" and "" or dirname(path):gsub("/$", "") .. "/")
    .. "."
    .. basename(path)
    .. name
end

-- To open a pipe waits for somebody at its other end: over there for as long as the machine runs, here on a thread that
-- others need.
local REFUSED = { fifo = "a pipe", socket = "a socket" }

--- Refuses what has no bytes of its own.
---@param op string
---@param path string
---@param kind string? the type of what is there, nil where there is nothing
local function check_kind(op, path, kind)
  if REFUSED[kind] then
    errors.raise({
      code = "invalid",
      op = op,
      target = path,
      message = ("%s is %s: it has no content that could be copied; copy from a file, or into one"):format(
        path,
        REFUSED[kind]
      ),
    })
  end
end

-- Sources ----------------------------------------------------------------------------------------------------------

--- A source is `{ size =, mode =, mtime =, read = fun(offset, size): string, close = fun() }`.
local function open_source(source)
  if type(source) == "table" and type(source.data) == "string" then
    local data = source.data
    return {
      size = #data,
      mode = tonumber("644", 8),
      read = function(offset, size)
        return data:sub(offset + 1, offset + size)
      end,
      close = function() end,
    }
  end
  if type(source) ~= "string" then
    errors.misuse(
      errors.level_outside("ciranda/ssh/"),
      "connection:put: a path or { data = ... } is expected"
    )
  end
  check_kind("ssh.put", source, fs.exists(source))
  local file = fs.open(source)
  local ok, stat = pcall(file.stat, file)
  if ok and stat.type == "directory" then
    ok, stat = false, { code = "invalid", message = source .. " is a directory: use put_tree" }
  end
  if not ok then
    file:close()
    errors.raise(errors.wrap(stat, { op = "ssh.put", target = source }))
  end
  return {
    size = stat.size,
    mode = stat.mode & PERMISSIONS,
    mtime = stat.mtime,
    read = function(offset, size)
      return file:read(size, offset)
    end,
    close = function()
      file:close()
    end,
  }
end

-- One file ---------------------------------------------------------------------------------------------------------

--- Bytes of an earlier part that are kept, for a total of `size`.
local function kept_size(stat, size)
  return stat and stat.type == "file" and stat.size <= size and stat.size or 0
end

local function found(fn, ...)
  local ok, result = pcall(fn, ...)
  if ok then
    return result
  elseif errors.is(result, "not_found") then
    return nil
  end
  error(result, 0)
end

--- Set a local file's time of modification.
local function set_time(path, mtime)
  local problem = scheduler.await(function(done)
    uv.fs_utime(path, mtime, mtime, function(err)
      done(nil, err)
    end)
  end, "the time of " .. path)
  if problem then
    errors.raise(errors.wrap(problem, { op = "ssh.get", target = path }))
  end
end

local function put_with(client, source, remote, options)
  if options.parents then
    client:mkdir_p(dirname(remote))
  end
  local path = options.direct and remote or part_name(remote, options.resume)
  local complete = false
  local _ <close> = setmetatable({}, {
    __close = function()
      source.close()
      if not complete and not options.resume and not options.direct and not client.ended then
        pcall(task.shield, client.remove, client, path)
      end
    end,
  })
  if options.direct then
    check_kind("ssh.put", remote, client:exists(remote))
  end
  local mode = options.mode or source.mode
  local offset = options.resume and kept_size(found(client.stat, client, path), source.size) or 0
  do
    -- Until it is complete nobody else may read a file that will be private.
    local file <close> = client:open(path, offset > 0 and "w+" or "w", mode & tonumber("700", 8))
    local position = offset
    file:write_from(offset, function()
      if options.progress then
        options.progress(position, source.size)
      end
      local piece = source.read(position, PIECE)
      position = position + #piece
      return piece
    end)
    if options.mode or not options.direct then
      file:setstat({ mode = mode, mtime = options.times and source.mtime or nil })
    end
    if options.sync then
      file:sync()
    end
    file:close()
    if options.progress then
      options.progress(position, position)
    end
  end
  if not options.direct then
    client:rename(path, remote)
  end
  complete = true
end

--- Send a file, or data, to a path there.
---@async
---@param connection ciranda.ssh.Connection
---@param source string|{ data: string } a local path, or the content
---@param remote string relative to the login directory unless absolute
---@param options ciranda.ssh.TransferOptions?
--- Raises `not_found`, `permission`, `no_space`, `failed`, ... with the path; or what ended the connection.
function M.put(connection, source, remote, options)
  options = options or {}
  errors.check_options(options, OPTIONS, "connection:put", errors.level_outside("ciranda/ssh/"))
  local opened = open_source(source)
  local ok, err = pcall(with_client, connection, options, function(client)
    put_with(client, opened, remote, options)
  end)
  opened.close()
  if not ok then
    error(err, 0)
  end
end

local function get_with(client, remote, target, options)
  local stat = client:stat(remote)
  check_kind("ssh.get", remote, stat.type)
  if stat.type == "directory" then
    errors.raise({
      code = "invalid",
      op = "ssh.get",
      target = remote,
      message = remote .. " is a directory: use get_tree",
    })
  end
  local file <close> = client:open(remote)
  local size = stat.size or 0
  local done = 0
  local function report(bytes)
    done = done + #bytes
    if options.progress then
      options.progress(done, math.max(size, done))
    end
  end
  if not target then
    local parts = {}
    file:read_to(0, nil, function(bytes)
      parts[#parts + 1] = bytes
      report(bytes)
    end)
    return table.concat(parts)
  end

  if options.parents then
    fs.mkdir_p(fs.dirname(target))
  end
  if options.direct then
    check_kind("ssh.get", target, fs.exists(target))
  end
  local path = options.direct and target or part_name(target, options.resume)
  local complete = false
  local _ <close> = setmetatable({}, {
    __close = function()
      if not complete and not options.resume and not options.direct then
        pcall(task.shield, fs.remove, path)
      end
    end,
  })
  local mode = options.mode or (stat.mode or tonumber("644", 8)) & PERMISSIONS
  done = options.resume and kept_size(found(fs.stat, path), size) or 0
  do
    local out <close> = fs.open(path, done > 0 and "r+" or "w", mode & tonumber("700", 8))
    local position = done
    file:read_to(done, nil, function(bytes)
      out:write(bytes, position)
      position = position + #bytes
      report(bytes)
    end)
    if options.sync then
      out:sync()
    end
  end
  if not options.direct then
    fs.chmod(path, mode)
  end
  if options.times and stat.mtime then
    set_time(path, stat.mtime)
  end
  if not options.direct then
    fs.rename(path, target)
  end
  complete = true
  return target
end

--- Fetch a file from there.
---@async
---@param connection ciranda.ssh.Connection
---@param remote string
---@param target string? a local path; without it the content is returned
---@param options ciranda.ssh.TransferOptions?
---@return string content or the path
--- Raises as `put` does.
function M.get(connection, remote, target, options)
  options = options or {}
  errors.check_options(options, OPTIONS, "connection:get", errors.level_outside("ciranda/ssh/"))
  return with_client(connection, options, function(client)
    return get_with(client, remote, target, options)
  end)
end

-- Directories ------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.TreeOptions
---@field times boolean?
---@field exclude (fun(relative: string, type: string): boolean)?  true leaves it out, with everything in it
---@field progress (fun(files: integer, bytes: integer))?          called after each file
---@field sftp ciranda.ssh.Sftp?

local TREE_OPTIONS = { times = true, exclude = true, progress = true, sftp = true }

local function counter(options)
  local files, bytes = 0, 0
  return function(size)
    files, bytes = files + 1, bytes + size
    if options.progress then
      options.progress(files, bytes)
    end
  end
end

--- Send everything in a directory: files with their modes, links as links. What is there and not here stays.
---@async
---@param connection ciranda.ssh.Connection
---@param directory string a local directory
---@param remote string where its content goes; made when it is not there
---@param options ciranda.ssh.TreeOptions?
--- Raises as `put` does; what has been sent by then stays.
function M.put_tree(connection, directory, remote, options)
  options = options or {}
  errors.check_options(options, TREE_OPTIONS, "connection:put_tree", errors.level_outside("ciranda/ssh/"))
  local exclude = options.exclude or function() end
  with_client(connection, options, function(client)
    client:mkdir_p(remote)
    local files = {}
    local skipped = {}
    for path, entry, relative in
      fs.walk(directory, function(path)
        return not skipped[path]
      end)
    do
      if exclude(relative, entry.type) then
        skipped[path] = true
      elseif entry.type == "directory" then
        client:mkdir_p(remote .. "/" .. relative, fs.stat(path).mode & PERMISSIONS | tonumber("700", 8))
      elseif entry.type == "file" or entry.type == "link" then
        files[#files + 1] = { path = path, type = entry.type, remote = remote .. "/" .. relative }
      end
    end
    local count = counter(options)
    task.map(files, function(file)
      if file.type == "link" then
        local target = fs.readlink(file.path)
        if found(client.lstat, client, file.remote) then
          client:remove(file.remote)
        end
        client:symlink(target, file.remote)
        count(0)
      else
        local source = open_source(file.path)
        put_with(client, source, file.remote, { times = options.times })
        count(source.size)
      end
    end, AT_ONCE)
  end)
end

--- Fetch everything in a directory there.
---@async
---@param connection ciranda.ssh.Connection
---@param remote string
---@param directory string a local directory, made when it is not there
---@param options ciranda.ssh.TreeOptions?
--- Raises as `get` does; `protocol` when the server gives names that lead out of the directory.
function M.get_tree(connection, remote, directory, options)
  options = options or {}
  errors.check_options(options, TREE_OPTIONS, "connection:get_tree", errors.level_outside("ciranda/ssh/"))
  local exclude = options.exclude or function() end
  with_client(connection, options, function(client)
    local files = {}
    local function scan(from, to, relative)
      fs.mkdir_p(to)
      for _, entry in ipairs(client:list(from)) do
        local name, kind = entry.name, entry.attributes.type
        if name:find("/", 1, true) or name:find("\0", 1, true) or name == "" then
          errors.raise({
            code = "protocol",
            op = "ssh.get",
            target = from,
            message = ("the server lists %q in %s, which is no file's name"):format(name, from),
          })
        end
        local below = relative .. name
        if not exclude(below, kind) then
          if kind == "directory" then
            scan(from .. "/" .. name, to .. "/" .. name, below .. "/")
          elseif kind == "file" or kind == "link" then
            files[#files + 1] = { remote = from .. "/" .. name, path = to .. "/" .. name, type = kind }
          end
        end
      end
    end
    scan(remote, directory, "")
    local count = counter(options)
    task.map(files, function(file)
      if file.type == "link" then
        local target = client:readlink(file.remote)
        if found(fs.lstat, file.path) then
          fs.remove(file.path)
        end
        fs.symlink(target, file.path)
        count(0)
      else
        get_with(client, file.remote, file.path, { times = options.times })
        count(fs.stat(file.path).size)
      end
    end, AT_ONCE)
  end)
end

return M
