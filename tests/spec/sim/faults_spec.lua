-- What goes wrong in a simulated cloud, as foreign clients see it.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "client.lua")

local PARENT = support.PARENT
local curl, eventually = support.curl, support.eventually

-- Whether a node has been in a state since event number `after`, however short a time.
local function was(simulator, id, state, after)
  local list = support.events(simulator)
  for number = after + 1, #list do
    if list[number].text == state and list[number].subject:match("[^/]*$") == id then
      return true
    end
  end
  return false
end

local function node_state(simulator, id)
  local status, node = curl(simulator, "GET", "/v2alpha1/" .. PARENT .. "/nodes/" .. id)
  return status == 200 and node.state or status
end

for _, mode in ipairs({ "auto", "none" }) do
  describe(("in a simulator with isolation '%s'"):format(mode), function()
    local simulator, ssh

    setup(function()
      simulator = sim.start({ isolation = mode, grace = { notice = 1, maintenance = 30 } })
      ssh = support.ssh_client(simulator)
      local function make(id, count, fields)
        local body = fields or {}
        body.tpu = {
          nodeSpec = {
            {
              parent = PARENT,
              nodeId = count == 1 and id or nil,
              multiNodeParams = count > 1 and { nodeCount = count, nodeIdPrefix = id } or nil,
              node = {
                acceleratorType = "v5litepod-8",
                runtimeVersion = "v2-alpha-tpuv5-lite",
                autocheckpointEnabled = true,
                metadata = { ["ssh-keys"] = "alice:" .. ssh.public },
              },
            },
          },
        }
        local path = "/v2alpha1/" .. PARENT .. "/queuedResources?queuedResourceId=" .. id
        assert.are.equal(200, (curl(simulator, "POST", path, body)))
      end
      make("job", 2)
      make("spot", 1, { spot = json.object() })
      support.wait_for(simulator, "job", "ACTIVE")
      support.wait_for(simulator, "spot", "ACTIVE")
    end)

    teardown(function()
      simulator:close()
      fs.remove_tree(ssh.directory)
    end)

    it("maintenance waits for who holds the devices to save", function()
      ssh.pin("job-0")
      local script = [[
        device=${CIRANDA_SIM_DEVICES:-/dev/vfio/}0
        cat > holder.sh <<'END'
          exec 9<"$1"
          trap 'sleep 0.3; echo saved > saved; exit 7' TERM
          echo up > up
          while :; do sleep 0.05; done
END
        setsid -f bash holder.sh "$device" </dev/null >/dev/null 2>&1
        setsid -f bash -c 'trap "echo told > bystander" TERM; while :; do sleep 0.05; done' </dev/null >/dev/null 2>&1
        until [ -e up ]; do sleep 0.05; done]]
      assert.are.equal(0, ssh.run(0, script).code)
      local status =
        curl(simulator, "POST", "/v2alpha1/" .. PARENT .. "/nodes/job-0:performMaintenance", "{}")
      assert.are.equal(200, status)
      eventually("the maintenance", function()
        return was(simulator, "job-0", "RESTARTING", 0) and node_state(simulator, "job-0") == "READY"
      end)
      assert.are.equal("saved\n", ssh.said(0, "cat saved"))
      assert.are_not.equal(0, ssh.run(0, "cat bystander").code)
      -- Multislice: the other slice cannot go on without this one, and boots anew as well.
      eventually("the other slice", function()
        return node_state(simulator, "job-1") == "READY"
      end)
    end)

    it("a lost slice comes back as another machine", function()
      ssh.pin("job-1")
      local before = fs.read(ssh.directory .. "/known_hosts")
      assert.are.equal(0, ssh.run(0, "touch on-the-old-disk").code)
      local boot_id = "cat ${CIRANDA_SIM_WORKER:-/proc/sys/kernel/random}/boot_id"
      local old_boot, old_address = ssh.said(0, boot_id), ssh.endpoints[1].ipAddress
      ssh.pin("job-0")
      local kept_boot = ssh.said(0, "touch on-the-kept-disk; " .. boot_id)
      local told = #support.events(simulator)
      assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/nodes/job-1:lose", "{}")))
      assert.is_true(was(simulator, "job-1", "REPAIRING", told))
      eventually("the repair", function()
        return node_state(simulator, "job-1") == "READY" and node_state(simulator, "job-0") == "READY"
      end)
      ssh.pin("job-1")
      assert.are_not.equal(before, fs.read(ssh.directory .. "/known_hosts"))
      assert.are_not.equal(0, ssh.run(0, "ls on-the-old-disk").code)
      assert.are_not.equal(old_address, ssh.endpoints[1].ipAddress)
      local new_boot = ssh.said(0, boot_id)
      assert.is_truthy(#old_boot == 37 and #new_boot == 37 and old_boot ~= new_boot, old_boot .. new_boot)
      -- The other slice was reset: another boot, the same disk.
      ssh.pin("job-0")
      local after = ssh.said(0, "ls on-the-kept-disk && " .. boot_id)
      assert.is_truthy(after:find("^on%-the%-kept%-disk\n"), after)
      assert.are_not.equal(kept_boot, after:match("\n(.*)"))
      support.wait_for(simulator, "job", "ACTIVE")
    end)

    it("a preempted slice is told, then taken away", function()
      ssh.pin("spot")
      local preempted =
        "curl -sS -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/preempted"
      assert.are.equal("FALSE", ssh.said(0, preempted))
      local holder = [[
        cat > holder.sh <<'END'
          exec 9<"${CIRANDA_SIM_DEVICES:-/dev/vfio/}0"
          trap 'echo saved > "$CIRANDA_SIM_SHARED/saved-by-spot"; exit 0' TERM
          echo up > up
          while :; do sleep 0.05; done
END
        setsid -f bash holder.sh </dev/null >/dev/null 2>&1
        until [ -e up ]; do sleep 0.05; done
        echo "$CIRANDA_SIM_SHARED"]]
      local shared = ssh.said(0, holder):match("%S+")
      fs.remove_tree(shared .. "/saved-by-spot")
      assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/nodes/spot:preempt", { notice = 3600 })))
      assert.are.equal("TRUE", ssh.said(0, preempted))
      eventually("the save upon the notice", function()
        return fs.exists(shared .. "/saved-by-spot")
      end)
      assert.are.equal("READY", node_state(simulator, "spot"))
      assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/clock", { advance = 3600 })))
      support.wait_for(simulator, "spot", "SUSPENDED")
      local _, answer = curl(simulator, "GET", "/v2/" .. PARENT .. "/queuedResources/spot")
      assert.are.equal("SERVICE", answer.state.stateInitiator)
      assert.are.equal(404, node_state(simulator, "spot"))
      assert.are.equal(255, ssh.run(0, "true").code)
    end)

    it("a disk that is full takes nothing more, and is the old one after the next boot", function()
      ssh.pin("job-0")
      assert.are.equal(0, ssh.run(0, "echo kept > kept").code)
      local status, answer = curl(simulator, "POST", "/sim/v1/nodes/job-0/workers/0:fillDisk", "{}")
      if simulator.isolation == "none" then
        assert.are.equal(400, status)
        assert.is_truthy(answer.error.message:find("needs namespaces", 1, true), answer.error.message)
        return
      end
      assert.are.equal(200, status, json.encode(answer))
      for _, path in ipairs({ "more", "/tmp/more" }) do
        local write = ssh.run(0, "echo more > " .. path)
        assert.are_not.equal(0, write.code, path)
        assert.is_truthy(write.stderr:find("No space left on device", 1, true), write.stderr)
      end
      assert.are.equal("kept\n", ssh.said(0, "cat kept"))
      local some = curl(simulator, "POST", "/sim/v1/nodes/job-0/workers/0:fillDisk", { free = 8192 })
      assert.are.equal(200, some)
      assert.are.equal(0, ssh.run(0, "head -c 4096 /dev/zero > little").code)
      assert.are_not.equal(0, ssh.run(0, "head -c 65536 /dev/zero > much").code)
      assert.are.equal(200, (curl(simulator, "POST", "/v2/" .. PARENT .. "/queuedResources/job:reset", "{}")))
      eventually("the reset", function()
        return node_state(simulator, "job-0") == "READY" and node_state(simulator, "job-1") == "READY"
      end)
      assert.are.equal("kept\n", ssh.said(0, "echo more > more && cat kept"))
    end)

    it("a machine that goes off is not reached any more, and nobody says so", function()
      ssh.pin("job-0")
      assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/nodes/job-0/workers/0:halt", "{}")))
      assert.are.equal(255, ssh.run(0, "true").code)
      assert.are.equal("READY", node_state(simulator, "job-0"))
    end)
  end)
end

describe("a simulated API", function()
  local simulator
  local path = "/v2/" .. PARENT .. "/nodes"

  setup(function()
    simulator = sim.start()
  end)

  teardown(function()
    simulator:close()
  end)

  local function raw(...)
    local token = fs.read(simulator.env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE)
    return process.run({ "curl", "-sS", "-H", "Authorization: Bearer " .. token, simulator.url .. path, ... })
  end

  local function fault(fields)
    fields.method = "nodes.list"
    assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/faults", fields)))
  end

  it("answers wrongly when asked to, once", function()
    fault({ kind = "reset" })
    local code = raw().code
    assert.is_true(code == 56 or code == 52, tostring(code))
    fault({ kind = "truncate" })
    assert.are.equal(18, raw().code)
    fault({ kind = "hang" })
    -- One that is given up before it has been sent hangs nowhere, and leaves the fault to the next.
    eventually("the request that hangs", function()
      assert.are.equal(28, raw("--max-time", "1").code)
      return #select(2, curl(simulator, "GET", "/sim/v1/faults")).faults == 0
    end)
    fault({ kind = "error", status = "RESOURCE_EXHAUSTED", retry_after = 7, message = "slowly" })
    local limited = raw("-D", "-")
    assert.is_truthy(limited.stdout:find("^HTTP/1.1 429"))
    assert.is_truthy(limited.stdout:lower():find("\r\nretry%-after: 7\r\n"))
    assert.is_truthy(limited.stdout:find('"retryDelay":"7s"', 1, true))
    assert.are.equal(0, raw("-f").code)
  end)

  it("refuses faults that there are not", function()
    for _, body in ipairs({
      '{"kind": "flood"}',
      '{"kind": "error", "status": "SAD"}',
      '{"kind": "reset", "colour": 1}',
      '{"kind": "reset", "count": "many"}',
      "[",
    }) do
      assert.are.equal(400, (curl(simulator, "POST", "/sim/v1/faults", body)), body)
    end
    assert.are.equal(404, (curl(simulator, "POST", "/sim/v1/nodes/none:preempt", "{}")))
    assert.are.equal(404, (curl(simulator, "POST", "/sim/v1/nonsense", "{}")))
  end)

  it("lets time pass on request: tokens expire", function()
    local host = simulator.env.GCE_METADATA_HOST
    local _, token = curl(
      simulator,
      "GET",
      ("http://%s/computeMetadata/v1/instance/service-accounts/default/token"):format(host),
      nil,
      { "Metadata-Flavor: Google" }
    )
    local header = { "Authorization: Bearer " .. token.access_token }
    assert.are.equal(200, (curl(simulator, "GET", path, nil, header)))
    assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/clock", { advance = 3600 })))
    assert.are.equal(401, (curl(simulator, "GET", path, nil, header)))
    assert.are.equal(400, (curl(simulator, "POST", "/sim/v1/clock", { advance = -1 })))
  end)

  it("takes as long as it is told, from then on", function()
    local shape = { acceleratorType = "v5litepod-1", runtimeVersion = "v2-alpha-tpuv5-lite" }
    support.create(simulator, "slow", 1, shape)
    support.wait_for(simulator, "slow", "ACTIVE")
    local node = "/v2/" .. PARENT .. "/nodes/slow"
    local function patch()
      return (curl(simulator, "PATCH", node .. "?updateMask=labels", { labels = { a = "b" } }))
    end
    local delays = { patch = 100 * sim.QUICK }
    assert.are.equal(200, (curl(simulator, "PUT", "/sim/v1/delays", delays)))
    assert.are.equal(200, patch())
    assert.are.equal(409, patch()) -- the first is under way
    assert.are.equal(200, (curl(simulator, "PUT", "/sim/v1/delays", { patch = json.null })))
    assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/clock", { advance = 100 })))
    assert.are.equal(200, patch())
    local status, answer = curl(simulator, "PUT", "/sim/v1/delays", { mend = 1 })
    assert.are.equal(400, status)
    assert.matches("there is no delay 'mend'; there are accept, ", answer.error.message, 1, true)
    assert.are.equal(400, (curl(simulator, "PUT", "/sim/v1/delays", { patch = -1 })))
  end)

  it("has the capacity that it is given", function()
    assert.are.equal(200, (curl(simulator, "PUT", "/sim/v1/capacity", { v4 = 8 })))
    support.create(simulator, "big", 2, { acceleratorType = "v4-8", runtimeVersion = "tpu-ubuntu2204-base" })
    eventually("the queue", function()
      local _, answer = curl(simulator, "GET", "/v2/" .. PARENT .. "/queuedResources/big")
      return answer.state.state == "WAITING_FOR_RESOURCES"
    end)
    assert.are.equal(200, (curl(simulator, "PUT", "/sim/v1/capacity", { v4 = json.null })))
    support.wait_for(simulator, "big", "ACTIVE")
  end)

  it("shows a page, and keeps an object", function()
    local page = process.run({ "curl", "-sS", "-f", simulator.url .. "/" })
    assert.is_truthy(page.stdout:find("<!doctype html>", 1, true))
    local directory = fs.tempdir("ciranda-spec-")
    local data = ("chunk of an object\n"):rep(30000)
    fs.write(directory .. "/in", data)
    local upload = simulator.env.STORAGE_EMULATOR_HOST
      .. "/upload/storage/v1/b/bucket/o?uploadType=media&name=x"
    assert.are.equal(
      0,
      process.run({ "curl", "-sSf", "--data-binary", "@" .. directory .. "/in", upload }).code
    )
    local address = simulator.env.STORAGE_EMULATOR_HOST .. "/storage/v1/b/bucket/o/x?alt=media"
    local whole = process.run({ "curl", "-sSf", address })
    assert.is_true(whole.stdout == data)
    local part = process.run({ "curl", "-sSf", "-r", "500000-", address })
    assert.is_true(part.stdout == data:sub(500001))
    fs.remove_tree(directory)
  end)
end)
