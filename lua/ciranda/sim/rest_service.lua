--- A small service of Google's: methods by verb and path, JSON in and out, credentials, faults, refusals.

local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.RestMethod
---@field verb string
---@field path string pattern of the whole path, with captures for its variables
---@field id string for the log and for faults
---@field handle fun(call: ciranda.sim.RestCall, ...: string): table  gets the captures, decoded; returns the answer

---@class ciranda.sim.RestCall
---@field world table
---@field account string who calls
---@field query table<string, string>
---@field body table decoded JSON

local Service = {}
Service.__index = Service

--- A service of the methods given.
---@param world table
---@param methods ciranda.sim.RestMethod[]
---@param options { prefix: string?, refusal: (fun(err: ciranda.sim.Status): table)? }?  a pattern: all paths that fit
---  are this service's, with or without a method; what makes the body of a refusal
---@return table service
function M.new(world, methods, options)
  options = options or {}
  return setmetatable({
    world = world,
    methods = methods,
    prefix = options.prefix,
    refusal = options.refusal or errors.http_body,
  }, Service)
end

---@param path string
---@return boolean
function Service:serves(path)
  if self.prefix then
    return path:find(self.prefix) ~= nil
  end
  for _, method in ipairs(self.methods) do
    if path:find(method.path) then
      return true
    end
  end
  return false
end

local function decode(segment)
  return (segment:gsub("%%(%x%x)", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

local function find(self, request)
  for _, method in ipairs(self.methods) do
    local captures = method.verb == request.method and table.pack(request.path:match(method.path))
    if captures and captures[1] then
      for i = 1, captures.n do
        captures[i] = type(captures[i]) == "string" and decode(captures[i]) or captures[i]
      end
      return method, captures
    end
  end
  return nil
end

local function read_body(text)
  if not text:find("%S") then
    return {}
  end
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    errors.raise(errors.invalid("Invalid JSON payload received."))
  end
  return value
end

local function dispatch(self, request)
  local method, captures = find(self, request)
  request.called = method and method.id
  local account = self.world.oauth:check(request)
  if not method then
    errors.raise("NOT_FOUND", ("Method not found: %s %s"):format(request.method, request.path))
  end
  local fault = self.world.faults:on_call(method.id)
  local call =
    { world = self.world, account = account, query = request.query, body = read_body(request.body) }
  return method.handle(call, table.unpack(captures, 1, captures.n)), fault
end

local function respond(status, value, headers)
  return { status = status, headers = headers, body = json.encode(value) .. "\n" }
end

--- Answer a request. Sets `request.called` to the method's id, when there is such a method.
---@param request table
---@return table answer
---@return ciranda.sim.Fault? fault
function Service:handle(request)
  local ok, value, fault = pcall(dispatch, self, request)
  if ok then
    return respond(200, value, { ["Content-Type"] = "application/json; charset=UTF-8" }), fault
  elseif errors.is(value) then
    return respond(value.http, self.refusal(value), errors.headers(value))
  end
  return error(value, 0)
end

return M
