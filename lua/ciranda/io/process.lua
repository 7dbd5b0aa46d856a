--- Other programs, started from a list of arguments, never from a shell's line.
---
---     local result = process.run({ "git", "rev-parse", "HEAD", cwd = dir }):check()
---
--- A program runs in a session and process group of its own. When its time is up, or its task is cancelled,
--- the group gets TERM, after a grace KILL; the call returns when the program has ended and its output is
--- closed. `foreground = true` leaves it in our group, on our terminal.

local uv = require("luv")
local child = require("ciranda.io.child")
local combine = require("ciranda.task.combine")
local errors = require("ciranda.io.error")
local scopes = require("ciranda.task.scope")

local M = {
  --- Keep what is written, for the result.
  CAPTURE = child.CAPTURE,
  --- A stream to read from or write to; for `spawn`.
  PIPE = child.PIPE,
  --- Our own stream.
  INHERIT = child.INHERIT,
  --- Nowhere.
  DISCARD = child.DISCARD,
  --- For standard error: where standard output goes.
  STDOUT = child.STDOUT,
}

local OPTIONS = {
  cwd = true,
  env = true,
  clear_env = true,
  stdin = true,
  stdout = true,
  stderr = true,
  on_stdout = true,
  on_stderr = true,
  timeout = true,
  grace = true,
  max_output = true,
  foreground = true,
}

---@class ciranda.process.Options
---@field [integer] string the program, looked up in PATH, and its arguments
---@field cwd string? working directory
---@field env table<string, string|false>? added to our environment; false takes a variable out
---@field clear_env boolean? begin with an empty environment
---@field stdin any a string; or a function called for more until it returns nil; process.INHERIT for ours.
---       Without it the program reads end of file.
---@field stdout any process.CAPTURE (as without it), PIPE (only `spawn`), INHERIT, DISCARD, or a descriptor
---@field stderr any the same, or process.STDOUT: where standard output goes
---@field on_stdout (fun(chunk: string))? called with what comes, in order; the program waits meanwhile
---@field on_stderr (fun(chunk: string))?
---@field timeout number? seconds until it is ended, with the error "timeout"
---@field grace number? seconds between TERM and KILL; 5
---@field max_output integer? bytes kept of each stream; 64 MiB
---@field foreground boolean? stay in our process group and session, for programs that use the terminal

local function check(argv, what)
  local level = errors.level_outside("ciranda/io/")
  if type(argv) ~= "table" then
    errors.misuse(
      level,
      "%s: a table expected, got %s; a shell's line must be {'sh', '-c', line}",
      what,
      type(argv)
    )
  end
  local count = #argv
  if count == 0 then
    errors.misuse(level, "%s: no program given", what)
  end
  for index = 1, count do
    local value = argv[index]
    if math.type(value) == "integer" then
      value = tostring(value)
    end
    if type(value) ~= "string" then
      errors.misuse(level, "%s: argument %d must be a string, got %s", what, index, type(value))
    elseif value:find("\0", 1, true) then
      errors.misuse(level, "%s: argument %d holds a NUL", what, index)
    end
  end
  for key in pairs(argv) do
    if not (math.type(key) == "integer" and key >= 1 and key <= count) and not OPTIONS[key] then
      errors.misuse(level, "%s: unknown option '%s'", what, tostring(key))
    end
  end
  for _, name in ipairs({ "timeout", "grace" }) do
    local value = argv[name]
    if value ~= nil and (type(value) ~= "number" or value ~= value or value < 0) then
      errors.misuse(level, "%s: %s must be a number of at least 0, got %s", what, name, tostring(value))
    end
  end
end

local function environment(options)
  if not options.env and not options.clear_env then
    return nil
  end
  local merged = options.clear_env and {} or uv.os_environ()
  for name, value in pairs(options.env or {}) do
    if type(name) ~= "string" or name == "" or name:find("[=\0]") then
      errors.misuse(
        errors.level_outside("ciranda/io/"),
        "process: '%s' is no variable's name",
        tostring(name)
      )
    end
    if value == false then
      merged[name] = nil
    else
      merged[name] = tostring(value)
    end
  end
  local list = {}
  for name, value in pairs(merged) do
    list[#list + 1] = name .. "=" .. value
  end
  table.sort(list)
  return list
end

--- Start a program. Write `local p <close> = process.spawn{...}`: leaving the block ends it, and waits for
--- that.
---@param argv ciranda.process.Options stdout and stderr may be process.PIPE here, to be read through
---       `p.stdout`, and stdin too, to be written through `p.stdin`; what needs a task of its own
---       (`on_stdout`, `on_stderr`, `timeout`, standard input from a string or a function) is for `run`
---@return ciranda.Process
function M.spawn(argv)
  check(argv, "process.spawn")
  for _, name in ipairs({ "on_stdout", "on_stderr", "timeout" }) do
    if argv[name] ~= nil then
      errors.misuse(2, "process.spawn: %s is for process.run", name)
    end
  end
  if argv.stdin ~= nil and argv.stdin ~= M.PIPE and argv.stdin ~= M.INHERIT and argv.stdin ~= M.DISCARD then
    errors.misuse(
      2,
      "process.spawn: stdin must be process.PIPE, INHERIT or DISCARD; process.run takes a string"
    )
  end
  return child.start(argv, environment(argv))
end

-- Running ---------------------------------------------------------------------------------------------------

--- Feed standard input from a string or a function.
local function feed(process, source)
  local writer = process.writer
  local ok, err = pcall(function()
    if type(source) == "string" then
      writer:write(source)
    else
      for chunk in source do
        writer:write(chunk)
      end
    end
  end)
  writer:close()
  -- A program need not read all it is offered.
  if not ok and not errors.is(err, "closed", "reset") then
    error(err, 0)
  end
end

local function run(argv, started)
  local process <close> = child.start(argv, environment(argv))
  started.process = process
  do
    local scope <close> = scopes.new()
    local feeder = process.writer and scope:spawn("standard input of " .. argv[1], feed, process, argv.stdin)
    for _, what in ipairs({ "stdout", "stderr" }) do
      local callback = argv["on_" .. what]
      if callback then
        local reader = process["reader_" .. what]
        scope:spawn(what .. " of " .. argv[1], function()
          local _ <close> = setmetatable({}, {
            __close = function()
              reader:discard() -- when the callback fails, the program must still be able to end
            end,
          })
          for chunk in reader:values() do
            callback(chunk)
          end
        end)
      end
    end
    process:wait()
    if feeder then
      feeder:cancel("the program has ended") -- it may be waiting for what there is to write
    end
  end
  return process.result
end

--- Run a program to its end.
---@async
---@param argv ciranda.process.Options
---@return ciranda.process.Result result whatever its exit status; `:check()` raises for one that is not 0
--- Raises "not_found", "permission", ... when it cannot be started; "timeout" when its time is up, with what
--- it wrote until then as the error's `result`.
function M.run(argv)
  check(argv, "process.run")
  if argv.stdout == M.PIPE or argv.stderr == M.PIPE or argv.stdin == M.PIPE then
    errors.misuse(
      2,
      "process.run: process.PIPE is for process.spawn; use on_stdout, on_stderr or a stdin function"
    )
  end
  local started = {}
  if not argv.timeout then
    return run(argv, started)
  end
  local ok, result = pcall(combine.timeout, argv.timeout, run, argv, started)
  if ok then
    return result
  end
  if errors.is(result, "timeout") then
    result.op, result.target = "process.run", argv[1]
    result.message = ("%s did not end within %g s and was stopped"):format(argv[1], argv.timeout)
    result.result = started.process and started.process.result
  end
  error(result, 0)
end

return M
