--- How many connections a fleet makes at once: fewer when they take too long, more again when they come about.
--
-- What all handshakes go through (this machine, a jump host, a relay, a server that stands for many workers) may be too
-- slow for as many as there are workers. Then none is done before its time is over, all begin anew, and so on for ever.
-- So the limit is halved when handshakes run out of time, and grows by one for as many successes as it allows at once.
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- Never fewer at once.
local LEAST = 4

--- Phases in which the other side is there and slow. One that does not take a connection at all holds nobody else up.
local SLOW = { banner = true, kex = true, auth = true }

--- Has a handshake failed because the other side, which has taken the connection, did not answer in time?
---@param e any
---@return boolean
function M.is_slow(e)
  return err.is(e, "timeout") and SLOW[e.phase] == true
end

---@class ciranda.fleet.Pace
---@field limit number how many may run at once now
---@field private most integer
---@field private running integer
---@field private cuts integer how often the limit was halved
---@field private waiting { turn: ciranda.task.Event?, first: integer, last: integer }
local Pace = {}
Pace.__index = Pace

---@param most integer at once, at least 1
---@return ciranda.fleet.Pace
function M.new(most)
  if math.type(most) ~= "integer" or most < 1 then
    err.misuse(2, "pace.new: a positive integer expected, got %s", tostring(most))
  end
  return setmetatable(
    { most = most, limit = most, running = 0, cuts = 0, waiting = { first = 1, last = 0 } },
    Pace
  )
end

--- Lets those in whose turn it is.
---@private
function Pace:admit()
  local waiting = self.waiting
  while waiting.first <= waiting.last and self.running < math.floor(self.limit) do
    local turn = waiting[waiting.first]
    waiting[waiting.first] = nil
    waiting.first = waiting.first + 1
    if turn then
      self.running = self.running + 1
      turn:set()
    end
  end
end

---@private
function Pace:enter()
  local waiting, turn = self.waiting, task.event()
  waiting.last = waiting.last + 1
  local place = waiting.last
  waiting[place] = turn
  self:admit()
  local ok, problem = pcall(turn.wait, turn)
  if not ok then
    if turn:is_set() then
      self.running = self.running - 1
      self:admit()
    else
      waiting[place] = nil
    end
    error(problem, 0)
  end
end

--- Runs a handshake when it is its turn, first come, first served.
---@async
---@param fn fun(): any
---@return any
-- Raises what it raises.
function Pace:with(fn)
  self:enter()
  local cuts = self.cuts
  local results = table.pack(pcall(fn))
  self.running = self.running - 1
  local problem = results[2]
  if results[1] then
    self.limit = math.min(self.most, self.limit + 1 / self.limit)
  elseif M.is_slow(problem) and cuts == self.cuts then
    -- Those that had begun before the last cut say nothing about what it has done.
    self.cuts = self.cuts + 1
    self.limit = math.max(math.min(LEAST, self.most), self.limit / 2)
  end
  self:admit()
  if not results[1] then
    error(problem, 0)
  end
  return table.unpack(results, 2, results.n)
end

return M
