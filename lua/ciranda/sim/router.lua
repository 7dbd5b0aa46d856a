--- From a verb and a path to a method of the API and the variables in its path, driven by the schema's methods.

local M = {}

---@class ciranda.sim.Route
---@field method string "nodes.create"
---@field definition table the method's entry in the schema
---@field variables table<string, string> decoded values of the path's variables

---@class ciranda.sim.Router
---@field private routes table<string, table[]>
local Router = {}
Router.__index = Router

local function split(path)
  local segments = {}
  for segment in path:gmatch "[^/]+" do
    segments[#segments + 1] = segment
  end
  return segments
end

-- The custom verb of a path, "reset" of ".../queuedResources/q:reset", and the path without it.
local function custom_verb(path)
  local rest, verb = path:match "^(.*):(%a+)$"
  if rest then
    return rest, verb
  end
  return path, ""
end

local function decode(segment)
  return (segment:gsub("%%(%x%x)", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

local function group_key(http_verb, verb, count)
  return ("%s %s %d"):format(http_verb, verb, count)
end

--- A router for the methods of a schema.
---@param methods table<string, { verb: string, path: string }>
---@return ciranda.sim.Router
function M.new(methods)
  local routes = {}
  for name, definition in pairs(methods) do
    local path, verb = custom_verb(definition.path)
    local segments = split(path)
    local key = group_key(definition.verb, verb, #segments)
    routes[key] = routes[key] or {}
    table.insert(routes[key], { method = name, definition = definition, segments = segments })
  end
  return setmetatable({ routes = routes }, Router)
end

local function variables_of(pattern, segments)
  local variables = {}
  for i, expected in ipairs(pattern) do
    local name = expected:match "^{(%w+)}$"
    if name then
      variables[name] = decode(segments[i])
    elseif expected ~= segments[i] then
      return nil
    end
  end
  return variables
end

--- Find the method that a call asks for.
---@param http_verb string
---@param path string without the version and without the query, not yet percent-decoded
---@return ciranda.sim.Route? nil when there is none
function Router:match(http_verb, path)
  local bare, verb = custom_verb(path)
  local segments = split(bare)
  for _, route in ipairs(self.routes[group_key(http_verb, verb, #segments)] or {}) do
    local variables = variables_of(route.segments, segments)
    if variables then
      return { method = route.method, definition = route.definition, variables = variables }
    end
  end
  return nil
end

return M
