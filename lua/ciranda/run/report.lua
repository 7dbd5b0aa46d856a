--- What a person reads about an attempt that has ended. Pure: verdicts in, lines out.
local cause = require("ciranda.run.cause")
local nodeset = require("ciranda.provider.nodeset")

local M = {}

--- Lines told of what went unseen.
local UNSEEN = 5

---@param at number? seconds since 1970
---@return string "14:03:11"
local function clock(at)
  return at and os.date("%H:%M:%S", math.floor(at)) or "at an unknown time"
end

---@param outcomes ciranda.run.Outcome[]
---@return ciranda.Worker[]
local function workers_of(outcomes)
  local list = {}
  for place, outcome in ipairs(outcomes) do
    list[place] = outcome.worker
  end
  return list
end

--- The lines on a failure: who fell first, and who only followed.
---@param verdict ciranda.run.Cause
---@return string[]
function M.failure(verdict)
  local first = verdict.first
  local lines = {}
  if not first then
    return lines
  end
  local text = ("First cause: slice %d worker %d, %s, %s"):format(
    first.worker.slice,
    first.worker.index,
    clock(first.at),
    first.lost and "lost: " .. first.lost or "exit status " .. cause.describe_status(first)
  )
  local victims, others = {}, {}
  for _, outcome in ipairs(verdict.consequences) do
    table.insert(cause.follows(outcome) and victims or others, outcome)
  end
  for _, group in ipairs({
    { victims, "%s; %d other%s consequence%s: %s", " is a", "s are", "s" },
    { others, "%s; %d other%s failed as well%s: %s", "", "s", "" },
  }) do
    local list, one = group[1], #group[1] == 1
    if #list > 0 then
      text = group[2]:format(
        text,
        #list,
        one and group[3] or group[4],
        one and "" or group[5],
        nodeset.fold(workers_of(list))
      )
    end
  end
  lines[1] = text
  lines[2] = verdict.why and "Not COMMAND's own failure, by its look: " .. verdict.why or nil
  return lines
end

--- The lines on those that were stopped: equal ends are told together.
---@param verdict ciranda.run.Cause
---@return string[]
function M.stopped(verdict)
  local groups, by_key = {}, {}
  for _, outcome in ipairs(verdict.stopped) do
    local key = cause.describe_status(outcome) .. (outcome.killed and " killed" or "")
    local group = by_key[key]
    if not group then
      group = {
        outcomes = {},
        least = math.huge,
        most = 0,
        killed = outcome.killed,
        key = cause.describe_status(outcome),
      }
      by_key[key] = group
      groups[#groups + 1] = group
    end
    table.insert(group.outcomes, outcome)
    group.least = math.min(group.least, outcome.took or 0)
    group.most = math.max(group.most, outcome.took or 0)
  end
  local lines = {}
  for place, group in ipairs(groups) do
    local took = ("%.1f"):format(group.least)
    if ("%.1f"):format(group.most) ~= took then
      took = ("%s to %.1f"):format(took, group.most)
    end
    lines[place] = ("Stopped: %s ended with %s, %s s after the signal%s"):format(
      nodeset.fold(workers_of(group.outcomes)),
      group.key,
      took,
      group.killed and " (by SIGKILL: the grace was over)" or ""
    )
  end
  -- A gang that agrees on its last step ends together: some before our signal has reached them.
  if #lines > 0 and #(verdict.ended or {}) > 0 then
    lines[#lines + 1] = ("Ended before the signal came: %s, with 0"):format(
      nodeset.fold(workers_of(verdict.ended))
    )
  end
  return lines
end

--- Lines on what went unseen: output that a full disk has not taken, programs that no signal reached.
---@param verdict ciranda.run.Cause
---@return string[]
function M.unseen(verdict)
  local groups, by_text = {}, {}
  local function note(outcome, text, more)
    local group = by_text[text]
    if not group then
      group = { text = text, more = more, workers = {} }
      by_text[text], groups[#groups + 1] = group, group
    end
    if group.workers[#group.workers] ~= outcome.worker then
      table.insert(group.workers, outcome.worker)
    end
  end
  local most = 0
  for _, list in ipairs({ { verdict.first }, verdict.consequences, verdict.stopped, verdict.ended or {} }) do
    for _, outcome in ipairs(list) do
      if (outcome.dropped or 0) > 0 then
        most = math.max(most, outcome.dropped)
        note(outcome, "Output is lost of %s: the disk was full, and up to %d bytes are not in a log")
      end
      for _, program in ipairs(outcome.undelivered or {}) do
        note(outcome, "SIGTERM did not reach a program on %s: %s", program)
      end
      if #(outcome.outside or {}) > 0 then
        note(
          outcome,
          "The accelerators of %s are held by processes that are not COMMAND's: no signal was sent to them"
        )
      end
    end
  end
  local lines = {}
  for place, group in ipairs(groups) do
    lines[place] = group.text:format(nodeset.fold(group.workers), group.more or most)
  end
  return table.move(lines, 1, math.min(#lines, UNSEEN), 1, {})
end

--- Workers of which every change of a status is worth a line.
local FEW = 16

--- What a worker is at in a stop, in the order in which it is told.
local STOP_STATES =
  { "does not answer", "not told yet", "told", "at the sync point", "ended, its log is on its way", "ended" }

---@class ciranda.run.StopRow where one worker is in a stop
---@field worker ciranda.Worker
---@field ended boolean
---@field synced boolean it stands at the agreed step
---@field untold boolean? it has not taken the request
---@field silent boolean? and nothing else has come from it either
---@field behind boolean? it has ended, and the end of its log is not here

--- What makes one status of many workers another for who reads it in a file, where each is a line of its own: of a few
--- workers all that is said, of many another tenth of them. Pure.
---@param text string all that is said
---@param what string what the workers are at
---@param count integer how many are
---@param total integer
---@return string
function M.part(text, what, count, total)
  return total <= FEW and text or ("%s %d"):format(what, count * 10 // total)
end

--- How far a stop is: workers of one state together.
---@param word string what the others do: Saving, Stopping
---@param rows ciranda.run.StopRow[]
---@param seconds number since the request
---@return string text
---@return string state the same without the time, and of many workers without their names
function M.stop_state(word, rows, seconds)
  local groups, pieces, parts = {}, {}, {}
  for _, row in ipairs(rows) do
    local state = row.ended and "ended"
      or row.behind and "ended, its log is on its way"
      or row.synced and "at the sync point"
      or row.untold and (row.silent and "does not answer" or "not told yet")
      or "told"
    groups[state] = groups[state] or {}
    table.insert(groups[state], row.worker)
  end
  for _, state in ipairs(STOP_STATES) do
    if groups[state] then
      pieces[#pieces + 1] = ("%s: %s"):format(state, nodeset.fold(groups[state]))
      parts[#parts + 1] = M.part(pieces[#pieces], state, #groups[state], #rows)
    end
  end
  return ("%s, %.0f s: %s"):format(word, seconds, table.concat(pieces, "; ")), table.concat(parts, "; ")
end

--- Bytes of a line of a log that are printed in a report.
local LINE = 500

--- A line of a log as a terminal may have it: of a progress bar the last state, no colours, no bytes that a terminal
--- obeys, and no more than fits on a screen.
---@param line string
---@return string
local function legible(line)
  line = line:gsub("\r+$", ""):match("[^\r]*$"):gsub("\27%[[%d;?]*%a", ""):gsub("[^%C\t]", "?")
  if #line <= LINE then
    return line
  end
  local cut = utf8.len(line) and utf8.offset(line, 0, LINE + 1) - 1 or LINE
  return ("%s... (%d bytes more)"):format(line:sub(1, cut), #line - cut)
end

--- Lines as they are printed for the end of a log.
---@param worker ciranda.Worker
---@param tail string[]
---@return string[]
function M.tail(worker, tail)
  local lines = {}
  for place, line in ipairs(tail) do
    lines[place] = ("slice%d/worker%d: %s"):format(worker.slice, worker.index, legible(line))
  end
  return lines
end

return M
