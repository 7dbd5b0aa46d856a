--- Whom a recipe runs on: the flags that say so, and the fleet that they mean.
--
-- Recipes that work on existing workers share these flags: nodes by name or prefix, or a list of hosts that no cloud
-- API is asked about.
local access = require("ciranda.provider.access")
local err = require("ciranda.io.error")
local fleets = require("ciranda.fleet")
local nodes = require("ciranda.provider.node")
local provider = require("ciranda.provider")
local uv = require("luv")

local M = {}

---@type ciranda.cli.Flag[]
M.flags = {
  {
    name = "TPU_PREFIX",
    help = "Name of the slice, or beginning of the names of the slices (PREFIX-0, PREFIX-1, ...).",
  },
  { name = "PROJECT", help = "Google Cloud project (else gcloud's)." },
  { name = "ZONE", help = "Zone of the slices (else gcloud's)." },
  {
    name = "INTERNAL_IP",
    type = "boolean",
    help = "true: internal addresses only; false: external ones only. Otherwise the external one, if it answers.",
  },
  {
    name = "tunnel-through-iap",
    type = "boolean",
    help = "true: through Identity-Aware Proxy (IAP); false: never. Otherwise workers without an external address.",
  },
  { name = "SLICES", help = "Only these of the slices found, such as 0-3 or slice[0-1],!slice0/worker3." },
  {
    name = "HOSTS",
    help = "Hosts in place of TPU_PREFIX, such as 10.0.0.[1-4],10.0.0.9:2222; no cloud API is asked.",
  },
  { name = "HOSTS_FILE", help = "A file with one host a line: ADDRESS [slice=N] [worker=N] [port=N]." },
  { name = "WORKERS_PER_SLICE", type = "integer", help = "How many of HOSTS, in order, make a slice (all)." },
  { name = "ssh-user", help = "Login user (else CIRANDA_SSH_USER, else your own name)." },
  {
    name = "ssh-key",
    help = "Private key file (else gcloud's, which is made when absent, and the usual ones).",
  },
  { name = "ssh-port", type = "integer", help = "SSH port (else CIRANDA_SSH_PORT, else 22)." },
  {
    name = "host-keys",
    choices = { "strict", "accept-new" },
    help = "accept-new: take an unknown host's key on first use. Cloud workers' keys come from the API either way.",
  },
  {
    name = "match-exec",
    type = "boolean",
    help = "Run the programs of Match exec in ssh_config (otherwise such a Match counts for nothing).",
  },
}

--- `0-3,7` as a node set; other texts are node sets already.
---@param text string
---@return string
function M.slice_set(text)
  return text:match("^[%d,%-%s]+$") and ("slice[%s]"):format(text:gsub("%s", "")) or text
end

--- Refuses to run on one of the fleet's own workers: it would be told to stop its own runner.
---@param slices ciranda.Slice[]
-- Raises "usage".
function M.refuse_own_worker(slices)
  local own = {}
  for _, addresses in pairs(uv.interface_addresses()) do
    for _, address in ipairs(addresses) do
      if not address.internal then
        own[address.ip] = true
      end
    end
  end
  for _, slice in ipairs(slices) do
    for _, worker in ipairs(slice.workers) do
      if own[worker.internal_address or worker.address] then
        err.raise({
          code = "usage",
          op = "target",
          message = ("this machine is slice %d worker %d itself; run this from another one"):format(
            worker.slice,
            worker.index
          ),
        })
      end
    end
  end
end

---@param flags table
---@return ciranda.Slice[] slices, ciranda.gcp.Tpu? tpu
local function find(flags)
  if flags.HOSTS or flags.HOSTS_FILE then
    if flags.TPU_PREFIX then
      err.raise({ code = "usage", op = "target", message = "give --TPU_PREFIX or --HOSTS, not both" })
    end
    return provider.hosts({
      hosts = flags.HOSTS,
      file = flags.HOSTS_FILE,
      workers_per_slice = flags.WORKERS_PER_SLICE,
    })
  elseif not flags.TPU_PREFIX then
    err.raise({
      code = "usage",
      op = "target",
      message = "whom to run on? Give --TPU_PREFIX (the slices' name or prefix), or --HOSTS",
    })
  end
  local tpu = require("ciranda.gcp.tpu").connect({ project = flags.PROJECT, zone = flags.ZONE })
  return provider.node({ tpu = tpu, prefix = flags.TPU_PREFIX }), tpu
end

--- Says what is wrong with the slices found, and stops unless the user has chosen among them.
local function check(slices, flags, progress)
  local problem = nodes.problem(slices)
  if not problem then
    return
  elseif flags.SLICES then
    progress:say("Note: %s", problem)
    return
  end
  err.raise({
    code = "usage",
    op = "target",
    message = ("%s; choose with --SLICES= if you mean it\n%s"):format(problem, nodes.table_text(slices)),
  })
end

---@class ciranda.run.Target
---@field fleet ciranda.Fleet to be closed
---@field slices ciranda.Slice[]
---@field tpu ciranda.gcp.Tpu? when a cloud API was asked
---@field connection table what is needed to connect again: user, port, internal_ip, host_key_policy, match_exec, key
---@field answered table<ciranda.Worker, string> the address that answered, of those connected to
---@field tunnelled table<ciranda.Worker, boolean> of these, those that IAP led to
---@field cloud ciranda.run.Cloud? where the slices come from, when a cloud API was asked
---@field chips integer? of the slices chosen, when the cloud tells their type
---@field renew (fun(timeout: number?): ciranda.Fleet, string?, function?)? as in `ciranda.run.LaunchOptions`
---@field multislice fun(): function?, string? what Multislice's variables must be for a part of the slices found, and a
---  note; nothing for all of them. Connects to every worker
---@field login fun() makes sure that the key is let in; call it before much else
local Target = {}
Target.__index = Target

--- The fleet that the flags mean. Nothing is connected to yet.
---@async
---@param context ciranda.cli.Context
---@return ciranda.run.Target
-- Raises "usage" for the flags, "not_found" when there are no such slices, and what the API's calls raise.
function M.open(context)
  local flags, progress = context.flags, context.progress
  local slices, tpu = find(flags)
  progress:say("%d slices found.", #slices)
  check(slices, flags, progress)
  M.refuse_own_worker(slices)
  return M.of(slices, tpu, flags, progress)
end

--- The slices that a fleet has workers of.
---@param fleet ciranda.Fleet
---@param slices ciranda.Slice[]
---@return ciranda.Slice[]
local function slices_of(fleet, slices)
  local has, list = {}, {}
  for _, worker in ipairs(fleet:workers()) do
    has[worker.slice] = true
  end
  for _, slice in ipairs(slices) do
    if has[slice.index] then
      list[#list + 1] = slice
    end
  end
  return list
end

--- The way through IAP that the flags allow.
---@param tpu ciranda.gcp.Tpu?
---@param flags table
---@return { project: string, zone: string, always: boolean? }?
local function tunnel_of(tpu, flags)
  local wanted = flags.tunnel_through_iap
  if wanted and (flags.INTERNAL_IP or not tpu) then
    err.raise({
      code = "usage",
      op = "target",
      message = tpu and "--tunnel-through-iap and internal addresses exclude each other"
        or "--tunnel-through-iap is for workers of Google Cloud; for hosts, ssh_config has ProxyJump and ProxyCommand",
    })
  end
  if not tpu or wanted == false or flags.INTERNAL_IP ~= nil and not wanted then
    return nil
  end
  return { project = tpu.project, zone = tpu.zone, always = wanted or nil }
end

--- How many chips slices have; nil when a type is not known.
---@param slices ciranda.Slice[]
---@return integer?
local function chips_of(slices)
  local topologies = require("ciranda.mesh.topology")
  local chips = 0
  for _, slice in ipairs(slices) do
    local ok, topology = pcall(topologies.of, slice.accelerator)
    if not ok then
      return nil
    end
    chips = chips + topology.chips
  end
  return chips
end

--- The target of slices that are known already, as the flags say: which of them, how to log in.
---@async
---@param slices ciranda.Slice[]
---@param tpu ciranda.gcp.Tpu? where the slices were found; nil for plain hosts
---@param flags table
---@param progress ciranda.cli.Progress
---@return ciranda.run.Target
function M.of(slices, tpu, flags, progress)
  local key, public = flags.ssh_key, nil
  local repair -- only a cloud's workers need it
  if tpu then
    key, public = access.key(flags.ssh_key)
    repair = require("ciranda.run.repair")
  end
  local connection = {
    user = (tpu or flags.ssh_user or os.getenv("CIRANDA_SSH_USER")) and access.user(flags.ssh_user) or nil,
    port = flags.ssh_port,
    internal_ip = flags.INTERNAL_IP,
    tunnel = tunnel_of(tpu, flags),
    host_key_policy = flags.host_keys,
    match_exec = flags.match_exec,
    keys = flags.ssh_key,
  }
  local options = { keys = flags.ssh_key and key or nil, credentials = tpu and tpu.client.credentials or nil }
  for name, value in pairs(connection) do
    options[name] = value
  end
  local told
  local answered, tunnelled = {}, {}
  options.on_address = function(worker, kind)
    answered[worker] = kind ~= "external" and worker.internal_address or worker.address
    tunnelled[worker] = kind == "tunnel"
    if told then
      return
    elseif kind == "tunnel" then
      told = kind
      progress:say("Connecting through IAP%s", flags.tunnel_through_iap and "" or ": no external addresses")
    elseif worker.internal_address ~= worker.address or options.tunnel and worker.has_external == false then
      told = kind
      progress:say("Connecting by %s addresses", kind)
    end
  end
  options.fresh_pins = tpu and function(worker)
    return nodes.pins(tpu, worker)
  end
  local fleet = fleets.new(slices, options)
  if flags.SLICES then
    fleet = fleet:select(M.slice_set(flags.SLICES))
    fleet.part = nil -- nobody else holds the whole
  end
  local function login(whom)
    if tpu then
      connection.user = access.ensure({
        tpu = tpu,
        fleet = whom,
        user = connection.user,
        user_given = flags.ssh_user ~= nil or os.getenv("CIRANDA_SSH_USER") ~= nil,
        public = public,
        on_note = function(text)
          progress:say("%s", text)
        end,
      })
      options.user = connection.user -- for a fleet that takes this one's place
    end
  end
  local cloud = repair and repair.cloud(tpu, slices_of(fleet, slices))
  local node_state, all_nodes
  if tpu then
    node_state, all_nodes = require("ciranda.run.node_state").of(function()
      return tpu
    end)
  end
  return setmetatable({
    fleet = fleet,
    slices = slices,
    tpu = tpu,
    connection = connection,
    answered = answered,
    tunnelled = tunnelled,
    cloud = cloud,
    chips = cloud and chips_of(slices_of(fleet, slices)),
    renew = cloud and function(timeout)
      local renewed, now = repair.renew({
        cloud = cloud,
        tpu = tpu,
        fleet_options = options,
        set = flags.SLICES and M.slice_set(flags.SLICES),
        say = function(...)
          progress:say(...)
        end,
        login = login,
        timeout = timeout,
      })
      local environment_of, note = repair.multislice(renewed, now)
      return renewed, note, environment_of
    end,
    multislice = function()
      local chosen = slices_of(fleet, slices)
      if tpu and (#chosen < #slices or #chosen == 1 and chosen[1].multislice) then
        return repair.multislice(fleet, chosen)
      end
    end,
    node_state = node_state,
    nodes = all_nodes,
    login = function()
      login(fleet)
    end,
  }, Target)
end

--- Closes the fleet's connections.
function Target:close()
  self.fleet:close()
end

Target.__close = Target.close

return M
