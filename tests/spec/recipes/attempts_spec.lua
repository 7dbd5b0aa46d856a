-- A run whose machines are lost under it, on the simulated cloud, with the stand-in trainer.
local cloud_support = dofile("tests/spec/recipes/cloud_support.lua")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local task = require("ciranda.task")

describe("multihost_runner on machines that are lost", function()
  local cloud

  before_each(function()
    cloud = cloud_support.start({ slices = 2, type = "v5litepod-4", prefix = "job" })
    fs.write(cloud.root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"))
  end)
  after_each(function()
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

  local function start(...)
    return cloud:start_program(
      "multihost_runner",
      "--TPU_PREFIX=job",
      "--RUN_NAME=r1",
      "--FAILURE_GRACE=2",
      "--COMMAND=python3 train.py --checkpoint_dir $CIRANDA_SIM_SHARED/ckpt --step-time 0.02 --save-every 10 "
        .. "--peer-timeout 8 --steps 60",
      "--CHECKPOINT_DIR=$CIRANDA_SIM_SHARED/ckpt",
      ...
    )
  end

  --- Waits until the first worker's newest log has a line.
  local function log_has(pattern)
    task.timeout(60, function()
      while true do
        local ok, text = pcall(fs.read, cloud.root .. "/r1/output_slice_0000_worker_0000.txt")
        if ok and text:find(pattern) then
          return
        end
        task.sleep(0.05)
      end
    end)
  end

  local function attempts()
    local list = {}
    for line in fs.read(cloud.root .. "/state/ciranda/runs/r1/journal.jsonl"):gmatch("[^\n]+") do
      local fact = json.decode(line)
      if fact.fact == "attempt" then
        list[#list + 1] = fact
      elseif fact.fact == "attempt_end" then
        list[#list].kind = fact.kind
      end
    end
    return list
  end

  it("waits for the repair, stages the new machines, and resumes from the last step on disk", function()
    local running = start("--INFRA_RESTARTS=1")
    log_has("completed step: 12,")
    control("nodes/job-1:lose")
    local result = running.wait()
    assert.equal(0, result.code, result.err)
    local list = attempts()
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

  it("ends as preempted when the slices were taken away and the queued resource is SUSPENDED", function()
    local running = start("--PREEMPTION_RESTARTS=2", "--INFRA_RESTARTS=2")
    log_has("completed step: 3,")
    control("nodes/job-1:preempt", { notice = 0 })
    local result = running.wait()
    assert.equal(1, result.code, result.err)
    assert.matches("\npreempted: there are no machines for another attempt: .*SUSPENDED", result.err)
    assert.equal(1, #attempts())
  end)
end)
