local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local patience = dofile("tests/fixtures/patience.lua")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

--- Make a task fail below others, and return it when all have ended.
local function failed(fn)
  local child
  local ok, err = pcall(function()
    local scope <close> = task.scope()
    scope:spawn("parent", function()
      local inner <close> = task.scope()
      child = inner:spawn("child", fn)
      task.sleep(60)
    end)
  end)
  assert.is_false(ok)
  return child, err
end

describe("the traceback of a failed task", function()
  it(
    "shows its own frames, then who waited for it, up to the root",
    within(function()
      local function deep()
        task.sleep(0.001)
        error("boom")
      end
      local child = failed(function()
        deep()
      end)
      local text = child.traceback
      local own = text:find("in task 'child'", 1, true)
      local parent = text:find("waited for by task 'parent':", 1, true)
      assert.is_number(own)
      assert.is_number(parent)
      assert.is_true(own < parent)
      assert.matches("trace_spec%.lua:%d+: in .-'deep'", text:sub(1, own))
      assert.matches("trace_spec%.lua:%d+:", text:sub(parent))
      assert.not_matches("ciranda/task/", text)
    end)
  )

  it(
    "is on the error itself when it is one of ours, where it was raised",
    within(function()
      local _, err = failed(function()
        local function raise()
          errors.raise({ code = "auth", message = "no key fits" })
        end
        local ok, caught = pcall(function()
          raise()
          return nil
        end)
        assert.is_false(ok)
        error(caught, 0)
      end)
      assert.is_true(errors.is(err, "auth"))
      assert.matches("in .-'raise'", err.traceback)
      assert.matches("waited for by task 'parent'", err.traceback)
    end)
  )

  it(
    "is kept for tables that have no place for it",
    within(function()
      local value = { code = "E1" }
      local child, err = failed(function()
        error(value)
      end)
      assert.equal(value, err)
      assert.same({ code = "E1" }, value)
      assert.matches("trace_spec%.lua:%d+", child.traceback)
    end)
  )

  it(
    "goes through nested coroutines",
    within(function()
      local function innermost()
        task.sleep(0.001)
        error("boom")
      end
      local child = failed(function()
        local function consumer()
          local generator = coroutine.wrap(function()
            innermost()
          end)
          generator()
        end
        consumer()
      end)
      local inner = child.traceback:find("'innermost'", 1, true)
      local outer = child.traceback:find("'consumer'", 1, true)
      assert.is_number(inner)
      assert.is_number(outer)
      assert.is_true(inner < outer)
    end)
  )
end)

-- luacheck: push ignore 122
describe("the tracebacks of many tasks", function()
  local traceback, getinfo = debug.traceback, debug.getinfo

  after_each(function()
    debug.traceback, debug.getinfo = traceback, getinfo
  end)

  it(
    "whose time is up in one turn cost no search for names, and who waits for all of them is looked at once",
    within(function()
      local names, looks = 0, {}
      debug.traceback = function(...)
        names = names + 1
        return traceback(...)
      end
      debug.getinfo = function(co, level, ...)
        if type(co) == "thread" and level == 0 then
          looks[co] = (looks[co] or 0) + 1
        end
        return getinfo(co, level, ...)
      end
      local owner, problems = coroutine.running(), {}
      local list = {}
      for place = 1, 50 do
        list[place] = place
      end
      task.map(list, function(place)
        local function asleep()
          task.sleep(60)
        end
        local ok, problem = pcall(task.timeout, 0.05, function()
          asleep()
        end)
        assert.is_false(ok)
        problems[place] = problem.traceback
      end)
      -- Who waits is below all that runs specs.
      assert.is_true(names <= 2, ("%d searches"):format(names))
      assert.is_true((looks[owner] or 0) <= 2, ("%s looks"):format(looks[owner]))
      for place = 1, 50 do
        assert.matches("trace_spec%.lua:%d+: in .-'asleep'", problems[place])
        assert.matches("waited for by task.-\n.-trace_spec%.lua:%d+: in ", problems[place])
        assert.not_matches("ciranda/task/", problems[place])
      end
    end)
  )
end)
-- luacheck: pop

describe("task.dump", function()
  it(
    "shows every task below who waits for it, what it waits for, and where",
    within(function()
      local semaphore = task.semaphore(1)
      local text
      do
        local scope <close> = task.scope()
        scope:spawn("sleeper", function()
          local inner <close> = task.scope()
          inner:spawn("inner sleeper", task.sleep, 60)
        end)
        scope:spawn("holder", function()
          semaphore:with(task.sleep, 60)
        end)
        scope:spawn("in line", function()
          coroutine.wrap(function()
            semaphore:acquire()
          end)()
        end)
        patience.settle()
        text = task.dump()
        local lines = select(2, text:gsub("\n", "\n")) + 1
        local short = task.dump(3)
        assert.matches(("\n... and %d lines more$"):format(lines - 3), short)
        assert.equal(3, select(2, short:gsub("\n", "\n")))
        assert.not_matches("more$", task.dump(lines))
        scope:cancel()
      end
      assert.matches(
        "task %d+ 'sleeper': waiting for [%d.]+ s: the scope opened at [^\n]*trace_spec%.lua:%d+",
        text
      )
      assert.matches("\n  +task %d+ 'inner sleeper': waiting for [%d.]+ s: sleep of 60 s", text)
      assert.matches("'in line': waiting for [%d.]+ s: a semaphore %(0 of 1 free, 1 waiting%)", text)
      assert.matches("at [^\n]*trace_spec%.lua:%d+: in function", text)
      assert.matches(": running", text)
    end)
  )
end)
