--- The simulator's front door: one address and port for all services of the cloud, told apart by path.

local errors = require("ciranda.sim.errors")
local metadata = require("ciranda.sim.metadata")
local task = require("ciranda.task")
local tpu = require("ciranda.sim.tpu")

local M = {}

-- How long an answer that is to hang does so: longer than any client waits, but not for ever.
local HANG = 3600

---@class ciranda.sim.GatewayParts
---@field world table
---@field oauth ciranda.sim.OAuth
---@field requests ciranda.sim.RequestLog
---@field services table[] each with `serves(path)` and `handle(request)` -> answer, fault?, method?

-- A body that is written by a function, cut in the middle.
local function cut_short(body, length)
  return function(write)
    local left = length // 2
    body(function(chunk)
      write(chunk:sub(1, left))
      left = left - #chunk
      if left <= 0 then
        errors.raise("DATA_LOSS", "cut short, as asked for")
      end
    end)
  end
end

-- Make an answer go wrong in the way that was asked for.
local function spoil(answer, fault)
  if fault.kind == "reset" then
    return { reset = true }
  elseif fault.kind == "truncate" and type(answer.body) == "function" then
    answer.body = cut_short(answer.body, answer.length)
    return answer
  elseif fault.kind == "truncate" then
    answer.truncate = #(answer.body or "") // 2
    return answer
  elseif fault.kind == "slow" then
    task.sleep(fault.seconds or 1)
    return answer
  end
  task.sleep(HANG)
  return { drop = true }
end

local function plain_request(request)
  return {
    method = request.method,
    target = request.target,
    path = request.path,
    query = request:args(),
    headers = request.headers,
    body = request.body,
    form = function()
      return request:form()
    end,
    args = function()
      return request:args()
    end,
  }
end

local function route(parts, request)
  local granted = parts.oauth:handle(request)
  if granted then
    return granted, nil, "oauth.token"
  end
  for _, service in ipairs(parts.services) do
    if service:serves(request.path) then
      return service:handle(request)
    end
  end
  if request.path:find("^/computeMetadata") then
    return metadata.answer(function()
      return metadata.runner(parts.world)
    end, request),
      nil,
      "metadata"
  end
  return errors.raise("NOT_FOUND", ("there is nothing at %s"):format(request.path))
end

--- The handler of the simulator's server.
---@param parts ciranda.sim.GatewayParts
---@return fun(request: ciranda.server.Request): ciranda.server.Answer
function M.new(parts)
  return function(raw)
    local request = plain_request(raw)
    local results = table.pack(pcall(route, parts, request))
    local answer, fault, method = results[2], results[3], results[4]
    if not results[1] then
      if not errors.is(answer) then
        parts.requests:add(request, nil, 500)
        error(answer, 0)
      end
      answer = tpu.refusal(answer)
      fault, method = nil, nil
    end
    parts.requests:add(request, method, answer.status, fault and fault.kind)
    return fault and spoil(answer, fault) or answer
  end
end

return M
