local holders = require("ciranda.run.holders")
local process = require("ciranda.io.process")
local uv = require("luv")

local gangs = dofile("tests/fixtures/fleet/gangs.lua")
local grace, patience = holders.GRACE, holders.PATIENCE

describe("run.holders", function()
  local place

  before_each(function()
    place = gangs.place(1, 2)
    for address in pairs(place.machines) do
      place:write(address, "dev/accel0", "")
    end
    holders.GRACE, holders.PATIENCE = 20, 20
  end)

  after_each(function()
    holders.GRACE, holders.PATIENCE = grace, patience
    place:close()
  end)

  --- A program on a machine that has a file open; `before` is what its shell does first.
  local function hold(address, name, before, env)
    local machine = place.machines[address]
    local variables = { HOME = machine.home }
    for key, value in pairs(env or {}) do
      variables[key] = value
    end
    local ready = place:path(address, "ready")
    local child = process.spawn({
      "sh",
      "-c",
      ("%s exec 9< '%s'; : > '%s'; exec sleep 600"):format(before or "", place:path(address, name), ready),
      env = variables,
      stdout = process.DISCARD,
    })
    local function words()
      local file = io.open(("/proc/%d/cmdline"):format(child.pid))
      local text = file and file:read("a")
      return file and file:close() and text
    end
    place.wait(function()
      return uv.fs_stat(ready) and words() == "sleep\000600\0"
    end)
    os.remove(ready)
    return child
  end

  it("stops for somebody else's program, names it and what would end it, and ends nothing", function()
    local other = hold("0.1", "dev/accel0")
    local e = place:refused(place:gang("r1", "true"))
    assert.equal("busy", e.code)
    local user = uv.os_get_passwd().username
    assert.matches("slice0/worker1 could not be staged", e.message, 1, true)
    assert.matches(
      ("the accelerators of slice 0 worker 1 (0.1) are held by process %d of %s, for "):format(
        other.pid,
        user
      ),
      e.message,
      1,
      true
    )
    assert.matches(": sleep 600; end", e.message, 1, true)
    assert.matches("end it there, or let --KILL=mine do it", e.message, 1, true)
    assert.equal(0, uv.kill(other.pid, 0))
    assert.is_nil(place:read("0.1", "ciranda_lease.tester"))
  end)

  for name, case in pairs({ ["with --KILL=mine"] = "mine", ["with --KILL=all"] = "all" }) do
    it("ends it " .. name, function()
      local other = hold("0.1", "dev/accel0")
      place:gang("r1", "true", { kill = case }):stage()
      assert.equal("SIGTERM", other:wait().signal)
    end)
  end

  it("kills after the grace what ignores SIGTERM", function()
    holders.GRACE = 1
    local other = hold("0.0", "dev/accel0", "trap '' TERM;")
    place:gang("r1", "true", { kill = "mine" }):stage()
    assert.equal("SIGKILL", other:wait().signal)
  end)

  it("ends what an earlier attempt of ours has left, without being told", function()
    local left = hold("0.0", "dev/accel0", nil, {
      CIRANDA_ATTEMPT_DIR = uv.fs_realpath(place.machines["0.0"].home) .. "/.ciranda/r0/0001-aaaaaa",
    })
    place:gang("r1", "true"):stage()
    assert.equal("SIGTERM", left:wait().signal)
  end)

  it("does not take what is in the middle of an exec for somebody else's", function()
    local home = uv.fs_realpath(place.machines["0.0"].home)
    local other = hold("0.0", "dev/accel0", nil, { CIRANDA_ATTEMPT_DIR = home .. "/.ciranda/r0/0001-aaaaaa" })
    -- The first look at its words and the first at its environment come back as they do in that moment: without any.
    place:shadow(
      "0.0",
      "cat",
      "case $1 in /proc/*/cmdline|/proc/*/environ) seen=~/seen-${1##*/}\n"
        .. '[ -e $seen ] || { : > $seen; exit 0; };; esac\nexec {real} "$@"\n'
    )
    place:gang("r1", "true"):stage()
    assert.is_truthy(uv.fs_stat(place:path("0.0", "seen-environ")))
    assert.equal("SIGTERM", other:wait().signal)
  end)

  it("does not take another home's attempt for ours", function()
    local other =
      hold("0.0", "dev/accel0", nil, { CIRANDA_ATTEMPT_DIR = "/home/other/.ciranda/r0/0001-aaaaaa" })
    assert.equal("busy", place:refused(place:gang("r1", "true")).code)
    assert.equal(0, uv.kill(other.pid, 0))
  end)

  it(
    "ends a running attempt of ours that holds the device by its guard, and waits for the release",
    function()
      local one =
        place:gang("r1", "exec 9< ../dev/accel0; trap 'sleep 0.5; exit 0' TERM; while :; do sleep 0.1; done")
      one:stage()
      one:go()
      place.wait(function()
        return place:read("0.0", ".ciranda/r1/" .. one.options.id .. "/pid")
      end)
      place:gang("r1", "true"):stage()
      local record = place:read("0.0", ".ciranda/r1/" .. one.options.id .. "/exit")
      assert.matches('"stopped":true', record, 1, true)
      assert.matches('"killed":0', record, 1, true)
    end
  )

  it("counts who has the library's lock file as a holder", function()
    place:write("0.0", "lock", "")
    local other = hold("0.0", "lock")
    assert.matches(("process %d"):format(other.pid), place:refused(place:gang("r1", "true")).message, 1, true)
    assert.is_not_nil(place:read("0.0", "lock"))
    place:gang("r1", "true", { kill = "mine" }):stage()
    assert.is_nil(place:read("0.0", "lock"))
  end)

  it("takes a lock file away that nobody holds", function()
    place:write("0.0", "lock", "")
    place:gang("r1", "true"):stage()
    assert.is_nil(place:read("0.0", "lock"))
  end)

  it("reads what a worker says", function()
    assert.same(
      { pid = 7, uid = 9, user = "me", age = 90, attempt = "/h/.ciranda/r/a", command = "python3 x.py" },
      holders.parse("7 9 me\t90\t/h/.ciranda/r/a\tpython3 x.py ")
    )
    assert.same({ pid = 7, uid = 9, user = "uid 9", command = "" }, holders.parse("7 9 UNKNOWN\t\t\t"))
    assert.is_nil(holders.parse("nothing"))
  end)
end)
