--- One worker's part in a relay: the program there (`ciranda.fleet.relay_script`), told by lines what to do and heard
--- by lines what came of it. Who fetches from whom is the relay's.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local relay_script = require("ciranda.fleet.relay_script")
local task = require("ciranda.task")

local M = {}

--- Bytes of output kept while no line has ended: what is longer is none of ours.
local LONGEST = 65536

---@class ciranda.fleet.Agent
---@field worker ciranda.Worker
---@field state "starting"|"waiting"|"receiving"|"fetching"|"holding"|"left"|"ended"
---@field since number seconds, of the clock that `M.now` reads: when its state began
---@field moved number when it last took a piece of what it receives
---@field parent ciranda.fleet.Agent? whom it fetches from, or has fetched from
---@field tried table<ciranda.fleet.Agent, boolean> from whom it could not
---@field tries integer how many times
---@field last_failure string? and why
---@field serving boolean others may fetch from it, at
---@field address string? and
---@field port string?
---@field job ciranda.Task its program
---@field good integer fetches that came about, and
---@field bad integer that did not
---@field outcome ciranda.Event with one of the three that follow
---@field answer { code: integer?, signal: string?, stdout: string, stderr: string }? of the command that unpacked
---@field reason string? why it has nothing this way
---@field failure any the connection's error
---@field ended ciranda.Event nothing of it runs any more
---@field private inbox (string|fun(): string?)[]
---@field private news ciranda.Event?
---@field private rest string
local Agent = {}
Agent.__index = Agent

---@param worker ciranda.Worker
---@return ciranda.fleet.Agent
function M.new(worker)
  return setmetatable({
    worker = worker,
    state = "starting",
    since = clock.now(),
    moved = clock.now(),
    tried = {},
    tries = 0,
    serving = false,
    good = 0,
    bad = 0,
    outcome = task.event(),
    ended = task.event(),
    inbox = {},
    rest = "",
  }, Agent)
end

---@param state string
function Agent:become(state)
  self.state, self.since, self.moved = state, clock.now(), clock.now()
end

--- It has come to an end, for whoever waits for the worker. Only the first one counts.
---@param fields { answer: table?, reason: string?, failure: any }
function Agent:conclude(fields)
  if not self.outcome:is_set() then
    self.answer, self.reason, self.failure = fields.answer, fields.reason, fields.failure
    self.outcome:set()
  end
end

--- Sends bytes, or what a function returns until it returns nil, after what was sent before. Does not wait.
---@param item string|fun(): string?
function Agent:send(item)
  table.insert(self.inbox, item)
  if self.news then
    self.news:set()
  end
end

--- Has it taken all that was sent?
---@return boolean
function Agent:is_idle()
  return #self.inbox == 0
end

--- Lets the program there end, after what was sent.
function Agent:dismiss()
  self.dismissed = true
  if self.news then
    self.news:set()
  end
end

--- What the program reads.
---@private
---@return fun(): string?
function Agent:input()
  return function()
    while true do
      local item = self.inbox[1]
      if type(item) == "string" then
        table.remove(self.inbox, 1)
        return item
      elseif item then
        local piece = item()
        self.moved = clock.now()
        if piece then
          return piece
        end
        table.remove(self.inbox, 1)
      elseif self.dismissed then
        return nil
      else
        self.news = task.event()
        self.news:wait()
        self.news = nil
      end
    end
  end
end

--- Takes output apart. What a shell's start-up file says is passed over.
---@private
---@param bytes string
---@param on_word fun(word: string, rest: string)
function Agent:hear(bytes, on_word)
  local text = self.rest .. bytes
  local from = 1
  for line, place in text:gmatch("([^\n]*)\n()") do
    from = place
    local word, rest = line:match("ciranda%-push (%l+) ?(.*)$")
    if word then
      on_word(word, rest)
    end
  end
  self.rest = text:sub(math.max(from, #text - LONGEST + 1))
end

--- Why a worker's program ended too early.
local function why(result)
  if result.code == relay_script.NO_PYTHON then
    return "there is no python3 that runs, which serves files to others"
  elseif result.code == relay_script.NO_OPENSSL then
    return "there is no openssl, which decrypts what comes"
  end
  local said = (result.stderr or ""):gsub("%s+$", ""):match("[^\n]*$")
  return said ~= "" and said
    or "its python3 ended with " .. (result.code and "status " .. result.code or "a signal")
end

--- Runs the program until it ends: when it is dismissed, or by itself.
---@async
---@param connection ciranda.ssh.Connection
---@param command string
---@param order table the first line after the program: what it has to know
---@param on_word fun(word: string, rest: string) last "ended" with the state in which it did
-- Raises only what cancels it.
function Agent:run(connection, command, order, on_word)
  self:send(relay_script.SCRIPT .. json.encode(order) .. "\n")
  local ok, result = pcall(connection.exec, connection, command, {
    stdin = self:input(),
    on_stdout = function(bytes)
      self:hear(bytes, on_word)
    end,
  })
  local was = self.state
  self:become("ended")
  self:conclude(ok and { reason = why(result) } or { failure = result })
  self.ended:set()
  on_word("ended", was)
  if not ok and err.is_fatal(result) then
    error(result, 0)
  end
end

return M
