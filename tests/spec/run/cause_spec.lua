local cause = require("ciranda.run.cause")

local function worker(slice, index)
  return { slice = slice, index = index }
end

describe("run.cause", function()
  it("finds nothing when all left with 0", function()
    local verdict = cause.first({ { worker = worker(0, 0), code = 0, at = 1 } })
    assert.equal(0, verdict.status)
    assert.is_nil(verdict.first)
  end)

  it("is the first failure by time, not by place", function()
    local verdict = cause.first({
      { worker = worker(0, 0), code = 1, at = 20 },
      { worker = worker(1, 2), code = 7, at = 10 },
      { worker = worker(1, 3), code = 0, at = 5 },
    })
    assert.equal(7, verdict.status)
    assert.equal(2, verdict.first.worker.index)
    assert.equal(1, #verdict.consequences)
  end)

  it("is not the peer that saw the socket close, though it ended first", function()
    local verdict = cause.first({
      { worker = worker(0, 0), code = 1, at = 10, tail = "rpc error: Socket closed\n" },
      { worker = worker(0, 1), signal = 6, at = 10.5 },
      { worker = worker(0, 2), code = 3, at = 11 },
    })
    assert.equal(3, verdict.status)
    assert.equal(2, #verdict.consequences)
  end)

  it("knows the words of the coordination service, gRPC and gloo for a peer that is gone", function()
    for _, words in ipairs({
      "Terminating process because the JAX distributed service detected fatal errors. This most likely indicates "
        .. "that another task died; see the other task logs for more details.",
      "UNAVAILABLE: failed to connect to all addresses; last error: ipv4:10.0.0.2:8476",
      "[gloo/transport/tcp/pair.cc:547] Application timeout caused pair closure",
      "The following tasks are unhealthy (stopped sending heartbeats): /job:jax_worker/task:3",
    }) do
      assert.is_true(cause.follows({ worker = worker(0, 0), code = 1, tail = words }), words)
    end
    assert.is_false(cause.follows({ worker = worker(0, 0), code = 1, tail = "BrokenPipeError: [Errno 32]" }))
  end)

  it("is the first victim when every failure speaks of a peer", function()
    local verdict = cause.first({
      { worker = worker(0, 0), code = 1, at = 12, tail = "Socket closed" },
      { worker = worker(0, 1), code = 1, at = 11, tail = "Socket closed" },
    })
    assert.equal(1, verdict.first.worker.index)
  end)

  it("does not blame what failed minutes after the first victim", function()
    local verdict = cause.first({
      { worker = worker(0, 0), code = 1, at = 10, tail = "Socket closed" },
      { worker = worker(0, 1), code = 9, at = 200 },
    })
    assert.equal(0, verdict.first.worker.index)
  end)

  it("counts death by a signal and a lost worker as failures, never as 0", function()
    assert.equal(137, cause.first({ { worker = worker(0, 0), signal = 9, at = 1 } }).status)
    local lost = cause.first({ { worker = worker(0, 0), lost = "its machine was restarted", at = 1 } })
    assert.equal(1, lost.status)
    assert.equal("infra", lost.kind)
  end)

  it("takes a lost worker for the cause of its peers' closed sockets", function()
    local verdict = cause.first({
      { worker = worker(0, 0), code = 1, at = 10, tail = "Socket closed" },
      { worker = worker(0, 1), lost = "no answer for 60 s", at = 9 },
    })
    assert.equal("infra", verdict.kind)
  end)

  it(
    "takes one that is lost, and nobody knows since when, for the cause of consequences, not of a failure",
    function()
      local lost = { worker = worker(0, 1), lost = "the machine was restarted" }
      local closed = { worker = worker(0, 0), code = 1, at = 10, tail = "Socket closed" }
      assert.equal(lost, cause.first({ closed, lost }).first)
      local failed = { worker = worker(0, 2), code = 3, at = 11 }
      assert.equal(failed, cause.first({ closed, lost, failed }).first)
    end
  )

  it(
    "counts an accelerator that fails on one machine to the machine, and one that fails on all to the command",
    function()
      local bad = "RuntimeError: TPU initialization failed: open(/dev/vfio/0): Device or resource busy"
      local verdict = cause.first({
        { worker = worker(0, 0), code = 1, at = 10, tail = bad },
        { worker = worker(0, 1), signal = 15, at = 11, stopped = true },
      })
      assert.same({ "infra", 1 }, { verdict.kind, verdict.status })
      assert.matches('its log has "open(/dev/vfio"', verdict.why, 1, true)
      assert.is_nil(verdict.innocent)
      verdict = cause.first({
        { worker = worker(0, 0), code = 1, at = 10, tail = bad },
        { worker = worker(0, 1), code = 1, at = 10.2, tail = bad },
      })
      assert.same({ "user" }, { verdict.kind, verdict.why })
    end
  )

  it("of several that were lost is one whose machine is gone, and of a slice always the same", function()
    local function lost(slice, index, at, gone)
      return { worker = worker(slice, index), lost = "no answer", at = at, gone = gone }
    end
    local restarted, a, b = lost(0, 0, 9), lost(1, 0, 11, true), lost(1, 1, 10, true)
    assert.equal(a, cause.first({ restarted, a, b }).first)
    assert.equal(2, #cause.first({ restarted, a, b }).consequences)
    assert.equal(restarted, cause.first({ restarted, lost(0, 1, 8), lost(1, 1, 8.5) }).first)
    local failed = { worker = worker(0, 2), code = 3, at = 7 }
    assert.equal(failed, cause.first({ restarted, a, b, failed }).first)
  end)

  it("counts it to the machines when all who failed speak of a peer and nobody else failed", function()
    local a = { worker = worker(0, 0), code = 1, at = 12, tail = "heartbeat timeout" }
    local b = { worker = worker(0, 1), signal = 6, at = 11 }
    local verdict = cause.first({ a, b })
    assert.same({ "infra", true, b }, { verdict.kind, verdict.innocent, verdict.first })
    assert.matches('"heartbeat timeout"', verdict.why, 1, true)
    -- One that aborts is no network, and neither is one alone.
    assert.equal("user", cause.first({ b, { worker = worker(0, 2), signal = 6, at = 12 } }).kind)
    assert.equal("user", cause.first({ a }).kind)
    verdict = cause.first({ a, b, { worker = worker(0, 3), lost = "it did not end after KILL", at = 90 } })
    assert.same({ "user" }, { verdict.kind, verdict.why })
  end)

  it("does not take those we stopped for failures", function()
    local verdict = cause.first({
      { worker = worker(0, 0), signal = 15, at = 1, stopped = true },
      { worker = worker(0, 1), signal = 9, at = 2 },
    })
    assert.equal(137, verdict.status)
    assert.equal(1, #verdict.stopped)
    assert.equal(0, #verdict.consequences)
  end)

  it("writes the line that people look for", function()
    local line = cause.failure_line
    assert.equal(
      "Main command failed on slice 3 worker 1 with error code 7, see logs for details",
      line({ worker = worker(3, 1), code = 7 })
    )
    assert.equal(
      "Main command failed on slice 0 worker 2 with error code 137 (SIGKILL), see logs for details",
      line({ worker = worker(0, 2), signal = 9 })
    )
    assert.matches("137 (SIGKILL)", line({ worker = worker(0, 2), code = 137 }), 1, true)
    assert.matches("1 (no exit record: gone)", line({ worker = worker(0, 2), lost = "gone" }), 1, true)
  end)
end)
