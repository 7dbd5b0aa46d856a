local attempt_of = require("ciranda.run.attempt")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local runs_of = dofile("tests/fixtures/fleet/runs.lua")
local TRAINER = uv.cwd() .. "/tests/fixtures/trainer/train.py"

describe("run.launch", function()
  local place, root, machines, workers, connect

  before_each(function()
    place = runs_of.open(2, 2)
    root, machines = place.root, place.machines
    workers, connect = place.workers, place.connect
  end)

  after_each(function()
    place:close()
  end)

  local function text()
    return place:text()
  end

  local function settings(command, more)
    local all = { grace = 60, success = "Multihost runner finished successfully!" }
    return place:settings(command, all, more)
  end

  --- Sends signals to the handler, each when its condition holds.
  local function run_with(options, steps, run)
    local result
    task.all({
      function()
        result = (run or launch.run)(options)
      end,
      function()
        for _, step in ipairs(steps) do
          patience.wait_for(text, step.when)
          step.act()
        end
      end,
    })
    return result
  end

  local function log_has(slice, worker, pattern)
    return function()
      local file = io.open(("%s/r1/output_slice_%04d_worker_%04d.txt"):format(root, slice, worker))
      local all = file and file:read("a") or ""
      if file then
        file:close()
      end
      return all:find(pattern) ~= nil
    end
  end

  local function signal(name)
    return function()
      assert.is_true(place.handler(name, 1))
    end
  end

  local function trainer(options)
    return ("python3 %s --checkpoint_dir %s/shared --step-time 0.02 %s"):format(TRAINER, root, options)
  end

  it("says the lines people look for when all is well, and keeps the logs under their names", function()
    local result = launch.run(settings("echo hello from $CIRANDA_SLICE_ID"))
    assert.same({ 0, "done" }, { result.status, result.kind })
    assert.equal("Multihost runner finished successfully!", result.message)
    assert.matches(("Running main command, logs located in: %s/r1/"):format(root), text(), 1, true)
    assert.is_nil(text():find("failed", 1, true))
    assert.is_true(log_has(0, 0, "^hello from 0\n$")())
    assert.is_true(log_has(1, 0, "^hello from 1\n$")()) -- not slice 0 worker 1's
    local state = journal.read("r1")
    assert.equal(0, #state.runners)
    assert.equal("done", state.attempts[1].ended.kind)
  end)

  it("keeps saying whom the start waits for", function()
    local shown = ""
    local setup = { command = ("until [ -e %s/on ]; do sleep 0.1; done"):format(root), hash = ("5e"):rep(32) }
    local options = settings("true", { staging = { setup = setup } })
    function options.progress.status(_, said)
      shown = said
    end
    local result = run_with(options, {
      {
        when = function()
          return shown == "Staging: 0 of 4 workers; waiting for slice[0-1]/worker[0-1] (setting up)"
        end,
        act = function()
          io.open(root .. "/on", "w"):close()
        end,
      },
    })
    assert.equal(0, result.status)
  end)

  it("names the worker that was killed first of all, and gives 137", function()
    local result =
      run_with(settings(trainer("--steps 10000"), { checkpoint_directory = root .. "/shared" }), {
        {
          when = log_has(1, 0, "completed step: 3"),
          act = function()
            local killed = 0
            for pid, line in pairs(machines["1.0"]:processes()) do
              if line:find("python3%S* %S*train%.py") then
                uv.kill(pid, 9)
                killed = killed + 1
              end
            end
            assert.equal(1, killed)
          end,
        },
      })
    assert.same({ 137, "user" }, { result.status, result.kind })
    local first
    for _, line in ipairs(place.said) do
      if line:lower():find("fail") or line:find("SIGKILL") then
        first = line
        break
      end
    end
    assert.equal(
      "Main command failed on slice 1 worker 0 with error code 137 (SIGKILL), see logs for details",
      first
    )
    assert.matches("First cause: slice 1 worker 0", text(), 1, true)
    assert.matches("Last step on disk: none", text(), 1, true)
    assert.matches("steps lost (the logs had reached step", text(), 1, true)
    assert.matches(("check the logs located in: %s/r1/"):format(root), text(), 1, true)
  end)

  it("tells of the others, that do not end, after the cause", function()
    local command = [[
      trap '' TERM
      if [ $CIRANDA_SLICE_ID = 1 ]; then until [ -e %s/up.0 ] && [ -e %s/up.1 ]; do sleep 0.02; done; exit 5; fi
      : > %s/up.$CIRANDA_WORKER_ID; until [ -e %s/over ]; do sleep 0.1; done]]
    local options = settings(command:gsub("%%s", root), { failure_grace = 100 })
    local wanted = "Stopping, %d+ s: told: slice0/worker%[0%-1%]; ended: slice1/worker%[0%-1%]"
    function options.progress.status(_, words)
      place.said[#place.said + 1] = words
      if words:find(wanted) then
        io.open(root .. "/over", "w"):close()
      end
    end
    assert.equal(5, launch.run(options).status)
    local failure = text():find("Main command failed on slice 1 worker ", 1, true)
    local first = text():find("Stopping, %d+ s: ")
    assert.is_true(failure and first and failure < first, text())
    assert.matches(wanted, text())
  end)

  it("gives the status of the worker that left with 7, and tells the steps on disk and lost", function()
    local options =
      trainer("--steps 10000 --save-every 10 --variant dies-early --variant-rank 2 --die-at-step 15")
    local result =
      launch.run(settings(options .. " --die-status 7", { checkpoint_directory = root .. "/shared" }))
    assert.equal(7, result.status)
    assert.matches("failed on slice 1 worker 0 with error code 7, see logs", text(), 1, true)
    assert.matches("Last step on disk: 9 in", text(), 1, true)
    assert.matches("5 steps lost (the logs had reached step 14)", text(), 1, true)
  end)

  it("saves and stops on SIGTERM: all at one step, status 143", function()
    local result =
      run_with(settings(trainer("--steps 100000"), { checkpoint_directory = root .. "/shared" }), {
        { when = log_has(1, 1, "completed step: 5"), act = signal("SIGTERM") },
      })
    assert.same({ 143, "interrupted" }, { result.status, result.kind })
    local step = text():match("saved: step (%d+) is on disk")
    assert.is_not_nil(step, text())
    assert.is_not_nil(uv.fs_stat(("%s/shared/%s"):format(root, step)))
    for _, at in ipairs({ { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 } }) do
      assert.is_true(log_has(at[1], at[2], "saved step " .. step)())
    end
    -- Who agrees on a last step may be leaving when our signal comes, or have left: all four are told of.
    local told = {}
    for set in text():gmatch("Stopped: (%S+) ended with 0") do
      table.insert(told, set)
    end
    for set in text():gmatch("Ended before the signal came: (%S+), with 0") do
      table.insert(told, set)
    end
    assert.equal(4, #workers:select(table.concat(told, ",")), text())
    assert.equal(math.tointeger(tonumber(step)), journal.read("r1").attempts[1].saved)
    assert.equal("interrupted", journal.read("r1").attempts[1].ended.kind)
  end)

  it(
    "says not saved of one that ignores TERM, whatever its status, and tells meanwhile who is awaited",
    function()
      local command = trainer("--steps 100000 --variant ignores-term --save-every 5")
      local options = settings(command, { checkpoint_directory = root .. "/shared", grace = 4 })
      local told, states = {}, {}
      function options.progress.status(_, words, state)
        if words:find("^Saving, ") then
          told[#told + 1], states[#states + 1] = words, state
        end
      end
      local began
      local result = run_with(options, {
        {
          when = log_has(0, 0, "completed step: 7"),
          act = function()
            began = uv.hrtime()
            signal("SIGINT")()
          end,
        },
      })
      assert.same({ 130, "interrupted" }, { result.status, result.kind })
      local most = (uv.hrtime() - began) / 1e9 + 1 -- once a second
      assert.is_true(#told >= 1 and #told <= most, table.concat(told, "\n"))
      assert.matches("^Saving, %d+ s: told: slice%[0%-1%]/worker%[0%-1%]$", told[1])
      assert.equal("told: slice[0-1]/worker[0-1]", states[1])
      assert.matches("by SIGKILL: the grace was over", text(), 1, true)
    end
  )

  it("leaves at once on the second Ctrl-C, while the stop goes on", function()
    local result = run_with(settings("trap '' TERM; echo up; sleep 60", { grace = 10 }), {
      { when = log_has(0, 0, "up"), act = signal("SIGINT") },
      {
        when = function()
          return text():find("SIGINT: TERM to every worker", 1, true) ~= nil
        end,
        act = signal("SIGINT"),
      },
    })
    assert.same({ 129, "detached" }, { result.status, result.kind })
    assert.matches("the stop goes on on the workers. `ciranda attach r1`", result.message, 1, true)
    -- All have been told before the runner left: they are killed when the grace is over.
    for address, machine in pairs(machines) do
      patience.wait_for("the end of the command on " .. address, function()
        for _, line in pairs(machine:processes()) do
          if line:find("sleep 60", 1, true) then
            return false
          end
        end
        return true
      end)
    end
  end)

  it("says whom it has not told to stop when it leaves without that", function()
    local new, told = attempt_of.new, 0
    attempt_of.new = function(spec)
      local one = new(spec)
      function one:stop(grace, reason, on_told)
        if spec.worker.slice == 1 then
          task.sleep(3600) -- a machine that does not answer
        end
        return getmetatable(self).stop(self, grace, reason, function()
          on_told()
          told = told + 1
        end)
      end
      return one
    end
    local _ <close> = setmetatable({}, {
      __close = function()
        attempt_of.new = new
      end,
    })
    local options = settings("echo up; sleep 60")
    local result = run_with(options, {
      { when = log_has(0, 0, "up"), act = signal("SIGINT") },
      {
        when = function()
          return text():find("SIGINT: TERM to every worker", 1, true) ~= nil
        end,
        act = signal("SIGINT"),
      },
      {
        when = function()
          return told == 2 and text():find("once more to leave without that", 1, true) ~= nil
        end,
        act = signal("SIGINT"),
      },
    })
    assert.equal(129, result.status)
    assert.matches(
      "slice1/worker[0-1] could not be told to stop. `ciranda stop r1` does it",
      result.message,
      1,
      true
    )
    attempt_of.new = new
    -- The next one tells them: with 2 workers still up it would wait for ever.
    result = launch.attach({
      run = "r1",
      connect_options = { connect = connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    })
    assert.same({ 130, "interrupted" }, { result.status, result.kind }, text())
    assert.matches("SIGINT to the runner is taken up: TERM to whoever has not had it", text(), 1, true)
  end)

  it("says not saved of one that leaves with 0 without a save", function()
    local command = trainer("--steps 100000 --variant exits-0-without-save")
    local result = run_with(settings(command, { checkpoint_directory = root .. "/shared" }), {
      { when = log_has(0, 0, "completed step: 3"), act = signal("SIGTERM") },
    })
    assert.equal(143, result.status)
    assert.matches("not saved: there is no finished step", text(), 1, true)
  end)

  --- SIGTERM to the trainer of one worker, as the platform sends it.
  local function term_one()
    for pid, line in pairs(machines["1.0"]:processes()) do
      if line:find("python3%S* %S*train%.py") then
        uv.kill(pid, "sigterm")
      end
    end
  end

  it(
    "says preempted when others sent SIGTERM, whatever the status, and whether the step is on disk",
    function()
      local told = { { when = log_has(0, 0, "completed step: 3"), act = term_one } }
      local options = { checkpoint_directory = root .. "/shared" }
      local result = run_with(settings(trainer("--steps 100000"), options), told)
      assert.same({ 143, "preempted" }, { result.status, result.kind })
      local step = text():match("Checkpoint: saved: step (%d+) is on disk")
      assert.is_not_nil(step, text())
      assert.matches("stopped the command at step " .. step, result.message, 1, true)
      assert.equal(math.tointeger(tonumber(step)), journal.read("r1").attempts[1].saved)

      place.said = {}
      options.run = "r2"
      told[1].when = function()
        local file = io.open(root .. "/r2/output_slice_0000_worker_0000.txt")
        local all = file and file:read("a") or ""
        return file and file:close() and all:find("completed step", 1, true) ~= nil
      end
      result = run_with(settings(trainer("--steps 100000 --variant exits-0-without-save"), options), told)
      assert.same({ 143, "preempted" }, { result.status, result.kind })
      assert.is_nil(text():find("Checkpoint: saved", 1, true))
      assert.matches("Last step on disk: " .. step .. " in", text(), 1, true)
    end
  )

  it("says preempted when the machine went away after the sync point, before its status was known", function()
    local command =
      "echo 'completed step: 3, seconds: 1'; echo Reached preemption sync point, step=3; sleep 60"
    local result = run_with(settings(command, { checkpoint_directory = root .. "/shared" }), {
      {
        when = log_has(1, 0, "sync point"),
        act = function()
          machines["1.0"]:reboot()
        end,
      },
    })
    assert.same({ 1, "preempted" }, { result.status, result.kind })
    assert.matches("^preempted: exit status 1 %(no exit record", result.message)
  end)

  it("is done when a job that was told to stop trained on to its end", function()
    local result =
      launch.run(settings("echo Reached preemption sync point, step=3; echo 'completed step: 4, seconds: 1'"))
    assert.same({ 0, "done" }, { result.status, result.kind })
  end)

  it("says saved of one that leaves with 1 after a save", function()
    local command = trainer("--steps 100000 --variant exits-1-after-save")
    run_with(settings(command, { checkpoint_directory = root .. "/shared" }), {
      { when = log_has(0, 0, "completed step: 3"), act = signal("SIGTERM") },
    })
    assert.matches("saved: step %d+ is on disk", text())
    assert.is_nil(text():find("not saved", 1, true))
    assert.matches("ended with 1,", text(), 1, true)
  end)

  it("says not saved of a save that took longer than the grace", function()
    local command = trainer("--steps 100000 --variant slow-saver --save-seconds 20")
    local result = run_with(settings(command, { checkpoint_directory = root .. "/shared", grace = 1.5 }), {
      { when = log_has(0, 0, "completed step: 3"), act = signal("SIGTERM") },
    })
    assert.equal(143, result.status)
    assert.matches("not saved", text(), 1, true)
  end)

  it(
    "leaves on the second signal, and attach takes the job up again: no byte lost, no second start",
    function()
      local command = "echo run >> ../runs; for i in $(seq 30); do echo line $i; done; "
        .. "until [ -e %s/on ]; do sleep 0.05; done; for i in $(seq 31 60); do echo line $i; sleep 0.02; done"
      local result = run_with(settings(command:format(root)), {
        { when = log_has(0, 0, "line 5\n"), act = signal("SIGHUP") },
      })
      assert.same({ 129, "detached" }, { result.status, result.kind })
      assert.matches("ciranda attach r1", result.message, 1, true)
      assert.is_nil(journal.read("r1").attempts[1].ended)
      io.open(root .. "/on", "w"):close()
      workers:close()
      place.said = {}
      local options = settings(nil)
      options.connect_options = { connect = connect, retry_for = 2 }
      result = launch.attach(options)
      assert.same({ 0, "done" }, { result.status, result.kind })
      local expected = {}
      for line = 1, 60 do
        expected[line] = "line " .. line .. "\n"
      end
      for address, machine in pairs(machines) do
        local file = io.open(machine.home .. "/runs")
        assert.equal("run\n", file:read("a"))
        file:close()
        file = io.open(
          ("%s/r1/output_slice_%04d_worker_%04d.txt"):format(root, address:sub(1, 1), address:sub(3, 3))
        )
        assert.equal(table.concat(expected), file:read("a"))
        file:close()
      end
      -- Now it has ended, and says so.
      local ok, e = pcall(launch.attach, options)
      assert.is_false(ok)
      assert.matches("run r1 has ended: done, exit status 0", e.message, 1, true)
    end
  )

  it("starts what a runner that died in the middle of the go had not started", function()
    local command = "echo run >> ../runs; until [ -e %s/on ]; do sleep 0.05; done"
    local result = run_with(settings(command:format(root)), {
      {
        when = function()
          return uv.fs_stat(machines["1.1"].home .. "/runs") and place.handler
        end,
        act = signal("SIGHUP"),
      },
    })
    assert.equal(129, result.status)
    -- As if the go had never reached worker 1.1: its attempt is staged, nothing is started there.
    local machine = machines["1.1"]
    machine:kill_all()
    patience.wait_for("the end of its processes", function()
      return not next(machine:processes())
    end)
    local attempt = journal.read("r1").attempts[1].attempt
    local directory = ("%s/.ciranda/r1/%s"):format(machine.home, attempt)
    os.execute(
      ("cd '%s' && rm -rf started exit log pid state control output leader exit.new; rm '%s/runs'"):format(
        directory,
        machine.home
      )
    )
    io.open(root .. "/on", "w"):close()
    workers:close()
    local options = settings(nil)
    options.connect_options = { connect = connect, retry_for = 2 }
    result = launch.attach(options)
    assert.equal(0, result.status)
    local file = io.open(machine.home .. "/runs")
    assert.equal("run\n", file:read("a"))
    file:close()
  end)

  it("tells a preempted node from a machine that failed", function()
    for state, kind in pairs({
      PREEMPTED = "preempted",
      DELETING = "preempted",
      gone = "preempted",
      READY = "infra",
    }) do
      place.said = {}
      local result = run_with(
        settings("sleep 300", {
          run = "lost-" .. state:lower(),
          node_state = function(worker)
            assert.equal("1.0", worker.address)
            return state
          end,
        }),
        {
          {
            when = function()
              return text():find("Started on 4 workers within", 1, true)
            end,
            act = function()
              machines["1.0"]:reboot()
            end,
          },
        }
      )
      assert.same({ 1, kind }, { result.status, result.kind })
      assert.matches("its node node-1 is " .. state, text(), 1, true)
    end
  end)

  it("attach asks the cloud what became of a machine that does not answer", function()
    local notices, tpus = require("ciranda.run.notices"), require("ciranda.gcp.tpu")
    local watch, connect_tpu = notices.watch, tpus.connect
    finally(function()
      notices.watch, tpus.connect = watch, connect_tpu
    end)
    notices.watch = function() end -- these machines have no metadata server
    tpus.connect = function(given)
      assert.same({ project = "p", zone = "z" }, given)
      return {
        get_node = function(_, name)
          assert.equal("node-1", name)
          return { state = "PREEMPTED" }
        end,
        list_nodes = function()
          return { { name = "projects/p/locations/z/nodes/node-1", state = "PREEMPTED" } }
        end,
      }
    end
    local options = settings("touch ../up; sleep 60", { cloud = { project = "p", zone = "z", nodes = {} } })
    local result = run_with(options, {
      {
        when = function()
          return place.handler and uv.fs_stat(machines["1.0"].home .. "/up")
        end,
        act = signal("SIGHUP"),
      },
    })
    assert.equal("detached", result.kind)
    for _, address in ipairs({ "1.0", "1.1" }) do
      machines[address].down = true
      machines[address]:reboot()
    end
    result = launch.attach({
      run = "r1",
      connect_options = { connect = connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    })
    assert.same({ 1, "preempted" }, { result.status, result.kind })
    assert.matches("the machine does not answer, and its node node-1 is PREEMPTED", text(), 1, true)
    assert.matches("\nNode node-1 is PREEMPTED", text(), 1, true)
  end)

  it("says staging when nothing was started, and deadline when that was the reason", function()
    machines["1.1"].refuses = { code = "hostkey", message = "the host key has changed" }
    local result = launch.run(settings("true"))
    assert.same({ 1, "staging" }, { result.status, result.kind })
    assert.matches("the host key has changed", text(), 1, true)
    machines["1.1"].refuses = nil
    machines["1.1"].hang = function(command)
      return command:find("tar -xf", 1, true) ~= nil
    end
    result = patience.within_more(1, function(seconds)
      place.said = {}
      result = launch.run(settings("true", { stage_timeout = seconds }))
      return text():find("slice 1 worker 1", 1, true) ~= nil, result
    end)
    assert.same({ 124, "deadline" }, { result.status, result.kind })
    assert.matches("slice 1 worker 1", text(), 1, true)
  end)

  it("takes the same name again as a new attempt", function()
    assert.equal(0, launch.run(settings("echo one")).status)
    assert.equal(0, launch.run(settings("echo two")).status)
    assert.is_true(log_has(0, 1, "^two\n$")())
    local attempts = journal.read("r1").attempts
    assert.equal(2, #attempts)
    local file = io.open(
      ("%s/state/ciranda/runs/r1/%s/output_slice_0000_worker_0001.txt"):format(root, attempts[1].attempt)
    )
    assert.equal("one\n", file:read("a"))
    file:close()
  end)

  it("shows what other workers print when it looks like a failure, and everything on request", function()
    local command = [[
      echo quiet $CIRANDA_PROCESS_ID
      if [ $CIRANDA_PROCESS_ID = 3 ]; then echo 'Traceback (most recent call last):'; echo '  File "x.py"'; fi
    ]]
    launch.run(settings(command))
    assert.matches("slice1/worker1: Traceback", text(), 1, true)
    assert.matches('slice1/worker1:   File "x.py"', text(), 1, true)
    assert.is_nil(text():find("quiet", 1, true))
    place.said = {}
    launch.run(settings("echo same", { show = "all" }))
    -- Of all, and equal lines that come in one moment together.
    local shown = {}
    for set in text():gmatch("(%S+): same") do
      table.insert(shown, set)
    end
    assert.equal(4, #workers:select(table.concat(shown, ",")), text())
  end)

  it("refuses a link directory that is not ours", function()
    local file = assert(io.open(root .. "/r1", "w"))
    file:close()
    local ok, e = pcall(launch.run, settings("true"))
    assert.is_false(ok)
    assert.equal("permission", e.code)
    assert.equal(0, #journal.read("r1").runners)
    for _, machine in pairs(machines) do
      assert.is_nil(uv.fs_stat(machine.home .. "/ciranda_lease.tester"))
    end
  end)

  it("refuses to show workers that are not there, before anything is done", function()
    for _, show in ipairs({ "slice7", "slice[" }) do
      local ok, e = pcall(launch.run, settings("true", { show = show }))
      assert.is_false(ok)
      assert.equal("usage", e.code)
      assert.matches("--show=" .. show, e.message, 1, true)
    end
    assert.equal(0, #machines["0.0"].commands)
    assert.is_nil(journal.read("r1"))
  end)
end)
