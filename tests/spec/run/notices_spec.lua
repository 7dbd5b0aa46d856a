-- Notices of the platform, silence, saving on demand, hooks: on machines that are directories.
local fs = require("ciranda.io.fs")
local hooks = require("ciranda.run.hooks")
local journal = require("ciranda.run.journal")
local launch = require("ciranda.run.launch")
local metadata = require("ciranda.sim.metadata")
local notices = require("ciranda.run.notices")
local server = require("ciranda.io.server")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local runs_of = dofile("tests/fixtures/fleet/runs.lua")
local TRAINER = uv.cwd() .. "/tests/fixtures/trainer/train.py"

describe("run.notices", function()
  it("understands what a metadata server says", function()
    local meaning = notices.meaning
    assert.is_nil(meaning("maintenance-event 100 NONE"))
    assert.is_nil(meaning("maintenance-event 100 <html>502</html>"))
    assert.is_nil(meaning("preempted 100 FALSE"))
    assert.is_nil(meaning('upcoming-maintenance 100 {"error": "no notifications have been received yet"}'))
    assert.is_nil(meaning("upcoming-maintenance 100 "))
    assert.is_nil(meaning("rubbish"))
    assert.same(
      { cause = "maintenance", text = "maintenance (TERMINATE_ON_HOST_MAINTENANCE)", at = 100 },
      meaning("maintenance-event 100 TERMINATE_ON_HOST_MAINTENANCE")
    )
    assert.equal("spot", meaning("preempted 100 TRUE").cause)
    local later = '{"maintenance_status": "PENDING", "window_start_time": "2026-12-01T00:00:00Z"}'
    local upcoming = meaning("upcoming-maintenance 7 " .. later)
    assert.same({ nil, 7 }, { upcoming.cause, upcoming.at })
    assert.matches("PENDING, from 2026-12-01", upcoming.text, 1, true)
    assert.equal("maintenance", meaning('upcoming-maintenance 7 {"maintenanceStatus": "ONGOING"}').cause)
  end)
end)

describe("an attempt", function()
  local place, root, machines, instance

  before_each(function()
    place = runs_of.open(2, 1)
    root, machines = place.root, place.machines
    instance = { ["maintenance-event"] = "NONE", preempted = "FALSE" }
  end)

  after_each(function()
    place:close()
  end)

  local function text()
    return place:text()
  end

  local function settings(command, more)
    local all = {
      checkpoint_directory = root .. "/shared",
      progress = {
        say = function(_, format, ...)
          place.said[#place.said + 1] = format:format(...)
        end,
        status = function(_, words)
          place.said[#place.said + 1] = words
        end,
      },
    }
    return place:settings(command, all, more)
  end

  local TRAIN = "exec python3 %s --checkpoint_dir %s/shared --steps 100000 --step-time 0.02 "

  --- Acts when the command of every worker has got so far.
  local function when(pattern, act)
    task.timeout(60, function()
      for slice = 0, 1 do
        local path = ("%s/r1/output_slice_%04d_worker_0000.txt"):format(root, slice)
        while not (fs.exists(path) and fs.read(path):find(pattern)) do
          task.sleep(0.02)
        end
      end
      act()
    end)
  end

  --- Runs `fn(address)` with a metadata server that tells of `instance`.
  local function with_metadata(fn)
    local scope <close> = task.scope()
    local listener = server.listen({
      address = "127.0.0.1",
      port = 0,
      handler = function(request)
        return metadata.answer(function()
          return { instance = instance }
        end, request)
      end,
    })
    for _, machine in pairs(machines) do
      machine.env.GCE_METADATA_HOST = ("127.0.0.1:%d"):format(listener.port)
    end
    local result = fn()
    listener:close()
    scope:cancel("the end")
    return result
  end

  local function run_with(options, pattern, act)
    local result
    task.all({
      function()
        result = launch.run(options)
      end,
      function()
        when(pattern, act)
      end,
    })
    return result
  end

  for event, expected in pairs({
    ["maintenance-event"] = { "TERMINATE_ON_HOST_MAINTENANCE", "maintenance", "on_maintenance", 290 },
    preempted = { "TRUE", "preemption", "on_preempted", 30 },
  }) do
    it("saves everywhere and stops upon a notice of " .. expected[2], function()
      local told, checkpoints = {}, {}
      local result = with_metadata(function()
        return run_with(
          settings(TRAIN:format(TRAINER, root), {
            notices = true,
            hooks = {
              [expected[3]] = function(happening)
                told[#told + 1] = happening
              end,
              on_checkpoint = function(happening)
                checkpoints[#checkpoints + 1] = happening
              end,
            },
          }),
          "completed step: 3,",
          function()
            instance[event] = expected[1]
          end
        )
      end)
      assert.same({ 143, "preempted" }, { result.status, result.kind }, text())
      local step = tonumber(result.message:match("^preempted: " .. expected[2] .. ".*saved step (%d+)"))
      assert.is_truthy(step, text())
      assert.is_truthy(uv.fs_stat(("%s/shared/%d"):format(root, step)))
      assert.matches("Notice: " .. expected[2], text(), 1, true)
      local grace = tonumber(text():match("TERM to every worker, KILL after (%d+) s"))
      assert.is_true(grace <= expected[4] and grace >= expected[4] - 15, text())
      assert.is_true(#told >= 1)
      assert.equal("r1", told[1].run)
      assert.same({ step }, { checkpoints[1] and checkpoints[1].step })
      local state = journal.read("r1")
      assert.equal("preempted", state.attempts[1].ended.kind)
      -- Each was told once, by us.
      for _, machine in pairs(machines) do
        local path = ("%s/.ciranda/r1/%s/exit"):format(machine.home, state.attempts[1].attempt)
        assert.is_true(select(2, fs.read(path):gsub('"signalled":true', "")) <= 1)
      end
    end)
  end

  it("leaves the job alone when it is cancelled while the platform's own signal is awaited", function()
    with_metadata(function()
      local options = settings("echo up; exec sleep 600", { notices = true, autocheckpoint = true })
      local scope <close> = task.scope()
      local running = scope:spawn(pcall, launch.run, options)
      when("up", function()
        instance.preempted = "TRUE"
        while not text():find("Notice: preemption", 1, true) do
          task.sleep(0.02)
        end
      end)
      running:cancel("the caller has had enough")
      local ok, problem = running:wait()
      assert.is_false(ok)
      assert.equal("cancelled", problem.code)
    end)
    assert.is_nil(text():find("TERM to every worker", 1, true))
    assert.is_nil(journal.read("r1").attempts[1].stopped)
  end)

  it("says once that no worker writes anything, and tells its hook; a hook that fails is reported", function()
    local command = ("echo up; until [ -e %s/enough ]; do sleep 0.1; done; echo more"):format(root)
    local result = launch.run(settings(command, {
      checkpoint_directory = false,
      watch = { stall = 0.5 },
      hooks = {
        on_stall = function(happening)
          fs.write(root .. "/enough", "")
          error(("%s: %s"):format(happening.attempt, happening.text))
        end,
      },
    }))
    assert.same({ 0, "done" }, { result.status, result.kind })
    assert.matches("No worker has written anything for", text(), 1, true)
    assert.matches("The hook on_stall failed: .*0001%-%x+: no worker has written", text())
  end)

  it(
    "ends a hook that computes without end, also one that catches what ends it, and the run goes on",
    function()
      local computing = hooks.COMPUTING
      finally(function()
        hooks.COMPUTING = computing
      end)
      hooks.COMPUTING = 0.3
      local command = ("echo up; until [ -e %s/enough ]; do sleep 0.1; done"):format(root)
      local called, caught = 0, 0
      local result = launch.run(settings(command, {
        watch = { stall = 0.5 },
        hooks = {
          on_stall = function()
            fs.write(root .. "/enough", "")
            called = called + 1
            local function forever()
              while true do
              end
            end
            caught = pcall(forever) and 0 or 1
            forever()
          end,
        },
      }))
      assert.same({ 0, "done", 1, 1 }, { result.status, result.kind, called, caught })
      assert.matches("The hook on_stall failed: .*it has computed for too long", text())
    end
  )

  it("tells on_checkpoint of the saves that the command makes by itself, each once", function()
    local steps = require("ciranda.run.steps")
    local every = steps.SAVES
    finally(function()
      steps.SAVES = every
    end)
    steps.SAVES = 0.1
    fs.mkdir_p(root .. "/shared/3")
    local told = {}
    local command = ("until [ -e %s/enough ]; do sleep 0.1; done; exit 1"):format(root)
    launch.run(settings(command, {
      checkpoint_directory = root .. "/shared",
      hooks = {
        on_checkpoint = function(happening)
          told[#told + 1] = happening.step
          if #told == 2 then
            fs.write(root .. "/enough", "")
          else
            fs.mkdir(root .. "/shared/6")
          end
        end,
        on_stall = function()
          -- The first look tells what was there before: it has been answered when there is a second one.
          patience.wait_for("two looks at the checkpoints", function()
            local looks = 0
            for _, sent in ipairs(machines["0.0"].commands) do
              looks = looks + (sent:find("ciranda-listing", 1, true) and 1 or 0)
            end
            return looks >= 2
          end)
          fs.mkdir(root .. "/shared/5")
        end,
      },
      watch = { stall = 1 },
    }))
    assert.same({ 5, 6 }, told)
  end)

  it("tells on_failure how an attempt ended", function()
    local told
    launch.run(settings("exit 3", {
      hooks = {
        on_failure = function(happening)
          told = happening
        end,
      },
    }))
    assert.same({ "user", 3 }, { told.kind, told.status })
    assert.matches("user: exit status 3", told.text, 1, true)
  end)

  it("saves and goes on upon SIGUSR1, where the command catches it", function()
    local command = ([[exec python3 -c "
import os, signal, time
def save(*_): os.makedirs('%s/shared/7', exist_ok=True); print('saved', flush=True)
signal.signal(signal.SIGUSR1, save)
print('up', flush=True)
for _ in range(1200):
    time.sleep(0.1)
    if os.path.exists('%s/enough'): break
"]]):format(root, root)
    local result = run_with(settings(command), "up", function()
      assert.is_true(place.handler("SIGUSR1", 1))
      patience.wait_for(text, function()
        return text():find("saved: step 7 is on disk", 1, true)
      end)
      fs.write(root .. "/enough", "")
    end)
    assert.same({ 0, "done" }, { result.status, result.kind })
    assert.matches("the run goes on", text(), 1, true)
    assert.equal(7, journal.read("r1").attempts[1].saved)
  end)

  it("says so, and sends nothing, where SIGUSR1 would end the command", function()
    local command = ("echo up; until [ -e %s/enough ]; do sleep 0.1; done; exit 4"):format(root)
    local result = run_with(settings(command), "up", function()
      assert.is_true(place.handler("SIGUSR1", 1))
      patience.wait_for(text, function()
        return text():find("nothing was sent", 1, true)
      end)
      fs.write(root .. "/enough", "")
    end)
    assert.equal(4, result.status)
    assert.matches(
      "SIGUSR1: nothing was sent: the command on slice[0-1]/worker0 does not catch it",
      text(),
      1,
      true
    )
  end)
end)

describe("run.hooks", function()
  local path

  before_each(function()
    path = fs.tempdir() .. "/hooks.lua"
  end)
  after_each(function()
    fs.remove_tree(fs.dirname(path))
  end)

  it("hold up nobody who tells them of something, however slow they are", function()
    local called, said = 0, {}
    local happenings = hooks.happenings({
      on_maintenance = function()
        called = called + 1
      end,
    })
    task.timeout(10, function()
      for _ = 1, 1010 do
        happenings:put("on_maintenance", {})
        happenings:put("on_stall", {}) -- for which there is no hook
      end
    end)
    happenings:close()
    happenings:run(function(format, ...)
      said[#said + 1] = format:format(...)
    end)
    assert.equal(1000, called)
    assert.same({ "The hooks were too slow to be told of 10 more happenings" }, said)
  end)

  it("takes functions with the right names from a file, and nothing else", function()
    for source, message in pairs({
      ["return {"] = "unexpected symbol",
      ["error('oh')"] = "oh",
      ["return 7"] = "it must return a table of functions, not a number",
      ["return { on_stop = print }"] = "there is no hook on_stop",
      ["return { on_stall = 7 }"] = "on_stall is a number",
    }) do
      fs.write(path, source)
      local ok, e = pcall(hooks.load, path)
      assert.is_false(ok, source)
      assert.equal("usage", e.code)
      if not source:find("{$") then
        assert.matches(message, e.message, 1, true)
      end
    end
    -- Where standard output belongs to JSON lines, print does not write there.
    local printed = {}
    fs.write(path, "return { on_stall = function(what) print('at', what, nil) return io end }")
    local quiet = hooks.load(path, {
      say = function(_, format, ...)
        printed[#printed + 1] = format:format(...)
      end,
    })
    assert.equal(io, quiet.on_stall(100))
    assert.same({ "at\t100\tnil" }, printed)
    fs.write(path, "return { on_stall = function() return 5 end }")
    local loaded = hooks.load(path)
    assert.equal(5, hooks.call(loaded, "on_stall", {}, print))
    assert.is_nil(hooks.call(loaded, "on_failure", {}, print))
  end)
end)
