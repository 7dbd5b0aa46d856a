local clock = require("ciranda.io.clock")
local record = require("ciranda.run.record")

describe("run.record", function()
  local attempt = { worker = { slice = 0, index = 1 }, clock_offset = 10 }

  it(
    "says what its guard could not do: output dropped, signals undelivered, devices held by others",
    function()
      local outcome = record.outcome(attempt, {
        leader = { code = 0, ended_at = 110 },
        stopped = true,
        stopped_at = 109,
        ended_at = 111,
        status = 0,
        dropped_bytes = 12,
        outside_holders = { 812 },
        targets = {
          { exe = "python3.11", delivery = "not delivered: EPERM" },
          { exe = "sleep", delivery = "not delivered: No such process" },
          { exe = "bash", delivery = "delivered" },
        },
      })
      assert.same({ "python3.11: EPERM" }, outcome.undelivered)
      assert.same({ 12, { 812 } }, { outcome.dropped, outcome.outside })
      assert.same({ 100, 99, 2 }, { outcome.at, outcome.stopped_at, outcome.took })
    end
  )

  it(
    "has one that is lost fall when its attempt was last heard of, and at an unknown time otherwise",
    function()
      local lost = record.outcome(
        { worker = attempt.worker, alive = clock.now() - 50, last_contact = clock.now() },
        nil,
        "why"
      )
      assert.equal("why", lost.lost)
      assert.is_true(math.abs(clock.wall() - 50 - lost.at) < 5)
      assert.is_nil(record.outcome({ worker = attempt.worker, last_contact = clock.now() }).at)
    end
  )

  it("says of a status that nobody knows why it is not known", function()
    local unknown = { leader = { source = "unknown", ended_at = 110 }, ended_at = 111, error = "" }
    assert.equal("its status is unknown: its guard was killed", record.outcome(attempt, unknown).lost)
    unknown.error = "stopped before it was started"
    assert.equal("stopped before it was started", record.outcome(attempt, unknown).lost)
  end)
end)
