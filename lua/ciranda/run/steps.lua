--- The steps of one attempt: how far its logs say that it came, and what of that is on disk after its end.
--
-- Logs are read as they come, so that the end can say what was lost; the disk decides what was saved.
local checkpoint = require("ciranda.run.checkpoint")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- Seconds between two looks for saves that the command makes by itself.
M.SAVES = 30
--- Seconds that looking at the checkpoints may hold up a signal.
local LOOK_BEFORE = 5

---@class ciranda.run.StepsOptions
---@field fleet ciranda.Fleet
---@field directory string? where COMMAND saves; nil when nobody has said it
---@field base string the directory COMMAND runs in, below the login directory
---@field say fun(format: string, ...)
---@field chips integer? of all slices
---@field on_saved fun(step: integer) a save by signal is on disk

---@class ciranda.run.Steps
---@field options ciranda.run.StepsOptions
---@field last_step integer? the last that a log speaks of
---@field sync_point integer? where the processes agreed to save and stop
---@field synced table<ciranda.Worker, integer> the same, by those that have said so
---@field step_time number? seconds, the last that a log speaks of
---@field told_to_stop boolean? a log says that a SIGTERM ended the training
---@field private partial table<ciranda.Worker, string> the beginnings of lines that have not ended
local Steps = {}
Steps.__index = Steps

---@param options ciranda.run.StepsOptions
---@return ciranda.run.Steps
function M.new(options)
  return setmetatable({ options = options, partial = {}, synced = {} }, Steps)
end

--- Takes note of the steps that a log speaks of, and of a stop that the command was told of.
---@param worker ciranda.Worker
---@param bytes string
function Steps:read(worker, bytes)
  local text = (self.partial[worker] or "") .. bytes
  local cut = text:match("^.*\n()") or 1
  local lines = text:sub(1, cut - 1)
  local step = checkpoint.last_step(lines)
  if step and step > (self.last_step or -1) then
    self.last_step = step
  end
  self.step_time = checkpoint.step_time(lines) or self.step_time
  local synced = checkpoint.sync_point(lines)
  self.synced[worker] = synced or self.synced[worker]
  self.sync_point = synced or self.sync_point
  self.told_to_stop = self.told_to_stop or checkpoint.stopped_by_signal(lines)
  self.partial[worker] = text:sub(cut):sub(-4096)
end

--- Looks at the checkpoints before a signal; a look that fails must not keep the signal back.
---@async
---@return ciranda.checkpoint.Watch?
function Steps:look_before()
  local options = self.options
  if not options.directory then
    return nil
  end
  local ok, watch = pcall(checkpoint.before, options.fleet, options.directory, {
    base = options.base,
    timeout = LOOK_BEFORE,
  })
  if ok then
    return watch
  elseif err.is_fatal(watch) then
    error(watch, 0)
  end
  options.say("The checkpoints could not be looked at before the signal: %s", tostring(watch))
  return nil
end

--- Tells of each step that comes on disk by itself, as one worker or the bucket has it, until cancelled. A look that
--- fails is taken for none.
---@async
---@param tell fun(step: integer)
function Steps:watch_saves(tell)
  local options = self.options
  local one = options.fleet:select({ options.fleet:workers()[1] })
  local known
  while true do
    local ok, listing =
      pcall(checkpoint.look, one, options.directory, { base = options.base, timeout = LOOK_BEFORE })
    if not ok and err.is_fatal(listing) then
      error(listing, 0)
    elseif ok and listing.answered > 0 then
      local step = checkpoint.newest(listing) or -1
      if known and step > known then
        tell(step)
      end
      known = math.max(known or step, step)
    end
    task.sleep(M.SAVES)
  end
end

--- Does the log say that the command stopped because it was told to? Its exit status does not say it; a job that
--- trained on after its sync point was not stopped by it.
---@return boolean
function Steps:obeyed_a_signal()
  return self.told_to_stop or self.sync_point ~= nil and self.sync_point >= (self.last_step or 0)
end

---@class ciranda.run.StepsEnd
---@field stopped boolean it was asked to stop, by us or by others
---@field since number? when others asked: seconds since 1970
---@field obeyed boolean it says itself that a signal stopped it
---@field there ciranda.Worker[] those that were not lost, which can be asked

--- The line on what a restart begins from, and what is lost to it.
---@private
---@param listing ciranda.checkpoint.Listing
---@param step integer? the newest on disk
function Steps:tell_loss(listing, step)
  local at = step and checkpoint.time_of(listing, step)
  local pieces = {}
  if at then
    pieces[1] = ("saved %s ago"):format(clock.span(clock.wall() - at))
  end
  local lost = self.last_step and math.max(0, self.last_step - (step or -1))
  if lost and lost > 0 and self.step_time and self.options.chips then
    pieces[#pieces + 1] = ("%.3g chip-hours of work lost"):format(
      lost * self.step_time * self.options.chips / 3600
    )
  end
  if step then
    pieces[#pieces + 1] = listing.iterators and listing.iterators[step] and "the data iterator is in it"
      or "no data iterator is in it: the data begins anew"
  end
  if #pieces > 0 then
    self.options.say(
      "A restart begins %s: %s",
      step and "after step " .. step or "at the first step",
      table.concat(pieces, "; ")
    )
  end
end

--- What is on disk, when nobody looked before the end.
---@private
---@param how ciranda.run.StepsEnd
---@return integer? saved
function Steps:tell_newest(how)
  local options = self.options
  local bucket = options.directory:match("^%a%w*://") -- it can be asked without any worker
  local listing = (#how.there > 0 or bucket)
      and checkpoint.look(options.fleet:select(how.there), options.directory, { base = options.base })
    or { answered = 0 }
  if listing.answered == 0 then
    options.say("Last step on disk: nobody could be asked about %s", options.directory)
    return nil
  end
  local step = checkpoint.newest(listing)
  local at_sync_point = self.sync_point and step == self.sync_point
  -- A directory's time has whole seconds.
  local since = how.since
    and not self.sync_point
    and step
    and checkpoint.time_of(listing, step) >= math.floor(how.since)
  if (how.obeyed or how.stopped) and (at_sync_point or since) then
    options.say("Checkpoint: saved: step %d is on disk in %s", step, options.directory)
    self:tell_loss(listing, step)
    options.on_saved(step)
    return step
  end
  local lost = self.last_step and self.last_step - (step or -1)
  options.say(
    "Last step on disk: %s in %s%s",
    step and tostring(step) or "none",
    options.directory,
    lost
        and ("; %d step%s lost (the logs had reached step %d)"):format(
          math.max(lost, 0),
          lost == 1 and "" or "s",
          self.last_step
        )
      or ""
  )
  self:tell_loss(listing, step)
  return nil
end

--- Says what is on disk before a further attempt, which begins there; a look that fails keeps nothing back.
---@async
---@param earlier ciranda.run.Steps? of the attempt before
function Steps:tell_start(earlier)
  local watch = self:look_before()
  if watch then
    if earlier then
      self.last_step, self.step_time = earlier.last_step, earlier.step_time
    end
    self:tell_loss(watch.listing, checkpoint.newest(watch.listing))
    self.last_step = nil
  end
end

--- Says what is on disk after the end.
---@async
---@param watch ciranda.checkpoint.Watch? what was there before the signal
---@param how ciranda.run.StepsEnd
---@return integer? saved the step that this stop has saved
function Steps:tell(watch, how)
  local options = self.options
  if not options.directory then
    if self.last_step or how.stopped then
      options.say(
        "Checkpoints: not looked at, since nobody said where they are (--CHECKPOINT_DIR)%s",
        self.last_step and ("; the logs had reached step %d"):format(self.last_step) or ""
      )
    end
    return nil
  end
  local ok, problem = pcall(function()
    if not watch then
      return self:tell_newest(how)
    end
    local said = watch:after(self.sync_point)
    options.say("Checkpoint: %s", checkpoint.describe(said, options.directory, self.last_step))
    if not said.unknown then
      self:tell_loss(said.listing, said.step)
    end
    if said.saved then
      options.on_saved(said.step)
      return said.step
    end
  end)
  if ok then
    return problem
  elseif err.is_fatal(problem) then
    error(problem, 0)
  end
  options.say("Checkpoint: nobody can say what is in %s: %s", options.directory, tostring(problem))
  return nil
end

return M
