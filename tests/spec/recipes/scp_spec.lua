-- scp: files to and from simulated slices, whose workers have real sshds.
local fs = require("ciranda.io.fs")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/cloud_support.lua")
local task = require("ciranda.task")
local uv = require("luv")

describe("scp", function()
  local cloud, code

  setup(function()
    cloud = support.start({ slices = 1, type = "v5litepod-16", prefix = "job", buckets = { "bucket" } })
    code = cloud.root .. "/code"
    fs.write(code .. "/run.sh", "echo run\n", { mode = 493 })
    fs.write(code .. "/a:b", "colon\n")
    fs.mkdir(code .. "/pkg")
    fs.write(code .. "/pkg/mod.py", "x = 1\n")
    fs.symlink("mod.py", code .. "/pkg/link.py")
  end)

  teardown(function()
    cloud:stop()
  end)

  local function on_workers(command)
    return cloud:run("ssh", "job", "--worker=all", "--command=" .. command).out
  end

  it("copies files into the home, a directory or a name, with their modes", function()
    for target, path in pairs({
      ["job:"] = "run.sh",
      ["job:~"] = "run.sh",
      ["job:~/other.sh"] = "other.sh",
      ["job:/var/tmp"] = "/var/tmp/run.sh",
    }) do
      local result = cloud:run("scp", "run.sh", target, "--worker=all")
      assert.equal(0, result.code, result.err)
      assert.matches("run.sh is on slice0/worker[0-3]\n", result.err, 1, true)
      local said = on_workers(("[ -x %s ] && cat %s; rm -f %s"):format(path, path, path))
      assert.matches("slice0/worker%[0%-3%] %(4%)\n%-+\necho run\n", said, nil, target)
    end
  end)

  it("takes several sources, and a local name with a colon", function()
    local result = cloud:run("scp", "run.sh", "./a:b", "job:", "--worker=1")
    assert.equal(0, result.code, result.err)
    assert.equal("a:b\nrun.sh\n", cloud:run("ssh", "job", "--worker=1", "--command=ls; rm a:b run.sh").out)
    result = cloud:run("scp", "run.sh", "./a:b", "job:nowhere", "--worker=1")
    assert.equal(1, result.code)
    assert.matches(
      "user: 1 of 1 workers failed; slice 0 worker 1: nowhere is no directory there",
      result.err,
      1,
      true
    )
  end)

  it("copies directories with --recurse: onto a new name, into one that is there", function()
    local refused = cloud:run("scp", "pkg", "job:new")
    assert.equal(2, refused.code)
    assert.matches("pkg is a directory; add --recurse", refused.err, 1, true)
    for _, path in ipairs({ "new", "new/pkg" }) do
      local result = cloud:run("scp", "--worker=all", "--recurse", "pkg", "job:new")
      assert.equal(0, result.code, result.err)
      local said = on_workers(("cat %s/mod.py; readlink %s/link.py"):format(path, path))
      assert.matches("(4)\n---------------\nx = 1\nmod.py\n", said, 1, true)
    end
    on_workers("rm -r new")
  end)

  it(
    "brings files from one worker to where they are asked for, from several into a directory each",
    function()
      on_workers("mkdir -p out/deep; hostname > out/deep/name; echo log > log")
      local result = cloud:run("scp", "job:log", "here.txt", "--worker=2")
      assert.equal(0, result.code, result.err)
      assert.equal("log\n", fs.read(code .. "/here.txt"))
      assert.equal(0, cloud:run("scp", "job:~/log", ".", "--worker=2").code)
      assert.equal("log\n", fs.read(code .. "/log"))
      assert.equal(2, cloud:run("scp", "job:out", "back").code)
      result = cloud:run("scp", "job:out", "back", "--recurse", "--worker=all")
      assert.equal(0, result.code, result.err)
      for worker = 0, 3 do
        local text = fs.read(("%s/back/slice_0000_worker_%04d/out/deep/name"):format(code, worker))
        assert.matches(("-w-%d\n"):format(worker), text, 1, true)
      end
    end
  )

  it("lets the workers fetch a directory from a bucket; who cannot gets it directly", function()
    fs.mkdir(code .. "/by")
    fs.write(code .. "/by/big", ("0123456789abcdef"):rep(65536))
    local words = { "scp", "--recurse", "by", "job:", "--worker=all", "--via=gs://bucket/tmp" }
    local result = cloud:run(table.unpack(words))
    assert.equal(0, result.code, result.err)
    assert.is_nil(result.err:find("could not fetch", 1, true), result.err)
    local gets = 0
    local log = http.request({ method = "GET", url = cloud.simulator.url .. "/sim/v1/requests" })
    for _, request in ipairs(json.decode(log.body).requests) do
      if request.path:find("ciranda-push-", 1, true) and request.client:find("curl", 1, true) then
        gets = gets + 1
      end
    end
    assert.equal(4, gets)
    local sizes = on_workers("stat -c '%s %n' by/big")
    assert.matches("slice0/worker[0-3] (4)\n---------------\n1048576 by/big\n", sizes, 1, true)
    -- No object is left, and nothing in the workers' homes.
    local chunk = 'print(#(require("ciranda.gcp.storage").connect():list("bucket", {})))'
    assert.equal("0\n", cloud:run("eval", chunk).out)
    assert.is_nil(on_workers("ls -a"):find("ciranda-push", 1, true))

    -- Where curl does not work.
    on_workers(
      "mkdir -p bin && printf '#!/bin/sh\\nexit 6\\n' > bin/curl && chmod 755 bin/curl && "
        .. "echo 'PATH=$HOME/bin:$PATH' > .bashrc"
    )
    fs.write(code .. "/by/more", "more\n")
    result = cloud:run(table.unpack(words))
    on_workers("rm -r bin .bashrc")
    assert.equal(0, result.code, result.err)
    assert.matches("slice 0 worker %d could not fetch from gs://bucket/tmp %(", result.err)
    assert.matches("(4)\n---------------\nmore\n", on_workers("cat by/more"), 1, true)
    assert.equal(2, cloud:run("scp", "run.sh", "job:", "--via=gs://bucket").code)
    assert.equal(2, cloud:run("scp", "--recurse", "by", "job:", "--via=gs://").code)
  end)

  it("brings a directory from worker to worker, and leaves nothing when the runner is killed", function()
    local addresses = {}
    for address in on_workers("echo $SSH_CONNECTION"):gmatch("%S+ %d+ (%S+ %d+)\n") do
      table.insert(addresses, " " .. address .. "\0")
    end
    assert.equal(4, #addresses)

    --- The programs that pass files on, on this simulator's workers.
    local function programs()
      local count = 0
      for _, entry in ipairs(fs.list("/proc")) do
        local ok, line = pcall(fs.read, "/proc/" .. entry.name .. "/cmdline")
        if ok and line:find("^[^%z]*python3%z%-ISc%z\n?# ciranda%-push") then
          local known, environment = pcall(fs.read, "/proc/" .. entry.name .. "/environ")
          for _, address in ipairs(addresses) do
            count = count + (known and environment:find(address, 1, true) and 1 or 0)
          end
        end
      end
      return count
    end

    fs.mkdir(code .. "/tree")
    fs.write(code .. "/tree/big", require("ciranda.io.crypto").random(600000))
    local words = { "scp", "--recurse", "tree", "job:", "--worker=all", "--via=workers:1" }
    local result = cloud:run(table.unpack(words))
    assert.equal(0, result.code, result.err)
    assert.is_nil(result.err:find("could not fetch", 1, true), result.err)
    local sum = process.run({ "sha256sum", "tree/big", cwd = code }).stdout
    assert.matches(
      "slice0/worker[0-3] (4)\n---------------\n" .. sum,
      on_workers("sha256sum tree/big"),
      1,
      true
    )

    -- A worker whose tar never ends: all have the files and wait to be asked for them.
    on_workers(
      "rm -r tree; [ $(hostname | tail -c 2) != 3 ] || { mkdir -p bin && printf '#!/bin/sh\\nexec sleep 1000\\n' "
        .. "> bin/tar && chmod 755 bin/tar && echo 'PATH=$HOME/bin:$PATH' > .bashrc; }"
    )
    local running = cloud:start_program(table.unpack(words))
    local function wait_for(count)
      local deadline = uv.hrtime() + 60e9
      while programs() ~= count do
        assert(
          uv.hrtime() < deadline,
          ("%d programs, not %d: %s"):format(programs(), count, running.errors())
        )
        task.sleep(0.05)
      end
    end
    wait_for(4)
    running.program:signal("SIGKILL")
    running.wait()
    wait_for(0)
    assert.is_nil(on_workers("rm -rf bin .bashrc tree; ls -a"):find("ciranda-push", 1, true))
    assert.equal(2, cloud:run("scp", "--recurse", "tree", "job:", "--via=workers:0").code)
  end)

  it("expands patterns on each worker, and says where nothing matches", function()
    on_workers(
      "mkdir -p g/a g/b g/.c; hostname > g/a/1.log; echo 2 > g/b/2.log; echo 3 > g/.c/3.log; echo x > 'g/[a].log'"
    )
    local result = cloud:run("scp", "job:g/*/[12].lo?", "globbed", "--worker=0-1")
    assert.equal(0, result.code, result.err)
    for worker = 0, 1 do
      local own = ("%s/globbed/slice_0000_worker_%04d/"):format(code, worker)
      assert.matches(("-w-%d\n"):format(worker), fs.read(own .. "1.log"), 1, true)
      assert.equal("2\n", fs.read(own .. "2.log"))
      assert.is_nil(fs.exists(own .. "3.log"))
    end
    fs.mkdir(code .. "/one")
    assert.equal(0, cloud:run("scp", "job:~/g/[!x]/*.log", "one").code)
    assert.equal("2\n", fs.read(code .. "/one/2.log"))
    assert.equal(0, cloud:run("scp", "job:g/[a].log", "one/literal").code)
    assert.equal("x\n", fs.read(code .. "/one/literal"))
    -- Directories need --recurse here too, and a pattern needs a directory.
    result = cloud:run("scp", "job:g/*", "one")
    assert.equal(2, result.code)
    assert.matches("is a directory on slice0/worker0; add --recurse", result.err, 1, true)
    result = cloud:run("scp", "job:g/b/*.log", "nothing-here")
    assert.equal(2, result.code)
    assert.matches("nothing-here must be a directory", result.err, 1, true)
    assert.equal(0, cloud:run("scp", "--recurse", "job:g/[ab]", "one").code)
    assert.equal("2\n", fs.read(code .. "/one/b/2.log"))
    cloud:run("ssh", "job", "--worker=1", "--command=rm g/b/2.log")
    result = cloud:run("scp", "job:g/b/*.log", "parts", "--worker=0-1")
    assert.equal(1, result.code)
    assert.matches("nothing there matches g/b/*.log", result.err, 1, true)
    assert.matches("1 of 2 workers failed; slice 0 worker 1", result.err .. result.out, 1, true)
    result = cloud:run("scp", "--recurse", "job:g/*/*.log", "job-g/x/") -- no directory
    assert.equal(2, result.code)
    on_workers("rm -r g")
  end)

  it("names who failed, keeps what worked, and gives up after a failed batch", function()
    cloud:run("ssh", "job", "--worker=1", "--command=echo x > ~/only-here")
    local result = cloud:run("scp", "job:only-here", "parts", "--worker=all")
    assert.equal(1, result.code)
    assert.matches("slice0/worker[0,2-3]: ", result.err, 1, true)
    assert.matches("only%-here", result.err)
    assert.equal("x\n", fs.read(code .. "/parts/slice_0000_worker_0001/only-here"))
    cloud:run("ssh", "job", "--worker=1", "--command=mkdir ~/taken; touch ~/taken/x")
    result = cloud:run("scp", "run.sh", "job:taken/x/y", "--worker=all", "--batch-size=2")
    assert.equal(1, result.code)
    assert.matches("Never ran, since a batch before failed: slice0/worker[2-3]", result.err, 1, true)
  end)

  it("refuses what it cannot mean", function()
    for want, arguments in pairs({
      ["are both on workers"] = { "job:a", "job:b" },
      ["neither a nor b is on a worker"] = { "a", "b" },
      ["what to copy, and where to?"] = { "run.sh" },
      ["are on different slices"] = { "job:a", "other:b", "." },
      ["another user's home"] = { "run.sh", "job:~me/x" },
      ["which slices?"] = { "run.sh", ":x" },
    }) do
      local result = cloud:run("scp", table.unpack(arguments))
      assert.equal(2, result.code, want .. ": " .. result.err)
      assert.matches(want, result.err, 1, true)
    end
    local result = cloud:run("scp", "no-such-file", "job:")
    assert.equal(1, result.code)
    assert.matches("no-such-file", result.err, 1, true)
  end)
end)
