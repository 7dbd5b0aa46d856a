--- A worker's ssh: OpenSSH's own sshd, one process a connection.
--
-- The simulator owns the listening socket and hands each connection to `sshd -i`. That is as fast as a listening sshd,
-- costs nothing while nobody is connected, and lets a connection be refused, reset or left hanging on request. No
-- root is needed: an sshd that an ordinary user starts serves that user's id, by whatever name the accounts give it.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local isolation = require("ciranda.sim.isolation")
local process = require("ciranda.io.process")
local uv = require("luv")

local M = {}

-- The library that gives a worker without namespaces its own accounts.
local WRAPPER = "libnss_wrapper.so"

local known

--- What of OpenSSH is here.
---@async
---@return { path: string, keygen: string, version: number, penalties: boolean, wrapper: boolean }
--- Raises `unsupported`, with what to install.
function M.probe()
  if known then
    return known
  end
  local path, keygen = isolation.program("sshd"), isolation.program("ssh-keygen")
  if not path or not keygen then
    errors.raise({
      code = "unsupported",
      op = "sim.sshd",
      message = ("simulated workers need %s: install openssh-server"):format(
        not path and "sshd" or "ssh-keygen"
      ),
    })
  end
  local version = process.run({ path, "-V" })
  local text = version.stderr .. version.stdout
  local number = tonumber(text:match("OpenSSH_(%d+%.%d+)")) or 0
  local preload = process.run({ "/bin/sh", "-c", ":", env = { LD_PRELOAD = WRAPPER } })
  known = {
    path = path,
    keygen = keygen,
    version = number,
    penalties = number >= 9.8,
    wrapper = preload.stderr == "",
  }
  return known
end

local function quoted(value)
  return '"' .. value:gsub('["\\]', "\\%0") .. '"'
end

---@class ciranda.sim.SshdSettings
---@field etc string where the worker sees its keys and accounts
---@field environment table<string, string> of its sessions

--- The configuration of a worker's sshd.
---@param settings ciranda.sim.SshdSettings
---@return string
function M.config(settings)
  local names = {}
  for name in pairs(settings.environment) do
    names[#names + 1] = name
  end
  table.sort(names)
  local pairs_of = {}
  for i, name in ipairs(names) do
    pairs_of[i] = quoted(name .. "=" .. settings.environment[name])
  end
  local lines = {
    "HostKey " .. quoted(settings.etc .. "/ssh_host_ed25519_key"),
    "PidFile none",
    "UsePAM no",
    "StrictModes no",
    "UseDNS no",
    "PrintMotd no",
    "PrintLastLog no",
    "PasswordAuthentication no",
    "KbdInteractiveAuthentication no",
    "AuthorizedKeysFile " .. quoted(settings.etc .. "/keys/%u"),
    "AcceptEnv LANG LC_*",
    "AllowAgentForwarding yes",
    "AllowTcpForwarding yes",
    "MaxSessions 1000",
    "ClientAliveInterval 60",
    "Subsystem sftp internal-sftp",
    "LogLevel VERBOSE",
    -- Only the first SetEnv counts, so all are in one.
    "SetEnv " .. table.concat(pairs_of, " "),
  }
  if M.probe().penalties then
    lines[#lines + 1] = "PerSourcePenalties no"
  end
  return table.concat(lines, "\n") .. "\n"
end

--- Make a worker's host key.
---@async
---@param path string of the private key; the public one gets ".pub"
---@return string key "ssh-ed25519 AAAA..."
function M.make_host_key(path)
  fs.remove(path, { missing_ok = true })
  process
    .run({ M.probe().keygen, "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path, timeout = 30 })
    :check()
  return (fs.read(path .. ".pub"):match("^%S+ %S+"))
end

---@class ciranda.sim.SshListener
---@field private sockets table<string, userdata[]> by address
---@field private sessions table<userdata, integer>
local Listener = {}
Listener.__index = Listener

---@class ciranda.sim.SshOptions
---@field addresses string[]
---@field ports integer[]
---@field argv fun(): string[] the command of a session's sshd
---@field environment table<string, string> of that command
---@field log string file for what sshd says
---@field on_connection (fun(): ciranda.sim.Fault?)? what is to go wrong with a connection

local function serve(self, client)
  local options = self.options
  local fault = options.on_connection and options.on_connection()
  if fault and fault.kind == "ssh_hang" then
    self.hanging[#self.hanging + 1] = client
    return
  elseif fault and fault.kind == "ssh_reset" then
    client:close_reset()
    return
  elseif fault and fault.kind == "ssh_refuse" then
    client:close()
    return
  end
  local argv = options.argv()
  local log = uv.fs_open(options.log, "a", 384)
  local environment = {}
  for name, value in pairs(options.environment) do
    environment[#environment + 1] = name .. "=" .. value
  end
  local handle, pid
  handle, pid = uv.spawn(argv[1], {
    args = table.move(argv, 2, #argv, 1, {}),
    stdio = { client, client, log },
    env = environment,
    cwd = "/",
    detached = true,
  }, function()
    self.sessions[handle] = nil
    handle:close()
  end)
  if log then
    uv.fs_close(log)
  end
  client:close()
  if handle then
    self.sessions[handle] = pid
  end
end

--- Listen on a worker's addresses.
---@param options ciranda.sim.SshOptions
---@return ciranda.sim.SshListener
--- Raises `busy` and the like when an address cannot be had.
function M.listen(options)
  local self = setmetatable({ options = options, sockets = {}, sessions = {}, hanging = {} }, Listener)
  for _, address in ipairs(options.addresses) do
    local ok, err = pcall(self.add, self, address)
    if not ok then
      self:close()
      error(err, 0)
    end
  end
  return self
end

local function bind(self, address, port)
  local socket = uv.new_tcp()
  local ok, err, code = socket:bind(address, port)
  if ok then
    ok, err, code = socket:listen(128, function(failure)
      local client = not failure and uv.new_tcp()
      if client and socket:accept(client) then
        serve(self, client)
      elseif client then
        client:close()
      end
    end)
  end
  if not ok then
    socket:close()
    errors.raise({
      code = code == "EADDRINUSE" and "busy" or "io",
      op = "sim.sshd",
      target = ("%s:%d"):format(address, port),
      message = tostring(err),
    })
  end
  return socket
end

--- Listen on one more address.
---@param address string
function Listener:add(address)
  local sockets = {}
  self.sockets[address] = sockets
  for i, port in ipairs(self.options.ports) do
    sockets[i] = bind(self, address, port)
  end
end

--- Stop listening on an address.
---@param address string
function Listener:remove(address)
  for _, socket in ipairs(self.sockets[address] or {}) do
    socket:close()
  end
  self.sockets[address] = nil
end

--- The processes of the sessions that are open: those that the simulator started, not their children.
---@return integer[] pids
function Listener:pids()
  local list = {}
  for _, pid in pairs(self.sessions) do
    list[#list + 1] = pid
  end
  return list
end

--- Stop listening. Sessions are not ended by it.
function Listener:close()
  for address in pairs(self.sockets) do
    self:remove(address)
  end
  for _, client in ipairs(self.hanging) do
    client:close()
  end
  self.hanging = {}
end

return M
