--- One worker's SSH connection: made when first used, shared by everything that runs there, made again when it
-- has broken. Retrying is for connecting only; what has been sent to a worker is never sent twice from here.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

--- Failures of a connect that may pass: a machine that boots, a full accept queue, sshd's MaxStartups.
local PASSING = { "refused", "reset", "closed", "timeout", "unreachable", "protocol" }

--- Failures of a channel that mean that the connection is gone.
local BROKEN = { "closed", "reset", "timeout", "unreachable", "protocol", "io", "lost" }

---@class ciranda.fleet.Settings what a fleet's connections share
---@field connect fun(options: table): any `ssh.connect`, or a stand-in with the same shape
---@field user string?
---@field keys any?
---@field agent any?
---@field known_hosts any?
---@field host_key_policy string?
---@field port integer?
---@field timeouts table?
---@field config string|false|nil ssh_config in place of the default ones
---@field match_exec boolean? the programs of `Match exec` in ssh_config may run
---@field internal_ip boolean? true: internal addresses only; nil: the external one, if it answers
---@field retry_for number seconds during which a failing connect is tried again
---@field handshakes ciranda.fleet.Pace how many handshakes run at once
---@field tunnel { project: string, zone: string, always: boolean? }? workers without an external address, or always
---  all, are connected to through IAP
---@field credentials ciranda.gcp.Credentials? for the tunnels; found when there are none
---@field prefer_internal boolean? found out: the external address did not answer, the internal one did
---@field tunnels boolean? found out: a tunnel came about
---@field fresh_pins (fun(worker: ciranda.Worker): string[]?)? asks the cloud for a worker's host keys again: those of
---  a node that was made anew are others
---@field on_address fun(worker: ciranda.Worker, kind: "external"|"internal"|"tunnel")?

---@class ciranda.fleet.Link
---@field worker ciranda.Worker
---@field private settings ciranda.fleet.Settings
---@field private current any? the live connection
---@field private lock ciranda.task.Semaphore
---@field private closed boolean
---@field waited number seconds that its handshakes have waited for their turn, all together
local Link = {}
Link.__index = Link

---@param worker ciranda.Worker
---@param settings ciranda.fleet.Settings
---@return ciranda.fleet.Link
function M.new(worker, settings)
  return setmetatable(
    { worker = worker, settings = settings, lock = task.semaphore(1), closed = false, waited = 0 },
    Link
  )
end

--- Was this failure one of the connection (and not an answer of the other side)?
---@param e any
---@return boolean
function M.broken(e)
  return err.is(e, table.unpack(BROKEN))
end

---@param worker ciranda.Worker
---@return string "slice 1 worker 3 (10.0.0.7)"
function M.title(worker)
  return ("slice %d worker %d (%s)"):format(worker.slice, worker.index, worker.address or "no address")
end

--- The addresses to try, in order.
---@param worker ciranda.Worker
---@param settings ciranda.fleet.Settings
---@return { kind: "external"|"internal"|"tunnel", address: string }[]
local function addresses(worker, settings)
  local list = {}
  local function add(kind, address)
    local known = list[1]
    if address and address ~= "" and not (known and known.address == address and known.kind ~= "tunnel") then
      list[#list + 1] = { kind = kind, address = address }
    end
  end
  local inside = worker.internal_address or worker.address
  local tunnel = settings.tunnel
  if settings.internal_ip == true then
    add("internal", inside)
  elseif tunnel and tunnel.always then
    add("tunnel", inside)
  elseif tunnel and worker.has_external == false and worker.hostname and not settings.prefer_internal then
    add("tunnel", inside)
    if not settings.tunnels then
      add("internal", inside)
    end
  elseif settings.internal_ip == false then
    add("external", worker.address)
  elseif settings.prefer_internal then
    add("internal", worker.internal_address)
    add("external", worker.address)
  else
    add("external", worker.address)
    add("internal", worker.internal_address)
  end
  return list
end

--- What carries a connection to a worker through IAP.
---@param worker ciranda.Worker
---@param settings ciranda.fleet.Settings
---@return function carrier for `ssh.connect`
local function carrier(worker, settings)
  if not worker.hostname then
    err.raise({
      code = "precondition",
      op = "iap",
      target = M.title(worker),
      message = "a tunnel through IAP needs the machine's name, which a TPU worker tells in its guest attributes; "
        .. "these could not be read",
    })
  end
  settings.credentials = settings.credentials or require("ciranda.gcp.credentials").find()
  return require("ciranda.gcp.iap").carrier({
    project = settings.tunnel.project,
    zone = settings.tunnel.zone,
    instance = worker.hostname,
    credentials = settings.credentials,
    label = worker.name,
  })
end

--- Has the way through IAP failed before it reached the worker? Then the internal address may do.
local function is_closed_way(e)
  return e.op == "iap" and e.close_code ~= 4003 and not err.is(e, "cancelled")
end

---@private
function Link:dial(place)
  local worker, settings = self.worker, self.settings
  -- The name is what ssh_config and known_hosts are asked about; an address is given apart only where it differs, so
  -- that a HostName in ssh_config counts for hosts that were named.
  local host = worker.hostname or worker.name or place.address
  local asked = clock.now()
  return settings.handshakes:with(function()
    self.waited = self.waited + clock.now() - asked
    return settings.connect({
      host = host,
      address = place.address ~= host and place.address or nil,
      port = worker.port or settings.port,
      user = worker.user or settings.user,
      keys = settings.keys,
      agent = settings.agent,
      pins = worker.pins,
      known_hosts = settings.known_hosts,
      host_key_policy = settings.host_key_policy,
      timeouts = settings.timeouts,
      config = settings.config,
      carrier = place.kind == "tunnel" and carrier(worker, settings) or nil,
      match_exec = settings.match_exec,
    })
  end)
end

--- One round over the worker's addresses.
---@private
function Link:try_addresses()
  local worker, settings = self.worker, self.settings
  local list = addresses(worker, settings)
  if #list == 0 then
    err.raise({
      code = "unreachable",
      op = "connect",
      target = M.title(worker),
      message = settings.internal_ip == false and "it has no external address; give --INTERNAL_IP=true"
        or "the provider knows no address for it",
    })
  end
  local first_failure
  for place_number, place in ipairs(list) do
    local ok, result = pcall(self.dial, self, place)
    if ok then
      if place.kind == "internal" and place_number > 1 then
        settings.prefer_internal = true
      elseif place.kind == "tunnel" then
        settings.tunnels = true
      end
      if settings.on_address then
        settings.on_address(worker, place.kind)
      end
      return result
    end
    if list[place_number + 1] and place.kind == "tunnel" then
      if not is_closed_way(result) then
        error(result, 0)
      end
    elseif not err.is(result, table.unpack(PASSING)) then
      -- Outside, an internal address may be some other machine's: what is wrong then is that IAP is closed.
      local elsewhere = err.is(result, "hostkey") and first_failure and first_failure.op == "iap"
      error(elsewhere and first_failure or result, 0)
    end
    first_failure = first_failure or result
  end
  error(first_failure, 0)
end

--- Reads the worker's host keys again where they came from. Returns whether they are others now.
---@private
---@return boolean
---@return any? problem why they cannot be read
function Link:renew_pins()
  local worker, renew = self.worker, self.settings.fresh_pins
  if not (renew and worker.pins) then
    return false
  end
  local ok, pins = pcall(renew, worker)
  if not ok then
    if err.is_fatal(pins) then
      error(pins, 0)
    end
    return false, pins
  elseif not pins or table.concat(pins, "\n") == table.concat(worker.pins, "\n") then
    return false
  end
  worker.pins = pins
  return true
end

--- Connects, trying again while the failure is one that may pass.
---@private
function Link:dial_until()
  -- What has not had its turn has not failed.
  local deadline = clock.now() + self.settings.retry_for - self.waited
  local pause = 0.25
  while true do
    if self.closed then
      err.raise({
        code = "closed",
        op = "connect",
        target = M.title(self.worker),
        message = "the fleet has been closed",
      })
    end
    local ok, result = pcall(self.try_addresses, self)
    if not ok and err.is(result, "hostkey") and result.reason == "changed" then
      local others, problem = self:renew_pins()
      if others then
        ok, result = pcall(self.try_addresses, self)
      elseif problem then
        result.message = ("%s; whether it has another one now could not be asked: %s"):format(
          result.message,
          err.text(problem)
        )
      end
    end
    if ok then
      return result
    end
    local now = clock.now()
    if not err.is(result, table.unpack(PASSING)) or now + pause > deadline + self.waited then
      err.raise(err.wrap(result, { op = "connect", target = M.title(self.worker) }))
    end
    -- Jitter, so that a thousand workers do not come back in the same moment.
    task.sleep(pause * (0.5 + math.random()))
    pause = math.min(pause * 2, 4)
  end
end

--- The live connection; connects when there is none. Only one task connects, the others wait for it.
---@return any connection
-- Raises the last connect's error, with the worker named, when none came about within `retry_for` seconds.
function Link:connection()
  if not self.current then
    self.lock:with(function()
      self.current = self.current or self:dial_until()
    end)
  end
  return self.current
end

--- Is there a connection? One that has broken and that nobody has used since still counts.
---@return boolean
function Link:connected()
  return self.current ~= nil
end

--- Gives up a connection that has failed, so that the next use makes a new one.
---@param connection any the one that failed; a newer one is left alone
function Link:drop(connection)
  if self.current == connection then
    self.current = nil
  end
  pcall(connection.close, connection)
end

--- Runs `fn(connection)`; when it fails because the connection broke, the connection is dropped and the error
--- rises. Whether to try again is the caller's to know.
---@param fn fun(connection: any): any
---@return any
function Link:use(fn)
  local connection = self:connection()
  local results = table.pack(pcall(fn, connection))
  if results[1] then
    return table.unpack(results, 2, results.n)
  end
  if M.broken(results[2]) then
    self:drop(connection)
  end
  error(results[2], 0)
end

--- Closes the connection and makes no new one.
function Link:close()
  self.closed = true
  if self.current then
    local connection = self.current
    self.current = nil
    pcall(connection.close, connection)
  end
end

return M
