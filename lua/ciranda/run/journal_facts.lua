--- The facts of a run's journal, and what they add up to.
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")

local M = {}

--- What readers of a fact take for granted, by its kind; of a number that it is a whole one.
local NEEDED = {
  runner = { id = "string", pid = "number", boot_id = "string", host = "string" },
  left = { id = "string" },
  object = { kind = "string", name = "string", phase = "string" },
  attempt = { attempt = "string" },
  staged = { slice = "number", worker = "number" },
  exit = { slice = "number", worker = "number" },
}

--- Whether a line is a fact that can be relied on.
---@param fact any
---@return boolean
local function is_fact(fact)
  if type(fact) ~= "table" or type(fact.fact) ~= "string" or not math.tointeger(fact.us) then
    return false
  end
  for name, wanted in pairs(NEEDED[fact.fact] or {}) do
    local value = fact[name]
    if type(value) ~= wanted or wanted == "number" and not math.tointeger(value) then
      return false
    end
  end
  return true
end

--- Reads facts from a journal's text.
--
-- A line that cannot be read is one that a crash or a full disk tore: it is skipped when it is the last one or
-- when the fact after it says so. Elsewhere it means that somebody changed the file.
---@param text string
---@param path string for messages
---@return table[] facts, integer? torn the number of the torn last line
function M.parse(text, path)
  local facts, torn = {}, nil
  local number = 0
  for line, ending in text:gmatch("([^\n]*)(\n?)") do
    if line == "" and ending == "" then
      break
    end
    number = number + 1
    local ok, fact = pcall(json.decode, line)
    local good = ok and ending == "\n" and is_fact(fact)
    if torn and not (good and fact.fact == "torn") then
      err.raise({
        code = "parse",
        op = "journal",
        target = path,
        message = (
          "%s: line %d is no fact; the journal was changed by hand or the disk is damaged. Mend that line, or move "
          .. "%s away: the run is then not known here any more"
        ):format(path, torn, path:match("^(.*)/[^/]*$") or path),
      })
    end
    torn = nil
    if not good then
      torn = number
    elseif fact.fact ~= "torn" then
      facts[#facts + 1] = fact
    end
  end
  return facts, torn
end

---@class ciranda.journal.Object a thing in the cloud that a run asked for
---@field kind string "queued_resource", "node", "bucket_object"
---@field name string
---@field project string?
---@field zone string?
---@field request_id string? that makes repeating the create harmless
---@field asked string? digest of the request
---@field phase "intent"|"created"|"failed"|"deleting"|"gone"
---@field keep string? why it outlives its runner ("job": the job on it goes on)
---@field us integer? when its last fact was written

---@class ciranda.journal.State the fold of a journal
---@field run string
---@field recipe string?
---@field runners ciranda.journal.Runner[] those that have not said goodbye, oldest first
---@field objects table<string, ciranda.journal.Object> by "kind name"
---@field job ciranda.run.JobPlace? where the objects of a job are that runs by itself
---@field recreations table[] queued resources that were asked for again, in order; each { series, request, pause,
---  recreated }
---@field attempts table[] in order; each { attempt, series, gone, command, workers, exits, ended, ... }
---@field ended { status: integer, kind: string }? how the last runner ended
---@field first_us integer? time of the first fact, microseconds since 1970
---@field last_us integer?

---@param run string
---@return ciranda.journal.State
local function empty_state(run)
  return { run = run, runners = {}, objects = {}, recreations = {}, attempts = {}, attempt_by_id = {} }
end

local FOLD = {}

function FOLD.run(state, fact)
  state.recipe, state.arguments = fact.recipe, fact.arguments
end

function FOLD.runner(state, fact)
  table.insert(state.runners, fact)
  state.ended = nil
end

function FOLD.left(state, fact)
  for place, runner in ipairs(state.runners) do
    if runner.id == fact.id then
      table.remove(state.runners, place)
      break
    end
  end
  -- Who found the run taken has not ended it.
  if fact.kind ~= "busy" then
    state.ended = { status = fact.status, kind = fact.kind }
  end
end

function FOLD.object(state, fact)
  local key = fact.kind .. " " .. fact.name
  local known = state.objects[key]
  if not known or (known.phase == "gone" and fact.phase == "intent") then
    known = {}
    state.objects[key] = known
  end
  for name, value in pairs(fact) do
    if name ~= "fact" then
      known[name] = value
    end
  end
end

function FOLD.job(state, fact)
  state.job = fact
end

function FOLD.recreate(state, fact)
  local recreation = {}
  for name, value in pairs(fact) do
    recreation[name] = value
  end
  table.insert(state.recreations, recreation)
end

function FOLD.recreated(state, fact)
  local last = state.recreations[#state.recreations]
  if last then
    last.recreated = fact.us
  end
end

function FOLD.attempt(state, fact)
  local attempt = { exits = {}, staged = {} }
  for name, value in pairs(fact) do
    attempt[name] = value
  end
  table.insert(state.attempts, attempt)
  state.attempt_by_id[fact.attempt] = attempt
end

--- Facts about one attempt change that attempt; one about an attempt nobody announced is ignored.
local function about_attempt(change)
  return function(state, fact)
    local attempt = state.attempt_by_id[fact.attempt]
    if attempt then
      change(attempt, fact)
    end
  end
end

FOLD.staged = about_attempt(function(attempt, fact)
  attempt.staged[fact.slice .. "/" .. fact.worker] = fact
end)
FOLD.go = about_attempt(function(attempt, fact)
  attempt.gone = fact.us
end)
FOLD.exit = about_attempt(function(attempt, fact)
  attempt.exits[fact.slice .. "/" .. fact.worker] = fact
end)
FOLD.stop = about_attempt(function(attempt, fact)
  attempt.stopped = fact
end)
FOLD.saved = about_attempt(function(attempt, fact)
  attempt.saved = fact.step
end)
FOLD.attempt_end = about_attempt(function(attempt, fact)
  attempt.ended = fact
end)

--- Folds facts into the state of a run. Facts of kinds it does not know are kept out, not refused: a newer
--- version may have written them.
---@param run string
---@param facts table[]
---@return ciranda.journal.State
function M.fold(run, facts)
  local state = empty_state(run)
  for _, fact in ipairs(facts) do
    state.first_us = state.first_us or fact.us
    state.last_us = fact.us or state.last_us
    local change = FOLD[fact.fact]
    if change then
      change(state, fact)
    end
  end
  return state
end

return M
