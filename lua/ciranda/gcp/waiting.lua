--- Waiting for queued resources and nodes.
---
--- A queued resource is ready when it is ACTIVE and each of its nodes is READY; the create operation may stay
--- unfinished long after that, and is not asked. Any number of waits in a zone share one list call. A passing failure
--- of the API is no news; a state from which the wanted one cannot come ends the wait with the API's reason and what it
--- means.

local checks = require("ciranda.gcp.request_checks")
local errors = require("ciranda.io.error")
local failure = require("ciranda.gcp.failure")
local holdings = require("ciranda.gcp.holdings")
local kinds = require("ciranda.gcp.credential_kinds")
local log = require("ciranda.io.log")
local task = require("ciranda.task")

local M = {}

--- Seconds between two looks: after a change the first, then more, at most the last.
M.FIRST_POLL = 2
M.MOST_POLL = 20

--- Seconds a wait lasts unless its caller says otherwise.
M.TIMEOUT = 24 * 3600

--- Seconds that one look may take with its repetitions, before it is told that there is no news.
M.LOOK = 120

--- For so many seconds after the wait began "not found" may mean "not yet": a get right after a create has been seen to
--- miss it.
M.NOT_YET = 60

--- After so many seconds in the queue or in provisioning Google's guide says to ask one's account's representative.
M.STUCK = 15 * 60

---@class ciranda.gcp.WaitOptions
---@field timeout number?      seconds
---@field first_poll number?   seconds
---@field most_poll number?    seconds
---@field not_yet number?      seconds
---@field stuck_after number?  seconds
---@field on_change (fun(state: string, message: table?))?  called with each new state; "NOT_FOUND" when there is none
---@field on_note (fun(text: string))?  takes what a person should know; else it is logged as a warning

local OPTIONS = {
  timeout = true,
  first_poll = true,
  most_poll = true,
  not_yet = true,
  stuck_after = true,
  on_change = true,
  on_note = true,
}

local short_name = function(name)
  return name:match("[^/]*$")
end

-- Looking -----------------------------------------------------------------------------------------------------------

--- A list that is fetched once for all who want it at about the same time.
---@param tpu ciranda.gcp.Tpu
---@param method string
---@param not_before number the age that is still good enough, as a time of the client's clock
---@return table<string, table> messages by short name
local function shared_list(tpu, method, not_before)
  local client = tpu.client
  client.lists = client.lists or {}
  local key = ("%s %s %s"):format(method, tpu.project, tpu.zone)
  while true do
    local entry = client.lists[key]
    if entry and entry.began >= not_before then
      if not entry.done:is_set() then
        entry.done:wait()
      end
      if entry.err then
        error(entry.err, 0)
      elseif entry.by_name then
        return entry.by_name
      end
    else
      entry = { began = client:now(), done = task.event() }
      client.lists[key] = entry
      local ok, items = pcall(tpu.list, tpu, method)
      if ok then
        entry.by_name = {}
        for _, item in ipairs(items) do
          if type(item.name) == "string" then
            entry.by_name[short_name(item.name)] = item
          end
        end
      else
        entry.began = -math.huge -- nobody who comes later takes it for a list
        if not errors.is(items, "cancelled") then
          entry.err = items
        end
      end
      entry.done:set()
      if not ok then
        error(items, 0)
      end
    end
  end
end

--- Failures of a look that say nothing about what is looked at.
local NO_NEWS = {
  "timeout",
  "reset",
  "closed",
  "refused",
  "unreachable",
  "resolve",
  "unavailable",
  "rate_limit",
  "protocol",
}

--- The shape of every wait: look, judge, sleep. `look(not_before)` gives a message or nil; `judge(message, state,
--- waited)` gives the result when the wait is over, raises when it is vain, and else returns nil.
---@param client ciranda.gcp.Client
---@param what string for messages
---@param options ciranda.gcp.WaitOptions
---@param look fun(not_before: number): table?
---@param state_of fun(message: table?): string
---@param judge fun(message: table?, state: string, waited: number): table?
---@param situation (fun(message: table): string)? what to say of a long wait
---@return table result what `judge` gave
local function wait_loop(client, what, options, look, state_of, judge, situation)
  errors.check_options(options, OPTIONS, "wait", 4)
  local timeout = options.timeout or M.TIMEOUT
  local first, most = options.first_poll or M.FIRST_POLL, options.most_poll or M.MOST_POLL
  local began = client:now()
  local state, since, poll, told = nil, began, first, 0
  while true do
    local patience = math.max(0.001, math.min(M.LOOK, began + timeout - client:now()))
    local looked, message = pcall(task.timeout, patience, look, client:now() - poll / 2)
    if looked then
      local now_state = state_of(message)
      if now_state ~= state then
        state, since, poll, told = now_state, client:now(), first, 0
        if options.on_change then
          options.on_change(state, message)
        end
      end
      local result = judge(message, state, client:now() - began)
      if result then
        return result
      end
    elseif errors.is(message, table.unpack(NO_NEWS)) then
      log.warn(("waiting for %s: %s; still waiting"):format(what, tostring(message)))
    else
      error(message, 0)
    end
    local now = client:now()
    local stuck_after = options.stuck_after or M.STUCK
    local in_queue = state == "WAITING_FOR_RESOURCES" or state == "PROVISIONING" or state == "ACCEPTED"
    if in_queue and now - since >= stuck_after * (told + 1) then
      told = told + 1
      local note = (
        "%s has been %s for %.0f minutes.%s Google's guide: after %d minutes ask your Google Cloud "
        .. "account's representative; another zone or kind of capacity may have room"
      ):format(
        what,
        state,
        (now - since) / 60,
        looked and message and situation and " " .. situation(message) or "",
        M.STUCK // 60
      )
      if options.on_note then
        options.on_note(note)
      else
        log.warn(note)
      end
    end
    if now - began >= timeout then
      errors.raise {
        code = "timeout",
        op = "wait",
        target = what,
        state = state,
        message = ("%s: still %s after %.0f s"):format(what, state or "unknown", now - began),
      }
    end
    task.sleep(math.min(poll * (0.75 + client.random() * 0.5), math.max(0, began + timeout - now)))
    poll = math.min(poll * 1.3, most)
  end
end

-- Queued resources --------------------------------------------------------------------------------------------------

local function queued_state(message)
  if not message then
    return "NOT_FOUND"
  end
  local state = type(message.state) == "table" and message.state.state
  return type(state) == "string" and state or "STATE_UNSPECIFIED"
end

--- The nodes of a queued resource, in order, as far as they exist.
local function nodes_of(message, by_name)
  local names = {}
  local specs = type(message.tpu) == "table" and message.tpu.nodeSpec
  for _, spec in ipairs(type(specs) == "table" and specs or {}) do
    local multi = type(spec) == "table" and (spec.multisliceParams or spec.multiNodeParams)
    if type(multi) == "table" then
      local prefix = multi.nodeIdPrefix or short_name(message.name)
      for index = 0, math.min(math.tointeger(multi.nodeCount) or 0, checks.MAX_SLICES) - 1 do
        names[#names + 1] = ("%s-%d"):format(prefix, index)
      end
    elseif type(spec) == "table" and spec.nodeId then
      names[#names + 1] = spec.nodeId -- an answer has a spec for each node
    end
  end
  local nodes, missing, unready = {}, {}, {}
  for _, name in ipairs(names) do
    local node = by_name[name]
    if not node then
      missing[#missing + 1] = name
    else
      nodes[#nodes + 1] = node
      if node.state ~= "READY" then
        unready[#unready + 1] = node
      end
    end
  end
  return nodes, missing, unready
end

--- Whether the time in which a request may be fulfilled is over.
local function has_expired(message, now)
  local policy = message.queueingPolicy
  if type(policy) ~= "table" then
    return false
  end
  local stop = kinds.parse_time(policy.validUntilTime)
    or (type(policy.validInterval) == "table" and kinds.parse_time(policy.validInterval.endTime))
  if not stop then
    local from = kinds.parse_time(message.createTime)
    local length = type(policy.validUntilDuration) == "string"
      and tonumber(policy.validUntilDuration:match("^(.*)s$"))
    stop = from and length and from + length
  end
  return stop ~= nil and stop ~= false and now >= stop
end

-- States of a node that is there or will be: a slice that goes on although its queued resource has failed.
local UP = { READY = true, CREATING = true, STARTING = true, RESTARTING = true, REPAIRING = true }

-- Reasons that stand for themselves. Any other may be how the API says that the request lapsed.
local NAMED =
  { quota = true, permission = true, auth = true, invalid = true, not_found = true, exists = true }

--- Raise why an ACTIVE state will not come from this one.
---@param qr ciranda.gcp.QueuedResource
---@param message table
---@param state string
local function raise_end(qr, message, state)
  local what = tostring(qr)
  local details = message.state
  local err
  if state == "FAILED" then
    local reason = type(details.failedData) == "table" and details.failedData.error
    err = type(reason) == "table" and failure.of_status(reason, what)
      or errors.new { code = "failed", message = what .. ": FAILED, and the API gives no reason" }
    if not NAMED[err.code] and has_expired(message, os.time()) then
      err.code, err.reason = "stockout", "expired"
      err.message = ("%s: no capacity was found before the request lapsed (%s)"):format(what, err.message)
    end
    local ok, by_name = pcall(shared_list, qr.tpu, "nodes.list", qr.tpu.client:now())
    if ok then
      local up = 0
      for _, node in ipairs((nodes_of(message, by_name))) do
        up = up + (UP[node.state] and 1 or 0)
      end
      if up > 0 then
        err.ready_nodes = up
        err.message = ("%s; %d of its slices are up all the same: delete it, with force, and ask again"):format(
          err.message,
          err.ready_nodes
        )
      end
    elseif errors.is(by_name, "cancelled") then
      error(by_name, 0)
    end
  elseif state == "SUSPENDED" then
    local by_user = details.stateInitiator == "USER"
    local spot = message.spot ~= nil or message.bestEffort ~= nil or message.provisioningModel == "SPOT"
    err = errors.new {
      code = (by_user or not spot) and "failed" or "preempted",
      message = ("%s: %s%s: its machines are gone and nothing more will be allocated; delete it and ask again"):format(
        what,
        state,
        by_user and ", by a user" or spot and ", preempted or without capacity" or ", by Google"
      ),
      initiator = details.stateInitiator,
    }
  else
    err = errors.new { code = "failed", message = ("%s is being deleted"):format(what) }
  end
  err.op, err.target, err.state = "wait", what, state
  errors.raise(err)
end

-- Not SUSPENDING: it is on its way to SUSPENDED or FAILED, and only then is the reason known.
local VAIN_FOR_ACTIVE = { FAILED = true, SUSPENDED = true, DELETING = true }
local FINAL = { FAILED = true, SUSPENDED = true }

--- Wait until a queued resource has a state.
---@async
---@param qr ciranda.gcp.QueuedResource
---@param wanted string "ACTIVE" (every node READY too), "DELETED", or any other state
---@param options ciranda.gcp.WaitOptions?
---@return table? message
---@return table[]? nodes
--- Raises `quota`, `stockout` (`reason` "expired" when its time was over), `preempted`, `failed`, `not_found` when it
--- is gone, `timeout`, and for what no wait can change `auth`, `permission`, `usage`.
function M.queued_resource(qr, wanted, options)
  options = options or {}
  local tpu, client = qr.tpu, qr.tpu.client
  client.waits = (client.waits or 0) + 1
  local _ <close> = setmetatable({}, {
    __close = function()
      client.waits = client.waits - 1
    end,
  })
  local seen = false

  local function look(not_before)
    if client.waits > 1 then
      return shared_list(tpu, "queuedResources.list", not_before)[qr.id]
    end
    local found, message = pcall(qr.get, qr)
    if found then
      return message
    elseif errors.is(message, "not_found") then
      return nil
    end
    return error(message, 0)
  end

  local function judge(message, state, waited)
    if not message then
      if wanted == "DELETED" then
        return {}
      end
      if not seen and waited < (options.not_yet or M.NOT_YET) then
        return nil
      end
      errors.raise {
        code = "not_found",
        op = "wait",
        target = tostring(qr),
        state = "NOT_FOUND",
        message = ("%s %s"):format(tostring(qr), seen and "is gone: somebody deleted it" or "does not exist"),
      }
    end
    seen = true
    if wanted == "ACTIVE" then
      if VAIN_FOR_ACTIVE[state] then
        raise_end(qr, message, state)
      elseif state == "ACTIVE" then
        local by_name =
          shared_list(tpu, "nodes.list", client:now() - (options.first_poll or M.FIRST_POLL) / 2)
        local nodes, missing, unready = nodes_of(message, by_name)
        for _, node in ipairs(unready) do
          if node.state == "PREEMPTED" or node.state == "TERMINATED" then
            errors.raise {
              code = "preempted",
              op = "wait",
              target = tostring(qr),
              state = state,
              message = ("%s: node %s is %s"):format(tostring(qr), short_name(node.name), node.state),
            }
          end
        end
        if #missing == 0 and #unready == 0 and #nodes > 0 then
          return { message, nodes }
        end
      end
      return nil
    end
    if state == wanted then
      return { message }
    end
    if FINAL[state] and wanted ~= "DELETED" then
      raise_end(qr, message, state)
    end
    return nil
  end

  local function situation(message)
    local ok, all = pcall(shared_list, tpu, "queuedResources.list", client:now() - M.MOST_POLL)
    if not ok and errors.is(all, "cancelled") then
      error(all, 0)
    end
    return holdings.situation(message, ok and all or nil, tpu.zone)
  end

  local result = wait_loop(client, tostring(qr), options, look, queued_state, judge, situation)
  return result[1], result[2]
end

-- Nodes -------------------------------------------------------------------------------------------------------------

local VAIN_FOR_READY = {
  PREEMPTED = "preempted",
  TERMINATED = "preempted",
  STOPPED = "failed",
  STOPPING = "failed",
  DELETING = "failed",
  HIDDEN = "failed",
}

--- Wait until a node has a state.
---@async
---@param tpu ciranda.gcp.Tpu
---@param name string
---@param wanted string "READY", "DELETED", or any other state
---@param options ciranda.gcp.WaitOptions?
---@return table? Node message
--- Raises `preempted`, `failed`, `not_found`, `timeout`.
function M.node(tpu, name, wanted, options)
  options = options or {}
  local seen = false
  local what = ("node %s in %s"):format(name, tpu.zone)
  local function look()
    local found, message = pcall(tpu.get_node, tpu, name)
    if found then
      return message
    elseif errors.is(message, "not_found") then
      return nil
    end
    return error(message, 0)
  end
  local function state_of(message)
    return message and (type(message.state) == "string" and message.state or "STATE_UNSPECIFIED")
      or "NOT_FOUND"
  end
  local function judge(message, state, waited)
    if not message then
      if wanted == "DELETED" then
        return {}
      elseif not seen and waited < (options.not_yet or M.NOT_YET) then
        return nil
      end
      errors.raise {
        code = "not_found",
        op = "wait",
        target = what,
        state = state,
        message = ("%s %s"):format(what, seen and "is gone" or "does not exist"),
      }
    end
    seen = true
    if state == wanted then
      return { message }
    elseif wanted == "READY" and VAIN_FOR_READY[state] then
      errors.raise {
        code = VAIN_FOR_READY[state],
        op = "wait",
        target = what,
        state = state,
        message = ("%s is %s%s"):format(
          what,
          state,
          type(message.healthDescription) == "string" and ": " .. message.healthDescription or ""
        ),
      }
    end
    return nil
  end
  return wait_loop(tpu.client, what, options, look, state_of, judge)[1]
end

return M
