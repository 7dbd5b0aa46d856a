local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local support = dofile("tests/spec/recipes/support.lua")
local uv = require("luv")

-- Where every worker needs a home of its own, the servers need accounts of their own.
local workers = support.ssh.is_root and 2 or 1

describe("autocheckpoint on real sshds", function()
  local place

  setup(function()
    place = support.place(workers, 1)
    fs.write(place.root .. "/code/train.py", fs.read("tests/fixtures/trainer/train.py"), { sync = false })
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  --- Starts the trainer and waits until every worker trains. The workers are different users of one directory.
  local function train(run, options)
    local directory = ("%s/%s-ckpt"):format(place.root, run)
    fs.mkdir(directory, 511)
    fs.chmod(directory, 511)
    local running = place:start("multihost_runner", {
      "--RUN_NAME=" .. run,
      ("--COMMAND=umask 0; python3 train.py --checkpoint_dir=%s --steps=100000 --step-time=0.05 %s"):format(
        directory,
        options
      ),
    })
    for slice = 0, workers - 1 do
      place:log_has(run, slice, 0, "completed step: 3,")
    end
    return running, directory
  end

  local function autocheckpoint(...)
    local result = place:run("--json", { "autocheckpoint", ... }, { fleet = false })
    return result, json.decode(result.out:match("([^\n]+)\n$"))
  end

  it("saves a live run and says at which step; its runner sees the end", function()
    local running, directory = train("a1", "")
    local result, last = autocheckpoint("save", "a1", "--CAUSE=spot")
    assert.equal(0, result.code, result.out .. result.err)
    local step = last.message:match("^save: step (%d+) was saved in [%d.]+ s$")
    assert.is_not_nil(step, last.message)
    assert.equal("directory", fs.exists(directory .. "/" .. step))
    assert.matches("KILL after 30 s", result.out, 1, true)
    assert.matches(("slice0/worker0 +%s +[%%d.]+ s +0"):format(step), result.out)
    assert.equal(143, running.program:wait().code)
  end)

  it("rehearses: saves, starts again, resumes, and leaves it running for attach", function()
    local running = train("a2", "")
    local result, last = autocheckpoint("drill", "a2")
    assert.equal(0, result.code, result.out .. result.err)
    assert.matches("A save should take: 2 steps of [%d.]+ s %+ 1 s notifier", result.out)
    assert.matches("^drill: step %d+ was saved in [%d.]+ s and training resumed from it$", last.message)
    running.program:wait()
    local again = place:start("attach", { "a2" }, { fleet = false })
    place:log_has("a2", 0, 0, "completed step: %d+.*completed step: %d+.*completed step")
    assert(support.ssh.wait_for(function()
      return fs.read(again.err_path):find("Taking up run a2", 1, true) ~= nil
    end))
    uv.kill(again.program.pid, "sigterm")
    local ended = again.wait()
    assert.equal(143, ended.code, ended.err)
    assert.matches("Checkpoint: saved", ended.err, 1, true)
  end)

  it("fails a drill with 1 of a trainer that ignores TERM, and names what is wrong", function()
    local running = train("a3", "--variant=ignores-term")
    local result, last = autocheckpoint("drill", "a3", "--GRACE=1")
    assert.equal(1, result.code, result.out .. result.err)
    assert.equal("failed", last.kind)
    assert.matches(
      "^drill failed: not saved: nothing was saved after the signal; slice.* did not end within the grace of 1 s",
      last.message
    )
    running.program:wait()
  end)

  it("refuses what it cannot do", function()
    local result, last = autocheckpoint("save", "nobody")
    assert.equal(1, result.code)
    assert.matches("there is no run nobody on this machine", last.message, 1, true)
    for _, pattern in ipairs({ "ckpt_%d+", "ckpt_(%d+" }) do
      result, last = autocheckpoint("save", "a1", "--STEP_NAME=" .. pattern)
      assert.equal(2, result.code, result.out .. result.err)
      assert.matches("--STEP_NAME=", last.message, 1, true)
    end
  end)
end)
