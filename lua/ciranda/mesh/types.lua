--- Accelerator types, made from the table in `ciranda.data.accelerators`.
--
-- A type's number counts TensorCores for v2, v3, v4, v5p and tpu7x, and chips for v5litepod and v6e: `v4-8` is
-- 4 chips, `v5litepod-8` is 8.
local data = require("ciranda.data.accelerators")
local fault = require("ciranda.mesh.fault")

local M = {}

---@class ciranda.mesh.Generation
---@field name string              "v4", "v5e", ...
---@field api_prefix string        what accelerator types begin with
---@field api_type string          AcceleratorConfig's enum
---@field jax_kind string          JAX's device_kind
---@field suffix "cores"|"chips"   what the number of an accelerator type counts
---@field cores_per_chip integer   TensorCores
---@field devices_per_chip integer as JAX counts devices
---@field chips_per_host integer   on one board; a VM of a larger slice may have fewer
---@field dimensions integer       2 or 3
---@field pod_chips integer
---@field largest_slice integer    chips of the largest slice Google documents
---@field multislice boolean       whether the platform joins slices of it over DCN

---@class ciranda.mesh.Type
---@field generation string
---@field name string              "v4-8"
---@field topology string          "2x2x1"
---@field chips integer
---@field cores integer            TensorCores
---@field vms integer
---@field chips_per_vm integer
---@field vm_bounds integer[]      chips of a VM along x, y, z
---@field host_bounds integer[]    VMs along x, y, z
---@field wrap boolean[]           whether x, y, z close into a ring
---@field wrap_documented boolean  false for v2 and v3, whose rows do not say
---@field twistable boolean        whether the platform offers it as a twisted torus
---@field source string

---@type table<string, ciranda.mesh.Generation>
M.generations = {}
---@type ciranda.mesh.Generation[]
M.generation_list = data.generations

--- "2x4" -> {2, 4, 1}.
---@param text string
---@return integer[]? nil when the text is no topology
function M.parse_bounds(text)
  local dims = {}
  for part in (text .. "x"):gmatch("(.-)x") do
    local value = part:match("^[1-9]%d?%d?%d?$") and math.tointeger(tonumber(part))
    if not value then
      return nil
    end
    dims[#dims + 1] = value
  end
  if #dims < 2 or #dims > 3 then
    return nil
  end
  dims[3] = dims[3] or 1
  return dims
end

---@type ciranda.mesh.Type[]
M.list = {}
---@type table<string, ciranda.mesh.Type>
M.by_name = {}

for _, generation in ipairs(data.generations) do
  M.generations[generation.name] = generation
end

for index, row in ipairs(data.types) do
  local wrap = row[10] or "FFF"
  local entry = {
    generation = row[1],
    name = row[2],
    topology = row[3],
    chips = row[4],
    cores = row[5],
    vms = row[6],
    chips_per_vm = row[7],
    vm_bounds = M.parse_bounds(row[8]),
    host_bounds = M.parse_bounds(row[9]),
    wrap = { wrap:sub(1, 1) == "T", wrap:sub(2, 2) == "T", wrap:sub(3, 3) == "T" },
    wrap_documented = row[10] ~= nil,
    twistable = row[11],
    source = data.sources[row[12]],
  }
  M.list[index] = entry
  M.by_name[entry.name] = entry
end

-- Other spellings in use, among them JAX's.
local ALIASES = {
  ["v5lite"] = "v5e",
  ["v7x"] = "tpu7x",
  ["tpu v5e"] = "v5e",
  ["tpu v5p"] = "v5p",
  ["tpu7"] = "tpu7x",
}

--- The generation of a name people use: "v5e", "v5litepod", "V5LITE_POD", "TPU v5 lite", "v5e-16".
---@param name string
---@return ciranda.mesh.Generation?
function M.generation_of(name)
  local plain = name:lower()
  local prefix = plain:match("^(.-)%-%d+$") or plain
  for _, generation in ipairs(data.generations) do
    if
      prefix == generation.name
      or prefix == generation.api_prefix
      or prefix == generation.api_type:lower()
      or plain == generation.jax_kind:lower()
    then
      return generation
    end
  end
  return M.generations[ALIASES[prefix] or ALIASES[plain]]
end

--- Types of a generation whose size is nearest, smaller and larger ones.
---@param generation string
---@param number number what the type's number would be
---@param limit integer?
---@return string[] names, nearest first
function M.near(generation, number, limit)
  local candidates = {}
  for _, entry in ipairs(M.list) do
    if entry.generation == generation then
      local size = M.number(entry)
      candidates[#candidates + 1] = {
        name = entry.name,
        size = size,
        distance = math.abs(math.log(size / math.max(number, 0.5))),
      }
    end
  end
  table.sort(candidates, function(a, b)
    if a.distance ~= b.distance then
      return a.distance < b.distance
    end
    return a.size < b.size
  end)
  local names = {}
  for index = 1, math.min(limit or 3, #candidates) do
    names[index] = candidates[index].name
  end
  return names
end

--- The number in a type's name.
---@param entry { generation: string, cores: integer, chips: integer }
---@return integer
function M.number(entry)
  return M.generations[entry.generation].suffix == "cores" and entry.cores or entry.chips
end

--- The row of an accelerator type.
---@param name string such as "v5litepod-16"
---@return ciranda.mesh.Type
--- Raises "invalid" with near valid types when there is none of that name.
function M.get(name)
  local entry = M.by_name[name]
  if entry then
    return entry
  end
  if type(name) ~= "string" then
    fault.misuse("an accelerator type is a string like 'v4-8', got %s", type(name))
  end
  local generation = M.generation_of(name)
  if not generation then
    local prefixes = {}
    for _, known in ipairs(data.generations) do
      prefixes[#prefixes + 1] = known.api_prefix .. "-N"
    end
    fault.raise({
      op = "accelerator type",
      target = name,
      near = {},
      message = ("accelerator type '%s' is not known; types are %s"):format(
        name,
        table.concat(prefixes, ", ")
      ),
    })
  end
  local number = tonumber(name:match("%-(%d+)$"))
  local near
  local spelled = number and M.by_name[("%s-%d"):format(generation.api_prefix, number)]
  if spelled then
    near = { spelled.name }
  else
    near = M.near(generation.name, number or 1)
  end
  local counts = generation.suffix == "cores" and "TensorCores" or "chips"
  fault.raise({
    op = "accelerator type",
    target = name,
    near = near,
    message = ("accelerator type '%s' does not exist (the number of a %s counts %s); near it: %s"):format(
      name,
      generation.api_prefix,
      counts,
      table.concat(near, ", ")
    ),
  })
end

--- A constant of a generation, with its unit and the place it was taken from.
---@param generation string
---@param name string such as "bf16_flops"
---@return number? value, string? unit, string? source
function M.constant(generation, name)
  local row = (data.constants[generation] or {})[name]
  if row then
    return row[1], row[2], row[3]
  end
end

return M
