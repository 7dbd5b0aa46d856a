--- gc: what our runs have made in the cloud and nobody uses: lists it, and deletes it when asked.
local err = require("ciranda.io.error")
local holdings = require("ciranda.gcp.holdings")
local journals = require("ciranda.run.journal")
local ledger = require("ciranda.run.ledger")
local tables = require("ciranda.cli.table")
local task = require("ciranda.task")

--- States from which a queued resource, or a node, never runs again; it holds quota until it is deleted.
local DEAD = { FAILED = true, SUSPENDED = true, PREEMPTED = true, TERMINATED = true }

--- States of a queued resource that has no machines yet, and so holds no chips.
local QUEUED = { CREATING = true, ACCEPTED = true, WAITING_FOR_RESOURCES = true }

--- The columns of the list.
local function row(entry)
  return {
    entry.run,
    entry.kind == "node" and entry.name .. " (node)" or entry.name,
    entry.zone or "-",
    holdings.age_text(entry.held and entry.held.age),
    entry.held and tostring(entry.held.chips or "?") or "-",
    entry.state,
    entry.used == "runner" and "its runner" or entry.used == "job" and "a job" or "nobody",
    entry.verdict,
  }
end

--- One API connection a project and zone.
local function connections()
  local made = {}
  return function(object)
    local key = object.project .. " " .. object.zone
    made[key] = made[key]
      or require("ciranda.gcp.tpu").connect({ project = object.project, zone = object.zone })
    return made[key]
  end
end

--- Looks at every object and says what to do with it.
local function judge(objects, connection_of, all)
  task.map(objects, function(object)
    local ok, state, message = pcall(ledger.look, connection_of(object), object)
    if not ok then
      if err.is_fatal(state) then
        error(state, 0)
      end
      object.state, object.verdict, object.problem = "unknown", "keep: " .. state.code, state
      return
    end
    object.state = state
    object.held = message and holdings.of(message, os.time()) or nil
    if object.held and object.kind ~= "node" and QUEUED[state] then
      object.held.chips = 0
    end
    if state == "gone" or state == "not ours" then
      object.verdict = "forget"
    elseif object.used == "runner" or state == "not yet" then
      object.verdict = "keep"
    elseif DEAD[state] or object.used == "nobody" or all then
      object.verdict = "delete"
    else
      object.verdict = "keep"
    end
  end, 8)
end

--- What of both kinds of quota the objects hold, in words; nil when nothing.
local function quota_text(objects)
  local queued, chips = 0, 0
  for _, object in ipairs(objects) do
    if object.held then
      queued = queued + (object.kind ~= "node" and 1 or 0)
      chips = chips + (object.held.chips or 0)
    end
  end
  if queued + chips == 0 then
    return nil
  end
  return (
    "Until they are deleted, %d count against the quota of queued resources, "
    .. "and %d chips against that of TPUs"
  ):format(queued, chips)
end

--- Carries the verdicts out. A run whose runner has come back meanwhile is left alone.
local function collect(objects, connection_of, context)
  local failed = 0
  for _, object in ipairs(objects) do
    if object.verdict == "delete" or object.verdict == "forget" then
      local ok, problem = pcall(function()
        local journal <close> = journals.open(object.run)
        if object.verdict == "forget" then
          journal:append("object", { kind = object.kind, name = object.name, phase = "gone" })
          return
        end
        if object.kind == "node" then
          context.progress:say("Deleting node %s in %s", object.name, object.zone)
          ledger.delete_node(journal, connection_of(object), object.name, { wait = not context.flags.async })
          return
        end
        context.progress:say("Deleting queued resource %s in %s", object.name, object.zone)
        local qr = connection_of(object):queued_resource(object.name, { version = object.version })
        ledger.delete(journal, qr, { wait = not context.flags.async })
      end)
      if not ok then
        if err.is_fatal(problem) then
          error(problem, 0)
        end
        failed = failed + 1
        context.progress:say("%s: %s", object.name, tostring(problem))
      end
    end
  end
  return failed
end

return {
  summary = "list what our runs have made in the cloud and nobody uses; --DELETE=true deletes it",
  description = "Every run notes what it asks the cloud for before it asks. This reads those notes, asks the cloud "
    .. "what is there, and lists it. Queued resources that nobody uses, and those that are FAILED or "
    .. "SUSPENDED (they hold quota until they are deleted), are deleted with --DELETE=true. Only what "
    .. "carries the label of our own request is touched.",
  flags = {
    { name = "DELETE", type = "boolean", default = false, help = "Delete what is marked delete." },
    {
      name = "ALL",
      type = "boolean",
      default = false,
      help = "Delete also what a job without a runner is using.",
    },
    { name = "async", type = "boolean", default = false, help = "Do not wait until the deletions are done." },
  },
  run = function(context)
    local flags = context.flags
    local objects, problems = ledger.objects()
    for _, entry in ipairs(problems) do
      context.progress:say("run %s: %s", entry.run, entry.problem)
    end
    local connection_of = connections()
    judge(objects, connection_of, flags.ALL)
    local rows, to_delete, unknown =
      { { "RUN", "QUEUED RESOURCE", "ZONE", "AGE", "CHIPS", "STATE", "USED BY", "VERDICT" } }, 0, 0
    for _, object in ipairs(objects) do
      rows[#rows + 1] = row(object)
      to_delete = to_delete + (object.verdict == "delete" and 1 or 0)
      if object.problem then
        unknown = unknown + 1
        context.progress:say("%s: %s", object.name, tostring(object.problem))
      end
      context.progress:event({
        event = "object",
        run = object.run,
        name = object.name,
        zone = object.zone,
        age = object.held and object.held.age,
        chips = object.held and object.held.chips,
        state = object.state,
        used = object.used,
        verdict = object.verdict,
      })
    end
    if not context.json then
      io.write(#objects > 0 and tables.text(rows) or "Nothing that our runs have made is left.", "\n")
    end
    local quota = quota_text(objects)
    if quota then
      context.progress:say("%s", quota)
    end
    local failed = 0
    if flags.DELETE then
      failed = collect(objects, connection_of, context)
    elseif to_delete > 0 then
      context.progress:say(
        "%d to delete: ciranda gc --DELETE=true%s",
        to_delete,
        flags.ALL and " --ALL=true" or ""
      )
    end
    return (failed + unknown + #problems > 0) and 1 or 0
  end,
}
