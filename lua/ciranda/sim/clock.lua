--- The simulated cloud's only source of time.
--
-- Every time stamp, delay and expiry in sim/ comes from a clock object, so that a spec can let a day pass in a
-- millisecond (`clock.manual`) and a simulator that serves other programs can agree with their wall clock
-- (`clock.real`). A real clock may be moved forward with `advance`, which runs what falls due on the way, in order.
--
-- The functions given to `after` run one at a time, from the loop's timer or from `advance`, never inside a task:
-- they must not wait. Who has something to wait for spawns a task.

local M = {}

---@class ciranda.sim.Timer
---@field due number when it runs, seconds since the epoch on its clock
---@field cancelled boolean
---@field private run fun()
---@field private order integer

---@class ciranda.sim.Clock
---@field private base fun():number
---@field private offset number
---@field private heap ciranda.sim.Timer[]
---@field private rearm fun(delay:number?)
local Clock = {}
Clock.__index = Clock

local function earlier(a, b)
  if a.due ~= b.due then
    return a.due < b.due
  end
  return a.order < b.order
end

local function push(heap, timer)
  local at = #heap + 1
  heap[at] = timer
  while at > 1 do
    local parent = at // 2
    if not earlier(heap[at], heap[parent]) then
      break
    end
    heap[at], heap[parent] = heap[parent], heap[at]
    at = parent
  end
end

local function pop(heap)
  local top, last = heap[1], table.remove(heap)
  if #heap == 0 then
    return top
  end
  heap[1] = last
  local at = 1
  while true do
    local child = 2 * at
    if child > #heap then
      break
    end
    if child < #heap and earlier(heap[child + 1], heap[child]) then
      child = child + 1
    end
    if not earlier(heap[child], heap[at]) then
      break
    end
    heap[at], heap[child] = heap[child], heap[at]
    at = child
  end
  return top
end

local function new(base, rearm)
  return setmetatable({ base = base, offset = 0, heap = {}, order = 0, rearm = rearm }, Clock)
end

--- A clock that stands still until `advance` moves it. For specs.
---@param start number? seconds since the epoch, by default 2026-01-01T00:00:00Z
---@return ciranda.sim.Clock
function M.manual(start)
  start = start or 1767225600
  return new(function()
    return start
  end, function() end)
end

--- The wall clock, with one timer of the loop behind it.
---@return ciranda.sim.Clock
function M.real()
  local uv = require("luv")
  local self
  local timer = uv.new_timer()
  local function wall()
    local seconds, microseconds = uv.gettimeofday()
    return seconds + microseconds / 1e6
  end
  self = new(wall, function(delay)
    if timer:is_closing() then
      return
    end
    timer:stop()
    if delay then
      -- Rounded up: a timer that fires early would find nothing due and have to be set again.
      timer:start(math.max(0, math.ceil(delay * 1000)), 0, function()
        self:run_due()
      end)
    end
  end)
  self.close_timer = function()
    if not timer:is_closing() then
      timer:close()
    end
  end
  return self
end

--- Now, in seconds since the epoch.
---@return number
function Clock:now()
  return self.base() + self.offset
end

--- Run `fn` once, `delay` seconds from now.
---@param delay number seconds, at least 0
---@param fn fun()
---@return ciranda.sim.Timer
function Clock:after(delay, fn)
  self.order = self.order + 1
  local timer = { due = self:now() + math.max(0, delay), order = self.order, run = fn, cancelled = false }
  push(self.heap, timer)
  if self.heap[1] == timer and not self.running then
    self.rearm(timer.due - self:now())
  end
  return timer
end

--- Let a timer not run. It does nothing when the timer has run already.
---@param timer ciranda.sim.Timer?
function Clock:cancel(timer)
  if timer then
    timer.cancelled = true
  end
end

--- Run everything that is due. The loop's timer calls it; nobody else needs to.
function Clock:run_due()
  if self.running then
    return
  end
  self.running = true
  local heap = self.heap
  while heap[1] and (heap[1].cancelled or heap[1].due <= self:now()) do
    local timer = pop(heap)
    if not timer.cancelled then
      timer.run()
    end
  end
  self.running = false
  self.rearm(heap[1] and heap[1].due - self:now() or nil)
end

--- Move the clock forward. What falls due on the way runs in order, each at its own time.
---@param seconds number at least 0
function Clock:advance(seconds)
  if seconds < 0 then
    error("a clock cannot be moved back", 2)
  end
  local target = self:now() + seconds
  local heap = self.heap
  while heap[1] and heap[1].due <= target do
    local ahead = heap[1].due - self:now()
    if ahead > 0 then
      self.offset = self.offset + ahead
    end
    self:run_due()
  end
  self.offset = self.offset + math.max(0, target - self:now())
  self.rearm(heap[1] and heap[1].due - self:now() or nil)
end

--- Stop the clock for good: nothing that is still scheduled will run.
function Clock:close()
  self.heap = {}
  if self.close_timer then
    self.close_timer()
  end
end

--- A time as the APIs write it: RFC 3339 in UTC with nine digits of fraction.
---@param seconds number since the epoch
---@return string
function M.timestamp(seconds)
  local whole = math.floor(seconds)
  local micros = math.floor((seconds - whole) * 1e6 + 0.5)
  if micros == 1000000 then
    whole, micros = whole + 1, 0
  end
  return os.date("!%Y-%m-%dT%H:%M:%S", whole) .. string.format(".%06d000Z", micros)
end

local function days_from_civil(year, month, day)
  if month <= 2 then
    year = year - 1
  end
  local era = year // 400
  local of_era = year - era * 400
  local of_year = (153 * (month + (month > 2 and -3 or 9)) + 2) // 5 + day - 1
  return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
end

local MONTH_DAYS = { 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 }

--- Read an RFC 3339 time, with `Z` or an offset and up to nine digits of fraction.
---@param text string
---@return number? seconds since the epoch, or nil when it is no such time
function M.parse_timestamp(text)
  local year, month, day, hour, minute, second, rest =
    text:match "^(%d%d%d%d)%-(%d%d)%-(%d%d)[Tt](%d%d):(%d%d):(%d%d)(.*)$"
  if not year then
    return nil
  end
  year, month, day = tonumber(year), tonumber(month), tonumber(day)
  hour, minute, second = tonumber(hour), tonumber(minute), tonumber(second)
  if
    month < 1
    or month > 12
    or day < 1
    or day > MONTH_DAYS[month]
    or hour > 23
    or minute > 59
    or second > 60
  then
    return nil
  end
  local fraction, zone = rest:match "^%.(%d+)(.*)$"
  if fraction and #fraction > 9 then
    return nil
  end
  zone = fraction and zone or rest
  local shift = 0
  if zone ~= "Z" and zone ~= "z" then
    local sign, zone_hour, zone_minute = zone:match "^([+-])(%d%d):(%d%d)$"
    if not sign then
      return nil
    end
    shift = (tonumber(zone_hour) * 60 + tonumber(zone_minute)) * 60 * (sign == "+" and 1 or -1)
  end
  local seconds = days_from_civil(year, month, day) * 86400 + hour * 3600 + minute * 60 + second - shift
  if fraction then
    return seconds + tonumber("0." .. fraction)
  end
  return seconds
end

--- Read a duration as proto3 JSON writes it: "3600s", "1.5s".
---@param text string
---@return number? seconds, or nil when it is none
function M.parse_duration(text)
  local digits, fraction = text:match "^(%-?%d+)(%.?%d*)s$"
  if not digits or fraction == "." or #fraction > 10 then
    return nil
  end
  return tonumber(digits .. fraction)
end

return M
