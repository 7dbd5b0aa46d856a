local errors = require("ciranda.io.error")
local fleets = require("ciranda.fleet")
local task = require("ciranda.task")
local uv = require("luv")

local machines_of = dofile("tests/fixtures/fleet/machines.lua")
local patience = dofile("tests/fixtures/patience.lua")

describe("fleet", function()
  local root, machines, slices, connect, fleet

  before_each(function()
    root = uv.fs_mkdtemp("/tmp/fleet-XXXXXX")
    slices, connect, machines = machines_of.make(2, 2, { root = root })
    fleet = fleets.new(slices, { connect = connect, retry_for = 1 })
  end)

  after_each(function()
    fleet:close()
    os.execute(("rm -rf '%s'"):format(root))
  end)

  it("runs a command on all, results in order", function()
    local results = fleet:run("echo $HOME; echo oops >&2; cat", { stdin = "fed" }):check()
    assert.equal(4, #results)
    for place, address in ipairs({ "0.0", "0.1", "1.0", "1.1" }) do
      assert.equal(machines[address].home .. "\nfed", results[place].stdout)
      assert.equal("oops\n", results[place].stderr)
      assert.equal(0, results[place].code)
      assert.equal(address, results[place].worker.address)
    end
  end)

  it("gives exit statuses and signals as data, and raises them on request", function()
    local results = fleet:run("case $HOME in *0.1) exit 3;; *1.0) kill -9 $$;; esac")
    assert.same({ 0, 3, 0 }, { results[1].code, results[2].code, results[4].code })
    assert.equal("KILL", results[3].signal)
    assert.is_nil(results[3].code)
    assert.is_false(results:ok())
    assert.equal(3, results:status())
    assert.equal(2, #results:failures())
    local ok, e = pcall(results.check, results)
    assert.is_false(ok)
    assert.equal("failed", e.code)
    assert.matches(
      "2 of 4 workers failed (slice0/worker1,slice1/worker0); slice 0 worker 1: exit status 3",
      e.message,
      1,
      true
    )
    assert.equal(137, fleet:select("slice1"):run("kill -9 $$"):status())
  end)

  it("gives a worker that cannot be reached as an error of its own, and the others' results", function()
    machines["1.0"].refuses = { code = "auth", message = "no key was accepted" }
    local results = fleet:run("echo hi")
    assert.equal("hi\n", results[1].stdout)
    assert.equal("auth", results[3].err.code)
    assert.equal("hi\n", results[4].stdout)
    local ok, e = pcall(results.check, results)
    assert.is_false(ok)
    assert.equal("auth", e.code)
  end)

  it("never runs a command again when its connection breaks", function()
    machines["0.0"].cut = function()
      return "after"
    end
    local results = fleet:run("echo x >> ran; echo done")
    assert.equal("reset", results[1].err.code)
    local file = io.open(machines["0.0"].home .. "/ran")
    assert.equal("x\n", file:read("a"))
    file:close()
    -- The next command has a new connection.
    machines["0.0"].cut = nil
    assert.equal("again\n", fleet:run("echo again")[1].stdout)
  end)

  it("connects once for many commands, and again when the connection is gone", function()
    fleet:run("true")
    fleet:select("worker0"):run("true")
    assert.equal(1, machines["0.0"].connects)
    machines["0.0"]:break_all()
    fleet:run("true")
    fleet:run("true")
    assert.equal(2, machines["0.0"].connects)
  end)

  it("connects once when many tasks want a connection at the same time", function()
    local link = fleet:link(fleet:workers()[1])
    local calls = {}
    for place = 1, 10 do
      calls[place] = function()
        return link:connection()
      end
    end
    task.all(calls)
    assert.equal(1, machines["0.0"].connects)
  end)

  it("tries again while the failure may pass, and names worker and reason when it does not", function()
    machines["0.1"].down = true
    local patient <close> = fleets.new(slices, { connect = connect, retry_for = 60 })
    task.all({
      function()
        patience.wait_for("a second try", function()
          return machines["0.1"].connects > 1
        end)
        machines["0.1"].down = false
      end,
      function()
        patient:run("true"):check()
      end,
    })
    assert.is_true(machines["0.1"].connects > 2)
    machines["0.1"].down = true
    local results = fleet:run("true")
    assert.equal("refused", results[2].err.code)
    assert.matches("slice 0 worker 1 (0.1)", tostring(results[2].err), 1, true)
  end)

  it("takes the internal address when the external one does not answer, and says so once it knows", function()
    local chosen = {}
    local list = {
      {
        index = 0,
        name = "n",
        workers = {
          { slice = 0, index = 0, address = "ext.0", internal_address = "0.0" },
          { slice = 0, index = 1, address = "ext.1", internal_address = "0.1" },
        },
      },
    }
    local tried = {}
    local other <close> = fleets.new(list, {
      retry_for = 1,
      connect = function(options)
        local address = options.address or options.host
        tried[#tried + 1] = address
        if address:find("^ext") then
          errors.raise({ code = "timeout", message = "no answer" })
        end
        return connect(options)
      end,
      on_address = function(_, kind)
        chosen[#chosen + 1] = kind
      end,
    })
    other:select("worker0"):run("true"):check()
    other:select("worker1"):run("true"):check()
    assert.same({ "internal", "internal" }, chosen)
    assert.same({ "ext.0", "0.0", "0.1" }, tried)
  end)

  it("uses one kind of address only when told", function()
    local list = {
      {
        index = 0,
        name = "n",
        workers = { { slice = 0, index = 0, address = "x", internal_address = "0.0" } },
      },
    }
    local inside <close> = fleets.new(list, { connect = connect, internal_ip = true })
    assert.is_true(inside:run("true"):ok())
  end)

  it("goes through IAP where no external address is known, and inside when IAP does not let it", function()
    local ways, refusal
    local function fleet_of(options)
      ways = {}
      local workers = {}
      for index = 0, 1 do
        local address = "0." .. index
        workers[index + 1] = {
          slice = 0,
          index = index,
          address = address,
          internal_address = address,
          has_external = false,
          hostname = "t1v-n-0-w-" .. index,
        }
      end
      options.credentials, options.retry_for = {}, 0.1
      options.tunnel = options.tunnel or { project = "p", zone = "z" }
      options.connect = function(given)
        ways[#ways + 1] = given.carrier and "tunnel" or "direct"
        if given.carrier and refusal then
          errors.raise(refusal)
        end
        return connect(given)
      end
      return fleets.new({ { index = 0, name = "n", workers = workers } }, options)
    end
    local function tried(options)
      local other <close> = fleet_of(options or {})
      local result = other:select("worker0"):run("true")[1]
      other:select("worker1"):run("true")
      return table.concat(ways, " "), result.err
    end
    assert.equal("tunnel tunnel", (tried()))
    assert.equal("direct direct", (tried({ internal_ip = true })))
    refusal = { code = "permission", op = "iap", message = "no" }
    assert.equal("tunnel direct direct", (tried()))
    local way, problem = tried({ tunnel = { project = "p", zone = "z", always = true } })
    assert.equal("tunnel tunnel", way)
    assert.equal("permission", problem.code)
    -- The worker was reached, and its port is closed: that is no matter of the way.
    refusal = { code = "refused", op = "iap", close_code = 4003, message = "no" }
    way, problem = tried()
    assert(not way:find("direct"), way)
    assert.equal("refused", problem.code)
    refusal = { code = "auth", op = "ssh.connect", message = "no key was accepted" }
    assert(not tried():find("direct"))
    -- Inside, where we are, that address is another machine's.
    refusal = { code = "permission", op = "iap", message = "no" }
    machines["0.0"].refuses = { code = "hostkey", message = "another machine" }
    way, problem = tried()
    assert.matches("^tunnel direct", way)
    assert.equal("permission", problem.code)
  end)

  it("asks for the host keys again when another is shown, and believes only new ones", function()
    local current, asked = "ssh-ed25519 new", 0
    local only = { { index = 0, name = "n", workers = { slices[1].workers[1] } } }
    only[1].workers[1].pins = { "ssh-ed25519 old" }
    local function judge(options)
      if options.pins[1] ~= current then
        errors.raise({ code = "hostkey", reason = "changed", message = "another key" })
      end
      options.pins = nil
      return connect(options)
    end
    local told = { "ssh-ed25519 old" }
    local function fleet_of(fresh)
      return fleets.new(only, { connect = judge, retry_for = 0, fresh_pins = fresh })
    end
    local function fresh()
      asked = asked + 1
      return told
    end
    -- The control: nobody to ask, or the same answer as before.
    assert.equal("hostkey", fleet_of(nil):run("x")[1].err.code)
    assert.equal("hostkey", fleet_of(fresh):run("x")[1].err.code)
    assert.equal(1, asked)
    told = { current }
    assert.is_nil(fleet_of(fresh):run("x")[1].err)
    assert.equal(2, asked)
    -- Who cannot be asked does not make another failure of it, but is told.
    current = "ssh-ed25519 other"
    local failed = fleet_of(function()
      errors.raise({ code = "unavailable", message = "503" })
    end):run("x")[1].err
    assert.equal("hostkey", failed.code)
    assert.matches("could not be asked: 503", failed.message, 1, true)
    -- A second machine that shows yet another key is asked about once, and refused.
    current = "ssh-ed25519 third"
    assert.equal("hostkey", fleet_of(fresh):run("x")[1].err.code)
    assert.equal(3, asked)
  end)

  it("gathers equal answers", function()
    local groups = fleet:run("case $HOME in *1.1) echo odd;; *) echo same;; esac"):gather()
    assert.equal("slice0/worker[0-1],slice1/worker0", groups[1].nodes)
    assert.equal("same\n", groups[1].stdout)
    assert.equal("slice1/worker1", groups[2].nodes)
  end)

  it("streams output by worker", function()
    local got = {}
    fleet:run("printf a; printf b", {
      on_stdout = function(worker, bytes)
        got[worker.address] = (got[worker.address] or "") .. bytes
      end,
    })
    assert.equal("ab", got["1.1"])
  end)

  it(
    "waits for a worker that is not reached within its time no longer, and has the others' answers",
    function()
      local other <close> = fleets.new(slices, {
        connect = function(options)
          if (options.address or options.host) == "1.0" then
            task.sleep(3600)
          end
          return connect(options)
        end,
      })
      local results = patience.within_more(1, function(seconds)
        local results, slow = other:run("echo here", { within = seconds }), 0
        for _, result in ipairs(results) do
          slow = slow + (result.err and 1 or 0)
        end
        return slow == 1, results
      end)
      for _, result in ipairs(results) do
        local off = result.worker.address == "1.0"
        assert.equal(off and "timeout" or "here\n", off and result.err.code or result.stdout)
      end
    end
  )

  it("limits how many run at once", function()
    local running, most = 0, 0
    fleet:each(function()
      running = running + 1
      most = math.max(most, running)
      task.sleep(0.02)
      running = running - 1
    end, 2)
    assert.equal(2, most)
  end)

  it("times a command out on the worker that is slow, and only there", function()
    local results = patience.within_more(0.5, function(seconds)
      local results = fleet:run("case $HOME in *0.1) sleep 300;; esac; echo ok", { timeout = seconds })
      local slow = 0
      for _, result in ipairs(results) do
        slow = slow + (result.err and 1 or 0)
      end
      return slow == 1, results
    end)
    assert.equal("timeout", results[2].err.code)
    assert.equal("ok\n", results[1].stdout)
  end)

  it("pushes a file and a directory, and pulls them back", function()
    os.execute(
      ("mkdir -p '%s/src/sub'; echo one > '%s/src/a'; echo two > '%s/src/sub/b'; chmod 755 '%s/src/a'"):format(
        root,
        root,
        root,
        root
      )
    )
    fleet:push(root .. "/src/a", "file.txt", { mode = 384 }):check()
    fleet:push(root .. "/src", "it's here"):check()
    local results =
      fleet:run([[cat file.txt "it's here/sub/b"; stat -c %a file.txt "it's here/a"; ls -A | grep push]])
    assert.equal("one\ntwo\n600\n755\n", results[4].stdout)
    local pulled = fleet:pull("file.txt", root .. "/got"):check()
    local file = io.open(root .. "/got/slice_0001_worker_0001/file.txt")
    assert.equal("one\n", file:read("a"))
    file:close()
    assert.equal(root .. "/got/slice_0000_worker_0000/file.txt", pulled[1].path)
  end)

  it("sends a second time only what is not there as it should be", function()
    local archive = require("ciranda.fleet.archive")
    local source = root .. "/tree"
    local function put(path, text)
      local file = assert(io.open(source .. "/" .. path, "w"))
      file:write(text)
      file:close()
    end
    os.execute(("mkdir -p '%s/sub'"):format(source))
    for number = 1, 150 do
      put(("sub/file %d"):format(number), ("text %d\n"):format(number))
    end
    put("two\nlines", "odd name\n")
    put("-n", "dash\n")
    local sent = {}
    local write = archive.write
    local restore <close> = setmetatable({}, {
      __close = function()
        archive.write = write
      end,
    })
    local _ = restore
    archive.write = function(manifest, ...)
      local names = {}
      for _, entry in ipairs(manifest.entries) do
        if entry.type == "file" then
          table.insert(names, entry.path)
        end
      end
      table.insert(sent, table.concat(names, ","))
      return write(manifest, ...)
    end
    fleet:push(source, "tree"):check()
    assert.equal(1, #sent) -- one archive for all workers
    fleet:push(source, "tree"):check()
    assert.same({ "two\nlines" }, { table.unpack(sent, 2) })

    put("sub/file 70", "changed here\n")
    local first = fleet:select("slice0/worker0")
    first
      :run(
        "cd tree && rm 'sub/file 3' && chmod 600 'sub/file 4' && echo bad > -n && ln -sf 'file 6' 'sub/file 5'"
      )
      :check()
    fleet:push(source, "tree"):check()
    table.sort(sent, function(a, b)
      return #a < #b
    end)
    assert.equal("sub/file 70,two\nlines", sent[2])
    assert.equal("-n,sub/file 3,sub/file 4,sub/file 5,sub/file 70,two\nlines", sent[3])
    local results =
      fleet:run("cd tree && cat ./-n 'sub/file 3' 'sub/file 70'; stat -c %A 'sub/file 4' 'sub/file 5'")
    for _, result in ipairs(results) do
      assert.equal("dash\ntext 3\nchanged here\n-rw-r--r--\n-rw-r--r--\n", result.stdout)
    end
  end)

  it("names the worker whose file is missing", function()
    fleet:select("slice0"):push("tests/fixtures/trainer/train.py", "x"):check()
    local results = fleet:pull("x", root .. "/got")
    assert.is_nil(results[1].err)
    assert.equal("not_found", results[3].err.code)
  end)

  it("connects to one first, so that a wrong key is told once", function()
    for _, machine in pairs(machines) do
      machine.refuses = { code = "auth", message = "no key was accepted" }
    end
    local ok, e = pcall(fleet.connect, fleet)
    assert.is_false(ok)
    assert.equal("auth", e.code)
    assert.equal(1, machines["0.0"].connects + machines["0.1"].connects + machines["1.0"].connects)
  end)

  it("refuses options and workers it does not know", function()
    for _, call in ipairs({
      function()
        fleets.new(slices, { usr = "me" })
      end,
      function()
        fleet:run("true", { timeuot = 1 })
      end,
      function()
        fleet:run(3)
      end,
      function()
        fleet:select({ { slice = 9, index = 9 } })
      end,
      function()
        fleets.new("host")
      end,
    }) do
      local ok, e = pcall(call)
      assert.is_false(ok)
      assert.equal("misuse", e.code)
    end
  end)

  it("is closed as a whole, not by a part of it", function()
    local part = fleet:select("slice0")
    part:run("true")
    part:close()
    assert.is_true(fleet:run("true"):ok())
    assert.equal(1, machines["0.0"].connects)
    fleet:close()
    assert.equal("closed", fleet:run("true")[1].err.code)
  end)
end)
