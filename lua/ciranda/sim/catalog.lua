--- What the simulated project can ask for: zones, accelerator types, runtime versions.

local accelerators = require("ciranda.data.accelerators")
local errors = require("ciranda.sim.errors")

local M = {}

---@class ciranda.sim.Accelerator
---@field generation string "v5e"
---@field prefix string what the type's name begins with, "v5litepod"
---@field config_type string AcceleratorConfig.type, "V5LITE_POD"
---@field type string "v5litepod-16"
---@field size integer the number in the type's name, the unit of quotas
---@field topology string "4x4"
---@field chips integer
---@field workers integer VMs
---@field chips_per_worker integer
---@field chips_per_host_bounds string "2x2x1"
---@field host_bounds string "2x2x1"
---@field wrap string? "FTF"
---@field multislice boolean
---@field device string where the guest finds chip N, with %d

-- Zones that have had Cloud TPUs (names seen in a public client's tables, 2026).
local ZONES = {
  "asia-northeast1-b",
  "europe-west4-a",
  "europe-west4-b",
  "us-central1-a",
  "us-central1-b",
  "us-central1-c",
  "us-central1-f",
  "us-central2-b",
  "us-east1-b",
  "us-east1-d",
  "us-east5-a",
  "us-east5-b",
  "us-east5-c",
  "us-south1-a",
  "us-west1-a",
  "us-west1-c",
  "us-west4-a",
}

local RUNTIMES = {
  "tpu-ubuntu2204-base",
  "tpu-vm-base",
  "tpu-vm-tf-2.17.0-pjrt",
  "tpu-vm-tf-2.17.0-pod-pjrt",
  "v2-alpha-tpuv5",
  "v2-alpha-tpuv5-lite",
  "v2-alpha-tpuv6e",
}

-- Generations that this API does not offer: Google sells them through GKE alone. The public discovery documents
-- have no names for them, so that a client made from those could not read a list with them in it.
local GKE_ONLY = { tpu7x = true }

-- /dev/accelN up to v4, one number of a VFIO group from v5e on (read by tpu-info).
local VFIO = { v5e = true, v5p = true, v6e = true, tpu7x = true }

local function generations_by_name()
  local result = {}
  for _, generation in ipairs(accelerators.generations) do
    result[generation.name] = generation
  end
  return result
end

local function build()
  local generations = generations_by_name()
  local by_type, names = {}, {}
  for _, row in ipairs(accelerators.types) do
    local generation = generations[row[1]]
    by_type[row[2]] = {
      generation = row[1],
      prefix = generation.api_prefix,
      config_type = generation.api_type,
      type = row[2],
      size = tonumber(row[2]:match "%-(%d+)$"),
      topology = row[3],
      chips = row[4],
      workers = row[6],
      chips_per_worker = row[7],
      chips_per_host_bounds = row[8],
      host_bounds = row[9],
      wrap = row[10],
      multislice = generation.multislice,
      device = VFIO[row[1]] and "/dev/vfio/%d" or "/dev/accel%d",
    }
    names[#names + 1] = row[2]
  end
  table.sort(names)
  return by_type, names
end

---@class ciranda.sim.Catalog
---@field zones string[] sorted
---@field runtimes string[] sorted
---@field private offered table<string, string[]> what a zone has
---@field private everywhere string[] what the other zones have
local Catalog = {}
Catalog.__index = Catalog

local function sorted(list)
  local copy = table.move(list, 1, #list, 1, {})
  table.sort(copy)
  return copy
end

--- The catalogue of a simulated project.
---@param options table? zones: string[]?, runtimes: string[]?, types: table<string, string[]>?, what a zone has;
---  a zone without an entry has what Google offers by this API, and extra_types: string[]?
---@return ciranda.sim.Catalog
function M.new(options)
  options = options or {}
  local self = setmetatable({}, Catalog)
  self.by_type, self.names = build()
  self.zones = sorted(options.zones or ZONES)
  self.runtimes = sorted(options.runtimes or RUNTIMES)
  self.everywhere = {}
  local extra = {}
  for _, name in ipairs(options.extra_types or {}) do
    extra[name] = true
  end
  for _, name in ipairs(self.names) do
    if not GKE_ONLY[self.by_type[name].generation] or extra[name] then
      self.everywhere[#self.everywhere + 1] = name
    end
  end
  self.offered = {}
  for zone, types in pairs(options.types or {}) do
    self.offered[zone] = sorted(types)
  end
  return self
end

---@param zone string
---@return boolean
function Catalog:has_zone(zone)
  for _, name in ipairs(self.zones) do
    if name == zone then
      return true
    end
  end
  return false
end

--- What is known of an accelerator type, whether or not a zone has it.
---@param name string
---@return ciranda.sim.Accelerator?
function Catalog:accelerator(name)
  return self.by_type[name]
end

--- The types that a zone has and that a version of the API can name, sorted.
---@param zone string
---@param schema ciranda.sim.Schema
---@return string[]
function Catalog:types(zone, schema)
  local result = {}
  for _, name in ipairs(self.offered[zone] or self.everywhere) do
    local accelerator = self.by_type[name]
    if accelerator and schema:has_value("AcceleratorConfig", "type", accelerator.config_type) then
      result[#result + 1] = name
    end
  end
  return result
end

--- The accelerator that a node asks for, by type or by generation and topology.
---@param node table Node message
---@param zone string
---@param schema ciranda.sim.Schema
---@return ciranda.sim.Accelerator
--- Raises ciranda.sim.Status INVALID_ARGUMENT when there is none such in the zone.
function Catalog:resolve(node, zone, schema)
  local config = node.acceleratorConfig
  if node.acceleratorType and config then
    errors.raise(errors.invalid("only one of accelerator_type and accelerator_config can be set", "node"))
  end
  local valid = self:types(zone, schema)
  if config then
    for _, name in ipairs(valid) do
      local accelerator = self.by_type[name]
      if accelerator.config_type == config.type and accelerator.topology == config.topology then
        return accelerator
      end
    end
    errors.raise(
      errors.invalid(
        ('CloudTpu received an invalid AcceleratorConfig, type "%s" topology "%s" for zone "%s".'):format(
          config.type or "TYPE_UNSPECIFIED",
          config.topology or "",
          zone
        ),
        "node.accelerator_config"
      )
    )
  end
  local wanted = node.acceleratorType or ""
  for _, name in ipairs(valid) do
    if name == wanted then
      return self.by_type[name]
    end
  end
  return errors.raise(errors.invalid_accelerator(wanted, zone, valid))
end

--- Refuse a runtime version that does not exist.
---@param name string?
---@param zone string
--- Raises ciranda.sim.Status INVALID_ARGUMENT.
function Catalog:check_runtime(name, zone)
  for _, known in ipairs(self.runtimes) do
    if known == name then
      return
    end
  end
  errors.raise(
    errors.invalid(
      ('CloudTpu received an invalid RuntimeVersion, "%s" for zone "%s".'):format(name or "", zone),
      "node.runtime_version"
    )
  )
end

--- The id of the quota that an accelerator draws on.
---
--- v4, v5e and v6e as the service writes them; the names of v2, v3, v5p and tpu7x follow the same pattern.
---@param accelerator ciranda.sim.Accelerator
---@param preemptible boolean spot and preemptible nodes have a quota of their own
---@return string
function M.quota_id(accelerator, preemptible)
  local part = preemptible and "Preemptible" or ""
  local generation = accelerator.generation
  local family
  if generation == "v4" then
    family = "TPUV4s" .. part .. "Pod"
  elseif generation == "v5e" then
    family = "TPUV5s" .. part .. "Litepod" .. (accelerator.size <= 8 and "Serving" or "")
  elseif generation == "v5p" then
    family = "TPUV5P" .. part
  elseif generation == "v6e" then
    family = "TPUV6E" .. part
  elseif generation == "tpu7x" then
    family = "TPU7X" .. part
  else
    family = "TPU" .. generation:upper() .. "s" .. part
  end
  return family .. "PerProjectPerZoneForTPUAPI"
end

--- The region of a zone.
---@param zone string
---@return string
function M.region(zone)
  return (zone:gsub("%-%a$", ""))
end

return M
