-- Runs of several attempts: on machines that are directories, with the stand-in trainer.
local fleet = require("ciranda.fleet")
local fs = require("ciranda.io.fs")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local leases = require("ciranda.run.lease")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local runs_of = dofile("tests/fixtures/fleet/runs.lua")
local TRAINER = uv.cwd() .. "/tests/fixtures/trainer/train.py"

describe("run.launch with several attempts", function()
  local place, root, machines, connect, slices

  before_each(function()
    place = runs_of.open(2, 1)
    root, machines = place.root, place.machines
    connect, slices = place.connect, place.slices
  end)

  after_each(function()
    place:close()
  end)

  local function text()
    return place:text()
  end

  local function settings(command, more)
    local all = { grace = 60, restart_pause = 0.05, checkpoint_directory = root .. "/shared" }
    return place:settings(command, all, more)
  end

  local function trainer(options)
    return ("python3 %s --checkpoint_dir %s/shared --step-time 0.02 %s"):format(TRAINER, root, options)
  end

  --- Does `act` when the log of the n-th attempt on slice 0 has a pattern.
  local function when(number, pattern, act)
    patience.wait_for(("%s in attempt %d"):format(pattern, number), function()
      local state = journal.read("r1")
      local attempt = state and state.attempts[number]
      local file = attempt
        and io.open(
          ("%s/state/ciranda/runs/r1/%s/output_slice_0000_worker_0000.txt"):format(root, attempt.attempt)
        )
      local log = file and file:read("a") or ""
      if file then
        file:close()
      end
      return log:find(pattern)
    end)
    act()
  end

  --- A trainer that goes on until the second attempt has done a step, and what has it end then.
  local UNTIL = "--until $HOME/../enough --save-every 5"
  local function end_second()
    when(2, "completed step", function()
      io.open(root .. "/enough", "w"):close()
    end)
  end

  local function kinds()
    local list = {}
    for number, attempt in ipairs(journal.read("r1").attempts) do
      list[number] = attempt.ended.kind
    end
    return list
  end

  it("tries again after a failure of the command, from the last step on disk, within the budget", function()
    local result = launch.run(
      settings(
        trainer(
          "--steps 30 --save-every 5 --variant dies-early --variant-rank 1 --die-at-step 12 --die-status 7"
        ),
        { restarts = { user = 1 } }
      )
    )
    -- It dies at step 12 however often it is begun again.
    assert.same({ 7, "user" }, { result.status, result.kind })
    assert.same({ "user", "user" }, kinds())
    assert.matches("--RESTARTS=1 is used up", result.message, 1, true)
    assert.matches("Attempt 2 %(0002%-%x+, %d+ s%): user, exit status 7, slice 1 worker 0", text())
    local file = io.open(root .. "/r1/output_slice_0000_worker_0000.txt")
    local log = file:read("a")
    file:close()
    assert.equal("10", log:match("completed step: (%d+)"), log)
    local state = journal.read("r1")
    assert.equal(state.attempts[1].attempt, state.attempts[2].series)
    assert.equal("user", state.ended.kind)
  end)

  it("goes on after a machine was restarted, with machines as they are then, and ends well", function()
    local renewed, asked = nil, 0
    local result
    task.all({
      function()
        result = launch.run(settings(trainer(UNTIL), {
          restarts = { infra = 1 },
          renew = function()
            asked = asked + 1
            renewed = fleet.new(slices, { connect = connect, retry_for = 2 })
            return renewed,
              "the coordinator has moved",
              function(worker)
                return { MEGASCALE_SLICE_ID = tostring(worker.slice) }
              end
          end,
        }))
      end,
      function()
        when(1, "completed step: 7", function()
          machines["1.0"]:reboot()
        end)
        end_second()
      end,
    })
    assert.same({ 0, "done" }, { result.status, result.kind }, text())
    assert.same({ "infra", "done" }, kinds())
    assert.equal(1, asked)
    assert.matches("the coordinator has moved", text(), 1, true)
    assert.matches("Another attempt in 0 s (1 of --INFRA_RESTARTS=1)", text(), 1, true)
    assert.matches(
      "Attempt 1 %(.-%): infra, exit status 1, slice 1 worker 0 lost: the machine was restarted",
      text()
    )
    local path = ("%s/.ciranda/r1/%s/environment"):format(
      machines["1.0"].home,
      journal.read("r1").attempts[2].attempt
    )
    local file = io.open(path, "rb")
    assert.matches("MEGASCALE_SLICE_ID=1\0", file:read("a"), 1, true)
    file:close()
    -- What was made by the repair was closed by the run.
    assert.is_false(pcall(function()
      renewed:link(renewed:workers()[1]):connection()
    end))
  end)

  it("names the worker whose machine fails twice", function()
    local result
    task.all({
      function()
        result = launch.run(settings("echo up; sleep 60", { restarts = { infra = 1 } }))
      end,
      function()
        for number = 1, 2 do
          when(number, "up", function()
            machines["0.0"]:reboot()
          end)
        end
      end,
    })
    assert.same({ 1, "infra" }, { result.status, result.kind })
    assert.matches("Bad: slice0/worker0, with two infrastructure failures", text(), 1, true)
    assert.matches("--INFRA_RESTARTS=1 is used up", result.message, 1, true)
  end)

  --- A run whose first machine is preempted, and which is told at each look that there will be none any more.
  ---@param hooks table?
  ---@return integer asked how often it looked
  local function without_machines(hooks)
    local result
    local asked = 0
    task.all({
      function()
        result = launch.run(settings("echo up; sleep 60", {
          restarts = { preempted = 1 },
          node_state = function()
            return "PREEMPTED"
          end,
          hooks = hooks,
          renew = function()
            asked = asked + 1
            require("ciranda.io.error").raise({ code = "preempted", message = "job is SUSPENDED" })
          end,
        }))
      end,
      function()
        when(1, "up", function()
          machines["0.0"]:reboot()
        end)
      end,
    })
    assert.same({ 1, "preempted" }, { result.status, result.kind })
    assert.matches("there are no machines for another attempt: job is SUSPENDED", result.message, 1, true)
    return asked
  end

  it("ends as preempted when the machines do not come back", function()
    assert.equal(1, without_machines())
    assert.same({ "preempted" }, kinds())
  end)

  it("counts what cannot be staged in a further attempt to the machines", function()
    local result
    task.all({
      function()
        result = launch.run(settings("echo up; sleep 60", { restarts = { infra = 1 } }))
      end,
      function()
        when(1, "up", function()
          machines["0.0"]:reboot()
          machines["0.0"].refuses = { code = "hostkey", message = "the host key has changed" }
        end)
      end,
    })
    assert.equal(1, result.status)
    assert.matches("slice 0 worker 0 lost: .*the host key has changed", text())
    assert.matches("Nothing was started", text(), 1, true)
    assert.same({ "infra", "infra" }, kinds())
  end)

  it("tries nothing again after a stop", function()
    local handler, result
    local options = settings(trainer("--steps 100000"), { restarts = { user = 5, infra = 5, preempted = 5 } })
    options.on_interrupt = function(given)
      handler = given
      return function() end
    end
    task.all({
      function()
        result = launch.run(options)
      end,
      function()
        when(1, "completed step: 3", function()
          handler("SIGTERM", 1)
        end)
      end,
    })
    assert.same({ 143, "interrupted" }, { result.status, result.kind })
    assert.equal(1, #journal.read("r1").attempts)
  end)

  it("attach goes on with the budget that the run was started with, also when its hooks are gone", function()
    local handler
    local command =
      "[ -e ../again ] && exit 0; touch ../again; echo up; until [ -e %s/over ]; do sleep 0.1; done"
    local options = settings(
      command:format(root) .. "; exit 9",
      { restarts = { user = 1 }, hooks_file = root .. "/gone.lua" }
    )
    options.on_interrupt = function(given)
      handler = given
      return function() end
    end
    task.all({
      function()
        assert.equal("detached", launch.run(options).kind)
      end,
      function()
        when(1, "up", function()
          patience.wait_for("the other worker", function()
            return uv.fs_stat(machines["1.0"].home .. "/again")
          end)
          handler("SIGHUP", 1)
        end)
      end,
    })
    io.open(root .. "/over", "w"):close()
    local result = launch.attach({
      run = "r1",
      connect_options = { connect = connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    })
    assert.same({ 0, "done" }, { result.status, result.kind }, text())
    assert.same({ "user", "done" }, kinds())
    assert.matches("No hooks are told: .*gone.lua: cannot open", text())
  end)

  it("attach goes on where a runner ended on its way to another attempt", function()
    -- Who fails has the other one stopped.
    local command = [[
      [ -e ../again ] && exit 0; touch ../again
      until [ -e %s/home-0.0/again ] && [ -e %s/home-1.0/again ]; do sleep 0.02; done; exit 9]]
    local options = settings(command:gsub("%%s", root), { restarts = { user = 1 }, restart_pause = 3600 })
    local attach = {
      run = "r1",
      connect_options = { connect = connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    }
    local scope <close> = task.scope()
    local runner = scope:spawn(function()
      pcall(launch.run, options)
    end)
    patience.wait_for("the way to another attempt", function()
      return text():find("Another attempt in", 1, true)
    end)
    runner:cancel("killed")
    runner:wait()
    assert.same({ "user" }, kinds())
    local result = launch.attach(attach)
    assert.same({ 0, "done" }, { result.status, result.kind }, text())
    assert.same({ "user", "done" }, kinds())
    -- A run that has come to its end is over.
    local ok, problem = pcall(launch.attach, attach)
    assert.is_false(ok)
    assert.matches("run r1 has ended: done", problem.message, 1, true)
  end)

  --- How many workers somebody has.
  local function leased()
    local count = 0
    for _, machine in pairs(machines) do
      count = count + (uv.fs_stat(machine.home .. "/ciranda_lease.tester") and 1 or 0)
    end
    return count
  end

  --- How many workers do their SETUP now.
  local function setting_up()
    local count = 0
    for _, machine in pairs(machines) do
      for _, line in pairs(machine:processes()) do
        count = count + (line:find("sleep 601", 1, true) and 1 or 0)
      end
    end
    return count
  end

  --- A run whose runner ends while SETUP runs on both workers: `act(runner)` ends it.
  local function ends_in_setup(act)
    local setup = { command = "exec sleep 601", hash = ("5e"):rep(32), timeout = 300 }
    local options = settings("touch ../ran", { staging = { setup = setup } })
    local scope <close> = task.scope()
    local runner = scope:spawn(function()
      local ok, problem = pcall(launch.run, options)
      assert.is_false(ok)
      assert.equal("cancelled", problem.code)
    end)
    patience.wait_for("both workers do their SETUP", function()
      return setting_up() == 2
    end, 120)
    assert.equal(2, leased())
    act(runner, options)
    runner:wait()
    return { run = "r1", connect_options = { connect = connect, retry_for = 2 }, progress = options.progress }
  end

  it(
    "a signal before the start ends SETUP, gives the workers back and says that nothing was started",
    function()
      ends_in_setup(function(runner)
        assert.is_false(place.handler("SIGINT", 1))
        runner:cancel("interrupted by SIGINT")
      end)
      assert.same({ 0, 0 }, { setting_up(), leased() })
      assert.matches("SIGINT: COMMAND was started on no worker", text(), 1, true)
      local state = journal.read("r1")
      assert.same({ "interrupted", 130 }, { state.attempts[1].ended.kind, state.attempts[1].ended.status })
      assert.same({ status = 130, kind = "interrupted" }, state.ended)
    end
  )

  it("what a runner leaves that is killed before the start is ended by stop and by attach", function()
    local Lease = getmetatable(leases.new("r1"))
    local release = Lease.release
    finally(function()
      Lease.release = release
    end)
    for number, take_up in ipairs({
      function(options)
        assert.is_true(launch.give_back(options))
        assert.is_false(launch.give_back(options))
      end,
      function(options)
        local ok, problem = pcall(launch.attach, options)
        assert.is_false(ok)
        assert.equal("not_found", problem.code)
        assert.matches("has started no command: .* its workers are given back", problem.message)
      end,
    }) do
      Lease.release = function() end
      local options = ends_in_setup(function(runner)
        runner:cancel("killed")
      end)
      Lease.release = release
      assert.same({ 2, 2 }, { setting_up(), leased() })
      local runs = require("ciranda.run.runs")
      local standing = runs.standing("r1")
      assert.same({ state = "unstarted" }, { state = standing.state, status = standing.status })
      take_up(options)
      assert.same({ 0, 0 }, { setting_up(), leased() })
      assert.equal("ended", runs.standing("r1").state)
      local state = journal.read("r1")
      assert.equal("staging", state.attempts[number].ended.kind)
      assert.same({ status = 1, kind = "staging" }, state.ended)
    end
  end)

  it("attach gives the workers back where a runner was killed after its command had ended", function()
    -- That runner came neither to the leases nor to how the run has ended.
    local Lease = getmetatable(leases.new("r1"))
    local release = Lease.release
    Lease.release = function() end
    local options = settings("true")
    local ok, problem = pcall(launch.run, options)
    Lease.release = release
    assert(ok, problem)
    local path = journal.path("r1")
    local text_before = fs.read(path)
    local before, left = text_before:match('^(.*\n)([^\n]*"left"[^\n]*\n)$')
    fs.write(path, before .. left:gsub(',"kind":"done"', ""):gsub('"kind":"done",', ""))
    assert.equal(2, leased())
    local result = launch.attach({
      run = "r1",
      connect_options = { connect = connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    })
    assert.same({ 0, "done" }, { result.status, result.kind }, text())
    assert.equal(0, leased())
  end)

  it("a hook that has the machines made again returns true, and they are waited for once more", function()
    local asked, told = 0, {}
    local result
    task.all({
      function()
        result = launch.run(settings(trainer(UNTIL), {
          restarts = { preempted = 1 },
          node_state = function()
            return "PREEMPTED"
          end,
          hooks = {
            on_preempted = function(what)
              told[#told + 1] = what.text
              return true
            end,
          },
          renew = function()
            asked = asked + 1
            if asked == 1 then
              require("ciranda.io.error").raise({ code = "preempted", message = "job is SUSPENDED" })
            end
            return fleet.new(slices, { connect = connect, retry_for = 2 })
          end,
        }))
      end,
      function()
        when(1, "completed step: 7", function()
          machines["1.0"]:reboot()
        end)
        end_second()
      end,
    })
    assert.same({ 0, "done" }, { result.status, result.kind }, text())
    assert.equal(2, asked)
    -- The first is the end of the attempt; what a hook returns to that changes nothing.
    assert.equal(2, #told)
    assert.equal("job is SUSPENDED", told[2])
    assert.same({ "preempted", "done" }, kinds())
  end)

  it("a hook that returns true is believed once: machines that are not there end the run", function()
    local asked = without_machines({
      on_preempted = function()
        return true
      end,
    })
    assert.equal(2, asked)
  end)
end)
