--- Progress of long work, on standard error: a status line that is rewritten on a terminal, plain lines elsewhere,
--- JSON lines on standard output with --json.
local json = require("ciranda.io.json")
local uv = require("luv")

---@class ciranda.cli.Progress
---@field private terminal boolean
---@field private json boolean
---@field private shown boolean a status line is on the screen
---@field private tty uv_tty_t? asked for its width
---@field private last_status string
---@field private last_time number
local Progress = {}
Progress.__index = Progress

local M = {}

--- Away from a terminal a status is written when it changes, and again after this long (s).
local REPEAT_AFTER = 30

---@param options {json: boolean}
---@return ciranda.cli.Progress
function M.new(options)
  return setmetatable({
    terminal = uv.guess_handle(2) == "tty" and (os.getenv("TERM") or "dumb") ~= "dumb",
    json = options.json,
    shown = false,
    last_status = "",
    last_time = 0,
  }, Progress)
end

--- Takes the status line away: something else is about to be written to the terminal.
function Progress:clear()
  if self.shown then
    io.stderr:write("\r\27[K")
    self.shown = false
  end
end

--- A line that stays.
---@param format string
---@param ... any
function Progress:say(format, ...)
  local text = string.format(format, ...)
  self:clear()
  if self.json then
    io.write(json.encode { event = "message", text = text }, "\n")
    io.flush()
  else
    io.stderr:write(text, "\n")
  end
end

--- As much of a text as one line of the terminal holds: what wraps could not be rewritten in place.
---@private
---@param text string
---@return string
function Progress:fit(text)
  self.tty = self.tty or uv.new_tty(2, false)
  local width = self.tty and self.tty:get_winsize() or 0
  local room = math.max((width > 0 and width or 80) - 1, 4)
  local length = utf8.len(text) or #text
  if length <= room then
    return text
  end
  local last = utf8.len(text) and utf8.offset(text, room - 2) - 1 or room - 3
  return text:sub(1, last) .. "..."
end

--- What is going on now: rewritten in place on a terminal; elsewhere a line when it changes or 30 s have passed.
---@param text string
---@param state string? what makes it another status than the last one, when the text also tells the time
function Progress:status(text, state)
  local now = uv.now() / 1000
  state = self.terminal and text or state or text
  if state == self.last_status and now - self.last_time < REPEAT_AFTER then
    return
  end
  self.last_status, self.last_time = state, now
  if self.json then
    io.write(json.encode { event = "status", text = text }, "\n")
    io.flush()
  elseif self.terminal then
    io.stderr:write("\r\27[K", self:fit(text))
    self.shown = true
  else
    io.stderr:write(text, "\n")
  end
end

--- An event for --json readers; nothing elsewhere.
---@param record table with a field `event`
function Progress:event(record)
  if self.json then
    io.write(json.encode(record), "\n")
    io.flush()
  end
end

--- Takes the status line away for good.
function Progress:close()
  self:clear()
  if self.tty then
    self.tty:close()
    self.tty = nil
  end
end

return M
