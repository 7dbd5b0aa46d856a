--- The error value that the public API raises.
---
--- An error is a table, so that a program can test its code and a person can read its message:
---
---     local ok, e = pcall(fs.read, "/etc/motd")
---     if not ok and errors.is(e, "not_found") then ... end
---
--- Errors are recognised by the `__name` of their metatable, never by its identity: test runners load a
--- module more than once, and two instances must understand each other's errors.

local M = {}

---@class ciranda.Error
---@field code string            a stable word, one of `M.codes`
---@field message string         what failed, where, why, and what to do
---@field op string?             the operation, such as "fs.read"
---@field target string?         what it was applied to: a path, an address, a worker
---@field cause any              the error that led to this one
---@field traceback string?      where it was raised, and who was waiting for the task that raised it
---@field suppressed any[]?      failures of clean-up that came after this error

local NAME = "ciranda.Error"

--- The stable codes. A program may compare with these; it must not parse messages.
M.codes = {}
for code in
  ([[misuse usage timeout deadline cancelled interrupted refused unreachable reset closed resolve io auth
  hostkey not_found exists permission invalid quota stockout precondition unavailable rate_limit protocol
  parse no_space busy lost preempted unsupported failed internal]]):gmatch("%S+")
do
  M.codes[code] = true
end

-- What the names of libuv and errno mean in our words; any other name is "io".
local CODE_OF_ERRNO = {
  ECONNREFUSED = "refused",
  EHOSTUNREACH = "unreachable",
  ENETUNREACH = "unreachable",
  EHOSTDOWN = "unreachable",
  ENETDOWN = "unreachable",
  EADDRNOTAVAIL = "unreachable",
  ECONNRESET = "reset",
  ECONNABORTED = "reset",
  EPIPE = "closed",
  ENOTCONN = "closed",
  EOF = "closed",
  ETIMEDOUT = "timeout",
  EAI_NONAME = "resolve",
  EAI_AGAIN = "resolve",
  EAI_FAIL = "resolve",
  EAI_NODATA = "resolve",
  ENOENT = "not_found",
  ESRCH = "not_found",
  ENOTDIR = "not_found",
  ENXIO = "not_found",
  EEXIST = "exists",
  ENOTEMPTY = "exists",
  EADDRINUSE = "busy",
  EBUSY = "busy",
  ETXTBSY = "busy",
  EACCES = "permission",
  EPERM = "permission",
  EROFS = "permission",
  EINVAL = "invalid",
  ENAMETOOLONG = "invalid",
  EISDIR = "invalid",
  ELOOP = "invalid",
  ENOSPC = "no_space",
  EDQUOT = "no_space",
  EFBIG = "no_space",
  ENOSYS = "unsupported",
  ENOTSUP = "unsupported",
  EOPNOTSUPP = "unsupported",
  EAFNOSUPPORT = "unsupported",
  EPROTONOSUPPORT = "unsupported",
  ECANCELED = "cancelled",
  EPROTO = "protocol",
  EBADMSG = "protocol",
}

--- Text of any value that was raised: its `__tostring` when it has one, else its fields.
---@param value any
---@return string
function M.text(value)
  if type(value) == "string" then
    return value
  end
  if value == nil then
    return "error(nil)"
  end
  local meta = getmetatable(value)
  if type(value) ~= "table" or (type(meta) == "table" and (meta.__tostring or meta.__name == NAME)) then
    local ok, text = pcall(tostring, value)
    return ok and text or ("(%s whose __tostring fails: %s)"):format(type(value), M.text(text))
  end
  if type(value.message) == "string" then
    return value.code and ("%s (%s)"):format(value.message, tostring(value.code)) or value.message
  end
  local parts = {}
  for key, field in pairs(value) do
    parts[#parts + 1] = ("%s = %s"):format(tostring(key), tostring(field))
  end
  table.sort(parts)
  return "{" .. table.concat(parts, ", ") .. "}"
end

local Error = { __name = NAME }
Error.__index = Error

--- "op target: message", without what the message already says.
function Error.__tostring(self)
  local message = M.text(rawget(self, "message"))
  local prefix = {}
  for _, field in ipairs({ "op", "target" }) do
    local value = rawget(self, field)
    if value ~= nil then
      local text = M.text(value)
      if not message:find(text, 1, true) then
        prefix[#prefix + 1] = text
      end
    end
  end
  if #prefix == 0 then
    return message
  end
  return table.concat(prefix, " ") .. ": " .. message
end

--- The whole story: the text, its causes, the failures of clean-up and the traceback.
---@return string
function Error:describe()
  local lines = { tostring(self) }
  local cause, depth = self.cause, 0
  while cause ~= nil and depth < 10 do
    local text = M.text(cause)
    if not lines[#lines]:find(text, 1, true) then
      lines[#lines + 1] = "  because: " .. text
    end
    cause, depth = type(cause) == "table" and cause.cause or nil, depth + 1
  end
  for _, other in ipairs(self.suppressed or {}) do
    lines[#lines + 1] = "  also: " .. M.text(other)
  end
  if self.traceback then
    lines[#lines + 1] = self.traceback
  end
  return table.concat(lines, "\n")
end

--- Whether a value is an error of ours and, when codes are given, has one of them.
---@param value any
---@param ... string codes
---@return boolean
function M.is(value, ...)
  local meta = type(value) == "table" and getmetatable(value)
  if type(meta) ~= "table" or meta.__name ~= NAME then
    return false
  end
  local count = select("#", ...)
  for index = 1, count do
    if value.code == (select(index, ...)) then
      return true
    end
  end
  return count == 0
end

--- Whether what was caught is nobody's to go on from, so that who caught it has to raise it again: the task is
--- cancelled, or a program has a mistake. Any other error is an outcome, for whoever can do without what failed.
---@param value any
---@return boolean
function M.is_fatal(value)
  return not M.is(value) or M.is(value, "cancelled", "misuse", "internal")
end

--- "file:line: " of a function on the stack, or "" when it has no Lua source.
---@param level integer 1 is the function that calls this one
---@return string
local function position(level)
  local info = debug.getinfo(level + 1, "Sl")
  return info and info.currentline > 0 and ("%s:%d: "):format(info.short_src, info.currentline) or ""
end

--- Raise a misuse: the caller of the API wrote something that can never work.
---@param level integer whose line is named: 1 is the function that calls `misuse`, 2 its caller, and so on
---@param format string
---@param ... any for string.format
function M.misuse(level, format, ...)
  local message = select("#", ...) > 0 and format:format(...) or format
  error(
    setmetatable({
      code = "misuse",
      message = position(level + 1) .. message,
      traceback = debug.traceback(nil, level + 1),
    }, Error),
    0
  )
end

--- The level, for `M.misuse` in the calling function, of the first Lua function on the stack whose source is
--- elsewhere. It lets a room name its user's line however many of its own functions, or pcalls, lie between.
---@param room string part of a chunk name, such as "ciranda/task/"
---@return integer
function M.level_outside(room)
  local level = 2
  while true do
    local info = debug.getinfo(level, "S")
    if not info or (info.what ~= "C" and not info.source:find(room, 1, true)) then
      return level - 1
    end
    level = level + 1
  end
end

--- Make an error without raising it. The table becomes the error.
---@param fields { code: string, message: string, op: string?, target: string?, cause: any }
---@return ciranda.Error
function M.new(fields)
  if type(fields) ~= "table" then
    M.misuse(2, "error.new: a table expected, got %s", type(fields))
  end
  if type(fields.message) ~= "string" then
    M.misuse(2, "error.new: 'message' must be a string, got %s", type(fields.message))
  end
  if not M.codes[fields.code] then
    M.misuse(2, "error.new: unknown code %s", tostring(fields.code))
  end
  return setmetatable(fields, Error)
end

--- Make an error and raise it, with the traceback of this place.
---@param fields { code: string, message: string, op: string?, target: string?, cause: any } | ciranda.Error
function M.raise(fields)
  local e = M.is(fields) and fields or M.new(fields)
  e.traceback = e.traceback or debug.traceback(nil, 2)
  error(e, 0)
end

--- The code for a name of libuv or errno ("ECONNREFUSED" -> "refused"); any other name gives "io".
---@param name string?
---@return string
function M.code_of(name)
  return CODE_OF_ERRNO[name] or "io"
end

--- Make an error of anything that was raised or that a callback was given: an engine's table `{code,
--- message}`, luv's "ENOENT: no such file", a string. An error of ours comes back as a new one with the same
--- code that says more; a cancellation comes back as it is, since it must reach the scheduler unchanged.
---@param value any
---@param context { op: string?, target: string?, code: string?, message: string? }? `code` and `message` are
---       for what has none of its own
---@return ciranda.Error
function M.wrap(value, context)
  context = context or {}
  if M.is(value) then
    if value.code == "cancelled" or not (context.op or context.target) then
      return value
    end
    local copy = {}
    for key, field in pairs(value) do
      copy[key] = field
    end
    copy.op = context.op or value.op
    copy.target = context.target or value.target
    if copy.target ~= value.target or copy.op ~= value.op then
      copy.message = tostring(value)
    end
    copy.cause = value
    return setmetatable(copy, Error)
  end

  local fields = { op = context.op, target = context.target }
  if type(value) == "table" and (type(value.message) == "string" or M.codes[value.code]) then
    for key, field in pairs(value) do
      fields[key] = field
    end
    fields.op = context.op or fields.op
    fields.target = context.target or fields.target
    fields.code = M.codes[value.code] and value.code or context.code or "failed"
    fields.message = type(value.message) == "string" and value.message or M.text(value)
  else
    fields.message = context.message or M.text(value)
    local name = type(value) == "string" and value:match("^(E[A-Z0-9_]+)")
    fields.code = name and M.code_of(name) or context.code or "failed"
    if type(value) ~= "string" then
      fields.cause = value
    end
  end
  return setmetatable(fields, Error)
end

--- Refuse unknown keys of an options table: a misspelt option must not be ignored.
---@param options table
---@param allowed table<string, any> keys are the names that are known
---@param what string the function, for the message
---@param level integer? whose line is named; 2, the caller of the function that checks, when absent
function M.check_options(options, allowed, what, level)
  for key in pairs(options) do
    if allowed[key] == nil then
      local names = {}
      for name in pairs(allowed) do
        names[#names + 1] = tostring(name)
      end
      table.sort(names)
      M.misuse(
        (level or 2) + 1,
        "%s: unknown option '%s' (known: %s)",
        what,
        tostring(key),
        table.concat(names, ", ")
      )
    end
  end
end

return M
