--- An HTTP server whose handlers are tasks.
---
---     local scope <close> = task.scope()
---     local s <close> = server.listen { port = 0, handler = function(request)
---       return { status = 200, headers = { ["Content-Type"] = "text/plain" }, body = "hello\n" }
---     end }
---     print(s.url)
---
--- HTTP/1.1 with kept connections, HEAD, 100-continue and chunked bodies, without TLS: it serves the simulated cloud, a
--- status page, tests. Many addresses may lead to one handler, which sees which one its client called.

local core = require("ciranda.core.server")
local errors = require("ciranda.io.error")
local http = require("ciranda.io.http")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local url = require("ciranda.io.url")

local M = {}

--- Seconds a handler may take until its client is answered 503, unless the server is told otherwise.
M.DEADLINE = 60

--- How much longer the engine waits before it answers in a handler's place, in seconds.
local LATE = 5

---@class ciranda.server.Request
---@field method string
---@field target string           the request line's, as the client wrote it
---@field path string             the target up to "?", percent-encoding left as it came
---@field query string            what follows "?", raw; "" without one
---@field headers ciranda.http.Headers
---@field body string
---@field version string          "1.0" or "1.1"
---@field local_address string    the address that the client called: tells callers of many addresses apart
---@field local_port integer
---@field remote_address string
---@field remote_port integer
local Request = {}
Request.__index = Request
Request.__name = "ciranda.server.Request"

function Request:__tostring()
  return ("%s %s from %s"):format(self.method, self.path, self.remote_address)
end

--- The fields of the query; of a repeated name the last value counts.
---@return table<string, string> fields
---@return { [1]: string, [2]: string }[] list
function Request:args()
  return url.parse_query(self.query)
end

--- The body as JSON.
---@return any
--- Raises `parse`.
function Request:json()
  return json.decode(self.body, "the body of " .. tostring(self))
end

--- The body as the fields of an HTML form.
---@return table<string, string>
function Request:form()
  return (url.parse_query(self.body))
end

---@class ciranda.server.Answer
---@field status integer?        200 by default
---@field headers table<string, string|string[]>|{ [1]: string, [2]: string }[]?  not Content-Length: see `length`
---@field body string|(fun(write: fun(chunk: string)))?  a function is run in the handler's task; its `write` waits
---       while the client takes its time, and raises `closed` when the client has left
---@field length integer?        of a body that is written by a function; without one it is sent in chunks
---@field json any?              a body in JSON, with its content type
---@field truncate integer?      a fault: end the connection after so many bytes of the body
---@field drop boolean?          a fault: end the connection without an answer
---@field reset boolean?         a fault: reset the connection without an answer
---@field upgrade (fun(fd: integer, early: string))?  answer 101 with `headers`; the function then owns the connection's
---       descriptor and gets the bytes that came after the request

local ANSWER = {}
for name in ([[status headers body length json truncate drop reset upgrade]]):gmatch("%S+") do
  ANSWER[name] = true
end

--- Headers as the engine takes them.
local function header_list(headers)
  local list, names = {}, {}
  for index, pair in ipairs(headers or {}) do
    if type(pair) ~= "table" then
      error(errors.new { code = "misuse", message = ("header %d must be { name, value }"):format(index) }, 0)
    end
    list[index] = { pair[1], tostring(pair[2]) }
  end
  for name in pairs(headers or {}) do
    if type(name) == "string" then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local value = headers[name]
    for _, each in ipairs(type(value) == "table" and value or { value }) do
      list[#list + 1] = { name, tostring(each) }
    end
  end
  return list
end

--- Send a body that a function writes.
local function send_stream(exchange, answer, headers)
  if not exchange:start(answer.status or 200, headers, answer.length) then
    return
  end
  answer.body(function(chunk)
    if chunk == "" then
      return
    end
    task.await(function(done)
      local there = exchange:write(chunk, function(err)
        done(err and errors.wrap(err, { op = "server.write" }))
      end)
      if not there then
        done(errors.new { code = "closed", op = "server.write", message = "the client has left" })
      end
      return function()
        exchange:drop()
        return true
      end
    end, "a client to take the answer")
  end)
  exchange:finish()
end

--- Upgrade the connection and run the function that takes it over.
local function send_upgrade(exchange, answer, headers)
  local fd, early = task.await(function(done)
    local there = exchange:upgrade(headers, function(err, fd, early)
      done(err and errors.wrap(err, { op = "server.upgrade" }), fd, early)
    end)
    if not there then
      done(errors.new { code = "closed", op = "server.upgrade", message = "the client has left" })
    end
    return function()
      exchange:drop()
      return false
    end
  end, "a connection to be upgraded")
  answer.upgrade(fd, early)
end

--- Send what a handler returned.
---@param exchange ciranda.core.Exchange
---@param request ciranda.server.Request
---@param answer ciranda.server.Answer
local function send(exchange, request, answer)
  if type(answer) ~= "table" then
    error(
      errors.new {
        code = "misuse",
        message = 'a handler must return a table such as { status = 200, body = "" }, got ' .. type(answer),
      },
      0
    )
  end
  errors.check_options(answer, ANSWER, "the answer of a handler")
  if answer.reset then
    exchange:reset()
    return
  elseif answer.drop then
    exchange:drop()
    return
  end
  local headers = header_list(answer.headers)
  if answer.upgrade then
    return send_upgrade(exchange, answer, headers)
  end
  local body = answer.body
  if answer.json ~= nil then
    body = json.encode(answer.json)
    headers[#headers + 1] = { "Content-Type", "application/json; charset=UTF-8" }
  end
  if type(body) == "function" then
    if request.method ~= "HEAD" then
      return send_stream(exchange, answer, headers)
    end
    exchange:start(answer.status or 200, headers, answer.length)
    exchange:finish()
    return
  end
  exchange:respond(answer.status or 200, headers, body or "", answer.truncate)
end

---@class ciranda.Server
---@field address string          the first address that it listens on
---@field port integer
---@field url string              "http://address:port"
---@field handler fun(request: ciranda.server.Request): ciranda.server.Answer
---@field deadline number         seconds
---@field on_error fun(err: any, request: ciranda.server.Request)?
local Server = {}
Server.__index = Server
Server.__name = "ciranda.Server"

function Server:__tostring()
  return ("the server at %s"):format(self.url or "no address")
end

--- Report a handler's failure.
local function report(self, err, request)
  if self.on_error then
    return self.on_error(err, request)
  end
  local text = errors.is(err) and err.describe and err:describe() or errors.text(err)
  require("ciranda.io.log").error(("%s failed: %s"):format(tostring(request), text))
end

--- A handler's task: whatever happens, the client gets an answer and the server goes on.
local function serve(self, exchange, request)
  local ok, err = pcall(function()
    local answer = task.timeout(self.deadline, self.handler, request)
    send(exchange, request, answer)
  end)
  if ok then
    return
  end
  if errors.is(err, "cancelled") then
    exchange:drop()
    error(err, 0)
  end
  if errors.is(err, "closed") and err.op == "server.write" then
    return -- the client left in the middle of its answer: its own affair
  end
  local status, text = 500, "Internal error.\n"
  if errors.is(err, "timeout") then
    status, text = 503, "No answer in time.\n"
  end
  if not exchange:respond(status, { { "Content-Type", "text/plain" } }, text) then
    exchange:drop() -- an answer that was begun is cut, so that the client does not take it for whole
  end
  report(self, err, request)
end

--- The server's own task: lives until it is cancelled, then ends the handlers and the engine's part.
local function live(self, ready)
  local scope <close> = task.scope()
  self._scope = scope
  ready:set()
  local _ <close> = setmetatable({}, {
    __close = function()
      scope:cancel("the server closes")
      task.shield(function()
        task.await(function(done)
          if not self._core:stop(done) then
            done()
          end
        end, "the server to stop")
      end)
    end,
  })
  task.await(function()
    return function()
      return true
    end
  end, "requests")
end

local OPTIONS = {}
for name in ([[address port handler deadline idle max_body max_connections on_error name]]):gmatch("%S+") do
  OPTIONS[name] = true
end

---@class ciranda.server.Options
---@field handler fun(request: ciranda.server.Request): ciranda.server.Answer  runs as a task for each request
---@field address string?         numeric; "127.0.0.1" by default
---@field port integer?           0, the default, takes a free one
---@field deadline number?        seconds a handler may take; server.DEADLINE by default
---@field idle number?            seconds after which a silent connection is closed; 60 by default
---@field max_body integer?       bytes of a request's body, beyond which the client is answered 413; 64 MiB by default
---@field max_connections integer?  4096 by default
---@field on_error fun(err: any, request: ciranda.server.Request)?  takes a handler's failure; else it is logged
---@field name string?            of the server's task

--- Listen and serve. The server is a task of the innermost open scope; `<close>` or `:close()` ends it.
---@async
---@param options ciranda.server.Options
---@return ciranda.Server
--- Raises `busy` when the port is taken, `permission`, `io`.
function M.listen(options)
  if type(options) ~= "table" then
    errors.misuse(2, "server.listen: a table of options expected, got %s", type(options))
  end
  errors.check_options(options, OPTIONS, "server.listen")
  if type(options.handler) ~= "function" then
    errors.misuse(2, "server.listen: option 'handler' must be a function")
  end
  local self = setmetatable({
    handler = options.handler,
    deadline = options.deadline or M.DEADLINE,
    on_error = options.on_error,
  }, Server)
  local function on_request(exchange, raw)
    local path, query = raw.target:match("^([^?]*)%??(.*)$")
    raw.path, raw.query = path, query
    http.headers(raw.headers)
    local request = setmetatable(raw, Request)
    if self._scope.state ~= "open" then
      exchange:drop()
      return
    end
    self._scope:spawn(raw.method .. " " .. path, serve, self, exchange, request)
  end
  self._core = core.start({
    max_body = options.max_body,
    deadline_ms = math.ceil((self.deadline + LATE) * 1000),
    idle_ms = math.ceil((options.idle or 60) * 1000),
    max_connections = options.max_connections,
  }, on_request)
  local ready = task.event()
  local ok, err = pcall(function()
    self.address = options.address or "127.0.0.1"
    self.port = self:listen(self.address, options.port)
    self.url = ("http://%s:%d"):format(
      self.address:find(":", 1, true) and "[" .. self.address .. "]" or self.address,
      self.port
    )
    self._task = task.spawn(options.name or "server " .. self.url, live, self, ready)
  end)
  if not ok then
    self._core:stop()
    error(err, 0)
  end
  ready:wait()
  return self
end

--- Listen on one more address.
---@param address string numeric
---@param port integer? 0, the default, takes a free one
---@return integer port
--- Raises `busy`, `permission`, `io`.
function Server:listen(address, port)
  local bound, err = self._core:listen(address, port or 0)
  if not bound then
    errors.raise(errors.wrap(err, { op = "server.listen" }))
  end
  return bound
end

--- Stop: handlers are cancelled and waited for, connections cut. A second call finds nothing to do.
---@async
function Server:close()
  self._task:cancel("the server was closed")
  pcall(self._task.wait, self._task)
end

Server.__close = Server.close

return M
