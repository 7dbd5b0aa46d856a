-- Google's guides to Multislice and to Autocheckpoint, followed to the letter on the simulated cloud.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/cloud_support.lua")

local ZONE = "us-central2-b"
local wait = support.wait

--- What the short form leaves to the others.
local function long(...)
  if not os.getenv("CIRANDA_SHORT") then
    it(...)
  end
end

describe("the guides", function()
  local cloud, shared, key

  setup(function()
    cloud = support.start({
      zone = ZONE,
      slices = 1,
      type = "v5litepod-8",
      prefix = "key",
      grace = { notice = 6, maintenance = 15 },
    })
    shared = cloud.simulator.env.CIRANDA_SIM_SHARED
    -- The first login makes the key that the guides take for granted.
    assert(cloud:run("ssh", "key", "--command=true").code == 0)
    key = fs.read(cloud.root .. "/home/.ssh/google_compute_engine.pub"):match("^%S+ %S+")
    -- What `git clone` brings: the package is MaxText/MaxText.
    fs.mkdir_p(shared .. "/MaxText/MaxText/configs")
    for name, text in pairs({
      ["__init__.py"] = "",
      ["train.py"] = fs.read("tests/e2e/guides/maxtext_train.py"),
      ["trainer.py"] = fs.read("tests/fixtures/trainer/train.py"),
      ["configs/base.yml"] = "run_name: ''\n",
      buckets = shared .. "/buckets\n",
    }) do
      fs.write(shared .. "/MaxText/MaxText/" .. name, text)
    end
    fs.mkdir(shared .. "/buckets")
    fs.chmod(shared .. "/buckets", 511)
  end)

  teardown(function()
    cloud:stop()
  end)

  --- A request as the guide sends it with curl.
  local function curl(method, path, body)
    local env = cloud.simulator.env
    local answer = http.request({
      method = method,
      url = ("%s/v2alpha1/projects/%s/locations/%s/%s"):format(
        cloud.simulator.url,
        env.CLOUDSDK_CORE_PROJECT,
        ZONE,
        path
      ),
      headers = {
        Authorization = "Bearer " .. fs.read(env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE):match("%S+"),
        ["Content-Type"] = "application/json",
      },
      body = body,
      timeout = 60,
    })
    assert.equal(200, answer.status, answer.body)
  end

  local function platform(node, action)
    local url = ("%s/sim/v1/nodes/%s:%s"):format(cloud.simulator.url, node, action)
    assert.equal(200, http.request({ method = "POST", url = url, body = "{}" }).status)
  end

  local function events(since)
    local url = ("%s/sim/v1/events?since=%d"):format(cloud.simulator.url, since or 0)
    return json.decode(http.request({ url = url }).body).events
  end

  local function last_event()
    local list = events()
    return list[#list].id
  end

  --- Seconds from a node's maintenance to its restart.
  local function waited(node, since)
    local began, ended
    for _, event in ipairs(events(since)) do
      local seconds = event.time:match("T%d+:(%d+:%d+%.%d+)")
      local minute, second = (seconds or "0:0"):match("(%d+):(.+)")
      local at = tonumber(minute) * 60 + tonumber(second)
      if event.subject:match("[^/]+$") == node then
        began = event.text == "maintenance" and at or began
        ended = ended or began and event.text == "RESTARTING" and at or nil
      end
    end
    return began and ended and (ended - began) % 3600
  end

  --- The finished checkpoints of a directory, by their numbers.
  local function steps(directory, pattern)
    local list = {}
    for _, entry in ipairs(fs.exists(directory) and fs.list(directory) or {}) do
      list[#list + 1] = math.tointeger(tonumber(entry.name:match(pattern or "^%d+$")))
    end
    table.sort(list)
    return list
  end

  local function newest(...)
    local list = steps(...)
    return list[#list] or -1
  end

  describe("to Multislice", function()
    local checkpoints

    --- The guide's script. MaxText has to be there before, it says; on a slice that was replaced nothing is, so that it
    --- has to be fetched here.
    local function script()
      local clone = "[ -d /home/user1/MaxText ] || runuser -l user1 -c 'cp -r " .. shared .. "/MaxText .'"
      return "#! /bin/bash \n "
        .. clone
        .. " \n pwd \n runuser -l user1 -c 'cd /home/user1/MaxText && python3 -m MaxText.train "
        .. "MaxText/configs/base.yml run_name=run_test_failure_recovery dcn_data_parallelism=4 "
        .. "ici_fsdp_parallelism=8 steps=10000 save_period=10 "
        .. "base_output_directory='gs://user1-us-central2'' EOF"
    end

    --- The guide's request, as JSON, its comma put in; spot capacity by the substitution that it gives.
    local function create()
      local metadata = json.encode({ ["startup-script"] = script(), ["ssh-keys"] = "user1:" .. key })
      curl(
        "POST",
        "queuedResources?queued_resource_id=recover",
        ([[{
          "spot": {},
          "tpu": { "node_spec": [ {
            "parent": "projects/%s/locations/%s",
            "node": {
              "accelerator_type": "v4-16",
              "runtime_version": "tpu-ubuntu2204-base",
              "network_config": { "network": "default", "subnetwork": "default", "enable_external_ips": true },
              "tags" : ["example-tag-1"],
              "metadata": %s
            },
            "multi_node_params": { "node_count": 4, "node_id_prefix": "recover" }
          } ] }
        }]]):format(cloud.simulator.env.CLOUDSDK_CORE_PROJECT, ZONE, metadata)
      )
      local result = cloud:run("qr", "wait", "recover", "--zone=" .. ZONE)
      assert.equal(0, result.code, result.err)
    end

    local function start_log(node, worker)
      local status = json.decode(http.request({ url = cloud.simulator.url .. "/sim/v1/status" }).body)
      for _, entry in ipairs(status.nodes) do
        if entry.name:match("[^/]+$") == node and entry.workers[worker + 1].directory then
          local path = entry.workers[worker + 1].directory .. "/startup-script.log"
          return fs.exists(path) and fs.read(path) or ""
        end
      end
      return ""
    end

    --- Waits until all workers train again, and gives the step from which they went on.
    local function resumed(after)
      local from
      for slice = 0, 3 do
        for worker = 0, 1 do
          local node = "recover-" .. slice
          local text = wait(("%s worker %d goes on"):format(node, worker), function()
            local log = start_log(node, worker):match("^.*\n(process %d+ of 8,.*)$") or ""
            local step = math.tointeger(tonumber(log:match("restored step (%d+)")))
            return step and step >= after and log:find("completed step: ", 1, true) and log
          end)
          local step = tonumber(text:match("restored step (%d+)"))
          assert.equal(from or step, step)
          assert.equal(step + 1, tonumber(text:match("completed step: (%d+)")))
          from = step
        end
      end
      return from
    end

    it("recovers: create, train, repair, preemption, the same request again", function()
      if cloud.simulator.isolation ~= "root" then
        pending("its script needs runuser: workers with namespaces, and root to run the simulator")
        return
      end
      checkpoints = shared .. "/buckets/user1-us-central2/run_test_failure_recovery/checkpoints"
      create()
      wait("a periodic checkpoint", function()
        return newest(checkpoints) >= 9
      end)
      assert.matches("32 devices in 4 slices, 4 of them here", start_log("recover-3", 1), 1, true)
      -- A slice is lost: it is replaced, the others are reset, and the script runs everywhere.
      local before = newest(checkpoints)
      platform("recover-2", "lose")
      local from = resumed(before)
      assert.equal(9, from % 10)
      -- Spot capacity is taken away: what runs is told, saves, and all is gone until it is asked for again.
      platform("recover-1", "preempt")
      wait("SUSPENDED", function()
        local state = cloud:run("qr", "describe", "recover", "--zone=" .. ZONE, "--format=value(state.state)")
        return state.out == "SUSPENDED\n"
      end)
      local saved = newest(checkpoints)
      assert.is_true(saved > from)
      local deleted = cloud:run("qr", "delete", "recover", "--zone=" .. ZONE, "--force")
      assert.equal(0, deleted.code, deleted.err)
      create()
      assert.equal(saved, resumed(saved))
      -- The guide's remedy for training that hangs.
      before = newest(checkpoints)
      local reset = cloud:run("qr", "reset", "recover", "--zone=" .. ZONE)
      assert.equal(0, reset.code, reset.err)
      assert.is_true(resumed(before) >= before)
      assert.equal(0, cloud:run("qr", "delete", "recover", "--zone=" .. ZONE, "--force").code)
    end)
  end)

  describe("to Autocheckpoint", function()
    local function create_vm(name, ...)
      local result = cloud:run(
        "tpu_vm",
        "create",
        name,
        "--accelerator-type",
        "v5litepod-8",
        "--version",
        "v2-alpha-tpuv5-lite",
        ...
      )
      assert.equal(0, result.code, result.err)
      local main = ".local/lib/python3.10/site-packages/paxml/main.py"
      local put = ("mkdir -p %s && cat > %s <<'END'\n%s\nEND"):format(
        fs.dirname(main),
        main,
        fs.read("tests/e2e/guides/paxml_main.py")
      )
      local placed = cloud:run("ssh", name, "--command=" .. put)
      assert.equal(0, placed.code, placed.err)
    end

    --- The guide's training command, in a session of its own.
    local function train(name, flags)
      return cloud:start_program(
        "ssh",
        name,
        ("--command=export JOB_LOG_DIR=%s/buckets/%s; "):format(shared, name)
          .. "{ python3 .local/lib/python3.10/site-packages/paxml/main.py "
          .. flags
          .. "--exp=tasks.lm.params.lm_cloud.LmCloudSpmd2B --job_log_dir=$JOB_LOG_DIR; } 2>&1 | tee pax_logs.txt"
      )
    end

    --- A maintenance event once it trains; gives the last step it had done, and the seconds until the restart.
    local function maintain(name, running)
      wait("it trains", function()
        return running.out():find("completed step: %d+\ncompleted step: ")
      end)
      local since = last_event()
      curl("POST", ("nodes/%s:simulateMaintenanceEvent"):format(name), '{"workerIds":["0"]}')
      local seconds = wait("the restart", function()
        return waited(name, since)
      end)
      running.wait()
      wait("READY", function()
        local state = cloud:run("tpu_vm", "describe", name, "--format=value(state)")
        return state.out == "READY\n"
      end)
      return seconds
    end

    it("on one TPU VM: saved, maintained as soon as it has ended, used again", function()
      create_vm("pax", "--autocheckpoint-enabled")
      local checkpoints = shared .. "/buckets/pax/checkpoints"
      local flags = "--jax_fully_async_checkpoint=1 --exit_after_ondemand_checkpoint=1 "
      local running = train("pax", flags)
      local seconds = maintain("pax", running)
      local saved = newest(checkpoints, "^checkpoint_(%d+)$")
      assert.matches(("saved step %d\n$"):format(saved), running.out())
      assert.is_true(seconds < 15, "it was waited for to the end of the grace: " .. seconds .. " s")
      -- Without the flag that ends it: saved as well, and the platform waits as long as it does at most.
      running = train("pax", "--jax_fully_async_checkpoint=1 ")
      seconds = maintain("pax", running)
      assert.matches(("on %%d chips, from step %d\n"):format(saved + 1), running.out())
      assert.is_true(newest(checkpoints, "^checkpoint_(%d+)$") > saved)
      assert.is_true(seconds >= 15, "it was waited for only " .. seconds .. " s")
      assert.equal(0, cloud:run("tpu_vm", "delete", "pax").code)
    end)

    long("on one TPU VM where it is off: nothing is saved", function()
      create_vm("plain")
      local running = train("plain", "--jax_fully_async_checkpoint=1 --exit_after_ondemand_checkpoint=1 ")
      maintain("plain", running)
      assert.equal(-1, newest(shared .. "/buckets/plain/checkpoints", "^checkpoint_(%d+)$"))
      assert.equal(0, cloud:run("tpu_vm", "delete", "plain").code)
    end)

    long("on Multislice: an event on one slice, and all have saved at one step", function()
      local created = cloud:run(
        "qr",
        "create",
        "ms",
        "--node-count=2",
        "--node-prefix=ms",
        "--accelerator-type=v4-8",
        "--runtime-version=tpu-ubuntu2204-base",
        "--autocheckpoint-enabled"
      )
      assert.equal(0, created.code, created.err)
      local output = shared .. "/buckets/ms"
      local checkpoints = output .. "/auto/checkpoints"
      local function run(name)
        return cloud:start_program(
          "multihost_runner",
          "--TPU_PREFIX=ms",
          "--RUN_NAME=" .. name,
          "--SCRIPT_DIR=" .. shared .. "/MaxText",
          "--CHECKPOINT_DIR=" .. checkpoints,
          "--COMMAND=python3 -m MaxText.train MaxText/configs/base.yml run_name=auto dcn_data_parallelism=2 "
            .. "ici_fsdp_parallelism=4 steps=10000 save_period=10000 enable_autocheckpoint=true "
            .. "base_output_directory="
            .. output
        )
      end
      local function trains(running, first)
        wait("it trains", function()
          return running.out():find(("completed step: %d,.*completed step: %d,"):format(first, first + 2))
        end)
      end
      local running = run("ms-1")
      trains(running, 0)
      curl("POST", "nodes/ms-1:simulateMaintenanceEvent", '{"workerIds":["0"]}')
      local result = running.wait()
      assert.equal(143, result.code, result.err)
      local saved = newest(checkpoints)
      assert.matches(("Checkpoint: saved: step %d is on disk"):format(saved), result.err, 1, true)
      assert.same({ saved }, steps(checkpoints))
      wait("both slices are READY", function()
        local state = cloud:run("tpu_vm", "list", "--format=value(state)")
        return not state.out:find("[^READY\n]")
      end)
      running = run("ms-2")
      trains(running, saved + 1)
      running.program:signal("SIGTERM")
      running.wait()
      assert.is_true(newest(checkpoints) > saved)
      assert.equal(0, cloud:run("qr", "delete", "ms", "--force").code)
    end)
  end)
end)
