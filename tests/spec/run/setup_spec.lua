local journals = require("ciranda.run.journal")
local setup = require("ciranda.run.setup")
local task = require("ciranda.task")

local environment = dofile("tests/fixtures/environment.lua")
local gangs = dofile("tests/fixtures/fleet/gangs.lua")
local patience = dofile("tests/fixtures/patience.lua")

describe("run.setup", function()
  local place

  after_each(function()
    place:close()
  end)

  local function gang(command, options)
    options = options or {}
    options.setup = {
      command = command,
      hash = setup.hash(command, options.content and { archive_sha256 = options.content }, "r1"),
      timeout = options.timeout,
    }
    options.content, options.timeout = nil, nil
    return place:gang(options.run or "r1", "echo went >> ../went", options)
  end

  --- Stages until the set-up's command has written "did", and goes away. Returns whether staging has ended.
  local function leaves_it_running(one)
    local scope <close> = task.scope()
    local staging = scope:spawn(one.stage, one)
    place.wait(function()
      return place:read("0.0", "did") == "did\n"
    end, 60)
    staging:cancel("gone")
    return (pcall(staging.wait, staging))
  end

  it("runs once a machine, before the start, in the run's directory, whatever attempt or run asks", function()
    place = gangs.place(1, 2)
    local one = gang("echo in $PWD as $CIRANDA_WORKER_ID >> ../did; [ ! -e ../went ]")
    one:stage()
    one:go()
    assert.equal(0, one:watch().status)
    assert.equal(("in %s/r1 as 1\n"):format(place.machines["0.1"].home), place:read("0.1", "did"))
    assert.matches("SETUP: done on 2 workers in ", one.notes[1], 1, true)
    one.options.lease:release(one:links())
    local second = gang("echo in $PWD as $CIRANDA_WORKER_ID >> ../did; [ ! -e ../went ]", { run = "r2" })
    local before = #place.machines["0.1"].commands
    second:stage()
    assert.equal("SETUP: done on 0 workers, had been done on all before", second.notes[1])
    assert.equal(before + 2, #place.machines["0.1"].commands)
    assert.equal(1, select(2, place:read("0.1", "did"):gsub("\n", "")))
  end)

  it("runs again when SETUP or the bundle is another", function()
    place = gangs.place(1, 1)
    assert.not_equal(setup.hash("a", nil, "r1"), setup.hash("b", nil, "r1"))
    assert.not_equal(
      setup.hash("a", { archive_sha256 = "1" }, "r1"),
      setup.hash("a", { archive_sha256 = "2" }, "r1")
    )
    assert.equal(
      setup.hash("a", { archive_sha256 = "1" }, "r1"),
      setup.hash("a", { archive_sha256 = "1" }, "r2")
    )
    for _, content in ipairs({ "1", "1", "2" }) do
      gang("echo did >> ../did", { content = content }):stage()
    end
    assert.equal("did\ndid\n", place:read("0.0", "did"))
  end)

  it("names worker, status and the end of the log of one that fails, and starts nobody", function()
    place = gangs.place(1, 2)
    local command =
      "echo first; for i in $(seq 30); do echo line $i; done; [ $CIRANDA_WORKER_ID = 0 ] || exit 3"
    local e = place:refused(gang(command))
    assert.equal("failed", e.code)
    assert.matches("slice0/worker1 could not be set up: ", e.message, 1, true)
    assert.matches(
      "SETUP on slice 0 worker 1 (0.1) ended with exit status 3; the end of its log:\n  line 11\n",
      e.message,
      1,
      true
    )
    assert.matches("  line 30\nCOMMAND was started on no worker.", e.message, 1, true)
    assert.is_nil(e.message:find("line 10\n", 1, true))
    assert.is_nil(place:read("0.0", "went"))
    assert.is_nil(place:read("0.0", "ciranda_lease.tester"))
  end)

  it("runs again what has failed", function()
    place = gangs.place(1, 1)
    local command = "echo did >> ../did; [ -e ../fixed ]"
    place:refused(gang(command))
    place:write("0.0", "fixed", "")
    gang(command):stage()
    gang(command):stage()
    assert.equal("did\ndid\n", place:read("0.0", "did"))
  end)

  it("has a deadline of its own, after which it is stopped", function()
    place = gangs.place(1, 1)
    local e, wanted = patience.within_more(1, function(seconds)
      local e = place:refused(gang("echo waiting; sleep 600", { timeout = seconds }))
      local wanted =
        "had not ended after %d s (--SETUP_TIMEOUT) and was stopped; the end of its log:\n  waiting"
      wanted = wanted:format(seconds)
      return e.message:find(wanted, 1, true) ~= nil, e, wanted
    end)
    assert.equal("deadline", e.code)
    assert.matches(wanted, e.message, 1, true)
    for _, line in pairs(place.machines["0.0"]:processes()) do
      assert.is_nil(line:find("sleep 600", 1, true))
    end
  end)

  it("takes up one that still runs, and runs it once through a cut connection", function()
    place = gangs.place(1, 1)
    local command = "echo did >> ../did; while [ ! -e ../finish ]; do sleep 0.05; done; echo finished"
    assert.is_false(leaves_it_running(gang(command)))
    local cuts = 0
    place.machines["0.0"].cut = function(sent)
      if sent:find("follow .ciranda/.setup", 1, true) and cuts < 2 then
        cuts = cuts + 1
        place:write("0.0", "finish", "")
        return "before"
      end
    end
    gang(command):stage()
    assert.equal(2, cuts)
    assert.equal("did\n", place:read("0.0", "did"))
  end)

  it("names the slice that was lost before those that the platform has restarted for it", function()
    place = gangs.place(2, 1)
    local one = gang("echo did >> ../did; sleep 600", {
      machine_gone = function(worker)
        local state = worker.slice == 1 and "REPAIRING" or "RESTARTING"
        return "the machine does not answer, and its node is " .. state, state
      end,
    })
    local scope <close> = task.scope()
    local staging = scope:spawn(place.refused, place, one)
    place.wait(function()
      return place:read("0.0", "did") and place:read("1.0", "did")
    end)
    place.machines["1.0"].down = true
    place.machines["1.0"]:break_all()
    place.machines["0.0"]:reboot()
    local e = staging:wait()
    assert.equal(1, e.failures[1].member.worker.slice)
    assert.matches("slice1/worker0 could not be set up: .* its node is REPAIRING\nslice0/worker0", e.message)
    assert.matches("the machine was restarted", e.message, 1, true)
  end)

  it("runs again what was stopped, whatever its status", function()
    place = gangs.place(1, 1)
    local command = "trap 'exit 0' TERM; echo did >> ../did; while [ ! -e ../finish ]; do sleep 0.05; done"
    local one = gang(command)
    assert.is_false(leaves_it_running(one))
    setup.stop(one.options.fleet, one.options.setup.hash)
    place:write("0.0", "finish", "")
    gang(command):stage()
    assert.equal("did\ndid\n", place:read("0.0", "did"))
  end)

  it("runs again what the machine's end has cut off", function()
    place = gangs.place(1, 1)
    local command = "echo did >> ../did; while [ ! -e ../finish ]; do sleep 0.05; done"
    assert.is_false(leaves_it_running(gang(command)))
    place.machines["0.0"]:reboot()
    place:write("0.0", "finish", "")
    gang(command):stage()
    assert.equal("did\ndid\n", place:read("0.0", "did"))
  end)

  it("brings the log home", function()
    place = gangs.place(1, 1)
    local _ <close> = environment.set({ XDG_STATE_HOME = place.root })
    local journal <close> = journals.open("r1")
    gang("printf 'a\\n\\000b'", { journal = journal }):stage()
    local file =
      assert(io.open(setup.log_path(journal.directory .. "/0001-abcdef", place.slices[1].workers[1])))
    assert.equal("a\n\0b", file:read("a"))
    file:close()
  end)
end)
