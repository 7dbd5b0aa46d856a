-- The guard on this machine, by itself and under a detached runner.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local environment = dofile("tests/fixtures/environment.lua")
local support = dofile("tests/spec/recipes/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable

describe("guard on this machine", function()
  local place

  setup(function()
    place = support.place(1, 1)
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  local function recipe(name, ...)
    return place:run(name, { ... }, { fleet = false })
  end

  local function standing(run)
    local result = recipe("runs", run)
    assert.equal(0, result.code, result.err)
    return json.decode(result.out)
  end

  --- Lets the command end (it waits for the file `over`), and looks at what is left of the run: it ran once.
  local function see_the_end(run, over, ran)
    fs.write(over, "")
    assert(support.ssh.wait_for(function()
      return standing(run).state == "ended"
    end, 100))
    assert.same({ 6, "user" }, { standing(run).status, standing(run).kind })
    assert.equal("run\n", fs.read(ran))
    assert.equal("begun\nover\n", recipe("logs", run).out)
  end

  it("runs a command once, shows its output, returns its status, and can be taken up by its name", function()
    local marker = place.root .. "/ran"
    local result =
      recipe("guard", "--name=g1", "--", ("echo ran >> %s; echo out; echo err >&2; exit 5"):format(marker))
    assert.equal(5, result.code)
    assert.equal("out\nerr\n", result.out)
    assert.matches("exit status 5", result.err, 1, true)
    local again = recipe("guard", "--name=g1", "--", "echo ran >> " .. marker)
    assert.equal(1, again.code)
    assert.matches(
      "a name runs once: ciranda guard --name=g1 shows it; give another --name",
      again.err,
      1,
      true
    )
    assert.equal("ran\n", fs.read(marker))
    result = recipe("guard", "--name=g1")
    assert.same({ 5, "out\nerr\n" }, { result.code, result.out })
    result = recipe("guard", "--name=g2", "--", "printf", "%s|", "a b", "$HOME", "it's")
    assert.same({ 0, "a b|$HOME|it's|" }, { result.code, result.out })
    assert.equal(137, recipe("guard", "--name=g3", "--", "kill -9 $$").code)
    assert.equal(1, recipe("guard", "--name=nobody").code)
    assert.equal(2, recipe("guard", "--name=../x", "--", "true").code)
    assert.equal(2, recipe("guard").code)
  end)

  it(
    "stops the program and not the shell, on a signal to this program; a lost terminal leaves it running",
    function()
      local ready = place.root .. "/ready"
      local command = (
        "python3 -c 'import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7)); "
        .. 'print("up", flush=True); open("%s", "w").close(); time.sleep(60)\'; true'
      ):format(ready)
      local running = place:start("guard", { "--name=s1", "--grace=20", "--", command }, { fleet = false })
      assert(support.ssh.wait_for(function()
        return fs.exists(ready)
      end))
      uv.kill(running.program.pid, "sighup")
      local left = running.wait()
      assert.equal(129, left.code)
      assert.matches("ciranda guard --name=s1 takes it up again", left.err, 1, true)
      running = place:start("guard", { "--name=s1", "--grace=20" }, { fleet = false })
      local shown = ("%s/out.%d"):format(place.root, place.started)
      assert(support.ssh.wait_for(function()
        return fs.read(shown) == "up\n"
      end))
      uv.kill(running.program.pid, "sigterm")
      local result = running.wait()
      assert.equal(143, result.code)
      assert.matches("stopped by SIGTERM; its own exit status 7", result.err, 1, true)
      local record = json.decode(fs.read(place.root .. "/state/ciranda/guard/s1/exit"))
      assert.same({ 7, true, 0 }, { record.status, record.stopped, record.killed })
    end
  )

  it("asks the guard that has taken the place of one that was killed in the middle of a stop", function()
    local _ <close> = environment.set({ XDG_STATE_HOME = place.root .. "/state" })
    local guarded = require("ciranda.run.local_guard").named("again")
    guarded.program = place.root .. "/guard"
    local marker = place.root .. "/asked"
    fs.write(
      guarded.program,
      ("#!/bin/sh\necho >> %s; echo asked >&2; [ $(wc -l < %s) -gt 1 ] || "):format(marker, marker)
        .. "{ echo 'it has lost its guard: ask again' >&2; exit 1; }\n",
      { mode = 448 }
    )
    local told = 0
    guarded:stop(1, "a test", function()
      told = told + 1
    end)
    assert.equal("\n\n", fs.read(marker))
    assert.is_true(told >= 2)
  end)

  it("stops it also when the signal that leaves comes in the same moment", function()
    local ready = place.root .. "/both"
    local running = place:start(
      "guard",
      { "--name=both", "--", ("touch %s; exec sleep 60"):format(ready) },
      { fleet = false }
    )
    assert(support.ssh.wait_for(function()
      return fs.exists(ready)
    end))
    -- A busy machine: the guard takes its time to hear of it.
    local real = place.root .. "/state/ciranda/bin/real"
    local name = fs.list(place.root .. "/state/ciranda/bin")[1].name
    local program = place.root .. "/state/ciranda/bin/" .. name
    fs.rename(program, real)
    finally(function()
      fs.rename(real, program)
    end)
    fs.write(program, ('#!/bin/sh\nsleep 0.5\nexec %s "$@"\n'):format(real), { mode = 448 })
    for _, signal in ipairs({ "sigstop", "sigterm", "sigint", "sigcont" }) do
      uv.kill(running.program.pid, signal)
    end
    local code = running.wait().code
    assert.is_true(code == 129 or code == 143, code)
    local path = place.root .. "/state/ciranda/guard/both/exit"
    assert(support.ssh.wait_for(function()
      return fs.exists(path)
    end))
    assert.is_true(json.decode(fs.read(path)).stopped)
  end)

  --- Numbers, a line each.
  local function numbers(count)
    local list = {}
    for number = 1, count do
      list[number] = number .. "\n"
    end
    return table.concat(list)
  end

  local function exit_of(name)
    local path = ("%s/state/ciranda/guard/%s/exit"):format(place.root, name)
    return fs.exists(path) and json.decode(fs.read(path))
  end

  it("shows all that --keep has left, and says what it has not", function()
    local result = recipe("guard", "--name=k1", "--keep=100000", "--", "seq 300000")
    assert.equal(0, result.code, result.err)
    assert.equal("300000\n", result.out:sub(-7))
    local first = exit_of("k1").log_first
    assert.is_true(first > 0)
    local again = recipe("guard", "--name=k1")
    assert.equal(0, again.code, again.err)
    assert.is_true(again.out == numbers(300000):sub(first + 1))
    assert.matches(("Bytes 0 to %d of its output are no longer kept"):format(first - 1), again.err, 1, true)
  end)

  it("is kept from no signal by who does not read, who gets every byte later, within seconds", function()
    local function start(name)
      local ends = assert(uv.pipe())
      local program = process.spawn({
        BINARY,
        "guard",
        "--name=" .. name,
        "--",
        "seq 400000; exec sleep 60",
        env = place:env(),
        grace = 1,
        stdout = ends.write,
        stderr = process.DISCARD,
      })
      uv.fs_close(ends.write)
      return program, ends.read
    end
    local all = numbers(400000)
    local function stop(name, program)
      local log = ("%s/state/ciranda/guard/%s/log"):format(place.root, name)
      assert(support.ssh.wait_for(function()
        return fs.exists(log) and fs.stat(log).size == #all
      end))
      uv.kill(program.pid, "sigterm")
      assert(support.ssh.wait_for(function()
        return exit_of(name)
      end))
    end
    local first <close>, read = start("p1")
    local second <close>, unread = start("p2")
    stop("p2", second)
    -- Whoever reads has seconds from the command's end: this one is ended last, and read at once.
    stop("p1", first)
    local got = {}
    repeat
      got[#got + 1] = uv.fs_read(read, 65536)
      task.yield()
    until got[#got] == ""
    assert.is_true(table.concat(got) == all)
    assert.equal(143, first:wait().code)
    assert.equal(143, task.timeout(60, second.wait, second).code)
    uv.fs_close(read)
    uv.fs_close(unread)
  end)

  it("says when what it shows could not be written", function()
    local full = assert(uv.fs_open("/dev/full", "w", 0))
    local result =
      process.run({ BINARY, "guard", "--name=full", "--", "seq 10", env = place:env(), stdout = full })
    uv.fs_close(full)
    assert.equal(0, result.code)
    assert.matches("not all there: standard output: No space left on device", result.stderr, 1, true)
  end)

  it("leaves a name free under which nothing could be started, and needs none", function()
    local result = place:run("guard", { "--name=free", "--", "echo ran" }, {
      fleet = false,
      env = { SHELL = "/no/such/shell" },
    })
    assert.equal(1, result.code)
    assert.matches("cannot run the shell /no/such/shell", result.err, 1, true)
    local line = 'mkdir "$1" && cd "$1" && rmdir "$1" && exec "$0" guard --name=free -- "echo ran"'
    local gone = process.run({ "/bin/sh", "-c", line, BINARY, place.root .. "/gone", env = place:env() })
    assert.equal(1, gone.code)
    assert.matches("the present directory cannot be told: ENOENT", gone.stderr, 1, true)
    result = recipe("guard", "--name=free", "--", "echo ran")
    assert.same({ 0, "ran\n" }, { result.code, result.out })
    local running = {}
    for count = 1, 4 do
      running[count] = place:start("guard", { "--", "echo " .. count }, { fleet = false })
    end
    for count, one in ipairs(running) do
      result = one.wait()
      assert.same({ 0, count .. "\n" }, { result.code, result.out }, result.err)
    end
    for _, words in ipairs({
      { "--stop" },
      { "--stop", "--", "true" },
      { "--stop", "--name=free", "--", "true" },
    }) do
      result = recipe("guard", table.unpack(words))
      assert.equal(2, result.code)
      assert.matches("ciranda guard --name=NAME --stop", result.err, 1, true)
    end
  end)

  it("stops it at the first Ctrl-C, and leaves it at the second", function()
    local function start(name, handler)
      local ready = place.root .. "/up-" .. name
      local command = ("trap '%s' TERM; touch %s; while :; do sleep 0.1; done"):format(handler, ready)
      local running = place:start("guard", { "--name=" .. name, "--", command }, { fleet = false })
      assert(support.ssh.wait_for(function()
        return fs.exists(ready)
      end))
      uv.kill(running.program.pid, "sigint")
      return running
    end
    local stopped = start("int1", "exit 9").wait()
    assert.equal(130, stopped.code)
    assert.matches("stopped by SIGINT; its own exit status 9", stopped.err, 1, true)
    local running = start("int2", ":")
    assert(support.ssh.wait_for(function()
      return fs.read(running.err_path)
        :find("SIGINT: TERM, KILL after 300 s; once more to leave at once", 1, true)
    end))
    uv.kill(running.program.pid, "sigint")
    local left = running.wait()
    assert.equal(129, left.code)
    assert.matches("Detached: ciranda guard --name=int2 takes it up again", left.err, 1, true)
    assert.is_nil(exit_of("int2") or nil)
    local ended = recipe("guard", "--name=int2", "--stop", "--grace=0")
    assert.equal(0, ended.code, ended.err)
    assert.equal(137, recipe("guard", "--name=int2").code)
  end)

  it("minds a signal that comes while its command is still being started", function()
    local state = place.root .. "/early"
    local guard = require("ciranda.run.attempt").guard()
    local bin = state .. "/ciranda/bin"
    fs.mkdir_p(bin)
    fs.write(bin .. "/real", guard.bytes, { mode = 448 })
    fs.write(
      ("%s/guard-%s"):format(bin, guard.sha256),
      (
        '#!/bin/sh\n"%s/real" "$@"\ncode=$?\n'
        .. '[ "$1" != run ] || { : > %s/started; until [ -e %s/go ]; do sleep 0.05; done; }\nexit $code\n'
      ):format(bin, bin, bin),
      { mode = 448 }
    )
    local options = { fleet = false, env = { XDG_STATE_HOME = state } }
    local running = place:start("guard", { "--name=e1", "--", "sleep 600" }, options)
    assert(support.ssh.wait_for(function()
      return fs.exists(bin .. "/started")
    end))
    uv.kill(running.program.pid, "sighup")
    fs.write(bin .. "/go", "")
    local left = running.wait()
    assert.equal(129, left.code)
    assert.matches("ciranda guard --name=e1 takes it up again", left.err, 1, true)
    local ended = place:run("guard", { "--name=e1", "--stop", "--grace=1" }, options)
    assert.equal(0, ended.code, ended.err)
  end)

  it("keeps a detached run through the death of its runner, which is started again", function()
    local run = place:name("away")
    local over, ran = place.root .. "/over", place.root .. "/runs"
    fs.write(ran, "")
    fs.chmod(ran, 438)
    local result = place:run("multihost_runner", {
      "--detach",
      "--RUN_NAME=" .. run,
      ("--COMMAND=echo run >> %s; echo begun; until [ -e %s ]; do sleep 0.1; done; echo over; exit 6"):format(
        ran,
        over
      ),
    })
    assert.equal(0, result.code, result.err)
    assert.matches(("Detached: run %s goes on"):format(run), result.err, 1, true)
    assert.matches(("ciranda logs %s --follow"):format(run), result.err, 1, true)
    local first = standing(run)
    assert.equal("running", first.state)
    uv.kill(first.runner.pid, "sigkill")
    local second
    assert(support.ssh.wait_for(function()
      second = standing(run)
      return second.state == "running" and second.runner.pid ~= first.runner.pid
    end, 100))
    see_the_end(run, over, ran)
    local directory = place.root .. "/state/ciranda/guard/"
    local name
    for _, entry in ipairs(fs.list(directory)) do
      name = entry.name:sub(1, #run) == run and entry.name or name
    end
    local record
    assert(support.ssh.wait_for(function()
      record = fs.exists(directory .. name .. "/exit") and json.decode(fs.read(directory .. name .. "/exit"))
      return record
    end, 100))
    assert.equal(6, record.status)
    assert.matches("taking it up again, 1 of 3", fs.read(directory .. name .. "/log"), 1, true)
  end)

  it(
    "attach --detach takes a run up that goes on without a terminal, and tells of one that has ended",
    function()
      local run = place:name("taken")
      local over, ran = place.root .. "/taken-over", place.root .. "/taken-runs"
      fs.write(ran, "")
      fs.chmod(ran, 438)
      local running = place:start("multihost_runner", {
        "--RUN_NAME=" .. run,
        ("--COMMAND=echo run >> %s; echo begun; until [ -e %s ]; do sleep 0.1; done; echo over; exit 6"):format(
          ran,
          over
        ),
      })
      place:log_has(run, 0, 0, "begun\n")
      uv.kill(running.program.pid, "sigkill")
      running.wait()
      assert.equal("detached", standing(run).state)
      local result = recipe("attach", run, "--detach")
      assert.equal(0, result.code, result.err)
      assert.matches(("Detached: run %s goes on"):format(run), result.err, 1, true)
      local taken = standing(run)
      assert.equal("running", taken.state)
      assert.is_true(taken.runner.pid ~= running.program.pid)
      -- Its runner has a guard: a second one is refused while it lives.
      local second = recipe("attach", run, "--detach")
      assert.is_true(second.code ~= 0)
      assert.matches("is in the hands of process", second.err, 1, true)
      assert.matches(("`ciranda logs %s --follow` shows it"):format(run), second.err, 1, true)
      see_the_end(run, over, ran)
      local late = recipe("attach", run, "--detach")
      assert.is_true(late.code ~= 0)
      assert.matches(("run %s has ended: user, exit status 6"):format(run), late.err, 1, true)
    end
  )

  it("goes on when the terminal is lost while a detached run is still being staged", function()
    local run = place:name("hung-up")
    local ready, over, ran =
      place.root .. "/ready", place.root .. "/hung-up-over", place.root .. "/hung-up-runs"
    for _, path in ipairs({ ran, ready .. ".begun" }) do
      fs.write(path, "")
      fs.chmod(path, 438)
    end
    local running = place:start("multihost_runner", {
      "--detach",
      "--RUN_NAME=" .. run,
      ("--SETUP=echo yes > %s.begun; until [ -e %s ]; do sleep 0.1; done"):format(ready, ready),
      ("--COMMAND=echo run >> %s; echo begun; until [ -e %s ]; do sleep 0.1; done; echo over; exit 6"):format(
        ran,
        over
      ),
    })
    assert(support.ssh.wait_for(function()
      return fs.read(ready .. ".begun") ~= ""
    end, 100))
    uv.kill(running.program.pid, "sighup")
    local left = running.wait()
    assert.equal(129, left.code, left.err)
    assert.matches(("Detached: run %s goes on"):format(run), left.err, 1, true)
    fs.write(ready, "")
    see_the_end(run, over, ran)
  end)

  it("tells at once of a detached runner that cannot start", function()
    local code = place.root .. "/left-out"
    fs.mkdir(code)
    fs.write(code .. "/.gitignore", "not-there\n")
    fs.write(code .. "/not-there", "")
    local result = place:run("multihost_runner", {
      "--detach",
      "--RUN_NAME=" .. place:name("nothing"),
      "--SCRIPT_DIR=" .. code,
      "--COMMAND=cat not-there",
    })
    assert.is_true(result.code ~= 0)
    assert.matches("not-there", result.err, 1, true)
    -- With --json its records are those of this program, and nothing else is on standard output.
    result = place:run("--json", {
      "multihost_runner",
      "--detach",
      "--RUN_NAME=" .. place:name("nothing"),
      "--SCRIPT_DIR=" .. code,
      "--SETUP=exit 4",
      "--COMMAND=true",
    })
    local events, last = {}, nil
    for line in result.out:gmatch("[^\n]+") do
      last = json.decode(line)
      events[last.event] = (events[last.event] or 0) + 1
    end
    assert.same({ "end", 1, "staging" }, { last.event, events["end"], last.kind }, result.out .. result.err)
    assert.is_true(events.message > 0)
    local simulated = place:run(
      "run",
      { "--sim", "multihost_runner", "--detach", "--TPU_PREFIX=a", "--COMMAND=true" },
      {
        fleet = false,
      }
    )
    assert.equal(2, simulated.code)
    assert.matches("that simulated cloud ends with this program", simulated.err, 1, true)
  end)
end)
