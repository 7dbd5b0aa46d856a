local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

--- Run a script in a process of its own with the program that runs this test, lua or ciranda. `main` of the script is
--- its root task in both.
---@return ciranda.process.Result
local function run_script(source)
  return task.run(function()
    local directory = fs.tempdir()
    local _ <close> = setmetatable({}, {
      __close = function()
        fs.remove_tree(directory)
      end,
    })
    local path = fs.join(directory, "script.lua")
    fs.write(path, [[
        local task = require("ciranda.task")
        local function as_root(main)
          if task.current() then
            return main()
          end
          local ok, err, traceback = task.run_main(main)
          if not ok then
            io.stderr:write(tostring(err), "\n", traceback or "", "\n")
            os.exit(1)
          end
        end
      ]] .. source)
    return process.run({ uv.exepath(), path, timeout = 30 })
  end)
end

describe("the root task", function()
  it("that waits for what nobody can do is a deadlock, told with everybody who waits", function()
    local result = run_script([[
      as_root(function()
        local semaphore = task.semaphore(1)
        semaphore:acquire()
        local closing <close> = setmetatable({}, { __close = function() print("cleaned up") end })
        local scope <close> = task.scope()
        scope:spawn("hungry", function() semaphore:acquire() end)
        scope:spawn("hopeless", function() task.event():wait() end)
      end)
    ]])
    assert.equal(1, result.code)
    assert.matches("deadlock", result.stderr)
    assert.matches("'hungry': waiting for [%d.]+ s: a semaphore %(0 of 1 free, 1 waiting%)", result.stderr)
    assert.matches("'hopeless': waiting for [%d.]+ s: an event", result.stderr)
    assert.equal("cleaned up\n", result.stdout)
  end)

  it("that fails shows the traceback", function()
    local result = run_script([[
      local function deep() error("boom") end
      as_root(function()
        local scope <close> = task.scope()
        scope:spawn("child", function() deep() end)
      end)
    ]])
    assert.equal(1, result.code)
    assert.matches("script%.lua:%d+: boom", result.stderr)
  end)

  it("can be cancelled from a callback, and its clean-up may wait", function()
    local result = run_script([[
      local uv = require("luv")
      as_root(function()
        local timer = uv.new_timer()
        timer:start(1, 0, function()
          timer:close()
          task.cancel_root("told to leave")
        end)
        local closing <close> = setmetatable({}, {
          __close = function()
            task.sleep(0.001)
            print("cleaned up")
          end,
        })
        task.sleep(60)
      end)
    ]])
    assert.equal("cleaned up\n", result.stdout)
    assert.not_equal(0, result.code)
  end)

  it("that is interrupted ends with the signal's name, and running code can be interrupted too", function()
    local result = run_script([[
      as_root(function()
        local ok, err = pcall(function()
          debug.sethook(function()
            debug.sethook()
            error(task.interrupt("SIGINT"), 0)
          end, "", 100000)
          while true do end
        end)
        print(ok, err.code, err.cause.code, err.cause.signal)
        print(pcall(task.sleep, 0.001)) -- it was raised once
        error(err, 0)
      end)
    ]])
    assert.matches("^false\tcancelled\tinterrupted\tSIGINT\ntrue\n", result.stdout)
    assert.not_equal(0, result.code)
  end)

  it("leaves the loop empty: the program ends by itself", function()
    local result = run_script([[
      as_root(function()
        task.map({ 1, 2, 3 }, function() task.timeout(60, task.sleep, 0.001) end)
        pcall(task.timeout, 0.001, task.sleep, 60)
      end)
      print("end")
    ]])
    assert.equal(0, result.code)
    assert.equal("end\n", result.stdout)
  end)
end)

describe("task.run", function()
  it("gives the values of the function, and raises what it raises", function()
    assert.same(
      { 1, nil, 3, n = 3 },
      table.pack(task.run(function(...)
        task.sleep(0.001)
        return ...
      end, 1, nil, 3))
    )
    local failure = {}
    local ok, err = pcall(task.run, function()
      error(failure)
    end)
    assert.is_false(ok)
    assert.equal(failure, err)
  end)

  it("inside a task is a task that is waited for", function()
    local outer, inner
    task.run(function()
      outer = task.current()
      task.run(function()
        inner = task.current()
        task.sleep(0.001)
      end)
    end)
    assert.not_equal(outer, inner)
    assert.equal("done", inner:status())
  end)

  it("is refused in a callback of the loop", function()
    local ok, err = task.run(function()
      return task.await(function(done)
        local timer = uv.new_timer()
        timer:start(0, 0, function()
          timer:close()
          done(nil, pcall(task.run, function() end))
        end)
      end)
    end)
    assert.is_false(ok)
    assert.is_true(errors.is(err, "misuse"))
    assert.matches("the loop is running already", err.message)
  end)

  it("refuses what is no function", function()
    local ok, err = pcall(task.run, "x")
    assert.is_false(ok)
    assert.is_true(errors.is(err, "misuse"))
  end)
end)

describe("task.set_grace", function()
  it("gives back the previous one, and refuses what is no time", function()
    local before = task.grace()
    assert.equal(before, task.set_grace(3))
    assert.equal(3, task.set_grace(before))
    assert.is_false(pcall(task.set_grace, -1))
    assert.is_false(pcall(task.set_grace, "1"))
  end)
end)
