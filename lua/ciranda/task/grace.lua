--- The grace of cancelled tasks: one timer for all of them.

local uv = require("luv")

local M = {}

---@class ciranda.Grace
local Grace = {}
Grace.__index = Grace

--- Seconds of a clock that never goes back.
local function now()
  return uv.hrtime() / 1e9
end

--- Start the timer for the request whose grace ends first, or stop it. Looks at all of them: it must not be
--- called for each of ten thousand.
local function arm(self)
  local first
  for _, deadline in pairs(self.deadlines) do
    if not first or deadline < first then
      first = deadline
    end
  end
  self.armed = first
  local timer = self.timer
  if not first then
    if timer and not timer:is_closing() then
      timer:stop()
    end
    return
  end
  if not timer or timer:is_closing() then
    timer = uv.new_timer()
    self.timer = timer
  end
  uv.update_time()
  timer:start(math.max(1, math.ceil((first - now()) * 1000)), 0, function()
    self:_check()
  end)
end

--- Watch over requests.
---@param on_over fun(request: table): boolean? called when a grace is over; true: ask again in the next turn
---@return ciranda.Grace
function M.new(on_over)
  return setmetatable({ deadlines = {}, count = 0, on_over = on_over }, Grace)
end

--- Begin the grace of a request, unless it has begun.
---@param request table
---@param seconds number
function Grace:start(request, seconds)
  if not self.deadlines[request] then
    local deadline = now() + seconds
    self.deadlines[request] = deadline
    self.count = self.count + 1
    if not self.armed or deadline < self.armed then
      arm(self)
    end
  end
end

--- The request is no longer waited for.
---@param request table
function Grace:stop(request)
  if self.deadlines[request] then
    self.deadlines[request] = nil
    self.count = self.count - 1
    if self.count == 0 then
      arm(self)
    end
  end
end

function Grace:_check()
  local time = now()
  local over = {}
  for request, deadline in pairs(self.deadlines) do
    if deadline <= time then
      over[#over + 1] = request
    end
  end
  for _, request in ipairs(over) do
    -- Ending one may have stopped another.
    if self.deadlines[request] and not self.on_over(request) then
      self:stop(request)
    end
  end
  arm(self)
end

--- Close the timer.
function Grace:close()
  if self.timer and not self.timer:is_closing() then
    self.timer:close()
  end
  self.timer = nil
end

return M
