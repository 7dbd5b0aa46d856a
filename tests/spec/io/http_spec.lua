local crypto = require("ciranda.io.crypto")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local http = require("ciranda.io.http")
local process = require("ciranda.io.process")
local server = require("ciranda.io.server")
local task = require("ciranda.task")
local uv = require("luv")

local environment = dofile("tests/fixtures/environment.lua")
local patience = dofile("tests/fixtures/patience.lua")
local support = dofile("tests/spec/io/http_support.lua")
local raised = support.raised

local OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

--- Raised within the time, with the code.
local function fails(code, fn, ...)
  local err = raised(fn, ...)
  assert.is_true(errors.is(err, code), ("expected %s, got %s: %s"):format(code, err.code, tostring(err)))
  return err
end

--- Run `fn(s)` with a server and its handler.
local function with_server(handler, fn, options)
  local _ <close> = task.scope()
  options = options or {}
  options.handler = handler
  local s <close> = server.listen(options)
  fn(s)
end

local function echo(request)
  local headers = {}
  for _, pair in ipairs(request.headers) do
    headers[#headers + 1] = pair[1] .. ": " .. pair[2]
  end
  return {
    json = { method = request.method, target = request.target, headers = headers, body = request.body },
  }
end

--- Cancel a request after some time; it must end quickly, as a cancelled task.
local function cancels(seconds, options)
  local scope <close> = task.scope()
  local running = scope:spawn(http.request, options)
  task.sleep(seconds)
  assert.equal("waiting", running:status())
  running:cancel()
  task.timeout(20, function()
    local err = raised(running.wait, running)
    assert.is_true(errors.is(err, "cancelled"))
  end)
  assert.equal("cancelled", running:status())
end

describe("ciranda.io.http", function()
  describe("a request", function()
    it("carries method, query, headers and body as they were given", function()
      with_server(echo, function(s)
        local got = http
          .request({
            method = "PATCH",
            url = s.url .. "/a%2Fb/../c?x=1",
            query = { b = { "2", "3" }, a = "ä &" },
            headers = { Accept = "text/plain", ["X-Two"] = { "1", "2" }, ["X-Empty"] = "" },
            body = "a\0b\r\n",
          })
          :json()
        assert.equal("PATCH", got.method)
        assert.equal("/a%2Fb/../c?x=1&a=%C3%A4%20%26&b=2&b=3", got.target)
        assert.equal("a\0b\r\n", got.body)
        local lines = table.concat(got.headers, "\n") .. "\n"
        assert.matches("Accept: text/plain\n", lines, 1, true)
        assert.matches("X-Two: 1\nX-Two: 2\n", lines, 1, true)
        assert.matches("X-Empty: \n", lines, 1, true)
        assert.matches("User-Agent: ciranda/", lines, 1, true)
        assert.is_nil(lines:find("Content-Type", 1, true))
        assert.is_nil(lines:find("Expect", 1, true))
      end)
    end)

    it("sends JSON and forms with their content types", function()
      with_server(echo, function(s)
        local got = http.post(s.url, { a = { 1, 2 } }):json()
        assert.equal('{"a":[1,2]}', got.body)
        assert.matches("Content-Type: application/json", table.concat(got.headers, "\n"), 1, true)
        got = http.request({ url = s.url, form = { grant_type = "a:b", z = 1 } }):json()
        assert.equal("POST", got.method)
        assert.equal("grant_type=a%3Ab&z=1", got.body)
        assert.matches("application/x-www-form-urlencoded", table.concat(got.headers, "\n"), 1, true)
      end)
    end)

    it("sends an empty body with its length", function()
      local seen
      local raw <close> = support.raw(function(client)
        client:read_start(function(_, data)
          if data then
            seen = data
            client:write(OK)
          end
        end)
      end)
      http.request { method = "PUT", url = raw.url, headers = { ["Content-Range"] = "bytes */10" }, body = "" }
      assert.matches("^PUT / HTTP/1.1\r\n", seen)
      assert.matches("\r\nContent%-Length: 0\r\n", seen)
      assert.matches("\r\nContent%-Range: bytes %*/10\r\n", seen)
    end)

    it("gives statuses as data, headers by name and in order", function()
      with_server(function(request)
        return {
          status = tonumber(request.path:sub(2)),
          headers = { { "X-B", "1" }, { "X-A", "2" }, { "x-b", "3" } },
          body = "body",
        }
      end, function(s)
        for _, status in ipairs { 200, 201, 301, 308, 401, 404, 412, 429, 500, 503 } do
          local response = http.get(s.url .. "/" .. status)
          assert.equal(status, response.status)
          assert.equal("body", response.body)
          assert.equal("1", response.headers["x-B"])
          assert.is_nil(response.headers["x-c"])
          local names = {}
          for _, pair in ipairs(response.headers) do
            if pair[1]:lower():find("^x%-") then
              names[#names + 1] = pair[1] .. pair[2]
            end
          end
          assert.same({ "X-B1", "X-A2", "x-b3" }, names)
        end
      end)
    end)

    it("does not follow redirects", function()
      with_server(function(request)
        if request.path == "/" then
          return { status = 302, headers = { Location = "/elsewhere" } }
        end
        return { body = "followed" }
      end, function(s)
        local response = http.get(s.url, { headers = { Authorization = "Bearer secret" } })
        assert.equal(302, response.status)
        assert.equal("/elsewhere", response.headers.location)
      end)
    end)

    it("takes no proxy from the environment, and uses one that is given", function()
      with_server(echo, function(s)
        local nobody = "http://127.0.0.1:1"
        local _ <close> = environment.set({ http_proxy = nobody, all_proxy = nobody })
        assert.equal("/direct", http.get(s.url .. "/direct"):json().target)
        local proxied = http.get("http://host.invalid/through", { proxy = s.url }):json()
        assert.equal("http://host.invalid/through", proxied.target)
        fails("refused", http.get, s.url, { proxy = "http://127.0.0.1:1" })
      end)
    end)

    it("reaches a server behind a socket in the file system", function()
      support.with_directory(function(directory)
        local path = directory .. "/socket"
        local pipe = uv.new_pipe()
        assert(pipe:bind(path))
        local seen
        pipe:listen(8, function()
          local client = uv.new_pipe()
          pipe:accept(client)
          client:read_start(function(_, data)
            if data then
              seen = data
              client:write(OK, function()
                client:close()
              end)
            end
          end)
        end)
        assert.equal("ok", http.get("http://anything/path", { unix_socket = path }).body)
        assert.matches("^GET /path HTTP/1.1\r\nHost: anything\r\n", seen)
        pipe:close()
        fails("refused", http.get, "http://anything/", { unix_socket = directory .. "/none" })
      end)
    end)

    it("keeps connections", function()
      with_server(echo, function(s)
        assert.is_false(http.get(s.url).reused)
        assert.is_true(http.get(s.url).reused)
        assert.equal("1.1", http.get(s.url).http_version)
      end)
    end)

    it("begins again on a fresh connection when a kept one is dead", function()
      local count = 0
      local raw <close> = support.answering(OK, function(client)
        count = count + 1
        if count == 1 then
          uv.new_timer():start(20, 0, function()
            client:close()
          end)
        end
      end)
      assert.equal("ok", http.get(raw.url).body)
      task.sleep(0.06)
      assert.equal("ok", http.get(raw.url).body)
    end)

    it("sends what changes something once, also when a kept connection ends without an answer", function()
      local requests = {}
      local raw <close> = support.raw(function(client)
        client:read_start(function(_, data)
          if data then
            requests[#requests + 1] = data:match("^%u+")
            if #requests == 1 then
              client:write(OK)
            else
              client:close()
            end
          end
        end)
      end)
      for _, case in ipairs {
        { "POST", nil, 1 },
        { "PATCH", nil, 1 },
        { "PUT", true, 1 },
        { "PUT", nil, 2 },
        { "POST", false, 2 },
      } do
        requests = {}
        http.get(raw.url)
        local err =
          fails("closed", http.request, { method = case[1], once = case[2], url = raw.url, body = "x" })
        assert.equal(case[3], #requests - 1, case[1])
        if case[3] == 1 then
          assert.matches("without an answer", tostring(err), 1, true)
        end
      end
    end)

    it("reads a chunked body, skips a 100 Continue and ends with the connection in HTTP/1.0", function()
      local chunked <close> = support.answering(
        "HTTP/1.1 100 Continue\r\nX-No: 1\r\n\r\nHTTP/1.1 200 OK\r\nX-Yes: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
          .. "3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
      )
      local response = http.get(chunked.url)
      assert.equal("abcde", response.body)
      assert.equal("1", response.headers["x-yes"])
      assert.is_nil(response.headers["x-no"])
      local old <close> = support.answering("HTTP/1.0 200 OK\r\n\r\nto the end", function(client)
        client:close()
      end)
      response = http.get(old.url)
      assert.equal("to the end", response.body)
      assert.equal("1.0", response.http_version)
    end)

    it("answers HEAD without waiting for a body", function()
      with_server(function()
        return { body = ("x"):rep(1000) }
      end, function(s)
        local response = http.request { method = "HEAD", url = s.url }
        assert.equal("1000", response.headers["content-length"])
        assert.equal("", response.body)
      end)
    end)

    it("decodes what it asked to be compressed", function()
      if not support.program("gzip") then
        pending("gzip is not installed")
        return
      end
      local pipe = io.popen("printf '%s' hello | gzip -c")
      local packed = pipe:read("a")
      pipe:close()
      with_server(function(request)
        assert(request.headers["accept-encoding"] == "gzip")
        return { headers = { ["Content-Encoding"] = "gzip" }, body = packed }
      end, function(s)
        assert.equal("hello", http.get(s.url, { accept_encoding = "gzip" }).body)
      end)
    end)
  end)

  describe("a body from a file", function()
    it("is sent whole or in part", function()
      support.with_directory(function(directory)
        local data = {}
        for i = 1, 100000 do
          data[i] = ("%07d\n"):format(i)
        end
        local text = table.concat(data)
        local path = support.write_file(directory .. "/data", text)
        with_server(function(request)
          return { body = request.body, headers = { ["X-Length"] = request.headers["content-length"] } }
        end, function(s)
          local response = http.request { method = "PUT", url = s.url, file = { path = path } }
          assert.equal(tostring(#text), response.headers["x-length"])
          assert.is_true(response.body == text)
          local part =
            http.request { method = "PUT", url = s.url, file = { path = path, offset = 9, length = 300000 } }
          assert.is_true(part.body == text:sub(10, 9 + 300000))
          local empty = http.request { method = "PUT", url = s.url, file = { path = path, length = 0 } }
          assert.equal("0", empty.headers["x-length"])
        end)
      end)
    end)

    it("fails with the file's name when it cannot be read", function()
      support.with_directory(function(directory)
        local path = support.write_file(directory .. "/data", "12345")
        local url = "http://127.0.0.1:1/"
        local err = fails("not_found", http.request, { url = url, file = { path = directory .. "/none" } })
        assert.matches(directory .. "/none", tostring(err), 1, true)
        fails("invalid", http.request, { url = url, file = { path = directory } })
        fails("invalid", http.request, { url = url, file = { path = path, offset = 4, length = 2 } })
      end)
    end)

    it("can be cancelled while the server does not take it", function()
      support.with_directory(function(directory)
        local path = support.write_file(directory .. "/data", ("x"):rep(6 << 20))
        local raw <close> = support.raw(function() end)
        cancels(0.1, { method = "PUT", url = raw.url, file = { path = path } })
        local err = fails(
          "timeout",
          http.request,
          { method = "PUT", url = raw.url, file = { path = path }, timeout = 0.2 }
        )
        assert.matches("PUT http://127.0.0.1", tostring(err), 1, true)
      end)
    end)
  end)

  it("does not wait for whoever might write into a FIFO that is given as the body", function()
    local binary = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
    local fifo = os.tmpname()
    os.remove(fifo)
    assert(os.execute("mkfifo " .. fifo))
    local chunk = ([[require("ciranda.core.http").request({ url = "http://127.0.0.1:1/", body_file = %q },
      function(err) print(err.code, err.message) os.exit(0) end)
      require("ciranda.task").sleep(60)]]):format(fifo)
    local result = process.run { "timeout", "-s", "KILL", "20", binary, "-e", chunk, timeout = 40 }
    os.remove(fifo)
    assert.matches("^invalid\t.*not a regular file", result.stdout)
  end)

  describe("streaming", function()
    it("gives the head first, then every byte once, and lets the server wait", function()
      local written, expected = 0, crypto.start("md5")
      with_server(function()
        return {
          headers = { ["X-Head"] = "1" },
          body = function(write)
            for i = 1, 400 do
              local piece = ("%04d"):format(i):rep(16384)
              expected:update(piece)
              write(piece)
              written = i
            end
          end,
        }
      end, function(s)
        local head, count, most, seen = nil, 0, 0, 0
        local got = crypto.start("md5")
        local response = http.request {
          url = s.url,
          on_response = function(r)
            assert.equal(0, count)
            head = r
          end,
          on_data = function(chunk)
            count = count + 1
            got:update(chunk)
            seen = seen + #chunk
            most = math.max(most, written * 65536 - seen)
            if count == 1 then
              task.sleep(0.2)
            end
          end,
        }
        assert.equal(200, head.status)
        assert.equal("1", head.headers["x-head"])
        assert.is_nil(response.body)
        assert.equal(400 * 65536, response.received)
        assert.equal(expected:finish(), got:finish())
        -- 26 MB in all: without back-pressure the server would have finished during the first pause
        assert.is_true(most < 16 << 20, "the server was " .. most .. " bytes ahead")
      end)
    end)

    it("ends the request when a callback raises, and raises what it raised", function()
      with_server(function()
        return {
          body = function(write)
            while true do
              write(("x"):rep(65536))
            end
          end,
        }
      end, function(s)
        local marker = {}
        local err = raised(http.request, {
          url = s.url,
          on_data = function()
            error(marker)
          end,
        })
        assert.equal(marker, err)
      end)
    end)

    it("delivers what came before the connection broke, then raises", function()
      with_server(function()
        return { body = ("x"):rep(1000), truncate = 400 }
      end, function(s)
        local got = {}
        local err = fails("closed", http.request, {
          url = s.url,
          on_data = function(chunk)
            got[#got + 1] = chunk
          end,
        })
        assert.equal(400, #table.concat(got))
        assert.equal(400, err.received)
        assert.equal(200, err.status)
      end)
    end)
  end)

  describe("failures", function()
    it("are refused, unresolved, reset, closed or truncated, and say so", function()
      local err = fails("refused", http.get, "http://127.0.0.1:1/path?token=secret")
      assert.matches("GET http://127.0.0.1:1/path: ", tostring(err), 1, true)
      -- No name has so long a part, which is known without asking a name server: one that is slow is another failure.
      local name = ("x"):rep(64) .. ".invalid"
      err = fails("resolve", http.get, ("http://%s/"):format(name))
      assert.matches(name, tostring(err), 1, true)
      local silent <close> = support.raw(function(client)
        client:read_start(function()
          client:close()
        end)
      end)
      fails("closed", http.get, silent.url)
      with_server(function(request)
        return { [request.path:sub(2)] = true }
      end, function(s)
        fails("reset", http.get, s.url .. "/reset")
        fails("closed", http.get, s.url .. "/drop")
      end)
      local short <close> = support.answering(
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        function(client)
          client:close()
        end
      )
      err = fails("closed", http.get, short.url)
      assert.equal("body", err.phase)
    end)

    it("time out in every phase, naming it", function()
      --- The error of a request that has come as far as `phase` when its time is over.
      local function times_out(phase, url, name)
        local err = patience.within_more(0.1, function(seconds)
          local err = fails("timeout", http.get, url, { [name or "timeout"] = seconds })
          return err.phase == phase, err
        end)
        assert.equal(phase, err.phase, tostring(err))
        return err
      end
      local raw <close> = support.raw(function() end)
      times_out("answer", raw.url)
      local headers <close> = support.answering("HTTP/1.1 200 OK\r\nX-Slow")
      times_out("headers", headers.url)
      local body <close> = support.answering("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
      assert.matches("body", tostring(times_out("body", body.url)), 1, true)
      local secure = raw.url:gsub("^http", "https")
      times_out("tls", secure)
      times_out("tls", secure, "connect_timeout")
    end)

    it("give up a transfer that does not move", function()
      local body <close> = support.answering("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
      fails("timeout", http.get, body.url, { timeout = false, idle_timeout = 1 })
    end)

    it("refuse answers that are none, or too large", function()
      local smtp <close> = support.answering("220 mail ready\r\n")
      fails("protocol", http.get, smtp.url)
      local huge <close> = support.answering("HTTP/1.1 200 OK\r\nX: " .. ("y"):rep(200000) .. "\r\n\r\n")
      fails("protocol", http.get, huge.url)
      local many = {}
      for i = 1, 20000 do
        many[i] = ("X-%d: %s\r\n"):format(i, ("y"):rep(20))
      end
      local flood <close> = support.answering("HTTP/1.1 200 OK\r\n" .. table.concat(many) .. "\r\n")
      local err = fails("protocol", http.get, flood.url)
      assert.matches("headers", tostring(err), 1, true)
      with_server(function()
        return { body = ("x"):rep(1001) }
      end, function(s)
        err = fails("protocol", http.get, s.url, { max_body = 1000 })
        assert.matches("1000 bytes", tostring(err), 1, true)
        assert.equal(1001, #http.get(s.url, { max_body = 1001 }).body)
      end)
    end)

    it("never show credentials", function()
      local address = "http://user:hunter2@127.0.0.1:1/p?access_token=hunter2#hunter2"
      for _, text in ipairs {
        tostring(fails("refused", http.get, address, { headers = { Authorization = "Bearer hunter2" } })),
        fails("refused", http.get, address):describe(),
      } do
        assert.is_nil(text:find("hunter2", 1, true), text)
      end
    end)
  end)

  describe("misuse", function()
    it("raises at once and names the option", function()
      local url = "http://127.0.0.1:1/"
      for option, case in pairs {
        timeot = { url = url, timeot = 1 },
        url = { url = "ftp://example.com/" },
        timeout = { url = url, timeout = 0 },
        body = { url = url, body = "x", json = {} },
        ["white space"] = { url = url .. "a b" },
        method = { url = url, method = "get\r\nX: 1" },
        header = { url = url, headers = { A = "b\r\nC: d" } },
        ["A"] = { url = url, headers = { { "A" } } },
        ["header 1"] = { url = url, headers = { { " A", "goes on with the line before" } } },
      } do
        local err = raised(http.request, case)
        assert.matches(option, errors.text(err), 1, true)
      end
      assert.is_true(errors.is(raised(http.request, { url = url, timeot = 1 }), "misuse"))
    end)

    it("does not show the value of a header that is refused", function()
      local err = raised(
        http.request,
        { url = "http://127.0.0.1:1/", headers = { Authorization = "Bearer hunter2\r\n" } }
      )
      assert.is_nil(errors.text(err):find("hunter2", 1, true))
    end)
  end)

  describe("cancelling", function()
    it("works while a name is resolved", function()
      local scope <close> = task.scope()
      local tasks = {}
      for i = 1, 8 do
        tasks[i] = scope:spawn(pcall, http.get, ("http://host%d.invalid/"):format(i))
      end
      task.yield()
      local before = uv.hrtime()
      for _, each in ipairs(tasks) do
        each:cancel()
        local ok, err = each:wait()
        assert.is_false(ok)
        assert.is_true(errors.is(err, "cancelled", "resolve"))
      end
      assert.is_true(uv.hrtime() - before < 4e9) -- a dead resolver takes seconds; curl without QUICK_EXIT waits for it
    end)

    it("works while connecting", function()
      -- a listener whose queue is full drops what asks to connect
      local listener = uv.new_tcp()
      listener:bind("127.0.0.1", 0)
      listener:listen(1, function() end)
      local port = listener:getsockname().port
      local fillers = {}
      for i = 1, 8 do
        fillers[i] = uv.new_tcp()
        fillers[i]:connect("127.0.0.1", port)
      end
      task.sleep(0.05)
      local url = ("http://127.0.0.1:%d/"):format(port)
      cancels(0.05, { url = url })
      local err = fails("timeout", http.get, url, { connect_timeout = 0.1 })
      assert.equal("connect", err.phase)
      for _, filler in ipairs(fillers) do
        filler:close()
      end
      listener:close()
    end)

    it("works in the TLS handshake, before the answer, in its headers and in its body", function()
      local raw <close> = support.raw(function() end)
      cancels(0.05, { url = (raw.url:gsub("^http", "https")) })
      cancels(0.05, { url = raw.url })
      local headers <close> = support.answering("HTTP/1.1 200 OK\r\nX-Slow")
      cancels(0.05, { url = headers.url })
      local body <close> = support.answering("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
      cancels(0.05, { url = body.url })
    end)

    it("works while a stream is read, while its reader waits, and with a paused one", function()
      with_server(function()
        return {
          body = function(write)
            while true do
              write(("x"):rep(65536))
              task.sleep(0.01)
            end
          end,
        }
      end, function(s)
        cancels(0.1, { url = s.url, on_data = function() end })
        cancels(0.1, {
          url = s.url,
          on_data = function()
            task.sleep(60)
          end,
        })
        fails("timeout", task.timeout, 0.1, http.request, { url = s.url, on_data = function() end })
      end)
    end)

    it("leaves other requests alone", function()
      with_server(function(request)
        task.sleep(request.path == "/slow" and 0.1 or 60)
        return { body = "done" }
      end, function(s)
        local scope <close> = task.scope()
        local slow = scope:spawn(http.get, s.url .. "/slow")
        local stuck = scope:spawn(http.get, s.url .. "/stuck")
        task.sleep(0.02)
        stuck:cancel()
        assert.equal("done", slow:wait().body)
      end)
    end)
  end)

  it("makes 500 requests at once", function()
    local now, enough = 0, task.event()
    with_server(function(request)
      now = now + 1
      if now > 100 then
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
      local responses = task.map(paths, function(path)
        return http.get(s.url .. path)
      end, 500)
      for i, response in ipairs(responses) do
        assert.equal("/" .. i, response.body)
      end
    end)
  end)

  it("lets no descriptor reach a child process", function()
    with_server(function()
      task.sleep(60)
      return {}
    end, function(s)
      local scope <close> = task.scope()
      local waiting = scope:spawn(http.get, s.url)
      local resolving = scope:spawn(pcall, http.get, "http://host.invalid/")
      task.sleep(0.02)
      local out = uv.new_pipe()
      local text, ended = {}, task.event()
      local child = support.start("/bin/ls", { "-l", "/proc/self/fd" }, { stdout = out })
      out:read_start(function(_, data)
        if data then
          text[#text + 1] = data
        else
          ended:set()
        end
      end)
      ended:wait()
      out:close()
      getmetatable(child).__close(child)
      waiting:cancel()
      resolving:cancel()
      -- its own standard output is a socket pair of libuv's; a second socket would be one of ours
      local _, sockets = table.concat(text):gsub("socket:", "")
      assert.is_true(sockets <= 1, table.concat(text))
    end)
  end)

  it("lets the program end with requests and servers under way", function()
    local script = [[
      local core, task = require("ciranda.core.http"), require("ciranda.task")
      local http_server = require("ciranda.core.server")
      local kept, told = {}, 0
      local s = http_server.start({}, function(exchange, request)
        kept[#kept + 1] = exchange
        if request.target == "/stream" then
          exchange:start(200)
          exchange:write("abc", function() end)
        end
      end)
      local address = "http://127.0.0.1:" .. s:listen("127.0.0.1", 0)
      for _, path in ipairs { "/wait", "/stream", "/wait", "/stream" } do
        core.request({ url = address .. path, on_data = function() end }, function(err)
          told = told + 1
          assert(err.code == "cancelled")
          if told == 4 then
            core.request({ url = address }, function(late) print(late.code) end)
          end
        end)
      end
      task.sleep(0.05)
      os.exit(3)
    ]]
    support.with_directory(function(directory)
      local path = support.write_file(directory .. "/script.lua", script)
      local result = process.run { engine.executable, path, timeout = 20 }
      assert.equal("", result.stderr)
      assert.equal("cancelled\n", result.stdout)
      assert.equal(3, result.code)
    end)
  end)

  describe("with servers that others wrote", function()
    it("fetches from python's http.server", function()
      local python = support.program("python3")
      if not python then
        pending("python3 is not installed")
        return
      end
      support.with_directory(function(directory)
        local data = ("0123456789"):rep(100000)
        support.write_file(directory .. "/data.bin", data)
        local port = support.free_port()
        local _ <close> = support.start(
          python,
          { "-m", "http.server", "--bind", "127.0.0.1", "--directory", directory, tostring(port) }
        )
        support.wait_for_port(port)
        local url = ("http://127.0.0.1:%d"):format(port)
        local response = http.get(url .. "/data.bin")
        assert.equal(200, response.status)
        assert.is_true(response.body == data)
        assert.equal(404, http.get(url .. "/none").status)
        local size = 0
        http.request {
          url = url .. "/data.bin",
          on_data = function(chunk)
            size = size + #chunk
          end,
        }
        assert.equal(#data, size)
      end)
    end)

    describe("over TLS and HTTP/2 (nghttpd)", function()
      --- Run `fn(url, ca_file, directory)` with a TLS server and a certificate of our own making. `arguments(port,
      --- key, certificate, directory)` are the program's.
      local function with_tls(name, arguments, fn)
        local program, openssl = support.program(name), support.program("openssl")
        if not (program and openssl) then
          pending(name .. " (packages nghttp2-server, nghttp2-proxy) or openssl is not installed")
          return
        end
        support.with_directory(function(directory)
          local key, certificate = directory .. "/key.pem", directory .. "/cert.pem"
          local making <close> = support.start(openssl, {
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            key,
            "-out",
            certificate,
          })
          making.ended:wait()
          local port = support.free_port()
          local _ <close> = support.start(program, arguments(port, key, certificate, directory))
          support.wait_for_port(port)
          fn(("https://localhost:%d"):format(port), certificate, directory)
        end)
      end

      local function with_nghttpd(fn)
        with_tls("nghttpd", function(port, key, certificate, directory)
          return { "-a", "127.0.0.1", "-d", directory, "--echo-upload", tostring(port), key, certificate }
        end, fn)
      end

      it("speaks HTTP/2 on one connection for many requests", function()
        with_nghttpd(function(url, ca_file, directory)
          local data = ("abcdefgh"):rep(20000)
          support.write_file(directory .. "/data.bin", data)
          local numbers = {}
          for i = 1, 100 do
            numbers[i] = i
          end
          local fresh = 0
          for _, response in
            ipairs(task.map(numbers, function()
              return http.get(url .. "/data.bin", { ca_file = ca_file })
            end, 100))
          do
            assert.equal("2", response.http_version)
            assert.is_true(response.body == data)
            fresh = fresh + (response.reused and 0 or 1)
          end
          assert.equal(1, fresh)
        end)
      end)

      it("speaks HTTP/1.1 when asked to (nghttpx)", function()
        with_server(echo, function(backend)
          with_tls("nghttpx", function(port, key, certificate)
            return {
              "--conf=/dev/null",
              "--workers=1",
              "--frontend=127.0.0.1," .. port,
              "--backend=127.0.0.1," .. backend.port,
              key,
              certificate,
            }
          end, function(url, ca_file)
            for _, wanted in ipairs { "2", "1.1", "2" } do
              local response = http.get(url .. "/x", { ca_file = ca_file, http2 = wanted == "2" })
              assert.equal("/x", response:json().target)
              assert.equal(wanted, response.http_version)
            end
          end)
        end)
      end)

      it("sends a file and reads it back slowly", function()
        with_nghttpd(function(url, ca_file, directory)
          local data = {}
          for i = 1, 200000 do
            data[i] = ("%07d\n"):format(i)
          end
          data = table.concat(data)
          local path = support.write_file(directory .. "/up.bin", data)
          local got = {}
          http.request {
            method = "PUT",
            url = url .. "/echo",
            ca_file = ca_file,
            file = { path = path },
            on_data = function(chunk)
              got[#got + 1] = chunk
              task.sleep(0.001)
            end,
          }
          assert.is_true(table.concat(got) == data)
        end)
      end)

      it("refuses a certificate that nobody vouches for, and a host that it does not name", function()
        with_nghttpd(function(url, ca_file)
          local err = fails("protocol", http.get, url)
          assert.matches("certificate", tostring(err):lower(), 1, true)
          assert.equal("tls", err.phase)
          fails("protocol", http.get, (url:gsub("localhost", "127.0.0.1")), { ca_file = ca_file })
          fails("io", http.get, url, { ca_file = "/nonexistent" })
        end)
      end)

      it("cancels one of many streams", function()
        with_nghttpd(function(url, ca_file, directory)
          support.write_file(directory .. "/data.bin", ("x"):rep(4 << 20))
          local scope <close> = task.scope()
          local stuck = scope:spawn(http.request, {
            url = url .. "/data.bin",
            ca_file = ca_file,
            on_data = function()
              task.sleep(60)
            end,
          })
          task.sleep(0.1)
          assert.equal("waiting", stuck:status())
          stuck:cancel()
          assert.equal(4 << 20, #http.get(url .. "/data.bin", { ca_file = ca_file, timeout = 50 }).body)
        end)
      end)
    end)
  end)
end)
