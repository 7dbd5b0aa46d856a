-- runs, logs and stop, on runs of real sshds, and on journals as other machines and crashes leave them.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local journals = require("ciranda.run.journal")
local process = require("ciranda.io.process")
local environment = dofile("tests/fixtures/environment.lua")
local support = dofile("tests/spec/recipes/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local workers = support.ssh.is_root and 2 or 1

describe("runs, logs and stop", function()
  local place

  setup(function()
    place = support.place(workers, 1)
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  local function recipe(name, ...)
    return place:run(name, { ... }, { fleet = false })
  end

  --- What `runs RUN` says.
  local function standing(run)
    local result = recipe("runs", run)
    assert.equal(0, result.code, result.err)
    return json.decode(result.out)
  end

  --- Starts a run that goes on until it is told to stop.
  local function start_endless(run, ...)
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      "--GRACE=20",
      "--COMMAND=trap 'echo saving; exit 0' TERM; sleep 600 & echo up; wait",
      ...,
    })
    for slice = 0, workers - 1 do
      place:log_has(run, slice, 0, "up\n")
    end
    return running
  end

  --- A journal as somebody else would have written it.
  local function write_journal(run, facts)
    local directory = place.root .. "/state/ciranda/runs/" .. run
    fs.mkdir_p(directory)
    local lines = {}
    for index, fact in ipairs(facts) do
      lines[index] = type(fact) == "string" and fact or json.encode(fact) .. "\n"
    end
    fs.write(directory .. "/journal.jsonl", table.concat(lines))
    return directory .. "/journal.jsonl"
  end

  it(
    "shows the logs of a run that has ended: of the first worker as they are, of others with a prefix",
    function()
      local run = place:name("ended")
      local result = place:run("multihost_runner", {
        "--RUN_NAME=" .. run,
        "--FAILURE_GRACE=1",
        "--COMMAND=for i in $(seq 2000); do echo line $i; done; printf 'no end'; exit 3",
      })
      assert.equal(3, result.code, result.err)
      local expected = {}
      for line = 1, 2000 do
        expected[line] = "line " .. line .. "\n"
      end
      local whole = table.concat(expected) .. "no end"
      assert.equal(whole, recipe("logs", run).out)
      assert.equal(whole, recipe("logs", run, "--follow").out)
      assert.equal("line 1999\nline 2000\nno end", recipe("logs", run, "--tail=3").out)
      assert.equal("", recipe("logs", run, "--tail=0").out)
      assert.equal(whole, recipe("logs", run, "--tail=5000").out)
      local set = workers == 2 and "slice[0-1]/worker0" or "slice0/worker0"
      assert.equal(
        workers == 2 and set .. ": line 2000\n" .. set .. ": no end\n" or "line 2000\nno end",
        recipe("logs", run, "--tail=2", "--show=all").out
      )
      local state = standing(run)
      assert.same({ "ended", 3, "user", workers, 1 }, {
        state.state,
        state.status,
        state.kind,
        state.workers,
        state.attempts,
      })
      assert.equal(whole, recipe("logs", run, "--attempt=" .. state.attempt).out)
      for want, arguments in pairs({
        ["has no attempt 0009-x"] = { run, "--attempt=0009-x" },
        ["names no worker"] = { run, "--show=slice7" },
        ["there is no run nowhere"] = { "nowhere" },
      }) do
        local refused = recipe("logs", table.unpack(arguments))
        assert.equal(1, refused.code)
        assert.matches(want, refused.err, 1, true)
      end
      assert.equal(2, recipe("logs", run, "--tail=-1").code)
    end
  )

  it("stops a run through its runner, which saves first", function()
    local run = place:name("watched")
    local running = start_endless(run)
    local state = standing(run)
    assert.equal("running", state.state)
    assert.equal(running.program.pid, state.runner.pid)
    assert.matches(run:gsub("%-", "%%-") .. " +multihost_runner +running ", recipe("runs").out)
    local result = recipe("stop", run)
    assert.equal(0, result.code, result.err)
    assert.matches("has ended: interrupted, exit status 143", result.err, 1, true)
    assert.equal(143, running.wait().code)
    assert.equal("up\nsaving\n", recipe("logs", run).out)
    local again = recipe("stop", run)
    assert.equal(0, again.code)
    assert.matches(("Nothing of run %s is running"):format(run), again.err, 1, true)
  end)

  it("stops a run whose runner is suspended, and says whose grace counts", function()
    local run = place:name("suspended")
    local running = start_endless(run)
    uv.kill(running.program.pid, "sigstop")
    local result = recipe("stop", run, "--GRACE=5")
    assert.equal(0, result.code, result.err)
    assert.matches(
      "it gives 20 s, as it was told (--GRACE is for a run without a runner)",
      result.err,
      1,
      true
    )
    assert.equal(143, running.wait().code)
  end)

  it("stops a run whose runner was killed, and brings its logs home", function()
    local run = place:name("orphan")
    local running = start_endless(run)
    uv.kill(running.program.pid, "sigkill")
    running.wait()
    assert.equal("detached", standing(run).state)
    local partial = recipe("logs", run, "--follow", "--remote=false") -- nobody brings more: it ends
    assert.equal("up\n", partial.out)
    assert.matches("written since is not here. ciranda attach " .. run, partial.err, 1, true)
    local result = recipe("stop", run)
    assert.equal(0, result.code, result.err)
    assert.matches(("Run %s is stopped"):format(run), result.err, 1, true)
    for slice = 0, workers - 1 do
      assert.equal(
        "up\nsaving\n",
        fs.read(("%s/tmp/%s/output_slice_%04d_worker_0000.txt"):format(place.root, run, slice))
      )
    end
    local state = standing(run)
    assert.same({ "ended", 143, "interrupted" }, { state.state, state.status, state.kind })
  end)

  it("bears several who stop one run at once, with a runner and without", function()
    for _, killed in ipairs({ false, true }) do
      local run = place:name(killed and "crowd-orphan" or "crowd")
      local running = start_endless(run)
      if killed then
        uv.kill(running.program.pid, "sigkill")
        running.wait()
      end
      local stops = {}
      for number = 1, 3 do
        stops[number] = place:start("stop", { run }, { fleet = false })
        if not killed then
          -- The next one comes when the runner is stopping, which one more signal would have it leave.
          assert(support.ssh.wait_for(function()
            local journal = fs.read(("%s/state/ciranda/runs/%s/journal.jsonl"):format(place.root, run))
            return journal:find('"fact":"stop"', 1, true)
          end))
        end
      end
      for _, stop in ipairs(stops) do
        local result = stop.wait()
        assert.equal(0, result.code, result.err)
      end
      assert.same({ "ended", 143 }, { standing(run).state, standing(run).status })
      if not killed then
        assert.equal(143, running.wait().code)
      end
    end
  end)

  it("waits for another stop, however long that takes to begin", function()
    local run = place:name("patient")
    local running = start_endless(run, "--CHECKPOINT_DIR=checkpoints") -- which are looked at before the stop
    uv.kill(running.program.pid, "sigkill")
    running.wait()
    local server = place.servers["0/0"]
    uv.kill(server.pid, "sigstop") -- who comes now is not greeted
    local first = place:start("stop", { run }, { fleet = false })
    assert(support.ssh.wait_for(function()
      return standing(run).state == "running"
    end))
    uv.kill(first.program.pid, "sigstop")
    local second = place:start("stop", { run }, { fleet = false })
    task.sleep(8) -- longer than whoever takes a run up is believed to be about to stop it
    uv.kill(server.pid, "sigcont")
    uv.kill(first.program.pid, "sigcont")
    for _, stop in ipairs({ first, second }) do
      local result = stop.wait()
      assert.equal(0, result.code, result.err)
    end
    assert.same({ "ended", 143 }, { standing(run).state, standing(run).status })
  end)

  --- A run that stand-ins have one after the other: each leaves upon SIGTERM, after `seconds`, and the next has the
  --- run; one that `ends` it writes so into the journal, one that `stops` is a stop, suspended, and leaves upon SIGCONT
  --- unless it is `deaf`. Returns what counts those that have been told.
  local function write_taken(run, runners)
    local function stat(pid)
      local after = fs.read(("/proc/%d/stat"):format(pid)):match("^.*%)(.*)$")
      local fields = {}
      for field in after:gmatch("%S+") do
        fields[#fields + 1] = field
      end
      return math.tointeger(tonumber(fields[20]))
    end
    local path = ("%s/state/ciranda/runs/%s/journal.jsonl"):format(place.root, run)
    local us = (os.time() - 60) * 1000000
    local facts = {
      { fact = "run", run = run, recipe = "multihost_runner", us = us },
      {
        fact = "attempt",
        attempt = "0001-aaaaaa",
        command = "true",
        workers = {},
        grace = runners.grace,
        us = us,
      },
      { fact = "go", attempt = "0001-aaaaaa", us = us },
    }
    local programs = {}
    finally(function() -- busted knows one a test
      for _, program in ipairs(programs) do
        uv.kill(-program.pid, "sigkill")
      end
    end)
    for number, one in ipairs(runners) do
      local program = process.spawn({
        "sh",
        "-c",
        ("trap 'sleep %g; echo told >> %s.told; %s kill $!; exit' %s; sleep 600 & echo up; wait"):format(
          one.seconds or 0,
          path,
          one.ends and ([[cat %s.last >> %s;]]):format(path, path) or "",
          one.deaf and "USR1" or one.stops and "CONT" or "TERM"
        ),
        stdout = process.PIPE,
      })
      programs[number] = program
      assert(program.stdout:read())
      if one.stops then
        uv.kill(program.pid, "sigstop")
      end
      facts[#facts + 1] = {
        fact = "runner",
        id = "runner" .. number,
        pid = program.pid,
        start_time = stat(program.pid),
        boot_id = fs.read("/proc/sys/kernel/random/boot_id"):match("%S+"),
        host = uv.os_gethostname(),
        stops = one.stops,
        us = us + number,
      }
    end
    write_journal(run, facts)
    fs.write(path .. ".last", json.encode({
      fact = "attempt_end",
      attempt = "0001-aaaaaa",
      status = 143,
      kind = "interrupted",
      us = us + 9,
    }) .. "\n")
    return function()
      return fs.exists(path .. ".told") and select(2, fs.read(path .. ".told"):gsub("told", "")) or 0
    end
  end

  it("asks also whoever takes the run up while it is being stopped", function()
    local run = place:name("handed-on")
    local told = write_taken(run, { {}, { ends = true } })
    local result = recipe("stop", run)
    assert.equal(0, result.code, result.err)
    assert.equal(2, told())
  end)

  it("wakes another stop that was suspended, and waits for it", function()
    local run = place:name("suspended")
    local told = write_taken(run, { { stops = true, ends = true } })
    local result = recipe("stop", run)
    assert.equal(0, result.code, result.err)
    assert.equal(1, told())
    assert.matches("process %d+ has taken it up to stop it", result.err)
  end)

  it("waits for another stop no longer than a stop may take", function()
    local run = place:name("deaf")
    local told = write_taken(run, { grace = -149, { stops = true, deaf = true } })
    local result = recipe("stop", run)
    assert.equal(124, result.code, result.err)
    assert.matches("the stop by process %d+ has not begun in time", result.err)
    assert.equal(0, told())
  end)

  it("gives up when others take the run up and leave it, again and again", function()
    local run = place:name("passed-round")
    -- A grace that leaves ten seconds of the time that a stop may take.
    local runners = { grace = -140 }
    for number = 1, 30 do
      runners[number] = { seconds = 0.5 }
    end
    local told = write_taken(run, runners)
    local result = recipe("stop", run)
    assert.equal(124, result.code, result.err)
    assert.matches("others take it up and leave it again", result.err, 1, true)
    assert.is_true(told() < 30)
  end)

  it("reads on the workers what no runner has brought, and leaves no trace of it here", function()
    local run = place:name("unbrought")
    local more, over = place.root .. "/more", place.root .. "/over"
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      (
        "--COMMAND=echo one; until [ -e %s ]; do sleep 0.1; done;"
        .. " seq 30000; until [ -e %s ]; do sleep 0.1; done; "
      ):format(more, over) .. "echo end",
    })
    for slice = 0, workers - 1 do
      place:log_has(run, slice, 0, "one\n")
    end
    uv.kill(running.program.pid, "sigkill")
    running.wait()
    fs.write(more, "")
    local lines = { "one" }
    for line = 1, 30000 do
      lines[line + 1] = tostring(line)
    end
    local whole = table.concat(lines, "\n") .. "\n"
    local last = ("slice[0-%d]/worker0"):format(workers - 1)
    assert(support.ssh.wait_for(function()
      return recipe("logs", run, "--tail=1", "--show=" .. last).out:find("30000\n", 1, true) ~= nil
    end))
    local result = recipe("logs", run, "--show=slice" .. workers - 1)
    assert.equal(0, result.code, result.err)
    assert.equal(whole, result.out)
    assert.matches("this was read on its workers. ciranda attach " .. run, result.err, 1, true)
    assert.equal("one\n", recipe("logs", run, "--remote=false").out)
    local following = place:start("logs", { run, "--follow" }, { fleet = false })
    fs.write(over, "")
    assert.equal(whole .. "end\n", following.wait().out)
    assert.equal(0, recipe("attach", run).code)
    assert.equal(whole .. "end\n", recipe("logs", run).out)
  end)

  it("follows a run to its end", function()
    local run = place:name("followed")
    local over = place.root .. "/followed-over"
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      ("--COMMAND=echo 1; until [ -e %s ]; do sleep 0.1; done; echo 2; sleep 0.3; echo 3"):format(over),
    })
    place:log_has(run, 0, 0, "1\n")
    -- The program of the run has the files of the place for its own output. The rest is written when the first is
    -- shown.
    local shown = ""
    local result = require("ciranda.io.process").run({
      BINARY,
      "logs",
      run,
      "--follow",
      env = place:env(),
      timeout = 60,
      on_stdout = function(bytes)
        shown = shown .. bytes
        fs.write(over, "")
      end,
    })
    assert.equal(0, result.code, result.stderr)
    assert.equal("1\n2\n3\n", shown)
    assert.equal(0, running.wait().code)
  end)

  it("follows a run over its attempts, until it ends or nobody reads any more", function()
    local run = place:name("attempts")
    local first, second = place.root .. "/first-over", place.root .. "/second-over"
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      "--RESTARTS=1",
      "--FAILURE_GRACE=1",
      ("--COMMAND=echo attempt $CIRANDA_ATTEMPT | cut -c-12; until [ -e %s ]; do sleep 0.1; done; "):format(
        first
      )
        .. "[ -e ../$CIRANDA_RUN.again ] || { touch ../$CIRANDA_RUN.again; exit 3; }; "
        .. ("until [ -e %s ]; do echo more; sleep 0.1; done"):format(second),
    })
    place:log_has(run, 0, 0, "attempt 0001\n")
    local shown = ""
    local result = require("ciranda.io.process").run({
      BINARY,
      "logs",
      run,
      "--follow",
      env = place:env(),
      timeout = 100,
      on_stdout = function(bytes)
        shown = shown .. bytes
        if not fs.exists(first) then
          fs.write(first, "")
        elseif shown:find("more\n", 1, true) and not fs.exists(second) then
          -- Its reader is gone after the first line: it does not go on until the run ends.
          local head = require("ciranda.io.process").run({
            "sh",
            "-c",
            ("'%s' logs %s --follow | head -n 1"):format(BINARY, run),
            env = place:env(),
            timeout = 60,
          })
          fs.write(second, head.stdout)
        end
      end,
    })
    assert.equal(0, result.code, result.stderr)
    assert.equal(0, running.wait().code)
    assert.equal("attempt 0002\n", fs.read(second))
    assert.matches("^attempt 0001\nattempt 0002\nmore\n", shown)
    assert.matches(("Attempt 2 of run %s"):format(run), result.stderr, 1, true)
    for slice = 0, workers - 1 do
      fs.remove_tree(("%s/%s.again"):format(place:home(slice, 0), run))
    end
  end)

  it("shows when a runner last breathed, and takes one that is silent elsewhere for gone", function()
    local us = 1700000000000000
    local runner = {
      fact = "runner",
      us = us,
      id = "x",
      pid = 4711,
      start_time = 1,
      boot_id = "other",
      host = "elsewhere.example",
    }
    local attempt =
      { fact = "attempt", us = us, attempt = "0001-a", workers = json.array({}), command = "true" }
    local gone = { fact = "go", us = us, attempt = "0001-a" }
    local path = write_journal("far", {
      { fact = "run", us = us, run = "far", recipe = "multihost_runner" },
      runner,
      attempt,
      gone,
    })
    assert.equal("running", standing("far").state)
    assert.matches("far +multihost_runner +running +0 +1 +%- +[%d-]+ [%d:]+ +%d+ s ago", recipe("runs").out)
    local result = recipe("stop", "far")
    assert.equal(1, result.code)
    assert.matches("in the hands of process 4711 on elsewhere.example", result.err, 1, true)
    local long_ago = os.time() - 3 * 3600
    uv.fs_utime(path, long_ago, long_ago)
    assert.equal("detached", standing("far").state)
    assert.matches("far +multihost_runner +detached .* 3.0 h ago", recipe("runs").out)
    -- Who wants it in vain is told what to do, and does not make it look alive.
    attempt.workers = json.array({ { slice = 0, index = 0, address = "127.0.0.1", port = 1 } })
    path = write_journal("far", { { fact = "run", us = us, run = "far" }, runner, attempt, gone })
    uv.fs_utime(path, long_ago, long_ago)
    local refused = recipe("attach", "far")
    assert.equal(1, refused.code, refused.err)
    assert.matches(
      "process 4711 on elsewhere.example; if that machine is gone, ciranda attach far --TAKE=true",
      refused.err,
      1,
      true
    )
    assert.equal("detached", standing("far").state)
    -- What is here is shown before its workers are asked for the rest, who may be long in answering.
    fs.mkdir(path:match("^(.*)/") .. "/0001-a")
    fs.write(path:match("^(.*)/") .. "/0001-a/output_slice_0000_worker_0000.txt", "here\n")
    local order = {}
    local function note(bytes)
      order[#order + 1] = bytes
    end
    require("ciranda.io.process").run({
      BINARY,
      "logs",
      "far",
      "--follow",
      env = place:env(),
      timeout = 100,
      on_stdout = note,
      on_stderr = note,
    })
    assert.equal("here\n", order[1])
    assert.matches("^Only what is here: slice 0 worker 0 ", order[2])
    fs.remove_tree(path:match("^(.*)/"))
  end)

  it("breathes while it holds a journal", function()
    local _ <close> = environment.set({ XDG_STATE_HOME = place.root .. "/state" })
    local breath = journals.BREATH
    journals.BREATH = 0.05
    -- A breath takes its time: one that has begun may come after the end of the journal.
    local utime, under_way = uv.fs_utime, 0
    function uv.fs_utime(path, accessed, modified, callback) ---@diagnostic disable-line: duplicate-set-field
      under_way = under_way + (callback and 1 or 0)
      return utime(path, accessed, modified, callback and function(...)
        under_way = under_way - 1
        return callback(...)
      end)
    end
    local journal = journals.open("breathing")
    local path = journals.path("breathing")
    local ok, problem = pcall(function()
      uv.fs_utime(path, 1000, 1000)
      task.timeout(60, function()
        while journals.breath("breathing") < 2000 do
          task.sleep(0.02)
        end
      end)
    end)
    journal:close(0, "done")
    local over = support.ssh.wait_for(function()
      return under_way == 0
    end)
    uv.fs_utime = utime
    assert.is_true(over)
    uv.fs_utime(path, 1000, 1000)
    task.sleep(0.2)
    local after = journals.breath("breathing")
    journals.BREATH = breath
    assert.is_true(ok, tostring(problem))
    assert.equal(1000, after)
  end)

  it("does not wait for who writes into a journal that is a FIFO", function()
    local path = write_journal("pipe", {})
    assert(uv.fs_unlink(path))
    process.run({ "mkfifo", path, timeout = 60 }):check()
    local result = recipe("runs")
    fs.remove_tree(path:match("^(.*)/"))
    assert.equal(0, result.code, result.err)
    assert.matches("\npipe ", result.out, 1, true)
  end)

  it("lists what it can when a journal is damaged, and says so", function()
    local path = write_journal("broken", {
      "this is no fact\n",
      { fact = "run", us = 1, run = "broken", recipe = "qr" },
      { fact = "run", us = 2, run = "broken", recipe = "qr" },
    })
    local result = recipe("runs")
    assert.equal(1, result.code)
    assert.matches("broken +%- +unreadable", result.out)
    assert.matches("line 1 is no fact", result.err, 1, true)
    fs.remove_tree(path:match("^(.*)/"))
    result = recipe("runs", "--filter=state=ended", "--format=value(name,kind)")
    assert.equal(0, result.code, result.err)
    assert.matches("breathing\tdone\n", result.out, 1, true)
    assert.equal(1, recipe("runs", "nowhere").code)
    assert.equal(2, recipe("runs", "../x").code)
  end)

  it("leaves a job that runs by itself to the cloud", function()
    write_journal("jobs-1", {
      { fact = "run", us = 1, run = "jobs-1", recipe = "multihost_job" },
      { fact = "object", us = 2, kind = "queued_resource", name = "jobs-1", phase = "created", keep = "job" },
    })
    assert.equal("job", standing("jobs-1").state)
    local result = recipe("stop", "jobs-1")
    assert.equal(1, result.code)
    assert.matches("ciranda qr delete jobs-1 ends it", result.err, 1, true)
  end)
end)

describe("logs of a job", function()
  it("come from its bucket", function()
    local cloud_support = dofile("tests/spec/recipes/cloud_support.lua")
    local cloud = cloud_support.start({ buckets = { "bucket" } })
    local ok, problem = pcall(function()
      local result = cloud:run(
        "multihost_job",
        "--TPU_TYPE=v5litepod-4",
        "--NUM_SLICES=2",
        "--RUN_NAME=j1",
        "--BUCKET_NAME=bucket",
        "--BUCKET_DIR=logs",
        "--COMMAND=echo from $SLICE_ID; exit 4",
        "--follow=true"
      )
      assert.equal(4, result.code, result.err)
      local shown = cloud:run("logs", "j1")
      assert.equal(0, shown.code, shown.err)
      assert.matches("\nfrom 0\n", shown.out, 1, true)
      shown = cloud:run("logs", "j1", "--show=slice1", "--tail=2")
      assert.matches("^from 1\n.* with exit status 4%.?\n$", shown.out)
    end)
    cloud:stop()
    assert.is_true(ok, tostring(problem))
  end)
end)
