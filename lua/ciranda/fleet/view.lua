--- The live view: many workers' output as prefixed lines, equal lines folded into one.
--
--     slice0/worker2: Traceback (most recent call last):
--     slice[0-1]/worker[0-3]: completed step: 12, loss: 0.1234
--
-- A view does no I/O and has no timer: bytes go in by `feed`, whole lines come out through the `write` it
-- was given when `flush` is called (a few times a second). A line waits up to `hold` seconds for its equals
-- from the other workers; each worker's own lines keep their order, a line is never cut by another's, and a
-- last line without a newline appears when its worker ends.
local nodeset = require("ciranda.provider.nodeset")

local M = {}

--- Bytes after which a line that has no end is shown in pieces, so that a worker cannot fill memory.
local LINE_LIMIT = 65536
--- Lines of one worker that may wait for their equals.
local QUEUE_LIMIT = 10000

--- What a broken job prints: these lines appear even when only one worker is shown. Texts of Python, JAX,
--- libtpu and the XLA runtime, as they were reported publicly.
local ALARMS = {
  "^Traceback %(most recent call last%)",
  "^Fatal Python error:",
  "Couldn't open iommu group",
  "open%(/dev/vfio",
  "Failed to initialize TPU system",
  "TPU initialization failed",
  "No accelerator found",
  "RESOURCE_EXHAUSTED",
  "JAX distributed service detected fatal errors",
  "Segmentation fault",
  "No space left on device",
}

---@class ciranda.View
---@field private write_line fun(text: string)
---@field private hold number
---@field private clock fun(): number
---@field private members table<ciranda.Worker, table>
---@field private count integer open members
---@field private sequence integer
---@field private heap table
local View = {}
View.__index = View

--- A binary heap of { sequence, member }, smallest sequence first.
local function heap_push(heap, entry)
  local index = #heap + 1
  heap[index] = entry
  while index > 1 do
    local parent = index // 2
    if heap[parent][1] <= heap[index][1] then
      break
    end
    heap[parent], heap[index] = heap[index], heap[parent]
    index = parent
  end
end

local function heap_pop(heap)
  local top, last = heap[1], heap[#heap]
  heap[#heap] = nil
  if #heap > 0 then
    heap[1] = last
    local index = 1
    while true do
      local child = index * 2
      if not heap[child] then
        break
      end
      if heap[child + 1] and heap[child + 1][1] < heap[child][1] then
        child = child + 1
      end
      if heap[index][1] <= heap[child][1] then
        break
      end
      heap[index], heap[child] = heap[child], heap[index]
      index = child
    end
  end
  return top
end

--- A view.
---@param options { write: fun(text: string), hold: number?, clock: fun(): number }
---  write takes whole lines with their newline; hold is in seconds (0.25); clock gives seconds that only grow
---@return ciranda.View
function M.new(options)
  return setmetatable({
    write_line = options.write,
    hold = options.hold or 0.25,
    clock = options.clock,
    members = {},
    count = 0,
    sequence = 0,
    heap = {},
  }, View)
end

--- Does this line look like the beginning of a failure?
---@param line string
---@return boolean
function M.alarming(line)
  for _, pattern in ipairs(ALARMS) do
    if line:find(pattern) then
      return true
    end
  end
  return false
end

--- A worker whose lines are to be shown. Feeding one adds it too; adding all of them first lets the view
--- know when a line has come from everybody.
---@param worker ciranda.Worker
function View:add(worker)
  if not self.members[worker] then
    self.members[worker] = { worker = worker, partial = "", first = 1, last = 0, lines = {} }
    self.count = self.count + 1
  end
  return self.members[worker]
end

---@private
function View:queue(member, text)
  -- A progress bar redraws its line after a carriage return: its last state is what counts.
  -- Looked for from the end, so that a long line costs no more than its length.
  local last = #text
  while text:byte(last) == 13 do
    last = last - 1
  end
  text = text:sub(1, last)
  text = text:match("^.*\r(.*)") or text
  self.sequence = self.sequence + 1
  member.last = member.last + 1
  member.lines[member.last] = { text = text, sequence = self.sequence, at = self.clock() }
  if member.last == member.first then
    heap_push(self.heap, { self.sequence, member })
  end
end

--- Bytes of a worker's output, cut anywhere.
---@param worker ciranda.Worker
---@param bytes string
function View:feed(worker, bytes)
  local member = self:add(worker)
  local start = 1
  while true do
    local newline = bytes:find("\n", start, true)
    if not newline then
      break
    end
    self:queue(member, member.partial .. bytes:sub(start, newline - 1))
    member.partial = ""
    start = newline + 1
  end
  member.partial = member.partial .. bytes:sub(start)
  while #member.partial > LINE_LIMIT do
    self:queue(member, member.partial:sub(1, LINE_LIMIT))
    member.partial = member.partial:sub(LINE_LIMIT + 1)
  end
  if member.last - member.first >= QUEUE_LIMIT then
    self:flush(true)
  end
end

--- A worker has ended: its last line appears even without a newline, and nobody waits for it any longer.
---@param worker ciranda.Worker
function View:finish(worker)
  local member = self.members[worker]
  if member and not member.finished then
    if member.partial ~= "" then
      self:queue(member, member.partial)
      member.partial = ""
    end
    member.finished = true
    self.count = self.count - 1
  end
end

--- Writes the lines that have waited long enough or have come from everybody; all of them when forced.
---@param force boolean?
function View:flush(force)
  local now = self.clock()
  -- Workers by the text of the line at the head of their queue.
  local by_text = {}
  local function head(member)
    return member.lines[member.first]
  end
  local function enter(member)
    local line = head(member)
    if line then
      local group = by_text[line.text]
      if not group then
        group = { size = 0, members = {} }
        by_text[line.text] = group
      end
      group.members[member] = true
      group.size = group.size + 1
    end
  end
  for _, entry in ipairs(self.heap) do
    local line = head(entry[2])
    if line and line.sequence == entry[1] then
      enter(entry[2])
    end
  end
  local kept = {}
  while #self.heap > 0 do
    local entry = heap_pop(self.heap)
    local member = entry[2]
    local line = head(member)
    if line and line.sequence == entry[1] then
      local group = by_text[line.text]
      if force or now - line.at >= self.hold or group.size >= self.count then
        by_text[line.text] = nil
        local workers = {}
        for other in pairs(group.members) do
          workers[#workers + 1] = other.worker
          other.lines[other.first] = nil
          other.first = other.first + 1
        end
        self.write_line(nodeset.fold(workers) .. ": " .. line.text .. "\n")
        for other in pairs(group.members) do
          enter(other)
          if head(other) then
            heap_push(self.heap, { head(other).sequence, other })
          end
        end
      else
        kept[#kept + 1] = entry
      end
    end
  end
  for _, entry in ipairs(kept) do
    local line = head(entry[2])
    if line and line.sequence == entry[1] then
      heap_push(self.heap, entry)
    end
  end
end

--- Ends the view: everything that still waits is written.
function View:close()
  for worker in pairs(self.members) do
    self:finish(worker)
  end
  self:flush(true)
end

return M
