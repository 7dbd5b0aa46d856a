--- A user's functions that a run calls when something happens to it.
--
-- A hook that fails is reported, and changes nothing: a run of days must not end for a mistake in what watches it.
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- The hooks that there are.
M.NAMES = {
  on_stall = true,
  on_failure = true,
  on_preempted = true,
  on_maintenance = true,
  on_checkpoint = true,
}

--- Seconds that one call may take.
M.LIMIT = 60

---@class ciranda.run.Happening what a hook is given
---@field run string
---@field attempt string
---@field worker ciranda.Worker? whom it is about
---@field text string for a person
---@field step integer? of on_checkpoint: the step on disk; else the last that the logs speak of
---@field kind string? of on_failure: how the attempt has ended
---@field status integer? of on_failure
---@field seconds number? of on_stall: since when no worker has printed anything

--- Hooks from a file: a Lua chunk that returns a table of functions.
---@param path string
---@return table<string, fun(happening: ciranda.run.Happening): any>
-- Raises "usage" when it cannot be read, or has what is no hook.
function M.load(path)
  local function refuse(format, ...)
    err.raise({ code = "usage", op = "hooks", message = ("%s: "):format(path) .. format:format(...) })
  end
  local chunk, problem = loadfile(path)
  if not chunk then
    refuse("%s", problem)
  end
  local ok, hooks = pcall(chunk, path)
  if not ok then
    refuse("%s", tostring(hooks))
  elseif type(hooks) ~= "table" then
    refuse("it must return a table of functions, not a %s", type(hooks))
  end
  for name, fn in pairs(hooks) do
    if not M.NAMES[name] then
      refuse(
        "there is no hook %s; there are on_stall, on_failure, on_preempted, on_maintenance, on_checkpoint",
        name
      )
    elseif type(fn) ~= "function" then
      refuse("%s is a %s, not a function", name, type(fn))
    end
  end
  return hooks
end

--- Calls a hook, when there is one.
---@async
---@param hooks table<string, function>?
---@param name string
---@param happening ciranda.run.Happening
---@param say fun(format: string, ...)
---@return any value what the hook returned; nil when it failed
function M.call(hooks, name, happening, say)
  local hook = hooks and hooks[name]
  if not hook then
    return nil
  end
  local ok, value = pcall(task.timeout, M.LIMIT, hook, happening)
  if ok then
    return value
  elseif err.is(value, "cancelled") then
    error(value, 0)
  end
  say("The hook %s failed: %s", name, err.is(value) and err.text(value) or tostring(value))
  return nil
end

return M
