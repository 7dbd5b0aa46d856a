local budget = require("ciranda.run.budget")

describe("run.budget", function()
  local function ended(kind, more)
    local entry = { attempt = "0001-abcdef", kind = kind, status = 1, lasted = 1 }
    for name, value in pairs(more or {}) do
      entry[name] = value
    end
    return entry
  end

  local function after(limits, ...)
    local one = budget.new(limits, 5)
    for _, entry in ipairs({ ... }) do
      one:note(type(entry) == "string" and ended(entry) or entry)
    end
    return one
  end

  it("counts each kind of end apart", function()
    local limits = { user = 1, infra = 2, preempted = 1 }
    assert.is_truthy(after(limits, "user"):again())
    local pause, text = after(limits, "user", "user"):again()
    assert.is_nil(pause)
    assert.matches("--RESTARTS=1 is used up", text, 1, true)
    assert.is_truthy(after(limits, "user", "preempted", "infra", "infra"):again())
    assert.is_nil(after(limits, "user", "preempted", "infra", "infra", "infra"):again())
    pause, text = after(limits, "infra", "user"):again()
    assert.is_truthy(pause)
    assert.matches("1 of --RESTARTS=1", text, 1, true)
  end)

  it("tries nothing again that nobody allowed, or that has not failed", function()
    assert.same({}, { after({}, "user"):again() })
    assert.same({}, { after({ user = 9, infra = 9, preempted = 9 }, "done"):again() })
    assert.same({}, { after({ user = 9, infra = 9, preempted = 9 }, "stopped"):again() })
    assert.same({}, { after({ user = 9, infra = 9, preempted = 9 }, "interrupted"):again() })
  end)

  it("doubles the pause, up to five minutes, and begins again after a long attempt", function()
    local limits = { user = 99, infra = 99 }
    assert.equal(5, (after(limits, "user"):again()))
    assert.equal(10, (after(limits, "user", "infra"):again()))
    assert.equal(20, (after(limits, "user", "infra", "user"):again()))
    local many = budget.new(limits, 5)
    for _ = 1, 40 do
      many:note(ended("user"))
    end
    assert.equal(300, (many:again()))
    assert.equal(5, (after(limits, "user", "user", ended("user", { lasted = 3600 })):again()))
    assert.equal(5, (after(limits, "user", ended("user", { lasted = 3600 }), "user"):again()))
  end)

  it("names a worker with two infrastructure failures in three attempts", function()
    local function lost(slice, worker)
      return ended("infra", { worker = { slice = slice, worker = worker } })
    end
    assert.is_nil(after({}, lost(1, 2)):bad())
    assert.is_nil(after({}, lost(1, 2), lost(1, 3)):bad())
    assert.equal("slice1/worker2", after({}, lost(1, 2), lost(1, 2)):bad())
    assert.equal("slice1/worker2", after({}, lost(1, 2), "user", lost(1, 2)):bad())
    assert.is_nil(after({}, lost(1, 2), "user", "user", lost(1, 2)):bad())
    local user = ended("user", { worker = { slice = 1, worker = 2 } })
    assert.is_nil(after({}, lost(1, 2), user):bad())
  end)

  it("says how each attempt ended, when there were several", function()
    assert.same({}, after({}, "user"):summary())
    local lines =
      after({}, ended("infra", { lasted = 7300, reason = "slice 1 worker 0 lost" }), "done"):summary()
    assert.equal("Attempt 1 (0001-abcdef, 2.0 h): infra, exit status 1, slice 1 worker 0 lost", lines[1])
    assert.equal("Attempt 2 (0001-abcdef, 1 s): done, exit status 1", lines[2])
  end)
end)
