--- URLs: percent-encoding, queries, and what of a URL may be shown.

local errors = require("ciranda.io.error")

local M = {}

--- Percent-encode everything but letters, digits and `-._~` (RFC 3986's unreserved characters): right for one segment
--- of a path, where `/` becomes `%2F`, and for the names and values of a query.
---@param text string
---@return string
function M.escape(text)
  return (text:gsub("[^%w%-._~]", function(character)
    return ("%%%02X"):format(character:byte())
  end))
end

--- Undo percent-encoding. A `%` that begins none stays.
---@param text string
---@return string
function M.unescape(text)
  return (text:gsub("%%(%x%x)", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

--- One value of a query as text.
local function text_of(value, name)
  local kind = type(value)
  if kind == "string" or kind == "boolean" then
    return tostring(value)
  elseif kind == "number" then
    return math.type(value) == "integer" and ("%d"):format(value) or ("%.17g"):format(value)
  end
  return errors.misuse(
    3,
    "url.query: the value of '%s' must be text, a number or a boolean, not %s",
    name,
    kind
  )
end

--- The query string of a table, names in alphabetical order; a list as value repeats the name. Also the body of a form.
---@param fields table<string, string|number|boolean|(string|number|boolean)[]>
---@return string query without "?"
function M.query(fields)
  local names, parts = {}, {}
  for name in pairs(fields) do
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local value = fields[name]
    for _, each in ipairs(type(value) == "table" and value or { value }) do
      parts[#parts + 1] = M.escape(name) .. "=" .. M.escape(text_of(each, name))
    end
  end
  return table.concat(parts, "&")
end

--- The fields of a query string or form. Of a repeated name the last value counts in `fields`; `list` has all.
---@param query string?
---@return table<string, string> fields
---@return { [1]: string, [2]: string }[] list in their order
function M.parse_query(query)
  local fields, list = {}, {}
  for part in (query or ""):gmatch("[^&]+") do
    local name, value = part:match("^([^=]*)=?(.*)$")
    name = M.unescape((name:gsub("+", " ")))
    value = M.unescape((value:gsub("+", " ")))
    fields[name] = value
    list[#list + 1] = { name, value }
  end
  return fields, list
end

--- A URL without what may be secret: user, password, query and fragment.
---@param url string
---@return string
function M.shown(url)
  local shown = url:gsub("[?#].*$", "")
  shown = shown:gsub("^(%a[%w+.-]*://)[^/@]*@", "%1")
  return shown
end

return M
