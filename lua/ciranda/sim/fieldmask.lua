--- Partial answers: the `fields` parameter of Google's APIs, such as `nodes(name,state),nextPageToken`.

local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

local function refuse(text)
  errors.raise(errors.invalid(("Invalid field selection %s"):format(text), "fields"))
end

-- fields = item ("," item)*; item = name ("/" item | "(" fields ")")?
local function parse_list(text, at)
  local mask = {}
  repeat
    local name, after = text:match("^([%w@_*]+)()", at)
    if not name then
      refuse(text)
    end
    local node = mask[name] or {}
    mask[name], at = node, after
    while text:sub(at, at) == "/" do
      local deeper, beyond = text:match("^([%w@_*]+)()", at + 1)
      if not deeper then
        refuse(text)
      end
      node[deeper] = node[deeper] or {}
      node, at = node[deeper], beyond
    end
    if text:sub(at, at) == "(" then
      local inner
      inner, at = parse_list(text, at + 1)
      if text:sub(at, at) ~= ")" then
        refuse(text)
      end
      for key, value in pairs(inner) do
        node[key] = value
      end
      at = at + 1
    end
    local more = text:sub(at, at) == ","
    at = more and at + 1 or at
  until not more
  return mask, at
end

--- Read a `fields` parameter.
---@param text string
---@return table mask for `apply`
--- Raises ciranda.sim.Status INVALID_ARGUMENT.
function M.parse(text)
  local mask, at = parse_list(text, 1)
  if at <= #text then
    refuse(text)
  end
  return mask
end

--- What a mask leaves of an answer.
---@param mask table
---@param value any
---@return any
function M.apply(mask, value)
  if next(mask) == nil or type(value) ~= "table" then
    return value
  end
  if json.kind(value) == "array" or value[1] ~= nil then
    local list = json.array {}
    for i, item in ipairs(value) do
      list[i] = M.apply(mask, item)
    end
    return list
  end
  local result = json.object {}
  for key, item in pairs(value) do
    local deeper = mask[key] or mask["*"]
    if deeper then
      result[key] = M.apply(deeper, item)
    end
  end
  return result
end

return M
