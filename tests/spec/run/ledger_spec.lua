local errors = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local ledger = require("ciranda.run.ledger")
local uv = require("luv")

local environment = dofile("tests/fixtures/environment.lua")

describe("run.ledger", function()
  local saved, directory

  before_each(function()
    directory = uv.fs_mkdtemp("/tmp/ledger-XXXXXX")
    saved = environment.set({ XDG_STATE_HOME = directory })
  end)

  after_each(function()
    saved:back()
    os.execute(("rm -rf '%s'"):format(directory))
  end)

  --- A TPU API that makes what it is asked for, or fails; it notes what the journal said at that time.
  local function api(outcome)
    local calls = {}
    return {
      project = "p",
      zone = "z",
      calls = calls,
      create = function(_, request, options)
        local state = journals.read("r1")
        calls[#calls + 1] = {
          request_id = options.request_id,
          phase = state.objects["queued_resource " .. request.id].phase,
          known = state.objects["queued_resource " .. request.id].request_id,
        }
        if outcome then
          errors.raise({ code = outcome, message = "no" })
        end
        return { id = request.id, version = "v2" }
      end,
    }
  end

  local function objects()
    local list = ledger.objects()
    local out = {}
    for place, object in ipairs(list) do
      out[place] = ("%s %s %s %s"):format(object.run, object.name, object.phase, object.used)
    end
    return out
  end

  it("has the intent on disk, with the request's id, before the call", function()
    local tpu = api()
    local journal = journals.open("r1")
    ledger.create(journal, tpu, { id = "q" })
    assert.equal("intent", tpu.calls[1].phase)
    assert.equal(tpu.calls[1].request_id, tpu.calls[1].known)
    assert.same({ "r1 q created runner" }, objects())
    journal:close(0)
    assert.same({ "r1 q created nobody" }, objects())
  end)

  it("keeps the intent when nobody knows whether it was made, and drops it when it is known", function()
    for _, code in ipairs({ "timeout", "reset", "unavailable" }) do
      local journal <close> = journals.open("r1")
      assert.is_false((pcall(ledger.create, journal, api(code), { id = "q-" .. code })))
    end
    assert.equal(3, #objects())
    local journal <close> = journals.open("r1")
    for _, code in ipairs({ "quota", "permission", "invalid", "exists", "usage" }) do
      assert.is_false((pcall(ledger.create, journal, api(code), { id = "q-" .. code })))
    end
    assert.equal(3, #objects())
  end)

  describe("asked again for what an earlier program asked for", function()
    --- A cloud with one queued resource, or none; it notes the request ids of creates.
    local function cloud(resource)
      local tpu = { project = "p", zone = "z", ids = {} }
      function tpu:elsewhere(_, zone)
        return setmetatable({ zone = zone }, { __index = self })
      end
      function tpu.queued_resource()
        return {
          get = function()
            return resource or errors.raise({ code = "not_found", message = "no" })
          end,
        }
      end
      function tpu:create(request, options)
        table.insert(self.ids, options.request_id)
        if self.outcome then
          errors.raise({ code = self.outcome, message = "no" })
        end
        return { id = request.id, version = "v2" }
      end
      return tpu
    end

    local function resource_of(id, state)
      local node = { labels = { ["ciranda-request"] = id } }
      return { state = { state = state }, tpu = { nodeSpec = { { node = node } } } }
    end

    --- A journal that a killed program has left; `age` in seconds.
    local function left_behind(phase, age)
      local journal = journals.open("r1")
      journal:close()
      local file = assert(io.open(journals.path("r1"), "a"))
      file:write(
        ('{"fact":"object","kind":"queued_resource","name":"q","phase":"%s","project":"p","zone":"z",'):format(
          phase
        ),
        ('"request_id":"first","us":%d}\n'):format((uv.gettimeofday() - age) * 1000000)
      )
      file:close()
      return journals.open("r1")
    end

    it("asks with the same request id while that may be there", function()
      local journal <close> = left_behind("intent", 5)
      local tpu = cloud(nil)
      ledger.create(journal, tpu, { id = "q" })
      assert.same({ "first" }, tpu.ids)
      tpu = cloud(resource_of("first", "ACTIVE"))
      ledger.create(journal, tpu, { id = "q" })
      assert.same({ "first" }, tpu.ids)
    end)

    it("asks anew when that is gone, or somebody else's", function()
      local journal <close> = left_behind("created", 90)
      for _, tpu in ipairs({ cloud(nil), cloud(resource_of("another", "ACTIVE")) }) do
        ledger.create(journal, tpu, { id = "q" })
        assert.equal(1, #tpu.ids)
        assert.not_equal("first", tpu.ids[1])
      end
    end)

    it(
      "takes up the same request only: another one under its name is refused, and nothing is forgotten",
      function()
        local journal <close> = journals.open("r1")
        local tpu = cloud(nil)
        ledger.create(journal, tpu, { id = "q", spot = true, labels = { a = "1", b = "2" } })
        tpu = cloud(resource_of(tpu.ids[1], "ACTIVE"))
        ledger.create(journal, tpu, { labels = { b = "2", a = "1" }, spot = true, id = "q" })
        assert.equal(1, #tpu.ids)
        for _, other in ipairs({ { id = "q" }, { id = "q", spot = true, labels = { a = "1", b = "3" } } }) do
          local ok, problem = pcall(ledger.create, journal, tpu, other)
          assert.is_true(not ok and errors.is(problem, "precondition"))
          assert.matches("was another request, and is ACTIVE", tostring(problem), 1, true)
        end
        assert.equal(1, #tpu.ids)
        assert.same({ "r1 q created runner" }, objects())
      end
    )

    it("forgets it for no failure of the second time", function()
      local journal <close> = left_behind("created", 90)
      local tpu = cloud(resource_of("first", "ACTIVE"))
      for _, code in ipairs({ "quota", "permission", "invalid", "exists", "usage" }) do
        tpu.outcome = code
        assert.is_false((pcall(ledger.create, journal, tpu, { id = "q" })))
        assert.same({ "r1 q intent runner" }, objects())
      end
    end)

    it("says so when it is in another zone or being deleted, and keeps it", function()
      local journal <close> = left_behind("created", 90)
      local tpu = cloud(resource_of("first", "ACTIVE"))
      tpu.zone = "other"
      local ok, problem = pcall(ledger.create, journal, tpu, { id = "q" })
      assert.is_true(not ok and errors.is(problem, "precondition"))
      assert.matches("q, which run r1 asked for before, is in z of project p", tostring(problem), 1, true)
      ok, problem = pcall(ledger.create, journal, cloud(resource_of("first", "DELETING")), { id = "q" })
      assert.is_true(not ok and errors.is(problem, "precondition"))
      assert.matches("being deleted", tostring(problem), 1, true)
      assert.same({ "r1 q created runner" }, objects())
    end)

    it("takes what is not found for lost after a minute only", function()
      left_behind("intent", 5):close()
      assert.equal("not yet", ledger.look(cloud(nil), ledger.objects()[1]))
      left_behind("created", 90):close()
      assert.equal("gone", ledger.look(cloud(nil), ledger.objects()[1]))
    end)
  end)

  it("knows who uses what: a runner, a job that goes on, nobody", function()
    local journal = journals.open("r1")
    ledger.create(journal, api(), { id = "kept" }, "job")
    ledger.create(journal, api(), { id = "plain" })
    assert.same({ "r1 kept created runner", "r1 plain created runner" }, objects())
    journal:close()
    assert.same({ "r1 kept created job", "r1 plain created nobody" }, objects())
    journal = journals.open("r1")
    journal:append("attempt", { attempt = "a" })
    journal:append("go", { attempt = "a" })
    journal:close(129, "detached")
    assert.same({ "r1 kept created job", "r1 plain created job" }, objects())
    journal = journals.open("r1")
    journal:append("attempt_end", { attempt = "a", status = 0, kind = "done" })
    journal:append("object", { kind = "queued_resource", name = "kept", phase = "gone" })
    journal:close()
    assert.same({ "r1 plain created nobody" }, objects())
  end)

  it("tells ours from what has only the name", function()
    local object = { request_id = "u1" }
    local function message(labels)
      return { tpu = { nodeSpec = { { node = { labels = labels } } } } }
    end
    assert.is_true(ledger.is_ours(message({ ["ciranda-request"] = "u1" }), object))
    assert.is_false(ledger.is_ours(message({ ["ciranda-request"] = "u2" }), object))
    assert.is_false(ledger.is_ours(message(nil), object))
    assert.is_false(ledger.is_ours({}, object))
    assert.is_false(ledger.is_ours(message({}), {}))
  end)

  it("names a journal that cannot be read, and goes on with the others", function()
    journals.open("r1"):close()
    journals.open("r2"):close()
    local file = assert(io.open(journals.path("r2"), "w"))
    file:write("garbage\n{}\n")
    file:close()
    local _, problems = ledger.objects()
    assert.equal(1, #problems)
    assert.equal("r2", problems[1].run)
  end)
end)
