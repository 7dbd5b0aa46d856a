local errors = require("ciranda.io.error")
local task = require("ciranda.task")
local uv = require("luv")

--- A test body that runs in a task, under plain Busted as well as under `ciranda test`.
local function within(fn)
  return function()
    return task.run(fn)
  end
end

describe("task.await", function()
  it(
    "returns what the completion was given, nils included",
    within(function()
      local values = table.pack(task.await(function(done)
        done(nil, 1, nil, 3, nil)
      end))
      assert.same({ 1, nil, 3, nil, n = 4 }, values)
    end)
  )

  it(
    "may be completed before the start function has returned, and still lets the loop turn",
    within(function()
      local turned = false
      local timer = uv.new_timer()
      timer:start(0, 0, function()
        turned = true
        timer:close()
      end)
      while not turned do
        task.await(function(done)
          done()
        end)
      end
      assert.is_true(turned)
    end)
  )

  it(
    "drops a second and a late completion",
    within(function()
      local kept
      local first = task.await(function(done)
        kept = done
        done(nil, "one")
        done(nil, "two")
      end)
      assert.equal("one", first)
      kept(nil, "three")
      assert.equal(
        "fresh",
        task.await(function(done)
          kept(nil, "four")
          done(nil, "fresh")
        end)
      )
    end)
  )

  it(
    "never resumes the task inside the completion",
    within(function()
      local order = {}
      local timer = uv.new_timer()
      task.await(function(done)
        timer:start(1, 0, function()
          timer:close()
          done()
          order[#order + 1] = "callback ended"
        end)
      end)
      order[#order + 1] = "resumed"
      assert.same({ "callback ended", "resumed" }, order)
    end)
  )

  it(
    "raises errors as they are: tables keep their identity, false is an error",
    within(function()
      local value = { anything = true }
      local ok, err = pcall(task.await, function(done)
        done(value)
      end)
      assert.is_false(ok)
      assert.equal(value, err)
      ok, err = pcall(task.await, function(done)
        done(false)
      end)
      assert.is_false(ok)
      assert.is_false(err)
    end)
  )

  it(
    "goes on after a start function that raises",
    within(function()
      local ok, err = pcall(task.await, function()
        error("cannot start", 0)
      end)
      assert.is_false(ok)
      assert.equal("cannot start", err)
      task.sleep(0)
    end)
  )

  it("is refused outside tasks with a hint", function()
    local co = coroutine.create(function()
      return pcall(task.sleep, 0)
    end)
    if task.current() then
      return -- this test's body is a task; the refusal is seen in root_spec's own process
    end
    local _, ok, err = coroutine.resume(co)
    assert.is_false(ok)
    assert.is_true(errors.is(err, "misuse"))
    assert.matches("outside a task", err.message)
    assert.matches("task%.run", err.message)
  end)
end)

describe("a wait where Lua cannot suspend", function()
  local function refused(fn, pattern)
    return within(function()
      local seen
      local function attempt(...)
        local ok, err = pcall(task.sleep, 0)
        assert.is_false(ok)
        seen = err
        return ...
      end
      fn(attempt)
      assert.is_true(errors.is(seen, "misuse"))
      assert.matches(pattern, seen.message)
      assert.matches("await_spec%.lua:%d+:", seen.message)
      task.sleep(0) -- the task itself is unharmed
    end)
  end

  it(
    "names table.sort",
    refused(function(attempt)
      table.sort({ 2, 1 }, function(a, b)
        attempt()
        return a < b
      end)
    end, "the comparison given to table%.sort")
  )

  it(
    "names string.gsub",
    refused(function(attempt)
      ("x"):gsub("x", attempt)
    end, "the function given to string%.gsub")
  )

  it(
    "names tostring",
    refused(function(attempt)
      tostring(setmetatable({}, {
        __tostring = function()
          attempt()
          return ""
        end,
      }))
    end, "tostring %(a __tostring metamethod%)")
  )

  it(
    "names require when it is the stock one",
    refused(function(attempt)
      local stock
      for _, fn in ipairs({ require }) do
        stock = debug.getinfo(fn, "S").what == "C" and fn
      end
      if not stock then
        -- The host has replaced it: the message is tested with gsub's like here.
        stock = function()
          ("x"):gsub("x", attempt)
        end
        return stock()
      end
      package.preload["ciranda.test.waits"] = function()
        attempt()
        return true
      end
      stock("ciranda.test.waits")
      package.loaded["ciranda.test.waits"] = nil
      package.preload["ciranda.test.waits"] = nil
    end, debug.getinfo(require, "S").what == "C" and "require %(a module that waits" or "string%.gsub")
  )

  it(
    "names coroutine.close",
    refused(function(attempt)
      local co = coroutine.create(function()
        local guard <close> = setmetatable({}, {
          __close = function()
            attempt()
          end,
        })
        coroutine.yield(guard)
      end)
      coroutine.resume(co)
      coroutine.close(co)
    end, "coroutine%.close %(a __close metamethod%)")
  )

  it(
    "names the message handler of xpcall",
    refused(function(attempt)
      xpcall(function()
        error("x")
      end, attempt)
    end, "the message handler of xpcall")
  )

  it(
    "sees through a coroutine that could be suspended itself",
    within(function()
      local message
      ("x"):gsub("x", function()
        local generator = coroutine.wrap(function()
          local _, err = pcall(task.sleep, 0)
          message = err.message
        end)
        generator()
      end)
      assert.matches("the function given to string%.gsub", message)
    end)
  )

  it(
    "is refused in a coroutine resumed by a callback of the loop",
    within(function()
      local result
      task.await(function(done)
        local timer = uv.new_timer()
        timer:start(0, 0, function()
          timer:close()
          local co = coroutine.create(function()
            return pcall(task.sleep, 0)
          end)
          result = table.pack(coroutine.resume(co))
          done()
        end)
      end)
      assert.is_true(result[1])
      assert.is_false(result[2])
      assert.matches("outside a task", result[3].message)
    end)
  )
end)

describe("waits work through", function()
  it(
    "pcall, xpcall, iterators, metamethods and __close",
    within(function()
      local log = {}
      local function note(text)
        task.sleep(0)
        log[#log + 1] = text
      end
      pcall(note, "pcall")
      xpcall(note, debug.traceback, "xpcall")
      for text in
        function(_, last)
          task.sleep(0)
          return not last and "iterator" or nil
        end
      do
        note(text)
      end
      local object = setmetatable({}, {
        __index = function(_, key)
          note("__index " .. key)
          return key
        end,
        __add = function()
          note("__add")
          return 1
        end,
        __close = function()
          note("__close")
        end,
      })
      do
        local closing <close> = object
        assert.equal("field", closing.field)
        assert.equal(1, object + 1)
      end
      load("return ...")(note("load"))
      assert.same({ "pcall", "xpcall", "iterator", "__index field", "__add", "__close", "load" }, log)
    end)
  )
end)

describe("task.call", function()
  it(
    "passes arguments, nils included, and a callback last",
    within(function()
      local function engine(...)
        local args = table.pack(...)
        local callback = args[args.n]
        local timer = uv.new_timer()
        timer:start(0, 0, function()
          timer:close()
          callback(nil, { args[1], args[2], args[3], n = args.n - 1 })
        end)
        return { cancel = function() end }
      end
      assert.same({ "a", nil, "c", n = 3 }, task.call(engine, "a", nil, "c"))
    end)
  )

  it(
    "makes an error of what the engine passed",
    within(function()
      local ok, err = pcall(task.call, function(callback)
        callback({ code = "refused", message = "connection refused", phase = "connect" })
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "refused"))
      assert.equal("connect", err.phase)
      assert.is_string(err.traceback)
    end)
  )

  it(
    "cancels through the handle and waits for the callback",
    within(function()
      local order = {}
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        task.call(function(callback)
          return {
            cancel = function()
              order[#order + 1] = "asked"
              local timer = uv.new_timer()
              timer:start(5, 0, function()
                timer:close()
                order[#order + 1] = "told"
                callback({ code = "cancelled", message = "cancelled" })
              end)
            end,
          }
        end)
      end)
      task.sleep(0)
      child:cancel("test")
      local ok, err = pcall(child.wait, child)
      order[#order + 1] = "ended"
      assert.is_false(ok)
      assert.is_true(errors.is(err, "cancelled"))
      assert.same({ "asked", "told", "ended" }, order)
    end)
  )
end)
