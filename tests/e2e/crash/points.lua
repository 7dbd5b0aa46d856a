--- The calls of a traced program between which a crash makes a difference, and whether they come in the right order.
local M = {}

--- The calls that are recorded.
M.CALLS = "write,fsync,mkdir,rename,connect,sendto"

--- Classes of points, by call.
local CLASS = {
  write = "write",
  fsync = "fsync",
  mkdir = "mkdir",
  rename = "rename",
  connect = "connect",
  sendto = "http",
}

local MUTATING = { POST = true, PATCH = true, PUT = true, DELETE = true }

--- A line of strace: the thread, the call and whether it has begun on this line.
local function parse(line)
  local thread, call = line:match("^(%d+)%s+([%w_]+)%(")
  if call then
    return thread, call, true
  end
  thread, call = line:match("^(%d+)%s+<%.%.%. ([%w_]+) resumed>")
  return thread, call, false
end

--- The method of the HTTP request that a line sends the beginning of.
local function http_method(line)
  return line:match('[,%s]"(%u+) /')
end

---@class Point
---@field class string
---@field call string
---@field when integer which of them
---@field path string? of those on this file

--- The points of an undisturbed program. What it asks after its last change, but for the first question, is left out:
--- how often it looks whether the cloud has done its work is another number each time.
---@param lines string[]
---@param journal string path
---@return Point[]
function M.of(lines, journal)
  local points, counts, main, after_change = {}, {}, nil, 0
  for _, line in ipairs(lines) do
    local thread, call, begins = parse(line)
    main = main or thread
    if begins then
      local on_journal = line:find("<" .. journal .. ">", 1, true) ~= nil
      local key = on_journal and call .. journal or call .. thread
      counts[key] = (counts[key] or 0) + 1
      local method = call == "sendto" and http_method(line)
      local wanted
      if call == "write" or call == "fsync" then
        wanted = on_journal
      elseif call == "connect" then
        wanted = thread == main and line:find("sin_port=", 1, true)
      elseif call == "sendto" then
        after_change = method and (MUTATING[method] and 0 or after_change + 1) or after_change
        wanted = thread == main and method and after_change <= 1
      else
        wanted = thread == main
      end
      if wanted then
        points[#points + 1] = {
          class = CLASS[call],
          call = call,
          when = counts[key],
          path = on_journal and journal or nil,
        }
      end
    end
  end
  return points
end

--- Is each request that makes or deletes something sent after its intent was on the disk: written, and an fsync that
--- began later has ended well?
---@param lines string[]
---@param journal string path
---@return integer sent requests
---@return integer early those that were sent before
function M.order(lines, journal)
  local written, syncing, durable, sent, early = false, nil, false, 0, 0
  for _, line in ipairs(lines) do
    local thread, call, begins = parse(line)
    local on_journal = line:find("<" .. journal .. ">", 1, true) ~= nil
    local intent = line:find('\\"phase\\":\\"intent\\"', 1, true)
      or line:find('\\"phase\\":\\"deleting\\"', 1, true)
    if call == "write" and on_journal and intent then
      written, durable = true, false
    elseif call == "fsync" and begins and on_journal and written then
      syncing = thread
    end
    if call == "fsync" and thread == syncing and line:find("%)%s+= 0$") then
      syncing, durable = nil, true
    end
    local method, path = line:match('[,%s]"(%u+) (/%S*)')
    if
      call == "sendto"
      and begins
      and path
      and (
        method == "DELETE"
        or method == "POST" and path:find("/queuedResources%?")
        or path:find("/nodes%?")
      )
    then
      sent = sent + 1
      early = early + (durable and 0 or 1)
    end
  end
  return sent, early
end

return M
