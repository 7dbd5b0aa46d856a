--- Following an attempt: its log as it grows, through lost connections, to its exit record.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local lag = require("ciranda.io.lag")
local link_of = require("ciranda.fleet.link")
local records = require("ciranda.run.record")
local task = require("ciranda.task")

local M = {}

--- Seconds beyond the attempt's `idle` after which a connection on which nothing came, not even that there is nothing,
--- counts as dead.
local SHORT = 60
--- The guard's exit status for "nothing came for so long".
local GUARD_IDLE = 4
--- The offset from which the guard copies nothing: it only waits for the end.
local WAIT_ONLY = "8e15"
--- Seconds that a tree outlives its leader before that is worth a word.
local LEADER_NOTICE = 5

--- Failures after which a worker that was followed is lost: another machine answers at its address, or none, or
--- nobody is let in any more.
local LOST = { "lost", "hostkey", "auth", "permission", "not_found", "precondition" }

--- Follows the log on one connection, until its end, until it has been idle, or until the connection breaks.
---@param attempt ciranda.run.Attempt
---@param sink fun(bytes: string)? nil: its end is waited for, and nothing is copied
---@return table answer
local function follow_once(attempt, sink)
  local from = sink and attempt.received or WAIT_ONLY
  local line = ("follow %%s --from %s --idle-exit %.3f"):format(from, attempt.idle)
  if attempt.leader_only or not attempt.leader then
    line = line .. " --leader-only 1"
  end
  attempt.link:connection()
  attempt.followed = lag.clock()
  local index, answer = task.race({
    function()
      return attempt:ask_guard(line, {
        endless = true,
        on_stdout = function(bytes)
          attempt.received = attempt.received + #bytes
          attempt:hear()
          attempt:show_life()
          attempt.grew, attempt.seen = attempt.last_contact, attempt.last_contact
          sink(bytes)
        end,
      }, nil, true)
    end,
    function()
      local began = lag.clock()
      repeat
        task.sleep(attempt.idle / 4)
      until lag.clock() - math.max(began, attempt.heard) > attempt.idle + SHORT
    end,
    function()
      if attempt.leader and not attempt.leader_told then
        task.sleep(LEADER_NOTICE)
        attempt.leader_told = true
        if attempt.on_leader then
          attempt.on_leader(attempt.leader)
        end
      end
      task.event():wait()
    end,
  })
  if index == 2 then
    attempt.link:drop(attempt.link:connection())
    err.raise({
      code = "timeout",
      op = "follow",
      target = link_of.title(attempt.worker),
      message = ("%s has sent nothing for %.0f s, not even that there is nothing"):format(
        link_of.title(attempt.worker),
        attempt.idle + SHORT
      ),
    })
  end
  return answer
end

--- Takes note of what a status line says besides the state.
---@param attempt ciranda.run.Attempt
---@param status table
local function note_status(attempt, status)
  if type(status.log_idle) == "number" then
    attempt.grew = math.max(attempt.grew, clock.now() - status.log_idle)
  end
  attempt.seen = attempt.last_contact
  if status.state ~= "lost" and status.state ~= "gone" then
    attempt:show_life()
  end
  local leader = type(status.leader) == "table" and status.leader
  if leader and type(leader.ended_at) == "number" then
    attempt.leader = leader
  end
end

--- Goes on after what the worker no longer has.
---@param attempt ciranda.run.Attempt
---@param first number? the first byte that is there
local function skip_gap(attempt, first)
  if type(first) == "number" and first > attempt.received then
    local from = attempt.received
    attempt.received = first
    if attempt.on_gap then
      attempt.on_gap(from, first)
    end
  end
end

--- Asks the worker through lost connections.
---@param attempt ciranda.run.Attempt
---@param what string
---@param fn fun(): table
---@return table? answer nil when the worker is lost
---@return string? why it is lost
local function ask(attempt, what, fn)
  local ok, answer = pcall(attempt.persist, attempt, attempt.lost_after, what, fn)
  if ok then
    return answer
  elseif err.is(answer, table.unpack(LOST)) then
    return nil, answer.message
  end
  error(answer, 0)
end

--- Follows the log to its end, through lost connections; returns the exit record. With `leader_only` the end is the
--- leader's, and what is returned for a record is the status line.
---@async
---@param attempt ciranda.run.Attempt
---@param sink fun(bytes: string)? gets each byte of the log once, in order; nil: only the end is waited for
---@return table? record nil when the attempt is lost
---@return string? why it is lost
-- Raises only cancellation and what is no fault of the connection.
function M.follow(attempt, sink)
  local ended = false
  while true do
    local answer, why = ask(attempt, "follow", function()
      return follow_once(attempt, sink)
    end)
    if not answer then
      return nil, why
    end
    local idle = answer.code == GUARD_IDLE
    local status = records.reply(answer.stderr)
    if not status then
      status, why = ask(attempt, "status", function()
        return attempt:status()
      end)
      if not status then
        return nil, why
      end
    end
    note_status(attempt, status)
    local record = type(status.record) == "table" and status.record
    if sink then
      skip_gap(attempt, (record or status).log_first)
    end
    if sink and record and ended and answer.code == 0 then
      skip_gap(attempt, record.log_bytes) -- somebody has cut the log: all that is left of it has come
    end
    ended = record ~= false
    if record and (not sink or attempt.received >= (record.log_bytes or 0)) then
      return record
    elseif not record and attempt.leader_only and attempt.leader and answer.code == 0 then
      return status
    elseif status.state == "gone" then
      return nil, "the machine was made anew: neither the guard nor the attempt is there"
    elseif status.state == "lost" then
      if status.rebooted then
        return nil, "the machine was restarted"
      end
      -- Somebody killed both guarding processes: a new one watches what is left.
      local adopted
      adopted, why = ask(attempt, "adopt", function()
        return attempt:ask_guard("adopt %s")
      end)
      if not adopted or adopted.code ~= 0 then
        return nil, why or "the guard was killed and nothing of the command is left"
      end
    elseif status.state == "staged" then
      return nil, "the command was never started"
    end
    if not idle then
      -- It ended early: the connection was closed in good order by the other side.
      task.sleep(0.2)
    end
  end
end

return M
