local support = dofile(debug.getinfo(1, "S").source:match "@(.*/)" .. "support.lua")

local ZONE = "/v2/" .. support.ZONE
local QUEUED = ZONE .. "/queuedResources"
local UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"

describe("a queued resource", function()
  local p

  before_each(function()
    p = support.project()
  end)

  local function state(id)
    local status, body = p.call("GET", QUEUED .. "/" .. (id or "job"))
    return status == 200 and body.state.state or status
  end

  local function create(count, node, fields, query)
    return p.call(
      "POST",
      QUEUED .. "?queuedResourceId=job" .. (query or ""),
      support.queued_resource(count, node, fields)
    )
  end

  it("goes from CREATING to ACTIVE with all its nodes", function()
    local status, operation = create(2)
    assert.are.equal(200, status)
    assert.is_truthy(
      operation.name:match "^projects/p/locations/us%-west4%-a/operations/operation%-%d+%-%x+%-%x+%-%x+$"
    )
    assert.are.equal("create", operation.metadata.verb)
    assert.are.equal("type.googleapis.com/google.cloud.tpu.v2.OperationMetadata", operation.metadata["@type"])
    assert.is_nil(operation.done)
    assert.are.equal("CREATING", state())
    p.clock:advance(4)
    assert.are.equal("WAITING_FOR_RESOURCES", state())
    p.clock:advance(30)
    assert.are.equal("PROVISIONING", state())
    local _, node = p.call("GET", ZONE .. "/nodes/job-1")
    assert.are.equal("CREATING", node.state)
    assert.is_nil(node.networkEndpoints)
    p.clock:advance(300)
    assert.are.equal("ACTIVE", state())

    local _, queued = p.call("GET", QUEUED .. "/job")
    assert.are.equal(2, #queued.tpu.nodeSpec)
    assert.are.equal("job-1", queued.tpu.nodeSpec[2].nodeId)
    assert.is_nil(queued.tpu.nodeSpec[1].multisliceParams)
    _, node = p.call("GET", ZONE .. "/nodes/job-1")
    assert.are.equal("READY", node.state)
    assert.are.equal("HEALTHY", node.health)
    assert.are.equal(4, #node.networkEndpoints)
    assert.is_true(node.multisliceNode)
    assert.is_truthy(node.id:match "^%d+$")
    assert.are.equal("projects/p/locations/us-west4-a/queuedResources/job", node.queuedResource)

    local _, ended = p.call("GET", "/v2/" .. operation.name)
    assert.is_true(ended.done)
    assert.are.equal("type.googleapis.com/google.cloud.tpu.v2.QueuedResource", ended.response["@type"])
  end)

  it("is seen by both versions, each with its own spelling and @type", function()
    local body = support.queued_resource(1)
    local spec = body.tpu.nodeSpec[1]
    spec.nodeId, spec.multi_node_params = nil, { node_count = 2, node_id_prefix = "job" }
    local status, operation =
      p.call("POST", "/v2alpha1/" .. support.ZONE .. "/queuedResources?queued_resource_id=job", body)
    assert.are.equal(200, status)
    assert.are.equal("v2alpha1", operation.metadata.apiVersion)
    p.settle()
    assert.are.equal("ACTIVE", state())
    local _, node = p.call("GET", ZONE .. "/nodes/job-0")
    assert.are.equal("V2_ALPHA1", node.apiVersion)
    assert.is_nil(node.autocheckpointEnabled)
    for _, version in ipairs({ "v2", "v2alpha1" }) do
      local _, shown = p.call("GET", ("/%s/%s"):format(version, operation.name))
      local package = "type.googleapis.com/google.cloud.tpu." .. version
      assert.are.equal(package .. ".OperationMetadata", shown.metadata["@type"])
      assert.are.equal(package .. ".QueuedResource", shown.response["@type"])
      assert.are.equal("v2alpha1", shown.metadata.apiVersion)
    end
  end)

  it("takes the guide's body, with its missing comma put in", function()
    local status, body = p.call(
      "POST",
      "/v2alpha1/projects/p/locations/us-central1-a/queuedResources?queued_resource_id=q",
      [[
      {"guaranteed": {"reserved": true},
       "tpu": {"node_spec": [{"parent": "projects/42/locations/us-central1-a",
         "node": {"accelerator_type": "v5litepod-16", "runtime_version": "v2-alpha-tpuv5-lite",
           "network_config": {"network": "n", "subnetwork": "s", "enable_external_ips": true},
           "tags": ["example-tag-1"], "metadata": {"startup-script": "#!/bin/bash\n"}},
         "multi_node_params": {"node_count": 2, "node_id_prefix": "q"}}]}}]]
    )
    assert.are.equal(200, status, body.error and body.error.message)
    p.settle()
    local _, node = p.call("GET", "/v2alpha1/projects/p/locations/us-central1-a/nodes/q-0")
    assert.are.equal("READY", node.state)
    assert.are.equal("198.51.100", node.networkEndpoints[1].accessConfig.externalIp:match "^(.*)%.%d+$")
    assert.is_true(node.schedulingConfig.reserved)
  end)

  it("refuses what is wrong and names the field", function()
    local function refused(text, count, node, fields, change)
      local body = support.queued_resource(count, node, fields)
      if change then
        change(body.tpu.nodeSpec[1], body)
      end
      local status, answer = p.call("POST", QUEUED .. "?queuedResourceId=job", body)
      assert.are.equal(400, status, text)
      assert.are.equal("INVALID_ARGUMENT", answer.error.status)
      assert.is_truthy(answer.error.message:find(text, 1, true), answer.error.message)
    end
    refused("node_count is 1", 2, nil, nil, function(spec)
      spec.multisliceParams.nodeCount = 1
    end)
    refused("node_count is 257", 257)
    refused("cannot both be set", 2, nil, nil, function(spec)
      spec.nodeId = "x"
    end)
    refused("exactly one node_spec is supported, got 2", 1, nil, nil, function(spec, body)
      body.tpu.nodeSpec[2] = spec
    end)
    refused("parent 'projects/other", 1, nil, nil, function(spec)
      spec.parent = "projects/other/locations/us-west4-a"
    end)
    refused("node is required", 1, nil, nil, function(spec)
      spec.node = nil
    end)
    refused("only one of", 1, nil, { spot = {}, guaranteed = {} })
    refused(
      "only one of",
      1,
      nil,
      { queueingPolicy = { validUntilDuration = "60s", validUntilTime = "2026-01-01T00:00:00Z" } }
    )
    refused(
      'invalid AcceleratorType, "v5litepod-17" for zone "us-west4-a"',
      1,
      { acceleratorType = "v5litepod-17" }
    )
    refused("invalid RuntimeVersion", 1, { runtimeVersion = "windows" })
    refused(
      "Multislice is not supported",
      2,
      { acceleratorType = "v3-8", runtimeVersion = "tpu-ubuntu2204-base" }
    )
    refused("Invalid label key", 1, { labels = { Upper = "x" } })
    refused(
      "Metadata value of 'startup-script' is too large",
      1,
      { metadata = { ["startup-script"] = ("x"):rep(262145) } }
    )
    refused("Invalid tag", 1, { tags = { "-" } })
    refused(
      "network_configs",
      1,
      { networkConfig = { network = "a" }, networkConfigs = { { network = "b" } } }
    )
    refused("Invalid reservation_name", 1, nil, { reservationName = "mine" })
    local status, answer = p.call("POST", QUEUED .. "?queuedResourceId=Job_1", support.queued_resource(1))
    assert.are.equal(400, status)
    assert.is_truthy(answer.error.message:find "Invalid queued_resource_id")
    assert.are.same({}, p.machines.log)
  end)

  it("refuses unknown parameters, bad JSON, foreign projects and unknown zones", function()
    local status, body = p.call("GET", QUEUED .. "?color=red")
    assert.are.equal(400, status)
    assert.is_truthy(body.error.message:find("Cannot bind query parameter", 1, true))
    status, body = p.call("POST", QUEUED .. "?queuedResourceId=a", "{")
    assert.are.equal(400, status)
    assert.is_truthy(body.error.message:find("Invalid JSON payload received", 1, true))
    status, body = p.call("GET", "/v2/projects/other/locations/us-west4-a/nodes")
    assert.are.equal(403, status)
    assert.are.equal("Permission 'tpu.nodes.list' denied on 'projects/other'", body.error.message)
    status = p.call("GET", "/v2/projects/p/locations/nowhere-1-z/nodes")
    assert.are.equal(403, status)
    status = p.call("GET", "/v2/projects/p/locations/us-west4-a/nodes/x:explode")
    assert.are.equal(404, status)
  end)

  it("answers 409 with the resource's name when there is one already", function()
    create(1)
    local status, body = create(1)
    assert.are.equal(409, status)
    assert.are.equal("ALREADY_EXISTS", body.error.status)
    assert.are.equal(
      "Resource 'projects/p/locations/us-west4-a/queuedResources/job' already exists",
      body.error.message
    )
    assert.are.equal("type.googleapis.com/google.rpc.ResourceInfo", body.error.details[1]["@type"])
  end)

  it("answers a repeated request id with the first operation, for an hour", function()
    local _, first = create(1, nil, nil, "&requestId=" .. UUID)
    local status, again = create(1, nil, nil, "&requestId=" .. UUID)
    assert.are.equal(200, status)
    assert.are.equal(first.name, again.name)
    p.clock:advance(3601)
    assert.are.equal(409, (create(1, nil, nil, "&requestId=" .. UUID)))
    assert.are.equal(400, (create(1, nil, nil, "&requestId=1")))
  end)

  it("is deleted by force with its nodes, and only then without its nodes", function()
    create(2)
    p.settle()
    local status, body = p.call("DELETE", QUEUED .. "/job")
    assert.are.equal(400, status)
    assert.are.equal("FAILED_PRECONDITION", body.error.status)
    local _, operation
    status, operation = p.call("DELETE", QUEUED .. "/job?force=true")
    assert.are.equal(200, status)
    assert.are.equal("DELETING", state())
    assert.are.equal(2, #p.world.nodes:list(function()
      return true
    end))
    p.settle()
    assert.are.equal(404, state())
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/job-0")))
    _, operation = p.call("GET", "/v2/" .. operation.name)
    assert.are.same({ ["@type"] = "type.googleapis.com/google.protobuf.Empty" }, operation.response)
    assert.are.same({ "create job-0", "create job-1", "destroy job-0", "destroy job-1" }, p.machines.log)
  end)

  it("can be deleted while it is provisioned, and no node becomes READY afterwards", function()
    p.machines.hold.create = true
    create(2)
    p.clock:advance(40)
    assert.are.equal("PROVISIONING", state())
    assert.are.equal(200, (p.call("DELETE", QUEUED .. "/job?force=true")))
    for _, done in ipairs(p.machines.held) do
      done()
    end
    p.settle()
    assert.are.equal(404, state())
    for _, event in ipairs(p.world.events:since()) do
      assert.are_not.equal("READY", event.text)
    end
  end)

  it("waits for capacity and goes on when there is some", function()
    p = support.project { capacity = { v5litepod = 32 } }
    create(2)
    p.settle()
    local body = support.queued_resource(1)
    body.tpu.nodeSpec[1].nodeId = "second"
    p.call("POST", QUEUED .. "?queuedResourceId=second", body)
    p.settle()
    assert.are.equal("WAITING_FOR_RESOURCES", state "second")
    p.call("DELETE", QUEUED .. "/job?force=true")
    p.settle()
    assert.are.equal("ACTIVE", state "second")
  end)

  it("fails when its validity ends before there is capacity, and stays", function()
    p = support.project { capacity = { v5litepod = 0 } }
    create(1, nil, { queueingPolicy = { validUntilDuration = "3600s" } })
    p.clock:advance(3599)
    assert.are.equal("WAITING_FOR_RESOURCES", state())
    p.clock:advance(2)
    assert.are.equal("FAILED", state())
    local _, body = p.call("GET", QUEUED .. "/job")
    assert.are.equal(4, body.state.failedData.error.code)
    p.settle()
    assert.are.equal("FAILED", state())
  end)

  it("is not begun before its time", function()
    create(1, nil, {
      queueingPolicy = {
        validInterval = { startTime = "2026-01-02T00:00:00Z", endTime = "2026-01-03T00:00:00Z" },
      },
    })
    p.clock:advance(86390)
    assert.are.equal("WAITING_FOR_RESOURCES", state())
    p.clock:advance(400)
    assert.are.equal("ACTIVE", state())
  end)

  it("fails on a quota that is in use, and a dead one goes on holding quota until it is deleted", function()
    p = support.project { quota = { v5litepod = 32 } }
    p.world.faults:add { kind = "internal" }
    create(2)
    p.settle()
    assert.are.equal("FAILED", state())
    local body = support.queued_resource(1)
    body.tpu.nodeSpec[1].nodeId = "second"
    p.call("POST", QUEUED .. "?queuedResourceId=second", body)
    p.settle()
    local _, second = p.call("GET", QUEUED .. "/second")
    assert.are.equal("FAILED", second.state.state)
    assert.are.equal(8, second.state.failedData.error.code)
    assert.are.equal(
      "Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 32 in zone us-west4-a",
      second.state.failedData.error.message
    )
    p.call("DELETE", QUEUED .. "/job")
    p.call("DELETE", QUEUED .. "/second")
    p.settle()
    p.call("POST", QUEUED .. "?queuedResourceId=second", body)
    p.settle()
    assert.are.equal("ACTIVE", state "second")
  end)

  it("answers 429 at once to more than the quota's limit", function()
    p = support.project { quota = { ["v5litepod-spot"] = 16 } }
    local status, body = create(2, nil, { spot = {} })
    assert.are.equal(429, status)
    assert.are.equal("RESOURCE_EXHAUSTED", body.error.status)
    assert.are.equal(
      "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been exceeded. "
        .. "Limit: 16 in region us-west4.",
      body.error.message
    )
    assert.are.equal(200, (create(2)))
  end)

  it("fails by way of SUSPENDING when there is a stockout after all", function()
    p.world.faults:add { kind = "internal", name = "job" }
    create(2, nil, { spot = {} })
    local states = {}
    p.world.events:watch(function(event)
      if event.kind == "queuedResource" then
        states[#states + 1] = event.text
      end
    end)
    p.settle()
    assert.are.same({ "WAITING_FOR_RESOURCES", "PROVISIONING", "SUSPENDING", "FAILED" }, states)
    local _, body = p.call("GET", QUEUED .. "/job")
    assert.are.same({ code = 13, message = "an internal error has occurred" }, body.state.failedData.error)
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/job-0")))
  end)

  it("can fail with some slices alive", function()
    p.world.faults:add { kind = "stockout", slice = 1 }
    create(3)
    p.settle()
    assert.are.equal("FAILED", state())
    local _, node = p.call("GET", ZONE .. "/nodes/job-0")
    assert.are.equal("READY", node.state)
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/job-1")))
    assert.are.equal(200, (p.call("DELETE", QUEUED .. "/job")))
    p.settle()
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/job-0")))
  end)

  it("is suspended by the service when a slice is preempted, and cannot be reset then", function()
    create(2, nil, { spot = {} })
    p.settle()
    p.world.queued_resources:preempt(p.world.nodes:get(support.ZONE .. "/nodes/job-1"))
    local _, body = p.call("GET", QUEUED .. "/job")
    assert.are.equal("SUSPENDING", body.state.state)
    assert.are.equal("SERVICE", body.state.stateInitiator)
    p.settle()
    _, body = p.call("GET", QUEUED .. "/job")
    assert.are.equal("SUSPENDED", body.state.state)
    assert.are.equal("SERVICE", body.state.stateInitiator)
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/job-0")))
    assert.are.equal(400, (p.call("POST", QUEUED .. "/job:reset", "{}")))
    assert.are.equal(200, (p.call("DELETE", QUEUED .. "/job")))
  end)

  it("is suspended by the user when its nodes are deleted", function()
    create(2)
    p.settle()
    p.call("DELETE", ZONE .. "/nodes/job-0")
    assert.are.equal("SUSPENDING", state())
    p.settle()
    assert.are.equal("SUSPENDING", state())
    p.call("DELETE", ZONE .. "/nodes/job-1")
    p.settle()
    local _, body = p.call("GET", QUEUED .. "/job")
    assert.are.equal("SUSPENDED", body.state.state)
    assert.are.equal("USER", body.state.stateInitiator)
  end)

  it("resets all machines in parallel and keeps them", function()
    create(2)
    p.settle()
    local _, operation = p.call("POST", QUEUED .. "/job:reset", "{}")
    assert.are.equal("reset", operation.metadata.verb)
    local _, node = p.call("GET", ZONE .. "/nodes/job-1")
    assert.are.equal("RESTARTING", node.state)
    p.clock:advance(120)
    _, node = p.call("GET", ZONE .. "/nodes/job-1")
    assert.are.equal("READY", node.state)
    _, operation = p.call("GET", "/v2/" .. operation.name)
    assert.is_true(operation.done)
    assert.are.same({ "create job-0", "create job-1", "restart job-0", "restart job-1" }, p.machines.log)
  end)

  it("replaces a broken slice and then resets the others", function()
    create(3)
    p.settle()
    local node = p.world.nodes:get(support.ZONE .. "/nodes/job-1")
    local before = node.endpoints[1].address
    p.world.queued_resources:repair(node)
    p.settle()
    assert.are.equal("READY", node.message.state)
    assert.are_not.equal(before, node.message.networkEndpoints[1].ipAddress)
    local log = table.concat(p.machines.log, ",")
    assert.is_truthy(
      log:find("destroy job-1,destroy job-1,create job-1,restart job-0,restart job-2", 1, true),
      log
    )
  end)

  it("waits with a broken slice until there is capacity for a new one", function()
    p = support.project { capacity = { v5litepod = 32 } }
    create(2)
    p.settle()
    local node = p.world.nodes:get(support.ZONE .. "/nodes/job-1")
    p.world.queued_resources:repair(node)
    p.settle()
    assert.are.equal("REPAIRING", node.message.state)
    p.world.capacity:set_limit("us-west4-a/v5litepod", 48)
    p.world.queued_resources:allocate()
    p.settle()
    assert.are.equal("READY", node.message.state)
    assert.are.equal(32, p.world.capacity:in_use "us-west4-a/v5litepod")
  end)

  it("lists in pages, in every zone when asked", function()
    for i = 1, 5 do
      local body = support.queued_resource(1)
      body.tpu.nodeSpec[1].nodeId = "n" .. i
      assert.are.equal(200, (p.call("POST", QUEUED .. "?queuedResourceId=q" .. i, body)))
    end
    local seen, token = {}, ""
    repeat
      local _, page =
        p.call("GET", "/v2/projects/p/locations/-/queuedResources?pageSize=2&pageToken=" .. token)
      assert.is_true(#page.queuedResources <= 2)
      for _, item in ipairs(page.queuedResources) do
        seen[#seen + 1] = item.name:match "[^/]+$"
      end
      token = page.nextPageToken
      p.call("DELETE", QUEUED .. "/q1")
      p.settle()
    until not token
    assert.are.same({ "q1", "q2", "q3", "q4", "q5" }, seen)
    assert.are.equal(400, (p.call("GET", QUEUED .. "?pageToken=zz")))
    assert.are.equal(400, (p.call("GET", QUEUED .. "?pageSize=-1")))
    local _, elsewhere = p.call("GET", "/v2/projects/p/locations/us-east5-a/queuedResources")
    assert.is_nil(elsewhere.queuedResources)
  end)

  it("answers with the fields that are asked for, and with enums as numbers", function()
    create(1)
    p.settle()
    local _, body = p.call("GET", QUEUED .. "?fields=queuedResources(name,state/state)")
    assert.are.same({
      queuedResources = {
        { name = "projects/p/locations/us-west4-a/queuedResources/job", state = { state = "ACTIVE" } },
      },
    }, body)
    for pretty, blanks in pairs({ ["true"] = true, ["false"] = false }) do
      local query = { prettyPrint = pretty, fields = "name" }
      local answer =
        p.service:handle({ method = "GET", path = QUEUED .. "/job", query = query, headers = {} })
      assert.are.equal(200, answer.status)
      assert.are.equal(blanks, answer.body:find("\n ", 1, true) ~= nil)
    end
    _, body = p.call("GET", QUEUED .. "/job?$alt=json;enum-encoding=int")
    assert.are.equal(6, body.state.state)
    assert.are.equal(400, (p.call("GET", QUEUED .. "?fields=a(b")))
    assert.are.equal(400, (p.call("GET", QUEUED .. "?alt=proto")))
  end)

  it("is limited in creates a minute, and says when to come back", function()
    p = support.project { creates_per_minute = 1 }
    create(1)
    local body = support.queued_resource(1)
    body.tpu.nodeSpec[1].nodeId = "second"
    local status, refused = p.call("POST", QUEUED .. "?queuedResourceId=second", body)
    assert.are.equal(429, status)
    assert.are.equal("60s", refused.error.details[1].retryDelay)
    p.clock:advance(60)
    assert.are.equal(200, (p.call("POST", QUEUED .. "?queuedResourceId=second", body)))
  end)

  it("gives the same day for the same seed", function()
    local function day(seed)
      p = support.project { seed = seed }
      create(3)
      p.settle()
      local list = {}
      for i, event in ipairs(p.world.events:since()) do
        list[i] = event.time .. " " .. event.subject .. " " .. event.text
      end
      return table.concat(list, "\n")
    end
    assert.are.equal(day(3), day(3))
    assert.are_not.equal(day(3), day(4))
  end)
end)

describe("a node", function()
  local p
  local NODE = { acceleratorType = "v5litepod-8", runtimeVersion = "v2-alpha-tpuv5-lite" }

  before_each(function()
    p = support.project()
  end)

  local function create(node)
    local _, operation = p.call("POST", ZONE .. "/nodes?nodeId=n", node or NODE)
    p.settle()
    return operation
  end

  local function operation_of(answer)
    local _, operation = p.call("GET", "/v2/" .. answer.name)
    return operation
  end

  it("is created, stopped, started and deleted", function()
    local operation = operation_of(create())
    assert.are.equal("READY", operation.response.state)
    local _, stop = p.call("POST", ZONE .. "/nodes/n:stop", "{}")
    p.settle()
    assert.are.equal("STOPPED", operation_of(stop).response.state)
    assert.are.equal(400, (p.call("POST", ZONE .. "/nodes/n:stop", "{}")))
    local _, start = p.call("POST", ZONE .. "/nodes/n:start", "{}")
    p.settle()
    assert.are.equal("READY", operation_of(start).response.state)
    local _, delete = p.call("DELETE", ZONE .. "/nodes/n")
    p.settle()
    assert.is_true(operation_of(delete).done)
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/n")))
    assert.are.same({ "create n", "halt n", "restart n", "destroy n" }, p.machines.log)
  end)

  it("has no stop when it has several hosts", function()
    create { acceleratorType = "v5litepod-16", runtimeVersion = "v2-alpha-tpuv5-lite" }
    local status, body = p.call("POST", ZONE .. "/nodes/n:stop", "{}")
    assert.are.equal(400, status)
    assert.is_truthy(body.error.message:find("4 workers", 1, true))
  end)

  it("can be asked for by generation and topology", function()
    create { acceleratorConfig = { type = "V4", topology = "2x2x2" }, runtimeVersion = "tpu-ubuntu2204-base" }
    local _, node = p.call("GET", ZONE .. "/nodes/n")
    assert.are.equal("v4-16", node.acceleratorType)
  end)

  it("ends its create with the service's words when there is no capacity, and is gone", function()
    p = support.project { capacity = 0 }
    local operation = operation_of(create())
    assert.are.equal(8, operation.error.code)
    assert.is_truthy(
      operation.error.message:find('There is no more capacity in the zone "us-west4-a"; you can try', 1, true)
    )
    assert.are.equal(404, (p.call("GET", ZONE .. "/nodes/n")))
  end)

  it("is patched by a mask; a second patch meanwhile is a conflict", function()
    create()
    local target = ZONE .. "/nodes/n?updateMask="
    local status, patch = p.call(
      "PATCH",
      target .. "metadata",
      { metadata = { ["ssh-keys"] = "u:ssh-ed25519 A" }, description = "x" }
    )
    assert.are.equal(200, status)
    assert.are.equal(409, (p.call("PATCH", target .. "metadata", { metadata = {} })))
    p.settle()
    local node = operation_of(patch).response
    assert.are.same({ ["ssh-keys"] = "u:ssh-ed25519 A" }, node.metadata)
    assert.is_nil(node.description)
    assert.are.equal(400, (p.call("PATCH", target .. "state", { state = "READY" })))
    assert.are.equal(400, (p.call("PATCH", ZONE .. "/nodes/n", { description = "x" })))
    assert.are.equal("reconfigure n", p.machines.log[2])
  end)

  it("refuses a patch in words when it has been preempted", function()
    create()
    p.world.nodes:take_away(p.world.nodes:get(support.ZONE .. "/nodes/n"), "PREEMPTED")
    local _, patch = p.call("PATCH", ZONE .. "/nodes/n?updateMask=labels", { labels = {} })
    assert.is_truthy(
      patch.error.message:find(
        "Cloud TPU received a bad request. update is not supported while in state PREEMPTED [EID: 0x",
        1,
        true
      )
    )
    assert.are.equal(3, patch.error.code)
  end)

  it("shows the guest attributes of all workers, or of those that are named", function()
    create { acceleratorType = "v5litepod-16", runtimeVersion = "v2-alpha-tpuv5-lite" }
    local function ask(body)
      return p.call("POST", ZONE .. "/nodes/n:getGuestAttributes", body)
    end
    local _, all = ask { workerIds = { "" } }
    assert.are.equal(4, #all.guestAttributes)
    assert.are.equal("key of n/2", all.guestAttributes[3].queryValue.items[1].value)
    local _, one = ask { workerIds = { "2" }, queryPath = "hostkeys/" }
    assert.are.same({
      { namespace = "hostkeys", key = "ssh-ed25519", value = "key of n/2" },
    }, one.guestAttributes[1].queryValue.items)
    assert.are.equal(1, #one.guestAttributes)
    assert.are.equal(400, (ask { workerIds = { "4" } }))
  end)

  it("is maintained after those who hold its devices have had their time", function()
    p.call("POST", "/v2alpha1/" .. support.ZONE .. "/nodes?nodeId=n", {
      acceleratorType = "v5litepod-8",
      runtimeVersion = "v2-alpha-tpuv5-lite",
      autocheckpointEnabled = true,
    })
    p.settle()
    local target = "/v2alpha1/" .. support.ZONE .. "/nodes/n"
    assert.are.equal(200, (p.call("POST", target .. ":simulateMaintenanceEvent", { workerIds = { "0" } })))
    assert.are.equal("TERMINATE_ON_HOST_MAINTENANCE", p.machines.announced["n/0"])
    local _, node = p.call("GET", target)
    assert.are.equal("PENDING", node.upcomingMaintenance.maintenanceStatus)
    p.settle()
    _, node = p.call("GET", target)
    assert.are.equal("READY", node.state)
    assert.is_nil(node.upcomingMaintenance)
    assert.are.same({ "create n", "quiesce n", "restart n" }, p.machines.log)
    assert.are.equal("NONE", p.machines.announced["n/*"])
  end)

  it("answers a failure that is injected, once", function()
    p.world.faults:add { kind = "error", method = "nodes.*", status = "UNAVAILABLE", retry_after = 2 }
    local status, body, headers = p.call("GET", ZONE .. "/nodes")
    assert.are.equal(503, status)
    assert.are.equal("Internal error. Please try again", body.error.message)
    assert.are.equal("2", headers["Retry-After"])
    assert.are.equal(200, (p.call("GET", ZONE .. "/nodes")))
  end)
end)

describe("operations", function()
  it("can end long after what they began, well or not", function()
    local p = support.project()
    local function create(id)
      local body = { acceleratorType = "v5litepod-1", runtimeVersion = "v2-alpha-tpuv5-lite" }
      p.world.faults:add({ kind = "slow_operation", method = "nodes.create", seconds = 3600 })
      local status, operation = p.call("POST", ZONE .. "/nodes?nodeId=" .. id, body)
      assert.are.equal(200, status)
      return "/v2/" .. operation.name
    end
    local lagging = create("a")
    p.clock:advance(600)
    assert.are.equal("READY", select(2, p.call("GET", ZONE .. "/nodes/a")).state)
    assert.is_nil(select(2, p.call("GET", lagging)).done)
    p.clock:advance(3600)
    local _, ended = p.call("GET", lagging)
    assert.is_true(ended.done)
    assert.are.equal("READY", ended.response.state)
    p.world.faults:add({ kind = "stockout", name = "b" })
    lagging = create("b")
    p.clock:advance(600)
    assert.is_nil(select(2, p.call("GET", lagging)).done)
    p.clock:advance(3600)
    assert.are.equal(8, select(2, p.call("GET", lagging)).error.code)
  end)

  it("are listed, cancelled and deleted", function()
    local p = support.project()
    local _, operation = p.call("POST", QUEUED .. "?queuedResourceId=job", support.queued_resource(1))
    local _, list = p.call("GET", ZONE .. "/operations")
    assert.are.equal(operation.name, list.operations[1].name)
    assert.are.equal(200, (p.call("POST", "/v2/" .. operation.name .. ":cancel", "{}")))
    local _, cancelled = p.call("GET", "/v2/" .. operation.name)
    assert.is_true(cancelled.metadata.cancelRequested)
    assert.are.equal(200, (p.call("DELETE", "/v2/" .. operation.name)))
    assert.are.equal(404, (p.call("GET", "/v2/" .. operation.name)))
  end)
end)

describe("the catalogue", function()
  it("lists what a version can name, with a filter", function()
    local p = support.project { types = { ["us-central1-c"] = { "v2-8" } } }
    local _, body = p.call("GET", "/v2/projects/p/locations/us-central1-c/acceleratorTypes")
    assert.are.equal(1, #body.acceleratorTypes)
    local status
    status, body = p.call("GET", ZONE .. "/acceleratorTypes/v5litepod-16")
    assert.are.equal(200, status)
    assert.are.same({ { type = "V5LITE_POD", topology = "4x4" } }, body.acceleratorConfigs)
    _, body = p.call("GET", ZONE .. "/runtimeVersions?filter=version:lite")
    assert.are.equal("v2-alpha-tpuv5-lite", body.runtimeVersions[1].version)
    assert.are.equal(1, #body.runtimeVersions)
    assert.are.equal(400, (p.call("GET", ZONE .. "/runtimeVersions?filter=a+b+c")))
    _, body = p.call("GET", "/v2/projects/p/locations")
    assert.are.equal(17, #body.locations)
  end)

  it("offers what only GKE has when it is named, and to the version that has a name for it", function()
    local path = "/us-west4-a/acceleratorTypes/tpu7x-8"
    local function status(p, version)
      return (p.call("GET", ("/%s/projects/p/locations"):format(version) .. path))
    end
    local usual, named = support.project(), support.project { extra_types = { "tpu7x-8" } }
    assert.are.equal(404, status(usual, "v2alpha1"))
    assert.are.equal(200, status(named, "v2alpha1"))
    assert.are.equal(404, status(named, "v2"))
  end)

  it("answers what gcloud asks of version 1", function()
    local p = support.project()
    local zone = "/v1/" .. support.ZONE
    local status, body = p.call("GET", zone .. "/acceleratorTypes/v4-8")
    assert.are.equal(200, status)
    assert.are.same({ name = support.ZONE .. "/acceleratorTypes/v4-8", type = "v4-8" }, body)
    assert.are.equal(200, (p.call("GET", zone .. "/acceleratorTypes")))
    assert.are.equal(200, (p.call("GET", "/v1/projects/p/locations")))
    assert.are.equal(404, (p.call("GET", zone .. "/nodes")))
    for path, served in pairs({
      ["/v1/projects/p/locations"] = true,
      ["/v1/projects/p"] = false,
      ["/v1/projects/-/serviceAccounts/a@b:generateAccessToken"] = false,
      ["/v3/projects/p/locations"] = false,
    }) do
      assert.are.equal(served, p.service:serves(path), path)
    end
  end)
end)
