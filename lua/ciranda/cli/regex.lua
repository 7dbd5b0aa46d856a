--- Regular expressions for `--filter` (~ and !~), as gcloud's users write them: unanchored, case counts.
---
--- Understood: literals, `.`, `[a-z]`, `[^a-z]`, `^`, `$`, `|`, `(...)`, `(?:...)`, `*`, `+`, `?`, `{n}`, `{n,}`,
--- `{n,m}` and these followed by `?`; `\d \w \s \D \W \S \b`, `\` before any punctuation; `(?i)` at the beginning. A
--- character is a byte. A match that takes too long is given up with an error, not waited for.
local M = {}

--- Attempts of repetitions that one text may take.
M.MOST_STEPS = 200000

local CLASSES = { d = "%d", w = "[%w_]", s = "%s", D = "%D", W = "[^%w_]", S = "%S" }

--- The bytes that a Lua pattern of one character matches, as a set.
local function set_of(pattern)
  local set = {}
  for byte = 0, 255 do
    set[byte] = string.char(byte):find("^" .. pattern) ~= nil
  end
  return set
end

-- Matchers: m(state, at, next) tries to match state.text at `at`, then calls next(end): what that gives is its result.

local function one_of(set)
  return function(state, at, next)
    return set[state.text:byte(at)] and next(at + 1)
  end
end

local function edge(test)
  return function(state, at, next)
    return test(state.text, at) and next(at)
  end
end

local function sequence(first, second)
  return function(state, at, next)
    return first(state, at, function(stop)
      return second(state, stop, next)
    end)
  end
end

local function either(first, second)
  return function(state, at, next)
    return first(state, at, next) or second(state, at, next)
  end
end

local function nothing(_, at, next)
  return next(at)
end

local function step(state)
  state.steps = state.steps + 1
  if state.steps > M.MOST_STEPS then
    error({ regex = "takes too long: fewer nested repetitions, please" }, 0)
  end
end

--- Repetition of one character: without recursion, as texts may be long.
local function repeat_set(set, least, most, lazy)
  return function(state, at, next)
    local text, stop = state.text, at
    while stop - at < most and set[text:byte(stop)] do
      stop = stop + 1
    end
    local first, last, by = stop, at + least, -1
    if lazy then
      first, last, by = last, first, 1
    end
    for place = first, last, by do
      step(state)
      if next(place) then
        return true
      end
    end
    return false
  end
end

local function repeat_any(matcher, least, most, lazy)
  return function(state, at, next)
    local function try(count, from)
      step(state)
      local function more()
        return count < most
          and matcher(state, from, function(stop)
            return (stop > from or count < least) and try(count + 1, stop)
          end)
      end
      if lazy then
        return count >= least and next(from) or more()
      end
      return more() or count >= least and next(from)
    end
    return try(0, at)
  end
end

local WORD = set_of("[%w_]")

local EDGES = {
  ["^"] = function(_, at)
    return at == 1
  end,
  ["$"] = function(text, at)
    return at == #text + 1
  end,
  b = function(text, at)
    return (WORD[text:byte(at - 1)] or false) ~= (WORD[text:byte(at)] or false)
  end,
}

-- Parsing -----------------------------------------------------------------------------------------------------------

---@class ciranda.cli.RegexParser
---@field pattern string
---@field at integer
---@field fold boolean
local Parser = {}
Parser.__index = Parser

local function refuse(at, format, ...)
  error({ regex = format:format(...), at = at }, 0)
end

function Parser:peek(text)
  return self.pattern:sub(self.at, self.at + #text - 1) == text
end

function Parser:take(text)
  local found = self:peek(text)
  self.at = found and self.at + #text or self.at
  return found
end

--- The set of one byte, in both cases when case does not count.
function Parser:literal(character)
  local set = { [character:byte()] = true }
  if self.fold then
    set[character:lower():byte()], set[character:upper():byte()] = true, true
  end
  return set
end

--- An escape's set; the backslash has been taken.
function Parser:escape()
  local letter = self.pattern:sub(self.at, self.at)
  if CLASSES[letter] then
    self.at = self.at + 1
    return set_of(CLASSES[letter])
  elseif letter == "" or letter:find("%w") then
    refuse(self.at - 1, "'\\%s' is not understood", letter)
  end
  self.at = self.at + 1
  return self:literal(letter)
end

--- The inside of brackets; the opening one has been taken.
function Parser:brackets()
  local began = self.at - 1
  local negated, set = self:take("^"), {}
  local first = true
  while first or not self:peek("]") do
    first = false
    local low = self.pattern:sub(self.at, self.at)
    if low == "" then
      refuse(began, "'[' has no ']'")
    end
    self.at = self.at + 1
    local high = self.pattern:match("^%-([^%]])", self.at)
    if low == "\\" then
      for byte, has in pairs(self:escape()) do
        set[byte] = set[byte] or has
      end
    elseif high then
      self.at = self.at + 2
      if high < low then
        refuse(self.at - 3, "'%s-%s' is no range", low, high)
      end
      for byte = low:byte(), high:byte() do
        for each in pairs(self:literal(string.char(byte))) do
          set[each] = true
        end
      end
    else
      for byte in pairs(self:literal(low)) do
        set[byte] = true
      end
    end
  end
  self.at = self.at + 1
  if negated then
    for byte = 0, 255 do
      set[byte] = not set[byte]
    end
  end
  return set
end

--- One thing that may be repeated: its matcher, and its set when it is one character.
function Parser:atom()
  local at = self.at
  local character = self.pattern:sub(at, at)
  self.at = at + 1
  if character == "(" then
    if self:take("?") and not self:take(":") then
      refuse(at, "'(?' is only understood in '(?:', and in '(?i)' at the beginning")
    end
    local inside = self:alternatives()
    if not self:take(")") then
      refuse(at, "'(' has no ')'")
    end
    return inside
  elseif character == "^" or character == "$" then
    return edge(EDGES[character])
  elseif character == "\\" and self:take("b") then
    return edge(EDGES.b)
  elseif character:find("^[*+?]") then
    refuse(at, "there is nothing before '%s' to repeat", character)
  end
  local set
  if character == "." then
    set = set_of("[^\n]")
  elseif character == "[" then
    set = self:brackets()
  elseif character == "\\" then
    set = self:escape()
  else
    set = self:literal(character)
  end
  return one_of(set), set
end

--- How often the atom before may come; nil for once.
function Parser:repetition()
  if self:take("*") then
    return 0, math.huge
  elseif self:take("+") then
    return 1, math.huge
  elseif self:take("?") then
    return 0, 1
  end
  local least, comma, most, stop = self.pattern:match("^{(%d+)(,?)(%d*)}()", self.at)
  if not least then
    return nil
  end
  least, most = tonumber(least), comma == "" and tonumber(least) or tonumber(most) or math.huge
  if least > 1000 or most < least or most ~= math.huge and most > 1000 then
    refuse(self.at, "a repetition is {n}, {n,} or {n,m} with n <= m <= 1000")
  end
  self.at = stop
  return least, most
end

function Parser:alternatives()
  local whole
  repeat
    local branch = nothing
    while self.at <= #self.pattern and not self:peek("|") and not self:peek(")") do
      local matcher, set = self:atom()
      local least, most = self:repetition()
      if least then
        local lazy = self:take("?")
        matcher = set and repeat_set(set, least, most, lazy) or repeat_any(matcher, least, most, lazy)
      end
      branch = branch == nothing and matcher or sequence(branch, matcher)
    end
    whole = whole and either(whole, branch) or branch
  until not self:take("|")
  return whole
end

local function yes()
  return true
end

--- Compile a regular expression.
---@param pattern string
---@return fun(text: string): boolean matches whether it is found anywhere in the text
--- Raises `{ regex = what is wrong, at = place in the pattern or nil }`; so does a match that takes too long.
function M.compile(pattern)
  local parser = setmetatable({ pattern = pattern, at = 1 }, Parser)
  parser.fold = parser:take("(?i)")
  local matcher = parser:alternatives()
  if parser.at <= #pattern then
    refuse(parser.at, "there is no '(' before this ')'")
  end
  return function(text)
    local state = { text = text, steps = 0 }
    for at = 1, #text + 1 do
      if matcher(state, at, yes) then
        return true
      end
    end
    return false
  end
end

return M
