--- The runner's signals at the moments when something else keeps it: a worker that does not answer while it is told to
--- start or is found again, a hook that does not end, a standard output that nobody reads, the way to another attempt.
local fs = require("ciranda.io.fs")
local hooks = require("ciranda.run.hooks")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local runs = require("ciranda.run.runs")
local stopping = require("ciranda.fleet.signals").STOPPED
local stops = require("ciranda.run.stopping")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local runs_of = dofile("tests/fixtures/fleet/runs.lua")

describe("a runner that is busy minds its signals:", function()
  local place, machines, handlers

  before_each(function()
    place = runs_of.open(2, 1)
    machines, handlers = place.machines, {}
  end)

  after_each(function()
    place:close()
  end)

  local function text()
    return place:text()
  end

  local function settings(command, more)
    local options = place:settings(command, { restart_pause = 0.05 }, more, { grace = 20 })
    -- As the command line has it: several handlers, the last one first.
    options.on_interrupt = function(handler)
      table.insert(handlers, 1, handler)
      return function()
        for index, other in ipairs(handlers) do
          if other == handler then
            table.remove(handlers, index)
            return
          end
        end
      end
    end
    return options
  end

  --- Waits until COMMAND is up on every machine.
  local function commands_up()
    for _, machine in pairs(machines) do
      patience.wait_for("the command", function()
        return uv.fs_stat(machine.home .. "/up") ~= nil
      end)
    end
  end

  --- A scope whose tasks end with the test, also when that fails.
  local function scope_of()
    local scope = task.scope()
    return setmetatable({}, {
      __index = {
        spawn = function(_, ...)
          return scope:spawn(...)
        end,
      },
      __close = function(_, problem)
        scope:cancel("the end of the test")
        pcall(getmetatable(scope).__close, scope, problem)
      end,
    })
  end

  --- Runs it as a task that is cancelled by a signal that nobody takes.
  ---@return ciranda.Task, fun(name: string)
  local function begin(scope, options, run)
    local task_of = scope:spawn(run or launch.run, options)
    local counts = {}
    return task_of,
      function(name)
        counts[name] = (counts[name] or 0) + 1
        for _, handler in ipairs(handlers) do
          if handler(name, counts[name]) then
            return
          end
        end
        task_of:cancel("interrupted by " .. name)
      end
  end

  local function said(pattern)
    patience.wait_for(text, function()
      return text():find(pattern, 1, true) ~= nil
    end)
  end

  local function result_of(running)
    return task.timeout(60, running.wait, running)
  end

  local function attaching(options)
    return {
      run = "r1",
      connect_options = { connect = place.connect, retry_for = 2 },
      progress = options.progress,
      json = true,
      on_interrupt = options.on_interrupt,
    }
  end

  --- Waits until the command on the first worker was told to stop, and the runner has seen that it has.
  local function first_stopped()
    patience.wait_for("TERM on 0.0", function()
      return uv.fs_stat(machines["0.0"].home .. "/told") ~= nil
    end)
    patience.wait_for("the end on 0.0", function()
      return journal.read("r1").attempts[1].exits["0/0"]
    end)
  end

  local ENDLESS = "trap 'touch ../told; exit 0' TERM; touch ../up; sleep 60 & wait"

  it("a worker that does not answer the go keeps no Ctrl-C back, and the next one leaves", function()
    local scope <close> = scope_of()
    machines["1.0"].hang = function(command)
      return command:find(" run .ciranda", 1, true) ~= nil
    end
    local options = settings(ENDLESS)
    local running, signal = begin(scope, options)
    patience.wait_for("the other worker", function()
      return uv.fs_stat(machines["0.0"].home .. "/up") ~= nil
    end)
    signal("SIGINT")
    first_stopped()
    signal("SIGINT")
    said("once more to leave without that")
    signal("SIGINT")
    local result = result_of(running)
    assert.same({ 129, "detached" }, { result.status, result.kind })
    assert.matches(
      "slice1/worker0 could not be told to stop. `ciranda stop r1` does it",
      result.message,
      1,
      true
    )
    -- Who takes it up finds a worker that was never started, and one that has ended.
    machines["1.0"].hang = nil
    result = launch.attach(attaching(options))
    assert.same({ 130, "interrupted" }, { result.status, result.kind }, text())
  end)

  it("signals in one moment stop everybody before the runner leaves", function()
    local least = stops.LEAST
    stops.LEAST = 60 -- on a busy machine
    finally(function()
      stops.LEAST = least
    end)
    for _, more in ipairs({ { "SIGINT" }, { "SIGHUP" }, { "SIGINT", "SIGINT" }, { "SIGTERM", "SIGHUP" } }) do
      local scope <close> = scope_of()
      local options = settings(ENDLESS)
      local running, signal = begin(scope, options)
      commands_up()
      said("Started on 2 workers")
      signal("SIGINT")
      for _, name in ipairs(more) do
        signal(name)
      end
      result_of(running)
      for address, machine in pairs(machines) do
        patience.wait_for("TERM on " .. address, function()
          return uv.fs_stat(machine.home .. "/told") ~= nil
        end)
        fs.remove(machine.home .. "/told")
        fs.remove(machine.home .. "/up")
      end
      pcall(launch.attach, attaching(options)) -- gives the workers back
      place.said = {}
    end
  end)

  it("says how to give the workers back when it is told to leave at once before the start", function()
    local scope <close> = scope_of()
    machines["1.0"].hang = function(command)
      return command:find("ciranda-probe", 1, true) ~= nil
    end
    local running, signal = begin(scope, settings("true"))
    patience.wait_for("the lease", function()
      return uv.fs_stat(machines["0.0"].home .. "/ciranda_lease.tester")
    end)
    signal("SIGINT")
    assert.is_nil(text():find("ciranda stop", 1, true))
    signal("SIGINT")
    said("`ciranda stop r1` gives back what is still taken")
    machines["1.0"].hang = nil
    pcall(running.wait, running)
  end)

  it("a signal ends the hook that is told of the last attempt, and not what the run has come to", function()
    for _, name in ipairs({ "SIGINT", "SIGHUP" }) do
      local scope <close> = scope_of()
      local called = task.event()
      local running, signal = begin(
        scope,
        settings("exit 9", {
          run = "hook" .. name:lower(),
          hooks = {
            on_failure = function()
              called:set()
              task.sleep(3600)
            end,
          },
        })
      )
      task.timeout(60, called.wait, called)
      signal(name)
      local result = result_of(running)
      assert.same({ 9, "user" }, { result.status, result.kind })
      assert.same(
        { 9, "user" },
        { runs.standing("hook" .. name:lower()).status, runs.standing("hook" .. name:lower()).kind }
      )
      said("Leaving a hook that has not ended")
      place.said = {}
    end
  end)

  it("one Ctrl-C too many leaves no worker taken, and the run as it has ended", function()
    for signals = 1, 2 do
      local scope <close> = scope_of()
      local options, asked, answer = settings("true"), task.event(), task.event()
      options.run = "late" .. signals
      machines["1.0"].hang = function(command)
        if command:find("flock -w 5", 1, true) then
          asked:set()
          answer:wait()
        end
        return false
      end
      local running, signal = begin(scope, options)
      task.timeout(60, asked.wait, asked)
      for _ = 1, signals do
        signal("SIGINT")
      end
      answer:set()
      local result = result_of(running)
      assert.same({ 0, "done" }, { result.status, result.kind })
      assert.equal("done", runs.standing(options.run).kind)
      for _, machine in pairs(machines) do
        assert.is_nil(uv.fs_stat(machine.home .. "/ciranda_lease.tester"))
      end
    end
  end)

  it("a worker that is not found again keeps nobody from stopping the others", function()
    local scope <close> = scope_of()
    local options = settings(ENDLESS, { checkpoint_directory = place.root .. "/shared" })
    local running, signal = begin(scope, options)
    commands_up()
    signal("SIGHUP")
    assert.equal(129, result_of(running).status)
    place.workers:close()
    local taken = attaching(options)
    function taken.connect_options.connect(given)
      if given.address == "1.0" or given.host == "1.0" then
        task.sleep(3600) -- a machine that is off
      end
      return place.connect(given)
    end
    running, signal = begin(scope, taken, launch.attach)
    said("Taking up run r1")
    signal("SIGTERM")
    first_stopped()
    signal("SIGTERM")
    said("once more to leave without that")
    signal("SIGTERM")
    local result = result_of(running)
    assert.same({ 129, "detached" }, { result.status, result.kind })
    assert.matches("slice1/worker0 could not be told to stop", result.message, 1, true)
  end)

  it("a hook that does not end keeps nobody from leaving, nor the run from its end", function()
    local limit = hooks.LIMIT
    finally(function()
      hooks.LIMIT = limit
    end)
    local called = 0
    local function settings_with_hook(command)
      return settings(command, {
        watch = { stall = 0.3 },
        hooks = {
          on_stall = function()
            called = called + 1
            task.sleep(3600)
          end,
        },
      })
    end
    local scope <close> = scope_of()
    local running, signal = begin(scope, settings_with_hook(ENDLESS))
    patience.wait_for("the hook", function()
      return called == 1
    end)
    signal("SIGHUP")
    assert.same({ 129, "detached" }, { result_of(running).status, result_of(running).kind })
    -- The end is written down before the hook is waited for, and a signal ends that wait.
    running, signal =
      begin(scope, settings_with_hook(("until [ -e %s/over ]; do sleep 0.05; done"):format(place.root)))
    patience.wait_for("the hook", function()
      return called == 2
    end)
    io.open(place.root .. "/over", "w"):close()
    patience.wait_for("the end in the journal", function()
      return journal.read("r1").attempts[2].ended
    end)
    assert.equal("done", journal.read("r1").attempts[2].ended.kind)
    signal("SIGTERM")
    signal("SIGTERM")
    assert.same({ 0, "done" }, { result_of(running).status, result_of(running).kind })
    assert.matches("Leaving hooks that have not ended", text(), 1, true)
  end)

  it("between two attempts SIGTERM ends the run, and a lost terminal leaves it to attach", function()
    for name, state in pairs({ SIGTERM = "ended", SIGHUP = "detached" }) do
      local run = name:lower()
      place.said = {}
      local scope <close> = scope_of()
      local running, signal =
        begin(scope, settings("exit 9", { run = run, restarts = { user = 1 }, restart_pause = 3600 }))
      patience.wait_for("the way to another attempt", function()
        return text():find("Another attempt in", 1, true)
      end)
      assert.equal("running", runs.standing(run).state)
      signal(name)
      pcall(running.wait, running)
      local standing = runs.standing(run)
      assert.equal(state, standing.state)
      assert.same(
        stopping[name] and { stopping[name], "interrupted" } or {},
        { standing.status, standing.kind }
      )
      local options = settings("exit 9")
      local taken = attaching(options)
      taken.run = run
      if stopping[name] then
        local ok, problem = pcall(launch.attach, taken)
        assert.is_false(ok)
        assert.matches("has ended", problem.message, 1, true)
      else
        assert.same({ 9, "user" }, { launch.attach(taken).status, runs.standing(run).kind })
      end
    end
  end)
end)
