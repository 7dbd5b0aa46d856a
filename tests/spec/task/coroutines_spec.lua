local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

--- Tests of what must hold inside tasks and outside of them: outside is left to plain Busted.
local function everywhere(name, fn)
  it(name .. " (here)", fn)
  it(name .. " (in a task)", within(fn))
end

describe("coroutines", function()
  everywhere("pass values in and out", function()
    local co = coroutine.create(function(a, b)
      local c, d = coroutine.yield(a + b, nil)
      return c * d, nil, "end"
    end)
    assert.same({ true, 3, nil, n = 3 }, table.pack(coroutine.resume(co, 1, 2)))
    assert.equal("suspended", coroutine.status(co))
    assert.same({ true, 12, nil, "end", n = 4 }, table.pack(coroutine.resume(co, 3, 4)))
    assert.equal("dead", coroutine.status(co))
    assert.same({ false, "cannot resume dead coroutine" }, { coroutine.resume(co) })
  end)

  everywhere("wrap adds the position to strings and keeps tables", function()
    local failing = coroutine.wrap(function()
      error("boom")
    end)
    local ok, err = pcall(function()
      failing()
    end)
    assert.is_false(ok)
    assert.matches("^[^:]*coroutines_spec%.lua:%d+: [^:]*coroutines_spec%.lua:%d+: boom$", err)
    local value = {}
    ok, err = pcall(coroutine.wrap(function()
      error(value)
    end))
    assert.is_false(ok)
    assert.equal(value, err)
  end)

  everywhere("close runs <close> and reports what went wrong", function()
    local log = {}
    local function suspended(fail)
      local co = coroutine.create(function()
        local _ <close> = setmetatable({}, {
          __close = function()
            log[#log + 1] = "closed"
            if fail then
              error("in close", 0)
            end
          end,
        })
        coroutine.yield()
      end)
      coroutine.resume(co)
      return co
    end
    assert.is_true(coroutine.close(suspended(false)))
    assert.same({ false, "in close" }, { coroutine.close(suspended(true)) })
    assert.same({ "closed", "closed" }, log)
    local failed = coroutine.create(error)
    coroutine.resume(failed, "why")
    assert.same({ false, "why" }, { coroutine.close(failed) })
    assert.is_true(coroutine.close(failed))
  end)

  everywhere("refuse wrong arguments as the stock ones do", function()
    for expected, fn in pairs({
      ["'create' %(function expected, got number%)"] = function()
        coroutine.create(1)
      end,
      ["'wrap' %(function expected, got nil%)"] = function()
        coroutine.wrap(nil)
      end,
      ["'resume' %(coroutine expected, got string%)"] = function()
        coroutine.resume("x")
      end,
      ["'close' %(coroutine expected, got table%)"] = function()
        coroutine.close({})
      end,
    }) do
      local ok, err = pcall(fn)
      assert.is_false(ok)
      assert.matches("coroutines_spec%.lua:%d+: bad argument #1 to " .. expected, err)
    end
  end)

  everywhere("know themselves", function()
    local co
    co = coroutine.create(function()
      assert.equal(co, (coroutine.running()))
      assert.is_true(coroutine.isyieldable())
      assert.equal("running", coroutine.status(co))
      assert.same({ false, "cannot resume non-suspended coroutine" }, { coroutine.resume(co) })
    end)
    assert.is_true(coroutine.resume(co))
  end)
end)

describe("in a task", function()
  it(
    "a generator may wait between its values",
    within(function()
      local seen = {}
      for value in
        coroutine.wrap(function()
          for index = 1, 3 do
            task.sleep(0.001)
            coroutine.yield(index)
          end
        end)
      do
        task.sleep(0.001)
        seen[#seen + 1] = value
      end
      assert.same({ 1, 2, 3 }, seen)
    end)
  )

  it(
    "generators of two tasks do not mix",
    within(function()
      local function numbers(from)
        return coroutine.wrap(function()
          for index = from, from + 4 do
            task.sleep(0.001)
            coroutine.yield(index)
          end
        end)
      end
      local function collect(from)
        local seen = {}
        for value in numbers(from) do
          seen[#seen + 1] = value
        end
        return seen
      end
      local lists = task.map({ 1, 100 }, collect)
      assert.same({ 1, 2, 3, 4, 5 }, lists[1])
      assert.same({ 100, 101, 102, 103, 104 }, lists[2])
    end)
  )

  it(
    "a wrap made outside may wait inside",
    within(function()
      local made = coroutine.wrap(function()
        task.sleep(0.001)
        return "value"
      end)
      local scope <close> = task.scope()
      assert.equal("value", scope:spawn(made):wait())
    end)
  )

  it(
    "nested coroutines wait at any depth that Lua allows",
    within(function()
      local function nest(depth)
        if depth == 0 then
          task.sleep(0.001)
          return "bottom"
        end
        return coroutine.wrap(nest)(depth - 1)
      end
      assert.equal("bottom", nest(150))
      local ok, err = pcall(nest, 400)
      assert.is_false(ok)
      assert.matches("C stack overflow", errors.text(err))
      task.sleep(0)
    end)
  )

  it(
    "the <close> of a coroutine that fails may wait",
    within(function()
      local log = {}
      local ok, err = pcall(coroutine.wrap(function()
        local _ <close> = setmetatable({}, {
          __close = function()
            task.sleep(0.001)
            log[#log + 1] = "cleaned"
          end,
        })
        error("boom", 0)
      end))
      assert.is_false(ok)
      assert.matches("boom", err)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "a coroutine that waits cannot be resumed or closed by another task",
    within(function()
      local scope <close> = task.scope()
      local co = coroutine.create(function()
        task.sleep(0.01)
        return "whole"
      end)
      local holder = scope:spawn("holder", function()
        return coroutine.resume(co)
      end)
      task.sleep(0.001)
      local ok, err = coroutine.resume(co)
      assert.is_false(ok)
      assert.matches("waits in task 'holder'", err)
      ok, err = pcall(coroutine.close, co)
      assert.is_false(ok)
      assert.matches("waits in task 'holder'", err.message)
      assert.same({ true, "whole" }, { holder:wait() })
    end)
  )

  it(
    "a yield at its top is a misuse at that line",
    within(function()
      local scope <close> = task.scope()
      local child = scope:spawn("top", function()
        return pcall(function()
          coroutine.yield(1)
        end)
      end)
      local ok, err = child:wait()
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("coroutines_spec%.lua:%d+: coroutine%.yield at the top of task 'top'", err.message)
    end)
  )

  it(
    "a foreign yield that reaches the scheduler ends the task with an error, its scopes included",
    within(function()
      local log = {}
      -- A yield of the stock function, as a module would have taken before ours was there.
      local _, stock_yield
      for index = 1, 20 do
        local name, value = debug.getupvalue(coroutine.yield, index)
        if name == "stock_yield" then
          stock_yield = value
        end
      end
      assert.is_function(stock_yield)
      local ok, err = pcall(function()
        local outer <close> = task.scope()
        outer:spawn("foreign", function()
          local scope <close> = task.scope()
          scope:spawn(function()
            local _ <close> = setmetatable({}, {
              __close = function()
                log[#log + 1] = "child closed"
              end,
            })
            task.sleep(60)
          end)
          task.sleep(0.001)
          stock_yield("something")
        end)
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("task 'foreign' yielded something to the scheduler", err.message)
      assert.matches("coroutines_spec%.lua:%d+", err.traceback)
      assert.same({ "child closed" }, log)
      assert.is_nil(_)
    end)
  )

  it(
    "the host is told which coroutine runs",
    within(function()
      -- The hook is the host's; what can be seen here is that resuming keeps coroutine.running true to itself.
      local inner
      local outer = coroutine.running()
      coroutine.wrap(function()
        inner = coroutine.running()
        task.sleep(0.001)
        assert.equal(inner, (coroutine.running()))
      end)()
      assert.equal(outer, (coroutine.running()))
      assert.not_equal(inner, outer)
    end)
  )
end)
