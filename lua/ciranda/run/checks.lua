--- What staging checks of a worker, and of the workers among each other.
local err = require("ciranda.io.error")
local link_of = require("ciranda.fleet.link")
local nodeset = require("ciranda.provider.nodeset")

local M = {}

--- Disk that the guard, its record and the first of the log need besides the bundle, in kB.
local SPARE_KB = 1024

--- Refuses a worker that cannot take the attempt.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
-- Raises "unsupported" for another kind of machine, "no_space", "precondition" for missing devices, what `lock_file`
-- raises.
function M.worker(attempt, facts)
  local title = link_of.title(attempt.worker)
  local function refuse(code, format, ...)
    err.raise({ code = code, op = "stage", target = title, message = format:format(title, ...) })
  end
  local machine = facts.system and facts.system:match("(%S+)$")
  if machine and machine ~= "x86_64" and not os.getenv("CIRANDA_GUARD") then
    refuse(
      "unsupported",
      "%s is a %s machine, and the guard that this program carries is for x86_64; let CIRANDA_GUARD name one for it",
      machine
    )
  end
  local bundle = attempt.bundle
  local needed = (bundle and bundle.size + (facts.bundle and 0 or bundle.archive_size) or 0) // 1024
    + SPARE_KB
  local free = math.tointeger(tonumber(facts.free_kb))
  if free and free < needed then
    refuse(
      "no_space",
      "%s has %.1f MB of disk left in its home directory, and the attempt needs %.1f MB",
      free / 1024,
      needed / 1024
    )
  end
  local chips, there = attempt.worker.chips, math.tointeger(tonumber(facts.devices))
  if chips and there and there ~= chips and attempt.device_check ~= false then
    refuse(
      "precondition",
      "%s has %d accelerator device file%s, and a worker of its topology has %d; start the machine again or make the "
        .. "slice anew (--DEVICE_CHECK=false goes on)",
      there,
      there == 1 and "" or "s",
      chips
    )
  end
  M.lock_file(attempt, facts)
end

--- Refuses a worker with a lock file that nobody holds and that is not ours to remove.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
-- Raises "permission".
function M.lock_file(attempt, facts)
  if facts.lock_file then
    local title = link_of.title(attempt.worker)
    err.raise({
      code = "permission",
      op = "stage",
      target = title,
      message = (
        "on %s the accelerator library's lock file %s is held by nobody and cannot be removed: take it away "
        .. "there (sudo rm), or no program will start"
      ):format(title, facts.lock_file),
    })
  end
end

--- What a worker computes with: name -> version.
---@param facts ciranda.run.Facts
---@return table<string, string>
local function fingerprint(facts)
  local found = {
    kernel = facts.system and facts.system:match("^(%S+)"),
    python = facts.python ~= "" and facts.python or nil,
  }
  for _, name in ipairs(facts.packages) do
    local package, version = name:match("^(.-)%-(.*)%.dist%-info$")
    if package then
      found[package] = version
    end
  end
  return found
end

--- What is not the same on all workers: for each name the odd ones out.
---@param members { worker: ciranda.Worker, facts: ciranda.run.Facts }[]
---@return string[] lines such as "jax is 0.4.35 on 63 workers, but 0.4.30 on slice1/worker3"
function M.odd_ones(members)
  local versions, names = {}, {}
  local prints = {}
  for place, member in ipairs(members) do
    prints[place] = fingerprint(member.facts)
    for name in pairs(prints[place]) do
      if not versions[name] then
        versions[name] = {}
        names[#names + 1] = name
      end
    end
  end
  table.sort(names)
  local lines = {}
  for _, name in ipairs(names) do
    local groups = {}
    for place, member in ipairs(members) do
      local version = prints[place][name] or "not there"
      if not versions[name][version] then
        versions[name][version] = { version = version, workers = {} }
        groups[#groups + 1] = versions[name][version]
      end
      table.insert(versions[name][version].workers, member.worker)
    end
    if #groups > 1 then
      -- Of two groups of one size the later one is the odd one.
      local most = 1
      for place, group in ipairs(groups) do
        most = #group.workers > #groups[most].workers and place or most
      end
      local usual = table.remove(groups, most)
      local pieces = {}
      for place, group in ipairs(groups) do
        pieces[place] = ("%s on %s"):format(group.version, nodeset.fold(group.workers))
      end
      lines[#lines + 1] = ("%s is %s on %d worker%s, but %s"):format(
        name,
        usual.version,
        #usual.workers,
        #usual.workers == 1 and "" or "s",
        table.concat(pieces, ", ")
      )
    end
  end
  return lines
end

--- How far apart the workers started, by their clocks as corrected.
---@param attempts ciranda.run.Attempt[]
---@return { seconds: number, error: number, first: ciranda.Worker, last: ciranda.Worker }? skew nil when nobody said
---  when; `error`: seconds by which a corrected clock may be wrong
function M.skew(attempts)
  local first, last, least, most, wrong = nil, nil, math.huge, -math.huge, 0
  for _, attempt in ipairs(attempts) do
    local at = attempt.started_at and attempt.started_at - attempt.clock_offset
    if at then
      if at < least then
        first, least = attempt.worker, at
      end
      if at > most then
        last, most = attempt.worker, at
      end
      wrong = math.max(wrong, attempt.clock_error or 0)
    end
  end
  return first and { seconds = most - least, error = wrong, first = first, last = last } or nil
end

return M
