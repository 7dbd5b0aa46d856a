local errors = require("ciranda.sim.errors")
local json = require("ciranda.io.json")
local schema = require("ciranda.sim.schema")

local function refusal(fn, ...)
  local ok, err = pcall(fn, ...)
  assert.is_false(ok)
  assert.is_true(errors.is(err), tostring(err))
  return err
end

for _, version in ipairs { "v2", "v2alpha1" } do
  describe("the tables of the TPU API " .. version, function()
    local data = require("ciranda.data.tpu_schema_" .. version)
    local scalars = {}
    for name in ("string bool int32 int64 float timestamp duration any"):gmatch "%w+" do
      scalars[name] = true
    end

    it("name no message that they do not define", function()
      for message, fields in pairs(data.messages) do
        for field, spec in pairs(fields) do
          if type(spec) == "string" then
            local base = spec:match "^%w+"
            assert.is_truthy(scalars[base] or data.messages[base], message .. "." .. field)
          else
            assert.is_true(#spec >= 1, message .. "." .. field)
          end
        end
      end
      for name, method in pairs(data.methods) do
        assert.is_truthy(data.messages[method.response], name)
        assert.is_truthy(not method.body or data.messages[method.body], name)
        for parameter, kind in pairs(method.query or {}) do
          assert.is_truthy(scalars[kind:match "^%w+"], name .. " " .. parameter)
        end
      end
    end)

    it("have a handler for every method", function()
      local support = dofile(debug.getinfo(1, "S").source:match "@(.*/)" .. "support.lua")
      local project = support.project()
      for name, method in pairs(data.methods) do
        local path = "/"
          .. version
          .. "/"
          .. method.path:gsub("{project}", "p"):gsub("{location}", "us-west4-a"):gsub("{%w+}", "nothing")
        local status, body = project.call(method.verb, path)
        assert.is_true(status == 200 or status == 404 or status == 400, name .. " " .. status)
        assert.is_falsy(((body.error or {}).message or ""):find "Method not found", name)
      end
    end)
  end)
end

describe("reading a message", function()
  local v2, alpha = schema.load "v2", schema.load "v2alpha1"

  it("understands both spellings of a field's name", function()
    local snake =
      json.decode [[{"accelerator_type": "v4-8", "network_config": {"enable_external_ips": true}}]]
    local camel = json.decode [[{"acceleratorType": "v4-8", "networkConfig": {"enableExternalIps": true}}]]
    local wanted = { acceleratorType = "v4-8", networkConfig = { enableExternalIps = true } }
    assert.are.same(wanted, v2:read("Node", snake))
    assert.are.same(wanted, v2:read("Node", camel))
  end)

  it("refuses a field that the version does not have, and says where", function()
    local err = refusal(v2.read, v2, "QueuedResource", json.decode [[{"bestEffort": {}}]], "queued_resource")
    assert.are.equal("INVALID_ARGUMENT", err.status)
    assert.is_truthy(err.message:find([[Unknown name "bestEffort" at 'queued_resource']], 1, true))
    assert.has_no_error(function()
      alpha:read("QueuedResource", json.decode [[{"bestEffort": {}}]], "queued_resource")
    end)
    local deep = json.decode [[{"tpu": {"node_spec": [{"node": {"color": "red"}}]}}]]
    err = refusal(v2.read, v2, "QueuedResource", deep, "queued_resource")
    assert.is_truthy(err.message:find("at 'queued_resource.tpu.node_spec[0].node'", 1, true))
  end)

  it("tells the two spellings of the Multislice field apart", function()
    local multislice = json.decode [[{"multisliceParams": {"nodeCount": 2}}]]
    local multinode = json.decode [[{"multiNodeParams": {"nodeCount": 2}}]]
    assert.are.equal(2, v2:read("NodeSpec", multislice).multisliceParams.nodeCount)
    assert.are.equal(2, alpha:read("NodeSpec", multinode).multiNodeParams.nodeCount)
    refusal(v2.read, v2, "NodeSpec", multinode)
    refusal(alpha.read, alpha, "NodeSpec", multislice)
    refusal(alpha.read, alpha, "NodeSpec", json.decode [[{"multinodeParams": {"nodeCount": 2}}]])
  end)

  it("refuses wrong values and names their type", function()
    local cases = {
      { "Node", [[{"acceleratorType": 4}]], "TYPE_STRING" },
      { "Node", [[{"state": "SLEEPING"}]], "TYPE_ENUM" },
      { "Node", [[{"state": 99}]], "TYPE_ENUM" },
      { "Node", [[{"tags": "one"}]], "TYPE_STRING" },
      { "Node", [[{"tags": {}}]], "TYPE_STRING" },
      { "Node", [[{"labels": ["a"]}]], "Map" },
      { "Node", [[{"labels": {"a": 1}}]], "TYPE_STRING" },
      { "Node", [[{"networkConfig": []}]], "NetworkConfig" },
      { "Node", [[{"networkConfig": {"enableExternalIps": "yes"}}]], "TYPE_BOOL" },
      { "Node", [[{"createTime": "yesterday"}]], "Timestamp" },
      { "Guaranteed", [[{"minDuration": "1h"}]], "Duration" },
      { "MultisliceParams", [[{"nodeCount": "two"}]], "TYPE_INT32" },
      { "MultisliceParams", [[{"nodeCount": 2147483648}]], "TYPE_INT32" },
      { "MultisliceParams", [[{"nodeCount": 1.5}]], "TYPE_INT32" },
      {
        "Node",
        [[{"description": "a", "description": "b", "health_description": "x", "healthDescription": "y"}]],
        "oneof",
      },
    }
    for _, case in ipairs(cases) do
      local err = refusal(v2.read, v2, case[1], json.decode(case[2]))
      assert.is_truthy(err.message:find(case[3], 1, true), case[2] .. ": " .. err.message)
    end
  end)

  it("takes numbers as text, enums as numbers, and null as absent", function()
    assert.are.same({ nodeCount = 3 }, v2:read("MultisliceParams", json.decode [[{"nodeCount": "3"}]]))
    assert.are.equal("PREEMPTED", v2:read("Node", json.decode [[{"state": 11}]]).state)
    assert.are.same(
      {},
      v2:read("Node", json.decode [[{"state": null, "labels": {"a": null}, "tags": []}]]).labels
    )
    local big = alpha:read("BootDiskConfig", json.decode [[{"diskSizeGb": "9007199254740993"}]])
    assert.are.equal(9007199254740993, big.diskSizeGb)
  end)
end)

describe("writing a message", function()
  local v2 = schema.load "v2"

  it("leaves defaults out and writes int64 as text", function()
    local text = json.encode(v2:write("Node", {
      id = 6502082742571311568,
      description = "",
      tags = {},
      labels = {},
      state = "STATE_UNSPECIFIED",
      health = "HEALTHY",
      networkConfig = { enableExternalIps = false, network = "default" },
    }))
    assert.are.equal(
      [[{"health":"HEALTHY","id":"6502082742571311568","networkConfig":{"network":"default"}}]],
      text
    )
  end)

  it("writes a message without fields as an object, and leaves out what the version lacks", function()
    assert.are.equal(
      [[{"spot":{}}]],
      json.encode(v2:write("QueuedResource", { spot = {}, provisioningModel = "SPOT" }))
    )
    local node = { apiVersion = "V2", acceleratorConfig = { type = "TPU7X", topology = "2x2x1" } }
    for _, numbers in ipairs({ false, true }) do
      assert.are.equal(
        [[{"acceleratorConfig":{"topology":"2x2x1"}}]],
        json.encode(v2:write("Node", { acceleratorConfig = node.acceleratorConfig }, numbers))
      )
      assert.is_nil(schema.load("v2alpha1"):write("Node", node, numbers).apiVersion)
    end
  end)

  it("writes enums as numbers when asked", function()
    local value = v2:write("Node", { state = "PREEMPTED", health = "UNHEALTHY_MAINTENANCE" }, true)
    assert.are.equal(11, value.state)
    assert.are.equal(5, value.health)
  end)
end)
