---@meta ciranda.core.keeper
--- What a process needs that must leave no other behind (engine/keeper.c). Private: only ciranda.sim.keeper uses it.

---@class ciranda.core.keeper
local M = {}

--- Orphans among the descendants become children of this process.
---@return boolean? ok, string? message
function M.subreaper() end

--- This process gets a signal when its parent ends; 0 takes that back.
---@param signal integer
---@return integer? parent its pid, to be compared with the expected one
---@return string? message
function M.die_with_parent(signal) end

--- Collect an adopted child that has ended.
---@param pid integer
---@return boolean collected
function M.reap(pid) end

return M
