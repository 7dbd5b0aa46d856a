--- Standard output that never holds up the loop: bytes wait here while nobody reads them.
--
-- The descriptor is opened anew through /proc, so that making it non-blocking does not reach the shell or whoever
-- else shares it.
local err = require("ciranda.io.error")
local pipes = require("ciranda.io.pipe")
local stdio = require("ciranda.io.stdio")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Bytes that may wait; who writes more waits until they are fewer.
local LIMIT = 1048576

---@class ciranda.run.Output
---@field private writer ciranda.Writer?
---@field private pieces string[]
---@field private waiting integer
---@field private before fun()
---@field private turn ciranda.task.Semaphore who writes
local Output = {}
Output.__index = Output

--- An output on a descriptor of this process.
---@param descriptor integer? 1
---@param before fun()? called before bytes are written, to take a status line away
---@return ciranda.run.Output
function M.new(descriptor, before)
  descriptor = descriptor or 1
  local output = setmetatable({
    descriptor = descriptor,
    before = before or function() end,
    pieces = {},
    waiting = 0,
    more = task.event(),
    room = task.event(),
    turn = task.semaphore(1),
    gone = false,
  }, Output)
  local kind = uv.guess_handle(descriptor)
  if kind == "pipe" or kind == "tty" then
    local fd = uv.fs_open(("/proc/self/fd/%d"):format(descriptor), "a", 0)
    if fd then
      local stream = kind == "tty" and uv.new_tty(fd, false) or uv.new_pipe(false)
      if kind == "pipe" then
        stream:open(fd)
      end
      output.writer = pipes.writer(stream, "standard output")
    end
  end
  return output
end

--- Writes to what never makes anybody wait, such as a file. What standard output did not take is known at the end.
---@param file file*
---@param bytes string
---@return boolean? taken
local function put(file, bytes)
  local ok, message, errno = file:write(bytes)
  if ok then
    ok, message, errno = file:flush()
  end
  if file == io.stdout then
    stdio.note(ok, message, errno)
  end
  return ok and true
end

--- Takes bytes. Waits while too many of them are not read.
---@async
---@param bytes string
function Output:write(bytes)
  if self.gone then
    return
  elseif not self.writer then
    self.before()
    self.gone = not put(self.descriptor == 2 and io.stderr or io.stdout, bytes)
    return
  end
  self.pieces[#self.pieces + 1] = bytes
  self.waiting = self.waiting + #bytes
  self.more:set()
  while self.waiting > LIMIT and not self.gone and task.current() do
    self.room:wait()
  end
end

--- Writes what waits, until cancelled. To be spawned by the owner.
---@async
function Output:run()
  while true do
    self.more:wait()
    self.more = task.event()
    self:flush()
  end
end

--- Writes everything that waits now, behind what another task is writing. When nobody reads any more (`| head`) the
--- rest is dropped, and the job goes on.
---@async
function Output:flush()
  self.turn:with(self.write_out, self)
end

---@private
function Output:write_out()
  while #self.pieces > 0 and not self.gone do
    local bytes = table.concat(self.pieces)
    self.pieces, self.waiting = {}, 0
    self.before()
    local ok, problem = pcall(self.writer.write, self.writer, bytes)
    if not ok then
      if err.is_fatal(problem) then
        error(problem, 0)
      end
      self.gone = true
    end
    self.room:set()
    self.room = task.event()
  end
end

--- Gives the descriptor back; what waits is dropped.
function Output:close()
  if self.writer then
    self.writer:close()
  end
end

return M
