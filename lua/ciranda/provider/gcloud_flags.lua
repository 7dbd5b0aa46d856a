--- The flags of `gcloud alpha compute tpus queued-resources create` as a request for `ciranda.gcp.tpu`.
--
-- One table says each flag's name, kind and meaning: recipes declare their flags from it, and a shell string of flags
-- (multihost_job's CQR_EXTRA_ARGS) is read with it. What gcloud would not know is refused before anything exists.
local err = require("ciranda.io.error")

local M = {}

--- gcloud's short names of scopes (the part after https://www.googleapis.com/auth/).
local SCOPES = {
  bigquery = "bigquery",
  ["cloud-platform"] = "cloud-platform",
  ["cloud-source-repos"] = "source.full_control",
  ["compute-ro"] = "compute.readonly",
  ["compute-rw"] = "compute",
  datastore = "datastore",
  ["logging-write"] = "logging.write",
  monitoring = "monitoring",
  ["monitoring-read"] = "monitoring.read",
  ["monitoring-write"] = "monitoring.write",
  pubsub = "pubsub",
  ["service-control"] = "servicecontrol",
  ["service-management"] = "service.management.readonly",
  ["sql-admin"] = "sqlservice.admin",
  ["storage-full"] = "devstorage.full_control",
  ["storage-ro"] = "devstorage.read_only",
  ["storage-rw"] = "devstorage.read_write",
  taskqueue = "taskqueue",
  trace = "trace.append",
  ["userinfo-email"] = "userinfo.email",
}

---@param flag string
---@param format string
local function fail(flag, format, ...)
  err.raise({
    code = "usage",
    op = "gcloud flags",
    target = "--" .. flag,
    message = ("--%s: "):format(flag) .. format:format(...),
  })
end

--- A list as gcloud reads it: commas, or another separator given as `^:^a:b`.
---@param text string
---@return string[]
local function list(text)
  local separator, rest = text:match("^%^(.-)%^(.*)$")
  if not separator or separator == "" then
    separator, rest = ",", text
  end
  local items = {}
  local position = 1
  while true do
    local found, last = rest:find(separator, position, true)
    items[#items + 1] = rest:sub(position, (found or #rest + 1) - 1)
    if not found then
      break
    end
    position = last + 1
  end
  return items
end

--- `KEY=VALUE,...` as a table.
---@param flag string
---@param text string
---@return table<string, string>
local function map(flag, text)
  local values = {}
  for _, item in ipairs(list(text)) do
    local key, value = item:match("^%s*([^=]+)=(.*)$")
    if not key then
      fail(flag, "%q is not KEY=VALUE", item)
    end
    values[key] = value
  end
  return values
end

---@param flag string
---@param text string
---@return integer
local function integer(flag, text)
  local value = text:match("^%d+$") and math.tointeger(tonumber(text))
  if not value then
    fail(flag, "%q is not a whole number", text)
  end
  return value
end

---@param flag string
---@param text string
---@return boolean
local function boolean(flag, text)
  local lower = text:lower()
  if lower == "true" or lower == "false" then
    return lower == "true"
  end
  return fail(flag, "%q is neither true nor false", text)
end

--- Renames the keys of a `KEY=VALUE` table by `names`; each entry is { our name, converter? }.
---@param flag string
---@param text string
---@param names table<string, { [1]: string, [2]: function? }>
---@return table
local function structure(flag, text, names)
  local values = {}
  for key, value in pairs(map(flag, text)) do
    local known = names[key]
    if not known then
      local keys = {}
      for name in pairs(names) do
        keys[#keys + 1] = name
      end
      table.sort(keys)
      fail(flag, "there is no %q in it (there are %s)", key, table.concat(keys, ", "))
    end
    if known[2] then
      values[known[1]] = known[2](flag, value)
    else
      values[known[1]] = value
    end
  end
  return values
end

--- A flag that sets one field of the request to its text.
local function text_field(field)
  return function(request, _, text)
    request[field] = text
  end
end

--- A flag that says the kind of capacity. Two that differ are refused: the API takes one tier.
local function capacity(value)
  return function(request, flag)
    if request.capacity and request.capacity ~= value then
      fail(flag, "the capacity is %s already", request.capacity)
    end
    request.capacity = value
  end
end

--- A reservation of another project, folder or organization.
local function reservation_host(kind)
  return function(request, _, text)
    if type(request.reservation) ~= "table" then
      request.reservation = { name = request.reservation }
    end
    request.reservation[kind] = text
  end
end

local MODELS = {
  standard = "on-demand",
  spot = "spot",
  ["reservation-bound"] = "reserved",
  ["flex-start"] = "flex-start",
}

---@class ciranda.provider.GcloudFlag
---@field name string without the dashes
---@field switch boolean? it takes no value
---@field repeated boolean? it may be given more than once
---@field help string
---@field put fun(request: table, flag: string, text: string?)

---@type ciranda.provider.GcloudFlag[]
M.flags = {
  { name = "node-id", help = "Name of the only node.", put = text_field("node_id") },
  {
    name = "node-count",
    help = "How many slices (nodes).",
    put = function(request, flag, text)
      request.slices = integer(flag, text)
    end,
  },
  {
    name = "node-prefix",
    help = "The nodes are PREFIX-0, PREFIX-1, ... (the request's id).",
    put = text_field("node_prefix"),
  },
  {
    name = "workload-type",
    help = "throughput-optimized or availability-optimized.",
    put = text_field("workload"),
  },
  { name = "accelerator-type", help = "Such as v5litepod-16.", put = text_field("accelerator") },
  { name = "type", help = "A generation such as v5p, with --topology.", put = text_field("accelerator") },
  { name = "topology", help = "Such as 2x2x2.", put = text_field("topology") },
  {
    name = "runtime-version",
    help = "The machines' image (the generation's usual one).",
    put = text_field("runtime"),
  },
  { name = "spot", switch = true, help = "Spot capacity.", put = capacity("spot") },
  { name = "best-effort", switch = true, help = "Best-effort capacity.", put = capacity("best-effort") },
  { name = "guaranteed", switch = true, help = "Guaranteed capacity.", put = capacity("guaranteed") },
  { name = "reserved", switch = true, help = "Capacity of a reservation.", put = capacity("reserved") },
  {
    name = "provisioning-model",
    help = "standard, spot, reservation-bound or flex-start.",
    put = function(request, flag, text)
      local value = MODELS[text:lower()]
      if not value then
        fail(flag, "%q is none of standard, spot, reservation-bound, flex-start", text)
      end
      capacity(value)(request, flag)
    end,
  },
  { name = "min-duration", help = "Of guaranteed capacity.", put = text_field("min_duration") },
  {
    name = "max-run-duration",
    help = "Of flex-start: how long it may run, such as 7d.",
    put = text_field("max_run_duration"),
  },
  { name = "termination-time", help = "Of flex-start: when it ends.", put = text_field("termination_time") },
  {
    name = "reservation",
    help = "Name of a reservation.",
    put = function(request, _, text)
      if type(request.reservation) == "table" then
        request.reservation.name = text
      else
        request.reservation = text
      end
    end,
  },
  {
    name = "reservation-host-project",
    help = "Project of the reservation.",
    put = reservation_host("project"),
  },
  { name = "reservation-host-folder", help = "Folder of the reservation.", put = reservation_host("folder") },
  {
    name = "reservation-host-organization",
    help = "Organization of the reservation.",
    put = reservation_host("organization"),
  },
  {
    name = "valid-after-duration",
    help = "Not before this time from now, such as 6h.",
    put = text_field("valid_after"),
  },
  { name = "valid-after-time", help = "Not before (RFC 3339).", put = text_field("valid_after") },
  {
    name = "valid-until-duration",
    help = "Lapse after this time, such as 6h.",
    put = text_field("valid_until"),
  },
  { name = "valid-until-time", help = "Lapse then (RFC 3339).", put = text_field("valid_until") },
  { name = "network", help = "VPC network.", put = text_field("network") },
  { name = "subnetwork", help = "Subnetwork.", put = text_field("subnetwork") },
  {
    name = "internal-ips",
    switch = true,
    help = "No external addresses.",
    put = function(request)
      request.external_ips = false
    end,
  },
  {
    name = "network-config",
    repeated = true,
    help = "One of several networks: network=,subnetwork=,enable-external-ips=,can-ip-forward=,queue-count=.",
    put = function(request, flag, text)
      request.networks = request.networks or {}
      table.insert(
        request.networks,
        structure(flag, text, {
          network = { "network" },
          subnetwork = { "subnetwork" },
          ["enable-external-ips"] = { "external_ips", boolean },
          ["can-ip-forward"] = { "ip_forward", boolean },
          ["queue-count"] = { "queue_count", integer },
        })
      )
    end,
  },
  {
    name = "service-account",
    help = "Email of the machines' service account.",
    put = text_field("service_account"),
  },
  {
    name = "scopes",
    help = "The service account's scopes.",
    put = function(request, flag, text)
      request.scopes = {}
      for place, scope in ipairs(list(text)) do
        if not scope:match("^https://") then
          local known = SCOPES[scope]
          if not known then
            fail(flag, "%q is no scope; give its URL", scope)
          end
          scope = "https://www.googleapis.com/auth/" .. known
        end
        request.scopes[place] = scope
      end
    end,
  },
  {
    name = "metadata",
    help = "KEY=VALUE,...",
    put = function(request, flag, text)
      request.metadata = map(flag, text)
    end,
  },
  {
    name = "metadata-from-file",
    help = "KEY=FILE,...",
    put = function(request, flag, text)
      request.metadata_from_file = map(flag, text)
    end,
  },
  {
    name = "tags",
    help = "Network tags.",
    put = function(request, _, text)
      request.tags = list(text)
    end,
  },
  {
    name = "labels",
    help = "KEY=VALUE,...",
    put = function(request, flag, text)
      request.labels = map(flag, text)
    end,
  },
  {
    name = "data-disk",
    repeated = true,
    help = "source=DISK,mode=read-only|read-write.",
    put = function(request, flag, text)
      request.data_disks = request.data_disks or {}
      table.insert(request.data_disks, structure(flag, text, { source = { "source" }, mode = { "mode" } }))
    end,
  },
  {
    name = "boot-disk",
    help = "kms-key=KEY; size-gb, iops, throughput, image, storage-pool, confidential as in API v2alpha1.",
    put = function(request, flag, text)
      request.boot_disk = structure(flag, text, {
        ["kms-key"] = { "kms_key" },
        ["size-gb"] = { "size_gb", integer },
        iops = { "iops", integer },
        throughput = { "throughput", integer },
        image = { "image" },
        ["storage-pool"] = { "storage_pool" },
        confidential = { "confidential", boolean },
      })
    end,
  },
  {
    name = "shielded-secure-boot",
    switch = true,
    help = "Secure boot.",
    put = function(request)
      request.secure_boot = true
    end,
  },
  {
    name = "autocheckpoint-enabled",
    switch = true,
    help = "Signal the job before maintenance, and wait.",
    put = function(request)
      request.autocheckpoint = true
    end,
  },
  { name = "description", help = "Text.", put = text_field("description") },
  { name = "range", help = "Addresses for the node, such as 10.0.0.0/29.", put = text_field("range") },
}

--- Flags of every gcloud command that change how gcloud itself behaves, and whether they take a value.
local GLOBAL = {
  project = true,
  zone = true,
  async = false,
  quiet = false,
  format = true,
  verbosity = true,
  ["user-output-enabled"] = true,
  ["log-http"] = false,
  flatten = true,
}

--- Those that say who asks: what they would change is said by a variable here, and must not be left out in silence.
local BY_VARIABLE = {
  account = "CLOUDSDK_CORE_ACCOUNT",
  configuration = "CLOUDSDK_ACTIVE_CONFIG_NAME",
  ["billing-project"] = "GOOGLE_CLOUD_QUOTA_PROJECT",
  ["access-token-file"] = "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
  ["impersonate-service-account"] = "CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT",
}

local BY_NAME = {}
for _, flag in ipairs(M.flags) do
  BY_NAME[flag.name] = flag
end

--- Cuts a string into words as a shell would: blanks, single and double quotes, backslash. Nothing is expanded.
---@param text string
---@return string[]
-- Raises "usage" for a quote that is not closed.
function M.shell_words(text)
  local words, word = {}, nil
  local position = 1
  while position <= #text do
    local char = text:sub(position, position)
    if char:match("%s") then
      if word then
        words[#words + 1] = word
        word = nil
      end
    elseif char == "'" then
      local close = text:find("'", position + 1, true)
      if not close then
        err.raise({ code = "usage", op = "gcloud flags", message = ("a ' is not closed in: %s"):format(text) })
      end
      word = (word or "") .. text:sub(position + 1, close - 1)
      position = close
    elseif char == '"' then
      local piece = {}
      position = position + 1
      while text:sub(position, position) ~= '"' do
        if position > #text then
          err.raise({
            code = "usage",
            op = "gcloud flags",
            message = ('a " is not closed in: %s'):format(text),
          })
        end
        local inner = text:sub(position, position)
        if inner == "\\" and text:sub(position + 1, position + 1):match('[$`"\\\n]') then
          position = position + 1
          inner = text:sub(position, position)
        end
        piece[#piece + 1] = inner
        position = position + 1
      end
      word = (word or "") .. table.concat(piece)
    elseif char == "\\" then
      position = position + 1
      local escaped = text:sub(position, position)
      if escaped ~= "\n" then
        word = (word or "") .. escaped
      end
    else
      word = (word or "") .. char
    end
    position = position + 1
  end
  if word then
    words[#words + 1] = word
  end
  return words
end

--- Reads flags into a request.
---@param words string[] such as { "--spot", "--network=main", "--tags", "a,b" }
---@param request table? the request they are added to
---@return table request, table<string, string> global gcloud's own flags among them, such as project and zone
-- Raises "usage" for a word that is no flag, an unknown flag, a missing or needless value, a flag given twice.
function M.parse(words, request)
  request = request or {}
  local global, seen = {}, {}
  local position = 1
  while position <= #words do
    local word = words[position]
    local name, value = word:match("^%-%-([%w-]+)=(.*)$")
    if not name then
      name = word:match("^%-%-([%w-]+)$") or (word == "-q" and "quiet")
    end
    if not name then
      err.raise({
        code = "usage",
        op = "gcloud flags",
        message = ("%q is no flag of gcloud alpha compute tpus queued-resources create"):format(word),
      })
    end
    local flag = BY_NAME[name]
    local negated = not flag and name:match("^no%-(.*)$")
    if negated and BY_NAME[negated] and BY_NAME[negated].switch then
      -- `--no-spot` and the like: what holds without the flag.
      if value then
        fail(name, "takes no value")
      end
    elseif not flag and BY_VARIABLE[name] then
      fail(name, "set %s instead", BY_VARIABLE[name])
    elseif not flag and GLOBAL[name] == nil then
      fail(name, "gcloud alpha compute tpus queued-resources create has no such flag")
    elseif flag and flag.switch or not flag and not GLOBAL[name] then
      if value then
        fail(name, "takes no value")
      end
      if flag then
        flag.put(request, name)
      end
    else
      if not value then
        position = position + 1
        value = words[position]
        if not value then
          fail(name, "needs a value")
        end
      end
      if flag then
        if seen[name] and not flag.repeated then
          fail(name, "is given twice")
        end
        flag.put(request, name, value)
      else
        global[name] = value
      end
    end
    seen[name] = true
    position = position + 1
  end
  return request, global
end

return M
