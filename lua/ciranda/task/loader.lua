--- `require` in Lua: a module may wait while it is being loaded.
---
--- The stock `require` is a C function that cannot be suspended. This one walks the same `package.searchers`
--- with the same results, and tells in its message where it looked. Two tasks that require a module at once
--- load it once.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local sync = require("ciranda.task.sync")

local M = {}

---@class ciranda.Loading
---@field task ciranda.Task?    who loads it; nil for the main program
---@field event ciranda.Event   set when it is loaded or has failed
---@field inside string?        the module whose loading required it

---@type table<string, ciranda.Loading>
local loading = {}

-- The module a task, or the main program, is loading now.
local innermost = setmetatable({}, { __mode = "k" })
local MAIN = {}

--- How the loading of a module came to require it again: "a -> b -> a".
local function cycle(name, key)
  local path, at = { name }, innermost[key]
  while at do
    table.insert(path, 1, at)
    at = at ~= name and loading[at] and loading[at].inside or nil
  end
  local entry = loading[name]
  local awaited = entry.task ~= scheduler.current and entry.task and entry.task.op and entry.task.op.module
  if awaited then
    path[#path + 1] = awaited
  end
  return table.concat(path, " -> ")
end

--- Whether waiting for a module would wait for oneself.
local function waits_for_us(name, task)
  local seen = {}
  local entry = loading[name]
  while entry and not seen[entry] do
    seen[entry] = true
    if entry.task == task then
      return true
    end
    -- What is that task waiting for, if it is a module?
    local awaited = entry.task and entry.task.op and entry.task.op.module
    entry = awaited and loading[awaited]
  end
  return false
end

local function search(name)
  local searchers = package.searchers
  if type(searchers) ~= "table" then
    error("'package.searchers' must be a table", 3)
  end
  local tried = {}
  for _, searcher in ipairs(searchers) do
    local loader, data = searcher(name)
    if type(loader) == "function" then
      return loader, data
    elseif type(loader) == "string" then
      tried[#tried + 1] = (loader:gsub("^\n\t", ""))
    end
  end
  error(("module '%s' not found:\n\t%s"):format(name, table.concat(tried, "\n\t")), 3)
end

local function load_module(name, loader, data)
  local task = scheduler.current
  local key = task or MAIN
  local event = sync.event()
  local outer = innermost[key]
  loading[name] = { task = task, event = event, inside = outer }
  innermost[key] = name
  local _ <close> = setmetatable({}, {
    __close = function()
      innermost[key] = outer
      loading[name] = nil
      event:set()
    end,
  })
  local value = loader(name, data)
  if value ~= nil then
    package.loaded[name] = value
  elseif package.loaded[name] == nil then
    package.loaded[name] = true
  end
  return package.loaded[name], data
end

--- The replacement for `require`.
---@param name string
---@return any module
---@return any data what the searcher gave with the loader, such as the file's name
function M.require(name)
  if type(name) == "number" then
    name = tostring(name)
  elseif type(name) ~= "string" then
    error(("bad argument #1 to 'require' (string expected, got %s)"):format(type(name)), 2)
  end
  while true do
    local loaded = package.loaded[name]
    if loaded then
      return loaded
    end
    local entry = loading[name]
    if not entry then
      break
    end
    local task = scheduler.current
    if entry.task == task or not task or waits_for_us(name, task) then
      errors.misuse(
        2,
        "module '%s' requires itself while it is being loaded: %s",
        name,
        cycle(name, task or MAIN)
      )
    end
    scheduler.await(function(done)
      task.op.module = name
      entry.event:_on_set(done)
      return function()
        return true
      end
    end, ("module '%s', which %s loads"):format(name, tostring(entry.task or "the main program")))
  end
  local loader, data = search(name)
  return load_module(name, loader, data)
end

--- Put it in place of the global `require`.
function M.install()
  _G.require = M.require
end

return M
