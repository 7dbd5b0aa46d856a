--- The ledger: what our runs have made in the cloud, who uses it, and what nobody does.
--
-- Every create is an intent in a journal before it is a call, with the request id that the service knows it by. So
-- after any crash the journals say what may exist; the cloud says what does; and a label with the request id says
-- that it is ours.
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local tpus = require("ciranda.gcp.tpu")

local M = {}

--- Failures after which it is certain that nothing was made.
local NOT_MADE =
  { "usage", "misuse", "quota", "permission", "invalid", "exists", "auth", "precondition", "unsupported" }

---@class ciranda.ledger.Object: ciranda.journal.Object
---@field run string
---@field used "runner"|"job"|"nobody" runner: the run's program is alive; job: what was started on it goes on without

--- Makes something: the intent is on the disk before the call.
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param kind string
---@param request ciranda.gcp.Request
---@param keep string?
---@param make fun(tpu: ciranda.gcp.Tpu, request: ciranda.gcp.Request, options: table): table
---@return table made
local function create(journal, tpu, kind, request, keep, make)
  local object = {
    kind = kind,
    name = request.id,
    project = tpu.project,
    zone = tpu.zone,
    request_id = crypto.uuid4(),
    keep = keep,
    phase = "intent",
  }
  journal:intent("object", object)
  local ok, made = pcall(make, tpu, request, { request_id = object.request_id })
  if ok then
    journal:intent("object", { kind = kind, name = object.name, phase = "created", version = made.version })
    return made
  end
  if err.is(made, table.unpack(NOT_MADE)) then
    journal:append("object", { kind = kind, name = object.name, phase = "failed" })
  end
  error(made, 0)
end

--- Asks for a queued resource: the intent is on the disk before the call.
---@async
---@param journal ciranda.Journal
---@param tpu ciranda.gcp.Tpu
---@param request ciranda.gcp.Request with `id`
---@param keep string? why it outlives this program
---@return ciranda.gcp.QueuedResource
-- Raises what `tpu:create` raises.
function M.create(journal, tpu, request, keep)
  return create(journal, tpu, "queued_resource", request, keep, tpu.create)
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

--- Deletes a queued resource that a journal knows, and notes that it is gone when it is.
---@async
---@param journal ciranda.Journal
---@param qr ciranda.gcp.QueuedResource
---@param options { wait: boolean?, timeout: number?, on_change: fun(state: string)? }? wait: until it is gone (true)
function M.delete(journal, qr, options)
  options = options or {}
  journal:intent("object", { kind = "queued_resource", name = qr.id, phase = "deleting" })
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
  for _, runner in ipairs(state.runners) do
    if journals.runner_state(runner) ~= "dead" then
      return "runner"
    end
  end
  if object.keep then
    return "job"
  end
  local last = state.attempts[#state.attempts]
  if last and last.gone and not last.ended then
    return "job"
  end
  return "nobody"
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

--- What the cloud says of an object.
---@async
---@param tpu ciranda.gcp.Tpu for the object's project and zone
---@param object ciranda.ledger.Object
---@return string state its state's name, "gone", or "not ours"
function M.look(tpu, object)
  local ok, message = pcall(function()
    if object.kind == "node" then
      return tpu:get_node(object.name)
    end
    return tpu:queued_resource(object.name, { version = object.version }):get()
  end)
  if not ok then
    if err.is(message, "not_found") then
      return "gone"
    end
    error(message, 0)
  elseif not M.is_ours(message, object) then
    return "not ours"
  end
  local state = message.state
  if type(state) == "table" then
    state = state.state
  end
  return type(state) == "string" and state or "STATE_UNSPECIFIED"
end

return M
