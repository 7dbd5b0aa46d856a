--- `ciranda test PATHS`: Busted inside a task, so that specs may wait.
---
--- `it`, `before_each` and the others wait as any code in a task does. Each test has a limit of time and is
--- checked for what it leaves running. The last line is `N passed, N failed`, with `, N skipped` when any
--- was: a test that calls `pending(reason)` is skipped, and is printed with its reason.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")

-- Loaded before Busted's first file: its insulation would make a new instance of these for each file.
for _, name in ipairs({ "ciranda.io.json", "ciranda.io.log", "ciranda.io.fs", "ciranda.io.process" }) do
  require(name)
end

local M = {}

--- Seconds a single test may take, unless CIRANDA_TEST_TIMEOUT says otherwise.
M.LIMIT = 120

local OUTPUT = "ciranda"

--- What is left of a test must be nothing: no open scope, no task.
local function check_left_over(owner, scopes_before, element)
  local left = {}
  while owner.scopes and #owner.scopes > scopes_before do
    local scope = owner.scopes[#owner.scopes]
    left[#left + 1] = tostring(scope)
    scope:_abandon()
  end
  if #left > 0 then
    error(("the test '%s' left open: %s"):format(tostring(element.name), table.concat(left, ", ")), 0)
  end
end

--- Give every test a limit of time: at its end, or when nothing can wake the test any more, its wait raises.
local function watch(busted, limit)
  local uv = require("luv")
  local owner, scopes_before, timer, request

  local function stop()
    if timer and not timer:is_closing() then
      timer:close()
    end
    if request then
      scheduler.withdraw(request)
    end
    timer, request = nil, nil
    scheduler.on_deadlock = nil
  end

  local function interrupt(err)
    if request then
      return false
    end
    request = { task = owner, err = err }
    scheduler.push_request(request)
    return true
  end

  busted.subscribe({ "test", "start" }, function(element)
    owner = task.current()
    scopes_before = owner.scopes and #owner.scopes or 0
    scheduler.on_deadlock = interrupt
    timer = uv.new_timer()
    uv.update_time()
    timer:start(math.ceil(limit * 1000), 0, function()
      interrupt(errors.new({
        code = "timeout",
        message = ("the test '%s' did not end within %g s\n%s"):format(
          tostring(element.name),
          limit,
          task.dump()
        ),
      }))
    end)
    timer:unref()
    return nil, true
  end)

  -- Before the output handler counts it: a test that leaves something running has not passed.
  busted.subscribe({ "test", "end" }, function(element)
    stop()
    check_left_over(owner, scopes_before, element)
    return nil, true
  end, { priority = 1 })
end

--- The output handler: a mark a test, then what failed, what was skipped, and the one last line.
local function output_handler(options)
  local busted = require("busted")
  local handler = require("busted.outputHandlers.base")()
  local MARKS = { success = "+", failure = "-", error = "*", pending = "." }

  local function place(entry)
    local trace = entry.element.trace or entry.trace
    return trace and trace.short_src and ("%s:%d"):format(trace.short_src, trace.currentline) or "?"
  end

  local function text(message)
    return message == nil and "no reason given" or errors.text(message)
  end

  function handler.test_end(_, _, status)
    io.write(MARKS[status] or "?")
    io.flush()
    return nil, true
  end

  function handler.outside_failed()
    io.write(MARKS.error)
    io.flush()
    return nil, true
  end

  function handler.suite_end()
    io.write("\n")
    for _, entry in ipairs(handler.pendings) do
      io.write(("SKIP: %s: %s (%s)\n"):format(entry.name, text(entry.message), place(entry)))
    end
    for _, list in ipairs({ handler.failures, handler.errors }) do
      for _, entry in ipairs(list) do
        io.write(("\nFAILED   %s (%s)\n%s\n"):format(entry.name, place(entry), text(entry.message)))
        local trace = entry.trace and entry.trace.traceback
        if trace and (options.verbose or entry.isError) then
          io.write(trace:gsub("^%s*\n", ""), "\n")
        end
      end
    end
    local failed = handler.failuresCount + handler.errorsCount
    local skipped = handler.pendingsCount
    io.write(
      ("%.2f s\n%d passed, %d failed%s\n"):format(
        handler.getDuration(),
        handler.successesCount,
        failed,
        skipped > 0 and (", %d skipped"):format(skipped) or ""
      )
    )
    io.flush()
    return nil, true
  end

  busted.subscribe({ "test", "end" }, handler.test_end, { predicate = handler.cancelOnPending })
  busted.subscribe({ "suite", "end" }, handler.suite_end)
  for _, kind in ipairs({ "error", "failure" }) do
    busted.subscribe({ kind, "file" }, handler.outside_failed)
    busted.subscribe({ kind, "describe" }, handler.outside_failed)
  end
  return handler
end

local function limit_of_a_test()
  local text = os.getenv("CIRANDA_TEST_TIMEOUT")
  if not text then
    return M.LIMIT
  end
  local seconds = tonumber(text)
  if not seconds or seconds <= 0 then
    errors.raise({
      code = "usage",
      message = ("CIRANDA_TEST_TIMEOUT: seconds expected, got '%s'"):format(text),
    })
  end
  return seconds
end

--- Make Busted's exit raise instead: os.exit in a task would leave handles of the loop behind.
local function replace_exit()
  local found, compatibility = pcall(require, "busted.compatibility")
  if not found then
    errors.raise({
      code = "unsupported",
      message = "ciranda test needs Busted (Debian: apt install lua-busted): " .. errors.text(compatibility),
    })
  end
  compatibility.exit = function(code)
    error({ exit = code }, 0)
  end
end

local function run_in_task(argv)
  local limit = limit_of_a_test()
  replace_exit()

  local path, cpath = package.path, package.cpath
  package.loaded["busted.outputHandlers." .. OUTPUT] = function(options)
    -- Busted has put "./src/?.lua" and the like in front by now; modules are not found by accident here.
    package.path, package.cpath = path, cpath
    local busted = require("busted")
    local watching = false
    busted.subscribe({ "suite", "start" }, function()
      if not watching then -- it comes again with --repeat
        watching = true
        watch(busted, limit)
      end
      return nil, true
    end)
    return output_handler(options)
  end

  local previous_arg = _G.arg
  local arguments = { [0] = "ciranda test", "--ignore-lua" }
  table.move(argv, 1, #argv, 2, arguments)
  _G.arg = arguments
  package.loaded["busted.runner"] = nil -- it runs once only
  local ok, err = xpcall(require("busted.runner"), function(err)
    if type(err) == "table" and err.exit then
      return err
    end
    return { message = errors.text(err), traceback = debug.traceback(nil, 2) }
  end, { standalone = false, output = OUTPUT })
  _G.arg = previous_arg
  if ok then
    return 0
  end
  if err.exit then
    return err.exit == 0 and 0 or 1
  end
  errors.raise({
    code = "failed",
    message = "Busted itself failed: " .. err.message,
    traceback = err.traceback,
  })
end

--- Run specs.
---@param argv string[] paths of files and directories, and options of Busted (`--filter=`, `--tags=`, ...)
---@return integer status 0 when all passed, else 1
function M.run(argv)
  if task.current() then
    return run_in_task(argv)
  end
  return task.run(run_in_task, argv)
end

return M
