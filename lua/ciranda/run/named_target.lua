--- Whom a recipe means in gcloud's words: a name, --node, --worker, --zone; besides the common flags of a target.
--
--     local found <close> = named_target.open(context, "job", {})
--     found.login()
--     found.fleet:run("hostname")
local err = require("ciranda.io.error")
local provider = require("ciranda.provider")
local target = require("ciranda.run.target")

local M = {}

---@type ciranda.cli.Flag[]
M.flags = {
  {
    name = "node",
    help = "Which slices of a queued resource, or of a prefix: all, 0, 0-3, 0,2, or names (0).",
  },
  { name = "worker", help = "Which workers of each slice: all, 0, 0-3, 0,2 (0)." },
  { name = "zone", help = "Zone (else gcloud's)." },
  { name = "project", help = "Google Cloud project (else gcloud's)." },
  {
    name = "internal-ip",
    type = "boolean",
    help = "Internal addresses only. Otherwise the external one, if it answers.",
  },
  { name = "ssh-key-file", help = "The same as --ssh-key." },
}
table.move(target.flags, 1, #target.flags, #M.flags + 1, M.flags)

--- "[USER@]NAME" in its parts.
---@param text string?
---@return string? name, string? user
local function split_user(text)
  local user, name = (text or ""):match("^([^@]*)@(.*)$")
  if user == "" then
    err.raise({
      code = "usage",
      op = "target",
      message = ("there is no user before the @ in %q"):format(text),
    })
  end
  name = name or text
  return name ~= "" and name or nil, user
end

---@param text string
---@return string one side of a node set
local function side(text)
  if text == "all" then
    return "*"
  end
  return text:match("^[%d,%-]+$") and ("[%s]"):format(text) or text
end

--- The node set that --node, --worker and --SLICES mean; nil for everybody.
---@param flags table
---@param everybody boolean when nothing is said
---@return string?
local function chosen(flags, everybody)
  if flags.SLICES then
    if flags.node or flags.worker then
      err.raise({ code = "usage", op = "target", message = "give --node and --worker, or --SLICES, not both" })
    end
    return target.slice_set(flags.SLICES)
  elseif everybody and not flags.node and not flags.worker then
    return nil
  end
  local default = everybody and "all" or "0"
  local node, worker = side(flags.node or default), side(flags.worker or default)
  return node == "*" and worker == "*" and "all"
    or ("%s/%s"):format(
      node:match("^[%[%*]") and "slice" .. node or node,
      worker:match("^[%[%*]") and "worker" .. worker or worker
    )
end

--- The first that was given of two spellings of a flag.
local function either(one, other)
  if one == nil then
    return other
  end
  return one
end

--- The workers that a name and the flags mean. Nothing is connected to yet.
---
--- As in gcloud, worker 0 of slice 0 is meant unless --node or --worker say otherwise; of a list of hosts, all.
---@async
---@param context ciranda.cli.Context
---@param name string? "[USER@]NAME" of a queued resource, a node, or the prefix of nodes
---@param options { all: boolean? } all: everybody is meant when nothing is said
---@return ciranda.run.Target with `missing`: names of nodes that a queued resource should have and has not
-- Raises "usage" for the flags, "not_found" when there are none, and what the API's calls raise.
function M.open(context, name, options)
  local flags = setmetatable({}, { __index = context.flags })
  local user
  name, user = split_user(name)
  name = name or flags.TPU_PREFIX
  flags.ssh_user = either(user, flags.ssh_user)
  flags.ssh_key = either(flags.ssh_key, flags.ssh_key_file)
  if flags.internal_ip then -- its opposite, as gcloud has it, is no wish for external addresses alone
    flags.INTERNAL_IP = true
  end
  local hosts = flags.HOSTS or flags.HOSTS_FILE
  local slices, tpu, missing
  if hosts and name then
    err.raise({
      code = "usage",
      op = "target",
      message = ("give a name (%s) or hosts, not both"):format(name),
    })
  elseif hosts then
    slices = provider.hosts({
      hosts = flags.HOSTS,
      file = flags.HOSTS_FILE,
      workers_per_slice = flags.WORKERS_PER_SLICE,
    })
  elseif name then
    tpu = require("ciranda.gcp.tpu").connect({
      project = either(flags.project, flags.PROJECT),
      zone = either(flags.zone, flags.ZONE),
    })
    slices, missing = provider.named({ tpu = tpu, name = name })
  else
    err.raise({
      code = "usage",
      op = "target",
      message = "which slices? Give the name of a queued resource, a node or a prefix of nodes, or --HOSTS",
    })
  end
  flags.SLICES = chosen(context.flags, options.all or hosts ~= nil)
  local found = target.of(slices, tpu, flags, context.progress)
  found.missing = missing or {}
  local meant = {}
  for _, worker in ipairs(found.fleet:workers()) do
    meant[worker.slice] = true
  end
  for _, slice in ipairs(slices) do
    if meant[slice.index] and slice.state and slice.state ~= "READY" then
      context.progress:say("Note: %s is %s, not READY", slice.name, slice.state)
    end
  end
  return found
end

return M
