-- What a simulated worker is told: tpu-env, metadata, accounts, and the configuration of its sshd.
local accounts = require("ciranda.sim.accounts")
local clock = require("ciranda.sim.clock")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local metadata = require("ciranda.sim.metadata")
local sshd = require("ciranda.sim.sshd")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "support.lua")
local tpu_env = require("ciranda.sim.tpu_env")

local function project_with_slices(count, node)
  local p = support.project()
  p.world.project.id, p.world.project.number = "p", "42"
  p.call(
    "POST",
    "/v2/" .. support.ZONE .. "/queuedResources?queuedResourceId=job",
    support.queued_resource(count, node)
  )
  p.settle()
  return p
end

local function values(entries)
  local result = {}
  for _, entry in ipairs(entries) do
    result[entry[1]] = entry[2]
  end
  return result
end

describe("tpu-env", function()
  it("describes the slice and the worker", function()
    local p = project_with_slices(1, { acceleratorType = "v4-256", runtimeVersion = "tpu-ubuntu2204-base" })
    local node = p.world.nodes:get(support.ZONE .. "/nodes/job")
    local env = values(tpu_env.entries(p.world, node, 5))
    -- As on a machine of that type, which an operator has published.
    assert.are.equal("v4-256", env.ACCELERATOR_TYPE)
    assert.are.equal("V4", env.TYPE)
    assert.are.equal("4x4x8", env.TOPOLOGY)
    assert.are.equal("2,2,1", env.CHIPS_PER_HOST_BOUNDS)
    assert.are.equal("2,2,8", env.HOST_BOUNDS)
    assert.are.equal("true,true,true", env.WRAP)
    assert.are.equal("5", env.WORKER_ID)
    assert.are.equal("job", env.NODE_ID)
    assert.are.equal(node.message.id, tonumber(env.UID))
    assert.is_nil(env.MEGASCALE_NUM_SLICES)
    assert.is_truthy(tpu_env.text(p.world, node, 5):find("\nWORKER_ID: '5'\n", 1, true))
  end)

  it("names the coordinator of a Multislice environment, wherever slice 0 is", function()
    local p = project_with_slices(3)
    local node = p.world.nodes:get(support.ZONE .. "/nodes/job-2")
    local first = p.world.nodes:get(support.ZONE .. "/nodes/job-0")
    local env = values(tpu_env.entries(p.world, node, 0))
    assert.are.equal(first.endpoints[1].address, env.MEGASCALE_COORDINATOR_ADDRESS)
    assert.are.equal("3", env.MEGASCALE_NUM_SLICES)
    assert.are.equal("2", env.MEGASCALE_SLICE_ID)
    local before = env.MEGASCALE_COORDINATOR_ADDRESS
    p.world.queued_resources:repair(first)
    p.settle()
    env = values(tpu_env.entries(p.world, node, 0))
    assert.are_not.equal(before, env.MEGASCALE_COORDINATOR_ADDRESS)
    assert.are.equal(first.endpoints[1].address, env.MEGASCALE_COORDINATOR_ADDRESS)
  end)

  it("numbers the devices as the generation does", function()
    local p = project_with_slices(1)
    local node = p.world.nodes:get(support.ZONE .. "/nodes/job")
    assert.are.same({ "/dev/vfio/0", "/dev/vfio/1", "/dev/vfio/2", "/dev/vfio/3" }, tpu_env.devices(node))
  end)
end)

describe("the metadata server", function()
  local p, machine

  before_each(function()
    p = project_with_slices(2, { metadata = { ["startup-script"] = "true" } })
    p.world.oauth = {
      default_account = "42-compute@developer.gserviceaccount.com",
      token_answer = function(_, account)
        return { access_token = "token of " .. account, expires_in = 3599, token_type = "Bearer" }
      end,
    }
    machine = {
      node = p.world.nodes:get(support.ZONE .. "/nodes/job-1"),
      worker = 2,
      hostname = "t1v-n-0-w-2",
      maintenance_event = "NONE",
    }
  end)

  local function get(path, query, headers)
    headers = headers or { ["Metadata-Flavor"] = "Google" }
    local answer = metadata.answer(function()
      return metadata.worker(p.world, machine)
    end, {
      method = "GET",
      path = "/computeMetadata/v1" .. path,
      headers = headers,
      args = function()
        return query or {}
      end,
    })
    return answer.status, answer.body, answer.headers
  end

  it("gives attributes, and the place of the worker in them", function()
    local function gives(path, wanted)
      local status, body = get(path)
      assert.are.same({ 200, wanted }, { status, body })
    end
    gives("/instance/attributes/agent-worker-number", "2")
    gives("/instance/attributes/accelerator-type", "v5litepod-16")
    gives("/instance/attributes/startup-script", "true")
    gives("/project/project-id", "p")
    assert.are.equal(404, (get("/instance/attributes/none")))
    local _, endpoints = get("/instance/attributes/worker-network-endpoints")
    local _, count = endpoints:gsub("unknown:unknown:192%.0%.2%.%d+", "")
    assert.are.equal(4, count)
  end)

  it("lists directories, as text and as JSON", function()
    local _, text = get("/instance/")
    assert.is_truthy(text:find("attributes/\n", 1, true))
    assert.is_truthy(text:find("maintenance-event\n", 1, true))
    local _, body = get("/instance/scheduling/", { recursive = "true" })
    assert.are.equal("FALSE", json.decode(body).preemptible)
    local _, all = get("/", { recursive = "true" })
    assert.are.equal("2", json.decode(all).instance.attributes["worker-id"])
    assert.is_falsy(all:find("token of", 1, true))
    assert.are.equal(301, (get("/instance")))
  end)

  it("gives tokens of the worker's service account", function()
    local status, body = get("/instance/service-accounts/default/token")
    assert.are.equal(200, status)
    assert.are.equal("token of 42-compute@developer.gserviceaccount.com", json.decode(body).access_token)
  end)

  it("insists on its header and distrusts proxies", function()
    local status, _, headers = get("/instance/name", nil, {})
    assert.are.equal(403, status)
    assert.are.equal("Google", headers["Metadata-Flavor"])
    assert.are.equal(
      403,
      (get("/instance/name", nil, { ["Metadata-Flavor"] = "Google", ["X-Forwarded-For"] = "192.0.2.1" }))
    )
  end)

  it("waits for a change, for as long as it is asked to", function()
    local _, _, headers = get("/instance/maintenance-event")
    local status, body = get("/instance/maintenance-event", { wait_for_change = "true", timeout_sec = "0" })
    assert.are.same({ 200, "NONE" }, { status, body })
    machine.maintenance_event = "TERMINATE_ON_HOST_MAINTENANCE"
    _, body = get("/instance/maintenance-event", { wait_for_change = "true", last_etag = headers.ETag })
    assert.are.equal("TERMINATE_ON_HOST_MAINTENANCE", body)
    local task = require("ciranda.task")
    local values_seen = task.all({
      function()
        return select(2, get("/instance/maintenance-event", { wait_for_change = "true", timeout_sec = "10" }))
      end,
      function()
        task.sleep(0.2)
        machine.maintenance_event = "NONE"
        return "changed"
      end,
    })
    assert.are.equal("NONE", values_seen[1])
  end)
end)

describe("the accounts of a worker", function()
  it("are there at every moment while they change: an sshd that finds none ends", function()
    local process = require("ciranda.io.process")
    local root = fs.tempdir()
    local place = { etc = root .. "/etc", home = root, home_inside = root, ordinal = 1, own_terminals = true }
    fs.mkdir_p(place.etc .. "/keys")
    local one, two = { name = "ann", keys = { "k" } }, { name = "bob", keys = { "k" } }
    accounts.write(place, { one })
    local reader <close> = process.spawn({
      "sh",
      "-c",
      'echo up; while [ ! -e "$0/end" ]; do [ -s "$0/etc/passwd" ] || echo empty; done',
      root,
      stdout = process.PIPE,
    })
    assert.are.equal("up\n", reader.stdout:read())
    for round = 1, 300 do
      accounts.write(place, round % 2 == 0 and { one } or { one, two })
    end
    fs.write(root .. "/end", "")
    assert.is_nil(reader.stdout:read())
    reader:wait()
    fs.remove_tree(root)
  end)

  local now = clock.parse_timestamp("2026-06-01T00:00:00Z")

  it("are those that ssh-keys names", function()
    local users = accounts.parse({
      ["ssh-keys"] = "ann:ssh-ed25519 AAAA ann@host\nbob:ssh-rsa BBBB\n\nann:ssh-rsa CCCC\nnonsense\n",
    }, "carl:ssh-rsa DDDD", now)
    assert.are.same({
      { name = "ann", keys = { "ssh-ed25519 AAAA ann@host", "ssh-rsa CCCC" } },
      { name = "bob", keys = { "ssh-rsa BBBB" } },
      { name = "carl", keys = { "ssh-rsa DDDD" } },
    }, users)
  end)

  it("leave the project's keys out when the node says so", function()
    local users = accounts.parse({ ["block-project-ssh-keys"] = "TRUE" }, "carl:ssh-rsa DDDD", now)
    assert.are.same({}, users)
  end)

  it("end with their keys", function()
    local function line(time)
      return ('dan:ssh-rsa EEEE google-ssh {"userName":"dan","expireOn":"%s"}'):format(time)
    end
    assert.are.equal(0, #accounts.parse({ ["ssh-keys"] = line("2026-05-31T23:59:59+0000") }, nil, now))
    assert.are.equal(1, #accounts.parse({ ["ssh-keys"] = line("2026-06-01T00:00:01+0000") }, nil, now))
    assert.are.equal(0, #accounts.parse({ ["ssh-keys"] = line("2026-06-01T01:59:59+0200") }, nil, now))
  end)

  it("never name a file outside of their directory", function()
    assert.are.same(
      {},
      accounts.parse({ ["ssh-keys"] = "../../etc/x:ssh-rsa AAAA\na/b:ssh-rsa AAAA" }, nil, now)
    )
  end)

  it("come and go with a patch", function()
    local directory = fs.tempdir("ciranda-spec-")
    fs.mkdir_p(directory .. "/etc/keys")
    local place = {
      etc = directory .. "/etc",
      home = directory .. "/home",
      home_inside = "/home",
      ordinal = 1,
    }
    accounts.write(place, { { name = "ann", keys = { "k1" } }, { name = "bob", keys = { "k2" } } })
    assert.is_truthy(fs.read(directory .. "/etc/passwd"):find("^ann:x:%d+:%d+::/home/ann:/bin/bash\nbob:x:"))
    accounts.write(place, { { name = "bob", keys = { "k3" } } })
    assert.is_nil(fs.exists(directory .. "/etc/keys/ann"))
    assert.are.equal("k3\n", fs.read(directory .. "/etc/keys/bob"))
    assert.is_truthy(fs.exists(directory .. "/home/ann"))
    assert.is_falsy(fs.read(directory .. "/etc/passwd"):find("\nann:", 1, true))
    fs.remove_tree(directory)
  end)
end)

describe("the configuration of a worker's sshd", function()
  it("is accepted by sshd, with every variable in its one SetEnv", function()
    local process = require("ciranda.io.process")
    local directory = fs.tempdir("ciranda-spec-")
    sshd.make_host_key(directory .. "/ssh_host_ed25519_key")
    fs.write(
      directory .. "/sshd_config",
      sshd.config({ etc = directory, environment = { A = "1", B = 'two "words"', C = "back\\slash" } })
    )
    local result = process.run({ sshd.probe().path, "-T", "-f", directory .. "/sshd_config" })
    assert.are.equal(0, result.code, result.stderr)
    assert.is_truthy(result.stdout:find("\nusepam no\n", 1, true))
    assert.is_truthy(
      result.stdout:find('setenv B=two "words"\n', 1, true),
      result.stdout:match("setenv[^\n]*\n.*")
    )
    assert.is_truthy(result.stdout:find("setenv C=back\\slash\n", 1, true))
    fs.remove_tree(directory)
  end)
end)
