--- e2e-logs: the workers' logs through forced disconnects. The workers are the simulator's (real sshds, real guards),
--- each behind a TCP relay of this program that cuts its connections after a drawn number of bytes. COMMAND prints
--- lines that nobody could guess and keeps a copy of every byte; the runner's files must be those copies. The last
--- line is JSON.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local task = require("ciranda.task")
local uv = require("luv")

local sim_workers = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/../fixtures/sim_workers.lua")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local SCRATCH = assert(arg[1], "a scratch directory is expected")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local WORKERS = math.tointeger(tonumber(os.getenv("CIRANDA_WORKERS") or (SHORT and 8 or 64)))
local CUTS = math.tointeger(tonumber(os.getenv("CIRANDA_CUTS") or (SHORT and 5 or 20)))
local PER_SLICE = 4
local LIMIT = 120 + WORKERS * CUTS -- s, for everything
local FEWEST, MOST = 15000, 60000 -- bytes that a connection brings before it is cut, its handshake among them

assert(WORKERS and WORKERS % PER_SLICE == 0, "CIRANDA_WORKERS is a multiple of 4")
assert(CUTS and CUTS > 0, "CIRANDA_CUTS is a number of disconnects")

--- COMMAND: one process, and no more output than makes the cuts come, since what is under test is neither how many
--- programs a machine can start nor how much it can encrypt.
local SAY = [[
import os, sys, time
while not os.path.exists(sys.argv[1]):
    text = os.urandom(2240).hex()
    sys.stdout.write("".join(text[at : at + 64] + "\n" for at in range(0, len(text), 64)))
    sys.stdout.flush()
    time.sleep(0.25)
]]

local cutting = false -- from the moment that COMMAND runs

--- A relay to a worker. Connections are cut while there are fewer than CUTS cuts.
local function relay_to(address, port)
  local relay = { cuts = 0, server = uv.new_tcp() }
  assert(relay.server:bind("127.0.0.1", 0))
  relay.port = relay.server:getsockname().port
  assert(relay.server:listen(64, function(problem)
    assert(not problem, problem)
    local near, far = uv.new_tcp(), uv.new_tcp()
    relay.server:accept(near)
    local left = math.random(FEWEST, MOST)
    local function close()
      for _, handle in ipairs({ near, far }) do
        if not handle:is_closing() then
          handle:close()
        end
      end
    end
    local function pass(from, to, count)
      from:read_start(function(trouble, bytes)
        if trouble or not bytes then
          return close()
        end
        if count and cutting and relay.cuts < CUTS then
          left = left - #bytes
          if left < 0 then
            relay.cuts = relay.cuts + 1
            -- A part of what came still arrives: the cut is in the middle of a packet, and nothing comes after it.
            from:read_stop()
            return to:write(bytes:sub(1, #bytes // 2), close)
          end
        end
        to:write(bytes)
      end)
    end
    far:connect(address, port, function(trouble)
      if trouble then
        return close()
      end
      pass(near, far)
      pass(far, near, true)
    end)
  end))
  return relay
end

--- Relays to all workers, their lines for a hosts file and for known_hosts.
local function relays(simulator)
  local list, hosts, known = {}, {}, {}
  for _, worker in ipairs(sim_workers.of(simulator)) do
    local relay = relay_to(worker.address, math.tointeger(tonumber(simulator.env.CIRANDA_SSH_PORT)))
    relay.slice, relay.worker = worker.slice, worker.worker
    list[#list + 1] = relay
    hosts[#hosts + 1] = ("127.0.0.1 slice=%d worker=%d port=%d\n"):format(
      worker.slice,
      worker.worker,
      relay.port
    )
    for _, key in ipairs(worker.keys) do
      known[#known + 1] = ("[127.0.0.1]:%d %s\n"):format(relay.port, key)
    end
  end
  fs.write(SCRATCH .. "/hosts", table.concat(hosts))
  fs.write(SCRATCH .. "/home/.ssh/known_hosts", table.concat(known))
  return list
end

local function measure()
  local key = SCRATCH .. "/home/.ssh/google_compute_engine"
  fs.mkdir_p(SCRATCH .. "/home/.ssh", 448)
  fs.mkdir_p(SCRATCH .. "/source")
  fs.write(SCRATCH .. "/source/say.py", SAY)
  process.run({ "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, timeout = 60 }):check()
  local user = uv.os_get_passwd().username
  local simulator <close> = sim.start({
    slices = WORKERS // PER_SLICE,
    prefix = "logs",
    ssh_keys = user .. ":" .. fs.read(key .. ".pub"):match("^[^\n]+"),
  })
  local shared = simulator.env.CIRANDA_SIM_SHARED
  local list = relays(simulator)
  assert(#list == WORKERS, ("%d workers, not %d"):format(#list, WORKERS))
  local out = assert(uv.fs_open(SCRATCH .. "/said", "w", 384))
  local runner <close> = process.spawn({
    BINARY,
    "multihost_runner",
    "--HOSTS_FILE=" .. SCRATCH .. "/hosts",
    "--ssh-user=" .. user,
    "--ssh-key=" .. key,
    "--RUN_NAME=cut",
    "--SCRIPT_DIR=" .. SCRATCH .. "/source",
    "--FOLLOW=all",
    ("--COMMAND=python3 say.py %s/enough | tee %s/$CIRANDA_SLICE_ID.$CIRANDA_WORKER_ID.bytes"):format(
      shared,
      shared
    ),
    stdout = out,
    stderr = out,
  })
  uv.fs_close(out)
  local scope <close> = task.scope()
  local ended
  local waiting = scope:spawn(function()
    ended = runner:wait()
  end)
  while not ended do
    local fewest, begun = math.huge, 0
    for _, relay in ipairs(list) do
      fewest = math.min(fewest, relay.cuts)
      begun = begun + (fs.exists(("%s/%d.%d.bytes"):format(shared, relay.slice, relay.worker)) and 1 or 0)
    end
    cutting = cutting or begun == WORKERS
    if fewest >= CUTS and not fs.exists(shared .. "/enough") then
      fs.write(shared .. "/enough", "")
    end
    task.sleep(0.1)
  end
  waiting:wait()
  if ended.code ~= 0 then
    -- Not the bytes of COMMAND that a failing worker shows.
    local said = fs.read(SCRATCH .. "/said"):gsub("[^\n]*%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x[^\n]*\n", "")
    error(("the run ended with %s: %s"):format(ended.code, said:sub(-8000)), 0)
  end
  local result =
    { workers = #list, disconnects = 0, identical = 0, lost_bytes = 0, doubled_bytes = 0, bytes = 0 }
  for _, relay in ipairs(list) do
    local written = fs.read(("%s/%d.%d.bytes"):format(shared, relay.slice, relay.worker))
    local here =
      fs.read(("%s/tmp/cut/output_slice_%04d_worker_%04d.txt"):format(SCRATCH, relay.slice, relay.worker))
    result.disconnects = result.disconnects + relay.cuts
    result.bytes = result.bytes + #written
    if written == here then
      result.identical = result.identical + 1
    else
      -- Equal lengths that differ: something is missing, and something is there in its place.
      result.lost_bytes = result.lost_bytes + math.max(#written - #here, #written == #here and 1 or 0)
      result.doubled_bytes = result.doubled_bytes + math.max(#here - #written, #written == #here and 1 or 0)
    end
    relay.server:close()
  end
  return result
end

local result = task.timeout(LIMIT, measure)
print(json.encode(result))
assert(result.disconnects >= WORKERS * CUTS, "too few connections were cut")
assert(result.identical == WORKERS, "logs differ")
