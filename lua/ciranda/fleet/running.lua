--- Which workers are in a `fleet:run` now: for the first Ctrl-C, which tells and stops nothing.
local nodeset = require("ciranda.provider.nodeset")

local M = {}

---@class ciranda.fleet.Running
---@field private total integer
---@field private left table<ciranda.Worker, true>
local Running = {}
Running.__index = Running

local active = {} ---@type ciranda.fleet.Running[] in the order in which they began
local told = false

--- Workers begin.
---@param workers ciranda.Worker[]
---@return ciranda.fleet.Running to be closed; a `<close>` variable may hold it
function M.begin(workers)
  local running = setmetatable({ total = #workers, left = {} }, Running)
  for _, worker in ipairs(workers) do
    running.left[worker] = true
  end
  table.insert(active, running)
  return running
end

--- A worker has ended.
---@param worker ciranda.Worker
function Running:ended(worker)
  self.left[worker] = nil
end

function Running:__close()
  for index, other in ipairs(active) do
    if other == self then
      table.remove(active, index)
    end
  end
  told = told and #active > 0
end

--- Says on standard error who is still running. Does not wait.
---@return boolean told false when nobody is, and when it has been said: then the signal means a stop
function M.tell()
  if told then
    return false
  end
  for _, running in ipairs(active) do
    local list = {}
    for worker in pairs(running.left) do
      list[#list + 1] = worker
    end
    if #list > 0 then
      told = true
      io.stderr:write(
        ("%d of %d still running: %s. Ctrl-C once more stops %s.\n"):format(
          #list,
          running.total,
          nodeset.fold(list),
          #list == 1 and "it" or "them"
        )
      )
    end
  end
  return told
end

return M
