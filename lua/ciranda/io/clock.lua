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

return M
