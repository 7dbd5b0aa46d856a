--- A stop that is under way: how its runner shows it, and how it leaves in its midst.
local clock = require("ciranda.io.clock")
local nodeset = require("ciranda.provider.nodeset")
local report = require("ciranda.run.report")
local task = require("ciranda.task")

local M = {}

--- The exit status of a runner that leaves the job alone.
local DETACHED = 129

--- Seconds after which it is said who has not been told of a stop yet.
local UNTOLD = 5

--- Seconds that a runner which leaves takes to tell every worker of the stop, and that it takes at least: three Ctrl-C
--- in one moment mean the stop as well.
local TELL = 20
M.LEAST = 1

---@param round ciranda.run.Round
---@param gang ciranda.run.Gang
---@return string text
---@return string words the same without the time
local function state(round, gang)
  local rows, seconds = {}, clock.now() - gang.stopping.at
  for place, member in ipairs(gang.members) do
    rows[place] = {
      worker = member.worker,
      ended = member.outcome ~= nil,
      synced = round.steps.synced[member.worker] ~= nil,
      untold = not member.told and seconds >= UNTOLD,
      silent = clock.now() - member.attempt.last_contact >= UNTOLD,
      behind = member.record ~= nil,
    }
  end
  local word = (round.stopping or round.notice) and "Saving" or "Stopping"
  return report.stop_state(word, rows, seconds)
end

--- Shows how far a stop is, workers of one state together: every second, for hundreds of workers change in one moment,
--- and one that does not end is to be seen too. Goes on until it is cancelled.
---@async
---@param round ciranda.run.Round
---@param gang ciranda.run.Gang
function M.show(round, gang)
  while true do
    task.sleep(1)
    -- After a failure its cause is told before anything else.
    if gang.stopping and (round.stopping or round.notice or round.named) then
      round.options.progress:status(state(round, gang))
    end
  end
end

--- Before a runner leaves in the middle of a stop, every worker is to know of it: waits until they have been told, for
--- a while, and for one more signal at most.
local function tell(round, gang, finished)
  if gang.stopping.told:is_set() then
    return
  end
  round:say("Leaving as soon as every worker has been told to stop; once more to leave without that")
  task.race({
    function()
      task.sleep(TELL)
    end,
    function()
      gang.stopping.told:wait()
    end,
    function()
      round.at_once:wait()
      task.sleep(math.max(0, gang.stopping.at + M.LEAST - clock.now()))
    end,
    function()
      finished:wait()
    end,
  })
end

--- Leaves the job alone, or the stop that is under way.
---@async
---@param round ciranda.run.Round
---@param gang ciranda.run.Gang
---@param finished ciranda.task.Event of the gang
---@return ciranda.run.LaunchResult? result nil when the gang has come to its end meanwhile
function M.leave(round, gang, finished)
  local message = "Detached: the job goes on on the workers. `ciranda attach %s` takes it up again."
  if gang.stopping then
    tell(round, gang, finished)
    local untold = {}
    for _, member in ipairs(gang.members) do
      if not member.outcome and not member.told then
        untold[#untold + 1] = member.worker
      end
    end
    message = "Detached: the stop goes on on the workers. `ciranda attach %s` sees its end."
    if #untold > 0 then
      message = "Detached: "
        .. nodeset.fold(untold)
        .. " could not be told to stop. `ciranda stop %s` does it."
    end
  end
  if finished:is_set() then
    return nil
  end
  return M.left(round, message)
end

--- The result of a runner that leaves before the end.
---@param round ciranda.run.Round
---@param message string with a place for the run's name
---@return ciranda.run.LaunchResult
function M.left(round, message)
  return { status = DETACHED, kind = "detached", message = message:format(round.options.run) }
end

return M
