--- First cause: when a gang falls, which worker fell first, and which ones only followed.
--
-- Pure: outcomes go in, a verdict comes out. In a gang one death makes many: the peers of a dead process
-- see a closed socket and abort within a second. What counts is the worker that failed first by a clock
-- corrected for each worker, with the peers' own words used to tell a consequence from a cause.
local signals = require("ciranda.fleet.signals")

local M = {}

--- What processes print when a peer has gone (gRPC, gloo, XLA's coordination service), as publicly reported.
local PEER_LOST = {
  "Socket closed",
  "Connection reset by peer",
  "Connection closed by peer",
  "JAX distributed service detected fatal errors",
  "coordination service",
  "PollForError",
  "heartbeat timeout",
  "RAW: Raising signal 6",
  "Fatal Python error: Aborted",
  "Barrier timed out",
  -- Further words of gRPC and the coordination service for a peer that does not answer, and gloo's for a lost pair.
  "failed to connect to all addresses",
  "CoordinationServiceError",
  "unhealthy (stopped sending heartbeats)",
  "another task died",
  "Application timeout caused pair closure",
}

--- What a program prints on a machine whose accelerators do not work, as publicly reported.
local BAD_MACHINE = {
  "Couldn't open iommu group",
  "open(/dev/vfio",
  "Failed to initialize TPU system",
  "TPU initialization failed",
  "No accelerator found",
}

--- A consequence may be seen before its cause has been recorded (the cause is still winding up), but not
--- longer before than this, in seconds.
local WINDOW = 30

--- SIGABRT: what XLA's runtime ends a process with when its peers are gone.
local ABORT = 6

---@class ciranda.run.Outcome how one worker's part of an attempt ended
---@field worker ciranda.Worker
---@field code integer? exit status, when it left by itself
---@field signal integer? the signal that ended it
---@field lost string? why there is no exit record; neither code nor signal is known then
---@field gone boolean? and the cloud says that its machine is no more
---@field at number? when it ended: seconds since 1970 on the runner's clock
---@field stopped boolean? it ended after we had asked it to stop
---@field reason string? why it was asked, as its guard has it
---@field stopped_at number? when its guard was asked: seconds since 1970 on the runner's clock
---@field took number? seconds from the request to stop to its end
---@field killed boolean? it did not end within the grace
---@field tail string? the end of its log
---@field dropped integer? bytes of its output that a full disk has not taken
---@field undelivered string[]? programs that SIGTERM did not reach, and why
---@field outside integer[]? processes that held the accelerators at the stop and are not COMMAND's
---@field said table<string[], string|false>? what that says, when it has been read

--- Did it fail (by itself or otherwise)?
---@param outcome ciranda.run.Outcome
---@return boolean
function M.failed(outcome)
  return outcome.lost ~= nil or outcome.signal ~= nil or outcome.code ~= 0
end

--- The exit status that stands for an outcome: its own, 128+n for signal n, 1 without a record.
---@param outcome ciranda.run.Outcome
---@return integer
function M.status(outcome)
  if outcome.lost then
    return 1
  elseif outcome.signal then
    return 128 + outcome.signal
  end
  return outcome.code or 1
end

--- "7", "137 (SIGKILL)", "1 (no exit record: ...)". A shell passes its child's death on as a status above
--- 128, which is named too.
---@param outcome ciranda.run.Outcome
---@return string
function M.describe_status(outcome)
  local status = M.status(outcome)
  if outcome.lost then
    return string.format("%d (no exit record: %s)", status, outcome.lost)
  end
  local signal = outcome.signal or status > 128 and status - 128
  local name = signal and signals.name(signal)
  return name and string.format("%d (%s)", status, name) or tostring(status)
end

--- The line that people who used the Python script look for.
---@param outcome ciranda.run.Outcome
---@return string
function M.failure_line(outcome)
  return string.format(
    "Main command failed on slice %d worker %d with error code %s, see logs for details",
    outcome.worker.slice,
    outcome.worker.index,
    M.describe_status(outcome)
  )
end

--- The first of some words that the end of its log has.
---@param outcome ciranda.run.Outcome
---@param list string[]
---@return string?
local function said(outcome, list)
  if outcome.said then
    return outcome.said[list] or nil
  end
  for _, text in ipairs(outcome.tail and list or {}) do
    if outcome.tail:find(text, 1, true) then
      return text
    end
  end
  return nil
end

--- Bytes that are kept of a log's end that has been read.
local KEPT = 4096

--- Reads the end of its log, once and for all: of a thousand that fail at once it would else be read a thousand times,
--- and kept.
---@param outcome ciranda.run.Outcome
function M.read(outcome)
  outcome.said = {
    [PEER_LOST] = said(outcome, PEER_LOST) or false,
    [BAD_MACHINE] = said(outcome, BAD_MACHINE) or false,
  }
  outcome.tail = outcome.tail and outcome.tail:sub(-KEPT)
end

--- Does this failure look like that of a peer of the one that failed? Its log's end says so, or it aborted.
---@param outcome ciranda.run.Outcome
---@return boolean
---@return string? words in which its log speaks of it
function M.follows(outcome)
  if outcome.lost then
    return false
  end
  local words = said(outcome, PEER_LOST)
  return words ~= nil or outcome.signal == ABORT or outcome.code == 128 + ABORT, words
end

--- Why a failure by itself counts as one of the machines all the same.
---@param failures { outcome: ciranda.run.Outcome, follows: boolean, words: string? }[] in order
---@param outcomes ciranda.run.Outcome[] all
---@return string?
---@return boolean? innocent nobody knows whose machine it was
local function machines_fault(failures, outcomes)
  local first = failures[1].outcome
  local words = not failures[1].follows and said(first, BAD_MACHINE)
  if words then
    local as_bad = 0
    for _, outcome in ipairs(outcomes) do
      as_bad = as_bad + (said(outcome, BAD_MACHINE) and 1 or 0)
    end
    -- What most of them say is the program's fault, or its versions'.
    return as_bad * 2 <= #outcomes and ("its log has %q, those of most others have not"):format(words) or nil
  end
  if #failures > 1 and failures[1].follows then
    -- The first one has no cause before it, so all of them are consequences.
    for _, failure in ipairs(failures) do
      if failure.outcome.lost then
        return nil
      end
      words = words or failure.words
    end
    if words then
      local text =
        "all who failed speak of a lost peer (%q), and none is: look at the network, and at who was stopped"
      return text:format(words), true
    end
  end
  return nil
end

---@class ciranda.run.Cause
---@field status integer the exit status for the whole
---@field kind "user"|"infra" infra: a worker was lost, or its machine failed
---@field why string? why it is infra although no worker was lost
---@field innocent boolean? `first` is only the first victim: nobody knows whose machine it was
---@field first ciranda.run.Outcome? nil when nothing failed by itself
---@field consequences ciranda.run.Outcome[] the other failures
---@field stopped ciranda.run.Outcome[] ended after we had asked them to
---@field ended ciranda.run.Outcome[] ended well by themselves

--- When a machine was lost the platform may restart all others, and a slice is lost as a whole: of several that were
--- lost, and heard of last at about the same time, one is first whose machine is gone, and of a slice always the same.
---@param failures { outcome: ciranda.run.Outcome, place: integer, late: boolean }[] changed: in order
local function put_lost_first(failures)
  local best = 1
  for place = 2, failures[1].outcome.lost and #failures or 1 do
    local a, b = failures[place], failures[best]
    local gone, other = a.outcome.gone or false, b.outcome.gone or false
    if
      a.outcome.lost
      and not a.late
      and (
        gone and not other
        or gone == other and a.outcome.worker.slice == b.outcome.worker.slice and a.place < b.place
      )
    then
      best = place
    end
  end
  table.insert(failures, 1, table.remove(failures, best))
end

--- The verdict on a gang.
---@param outcomes ciranda.run.Outcome[]
---@return ciranda.run.Cause
function M.first(outcomes)
  local failures, stopped, ended, earliest = {}, {}, {}, math.huge
  for place, outcome in ipairs(outcomes) do
    if outcome.stopped then
      stopped[#stopped + 1] = outcome
    elseif M.failed(outcome) then
      failures[#failures + 1] = { outcome = outcome, place = place, at = outcome.at or math.huge }
      earliest = math.min(earliest, outcome.at or math.huge)
    else
      ended[#ended + 1] = outcome
    end
  end
  if #failures == 0 then
    return { status = 0, kind = "user", consequences = {}, stopped = stopped, ended = ended }
  end
  for _, failure in ipairs(failures) do
    failure.follows, failure.words = M.follows(failure.outcome)
    -- A cause that ended long after the first victim did not cause it. Of one that is lost nobody may know when.
    failure.late = failure.at > earliest + WINDOW and failure.outcome.at ~= nil
  end
  table.sort(failures, function(a, b)
    if a.late ~= b.late then
      return not a.late
    elseif a.follows ~= b.follows then
      return not a.follows
    elseif a.at ~= b.at then
      return a.at < b.at
    end
    return a.place < b.place
  end)
  put_lost_first(failures)
  local first = failures[1].outcome
  local why, innocent
  if not first.lost then
    why, innocent = machines_fault(failures, outcomes)
  end
  local consequences = {}
  for index = 2, #failures do
    consequences[index - 1] = failures[index].outcome
  end
  return {
    status = M.status(first),
    kind = (first.lost or why) and "infra" or "user",
    why = why,
    innocent = innocent,
    first = first,
    consequences = consequences,
    stopped = stopped,
    ended = ended,
  }
end

return M
