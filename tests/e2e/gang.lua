--- e2e-gang: many members start together or not at all; see gang.sh. What is counted is the server's: its log has when
--- each command on each worker began and ended. The last line is JSON.
---
--- In the first run every member waits until all have come, so a start in batches, or a window of any size, would wait
--- for ever. In the second one member never answers while it is staged.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program")
local SCRATCH = assert(arg[1], "a scratch directory is expected")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local SLICES = math.tointeger(tonumber(os.getenv("CIRANDA_GANG") or (SHORT and 16 or 256)))
local PER_SLICE = 4
local MEMBERS = SLICES * PER_SLICE
local LIMIT = 120 + MEMBERS -- s, for one run
local STAGE_TIMEOUT = 15 + MEMBERS // 8 -- s at least, in the run in which one member never answers
local MUTE = MEMBERS // 2 + 1

-- Each says that it has come; the last one opens the door for all.
local COMMAND = ([[printf x >> $GANG_SHARED/come;
[ $(stat -c %%s $GANG_SHARED/come) -lt %d ] || : > $GANG_SHARED/open;
until [ -e $GANG_SHARED/open ]; do sleep 3; done; echo together]]):format(MEMBERS):gsub("\n", " ")

local function say(format, ...)
  io.stderr:write(string.format(format, ...), "\n")
end

local function address(worker)
  return ("127.%d.%d.%d"):format(140 + uv.os_getpid() % 100, 1 + worker // 256, worker % 256)
end

--- Starts the server with homes of its own. Returns it and the paths of its log and of the hosts file.
local function start(name, key, host_key)
  local root = SCRATCH .. "/" .. name
  fs.mkdir_p(root .. "/shared")
  fs.write(root .. "/boot_id", "boot-1\n", { sync = false })
  local port = 20000 + uv.os_getpid() % 10000
  local pin = fs.read(host_key .. ".pub"):match("^%S+ %S+")
  local hosts, known = {}, {}
  for worker = 0, MEMBERS - 1 do
    fs.mkdir(("%s/home-%d"):format(root, worker))
    hosts[#hosts + 1] = ("%s slice=%d worker=%d port=%d\n"):format(
      address(worker),
      worker // PER_SLICE,
      worker % PER_SLICE,
      port
    )
    known[#known + 1] = ("[%s]:%d %s\n"):format(address(worker), port, pin)
  end
  fs.write(root .. "/hosts", table.concat(hosts), { sync = false })
  fs.mkdir_p(SCRATCH .. "/home/.ssh", 448)
  fs.write(SCRATCH .. "/home/.ssh/known_hosts", table.concat(known), { sync = false })
  local node = process.spawn({
    "node",
    "tests/e2e/gang/server.js",
    host_key,
    address(0),
    tostring(port),
    root,
    tostring(MEMBERS),
    root .. "/log",
    stdin = process.PIPE,
    stdout = process.PIPE,
    stderr = process.INHERIT,
  })
  local line = task.timeout(60, node.stdout.read, node.stdout)
  assert((line or ""):find("ready", 1, true), "the server does not start")
  return node,
    {
      root = root,
      key = key,
      facts = function()
        local facts = {}
        for text in fs.read(root .. "/log"):gmatch("[^\n]+") do
          facts[#facts + 1] = json.decode(text)
        end
        return facts
      end,
    }
end

--- Runs multihost_runner on a server's workers, for so many seconds at most.
local function run(place, name, arguments, limit)
  local began = uv.hrtime()
  local words = {
    BINARY,
    "multihost_runner",
    "--HOSTS_FILE=" .. place.root .. "/hosts",
    "--ssh-user=worker",
    "--ssh-key=" .. place.key,
    "--RUN_NAME=" .. name,
    "--SCRIPT_DIR=" .. SCRATCH .. "/code",
    timeout = limit,
  }
  table.move(arguments, 1, #arguments, #words + 1, words)
  local result = process.run(words)
  return result, (uv.hrtime() - began) / 1e9
end

--- The times of a kind of command: of its beginnings, or of its ends.
local function times(facts, kind, done)
  local first, last, workers, count = math.huge, -math.huge, {}, 0
  for _, fact in ipairs(facts) do
    if fact.kind == kind and fact.done == done then
      first, last = math.min(first, fact.at), math.max(last, fact.at)
      count = count + (workers[fact.worker] and 0 or 1)
      workers[fact.worker] = true
    end
  end
  return { first = first, last = last, workers = count }
end

--- How many homes have a path that matches.
local function count(place, pattern)
  local found = 0
  for worker = 0, MEMBERS - 1 do
    local listing = process.run({
      "sh",
      "-c",
      ("ls -d %s 2>/dev/null"):format(pattern),
      cwd = ("%s/home-%d"):format(place.root, worker),
    })
    found = found + (listing.stdout ~= "" and 1 or 0)
  end
  return found
end

local function together(key, host_key)
  local node <close>, place = start("together", key, host_key)
  local result, seconds = run(place, "gang", { "--COMMAND=" .. COMMAND, "--STAGE_TIMEOUT=" .. LIMIT }, LIMIT)
  assert(result.code == 0, ("the gang ended with %s:\n%s"):format(result.code, result.stderr))
  local facts = place.facts()
  local staged, go = times(facts, "place", true), times(facts, "go", false)
  assert(staged.workers == MEMBERS, ("%d members were staged"):format(staged.workers))
  assert(go.workers == MEMBERS, ("%d members were started"):format(go.workers))
  assert(
    go.first > staged.last,
    ("a member was started %.1f ms before the last was staged"):format(staged.last - go.first)
  )
  local come = fs.read(place.root .. "/shared/come")
  assert(#come == MEMBERS, ("COMMAND ran %d times"):format(#come))
  for worker = 0, MEMBERS - 1 do
    local log = ("%s/gang/output_slice_%04d_worker_%04d.txt"):format(
      os.getenv("TMPDIR"),
      worker // PER_SLICE,
      worker % PER_SLICE
    )
    assert(fs.read(log) == "together\n", log .. " is not what the member printed")
  end
  assert(count(place, "ciranda_lease.*") == 0, "leases are left")
  local said, known =
    result.stderr:match("Started on %d+ workers within (%d+) ms, by their clocks %(known to (%d+) ms%)")
  assert(said, "the skew is not told: " .. result.stderr)
  assert(node)
  say(
    "%d members, all started within %.0f ms (by themselves %s ms), %.1f s in all",
    MEMBERS,
    go.last - go.first,
    said,
    seconds
  )
  return {
    skew_ms = go.last - go.first,
    skew_told_ms = tonumber(said),
    clocks_ms = tonumber(known),
    between_ms = go.first - staged.last,
    seconds = seconds,
  }
end

--- `seconds_of_a_run` is what the first took: the others must have been staged when the mute one is given up.
local function mute(key, host_key, seconds_of_a_run)
  local node <close>, place = start("mute", key, host_key)
  fs.write(("%s/home-%d/mute"):format(place.root, MUTE), "", { sync = false })
  local patience = math.max(STAGE_TIMEOUT, 3 * math.ceil(seconds_of_a_run))
  local arguments = { "--COMMAND=" .. COMMAND, "--STAGE_TIMEOUT=" .. patience }
  local result, seconds = run(place, "mute", arguments, patience + LIMIT)
  assert(result.code == 124, ("the gang ended with %s:\n%s"):format(result.code, result.stderr))
  local facts = place.facts()
  assert(times(facts, "place", true).workers == MEMBERS - 1, "the others were not staged:\n" .. result.stderr)
  assert(times(facts, "go", false).workers == 0, "a member was started")
  assert(count(place, ".ciranda/mute/*/started") == 0, "a member was started")
  assert(not fs.exists(place.root .. "/shared/come"), "COMMAND has run")
  local name = ("slice%d/worker%d could not be staged"):format(MUTE // PER_SLICE, MUTE % PER_SLICE)
  assert(result.stderr:find(name, 1, true), "the mute member is not named:\n" .. result.stderr)
  assert(result.stderr:find("it was sending the bundle", 1, true), result.stderr)
  assert(count(place, "ciranda_lease.*") == 0, "leases are left")
  assert(node)
  say("one member never answered: none of %d was started, %.1f s in all", MEMBERS, seconds)
end

local function main()
  fs.mkdir(SCRATCH .. "/code")
  fs.write(SCRATCH .. "/code/main.txt", "code\n")
  for _, name in ipairs({ "key", "host_key" }) do
    process
      .run({ "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", SCRATCH .. "/" .. name, timeout = 60 })
      :check()
  end
  local figures = together(SCRATCH .. "/key", SCRATCH .. "/host_key")
  mute(SCRATCH .. "/key", SCRATCH .. "/host_key", figures.seconds)
  figures.e2e, figures.slices, figures.members, figures.started_with_one_mute = "gang", SLICES, MEMBERS, 0
  print(json.encode(figures))
end

task.timeout(5 * LIMIT + 120, main)
