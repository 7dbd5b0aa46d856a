--- The REPL: a line is a task in the loop. Waiting works at the prompt, background tasks go on and print above it,
--- Ctrl-C cancels the line that runs (or drops the one being typed), Ctrl-D leaves.
local errors = require("ciranda.io.error")
local inspect = require("ciranda.cli.inspect")
local session = require("ciranda.cli.session")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local HELP = [[
A line is Lua; its values are printed, `_` is the last one. What waits, waits: other tasks go on.
  spawn(fn, ...)   run fn in the background until it ends or the REPL is left
  .tasks           what is running and who waits for whom
  .help            this text
  .exit            leave (Ctrl-D too); background tasks are cancelled
Ctrl-C cancels the running line; at the prompt it drops what was typed.]]

--- A chunk of `text`, tried as an expression first. `incomplete` when more lines are needed.
---@param text string
---@return function? chunk
---@return string? problem
---@return boolean? incomplete
local function compile(text, env)
  local chunk = load("return " .. text, "=repl", "t", env)
  if chunk then
    return chunk
  end
  local problem
  chunk, problem = load(text, "=repl", "t", env)
  return chunk, problem, problem ~= nil and problem:find("<eof>%p?$") ~= nil
end

--- Names that complete `word`, looked up along its dots and colons without calling anything.
---@param word string
---@param env table
---@return string[]
local function complete(word, env)
  local prefix, last = word:match("^(.*[%.:])([%w_]*)$")
  local subject = env
  if prefix then
    for name in prefix:gmatch("[%w_]+") do
      local meta = type(subject) ~= "table" and getmetatable(subject)
      local from = type(subject) == "table" and subject or type(meta) == "table" and meta.__index or nil
      if type(from) ~= "table" then
        return {}
      end
      local ok, value = pcall(function()
        return from[name]
      end)
      subject = ok and value or nil
    end
  else
    prefix, last = "", word
  end
  local words, seen, hops = {}, {}, 0
  if type(subject) ~= "table" then
    local meta = getmetatable(subject)
    subject = type(meta) == "table" and meta.__index or nil
  end
  local function offer(key)
    if type(key) == "string" and key:sub(1, #last) == last and key:find("^[%a_]") and not seen[key] then
      seen[key] = true
      table.insert(words, prefix .. key)
    end
  end
  while type(subject) == "table" and hops < 8 do
    for key in next, subject do
      offer(key)
    end
    local meta = getmetatable(subject)
    for _, key in ipairs(type(meta) == "table" and meta.__names or {}) do
      offer(key) -- fields that are made when they are first used
    end
    subject = type(meta) == "table" and type(meta.__index) == "table" and meta.__index or nil
    hops = hops + 1
  end
  table.sort(words)
  return words
end

--- Where the history is kept; its directory is made.
local function history_path()
  local home = os.getenv("HOME")
  local state = os.getenv("XDG_STATE_HOME")
  if not state or state:sub(1, 1) ~= "/" then
    state = home and home .. "/.local/state"
  end
  if not state then
    return nil
  end
  local ok = pcall(require("ciranda.io.fs").mkdir_p, state .. "/ciranda", 448) -- 0700
  return ok and state .. "/ciranda/history" or nil
end

--- Runs one line as a task of `scope`; prints its values or its error with `write`. The task itself never fails, so
--- that a mistake at the prompt leaves the background tasks of the same scope alone.
local function run_line(scope, chunk, env, write)
  local outcome
  local line = scope:spawn(function()
    outcome = table.pack(xpcall(chunk, function(err)
      if type(err) ~= "string" then
        return err
      end
      -- What is below the line's own chunk is the REPL.
      return (debug.traceback(err, 2):gsub("\n%s*%[C%]: in function 'xpcall'.*", ""))
    end))
  end)
  M.running = line
  pcall(line.wait, line)
  M.running = nil
  if not outcome then
    write("cancelled\n")
  elseif outcome[1] then
    if outcome.n > 1 then
      local texts = {}
      for i = 2, outcome.n do
        texts[#texts + 1] = inspect.text(outcome[i])
      end
      env._ = outcome[2]
      write(table.concat(texts, "\t") .. "\n")
    end
  elseif errors.is(outcome[2], "cancelled") then
    write("cancelled\n")
  elseif type(outcome[2]) == "table" and outcome[2].code == "interrupted" then
    write("interrupted\n")
  else
    write(errors.text(outcome[2]) .. "\n")
  end
end

--- What the names at the prompt mean: those of any script, `ciranda`, `task`, `spawn`, and a `print` above the prompt.
---@param background ciranda.Scope
---@param write fun(text: string)
---@return table
local function environment(background, write)
  local env = setmetatable({ ciranda = require("ciranda"), task = task }, { __index = _G, __newindex = _G })
  rawset(env, "spawn", function(fn, ...)
    if type(fn) ~= "function" then
      errors.misuse(2, "spawn takes a function, not a %s: spawn(function() ... end)", type(fn))
    end
    local info = debug.getinfo(fn, "S")
    return background:spawn(("%s:%d"):format(info.short_src, info.linedefined), function(...)
      local ok, err = pcall(fn, ...)
      if not ok and not errors.is(err, "cancelled") then
        write("a background task failed: " .. tostring(err) .. "\n")
      end
    end, ...)
  end)
  rawset(env, "print", function(...)
    local texts = table.pack(...)
    for i = 1, texts.n do
      texts[i] = tostring(texts[i])
    end
    write(table.concat(texts, "\t", 1, texts.n) .. "\n")
  end)
  return env
end

--- Runs the REPL until the end of input.
---@return integer status
function M.run()
  local terminal = uv.guess_handle(0) == "tty"
  require("ciranda.cli.prompt").install()
  local edit = terminal and require("ciranda.core.edit") or nil
  local on_line -- completes the wait for a line
  local write = edit and edit.print or function(text)
    io.write(text)
    io.flush()
  end

  local background <close> = task.scope()
  local env = environment(background, write)

  local typed = ""
  local forget = session.on_interrupt(function(signal)
    if signal ~= "SIGINT" then
      return false
    end
    if M.running then
      if not session.tell_running() then
        M.running:cancel("Ctrl-C")
      end
    elseif edit then
      edit.cancel()
      io.write("\n")
      typed = ""
      edit.prompt("> ")
    else
      return false
    end
    return true
  end)
  local _ <close> = setmetatable({}, {
    __close = function()
      forget()
      if edit then
        edit.close()
      end
    end,
  })

  if edit then
    edit.start({
      history = history_path(),
      complete = function(word)
        return complete(word, env)
      end,
    }, function(text)
      local done = on_line
      on_line = nil
      if done then
        done(nil, text)
      end
    end)
    write(("ciranda %s; .help for help\n"):format(require("ciranda.core.engine").version))
  end
  while true do
    local text
    if edit then
      text = task.await(function(done)
        on_line = done
        edit.prompt(typed == "" and "> " or ">> ")
        return function()
          on_line = nil
          edit.cancel()
          return true
        end
      end)
    else
      text = io.read("L")
    end
    if not text then
      if edit then
        io.write("\n")
      end
      break
    end
    if edit then
      edit.remember(text)
    end
    local command = typed == "" and text:match("^%s*(%.%a+)%s*$")
    if command == ".exit" then
      break
    elseif command == ".help" then
      write(HELP .. "\n")
    elseif command == ".tasks" then
      write(task.dump() .. "\n")
    elseif command then
      write(("there is no %s; .help lists what there is\n"):format(command))
    elseif text:find("%S") then
      typed = typed == "" and text or typed .. "\n" .. text
      local chunk, problem, incomplete = compile(typed, env)
      if chunk then
        typed = ""
        run_line(background, chunk, env, write)
      elseif not incomplete then
        typed = ""
        write(problem .. "\n")
      end
    end
  end
  if typed ~= "" then
    write("the input ended in the middle of a statement\n")
  end
  background:cancel("the REPL was left")
  return 0
end

M.complete = complete -- for the tests
M.compile = compile

return M
