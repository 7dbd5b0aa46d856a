local core = require("ciranda.core.server")
local errors = require("ciranda.io.error")
local http = require("ciranda.io.http")
local server = require("ciranda.io.server")
local task = require("ciranda.task")
local uv = require("luv")

local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/io/http_support.lua")
local raised = support.raised

--- Run `fn(s)` with a server.
local function with_server(options, fn)
  if type(options) == "function" then
    options = { handler = options }
  end
  local scope <close> = task.scope()
  local s <close> = server.listen(options)
  fn(s, scope)
end

--- Send bytes to the server and read until it closes, or until `pattern` was read. Returns all that came, and the
--- error that ended it, if any.
local function talk(s, bytes, pattern)
  return task.timeout(60, task.await, function(done)
    local tcp = uv.new_tcp()
    local got = {}
    local function finish(err)
      if not tcp:is_closing() then
        tcp:close()
        done(nil, table.concat(got), err)
      end
    end
    tcp:connect("127.0.0.1", s.port, function(err)
      if err then
        return finish(err)
      end
      tcp:read_start(function(problem, data)
        got[#got + 1] = data
        if not data or (pattern and table.concat(got):find(pattern)) then
          finish(problem)
        end
      end)
      tcp:write(bytes)
    end)
  end)
end

describe("ciranda.io.server", function()
  it("gives the request as the client wrote it", function()
    local seen
    with_server(function(request)
      seen = request
      return { body = "ok" }
    end, function(s)
      local text = talk(
        s,
        "POST /a%2Fb/%20?x=%31&y=a+b&x=2&flag HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-a: 2\r\nContent-Length: 3\r\n"
          .. "Connection: close\r\n\r\na\0b"
      )
      assert.matches("^HTTP/1.1 200", text)
      assert.equal("POST", seen.method)
      assert.equal("/a%2Fb/%20?x=%31&y=a+b&x=2&flag", seen.target)
      assert.equal("/a%2Fb/%20", seen.path)
      assert.equal("x=%31&y=a+b&x=2&flag", seen.query)
      local fields, list = seen:args()
      assert.same({ x = "2", y = "a b", flag = "" }, fields)
      assert.same({ { "x", "1" }, { "y", "a b" }, { "x", "2" }, { "flag", "" } }, list)
      assert.equal("a\0b", seen.body)
      assert.equal("1.1", seen.version)
      assert.equal("1", seen.headers["x-A"])
      assert.same({ { "Host", "h" }, { "X-A", "1" }, { "X-a", "2" } }, { table.unpack(seen.headers, 1, 3) })
      assert.equal("127.0.0.1", seen.remote_address)
      assert.equal(s.port, seen.local_port)
      assert.is_true(seen.remote_port > 0)
    end)
  end)

  it("reads JSON and forms, and names what is wrong with them", function()
    with_server(function(request)
      if request.path == "/form" then
        return { json = request:form() }
      end
      local ok, value = pcall(request.json, request)
      return { json = ok and value or { error = tostring(value) } }
    end, function(s)
      assert.same({ a = { 1, 2 } }, http.post(s.url, { a = { 1, 2 } }):json())
      assert.matches("POST /bad", http.post(s.url .. "/bad", "{").body, 1, true)
      assert.same(
        { a = "1", b = "x y&" },
        http.request({ url = s.url .. "/form", form = { a = 1, b = "x y&" } }):json()
      )
    end)
  end)

  it("tells callers apart by the address that they called", function()
    with_server(function(request)
      return { body = request.local_address }
    end, function(s)
      assert.equal(s.port, s:listen("127.0.0.2", s.port))
      local other = s:listen("127.0.0.3")
      assert.equal("127.0.0.1", http.get(s.url).body)
      assert.equal("127.0.0.2", http.get(("http://127.0.0.2:%d"):format(s.port)).body)
      assert.equal("127.0.0.3", http.get(("http://127.0.0.3:%d"):format(other)).body)
    end)
  end)

  it("serves IPv6 where there is some", function()
    local _ <close> = task.scope()
    local ok, s = pcall(server.listen, {
      address = "::1",
      handler = function(request)
        return { body = request.local_address }
      end,
    })
    if not ok then
      assert.is_true(errors.is(s, "unreachable", "io"))
      pending("this machine has no IPv6 loopback address")
      return
    end
    assert.equal("::1", http.get(s.url).body)
    s:close()
  end)

  it("says when it cannot listen, and where", function()
    with_server(function() end, function(s)
      local err = raised(server.listen, { port = s.port, handler = function() end })
      assert.is_true(errors.is(err, "busy"))
      assert.matches("127.0.0.1 port " .. s.port, tostring(err), 1, true)
      assert.has_error(function()
        s:listen("localhost", 0)
      end)
    end)
    assert.is_true(errors.is(raised(server.listen, { handler = print, prot = 1 }), "misuse"))
    assert.is_true(errors.is(raised(server.listen, {}), "misuse"))
  end)

  it("needs a scope to live in, and leaves no listener behind without one", function()
    local port = support.free_port()
    local err
    task.run(function()
      local scope <close> = task.scope()
      scope
        :spawn(function()
          err = raised(server.listen, { port = port, handler = function() end })
        end)
        :wait()
    end)
    assert.is_true(errors.is(err, "misuse"))
    with_server({ port = port, handler = function() end }, function(s)
      assert.equal(port, s.port)
    end)
  end)

  describe("an answer", function()
    it("has the status, headers and body that the handler returned", function()
      with_server(function()
        return {
          status = 418,
          headers = { ["X-One"] = 1, ["Set-Cookie"] = { "a=1", "b=2" } },
          body = "short\0and stout",
        }
      end, function(s)
        local response = http.get(s.url)
        assert.equal(418, response.status)
        assert.equal("short\0and stout", response.body)
        assert.equal("1", response.headers["x-one"])
        local cookies = {}
        for _, pair in ipairs(response.headers) do
          if pair[1] == "Set-Cookie" then
            cookies[#cookies + 1] = pair[2]
          end
        end
        assert.same({ "a=1", "b=2" }, cookies)
      end)
    end)

    it("may be streamed, with or without a length", function()
      with_server(function(request)
        return {
          length = request.path == "/length" and 300000 or nil,
          body = function(write)
            for i = 0, 9 do
              write(tostring(i):rep(30000))
              write("")
            end
          end,
        }
      end, function(s)
        for _, path in ipairs { "/length", "/chunks" } do
          local response = http.get(s.url .. path)
          assert.equal(300000, #response.body)
          assert.equal("9", response.body:sub(-1))
          assert.equal(path == "/length" and "300000" or nil, response.headers["content-length"])
        end
      end)
    end)

    it("to HEAD has the headers only", function()
      local ran = false
      with_server(function(request)
        if request.path == "/stream" then
          return {
            length = 12345,
            body = function()
              ran = true
            end,
          }
        end
        return { body = ("x"):rep(77) }
      end, function(s)
        local text = talk(s, "HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert.matches("Content%-Length: 77\r\n", text)
        assert.matches("\r\n\r\n$", text)
        text = talk(s, "HEAD /stream HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert.matches("Content%-Length: 12345\r\n", text)
        assert.matches("\r\n\r\n$", text)
        assert.is_false(ran)
      end)
    end)

    it("may come late: a long poll holds up nobody", function()
      local over = task.event()
      with_server(function(request)
        if request.path == "/wait" then
          over:wait()
        end
        return { body = request.path }
      end, function(s)
        local scope <close> = task.scope()
        local waiting = scope:spawn(http.get, s.url .. "/wait")
        for i = 1, 20 do
          assert.equal("/" .. i, http.get(s.url .. "/" .. i).body)
        end
        assert.equal("waiting", waiting:status())
        over:set()
        assert.equal("/wait", waiting:wait().body)
      end)
    end)

    it("can be cut, dropped or reset", function()
      with_server(function(request)
        if request.path == "/cut" then
          return { body = ("x"):rep(5000), truncate = 1234 }
        end
        return { [request.path:sub(2)] = true }
      end, function(s)
        local head, body = talk(s, "GET /cut HTTP/1.1\r\nHost: h\r\n\r\n"):match("^(.-)\r\n\r\n(.*)$")
        assert.matches("Content%-Length: 5000", head)
        assert.equal(1234, #body)
        local text, err = talk(s, "GET /drop HTTP/1.1\r\nHost: h\r\n\r\n")
        assert.equal("", text)
        assert.is_nil(err)
        text, err = talk(s, "GET /reset HTTP/1.1\r\nHost: h\r\n\r\n")
        assert.equal("", text)
        assert.matches("ECONNRESET", err)
      end)
    end)
  end)

  describe("the protocol", function()
    it("keeps connections, and closes them when asked", function()
      with_server(function(request)
        return { body = request.path }
      end, function(s)
        local text =
          talk(s, "GET /1 HTTP/1.1\r\nHost: h\r\n\r\nGET /2 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert.matches("/1HTTP/1.1 200.*/2$", text)
        text = talk(s, "GET /1 HTTP/1.0\r\n\r\n")
        assert.matches("/1$", text)
      end)
    end)

    it("says 100 Continue before it takes a body, and takes chunks", function()
      with_server(function(request)
        return { body = request.body }
      end, function(s)
        local text = talk(
          s,
          "PUT / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n",
          "100 Continue\r\n\r\n"
        )
        assert.matches("^HTTP/1.1 100 Continue\r\n\r\n", text)
        text = talk(
          s,
          "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            .. "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert.matches("\r\n\r\nabcde$", text)
      end)
    end)

    it("refuses a body that is too large before it has come", function()
      local called = false
      with_server({
        max_body = 1000,
        handler = function()
          called = true
          return {}
        end,
      }, function(s)
        local text = talk(s, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n")
        assert.matches("^HTTP/1.1 413", text)
        assert.equal(
          "",
          (
            talk(
              s,
              "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
                .. "3e9\r\n"
                .. ("x"):rep(1001)
                .. "\r\n0\r\n\r\n"
            )
          )
        )
        assert.is_false(called)
        assert.equal(200, http.request({ method = "PUT", url = s.url, body = ("x"):rep(1000) }).status)
      end)
    end)

    it("survives what is no HTTP, and headers without end", function()
      with_server(function()
        return { body = "ok" }
      end, function(s)
        local none = talk(s, "nonsense\r\n\r\n")
        assert.is_true(none == "" or none:find("^HTTP/1.1 4") ~= nil)
        talk(s, "\22\3\1\2\0\1\0\1\252\3\3\r\n\r\n")
        local text =
          talk(s, "GET / HTTP/1.1\r\nHost: h\r\n" .. ("X-Y: " .. ("z"):rep(1000) .. "\r\n"):rep(200))
        assert.is_true(text == "" or text:find("^HTTP/1.1 4") ~= nil)
        assert.equal("ok", http.get(s.url).body)
      end)
    end)

    it("hands an upgraded connection over, with what came early", function()
      with_server(function(request)
        assert(request.headers.upgrade == "echo")
        return {
          headers = { Upgrade = "echo" },
          upgrade = function(fd, early)
            local tcp = uv.new_tcp()
            assert(tcp:open(fd))
            tcp:write("early:" .. early)
            tcp:read_start(function(_, data)
              if data then
                tcp:write(data:upper())
              else
                tcp:close()
              end
            end)
          end,
        }
      end, function(s)
        local got, ended = {}, task.event()
        local tcp = uv.new_tcp()
        tcp:connect("127.0.0.1", s.port, function()
          tcp:read_start(function(_, data)
            got[#got + 1] = data
            local text = table.concat(got)
            if text:find("early:x", 1, true) and not text:find("LATER", 1, true) then
              tcp:write("later")
            elseif not data or text:find("LATER", 1, true) then
              ended:set()
            end
          end)
          tcp:write("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nx")
        end)
        task.timeout(60, ended.wait, ended)
        tcp:close()
        local text = table.concat(got)
        assert.matches("^HTTP/1.1 101", text)
        assert.matches("\r\n\r\nearly:xLATER$", text)
        task.sleep(0.02)
      end)
    end)

    it("serves curl", function()
      if not support.program("curl") then
        pending("curl is not installed")
        return
      end
      with_server(function(request)
        return { status = 201, body = request.method .. " " .. request.target .. " " .. #request.body }
      end, function(s)
        support.with_directory(function(directory)
          local path = support.write_file(directory .. "/big", ("x"):rep(3000000))
          local out = directory .. "/out"
          local child = support.start("/usr/bin/curl", {
            "-s",
            "-o",
            out,
            "-X",
            "PUT",
            "-H",
            "Expect: 100-continue",
            "--data-binary",
            "@" .. path,
            s.url .. "/%2f?q",
          })
          child.ended:wait()
          getmetatable(child).__close(child)
          local file = assert(io.open(out))
          assert.equal("PUT /%2f?q 3000000", file:read("a"))
          file:close()
        end)
      end)
    end)
  end)

  describe("failures of a handler", function()
    --- What a handler's failure makes of the answer, and what is reported.
    local function failing(handler, deadline)
      local reported, response = {}, nil
      with_server({
        handler = handler,
        deadline = deadline,
        on_error = function(err)
          reported[#reported + 1] = errors.text(err)
        end,
      }, function(s)
        response = http.get(s.url)
        task.yield()
      end)
      return response, reported
    end

    it("give 500 without the reason, which is reported", function()
      for _, case in ipairs {
        {
          function()
            error("hunter2")
          end,
          "hunter2",
        },
        {
          function()
            error({})
          end,
          "{",
        },
        { function() end, "must return a table" },
        {
          function()
            return { statsu = 200 }
          end,
          "statsu",
        },
        {
          function()
            return { headers = { "x" } }
          end,
          "header 1",
        },
        {
          function()
            return { headers = { ["Bad\nName"] = "x" } }
          end,
          "header",
        },
        {
          function()
            return { status = 42 }
          end,
          "status",
        },
      } do
        local response, reported = failing(case[1])
        assert.equal(500, response.status)
        assert.is_nil(response.body:find("hunter2", 1, true))
        assert.equal(1, #reported)
        assert.matches(case[2], reported[1], 1, true)
      end
    end)

    it("give 503 when its time is over", function()
      local response, reported = failing(function()
        task.sleep(60)
      end, 0.1)
      assert.equal(503, response.status)
      assert.equal(1, #reported)
    end)

    it("cut an answer that was begun", function()
      local err
      local reported = 0
      with_server({
        handler = function()
          return {
            body = function(write)
              write("begun")
              error("no further")
            end,
          }
        end,
        on_error = function()
          reported = reported + 1
        end,
      }, function(s)
        err = raised(http.get, s.url)
      end)
      assert.is_true(errors.is(err, "closed", "protocol", "reset"), tostring(err))
      assert.equal(1, reported)
    end)

    it("do not include a client that leaves in the middle", function()
      local reported, ended = 0, task.event()
      with_server({
        handler = function()
          return {
            body = function(write)
              local ok, err = pcall(function()
                while true do
                  write(("x"):rep(65536))
                end
              end)
              ended:set()
              assert(not ok)
              error(err, 0)
            end,
          }
        end,
        on_error = function()
          reported = reported + 1
        end,
      }, function(s)
        talk(s, "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "xxxx")
        task.timeout(60, ended.wait, ended)
        task.yield()
      end)
      assert.equal(0, reported)
    end)
  end)

  describe("closing", function()
    it("cancels handlers, cuts connections and lets the port go", function()
      local begun, cancelled, port = 0, 0, nil
      local errs = {}
      task.run(function()
        local scope <close> = task.scope()
        local s = server.listen {
          handler = function(request)
            begun = begun + 1
            local _ <close> = setmetatable({}, {
              __close = function()
                cancelled = cancelled + 1
              end,
            })
            if request.path == "/stream" then
              return {
                body = function(write)
                  while true do
                    write("x")
                    task.sleep(0.01)
                  end
                end,
              }
            end
            task.sleep(60)
            return {}
          end,
        }
        port = s.port
        local clients = {}
        for i = 1, 20 do
          clients[i] = scope:spawn(pcall, http.get, s.url .. (i % 2 == 0 and "/stream" or "/wait"))
        end
        patience.wait_for("20 requests", function()
          return begun == 20
        end)
        task.timeout(60, s.close, s)
        s:close()
        for i, client in ipairs(clients) do
          local ok, err = client:wait()
          assert.is_false(ok)
          errs[i] = err
        end
      end)
      for _, err in ipairs(errs) do
        assert.is_true(errors.is(err, "closed", "reset", "protocol"), tostring(err))
      end
      assert.equal(20, cancelled)
      assert.is_true(errors.is(raised(http.get, ("http://127.0.0.1:%d"):format(port)), "refused"))
    end)

    it("happens with its scope", function()
      local port
      local scope_error = raised(task.run, function()
        local _ <close> = task.scope()
        port = server.listen({ handler = function() end }).port
        error("over")
      end)
      assert.matches("over", errors.text(scope_error), 1, true)
      assert.is_true(errors.is(raised(http.get, ("http://127.0.0.1:%d"):format(port)), "refused"))
    end)
  end)

  describe("the engine's part", function()
    --- Run `fn(url, server)` with a bare engine server.
    local function with_core(options, on_request, fn)
      local s = core.start(options, on_request)
      local port = s:listen("127.0.0.1", 0)
      local ok, err = pcall(fn, ("http://127.0.0.1:%d"):format(port), s)
      task.await(function(done)
        if not s:stop(done) then
          done()
        end
      end)
      if not ok then
        error(err, 0)
      end
    end

    it("answers 500 for a request that was forgotten, 503 for one whose deadline passed", function()
      local asked = false
      with_core({ deadline_ms = 60000 }, function()
        asked = true
      end, function(url)
        local scope <close> = task.scope()
        local forgotten = scope:spawn(http.get, url .. "/forgotten")
        patience.wait_for("the request", function()
          return asked
        end)
        collectgarbage()
        collectgarbage()
        assert.equal(500, forgotten:wait().status)
      end)
      local kept = {}
      with_core({ deadline_ms = 100 }, function(exchange)
        kept[1] = exchange
      end, function(url)
        assert.equal(503, http.get(url .. "/kept").status)
        assert.is_false(kept[1]:respond(200, nil, "too late"))
      end)
    end)

    it("answers once, and says so", function()
      local results = {}
      with_core({}, function(exchange)
        results[1] = exchange:respond(200, nil, "first")
        results[2] = exchange:respond(200, nil, "second")
        results[3] = exchange:start(200)
        results[4] = exchange:write("x", print)
      end, function(url)
        assert.equal("first", http.get(url).body)
        assert.same({ true, false, false, false }, results)
      end)
    end)

    it("forgets an answer that was refused", function()
      with_core({}, function(exchange, request)
        local ok, err = pcall(exchange.respond, exchange, 200, { { "no name\n", "x" } }, "refused", 3)
        assert(not ok and err:find("not allowed"), err)
        if request.target == "/streamed" then
          exchange:start(200)
          exchange:write("hello", function() end)
          exchange:finish()
        else
          exchange:respond(200, nil, "whole")
        end
      end, function(url)
        assert.equal("hello", http.get(url .. "/streamed").body)
        assert.equal("whole", http.get(url .. "/whole").body)
      end)
    end)

    it("refuses numbers that libmicrohttpd cannot hold", function()
      for _, name in ipairs { "idle_ms", "max_connections" } do
        for _, value in ipairs { math.maxinteger, (1 << 32) * 1000, -1, 0.5 } do
          local err = raised(core.start, { [name] = value }, print)
          assert.matches("option '" .. name .. "' must be an integer from 0 to %d+$", err)
        end
      end
    end)

    it("refuses an option that it does not know", function()
      assert.matches("unknown option 'max_bodies'", raised(core.start, { max_bodies = 1 }, print))
    end)

    it("stops with suspended connections, and at once a second time", function()
      local kept = {}
      with_core({}, function(exchange)
        kept[#kept + 1] = exchange
        if #kept % 2 == 0 then
          exchange:start(200)
        end
      end, function(url, s)
        local scope <close> = task.scope()
        local clients = {}
        for i = 1, 10 do
          clients[i] = scope:spawn(pcall, http.get, url)
        end
        patience.wait_for("ten requests", function()
          return #kept == 10
        end)
        task.timeout(60, task.await, function(done)
          assert.is_true(s:stop(done))
        end)
        assert.is_false(s:stop(print))
        for _, client in ipairs(clients) do
          assert.is_false((client:wait()))
        end
        assert.is_false(kept[1]:respond(200, nil, ""))
      end)
    end)
  end)

  it("holds 500 suspended connections at once", function()
    local now, enough = 0, task.event()
    with_server(function(request)
      now = now + 1
      if now > 250 then
        enough:set()
      end
      assert(pcall(task.timeout, 25, enough.wait, enough), "only " .. now .. " at once")
      now = now - 1
      return { body = request.path }
    end, function(s)
      local paths = {}
      for i = 1, 500 do
        paths[i] = "/" .. i
      end
      for i, response in
        ipairs(task.map(paths, function(path)
          return http.get(s.url .. path)
        end, 500))
      do
        assert.equal("/" .. i, response.body)
      end
    end)
  end)
end)
