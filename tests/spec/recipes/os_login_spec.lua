-- Logging in where OS Login is on: by the node's own metadata, and by the project's.
local cloud_support = dofile("tests/spec/recipes/cloud_support.lua")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local client = dofile("tests/spec/sim/client.lua")

describe("OS Login, on the simulated cloud", function()
  local cloud

  setup(function()
    cloud = cloud_support.start({ slices = 1, type = "v5litepod-4", prefix = "job" })
  end)

  teardown(function()
    cloud:stop()
  end)

  it("takes the key into the account's profile and logs in as the user that it names", function()
    local made =
      cloud:run("tpu_vm", "create", "own", "--accelerator-type=v5litepod-4", "--metadata=enable-oslogin=TRUE")
    assert.equal(0, made.code, made.err)
    local result = cloud:run("ssh", "own", "--command=whoami")
    assert.equal(0, result.code, result.err)
    assert.matches("^owner_example_com\n$", result.out)
    assert.matches("OS Login is on: the key belongs to owner@", result.err, 1, true)
    assert.matches("Logging in as owner_example_com", result.err, 1, true)
    local _, node = client.curl(cloud.simulator, "GET", "/v2/" .. client.PARENT .. "/nodes/own")
    assert.is_nil(node.metadata["ssh-keys"]) -- where they would count for nothing
    local other = cloud:run("ssh", "own", "--ssh-user=somebody", "--command=whoami")
    assert.equal(1, other.code) -- who was asked for is not changed for another
    assert.matches("lets this key in as owner_example_com, not as somebody", other.err, 1, true)
  end)

  it("is found out from the project when a worker refuses the key", function()
    local before = cloud:run("ssh", "job", "--command=whoami")
    assert.equal(0, before.code, before.err)
    assert.matches("adding it to the nodes' metadata", before.err, 1, true)
    local user = before.out
    local compute = cloud.simulator.env.CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE
      .. "projects/simulated-project"
    local function turn(value)
      local _, project = client.curl(cloud.simulator, "GET", compute)
      local status, answer = client.curl(cloud.simulator, "POST", compute .. "/setCommonInstanceMetadata", {
        fingerprint = project.commonInstanceMetadata.fingerprint,
        items = { { key = "enable-oslogin", value = value } },
      })
      assert.equal(200, status, json.encode(answer))
    end
    turn("TRUE")
    client.eventually("OS Login", function()
      local after = cloud:run("ssh", "job", "--command=whoami")
      assert.equal(0, after.code, after.err)
      return after.out:find("^owner_example_com\n$")
    end)
    fs.write(cloud.root .. "/code/main.sh", "whoami\n")
    local run = cloud:run("multihost_runner", "--TPU_PREFIX=job", "--COMMAND=bash main.sh", "--RUN_NAME=r")
    assert.equal(0, run.code, run.err)
    assert.matches("^.-owner_example_com\n", run.out)
    -- The journal knows whom the run logs in as, for whoever attaches to it.
    local journal = fs.read(cloud.root .. "/state/ciranda/runs/r/journal.jsonl")
    assert.matches('"user":"owner_example_com"', journal, 1, true)
    turn("FALSE")
    client.eventually("OS Login off", function()
      return cloud:run("ssh", "job", "--command=whoami").out == user
    end)
  end)
end)
