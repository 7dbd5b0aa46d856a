--- Batches: several calls in the parts of one multipart/mixed request, as Google's libraries send them.
--
-- Each part is a request of HTTP/1.1 in text, with an id that its answer repeats behind "response-". The
-- credentials of the whole go for every part that has none of its own.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.sim.errors")
local http = require("ciranda.io.http")
local url = require("ciranda.io.url")

local M = {}

-- More calls than this in one batch are refused, as by the services.
M.LIMIT = 1000

local REASONS = {
  [200] = "OK",
  [204] = "No Content",
  [304] = "Not Modified",
  [400] = "Bad Request",
  [401] = "Unauthorized",
  [403] = "Forbidden",
  [404] = "Not Found",
  [409] = "Conflict",
  [412] = "Precondition Failed",
  [429] = "Too Many Requests",
}

-- Split headers from what follows them. Clients end lines with or without a carriage return.
local function split_headers(text)
  local headers = {}
  local at = 1
  while true do
    local line, after = text:match("^([^\n]*)\n()", at)
    if not line then
      line, after = text:sub(at), #text + 1
    end
    line = line:gsub("\r$", "")
    at = after
    if line == "" then
      return headers, text:sub(at)
    end
    local name, value = line:match("^([^:%s]+):%s*(.-)%s*$")
    if not name then
      errors.raise(errors.invalid(("'%s' is no header"):format(line)))
    end
    headers[#headers + 1] = { name, value }
  end
end

-- The parts of a multipart/mixed body, each with its headers.
local function parts_of(content_type, body)
  local boundary = content_type:match('boundary="([^"]+)"') or content_type:match("boundary=([^%s;]+)")
  if not content_type:find("^multipart/mixed") or not boundary then
    errors.raise(errors.invalid("a batch is of the type multipart/mixed, with a boundary"))
  end
  local parts, start, at, text = {}, nil, 1, "\n" .. body
  while true do
    local from, to = text:find("\n--" .. boundary, at, true)
    if not from then
      errors.raise(errors.invalid("the batch has no end"))
    end
    if start then
      parts[#parts + 1] = text:sub(start, from - 1):gsub("\r$", "")
    end
    if text:sub(to + 1, to + 2) == "--" then
      return parts
    end
    start = text:match("^[ \t\r]*\n()", to + 1)
    at = to + 1
  end
end

-- The request in a part, in the form that the services take.
local function request_of(text, outer)
  local line, after = text:match("^([^\n]*)\n?()")
  local verb, target = line:match("^(%u+) (%S+)")
  if not verb then
    errors.raise(errors.invalid(("'%s' is no request"):format(line:gsub("\r$", ""))))
  end
  target = target:gsub("^%a+://[^/]*", "")
  local list, body = split_headers(text:sub(after))
  local headers = http.headers(list)
  for _, name in ipairs({ "Authorization", "Host", "User-Agent" }) do
    if not headers[name] and outer.headers[name] then
      list[#list + 1] = { name, outer.headers[name] }
    end
  end
  local path, query = target:match("^([^?]*)%??(.*)$")
  local length = tonumber(headers["Content-Length"])
  local request =
    { method = verb, target = target, path = path, query = url.parse_query(query), headers = headers }
  request.body = length and body:sub(1, length) or body
  function request.form()
    return (url.parse_query(request.body))
  end
  function request.args()
    return request.query
  end
  return request
end

local function whole(body)
  if type(body) ~= "function" then
    return body or ""
  end
  local chunks = {}
  body(function(chunk)
    chunks[#chunks + 1] = chunk
  end)
  return table.concat(chunks)
end

-- The answer of a part, as text.
local function part_text(id, answer)
  local body = whole(answer.body)
  local lines = { "Content-Type: application/http" }
  if id then
    lines[2] = "Content-ID: " .. id:gsub("^<", "<response-")
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = ("HTTP/1.1 %d %s"):format(answer.status, REASONS[answer.status] or "Status")
  for name, value in pairs(answer.headers or {}) do
    lines[#lines + 1] = ("%s: %s"):format(name, value)
  end
  lines[#lines + 1] = "Content-Length: " .. #body
  lines[#lines + 1] = ""
  lines[#lines + 1] = body
  return table.concat(lines, "\r\n")
end

--- The service of batches.
---@param answer_one fun(request: table): table, ciranda.sim.Fault? answers a call and logs it
---@return table service
function M.new(answer_one)
  local service = {}

  function service:serves(path)
    return path == "/batch" or path:find("^/batch/") ~= nil
  end

  function service:handle(request)
    request.called = "batch"
    local parts = parts_of(request.headers["Content-Type"] or "", request.body)
    if #parts == 0 or #parts > M.LIMIT then
      errors.raise(errors.invalid(("a batch has from 1 to %d calls, this one %d"):format(M.LIMIT, #parts)))
    end
    local boundary = "batch_" .. crypto.hex(crypto.random(12))
    local texts, spoiling = {}, nil
    for i, part in ipairs(parts) do
      local list, inner = split_headers(part)
      local call = request_of(inner, request)
      local answer, fault
      if service:serves(call.path) then
        errors.raise(errors.invalid("a batch cannot hold another"))
      else
        answer, fault = answer_one(call)
      end
      spoiling = spoiling or fault
      texts[i] = ("--%s\r\n%s\r\n"):format(boundary, part_text(http.headers(list)["Content-ID"], answer))
    end
    return {
      status = 200,
      headers = { ["Content-Type"] = "multipart/mixed; boundary=" .. boundary },
      body = ("%s--%s--\r\n"):format(table.concat(texts), boundary),
    },
      spoiling
  end

  return service
end

return M
