--- A number of places that are taken and given back: channels of a connection, connections that are being made. Unlike
--- a semaphore's, a free place is taken without a wait, and the limit may change.

local scheduler = require("ciranda.task.scheduler")

local M = {}

---@class ciranda.ssh.Slots
---@field limit integer
---@field used integer
---@field private waiters table[]
local Slots = {}
Slots.__index = Slots

---@param limit integer
---@return ciranda.ssh.Slots
function M.new(limit)
  return setmetatable({ limit = limit, used = 0, waiters = {} }, Slots)
end

--- Take a place; waits while all are taken.
---@async
---@param what string for `task.dump`
function Slots:acquire(what)
  if self.used < self.limit then
    self.used = self.used + 1
    return
  end
  local entry
  scheduler.await(function(done)
    entry = { done = done }
    table.insert(self.waiters, entry)
    return function()
      for index, waiter in ipairs(self.waiters) do
        if waiter == entry then
          table.remove(self.waiters, index)
          return true
        end
      end
      self:release() -- it was ours already
      return true
    end
  end, what)
end

--- Give a place back: to the first who waits.
function Slots:release()
  self.used = self.used - 1
  while self.used < self.limit and self.waiters[1] do
    self.used = self.used + 1
    table.remove(self.waiters, 1).done()
  end
end

return M
