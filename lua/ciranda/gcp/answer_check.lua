--- Whether an answer of the TPU API has the form that the API's schema gives it, so that whoever reads it later may
--- take a string for a string. Only what is there and known is looked at: fields may be absent, and a newer API may
--- have others, and other values of an enum. A null is no value, and is taken out.

local json = require("ciranda.io.json")

local M = {}

local NULL = json.null

-- The Lua type of each scalar of the schema's tables, and how a person calls it. An int64 is a string by the rules,
-- and a number from some servers.
local STRING = { lua = "string", said = "a string" }
local SCALARS = {
  string = STRING,
  timestamp = STRING,
  duration = STRING,
  bool = { lua = "boolean", said = "true or false" },
  int32 = { lua = "number", said = "a whole number" },
  int64 = { lua = "string", or_lua = "number", said = "a number" },
  float = { lua = "number", said = "a number" },
  any = { lua = "table", said = "an object" },
}

-- The fields of messages, ready to be compared, by schema and message.
local plans = setmetatable({}, { __mode = "k" })

local plan_of

--- What is expected of one field, or of the items of a list or map.
local function compile(schema, spec)
  if type(spec) == "table" then
    return STRING
  end
  local base, suffix = spec:match("^(%w+)(.*)$")
  local single = SCALARS[base] or { lua = "table", said = "an object", plan = plan_of(schema, base) }
  if suffix == "" then
    return single
  end
  return {
    lua = "table",
    said = suffix == "[]" and "a list" or "an object",
    list = suffix == "[]",
    items = single,
  }
end

function plan_of(schema, name)
  local known = plans[schema] or {}
  plans[schema] = known
  if not known[name] then
    local plan = {}
    known[name] = plan -- before its fields, which may be of the same kind
    for field, spec in pairs(schema.messages[name]) do
      plan[field] = compile(schema, spec)
    end
  end
  return known[name]
end

local wrong_in

--- The path of what is not as expected in a value, from it on, and what belongs there; nil when all is well.
local function wrong(expected, value)
  local kind = type(value)
  if kind ~= expected.lua and kind ~= expected.or_lua then
    return "", expected.said
  elseif expected == SCALARS.int32 then
    if not math.tointeger(value) then
      return "", expected.said
    end
  elseif expected.plan then
    return wrong_in(expected.plan, value)
  elseif expected.list then
    if value[1] == nil and next(value) ~= nil then
      return "", expected.said
    end
    for place = 1, #value do
      local path, said = wrong(expected.items, value[place])
      if path then
        return ("[%d]%s"):format(place - 1, path), said
      end
    end
  elseif expected.items then
    for key, item in next, value do
      local path, said = wrong(expected.items, item)
      if path then
        return ("[%q]%s"):format(tostring(key):sub(1, 100), path), said
      end
    end
  end
  return nil
end

function wrong_in(plan, message)
  for name, value in next, message do
    local expected = plan[name]
    if expected then
      if value == NULL then
        message[name] = nil
      elseif expected ~= STRING or type(value) ~= "string" then
        local path, said = wrong(expected, value)
        if path then
          return "." .. name .. path, said
        end
      end
    end
  end
  return nil
end

--- What is wrong with an answer.
---@param schema table of ciranda.data
---@param name string the message's
---@param message table
---@return string? problem such as "nodes[0].name must be a string"; nil when there is none
function M.problem(schema, name, message)
  local path, said = wrong_in(plan_of(schema, name), message)
  return path and ("%s must be %s"):format(path:sub(2), said) or nil
end

return M
