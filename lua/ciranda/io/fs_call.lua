--- Calls of the file system, for `ciranda.io.fs` and its open files: waiting in a task, and errors with a name.
local combine = require("ciranda.task.combine")
local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local uv = require("luv")

local M = {}

--- "open /path: no such file or directory (ENOENT)" as an error value.
local function failure(op, path, err)
  local name, text = tostring(err):match("^(E[A-Z0-9]+): ([^:]+)")
  if not name then
    name, text = tostring(err), "it failed"
  end
  return errors.new({
    code = errors.code_of(name),
    op = "fs." .. op,
    target = path,
    message = ("%s (%s)"):format(text, name),
    errno = name,
  })
end

--- Refuses what is no path.
---@param path any
---@param op string for the message
function M.check_path(path, op)
  if type(path) ~= "string" or path == "" or path:find("\0", 1, true) then
    errors.misuse(
      errors.level_outside("ciranda/io/fs"),
      "fs.%s: a path expected, got %s",
      op,
      type(path) == "string" and ("%q"):format(path) or type(path)
    )
  end
end

--- What `call` does, without raising: an error with a traceback costs more than the call.
---@return any value nil when it failed
---@return ciranda.Error? err
---@param op string
---@param path string
---@param fn function
function M.try(op, path, fn, ...)
  if not scheduler.can_wait() then
    local value, err = fn(...)
    return value, value == nil and failure(op, path, err) or nil
  end
  local args = table.pack(...)
  return scheduler.await(function(done)
    args[args.n + 1] = function(err, value)
      if err then
        return done(nil, nil, failure(op, path, err))
      end
      return done(nil, value)
    end
    local request, message = fn(table.unpack(args, 1, args.n + 1))
    if not request then
      done(nil, nil, failure(op, path, message))
      return nil
    end
    return function()
      -- One that has begun in the pool cannot be called back: its result is waited for.
      uv.cancel(request)
      return false
    end,
      fn == uv.fs_open and uv.fs_close or nil
  end, ("fs.%s %s"):format(op, path))
end

--- Calls a function of luv's, waiting for it in a task. Raises the failure.
---@param op string for messages
---@param path string
---@param fn function whose last argument is the callback
---@return any value
function M.call(op, path, fn, ...)
  local value, err = M.try(op, path, fn, ...)
  if err then
    errors.raise(err)
  end
  return value
end

--- The same; nil instead of the error when there is no such path.
---@param op string
---@param path string
---@param fn function
---@param ... any what `fn` takes
---@return any? value
function M.call_if_found(op, path, fn, ...)
  local value, err = M.try(op, path, fn, ...)
  if err and not errors.is(err, "not_found") then
    errors.raise(err)
  end
  return value
end

--- Calls a function of clean-up: a cancellation that comes now must not make it be left out.
---@param fn function
---@param ... any what `fn` takes
---@return any ... what it returns
function M.clean_up(fn, ...)
  if scheduler.can_wait() then
    return combine.shield(fn, ...)
  end
  return fn(...)
end

---@class ciranda.Stat
---@field type "file"|"directory"|"link"|"fifo"|"socket"|"char"|"block"|"unknown"
---@field size integer bytes
---@field mode integer permission bits
---@field uid integer
---@field gid integer
---@field ino integer
---@field dev integer
---@field nlink integer
---@field mtime number seconds
---@field mtime_ns integer nanoseconds

---@param raw table as luv has it
---@return ciranda.Stat
function M.to_stat(raw)
  return {
    type = raw.type,
    size = raw.size,
    mode = raw.mode & tonumber("7777", 8),
    uid = raw.uid,
    gid = raw.gid,
    ino = raw.ino,
    dev = raw.dev,
    nlink = raw.nlink,
    mtime = raw.mtime.sec + raw.mtime.nsec / 1e9,
    mtime_ns = raw.mtime.sec * 1000000000 + raw.mtime.nsec,
  }
end

return M
