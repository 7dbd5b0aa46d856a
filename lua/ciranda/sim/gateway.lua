--- The simulator's front door: one address and port for all services of the cloud, told apart by path.

local alter = require("ciranda.sim.alter")
local batch = require("ciranda.sim.batch")
local errors = require("ciranda.sim.errors")
local metadata = require("ciranda.sim.metadata")
local oauth = require("ciranda.sim.oauth")
local task = require("ciranda.task")
local tpu = require("ciranda.sim.tpu")

local M = {}

-- How long an answer that is to hang does so: longer than any client waits, but not for ever.
local HANG = 3600

---@class ciranda.sim.GatewayParts
---@field world table
---@field oauth ciranda.sim.OAuth
---@field requests ciranda.sim.RequestLog
---@field services table[] each with `serves(path)` and `handle(request)` -> answer, fault?, which sets
---  `request.called` to the id of the method that is called

-- A body that is written by a function, cut in the middle: the connection ends before the promised length.
local function cut_short(body, length)
  return function(write)
    local left = length // 2
    body(function(chunk)
      if left > 0 then
        write(chunk:sub(1, left))
        left = left - #chunk
      end
    end)
  end
end

local function altered(answer, fault)
  if type(answer.body) == "string" then
    answer.body = alter.apply(answer.body, fault.field, fault.value)
  end
  return answer
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

-- The endpoints that give tokens.
local function tokens(parts)
  local service = {}
  function service:serves(path)
    return oauth.method_of(path) ~= nil
  end
  function service:handle(request)
    request.called = oauth.method_of(request.path)
    local ok, fault = pcall(parts.world.faults.on_call, parts.world.faults, request.called)
    if not ok then
      return errors.is(fault) and oauth.refusal(fault) or error(fault, 0)
    end
    return parts.oauth:handle(request), fault
  end
  return service
end

-- The metadata server of the machine on which the client runs; a worker's is at the worker's address.
local function metadata_server(parts)
  local service = {}
  local function tree()
    return metadata.runner(parts.world)
  end
  function service:serves(path)
    return path:find("^/computeMetadata") ~= nil
  end
  function service:handle(request)
    request.called = "metadata"
    local ok, fault = pcall(parts.world.faults.on_call, parts.world.faults, request.called)
    if not ok then
      return errors.is(fault) and metadata.refusal(fault) or error(fault, 0)
    end
    return metadata.answer(tree, request), fault
  end
  return service
end

local function route(services, request)
  for _, service in ipairs(services) do
    if service:serves(request.path) then
      return service:handle(request)
    end
  end
  return errors.raise("NOT_FOUND", ("there is nothing at %s"):format(request.path))
end

--- The handler of the simulator's server.
---@param parts ciranda.sim.GatewayParts
---@return fun(request: ciranda.server.Request): ciranda.server.Answer
function M.new(parts)
  local services = table.move(parts.services, 1, #parts.services, 1, {})
  -- Answer a call and log it: the answer, and what is to go wrong with it.
  local function answer_one(request)
    local ok, answer, fault = pcall(route, services, request)
    if not ok then
      if not errors.is(answer) then
        parts.requests:add(request, 500)
        error(answer, 0)
      end
      answer, fault = tpu.refusal(answer), nil
    end
    parts.requests:add(request, answer.status, fault and fault.kind)
    if fault and fault.kind == "alter" then
      return altered(answer, fault)
    end
    return answer, fault
  end
  table.insert(services, tokens(parts))
  table.insert(services, metadata_server(parts))
  table.insert(services, batch.new(answer_one))
  return function(raw)
    local answer, fault = answer_one(plain_request(raw))
    return fault and spoil(answer, fault) or answer
  end
end

return M
