-- Google's clients against the simulated cloud as it runs: another process, its own OAuth, metadata server and Cloud
-- Storage, reached through nothing but the variables that it prints.

local credentials = require("ciranda.gcp.credentials")
local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local gcp_client = require("ciranda.gcp.client")
local logging = require("ciranda.io.log")
local sim = require("ciranda.sim")
local storage_module = require("ciranda.gcp.storage")
local task = require("ciranda.task")
local tpu_module = require("ciranda.gcp.tpu")

local support = dofile("tests/spec/gcp/support.lua")
local fails, fast = support.fails, support.fast

--- Run `fn(simulator, config, connect)`; `connect()` gives a TPU connection with the environment's own credentials.
local function with_simulator(options, fn)
  local simulator <close> = sim.start(options)
  local variables = { PATH = os.getenv("PATH"), NO_GCE_CHECK = "true" }
  for name, value in pairs(simulator.env) do
    variables[name] = value
  end
  local config = gcloud_config.load { env = support.env(variables) }
  fn(simulator, config, function()
    return tpu_module.connect {
      config = config,
      client = gcp_client.new {
        credentials = credentials.find { config = config },
        first_wait = 0.01,
        most_wait = 0.1,
      },
    }
  end)
end

describe("Google's clients and the simulated cloud", function()
  setup(function()
    logging.configure { level = "off" }
  end)

  teardown(function()
    logging.reset()
  end)

  it("find project, zone and credentials in its environment", function()
    with_simulator({}, function(simulator, config, connect)
      local tpu = connect()
      assert.equal("simulated-project", tpu.project)
      assert.equal(simulator.env.CLOUDSDK_COMPUTE_ZONE, tpu.zone)
      local found = credentials.find { config = config }
      local token = found:token()
      assert.is_string(token)
      assert.equal("***", logging.redact(token))
      -- What is refused is refused: a made-up token is no good, and the client fetches another.
      found.access_token, found.expiry = "made-up", math.huge
      local client = gcp_client.new { credentials = found }
      local list = tpu_module.connect({ config = config, client = client }):list_nodes()
      assert.same({}, list)
      assert.equal(2, client.calls)
    end)
  end)

  it("make slices with workers that have host keys, and delete them", function()
    with_simulator({}, function(_, _, connect)
      local tpu = connect()
      local qr = tpu:create { id = "job1", slices = 2, accelerator = "v5litepod-8", autocheckpoint = true }
      local _, nodes = qr:wait("ACTIVE", fast { timeout = 60 })
      assert.equal(2, #nodes)
      for _, node in ipairs(nodes) do
        local attributes =
          tpu:guest_attributes(tpu_module.short_name(node.name), { query_path = "hostkeys/" })
        assert.equal(#node.networkEndpoints, #attributes)
        assert.equal("hostkeys", attributes[1].queryValue.items[1].namespace)
      end
      qr:delete()
      qr:wait("DELETED", fast { timeout = 60 })
      assert.same({}, tpu:list_nodes())
    end)
  end)

  it("keep objects, whole and in chunks", function()
    with_simulator({ buckets = { "b" } }, function(_, config)
      local storage = storage_module.connect { config = config }
      local data = crypto.random(700000)
      support.with_directory(function(directory)
        local path = support.write(directory .. "/in", data)
        local object = storage:upload("b", "dir/a b", { path = path }, {
          chunk = 256 * 1024,
          metadata = { k = "v" },
          if_generation_match = 0,
        })
        assert.equal("700000", object.size)
        fails("precondition", storage.upload, storage, "b", "dir/a b", "other", { if_generation_match = 0 })
        storage:download("b", "dir/a b", { path = directory .. "/out" })
        assert.is_true(fs.read(directory .. "/out") == data)
        assert.equal(data:sub(101, 200), (storage:download("b", "dir/a b", { first = 100, last = 199 })))
        storage:upload("b", "small", "text")
        local objects, prefixes = storage:list("b", { delimiter = "/" })
        assert.equal("small", objects[1].name)
        assert.same({ "dir/" }, prefixes)
        assert.equal("v", storage:stat("b", "dir/a b").metadata.k)
        assert.is_true(storage:delete("b", "small"))
        assert.is_false(storage:delete("b", "small"))
      end)
    end)
  end)

  it("end quickly when the cloud goes away", function()
    -- On a port of its own: another simulator that gets its addresses meanwhile must not answer in its place.
    with_simulator({ capacity = 0, port = 18470 }, function(simulator, _, connect)
      local tpu = connect()
      local qr = tpu:create { id = "job1", accelerator = "v5litepod-8" }
      local scope <close> = task.scope()
      local waiting = scope:spawn(pcall, qr.wait, qr, "ACTIVE", fast { timeout = 2 })
      task.sleep(0.1)
      getmetatable(simulator).__close(simulator)
      local ok, err = waiting:wait()
      assert.is_false(ok)
      assert.is_true(errors.is(err, "timeout"), tostring(err))
    end)
  end)
end)
