--- The log of a simulator's requests: who called what, and what came of it.

local clock = require("ciranda.sim.clock")
local json = require("ciranda.io.json")

local M = {}

-- Older entries are dropped beyond this many.
M.CAPACITY = 100000

---@class ciranda.sim.LoggedRequest
---@field id integer grows by one
---@field time string
---@field verb string
---@field path string with the query; credentials in it are not kept
---@field method string? the API's method, "queuedResources.create"
---@field status integer? nil when there was no answer
---@field client string the User-Agent
---@field fault string? what was made to go wrong with the answer

---@class ciranda.sim.RequestLog
local RequestLog = {}
RequestLog.__index = RequestLog

---@param clock_of_world ciranda.sim.Clock
---@return ciranda.sim.RequestLog
function M.new(clock_of_world)
  return setmetatable({ clock = clock_of_world, list = {}, first = 1, last = 0 }, RequestLog)
end

local function without_secrets(target)
  local hidden = target
  for _, name in ipairs({ "access_token", "oauth_token", "key", "upload_id" }) do
    hidden = hidden:gsub("([?&]" .. name .. "=)[^&]*", "%1...")
  end
  return hidden
end

--- Add a request.
---@param request { method: string, target: string, headers: table, called: string? } `called`: the method's id
---@param status integer?
---@param fault string?
function RequestLog:add(request, status, fault)
  self.last = self.last + 1
  self.list[self.last] = {
    id = self.last,
    time = clock.timestamp(self.clock:now()),
    verb = request.method,
    path = without_secrets(request.target),
    method = request.called,
    status = status,
    client = request.headers["User-Agent"] or "",
    fault = fault,
  }
  if self.last - self.first >= M.CAPACITY then
    self.list[self.first] = nil
    self.first = self.first + 1
  end
end

--- The requests after an id, oldest first.
---@param id integer?
---@return ciranda.sim.LoggedRequest[]
function RequestLog:since(id)
  local result = json.array({})
  for i = math.max(self.first, (id or 0) + 1), self.last do
    result[#result + 1] = self.list[i]
  end
  return result
end

return M
