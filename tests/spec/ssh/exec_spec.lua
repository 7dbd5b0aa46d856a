local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

describe("a command", function()
  local server, connection

  setup(function()
    server = support.server({ config = { "MaxSessions 10" } })
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  before_each(function()
    connection = ssh.connect(server:options())
  end)

  after_each(function()
    connection:close()
  end)

  it("gives its exit status, 0 as well", function()
    for _, status in ipairs({ 0, 1, 7, 255 }) do
      local result = connection:exec("exit " .. status)
      assert.are.equal(status, result.code)
      assert.is_nil(result.signal)
    end
  end)

  it("that a signal ends has no status", function()
    local result = connection:exec("kill -KILL $$")
    assert.are.same({ nil, "KILL" }, { result.code, result.signal })
    assert.are.equal("SIGKILL", result:reason())
    fails("failed", nil, result.check, result)
  end)

  it("whose server tells neither is not taken for success", function()
    -- The session's process is killed before it can report: the channel closes without a status.
    local channel <close> = connection:start("echo ready; sleep 20")
    assert.are.equal("ready\n", (channel:read()))
    for _, pid in ipairs(server:sessions()) do
      local ok, name = pcall(require("ciranda.io.fs").read, ("/proc/%d/comm"):format(pid))
      if ok and name:find("sshd") then
        uv.kill(pid, "sigkill")
      end
    end
    local ok, err = pcall(function()
      while channel:read() do
      end
      return channel:wait()
    end)
    assert.is_false(ok)
    assert.is_true(errors.is(err, "closed", "reset"), tostring(err))
    assert.is_falsy(connection:is_open())
  end)

  it("keeps both streams apart and every byte as it is", function()
    local all = {}
    for byte = 0, 255 do
      all[#all + 1] = string.char(byte)
    end
    local bytes = table.concat(all):rep(300)
    local result = connection:exec("tee /dev/stderr", { stdin = bytes })
    assert.are.equal(#bytes, #result.stdout)
    assert.is_true(result.stdout == bytes)
    assert.is_true(result.stderr == bytes)
  end)

  it("may write much to both streams, more than a window holds", function()
    local size = 12 * 1024 * 1024
    local result = connection:exec(
      ("head -c %d /dev/zero & head -c %d /dev/zero | tr '\\0' x >&2; wait"):format(size, size)
    )
    assert.are.equal(0, result.code)
    assert.is_true(result.stdout == ("\0"):rep(size))
    assert.is_true(result.stderr == ("x"):rep(size))
  end)

  it("may write long lines without an end", function()
    local result = connection:exec("head -c 3000000 /dev/zero | tr '\\0' a")
    assert.are.equal(3000000, #result.stdout)
    assert.is_nil(result.stdout:find("[^a]"))
  end)

  it("waits while its output is not read", function()
    local written = server.home .. "/written"
    local channel <close> = connection:start(("head -c 30000000 /dev/zero; echo done > '%s'"):format(written))
    channel:read()
    task.sleep(0.5)
    local client <close> = connection:sftp()
    assert.is_nil(client:exists(written))
    -- The control: read on, and it ends.
    local total = 0
    for data in channel.read, channel do
      total = total + #data
    end
    assert.are.equal(0, channel:wait().code)
    assert.are.equal("file", client:exists(written))
    assert.is_true(total > 29000000)
  end)

  it("gives pieces to functions in order, which may wait", function()
    local pieces, stderr = {}, {}
    local result = connection:exec("for i in 1 2 3; do echo $i; echo e$i >&2; sleep 0.05; done", {
      on_stdout = function(bytes)
        task.sleep(0.01)
        pieces[#pieces + 1] = bytes
      end,
      on_stderr = function(bytes)
        stderr[#stderr + 1] = bytes
      end,
    })
    assert.are.equal("1\n2\n3\n", table.concat(pieces))
    assert.are.equal("e1\ne2\ne3\n", table.concat(stderr))
    assert.are.same({ "", "" }, { result.stdout, result.stderr })
  end)

  it("reads standard input from a function", function()
    local left = 50
    local result = connection:exec("wc -c", {
      stdin = function()
        left = left - 1
        return left >= 0 and ("y"):rep(100000) or nil
      end,
    })
    assert.are.equal("5000000", result.stdout:match("%d+"))
  end)

  it("reads standard input from a file, which must be there", function()
    local path = support.write("input", ("line\n"):rep(200000))
    local result = connection:exec("md5sum; exit 3", { stdin = { path = path } })
    assert.are.equal(3, result.code)
    assert.are.equal(crypto.hex(crypto.digest("md5", fs.read(path))), result.stdout:match("%x+"))
    fails("not_found", nil, connection.exec, connection, "cat", { stdin = { path = path .. ".not" } })
  end)

  it("must say something in time when that is asked, and may then take its own", function()
    local err = fails("timeout", "first_byte", connection.exec, connection, "sleep 30", { first_byte = 0.3 })
    assert.is_truthy(err.message:find("has said nothing for 0.3 s", 1, true))
    local talks = patience.within_more(0.9, function(seconds)
      local command = ("echo first; sleep %g; echo last"):format(seconds + 0.1)
      local ok, talks = pcall(connection.exec, connection, command, { first_byte = seconds })
      return ok, talks
    end)
    assert.are.equal("first\nlast\n", talks.stdout, tostring(talks))
    assert.are.equal(7, connection:exec("exit 7", { first_byte = 20 }).code)
    fails(
      "timeout",
      "exec",
      connection.exec,
      connection,
      "echo; sleep 300",
      { first_byte = 60, timeout = 0.5 }
    )
  end)

  it("that ends without reading its input is no failure", function()
    local result = connection:exec("exit 5", { stdin = ("z"):rep(5000000) })
    assert.are.equal(5, result.code)
  end)

  it("has the environment it was given, with any value", function()
    local value = 'it\'s "quoted" $HOME\nand more'
    local result = connection:exec('printf %s "$CIRANDA_TEST"; exit 9', { env = { CIRANDA_TEST = value } })
    assert.are.equal(value, result.stdout)
    assert.are.equal(9, result.code)
    fails("misuse", nil, connection.exec, connection, "true", { env = { ["bad name"] = "x" } })
    local cut = { command = "true", env = { { "LANG", "C\0D" } } } -- what the protocol itself carries
    assert.matches("zero byte", select(2, pcall(connection.session.exec, connection.session, cut, print)))
  end)

  it("has a terminal when asked", function()
    local ok, result = pcall(connection.exec, connection, "test -t 0 && stty size", {
      pty = { columns = 123, rows = 45 },
    })
    if not ok and not support.is_root then
      pending("the system gives ordinary users no terminal")
      return
    end
    assert.is_true(ok, tostring(result))
    assert.is_truthy(result.stdout:find("45 123", 1, true), result.stdout)
    assert.are_not.equal(0, connection:exec("test -t 0").code)
  end)

  it("takes signals", function()
    local channel <close> =
      connection:start("trap 'echo caught; exit 12' TERM; echo ready; while :; do sleep 0.05; done")
    assert.are.equal("ready\n", (channel:read()))
    assert.is_true(channel:signal("TERM"))
    local said = {}
    for data in channel.read, channel do
      said[#said + 1] = data
    end
    assert.is_truthy(table.concat(said):find("caught\n", 1, true))
    assert.are.equal(12, channel:wait().code)
    assert.is_false(channel:signal("TERM"))
  end)

  it("that is given up gets TERM and frees its channel", function()
    local mark = server.home .. "/term"
    patience.within_more(0.3, function(seconds)
      local began, ready = uv.hrtime(), false
      local err = fails(
        "timeout",
        "exec",
        connection.exec,
        connection,
        ("trap \"echo yes > '%s'; exit\" TERM; echo ready; sleep 120 & wait"):format(mark),
        {
          timeout = seconds,
          on_stdout = function()
            ready = true
          end,
        }
      )
      assert.is_true((uv.hrtime() - began) / 1e9 < 60)
      assert.is_truthy(err.message:find(("%g s"):format(seconds), 1, true), err.message)
      return ready
    end)
    patience.wait_for("the command's own end", function()
      return fs.exists(mark) == "file"
    end)
    assert.are.equal("still\n", connection:exec("echo still").stdout)
  end)

  it("ends for us when it has ended, though a child holds its output", function()
    local channel <close> = connection:start("sleep 120 & echo $!; exit 6")
    local pid = (channel:read()):match("%d+")
    local began = uv.hrtime()
    assert.are.equal(6, channel:wait().code)
    assert.is_true((uv.hrtime() - began) / 1e9 < 60)
    connection:exec("kill " .. pid)
  end)

  it("is one of many on a connection", function()
    local numbers = {}
    for index = 1, 40 do
      numbers[index] = index
    end
    local results = task.map(numbers, function(number)
      return connection:exec(("echo %d; sleep 0.02; exit %d"):format(number, number))
    end)
    for index, result in ipairs(results) do
      assert.are.equal(index .. "\n", result.stdout)
      assert.are.equal(index, result.code)
    end
  end)

  it("waits for a channel where the server allows few, and is refused where it allows none", function()
    local narrow <close> = support.server({ config = { "MaxSessions 2" } })
    local few <close> = ssh.connect(narrow:options())
    -- Our own limit is eight; the server's is two, which is learnt from its refusal.
    local results = task.map({ 1, 2, 3, 4, 5, 6 }, function(number)
      return few:exec(("sleep 0.1; echo %d"):format(number)).stdout
    end)
    assert.are.equal("1\n2\n3\n4\n5\n6\n", table.concat(results))
    -- Of a server that allows one, the refusal of the others often comes when that one has ended.
    local narrowest <close> = support.server({ config = { "MaxSessions 1" } })
    for _ = 1, 10 do
      local one <close> = ssh.connect(narrowest:options())
      results = task.map({ 1, 2, 3, 4 }, function(number)
        return one:exec(("echo %d"):format(number)).stdout
      end)
      assert.are.equal("1\n2\n3\n4\n", table.concat(results))
    end
    local none <close> = support.server({ config = { "MaxSessions 0" } })
    local closed <close> = ssh.connect(none:options())
    local err = fails("refused", "channel", closed.exec, closed, "true")
    assert.is_truthy(tostring(err):find(none.address, 1, true))
  end)

  it("fails when the connection breaks, and says where", function()
    local channel <close> = connection:start("sleep 20")
    local scope <close> = task.scope()
    scope:spawn(function()
      task.sleep(0.1)
      for _, pid in ipairs(server:sessions()) do
        uv.kill(pid, "sigkill")
      end
    end)
    local ok, err = pcall(channel.read, channel)
    assert.is_false(ok)
    assert.is_true(errors.is(err, "closed", "reset"), tostring(err))
    assert.is_truthy(tostring(err):find(server.address, 1, true))
    local again, other = pcall(connection.exec, connection, "true")
    assert.is_false(again)
    assert.is_true(errors.is(other, "closed", "reset"), tostring(other))
  end)

  it("keeps to the limit of output that is kept", function()
    local err =
      fails("invalid", nil, connection.exec, connection, "head -c 200000 /dev/zero", { max_output = 100000 })
    assert.is_truthy(err.message:find("on_stdout", 1, true))
  end)

  it("survives new keys every megabyte, reading and writing", function()
    local rekeying <close> = support.server({ config = { "RekeyLimit 1M" } })
    local busy <close> = ssh.connect(rekeying:options())
    local size = 24 * 1024 * 1024
    local down = busy:exec(("head -c %d /dev/zero"):format(size))
    assert.are.equal(size, #down.stdout)
    local up = busy:exec("wc -c", { stdin = ("u"):rep(size) })
    assert.are.equal(tostring(size), up.stdout:match("%d+"))
    local both = busy:exec("cat", { stdin = ("b"):rep(size) })
    assert.is_true(both.stdout == ("b"):rep(size))
  end)

  it("whose bytes are damaged on their way fails at once, whatever the cipher", function()
    for _, cipher in ipairs({ "chacha20-poly1305@openssh.com", "aes128-gcm@openssh.com", "aes256-ctr" }) do
      local other <close> = support.server({ config = { "Ciphers " .. cipher } })
      -- Between the two: one bit is turned over after 300 kB.
      local relay <close> = support.tcp(function(near)
        local far, passed = uv.new_tcp(), 0
        far:connect(other.address, other.port, function()
          near:read_start(function(_, bytes)
            if bytes then
              far:write(bytes)
            elseif not far:is_closing() then
              far:close()
            end
          end)
          far:read_start(function(_, bytes)
            if not bytes or near:is_closing() then
              return
            end
            local at = 300000 - passed
            passed = passed + #bytes
            if at > 0 and at <= #bytes then
              bytes = bytes:sub(1, at - 1) .. string.char(bytes:byte(at) ~ 1) .. bytes:sub(at + 1)
            end
            near:write(bytes)
          end)
        end)
      end)
      local options = other:options()
      options.address, options.port = relay.address, relay.port
      local damaged <close> = ssh.connect(options)
      local ok, err = pcall(damaged.exec, damaged, "head -c 2000000 /dev/zero", { timeout = 30 })
      assert.is_false(ok, cipher)
      assert.equal("protocol", err.code, cipher .. ": " .. tostring(err))
    end
  end)

  it("is noticed as lost when the server is stopped, with its words", function()
    local stopped = ssh.connect(server:options({ keepalive = { interval = 0.3, count = 10 } }))
    local channel <close> = stopped:start("sleep 20")
    -- The control: while the server answers, silence is no failure.
    task.sleep(4)
    assert.is_true(stopped:is_open())
    local pids = {}
    for _, pid in ipairs(server:sessions()) do
      pids[#pids + 1] = pid
      uv.kill(pid, "sigstop")
    end
    local ok, err = pcall(channel.read, channel)
    for _, pid in ipairs(pids) do
      uv.kill(pid, "sigcont")
    end
    assert.is_false(ok)
    assert.are.equal("lost", err.code)
    assert.is_truthy(err.message:find("nothing was heard", 1, true), err.message)
    stopped:close()
  end)

  it("says of a write that comes too late what has ended it", function()
    local stopped <close> = ssh.connect(server:options())
    local channel <close> = stopped:start("cat")
    local pids = {}
    for _, pid in ipairs(server:sessions()) do
      pids[#pids + 1] = pid
      uv.kill(pid, "sigstop")
    end
    stopped:keepalive(0.1, 1)
    local lost = support.wait_for(function()
      return not stopped:is_open()
    end)
    for _, pid in ipairs(pids) do
      uv.kill(pid, "sigcont")
    end
    assert.is_true(lost)
    support.fails("lost", nil, channel.write, channel, "late")
  end)

  it("is kept alive where no channel is open", function()
    local idle <close> = ssh.connect(server:options({ keepalive = { interval = 0.2, count = 15 } }))
    task.sleep(4)
    assert.is_true(idle:is_open())
    assert.are.equal("hi\n", idle:exec("echo hi").stdout)
    task.sleep(0.3)
    assert.are.equal("hi\n", idle:exec("echo hi").stdout)
  end)

  it("answers a server that asks for signs of life while idle", function()
    local asking <close> = support.server({ config = { "ClientAliveInterval 1", "ClientAliveCountMax 2" } })
    local idle <close> = ssh.connect(asking:options({ keepalive = { interval = 0.5, count = 10 } }))
    -- One that has never had a channel, and asks for nothing itself.
    local unused <close> = ssh.connect(asking:options({ keepalive = false }))
    idle:exec("true")
    task.sleep(7) -- OpenSSH 9.2 hangs up after 6
    assert.is_true(idle:is_open())
    assert.are.equal("hi\n", idle:exec("echo hi").stdout)
    assert.is_true(unused:is_open())
    assert.are.equal("hi\n", unused:exec("echo hi").stdout)
  end)
end)
