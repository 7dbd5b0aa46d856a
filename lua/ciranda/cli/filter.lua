--- `--filter`, in the grammar of gcloud's filters (`gcloud topic filters`).
---
---     local matches, paths = filter.compile("state=READY AND (labels.env=prod OR -labels.env:*)")
---
--- Terms beside each other are joined as by AND, which binds less than OR; AND and OR in one pair of parentheses are
--- refused, as gcloud does, because its OR binds more than its AND, which nobody expects. What a term means is in
--- docs/cli-filter.md.
local err = require("ciranda.io.error")
local fields = require("ciranda.cli.field")
local json = require("ciranda.io.json")

local M = {}

---@alias ciranda.cli.Test fun(item: table): boolean

-- Values ------------------------------------------------------------------------------------------------------------

local function text_of(value)
  if value == nil or value == json.null then
    return "null"
  end
  return type(value) == "table" and json.encode(value) or tostring(value)
end

--- The values that a term compares: of a list each, of an object its keys and values, else the value itself; and of a
--- full name also its last part. A field that is absent is one value: nil.
local function candidates(value)
  local list = {}
  local function add(each)
    list[#list + 1] = each
    if type(each) == "string" and each:find("/", 1, true) then
      list[#list + 1] = each:match("[^/]*$")
    end
  end
  if type(value) == "table" then
    for key, each in pairs(value) do
      if type(key) == "string" then
        add(key)
      end
      if type(each) == "table" and math.type(key) == "integer" then
        table.move(candidates(each), 1, #candidates(each), #list + 1, list)
      else
        add(each)
      end
    end
  elseif value ~= nil and value ~= json.null then
    add(value)
  end
  return list
end

--- Seconds since 1970 of what is written as a date, a time, or a length of time from now ("-P1D", "-PT2H30M").
local function time_of(text)
  local kinds = require("ciranda.gcp.credential_kinds")
  local sign, date, clock = text:upper():match("^([+-]?)P(%d*D?)T?([%dHMS]*)$")
  if sign and (date .. clock) ~= "" then
    local seconds, left = 0, date .. clock
    for unit, length in pairs({ D = 86400, H = 3600, M = 60, S = 1 }) do
      local count
      left, count = left:gsub("(%d+)" .. unit, function(number)
        seconds = seconds + tonumber(number) * length
        return ""
      end)
      if count > 1 then
        return nil
      end
    end
    return left == "" and os.time() + (sign == "-" and -seconds or seconds) or nil
  end
  local day, hours = text:match("^(%d%d%d%d%-%d%d%-%d%d)[T ]?(.*)$")
  if not day then
    return nil
  end
  hours = hours:gsub("Z$", "")
  hours = hours == "" and "00:00:00" or hours:match("^%d%d:%d%d$") and hours .. ":00" or hours
  return kinds.parse_time(day .. "T" .. hours .. "Z")
end

-- Operators ---------------------------------------------------------------------------------------------------------

--- Whether a value is exactly what is wanted; case does not count.
local function equals(value, wanted)
  local number = tonumber(wanted)
  if type(value) == "number" and number then
    return value == number
  end
  return text_of(value):lower() == wanted:lower()
end

--- What tests for a pattern of ":": a part of the value, or with one * the whole of it.
local function contains(wanted)
  local pattern = wanted:lower()
  local before, after = pattern:match("^([^*]*)%*([^*]*)$")
  return function(value)
    local text = text_of(value):lower()
    if not before then
      return text:find(pattern, 1, true) ~= nil
    end
    return #text >= #before + #after
      and text:sub(1, #before) == before
      and text:sub(#text - #after + 1) == after
  end
end

local ORDER = {
  ["<"] = function(a, b)
    return a < b
  end,
  ["<="] = function(a, b)
    return a <= b
  end,
  [">"] = function(a, b)
    return a > b
  end,
  [">="] = function(a, b)
    return a >= b
  end,
}

--- What tests for an order: of numbers, of times, else of texts.
local function ordered(compare, wanted)
  local number = tonumber(wanted)
  local moment = time_of(wanted)
  return function(value)
    if number and tonumber(value) then
      return compare(tonumber(value), number)
    end
    local text = text_of(value)
    local then_ = moment and text:find("^%d%d%d%d%-%d%d%-%d%dT") and time_of(text)
    if then_ then
      return compare(then_, moment)
    end
    return compare(text, wanted)
  end
end

-- Parsing -----------------------------------------------------------------------------------------------------------

---@class ciranda.cli.FilterParser
---@field text string
---@field at integer
---@field paths string[]
local Parser = {}
Parser.__index = Parser

--- Refuse the filter, with a mark under the place.
function Parser:refuse(at, format, ...)
  -- The mark stands by characters, a place is in bytes; a line's end or a tab would move it.
  local shown = self.text:gsub("%c", " ")
  local column = utf8.len(shown:sub(1, at - 1)) or at - 1
  err.raise({
    code = "usage",
    op = "list",
    message = ("--filter: %s\n  %s\n  %s^"):format(format:format(...), shown, (" "):rep(column)),
  })
end

function Parser:skip()
  self.at = self.text:match("^%s*()", self.at)
  return self.at <= #self.text
end

--- Whether the next token is this word; it is taken unless `peek`.
function Parser:word(word, peek)
  self:skip()
  local after = self.at + #word
  local found = self.text:sub(self.at, after - 1) == word
  if found and (after > #self.text or self.text:find("^[%s()]", after)) then
    self.at = peek and self.at or after
    return true
  end
  return false
end

function Parser:logical(peek)
  return self:word("AND", peek) or self:word("OR", peek) or self:word("NOT", peek)
end

--- A token that may be quoted, in whole or in parts; nil when there is none.
---@param terminators string for a set of a Lua pattern, besides blanks
---@param keep boolean? keep the quotes (of a path)
function Parser:token(terminators, keep)
  local text, at = self.text, self.at
  local stop = "[%s" .. terminators .. "]"
  local parts, quote, began = nil, nil, nil
  while at <= #text do
    local character, following = text:sub(at, at), text:sub(at + 1, at + 1)
    if character == "\\" and following ~= "" then
      local plain = following == "\\" or following == quote or not quote and following:find("^[\"']")
      parts = (parts or "") .. (plain and "" or "\\") .. following
      at = at + 1
    elseif quote then
      if character == quote then
        quote = nil
        parts = keep and parts .. character or parts
      else
        parts = parts .. character
      end
    elseif character:find("^[\"']") then
      quote, began = character, at
      parts = (parts or "") .. (keep and character or "")
    elseif character:find(stop) then
      break
    else
      parts = (parts or "") .. character
    end
    at = at + 1
  end
  if quote then
    self:refuse(began, "the quote that begins here has no end")
  end
  self.at = at
  return parts
end

--- The values in parentheses; the opening one is next. Words that join are left out, as in (a OR b).
function Parser:list()
  local began, list = self.at, {}
  self.at = self.at + 1
  while true do
    self.at = self.text:match("^[%s,]*()", self.at)
    if self.at > #self.text then
      self:refuse(began, "the list that begins here has no )")
    elseif self.text:find("^%)", self.at) then
      self.at = self.at + 1
      break
    elseif not self:logical() then
      local value = self:token(",()")
      if not value then
        self:refuse(self.at, "a list has no lists in it")
      end
      list[#list + 1] = value
    end
  end
  if #list == 0 then
    self:refuse(began, "the list is empty")
  end
  return list
end

local OPERATORS = {
  [":"] = true,
  ["="] = true,
  ["!="] = true,
  ["~"] = true,
  ["!~"] = true,
  ["<"] = true,
  ["<="] = true,
  [">"] = true,
  [">="] = true,
}

--- What tests one value for an operator and what it is given; `at` is where that stands.
function Parser:tester(operator, wanted, at)
  if ORDER[operator] then
    return ordered(ORDER[operator], wanted)
  elseif operator:find("~", 1, true) then
    local ok, matches = pcall(require("ciranda.cli.regex").compile, wanted)
    if not ok then
      local quoted = self.text:find("^[\"']", at) and 1 or 0
      self:refuse(at + quoted + (matches.at or 1) - 1, "in the regular expression: %s", matches.regex)
    end
    return function(value)
      local found, result = pcall(matches, text_of(value))
      if not found then
        self:refuse(
          at,
          "the regular expression %s",
          type(result) == "table" and result.regex or tostring(result)
        )
      end
      return result
    end
  elseif operator == ":" then
    if select(2, wanted:gsub("%*", "")) > 1 then
      self:refuse(at, "at most one * in a value of ':'")
    end
    return contains(wanted)
  end
  return function(value)
    return equals(value, wanted)
  end
end

--- FIELD operator VALUE as a test; FIELD has been taken.
function Parser:comparison(path)
  local operator_at = self.at
  local operator = self.text:match("^[:=!<>~][:=!<>~]?", self.at)
  if not OPERATORS[operator] then
    self:refuse(operator_at, "there is no operator '%s'; : = != < <= > >= ~ !~ are there", operator)
  end
  self.at = self.at + #operator
  if not self:skip() then
    self:refuse(self.at, "a value is missing after '%s'", operator)
  end
  local at, wanted = self.at, nil
  if self:logical(true) then
    self:refuse(at, "a value was expected, not the word that joins terms; quote it if it is one")
  elseif self.text:find("^%(", at) then
    if operator ~= ":" and operator ~= "=" then
      self:refuse(at, "a list of values goes with : and =, not with %s", operator)
    end
    wanted = self:list()
  else
    wanted = { self:token("()") or self:refuse(at, "a value is missing after '%s'", operator) }
  end
  self.paths[#self.paths + 1] = path
  local tests = {}
  for place, value in ipairs(wanted) do
    tests[place] = self:tester(operator:find("~") and "~" or operator:gsub("^!=$", "="), value, at)
  end
  local read = fields.reader(path)
  local negated = operator:sub(1, 1) == "!"
  if operator == ":" and #wanted == 1 and wanted[1] == "*" then
    return function(item) -- whether it is there at all: `spot: {}` is
      local value = read(item)
      return value ~= nil and value ~= "" and value ~= json.null
    end
  end
  local absent = (operator == ":" or operator == "=") and wanted[1] == "" and #wanted == 1
  return function(item)
    local list = candidates(read(item))
    if #list == 0 then
      return negated or absent
    end
    for _, value in ipairs(list) do
      for _, test in ipairs(tests) do
        if test(value) then
          return not negated
        end
      end
    end
    return negated
  end
end

--- A word alone: a state, or a part of the name.
function Parser:bare(word)
  table.move({ "name", "state" }, 1, 2, #self.paths + 1, self.paths)
  local state, part = word:upper(), word:lower()
  return function(item)
    local own = item.state
    own = type(own) == "table" and own.state or own
    local name = text_of(item.name):match("[^/]*$"):lower()
    return own == state or name:find(part, 1, true) ~= nil
  end
end

local function negation(test)
  return function(item)
    return not test(item)
  end
end

--- One term; nil where there is none.
function Parser:term()
  if not self:skip() or self.text:find("^%)", self.at) then
    return nil
  end
  local began = self.at
  if self.text:find("^%(", began) then
    self.at = began + 1
    local joined = self.joined
    self.joined = nil
    local inside = self:expression() or self:refuse(self.at, "a term was expected")
    self.joined = joined
    if not self:skip() then
      self:refuse(began, "the parenthesis that begins here has no )")
    elseif not self.text:find("^%)", self.at) then
      self:refuse(self.at, "AND, OR or ) was expected")
    end
    self.at = self.at + 1
    return inside
  end
  local inverted = self.text:find("^%-", began) ~= nil
  self.at = inverted and began + 1 or began
  local key_at = self.at
  if self:logical(true) then
    self:refuse(key_at, "a term was expected")
  end
  local path = self:token(":=!<>~()", true)
  if not path then
    self:refuse(key_at, "a field, a word or ( was expected")
  end
  if self.text:find("^%(", self.at) then
    local stop = path:find("%.basename$") and self.text:match("^%(%s*%)()", self.at)
    if not stop then
      self:refuse(key_at, "of functions only FIELD.basename() is understood")
    end
    path, self.at = path .. "()", stop
  end
  local test
  if self:skip() and self.text:find("^[:=!<>~]", self.at) then
    test = self:comparison(path)
  elseif path:find("()", 1, true) then
    self:refuse(self.at, "an operator was expected")
  else
    test = self:bare((path:gsub("[\"']", "")))
  end
  return inverted and negation(test) or test
end

function Parser:factor(must)
  local inverted = self:word("NOT")
  local test = self:term()
  if not test and (inverted or must) then
    self:refuse(self.at, "a term was expected")
  end
  return test and inverted and negation(test) or test
end

--- Terms joined by one of AND and OR, and what stands beside them.
function Parser:expression(must)
  local test = self:factor(must)
  if not test then
    return nil
  end
  while true do
    local left, at = test, self:skip() and self.at
    local joint = self:word("AND") and "AND" or self:word("OR") and "OR"
    if not joint then
      break
    elseif self.joined and self.joined ~= joint then
      self:refuse(at, "AND and OR together need parentheses: a AND (b OR c)")
    end
    self.joined = joint
    local right = self:factor(true)
    test = joint == "AND" and function(item)
      return left(item) and right(item)
    end or function(item)
      return left(item) or right(item)
    end
  end
  if not self:skip() or self.text:find("^%)", self.at) then
    return test
  end
  local rest = self:expression(true)
  return function(item)
    return test(item) and rest(item)
  end
end

--- Compile a filter.
---@param text string
---@return ciranda.cli.Test matches
---@return string[] paths the fields that it looks at
--- Raises `usage`, with a mark under the place, for what is not understood.
function M.compile(text)
  local parser = setmetatable({ text = text, at = 1, paths = {} }, Parser)
  local test = parser:expression()
  if parser:skip() then
    parser:refuse(parser.at, "there is no ( before this )")
  end
  return test or function()
    return true
  end, parser.paths
end

return M
