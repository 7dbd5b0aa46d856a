--- What tasks use to wait for each other: semaphores, bounded queues, events. All are first come, first
--- served.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")

local await = scheduler.await
local M = {}

--- A list of waiting operations that can be left in the middle.
---@class ciranda.Waiters
local Waiters = {}
Waiters.__index = Waiters

local function waiters()
  return setmetatable({ first = 1, last = 0, size = 0 }, Waiters)
end

--- Add an entry; the function it returns takes it out again.
function Waiters:add(entry)
  local place = self.last + 1
  self.last = place
  self[place] = entry
  self.size = self.size + 1
  return function()
    if self[place] == entry then
      self[place] = nil
      self.size = self.size - 1
    end
    return true
  end
end

--- Take the oldest entry out, or return nil.
function Waiters:take()
  while self.first <= self.last do
    local entry = self[self.first]
    self[self.first] = nil
    self.first = self.first + 1
    if entry ~= nil then
      self.size = self.size - 1
      return entry
    end
  end
  return nil
end

-- Semaphore -------------------------------------------------------------------------------------------------

---@class ciranda.Semaphore
local Semaphore = {}
Semaphore.__index = Semaphore
Semaphore.__name = "ciranda.Semaphore"

--- A number of permits.
---@param permits integer at least 1
---@return ciranda.Semaphore
function M.semaphore(permits)
  if math.type(permits) ~= "integer" or permits < 1 then
    errors.misuse(2, "task.semaphore: a positive integer expected, got %s", tostring(permits))
  end
  local self = setmetatable({ permits = permits, free = permits, waiting = waiters() }, Semaphore)
  self.give_back = function()
    self:release()
  end
  return self
end

function Semaphore:__tostring()
  return ("a semaphore (%d of %d free, %d waiting)"):format(self.free, self.permits, self.waiting.size)
end

--- Take a permit; waits until one is free.
---@async
function Semaphore:acquire()
  await(function(done)
    if self.free > 0 then
      self.free = self.free - 1
      done()
      return nil, self.give_back
    end
    return self.waiting:add(done), self.give_back
  end, self)
end

--- Give a permit back. More than were taken is a misuse.
function Semaphore:release()
  local next_in_line = self.waiting:take()
  if next_in_line then
    next_in_line()
  elseif self.free == self.permits then
    errors.misuse(2, "semaphore:release: all %d permits are free already", self.permits)
  else
    self.free = self.free + 1
  end
end

--- Call a function with a permit, which is given back however the function ends.
---@async
---@generic T
---@param fn fun(...): T
---@return T
function Semaphore:with(fn, ...)
  self:acquire()
  local permit <close> = setmetatable({}, {
    __close = function()
      self:release()
    end,
  })
  local _ = permit
  return fn(...)
end

-- Queue -----------------------------------------------------------------------------------------------------

---@class ciranda.Queue
---@field count integer values in it
local Queue = {}
Queue.__index = Queue
Queue.__name = "ciranda.Queue"

--- A queue that holds at most `capacity` values: a producer waits for its consumers.
---@param capacity integer at least 1
---@return ciranda.Queue
function M.queue(capacity)
  if math.type(capacity) ~= "integer" or capacity < 1 then
    errors.misuse(2, "task.queue: a positive integer expected, got %s", tostring(capacity))
  end
  return setmetatable({
    capacity = capacity,
    first = 1,
    count = 0,
    closed = false,
    getters = waiters(),
    putters = waiters(),
  }, Queue)
end

function Queue:__tostring()
  return ("a queue (%d of %d, %d getting, %d putting%s)"):format(
    self.count,
    self.capacity,
    self.getters.size,
    self.putters.size,
    self.closed and ", closed" or ""
  )
end

local function closed_error()
  return errors.new({ code = "closed", message = "queue:put: the queue is closed" })
end

local function push(queue, value)
  queue[queue.first + queue.count] = value
  queue.count = queue.count + 1
end

--- Add a value; waits while the queue is full. Raises "closed" when the queue is or becomes closed.
---@async
---@param value any not nil
function Queue:put(value)
  if value == nil then
    errors.misuse(2, "queue:put: nil cannot be put; close the queue to say that there is no more")
  end
  await(function(done)
    if self.closed then
      done(closed_error())
      return nil
    end
    local getter = self.getters:take()
    if getter then
      getter(nil, value)
      done()
      return nil
    end
    if self.count < self.capacity then
      push(self, value)
      done()
      return nil
    end
    return self.putters:add({ done = done, value = value })
  end, self)
end

--- Take back a value that nobody received: it is the next one again, though that be one too many.
local function give_back(queue, value)
  if value == nil then
    return
  end
  local getter = queue.getters:take()
  if getter then
    return getter(nil, value)
  end
  queue.first = queue.first - 1
  queue[queue.first] = value
  queue.count = queue.count + 1
end

--- Take the oldest value; waits while the queue is empty.
---@async
---@return any value nil when the queue is closed and empty
function Queue:get()
  local function unreceived(value)
    return give_back(self, value)
  end
  return await(function(done)
    if self.count > 0 then
      local value = self[self.first]
      self[self.first] = nil
      self.first = self.first + 1
      self.count = self.count - 1
      local putter = self.putters:take()
      if putter then
        push(self, putter.value)
        putter.done()
      end
      done(nil, value)
      return nil, unreceived
    end
    if self.closed then
      done(nil, nil)
      return nil
    end
    return self.getters:add(done), unreceived
  end, self)
end

--- Iterate until the queue is closed and empty: `for value in queue:values() do`.
---@async
function Queue:values()
  return function()
    return self:get()
  end
end

--- Say that no more will be put. What is in the queue can still be taken; those who wait to put get "closed".
function Queue:close()
  if self.closed then
    return
  end
  self.closed = true
  local getter = self.getters:take()
  while getter do
    getter(nil, nil)
    getter = self.getters:take()
  end
  local putter = self.putters:take()
  while putter do
    putter.done(closed_error())
    putter = self.putters:take()
  end
end

-- Event -----------------------------------------------------------------------------------------------------

---@class ciranda.Event
local Event = {}
Event.__index = Event
Event.__name = "ciranda.Event"

--- Something that happens once. Callbacks of the loop may set it too.
---@return ciranda.Event
function M.event()
  return setmetatable({ happened = false, waiting = waiters() }, Event)
end

function Event:__tostring()
  return ("an event (%s, %d waiting)"):format(self.happened and "set" or "not set", self.waiting.size)
end

--- Let everybody go on who waits for it, now and later.
function Event:set()
  if self.happened then
    return
  end
  self.happened = true
  local waiting = self.waiting:take()
  while waiting do
    waiting()
    waiting = self.waiting:take()
  end
end

--- Call a function when it is set; at once when it is. The function must not wait.
---@param fn fun()
function Event:_on_set(fn)
  if self.happened then
    return fn()
  end
  self.waiting:add(fn)
end

---@return boolean
function Event:is_set()
  return self.happened
end

--- Wait until it is set.
---@async
function Event:wait()
  await(function(done)
    if self.happened then
      done()
      return nil
    end
    return self.waiting:add(done)
  end, self)
end

return M
