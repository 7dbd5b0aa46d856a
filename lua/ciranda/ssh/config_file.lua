--- ssh_config files: their lines, and the files that a pattern means. See ciranda.ssh.config.

local account = require("ciranda.io.account")
local errors = require("ciranda.io.error")
local file_cache = require("ciranda.ssh.file_cache")
local fs = require("ciranda.io.fs")
local known_hosts = require("ciranda.ssh.known_hosts")

local M = {}

-- A file larger than this is no configuration.
local MAX_FILE = 16 * 1024 * 1024

-- Lines ------------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.ConfigLine
---@field keyword string   lower case
---@field args string[]
---@field rest string      everything after the keyword, for commands
---@field where string     "path:line"

--- Split arguments: white space, quotes, a comment at the end. nil when a quote is not closed.
local function split(text)
  local args = {}
  local at = 1
  while true do
    at = text:find("%S", at)
    if not at or text:sub(at, at) == "#" then
      return args
    end
    local word = {}
    while at <= #text and not text:find("^%s", at) do
      local char = text:sub(at, at)
      if char == '"' or char == "'" then
        local piece = {}
        at = at + 1
        while text:sub(at, at) ~= char do
          if at > #text then
            return nil
          end
          if text:sub(at, at) == "\\" and text:find("^[\"'\\]", at + 1) then
            at = at + 1
          end
          piece[#piece + 1] = text:sub(at, at)
          at = at + 1
        end
        word[#word + 1] = table.concat(piece)
      elseif char == "\\" and text:find("^[\"'\\]", at + 1) then
        at = at + 1
        word[#word + 1] = text:sub(at, at)
      elseif char == "\\" and text:find("^ ", at + 1) then
        at = at + 1
        word[#word + 1] = " "
      else
        word[#word + 1] = char
      end
      at = at + 1
    end
    args[#args + 1] = table.concat(word)
  end
end

--- The lines of a text.
---@param text string
---@param path string for messages
---@return ciranda.ssh.ConfigLine[]
--- Raises `usage` for a line that cannot be read.
function M.parse(text, path)
  local lines = {}
  local number = 0
  for line in text:gmatch("([^\n]*)\n?") do
    number = number + 1
    line = line:gsub("[%s\f\r]+$", "")
    local keyword, rest = line:match('^%s*"([^"]+)"%s*=?%s*(.*)$')
    if not keyword then
      keyword, rest = line:match('^%s*([^%s=#"]+)%s*=?%s*(.*)$')
    end
    if keyword then
      local args = split(rest)
      if not args then
        errors.raise({
          code = "usage",
          op = "ssh.config",
          target = path,
          message = ("%s:%d: a quote is not closed: %s"):format(path, number, line),
        })
      end
      lines[#lines + 1] =
        { keyword = keyword:lower(), args = args, rest = rest, where = ("%s:%d"):format(path, number) }
    end
  end
  return lines
end

-- Files ------------------------------------------------------------------------------------------------------------

local parsed = file_cache.of_files(M.parse, MAX_FILE)

--- The lines of a file, or nil when it does not exist.
---@async
---@param path string
---@return ciranda.ssh.ConfigLine[]?
--- Raises `usage` for a line that cannot be read, `permission`, `io`.
function M.read(path)
  return parsed:get(path)
end

local globs = file_cache.new(function(pattern)
  local paths = { "" }
  for part in pattern:gmatch("[^/]+") do
    local next_paths = {}
    for _, path in ipairs(paths) do
      if part:find("[*?]") then
        local ok, entries = pcall(fs.list, path == "" and "/" or path)
        for _, entry in ipairs(ok and entries or {}) do
          local name = type(entry) == "table" and entry.name or entry
          local hidden = name:sub(1, 1) == "." and part:sub(1, 1) ~= "."
          if not hidden and known_hosts.matches({ part }, name) then
            next_paths[#next_paths + 1] = path .. "/" .. name
          end
        end
      else
        next_paths[#next_paths + 1] = path .. "/" .. part
      end
    end
    paths = next_paths
  end
  table.sort(paths)
  return { value = paths }
end)

--- The files that a pattern with `*`, `?` in its last parts means, sorted.
---@async
---@param pattern string absolute
---@return string[]
function M.glob(pattern)
  return pattern:find("[*?[]") and globs:get(pattern) or { pattern }
end

--- `~/` replaced by the home directory.
---@param path string
---@return string
function M.home(path)
  return path:sub(1, 2) == "~/" and account.home() .. path:sub(2) or path
end

return M
