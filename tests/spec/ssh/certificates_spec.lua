-- User certificates against OpenSSH's server, which trusts an authority and has no key of the user's.
local certificates = require("ciranda.ssh.certificates")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local support = dofile("tests/spec/ssh/support.lua")

describe("a user certificate", function()
  local authority, server

  --- Have a new key of this type signed. Returns the key's path; the certificate is beside it.
  local function signed(kind, ...)
    local path = kind == "rsa" and support.keygen("-t", "rsa", "-b", "2048") or support.keygen("-t", kind)
    local words = { "ssh-keygen", "-q", "-s", authority, "-I", "trainer's " .. kind, ... }
    words[#words + 1] = path .. ".pub"
    process.run(words):check()
    return path
  end

  local function options(path, others)
    others = others or {}
    others.keys = others.keys or { path }
    return server:options(others)
  end

  local function works(given)
    local connection <close> = ssh.connect(given)
    assert.are.equal("in\n", connection:exec("echo in").stdout)
    return connection.key
  end

  setup(function()
    authority = support.keygen("-t", "ed25519")
    server = support.server({ config = { "TrustedUserCAKeys " .. authority .. ".pub" } })
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  it("beside its key lets the key in, whatever its type, and is the first that is offered", function()
    for _, kind in ipairs({ "ed25519", "rsa", "ecdsa" }) do
      local path = signed(kind, "-n", server.user)
      assert.are.equal(path .. "-cert.pub", works(options(path)))
      assert.are.equal(path .. "-cert.pub", works(options(path))) -- with the key at hand
      -- The control: the key alone is nothing to this server.
      fs.remove(path .. "-cert.pub")
      local alone = support.write("alone", fs.read(path), tonumber("600", 8))
      support.fails("auth", "auth", ssh.connect, options(alone))
    end
  end)

  it("may be in a file of its own, named in ssh_config or by the caller", function()
    local path = signed("ed25519", "-n", server.user)
    local elsewhere = support.path("certificate")
    assert(os.rename(path .. "-cert.pub", elsewhere))
    support.fails("auth", "auth", ssh.connect, options(path))
    assert.are.equal(elsewhere, works(options(path, { certificates = elsewhere })))
    local config = support.write("config", ("CertificateFile %s\nIdentityFile %s\n"):format(elsewhere, path))
    assert.are.equal(elsewhere, works(options(path, { config = config, keys = "" })))
  end)

  it("is used by way of the agent: the agent's own, or a file of the agent's key", function()
    local path = signed("rsa", "-n", server.user)
    local agent <close> = support.agent()
    local socket = agent.socket
    agent:add(path)
    assert.is_truthy(works(options(path, { keys = {}, agent = socket })):find("of the agent", 1, true))
    agent:ssh_add("-q", "-D"):check()
    local elsewhere = support.path("certificate")
    assert(os.rename(path .. "-cert.pub", elsewhere))
    agent:add(path)
    support.fails("auth", "auth", ssh.connect, options(path, { keys = {}, agent = socket }))
    assert.are.equal(
      elsewhere,
      works(options(path, { keys = {}, agent = socket, certificates = { elsewhere } }))
    )
  end)

  it("that is made anew is taken at once, and the old one is not kept", function()
    local path = signed("ed25519", "-n", "somebody-else")
    support.fails("auth", "auth", ssh.connect, options(path))
    fs.remove(path .. "-cert.pub")
    process
      .run({ "ssh-keygen", "-q", "-s", authority, "-I", "new", "-n", server.user, path .. ".pub" })
      :check()
    assert.is_true(support.wait_for(function()
      return (pcall(works, options(path)))
    end))
  end)

  it("that has expired, is too early or is a host's is told by name and not offered", function()
    for reason, arguments in pairs({
      ["has expired"] = { "-n", server.user, "-V", "20200101:20200102" },
      ["not valid before"] = { "-n", server.user, "-V", "20990101:20990102" },
      ["a host's certificate"] = { "-h", "-n", server.user },
    }) do
      local path = signed("ed25519", table.unpack(arguments))
      local err = support.fails("auth", "auth", ssh.connect, options(path))
      assert.is_truthy(err.message:find(path .. "-cert.pub: ", 1, true), err.message)
      assert.is_truthy(err.message:find(reason, 1, true), err.message)
    end
  end)

  it("of an authority that the server does not trust is refused with its name", function()
    local stranger = support.keygen("-t", "ed25519")
    local path = support.keygen("-t", "ed25519")
    process.run({ "ssh-keygen", "-q", "-s", stranger, "-I", "x", "-n", server.user, path .. ".pub" }):check()
    local err = support.fails("auth", "auth", ssh.connect, options(path))
    assert.is_truthy(err.message:find(path .. "-cert.pub: the server does not take", 1, true), err.message)
  end)

  it("that cannot be read is named when it was asked for, and does not stop the key beside it", function()
    local path = support.keygen("-t", "ed25519")
    fs.write(path .. "-cert.pub", "nonsense\n")
    local own <close> = support.server({ authorized = { path } })
    assert.are.equal(path, works(own:options({ keys = { path } })))
    local err =
      support.fails("auth", "auth", ssh.connect, options(path, { certificates = path .. "-cert.pub" }))
    assert.is_truthy(err.message:find("is no certificate that can be used", 1, true), err.message)
  end)

  it("is read as ssh-keygen reads it, and survives being cut anywhere", function()
    local path = signed("ecdsa", "-n", server.user, "-V", "20300101Z:20300102Z")
    local certificate = assert(certificates.load(path .. "-cert.pub"))
    assert.are.equal("trainer's ecdsa", certificate.id)
    assert.are.equal(os.time({ year = 2030, month = 1, day = 1, hour = 0 }), certificate.after)
    assert.are.equal(24 * 3600, certificate.before - certificate.after)
    assert.are.equal(ssh.key(path).blob, certificate.public)
    for cut = 0, #certificate.blob - 1, 7 do
      local part = certificates.parse(certificate.blob:sub(1, cut), "cut")
      assert.is_true(part == nil or part.public == certificate.public)
    end
  end)
end)
