--- What the specs of Google's APIs share: servers in this process that stand for Google's, and a simulated TPU project
--- behind one of them. Time there passes 2,000 times faster than in the cloud.

local credentials = require("ciranda.gcp.credentials")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local gcp_client = require("ciranda.gcp.client")
local server = require("ciranda.io.server")
local task = require("ciranda.task")

local M = {}

--- The error that a function raises; fails when it raises none.
function M.raised(fn, ...)
  local ok, err = pcall(fn, ...)
  assert(not ok, "no error was raised")
  return err
end

--- Raised, with the code.
function M.fails(code, fn, ...)
  local err = M.raised(fn, ...)
  assert(
    errors.is(err, code),
    ("expected '%s', got '%s': %s"):format(code, tostring(err.code), errors.text(err))
  )
  return err
end

--- Run `fn(s, log)` with a server. The handler's requests are in `log`.
function M.with_server(handler, fn)
  local _ <close> = task.scope()
  local log = {}
  local s <close> = server.listen {
    handler = function(request)
      log[#log + 1] = request
      return handler(request, #log)
    end,
  }
  fn(s, log)
end

--- An environment of nothing but these variables, for gcloud_config.
function M.env(variables)
  return function(name)
    return variables[name]
  end
end

--- Run `fn(directory)` with a directory of its own, which is removed.
function M.with_directory(fn)
  local directory = fs.tempdir("ciranda-gcp-")
  local ok, err = pcall(fn, directory)
  fs.remove_tree(directory)
  if not ok then
    error(err, 0)
  end
end

function M.write(path, text)
  fs.mkdir_p(fs.dirname(path))
  fs.write(path, text, { sync = false })
  return path
end

--- A client that waits milliseconds where the real one waits seconds.
function M.client(options)
  options = options or {}
  return gcp_client.new {
    credentials = options.credentials or credentials.none(),
    first_wait = 0.002,
    most_wait = 0.02,
    random = options.random,
  }
end

--- Such a client, whose calls are given up after so many attempts: their time is over then, and not before.
function M.client_for(tries)
  local client = M.client()
  local now = client.now
  function client:now()
    return now(self) + (self.calls >= tries and 1e6 or 0)
  end
  return client
end

--- A configuration that knows a project, a zone and an endpoint, and reads no files.
function M.config(endpoint, more)
  local variables = {
    CLOUDSDK_CORE_PROJECT = "p",
    CLOUDSDK_COMPUTE_ZONE = "us-west4-a",
    CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU = endpoint,
  }
  for name, value in pairs(more or {}) do
    variables[name] = value
  end
  return gcloud_config.load { env = M.env(variables) }
end

--- Run `fn(tpu, project, log)` against a simulated project. `project.before(request, count)` may answer in its place;
--- `project.after(request, answer)` may spoil an answer.
---@param options table of the simulated world
function M.with_tpu(options, fn)
  local clock = require("ciranda.sim.clock")
  local machines = dofile("tests/spec/sim/support.lua").machines()
  local settings = { project = "p", project_number = "42", seed = 7, scale = 2000 }
  for key, value in pairs(options) do
    settings[key] = value
  end
  settings.clock, settings.machines = clock.real(), machines
  settings.oauth = { check = function() end }
  local project = { world = require("ciranda.sim.world").new(settings), machines = machines }
  project.service = require("ciranda.sim.tpu").new(project.world)
  local function handler(request, count)
    local query = request:args()
    local headers = {}
    for _, pair in ipairs(request.headers) do
      headers[pair[1]:lower()] = pair[2]
    end
    request.fields = query
    local early = project.before and project.before(request, count)
    if early then
      return early
    end
    local answer = project.service:handle {
      method = request.method,
      path = request.path,
      query = query,
      headers = headers,
      body = request.body,
    }
    answer = { status = answer.status, headers = answer.headers, body = answer.body }
    return project.after and project.after(request, answer) or answer
  end
  M.with_server(handler, function(s, log)
    local _ <close> = setmetatable({}, {
      __close = function()
        settings.clock:close()
      end,
    })
    local tpu = require("ciranda.gcp.tpu").connect { client = M.client(), config = M.config(s.url) }
    fn(tpu, project, log)
  end)
end

--- Waits that suit a cloud that is so fast.
M.FAST = { first_poll = 0.01, most_poll = 0.05, timeout = 100, not_yet = 1 }

function M.fast(more)
  local options = {}
  for key, value in pairs(M.FAST) do
    options[key] = value
  end
  for key, value in pairs(more or {}) do
    options[key] = value
  end
  return options
end

return M
