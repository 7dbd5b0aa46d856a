--- tpu_vm: single TPU nodes, with gcloud's verbs and flags.
local err = require("ciranda.io.error")
local gcloud_create = require("ciranda.provider.gcloud_create")
local gcloud_flags = require("ciranda.provider.gcloud_flags")
local journals = require("ciranda.run.journal")
local ledger = require("ciranda.run.ledger")
local tables = require("ciranda.cli.table")

local M = {
  summary = "single TPU nodes: create, list, describe, start, stop, delete",
  creates = true, -- run --sim begins without slices
  description = "ciranda tpu_vm create NAME, list, describe NAME, start NAME, stop NAME, delete NAME. create takes the "
    .. "flags of gcloud's command, waits until the node is READY unless --async is given, and remembers what it "
    .. "made for `ciranda gc`; asking twice for the same name makes it once. Several slices, or a place in the "
    .. "queue, are `ciranda qr`.",
}

M.flags = {
  {
    name = "VERB",
    positional = true,
    required = true,
    help = "create, list, describe, start, stop or delete.",
  },
  { name = "NAME", positional = true, help = "The node." },
  { name = "project", help = "Google Cloud project (else gcloud's)." },
  { name = "zone", help = "Zone (else gcloud's); of list: - is all zones." },
  { name = "async", type = "boolean", default = false, help = "Do not wait." },
  { name = "timeout", type = "duration", help = "Longest wait, such as 30m." },
  {
    name = "force",
    type = "boolean",
    default = false,
    help = "Of delete: also a node of a queued resource, which is then SUSPENDED.",
  },
}
table.move(tables.flags, 1, #tables.flags, #M.flags + 1, M.flags)

--- Flags of queued resources that a single node does not have: names of nodes, and all about waiting in the queue.
local QUEUE_ONLY = {}
for name in
  ([[node-id node-count node-prefix workload-type runtime-version best-effort guaranteed min-duration
  max-run-duration termination-time valid-after-duration valid-after-time valid-until-duration valid-until-time
  range]]):gmatch("%S+")
do
  QUEUE_ONLY[name] = true
end

---@type ciranda.provider.GcloudFlag[]
local CREATE = {
  {
    name = "version",
    help = "The machines' image (the generation's usual one).",
    put = function(request, _, text)
      request.runtime = text
    end,
  },
}
for _, flag in ipairs(gcloud_flags.flags) do
  if not QUEUE_ONLY[flag.name] then
    CREATE[#CREATE + 1] = flag
  end
end
gcloud_create.declare(M.flags, CREATE)

--- The columns of gcloud's list.
---@type ciranda.cli.Column[]
local COLUMNS = {
  { "NAME", tables.short("name") },
  { "ZONE", tables.zone },
  { "ACCELERATOR_TYPE", "acceleratorType" },
  { "TYPE", "acceleratorConfig.type" },
  { "TOPOLOGY", "acceleratorConfig.topology" },
  { "NETWORK", tables.short("networkConfig.network") },
  { "RANGE", "cidrBlock" },
  { "STATUS", "state" },
}

---@param context ciranda.cli.Context
---@return string? name of the records of --json
local function event_of(context)
  return context.json and "node" or nil
end

local run = {}

function run.list(context, tpu)
  local messages = tpu:list_nodes(tables.needed(context.flags, context.json))
  tables.sort(messages)
  local flags = context.flags
  tables.print(
    messages,
    { columns = COLUMNS, filter = flags.filter, format = flags.format, event = event_of(context) }
  )
end

function run.describe(context, tpu)
  -- Only v2alpha1 tells everything, autocheckpointEnabled among it.
  local message = tpu:call("nodes.get", { node = context.flags.NAME, version = "v2alpha1" })
  tables.print_one(message, context.flags.format, event_of(context))
end

--- Waits for a state and says each new one.
local function wait(context, tpu, state)
  local name, progress = context.flags.NAME, context.progress
  tpu:wait_node(name, state, {
    timeout = context.flags.timeout,
    on_change = function(now)
      if now ~= state and now ~= "NOT_FOUND" then
        progress:status(("%s is %s"):format(name, now))
      end
    end,
    on_note = function(text)
      progress:say("%s", text)
    end,
  })
end

function run.create(context, tpu)
  local request = gcloud_create.request(context, CREATE)
  local journal <close> = journals.open(request.id, { recipe = context.name, arguments = context.args })
  -- What was made by hand outlives this command: gc keeps it unless it is dead.
  local made = ledger.create_node(journal, tpu, request, "made by hand")
  context.progress:say("Node %s was accepted", made.id)
  if context.flags.async then
    return
  end
  if made.operation then
    -- A create that cannot be carried out (no capacity, quota) fails in its operation, and no node appears.
    tpu:wait_operation(made.operation, { timeout = context.flags.timeout })
  end
  wait(context, tpu, "READY")
  context.progress:say("%s is READY", made.id)
end

--- start and stop: the operation's end is the change's.
local function change(method, state)
  return function(context, tpu)
    local name = context.flags.NAME
    local operation = tpu:call(method, { node = name })
    if context.flags.async then
      context.progress:say("%s will be %s", name, state)
      return
    end
    tpu:wait_operation(operation, { timeout = context.flags.timeout })
    wait(context, tpu, state)
    context.progress:say("%s is %s", name, state)
  end
end

run.start = change("nodes.start", "READY")
run.stop = change("nodes.stop", "STOPPED")

--- Refuses to take one slice out of a queued resource by mistake: all its others would be lost with it.
local function check_alone(tpu, name)
  local ok, node = pcall(tpu.get_node, tpu, name)
  if not ok then
    if err.is(node, "not_found") then
      return
    end
    error(node, 0)
  end
  local owner = node.queuedResource and node.queuedResource:match("[^/]*$")
  if owner then
    err.raise({
      code = "usage",
      message = (
        "%s belongs to queued resource %s, which would be SUSPENDED with all its slices; delete that "
        .. "(ciranda qr delete %s), or add --force"
      ):format(name, owner, owner),
    })
  end
end

function run.delete(context, tpu)
  local name = context.flags.NAME
  if not context.flags.force then
    check_alone(tpu, name)
  end
  local state = journals.valid_name(name) and journals.read(name)
  local object = state and state.objects["node " .. name]
  local journal <close> = object and object.zone == tpu.zone and journals.open(name) or nil
  if journal then
    journal:intent("object", { kind = "node", name = name, phase = "deleting" })
  end
  local operation = tpu:delete_node(name)
  if not operation then
    context.progress:say("There is no node %s in zone %s of project %s", name, tpu.zone, tpu.project)
  elseif context.flags.async then
    context.progress:say("%s is being deleted", name)
    return
  else
    tpu:wait_operation(operation, { timeout = context.flags.timeout })
    wait(context, tpu, "DELETED")
    context.progress:say("%s is deleted", name)
  end
  if journal then
    journal:append("object", { kind = "node", name = name, phase = "gone" })
  end
end

---@param context ciranda.cli.Context
function M.run(context)
  local flags = context.flags
  local verb = flags.VERB
  if not run[verb] then
    err.raise({
      code = "usage",
      message = ("'%s' is none of create, list, describe, start, stop, delete"):format(verb),
    })
  elseif verb ~= "list" and not flags.NAME then
    err.raise({ code = "usage", message = ("which node? ciranda tpu_vm %s NAME"):format(verb) })
  elseif verb ~= "create" then
    gcloud_create.refuse(context, CREATE)
  end
  tables.check(flags)
  run[verb](context, require("ciranda.gcp.tpu").connect({ project = flags.project, zone = flags.zone }))
end

return M
