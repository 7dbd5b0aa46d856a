-- The recipes that ask the cloud, against the simulated one: the program itself, pointed there by ordinary variables.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

describe("recipes on the simulated cloud", function()
  local simulator, root

  setup(function()
    root = fs.tempdir("ciranda-cloud")
    fs.mkdir(root .. "/code")
    fs.mkdir(root .. "/home")
    simulator = sim.start({ slices = 2, type = "v5litepod-4", prefix = "job" })
  end)

  teardown(function()
    simulator:close()
    fs.remove_tree(root)
  end)

  local function command(words)
    local argv = { BINARY, table.unpack(words) }
    argv.cwd = root .. "/code"
    argv.env =
      { HOME = root .. "/home", TMPDIR = root, XDG_STATE_HOME = root .. "/state", SSH_AUTH_SOCK = false }
    for name, value in pairs(simulator.env) do
      argv.env[name] = value
    end
    argv.timeout = 100
    return argv
  end

  local function ciranda(...)
    local answer = process.run(command({ ... }))
    return { code = answer.code, out = answer.stdout, err = answer.stderr }
  end

  local function state_of(id)
    local result = ciranda("qr", "describe", id, "--format=value(state.state)")
    return result.code == 0 and (result.out:gsub("\n", "")) or nil
  end

  it("runs a command on the slices with a prefix, letting its own key in", function()
    fs.write(root .. "/code/main.sh", "echo slice $CIRANDA_SLICE_ID of $CIRANDA_NUM_SLICES\n")
    local result = ciranda("multihost_runner", "--TPU_PREFIX=job", "--RUN_NAME=r1", "--COMMAND=sh main.sh")
    assert.equal(0, result.code, result.err)
    assert.equal("slice 0 of 2\n", result.out)
    assert.matches("2 slices found.", result.err, 1, true)
    assert.matches("adding it to the nodes' metadata", result.err, 1, true)
    assert.equal("slice 1 of 2\n", fs.read(root .. "/r1/output_slice_0001_worker_0000.txt"))
    -- The second time the key is there.
    result = ciranda("multihost_runner", "--TPU_PREFIX=job", "--RUN_NAME=r1", "--COMMAND=sh main.sh")
    assert.equal(0, result.code, result.err)
    assert.is_nil(result.err:find("adding it", 1, true))
    result = ciranda("multihost_runner", "--TPU_PREFIX=job", "--SLICES=1", "--COMMAND=echo $CIRANDA_SLICE_ID")
    assert.equal("1\n", result.out, result.err)
    result = ciranda("multihost_runner", "--TPU_PREFIX=jab", "--COMMAND=true")
    assert.equal(1, result.code)
    assert.matches("no TPU node is called jab or jab-<number>", result.err, 1, true)
  end)

  it("checks a sharding before it runs, and runs it with the sizes resolved", function()
    fs.write(root .. "/code/example.py", "import sys\nprint(' '.join(sys.argv[1:]))\n")
    local result = ciranda("shardings", "--TPU_PREFIX=job", "-dd", "2", "-if", "3", "--PROGRAM=example.py")
    assert.equal(2, result.code)
    assert.matches("ici_fsdp=3 multiplies to 3, but there are 4 devices", result.err, 1, true)
    result =
      ciranda("shardings", "--TPU_PREFIX=job", "-dd", "1", "-df", "2", "-if", "4", "--PROGRAM=example.py")
    assert.equal(2, result.code)
    assert.matches("shardings.py stops unless dcn_data equals", result.err, 1, true)
    result =
      ciranda("shardings", "--TPU_PREFIX=job", "-dd", "2", "-if", "-1", "-b", "1024", "--PROGRAM=example.py")
    assert.equal(0, result.code, result.err)
    assert.matches("--dcn_data_parallelism 2", result.out, 1, true)
    assert.matches("--ici_fsdp_parallelism 4", result.out, 1, true)
    assert.matches("--batch_size 1024", result.out, 1, true)
    result = ciranda("shardings", "--TPU_PREFIX=job", "-dd", "2", "-if", "4")
    assert.equal(127, result.code)
    assert.matches("MaxText's shardings example is not here", result.err .. result.out, 1, true)
  end)

  it("makes, lists, describes, waits for and deletes a queued resource", function()
    local result = ciranda("qr", "create", "q1", "--accelerator-type=v5litepod-4", "--node-count=2", "--spot")
    assert.equal(0, result.code, result.err)
    assert.matches("q1 is ACTIVE, and its nodes are READY: q1-0, q1-1", result.err, 1, true)
    result = ciranda("qr", "list")
    assert.matches("^NAME +ZONE +NODE_COUNT +ACCELERATOR_TYPE +STATE\n", result.out)
    assert.matches("q1 +us%-west4%-a +2 +v5litepod%-4 +ACTIVE\n", result.out)
    assert.equal("ACTIVE", state_of("q1"))
    local described = json.decode(ciranda("qr", "describe", "q1").out)
    assert.is_table(described.spot)
    -- Asked for again it is the same one, not a second.
    result = ciranda("qr", "create", "q1", "--accelerator-type=v5litepod-4", "--node-count=2", "--spot")
    assert.equal(0, result.code, result.err)
    assert.equal("q1\n", ciranda("qr", "list", "--filter=name:q1", "--format=value(name.basename())").out)
    result = ciranda("qr", "delete", "q1")
    assert.equal(0, result.code, result.err)
    assert.is_nil(state_of("q1"))
    assert.matches(
      "There is no queued resource q1 in zone us-west4-a of project ",
      ciranda("qr", "delete", "q1").err,
      1,
      true
    )
    result = ciranda("qr", "create", "q2", "--accelerator-type=v9-4")
    assert.equal(2, result.code)
    assert.equal("2\tusage\n", ciranda("runs", "--filter=name=q2", "--format=value(status,kind)").out)
    result = ciranda("qr", "crate", "q2")
    assert.equal(2, result.code)
    assert.matches("none of create, list", result.err, 1, true)
  end)

  it("asks again when a queued resource FAILED with some of its slices up", function()
    local function fault()
      local body = '{"kind": "stockout", "name": "half", "slice": 1}'
      local url = simulator.env.CIRANDA_SIM_URL .. "/sim/v1/faults"
      assert.equal(0, process.run({ "curl", "-sSf", "--data-binary", body, url }).code)
    end
    fault()
    local words = { "qr", "create", "half", "--accelerator-type=v5litepod-4", "--node-count=2", "--pause=1s" }
    local result = ciranda(table.unpack(words))
    assert.equal(0, result.code, result.err)
    assert.matches(
      "half in us-west4-a is FAILED and 1 of its 2 slices are up: deleting it with force, "
        .. "then asking again in 1 s (2 of 3)",
      result.err,
      1,
      true
    )
    assert.matches("half is ACTIVE, and its nodes are READY: half-0, half-1", result.err, 1, true)
    assert.equal(0, ciranda("qr", "delete", "half").code)
    fault()
    table.insert(words, "--tries=1")
    result = ciranda(table.unpack(words))
    assert.equal(1, result.code, result.err)
    assert.matches("slices are up: deleting it with force\n", result.err, 1, true)
    assert.matches("no more capacity", result.err, 1, true)
    assert.is_nil(state_of("half"))
    assert.equal("Nothing that our runs have made is left.\n", ciranda("gc").out)
  end)

  it("tells of a wait that is vain what to do, and does it when it may", function()
    local function post(what, body)
      local url = simulator.env.CIRANDA_SIM_URL .. "/sim/v1/" .. what
      assert.equal(0, process.run({ "curl", "-sSf", "--data-binary", body, url }).code)
    end
    local words = { "--accelerator-type=v5litepod-4", "--node-count=2", "--spot", "--async" }
    post("faults", '{"kind": "stockout", "name": "part", "slice": 1}')
    assert.equal(0, ciranda("qr", "create", "part", table.unpack(words)).code)
    local result = ciranda("qr", "wait", "part", "--zone=us-west4-a")
    assert.equal(1, result.code, result.err)
    assert.matches(
      "until it is deleted: ciranda qr delete part --zone=us-west4-a; ciranda qr wait part --zone=us-west4-a "
        .. "--recreate=1 deletes it",
      result.err,
      1,
      true
    )
    assert.equal("FAILED", state_of("part"))
    result = ciranda("qr", "wait", "part", "FAILED", "--recreate=1")
    assert.equal(2, result.code, result.err)
    result = ciranda("qr", "wait", "part", "--recreate=1", "--pause=1s")
    assert.equal(0, result.code, result.err)
    assert.matches("Deleting it and asking for it again (1 of --recreate=1)", result.err, 1, true)
    assert.matches("part is ACTIVE\n", result.err, 1, true)
    local described = json.decode(ciranda("qr", "describe", "part").out)
    assert.is_table(described.spot)
    assert.equal("part-1", described.tpu.nodeSpec[2].nodeId)
    -- Taken away, and then what nobody can mend by asking again: told, with the command that frees the quota.
    post("faults", '{"kind": "quota", "name": "part"}')
    post("nodes/part-0:preempt", '{"notice": 0}')
    result = ciranda("qr", "wait", "part", "--recreate=3")
    assert.equal(1, result.code, result.err)
    assert.matches(
      "part is SUSPENDED: its machines and what was on their disks are gone",
      result.err,
      1,
      true
    )
    assert.is_nil(result.err:find("(2 of", 1, true))
    assert.matches("until it is deleted: ciranda qr delete part\n", result.err, 1, true)
    assert.equal("FAILED", state_of("part"))
    assert.equal(0, ciranda("qr", "delete", "part").code)
    assert.equal("Nothing that our runs have made is left.\n", ciranda("gc").out)
  end)

  it("forgets nothing that a killed program asked for: gc finds it and deletes it", function()
    local argv = command({ "qr", "create", "lost", "--accelerator-type=v5litepod-4", "--node-id=lost" })
    argv.timeout, argv.stdout, argv.stderr = nil, process.DISCARD, process.DISCARD
    local program = process.spawn(argv)
    local deadline = uv.hrtime() + 30e9
    while not state_of("lost") and uv.hrtime() < deadline do
      task.sleep(0.05)
    end
    uv.kill(program.pid, "sigkill")
    program:wait()
    program:close()
    local listed = ciranda("gc")
    assert.equal(0, listed.code, listed.err)
    assert.matches("lost +lost +us%-west4%-a +%d+[sm] +[04] +%u[%u_]+ +a job +keep", listed.out)
    assert.matches(
      "1 count against the quota of queued resources, and [04] chips against that of TPUs",
      listed.err
    )
    local result = ciranda("gc", "--DELETE=true", "--ALL=true")
    assert.equal(0, result.code, result.err)
    assert.is_nil(state_of("lost"))
    assert.equal("Nothing that our runs have made is left.\n", ciranda("gc").out)
  end)

  it("leaves alone what somebody else made under a name of ours", function()
    local journal = root .. "/state/ciranda/runs/q3/journal.jsonl"
    local made = ciranda("qr", "create", "q3", "--accelerator-type=v5litepod-4", "--node-id=q3")
    assert.equal(0, made.code, made.err)
    fs.write(
      journal,
      '{"fact":"object","kind":"queued_resource","name":"q3","phase":"intent","project":"simulated-project",'
        .. '"request_id":"11111111-2222-3333-4444-555555555555","us":1,"zone":"us-west4-a"}\n'
    )
    local result = ciranda("gc", "--DELETE=true")
    assert.matches("not ours +nobody +forget", result.out)
    assert.equal("ACTIVE", state_of("q3"))
    assert.equal(0, ciranda("qr", "delete", "q3").code)
  end)
end)
