local report = require("ciranda.run.report")

local function worker(slice, index)
  return { slice = slice, index = index }
end

describe("run.report", function()
  it("names the first cause and folds the rest", function()
    local lines = report.failure({
      first = { worker = worker(2, 5), signal = 9, at = 0 },
      consequences = { { worker = worker(0, 0), code = 1 }, { worker = worker(0, 1), code = 1 } },
      stopped = {},
    })
    assert.matches("First cause: slice 2 worker 5, %d%d:%d%d:%d%d, exit status 137 %(SIGKILL%); ", lines[1])
    assert.matches("2 more failed after it: slice0/worker[0-1]", lines[1], 1, true)
    assert.same({}, report.failure({ consequences = {}, stopped = {} }))
    lines = report.failure({
      first = { worker = worker(0, 0), lost = "no answer" },
      consequences = {},
      stopped = {},
    })
    assert.matches("at an unknown time, lost: no answer", lines[1], 1, true)
  end)

  it("tells equal ends together", function()
    local lines = report.stopped({
      stopped = {
        { worker = worker(0, 0), code = 0, took = 1.04 },
        { worker = worker(0, 1), code = 0, took = 2.5 },
        { worker = worker(1, 0), code = 137, took = 30, killed = true },
      },
    })
    assert.same({
      "Stopped: slice0/worker[0-1] ended with 0, 1.0 to 2.5 s after the signal",
      "Stopped: slice1/worker0 ended with 137 (SIGKILL), 30.0 s after the signal (by SIGKILL: the grace was over)",
    }, lines)
  end)
end)
