--- Many workers' output on one of this program's streams: prefixed lines, equal ones folded, or one worker's bytes as
--- they are. Nobody's slow terminal holds up the loop: whoever feeds waits instead, and so does the command behind it.
local clock = require("ciranda.io.clock")
local output = require("ciranda.run.output")
local task = require("ciranda.task")
local view = require("ciranda.fleet.view")

local M = {}

--- Seconds between two looks at which lines are ready.
local TICK = 0.1
--- Bytes of ready lines that may wait to be written, and bytes taken at once.
local LIMIT, PIECE = 1048576, 4096
--- Bytes between two looks at which lines are ready that are a flood.
local FLOOD = 8192

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
  local screen = setmetatable({
    output = output.new(descriptor),
    ready = {},
    waiting = 0,
    fed = 0,
    room = task.event(),
    pressure = task.event(),
    ending = task.event(),
  }, Screen)
  screen.view = view.new({
    write = function(text)
      table.insert(screen.ready, text)
      screen.waiting = screen.waiting + #text
    end,
    clock = clock.now,
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
  for from = 1, #bytes, PIECE do
    local piece = bytes:sub(from, from + PIECE - 1)
    self.view:feed(worker, piece)
    self.fed = self.fed + #piece
    if self.fed > FLOOD then
      -- Lines that come this fast do not wait for their equals: folding thousands at once would hold up the loop.
      self.view:flush(true)
      self.fed = 0
      task.yield()
    end
    while self.waiting > LIMIT do
      self.pressure:set()
      self.room:wait()
    end
  end
end

--- Bytes to be shown as they are. Waits until they are written.
---@async
---@param bytes string
function Screen:raw(bytes)
  -- In pieces: the output makes whoever hands it more than it holds wait for a flush.
  for from = 1, #bytes, PIECE do
    self.output:write(bytes:sub(from, from + PIECE - 1))
    self.output:flush()
  end
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
  self:raw(text)
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
        function()
          self.pressure:wait()
        end,
      })
      self.pressure = task.event()
      self.view:flush()
      self.fed = 0
      self:write_ready()
    end
  end)
end

--- Has whoever read this gone, so that nothing is shown any more?
---@return boolean
function Screen:is_gone()
  return self.output.gone
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
