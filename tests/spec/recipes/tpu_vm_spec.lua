-- tpu_vm: single nodes on the simulated cloud.
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/cloud_support.lua")

describe("tpu_vm", function()
  local cloud

  setup(function()
    cloud = support.start({ slices = 2, type = "v5litepod-4", prefix = "job", quota = { v5litepod = 16 } })
  end)

  teardown(function()
    cloud:stop()
  end)

  local function create(name, ...)
    return cloud:run("tpu_vm", "create", name, "--accelerator-type=v5litepod-4", ...)
  end

  local function field(name, path)
    return (cloud:run("tpu_vm", "describe", name, ("--format=value(%s)"):format(path)).out:gsub("\n$", ""))
  end

  it("creates, stops, starts and deletes a node", function()
    local words = {
      "one",
      "--version=v2-alpha-tpuv5-lite",
      "--autocheckpoint-enabled",
      "--labels=team=x",
      "--metadata=k=v",
      "--tags=a,b",
      "--spot",
    }
    local made = create(table.unpack(words))
    assert.equal(0, made.code, made.err)
    assert.matches("one is READY\n$", made.err)
    for path, value in pairs({
      state = "READY",
      autocheckpointEnabled = "true",
      ["labels.team"] = "x",
      ["metadata.k"] = "v",
      ["tags[1]"] = "b",
      ["schedulingConfig.spot"] = "true",
      runtimeVersion = "v2-alpha-tpuv5-lite",
      ["name.basename(),acceleratorType"] = "one\tv5litepod-4",
    }) do
      assert.equal(value, field("one", path), path)
    end
    for _, step in ipairs({ { "stop", "STOPPED" }, { "start", "READY" } }) do
      local result = cloud:run("tpu_vm", step[1], "one")
      assert.equal(0, result.code, result.err)
      assert.matches(("one is %s\n$"):format(step[2]), result.err)
      assert.equal(step[2], field("one", "state"))
    end
    local made_at = field("one", "createTime")
    local again = create(table.unpack(words))
    assert.equal(0, again.code, again.err)
    local other = create("one", "--version=v2-alpha-tpuv5-lite")
    assert.equal(1, other.code)
    assert.matches("was another request, and is READY: delete it first", other.err, 1, true)
    assert.equal(made_at, field("one", "createTime"))
    assert.matches("one %(node%) +us%-west4%-a +%d+[sm] +%d+ +READY +a job +keep", cloud:run("gc").out)
    assert.equal(0, cloud:run("tpu_vm", "delete", "one").code)
    local gone = cloud:run("tpu_vm", "delete", "one")
    assert.equal(0, gone.code)
    assert.matches("There is no node one", gone.err, 1, true)
    assert.equal(1, cloud:run("tpu_vm", "describe", "one").code)
  end)

  it("lists with gcloud's columns, filters and formats", function()
    local lines = {}
    for line in cloud:run("tpu_vm", "list").out:gmatch("[^\n]+") do
      lines[#lines + 1] = line:gsub(" +", " ")
    end
    assert.same({
      "NAME ZONE ACCELERATOR_TYPE TYPE TOPOLOGY NETWORK RANGE STATUS",
      "job-0 us-west4-a v5litepod-4 V5LITE_POD 2x2 default - READY",
      "job-1 us-west4-a v5litepod-4 V5LITE_POD 2x2 default - READY",
    }, lines)
    local values = cloud:run("tpu_vm", "list", "--zone=-", "--format=value(name.basename(),state)")
    assert.equal("job-0\tREADY\njob-1\tREADY\n", values.out, values.err)
    local filtered = cloud:run("tpu_vm", "list", "--filter=name=job-1 AND state:REA", "--format=json")
    local list = json.decode(filtered.out)
    assert.equal(1, #list)
    assert.matches("/nodes/job%-1$", list[1].name)
    local none = cloud:run("tpu_vm", "list", "--filter=STOPPED", "--format=json")
    assert.same({ "[]\n", "" }, { none.out, none.err })
    local misspelt = cloud:run("tpu_vm", "list", "--filter=stat=READY", "--format=json")
    assert.same({ 0, "[]\n" }, { misspelt.code, misspelt.out })
    assert.matches("nothing in the list has a field stat\n", misspelt.err)
  end)

  it(
    "notes what it makes, so that gc finds it, keeps it while it lives, and deletes it when asked",
    function()
      assert.equal(0, create("noted", "--async").code)
      assert.matches("noted %(node%) +us%-west4%-a +%d+[sm] +%d+ +%u+ +a job +keep", cloud:run("gc").out)
      local result = cloud:run("gc", "--DELETE=true", "--ALL=true")
      assert.equal(0, result.code, result.err)
      assert.matches("Deleting node noted", result.err, 1, true)
      assert.equal("Nothing that our runs have made is left.\n", cloud:run("gc").out)
      local gone = cloud:run("tpu_vm", "describe", "noted")
      assert.equal(1, gone.code)
      assert.matches("there is no node noted in zone us-west4-a of project", gone.err, 1, true)
    end
  )

  it("does not take a slice out of a queued resource by mistake", function()
    local result = cloud:run("tpu_vm", "delete", "job-1")
    assert.equal(2, result.code)
    assert.matches("belongs to queued resource job", result.err, 1, true)
    assert.equal("READY", field("job-1", "state"))
  end)

  it("passes the API's refusals on", function()
    local quota = cloud:run("tpu_vm", "create", "big", "--accelerator-type=v5litepod-32")
    assert.equal(1, quota.code)
    assert.matches("[Qq]uota", quota.err)
    local stopped = cloud:run("tpu_vm", "start", "job-0")
    assert.equal(1, stopped.code)
    assert.matches("start", stopped.err, 1, true)
  end)

  it("refuses mistakes before anything is asked", function()
    for want, arguments in pairs({
      ["none of create, list"] = { "remove", "x" },
      ["which node? ciranda tpu_vm stop NAME"] = { "stop" },
      ["--spot is for create"] = { "delete", "x", "--spot" },
      ["it takes json, value(FIELD,...)"] = { "list", "--format=yaml" },
      ["node-count"] = { "create", "x", "--node-count=2" },
      ["v5litepod-5"] = { "create", "x", "--accelerator-type=v5litepod-5" },
      ["AND and OR together need parentheses"] = { "list", "--filter=a=1 AND b=2 OR c=3" },
    }) do
      local result = cloud:run("tpu_vm", table.unpack(arguments))
      assert.equal(2, result.code, want .. ": " .. result.err)
      assert.matches(want, result.err, 1, true)
    end
  end)
end)
