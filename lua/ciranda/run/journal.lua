--- The journal: what a run did, one fact a line, so that nothing is forgotten when the runner dies.
--
-- `$XDG_STATE_HOME/ciranda/runs/<run>/journal.jsonl` only ever grows. An **intent** (spending money, starting
-- work) is on the disk before the call it speaks of; the state of a run is the fold of its facts. The journal
-- is the run's lock as well: each runner writes that it is there and then reads who was there before it.
local accounts = require("ciranda.io.account")
local err = require("ciranda.io.error")
local facts_of = require("ciranda.run.journal_facts")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local DIRECTORY_MODE = 448 -- 0700: commands and their arguments are the user's own business
local FILE_MODE = 384 -- 0600

--- Seconds between two breaths of a runner: it touches its journal, so that others see that it is there.
M.BREATH = 20

--- The directory that holds all runs.
---@return string
-- Raises "failed" when neither XDG_STATE_HOME nor HOME nor an account says where.
function M.directory()
  local state = os.getenv("XDG_STATE_HOME")
  if not state or state:sub(1, 1) ~= "/" then
    state = accounts.home() .. "/.local/state"
  end
  return state .. "/ciranda/runs"
end

--- Is this fit to be a run's name? It names directories here and on the workers.
---@param run string
---@return boolean
function M.valid_name(run)
  return type(run) == "string" and #run <= 128 and run:match("^[%w_][%w_.%-]*$") ~= nil
end

---@param run string
---@param level integer
local function check_name(run, level)
  if not M.valid_name(run) then
    err.misuse(
      level + 1,
      "%q cannot be a run's name: letters, digits, '_', '-' and '.', at most 128, not beginning with '-' or '.'",
      tostring(run)
    )
  end
end

---@param path string
local function make_directories(path)
  local made = ""
  for part in path:gmatch("[^/]+") do
    made = made .. "/" .. part
    local ok, message, name = uv.fs_mkdir(made, DIRECTORY_MODE)
    if not ok and name ~= "EEXIST" then
      -- A directory above may be one that we may not write to but that is there.
      local stat = uv.fs_stat(made)
      if not stat or stat.type ~= "directory" then
        local problem = err.wrap(message, { op = "journal: mkdir", target = made })
        problem.message = problem.message .. ". Runs are kept below it; XDG_STATE_HOME names another place"
        err.raise(problem)
      end
    end
  end
end

---@param path string
---@return string? text nil when there is no such file
local function read_file(path)
  -- Whoever has put a FIFO there must not make the list of runs wait for a writer.
  local fd, message, name = uv.fs_open(path, uv.constants.O_RDONLY | uv.constants.O_NONBLOCK, 0)
  if not fd then
    if name == "ENOENT" then
      return nil
    end
    err.raise(err.wrap(message, { op = "journal: read", target = path }))
  end
  local pieces = {}
  while true do
    local bytes, problem = uv.fs_read(fd, 1048576)
    if not bytes then
      uv.fs_close(fd)
      err.raise(err.wrap(problem, { op = "journal: read", target = path }))
    elseif bytes == "" then
      break
    end
    pieces[#pieces + 1] = bytes
  end
  uv.fs_close(fd)
  return table.concat(pieces)
end

--- A process's start time in clock ticks since boot (field 22 of /proc/PID/stat), which tells it from a later
--- process with the same number; nil when there is no such process.
---@param pid integer
---@return integer?
local function start_time(pid)
  local file = io.open(("/proc/%d/stat"):format(pid))
  if not file then
    return nil
  end
  local text = file:read("a") -- nil when it has gone since
  file:close()
  local after_name = text and text:match("^.*%)(.*)$")
  local count = 0
  for field in (after_name or ""):gmatch("%S+") do
    count = count + 1
    if count == 1 and (field == "Z" or field == "X") then
      return nil
    elseif count == 20 then
      return math.tointeger(tonumber(field))
    end
  end
  return nil
end

---@return string
local function boot_id()
  local file = io.open("/proc/sys/kernel/random/boot_id")
  if not file then
    return ""
  end
  local text = file:read("l")
  file:close()
  return text or ""
end

---@class ciranda.journal.Runner
---@field id string
---@field pid integer
---@field start_time integer?
---@field boot_id string
---@field host string
---@field stops boolean? it has the run in order to stop it
---@field us integer since when, microseconds since 1970

--- Is the process that wrote a runner fact still there? "unknown" for one on another machine that shares this
--- state directory.
---@param runner ciranda.journal.Runner
---@return "alive"|"dead"|"unknown"
function M.runner_state(runner)
  if runner.host ~= uv.os_gethostname() then
    return "unknown"
  elseif runner.boot_id ~= boot_id() then
    return "dead"
  end
  local began = start_time(runner.pid)
  return began and began == runner.start_time and "alive" or "dead"
end

---@param run string
---@return string
function M.path(run)
  return M.directory() .. "/" .. run .. "/journal.jsonl"
end

--- The state of a run, or nil when there is no such run.
---@param run string
---@return ciranda.journal.State?
-- Raises "parse" when the journal has been damaged, "io" and the like when it cannot be read.
function M.read(run)
  check_name(run, 1)
  local path = M.path(run)
  local text = read_file(path)
  return text and facts_of.fold(run, (facts_of.parse(text, path)))
end

--- When a run's runner last gave a sign of life: it wrote a fact, or breathed.
---@param run string
---@return number? seconds since 1970
function M.breath(run)
  local stat = uv.fs_stat(M.path(run))
  return stat and stat.mtime.sec + stat.mtime.nsec / 1e9
end

--- The names of all runs, sorted.
---@return string[]
function M.list()
  local names = {}
  local scan = uv.fs_scandir(M.directory())
  while scan do
    local name = uv.fs_scandir_next(scan)
    if not name then
      break
    end
    if M.valid_name(name) and uv.fs_stat(M.path(name)) then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return names
end

---@class ciranda.Journal
---@field run string
---@field path string
---@field directory string the run's own directory on the runner
---@field private fd integer?
---@field private id string this runner's
---@field private facts table[]
---@field private unwritten string[] lines of facts that there was no room for
---@field private folded ciranda.journal.State?
local Journal = {}
Journal.__index = Journal

---@return integer microseconds since 1970
local function now_us()
  local seconds, microseconds = uv.gettimeofday()
  return seconds * 1000000 + microseconds
end

---@param fact table
---@return string
local function encode(fact)
  return json.encode(fact) .. "\n"
end

--- Waits until what was written is on the disk.
---@private
function Journal:sync()
  local fd = self.fd
  local problem = task.shield(task.await, function(done)
    uv.fs_fsync(fd, function(message)
      done(nil, message)
    end)
    return function()
      return false
    end
  end)
  if problem then
    err.raise(err.wrap(problem, { op = "journal: fsync", target = self.path }))
  end
end

--- Writes a line, whole or not at all.
---@private
---@param line string
function Journal:write(line)
  -- One write with O_APPEND: lines of two processes do not mix.
  local written, message = uv.fs_write(self.fd, line, -1)
  if written ~= #line then
    if written then
      local size = uv.fs_fstat(self.fd).size
      uv.fs_ftruncate(self.fd, size - written)
      message = "ENOSPC: the disk is full"
    end
    err.raise(err.wrap(message, { op = "journal: write", target = self.path }))
  end
end

--- A fact of now, as it is kept here.
---@private
---@param kind string
---@param fields table?
---@return table
function Journal:fact(kind, fields)
  if not self.fd then
    err.misuse(3, "the journal of run %s is closed", self.run)
  end
  local fact = { fact = kind, us = now_us() }
  for name, value in pairs(fields or {}) do
    fact[name] = value
  end
  return fact
end

--- Writes what there was no room for.
---@private
function Journal:catch_up()
  while self.unwritten[1] do
    self:write(self.unwritten[1])
    table.remove(self.unwritten, 1)
  end
end

--- Appends a fact.
---@param kind string
---@param fields table?
-- Raises "no_space" when the disk is full: the line is then cut off again.
function Journal:append(kind, fields)
  local fact = self:fact(kind, fields)
  self:catch_up()
  self:write(encode(fact))
  table.insert(self.facts, fact)
  self.folded = nil
end

--- Appends a fact that only tells of what has happened already: where there is no room for it on the disk it is kept,
--- and written before what is appended next, for what goes on must not end of it.
---@param kind string
---@param fields table?
function Journal:note(kind, fields)
  local fact = self:fact(kind, fields)
  table.insert(self.unwritten, encode(fact))
  table.insert(self.facts, fact)
  self.folded = nil
  local ok, problem = pcall(self.catch_up, self)
  if not ok and not err.is(problem, "no_space") then
    error(problem, 0)
  end
end

--- Appends a fact and returns when it is on the disk: to be called before the call that it speaks of.
---@param kind string
---@param fields table?
function Journal:intent(kind, fields)
  self:append(kind, fields)
  self:sync()
end

--- The fold of what this journal holds now.
---@return ciranda.journal.State
function Journal:state()
  self.folded = self.folded or facts_of.fold(self.run, self.facts)
  return self.folded
end

--- Breathes until the journal is closed. The timer keeps no program alive.
---@private
function Journal:breathe()
  local timer, path = uv.new_timer(), self.path
  timer:start(M.BREATH * 1000, M.BREATH * 1000, function()
    local now = uv.gettimeofday()
    uv.fs_utime(path, now, now, function() end) -- a breath that fails is told by its absence
  end)
  timer:unref()
  self.timer = timer
end

---@private
function Journal:hush()
  if self.timer then
    if not self.timer:is_closing() then
      self.timer:close()
    end
    self.timer = nil
  end
end

--- Says goodbye: the run is free for another runner. Safe to call twice.
---@param status integer? exit status
---@param kind string? "user", "infra", ...
function Journal:close(status, kind)
  self:hush()
  if self.fd then
    local ok, problem = pcall(self.append, self, "left", { id = self.id, status = status, kind = kind })
    uv.fs_close(self.fd)
    self.fd = nil
    if not ok then
      error(problem, 0)
    end
  end
end

--- How a run whose recipe has raised an error ended, as the command line says it.
local FAILED = { usage = 2, deadline = 124 }

function Journal:__close(problem)
  local code = err.is(problem) and problem.code
  if problem == nil or code == "cancelled" or code == "interrupted" then
    self:close()
  else
    self:close(FAILED[code] or 1, FAILED[code] and code or "failed")
  end
end

function Journal:__gc()
  self:hush()
  if self.fd then
    uv.fs_close(self.fd)
    self.fd = nil
  end
end

---@param bytes integer
---@return string hexadecimal digits
local function random_hex(bytes)
  return (uv.random(bytes):gsub(".", function(char)
    return ("%02x"):format(char:byte())
  end))
end

--- A name for a new attempt: its number in this journal, and six random digits so that two runners that use
--- one run name from two machines cannot meet in one directory on the workers.
---@return string
function Journal:new_attempt_id()
  return ("%04d-%s"):format(#self:state().attempts + 1, random_hex(3))
end

--- Who has a run, or has it before the runner with this id, as an error; nil when nobody has. Who wrote first has the
--- run: the order of lines in the file is the same for every reader.
---@param state ciranda.journal.State
---@param id string?
---@param take boolean? one on another machine, that never said goodbye, counts for none
---@return ciranda.Error? code "busy"
local function taken(state, id, take)
  for _, runner in ipairs(state.runners) do
    if runner.id == id then
      return nil
    end
    local life = M.runner_state(runner)
    if life == "alive" or (life == "unknown" and not take) then
      return err.new({
        code = "busy",
        op = "journal",
        target = state.run,
        message = ("run %s is in the hands of process %d on %s; %s"):format(
          state.run,
          runner.pid,
          runner.host,
          life == "alive" and "wait for it, end it, or use another run name"
            or ("if that machine is gone, ciranda attach %s --TAKE=true takes the run up, and ciranda stop "):format(
                state.run
              )
              .. ("%s --TAKE=true ends it; else use another run name"):format(state.run)
        ),
      })
    end
  end
end

--- For whoever changes something of a run before the journal is opened, which is what takes it.
---@param run string
-- Raises "busy" when a runner has this run now; what `read` raises.
function M.check_free(run)
  local state = M.read(run)
  local problem = state and taken(state)
  if problem then
    error(problem, 0)
  end
end

--- Opens a run's journal for writing, and makes the run when it is new.
---@param run string
---@param options { recipe: string?, arguments: string[]?, take: boolean?, stops: boolean? }? take: go on although a
---  runner on another machine never said goodbye; stops: for others to see that this runner is here to stop the run
---@return ciranda.Journal journal to be closed; a `<close>` variable may hold it
-- Raises "busy" when another runner has this run now.
function M.open(run, options)
  check_name(run, 1)
  options = options or {}
  local path = M.path(run)
  local directory = path:match("^(.*)/[^/]*$")
  make_directories(directory)
  local fd, message = uv.fs_open(path, "a+", FILE_MODE)
  if not fd then
    err.raise(err.wrap(message, { op = "journal: open", target = path }))
  end
  local journal = setmetatable(
    { run = run, path = path, directory = directory, fd = fd, facts = {}, unwritten = {}, id = random_hex(8) },
    Journal
  )
  local breathed = uv.fs_fstat(fd).mtime
  local text = read_file(path) or ""
  if text ~= "" and text:sub(-1) ~= "\n" then
    -- A crash tore the last line. It stays, closed by a newline and a fact that says so; in one write, for it may be
    -- the line of a live runner that is on its way: what that one adds next must not come between the two.
    uv.fs_write(fd, "\n" .. encode({ fact = "torn", us = now_us() }), -1)
  elseif select(2, facts_of.parse(text, path)) then
    journal:append("torn")
  end
  local is_new = text == ""
  if is_new then
    journal:append("run", { run = run, recipe = options.recipe, arguments = options.arguments })
  end
  -- luv gives the number as a float.
  local pid = math.tointeger(uv.os_getpid())
  journal:intent("runner", {
    id = journal.id,
    pid = pid,
    start_time = start_time(pid),
    boot_id = boot_id(),
    host = uv.os_gethostname(),
    stops = options.stops,
  })
  if is_new then
    -- The name of the file is on the disk too.
    local parent = uv.fs_open(directory, "r", 0)
    if parent then
      uv.fs_fsync(parent)
      uv.fs_close(parent)
    end
  end
  journal.facts = facts_of.parse(read_file(path), path)
  local problem = taken(journal:state(), journal.id, options.take)
  if problem then
    journal:append("left", { id = journal.id, kind = "busy" })
    -- That was no sign of life of the one who has it.
    uv.fs_futime(journal.fd, breathed.sec, breathed.sec)
    uv.fs_close(journal.fd)
    journal.fd = nil
    error(problem, 0)
  end
  journal:breathe()
  return journal
end

return M
