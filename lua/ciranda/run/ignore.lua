--- The rules of .gitignore files, as git's own documentation (gitignore(5)) states them.
--
-- Pure: a rule list is made from a file's text and asked about paths. A pattern is cut at `/` and each
-- piece becomes a Lua pattern, so `*` and `[...]` cannot reach over a `/`, and `**` is a piece of its own.
local M = {}

local POSIX_CLASSES = {
  alnum = "%w",
  alpha = "%a",
  blank = " \t",
  cntrl = "%c",
  digit = "%d",
  graph = "%g",
  lower = "%l",
  print = " %g",
  punct = "%p",
  space = "%s",
  upper = "%u",
  xdigit = "%x",
}

--- Reads a bracket expression that starts at `position` of `glob`.
---@param glob string
---@param position integer the place of `[`
---@return string? set the Lua character set, nil when the bracket is never closed
---@return integer? last the place of the closing `]`
local function bracket(glob, position)
  local index = position + 1
  local out = { "[" }
  if glob:sub(index, index):match("[!^]") then
    out[1] = "[^/"
    index = index + 1
  end
  local first = true
  while true do
    local char = glob:sub(index, index)
    if char == "" then
      return nil
    elseif char == "]" and not first then
      break
    end
    local class = glob:match("^%[:(%a+):%]", index)
    if class then
      if not POSIX_CLASSES[class] then
        return nil
      end
      out[#out + 1] = POSIX_CLASSES[class]
      index = index + #class + 4
    else
      if char == "\\" then
        index = index + 1
        char = glob:sub(index, index)
      end
      local last = glob:match("^%-\\?([^%]])", index + 1)
      if last then
        -- A range whose ends are letters or digits may be handed on; others are spelt out.
        local skipped = glob:sub(index + 2, index + 2) == "\\" and 3 or 2
        for byte = char:byte(), last:byte() do
          out[#out + 1] = "%" .. string.char(byte)
          if string.char(byte):match("%w") then
            out[#out] = string.char(byte)
          end
        end
        index = index + skipped + 1
      else
        out[#out + 1] = char:match("%w") and char or "%" .. char
        index = index + 1
      end
    end
    first = false
  end
  if #out == 1 and out[1] == "[" then
    return nil
  end
  return table.concat(out) .. "]", index
end

--- One piece of a pattern (no `/` in it) as a Lua pattern; nil when git would match nothing with it.
---@param glob string
---@return string?
local function piece_pattern(glob)
  local out = { "^" }
  local index = 1
  while index <= #glob do
    local char = glob:sub(index, index)
    if char == "*" then
      out[#out + 1] = ".*"
      while glob:sub(index + 1, index + 1) == "*" do
        index = index + 1
      end
    elseif char == "?" then
      out[#out + 1] = "."
    elseif char == "[" then
      local set, last = bracket(glob, index)
      if not set then
        return nil
      end
      out[#out + 1] = set
      index = last
    else
      if char == "\\" then
        index = index + 1
        char = glob:sub(index, index)
        if char == "" then
          return nil
        end
      end
      out[#out + 1] = char:match("[%w\128-\255]") and char or "%" .. char
    end
    index = index + 1
  end
  out[#out + 1] = "$"
  return table.concat(out)
end

---@class ciranda.ignore.Rule
---@field negated boolean
---@field directory_only boolean
---@field anchored boolean matched from the file's own directory; otherwise against the last piece alone
---@field pieces (string|true)[] Lua patterns; true stands for `**`

--- One line of a .gitignore as a rule, or nil for a blank, a comment or what git cannot match either.
---@param line string
---@return ciranda.ignore.Rule?
local function parse_line(line)
  line = line:gsub("\r$", "")
  -- Trailing blanks do not count unless escaped.
  while line:match(" $") and not line:match("\\ $") do
    line = line:sub(1, -2)
  end
  if line == "" or line:sub(1, 1) == "#" then
    return nil
  end
  local rule = { negated = false, directory_only = false, anchored = false, pieces = {} }
  if line:sub(1, 1) == "!" then
    rule.negated = true
    line = line:sub(2)
  end
  if line:sub(-1) == "/" then
    rule.directory_only = true
    line = line:sub(1, -2)
  end
  if line:find("/", 1, true) then
    rule.anchored = true
    line = line:gsub("^/", "")
  end
  if line == "" then
    return nil
  end
  for piece in (line .. "/"):gmatch("([^/]*)/") do
    if piece == "**" then
      if rule.pieces[#rule.pieces] ~= true then
        rule.pieces[#rule.pieces + 1] = true
      end
    else
      local pattern = piece_pattern(piece)
      if not pattern then
        return nil
      end
      rule.pieces[#rule.pieces + 1] = pattern
    end
  end
  if #rule.pieces == 1 and rule.pieces[1] == true then
    rule.pieces[1] = "^.*$"
  end
  return rule
end

--- Reads the text of a .gitignore (or of .git/info/exclude).
---@param text string
---@return ciranda.ignore.Rule[]
function M.parse(text)
  local rules = {}
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    rules[#rules + 1] = parse_line(line)
  end
  return rules
end

---@param pieces (string|true)[]
---@param at integer
---@param parts string[]
---@param from integer
---@return boolean
local function pieces_match(pieces, at, parts, from)
  while at <= #pieces do
    local piece = pieces[at]
    if piece == true then
      if at == #pieces then
        -- `dir/**` is everything inside dir, not dir itself.
        return from <= #parts
      end
      for next_part = from, #parts do
        if pieces_match(pieces, at + 1, parts, next_part) then
          return true
        end
      end
      return false
    end
    if from > #parts or not parts[from]:find(piece) then
      return false
    end
    at, from = at + 1, from + 1
  end
  return from > #parts
end

---@param rule ciranda.ignore.Rule
---@param parts string[]
---@param is_directory boolean
---@return boolean
local function rule_matches(rule, parts, is_directory)
  if rule.directory_only and not is_directory then
    return false
  end
  if rule.anchored then
    return pieces_match(rule.pieces, 1, parts, 1)
  end
  return parts[#parts]:find(rule.pieces[1]) ~= nil
end

--- What a file's rules say of a path: the last rule that matches decides.
---@param rules ciranda.ignore.Rule[]
---@param path string relative to the directory of the file the rules came from, `/` between parts
---@param is_directory boolean
---@return boolean? verdict true left out, false kept, nil when no rule speaks of it
function M.verdict(rules, path, is_directory)
  local parts = {}
  for part in path:gmatch("[^/]+") do
    parts[#parts + 1] = part
  end
  for index = #rules, 1, -1 do
    if rule_matches(rules[index], parts, is_directory) then
      return not rules[index].negated
    end
  end
  return nil
end

return M
