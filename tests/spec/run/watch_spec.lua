--- How a gang is watched: whose logs come when, what is said of quiet workers, leaders that end early, and a go that
--- is cut off in the middle.
local attempt = require("ciranda.run.attempt")
local fleet = require("ciranda.fleet")
local gang = require("ciranda.run.gang")
local logs_of = require("ciranda.run.logs")
local task = require("ciranda.task")
local uv = require("luv")

local machines_of = dofile("tests/fixtures/fleet/machines.lua")
local patience = dofile("tests/fixtures/patience.lua")
local processes = require("ciranda.sim.processes")

describe("run.gang watches", function()
  local root, machines, workers, number

  before_each(function()
    root, number = uv.fs_mkdtemp("/tmp/watch-XXXXXX"), 0
  end)

  after_each(function()
    machines_of.end_all(machines, { workers })
    os.execute(("rm -rf '%s'"):format(root))
  end)

  local function gang_of(slice_count, worker_count, command, options)
    if not workers or number == 0 then
      local slices, connect
      slices, connect, machines = machines_of.make(slice_count, worker_count, { root = root })
      workers = fleet.new(slices, { connect = connect, retry_for = 2 })
    end
    number = number + 1
    local settings = {
      fleet = workers,
      run = "r1",
      id = ("%04d-abcdef"):format(number),
      command = command,
      directory = "r1",
      guard = attempt.guard(),
      failure_grace = 1,
      window = 0.5,
      lost_after = 60,
      stage_timeout = 60,
      go_timeout = 60,
    }
    local logs, notes = {}, {}
    settings.on_bytes = function(worker, bytes)
      logs[worker.address] = (logs[worker.address] or "") .. bytes
    end
    settings.on_note = function(text)
      notes[#notes + 1] = text
    end
    for name, value in pairs(options or {}) do
      settings[name] = value
    end
    local made = gang.new(settings)
    made.logs, made.notes = logs, notes
    return made
  end

  local function start(one)
    one:stage()
    one:go()
    return one
  end

  local function read(path)
    local file = io.open(path, "rb")
    local text = file and file:read("a")
    if file then
      file:close()
    end
    return text
  end

  local function followed_from_the_start(address)
    local count = 0
    for _, command in ipairs(machines[address].commands) do
      if command:find("follow .ciranda%S+ %-%-from 0 ") then
        count = count + 1
      end
    end
    return count
  end

  local function only_first(worker)
    return worker.address == "0.0"
  end

  it("brings a log that is not followed when its worker has ended, whole", function()
    local one =
      start(gang_of(1, 3, [[seq 3000; touch ../there; while [ ! -e ../go ]; do sleep 0.02; done; echo end]], {
        live = only_first,
      }))
    local verdict
    task.all({
      function()
        verdict = one:watch()
      end,
      function()
        patience.wait_for("the first worker's log", function()
          return (one.logs["0.0"] or ""):find("\n3000\n", 1, true) and read(machines["0.2"].home .. "/there")
        end)
        assert.is_nil(one.logs["0.1"])
        assert.is_nil(one.logs["0.2"])
        assert.equal(0, followed_from_the_start("0.1"))
        for _, machine in pairs(machines) do
          io.open(machine.home .. "/go", "w"):close()
        end
      end,
    })
    assert.equal(0, verdict.status)
    for address, machine in pairs(machines) do
      assert.equal(read(("%s/.ciranda/r1/%s/log"):format(machine.home, one.options.id)), one.logs[address])
      assert.matches("\n3000\nend\n$", one.logs[address])
    end
  end)

  it("knows the end of a log that is not followed, to tell cause from consequence, and brings it", function()
    local one =
      start(gang_of(
        1,
        3,
        ([[if [ $CIRANDA_WORKER_ID = 1 ]; then seq 200000; echo 'Socket closed'; exit 1; fi
        if [ $CIRANDA_WORKER_ID = 2 ]; then
          until [ -e %s/home-0.1/.ciranda/r1/$CIRANDA_ATTEMPT/exit ]; do sleep 0.05; done
          sleep 1; echo 'the very reason'; exit 5
        fi
        exec sleep 60]]):format(root),
        { live = only_first }
      ))
    -- Nobody hears of worker 1 before worker 2 has failed too.
    machines["0.1"].down = true
    machines["0.1"]:break_all()
    local verdict
    task.all({
      function()
        verdict = one:watch()
      end,
      function()
        patience.wait_for("the end of worker 2", function()
          return read(("%s/.ciranda/r1/%s/exit"):format(machines["0.2"].home, one.options.id))
        end)
        machines["0.1"].down = false
      end,
    })
    assert.equal(5, verdict.status)
    assert.equal("0.2", verdict.first.worker.address)
    assert.matches("the very reason", verdict.first.tail, 1, true)
    assert.equal("0.1", verdict.consequences[1].worker.address)
    assert.matches("Socket closed", one.logs["0.1"], 1, true)
    assert.is_true(#one.logs["0.1"] > 1000000)
  end)

  it("reads each log's end once, and looks for the cause when it is to be named and at the end", function()
    local cause = require("ciranda.run.cause")
    local first, looks = cause.first, 0
    local restore <close> = setmetatable({}, {
      __close = function()
        cause.first = first
      end,
    })
    assert(restore)
    cause.first = function(...)
      looks = looks + 1
      return first(...)
    end
    local lengths = {}
    local one = start(gang_of(2, 3, [[seq 3000; echo 'Socket closed'; sleep 0.$CIRANDA_PROCESS_ID; exit 7]], {
      victims_window = 5,
      on_outcome = function(outcome)
        lengths[#lengths + 1] = #outcome.tail
      end,
    }))
    local verdict = one:watch()
    assert.equal(2, looks)
    assert.equal(5, #verdict.consequences + #verdict.stopped)
    assert.is_true(cause.follows(verdict.first))
    assert.same({ 4096, 4096, 4096, 4096, 4096, 4096 }, lengths)
    for _, member in ipairs(one.members) do
      assert.same({}, member.tail)
    end
  end)

  it("says once that nobody writes, and again only after somebody has", function()
    local stalls = {}
    local one = start(
      gang_of(
        1,
        2,
        [[echo a; while [ ! -e ../go ]; do sleep 0.02; done; echo b; [ $CIRANDA_WORKER_ID = 1 ] &&
        while [ ! -e ../end ]; do sleep 0.02; done; true]],
        {
          stall = 2,
          live = only_first,
          on_stall = function(stall)
            stalls[#stalls + 1] = stall
            if #stalls == 1 then
              task.sleep(2.5)
              assert.equal(1, #stalls)
              io.open(machines["0.0"].home .. "/go", "w"):close()
            else
              io.open(machines["0.1"].home .. "/end", "w"):close()
            end
          end,
          -- The other one writes again when this one's end has been seen.
          on_outcome = function(outcome)
            if outcome.worker.address == "0.0" then
              io.open(machines["0.1"].home .. "/go", "w"):close()
            end
          end,
        }
      )
    )
    assert.equal(0, one:watch().status)
    assert.equal(2, #stalls)
    assert.is_true(stalls[1].seconds >= 2)
    assert.same({ 2, 1 }, { #stalls[1].workers, #stalls[2].workers })
    assert.equal("0.1", stalls[2].worker.address)
  end)

  it("does not take a worker that writes for a quiet one, though nobody follows it", function()
    local stalls = 0
    local one = start(
      gang_of(
        1,
        2,
        ([[if [ $CIRANDA_WORKER_ID = 0 ]; then until [ -e %s/over ]; do sleep 0.1; done; exit; fi
        i=0; until [ -e %s/seen ]; do i=$((i+1)); echo $i; [ $i != 60 ] || : > %s/over; sleep 0.1; done]]):format(
          root,
          root,
          root
        ),
        {
          stall = 3,
          on_outcome = function()
            io.open(root .. "/seen", "w"):close()
          end,
          live = only_first,
          on_stall = function()
            stalls = stalls + 1
          end,
        }
      )
    )
    -- Nor while nothing is heard of it.
    machines["0.1"].hang = function(command)
      return command:find("follow .ciranda") ~= nil
    end
    task.all({
      function()
        task.sleep(4.5)
        machines["0.1"].hang = nil
        machines["0.1"]:break_all()
      end,
      function()
        assert.equal(0, one:watch().status)
      end,
    })
    assert.equal(0, stalls)
  end)

  it("announces a leader that ends before its tree, and waits for the tree", function()
    local told = {}
    -- The tree that ends first has the other one stopped, which goes on to its end all the same.
    local command = "(trap '' TERM; until [ -e ~/end ]; do sleep 0.1; done; echo late) & echo early; exit 3"
    local one = start(gang_of(1, 2, command, {
      failure_grace = 60,
      on_note = function(text)
        told[#told + 1] = text
        if #told == 2 then
          for _, machine in pairs(machines) do
            io.open(machine.home .. "/end", "w"):close()
          end
        end
      end,
    }))
    local verdict = one:watch()
    assert.equal(3, verdict.status)
    assert.equal("early\nlate\n", one.logs["0.1"])
    assert.equal(2, #told)
    assert.matches("slice 0 worker [01]: COMMAND's shell has ended with 3, what it started goes on", told[1])
  end)

  it("tells of many leaders that end before their trees together, after the first few", function()
    local told = {}
    local one = start(gang_of(3, 4, "(until [ -e ~/end ]; do sleep 0.1; done) & exit 3", {
      on_note = function(text)
        told[#told + 1] = text
      end,
    }))
    -- Their machines go on until the last leader has been told of.
    task.all({
      function()
        assert.equal(3, one:watch().status)
      end,
      function()
        patience.wait_for("all leaders are told of", function()
          for _, member in ipairs(one.members) do
            if not member.attempt.leader_told then
              return false
            end
          end
          return true
        end)
        for _, machine in pairs(machines) do
          io.open(machine.home .. "/end", "w"):close()
        end
      end,
    })
    local alone, together = 0, {}
    for _, text in ipairs(told) do
      if text:find("^slice %d+ worker %d+: COMMAND's shell has ended with 3, what it started goes on") then
        alone = alone + 1
      else
        together[#together + 1] = text
        assert.matches("^slice.*: COMMAND's shell has ended with 3, what it started goes on$", text)
      end
    end
    assert.equal(4, alone)
    assert.is_true(#together >= 1 and #together < 8, ("%d lines"):format(#together))
  end)

  it("says nothing of a leader that ends with its tree", function()
    local one = start(gang_of(1, 1, "exec > >(cat); echo hello"))
    assert.equal(0, one:watch().status)
    assert.equal("hello\n", one.logs["0.0"])
    assert.same({}, one.notes)
  end)

  it("with leader_only has ended when the leaders have, with their statuses and all they wrote", function()
    -- Who fails has the others stopped: so all have written first, and the one that leaves with 0 has been seen to.
    local command = [[
      (sleep 600; echo late) & seq 5000; : > %s/wrote.$CIRANDA_WORKER_ID
      if [ $CIRANDA_WORKER_ID = 0 ]; then
        until [ -e %s/wrote.1 ] && [ -e %s/wrote.2 ]; do sleep 0.02; done
      else
        until [ -e %s/seen ]; do sleep 0.02; done
      fi
      exit $CIRANDA_WORKER_ID]]
    local one = start(gang_of(1, 3, command:gsub("%%s", root), {
      leader_only = true,
      live = only_first,
      failure_grace = 20,
      on_outcome = function()
        io.open(root .. "/seen", "w"):close()
      end,
    }))
    local began = uv.hrtime()
    local verdict = one:watch()
    assert.is_true((uv.hrtime() - began) / 1e9 < 100)
    assert.is_true(verdict.status == 1 or verdict.status == 2)
    for _, log in pairs(one.logs) do
      assert.matches("\n5000\n$", log)
    end
    assert.same({}, one.notes)
    assert.is_true(next(machines["0.0"]:processes()) ~= nil)
  end)

  it("goes on after what a worker no longer keeps of its log, and says which bytes are missing", function()
    local gaps = {}
    local one = start(gang_of(1, 2, "for i in $(seq 20000); do echo line $i of twenty thousand; done", {
      keep = 20000,
      live = only_first,
      on_gap = function(worker, from, to)
        gaps[worker.address] = { from, to }
      end,
    }))
    assert.equal(0, one:watch().status)
    local record = require("ciranda.io.json").decode(
      read(("%s/.ciranda/r1/%s/exit"):format(machines["0.1"].home, one.options.id))
    )
    assert.same({ 0, record.log_first }, gaps["0.1"])
    assert.is_true(record.log_first > 100000)
    assert.equal(record.log_bytes - record.log_first, #one.logs["0.1"])
    assert.matches("line 20000 of twenty thousand\n$", one.logs["0.1"])
  end)

  it("does without what somebody has cut from a log that had ended, and says so", function()
    local gaps = {}
    local cut = [[
[ $CIRANDA_WORKER_ID = 1 ] || exit 0; log=$CIRANDA_ATTEMPT_DIR/log; seq 1000
until [ "$(wc -c < $log)" = 3893 ]; do sleep 0.05; done; : > $log]]
    local one = start(gang_of(1, 2, cut, {
      live = only_first,
      on_gap = function(worker, from, to)
        gaps[worker.address] = { from, to }
      end,
    }))
    assert.equal(0, task.timeout(100, one.watch, one).status)
    assert.same({ ["0.1"] = { 0, 3893 } }, gaps)
  end)

  it("shows where processes wait, and Python's stacks of a program that asks for them", function()
    local program = [[
import faulthandler, signal, time, sys
faulthandler.register(signal.SIGUSR1)
def the_place_where_it_hangs():
    print("ready", flush=True)
    time.sleep(60)
the_place_where_it_hangs()
]]
    local file = assert(io.open(root .. "/hang.py", "w"))
    file:write(program)
    file:close()
    -- The shell has the variable too and would die of the signal; worker 1's program has not asked.
    local one = start(
      gang_of(
        1,
        2,
        ("if [ $CIRANDA_WORKER_ID = 0 ]; then export CIRANDA_STACK_SIGNAL=USR1; fi; python3 %s/hang.py; exit 4"):format(
          root
        )
      )
    )
    for _, machine in pairs(machines) do
      patience.wait_for("the program's sleep", function()
        local ready = read(("%s/.ciranda/r1/%s/log"):format(machine.home, one.options.id)) == "ready\n"
        for pid, line in pairs(ready and machine:processes() or {}) do
          local found = line:find("^%S*python3 ") and processes.get(pid)
          if found and found.state == "S" then
            return true
          end
        end
      end)
    end
    local seen = require("ciranda.run.stacks").look(workers, "r1", one.options.id)
    assert.equal(2, #seen)
    for place, said in ipairs(seen) do
      assert.is_nil(said.problem)
      assert.is_number(said.idle)
      assert.matches("process %d+: %S*python3 %S+hang%.py", said.text)
      assert.matches("thread %d+ python3[%d.]*: S %(sleeping%), wchan %S+, syscall %d+", said.text)
      assert.equal(place == 1, said.text:find("in the_place_where_it_hangs", 1, true) ~= nil)
    end
    one:stop(1, "the end of the test")
    local verdict = one:watch()
    assert.equal(2, #verdict.stopped)
    local after = require("ciranda.run.stacks").look(workers, "r1", one.options.id)
    assert.equal("nothing of the attempt is running", after[2].problem)
  end)

  it("waits for what a program has to say that is slow to look at its signals", function()
    local one = start(gang_of(1, 1, "trap 'echo the place' USR1; echo ready; while :; do sleep 2.5; done", {
      environment = { CIRANDA_STACK_SIGNAL = "USR1" },
    }))
    patience.wait_for("the program", function()
      return read(("%s/.ciranda/r1/%s/log"):format(machines["0.0"].home, one.options.id)) == "ready\n"
    end)
    -- One that is just being started is still the shell, and would get the signal.
    patience.wait_for("its sleep", function()
      for _, line in pairs(machines["0.0"]:processes()) do
        if line == "sleep 2.5 " then
          return true
        end
      end
    end)
    local seen = require("ciranda.run.stacks").look(workers, "r1", one.options.id)
    assert.matches("\npython: %d+\nthe place\n$", seen[1].text)
  end)

  describe("starts COMMAND once", function()
    -- "before": it was not sent; a number: the connection broke after so much of the answer; "after": the answer was
    -- lost. The next try finds what the first one did.
    for _, where in ipairs({ "before", 20, "after" }) do
      it(("when the connection is lost during the go: %s"):format(where), function()
        local one = gang_of(1, 2, "echo ran >> ../ran; echo line; sleep 0.5; echo last")
        local cuts = 0
        machines["0.1"].cut = function(command)
          if command:find(" run .ciranda", 1, true) and cuts < 3 then
            cuts = cuts + 1
            return where
          end
        end
        start(one)
        local verdict = one:watch()
        assert.equal(0, verdict.status)
        assert.equal(3, cuts)
        assert.equal("ran\n", read(machines["0.1"].home .. "/ran"))
        assert.equal("line\nlast\n", one.logs["0.1"])
      end)
    end

    it("when this machine has no network for a while, or the way to the workers is shut", function()
      local one =
        start(gang_of(1, 2, "echo ran >> ../ran; echo line; until [ -e ../../on ]; do sleep 0.1; done"))
      local machine = machines["0.1"]
      local scope <close> = task.scope()
      local watching = scope:spawn(one.watch, one)
      for _, code in ipairs({ "resolve", "unavailable", "rate_limit" }) do
        local connects = machine.connects
        machine.refuses = { code = code, op = "connect", message = "not now" }
        for connection in pairs(machine.connections) do
          connection:cut()
        end
        patience.wait_for("two tries", function()
          return machine.connects >= connects + 2
        end)
      end
      machine.refuses = nil
      io.open(root .. "/on", "w"):close()
      assert.equal(0, watching:wait().status)
      assert.equal("ran\n", read(machine.home .. "/ran"))
      assert.equal("line\n", one.logs["0.1"])
    end)

    it("when it ends with 255, which is its own status and no lost connection", function()
      local one = start(gang_of(1, 1, "echo ran >> ../ran; echo out; exit 255"))
      local verdict = one:watch()
      assert.same({ 255, "user" }, { verdict.status, verdict.kind })
      assert.equal("ran\n", read(machines["0.0"].home .. "/ran"))
      assert.equal("out\n", one.logs["0.0"])
    end)

    it("when ssh itself answers the go with 255", function()
      local one = gang_of(1, 1, "echo ran >> ../ran; sleep 0.3")
      one:stage()
      -- What a proxy or a forced command may answer in ssh's place: the guard's `run` is repeated, not COMMAND. It
      -- comes when COMMAND has done its work, for what could not be started is stopped.
      local shell = root .. "/shell"
      local file = assert(io.open(shell, "w"))
      file:write(
        (
          '#!/bin/sh\ncase "$2" in *" run .ciranda"*) if [ ! -e %s/once ]; then touch %s/once; /bin/bash "$@"; '
          .. 'until [ -s ran ]; do sleep 0.02; done; exit 255; fi;; esac\nexec /bin/bash "$@"\n'
        ):format(root, root)
      )
      file:close()
      uv.fs_chmod(shell, 448)
      machines["0.0"].shell = shell
      local ok, e = pcall(one.go, one)
      assert.is_string(read(root .. "/once"))
      if not ok then
        assert.matches("starting the command failed", e.message, 1, true)
      end
      patience.wait_for("the command", function()
        return read(machines["0.0"].home .. "/ran") == "ran\n"
      end)
      assert.equal("ran\n", read(machines["0.0"].home .. "/ran"))
    end)

    it("when the runner is gone between the go and its answer, and another takes it up", function()
      local one = gang_of(1, 2, "echo ran >> ../ran; echo line; sleep 0.5; echo last")
      one:stage()
      machines["0.1"].hang = function(command)
        return command:find(" run .ciranda", 1, true) ~= nil
      end
      assert.is_false((pcall(task.timeout, 1, one.go, one)))
      machines["0.1"].hang = nil
      local again = gang_of(1, 2, one.options.command, { id = one.options.id })
      again:rejoin(function()
        return 0
      end)
      assert.equal(0, again:watch().status)
      for address, machine in pairs(machines) do
        assert.equal("ran\n", read(machine.home .. "/ran"))
        assert.equal("line\nlast\n", again.logs[address])
      end
    end)
  end)
end)

describe("run.checkpoint", function()
  it("reads a piece of a log in time that grows with its length, also where no line is a step's", function()
    local checkpoint = require("ciranda.run.checkpoint")
    -- Were it quadratic this would take hours.
    local piece = (" 00 6b f8 5a d8 f9 f1 79\n"):rep(200000)
    assert.is_nil(checkpoint.step_time(piece))
    assert.equal(2.5, checkpoint.step_time(piece .. "completed step: 7, seconds: 2.5\n" .. piece))
  end)
end)

describe("run.logs", function()
  local root
  before_each(function()
    root = uv.fs_mkdtemp("/tmp/logs-XXXXXX")
  end)
  after_each(function()
    os.execute(("rm -rf '%s'"):format(root))
  end)

  it(
    "takes no more than its limit: a file is the log's beginning, the end is in memory, and it is said once",
    function()
      local list = { { slice = 0, index = 0 }, { slice = 0, index = 1 } }
      local full = 0
      local logs <close> = logs_of.open({
        directory = root,
        workers = list,
        limit = 50000,
        on_full = function()
          full = full + 1
        end,
      })
      local whole = {}
      for i = 1, 3000 do
        local line = ("line %d of a log\n"):format(i)
        whole[i] = line
        logs:take(list[1], line)
        logs:take(list[2], line)
      end
      whole = table.concat(whole)
      assert.equal(1, full)
      local total = 0
      for _, worker in ipairs(list) do
        local file = assert(io.open(logs:path(worker)))
        local text = file:read("a")
        file:close()
        total = total + #text
        assert.equal(#text, logs:size(worker))
        assert.equal(whole:sub(1, #text), text)
        assert.same({ "line 2999 of a log", "line 3000 of a log" }, logs:tail(worker, 2))
      end
      assert.is_true(total <= 50000 and total > 49000)
    end
  )

  --- Logs of 1,024 workers, each of which is about to fail in words of its own.
  local function alarmed(list)
    for slice = 0, 255 do
      for index = 0, 3 do
        list[#list + 1] = { slice = slice, index = index }
      end
    end
    local shown = {}
    local logs = logs_of.open({
      directory = root,
      workers = list,
      lines = function(text)
        shown[#shown + 1] = text
      end,
    })
    return logs, shown
  end

  local function fall(logs, list, from, to)
    for place = from, to do
      local worker = list[place]
      logs:take(
        worker,
        ("Traceback (most recent call last):\n  of worker %d\nError %d\n"):format(place, place)
      )
      logs:finish(worker)
    end
  end

  it("shows some lines of a thousand workers that fall at once, and counts the others", function()
    local list = {}
    local logs, shown = alarmed(list)
    fall(logs, list, 2, 1024)
    logs:show_rest()
    assert.equal(121, #shown)
    assert.equal(
      "slice0/worker[1-3],slice[1-255]/worker[0-3]: Traceback (most recent call last):\n",
      shown[1]
    )
    -- Of the first line one is left, of the two others all.
    assert.matches(("^%d lines more that look"):format(1 + 2 * 1023 - 120), shown[121])
    assert.matches("of slice0/worker[1-3],slice[1-255]/worker[0-3]\n", shown[121], 1, true)
    logs:close()
    assert.equal(121, #shown)
  end)

  it("shows nothing of who falls after the failure has been named", function()
    local list = {}
    local logs, shown = alarmed(list)
    fall(logs, list, 2, 3)
    logs:name_failure()
    fall(logs, list, 4, 1024)
    logs:close()
    assert.equal(5, #shown)
    assert.matches("^slice0/worker%[1%-2%]: Traceback", shown[1])
  end)

  it("keeps offsets where a worker has given up a part of its log", function()
    local list = { { slice = 0, index = 0 } }
    local logs <close> = logs_of.open({ directory = root, workers = list })
    logs:take(list[1], "abc")
    logs:skip(list[1], 10)
    logs:take(list[1], "xyz")
    assert.equal(13, logs:size(list[1]))
    local file = assert(io.open(logs:path(list[1])))
    assert.equal("abc\0\0\0\0\0\0\0xyz", file:read("a"))
    file:close()
  end)
end)
