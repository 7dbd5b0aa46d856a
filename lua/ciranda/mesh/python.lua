--- Values written and read as Python does, so that JAX's refusals read the same here.
local M = {}

--- "(1, 8, 1)", "(8,)", "()".
---@param list any[]
---@return string
function M.tuple(list)
  local parts = {}
  for index = 1, #list do
    parts[index] = M.repr(list[index])
  end
  if #parts == 1 then
    return "(" .. parts[1] .. ",)"
  end
  return "(" .. table.concat(parts, ", ") .. ")"
end

--- "[4, 4, 1]".
---@param list any[]
---@return string
function M.list(list)
  local parts = {}
  for index = 1, #list do
    parts[index] = M.repr(list[index])
  end
  return "[" .. table.concat(parts, ", ") .. "]"
end

--- A shape in numpy's own messages: "(2,4)", "(8,)".
---@param list integer[]
---@return string
function M.numpy_shape(list)
  return "(" .. table.concat(list, ",") .. (#list == 1 and ",)" or ")")
end

--- repr() of a number, a string, a boolean or None.
---@param value any
---@return string
function M.repr(value)
  if math.type(value) == "float" then
    if value ~= value then
      return "nan"
    elseif value == math.huge then
      return "inf"
    elseif value == -math.huge then
      return "-inf"
    end
    for precision = 1, 17 do
      local text = ("%." .. precision .. "g"):format(value)
      if tonumber(text) == value then
        return text:find("[.e]") and text or text .. ".0"
      end
    end
  elseif type(value) == "string" then
    local quote = value:find("'", 1, true) and not value:find('"', 1, true) and '"' or "'"
    local text =
      value:gsub("[\\" .. quote .. "]", "\\%0"):gsub("\n", "\\n"):gsub("\t", "\\t"):gsub("\r", "\\r")
    return quote .. text .. quote
  elseif value == nil then
    return "None"
  elseif type(value) == "boolean" then
    return value and "True" or "False"
  end
  return tostring(value)
end

--- int(): truncates floats, reads decimal strings, counts booleans.
---@param value any
---@return integer? nil where int() raises
function M.int(value)
  if math.type(value) == "integer" then
    return value
  elseif math.type(value) == "float" then
    return math.tointeger(value < 0 and math.ceil(value) or math.floor(value))
  elseif type(value) == "string" then
    local digits = value:match("^%s*([+-]?%d[%d_]*)%s*$")
    if digits and not digits:find("__", 1, true) and not digits:find("_$") then
      return math.tointeger(tonumber((digits:gsub("_", ""):gsub("^%+", ""))))
    end
  elseif type(value) == "boolean" then
    return value and 1 or 0
  end
  return nil
end

return M
