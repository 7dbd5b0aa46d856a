--- SETUP: what makes a machine ready for COMMAND, done once a machine and hash of SETUP and bundle.
--
-- It is an attempt of its own under the guard, in `~/.ciranda/.setup/HASH`: so it is started once, whoever asks, lives
-- through lost connections, and a second run finds it done, or takes up one that still runs.
local attempts = require("ciranda.run.attempt")
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local link_of = require("ciranda.fleet.link")
local staging = require("ciranda.run.staging")
local task = require("ciranda.task")

local M = {}

--- Seconds to start it, and between TERM and KILL when its deadline is over.
local START, GRACE = 120, 5
--- Bytes and lines of a log's end that are kept for a message.
local TAIL, LINES = 8192, 20

--- The hash by which a SETUP is known on the machines.
---@param command string
---@param bundle ciranda.archive.Manifest?
---@param directory string where it runs; it counts where nothing is sent
---@return string
function M.hash(command, bundle, directory)
  return crypto.hex(crypto.sha256(command .. "\0" .. (bundle and bundle.archive_sha256 or "~/" .. directory)))
end

--- The log of a worker's SETUP on the runner.
---@param directory string
---@param worker ciranda.Worker
---@return string
function M.log_path(directory, worker)
  return ("%s/setup_slice_%04d_worker_%04d.txt"):format(directory, worker.slice, worker.index)
end

---@param tail string
---@return string
local function last_lines(tail)
  local lines = {}
  for line in tail:gmatch("[^\n]+") do
    lines[#lines + 1] = line
  end
  return table.concat(lines, "\n  ", math.max(1, #lines - LINES + 1))
end

---@param path string
---@return file*
local function open_log(path)
  local file, message = io.open(path, "wb")
  return file
    or err.raise({
      code = "io",
      op = "setup",
      target = path,
      message = ("the log of SETUP cannot be kept: %s"):format(message),
    })
end

--- Runs the SETUP of a staged attempt to its end, or takes up one that runs.
---@async
---@param attempt ciranda.run.Attempt
---@param timeout number seconds
---@param directory string? where its log goes on the runner
-- Raises "failed" with its status and the end of its log, "deadline", "lost", "io" when its log cannot be kept here.
function M.run(attempt, timeout, directory)
  local title = link_of.title(attempt.worker)
  local one = attempts.new({
    run = ".setup",
    id = attempt.setup.hash,
    worker = attempt.worker,
    link = attempt.link,
    command = attempt.setup.command,
    directory = attempt.directory,
    environment = attempt.environment,
    guard = attempt.guard,
    lost_after = attempt.lost_after,
  })
  local path = directory and M.log_path(directory, attempt.worker)
  local file <close> = path and open_log(path) or nil
  local tail = ""
  local function refuse(code, format, ...)
    err.raise({
      code = code,
      op = "setup",
      target = title,
      message = ("SETUP on %s %s%s"):format(
        title,
        format:format(...),
        tail:find("%S")
            and ("; the end of its log%s:\n  %s"):format(path and " (" .. path .. ")" or "", last_lines(tail))
          or "; it printed nothing"
      ),
    })
  end
  attempt:set_phase("setting up")
  one:go(START)
  local ok, record, why = pcall(task.timeout, timeout, one.follow, one, function(bytes)
    tail = (tail .. bytes):sub(-TAIL)
    if file then
      file:write(bytes)
    end
  end)
  if not ok and err.is(record, "timeout") then
    one:stop(GRACE, "its deadline is over")
    refuse("deadline", "had not ended after %g s (--SETUP_TIMEOUT) and was stopped", timeout)
  elseif not ok then
    error(record, 0)
  end
  local outcome = one:outcome(record, why)
  if outcome.lost then
    refuse("lost", "is lost: %s", outcome.lost)
  elseif outcome.signal or outcome.code ~= 0 or outcome.stopped then
    refuse(
      "failed",
      "ended with %s",
      outcome.signal and ("signal %s"):format(outcome.signal) or ("exit status %d"):format(outcome.code)
    )
  end
  staging.fingerprint(attempt)
  attempt:set_phase("staged")
end

--- Stops the SETUP that an attempt began, wherever it still runs: its runner is gone, or leaves. What does not
--- answer is left alone.
---@async
---@param fleet ciranda.Fleet
---@param hash string
function M.stop(fleet, hash)
  local guard = attempts.guard()
  task.map(fleet:workers(), function(worker)
    local one = attempts.new({
      run = ".setup",
      id = hash,
      worker = worker,
      link = fleet:link(worker),
      guard = guard,
      lost_after = START,
    })
    local ok, problem = pcall(function()
      if one:status().state == "running" then
        one:stop(GRACE, "its run was stopped")
      end
    end)
    if not ok and err.is_fatal(problem) then
      error(problem, 0)
    end
  end)
end

--- Makes the directory of the logs.
---@param journal ciranda.Journal?
---@param id string
---@return string?
function M.directory(journal, id)
  local directory = journal and ("%s/%s"):format(journal.directory, id)
  if directory then
    fs.mkdir_p(directory, 448)
  end
  return directory
end

return M
