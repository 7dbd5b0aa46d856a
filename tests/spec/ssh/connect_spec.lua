local fs = require("ciranda.io.fs")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

describe("ssh.connect", function()
  local server

  setup(function()
    server = support.server({
      host_keys = { support.keygen("-t", "ed25519"), support.key("rsa"), support.keygen("-t", "ecdsa") },
      authorized = { support.key("ed25519"), support.key("rsa"), support.key("ecdsa") },
    })
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  it("logs in and runs a command", function()
    local connection <close> = ssh.connect(server:options())
    local result = connection:exec("echo out; echo err >&2; exit 3")
    assert.are.same({ "out\n", "err\n", 3 }, { result.stdout, result.stderr, result.code })
    assert.is_nil(result.signal)
    assert.are.equal("pinned", connection.host_key.trust)
  end)

  it("logs in with each type of key", function()
    for _, kind in ipairs({ "ed25519", "rsa", "ecdsa" }) do
      local connection <close> = ssh.connect(server:options({ keys = { support.key(kind) } }))
      assert.are.equal("hi\n", connection:exec("echo hi").stdout)
    end
    -- The server really saw a SHA-2 signature.
    assert.is_truthy(server:log():find("Accepted publickey for " .. server.user .. ".-RSA"))
  end)

  it("verifies host keys of each type", function()
    for index, kind in ipairs({ "ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256" }) do
      local connection <close> = ssh.connect(server:options({ pins = { server:pin(index) } }))
      assert.are.equal(kind, connection.host_key.type)
    end
  end)

  describe("refuses a host key", function()
    it("that differs from the pins, naming both fingerprints", function()
      local other = support.public(support.keygen("-t", "ed25519"))
      local err = fails("hostkey", "hostkey", ssh.connect, server:options({ pins = { other } }))
      assert.are.equal("changed", err.reason)
      assert.is_truthy(err.message:find("SHA256:%S+ %(ssh%-ed25519%), but SHA256:"))
      assert.is_truthy(err.message:find(server.address, 1, true))
    end)

    it("when the list of pins is empty", function()
      local err = fails("hostkey", "hostkey", ssh.connect, server:options({ pins = {} }))
      assert.are.equal("changed", err.reason)
    end)

    it("that nobody knows, unless it is to be accepted unseen", function()
      local err = fails("hostkey", "hostkey", ssh.connect, server:options({ pins = "" }))
      assert.are.equal("unknown", err.reason)

      local file = support.path("known_hosts")
      local options = server:options({ pins = "", known_hosts = file, host_key_policy = "accept-new" })
      ssh.connect(options):close()
      local line = fs.read(file)
      assert.are.equal(("[%s]:%d %s\n"):format(server.address, server.port, server:pin()), line)
      -- The second time it is known, to the strict as well.
      options.host_key_policy = "strict"
      local connection <close> = ssh.connect(options)
      assert.are.equal("known", connection.host_key.trust)
      assert.are.equal(line, fs.read(file))
    end)

    it("that has changed, also under accept-new", function()
      local other = support.public(support.keygen("-t", "ed25519"))
      local file = support.write("known_hosts", ("[%s]:%d %s\n"):format(server.address, server.port, other))
      local options = server:options({ pins = "", known_hosts = file, host_key_policy = "accept-new" })
      local err = fails("hostkey", "hostkey", ssh.connect, options)
      assert.are.equal("changed", err.reason)
      assert.is_truthy(err.message:find("ssh-keygen -R", 1, true))
      assert.is_truthy(err.message:find(file .. ":1", 1, true))
    end)

    it("that has changed under an alias, which stands for the host and its port", function()
      local other = support.public(support.keygen("-t", "ed25519"))
      local file = support.write("known_hosts", ("tpu.1 %s\n"):format(other))
      local options = server:options({ pins = "", known_hosts = file, host_key_policy = "accept-new" })
      options.host_key_alias = "tpu.1"
      local err = fails("hostkey", "hostkey", ssh.connect, options)
      assert.are.equal("changed", err.reason)
      assert.is_truthy(err.message:find("ssh-keygen -R 'tpu.1'", 1, true))

      options.host_key_alias = "tpu.2"
      ssh.connect(options):close()
      assert.are.equal(("tpu.1 %s\ntpu.2 %s\n"):format(other, server:pin()), fs.read(file))
    end)

    it("that is revoked, whatever else vouches for it", function()
      local name = ("[%s]:%d"):format(server.address, server.port)
      local file = support.write(
        "known_hosts",
        ("%s %s\n@revoked %s %s\n"):format(name, server:pin(), name, server:pin())
      )
      local err = fails("hostkey", "hostkey", ssh.connect, server:options({ pins = "", known_hosts = file }))
      assert.are.equal("revoked", err.reason)
      err = fails("hostkey", "hostkey", ssh.connect, server:options({ known_hosts = file }))
      assert.are.equal("revoked", err.reason)
    end)

    it("vouched for by a certificate authority only, and says that it cannot", function()
      local authority = support.public(support.keygen("-t", "ed25519"))
      local file = support.write("known_hosts", ("@cert-authority * %s\n"):format(authority))
      local err = fails("hostkey", "hostkey", ssh.connect, server:options({ pins = "", known_hosts = file }))
      assert.are.equal("authority", err.reason)
    end)
  end)

  it("asks the server for the type of key that is known", function()
    -- Without an order of its own libssh2 would negotiate ECDSA, which this file does not know.
    local file =
      support.write("known_hosts", ("[%s]:%d %s\n"):format(server.address, server.port, server:pin(2)))
    local connection <close> = ssh.connect(server:options({ pins = "", known_hosts = file }))
    assert.are.equal("ssh-rsa", connection.host_key.type)
  end)

  describe("names phase, host and remedy", function()
    local function names_host(err, text)
      assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
    end

    it("of a port where nothing listens", function()
      local closed = support.tcp(function() end)
      closed.stop()
      task.sleep(0.05)
      local options = server:options({ host = closed.address, port = closed.port })
      local err = fails("refused", "connect", ssh.connect, options)
      names_host(err, ("%s:%d"):format(closed.address, closed.port))
      names_host(err, "is sshd running")
    end)

    it("of a name that does not exist", function()
      -- No name has so long a part, which is known without asking a name server: one that is slow is another failure.
      local name = ("x"):rep(64) .. ".invalid"
      local err = fails("resolve", "resolve", ssh.connect, server:options({ host = name }))
      names_host(err, name)
    end)

    it("of a server that never says who it is", function()
      local silent <close> = support.tcp(function() end)
      local options = server:options({
        host = silent.address,
        port = silent.port,
        timeouts = { banner = 0.3 },
      })
      local began = uv.hrtime()
      local err = fails("timeout", "banner", ssh.connect, options)
      names_host(err, silent.address)
      assert.is_true((uv.hrtime() - began) / 1e9 >= 0.29)
    end)

    describe("of a server that", function()
      --- A packet as it is before keys are exchanged.
      local function packet(payload)
        local padding = 8 - (5 + #payload) % 8 + 8
        return (">I4B"):pack(1 + #payload + padding, padding) .. payload .. ("\0"):rep(padding)
      end

      --- A server that answers the client's proposal by `answer(client, proposal)`.
      local function proposing(answer)
        return support.tcp(function(client)
          local text, answered = "", false
          client:write("SSH-2.0-other\r\n")
          client:read_start(function(_, data)
            text = text .. (data or "")
            local size, padding, at = (">I4B"):unpack(text:match("\n(.....)") or "\0\0\0\0\0")
            local proposal = text:match("\n.....(.*)") or ""
            if not answered and at and size > 0 and #proposal >= size - 1 then
              answered = true
              answer(client, proposal:sub(1, size - 1 - padding))
            end
          end)
        end)
      end

      it("sends packets without end before it has shown who it is", function()
        local noise, sent = packet(("\192"):rep(30000)), 0 -- 192: a type that nobody has defined
        local flood <close> = proposing(function(client, proposal)
          local function more()
            if sent < 256 << 20 and not client:is_closing() then
              sent = sent + #noise
              client:write(noise, more)
            end
          end
          -- The client's own proposal, without what servers do not say: so they agree.
          local names, rest = (">s4"):unpack(proposal, 18)
          names = names:gsub("ext%-info%-c,", ""):gsub("kex%-strict%-c[^,]*,", "")
          client:write(packet(proposal:sub(1, 17) .. (">s4"):pack(names) .. proposal:sub(rest)))
          more()
        end)
        local options = server:options({ host = flood.address, port = flood.port, timeouts = { kex = 60 } })
        local err = fails("protocol", "kex", ssh.connect, options)
        names_host(err, "sends without end")
        assert.is_true(sent < 64 << 20, sent .. " bytes were taken")
      end)

      it("lists what only a client says, which is no key exchange", function()
        for _, name in ipairs({ "ext-info-c", "kex-strict-c-v00@openssh.com", "xxt-info-c" }) do
          local odd <close> = proposing(function(client, proposal)
            local _, rest = (">s4"):unpack(proposal, 18)
            client:write(packet(proposal:sub(1, 17) .. (">s4"):pack(name) .. proposal:sub(rest)))
          end)
          local options = server:options({ host = odd.address, port = odd.port })
          fails("unsupported", "kex", ssh.connect, options)
        end
      end)
    end)

    it("but waits for one that is slow to", function()
      -- The control: the same server, forwarding to sshd after a pause that is within the deadline.
      local slow <close> = support.tcp(function(client)
        local upstream = uv.new_tcp()
        upstream:connect(server.address, server.port, function()
          client:read_start(function(_, data)
            if data then
              upstream:write(data)
            else
              upstream:close()
            end
          end)
          local timer = uv.new_timer()
          timer:start(200, 0, function()
            timer:close()
            upstream:read_start(function(_, data)
              if data and not client:is_closing() then
                client:write(data)
              end
            end)
          end)
        end)
      end)
      local options = server:options({
        host = slow.address,
        port = slow.port,
        timeouts = { banner = 60 },
      })
      local connection <close> = ssh.connect(options)
      assert.are.equal("hi\n", connection:exec("echo hi").stdout)
    end)

    it("of a server that hangs up first, as MaxStartups does", function()
      local rude <close> = support.tcp(function(client)
        client:close()
      end)
      local options = server:options({ host = rude.address, port = rude.port })
      local ok, err = pcall(ssh.connect, options)
      assert.is_false(ok)
      assert.is_true(err.code == "closed" or err.code == "reset", tostring(err))
      assert.are.equal("banner", err.phase)
      names_host(err, "MaxStartups")
    end)

    it("of something that speaks no SSH", function()
      local web <close> = support.tcp(function(client)
        client:write("HTTP/1.1 400 Bad Request\r\n\r\n")
      end)
      local options = server:options({ host = web.address, port = web.port, timeouts = { banner = 0.3 } })
      fails("timeout", "banner", ssh.connect, options)
    end)

    it("of a key that the server does not take", function()
      local stranger = support.keygen("-t", "ed25519")
      local err = fails("auth", "auth", ssh.connect, server:options({ keys = { stranger } }))
      assert.are.equal("key_refused", err.reason)
      names_host(err, stranger)
      names_host(err, "publickey")
      names_host(err, server.user)
    end)

    it("of a key file that is not there, or that others may read", function()
      local err = fails("not_found", nil, ssh.connect, server:options({ keys = { "/nonexistent/key" } }))
      names_host(err, "/nonexistent/key")
      local open = support.keygen("-t", "ed25519")
      fs.chmod(open, tonumber("644", 8))
      err = fails("permission", nil, ssh.connect, server:options({ keys = { open } }))
      names_host(err, "chmod 600")
    end)

    it("of no common algorithm", function()
      local odd <close> = support.server({
        config = { "KexAlgorithms sntrup761x25519-sha512@openssh.com" },
      })
      local err = fails("unsupported", "kex", ssh.connect, odd:options())
      names_host(err, odd.address)
    end)
  end)

  it("tries the next key when one is refused, and the next address", function()
    local stranger = support.keygen("-t", "ed25519")
    local connection <close> = ssh.connect(server:options({ keys = { stranger, support.key("ed25519") } }))
    assert.are.equal(support.key("ed25519"), connection.key)
  end)

  it("stops offering keys before the server loses patience", function()
    local strangers = {}
    for index = 1, 7 do
      strangers[index] = support.keygen("-t", "ed25519")
    end
    local err = fails("auth", "auth", ssh.connect, server:options({ keys = strangers }))
    -- Either we stop at six, or the server has counted otherwise and ends the connection: both are said.
    assert.is_truthy(
      err.message:find("not tried", 1, true) or err.message:find("ended while", 1, true),
      err.message
    )
  end)

  it("is cancelled in every phase without leaving anything", function()
    local silent <close> = support.tcp(function() end)
    local scope <close> = task.scope()
    local waiting = scope:spawn(function()
      ssh.connect(server:options({ host = silent.address, port = silent.port }))
    end)
    task.sleep(0.05)
    waiting:cancel("enough")
    local ok, err = pcall(waiting.wait, waiting)
    assert.is_false(ok)
    assert.are.equal("cancelled", err.code)
  end)

  it("refuses unknown options and wrong values at the caller's line", function()
    for _, wrong in ipairs({
      { hots = "x" },
      { host = "x", colour = 1 },
      { host = "x", host_key_policy = "no" },
    }) do
      local ok, err = pcall(function()
        ssh.connect(wrong)
      end)
      assert.is_false(ok)
      assert.are.equal("misuse", err.code)
      assert.is_truthy(err.message:find("connect_spec.lua", 1, true), err.message)
    end
    fails("usage", nil, ssh.connect, server:options({ port = 0 }))
    fails("invalid", nil, ssh.connect, server:options({ pins = { "nonsense" } }))
  end)
end)
