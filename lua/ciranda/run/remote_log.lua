--- Logs read where they are written: on the workers, through the guard, without a runner and without a trace here.
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local known = require("ciranda.run.known")
local link_of = require("ciranda.fleet.link")
local shell = require("ciranda.io.shell")
local signal = require("ciranda.fleet.signal")

local M = {}

--- Seconds that one look may take, and for which a connection that fails is tried again: somebody waits.
local LIMIT, RETRY = 60, 5

-- The newest guard there reads every attempt's log.
local GUARD = "$(ls -t " .. signal.ROOT .. "/bin/guard-* | head -n 1)"

---@class ciranda.run.RemoteLog
---@field private fleet ciranda.Fleet
---@field private path string of the attempt, on each worker
---@field private workers table<string, ciranda.Worker>
local RemoteLog = {}
RemoteLog.__index = RemoteLog

--- The logs of an attempt. Nothing is connected to yet.
---@param run string
---@param attempt table as the journal has it
---@param connect_options table? for `fleet.new`
---@return ciranda.run.RemoteLog to be closed
function M.open(run, attempt, connect_options)
  local fleet = known.fleet(attempt, connect_options or { retry_for = RETRY })
  local workers = {}
  for _, worker in ipairs(fleet:workers()) do
    workers[worker.slice .. "/" .. worker.index] = worker
  end
  return setmetatable({
    fleet = fleet,
    path = ("%s/%s/%s"):format(signal.ROOT, run, attempt.attempt),
    workers = workers,
  }, RemoteLog)
end

---@private
function RemoteLog:ask(worker, script)
  local mine = self.workers[worker.slice .. "/" .. worker.index]
  return self.fleet:link(mine):use(function(connection)
    return connection:exec(shell.sh(script), { timeout = LIMIT })
  end)
end

---@private
function RemoteLog:fail(worker, answer)
  err.raise({
    code = "failed",
    op = "logs",
    target = link_of.title(worker),
    message = ("the log of %s cannot be read: %s"):format(
      link_of.title(worker),
      (answer.stderr:gsub("%s+$", ""):gsub("^$", "the guard did not answer"))
    ),
  })
end

--- How long a worker's log is, and whether more may come.
---@async
---@param worker ciranda.Worker
---@return integer bytes, boolean ended
-- Raises what connecting raises; "failed" when there is no such attempt there.
function RemoteLog:look(worker)
  local answer = self:ask(worker, ("%s status %s $CIRANDA_GUARD_OPTIONS"):format(GUARD, self.path))
  local ok, status = pcall(json.decode, answer.stdout)
  if not ok or type(status) ~= "table" or not status.state then
    self:fail(worker, answer)
  end
  local said = type(status.record) == "table" and status.record or status
  return said.log_bytes or 0, status.state ~= "running" and status.state ~= "stopping"
end

--- A piece of a worker's log.
---@async
---@param worker ciranda.Worker
---@param from integer
---@param count integer at most so many bytes
---@return string bytes empty at the end of what there is
---@return integer from where they begin: later than asked for where the worker has given up what was before
-- Raises what connecting raises; "failed" when the log cannot be read.
function RemoteLog:read(worker, from, count)
  local script = ("%s follow %s --from %d --idle-exit 0 $CIRANDA_GUARD_OPTIONS | head -c %d"):format(
    GUARD,
    self.path,
    from,
    count
  )
  local answer = self:ask(worker, script)
  local first = answer.stderr:match("the first that is kept is (%d+)")
  if answer.stdout == "" and first then
    return self:read(worker, math.tointeger(tonumber(first)), count)
  elseif answer.code ~= 0 then
    self:fail(worker, answer)
  end
  return answer.stdout, from
end

--- Closes the connections.
function RemoteLog:close()
  self.fleet:close()
end

RemoteLog.__close = RemoteLog.close

return M
