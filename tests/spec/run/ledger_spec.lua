local errors = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local ledger = require("ciranda.run.ledger")
local uv = require("luv")

describe("run.ledger", function()
  local saved, directory

  before_each(function()
    saved = os.getenv("XDG_STATE_HOME")
    directory = uv.fs_mkdtemp("/tmp/ledger-XXXXXX")
    uv.os_setenv("XDG_STATE_HOME", directory)
  end)

  after_each(function()
    if saved then
      uv.os_setenv("XDG_STATE_HOME", saved)
    else
      uv.os_unsetenv("XDG_STATE_HOME")
    end
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
