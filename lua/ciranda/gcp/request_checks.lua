--- What is checked of a request for TPUs before anything is asked of Google: each refusal names the option, what is
--- wrong with it and what would do.

local errors = require("ciranda.io.error")
local types = require("ciranda.mesh.types")

local M = {}

--- "Multislice: at most 256 slices" (the Multislice guide).
M.MAX_SLICES = 256

--- Compute Engine's limits for instance metadata, in bytes: a value, and all of it.
M.METADATA_VALUE = 256 * 1024
M.METADATA_TOTAL = 512 * 1024

--- Runtime versions per generation (Cloud TPU's page of supported versions).
M.RUNTIMES = {
  v2 = "tpu-ubuntu2204-base",
  v3 = "tpu-ubuntu2204-base",
  v4 = "tpu-ubuntu2204-base",
  v5e = "v2-alpha-tpuv5-lite",
  v5p = "v2-alpha-tpuv5",
  v6e = "v2-alpha-tpuv6e",
}

--- Refuse an option.
---@param option string
---@param format string
---@param ... any
function M.refuse(option, format, ...)
  errors.raise {
    code = "usage",
    op = "tpu request",
    target = option,
    message = ("option '%s': %s"):format(option, format:format(...)),
  }
end
local refuse = M.refuse

--- An option of a type, or nil.
---@generic T
---@param options table
---@param name string
---@param kind string what `type` gives, or "integer"
---@return any
function M.typed(options, name, kind)
  local value = options[name]
  if value == nil then
    return nil
  end
  local actual = kind == "integer" and math.type(value) or type(value)
  if actual ~= kind then
    refuse(name, "must be %s %s, got %s", kind == "integer" and "an" or "a", kind, type(value))
  end
  return value
end

--- The id of a resource: Google's rule for names.
---@param options table
---@param name string
---@return string
function M.id(options, name)
  local value = M.typed(options, name, "string")
  if not value or value == "" then
    refuse(name, "is needed")
  end
  if #value > 63 or not value:match("^%l[%l%d-]*$") or value:sub(-1) == "-" then
    refuse(
      name,
      "'%s' is no name for a resource: small letters, digits and '-', a letter first, no '-' last, at most 63",
      value
    )
  end
  return value
end

--- The names of the nodes that a prefix gives.
---@param prefix string
---@param slices integer
---@return string[]
function M.node_names(prefix, slices)
  local names = {}
  for index = 0, slices - 1 do
    names[index + 1] = ("%s-%d"):format(prefix, index)
  end
  if #names[slices] > 63 then
    refuse("node_prefix", "'%s' makes names such as '%s' of more than 63 characters", prefix, names[slices])
  end
  return names
end

--- A list of strings.
---@param options table
---@param name string
---@return string[]?
function M.strings(options, name)
  local list = M.typed(options, name, "table")
  for index, value in ipairs(list or {}) do
    if type(value) ~= "string" then
      refuse(name, "entry %d must be a string, got %s", index, type(value))
    end
  end
  return list
end

--- A map from strings to strings.
---@param options table
---@param name string
---@return table<string, string>?
function M.map(options, name)
  local map = M.typed(options, name, "table")
  for key, value in pairs(map or {}) do
    if type(key) ~= "string" or type(value) ~= "string" then
      refuse(name, "must be a table from strings to strings; '%s' is not", tostring(key))
    end
  end
  return map
end

---@param labels table<string, string>?
function M.labels(labels)
  for key, value in pairs(labels or {}) do
    if #key > 63 or not key:match("^%l[%l%d_-]*$") then
      refuse("labels", "'%s' is no key: small letters, digits, '_' and '-', a letter first, at most 63", key)
    elseif #value > 63 or not value:match("^[%l%d_-]*$") then
      refuse(
        "labels",
        "'%s' is no value for '%s': small letters, digits, '_' and '-', at most 63",
        value,
        key
      )
    end
  end
end

---@param tags string[]?
function M.tags(tags)
  for _, tag in ipairs(tags or {}) do
    if #tag > 63 or not tag:match("^%l[%l%d-]*$") or tag:sub(-1) == "-" then
      refuse("tags", "'%s' is no network tag: small letters, digits and '-', a letter first, at most 63", tag)
    end
  end
end

--- The metadata as it will be sent.
---@param metadata table<string, string>
function M.metadata(metadata)
  local total = 0
  for key, value in pairs(metadata) do
    if #key > 128 or not key:match("^[%w_-]+$") then
      refuse("metadata", "'%s' is no key: letters, digits, '_' and '-', at most 128", key)
    elseif #value > M.METADATA_VALUE then
      refuse(
        "metadata",
        "the value of '%s' has %d bytes; at most %d are allowed",
        key,
        #value,
        M.METADATA_VALUE
      )
    end
    total = total + #key + #value
  end
  if total > M.METADATA_TOTAL then
    refuse("metadata", "it has %d bytes in all; at most %d are allowed", total, M.METADATA_TOTAL)
  end
end

--- A start-up script must have something after its first line; a quoted "\n" is not a new line.
---@param script string
---@param option string
function M.startup_script(script, option)
  local first, rest = script:match("^(#![^\n]*)\n?(.*)$")
  if not first then
    if script:match("^%s*$") then
      refuse(option, "the script is empty")
    end
    return
  end
  if rest:match("^%s*$") then
    if first:find("\\n", 1, true) then
      refuse(
        option,
        "the script is one line: its '\\n' are two characters each; in bash write $'...' or use a file"
      )
    end
    refuse(option, "nothing follows the script's first line, %s", first)
  end
end

--- Refuse keys that a table inside an option does not have.
---@param value table
---@param option string
---@param names table<string, true>
function M.keys(value, option, names)
  for key in pairs(value) do
    if not names[key] then
      local list = {}
      for name in pairs(names) do
        list[#list + 1] = name
      end
      table.sort(list)
      refuse(option, "there is no '%s' in it (there are %s)", tostring(key), table.concat(list, ", "))
    end
  end
end

--- The accelerator that was asked for, by type, by generation and topology, or by all of them.
---@param options table `accelerator`, `topology`, `unchecked`
---@return { type: string?, config: table?, entry: ciranda.mesh.Type?, generation: ciranda.mesh.Generation? }
function M.accelerator(options)
  local name, topology = M.typed(options, "accelerator", "string"), M.typed(options, "topology", "string")
  if not name then
    refuse(
      "accelerator",
      'is needed: a type such as "v5litepod-16", or a generation such as "v5p" with \'topology\''
    )
  end
  local generation = types.generation_of(name)
  local is_type = name:find("%-%d+$") ~= nil
  if options.unchecked then
    if is_type and not topology then
      return { type = name, generation = generation }
    end
    local enum = name:match("^%u[%u%d_]*$") -- the API's own word is sent as it is
    return {
      config = { type = enum or generation and generation.api_type or name, topology = topology },
      generation = generation,
    }
  end
  if is_type then
    local found, entry = pcall(types.get, name)
    if not found then
      refuse("accelerator", "%s", (errors.text(entry):gsub("^accelerator type:? ?", "")))
    end
    if not topology or topology == entry.topology then
      return { type = name, entry = entry, generation = generation }
    end
  elseif not generation then
    refuse("accelerator", "'%s' is neither a type such as v5litepod-16 nor a generation", name)
  elseif not topology then
    local near = types.near(generation.name, generation.suffix == "cores" and 16 or 8)
    refuse(
      "accelerator",
      "'%s' is a generation: say 'topology' too, or a type such as %s",
      name,
      table.concat(near, ", ")
    )
  end
  local shapes = {}
  for _, entry in ipairs(types.list) do
    if entry.generation == generation.name and (not is_type or types.get(name).chips == entry.chips) then
      if entry.topology == topology then
        return {
          config = { type = generation.api_type, topology = topology },
          entry = entry,
          generation = generation,
        }
      end
      shapes[#shapes + 1] = entry.topology
    end
  end
  return refuse(
    "topology",
    "'%s' is no topology of %s; there are %s%s",
    topology,
    name,
    table.concat(shapes, ", ", 1, math.min(#shapes, 16)),
    #shapes > 16 and ", ..." or ""
  )
end

--- How many slices, and whether they may be joined.
---@param options table
---@param generation ciranda.mesh.Generation?
---@return integer
function M.slices(options, generation)
  local slices = M.typed(options, "slices", "integer") or 1
  if slices < 1 or slices > M.MAX_SLICES then
    refuse("slices", "%d; it must be from 1 to %d", slices, M.MAX_SLICES)
  end
  if slices > 1 and generation and not generation.multislice then
    refuse("slices", "%d slices of %s: Multislice needs v4 or newer", slices, generation.name)
  end
  return slices
end

--- The runtime version: the one that was named, else the generation's.
---@param options table
---@param generation ciranda.mesh.Generation?
---@return string
function M.runtime(options, generation)
  local runtime = M.typed(options, "runtime", "string")
  if not runtime then
    runtime = generation and M.RUNTIMES[generation.name]
    if not runtime then
      refuse("runtime", "is needed: there is no usual version for %s", tostring(options.accelerator))
    end
    return runtime
  end
  local usual = generation and M.RUNTIMES[generation.name]
  -- Only combinations that cannot start are refused; there are more versions than any table has.
  for name, version in pairs(M.RUNTIMES) do
    if version == runtime and version:find("tpuv", 1, true) and usual and version ~= usual then
      refuse("runtime", "'%s' is for %s; %s needs '%s'", runtime, name, generation.name, usual)
    end
  end
  return runtime
end

local UNITS = { s = 1, m = 60, h = 3600, d = 86400 }

--- Seconds of a length of time: a number, or digits with s, m, h or d.
---@param value any
---@param option string
---@return number
function M.seconds(value, option)
  local amount = value
  if type(value) == "string" then
    local digits, unit = value:match("^(%d+%.?%d*)([smhd])$")
    amount = digits and tonumber(digits) * UNITS[unit]
  end
  if type(amount) ~= "number" or amount ~= amount or amount <= 0 or amount == math.huge then
    refuse(
      option,
      "'%s' is no length of time: seconds, or digits with s, m, h or d, such as \"6h\"",
      tostring(value)
    )
  end
  return amount
end

--- Seconds as protobuf writes a duration.
---@param seconds number
---@return string
function M.duration(seconds)
  local whole = math.tointeger(seconds)
  if whole then
    return ("%ds"):format(whole)
  end
  return (("%.3f"):format(seconds):gsub("%.?0+$", "")) .. "s"
end

return M
