--- Values as a person wants to read them in the REPL: tables opened to a depth, long ones cut, cycles named.
local M = {}

local MAX_DEPTH = 4
local MAX_ITEMS = 100
local WIDTH = 90

--- Sorts keys: numbers first, then strings, then the rest by their text.
local function key_order(a, b)
  local kind_a, kind_b = type(a), type(b)
  if kind_a == kind_b and (kind_a == "number" or kind_a == "string") then
    return a < b
  elseif kind_a == "number" or kind_b == "number" then
    return kind_a == "number"
  end
  return tostring(a) < tostring(b)
end

local function show(value, depth, indent, open)
  if type(value) == "string" then
    return depth == 0 and value or ("%q"):format(value):gsub("\\\n", "\\n")
  elseif type(value) ~= "table" then
    return tostring(value)
  end
  local meta = getmetatable(value)
  if type(meta) == "table" and rawget(meta, "__tostring") then
    return tostring(value)
  elseif open[value] then
    return "<the table above>"
  elseif depth >= MAX_DEPTH then
    return next(value) == nil and "{}" or "{...}"
  end
  open[value] = true
  local parts, length, shown = {}, #value, 0
  for i = 1, math.min(length, MAX_ITEMS) do
    parts[#parts + 1] = show(value[i], depth + 1, indent .. "  ", open)
    shown = shown + 1
  end
  local keys, total = {}, 0
  for key in next, value do
    total = total + 1
    if not (math.type(key) == "integer" and key >= 1 and key <= length) then
      keys[#keys + 1] = key
    end
  end
  table.sort(keys, key_order)
  for _, key in ipairs(keys) do
    if shown >= MAX_ITEMS then
      break
    end
    shown = shown + 1
    local name = type(key) == "string" and key:find("^[%a_][%w_]*$") and key
      or "[" .. show(key, depth + 1, "", open) .. "]"
    parts[#parts + 1] = name .. " = " .. show(value[key], depth + 1, indent .. "  ", open)
  end
  if total > shown then
    parts[#parts + 1] = ("... %d more"):format(total - shown)
  end
  open[value] = nil
  if #parts == 0 then
    return "{}"
  end
  local line = "{ " .. table.concat(parts, ", ") .. " }"
  if #line + #indent <= WIDTH and not line:find("\n") then
    return line
  end
  return "{\n" .. indent .. "  " .. table.concat(parts, ",\n" .. indent .. "  ") .. "\n" .. indent .. "}"
end

--- The text of a value; a string at the top stands as it is.
---@param value any
---@return string
function M.text(value)
  return show(value, 0, "", {})
end

return M
