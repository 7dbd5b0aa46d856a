--- Many workers' output on one of this program's streams: prefixed lines, equal ones folded, or one worker's bytes as
--- they are. Nobody's slow terminal holds up the loop: whoever feeds waits instead, and so does the command behind it.
local output = require("ciranda.run.output")
local task = require("ciranda.task")
local uv = require("luv")
local view = require("ciranda.fleet.view")

local M = {}

--- Seconds between two looks at which lines are ready.
local TICK = 0.1
--- Bytes of ready lines that may wait to be written.
local LIMIT = 1048576

---@class ciranda.run.Screen
---@field private output ciranda.run.Output
---@field private view ciranda.View
---@field private ready string[]
---@field private waiting integer
local Screen = {}
Screen.__index = Screen

--- A screen on a descriptor of this process.
---@param descriptor integer 1 or 2
---@return ciranda.run.Screen to be closed
function M.new(descriptor)
  local screen = setmetatable(
    { output = output.new(descriptor), ready = {}, waiting = 0, room = task.event(), ending = task.event() },
    Screen
  )
  screen.view = view.new({
    write = function(text)
      table.insert(screen.ready, text)
      screen.waiting = screen.waiting + #text
    end,
    clock = function()
      return uv.hrtime() / 1e9
    end,
  })
  return screen
end

--- Workers that will be shown: a line that comes from all of them need not wait.
---@param workers ciranda.Worker[]
function Screen:expect(workers)
  for _, worker in ipairs(workers) do
    self.view:add(worker)
  end
end

--- Bytes of a worker, to be shown as prefixed lines. Waits while too much is not read.
---@async
---@param worker ciranda.Worker
---@param bytes string
function Screen:feed(worker, bytes)
  self.view:feed(worker, bytes)
  while self.waiting > LIMIT do
    self.room:wait()
  end
end

--- Bytes to be shown as they are. Waits until they are written.
---@async
---@param bytes string
function Screen:raw(bytes)
  self.output:write(bytes)
  self.output:flush()
end

--- A worker has ended.
---@param worker ciranda.Worker
function Screen:finish(worker)
  self.view:finish(worker)
end

---@private
function Screen:write_ready()
  local text = table.concat(self.ready)
  self.ready, self.waiting = {}, 0
  if text ~= "" then
    self.output:write(text)
  end
  self.output:flush()
  self.room:set()
  self.room = task.event()
end

--- Shows lines as they become ready, until the screen is closed.
---@param scope ciranda.task.Scope
function Screen:start(scope)
  self.ticker = scope:spawn(function()
    while not self.ending:is_set() do
      task.race({
        function()
          task.sleep(TICK)
        end,
        function()
          self.ending:wait()
        end,
      })
      self.view:flush()
      self:write_ready()
    end
  end)
end

--- Shows what still waits, and gives the descriptor back.
---@async
function Screen:close()
  if not self.ending:is_set() then
    self.ending:set()
    if self.ticker then
      self.ticker:wait()
    end
    self.view:close()
    self:write_ready()
    self.output:close()
  end
end

Screen.__close = Screen.close

return M
