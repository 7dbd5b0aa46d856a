--- guard: runs a command on this machine under the guard that runs on the workers.
local err = require("ciranda.io.error")
local local_guard = require("ciranda.run.local_guard")
local output = require("ciranda.run.output")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {
  summary = "run a command on this machine that outlives this program: ciranda guard -- CMD",
  description = "CMD runs once, in the present directory and environment, under the guard that runs on the workers: a "
    .. "stop reaches the programs it is meant for, everything that CMD starts is waited for, and a record says how "
    .. "it ended. Its output is shown. Ctrl-C or SIGTERM: TERM, time to save, KILL; once more, or a lost terminal, "
    .. "leaves it running (129), and ciranda guard --name=NAME takes it up. One word is text for a shell; several are "
    .. "a program and its arguments.",
  flags = {
    { name = "CMD", positional = true, many = true, help = "The command, behind --." },
    { name = "name", help = "What it is called (the present time)." },
    { name = "detach", type = "boolean", default = false, help = "Start it, and do not wait." },
    { name = "stop", type = "boolean", default = false, help = "Stop the one of that name." },
    {
      name = "grace",
      type = "duration",
      default = 300,
      help = "Time to save between TERM and KILL when you stop it.",
    },
    { name = "keep", type = "size", default = 0, help = "Bytes of output that are kept at least (0: all)." },
  },
}

--- Exit statuses of this program when it was told to stop, and when it leaves the command alone.
local STOPPED = require("ciranda.fleet.signals").STOPPED
local DETACHED = 129
--- Who of those that race ends it when this program leaves the command alone, and when nobody reads what is left.
local LEFT, UNREAD = 3, 4
--- Seconds from the end of a command that was stopped until all of its output must have been read.
local LAST = 5
--- Seconds that the guard may take to hear of a stop when this program leaves.
local TELL = 5

---@param context ciranda.cli.Context
---@param record table?
---@param stopped string? the signal that this program stopped it for
---@return integer status
local function conclude(context, record, stopped)
  local known = type(record) == "table" and math.tointeger(record.status)
  local status = known or 1
  local words = known and ("exit status %d"):format(known) or "its exit status is not known"
  if stopped then
    status = STOPPED[stopped]
    words = ("stopped by %s; its own %s"):format(stopped, words)
  end
  context.finish({
    kind = stopped and "interrupted" or status == 0 and "done" or "user",
    status = status,
    message = (status ~= 0 or stopped) and words or nil,
  })
  return status
end

--- Starts a command: under the name that was given, or under the present time, with a number where that is taken.
---@param flags table
---@param command string for a shell
---@return string name
---@return ciranda.run.LocalGuard guarded
local function start(flags, command)
  local now, count = os.date("%Y-%m-%d-%H-%M-%S"), 1
  while true do
    local name = flags.name or count == 1 and now or ("%s-%d"):format(now, count)
    local guarded = local_guard.named(name)
    local ok, problem =
      pcall(guarded.start, guarded, command, { keep = flags.keep > 0 and flags.keep or nil })
    if ok then
      return name, guarded
    elseif flags.name or not err.is(problem, "exists") then
      error(problem, 0)
    end
    count = count + 1
  end
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  local words = flags.CMD or {}
  if flags.stop and (#words > 0 or not flags.name) then
    err.raise({ code = "usage", message = "--stop needs the name alone: ciranda guard --name=NAME --stop" })
  elseif #words == 0 and not flags.name then
    err.raise({ code = "usage", message = "guard needs a command: ciranda guard -- CMD" })
  end
  local name, guarded = flags.name, flags.name and local_guard.named(flags.name)
  if flags.stop then
    guarded:status()
    guarded:stop(flags.grace, "ciranda guard --stop")
    return 0
  end
  local stopped
  local leave, stop, told = task.event(), task.event(), task.event()
  -- Before CMD runs: from its first moment a signal to this program is for it.
  local _ <close> = setmetatable({}, {
    __close = context.on_interrupt(function(signal)
      if signal == "SIGHUP" or stopped then
        leave:set()
      elseif STOPPED[signal] then
        stopped = signal
        stop:set()
      end
      return not flags.detach
    end),
  })
  if #words > 0 then
    name, guarded = start(flags, #words == 1 and words[1] or "exec " .. shell.words(words))
  else
    guarded:status()
  end
  if flags.detach then
    context.progress:say("Running as %s; ciranda guard --name=%s shows it, --stop=true ends it", name, name)
    return 0
  end
  local shown = output.new(1, function()
    context.progress:clear()
  end)
  local _ <close> = setmetatable({}, {
    __close = function()
      shown:close()
    end,
  })
  local record
  local first = task.race({
    function()
      record = guarded:follow(0, function(bytes)
        shown:write(bytes)
      end, function(from, to)
        context.progress:say("Bytes %d to %d of its output are no longer kept (--keep)", from, to - 1)
      end)
      shown:flush()
    end,
    function()
      shown:run()
    end,
    function()
      leave:wait()
      -- Two signals may come in one moment: what the first one asks for is under way before this program leaves.
      if stopped then
        task.race({
          function()
            told:wait()
          end,
          function()
            task.sleep(TELL)
          end,
        })
      end
    end,
    function()
      stop:wait()
      context.progress:say("%s: TERM, KILL after %g s; once more to leave at once", stopped, flags.grace)
      guarded:stop(flags.grace, stopped .. " to ciranda guard", function()
        told:set()
      end)
      task.sleep(LAST)
    end,
  })
  if first == LEFT then
    context.finish({
      kind = "detached",
      status = DETACHED,
      message = ("Detached: ciranda guard --name=%s takes it up again"):format(name),
    })
    return DETACHED
  elseif first == UNREAD then
    record = guarded:status().record
    context.progress:say("Its last output was not read: ciranda guard --name=%s shows it", name)
  end
  return conclude(context, record, stopped)
end

return M
