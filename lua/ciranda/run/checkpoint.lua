--- Checkpoint on signal: has the gang saved, and what?
--
-- "Saved" is what is on disk: a finished step that was not there before the signal. An exit status does not say it:
-- MaxText leaves with 0 without a save when its emergency checkpoints are off, Pax with 1 after one.
--
--     local watch = checkpoint.before(fleet, "gs-fuse/ckpt")   -- what is there now
--     gang:stop(300, "the user asked")                         -- TERM to everybody
--     gang:watch()
--     local report = watch:after()                             -- what is there now that was not
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {}

--- Seconds that looking at a directory may take, a worker.
local LOOK = 30

--- The step in a directory's name when the name is that of a finished one: `100`, `step_100`, `checkpoint-100`.
--
-- A save that is under way has another name until it is renamed: Orbax writes `100.orbax-checkpoint-tmp-...`,
-- others `100.tmp` or `tmp_100`.
---@param name string
---@return integer?
function M.step_of(name)
  local lower = name:lower()
  if lower:find("tmp", 1, true) or lower:find("incomplete", 1, true) or lower:find("part", 1, true) then
    return nil
  end
  local digits = name:match("^(%d+)$") or name:match("^%a[%a_.-]*[_-](%d+)$")
  return digits and #digits <= 18 and math.tointeger(tonumber(digits)) or nil
end

--- The steps in a listing that are finished.
--
-- On object stores a rename is no single act; there Orbax writes in place and adds `commit_success.txt` at the
-- end. When any directory has that file, only those that have it are finished.
---@param entries { name: string, mtime: integer, committed: boolean? }[]
---@param step_of (fun(name: string): integer?)?
---@return table<integer, integer> steps step -> time of the directory
function M.finished(entries, step_of)
  step_of = step_of or M.step_of
  local any_committed = false
  for _, entry in ipairs(entries) do
    any_committed = any_committed or entry.committed or false
  end
  local steps = {}
  for _, entry in ipairs(entries) do
    local step = step_of(entry.name)
    if step and (entry.committed or not any_committed) then
      steps[step] = math.max(steps[step] or 0, entry.mtime)
    end
  end
  return steps
end

--- What a COMMAND says of its checkpoint directory: the value of an option whose name ends in checkpoint_dir,
--- checkpoint-dir, checkpoint_directory or the like.
---@param command string
---@return string?
function M.directory_in(command)
  for name, value in command:gmatch("([%w_%-%.]*[cC]heckpoint[%w_%-]*)[=%s]%s*[\"']?([^%s\"';|&]+)") do
    if name:lower():match("checkpoint[_-]?dir$") or name:lower():match("checkpoint[_-]?directory$") then
      if value:sub(1, 1) ~= "-" and not value:find("%$[^%a_{]") then
        return value
      end
    end
  end
  return nil
end

--- The last step that a piece of a log speaks of, as MaxText prints it: `completed step: 12, ...`.
---@param text string
---@return integer?
function M.last_step(text)
  local last
  for digits in text:gmatch("completed step: (%d+)") do
    last = math.tointeger(tonumber(digits))
  end
  return last
end

--- The time of the last step that a piece of a log speaks of.
---@param text string
---@return number? seconds
function M.step_time(text)
  return tonumber(text:match("^.*completed step: %d+, seconds: ([%d.]+)"))
end

--- The step at which processes agreed to save and stop, as Orbax logs it when the coordination service has passed a
--- SIGTERM on: also one that nobody here has sent.
---@param text string a piece of a log
---@return integer?
function M.sync_point(text)
  local last
  for digits in text:gmatch("Reached preemption sync point, step=(%d+)") do
    last = math.tointeger(tonumber(digits))
  end
  return last
end

--- Does a log say that training ended because of a SIGTERM, whatever the exit status? MaxText says so and leaves with
--- 0, also without a save.
---@param text string a piece of a log
---@return boolean
function M.stopped_by_signal(text)
  return text:find("Job received termination signal (SIGTERM)", 1, true) ~= nil
end

---@class ciranda.checkpoint.Listing
---@field directory string
---@field steps table<ciranda.Worker|string, table<integer, integer>> of those that answered; a bucket stands for all
---@field problems table<ciranda.Worker, string> of those that did not
---@field answered integer
---@field iterators table<integer, true> steps that hold the state of a data iterator

--- A directory as one word for a shell: `$NAME` and `${NAME}` mean what they mean in COMMAND, the rest is text.
---@param directory string
---@return string
local function quote(directory)
  local text = directory:gsub('[\\"`]', "\\%0")
  text = (text .. "\0"):gsub("%$()", function(after)
    local follows = text:sub(after)
    return (follows:match("^[%a_]") or follows:match("^{[%a_][%w_]*}")) and "$" or "\\$"
  end)
  return '"' .. text:gsub("%z", "") .. '"'
end

--- A directory as COMMAND has it, as a command in the login directory has to call it.
---@param directory string
---@param options { base: string? }?
---@return string
local function path_of(directory, options)
  if not directory:match("^[/~$]") and options and options.base then
    return options.base .. "/" .. directory
  end
  return (directory:gsub("^~/", ""))
end

---@param directory string
---@return string
local function listing_command(directory)
  return shell.sh(
    "cd "
      .. quote(directory)
      .. " 2>/dev/null || { echo ciranda-none; exit 0; }; echo ciranda-listing; "
      .. 'LC_ALL=C stat -c "%Y %n" -- */ 2>/dev/null; echo ciranda-commits; '
      .. 'find . -mindepth 2 -maxdepth 2 -name "commit_success*" 2>/dev/null; echo ciranda-iterators; '
      .. 'find . -mindepth 2 -maxdepth 2 -name "*iter*" 2>/dev/null; exit 0'
  )
end

--- Reads what the listing command printed.
---@param text string
---@return { name: string, mtime: integer, committed: boolean?, iterator: boolean? }[] iterator: the step has an item
---  whose name has "iter" in it: MaxText saves its data iterator as `iter`, others as `data_iterator` and the like
function M.parse_listing(text)
  local directories, rest = text:match("ciranda%-listing\n(.-)ciranda%-commits\n(.*)$")
  local commits, iterators = (rest or ""):match("^(.-)ciranda%-iterators\n(.*)$")
  commits = commits or rest
  local entries, by_name = {}, {}
  for mtime, name in (directories or ""):gmatch("(%d+) ([^\n]-)/?\n") do
    local entry = { name = name, mtime = math.tointeger(tonumber(mtime)) }
    entries[#entries + 1] = entry
    by_name[name] = entry
  end
  for name in (commits or ""):gmatch("%./([^\n/]+)/commit_success") do
    if by_name[name] then
      by_name[name].committed = true
    end
  end
  for name in (iterators or ""):gmatch("%./([^\n/]+)/") do
    if by_name[name] then
      by_name[name].iterator = true
    end
  end
  return entries
end

--- Newest steps of a bucket whose commit file is looked at; older ones cannot be the newest finished one for long.
local CANDIDATES = 5

--- Looks at a directory in a bucket: one listing, which stands for what all workers see.
--
-- A rename is no single act there, so Orbax writes in place and adds `commit_success.txt` at the end: without it a step
-- is not finished. Who names other steps (`step_of`) says what is finished by the name.
---@async
---@param directory string gs://BUCKET/PATH
---@param options { step_of: (fun(name: string): integer?)?, storage: ciranda.gcp.Storage?, timeout: number? }
---@return ciranda.checkpoint.Listing
-- Raises what Cloud Storage's calls raise; "timeout".
function M.look_in_bucket(directory, options)
  local storages = require("ciranda.gcp.storage")
  return task.timeout(options.timeout or LOOK, function()
    local storage = options.storage or storages.connect()
    local bucket, prefix = storages.parse(directory)
    prefix = prefix:gsub("/*$", "")
    prefix = prefix ~= "" and prefix .. "/" or ""
    local _, directories = storage:list(bucket, { prefix = prefix, delimiter = "/" })
    local candidates = {}
    for _, path in ipairs(directories) do
      local step = (options.step_of or M.step_of)(path:sub(#prefix + 1):gsub("/$", ""))
      if step then
        candidates[#candidates + 1] = { step = step, path = path }
      end
    end
    table.sort(candidates, function(a, b)
      return a.step > b.step
    end)
    local steps, iterators = {}, {}
    for place = 1, math.min(#candidates, CANDIDATES) do
      local candidate = candidates[place]
      local objects, items = storage:list(bucket, { prefix = candidate.path, delimiter = "/" })
      for _, path in ipairs(items) do
        iterators[candidate.step] = iterators[candidate.step]
          or path:sub(#candidate.path + 1):find("iter", 1, true) and true
          or nil
      end
      local newest, committed = 0, options.step_of ~= nil
      for _, object in ipairs(objects) do
        newest = math.max(newest, tonumber((object.generation or "0")) or 0)
        committed = committed or object.name:sub(#candidate.path + 1):find("^commit_success") ~= nil
      end
      if committed then
        -- A generation grows with every write: it is the time of it, in microseconds.
        steps[candidate.step] = newest
      end
    end
    return {
      directory = directory,
      steps = { [directory] = steps },
      problems = {},
      answered = 1,
      iterators = iterators,
    }
  end)
end

--- Looks at a directory on every worker.
---@param fleet ciranda.Fleet
---@param directory string as COMMAND has it: relative to `base` unless absolute; `$NAME` is the worker's
---@param options { base: string?, step_of: (fun(name: string): integer?)?, timeout: number?,
---  storage: ciranda.gcp.Storage? }? base: the directory COMMAND runs in, below the login directory
---@return ciranda.checkpoint.Listing
-- Raises "unsupported" for another URL than gs://, and for that what Cloud Storage's calls raise.
function M.look(fleet, directory, options)
  options = options or {}
  if directory:match("^gs://") then
    return M.look_in_bucket(directory, options)
  elseif directory:match("^%a%w*://") then
    err.raise({
      code = "unsupported",
      op = "checkpoint",
      target = directory,
      message = ("%s is neither a directory on the workers nor a bucket of Cloud Storage (gs://...)"):format(
        directory
      ),
    })
  end
  local path = path_of(directory, options)
  local listing = { directory = directory, steps = {}, problems = {}, answered = 0, iterators = {} }
  local limit = options.timeout or LOOK
  -- The way to a worker counts too: one that is gone must not hold up what the others are asked for.
  local results = fleet:run(listing_command(path), { timeout = limit, within = limit })
  for _, result in ipairs(results) do
    if result.err or result.code ~= 0 then
      listing.problems[result.worker] = tostring(result.err or ("exit status %s"):format(result.code))
    else
      local entries = M.parse_listing(result.stdout)
      listing.steps[result.worker] = M.finished(entries, options.step_of)
      listing.answered = listing.answered + 1
      for _, entry in ipairs(entries) do
        local step = entry.iterator and (options.step_of or M.step_of)(entry.name)
        if step then
          listing.iterators[step] = true
        end
      end
    end
  end
  return listing
end

--- The newest step that every worker that answered has. In a shared directory that is the newest step; where each
--- worker writes its own, it is the newest one a restart can begin from.
---@param listing ciranda.checkpoint.Listing
---@return integer?
function M.newest(listing)
  local counts = {}
  for _, steps in pairs(listing.steps) do
    for step in pairs(steps) do
      counts[step] = (counts[step] or 0) + 1
    end
  end
  local newest
  for step, count in pairs(counts) do
    if count == listing.answered and (not newest or step > newest) then
      newest = step
    end
  end
  return newest
end

--- How many bytes of a checkpoint each host has, on the whole: the size of one directory that all write to, shared out.
---@param fleet ciranda.Fleet
---@param directory string
---@param step integer? as `newest` has it
---@param options { base: string?, timeout: number? }? as for `look`
---@return integer? bytes nil when there is no such step or it cannot be measured
function M.size(fleet, directory, step, options)
  if not step or directory:match("^%a%w*://") then
    return nil
  end
  local path = path_of(directory, options)
  local command = shell.sh(
    ('cd %s && for each in *; do case $each in *[!0-9]%d|%d) du -sk -- "$each";; esac; done'):format(
      quote(path),
      step,
      step
    )
  )
  local one = fleet:select(nodeset.fold({ fleet:workers()[1] }))
  local result = one:run(command, { timeout = options and options.timeout or LOOK })[1]
  local kilobytes = not result.err and result.code == 0 and tonumber(result.stdout:match("^(%d+)"))
  return kilobytes and math.ceil(kilobytes * 1024 / #fleet) or nil
end

--- When a step was finished, by the newest of those that have it.
---@param listing ciranda.checkpoint.Listing
---@param step integer
---@return number? seconds since 1970, by the clock of whoever wrote it
function M.time_of(listing, step)
  local newest = 0
  for _, steps in pairs(listing.steps) do
    newest = math.max(newest, steps[step] or 0)
  end
  if newest > 1e14 then
    newest = newest / 1e6 -- an object's generation
  end
  return newest > 0 and newest or nil
end

---@class ciranda.checkpoint.Watch
---@field private fleet ciranda.Fleet
---@field private directory string
---@field private options table?
---@field private listing ciranda.checkpoint.Listing
local Watch = {}
Watch.__index = Watch

--- Notes what is on disk before a signal.
---@param fleet ciranda.Fleet
---@param directory string
---@param options table? as for `look`; `timeout` is that of this look, and the one after the end takes its time
---@return ciranda.checkpoint.Watch
function M.before(fleet, directory, options)
  local later = {}
  for name, value in pairs(options or {}) do
    later[name] = name ~= "timeout" and value or nil
  end
  return setmetatable({
    fleet = fleet,
    directory = directory,
    options = later,
    listing = M.look(fleet, directory, options),
  }, Watch)
end

--- Who did not answer.
---@param listing ciranda.checkpoint.Listing
---@return ciranda.Worker[] silent
---@return string? reason of one of them
local function silent_in(listing)
  local silent, reason = {}, nil
  for worker, problem in pairs(listing.problems) do
    silent[#silent + 1] = worker
    reason = reason or problem
  end
  return silent, reason
end

---@class ciranda.checkpoint.Report
---@field saved boolean a step that was not there before the signal is finished, on every worker that answered
---@field step integer? the newest finished step, saved now or earlier
---@field before integer? the newest one before the signal
---@field missed integer? the step at which the workers stopped, which is not on disk
---@field blind string? why nobody can say whether the step was there before: no worker answered then
---@field unknown string? why nobody can say: no worker answered
---@field problems string? the workers that did not answer
---@field listing ciranda.checkpoint.Listing

--- Looks again, after the end.
---@param sync_point integer? the step at which the workers said that they stop: an earlier one on disk was saved in the
---  ordinary course between the first look and the stop
---@return ciranda.checkpoint.Report
function Watch:after(sync_point)
  local listing = M.look(self.fleet, self.directory, self.options)
  local silent, reason = silent_in(listing)
  local report = {
    saved = false,
    step = M.newest(listing),
    before = M.newest(self.listing),
    problems = #silent > 0 and ("%s: %s"):format(nodeset.fold(silent), reason) or nil,
    listing = listing,
  }
  if listing.answered == 0 then
    report.unknown = reason or "there is no worker"
    return report
  end
  local step = report.step
  report.saved = step ~= nil
  if step and sync_point and step < sync_point then
    report.saved, report.missed = false, sync_point
  elseif step and not sync_point and self.listing.answered == 0 then
    report.saved = false
    report.blind = select(2, silent_in(self.listing)) or "there was no worker"
  end
  for worker, steps in pairs(listing.steps) do
    local earlier = self.listing.steps[worker]
    -- A step of the same name counts when its directory was made anew.
    if step and earlier and earlier[step] and earlier[step] >= steps[step] then
      report.saved = false
    elseif step and not earlier and report.before and step <= report.before then
      report.saved = false
    end
  end
  return report
end

--- What a report says, in one line.
---@param report ciranda.checkpoint.Report
---@param directory string
---@param last_step integer? the last step that the logs speak of
---@return string
function M.describe(report, directory, last_step)
  local text
  if report.unknown then
    return ("nobody can say what is in %s: %s"):format(directory, report.unknown)
  elseif report.saved then
    text = ("saved: step %d is on disk in %s"):format(report.step, directory)
  elseif report.missed and report.step then
    text = ("not saved: the workers stopped at step %d, the last step on disk in %s is %d"):format(
      report.missed,
      directory,
      report.step
    )
  elseif report.step and report.blind then
    text = ("the last step on disk in %s is %d, and nobody can say whether it was there before the signal: %s"):format(
      directory,
      report.step,
      report.blind
    )
  elseif report.step then
    text = ("not saved: the last step on disk in %s is %d, from before the signal"):format(
      directory,
      report.step
    )
  else
    text = ("not saved: there is no finished step in %s"):format(directory)
  end
  if last_step then
    local lost = last_step - (report.step or -1)
    if lost > 0 then
      text = ("%s; %d steps lost (the logs had reached step %d)"):format(text, lost, last_step)
    end
  end
  if report.problems then
    text = text .. "; not asked: " .. report.problems
  end
  return text
end

return M
