-- Clients of a whole simulator that know nothing of it: curl and OpenSSH's ssh.
local assert = require("luassert")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local patience = dofile("tests/fixtures/patience.lua")
local task = require("ciranda.task")

local M = {}

M.DEADLINE = 100

-- Each look starts a program.
function M.eventually(what, fn)
  return patience.wait_for(what, function()
    local value = fn()
    if not value then
      task.sleep(0.04)
    end
    return value
  end, M.DEADLINE)
end

function M.curl(simulator, verb, path, body, headers)
  local token = fs.read(simulator.env.CLOUDSDK_AUTH_ACCESS_TOKEN_FILE)
  local argv = { "curl", "-sS", "-X", verb, "-w", "\n%{http_code}" }
  for _, header in ipairs(headers or { "Authorization: Bearer " .. token }) do
    table.insert(argv, "-H")
    table.insert(argv, header)
  end
  if body then
    table.insert(argv, "--data-binary")
    table.insert(argv, type(body) == "table" and json.encode(body) or body)
  end
  table.insert(argv, path:find("^http") and path or simulator.url .. path)
  argv.timeout = M.DEADLINE
  local out = process.run(argv):check().stdout
  local text, status = out:match("^(.*)\n(%d+)$")
  local ok, value = pcall(json.decode, text)
  return tonumber(status), ok and value or text
end

M.PARENT = "projects/simulated-project/locations/us-west4-a"

function M.create(simulator, id, slices, node)
  local spec = { parent = M.PARENT, node = node }
  if slices > 1 then
    spec.multisliceParams = { nodeCount = slices, nodeIdPrefix = id }
  else
    spec.nodeId = id
  end
  local status, answer = M.curl(
    simulator,
    "POST",
    "/v2/" .. M.PARENT .. "/queuedResources?queuedResourceId=" .. id,
    { tpu = { nodeSpec = { spec } } }
  )
  assert.are.equal(200, status, json.encode(answer))
end

function M.wait_for(simulator, id, wanted)
  M.eventually(id .. " " .. wanted, function()
    local status, answer = M.curl(simulator, "GET", "/v2/" .. M.PARENT .. "/queuedResources/" .. id)
    return status == 200 and answer.state.state == wanted or wanted == tostring(status)
  end)
end

function M.events(simulator)
  local _, answer = M.curl(simulator, "GET", "/sim/v1/events")
  return answer.events
end

-- A client with a key of its own and the host keys that the API gives.
function M.ssh_client(simulator)
  local directory = fs.tempdir("ciranda-spec-")
  process.run({ "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory .. "/key" }):check()
  local client = { directory = directory, public = fs.read(directory .. "/key.pub"):match("^%S+ %S+") }

  function client.pin(id)
    local lines = {}
    local _, shown = M.curl(simulator, "GET", "/v2/" .. M.PARENT .. "/nodes/" .. id)
    local _, attributes =
      M.curl(simulator, "POST", "/v2/" .. M.PARENT .. "/nodes/" .. id .. ":getGuestAttributes", "{}")
    for i, endpoint in ipairs(shown.networkEndpoints) do
      local items = {}
      for _, item in ipairs(attributes.guestAttributes[i].queryValue.items) do
        items[item.key] = item.value
      end
      lines[i] = ("[%s]:%s ssh-ed25519 %s\n"):format(
        endpoint.ipAddress,
        simulator.env.CIRANDA_SSH_PORT,
        items["ssh-ed25519"]
      )
    end
    fs.write(directory .. "/known_hosts", table.concat(lines))
    client.endpoints = shown.networkEndpoints
  end

  -- stylua: ignore
  function client.run(worker, command, user, option)
    return process.run({
      "ssh", "-F", "none", "-i", directory .. "/key", "-o", "IdentitiesOnly=yes",
      "-o", "StrictHostKeyChecking=yes", "-o", "UserKnownHostsFile=" .. directory .. "/known_hosts",
      "-o", "GlobalKnownHostsFile=none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60",
      option or "-T", "-p", simulator.env.CIRANDA_SSH_PORT,
      (user or "alice") .. "@" .. client.endpoints[worker + 1].ipAddress,
      command, timeout = M.DEADLINE,
    })
  end

  -- What a command says that has to be well.
  function client.said(worker, command)
    local result = client.run(worker, command)
    assert.are.equal(0, result.code, ("%s: %s%s"):format(command, result:reason(), result.stderr))
    return result.stdout
  end

  return client
end

return M
