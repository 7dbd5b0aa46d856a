-- The cases of tests/e2e/ssh.sh. The argument is the directory of the scripted server.
local cases = dofile("tests/e2e/ssh/cases.lua")
local fs = require("ciranda.io.fs")
local patience = dofile("tests/fixtures/patience.lua")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")

local server_directory = arg[1]
local scratch = fs.tempdir("ciranda-ssh-faults")

-- The server ------------------------------------------------------------------------------------------------------

local function keygen(name)
  local path = scratch .. "/" .. name
  process.run({ "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path }):check()
  return path
end

local host_key, user_key = keygen("host"), keygen("user")
local pin = fs.read(host_key .. ".pub")

local function start()
  for _ = 1, 20 do
    local address = ("127.%d.%d.%d"):format(math.random(60, 250), math.random(0, 250), math.random(1, 250))
    local port = math.random(20000, 29000)
    local node = process.spawn({
      "node",
      server_directory .. "/server.js",
      host_key,
      address,
      tostring(port),
      stdin = process.PIPE,
      stdout = process.PIPE,
      stderr = process.INHERIT,
    })
    local said = node.stdout:read()
    if said and said:find("ready", 1, true) then
      return node, address, port
    end
    node:close()
  end
  error("the scripted server does not start")
end

--- Our sockets.
local function open_sockets()
  local open = 0
  for _, entry in ipairs(fs.list("/proc/self/fd")) do
    local ok, target = pcall(fs.readlink, "/proc/self/fd/" .. entry.name)
    if ok and target:find("^socket:") then
      open = open + 1
    end
  end
  return open
end

local node, address, port = start()
-- The pipes to the scripted server are sockets of ours; so may what we were started with be.
local open_before = open_sockets()

local function options(user, others)
  local all = {
    host = address,
    port = port,
    user = user,
    keys = { user_key },
    agent = false,
    config = false,
    known_hosts = false,
    pins = { pin },
    keepalive = false,
    timeouts = { connect = 60, banner = 60, kex = 60, auth = 60, channel = 60 },
  }
  for name, value in pairs(others or {}) do
    all[name] = value
  end
  return all
end

-- Cases -----------------------------------------------------------------------------------------------------------

--- Seconds: what a failure takes at most on a busy machine, far from the minute of the deadlines.
local SOON = 20

local case = cases.case

--- The call fails soon, as it must: long before a deadline that is not its own.
local function fails(codes, phase, ...)
  return cases.fails(address, codes, phase, SOON, ...)
end

case("control: a command's output and status", function()
  local connection <close> = ssh.connect(options("plain"))
  local result = connection:exec("echo hello")
  assert(result.stdout == "hello\n" and result.code == 0)
  assert(connection:exec("nonsense").code == 127)
end)

case("no exit status is not taken for success", function()
  local connection <close> = ssh.connect(options("nostatus"))
  local result = connection:exec("anything")
  assert(result.stdout == "some output\n")
  assert(result.code == nil and result.signal == nil)
  assert(result:reason() == "no exit status")
  assert(not pcall(result.check, result))
end)

case("an exit signal with its words", function()
  local connection <close> = ssh.connect(options("signal"))
  local result = connection:exec("anything")
  assert(result.code == nil and result.signal == "SEGV" and result.message == "memory fault")
end)

case("both streams in turn, in full", function()
  local connection <close> = ssh.connect(options("plain"))
  local result = connection:exec("noise 4000")
  assert(result.code == 0)
  assert(result.stdout == ("o"):rep(4000000), #result.stdout .. " bytes of output came")
  assert(result.stderr == ("e"):rep(4000000), #result.stderr .. " bytes of errors came")
end)

case("many channels at once that all write much", function()
  local connection <close> = ssh.connect(options("plain"))
  local results = task.map({ 1, 2, 3, 4, 5, 6, 7, 8 }, function()
    return connection:exec("zeroes 3000000")
  end)
  for _, result in ipairs(results) do
    assert(result.code == 0 and #result.stdout == 3000000)
  end
end)

case("a command that is refused", function()
  local connection <close> = ssh.connect(options("noexec"))
  fails({ "refused" }, "exec", connection.exec, connection, "x")
  -- The connection is still good.
  fails({ "refused" }, "exec", connection.exec, connection, "x")
end)

case("a channel that is refused", function()
  local connection <close> = ssh.connect(options("nochannel"))
  fails({ "refused" }, "channel", connection.exec, connection, "x")
end)

case("a command that is never answered", function()
  local err, open = patience.within_more(0.5, function(seconds)
    local connection <close> = ssh.connect(options("noanswer", { timeouts = { channel = seconds } }))
    local err = fails({ "timeout" }, nil, connection.exec, connection, "x")
    -- The channel is answered, and has no more time for that.
    return err.phase ~= "channel", err, connection:is_open()
  end)
  assert(err.phase == "exec", err.phase)
  assert(open)
end)

case("a channel that is never answered", function()
  local connection <close> = ssh.connect(options("silentchannel", { timeouts = { channel = 0.5 } }))
  fails({ "timeout" }, "channel", connection.exec, connection, "x")
end)

case("a silent server is lost when it is asked", function()
  local connection <close> =
    ssh.connect(options("silentchannel", { keepalive = { interval = 0.2, count = 2 } }))
  while connection:is_open() do
    task.sleep(0.05)
  end
  fails({ "lost" }, nil, connection.exec, connection, "x")
end)

case("control: a server that answers is not lost", function()
  -- Twice as long as a silent one would have: a busy machine may need more time for an answer than the first.
  local open = patience.within_more(0.2, function(interval)
    local connection <close> = ssh.connect(options("plain"))
    local _ <close> = connection:start("hold")
    connection:keepalive(interval, 4)
    task.sleep(interval * 10)
    return connection:is_open(), connection:is_open()
  end)
  assert(open)
end)

case("a channel that the server never closes", function()
  local connection <close> = ssh.connect(options("neverclose"))
  local channel = connection:start("x")
  assert(channel:wait().code == 0)
  fails({ "timeout" }, "exec", connection.exec, connection, "x", { timeout = 2 })
  channel:close()
end)

case("a reset while a command starts", function()
  local connection <close> = ssh.connect(options("resetexec"))
  fails({ "reset", "closed" }, nil, connection.exec, connection, "x")
  assert(not connection:is_open())
end)

case("an end while a command starts", function()
  local connection <close> = ssh.connect(options("closeexec"))
  fails({ "closed", "reset" }, nil, connection.exec, connection, "x")
end)

case("a server that says goodbye", function()
  local connection <close> = ssh.connect(options("goodbye"))
  fails({ "closed" }, nil, connection.exec, connection, "x")
end)

case("a server that stops reading, while we write", function()
  local connection <close> = ssh.connect(options("stopreading"))
  local channel = connection:start("x")
  connection:keepalive(0.3, 2)
  fails({ "lost" }, nil, function()
    for _ = 1, 1000 do
      channel:write(("w"):rep(1000000))
    end
  end)
end)

case("a server that never answers the login", function()
  fails({ "timeout" }, "auth", ssh.connect, options("authstall", { timeouts = { auth = 0.5 } }))
end)

case("control: one that is slow to", function()
  local connection <close> = ssh.connect(options("authslow"))
  assert(connection:exec("echo x").code == 0)
end)

case("a reset during the login", function()
  fails({ "auth", "reset", "closed" }, "auth", ssh.connect, options("authreset"))
end)

case("a key that is taken and a signature that is refused", function()
  local err = fails({ "auth" }, "auth", ssh.connect, options("sigrefused"))
  assert(err.reason == "signature_refused", err.reason)
end)

case("silence before the identification", function()
  fails(
    { "timeout" },
    "banner",
    ssh.connect,
    options("plain", { port = port + 1, timeouts = { banner = 0.5 } })
  )
end)

case("a reset after the identification", function()
  fails({ "reset", "closed" }, "kex", ssh.connect, options("plain", { port = port + 2 }))
end)

case("an end in the middle of the key exchange", function()
  fails({ "closed", "reset", "protocol" }, "kex", ssh.connect, options("plain", { port = port + 3 }))
end)

case("a reset before the identification, each time it is tried", function()
  fails({ "reset", "closed" }, "banner", ssh.connect, options("plain", { port = port + 4 }))
end)

case("a reset while a channel is opened", function()
  local connection <close> = ssh.connect(options("resetchannel"))
  fails({ "reset", "closed" }, nil, connection.exec, connection, "x")
  assert(not connection:is_open())
end)

case("a reset in the middle of output", function()
  local connection <close> = ssh.connect(options("resetoutput"))
  local came = task.event()
  fails({ "reset", "closed" }, nil, connection.exec, connection, "x", {
    on_stdout = function()
      came:set()
    end,
    stdin = function()
      came:wait()
      return "some came\n"
    end,
  })
  assert(came:is_set(), "nothing came before it")
end)

case("a reset in the middle of input", function()
  local connection <close> = ssh.connect(options("resetinput"))
  fails({ "reset", "closed" }, nil, connection.exec, connection, "x", { stdin = ("i"):rep(8000000) })
end)

case("control: as much input without one", function()
  local connection <close> = ssh.connect(options("plain"))
  local result = connection:exec("cat", { stdin = ("i"):rep(8000000) })
  assert(result.code == 0 and #result.stdout == 8000000)
end)

case("descriptors that run out", function()
  local script = scratch .. "/many.lua"
  fs.write(
    script,
    ([[
    local ssh = require("ciranda.ssh")
    local connections = {}
    for index = 1, 100 do
      local ok, err = pcall(ssh.connect, { host = %q, port = %d, user = "plain", keys = { %q }, agent = false,
        config = false, known_hosts = false, pins = { %q } })
      if not ok then
        print(index, err.code, err.phase, tostring(err))
        break
      end
      connections[index] = ok and err
    end
    for _, connection in ipairs(connections) do
      assert(connection:exec("echo still").stdout == "still\n")
      connection:close()
    end
  ]]):format(address, port, user_key, pin:match("%S+ %S+"))
  )
  local result = process.run({
    "sh",
    "-c",
    'ulimit -n 48; exec "$@"',
    "sh",
    require("ciranda.core.engine").executable,
    script,
    timeout = 25,
  })
  assert(result.code == 0, result.stderr)
  assert(result.stdout:find("too many open files", 1, true), result.stdout)
  assert(result.stdout:find("ulimit -n", 1, true), result.stdout)
end)

case("nothing is left open after all that", function()
  local open
  patience.wait_for(function()
    return ("%d sockets are open"):format(open)
  end, function()
    collectgarbage()
    open = open_sockets()
    return open <= open_before
  end, 20)
end)

node:close()
fs.remove_tree(scratch)
cases.finish("faults")
