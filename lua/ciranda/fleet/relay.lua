--- An archive from worker to worker: few get it from here, the others over the internal network from those who have it.
--
-- No tree is planned: who has the archive serves some others at once, and whoever waits is given to whoever is free.
-- So a worker that dies, stalls or is slow costs those who fetch from it a second try, and nobody else anything. Who
-- could not fetch from several is left to its connection; when nobody could, all are.
--
-- No worker is trusted with more than the archive. It travels encrypted with a key made for this push, which each
-- worker gets over its own connection together with the SHA-256 of what must arrive; a token that is never sent proves
-- to who serves that who asks belongs to the push.
local agents = require("ciranda.fleet.relay_agent")
local clock = require("ciranda.io.clock")
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local relay_script = require("ciranda.fleet.relay_script")
local task = require("ciranda.task")

local M = {}

--- Archives below so many bytes go over the connections: that costs less than the programs that would pass them on.
M.LEAST = 262144

--- Seconds that a connection between workers may take to come about, and for which it may bring nothing (or less than
--- `slowest` bytes a second) before another worker is asked.
M.CONNECT, M.STALL = 5, 20

--- Workers that get the archive from here, when nothing else is asked for: with two, a slow one is not all there is.
local SEEDS = 2

--- Workers that one serves at once.
local FAN_OUT = 4

--- Workers that one may try to fetch from.
local TRIES = 3

--- Seconds that a worker's python3 may take to start.
M.START = 60

--- Seconds between two signs of life for it, and without one after which it ends.
local SIGN, SILENCE = 20, 120

--- Seconds between two looks at who is late, and for the programs to end at the end.
local TICK, FAREWELL = 1, 10

--- Bytes that are encrypted at once.
local PIECE = 262144

---@class ciranda.fleet.Sealed an encrypted archive
---@field path string
---@field size integer
---@field sha256 string of it
---@field key string hexadecimal: what OpenSSL's `enc` derives key and counter from
---@field token string hexadecimal

---@class ciranda.fleet.Relay
---@field private scope ciranda.Scope
---@field private seeds integer
---@field private order table
---@field private command string
---@field private reader fun(): fun(): string?
---@field private patience number
---@field private waiting ciranda.fleet.Agent[] the next one last
---@field private slots ciranda.fleet.Agent[] who can serve one more, as often as it can
---@field private all ciranda.fleet.Agent[]
---@field private good integer workers that have fetched
---@field private lost integer workers that have the archive and serve it no more, or never did
---@field private closed string? why nobody can fetch from others
local Relay = {}
Relay.__index = Relay

--- How many workers get it from here, of a `via`.
---@param via string "workers" or "workers:N"
---@return integer? seeds nil when it is another way
-- Raises "usage" for what is no such number.
function M.seeds(via)
  local rest = via:match("^workers(.*)$")
  if not rest or rest:find("^[%w/._-]") then
    return nil
  end
  local seeds = rest == "" and SEEDS or math.tointeger(tonumber(rest:match("^:(%d+)$")))
  if not seeds or seeds < 1 then
    err.raise({
      code = "usage",
      op = "push",
      message = ("via %q: workers, or workers:N, N of which get the files from here"):format(via),
    })
  end
  return seeds
end

--- Encrypts an archive with a key of its own, in OpenSSL's own format ("Salted__", PBKDF2, AES-256 in counter mode).
--- One round of PBKDF2 is enough: the password is 256 random bits. What authenticates it is its SHA-256.
---@async
---@param archive string path
---@param size integer
---@param path string where to
---@return ciranda.fleet.Sealed
function M.seal(archive, size, path)
  local key, salt = crypto.hex(crypto.random(32)), crypto.random(8)
  local function derive(number)
    return crypto.hmac("sha256", key, salt .. (">I4"):pack(number))
  end
  local cipher_key, counter = derive(1), derive(2):sub(1, 16)
  local digest = crypto.start("sha256")
  local from <close> = fs.open(archive)
  local to <close> = fs.open(path, "w", 384)
  local function write(bytes)
    digest:update(bytes)
    to:write(bytes)
  end
  write("Salted__" .. salt)
  for offset = 0, size - 1, PIECE do
    write(crypto.aes256_ctr(cipher_key, counter, from:read(math.min(PIECE, size - offset), offset), offset))
  end
  return {
    path = path,
    size = size + 16,
    sha256 = crypto.hex(digest:finish()),
    key = key,
    token = crypto.hex(crypto.random(32)),
  }
end

---@class ciranda.fleet.RelayOptions
---@field sealed ciranda.fleet.Sealed
---@field reader fun(): fun(): string? a new reader of what is sealed, piece by piece
---@field destination string on the workers
---@field seeds integer
---@field patience number seconds that a worker may take to get it
---@field slowest integer bytes a second that at least come
---@field command fun(script: string, values: table<string, string>): string makes a command of a shell script

--- A relay. What it starts runs in the scope; `finish` ends it.
---@param scope ciranda.Scope
---@param options ciranda.fleet.RelayOptions
---@return ciranda.fleet.Relay
function M.new(scope, options)
  local sealed = options.sealed
  local self = setmetatable({
    scope = scope,
    seeds = options.seeds,
    reader = options.reader,
    patience = options.patience,
    order = {
      key = sealed.key,
      token = sealed.token,
      size = sealed.size,
      sha256 = sealed.sha256,
      destination = crypto.hex(options.destination),
      connect = M.CONNECT,
      stall = M.STALL,
      slowest = options.slowest,
      silence = SILENCE,
    },
    command = options.command(relay_script.START, {
      loader = "'" .. relay_script.LOADER:gsub("SIZE", #relay_script.SCRIPT) .. "'",
      python = tostring(relay_script.NO_PYTHON),
      openssl = tostring(relay_script.NO_OPENSSL),
    }),
    waiting = {},
    slots = {},
    all = {},
    good = 0,
    lost = 0,
  }, Relay)
  self.watch = scope:spawn("who is late", self.look, self)
  return self
end

---@param agent ciranda.fleet.Agent
---@return string
local function title(agent)
  return ("slice %d worker %d"):format(agent.worker.slice, agent.worker.index)
end

--- It has nothing this way, and serves nobody.
local function leave(agent, reason)
  agent:become("left")
  agent:conclude({ reason = reason })
  agent:dismiss()
end

--- One less whom the others could fetch from. When that happens before anybody has fetched, it is the network.
---@private
function Relay:lose(reason)
  self.lost = self.lost + 1
  if self.good == 0 and self.lost >= 2 then
    self.closed = self.closed or reason
  end
end

--- Nobody fetches from it any more.
---@private
function Relay:drop(agent, reason)
  if agent.serving then
    agent.serving = false
    self:lose(reason)
  end
end

--- Those who wait, to those who can serve.
---@private
function Relay:assign()
  local waiting, slots, aside = self.waiting, self.slots, {}
  while self.closed and #waiting > 0 do
    leave(table.remove(waiting), self.closed)
  end
  while #waiting > 0 and #slots > 0 do
    local parent = table.remove(slots)
    local place = #waiting
    while place > 0 and waiting[place].tried[parent] do
      place = place - 1
    end
    if not parent.serving then
      place = 0
    elseif place == 0 then
      aside[#aside + 1] = parent
    end
    if place > 0 then
      local child = table.remove(waiting, place)
      child.parent = parent
      child:become("fetching")
      child:send(("fetch %s %s\n"):format(parent.address, parent.port))
    end
  end
  table.move(aside, 1, #aside, #slots + 1, slots)
  self:seed()
  if #waiting > 0 and #aside > 0 then
    self:give_up()
  end
end

--- Does it get the archive from here, and has it taken some of it lately?
local function receives(agent)
  return agent.state == "receiving" and clock.now() - agent.moved < M.STALL
end

--- How many there are, or will be soon, whom the others can fetch from; those beyond `seeds` do not matter.
---@private
function Relay:sources()
  local count = 0
  for _, agent in ipairs(self.all) do
    if agent.serving or receives(agent) then
      count = count + 1
      if count == self.seeds then
        break
      end
    end
  end
  return count
end

--- Those who have tried everybody there is go over their connections, unless somebody else is about to have it.
---@private
function Relay:give_up()
  for _, agent in ipairs(self.all) do
    if agent.state == "fetching" or receives(agent) then
      return
    end
  end
  while #self.waiting > 0 do
    local agent = table.remove(self.waiting)
    leave(agent, agent.last_failure)
  end
end

--- From here, to as many as there have to be.
---@private
function Relay:seed()
  for _ = self:sources() + 1, self.seeds do
    local agent = table.remove(self.waiting)
    if not agent then
      return
    end
    agent.parent = nil
    agent:become("receiving")
    agent:send("receive\n")
    agent:send(self.reader())
  end
end

--- A fetch is over.
---@private
---@param came boolean? whether it came; nil: that says nothing of who was fetched from
---@param reason string?
function Relay:released(child, came, reason)
  local parent = child.parent
  if came then
    parent.good, self.good = parent.good + 1, self.good + 1
  elseif came == false then
    parent.bad = parent.bad + 1
    child.tried[parent] = true
    child.tries = child.tries + 1
    if parent.bad > parent.good + 1 then
      self:drop(parent, reason)
    end
  end
  if parent.serving then
    table.insert(self.slots, parent)
  end
end

--- It has the archive, and serves it where it says.
---@private
function Relay:add(agent, address, port, words)
  if not address then
    return self:lose(("%s cannot serve others: %s"):format(title(agent), words))
  end
  agent.address, agent.port, agent.serving = address, port, true
  for _ = 1, FAN_OUT do
    table.insert(self.slots, agent)
  end
end

--- Something was heard of a worker.
---@private
function Relay:hear(agent, word, rest)
  local state = agent.state
  if word == "ready" and state == "starting" then
    agent:become("waiting")
    table.insert(self.waiting, agent)
  elseif (word == "have" or word == "alone") and (state == "receiving" or state == "fetching") then
    agent:become("holding")
    if state == "fetching" then
      self:released(agent, true)
    end
    local address, port = rest:match("^(%S+) (%d+)$")
    self:add(agent, address, port, rest)
  elseif word == "failed" and state == "fetching" then
    local parent = agent.parent
    local reason = ("%s at %s:%s: %s"):format(title(parent), parent.address, parent.port, rest)
    self:released(agent, false, reason)
    agent.last_failure = reason
    if agent.tries < TRIES then
      agent:become("waiting")
      table.insert(self.waiting, 1, agent)
    else
      leave(agent, reason)
    end
  elseif word == "done" then
    local code, words = rest:match("^(%d+) ?(%x*)$")
    local stderr = (words or ""):gsub("%x%x", function(byte)
      return string.char(tonumber(byte, 16))
    end)
    agent:conclude({ answer = { code = math.tointeger(tonumber(code)), stdout = "", stderr = stderr } })
  elseif word == "broken" and state == "holding" then
    agent:conclude({ reason = rest })
  elseif word == "broken" then
    leave(agent, rest)
  elseif word == "ended" then
    if rest == "fetching" then
      self:released(agent)
    elseif rest == "waiting" then
      for place, other in ipairs(self.waiting) do
        if other == agent then
          table.remove(self.waiting, place)
          break
        end
      end
    end
    self:drop(agent, title(agent) .. " has ended")
  end
  if not self.over then
    self:assign()
  end
end

--- Ends what takes too long, and tells the others that somebody is there.
---@private
function Relay:look()
  local told = clock.now()
  while true do
    task.sleep(TICK)
    local now = clock.now()
    local tell = now - told >= SIGN
    for _, agent in ipairs(self.all) do
      local state, spent = agent.state, now - agent.since
      if state == "starting" and spent > M.START then
        leave(agent, ("its python3 had not started within %d s"):format(M.START))
        agent.job:cancel("it had not started")
      elseif
        (state == "receiving" or state == "fetching") and spent > self.patience
        or state == "holding" and not agent.outcome:is_set() and spent > self.patience
      then
        agent:conclude({
          failure = err.new({
            code = "timeout",
            phase = "exec",
            op = "push",
            target = title(agent),
            message = ("%s has not got the files within %g s"):format(title(agent), self.patience),
          }),
        })
        agent.job:cancel("it took too long")
      elseif tell and agent:is_idle() and state ~= "ended" then
        agent:send("alive\n")
      end
    end
    told = tell and now or told
    self:assign()
  end
end

--- Brings one worker the files, by whatever worker has them. It serves others afterwards, until the relay is finished.
---@async
---@param worker ciranda.Worker
---@param connection ciranda.ssh.Connection
---@return table? answer of the command that unpacked it; nil: it has nothing
---@return string? reason why it has nothing
---@return ciranda.Worker? from whom it has it; nil: from here
-- Raises the connection's error, and "timeout".
function Relay:deliver(worker, connection)
  if self.closed then
    return nil, self.closed
  end
  local agent = agents.new(worker)
  table.insert(self.all, agent)
  local order = { address = worker.internal_address }
  for name, value in pairs(self.order) do
    order[name] = value
  end
  agent.job = self.scope:spawn(("serving files on %s"):format(title(agent)), function()
    agent:run(connection, self.command, order, function(word, rest)
      self:hear(agent, word, rest)
    end)
  end)
  agent.outcome:wait()
  if agent.failure then
    error(agent.failure, 0)
  end
  return agent.answer, agent.reason, agent.answer and agent.parent and agent.parent.worker
end

--- Lets the programs on the workers end, and ends those that do not.
---@async
function Relay:finish()
  self.over = true
  self.watch:cancel("the files are there")
  for _, agent in ipairs(self.all) do
    agent:dismiss()
  end
  local ok, problem = pcall(task.timeout, FAREWELL, function()
    for _, agent in ipairs(self.all) do
      agent.ended:wait()
    end
  end)
  for _, agent in ipairs(self.all) do
    agent.job:cancel("the files are there")
  end
  if not ok and not err.is(problem, "timeout") then
    error(problem, 0)
  end
end

return M
