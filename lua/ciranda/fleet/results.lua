--- What a command on a fleet came to: one result a worker, in the fleet's order.
--
-- A command's exit status is data. `results:check()` is for those who want an error of it.
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local signals = require("ciranda.fleet.signals")

local M = {}

---@class ciranda.fleet.Result
---@field worker ciranda.Worker
---@field code integer? exit status
---@field signal string|nil name of the signal that ended it, without "SIG"
---@field stdout string
---@field stderr string
---@field err ciranda.Error? the connection failed: whether the command ran is unknown when it had been sent
---@field from ciranda.Worker? of a push `via = "workers"`: the worker that it has the files from, nil: from here

---@class ciranda.fleet.Results
---@field [integer] ciranda.fleet.Result
local Results = {}
Results.__index = Results

---@param list ciranda.fleet.Result[]
---@return ciranda.fleet.Results
function M.new(list)
  return setmetatable(list, Results)
end

--- Did this worker's command leave with 0?
---@param result ciranda.fleet.Result
---@return boolean
local function good(result)
  return not result.err and not result.signal and result.code == 0
end

--- One line on what a result is: "exit status 3", "killed by SIGKILL", "no exit status was received", the error.
---@param result ciranda.fleet.Result
---@return string
function M.describe(result)
  if result.err then
    return tostring(result.err)
  elseif result.signal then
    return "killed by SIG" .. result.signal
  elseif result.code then
    return ("exit status %d"):format(result.code)
  end
  return "no exit status was received: the connection ended first"
end

--- Everybody left with 0.
---@return boolean
function Results:ok()
  for _, result in ipairs(self) do
    if not good(result) then
      return false
    end
  end
  return true
end

--- The results that are failures, in order.
---@return ciranda.fleet.Result[]
function Results:failures()
  local list = {}
  for _, result in ipairs(self) do
    if not good(result) then
      list[#list + 1] = result
    end
  end
  return list
end

--- The exit status for the whole: 0, or the first failure's own (128+n for signal n, 1 when there is none).
---@return integer
function Results:status()
  local first = self:failures()[1]
  if not first then
    return 0
  elseif first.signal then
    return 128 + (signals.number(first.signal) or 1)
  end
  return not first.err and first.code or 1
end

--- Raises when somebody failed; else returns the results themselves, so that calls can be chained.
---@return ciranda.fleet.Results
-- Raises "failed" (or the connection error's own code); the error has `results`.
function Results:check()
  local failures = self:failures()
  if #failures > 0 then
    local first = failures[1]
    local workers = {}
    for place, result in ipairs(failures) do
      workers[place] = result.worker
    end
    local last_words = not first.err and (first.stderr or ""):match("([^\n]+)\n*$")
    err.raise({
      code = first.err and first.err.code or "failed",
      op = "run",
      message = ("%d of %d workers failed (%s); slice %d worker %d: %s%s"):format(
        #failures,
        #self,
        nodeset.fold(workers),
        first.worker.slice,
        first.worker.index,
        M.describe(first),
        last_words and (": " .. last_words) or ""
      ),
      cause = first.err,
      results = self,
    })
  end
  return self
end

--- Groups workers whose standard output (and outcome) was the same, the largest group first.
---@return { workers: ciranda.Worker[], nodes: string, stdout: string, outcome: string }[]
function Results:gather()
  local groups, by_key = {}, {}
  for place, result in ipairs(self) do
    local outcome = M.describe(result)
    local key = outcome .. "\0" .. (result.stdout or "")
    local group = by_key[key]
    if not group then
      group = { workers = {}, stdout = result.stdout or "", outcome = outcome, place = place }
      by_key[key] = group
      groups[#groups + 1] = group
    end
    table.insert(group.workers, result.worker)
  end
  table.sort(groups, function(a, b)
    if #a.workers ~= #b.workers then
      return #a.workers > #b.workers
    end
    return a.place < b.place
  end)
  for _, group in ipairs(groups) do
    group.nodes = nodeset.fold(group.workers)
    group.place = nil
  end
  return groups
end

return M
