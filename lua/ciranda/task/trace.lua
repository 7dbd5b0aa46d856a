--- Tracebacks of tasks: their own frames, and who was waiting for them.

local uv = require("luv")

local M = {}

-- The frames of the scheduler say nothing about the program.
local NOISE = {
  "ciranda/task/[%w_]+%.lua:%d+:",
  "^%s*%[C%]: in upvalue 'co_yield'$",
  "^%s*%[C%]: in upvalue 'stock_yield'$",
  "^%s*%[C%]: in function 'xpcall'$",
  "^%s*%[C%]: in function 'error'$",
  "^%s*%(%.%.%.tail calls%.%.%.%)$",
}

local PROTECTED_CALL = "^%s*%[C%]: in function 'x?pcall'$"

--- Take the scheduler's frames out of a traceback, and the protected calls it makes.
---@param text string as debug.traceback makes it
---@return string frames one a line, without the heading
function M.clean(text)
  local kept = {}
  local after_noise = false
  for line in text:gmatch("[^\n]+") do
    local noise = line == "stack traceback:" or (after_noise and line:find(PROTECTED_CALL) ~= nil)
    for _, pattern in ipairs(NOISE) do
      noise = noise or line:find(pattern) ~= nil
    end
    if not noise then
      kept[#kept + 1] = line
    end
    after_noise = noise
  end
  return table.concat(kept, "\n")
end

-- C functions through which Lua cannot suspend a coroutine, by the names people know them by.
-- Those of this table may be replaced by the time they are looked for.
local names
local stock_resume, stock_yield = coroutine.resume, coroutine.yield

local function c_functions()
  if not names then
    names = { [stock_resume] = "coroutine.resume" }
    for _, library in ipairs({
      "string",
      "table",
      "coroutine",
      "debug",
      "io",
      "os",
      "utf8",
      "math",
      "package",
    }) do
      for name, fn in pairs(package.loaded[library] or {}) do
        if type(fn) == "function" then
          names[fn] = library .. "." .. name
        end
      end
    end
    for name, fn in pairs(_G) do
      if type(fn) == "function" then
        names[fn] = name
      end
    end
  end
  return names
end

-- Frames up to which a stack is not left to debug.traceback. That searches all modules for the name of each:
-- milliseconds for one task, and the loop is held up for seconds when the time of a thousand is up in one moment.
local MOST = 40

--- How a frame is called by who called it.
---@param info table
---@return string
local function name_of(info)
  local known = info.what == "C" and c_functions()[info.func]
  if known then
    return ("function '%s'"):format(known)
  elseif info.namewhat ~= "" then
    return ("%s '%s'"):format(info.namewhat, info.name)
  elseif info.what == "main" then
    return "main chunk"
  end
  return info.what == "C" and "?" or ("function <%s:%d>"):format(info.short_src, info.linedefined)
end

--- The frames of a suspended coroutine without the scheduler's, as `clean` leaves them of its traceback.
---@param co thread
---@return string
local function frames_of(co)
  if debug.getinfo(co, MOST, "l") then
    return M.clean(debug.traceback(co))
  end
  local kept, after_noise = {}, false
  for level = 0, MOST do
    local info = debug.getinfo(co, level, "Slnf")
    if not info then
      break
    end
    local fn = info.func
    local noise = info.short_src:find("ciranda/task/[%w_]+%.lua$") ~= nil
    if info.what == "C" then
      noise = fn == stock_yield or fn == xpcall or fn == error or (after_noise and fn == pcall)
    end
    if not noise then
      local place = info.currentline > 0 and (":%d"):format(info.currentline) or ""
      kept[#kept + 1] = ("\t%s%s: in %s"):format(info.short_src, place, name_of(info))
    end
    after_noise = noise
  end
  return table.concat(kept, "\n")
end

--- The frames of a suspended task, those of its nested coroutines first.
---@param task ciranda.Task
---@return string
function M.of_task(task)
  local parts = {}
  local chain = task.chain or {}
  for index = #chain, 1, -1 do
    parts[#parts + 1] = frames_of(chain[index])
  end
  parts[#parts + 1] = frames_of(task.co)
  return (table.concat(parts, "\n"):gsub("\n\n+", "\n"))
end

--- The same of a task for which others wait. It stands where it stood as long as it is in the same wait: a thousand of
--- its children that fail in one turn find it there.
---@param task ciranda.Task
---@return string
local function of_waiter(task)
  local op = task.state == "waiting" and task.op or nil
  local seen = task.seen
  if not (op and seen and seen.op == op) then
    seen = { op = op, text = M.of_task(task) }
    task.seen = seen
  end
  return seen.text
end

--- A traceback followed by the frames of every task that was waiting for this one, up to the root.
---@param task ciranda.Task
---@param own string? the task's own frames
---@return string
function M.with_waiters(task, own)
  own = own and M.clean(own) or ""
  if own:find("waited for by", 1, true) then
    return "stack traceback:\n" .. own
  end
  local parts = { "stack traceback:" }
  if own ~= "" then
    parts[#parts + 1] = own
  end
  parts[#parts + 1] = ("\tin task '%s'"):format(task.name)
  local scope = task.scope
  while scope do
    local owner = scope.owner
    parts[#parts + 1] = ("waited for by task '%s':"):format(owner.name)
    local frames = of_waiter(owner)
    if frames ~= "" then
      parts[#parts + 1] = frames
    end
    scope = owner.scope
  end
  return table.concat(parts, "\n")
end

-- C functions through which Lua 5.4 can suspend.
local SUSPENDABLE = { pcall = true, xpcall = true, dofile = true, ["coroutine.resume"] = true }

-- What the user wrote, when that is not the function on the stack.
local SAY = {
  tostring = "tostring (a __tostring metamethod)",
  print = "print (a __tostring metamethod)",
  ["string.format"] = "string.format (a __tostring metamethod)",
  require = "require (a module that waits while it is being loaded)",
  ["string.gsub"] = "the function given to string.gsub",
  ["table.sort"] = "the comparison given to table.sort",
  ["coroutine.close"] = "coroutine.close (a __close metamethod)",
  error = "the message handler of xpcall",
}

--- Name what keeps a coroutine from being suspended.
---@param co thread
---@param level integer where to begin
---@return string
function M.culprit(co, level)
  local known = c_functions()
  while true do
    local info = debug.getinfo(co, level, "Snf")
    if not info then
      return "a C function"
    end
    if info.namewhat == "metamethod" and (info.name == "__gc" or info.name == "gc") then
      return "a __gc metamethod"
    elseif info.namewhat == "hook" then
      return "a debug hook"
    elseif info.what == "C" then
      local name = known[info.func] or info.name
      if not SUSPENDABLE[name] then
        return SAY[name] or (name and "the C function " .. name) or "a C function"
      end
    end
    level = level + 1
  end
end

local function describe_wait(task)
  local op = task.op
  if task.state ~= "waiting" or not op then
    return task.state
  end
  local what = op.what == nil and "an operation" or tostring(op.what)
  if op.target then
    what = ("%s (task %d)"):format(what, op.target.id)
  end
  return ("waiting for %.1f s: %s"):format((uv.now() - op.since) / 1000, what)
end

--- A text with every task that has not ended: what it waits for, its frames, its children below it.
---@param scheduler ciranda.Scheduler
---@param most integer? lines that are shown
---@return string
function M.dump(scheduler, most)
  local children, roots = {}, {}
  for _, task in pairs(scheduler.live) do
    local owner = task.scope and task.scope.owner
    if owner and scheduler.live[owner.id] then
      children[owner] = children[owner] or {}
      table.insert(children[owner], task)
    else
      roots[#roots + 1] = task
    end
  end
  local function by_id(a, b)
    return a.id < b.id
  end
  local lines = {}
  local function add(task, depth)
    local indent = ("  "):rep(depth)
    lines[#lines + 1] = ("%stask %d '%s': %s%s"):format(
      indent,
      task.id,
      task.name,
      describe_wait(task),
      task.cancelled and " (cancelled)" or ""
    )
    if task.state ~= "running" then
      for line in M.of_task(task):gmatch("[^\n]+") do
        lines[#lines + 1] = indent .. "  " .. line:gsub("^%s+", "at ")
      end
    end
    local below = children[task] or {}
    table.sort(below, by_id)
    for _, child in ipairs(below) do
      add(child, depth + 1)
    end
  end
  table.sort(roots, by_id)
  for _, task in ipairs(roots) do
    add(task, 0)
  end
  if #lines == 0 then
    return "no tasks"
  end
  local shown = math.min(most or #lines, #lines)
  local rest = shown < #lines and ("\n... and %d lines more"):format(#lines - shown) or ""
  return table.concat(lines, "\n", 1, shown) .. rest
end

return M
