--- What happened in the simulated cloud, in order: for the status page, for /sim/v1/events and for the terminal.

local clock = require("ciranda.sim.clock")

local M = {}

-- Older events are dropped beyond this many: a simulator may run for weeks.
M.CAPACITY = 10000

---@class ciranda.sim.Event
---@field id integer grows by one
---@field time string
---@field kind string "node", "queuedResource", "machine", "fault", "clock"
---@field subject string
---@field text string

---@class ciranda.sim.Events
---@field private clock ciranda.sim.Clock
---@field private list ciranda.sim.Event[]
---@field private first integer
---@field private last integer
---@field private watchers fun(event: ciranda.sim.Event)[]
local Events = {}
Events.__index = Events

---@param clock_of_world ciranda.sim.Clock
---@return ciranda.sim.Events
function M.new(clock_of_world)
  return setmetatable({ clock = clock_of_world, list = {}, first = 1, last = 0, watchers = {} }, Events)
end

---@param kind string
---@param subject string
---@param text string
function Events:add(kind, subject, text)
  self.last = self.last + 1
  local event =
    { id = self.last, time = clock.timestamp(self.clock:now()), kind = kind, subject = subject, text = text }
  self.list[self.last] = event
  if self.last - self.first >= M.CAPACITY then
    self.list[self.first] = nil
    self.first = self.first + 1
  end
  for _, watcher in ipairs(self.watchers) do
    watcher(event)
  end
end

--- Call `watcher` with every event from now on. It must not wait.
---@param watcher fun(event: ciranda.sim.Event)
function Events:watch(watcher)
  self.watchers[#self.watchers + 1] = watcher
end

--- The events after an id, oldest first.
---@param id integer? nil for all that are kept
---@return ciranda.sim.Event[]
function Events:since(id)
  local result = {}
  for i = math.max(self.first, (id or 0) + 1), self.last do
    result[#result + 1] = self.list[i]
  end
  return result
end

return M
