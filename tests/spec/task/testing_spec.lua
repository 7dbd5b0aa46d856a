local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

--- Run specs, given by file name, in a process of their own, as `ciranda test` does.
---@param specs table<string, string>
---@param arguments string[]?
---@param limit number? seconds for each test: few only where they are to be over
---@return ciranda.process.Result
---@return string last the last line
local function run_specs(specs, arguments, limit)
  return task.run(function()
    local directory = fs.tempdir()
    local _ <close> = setmetatable({}, {
      __close = function()
        fs.remove_tree(directory)
      end,
    })
    for name, text in pairs(specs) do
      fs.write(fs.join(directory, name), 'local task = require("ciranda.task")\n' .. text)
    end
    local script = fs.join(directory, "run.lua")
    fs.write(script, 'os.exit(require("ciranda.cli.testing").run(arg))')
    local env = { CIRANDA_TEST_TIMEOUT = limit or 30 }
    local argv = { uv.exepath(), script, directory, env = env, timeout = 60 }
    table.move(arguments or {}, 1, #(arguments or {}), #argv + 1, argv)
    local result = process.run(argv)
    return result, result.stdout:match("([^\n]*)\n$")
  end)
end

describe("ciranda test", function()
  it("lets everything wait, and ends with the one line", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        local order = {}
        describe("waiting", function()
          setup(function() task.sleep(0.001) order[#order + 1] = "setup" end)
          before_each(function() task.sleep(0.001) order[#order + 1] = "before" end)
          after_each(function() task.sleep(0.001) end)
          teardown(function() task.sleep(0.001) end)
          it("works", function() task.sleep(0.001) assert.same({ "setup", "before" }, order) end)
          it("works in has_error", function() assert.has_error(function() task.sleep(0.001) error("x") end) end)
        end)]],
    })
    assert.equal(0, result.code)
    assert.equal("2 passed, 0 failed", last)
    assert.equal("", result.stderr)
  end)

  it("counts failures and errors, shows them, and returns 1", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        describe("bad", function()
          it("fails", function() task.sleep(0.001) assert.equal("left", "right") end)
          it("raises", function() task.sleep(0.001) error({ code = "E1" }) end)
          it("is fine", function() end)
        end)]],
    })
    assert.equal(1, result.code)
    assert.equal("1 passed, 2 failed", last)
    assert.matches("FAILED   bad fails %([^\n]*a_spec%.lua:3%)", result.stdout)
    assert.matches("left", result.stdout)
    assert.matches("FAILED   bad raises", result.stdout)
    assert.matches("E1", result.stdout)
  end)

  it("lists what was skipped, with the reason", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        it("needs a pty", function() pending("this account has no pty") end)
        pending("not written yet")
        it("is fine", function() end)]],
    })
    assert.equal(0, result.code)
    assert.equal("1 passed, 0 failed, 2 skipped", last)
    assert.matches("SKIP: needs a pty: [^\n]*this account has no pty", result.stdout)
    assert.matches("SKIP: not written yet", result.stdout)
  end)

  it("ends a test that hangs, and goes on", function()
    -- A test that does not wait has no time to be over, however busy the machine is.
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        it("hangs", function() task.sleep(60) end)
        it("is fine", function() end)]],
    }, nil, 0.5)
    assert.equal(1, result.code)
    assert.equal("1 passed, 1 failed", last)
    assert.matches("the test 'hangs' did not end within 0.5 s", result.stdout)
  end)

  it("ends a test that nothing can wake, and goes on", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        it("waits for nobody", function() task.event():wait() end)
        it("is fine", function() task.sleep(0.001) end)]],
    })
    assert.equal(1, result.code)
    assert.equal("1 passed, 1 failed", last)
    assert.matches("deadlock", result.stdout)
  end)

  it("fails a test that leaves a scope open, and closes it", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        local cleaned
        it("leaves", function()
          local scope = task.scope()
          scope:spawn(function()
            local closing <close> = setmetatable({}, { __close = function() cleaned = true end })
            task.sleep(60)
          end)
          task.sleep(0.001)
        end)
        it("sees it cleaned", function() assert.is_true(cleaned) end)]],
    })
    assert.equal(1, result.code)
    assert.equal("1 passed, 1 failed", last)
    assert.matches("the test 'leaves' left open: the scope opened at [^\n]*a_spec%.lua:4", result.stdout)
  end)

  it("keeps one instance of the scheduler, whatever a spec file loads", function()
    local text = [[
      it("is the same", function()
        _G.first = _G.first or require("ciranda.task.scheduler")
        assert.equal(require("ciranda.task.scheduler").current, task.current())
        local fresh = require("ciranda.io.error").new({ code = "timeout", message = "x" })
        assert.is_true(require("ciranda.io.error").is(fresh, "timeout"))
        task.sleep(0.001)
      end)]]
    local result, last = run_specs({ ["a_spec.lua"] = text, ["b_spec.lua"] = text })
    assert.equal(0, result.code)
    assert.equal("2 passed, 0 failed", last)
  end)

  it("fails when a file does not load, or there is none", function()
    local result, last = run_specs({ ["a_spec.lua"] = "this is no Lua" })
    assert.equal(1, result.code)
    assert.equal("0 passed, 1 failed", last)
    assert.matches("a_spec%.lua:2: syntax error", result.stdout)
    result = run_specs({})
    assert.equal(1, result.code)
  end)

  it("passes Busted's options on", function()
    local result, last = run_specs({
      ["a_spec.lua"] = [[
        it("one", function() end)
        it("two", function() end)]],
    }, { "--filter=two" })
    assert.equal(0, result.code)
    assert.equal("1 passed, 0 failed", last)
    result = run_specs({ ["a_spec.lua"] = 'it("one", function() end)' }, { "--output=TAP" })
    assert.equal(0, result.code)
    assert.matches("ok 1 %- one", result.stdout)
  end)
end)
