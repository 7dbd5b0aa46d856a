local errors = require("ciranda.io.error")
local frame = require("ciranda.io.websocket_frame")
local http = require("ciranda.io.http")
local server = require("ciranda.io.server")
local task = require("ciranda.task")
local websocket = require("ciranda.io.websocket")

local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/io/http_support.lua")
local raised = support.raised

--- A generator of its own, so that a failure can be had again from its seed.
local function generator(seed)
  local state = seed
  return function(low, high)
    state = (state * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
    return low + (state >> 24) % (high - low + 1)
  end
end

local function bytes(pick, size)
  local list = {}
  for place = 1, size do
    list[place] = string.char(pick(0, 255))
  end
  return table.concat(list)
end

--- Masking one byte after the other, as section 5.3 has it.
local function slow_mask(data, key)
  return (
    data:gsub("()(.)", function(place, byte)
      return string.char(byte:byte() ~ key:byte((place - 1) % 4 + 1))
    end)
  )
end

--- Feed in pieces of random size; what came out.
local function read_in_pieces(reader, data, pick)
  local got = {}
  local position = 1
  while position <= #data do
    local size = pick(1, 97)
    reader:feed(data:sub(position, position + size - 1), function(opcode, payload)
      got[#got + 1] = { opcode, payload }
    end)
    position = position + size
  end
  return got
end

describe("ciranda.io.websocket_frame", function()
  it("masks as the RFC says, whatever the length", function()
    local pick = generator(1)
    for size = 0, 40 do
      local data, key = bytes(pick, size), bytes(pick, 4)
      assert.equal(slow_mask(data, key), frame.mask(data, key))
    end
    local data, key = bytes(pick, 5003), bytes(pick, 4)
    assert.equal(slow_mask(data, key), frame.mask(data, key))
    -- The RFC's own example (section 5.7).
    assert.equal(
      "\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58",
      frame.encode(frame.TEXT, "Hello", "\x37\xfa\x21\x3d")
    )
  end)

  it("reads back what it writes, in parts and with control frames between them, from 60 seeds", function()
    for seed = 1, 60 do
      local pick = generator(seed)
      local masked = seed % 2 == 0
      local out, expected = {}, {}
      local function put(opcode, payload, more)
        out[#out + 1] = frame.encode(opcode, payload, masked and bytes(pick, 4) or nil, more)
      end
      for _ = 1, pick(1, 8) do
        local size = ({ 0, 1, 125, 126, 127, 700, 65535, 65536 })[pick(1, seed <= 4 and 8 or 6)]
        local message = bytes(pick, size)
        local parts = pick(1, 4)
        local position = 1
        for part = 1, parts do
          local last = part == parts and #message or math.min(#message, position + pick(0, 300) - 1)
          put(part == 1 and frame.BINARY or frame.CONTINUATION, message:sub(position, last), part < parts)
          position = last + 1
          if part < parts and pick(1, 2) == 1 then
            local ping = bytes(pick, pick(0, 125))
            put(frame.PING, ping)
            expected[#expected + 1] = { frame.PING, ping }
          end
        end
        expected[#expected + 1] = { frame.BINARY, message }
      end
      local reader = frame.reader({ masked = masked, max_message = 1 << 20 })
      assert.same(expected, read_in_pieces(reader, table.concat(out), pick), "seed " .. seed)
    end
  end)

  it("meets garbage with an error or with messages, from 300 seeds, and never with anything else", function()
    local refused = 0
    for seed = 1, 300 do
      local pick = generator(seed)
      local good = frame.encode(frame.BINARY, bytes(pick, pick(0, 200)), bytes(pick, 4))
        .. frame.encode(frame.TEXT, bytes(pick, pick(0, 200)), bytes(pick, 4), true)
        .. frame.encode(frame.CONTINUATION, bytes(pick, pick(0, 200)), bytes(pick, 4))
      local list = { good:byte(1, -1) }
      for _ = 1, pick(1, 6) do
        list[pick(1, math.min(#list, 16))] = pick(0, 255)
      end
      local data = string.char(table.unpack(list))
      local ok, err = pcall(read_in_pieces, frame.reader({ masked = true, max_message = 4096 }), data, pick)
      if not ok then
        assert(errors.is(err, "protocol"), tostring(err))
        assert(err.close_code == 1002 or err.close_code == 1009)
        refused = refused + 1
      end
    end
    assert(refused > 100, refused .. " of 300 were refused")
  end)

  local function refusal(data, options)
    local reader = frame.reader(options or { masked = false, max_message = 100 })
    return raised(reader.feed, reader, data, function() end)
  end

  it("refuses what the RFC forbids, by name", function()
    assert.matches("reserved bits", refusal("\xC2\x00").message)
    assert.matches("unknown kind 3", refusal("\x83\x00").message)
    assert.matches("is masked", refusal("\x82\x80aaaa").message)
    assert.matches("is not masked", refusal("\x82\x00", { masked = true, max_message = 10 }).message)
    assert.matches("in parts", refusal("\x09\x00").message)
    assert.matches("too long", refusal("\x89\x7e\x00\x7e").message)
    assert.matches("longer than it must be", refusal("\x82\x7e\x00\x05hello").message)
    assert.matches("without a beginning", refusal("\x80\x00").message)
    assert.matches("middle of another", refusal("\x02\x01a\x82\x01b").message)
    local err = refusal("\x82\x65")
    assert.equal(1009, err.close_code)
    assert.matches("more than 100 bytes", err.message)
    -- A message that grows by parts is no way around the limit.
    local part = "\x0a" .. ("a"):rep(10)
    assert.equal(1009, refusal("\x02" .. part .. ("\x00" .. part):rep(10)).close_code)
    assert.equal(1009, refusal("\x82\x7f\x7f" .. ("\xff"):rep(7)).close_code)
    assert.equal(1002, refusal("\x82\x7f" .. ("\xff"):rep(8)).close_code) -- negative, if one lets it be
    assert.matches("empty parts", refusal("\x02\x00" .. ("\x00\x00"):rep(1002)).message)
  end)

  it("knows the codes of a close", function()
    assert.same({ 1005, "" }, { frame.parse_close("") })
    assert.same({ 4003, "why" }, { frame.parse_close(frame.close_payload(4003, "why")) })
    for _, payload in ipairs({ "x", "\x03\xed", "\x03\xee", "\0\0", "\xff\xff" }) do
      assert(errors.is(raised(frame.parse_close, payload), "protocol"))
    end
  end)
end)

--- A server whose WebSockets are given to `serve(ws, request)`.
local function with_server(serve, fn, alter)
  local _ <close> = task.scope()
  local s <close> = server.listen({
    handler = function(request)
      local headers, problem = websocket.answer(request.headers, "test")
      if not headers then
        return { status = 400, body = problem }
      end
      if alter then
        local answer = alter(request, headers)
        if answer then
          return answer
        end
      end
      return {
        headers = headers,
        upgrade = function(fd, early)
          serve(websocket.accept(fd, { early = early }), request)
        end,
      }
    end,
  })
  fn((s.url:gsub("^http", "ws")) .. "/a?b=c")
end

local function connect(address)
  return websocket.connect({ url = address, protocol = "test", headers = { Authorization = "Bearer x" } })
end

local function echo(ws)
  ws:start({
    on_message = function(data)
      ws:send(data)
    end,
  })
end

--- Wait for the end of a WebSocket, or for a number of messages.
local function collect(ws, count)
  local got, ended = {}, task.event()
  local result = { got = got }
  ws:start({
    on_message = function(data)
      got[#got + 1] = data
      if #got == count then
        ended:set()
      end
    end,
    on_end = function(code, reason)
      result.code, result.reason = code, reason
      ended:set()
    end,
  })
  function result.wait()
    task.timeout(30, ended.wait, ended)
    return result
  end
  return result
end

describe("ciranda.io.websocket", function()
  it("carries messages both ways and closes in order", function()
    with_server(echo, function(address)
      local ws <close> = connect(address)
      local messages = { "", "a", ("x"):rep(125), ("y"):rep(70000), "\0\255\r\n" }
      local result = collect(ws, #messages)
      for _, message in ipairs(messages) do
        assert(ws:send(message))
      end
      assert.same(messages, result.wait().got)
      ws:close(1000, "done")
      assert(not ws:send("more"))
      local ended = task.event()
      ws.on_end = function(code)
        result.code = code
        ended:set()
      end
      task.timeout(20, ended.wait, ended)
      assert.equal(1000, result.code)
    end)
  end)

  it("tells the server's code and reason, and 1006 for none", function()
    local how = { close = "close", abort = "abort" }
    for _, way in pairs(how) do
      with_server(function(ws)
        ws:start({ on_message = function() end })
        if way == "close" then
          ws:close(4003, "no backend")
        else
          ws:abort()
        end
      end, function(address)
        local ws <close> = connect(address)
        local result = collect(ws).wait()
        assert.equal(way == "close" and 4003 or 1006, result.code)
        assert.matches(way == "close" and "no backend" or "without a close", result.reason)
      end)
    end
  end)

  it("answers pings, and a breach of protocol with its code", function()
    local seen = {}
    with_server(function(ws)
      local raw = ws.stream
      ws:start({
        on_message = function() end,
        on_end = function(code)
          seen.code = code
        end,
      })
      local feed = ws.reader.feed
      ws.reader.feed = function(reader, data, on_message)
        return feed(reader, data, function(opcode, payload)
          seen[#seen + 1] = { opcode, payload }
          if opcode == frame.PONG then
            raw:write("\x83\x00", function() end)
          end
          return on_message(opcode, payload)
        end)
      end
      raw:write(frame.encode(frame.PING, "are you there"), function() end)
    end, function(address)
      local ws <close> = connect(address)
      local result = collect(ws).wait()
      assert.equal(1006, result.code)
      assert.matches("unknown kind 3", result.reason)
      patience.wait_for("the code of the breach", function()
        return seen[2]
      end)
    end)
    assert.same({ frame.PONG, "are you there" }, seen[1])
    assert.equal(frame.CLOSE, seen[2][1])
    assert.equal(1002, (frame.parse_close(seen[2][2])))
  end)

  it("stops a sender while the receiver is paused, and loses nothing", function()
    local sender
    with_server(function(ws)
      sender = ws
      ws:start({ on_message = function() end })
      for number = 1, 400 do
        ws:send(string.pack(">I4", number) .. ("z"):rep(65536))
      end
    end, function(address)
      local ws <close> = connect(address)
      local count, done = 0, task.event()
      ws:start({
        on_message = function(data)
          count = count + 1
          assert.equal(count, (string.unpack(">I4", data)))
          if count % 200 == 1 then
            ws:pause()
          end
          if count == 400 then
            done:set()
          end
        end,
      })
      for _, paused_at in ipairs({ 1, 201 }) do
        local before
        repeat -- until nothing moves any more
          before = count
          task.sleep(0.05)
        until count == before and count == paused_at
        assert(count > 1 or sender.pending > 0, "the sender has got rid of everything at " .. count)
        ws:resume()
      end
      task.timeout(30, done.wait, done)
    end)
  end)

  it("is ended by a peer that does not answer the close, after a moment", function()
    local timeout = websocket.CLOSE_TIMEOUT
    local over = task.event()
    websocket.CLOSE_TIMEOUT = 0.1
    with_server(function(ws)
      ws.stream:read_stop() -- never started: nothing is read, nothing answered
      over:wait()
      ws:abort()
    end, function(address)
      local ws <close> = connect(address)
      local result = collect(ws)
      ws:close(1000, "enough")
      assert.equal(1000, result.wait().code)
      over:set()
    end)
    websocket.CLOSE_TIMEOUT = timeout
  end)

  it("names what a refused handshake was refused for", function()
    local status
    with_server(echo, function(address)
      for given, code in pairs({
        [401] = "auth",
        [403] = "permission",
        [404] = "not_found",
        [503] = "unavailable",
      }) do
        status = given
        local err = raised(connect, address)
        assert.equal(code, err.code)
        assert.equal(given, err.status)
        assert.equal("handshake", err.phase)
        assert.matches("HTTP " .. given .. ": not so", err.message)
        assert(not err.message:find("b=c", 1, true), "the query is nobody's business: " .. err.message)
      end
    end, function()
      return { status = status, body = "not\nso" }
    end)
  end)

  it("refuses answers that are no answer to its handshake", function()
    local change
    with_server(echo, function(address)
      change = { "Sec-WebSocket-Accept", "AAAA" }
      assert.matches("Accept is wrong", raised(connect, address).message)
      change = { "Sec-WebSocket-Protocol", "other" }
      assert.matches("subprotocol", raised(connect, address).message)
      change = { "Upgrade", "h2c" }
      assert.matches("does not upgrade", raised(connect, address).message)
    end, function(_, headers)
      for _, pair in ipairs(headers) do
        if pair[1] == change[1] then
          pair[2] = change[2]
        end
      end
    end)
  end)

  it("has a deadline for the connection and for the answer, and names the phase", function()
    local silent <close> = support.raw(function() end)
    local address = silent.url:gsub("^http", "ws")
    local err = patience.within_more(0.1, function(seconds)
      local err = raised(websocket.connect, { url = address, timeout = seconds })
      return err.phase == "handshake", err
    end)
    assert.equal("timeout", err.code)
    assert.equal("handshake", err.phase)
    err = raised(websocket.connect, { url = "ws://127.0.0.1:" .. support.free_port() })
    assert.equal("refused", err.code)
    assert.equal("connect", err.phase)
    local garbage <close> = support.answering(("x"):rep(40000))
    assert.matches(
      "too large",
      raised(websocket.connect, { url = (garbage.url:gsub("^http", "ws")) }).message
    )
    local closing <close> = support.answering("HTTP/1.1 101 S", function(client)
      client:close()
    end)
    err = raised(websocket.connect, { url = (closing.url:gsub("^http", "ws")) })
    assert(errors.is(err, "closed", "reset"), tostring(err))
  end)

  it("is a misuse with another scheme, an unknown option or a header of two lines", function()
    assert.equal("misuse", raised(websocket.connect, { url = "http://a/" }).code)
    assert.equal("misuse", raised(websocket.connect, { url = "ws://a/", wrong = 1 }).code)
    assert.equal("misuse", raised(websocket.connect, { url = "ws://a/", headers = { A = "b\r\nC: d" } }).code)
  end)
end)

describe("the engine's bare connections", function()
  local core = require("ciranda.core.http")

  local function open(address)
    return task.call(core.connect, { url = address })
  end

  it("send and receive, one write at a time, and close in the middle of it", function()
    local peer <close> = support.raw(function(client)
      client:read_start(function(_, data)
        if data == "close" then
          client:close()
        elseif data then
          client:write(data)
        end
      end)
    end)
    local socket <close> = open(peer.url)
    local got = task.timeout(20, task.await, function(done)
      local pieces = ""
      socket:read_start(function(_, data)
        pieces = pieces .. data
        if #pieces == 300000 then
          socket:read_stop()
          done(nil, pieces)
        end
      end)
      socket:write(("w"):rep(300000), function() end)
      assert.has_error(function()
        socket:write("x", function() end)
      end)
    end)
    assert.equal(("w"):rep(300000), got)
    local ended = task.timeout(20, task.await, function(done)
      socket:read_start(function(err, data)
        done(nil, { err, data })
      end)
      socket:write("close", function() end)
    end)
    assert.is_nil(ended[2])
    local err = task.timeout(20, task.await, function(done)
      local other <const> = socket
      other:write("y", function(problem)
        done(nil, problem or "written")
      end)
      other:close()
    end)
    assert(err == "written" or err.code == "cancelled")
    assert.is_false(socket:write("z", function() end))
    assert.is_false(socket:read_start(function() end))
  end)

  it("tell refusals by their code, can be cancelled, and are closed when nobody holds them", function()
    local err = raised(open, "http://127.0.0.1:" .. support.free_port())
    assert.equal("refused", err.code)
    local silent <close> = support.raw(function(client)
      client:read_start(function(_, data)
        if not data then
          client:close()
        end
      end)
    end)
    local outcome = task.timeout(20, task.await, function(done)
      local handle = core.connect({ url = silent.url }, function(problem, socket)
        done(nil, problem and problem.code or socket)
      end)
      handle:cancel()
    end)
    assert.equal("cancelled", outcome)
    do
      local socket = open(silent.url)
      assert(socket)
    end
    task.timeout(20, function()
      local closed
      repeat
        collectgarbage()
        task.sleep(0.02)
        closed = silent.clients[#silent.clients]
      until closed and closed:is_closing()
    end)
  end)

  it("outlive many requests of others", function()
    local _ <close> = task.scope()
    local s <close> = server.listen({
      handler = function()
        return { body = "ok" }
      end,
    })
    local echoing <close> = support.raw(function(client)
      client:read_start(function(_, data)
        if data then
          client:write(data)
        end
      end)
    end)
    local socket <close> = open(echoing.url)
    task.map({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, function()
      assert.equal("ok", http.get(s.url).body)
    end)
    local got = task.timeout(20, task.await, function(done)
      socket:read_start(function(_, data)
        done(nil, data)
      end)
      socket:write("still", function() end)
    end)
    assert.equal("still", got)
  end)

  it("go through TLS, where what was sent may wait for the reader", function()
    support.with_directory(function(directory)
      local key, certificate = directory .. "/key", directory .. "/cert"
      local openssl = support.program("openssl")
      local words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
        .. " -addext subjectAltName=DNS:localhost -keyout %s -out %s"
      local function arguments(format, ...)
        local list = {}
        for word in format:format(...):gmatch("%S+") do
          list[#list + 1] = word
        end
        return list
      end
      local making <close> = support.start(openssl, arguments(words, key, certificate))
      making.ended:wait()
      local port = support.free_port()
      -- On one address only: on another one somebody else may have the port.
      words = "s_server -quiet -rev -accept 127.0.0.1:%d -key %s -cert %s"
      local _ <close> = support.start(openssl, arguments(words, port, key, certificate))
      support.wait_for_port(port)
      local address = "https://localhost:" .. port
      local socket <close> = task.call(core.connect, { url = address, ca_file = certificate })
      local line = ("abcdefg"):rep(2000)
      local got = task.timeout(30, task.await, function(done)
        local text = ""
        socket:read_start(function(err, data)
          text = text .. (data or "")
          if err or not data or text:find("\n") then
            done(err and errors.wrap(err), text)
          end
        end)
        socket:write(line .. "\n", function() end)
      end)
      assert.equal(line:reverse() .. "\n", got)
      socket:close() -- it serves one after the other
      -- A certificate that nobody has vouched for is refused.
      assert(errors.is(raised(task.call, core.connect, { url = address, timeout_ms = 20000 }), "protocol"))
    end)
  end)

  it("are told of, and gone, at the program's end", function()
    local process = require("ciranda.io.process")
    local result = process.run({
      os.getenv("CIRANDA_BINARY"),
      "eval",
      [[
        local uv, core = require("luv"), require("ciranda.core.http")
        local server = uv.new_tcp()
        server:bind("127.0.0.1", 0)
        server:listen(4, function() server:accept(uv.new_tcp()) end)
        local url = "http://127.0.0.1:" .. server:getsockname().port
        KEPT = require("ciranda.task").call(core.connect, { url = url })
        KEPT:read_start(function() end)
        KEPT:write(("x"):rep(30000000), function(err) print(err and err.code) end)
        core.connect({ url = "http://127.0.0.1:1" }, function(err) print(err.code) end)
      ]],
      timeout = 60,
    })
    assert.equal(0, result.code, result.stderr)
    assert.equal("cancelled\ncancelled\n", result.stdout)
  end)
end)
