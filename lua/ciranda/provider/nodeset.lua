--- Node sets: the short way to write, and to print, a set of workers.
--
--     all                        every worker
--     slice[0-3]/worker[0,2]     workers 0 and 2 of slices 0 to 3
--     slice2                     every worker of slice 2
--     worker0                    worker 0 of every slice
--     job-[0-1]/worker*          by node name, with `*` and `?`
--     all,!slice1/worker3        everything but one
--
-- Terms are separated by commas or blanks; `!` takes away, wherever it stands; a set of exclusions
-- alone takes away from everything. Numbers are the platform's own (gaps are kept).
local err = require("ciranda.io.error")

local M = {}

--- How many names one expression may expand to (a typing error like `host[0-999999999]` must not fill memory).
local EXPANSION_LIMIT = 100000

local function fail(text, format, ...)
  err.raise({
    code = "usage",
    op = "node set",
    target = text,
    message = string.format("node set %q: ", text)
      .. string.format(format, ...)
      .. "; write it like slice[0-3]/worker[0,2], all,!slice1 or job-0/worker*",
  })
end

---@class ciranda.nodeset.Ranges a sorted list of ranges that neither touch nor overlap
---@field [integer] { [1]: integer, [2]: integer }

--- Sorts and merges ranges. n log n.
---@param ranges { [1]: integer, [2]: integer }[]
---@return ciranda.nodeset.Ranges
local function merge(ranges)
  table.sort(ranges, function(a, b)
    return a[1] < b[1]
  end)
  local merged = {}
  for _, range in ipairs(ranges) do
    local last = merged[#merged]
    if last and range[1] <= last[2] + 1 then
      last[2] = math.max(last[2], range[2])
    else
      merged[#merged + 1] = { range[1], range[2] }
    end
  end
  return merged
end

---@param ranges ciranda.nodeset.Ranges
---@param number integer
---@return boolean
local function contains(ranges, number)
  local low, high = 1, #ranges
  while low <= high do
    local middle = (low + high) // 2
    local range = ranges[middle]
    if number < range[1] then
      high = middle - 1
    elseif number > range[2] then
      low = middle + 1
    else
      return true
    end
  end
  return false
end

--- Reads the inside of a bracket: `0-3,7`. The width is that of a zero-padded bound (`01-16`), or nil.
---@param text string the whole node set, for messages
---@param inside string
---@return { [1]: integer, [2]: integer }[] ranges, integer? width
local function parse_ranges(text, inside)
  local ranges, width = {}, nil
  for piece in (inside .. ","):gmatch("([^,]*),") do
    local first, last = piece:match("^%s*(%d+)%s*%-%s*(%d+)%s*$")
    if not first then
      first = piece:match("^%s*(%d+)%s*$")
      last = first
    end
    if not first then
      fail(text, "%q inside [ ] is neither a number nor a range", piece)
    end
    local low, high = math.tointeger(tonumber(first)), math.tointeger(tonumber(last))
    if not low or not high or #first > 9 or #last > 9 then
      fail(text, "%q is too large a number", piece)
    end
    if low > high then
      fail(text, "the range %s runs backwards", piece)
    end
    if #first > 1 and first:sub(1, 1) == "0" then
      width = math.max(width or 0, #first)
    end
    ranges[#ranges + 1] = { low, high }
  end
  return ranges, width
end

--- Cuts a string at commas and blanks that stand outside brackets.
---@param text string
---@return string[]
local function split_terms(text)
  local terms, start, depth = {}, 1, 0
  for position = 1, #text + 1 do
    local char = text:sub(position, position)
    if char == "[" then
      depth = depth + 1
      if depth > 1 then
        fail(text, "[ inside [ ]")
      end
    elseif char == "]" then
      depth = depth - 1
      if depth < 0 then
        fail(text, "] without [")
      end
    elseif (char == "," or char == "" or char:match("%s")) and (depth == 0 or char == "") then
      if depth > 0 then
        fail(text, "[ without ]")
      end
      local term = text:sub(start, position - 1)
      if term ~= "" then
        terms[#terms + 1] = term
      end
      start = position + 1
    end
  end
  return terms
end

---@class ciranda.nodeset.Part one side of a term
---@field kind "any"|"numbers"|"name"
---@field ranges ciranda.nodeset.Ranges? for "numbers"
---@field pattern string? for "name": a Lua pattern with a capture for each bracket
---@field brackets { ranges: ciranda.nodeset.Ranges, width: integer? }[]? for "name"

--- A glob with brackets as a Lua pattern.
---@param text string
---@param glob string
---@return ciranda.nodeset.Part
local function parse_name(text, glob)
  local pieces, brackets = { "^" }, {}
  local position = 1
  while position <= #glob do
    local char = glob:sub(position, position)
    if char == "[" then
      local close = glob:find("]", position, true)
      local ranges, width = parse_ranges(text, glob:sub(position + 1, close - 1))
      brackets[#brackets + 1] = { ranges = merge(ranges), width = width }
      pieces[#pieces + 1] = "(%d+)"
      position = close
    elseif char == "*" then
      pieces[#pieces + 1] = ".*"
    elseif char == "?" then
      pieces[#pieces + 1] = "."
    else
      pieces[#pieces + 1] = char:gsub("%W", "%%%0")
    end
    position = position + 1
  end
  pieces[#pieces + 1] = "$"
  return { kind = "name", pattern = table.concat(pieces), brackets = brackets }
end

--- Reads `slice[0-3]`, `slice2`, `slice*`, `[0-3]`, `2` (numbers), `*` (any); else a name.
---@param text string
---@param part string
---@param word "slice"|"worker"
---@return ciranda.nodeset.Part
local function parse_part(text, part, word)
  if part == "*" or part == word .. "*" or part == "all" then
    return { kind = "any" }
  end
  local rest = part:match("^" .. word .. "(.*)$") or part
  local inside = rest:match("^%[([^%]]*)%]$") or rest:match("^(%d+)$")
  if inside then
    return { kind = "numbers", ranges = merge((parse_ranges(text, inside))) }
  end
  return parse_name(text, part)
end

---@class ciranda.nodeset.Term
---@field text string
---@field exclude boolean
---@field slice ciranda.nodeset.Part
---@field worker ciranda.nodeset.Part

---@class ciranda.nodeset.Set
---@field text string
---@field include ciranda.nodeset.Term[]
---@field exclude ciranda.nodeset.Term[]

--- Reads a node set.
---@param text string
---@return ciranda.nodeset.Set
-- Raises "usage" with the place of the mistake.
function M.parse(text)
  if type(text) ~= "string" then
    err.misuse(2, "nodeset.parse takes a string, not a %s", type(text))
  end
  local set = { text = text, include = {}, exclude = {} }
  for _, written in ipairs(split_terms(text)) do
    local bang, body = written:match("^(!?)(.*)$")
    if body == "" then
      fail(text, "! names nothing")
    end
    local term = { text = body, exclude = bang == "!" }
    local left, right = body:match("^([^/]*)/([^/]*)$")
    if left then
      if left == "" or right == "" then
        fail(text, "%q has nothing on one side of /", body)
      end
      term.slice = parse_part(text, left, "slice")
      term.worker = parse_part(text, right, "worker")
    elseif body:find("/", 1, true) then
      fail(text, "%q has more than one /", body)
    elseif body:match("^worker[%d%[%*]") then
      term.slice = { kind = "any" }
      term.worker = parse_part(text, body, "worker")
    elseif body:match("^%d+$") or body:match("^%[") then
      fail(text, "%q could be a slice or a worker", body)
    else
      term.slice = parse_part(text, body, "slice")
      term.worker = { kind = "any" }
      term.lone = term.slice.kind == "name"
    end
    local list = term.exclude and set.exclude or set.include
    list[#list + 1] = term
  end
  if #set.include + #set.exclude == 0 then
    fail(text, "it is empty")
  end
  return set
end

---@param part ciranda.nodeset.Part
---@param name string?
---@return boolean
local function name_matches(part, name)
  if not name then
    return false
  end
  local captures = { name:match(part.pattern) }
  if captures[1] == nil then
    return false
  end
  for index, bracket in ipairs(part.brackets) do
    local digits = captures[index]
    if bracket.width and #digits < bracket.width or not contains(bracket.ranges, tonumber(digits)) then
      return false
    end
  end
  return true
end

---@param part ciranda.nodeset.Part
---@param number integer
---@param names string[]
---@return boolean
local function part_matches(part, number, names)
  if part.kind == "any" then
    return true
  elseif part.kind == "numbers" then
    return contains(part.ranges, number)
  end
  for _, name in pairs(names) do
    if name_matches(part, name) then
      return true
    end
  end
  return false
end

---@param term ciranda.nodeset.Term
---@param worker ciranda.Worker
---@return boolean
local function term_matches(term, worker)
  local own = { worker.name, worker.hostname, worker.address, worker.internal_address }
  if term.lone then
    -- A name alone is a node's or a worker's.
    return part_matches(term.slice, worker.slice, { worker.node, table.unpack(own, 1, 4) })
  end
  return part_matches(term.slice, worker.slice, { worker.node })
    and part_matches(term.worker, worker.index, own)
end

--- The workers that a node set names, in the order given.
---@param workers ciranda.Worker[] each with slice, index and, where known, node (its slice's name), name,
---  hostname, address, internal_address
---@param text string|ciranda.nodeset.Set
---@return ciranda.Worker[]
-- Raises "not_found" when a term names nobody or the set is empty: a job must not start on fewer workers
-- than were meant because of a typing error.
function M.select(workers, text)
  local set = type(text) == "string" and M.parse(text) or text
  local hits, chosen = {}, {}
  for _, worker in ipairs(workers) do
    local included = #set.include == 0
    for _, term in ipairs(set.include) do
      if term_matches(term, worker) then
        included = true
        hits[term] = true
      end
    end
    for _, term in ipairs(set.exclude) do
      if term_matches(term, worker) then
        included = false
        hits[term] = true
      end
    end
    if included then
      chosen[#chosen + 1] = worker
    end
  end
  for _, list in ipairs({ set.include, set.exclude }) do
    for _, term in ipairs(list) do
      if not hits[term] then
        err.raise({
          code = "not_found",
          op = "node set",
          target = set.text,
          message = string.format("%q names no worker; there are %s", term.text, M.fold(workers)),
        })
      end
    end
  end
  if #chosen == 0 then
    err.raise({
      code = "not_found",
      op = "node set",
      target = set.text,
      message = string.format("%q leaves no worker of %s", set.text, M.fold(workers)),
    })
  end
  return chosen
end

--- Sorted numbers as text: `3`, `[0-3,7]`.
---@param numbers integer[] ascending, no doubles
---@return string
local function ranges_text(numbers)
  local pieces = {}
  local index = 1
  while index <= #numbers do
    local last = index
    while numbers[last + 1] == numbers[last] + 1 do
      last = last + 1
    end
    if last == index then
      pieces[#pieces + 1] = tostring(numbers[index])
    else
      pieces[#pieces + 1] = numbers[index] .. "-" .. numbers[last]
    end
    index = last + 1
  end
  local text = table.concat(pieces, ",")
  return #numbers == 1 and text or "[" .. text .. "]"
end

--- The shortest node set of the form `slice[..]/worker[..]` for these workers. n log n.
---@param workers { slice: integer, index: integer }[] in any order
---@return string "none" when there is nobody
function M.fold(workers)
  if #workers == 0 then
    return "none"
  end
  local sorted = table.move(workers, 1, #workers, 1, {})
  table.sort(sorted, function(a, b)
    if a.slice ~= b.slice then
      return a.slice < b.slice
    end
    return a.index < b.index
  end)
  local slices_of, order = {}, {}
  local position = 1
  while position <= #sorted do
    local slice, indexes = sorted[position].slice, {}
    while sorted[position] and sorted[position].slice == slice do
      local index = sorted[position].index
      if indexes[#indexes] ~= index then
        indexes[#indexes + 1] = index
      end
      position = position + 1
    end
    local text = ranges_text(indexes)
    if not slices_of[text] then
      slices_of[text] = {}
      order[#order + 1] = text
    end
    table.insert(slices_of[text], slice)
  end
  for place, text in ipairs(order) do
    order[place] = string.format("slice%s/worker%s", ranges_text(slices_of[text]), text)
  end
  return table.concat(order, ",")
end

--- Expands brackets in names: `node[01-03].lan,login` gives node01.lan, node02.lan, node03.lan, login.
---@param text string
---@return string[]
-- Raises "usage" for a mistake and for more than 100,000 names.
function M.expand_names(text)
  local names = {}
  for _, term in ipairs(split_terms(text)) do
    local expanded = { "" }
    local position = 1
    while position <= #term do
      local open = term:find("[", position, true)
      local literal = term:sub(position, (open or #term + 1) - 1)
      local choices = { literal }
      local close = #term
      if open then
        close = term:find("]", open, true)
        choices = {}
        local ranges, width = parse_ranges(text, term:sub(open + 1, close - 1))
        local format = width and ("%0" .. width .. "d") or "%d"
        local count = 0
        for _, range in ipairs(ranges) do
          count = count + range[2] - range[1] + 1
        end
        if #names + count * #expanded > EXPANSION_LIMIT then
          fail(text, "it expands to more than %d names", EXPANSION_LIMIT)
        end
        for _, range in ipairs(ranges) do
          for number = range[1], range[2] do
            choices[#choices + 1] = literal .. string.format(format, number)
          end
        end
      end
      local longer = {}
      for _, prefix in ipairs(expanded) do
        for _, choice in ipairs(choices) do
          longer[#longer + 1] = prefix .. choice
        end
      end
      expanded = longer
      position = close + 1
    end
    table.move(expanded, 1, #expanded, #names + 1, names)
  end
  return names
end

return M
