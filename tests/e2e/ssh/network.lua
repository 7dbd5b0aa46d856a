-- Hosts that cannot be reached and a name server that never answers, in a network of our own: this runs in a network
-- and mount namespace that has nothing yet (unshare -nm).
local cases = dofile("tests/e2e/ssh/cases.lua")
local fleets = require("ciranda.fleet")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local support = dofile("tests/spec/ssh/support.lua")
local uv = require("luv")

local function system(...)
  return process.run({ timeout = 20, ... }):check()
end

system("ip", "link", "set", "lo", "up")
system("ip", "route", "add", "unreachable", "10.71.1.0/24")
system("ip", "route", "add", "prohibit", "10.71.2.0/24")
-- What goes there comes back and is nobody's: it is dropped without a word, as by a firewall.
system("ip", "route", "add", "10.71.3.0/24", "dev", "lo")

-- A name server that takes questions and keeps them to itself.
local NAME_SERVER = "127.53.0.1"
local dead = uv.new_udp()
assert(dead:bind(NAME_SERVER, 53))
local questions = 0
dead:recv_start(function(_, data)
  questions = questions + (data and 1 or 0)
end)
local resolv =
  support.write("resolv.conf", ("nameserver %s\noptions timeout:30 attempts:3\n"):format(NAME_SERVER))
local nsswitch = support.write("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
system("mount", "--bind", resolv, uv.fs_realpath("/etc/resolv.conf"))
system("mount", "--bind", nsswitch, "/etc/nsswitch.conf")

local server = support.server()
local function options(host, others)
  others = others or {}
  others.host = host
  others.pins = { server:pin() }
  return server:options(others)
end

cases.case("control: a host that is there", function()
  local connection <close> = ssh.connect(options(server.address))
  assert(connection:exec("echo here").stdout == "here\n")
end)

for name, address in pairs({
  ["a host behind a router that says no"] = "10.71.1.1",
  ["a host to which there is no route"] = "10.72.0.1",
  ["a host that a policy forbids"] = "10.71.2.1",
}) do
  cases.case(name, function()
    cases.fails(address, { "unreachable", "permission" }, "connect", 10, ssh.connect, options(address))
  end)
end

cases.case("a host behind a firewall that drops", function()
  local err = cases.fails(
    "10.71.3.1",
    { "timeout" },
    "connect",
    10,
    ssh.connect,
    options("10.71.3.1", { timeouts = { connect = 1 } })
  )
  assert(err.message:find("firewall", 1, true), err.message)
end)

cases.case("those in a fleet, whose other worker is there", function()
  local workers = {}
  for index, address in ipairs({ server.address, "10.71.1.1", "10.71.3.1", "10.72.0.1" }) do
    workers[index] = {
      slice = 0,
      index = index - 1,
      name = address,
      address = address,
      port = server.port,
      pins = { server:pin() },
    }
  end
  local fleet <close> = fleets.new({ { index = 0, name = "s", workers = workers } }, {
    user = server.user,
    keys = { support.key("ed25519") },
    agent = false,
    config = false,
    timeouts = { connect = 1 },
    retry_for = 1,
  })
  local results = fleet:run("echo here")
  assert(results[1].stdout == "here\n")
  assert(results[2].err.code == "unreachable", tostring(results[2].err))
  assert(results[3].err.code == "timeout", tostring(results[3].err))
  assert(results[4].err.code == "unreachable", tostring(results[4].err))
end)

cases.case("a name server that never answers", function()
  for _ = 1, 3 do
    local err = cases.fails(
      "worker-0.example",
      { "timeout" },
      "resolve",
      20,
      ssh.connect,
      options("worker-0.example", { timeouts = { resolve = 0.5 } })
    )
    assert(err.message:find("the name server does not answer", 1, true), err.message)
  end
  assert(questions > 0, "nobody asked it")
end)

cases.case("control: a name that needs none, while those questions are still open", function()
  local connection <close> = ssh.connect(options("localhost", { address = server.address }))
  assert(connection:exec("echo here").stdout == "here\n")
  local hosts = support.write("hosts", ("%s worker-9.example\n"):format(server.address))
  system("mount", "--bind", hosts, "/etc/hosts")
end)

cases.case("control: a name that /etc/hosts has", function()
  -- In a process of its own: the resolver's threads of this one still wait for the dead server.
  local script = support.write(
    "named.lua",
    ([[
    local ssh = require("ciranda.ssh")
    local connection <close> = ssh.connect({ host = "worker-9.example", port = %d, user = %q, keys = { %q },
      agent = false, config = false, known_hosts = false, pins = { %q } })
    io.write(connection:exec("echo here").stdout)
  ]]):format(server.port, server.user, support.key("ed25519"), server:pin())
  )
  local result = process.run({ require("ciranda.core.engine").executable, script, timeout = 20 })
  assert(result.stdout == "here\n", result.stderr)
end)

cases.case("a program whose questions are still open ends all the same", function()
  local script = support.write(
    "unnamed.lua",
    [[
    local ssh = require("ciranda.ssh")
    local ok, err = pcall(ssh.connect, { host = "worker-1.example", config = false, timeouts = { resolve = 0.5 } })
    print(ok, err.phase)
  ]]
  )
  local began = cases.now()
  local result = process.run({ require("ciranda.core.engine").executable, script, timeout = 25 })
  assert(result.stdout == "false\tresolve\n", result.stdout .. result.stderr)
  assert(cases.now() - began < 15, ("it took %.1f s to end"):format(cases.now() - began))
end)

dead:close()
server:stop()
support.clean()
cases.finish("network")
