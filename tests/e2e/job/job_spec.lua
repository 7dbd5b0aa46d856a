-- Jobs that run by themselves through what a platform does to machines: maintenance, a loss, a reset. The start-up
-- script really runs, at every boot.
local clock = require("ciranda.sim.clock")
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local storage_of = require("ciranda.gcp.storage")
local support = dofile("tests/spec/recipes/cloud_support.lua")

local wait = support.wait

describe("multihost_job on the simulated cloud", function()
  local cloud, storage

  setup(function()
    cloud = support.start({ slices = 0, buckets = { "bucket" } })
    storage = storage_of.connect({
      endpoint = cloud.simulator.env.STORAGE_EMULATOR_HOST,
      client = require("ciranda.gcp.client").new({
        credentials = require("ciranda.gcp.credentials").none(),
      }),
    })
    fs.write(cloud.root .. "/code/data.txt", "data\n")
    fs.write(cloud.root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"))
  end)

  teardown(function()
    cloud:stop()
  end)

  --- Gives a job of two slices, one worker each.
  local function job(name, command, ...)
    return cloud:run(
      "multihost_job",
      "--TPU_TYPE=v5litepod-4",
      "--BUCKET_NAME=bucket",
      "--RUN_NAME=" .. name,
      "--COMMAND=" .. command,
      ...
    )
  end

  local function state_of(id)
    local result = cloud:run("qr", "describe", id, "--format=value(state.state)")
    return result.code == 0 and (result.out:gsub("\n", "")) or nil
  end

  local function read(name)
    local ok, text = pcall(storage.download, storage, "bucket", name)
    return ok and text or ""
  end

  local function log(run, slice)
    return read(("%s/main_command_log_slice_%d_worker_0"):format(run, slice))
  end

  local function gone(run)
    wait(run .. " is gone", function()
      return not state_of(run)
    end)
  end

  --- Does something to a node, as the platform would.
  local function platform(node, action)
    local answer = http.request({
      method = "POST",
      url = ("%s/sim/v1/nodes/%s:%s"):format(cloud.simulator.url, node, action),
      body = "{}",
    })
    assert.equal(200, answer.status, answer.body)
  end

  --- How many checkpoints of a trainer are finished.
  local function steps(directory)
    local found = {}
    for _, entry in ipairs(fs.exists(directory) and fs.list(directory) or {}) do
      found[#found + 1] = math.tointeger(tonumber(entry.name))
    end
    table.sort(found)
    return found
  end

  it("goes on after maintenance and after the loss of a machine, with nobody watching", function()
    local checkpoints = cloud.simulator.env.CIRANDA_SIM_SHARED .. "/long"
    fs.mkdir(checkpoints)
    fs.chmod(checkpoints, 511)
    local result = job(
      "long",
      ("umask 0; exec 9<${CIRANDA_SIM_DEVICES:-/dev/vfio/}0; until [ -e %s/go ]; do sleep 0.1; done; "):format(
        checkpoints
      )
        -- It goes on until all that is to befall it has been seen, however busy the machine is.
        .. ("exec python3 train.py --checkpoint_dir=%s --until=%s/enough --step-time=0.1 --save-every=10"):format(
          checkpoints,
          checkpoints
        ),
      "--ENABLE_AUTOCHECKPOINT=true"
    )
    assert.equal(0, result.code, result.err)
    assert.matches("Queued resource long was accepted: 2 slices of v5litepod-4", result.err, 1, true)
    -- The name is taken, and what its machines read is not changed by accident.
    local second = job("long", "true")
    assert.equal(1, second.code)
    assert.matches("queued resource long exists already and is", second.err, 1, true)
    assert.equal(1, tonumber(read("long/generation"):match("GENERATION=(%d+)")))
    fs.write(checkpoints .. "/go", "")

    wait("the first periodic checkpoint", function()
      return #steps(checkpoints) > 0
    end)
    platform("long-0", "maintain")
    wait("a second attempt of both", function()
      return log("long", 0):find("attempt 2 on slice 0", 1, true)
        and log("long", 1):find("attempt 2 on", 1, true)
    end)
    local saved = steps(checkpoints)
    local at = saved[#saved]
    wait("the next checkpoint", function()
      local now = steps(checkpoints)
      return now[#now] > at
    end)
    local before = log("long", 0)
    platform("long-1", "lose")
    wait("a third attempt of both, which goes on from a checkpoint", function()
      return select(2, log("long", 0):gsub("restored step %d+", "")) == 2
        and log("long", 1):find("attempt 3 on slice 1", 1, true)
    end)
    fs.write(checkpoints .. "/enough", "")
    gone("long")
    for slice = 0, 1 do
      assert.equal(0, json.decode(read(("long/status_slice_%d_worker_0"):format(slice))).status)
    end
    local first, second_log = log("long", 0), log("long", 1)
    assert.equal(before:sub(1, 200), first:sub(1, 200))
    assert.matches("Reached preemption sync point, step=%d+", first)
    assert.matches("attempt 3 on slice 0 worker 0", first, 1, true)
    -- The new machine of slice 1 goes on with the old one's log, and its count.
    assert.matches("attempt 1 on slice 1.*attempt 2 on slice 1.*attempt 3 on slice 1", second_log)
    local resumed = {}
    for step in first:gmatch("restored step (%d+)") do
      resumed[#resumed + 1] = tonumber(step)
    end
    assert.equal(2, #resumed, first)
    assert.is_true(resumed[2] >= resumed[1] and resumed[1] > 0)
    assert.is_truthy(first:find("training finished at step", 1, true))
  end)

  --- When something that the simulator tells happened, in seconds since the epoch: the first event with these words.
  local function time_of(subject, text)
    local answer = http.request({ url = cloud.simulator.url .. "/sim/v1/events" })
    for _, event in ipairs(json.decode(answer.body).events) do
      if event.subject:match("[^/]*$") == subject and event.text == text then
        return clock.parse_timestamp(event.time)
      end
    end
    error(("no event: %s %s"):format(subject, text), 2)
  end

  it("finishes without the runner, which is killed in its first minute, and gives the chips back", function()
    local shared = cloud.simulator.env.CIRANDA_SIM_SHARED .. "/alone"
    fs.mkdir(shared)
    fs.chmod(shared, 511)
    local runner = cloud:start_program(
      "multihost_job",
      "--TPU_TYPE=v5litepod-4",
      "--BUCKET_NAME=bucket",
      "--RUN_NAME=alone",
      "--follow=true",
      -- The workers do not end together: who is first must wait for the other before anything is deleted.
      ("--COMMAND=umask 0; cd %s; date +%%s.%%N > began.$SLICE_ID; until [ -e gone ]; do sleep 0.1; done; "):format(
        shared
      )
        .. "for i in $(seq 200); do echo $i $(od -An -N8 -tx8 /dev/urandom); done | tee printed.$SLICE_ID; "
        .. "sleep $((SLICE_ID * 3)); date +%s.%N > ended.$SLICE_ID"
    )
    wait("the request is accepted", function()
      return runner.errors():find("Queued resource alone was accepted", 1, true)
    end)
    runner.program:signal("SIGKILL")
    assert.equal("SIGKILL", runner.wait().signal)
    fs.write(shared .. "/gone", "")

    gone("alone")
    for slice = 0, 1 do
      assert.equal(0, json.decode(read(("alone/status_slice_%d_worker_0"):format(slice))).status)
      local printed = fs.read(("%s/printed.%d"):format(shared, slice))
      local text = log("alone", slice)
      local kept, after = text:match("multihost_job attempt 1 on [^\n]*\n(.-\n)(multihost_job finished .*)$")
      assert.is_true(printed == kept, ("%d bytes were printed, the log has %d"):format(#printed, #text))
      assert.matches("^multihost_job finished main command on [^\n]* with exit status 0%.\n$", after)
      local function at(what)
        return assert(tonumber((fs.read(("%s/%s.%d"):format(shared, what, slice)):gsub("\n", ""))))
      end
      local node = ("alone-%d"):format(slice)
      local before = at("began") - time_of(node, "READY")
      local behind = time_of(node, "DELETING") - at("ended")
      assert.is_true(behind > 0, "the machines were taken while COMMAND ran")
      assert.is_true(
        before + behind < 120,
        ("%s was idle for %.0f s and %.0f s"):format(node, before, behind)
      )
    end
  end)

  it(
    "is not run again where it has finished, though the machine is a new one, until it is another job",
    function()
      local result = job("once", "echo here $SLICE_ID; [ $SLICE_ID = 0 ] || sleep 600")
      assert.equal(0, result.code, result.err)
      wait("slice 0 has finished", function()
        return storage:stat("bucket", "once/finished-1_slice_0_worker_0")
      end)
      wait("slice 1 runs", function()
        return log("once", 1):find("attempt 1 on slice 1", 1, true)
      end)
      platform("once-0", "lose")
      wait("slice 0 is back", function()
        return log("once", 0):find("slice 0 worker 0 has finished generation 1; it is not run again", 1, true)
      end)
      wait("slice 1 has started again", function()
        return log("once", 1):find("attempt 2 on slice 1", 1, true)
      end)
      assert.equal("ACTIVE", state_of("once"))
      local update = job("once", "echo second $SLICE_ID", "--UPDATE=true")
      assert.equal(0, update.code, update.err)
      assert.matches("Generation 2 is there", update.err, 1, true)
      wait("a reset", function()
        return cloud:run("qr", "reset", "once").code == 0
      end)
      gone("once")
      assert.equal(1, select(2, log("once", 0):gsub("here 0", "")))
      assert.matches("second 0\n", log("once", 0), 1, true)
      assert.matches("second 1\n", log("once", 1), 1, true)
    end
  )
end)
