-- The API's schema from end to end: every field of what may be asked for is made by the one vocabulary, or there is a
-- reason why not; every method and its parameters can be called by name.
local support = dofile("tests/spec/gcp/support.lua")
local vocabulary = require("ciranda.gcp.vocabulary")

local CONTEXT = { project = "p", zone = "us-west4-a", now = 1767225600 }

local SERVER = "the service sets it"
--- Fields, or whole messages, that no request has.
local REASONS = {
  ["Node.apiVersion"] = SERVER,
  ["Node.createTime"] = SERVER,
  ["Node.health"] = SERVER,
  ["Node.healthDescription"] = SERVER,
  ["Node.id"] = SERVER,
  ["Node.multisliceNode"] = SERVER,
  ["Node.name"] = SERVER,
  ["Node.networkEndpoints"] = SERVER,
  ["Node.queuedResource"] = SERVER,
  ["Node.state"] = SERVER,
  ["Node.symptoms"] = SERVER,
  ["Node.upcomingMaintenance"] = SERVER,
  ["QueuedResource.createTime"] = SERVER,
  ["QueuedResource.name"] = SERVER,
  ["QueuedResource.state"] = SERVER,
  ["SchedulingConfig.terminationTimestamp"] = SERVER,
  ["Node.cidrBlock"] = "the service chooses the addresses of TPU VMs",
  ["SchedulingConfig.preemptible"] = "spot has taken its place",
}
--- Values of enums that no request has.
local REASONS_OF_VALUES = {
  ["QueuedResource.provisioningModel.STANDARD"] = "what holds without it",
  ["QueuedResource.provisioningModel.SPOT"] = "said by the tier, which both versions have",
  ["QueuedResource.provisioningModel.RESERVATION_BOUND"] = "said by the reservation, which both versions have",
  ["SchedulingConfig.provisioningModel.STANDARD"] = "what holds without it",
  ["SchedulingConfig.provisioningModel.SPOT"] = "said by spot, which both versions have",
}

local function range()
  return { start = 0, ["end"] = 4, step = 1 }
end

local function chips()
  return {
    chipCoordinate = {
      coordinates = { { sliceCoordinate = 0, xCoordinate = 0, yCoordinate = 0, zCoordinate = 0 } },
    },
    chipCoordinateRangeGenerator = {
      sliceCoordinates = range(),
      xCoordinates = range(),
      yCoordinates = range(),
      zCoordinates = range(),
    },
  }
end

local TRAFFIC = { peakTraffic = { peakTrafficGbps = 1.5 } }
local TWO_WAYS, ONE_WAY = "TRAFFIC_DIRECTION_BIDIRECTIONAL", "TRAFFIC_DIRECTION_UNIDIRECTIONAL"

--- Requests that together ask for everything. `[1]` is the message.
local REQUESTS = {
  {
    "QueuedResource",
    accelerator = "v5litepod-16",
    slices = 2,
    capacity = "spot",
    valid_until = "6h",
    network = "n",
    subnetwork = "s",
    ip_forward = true,
    queue_count = 2,
    tags = { "t" },
    labels = { a = "b" },
    metadata = { k = "v" },
    service_account = "sa@example.com",
    data_disks = { { source = "d", mode = "read-only" }, { source = "e", mode = "read-write" } },
    boot_disk = { kms_key = "k" },
    secure_boot = true,
    description = "d",
  },
  { "QueuedResource", accelerator = "v5p", topology = "2x2x2", capacity = "guaranteed", min_duration = "1h" },
  { "QueuedResource", accelerator = "v4-8", capacity = "reserved", valid_after = 60 },
  { "QueuedResource", accelerator = "v4-8", reservation = "r", networks = { {}, {} } },
  { "QueuedResource", accelerator = "v4-8", valid_after = "2026-01-02T00:00:00Z" },
  { "QueuedResource", accelerator = "v4-8", valid_until = "2026-01-02T00:00:00Z" },
  { "QueuedResource", accelerator = "v4-8", valid_after = "1h", valid_until = "6h" },
  {
    "QueuedResource",
    accelerator = "v4-8",
    capacity = "best-effort",
    autocheckpoint = true,
    confidential = true,
  },
  { "QueuedResource", accelerator = "v4-8", slices = 2, workload = "throughput-optimized" },
  { "QueuedResource", accelerator = "v4-8", slices = 2, workload = "availability-optimized" },
  { "QueuedResource", accelerator = "v4-8", capacity = "flex-start", max_run_duration = "1d" },
  {
    "QueuedResource",
    accelerator = "v4-8",
    capacity = "flex-start",
    termination_time = "2026-02-01T00:00:00Z",
  },
  {
    "QueuedResource",
    accelerator = "v4-8",
    data_disks = { { source = "d", workers = { 0 } } },
    boot_disk = {
      size_gb = 1,
      confidential = true,
      iops = 1,
      throughput = 1,
      image = "i",
      storage_pool = "s",
    },
  },
  {
    "QueuedResource",
    accelerator = "v4-8",
    slices = 2,
    traffic = {
      anticipatedTrafficMatrix = {
        defaultUniformTrafficMatrix = {},
        sliceToSliceAdjacencyList = {
          srcTraffic = { { sliceCoord = 0, dstTraffic = { { sliceCoord = 1, traffic = TRAFFIC } } } },
        },
        customTrafficMatrix = {
          shapeGeneratedEntry = {
            {
              traffic = TRAFFIC,
              trafficShapeInstantiation = chips(),
              abstractTrafficShape = {
                allToAllTraffic = { group = chips() },
                nToMTraffic = { srcGroup = chips(), dstGroup = chips(), trafficDirection = TWO_WAYS },
                ringTraffic = { group = chips(), trafficDirection = ONE_WAY },
              },
            },
            {
              abstractTrafficShape = {
                nToMTraffic = { trafficDirection = ONE_WAY },
                ringTraffic = { trafficDirection = TWO_WAYS },
              },
            },
          },
        },
      },
    },
  },
  { "Node", accelerator = "v4-8", capacity = "spot" },
  { "Node", accelerator = "v4-8", protection = "standard" },
  { "Node", accelerator = "v4-8", capacity = "reserved", protection = "capacity-optimized" },
  { "Node", accelerator = "v4-8", reservation = "r" },
}
for _, kind in ipairs { "V2", "V3", "V4", "V5LITE_POD", "V5P", "V6E", "TPU7X", "V6EA", "TPU7" } do
  table.insert(REQUESTS, { "Node", accelerator = kind, topology = "2x2", unchecked = true, runtime = "r" })
end

local function schema_of(version)
  return require("ciranda.data.tpu_schema_" .. version)
end

--- Note which fields, and which values of enums, a message has.
local function note(schema, name, value, made)
  for field, item in pairs(value) do
    local kind = schema.messages[name][field]
    assert.is_truthy(kind, ("%s has no field %s"):format(name, field))
    made[name .. "." .. field] = true
    if type(kind) == "table" then
      made[("%s.%s.%s"):format(name, field, item)] = true
    else
      local base, suffix = kind:match("^(%w+)(.*)$")
      for _, each in ipairs(schema.messages[base] and (suffix == "[]" and item or { item }) or {}) do
        note(schema, base, each, made)
      end
    end
  end
end

--- Every field of a message, and of those in it, that was neither made nor has a reason.
local function collect(schema, name, made, seen, missing, used)
  if seen[name] then
    return
  end
  seen[name] = true
  for field, kind in pairs(schema.messages[name]) do
    local path = name .. "." .. field
    local reason = REASONS[path]
    if reason then
      used[path] = true
    elseif not made[path] then
      missing[#missing + 1] = path
    elseif type(kind) == "table" then
      for place = 2, #kind do
        local one = path .. "." .. kind[place]
        used[one] = REASONS_OF_VALUES[one] and true or used[one]
        if not made[one] and not REASONS_OF_VALUES[one] then
          missing[#missing + 1] = one
        end
      end
    else
      local base = kind:match("^%w+")
      if schema.messages[base] then
        collect(schema, base, made, seen, missing, used)
      end
    end
  end
end

describe("the one vocabulary", function()
  it("makes every field and value of both versions that a request can have", function()
    local used = {}
    for _, version in ipairs { "v2", "v2alpha1" } do
      local schema, made = schema_of(version), {}
      for _, request in ipairs(REQUESTS) do
        local options = { id = "job", version = version }
        for key, value in pairs(request) do
          options[key] = value
        end
        local message = table.remove(options, 1)
        local build = message == "Node" and vocabulary.node or vocabulary.queued_resource
        local ok, built = pcall(build, options, CONTEXT)
        if ok then
          assert.equal(version, built.version)
          note(schema, message, built.body, made)
        else -- only because it is the other version's
          assert.equal("version", built.target, tostring(built))
        end
      end
      local missing, seen = {}, {}
      collect(schema, "QueuedResource", made, seen, missing, used)
      collect(schema, "Node", made, seen, missing, used)
      table.sort(missing)
      assert.equal("", table.concat(missing, " "), version)
    end
    for _, reasons in ipairs { REASONS, REASONS_OF_VALUES } do
      for path in pairs(reasons) do
        assert.is_true(used[path], "a reason for what there is not: " .. path)
      end
    end
  end)

  it("asks for nothing that is spread over both versions", function()
    local err = support.fails("usage", vocabulary.node, {
      id = "n",
      accelerator = "v4-8",
      protection = "standard",
      autocheckpoint = true,
    }, CONTEXT)
    assert.matches(
      "v2 does not have autocheckpointEnabled, v2alpha1 does not have protectionTier",
      err.message,
      1,
      true
    )
    support.fails("usage", vocabulary.node, { id = "n", accelerator = "v4-8", protection = "high" }, CONTEXT)
    support.fails("usage", vocabulary.node, { id = "n", accelerator = "v4-8", traffic = {} }, CONTEXT)
    err = support.fails("usage", vocabulary.queued_resource, {
      id = "n",
      accelerator = "v4-8",
      slices = 2,
      traffic = { anticipatedTraffic = {} },
    }, CONTEXT)
    assert.matches("trafficConfig.anticipatedTraffic", err.message, 1, true)
  end)

  it("calls every method of both versions, with each of its parameters", function()
    support.with_server(function()
      return { json = {} }
    end, function(s, log)
      local tpu =
        require("ciranda.gcp.tpu").connect { client = support.client(), config = support.config(s.url) }
      local calls = 0
      for _, version in ipairs { "v2", "v2alpha1" } do
        for name, method in pairs(schema_of(version).methods) do
          local arguments = { version = version, query = {} }
          for variable in method.path:gmatch("{(%w+)}") do
            arguments[variable] = variable ~= "project" and variable ~= "location" and "x-" .. variable or nil
          end
          for parameter in pairs(method.query or {}) do
            arguments.query[parameter] = "1"
          end
          tpu:call(name, arguments)
          calls = calls + 1
          local request, sent = log[#log], log[#log]:args()
          assert.equal(calls, #log)
          assert.equal(method.verb, request.method, name)
          local path = method.path:gsub("{(%w+)}", function(variable)
            return variable == "project" and "p"
              or variable == "location" and "us-west4-a"
              or "x-" .. variable
          end)
          assert.equal(("/%s/%s"):format(version, path), request.path)
          for parameter in pairs(method.query or {}) do
            assert.equal("1", sent[parameter], name .. " " .. parameter)
          end
          assert.equal(method.body and "{}" or "", request.body or "", name)
        end
      end
      assert.equal(24 + 29, calls)
    end)
  end)
end)
