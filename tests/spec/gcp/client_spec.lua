local errors = require("ciranda.io.error")
local failure = require("ciranda.gcp.failure")
local http = require("ciranda.io.http")
local patience = dofile("tests/fixtures/patience.lua")
local task = require("ciranda.task")

local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

--- An error body as Google's APIs send it.
local function refusal(http_status, status, message, details)
  return {
    status = http_status,
    json = { error = { code = http_status, status = status, message = message, details = details } },
  }
end

--- Answers one after the other; the last for ever.
local function answers(list)
  return function(_, count)
    return list[math.min(count, #list)]
  end
end

--- Credentials whose tokens are counted.
local function counted()
  local credentials = { fetched = 0, rejected = 0 }
  function credentials.headers()
    if not credentials.token then
      credentials.fetched = credentials.fetched + 1
      credentials.token = "t" .. credentials.fetched
    end
    return { Authorization = "Bearer " .. credentials.token }, credentials.token
  end
  function credentials.reject(_, token)
    assert(token == credentials.token)
    credentials.token, credentials.rejected = nil, credentials.rejected + 1
  end
  return credentials
end

--- The failure of an answer that no server needs to give.
local function failure_of(status, body, headers)
  return failure.of_response({
    status = status,
    headers = http.headers(headers or {}),
    body = body,
    target = "GET http://h/p",
    json = function(self)
      return require("ciranda.io.json").decode(self.body, "it")
    end,
  }, 1700000000)
end

describe("ciranda.gcp.client", function()
  it("sends credentials and gives what is a success", function()
    support.with_server(answers { { status = 201, json = { a = 1 } } }, function(s, requests)
      local client = support.client { credentials = counted() }
      local value, response =
        client:json { method = "POST", url = s.url .. "/x", query = { q = 1 }, json = { b = 2 } }
      assert.same({ a = 1 }, value)
      assert.equal(201, response.status)
      assert.equal("Bearer t1", requests[1].headers.authorization)
      assert.equal("q=1", requests[1].query)
      assert.same({ b = 2 }, requests[1]:json())
      assert.equal("ciranda", requests[1].headers["user-agent"]:match("^%a+"))
    end)
  end)

  it("repeats what may be repeated", function()
    for _, status in ipairs { 408, 429, 500, 502, 503, 504 } do
      support.with_server(
        answers { { status = status }, { status = status }, { json = {} } },
        function(s, requests)
          support.client():json { url = s.url }
          assert.equal(3, #requests)
        end
      )
    end
    for _, fault in ipairs { { reset = true }, { drop = true }, { body = "12345", truncate = 2 } } do
      support.with_server(answers { fault, { json = {} } }, function(s, requests)
        support.client():json { url = s.url }
        assert.equal(2, #requests)
        support.client():json { method = "POST", url = s.url, idempotent = true }
      end)
    end
  end)

  it("does not repeat blindly what changes something", function()
    for _, fault in ipairs { { status = 503 }, { status = 500 }, { reset = true }, { drop = true } } do
      support.with_server(answers { fault, { json = {} } }, function(s, requests)
        local client = support.client()
        local err = support.raised(client.request, client, { method = "POST", url = s.url })
        assert.is_true(errors.is(err, "unavailable", "reset", "closed"), tostring(err))
        assert.equal(1, #requests)
      end)
    end
  end)

  it("repeats a change that certainly was not carried out", function()
    support.with_server(
      answers {
        refusal(429, "RESOURCE_EXHAUSTED", "Maximum number of CreateNode requests per minute"),
        { json = {} },
      },
      function(s, requests)
        support.client():json { method = "POST", url = s.url }
        assert.equal(2, #requests)
      end
    )
    local client = support.client_for(3)
    local err = fails("refused", client.request, client, { method = "POST", url = "http://127.0.0.1:1/" })
    assert.equal(3, client.calls)
    assert.matches("tried %d+ times", tostring(err))
  end)

  it("does not repeat what waiting does not mend", function()
    for _, case in ipairs {
      { "invalid", refusal(400, "INVALID_ARGUMENT", "no") },
      { "precondition", refusal(400, "FAILED_PRECONDITION", "no") },
      { "permission", refusal(403, "PERMISSION_DENIED", "no") },
      { "not_found", refusal(404, "NOT_FOUND", "no") },
      { "exists", refusal(409, "ALREADY_EXISTS", "no") },
      { "unsupported", refusal(501, "UNIMPLEMENTED", "no") },
      {
        "quota",
        refusal(
          429,
          "RESOURCE_EXHAUSTED",
          "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5."
        ),
      },
    } do
      support.with_server(answers { case[2] }, function(s, requests)
        local client = support.client()
        fails(case[1], client.request, client, { url = s.url })
        assert.equal(1, #requests)
      end)
    end
  end)

  --- Makes a call; the seconds that the client has waited between its attempts, of which none passes.
  local function waits_of(client, call)
    local waits, sleep = {}, task.sleep
    task.sleep = function(seconds) -- luacheck: ignore 122
      waits[#waits + 1] = seconds
      return sleep(0)
    end
    local ok, problem = pcall(client.json, client, call)
    task.sleep = sleep -- luacheck: ignore 122
    assert.is_true(ok, tostring(problem))
    return waits
  end

  it("waits as long as the API asks, and not beyond its deadline", function()
    support.with_server(function(_, count)
      if count == 1 then
        return refusal(503, "UNAVAILABLE", "wait", {
          { ["@type"] = "type.googleapis.com/google.rpc.RetryInfo", retryDelay = "0.15s" },
        })
      elseif count == 2 then
        return { status = 503, headers = { ["Retry-After"] = "1" } }
      end
      return { json = {} }
    end, function(s)
      assert.same({ 0.15, 1 }, waits_of(support.client(), { url = s.url }))
    end)
    support.with_server(
      answers { { status = 503, headers = { ["Retry-After"] = "3600" } } },
      function(s, requests)
        local client = support.client()
        fails("unavailable", client.request, client, { url = s.url, deadline = 5 })
        assert.equal(1, #requests)
      end
    )
  end)

  it("waits longer and longer, at random", function()
    local busy = { status = 503 }
    support.with_server(answers { busy, busy, busy, busy, busy, { body = "{}" } }, function(s)
      local client = support.client {
        random = function()
          return 1
        end,
      }
      assert.same({ 0.002, 0.004, 0.008, 0.016, 0.02 }, waits_of(client, { url = s.url }))
    end)
  end)

  it("refreshes a refused token once", function()
    local credentials = counted()
    support.with_server(function(request)
      if request.headers.authorization == "Bearer t1" then
        return refusal(401, "UNAUTHENTICATED", "stale")
      end
      return { json = {} }
    end, function(s, requests)
      local client = support.client { credentials = credentials }
      client:json { method = "POST", url = s.url } -- not carried out, so it may be sent again
      assert.equal(2, #requests)
    end)
    support.with_server(answers { refusal(401, "UNAUTHENTICATED", "never") }, function(s, requests)
      local client = support.client { credentials = credentials }
      local err = fails("auth", client.request, client, { url = s.url })
      assert.equal(2, #requests)
      assert.is_nil(tostring(err):find("asked with", 1, true))
    end)
    assert.equal(2, credentials.rejected)
  end)

  it("asks again for a token that cannot be had now, also for what is not repeated blindly", function()
    support.with_server(answers { { json = {} } }, function(s, requests)
      local credentials, asked = counted(), 0
      local headers = credentials.headers
      function credentials.headers()
        asked = asked + 1
        if asked < 3 then
          errors.raise { code = asked == 1 and "unavailable" or "timeout", message = "no token now" }
        end
        return headers()
      end
      local client = support.client { credentials = credentials }
      client:json { method = "POST", url = s.url, json = {} }
      assert.same({ 3, 1 }, { asked, #requests })
      function credentials.headers()
        asked = asked + 1
        errors.raise { code = "auth", message = "no token ever" }
      end
      fails("auth", client.json, client, { url = s.url })
      assert.same({ 4, 1 }, { asked, #requests })
    end)
  end)

  it("says whose credentials were refused, and what helps with their kind", function()
    local function refused(kind, code, http_status, status)
      local credentials = setmetatable(counted(), {
        __tostring = function()
          return kind .. " credentials of me@example.com (the file f)"
        end,
      })
      credentials.kind, credentials.where = kind, "the file f"
      local said
      support.with_server(answers { refusal(http_status, status, "no") }, function(s)
        local client = support.client { credentials = credentials }
        said = fails(code, client.request, client, { url = s.url }).message
      end)
      return said
    end
    for kind, remedy in pairs {
      access_token = "get a new one",
      authorized_user = "gcloud auth application-default login",
      gcloud = "gcloud auth login",
    } do
      local said = refused(kind, "auth", 401, "UNAUTHENTICATED")
      assert.matches(kind .. " credentials of me@example.com (the file f)", said, 1, true)
      assert.matches(remedy, said, 1, true)
    end
    local denied = refused("authorized_user", "permission", 403, "PERMISSION_DENIED")
    assert.matches("asked with the authorized_user credentials of me@example.com", denied, 1, true)
    assert.is_nil(denied:find("log in", 1, true))
  end)

  it("tells, once a minute, that there is no answer", function()
    local lines = {}
    local log = require("ciranda.io.log")
    log.configure {
      form = "plain",
      level = "info",
      write = function(text)
        lines[#lines + 1] = text
      end,
    }
    local now = 0
    local busy = { status = 503 }
    support.with_server(answers { busy, busy, busy, busy, { json = {} } }, function(s)
      local client = support.client()
      function client.now()
        now = now + 2
        return now
      end
      client:request { url = s.url }
    end)
    log.reset()
    local all = table.concat(lines)
    assert.equal(1, #lines, all)
    assert.matches("status 503; trying again, for %d+ s at most", all)
  end)

  it("gives up an attempt that takes too long, and ends when it is cancelled", function()
    local count = patience.within_more(1, function(timeout)
      local asked
      support.with_server(function(_, count)
        if count == 1 then
          task.sleep(600)
        end
        return { json = {} }
      end, function(s, requests)
        support.client():json { url = s.url, timeout = timeout }
        asked = #requests
      end)
      return asked == 2, asked
    end)
    assert.equal(2, count)
    support.with_server(answers { { status = 503 } }, function(s)
      local client = support.client()
      local _ <close> = task.scope()
      local scope <close> = task.scope()
      local running = scope:spawn(client.request, client, { url = s.url })
      task.sleep(0.02)
      running:cancel()
      assert.is_true(errors.is(support.raised(running.wait, running), "cancelled"))
    end)
  end)

  it("says clearly that an answer is no JSON object", function()
    for _, body in ipairs {
      "",
      "null",
      "7",
      '"text"',
      "{",
      "<html>502</html>",
      '{"a": "\xff\xfe"',
      ("["):rep(100000),
      '{"a":' .. ("x"):rep(1000) .. "}",
    } do
      support.with_server(answers { { body = body } }, function(s)
        local client = support.client()
        local err = fails("protocol", client.json, client, { url = s.url })
        assert.matches("GET http://127.0.0.1", tostring(err), 1, true)
        assert.is_true(#tostring(err) < 1000)
      end)
    end
  end)

  describe("lists", function()
    it("come in pages", function()
      support.with_server(function(request, count)
        local token = request:args().pageToken
        assert(token == (count > 1 and "t" .. count - 1 or nil))
        assert(request:args().filter == "f")
        return {
          json = {
            nodes = { { name = "n" .. count } },
            nextPageToken = count < 3 and "t" .. count or nil,
            unreachable = count == 2 and { "zone-b" } or nil,
          },
        }
      end, function(s)
        local items, unreachable = support.client():pages({ url = s.url, query = { filter = "f" } }, "nodes")
        assert.same({ { name = "n1" }, { name = "n2" }, { name = "n3" } }, items)
        assert.same({ "zone-b" }, unreachable)
      end)
    end)

    it("may be empty, and end when they go in circles or are none", function()
      support.with_server(answers { { json = {} } }, function(s)
        assert.same({}, (support.client():pages({ url = s.url }, "nodes")))
      end)
      support.with_server(answers { { json = { nextPageToken = "again" } } }, function(s)
        local client = support.client()
        fails("protocol", client.pages, client, { url = s.url }, "nodes")
      end)
      support.with_server(answers { { json = { nodes = "x" } } }, function(s)
        local client = support.client()
        fails("protocol", client.pages, client, { url = s.url }, "nodes")
      end)
    end)
  end)

  describe("downloads", function()
    it("give the caller the body of a success only", function()
      support.with_server(answers { refusal(404, "NOT_FOUND", "gone away"), { body = "data" } }, function(s)
        local client = support.client()
        local got = {}
        local call = {
          url = s.url,
          on_data = function(chunk)
            got[#got + 1] = chunk
          end,
        }
        local err = fails("not_found", client.request, client, call)
        assert.matches("gone away", tostring(err), 1, true)
        assert.same({}, got)
        client:request(call)
        assert.equal("data", table.concat(got))
      end)
    end)

    it("are not repeated once some of it was given", function()
      support.with_server(
        answers { { status = 503 }, { body = "12345", truncate = 3 } },
        function(s, requests)
          local client = support.client()
          local got = {}
          fails("closed", client.request, client, {
            url = s.url,
            on_data = function(chunk)
              got[#got + 1] = chunk
            end,
          })
          assert.equal("123", table.concat(got))
          assert.equal(2, #requests)
        end
      )
    end)
  end)
end)

describe("ciranda.gcp.failure", function()
  it("tells quota from stock-out, with metric, limit and place", function()
    local err = failure.of_status({
      code = 8,
      message = 'There is no more capacity in the zone "us-central1-a"; you can try in another zone where Cloud TPU '
        .. "Nodes are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x191e4b746b2c69a9]",
    }, "job1")
    assert.equal("stockout", err.code)
    assert.matches("job1: There is no more capacity", tostring(err), 1, true)
    assert.equal(
      "stockout",
      failure.of_status({ code = 9, message = "Insufficient reserved capacity. Contact customer support" }).code
    )
    assert.equal(
      "stockout",
      failure.of_status({ code = 13, message = "an internal error has occurred" }).code
    )
    err = failure.of_status {
      code = 8,
      message = "Quota 'TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI' exhausted. "
        .. "Limit 4 in zone us-central1-a",
    }
    assert.equal("quota", err.code)
    assert.same({
      metric = "TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI",
      limit = 4,
      where = "zone us-central1-a",
      kind = "TPU",
    }, err.quota)
    assert.matches("this is the TPU quota: free some of it", tostring(err), 1, true)
    err = failure.of_status {
      code = 8,
      message = "Quota limit 'QueuedResourcesPerProjectPerZone' has been exceeded. Limit: 10 in zone us-east5-a.",
    }
    assert.equal("queued-resource", err.quota.kind)
    assert.matches("this is the queued-resource quota: ", tostring(err), 1, true)
    err = failure.of_status {
      code = 8,
      message = "Quota exceeded",
      details = {
        {
          ["@type"] = "type.googleapis.com/google.rpc.ErrorInfo",
          reason = "RATE_LIMIT_EXCEEDED",
          metadata = {
            quota_metric = "m",
            quota_limit = "L",
            quota_limit_value = "8",
            quota_location = "us-east5",
          },
        },
      },
    }
    assert.same({ metric = "L", limit = 8, where = "us-east5" }, err.quota)
    assert.equal("RATE_LIMIT_EXCEEDED", err.reason)
  end)

  it("keeps the two code spaces apart", function()
    assert.equal("not_found", failure.of_status({ code = 5, message = "x" }).code)
    assert.equal("NOT_FOUND", failure.of_status({ code = 5, message = "x" }).status)
    local err = failure_of(404, '{"error":{"code":404,"status":"NOT_FOUND","message":"x"}}')
    assert.equal("not_found", err.code)
    assert.equal(404, err.http_status)
    assert.equal(
      "exists",
      failure_of(409, '{"error":{"code":409,"status":"ALREADY_EXISTS","message":"x"}}').code
    )
    assert.equal("busy", failure_of(409, '{"error":{"code":409,"status":"ABORTED","message":"x"}}').code)
  end)

  it("reads the older form, Cloud Storage's, and what is none", function()
    local err = failure_of(
      412,
      '{"error":{"code":412,"message":"no","errors":[{"domain":"global","reason":"conditionNotMet"}]}}'
    )
    assert.equal("precondition", err.code)
    assert.equal("conditionNotMet", err.reason)
    err = failure_of(
      403,
      '{"error":{"code":403,"message":"Rate","errors":[{"domain":"usageLimits","reason":"rateLimitExceeded"}]}}'
    )
    assert.equal("rate_limit", err.code)
    err = failure_of(502, "<html>\27[31mBad\0 gateway" .. ("x"):rep(100000))
    assert.equal("unavailable", err.code)
    assert.is_nil(tostring(err):find("[%c]"))
    assert.is_true(#tostring(err) < 400)
    for _, body in ipairs {
      "",
      "{}",
      '{"error":7}',
      '{"error":[]}',
      '{"error":{"message":7,"details":"x","status":[]}}',
    } do
      assert.equal("permission", failure_of(403, body).code)
    end
    for _, status in ipairs { "x", false } do
      assert.equal("failed", failure.of_status(status).code)
    end
    assert.equal(
      "failed",
      failure.of_status({ code = 99, message = {}, details = { 7, { ["@type"] = {} } } }).code
    )
  end)

  it("understands both forms of Retry-After", function()
    assert.equal(7, failure_of(503, "", { { "Retry-After", "7" } }).retry_after)
    -- 1700000000 is Tue, 14 Nov 2023 22:13:20 GMT
    assert.equal(40, failure_of(503, "", { { "Retry-After", "Tue, 14 Nov 2023 22:14:00 GMT" } }).retry_after)
    assert.equal(0, failure_of(503, "", { { "Retry-After", "Tue, 14 Nov 2023 22:13:00 GMT" } }).retry_after)
    assert.is_nil(failure_of(503, "", { { "Retry-After", "soon" } }).retry_after)
  end)
end)
