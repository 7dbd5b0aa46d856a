--- The two clocks of this machine, in seconds: one to measure with, one to tell others the time.
local uv = require("luv")

local M = {}

--- A clock that only goes forward, for deadlines and how long things took. Only differences say something.
---@return number
function M.now()
  return uv.hrtime() / 1e9
end

--- The time of day, which somebody may set: for what is written down and what other machines say.
---@return number seconds since 1970
function M.wall()
  local seconds, microseconds = uv.gettimeofday()
  return seconds + microseconds / 1e6
end

--- A span of time for a person: "45 s", "12 min", "3.2 h", "2.5 days".
---@param seconds number less than 0 counts as 0
---@return string
function M.span(seconds)
  if seconds < 120 then
    return ("%.0f s"):format(math.max(0, seconds))
  elseif seconds < 7200 then
    return ("%.0f min"):format(seconds / 60)
  elseif seconds < 172800 then
    return ("%.1f h"):format(seconds / 3600)
  end
  return ("%.1f days"):format(seconds / 86400)
end

return M
