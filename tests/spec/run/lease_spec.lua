local errors = require("ciranda.io.error")
local lease = require("ciranda.run.lease")
local task = require("ciranda.task")
local uv = require("luv")

local gangs = dofile("tests/fixtures/fleet/gangs.lua")

describe("run.lease", function()
  local place

  after_each(function()
    place:close()
  end)

  local function mine(address)
    return place:read(address, "ciranda_lease.tester")
  end

  it("refuses a second run, with name, age and workers, before anything is changed", function()
    place = gangs.place(2, 2)
    place:gang("first", "true"):stage()
    local e = place:refused(place:gang("second", "true"))
    assert.equal("busy", e.code)
    assert.matches(
      ("on %s, process %d) took it "):format(uv.os_gethostname(), uv.os_getpid()),
      e.message,
      1,
      true
    )
    assert.matches("another run has these TPUs: on slice[0-1]/worker[0-1] run first (", e.message, 1, true)
    assert.matches("ciranda stop first", e.message, 1, true)
    assert.matches("--TAKE=true", e.message, 1, true)
    assert.matches("Nothing was started on any worker.", e.message, 1, true)
    for _, address in ipairs({ "0.0", "0.1", "1.0", "1.1" }) do
      assert.matches("^first@", mine(address))
      assert.is_nil(uv.fs_stat(place:path(address, ".ciranda/second")))
      assert.is_nil(uv.fs_stat(place:path(address, "second")))
    end
  end)

  it("says how long it has been taken", function()
    place = gangs.place(1, 1)
    place:gang("first", "true"):stage()
    os.execute(
      ("f='%s'; sed -i 's/ [0-9]*$/ %d/' \"$f\""):format(
        place:path("0.0", "ciranda_lease.tester"),
        os.time() - 3 * 3600
      )
    )
    assert.matches("took it 3%.0 h ago", place:refused(place:gang("second", "true")).message)
  end)

  it("lets the same run have it again, and one that is told to take it", function()
    place = gangs.place(1, 2)
    place:gang("first", "true"):stage()
    place:gang("first", "true"):stage()
    place:refused(place:gang("second", "true"))
    local one = place:gang("second", "true", { take = true })
    one:stage()
    assert.matches("^second@", mine("0.0"))
    assert.equal(1, #one.notes)
    assert.matches("The lease of slice0/worker[0-1] is taken over: run first (", one.notes[1], 1, true)
  end)

  it("takes an expired one and says so", function()
    place = gangs.place(1, 2)
    place:gang("first", "true"):stage()
    for _, address in ipairs({ "0.0", "0.1" }) do
      uv.fs_utime(place:path(address, "ciranda_lease.tester"), os.time() - 400, os.time() - 400)
    end
    local one = place:gang("second", "true")
    one:stage()
    assert.matches("its last sign of life 7 min ago", one.notes[1], 1, true)
    assert.matches("^second@", mine("0.1"))
  end)

  it("takes one from before the machine's last start for void", function()
    place = gangs.place(1, 1)
    place:gang("first", "true"):stage()
    place.machines["0.0"]:reboot()
    local one = place:gang("second", "true")
    one:stage()
    assert.matches("before the machine was started again", one.notes[1], 1, true)
  end)

  it("says of a lease that cannot be written whether the disk is full", function()
    place = gangs.place(1, 1)
    assert(uv.fs_mkdir(place:path("0.0", "ciranda_lease.tester"), 448))
    assert(uv.fs_mkdir(place:path("0.0", "bin"), 448))
    place.machines["0.0"].env.PATH = place:path("0.0", "bin") .. ":" .. os.getenv("PATH")
    local DF = "#!/bin/sh\necho Filesystem 1024-blocks Used Available Capacity Mounted on\n"
    for free, words in pairs({ [70000] = "70000 kB free\n", [3] = "3 kB free, No space left" }) do
      place:write("0.0", "bin/df", ("%secho /dev/sda1 9 9 %d 9%% /\n"):format(DF, free))
      assert(uv.fs_chmod(place:path("0.0", "bin/df"), 448))
      local e = place:refused(place:gang("first", "true"))
      assert.matches("slice0/worker0 could not be staged", e.message, 1, true)
      assert.matches("ciranda_lease.tester cannot be written; its disk has " .. words, e.message, 1, true)
    end
  end)

  it("sees the lease of another login user", function()
    place = gangs.place(1, 1)
    place:gang("first", "true"):stage()
    place.machines["0.0"].env.USER = "other"
    assert.matches("run first (", place:refused(place:gang("second", "true")).message, 1, true)
    assert.is_nil(place:read("0.0", "ciranda_lease.other"))
  end)

  it("lets exactly one of two gangs win that start in the same moment", function()
    place = gangs.place(2, 4)
    for round = 1, 4 do
      local won = {}
      task.map({ "a" .. round, "b" .. round }, function(run)
        local one = place:gang(run, "true")
        local ok, problem = pcall(one.stage, one)
        if ok then
          won[#won + 1] = { run = run, gang = one }
        else
          assert.is_true(errors.is(problem, "busy"), tostring(problem))
        end
      end)
      assert.equal(1, #won)
      for address in pairs(place.machines) do
        assert.matches("^" .. won[1].run .. "@", mine(address))
      end
      won[1].gang.options.lease:release(won[1].gang:links())
      for address in pairs(place.machines) do
        assert.is_nil(mine(address))
      end
    end
  end)

  it("leaves no half-held leases of two gangs that overlap", function()
    place = gangs.place(3, 1)
    place:gang("holder", "true", { select = "slice1" }):stage()
    for _, select in ipairs({ "slice[0-1]", "slice[1-2]", "slice[0-2]" }) do
      assert.equal("busy", place:refused(place:gang("other", "true", { select = select })).code)
    end
    assert.is_nil(mine("0.0"))
    assert.matches("^holder@", mine("1.0"))
    assert.is_nil(mine("2.0"))
  end)

  it("gives all back when one cannot be staged", function()
    place = gangs.place(1, 3)
    place.machines["0.2"].refuses = { code = "auth", message = "no key was accepted" }
    assert.equal("auth", place:refused(place:gang("first", "true")).code)
    for address in pairs(place.machines) do
      assert.is_nil(mine(address))
    end
  end)

  it("gives all back when staging is cancelled", function()
    place = gangs.place(1, 3)
    place.machines["0.2"].hang = function(command)
      return command:find("tar -xf", 1, true) ~= nil
    end
    local one = place:gang("first", "true")
    local scope <close> = task.scope()
    local staging = scope:spawn(one.stage, one)
    place.wait(function()
      return place:sent("0.2", "tar %-xf") > 0 and mine("0.0") and mine("0.1")
    end)
    staging:cancel("gone")
    local ok, problem = pcall(staging.wait, staging)
    assert.is_false(ok)
    assert.is_true(errors.is(problem, "cancelled"))
    assert.is_nil(mine("0.0"))
    assert.is_nil(mine("0.1"))
  end)

  it("is kept alive by the guard, without a word from the runner, until the command has ended", function()
    place = gangs.place(1, 1)
    local one = place:gang("first", "while [ ! -e ../go ]; do sleep 0.05; done")
    one:stage()
    one:go()
    local path = place:path("0.0", "ciranda_lease.tester")
    local sent = #place.machines["0.0"].commands
    uv.fs_utime(path, os.time() - 400, os.time() - 400)
    place.wait(function()
      return os.time() - uv.fs_stat(path).mtime.sec < 200
    end)
    assert.equal(sent, #place.machines["0.0"].commands)
    assert.equal("busy", place:refused(place:gang("second", "true")).code)
    place:write("0.0", "go", "")
    assert.equal(0, one:watch().status)
    one.options.lease:release(one:links())
    assert.is_nil(mine("0.0"))
  end)

  it("renews its own only, with one command a worker", function()
    place = gangs.place(1, 1)
    local one = place:gang("first", "true")
    one:stage()
    local path = place:path("0.0", "ciranda_lease.tester")
    uv.fs_utime(path, 1000, 1000)
    lease.new("other"):renew(one:links())
    assert.equal(1000, uv.fs_stat(path).mtime.sec)
    lease.new("other"):release(one:links())
    local sent = #place.machines["0.0"].commands
    one.options.lease:renew(one:links())
    assert.is_true(os.time() - uv.fs_stat(path).mtime.sec < 200)
    assert.equal(sent + 1, #place.machines["0.0"].commands)
  end)

  it("stages with two commands a worker once the guard is there", function()
    place = gangs.place(1, 2)
    place:gang("first", "true"):stage()
    local before = { #place.machines["0.0"].commands, #place.machines["0.1"].commands }
    place:gang("first", "true"):stage()
    assert.equal(before[1] + 2, #place.machines["0.0"].commands)
    assert.equal(before[2] + 2, #place.machines["0.1"].commands)
  end)

  it("is taken by a new runner of the same run that takes it up", function()
    place = gangs.place(1, 1)
    local one = place:gang("first", "sleep 0.2")
    one:stage()
    one:go()
    os.execute(
      ("sed -i 's/ [^ ]* %d / elsewhere 1 /' '%s'"):format(
        uv.os_getpid(),
        place:path("0.0", "ciranda_lease.tester")
      )
    )
    assert.matches(" elsewhere 1 ", mine("0.0"), 1, true)
    local other = place:gang("first", "sleep 0.2", { id = one.options.id })
    other:rejoin(function()
      return 0
    end)
    assert.equal(0, other:watch().status)
    assert.matches((" %d "):format(uv.os_getpid()), mine("0.0"), 1, true)
  end)

  it("leaves a worker to the run that has got it since, when it takes up its own", function()
    place = gangs.place(1, 1)
    local one = place:gang("first", "true")
    one:stage()
    one:go()
    one:watch()
    place:gang("second", "true", { take = true }):stage()
    local other = place:gang("first", "true", { id = one.options.id })
    other:rejoin(function()
      return 0
    end)
    assert.equal(0, other:watch().status)
    assert.matches("^second@", mine("0.0"))
  end)

  it("says why the lease cannot be written", function()
    place = gangs.place(1, 1)
    place:write("0.0", "ciranda_lease.tester/x", "")
    local e = place:refused(place:gang("first", "true"))
    assert.equal("failed", e.code)
    assert.matches("ciranda_lease.tester cannot be written; its disk has %d+ kB free", e.message)
  end)
end)
