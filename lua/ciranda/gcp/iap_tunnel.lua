--- One tunnel through IAP's relay: a stream of bytes both ways that outlives its WebSockets.
---
--- Each side counts the bytes that it has received and acknowledges them. What is not acknowledged is kept; when a
--- WebSocket is lost another one takes the tunnel up by its id (SID), both sides say how far they have come, and the
--- rest is sent again. Nothing is lost and nothing comes twice.
---
--- A task of its own, whose life is the tunnel's, opens the WebSockets. Everything else happens in callbacks.

local clock = require("ciranda.io.clock")
local errors = require("ciranda.io.error")
local frame = require("ciranda.gcp.iap_frame")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Seconds. `open`: from a WebSocket to the relay's first message, which comes when the worker's port has answered
--- (gcloud: 60). `ack`: how long as much as may be kept stays unacknowledged before the WebSocket is given up.
M.TIMEOUTS = { open = 60, ack = 60 }

--- Seconds between attempts to take a tunnel up again, and for how long: gcloud's figures.
M.RECONNECT = { first = 1.5, factor = 1.1, most = 20, total = 900 }

--- Bytes that are kept unacknowledged; then the writer waits. SSH's own windows are half of it.
M.MAX_KEPT = 4 << 20

--- Bytes that may be received before they are acknowledged: two DATA messages (gcloud).
M.ACK_EVERY = 2 * frame.MAX_DATA

---@class ciranda.gcp.iap.Tunnel
---@field sid string? the tunnel's id
---@field received integer bytes from the worker in all
---@field sent integer bytes to the worker in all
---@field acknowledged integer of these
---@field reconnects integer
---@field private settings table
local Tunnel = {}
Tunnel.__index = Tunnel
Tunnel.__name = "ciranda.gcp.iap.Tunnel"

--- At the program's end the loop closes handles before those who hold them hear of it.
local function close_handle(handle)
  if not handle:is_closing() then
    handle:close()
  end
end

-- Sending ----------------------------------------------------------------------------------------------------------

--- Bytes that wait in the WebSocket from which no more is given to it.
local QUEUE = 256 * 1024

--- Give the WebSocket what it has not had, and take the writer's next piece when there is room.
local function pump(self)
  local ws = self.ws
  while ws and self.up and self.next_place <= self.last_place and ws.pending < QUEUE do
    local piece = self.kept[self.next_place]
    self.next_place = self.next_place + 1
    if not ws:send(frame.data(piece)) then
      return
    end
  end
  local writer = self.waiting_writer
  if writer and self.sent - self.acknowledged < self.settings.max_kept then
    self.waiting_writer = nil
    writer()
  end
end

--- See that a full store is acknowledged in time.
local function watch(self)
  if self.sent - self.acknowledged < self.settings.max_kept then
    return self.timer:stop()
  end
  self.timer:start(math.ceil(self.settings.timeouts.ack * 1000), 0, function()
    if self.ws then
      self.stalled = true
      self.ws:abort()
    end
  end)
end

--- The peer has received so much: forget it. With `again` what it has not is sent once more, from that very byte.
local function confirm(self, total, again)
  if total < self.acknowledged or total > self.sent then
    errors.raise({
      code = "protocol",
      op = "iap",
      message = ("the relay acknowledged %d bytes, after %d, of %d sent"):format(
        total,
        self.acknowledged,
        self.sent
      ),
    })
  end
  local behind = total - self.acknowledged
  self.acknowledged = total
  if behind > 0 then
    self.progress = true
    watch(self)
  end
  local skip = self.cut -- of the first piece, acknowledged in part before
  while behind > 0 do
    local size = #self.kept[self.first_place] - skip
    if behind < size then
      skip = skip + behind
      break
    end
    behind, skip = behind - size, 0
    self.kept[self.first_place] = nil
    self.first_place = self.first_place + 1
  end
  self.cut = skip
  if again then
    local first = self.kept[self.first_place]
    if first and skip > 0 then
      self.kept[self.first_place], self.cut = first:sub(skip + 1), 0
    end
    self.next_place = self.first_place
  end
end

--- Send bytes to the worker. One call at a time: `written` is called, on a later turn, when there is room for more.
---@param data string
---@param written fun()
function Tunnel:write(data, written)
  for first = 1, #data, frame.MAX_DATA do
    self.last_place = self.last_place + 1
    self.kept[self.last_place] = data:sub(first, first + frame.MAX_DATA - 1)
  end
  self.sent = self.sent + #data
  watch(self)
  -- The writer is told on a later turn: it may be in the middle of something now.
  self.waiting_writer = written
  self.kick:start(0, 0, function()
    pump(self)
  end)
end

-- Receiving --------------------------------------------------------------------------------------------------------

local function acknowledge(self)
  if self.received - self.acked > M.ACK_EVERY and self.ws:send(frame.ack(self.received)) then
    self.acked = self.received
  end
end

--- The first message of a WebSocket, which says that the tunnel is there.
local function open_with(self, tag, value)
  if tag == frame.CONNECT_SUCCESS_SID and not self.sid then
    self.sid = value
  elseif tag == frame.RECONNECT_SUCCESS_ACK and self.sid then
    confirm(self, value, true)
  else
    errors.raise({
      code = "protocol",
      op = "iap",
      message = ("the relay began with a message of the kind %d"):format(tag),
    })
  end
  self.up = true
  self.opened()
end

local function on_message(self, message)
  local tag, value = frame.parse(message)
  if not value then
    return
  elseif not self.up then
    open_with(self, tag, value)
  elseif tag == frame.DATA then
    self.received = self.received + #value
    self.progress = true
    if not self.settings.on_data(value) then
      self.ws:pause()
    end
    acknowledge(self)
  elseif tag == frame.ACK then
    confirm(self, value)
  end
  pump(self)
end

--- The reader wants more.
function Tunnel:resume()
  if self.ws then
    self.ws:resume()
  end
end

-- WebSockets -------------------------------------------------------------------------------------------------------

--- Open a WebSocket and wait until the tunnel is up on it. Raises why not.
local function open(self)
  local settings = self.settings
  local ws = settings.connect(self.sid, self.received)
  self.up, self.lost = false, nil
  task.await(function(done)
    local deadline = uv.new_timer()
    self.ws = ws
    self.opened = function()
      self.opened = nil
      deadline:stop()
      done()
    end
    deadline:start(math.ceil(settings.timeouts.open * 1000), 0, function()
      if self.opened then
        self.failure = errors.new({
          code = "timeout",
          op = "iap",
          message = ("the relay has not connected to the worker within %g s"):format(settings.timeouts.open),
        })
        ws:abort()
      end
    end)
    ws:start({
      on_message = function(message)
        if self.ws ~= ws or self.failure or self.closed then
          return
        end
        local ok, err = pcall(on_message, self, message)
        if not ok then
          if not errors.is(err, "protocol") then
            error(err, 0)
          end
          self.failure = err
          ws:abort()
        end
      end,
      on_drain = function()
        pump(self)
      end,
      on_end = function(code, reason)
        close_handle(deadline)
        local failure = self.failure
        self.failure = nil
        self.up, self.ws = false, nil
        self.lost = { code = code, reason = reason, failure = failure }
        if self.opened then
          self.opened = nil
          done(failure or settings.explain(code, reason, true))
        elseif self.wake then
          self.wake()
        end
      end,
    })
    return function()
      self.opened = nil
      ws:abort()
      return true
    end
  end, "the relay")
  watch(self) -- a new WebSocket, a new chance
  pump(self)
end

--- Wait until the WebSocket is lost.
local function wait_for_loss(self)
  if self.lost then
    return
  end
  task.await(function(done)
    self.wake = function()
      self.wake = nil
      done()
    end
    return function()
      self.wake = nil
      return true
    end
  end, "the tunnel's end")
end

--- Take the tunnel up again. Raises when that is no use, or has not come about in time.
local function take_up(self)
  local schedule = self.settings.reconnect
  local give_up = clock.now() + schedule.total
  local pause = schedule.first
  -- A WebSocket that carried something is replaced at once.
  local at_once = self.progress
  self.progress = false
  while true do
    if not at_once then
      task.sleep(pause * (0.75 + math.random() / 2))
      pause = math.min(pause * schedule.factor, schedule.most)
    end
    at_once = false
    local ok, err = pcall(open, self)
    if ok then
      self.reconnects = self.reconnects + 1
      return
    elseif errors.is(err, "cancelled") or not self.settings.passing(err) or clock.now() > give_up then
      error(err, 0)
    end
    self.settings.on_note(err)
  end
end

--- The tunnel's task after it is up: replaces WebSockets until the end.
local function live(self)
  while true do
    wait_for_loss(self)
    local lost = self.lost
    if self.closed or lost.code == 1000 then
      return
    end
    local err = lost.failure or self.settings.explain(lost.code, lost.reason, false)
    if self.stalled then
      self.stalled = false
      err = errors.new({
        code = "timeout",
        op = "iap",
        message = ("the relay has acknowledged nothing for %g s, of %d bytes"):format(
          self.settings.timeouts.ack,
          self.sent - self.acknowledged
        ),
      })
      -- Once is an accident, twice in the same place is not.
      if self.stalled_at == self.acknowledged then
        error(err, 0)
      end
      self.stalled_at = self.acknowledged
    end
    if not self.settings.passing(err) then
      error(err, 0)
    end
    self.settings.on_note(err)
    take_up(self)
  end
end

local function with_defaults(given, defaults)
  local all = {}
  for name, value in pairs(defaults) do
    all[name] = given and given[name] or value
  end
  return all
end

--- Open a tunnel.
---@async
---@param settings { connect: (fun(sid: string?, received: integer): ciranda.WebSocket), on_data: (fun(data: string):
---  boolean), on_end: fun(err: ciranda.Error?), explain: (fun(code: integer, reason: string, opening: boolean):
---  ciranda.Error), passing: (fun(err: ciranda.Error): boolean), on_note: fun(err: ciranda.Error)?, timeouts: table?,
---  reconnect: table?, max_kept: integer? }
---  connect: opens a WebSocket to the relay, for a new tunnel or for the one with this id; on_data: false makes the
---  relay wait for `resume`; on_end: once, nil for a normal end; passing: is it worth trying again?
---@return ciranda.gcp.iap.Tunnel
--- Raises what opening the first WebSocket raises.
function M.open(settings)
  local self = setmetatable({
    settings = {
      connect = settings.connect,
      on_data = settings.on_data,
      explain = settings.explain,
      passing = settings.passing,
      on_note = settings.on_note or function() end,
      timeouts = with_defaults(settings.timeouts, M.TIMEOUTS),
      reconnect = with_defaults(settings.reconnect, M.RECONNECT),
      max_kept = settings.max_kept or M.MAX_KEPT,
    },
    kept = {},
    first_place = 1,
    next_place = 1,
    last_place = 0,
    cut = 0,
    sent = 0,
    acknowledged = 0,
    received = 0,
    acked = 0,
    reconnects = 0,
    timer = uv.new_timer(),
    kick = uv.new_timer(),
  }, Tunnel)
  local ok, err = pcall(open, self)
  if not ok then
    self:close()
    error(err, 0)
  end
  -- The tunnel is its holder's, as a socket would be, and outlives the block that opens it.
  self.task = scheduler.new_task(nil, "a tunnel through IAP", function()
    local fine, problem = pcall(live, self)
    local closed = self.closed
    self:close()
    if not closed then
      settings.on_end(not fine and errors.wrap(problem, { op = "iap" }) or nil)
    end
  end)
  return self
end

--- Close the tunnel: what the WebSocket has been given goes out. `on_end` is not called any more.
function Tunnel:close()
  if self.closed then
    return
  end
  self.closed = true
  self.waiting_writer = nil
  close_handle(self.timer)
  close_handle(self.kick)
  local ws = self.ws
  if ws then
    ws:resume()
    ws:close()
  end
  if self.task and scheduler.current ~= self.task then
    self.task:cancel("the tunnel was closed")
  end
end

return M
