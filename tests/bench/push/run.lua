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
    "LogLevel QUIET",
    "Subsystem sftp " .. SFTP_SERVER,
    "ForceCommand " .. SESSION,
  },
  every_address = true,
})
local host_key = server.host_keys[1]
local known = support.write("known_hosts", "* " .. support.public(host_key) .. "\n")
local source = make_source()

--- Bytes that the loopback device of this network namespace has carried, both ways; nil where others use it too.
local function carried()
  if os.getenv("BENCH_OWN_NETWORK") ~= "1" then
    return nil
  end
  return math.tointeger(tonumber(fs.read("/proc/net/dev"):match("lo:%s*(%d+)")))
end

--- Seconds of CPU of a command line and its children, seconds, and bytes on its sockets.
local function measure(line)
  local before, began = carried(), uv.hrtime()
  local result = process.run({ "bash", "-c", "set -o pipefail; " .. line .. " && times", timeout = 600 })
  local seconds = (uv.hrtime() - began) / 1e9
  local user_m, user_s, system_m, system_s = result.stdout:match("\n(%d+)m([%d.]+)s (%d+)m([%d.]+)s%s*$")
  assert(user_m, result.stderr)
  local after = carried()
  return user_m * 60 + user_s + system_m * 60 + system_s, seconds, after and after - before
end

--- Every worker has exactly what the source has.
local function check(destination)
  for index = 1, WORKERS do
    local place = ("%s/127.1.0.%d/%s"):format(server.home, index, destination)
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
  return ("seq 1 %d | xargs -P %d -I{} %s %s %s 127.1.0.{}:%s"):format(
    WORKERS,
    WORKERS,
    SCP,
    flags,
    source,
    destination
  )
end

local function ours(destination)
  return ("%s tests/bench/push/client.lua %s %s %d %d %s %s %s.pub"):format(
    engine.executable,
    source,
    destination,
    WORKERS,
    server.port,
    server.user,
    support.key("ed25519"),
    host_key
  )
end

local sides = {
  ours = ours,
  scp = function(destination)
    return scp("-c aes128-gcm@openssh.com", destination)
  end,
  scp_compressed = function(destination)
    return scp("-c aes128-gcm@openssh.com -C", destination)
  end,
}
local cpu, wall, bytes = {}, {}, {}
local second = { cpu = {}, fraction = {} }
for round = 1, ROUNDS do
  for name, line in pairs(sides) do
    local destination = ("%s%d"):format(name, round)
    local used, seconds, sent = measure(line(destination))
    check(destination)
    note("round %d, %s: %.2f s of CPU, %.1f s, %s bytes", round, name, used, seconds, sent or "uncounted")
    for list, value in pairs({ [cpu] = used, [wall] = seconds, [bytes] = sent }) do
      list[name] = list[name] or {}
      table.insert(list[name], value)
    end
  end
  fs.append(source .. "/part07/file0007.txt", ("changed in round %d\n"):format(round))
  local destination = ("ours%d"):format(round)
  local used, _, sent = measure(ours(destination))
  check(destination)
  note("round %d, ours again, one file changed: %.2f s of CPU, %s bytes", round, used, sent or "uncounted")
  table.insert(second.cpu, used)
  if sent then
    table.insert(second.fraction, sent / bytes.ours[round])
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
end
figures.push_ratio_cpu = math.min(figures.cpu_s_scp, figures.cpu_s_scp_compressed) / figures.cpu_s_ours
if bytes.ours then
  figures.push_ratio_bytes = math.min(figures.bytes_scp, figures.bytes_scp_compressed) / figures.bytes_ours
  figures.second_push_fraction = median(second.fraction)
else
  figures.skipped =
    { bytes = "they are counted in a network namespace of their own, which needs root and unshare" }
end
support.clean()
print(json.encode(figures))
