--- The Cloud TPU API: queued resources, nodes, operations.
---
---     local tpu = require("ciranda.gcp.tpu").connect { project = "p", zone = "us-central2-b" }
---     local qr = tpu:create { id = "job1", slices = 2, accelerator = "v4-16", capacity = "spot" }
---     local message, nodes = qr:wait("ACTIVE")
---     qr:delete()
---
--- Methods and their HTTP forms come from the API's schema (ciranda.data.tpu_schema_*). Calls go through
--- ciranda.gcp.client; what a request may say is in ciranda.gcp.vocabulary.

local errors = require("ciranda.io.error")
local failure = require("ciranda.gcp.failure")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local gcp_client = require("ciranda.gcp.client")
local credentials = require("ciranda.gcp.credentials")
local log = require("ciranda.io.log")
local methods = require("ciranda.gcp.tpu_method")
local task = require("ciranda.task")

-- What only some calls need (making requests, waiting) is loaded by them: a list or a look should start at once.

local M = {}

M.ENDPOINT = "https://tpu.googleapis.com/"

--- The label by which a create that was answered "already exists" is known to be ours.
M.REQUEST_LABEL = "ciranda-request"

---@class ciranda.gcp.Tpu
---@field project string
---@field zone string
---@field client ciranda.gcp.Client
---@field endpoint string
local Tpu = {}
Tpu.__index = Tpu
Tpu.__name = "ciranda.gcp.Tpu"

function Tpu:__tostring()
  return ("the TPU API for project %s, zone %s"):format(self.project, self.zone)
end

local OPTIONS = { project = true, zone = true, client = true, config = true, endpoint = true }

--- Connect to the API. Nothing is asked of it yet.
---@async
---@param options { project: string?, zone: string?, client: ciranda.gcp.Client?, config: ciranda.gcp.Config?,
---       endpoint: string? }? what is not given comes from gcloud's configuration and the credentials
---@return ciranda.gcp.Tpu
--- Raises `usage` when project or zone are not to be found, `auth` without credentials.
function M.connect(options)
  options = options or {}
  errors.check_options(options, OPTIONS, "tpu.connect")
  local config = options.config or gcloud_config.load()
  local client = options.client or gcp_client.new { credentials = credentials.find { config = config } }
  local project = options.project or config:project() or client.credentials.project
  local zone = options.zone or config:zone()
  if not project or project == "" then
    errors.raise {
      code = "usage",
      op = "tpu.connect",
      flag = "project",
      message = "which project? Say it (--project), or type: gcloud config set project PROJECT",
    }
  end
  if not zone or zone == "" then
    errors.raise {
      code = "usage",
      op = "tpu.connect",
      flag = "zone",
      message = "which zone? Say it (--zone), or type: gcloud config set compute/zone ZONE",
    }
  end
  return setmetatable({
    project = project,
    zone = zone,
    client = client,
    endpoint = options.endpoint or config:endpoint("tpu", M.ENDPOINT),
  }, Tpu)
end

--- The same connection for another zone; "-" is all zones, for lists.
---@param zone string
---@return ciranda.gcp.Tpu
function Tpu:in_zone(zone)
  return self:elsewhere(self.project, zone)
end

--- The same connection for another project and zone.
---@param project string
---@param zone string
---@return ciranda.gcp.Tpu
function Tpu:elsewhere(project, zone)
  return setmetatable({ project = project, zone = zone, client = self.client, endpoint = self.endpoint }, Tpu)
end

--- The last segment of a resource's name.
---@param name string
---@return string
function M.short_name(name)
  return name:match("[^/]*$")
end

-- Calls -------------------------------------------------------------------------------------------------------------

---@class ciranda.gcp.TpuCall
---@field version "v2"|"v2alpha1"|nil  v2 by default
---@field query table?
---@field body table?
---@field idempotent boolean?
---@field deadline number?
---@field [string] any              the path's variables: node, queuedResource, operation, ...

--- Call any method of the API by its name in the schema, such as "reservations.list".
---@async
---@param name string
---@param arguments ciranda.gcp.TpuCall?
---@return table message
--- Raises what the client raises; `protocol` for an answer that is not as the schema says; `not_found` says in our
--- words what is not where.
function Tpu:call(name, arguments)
  local call, check = methods.prepare(self, name, arguments or {})
  local called, message = pcall(self.client.json, self.client, call)
  if called then
    check(message)
    return message
  end
  local id = arguments and (arguments.queuedResource or arguments.node)
  if id and errors.is(message, "not_found") then
    local queued = arguments.queuedResource ~= nil
    message.target = id
    local form =
      "there is no %s %s in zone %s of project %s (`ciranda %s list --zone=-` has those of all zones)"
    message.message = form:format(
      queued and "queued resource" or "node",
      id,
      arguments.zone or self.zone,
      self.project,
      queued and "qr" or "tpu_vm"
    )
  end
  return error(message, 0)
end

--- All items of a list method.
---@async
---@param name string such as "acceleratorTypes.list"
---@param arguments ciranda.gcp.TpuCall?
---@return table[] items
---@return string[] unreachable zones that could not be asked
function Tpu:list(name, arguments)
  local call, check = methods.prepare(self, name, arguments or {})
  local items, unreachable = self.client:pages(call, name:match("^(%w+)%."), check)
  if #unreachable > 0 then
    log.warn(
      ("%s: no answer from %s: the list is not complete"):format(name, table.concat(unreachable, ", "))
    )
  end
  return items, unreachable
end

--- Items that a page may have: the most that Google's APIs usually give.
local PAGE = 1000

--- The `fields` parameter by which a list has no more of each item than its name and these paths; nil for whole items
--- when one of the paths is no field, which the API would refuse.
---@param list string
---@param kind string the items' message
---@param paths string[]?
---@return string?
local function mask_of(list, kind, paths)
  local messages = require("ciranda.data.tpu_schema_v2").messages
  local fields = { "name" }
  for _, path in ipairs(paths or {}) do
    local names, inside = {}, kind
    for piece in path:gsub("%.basename%(%)$", ""):gmatch("[^.]+") do
      local name = piece:match("^[^%[]*")
      local fields_inside = inside and messages[inside]
      if fields_inside then
        local type_of = fields_inside[name]
        if not type_of then
          return nil
        end
        names[#names + 1] = name
        inside = type(type_of) == "string" and type_of:match("^(%a+)%[?%]?$") or nil
      end
    end
    fields[#fields + 1] = table.concat(names, "/")
  end
  return paths and ("%s(%s),nextPageToken,unreachable"):format(list, table.concat(fields, ",")) or nil
end

--- Messages that were asked for with their names, which everybody goes by.
local function named(tpu, messages)
  for place = 1, #messages do
    if not messages[place].name then
      methods.unusable(tostring(tpu), "what it tells of has no name")
    end
  end
  return messages
end

--- The nodes of the zone.
---@async
---@param paths string[]? the fields that are wanted besides the name, such as "state"; all by default
---@return table[] Node messages
function Tpu:list_nodes(paths)
  local query = { pageSize = PAGE, fields = mask_of("nodes", "Node", paths) }
  return named(self, (self:list("nodes.list", { query = query })))
end

--- The queued resources of the zone.
---@async
---@param paths string[]? the fields that are wanted besides the name, such as "state.state"; all by default
---@return table[] QueuedResource messages
function Tpu:list_queued_resources(paths)
  local query = { pageSize = PAGE, fields = mask_of("queuedResources", "QueuedResource", paths) }
  return named(self, (self:list("queuedResources.list", { query = query })))
end

--- One node.
---@async
---@param name string
---@return table Node message
function Tpu:get_node(name)
  return named(self, { self:call("nodes.get", { node = name }) })[1]
end

--- The guest attributes of a node's workers, one entry a worker, in order.
---@async
---@param node string
---@param options { query_path: string?, workers: integer[]? }?
---@return table[] GuestAttributes messages
function Tpu:guest_attributes(node, options)
  options = options or {}
  local workers
  for index, worker in ipairs(options.workers or {}) do
    workers = workers or {}
    workers[index] = ("%d"):format(worker)
  end
  local answer = self:call("nodes.getGuestAttributes", {
    node = node,
    body = { queryPath = options.query_path, workerIds = workers },
    idempotent = true,
  })
  return answer.guestAttributes or {}
end

-- Queued resources --------------------------------------------------------------------------------------------------

---@class ciranda.gcp.QueuedResource
---@field tpu ciranda.gcp.Tpu
---@field id string
---@field version "v2"|"v2alpha1"
---@field request_id string?      of the create that made it
---@field operation string?       name of the create operation
---@field nodes string[]?         the names that its nodes have
---@field created number?         when the create was accepted (monotonic seconds)
---@field adopted boolean?        whether an earlier try of the same request had made it
local QueuedResource = {}
QueuedResource.__index = QueuedResource
QueuedResource.__name = "ciranda.gcp.QueuedResource"

function QueuedResource:__tostring()
  return ("queued resource %s in %s"):format(self.id, self.tpu.zone)
end

--- A queued resource that exists, or may.
---@param id string
---@param fields table?
---@return ciranda.gcp.QueuedResource
function Tpu:queued_resource(id, fields)
  local self_of = fields or {}
  self_of.tpu, self_of.id, self_of.version = self, id, self_of.version or "v2"
  return setmetatable(self_of, QueuedResource)
end

--- The label of our request on the node of a message.
local function label_of(message, kind)
  local node = message
  if kind == "queuedResources" then
    local specs = type(message.tpu) == "table" and message.tpu.nodeSpec
    node = type(specs) == "table" and type(specs[1]) == "table" and specs[1].node or {}
  end
  return type(node.labels) == "table" and node.labels[M.REQUEST_LABEL] or nil
end

--- Whether what exists under the name was made by this request.
local function is_ours(self, kind, path, request_id)
  local found, message = pcall(self.call, self, kind .. ".get", path)
  if found then
    return label_of(message, kind) == request_id
  end
  if not errors.is(message, "not_found") then
    error(message, 0)
  end
  return false
end

--- Codes after which it is not known whether a create was carried out.
local UNKNOWN_OUTCOME = { "timeout", "reset", "closed", "unavailable" }

--- Carry out a create. Our earlier try is adopted, also when its answer was lost.
---@return string? operation
---@return boolean adopted
local function create(self, kind, path, arguments, request_id)
  local made, answer = pcall(self.call, self, kind .. ".create", arguments)
  if made then
    return answer.name, false
  end
  if errors.is(answer, "exists", table.unpack(UNKNOWN_OUTCOME)) and is_ours(self, kind, path, request_id) then
    return nil, true
  end
  return error(answer, 0)
end

--- Say which version is used, when it is not the usual one.
local function report_version(built)
  if #built.because > 0 then
    log.info(("using API %s, which has %s"):format(built.version, table.concat(built.because, ", ")))
  end
end

--- Ask for a queued resource. The request is checked before the call; the call may be repeated without harm.
---@async
---@param request ciranda.gcp.Request
---@param options { request_id: string? }? the UUID that makes repeating harmless, when it was recorded before
---@return ciranda.gcp.QueuedResource
--- Raises `usage` for the request; `exists` when somebody else's has the name; `quota`, `permission`, `invalid`, ...
function Tpu:create(request, options)
  local built =
    require("ciranda.gcp.vocabulary").queued_resource(request, { project = self.project, zone = self.zone })
  report_version(built)
  return self:create_built(built, options)
end

--- Ask for a queued resource by a message that has been made already: `ciranda.gcp.template` makes one of an answer.
---@async
---@param built ciranda.gcp.Template|ciranda.gcp.Built the request's label is put on it
---@param options { request_id: string? }?
---@return ciranda.gcp.QueuedResource
--- Raises what `create` raises.
function Tpu:create_built(built, options)
  local request_id = options and options.request_id or require("ciranda.io.crypto").uuid4()
  local node = built.body.tpu.nodeSpec[1].node
  node.labels = node.labels or {}
  node.labels[M.REQUEST_LABEL] = request_id
  local operation, adopted = create(self, "queuedResources", { queuedResource = built.id }, {
    version = built.version,
    query = { queuedResourceId = built.id, requestId = request_id },
    body = built.body,
    idempotent = true,
  }, request_id)
  return self:queued_resource(built.id, {
    version = built.version,
    request_id = request_id,
    operation = operation,
    adopted = adopted,
    nodes = built.nodes,
    created = self.client:now(),
  })
end

---@async
---@return table QueuedResource message
function QueuedResource:get()
  local message = self.tpu:call("queuedResources.get", { queuedResource = self.id, version = self.version })
  return named(self.tpu, { message })[1]
end

--- The state's name, nil when there is no such queued resource.
---@async
---@return string?
function QueuedResource:state()
  local found, message = pcall(self.get, self)
  if found then
    return type(message.state) == "table" and message.state.state or "STATE_UNSPECIFIED"
  elseif errors.is(message, "not_found") then
    return nil
  end
  return error(message, 0)
end

--- Wait for a state: ciranda.gcp.waiting tells how.
---@async
---@param state string "ACTIVE" (with every node READY), "DELETED", or any other
---@param options ciranda.gcp.WaitOptions?
---@return table? message nil for "DELETED"
---@return table[]? nodes in order, for "ACTIVE"
function QueuedResource:wait(state, options)
  return require("ciranda.gcp.waiting").queued_resource(self, state, options)
end

--- Ask for its deletion. Gone already is a success.
---@async
---@param options { force: boolean?, request_id: string? }? force, the default, deletes the nodes too; without it a
---       queued resource with nodes is refused
---@return string? operation nil when there was nothing to delete
function QueuedResource:delete(options)
  options = options or {}
  local force = options.force
  if force == nil then
    force = true
  end
  local done, answer = pcall(self.tpu.call, self.tpu, "queuedResources.delete", {
    queuedResource = self.id,
    version = self.version,
    query = { force = force, requestId = options.request_id or require("ciranda.io.crypto").uuid4() },
    idempotent = true,
  })
  if done then
    return answer.name
  elseif errors.is(answer, "not_found") then
    return nil
  end
  return error(answer, 0)
end

--- Reset every machine of an ACTIVE queued resource: processes go, disks stay. Waits until it is done. A call whose
--- answer fails is repeated: a machine that is booting boots anew.
---@async
---@param options { timeout: number? }?
---@return table QueuedResource message
function QueuedResource:reset(options)
  local operation = self.tpu:call("queuedResources.reset", {
    queuedResource = self.id,
    version = self.version,
    idempotent = true,
  })
  return self.tpu:wait_operation(operation, options)
end

-- Nodes without a queue ---------------------------------------------------------------------------------------------

--- Ask for one node.
---@async
---@param request ciranda.gcp.Request `id` is the node's
---@param options { request_id: string? }?
---@return { id: string, version: string, operation: string?, adopted: boolean, request_id: string }
function Tpu:create_node(request, options)
  local request_id = options and options.request_id or require("ciranda.io.crypto").uuid4()
  local built = require("ciranda.gcp.vocabulary").node(request, { project = self.project, zone = self.zone })
  report_version(built)
  built.body.labels = built.body.labels or {}
  built.body.labels[M.REQUEST_LABEL] = request_id
  local operation, adopted = create(self, "nodes", { node = built.id }, {
    version = built.version,
    query = { nodeId = built.id, requestId = built.version ~= "v2" and request_id or nil },
    body = built.body,
    idempotent = true, -- the name is taken after the first time, and the label tells whose it is
  }, request_id)
  return {
    id = built.id,
    version = built.version,
    operation = operation,
    adopted = adopted,
    request_id = request_id,
  }
end

--- Wait until a node has a state.
---@async
---@param name string
---@param state string "READY", "DELETED", "STOPPED", ...
---@param options ciranda.gcp.WaitOptions?
---@return table? Node message; nil for "DELETED"
function Tpu:wait_node(name, state, options)
  return require("ciranda.gcp.waiting").node(self, name, state, options)
end

--- Ask for a node's deletion. Gone already is a success.
---@async
---@param name string
---@return string? operation
function Tpu:delete_node(name)
  local done, answer = pcall(self.call, self, "nodes.delete", { node = name, idempotent = true })
  if done then
    return answer.name
  elseif errors.is(answer, "not_found") then
    return nil
  end
  return error(answer, 0)
end

--- Change fields of a node and wait until it is done.
---@async
---@param name string
---@param fields table of the Node message
---@param mask string such as "labels,metadata"
---@param options { timeout: number?, version: string? }?
---@return table Node message
function Tpu:patch_node(name, fields, mask, options)
  options = options or {}
  local operation = self:call("nodes.patch", {
    node = name,
    version = options.version,
    query = { updateMask = mask },
    body = fields,
    idempotent = true,
  })
  return self:wait_operation(operation, { timeout = options.timeout })
end

--- Let keys log in to a node's workers. Tasks that do so at the same time write once for all; another program that
--- overwrites the keys is noticed, and they are written again.
---@async
---@param name string
---@param keys string[] "user:ssh-ed25519 AAAA... comment"
---@param options { timeout: number? }? 300 s by default
--- Raises `timeout` when others kept overwriting, and what a call raises.
function Tpu:add_ssh_keys(name, keys, options)
  require("ciranda.gcp.ssh_keys").add(self, name, keys, options and options.timeout or 300)
end

-- Operations --------------------------------------------------------------------------------------------------------

--- Read an operation again.
---@async
---@param name string the full name, as an answer has it
---@param deadline number? seconds for the call with its repetitions
---@return table Operation message
function Tpu:get_operation(name, deadline)
  return self:call("operations.get", {
    operation = M.short_name(name),
    location = name:match("/locations/([^/]+)/") or self.zone,
    deadline = deadline,
  })
end

--- Wait until an operation has ended. gcloud polls after 1 s, then ever more seldom.
---@async
---@param operation table|string the message, or its name
---@param options { timeout: number? }? seconds; 1800 by default, as gcloud
---@return table response
--- Raises what the operation failed with, `timeout`.
function Tpu:wait_operation(operation, options)
  local name = operation
  if type(operation) == "string" then
    operation = self:get_operation(operation)
  else
    name = operation.name
  end
  if not operation.done and not name then
    methods.unusable(tostring(self), "an operation without a name")
  end
  local timeout = options and options.timeout or 1800
  local deadline = self.client:now() + timeout
  local wait = self.client.first_wait
  while not operation.done do
    local now = self.client:now()
    if now >= deadline then
      errors.raise {
        code = "timeout",
        op = "tpu.wait_operation",
        target = name,
        message = ("%s has not ended within %g s"):format(name, timeout),
      }
    end
    task.sleep(math.min(wait * (0.5 + self.client.random() * 0.5), deadline - now))
    wait = math.min(wait * 1.4, 30)
    operation = self:get_operation(name, math.max(1, deadline - self.client:now()))
  end
  if operation.error then
    local target = type(operation.metadata) == "table" and operation.metadata.target or name
    errors.raise(failure.of_status(operation.error, M.short_name(tostring(target))))
  end
  return operation.response or {}
end

return M
