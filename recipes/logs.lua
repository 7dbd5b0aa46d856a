--- logs: what the workers of a run have written, as far as it is on this machine or in the job's bucket.
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local job = require("ciranda.run.job")
local job_view = require("ciranda.run.job_view")
local logs_of = require("ciranda.run.logs")
local nodeset = require("ciranda.provider.nodeset")
local remote_log = require("ciranda.run.remote_log")
local runs = require("ciranda.run.runs")
local screens = require("ciranda.run.screen")
local task = require("ciranda.task")
local uv = require("luv")

local M = {
  summary = "show the logs of a run",
  description = "Shows the log of the first worker as it is; of several, lines with their workers. The logs of "
    .. "multihost_runner and of recipes like it are on this machine; what is not here yet, because the run has no "
    .. "runner or its runner brings that log later, is read on the workers. Those of multihost_job are read from its "
    .. "bucket. --follow goes on until the run has ended.",
  flags = {
    { name = "RUN", positional = true, required = true, help = "Name of the run." },
    {
      name = "show",
      help = "These workers: a node set such as slice[0-1]/worker0, or all (the first worker).",
    },
    { name = "tail", type = "integer", help = "Only so many lines from the end of each log." },
    { name = "follow", type = "boolean", default = false, help = "Go on while the run does." },
    {
      name = "remote",
      type = "boolean",
      help = "Ask the workers for what is not here: true, also of a run that has ended; false, never.",
    },
    { name = "attempt", help = "Of this attempt (the last one); ciranda runs RUN names it." },
  },
}

--- Bytes read at once.
local PIECE = 65536
--- Seconds between two looks at logs that may have grown: on this machine, in a bucket.
local LOOK, LOOK_BUCKET, LOOK_REMOTE = 0.3, 10, 2

---@class recipes.logs.Source where logs come from
---@field workers ciranda.Worker[]
---@field size fun(worker: ciranda.Worker): integer bytes there are by now
---@field read fun(worker: ciranda.Worker, from: integer, count: integer): string
---@field ended fun(): boolean nothing more will come
---@field look number seconds between two looks
---@field close (fun())?
---@field here recipes.logs.Source? what of it is at hand

--- The logs of an attempt, on this machine.
---@param state ciranda.journal.State
---@param id string?
---@return recipes.logs.Source
local function from_attempt(state, id)
  local attempt = runs.attempt(state, id)
  local function path(worker)
    return runs.log_path(state.run, attempt.attempt, worker)
  end
  return {
    workers = attempt.workers or {},
    look = LOOK,
    size = function(worker)
      local stat = uv.fs_stat(path(worker))
      return stat and stat.size or 0
    end,
    read = function(worker, from, count)
      local file <close> = fs.open(path(worker))
      return file:read(count, from)
    end,
    ended = function()
      local now = runs.read(state.run)
      return not runs.is_watched(now) or runs.attempt(now, attempt.attempt).ended ~= nil
    end,
  }
end

--- The logs of an attempt, with what is still on its workers. Who cannot be asked is said, and shown as far as it is
--- here.
---@param state ciranda.journal.State
---@param id string?
---@param say fun(format: string, ...: any)
---@return recipes.logs.Source
local function from_workers(state, id, say)
  local here = from_attempt(state, id)
  local there = remote_log.open(state.run, runs.attempt(state, id))
  local ended, failed = {}, {}
  --- What `fn` returns, or nothing when the worker cannot be asked.
  local function try(worker, fn, ...)
    if failed[worker] then
      return nil
    end
    local ok, first, second = pcall(fn, there, worker, ...)
    if ok then
      return first, second
    elseif err.is_fatal(first) then
      error(first, 0)
    end
    failed[worker] = true
    say("Only what is here: %s", tostring(first))
  end
  return {
    workers = here.workers,
    here = here,
    look = LOOK_REMOTE,
    size = function(worker)
      local size
      size, ended[worker] = try(worker, there.look)
      return math.max(here.size(worker), size or 0)
    end,
    read = function(worker, from, count)
      local size = here.size(worker)
      if from < size then
        return here.read(worker, from, math.min(count, size - from))
      end
      local bytes, first = try(worker, there.read, from, count)
      return bytes or "", first
    end,
    ended = function()
      for worker in pairs(failed) do
        ended[worker] = true
      end
      local any = false
      for _, over in pairs(ended) do
        if not over then
          return false
        end
        any = true
      end
      return any
    end,
    close = function()
      there:close()
    end,
  }
end

--- Whether the workers know more than what is here: nobody brings it, or its turn comes when they have ended.
---@param state ciranda.journal.State
---@param id string?
---@return boolean
local function more_there(state, id)
  local attempt = runs.attempt(state, id)
  local open = runs.open_attempt(state)
  if not open or open.attempt ~= attempt.attempt then
    return false
  end
  local follow = type(attempt.watch) == "table" and attempt.watch.follow or nil
  return not runs.is_watched(state) or not logs_of.follows_all(follow, #(attempt.workers or {}))
end

--- Waits for an attempt beyond the first so many to be started, as long as somebody may start one.
---@async
---@param run string
---@param known integer
---@return ciranda.journal.State
local function await_attempt(run, known)
  while true do
    local state = runs.read(run)
    local last = state.attempts[#state.attempts]
    if not runs.is_watched(state) or #state.attempts > known and (last.gone or last.ended) then
      return state
    end
    task.sleep(LOOK)
  end
end

--- The logs of a job, in its bucket.
---@param state ciranda.journal.State
---@return recipes.logs.Source
local function from_bucket(state)
  local known = state.job
  if not known then
    err.raise({
      code = "failed",
      target = state.run,
      message = ("run %s ended before it had put anything into its bucket"):format(state.run),
    })
  end
  local storage = require("ciranda.gcp.storage").connect()
  local place = { bucket = known.bucket, prefix = known.prefix }
  place.generation = job.generation(storage, place)
  local workers, objects, finished = {}, {}, 0
  local function look()
    local seen
    seen, finished = job_view.look(storage, place)
    for _, worker in ipairs(seen) do
      local key = worker.slice .. "/" .. worker.worker
      if worker.log and not objects[key] then
        workers[#workers + 1] =
          { slice = worker.slice, index = worker.worker, node = "slice" .. worker.slice }
      end
      objects[key] = worker.log
    end
  end
  look()
  local function object(worker)
    return objects[worker.slice .. "/" .. worker.index]
  end
  return {
    workers = workers,
    look = LOOK_BUCKET,
    size = function(worker)
      return object(worker).size
    end,
    read = function(worker, from, count)
      local last = math.min(from + count, object(worker).size) - 1
      return (storage:download(place.bucket, object(worker).name, { first = from, last = last }))
    end,
    ended = function()
      look()
      return #workers > 0 and finished >= #workers
    end,
  }
end

--- Where the last lines of a log begin.
---@param source recipes.logs.Source
---@param worker ciranda.Worker
---@param lines integer
---@return integer offset
local function tail_offset(source, worker, lines)
  local size = source.size(worker)
  if lines == 0 then
    return size
  end
  local from, count = size, 0
  while from > 0 do
    local start = math.max(0, from - PIECE)
    local piece = source.read(worker, start, from - start)
    for place = #piece, 1, -1 do
      -- The newline at the very end ends a line; it does not begin one.
      if piece:byte(place) == 10 and start + place < size then
        count = count + 1
        if count == lines then
          return start + place
        end
      end
    end
    from = start
  end
  return 0
end

---@param context ciranda.cli.Context
function M.run(context)
  local flags = context.flags
  if flags.tail and flags.tail < 0 then
    err.raise({ code = "usage", message = ("--tail is %d, but takes a number of lines"):format(flags.tail) })
  end
  local state = runs.read(flags.RUN)
  local is_job = state.recipe == "multihost_job" and #state.attempts == 0
  local goes_on = flags.follow and not flags.attempt and not is_job and not context.json
  if goes_on then
    state = await_attempt(flags.RUN, 0)
  end
  local source, remote
  local function open()
    remote = not is_job
      and not context.json
      and flags.remote ~= false
      and (flags.remote or more_there(state, flags.attempt))
    source = is_job and from_bucket(state)
      or remote and from_workers(state, flags.attempt, function(...)
        context.progress:say(...)
      end)
      or from_attempt(state, flags.attempt)
  end
  open()
  local function close()
    if source.close then
      source.close()
    end
  end
  local _ <close> = setmetatable({}, { __close = close })
  if #source.workers == 0 then
    context.progress:say("No worker of run %s has written anything yet", state.run)
    return
  end
  local function chosen()
    return flags.show and nodeset.select(source.workers, flags.show) or { source.workers[1] }
  end
  local workers = chosen()
  if context.json then
    for _, worker in ipairs(workers) do
      context.progress:event({
        event = "log",
        slice = worker.slice,
        worker = worker.index,
        size = source.size(worker),
        path = not is_job and runs.log_path(state.run, runs.attempt(state, flags.attempt).attempt, worker)
          or nil,
      })
    end
    return
  end
  local screen <close> = screens.new(1)
  local scope <close> = task.scope()
  screen:expect(workers)
  screen:start(scope)
  local positions, any = {}, false
  --- Shows what is there and was not shown.
  local function show(from)
    task.map(workers, function(worker)
      local size = from.size(worker)
      while positions[worker] < size do
        local bytes, first = from.read(worker, positions[worker], math.min(PIECE, size - positions[worker]))
        positions[worker] = (first or positions[worker]) + #bytes
        any = true
        if #workers == 1 then
          screen:raw(bytes)
        else
          screen:feed(worker, bytes)
        end
        if bytes == "" then
          break
        end
      end
    end, 16)
  end
  for _, worker in ipairs(workers) do
    positions[worker] = flags.tail and tail_offset(source, worker, flags.tail) or 0
  end
  while true do
    if source.here and not flags.tail then
      show(source.here) -- a worker may be long in answering, or not answer
    end
    repeat
      local ended = not flags.follow or source.ended()
      show(source)
      if not ended then
        task.sleep(source.look)
      end
    until ended or screen:is_gone()
    local known = #state.attempts
    if not goes_on or screen:is_gone() then
      break
    end
    state = await_attempt(state.run, known)
    if #state.attempts == known then
      break
    end
    -- The lines of the one come before those of the other.
    for _, worker in ipairs(workers) do
      screen:finish(worker)
    end
    close()
    open()
    workers = chosen()
    screen:expect(workers)
    for _, worker in ipairs(workers) do
      positions[worker] = 0
    end
    context.progress:say("Attempt %d of run %s", #state.attempts, state.run)
  end
  screen:close()
  local now = runs.read(state.run)
  if not is_job and not runs.is_watched(now) and runs.open_attempt(now) then
    context.progress:say(
      "Run %s has no runner: %s. ciranda attach %s takes it up.",
      state.run,
      remote and "this was read on its workers" or "what its workers have written since is not here",
      state.run
    )
  elseif not any and not flags.tail then
    context.progress:say(
      "What you asked for of run %s is empty; ciranda runs %s says how it stands",
      state.run,
      state.run
    )
  end
end

return M
