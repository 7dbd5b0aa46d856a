-- ssh: commands and sessions on simulated slices, whose workers have real sshds.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local patience = dofile("tests/fixtures/patience.lua")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/cloud_support.lua")
local task = require("ciranda.task")

--- A number of this run alone: processes are counted on the whole machine, where another run may be at the same test.
local function nap(number)
  return ("%d%06d"):format(number, require("luv").os_getpid() % 1000000)
end

describe("ssh", function()
  local cloud

  setup(function()
    cloud = support.start({ slices = 2, type = "v5litepod-16", prefix = "job" })
  end)

  teardown(function()
    cloud:stop()
  end)

  --- Waits until a running program's output matches.
  local function wait_for(read, pattern)
    patience.wait_for(function()
      return pattern .. " in: " .. read()
    end, function()
      return read():find(pattern)
    end)
  end

  it("runs on worker 0 of slice 0 when nothing is said, its streams and status as they are", function()
    local result = cloud:run("ssh", "job", "--command=hostname; printf 'a\\0b'; echo why >&2; exit 7")
    assert.equal(7, result.code, result.err)
    assert.matches("%-w%-0\na%zb$", result.out)
    assert.matches("why\n", result.err, 1, true)
    assert.matches("user: 1 of 1 workers failed; slice 0 worker 0: exit status 7\n$", result.err)
    assert.equal(0, cloud:run("ssh", "job", "--command=true").code)
  end)

  it("means a queued resource, one of its nodes, or a user at either", function()
    local user = os.getenv("USER") or os.getenv("LOGNAME") or require("luv").os_get_passwd().username
    for name, hosts in pairs({ ["job"] = 2, ["job-1"] = 1, [user .. "@job-0"] = 1 }) do
      local result = cloud:run("ssh", name, "--node=all", "--worker=1", "--command=echo here", "--live")
      assert.equal(0, result.code, result.err)
      if hosts == 1 then
        assert.equal("here\n", result.out)
      elseif result.out ~= "slice[0-1]/worker1: here\n" then -- equal lines are one line, when they come together
        assert.matches("slice0/worker1: here\n", result.out, 1, true)
        assert.matches("slice1/worker1: here\n", result.out, 1, true)
      end
    end
    local result = cloud:run("ssh", "nothing", "--command=true")
    assert.equal(1, result.code)
    assert.matches("no queued resource of that name", result.err, 1, true)
    assert.matches("there are job-0, job-1", result.err, 1, true)
  end)

  it("gathers equal output under the workers it came from, and gives the first failing status", function()
    local result = cloud:run(
      "ssh",
      "job",
      "--node=all",
      "--worker=all",
      "--command=echo same; case $(hostname) in *w-2) echo more; exit 4;; *w-3) exit 5;; esac"
    )
    assert.equal(4, result.code, result.err)
    local rule = ("-"):rep(15)
    assert.equal(
      table.concat({
        rule,
        "slice[0-1]/worker[0-1] (4)",
        rule,
        "same",
        rule,
        "slice[0-1]/worker2 (2): exit status 4",
        rule,
        "same",
        "more",
        rule,
        "slice[0-1]/worker3 (2): exit status 5",
        rule,
        "same",
        "",
      }, "\n"),
      result.out
    )
    assert.matches("slice[0-1]/worker2: exit status 4\n", result.err, 1, true)
    assert.matches("user: 4 of 8 workers failed; slice 0 worker 2: exit status 4", result.err, 1, true)
  end)

  it("takes node sets", function()
    local result =
      cloud:run("ssh", "job", "--SLICES=slice[0-1]/worker[0,3],!slice1/worker0", "--command=echo x")
    assert.matches("slice0/worker[0,3],slice1/worker3 (3)", result.out, 1, true)
    result = cloud:run("ssh", "job", "--node=1", "--worker=1-2", "--command=echo x")
    assert.matches("slice1/worker[1-2] (2)", result.out, 1, true)
    for _, arguments in ipairs({ { "--node=5" }, { "--worker=9" } }) do
      result = cloud:run("ssh", "job", "--command=echo x", table.unpack(arguments))
      assert.equal(1, result.code)
      assert.matches("names no worker; there are slice[0-1]/worker[0-3]", result.err, 1, true)
    end
  end)

  it("shows live lines whole, with a last one that has no end", function()
    local result = cloud:run(
      "ssh",
      "job",
      "--worker=all",
      "--live",
      "--command=for i in 1 2 3 4 5; do printf 'a%s' $i; sleep 0.05; echo b$i; done; printf last"
    )
    assert.equal(0, result.code, result.err)
    local seen = {}
    for set, line in result.out:gmatch("(%S+): ([^\n]*)\n") do
      seen[line] = true
      assert.matches("^slice0/worker", set)
    end
    assert.same({ a1b1 = true, a2b2 = true, a3b3 = true, a4b4 = true, a5b5 = true, last = true }, seen)
  end)

  it("stops at the first failed batch and says who never ran", function()
    local result = cloud:run(
      "ssh",
      "job",
      "--node=all",
      "--worker=all",
      "--batch-size=3",
      "--command=echo ran >> ~/batch; case $(hostname) in *w-1) exit 9;; esac"
    )
    assert.equal(9, result.code, result.err)
    assert.matches(
      "Never ran, since a batch before failed: slice0/worker3,slice1/worker[0-3]",
      result.err,
      1,
      true
    )
    result = cloud:run(
      "ssh",
      "job",
      "--node=all",
      "--worker=all",
      "--command=cat ~/batch 2>/dev/null; rm -f ~/batch"
    )
    assert.matches("slice0/worker[0-2] (3)", result.out, 1, true)
    for _, size in ipairs({ "0", "-1", "few" }) do
      local refused = cloud:run("ssh", "job", "--batch-size=" .. size, "--command=true")
      assert.equal(2, refused.code)
      assert.matches("--batch-size is", refused.err, 1, true)
    end
  end)

  it("has no batches for a gang", function()
    local result = cloud:run("multihost_runner", "--TPU_PREFIX=job", "--batch-size=2", "--COMMAND=true")
    assert.equal(2, result.code)
    assert.matches("batch-size", result.err, 1, true)
  end)

  it("lists who is still running at the first Ctrl-C, and stops them at the second", function()
    local running = cloud:start_program(
      "ssh",
      "job",
      "--worker=all",
      "--command=case $(hostname) in *w-1) printf over >&2; exit 0;; esac; sleep " .. nap(4711) .. "; echo no"
    )
    wait_for(function()
      return "sleeping: " .. support.processes("sleep", nap(4711))
    end, "sleeping: 3")
    wait_for(running.errors, "worker1: over\n") -- a line without an end is shown when its worker is known to have ended
    running.program:signal("SIGINT")
    wait_for(running.errors, "3 of 4 still running: slice0/worker%[0,2%-3%]")
    running.program:signal("SIGINT")
    local result = task.timeout(60, running.wait)
    assert.equal(130, result.code, result.err)
    assert.matches("slice0/worker[0,2-3]: killed by SIGTERM", result.err, 1, true)
    assert.equal(0, support.processes("sleep", nap(4711)))
  end)

  it("stops at SIGTERM, also what does not listen", function()
    local running = cloud:start_program(
      "ssh",
      "job",
      "--command=trap '' TERM; echo up >&2; while :; do sleep " .. nap(4712) .. "; done"
    )
    wait_for(running.errors, "up")
    running.program:signal("SIGTERM")
    local result = task.timeout(60, running.wait)
    assert.equal(143, result.code, result.err)
    assert.equal(0, support.processes("sleep", nap(4712)))
  end)

  it("ends what takes longer than --timeout, with 124", function()
    local result = cloud:run("ssh", "job", "--worker=0-1", "--timeout=1", "--command=sleep " .. nap(4713))
    assert.equal(124, result.code)
    assert.matches("slice0/worker[0-1]: it had not ended in time and was stopped", result.err, 1, true)
    assert.equal(0, support.processes("sleep", nap(4713)))
  end)

  it("sends standard input to all, and keeps a file a worker", function()
    local argv = cloud:command({
      "ssh",
      "job",
      "--worker=0-1",
      "--stdin",
      "--command=cat; echo e >&2",
      "--output-directory=" .. cloud.root .. "/logs",
    })
    argv.stdin, argv.timeout = "input\n", 60
    local result = process.run(argv)
    assert.equal(0, result.code, result.stderr)
    assert.matches("slice0/worker[0-1] (2)", result.stdout, 1, true)
    for worker = 0, 1 do
      local text = fs.read(("%s/logs/output_slice_0000_worker_%04d.txt"):format(cloud.root, worker))
      assert.matches("input\n", text, 1, true)
      assert.matches("e\n", text, 1, true)
    end
  end)

  it("shows floods of lines without loss, and ends what nobody reads", function()
    local flood = cloud:run("ssh", "job", "--worker=0-1", "--live", "--command=seq 30000")
    assert.equal(0, flood.code, flood.err)
    local count = 0
    for set, line in flood.out:gmatch("([^:\n]+): (%d+)\n") do
      assert.matches("^slice0/worker", set)
      count = count + (set:find("[0-1]", 1, true) and 2 or 1)
      assert.is_truthy(tonumber(line))
    end
    assert.equal(60000, count)
    for _, workers in ipairs({ "0", "0-1" }) do
      local argv = cloud:command({
        "ssh",
        "job",
        "--worker=" .. workers,
        "--live",
        "--command=yes unread-" .. nap(4716),
      })
      local piped = { "sh", "-c", '"$0" "$@" | head -n 1', table.unpack(argv) }
      piped.env, piped.timeout = argv.env, 40
      local program = process.run(piped)
      assert.matches("unread%-" .. nap(4716) .. "\n$", program.stdout)
      assert.equal(0, support.processes("yes", "unread-" .. nap(4716)))
    end
  end)

  it("prints a result a worker with --json", function()
    local result = cloud:run("--json", "ssh", "job", "--worker=0-1", "--command=echo x; exit 2")
    assert.equal(2, result.code)
    local workers, last = {}, nil
    for line in result.out:gmatch("[^\n]+") do
      local record = json.decode(line)
      if record.event == "result" then
        workers[record.worker] = record.stdout .. record.code
      end
      last = record
    end
    assert.same({ [0] = "x\n2", [1] = "x\n2" }, workers)
    assert.same({ "end", "user", 2 }, { last.event, last.kind, last.status })
  end)

  it("refuses a host whose key nobody vouches for, as a failure that is not the command's", function()
    local address = cloud:run("ssh", "job", "--command=echo $SSH_CONNECTION").out:match("^%S+ %S+ (%S+)")
    local host = ("--HOSTS=%s:%s"):format(address, cloud.simulator.env.CIRANDA_SSH_PORT)
    local result = cloud:run("ssh", host, "--command=touch ~/was-here")
    assert.equal(1, result.code)
    assert.matches("infra: 1 of 1 workers failed; slice 0 worker 0:", result.err, 1, true)
    assert.matches("known_hosts", result.err, 1, true)
    assert.equal("no\n", cloud:run("ssh", "job", "--command=[ -e ~/was-here ] && echo yes || echo no").out)
    result = cloud:run(
      "ssh",
      host,
      "--host-keys=accept-new",
      "--ssh-key=~/.ssh/google_compute_engine",
      "--command=echo in"
    )
    assert.equal("in\n", result.out, result.err)
    fs.remove(cloud.root .. "/home/.ssh/known_hosts")
  end)

  it("opens a session with ssh, the host's key from the cloud", function()
    -- A command given to ssh itself needs no terminal.
    local result = cloud:run("ssh", "job", "--node=1", "--worker=2", "--", "hostname; exit 6")
    assert.equal(6, result.code, result.err)
    assert.matches("%-w%-2\n$", result.out)
    for _, entry in ipairs(fs.list(cloud.root)) do
      assert.not_matches("^ciranda%-ssh", entry.name)
    end
    assert.is_nil(fs.exists(cloud.root .. "/home/.ssh/known_hosts"))
  end)

  it("opens a session from directories whose names ssh would split and expand", function()
    assert.equal(0, cloud:run("ssh", "job", "--command=true").code) -- the key is there, and let in
    local odd = cloud.root .. [[/100%d "of" it's \'s]]
    fs.mkdir(odd)
    for _, ending in ipairs({ "", ".pub" }) do
      local key = fs.read(cloud.root .. "/home/.ssh/google_compute_engine" .. ending)
      fs.write(odd .. "/key" .. ending, key, { mode = 384 })
    end
    local argv = cloud:command({ "ssh", "job", ("--ssh-key=%s/key"):format(odd), "--", "hostname" })
    argv.env.TMPDIR, argv.timeout = odd, 100
    local result = process.run(argv)
    assert.equal(0, result.code, result.stderr)
    assert.matches("%-w%-0\n$", result.stdout)
  end)

  it("refuses a session with several workers, and flags that go with --command", function()
    for want, arguments in pairs({
      ["these are 4 (slice0/worker[0-3])"] = { "job", "--worker=all" },
      ["--batch-size is for --command"] = { "job", "--batch-size=2" },
      ["nothing else is taken"] = { "job", "--command=true", "--", "-v" },
      ["which slices?"] = {},
      ["not both"] = { "job", "--HOSTS=127.0.0.1", "--command=true" },
      ["no user before the @"] = { "@job", "--command=true" },
    }) do
      local result = cloud:run("ssh", table.unpack(arguments))
      assert.equal(2, result.code, want .. ": " .. result.err)
      assert.matches(want, result.err, 1, true)
    end
  end)
end)
