--- bench-run: from a command to the first line of all workers, against the steps of MaxText's multihost_runner.py done
--- with OpenSSH: the same sshd (the simulator's) and key; alternating; the last line is JSON.
---
--- The peer runs twice a round. As it comes, which is what somebody who types the script's command gets: ssh and scp
--- choose their own algorithms, of which OpenSSH's key exchange since 9.0 (sntrup761x25519) is by far the dearest thing
--- that either side does. And with the algorithms of our client (`_same_algorithms`), which compares the two programs
--- and not the two key exchanges.
---
--- Both are told who the workers are, so no cloud API is asked by either, and the script's look once a second is left
--- out. The code is new in every round, as it is for somebody who is changing it: nobody finds it on the workers.
--- CPU is that of the client and of every process it started, from its beginning to its end.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program to measure")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local SCRATCH = assert(arg[1], "a scratch directory is expected")
local HERE = fs.realpath(arg[0]:match("^(.*)/[^/]*$") or ".")
local sim_workers = dofile(HERE .. "/../fixtures/sim_workers.lua")
local LIMIT = 900 -- s, for everything
local RUN_LIMIT = 120 -- s, for one run
local LOOK = 0.005 -- s between two looks at the logs
local WORKERS_PER_SLICE = 4
local COMMAND = "echo ready"
local SIDES = { "ours", "peer", "same" } -- same: the peer with our algorithms
local SOURCE = { "tests/fixtures/trainer", "lua/ciranda/mesh", "recipes" } -- what is sent: of the size of a trainer

-- The algorithms that ciranda's client and OpenSSH's server agree on, for the peer that is to have the same.
local ALGORITHMS = {
  "KexAlgorithms=curve25519-sha256",
  "Ciphers=chacha20-poly1305@openssh.com",
  "HostKeyAlgorithms=ssh-ed25519",
}
local FLAGS = {
  "BatchMode=yes",
  "Compression=no",
  "GSSAPIAuthentication=no",
  "IdentitiesOnly=yes",
  "LogLevel=ERROR",
  "PreferredAuthentications=publickey",
  "StrictHostKeyChecking=yes",
  "UpdateHostKeys=no",
}

local function median(list)
  table.sort(list)
  local middle = #list // 2
  return #list % 2 == 1 and list[middle + 1] or (list[middle] + list[middle + 1]) / 2
end

--- A key of the kind that gcloud makes; returns its path.
local function make_key()
  local path = SCRATCH .. "/home/.ssh/google_compute_engine"
  fs.mkdir_p(SCRATCH .. "/home/.ssh", 448)
  process.run({ "ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", path, timeout = 60 }):check()
  return path
end

--- The workers of a simulator, their keys written to known_hosts.
local function workers_of(simulator)
  local workers, lines = sim_workers.of(simulator), {}
  for _, worker in ipairs(workers) do
    for _, key in ipairs(worker.keys) do
      table.insert(lines, ("[%s]:%s %s\n"):format(worker.address, simulator.env.CIRANDA_SSH_PORT, key))
    end
  end
  fs.write(SCRATCH .. "/home/.ssh/known_hosts", table.concat(lines))
  return workers
end

local function log_name(worker)
  return ("output_slice_%04d_worker_%04d.txt"):format(worker.slice, worker.worker)
end

--- Runs a client; returns the seconds until every log had a line, and the seconds of CPU until its end.
local function measure(name, argv, environment, logs, workers)
  local times, said = SCRATCH .. "/times", SCRATCH .. "/said"
  local command = {
    "bash",
    "-c",
    'TIMEFORMAT="%3U %3S"; { time "$@" >"$SAID" 2>&1; } 2>"$TIMES"',
    "bash",
    env = { TIMES = times, SAID = said },
  }
  for key, value in pairs(environment) do
    command.env[key] = value
  end
  table.move(argv, 1, #argv, 5, command)
  local began = uv.hrtime()
  local child <close> = process.spawn(command)
  local scope <close> = task.scope()
  local waiting = scope:spawn(child.wait, child)
  local wall = task.timeout(RUN_LIMIT, function()
    local place = 1
    while true do
      while place <= #workers do
        local stat = uv.fs_stat(logs .. "/" .. log_name(workers[place]))
        if not stat or stat.size == 0 then
          break
        end
        place = place + 1
      end
      if place > #workers then
        return (uv.hrtime() - began) / 1e9
      elseif waiting:status() == "done" then
        return nil
      end
      task.sleep(LOOK)
    end
  end)
  local result = task.timeout(RUN_LIMIT, waiting.wait, waiting)
  if result.code ~= 0 or not wall then
    error(("%s ended with %s:\n%s"):format(name, result.code or result.signal, fs.read(said)), 0)
  end
  for _, worker in ipairs(workers) do
    local text = fs.read(logs .. "/" .. log_name(worker))
    assert(text == "ready\n", ("%s: %s holds %q"):format(name, log_name(worker), text))
  end
  local user, system = fs.read(times):match("([%d.]+) ([%d.]+)")
  return wall, tonumber(user) + tonumber(system)
end

--- The words that give ssh and scp their options.
---@param lists string[][]
local function ssh_options(key, lists)
  local options = { "-F", "/dev/null", "-i", key }
  for _, list in ipairs(lists) do
    for _, option in ipairs(list) do
      table.insert(options, "-o")
      table.insert(options, option)
    end
  end
  return table.concat(options, " ")
end

--- Measures each with `count` workers; returns the figures.
local function compare(count, rounds)
  local key = SCRATCH .. "/home/.ssh/google_compute_engine"
  local user = uv.os_get_passwd().username
  local simulator <close> = sim.start({
    slices = count // WORKERS_PER_SLICE,
    prefix = "bench",
    ssh_keys = user .. ":" .. fs.read(key .. ".pub"):match("^[^\n]+"),
  })
  local workers = workers_of(simulator)
  assert(#workers == count, ("%d workers, not %d"):format(#workers, count))
  local port = simulator.env.CIRANDA_SSH_PORT
  local settings =
    { "Port=" .. port, "User=" .. user, "UserKnownHostsFile=" .. SCRATCH .. "/home/.ssh/known_hosts" }
  local options = {
    peer = ssh_options(key, { settings, FLAGS }),
    same = ssh_options(key, { settings, FLAGS, ALGORITHMS }),
  }
  local peer_hosts, our_hosts = {}, {}
  for place, worker in ipairs(workers) do
    peer_hosts[place] = ("%s %s\n"):format(worker.address, log_name(worker))
    our_hosts[place] = ("%s slice=%d worker=%d\n"):format(worker.address, worker.slice, worker.worker)
  end
  fs.write(SCRATCH .. "/peer_hosts", table.concat(peer_hosts))
  fs.write(SCRATCH .. "/our_hosts", table.concat(our_hosts))

  local source = SCRATCH .. "/source"
  local seconds = {}
  for _, side in ipairs(SIDES) do
    seconds[side] = { wall = {}, cpu = {} }
  end
  for round = 0, rounds do
    for _, side in ipairs(SIDES) do
      fs.write(source .. "/round.txt", ("%s %d %d %d\n"):format(side, count, round, uv.hrtime()))
      local run = ("%s-%d-%d"):format(side, count, round)
      local logs = SCRATCH .. "/tmp/" .. run
      local wall, cpu
      if side == "ours" then
        wall, cpu = measure("ciranda", {
          BINARY,
          "multihost_runner",
          "--HOSTS_FILE=" .. SCRATCH .. "/our_hosts",
          "--RUN_NAME=" .. run,
          "--SCRIPT_DIR=" .. source,
          "--COMMAND=" .. COMMAND,
          "--ssh-key=" .. key,
        }, { CIRANDA_SSH_PORT = port }, logs, workers)
      else
        wall, cpu = measure("the peer", {
          "sh",
          HERE .. "/run/peer.sh",
          run,
          source,
          logs,
          SCRATCH .. "/peer_hosts",
          COMMAND,
        }, { SSH_OPTIONS = options[side] }, logs, workers)
      end
      io.stderr:write(
        ("%d workers, round %d, %s: %.0f ms to the first line of all, %.0f ms CPU\n"):format(
          count,
          round,
          side,
          wall * 1000,
          cpu * 1000
        )
      )
      if round > 0 then -- the first one warms up
        table.insert(seconds[side].wall, wall)
        table.insert(seconds[side].cpu, cpu)
      end
    end
  end
  return seconds
end

local function main()
  make_key()
  fs.mkdir_p(SCRATCH .. "/source")
  for _, part in ipairs(SOURCE) do
    process.run({ "cp", "-R", HERE .. "/../../" .. part, SCRATCH .. "/source", timeout = 60 }):check()
  end
  local figures = {
    bench = "run",
    rounds = SHORT and 1 or 5,
    command = COMMAND,
    peer = "tar, one scp a host, one ssh a host, all at once (OpenSSH)",
    peer_options = json.array(table.move(FLAGS, 1, #FLAGS, 1, {})),
    same_algorithms = json.array(table.move(ALGORITHMS, 1, #ALGORITHMS, 1, {})),
    peer_poll_s = 1, -- of the Python script, in none of the times
  }
  for _, count in ipairs(SHORT and { 8 } or { 8, 64 }) do
    local seconds = compare(count, figures.rounds)
    local our_cpu, our_wall = median(seconds.ours.cpu), median(seconds.ours.wall)
    figures["cpu_ms_per_worker_" .. count] = our_cpu * 1000 / count
    figures["wall_ms_" .. count] = our_wall * 1000
    for side, suffix in pairs({ peer = "", same = "_same_algorithms" }) do
      local peer_cpu, peer_wall = median(seconds[side].cpu), median(seconds[side].wall)
      figures["ratio_cpu_" .. count .. suffix] = peer_cpu / our_cpu
      figures["ratio_wall_" .. count .. suffix] = peer_wall / our_wall
      figures["peer_cpu_ms_per_worker_" .. count .. suffix] = peer_cpu * 1000 / count
      figures["peer_wall_ms_" .. count .. suffix] = peer_wall * 1000
    end
    figures.cpu_ms_per_worker = our_cpu * 1000 / count -- of the largest count
  end
  print(json.encode(figures))
end

task.timeout(LIMIT, main)
