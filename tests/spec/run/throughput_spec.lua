local throughput = require("ciranda.run.throughput")

local function worker(slice, index)
  return { slice = slice, index = index }
end

local function example(value)
  return ("time is 0.41 seconds, TFLOP is 105.6, TFLOP/s is %s\n"):format(value)
end

describe("run.throughput", function()
  local one, two, three, four = worker(0, 0), worker(0, 1), worker(1, 0), worker(1, 1)
  local collector

  before_each(function()
    collector = throughput.collector({ one, two, three, four })
  end)

  it("reads the lines of both programs, and no others", function()
    assert.equal(83.5, throughput.parse("time is 0.4 seconds, TFLOP is 34.2, TFLOP/s is 83.5"))
    assert.equal(0.00012, throughput.parse("time is 9e2 seconds, TFLOP is 1.1e-1, TFLOP/s is 1.2e-04"))
    local step = "completed step: 3, seconds: 1.5, TFLOP/s/device: 101.25, Tokens/s/device: 5300.1, loss: 9.1"
    assert.equal(101.25, throughput.parse(step))
    for _, line in ipairs({
      "time is 0.4 seconds, TFLOP is 34.2, TFLOP/s is nan",
      "time is 0 seconds, TFLOP is 34.2, TFLOP/s is inf",
      "time is 0 seconds, TFLOP is 34.2, TFLOP/s is 0.0",
      "TFLOP/s/device: -4",
      "TFLOP/s/device: 0x10g",
      "TFLOP/s is 12",
      "",
    }) do
      assert.is_nil(throughput.parse(line), line)
    end
  end)

  it("takes the middle", function()
    local values = { 9, 1, 5 }
    assert.equal(5, throughput.median(values))
    assert.same({ 9, 1, 5 }, values)
    assert.equal(3, throughput.median({ 1, 5 }))
    assert.equal(7, throughput.median({ 7 }))
  end)

  it("says least, median and laggard, whoever printed in whatever pieces", function()
    local text = "noise\n" .. example("80.0") .. "more"
    for position = 1, #text do
      collector:feed(one, text:sub(position, position))
    end
    collector:feed(two, example("84.0"))
    collector:feed(three, (example("82.0"):gsub("\n", "")))
    collector:feed(four, example("60.0"))
    local summary = collector:summary(197)
    assert.equal(60, summary.least)
    assert.equal(81, summary.median)
    assert.equal(four, summary.laggard.worker)
    assert.same({}, summary.missing)
    assert.same({
      "TFLOP/s a device: min 60.0, median 81.0 (41 % of the peak); laggard: slice 1 worker 1 with 60.0, 26 % below the "
        .. "median",
    }, throughput.lines(summary, "a v5e chip"))
  end)

  it("counts a worker with the median of its lines, so that compiling makes no laggard", function()
    for _, each in ipairs({ one, two, three, four }) do
      collector:feed(each, "TFLOP/s/device: 3.0,\nTFLOP/s/device: 90.0,\nTFLOP/s/device: 90.2,\n")
    end
    local summary = collector:summary()
    assert.equal(90, summary.least)
    assert.is_nil(summary.laggard)
    assert.same({
      "TFLOP/s a device: min 90.0, median 90.0; laggard: none more than 1 % below the median",
    }, throughput.lines(summary))
  end)

  it("forgets what is older than the lines it keeps", function()
    collector:feed(one, ("TFLOP/s/device: 10\n"):rep(throughput.KEPT))
    collector:feed(one, ("TFLOP/s/device: 20\n"):rep(throughput.KEPT))
    assert.equal(20, collector:summary().values[1].value)
  end)

  it("names those without a value", function()
    collector:feed(one, example("80"))
    collector:feed(two, example("nan"))
    local lines = throughput.lines(collector:summary())
    assert.equal("TFLOP/s missing from 3 of 4 workers: slice0/worker1,slice1/worker[0-1]", lines[2])
    assert.same(
      { "TFLOP/s: no worker printed any" },
      throughput.lines(throughput.collector({ one, two }):summary(197))
    )
  end)

  it("flags what is above the peak, and only that", function()
    collector:feed(one, example("197.0"))
    collector:feed(two, example("260.0"))
    collector:feed(three, example("190.0"))
    collector:feed(four, example("230.0"))
    local summary = collector:summary(197)
    local lines = throughput.lines(summary, "a v5e chip")
    assert.equal(
      "TFLOP/s above the peak of 197.0 of a v5e chip: slice[0-1]/worker1, up to 260.0: the time or the work "
        .. "of a step was counted wrongly",
      lines[2]
    )
    local record = throughput.record(summary)
    assert.same({
      { slice = 0, worker = 1, tflops = 260 },
      { slice = 1, worker = 1, tflops = 230 },
    }, { record.above_peak[1], record.above_peak[2] })
    assert.equal(4, #record.workers)
    assert.equal(0, #record.missing)
    assert.equal(1, record.laggard.slice)
    assert.equal(0, record.laggard.worker)
  end)
end)
