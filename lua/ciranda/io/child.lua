--- A program that was started: its streams, its signals, its end. `ciranda.io.process` is what people use.

local uv = require("luv")
local combine = require("ciranda.task.combine")
local errors = require("ciranda.io.error")
local pipes = require("ciranda.io.pipe")
local scheduler = require("ciranda.task.scheduler")
local sync = require("ciranda.task.sync")

local M = {}

--- Seconds between TERM and KILL. Less than the grace of a cancelled task, so that the task sees the end.
M.GRACE = 5

--- Bytes of output that are kept of each stream; a program that writes more is ended with an error.
M.MAX_OUTPUT = 64 * 1024 * 1024

-- Seconds to wait, after KILL, for the end of output that a process outside the group holds open.
local LAST_WAIT = 1

-- Seconds that output of a program we ended, and that has exited, may lie unread before it is thrown away.
local UNREAD_WAIT = 0.2

local function constant(name)
  return setmetatable({}, {
    __tostring = function()
      return "process." .. name
    end,
  })
end

M.CAPTURE = constant("CAPTURE")
M.PIPE = constant("PIPE")
M.INHERIT = constant("INHERIT")
M.DISCARD = constant("DISCARD")
M.STDOUT = constant("STDOUT")

-- Results ---------------------------------------------------------------------------------------------------

---@class ciranda.process.Result
---@field argv string[]
---@field pid integer
---@field code integer?     exit status; nil when a signal ended it
---@field signal string?    "SIGTERM" and the like
---@field signal_number integer?
---@field stdout string?    when captured
---@field stderr string?
local Result = {}
Result.__index = Result
Result.__name = "ciranda.process.Result"

--- How it ended, for messages: "exit status 3" or "SIGKILL".
---@return string
function Result:reason()
  return self.signal or ("exit status %d"):format(self.code)
end

local TAIL = 2000

--- Raise unless the exit status is 0.
---@return ciranda.process.Result self
function Result:check()
  if self.code == 0 then
    return self
  end
  local said = self.stderr and self.stderr ~= "" and self.stderr or self.stdout or ""
  said = said:sub(-TAIL):gsub("%s+$", "")
  errors.raise({
    code = "failed",
    op = "process.run",
    target = self.argv[1],
    message = ("%s ended with %s%s"):format(self.argv[1], self:reason(), said ~= "" and ": " .. said or ""),
    result = self,
  })
  return self
end

-- uv.constants has the names, as SIGTERM = 15; of two for one number these are the less known.
local SECOND_NAMES = { SIGIOT = true, SIGCLD = true, SIGPOLL = true, SIGUNUSED = true }
local signal_names

local function signal_name(number)
  if not signal_names then
    signal_names = {}
    for name, value in pairs(uv.constants) do
      if name:find("^SIG") and not SECOND_NAMES[name] then
        signal_names[value] = name
      end
    end
  end
  return signal_names[number] or ("signal %d"):format(number)
end

local function signal_number(signal)
  local number = signal
  if type(signal) == "string" then
    local name = signal:upper()
    number = uv.constants[name:find("^SIG") and name or "SIG" .. name]
  end
  if math.type(number) ~= "integer" or number < 0 then
    errors.misuse(errors.level_outside("ciranda/io/"), "process: unknown signal '%s'", tostring(signal))
  end
  return number
end

-- Starting --------------------------------------------------------------------------------------------------

--- What is wrong with a working directory, or nil.
local function fault_of_directory(cwd)
  local stat, _, name = uv.fs_stat(cwd)
  if not stat then
    return name == "ENOENT" and "no such directory" or tostring(name)
  end
  return stat.type ~= "directory" and "not a directory" or nil
end

--- Whether a program of this name lies in a directory of PATH, executable or not.
local function is_in_path(program, search_path)
  for directory in search_path:gmatch("[^:]+") do
    if uv.fs_stat(directory .. "/" .. program) then
      return true
    end
  end
  return false
end

--- Say what of a start failed: the directory, or the program.
local function start_failure(argv, message, name)
  local program = argv[1]
  local fault = argv.cwd and fault_of_directory(argv.cwd)
  if fault then
    fault = ("(cwd) '%s': %s"):format(argv.cwd, fault)
  elseif program:find("/", 1, true) then
    fault = name == "ENOENT" and "no such file, or its interpreter is missing" or nil
  else
    -- The system says EACCES, too, when it only could not look into a directory of PATH.
    local search_path = argv.env and argv.env.PATH or os.getenv("PATH") or ""
    if name == "ENOENT" or (name == "EACCES" and not is_in_path(program, search_path)) then
      name = "ENOENT"
      fault = "not found in PATH"
    end
  end
  local text = fault or tostring(message):match("^E%w+: (.*)") or tostring(message)
  return errors.new({
    code = errors.code_of(name),
    op = "process.spawn",
    target = program,
    message = "cannot start " .. (text:find("^%(cwd%)") and text or ("(cmd) '%s': %s"):format(program, text)),
    errno = name,
  })
end

---@class ciranda.Process
---@field argv string[]
---@field pid integer
---@field stdin ciranda.Writer?   with `stdin = process.PIPE`
---@field stdout ciranda.Reader?  with `stdout = process.PIPE`
---@field stderr ciranda.Reader?
local Process = {}
Process.__index = Process
Process.__name = "ciranda.Process"

function Process:__tostring()
  return ("process %d (%s)"):format(self.pid, self.argv[1])
end

-- luv measures the list of descriptors with #, so that an absent entry must not be nil.
local null_fd

local function null()
  null_fd = null_fd or assert(uv.fs_open("/dev/null", "r+", 0))
  return null_fd
end

--- What an output stream is connected to: the entry for luv, and the pipe to read from when it is ours to
--- read.
local function output_stdio(choice, callback, inherited, what)
  if callback or choice == nil or choice == M.CAPTURE or choice == M.PIPE then
    local pipe = uv.new_pipe(false)
    return pipe, pipe
  elseif choice == M.INHERIT then
    return inherited
  elseif choice == M.DISCARD then
    return null()
  elseif math.type(choice) == "integer" and choice >= 0 then
    return choice
  end
  errors.misuse(
    errors.level_outside("ciranda/io/"),
    "process: %s must be one of process.CAPTURE, PIPE, INHERIT, DISCARD or a file descriptor, got %s",
    what,
    tostring(choice)
  )
end

--- Call a function for each output stream that is a pipe of ours.
local function each_reader(self, fn)
  for _, what in ipairs({ "stdout", "stderr" }) do
    local reader = self["reader_" .. what]
    if reader then
      fn(reader, what)
    end
  end
end

--- The program we are ending has exited: its last output must not wait for a reader who does not come.
local function drop_unread(self)
  if self.open_pipes == 0 or self.unread_timer then
    return
  end
  self.unread_timer = uv.new_timer()
  self.unread_timer:start(math.ceil(UNREAD_WAIT * 1000), 0, function()
    self.unread_timer:close()
    each_reader(self, function(reader)
      if not reader.reading then
        reader:discard()
      end
    end)
  end)
end

--- Tell those who wait when the program has exited and every pipe is at its end.
local function settle(self)
  if self.exited and self.open_pipes == 0 and not self.result then
    for _, timer in ipairs({ self.kill_timer or false, self.unread_timer or false }) do
      if timer and not timer:is_closing() then
        timer:close()
      end
    end
    local function captured(list)
      return list and table.concat(list)
    end
    self.result = setmetatable({
      argv = self.argv,
      pid = self.pid,
      code = self.exit_signal == 0 and self.exit_code or nil,
      signal = self.exit_signal ~= 0 and signal_name(self.exit_signal) or nil,
      signal_number = self.exit_signal ~= 0 and self.exit_signal or nil,
      stdout = captured(self.captured_stdout),
      stderr = captured(self.captured_stderr),
    }, Result)
    self.ended:set()
  end
end

--- Collect what a stream brings, up to the limit.
local function capture(self, reader, what, limit)
  local list, size = {}, 0
  reader:drain(function(chunk)
    size = size + #chunk
    if size <= limit then
      list[#list + 1] = chunk
    elseif not self.failure then
      self.failure = errors.new({
        code = "failed",
        op = "process.run",
        target = self.argv[1],
        message = ("%s wrote more than %d bytes to its %s; use on_%s, or raise max_output"):format(
          self.argv[1],
          limit,
          what,
          what
        ),
      })
      self:terminate()
    end
  end)
  return list
end

--- Everything a program is connected to. `ours` are the pipes to read and write, `temporary` descriptors to
--- close when it has been started.
local function connect(argv)
  local stdio, ours, temporary = {}, {}, {}
  if argv.stdin == M.INHERIT then
    stdio[1] = 0
  elseif argv.stdin == nil or argv.stdin == "" or argv.stdin == M.DISCARD then
    stdio[1] = null()
  else
    ours.stdin = uv.new_pipe(false)
    stdio[1] = ours.stdin
  end
  stdio[2], ours.stdout = output_stdio(argv.stdout, argv.on_stdout, 1, "stdout")
  if argv.stderr ~= M.STDOUT then
    stdio[3], ours.stderr = output_stdio(argv.stderr, argv.on_stderr, 2, "stderr")
  elseif ours.stdout then
    -- Both write to one pipe, so that lines keep their order.
    local ends = assert(uv.pipe({ nonblock = true }, nil))
    ours.stdout:open(ends.read)
    stdio[2], stdio[3] = ends.write, ends.write
    temporary[1] = ends.write
  else
    stdio[3] = stdio[2]
  end
  return stdio, ours, temporary
end

--- Start a program. The options have been checked.
---@param argv ciranda.process.Options
---@param env string[]? "NAME=value" entries; ours when absent
---@return ciranda.Process
function M.start(argv, env)
  scheduler.check_can_wait()
  local self = setmetatable({ argv = argv, open_pipes = 0, ended = sync.event() }, Process)
  local stdio, ours, temporary = connect(argv)

  local arguments = {}
  for index = 2, #argv do
    arguments[index - 1] = tostring(argv[index])
  end
  local handle, pid, name
  handle, pid, name = uv.spawn(argv[1], {
    args = arguments,
    stdio = stdio,
    env = env,
    cwd = argv.cwd,
    detached = not argv.foreground,
  }, function(code, signal)
    self.exited, self.exit_code, self.exit_signal = true, code, signal
    handle:close()
    if self.terminating then
      drop_unread(self)
    end
    settle(self)
  end)
  for _, fd in ipairs(temporary) do
    uv.fs_close(fd)
  end
  if not handle then
    for _, pipe in pairs(ours) do
      pipe:close()
    end
    errors.raise(start_failure(argv, pid, name))
  end
  self.handle, self.pid = handle, pid

  local limit = argv.max_output or M.MAX_OUTPUT
  for _, what in ipairs({ "stdout", "stderr" }) do
    local pipe = ours[what]
    if pipe then
      self.open_pipes = self.open_pipes + 1
      local reader = pipes.reader(pipe, ("%s of %s"):format(what, argv[1]), function()
        self.open_pipes = self.open_pipes - 1
        settle(self)
      end)
      self["reader_" .. what] = reader
      if argv[what] == M.PIPE then
        self[what] = reader
      elseif not argv["on_" .. what] then
        self["captured_" .. what] = capture(self, reader, what, limit)
      end
    end
  end
  if ours.stdin then
    self.writer = pipes.writer(ours.stdin, ("standard input of %s"):format(argv[1]))
    if argv.stdin == M.PIPE then
      self.stdin = self.writer
    end
  end
  return self
end

-- Ending ----------------------------------------------------------------------------------------------------

--- Send a signal to the program's group; to the program alone when it runs in the foreground.
---@param signal string|integer "SIGTERM", "TERM" or a number
---@return boolean sent false when it has ended already
function Process:signal(signal)
  local number = signal_number(signal)
  if self.exited and self.open_pipes == 0 then
    return false
  end
  if self.argv.foreground then
    return not self.exited and uv.kill(self.pid, number) ~= nil
  end
  return uv.kill(-self.pid, number) ~= nil
end

--- Begin to end it: TERM to the group, KILL after the grace, and at last closed pipes. `wait` sees the end.
---@param grace number? seconds between TERM and KILL; as given to spawn
function Process:terminate(grace)
  if self.result or self.terminating then
    return
  end
  self.terminating = true
  self:signal("SIGTERM")
  grace = grace or self.argv.grace or M.GRACE
  self.kill_timer = uv.new_timer()
  uv.update_time()
  self.kill_timer:start(math.ceil(grace * 1000), 0, function()
    self:signal("SIGKILL")
    self.kill_timer:start(LAST_WAIT * 1000, 0, function()
      -- A process that left the group keeps a pipe open: the rest of its output is not ours to wait for.
      each_reader(self, function(reader)
        reader:close()
      end)
    end)
  end)
  if self.exited then
    drop_unread(self)
  end
end

--- Wait until the program has exited and its output is at its end. Cancelling the wait ends the program.
---@async
---@return ciranda.process.Result
function Process:wait()
  if not self.result then
    scheduler.await(function(done)
      local interrupted = false
      self.ended:_on_set(function()
        done(interrupted and "interrupted" or nil)
      end)
      return function()
        interrupted = true
        self:terminate()
        return false
      end
    end, self)
  end
  if self.failure then
    errors.raise(self.failure)
  end
  return self.result
end

--- End the program if it still runs, and wait for that.
---@async
function Process:close()
  if self.writer then
    self.writer:close()
  end
  each_reader(self, function(reader, what)
    if not self["captured_" .. what] then
      reader:discard()
    end
  end)
  if self.result then
    return
  end
  self:terminate()
  if scheduler.can_wait() then
    combine.shield(function()
      self.ended:wait()
    end)
  end
end

--- Let go of our ends of its pipes: for a file of io.popen that is collected unclosed.
function Process:_abandon()
  if self.writer then
    self.writer:close()
  end
  each_reader(self, function(reader)
    reader:close()
  end)
end

function Process:__close()
  self:close()
end

return M
