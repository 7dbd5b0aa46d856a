--- qr: queued resources, with gcloud's verbs and flags.
local err = require("ciranda.io.error")
local gcloud_flags = require("ciranda.provider.gcloud_flags")
local journals = require("ciranda.run.journal")
local json = require("ciranda.io.json")
local ledger = require("ciranda.run.ledger")
local queued_resources = require("ciranda.provider.queued_resource")

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
  { name = "force", type = "boolean", default = true, help = "Of delete: its nodes too." },
  { name = "filter", help = "Of list: STATE, or a part of the name." },
  { name = "format", help = "Of list and describe: json, or value(FIELD) with a field such as state.state." },
}
for _, flag in ipairs(gcloud_flags.flags) do
  table.insert(M.flags, {
    name = flag.name,
    type = flag.switch and "boolean" or nil,
    many = flag.repeated,
    help = "Of create: " .. flag.help,
  })
end

local function key_of(name)
  return (name:gsub("%-", "_"))
end

--- The request that the flags make.
local function request_of(context)
  local request = { id = context.flags.NAME }
  for _, flag in ipairs(gcloud_flags.flags) do
    local key = key_of(flag.name)
    if context.given[key] then
      local value = context.flags[key]
      if flag.switch then
        if value then
          flag.put(request, flag.name)
        end
      else
        for _, text in ipairs(type(value) == "table" and value or { value }) do
          flag.put(request, flag.name, text)
        end
      end
    end
  end
  return request
end

--- A field by its path: "state.state", "tpu.nodeSpec[0].nodeId".
local function field(message, path)
  local value = message
  for piece in path:gmatch("[^.]+") do
    local name, index = piece:match("^([^%[]*)%[?(%d*)%]?$")
    value = type(value) == "table" and value[name] or nil
    if index and index ~= "" then
      value = type(value) == "table" and value[math.tointeger(tonumber(index)) + 1] or nil
    end
  end
  return value
end

---@param messages table[]
---@param format string?
---@param one boolean
local function print_messages(messages, format, one)
  local path = format and format:match("^value%((.+)%)$")
  if path then
    for _, message in ipairs(messages) do
      local value = field(message, path)
      io.write(type(value) == "table" and json.encode(value) or tostring(value == nil and "" or value), "\n")
    end
  elseif format == "json" or one then
    io.write(json.encode(one and messages[1] or json.array(messages), { indent = true }), "\n")
  elseif format then
    err.raise({ code = "usage", message = ("--format is %q, but takes json or value(FIELD)"):format(format) })
  end
end

local function state_of(message)
  return type(message.state) == "table" and message.state.state or "-"
end

--- The columns of gcloud's list.
local function row(message)
  local ids = queued_resources.node_ids(message)
  local spec = type(message.tpu) == "table" and message.tpu.nodeSpec and message.tpu.nodeSpec[1] or {}
  local node = spec.node or {}
  local config = node.acceleratorConfig
  return {
    message.name:match("[^/]*$"),
    message.name:match("/locations/([^/]+)/") or "-",
    tostring(#ids),
    node.acceleratorType or config and ("%s %s"):format(config.type or "", config.topology or "") or "-",
    state_of(message),
  }
end

local function print_table(messages)
  local rows = { { "NAME", "ZONE", "NODE_COUNT", "ACCELERATOR_TYPE", "STATE" } }
  for _, message in ipairs(messages) do
    rows[#rows + 1] = row(message)
  end
  local widths = {}
  for _, cells in ipairs(rows) do
    for column, cell in ipairs(cells) do
      widths[column] = math.max(widths[column] or 0, #cell)
    end
  end
  for _, cells in ipairs(rows) do
    local line = {}
    for column, cell in ipairs(cells) do
      line[column] = cell .. (" "):rep(widths[column] - #cell)
    end
    io.write((table.concat(line, "  "):gsub("%s+$", "")), "\n")
  end
end

local run = {}

function run.list(context, tpu)
  local flags = context.flags
  local messages = {}
  for _, message in ipairs(tpu:list_queued_resources()) do
    local filter = flags.filter
    if
      not filter
      or state_of(message) == filter:upper()
      or message.name:match("[^/]*$"):find(filter, 1, true)
    then
      messages[#messages + 1] = message
    end
  end
  table.sort(messages, function(a, b)
    return a.name < b.name
  end)
  if flags.format then
    print_messages(messages, flags.format, false)
  else
    print_table(messages)
  end
end

function run.describe(context, tpu)
  print_messages({ tpu:queued_resource(context.flags.NAME):get() }, context.flags.format, true)
end

--- Waits and says each new state.
local function wait(context, qr, state)
  local progress = context.progress
  qr:wait(state, {
    timeout = context.flags.timeout,
    on_change = function(now)
      progress:status(("%s is %s"):format(qr.id, now))
    end,
    on_note = function(text)
      progress:say("%s", text)
    end,
  })
end

function run.wait(context, tpu)
  local state = (context.flags.STATE or "ACTIVE"):upper()
  wait(context, tpu:queued_resource(context.flags.NAME), state)
  context.progress:say("%s is %s", context.flags.NAME, state)
end

function run.create(context, tpu)
  local request = request_of(context)
  local journal <close> = journals.open(request.id, { recipe = context.name, arguments = context.args })
  -- What was made by hand outlives this command: gc keeps it unless it is dead.
  local qr = ledger.create(journal, tpu, request, "made by hand")
  context.progress:say("Queued resource %s was accepted", qr.id)
  if not context.flags.async then
    wait(context, qr, "ACTIVE")
    context.progress:say(
      "%s is ACTIVE, and its nodes are READY: %s",
      qr.id,
      table.concat(qr.nodes or {}, ", ")
    )
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
    context.progress:say("There is no queued resource %s", flags.NAME)
  elseif flags.async then
    context.progress:say("%s is being deleted", flags.NAME)
    return
  else
    wait(context, qr, "DELETED")
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
    for _, flag in ipairs(gcloud_flags.flags) do
      if context.given[key_of(flag.name)] then
        err.raise({ code = "usage", message = ("--%s is for create"):format(flag.name) })
      end
    end
  end
  local tpu = require("ciranda.gcp.tpu").connect({ project = flags.project, zone = flags.zone })
  run[verb](context, tpu)
end

return M
