-- A whole simulator, used by programs that know nothing of it: curl and OpenSSH's ssh.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local keeper = require("ciranda.sim.keeper")
local patience = dofile("tests/fixtures/patience.lua")
local process = require("ciranda.io.process")
local processes = require("ciranda.sim.processes")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "client.lua")

local DEADLINE, PARENT = support.DEADLINE, support.PARENT
local create, curl, eventually = support.create, support.curl, support.eventually
local events, ssh_client, wait_for = support.events, support.ssh_client, support.wait_for

for _, mode in ipairs({ "auto", "none" }) do
  describe(("a simulator with isolation '%s'"):format(mode), function()
    local simulator, ssh

    setup(function()
      simulator = sim.start({ isolation = mode, delays = { patch = 0 }, grace = { notice = 3600 } })
      ssh = ssh_client(simulator)
      create(simulator, "job", 2, {
        acceleratorType = "v5litepod-16",
        runtimeVersion = "v2-alpha-tpuv5-lite",
        metadata = {
          ["ssh-keys"] = "alice:" .. ssh.public .. " alice",
          ["startup-script"] = "id -u > by; echo booted $TPU_WORKER_ID >> started",
        },
      })
      wait_for(simulator, "job", "ACTIVE")
      ssh.pin("job-1")
    end)

    teardown(function()
      simulator:close()
      fs.remove_tree(ssh.directory)
    end)

    it("lets its workers be reached with the host keys that the API gives", function()
      local result = ssh.run(2, "echo $USER; cd; pwd; exit 7")
      assert.are.equal(7, result.code, result.stderr)
      local user, home = result.stdout:match("^(%S+)\n(%S+)\n$")
      assert.are.equal("alice", user)
      assert.is_truthy(home:find("/home/alice$"))
    end)

    it("gives each worker a home, a host key and an address of its own", function()
      local homes, addresses = {}, {}
      for worker = 0, 3 do
        assert.are.equal(0, ssh.run(worker, "echo $TPU_WORKER_ID > mine").code)
        addresses[ssh.endpoints[worker + 1].ipAddress] = true
      end
      for worker = 0, 3 do
        homes[worker + 1] = ssh.said(worker, "cat mine")
      end
      assert.are.same({ "0\n", "1\n", "2\n", "3\n" }, homes)
      local keys = {}
      for key in fs.read(ssh.directory .. "/known_hosts"):gmatch("ssh%-ed25519 (%S+)") do
        keys[key] = true
      end
      local function count(set)
        local n = 0
        for _ in pairs(set) do
          n = n + 1
        end
        return n
      end
      assert.are.equal(4, count(keys))
      assert.are.equal(4, count(addresses))
    end)

    it("tells a worker who it is, by its metadata server", function()
      local fetch = "curl -sS -f -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/"
      local env = ssh.run(3, fetch .. "instance/attributes/tpu-env")
      assert.are.equal(0, env.code, env.stderr)
      assert.is_truthy(env.stdout:find("\nWORKER_ID: '3'\n", 1, true), env.stdout)
      assert.is_truthy(env.stdout:find("ACCELERATOR_TYPE: 'v5litepod-16'\n", 1, true))
      assert.is_truthy(env.stdout:find("MEGASCALE_SLICE_ID: '1'\n", 1, true))
      assert.is_truthy(env.stdout:find("MEGASCALE_NUM_SLICES: '2'\n", 1, true))
      assert.are.equal("3", ssh.said(3, fetch .. "instance/attributes/agent-worker-number"))
      assert.are.equal("NONE", ssh.said(3, fetch .. "instance/maintenance-event"))
      local token = json.decode(ssh.said(3, fetch .. "instance/service-accounts/default/token"))
      local status = curl(simulator, "GET", "/v2/" .. PARENT .. "/nodes?access_token=" .. token.access_token)
      assert.are.equal(200, status)
      local without = ssh.run(3, "curl -sS http://$GCE_METADATA_HOST/computeMetadata/v1/instance/name")
      assert.is_truthy(without.stdout:find("Missing Metadata-Flavor", 1, true))
    end)

    it("runs the start-up script at every boot, and keeps disks but no processes over a reset", function()
      -- Without namespaces the script's directory stands for the machine's `/`; a session's is its home, below it.
      local file = simulator.isolation == "none" and "../../started" or "/started"
      local function started()
        local result = ssh.run(1, "cat " .. file)
        return result.stdout
      end
      eventually("the start-up script", function()
        return started() == "booted 1\n"
      end)
      -- As root where the worker has one of its own, else as the worker's own user, which the simulator says.
      local by = ssh.said(1, "cat " .. file:gsub("started$", "by"))
      if simulator.isolation == "none" then
        assert.are.equal(ssh.said(1, "id -u"), by)
        assert.is_truthy(
          table.concat(simulator.notes, "\n"):find("scripts run as the worker's own user", 1, true)
        )
      else
        assert.are.equal("0\n", by)
      end
      -- A number of this run alone: without namespaces every process of the machine is seen.
      local nap = ("987%07d"):format(uv.os_getpid())
      local sleeps = ("pgrep -f 'sleep %s[%s]'"):format(nap:sub(1, -2), nap:sub(-1))
      local marked = ssh.run(
        1,
        "echo kept > kept; setsid -f sleep "
          .. nap
          .. " </dev/null >/dev/null 2>&1;"
          .. " until "
          .. sleeps
          .. "; do sleep 0.1; done"
      )
      assert.are.equal(0, marked.code, marked.stderr)
      local boot_id = "cat ${CIRANDA_SIM_WORKER:-/proc/sys/kernel/random}/boot_id"
      local before = ssh.said(1, boot_id)
      assert.are.equal(200, (curl(simulator, "POST", "/v2/" .. PARENT .. "/queuedResources/job:reset", "{}")))
      eventually("both boots", function()
        local ok, text = pcall(started)
        return ok and text == "booted 1\nbooted 1\n"
      end)
      assert.are.equal("kept\n", ssh.said(1, "cat kept"))
      assert.are_not.equal(0, ssh.run(1, sleeps).code)
      assert.are_not.equal(before, ssh.said(1, boot_id))
    end)

    it("gives terminals", function()
      local result = ssh.run(0, "tty; stty size", nil, "-tt")
      assert.are.equal(0, result.code, result.stdout .. result.stderr)
      assert.is_truthy(result.stdout:find("^/dev/pts/%d+\r\n%d+ %d+\r\n"), result.stdout)
    end)

    it("lets in whom a patch of the metadata names", function()
      assert.are_not.equal(0, ssh.run(0, "true", "bob").code)
      local status = curl(
        simulator,
        "PATCH",
        "/v2/" .. PARENT .. "/nodes/job-1?updateMask=metadata",
        { metadata = { ["ssh-keys"] = "alice:" .. ssh.public .. "\nbob:" .. ssh.public } }
      )
      assert.are.equal(200, status)
      eventually("bob's login", function()
        return ssh.run(0, "true", "bob").code == 0
      end)
    end)

    it("has its workers' connections refused, reset or left hanging when asked to", function()
      for _, kind in ipairs({ "ssh_refuse", "ssh_reset" }) do
        assert.are.equal(
          200,
          (curl(simulator, "POST", "/sim/v1/faults", { kind = kind, name = "job-1", worker = 0 }))
        )
        assert.are.equal(255, ssh.run(0, "true").code)
        assert.are.equal(0, ssh.run(0, "true").code)
      end
    end)

    it("lets a worker change its host key, which a client that knows better refuses", function()
      assert.are.equal(200, (curl(simulator, "POST", "/sim/v1/nodes/job-1/workers/3:changeHostKey", "{}")))
      local result = ssh.run(3, "true")
      assert.are.equal(255, result.code)
      assert.is_truthy(result.stderr:find("REMOTE HOST IDENTIFICATION HAS CHANGED", 1, true))
    end)

    it("tells the workers apart by the address on which their metadata server is asked", function()
      ssh.pin("job-1")
      local base =
        "curl -sS -f -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/"
      local event = base .. "maintenance-event"
      local scope <close> = task.scope()
      -- With the mark of what it knows: what changes before the question is there counts too.
      local mark = ssh.said(2, event .. " -D - -o /dev/null"):match("[Ee][Tt]ag: (%S+)")
      local change = ("'?wait_for_change=true&last_etag=%s&timeout_sec=50'"):format(mark)
      local waiting = scope:spawn(ssh.run, 2, event .. change)
      eventually("the wait", function()
        return ssh.run(2, "pgrep -f 'wait_for_chang[e]'").code == 0
      end)
      local node = "/v2alpha1/" .. PARENT .. "/nodes/job-1"
      assert.are.equal(
        200,
        (curl(simulator, "POST", node .. ":simulateMaintenanceEvent", { workerIds = { "2" } }))
      )
      local told = waiting:wait()
      assert.are.equal("TERMINATE_ON_HOST_MAINTENANCE", told.stdout, told.stderr)
      assert.are.equal("NONE", ssh.said(1, event))
      local upcoming = json.decode(ssh.said(2, base .. "'upcoming-maintenance?alt=json'"))
      assert.are.equal("PENDING", upcoming.maintenanceStatus)
      assert.are.equal("UNSCHEDULED", upcoming.type)
    end)

    it("logs who called what", function()
      local _, log = curl(simulator, "GET", "/sim/v1/requests")
      local creates = 0
      for _, request in ipairs(log.requests) do
        creates = creates + (request.method == "queuedResources.create" and 1 or 0)
        assert.is_falsy(request.path:find("access_token=[^.]"), request.path)
      end
      assert.are.equal(1, creates)
      assert.is_truthy(log.requests[1].client:find("^curl/"))
    end)

    it("refuses calls without credentials and with bad ones", function()
      local bare = process.run({ "curl", "-sS", simulator.url .. "/v2/" .. PARENT .. "/nodes" }):check()
      assert.are.equal(401, json.decode(bare.stdout).error.code)
      local status, answer =
        curl(simulator, "GET", "/v2/" .. PARENT .. "/nodes", nil, { "Authorization: Bearer x" })
      assert.are.equal(401, status)
      assert.are.equal("UNAUTHENTICATED", answer.error.status)
    end)

    it("leaves nothing of a deleted slice", function()
      local directory
      local _, status = curl(simulator, "GET", "/sim/v1/status")
      for _, node in ipairs(status.nodes) do
        directory = node.workers[1].directory
        assert.is_truthy(fs.exists(directory))
      end
      assert.are.equal(
        200,
        (curl(simulator, "DELETE", "/v2/" .. PARENT .. "/queuedResources/job?force=true"))
      )
      wait_for(simulator, "job", "404")
      assert.is_nil(fs.exists(directory))
      assert.are.equal(255, ssh.run(0, "true").code)
      local simulator_pid
      for _, found in ipairs(processes.descendants(simulator.process.pid)) do
        if found.parent == simulator.process.pid and found.state ~= "Z" then
          simulator_pid = simulator_pid or found.pid
        end
      end
      eventually("no process of a worker", function()
        return #processes.descendants(simulator_pid) == 0
      end)
      assert.is_truthy(#events(simulator) > 10)
    end)
  end)
end

describe("a simulator", function()
  -- A program that starts a simulator with one worker and then does nothing, and the processes that hang on it.
  local function starter(mode)
    local script = ([[
      local simulator = require("ciranda.sim").start({
        slices = 1, type = "v5litepod-8", isolation = %q,
        ssh_keys = ..., delays = { provision = 0 },
      })
      print(simulator.process.pid, simulator.directory, simulator.env.CIRANDA_SSH_PORT, simulator.url)
      io.stdout:flush()
      require("ciranda.task").sleep(600)
    ]]):format(mode)
    local keys = fs.tempdir("ciranda-spec-")
    process.run({ "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys .. "/key" }):check()
    local argv = keeper.command("ciranda.sim.keeper")
    argv[#argv] = script
    argv[#argv + 1] = "carol:" .. fs.read(keys .. "/key.pub")
    argv.stdin, argv.stdout, argv.stderr = process.DISCARD, process.PIPE, process.INHERIT
    local program = process.spawn(argv)
    local line = task.timeout(DEADLINE, function()
      return program.stdout:read()
    end)
    local pid, directory, port, url = line:match("^(%d+)\t(%S+)\t(%d+)\t(%S+)")
    local address = url:match("//127%.(%d+)%.")
    -- Something that has left its session behind, as a training job has.
    -- stylua: ignore
    process.run({
      "ssh", "-F", "none", "-i", keys .. "/key", "-o", "StrictHostKeyChecking=no",
      "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes", "-p", port,
      ("carol@127.%s.1.1"):format(address),
      "setsid -f sleep 876543 </dev/null >/dev/null 2>&1", timeout = DEADLINE,
    }):check()
    fs.remove_tree(keys)
    local tree = { processes.get(tonumber(pid)) }
    for _, found in ipairs(processes.descendants(tonumber(pid))) do
      tree[#tree + 1] = found
    end
    assert.is_true(#tree >= 3)
    return program, tonumber(pid), directory, tree
  end

  local function assert_gone(tree, directory)
    local left
    patience.wait_for(function()
      return "the end of " .. table.concat(left, "; ")
    end, function()
      left = { fs.exists(directory) and directory or nil }
      for _, found in ipairs(tree) do
        local now = processes.get(found.pid)
        if now and now.start == found.start and now.state ~= "Z" then
          local ok, line = pcall(fs.read, ("/proc/%d/cmdline"):format(found.pid))
          line = ok and line:gsub("%z", " ") or "?"
          left[#left + 1] = ("%d (%s) %s"):format(found.pid, now.state, line)
        end
      end
      return #left == 0
    end, DEADLINE)
  end

  for _, mode in ipairs({ "auto", "none" }) do
    it(("with isolation '%s' is gone when its starter was killed"):format(mode), function()
      local program <close>, _, directory, tree = starter(mode)
      uv.kill(program.pid, "sigkill")
      assert_gone(tree, directory)
    end)

    it(("with isolation '%s' is gone when its keeper was killed"):format(mode), function()
      local _ <close>, keeper_pid, directory, tree = starter(mode)
      uv.kill(keeper_pid, "sigkill")
      assert_gone(tree, directory)
    end)

    it(("with isolation '%s' leaves nothing when it is killed itself"):format(mode), function()
      local _ <close>, keeper_pid, directory, tree = starter(mode)
      for _, found in ipairs(tree) do
        if found.parent == keeper_pid then
          processes.signal(found, "sigkill")
        end
      end
      assert_gone(tree, directory)
    end)
  end

  it("takes its disk away when its keeper was killed, however long that takes", function()
    local bin = fs.tempdir("ciranda-spec-")
    local slow = ('#!/bin/sh\nsleep %g\nPATH=${PATH#*:} exec rm "$@"\n'):format(task.grace() + 1)
    fs.write(bin .. "/rm", slow, { mode = 493 })
    local path = os.getenv("PATH")
    uv.os_setenv("PATH", bin .. ":" .. path)
    -- It has nothing to end, and may be faster than its keeper is at dying.
    local simulator <close> = sim.start({ isolation = "none" })
    uv.os_setenv("PATH", path)
    uv.kill(simulator.process.pid, "sigkill")
    assert_gone({}, simulator.directory)
    fs.remove_tree(bin)
  end)

  it("does not meet another one", function()
    local first <close> = sim.start()
    local second <close> = sim.start()
    assert.are_not.equal(first.url, second.url)
    assert.are_not.equal(first.directory, second.directory)
    assert.are.equal(200, (curl(first, "GET", "/v2/" .. PARENT .. "/nodes")))
    assert.are.equal(200, (curl(second, "GET", "/v2/" .. PARENT .. "/nodes")))
  end)

  it("says what is wrong with what it is asked for", function()
    local function refused(code, text, options)
      local ok, err = pcall(sim.start, options)
      assert.is_false(ok)
      assert.are.equal(code, err.code)
      assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
    end
    refused("usage", "there is no accelerator type 'v9-1'", { slices = 1, type = "v9-1" })
    refused("failed", "Multislice is not supported", { slices = 2, type = "v3-8" })
    local directory = fs.tempdir("ciranda-spec-")
    fs.write(directory .. "/file", "")
    refused("exists", "is not empty", { state_directory = directory })
    fs.remove_tree(directory)
    assert.has_error(function()
      sim.start({ colour = "red" })
    end)
  end)

  it("keeps a state directory that was named", function()
    local directory = fs.tempdir("ciranda-spec-")
    local simulator <close> = sim.start({ state_directory = directory .. "/state" })
    simulator:close()
    assert.is_truthy(fs.exists(directory .. "/state/machines"))
    fs.remove_tree(directory)
  end)
end)
