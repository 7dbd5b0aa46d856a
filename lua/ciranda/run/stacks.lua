--- Where the processes of an attempt wait: what the kernel tells of each thread, and Python's own stacks where asked.
--
-- The guard knows the tree; /proc knows the rest. Python prints its stacks (faulthandler) only when the program has
-- asked for it: it registers a signal and names it in its environment, `CIRANDA_STACK_SIGNAL=USR1`. Only a process
-- that has the variable and catches that signal gets it, for anything else would die of it.
local err = require("ciranda.io.error")
local shell = require("ciranda.io.shell")

local M = {}

--- Seconds that looking may take; bytes of answer kept from a worker.
local LIMIT, MOST = 60, 1048576
--- Threads shown of a process.
local THREADS = 16
--- Looks, four a second, for what Python prints, before nothing is taken for its answer.
local LOOKS = 40

-- What a line of /proc that may not be read leaves empty stays empty. The signal's output goes to the log.
local SCRIPT = [[
guard=$(ls -t {root}/bin/guard-* 2>/dev/null | head -n 1);
status=$("$guard" status {path} $CIRANDA_GUARD_OPTIONS) || exit;
field() { echo "$status" | sed -n "s/.*\"$1\":\[*\([0-9,.]*[0-9]\).*/\1/p"; };
echo "$(field log_idle) $(field log_bytes)";
asked=;
for p in $(field processes | tr , " "); do
[ -d /proc/$p ] || continue;
echo "process $p: $(tr "\0\n" "  " < /proc/$p/cmdline | cut -c1-300)";
n=0;
for t in /proc/$p/task/*; do
n=$((n + 1));
if [ $n -gt {threads} ]; then echo "  and $(($(ls /proc/$p/task | wc -l) - {threads})) threads more"; break; fi;
echo "  thread ${t##*/} $(cat $t/comm): $(sed -n "s/^State:[^A-Z]*//p" $t/status), wchan $(cat $t/wchan), syscall $(cut
 -d" " -f1 $t/syscall)";
sed "s/^/    /" $t/stack;
done;
case $(tr "\0" "\n" < /proc/$p/environ | sed -n "s/^CIRANDA_STACK_SIGNAL=//p") in
USR1|SIGUSR1|10) s=10;; USR2|SIGUSR2|12) s=12;; *) continue;; esac;
caught=$(sed -n "s/^SigCgt:[^0-9a-f]*//p" /proc/$p/status);
if [ $((0x${caught:-0} >> (s - 1) & 1)) = 1 ] && kill -$s $p; then asked="$asked $p"; fi;
done 2>/dev/null;
[ "$asked" ] || exit 0;
echo "python:$asked"; from=$(field log_bytes); n=0;
while status=$("$guard" status {path} $CIRANDA_GUARD_OPTIONS);
[ "$(field log_bytes)" = "$from" ] && [ $n -lt {looks} ];
do n=$((n + 1)); sleep 0.25; done;
"$guard" follow {path} --from $from --idle-exit 1 $CIRANDA_GUARD_OPTIONS]]

---@class ciranda.run.Stacks
---@field worker ciranda.Worker
---@field idle number? seconds since its log grew
---@field text string? what there is to see
---@field problem string? why nothing can be seen

--- Looks at the processes of an attempt on every worker of a fleet.
---@async
---@param fleet ciranda.Fleet
---@param run string
---@param attempt string
---@param options { threads: integer? }? threads shown of a process (16)
---@return ciranda.run.Stacks[] in the fleet's order
-- Raises "misuse" for an unknown option.
function M.look(fleet, run, attempt, options)
  options = options or {}
  err.check_options(options, { threads = true }, "stacks.look", 3)
  local script = SCRIPT:gsub("{(%l+)}", {
    root = require("ciranda.fleet.signal").ROOT,
    path = ("%s/%s/%s"):format(require("ciranda.fleet.signal").ROOT, run, attempt),
    threads = tostring(options.threads or THREADS),
    looks = tostring(LOOKS),
  }):gsub("\n", " ")
  local list = {}
  for place, result in ipairs(fleet:run(shell.sh(script), { timeout = LIMIT })) do
    local one = { worker = result.worker }
    local idle, text = (result.stdout or ""):match("^([%d.]+) %d+\n(.*)$")
    if idle then
      one.idle, one.text = tonumber(idle), text:sub(1, MOST)
    else
      local words = (result.stderr or ""):gsub("%s+$", "")
      one.problem = result.err and tostring(result.err)
        or words ~= "" and words
        or "nothing of the attempt is running"
    end
    list[place] = one
  end
  return list
end

return M
