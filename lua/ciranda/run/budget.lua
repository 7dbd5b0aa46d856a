--- How often a run may be tried again: three budgets, one a kind of end, and the pause before the next attempt. Pure.
--
-- What COMMAND does wrong, what its machines do and what the platform takes away are counted apart: a job of days on
-- spot slices must not end for a preemption because its code has failed once.
local clock = require("ciranda.io.clock")
local nodeset = require("ciranda.provider.nodeset")

local M = {}

--- Seconds before the first further attempt, at most before any, and an attempt's length after which the pause begins
--- small again: it has done work, so what ended it is no failure that repeats at once.
local FIRST, MOST, LONG = 5, 300, 600
--- A worker with so many infrastructure failures in the last so many attempts is bad.
local BAD, OF_LAST = 2, 3

--- The kinds of end after which there may be another attempt, and the flag that says how many.
M.FLAGS = { user = "RESTARTS", infra = "INFRA_RESTARTS", preempted = "PREEMPTION_RESTARTS" }

---@class ciranda.run.Ended an attempt that has ended, as far as the budgets and the summary need it
---@field attempt string
---@field kind string "done", "user", "infra", "preempted", "stopped", ...
---@field status integer
---@field lasted number seconds
---@field worker { slice: integer, worker: integer }? who fell first
---@field reason string? why, in a few words

---@class ciranda.run.Budget
---@field limits table<string, integer>
---@field ended ciranda.run.Ended[] in order
local Budget = {}
Budget.__index = Budget

---@param limits { user: integer?, infra: integer?, preempted: integer? } none where nothing is said
---@param pause number? seconds before the first further attempt (5); each one after it doubles, up to 300
---@return ciranda.run.Budget
function M.new(limits, pause)
  return setmetatable({ limits = limits, first = pause or FIRST, ended = {} }, Budget)
end

--- How many attempts have ended in a way.
---@param kind string
---@return integer
function Budget:count(kind)
  local count = 0
  for _, ended in ipairs(self.ended) do
    count = count + (ended.kind == kind and 1 or 0)
  end
  return count
end

--- Notes the end of an attempt.
---@param ended ciranda.run.Ended
function Budget:note(ended)
  self.ended[#self.ended + 1] = ended
end

--- May there be another attempt after the last one?
---@return number? pause seconds to wait before it; nil when there may be none
---@return string? text what of the budget is used, for a person
function Budget:again()
  local last = self.ended[#self.ended]
  local limit = last and M.FLAGS[last.kind] and self.limits[last.kind] or 0
  local used = last and self:count(last.kind)
  if limit == 0 then
    return nil
  elseif used > limit then
    return nil, ("--%s=%d is used up"):format(M.FLAGS[last.kind], limit)
  end
  local quick = 0
  for place = #self.ended, 1, -1 do
    if self.ended[place].lasted >= LONG then
      break
    end
    quick = quick + 1
  end
  local pause = math.min(self.first * 2 ^ math.max(0, quick - 1), math.max(self.first, MOST))
  return pause, ("%d of --%s=%d"):format(used, M.FLAGS[last.kind], limit)
end

--- Workers that infrastructure failures keep coming from: two in the last three attempts.
---@return string? set a node set
function Budget:bad()
  local counts, bad = {}, {}
  for place = math.max(1, #self.ended - OF_LAST + 1), #self.ended do
    local ended = self.ended[place]
    if ended.kind == "infra" and ended.worker then
      local key = ended.worker.slice .. "/" .. ended.worker.worker
      counts[key] = (counts[key] or 0) + 1
      if counts[key] == BAD then
        bad[#bad + 1] = { slice = ended.worker.slice, index = ended.worker.worker }
      end
    end
  end
  return #bad > 0 and nodeset.fold(bad) or nil
end

--- How each attempt ended, a line each; nothing when there was only one.
---@return string[]
function Budget:summary()
  local lines = {}
  if #self.ended < 2 then
    return lines
  end
  for place, ended in ipairs(self.ended) do
    lines[place] = ("Attempt %d (%s, %s): %s, exit status %d%s"):format(
      place,
      ended.attempt,
      clock.span(ended.lasted),
      ended.kind,
      ended.status,
      ended.reason and ", " .. ended.reason or ""
    )
  end
  return lines
end

return M
