local checks = require("ciranda.run.checks")

local gangs = dofile("tests/fixtures/fleet/gangs.lua")

describe("run.checks", function()
  local place

  after_each(function()
    if place then
      place:close()
      place = nil
    end
  end)

  it("refuses a worker without room, and says what is needed and what there is", function()
    place = gangs.place(1, 1)
    local bundle = { size = 4 << 50, archive_size = 1 << 50, archive_sha256 = ("0"):rep(64) }
    local e = place:refused(place:gang("r1", "true", { bundle = bundle }))
    assert.equal("no_space", e.code)
    assert.matches(
      "%d+%.%d MB of disk left in its home directory, and the attempt needs 5368709121%.0 MB",
      e.message
    )
    assert.is_nil(place:read("0.0", "ciranda_lease.tester"))
  end)

  it("refuses a worker whose device files are not its topology's, unless told to go on", function()
    place = gangs.place(1, 2)
    for _, worker in ipairs(place.slices[1].workers) do
      worker.chips = 4
      for chip = 0, worker.index == 1 and 2 or 3 do
        place:write(worker.address, "dev/accel" .. chip, "")
      end
      place:write(worker.address, "dev/accel_control", "")
    end
    local e = place:refused(place:gang("r1", "true"))
    assert.equal("precondition", e.code)
    assert.matches(
      "slice 0 worker 1 (0.1) has 3 accelerator device files, and a worker of its topology has 4",
      e.message,
      1,
      true
    )
    place:gang("r1", "true", { device_check = false }):stage()
  end)

  it("names the odd ones out, and stops for them when it is told to be strict", function()
    place = gangs.place(1, 3)
    for address, version in pairs({ ["0.0"] = "0.4.35", ["0.1"] = "0.4.30", ["0.2"] = "0.4.35" }) do
      place:write(
        address,
        (".local/lib/python3.11/site-packages/jax-%s.dist-info/METADATA"):format(version),
        ""
      )
      place:write(address, ".local/lib/python3.11/site-packages/jaxlib-0.4.35.dist-info/METADATA", "")
    end
    place:write("0.2", "r1/venv/lib/python3.12/site-packages/libtpu-0.0.6.dist-info/METADATA", "")
    local one = place:gang("r1", "true")
    one:stage()
    assert.same({
      "Warning: jax is 0.4.35 on 2 workers, but 0.4.30 on slice0/worker1",
      "Warning: libtpu is not there on 2 workers, but 0.0.6 on slice0/worker2",
    }, one.notes)
    local e = place:refused(place:gang("r1", "true", { strict_fingerprint = true }))
    assert.equal("precondition", e.code)
    assert.matches("the workers are not the same: jax is 0.4.35 on 2 workers, but 0.4.30", e.message, 1, true)
    assert.is_nil(place:read("0.0", "ciranda_lease.tester"))
  end)

  it("has nothing to say of workers that are the same", function()
    local function member(index, kernel, python)
      return {
        worker = { slice = 0, index = index },
        facts = { system = kernel .. " x86_64", python = python, packages = { "jax-0.5.0.dist-info" } },
      }
    end
    assert.same({}, checks.odd_ones({ member(0, "6.8.0", "3.11.9"), member(1, "6.8.0", "3.11.9") }))
    assert.same(
      {
        "kernel is 6.8.0 on 2 workers, but 6.5.0 on slice0/worker2",
        "python is 3.11.9 on 2 workers, but 3.10.1 on slice0/worker0",
      },
      checks.odd_ones({
        member(0, "6.8.0", "3.10.1"),
        member(1, "6.8.0", "3.11.9"),
        member(2, "6.5.0", "3.11.9"),
      })
    )
  end)

  it("measures how far apart workers started by their clocks, as corrected", function()
    local skew = checks.skew({
      { worker = "a", started_at = 1000.5, clock_offset = 0.5, clock_error = 0.01 },
      { worker = "b", started_at = 990.25, clock_offset = -10, clock_error = 0.02 },
      { worker = "c", clock_offset = 0 },
    })
    assert.same({ seconds = 0.25, error = 0.02, first = "a", last = "b" }, skew)
    assert.is_nil(checks.skew({ { worker = "c", clock_offset = 0 } }))
  end)

  it("knows each worker's clock and when it was started", function()
    place = gangs.place(1, 2)
    local one = place:gang("r1", "true")
    one:stage()
    one:go()
    assert.is_true(one.skew.seconds >= 0 and one.skew.seconds < 60)
    for _, member in ipairs(one.members) do
      assert.is_true(math.abs(member.attempt.clock_offset) <= member.attempt.clock_error + 0.05)
    end
    assert.equal(0, one:watch().status)
  end)
end)
