--- Patterns of file names on the other side, expanded over SFTP as a shell would: `*`, `?`, `[a-z]`, `[!a-z]`, and `\`
--- before what is to be taken as it is. No shell sees them.

local errors = require("ciranda.io.error")

local M = {}

--- Paths that a pattern may mean: more is a mistake, not a wish.
M.MOST = 100000

--- Whether a path has characters that make it a pattern.
---@param path string
---@return boolean
function M.is_pattern(path)
  return path:gsub("\\.", ""):find("[*?[]") ~= nil
end

--- The Lua pattern of one part of a path.
local function to_lua(part)
  local out, at = { "^" }, 1
  while at <= #part do
    local char = part:sub(at, at)
    local set = char == "[" and part:match("^%[[!^]?%]?[^%]]*%]", at)
    if char == "*" then
      out[#out + 1] = ".*"
    elseif char == "?" then
      out[#out + 1] = "."
    elseif set then
      local negated, inside = set:match("^%[([!^]?)(.*)%]$")
      out[#out + 1] = ("[%s%s]"):format(negated ~= "" and "^" or "", (inside:gsub("[%%%]%^]", "%%%0")))
      at = at + #set - 1
    else
      if char == "\\" and at < #part then
        at = at + 1
        char = part:sub(at, at)
      end
      out[#out + 1] = char:gsub("%W", "%%%0")
    end
    at = at + 1
  end
  return table.concat(out) .. "$"
end

--- The paths that a pattern means, sorted. A path that is there as it is written is taken as that, whatever it has in
--- it; names that begin with a dot are meant only by a pattern that does too.
---@async
---@param client ciranda.ssh.Sftp
---@param pattern string
---@return { path: string, type: string }[] found none when there are none
function M.expand(client, pattern)
  local literal = client:exists(pattern)
  if literal then
    return { { path = pattern, type = literal } }
  elseif not M.is_pattern(pattern) then
    return {}
  end
  local places = { pattern:sub(1, 1) == "/" and "/" or "" }
  for part in pattern:gmatch("[^/]+") do
    local next_places = {}
    if M.is_pattern(part) then
      local wanted = to_lua(part)
      for _, place in ipairs(places) do
        local ok, entries = pcall(client.list, client, place == "" and "." or place)
        if not ok and not errors.is(entries, "not_found", "permission", "failed") then
          error(entries, 0)
        end
        for _, entry in ipairs(ok and entries or {}) do
          local hidden = entry.name:sub(1, 1) == "." and part:sub(1, 1) ~= "."
          if not hidden and entry.name:find(wanted) then
            next_places[#next_places + 1] = place .. entry.name .. "/"
          end
        end
      end
    else
      part = part:gsub("\\(.)", "%1")
      for index, place in ipairs(places) do
        next_places[index] = place .. part .. "/"
      end
    end
    if #next_places > M.MOST then
      errors.raise({
        code = "invalid",
        op = "sftp",
        target = pattern,
        message = ("%s means more than %d paths"):format(pattern, M.MOST),
      })
    end
    places = next_places
  end
  local found = {}
  for _, place in ipairs(places) do
    local path = place:sub(1, -2)
    local kind = client:exists(path)
    if kind then
      found[#found + 1] = { path = path, type = kind }
    end
  end
  return found
end

return M
