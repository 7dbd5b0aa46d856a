--- A clock that stands still while this program does not run although it has something to do: no processor is free for
--- it, it is stopped (SIGSTOP, a paused virtual machine), or one turn of its loop takes long. Whoever counts how long
--- another machine has been silent counts by this one: what nobody listened to has not been silent.
--
-- Two measures, of which the greater counts. The loop's: a timer that fires once a second and sees how late it is. And
-- the kernel's: how long the main thread has been ready to run and did not (/proc/self/schedstat, its second number, in
-- nanoseconds; Documentation/scheduler/sched-stats.rst). The timer does not see what is lost in many short pieces, and
-- the kernel's does not count while a program is stopped. Time in which there is nothing to do is in neither.
local clock = require("ciranda.io.clock")
local uv = require("luv")

local M = {}

--- Seconds between two looks.
local PERIOD = 1

local timer, seen, seen_delay
local lost = 0

--- Seconds that the main thread has waited for a processor; 0 where the kernel does not say.
---@return number
function M.delay()
  local file = io.open("/proc/self/schedstat")
  local text = file and file:read("l")
  if file then
    file:close()
  end
  return (tonumber(text and text:match("^%d+ (%d+)")) or 0) / 1e9
end

--- Takes off what has been lost since the last look.
local function look()
  local now, delay = clock.now(), M.delay()
  local gap = now - seen
  lost = lost + math.min(gap, math.max(gap - PERIOD, delay - seen_delay, 0))
  seen, seen_delay = now, delay
end

--- Seconds on the clock, which begins with the first call. It may go back by as much as a second when the kernel's
--- count is read.
---@param exact boolean? read the kernel's count now, and not only once a second
---@return number seconds
function M.clock(exact)
  if not timer then
    seen, seen_delay = clock.now(), M.delay()
    timer = uv.new_timer()
    timer:start(PERIOD * 1000, PERIOD * 1000, look)
    timer:unref()
  elseif exact then
    look()
  end
  local now = clock.now()
  return now - lost - math.max(0, now - seen - PERIOD)
end

return M
