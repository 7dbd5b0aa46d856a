--- One vocabulary for requests of TPUs, whichever version of the API has what is asked for.
---
--- A request is a table in words that people use (`slices`, `accelerator`, `capacity`, ...). `queued_resource` and
--- `node` make the API's message of it, and choose the version: v2, unless only v2alpha1 has one of the fields or
--- values. Which fields a version has is read from the API's own schema (ciranda.data), never listed here.

local checks = require("ciranda.gcp.request_checks")
local errors = require("ciranda.io.error")
local node_message = require("ciranda.gcp.node_message")

local M = {}

local refuse, typed = checks.refuse, checks.typed

---@class ciranda.gcp.Request
---@field id string?               of the queued resource
---@field slices integer?          1 by default, at most 256
---@field accelerator string       a type ("v5litepod-16"), or a generation ("v5e") with `topology`
---@field topology string?         "4x4"
---@field unchecked boolean?       send an accelerator that the table does not know
---@field runtime string?          the generation's usual one by default
---@field node_id string?          of the only slice; the request's id by default
---@field node_prefix string?      of several slices: PREFIX-0, PREFIX-1, ...; the request's id by default
---@field capacity string?         "on-demand" (default), "spot", "reserved", "best-effort", "guaranteed", "flex-start"
---@field reservation string|table|nil  a name, a full resource name, or { project|folder|organization =, name = }
---@field min_duration number|string?  of "guaranteed"
---@field max_run_duration number|string?  of "flex-start"
---@field termination_time string?  of "flex-start", instead: RFC 3339
---@field valid_until number|string?  seconds or "6h" from now, or a time in RFC 3339: when the request lapses
---@field valid_after number|string?  before when nothing is provisioned
---@field network string?
---@field subnetwork string?
---@field external_ips boolean?    true by default, as gcloud has it
---@field ip_forward boolean?
---@field queue_count integer?
---@field networks table[]?        several: { network, subnetwork, external_ips, ip_forward, queue_count } each
---@field tags string[]?
---@field labels table<string, string>?
---@field metadata table<string, string>?
---@field metadata_from_file table<string, string>?  paths
---@field startup_script string?
---@field startup_script_file string?  path
---@field ssh_keys string[]?       "user:ssh-ed25519 AAAA... comment"
---@field service_account string?  email
---@field scopes string[]?         cloud-platform by default when there is a service account
---@field data_disks table[]?      { source =, mode = "read-write"|"read-only", workers = integer[]? } each
---@field boot_disk table?         kms_key, size_gb, confidential, iops, throughput, image, storage_pool
---@field range string?           addresses that the API is to choose from: "10.0.0.0/29"
---@field secure_boot boolean?
---@field confidential boolean?    AMD SEV
---@field autocheckpoint boolean?
---@field description string?
---@field workload string?         "throughput-optimized" or "availability-optimized"
---@field protection string?      "standard" or "capacity-optimized": the protection tier, which only v2 has
---@field traffic table?           the API's own TrafficConfig message: the traffic that is expected between slices
---@field version "v2"|"v2alpha1"|nil  insist on one

local KNOWN = {}
for name in
  ([[id slices accelerator topology unchecked runtime node_id node_prefix capacity reservation min_duration
  max_run_duration termination_time valid_until valid_after network subnetwork external_ips ip_forward queue_count
  networks tags labels metadata metadata_from_file startup_script startup_script_file ssh_keys service_account scopes
  data_disks boot_disk range secure_boot confidential autocheckpoint description workload protection
  traffic version]]):gmatch("%S+")
do
  KNOWN[name] = true
end

-- Capacity and time -------------------------------------------------------------------------------------------------

local CAPACITIES = {
  ["on-demand"] = true,
  spot = true,
  reserved = true,
  ["best-effort"] = true,
  guaranteed = true,
  ["flex-start"] = true,
}

--- The kind of capacity, and a reservation's full name or nil.
local function capacity_of(options, project, zone)
  local reservation = options.reservation
  local capacity = typed(options, "capacity", "string") or (reservation and "reserved" or "on-demand")
  if not CAPACITIES[capacity] then
    refuse(
      "capacity",
      "'%s' is none of on-demand, spot, reserved, best-effort, guaranteed, flex-start",
      capacity
    )
  end
  for option, of in pairs {
    min_duration = "guaranteed",
    max_run_duration = "flex-start",
    termination_time = "flex-start",
  } do
    if options[option] ~= nil and capacity ~= of then
      refuse(option, 'is for capacity "%s", not "%s"', of, capacity)
    end
  end
  if reservation == nil then
    return capacity, nil
  end
  if capacity ~= "reserved" and capacity ~= "guaranteed" then
    refuse("reservation", 'is for capacity "reserved", not "%s"', capacity)
  end
  local kind, owner, name = "projects", project, reservation
  if type(reservation) == "table" then
    checks.keys(
      reservation,
      "reservation",
      { project = true, folder = true, organization = true, name = true }
    )
    name = reservation.name or "-"
    for field, plural in pairs { project = "projects", folder = "folders", organization = "organizations" } do
      if reservation[field] then
        kind, owner = plural, reservation[field]
      end
    end
  elseif type(reservation) ~= "string" then
    refuse("reservation", "must be a name or a table, got %s", type(reservation))
  elseif reservation:find("/", 1, true) then
    local head, where = reservation:match("^(%l+)/[^/]+/locations/([^/]+)/reservations/[^/]+$")
    if not (head == "projects" or head == "folders" or head == "organizations") then
      refuse(
        "reservation",
        "'%s' is not {projects|folders|organizations}/X/locations/ZONE/reservations/NAME",
        reservation
      )
    elseif where ~= zone then
      refuse("reservation", "it is in zone %s, the request in %s", where, zone)
    end
    return capacity, reservation
  end
  return capacity, ("%s/%s/locations/%s/reservations/%s"):format(kind, owner, zone, name)
end

--- A moment: RFC 3339 as it is, a length of time from now.
local function moment(value, option, now)
  if type(value) == "string" and value:match("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%d[.%d]*Z$") then
    return value, nil
  end
  local seconds = checks.seconds(value, option)
  return os.date("!%Y-%m-%dT%H:%M:%SZ", math.floor(now + seconds)), seconds
end

--- The QueueingPolicy message. Both ends together are an interval of absolute times, as gcloud sends it.
local function queueing_policy(options, now)
  local policy
  local start, after = nil, nil
  local stop, until_seconds = nil, nil
  if options.valid_after ~= nil then
    start, after = moment(options.valid_after, "valid_after", now)
  end
  if options.valid_until ~= nil then
    stop, until_seconds = moment(options.valid_until, "valid_until", now)
  end
  if start and stop then
    if stop <= start then
      refuse("valid_until", "%s is not after 'valid_after', %s", stop, start)
    end
    policy = { validInterval = { startTime = start, endTime = stop } }
  elseif start then
    policy = after and { validAfterDuration = checks.duration(after) } or { validAfterTime = start }
  elseif stop then
    policy = until_seconds and { validUntilDuration = checks.duration(until_seconds) }
      or { validUntilTime = stop }
  end
  return policy
end

-- The version -------------------------------------------------------------------------------------------------------

--- Collect in `missing` what a message has and the version's schema has not.
local function collect_missing(schema, message, value, path, missing)
  for key, item in pairs(value) do
    local spec = schema.messages[message][key]
    local where = path == "" and key or path .. "." .. key
    if spec == nil then
      missing[#missing + 1] = where
    elseif type(spec) == "table" then
      local found = false
      for _, name in ipairs(spec) do
        found = found or name == item
      end
      if not found then
        missing[#missing + 1] = where .. " = " .. tostring(item)
      end
    else
      local base, suffix = spec:match("^(%w+)(.*)$")
      if schema.messages[base] then
        for _, each in ipairs(suffix == "[]" and item or { item }) do
          collect_missing(schema, base, each, where, missing)
        end
      end
    end
  end
end

--- What of a message a version of the API does not have.
---@param version string
---@param message string the message's name
---@param value table
---@return string[] paths
function M.missing(version, message, value)
  local missing = {}
  collect_missing(require("ciranda.data.tpu_schema_" .. version), message, value, "", missing)
  table.sort(missing)
  return missing
end

--- The version to use for a message.
---@param extra string? what v2 lacks besides
---@return string version
---@return string[] because
local function choose(options, message, value, extra)
  local wanted = typed(options, "version", "string")
  if wanted and wanted ~= "v2" and wanted ~= "v2alpha1" then
    refuse("version", "'%s' is neither v2 nor v2alpha1", wanted)
  end
  local missing = M.missing("v2", message, value)
  missing[#missing + 1] = extra
  if #missing == 0 and wanted ~= "v2alpha1" then
    return "v2", {}
  end
  if wanted == "v2" then
    refuse("version", "v2 does not have %s; leave 'version' out or say v2alpha1", table.concat(missing, ", "))
  end
  local unknown = M.missing("v2alpha1", message, value)
  if #unknown > 0 and #missing == 0 then
    refuse("version", "v2alpha1 does not have %s; leave 'version' out or say v2", table.concat(unknown, ", "))
  elseif #unknown > 0 then
    refuse(
      "version",
      "no version of the API has it all: v2 does not have %s, v2alpha1 does not have %s",
      table.concat(missing, ", "),
      table.concat(unknown, ", ")
    )
  end
  return "v2alpha1", missing
end

-- Requests ----------------------------------------------------------------------------------------------------------

---@class ciranda.gcp.Built
---@field version "v2"|"v2alpha1"
---@field because string[]         the fields for which v2alpha1 was chosen
---@field body table               the message
---@field id string
---@field nodes string[]           the names that the nodes will have
---@field slices integer
---@field chips integer?           in all; nil for an unchecked accelerator
---@field capacity string

---@param context { project: string, zone: string, now: number? }
local function check_context(options, context)
  errors.check_options(options, KNOWN, "tpu request", 3)
  for _, name in ipairs { "project", "zone" } do
    if type(context[name]) ~= "string" or context[name] == "" then
      refuse(name, "is needed")
    end
  end
end

--- Make the QueuedResource message of a request.
---@async
---@param options ciranda.gcp.Request
---@param context { project: string, zone: string, now: number? }
---@return ciranda.gcp.Built
--- Raises `usage`, naming the option; what reading a file raises.
function M.queued_resource(options, context)
  check_context(options, context)
  local id = checks.id(options, "id")
  local node, accelerator = node_message.of(options)
  local slices = checks.slices(options, accelerator.generation)
  local capacity, reservation = capacity_of(options, context.project, context.zone)
  local now = context.now or os.time()
  local workload = typed(options, "workload", "string")
  if workload and workload ~= "throughput-optimized" and workload ~= "availability-optimized" then
    refuse("workload", "'%s' is neither throughput-optimized nor availability-optimized", workload)
  end

  local spec = { parent = ("projects/%s/locations/%s"):format(context.project, context.zone), node = node }
  local nodes, multi
  if slices == 1 then
    if options.node_prefix ~= nil then
      refuse("node_prefix", "is for several slices; use 'node_id'")
    elseif workload then
      refuse("workload", "is for several slices")
    end
    spec.nodeId = options.node_id and checks.id(options, "node_id") or id
    nodes = { spec.nodeId }
  else
    if options.node_id ~= nil then
      refuse("node_id", "is for one slice; use 'node_prefix'")
    end
    local prefix = options.node_prefix and checks.id(options, "node_prefix") or id
    multi = {
      nodeCount = slices,
      nodeIdPrefix = prefix,
      workloadType = workload and workload:upper():gsub("-", "_") or nil,
    }
    nodes = checks.node_names(prefix, slices)
  end

  local body = {
    tpu = { nodeSpec = { spec } },
    queueingPolicy = queueing_policy(options, now),
    trafficConfig = typed(options, "traffic", "table"),
  }
  if capacity == "spot" then
    body.spot = {}
  elseif capacity == "best-effort" then
    body.bestEffort = {}
  elseif capacity == "guaranteed" then
    local least = options.min_duration
    body.guaranteed =
      { minDuration = least and checks.duration(checks.seconds(least, "min_duration")) or nil }
    body.reservationName = reservation
  elseif capacity == "flex-start" then
    local longest, stop = options.max_run_duration, typed(options, "termination_time", "string")
    if (longest == nil) == (stop == nil) then
      refuse("max_run_duration", "flex-start needs it, or 'termination_time', and not both")
    end
    body.provisioningModel = "FLEX_START"
    body.runDuration = {
      maxRunDuration = longest and checks.duration(checks.seconds(longest, "max_run_duration")) or nil,
      terminationTime = stop,
    }
  elseif capacity == "reserved" then
    body.reservationName = reservation
  end

  -- The parameters of several slices have a name of their own in each version, and one field more in v2alpha1.
  local version, because = choose(options, "QueuedResource", body, workload and "workloadType")
  if multi then
    spec[version == "v2" and "multisliceParams" or "multiNodeParams"] = multi
  end
  if capacity == "reserved" and not reservation then
    -- gcloud's --reserved: any reservation of the project, said in each version's own way.
    if version == "v2" then
      body.reservationName = ("%s/reservations/-"):format(spec.parent)
    else
      body.guaranteed = { reserved = true }
    end
  end
  return {
    version = version,
    because = because,
    body = body,
    id = id,
    nodes = nodes,
    slices = slices,
    chips = accelerator.entry and accelerator.entry.chips * slices or nil,
    capacity = capacity,
  }
end

--- Make the Node message of a request for one node without a queued resource.
---@async
---@param options ciranda.gcp.Request `id` is the node's; nothing of the queue may be asked for
---@param context { project: string, zone: string }
---@return ciranda.gcp.Built
--- Raises `usage`, naming the option; what reading a file raises.
function M.node(options, context)
  check_context(options, context)
  local id = checks.id(options, "id")
  for _, name in ipairs {
    "slices",
    "node_id",
    "node_prefix",
    "valid_until",
    "valid_after",
    "workload",
    "min_duration",
    "max_run_duration",
    "termination_time",
    "traffic",
  } do
    if options[name] ~= nil then
      refuse(name, "is for queued resources")
    end
  end
  local node, accelerator = node_message.of(options)
  local capacity, reservation = capacity_of(options, context.project, context.zone)
  if capacity == "spot" then
    node.schedulingConfig = { spot = true }
  elseif capacity == "reserved" then
    node.schedulingConfig = reservation
        and { reserved = true, provisioningModel = "RESERVATION_BOUND", reservationName = reservation }
      or { reserved = true }
  elseif capacity ~= "on-demand" then
    refuse("capacity", '"%s" is for queued resources', capacity)
  end
  local version, because = choose(options, "Node", node)
  return {
    version = version,
    because = because,
    body = node,
    id = id,
    nodes = { id },
    slices = 1,
    chips = accelerator.entry and accelerator.entry.chips or nil,
    capacity = capacity,
  }
end

return M
