-- A directory from worker to worker. The machines run real commands; their internal addresses are 127.88.0.x.
local fleets = require("ciranda.fleet")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local relay = require("ciranda.fleet.relay")
local relay_script = require("ciranda.fleet.relay_script")
local task = require("ciranda.task")
local uv = require("luv")

local machines_of = dofile("tests/fixtures/fleet/machines.lua")
local patience = dofile("tests/fixtures/patience.lua")

describe("fleet:push via workers", function()
  local root, source, machines, fleet, notes, saved

  local function make(slices, workers)
    local list, connect
    list, connect, machines = machines_of.make(slices, workers, { root = root })
    local number = 0
    for _, slice in ipairs(list) do
      for _, worker in ipairs(slice.workers) do
        number = number + 1
        worker.internal_address = "127.88.0." .. number
        machines[worker.address].number = number
      end
    end
    fleet = fleets.new(list, { connect = connect, retry_for = 1 })
  end

  before_each(function()
    root = fs.tempdir("ciranda-relay-spec")
    source = root .. "/source"
    fs.mkdir_p(source .. "/sub")
    fs.write(source .. "/sub/big", require("ciranda.io.crypto").random(700000))
    fs.write(source .. "/run.sh", "echo run\n", { mode = 493 })
    fs.symlink("sub/big", source .. "/link")
    uv.fs_utime(source .. "/run.sh", 1e9, 1e9)
    notes = {}
    saved = { relay = {}, script = {} }
    for name, value in pairs({ START = 600, CONNECT = 60, STALL = 60 }) do -- the machine may be busy
      saved.relay[name], relay[name] = relay[name], value
    end
    saved.script.SCRIPT, saved.script.START = relay_script.SCRIPT, relay_script.START
    relay_script.START = saved.script.START:gsub("/usr/bin/python3", "/nowhere/python3")
  end)

  after_each(function()
    for module, fields in pairs({ [relay] = saved.relay, [relay_script] = saved.script }) do
      for name, value in pairs(fields) do
        module[name] = value
      end
    end
    machines_of.end_all(machines, { fleet })
    fs.remove_tree(root)
  end)

  local function push(options)
    options = options or {}
    options.via = options.via or "workers"
    options.on_note = function(text)
      table.insert(notes, text)
    end
    return fleet:push(source, "code", options)
  end

  --- Pushes in the background: how many workers it is over for, their results by address, all results at its end.
  ---@param scope ciranda.Scope
  ---@param options table?
  ---@return { ended: integer, of: table<string, table>, results: table?, task: ciranda.Task }
  local function push_in(scope, options)
    local going = { ended = 0, of = {} }
    options = options or {}
    function options.on_result(result)
      going.ended = going.ended + 1
      going.of[result.worker.address] = result
    end
    going.task = scope:spawn(function()
      going.results = push(options)
    end)
    return going
  end

  --- Waits for what has to come about.
  local function wait_for(what, condition)
    local deadline = uv.hrtime() / 1e9 + 300
    while not condition() do
      assert(uv.hrtime() / 1e9 < deadline, what .. " never came about")
      task.sleep(0.02)
    end
  end

  --- The programs of a relay that run on a machine.
  local function programs(machine)
    local list = {}
    for pid, line in pairs(machine:processes()) do
      if line:find("python3 -ISc", 1, true) and not line:find("^%S*sh ") then
        list[#list + 1] = pid
      end
    end
    return list
  end

  --- Everything arrived as it is here, and nothing else is left.
  local function check(results)
    results:check()
    for _, machine in pairs(machines) do
      local answer = process.run({ "diff", "-r", source, machine.home .. "/code" })
      assert.equal("", answer.stdout .. answer.stderr)
      assert.equal(493, fs.stat(machine.home .. "/code/run.sh").mode)
      assert.equal(1e9, fs.stat(machine.home .. "/code/run.sh").mtime)
      assert.equal("sub/big", fs.readlink(machine.home .. "/code/link"))
      for _, entry in ipairs(fs.list(machine.home)) do
        assert.is_nil(entry.name:find("push", 1, true), entry.name)
      end
      wait_for("the end of the programs", function()
        return #programs(machine) == 0
      end)
    end
  end

  --- Workers that have it from others.
  local function fetched(results)
    local count = 0
    for _, result in ipairs(results) do
      count = count + (result.from and 1 or 0)
    end
    return count
  end

  --- Another python3 for a machine: a script that may run the real one, $real.
  local function python(machine, script)
    fs.mkdir_p(machine.home .. "/bin")
    fs.write(machine.home .. "/bin/python3", "#!/bin/sh\nreal=/usr/bin/python3\n" .. script, { mode = 493 })
    machine.env.PATH = machine.home .. "/bin:" .. os.getenv("PATH")
  end

  --- Some of the text of the programs replaced.
  local function alter(from, to)
    local first, last = relay_script.SCRIPT:find(from, 1, true)
    assert(first, from)
    relay_script.SCRIPT = relay_script.SCRIPT:sub(1, first - 1) .. to .. relay_script.SCRIPT:sub(last + 1)
  end

  it("sends it to as many as are asked for, and each of the others has it from one of them", function()
    make(2, 3)
    local results = push()
    check(results)
    assert.is_true(fetched(results) >= 4) -- who is ready late may find somebody who has it before there are two
    assert.same({}, notes)
    -- The key and the token are in no command line, and the archive was sent no third time.
    local started = 0
    for _, machine in pairs(machines) do
      for _, command in ipairs(machine.commands) do
        assert.is_nil(command:find("%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x"))
        started = started + (command:find("ciranda-push: files", 1, true) and 1 or 0)
        assert.is_nil(command:find("cat >", 1, true))
      end
    end
    assert.equal(6, started)
  end)

  it(
    "takes the number of those who get it from here, and goes on with the workers one after the other",
    function()
      make(1, 4)
      local results = push({ via = "workers:1", limit = 1 })
      check(results)
      assert.equal(3, fetched(results))
      assert.is_nil(results[1].from)
      for _, bad in ipairs({ "workers:", "workers:0", "workers:x", "workers 2" }) do
        local ok, e = pcall(push, { via = bad })
        assert.is_false(ok)
        assert.equal("usage", e.code)
      end
    end
  )

  it("uses no programs for what is small: a second push sends what has changed", function()
    make(1, 4)
    check(push())
    fs.write(source .. "/run.sh", "echo other\n")
    uv.fs_utime(source .. "/run.sh", 1e9, 1e9)
    local results = push()
    check(results)
    assert.equal(0, fetched(results))
  end)

  -- In a program: the first to come here does this, the others do that.
  local function first(indent, this, that)
    local text = [[
try:
    os.close(os.open("%s/first", os.O_CREAT | os.O_EXCL))
    %s
except FileExistsError:
    %s
]]
    return (text:format(root, this, that):gsub("[^\n]+", (" "):rep(indent) .. "%0"))
  end

  it("gives those who fetch from a worker that dies to another", function()
    make(1, 6)
    alter(
      "                guest.sendall(data)\n",
      first(16, "guest.sendall(data[:99999]); os._exit(9)", "guest.sendall(data)")
    )
    local results = push()
    check(results)
    assert.is_truthy(fs.exists(root .. "/first"))
    assert.is_true(fetched(results) >= 3)
    -- The one that died may not have unpacked its own.
    assert.is_true(#notes <= 1)
    assert.is_truthy(not notes[1] or notes[1]:find("its python3 ended with status 9", 1, true), notes[1])
  end)

  it("gives those who fetch from a worker that stalls to another", function()
    relay.STALL = 3
    make(1, 6)
    alter(
      "                guest.sendall(data)\n",
      first(16, "guest.sendall(data[:99999]); time.sleep(1000)", "guest.sendall(data)")
    )
    local results = push()
    check(results) -- the one that stalls never ends by itself
    assert.is_truthy(fs.exists(root .. "/first"))
  end)

  -- A socket to which no connection comes about: its queue is full, as if a firewall dropped what is sent there.
  local SERVES = [[
                door.listen(GUESTS)
                threading.Thread(target=welcome, args=(door,), daemon=True).start()
]]
  local FULL = "door.listen(0); full = [door] + [socket.socket(door.family) for _ in range(4)]; "
    .. "[s.setblocking(False) or s.connect_ex(door.getsockname()) for s in full[1:]]; children.append(full)"

  it("gives those who get no connection to a worker to another", function()
    relay.CONNECT = 2
    make(1, 6)
    alter("            child.kill()\n", "            getattr(child, 'kill', list)()\n")
    alter(
      SERVES,
      first(
        16,
        FULL,
        "door.listen(GUESTS); threading.Thread(target=welcome, args=(door,), daemon=True).start()"
      )
    )
    check(push())
    assert.is_truthy(fs.exists(root .. "/first"))
  end)

  it("says who gets no connection to whom and what to look at, and sends it over the connections", function()
    relay.CONNECT = 1
    make(1, 6)
    alter("            child.kill()\n", "            getattr(child, 'kill', list)()\n")
    alter(SERVES, (" "):rep(16) .. FULL .. "\n")
    local results = push()
    check(results)
    assert.equal(0, fetched(results))
    assert.matches(
      "^slice 0 worker %d could not fetch from other workers %(slice 0 worker %d at 127.88.0.%d:%d+: no connection "
        .. "within 1 s: does a firewall keep workers from each other's TCP ports%?%): over the connection instead$",
      notes[1]
    )
  end)

  it("refuses what is not what was sent, and sends it over the connection", function()
    make(1, 8)
    alter("                guest.sendall(data)", "                guest.sendall(bytes(len(data)))")
    local results = push()
    check(results)
    assert.equal(0, fetched(results))
    assert.matches("could not fetch from other workers (slice 0 worker", notes[1], 1, true)
    assert.matches("what came was not what was sent): over the connection instead", notes[1], 1, true)
  end)

  it("says once that workers do not reach each other, and sends it over the connections", function()
    make(1, 8)
    alter('say("have", *door.getsockname()[:2])', 'say("have", address, 9)')
    local results = push()
    check(results)
    assert.equal(0, fetched(results))
    assert.is_true(#notes <= 3) -- the first, the others, and perhaps one who had tried all there were
    assert.matches("%(slice %d worker %d at 127.88.0.%d:9: .*refused%): over the connection", notes[1])
    assert.matches("^slice0/worker%S+ could not fetch", notes[#notes])
  end)

  it("leaves a worker that takes nothing, and serves the others", function()
    relay.STALL = 2
    make(1, 4)
    alter("            store(from_runner)\n", first(12, "time.sleep(1000)", "store(from_runner)"))
    local scope <close> = task.scope()
    local going = push_in(scope, { via = "workers:1" })
    wait_for("the others' files", function()
      return going.ended == 3
    end)
    for _, machine in pairs(machines) do
      if not fs.exists(machine.home .. "/code") then
        for _, pid in ipairs(programs(machine)) do
          uv.kill(pid, "sigkill")
        end
      end
    end
    scope:wait()
    check(going.results)
  end)

  it("sends it over the connection where there is no python3 or no openssl that will do", function()
    make(1, 6)
    python(machines["0.1"], "exit 1\n")
    python(machines["0.2"], "exit 1\n")
    python(machines["0.3"], 'exec $real "$@"\n')
    machines["0.3"].env.PATH = machines["0.3"].home .. "/bin"
    for _, name in ipairs({
      "sh",
      "cat",
      "cut",
      "gzip",
      "mkdir",
      "rm",
      "sha256sum",
      "stat",
      "tar",
      "wc",
      "xargs",
    }) do
      local path = process.run({ "sh", "-c", "command -v " .. name }):check().stdout
      fs.symlink(path:sub(1, -2), machines["0.3"].home .. "/bin/" .. name)
    end
    python(machines["0.4"], 'exec $real "$@"\n')
    fs.write(
      machines["0.4"].home .. "/bin/openssl",
      "#!/bin/sh\necho unknown option >&2\nexit 1\n",
      { mode = 493 }
    )
    local results = push()
    check(results)
    table.sort(notes)
    assert.equal(4, #notes)
    local way = " could not fetch from other workers "
    assert.matches("^slice 0 worker [12]" .. way .. "%(there is no python3 that runs", notes[1])
    assert.matches("slice 0 worker 3" .. way .. "(there is no openssl", notes[2], 1, true)
    assert.matches("slice 0 worker 4" .. way .. "(openssl: unknown option): over the", notes[3], 1, true)
    assert.matches("^slice0/worker[12]" .. way .. "%(there is no python3 that runs", notes[4])
  end)

  it("says what a full disk says, of the worker whose disk it is", function()
    make(1, 4)
    for _, address in ipairs({ "0.1", "0.3" }) do
      python(machines[address], '[ -z "$2" ] || ulimit -f 100\nexec $real "$@"\n')
    end
    local results = push()
    for place, result in ipairs(results) do
      local bad = place == 2 or place == 4
      assert.equal(bad and 1 or 0, result.code)
      assert.equal(bad, result.stderr:find("keeping what came: .*File too large") ~= nil, result.stderr)
    end
    assert.is_nil(fs.exists(machines["0.1"].home .. "/code"))
    assert.same({}, notes)
  end)

  it("gives a broken connection as its worker's error, and the others' files", function()
    make(1, 4)
    -- The one that gets it from here takes nothing, so that the others wait.
    alter(
      "            store(from_runner)\n",
      first(12, 'open("stuck", "w").close(); time.sleep(1000)', "store(from_runner)")
    )
    alter('say("ready")', 'say("ready"); open("waits", "w").close()')
    local scope <close> = task.scope()
    local going = push_in(scope, { via = "workers:1" })
    local stuck, broken
    wait_for("the programs", function()
      local waiting = 0
      for _, machine in pairs(machines) do
        waiting = waiting + (fs.exists(machine.home .. "/waits") and 1 or 0)
        if fs.exists(machine.home .. "/stuck") then
          stuck = machine
        else
          broken = machine
        end
      end
      return waiting == 4 and stuck
    end)
    broken:break_all()
    wait_for("the broken one's result", function()
      return going.of[broken.address]
    end)
    for _, pid in ipairs(programs(stuck)) do
      uv.kill(pid, "sigkill")
    end
    scope:wait()
    for _, result in ipairs(going.results) do
      if result.worker.address == broken.address then
        assert.equal("reset", result.err.code)
      else
        assert.equal(0, result.code)
      end
    end
    assert.equal(1, fetched(going.results))
    assert.equal(1, #notes)
    assert.matches("its python3 ended with", notes[1], 1, true)
  end)

  it("ends the programs when the push is cancelled", function()
    make(1, 4)
    python(machines["0.2"], '[ "$2" = "" ] || exec sleep 1000\nexec $real "$@"\n')
    local scope <close> = task.scope()
    local going = push_in(scope)
    wait_for("the others' files", function()
      return going.ended == 3
    end)
    -- Those who have it wait for the last: the control of what follows.
    assert.equal(1, #programs(machines["0.0"]))
    going.task:cancel("enough")
    for _, machine in pairs(machines) do
      wait_for("the end of the programs", function()
        return next(machine:processes()) == nil
      end)
      assert.is_nil(process.run({ "ls", "-a", machine.home }).stdout:find("push", 1, true))
    end
  end)

  describe("the program on a worker", function()
    local program, order

    before_each(function()
      make(1, 1)
      local data = ("x"):rep(300000)
      order = {
        size = #data,
        sha256 = require("ciranda.io.crypto").hex(require("ciranda.io.crypto").sha256(data)),
        key = "00",
        token = ("ab"):rep(32),
        destination = "636f6465",
        address = "127.88.1.1",
        connect = 60,
        stall = 60,
        slowest = 10000,
        silence = 60,
        data = data,
      }
    end)

    --- Starts it; returns its answers, line by line.
    local function start()
      local data = order.data
      order.data = nil
      program = process.spawn({
        "/usr/bin/python3",
        "-ISc",
        relay_script.SCRIPT,
        cwd = machines["0.0"].home,
        stdin = process.PIPE,
        stdout = process.PIPE,
      })
      program.stdin:write(require("ciranda.io.json").encode(order) .. "\n")
      local text = ""
      return data,
        function()
          while not text:find("\n", 1, true) do
            text = text .. assert(program.stdout:read())
          end
          local line
          line, text = text:match("^ciranda%-push ([^\n]*)\n(.*)$")
          return line
        end
    end

    it("gives the archive to who knows the token, and to nobody else", function()
      local data, line = start()
      assert.equal("ready", line())
      program.stdin:write("receive\n" .. data)
      local address, port = line():match("^have (%S+) (%d+)$")
      assert.equal("127.88.1.1", address)
      local client = [[
import hashlib, hmac, socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
nonce = peer.recv(32, socket.MSG_WAITALL)
peer.sendall(hmac.new(bytes.fromhex(sys.argv[3]), nonce, "sha256").digest())
data = b""
while True:
    more = peer.recv(1 << 20)
    if not more: break
    data += more
print(len(nonce), len(data), hashlib.sha256(data).hexdigest())
]]
      local function ask(token)
        return process.run({ "/usr/bin/python3", "-c", client, address, port, token }):check().stdout
      end
      assert.equal(("32 300000 %s\n"):format(order.sha256), ask(order.token))
      assert.matches("^32 0 ", ask(("ac"):rep(32)))
      assert.is_nil(process.run({ "ls", "-A", machines["0.0"].home }).stdout:find("push", 1, true))
      program.stdin:close()
      assert.equal(0, program:wait().code)
    end)

    it("leaves in time who does not let it in, does not answer, or stops half-way", function()
      local server = [[
import hashlib, hmac, os, socket, sys, threading, time
token, size, limit = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def full(door):
    door.listen(0)
    peers = [socket.socket() for _ in range(4)]
    for peer in peers:
        peer.setblocking(False)
        peer.connect_ex(door.getsockname())
    return peers
def serve(how):
    def run(door):
        door.listen(9)
        def loop():
            while True:
                try:
                    how(door.accept()[0])
                except OSError:
                    pass
        threading.Thread(target=loop, daemon=True).start()
    return run
def silent(peer):
    time.sleep(1000)
def drip(peer):
    for _ in range(32):
        peer.sendall(b"x")
        time.sleep(limit / 8)
    peer.close()
def give(peer, count):
    nonce = os.urandom(32)
    peer.sendall(nonce)
    if peer.recv(32, socket.MSG_WAITALL) == hmac.new(token, nonce, "sha256").digest():
        peer.sendall(b"x" * count)
def half(peer):
    give(peer, size // 2)
    time.sleep(1000)
def whole(peer):
    give(peer, size)
    peer.close()
kept = []
for start in (full, serve(silent), serve(drip), serve(half), serve(whole)):
    door = socket.socket()
    door.bind(("127.88.2.1", 0))
    kept += [door, start(door)]
    print(door.getsockname()[1], flush=True)
sys.stdin.read()
]]
      --- Fetches from all of them, with so many seconds for each step: the answers.
      local function fetch_from_all(seconds)
        order.connect, order.stall = seconds, seconds
        local peers = process.spawn({
          "/usr/bin/python3",
          "-c",
          server,
          order.token,
          tostring(order.size),
          tostring(seconds),
          stdin = process.PIPE,
          stdout = process.PIPE,
        })
        local ports = ""
        while select(2, ports:gsub("\n", "")) < 5 do
          ports = ports .. assert(peers.stdout:read())
        end
        local _, line = start()
        assert.equal("ready", line())
        local answers = {}
        for port in ports:gmatch("%d+") do
          program.stdin:write(("fetch 127.88.2.1 %s\n"):format(port))
          table.insert(answers, (line():gsub("^have 127%.88%.1%.1 %d+$", "has it")))
        end
        peers.stdin:close()
        peers:wait()
        program.stdin:close()
        program:wait()
        return answers
      end
      -- On a busy machine those that are well may not answer within the limit that the others are to break.
      local answers, expected = patience.within_more(2, function(seconds)
        local answers, expected =
          fetch_from_all(seconds), {
            "failed no connection within {s} s: does a firewall keep workers from each other's TCP ports?",
            "failed it took the connection and did not answer within {s} s",
            "failed it took the connection and did not answer within {s} s",
            "failed nothing came for {s} s",
            "has it",
          }
        local fits = true
        for place, text in ipairs(expected) do
          expected[place] = text:gsub("{s}", tostring(seconds))
          fits = fits and answers[place] == expected[place]
        end
        return fits, answers, expected
      end)
      assert.same(expected, answers)
    end)

    it("keeps nothing that is not what the runner announced", function()
      order.sha256 = ("0"):rep(64)
      local data, line = start()
      assert.equal("ready", line())
      program.stdin:write("receive\n" .. data)
      assert.equal("broken what came was not what was sent", line())
      program.stdin:close()
      program:wait()
      assert.is_nil(fs.exists(machines["0.0"].home .. "/code"))
    end)

    it("ends when the runner has been silent for too long", function()
      order.silence = 1
      local _, line = start()
      assert.equal("ready", line())
      assert.equal(0, program:wait().code)
      program.stdin:close()
    end)
  end)
end)
