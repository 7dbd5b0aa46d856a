-- The whole program on the simulated cloud: `ciranda run --sim multihost_runner`, as a person would type it.
local fs = require("ciranda.io.fs")
local patience = dofile("tests/fixtures/patience.lua")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

describe("run --sim multihost_runner", function()
  local directory

  before_each(function()
    directory = fs.tempdir()
    for _, name in ipairs({ "home", "tmp", "code" }) do
      fs.mkdir(directory .. "/" .. name)
    end
  end)
  after_each(function()
    fs.remove_tree(directory)
  end)

  --- Options of process for a ciranda that keeps everything in our directory.
  local function options(command)
    return {
      BINARY,
      "run",
      "--sim",
      "multihost_runner",
      "--TPU_PREFIX=job",
      "--RUN_NAME=r1",
      "--FAILURE_GRACE=3",
      "--COMMAND=" .. command,
      cwd = directory .. "/code",
      env = {
        HOME = directory .. "/home",
        TMPDIR = directory .. "/tmp",
        XDG_STATE_HOME = false,
        XDG_CONFIG_HOME = false,
        XDG_CACHE_HOME = false,
        SSH_AUTH_SOCK = false,
      },
    }
  end

  local function run(command)
    local argv = options(command)
    argv.timeout = 240
    return process.run(argv)
  end

  local function proc(pid, name)
    local handle = io.open(("/proc/%s/%s"):format(pid, name), "rb")
    local text = handle and handle:read("a") or ""
    if handle then
      handle:close()
    end
    return text
  end

  --- Processes that have to do with our directory: by command line, environment, working or root directory.
  local function ours()
    local found = {}
    for _, entry in ipairs(fs.list("/proc")) do
      local pid = entry.name
      if pid:find("^%d+$") and tonumber(pid) ~= uv.os_getpid() then
        local text = proc(pid, "cmdline") .. proc(pid, "environ")
        for _, link in ipairs({ "cwd", "root" }) do
          text = text .. (uv.fs_readlink(("/proc/%s/%s"):format(pid, link)) or "")
        end
        if text:find(directory, 1, true) then
          found[pid] = proc(pid, "cmdline"):gsub("%z", " ")
        end
      end
    end
    return found
  end

  -- The simulator's keeper may outlive the program by what it needs to end everything.
  local function assert_nothing_left()
    local left
    patience.wait_for(function()
      local list = {}
      for pid, command in pairs(left) do
        table.insert(list, pid .. " " .. command)
      end
      return "the end of these processes: " .. table.concat(list, "; ")
    end, function()
      left = ours()
      return next(left) == nil
    end)
  end

  it("runs the command on all eight workers, brings logs and status home, leaves nothing", function()
    fs.write(directory .. "/code/where.sh", 'echo "$CIRANDA_SLICE_ID $CIRANDA_WORKER_ID $(pwd) $HOME"\n')
    local result = run("sh where.sh")
    assert.equal(0, result.code, result.stderr)
    assert.matches("2 slices found.", result.stderr, 1, true)
    assert.matches("Multihost runner finished successfully!", result.stderr, 1, true)
    assert.not_matches("failed", result.stderr)
    local homes = {}
    for slice = 0, 1 do
      for worker = 0, 3 do
        local log = fs.read(("%s/tmp/r1/output_slice_%04d_worker_%04d.txt"):format(directory, slice, worker))
        local place, home = log:match(("^%d %d (%%S+) (%%S+)\n$"):format(slice, worker))
        assert.is_truthy(place, log)
        assert.equal(home .. "/r1", place)
        table.insert(homes, home)
      end
    end
    assert.equal(8, #homes)
    assert.matches("^0 0 ", result.stdout) -- what slice 0 worker 0 printed, raw
    assert_nothing_left()
  end)

  it("names the worker that dies of SIGKILL first, and ends with 137", function()
    local slice, worker = math.random(0, 1), math.random(0, 3)
    local result = run(
      ('sleep 0.5; if [ "$CIRANDA_SLICE_ID.$CIRANDA_WORKER_ID" = %d.%d ]; then kill -9 $$; fi; sleep 60'):format(
        slice,
        worker
      )
    )
    assert.equal(137, result.code, result.stderr)
    local first
    for line in result.stderr:gmatch("[^\n]+") do
      if line:find("[Ff]ail") or line:find("SIGKILL") then
        first = line
        break
      end
    end
    assert.equal(
      ("Main command failed on slice %d worker %d with error code 137 (SIGKILL), see logs for details"):format(
        slice,
        worker
      ),
      first
    )
    assert.matches("Main command finished with errors, check the logs located in: ", result.stderr, 1, true)
  end)

  it("ends with the status of the worker that exits 7, also where no slices are named", function()
    local argv = options('[ "$CIRANDA_SLICE_ID.$CIRANDA_WORKER_ID" = 1.0 ] && exit 7; sleep 60')
    assert.equal("--TPU_PREFIX=job", table.remove(argv, 5))
    argv.timeout = 240
    local result = process.run(argv)
    assert.equal(7, result.code, result.stderr)
    assert.matches(
      "Main command failed on slice 1 worker 0 with error code 7, see logs",
      result.stderr,
      1,
      true
    )
  end)

  it("runs each worker under an sshd of its own, with host key and home of its own", function()
    local argv = options("sleep 600")
    argv.stdout, argv.stderr = process.DISCARD, process.DISCARD
    local runner <close> = process.spawn(argv)
    local workers = {}
    patience.wait_for("eight workers", function()
      task.sleep(0.3)
      workers = {}
      for _, entry in ipairs(fs.list("/proc")) do
        local environment = entry.name:find("^%d+$") and proc(entry.name, "environ") or ""
        if proc(entry.name, "cmdline") == "sleep\000600\0" and environment:find(directory, 1, true) then
          table.insert(workers, { pid = entry.name, environment = "\0" .. environment })
        end
      end
      return #workers == 8
    end)

    local seen = { home = {}, sshd = {}, key = {} }
    for _, worker in ipairs(workers) do
      local home = worker.environment:match("%zHOME=([^%z]*)")
      -- Workers may all have the same path, each in a root of its own: what counts is the directory itself.
      local stat = assert(uv.fs_stat(("/proc/%s/root%s"):format(worker.pid, home)))
      seen.home[stat.dev .. ":" .. stat.ino] = true
      -- SSH_CONNECTION holds the address and port that the client came to: the worker's own.
      local address, port = worker.environment:match("%zSSH_CONNECTION=%S+ %S+ (%S+) (%d+)")
      assert.is_truthy(address, "no sshd set SSH_CONNECTION for " .. worker.pid)
      seen.sshd[address] = true
      local key = process.run({ "ssh-keyscan", "-T", "60", "-t", "ed25519", "-p", port, address }).stdout
      seen.key[key:match("ssh%-ed25519 (%S+)") or "none at " .. address] = true
    end
    for what, set in pairs(seen) do
      local count = 0
      for key in pairs(set) do
        assert.not_matches("^none", key)
        count = count + 1
      end
      assert.equal(8, count, what)
    end
    runner:signal("SIGKILL")
    runner:wait()
    assert_nothing_left()
  end)

  it("ends with 143 after SIGTERM, all workers told, and leaves nothing", function()
    -- Nothing is forked after "up": a child that is not yet what it will be counts as a shell, and gets its signal.
    local argv = options([[
      trap 'echo told; exit 5' TERM
      sleep 600 &
      until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done
      echo up
      wait]])
    argv.stdout, argv.stderr = process.DISCARD, process.DISCARD
    local function logs_are(text)
      for slice = 0, 1 do
        for worker = 0, 3 do
          local path = ("%s/tmp/r1/output_slice_%04d_worker_%04d.txt"):format(directory, slice, worker)
          if not fs.exists(path) or fs.read(path) ~= text then
            return false
          end
        end
      end
      return true
    end
    local runner <close> = process.spawn(argv)
    patience.wait_for("eight workers", function()
      return logs_are("up\n")
    end)
    runner:signal("SIGTERM")
    local result = task.timeout(240, runner.wait, runner)
    assert.equal(143, result.code)
    assert.is_true(logs_are("up\ntold\n"))
    assert_nothing_left()
  end)
end)
