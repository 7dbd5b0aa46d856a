--- What the guard on a worker says of an attempt: the line of JSON in its answer, and how an exit record reads.
local clock = require("ciranda.io.clock")
local json = require("ciranda.io.json")

local M = {}

--- The JSON line in what the guard printed.
---@param text string?
---@return table?
function M.reply(text)
  local line = ("\n" .. (text or "")):match(".*\n(%b{})%s*$")
  local ok, value = pcall(json.decode, line or "", nil, true)
  return ok and type(value) == "table" and value or nil
end

--- How the attempt ended, from its record.
---@param attempt ciranda.run.Attempt
---@param record table?
---@param why string? when there is none
---@return ciranda.run.Outcome
function M.outcome(attempt, record, why)
  local outcome = { worker = attempt.worker }
  if not record then
    outcome.lost = why or "there is no exit record"
    outcome.at = attempt.alive and clock.wall() - (clock.now() - attempt.alive)
    return outcome
  end
  local leader = type(record.leader) == "table" and record.leader or {}
  local function number(value)
    return type(value) == "number" and value or nil
  end
  local ended = number(leader.ended_at) or number(record.ended_at)
  outcome.at = ended and ended - attempt.clock_offset
  local stopped_at = record.stopped and number(record.stopped_at)
  local failed_before = stopped_at
    and number(leader.ended_at)
    and leader.ended_at < stopped_at
    and (number(leader.signal) or (number(leader.code) or 0) ~= 0)
  outcome.stopped = stopped_at ~= nil and stopped_at ~= false and not failed_before
  if outcome.stopped then
    outcome.reason = type(record.reason) == "string" and record.reason or nil
    outcome.stopped_at = stopped_at - attempt.clock_offset
    outcome.took = math.max(0, (number(record.ended_at) or stopped_at) - stopped_at)
    outcome.killed = (number(record.killed) or 0) > 0
  end
  outcome.dropped = number(record.dropped_bytes) or 0
  outcome.outside = type(record.outside_holders) == "table" and record.outside_holders or {}
  outcome.undelivered = {}
  for _, target in ipairs(type(record.targets) == "table" and record.targets or {}) do
    local reason = type(target.delivery) == "string" and target.delivery:match("^not delivered: (.*)$")
    -- One that has ended before a signal could reach it was in no need of one.
    if reason and reason ~= "No such process" then
      table.insert(outcome.undelivered, ("%s: %s"):format(target.exe or "a program", reason))
    end
  end
  if outcome.stopped then
    outcome.code = number(record.status)
  else
    outcome.signal = number(leader.signal)
    outcome.code = not outcome.signal and (number(leader.code) or number(record.status)) or nil
  end
  if not outcome.code and not outcome.signal then
    local error = type(record.error) == "string" and record.error or ""
    outcome.lost = error ~= "" and error or "its status is unknown: its guard was killed"
  end
  return outcome
end

return M
