local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local faults = require("ciranda.sim.faults")
local frame = require("ciranda.gcp.iap_frame")
local iap = require("ciranda.gcp.iap")
local patience = dofile("tests/fixtures/patience.lua")
local random = require("ciranda.sim.random")
local relay = require("ciranda.sim.iap")
local server = require("ciranda.io.server")
local sim_errors = require("ciranda.sim.errors")
local task = require("ciranda.task")
local tpu_env = require("ciranda.sim.tpu_env")
local uv = require("luv")

local support = dofile("tests/spec/io/http_support.lua")
local raised = support.raised

local NODE = { id = "node", zone = "z", uid = 0x1234, endpoints = { { address = "127.0.0.1" } } }
local INSTANCE = tpu_env.vm_name(NODE, 0)

--- A relay to a backend at 127.0.0.1, and options for tunnels through it.
local function with_relay(fn)
  local scope <close> = task.scope()
  local world = {
    project = { id = "p", number = "42" },
    random = random.new(7),
    good = "token-1",
    calls = {},
    tokens = {},
  }
  world.nodes = {
    list = function()
      return { NODE }
    end,
  }
  world.events = { add = function() end }
  world.oauth = {
    check = function(_, request)
      local token = request.headers["authorization"]
      world.tokens[#world.tokens + 1] = token
      if token ~= "Bearer " .. world.good then
        sim_errors.raise(sim_errors.unauthenticated(false))
      end
    end,
  }
  world.faults = faults.new(world)
  local service = relay.new(world)
  local s <close> = server.listen({
    handler = function(request)
      world.calls[#world.calls + 1] = request.path
      return (
        service:handle({
          path = request.path,
          query = request:args(),
          headers = request.headers,
        })
      )
    end,
  })
  world.server = s
  local fresh = 1
  local credentials = {
    token = function()
      return "token-" .. fresh
    end,
    reject = function(_, token)
      if token == "token-" .. fresh then
        fresh = fresh + 1
      end
    end,
  }
  local options = {
    project = "p",
    zone = "z",
    instance = INSTANCE,
    credentials = credentials,
    url = (s.url:gsub("^http", "ws")),
    label = "job-w-0",
    reconnect = { first = 0.02, most = 0.1, total = 20 },
  }
  fn(options, world, scope, service)
end

local function port_of(raw)
  return math.tointeger(tonumber(raw.url:match("%d+$")))
end

--- Sends back what comes, with back-pressure.
local function echo()
  return support.raw(function(client)
    local waiting = 0
    local function on_data(_, data)
      if not data then
        return client:is_closing() or client:close()
      end
      waiting = waiting + #data
      if waiting > 1 << 20 then
        client:read_stop()
      end
      client:write(data, function()
        waiting = waiting - #data
        if waiting < 1 << 19 and not client:is_closing() then
          client:read_start(on_data)
        end
      end)
    end
    client:read_start(on_data)
  end)
end

--- Write all of a text through a tunnel, in the largest pieces that SSH gives.
local function write_all(tunnel, text)
  for first = 1, #text, 65536 do
    task.await(function(done)
      tunnel:write(text:sub(first, first + 65535), done)
      return function()
        return true
      end
    end, "a tunnel to take bytes")
  end
end

--- Receives a number of bytes; `wait()` gives them, or raises what ended the tunnel.
local function receiver(count)
  local pieces, size, done = {}, 0, task.event()
  local self = {}
  function self.on_data(data)
    pieces[#pieces + 1] = data
    size = size + #data
    if size >= count then
      done:set()
    end
    return true
  end
  function self.on_end(err)
    self.err, self.ended = err, true
    done:set()
  end
  function self.wait()
    task.timeout(90, done.wait, done)
    if self.err then
      error(self.err, 0)
    end
    return table.concat(pieces)
  end
  return self
end

describe("ciranda.gcp.iap_frame", function()
  it("reads what it writes", function()
    assert.same({ frame.DATA, "abc" }, { frame.parse(frame.data("abc")) })
    assert.same({ frame.ACK, 1 << 40 }, { frame.parse(frame.ack(1 << 40)) })
    assert.same({ frame.CONNECT_SUCCESS_SID, "sid" }, { frame.parse(frame.connected("sid")) })
    assert.same({ frame.RECONNECT_SUCCESS_ACK, 0 }, { frame.parse(frame.reconnected(0)) })
    assert.same({ 0x99 }, { frame.parse("\0\x99anything") })
    assert.equal("\0\4\0\0\0\1x", frame.data("x"))
    assert.equal("\0\7\0\0\0\0\0\0\1\0", frame.ack(256))
  end)

  it("refuses the rest, from 2000 seeds, with an error of its own", function()
    local refused = 0
    for seed = 1, 2000 do
      local pick = random.new(seed)
      local message = ({ frame.data("hello"), frame.ack(5), frame.connected("s"), "" })[seed % 4 + 1]
      local list = { message:byte(1, -1) }
      for _ = 1, 3 do
        list[pick:integer(1, math.max(1, #list) + 1)] = pick:integer(0, 255)
      end
      local ok, err = pcall(frame.parse, string.char(table.unpack(list)))
      if not ok then
        assert(errors.is(err, "protocol"), tostring(err))
        refused = refused + 1
      end
    end
    assert(refused > 200, "only " .. refused)
    assert(errors.is(raised(frame.parse, "\0\4\0\0\64\1" .. ("x"):rep(16385)), "protocol"))
    assert(errors.is(raised(frame.parse, "\0\7\255\255\255\255\255\255\255\255"), "protocol"))
  end)
end)

describe("a tunnel through IAP", function()
  it("carries bytes both ways and ends when the worker does", function()
    local backend <close> = echo()
    with_relay(function(options)
      local got = receiver(5)
      local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
      write_all(tunnel, "hello")
      assert.equal("hello", got.wait())
      tunnel:close()
    end)
    local closing <close> = support.answering("bye", function(client)
      client:close()
    end)
    with_relay(function(options)
      local got = receiver(100)
      local tunnel = iap.open(options, port_of(closing), got.on_data, got.on_end)
      write_all(tunnel, "x")
      assert.equal("bye", got.wait())
      assert(got.ended)
      tunnel:close()
    end)
  end)

  it("loses nothing and doubles nothing when its WebSockets are cut again and again", function()
    local text = crypto.random(1 << 20):rep(3) .. crypto.random(1 << 20):rep(2)
    local backend <close> = echo()
    for _, kind in ipairs({ "relay_drop", "relay_close" }) do
      with_relay(function(options, world, scope)
        -- 10 MiB both ways; the odd number puts the cuts into the middle of messages' acknowledgements.
        world.faults:add({ kind = kind, bytes = 300007, count = 1000000 })
        local got = receiver(#text)
        local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
        scope:spawn(write_all, tunnel, text)
        local received = got.wait()
        assert.equal(#text, #received)
        assert.equal(crypto.sha256(text), crypto.sha256(received))
        assert(tunnel.reconnects > 10, "only " .. tunnel.reconnects .. " reconnects")
        tunnel:close()
      end)
    end
  end)

  it("keeps no more unacknowledged than it may, and is ended by a relay that never acknowledges", function()
    local backend <close> = support.raw(function(client)
      client:read_start(function() end)
    end)
    with_relay(function(options, world, scope)
      world.faults:add({ kind = "relay_mute", count = 1000000 })
      options.max_kept, options.timeouts = 100000, { ack = 0.2 }
      local got = receiver(1)
      local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
      local writer = scope:spawn(write_all, tunnel, ("x"):rep(1 << 20))
      local err = raised(got.wait)
      assert.equal("timeout", err.code)
      assert.matches("acknowledged nothing for 0.2 s", err.message)
      assert.matches("job%-w%-0", err.message)
      assert(tunnel.sent - tunnel.acknowledged <= 100000 + 65536, tunnel.sent .. " sent")
      writer:cancel()
    end)
    -- Once is an accident.
    local err, reconnects = patience.within_more(0.2, function(seconds)
      local problem, count
      with_relay(function(options, world, scope)
        world.faults:add({ kind = "relay_mute", count = 1 })
        options.max_kept, options.timeouts = 100000, { ack = seconds }
        local got = receiver(1)
        local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
        local writer = scope:spawn(write_all, tunnel, ("x"):rep(1 << 20))
        patience.wait_for("the end of what is written, or of the tunnel", function()
          return got.ended or writer:status() == "done"
        end)
        problem, count = got.err, tunnel.reconnects
        writer:cancel()
        tunnel:close()
      end)
      return not problem, problem, count
    end)
    assert.is_nil(err)
    assert(reconnects >= 1)
  end)

  it("renews a token that has expired, at the handshake and in the middle", function()
    local backend <close> = echo()
    with_relay(function(options, world)
      world.good = "token-2" -- the first one is refused with 401
      local got = receiver(10)
      local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
      assert.same({ "Bearer token-1", "Bearer token-2" }, world.tokens)
      world.good = "token-3"
      world.faults:add({ kind = "relay_drop", bytes = 1 })
      tunnel.ws:close(1001, "") -- takes the next WebSocket, which is dropped at once
      write_all(tunnel, "helloworld")
      assert.equal("helloworld", got.wait())
      assert.equal("Bearer token-3", world.tokens[#world.tokens])
      tunnel:close()
    end)
    with_relay(function(options, world)
      world.faults:add({ kind = "relay_close", bytes = 1, code = 4004 })
      local got = receiver(10)
      local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
      world.good = "token-2"
      write_all(tunnel, "helloworld")
      assert.equal("helloworld", got.wait())
      assert.equal("Bearer token-2", world.tokens[#world.tokens])
      tunnel:close()
    end)
    -- A token that is refused however often it is renewed.
    with_relay(function(options, world)
      world.good = "another"
      local err = raised(iap.open, options, port_of(backend), print, print)
      assert.equal("auth", err.code)
      assert.matches("gcloud auth application%-default login", err.message)
      assert(#world.tokens <= 6, #world.tokens .. " tries")
    end)
  end)

  it("names the phase, the place and the remedy of each refusal", function()
    -- Nothing listens on it, and nobody else is given it.
    local silent = uv.new_tcp()
    assert(silent:bind("127.0.0.1", 0))
    local free = silent:getsockname().port
    local backend <close> = echo()
    local function refused(fault, change, port)
      local err
      with_relay(function(options, world)
        if fault then
          world.faults:add(fault)
        end
        for name, value in pairs(change or {}) do
          options[name] = value
        end
        err = raised(iap.open, options, port or port_of(backend), print, print)
        err.calls = #world.calls
      end)
      assert.matches("job%-w%-0: the tunnel through IAP", err.message)
      assert(err.phase, "no phase: " .. err.message)
      return err
    end
    local err = refused({ kind = "error", method = "iap.connect", status = "PERMISSION_DENIED", count = 9 })
    assert.equal("permission", err.code)
    assert.equal(1, err.calls) -- asking again is no use
    assert.matches("iap.tunnelInstances.accessViaIAP", err.message)
    assert.equal("handshake", err.phase)

    err = refused({ kind = "relay_close", code = 4033 })
    assert.equal("permission", err.code)
    assert.equal(4033, err.close_code)
    assert.matches("iap.tunnelResourceAccessor", err.message)

    err = refused(nil, nil, free)
    assert.equal("refused", err.code)
    assert.equal(4003, err.close_code)
    assert.matches("35%.235%.240%.0/20", err.message)
    assert.matches("port " .. free, err.message)

    err = refused(nil, { instance = "t1v-n-0-w-0" })
    assert.equal("not_found", err.code)
    assert.matches("instance of zone z in project p", err.message)

    err = refused({ kind = "relay_slow", seconds = 5 }, { timeouts = { open = 0.1 } })
    assert.equal("timeout", err.code)
    assert.matches("firewall", err.message)

    err = refused({ kind = "error", method = "iap.connect", status = "UNAVAILABLE", count = 9 })
    assert.equal("unavailable", err.code)
    assert.equal(3, err.calls)

    err = refused(nil, { url = "ws://127.0.0.1:" .. free })
    assert.equal("refused", err.code)
    assert.matches("reach the relay", err.message)
    assert(not err.message:find("35.235", 1, true), err.message)
    silent:close()
    -- One failure of the relay's is nothing.
    with_relay(function(options, world)
      world.faults:add({ kind = "error", method = "iap.connect", status = "UNAVAILABLE" })
      local tunnel = iap.open(options, port_of(backend), function()
        return true
      end, print)
      tunnel:close()
    end)
  end)

  it("gives up in the end, and says why", function()
    local backend <close> = echo()
    local function ending(reconnect, prepare)
      local err
      with_relay(function(options, world, _, service)
        options.reconnect = reconnect
        local got = receiver(1)
        local tunnel = iap.open(options, port_of(backend), got.on_data, got.on_end)
        prepare(world, service, tunnel)
        err = raised(got.wait)
        tunnel:close()
      end)
      return err
    end
    local err = ending({ first = 0.01, most = 0.02, total = 0.2 }, function(world, _, tunnel)
      world.faults:add({ kind = "error", method = "iap.reconnect", status = "UNAVAILABLE", count = 100000 })
      tunnel.ws:abort()
    end)
    assert.equal("unavailable", err.code)
    assert.matches("while it was up", err.message)
    err = ending({ first = 0.01 }, function(_, service, tunnel)
      service.tunnels = {} -- the relay was restarted
      tunnel.ws:abort()
    end)
    assert.equal("lost", err.code)
    assert.equal(4001, err.close_code)
    err = ending({ first = 0.01 }, function(_, service)
      for _, each in pairs(service.tunnels) do
        each.ws.socket:send(frame.ack(1))
      end
    end)
    assert.equal("protocol", err.code)
    assert.matches("acknowledged 1 bytes, after 0, of 0 sent", err.message)
    err = ending({ first = 0.01 }, function(_, service)
      for _, each in pairs(service.tunnels) do
        each.ws.socket:send("\0\4\0\0\0\9x")
      end
    end)
    assert.matches("malformed", err.message)
    err = ending({ first = 0.01 }, function(world, _, tunnel)
      world.faults:add({ kind = "relay_close", code = 4033 })
      tunnel.ws:abort()
    end)
    assert.equal("permission", err.code)
  end)

  it("makes the worker wait while the reader is busy", function()
    local sent, client = 0, nil
    local backend <close> = support.raw(function(each)
      client = each
      local function more()
        if sent < 24 << 20 and not each:is_closing() then
          each:write(("q"):rep(65536), function(err)
            if not err then
              sent = sent + 65536
              more()
            end
          end)
        end
      end
      more()
    end)
    with_relay(function(options)
      local size, done, open = 0, task.event(), false
      local tunnel = iap.open(options, port_of(backend), function(data)
        size = size + #data
        if size == 24 << 20 then
          done:set()
        end
        return open
      end, print)
      local before
      repeat
        before = sent
        task.sleep(0.1)
      until sent == before and sent > 0
      assert(sent < 24 << 20, "the worker has sent all of it")
      open = true
      tunnel:resume()
      task.timeout(60, done.wait, done)
      assert(client)
      tunnel:close()
    end)
  end)

  it("carries SSH, whose host keys are checked against the pins all the same", function()
    local host = dofile("tests/spec/ssh/support.lua")
    local sshd = host.server()
    local other = host.server()
    local _ <close> = setmetatable({}, {
      __close = function()
        NODE.endpoints[1].address = "127.0.0.1"
        sshd:stop()
        other:stop()
      end,
    })
    with_relay(function(options, world)
      local ssh = require("ciranda.ssh")
      NODE.endpoints[1].address = sshd.address
      local function connect(pins)
        return ssh.connect({
          host = INSTANCE,
          address = "10.255.255.1", -- nobody goes there
          port = sshd.port,
          user = sshd.user,
          keys = host.key("ed25519"),
          agent = false,
          config = false,
          pins = pins,
          carrier = iap.carrier(options),
        })
      end
      local refused = raised(connect, { other:pin() })
      assert.equal("hostkey", refused.code)
      world.faults:add({ kind = "relay_drop", bytes = 20000, count = 100 })
      local connection <close> = connect({ sshd:pin() })
      local result = connection:exec("head -c 300000 /dev/zero; echo end")
      assert.equal(("\0"):rep(300000) .. "end\n", result.stdout)
      assert.equal(0, result.code)
      assert(#world.calls > 10)
    end)
  end)

  it("is a misuse without its place, and a usage error with a wrong URL", function()
    assert.equal("misuse", raised(iap.carrier, { project = "p", zone = "z", credentials = {} }).code)
    assert.equal("misuse", raised(iap.carrier, { wrong = 1 }).code)
    local err = raised(
      iap.open,
      { project = "p", zone = "z", instance = "i", credentials = {}, url = "http://x" },
      22,
      print,
      print
    )
    assert.equal("usage", err.code)
    assert.matches("CIRANDA_IAP_URL", err.message)
  end)
end)
