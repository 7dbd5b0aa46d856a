--- Lists of things, as gcloud prints them: columns, --filter and --format.
--
--     tables.print(messages, {
--       columns = { { "NAME", tables.short("name") }, { "STATE", "state.state" } },
--       filter = flags.filter,
--       format = flags.format,
--     })
local fields_of = require("ciranda.cli.field")
local json = require("ciranda.io.json")

local M = {}

local type = type -- for lists of many items

---@class ciranda.cli.Column
---@field [1] string the heading
---@field [2] string|fun(item: table): any the field's path, or what makes the cell

--- The flags of recipes that print lists.
---@type ciranda.cli.Flag[]
M.flags = {
  {
    name = "filter",
    help = "Of list: as gcloud's, such as state=READY AND (zone~^us OR -labels.env:*); or a word: a state, or a "
      .. "part of the name.",
  },
  {
    name = "format",
    help = "Of list and describe: json, value(FIELD,...) such as value(name.basename()), csv(...) or table(...).",
  },
}

--- A field by its path: "state.state", "tpu.nodeSpec[0].nodeId"; ".basename()" at its end gives a name without the
--- names before it.
---@param item table
---@param path string
---@return any value nil when it is not there
function M.field(item, path)
  return fields_of.reader(path)(item)
end

--- What makes a cell of the last part of a name such as "projects/P/locations/Z/nodes/N".
---@param path string
---@return fun(item: table): string?
function M.short(path)
  return function(item)
    return M.field(item, path .. ".basename()")
  end
end

--- The zone in an item's full name.
---@param item { name: string }
---@return string?
function M.zone(item)
  return item.name:match("/locations/([^/]+)/")
end

---@param value any
---@return string
local function text_of(value)
  if value == nil or value == json.null then
    return ""
  end
  return type(value) == "table" and json.encode(value) or tostring(value)
end

--- A filter as a test.
---@param text string?
---@return fun(item: table): boolean
-- Raises "usage" for what it does not understand.
function M.filter(text)
  return text and (require("ciranda.cli.filter").compile(text)) or function()
    return true
  end
end

-- Output ------------------------------------------------------------------------------------------------------------

--- Rows as aligned columns, one line each, without blanks at the ends.
---@param rows string[][]
---@return string text without a last newline
function M.text(rows)
  local widths = {}
  for _, cells in ipairs(rows) do
    for column, cell in ipairs(cells) do
      widths[column] = math.max(widths[column] or 0, utf8.len(cell) or #cell)
    end
  end
  local lines = {}
  for place, cells in ipairs(rows) do
    local line = {}
    for column, cell in ipairs(cells) do
      line[column] = cell .. (" "):rep(widths[column] - (utf8.len(cell) or #cell))
    end
    lines[place] = table.concat(line, "  "):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

---@param format string?
---@return ciranda.cli.Format?
local function parsed(format)
  return format and require("ciranda.cli.format").parse(format) or nil
end

--- Refuses a format that there is none of, before anything is asked.
---@param format string?
-- Raises "usage".
function M.check_format(format)
  parsed(format)
end

--- Refuses a format or a filter that is not understood, before anything is asked.
---@param flags { filter: string?, format: string? }
-- Raises "usage".
function M.check(flags)
  M.check_format(flags.format)
  M.filter(flags.filter)
end

--- The paths of the fields that a list's flags need, nil when they need whole messages.
---@param flags { filter: string?, format: string? }
---@param records boolean? with --json, where the format is not used
---@return string[]?
function M.needed(flags, records)
  local format = not records and parsed(flags.format) or nil
  local paths = format and format.kind ~= "json" and format.paths or nil
  if paths and flags.filter then
    local _, more = require("ciranda.cli.filter").compile(flags.filter)
    table.move(more, 1, #more, #paths + 1, paths)
  end
  return paths
end

--- Prints values, a line for each item. Lists may be long: no table is made for a row.
---@param format ciranda.cli.Format
---@param items table[]
local function print_values(format, items)
  local readers = {}
  for place, path in ipairs(format.paths) do
    readers[place] = fields_of.reader(path)
  end
  local pieces, count, columns, separator = {}, 0, #readers, format.separator
  for index = 1, #items do
    local item = items[index]
    for place = 1, columns do
      local value = readers[place](item)
      pieces[count + 1] = type(value) == "string" and value or text_of(value)
      pieces[count + 2] = place < columns and separator or "\n"
      count = count + 2
    end
    if count >= 1024 or index == #items then
      io.write(table.concat(pieces, "", 1, count))
      count = 0
    end
  end
end

--- Prints items in a format that names fields.
---@param format ciranda.cli.Format
---@param items table[]
local function print_fields(format, items)
  if format.kind == "value" then
    return print_values(format, items)
  end
  local formats = require("ciranda.cli.format")
  local rows = formats.rows(format, items, text_of)
  if format.kind == "csv" then
    io.write(formats.csv(format, rows))
  elseif #rows > 0 then
    io.write(M.text(rows), "\n")
  end
end

--- Sorts messages by their names. The API's lists are in that order, so it is looked at first.
---@param messages { name: string }[]
function M.sort(messages)
  local before = ""
  for place = 1, #messages do
    local name = messages[place].name
    if name < before then
      table.sort(messages, function(a, b)
        return a.name < b.name
      end)
      return
    end
    before = name
  end
end

--- Says, on standard error, which fields of a filter nothing in the list has: most often they are misspelt.
---@param items table[]
---@param paths string[]
local function tell_absent(items, paths)
  for _, path in ipairs(#items > 0 and paths or {}) do
    local read, there = fields_of.reader(path), false
    for place = 1, #items do
      there = read(items[place]) ~= nil
      if there then
        break
      end
    end
    if not there then
      io.stderr:write(("--filter: nothing in the list has a field %s\n"):format(path))
    end
  end
end

--- Prints items as the records of --json, one a line.
---@param items table[]
---@param event string
local function print_records(items, event)
  for _, item in ipairs(items) do
    io.write(json.encode({ event = event, [event] = item }), "\n")
  end
end

--- Prints a list on standard output.
---@param items table[]
---@param options { columns: ciranda.cli.Column[], filter: string?, format: string?,
---  event: string? } event: with --json, what a record and its item are called; columns and format are not used
-- Raises "usage" for the filter or the format.
function M.print(items, options)
  local format = parsed(options.format)
  local chosen = items
  if options.filter then
    local matches, paths = require("ciranda.cli.filter").compile(options.filter)
    tell_absent(items, paths)
    chosen = {}
    for _, item in ipairs(items) do
      if matches(item) then
        chosen[#chosen + 1] = item
      end
    end
  end
  if options.event then
    return print_records(chosen, options.event)
  elseif format and format.kind ~= "json" then
    return print_fields(format, chosen)
  elseif format then
    io.write(json.encode(json.array(chosen), { indent = true }), "\n")
    return
  end
  local rows = { {} }
  for place, column in ipairs(options.columns) do
    rows[1][place] = column[1]
  end
  for _, item in ipairs(chosen) do
    local row = {}
    for place, column in ipairs(options.columns) do
      local make = column[2]
      local cell
      if type(make) == "function" then
        cell = text_of(make(item))
      else
        cell = text_of(M.field(item, make))
      end
      row[place] = cell == "" and "-" or cell
    end
    rows[#rows + 1] = row
  end
  io.write(M.text(rows), "\n")
end

--- Prints one thing: JSON, or some of its fields.
---@param item table
---@param format string?
---@param event string? with --json, what its record is called
-- Raises "usage" for the format.
function M.print_one(item, format, event)
  local wanted = parsed(format)
  if event then
    print_records({ item }, event)
  elseif wanted and wanted.kind ~= "json" then
    print_fields(wanted, { item })
  else
    io.write(json.encode(item, { indent = true }), "\n")
  end
end

return M
