--- A run that saves on demand and goes on: SIGUSR1 to the runner.
local checkpoint = require("ciranda.run.checkpoint")
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local task = require("ciranda.task")

local M = {}

--- Seconds between two looks at the disk, and how long a new step is awaited.
local LOOK, AWAIT = 2, 120

--- The bit of SIGUSR1 in the mask of caught signals (SigCgt in /proc/PID/status, hexadecimal).
local USR1_BIT = 1 << 9

--- Does a program of the attempt have a handler for SIGUSR1? Without one the signal would end it.
---@async
---@param attempt ciranda.run.Attempt
---@return boolean
local function catches(attempt)
  local pids = attempt:status().processes
  if type(pids) ~= "table" or #pids == 0 then
    return false
  end
  local paths = {}
  for place, pid in ipairs(pids) do
    paths[place] = ("/proc/%d/status"):format(pid)
  end
  local answer = attempt:shell("grep -h SigCgt " .. table.concat(paths, " ") .. "; exit 0")
  for mask in answer.stdout:gmatch("SigCgt:%s*(%x+)") do
    if tonumber(mask:sub(-8), 16) & USR1_BIT ~= 0 then
      return true
    end
  end
  return false
end

--- Has the command save and go on, where it can: SIGUSR1 to its programs, when they catch it on every worker.
---@async
---@param gang ciranda.run.Gang
---@param steps ciranda.run.Steps
---@param say fun(format: string, ...)
function M.save(gang, steps, say)
  local deaf = {}
  local ok, problem = pcall(function()
    task.map(gang.members, function(member)
      if not member.outcome and not catches(member.attempt) then
        deaf[#deaf + 1] = member.worker
      end
    end)
    if #deaf > 0 then
      say(
        "SIGUSR1: nothing was sent: the command on %s does not catch it and would end; it saves when it is "
          .. "stopped, and at its own intervals",
        nodeset.fold(deaf)
      )
      return
    end
    local before = steps:look_before()
    task.map(gang.members, function(member)
      return not member.outcome and member.attempt:ask_guard("signal %s USR1")
    end)
    say("SIGUSR1 to every worker: the run goes on")
    if not before then
      return
    end
    for _ = 1, AWAIT // LOOK do
      task.sleep(LOOK)
      local after = before:after()
      if after.saved then
        say("Checkpoint: %s; the run goes on", checkpoint.describe(after, steps.options.directory))
        steps.options.on_saved(after.step)
        return
      end
    end
    say("Checkpoint: nothing new is on disk %d s after SIGUSR1; the run goes on", AWAIT)
  end)
  if not ok then
    if err.is_fatal(problem) then
      error(problem, 0)
    end
    say("SIGUSR1: %s", tostring(problem))
  end
end

return M
