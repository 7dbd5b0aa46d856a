--- The Node message of a request: its accelerator, network, metadata, disks and the like.
local checks = require("ciranda.gcp.request_checks")
local fs = require("ciranda.io.fs")

local M = {}

local refuse, typed = checks.refuse, checks.typed

local CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"

local NETWORK =
  { network = true, subnetwork = true, external_ips = true, ip_forward = true, queue_count = true }

local function network_config(options)
  local external = typed(options, "external_ips", "boolean")
  return {
    network = typed(options, "network", "string"),
    subnetwork = typed(options, "subnetwork", "string"),
    enableExternalIps = external == nil or external,
    canIpForward = typed(options, "ip_forward", "boolean"),
    queueCount = typed(options, "queue_count", "integer"),
  }
end

local function put_network(node, options)
  local networks = typed(options, "networks", "table")
  if not networks then
    node.networkConfig = network_config(options)
    return
  end
  for name in pairs(NETWORK) do
    if options[name] ~= nil then
      refuse("networks", "excludes '%s': say it in each entry", name)
    end
  end
  if #networks == 0 then
    refuse("networks", "is empty")
  end
  node.networkConfigs = {}
  for index, entry in ipairs(networks) do
    if type(entry) ~= "table" then
      refuse("networks", "entry %d must be a table", index)
    end
    checks.keys(entry, "networks", NETWORK)
    node.networkConfigs[index] = network_config(entry)
  end
end

--- The metadata of all options that make some.
local function metadata_of(options)
  local metadata = {}
  local function put(key, value, option)
    if metadata[key] then
      refuse(option, "the metadata key '%s' is set by another option too", key)
    end
    metadata[key] = value
  end
  for key, value in pairs(checks.map(options, "metadata") or {}) do
    put(key, value, "metadata")
  end
  for key, path in pairs(checks.map(options, "metadata_from_file") or {}) do
    put(key, fs.read(path, checks.METADATA_TOTAL), "metadata_from_file")
  end
  local script, option = typed(options, "startup_script", "string"), "startup_script"
  local path = typed(options, "startup_script_file", "string")
  if path then
    if script then
      refuse("startup_script_file", "excludes 'startup_script'")
    end
    script, option = fs.read(path, checks.METADATA_TOTAL), "startup_script_file"
  end
  if script then
    put("startup-script", script, option)
  end
  if metadata["startup-script"] then
    checks.startup_script(metadata["startup-script"], option)
  end
  local keys = checks.strings(options, "ssh_keys")
  if keys and #keys > 0 then
    for index, key in ipairs(keys) do
      if not key:match("^[%w_.-]+:[%w@.-]+ [%w+/=]+[^\n]*$") then
        refuse("ssh_keys", 'entry %d is not "user:ssh-ed25519 AAAA... comment"', index)
      end
    end
    local before = metadata["ssh-keys"]
    metadata["ssh-keys"] = (before and before:gsub("\n*$", "\n") or "") .. table.concat(keys, "\n")
  end
  checks.metadata(metadata)
  return next(metadata) and metadata or nil
end

local DISK = { source = true, mode = true, workers = true }
local DISK_MODES = { ["read-write"] = "READ_WRITE", ["read-only"] = "READ_ONLY" }

local function data_disks(options)
  local disks = typed(options, "data_disks", "table")
  if not disks then
    return nil
  end
  local list = {}
  for index, disk in ipairs(disks) do
    checks.keys(disk, "data_disks", DISK)
    local mode = disk.mode and DISK_MODES[disk.mode]
    if type(disk.source) ~= "string" then
      refuse("data_disks", "entry %d has no 'source', the disk's full name", index)
    elseif disk.mode and not mode then
      refuse(
        "data_disks",
        "entry %d: mode '%s' is neither read-write nor read-only",
        index,
        tostring(disk.mode)
      )
    end
    local workers
    for place, worker in ipairs(disk.workers or {}) do
      workers = workers or {}
      workers[place] = ("%d"):format(worker)
    end
    list[index] = { sourceDisk = disk.source, mode = mode, workerIds = workers }
  end
  return list
end

local BOOT = {
  kms_key = true,
  size_gb = true,
  confidential = true,
  iops = true,
  throughput = true,
  image = true,
  storage_pool = true,
}

--- An int64, which JSON carries as a string.
local function int64(options, name)
  local value = typed(options, name, "integer")
  return value and ("%d"):format(value) or nil
end

local function boot_disk(options)
  local disk = typed(options, "boot_disk", "table")
  if not disk then
    return nil
  end
  checks.keys(disk, "boot_disk", BOOT)
  return {
    customerEncryptionKey = disk.kms_key and { kmsKeyName = typed(disk, "kms_key", "string") } or nil,
    diskSizeGb = int64(disk, "size_gb"),
    enableConfidentialCompute = typed(disk, "confidential", "boolean"),
    provisionedIops = int64(disk, "iops"),
    provisionedThroughput = int64(disk, "throughput"),
    sourceImage = typed(disk, "image", "string"),
    storagePool = typed(disk, "storage_pool", "string"),
  }
end

--- A range of IPv4 addresses. The API takes no smaller one than /29.
local function address_range(options)
  local range = typed(options, "range", "string")
  local a, b, c, d, bits = (range or ""):match("^(%d+)%.(%d+)%.(%d+)%.(%d+)/(%d+)$")
  local address = 0
  for _, part in ipairs({ a, b, c, d }) do
    address = #part <= 3 and tonumber(part) <= 255 and address << 8 | math.tointeger(part) or nil
    if not address then
      break
    end
  end
  if range and not (a and address and #bits <= 2 and tonumber(bits) <= 29) then
    refuse("range", "'%s' is no range of IPv4 addresses such as 10.0.0.0/29 (/29 is the smallest)", range)
  elseif range and address & ((1 << 32 - math.tointeger(bits)) - 1) ~= 0 then
    refuse("range", "'%s' does not begin where a range of that size can begin", range)
  end
  return range
end

local PROTECTION = { standard = "STANDARD", ["capacity-optimized"] = "CAPACITY_OPTIMIZED" }

local function protection_tier(options)
  local tier = typed(options, "protection", "string")
  if tier and not PROTECTION[tier] then
    refuse("protection", "'%s' is neither standard nor capacity-optimized", tier)
  end
  return PROTECTION[tier]
end

--- The Node message, without scheduling, and the accelerator.
---@param options ciranda.gcp.Request
---@return table Node message
---@return table accelerator as `request_checks.accelerator` has it
-- Raises "usage", naming the option, for what cannot be sent.
function M.of(options)
  local accelerator = checks.accelerator(options)
  local labels, tags = checks.map(options, "labels"), checks.strings(options, "tags")
  checks.labels(labels)
  checks.tags(tags)
  local description = typed(options, "description", "string")
  if description and (utf8.len(description) or math.huge) > 512 then
    refuse("description", "has more than 512 characters, or is not UTF-8")
  end
  local email, scopes = typed(options, "service_account", "string"), checks.strings(options, "scopes")
  local node = {
    acceleratorType = accelerator.type,
    acceleratorConfig = accelerator.config,
    runtimeVersion = checks.runtime(options, accelerator.generation),
    description = description,
    labels = labels and next(labels) and labels or nil,
    tags = tags and #tags > 0 and tags or nil,
    metadata = metadata_of(options),
    serviceAccount = (email or scopes) and { email = email, scope = scopes or { CLOUD_PLATFORM } } or nil,
    dataDisks = data_disks(options),
    bootDiskConfig = boot_disk(options),
    cidrBlock = address_range(options),
    shieldedInstanceConfig = typed(options, "secure_boot", "boolean") ~= nil and {
      enableSecureBoot = options.secure_boot,
    } or nil,
    confidentialInstanceConfig = typed(options, "confidential", "boolean") and {
      confidentialInstanceType = "SEV",
    } or nil,
    autocheckpointEnabled = typed(options, "autocheckpoint", "boolean") or nil,
    protectionTier = protection_tier(options),
  }
  put_network(node, options)
  return node, accelerator
end

return M
