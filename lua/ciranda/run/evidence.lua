--- What machines and cloud know of a failure: kernel messages since COMMAND was started, and what the API says is wrong
--- with the nodes. Whoever ran out of memory, or lost its accelerator, finds the reason nowhere else.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {}

--- Seconds that all asking together may take.
local LIMIT = 10
--- Lines told of kernels, and of nodes; bytes of one.
local TOLD, LINE = 6, 200
--- Seconds before the start from which messages count: two clocks tell of it.
local BEFORE = 5
--- Seconds back that count where nobody has said when it started.
local RECENT = 600

-- What a kernel says when it ends a program, or a device, a disk or the memory has failed. The time since the start of
-- the machine tells how old a message is.
local SCRIPT = [[{ dmesg || sudo -n dmesg; } 2>/dev/null | grep -aE "Out of memory|oom-kill|oom_reaper|segfault|]]
  .. [[general protection|trap |blocked for more than|BUG:|Oops|panic|Hardware Error|mce:|AER:|PCIe Bus Error|vfio|]]
  .. [[iommu|DMAR|accel|I/O error|EXT4-fs error|[Rr]emounting|NETDEV WATCHDOG|[Ll]ink is [Dd]own" | tail -n 20;]]
  .. [[read -r up _ < /proc/uptime; echo "uptime=$up"]]

--- Kernel messages of a worker.
---@class ciranda.run.KernelMessage
---@field worker ciranda.Worker
---@field at number seconds since 1970 on the runner's clock
---@field text string

--- What a worker's kernel has said since a time. Pure.
---@param worker ciranda.Worker
---@param text string what the script printed
---@param now number when that was, seconds since 1970 on the runner's clock
---@param since number seconds since 1970 on the runner's clock
---@return ciranda.run.KernelMessage[]
function M.parse(worker, text, now, since)
  local found, uptime = {}, tonumber(text:match("uptime=(%d+%.?%d*)"))
  for stamp, words in text:gmatch("%[ *(%d+%.%d+)%] ([^\n]*)") do
    local at = uptime and now - uptime + tonumber(stamp)
    if at and at >= since - BEFORE then
      found[#found + 1] = { worker = worker, at = at, text = words:sub(1, LINE) }
    end
  end
  return found
end

--- Lines about kernel messages: those of the worker that fell first before others, what differs only in numbers once.
--- Pure.
---@param messages ciranda.run.KernelMessage[]
---@param first ciranda.Worker? who fell first
---@return string[]
function M.kernel_lines(messages, first)
  local groups, by_text = {}, {}
  for _, message in ipairs(messages) do
    local key = message.text:gsub("%x*%d%x*", "#")
    local group = by_text[key]
    if not group then
      group = { workers = {}, seen = {}, first = false, at = math.huge }
      by_text[key], groups[#groups + 1] = group, group
    end
    local mine = message.worker == first
    if (mine and not group.first) or (mine == group.first and message.at < group.at) then
      group.at, group.text, group.first = message.at, message.text, mine
    end
    if not group.seen[message.worker] then
      group.seen[message.worker] = true
      table.insert(group.workers, message.worker)
    end
  end
  table.sort(groups, function(a, b)
    if a.first ~= b.first then
      return a.first
    end
    return a.at < b.at
  end)
  local lines = {}
  for place = 1, math.min(#groups, TOLD) do
    local group = groups[place]
    lines[place] = ("Kernel of %s, %s: %s"):format(
      nodeset.fold(group.workers),
      os.date("%H:%M:%S", math.floor(group.at)),
      group.text
    )
  end
  if #groups > TOLD then
    lines[#lines + 1] = ("Kernels said %d things more: dmesg there shows them"):format(#groups - TOLD)
  end
  return lines
end

--- Lines about nodes with which something is wrong. Pure.
---@param nodes table[] Node messages
---@param workers ciranda.Worker[] the fleet's; of other nodes nothing is told
---@param since number seconds since 1970: older symptoms are not told
---@return string[]
function M.node_lines(nodes, workers, since)
  local parse_time = require("ciranda.gcp.credential_kinds").parse_time
  local short_name = require("ciranda.provider.node").short_name
  local slices, lines, more = {}, {}, 0
  for _, worker in ipairs(workers) do
    slices[worker.node or ""] = worker.slice
  end
  local function tell(format, ...)
    if #lines < TOLD then
      lines[#lines + 1] = format:format(...)
    else
      more = more + 1
    end
  end
  for _, node in ipairs(nodes) do
    local name = short_name(node.name)
    local slice = slices[name]
    if slice then
      local state, health = node.state or "READY", node.health or "HEALTHY"
      if state ~= "READY" or not (health == "HEALTHY" or health:find("UNSPECIFIED", 1, true)) then
        local words = node.healthDescription
        tell(
          "Node %s is %s, %s%s",
          name,
          state,
          health,
          words and words ~= "" and ": " .. words:sub(1, LINE) or ""
        )
      end
      for _, symptom in ipairs(node.symptoms or {}) do
        local at = parse_time(symptom.createTime)
        if not at or at >= since - BEFORE then
          tell(
            "Node %s, slice %d worker %s%s: %s%s",
            name,
            slice,
            symptom.workerId or "?",
            at and os.date(", %H:%M:%S", math.floor(at)) or "",
            symptom.symptomType or "a symptom without a name",
            symptom.details and ", " .. symptom.details:sub(1, LINE) or ""
          )
        end
      end
    end
  end
  if more > 0 then
    lines[#lines + 1] = ("%d things more are wrong with nodes: ciranda tpu_vm describe NODE shows them"):format(
      more
    )
  end
  return lines
end

--- Asks all workers' kernels, and the cloud about their nodes. Who does not answer in time, or lets nobody read, has
--- nothing to say.
---@async
---@param gang ciranda.run.Gang
---@param first ciranda.Worker? who fell first
---@param nodes (fun(): table[])? the cloud's nodes
---@return string[] lines for a person
function M.gather(gang, first, nodes)
  local messages, told, workers, connected, since = {}, {}, {}, {}, math.huge
  for place, member in ipairs(gang.members) do
    local one = member.attempt
    workers[place] = member.worker
    connected[#connected + 1] = one.link:connected() and member.worker or nil
    since = math.min(since, one.started_at and one.started_at - one.clock_offset or math.huge)
  end
  if since == math.huge then
    since = clock.wall() - RECENT
  end
  task.all({
    function()
      gang.options.fleet:select(connected):run(shell.sh(SCRIPT), {
        within = LIMIT,
        on_result = function(result)
          for _, message in ipairs(M.parse(result.worker, result.stdout, clock.wall(), since)) do
            messages[#messages + 1] = message
          end
        end,
      })
    end,
    function()
      local ok, known = true, {}
      if nodes then
        ok, known = pcall(task.timeout, LIMIT, nodes)
      end
      if ok then
        told = M.node_lines(known, workers, since)
      elseif err.is_fatal(known) then
        error(known, 0)
      end
    end,
  })
  local lines = M.kernel_lines(messages, first)
  return table.move(told, 1, #told, #lines + 1, lines)
end

return M
