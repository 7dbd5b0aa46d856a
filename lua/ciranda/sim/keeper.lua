--- The process that sees to it that a simulator leaves nothing behind.
--
-- It stands between whoever wants a simulator and the simulator. It is a subreaper, so that whatever the workers leave
-- running, in whatever session, stays among its descendants. When its standard input ends (the program at the other
-- end has gone, however it went), when it is signalled, or when the simulator ends, it sends KILL to every descendant,
-- again and again until none is left, and removes the simulator's directory. Nobody is asked to end: a machine
-- that is simulated goes off as by its power switch, and the simulator has nothing to save.

local disk = require("ciranda.sim.disk")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local keeper = require("ciranda.core.keeper")
local process = require("ciranda.io.process")
local processes = require("ciranda.sim.processes")
local session = require("ciranda.cli.session")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

-- Seconds in which everything has to be gone after KILL.
local KILL_DEADLINE = 10

-- Seconds between two looks for adopted children that have ended.
local REAP_INTERVAL = 2

--- How to start this program again to run a function of one of its modules.
---@param module string
---@param ... string arguments
---@return string[]
function M.command(module, ...)
  local argv = { os.getenv("CIRANDA_BINARY") or engine.executable }
  if engine.lua_dir then
    table.move({ "--lua-dir", engine.lua_dir }, 1, 2, 2, argv)
  end
  local rest = { "eval", ('return require("%s").main(...)'):format(module), ... }
  return table.move(rest, 1, #rest, #argv + 1, argv)
end

-- The children that libuv knows: it must collect them itself.
local function own_children()
  local own = {}
  uv.walk(function(handle)
    if uv.handle_get_type(handle) == "process" then
      own[handle:get_pid()] = true
    end
  end)
  return own
end

-- Collect adopted children that have ended, of the processes that were found.
local function reap(found)
  local own = own_children()
  for _, each in ipairs(found) do
    if each.state == "Z" and each.parent == uv.os_getpid() and not own[each.pid] then
      keeper.reap(each.pid)
    end
  end
end

-- KILL everything that descends from this process, until nothing does. The dead count until they are collected: while
-- one is looked at its children become ours, and a look that saw nobody alive may have missed them on their way.
local function kill_descendants()
  local deadline = uv.now() + KILL_DEADLINE * 1000
  while true do
    local found = processes.descendants(uv.os_getpid())
    for _, each in ipairs(found) do
      processes.signal(each, "sigkill")
    end
    reap(found)
    uv.update_time()
    if #found == 0 or uv.now() > deadline then
      return
    end
    task.sleep(0.02)
  end
end

-- Set `ended` when standard input ends.
local function watch_lifeline(ended)
  local pipe = uv.new_pipe(false)
  pipe:open(0)
  pipe:read_start(function(err, data)
    if err or not data then
      pipe:close()
      ended:set()
    end
  end)
  return pipe
end

local function keep(settings_text, directory, keep_directory)
  local ended = task.event()
  local lifeline = watch_lifeline(ended)
  local remove = session.on_interrupt(function()
    ended:set()
    return true
  end)
  local argv = M.command("ciranda.sim.simulator", settings_text, ("%d"):format(uv.os_getpid()))
  argv.stdin, argv.stdout, argv.stderr = process.PIPE, process.INHERIT, process.INHERIT
  local simulator = process.spawn(argv)
  do
    local scope <close> = task.scope()
    local watcher = scope:spawn("the simulator's end", function()
      simulator:wait()
      ended:set()
    end)
    local reaper = scope:spawn("adopted children", function()
      while true do
        task.sleep(REAP_INTERVAL)
        reap(processes.children(uv.os_getpid()) or {})
      end
    end)
    ended:wait()
    reaper:cancel("the end")
    simulator:signal("SIGKILL")
    watcher:wait()
  end
  kill_descendants()
  remove()
  if not lifeline:is_closing() then
    lifeline:close()
  end
  if not keep_directory then
    disk.remove(directory)
  end
end

--- Keep a simulator. `ciranda.sim` starts this, nobody else.
---@async
---@param settings string for the simulator, as JSON
---@param directory string the simulator's, which exists
---@param keep_directory string "keep" leaves it
---@return integer status
function M.main(settings, directory, keep_directory)
  engine.on_blocked(nil) -- /proc is read without waiting; nobody else waits here
  local ok, problem = keeper.subreaper()
  if not ok then
    errors.raise({ code = "unsupported", message = "this system has no child subreaper: " .. problem })
  end
  keep(settings, directory, keep_directory == "keep")
  return 0
end

return M
