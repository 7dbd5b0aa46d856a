-- Jobs that run by themselves, on the simulated cloud: the start-up script really runs, at every boot.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local storage_of = require("ciranda.gcp.storage")
local support = dofile("tests/spec/recipes/cloud_support.lua")
local task = require("ciranda.task")
local uv = require("luv")

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
  end)

  teardown(function()
    cloud:stop()
  end)

  local function state_of(id)
    local result = cloud:run("qr", "describe", id, "--format=value(state.state)")
    return result.code == 0 and (result.out:gsub("\n", "")) or nil
  end

  local function read(name)
    return (storage:download("bucket", name))
  end

  it("is followed to its end; who fails first ends the others and is the cause", function()
    local result = cloud:run(
      "multihost_job",
      "--TPU_TYPE=v5litepod-4",
      "--BUCKET_NAME=gs://bucket/",
      "--BUCKET_DIR=gs://bucket/dir/",
      "--RUN_NAME=Follow_Me",
      "--follow=true",
      "--COMMAND=cat data.txt; echo $SLICE_ID $WORKER_ID $NODE_ID $ZONE $PROJECT ${VIRTUAL_ENV:+venv};"
        .. ("up=%s/follow-me-up; "):format(cloud.simulator.env.CIRANDA_SIM_SHARED)
        .. "[ $SLICE_ID = 0 ] || { until [ -e $up ]; do sleep 0.1; done; exit 5; }; "
        .. "trap 'echo told; exit 3' TERM; sleep 600 & : > $up; wait"
    )
    assert.equal(5, result.code, result.err)
    assert.matches(
      "RUN_NAME Follow_Me is no name for a queued resource: it is follow-me",
      result.err,
      1,
      true
    )
    assert.matches("Runtime version: v2-alpha-tpuv5-lite, the usual one", result.err, 1, true)
    assert.matches("data\n0 0 follow-me-0 us-west4-a simulated-project venv\n", result.out, 1, true)
    assert.matches("another worker has failed: stopping, with 300 s to save\ntold\n", result.out, 1, true)
    assert.matches("failed on slice 1 worker 0 with error code 5, see logs", result.err, 1, true)
    assert.is_nil(state_of("follow-me"))
    local text = read("dir/follow-me/main_command_log_slice_1_worker_0")
    assert.matches("multihost_job attempt 1 on slice 1 worker 0", text, 1, true)
    assert.matches(
      "multihost_job finished main command on slice 1 worker 0 at [%d%-]+ [%d:]+ UTC with exit status 5%.\n$",
      text
    )
    assert.is_not_nil(storage:stat("bucket", "dir/follow-me/script_dir_zip_follow-me.tar.gz"))
    local by_path = {}
    for _, entry in ipairs(json.decode(read("dir/follow-me/manifest.json"))) do
      by_path[entry.path] = entry
    end
    assert.equal(5, by_path["data.txt"].size)
    assert.equal(64, #by_path["data.txt"].sha256)

    local status = cloud:run("job_status", "follow-me")
    assert.equal(5, status.code, status.err)
    assert.matches("SLICE +WORKER +STAGE +ATTEMPT +STEP +STATUS +LOG_BYTES +SINCE\n", status.out)
    assert.matches("\n1 +0 +finished +1 +%- +5 +%d+ ", status.out)
    local records = {}
    for line in cloud:run("--json", "job_status", "follow-me").out:gmatch("[^\n]+") do
      records[#records + 1] = json.decode(line)
    end
    assert.same({ "worker", "worker" }, { records[1].event, records[2].event })
    assert.matches("^gs://bucket/dir/follow%-me/main_command_log_slice_1", records[2].worker.log)
    assert.same({ "end", 5 }, { records[#records].event, records[#records].status })
    assert.matches(
      "2 of 2 workers have finished generation 1, the first failure being slice 1 worker 0 with status 5; "
        .. "queued resource follow-me is gone",
      status.err,
      1,
      true
    )
    assert.equal(
      "ended 5 user\n",
      cloud:run("runs", "--filter=name=follow-me", "--format=value[separator=' '](state,status,kind)").out
    )
    -- Its name is free again; only a job that is there can be given other code.
    local update =
      cloud:run("multihost_job", "--BUCKET_NAME=bucket", "--RUN_NAME=no", "--COMMAND=true", "--UPDATE=true")
    assert.equal(2, update.code)
    assert.matches("there is no queued resource no in us-west4-a", update.err, 1, true)
    -- Elsewhere, where no journal knows it.
    local elsewhere =
      cloud:run("job_status", "nowhere", "--BUCKET_NAME=bucket", "--BUCKET_DIR=dir", "--format=json")
    assert.equal(1, elsewhere.code)
    assert.matches("there is no job at gs://bucket/dir/nowhere/", elsewhere.err, 1, true)
    assert.equal(2, cloud:run("job_status", "nowhere").code)
  end)

  it("refuses a job that cannot work before anything exists", function()
    local base = { "multihost_job", "--BUCKET_NAME=bucket", "--RUN_NAME=bad", "--COMMAND=true" }
    for name, case in pairs({
      ["unknown flag"] = { "--CQR_EXTRA_ARGS=--spott", "has no such flag" },
      ["startup script"] = { "--CQR_EXTRA_ARGS=--metadata=startup-script=x", "has a startup-script" },
      ["own flags"] = { "--CQR_EXTRA_ARGS=--node-count=4", "says what this recipe says itself" },
      ["unclosed quote"] = { "--CQR_EXTRA_ARGS=--labels='a=b", "is not closed" },
      ["type"] = { "--TPU_TYPE=v5litepod-5", "v5litepod-5" },
      ["slices"] = { "--NUM_SLICES=0", "slices" },
    }) do
      local words = table.move(base, 1, #base, 1, {})
      words[#words + 1] = case[1]
      local result = cloud:run(table.unpack(words))
      assert.equal(2, result.code, name .. ": " .. result.err)
      assert.matches(case[2], result.err, 1, true)
    end
    assert.is_nil(state_of("bad"))
    assert.same({}, (storage:list("bucket", { prefix = "bad/" })))
  end)

  it(
    "refuses another shape under the name of a job that was preempted, whoever asks, and changes nothing",
    function()
      local function job(options)
        local words = {
          "multihost_job",
          "--BUCKET_NAME=bucket",
          "--RUN_NAME=sus",
          "--CQR_EXTRA_ARGS=--spot",
          "--COMMAND=" .. (options.command or "[ -e $0 ] || sleep 600"),
          "--TPU_TYPE=" .. (options.type or "v5litepod-4"),
          "--NUM_SLICES=" .. (options.slices or 2),
          "--PREEMPTIONS=0",
          table.unpack(options),
        }
        return words
      end
      local function wait_for(state)
        local deadline = uv.hrtime() + 60e9
        while state_of("sus") ~= state do
          assert.is_true(uv.hrtime() < deadline, "never " .. state)
          task.sleep(0.2)
        end
      end
      local runner = cloud:start_program(table.unpack(job({ "--follow=true" })))
      wait_for("ACTIVE")
      local function followed()
        support.wait("the job is followed", function()
          return runner.errors():find("of 2 workers have finished", 1, true)
        end)
      end
      followed()
      -- Who follows it may leave: it goes on, and that is said.
      runner.program:signal("SIGTERM")
      local left = runner.wait()
      assert.equal(143, left.code)
      assert.matches(
        "Nobody follows run sus now; it goes on by itself: ciranda job_status sus .* ciranda qr delete sus "
          .. "%-%-force ends it\ninterrupted: by SIGTERM, exit status 143\n$",
        left.err
      )
      assert.equal("ACTIVE", state_of("sus"))
      local attached = cloud:run("attach", "sus")
      assert.equal(1, attached.code)
      assert.matches("run sus is a job that runs by itself: ciranda job_status sus", attached.err, 1, true)
      runner = cloud:start_program(table.unpack(job({ "--follow=true" })))
      followed()
      runner.program:signal("SIGKILL")
      runner.wait()
      local answer = http.request({
        method = "POST",
        url = cloud.simulator.url .. "/sim/v1/nodes/sus-1:preempt",
        body = '{"notice":0}',
      })
      assert.equal(200, answer.status, answer.body)
      wait_for("SUSPENDED")
      local generation, first =
        read("sus/generation"), cloud:run("qr", "describe", "sus", "--format=json").out

      -- Who gave it asks for another type and COMMAND, another type, another number of slices.
      for _, options in ipairs({
        { type = "v5litepod-8", command = "echo other", "--follow=true" },
        { type = "v5litepod-8" },
        { slices = 3, "--follow=true" },
      }) do
        local result = cloud:run(table.unpack(job(options)))
        assert.equal(1, result.code, result.err)
        assert.matches(
          "sus, which run sus asked for before, was another request, and is SUSPENDED: delete it first",
          result.err,
          1,
          true
        )
      end
      -- Somebody else, whose machine knows nothing of it.
      local argv = cloud:command(job({ type = "v5litepod-8", "--follow=true" }))
      argv.env.XDG_STATE_HOME = cloud.root .. "/other-state"
      argv.timeout = 100
      local other = process.run(argv)
      assert.equal(1, other.code, other.stderr)
      assert.matches("queued resource sus exists already and is SUSPENDED", other.stderr, 1, true)

      assert.equal(generation, read("sus/generation"))
      assert.equal(first, cloud:run("qr", "describe", "sus", "--format=json").out)
      assert.matches("of 2 workers have finished", cloud:run("job_status", "sus").err, 1, true)
      -- As it was, and with nothing to be asked for again, it ends with the reason; it is known, and can go.
      local same = cloud:run(table.unpack(job({ "--follow=true" })))
      assert.equal(1, same.code, same.err)
      assert.matches("sus", cloud:run("gc").out, 1, true)
      assert.equal(0, cloud:run("qr", "delete", "sus", "--force").code)
      assert.is_nil(state_of("sus"))
    end
  )
end)
