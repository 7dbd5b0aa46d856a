--- The relay of Identity-Aware Proxy: TCP to the workers over WebSockets, as ciranda.gcp.iap_frame's messages.
--
-- A tunnel outlives its WebSocket: it keeps what the client has not acknowledged, and for a minute waits to be taken
-- up again by its id. What goes wrong on request is in ciranda.sim.faults (`relay_*`).

local errors = require("ciranda.sim.errors")
local frame = require("ciranda.gcp.iap_frame")
local task = require("ciranda.task")
local tpu_env = require("ciranda.sim.tpu_env")
local uv = require("luv")
local websocket = require("ciranda.io.websocket")

local M = {}

-- Seconds for which a tunnel without a WebSocket is kept, and for connecting to a worker.
local KEPT = 60
local BACKEND_TIMEOUT = 10

-- Bytes that are kept for the client, and that wait for the worker, before the other side has to wait.
local HIGH_WATER = 1 << 20

local ACK_EVERY = 2 * frame.MAX_DATA

local Tunnel = {}
Tunnel.__index = Tunnel

--- What goes wrong after so many bytes of a WebSocket, both ways taken together.
local function strike(ws, size)
  local fault = ws.fault
  if not fault or fault.kind ~= "relay_drop" and fault.kind ~= "relay_close" then
    return
  end
  ws.bytes = ws.bytes + size
  if ws.bytes < (fault.bytes or 0) then
    return
  elseif fault.kind == "relay_drop" then
    -- What was given to the socket arrives: a tunnel that is cut gets on all the same.
    ws.held, ws.dropping = true, true
    if ws.socket.pending == 0 then
      ws.socket:abort()
    end
  else
    ws.socket:close(fault.code or 1011, fault.message or "as was asked for")
  end
end

--- Give the client what it has not had.
local function pump(self)
  local ws = self.ws
  while
    ws
    and self.ws == ws
    and not ws.held
    and self.next_place <= self.last_place
    and ws.socket.pending < HIGH_WATER
  do
    local data = self.kept[self.next_place]
    self.next_place = self.next_place + 1
    ws.socket:send(frame.data(data))
    strike(ws, #data)
  end
  if ws and self.backend_ended and self.next_place > self.last_place then
    ws.socket:close(1000, "the worker has closed the connection")
  end
end

--- Read from the worker unless too much is kept.
local function read_backend(self)
  if self.reading or self.backend_ended or self.sent - self.confirmed >= HIGH_WATER then
    return
  end
  self.reading = true
  self.backend:read_start(function(err, data)
    if not data then
      self.backend_ended = true
      self.reading = false
      if err and self.ws then
        return self.ws.socket:close(4010, err)
      end
      return pump(self)
    end
    for first = 1, #data, frame.MAX_DATA do
      self.last_place = self.last_place + 1
      self.kept[self.last_place] = data:sub(first, first + frame.MAX_DATA - 1)
    end
    self.sent = self.sent + #data
    if self.sent - self.confirmed >= HIGH_WATER then
      self.reading = false
      self.backend:read_stop()
    end
    pump(self)
  end)
end

--- The client has so much: whole pieces of it are forgotten. False for a total that cannot be.
local function confirm(self, total)
  if total < self.confirmed or total > self.sent then
    return false
  end
  self.confirmed = total
  while self.first_place <= self.last_place and self.first_at + #self.kept[self.first_place] <= total do
    self.first_at = self.first_at + #self.kept[self.first_place]
    self.kept[self.first_place] = nil
    self.first_place = self.first_place + 1
  end
  read_backend(self)
  return true
end

--- Begin again at the byte after those that are confirmed.
local function rewind(self)
  local first, skip = self.kept[self.first_place], self.confirmed - self.first_at
  if first and skip > 0 then
    self.kept[self.first_place], self.first_at = first:sub(skip + 1), self.confirmed
  end
  self.next_place = self.first_place
end

--- Bytes for the worker.
local function to_backend(self, ws, data)
  self.received = self.received + #data
  self.waiting = self.waiting + #data
  self.backend:write(data, function()
    self.waiting = self.waiting - #data
    if self.waiting < HIGH_WATER // 2 and self.ws then
      self.ws.socket:resume()
    end
  end)
  if self.waiting >= HIGH_WATER then
    ws.socket:pause()
  end
  if self.received - self.acked > ACK_EVERY then
    self.acked = self.received
    ws.socket:send(frame.ack(self.received))
  end
end

--- One message of the client's.
local function on_message(self, ws, message)
  local ok, tag, value = pcall(frame.parse, message)
  if not ok or tag == frame.CONNECT_SUCCESS_SID or tag == frame.RECONNECT_SUCCESS_ACK then
    return ws.socket:close(4008, "malformed")
  elseif tag == frame.ACK then
    if not confirm(self, value) then
      return ws.socket:close(4006, "an acknowledgement that cannot be")
    end
  elseif tag == frame.DATA then
    if self.backend_ended or ws.fault and ws.fault.kind == "relay_mute" then
      return
    end
    to_backend(self, ws, value)
    strike(ws, #value)
  end
  pump(self)
end

local function close(self)
  self.relay.tunnels[self.sid] = nil
  if not self.timer:is_closing() then
    self.timer:close()
  end
  if not self.backend:is_closing() then
    self.backend:close()
  end
end

--- Run the tunnel on a WebSocket until that ends.
local function serve(self, socket, greeting, fault)
  local ended = task.event()
  local ws = { socket = socket, fault = fault, bytes = 0 }
  if self.ws then
    self.ws.socket:close(4002, "taken up elsewhere")
  end
  self.ws = ws
  self.timer:stop()
  ws.held = true
  local finished = false
  socket:start({
    on_message = function(message)
      on_message(self, ws, message)
    end,
    on_drain = function()
      if ws.dropping then
        socket:abort()
      end
      pump(self)
    end,
    on_end = function(code)
      if self.ws == ws then
        self.ws = nil
        finished = code == 1000 or self.backend_ended
      end
      ended:set()
    end,
  })
  if fault and fault.kind == "relay_close" and not fault.bytes then
    socket:close(fault.code or 1011, fault.message or "as was asked for")
  else
    if fault and fault.kind == "relay_slow" then
      task.sleep(fault.seconds or 1)
    end
    ws.held = nil
    socket:send(greeting())
    pump(self)
  end
  ended:wait()
  if finished then
    close(self)
  elseif not self.ws and self.relay.tunnels[self.sid] then
    self.timer:start(KEPT * 1000, 0, function()
      close(self)
    end)
  end
end

--- Connect to a worker's port; nil when it cannot be.
local function connect(address, port)
  local handle = uv.new_tcp()
  local ok, err = pcall(task.timeout, BACKEND_TIMEOUT, task.await, function(done)
    handle:connect(address, port, function(problem)
      done(problem)
    end)
    return function()
      return true
    end
  end, "a worker's port")
  if ok then
    return handle
  end
  handle:close()
  if type(err) == "table" and err.code == "cancelled" then
    error(err, 0)
  end
  return nil
end

--- Answer a WebSocket that is good for nothing but its close code.
local function refuse(socket, code, reason)
  local ended = task.event()
  socket:start({
    on_message = function() end,
    on_end = function()
      ended:set()
    end,
  })
  socket:close(code, reason)
  ended:wait()
end

--- The worker of a machine's name.
local function find(world, zone, instance)
  for _, node in
    ipairs(world.nodes:list(function()
      return true
    end))
  do
    for place, endpoint in ipairs(node.endpoints) do
      if node.zone == zone and tpu_env.vm_name(node, place - 1) == instance then
        return node, place - 1, endpoint
      end
    end
  end
  return nil
end

--- A new tunnel.
local function begin(relay, query, socket)
  local world = relay.world
  if query.project ~= world.project.id and query.project ~= world.project.number then
    return refuse(socket, 4033, "not authorized")
  end
  local node, worker, endpoint = find(world, query.zone, query.instance)
  if not node or query.interface ~= "nic0" then
    return refuse(socket, 4047, "no such instance or interface")
  end
  local fault = world.faults:on_relay(node.id, worker)
  local backend = connect(endpoint.address, math.tointeger(tonumber(query.port)) or 0)
  if not backend then
    return refuse(socket, 4003, "failed to connect to backend")
  end
  local self = setmetatable({
    relay = relay,
    node = node.id,
    worker = worker,
    zone = query.zone,
    sid = world.random:hex(32),
    backend = backend,
    timer = uv.new_timer(),
    kept = {},
    first_place = 1,
    first_at = 0,
    next_place = 1,
    last_place = 0,
    sent = 0,
    confirmed = 0,
    received = 0,
    acked = 0,
    waiting = 0,
  }, Tunnel)
  relay.tunnels[self.sid] = self
  world.events:add("relay", query.instance, "connected")
  read_backend(self)
  return serve(self, socket, function()
    return frame.connected(self.sid)
  end, fault)
end

--- Take a tunnel up again.
local function resume(relay, query, socket)
  local self = relay.tunnels[query.sid]
  local total = math.tointeger(tonumber(query.ack))
  if not self or self.zone ~= query.zone then
    return refuse(socket, 4001, "unknown sid")
  elseif not total or total < self.first_at or not confirm(self, math.max(total, self.confirmed)) then
    return refuse(socket, 4074, "failed to rewind")
  end
  relay.world.events:add("relay", self.sid, "reconnected")
  rewind(self)
  return serve(self, socket, function()
    self.acked = self.received
    return frame.reconnected(self.received)
  end, relay.world.faults:on_relay(self.node, self.worker))
end

local ROUTES = {
  ["/v4/connect"] = { id = "iap.connect", run = begin },
  ["/v4/reconnect"] = { id = "iap.reconnect", run = resume },
}

local Service = {}
Service.__index = Service

---@param path string
---@return boolean
function Service:serves(path) -- luacheck: ignore 212
  return ROUTES[path] ~= nil
end

local function dispatch(self, request)
  local route = ROUTES[request.path]
  request.called = route.id
  self.world.oauth:check(request)
  local fault = self.world.faults:on_call(route.id)
  local headers, problem = websocket.answer(request.headers, frame.PROTOCOL)
  if not headers or request.query.newWebsocket ~= "True" then
    errors.raise(errors.invalid(problem or "newWebsocket must be True"))
  end
  return {
    status = 101,
    headers = headers,
    upgrade = function(descriptor, early)
      local socket <close> = websocket.accept(descriptor, { early = early })
      route.run(self, request.query, socket)
    end,
  },
    fault
end

--- Answer a request for a tunnel.
---@param request table
---@return ciranda.server.Answer answer, ciranda.sim.Fault? fault
function Service:handle(request)
  local ok, answer, fault = pcall(dispatch, self, request)
  if ok then
    return answer, fault
  elseif not errors.is(answer) then
    error(answer, 0)
  end
  return { status = answer.http, body = answer.message .. "\n", headers = { ["Content-Type"] = "text/plain" } }
end

--- The relay.
---@param world table
---@return table service
function M.new(world)
  return setmetatable({ world = world, tunnels = {} }, Service)
end

return M
