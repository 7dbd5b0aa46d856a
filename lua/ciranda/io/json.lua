--- JSON, exact in both directions.
---
--- lua-cjson decodes and dkjson encodes, each for what it does well; neither is exact alone. cjson makes
--- every number a float and cannot tell `[]` from `{}`; what it makes of a text with numbers or empty tables is gone
--- through once more, and a text in which it meets an integer beyond 2^53 or an empty array is decoded again by
--- dkjson, which takes some ten times as long. dkjson writes floats with 14
--- digits, an object with the single key "n" as an array, and a table with holes as whatever it finds; so
--- values are checked and prepared before they reach it.
---
--- Numbers: what is integral and smaller than 2^53 in magnitude, and every integer literal that fits in 64
--- bits, becomes a Lua integer; the rest a float. Integers and floats are written so that reading them gives
--- the same.

local cjson = require("cjson")
local core = require("ciranda.core.json")
local errors = require("ciranda.io.error")

local M = {}

--- JSON's null. It is true in conditions, compares with `==`, and is the same in every instance of this
--- module.
M.null = cjson.null

--- Deepest nesting that is read or written.
M.MAX_DEPTH = 256

local EXACT = 2 ^ 53
local LONG_INTEGER = ("%d"):rep(16)
local tointeger = math.tointeger

local parser = cjson.new()
parser.decode_max_depth(M.MAX_DEPTH)
parser.decode_invalid_numbers(false)

local OBJECT = { __jsontype = "object" }
local ARRAY = { __jsontype = "array" }

--- Mark a table as a JSON array: only an empty one needs it.
---@generic T: table
---@param list T?
---@return T
function M.array(list)
  return setmetatable(list or {}, ARRAY)
end

--- Mark a table as a JSON object. An unmarked empty table is one anyway.
---@generic T: table
---@param fields T?
---@return T
function M.object(fields)
  return setmetatable(fields or {}, OBJECT)
end

--- "array", "object" or nil, as decoded or marked; nil for a table whose content tells.
---@param value any
---@return string?
function M.kind(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__jsontype or nil
end

-- Decoding --------------------------------------------------------------------------------------------------

--- What a number that cjson has read is; a second value, true, when cjson may have rounded it.
local function exact(number)
  if number > -EXACT and number < EXACT then
    return tointeger(number) or number
  end
  return number, true
end

--- Turn integral floats into integers and mark empty tables that are not marked as objects, in place.
---@param value table
---@return boolean rounded whether there is a number that cjson may have rounded
---@return boolean empty whether there is an empty table, which may have been an array
local function finish(value)
  local key, field = next(value)
  if key == nil then
    if not getmetatable(value) then
      setmetatable(value, OBJECT)
    end
    return false, true
  end
  local rounded, empty = false, false
  repeat
    local kind = type(field)
    if kind == "table" then
      local inner_rounded, inner_empty = finish(field)
      rounded, empty = rounded or inner_rounded, empty or inner_empty
    elseif kind == "number" then
      local number, inexact = exact(field)
      value[key] = number -- assigning to an existing field is allowed while traversing
      rounded = rounded or inexact or false
    end
    key, field = next(value, key)
  until key == nil
  return rounded, empty
end

--- `finish` for any value.
local function finished(value)
  if type(value) == "table" then
    return value, finish(value)
  elseif type(value) == "number" then
    return exact(value)
  end
  return value
end

--- Decode a JSON text.
---@param text string
---@param target string? where the text came from, for the message
---@param loose boolean? for who only reads it: an empty array is like an empty object, which costs less
---@return any value
--- Raises "parse" for what is not JSON, for invalid UTF-8, and for nesting deeper than MAX_DEPTH.
function M.decode(text, target, loose)
  if type(text) ~= "string" then
    errors.misuse(2, "json.decode: a string expected, got %s", type(text))
  end
  local place, special = core.scan(text)
  if place then
    errors.raise({
      code = "parse",
      op = "json.decode",
      target = target,
      message = ("not valid UTF-8 at byte %d"):format(place),
    })
  end
  local ok, value = pcall(parser.decode, text)
  if not ok then
    errors.raise({
      code = "parse",
      op = "json.decode",
      target = target,
      message = "not JSON: " .. errors.text(value),
    })
  end
  if not special then
    return value
  end
  local rounded, empty
  value, rounded, empty = finished(value)
  if rounded and text:find(LONG_INTEGER) or empty and not loose and text:find("%[%s*%]") then
    value = finished(require("dkjson").decode(text, 1, M.null, OBJECT, ARRAY))
  end
  return value
end

-- Encoding --------------------------------------------------------------------------------------------------

local function refuse(path, format, ...)
  errors.misuse(
    errors.level_outside("ciranda/io/json"),
    "json.encode: %s: %s",
    #path == 0 and "the value" or table.concat(path),
    format:format(...)
  )
end

--- A number that dkjson would not write exactly, as a value that it writes verbatim.
local function verbatim(text)
  return setmetatable({}, {
    __tojson = function()
      return text
    end,
  })
end

local function prepare_float(value, path)
  if value ~= value or value == math.huge or value == -math.huge then
    refuse(path, "%s has no form in JSON", tostring(value))
  end
  local integer = value > -EXACT and value < EXACT and math.tointeger(value)
  if integer then
    return integer
  end
  for digits = 14, 17 do
    local text = ("%." .. digits .. "g"):format(value)
    if tonumber(text) == value then
      return verbatim(text)
    end
  end
end

--- Replace bytes that are not UTF-8 by U+FFFD: what a worker prints must not make its log unwritable.
---@param text string
---@return string
function M.utf8(text)
  if utf8.len(text) then
    return text
  end
  local parts, from = {}, 1
  while from <= #text do
    local length, bad = utf8.len(text, from)
    if length then
      parts[#parts + 1] = text:sub(from)
      break
    end
    parts[#parts + 1] = text:sub(from, bad - 1)
    parts[#parts + 1] = "\u{FFFD}"
    from = bad + 1
  end
  return table.concat(parts)
end

local prepare -- forward

local function prepare_array(list, count, path, seen)
  local result = setmetatable({}, ARRAY)
  for index = 1, count do
    path[#path + 1] = ("[%d]"):format(index)
    result[index] = prepare(list[index], path, seen)
    path[#path] = nil
  end
  return result
end

local function prepare_object(fields, path, seen)
  local result, order = {}, {}
  for key, value in next, fields do
    if type(key) ~= "string" then
      refuse(
        path,
        "key %s is a %s; objects have string keys, arrays have 1 to n without holes",
        tostring(key),
        type(key)
      )
    end
    path[#path + 1] = "." .. key
    local name = M.utf8(key)
    order[#order + 1] = name
    local ready = prepare(value, path, seen)
    if name == "n" and type(ready) == "number" then
      ready = verbatim(tostring(ready)) -- dkjson takes a number under "n" for the length of an array
    end
    result[name] = ready
    path[#path] = nil
  end
  table.sort(order)
  return setmetatable(result, { __jsontype = "object", __jsonorder = order })
end

function prepare(value, path, seen)
  local kind = type(value)
  if kind == "string" then
    return M.utf8(value)
  elseif kind == "number" then
    return math.type(value) == "integer" and value or prepare_float(value, path)
  elseif kind == "boolean" then
    return value
  elseif value == nil or value == M.null then
    return require("dkjson").null
  elseif kind ~= "table" then
    refuse(path, "a %s has no form in JSON", kind)
  end
  if seen[value] then
    refuse(path, "the table contains itself")
  end
  if #path >= M.MAX_DEPTH then
    refuse({ table.concat(path, "", 1, 3), "..." }, "nested deeper than %d", M.MAX_DEPTH)
  end
  seen[value] = true
  local result
  local marked = M.kind(value)
  local count = #value
  if marked == "array" or (marked ~= "object" and count > 0) then
    for key in next, value do
      if math.type(key) ~= "integer" or key < 1 or key > count then
        refuse(
          path,
          "an array with the key %s besides 1 to %d; mark what may be absent with json.null",
          tostring(key),
          count
        )
      end
    end
    result = prepare_array(value, count, path, seen)
  else
    result = prepare_object(value, path, seen)
  end
  seen[value] = nil
  return result
end

--- Encode a value. Keys are sorted, so equal values give equal texts.
---@param value any tables with string keys are objects, with 1 to n arrays; an empty one is an object
---       unless marked with `json.array`. Bytes that are not UTF-8 become U+FFFD.
---@param options { indent: boolean? }? indent: one field a line
---@return string
--- A value without a form in JSON (a function, NaN, a table that contains itself, an array with holes, mixed
--- keys) is a misuse; the message says where in the value it is.
function M.encode(value, options)
  if options then
    errors.check_options(options, { indent = true }, "json.encode")
  end
  local prepared = prepare(value, {}, {})
  return require("dkjson").encode(prepared, { indent = options and options.indent or nil })
end

return M
