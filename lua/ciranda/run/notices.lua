--- What the platform tells a worker before it takes the machine away: maintenance, preemption.
--
-- A small script on each worker waits at its metadata server and prints what changes; between changes nothing goes over
-- the connection. It ends with its connection, which is made again while the run lasts.
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {}

--- Seconds that a worker has from a notice to its end, by the cause. Maintenance: the platform waits for 300 s
--- (Cloud TPU's autocheckpoint), less 10 for the notice to be seen. Spot: Compute Engine's 30 s. The others are ours.
M.GRACE = { maintenance = 290, spot = 30, user = 300, failure = 30 }

--- Seconds before a watcher whose connection broke is begun again.
local AGAIN = 5

-- One curl a key waits at the metadata server, a minute at a time, so that none outlives its connection for long. The
-- ETag is taken from the header by sed: curl has a variable for it only since 7.83, and Ubuntu 22.04 has 7.81.
local SCRIPT = [[
u=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance;
command -v curl >/dev/null || exit 3;
watch() { e=0; n=0; while [ $n -lt 5 ]; do
r=$(curl -s -m 70 -D - -H Metadata-Flavor:Google
"$u/$1?alt=$2&wait_for_change=true&timeout_sec=55&last_etag=$e" | tr -d "\r");
e=$(echo "$r" | sed -n "s/^[Ee][Tt][Aa][Gg]: *//p" | head -n 1);
if [ -n "$e" ]; then n=0; echo "$1 $(date +%s) $(echo "$r" | sed "1,/^$/d" | tr -d "\n")";
else e=0; n=$((n+1)); sleep 3; fi; done; };
watch maintenance-event text & a=$!; watch preempted text & b=$!; watch upcoming-maintenance json & c=$!;
cat >/dev/null; kill $a $b $c]]
---@class ciranda.run.Notice
---@field worker ciranda.Worker
---@field cause "maintenance"|"spot"|nil nil: nothing is to be done now
---@field text string for a person
---@field at number when the worker learned of it: seconds since 1970 by its own clock

--- What a line of the script means; nil when it means nothing.
---@param line string
---@return { cause: string?, text: string, at: number }?
function M.meaning(line)
  local key, at, value = line:match("^(%S+) (%d+) (.*)$")
  at = tonumber(at)
  if key == "maintenance-event" and value ~= "NONE" and value:match("^[%u_]+$") then
    return { cause = "maintenance", text = "maintenance (" .. value .. ")", at = at }
  elseif key == "preempted" and value == "TRUE" then
    return { cause = "spot", text = "preemption", at = at }
  elseif key == "upcoming-maintenance" then
    local ok, upcoming = pcall(json.decode, value)
    upcoming = ok and type(upcoming) == "table" and upcoming or {}
    local status = upcoming.maintenance_status or upcoming.maintenanceStatus
    local from = upcoming.window_start_time or upcoming.windowStartTime
    if status == "ONGOING" then
      return { cause = "maintenance", text = "maintenance (ongoing)", at = at }
    elseif type(status) == "string" then
      return { text = ("maintenance is %s, from %s on"):format(status, tostring(from or "?")), at = at }
    end
  end
  return nil
end

--- The script as a command for any login shell.
---@return string
function M.command()
  return shell.sh((SCRIPT:gsub("\n", " ")))
end

--- Watches one worker until it is cancelled.
---@async
---@param link ciranda.fleet.Link
---@param take fun(line: string)
local function watch_worker(link, take)
  local forever = task.event()
  while true do
    local partial, mine = "", nil
    local ok, answer = pcall(function()
      return link:use(function(connection)
        return connection:exec(M.command(), {
          stdin = function()
            forever:wait()
          end,
          on_stdout = function(bytes)
            partial = partial .. bytes
            for line in partial:gmatch("([^\n]*)\n") do
              local taken, problem = pcall(take, line)
              if not taken then
                mine = problem
                error(problem, 0)
              end
            end
            partial = partial:match("[^\n]*$")
          end,
        })
      end)
    end)
    if ok and answer.code then
      return -- no curl, or no metadata server: there is nothing to learn here
    elseif mine or not ok and err.is_fatal(answer) then
      error(mine or answer, 0)
    end
    -- Whatever keeps us from the worker: whether it is lost is for others to say.
    task.sleep(AGAIN)
  end
end

--- Watches every worker of a fleet until it is cancelled. Each notice is told once, whoever gives it.
---@async
---@param fleet ciranda.Fleet
---@param on_notice fun(notice: ciranda.run.Notice)
function M.watch(fleet, on_notice)
  task.map(fleet:workers(), function(worker)
    local told = {}
    watch_worker(fleet:link(worker), function(line)
      local notice = M.meaning(line)
      if notice and not told[notice.cause or notice.text] then
        told[notice.cause or notice.text] = true
        notice.worker = worker
        on_notice(notice)
      end
    end)
  end)
end

return M
