--- The logs of an attempt on the runner: one file a worker, and what of them is shown.
--
-- The files hold each worker's merged standard output and error, byte for byte. They lie with the run's journal; the
-- names people look for, `${TMPDIR:-/tmp}/RUN/output_slice_0000_worker_0000.txt`, are links to them. Standard output
-- shows the first worker's bytes as they are; other workers are shown on request, or when one prints what looks
-- like a failure, as prefixed lines on standard error.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local nodeset = require("ciranda.provider.nodeset")
local task = require("ciranda.task")
local uv = require("luv")
local view = require("ciranda.fleet.view")

local M = {}

--- Seconds between two looks at whether folded lines are ready.
local TICK = 0.25
--- Bytes of a log's end that are kept in memory when its file takes no more.
local TAIL = 32768
--- Lines shown of a worker that prints what looks like a failure, from that line on; and of all such workers together,
--- equal ones counted once: when a thousand fall at once, who was first must not scroll away.
local ALARM_LINES, ALARM_TOTAL = 30, 120
--- Up to so many workers every log is followed while it grows; of more, the first one's and those that are shown.
local FOLLOW_ALL = 64

---@class ciranda.run.LogOptions
---@field directory string where the files are
---@field links string? directory of the links people look for
---@field workers ciranda.Worker[]
---@field show string? a node set or "all": workers whose lines are shown with a prefix
---@field raw (fun(bytes: string))? takes the first worker's bytes; may wait
---@field lines (fun(text: string))? takes prefixed lines
---@field limit integer? bytes that all files together may have; what is beyond stays on the workers
---@field on_full (fun(problem: ciranda.Error?))? the limit has been reached, or the disk is full; told once

---@class ciranda.run.Logs
---@field directory string
---@field private files table<ciranda.Worker, userdata>
---@field private paths table<ciranda.Worker, string>
local Logs = {}
Logs.__index = Logs

--- Are all logs brought home while they grow?
---@param follow "auto"|"all"|"first"|nil as the run was told (auto)
---@param workers integer how many there are
---@return boolean
function M.follows_all(follow, workers)
  return follow == "all" or follow ~= "first" and workers <= FOLLOW_ALL
end

--- The name people look for.
---@param worker ciranda.Worker
---@return string
function M.file_name(worker)
  return ("output_slice_%04d_worker_%04d.txt"):format(worker.slice, worker.index)
end

--- Makes the directory of the links, which must be ours: in a shared /tmp somebody else could have made it first.
---@param path string
local function make_own_directory(path)
  fs.mkdir_p(path:match("^(.*)/[^/]*$"))
  local stat = uv.fs_lstat(path)
  if not stat then
    fs.mkdir(path, 448)
    return
  end
  if stat.type ~= "directory" or stat.uid ~= uv.getuid() then
    err.raise({
      code = "permission",
      op = "logs",
      target = path,
      message = ("%s is there and is not a directory of yours; give another --RUN_NAME, or set TMPDIR"):format(
        path
      ),
    })
  end
end

--- `${TMPDIR:-/tmp}/RUN`.
---@param run string
---@return string
function M.link_directory(run)
  local base = os.getenv("TMPDIR")
  if not base or base == "" then
    base = "/tmp"
  end
  return base:gsub("(.)/+$", "%1") .. "/" .. run
end

--- Makes `${TMPDIR:-/tmp}/RUN`.
---@param run string
---@return string path
-- Raises "permission" when it belongs to somebody else.
function M.make_link_directory(run)
  local path = M.link_directory(run)
  make_own_directory(path)
  return path
end

--- Opens the logs of an attempt, for adding to what is there already.
---@param options ciranda.run.LogOptions
---@return ciranda.run.Logs
-- Raises "permission" when the links' directory belongs to somebody else; "no_space" and the like.
function M.open(options)
  local logs = setmetatable({
    directory = options.directory,
    files = {},
    paths = {},
    sizes = {},
    first = options.workers[1],
    raw = options.raw,
    alarms = {},
    alarm_lines = 0,
    partial = {},
    lines = options.lines,
    limit = options.limit and options.limit > 0 and options.limit or math.huge,
    on_full = options.on_full,
    total = 0,
    cut = {},
  }, Logs)
  fs.mkdir_p(options.directory, 448)
  if options.links then
    make_own_directory(options.links)
  end
  local shown = {}
  if options.show then
    for _, worker in ipairs(nodeset.select(options.workers, options.show)) do
      shown[worker] = true
    end
  end
  logs.view = view.new({
    write = options.lines or function() end,
    clock = clock.now,
  })
  logs.alarm_view = view.new({
    write = function(text)
      logs.alarm_lines = logs.alarm_lines + 1
      if logs.alarm_lines <= ALARM_TOTAL then
        options.lines(text)
      end
    end,
    clock = clock.now,
  })
  for _, worker in ipairs(options.workers) do
    local path = options.directory .. "/" .. M.file_name(worker)
    local fd, message = uv.fs_open(path, "a", 384)
    if not fd then
      err.raise(err.wrap(message, { op = "logs", target = path }))
    end
    logs.files[worker], logs.paths[worker] = fd, path
    logs.sizes[worker] = uv.fs_fstat(fd).size
    logs.total = logs.total + logs.sizes[worker]
    if options.links then
      local link = options.links .. "/" .. M.file_name(worker)
      uv.fs_unlink(link)
      fs.symlink(path, link)
    end
    if shown[worker] then
      logs.view:add(worker)
    end
  end
  logs.shown = shown
  return logs
end

--- Bytes of a worker's log that are here already.
---@param worker ciranda.Worker
---@return integer
function Logs:size(worker)
  return self.sizes[worker]
end

--- Whether a worker's lines are shown with a prefix.
---@param worker ciranda.Worker
---@return boolean
function Logs:is_shown(worker)
  return self.shown[worker] == true
end

--- Bytes of a worker's log that its worker has given up: a hole in the file, so that offsets stay what they are.
---@param worker ciranda.Worker
---@param to integer the first byte that there is again
function Logs:skip(worker, to)
  if not self.cut[worker] and to > self.sizes[worker] then
    uv.fs_ftruncate(self.files[worker], to)
    self.sizes[worker] = to
  end
end

---@param worker ciranda.Worker
---@return string
function Logs:path(worker)
  return self.paths[worker]
end

--- Looks for a line that is the beginning of a failure; from it on some lines of that worker are shown.
---@private
function Logs:watch_for_alarm(worker, bytes)
  local text = (self.partial[worker] or "") .. bytes
  local position = 1
  while true do
    local newline = text:find("\n", position, true)
    if not newline then
      break
    end
    local line = text:sub(position, newline - 1)
    if not self.alarms[worker] and view.alarming(line) then
      self.alarms[worker] = self.named and 0 or ALARM_LINES
    end
    if (self.alarms[worker] or 0) > 0 then
      self.alarms[worker] = self.alarms[worker] - 1
      self.alarm_view:feed(worker, line .. "\n")
    end
    position = newline + 1
  end
  self.partial[worker] = text:sub(position):sub(-4096)
end

--- From now on a file is the beginning of its log, and the end is kept in memory.
---@private
---@param problem ciranda.Error? why
function Logs:cut_off(worker, bytes, problem)
  if not next(self.cut) and self.on_full then
    self.on_full(problem)
  end
  self.cut[worker] = ((self.cut[worker] or self:read_tail(worker)) .. bytes):sub(-TAIL)
end

--- Writes a piece of a worker's log into its file, unless the files have reached their limit, or the disk has: then
--- none takes any more, for the journal needs room too.
---@private
function Logs:store(worker, bytes)
  if self.cut[worker] or self.total + #bytes > self.limit then
    return self:cut_off(worker, bytes)
  end
  local done = 0
  while done < #bytes do
    local written, message = uv.fs_write(self.files[worker], done == 0 and bytes or bytes:sub(done + 1), -1)
    if not written then
      uv.fs_ftruncate(self.files[worker], self.sizes[worker])
      local problem = err.wrap(message, { op = "logs", target = self.paths[worker] })
      if not err.is(problem, "no_space") then
        err.raise(problem)
      end
      self.limit = 0
      return self:cut_off(worker, bytes, problem)
    end
    done = done + written
  end
  self.sizes[worker] = self.sizes[worker] + #bytes
  self.total = self.total + #bytes
end

--- Takes a piece of a worker's log: into its file, and on the screen where it belongs there. Waits only for a standard
--- output that is not being read, and only the first worker's.
---@param worker ciranda.Worker
---@param bytes string
-- Raises "io" and the like: bytes that are not in the file must not count as received.
function Logs:take(worker, bytes)
  self:store(worker, bytes)
  if worker == self.first and self.raw then
    self.raw(bytes)
  end
  if self.shown[worker] then
    self.view:feed(worker, bytes)
  elseif worker ~= self.first and self.lines then
    self:watch_for_alarm(worker, bytes)
  end
end

--- A failure has been named: whoever prints one from now on has followed it, and is in the report.
function Logs:name_failure()
  self.named = true
end

--- A worker has ended: its last line is shown, and nobody's lines wait for it.
---@param worker ciranda.Worker
function Logs:finish(worker)
  self.view:finish(worker)
  self.alarm_view:finish(worker)
end

--- The end of a worker's file.
---@private
---@return string
function Logs:read_tail(worker)
  local file = io.open(self.paths[worker], "rb")
  if not file then
    return ""
  end
  file:seek("set", math.max(0, file:seek("end") - TAIL))
  local text = file:read("a") or ""
  file:close()
  return text
end

--- The end of a worker's log.
---@param worker ciranda.Worker
---@param count integer lines
---@return string[]
function Logs:tail(worker, count)
  local text = self.cut[worker] or self:read_tail(worker)
  local lines = {}
  for line in text:gmatch("[^\n]+") do
    lines[#lines + 1] = line
  end
  return table.move(lines, math.max(1, #lines - count + 1), #lines, 1, {})
end

--- Shows folded lines as they become ready, until cancelled.
function Logs:show_lines()
  while true do
    task.sleep(TICK)
    self.view:flush()
    self.alarm_view:flush()
  end
end

--- Shows the lines that wait for their equals, since nothing more comes, and says how much was not shown of what looked
--- like failures.
function Logs:show_rest()
  self.view:close()
  self.alarm_view:close()
  local more = self.alarm_lines - ALARM_TOTAL
  if more > 0 then
    self.alarm_lines = ALARM_TOTAL
    local workers = {}
    for worker in pairs(self.alarms) do
      workers[#workers + 1] = worker
    end
    self.lines(
      ("%d lines more that look like failures were not shown, see the logs in %s of %s\n"):format(
        more,
        self.directory,
        nodeset.fold(workers)
      )
    )
  end
end

--- Closes the files; lines that wait are shown.
function Logs:close()
  self:show_rest()
  for worker, fd in pairs(self.files) do
    uv.fs_close(fd)
    self.files[worker] = nil
  end
end

Logs.__close = Logs.close

return M
