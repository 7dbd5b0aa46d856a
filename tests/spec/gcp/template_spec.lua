local json = require("ciranda.io.json")
local template = require("ciranda.gcp.template")

describe("gcp.template", function()
  local function message(more)
    local all = {
      name = "projects/p/locations/z/queuedResources/job",
      createTime = "2026-01-01T00:00:00Z",
      state = { state = "SUSPENDED", suspendedData = {} },
      spot = {},
      tpu = {
        nodeSpec = {
          {
            parent = "projects/p/locations/z",
            nodeId = "train-0",
            node = {
              name = "projects/p/locations/z/nodes/train-0",
              state = "PREEMPTED",
              health = "HEALTHY",
              acceleratorType = "v5litepod-16",
              acceleratorConfig = { type = "V5LITE_POD", topology = "4x4" },
              runtimeVersion = "r",
              networkConfig = { network = "default", enableExternalIps = false },
              networkConfigs = { { network = "default" } },
              networkEndpoints = { { ipAddress = "10.0.0.1" } },
              schedulingConfig = { spot = true },
              labels = { team = "night" },
              metadata = { ["startup-script"] = "#!/bin/sh\n" },
              description = json.null,
              tags = json.array({}),
            },
          },
          { parent = "projects/p/locations/z", nodeId = "train-1", node = {} },
        },
      },
    }
    for name, value in pairs(more or {}) do
      all[name] = value
    end
    return all
  end

  it("keeps what was asked for, and nothing that the service has added", function()
    local body, nodes, multi = template.body(message(), 0)
    assert.same({
      spot = {},
      tpu = {
        nodeSpec = {
          {
            parent = "projects/p/locations/z",
            node = {
              acceleratorConfig = { type = "V5LITE_POD", topology = "4x4" },
              runtimeVersion = "r",
              networkConfig = { network = "default", enableExternalIps = false },
              labels = { team = "night" },
              metadata = { ["startup-script"] = "#!/bin/sh\n" },
            },
          },
        },
      },
    }, body)
    assert.same({ "train-0", "train-1" }, nodes)
    assert.same({ nodeCount = 2, nodeIdPrefix = "train" }, multi)
    assert.equal("{}", json.encode(body.spot))
  end)

  it("keeps the name of an only slice, and several networks", function()
    local one = message()
    one.tpu.nodeSpec[2] = nil
    one.tpu.nodeSpec[1].node.networkConfigs[2] = { network = "other" }
    local body, nodes, multi = template.body(one, 0)
    assert.equal("train-0", body.tpu.nodeSpec[1].nodeId)
    assert.same({ "train-0" }, nodes)
    assert.is_nil(multi)
    assert.equal(2, #body.tpu.nodeSpec[1].node.networkConfigs)
    assert.is_nil(body.tpu.nodeSpec[1].node.networkConfig)
  end)

  it(
    "makes a request valid for as long as before, and one whose earliest moment has come valid at once",
    function()
      local function policy(given)
        return template.body(message({ queueingPolicy = given }), 0).queueingPolicy
      end
      assert.same({ validUntilDuration = "21600s" }, policy({ validUntilTime = "2026-01-01T06:00:00Z" }))
      assert.same(
        { validUntilDuration = "3600s" },
        policy({ validInterval = { startTime = "2026-01-01T00:30:00Z", endTime = "2026-01-01T01:00:00Z" } })
      )
      assert.same({ validUntilDuration = "60s" }, policy({ validUntilDuration = "60s" }))
      assert.is_nil(policy({ validAfterTime = "2026-01-01T00:30:00Z" }))
    end
  )

  it("refuses what cannot be asked for as it was", function()
    local odd = message()
    odd.tpu.nodeSpec[2].nodeId = "other"
    local ok, problem = pcall(template.body, odd, 0)
    assert.is_false(ok)
    assert.same({ "unsupported", "job" }, { problem.code, problem.target })
    assert.matches("its nodes are not train-0, train-1", problem.message, 1, true)
    local over = message({ runDuration = { terminationTime = "2026-01-02T00:00:00Z" } })
    assert.is_true(pcall(template.body, over, 0))
    ok, problem = pcall(template.body, over, 2000000000)
    assert.is_false(ok)
    assert.matches("it was to run until 2026-01-02T00:00:00Z", problem.message, 1, true)
  end)
end)
