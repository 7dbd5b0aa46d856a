--- An attempt on one worker: a directory under `~/.ciranda/<run>/<attempt>/`, made and read through the guard.
--
-- Staging makes the directory; making `started` inside it starts the command, which can be done once. So every
-- step here may be repeated after a lost connection: what has been staged stays staged, what was started is not
-- started again, and a log is followed from the byte after the last one that arrived.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local following = require("ciranda.run.following")
local lag = require("ciranda.io.lag")
local link_of = require("ciranda.fleet.link")
local pace = require("ciranda.fleet.pace")
local records = require("ciranda.run.record")
local shell = require("ciranda.io.shell")
local staging = require("ciranda.run.staging")
local task = require("ciranda.task")

local M = {}

local ROOT = staging.ROOT
--- Seconds a short remote command may take before the connection counts as dead.
local SHORT = 60
--- A follow that has had nothing to say for this long ends and is begun again: so a connection that died
--- without a word is noticed after this time and SHORT.
local IDLE = 60
--- Failures, besides those of a connection itself, that may pass. Where a worker was connected to before, also that
--- its name is not found, while this machine has no network; and once its command runs, that its shell cannot ask the
--- guard.
local PASSING = { "refused", "unavailable", "rate_limit" }
--- Seconds that reading a worker's clock may take.
local CLOCK = 10
--- Lines, and bytes of each, that are repeated of what a step that failed has said.
local LINES, LINE = 5, 500
--- The guard's exit status for an attempt of which neither a guard nor a process is left.
local GUARD_LOST, GUARD_FAILED = 3, 1
--- What it says when it was killed while somebody waited for it.
local ASK_AGAIN = "ask again"

--- Reasons in a record: another attempt of ours has ended this one; the guard itself got SIGTERM, as at a shutdown.
M.TAKEN = "another attempt takes its place"
M.SHUTDOWN = "the guard was told to end"

---@class ciranda.run.AttemptSpec
---@field run string
---@field id string the attempt's name
---@field worker ciranda.Worker
---@field link ciranda.fleet.Link
---@field command string
---@field directory string where the command runs, below the login directory
---@field environment table<string, string>
---@field bundle ciranda.archive.Manifest? laid over `directory`
---@field use_existing boolean? `directory` must be there already
---@field guard ciranda.run.Guard
---@field lost_after number? seconds without an answer after which the worker counts as lost (180)
---@field stage_timeout number? seconds that staging bears with a worker that is there and slow (60)
---@field lease ciranda.run.Lease? taken on the worker; without one nobody is asked
---@field setup { command: string, hash: string }? staged with it
---@field kill "mine"|"all"|nil whose processes may be ended that hold the accelerators, besides our earlier attempts'
---@field device_check boolean? false: a wrong number of device files is no reason to stop
---@field keep integer? bytes of the log that are kept on the worker at least (all)
---@field leader_only boolean? the leader's end is the end, whatever of its tree goes on
---@field idle number? seconds without output after which the guard says how it stands (60)
---@field on_leader fun(leader: table)? the leader has ended and its tree goes on
---@field on_gap fun(from: integer, to: integer)? these bytes of the log are no longer kept on the worker
---@field on_phase fun()? the phase has changed

---@class ciranda.run.Guard
---@field bytes string the program; that which this program carries is unpacked when it is asked for
---@field sha256 string in hexadecimal
---@field size integer

---@class ciranda.run.Attempt
---@field worker ciranda.Worker
---@field phase string what staging is doing, for the message that names a laggard
---@field clock_offset number seconds the worker's clock is ahead of ours
---@field clock_error number? seconds by which that may be wrong
---@field started_at number? when the command was started, by the worker's clock
---@field facts ciranda.run.Facts? what staging found there
---@field claimed boolean? the worker was looked at and its lease taken
---@field setup_done boolean? its SETUP had been done before
---@field received integer bytes of the log that have been handed on
---@field last_contact number when the worker last answered, on the clock that only grows
---@field heard number the same on the clock that stands still while this program does not run
---@field followed number? when its log began to be followed on the present connection, on the same clock
---@field alive number? when the attempt itself was last known to be there, on the clock that only grows: a machine that
---  answers again after its restart has no more of it
---@field grew number when its log is known to have grown last, on the same clock
---@field seen number until when that is known, on the same clock
local Attempt = {}
Attempt.__index = Attempt

--- The guard that this program carries (or that CIRANDA_GUARD names).
---@return ciranda.run.Guard
-- Raises "not_found" when there is none.
function M.guard()
  local engine = require("ciranda.core.engine")
  local sha256, size = engine.guard_digest()
  if not sha256 then
    local path = os.getenv("CIRANDA_GUARD")
    local file = path and io.open(path, "rb")
    if not file then
      err.raise({
        code = "not_found",
        op = "guard",
        message = path and ("CIRANDA_GUARD names %s, which cannot be read"):format(path)
          or "this program was built without the guard that runs on the workers; build it with musl-gcc, or let "
            .. "CIRANDA_GUARD name the file",
      })
    end
    local bytes = file:read("a")
    file:close()
    local crypto = require("ciranda.io.crypto")
    return { bytes = bytes, sha256 = crypto.hex(crypto.sha256(bytes)), size = #bytes }
  end
  return setmetatable({ sha256 = sha256, size = size }, {
    __index = function(guard, name)
      guard.bytes = name == "bytes" and engine.guard() or nil
      return rawget(guard, name)
    end,
  })
end

---@param spec ciranda.run.AttemptSpec
---@return ciranda.run.Attempt
function M.new(spec)
  local attempt = {
    phase = "waiting to connect",
    clock_offset = 0,
    received = 0,
    lost_after = 180,
    last_contact = clock.now(),
    heard = lag.clock(),
    grew = clock.now(),
    seen = clock.now(),
    idle = IDLE,
    path = ("%s/%s/%s"):format(ROOT, spec.run, spec.id),
    -- Unlike any other sender's, also where several machines share a home directory.
    part = ("part-%s-%d-%d"):format(spec.id, spec.worker.slice, spec.worker.index),
    guard_path = ("%s/bin/guard-%s"):format(ROOT, spec.guard.sha256),
  }
  for name, value in pairs(spec) do
    attempt[name] = value
  end
  return setmetatable(attempt, Attempt)
end

--- Notes what staging is doing.
---@param phase string
function Attempt:set_phase(phase)
  self.phase = phase
  if self.on_phase then
    self.on_phase()
  end
end

--- Notes that the worker has answered.
function Attempt:hear()
  self.last_contact, self.heard = clock.now(), lag.clock()
end

--- Notes that the attempt itself is there, running or with its record.
function Attempt:show_life()
  self.alive = clock.now()
end

--- Runs a script with the worker's sh, whatever the login shell is.
---@private
---@param script string
---@param options table? for exec
---@return table answer
function Attempt:shell(script, options)
  options = options or {}
  options.timeout = options.timeout or SHORT
  return self.link:use(function(connection)
    local answer = connection:exec(shell.sh(script), options)
    self:hear()
    return answer
  end)
end

--- What a worker has said: a full disk has tar complain of every file.
---@param text string
---@return string
local function first_lines(text)
  local lines, count = {}, 0
  for line in text:gmatch("[^\n]*%S[^\n]*") do
    count = count + 1
    lines[#lines + 1] = #lines < LINES and line:sub(1, LINE) or nil
  end
  return table.concat(lines, "\n")
    .. (count > LINES and ("\n(and %d lines more)"):format(count - LINES) or "")
end

--- Raises when a staging step did not succeed on the worker.
---@private
function Attempt:expect(answer, step)
  if answer.code == 0 then
    return answer
  end
  local words = first_lines(answer.stderr ~= "" and answer.stderr or answer.stdout)
  local why = answer.code and ("exit status %d"):format(answer.code)
    or answer.signal and "killed by SIG" .. answer.signal
    or "the connection ended before it did"
  local code = (words:find("No space left", 1, true) or words:find("quota exceeded", 1, true)) and "no_space"
    or words:find("Permission denied", 1, true) and "permission"
    or "failed"
  err.raise({
    code = code,
    op = "stage",
    target = link_of.title(self.worker),
    message = ("%s failed on %s: %s"):format(step, link_of.title(self.worker), words ~= "" and words or why),
  })
end

--- Stages the attempt: after it one small command starts the work. When the connection breaks it is done again; what
--- was stored is found there.
-- Raises what connecting raises; "no_space", "permission", "unsupported", "failed" with the worker's own words.
function Attempt:stage()
  self:persist(SHORT, "stage", function()
    staging.stage(self)
  end, self.stage_timeout)
end

--- Connects; nothing else is done.
-- Raises what connecting raises.
function Attempt:connect()
  self:set_phase("connecting")
  self:persist(SHORT, "stage", function()
    self.link:connection()
  end)
end

--- The first half of staging: takes the lease and looks around.
-- Raises what connecting raises; "busy" with `held` when another run has the worker.
function Attempt:claim()
  self:persist(SHORT, "stage", function()
    staging.claim(self)
  end, self.stage_timeout)
end

--- Finds what an earlier runner staged, without staging anything.
---@return boolean there
function Attempt:rejoin()
  return self:persist(self.lost_after, "rejoin", function()
    return staging.rejoin(self)
  end)
end

--- Runs a subcommand of the guard.
---@param arguments string subcommand, `%s` for the attempt's directory, options
---@param options table?
---@param path string? of another attempt
---@param with_status boolean? say the status afterwards, on standard error
---@return table answer
function Attempt:ask_guard(arguments, options, path, with_status)
  options = options or {}
  if not options.endless then
    options.timeout = options.timeout or SHORT
  end
  options.endless = nil
  return self.link:use(function(connection)
    -- CIRANDA_GUARD_OPTIONS is the worker's own setting (where its devices and its boot id are).
    local function words(text)
      return ("%s %s $CIRANDA_GUARD_OPTIONS"):format(self.guard_path, text:format(path or self.path))
    end
    local line = "exec " .. words(arguments)
    if with_status then
      line = ("%s; code=$?; %s >&2; exit $code"):format(words(arguments), words("status %s"))
    end
    local answer = connection:exec(shell.sh(line), options)
    self:hear()
    return answer
  end)
end

--- Asks a guard until one answers: the next one knows what was asked of one that was killed while somebody waited.
---@async
---@param seconds number in which to ask again
---@param ask fun(): { code: integer?, stderr: string }
---@return table answer the last one
function M.ask_again(seconds, ask)
  local ends, pause = clock.now() + seconds, 0.2
  while true do
    local answer = ask()
    local killed = not answer.code or answer.code == GUARD_FAILED and answer.stderr:find(ASK_AGAIN, 1, true)
    if not killed or clock.now() + pause >= ends then
      return answer
    end
    task.sleep(pause)
    pause = math.min(pause * 2, 5)
  end
end

--- Ends an earlier attempt of ours on this worker: it would hold the accelerator. Where its guard was killed meanwhile
--- the next one is asked.
---@param path string
---@param grace number seconds between TERM and KILL
-- Raises "busy" when something of it is left.
function Attempt:end_earlier(path, grace)
  local line = ('stop %%s --grace %.3f --reason "%s"'):format(grace, M.TAKEN)
  local answer = M.ask_again(grace + SHORT, function()
    return self:ask_guard(line, { timeout = grace + SHORT }, path)
  end)
  if answer.code == GUARD_LOST then
    -- Its machine was restarted under it: nothing to end, now or later.
    self:shell(("touch %s/forgotten"):format(path))
  elseif answer.code ~= 0 then
    err.raise({
      code = "busy",
      op = "stage",
      target = link_of.title(self.worker),
      message = ("the earlier attempt %s on %s could not be ended: %s"):format(
        path,
        link_of.title(self.worker),
        (answer.stderr:gsub("%s+$", ""))
      ),
    })
  end
end

--- Has the worker taken the connection, and not answered in time?
local function is_slow(problem)
  return err.is(problem, "timeout") and (problem.op == "ssh.exec" or pace.is_slow(problem))
end

--- Repeats `fn` while the connection breaks, until it has been broken for too long. While its handshake waits for its
--- turn, or this program does not run, a worker has not failed to answer.
---@param seconds number
---@param what string
---@param fn fun(): any
---@param patience number? in place of `seconds` for a worker that is there and slow
---@return any
-- Raises "lost" when it did not succeed in time.
function Attempt:persist(seconds, what, fn, patience)
  local began, waited = lag.clock(true), self.link.waited
  local pause = 0.2
  while true do
    local tried = clock.now()
    local result = table.pack(pcall(fn))
    if result[1] then
      return table.unpack(result, 2, result.n)
    end
    local problem = result[2]
    local passing = link_of.broken(problem)
      or err.is(problem, table.unpack(PASSING))
      or what ~= "stage" and err.is(problem, "resolve")
      or what == "status" and err.is(problem, "failed")
    if not passing then
      error(problem, 0)
    end
    if self.last_contact > tried then
      pause, waited = 0.1, self.link.waited -- it got somewhere this time
    end
    local silent = lag.clock(true) - math.max(began, self.heard) - (self.link.waited - waited)
    if silent > (patience and is_slow(problem) and patience or seconds) then
      err.raise({
        code = "lost",
        op = what,
        target = link_of.title(self.worker),
        message = ("%s has not answered for %d s: %s"):format(
          link_of.title(self.worker),
          math.floor(silent),
          tostring(problem)
        ),
        cause = problem,
      })
    end
    task.sleep(pause * (0.5 + math.random()))
    pause = math.min(pause * 2, 5)
  end
end

--- Starts the command; when it has been started before, does nothing.
---@param seconds number how long a broken connection is mended
-- Raises "lost", or "failed" with the guard's words.
function Attempt:go(seconds)
  self:set_phase("starting")
  local tries, sent = 0, 0
  local answer = self:persist(seconds, "start", function()
    self.link:connection()
    tries, sent = tries + 1, clock.wall()
    return self:ask_guard("run %s" .. (self.keep and (" --keep %d"):format(self.keep) or ""))
  end)
  local half = (clock.wall() - sent) / 2
  self.grew = clock.now()
  self.seen = self.grew
  self:expect(answer, "starting the command")
  local status = records.reply(answer.stdout)
  if status and status.state ~= "lost" then
    self:show_life()
  end
  self.started_at = status and type(status.started_at) == "number" and status.started_at or nil
  -- What was started just now was so between question and answer, which may tell the clocks better than the probe did.
  if self.started_at and tries == 1 and self.facts and half < (self.clock_error or math.huge) then
    self.clock_offset, self.clock_error = self.started_at - (sent + half), half
  end
  self:set_phase("running")
end

--- Measures the worker's clock again: in a job of days it drifts, or is set. Nothing changes when it cannot be asked.
---@async
function Attempt:look_at_clock()
  local ok, answer, sent = pcall(task.timeout, CLOCK, function()
    local sent = clock.wall()
    return self:shell("date +%s.%N"), sent
  end)
  local there = ok and tonumber(answer.stdout:match("(%d+%.%d+)%s*$"))
  if there then
    local half = (clock.wall() - sent) / 2
    local offset = there - (sent + half)
    -- What was measured before may be the better measurement of the same clock.
    if math.abs(offset - self.clock_offset) > half + (self.clock_error or 0) then
      self.clock_offset, self.clock_error = offset, half
    end
  elseif not ok and err.is_fatal(answer) then
    error(answer, 0)
  end
end

--- What the guard says of the attempt.
---@return table status `state` is "staged", "running", "stopping", "exited" or "lost"; `record` the exit record
-- Raises connection errors; "failed" when the guard's answer cannot be read.
function Attempt:status()
  local answer = self:ask_guard("status %s")
  local value = records.reply(answer.stdout)
  if not value then
    -- A machine that was made anew has neither guard nor attempt.
    if answer.code == 127 or answer.code == 126 then
      return { state = "gone" }
    end
    self:expect(
      { code = answer.code ~= 0 and answer.code or 1, stdout = answer.stdout, stderr = answer.stderr },
      "status"
    )
  end
  return value
end

--- Follows the log to its end, through lost connections; returns the exit record. With `leader_only` the end is the
--- leader's, and what is returned for a record is the status line.
---@param sink fun(bytes: string)? gets each byte of the log once, in order; nil: only the end is waited for
---@return table? record nil when the attempt is lost
---@return string? why it is lost
-- Raises only cancellation and what is no fault of the connection.
function Attempt:follow(sink)
  return following.follow(self, sink)
end

--- The end of the log, as the worker has it.
---@param bytes integer
---@return string
-- Raises what connecting raises.
function Attempt:remote_tail(bytes)
  return self:shell(("tail -c %d %s/log"):format(bytes, self.path)).stdout or ""
end

--- Asks the command to stop: TERM, a grace, KILL. Returns when it has ended. Where the guard was killed meanwhile the
--- next one is asked.
---@param grace number seconds
---@param reason string kept in the record
---@param on_told fun()? the request has reached the worker: it is carried out whatever becomes of this program
---@return table? record nil: it is lost
-- Raises "lost" when the worker does not answer, "failed" with the guard's words when it was not told in time, or
-- something is left after the KILL.
function Attempt:stop(grace, reason, on_told)
  local words = reason:gsub("[^%w%s_.:,()-]", ""):sub(1, 100)
  local line = ('stop %%s --grace %.3f --reason "%s"'):format(grace, words)
  -- The guard answers when all has ended, and says on standard error that it knows.
  local said
  local function hear(bytes)
    said = said .. bytes
    if said:find("asked\n", 1, true) then
      self:show_life()
      on_told()
    end
  end
  local answer = M.ask_again(grace + SHORT, function()
    local one = self:persist(math.min(self.lost_after, grace + 30), "stop", function()
      said = ""
      return self:ask_guard(line, { timeout = grace + SHORT, on_stderr = on_told and hear })
    end)
    local words_of = on_told and said or one.stderr
    return { code = one.code, signal = one.signal, stdout = one.stdout, stderr = words_of }
  end)
  if answer.code and answer.code ~= 0 and answer.code ~= GUARD_FAILED then
    return nil -- whoever follows it learns that from the status
  end
  self:expect(answer, "the stop")
  return records.reply(answer.stdout)
end

--- How the attempt ended, from its record.
---@param record table?
---@param why string? when there is none
---@return ciranda.run.Outcome
function Attempt:outcome(record, why)
  return records.outcome(self, record, why)
end

return M
