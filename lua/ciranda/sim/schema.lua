--- Reading and writing the messages of the TPU API, driven by the tables in ciranda.data.
--
-- Inside the simulator a message is a table with lowerCamelCase keys, enums by name, int64 as Lua integers, times and
-- durations as the strings they came as. `read` makes that from a request: both spellings of a field's name are
-- understood, unknown fields are refused, every value is checked, and a refusal names the field as the real service
-- does (snake_case, with indices). `write` makes JSON from it: lowerCamelCase, int64 as strings, defaults absent,
-- a message without fields as `{}`. Fields that the version does not have are left out, which is how one state serves
-- two versions.

local clock = require("ciranda.sim.clock")
local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")

local M = {}

---@class ciranda.sim.Field
---@field name string lowerCamelCase
---@field kind string a scalar of the schema's tables, "enum" or "message"
---@field list boolean
---@field map boolean
---@field message string? name of the message
---@field enum table? `{ [name] = number, [number] = name, default = name }`

---@class ciranda.sim.Schema
---@field version string
---@field methods table<string, table>
---@field private messages table<string, { accept: table<string, ciranda.sim.Field>, fields: ciranda.sim.Field[] }>
local Schema = {}
Schema.__index = Schema

-- Values that google/cloud/tpu/v2/cloud_tpu.proto numbers otherwise than one after the other.
-- stylua: ignore
local ENUM_NUMBERS = {
  ["AcceleratorConfig.type"] = { V2 = 2, V3 = 4, V4 = 7, V5LITE_POD = 9, V5P = 10, V6E = 11, TPU7X = 12, V6EA = 13,
    TPU7 = 14 },
  ["Node.health"] = { TIMEOUT = 3, UNHEALTHY_TENSORFLOW = 4, UNHEALTHY_MAINTENANCE = 5 },
  ["Node.state"] = { STOPPED = 8, STOPPING = 9, STARTING = 10, PREEMPTED = 11, TERMINATED = 12, HIDING = 13,
    HIDDEN = 14, UNHIDING = 15, UNKNOWN = 16 },
}

local SCALARS = {
  string = true,
  bool = true,
  int32 = true,
  int64 = true,
  float = true,
  timestamp = true,
  duration = true,
  any = true,
}

--- A field's name as protobuf spells it: "nodeSpec" -> "node_spec".
---@param name string
---@return string
function M.snake(name)
  return (name:gsub("%u", function(letter)
    return "_" .. letter:lower()
  end))
end

local function compile_enum(values, overrides)
  local enum = { default = values[1] }
  for i, name in ipairs(values) do
    local number = overrides and overrides[name] or i - 1
    enum[name], enum[number] = number, name
  end
  return enum
end

local function compile_field(message, name, spec)
  if type(spec) == "table" then
    local enum = compile_enum(spec, ENUM_NUMBERS[message .. "." .. name])
    return { name = name, kind = "enum", list = false, map = false, enum = enum }
  end
  local base, suffix = spec:match "^(%w+)(.*)$"
  local field = { name = name, kind = base, list = suffix == "[]", map = suffix == "{}" }
  if not SCALARS[base] then
    field.kind, field.message = "message", base
  end
  return field
end

local loaded = {}

--- The schema of a version of the API.
---@param version string "v2" or "v2alpha1"
---@return ciranda.sim.Schema
function M.load(version)
  if loaded[version] then
    return loaded[version]
  end
  local data = require("ciranda.data.tpu_schema_" .. version)
  local self = setmetatable({ version = data.version, methods = data.methods, messages = {} }, Schema)
  for message, specs in pairs(data.messages) do
    local accept, fields = {}, {}
    for name, spec in pairs(specs) do
      local field = compile_field(message, name, spec)
      fields[#fields + 1] = field
      accept[name], accept[M.snake(name)] = field, field
    end
    table.sort(fields, function(a, b)
      return a.name < b.name
    end)
    self.messages[message] = { accept = accept, fields = fields }
  end
  loaded[version] = self
  return self
end

--- Whether the version has a field.
---@param message string
---@param name string either spelling
---@return boolean
function Schema:has(message, name)
  return self.messages[message].accept[name] ~= nil
end

--- Whether an enum of the version has a value.
---@param message string
---@param name string the field
---@param value string
---@return boolean
function Schema:has_value(message, name, value)
  return math.type(self.messages[message].accept[name].enum[value]) == "integer"
end

local TYPE_NAMES = {
  string = "TYPE_STRING",
  bool = "TYPE_BOOL",
  int32 = "TYPE_INT32",
  int64 = "TYPE_INT64",
  float = "TYPE_FLOAT",
  enum = "TYPE_ENUM",
  timestamp = "type.googleapis.com/google.protobuf.Timestamp",
  duration = "type.googleapis.com/google.protobuf.Duration",
}

local function shown(value)
  if type(value) == "string" then
    return '"' .. value .. '"'
  elseif type(value) == "table" then
    return "a list or an object"
  end
  return tostring(value)
end

local function refuse(path, kind, value)
  local message = ("Invalid value at '%s' (%s), %s"):format(path, TYPE_NAMES[kind] or kind, shown(value))
  errors.raise(errors.invalid(message, path))
end

local function to_integer(value)
  if type(value) == "string" then
    return value:match "^%-?%d+$" and math.tointeger(tonumber(value)) or nil
  end
  return type(value) == "number" and math.tointeger(value) or nil
end

local readers = {}

function readers.string(value, path)
  if type(value) ~= "string" then
    refuse(path, "string", value)
  end
  return value
end

function readers.bool(value, path)
  if type(value) ~= "boolean" then
    refuse(path, "bool", value)
  end
  return value
end

function readers.int32(value, path)
  local number = to_integer(value)
  if not number or number < -0x80000000 or number > 0x7fffffff then
    refuse(path, "int32", value)
  end
  return number
end

function readers.int64(value, path)
  return to_integer(value) or refuse(path, "int64", value)
end

function readers.float(value, path)
  local number = type(value) == "string" and tonumber(value) or value
  if type(number) ~= "number" then
    refuse(path, "float", value)
  end
  return number
end

function readers.timestamp(value, path)
  if type(value) ~= "string" or not clock.parse_timestamp(value) then
    refuse(path, "timestamp", value)
  end
  return value
end

function readers.duration(value, path)
  if type(value) ~= "string" or not clock.parse_duration(value) then
    refuse(path, "duration", value)
  end
  return value
end

function readers.any(value, path)
  if type(value) ~= "table" then
    refuse(path, "type.googleapis.com/google.protobuf.Any", value)
  end
  return value
end

local function is_list(value)
  return type(value) == "table" and (json.kind(value) == "array" or value[1] ~= nil)
end

local function is_object(value)
  return type(value) == "table" and not is_list(value)
end

function Schema:read_one(field, value, path)
  if field.kind == "message" then
    return self:read(field.message, value, path)
  elseif field.kind == "enum" then
    if type(value) == "number" and field.enum[value] then
      return field.enum[value]
    elseif type(value) == "string" and math.type(field.enum[value]) == "integer" then
      return value
    end
    refuse(path, "enum", value)
  end
  return readers[field.kind](value, path)
end

function Schema:read_field(field, value, path)
  if field.list then
    if not is_list(value) then
      refuse(path, TYPE_NAMES[field.kind] or field.message, value)
    end
    local list = {}
    for i, item in ipairs(value) do
      list[i] = self:read_one(field, item, ("%s[%d]"):format(path, i - 1))
    end
    return list
  elseif field.map then
    if not is_object(value) then
      refuse(path, "Map", value)
    end
    local map = {}
    for key, item in pairs(value) do
      if item ~= json.null then
        map[key] = self:read_one(field, item, ("%s[%s]"):format(path, key))
      end
    end
    return map
  end
  return self:read_one(field, value, path)
end

--- Read a message from decoded JSON.
---@param message string name of the message
---@param value any decoded JSON
---@param path string? where it stands in the request, for refusals; nil or "" for the whole body
---@return table
--- Raises ciranda.sim.Status INVALID_ARGUMENT.
function Schema:read(message, value, path)
  path = path or ""
  if not is_object(value) then
    refuse(path, "type.googleapis.com/google.cloud.tpu." .. self.version .. "." .. message, value)
  end
  local definition = self.messages[message] or error("no message " .. tostring(message))
  local result = {}
  for key, item in pairs(value) do
    local field = definition.accept[key]
    if not field then
      local text = ('Invalid JSON payload received. Unknown name "%s"%s: Cannot find field.'):format(
        tostring(key),
        path == "" and "" or (" at '%s'"):format(path)
      )
      errors.raise(errors.invalid(text, path))
    end
    if item ~= json.null then
      if result[field.name] ~= nil then
        local text = ("Invalid value at '%s' (oneof), '%s' is already set. Cannot set twice."):format(
          path,
          key
        )
        errors.raise(errors.invalid(text, path))
      end
      local deeper = (path == "" and "" or path .. ".") .. M.snake(field.name)
      result[field.name] = self:read_field(field, item, deeper)
    end
  end
  return result
end

--- Read one query parameter of a method, which arrives as text.
---@param kind string as in a method's `query`
---@param name string the name that the client used
---@param text string
---@return any
--- Raises ciranda.sim.Status INVALID_ARGUMENT.
function M.read_query(kind, name, text)
  if kind == "bool" then
    local word = text:lower() -- gcloud sends "True"
    if word == "true" or word == "1" or word == "" then
      return true
    elseif word == "false" or word == "0" then
      return false
    end
    refuse(name, "bool", text)
  elseif kind == "string[]" then
    return { text }
  end
  return readers[kind](text, name)
end

local function write_scalar(field, value, numbers)
  if field.kind == "int64" then
    return ("%d"):format(value)
  elseif field.kind == "enum" and numbers then
    return field.enum[value]
  end
  return value
end

-- What a message does not show: defaults, and values for which the version has no name.
local function is_left_out(field, value)
  if field.list or field.map then
    return next(value) == nil
  elseif field.kind == "enum" then
    return value == field.enum.default or field.enum[value] == nil
  elseif field.kind == "message" or field.kind == "any" then
    return false
  end
  return value == "" or value == false or value == 0
end

function Schema:write_one(field, value, numbers)
  if field.kind == "message" then
    return self:write(field.message, value, numbers)
  end
  return write_scalar(field, value, numbers)
end

--- Make a message into a table that encodes to the API's JSON.
---@param message string name of the message
---@param value table
---@param numbers boolean? enums as numbers (the client asked with `$alt=json;enum-encoding=int`)
---@return table
function Schema:write(message, value, numbers)
  local definition = self.messages[message] or error("no message " .. tostring(message))
  local result = {}
  for _, field in ipairs(definition.fields) do
    local item = value[field.name]
    if item ~= nil and not is_left_out(field, item) then
      if field.list then
        local list = {}
        for i, element in ipairs(item) do
          list[i] = self:write_one(field, element, numbers)
        end
        result[field.name] = json.array(list)
      elseif field.map then
        local map = {}
        for key, element in pairs(item) do
          map[key] = self:write_one(field, element, numbers)
        end
        result[field.name] = json.object(map)
      else
        result[field.name] = self:write_one(field, item, numbers)
      end
    end
  end
  return json.object(result)
end

return M
