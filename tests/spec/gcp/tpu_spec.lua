local errors = require("ciranda.io.error")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local logging = require("ciranda.io.log")
local task = require("ciranda.task")
local tpu_module = require("ciranda.gcp.tpu")

local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/gcp/support.lua")
local fails, fast = support.fails, support.fast

local ZONE = "projects/p/locations/us-west4-a"
local SMALL = { id = "job1", slices = 2, accelerator = "v5litepod-16" }

local function request(more)
  local result = {}
  for key, value in pairs(SMALL) do
    result[key] = value
  end
  for key, value in pairs(more or {}) do
    result[key] = value
  end
  return result
end

--- Requests of a method and a path's pattern.
local function count(log, method, pattern)
  local n = 0
  for _, each in ipairs(log) do
    n = n + ((each.method == method and each.path:find(pattern)) and 1 or 0)
  end
  return n
end

describe("ciranda.gcp.tpu", function()
  setup(function()
    logging.configure { level = "off" }
  end)

  teardown(function()
    logging.reset()
  end)

  it("is connected to what gcloud is configured for, and says what is missing", function()
    local client = support.client()
    local tpu = tpu_module.connect { client = client, config = support.config("http://127.0.0.1:1") }
    assert.equal("p", tpu.project)
    assert.equal("us-west4-a", tpu.zone)
    assert.equal("http://127.0.0.1:1/", tpu.endpoint)
    tpu = tpu_module.connect { client = client, config = support.config(nil), project = "q", zone = "z" }
    assert.equal("q", tpu.project)
    assert.equal("https://tpu.googleapis.com/", tpu.endpoint)
    local empty = gcloud_config.load { env = support.env {} }
    assert.matches(
      "--project",
      tostring(fails("usage", tpu_module.connect, { client = client, config = empty })),
      1,
      true
    )
    local err = fails("usage", tpu_module.connect, { client = client, config = empty, project = "p" })
    assert.matches("--zone", tostring(err), 1, true)
    fails("misuse", tpu_module.connect, { zones = "z" })
  end)

  it("makes a queued resource, waits for it, and deletes it", function()
    support.with_tpu({}, function(tpu, _, log)
      local qr = tpu:create(request { capacity = "spot", labels = { team = "a" } })
      assert.same({ "job1-0", "job1-1" }, qr.nodes)
      assert.is_falsy(qr.adopted)
      local create = log[1]
      assert.equal("/v2/" .. ZONE .. "/queuedResources", create.path)
      assert.equal("job1", create.fields.queuedResourceId)
      assert.equal(qr.request_id, create.fields.requestId)
      local labels = create:json().tpu.nodeSpec[1].node.labels
      assert.same({ team = "a", ["ciranda-request"] = qr.request_id }, labels)

      local states = {}
      local message, nodes = qr:wait(
        "ACTIVE",
        fast {
          on_change = function(state)
            states[#states + 1] = state
          end,
        }
      )
      assert.equal("ACTIVE", message.state.state)
      assert.equal(2, #nodes)
      assert.equal(ZONE .. "/nodes/job1-1", nodes[2].name)
      assert.equal("READY", nodes[2].state)
      assert.equal("ACTIVE", states[#states])
      assert.equal("ACTIVE", qr:state())
      assert.equal(2, #tpu:list_nodes())
      assert.equal(1, #tpu:list_queued_resources())

      fails("precondition", qr.delete, qr, { force = false })
      local operation = qr:delete()
      assert.matches("/operations/", operation)
      assert.is_nil((qr:wait("DELETED", fast())))
      assert.is_nil(qr:state())
      assert.is_nil(qr:delete()) -- gone already
      assert.same({}, tpu:list_nodes())
    end)
  end)

  it("asks a list for the fields that are wanted, when the API has them", function()
    support.with_tpu({}, function(tpu, _, log)
      tpu:create(request { labels = { team = "x" } })
      local cases = {
        { { "state.state" }, "queuedResources(name,state/state),nextPageToken,unreachable" },
        {
          { "name.basename()", "tpu.nodeSpec[0].node.labels.team" },
          "queuedResources(name,name,tpu/nodeSpec/node/labels)",
        },
        { { "state.sate" }, nil },
        { { "tpu", "colour" }, nil },
      }
      for index, case in ipairs(cases) do
        local resource = tpu:list_queued_resources(case[1])[1]
        assert.equal(ZONE .. "/queuedResources/job1", resource.name)
        local fields = log[#log].fields.fields
        if case[2] then
          assert.equal(1, fields:find(case[2], 1, true), fields)
        else
          assert.is_nil(fields, "case " .. index)
        end
      end
      assert.is_nil(tpu:list_queued_resources({ "state.state" })[1].tpu)
      local specs = tpu:list_queued_resources(cases[2][1])[1].tpu.nodeSpec
      assert.same({ team = "x" }, { team = specs[1].node.labels.team })
      assert.is_nil(specs[1].node.acceleratorType)
    end)
  end)

  it("uses v2alpha1 for what only it has", function()
    support.with_tpu({}, function(tpu, _, log)
      local qr = tpu:create(request { autocheckpoint = true })
      assert.equal("v2alpha1", qr.version)
      assert.matches("^/v2alpha1/", log[1].path)
      qr:wait("ACTIVE", fast())
      assert.is_true(tpu:call("nodes.get", { node = "job1-0", version = "v2alpha1" }).autocheckpointEnabled)
    end)
  end)

  it("makes nothing twice, whatever happens to the answer", function()
    for name, fault in pairs {
      lost = { reset = true },
      cut = { body = "{}{}{}{}{}", truncate = 1 },
      failed = { status = 503, body = "" },
    } do
      support.with_tpu({}, function(tpu, project, log)
        local spoiled = 0
        function project.after(r, answer)
          if r.method == "POST" and spoiled < 2 then
            spoiled = spoiled + 1
            return fault
          end
          return answer
        end
        local qr = tpu:create(request())
        assert.equal(3, count(log, "POST", "queuedResources$"), name)
        assert.equal(log[1].fields.requestId, log[3].fields.requestId)
        assert.equal(1, #tpu:list_queued_resources())
        assert.is_string(qr.operation)
      end)
    end
  end)

  it("adopts what its own earlier request made, and nobody else's", function()
    support.with_tpu({}, function(tpu, project)
      local id = "00000000-0000-4000-8000-000000000001"
      tpu:create(request(), { request_id = id })
      project.world.replays.entries = {} -- the service has forgotten the request's id
      local qr = tpu:create(request(), { request_id = id })
      assert.is_true(qr.adopted)
      local err = fails("exists", tpu.create, tpu, request())
      assert.matches("already exists", tostring(err), 1, true)
      assert.equal(1, #tpu:list_queued_resources())
    end)
  end)

  it("refuses a request before anything is asked", function()
    support.with_tpu({}, function(tpu, _, log)
      local err = fails("usage", tpu.create, tpu, request { slices = 300 })
      assert.matches("'slices'", tostring(err), 1, true)
      assert.equal(0, #log)
    end)
  end)

  it("tells quota at once", function()
    support.with_tpu({ quota = { v5litepod = 16 } }, function(tpu)
      local err = fails("quota", tpu.create, tpu, request())
      assert.equal(16, err.quota.limit)
      assert.matches("Litepod", err.quota.metric)
    end)
  end)

  describe("waiting", function()
    it("ends when the state cannot come any more, with the reason", function()
      support.with_tpu({}, function(tpu, project)
        project.world.faults:add { kind = "stockout" }
        local qr = tpu:create(request())
        local err = fails("stockout", qr.wait, qr, "ACTIVE", fast())
        assert.matches("queued resource job1", tostring(err), 1, true)
        assert.equal("FAILED", err.state)
      end)
    end)

    it("names an internal error for what it is in practice, and slices that are up all the same", function()
      support.with_tpu({}, function(tpu, project)
        project.world.faults:add { kind = "internal" }
        local qr = tpu:create(request())
        local err = fails("stockout", qr.wait, qr, "ACTIVE", fast())
        assert.equal("internal", err.reason)
        assert.matches("code 13, which in practice means: no capacity now", tostring(err), 1, true)
        assert.is_nil(err.ready_nodes)
        qr:delete()
        qr:wait("DELETED", fast())
        project.world.faults:add { kind = "stockout", slice = 1 }
        qr = tpu:create(request())
        err = fails("stockout", qr.wait, qr, "ACTIVE", fast())
        assert.equal(1, err.ready_nodes)
        assert.matches("delete it, with force, and ask again", tostring(err), 1, true)
      end)
    end)

    it("ends when a spot request is preempted", function()
      support.with_tpu({}, function(tpu, project)
        local qr = tpu:create(request { capacity = "spot" })
        qr:wait("ACTIVE", fast())
        project.world.queued_resources:preempt(project.world.nodes:get(ZONE .. "/nodes/job1-1"))
        local err = fails("preempted", qr.wait, qr, "ACTIVE", fast())
        assert.equal("SUSPENDED", err.state)
        assert.matches("delete it and ask again", tostring(err), 1, true)
        assert.equal("SUSPENDED", (qr:wait("SUSPENDED", fast())).state.state)
      end)
    end)

    it("ends when the request lapses", function()
      support.with_tpu({ capacity = 0 }, function(tpu)
        local qr = tpu:create(request { valid_until = 1 })
        local err = fails("stockout", qr.wait, qr, "ACTIVE", fast())
        assert.equal("FAILED", err.state)
        assert.equal("expired", err.reason)
        assert.matches("before the request lapsed", tostring(err), 1, true)
      end)
    end)

    it("takes a missing resource for 'not yet' at first, and for gone later", function()
      support.with_tpu({}, function(tpu, project)
        local hidden, looks = 3, 0
        function project.before(r)
          looks = looks + 1
          if r.method == "GET" and r.path:find("queuedResources") and hidden > 0 then
            hidden = hidden - 1
            return {
              status = 404,
              json = { error = { code = 404, status = "NOT_FOUND", message = "not yet" } },
            }
          end
        end
        local qr = tpu:create(request())
        qr:wait("ACTIVE", fast { not_yet = 60 })
        assert.equal(0, hidden)

        local scope <close> = task.scope()
        local waiting = scope:spawn(pcall, qr.wait, qr, "FAILED", fast())
        looks = 0
        patience.wait_for("a look at it", function()
          return looks > 1
        end)
        qr:delete()
        local ok, err = waiting:wait()
        assert.is_false(ok)
        assert.is_true(errors.is(err, "not_found"), tostring(err))
        assert.matches("gone", tostring(err), 1, true)
        local never = tpu:queued_resource("never")
        err = fails("not_found", never.wait, never, "ACTIVE", fast { not_yet = 0.05 })
        assert.matches("does not exist", tostring(err), 1, true)
      end)
    end)

    it("goes on while the API fails in passing, but not when it refuses", function()
      support.with_tpu({}, function(tpu, project)
        local qr = tpu:create(request())
        local failing, failed = true, 0
        function project.before(r)
          if r.method == "GET" and failing then
            failed = failed + 1
            return { status = 503, body = "" }
          end
        end
        local client = tpu.client
        local json = client.json
        function client:json(call) -- a short patience for each look, so that the look itself fails
          call.deadline = failing and 0.02 or nil
          return json(self, call)
        end
        local scope <close> = task.scope()
        local waiting = scope:spawn(qr.wait, qr, "ACTIVE", fast())
        patience.wait_for("failures", function()
          return failed > 20
        end)
        failing = false
        assert.equal("ACTIVE", waiting:wait().state.state)
        function project.before()
          return {
            status = 403,
            json = { error = { code = 403, status = "PERMISSION_DENIED", message = "no" } },
          }
        end
        fails("permission", qr.wait, qr, "ACTIVE", fast())
      end)
    end)

    it("ends in time, and tells what a person should know of a long wait", function()
      support.with_tpu({ capacity = 0 }, function(tpu)
        local qr = tpu:create(request())
        local notes, err
        patience.within_more(0.6, function(seconds)
          notes = {}
          err = fails(
            "timeout",
            qr.wait,
            qr,
            "ACTIVE",
            fast {
              timeout = seconds,
              stuck_after = 0.1,
              on_note = function(text)
                notes[#notes + 1] = text
              end,
            }
          )
          return #notes >= 2
        end)
        assert.equal("WAITING_FOR_RESOURCES", err.state)
        assert.is_true(#notes >= 2)
        assert.matches("it asks for 2 slices of v5e (32 chips), on-demand, in us-west4-a", notes[1], 1, true)
        assert.matches("0 other queued resources of this project hold 0 chips there.", notes[1], 1, true)
        assert.matches("after 15 minutes ask your Google Cloud account's representative", notes[1], 1, true)
        fails("misuse", qr.wait, qr, "ACTIVE", { timout = 1 })
      end)
    end)

    it("shares its looks: fifty waits cost hardly more calls than one", function()
      support.with_tpu({}, function(tpu, _, log)
        local waits = {}
        for i = 1, 50 do
          local qr = tpu:create(request { id = "job" .. i, slices = 1 })
          waits[i] = function()
            return qr:wait("ACTIVE", fast { first_poll = 0.05, most_poll = 0.05 })
          end
        end
        local before = #log
        task.all(waits)
        assert.is_true(count(log, "GET", "queuedResources/") <= 1) -- the first, while it was alone
        local calls = #log - before
        assert.is_true(calls < 60, calls .. " calls")
      end)
    end)

    it("is not over before every node is READY", function()
      support.with_tpu({}, function(tpu, project)
        local qr = tpu:create(request())
        local looks = 0
        function project.after(r, answer)
          if r.path:find("/nodes$") then
            looks = looks + 1
            if looks < 4 then
              answer.body = answer.body:gsub('"READY"', '"REPAIRING"', 1)
            end
          end
          return answer
        end
        local _, nodes = qr:wait("ACTIVE", fast())
        assert.is_true(looks >= 4)
        assert.equal("READY", nodes[1].state)
      end)
    end)

    it("can be cancelled", function()
      support.with_tpu({ capacity = 0 }, function(tpu)
        local qr = tpu:create(request())
        local err = fails("timeout", task.timeout, 0.1, qr.wait, qr, "ACTIVE", fast())
        assert.is_nil(err.state)
        assert.equal(0, tpu.client.waits)
      end)
    end)
  end)

  it("resets, and raises what the operation failed with", function()
    support.with_tpu({}, function(tpu)
      local qr = tpu:create(request())
      fails("precondition", qr.reset, qr)
      qr:wait("ACTIVE", fast())
      assert.equal("ACTIVE", qr:reset({ timeout = 20 }).state.state)
    end)
  end)

  it("asks for a reset again when the answer is lost or is that the service is busy", function()
    for name, fault in pairs({ lost = { reset = true }, failed = { status = 503, body = "" } }) do
      support.with_tpu({}, function(tpu, project, log)
        local qr = tpu:create(request())
        qr:wait("ACTIVE", fast())
        local spoiled
        function project.after(r, answer)
          if r.method == "POST" and not spoiled then
            spoiled = true
            return fault
          end
          return answer
        end
        assert.equal("ACTIVE", qr:reset({ timeout = 20 }).state.state)
        assert.equal(2, count(log, "POST", ":reset$"), name)
      end)
    end
  end)

  it("works with single nodes", function()
    support.with_tpu({}, function(tpu)
      local made =
        tpu:create_node { id = "n1", accelerator = "v5litepod-4", autocheckpoint = true, capacity = "spot" }
      assert.equal("v2alpha1", made.version)
      local node = tpu:wait_node("n1", "READY", fast())
      assert.equal("v5litepod-4", node.acceleratorType)
      local patched = tpu:patch_node("n1", { labels = { a = "b" } }, "labels", { timeout = 20 })
      assert.equal("b", patched.labels.a)
      tpu:wait_operation(tpu:call("nodes.stop", { node = "n1" }), { timeout = 20 })
      assert.equal("STOPPED", tpu:wait_node("n1", "STOPPED", fast()).state)
      fails("failed", tpu.wait_node, tpu, "n1", "READY", fast())
      tpu:delete_node("n1")
      assert.is_nil(tpu:wait_node("n1", "DELETED", fast()))
      assert.is_nil(tpu:delete_node("n1"))
      fails("not_found", tpu.wait_node, tpu, "n1", "READY", fast { not_yet = 0 })
    end)
  end)

  it("makes one node once, also in v2, which has no request ids", function()
    support.with_tpu({}, function(tpu, project, log)
      local first = true
      function project.after(r, answer)
        if r.method == "POST" and first then
          first = false
          return { reset = true }
        end
        return answer
      end
      local made = tpu:create_node { id = "n1", accelerator = "v5litepod-4" }
      assert.is_true(made.adopted)
      assert.equal("v2", made.version)
      assert.equal(2, count(log, "POST", "/nodes$"))
      fails("exists", tpu.create_node, tpu, { id = "n1", accelerator = "v5litepod-4" })
    end)
  end)

  it("reads the guest attributes of all workers or some", function()
    support.with_tpu({}, function(tpu, _, log)
      tpu:create(request { slices = 1 }):wait("ACTIVE", fast())
      local all = tpu:guest_attributes("job1")
      assert.equal(4, #all)
      assert.equal("key of job1/3", all[4].queryValue.items[1].value)
      local one = tpu:guest_attributes("job1", { workers = { 2 }, query_path = "hostkeys/" })
      assert.equal(1, #one)
      assert.equal("key of job1/2", one[1].queryValue.items[1].value)
      assert.same({ queryPath = "hostkeys/", workerIds = { "2" } }, log[#log]:json())
    end)
  end)

  it("adds ssh keys so that nobody's are lost", function()
    support.with_tpu({}, function(tpu, _, log)
      tpu:create(request({ slices = 1, ssh_keys = { "old:ssh-ed25519 AAAA old" } })):wait("ACTIVE", fast())
      local others = tpu_module.connect {
        client = support.client(),
        config = support.config(tpu.endpoint),
      }
      local adders = {}
      for i = 1, 64 do
        adders[i] = function()
          local program = i % 8 == 0 and others or tpu
          program:add_ssh_keys("job1", { ("user%d:ssh-ed25519 AAAA%d u"):format(i, i) }, { timeout = 60 })
        end
      end
      task.all(adders)
      local seen, lines = {}, 0
      for line in tpu:get_node("job1").metadata["ssh-keys"]:gmatch("[^\n]+") do
        lines = lines + 1
        seen[line:match("^[^:]+")] = true
      end
      assert.equal(65, lines)
      assert.is_true(seen.old)
      for i = 1, 64 do
        assert.is_true(seen["user" .. i])
      end
      local before = count(log, "PATCH", ".")
      assert.is_true(before < 20, before .. " writes")
      tpu:add_ssh_keys("job1", { "user3:ssh-ed25519 AAAA3 u" })
      assert.equal(before, count(log, "PATCH", "."))
    end)
  end)

  it("calls every method of both versions by its name in the schema", function()
    support.with_tpu({}, function(tpu, _, log)
      assert.is_true(#tpu:list("acceleratorTypes.list") > 0)
      assert.equal(
        "v5litepod-16",
        tpu:call("acceleratorTypes.get", { acceleratorType = "v5litepod-16" }).type
      )
      assert.is_true(#tpu:list("runtimeVersions.list", { query = { pageSize = 1 } }) > 1)
      assert.is_true(#tpu:list("locations.list") > 0)
      assert.equal("us-west4-a", tpu:call("locations.get").locationId)
      assert.same({}, tpu:list("reservations.list", { version = "v2alpha1" }))
      assert.is_string(tpu:call("locations.generateServiceIdentity").identity.email)
      assert.same({}, (tpu:in_zone("-"):list_nodes()))
      assert.equal("/v2/projects/p/locations/-/nodes", log[#log].path)
      local qr = tpu:create(request())
      local operation = tpu:get_operation(qr.operation)
      assert.equal(qr.operation, operation.name)
      assert.is_true(#tpu:list("operations.list") > 0)
      fails("misuse", tpu.call, tpu, "reservations.list")
      fails("misuse", tpu.call, tpu, "nodes.get")
      fails("misuse", tpu.call, tpu, "nodes.get", { node = "n", nodes = "m" })
      fails("misuse", tpu.call, tpu, "nodes.delete", { node = "n", query = { requestId = "x" } })
      local escaped = fails("not_found", tpu.call, tpu, "nodes.get", { node = "../queuedResources" })
      assert.matches("%2F", escaped.target .. log[#log].path, 1, true)
    end)
  end)

  it(
    "gives the API's own reason of a failure, also when that is looked at after the request would have lapsed",
    function()
      local client, reason = { random = math.random, first_wait = 0.001, most_wait = 0.001 }, nil
      client.now = support.client().now
      function client.json()
        return {
          name = ZONE .. "/queuedResources/job1",
          createTime = "2026-01-01T00:00:00Z",
          queueingPolicy = { validUntilDuration = "5s" },
          state = { state = "FAILED", failedData = { error = reason } },
        }
      end
      function client.pages()
        return {}, {}
      end
      local tpu = tpu_module.connect { client = client, config = support.config("http://127.0.0.1:1") }
      local qr = tpu:queued_resource("job1")
      reason = { code = 8, message = "Quota 'Q' exhausted. Limit 4 in zone z" }
      assert.matches("Limit 4", fails("quota", qr.wait, qr, "ACTIVE", fast()).message, 1, true)
      reason = { code = 7, message = "The caller does not have permission" }
      fails("permission", qr.wait, qr, "ACTIVE", fast())
      for _, vague in ipairs({
        { code = 13, message = "an internal error has occurred" },
        { code = 4, message = "x" },
        false,
      }) do
        reason = vague or nil
        assert.equal("expired", fails("stockout", qr.wait, qr, "ACTIVE", fast()).reason)
      end
    end
  )

  it("takes no answer for more than it is: any value may be of any type", function()
    local json = require("ciranda.io.json")
    local QUEUED = {
      name = ZONE .. "/queuedResources/job1",
      createTime = "2026-01-01T00:00:00Z",
      tpu = { nodeSpec = { { nodeId = "job1", node = { labels = { a = "b" } } } } },
      queueingPolicy = { validUntilDuration = "5s", validInterval = { endTime = "2026-01-01T00:00:00Z" } },
      spot = {},
      state = {
        state = "FAILED",
        stateInitiator = "SERVICE",
        failedData = {
          error = { code = 8, message = "Quota 'Q' exhausted. Limit 4 in zone z", details = { {} } },
        },
      },
    }
    local NODE = { name = ZONE .. "/nodes/job1", state = "READY", healthDescription = "fine" }
    local seed = 12345
    local function random(n)
      seed = (seed * 1103515245 + 12345) & 0x7fffffff
      return (seed >> 8) % n + 1
    end
    local VALUES =
      { "x", "", 7, -1.5, 1 << 60, true, false, {}, { {} }, { a = { "b" } }, json.null, ("y"):rep(3000) }

    --- A copy in which one value, at random, is another.
    local function mutated(value)
      local places = {}
      local function walk(from)
        local to = {}
        for key, item in pairs(from) do
          to[key] = type(item) == "table" and walk(item) or item
          places[#places + 1] = { to, key }
        end
        return to
      end
      local copy = walk(value)
      table.sort(places, function(a, b)
        return tostring(a[2]) < tostring(b[2])
      end)
      local place = places[random(#places)]
      place[1][place[2]] = VALUES[random(#VALUES)]
      return copy
    end

    local client = { random = math.random, first_wait = 0.001, most_wait = 0.001 }
    client.now = support.client().now
    local tpu = tpu_module.connect { client = client, config = support.config("http://127.0.0.1:1") }
    local answers
    function client.json()
      return answers.queued
    end
    function client.pages()
      return { answers.node }, {}
    end
    local ended = {}
    for round = 1, 600 do
      local queued = mutated(QUEUED)
      if type(queued.state) == "table" and round % 3 > 0 then
        queued.state.state = round % 3 == 1 and "ACTIVE" or "SUSPENDED"
      end
      answers = { queued = queued, node = mutated(NODE) }
      local qr = tpu:queued_resource("job1")
      local ok, err = pcall(qr.wait, qr, "ACTIVE", fast { timeout = 0.001 })
      assert.is_true(ok or errors.is(err), errors.text(err))
      local code = ok and "ok" or err.code
      ended[code] = (ended[code] or 0) + 1
    end
    for _, code in ipairs { "ok", "quota", "preempted", "timeout" } do
      assert.is_true((ended[code] or 0) > 5, code .. " was never reached")
    end
  end)

  it("survives hostile answers with a clear error", function()
    support.with_tpu({}, function(tpu, project)
      local qr = tpu:create(request())
      local client = tpu.client
      client.most_wait = 0.002
      for name, body in pairs {
        state_is_text = '{"name": "x", "state": "ACTIVE"}',
        spec_is_text = '{"name": "'
          .. ZONE
          .. '/queuedResources/job1", "state": {"state": "ACTIVE"}, "tpu": "x"}',
        list = "[]",
        deep = ("["):rep(5000) .. ("]"):rep(5000),
        number = "1e999",
        utf8 = '{"name": "\xff"}',
        nothing = "",
      } do
        function project.before(r)
          if r.method == "GET" then
            return { body = body, headers = { ["Content-Type"] = "application/json" } }
          end
        end
        local err = fails("timeout", qr.wait, qr, "ACTIVE", fast { timeout = 0.1 })
        assert.matches("job1", tostring(err), 1, true, name)
      end
    end)
  end)

  it("says which part of an answer is not as the schema says", function()
    support.with_tpu({}, function(tpu, project)
      local node = tpu_module.short_name(tpu:create(request({ slices = 1 })):wait("ACTIVE", fast()).name)
      for _, case in ipairs {
        { '{"nodes": [{"name": 7}]}', "nodes[0].name must be a string", tpu.list_nodes },
        { '{"nodes": [{}]}', "has no name", tpu.list_nodes },
        { '{"nodes": [{"name": "n"}, null]}', "nodes[1] must be an object", tpu.list_nodes },
        {
          '{"queuedResources": [{"name": "q", "tpu": {"nodeSpec": {"a": 1}}}]}',
          "queuedResources[0].tpu.nodeSpec must be a list",
          tpu.list_queued_resources,
        },
        { '{"name": null}', "has no name", tpu.get_node, node },
        { '{"name": "n", "labels": {"a b": []}}', 'labels["a b"] must be a string', tpu.get_node, node },
        {
          '{"guestAttributes": [{"queryValue": {"items": [{"key": {}}]}}]}',
          "guestAttributes[0].queryValue.items[0].key must be a string",
          tpu.guest_attributes,
          node,
        },
        { '{"done": "yes"}', "done must be true or false", tpu.wait_operation, "operations/o" },
        { "{}", "an operation without a name", tpu.delete_node, node, true },
      } do
        local body, problem, method, argument, wait = table.unpack(case)
        function project.before()
          return { body = body, headers = { ["Content-Type"] = "application/json" } }
        end
        local err = fails("protocol", function()
          local answer = method(tpu, argument)
          return wait and tpu:wait_operation({ name = answer })
        end)
        assert.matches(problem, tostring(err), 1, true)
      end
    end)
  end)
end)
