--- How an attempt ended: what a person reads of it, and the result that decides whether there is another.
local attempt = require("ciranda.run.attempt")
local cause = require("ciranda.run.cause")
local node_state = require("ciranda.run.node_state")
local nodeset = require("ciranda.provider.nodeset")
local report = require("ciranda.run.report")
local STOPPED = require("ciranda.fleet.signals").STOPPED

local M = {}

--- States of a node after which its worker was preempted. One that is being deleted is gone in a moment: of what is
--- taken away with its queued resource nobody knows which of the two a look will see.
local PREEMPTED = { PREEMPTED = true, TERMINATED = true, DELETING = true, gone = true }

--- Log lines shown of the worker that failed first.
local TAIL_LINES = 20

--- Asks the cloud about the node of a worker that was lost: one that was preempted is no failure of the machine.
---@param self ciranda.run.Round
---@param verdict ciranda.run.Cause
local function ask_about_lost(self, verdict)
  local failed = verdict.first
  if not failed or not failed.lost or not self.options.node_state then
    return
  end
  local state = node_state.ask(self.options.node_state, failed.worker)
  if not state then
    return
  end
  if not failed.lost:find("its node", 1, true) then
    failed.lost = ("%s; its node %s is %s"):format(failed.lost, failed.worker.node or "", state)
  end
  if PREEMPTED[state] then
    verdict.kind = "preempted"
  end
end

--- The verdict on a gang that was stopped, and not from here.
---@param self ciranda.run.Round
---@param verdict ciranda.run.Cause
---@param saved integer? the step that is on disk since the stop
---@return ciranda.run.LaunchResult
local function stopped_elsewhere(self, verdict, saved)
  local reasons = {}
  for _, outcome in ipairs(verdict.stopped) do
    reasons[outcome.reason or ""] = outcome
  end
  local who = nodeset.fold(self.options.fleet:workers())
  if reasons[attempt.TAKEN] then
    return {
      status = 1,
      kind = "infra",
      final = true,
      reason = "another attempt took the workers",
      message = ("infra: %s were taken by another attempt; logs located in: %s/"):format(
        who,
        self.logs_directory
      ),
    }
  elseif reasons[attempt.SHUTDOWN] then
    local worker = reasons[attempt.SHUTDOWN].worker
    return {
      status = 1,
      kind = "infra",
      worker = worker,
      reason = ("slice %d worker %d was shut down"):format(worker.slice, worker.index),
      message = ("infra: slice %d worker %d was shut down; logs located in: %s/"):format(
        worker.slice,
        worker.index,
        self.logs_directory
      ),
    }
  end
  local reason = next(reasons)
  local saving = not self.options.checkpoint_directory and ""
    or saved and ("saved step %d, "):format(saved)
    or "not saved, "
  return {
    status = STOPPED.SIGTERM,
    kind = "stopped",
    reason = reason,
    message = ("stopped: by %s, %sexit status %d; logs located in: %s/"):format(
      reason ~= "" and reason or "others",
      saving,
      STOPPED.SIGTERM,
      self.logs_directory
    ),
  }
end

--- Says how it ended.
---@param self ciranda.run.Round
---@param verdict ciranda.run.Cause
---@param before ciranda.checkpoint.Watch?
---@param evidence string[]? lines on what machines and cloud know of a failure
---@return ciranda.run.LaunchResult
function M.conclude(self, verdict, before, evidence)
  local directory = self.logs_directory
  local failed = verdict.first
  ask_about_lost(self, verdict)
  if failed then
    -- What was named first may have been a consequence of something seen later.
    if self.named and self.named.worker ~= failed.worker then
      self:say("%s", cause.failure_line(failed))
    end
    for _, line in ipairs(report.failure(verdict)) do
      self:say("%s", line)
    end
    for _, line in ipairs(report.tail(failed.worker, self.logs:tail(failed.worker, TAIL_LINES))) do
      self:say("%s", line)
    end
    for _, line in ipairs(evidence or {}) do
      self:say("%s", line)
    end
  end
  for _, line in ipairs(report.stopped(verdict)) do
    self:say("%s", line)
  end
  for _, line in ipairs(report.unseen(verdict)) do
    self:say("%s", line)
  end
  local asked_at
  for _, outcome in ipairs(verdict.stopped) do
    asked_at = math.min(asked_at or math.huge, outcome.stopped_at or math.huge)
  end
  local there, lost = {}, {}
  for _, outcome in ipairs(failed and { failed, table.unpack(verdict.consequences) } or {}) do
    lost[outcome.worker] = outcome.lost ~= nil
  end
  for _, worker in ipairs(self.options.fleet:workers()) do
    there[#there + 1] = not lost[worker] and worker or nil
  end
  local elsewhere = not failed and not self.stopping and not self.notice and #verdict.stopped > 0
  local preempted = not self.stopping
    and not elsewhere
    and (self.notice ~= nil or self.steps:obeyed_a_signal())
  local saved
  if failed or self.stopping or preempted or elsewhere then
    saved = self.steps:tell(before, {
      stopped = self.stopping ~= nil or elsewhere,
      obeyed = preempted,
      since = elsewhere and asked_at or self.notice and self.notice.at or nil,
      there = there,
    })
  end
  if failed then
    self:say("Main command finished with errors, check the logs located in: %s/", directory)
    local kind = preempted and "preempted" or verdict.kind
    local how = ("exit status %s, from slice %d worker %d"):format(
      cause.describe_status(failed),
      failed.worker.slice,
      failed.worker.index
    )
    return {
      status = verdict.status,
      kind = kind,
      final = self.stopping ~= nil,
      worker = failed.worker,
      innocent = verdict.innocent,
      reason = ("slice %d worker %d%s"):format(
        failed.worker.slice,
        failed.worker.index,
        failed.lost and " lost: " .. failed.lost or verdict.why and ": " .. verdict.why or ""
      ),
      message = ("%s: %s"):format(kind, how),
    }
  elseif self.stopping then
    return {
      status = STOPPED[self.stopping],
      kind = "interrupted",
      message = ("interrupted: stopped by %s, exit status %d; logs located in: %s/"):format(
        self.stopping,
        STOPPED[self.stopping],
        directory
      ),
    }
  elseif elsewhere then
    return stopped_elsewhere(self, verdict, saved)
  elseif self.notice then
    return {
      status = STOPPED.SIGTERM,
      kind = "preempted",
      worker = self.notice.worker,
      reason = self.notice.text,
      told = true,
      message = ("preempted: %s; %s, exit status %d"):format(
        self.notice.text,
        saved and ("saved step %d"):format(saved) or "not saved",
        STOPPED.SIGTERM
      ),
    }
  elseif preempted then
    return {
      status = STOPPED.SIGTERM,
      kind = "preempted",
      message = (
        "preempted: a SIGTERM that did not come from here stopped the command%s, exit status %d; the same "
        .. "command goes on from its last checkpoint"
      ):format(
        self.steps.sync_point and (" at step %d"):format(self.steps.sync_point) or "",
        STOPPED.SIGTERM
      ),
    }
  end
  return { status = 0, kind = "done", message = self.options.success or "Finished." }
end

return M
