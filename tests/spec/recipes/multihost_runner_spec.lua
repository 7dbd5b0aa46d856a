local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

-- Where every worker needs a home of its own, the servers need accounts of their own.
local workers = support.ssh.is_root and 2 or 1

describe("multihost_runner on real sshds", function()
  local place

  setup(function()
    place = support.place(workers, 1)
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  local function write(name, text)
    fs.write(place.root .. "/code/" .. name, text, { sync = false })
  end

  local function first_failure_line(text)
    for line in text:gmatch("[^\n]+") do
      if line:lower():find("fail", 1, true) or line:find("SIG", 1, true) then
        return line
      end
    end
  end

  it("sends the code, runs the command in ~/RUN_NAME, and shows worker 0 as it is", function()
    write("main.sh", "echo hello from $CIRANDA_SLICE_ID in $PWD\n")
    local result =
      place:run("multihost_runner", { "--RUN_NAME=" .. place:name("r1"), "--COMMAND=sh main.sh" })
    assert.equal(0, result.code, result.err)
    assert.equal(("hello from 0 in %s/%s\n"):format(place:home(0, 0), place:name("r1")), result.out)
    assert.matches(("%d slices found."):format(workers), result.err, 1, true)
    assert.matches(
      ("Running main command, logs located in: %s/tmp/%s/"):format(place.root, place:name("r1")),
      result.err,
      1,
      true
    )
    assert.matches("Multihost runner finished successfully!\n$", result.err)
    assert.is_nil(first_failure_line(result.err))
    for slice = 0, workers - 1 do
      assert.equal(
        ("hello from %d in %s/%s\n"):format(slice, place:home(slice, 0), place:name("r1")),
        fs.read(("%s/tmp/%s/output_slice_%04d_worker_0000.txt"):format(place.root, place:name("r1"), slice))
      )
    end
    assert.equal(
      "file",
      fs.exists(("%s/tmp/%s/script_dir_zip_%s.tar.gz"):format(place.root, place:name("r1"), place:name("r1")))
    )
  end)

  it("shows all of worker 0's output to who begins to read when the command has ended", function()
    local late = place.root .. "/late"
    fs.write(
      late,
      '#!/bin/sh\n"$CIRANDA_BINARY" "$@" | { until [ -e "$0.go" ]; do sleep 0.05; done; cat; }\n',
      {
        mode = 493,
      }
    )
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("late"),
      "--COMMAND=seq 100000",
    }, { program = late })
    for slice = 0, workers - 1 do
      place:log_has(place:name("late"), slice, 0, "\n100000\n")
    end
    task.sleep(0.5) -- so that it is about to leave; what is shown does not depend on it
    fs.write(late .. ".go", "")
    local result = running.wait()
    assert.equal(100000, select(2, result.out:gsub("\n", "")))
    assert.equal("100000\n", result.out:sub(-7))
    assert.matches("Multihost runner finished successfully!\n$", result.err)
  end)

  it("gives a worker's own status, and names it first", function()
    local last = workers - 1
    local result = place:run("multihost_runner", {
      "--RUN_NAME=" .. place:name("r2"),
      "--FAILURE_GRACE=1",
      ("--COMMAND=if [ $CIRANDA_SLICE_ID = %d ]; then exit 7; fi; sleep 60"):format(last),
    })
    assert.equal(7, result.code, result.err)
    assert.equal(
      ("Main command failed on slice %d worker 0 with error code 7, see logs for details"):format(last),
      first_failure_line(result.err)
    )
    assert.matches("Main command finished with errors, check the logs located in: ", result.err, 1, true)
    assert.matches(("user: exit status 7, from slice %d worker 0\n$"):format(last), result.err)
  end)

  it("gives 137 and says SIGKILL when the program is killed", function()
    local result = place:run("multihost_runner", {
      "--RUN_NAME=" .. place:name("r3"),
      "--FAILURE_GRACE=1",
      "--COMMAND=if [ $CIRANDA_SLICE_ID = 0 ]; then kill -9 $$; fi; sleep 60",
    })
    assert.equal(137, result.code, result.err)
    assert.matches(
      "slice 0 worker 0 with error code 137 (SIGKILL), see",
      first_failure_line(result.err),
      1,
      true
    )
  end)

  it("goes on when the disk here is full, and says where the rest of the logs is", function()
    local run = place:name("full")
    -- A limit on the size of files stands for a full disk.
    local limited = place.root .. "/limited"
    fs.write(limited, '#!/bin/bash\nulimit -f 60\ntrap \'\' XFSZ\nexec "$CIRANDA_BINARY" "$@"\n')
    fs.chmod(limited, 493)
    local result = place:run("multihost_runner", {
      "--RUN_NAME=" .. run,
      "--FAILURE_GRACE=1",
      "--COMMAND=head -c 100000 /dev/zero | tr \\\\0 x | fold; echo; echo the end; exit $((7 - 7 * CIRANDA_SLICE_ID))",
    }, { program = limited })
    assert.equal(7, result.code, result.err)
    assert.matches(
      ("what comes now stays on the workers, where ciranda logs %s --show"):format(run),
      result.err,
      1,
      true
    )
    assert.matches("slice0/worker0: the end", result.err, 1, true)
    assert.equal("the end\n", place:run("logs", { run, "--remote", "--tail=1" }, { fleet = false }).out)
  end)

  it("keeps a command's own 2, 124 and 130 apart from ours by kind", function()
    for _, status in ipairs({ 2, 124, 130 }) do
      local result = place:run(
        "--json",
        { "multihost_runner", "--RUN_NAME=" .. place:name("r4"), "--COMMAND=exit " .. status }
      )
      assert.equal(status, result.code, result.err)
      local last = json.decode(result.out:match("([^\n]+)\n$"))
      assert.same({ "end", "user", status }, { last.event, last.kind, last.status })
    end
    local result = place:run(
      "--json",
      { "multihost_runner", "--RUN_NAME=" .. place:name("r4"), "--COMMAND=true", "--GRACE=soon" }
    )
    assert.equal(2, result.code)
  end)

  it("saves and stops on SIGTERM with 143, and on SIGINT with 130", function()
    for name, status in pairs({ sigterm = 143, sigint = 130 }) do
      local running = place:start("multihost_runner", {
        "--RUN_NAME=" .. place:name("r5-" .. name),
        "--COMMAND=trap 'echo saving; exit 0' TERM; echo up; sleep 60 & wait",
      })
      for slice = 0, workers - 1 do
        place:log_has(place:name("r5-" .. name), slice, 0, "up\n")
      end
      uv.kill(running.program.pid, name)
      local result = running.wait()
      assert.equal(status, result.code, result.err)
      assert.matches("up\nsaving\n", result.out)
      assert.matches("interrupted: stopped by " .. name:upper(), result.err, 1, true)
      assert.matches("ended with 0", result.err, 1, true)
    end
  end)

  it("loses nothing to kill -9 of the runner: attach brings the rest and the status", function()
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("r6"),
      "--COMMAND=echo run >> runs; for i in $(seq 40); do echo line $i; sleep 0.05; done; "
        .. "until [ -e finish ]; do sleep 0.1; done; exit 3",
    })
    place:log_has(place:name("r6"), 0, 0, "line 5\n")
    uv.kill(running.program.pid, "sigkill")
    running.wait()
    local attached = place:start("attach", { place:name("r6") }, { fleet = false })
    assert(support.ssh.wait_for(function()
      return fs.read(attached.err_path):find("Taking up run", 1, true)
    end))
    for slice = 0, workers - 1 do
      fs.write(("%s/%s/finish"):format(place:home(slice, 0), place:name("r6")), "", { sync = false })
    end
    local result = attached.wait()
    assert.equal(3, result.code, result.err)
    local expected = {}
    for line = 1, 40 do
      expected[line] = "line " .. line .. "\n"
    end
    for slice = 0, workers - 1 do
      assert.equal(
        table.concat(expected),
        fs.read(("%s/tmp/%s/output_slice_%04d_worker_0000.txt"):format(place.root, place:name("r6"), slice))
      )
      assert.equal("run\n", fs.read(("%s/%s/runs"):format(place:home(slice, 0), place:name("r6"))))
    end
    local again = place:run("attach", { place:name("r6") }, { fleet = false })
    assert.equal(1, again.code)
    assert.matches("run " .. place:name("r6") .. " has ended: user, exit status 3", again.err, 1, true)
  end)

  it(
    "refuses before anything is started: unknown flags, names, left-out files, folders that are not there",
    function()
      for name, case in pairs({
        ["no command"] = { {}, 2, "COMMAND" },
        ["unknown flag"] = { { "--COMMAND=true", "--TPU_PREFX=x" }, 2, "TPU_PREFX" },
        ["run name"] = { { "--COMMAND=true", "--RUN_NAME=../x" }, 2, "RUN_NAME" },
        ["folder without a name"] = {
          { "--COMMAND=true", "--USE_EXISTING_FOLDER=true" },
          2,
          "needs --RUN_NAME",
        },
        ["folder that is not there"] = {
          { "--COMMAND=true", "--USE_EXISTING_FOLDER=1", "--RUN_NAME=" .. place:name("nowhere") },
          1,
          "there is no directory ~/" .. place:name("nowhere"),
        },
        ["no fleet"] = { { "--COMMAND=true" }, 2, "Give --TPU_PREFIX", false },
      }) do
        local result = place:run("multihost_runner", case[1], { fleet = case[4] })
        assert.equal(case[2], result.code, name .. ": " .. result.err)
        assert.matches(case[3], result.err, 1, true)
      end
      write(".gitignore", "weights.bin\n")
      write("weights.bin", "x")
      local result =
        place:run("multihost_runner", { "--COMMAND=cat weights.bin", "--RUN_NAME=" .. place:name("r7") })
      assert.equal(2, result.code)
      assert.matches("COMMAND names weights.bin, which is not sent", result.err, 1, true)
      result = place:run(
        "multihost_runner",
        { "--COMMAND=cat weights.bin", "--RUN_NAME=" .. place:name("r7"), "--ALL_FILES=t" }
      )
      assert.equal(0, result.code, result.err)
    end
  )

  it("leaves alone the archive of a run that has a runner", function()
    local run = place:name("twice")
    write("main.sh", "echo first\n")
    local over = place.root .. "/tmp/over"
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      ("--COMMAND=echo up; until [ -e %s ]; do sleep 0.1; done"):format(over),
    })
    place:log_has(run, 0, 0, "up\n")
    local archive = ("%s/tmp/%s/script_dir_zip_%s.tar.gz"):format(place.root, run, run)
    local before = fs.read(archive)
    write("main.sh", "echo second\n")
    local second = place:run("multihost_runner", { "--RUN_NAME=" .. run, "--COMMAND=sh main.sh" })
    fs.write(over, "")
    assert.equal(1, second.code, second.err)
    assert.matches(
      ("run %s is in the hands of process %d"):format(run, running.program.pid),
      second.err,
      1,
      true
    )
    assert.is_true(before == fs.read(archive))
    assert.equal(0, running.wait().code)
  end)

  it("goes on when a hook calls os.exit, and says so", function()
    local run = place:name("leaving-hook")
    local called = place.root .. "/tmp/called"
    fs.write(
      place.root .. "/leaving.lua",
      (
        "local task = require('ciranda.task') return {"
        .. "on_stall = function() io.open('%s', 'w'):close() os.exit(0) end,"
        .. "on_failure = function() task.all({ function() os.exit(0, true) end }) end }"
      ):format(called)
    )
    local result = place:run("multihost_runner", {
      "--RUN_NAME=" .. run,
      "--STALL=1",
      "--FAILURE_GRACE=1",
      "--HOOKS=" .. place.root .. "/leaving.lua",
      ("--COMMAND=until [ -e %s ]; do sleep 0.1; done; exit 7"):format(called),
    })
    assert.equal(7, result.code, result.err)
    for _, hook in ipairs({ "on_stall", "on_failure" }) do
      local words = "The hook %s failed: os.exit does not end a run from a hook"
      assert.matches(words:format(hook), result.err, 1, true)
    end
  end)

  it("refuses a number of restarts below 0 before it does anything", function()
    local run = place:name("less")
    for _, flag in ipairs({ "RESTARTS", "INFRA_RESTARTS", "PREEMPTION_RESTARTS" }) do
      local result =
        place:run("multihost_runner", { "--RUN_NAME=" .. run, "--COMMAND=true", "--" .. flag .. "=-1" })
      assert.same(
        { 2, ("ciranda: --%s is -1, but counts from 0\n"):format(flag) },
        { result.code, result.err }
      )
      assert.is_nil(fs.exists(("%s/tmp/%s"):format(place.root, run)))
    end
  end)

  it("refuses a host whose key is not known, and one whose key has changed", function()
    local known = place.root .. "/runner/.ssh/known_hosts"
    local text = fs.read(known)
    fs.write(known, "", { sync = false })
    local result = place:run("multihost_runner", { "--COMMAND=true", "--RUN_NAME=" .. place:name("r8") })
    fs.write(known, text, { sync = false })
    assert.equal(1, result.code)
    assert.matches("slice0/worker0 could not be staged", result.err, 1, true)
    assert.matches("staging: nothing was started", result.err, 1, true)
  end)

  it("makes again a connection that is cut while the command runs", function()
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("r9"),
      "--COMMAND=echo run >> runs; for i in $(seq 60); do echo line $i; sleep 0.05; done",
    })
    place:log_has(place:name("r9"), 0, 0, "line 10\n")
    -- The session's processes end, as when the network is cut; the listener stays.
    local server = place.servers["0/0"]
    for _, pid in ipairs(server:sessions()) do
      local ok, line = pcall(fs.read, ("/proc/%d/cmdline"):format(pid))
      if ok and line:find("^sshd: ") then
        uv.kill(pid, "sigkill")
      end
    end
    local result = running.wait()
    assert.equal(0, result.code, result.err)
    local expected = {}
    for line = 1, 60 do
      expected[line] = "line " .. line .. "\n"
    end
    assert.equal(table.concat(expected), result.out)
    assert.equal("run\n", fs.read(("%s/%s/runs"):format(place:home(0, 0), place:name("r9"))))
  end)
end)
