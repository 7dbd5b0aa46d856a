--- What a thousand connections ask of the file system, looked up once and again after a while: the content of small
--- files, the names in a directory.

local fs = require("ciranda.io.fs")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

-- Milliseconds for which what was found is taken to be unchanged.
local FRESH_MS = 2000

---@class ciranda.ssh.FileCache
---@field private look fun(path: string, known: table?): table
---@field private entries table<string, table>
local FileCache = {}
FileCache.__index = FileCache

--- A cache of what `look` finds.
---@param look fun(path: string, known: { value: any }?): { value: any } may wait; what it raises is not kept
---@return ciranda.ssh.FileCache
function M.new(look)
  return setmetatable({ look = look, entries = {} }, FileCache)
end

--- A cache of the files' contents, parsed. A file that does not exist has none.
---@param parse fun(text: string, path: string): any
---@param most integer bytes; a larger file is refused
---@return ciranda.ssh.FileCache
function M.of_files(parse, most)
  return M.new(function(path, known)
    local stat = fs.stat(path, { missing_ok = true })
    local stamp = stat and ("%d.%d.%d"):format(stat.ino, stat.mtime_ns, stat.size) or "absent"
    if known and known.stamp == stamp then
      return known
    end
    return { stamp = stamp, value = stat and parse(fs.read(path, most), path) or nil }
  end)
end

--- What is there. Of those who ask at the same time one looks.
---@async
---@param path string
---@return any value the same one while nothing changes; not to be written to
--- Raises what looking raises.
function FileCache:get(path)
  local known = self.entries[path]
  while known and known.looking do
    known.looking:wait()
    known = self.entries[path]
  end
  if known and uv.now() - known.checked < FRESH_MS then
    return known.value
  end
  local looking = task.event()
  self.entries[path] = { looking = looking }
  local ok, found = pcall(self.look, path, known)
  self.entries[path] = ok and found or nil
  looking:set()
  if not ok then
    error(found, 0)
  end
  found.checked = uv.now()
  return found.value
end

--- Look again when it is asked for next: it was written to.
---@param path string
function FileCache:forget(path)
  local known = self.entries[path]
  if known and not known.looking then
    self.entries[path] = nil
  end
end

return M
