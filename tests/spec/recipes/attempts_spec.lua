-- A run whose machines are lost under it, on the simulated cloud, with the stand-in trainer.
local cloud_support = dofile("tests/spec/recipes/cloud_support.lua")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")

-- Seconds from a notice to what it speaks of, which pass when the spec lets them.
local NOTICE = 600

describe("multihost_runner on machines that are lost", function()
  local cloud

  setup(function()
    cloud = cloud_support.start({
      slices = 2,
      type = "v5litepod-4",
      prefix = "job",
      grace = { notice = NOTICE },
    })
    fs.write(cloud.root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"))
  end)
  teardown(function()
    cloud:stop()
  end)

  local function control(path, body)
    local answer = http.request({
      method = "POST",
      url = cloud.simulator.url .. "/sim/v1/" .. path,
      body = json.encode(body or {}),
      timeout = 20,
    })
    assert.equal(200, answer.status, answer.body)
  end

  --- Lets a run's training end: what is lost or interrupted must not have come to its end before.
  local function let_end(run)
    fs.write(("%s/%s-end"):format(cloud.simulator.env.CIRANDA_SIM_SHARED, run), "")
  end

  local function start(run, ...)
    return cloud:start_program(
      "multihost_runner",
      "--TPU_PREFIX=job",
      "--RUN_NAME=" .. run,
      "--FAILURE_GRACE=2",
      ("--COMMAND=python3 train.py --checkpoint_dir $CIRANDA_SIM_SHARED/%s --step-time 0.02 --save-every 10 "):format(
        run
      ) .. ("--until $CIRANDA_SIM_SHARED/%s-end"):format(run),
      "--CHECKPOINT_DIR=$CIRANDA_SIM_SHARED/" .. run,
      ...
    )
  end

  --- Waits until the first worker's newest log has a line.
  local function log_has(run, pattern)
    cloud_support.wait(pattern .. " in the log of " .. run, function()
      local ok, text = pcall(fs.read, ("%s/%s/output_slice_0000_worker_0000.txt"):format(cloud.root, run))
      return ok and text:find(pattern)
    end)
  end

  --- The facts of a run's journal, as far as their lines are whole.
  local function facts(run)
    local list = {}
    for line in
      fs.read(("%s/state/ciranda/runs/%s/journal.jsonl"):format(cloud.root, run)):gmatch("([^\n]+)\n")
    do
      list[#list + 1] = json.decode(line)
    end
    return list
  end

  local function attempts(run)
    local list = {}
    for _, fact in ipairs(facts(run)) do
      if fact.fact == "attempt" then
        list[#list + 1] = fact
      elseif fact.fact == "attempt_end" then
        list[#list].kind = fact.kind
      end
    end
    return list
  end

  local function another_attempt(run)
    cloud_support.wait("another attempt", function()
      return #attempts(run) == 2
    end)
  end

  it("waits for the repair, stages the new machines, and resumes from the last step on disk", function()
    local running = start("r1", "--INFRA_RESTARTS=1")
    log_has("r1", "completed step: 12,")
    control("nodes/job-1:lose")
    another_attempt("r1")
    let_end("r1")
    local result = running.wait()
    assert.equal(0, result.code, result.err)
    local list = attempts("r1")
    assert.same({ "infra", "done" }, { list[1].kind, list[2].kind })
    -- The slice came back with another address and another host key, and those are what it was found by.
    assert.not_same(list[1].workers[2].pins, list[2].workers[2].pins)
    assert.same("job", list[2].cloud.queued_resource)
    assert.matches("The machines: job is ACTIVE", result.err, 1, true)
    local log = fs.read(cloud.root .. "/r1/output_slice_0001_worker_0000.txt")
    local first = tonumber(log:match("completed step: (%d+)"))
    assert.equal(0, first % 10, log)
    assert.is_true(first >= 10, log)
    assert.matches("Attempt 2 (" .. list[2].attempt, result.err, 1, true)
  end)

  it(
    "saves upon a notice of maintenance, waits until it is over, and resumes after the step saved",
    function()
      fs.write(
        cloud.root .. "/code/hooks.lua",
        'return { on_maintenance = function(what) io.stderr:write("hook: ", what.text, "\\n") end }'
      )
      local running = start("r2", "--PREEMPTION_RESTARTS=1", "--HOOKS=hooks.lua", "--GRACE=20")
      log_has("r2", "completed step: 12,")
      local answer = http.request({
        method = "POST",
        url = ("%s/v2alpha1/projects/%s/locations/%s/nodes/job-1:simulateMaintenanceEvent"):format(
          cloud.simulator.url,
          cloud.simulator.env.CLOUDSDK_CORE_PROJECT,
          cloud.simulator.env.CLOUDSDK_COMPUTE_ZONE
        ),
        headers = {
          Authorization = "Bearer " .. fs.read(cloud.simulator.env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE)
            :match("%S+"),
        },
        body = json.encode({ workerIds = { "0" } }),
        timeout = 20,
      })
      assert.equal(200, answer.status, answer.body)
      -- The machine restarts when everybody has saved and left, however long that takes here.
      cloud_support.wait("the end of the first attempt", function()
        return attempts("r2")[1].kind
      end)
      control("clock", { advance = NOTICE })
      another_attempt("r2")
      let_end("r2")
      local result = running.wait()
      assert.equal(0, result.code, result.err)
      local list = attempts("r2")
      assert.same({ "preempted", "done" }, { list[1].kind, list[2].kind })
      assert.matches(
        "hook: maintenance (TERMINATE_ON_HOST_MAINTENANCE), slice 1 worker 0",
        result.err,
        1,
        true
      )
      local step = tonumber(result.err:match("Checkpoint: saved: step (%d+) is on disk"))
      assert.is_truthy(step, result.err)
      local log = fs.read(cloud.root .. "/r2/output_slice_0001_worker_0000.txt")
      assert.equal(step + 1, tonumber(log:match("completed step: (%d+)")), result.err)
      assert.matches(("A restart begins after step %d: saved "):format(step), result.err, 1, true)
    end
  )

  it("ends as preempted when the slices were taken away and the queued resource is SUSPENDED", function()
    local running = start("r3", "--PREEMPTION_RESTARTS=2", "--INFRA_RESTARTS=2")
    log_has("r3", "completed step: 3,")
    control("nodes/job-1:preempt", { notice = 0 })
    local result = running.wait()
    assert.equal(1, result.code, result.err)
    assert.matches("\npreempted: there are no machines for another attempt: .*SUSPENDED", result.err)
    assert.equal(1, #attempts("r3"))
  end)

  it(
    "asks again for what was taken away for good, when it was told to, and resumes on new machines",
    function()
      -- r3 has left it SUSPENDED.
      local parent = ("/v2/projects/%s/locations/%s/"):format(
        cloud.simulator.env.CLOUDSDK_CORE_PROJECT,
        cloud.simulator.env.CLOUDSDK_COMPUTE_ZONE
      )
      local made = cloud:run("qr", "delete", "job")
      assert.equal(0, made.code, made.err)
      made = cloud:run(
        "qr",
        "create",
        "job",
        "--spot",
        "--accelerator-type=v5litepod-4",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--node-count=2",
        "--node-prefix=job",
        "--labels=team=night"
      )
      assert.equal(0, made.code, made.err)
      local running = start("r4", "--PREEMPTION_RESTARTS=2", "--RECREATE=true")
      log_has("r4", "completed step: 12,")
      control("nodes/job-1:preempt", { notice = 0 })
      -- Noted after it has been said: a runner that dies in between asks once more.
      cloud_support.wait(running.errors, function()
        local list = facts("r4")
        return list[#list].fact == "recreated"
      end)
      assert.matches("job is asked for again", running.errors(), 1, true)
      -- The runner dies while it waits, and another goes on.
      running.program:signal("SIGKILL")
      local before = running.wait().err
      let_end("r4")
      local result = cloud:run("attach", "r4")
      result.err = before .. result.err
      assert.equal(0, result.code, result.err)
      local list = attempts("r4")
      assert.same({ "preempted", "done" }, { list[1].kind, list[2].kind })
      assert.not_same(list[1].workers[1].pins, list[2].workers[1].pins)
      assert.matches(
        "job is SUSPENDED: its machines and what was on their disks are gone.",
        result.err,
        1,
        true
      )
      assert.matches("asking for it again (1 of --PREEMPTION_RESTARTS=2)", result.err, 1, true)
      assert.matches("A restart begins after step %d+", result.err)
      local log = fs.read(cloud.root .. "/r4/output_slice_0001_worker_0000.txt")
      local first = tonumber(log:match("completed step: (%d+)"))
      assert.is_true(first >= 10 and first % 10 == 0, log)
      -- The intent came before the delete, the delete before the request; and what was asked for is the same.
      local order = {}
      for _, fact in ipairs(facts("r4")) do
        if fact.fact == "recreate" or fact.fact == "object" or fact.fact == "recreated" then
          order[#order + 1] = fact.phase or fact.fact
        end
      end
      assert.same({ "recreate", "deleting", "gone", "intent", "created", "recreated" }, order)
      local answer = http.request({
        method = "GET",
        url = cloud.simulator.url .. parent .. "queuedResources/job",
        headers = {
          Authorization = "Bearer " .. fs.read(cloud.simulator.env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE)
            :match("%S+"),
        },
        timeout = 20,
      })
      local now = json.decode(answer.body)
      assert.is_table(now.spot)
      assert.equal("night", now.tpu.nodeSpec[2].node.labels.team)
      assert.equal("job-1", now.tpu.nodeSpec[2].nodeId)
      -- It outlives the run, as what it took the place of would have.
      local collected = cloud:run("gc")
      assert.matches("job%s.*ACTIVE%s+a job%s+keep", collected.out)
    end
  )

  it("asks for nothing again beyond the budget, nor what a user has suspended", function()
    local running = start("r5", "--PREEMPTION_RESTARTS=1", "--INFRA_RESTARTS=1", "--RECREATE=true")
    log_has("r5", "completed step: 3,")
    for _, node in ipairs({ "job-0", "job-1" }) do
      local deleted = cloud:run("tpu_vm", "delete", node, "--force")
      assert.equal(0, deleted.code, deleted.err)
    end
    local result = running.wait()
    assert.equal(1, result.code, result.err)
    assert.matches(
      "job is SUSPENDED and is not asked for again: a user has suspended it",
      result.err,
      1,
      true
    )
    assert.matches("\npreempted: there are no machines for another attempt", result.err)
  end)
end)
