local attempt = require("ciranda.run.attempt")
local bundle = require("ciranda.run.bundle")
local cause = require("ciranda.run.cause")
local errors = require("ciranda.io.error")
local fleet = require("ciranda.fleet")
local fs = require("ciranda.io.fs")
local gang = require("ciranda.run.gang")
local task = require("ciranda.task")
local uv = require("luv")

local machines_of = dofile("tests/fixtures/fleet/machines.lua")
local patience = dofile("tests/fixtures/patience.lua")

describe("run.gang", function()
  local root, slices, machines, workers, started

  local function make(slice_count, worker_count, options)
    options = options or {}
    local list, connect
    list, connect, machines =
      machines_of.make(slice_count, worker_count, { root = root, shell = options.shell })
    slices = list
    workers = fleet.new(slices, { connect = connect, retry_for = options.retry_for or 2 })
    return workers
  end

  local number = 0
  local function gang_of(command, options)
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
    for name, value in pairs(options or {}) do
      settings[name] = value
    end
    local logs, failures, notes = {}, {}, {}
    settings.on_bytes = function(worker, bytes)
      logs[worker.address] = (logs[worker.address] or "") .. bytes
    end
    settings.on_note = function(text)
      notes[#notes + 1] = text
    end
    settings.on_failure = function(outcome)
      failures[#failures + 1] = outcome
    end
    local made = gang.new(settings)
    made.logs, made.failures, made.notes = logs, failures, notes
    started[#started + 1] = made
    return made
  end

  local function read(path)
    local file = io.open(path, "rb")
    local text = file and file:read("a")
    if file then
      file:close()
    end
    return text
  end

  --- Waits until the command of every worker has made `up` beside its directory: its traps are set then.
  local function all_up()
    for address, machine in pairs(machines) do
      patience.wait_for("the command on " .. address, function()
        return uv.fs_stat(machine.home .. "/up")
      end)
    end
  end

  --- Waits until somebody follows a worker's log.
  local function followed(address)
    patience.wait_for("somebody who follows " .. address, function()
      for _, command in ipairs(machines[address].commands) do
        if command:find(" follow ", 1, true) then
          return true
        end
      end
    end)
  end

  local function first_line(one, address)
    patience.wait_for("the first line of " .. address, function()
      return one.logs[address]
    end)
  end

  --- Waits until the end of a member has been seen. A stop that is to be over early is asked for after it: how long
  --- the others take to end is their affair.
  local function ended(one, place)
    patience.wait_for(("the end of member %d"):format(place), function()
      return one.members[place].outcome
    end)
  end

  --- The log as the worker has it.
  local function remote_log(one, address)
    return read(("%s/.ciranda/r1/%s/log"):format(machines[address].home, one.options.id))
  end

  before_each(function()
    root = uv.fs_mkdtemp("/tmp/gang-XXXXXX")
    started = {}
  end)

  after_each(function()
    machines_of.end_all(machines, { workers })
    os.execute(("rm -rf '%s'"):format(root))
  end)

  it("runs one command on all, in ~/RUN, with its environment, by the login shell", function()
    make(2, 2)
    local one = gang_of(
      [[
      echo "$PWD $0 $CIRANDA_SLICE_ID/$CIRANDA_WORKER_ID of $CIRANDA_NUM_SLICES/$CIRANDA_NUM_WORKERS" \
        "as $CIRANDA_PROCESS_ID in $CIRANDA_RUN $CIRANDA_ATTEMPT $EXTRA"
      cat; [ -z "$TPU_WORKER_ID" ]; echo ${x[1]-array}]],
      {
        environment = { EXTRA = 'it\'s\n"odd" $HOME' },
      }
    )
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal(0, verdict.status)
    assert.is_nil(verdict.first)
    assert.equal(0, #one.failures)
    for place, address in ipairs({ "0.0", "0.1", "1.0", "1.1" }) do
      assert.equal(
        ('%s/r1 bash %s/%s of 2/4 as %d in r1 %s it\'s\n"odd" $HOME\narray\n'):format(
          machines[address].home,
          address:sub(1, 1),
          address:sub(3),
          place - 1,
          one.options.id
        ),
        one.logs[address]
      )
      assert.equal(remote_log(one, address), one.logs[address])
    end
  end)

  it("keeps standard output and error in the order written, byte for byte", function()
    make(1, 1)
    local one =
      gang_of([[for i in $(seq 500); do echo out $i; echo err $i >&2; done; printf '\000\377no newline']])
    one:stage()
    one:go()
    one:watch()
    local expected = {}
    for place = 1, 500 do
      expected[place] = ("out %d\nerr %d\n"):format(place, place)
    end
    assert.equal(table.concat(expected) .. "\0\255no newline", one.logs["0.0"])
  end)

  it("lays the bundle over what is there, and sends it once", function()
    make(1, 2)
    os.execute(("mkdir -p '%s/code' '%s/r1/venv'"):format(root, machines["0.0"].home))
    os.execute(
      ("echo kept > '%s/r1/venv/x'; echo old > '%s/r1/a.txt'"):format(
        machines["0.0"].home,
        machines["0.0"].home
      )
    )
    os.execute(("echo new > '%s/code/a.txt'"):format(root))
    local manifest = bundle.make(root .. "/code", { output = root .. "/b.tar.gz" })
    for round = 1, 2 do
      local one = gang_of("cat a.txt; cat venv/x 2>/dev/null || true", { bundle = manifest })
      one:stage()
      one:go()
      assert.equal(0, one:watch().status)
      assert.equal("new\nkept\n", one.logs["0.0"])
      assert.equal("new\n", one.logs["0.1"])
      local sent = 0
      for _, command in ipairs(machines["0.1"].commands) do
        sent = sent + (command:find("sha256sum", 1, true) and 1 or 0)
      end
      assert.equal(1, sent, "after round " .. round)
    end
  end)

  it("sends what it has made, though another run of that name has made its own meanwhile", function()
    make(1, 1)
    os.execute(("mkdir '%s/code'; echo mine > '%s/code/a.txt'"):format(root, root))
    local manifest = bundle.make(root .. "/code", { output = root .. "/b.tar.gz" })
    os.execute(("echo another > '%s/code/a.txt'"):format(root))
    bundle.make(root .. "/code", { output = root .. "/b.tar.gz" })
    local one = gang_of("cat a.txt", { bundle = manifest })
    one:stage()
    one:go()
    assert.equal(0, one:watch().status)
    assert.equal("mine\n", one.logs["0.0"])
  end)

  it("starts nobody with an archive that is no longer what was written", function()
    make(1, 1)
    os.execute(("mkdir '%s/code'; head -c 600000 /dev/urandom > '%s/code/blob'"):format(root, root))
    -- A busy machine: what takes the rest away is in no hurry.
    os.execute(("mkdir '%s/bin'"):format(root))
    fs.write(root .. "/bin/rm", '#!/bin/sh\nsleep 0.3\nexec /bin/rm "$@"\n', { mode = 448 })
    machines["0.0"].env.PATH = root .. "/bin:" .. os.getenv("PATH")
    local archive = root .. "/b.tar.gz"
    for change, words in pairs({
      ["printf changed | dd of='%s' bs=1 seek=9000 conv=notrunc 2>/dev/null"] = "is not the one that was sent",
      ["truncate -s 300000 '%s'"] = "cannot be read as it was written: it has become shorter",
    }) do
      local manifest = bundle.make(root .. "/code", { output = archive })
      os.execute(change:format(archive))
      local one = gang_of("true", { bundle = manifest })
      local ok, e = pcall(one.stage, one)
      assert.is_false(ok)
      assert.matches(words, e.message, 1, true)
      -- The worker's shell takes away what it has begun when the connection is gone, which it may see after us.
      local deadline = uv.hrtime() + 10e9
      local listing
      repeat
        task.sleep(0.05)
        local kept = io.popen(("cd '%s/.ciranda' && ls bundles r1"):format(machines["0.0"].home))
        listing = kept:read("a")
        kept:close()
      until not listing:find("part", 1, true) or uv.hrtime() > deadline
      assert.is_nil(listing:find("tar", 1, true))
      assert.is_nil(listing:find("part", 1, true))
    end
  end)

  it(
    "leaves nothing of a guard whose transfer a shutdown has cut off, and nobody takes it for one",
    function()
      make(1, 1)
      local whole = attempt.guard()
      local half, wait = whole.bytes:sub(1, #whole.bytes // 2), task.event()
      local one = gang_of("true", {
        guard = {
          sha256 = whole.sha256,
          size = whole.size,
          bytes = function()
            local piece = half
            half = nil
            if not piece then
              wait:wait()
            end
            return piece
          end,
        },
      })
      local function there()
        local names = {}
        for place, entry in ipairs(fs.list(machines["0.0"].home .. "/.ciranda/bin")) do
          names[place] = entry.name
        end
        return table.concat(names, " ")
      end
      local scope <close> = task.scope()
      local staging = scope:spawn(pcall, one.stage, one)
      patience.wait_for("a part of the guard", function()
        return one.members[1].attempt.phase == "sending the guard" and there() ~= ""
      end)
      assert.is_nil(there():find("guard-", 1, true), there())
      staging:cancel("its machine shuts down") -- TERM to every process of the session
      pcall(staging.wait, staging)
      patience.wait_for(there, function()
        return there() == ""
      end)
    end
  )

  it("uses a directory that is there, and names the worker where it is missing", function()
    make(1, 2)
    os.execute(("mkdir '%s/r1'; echo x > '%s/r1/old'"):format(machines["0.0"].home, machines["0.0"].home))
    local ok, e = pcall(function()
      gang_of("true", { use_existing = true }):stage()
    end)
    assert.is_false(ok)
    assert.matches("slice0/worker1 could not be staged", e.message, 1, true)
    assert.matches("there is no directory ~/r1", e.message, 1, true)
    assert.matches("Nothing was started on any worker", e.message, 1, true)
  end)

  it("gives the first failure's own status, and stops the others in order", function()
    make(2, 2)
    local command = ([[
      trap 'echo got TERM; exit 0' TERM
      if [ $CIRANDA_PROCESS_ID = 2 ]; then
        until [ -e %s/up.0 ] && [ -e %s/up.1 ] && [ -e %s/up.3 ]; do sleep 0.02; done
        exit 7
      fi
      sleep 300 & : > %s/up.$CIRANDA_PROCESS_ID; wait
    ]]):format(root, root, root, root)
    local one = gang_of(command, { failure_grace = 60 })
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal(7, verdict.status)
    assert.equal("1.0", verdict.first.worker.address)
    assert.equal(3, #verdict.stopped)
    assert.equal(1, #one.failures)
    assert.equal("1.0", one.failures[1].worker.address)
    assert.matches("got TERM", one.logs["0.0"], 1, true)
  end)

  it("names SIGKILL and gives 137, whoever it was", function()
    make(1, 3)
    local one = gang_of([[if [ $CIRANDA_WORKER_ID = 1 ]; then kill -9 $$; fi; exec sleep 30]])
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal(137, verdict.status)
    assert.equal("user", verdict.kind)
    assert.equal(
      "Main command failed on slice 0 worker 1 with error code 137 (SIGKILL), see logs for details",
      cause.failure_line(one.failures[1])
    )
  end)

  it("kills what ignores TERM when the failure grace is over, and leaves nothing alive", function()
    make(1, 2)
    local one = gang_of(([[
      trap '' TERM
      if [ $CIRANDA_WORKER_ID = 0 ]; then until [ -e %s/up ]; do sleep 0.02; done; exit 3; fi
      : > %s/up; sleep 60; sleep 60
    ]]):format(root, root))
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal(3, verdict.status)
    assert.is_true(verdict.stopped[1].killed)
    assert.matches(" stop [^\n]* %-%-grace 1%.000 ", table.concat(machines["0.1"].commands, "\n"))
    for _, machine in pairs(machines) do
      for _, line in pairs(machine:processes()) do
        assert.is_nil(line:find("sleep 60", 1, true))
      end
    end
  end)

  it("names the cause and not the peer that aborted first", function()
    make(1, 3)
    -- Worker 1 is winding up when worker 0 has seen its socket close: it has ended, as far as its peers can see.
    local command = ([[
      case $CIRANDA_WORKER_ID in
      0) echo 'Socket closed'; kill -ABRT $$;;
      1) until [ -e %s/seen ]; do sleep 0.05; done; sleep 0.5; exit 5;;
      2) sleep 300;;
      esac
    ]]):format(root)
    local one = gang_of(command, { victims_window = 60 })
    one.options.on_outcome = function(outcome)
      if outcome.worker.address == "0.0" then
        io.open(root .. "/seen", "w"):close()
      end
    end
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal("0.1", verdict.first.worker.address)
    assert.same({ 5, 1, 1 }, { verdict.status, #verdict.consequences, #verdict.stopped })
    assert.equal("0.1", one.failures[1].worker.address)
    assert.equal("0.2", verdict.stopped[1].worker.address)
  end)

  it("stops the others also when nobody but victims is seen", function()
    make(1, 2)
    local command = "if [ $CIRANDA_WORKER_ID = 0 ]; then echo 'Socket closed'; exit 1; fi; sleep 300"
    local one = gang_of(command, { victims_window = 1 })
    one:stage()
    one:go()
    local verdict = one:watch()
    assert.equal("0.0", verdict.first.worker.address)
    assert.equal("0.1", verdict.stopped[1].worker.address)
  end)

  it("knows when a machine died that is up again long after its peers have seen the socket close", function()
    make(1, 2)
    local one = gang_of(([[
      if [ $CIRANDA_WORKER_ID = 0 ]; then until [ -e %s/gone ]; do sleep 0.05; done; echo 'Socket closed'; exit 1; fi
      echo up; sleep 300
    ]]):format(root))
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        first_line(one, "0.1")
        machines["0.1"].down = true
        machines["0.1"]:reboot()
        io.open(root .. "/gone", "w"):close()
        patience.wait_for("its peer's end", function()
          return one.members[1].outcome
        end)
        -- The peer's end was long before the machine came up again.
        one.members[1].outcome.at = one.members[1].outcome.at - 40
        one.members[2].attempt.alive = one.members[2].attempt.alive - 41
        machines["0.1"].down = false
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal("0.1", verdict.first.worker.address)
    assert.matches("restarted", verdict.first.lost)
    assert.equal("infra", verdict.kind)
  end)

  it("orders failures by the clocks as they are in the end, not as they were in the beginning", function()
    make(1, 2)
    local wrong = machines["0.1"].home .. "/wrong"
    assert(uv.fs_mkdir(wrong, 448))
    machines["0.1"].env.PATH = wrong .. ":" .. os.getenv("PATH")
    local one = gang_of(([[
      [ $CIRANDA_WORKER_ID = 0 ] || until [ -e %s/first ]; do sleep 0.05; done
      exit $((CIRANDA_WORKER_ID + 3))
    ]]):format(root))
    one.options.on_outcome = function(outcome)
      if outcome.worker.address == "0.0" then
        io.open(root .. "/first", "w"):close()
      end
    end
    one:stage()
    one:go()
    local file = assert(io.open(wrong .. "/date", "w"))
    file:write('#!/bin/sh\nexec /bin/date -d "300 seconds" "$@"\n')
    file:close()
    uv.fs_chmod(wrong .. "/date", 493)
    -- Nobody is stopped before both have failed.
    one.stopping =
      { failure = true, asked = true, grace = 0, at = math.huge, wall = math.huge, told = task.event() }
    local verdict = one:watch()
    assert.equal("0.1", verdict.first.worker.address)
    assert.equal(4, verdict.status)
  end)

  it("tells each reason for which workers cannot be staged, once", function()
    make(2, 2)
    for _, address in ipairs({ "0.1", "1.1" }) do
      machines[address].refuses =
        { code = "auth", message = "slice " .. address:gsub("%.", " worker ") .. " lets no key in" }
    end
    machines["1.0"].refuses = { code = "hostkey", message = "the host key has changed" }
    local one = gang_of("true")
    local ok, e = pcall(one.stage, one)
    assert.is_false(ok)
    assert.matches(
      "slice[0-1]/worker1 could not be staged (2 workers; the first one's reason): ",
      e.message,
      1,
      true
    )
    assert.matches("lets no key in\nslice1/worker0 could not be staged: ", e.message, 1, true)
    assert.matches("the host key has changed\nNothing was started on any worker.", e.message, 1, true)
  end)

  it("repeats the beginning of what a step says that fails, not thousands of lines", function()
    make(1, 1)
    local tools = machines["0.0"].home .. "/tools"
    assert(uv.fs_mkdir(tools, 448))
    local file = assert(io.open(tools .. "/tar", "w"))
    file:write(
      '#!/bin/sh\nfor n in $(seq 2000); do echo "tar: f$n: Cannot write: Disk quota exceeded" >&2; done; exit 2\n'
    )
    file:close()
    uv.fs_chmod(tools .. "/tar", 493)
    machines["0.0"].env.PATH = tools .. ":" .. os.getenv("PATH")
    local one = gang_of("true")
    local ok, e = pcall(one.stage, one)
    assert.is_false(ok)
    assert.equal("no_space", e.code)
    assert.matches("f1: Cannot write: Disk quota exceeded\n.*\n%(and 1995 lines more%)", e.message)
    assert.is_true(#e.message < 1000)
  end)

  it("starts nobody when one cannot be staged, and says who and why", function()
    make(2, 2)
    machines["1.1"].refuses = { code = "auth", message = "no key was accepted" }
    local one = gang_of("echo ran >> ../ran")
    local ok, e = pcall(one.stage, one)
    assert.is_false(ok)
    assert.equal("auth", e.code)
    assert.matches("slice1/worker1 could not be staged", e.message, 1, true)
    assert.matches("no key was accepted", e.message, 1, true)
    for address in pairs(machines) do
      assert.is_nil(read(machines[address].home .. "/ran"))
      assert.is_nil(uv.fs_stat(("%s/.ciranda/r1/%s/started"):format(machines[address].home, one.options.id)))
    end
  end)

  it("tells a wrong key once, after trying one worker", function()
    make(4, 4)
    for _, machine in pairs(machines) do
      machine.refuses = { code = "auth", message = "no key was accepted" }
    end
    local one = gang_of("true")
    local ok, e = pcall(one.stage, one)
    assert.is_false(ok)
    assert.equal("auth", e.code)
    local connects = 0
    for _, machine in pairs(machines) do
      connects = connects + machine.connects
    end
    assert.equal(1, connects)
  end)

  it("names the laggard and what it was doing when the deadline is over", function()
    make(1, 3)
    machines["0.2"].hang = function(command)
      return command:find("tar -xf", 1, true) ~= nil
    end
    local e, wanted = patience.within_more(1, function(seconds)
      local one = gang_of("true", { stage_timeout = seconds })
      local ok, e = pcall(one.stage, one)
      assert.is_false(ok)
      local wanted = ("slice 0 worker 2 (0.2) was not ready within %d s; it was making the attempt"):format(
        seconds
      )
      return e.message:find(wanted, 1, true) ~= nil, e, wanted
    end)
    assert.equal("deadline", e.code)
    assert.matches(wanted, e.message, 1, true)
  end)

  it("tells its own deadline from a time limit of the step", function()
    make(1, 1)
    local one = gang_of("true")
    -- A timer may come a part of a millisecond before its time, where the loop has turned for something else meanwhile.
    local scope <close> = task.scope()
    local other = scope:spawn(function()
      while true do
        task.sleep(0.007)
      end
    end)
    local codes = {}
    for _ = 1, 60 do
      local failures = one:everyone(0.02, function()
        task.event():wait()
      end)
      codes[failures[1].problem.code] = true
    end
    other:cancel("enough")
    assert.same({ deadline = true }, codes)
    local failures = one:everyone(60, function()
      task.timeout(0.01, task.sleep, 60)
    end)
    assert.equal("timeout", failures[1].problem.code)
  end)

  it("waits for a worker that boots", function()
    make(1, 2, { retry_for = 10 })
    machines["0.1"].down = true
    local one = gang_of("echo up")
    task.all({
      function()
        patience.wait_for("an attempt to connect", function()
          return machines["0.1"].connects > 0
        end)
        machines["0.1"].down = false
      end,
      function()
        one:stage()
      end,
    })
    one:go()
    assert.equal(0, one:watch().status)
  end)

  -- The connection is cut before or after each command of staging and starting, on one worker: the work is done, once.
  for _, where in ipairs({ "before", "after" }) do
    for _, step in ipairs({ "run .ciranda", "follow .ciranda", "status .ciranda" }) do
      it(("runs the command once when the connection is cut %s '%s'"):format(where, step), function()
        make(1, 2)
        local cuts = 0
        machines["0.1"].cut = function(command)
          if command:find(step, 1, true) and cuts < 2 then
            cuts = cuts + 1
            return where
          end
        end
        local one = gang_of("echo ran >> ../ran; echo line; sleep 0.3; echo last")
        one:stage()
        one:go()
        local verdict = one:watch()
        assert.equal(0, verdict.status)
        assert.is_true(cuts >= 1)
        assert.equal("ran\n", read(machines["0.1"].home .. "/ran"))
        assert.equal("line\nlast\n", one.logs["0.1"])
      end)
    end
  end

  it("loses and doubles no byte of a log through connections cut at drawn places", function()
    make(1, 2)
    local seed, cuts = 99, 0
    local function random(limit)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return seed // 65536 % limit + 1
    end
    for _, machine in pairs(machines) do
      machine.cut = function(command)
        if command:find("follow", 1, true) and cuts < 25 then
          cuts = cuts + 1
          return random(9000)
        end
      end
    end
    local one = gang_of([[for i in $(seq 4000); do echo "line $i of $CIRANDA_WORKER_ID"; done]])
    one:stage()
    one:go()
    assert.equal(0, one:watch().status)
    assert.is_true(cuts >= 20)
    for address in pairs(machines) do
      assert.equal(remote_log(one, address), one.logs[address])
    end
  end)

  for _, where in ipairs({ "before", "after" }) do
    for step, pattern in ipairs({ "ciranda%-probe", "cat > .*guard", "tar %-xf" }) do
      it(("stages through a connection cut %s step %d"):format(where, step), function()
        make(1, 1)
        os.execute(("mkdir '%s/code'; head -c 300000 /dev/urandom > '%s/code/blob'"):format(root, root))
        local manifest = bundle.make(root .. "/code", { output = root .. "/b.tar.gz" })
        local cuts = 0
        machines["0.0"].cut = function(command)
          if command:find(pattern) and cuts < 2 then
            cuts = cuts + 1
            return where
          end
        end
        local one = gang_of("cat blob | wc -c", { bundle = manifest })
        one:stage()
        one:go()
        assert.equal(0, one:watch().status)
        assert.is_true(cuts >= 1)
        assert.equal("300000\n", one.logs["0.0"])
        local kept = io.popen(("cd '%s/.ciranda' && ls bundles bin"):format(machines["0.0"].home))
        local listing = kept:read("a")
        kept:close()
        assert.is_nil(listing:find("part", 1, true))
      end)
    end
  end

  it(
    "ends an earlier attempt that still runs before it starts, and leaves one that has ended alone",
    function()
      make(1, 1)
      local first = gang_of("trap 'echo ended; exit 0' TERM; sleep 60 & : > ../up; wait")
      first:stage()
      first:go()
      all_up()
      local second = gang_of("echo second")
      second:stage()
      local record = read(("%s/.ciranda/r1/%s/exit"):format(machines["0.0"].home, first.options.id))
      assert.matches('"stopped":true', record, 1, true)
      assert.matches("another attempt takes its place", record, 1, true)
      second:go()
      assert.equal(0, second:watch().status)
      assert.equal("ended\n", remote_log(first, "0.0"))
      local stops = 0
      local third = gang_of("echo third")
      third:stage()
      for _, command in ipairs(machines["0.0"].commands) do
        stops = stops + (command:find(" stop ", 1, true) and 1 or 0)
      end
      assert.equal(1, stops)
    end
  )

  it("asks once, and only once, about an attempt whose machine was restarted", function()
    make(1, 1)
    local first = gang_of("sleep 60")
    first:stage()
    first:go()
    machines["0.0"]:reboot()
    for _ = 1, 2 do
      gang_of("true"):stage()
    end
    local stops = 0
    for _, command in ipairs(machines["0.0"].commands) do
      stops = stops + (command:find(" stop ", 1, true) and 1 or 0)
    end
    assert.equal(1, stops)
  end)

  it("counts a worker that is restarted under the command as lost, kind infra, and never as 0", function()
    make(1, 2)
    local one = gang_of("sleep 30")
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        followed("0.1")
        machines["0.1"]:reboot()
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal(1, verdict.status)
    assert.equal("infra", verdict.kind)
    assert.equal("0.1", verdict.first.worker.address)
    assert.matches("restarted", verdict.first.lost)
  end)

  it("counts a worker that no longer answers as lost, after the time it was told", function()
    make(1, 2)
    local one = gang_of("sleep 30", { lost_after = 1 })
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        followed("0.0")
        machines["0.0"].down = true
        machines["0.0"]:break_all()
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal("infra", verdict.kind)
    assert.equal("0.0", verdict.first.worker.address)
    assert.matches("has not answered", verdict.first.lost)
  end)

  -- A gang of which a worker's two guarding processes have just been killed; its command ends when `over` is there.
  local function without_guards()
    make(1, 2)
    local one =
      gang_of("touch ../up; until [ -e ../over ]; do sleep 0.1; done; echo end; exit 7", { lost_after = 1 })
    one:stage()
    one:go()
    all_up()
    local status = one.members[1].attempt:status()
    for _, pid in ipairs({ status.outer, status.guard }) do
      uv.kill(math.tointeger(pid), "sigstop")
    end
    for _, pid in ipairs({ status.outer, status.guard }) do
      uv.kill(math.tointeger(pid), "sigkill")
    end
    return one
  end

  local function adopting(command)
    return command:find(" adopt ", 1, true) ~= nil
  end

  it("puts a new guard in the place of one that was killed, over what still runs", function()
    local one = without_guards()
    local sent
    machines["0.0"].cut = function(command)
      sent = sent or adopting(command)
    end
    local verdict
    task.all({
      function()
        patience.wait_for("the new guard", function()
          return sent and one.members[1].attempt:status().state == "running"
        end)
        for _, machine in pairs(machines) do
          io.open(machine.home .. "/over", "w"):close()
        end
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal("end\n", one.logs["0.0"])
    -- It is no parent of what it found: how that has ended it knows where the kernel tells it.
    assert.is_true(
      verdict.first.code == 7 or verdict.first.lost == "its status is unknown: its guard was killed"
    )
  end)

  it("counts a worker as lost that goes away before its killed guard has been replaced", function()
    local one = without_guards()
    machines["0.0"].cut = function(command)
      if adopting(command) then
        machines["0.0"].down = true
        return "before"
      end
    end
    local verdict = one:watch()
    assert.equal("infra", verdict.kind)
    assert.equal("0.0", verdict.first.worker.address)
    assert.matches("has not answered", verdict.first.lost)
  end)

  it("says who could not be told to stop when not everybody could be started", function()
    make(1, 2)
    local gone, one = machines["0.1"], nil
    gone.cut = function(command)
      gone.down = gone.down or command:find(" run .ciranda", 1, true) ~= nil
      return gone.down and "before" or nil
    end
    local e = patience.within_more(1, function(seconds)
      gone.down = false
      one = gang_of("sleep 30", { lost_after = 0.5, go_timeout = seconds })
      one:stage()
      local ok, e = pcall(one.go, one)
      assert.is_false(ok)
      return e.message:find("slice0/worker1 could not be started", 1, true) ~= nil, e
    end)
    assert.matches("slice0/worker1 could not be started", e.message, 1, true)
    assert.matches(
      "The others were stopped; slice0/worker1 could not be told to stop, and",
      e.message,
      1,
      true
    )
    assert.is_true(one.members[1].told)
  end)

  it("says who does not answer, and who answers again", function()
    make(1, 3)
    local one = gang_of("until [ -e ../over ]; do sleep 0.05; done", { silence = 0.5 })
    local said = one.notes
    one:stage()
    one:go()
    task.all({
      function()
        followed("0.1")
        machines["0.1"].down = true
        machines["0.1"]:break_all()
        patience.wait_for("a word on it", function()
          return said[1]
        end)
        machines["0.1"].down = false
        patience.wait_for("another word on it", function()
          return said[2]
        end)
        for _, machine in pairs(machines) do
          io.open(machine.home .. "/over", "w"):close()
        end
      end,
      function()
        assert.equal(0, one:watch().status)
      end,
    })
    assert.matches("^slice0/worker1: no answer for %d+ s, lost after 60 s$", said[1])
    assert.equal("slice0/worker1: answers again", said[2])
    assert.equal(2, #said)
  end)

  it("does not say of a machine that it did not end when it could not be told to", function()
    make(1, 2)
    local one = gang_of("echo up; sleep 300", { after_grace = 1 })
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        first_line(one, "0.1")
        machines["0.1"].down = true
        machines["0.1"]:break_all()
        one:stop(60, "the user")
        ended(one, 1)
        one:stop(0.1, "the user")
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal("0.1", verdict.first.worker.address)
    assert.matches("it could not be told to stop, and has not answered for %d+ s", verdict.first.lost)
  end)

  it("asks again where the guard was killed under a stop, and says why another could not be asked", function()
    make(1, 2)
    local one = gang_of("echo up; sleep 300", { after_grace = 0.5 })
    local asked = 0
    local function refuse(member, words)
      local ask_guard = member.attempt.ask_guard
      member.attempt.ask_guard = function(self, line, options, ...)
        asked = asked + (line:find("^stop ") and 1 or 0)
        local answer = line:find("^stop ") and words(asked)
        if answer then
          options.on_stderr("ciranda-guard: " .. answer)
          return { code = 1, stdout = "{}\n", stderr = "" }
        end
        return ask_guard(self, line, options, ...)
      end
    end
    refuse(one.members[1], function(count)
      return count < 3 and "r1 has lost its guard: ask again; the line above says what is known\n"
    end)
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        first_line(one, "0.0")
        first_line(one, "0.1")
        refuse(one.members[2], function()
          asked = asked - 1
          return "r1 has a guard of another build; the line above says what is known\n"
        end)
        one:stop(60, "the user")
        ended(one, 1)
        one:stop(0.1, "the user")
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal(3, asked)
    assert.equal(143, one.members[1].outcome.code)
    assert.equal("0.1", verdict.first.worker.address)
    assert.matches("^it could not be told to stop: .*has a guard of another build", verdict.first.lost)
  end)

  it("waits for the logs of those who have ended after a stop as long as they come", function()
    make(1, 2)
    local one = gang_of("echo up; sleep 300", { after_grace = 2 })
    local take, late = one.options.on_bytes, task.event()
    one.options.on_bytes = function(worker, bytes)
      take(worker, bytes)
      -- The end of the first one's log comes piece by piece when it would have been given up; of the second, nothing.
      repeat
        task.sleep(0.05)
        one.members[1].attempt:hear()
      until worker.address == "0.0" and late:is_set()
    end
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        first_line(one, "0.0")
        first_line(one, "0.1")
        one:stop(60, "the user")
        patience.wait_for("what both guards say of the end", function()
          return one.members[1].record and one.members[2].record
        end)
        one:stop(0.2, "the user")
        ended(one, 2)
        task.sleep(0.2)
        assert.is_nil(one.members[1].outcome)
        late:set()
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.is_nil(verdict.first)
    assert.equal(2, #verdict.stopped)
    for place, address in ipairs({ "0.0", "0.1" }) do
      local outcome = one.members[place].outcome
      assert.equal(143, outcome.code)
      assert.equal("up\n", outcome.tail)
      assert.equal(remote_log(one, address), one.logs[address])
    end
    assert.matches(
      "^The log of slice 0 worker 1 is not all here: nothing of it has come for %d+ s$",
      one.notes[1]
    )
    assert.equal(1, #one.notes)
  end)

  it("does not count as silence that it did not run itself", function()
    make(1, 2)
    local flag = root .. "/end"
    local one =
      gang_of(("while [ ! -e %s ]; do sleep 0.05; done; echo over"):format(flag), { lost_after = 3 })
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        followed("0.0")
        machines["0.0"].down = true
        machines["0.0"]:break_all()
        local commands = #machines["0.0"].commands
        uv.sleep(4000)
        machines["0.0"].down = false
        patience.wait_for("being followed again, or given up", function()
          return #machines["0.0"].commands > commands or one.members[1].outcome
        end)
        io.open(flag, "w"):close()
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal(0, verdict.status)
    assert.equal("over\n", one.logs["0.0"])
  end)

  it("stops all on request: TERM at once, and says that they were stopped", function()
    make(1, 2)
    local one = gang_of("trap 'echo saving; exit 0' TERM; sleep 300 & : > ../up; wait", {})
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        all_up()
        one:stop(60, "the user asked")
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.equal(0, verdict.status)
    assert.equal(2, #verdict.stopped)
    assert.equal("saving\n", one.logs["0.1"])
  end)

  it("takes for stopped also who ended after the request but before its own signal", function()
    make(1, 2)
    -- Worker 0 is told late; worker 1's end makes it leave with 1 at once, as frameworks do that agree on a last step.
    local flag = root .. "/stop"
    local one = gang_of(
      ("trap 'touch %s; exit 1' TERM; : > ../up; while [ ! -e %s ]; do sleep 0.02; done; exit 1"):format(
        flag,
        flag
      )
    )
    machines["0.0"].cut = function(command)
      if command:find(" stop ", 1, true) and not machines["0.0"].was_cut then
        machines["0.0"].was_cut = true
        return "before"
      end
    end
    one:stage()
    one:go()
    local verdict
    task.all({
      function()
        all_up()
        one:stop(60, "the user asked")
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.is_nil(verdict.first)
    assert.equal(0, verdict.status)
    assert.equal(2, #verdict.stopped)
    assert.equal(0, #one.failures)
  end)

  it("takes for stopped who ended after the request by a clock that is known to be wrong", function()
    make(1, 2)
    local one = gang_of("trap 'exit 1' TERM; : > ../up; while [ ! -e ../leave ]; do sleep 0.02; done; exit 1")
    machines["0.0"].hang = function(command)
      return command:find(" stop ", 1, true) ~= nil
    end
    one:stage()
    one:go()
    -- As when the question that told the clock was under way for a minute.
    one.members[1].attempt.clock_offset, one.members[1].attempt.clock_error = 29, 30
    local verdict
    task.all({
      function()
        all_up()
        one:stop(60, "the user asked")
        patience.wait_for("the stop", function()
          return one.members[2].outcome
        end)
        io.open(machines["0.0"].home .. "/leave", "w"):close()
      end,
      function()
        verdict = one:watch()
      end,
    })
    assert.same({ 0, 2 }, { verdict.status, #verdict.stopped })
    assert.equal(0, #one.failures)
  end)

  it("signals what runs, by fleet:signal: TERM is a stop, others are delivered and confirmed", function()
    make(1, 2)
    -- It waits without another process: one that is just being started is a shell too, gets the signal and dies of it,
    -- which its parent says in the log.
    local one = gang_of([[
      trap 'echo usr1' USR1; trap 'echo term; exit 0' TERM
      mkfifo ../never; exec 8<> ../never; : > ../up
      while true; do read -r -t 0.1 -u 8; done
    ]])
    one:stage()
    one:go()
    all_up()
    local path = ".ciranda/r1/" .. one.options.id
    local results = workers:signal("USR1"):check()
    assert.is_table(results[1].attempts[path])
    assert.is_table(results[2].attempts[path])
    assert.same({}, workers:signal("USR1", { run = "other" }):check()[1].attempts)
    for address in pairs(machines) do
      patience.wait_for("usr1 on " .. address, function()
        return remote_log(one, address) == "usr1\n"
      end)
    end
    results = workers:signal("SIGTERM", { grace = 60, run = "r1" }):check()
    assert.is_true(results[1].attempts[path].stopped)
    local verdict = one:watch()
    assert.equal(2, #verdict.stopped)
    assert.equal("usr1\nterm\n", one.logs["0.1"])
    assert.same({}, workers:signal("TERM"):check()[1].attempts)
    assert.has_error(function()
      workers:signal("NONSENSE")
    end)
  end)

  it("shortens the grace when asked again", function()
    make(1, 1)
    local one = gang_of("trap '' TERM; : > ../up; while true; do sleep 0.1; done")
    one:stage()
    one:go()
    local began = uv.hrtime()
    task.all({
      function()
        all_up()
        assert.equal(300, one:until_kill(300))
        one:stop(300, "the user asked")
        local left = one:until_kill(600)
        assert.is_true(left > 200 and left <= 300 and left * 10 % 1 == 0, left)
        assert.equal(0.5, one:until_kill(0.5))
        task.sleep(0.3)
        one:stop(0.5, "the user asked again")
      end,
      function()
        one:watch()
      end,
    })
    assert.is_true((uv.hrtime() - began) / 1e9 < 100)
  end)

  it("refuses two workers that share a home directory", function()
    make(1, 2)
    machines["0.1"].home, machines["0.1"].env = machines["0.0"].home, machines["0.0"].env
    local ok, e = pcall(function()
      gang_of("true"):stage()
    end)
    assert.is_false(ok)
    assert.matches("every worker needs its own", e.message, 1, true)
  end)

  it("does not care what the shell's start-up file prints", function()
    make(1, 1)
    machines["0.0"].env.BASH_ENV = root .. "/noise"
    os.execute(("echo 'echo welcome; echo now=1' > '%s/noise'"):format(root))
    local one = gang_of("echo hi")
    one:stage()
    one:go()
    assert.equal(0, one:watch().status)
    assert.is_true(math.abs(one.members[1].attempt.clock_offset) < 5)
  end)

  it("knows the exit codes from cancellation: a cancelled watch leaves the work alone", function()
    make(1, 1)
    local one = gang_of("while [ ! -e ../go ]; do sleep 0.02; done; echo done > ../done")
    one:stage()
    one:go()
    local ok, e = pcall(task.timeout, 0.3, one.watch, one)
    assert.is_false(ok)
    assert.is_true(errors.is(e, "timeout"))
    io.open(machines["0.0"].home .. "/go", "w"):close()
    patience.wait_for("the end of the command", function()
      return read(machines["0.0"].home .. "/done") == "done\n"
    end)
  end)
end)
