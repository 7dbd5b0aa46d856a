local checkpoint = require("ciranda.run.checkpoint")

describe("run.checkpoint", function()
  it("takes finished steps for steps, and saves under way for nothing", function()
    assert.equal(100, checkpoint.step_of("100"))
    assert.equal(100, checkpoint.step_of("step_100"))
    assert.equal(7, checkpoint.step_of("checkpoint-0007"))
    assert.equal(0, checkpoint.step_of("0"))
    for _, name in ipairs({
      "100.orbax-checkpoint-tmp-1764",
      "100.tmp-0001-123456",
      "tmp_100",
      "100.part",
      "100.incomplete",
      ".100",
      "metadata",
      "v2x100",
      "100abc",
      "",
    }) do
      assert.is_nil(checkpoint.step_of(name))
    end
  end)

  it("counts only committed directories once one is committed", function()
    local entries = { { name = "1", mtime = 10, committed = true }, { name = "2", mtime = 20 } }
    assert.same({ [1] = 10 }, checkpoint.finished(entries))
    entries[1].committed = nil
    assert.same({ [1] = 10, [2] = 20 }, checkpoint.finished(entries))
  end)

  it("reads a listing", function()
    local text =
      "noise\nciranda-listing\n1700000000 5/\n1700000001 name with blanks/\nciranda-commits\n./5/commit_success.txt\n"
    assert.same({
      { name = "5", mtime = 1700000000, committed = true },
      { name = "name with blanks", mtime = 1700000001 },
    }, checkpoint.parse_listing(text))
    assert.same({}, checkpoint.parse_listing("ciranda-none\n"))
  end)

  it("finds the checkpoint directory in a command", function()
    local found = checkpoint.directory_in
    assert.equal("/shared/c", found("python3 train.py --checkpoint_dir /shared/c --steps 5"))
    assert.equal("out/ck", found("python3 t.py --checkpoint-dir=out/ck"))
    assert.equal("x", found("python3 t.py local_checkpoint_directory=x"))
    assert.is_nil(found("python3 t.py --enable_checkpointing=true"))
    assert.equal("$DIR/c", found("python3 t.py --checkpoint_dir $DIR/c"))
    assert.is_nil(found("python3 t.py --checkpoint_dir $(mktemp -d)"))
    assert.is_nil(found("true"))
  end)

  it("reads what a log says of a stop", function()
    assert.equal(
      9,
      checkpoint.sync_point("WARNING:absl:[process=0] Reached preemption sync point, step=9\nx")
    )
    assert.is_nil(checkpoint.sync_point("completed step: 9"))
    assert.is_true(
      checkpoint.stopped_by_signal("Training stopped: Job received termination signal (SIGTERM).")
    )
    assert.is_false(checkpoint.stopped_by_signal("Training stopped: out of data"))
  end)

  --- A bucket that has these objects.
  local function bucket_of(objects)
    return {
      list = function(_, bucket, options)
        assert.same({ "bucket", "/" }, { bucket, options.delimiter })
        local found, prefixes, seen = {}, {}, {}
        for name, generation in pairs(objects) do
          if name:sub(1, #options.prefix) == options.prefix then
            local deeper = name:sub(#options.prefix + 1):match("^[^/]*/")
            if not deeper then
              found[#found + 1] = { name = name, generation = tostring(generation) }
            elseif not seen[deeper] then
              seen[deeper] = true
              prefixes[#prefixes + 1] = options.prefix .. deeper
            end
          end
        end
        return found, prefixes
      end,
    }
  end

  it("looks into a bucket: finished is what has its commit file", function()
    local objects = {
      ["run/ck/9/commit_success.txt"] = 5,
      ["run/ck/9/state/0"] = 4,
      ["run/ck/12/state/0"] = 7,
      ["run/ck/7.orbax-checkpoint-tmp-1/x"] = 3,
      ["run/other/99/commit_success.txt"] = 1,
    }
    local options = { storage = bucket_of(objects) }
    local watch = checkpoint.before({}, "gs://bucket/run/ck/", options)
    local report = watch:after()
    assert.is_false(report.saved)
    assert.equal(9, report.step)
    objects["run/ck/12/commit_success.txt"] = 8
    report = watch:after()
    assert.is_true(report.saved)
    assert.same({ 12, 9 }, { report.step, report.before })
    -- Who stopped at 15 did not save there: 12 is one that came in the ordinary course.
    report = watch:after(15)
    assert.is_false(report.saved)
    assert.equal(
      "not saved: the workers stopped at step 15, the last step on disk in D is 12",
      checkpoint.describe(report, "D")
    )
    assert.is_true(watch:after(12).saved)
    -- The same step written anew counts; the same one untouched does not.
    watch = checkpoint.before({}, "gs://bucket/run/ck", options)
    assert.is_false(watch:after().saved)
    objects["run/ck/12/commit_success.txt"] = 11
    assert.is_true(watch:after().saved)
  end)

  it("takes the user's own names in a bucket for what they say", function()
    local options = {
      storage = bucket_of({ ["ckpt_3/x"] = 1 }),
      step_of = function(name)
        return math.tointeger(tonumber((name:match("^ckpt_(%d+)$"))))
      end,
    }
    assert.equal(3, checkpoint.newest(checkpoint.look({}, "gs://bucket", options)))
  end)

  it("reads the last step of a log", function()
    assert.equal(12, checkpoint.last_step("completed step: 11, seconds: 1\ncompleted step: 12, loss: 2\n"))
    assert.is_nil(checkpoint.last_step("step 3"))
  end)

  it("takes the newest step that all have", function()
    local a, b = {}, {}
    local listing =
      { answered = 2, steps = { [a] = { [1] = 0, [2] = 0, [3] = 0 }, [b] = { [1] = 0, [2] = 0 } } }
    assert.equal(2, checkpoint.newest(listing))
    listing.steps[b] = {}
    assert.is_nil(checkpoint.newest(listing))
  end)

  --- A fleet whose every worker answers the next of a list of texts.
  local function fleet_that_says(answers)
    local round = 0
    return {
      run = function(_, _, options)
        round = round + 1
        answers.timeouts = answers.timeouts or {}
        answers.timeouts[round] = options.timeout
        local results = {}
        for place, text in ipairs(answers[round]) do
          results[place] = text
              and {
                worker = answers.workers[place],
                code = 0,
                stdout = "ciranda-listing\n" .. text .. "ciranda-commits\n",
              }
            or { worker = answers.workers[place], err = "no answer" }
        end
        return results
      end,
    }
  end

  local workers = { { slice = 0, index = 0 }, { slice = 0, index = 1 } }

  local function report(before, after)
    local fleet = fleet_that_says({ before, after, workers = workers })
    return checkpoint.before(fleet, "/c"):after()
  end

  it("says saved when a step is there that was not", function()
    local said = report({ "1 5/\n", "1 5/\n" }, { "1 5/\n2 9/\n", "1 5/\n2 9/\n" })
    assert.is_true(said.saved)
    assert.equal(9, said.step)
    assert.equal(5, said.before)
    assert.equal("saved: step 9 is on disk in /c", checkpoint.describe(said, "/c", 9))
  end)

  it("does not say saved for a save under way, an old step, or nothing", function()
    local said = report({ "1 5/\n", "1 5/\n" }, { "1 5/\n2 9.tmp-x/\n", "1 5/\n2 9.tmp-x/\n" })
    assert.is_false(said.saved)
    assert.matches("not saved: the last step on disk in /c is 5", checkpoint.describe(said, "/c", 9), 1, true)
    assert.matches("4 steps lost (the logs had reached step 9)", checkpoint.describe(said, "/c", 9), 1, true)
    said = report({ "", "" }, { "", "" })
    assert.is_false(said.saved)
    assert.matches("no finished step", checkpoint.describe(said, "/c"), 1, true)
  end)

  it("does not say saved when one worker has it and another not", function()
    local said = report({ "1 5/\n", "1 5/\n" }, { "1 5/\n2 9/\n", "1 5/\n" })
    assert.is_false(said.saved)
    assert.equal(5, said.step)
  end)

  it("takes a step written again under its name for saved", function()
    assert.is_true(report({ "1 5/\n", "1 5/\n" }, { "3 5/\n", "3 5/\n" }).saved)
  end)

  it("says who did not answer, and claims nothing when nobody did", function()
    local said = report({ "1 5/\n", "1 5/\n" }, { "2 9/\n1 5/\n", false })
    assert.is_true(said.saved)
    assert.matches("slice0/worker1: no answer", said.problems, 1, true)
    said = report({ "1 5/\n", "1 5/\n" }, { false, false })
    assert.is_false(said.saved)
    assert.matches("nobody can say", checkpoint.describe(said, "/c"), 1, true)
  end)

  it("claims nothing of a step that may have been there, since nobody answered before the signal", function()
    local said = report({ false, false }, { "1 5/\n", "1 5/\n" })
    assert.same({ false, 5 }, { said.saved, said.step })
    assert.equal(
      "the last step on disk in /c is 5, and nobody can say whether it was there before the signal: no answer",
      checkpoint.describe(said, "/c", 5)
    )
    -- Where the workers have said at which step they stop, that step is this stop's.
    local fleet = fleet_that_says({ { false, false }, { "1 5/\n", "1 5/\n" }, workers = workers })
    assert.is_true(checkpoint.before(fleet, "/c"):after(5).saved)
  end)

  it("takes its time after the end, however short the look before the signal was", function()
    local answers = { { "", "" }, { "", "" }, workers = workers }
    checkpoint.before(fleet_that_says(answers), "/c", { timeout = 5 }):after()
    assert.equal(5, answers.timeouts[1])
    assert.is_true(answers.timeouts[2] >= 30)
  end)

  it("looks where COMMAND looks: variables are the worker's, everything else is text", function()
    local uv = require("luv")
    local root = uv.fs_mkdtemp("/tmp/look-XXXXXX")
    local machines_of = dofile("tests/fixtures/fleet/machines.lua")
    local slices, connect, machines = machines_of.make(1, 1, { root = root })
    local fleet <close> = require("ciranda.fleet").new(slices, { connect = connect })
    local home = machines["0.0"].home
    machines["0.0"].env.SHARED = home .. "/shared"
    for _, name in ipairs({ "shared/3", "run/out/5", 'it\'s $5 "x" `y`/7', "run/empty", "plain/9.tmp" }) do
      os.execute(("mkdir -p %s/%s"):format(home, "'" .. name:gsub("'", "'\\''") .. "'"))
    end
    local function newest(directory)
      return checkpoint.newest(checkpoint.look(fleet, directory, { base = "run" }))
    end
    assert.equal(3, newest("$SHARED"))
    assert.equal(3, newest("${SHARED}/"))
    assert.equal(5, newest("out"))
    assert.equal(7, newest(home .. '/it\'s $5 "x" `y`'))
    assert.equal(3, newest("~/shared"))
    assert.is_nil(newest("empty"))
    assert.is_nil(newest("nowhere"))
    assert.is_nil(newest("$NOBODY/x"))
    os.execute(("rm -rf '%s'"):format(root))
  end)

  it("refuses an address it cannot look into", function()
    local ok, e = pcall(checkpoint.look, {}, "s3://bucket/x")
    assert.is_false(ok)
    assert.equal("unsupported", e.code)
  end)
end)
