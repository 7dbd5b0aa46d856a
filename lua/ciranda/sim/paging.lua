--- Pages of a list, by an opaque token.
--
-- The token names the last item that was given out, so that what is made or deleted between two calls neither repeats
-- nor hides another item. Lists are in the order of their names.

local errors = require("ciranda.sim.errors")

local M = {}

-- The APIs document no default; 500 is what Google's newer services use, 1000 their usual largest page.
M.DEFAULT_SIZE = 500
M.MAX_SIZE = 1000

local function token_of(key)
  return (("k" .. key):gsub(".", function(char)
    return ("%02x"):format(char:byte())
  end))
end

local function key_of(token)
  if #token % 2 == 1 or token:find "%X" then
    return nil
  end
  local text = token:gsub("%x%x", function(digits)
    return string.char(tonumber(digits, 16))
  end)
  return text:match "^k(.*)$"
end

--- One page of a sorted list.
---@generic T
---@param items T[] in ascending order of their keys
---@param key_of_item fun(item: T): string
---@param size integer? how many the client wants; nil or 0 means the default
---@param token string? nil or "" for the first page
---@return T[] page, string? next_token nil on the last page
--- Raises ciranda.sim.Status INVALID_ARGUMENT on a negative size or a token that is none of ours.
function M.page(items, key_of_item, size, token)
  size = size or 0
  if size < 0 then
    errors.raise(errors.invalid("page_size must not be negative", "page_size"))
  end
  size = size == 0 and M.DEFAULT_SIZE or math.min(size, M.MAX_SIZE)
  local first = 1
  if token and token ~= "" then
    local after = key_of(token)
    if not after then
      errors.raise(errors.invalid("Invalid page token", "page_token"))
    end
    -- The first item beyond the token's.
    local low, high = 1, #items + 1
    while low < high do
      local middle = (low + high) // 2
      if key_of_item(items[middle]) <= after then
        low = middle + 1
      else
        high = middle
      end
    end
    first = low
  end
  local last = math.min(first + size - 1, #items)
  local page = table.move(items, first, last, 1, {})
  if last < #items then
    return page, token_of(key_of_item(items[last]))
  end
  return page, nil
end

return M
