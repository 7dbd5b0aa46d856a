--- The ledger: what our runs have made in the cloud, who uses it, and what nobody does.
--
-- Every create is an intent in a journal before it is a call, with the request id that the service knows it by. So
-- after any crash the journals say what may exist; the cloud says what does; and a label with the request id says
-- that it is ours.
local clock = require("ciranda.io.clock")
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local runs = require("ciranda.run.runs")
local tpus = require("ciranda.gcp.tpu")
local waiting = require("ciranda.gcp.waiting")

local M = {}

--- Failures after which it is certain that nothing was made.
local NOT_MADE =
  { "usage", "misuse", "quota", "permission", "invalid", "exists", "auth", "precondition", "unsupported" }

---@class ciranda.ledger.Object: ciranda.journal.Object
---@field run string
---@field used "runner"|"job"|"nobody" runner: the run's program is alive; job: what was started on it goes on without

--- A request in one line, its fields in order: two that are equal ask for the same.
local function canonical(value)
  if type(value) ~= "table" then
    return ("%q"):format(value)
  end
  local names, parts = {}, {}
  for name in pairs(value) do
    names[#names + 1] = name
  end
  table.sort(names, function(a, b)
    return tostring(a) < tostring(b)
  end)
  for i, name in ipairs(names) do
    parts[i] = ("%s=%s"):format(name, canonical(value[name]))
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- What an earlier program of this run may have made under a name: its request's id and whether it may be there still.
-- Asking again with that id makes nothing twice, and a label that has it is known for ours; with a new id, what is
-- there would be somebody else's, and forgotten.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param kind string
---@param name string
---@param asked string digest of the request
---@return string? request_id nil when there is nothing to be taken up
-- Raises "precondition" when it is in another project or zone, being deleted, or another thing than is asked for now,
-- and what a call raises.
local function earlier_request(journal, tpu, kind, name, asked)
  local known = journal:state().objects[kind .. " " .. name]
  if not known or not known.request_id or known.phase == "failed" or known.phase == "gone" then
    return nil
  end
  local there = tpu:elsewhere(known.project, known.zone)
  local state = M.look(there, known)
  if state == "gone" or state == "not ours" then
    return nil
  end
  local problem
  if known.project ~= tpu.project or known.zone ~= tpu.zone then
    problem = ("is in %s of project %s: delete it there (ciranda gc), or take another name"):format(
      known.zone,
      known.project
    )
  elseif state == "DELETING" then
    problem = "is being deleted: try again when it is gone"
  elseif known.asked and known.asked ~= asked then
    problem = ("was another request, and is %s: delete it first, or take another name"):format(state)
  end
  if problem then
    err.raise({
      code = "precondition",
      op = "ledger.create",
      target = name,
      message = ("%s, which run %s asked for before, %s"):format(name, journal.run, problem),
    })
  end
  return known.request_id
end

--- May this be asked for under its name, by what this run asked for before?
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param request ciranda.gcp.Request of a queued resource, with `id`
-- Raises "precondition" where `create` would, and what a call raises.
function M.check(journal, tpu, request)
  earlier_request(journal, tpu, "queued_resource", request.id, crypto.hex(crypto.sha256(canonical(request))))
end

--- Makes something: the intent is on the disk before the call.
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param kind string
---@param request ciranda.gcp.Request
---@param keep string?
---@param make fun(tpu: ciranda.gcp.Tpu, request: ciranda.gcp.Request, options: table): table
---@return table made
local function create(journal, tpu, kind, request, keep, make)
  local asked = crypto.hex(crypto.sha256(canonical(request)))
  local earlier = earlier_request(journal, tpu, kind, request.id, asked)
  local object = {
    kind = kind,
    name = request.id,
    project = tpu.project,
    zone = tpu.zone,
    request_id = earlier or crypto.uuid4(),
    asked = asked,
    keep = keep,
    phase = "intent",
  }
  journal:intent("object", object)
  local ok, made = pcall(make, tpu, request, { request_id = object.request_id })
  if ok then
    journal:intent("object", { kind = kind, name = object.name, phase = "created", version = made.version })
    return made
  end
  -- That this call made nothing says nothing of the earlier one.
  if not earlier and err.is(made, table.unpack(NOT_MADE)) then
    journal:append("object", { kind = kind, name = object.name, phase = "failed" })
  end
  error(made, 0)
end

--- Asks for a queued resource: the intent is on the disk before the call. What an earlier program of this run asked for
-- under that name is taken up.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param request ciranda.gcp.Request with `id`
---@param keep string? why it outlives this program
---@return ciranda.gcp.QueuedResource
-- Raises what `tpu:create` raises, and "precondition" when the run has it in another zone.
function M.create(journal, tpu, request, keep)
  return create(journal, tpu, "queued_resource", request, keep, tpu.create)
end

--- Asks for a queued resource once more, by what was made of an answer.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param template ciranda.gcp.Template
---@param keep string? why it outlives this program
---@return ciranda.gcp.QueuedResource
-- Raises what `create` raises.
function M.create_again(journal, tpu, template, keep)
  return create(journal, tpu, "queued_resource", template, keep, tpu.create_built)
end

--- Asks for a node without a queue, in the same way.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param request ciranda.gcp.Request with `id`
---@param keep string? why it outlives this program
---@return { id: string, version: string, operation: string?, adopted: boolean, request_id: string }
-- Raises what `tpu:create_node` raises.
function M.create_node(journal, tpu, request, keep)
  return create(journal, tpu, "node", request, keep, tpu.create_node)
end

--- Deletes a queued resource, and notes that it is gone when it is.
---@async
---@param journal ciranda.Journal
---@param qr ciranda.gcp.QueuedResource
---@param options { wait: boolean?, timeout: number?, on_change: fun(state: string)? }? wait: until it is gone (true)
function M.delete(journal, qr, options)
  options = options or {}
  journal:intent("object", {
    kind = "queued_resource",
    name = qr.id,
    project = qr.tpu.project,
    zone = qr.tpu.zone,
    phase = "deleting",
  })
  qr:delete({ force = true })
  if options.wait ~= false then
    qr:wait("DELETED", { timeout = options.timeout or 1800, on_change = options.on_change })
    journal:append("object", { kind = "queued_resource", name = qr.id, phase = "gone" })
  end
end

--- Deletes a node that a journal knows, and notes that it is gone when it is.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param name string
---@param options { wait: boolean?, timeout: number?, on_change: fun(state: string)? }? wait: until it is gone (true)
function M.delete_node(journal, tpu, name, options)
  options = options or {}
  journal:intent("object", { kind = "node", name = name, phase = "deleting" })
  tpu:delete_node(name)
  if options.wait ~= false then
    tpu:wait_node(name, "DELETED", { timeout = options.timeout or 1800, on_change = options.on_change })
    journal:append("object", { kind = "node", name = name, phase = "gone" })
  end
end

--- Who uses what a run has made?
---@param state ciranda.journal.State
---@param object ciranda.journal.Object
---@return "runner"|"job"|"nobody"
local function user_of(state, object)
  if runs.runner(state) then
    return "runner"
  end
  return (object.keep or runs.open_attempt(state)) and "job" or "nobody"
end

--- What may exist, by the journals.
---@return ciranda.ledger.Object[] sorted by run and name
---@return { run: string, problem: string }[] problems journals that cannot be read
function M.objects()
  local list, problems = {}, {}
  for _, run in ipairs(journals.list()) do
    local ok, state = pcall(journals.read, run)
    if not ok then
      problems[#problems + 1] = { run = run, problem = tostring(state) }
    elseif state then
      for _, object in pairs(state.objects) do
        if object.phase ~= "gone" and object.phase ~= "failed" then
          local entry = { run = run, used = user_of(state, object) }
          for name, value in pairs(object) do
            entry[name] = value
          end
          list[#list + 1] = entry
        end
      end
    end
  end
  table.sort(list, function(a, b)
    if a.run ~= b.run then
      return a.run < b.run
    end
    return a.name < b.name
  end)
  return list, problems
end

--- Is this message of the cloud's what our request made?
---@param message table a QueuedResource or Node message
---@param object ciranda.journal.Object
---@return boolean
function M.is_ours(message, object)
  local node = message
  if object.kind ~= "node" then
    local specs = type(message.tpu) == "table" and message.tpu.nodeSpec
    node = type(specs) == "table" and specs[1] and specs[1].node
  end
  local labels = type(node) == "table" and node.labels
  return type(labels) == "table"
    and object.request_id ~= nil
    and labels[tpus.REQUEST_LABEL] == object.request_id
end

--- Is it so soon after the request that "not found" does not mean that there is nothing? The request of a program that
-- was killed may still be on its way, and the API does not find at once what it has accepted.
---@param object ciranda.journal.Object
---@return boolean
local function may_come(object)
  return (object.phase == "intent" or object.phase == "created")
    and object.us ~= nil
    and clock.wall() - object.us / 1e6 < waiting.NOT_YET
end

--- What the cloud says of an object.
---@async
---@param tpu ciranda.gcp.Tpu for the object's project and zone
---@param object ciranda.ledger.Object
---@return string state its state's name, "gone", "not yet" (it may still come), or "not ours"
---@return table? message when it is there and ours
function M.look(tpu, object)
  local ok, message = pcall(function()
    if object.kind == "node" then
      return tpu:get_node(object.name)
    end
    return tpu:queued_resource(object.name, { version = object.version }):get()
  end)
  if not ok then
    if err.is(message, "not_found") then
      return may_come(object) and "not yet" or "gone"
    end
    error(message, 0)
  elseif not M.is_ours(message, object) then
    return "not ours"
  end
  local state = message.state
  if type(state) == "table" then
    state = state.state
  end
  return type(state) == "string" and state or "STATE_UNSPECIFIED", message
end

return M
