--- qr: queued resources, with gcloud's verbs and flags.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local gcloud_create = require("ciranda.provider.gcloud_create")
local gcloud_flags = require("ciranda.provider.gcloud_flags")
local journals = require("ciranda.run.journal")
local tables = require("ciranda.cli.table")

local VERBS = { create = true, list = true, describe = true, wait = true, delete = true, reset = true }

local M = {
  summary = "queued resources: create, list, describe, wait, delete, reset",
  creates = true, -- run --sim begins without slices
  description = "ciranda qr create NAME, list, describe NAME, wait NAME [STATE], delete NAME, reset NAME. create "
    .. "takes the flags of gcloud's command, waits until the slices are ACTIVE unless --async is given, "
    .. "and remembers what it made for `ciranda gc`; asking twice for the same name makes it once.",
}

M.flags = {
  {
    name = "VERB",
    positional = true,
    required = true,
    help = "create, list, describe, wait, delete or reset.",
  },
  { name = "NAME", positional = true, help = "The queued resource." },
  {
    name = "STATE",
    positional = true,
    help = "Of wait: ACTIVE (with every node READY), DELETED, ... Default: ACTIVE.",
  },
  { name = "project", help = "Google Cloud project (else gcloud's)." },
  { name = "zone", help = "Zone (else gcloud's); of list: - is all zones." },
  { name = "async", type = "boolean", default = false, help = "Do not wait." },
  { name = "timeout", type = "duration", help = "Longest wait, such as 30m (24h)." },
  {
    name = "tries",
    type = "integer",
    default = 3,
    help = "Of create: how often to ask in all, when it FAILED with some slices up.",
  },
  {
    name = "pause",
    type = "duration",
    default = 300,
    help = "Of create, wait: the pause before what FAILED is asked for again (5m).",
  },
  {
    name = "recreate",
    type = "integer",
    default = 0,
    help = "Of wait: how often what was preempted, or FAILED with some slices up, may be deleted and asked for again.",
  },
  { name = "force", type = "boolean", default = true, help = "Of delete: its nodes too." },
}
table.move(tables.flags, 1, #tables.flags, #M.flags + 1, M.flags)
gcloud_create.declare(M.flags, gcloud_flags.flags)

--- The first node that a message asks for.
---@param message table
---@return table
local function first_node(message)
  local spec = type(message.tpu) == "table" and message.tpu.nodeSpec and message.tpu.nodeSpec[1]
  return spec and spec.node or {}
end

--- The columns of gcloud's list.
---@type ciranda.cli.Column[]
local COLUMNS = {
  { "NAME", tables.short("name") },
  { "ZONE", tables.zone },
  {
    "NODE_COUNT",
    function(message)
      return #require("ciranda.provider.queued_resource").node_ids(message)
    end,
  },
  {
    "ACCELERATOR_TYPE",
    function(message)
      local node = first_node(message)
      local config = node.acceleratorConfig
      return node.acceleratorType or config and ("%s %s"):format(config.type or "", config.topology or "")
    end,
  },
  { "STATE", "state.state" },
}

---@param context ciranda.cli.Context
---@return string? name of the records of --json
local function event_of(context)
  return context.json and "queued_resource" or nil
end

local run = {}

function run.list(context, tpu)
  local messages = tpu:list_queued_resources(tables.needed(context.flags, context.json))
  tables.sort(messages)
  local flags = context.flags
  tables.print(
    messages,
    { columns = COLUMNS, filter = flags.filter, format = flags.format, event = event_of(context) }
  )
end

function run.describe(context, tpu)
  tables.print_one(tpu:queued_resource(context.flags.NAME):get(), context.flags.format, event_of(context))
end

--- How a wait says each new state.
---@return ciranda.gcp.WaitOptions
local function wait_options(context, qr)
  local progress = context.progress
  return {
    timeout = context.flags.timeout,
    on_change = function(now)
      progress:status(("%s is %s"):format(qr.id, now))
    end,
    on_note = function(text)
      progress:say("%s", text)
    end,
  }
end

--- The queued resource in a command line, in the zone and project that were given here.
local function itself(context)
  local words = context.flags.NAME
  for _, flag in ipairs({ "zone", "project" }) do
    words = words .. (context.given[flag] and (" --%s=%s"):format(flag, context.flags[flag]) or "")
  end
  return words
end

--- What asks again for a queued resource that is waited for, in a journal with its name.
---@return ciranda.run.Recreate
local function recreate_of(context, tpu, journal)
  local flags, name = context.flags, context.flags.NAME
  -- What an earlier command has begun is its budget's.
  local list = journal:state().recreations
  local last = list[#list]
  return require("ciranda.run.recreate").new({
    journal = journal,
    tpu = tpu,
    cloud = { project = tpu.project, zone = tpu.zone, queued_resource = name },
    attempt = "wait",
    series = last and not last.recreated and last.series or "wait-" .. journal.id,
    limit = flags.recreate,
    budget = "--recreate",
    failed_pause = flags.pause,
    go_on = ("ciranda qr wait %s --recreate=%d"):format(itself(context), flags.recreate),
    wait = flags.timeout,
    say = function(...)
      context.progress:say(...)
    end,
  })
end

--- The commands for one that has come to its end.
local function advise(context, problem, again)
  local rest = itself(context)
  problem.message = ("%s. It counts against the quota until it is deleted: ciranda qr delete %s%s"):format(
    problem.message,
    rest,
    again and ("; ciranda qr wait %s --recreate=1 deletes it, asks for the same again and waits"):format(rest)
      or ""
  )
end

function run.wait(context, tpu)
  local flags = context.flags
  local state = (flags.STATE or "ACTIVE"):upper()
  local name, budget = flags.NAME, flags.recreate
  if budget > 0 and state ~= "ACTIVE" then
    err.raise({ code = "usage", message = "--recreate is for a wait for ACTIVE" })
  end
  local journal <close> = budget > 0
      and journals.open(name, { recipe = context.name, arguments = context.args })
    or nil
  local recreate = journal and recreate_of(context, tpu, journal)
  if recreate then
    recreate:resume()
  end
  local deadline = flags.timeout and clock.now() + flags.timeout
  local options = wait_options(context, tpu:queued_resource(name))
  while true do
    local qr = tpu:queued_resource(name)
    local ok, problem = pcall(qr.wait, qr, state, options)
    if ok then
      break
    end
    local gone = err.is(problem) and (problem.state == "FAILED" or problem.state == "SUSPENDED")
    -- Quota is not freed and capacity not found by asking the same again.
    local again = err.is(problem, "preempted") or gone and (problem.ready_nodes or 0) > 0
    if not (again and recreate and recreate:after(problem)) then
      if gone then
        advise(context, problem, again and not recreate)
      end
      error(problem, 0)
    end
    options.timeout = deadline and math.max(0.001, deadline - clock.now())
  end
  context.progress:say("%s is %s", name, state)
end

function run.create(context, tpu)
  local request = gcloud_create.request(context, gcloud_flags.flags)
  local journal <close> = journals.open(request.id, { recipe = context.name, arguments = context.args })
  -- What was made by hand outlives this command: gc keeps it unless it is dead.
  local flags, progress = context.flags, context.progress
  local provision = require("ciranda.run.provision").start({
    journal = journal,
    tpu = tpu,
    request = request,
    keep = "made by hand",
    tries = flags.tries,
    pause = flags.pause,
    on_note = function(text)
      progress:say("%s", text)
    end,
  })
  local qr = provision.queued_resource
  progress:say("Queued resource %s was accepted", qr.id)
  if not flags.async then
    provision:wait(wait_options(context, qr))
    progress:say("%s is ACTIVE, and its nodes are READY: %s", qr.id, table.concat(qr.nodes or {}, ", "))
  end
end

function run.delete(context, tpu)
  local flags = context.flags
  local qr = tpu:queued_resource(flags.NAME)
  local state = journals.valid_name(flags.NAME) and journals.read(flags.NAME)
  local object = state and state.objects["queued_resource " .. flags.NAME]
  local journal <close> = object and object.zone == tpu.zone and journals.open(flags.NAME) or nil
  if journal then
    journal:intent("object", { kind = "queued_resource", name = flags.NAME, phase = "deleting" })
  end
  if not qr:delete({ force = flags.force }) then
    context.progress:say(
      "There is no queued resource %s in zone %s of project %s",
      flags.NAME,
      tpu.zone,
      tpu.project
    )
  elseif flags.async then
    context.progress:say("%s is being deleted", flags.NAME)
    return
  else
    qr:wait("DELETED", wait_options(context, qr))
    context.progress:say("%s is deleted", flags.NAME)
  end
  if journal then
    journal:append("object", { kind = "queued_resource", name = flags.NAME, phase = "gone" })
  end
end

function run.reset(context, tpu)
  tpu:queued_resource(context.flags.NAME):reset({ timeout = context.flags.timeout })
  context.progress:say("%s was reset", context.flags.NAME)
end

---@param context ciranda.cli.Context
function M.run(context)
  local flags = context.flags
  local verb = flags.VERB
  if not VERBS[verb] then
    err.raise({
      code = "usage",
      message = ("'%s' is none of create, list, describe, wait, delete, reset"):format(verb),
    })
  elseif verb ~= "list" and not flags.NAME then
    err.raise({ code = "usage", message = ("which queued resource? ciranda qr %s NAME"):format(verb) })
  elseif verb ~= "create" then
    gcloud_create.refuse(context, gcloud_flags.flags)
  end
  tables.check(flags)
  local tpu = require("ciranda.gcp.tpu").connect({ project = flags.project, zone = flags.zone })
  run[verb](context, tpu)
end

return M
