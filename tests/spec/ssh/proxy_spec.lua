local fs = require("ciranda.io.fs")
local proxy = require("ciranda.ssh.proxy")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

describe("a connection that goes through others", function()
  local target, first, second, known

  setup(function()
    target, first, second = support.server(), support.server(), support.server()
    local lines = {}
    for index, server in ipairs({ target, first, second }) do
      lines[index] = ("[%s]:%d %s\n"):format(server.address, server.port, server:pin())
    end
    known = support.write("known_hosts", table.concat(lines))
  end)

  teardown(function()
    target:stop()
    first:stop()
    second:stop()
    support.clean()
  end)

  local function hop(server)
    return ("%s@%s:%d"):format(server.user, server.address, server.port)
  end

  local function options(others)
    others.pins = ""
    others.known_hosts = known
    return target:options(others)
  end

  it("reads jump hosts in all their forms", function()
    assert.are.same({ host = "h" }, proxy.parse_hop("h"))
    assert.are.same({ host = "h", user = "u", port = 7 }, proxy.parse_hop("u@h:7"))
    assert.are.same({ host = "::1", user = "u@d", port = 7 }, proxy.parse_hop("ssh://u@d@[::1]:7"))
    for _, wrong in ipairs({ "", "@h", "h:0", "h:x", "a b:c:d" }) do
      fails("usage", nil, proxy.parse_hop, wrong)
    end
  end)

  it("takes one jump host, and moves much in both directions", function()
    local connection <close> = ssh.connect(options({ jump = hop(first) }))
    local data = ("j"):rep(6000000)
    local result = connection:exec("cat; echo $SSH_CONNECTION >&2", { stdin = data })
    assert.is_true(result.stdout == data)
    -- The target saw the jump host's side of the tunnel as the peer.
    assert.is_truthy(result.stderr:find(target.address .. " " .. target.port, 1, true))
    assert.is_true(#first:sessions() > 0)
  end)

  it("takes several, each with its host key verified", function()
    local connection <close> = ssh.connect(options({ jump = hop(first) .. "," .. hop(second) }))
    assert.are.equal("hi\n", connection:exec("echo hi").stdout)
    assert.is_true(#first:sessions() > 0 and #second:sessions() > 0)
    -- The control: a jump host whose key is unknown is refused.
    local half =
      support.write("known_hosts", ("[%s]:%d %s\n"):format(target.address, target.port, target:pin()))
    local err = fails(
      "hostkey",
      "hostkey",
      ssh.connect,
      target:options({ pins = "", known_hosts = half, jump = hop(first) })
    )
    assert.is_truthy(err.message:find(first.address, 1, true))
  end)

  it("shares a jump host, and closes it with the last", function()
    local function logins()
      return (select(2, second:log():gsub("Accepted publickey", "")))
    end
    -- Who is asked for with the same options is the same.
    local before, given = logins(), options({ jump = hop(second) })
    local list = task.map({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, function()
      return ssh.connect(given)
    end)
    for _, connection in ipairs(list) do
      assert.are.equal("hi\n", connection:exec("echo hi").stdout)
      connection:close()
    end
    -- One login on the jump host more than the specs before have made, for twelve connections.
    assert.are.equal(before + 1, logins())
    assert.is_true(support.wait_for(function()
      return #second:sessions() == 0
    end))
  end)

  it("knows a shared jump host's keys for as long as it is shared", function()
    -- Other keys at the address of these would be taken for the same.
    local keys = setmetatable({}, { __mode = "v" })
    local given = options({ jump = hop(second) })
    keys[1] = given.keys
    local connection = ssh.connect(given)
    given = nil -- luacheck: ignore 311
    collectgarbage()
    assert.is_table(keys[1])
    connection:close()
    connection = nil -- luacheck: ignore 311
    assert.is_true(support.wait_for(function()
      collectgarbage()
      return keys[1] == nil
    end))
  end)

  it("goes through a connection that is there", function()
    local jump <close> = ssh.connect(first:options())
    do
      local connection <close> = ssh.connect(options({ jump = jump }))
      assert.are.equal("hi\n", connection:exec("echo hi").stdout)
    end
    assert.are.equal("still\n", jump:exec("echo still").stdout)
  end)

  it("fails with its jump host, and names the way", function()
    local closed = support.tcp(function() end)
    closed.stop()
    task.sleep(0.05)
    local err = fails(
      "refused",
      "connect",
      ssh.connect,
      options({ jump = ("x@%s:%d"):format(closed.address, closed.port) })
    )
    assert.is_truthy(err.message:find(closed.address, 1, true))
    -- The jump host is there and cannot reach the target.
    err = fails(
      "refused",
      nil,
      ssh.connect,
      options({ jump = hop(first), host = closed.address, port = closed.port })
    )
    assert.is_truthy(tostring(err):find(first.address, 1, true), tostring(err))
  end)

  it("breaks when its jump host breaks", function()
    local connection <close> = ssh.connect(options({ jump = hop(first) }))
    local channel <close> = connection:start("sleep 20")
    for _, pid in ipairs(first:sessions()) do
      uv.kill(pid, "sigkill")
    end
    local ok, err = pcall(channel.read, channel)
    assert.is_false(ok)
    assert.are.equal("closed", err.code)
  end)

  it("is told by ssh_config, and circles in it are noticed", function()
    local file = support.write(
      "config",
      ([[
      Host inner
        HostName %s
        Port %d
        User %s
        ProxyJump outer
        HostKeyAlias [%s]:%d
      Host outer
        HostName %s
        Port %d
        User %s
      Host round
        ProxyJump round
    ]]):format(
        target.address,
        target.port,
        target.user,
        target.address,
        target.port,
        first.address,
        first.port,
        first.user
      )
    )
    local key = support.key("ed25519")
    local connection <close> = ssh.connect({
      host = "inner",
      config = file,
      keys = { key },
      agent = false,
      known_hosts = support.write(
        "known_hosts",
        fs.read(known) .. ("[[%s]:%d]:%d %s\n"):format(target.address, target.port, target.port, target:pin())
      ),
    })
    assert.are.equal("hi\n", connection:exec("echo hi").stdout)
    local err =
      fails("usage", nil, ssh.connect, { host = "round", config = file, keys = { key }, agent = false })
    assert.is_truthy(err.message:find("circles", 1, true))
  end)

  it("goes through a command", function()
    local line =
      "/usr/bin/ssh -q -F none -i %s -o UserKnownHostsFile=%s -o BatchMode=yes -p %d -W %s:%d %s@%s"
    local connection <close> = ssh.connect(options({
      proxy_command = line:format(
        support.key("ed25519"),
        known,
        first.port,
        target.address,
        target.port,
        first.user,
        first.address
      ),
    }))
    local data = ("p"):rep(3000000)
    assert.is_true(connection:exec("cat", { stdin = data }).stdout == data)
    connection:close()
    -- Nothing of the command is left.
    assert.is_true(support.wait_for(function()
      return #first:sessions() == 0
    end))
  end)

  it("tells a command's own failure from the host's, and tries one that is not there once", function()
    local tries = support.path("tries")
    local function fail(line)
      fs.write(tries, "")
      local ok, err =
        pcall(ssh.connect, options({ proxy_command = ("sh -c 'echo >> %s; %s'"):format(tries, line) }))
      assert.is_false(ok)
      return err, #fs.read(tries)
    end
    local err, times = fail("exit 3")
    assert.is_true(err.code == "closed" or err.code == "reset", tostring(err))
    assert.are.equal("banner", err.phase)
    assert.matches(
      "the proxy command ended before the host had said who it is (exit status 3)",
      err.message,
      1,
      true
    )
    assert.are.equal(4, times)
    err = fail("kill -9 $$")
    assert.matches("(signal 9)", err.message, 1, true)
    -- The host may have hung up on one that ends well.
    err = fail("exit 0")
    assert.matches("MaxStartups", err.message, 1, true)
    err, times = fail("exec /nonexistent/nc 2>/dev/null")
    assert.are.equal("failed", err.code)
    assert.matches("the proxy command cannot be started (exit status 127)", err.message, 1, true)
    assert.are.equal(1, times)
  end)

  it("goes through a carrier of the caller's own", function()
    local closed = 0
    local function carrier(address, port)
      local socket = uv.new_tcp()
      local session
      local function on_data(_, data)
        if not data then
          session:feed_end()
        elseif not session:feed(data) then
          socket:read_stop()
        end
      end
      local connected, waiting = false, nil
      socket:connect(address, port, function(err)
        if err then
          return session:feed_end()
        end
        connected = true
        socket:read_start(on_data)
        if waiting then
          socket:write(waiting, function()
            session:written()
          end)
        end
      end)
      return {
        request = {
          write = function(data)
            if not connected then
              waiting = data
              return
            end
            socket:write(data, function()
              session:written()
            end)
          end,
          drained = function()
            socket:read_start(on_data)
          end,
        },
        attach = function(engine_session)
          session = engine_session
        end,
        close = function()
          closed = closed + 1
          socket:close()
        end,
      }
    end
    do
      local connection <close> = ssh.connect(options({ carrier = carrier }))
      local data = ("c"):rep(5000000)
      assert.is_true(connection:exec("cat", { stdin = data }).stdout == data)
    end
    assert.is_true(support.wait_for(function()
      return closed == 1
    end))
    local gone = support.tcp(function() end)
    gone.stop()
    task.sleep(0.05)
    fails(
      "closed",
      "banner",
      ssh.connect,
      options({ carrier = carrier, host = gone.address, port = gone.port })
    )
  end)

  it("carries other things than SSH", function()
    local echo <close> = support.tcp(function(client)
      client:read_start(function(_, data)
        if data then
          client:write(data:upper())
        end
      end)
    end)
    local connection <close> = ssh.connect(first:options())
    local tunnel <close> = connection:tunnel(echo.address, echo.port)
    tunnel:write("hello")
    assert.are.equal("HELLO", (tunnel:read()))
  end)
end)
