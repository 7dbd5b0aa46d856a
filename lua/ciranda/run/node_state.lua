--- What the cloud says of the node of a worker that does not answer.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- Seconds that asking may take, and for which an answer about a node stands for all its workers.
local LIMIT, LASTS = 15, 10

--- States of a node whose machines run.
local RUNNING = { READY = true, STATE_UNSPECIFIED = true, UNKNOWN = true }

--- The node's state, and the internal addresses of its workers by their index, when they are known.
---@alias ciranda.run.NodeState fun(worker: ciranda.Worker): string, table<integer, string>?

--- Who tells the states of nodes: the cloud's API, connected to when it is first asked.
---@param connect fun(): ciranda.gcp.Tpu
---@return ciranda.run.NodeState node_state raises what connecting and the API raise
---@return fun(): table[] nodes all of the zone, with what is wrong with them; raises the same
function M.of(connect)
  local tpu
  local function node_state(worker)
    tpu = tpu or connect()
    local ok, node = pcall(tpu.get_node, tpu, worker.node)
    if not ok and err.is(node, "not_found") then
      return "gone"
    elseif not ok then
      error(node, 0)
    end
    local networks = math.max(1, #(node.networkConfigs or {}))
    local addresses = {}
    for place, endpoint in ipairs(node.networkEndpoints or {}) do
      if (place - 1) % networks == 0 then
        addresses[(place - 1) // networks] = endpoint.ipAddress
      end
    end
    return node.state or "STATE_UNSPECIFIED", addresses
  end
  return node_state,
    function()
      tpu = tpu or connect()
      return tpu:list_nodes({ "state", "health", "healthDescription", "symptoms" })
    end
end

--- Asks for it.
---@async
---@param node_state ciranda.run.NodeState
---@param worker ciranda.Worker
---@return string? state nil when nobody can tell
---@return table<integer, string>? addresses of its workers, by index
-- Raises "cancelled", and what is a mistake of this program.
function M.ask(node_state, worker)
  local ok, state, addresses = pcall(task.timeout, LIMIT, node_state, worker)
  if ok then
    return state, addresses
  elseif err.is_fatal(state) then
    error(state, 0)
  end
  return nil
end

--- Makes a function that says why a worker that does not answer will not come back as it was; nil when it may.
---@param node_state ciranda.run.NodeState
---@return fun(worker: ciranda.Worker): string?, string? gone why, and the node's state; raises what `ask` raises
function M.gone(node_state)
  local by_node = {}
  return function(worker)
    if not worker.node then
      return nil
    end
    local now = clock.now()
    local known = by_node[worker.node]
    if not known or now - known.at > LASTS then
      local state, addresses = M.ask(node_state, worker)
      if not state then
        return nil
      end
      known = { at = now, state = state, addresses = addresses or {} }
      by_node[worker.node] = known
    end
    if not RUNNING[known.state] then
      return ("the machine does not answer, and its node %s is %s"):format(worker.node, known.state),
        known.state
    end
    local address = known.addresses[worker.index]
    if address and address ~= worker.internal_address then
      return ("the machine does not answer, and its node %s has others now"):format(worker.node), known.state
    end
    return nil
  end
end

return M
