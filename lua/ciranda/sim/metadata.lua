--- The metadata server of Compute Engine, as a worker sees it, and as the machine does that runs the client.
--
-- A worker is known by the address on which it asks. `/computeMetadata/v1/` is a tree: a path that ends in `/` lists a
-- directory, with `?recursive=true` as JSON; another gives one value as text, or with `?alt=json` as JSON.

local json = require("ciranda.io.json")
local task = require("ciranda.task")
local tpu_env = require("ciranda.sim.tpu_env")

local M = {}

-- The longest that `?wait_for_change=true` waits for, in seconds; without a timeout_sec it is this too.
M.LONGEST_WAIT = 300

-- Seconds between two looks at a value that somebody waits for.
local POLL = 0.1

local function service_accounts(world, email, scopes)
  local account = {
    aliases = { "default" },
    email = email,
    scopes = scopes,
    token = function(query)
      return world.oauth:token_answer(email, query.scopes)
    end,
    identity = function(query)
      return world.oauth:identity(email, query.audience)
    end,
  }
  return { default = account, [email] = account }
end

local function project(world)
  return {
    ["project-id"] = world.project.id,
    ["numeric-project-id"] = world.project.number,
    attributes = world.project.metadata,
  }
end

--- The tree of a worker.
---@param world table
---@param machine ciranda.sim.Machine
---@return table
function M.worker(world, machine)
  local node = machine.node
  local scheduling = node.message.schedulingConfig or {}
  local preemptible = scheduling.preemptible or scheduling.spot or false
  local account = node.message.serviceAccount or {}
  local maintenance = node.message.upcomingMaintenance
  return {
    instance = {
      attributes = tpu_env.attributes(world, node, machine.worker),
      ["cpu-platform"] = "Unknown CPU Platform",
      description = node.message.description or "",
      ["guest-attributes"] = machine.published,
      hostname = ("%s.%s.c.%s.internal"):format(machine.hostname, node.zone, world.project.id),
      id = tostring(node.uid ~ machine.worker),
      ["maintenance-event"] = machine.maintenance_event,
      name = machine.hostname,
      preempted = (node.message.state == "PREEMPTED" or machine.preempted) and "TRUE" or "FALSE",
      scheduling = {
        ["automatic-restart"] = preemptible and "FALSE" or "TRUE",
        ["on-host-maintenance"] = "TERMINATE",
        preemptible = preemptible and "TRUE" or "FALSE",
      },
      ["service-accounts"] = service_accounts(
        world,
        account.email or world.oauth.default_account,
        account.scope or { "https://www.googleapis.com/auth/cloud-platform" }
      ),
      tags = node.message.tags or {},
      ["upcoming-maintenance"] = maintenance or {
        error = "no notifications have been received yet, try again later",
      },
      zone = ("projects/%s/zones/%s"):format(world.project.number, node.zone),
    },
    project = project(world),
    universe = { ["universe-domain"] = "googleapis.com" },
  }
end

--- The tree of the machine on which the client runs: credentials and the project, no TPU.
---@param world table
---@return table
function M.runner(world)
  return {
    instance = {
      attributes = {},
      ["service-accounts"] = service_accounts(world, world.oauth.default_account, {
        "https://www.googleapis.com/auth/cloud-platform",
      }),
      zone = ("projects/%s/zones/%s"):format(world.project.number, world.zone),
    },
    project = project(world),
    universe = { ["universe-domain"] = "googleapis.com" },
  }
end

local function is_list(value)
  return type(value) == "table" and value[1] ~= nil
end

local function find(tree, path)
  local value = tree
  for name in path:gmatch("[^/]+") do
    if type(value) ~= "table" or is_list(value) then
      return nil
    end
    value = value[name]
  end
  return value
end

-- The listing of a directory: sub-directories end in a slash.
local function listing(directory)
  local names = {}
  for name, value in pairs(directory) do
    names[#names + 1] = type(value) == "table" and not is_list(value) and name .. "/" or name
  end
  table.sort(names)
  return #names > 0 and table.concat(names, "\n") .. "\n" or ""
end

-- A tree without what must be asked for by name.
local function plain(value)
  if type(value) ~= "table" or is_list(value) then
    return value
  end
  local result = json.object({})
  for name, item in pairs(value) do
    if type(item) ~= "function" then
      result[name] = plain(item)
    end
  end
  return result
end

local function text(status, body, content_type)
  return {
    status = status,
    headers = {
      ["Content-Type"] = content_type or "application/text",
      ["Metadata-Flavor"] = "Google",
      Server = "Metadata Server for VM",
    },
    body = body,
  }
end

local function with_etag(answer)
  local sum = 0xcbf29ce484222325
  for i = 1, #answer.body do
    sum = (sum ~ answer.body:byte(i)) * 0x100000001b3
  end
  answer.headers.ETag = ("%016x"):format(sum)
  return answer
end

local function render(value, path, query)
  if type(value) == "function" then
    value = value(query)
    if type(value) == "string" then
      return text(200, value)
    end
    return text(200, json.encode(value), "application/json")
  end
  if type(value) ~= "table" then
    return query.alt == "json" and text(200, json.encode(value), "application/json")
      or text(200, tostring(value))
  elseif is_list(value) then
    return query.alt == "json" and text(200, json.encode(value), "application/json")
      or text(200, table.concat(value, "\n") .. "\n")
  elseif query.recursive == "true" or query.alt == "json" then
    return text(200, json.encode(plain(value)), "application/json")
  elseif path:sub(-1) ~= "/" then
    local redirect = text(301, "")
    redirect.headers.Location = "/computeMetadata/v1" .. path .. "/"
    return redirect
  end
  return text(200, listing(value))
end

local function answer_once(tree, path, query)
  local value = find(tree(), path)
  if value == nil then
    return text(404, "Not Found\n", "text/plain")
  end
  return with_etag(render(value, path, query))
end

-- Answer again and again until the answer is another one, or the client's time is up.
local function wait_for_change(tree, path, query, first)
  local limit = math.min(tonumber(query.timeout_sec) or M.LONGEST_WAIT, M.LONGEST_WAIT)
  local answer = first
  for _ = 1, math.floor(limit / POLL) do
    task.sleep(POLL)
    answer = answer_once(tree, path, query)
    if answer.headers.ETag ~= first.headers.ETag then
      break
    end
  end
  return answer
end

-- A guest publishes an attribute: the only thing that may be written. A value has at most 256 kB (Compute Engine).
local function publish(tree, path, value)
  local namespace, key = path:match("^/instance/guest%-attributes/([%w_-]+)/([%w_-]+)$")
  local attributes = find(tree, "/instance/guest-attributes")
  if not namespace or not attributes then
    return text(404, "Not Found\n", "text/plain")
  elseif #value > 262144 then
    return text(413, "The value is too large\n", "text/plain")
  end
  attributes[namespace] = attributes[namespace] or {}
  attributes[namespace][key] = value
  return text(200, "")
end

--- A refusal as the metadata server writes it.
---@param err ciranda.sim.Status
---@return table answer
function M.refusal(err)
  return text(err.http, err.message .. "\n", "text/plain")
end

--- Answer a request.
---@async
---@param tree fun(): table makes the tree as it is now
---@param request ciranda.server.Request
---@return table answer
function M.answer(tree, request)
  local headers = request.headers
  if request.path == "/" then
    return text(200, "computeMetadata/\n")
  end
  local path = request.path:match("^/computeMetadata/v1(.*)$")
  if not path or request.method ~= "GET" and request.method ~= "PUT" then
    return text(404, "Not Found\n", "text/plain")
  elseif headers["X-Forwarded-For"] then
    return text(403, "X-Forwarded-For is not allowed\n", "text/plain")
  elseif (headers["Metadata-Flavor"] or ""):lower() ~= "google" then
    return text(403, "Missing Metadata-Flavor:Google header.\n", "text/plain")
  end
  if request.method == "PUT" then
    return publish(tree(), path, request.body or "")
  end
  local query = request:args()
  local first = answer_once(tree, path, query)
  local known = query.last_etag and query.last_etag ~= first.headers.ETag
  if query.wait_for_change == "true" and not known then
    return wait_for_change(tree, path, query, first)
  end
  return first
end

return M
