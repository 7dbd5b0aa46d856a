--- os.execute and io.popen that wait instead of stopping every task.
---
--- `install` replaces them, and io.type, io.input, io.output, io.read, io.write, io.lines and io.close, which
--- must know the new kind of file. Outside tasks, and where a task cannot be suspended, the stock functions
--- serve; a stock file is always handed to its stock function. Both go through `/bin/sh -c`. When standard
--- input is a terminal a program stays in our process group, so that it can use the terminal; else it has a
--- group of its own, which ends with its task.

local errors = require("ciranda.io.error")
local process = require("ciranda.io.process")
local scheduler = require("ciranda.task.scheduler")
local uv = require("luv")

local M = {}

local stock = {
  execute = os.execute,
  popen = io.popen,
  type = io.type,
  input = io.input,
  output = io.output,
  read = io.read,
  write = io.write,
  flush = io.flush,
  lines = io.lines,
  close = io.close,
}

local function foreground()
  return uv.guess_handle(0) == "tty"
end

--- What os.execute and file:close return for a program that has ended.
local function ending(result)
  if result.signal then
    return nil, "signal", result.signal_number
  end
  return result.code == 0 or nil, "exit", result.code
end

-- Programs of os.execute that have the terminal now.
local on_terminal = 0

--- Whether a program of os.execute has the terminal: a Ctrl-C there is meant for it, and reaches it, so that
--- a host should leave it alone, as the stock os.execute does.
---@return boolean
function M.has_foreground()
  return on_terminal > 0
end

--- os.execute: waits in a task.
---@async
---@param command string?
function M.execute(command)
  if command == nil or not scheduler.can_wait() then
    return stock.execute(command)
  end
  if type(command) ~= "string" and type(command) ~= "number" then
    error(("bad argument #1 to 'execute' (string expected, got %s)"):format(type(command)), 2)
  end
  io.stdout:flush() -- the program writes to the same descriptor
  local terminal = foreground()
  on_terminal = on_terminal + (terminal and 1 or 0)
  local _ <close> = setmetatable({}, {
    __close = function()
      on_terminal = on_terminal - (terminal and 1 or 0)
    end,
  })
  local result = process.run({
    "/bin/sh",
    "-c",
    tostring(command),
    stdin = process.INHERIT,
    stdout = process.INHERIT,
    stderr = process.INHERIT,
    foreground = terminal,
  })
  return ending(result)
end

-- Files of io.popen -----------------------------------------------------------------------------------------

---@class ciranda.PipeFile
local PipeFile = {}
PipeFile.__index = PipeFile
PipeFile.__name = "FILE*"

local function is_ours(value)
  return type(value) == "table" and getmetatable(value) == PipeFile
end

function PipeFile:__tostring()
  return self.closed and "file (closed)" or ("file (%p)"):format(self)
end

local function check_open(file)
  if file.closed then
    error("attempt to use a closed file", 3)
  end
end

--- What a stock file gives for a failure: nil, message, errno.
local function io_failure(err)
  if errors.is(err, "cancelled") or not errors.is(err) then
    error(err, 0)
  end
  return nil, err.message, 5
end

--- Have at least `size` bytes in the buffer, or all there are.
local function fill(file, size)
  while #file.buffer < size and not file.at_end do
    local chunk = file.process.stdout:read()
    if chunk then
      file.buffer = file.buffer .. chunk
    else
      file.at_end = true
    end
  end
end

local function take(file, size)
  local data = file.buffer:sub(1, size)
  file.buffer = file.buffer:sub(size + 1)
  return data
end

local function read_line(file, keep_newline)
  local parts = {}
  while true do
    local place = file.buffer:find("\n", 1, true)
    if place then
      local line = take(file, place)
      parts[#parts + 1] = keep_newline and line or line:sub(1, -2)
      return table.concat(parts)
    end
    parts[#parts + 1] = file.buffer
    file.buffer = ""
    fill(file, 1)
    if file.buffer == "" then
      local rest = table.concat(parts)
      return rest ~= "" and rest or nil
    end
  end
end

-- The stock library reads no numeral longer than this.
local LONGEST_NUMERAL = 200

--- Read a numeral byte by byte, as it may be all that comes for a while; what cannot be one is consumed, as
--- there.
local function read_number(file)
  repeat
    fill(file, 1)
    file.buffer = file.buffer:gsub("^%s+", "")
  until file.buffer ~= "" or file.at_end

  local size = 0
  local function accept(set)
    fill(file, size + 1)
    local found = size < LONGEST_NUMERAL and file.buffer:find("^[" .. set .. "]", size + 1) ~= nil
    size = found and size + 1 or size
    return found
  end
  local function accept_all(set)
    while accept(set) do
    end
  end
  accept("+-")
  local digits, exponent = "%d", "eE"
  if accept("0") and accept("xX") then
    digits, exponent = "%x", "pP"
  end
  accept_all(digits)
  if accept("%.") then
    accept_all(digits)
  end
  if accept(exponent) then
    accept("+-")
    accept_all("%d")
  end
  return tonumber(take(file, size))
end

local function read_one(file, format)
  if type(format) == "number" then
    local size = math.tointeger(format)
    if not size or size < 0 then
      error("bad argument #1 to 'read' (invalid format)", 4)
    end
    fill(file, math.max(size, 1))
    if file.buffer == "" then
      return nil
    end
    return take(file, size)
  end
  local letter = type(format) == "string" and format:gsub("^%*", ""):sub(1, 1)
  if letter == "l" then
    return read_line(file, false)
  elseif letter == "L" then
    return read_line(file, true)
  elseif letter == "n" then
    return read_number(file)
  elseif letter == "a" then
    fill(file, math.huge)
    return take(file, #file.buffer)
  end
  error("bad argument #1 to 'read' (invalid format)", 4)
end

local function read(file, ...)
  local formats = select("#", ...) > 0 and table.pack(...) or { "l", n = 1 }
  local values = {}
  for index = 1, formats.n do
    local value = read_one(file, formats[index])
    values[index] = value
    if value == nil then
      return table.unpack(values, 1, index)
    end
  end
  return table.unpack(values, 1, formats.n)
end

--- file:read, with the formats of the stock one.
---@async
function PipeFile:read(...)
  check_open(self)
  if not self.process.stdout then
    return nil, "Bad file descriptor", 9
  end
  local results = table.pack(pcall(read, self, ...))
  if results[1] then
    return table.unpack(results, 2, results.n)
  end
  if not errors.is(results[2]) then
    error(results[2], 0)
  end
  return io_failure(results[2])
end

--- file:lines, with the formats of the stock one.
---@async
function PipeFile:lines(...)
  check_open(self)
  local formats = table.pack(...)
  return function()
    if self.closed then
      error("file is already closed", 2)
    end
    local results = table.pack(self:read(table.unpack(formats, 1, formats.n)))
    if results[1] == nil and results[2] ~= nil then
      error(results[2], 2)
    end
    return table.unpack(results, 1, results.n)
  end
end

--- file:write.
---@async
function PipeFile:write(...)
  check_open(self)
  local writer = self.process.stdin
  if not writer then
    return nil, "Bad file descriptor", 9
  end
  for index = 1, select("#", ...) do
    local value = (select(index, ...))
    if type(value) ~= "string" and type(value) ~= "number" then
      error(("bad argument #%d to 'write' (string expected, got %s)"):format(index, type(value)), 2)
    end
    local ok, err = pcall(writer.write, writer, tostring(value))
    if not ok then
      return io_failure(err)
    end
  end
  return self
end

--- file:close: waits for the program.
---@async
---@return true? ok
---@return "exit"|"signal" what
---@return integer code
function PipeFile:close()
  check_open(self)
  self.closed = true
  if self.process.stdin then
    self.process.stdin:close()
  end
  if self.process.stdout then
    self.process.stdout:discard()
  end
  return ending(self.process:wait())
end

--- file:flush: what was written has reached the program's pipe already.
function PipeFile:flush()
  check_open(self)
  return self
end

function PipeFile:setvbuf()
  check_open(self)
  return true
end

function PipeFile:seek()
  check_open(self)
  return nil, "Illegal seek", 29
end

function PipeFile:__close()
  if not self.closed then
    self.closed = true
    self.process:close()
  end
end

function PipeFile:__gc()
  if not self.closed then
    self.process:_abandon()
  end
end

--- io.popen: reading and writing wait in a task.
---@async
---@param command string
---@param mode "r"|"w"|nil
function M.popen(command, mode)
  if not scheduler.can_wait() then
    return stock.popen(command, mode)
  end
  if type(command) ~= "string" and type(command) ~= "number" then
    error(("bad argument #1 to 'popen' (string expected, got %s)"):format(type(command)), 2)
  end
  mode = mode or "r"
  if mode ~= "r" and mode ~= "w" then
    error("bad argument #2 to 'popen' (invalid mode)", 2)
  end
  io.stdout:flush()
  local ok, started = pcall(process.spawn, {
    "/bin/sh",
    "-c",
    tostring(command),
    stdin = mode == "w" and process.PIPE or process.INHERIT,
    stdout = mode == "r" and process.PIPE or process.INHERIT,
    stderr = process.INHERIT,
    foreground = foreground(),
  })
  if not ok then
    return io_failure(started)
  end
  scheduler.current:_on_end(function(task)
    if task.state ~= "done" then
      started:terminate()
    end
  end)
  return setmetatable({ process = started, buffer = "", at_end = false, closed = false }, PipeFile)
end

-- The library's functions that take a file ------------------------------------------------------------------

--- io.type.
---@param value any
---@return string? "file", "closed file", or nil
function M.type(value)
  if is_ours(value) then
    return value.closed and "closed file" or "file"
  end
  return stock.type(value)
end

-- A file of ours that was made the default; nil while the default is a stock one.
local default = { input = nil, output = nil }

local function set_default(which, ...)
  local file = (...)
  if select("#", ...) == 0 or file == nil then
    return default[which] or stock[which]()
  end
  if is_ours(file) then
    default[which] = file
    return file
  end
  default[which] = nil
  return stock[which](file)
end

--- io.input.
function M.input(...)
  return set_default("input", ...)
end

--- io.output.
function M.output(...)
  return set_default("output", ...)
end

--- io.read.
---@async
function M.read(...)
  if default.input then
    return default.input:read(...)
  end
  return stock.read(...)
end

-- Why standard output did not take something.
local lost

-- Nobody reads any more (`| head`), which is no failure. The number is Linux's.
local EPIPE = 32

--- Takes note of what writing to standard output, or flushing it, has returned.
---@param file any
---@param message string?
---@param errno integer?
---@return any file, string? message, integer? errno the same
function M.note(file, message, errno)
  if not file and errno ~= EPIPE then
    lost = lost or message
  end
  return file, message, errno
end

--- Why something that was written to standard output has not arrived, such as a full disk; nil when all has, and when
--- nobody reads it. Whoever prints in small pieces hears of it only when the last are on their way.
---@return string?
function M.lost()
  M.note(io.stdout:flush())
  return lost
end

--- io.write.
---@async
function M.write(...)
  if default.output then
    return default.output:write(...)
  end
  return M.note(stock.write(...))
end

--- io.flush.
---@async
function M.flush()
  if default.output then
    return default.output:flush()
  end
  return M.note(stock.flush())
end

--- io.lines.
---@async
---@param name string? the default input's without one
function M.lines(name, ...)
  if name == nil and default.input then
    return default.input:lines(...)
  end
  return stock.lines(name, ...)
end

--- io.close.
---@async
---@param file any? the default output without one
function M.close(file)
  if file == nil and default.output then
    file = default.output
  end
  if is_ours(file) then
    return file:close()
  end
  if file == nil then
    return stock.close()
  end
  return stock.close(file)
end

--- Put them in place of the stock functions. Once a process: a test runner that loads this module again finds
--- the first one's.
function M.install()
  local registry = debug.getregistry()
  if registry["ciranda.io.stdio"] then
    return
  end
  registry["ciranda.io.stdio"] = M
  rawset(os, "execute", M.execute)
  for _, name in ipairs({ "popen", "type", "input", "output", "read", "write", "flush", "lines", "close" }) do
    rawset(io, name, M[name])
  end
end

return M
