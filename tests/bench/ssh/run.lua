-- bench-ssh: see tests/bench/ssh.sh.
local engine = require("ciranda.core.engine")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/ssh/support.lua")

local build = os.getenv("CIRANDA_BUILD") or "build"
local counts = {}
for word in (os.getenv("BENCH_HOSTS") or "64 256 1024"):gmatch("%d+") do
  counts[#counts + 1] = math.tointeger(tonumber(word))
end
local held_wanted = os.getenv("BENCH_HELD") or "4096"
local bytes = os.getenv("BENCH_BYTES") or tostring(1 << 30)
local WINDOW = 64

local figures = {}

local function note(format, ...)
  io.stderr:write(format:format(...), "\n")
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
  config = { "MaxStartups 10000:30:20000", "LogLevel QUIET" },
  every_address = true,
})
local port, user = server.port, server.user
local host_key = server.host_keys[1]
local rsa3072 = support.keygen("-t", "rsa", "-b", "3072")
fs.append(server.base .. "/authorized_keys", support.public(rsa3072) .. "\n")

--- CPU of a command and its children, a host: `sh -c 'times'` tells both.
local function cpu_of_children(line, count)
  local said = process.run({ "bash", "-c", line .. " >/dev/null 2>&1; times", timeout = 900 }).stdout
  local minutes, seconds, minutes2, seconds2 = said:match("\n(%d+)m([%d.]+)s (%d+)m([%d.]+)s")
  return (minutes * 60 + seconds + minutes2 * 60 + seconds2) * 1000 / count
end

local known = support.path("known_hosts")
fs.write(known, "* " .. support.public(host_key) .. "\n")

local function peers(count)
  local hosts = {}
  for index = 0, count - 1 do
    hosts[index + 1] = ("127.1.%d.%d"):format(index // 250, index % 250 + 1)
  end
  local list = support.write("hosts", table.concat(hosts, "\n") .. "\n")
  local options = ("-F none -i %s -l %s -p %d -o UserKnownHostsFile=%s "):format(
    support.key("ed25519"),
    user,
    port,
    known
  ) .. "-o GlobalKnownHostsFile=none -o IdentitiesOnly=yes -o IdentityAgent=none "
  options = options .. "-o KexAlgorithms=curve25519-sha256 -o BatchMode=yes -o LogLevel=QUIET"
  local found = {}
  found.ssh =
    cpu_of_children(("xargs -a %s -P %d -I{} ssh %s {} echo hi"):format(list, WINDOW, options), count)
  if available("pdsh") then
    found.pdsh = cpu_of_children(
      ("PDSH_SSH_ARGS_APPEND='%s' pdsh -R ssh -f %d -w ^%s echo hi"):format(options, WINDOW, list),
      count
    )
  end
  if available("clush") then
    found.clush =
      cpu_of_children(("clush -f %d --hostfile %s -o '%s' echo hi"):format(WINDOW, list, options), count)
  end
  return found
end

for _, count in ipairs(counts) do
  for _, kind in ipairs({ "ed25519", "rsa" }) do
    local key = kind == "rsa" and rsa3072 or support.key("ed25519")
    local mine, theirs = {}, {}
    for _ = 1, 3 do -- in turn, so that both see the same machine
      theirs[#theirs + 1] =
        bare(tostring(count), tostring(WINDOW), tostring(port), user, key, host_key .. ".pub")
      mine[#mine + 1] = ours("fan", count, WINDOW, port, user, key, host_key).cpu_ms
    end
    local our_ms, bare_ms = median(mine), median(theirs)
    note("N=%d %s: %.3f ms a host, the bare loop %.3f", count, kind, our_ms, bare_ms)
    figures["cpu_ms_" .. kind] = our_ms
    figures["bare_ms_" .. kind] = bare_ms
    figures["ratio_bare_" .. kind] = bare_ms / our_ms
  end
end

local last = math.min(counts[#counts], 256)
local mine = ours("fan", last, WINDOW, port, user, support.key("ed25519"), host_key).cpu_ms
for name, cost in pairs(peers(last)) do
  note("N=%d %s: %.2f ms a host, ours %.3f", last, name, cost, mine)
  figures["ratio_" .. name] = cost / mine
end

-- Throughput ------------------------------------------------------------------------------------------------------

do
  local mine_s, bare_s, ssh_s = {}, {}, {}
  for _ = 1, 3 do
    local key = support.key("ed25519")
    bare_s[#bare_s + 1] = select(2, bare("stream", bytes, tostring(port), user, key, host_key .. ".pub"))
    mine_s[#mine_s + 1] = ours("stream", bytes, 1, port, user, key, host_key).wall_s
    local began = require("luv").hrtime()
    process
      .run({
        "sh",
        "-c",
        ("ssh -F none -i %s -l %s -p %d -o UserKnownHostsFile=%s -o IdentityAgent=none 127.1.0.1 "):format(
          key,
          user,
          port,
          known
        ) .. ("head -c %s /dev/zero >/dev/null"):format(bytes),
        timeout = 600,
      })
      :check()
    ssh_s[#ssh_s + 1] = (require("luv").hrtime() - began) / 1e9
  end
  local own = median(mine_s)
  figures.stream_mb_s = tonumber(bytes) / own / 1e6
  figures.stream_ratio_bare = median(bare_s) / own
  figures.stream_ratio_ssh = median(ssh_s) / own
  figures.max_turn_ms = ours("streams", 64, 16, port, user, support.key("ed25519"), host_key).max_turn_ms
  note("stream: %.0f MB/s; longest turn %.1f ms", figures.stream_mb_s, figures.max_turn_ms)
end
server:stop()

-- Sessions that are held ------------------------------------------------------------------------------------------

if available("node") and available("npm") then
  local directory = build .. "/ssh-faults"
  if not fs.exists(directory .. "/node_modules/ssh2") then
    fs.mkdir_p(directory)
    fs.copy("tests/fixtures/ssh_faults/package.json", directory .. "/package.json")
    process.run({ "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", cwd = directory }):check()
  end
  fs.copy("tests/fixtures/ssh_faults/server.js", directory .. "/server.js")
  local node <close> = process.spawn({
    "sh",
    "-c",
    'ulimit -n 20000; exec node "$@"',
    "node",
    directory .. "/server.js",
    host_key,
    "127.1.0.1",
    "29555",
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
    "29555",
    "plain",
    support.key("ed25519"),
    host_key .. ".pub",
    timeout = 900,
  })
  local held = json.decode(result:check().stdout)
  figures.held = held.held
  figures.kib_per_session = held.kib_per_session
  figures.second_fraction = held.second_fraction
end
support.clean()
print(json.encode(figures))
