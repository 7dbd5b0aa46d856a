-- A drill by a maintenance event that the simulated cloud's API sends to the nodes of a live run: the platform signals
-- who holds the accelerators, the runner tells the others, and the machines restart.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/cloud_support.lua")
local task = require("ciranda.task")
local uv = require("luv")

-- Seconds from a notice to its maintenance, which pass when the spec lets them.
local NOTICE = 600

describe("autocheckpoint drill --BY=maintenance", function()
  local cloud, shared

  setup(function()
    cloud = support.start({ grace = { notice = NOTICE } })
    shared = cloud.simulator.env.CIRANDA_SIM_SHARED
    fs.write(cloud.root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"))
    for _, words in ipairs({
      { "qr", "create", "ms", "--node-count=2", "--node-prefix=ms", "--autocheckpoint-enabled" },
      { "qr", "create", "vm", "--node-id=vm" },
    }) do
      table.move(
        { "--accelerator-type=v5litepod-4", "--runtime-version=v2-alpha-tpuv5-lite" },
        1,
        2,
        #words + 1,
        words
      )
      local made = cloud:run(table.unpack(words))
      assert.equal(0, made.code, made.err)
    end
  end)

  teardown(function()
    cloud:stop()
  end)

  local function wait(what, running, holds)
    return support.wait(function()
      return what .. "\n" .. running.errors()
    end, holds)
  end

  --- Starts the trainer, which holds an accelerator of its worker, and waits until every worker trains.
  local function train(run, target, slices, options, ...)
    local directory = ("%s/%s-ckpt"):format(shared, run)
    fs.mkdir(directory)
    fs.chmod(directory, 511)
    local running = cloud:start_program(
      "multihost_runner",
      "--TPU_PREFIX=" .. target,
      "--RUN_NAME=" .. run,
      "--CHECKPOINT_DIR=" .. directory,
      "--COMMAND=umask 0; exec 9<${CIRANDA_SIM_DEVICES:-/dev/vfio/}0; exec python3 train.py --checkpoint_dir="
        .. ("%s --steps=100000 --step-time=0.05 %s"):format(directory, options),
      ...
    )
    for slice = 0, slices - 1 do
      local path = ("%s/%s/output_slice_%04d_worker_0000.txt"):format(cloud.root, run, slice)
      wait(run .. " trains", running, function()
        return fs.exists(path) and fs.read(path):find("completed step: 3,", 1, true)
      end)
    end
    return running
  end

  --- Runs a drill. The maintenance begins when it has seen the notice, and so has the run's runner, if there is one.
  local function drill(run, runner, ...)
    local drilling = cloud:start_program("--json", "autocheckpoint", "drill", run, "--BY=maintenance", ...)
    local scope <close> = task.scope()
    local ending = scope:spawn(drilling.wait)
    wait("the notice of " .. run, runner or drilling, function()
      return ending:status() == "done"
        or drilling.out():find("Notice: maintenance", 1, true)
          and (not runner or runner.errors():find("Notice: maintenance", 1, true))
    end)
    if ending:status() ~= "done" then
      local url = cloud.simulator.url .. "/sim/v1/clock"
      assert.equal(200, http.post(url, { advance = NOTICE }).status)
    end
    local result = ending:wait()
    return result, json.decode(result.out:match("([^\n]+)\n$") or "{}")
  end

  --- Lets go of a run that was left running: it would wait for its peers.
  local function stop(run)
    assert.equal(0, cloud:run("stop", run, "--GRACE=1").code)
  end

  it(
    "saves at one step, restarts and resumes, with a runner that stops and then with the platform alone",
    function()
      local running = train("m1", "ms", 2, "--save-every=1000")
      local result, last = drill("m1", running, "--WORKERS=slice1/worker0")
      assert.equal(0, result.code, result.out .. result.err)
      local step =
        tonumber(last.message:match("^drill: step (%d+) was saved in [%d.]+ s and training resumed from it$"))
      assert.is_not_nil(step, last.message)
      assert.matches("the grace is 290 s", result.out, 1, true)
      assert.matches("Maintenance event for slice1/worker0, 290 s from its notice", result.out, 1, true)
      assert.matches(
        "Notice: maintenance (TERMINATE_ON_HOST_MAINTENANCE), slice 1 worker 0",
        result.out,
        1,
        true
      )
      for slice = 0, 1 do
        assert.matches(("slice%d/worker0 +%d +[%%d.]+ s +0"):format(slice, step), result.out)
      end
      local ended = running.wait()
      assert.equal(143, ended.code, ended.err)
      assert.matches("preempted: ", ended.err, 1, true)
      assert.matches(("Checkpoint: saved: step %d is on disk"):format(step), ended.err, 1, true)
      -- It was left running, and nobody has it: now only the platform can tell it.
      result, last = drill("m1")
      assert.equal(0, result.code, result.out .. result.err)
      assert.is_true(tonumber(last.message:match("^drill: step (%d+) was saved")) > step)
      stop("m1")
    end
  )

  it("sees the runner go on by itself", function()
    local running = train("m2", "ms", 2, "", "--PREEMPTION_RESTARTS=1")
    local result, last = drill("m2", running)
    assert.equal(0, result.code, result.out .. result.err)
    assert.matches("its runner has it", result.out, 1, true)
    local step = tonumber(last.message:match("step (%d+) was saved"))
    wait("the second attempt", running, function()
      return fs.read(cloud.root .. "/m2/output_slice_0000_worker_0000.txt")
        :find("completed step: " .. step + 1, 1, true)
    end)
    assert.is_true(uv.kill(running.program.pid, 0) == 0)
    running.program:signal("SIGTERM")
    assert.equal(143, running.wait().code)
  end)

  it(
    "fails of a save that takes longer than the grace, on one TPU VM whose runner is all there is",
    function()
      local running = train("m3", "vm", 1, "--variant=slow-saver --save-seconds=60")
      local result, last = drill("m3", running, "--GRACE=1")
      assert.equal(1, result.code, result.out .. result.err)
      assert.matches("^drill failed: ", last.message)
      assert.matches("not saved: nothing was saved after the signal", last.message, 1, true)
      running.wait()
      -- Without a runner nobody would have told it, and so nothing is done to it.
      result, last = drill("m3")
      assert.equal(2, result.code, result.out .. result.err)
      assert.matches(
        "nobody would tell COMMAND of the event: run m3 has no runner now",
        last.message,
        1,
        true
      )
      assert.matches("autocheckpoint is off on node vm", last.message, 1, true)
      stop("m3")
    end
  )

  it("refuses what makes no sense before anything is done", function()
    for _, case in ipairs({
      { "save", "--BY=maintenance", "is of drill" },
      { "drill", "--WORKERS=slice0/worker0", "is of --BY=maintenance" },
      { "drill", "--CAUSE=spot", "gives maintenance's grace", "--BY=maintenance" },
    }) do
      local result = cloud:run("autocheckpoint", case[1], "m1", case[2], case[4])
      assert.equal(2, result.code, result.err)
      assert.matches(case[3], result.err, 1, true)
    end
  end)
end)
