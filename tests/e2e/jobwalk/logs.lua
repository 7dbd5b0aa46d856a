--- What the logs of a walk must say, whatever befell it. Problems are sentences; none is a good walk.
--
-- Each attempt's output is also kept by COMMAND itself, in a copy that outlives every machine. The bucket's log is held
-- against the copies byte for byte, and the steps in them against each other.
local fs = require("ciranda.io.fs")

local M = {}

---@class jobwalk.Attempt
---@field round string the job's life and its attempt, "1-2"
---@field printed string what COMMAND printed
---@field logged string? what the bucket has of it
---@field first integer? step completed
---@field last integer?
---@field saved integer? the newest step that it saw saved
---@field whole boolean it came to an end of its own

--- What is not counted as missing: it was in the pipe when the machine was switched off.
local PIPE = 4096

local STOPPING = "%d[%dT:%-]+Z another worker has failed: stopping, with %d+ s to save\n"

local function last_number(text, pattern)
  local last
  for digits in text:gmatch(pattern) do
    last = math.tointeger(tonumber(digits))
  end
  return last
end

--- What COMMAND printed at a place, an attempt an element, in order.
---@param directory string of copies, each called SLICE.WORKER.NANOSECONDS.LIFE-ATTEMPT
---@param place string "SLICE.WORKER"
---@return jobwalk.Attempt[]
function M.attempts(directory, place)
  local names, list = {}, {}
  for _, entry in ipairs(fs.exists(directory) and fs.list(directory) or {}) do
    if entry.name:sub(1, #place + 1) == place .. "." then
      names[#names + 1] = entry.name
    end
  end
  table.sort(names)
  for index, name in ipairs(names) do
    local text = fs.read(directory .. "/" .. name)
    list[index] = {
      round = name:match("[^.]+$"),
      printed = text,
      first = math.tointeger(tonumber(text:match("completed step: (%d+)"))),
      last = last_number(text, "completed step: (%d+)"),
      saved = last_number(text, "\nsaved step (%d+)"),
      whole = text:find("\ntraining finished at step %d+\n$") ~= nil
        or text:find("Reached preemption sync point, step=%d+\nsaved step [^\n]*\n$") ~= nil,
    }
  end
  return list
end

--- Gives each attempt what a log has after its header, without what the job itself said meanwhile. A machine that was
--- lost before the bucket knew of its attempt leaves the number to the next one.
---@param attempts jobwalk.Attempt[]
---@param log string the bucket's
function M.read_log(attempts, log)
  local pieces, at = {}, nil
  local function piece(to)
    local text = log:sub(at.from, to):gsub(STOPPING, "")
    pieces[at.round] = pieces[at.round] or {}
    table.insert(pieces[at.round], text)
  end
  for before, number, generation, from in
    log:gmatch("()%d[%dT:%-]+Z multihost_job attempt (%d+) on [^\n]* generation (%d+),[^\n]*\n()")
  do
    if at then
      piece(before - 1)
    end
    at = { round = generation .. "-" .. number, from = from }
  end
  if at then
    piece(#log)
  end
  for index = #attempts, 1, -1 do
    attempts[index].logged = table.remove(pieces[attempts[index].round] or {})
  end
end

--- A log without the steps, and with the last only of saves that follow each other.
---@param log string
---@return string
function M.brief(log)
  local lines = {}
  for line in log:gmatch("[^\n]*\n") do
    if not line:find("^completed step:") then
      local again = line:find("^saved step ") and (lines[#lines] or ""):find("^saved step ")
      lines[again and #lines or #lines + 1] = line
    end
  end
  return table.concat(lines)
end

--- How much of an attempt's output is not in the bucket.
---@param attempt jobwalk.Attempt
---@return integer? bytes at its end; nil when the log has other bytes than were printed
function M.missing(attempt)
  local logged, printed = attempt.logged or "", attempt.printed
  if logged:sub(1, #printed) == printed then
    return 0
  end
  local same = 0
  while same < #printed and printed:byte(same + 1) == logged:byte(same + 1) do
    same = same + 1
  end
  -- What follows a cut is what the job says at the next boot, or the day of it that both begin with.
  local rest = logged:sub(same + 1)
  if rest ~= "" and not rest:find("^[%dT:%-]+Z ") then
    return nil
  end
  local missing = #printed - same
  return (attempt.whole or missing > PIPE or not attempt.logged) and missing or 0
end

--- Checks that every round began after the newest step that had been saved, on all workers, that none is missing, and
--- that all finished at the last.
---@param workers table<string, jobwalk.Attempt[]>
---@param problems string[]
---@return { rounds: integer, resumed: integer, again: integer } how many; how many went on; steps done again
function M.check_steps(workers, problems)
  local rounds, order = {}, {}
  for place, attempts in pairs(workers) do
    for _, attempt in ipairs(attempts) do
      local name = attempt.round
      if not rounds[name] then
        rounds[name] = {}
        local life, number = name:match("(%d+)%-(%d+)")
        order[#order + 1] = { name = name, at = (tonumber(life) or 0) * 1000 + (tonumber(number) or 0) }
      end
      rounds[name][place] = attempt
    end
  end
  table.sort(order, function(a, b)
    return a.at < b.at
  end)
  local figures = { rounds = #order, resumed = 0, again = 0 }
  local done, saved, latest = -1, -1, nil
  for _, entry in ipairs(order) do
    local first, whose
    local newly_done, newly_saved = -1, saved
    for place, attempt in pairs(rounds[entry.name]) do
      if attempt.first and first and attempt.first ~= first then
        problems[#problems + 1] = ("attempt %s began at step %d at %s, and at %d at %s"):format(
          entry.name,
          first,
          whose,
          attempt.first,
          place
        )
      end
      first, whose = first or attempt.first, whose or place
      newly_done = math.max(newly_done, attempt.last or -1)
      newly_saved = math.max(newly_saved, attempt.saved or -1)
    end
    if first then
      if first <= saved or first > done + 1 then
        problems[#problems + 1] = ("attempt %s began at step %d; saved was %d, done %d"):format(
          entry.name,
          first,
          saved,
          done
        )
      end
      figures.resumed = figures.resumed + (first > 0 and 1 or 0)
      figures.again = figures.again + done + 1 - first
    end
    done, saved = math.max(done, newly_done), newly_saved
    latest = newly_done >= 0 and newly_done or latest
  end
  for place, attempts in pairs(workers) do
    local finished = attempts[#attempts]
      and last_number(attempts[#attempts].printed, "training finished at step (%d+)")
    if finished ~= latest then
      problems[#problems + 1] = ("%s finished at step %s, but %s is the last that was done"):format(
        place,
        tostring(finished),
        tostring(latest)
      )
    end
  end
  return figures
end

return M
