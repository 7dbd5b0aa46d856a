--- The TFLOP/s that workers print, and what they say of a run: least, median, laggard. Pure: pieces of logs in, lines
--- out.
--
-- Two programs' lines are known: MaxText's shardings example prints `time is 0.412 seconds, TFLOP is 34.2, TFLOP/s is
-- 83.0` once, its trainer `..., TFLOP/s/device: 83.0, ...` at every step. Both count one device. A worker that prints
-- several lines counts with their median: so the first steps, which compile, do not make it a laggard.
local json = require("ciranda.io.json")
local nodeset = require("ciranda.provider.nodeset")

local M = {}

--- Lines of a worker that count, its last ones: enough for a median, and bounded.
M.KEPT = 1000
--- Longest line that is looked at, in bytes.
local LINE = 4096
--- What a value may be below the median before its worker is called a laggard: 1 %.
local ALIKE = 0.01

local PATTERNS = { "TFLOP/s/device:%s*([^%s,]+)", "TFLOP is [^%s,]+, TFLOP/s is ([^%s,]+)" }

--- The value in a line.
---@param line string
---@return number? TFLOP/s a device; nil when the line has none, or one that is not a positive number ("nan", "inf")
function M.parse(line)
  for _, pattern in ipairs(PATTERNS) do
    local text = line:match(pattern)
    local value = text and text:match("^%d") and tonumber(text)
    if value and value > 0 and value < math.huge then
      return value
    end
  end
  return nil
end

--- The middle of some numbers, the mean of the two middle ones when their count is even.
---@param values number[] at least one; the list stays as it is
---@return number
function M.median(values)
  local sorted = table.move(values, 1, #values, 1, {})
  table.sort(sorted)
  local half = #sorted // 2
  return #sorted % 2 == 1 and sorted[half + 1] or (sorted[half] + sorted[half + 1]) / 2
end

---@class ciranda.run.Collector
---@field private workers ciranda.Worker[]
---@field private partial table<ciranda.Worker, string>
---@field private values table<ciranda.Worker, number[]>
---@field private seen table<ciranda.Worker, integer>
local Collector = {}
Collector.__index = Collector

---@param workers ciranda.Worker[] everybody who should print
---@return ciranda.run.Collector
function M.collector(workers)
  local collector = setmetatable({ workers = workers, partial = {}, values = {}, seen = {} }, Collector)
  for _, worker in ipairs(workers) do
    collector.values[worker], collector.seen[worker] = {}, 0
  end
  return collector
end

---@private
---@param worker ciranda.Worker
---@param line string
function Collector:take(worker, line)
  local value = line:find("TFLOP/s", 1, true) and M.parse(line)
  if value then
    self.values[worker][self.seen[worker] % M.KEPT + 1] = value
    self.seen[worker] = self.seen[worker] + 1
  end
end

--- Takes a piece of a worker's log, cut anywhere.
---@param worker ciranda.Worker one of those the collector was made with
---@param bytes string
function Collector:feed(worker, bytes)
  local text = (self.partial[worker] or "") .. bytes
  local position = 1
  while true do
    local newline = text:find("\n", position, true)
    if not newline then
      break
    end
    self:take(worker, text:sub(position, newline - 1))
    position = newline + 1
  end
  self.partial[worker] = text:sub(position):sub(-LINE)
end

---@class ciranda.run.Throughput
---@field least number? TFLOP/s a device; nil when nobody has a value
---@field median number?
---@field laggard { worker: ciranda.Worker, value: number, behind: number }? the slowest, when it is more than 1 % below
---       the median; `behind` is the share of the median that it lacks
---@field values { worker: ciranda.Worker, value: number }[] in the fleet's order
---@field missing ciranda.Worker[] those without a value
---@field above { worker: ciranda.Worker, value: number }[] those above the peak
---@field peak number? as given

--- What all of it comes to; a last line without its newline counts.
---@param peak number? TFLOP/s that a device can do at most
---@return ciranda.run.Throughput
function Collector:summary(peak)
  local summary = { values = {}, missing = {}, above = {}, peak = peak }
  local numbers, slowest = {}, nil
  for _, worker in ipairs(self.workers) do
    self:take(worker, self.partial[worker] or "")
    self.partial[worker] = nil
    if #self.values[worker] == 0 then
      table.insert(summary.missing, worker)
    else
      local entry = { worker = worker, value = M.median(self.values[worker]) }
      table.insert(summary.values, entry)
      table.insert(numbers, entry.value)
      if not slowest or entry.value < slowest.value then
        slowest = entry
      end
      if peak and entry.value > peak then
        table.insert(summary.above, entry)
      end
    end
  end
  if slowest then
    summary.least, summary.median = slowest.value, M.median(numbers)
    local behind = 1 - slowest.value / summary.median
    if behind > ALIKE then
      summary.laggard = { worker = slowest.worker, value = slowest.value, behind = behind }
    end
  end
  return summary
end

---@param entries { worker: ciranda.Worker }[]
---@return ciranda.Worker[]
local function workers_of(entries)
  local workers = {}
  for place, entry in ipairs(entries) do
    workers[place] = entry.worker
  end
  return workers
end

--- What a person reads.
---@param summary ciranda.run.Throughput
---@param chip string? what the peak is of, such as "a v5e chip"
---@return string[]
function M.lines(summary, chip)
  if #summary.values == 0 then
    return { "TFLOP/s: no worker printed any" }
  end
  local behind = "none more than 1 % below the median"
  local laggard = summary.laggard
  if laggard then
    behind = ("slice %d worker %d with %.1f, %.0f %% below the median"):format(
      laggard.worker.slice,
      laggard.worker.index,
      laggard.value,
      100 * laggard.behind
    )
  end
  local lines = {
    ("TFLOP/s a device: min %.1f, median %.1f%s; laggard: %s"):format(
      summary.least,
      summary.median,
      summary.peak and (" (%.0f %% of the peak)"):format(100 * summary.median / summary.peak) or "",
      behind
    ),
  }
  if #summary.missing > 0 then
    table.insert(
      lines,
      ("TFLOP/s missing from %d of %d workers: %s"):format(
        #summary.missing,
        #summary.missing + #summary.values,
        nodeset.fold(summary.missing)
      )
    )
  end
  if #summary.above > 0 then
    local most = 0
    for _, entry in ipairs(summary.above) do
      most = math.max(most, entry.value)
    end
    table.insert(
      lines,
      ("TFLOP/s above the peak of %.1f%s: %s, up to %.1f: the time or the work of a step was counted wrongly"):format(
        summary.peak,
        chip and " of " .. chip or "",
        nodeset.fold(workers_of(summary.above)),
        most
      )
    )
  end
  return lines
end

--- The record of --json.
---@param summary ciranda.run.Throughput
---@return table
function M.record(summary)
  local function named(worker, value)
    return { slice = worker.slice, worker = worker.index, tflops = value }
  end
  local function list(entries)
    local out = {}
    for place, entry in ipairs(entries) do
      out[place] = named(entry.worker, entry.value)
    end
    return json.array(out)
  end
  local missing = {}
  for place, worker in ipairs(summary.missing) do
    missing[place] = named(worker)
  end
  return {
    event = "throughput",
    min = summary.least,
    median = summary.median,
    peak = summary.peak,
    laggard = summary.laggard and named(summary.laggard.worker, summary.laggard.value),
    workers = list(summary.values),
    missing = json.array(missing),
    above_peak = list(summary.above),
  }
end

return M
