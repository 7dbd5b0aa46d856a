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

  it(
    "keeps a range of addresses that may have been asked for, and none that the service has chosen",
    function()
      local function range(first, second)
        local given = message()
        given.tpu.nodeSpec[1].node.cidrBlock, given.tpu.nodeSpec[2].node.cidrBlock = first, second
        return template.body(given, 0).tpu.nodeSpec[1].node.cidrBlock
      end
      assert.equal("10.2.0.0/29", range("10.2.0.0/29", "10.2.0.0/29"))
      assert.is_nil(range("10.2.0.0/29", "10.2.0.8/29"))
      assert.is_nil(range("10.2.0.0/20", "10.2.0.0/20"))
      assert.is_nil(range(json.null, json.null))
    end
  )

  describe("follows the schema:", function()
    local SERVICE = "the service sets it"
    local TIMES = "how long a request is valid becomes a duration: see the spec of it"
    --- What a request made again does not have as it was.
    local REASONS = {
      ["QueuedResource.createTime"] = SERVICE,
      ["QueuedResource.name"] = "the id is a parameter of the call",
      ["QueuedResource.state"] = SERVICE,
      ["QueueingPolicy.validAfterDuration"] = "its earliest moment has come",
      ["QueueingPolicy.validAfterTime"] = "its earliest moment has come",
      ["QueueingPolicy.validInterval"] = TIMES,
      ["QueueingPolicy.validUntilTime"] = TIMES,
      ["NodeSpec.multiNodeParams"] = "returned beside the body: its name depends on the version",
      ["NodeSpec.multisliceParams"] = "returned beside the body: its name depends on the version",
      ["Node.apiVersion"] = SERVICE,
      ["Node.createTime"] = SERVICE,
      ["Node.health"] = SERVICE,
      ["Node.healthDescription"] = SERVICE,
      ["Node.id"] = SERVICE,
      ["Node.multisliceNode"] = SERVICE,
      ["Node.name"] = "nodeId, or the prefix, says it",
      ["Node.networkEndpoints"] = SERVICE,
      ["Node.queuedResource"] = SERVICE,
      ["Node.schedulingConfig"] = "the tier, the reservation and the model of the queued resource say it",
      ["Node.state"] = SERVICE,
      ["Node.symptoms"] = SERVICE,
      ["Node.upcomingMaintenance"] = SERVICE,
    }
    local SAMPLES = {
      string = "text",
      bool = true,
      int32 = 3,
      int64 = "4",
      float = 1.5,
      timestamp = "2100-01-01T00:00:00Z",
      duration = "60s",
      any = { k = "v" },
      cidrBlock = "10.2.0.0/29",
    }

    --- Calls `found` for each way to one field: the names on it, the value at its end, and who has the field.
    local function walk(schema, name, path, found)
      for field, spec in pairs(schema.messages[name]) do
        local at = table.move(path, 1, #path, 1, {})
        at[#at + 1] = field
        local owner = name .. "." .. field
        local base = type(spec) == "string" and spec:match("^%w+")
        if REASONS[owner] then
          found(at, nil, owner)
        elseif base and schema.messages[base] and next(schema.messages[base]) then
          if spec:find("[]", 1, true) then
            at[#at + 1] = 1
          end
          walk(schema, base, at, found)
        else
          local value = type(spec) == "table" and spec[#spec] or SAMPLES[field] or SAMPLES[base] or {}
          if type(spec) == "string" and spec ~= base then
            value = spec:find("{}", 1, true) and { k = value } or { value }
          end
          found(at, value, owner)
        end
      end
    end

    local function at(message_, path)
      for _, key in ipairs(path) do
        message_ = type(message_) == "table" and message_[key]
      end
      return message_ or nil
    end

    for _, version in ipairs({ "v2", "v2alpha1" }) do
      it(version, function()
        local schema = require("ciranda.data.tpu_schema_" .. version)
        local fields, unused = 0, {}
        walk(schema, "QueuedResource", {}, function(path, value, owner)
          if value == nil then
            unused[owner] = true
            return
          end
          fields = fields + 1
          -- A message with this field, and what every one has.
          local given = {
            name = "projects/p/locations/z/queuedResources/job",
            tpu = { nodeSpec = { { parent = "projects/p/locations/z", nodeId = "job", node = {} } } },
          }
          local place = given
          for i = 1, #path - 1 do
            place[path[i]] = place[path[i]] or {}
            place = place[path[i]]
          end
          place[path[#path]] = value
          local body = template.body(given, 0)
          assert.same(value, at(body, path), table.concat(path, "."))
          -- In a list what is empty keeps the place of what is not.
          for i = #path, 1, -1 do
            local list = type(path[i]) == "number" and at(given, table.move(path, 1, i - 1, 1, {}))
            if list and path[i - 1] ~= "nodeSpec" and type(list[1]) == "table" then
              table.insert(list, 1, {})
              local moved = table.move(path, 1, #path, 1, {})
              moved[i] = 2
              assert.same(value, at(template.body(given, 0), moved), table.concat(path, "."))
              break
            end
          end
        end)
        assert.is_true(fields >= 20, fields)
        local other = version == "v2" and "multiNodeParams" or "multisliceParams"
        for owner in pairs(REASONS) do
          assert.is_true(unused[owner] or owner == "NodeSpec." .. other, owner .. " is in no request")
        end
      end)
    end
  end)
end)
