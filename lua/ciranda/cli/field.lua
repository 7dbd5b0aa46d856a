--- Fields of messages by their paths: "state.state", "tpu.nodeSpec[0].nodeId", "labels.'my-key'"; ".basename()" at the
--- end gives a name without the names before it.
local M = {}

local type = type -- for lists of many items

--- The keys of a path, and whether it ends in basename().
---@param path string
---@return (string|integer)[]
---@return boolean
local function parse(path)
  local plain = path:match("^(.*)%.basename%(%)$")
  local keys, at = {}, 1
  path = plain or path
  while at <= #path do
    local quote = path:match("^[\"']", at)
    local stop = quote and path:find(quote, at + 1, true)
    if stop then
      keys[#keys + 1] = path:sub(at + 1, stop - 1)
      at = stop + 1
    else
      local piece = path:match("^[^.%[]*", at)
      keys[#keys + 1] = piece ~= "" and piece or nil
      at = at + #piece
    end
    local index, after = path:match("^%[(%d+)%]()", at)
    while index do
      keys[#keys + 1] = math.tointeger(tonumber(index)) + 1
      at = after
      index, after = path:match("^%[(%d+)%]()", at)
    end
    at = path:match("^%.()", at) or at > #path and at or at + 1
  end
  return keys, plain ~= nil
end

--- What reads a field by its path.
---@param path string
---@return fun(item: table): any nil when it is not there
function M.reader(path)
  local keys, basename = parse(path)
  local first, second = keys[1], keys[2]
  if first and #keys <= 2 and not basename then -- most paths, and a list has many items
    return function(item)
      local value = item[first] or nil
      if second then
        return type(value) == "table" and value[second] or nil
      end
      return value
    end
  end
  return function(value)
    for _, key in ipairs(keys) do
      value = type(value) == "table" and value[key] or nil
    end
    if basename and type(value) == "string" then
      return value:match("[^/]*$")
    end
    return value
  end
end

return M
