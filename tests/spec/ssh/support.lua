-- Real servers for the specs: sshd on loopback addresses of its own, with keys, a user and a configuration made for
-- each. As root the user is "tester", with a uid of its own, since sshd takes no signals for root; else it is the one
-- who runs the specs. nss_wrapper gives both a home and a shell that are known. Nothing is left behind: a server ends
-- with everything it has started.
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local SSHD = "/usr/sbin/sshd"
local WRAPPER = "libnss_wrapper.so"
local TESTER_UID = 20017

M.is_root = uv.getuid() == 0

-- Files ------------------------------------------------------------------------------------------------------------

local directory

--- The directory of this run's keys and servers.
function M.directory()
  if not directory then
    directory = fs.tempdir("ciranda-ssh-spec")
    fs.chmod(directory, tonumber("755", 8))
  end
  return directory
end

--- Remove it; at the end of a spec file.
function M.clean()
  if directory then
    fs.remove_tree(directory)
    directory = nil
  end
end

local count = 0

--- A name that was not used yet, in the directory.
function M.path(name)
  count = count + 1
  return ("%s/%d-%s"):format(M.directory(), count, name)
end

function M.write(name, text, mode)
  local path = M.path(name)
  fs.write(path, text, { mode = mode or tonumber("644", 8), sync = false })
  return path
end

-- Keys -------------------------------------------------------------------------------------------------------------

local kept = {}

--- Make a key with ssh-keygen. Returns its path.
---@param ... string arguments of ssh-keygen, such as "-t", "rsa"
function M.keygen(...)
  local path = M.path("key")
  local arguments = { "ssh-keygen", "-q", "-f", path, ... }
  local named = { passphrase = false }
  for _, argument in ipairs(arguments) do
    named.passphrase = named.passphrase or argument == "-N"
  end
  if not named.passphrase then
    table.insert(arguments, "-N")
    table.insert(arguments, "")
  end
  process.run(arguments):check()
  return path
end

--- A key of this type, made once a spec file.
---@param kind "ed25519"|"rsa"|"ecdsa"
function M.key(kind)
  if not kept[kind] or not fs.exists(kept[kind]) then
    kept[kind] = kind == "rsa" and M.keygen("-t", "rsa", "-b", "2048") or M.keygen("-t", kind)
  end
  return kept[kind]
end

--- The public line of a private key's file: "type base64".
function M.public(path)
  return (fs.read(path .. ".pub"):match("^(%S+ %S+)"))
end

-- Processes --------------------------------------------------------------------------------------------------------

--- Every process that descends from this one, the deepest last.
local function descendants(pid)
  local parents = {}
  for _, entry in ipairs(fs.list("/proc")) do
    if entry.name:find("^%d+$") then
      local ok, stat = pcall(fs.read, "/proc/" .. entry.name .. "/stat")
      local parent = ok and stat:match("^%d+ %(.*%) %S (%d+)")
      if parent then
        parents[math.tointeger(tonumber(entry.name))] = math.tointeger(tonumber(parent))
      end
    end
  end
  local found, last = { pid }, 1
  for index = 1, math.huge do
    if index > last then
      break
    end
    for child, parent in pairs(parents) do
      if parent == found[index] then
        last = last + 1
        found[last] = child
      end
    end
  end
  table.remove(found, 1)
  return found
end

--- Wait until `fn()` is true, for at most `seconds`, a minute by default; false when it never was.
function M.wait_for(fn, seconds)
  local deadline = uv.hrtime() + (seconds or 60) * 1e9
  while not fn() do
    if uv.hrtime() > deadline then
      return false
    end
    task.sleep(0.01)
  end
  return true
end

-- sshd -------------------------------------------------------------------------------------------------------------

---@class ssh.spec.Server
local Server = {}
Server.__index = Server

local function random_address()
  return ("127.%d.%d.%d"):format(math.random(60, 250), math.random(0, 255), math.random(1, 254))
end

local function sshd_version()
  local said = process.run({ SSHD, "-V" })
  local major, minor = (said.stdout .. said.stderr):match("OpenSSH_(%d+)%.(%d+)")
  return (tonumber(major) or 0) * 100 + (tonumber(minor) or 0)
end

--- Start sshd.
---@param options { host_keys: string[]?, authorized: string[]?, config: string[]?, port: integer?,
---  every_address: boolean? }? every_address: for measurements, which use all of 127.0.0.0/8
---@return ssh.spec.Server
function M.server(options)
  options = options or {}
  local base = M.path("server")
  fs.mkdir(base, tonumber("755", 8))
  local home = base .. "/home"
  fs.mkdir(home, tonumber("755", 8))
  local own = uv.os_get_passwd()
  local user, uid, gid = own.username, own.uid, own.gid
  if M.is_root then
    user, uid, gid = "tester", TESTER_UID, TESTER_UID
    uv.fs_chown(home, uid, gid)
    fs.mkdir_p("/run/sshd")
  end
  -- Whatever the account's own home and shell are: these are known.
  local passwd = {
    "root:x:0:0:root:/root:/bin/sh",
    "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin",
    ("%s:x:%d:%d::%s:/bin/sh"):format(user, uid, gid, home),
  }
  fs.write(base .. "/passwd", table.concat(passwd, "\n") .. "\n", { mode = tonumber("644", 8) })
  fs.write(base .. "/group", ("root:x:0:\n%s:x:%d:\n"):format(user, gid), { mode = tonumber("644", 8) })
  local env = {
    LD_PRELOAD = WRAPPER,
    NSS_WRAPPER_PASSWD = base .. "/passwd",
    NSS_WRAPPER_GROUP = base .. "/group",
  }

  local host_keys = options.host_keys or { M.keygen("-t", "ed25519") }
  local authorized = {}
  for _, path in ipairs(options.authorized or { M.key("ed25519") }) do
    authorized[#authorized + 1] = M.public(path)
  end
  fs.write(base .. "/authorized_keys", table.concat(authorized, "\n") .. "\n", { mode = tonumber("644", 8) })
  local self
  for _ = 1, 20 do
    local address, port = random_address(), options.port or math.random(20000, 29999)
    local lines = {
      ("ListenAddress %s:%d"):format(options.every_address and "0.0.0.0" or address, port),
      ("AuthorizedKeysFile %s/authorized_keys"):format(base),
      "UsePAM no",
      "StrictModes no",
      "PidFile none",
      "LogLevel VERBOSE",
      "PasswordAuthentication no",
      "KbdInteractiveAuthentication no",
    }
    for _, path in ipairs(host_keys) do
      lines[#lines + 1] = "HostKey " .. path
    end
    if not table.concat(options.config or {}, "\n"):find("Subsystem", 1, true) then
      lines[#lines + 1] = "Subsystem sftp internal-sftp"
    end
    if sshd_version() >= 908 then
      lines[#lines + 1] = "PerSourcePenalties no"
    end
    -- The first value counts for sshd: what the spec asks for comes first.
    lines = table.move(lines, 1, #lines, #(options.config or {}) + 1, { table.unpack(options.config or {}) })
    fs.write(base .. "/sshd_config", table.concat(lines, "\n") .. "\n")
    local log = base .. "/log"
    local fd = assert(uv.fs_open(log, "w", tonumber("644", 8)))
    local environment = { "PATH=" .. os.getenv("PATH") }
    for name, value in pairs(env) do
      environment[#environment + 1] = name .. "=" .. value
    end
    self = setmetatable({
      address = address,
      port = port,
      user = user,
      home = home,
      host_keys = host_keys,
      base = base,
      log_path = log,
      exited = false,
    }, Server)
    local handle, pid = uv.spawn(SSHD, {
      args = { "-D", "-e", "-f", base .. "/sshd_config" },
      env = environment,
      stdio = { nil, nil, fd },
      detached = true,
    }, function()
      self.exited = true
    end)
    uv.fs_close(fd)
    assert(handle, pid)
    self.handle, self.pid = handle, pid
    assert(
      M.wait_for(function()
        return self.exited or self:log():find("Server listening on", 1, true) ~= nil
      end),
      "sshd neither ends nor says that it listens (LogLevel INFO or more)"
    )
    if not self.exited then
      return self
    end
    handle:close()
  end
  error("sshd does not start: " .. self:log())
end

--- What sshd has logged.
function Server:log()
  return fs.read(self.log_path)
end

--- The first host key as a pin.
function Server:pin(index)
  return M.public(self.host_keys[index or 1])
end

--- Options of ssh.connect that succeed with this server; those given replace them (false takes one out).
function Server:options(others)
  local options = {
    host = self.address,
    port = self.port,
    user = self.user,
    keys = { M.key("ed25519") },
    agent = false,
    config = false,
    known_hosts = false,
    pins = { self:pin() },
  }
  for name, value in pairs(others or {}) do
    options[name] = value
  end
  for name, value in pairs(others or {}) do
    if value == "" then
      options[name] = nil
    end
  end
  return options
end

--- The processes of the server's sessions.
function Server:sessions()
  return descendants(self.pid)
end

--- End the server, its sessions and what runs in them.
function Server:stop()
  if not self.exited then
    local all = self:sessions()
    self.handle:kill("sigkill")
    for _, pid in ipairs(all) do
      uv.kill(pid, "sigkill")
    end
    M.wait_for(function()
      return self.exited
    end)
  end
  if not self.handle:is_closing() then
    self.handle:close()
  end
end

Server.__close = Server.stop

-- Other servers ----------------------------------------------------------------------------------------------------

---@class ssh.spec.Agent
---@field socket string
local Agent = {}
Agent.__index = Agent

--- A real ssh-agent, ready to be asked: its socket's name is there before it listens.
---@return ssh.spec.Agent
function M.agent()
  local self = setmetatable({ socket = M.path("agent.sock") }, Agent)
  self.program = process.spawn({ "ssh-agent", "-D", "-a", self.socket, stdout = process.DISCARD })
  assert(M.wait_for(function()
    return self:ssh_add("-l").code ~= 2
  end, 60))
  return self
end

--- `ssh-add` with these arguments; 2 is its exit status when there is no agent.
---@async
---@param ... string
---@return ciranda.process.Result
function Agent:ssh_add(...)
  local arguments = { "ssh-add", ... }
  arguments.env = { SSH_AUTH_SOCK = self.socket }
  return process.run(arguments)
end

--- Adds a key file.
---@async
---@param path string
function Agent:add(path)
  self:ssh_add("-q", path):check()
end

function Agent:stop()
  self.program:terminate()
end

Agent.__close = Agent.stop

--- A TCP server that is no SSH server: `serve(client)` is called with each connection, in luv's callback.
---@return { address: string, port: integer, stop: fun() }
function M.tcp(serve)
  local clients = {}
  local listener, address, port, problem
  local function accept()
    local client = uv.new_tcp()
    listener:accept(client)
    clients[#clients + 1] = client
    serve(client)
  end
  -- That an address is taken is said by listen, not by bind.
  for _ = 1, 20 do
    listener, address, port = uv.new_tcp(), random_address(), math.random(20000, 29999)
    local ok
    ok, problem = listener:bind(address, port)
    if ok then
      ok, problem = listener:listen(16, accept)
    end
    if ok then
      break
    end
    listener:close()
  end
  assert(not problem, problem)
  local function stop()
    for _, handle in ipairs({ listener, table.unpack(clients) }) do
      if not handle:is_closing() then
        handle:close()
      end
    end
  end
  return setmetatable({ address = address, port = port, stop = stop }, { __close = stop })
end

-- Assertions -------------------------------------------------------------------------------------------------------

--- Call `fn` and return the error it raises, which has this code and names this phase.
function M.fails(code, phase, fn, ...)
  local ok, err = pcall(fn, ...)
  assert(not ok, "it should have failed")
  assert(errors.is(err), ("no error of ours: %s"):format(tostring(err)))
  assert(err.code == code, ("code %s, not %s: %s"):format(err.code, code, tostring(err)))
  if phase then
    assert(err.phase == phase, ("phase %s, not %s: %s"):format(tostring(err.phase), phase, tostring(err)))
  end
  return err
end

return M
