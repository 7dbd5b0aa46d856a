--- Looking around on a worker before an attempt: one command takes the lease and says all that staging goes by.
--
-- Nothing is changed before the lease is taken, and nothing at all when another run has the worker.
local clock = require("ciranda.io.clock")
local holders = require("ciranda.run.holders")
local lease = require("ciranda.run.lease")
local worker_script = require("ciranda.run.worker_script")

local M = {}

local BEGIN = worker_script.LOCATE
  .. [[
umask 022; now=$(date +%s.%N); echo ciranda-probe; echo "now=$now"; ]]

local LOOK = [[
mkdir -p {root}/bin {root}/bundles {root}/{run} && chmod 700 {root} || exit 1;
echo "system=$(uname -mr)";
[ -x {guard} ] && echo "guard=$(wc -c < {guard})";
[ -f {bundle} ] && echo "bundle=yes";
[ -d {path} ] && echo "attempt=yes";
df -Pk . | { read -r _; read -r _ _ _ free _; echo "free_kb=$free"; };
]]

-- A SETUP that no guard watches any more, or from before the machine's last start, will not end by itself.
local SETUP = [[
if [ -f {setup}/exit ]; then read -r line < {setup}/exit; echo "setup=$line";
elif [ -d {setup}/started ]; then read -r _ _ from < {setup}/pid; read -r booted < $boot;
if [ "$from" = "$booted" ] && [ $(($(date +%s) - $(stat -c %Y {setup}/alive || echo 0))) -lt 60 ];
then echo "setup=running"; else echo "setup=stale"; fi; fi 2>/dev/null;
]]

local RUNNING = [[
for started in {root}/*/*/started; do
attempt=${started%/started};
if [ -d "$started" ] && [ ! -e "$attempt/exit" ] && [ ! -e "$attempt/forgotten" ] && [ "$attempt" != {path} ];
then echo "running=$attempt"; fi;
done;
]]

--- What says that two machines will not compute the same: versions by the names of what is installed, since starting
--- the interpreter would take longer than all the rest. The first found is the one that the interpreter finds first.
M.FINGERPRINT = [[
python=$(command -v python3) && python=$(readlink -f $python); echo "python=${python##*python}";
for name in jax jaxlib libtpu libtpu_nightly; do
for file in {directory}/.venv/lib/python3*/site-packages/$name-*.dist-info
{directory}/venv/lib/python3*/site-packages/$name-*.dist-info
.local/lib/python3*/site-packages/$name-*.dist-info
/usr/local/lib/python3*/dist-packages/$name-*.dist-info
/usr/lib/python3/dist-packages/$name-*.dist-info; do
[ -d "$file" ] && { echo "package=$file"; break; };
done; done;
]]

local DEVICES = holders.SCAN
  .. 'if [ $count -gt 0 ] || [ -e $lock ]; then echo "own=$(id -u) $(pwd -P)/{root}"; holders;'
  .. holders.CLEAR:gsub("%s+$", "")
  .. " fi; "

local END = [[echo "then=$(date +%s.%N)"; exit 0]]

---@class ciranda.run.Facts what a worker says of itself
---@field now string? its clock, at the beginning
---@field system string? kernel release and machine
---@field guard string? bytes of the guard there
---@field bundle string? "yes": the bundle is there
---@field attempt string? "yes": the attempt is there
---@field free_kb string? of the file system of the home directory
---@field devices string? count of device files
---@field lock_file string? a lock file that nobody holds and that cannot be removed, and whose it is
---@field setup string? the exit record of the SETUP with this hash, "running" or "stale"
---@field python string? version as its file's name has it, "" when there is none
---@field packages string[] directories such as "jax-0.4.35.dist-info"
---@field running string[] paths of earlier attempts that have not ended
---@field holders ciranda.run.DeviceHolder[]
---@field own { uid: integer, root: string }?
---@field held ciranda.run.Holder[] leases of other runs
---@field void ciranda.run.Holder[] leases that were put aside

--- Reads `name=value` lines.
---@param text string after the marker; a shell's start-up file may print things of its own before it
---@return ciranda.run.Facts
local function parse(text)
  local facts = { packages = {}, running = {}, holders = {}, held = {}, void = {} }
  for name, value in text:gmatch("(%l[%l_]*)=([^\n]*)") do
    if name == "running" then
      table.insert(facts.running, value)
    elseif name == "package" then
      table.insert(facts.packages, value:match("[^/]*$"))
    elseif name == "holder" then
      table.insert(facts.holders, holders.parse(value))
    elseif name == "held" or name == "void" then
      table.insert(facts[name], lease.parse(value))
    elseif name == "own" then
      local uid, root = value:match("^(%d+) (.*)$")
      facts.own = { uid = math.tointeger(tonumber(uid)), root = root }
    else
      -- A start-up file that speaks in between does not change what was said first.
      facts[name] = facts[name] or value
    end
  end
  return facts
end

--- Sets the attempt's clock from two readings of the worker's between the sending and the answer.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
local function set_clock(attempt, facts, sent, received)
  local first, last = tonumber(facts.now), tonumber(facts["then"])
  if first and last then
    attempt.clock_offset = ((first - sent) + (last - received)) / 2
    attempt.clock_error = math.max(0, ((received - sent) - (last - first)) / 2)
  end
end

--- Asks the worker what is there, takes the lease and makes our directories.
---@param attempt ciranda.run.Attempt
---@param values table<string, any> for the script
---@param mode "take"|"join" take: prepare a new attempt; join: find one that was staged
---@return ciranda.run.Facts
-- Raises "busy" with `held` when another run has the worker; what the worker's shell says.
function M.run(attempt, values, mode)
  local script = BEGIN
    .. (attempt.lease and attempt.lease:script(mode) or "")
    .. LOOK
    .. (mode == "take" and SETUP .. RUNNING .. M.FINGERPRINT .. DEVICES or "")
    .. END
  local sent = clock.wall()
  local answer = attempt:expect(attempt:shell(worker_script.fill(script, values)), "looking around")
  local facts = parse(answer.stdout:match("ciranda%-probe\n(.*)$") or "")
  set_clock(attempt, facts, sent, clock.wall())
  if #facts.held > 0 and mode == "take" then
    local problem = lease.error({ [attempt.worker] = facts.held })
    problem.held = facts.held
    error(problem, 0)
  end
  return facts
end

--- Asks again for what a SETUP may have changed.
---@param attempt ciranda.run.Attempt
---@param values table<string, any>
---@param facts ciranda.run.Facts changed
function M.fingerprint(attempt, values, facts)
  local script = "echo ciranda-probe;" .. M.FINGERPRINT .. "exit 0"
  local answer = attempt:expect(attempt:shell(worker_script.fill(script, values)), "looking around")
  local found = parse(answer.stdout:match("ciranda%-probe\n(.*)$") or "")
  facts.python, facts.packages = found.python, found.packages
end

return M
