-- bench-ssh: see tests/bench/ssh.sh.
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/ssh/support.lua")
local uv = require("luv")

local build = os.getenv("CIRANDA_BUILD") or "build"
local counts = {}
for word in (os.getenv("BENCH_HOSTS") or "64 256 1024"):gmatch("%d+") do
  counts[#counts + 1] = math.tointeger(tonumber(word))
end
local held_wanted = os.getenv("BENCH_HELD") or "4096"
local bytes = os.getenv("BENCH_BYTES") or tostring(1 << 30)
local WINDOW = 64

local figures, failed = {}, {}

local function note(format, ...)
  io.stderr:write(format:format(...), "\n")
end

--- One part of the whole. When it fails the others still report; the reason is in "failed", and in the exit status.
local function part(name, fn)
  local began = uv.hrtime()
  note("bench-ssh: %s ...", name)
  local ok, err = pcall(fn)
  if errors.is(err, "cancelled") then
    error(err, 0)
  end
  failed[name] = not ok and tostring(err) or nil
  note("bench-ssh: %s: %s after %.0f s", name, ok and "done" or tostring(err), (uv.hrtime() - began) / 1e9)
end

local function available(name)
  return process.run({ "sh", "-c", "command -v " .. name }).code == 0
end

local function median(list)
  table.sort(list)
  return list[(#list + 1) // 2]
end

-- The bare loop ---------------------------------------------------------------------------------------------------

local function compile_bare()
  local prefix = build .. "/deps/libssh2"
  if not fs.exists(prefix .. "/lib/libssh2.a") then
    prefix = "build/deps/libssh2"
  end
  local static = fs.exists(prefix .. "/lib/libssh2.a")
  local path = build .. "/bench-ssh-bare"
  local command = { "cc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Iengine" }
  if static then
    command[#command + 1] = "-I" .. prefix .. "/include"
  end
  for _, word in ipairs({
    "tests/bench/ssh/bare.c",
    "engine/ssh_key.c",
    "engine/ssh_key_openssh.c",
    "engine/ssh_bcrypt.c",
    static and prefix .. "/lib/libssh2.a" or "-lssh2",
    "-lcrypto",
    "-o",
    path,
  }) do
    command[#command + 1] = word
  end
  process.run(command):check()
  return path
end

local bare_path = compile_bare()

--- Milliseconds of CPU a host, and seconds.
local function bare(...)
  local said = process.run({ bare_path, ... }):check().stdout
  return tonumber(said:match("cpu_ms ([%d.]+)")), tonumber(said:match("wall_s ([%d.]+)"))
end

local function ours(kind, count, window, port, user, key, host_key)
  local result = process.run({
    engine.executable,
    "tests/bench/ssh/fan.lua",
    kind,
    tostring(count),
    tostring(window),
    tostring(port),
    user,
    key,
    host_key .. ".pub",
    timeout = 600,
  })
  return json.decode(result:check().stdout)
end

-- One sshd for all addresses --------------------------------------------------------------------------------------

local server = support.server({
  authorized = { support.key("ed25519"), support.key("rsa") },
  config = { "MaxStartups 10000:30:20000", "LogLevel INFO" },
  every_address = true,
})
local port, user = server.port, server.user
local host_key = server.host_keys[1]
local rsa3072 = support.keygen("-t", "rsa", "-b", "3072")
fs.append(server.base .. "/authorized_keys", support.public(rsa3072) .. "\n")

local known = support.path("known_hosts")
fs.write(known, "* " .. support.public(host_key) .. "\n")

-- Peers ------------------------------------------------------------------------------------------------------------

-- The same key exchange, host key, user's key and window as ours; nothing asked of an agent or a configuration.
local SSH_FLAGS = table.concat({
  ("-F none -i %s -l %s -p %d"):format(support.key("ed25519"), user, port),
  ("-o UserKnownHostsFile=%s -o GlobalKnownHostsFile=none"):format(known),
  "-o IdentitiesOnly=yes -o IdentityAgent=none -o BatchMode=yes -o LogLevel=QUIET",
  "-o KexAlgorithms=curve25519-sha256 -o HostKeyAlgorithms=ssh-ed25519",
}, " ")

--- What the peers run: the answer names the address that answered.
local function command_with(nonce)
  return ("echo %s-${SSH_CONNECTION#* * }"):format(nonce)
end

--- Milliseconds of CPU a host of a command and its children, every host having answered with the nonce.
local function cpu_of_children(line, hosts, nonce)
  local said = support.path("said")
  local result = process.run({ "bash", "-c", line .. (" >%s 2>&1; times"):format(said), timeout = 900 })
  local answered, count = {}, 0
  for address in fs.read(said):gmatch(nonce .. "%-([%d.]+) " .. port) do
    count = count + (answered[address] and 0 or 1)
    answered[address] = true
  end
  for _, host in ipairs(hosts) do
    if not answered[host] or count ~= #hosts then
      error(
        ("%d of %d hosts have answered; %s has not:\n%s"):format(
          count,
          #hosts,
          host,
          fs.read(said):sub(1, 2000)
        ),
        0
      )
    end
  end
  local minutes, seconds, minutes2, seconds2 = result.stdout:match("\n(%d+)m([%d.]+)s (%d+)m([%d.]+)s")
  return (minutes * 60 + seconds + minutes2 * 60 + seconds2) * 1000 / #hosts
end

local peers, skipped = { flags = { ssh = SSH_FLAGS } }, {}

--- Install from the distribution what is not there; as root only.
local function install(program, package)
  if available(program) then
    return true
  end
  if support.is_root and available("apt-get") then
    note("installing %s", package)
    process.run({ "apt-get", "install", "-y", "-q", "--no-install-recommends", package, timeout = 600 })
  end
  if not available(program) then
    skipped[program] = ("no %s here, and the package %s could not be installed"):format(program, package)
    return false
  end
  return true
end

--- The Python that has parallel-ssh: a virtual environment of its own in the build directory, made when absent.
local function parallel_ssh_python()
  local place = build .. "/bench-ssh-python"
  local python = place .. "/bin/python"
  if process.run({ "sh", "-c", '[ -x "$1" ] && "$1" -c "import pssh"', "sh", python }).code == 0 then
    return python
  end
  note("installing parallel-ssh in %s", place)
  local made = process.run({ "python3", "-m", "venv", place, timeout = 300 }).code == 0
    and process.run({ python, "-m", "pip", "install", "-q", "parallel-ssh", timeout = 600 })
  if not made or made.code ~= 0 then
    skipped.parallel_ssh = "it could not be installed in a virtual environment: "
      .. (made and made.stderr or "no python3-venv")
    return nil
  end
  return python
end

local function first_line(argv)
  local said = process.run(argv)
  return (said.stdout .. said.stderr):match("[^\n]+")
end

--- Those that are there, each with a function from hosts, their file and a nonce to a command line.
local function find_peers()
  local found = {}
  peers.ssh = first_line({ "ssh", "-V" })
  found.ssh = function(_, list, nonce)
    return ("xargs -a %s -P %d -I{} ssh %s {} '%s'"):format(list, WINDOW, SSH_FLAGS, command_with(nonce))
  end
  if install("pdsh", "pdsh") then
    peers.pdsh = first_line({ "pdsh", "-V" })
    peers.flags.pdsh = ("-R ssh -f %d"):format(WINDOW)
    found.pdsh = function(_, list, nonce)
      return ("PDSH_SSH_ARGS_APPEND='%s' pdsh -R ssh -f %d -w ^%s '%s'"):format(
        SSH_FLAGS,
        WINDOW,
        list,
        command_with(nonce)
      )
    end
  end
  if install("clush", "clustershell") then
    peers.clush = first_line({ "clush", "--version" })
    peers.flags.clush = ("-f %d"):format(WINDOW)
    found.clush = function(_, list, nonce)
      return ("clush -f %d --hostfile %s -o '%s' '%s'"):format(WINDOW, list, SSH_FLAGS, command_with(nonce))
    end
  end
  local python = parallel_ssh_python()
  if python then
    peers.parallel_ssh = first_line({ python, "tests/bench/ssh/parallel.py", "version" })
    peers.flags.parallel_ssh = ("pool_size=%d, native client, no agent, one key"):format(WINDOW)
    found.parallel_ssh = function(_, list, nonce)
      return ("%s tests/bench/ssh/parallel.py %s %d %s %d %s '%s'"):format(
        python,
        list,
        WINDOW,
        user,
        port,
        support.key("ed25519"),
        command_with(nonce)
      )
    end
  end
  return found
end

--- Median milliseconds of CPU a host of each, with ours in turn.
local function compare_peers(count, rounds)
  local hosts = {}
  for index = 0, count - 1 do
    hosts[index + 1] = ("127.1.%d.%d"):format(index // 250, index % 250 + 1)
  end
  local list = support.write("hosts", table.concat(hosts, "\n") .. "\n")
  local costs, own = {}, {}
  local found = find_peers()
  for round = 1, rounds do
    own[round] = ours("fan", count, WINDOW, port, user, support.key("ed25519"), host_key).cpu_ms
    for name, line in pairs(found) do
      local nonce = ("%s%x"):format(name, math.random(0) & 0xffffffffffff)
      costs[name] = costs[name] or {}
      costs[name][round] = cpu_of_children(line(hosts, list, nonce), hosts, nonce)
    end
  end
  local mine = median(own)
  for name, all in pairs(costs) do
    local cost = median(all)
    note("N=%d %s: %.2f ms a host, ours %.3f", count, name, cost, mine)
    figures["ratio_" .. name] = cost / mine
    figures["cpu_ms_" .. name] = cost
  end
end

-- Ours starts no program: all that a trace of it shows is its own beginning.
local function count_programs()
  if not available("strace") then
    skipped.executed = "no strace here"
    return
  end
  local trace = support.path("trace")
  local result = process.run({
    "strace",
    "-f",
    "-e",
    "trace=execve,execveat",
    "-o",
    trace,
    engine.executable,
    "tests/bench/ssh/fan.lua",
    "fan",
    "8",
    "8",
    tostring(port),
    user,
    support.key("ed25519"),
    host_key .. ".pub",
    timeout = 120,
  })
  result:check()
  local _, executed = fs.read(trace):gsub("execve", "")
  assert(executed >= 1, "the trace is empty")
  figures.executed = executed - 1
  assert(figures.executed == 0, "the client has executed programs:\n" .. fs.read(trace))
end

-- Many hosts -------------------------------------------------------------------------------------------------------

local function many_hosts(count)
  for _, kind in ipairs({ "ed25519", "rsa" }) do
    local key = kind == "rsa" and rsa3072 or support.key("ed25519")
    local mine, theirs, ratios = {}, {}, {}
    for round = 1, count > 256 and 3 or 5 do -- in turn, so that both see the same machine
      theirs[round] = bare(tostring(count), tostring(WINDOW), tostring(port), user, key, host_key .. ".pub")
      mine[round] = ours("fan", count, WINDOW, port, user, key, host_key).cpu_ms
      ratios[round] = theirs[round] / mine[round]
    end
    local our_ms, bare_ms, ratio = median(mine), median(theirs), median(ratios)
    note("N=%d %s: %.3f ms a host, the bare loop %.3f; ratio %.3f", count, kind, our_ms, bare_ms, ratio)
    figures["cpu_ms_" .. kind] = our_ms
    figures["bare_ms_" .. kind] = bare_ms
    figures[("ratio_bare_%s_%d"):format(kind, count)] = ratio
    -- The worst of the counts.
    figures["ratio_bare_" .. kind] = math.min(ratio, figures["ratio_bare_" .. kind] or ratio)
  end
end

for _, count in ipairs(counts) do
  part(("%d hosts"):format(count), function()
    many_hosts(count)
  end)
end
part("peers", function()
  compare_peers(math.min(counts[#counts], 256), 3)
end)
part("programs", count_programs)

-- Throughput ------------------------------------------------------------------------------------------------------

part("stream", function()
  local key = support.key("ed25519")
  local mine, to_bare, to_ssh = {}, {}, {}
  for round = 1, 5 do -- in turn, so that all see the same machine
    local bare_s = select(2, bare("stream", bytes, tostring(port), user, key, host_key .. ".pub"))
    local own = ours("stream", bytes, 1, port, user, key, host_key).wall_s
    local line = ("ssh %s 127.1.0.1 head -c %s /dev/zero >/dev/null"):format(SSH_FLAGS, bytes)
    local began = uv.hrtime()
    process.run({ "sh", "-c", line, timeout = 600 }):check()
    local ssh_s = (uv.hrtime() - began) / 1e9
    note("stream: ours %.2f s, the bare loop %.2f, ssh %.2f", own, bare_s, ssh_s)
    mine[round], to_bare[round], to_ssh[round] = own, bare_s / own, ssh_s / own
  end
  figures.stream_mb_s = tonumber(bytes) / median(mine) / 1e6
  figures.stream_ratio_bare = median(to_bare)
  figures.stream_ratio_ssh = median(to_ssh)
end)

part("streams", function()
  figures.max_turn_ms = ours("streams", 64, 16, port, user, support.key("ed25519"), host_key).max_turn_ms
  note("64 streams: longest turn %.1f ms", figures.max_turn_ms)
end)
server:stop()

-- Sessions that are held ------------------------------------------------------------------------------------------

local function held_sessions()
  local directory = build .. "/ssh-faults"
  process.run({ "sh", "tests/fixtures/ssh_faults/install.sh", directory }):check()
  fs.copy("tests/fixtures/ssh_faults/server.js", directory .. "/server.js")
  local held_port = tostring(math.random(20000, 29999))
  local node <close> = process.spawn({
    "sh",
    "-c",
    'ulimit -n 20000; exec node "$@"',
    "node",
    directory .. "/server.js",
    host_key,
    "127.1.0.1",
    held_port,
    held_wanted,
    stdin = process.PIPE,
    stdout = process.PIPE,
    stderr = process.INHERIT,
  })
  assert((node.stdout:read() or ""):find("ready", 1, true), "the server on ssh2 does not start")
  local result = process.run({
    "sh",
    "-c",
    'ulimit -n 20000; exec "$@"',
    "sh",
    engine.executable,
    "tests/bench/ssh/fan.lua",
    "hold",
    held_wanted,
    "64",
    held_port,
    "plain",
    support.key("ed25519"),
    host_key .. ".pub",
    timeout = 1200,
  })
  local held = json.decode(result:check().stdout)
  figures.held = held.held
  figures.kib_per_session = held.kib_per_session
  figures.second_fraction = held.second_fraction
  note(
    "held: %d at %.0f KiB, a second command at %.3f of the first",
    held.held,
    held.kib_per_session,
    held.second_fraction
  )
end

if available("node") and available("npm") then
  part("held", held_sessions)
else
  skipped.held = "no node and npm here"
end
figures.bench, figures.hosts, figures.window = "ssh", json.array(counts), WINDOW
figures.peers, figures.skipped, figures.failed = peers, skipped, failed
figures.libssh2 = require("ciranda.core.ssh").version
figures.load_1_min = uv.loadavg()
support.clean()
print(json.encode(figures))
if next(failed) then
  os.exit(1)
end
