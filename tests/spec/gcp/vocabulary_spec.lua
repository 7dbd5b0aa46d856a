local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local schema = require("ciranda.sim.schema")
local vocabulary = require("ciranda.gcp.vocabulary")

local support = dofile("tests/spec/gcp/support.lua")
local raised = support.raised

local CONTEXT = { project = "p", zone = "us-west4-a", now = 1767225600 } -- 2026-01-01T00:00:00Z

local function merged(base, more)
  local result = {}
  for key, value in pairs(base) do
    result[key] = value
  end
  for key, value in pairs(more or {}) do
    result[key] = value
  end
  return result
end

local SMALL = { id = "job1", accelerator = "v5litepod-16" }

--- Build a queued resource, check it against the API's schema as JSON, and give it.
local function build(more, message)
  local built = message == "Node" and vocabulary.node(merged(SMALL, more), CONTEXT)
    or vocabulary.queued_resource(merged(SMALL, more), CONTEXT)
  local text = json.encode(built.body)
  schema.load(built.version):read(message or "QueuedResource", json.decode(text))
  built.body = json.decode(text)
  return built
end

local function node(more)
  return build(more).body.tpu.nodeSpec[1].node
end

--- The refusal of a request names the option and holds the text.
local function refuses(option, text, more, context)
  local err = raised(vocabulary.queued_resource, merged(SMALL, more), context or CONTEXT)
  assert.is_true(errors.is(err, "usage"), errors.text(err))
  assert.equal(option, err.target)
  assert.matches(text, tostring(err), 1, true)
end

describe("ciranda.gcp.vocabulary", function()
  it("makes the smallest request", function()
    local built = build()
    assert.equal("v2", built.version)
    assert.same({ "job1" }, built.nodes)
    assert.equal(16, built.chips)
    assert.same({
      tpu = {
        nodeSpec = {
          {
            parent = "projects/p/locations/us-west4-a",
            nodeId = "job1",
            node = {
              acceleratorType = "v5litepod-16",
              runtimeVersion = "v2-alpha-tpuv5-lite",
              networkConfig = { enableExternalIps = true },
            },
          },
        },
      },
    }, built.body)
  end)

  it("spells the parameters of several slices as each version does", function()
    local built = build { slices = 3 }
    assert.equal("v2", built.version)
    assert.same({ "job1-0", "job1-1", "job1-2" }, built.nodes)
    assert.equal(48, built.chips)
    assert.same({ nodeCount = 3, nodeIdPrefix = "job1" }, built.body.tpu.nodeSpec[1].multisliceParams)
    assert.is_nil(built.body.tpu.nodeSpec[1].nodeId)
    built = build { slices = 2, node_prefix = "n", autocheckpoint = true }
    assert.equal("v2alpha1", built.version)
    assert.same({ nodeCount = 2, nodeIdPrefix = "n" }, built.body.tpu.nodeSpec[1].multiNodeParams)
    assert.same({ "tpu.nodeSpec.node.autocheckpointEnabled" }, built.because)
    built = build { slices = 2, workload = "availability-optimized" }
    assert.equal("v2alpha1", built.version)
    assert.equal("AVAILABILITY_OPTIMIZED", built.body.tpu.nodeSpec[1].multiNodeParams.workloadType)
  end)

  it("chooses v2alpha1 for what only it has, and says for what", function()
    for option, value in pairs {
      autocheckpoint = true,
      confidential = true,
      boot_disk = { size_gb = 200 },
      data_disks = { { source = "projects/p/zones/z/disks/d", workers = { 0 } } },
    } do
      assert.equal("v2alpha1", build({ [option] = value }).version, option)
      refuses("version", "v2 does not have", { [option] = value, version = "v2" })
    end
    assert.equal("v2alpha1", build({ capacity = "best-effort" }).version)
    assert.equal("v2alpha1", build({ capacity = "flex-start", max_run_duration = "4h" }).version)
    assert.equal("v2alpha1", build({ accelerator = "tpu7x", topology = "2x2x1", runtime = "r" }).version)
    assert.equal("v2", build({ boot_disk = { kms_key = "k" } }).version)
    assert.equal("v2alpha1", build({ version = "v2alpha1" }).version)
    assert.equal("v2", build({ autocheckpoint = false }).version)
  end)

  it("knows every kind of capacity", function()
    assert.is_nil(build({ capacity = "on-demand" }).body.spot)
    assert.same({}, build({ capacity = "spot" }).body.spot)
    assert.same({}, build({ capacity = "best-effort" }).body.bestEffort)
    assert.same(
      { minDuration = "3600s" },
      build({ capacity = "guaranteed", min_duration = 3600 }).body.guaranteed
    )
    local flex = build({ capacity = "flex-start", max_run_duration = "1.5h" }).body
    assert.equal("FLEX_START", flex.provisioningModel)
    assert.same({ maxRunDuration = "5400s" }, flex.runDuration)
    local reserved = build({ capacity = "reserved" }).body
    assert.equal("projects/p/locations/us-west4-a/reservations/-", reserved.reservationName)
    reserved = build({ capacity = "reserved", autocheckpoint = true }).body
    assert.same({ reserved = true }, reserved.guaranteed)
    assert.is_nil(reserved.reservationName)
    for text, value in pairs {
      ["projects/p/locations/us-west4-a/reservations/r"] = "r",
      ["projects/host/locations/us-west4-a/reservations/r"] = { project = "host", name = "r" },
      ["folders/7/locations/us-west4-a/reservations/-"] = { folder = "7" },
      ["organizations/8/locations/us-west4-a/reservations/x"] = "organizations/8/locations/us-west4-a/reservations/x",
    } do
      assert.equal(text, build({ reservation = value }).body.reservationName)
    end
    refuses("capacity", "spot", { capacity = "sport" })
    refuses("reservation", "reserved", { capacity = "spot", reservation = "r" })
    refuses("reservation", "us-east1-d", { reservation = "projects/p/locations/us-east1-d/reservations/r" })
    refuses("reservation", "reservations/NAME", { reservation = "a/b" })
    refuses("reservation", "owner", { reservation = { owner = "x" } })
    refuses("min_duration", "guaranteed", { min_duration = 5 })
    refuses("max_run_duration", "flex-start", { capacity = "spot", max_run_duration = 5 })
    refuses("max_run_duration", "termination_time", { capacity = "flex-start" })
  end)

  it("limits the time in which the request is valid", function()
    local function policy(more)
      return build(more).body.queueingPolicy
    end
    assert.is_nil(policy {})
    assert.same({ validUntilDuration = "21600s" }, policy { valid_until = "6h" })
    assert.same({ validUntilDuration = "90s" }, policy { valid_until = 90 })
    assert.same({ validUntilTime = "2026-02-01T00:00:00Z" }, policy { valid_until = "2026-02-01T00:00:00Z" })
    assert.same({ validAfterDuration = "60s" }, policy { valid_after = "1m" })
    assert.same({ validAfterTime = "2026-02-01T00:00:00Z" }, policy { valid_after = "2026-02-01T00:00:00Z" })
    assert.same(
      { validInterval = { startTime = "2026-01-01T01:00:00Z", endTime = "2026-01-02T00:00:00Z" } },
      policy { valid_after = "1h", valid_until = "2026-01-02T00:00:00Z" }
    )
    refuses("valid_until", "not after", { valid_after = "2h", valid_until = "1h" })
    for _, bad in ipairs { 0, -1, "soon", "1w", "2026-01-01", 0 / 0, math.huge, true } do
      refuses("valid_until", "length of time", { valid_until = bad })
    end
  end)

  it("puts everything about a node where the API has it", function()
    local made = node {
      network = "net",
      subnetwork = "sub",
      external_ips = false,
      ip_forward = true,
      queue_count = 2,
      tags = { "a", "b-1" },
      labels = { team = "x_1", empty = "" },
      service_account = "sa@example.com",
      data_disks = { { source = "d1", mode = "read-only" } },
      secure_boot = true,
      description = "résumé",
    }
    assert.same({
      acceleratorType = "v5litepod-16",
      runtimeVersion = "v2-alpha-tpuv5-lite",
      networkConfig = {
        network = "net",
        subnetwork = "sub",
        enableExternalIps = false,
        canIpForward = true,
        queueCount = 2,
      },
      tags = { "a", "b-1" },
      labels = { team = "x_1", empty = "" },
      serviceAccount = {
        email = "sa@example.com",
        scope = { "https://www.googleapis.com/auth/cloud-platform" },
      },
      dataDisks = { { sourceDisk = "d1", mode = "READ_ONLY" } },
      shieldedInstanceConfig = { enableSecureBoot = true },
      description = "résumé",
    }, made)
    made = node {
      scopes = { "s1" },
      boot_disk = { size_gb = 200, image = "i" },
      confidential = true,
      data_disks = { { source = "d1", workers = { 0, 12 } } },
      networks = { { network = "a" }, { network = "b", external_ips = false } },
    }
    assert.same({ scope = { "s1" } }, made.serviceAccount)
    assert.same({ diskSizeGb = "200", sourceImage = "i" }, made.bootDiskConfig)
    assert.equal("SEV", made.confidentialInstanceConfig.confidentialInstanceType)
    assert.same({ "0", "12" }, made.dataDisks[1].workerIds)
    assert.same(
      { { network = "a", enableExternalIps = true }, { network = "b", enableExternalIps = false } },
      made.networkConfigs
    )
    refuses("networks", "excludes 'network'", { networks = { {} }, network = "x" })
    refuses("networks", "is empty", { networks = {} })
    refuses("networks", "nework", { networks = { { nework = "x" } } })
    refuses("data_disks", "source", { data_disks = { {} } })
    refuses("data_disks", "rw", { data_disks = { { source = "d", mode = "rw" } } })
    refuses("boot_disk", "size", { boot_disk = { size = 1 } })
    assert.equal("10.0.0.8/29", node({ range = "10.0.0.8/29" }).cidrBlock)
    for _, range in ipairs {
      "10.0.0.0",
      "10.0.0.0/30",
      "10.0.256.0/29",
      "10.0.0/24",
      "a.b.c.d/29",
      "10.0.0.0/290",
    } do
      refuses("range", "no range of IPv4 addresses", { range = range })
    end
    refuses("range", "does not begin", { range = "10.0.0.4/29" })
    refuses("description", "512", { description = ("x"):rep(513) })
    refuses("description", "UTF-8", { description = "\xff" })
  end)

  it("finds the accelerator by type, or by generation and topology", function()
    assert.equal("v4-8", node({ accelerator = "v4-8" }).acceleratorType)
    assert.equal("tpu-ubuntu2204-base", node({ accelerator = "v4-8" }).runtimeVersion)
    assert.equal("v6e-8", node({ accelerator = "v6e-8", topology = "2x4" }).acceleratorType)
    assert.same(
      { type = "V5LITE_POD", topology = "4x4" },
      node({ accelerator = "v5e", topology = "4x4" }).acceleratorConfig
    )
    assert.same(
      { type = "V4", topology = "2x2x2" },
      node({ accelerator = "V4", topology = "2x2x2" }).acceleratorConfig
    )
    refuses("accelerator", "v5litepod-16", { accelerator = "v5e-16" })
    refuses("accelerator", "v5litepod-16", { accelerator = "v5litepod-17" })
    refuses("accelerator", "topology", { accelerator = "v5p" })
    refuses("accelerator", "types are", { accelerator = "h100-8" })
    refuses("accelerator", "neither", { accelerator = "gpu" })
    refuses("topology", "4x4", { accelerator = "v5e", topology = "3x5" })
    refuses("topology", "2x2x2", { accelerator = "v4-16", topology = "2x2x4" })
    assert.equal("v9-4", node({ accelerator = "v9-4", unchecked = true, runtime = "r" }).acceleratorType)
    refuses("runtime", "is needed", { accelerator = "v9-4", unchecked = true })
    refuses("runtime", "v2-alpha-tpuv5-lite", { runtime = "v2-alpha-tpuv6e" })
    assert.equal("v2-alpha-tpuv5-lite-mcp", node({ runtime = "v2-alpha-tpuv5-lite-mcp" }).runtimeVersion)
  end)

  it("allows as many slices as the platform joins", function()
    assert.equal(256, #build({ slices = 256 }).nodes)
    refuses("slices", "from 1 to 256", { slices = 257 })
    refuses("slices", "from 1 to 256", { slices = 0 })
    refuses("slices", "an integer", { slices = 1.5 })
    refuses("slices", "v4 or newer", { accelerator = "v3-8", slices = 2 })
    assert.equal("v3-8", node({ accelerator = "v3-8" }).acceleratorType)
  end)

  it("takes names by Google's rule", function()
    assert.equal("n1", build({ node_id = "n1" }).body.tpu.nodeSpec[1].nodeId)
    refuses("node_id", "node_prefix", { slices = 2, node_id = "x" })
    refuses("node_prefix", "node_id", { node_prefix = "x" })
    for _, bad in ipairs { "", "Job", "1job", "job-", "job_1", "a.b", ("x"):rep(64), "job\n" } do
      refuses("id", bad == "" and "is needed" or "is no name", { id = bad })
    end
    refuses("node_prefix", "63", { slices = 200, node_prefix = ("x"):rep(61) })
    refuses("project", "is needed", {}, { zone = "z" })
    refuses("zone", "is needed", {}, { project = "p", zone = "" })
  end)

  it("makes metadata of scripts, keys and files", function()
    local key = "me:ssh-ed25519 AAAAC3Nz me@host"
    assert.same(
      {
        ["startup-script"] = "#!/bin/bash\necho",
        ["ssh-keys"] = "old:ssh-rsa AA\n" .. key,
        k = "v",
      },
      node({
        startup_script = "#!/bin/bash\necho",
        ssh_keys = { key },
        metadata = { k = "v", ["ssh-keys"] = "old:ssh-rsa AA" },
      }).metadata
    )
    support.with_directory(function(directory)
      local path = support.write(directory .. "/script", "#!/bin/sh\ntrue\n")
      assert.equal("#!/bin/sh\ntrue\n", node({ startup_script_file = path }).metadata["startup-script"])
      assert.equal("#!/bin/sh\ntrue\n", node({ metadata_from_file = { m = path } }).metadata.m)
      refuses("startup_script_file", "excludes", { startup_script_file = path, startup_script = "x" })
      refuses(
        "startup_script_file",
        "another option",
        { startup_script_file = path, metadata = { ["startup-script"] = "x" } }
      )
      local err = raised(
        vocabulary.queued_resource,
        merged(SMALL, { startup_script_file = directory .. "/gone" }),
        CONTEXT
      )
      assert.is_true(errors.is(err, "not_found"))
    end)
    refuses("startup_script", "$'...'", { startup_script = "#!/bin/bash\\necho hello" })
    refuses("startup_script", "nothing follows", { startup_script = "#!/bin/bash\n" })
    refuses("startup_script", "empty", { startup_script = " \n" })
    refuses("ssh_keys", "entry 2", { ssh_keys = { key, "ssh-ed25519 AAAA" } })
    refuses("metadata", "262144", { metadata = { k = ("x"):rep(262145) } })
    refuses("metadata", "524288", { metadata = { a = ("x"):rep(262144), b = ("x"):rep(262144) } })
    refuses("metadata", "is no key", { metadata = { ["a b"] = "x" } })
    refuses("metadata", "strings", { metadata = { a = 1 } })
  end)

  it("checks labels and tags", function()
    refuses("labels", "'A'", { labels = { A = "x" } })
    refuses("labels", "'X'", { labels = { a = "X" } })
    refuses("labels", "no key", { labels = { [("a"):rep(64)] = "x" } })
    refuses("tags", "'B'", { tags = { "a", "B" } })
    refuses("tags", "entry 1", { tags = { 7 } })
  end)

  it("knows no other option", function()
    local err = raised(vocabulary.queued_resource, merged(SMALL, { acelerator = "x" }), CONTEXT)
    assert.is_true(errors.is(err, "misuse"))
    assert.matches("acelerator", tostring(err), 1, true)
  end)

  it("makes single nodes", function()
    local built = build({ capacity = "spot" }, "Node")
    assert.equal("v2", built.version)
    assert.same({ spot = true }, built.body.schedulingConfig)
    built = build({ capacity = "reserved", reservation = "r", autocheckpoint = true }, "Node")
    assert.equal("v2alpha1", built.version)
    assert.equal("RESERVATION_BOUND", built.body.schedulingConfig.provisioningModel)
    assert.is_true(built.body.autocheckpointEnabled)
    for _, more in ipairs { { slices = 2 }, { capacity = "guaranteed" }, { valid_until = 5 } } do
      assert.is_true(errors.is(raised(vocabulary.node, merged(SMALL, more), CONTEXT), "usage"))
    end
  end)

  it("makes messages that the schema accepts only as they are", function()
    local built = build {
      slices = 2,
      capacity = "spot",
      autocheckpoint = true,
      valid_until = "6h",
      boot_disk = { size_gb = 200 },
      labels = { a = "b" },
      metadata = { k = "v" },
      tags = { "t" },
    }
    local alpha = schema.load("v2alpha1")
    local function spec(body)
      return body.tpu.nodeSpec[1]
    end
    local mutations = {
      function(b)
        b.state = "ACTIVE"
      end,
      function(b)
        b.spot = true
      end,
      function(b)
        b.spot = { x = 1 }
      end,
      function(b)
        b.unknown = {}
      end,
      function(b)
        b.tpu = {}
        b.tpu.nodeSpecs = {}
      end,
      function(b)
        b.tpu.nodeSpec = { spec = {} }
      end,
      function(b)
        b.tpu.nodeSpec = "x"
      end,
      function(b)
        b.queueingPolicy.validUntilDuration = 21600
      end,
      function(b)
        b.queueingPolicy.validUntilDuration = "6h"
      end,
      function(b)
        b.queueingPolicy.validUntil = "6h"
      end,
      function(b)
        b.provisioningModel = "SPOTTY"
      end,
      function(b)
        spec(b).multinodeParams = {}
      end,
      function(b)
        spec(b).multisliceParams = {}
      end,
      function(b)
        spec(b).multiNodeParams.nodeCount = "two"
      end,
      function(b)
        spec(b).multiNodeParams.nodeCount = 2.5
      end,
      function(b)
        spec(b).multiNodeParams.nodeCount = 1 << 40
      end,
      function(b)
        spec(b).multiNodeParams.workloadType = "FAST"
      end,
      function(b)
        spec(b).parent = 7
      end,
      function(b)
        spec(b).node.acceleratortype = "v4-8"
      end,
      function(b)
        spec(b).node.acceleratorType = { "v4-8" }
      end,
      function(b)
        spec(b).node.acceleratorConfig = { type = "V99" }
      end,
      function(b)
        spec(b).node.autocheckpointEnabled = "true"
      end,
      function(b)
        spec(b).node.labels = { "a" }
      end,
      function(b)
        spec(b).node.labels.a = 1
      end,
      function(b)
        spec(b).node.metadata.k = { "v" }
      end,
      function(b)
        spec(b).node.metadata = { items = { { key = "k" } } }
      end,
      function(b)
        spec(b).node.tags = "t"
      end,
      function(b)
        spec(b).node.tags[1] = 7
      end,
      function(b)
        spec(b).node.bootDiskConfig.diskSizeGb = "200GB"
      end,
      function(b)
        spec(b).node.networkConfig.enableExternalIps = 1
      end,
      function(b)
        spec(b).node.networkConfig.externalIps = true
      end,
      function(b)
        spec(b).node.schedulingConfig = { spot = {} }
      end,
    }
    local text = json.encode(built.body)
    alpha:read("QueuedResource", json.decode(text))
    for index, mutate in ipairs(mutations) do
      local body = json.decode(text)
      mutate(body)
      assert.is_false(
        pcall(alpha.read, alpha, "QueuedResource", body),
        "mutation " .. index .. " was accepted"
      )
      assert.is_true(#vocabulary.missing("v2alpha1", "QueuedResource", built.body) == 0)
    end
    assert.is_true(#mutations >= 30)
  end)
end)
