-- bench-push: see tests/bench/push.sh.
local engine = require("ciranda.core.engine")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/ssh/support.lua")
local uv = require("luv")

local WORKERS = math.tointeger(tonumber(os.getenv("BENCH_WORKERS") or "16"))
local ROUNDS = math.tointeger(tonumber(os.getenv("BENCH_ROUNDS") or "3"))
local FILES, BYTES = 2000, 30000000
--- The process in whose network namespace the client runs; nil where there is none of its own.
local CLIENT = os.getenv("BENCH_CLIENT")
local PREFIX = "127.1.0."
local SFTP_SERVER = "/usr/lib/openssh/sftp-server"

local function note(format, ...)
  io.stderr:write(format:format(...), "\n")
end

local function median(list)
  table.sort(list)
  return list[(#list + 1) // 2]
end

--- What a trainer's directory is like: text of few words and some numbers, in files of 5 to 25 kB.
local function make_source()
  local source = support.path("source")
  math.randomseed(3)
  local words = {}
  for index = 1, 600 do
    local letters = {}
    for place = 1, math.random(2, 11) do
      letters[place] = string.char(math.random(97, 122))
    end
    words[index] = table.concat(letters)
  end
  for number = 1, FILES do
    local directory = ("%s/part%02d"):format(source, number % 40)
    if number <= 40 then
      fs.mkdir_p(directory)
    end
    local size = number == FILES and BYTES // FILES or math.random(5000, 2 * BYTES // FILES - 5000)
    local text, length = {}, 0
    while length < size do
      local line = {}
      for place = 1, math.random(1, 9) do
        line[place] = words[math.random(#words)]
      end
      line[#line + 1] = math.random(4) == 1 and ("%x\n"):format(math.random(1 << 40)) or "\n"
      text[#text + 1] = table.concat(line, " ")
      length = length + #text[#text]
    end
    fs.write(("%s/file%04d.txt"):format(directory, number), table.concat(text), { sync = false })
  end
  return source
end

-- One sshd; each address has a directory of its own, as each worker has a home. sftp-server asks who it runs for.
local SESSION = [[set -- $SSH_CONNECTION; export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD="$HOME/../passwd" ]]
  .. [[NSS_WRAPPER_GROUP="$HOME/../group"; mkdir -p "$HOME/$3"; cd "$HOME/$3" && exec sh -c "$SSH_ORIGINAL_COMMAND"]]
local server = support.server({
  authorized = { support.key("ed25519") },
  config = {
    "MaxStartups 1000:30:2000",
    "LogLevel INFO",
    "Subsystem sftp " .. SFTP_SERVER,
    "ForceCommand " .. SESSION,
  },
  every_address = true,
})
local host_key = server.host_keys[1]
local known = support.write("known_hosts", "* " .. support.public(host_key) .. "\n")
local source = make_source()

--- Bytes that have gone between the client and the workers, both ways, and those that left the client; nil where others
--- use that device too.
local function carried()
  if not CLIENT then
    return nil
  end
  local pattern = "workers:%s*(%d+)" .. ("%s+%d+"):rep(7) .. "%s+(%d+)"
  local received, sent = fs.read("/proc/net/dev"):match(pattern)
  received, sent = math.tointeger(tonumber(received)), math.tointeger(tonumber(sent))
  return received + sent, received
end

--- Seconds of CPU of a command line and its children, seconds, bytes on its sockets, and those that it sent.
local function measure(line)
  local before, sent_before = carried()
  local began = uv.hrtime()
  local words = { "bash", "-c", "set -o pipefail; " .. line .. " && times", timeout = 600 }
  if CLIENT then
    table.move({ "nsenter", "-n", "-t", CLIENT }, 1, 4, 1, table.move(words, 1, #words, 5))
  end
  local result = process.run(words)
  local seconds = (uv.hrtime() - began) / 1e9
  local user_m, user_s, system_m, system_s = result.stdout:match("\n(%d+)m([%d.]+)s (%d+)m([%d.]+)s%s*$")
  assert(user_m, result.stderr)
  local after, sent_after = carried()
  return user_m * 60 + user_s + system_m * 60 + system_s,
    seconds,
    after and after - before,
    after and sent_after - sent_before
end

--- Every worker has exactly what the source has.
local function check(destination)
  for index = 1, WORKERS do
    local place = ("%s/%s%d/%s"):format(server.home, PREFIX, index, destination)
    local result = process.run({ "diff", "-r", source, place, timeout = 120 })
    assert(result.code == 0, result.stdout:sub(1, 500) .. result.stderr)
  end
end

local SCP = ("scp -r -q -F none -i %s -P %d -o User=%s -o UserKnownHostsFile=%s -o GlobalKnownHostsFile=none "):format(
  support.key("ed25519"),
  server.port,
  server.user,
  known
) .. "-o IdentitiesOnly=yes -o IdentityAgent=none -o BatchMode=yes -o KexAlgorithms=curve25519-sha256"

local function scp(flags, destination)
  return ("seq 1 %d | xargs -P %d -I{} %s %s %s %s{}:%s"):format(
    WORKERS,
    WORKERS,
    SCP,
    flags,
    source,
    PREFIX,
    destination
  )
end

local function ours(destination, via)
  return ("%s tests/bench/push/client.lua %s %s %s %d %d %s %s %s.pub %s"):format(
    engine.executable,
    source,
    destination,
    PREFIX,
    WORKERS,
    server.port,
    server.user,
    support.key("ed25519"),
    host_key,
    via or ""
  )
end

local sides = {
  ours = ours,
  tree = function(destination)
    return ours(destination, "workers")
  end,
  scp = function(destination)
    return scp("-c aes128-gcm@openssh.com", destination)
  end,
  scp_compressed = function(destination)
    return scp("-c aes128-gcm@openssh.com -C", destination)
  end,
}
local cpu, wall, bytes, sent = {}, {}, {}, {}
local second = { cpu = {}, fraction = {} }
for round = 1, ROUNDS do
  for name, line in pairs(sides) do
    local destination = ("%s%d"):format(name, round)
    local used, seconds, moved, left = measure(line(destination))
    check(destination)
    note("round %d, %s: %.2f s of CPU, %.1f s, %s bytes", round, name, used, seconds, moved or "uncounted")
    for list, value in pairs({ [cpu] = used, [wall] = seconds, [bytes] = moved, [sent] = left }) do
      list[name] = list[name] or {}
      table.insert(list[name], value)
    end
  end
  fs.append(source .. "/part07/file0007.txt", ("changed in round %d\n"):format(round))
  local destination = ("ours%d"):format(round)
  local used, _, moved = measure(ours(destination))
  check(destination)
  note("round %d, ours again, one file changed: %.2f s of CPU, %s bytes", round, used, moved or "uncounted")
  table.insert(second.cpu, used)
  if moved then
    table.insert(second.fraction, moved / bytes.ours[round])
  end
end
server:stop()

local figures = {
  bench = "push",
  workers = WORKERS,
  files = FILES,
  rounds = ROUNDS,
  scp = process.run({ "ssh", "-V" }).stderr:match("%S+"),
  scp_flags = "-r -q -c aes128-gcm@openssh.com, with and without -C; the cheaper counts",
  second_cpu_s = median(second.cpu),
  load_1_min = uv.loadavg(),
}
for name in pairs(sides) do
  figures["cpu_s_" .. name] = median(cpu[name])
  figures["wall_s_" .. name] = median(wall[name])
  figures["bytes_" .. name] = bytes[name] and median(bytes[name])
  figures["sent_" .. name] = sent[name] and median(sent[name])
end
figures.push_ratio_cpu = math.min(figures.cpu_s_scp, figures.cpu_s_scp_compressed) / figures.cpu_s_ours
figures.tree_ratio_cpu = figures.cpu_s_ours / figures.cpu_s_tree
if bytes.ours then
  figures.tree_sent_fraction = figures.sent_tree / figures.sent_ours
  figures.push_ratio_bytes = math.min(figures.bytes_scp, figures.bytes_scp_compressed) / figures.bytes_ours
  figures.second_push_fraction = median(second.fraction)
else
  figures.skipped =
    { bytes = "they are counted in a network namespace of their own, which needs root and unshare" }
end
support.clean()
print(json.encode(figures))
