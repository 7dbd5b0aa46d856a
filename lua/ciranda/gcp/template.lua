--- What a queued resource was asked for, from what the API says of it, so that the same can be asked for again.
--
-- An answer of the API has more than a request may: states, addresses, what the service has filled in, a spec for each
-- node. Here is what of it makes the request, in the version of the API that has all of it.
local errors = require("ciranda.io.error")
local kinds = require("ciranda.gcp.credential_kinds")
local vocabulary = require("ciranda.gcp.vocabulary")

local M = {}

--- What a request says of a node and of the rest. All other fields are the service's own ("output only").
local NODE = {
  "acceleratorConfig",
  "acceleratorType",
  "autocheckpointEnabled",
  "bootDiskConfig",
  "cidrBlock",
  "confidentialInstanceConfig",
  "dataDisks",
  "description",
  "labels",
  "metadata",
  "networkConfig",
  "networkConfigs",
  "protectionTier",
  "runtimeVersion",
  "serviceAccount",
  "shieldedInstanceConfig",
  "tags",
}
local REST = {
  "bestEffort",
  "guaranteed",
  "provisioningModel",
  "reservationName",
  "runDuration",
  "spot",
}

---@class ciranda.gcp.Template a request that has been made of an answer
---@field id string
---@field version "v2"|"v2alpha1"
---@field body table the QueuedResource message to be sent
---@field nodes string[] the names that the nodes will have

local function refuse(name, format, ...)
  errors.raise({
    code = "unsupported",
    op = "template",
    target = name,
    message = ("queued resource %s cannot be asked for again as it was: "):format(name) .. format:format(...),
  })
end

--- Only what was said: no null, no empty table, no enum's default, which is never sent. What is in a list keeps its
--- place: a network of which nothing is said is an empty message there.
---@param value any
---@return any
local function said(value)
  if type(value) == "table" then
    local kept = {}
    for key, item in pairs(value) do
      kept[key] = said(item)
      if kept[key] == nil and type(key) == "number" then
        kept[key] = {}
      end
    end
    return next(kept) ~= nil and kept or nil
  elseif type(value) == "userdata" or type(value) == "string" and value:find("^[A-Z_]+_UNSPECIFIED$") then
    return nil
  end
  return value
end

local function pick(message, names)
  local picked = {}
  for _, name in ipairs(names) do
    picked[name] = said(message[name])
  end
  return picked
end

--- A table where the message has one: nil for null and what else there may be.
local function field(message, name)
  return type(message[name]) == "table" and message[name] or nil
end

--- A request may be valid for a time; one that is made again is valid for as long. Its earliest moment has come.
local function policy_of(message)
  local policy = field(message, "queueingPolicy") or {}
  local stop = policy.validUntilTime or (field(policy, "validInterval") or {}).endTime
  local from, to = kinds.parse_time(message.createTime), kinds.parse_time(stop)
  if from and to and to > from then
    return { validUntilDuration = ("%ds"):format(math.floor(to - from)) }
  end
  local duration = policy.validUntilDuration
  return type(duration) == "string" and { validUntilDuration = duration } or nil
end

--- The range of addresses that was asked for: a request's has 8 addresses, and one for all nodes. Any other is what
--- the service has chosen for each.
---@param specs table[]
---@return string?
local function range_of(specs)
  local range = specs[1].node.cidrBlock
  for _, spec in ipairs(specs) do
    if type(spec) ~= "table" or type(spec.node) ~= "table" or spec.node.cidrBlock ~= range then
      return nil
    end
  end
  return type(range) == "string" and range:find("/29$") and range or nil
end

--- The one spec of a request for what an answer has a spec a node.
---@return table spec, string[] names, table? multi
local function spec_of(name, specs)
  local first = specs[1]
  if type(first) ~= "table" or type(first.node) ~= "table" then
    refuse(name, "the API does not say what its nodes are")
  end
  local node = pick(first.node, NODE)
  node.cidrBlock = range_of(specs)
  -- Both are filled in, and only one may be sent. The topology says more.
  if node.acceleratorConfig and node.acceleratorConfig.type and node.acceleratorConfig.topology then
    node.acceleratorType = nil
  elseif node.acceleratorType then
    node.acceleratorConfig = nil
  end
  if node.networkConfigs and (#node.networkConfigs > 1 or not node.networkConfig) then
    node.networkConfig = nil
  else
    node.networkConfigs = nil
  end
  local spec = { parent = first.parent, node = node }
  local multi = said(first.multisliceParams or first.multiNodeParams)
  if not multi and #specs == 1 then
    spec.nodeId = first.nodeId
    return spec, { first.nodeId }
  end
  local names = {}
  if not multi then
    multi = { nodeCount = #specs, nodeIdPrefix = tostring(first.nodeId):match("^(.*)%-%d+$") }
  end
  multi.nodeIdPrefix = multi.nodeIdPrefix or name
  for place = 1, math.tointeger(multi.nodeCount) or 0 do
    names[place] = ("%s-%d"):format(multi.nodeIdPrefix, place - 1)
    if #specs > 1 and (type(specs[place]) ~= "table" or specs[place].nodeId ~= names[place]) then
      refuse(name, "its nodes are not %s-0, %s-1, ...", multi.nodeIdPrefix, multi.nodeIdPrefix)
    end
  end
  return spec, names, multi
end

--- The request that makes the same again.
---@param message table a QueuedResource message
---@param now number seconds since 1970
---@return table body without the parameters of several slices, whose name depends on the version
---@return string[] nodes
---@return table? multi those parameters
-- Raises "unsupported" when the same cannot be asked for: its time is over, or its nodes have names of their own.
function M.body(message, now)
  local name = tostring(message.name):match("[^/]*$")
  local specs = field(field(message, "tpu") or {}, "nodeSpec") or {}
  local spec, nodes, multi = spec_of(name, specs)
  local body = pick(message, REST)
  for _, tier in ipairs({ "spot", "bestEffort", "guaranteed" }) do
    body[tier] = field(message, tier) and (body[tier] or {}) -- these say all by being there
  end
  body.trafficConfig = field(message, "trafficConfig") -- so do parts of this
  local stop = body.runDuration and kinds.parse_time(body.runDuration.terminationTime)
  if stop and stop <= now then
    refuse(name, "it was to run until %s", body.runDuration.terminationTime)
  end
  body.queueingPolicy = policy_of(message)
  body.tpu = { nodeSpec = { spec } }
  return body, nodes, multi
end

--- The request of a queued resource that is there.
---@async
---@param tpu ciranda.gcp.Tpu
---@param id string
---@return ciranda.gcp.Template
---@return table message as the API says it, in v2alpha1
-- Raises "unsupported" as `body` does, "not_found", and what calls raise.
function M.of(tpu, id)
  -- v2alpha1 has what v2 has but one field; what v2 can say is asked for by v2.
  local wide = tpu:queued_resource(id, { version = "v2alpha1" }):get()
  local now = os.time()
  local version, body, nodes, multi = "v2alpha1", M.body(wide, now)
  if #vocabulary.missing("v2", "QueuedResource", body) == 0 and not (multi and multi.workloadType) then
    version = "v2"
    body, nodes, multi = M.body(tpu:queued_resource(id):get(), now)
  end
  if multi then
    body.tpu.nodeSpec[1][version == "v2" and "multisliceParams" or "multiNodeParams"] = multi
  end
  return { id = id, version = version, body = body, nodes = nodes }, wide
end

return M
