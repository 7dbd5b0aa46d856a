--- A fleet: a set of workers on which one command runs, files are pushed and pulled, and signals are sent.
--
--     local fleet <close> = fleet.new(slices, { user = "me" })
--     print(fleet:run("hostname"):check():gather()[1].stdout)
--     fleet:select("slice[0-3]/worker0"):push("config.yaml", "config.yaml")
--
-- Connections are made when first used and shared by a fleet and everything selected from it. Nothing that was
-- sent to a worker is sent again by itself: only connecting is tried again.
local err = require("ciranda.io.error")
local link = require("ciranda.fleet.link")
local pace = require("ciranda.fleet.pace")
local nodeset = require("ciranda.provider.nodeset")
local results = require("ciranda.fleet.results")
local task = require("ciranda.task")

local M = {}

--- Handshakes that run at once. A key exchange costs both sides CPU, and an sshd whose queue is full drops
--- connections; commands have no such limit.
local HANDSHAKES = 64

--- Seconds during which a connect that fails for a passing reason is tried again.
local RETRY_FOR = 30

local NEW_OPTIONS = {
  user = true,
  keys = true,
  agent = true,
  known_hosts = true,
  host_key_policy = true,
  port = true,
  timeouts = true,
  config = true,
  match_exec = true,
  internal_ip = true,
  tunnel = true,
  credentials = true,
  retry_for = true,
  handshakes = true,
  connect = true,
  fresh_pins = true,
  on_address = true,
}

local RUN_OPTIONS = {
  stdin = true,
  env = true,
  timeout = true,
  within = true,
  first_byte = true,
  on_stdout = true,
  on_stderr = true,
  on_result = true,
  limit = true,
}

---@class ciranda.Worker
---@field slice integer the platform's own number of its slice
---@field index integer the platform's own number within the slice
---@field node string? name of its slice's node
---@field name string?
---@field address string?
---@field internal_address string?
---@field has_external boolean? false: it is known to have no external address
---@field hostname string?
---@field port integer?
---@field pins string[]? host keys, "ssh-ed25519 AAAA..."

---@class ciranda.Slice
---@field index integer
---@field name string
---@field zone string?
---@field accelerator string?
---@field topology string?
---@field state string?
---@field node_uid string?
---@field workers ciranda.Worker[]

---@class ciranda.Fleet
---@field slices ciranda.Slice[]
---@field private members ciranda.Worker[]
---@field private links table<ciranda.Worker, ciranda.fleet.Link>
---@field private settings ciranda.fleet.Settings
local Fleet = {}
Fleet.__index = Fleet

--- A fleet of these slices' workers.
---@param slices ciranda.Slice[] from a provider
---@param options table? user, keys, agent, known_hosts, host_key_policy, port, timeouts, config, match_exec: as for
---  `ssh.connect`; internal_ip (true: internal addresses only, false: external only, nil: the external one if it
---  answers); tunnel ({ project, zone, always }: workers without an external address, or all, through IAP) and
---  credentials for it (found when not given); retry_for (seconds, 30); handshakes (64 at once at most); connect (in
---  place of `ssh.connect`); fresh_pins(worker) -> pins (asked when a worker shows another host key than its pins: it
---  may have been made anew); on_address(worker, "external"|"internal"|"tunnel")
---@return ciranda.Fleet fleet to be closed; a `<close>` variable may hold it
-- Raises a misuse for an unknown option.
function M.new(slices, options)
  options = options or {}
  if type(slices) ~= "table" then
    err.misuse(2, "fleet.new takes a provider's slices, not a %s", type(slices))
  end
  err.check_options(options, NEW_OPTIONS, "fleet.new")
  local settings = {}
  for name, value in pairs(options) do
    settings[name] = value
  end
  settings.connect = options.connect or require("ciranda.ssh").connect
  settings.retry_for = options.retry_for or RETRY_FOR
  settings.handshakes = pace.new(options.handshakes or HANDSHAKES)
  local fleet = setmetatable({ slices = slices, members = {}, links = {}, settings = settings }, Fleet)
  for _, slice in ipairs(slices) do
    for _, worker in ipairs(slice.workers) do
      fleet.members[#fleet.members + 1] = worker
      fleet.links[worker] = link.new(worker, settings)
    end
  end
  return fleet
end

--- Log in as somebody else from now on. Connections that exist stay.
---@param user string
function Fleet:log_in_as(user)
  self.settings.user = user
end

--- The workers, in the provider's order.
---@return ciranda.Worker[]
function Fleet:workers()
  return table.move(self.members, 1, #self.members, 1, {})
end

---@return integer
function Fleet:__len()
  return #self.members
end

---@return string
function Fleet:__tostring()
  return ("a fleet of %d workers (%s)"):format(#self.members, nodeset.fold(self.members))
end

--- A part of the fleet. It shares the connections; closing it closes nothing.
---@param set string|ciranda.nodeset.Set|ciranda.Worker[] a node set, or workers of this fleet
---@return ciranda.Fleet
-- Raises "usage" for a mistake in the set, "not_found" when a term of it names nobody.
function Fleet:select(set)
  local members = set
  if type(set) == "string" or set.include then
    members = nodeset.select(self.members, set)
  end
  for _, worker in ipairs(members) do
    if not self.links[worker] then
      err.misuse(2, "fleet:select: %s is no worker of this fleet", link.title(worker))
    end
  end
  return setmetatable({
    slices = self.slices,
    members = members,
    links = self.links,
    settings = self.settings,
    part = true,
  }, Fleet)
end

--- The link to one worker: for those who need the connection itself.
---@param worker ciranda.Worker
---@return ciranda.fleet.Link
function Fleet:link(worker)
  return self.links[worker] or err.misuse(2, "%s is no worker of this fleet", link.title(worker))
end

--- Runs `fn(worker, link, place)` for every worker, all at once (or `limit` at a time).
---@generic R
---@param fn fun(worker: ciranda.Worker, link: ciranda.fleet.Link, place: integer): R
---@param limit integer?
---@return R[]
-- The first error cancels the others and rises.
function Fleet:each(fn, limit)
  if #self.members == 0 then
    return {}
  end
  return task.map(self.members, function(worker, place)
    return fn(worker, self.links[worker], place)
  end, limit)
end

--- Runs `fn` for every worker; what it raises becomes that worker's `err`.
---@private
---@param fn fun(worker: ciranda.Worker, link: ciranda.fleet.Link): table
---@param limit integer?
---@param on_result fun(result: ciranda.fleet.Result)?
---@return ciranda.fleet.Results
function Fleet:gather_results(fn, limit, on_result)
  return results.new(self:each(function(worker, worker_link)
    local ok, result = pcall(fn, worker, worker_link)
    if not ok then
      -- A cancellation and a mistake in the program are not a worker's failure.
      if err.is_fatal(result) then
        error(result, 0)
      end
      result = { stdout = "", stderr = "", err = result }
    end
    result.worker = worker
    if on_result then
      on_result(result)
    end
    return result
  end, limit))
end

--- Runs a command on every worker at once, by the login user's shell.
---
--- In a program that has no handler of its own the first Ctrl-C says who is still running, and the second stops them.
---@param command string
---@param options table? stdin (a string, or a file by `{ path = }`: all read the same), env, timeout (seconds, a
---  worker), within (the same, with the way to it), first_byte (seconds until a worker must have said something),
---  limit (workers at once), on_stdout(worker, bytes), on_stderr(worker, bytes), on_result(result) as each ends
---@return ciranda.fleet.Results one a worker, in order; a failure to connect or a timeout is its `err`
-- Raises only misuse and cancellation; `results:check()` raises the rest.
function Fleet:run(command, options)
  options = options or {}
  if type(command) ~= "string" then
    err.misuse(2, "fleet:run takes a command as a string, not a %s", type(command))
  end
  err.check_options(options, RUN_OPTIONS, "fleet:run")
  if type(options.stdin) == "function" then
    -- Each piece would go to whichever worker comes first.
    err.misuse(2, "fleet:run: 'stdin' is a string or a file ({ path = }), not a function: all read the same")
  end
  local running <close> = require("ciranda.fleet.running").begin(self.members)
  local function on_result(result)
    running:ended(result.worker)
    if options.on_result then
      options.on_result(result)
    end
  end
  return self:gather_results(function(worker, worker_link)
    local exec_options = {
      stdin = options.stdin,
      env = options.env,
      timeout = options.timeout,
      first_byte = options.first_byte,
    }
    for _, name in ipairs({ "on_stdout", "on_stderr" }) do
      local callback = options[name]
      if callback then
        exec_options[name] = function(bytes)
          callback(worker, bytes)
        end
      end
    end
    local function use()
      return worker_link:use(function(connection)
        return connection:exec(command, exec_options)
      end)
    end
    local answer = options.within and task.timeout(options.within, use) or use()
    return { code = answer.code, signal = answer.signal, stdout = answer.stdout, stderr = answer.stderr }
  end, options.limit, on_result)
end

--- Connects to every worker: one first, so that a wrong key or user is told once and not a thousand times.
-- Raises the first worker's error; else one that counts and names those that failed.
function Fleet:connect()
  local first = self.members[1]
  if not first then
    return
  end
  self.links[first]:connection()
  self
    :gather_results(function(_, worker_link)
      worker_link:connection()
      return { code = 0, stdout = "", stderr = "" }
    end)
    :check()
end

--- Pushes a file to every worker, or a directory with everything in it.
---@param source string a local path
---@param destination string a path on the workers, relative to the login directory unless absolute
---@param options { mode: integer?, limit: integer?, on_result: fun(result: ciranda.fleet.Result)?, via: string?,
---  on_note: fun(text: string)? }? mode of a file (its own); on_result: called as each worker has it; via: of a
---  directory, "gs://BUCKET/DIRECTORY" from which the workers fetch it by themselves, or "workers" ("workers:N"): 2 (N)
---  get it from here and the others from those who have it; a worker that cannot gets it over its connection, which
---  on_note is told
---@return ciranda.fleet.Results
function Fleet:push(source, destination, options)
  return require("ciranda.fleet.transfer").push(self, source, destination, options or {})
end

--- Pulls a file or a directory, or all that a pattern means, from every worker into DIRECTORY/slice_S_worker_W/NAME.
---@param source string a path on the workers, or a pattern (`*`, `?`, `[a-z]`) that each expands for itself
---@param directory string a local directory, made when it is not there
---@param options { limit: integer?, on_result: fun(result: ciranda.fleet.Result)? }?
---@return ciranda.fleet.Results with `path`, where the file is, and `paths`, where all are
function Fleet:pull(source, directory, options)
  return require("ciranda.fleet.transfer").pull(self, source, directory, options or {})
end

--- Signals the commands of attempts that run on the workers (see ciranda.run.attempt), and says to whom it came.
--- TERM is a stop: it is sent once, KILL follows when the grace is over, and the call returns when they have ended.
---@async
---@param name string "TERM", "USR1", ... with or without SIG
---@param options { run: string?, attempt: string?, grace: number?, limit: integer? }? run, attempt: only these; grace:
---  seconds, of TERM (300)
---@return ciranda.fleet.Results each with `attempts`: path of the attempt -> the guard's answer; none when nothing runs
-- Raises a misuse for what is no signal.
function Fleet:signal(name, options)
  return require("ciranda.fleet.signal").send(self, name, options or {})
end

--- Closes the fleet's connections. A part of a fleet closes nothing.
function Fleet:close()
  if not self.part then
    for _, worker_link in pairs(self.links) do
      worker_link:close()
    end
  end
end

function Fleet:__close()
  self:close()
end

return M
