--- Long-running operations: what a call that takes time answers with, and where its end is read.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local named = require("ciranda.sim.named")

local M = {}

---@class ciranda.sim.Operation
---@field name string full resource name
---@field version string of the API that made it
---@field done boolean
---@field error ciranda.sim.Status?
---@field late number? seconds for which its end is not told
---@field response { message: string, value: table }? the response as it was when the operation ended
---@field private metadata table OperationMetadata

---@class ciranda.sim.Operations: ciranda.sim.Named
---@field private world table
---@field get fun(self, name: string): ciranda.sim.Operation
---@field list fun(self, matches: fun(name: string): boolean): ciranda.sim.Operation[]
local Operations = setmetatable({}, { __index = named })
Operations.__index = Operations

---@param world { clock: ciranda.sim.Clock, random: ciranda.sim.Random }
---@return ciranda.sim.Operations
function M.new(world)
  return setmetatable({ world = world, random = world.random:fork "operations", by_name = {} }, Operations)
end

--- Begin an operation.
---@param parent string "projects/P/locations/Z"
---@param version string
---@param verb string "create"
---@param target string full name of what it acts on
---@param on_cancel fun()? what a request to cancel stops; without it cancelling has no effect on the work
---@return ciranda.sim.Operation
function Operations:start(parent, version, verb, target, on_cancel)
  local now = self.world.clock:now()
  local random = self.random
  local operation = {
    name = ("%s/operations/operation-%d-%s-%s-%s"):format(
      parent,
      math.floor(now * 1000),
      random:hex(13),
      random:hex(8),
      random:hex(8)
    ),
    version = version,
    done = false,
    on_cancel = on_cancel,
    metadata = {
      createTime = clock.timestamp(now),
      target = target,
      verb = verb,
      apiVersion = version,
    },
  }
  self.by_name[operation.name] = operation
  return operation
end

-- Whether the end of an operation is to be told later; then it will be.
local function told_later(self, operation, tell)
  local seconds = operation.late
  operation.late = nil
  if seconds then
    self.world.clock:after(seconds, tell)
  end
  return seconds ~= nil
end

--- End an operation well. An operation that has ended stays as it is.
---@param operation ciranda.sim.Operation
---@param message string? name of the response's message; nil means google.protobuf.Empty
---@param value table?
function Operations:succeed(operation, message, value)
  local late = told_later(self, operation, function()
    self:succeed(operation, message, value)
  end)
  if operation.done or late then
    return
  end
  operation.done = true
  operation.response = { message = message, value = self.world.copy(value) }
  operation.metadata.endTime = clock.timestamp(self.world.clock:now())
end

--- End an operation with a refusal.
---@param operation ciranda.sim.Operation
---@param err ciranda.sim.Status
function Operations:fail(operation, err)
  local late = told_later(self, operation, function()
    self:fail(operation, err)
  end)
  if operation.done or late then
    return
  end
  operation.done = true
  operation.error = err
  operation.metadata.endTime = clock.timestamp(self.world.clock:now())
end

--- Say in words how far an operation is.
---@param operation ciranda.sim.Operation
---@param text string
function Operations:describe(operation, text)
  operation.metadata.statusDetail = text
end

--- Ask for an operation to be given up. One that has ended is left alone.
---@param name string
--- Raises ciranda.sim.Status NOT_FOUND.
function Operations:cancel(name)
  local operation = self:get(name)
  if operation.done then
    return
  end
  operation.metadata.cancelRequested = true
  if operation.on_cancel then
    operation.on_cancel()
    self:fail(operation, errors.new("CANCELLED", "The operation was cancelled."))
  end
end

--- Forget an operation; what it does goes on.
---@param name string
--- Raises ciranda.sim.Status NOT_FOUND.
function Operations:delete(name)
  self:get(name)
  self.by_name[name] = nil
end

--- The Operation message, in the version that is asked whatever the version that began it: a client knows the
--- types of its own version only, and one operation that it cannot read would spoil the whole list.
---@param operation ciranda.sim.Operation
---@param schema ciranda.sim.Schema of the version that is asked
---@param write fun(schema: ciranda.sim.Schema, message: string, value: table): table makes the response's JSON
---@return table
function M.message(operation, schema, write)
  local package = "type.googleapis.com/google.cloud.tpu." .. schema.version .. "."
  local metadata = schema:write("OperationMetadata", operation.metadata)
  metadata["@type"] = package .. "OperationMetadata"
  local result = { name = operation.name, metadata = metadata, done = operation.done or nil }
  if operation.error then
    result.error = errors.rpc(operation.error)
  elseif operation.response then
    local response = operation.response
    if response.message then
      result.response = write(schema, response.message, response.value)
      result.response["@type"] = package .. response.message
    else
      result.response = { ["@type"] = "type.googleapis.com/google.protobuf.Empty" }
    end
  end
  return result
end

return M
