--- A method of the TPU API, as the API's schema has it: where it is, what it takes, and whether what it answers has the
--- form that it should.

local answers = require("ciranda.gcp.answer_check")
local errors = require("ciranda.io.error")
local url = require("ciranda.io.url")

local M = {}

local CALL_FIELDS = { version = true, query = true, body = true, idempotent = true, deadline = true }

--- Raises that an answer cannot be used.
---@param target string what was asked, or whom
---@param problem string
--- Raises "protocol".
function M.unusable(target, problem)
  errors.raise {
    code = "protocol",
    op = "gcp",
    target = target,
    message = ("%s: the answer is not as the API's schema says: %s"):format(target, problem),
  }
end

--- A method of the schema as a call of the client, and the check of its answers.
---@param tpu ciranda.gcp.Tpu
---@param name string such as "nodes.get"
---@param arguments ciranda.gcp.TpuCall
---@return table call
---@return fun(message: table) check raises "protocol" for an answer that has not the form of the schema
--- Raises "misuse" for what the method does not have, or lacks; called by a method of `tpu` for its own caller.
function M.prepare(tpu, name, arguments)
  local version = arguments.version or "v2"
  local schema = require("ciranda.data.tpu_schema_" .. version)
  local method = schema.methods[name]
  if not method then
    errors.misuse(3, "tpu:call: %s has no method '%s'", version, tostring(name))
  end
  local used = {}
  local path = method.path:gsub("{(%w+)}", function(variable)
    local value = variable == "project" and tpu.project
      or variable == "location" and (arguments.location or tpu.zone)
      or arguments[variable]
    if type(value) ~= "string" or value == "" then
      errors.misuse(6, "tpu:call: %s needs '%s'", name, variable)
    end
    used[variable] = true
    return url.escape(value)
  end)
  for key in pairs(arguments) do
    if not CALL_FIELDS[key] and not used[key] then
      errors.misuse(3, "tpu:call: %s has no '%s'", name, tostring(key))
    end
  end
  local query = {}
  for key, value in pairs(arguments.query or {}) do
    -- Every method of Google's APIs takes "fields".
    if key ~= "fields" and not (method.query and method.query[key]) then
      errors.misuse(3, "tpu:call: %s has no query parameter '%s' in %s", name, tostring(key), version)
    end
    query[key] = value
  end
  if method.verb == "GET" then
    query.prettyPrint = false -- no program needs the blanks, which are a third of a list
  end
  local function check(message)
    local problem = answers.problem(schema, method.response, message)
    if problem then
      M.unusable(("%s of %s%s/%s"):format(name, tpu.endpoint, version, path), problem)
    end
  end
  return {
    method = method.verb,
    url = ("%s%s/%s"):format(tpu.endpoint, version, path),
    query = query,
    json = method.body and (arguments.body or {}) or nil,
    idempotent = arguments.idempotent,
    deadline = arguments.deadline,
  },
    check
end

return M
