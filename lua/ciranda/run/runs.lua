--- What the journals on this machine say of runs: which there are, how each one stands, where its logs are.
local err = require("ciranda.io.error")
local journals = require("ciranda.run.journal")
local json = require("ciranda.io.json")
local logs = require("ciranda.run.logs")

local M = {}

--- A runner on another machine that has not breathed for this many breaths is taken for gone.
local SILENT_BREATHS = 6

---@class ciranda.run.Standing
---@field name string
---@field recipe string?
---@field state "running"|"detached"|"unstarted"|"job"|"ended"|"made"|"unreadable" detached: its command may go on on
---  the workers, with no runner; unstarted: its runner was gone before the command was started, and may have left
---  workers taken; job: it runs by itself in the cloud; made: it only made something there
---@field runner { host: string, pid: integer, state: "alive"|"unknown" }? who has it now
---@field attempt string? the last one
---@field command string?
---@field workers integer?
---@field attempts integer
---@field status integer? how it ended
---@field kind string?
---@field began number? seconds since 1970
---@field breathed number? when its runner last gave a sign of life
---@field objects string[] what it has made in the cloud and not yet seen gone
---@field problem string? why its journal cannot be read

--- The runner that has a run now; nil when it is gone.
---@param state ciranda.journal.State
---@return ciranda.journal.Runner? runner, "alive"|"unknown"|nil
function M.runner(state)
  for _, runner in ipairs(state.runners) do
    local life = journals.runner_state(runner)
    if life ~= "dead" then
      return runner, life
    end
  end
end

--- The last attempt, when it was started and nobody has seen its end.
---@param state ciranda.journal.State
---@return table?
function M.open_attempt(state)
  local last = state.attempts[#state.attempts]
  return last and last.gone and not last.ended and last or nil
end

--- The stop of an attempt that its runner has begun because a signal said so.
---@param attempt table?
---@return { grace: number, reason: string }?
function M.stop_begun(attempt)
  local stop = attempt and attempt.stopped
  return stop and tostring(stop.reason):find(" to the runner$") and stop or nil
end

--- The last attempt, when it has ended and its runner was gone before the run had: on its way to another attempt, or
--- before its workers were given back.
---@param state ciranda.journal.State
---@return table?
function M.unfinished(state)
  local last = state.attempts[#state.attempts]
  return last and last.ended and not (state.ended and state.ended.kind) and last or nil
end

--- The last attempt, when its runner was gone before the command was started.
---@param state ciranda.journal.State
---@return table?
function M.unstarted(state)
  local last = state.attempts[#state.attempts]
  return last and not last.gone and not last.ended and not (state.ended and state.ended.kind) and last or nil
end

--- Whether a run has a runner now. One on another machine that has not breathed for long is taken for gone.
---@param state ciranda.journal.State
---@param now number? seconds since 1970
---@return boolean
function M.is_watched(state, now)
  local runner, life = M.runner(state)
  if not runner or life == "alive" then
    return runner ~= nil
  end
  local breathed = journals.breath(state.run)
  return not breathed or (now or os.time()) - breathed <= SILENT_BREATHS * journals.BREATH
end

---@param state ciranda.journal.State
---@param now number?
local function state_of(state, now)
  if M.is_watched(state, now) then
    return "running"
  elseif M.open_attempt(state) or M.unfinished(state) then
    return "detached"
  elseif M.unstarted(state) then
    return "unstarted"
  end
  local kept
  for _, object in pairs(state.objects) do
    if object.phase ~= "gone" and object.phase ~= "failed" then
      kept = object.keep == "job" and "job" or kept or "made"
    end
  end
  return kept or "ended"
end

--- How a run stands.
---@param name string
---@param now number? seconds since 1970
---@return ciranda.run.Standing
function M.standing(name, now)
  local breathed = journals.breath(name)
  local ok, state = pcall(journals.read, name)
  if not ok then
    if err.is_fatal(state) then
      error(state, 0)
    end
    return {
      name = name,
      state = "unreadable",
      attempts = 0,
      objects = json.array({}),
      breathed = breathed,
      problem = tostring(state),
    }
  end
  local last = state.attempts[#state.attempts]
  local runner, life = M.runner(state)
  local ended = state.ended and state.ended.kind and state.ended or last and last.ended or state.ended
  local objects = {}
  for _, object in pairs(state.objects) do
    if object.phase ~= "gone" and object.phase ~= "failed" then
      objects[#objects + 1] = object.name
    end
  end
  table.sort(objects)
  local how = state_of(state, now)
  local over = how ~= "running" and how ~= "detached" and how ~= "unstarted"
  return {
    name = name,
    recipe = state.recipe,
    state = how,
    runner = runner and { host = runner.host, pid = runner.pid, state = life },
    attempt = last and last.attempt,
    command = last and last.command,
    workers = last and type(last.workers) == "table" and #last.workers or nil,
    attempts = #state.attempts,
    status = over and ended and ended.status or nil,
    kind = over and ended and ended.kind or nil,
    began = state.first_us and state.first_us / 1e6,
    breathed = breathed,
    objects = json.array(objects),
  }
end

--- The journal's state of a run that must be there.
---@param name string
---@return ciranda.journal.State
-- Raises "usage" for what is no name, "not_found" with the runs that there are.
function M.read(name)
  if not journals.valid_name(name) then
    err.raise({ code = "usage", op = "runs", message = ("%q cannot be a run's name"):format(name) })
  end
  local state = journals.read(name)
  if state then
    return state
  end
  local names = journals.list()
  local some = table.concat(names, ", ", math.max(1, #names - 9), #names)
  err.raise({
    code = "not_found",
    op = "runs",
    target = name,
    message = ("there is no run %s on this machine; %s"):format(
      name,
      #names == 0 and "there are none"
        or #names <= 10 and "there are " .. some
        or "the last by name are " .. some
    ),
  })
end

--- An attempt of a run: the last one, or the one with this name.
---@param state ciranda.journal.State
---@param id string?
---@return table
-- Raises "not_found".
function M.attempt(state, id)
  local names = {}
  for _, attempt in ipairs(state.attempts) do
    if attempt.attempt == id then
      return attempt
    end
    names[#names + 1] = attempt.attempt
  end
  if #names > 0 and not id then
    return state.attempts[#names]
  end
  err.raise({
    code = "not_found",
    op = "runs",
    target = state.run,
    message = id and ("run %s has no attempt %s; it has %s"):format(
      state.run,
      id,
      #names == 0 and "none" or table.concat(names, ", ")
    ) or ("run %s (%s) has started nothing on workers: there are no logs of it"):format(
      state.run,
      state.recipe or "no recipe"
    ),
  })
end

--- Where a worker's log of an attempt is on this machine.
---@param run string
---@param attempt string
---@param worker ciranda.Worker
---@return string
function M.log_path(run, attempt, worker)
  local directory = journals.path(run):match("^(.*)/[^/]*$")
  return ("%s/%s/%s"):format(directory, attempt, logs.file_name(worker))
end

return M
