local report = require("ciranda.run.report")

local function worker(slice, index)
  return { slice = slice, index = index }
end

describe("run.report", function()
  it("names the first cause and folds the rest", function()
    local lines = report.failure({
      first = { worker = worker(2, 5), signal = 9, at = 0 },
      consequences = {
        { worker = worker(0, 0), signal = 6 },
        { worker = worker(0, 1), code = 1, tail = "Socket closed" },
        { worker = worker(1, 1), code = 1, tail = "Traceback" },
      },
      stopped = {},
    })
    assert.matches("First cause: slice 2 worker 5, %d%d:%d%d:%d%d, exit status 137 %(SIGKILL%); ", lines[1])
    assert.matches(
      "; 2 others are consequences: slice0/worker[0-1]; 1 other failed as well: slice1/worker1",
      lines[1],
      1,
      true
    )
    assert.same({}, report.failure({ consequences = {}, stopped = {} }))
    lines = report.failure({
      first = { worker = worker(0, 0), lost = "no answer" },
      consequences = {},
      stopped = {},
    })
    assert.matches("at an unknown time, lost: no answer", lines[1], 1, true)
  end)

  it("tells who has not heard of a stop apart", function()
    local text = report.stop_state("Stopping", {
      { worker = worker(0, 0), ended = false, synced = false, untold = true, silent = true },
      { worker = worker(0, 1), ended = false, synced = false },
      { worker = worker(1, 0), ended = false, synced = false, untold = true },
      { worker = worker(1, 1), ended = false, synced = true, behind = true },
    }, 7)
    assert.equal(
      "Stopping, 7 s: does not answer: slice0/worker0; not told yet: slice1/worker0; told: slice0/worker1; "
        .. "ended, its log is on its way: slice1/worker1",
      text
    )
  end)

  it("gives many workers another state only with another tenth of them, and a few with each", function()
    for total, most in pairs({ [4] = 5, [1000] = 21 }) do
      local states, count = {}, 0
      for ended = 0, total do
        local rows = {}
        for place = 1, total do
          rows[place] = { worker = worker(place, 0), ended = place <= ended, synced = false }
        end
        local _, state = report.stop_state("Saving", rows, ended)
        count = count + (states[state] and 0 or 1)
        states[state] = true
      end
      assert.is_true(count <= most and count >= math.min(total, 10), total .. " workers: " .. count)
    end
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

  it("tells what went unseen, of workers together", function()
    local eperm = { "python3.11: EPERM" }
    assert.same(
      {
        "Output is lost of slice0/worker[1-2]: the disk was full, and up to 70 bytes are not in a log",
        "SIGTERM did not reach a program on slice0/worker[2-3]: python3.11: EPERM",
        "The accelerators of slice0/worker3 are held by processes that are not COMMAND's: no signal was sent to them",
      },
      report.unseen({
        first = { worker = worker(0, 1), dropped = 70, undelivered = {}, outside = {} },
        consequences = {},
        stopped = {
          { worker = worker(0, 2), dropped = 7, undelivered = eperm },
          { worker = worker(0, 3), undelivered = eperm, outside = { 8, 9 } },
        },
        ended = { { worker = worker(0, 0), dropped = 0 } },
      })
    )
  end)

  it("prints a log's end so that no terminal obeys it, and no more of a line than a screen takes", function()
    local one = worker(1, 2)
    local function tail(line)
      return (report.tail(one, { line })[1]:gsub("^slice1/worker2: ", ""))
    end
    assert.equal("loss\t1.5 é", tail("loss\t1.5 é"))
    assert.equal("100%", tail("10%\r50%\r100%\r"))
    assert.equal("an error", tail("\27[1;31man error\27[0m"))
    assert.equal("a?]0;title?b?", tail("a\27]0;title\7b\0"))
    local cut = tail(("é"):rep(5000))
    assert.equal(("é"):rep(250) .. "... (9500 bytes more)", cut)
    assert.equal(("x"):rep(500) .. "... (4500 bytes more)", tail(("x"):rep(5000)))
    assert.is_number(utf8.len(tail("x" .. ("é"):rep(5000))))
  end)
end)
