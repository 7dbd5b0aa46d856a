-- devices: on simulated slices, with a stand-in for jax on their workers that says what it is told to.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/cloud_support.lua")
local uv = require("luv")

describe("devices", function()
  local cloud

  --- What jax sees on some workers.
  local function sees(node, worker, seen)
    local text = json.encode(seen)
    local result = cloud:run(
      "ssh",
      "job",
      "--node=" .. node,
      "--worker=" .. worker,
      ("--command=printf %%s '%s' > ~/fake_jax.json"):format(text)
    )
    assert.equal(0, result.code, result.err)
  end

  local function good_everywhere()
    sees("all", "all", { ["local"] = 4, slices = { ["0"] = 16, ["1"] = 16 } })
  end

  local function install(version, ...)
    local result = cloud:run(
      "ssh",
      "job",
      (
        "--command=rm -rf fake/*.dist-info; for p in jax jaxlib libtpu; do mkdir -p fake/$p-1.dist-info; "
        .. "printf 'Metadata-Version: 2.1\nName: %%s\nVersion: %s\n' $p > fake/$p-1.dist-info/METADATA; done"
      ):format(version),
      ...
    )
    assert.equal(0, result.code, result.err)
  end

  local function devices(...)
    return cloud:run("devices", "job", "--PYTHON=env PYTHONPATH=fake python3", ...)
  end

  setup(function()
    cloud = support.start({ slices = 2, type = "v5litepod-16", prefix = "job" })
    local source = fs.realpath("tests/fixtures/fake_jax")
    local result = cloud:run("scp", source, "job:fake", "--recurse", "--node=all", "--worker=all")
    assert.equal(0, result.code, result.err)
    install("9.9.1", "--node=all", "--worker=all")
  end)

  teardown(function()
    cloud:stop()
  end)

  it("is content when JAX is the same and sees every chip everywhere", function()
    good_everywhere()
    local result = devices()
    assert.equal(0, result.code, result.err)
    assert.matches("jax 9.9.1, jaxlib 9.9.1, libtpu 9.9.1 on all 8 workers", result.err, 1, true)
    assert.matches("All 32 devices (TPU v5 lite) of 2 slices are seen by all 8 workers", result.err, 1, true)
    assert.matches("0 +job%-0 +4 +16 +16 of 16 +32 +%-\n1 +job%-1 +4 +16 +16 of 16 +32 +%-\n", result.out)
  end)

  it("names a slice that another does not see", function()
    sees("0", "all", { ["local"] = 4, slices = { ["0"] = 16 } })
    sees("1", "all", { ["local"] = 4, slices = { ["0"] = 16, ["1"] = 16 } })
    local result = devices()
    assert.equal(1, result.code)
    assert.matches(
      "JAX does not see all 32 devices; slice 1 (job-1): slice 0 does not see it\n",
      result.err,
      1,
      true
    )
    assert.not_matches("slice 0 (job-0)", result.err, 1, true)
  end)

  it("names the slice whose chips are missing", function()
    good_everywhere()
    sees("1", "2", { ["local"] = 3, slices = { ["0"] = 16, ["1"] = 15 } })
    local result = devices()
    assert.equal(1, result.code)
    assert.matches("slice 1 (job-1): 15 of its 16 devices are there", result.err, 1, true)
  end)

  it("tells why JAX did not start, and does not wait long for those that wait for it", function()
    sees("all", "all", { ["local"] = 4, slices = { ["0"] = 16, ["1"] = 16 }, sleep = 4714 })
    sees("0", "1", { ["local"] = 4, slices = {}, fail = "The TPU is already in use by process 77" })
    local began = uv.hrtime()
    local result = devices()
    assert.equal(1, result.code)
    assert.is_true(uv.hrtime() - began < 200e9)
    assert.matches(
      "slice0/worker1: exit status 1: The TPU is already in use by process 77",
      result.err,
      1,
      true
    )
    assert.matches(
      "slice0/worker[0,2-3],slice1/worker[0-3]: ended, since it would have waited for the others in vain",
      result.err,
      1,
      true
    )
    assert.matches("JAX did not start everywhere; slice 0 (job-0)", result.err, 1, true)
    good_everywhere()
    local left =
      cloud:run("ssh", "job", "--node=all", "--worker=all", "--command=pgrep -u $(id -u) -fc 'pytho[n]3 -$'")
    assert.matches("%(8%): exit status 1\n%-+\n0\n", left.out)
  end)

  it("ends when JAX takes too long", function()
    sees("all", "all", { ["local"] = 4, slices = {}, sleep = 4715 })
    local result = devices("--timeout=2")
    assert.equal(1, result.code)
    assert.matches("slice[0-1]/worker[0-3]: it had not ended in time and was stopped", result.err, 1, true)
  end)

  it("does not start JAX where its versions differ or it is missing", function()
    good_everywhere()
    install("9.9.2", "--node=1", "--worker=3")
    local result = devices()
    assert.equal(1, result.code)
    assert.matches("slice0/worker[0-3],slice1/worker[0-2]: jax 9.9.1", result.err, 1, true)
    assert.matches("slice1/worker3: jax 9.9.2", result.err, 1, true)
    assert.matches("slice 1 (job-1): its versions are not those of most", result.err, 1, true)
    install("9.9.1", "--node=1", "--worker=3")
    local none = cloud:run("devices", "job", "--PYTHON=python3 -I")
    assert.equal(1, none.code)
    assert.matches("no jax for python3 -I", none.err, 1, true)
    assert.matches("slice 0 (job-0): jax is missing; slice 1 (job-1): jax is missing", none.err, 1, true)
  end)

  it("prints a record a slice with --json", function()
    good_everywhere()
    local result = cloud:run("--json", "devices", "job", "--PYTHON=env PYTHONPATH=fake python3")
    local seen = {}
    for line in result.out:gmatch("[^\n]+") do
      local record = json.decode(line)
      if record.event == "slice" then
        seen[record.name] = record.present .. "/" .. record.devices .. "/" .. record.seen
      end
    end
    assert.same({ ["job-0"] = "16/16/32", ["job-1"] = "16/16/32" }, seen)
  end)

  it("refuses a part of a slice, which JAX would wait for", function()
    local result = devices("--worker=0")
    assert.equal(2, result.code)
    assert.matches("JAX waits for every worker of a slice", result.err, 1, true)
  end)

  it("asks one slice of several alone, which would wait for the others", function()
    sees("1", "all", { ["local"] = 4, slices = { ["1"] = 16 }, waits = true })
    local result = devices("--node=1", "--timeout=60")
    assert.equal(0, result.code, result.err)
    assert.matches("All 16 devices (TPU v5 lite) of 1 slice are seen by all 4 workers", result.err, 1, true)
  end)

  it("names a slice whose node is gone, and does not start JAX", function()
    good_everywhere()
    local deleted = cloud:run("tpu_vm", "delete", "job-1", "--force")
    assert.equal(0, deleted.code, deleted.err)
    local result = devices()
    assert.equal(1, result.code)
    assert.matches("job-1 is missing: there is no such node", result.err, 1, true)
    assert.matches("JAX was not started", result.err, 1, true)
  end)
end)
