local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local keys = require("ciranda.ssh.keys")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")

local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

local PASSPHRASE = "a passphrase, with spaces"

local TYPES = {
  ["ssh-ed25519"] = { "-t", "ed25519" },
  ["ssh-rsa"] = { "-t", "rsa", "-b", "2048" },
  ["ecdsa-sha2-nistp256"] = { "-t", "ecdsa", "-b", "256" },
  ["ecdsa-sha2-nistp384"] = { "-t", "ecdsa", "-b", "384" },
  ["ecdsa-sha2-nistp521"] = { "-t", "ecdsa", "-b", "521" },
}

local CIPHERS = {
  "aes256-ctr",
  "aes192-ctr",
  "aes128-ctr",
  "aes256-cbc",
  "aes192-cbc",
  "aes128-cbc",
  "3des-cbc",
  "aes256-gcm@openssh.com",
  "aes128-gcm@openssh.com",
  "chacha20-poly1305@openssh.com",
}

local function public_blob(path)
  return crypto.unbase64(support.public(path):match("%S+$"))
end

--- ssh-keygen's verdict on a signature that our engine made, in the format of `ssh-keygen -Y sign`.
local function keygen_accepts(path, key, algorithm)
  local message, namespace = "what was signed\n", "test"
  local hash = crypto.sha256(message)
  local signed = "SSHSIG" .. (">s4s4s4s4"):pack(namespace, "", "sha256", hash)
  local signature = (">s4s4"):pack(algorithm, key.handle:sign(algorithm, signed))
  local blob = "SSHSIG" .. (">I4s4s4s4s4s4"):pack(1, key.blob, namespace, "", "sha256", signature)
  local armour = "-----BEGIN SSH SIGNATURE-----\n"
    .. crypto.base64(blob):gsub(("."):rep(70), "%0\n")
    .. "\n-----END SSH SIGNATURE-----\n"
  local allowed = support.write("allowed", "somebody " .. support.public(path) .. "\n")
  local file = support.write("signature", armour)
  return process.run({
    "ssh-keygen",
    "-Y",
    "verify",
    "-f",
    allowed,
    "-I",
    "somebody",
    "-n",
    namespace,
    "-s",
    file,
    stdin = message,
  }).code == 0
end

describe("a private key", function()
  teardown(support.clean)

  for key_type, arguments in pairs(TYPES) do
    it("of type " .. key_type .. " is read from OpenSSH's format, PEM and PKCS #8", function()
      local formats = { {}, { "-m", "PKCS8" }, { "-m", "PEM" } }
      for _, format in ipairs(formats) do
        local path = support.keygen(table.unpack(table.move(format, 1, #format, #arguments + 1, {
          table.unpack(arguments),
        })))
        local key = keys.load(path)
        assert.are.equal(key_type, key.type)
        assert.is_true(key.blob == public_blob(path))
      end
    end)

    it("of type " .. key_type .. " makes signatures that ssh-keygen accepts", function()
      local path = support.keygen(table.unpack(arguments))
      local key = keys.load(path)
      local algorithms = key_type == "ssh-rsa" and { "rsa-sha2-512", "rsa-sha2-256" } or { key_type }
      for _, algorithm in ipairs(algorithms) do
        assert.is_true(keygen_accepts(path, key, algorithm), algorithm)
      end
      -- The control: another key's signature is not accepted.
      local other = support.keygen(table.unpack(arguments))
      assert.is_false(keygen_accepts(other, key, algorithms[1]))
      assert.is_nil(key.handle:sign("ssh-dss", "x"))
      if key_type == "ssh-rsa" then
        assert.is_nil(key.handle:sign("ssh-rsa", "x")) -- that would be SHA-1
      end
    end)

    it("of type " .. key_type .. " is opened by its passphrase and no other, whatever the cipher", function()
      -- The cipher is round the key, not in it: all of them once, and one of each kind for the other types.
      local ciphers = key_type == "ssh-ed25519" and CIPHERS
        or { "aes256-ctr", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com" }
      for _, cipher in ipairs(ciphers) do
        local path = support.keygen("-N", PASSPHRASE, "-Z", cipher, "-a", "2", table.unpack(arguments))
        local key = keys.load(path, PASSPHRASE)
        assert.is_true(key.blob == public_blob(path), cipher)
        local copy = support.write("copy", fs.read(path), tonumber("600", 8))
        local err = fails("auth", nil, keys.load, copy, "wrong")
        assert.are.equal("passphrase_wrong", err.reason)
      end
      for _, format in ipairs({ "PEM", "PKCS8" }) do
        local path = support.keygen("-N", PASSPHRASE, "-m", format, table.unpack(arguments))
        assert.is_true(keys.load(path, PASSPHRASE).blob == public_blob(path), format)
        local copy = support.write("copy", fs.read(path), tonumber("600", 8))
        assert.are.equal("passphrase_wrong", fails("auth", nil, keys.load, copy, "wrong").reason)
      end
    end)
  end

  it("that needs a passphrase says so, and what to do", function()
    local path = support.keygen("-t", "ed25519", "-N", PASSPHRASE)
    local err = fails("auth", nil, keys.load, path)
    assert.are.equal("passphrase_needed", err.reason)
    assert.is_truthy(err.message:find("ssh-add", 1, true))
    assert.is_truthy(err.message:find("CIRANDA_SSH_PASSPHRASE", 1, true))
  end)

  it("asks a function, up to three times, and once for many sessions", function()
    local path = support.keygen("-t", "ed25519", "-N", PASSPHRASE)
    local asked = {}
    local function ask(name, attempt)
      task.sleep(0.01)
      asked[#asked + 1] = name .. attempt
      return attempt == 2 and PASSPHRASE or "no"
    end
    local loaded = task.map({ 1, 2, 3, 4 }, function()
      return keys.load(path, ask)
    end)
    assert.are.same({ path .. "1", path .. "2" }, asked)
    assert.is_true(loaded[1] == loaded[4])

    local other = support.keygen("-t", "ed25519", "-N", PASSPHRASE)
    local count = 0
    local err = fails("auth", nil, keys.load, other, function()
      count = count + 1
      return "never"
    end)
    assert.are.equal("passphrase_wrong", err.reason)
    assert.are.equal(3, count)
  end)

  it("never shows its passphrase in a log", function()
    local log = require("ciranda.io.log")
    local path = support.keygen("-t", "ed25519", "-N", "s3cret-passphrase-1")
    keys.load(path, "s3cret-passphrase-1")
    assert.are.equal("***", log.redact("s3cret-passphrase-1"))
  end)

  it("is read again when its file has changed", function()
    local path = support.keygen("-t", "ed25519")
    local first = keys.load(path)
    assert.is_true(first == keys.load(path))
    local other = support.keygen("-t", "ed25519")
    fs.write(path, fs.read(other), { mode = tonumber("600", 8) })
    -- A file counts as unchanged for two seconds.
    task.sleep(2.1)
    assert.is_true(keys.load(path).blob == public_blob(other))
  end)

  it("is refused by name of what is wrong", function()
    local path = support.keygen("-t", "ed25519")
    local text = fs.read(path)
    local function refused(content)
      local copy = support.write("key", content, tonumber("600", 8))
      local ok, err = pcall(keys.load, copy)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "invalid", "unsupported"), tostring(err))
      assert.is_truthy(err.message:find(copy, 1, true))
      return err.message
    end
    assert.is_truthy(refused(fs.read(path .. ".pub")):find("public key", 1, true))
    assert.is_truthy(refused("PuTTY-User-Key-File-3: ssh-ed25519\n"):find("puttygen", 1, true))
    assert.is_truthy(refused("hello"):find("no private key", 1, true))
    assert.is_truthy(refused(text:sub(1, 200)):find("cut short", 1, true))
    assert.is_truthy(refused((text:gsub("\n", "!", 2))):find("base64", 1, true))
    refused("-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n")
    -- DSA is a type that no server takes any more.
    local dsa = process.run({
      "openssl",
      "genpkey",
      "-quiet",
      "-genparam",
      "-algorithm",
      "DSA",
      "-pkeyopt",
      "dsa_paramgen_bits:1024",
    })
    if dsa.code == 0 then
      local params = support.write("params", dsa.stdout)
      local made = process.run({ "openssl", "genpkey", "-quiet", "-paramfile", params })
      if made.code == 0 then
        assert.is_truthy(refused(made.stdout):find("DSA", 1, true))
      end
    end
  end)

  it("with a flipped bit anywhere is refused or is the same key", function()
    local path = support.keygen("-t", "ed25519", "-C", "c")
    local text = fs.read(path)
    local blob = public_blob(path)
    local lines = text:match("KEY%-%-%-%-%-\n(.-)%-%-%-%-%-END"):gsub("%s", "")
    local bytes = crypto.unbase64(lines)
    for index = 1, #bytes, 7 do
      local flipped = bytes:sub(1, index - 1) .. string.char(bytes:byte(index) ~ 1) .. bytes:sub(index + 1)
      local ok, key = pcall(
        keys.parse,
        "-----BEGIN OPENSSH PRIVATE KEY-----\n"
          .. crypto.base64(flipped)
          .. "\n-----END OPENSSH PRIVATE KEY-----\n"
      )
      if ok then
        assert.is_true(key.blob == blob, "byte " .. index)
      else
        assert.is_true(errors.is(key, "invalid", "unsupported"), tostring(key))
      end
    end
  end)

  it("leaves nothing of its secret in memory when it has gone", function()
    local binary = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
    local path, dump = support.keygen("-t", "ecdsa", "-b", "521"), support.path("memory")
    local bytes = crypto.unbase64(fs.read(path):match("KEY%-%-%-%-%-\n(.-)%-%-%-%-%-END"))
    local private = select(5, (">zs4s4s4I4"):unpack(bytes))
    assert.equal(1, private)
    local section = select(2, (">s4s4"):unpack(bytes, select(6, (">zs4s4s4I4"):unpack(bytes))))
    local secret = select(4, (">s4s4s4s4"):unpack(section, 9))
    local needle = secret:reverse():sub(9, 40) -- OpenSSL keeps numbers low byte first
    --- Whether a program that has read the key, and keeps it or not, has the secret in its memory.
    local function has_secret(keep)
      process
        .run({
          binary,
          "-e",
          [[
          local key = require("ciranda.task").call(require("ciranda.core.ssh").key_read, arg[1], nil)
          KEPT = arg[3] == "keep" and key or nil
          key = nil
          collectgarbage()
          collectgarbage()
          local memory, to = assert(io.open("/proc/self/mem", "rb")), assert(io.open(arg[2], "wb"))
          for line in io.lines("/proc/self/maps") do
            local low, high = line:match("^(%x+)%-(%x+) rw")
            low, high = tonumber(low or "0", 16), tonumber(high or "0", 16)
            if high > low and high - low < 256 << 20 and memory:seek("set", low) then -- ASan's shadow is larger
              to:write(memory:read(high - low) or "")
            end
          end
          to:close()]],
          path,
          dump,
          keep,
          timeout = 120,
        })
        :check()
      local found = fs.read(dump):find(needle, 1, true) ~= nil
      fs.remove(dump)
      return found
    end
    assert.is_true(has_secret("keep"))
    assert.is_false(has_secret("drop"))
  end)

  it("of gcloud is made when it is not there, and never overwritten", function()
    local path = support.path("fresh") .. "/ssh/google_compute_engine"
    local made, public = ssh.ensure_key(path)
    assert.are.equal(path, made)
    assert.is_truthy(public:find("^ssh%-rsa AAAA"))
    local stat = fs.stat(path)
    assert.are.equal(tonumber("600", 8), stat.mode)
    assert.are.equal("ssh-rsa", keys.load(path).type)
    local text = fs.read(path)
    local _, again = ssh.ensure_key(path)
    assert.are.equal(public, again)
    assert.is_true(text == fs.read(path))
    fs.remove(path .. ".pub")
    local _, rebuilt = ssh.ensure_key(path)
    assert.are.equal(public:match("^%S+ %S+"), rebuilt:match("^%S+ %S+"))
  end)

  it("has the fingerprint that ssh-keygen prints", function()
    local path = support.key("ed25519")
    local said = process.run({ "ssh-keygen", "-lf", path .. ".pub" }):check().stdout
    assert.are.equal(said:match("SHA256:%S+"), keys.fingerprint(keys.load(path).blob))
  end)
end)

describe("the agent", function()
  local server, agent

  --- Locks it: it answers as if it had no keys.
  local function lock(locked)
    local askpass = support.write("askpass", "#!/bin/sh\necho locked\n", tonumber("755", 8))
    local environment =
      { SSH_AUTH_SOCK = locked.socket, SSH_ASKPASS = askpass, SSH_ASKPASS_REQUIRE = "force" }
    process.run({ "ssh-add", "-x", env = environment }):check()
  end

  setup(function()
    server = support.server({
      authorized = { support.key("ed25519"), support.key("rsa"), support.key("ecdsa") },
    })
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  before_each(function()
    agent = support.agent()
  end)

  after_each(function()
    agent:stop()
  end)

  local function options(others)
    others.agent = agent.socket
    others.keys = others.keys or ""
    return server:options(others)
  end

  it("signs for each type of key, RSA with SHA-2", function()
    for _, kind in ipairs({ "ed25519", "rsa", "ecdsa" }) do
      local one = support.agent()
      one:add(support.key(kind))
      local connection <close> = ssh.connect(server:options({ agent = one.socket, keys = {} }))
      assert.are.equal("hi\n", connection:exec("echo hi").stdout)
      assert.is_truthy(connection.key:find("of the agent", 1, true))
      one:stop()
    end
  end)

  it("is used for a named file whose passphrase nobody knows", function()
    local path = support.keygen("-t", "ed25519", "-N", PASSPHRASE)
    local plain = support.write("plain", fs.read(path), tonumber("600", 8))
    process.run({ "ssh-keygen", "-q", "-p", "-P", PASSPHRASE, "-N", "", "-f", plain }):check()
    local own <close> = support.server({ authorized = { path } })
    -- The control: without the agent the passphrase is missed.
    fails("auth", nil, ssh.connect, own:options({ keys = { path } }))
    agent:add(plain)
    local connection <close> =
      ssh.connect(own:options({ keys = { path }, agent = agent.socket, identities_only = true }))
    assert.are.equal("hi\n", connection:exec("echo hi").stdout)
  end)

  it("is asked after the named keys, unless only those are wanted", function()
    local stranger = support.keygen("-t", "ed25519")
    agent:add(support.key("ed25519"))
    local connection <close> = ssh.connect(options({ keys = { stranger } }))
    assert.is_truthy(connection.key:find("of the agent", 1, true))
    fails("auth", "auth", ssh.connect, options({ keys = { stranger }, identities_only = true }))
  end)

  it("that is asked for must be there", function()
    local err =
      fails("auth", "auth", ssh.connect, server:options({ agent = "/nonexistent/agent", keys = {} }))
    assert.is_truthy(err.message:find("/nonexistent/agent", 1, true))
  end)

  it("that is locked gives no keys", function()
    agent:add(support.key("ed25519"))
    lock(agent)
    fails("auth", "auth", ssh.connect, options({ keys = {} }))
  end)

  it("that does not answer is given up, and one that talks nonsense too", function()
    local uv = require("luv")
    local socket = support.path("odd.sock")
    local pipe = uv.new_pipe(false)
    local clients = {}
    assert(pipe:bind(socket))
    pipe:listen(4, function()
      local client = uv.new_pipe(false)
      pipe:accept(client)
      clients[#clients + 1] = client
      client:read_start(function(_, data)
        if data then
          client:write("GET / HTTP/1.0\r\n\r\n")
        end
      end)
    end)
    local err = fails("auth", "auth", ssh.connect, server:options({ agent = socket, keys = {} }))
    assert.is_truthy(err.message:find("no SSH agent", 1, true), err.message)
    for _, client in ipairs(clients) do
      client:close()
    end
    pipe:close()
  end)
end)
