local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local uv = require("luv")

local support = dofile("tests/spec/gcp/support.lua")

local BLOCK = ("x"):rep(65536)
local MIB = 1048576

--- A server that says what it likes: `reply(connection)` is called for each request, `connection.send(bytes, done)`
--- writes, and is false when the client has gone; `connection.close()` ends it.
---@param reply fun(connection: table)
---@param fn fun(url: string, sent: fun(): integer) sent: bytes that the client has taken
local function with_raw_server(reply, fn)
  local listener, sockets, taken = uv.new_tcp(), {}, 0
  assert(listener:bind("127.0.0.1", 0))
  assert(listener:listen(16, function()
    local socket = uv.new_tcp()
    sockets[#sockets + 1] = socket
    listener:accept(socket)
    local connection, request = {}, ""
    function connection.close()
      if not socket:is_closing() then
        socket:close()
      end
    end
    function connection.send(bytes, done)
      if socket:is_closing() then
        return false
      end
      socket:write(bytes, function(err)
        if err then
          connection.close()
          return
        end
        taken = taken + #bytes
        if done then
          done()
        end
      end)
      return true
    end
    socket:read_start(function(_, bytes)
      if not bytes then
        connection.close()
        return
      end
      request = request .. bytes
      if request:find("\r\n\r\n", 1, true) then
        request = ""
        reply(connection)
      end
    end)
  end))
  local ok, err = pcall(fn, ("http://127.0.0.1:%d/v2/x"):format(listener:getsockname().port), function()
    return taken
  end)
  listener:close()
  for _, socket in ipairs(sockets) do
    if not socket:is_closing() then
      socket:close()
    end
  end
  if not ok then
    error(err, 0)
  end
end

--- A reply that sends one text, and then closes or waits.
local function text(bytes, stays)
  return function(connection)
    connection.send(bytes, not stays and connection.close or nil)
  end
end

--- A reply that begins with one text and goes on with another for ever.
local function endless(head, more)
  return function(connection)
    local function again()
      connection.send(more, again)
    end
    connection.send(head, again)
  end
end

local function ok_head(fields)
  return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" .. fields .. "\r\n"
end

--- A gzip stream that unpacks to so many bytes, at 158 times its size: one letter, then copies of 258 bytes.
local function gzip_bomb(size)
  local bits = "110" .. "01110001" -- the last block, with fixed codes; the letter A
  bits = bits .. ("1100010100000"):rep(9) -- length 258, distance 1
  local bytes = {}
  for index = 0, 14 do
    bytes[index + 1] = string.char(tonumber(bits:sub(index * 8 + 1, index * 8 + 8):reverse(), 2))
  end
  local all = table.concat(bytes)
  return "\x1f\x8b\8\0\0\0\0\0\0\3" .. all:sub(1, 2) .. all:sub(3):rep(size // (8 * 258))
end

--- The error of a GET in JSON, which has to be clear: ours, with the request named, short, and fit for a terminal.
---@param tries integer? attempts after which the call's time is over
local function refused(url, call, tries)
  local client = tries and support.client_for(tries) or support.client()
  call = call or {}
  call.url, call.deadline = url, call.deadline or 20
  call.timeout = call.timeout or 20
  local err = support.raised(client.json, client, call)
  assert(errors.is(err), errors.text(err))
  local message = tostring(err)
  assert.matches("GET http://127.0.0.1", message, 1, true)
  assert.is_true(#message < 3000, #message .. " bytes of message")
  assert.is_nil(message:find("[%z\1-\8\11-\31\127]"), ("%q"):format(message))
  assert.is_truthy(utf8.len(message))
  return err
end

describe("hostile replies to ciranda.gcp.client", function()
  it("are given up when they are larger than any answer", function()
    for name, reply in pairs({
      chunked = endless(ok_head("Transfer-Encoding: chunked\r\n"), "10000\r\n" .. BLOCK .. "\r\n"),
      to_the_end = endless(ok_head("Connection: close\r\n"), BLOCK),
      announced = endless(ok_head("Content-Length: 1099511627776\r\n"), BLOCK),
    }) do
      with_raw_server(reply, function(url, sent)
        local err = refused(url)
        assert.equal("protocol", err.code, name)
        assert.is_true(sent() < 80 * MIB, ("%s: %d bytes were taken"):format(name, sent()))
      end)
    end
  end)

  it("are given up when they unpack to more than any answer", function()
    local bomb = gzip_bomb(1024 * MIB)
    local head = ok_head(("Content-Encoding: gzip\r\nContent-Length: %d\r\n"):format(#bomb))
    with_raw_server(text(head .. bomb, true), function(url)
      local before = uv.resident_set_memory()
      assert.equal("protocol", refused(url).code)
      assert.is_true(uv.resident_set_memory() - before < 512 * MIB)
    end)
  end)

  it("are refused when they are no HTTP, or contradict themselves", function()
    local replies = {
      "SSH-2.0-OpenSSH_9.6\r\n",
      "HTTP/1.1 abc OK\r\n\r\n{}",
      "HTTP/9.9 200 OK\r\n\r\n{}",
      "\0\0\0\0\0\0\0\0\0\0\0\0",
      ok_head("Content-Length: -5\r\n") .. "{}",
      ok_head("Content-Length: five\r\n") .. "{}",
      ok_head("Transfer-Encoding: chunked\r\n") .. "zz\r\n{}\r\n0\r\n\r\n",
      ok_head("Transfer-Encoding: chunked\r\n") .. "ffffffffffffffffff\r\n{}",
      ok_head("Content-Encoding: gzip\r\nContent-Length: 9\r\n") .. "no gzip..",
      ok_head("Content-Encoding: gzip\r\nContent-Length: 12\r\n") .. "\x1f\x8b\8\0\0\0\0\0\0\3\xff\xff",
    }
    for index, reply in ipairs(replies) do
      with_raw_server(text(reply), function(url)
        local err = refused(url, nil, 3)
        assert.is_true(
          errors.is(err, "protocol", "closed", "reset"),
          ("reply %d: %s"):format(index, tostring(err))
        )
      end)
    end
  end)

  it("are tried again and then refused when they end too early", function()
    for _, reply in ipairs({
      "",
      "HTTP/1.1 200 O",
      ok_head("Content-Length: 100\r\n"),
      ok_head("Content-Length: 100\r\n") .. '{"name":',
      ok_head("Transfer-Encoding: chunked\r\n") .. '8\r\n{"name"',
    }) do
      local requests = 0
      with_raw_server(function(connection)
        requests = requests + 1
        text(reply)(connection)
      end, function(url)
        local err = refused(url, nil, 3)
        assert.is_true(errors.is(err, "closed", "reset", "protocol"), tostring(err))
        assert.is_true(requests > 1 or err.code == "protocol", tostring(err))
      end)
    end
  end)

  it("are cut where they say that they end", function()
    with_raw_server(text(ok_head("Content-Length: 7\r\n") .. '{"name": "x"}', true), function(url)
      assert.equal("protocol", refused(url).code)
    end)
  end)

  it("do not go on for ever in their headers", function()
    for name, more in pairs({
      fields = ("X-Filler: %s\r\n"):format(("y"):rep(1000)),
      one_field = ("y"):rep(4096),
      interim = "HTTP/1.1 103 Early Hints\r\n\r\n",
      interim_fields = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
    }) do
      local head = name:find("interim", 1, true) and more or "HTTP/1.1 200 OK\r\nX-Filler: y"
      with_raw_server(endless(head .. (name == "fields" and "\r\n" or ""), more), function(url, sent)
        local before = collectgarbage("count")
        local err = refused(url)
        assert.is_true(errors.is(err, "protocol"), name .. ": " .. tostring(err))
        collectgarbage()
        assert.is_true(collectgarbage("count") - before < 4096, name)
        assert.is_true(sent() < 8 * MIB, ("%s: %d bytes"):format(name, sent()))
      end)
    end
  end)

  it("end in time when they come byte by byte", function()
    with_raw_server(function(connection)
      connection.send(ok_head("Content-Length: 100000\r\n"))
      local timer = uv.new_timer()
      timer:start(10, 10, function()
        if not connection.send(" ") then
          timer:close()
        end
      end)
    end, function(url)
      assert.equal("timeout", refused(url, { deadline = 0.3, timeout = 0.3 }).code)
    end)
  end)

  it("are told as what they are, whatever an error's body has", function()
    for _, body in ipairs({
      "",
      "7",
      "[]",
      '{"error": "text"}',
      '{"error": {"code": "x", "message": 7, "status": [], "details": 7}}',
      '{"error": {"message": "\\u001b[2Jcleared\\u0000", "details": [7, "x", {"@type": 7}, null]}}',
      '{"error": {"message": "\xff\xfe"}}',
      '{"error": {"message": "' .. ("m"):rep(2 * MIB) .. '"}}',
      '{"error": {"message": "no", "details": [{"retryDelay": "-5s"}, {"retryDelay": {}}]}}',
      '{"error": ' .. ("["):rep(10000) .. ("]"):rep(10000) .. "}",
      ("{"):rep(100000),
      "<html>\27[31mBad Request</html>",
    }) do
      local reply = ("HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n"):format(#body) .. body
      with_raw_server(text(reply, true), function(url)
        assert.is_true(errors.is(refused(url), "invalid", "failed", "precondition", "protocol"))
      end)
    end
  end)

  it("make no list of what is none", function()
    local item = { name = "n" }
    for index, case in ipairs({
      { { nodes = { item, 7, "x", json.null, { { item } } } }, 2 },
      { { nodes = { a = item } }, 0 },
      { { nodes = { item }, nextPageToken = 7 }, 1 },
      { { nodes = { item }, nextPageToken = { "t" }, unreachable = "everything" }, 1 },
      { { nodes = { item }, unreachable = { 7, { "x" } } }, 1 },
    }) do
      local body = json.encode(case[1])
      with_raw_server(text(ok_head(("Content-Length: %d\r\n"):format(#body)) .. body, true), function(url)
        local items, unreachable = support.client():pages({ url = url }, "nodes")
        assert.equal(case[2], #items, "case " .. index)
        for _, place in ipairs(unreachable) do
          assert.equal("string", type(place))
        end
      end)
    end
    for _, nodes in ipairs({ "x", 7, true }) do
      local body = json.encode({ nodes = nodes })
      with_raw_server(text(ok_head(("Content-Length: %d\r\n"):format(#body)) .. body, true), function(url)
        local client = support.client()
        support.fails("protocol", client.pages, client, { url = url }, "nodes")
      end)
    end
  end)
end)
