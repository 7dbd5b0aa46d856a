--- `--format`: json, and gcloud's value(FIELD,...), get(...), csv(...) and table(...).
---
--- `[no-heading]` after csv or table leaves the first line out, `[separator="X"]` after value, get or csv stands
--- between fields; `FIELD:label=NAME` names a column.
local err = require("ciranda.io.error")
local fields_of = require("ciranda.cli.field")

local M = {}

--- What gcloud has besides: refused by name, so that nobody looks for a typing error.
local OTHERS = "config default diff disable flattened list multi none object text yaml"

local function refuse(format, ...)
  err.raise({ code = "usage", op = "list", message = "--format: " .. format:format(...) })
end

---@class ciranda.cli.Format
---@field kind "json"|"value"|"csv"|"table"
---@field paths string[]
---@field labels string[]    headings, in capitals
---@field heading boolean    of csv and table
---@field separator string   of value and csv

--- A column's heading: the last name in its path, ACCELERATOR_TYPE of acceleratorType.
local function label_of(path)
  local name = path:gsub("%.basename%(%)$", ""):gsub("%[%d+%]", ""):gsub("[\"']", ""):match("[^.]*$")
  return (name:gsub("(%l)(%u)", "%1_%2"):upper())
end

local function read_attributes(format, text, result)
  for attribute in text:gmatch("[^,]+") do
    local separator = attribute:match('^%s*separator="(.*)"%s*$')
      or attribute:match("^%s*separator='(.*)'%s*$")
    if separator and result.kind ~= "table" then
      result.separator = separator:gsub("\\t", "\t"):gsub("\\n", "\n")
    elseif attribute:match("^%s*no%-heading%s*$") then
      result.heading = false
    else
      refuse(
        '%s: [%s] is not understood; no-heading of csv and table is, and separator="X" of value and csv',
        format,
        attribute
      )
    end
  end
end

--- Read a format.
---@param format string
---@return ciranda.cli.Format
--- Raises `usage` for what is not there.
function M.parse(format)
  if format == "json" then
    return { kind = "json", paths = {}, labels = {}, heading = false, separator = "" }
  end
  local kind, attributes, inside = format:match("^(%l+)(%b[])%((.+)%)$")
  if not kind then
    kind, inside = format:match("^(%l+)%((.+)%)$")
  end
  kind = kind == "get" and "value" or kind
  if kind ~= "value" and kind ~= "csv" and kind ~= "table" then
    local name = format:match("^%l+")
    local other = name and (" " .. OTHERS .. " "):find(" " .. name .. " ", 1, true)
    refuse(
      "%q is not there; it takes json, value(FIELD,...), csv(FIELD,...) or table(FIELD,...)%s",
      format,
      other and ", but none of gcloud's other formats" or ""
    )
  end
  local result =
    { kind = kind, paths = {}, labels = {}, heading = true, separator = kind == "csv" and "," or "\t" }
  if attributes then
    read_attributes(format, attributes:sub(2, -2), result)
  end
  for field in inside:gmatch("[^,]+") do
    local path, label = field:match("^%s*(.-)%s*:label=[\"']?(.-)[\"']?%s*$")
    path = path or field:match("^%s*(.-)%s*$")
    local plain = path:gsub("%.basename%(%)$", "")
    if plain == "" or plain:find("[():]") then
      refuse(
        "%q is no field: of functions only basename() is understood, of attributes only :label=NAME",
        field
      )
    end
    table.insert(result.paths, path)
    table.insert(result.labels, label or label_of(path))
  end
  if #result.paths == 0 then
    refuse("%q names no field", format)
  end
  return result
end

--- Items as rows of texts.
---@param format ciranda.cli.Format
---@param items table[]
---@param text_of fun(value: any): string
---@return string[][] rows with the heading when there is to be one
function M.rows(format, items, text_of)
  local rows, readers = {}, {}
  for place, path in ipairs(format.paths) do
    readers[place] = fields_of.reader(path)
  end
  if format.heading then
    rows[1] = format.labels
  end
  for _, item in ipairs(items) do
    local row = {}
    for place, read in ipairs(readers) do
      row[place] = text_of(read(item))
    end
    rows[#rows + 1] = row
  end
  return rows
end

--- Rows as CSV, a line each (RFC 4180's quotes). The heading is in small letters, as gcloud writes it.
---@param format ciranda.cli.Format
---@param rows string[][]
---@return string
function M.csv(format, rows)
  local lines = {}
  for place, row in ipairs(rows) do
    local cells = {}
    for column, cell in ipairs(row) do
      cell = format.heading and place == 1 and cell:lower() or cell
      if cell:find(format.separator, 1, true) or cell:find('["\r\n]') then
        cell = '"' .. cell:gsub('"', '""') .. '"'
      end
      cells[column] = cell
    end
    lines[place] = table.concat(cells, format.separator) .. "\n"
  end
  return table.concat(lines)
end

return M
