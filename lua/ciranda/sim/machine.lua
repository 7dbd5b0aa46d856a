--- One simulated worker: a directory, addresses, a host key, accounts, an sshd, and a start-up script that runs.
--
-- A machine is made once, booted any number of times and destroyed. A boot gives it a new boot id and an empty process
-- list and leaves its disk alone; a machine that takes another's place in a slice is a new one in all respects.

local accounts = require("ciranda.sim.accounts")
local disk = require("ciranda.sim.disk")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local isolation = require("ciranda.sim.isolation")
local process = require("ciranda.io.process")
local processes = require("ciranda.sim.processes")
local refusals = require("ciranda.sim.errors")
local sshd = require("ciranda.sim.sshd")
local task = require("ciranda.task")
local tpu_env = require("ciranda.sim.tpu_env")
local uv = require("luv")

local M = {}

-- Seconds until the processes of a worker without namespaces must be gone after a hard stop.
local KILL_DEADLINE = 5

local PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

---@class ciranda.sim.Machine
---@field world table
---@field node ciranda.sim.Node
---@field worker integer
---@field address string
---@field external string?
---@field directory string
---@field host_key string "ssh-ed25519 AAAA..."
---@field maintenance_event string
---@field running boolean
---@field disk_full boolean? until it boots anew
local Machine = {}
Machine.__index = Machine

---@class ciranda.sim.MachineSettings
---@field world table
---@field isolation ciranda.sim.Isolation
---@field directory string
---@field shared string
---@field ssh_ports integer[]
---@field metadata_port integer
---@field ordinal integer

--- Describe a machine; nothing exists yet.
---@param settings ciranda.sim.MachineSettings
---@param node ciranda.sim.Node allocated
---@param worker integer
---@return ciranda.sim.Machine
function M.new(settings, node, worker)
  local endpoint = node.endpoints[worker + 1]
  local self = setmetatable({
    settings = settings,
    world = settings.world,
    isolation = settings.isolation,
    node = node,
    worker = worker,
    address = endpoint.address,
    external = endpoint.external,
    directory = settings.directory,
    hostname = tpu_env.vm_name(node, worker),
    maintenance_event = "NONE",
    published = {}, -- guest attributes that programs on it have written: by namespace, by key
    running = false,
  }, Machine)
  self.etc = self.directory .. "/etc"
  self.root = self.directory .. "/root"
  self.isolated = self.isolation.kind ~= "none"
  self.etc_inside = self.isolated and "/etc/ssh" or self.etc
  self.home_inside = self.isolated and "/home" or self.root .. "/home"
  return self
end

--- Where the worker's metadata server is.
---@return string "address:port"
function Machine:metadata_host()
  return ("%s:%d"):format(self.address, self.settings.metadata_port)
end

--- Where the worker finds its TPU devices.
---@return string[]
function Machine:devices()
  local list = tpu_env.devices(self.node)
  if not self.isolated then
    for i, path in ipairs(list) do
      list[i] = self.root .. path
    end
  end
  return list
end

--- What the paths of the worker's TPU devices begin with.
---@return string
function Machine:device_prefix()
  return (self:devices()[1]:gsub("%d+$", ""))
end

-- The variables of sessions and start-up scripts.
local function environment(self)
  local result = tpu_env.environment(self.node, self.worker, self:metadata_host())
  result.CIRANDA_SIM_SHARED = self.settings.shared
  if not self.isolated then
    -- All such workers see one /dev, one boot id, one /tmp: the guard is told where this one's are.
    result.CIRANDA_GUARD_OPTIONS = ("--devices %s --lock %s/tmp/libtpu_lockfile --boot-id-file %s/boot_id"):format(
      self:device_prefix(),
      self.root,
      self.directory
    )
    result.CIRANDA_SIM_DEVICES = self:device_prefix()
    result.CIRANDA_SIM_WORKER = self.directory
  end
  return result
end

local function write_accounts(self)
  local world, metadata = self.world, self.node.message.metadata
  local users = world.os_login:users(metadata)
    or accounts.parse(metadata, world.project.metadata["ssh-keys"], world.clock:now())
  accounts.write({
    etc = self.etc,
    home = self.root .. "/home",
    home_inside = self.home_inside,
    ordinal = self.settings.ordinal,
    own_terminals = self.isolated,
  }, users)
end

local function hosts(self)
  local lines = { "127.0.0.1 localhost", ("%s metadata.google.internal metadata"):format(self.address) }
  for worker, endpoint in ipairs(self.node.endpoints) do
    lines[#lines + 1] = endpoint.address .. " " .. tpu_env.vm_name(self.node, worker - 1)
  end
  return table.concat(lines, "\n") .. "\n"
end

--- Make the machine's disk and host key.
---@async
function Machine:create()
  for _, path in ipairs({ self.etc .. "/keys", self.root .. "/home", self.root .. "/tmp" }) do
    fs.mkdir_p(path)
  end
  -- The worker's user, whoever that is, must be able to reach its home and its keys.
  for _, path in ipairs({ self.directory, self.etc, self.etc .. "/keys", self.root, self.root .. "/home" }) do
    fs.chmod(path, 493)
  end
  fs.chmod(self.root .. "/tmp", 1023)
  if not self.isolated and uv.getuid() == 0 then
    -- What stands for the worker's `/` is its first user's, who stands for its root.
    local uid = accounts.first_uid(self.settings.ordinal)
    assert(uv.fs_chown(self.root, uid, uid))
  end
  self.host_key = sshd.make_host_key(self.etc .. "/ssh_host_ed25519_key")
end

-- The command of one session's sshd.
local function session_command(self)
  local argv = { sshd.probe().path, "-i", "-e", "-f", self.etc_inside .. "/sshd_config" }
  return self.isolation:argv(self.init, argv, uv.getuid() == 0)
end

local function session_environment(self)
  local result = { PATH = PATH }
  if not self.isolated and sshd.probe().wrapper then
    result.LD_PRELOAD = "libnss_wrapper.so"
    result.NSS_WRAPPER_PASSWD = self.etc .. "/passwd"
    result.NSS_WRAPPER_GROUP = self.etc .. "/group"
    result.NSS_WRAPPER_SHADOW = self.etc .. "/shadow"
  end
  return result
end

local function write_boot_id(self)
  local random = self.world.random
  local text = ("%s-%s-4%s-a%s-%s\n"):format(
    random:hex(8),
    random:hex(4),
    random:hex(3),
    random:hex(3),
    random:hex(12)
  )
  fs.write(self.directory .. "/boot_id", text, { mode = 292, sync = false })
end

-- The command of a start-up script: as the worker's root where it has one, else as the worker's first user. bash runs
-- it, so that a script without a first line that names an interpreter runs too.
local function script_command(self, path)
  if self.isolated then
    return self.isolation:argv(self.init, { "/bin/bash", "-c", 'cd / && exec "$0"', path }, true)
  end
  local argv = { "/bin/bash", "-c", 'cd "$1" && exec "$0"', path, self.root }
  if uv.getuid() ~= 0 then
    return argv
  end
  local uid = accounts.first_uid(self.settings.ordinal)
  local drop = { isolation.program("setpriv"), "--reuid=" .. uid, "--regid=" .. uid, "--clear-groups" }
  return table.move(argv, 1, #argv, #drop + 1, drop)
end

--- Run the start-up script, if there is one, in a task of its own: a machine is up before its script has ended.
local function start_script(self, scope)
  local script = (self.node.message.metadata or {})["startup-script"]
  if not script or script == "" then
    return
  end
  local path = self.root .. "/run/startup-script"
  fs.mkdir_p(self.root .. "/run")
  fs.write(path, script, { mode = 493, sync = false })
  local argv = script_command(self, self.isolated and "/run/startup-script" or path)
  local variables = environment(self)
  variables.PATH = PATH
  variables.HOME = self.isolated and "/root" or self.root
  variables.LANG = "C.UTF-8"
  argv.env, argv.clear_env = variables, true
  local log = assert(uv.fs_open(self.directory .. "/startup-script.log", "a", 420))
  argv.stdout, argv.stderr = log, process.STDOUT
  local name = ("%s worker %d"):format(self.node.id, self.worker)
  self.script = scope:spawn("start-up script of " .. name, function()
    local ok, result = pcall(process.run, argv)
    uv.fs_close(log)
    local text = ok and result:reason() or errors.text(result)
    self.world.events:add("machine", name, "start-up script: " .. text)
    if not ok and errors.is(result, "cancelled") then
      error(result, 0)
    end
  end)
end

--- Boot: a new boot id, no processes, sshd listening, the start-up script running.
---@async
---@param scope ciranda.Scope where the start-up script's task lives
function Machine:boot(scope)
  write_boot_id(self)
  fs.write(
    self.etc .. "/sshd_config",
    sshd.config({ etc = self.etc_inside, environment = environment(self) }),
    { mode = 420, sync = false }
  )
  fs.write(self.etc .. "/hosts", hosts(self), { mode = 420, sync = false })
  write_accounts(self)
  if not self.isolated then
    for _, path in ipairs(self:devices()) do
      fs.mkdir_p(fs.dirname(path))
      fs.write(path, "", { mode = 438, sync = false })
    end
  end
  self.init = self.isolation:start({
    root = self.root,
    etc = self.etc,
    hostname = self.hostname,
    boot_id = self.directory .. "/boot_id",
    devices = tpu_env.devices(self.node),
  })
  local ok, listener = pcall(sshd.listen, {
    addresses = { self.address, self.external },
    ports = self.settings.ssh_ports,
    argv = function()
      return session_command(self)
    end,
    environment = session_environment(self),
    log = self.directory .. "/sshd.log",
    on_connection = function()
      return self.world.faults:on_ssh(self.node.id, self.worker)
    end,
  })
  if not ok then
    self.isolation:stop(self.init)
    error(listener, 0)
  end
  self.listener = listener
  self.running, self.disk_full = true, nil
  start_script(self, scope)
  self.world.events:add("machine", ("%s worker %d"):format(self.node.id, self.worker), "booted")
end

-- The processes of a worker without namespaces: what descends from its sshd, and what still carries its mark; and
-- how many there are that may carry it.
local function belongings(self)
  local list, unknown = {}, 0
  for _, pid in ipairs(self.listener and self.listener:pids() or {}) do
    list[#list + 1] = processes.get(pid)
    for _, found in ipairs(processes.descendants(pid)) do
      list[#list + 1] = found
    end
  end
  local mark = "CIRANDA_SIM_WORKER=" .. self.directory
  for _, pid in ipairs(processes.pids()) do
    local marked = processes.has_environment(pid, mark)
    if marked then
      list[#list + 1] = processes.get(pid)
    elseif marked == nil then
      unknown = unknown + 1
    end
  end
  return list, unknown
end

-- As the power switch: nobody is asked.
local function kill_all(self)
  local deadline = uv.now() + KILL_DEADLINE * 1000
  repeat
    local list, left = belongings(self)
    for _, found in ipairs(list) do
      if processes.signal(found, "sigkill") then
        left = left + 1
      end
    end
    if left > 0 then
      task.sleep(0.02)
      uv.update_time()
    end
  until left == 0 or uv.now() > deadline
end

--- Switch the machine off. What ran on it ends; its disk stays.
---@async
function Machine:halt()
  if not self.running then
    return
  end
  self.running = false
  self.listener:close()
  if self.isolated then
    self.isolation:stop(self.init)
  else
    kill_all(self)
  end
  if self.script then
    self.script:cancel("the machine was switched off")
    self.script = nil
  end
  self.listener, self.init = nil, nil
end

--- Switch the machine off and take its disk away.
---@async
function Machine:destroy()
  self:halt()
  disk.remove(self.directory)
end

--- Give the machine another host key and tell nobody: what a client must refuse.
---@async
function Machine:change_host_key()
  sshd.make_host_key(self.etc .. "/ssh_host_ed25519_key")
end

--- Leave no more room on the disk than so many bytes. It lasts until the machine boots anew.
---@async
---@param free integer
--- Raises ciranda.sim.Status FAILED_PRECONDITION where it cannot be done.
function Machine:fill_disk(free)
  if not self.running then
    refusals.raise("FAILED_PRECONDITION", "the machine is off")
  end
  local problem = self.isolation:fill_disk(self.init, free)
  if problem then
    refusals.raise("FAILED_PRECONDITION", "the disk cannot be filled here: " .. problem)
  end
  self.disk_full = true
end

--- Follow a change of the node's metadata or network.
---@async
function Machine:reconfigure()
  if not self.running then
    return
  end
  write_accounts(self)
  local external = self.node.endpoints[self.worker + 1].external
  if external ~= self.external then
    if self.external then
      self.listener:remove(self.external)
    end
    self.external = external
    if external then
      self.listener:add(external)
    end
  end
end

--- The processes that hold the worker's TPU devices.
---@return ciranda.sim.Process[]
function Machine:holders()
  local list = {}
  if not self.running then
    return list
  end
  local prefix = self:device_prefix()
  local inside = self.init and processes.namespace(self.init.pid, "pid")
  for _, pid in ipairs(processes.pids()) do
    if (not inside or processes.namespace(pid, "pid") == inside) and processes.holds(pid, prefix) then
      list[#list + 1] = processes.get(pid)
    end
  end
  return list
end

--- What the guest publishes: its host key, its host name, and what its programs have written.
---@return { namespace: string, key: string, value: string }[]
function Machine:guest_attributes()
  local kind, value = self.host_key:match("^(%S+) (%S+)$")
  local list = {
    { namespace = "hostkeys", key = kind, value = value },
    { namespace = "guestInventory", key = "hostname", value = self.hostname },
  }
  for namespace, values in pairs(self.published) do
    for key, text in pairs(values) do
      list[#list + 1] = { namespace = namespace, key = key, value = text }
    end
  end
  return list
end

return M
