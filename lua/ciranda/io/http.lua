--- HTTP requests, in straight-line code. HTTP/2 where the server offers it over TLS; connections are kept and shared.
---
---     local response = http.get("https://example.com/a", { timeout = 10 })
---     if response.status == 200 then print(response.headers["content-type"], response.body) end
---
--- A status is data, whatever it is; an error is raised when there is no answer. Redirects are not followed: an answer
--- must not decide where the caller's credentials go. Proxies are used only when the option says so.

local core = require("ciranda.core.http")
local engine = require("ciranda.core.engine")
local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local url = require("ciranda.io.url")

local M = {}

--- Seconds that a whole request, and making its connection, may take unless the caller says otherwise. A call of an API
--- answers in seconds; a transfer of gigabytes should give its own `timeout`, or `idle_timeout`.
M.TIMEOUT = 60
M.CONNECT_TIMEOUT = 10

local USER_AGENT = "ciranda/" .. engine.version

---@class ciranda.http.Headers: { [1]: string, [2]: string }[]  in the order they came
--- Indexed with a name it gives the first value of that name, in any case: `headers["content-type"]`.
local Headers = {}

function Headers.__index(self, name)
  if type(name) == "string" then
    name = name:lower()
    for _, pair in ipairs(self) do
      if pair[1]:lower() == name then
        return pair[2]
      end
    end
  end
  return nil
end

--- Give a list of {name, value} the access by name.
---@param list { [1]: string, [2]: string }[]
---@return ciranda.http.Headers
function M.headers(list)
  return setmetatable(list, Headers)
end

---@class ciranda.http.Response
---@field status integer
---@field headers ciranda.http.Headers
---@field body string?          nil when `on_data` got it
---@field received integer      body bytes in all
---@field http_version string   "1.0", "1.1" or "2"
---@field effective_ip string   the address that answered
---@field time_ms integer       from the start to the end
---@field reused boolean        whether a kept connection served
---@field target string         the method and what may be shown of the URL, for messages
local Response = {}
Response.__index = Response
Response.__name = "ciranda.http.Response"

function Response:__tostring()
  return ("%s: %d"):format(self.target, self.status)
end

--- The body as a JSON value.
---@return any
--- Raises `parse`, naming the URL.
function Response:json()
  return json.decode(self.body or "", self.target)
end

---@param raw table
---@param target string
---@return ciranda.http.Response
local function new_response(raw, target)
  raw.target = target
  M.headers(raw.headers)
  return setmetatable(raw, Response)
end

---@class ciranda.http.Options
---@field url string
---@field method string?           "GET", or "POST" when there is a body
---@field headers table<string, string|string[]>|{ [1]: string, [2]: string }[]?  by name, or in order
---@field query table?             added to the URL (see ciranda.io.url)
---@field body string?
---@field json any?                the body as JSON, with its content type
---@field form table?              the body as an HTML form's fields
---@field file { path: string, offset: integer?, length: integer? }?  the body from a file, read while it is sent
---@field timeout number?          seconds for everything; http.TIMEOUT by default; `false` for none
---@field connect_timeout number?  seconds to resolve and connect; http.CONNECT_TIMEOUT by default
---@field idle_timeout number?     seconds, rounded up, after which a transfer that does not move is given up
---@field on_response fun(response: ciranda.http.Response)?  the head, before any data
---@field on_data fun(chunk: string)?  takes the body piece by piece; the server waits while it waits
---@field max_body integer?        bytes of a body that is collected; 64 MiB by default
---@field http2 boolean?           false: HTTP/1.1 only
---@field ca_file string?          PEM certificates that are trusted instead of the system's
---@field proxy string?            such as "http://proxy.example.com:3128"
---@field unix_socket string?      path of a socket to connect to instead of the URL's host
---@field accept_encoding string?  such as "gzip"; the body is decoded
---@field once boolean?            never send it twice; true by default for POST and PATCH. Otherwise a request is sent
---       again, on a fresh connection, when a kept one turns out to have been closed

local KNOWN = {}
for name in
  ([[url method headers query body json form file timeout connect_timeout idle_timeout on_response on_data
  max_body http2 ca_file proxy unix_socket accept_encoding once]]):gmatch("%S+")
do
  KNOWN[name] = true
end

--- Seconds as whole milliseconds, at least one.
local function milliseconds(seconds, name)
  if type(seconds) ~= "number" or seconds ~= seconds or seconds <= 0 then
    errors.misuse(4, "http.request: option '%s' must be a positive number of seconds", name)
  end
  return math.max(1, math.ceil(math.min(seconds, 604800) * 1000))
end

--- Header lines of a map or a list; `given` gets their names in lower case.
local function header_lines(headers, given)
  local lines = {}
  local function add(name, value)
    if type(name) ~= "string" or not (type(value) == "string" or type(value) == "number") then
      errors.misuse(4, 'http.request: a header must be a name with a string, such as Accept = "text/plain"')
    end
    lines[#lines + 1] = name .. ": " .. value
    given[name:lower()] = true
  end
  for index, pair in ipairs(headers) do
    if type(pair) ~= "table" then
      errors.misuse(4, "http.request: header %d must be { name, value }", index)
    end
    add(pair[1], pair[2])
  end
  local names = {}
  for name in pairs(headers) do
    if type(name) == "string" then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local value = headers[name]
    for _, each in ipairs(type(value) == "table" and value or { value }) do
      add(name, each)
    end
  end
  return lines
end

--- The body of the options, whichever way it is given, and its content type.
local function body_of(options)
  local count = 0
  for _, name in ipairs({ "body", "json", "form", "file" }) do
    count = count + (options[name] ~= nil and 1 or 0)
  end
  if count > 1 then
    errors.misuse(4, "http.request: give one of 'body', 'json', 'form' and 'file'")
  end
  if options.json ~= nil then
    return json.encode(options.json), "application/json"
  elseif options.form then
    return url.query(options.form), "application/x-www-form-urlencoded"
  end
  return options.body, nil
end

--- The engine's options, and the text that names the request in messages.
---@param options ciranda.http.Options
---@return table core_options
---@return string target
local function prepare(options)
  if type(options) ~= "table" then
    errors.misuse(3, "http.request: a table of options expected, got %s", type(options))
  end
  errors.check_options(options, KNOWN, "http.request", 3)
  if type(options.url) ~= "string" or not options.url:find("^[hH][tT][tT][pP][sS]?://") then
    errors.misuse(3, "http.request: option 'url' must be an http:// or https:// URL")
  end
  local given = {}
  local headers = header_lines(options.headers or {}, given)
  local body, content_type = body_of(options)
  if content_type and not given["content-type"] then
    headers[#headers + 1] = "Content-Type: " .. content_type
  end
  if not given["user-agent"] then
    headers[#headers + 1] = "User-Agent: " .. USER_AGENT
  end
  local address = options.url
  if options.query and next(options.query) ~= nil then
    address = address .. (address:find("?", 1, true) and "&" or "?") .. url.query(options.query)
  end
  local file = options.file or {}
  local method = options.method or (body or options.file) and "POST" or "GET"
  local timeout = options.timeout
  if timeout == nil then
    timeout = M.TIMEOUT
  end
  local once = options.once
  if once == nil then
    once = method == "POST" or method == "PATCH"
  end
  return {
    url = address,
    method = method,
    headers = headers,
    body = body,
    body_file = file.path,
    body_offset = file.offset,
    body_length = file.length,
    timeout_ms = timeout and milliseconds(timeout, "timeout") or nil,
    connect_timeout_ms = milliseconds(options.connect_timeout or M.CONNECT_TIMEOUT, "connect_timeout"),
    low_speed_ms = options.idle_timeout and milliseconds(options.idle_timeout, "idle_timeout") or nil,
    max_body = options.max_body,
    http2 = options.http2,
    ca_file = options.ca_file,
    proxy = options.proxy,
    unix_socket = options.unix_socket,
    accept_encoding = options.accept_encoding,
    once = once,
  },
    method .. " " .. url.shown(options.url)
end

--- The engine's error as ours, with the request in its message.
local function failure(err, target)
  local e = errors.wrap(err, { op = "http.request", target = target })
  if e.code ~= "cancelled" then
    local phase = e.phase and e.code == "timeout" and (" (waiting for: %s)"):format(e.phase) or ""
    e.message = ("%s: %s%s"):format(target, e.message, phase)
  end
  return e
end

--- A request whose news are taken one by one, while the server waits.
local function stream(core_options, target, options)
  local news, first, last = {}, 1, 0
  local wake, handle
  local function tell(item)
    last = last + 1
    news[last] = item
    if wake then
      wake()
    end
  end
  function core_options.on_response(status, headers)
    tell({ "response", { status = status, headers = headers } })
  end
  if options.on_data then
    function core_options.on_data(chunk)
      handle:pause()
      tell({ "data", chunk })
    end
  end
  handle = core.request(core_options, function(err, response)
    tell({ "end", err, response })
  end)

  --- The next piece of news. A cancellation is raised when the request has ended.
  local function next_news()
    if not news[first] then
      task.await(function(done)
        wake = done
        return function()
          wake = function()
            if news[last][1] == "end" then
              done(news[last][2])
            end
          end
          handle:cancel()
          return false
        end
      end, target)
      wake = nil
    end
    local item = news[first]
    news[first] = nil
    first = first + 1
    return item
  end

  local function take()
    while true do
      local item = next_news()
      if item[1] == "end" then
        if item[2] then
          error(failure(item[2], target), 0)
        end
        return new_response(item[3], target)
      elseif item[1] == "response" then
        if options.on_response then
          options.on_response(new_response(item[2], target))
        end
      else
        options.on_data(item[2])
        handle:resume()
      end
    end
  end

  local result = table.pack(pcall(take))
  if not result[1] then
    handle:cancel() -- what was raised by a callback, or a cancellation: nothing more is wanted of the server
    error(result[2], 0)
  end
  return result[2]
end

--- Make a request and wait for the answer.
---@async
---@param options ciranda.http.Options
---@return ciranda.http.Response
--- Raises `resolve`, `refused`, `unreachable`, `timeout`, `reset`, `closed` (the answer ended too early), `protocol`
--- (also: larger than `max_body`, a certificate that is not trusted), `io` and `not_found` (`file`), `cancelled`.
function M.request(options)
  local core_options, target = prepare(options)
  if options.on_data or options.on_response then
    return stream(core_options, target, options)
  end
  local err, response = task.await(function(done)
    local cancelling = false
    local handle = core.request(core_options, function(err, response)
      if cancelling and err then
        done(errors.wrap(err))
      else
        done(nil, err, response)
      end
    end)
    return function()
      cancelling = true
      handle:cancel()
      return false
    end
  end, target)
  if err then
    errors.raise(failure(err, target))
  end
  return new_response(response, target)
end

--- GET a URL.
---@async
---@param address string
---@param options ciranda.http.Options? `url` is taken from the first argument
---@return ciranda.http.Response
function M.get(address, options)
  local copy = { method = "GET" }
  for name, value in pairs(options or {}) do
    copy[name] = value
  end
  copy.url = address
  return M.request(copy)
end

--- POST to a URL. A table is sent as JSON, a string as it is.
---@async
---@param address string
---@param body string|table|nil
---@param options ciranda.http.Options?
---@return ciranda.http.Response
function M.post(address, body, options)
  local copy = { method = "POST" }
  for name, value in pairs(options or {}) do
    copy[name] = value
  end
  copy.url = address
  copy[type(body) == "table" and "json" or "body"] = body
  return M.request(copy)
end

return M
