local fs = require("ciranda.io.fs")
local patience = dofile("tests/fixtures/patience.lua")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/support.lua")
local uv = require("luv")

-- Where every worker needs a home of its own, the servers need accounts of their own.
local workers = support.ssh.is_root and 2 or 1

describe("staging by multihost_runner on real sshds", function()
  local place

  setup(function()
    place = support.place(workers, 1)
    fs.write(place.root .. "/code/main.sh", "echo main\n", { sync = false })
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  local function own(slice, name)
    return ("%s/worker-%d-0/%s"):format(place.root, slice, name)
  end

  --- The lease on a worker, nil when there is none.
  local function lease(slice)
    local path = own(slice, "ciranda_lease." .. place.user)
    return fs.exists(path) and fs.read(path) or nil
  end

  local function run(name, command, arguments, options)
    local words = { "--RUN_NAME=" .. place:name(name), "--FAILURE_GRACE=1", "--COMMAND=" .. command }
    table.move(arguments or {}, 1, #(arguments or {}), #words + 1, words)
    return place:run("multihost_runner", words, options)
  end

  it("refuses a second run while the first one runs, and takes over when it is told to", function()
    local first = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("first"),
      "--COMMAND=echo up; sleep 600",
    })
    for slice = 0, workers - 1 do
      place:log_has(place:name("first"), slice, 0, "up\n")
    end
    local second = run("second", "echo second")
    assert.equal(1, second.code, second.err)
    assert.equal("", second.out)
    assert.matches("another run has these TPUs: on slice", second.err, 1, true)
    assert.matches(("run %s ("):format(place:name("first")), second.err, 1, true)
    assert.matches(("process %d) took it "):format(first.program.pid), second.err, 1, true)
    assert.matches("staging: nothing was started, exit status 1\n$", second.err)
    assert.is_nil(fs.exists(place:home(0, 0) .. "/" .. place:name("second")))
    local taken = run("third", "echo third", { "--TAKE=true" })
    assert.equal(0, taken.code, taken.err)
    assert.equal("third\n", taken.out)
    assert.matches(
      ("The lease of slice.* is taken over: run %s"):format(place:name("first"):gsub("%-", "%%-")),
      taken.err
    )
    local ended = first.wait()
    assert.not_equal(0, ended.code)
    for slice = 0, workers - 1 do
      assert.is_nil(lease(slice))
    end
  end)

  it("keeps the lease of a run whose runner was killed, until attach has seen its end", function()
    local first = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("killed"),
      "--COMMAND=echo up; until [ -e finish ]; do sleep 0.1; done",
    })
    for slice = 0, workers - 1 do
      place:log_has(place:name("killed"), slice, 0, "up\n")
    end
    uv.kill(first.program.pid, "sigkill")
    first.wait()
    assert.matches(place:name("killed"), run("other", "true").err, 1, true)
    for slice = 0, workers - 1 do
      local path = ("%s/%s/finish"):format(place:home(slice, 0), place:name("killed"))
      fs.write(path, "", { sync = false })
    end
    local attached = place:run("attach", { place:name("killed") }, { fleet = false })
    assert.equal(0, attached.code, attached.err)
    for slice = 0, workers - 1 do
      assert.is_nil(lease(slice))
    end
    assert.equal(0, run("other", "true").code)
  end)

  it("gives the lease back when it is stopped", function()
    local first = place:start("multihost_runner", {
      "--RUN_NAME=" .. place:name("stopped"),
      "--COMMAND=echo up; sleep 600",
    })
    for slice = 0, workers - 1 do
      place:log_has(place:name("stopped"), slice, 0, "up\n")
    end
    assert.matches("^" .. place:name("stopped"):gsub("%-", "%%-") .. "@", lease(0))
    local stopped = place:run("stop", { place:name("stopped") }, { fleet = false })
    assert.equal(0, stopped.code, stopped.err)
    first.wait()
    for slice = 0, workers - 1 do
      assert.is_nil(lease(slice))
    end
  end)

  it("runs SETUP once, and says how it failed", function()
    local setup = ("--SETUP=echo did >> ../%s; echo setting up; [ -e ../%s ] || exit 4"):format(
      place:name("did"),
      place:name("mended")
    )
    local failed = run("setup", "echo main", { setup })
    assert.equal(1, failed.code, failed.err)
    assert.equal("", failed.out)
    assert.matches("ended with exit status 4; the end of its log", failed.err, 1, true)
    assert.matches("\n  setting up\nCOMMAND was started on no worker.", failed.err, 1, true)
    for slice = 0, workers - 1 do
      fs.write(("%s/%s"):format(place:home(slice, 0), place:name("mended")), "", { sync = false })
    end
    for _, words in ipairs({
      "SETUP: done on %d+ workers? in",
      "SETUP: done on 0 workers, had been done on all",
    }) do
      local result = run("setup", "sh main.sh", { setup })
      assert.equal(0, result.code, result.err)
      assert.equal("main\n", result.out)
      assert.matches(words, result.err)
    end
    assert.equal("did\ndid\n", fs.read(("%s/%s"):format(place:home(0, 0), place:name("did"))))
    local late = run("setup", "true", { "--SETUP=sleep 600", "--SETUP_TIMEOUT=1" })
    assert.equal(124, late.code, late.err)
    assert.matches("had not ended after 1 s (--SETUP_TIMEOUT) and was stopped", late.err, 1, true)
  end)

  it("stops for somebody who holds the devices, and ends that only when told to", function()
    fs.write(own(0, "accel0"), "", { sync = false })
    fs.chmod(own(0, "accel0"), 438)
    -- The login user's own program, as one that was started by hand.
    local script = ("exec 9< '%s'; : > '%s'; exec sleep 600"):format(own(0, "accel0"), own(0, "ready"))
    local words = { "sh", "-c", script }
    if support.ssh.is_root then
      words = { "setpriv", "--reuid=20017", "--regid=20017", "--clear-groups", "sh", "-c", script }
    end
    local other = process.spawn(words)
    patience.wait_for("the other program", function()
      return fs.exists(own(0, "ready"))
    end)
    local refused = run("held", "true")
    assert.equal(1, refused.code, refused.err)
    assert.matches(("are held by process %d of "):format(other.pid), refused.err, 1, true)
    assert.matches("--KILL=mine", refused.err, 1, true)
    assert.equal(0, uv.kill(other.pid, 0))
    local freed = run("held", "echo free", { "--KILL=mine" })
    assert.equal(0, freed.code, freed.err)
    assert.equal("SIGTERM", other:wait().signal)
    fs.remove(own(0, "accel0"))
  end)

  it("says how far apart the workers started", function()
    local result = run("skew", "true")
    assert.equal(0, result.code, result.err)
    assert.equal(
      workers > 1,
      result.err:find("Started on %d workers within %d+ ms, by their clocks %(known to %d+ ms%)") ~= nil
    )
  end)

  it("names the worker that is not staged in time", function()
    local server = place.servers[(workers - 1) .. "/0"]
    uv.kill(server.pid, "sigstop")
    local late = ("slice%d/worker0 could not be staged"):format(workers - 1)
    local result, seconds = patience.within_more(3, function(seconds)
      local result = run("late", "true", { "--STAGE_TIMEOUT=" .. seconds })
      return result.err:find(late, 1, true) ~= nil, result, seconds
    end)
    uv.kill(server.pid, "sigcont")
    assert.equal(124, result.code, result.err)
    assert.matches(late, result.err, 1, true)
    assert.matches(("was not ready within %d s; it was connecting"):format(seconds), result.err, 1, true)
    for slice = 0, workers - 1 do
      assert.is_nil(lease(slice))
    end
  end)
end)
