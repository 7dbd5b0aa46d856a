--- What the cloud says of the node of a worker that does not answer.
local err = require("ciranda.io.error")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Seconds that asking may take, and for which an answer about a node stands for all its workers.
local LIMIT, LASTS = 15, 10

--- States of a node whose machines run.
local RUNNING = { READY = true, STATE_UNSPECIFIED = true, UNKNOWN = true }

---@alias ciranda.run.NodeState fun(worker: ciranda.Worker): string, string? the node's state, and the worker's address

--- Asks for it.
---@async
---@param node_state ciranda.run.NodeState
---@param worker ciranda.Worker
---@return string? state nil when nobody can tell
---@return string? address
-- Raises "cancelled", and what is a mistake of this program.
function M.ask(node_state, worker)
  local ok, state, address = pcall(task.timeout, LIMIT, node_state, worker)
  if ok then
    return state, address
  elseif not err.is(state) or err.is(state, "cancelled", "misuse", "internal") then
    error(state, 0)
  end
  return nil
end

--- Makes a function that says why a worker that does not answer will not come back as it was; nil when it may.
---@param node_state ciranda.run.NodeState
---@return fun(worker: ciranda.Worker): string? gone raises what `ask` raises
function M.gone(node_state)
  local by_node = {}
  return function(worker)
    if not worker.node then
      return nil
    end
    local now = uv.hrtime() / 1e9
    local known = by_node[worker.node]
    if not known or now - known.at > LASTS then
      local state, address = M.ask(node_state, worker)
      if not state then
        return nil
      end
      -- The address is that of the worker that was asked about.
      known = { at = now, state = state, address = address, worker = worker }
      by_node[worker.node] = known
    end
    if not RUNNING[known.state] then
      return ("the machine does not answer, and its node %s is %s"):format(worker.node, known.state)
    elseif known.worker == worker and known.address and known.address ~= worker.internal_address then
      return ("the machine does not answer, and its node %s has others now"):format(worker.node)
    end
    return nil
  end
end

return M
