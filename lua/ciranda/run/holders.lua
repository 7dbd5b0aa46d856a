--- Who holds a worker's accelerators, and how they are made free.
--
-- A holder is a process with an open device file, or with the accelerator library's lock file open. What our own
-- earlier attempts left is ended; of others only who the user says (`--KILL=mine|all`), and otherwise the staging stops
-- and names them. Another user's descriptors can be read by root alone, so sudo is used where it asks no password.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local link_of = require("ciranda.fleet.link")
local worker_script = require("ciranda.run.worker_script")

local M = {}

--- Seconds from TERM to KILL, and from KILL until the devices must be free: a driver takes its time to let go
--- (/dev/vfio was seen held 4 s after the end of its process).
M.GRACE, M.PATIENCE = 10, 30
--- Seconds beyond those that the script may take.
local BEYOND = 30
--- Holders that a message lists.
local LISTED = 8

--- Counts the device files and defines `holding` (pids) and `holders` (a line each, of those that are there still when
--- all has been read of them). One that ends meanwhile would look like somebody else's, and so would one in the middle
--- of an exec, which for a moment shows neither words nor environment.
M.SCAN = [[
count=0; old=$IFS; IFS=,;
for prefix in $devices; do for file in "$prefix"[0-9]*; do [ -e "$file" ] && count=$((count+1)); done; done;
IFS=$old; echo "devices=$count"; su=;
if [ $count -gt 0 ] || [ -e $lock ]; then
[ -r /proc/1/environ ] || { sudo -n true 2>/dev/null && su="sudo -n"; }; fi;
holding() {
set --; old=$IFS; IFS=,; for prefix in $devices; do set -- "$@" -o -lname "$prefix*"; done; IFS=$old;
$su find /proc/[0-9]*/fd -maxdepth 1 "(" -lname "$lock" "$@" ")" -printf "%h\n" 2>/dev/null
| tr -dc "0-9\n" | sort -nu; };
holders() { for pid in $(holding); do user=$(stat -c "%u %U" /proc/$pid 2>/dev/null) || continue;
age=$(ps -o etimes= -p $pid 2>/dev/null | tr -d " ");
looks=0; words=; while [ -z "$words" ] && [ $looks -lt 5 ]; do [ $looks = 0 ] || sleep 0.1; looks=$((looks+1));
words=$($su cat /proc/$pid/cmdline 2>/dev/null | tr "\0\n\t" "   " | cut -c1-200);
own=$($su cat /proc/$pid/environ 2>/dev/null | tr "\0" "\n" | sed -n "s/^CIRANDA_ATTEMPT_DIR=//p"); done;
$su readlink /proc/$pid/exe >/dev/null 2>&1 || continue;
printf "holder=%s %s\t%s\t%s\t%s\n" $pid "$user" "$age" "$own" "$words"; done; };
]]

--- A lock file that nobody holds goes: the library would refuse to start because of it. After `SCAN`.
M.CLEAR = [[
if [ -e $lock ] && [ -z "$(holding)" ]; then rm -f $lock 2>/dev/null || $su rm -f $lock 2>/dev/null
|| echo "lock_file=$lock of $(stat -c %U $lock)"; fi;
]]

local FREE = worker_script.LOCATE
  .. "echo ciranda-probe;"
  .. M.SCAN
  .. [[
root=$(pwd -P)/{root}; uid=$(id -u);
shown() { tr "\0" "\n" < /proc/$1/environ 2>/dev/null; };
ours() { [ "$(stat -c %u /proc/$1 2>/dev/null)" = $uid ] || return 1; [ {kill} = mine ] && return;
env=$(shown $1); [ -n "$env" ] || { sleep 0.1; env=$(shown $1); };
printf "%s\n" "$env" | grep -q "^CIRANDA_ATTEMPT_DIR=$root/"; };
left() { for pid in $(holding); do if [ {kill} = all ] || ours $pid; then echo $pid; fi; done; };
for step in TERM:{grace} KILL:{patience}; do
ticks=0; while pids=$(left); [ -n "$pids" ] && [ $ticks -lt $((${step#*:} * 4)) ]; do
[ $ticks -gt 0 ] && [ ${step%:*} = TERM ] || $su kill -${step%:*} $pids 2>/dev/null;
sleep 0.25; ticks=$((ticks+1)); done; done;
ticks=0; while [ $ticks -lt 20 ] && [ -n "$(holding)" ]; do sleep 0.25; ticks=$((ticks+1)); done;
holders;]]
  .. M.CLEAR
  .. "exit 0"

---@class ciranda.run.DeviceHolder
---@field pid integer
---@field uid integer
---@field user string its name
---@field age number? seconds
---@field attempt string? path of the attempt that it belongs to
---@field command string

--- What a `holder=` line says.
---@param text string
---@return ciranda.run.DeviceHolder?
function M.parse(text)
  local pid, uid, user, age, attempt, command = text:match("^(%d+) (%d+) (%S+)\t([^\t]*)\t([^\t]*)\t([^\t]*)")
  return pid
      and {
        pid = math.tointeger(tonumber(pid)),
        uid = math.tointeger(tonumber(uid)),
        user = user ~= "UNKNOWN" and user or "uid " .. uid,
        age = tonumber(age),
        attempt = attempt ~= "" and attempt or nil,
        command = command:gsub("%s+$", ""),
      }
    or nil
end

---@param list ciranda.run.DeviceHolder[]
---@return string
local function listing(list)
  local pieces = {}
  for place = 1, math.min(#list, LISTED) do
    local holder = list[place]
    pieces[place] = ("process %d of %s%s: %s"):format(
      holder.pid,
      holder.user,
      holder.age and (", for " .. clock.span(holder.age)) or "",
      holder.command ~= "" and holder.command or "(its command cannot be read)"
    )
  end
  return table.concat(pieces, "; ") .. (#list > LISTED and ("; and %d more"):format(#list - LISTED) or "")
end

--- Those that may not be ended.
---@param holders ciranda.run.DeviceHolder[]
---@param kill "mine"|"all"|nil
---@param own table { uid: integer, root: string }
---@return ciranda.run.DeviceHolder[] others
local function others_of(holders, kill, own)
  local others = {}
  for _, holder in ipairs(holders) do
    local ours = holder.attempt
      and holder.uid == own.uid
      and holder.attempt:sub(1, #own.root + 1) == own.root .. "/"
    if not ours and kill ~= "all" and not (kill == "mine" and holder.uid == own.uid) then
      others[#others + 1] = holder
    end
  end
  return others
end

---@param attempt ciranda.run.Attempt
---@param others ciranda.run.DeviceHolder[]
---@param own table
local function refuse(attempt, others, own)
  local mine = true
  for _, holder in ipairs(others) do
    mine = mine and holder.uid == own.uid
  end
  local title = link_of.title(attempt.worker)
  err.raise({
    code = "busy",
    op = "stage",
    target = title,
    message = ("the accelerators of %s are held by %s; end %s there, or let --KILL=%s do it"):format(
      title,
      listing(others),
      #others == 1 and "it" or "them",
      mine and "mine" or "all"
    ),
    holders = others,
  })
end

--- Refuses a worker whose accelerators somebody has that may not be ended.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
---@param kill "mine"|"all"|nil
-- Raises "busy", with the holders.
function M.check(attempt, facts, kill)
  local others = others_of(facts.holders, kill, facts.own)
  if #others > 0 then
    refuse(attempt, others, facts.own)
  end
end

--- Ends the holders that were found and waits until the accelerators are free.
---@param attempt ciranda.run.Attempt
---@param root string where our attempts are, below the home directory
---@param kill "mine"|"all"|nil
---@return string? lock_file one that cannot be removed, and whose it is
-- Raises "busy" when one of them or somebody new has the accelerators in the end.
function M.free(attempt, root, kill)
  local values = { root = root, kill = kill or "none", grace = M.GRACE, patience = M.PATIENCE }
  local answer = attempt:shell(worker_script.fill(FREE, values), { timeout = M.GRACE + M.PATIENCE + BEYOND })
  attempt:expect(answer, "freeing the accelerators")
  local left = {}
  for text in answer.stdout:gmatch("holder=([^\n]*)") do
    left[#left + 1] = M.parse(text)
  end
  if #left > 0 then
    err.raise({
      code = "busy",
      op = "stage",
      target = link_of.title(attempt.worker),
      message = (
        "the accelerators of %s are still held after those who had them were ended: %s; somebody may have come "
        .. "since, or the machine has to be started again"
      ):format(link_of.title(attempt.worker), listing(left)),
      holders = left,
    })
  end
  return answer.stdout:match("lock_file=([^\n]*)")
end

return M
