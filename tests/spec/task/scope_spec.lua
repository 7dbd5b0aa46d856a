local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

--- Something that notes when it is closed, after a wait.
local function closing(log, text)
  return setmetatable({}, {
    __close = function()
      task.sleep(0.005)
      log[#log + 1] = text
    end,
  })
end

describe("a scope", function()
  it(
    "ends when its children have ended",
    within(function()
      local log = {}
      do
        local scope <close> = task.scope()
        scope:spawn(function()
          task.sleep(0.01)
          log[#log + 1] = "child"
        end)
        log[#log + 1] = "block"
      end
      log[#log + 1] = "after"
      assert.same({ "block", "child", "after" }, log)
    end)
  )

  it(
    "starts children in order, and not before the parent waits",
    within(function()
      local log = {}
      do
        local scope <close> = task.scope()
        for index = 1, 3 do
          scope:spawn(function(...)
            log[#log + 1] = table.concat({ ... }, " ")
          end, "child", index)
        end
        log[#log + 1] = "block"
      end
      assert.same({ "block", "child 1", "child 2", "child 3" }, log)
    end)
  )

  it(
    "gives the values of a child to any number of waiters, also late ones",
    within(function()
      local scope <close> = task.scope()
      local child = scope:spawn("named", function()
        task.sleep(0.001)
        return 1, nil, 3
      end)
      assert.equal("named", child.name)
      local waiters = task.all({
        function()
          return select("#", child:wait())
        end,
        function()
          return (child:wait())
        end,
      })
      assert.same({ 3, 1, n = 2 }, waiters)
      assert.equal("done", child:status())
      assert.same({ 1, nil, 3 }, { child:wait() })
    end)
  )

  it(
    "on the first failure cancels the siblings, waits for their clean-up, and rises",
    within(function()
      local log = {}
      local failure = { code = "E1" }
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        for _, name in ipairs({ "a", "b" }) do
          scope:spawn(name, function()
            local _ <close> = closing(log, name .. " cleaned")
            task.sleep(60)
          end)
        end
        scope:spawn("fails", function()
          task.sleep(0.001)
          error(failure)
        end)
      end)
      assert.is_false(ok)
      assert.equal(failure, err)
      table.sort(log)
      assert.same({ "a cleaned", "b cleaned" }, log)
    end)
  )

  it(
    "interrupts its block, once, when a child fails",
    within(function()
      local inside, waited
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn("child", function()
          error("boom", 0)
        end)
        local _
        _, inside = pcall(task.sleep, 60)
        task.sleep(0.001)
        waited = true
      end)
      assert.is_false(ok)
      assert.equal("boom", err)
      assert.is_true(errors.is(inside, "cancelled"))
      assert.matches("child", inside.message)
      assert.matches("boom", inside.message)
      assert.is_true(waited)
      task.sleep(0) -- nothing of it is left for later waits
    end)
  )

  it(
    "cancels its children when its block fails, and the block's error rises",
    within(function()
      local log = {}
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          local _ <close> = closing(log, "cleaned")
          task.sleep(60)
        end)
        task.sleep(0)
        error("the block", 0)
      end)
      assert.is_false(ok)
      assert.equal("the block", err)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "keeps the failure of a child that failed before its block did",
    within(function()
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          error("first", 0)
        end)
        pcall(task.sleep, 60)
        error("second", 0)
      end)
      assert.is_false(ok)
      assert.equal("first", err)
    end)
  )

  it(
    "notes failures of clean-up on the first error",
    within(function()
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          local _ <close> = setmetatable({}, {
            __close = function()
              error("clean-up failed", 0)
            end,
          })
          task.sleep(60)
        end)
        scope:spawn(function()
          errors.raise({ code = "failed", message = "first" })
        end)
      end)
      assert.is_false(ok)
      assert.equal("first", err.message)
      assert.same({ "clean-up failed" }, err.suppressed)
      assert.matches("also: clean%-up failed", err:describe())
    end)
  )

  it(
    "rises from a child that raises nil",
    within(function()
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          error(nil)
        end)
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "failed"))
      assert.matches("error%(nil%)", err.message)
    end)
  )

  it(
    "rises from a child that overflows the stack",
    within(function()
      local function endless()
        return 1 + endless()
      end
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(endless)
      end)
      assert.is_false(ok)
      assert.matches("overflow", errors.text(err))
      task.sleep(0)
    end)
  )

  it(
    "does not fail when its children are cancelled by it",
    within(function()
      local log = {}
      do
        local scope <close> = task.scope()
        scope:spawn(function()
          local _ <close> = closing(log, "cleaned")
          task.sleep(60)
        end)
        task.sleep(0)
        scope:cancel("enough")
      end
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "cancels what is spawned after it was cancelled",
    within(function()
      local ran = false
      local child
      do
        local scope <close> = task.scope()
        scope:cancel("enough")
        child = scope:spawn(function()
          ran = true
        end)
      end
      assert.is_false(ran)
      assert.equal("cancelled", child:status())
    end)
  )

  it(
    "can be waited for and used again before it ends",
    within(function()
      local log = {}
      local scope <close> = task.scope()
      scope:spawn(function()
        task.sleep(0.001)
        log[#log + 1] = 1
      end)
      scope:wait()
      log[#log + 1] = 2
      scope:spawn(function()
        log[#log + 1] = 3
      end)
      scope:wait()
      assert.same({ 1, 2, 3 }, log)
    end)
  )

  it(
    "raises the failure from scope:wait",
    within(function()
      local inside
      local ok, err = pcall(function()
        local scope <close> = task.scope()
        scope:spawn(function()
          error("boom", 0)
        end)
        local _
        _, inside = pcall(scope.wait, scope)
      end)
      assert.equal("boom", inside)
      assert.is_false(ok)
      assert.equal("boom", err)
    end)
  )

  it(
    "may be given to other tasks, which spawn in it",
    within(function()
      local log = {}
      do
        local scope <close> = task.scope()
        scope:spawn(function()
          scope:spawn(function()
            log[#log + 1] = "grandchild"
          end)
        end)
      end
      assert.same({ "grandchild" }, log)
    end)
  )

  it(
    "refuses to be used after its end",
    within(function()
      local kept
      do
        local scope <close> = task.scope()
        kept = scope
      end
      local ok, err = pcall(function()
        kept:spawn(function() end)
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches(
        "scope_spec%.lua:%d+: scope:spawn: the scope opened at .*scope_spec%.lua:%d+ has ended",
        err.message
      )
      ok, err = pcall(kept.wait, kept)
      assert.is_false(ok)
      assert.matches("has ended", err.message)
    end)
  )

  it(
    "refuses what is no function, at the caller's line",
    within(function()
      local scope <close> = task.scope()
      local ok, err = pcall(function()
        scope:spawn("name only")
      end)
      assert.is_false(ok)
      assert.matches("^[^:]*scope_spec%.lua:%d+: scope:spawn: a function expected, got nil", err.message)
    end)
  )

  it(
    "left open is a misuse that names where it was opened, after its children were cancelled",
    within(function()
      local log = {}
      local ok, err = pcall(function()
        local outer <close> = task.scope()
        outer:spawn(function()
          local forgotten = task.scope()
          forgotten:spawn(function()
            local _ <close> = closing(log, "cleaned")
            task.sleep(60)
          end)
          task.sleep(0.001)
        end)
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("scope_spec%.lua:%d+: this scope was still open", err.message)
      assert.same({ "cleaned" }, log)
    end)
  )

  it(
    "that ends where nothing can wait leaves its children to the end of the task",
    within(function()
      local log = {}
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        local co = coroutine.create(function()
          local inner <close> = task.scope()
          inner:spawn(function()
            local _ <close> = closing(log, "cleaned")
            task.sleep(60)
          end)
          coroutine.yield(inner)
        end)
        coroutine.resume(co)
        task.sleep(0.001)
        local ok, err = coroutine.close(co)
        log[#log + 1] = tostring(ok)
        assert.matches("coroutine%.close", tostring(err))
      end)
      pcall(child.wait, child)
      assert.same({ "false", "cleaned" }, log)
      pcall(scope.wait, scope)
    end)
  )
end)

describe("task.spawn", function()
  it(
    "uses the innermost open scope",
    within(function()
      local log = {}
      local outer <close> = task.scope()
      do
        local inner <close> = task.scope()
        task.spawn(function()
          task.sleep(0.001)
          log[#log + 1] = "in the inner one"
        end)
        assert.is_table(inner)
      end
      assert.is_table(outer)
      assert.same({ "in the inner one" }, log)
    end)
  )

  it(
    "is refused without one, with a message that says what to write",
    within(function()
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        return pcall(task.spawn, function() end)
      end)
      local ok, err = child:wait()
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("local s <close> = task%.scope%(%)", err.message)
    end)
  )
end)

describe("task:wait", function()
  it(
    "refuses to wait for oneself",
    within(function()
      local ok, err = pcall(function()
        task.current():wait()
      end)
      assert.is_false(ok)
      assert.matches("would wait for itself", err.message)
    end)
  )

  it(
    "refuses to wait for a task that waits for us",
    within(function()
      local outer = task.current()
      local scope <close> = task.scope()
      local child = scope:spawn("child", function()
        return task.map({ 1 }, function()
          return select(2, pcall(outer.wait, outer))
        end)[1]
      end)
      local err = child:wait()
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("which cannot end before it", err.message)
    end)
  )

  it(
    "refuses a circle of waits",
    within(function()
      local a, b
      local scope <close> = task.scope()
      a = scope:spawn("a", function()
        return pcall(function()
          return b:wait()
        end)
      end)
      b = scope:spawn("b", function()
        return pcall(function()
          return a:wait()
        end)
      end)
      local _, err = b:wait()
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("would wait for itself, through task 'a'", err.message)
    end)
  )

  it(
    "raises what the task raised, the very same table",
    within(function()
      local failure = setmetatable({}, {
        __tostring = function()
          return "odd"
        end,
      })
      pcall(function()
        local scope <close> = task.scope()
        local child = scope:spawn(function()
          error(failure)
        end)
        local ok, err = pcall(child.wait, child)
        assert.is_false(ok)
        assert.equal(failure, err)
      end)
    end)
  )
end)

describe("ten thousand tasks", function()
  it(
    "run, wait and end",
    within(function()
      local ended = 0
      do
        local scope <close> = task.scope()
        for _ = 1, 10000 do
          scope:spawn(function()
            task.sleep(0.001)
            ended = ended + 1
          end)
        end
      end
      assert.equal(10000, ended)
    end)
  )

  it(
    "are cancelled at once",
    within(function()
      local cleaned = 0
      do
        local scope <close> = task.scope()
        for _ = 1, 10000 do
          scope:spawn(function()
            local _ <close> = setmetatable({}, {
              __close = function()
                cleaned = cleaned + 1
              end,
            })
            task.sleep(60)
          end)
        end
        task.sleep(0)
        scope:cancel()
      end
      assert.equal(10000, cleaned)
    end)
  )
end)
