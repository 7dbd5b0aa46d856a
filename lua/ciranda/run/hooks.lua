--- A user's functions that a run calls when something happens to it.
--
-- A hook that fails is reported, and changes nothing: a run of days must not end for a mistake in what watches it.
local engine = require("ciranda.core.engine")
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

--- Seconds that one call may take, and of these at once without waiting for anything, when the runner does nothing.
M.LIMIT, M.COMPUTING = 60, 5

--- What may wait for a hook that takes its time: a thousand workers may have a notice at once.
local MOST = 1000

--- What a hook is told that calls os.exit: it would have the runner leave a job of days, with any status.
local NO_EXIT = "os.exit does not end a run from a hook; ciranda stop does, and Ctrl-C"

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
---@param progress ciranda.cli.Progress? has what `print` says there, where standard output belongs to JSON lines
---@return table<string, fun(happening: ciranda.run.Happening): any>
-- Raises "usage" when it cannot be read, or has what is no hook.
function M.load(path, progress)
  local function refuse(format, ...)
    err.raise({ code = "usage", op = "hooks", message = ("%s: "):format(path) .. format:format(...) })
  end
  local environment = not progress and _G
    or setmetatable({
      print = function(...)
        local words = table.pack(...)
        for place = 1, words.n do
          words[place] = tostring(words[place])
        end
        progress:say("%s", table.concat(words, "\t"))
      end,
    }, { __index = _G })
  local chunk, problem = loadfile(path, nil, environment)
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

---@class ciranda.run.Happenings
---@field private hooks table<string, function>?
---@field private queue ciranda.Queue
---@field private left_out integer for which there was no room
local Happenings = {}
Happenings.__index = Happenings

--- What happens to an attempt, for the hooks: whoever tells of something does not wait for them.
---@param hooks table<string, function>?
---@return ciranda.run.Happenings
function M.happenings(hooks)
  return setmetatable({ hooks = hooks, queue = task.queue(MOST), left_out = 0 }, Happenings)
end

---@param name string the hook's
---@param happening ciranda.run.Happening
function Happenings:put(name, happening)
  if not (self.hooks and self.hooks[name]) then
    return
  elseif self.queue.count == MOST then
    self.left_out = self.left_out + 1
    return
  end
  self.queue:put({ name = name, happening = happening })
end

--- Calls the hooks, one after the other, until `close`.
---@async
---@param say fun(format: string, ...)
function Happenings:run(say)
  local told = self.queue:get()
  while told do
    M.call(self.hooks, told.name, told.happening, say)
    told = self.queue:get()
  end
  if self.left_out > 0 then
    say("The hooks were too slow to be told of %d more happenings", self.left_out)
  end
end

--- Nothing more happens.
function Happenings:close()
  self.queue:close()
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
  local ok, value = pcall(task.timeout, M.LIMIT, function()
    task.current().no_exit = NO_EXIT
    engine.limit_turns(coroutine.running(), M.COMPUTING)
    local _ <close> = setmetatable({}, {
      __close = function()
        engine.limit_turns()
      end,
    })
    return hook(happening)
  end)
  if ok then
    return value
  elseif err.is(value, "cancelled") and task.current().cancelled then
    error(value, 0) -- and not what Ctrl-C has done to a hook that computed
  end
  say("The hook %s failed: %s", name, tostring(err.wrap(value)))
  return nil
end

return M
