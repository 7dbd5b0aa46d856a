local drill = require("ciranda.run.drill")
local fleets = require("ciranda.fleet")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local task = require("ciranda.task")
local uv = require("luv")

local environment = dofile("tests/fixtures/environment.lua")
local machines_of = dofile("tests/fixtures/fleet/machines.lua")
local patience = dofile("tests/fixtures/patience.lua")
local TRAINER = uv.cwd() .. "/tests/fixtures/trainer/train.py"

describe("run.drill", function()
  local root, machines, workers, connect, said, saved, number

  local progress = {
    say = function(_, format, ...)
      said[#said + 1] = format:format(...)
    end,
    status = function(_, text)
      said[#said + 1] = text
    end,
  }

  before_each(function()
    root = uv.fs_mkdtemp("/tmp/drill-XXXXXX")
    saved = environment.set({ XDG_STATE_HOME = root .. "/state", TMPDIR = root })
    said, number, machines = {}, 0, {}
  end)

  local function end_machines()
    machines_of.end_all(machines, { workers })
  end

  after_each(function()
    end_machines()
    saved:back()
    os.execute(("rm -rf '%s'"):format(root))
  end)

  --- Whether somebody has a worker.
  local function leased(address)
    return uv.fs_stat(machines[address].home .. "/ciranda_lease.tester") ~= nil
  end

  --- Steps that a worker has done, as its own machine has them.
  local function steps_done(run, address)
    local last = journal.read(run)
    last = last and last.attempts[#last.attempts]
    local path = last and ("%s/.ciranda/%s/%s/log"):format(machines[address].home, run, last.attempt)
    local file = path and io.open(path)
    local text = file and file:read("a") or ""
    if file then
      file:close()
    end
    return select(2, text:gsub("completed step", ""))
  end

  --- A job on new machines; `act(run)` when worker 0 has done `steps` steps. Its runner leaves first unless it stays.
  local function with_job(options, act)
    number = number + 1
    local run, base = "r" .. number, ("%s/%d"):format(root, number)
    uv.fs_mkdir(base, 448)
    local slices
    slices, connect, machines = machines_of.make(options.slices or 2, options.workers or 1, { root = base })
    workers = fleets.new(slices, { connect = connect, retry_for = 2 })
    local directory = base .. "/shared"
    local handler, verdict, result
    task.all({
      function()
        result = launch.run({
          fleet = workers,
          run = run,
          recipe = "multihost_runner",
          command = (options.prefix or "")
            .. ("python3 %s --checkpoint_dir %s --steps 100000 --step-time 0.03 %s"):format(
              TRAINER,
              directory,
              options.trainer or ""
            ),
          json = true,
          progress = progress,
          failure_grace = 1,
          checkpoint_directory = directory,
          restarts = options.restarts,
          environment = options.environment,
          staging = options.staging,
          on_interrupt = function(given)
            handler = given
            return function() end
          end,
        })
      end,
      function()
        patience.wait_for("enough steps", function()
          return steps_done(run, "0.0") >= (options.steps or 4)
        end)
        if options.runner_leaves then
          handler("SIGHUP", 1)
          patience.wait_for("the runner's leaving", function()
            return result
          end)
        end
        verdict = act(run)
      end,
    })
    return verdict, run, result
  end

  local function open(run, more)
    local options = { run = run, progress = progress, connect_options = { connect = connect, retry_for = 2 } }
    for name, value in pairs(more or {}) do
      options[name] = value
    end
    return drill.open(options)
  end

  --- Saves, starts again, judges; the job that runs then is ended with its machines.
  local function rehearse(grace)
    return function(run)
      local session <close> = open(run)
      local result = session:save(grace, "drill")
      local resumed = session:resume(60)
      return drill.judge(result, resumed)
    end
  end

  local function problems(verdict)
    return table.concat(verdict.problems, "; ")
  end

  for seed = 1, 10 do
    it("saves at one step and resumes after it, whoever has the run, seed " .. seed, function()
      math.randomseed(seed)
      local options = {
        slices = math.random(1, 2),
        workers = math.random(1, 2),
        steps = math.random(1, 25),
        runner_leaves = math.random(2) == 1,
        trainer = math.random(3) == 1 and "--variant exits-1-after-save" or "",
      }
      local verdict, run = with_job(options, rehearse(60))
      assert.same({}, verdict.problems, table.concat(said, "\n"))
      assert.is_true(verdict.saved.saved)
      assert.is_true(verdict.saved.step >= options.steps - 1)
      assert.equal(verdict.saved.step + 1, verdict.resumed.first)
      -- The second attempt is running and nobody has it: it can be taken up.
      local state = journal.read(run)
      assert.equal(2, #state.attempts)
      assert.is_nil(state.attempts[2].ended)
      assert.equal(0, #state.runners)
      assert.is_true(leased("0.0"))
      end_machines()
    end)
  end

  it(
    "gives the workers back after a save of a run without a runner, and leaves those of one that has",
    function()
      for _, leaves in ipairs({ true, false }) do
        local session
        with_job({ runner_leaves = leaves }, function(run)
          session = open(run)
          session:save(20, "autocheckpoint save")
        end)
        -- A runner that is there has given them back by itself.
        assert.equal(leaves, leased("0.0"))
        session:close()
        assert.is_false(leased("0.0") or leased("1.0"))
        end_machines()
      end
    end
  )

  it("ends a live runner as stopped, with the step saved and nothing tried again", function()
    local saved_there, run, result = with_job(
      { restarts = { user = 3, infra = 3, preempted = 3 } },
      function(run)
        local session <close> = open(run)
        return session:save(60, "autocheckpoint save")
      end
    )
    assert.is_true(saved_there.saved)
    assert.same({ 143, "stopped" }, { result.status, result.kind }, table.concat(said, "\n"))
    assert.matches(
      ("^stopped: by autocheckpoint save, saved step %d, exit status 143"):format(saved_there.step),
      result.message
    )
    local attempts = journal.read(run).attempts
    assert.equal(1, #attempts)
    assert.same({ "stopped", saved_there.step }, { attempts[1].ended.kind, attempts[1].saved })
  end)

  it("fails of a trainer that ignores TERM", function()
    local verdict = with_job({ trainer = "--variant ignores-term" }, function(run)
      local session <close> = open(run)
      return drill.judge(session:save(1, "drill"))
    end)
    assert.is_false(verdict.ok)
    assert.matches("nothing was saved", problems(verdict), 1, true)
    assert.matches("slice[0-1]/worker0 did not end within the grace of 1 s", problems(verdict), 1, true)
  end)

  it("fails of a saver slower than the grace", function()
    local verdict = with_job({ trainer = "--variant slow-saver --save-seconds 20" }, function(run)
      local session <close> = open(run)
      return drill.judge(session:save(1.5, "drill"))
    end)
    assert.matches("nothing was saved", problems(verdict), 1, true)
    assert.matches("did not end within the grace", problems(verdict), 1, true)
  end)

  it("fails of one that leaves with 0 and saves nothing, and of its resuming elsewhere", function()
    local verdict = with_job(
      { trainer = "--variant exits-0-without-save --save-every 5", steps = 8, runner_leaves = true },
      rehearse(60)
    )
    assert.is_false(verdict.ok)
    assert.matches("nothing was saved", problems(verdict), 1, true)
    assert.matches("^not saved: ", verdict.saved.text)
  end)

  it("judges: resumed elsewhere, workers that disagree, no step at all", function()
    local good = { saved = true, step = 9, took = 1, grace = 30, killed = {}, lost = {} }
    assert.is_true(drill.judge(good, { first = 10, disagree = false }).ok)
    assert.matches(
      "resumed at step 0, not at 10",
      problems(drill.judge(good, { first = 0, disagree = false })),
      1,
      true
    )
    assert.matches("different steps", problems(drill.judge(good, { first = 10, disagree = true })), 1, true)
    assert.matches(
      "did no step in time; it is left running",
      problems(drill.judge(good, { disagree = false })),
      1,
      true
    )
    assert.matches(
      "did no step: it ended with status 1",
      problems(drill.judge(good, { disagree = false, ended = { status = 1 } })),
      1,
      true
    )
    good.disagree = true
    assert.matches("the workers stopped at different steps", problems(drill.judge(good)), 1, true)
    good.disagree, good.running = nil, { { slice = 1, index = 0 } }
    assert.matches("slice1/worker0 had not ended long after", problems(drill.judge(good)), 1, true)
    good.running = nil
    good.took = 31
    assert.matches("longer than the grace of 30 s", problems(drill.judge(good)), 1, true)
  end)

  it("says of a job that saved nothing that it stopped at one step and resumed at another", function()
    local bad = { saved = false, step = 0, synced = 7, took = 1, grace = 30, killed = {}, lost = {} }
    local said_of = problems(drill.judge(bad, { first = 1, disagree = false }))
    assert.matches("not saved: nothing was saved", said_of, 1, true)
    assert.matches(
      "it resumed at step 1, not at 8, the one after the step at which it stopped",
      said_of,
      1,
      true
    )
  end)

  it("starts the command with all that the run had, and only once", function()
    local restarts, given = { user = 3, infra = 1 }, { OF_MINE = "x" }
    local staging = { kill = "mine", strict_fingerprint = true }
    local verdict, run = with_job({
      slices = 1,
      restarts = restarts,
      environment = given,
      staging = staging,
      runner_leaves = true,
      prefix = '[ "$OF_MINE" = x ] && mkdir first || exit 9; ',
    }, rehearse(60))
    assert.matches("did no step: it ended with status 9", problems(verdict), 1, true)
    local attempts = journal.read(run).attempts
    assert.equal(2, #attempts)
    local last = attempts[2]
    assert.same({ restarts, given, staging }, { last.restarts, last.environment, last.staging })
  end)

  it("leaves what it has started again also when its time is over before a worker is staged", function()
    local resumed, run = with_job({ slices = 1, runner_leaves = true }, function(run)
      local session <close> = open(run)
      session:save(60, "drill")
      return session:resume(0)
    end)
    assert.is_nil(resumed.ended)
    assert.same({ 2, 0 }, { #journal.read(run).attempts, #journal.read(run).runners })
    end_machines()
  end)

  it("does the arithmetic beforehand, from the log and from what is on disk", function()
    local estimate = with_job({ trainer = "--save-every 2", steps = 6, runner_leaves = true }, function(run)
      local session <close> = open(run)
      return session:estimate({ bandwidth = 1e6, commit = 2 })
    end)
    assert.is_true(estimate.step >= 0.03 and estimate.step < 5)
    assert.is_true(estimate.bytes > 0)
    assert.near(estimate.step * 2 + 1 + estimate.bytes / 1e6 + 2, estimate.total, 1e-9)
    assert.matches("= %d+%.%d s; the grace is 30 s$", drill.arithmetic(estimate, 1e6, 30))
    assert.matches("? s (no step time in the logs", drill.arithmetic({ commit = 2 }, 1e6, 30), 1, true)
  end)

  it("takes the median of the steps, since the first is compiled", function()
    local log =
      "completed step: 0, seconds: 9.5, loss: 1\ncompleted step: 1, seconds: 0.2\ncompleted step: 2, seconds: 0.3\n"
    assert.equal(0.3, drill.step_time(log))
    assert.is_nil(drill.step_time("step 3"))
  end)

  it("decides by a pattern of its own", function()
    local saved_state = with_job({ runner_leaves = true }, function(run)
      local session <close> = open(run, {
        step_of = function()
          return nil
        end,
      })
      return session:save(60, "save")
    end)
    assert.is_false(saved_state.saved)
  end)

  it("says what it cannot find", function()
    local ok, problem = pcall(drill.open, { run = "nobody", progress = progress })
    assert.is_false(ok)
    assert.equal("not_found", problem.code)
  end)
end)
