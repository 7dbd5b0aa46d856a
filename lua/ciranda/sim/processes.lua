--- Processes as /proc shows them: families, who holds a device, who belongs to a worker.
--
-- All of it is read in one pass and may be out of date a moment later; who kills by it looks again until nothing is
-- left. A process is named by its id and its start time, so that a recycled id is never mistaken for it.

local uv = require("luv")

local M = {}

---@class ciranda.sim.Process
---@field pid integer
---@field parent integer
---@field start string clock ticks since boot, as in /proc/PID/stat
---@field state string "R", "S", "Z", ...

local function read(path)
  local file = io.open(path, "rb")
  if not file then
    return nil
  end
  local data = file:read("a")
  file:close()
  return data
end

-- The fields of /proc/PID/stat that follow the name (proc(5): the third is the first here); nil when there is none.
local function stat_fields(pid)
  local stat = read(("/proc/%d/stat"):format(pid))
  -- The name is in parentheses and may itself contain any of them.
  local rest = stat and stat:match("^.*%) (.*)$")
  if not rest then
    return nil
  end
  local fields = {}
  for field in rest:gmatch("%S+") do
    fields[#fields + 1] = field
  end
  return fields
end

--- One process, nil when there is none.
---@param pid integer
---@return ciranda.sim.Process?
function M.get(pid)
  local fields = stat_fields(pid)
  return fields and { pid = pid, state = fields[1], parent = tonumber(fields[2]), start = fields[20] }
end

--- The ids of all processes.
---@return integer[]
function M.pids()
  local list = {}
  local directory = uv.fs_scandir("/proc")
  while directory do
    local name = uv.fs_scandir_next(directory)
    if not name then
      break
    end
    list[#list + 1] = math.tointeger(tonumber(name))
  end
  return list
end

--- The children of a process, adopted ones included.
---@param pid integer
---@return ciranda.sim.Process[]? children nil where the kernel does not list them
function M.children(pid)
  local list, listed = {}, false
  local threads = uv.fs_scandir(("/proc/%d/task"):format(pid))
  while threads do
    local thread = uv.fs_scandir_next(threads)
    if not thread then
      break
    end
    local text = read(("/proc/%d/task/%s/children"):format(pid, thread))
    listed = listed or text ~= nil
    for child in (text or ""):gmatch("%d+") do
      list[#list + 1] = M.get(math.tointeger(tonumber(child)) --[[@as integer]])
    end
  end
  return listed and list or nil
end

-- The same for every process, from a look at all of them.
local function children_of_all()
  local children = {}
  for _, pid in ipairs(M.pids()) do
    local found = M.get(pid)
    if found then
      children[found.parent] = children[found.parent] or {}
      table.insert(children[found.parent], found)
    end
  end
  return children
end

--- Everything that descends from a process, itself left out.
---@param root integer pid
---@return ciranda.sim.Process[]
function M.descendants(root)
  local all = M.children(root) == nil and children_of_all() or nil
  local result, queue = {}, { root }
  while #queue > 0 do
    local pid = table.remove(queue)
    for _, found in ipairs(all and all[pid] or M.children(pid) or {}) do
      result[#result + 1] = found
      queue[#queue + 1] = found.pid
    end
  end
  return result
end

--- Send a signal, if the process is still the one that was seen.
---@param process ciranda.sim.Process
---@param signal string|integer
---@return boolean sent
function M.signal(process, signal)
  local now = M.get(process.pid)
  if not now or now.start ~= process.start or now.state == "Z" then
    return false
  end
  return uv.kill(process.pid, signal) ~= nil
end

--- Whether a process has a variable with this value in the environment it was started with.
---@param pid integer
---@param setting string "NAME=value"
---@return boolean? known nil in the middle of an exec, when for a moment nobody can tell: look again
function M.has_environment(pid, setting)
  local environment
  for _ = 1, 2 do
    environment = read(("/proc/%d/environ"):format(pid))
    if environment ~= "" then
      break
    end
    local fields = stat_fields(pid)
    -- A zombie and a thread of the kernel have no memory (vsize); an exec has some, and no end of an environment
    -- (env_end) yet. Where there is one, the exec has just ended, or there is nothing in it: the second look tells.
    if not fields or fields[21] == "0" then
      break
    elseif fields[49] == "0" then
      return nil
    end
  end
  return environment ~= nil and ("\0" .. environment .. "\0"):find("\0" .. setting .. "\0", 1, true) ~= nil
end

--- What namespace a process is in, as a text that compares; nil when it may not be read.
---@param pid integer
---@param kind string "pid"
---@return string?
function M.namespace(pid, kind)
  return uv.fs_readlink(("/proc/%d/ns/%s"):format(pid, kind))
end

--- Whether a process has a file open whose path begins so.
---@param pid integer
---@param prefix string
---@return boolean
function M.holds(pid, prefix)
  local path = ("/proc/%d/fd"):format(pid)
  local directory, held = uv.fs_scandir(path), false
  -- To the end even when it is found: libuv 1.44 loses the memory of the last entry of a listing that is left there.
  while directory do
    local name = uv.fs_scandir_next(directory)
    if not name then
      break
    end
    local target = uv.fs_readlink(path .. "/" .. name)
    held = held or target ~= nil and target:sub(1, #prefix) == prefix
  end
  return held
end

return M
