-- The client under measurement: ciranda fan.lua KIND COUNT WINDOW PORT USER KEY HOSTKEY.pub
--   fan      connect, log in, `echo NONCE`, close; each host 127.1.x.y; prints CPU a host
--   hold     open all, run a command on each, then three more; prints what is held, memory, and what part of the first
--            command's cost, connecting included, the median of the others is
--   stream   one host: COUNT bytes of zeroes
--   streams  16 MiB from each of COUNT hosts at once; prints the longest turn of the loop, in CPU time
-- One line of JSON. CPU is that of this process while it works, its start left out.
local json = require("ciranda.io.json")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local kind, count, window, port, user, key_path, host_key_path =
  arg[1], tonumber(arg[2]), tonumber(arg[3]), math.tointeger(tonumber(arg[4])), arg[5], arg[6], arg[7]

local file <close> = assert(io.open(host_key_path))
local pin = file:read("a")
local key = ssh.key(key_path)

local function cpu()
  local usage = uv.getrusage()
  return usage.utime.sec + usage.utime.usec / 1e6 + usage.stime.sec + usage.stime.usec / 1e6
end

local function resident_kib()
  local status <close> = assert(io.open("/proc/self/status"))
  return tonumber(status:read("a"):match("VmRSS:%s*(%d+)"))
end

local hosts = {}
for index = 0, kind == "stream" and 0 or count - 1 do
  hosts[index + 1] = ("127.1.%d.%d"):format(index // 250, index % 250 + 1)
end

local function connect(host)
  return ssh.connect({
    host = host,
    port = port,
    user = user,
    keys = { key },
    pins = { pin },
    agent = false,
    config = false,
    known_hosts = false,
    keepalive = false,
  })
end

local function echo(connection, nonce)
  local result = connection:exec("echo " .. nonce)
  assert(result.code == 0 and result.stdout == nonce .. "\n", "wrong output")
end

local function nonce_of(host)
  return ("%s-%x"):format(host, math.random(0))
end

local out = { kind = kind, count = count }
local began, cpu_before = uv.hrtime(), cpu()
if kind == "fan" then
  task.map(hosts, function(host)
    local connection <close> = connect(host)
    echo(connection, nonce_of(host))
  end, window)
  out.cpu_ms = (cpu() - cpu_before) * 1000 / count
elseif kind == "hold" then
  collectgarbage()
  local kib = resident_kib()
  local connections = task.map(hosts, connect, window)
  task.map(connections, function(connection)
    echo(connection, nonce_of(connection.host))
  end, window)
  local cpu_first = cpu()
  collectgarbage()
  out.kib_per_session = (resident_kib() - kib) / count
  local further = {}
  for round = 1, 3 do
    local cpu_round = cpu()
    task.map(connections, function(connection)
      echo(connection, nonce_of(connection.host))
    end, window)
    further[round] = cpu() - cpu_round
  end
  table.sort(further)
  out.second_fraction = further[2] / (cpu_first - cpu_before)
  out.held = 0
  for _, connection in ipairs(connections) do
    out.held = out.held + (connection:is_open() and 1 or 0)
    connection:close()
  end
elseif kind == "streams" then
  local longest, last = 0, os.clock()
  local prepare = uv.new_prepare()
  prepare:start(function()
    local now = os.clock()
    longest = math.max(longest, now - last)
    last = now
  end)
  local connections = task.map(hosts, connect, 16)
  longest = 0
  task.map(connections, function(connection)
    local received = 0
    connection:exec("head -c 16777216 /dev/zero", {
      on_stdout = function(bytes)
        received = received + #bytes
      end,
    })
    assert(received == 16777216, "bytes are missing")
  end)
  prepare:close()
  out.max_turn_ms = longest * 1000
  for _, connection in ipairs(connections) do
    connection:close()
  end
elseif kind == "stream" then
  local connection <close> = connect(hosts[1])
  local received = 0
  connection:exec(("head -c %d /dev/zero"):format(count), {
    on_stdout = function(bytes)
      received = received + #bytes
    end,
  })
  assert(received == count, "bytes are missing")
  out.cpu_s = cpu() - cpu_before
end
out.wall_s = (uv.hrtime() - began) / 1e9
print(json.encode(out))
