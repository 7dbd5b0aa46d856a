-- A queued resource that is asked for again: what is deleted and what is not, in which order, and what a runner finds
-- that comes after one that has died.
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local journals = require("ciranda.run.journal")
local recreate = require("ciranda.run.recreate")
local tpus = require("ciranda.gcp.tpu")

local environment = dofile("tests/fixtures/environment.lua")

describe("run.recreate", function()
  local root, saved, journal, cloud, log, said

  --- A zone with at most one queued resource, `job`; `fail` raises at a call once.
  local function zone_of(message)
    local self = { project = "p", zone = "z", message = message }
    local function call(name)
      log[#log + 1] = name
      if self.fail == name then
        self.fail = nil
        err.raise({ code = "unavailable", message = "HTTP 503" })
      end
    end
    function self.queued_resource(_, id, fields)
      local qr = { id = id, tpu = self, version = fields and fields.version or "v2" }
      function qr.get()
        return self.message
          or err.raise({ code = "not_found", message = "there is no queued resource " .. id })
      end
      function qr.state()
        return self.message and self.message.state.state
      end
      function qr.delete()
        call("delete")
        self.message = nil
      end
      function qr.wait(_, state)
        log[#log + 1] = "wait " .. state
        if state == "SUSPENDED" then
          self.message.state.state = "SUSPENDED"
        end
      end
      return qr
    end
    function self.create_built(_, built, options)
      call("create")
      built.body.tpu.nodeSpec[1].node.labels = { [tpus.REQUEST_LABEL] = options.request_id }
      self.message = { tpu = built.body.tpu, state = { state = "WAITING_FOR_RESOURCES" } }
      self.asked = built
      return { version = built.version }
    end
    function self.elsewhere()
      return self
    end
    return self
  end

  local function message_in(state, initiator)
    local specs = {}
    for slice = 0, 1 do
      specs[slice + 1] = {
        parent = "projects/p/locations/z",
        nodeId = "job-" .. slice,
        node = { acceleratorType = "v5litepod-4", runtimeVersion = "r", state = "READY" },
      }
    end
    return {
      name = "projects/p/locations/z/queuedResources/job",
      spot = {},
      tpu = { nodeSpec = specs },
      state = { state = state, stateInitiator = initiator },
    }
  end

  local function open()
    journal = journals.open("r")
    return journal
  end

  local function again_on(tpu, more)
    local options = {
      journal = journal,
      tpu = tpu,
      cloud = cloud,
      attempt = "0001-aaaaaa",
      series = "0001-aaaaaa",
      limit = 2,
      pause = 0,
      say = function(format, ...)
        said[#said + 1] = format:format(...)
      end,
    }
    for name, value in pairs(more or {}) do
      options[name] = value
    end
    return recreate.new(options)
  end

  local function ended(state, more)
    local fields = { code = "preempted", message = "job is " .. state, state = state }
    for name, value in pairs(more or {}) do
      fields[name] = value
    end
    return err.new(fields)
  end

  before_each(function()
    root = fs.tempdir("ciranda-recreate")
    saved = environment.set({ XDG_STATE_HOME = root })
    cloud = {
      project = "p",
      zone = "z",
      queued_resource = "job",
      nodes = { { name = "job-0", index = 0 }, { name = "job-1", index = 1 } },
    }
    log, said = {}, {}
    open()
  end)

  after_each(function()
    journal:close()
    saved:back()
    fs.remove_tree(root)
  end)

  it("deletes what is SUSPENDED or FAILED and asks for the same, as often as the budget says", function()
    local tpu = zone_of(message_in("SUSPENDED"))
    local again = again_on(tpu)
    assert.is_false(again:resume())
    assert.is_nil(again.wait)
    assert.is_true(again:after(ended("SUSPENDED")))
    assert.same({ "delete", "wait DELETED", "create" }, log)
    assert.equal("v2", tpu.asked.version)
    assert.same({ nodeCount = 2, nodeIdPrefix = "job" }, tpu.asked.body.tpu.nodeSpec[1].multisliceParams)
    assert.equal(86400, again.wait)
    tpu.message = message_in("FAILED")
    assert.is_true(again:after(ended("FAILED", { code = "stockout" })))
    tpu.message = message_in("SUSPENDED")
    assert.is_false(again:after(ended("SUSPENDED")))
    assert.matches("not asked for again: --PREEMPTION_RESTARTS=2 is used up", said[#said], 1, true)
    assert.equal("SUSPENDED", tpu.message.state.state)
  end)

  it("leaves alone what may still come, what a user has suspended, and slices that others use", function()
    local tpu = zone_of(message_in("ACTIVE"))
    assert.is_false(again_on(tpu):after(err.new({ code = "timeout", message = "", state = "ACTIVE" })))
    assert.is_false(again_on(tpu):after(err.new({ code = "not_found", message = "", state = "NOT_FOUND" })))
    tpu.message = message_in("SUSPENDED", "USER")
    assert.is_false(again_on(tpu):after(ended("SUSPENDED", { code = "failed" })))
    assert.matches("a user has suspended it", said[#said], 1, true)
    tpu.message = message_in("FAILED")
    cloud.nodes[2] = nil
    assert.is_false(again_on(tpu):after(ended("FAILED", { ready_nodes = 1 })))
    assert.matches("1 of its slices are up, and this run does not use all of them", said[#said], 1, true)
    cloud.queued_resource = nil
    assert.is_false(again_on(tpu):after(ended("SUSPENDED")))
    assert.same({}, log)
  end)

  it("waits some minutes when some of the slices were up, and says whose budget it is", function()
    local tpu = zone_of(message_in("FAILED"))
    cloud.nodes = nil
    local more = { limit = 1, failed_pause = 0.02, budget = "--recreate", go_on = "ciranda qr wait job" }
    assert.is_true(again_on(tpu, more):after(ended("FAILED", { code = "stockout", ready_nodes = 1 })))
    assert.same({ "delete", "wait DELETED", "create" }, log)
    assert.equal(0.02, journal:state().recreations[1].pause)
    assert.matches("asking for it again (1 of --recreate=1)", said[1], 1, true)
    assert.matches("ciranda qr wait job goes on waiting", said[#said], 1, true)
  end)

  it("waits until a queued resource whose node was taken away is SUSPENDED", function()
    local tpu = zone_of(message_in("ACTIVE"))
    assert.is_true(again_on(tpu):after(ended("ACTIVE")))
    assert.same({ "wait SUSPENDED", "delete", "wait DELETED", "create" }, log)
  end)

  it("goes on where a runner died, and asks for nothing twice", function()
    for _, at in ipairs({ "delete", "create" }) do
      log = {}
      local tpu = zone_of(message_in("SUSPENDED"))
      tpu.fail = at
      local series = "0001-" .. at
      local ok, problem = pcall(function()
        again_on(tpu, { series = series }):after(ended("SUSPENDED"))
      end)
      assert.is_false(ok)
      assert.equal("unavailable", problem.code)
      journal:close()
      open()
      local again = again_on(tpu, { series = series })
      assert.is_true(again:resume())
      assert.equal("WAITING_FOR_RESOURCES", tpu.message.state.state)
      assert.equal("job", tpu.asked.body.tpu.nodeSpec[1].multisliceParams.nodeIdPrefix)
      assert.is_table(tpu.asked.body.spot)
      -- What is done is not done again; what it waits for may take its time.
      local calls = #log
      again = again_on(tpu, { series = series })
      assert.is_false(again:resume())
      assert.equal(86400, again.wait)
      assert.equal(calls, #log)
      -- The request of before counts against the budget.
      tpu.message = message_in("SUSPENDED")
      assert.is_false(again_on(tpu, { series = series, limit = 1 }):after(ended("SUSPENDED")))
    end
  end)

  it("leaves to others what they have asked for since", function()
    local tpu = zone_of(message_in("SUSPENDED"))
    tpu.fail = "delete"
    pcall(function()
      again_on(tpu):after(ended("SUSPENDED"))
    end)
    tpu.message = message_in("PROVISIONING")
    log = {}
    assert.is_true(again_on(tpu):resume())
    assert.same({}, log)
    assert.matches("job is PROVISIONING: somebody else has asked for it again", said[#said], 1, true)
  end)

  it("gives up what has not come up, and nothing that has", function()
    local tpu = zone_of(message_in("WAITING_FOR_RESOURCES"))
    again_on(tpu):give_up()
    assert.same({ "delete", "wait DELETED" }, log)
    tpu.message = message_in("PROVISIONING")
    again_on(tpu):give_up()
    assert.equal("PROVISIONING", tpu.message.state.state)
  end)
end)
