--- The lease: whose the accelerators of a worker are.
--
-- A file beside the accelerator library's lock (`/tmp/ciranda_lease.USER`), so that other login users see it too, taken
-- before anything else is changed there. All that read or write leases of a machine hold a lock of the kernel's
-- (flock), so exactly one of many wins a worker; a gang takes its first worker before the others, so exactly one of two
-- gangs with the same workers goes on. The file's time is its last sign of life: the runner renews it while it stages
-- and waits, the guard while the command runs (its `alive` is a link to the lease). One from before the machine's last
-- start is void.
local accounts = require("ciranda.io.account")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")
local uv = require("luv")
local worker_script = require("ciranda.run.worker_script")

local M = {}

--- Seconds without a sign of life after which a lease has expired, and between two signs of the runner.
M.TTL, M.RENEW = 300, 100
--- Seconds that taking may wait for others that read or write leases of the machine; that giving back may take.
local LOCK_WAIT, RELEASE = 20, 10

local TAKE = [[
[ -e $lease ] || (umask 0; : > $lease);
exec 9< $lease; flock -w {lock_wait} 9 || { echo "nobody lets go of the lock on $lease" >&2; exit 1; };
read -r booted < $boot; seconds=${now%.*}; taken=$seconds; held=;
for file in $lease.*; do
[ -f $file ] || continue;
key=; read -r key run user host pid from began < $file || :;
renewed=$(stat -c %Y $file);
text="${run:-?} ${user:-?} ${host:-?} ${pid:-0} ${began:-$renewed} $renewed $seconds ${from:-?} $booted";
if [ "$key" = {key} ]; then taken=${began:-$seconds};
elif [ {mode} != force ] && [ "${from:-$booted}" = "$booted" ] && [ $((seconds - renewed)) -lt {ttl} ]; then
held=yes; echo "held=$text";
elif [ {mode} != look ]; then
if rm -f $file 2>/dev/null || [ $((seconds - renewed)) -lt 86400 ]; then echo "void=$text"; fi;
fi; done;
[ {mode} = look ] && exit 0;
if [ -z "$held" ]; then
echo "{key} {run} {user} {host} {pid} $booted $taken" > $mine 2>/dev/null || { rm -f $mine;
df -Pk ${mine%/*} | { read -r head; read -r disk size used free rest; [ "${free:-4}" -ge 4 ] || full=", No space left";
echo "$mine cannot be written; its disk has ${free:-?} kB free$full" >&2; }; exit 1; };
elif [ {mode} != join ]; then exit 0; fi;
exec 9<&-;
]]

local LOOK = worker_script.LOCATE .. "now=$(date +%s); echo ciranda-lease;" .. TAKE .. "exit 0"

local RENEW = worker_script.LOCATE .. 'read -r key rest < $mine && [ "$key" = {key} ] && touch $mine; exit 0'

local RELEASE_SCRIPT = worker_script.LOCATE
  .. [[
exec 9< $lease; flock -w 5 9 || exit 1;
for file in $lease.*; do
[ -f $file ] && read -r key rest < $file && [ "$key" = {key} ] && rm -f $file;
done; exit 0]]

---@class ciranda.run.Holder of a lease
---@field run string
---@field user string the runner's
---@field host string the runner's machine
---@field pid integer the runner's process
---@field taken number seconds since 1970, by the worker's clock, as the others
---@field renewed number its last sign of life
---@field now number
---@field before_boot boolean the machine has been started again since

---@class ciranda.run.Lease what a run writes into its leases
---@field key string the same for all runners of one run, and for no other run
---@field run string
---@field user string
---@field host string
---@field pid integer
---@field take boolean? take it from whoever has it
local Lease = {}
Lease.__index = Lease

--- Text as one word without anything that a shell or a reader of the file could take for more.
---@param text any
---@return string
local function word(text)
  local clean = tostring(text or ""):gsub("[^%w_.@:%-]", "_")
  return clean ~= "" and clean or "?"
end

--- The lease of a run.
---@param run string
---@param journal ciranda.Journal? the run's: it tells this run from others of the same name
---@param take boolean? take the workers from whoever has them
---@return ciranda.run.Lease
function M.new(run, journal, take)
  local host = uv.os_gethostname()
  local first = journal and journal:state().first_us or 0
  return setmetatable({
    key = word(("%s@%s:%d"):format(run, host, first)),
    run = word(run),
    user = word(accounts.login_name() or uv.getuid()),
    host = word(host),
    pid = math.tointeger(uv.os_getpid()),
    take = take,
  }, Lease)
end

---@param mode "take"|"force"|"look"|"join"
---@return table<string, any>
function Lease:values(mode)
  return {
    key = self.key,
    run = self.run,
    user = self.user,
    host = self.host,
    pid = self.pid,
    ttl = M.TTL,
    lock_wait = LOCK_WAIT,
    mode = mode,
  }
end

--- The part of a script that takes the lease; `$now` is set before it. The script ends there when another run has the
--- worker, except in the mode "join", which leaves the lease to that run and goes on.
---@param mode "take"|"join"
---@return string
function Lease:script(mode)
  return worker_script.fill(TAKE, self:values(mode == "take" and self.take and "force" or mode))
end

--- What a `held=` or `void=` line says.
---@param text string
---@return ciranda.run.Holder?
function M.parse(text)
  local run, user, host, pid, taken, renewed, now, from, booted =
    text:match("^(%S+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%S+) (%S*)$")
  return run
      and {
        run = run,
        user = user,
        host = host,
        pid = math.tointeger(tonumber(pid)),
        taken = tonumber(taken),
        renewed = tonumber(renewed),
        now = tonumber(now),
        before_boot = from ~= "?" and from ~= booted,
      }
    or nil
end

---@param holder ciranda.run.Holder
---@return string
function M.describe(holder)
  return ("run %s (%s on %s, process %d) took it %s ago and gave its last sign of life %s ago"):format(
    holder.run,
    holder.user,
    holder.host,
    holder.pid,
    clock.span(holder.now - holder.taken),
    clock.span(holder.now - holder.renewed)
  )
end

--- One line for each void lease that was put aside.
---@param found table<ciranda.Worker, ciranda.run.Holder[]>
---@return string[]
function M.void_lines(found)
  local groups, lines = {}, {}
  for worker, holders in pairs(found) do
    for _, holder in ipairs(holders) do
      local key = ("%s %s %s"):format(holder.run, holder.user, holder.host)
      groups[key] = groups[key] or { holder = holder, workers = {} }
      table.insert(groups[key].workers, worker)
    end
  end
  for _, group in pairs(groups) do
    lines[#lines + 1] = ("The lease of %s is taken over: %s%s"):format(
      nodeset.fold(group.workers),
      M.describe(group.holder),
      group.holder.before_boot and ", before the machine was started again" or ""
    )
  end
  table.sort(lines)
  return lines
end

--- The error of workers that other runs have.
---@param held table<ciranda.Worker, ciranda.run.Holder[]>
---@return ciranda.Error code "busy"
function M.error(held)
  local groups, all, runs = {}, {}, {}
  for worker, holders in pairs(held) do
    all[#all + 1] = worker
    for _, holder in ipairs(holders) do
      local group = groups[holder.run] or { workers = {}, holder = holder }
      groups[holder.run] = group
      table.insert(group.workers, worker)
      if holder.renewed > group.holder.renewed then
        group.holder = holder
      end
    end
  end
  for run in pairs(groups) do
    runs[#runs + 1] = run
  end
  table.sort(runs)
  local pieces = {}
  for place, run in ipairs(runs) do
    pieces[place] = ("on %s %s"):format(nodeset.fold(groups[run].workers), M.describe(groups[run].holder))
  end
  return err.new({
    code = "busy",
    op = "stage",
    target = nodeset.fold(all),
    message = ("another run has these TPUs: %s. `ciranda stop %s` ends it, where it was started; "):format(
      table.concat(pieces, "; "),
      runs[1]
    ) .. "--TAKE=true takes them from it and ends what it runs",
  })
end

--- Who has this worker now, without taking anything.
---@param link ciranda.fleet.Link
---@return ciranda.run.Holder[]
function Lease:look(link)
  local holders = {}
  local answer = link:use(function(connection)
    local script = worker_script.fill(LOOK, self:values("look"))
    return connection:exec(shell.sh(script), { timeout = RELEASE })
  end)
  for text in (answer.stdout:match("ciranda%-lease\n(.*)$") or ""):gmatch("held=([^\n]*)") do
    holders[#holders + 1] = M.parse(text)
  end
  return holders
end

--- The links of a fleet's workers, for `renew` and `release`.
---@param fleet ciranda.Fleet
---@return ciranda.fleet.Link[]
function M.links_of(fleet)
  local links = {}
  for place, worker in ipairs(fleet:workers()) do
    links[place] = fleet:link(worker)
  end
  return links
end

--- Runs a short script on every connection that is open, or on all; what fails is left to time.
local function on_open(links, script, seconds, all)
  task.map(links, function(link)
    if not all and not link:connected() then
      return
    end
    local ok, problem = pcall(task.timeout, seconds, link.use, link, function(connection)
      return connection:exec(shell.sh(script), { timeout = seconds })
    end)
    if not ok and err.is_fatal(problem) then
      error(problem, 0)
    end
  end)
end

--- Gives a sign of life on every worker that is connected.
---@param links ciranda.fleet.Link[]
function Lease:renew(links)
  on_open(links, worker_script.fill(RENEW, self:values("take")), RELEASE)
end

--- Gives the workers back that are connected; the leases on others expire. Leaves the leases of other runs alone.
---@param links ciranda.fleet.Link[]
---@param all boolean? those that are not connected, too
function Lease:release(links, all)
  on_open(links, worker_script.fill(RELEASE_SCRIPT, self:values("take")), all and 3 * RELEASE or RELEASE, all)
end

return M
