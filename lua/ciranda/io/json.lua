--- JSON, exact in both directions.
---
--- lua-cjson decodes, but is not exact alone: it makes every number a float and cannot tell `[]` from `{}`; what it
--- makes of a text with numbers or empty tables is gone through once more, and a text in which it meets an integer
--- beyond 2^53 or an empty array is decoded again by dkjson, which takes some ten times as long. Encoding is done here:
--- dkjson writes floats with 14 digits, an object with the single key "n" as an array, and a table with holes as
--- whatever it finds; cjson sorts no keys.
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

--- A float as the shortest text that reads as the same.
local function float_text(value, path)
  if value ~= value or value == math.huge or value == -math.huge then
    refuse(path, "%s has no form in JSON", tostring(value))
  end
  local integer = value > -EXACT and value < EXACT and math.tointeger(value)
  if integer then
    return tostring(integer)
  end
  for digits = 14, 17 do
    local text = ("%." .. digits .. "g"):format(value)
    if tonumber(text) == value then
      return text
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

local ESCAPES = {
  ['"'] = '\\"',
  ["\\"] = "\\\\",
  ["\b"] = "\\b",
  ["\f"] = "\\f",
  ["\n"] = "\\n",
  ["\r"] = "\\r",
  ["\t"] = "\\t",
}

local function escape(byte)
  return ESCAPES[byte] or ("\\u%04x"):format(byte:byte())
end

--- A string between its quotes. What JavaScript or a terminal takes for more than a character is escaped too, by
--- dkjson, which knows them; these bytes are the first ones of such characters.
local function quote(text)
  text = M.utf8(text)
  if text:find("[\194\216\220\225\226\239]") then
    return require("dkjson").quotestring(text)
  elseif text:find('[%c"\\]') then
    text = text:gsub('[%c"\\]', escape)
  end
  return '"' .. text .. '"'
end

--- What a value is while it is written: where in the whole, in which tables, what has been written, and the level of
--- indentation, or nil.
---@class ciranda.json.Writer
---@field path string[]
---@field seen table<table, true>
---@field parts string[]
---@field level integer?

local write -- forward

local function write_array(list, count, to)
  local parts, path = to.parts, to.path
  parts[#parts + 1] = "["
  for index = 1, count do
    if index > 1 then
      parts[#parts + 1] = ","
    end
    path[#path + 1] = ("[%d]"):format(index)
    write(list[index], to)
    path[#path] = nil
  end
  parts[#parts + 1] = "]"
end

local function write_object(fields, to)
  local parts, path, order = to.parts, to.path, {}
  for key in next, fields do
    if type(key) ~= "string" then
      refuse(
        path,
        "key %s is a %s; objects have string keys, arrays have 1 to n without holes",
        tostring(key),
        type(key)
      )
    end
    order[#order + 1] = key
  end
  table.sort(order)
  parts[#parts + 1] = "{"
  for index, key in ipairs(order) do
    if index > 1 then
      parts[#parts + 1] = ","
    end
    if to.level then
      parts[#parts + 1] = "\n" .. ("  "):rep(to.level)
    end
    parts[#parts + 1] = quote(key) .. ":"
    path[#path + 1] = "." .. key
    write(fields[key], to)
    path[#path] = nil
  end
  if to.level then
    parts[#parts + 1] = "\n" .. ("  "):rep(to.level - 1)
  end
  parts[#parts + 1] = "}"
end

function write(value, to)
  local kind = type(value)
  local parts, path, seen = to.parts, to.path, to.seen
  if kind == "string" then
    parts[#parts + 1] = quote(value)
  elseif kind == "number" then
    parts[#parts + 1] = math.type(value) == "integer" and tostring(value) or float_text(value, path)
  elseif kind == "boolean" then
    parts[#parts + 1] = tostring(value)
  elseif value == nil or value == M.null then
    parts[#parts + 1] = "null"
  elseif kind ~= "table" then
    refuse(path, "a %s has no form in JSON", kind)
  else
    if seen[value] then
      refuse(path, "the table contains itself")
    end
    if #path >= M.MAX_DEPTH then
      refuse({ table.concat(path, "", 1, 3), "..." }, "nested deeper than %d", M.MAX_DEPTH)
    end
    seen[value] = true
    to.level = to.level and to.level + 1
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
      write_array(value, count, to)
    else
      write_object(value, to)
    end
    to.level = to.level and to.level - 1
    seen[value] = nil
  end
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
  local to = { path = {}, seen = {}, parts = {}, level = options and options.indent and 0 or nil }
  write(value, to)
  return table.concat(to.parts)
end

return M
