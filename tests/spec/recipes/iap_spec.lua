-- Workers without an external address: ssh, scp and a runner reach them through the relay of the simulated cloud.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/cloud_support.lua")

describe("workers without an external address", function()
  local cloud

  setup(function()
    cloud = support.start({ slices = 1, type = "v5litepod-16", prefix = "job", external = false })
    cloud:run("ssh", "job", "--internal-ip", "--command=true") -- adds the key
  end)

  teardown(function()
    cloud:stop()
  end)

  local function control(path)
    return cloud.simulator.env.CIRANDA_SIM_URL .. "/sim/v1/" .. path
  end

  local function fault(entry)
    assert.equal(200, http.post(control("faults"), entry).status)
  end

  local first = 0

  local function requests()
    return http.get(control("requests?since=" .. first)):json().requests
  end

  --- How many WebSockets the relay has been asked for in this test.
  local function tunnels()
    local count = 0
    for _, entry in ipairs(requests()) do
      if entry.method == "iap.connect" or entry.method == "iap.reconnect" then
        count = count + 1
      end
    end
    return count
  end

  before_each(function()
    http.request({ url = control("faults"), method = "DELETE" })
    local list = requests()
    first = #list > 0 and list[#list].id or first
  end)

  it("are reached through IAP when nothing is said, and the choice is told", function()
    local result = cloud:run("ssh", "job", "--worker=all", "--command=echo up")
    assert.equal(0, result.code, result.err)
    assert.matches("worker[0-3] (4)", result.out, 1, true)
    assert.matches("Connecting through IAP: no external addresses\n", result.err, 1, true)
    assert.equal(4, tunnels())
    result = cloud:run("ssh", "job", "--tunnel-through-iap", "--command=hostname")
    assert.equal(0, result.code, result.err)
    assert.matches("Connecting through IAP\n", result.err, 1, true)
    assert.equal(5, tunnels())
  end)

  it("are reached by internal addresses when these are asked for, or IAP is not", function()
    for _, flag in ipairs({ "--internal-ip", "--INTERNAL_IP=true", "--tunnel-through-iap=false" }) do
      local result = cloud:run("ssh", "job", flag, "--command=true")
      assert.equal(0, result.code, result.err)
    end
    assert.equal(0, tunnels())
    local result = cloud:run("ssh", "job", "--internal-ip", "--tunnel-through-iap", "--command=true")
    assert.equal(2, result.code)
    assert.matches("exclude each other", result.err)
    result = cloud:run("ssh", "--HOSTS=127.0.0.1", "--tunnel-through-iap", "--command=true")
    assert.equal(2, result.code)
    assert.matches("ProxyJump", result.err)
  end)

  it("lose no byte while their tunnels are cut", function()
    fault({ kind = "relay_drop", bytes = 250000, count = 1000000 })
    local code = cloud.root .. "/code"
    fs.write(code .. "/in", require("ciranda.io.crypto").random(1 << 20))
    local result = cloud:run("scp", "in", "job:copy", "--worker=1-2")
    assert.equal(0, result.code, result.err)
    result = cloud:run("scp", "job:copy", "out", "--worker=2")
    assert.equal(0, result.code, result.err)
    assert(fs.read(code .. "/in") == fs.read(code .. "/out"))
    assert(tunnels() > 10, "only " .. tunnels() .. " WebSockets")
  end)

  it("say what is missing when the permission is, or are reached from inside all the same", function()
    fault({ kind = "error", method = "iap.connect", status = "PERMISSION_DENIED", count = 1000 })
    local result = cloud:run("ssh", "job", "--tunnel-through-iap", "--command=true")
    assert.equal(1, result.code)
    assert.matches("iap.tunnelInstances.accessViaIAP", result.err, 1, true)
    assert.matches("job-w-0", result.err, 1, true)
    result = cloud:run("ssh", "job", "--worker=all", "--command=echo up")
    assert.equal(0, result.code, result.err)
    assert.matches("Connecting by internal addresses", result.err, 1, true)
  end)

  it("are logged in to by OpenSSH through a command of ours", function()
    local result = cloud:run("ssh", "job", "--worker=3", "--", "echo in a session; hostname")
    assert.equal(0, result.code, result.err)
    assert.matches("in a session\n.*%-w%-3\n", result.out)
    assert.equal(2, tunnels()) -- ours, which finds out the way, and OpenSSH's
  end)

  it("run what a runner starts, through cuts and a token that has expired", function()
    fault({ kind = "relay_close", code = 4004, bytes = 60000, count = 3 })
    fault({ kind = "relay_drop", bytes = 60000, count = 1000000 })
    local result = cloud:run(
      "multihost_runner",
      "--TPU_PREFIX=job",
      "--RUN_NAME=through",
      "--COMMAND=head -c 200000 /dev/zero | tr '\\0' x; echo; echo $CIRANDA_WORKER_ID of $CIRANDA_NUM_WORKERS"
    )
    assert.equal(0, result.code, result.err)
    assert.matches("Connecting through IAP", result.err, 1, true)
    for worker = 0, 3 do
      local log = fs.read(("%s/through/output_slice_0000_worker_%04d.txt"):format(cloud.root, worker))
      assert.matches(("x"):rep(1000) .. "\n" .. worker .. " of 4\n", log, 1, true)
    end
    assert(tunnels() > 4)
  end)

  it("are reached by the recipe iap, which ends with the worker's side", function()
    local name = cloud:run("ssh", "job", "--worker=1", "--command=hostname").out:match("%S+")
    local argv = cloud:command({ "iap", name, cloud.simulator.env.CIRANDA_SSH_PORT })
    argv.stdin, argv.stdout = process.PIPE, process.PIPE
    local program <close> = process.spawn(argv)
    -- What is no packet is the end of it for sshd, while standard input stays open.
    program.stdin:write("SSH-2.0-nobody\r\n" .. ("\255"):rep(1000))
    assert.matches("^SSH%-2%.0%-OpenSSH", program.stdout:read_all())
    assert.equal(0, program:wait().code)
    argv.stdin, argv.stdout, argv.timeout = "SSH-2.0-nobody\r\n", nil, 60
    assert.equal(0, process.run(argv).code)
    local result = cloud:run("iap", name, "1")
    assert.equal(1, result.code)
    assert.matches("35.235.240.0/20", result.err, 1, true)
    result = cloud:run("iap", "t1v-n-none-w-0")
    assert.equal(1, result.code)
    assert.matches("instance of zone", result.err, 1, true)
  end)
end)
