--- A recipe's flags: declared once in the recipe, parsed here with argparse, which also writes the help and the
--- completions. Flags are `--NAME=value` or `--NAME value`; a boolean may stand alone.
local argparse = require("argparse")
local errors = require("ciranda.io.error")
local uv = require("luv")

local M = {}

---@class ciranda.cli.Flag
---@field name string as it is typed after `--`; the key in context.flags too, with "-" turned into "_"
---@field type? "string"|"integer"|"number"|"boolean"|"duration"|"size"|"list"|"directory" default "string"
---@field help? string
---@field default? any
---@field required? boolean
---@field choices? string[]
---@field short? string e.g. "-b" or "-dd"
---@field positional? boolean given by place, not by name
---@field many? boolean a positional that takes all the rest, or a named flag that may be repeated

local TRUE = { ["true"] = true, ["1"] = true, yes = true, t = true, y = true }
local FALSE = { ["false"] = true, ["0"] = true, no = true, f = true, n = true }
local SECONDS = { s = 1, m = 60, h = 3600, d = 86400 }

--- "90", "90s", "1h30m" in seconds, or nil.
---@param text string
---@return number?
function M.duration(text)
  if text:find("^%d+%.?%d*$") then
    return tonumber(text)
  end
  local total, matched = 0, ""
  for amount, unit in text:gmatch("(%d+%.?%d*)([smhd])") do
    total = total + tonumber(amount) * SECONDS[unit]
    matched = matched .. amount .. unit
  end
  return matched == text and text ~= "" and total or nil
end

local UNITS = { [""] = 0, k = 10, m = 20, g = 30, t = 40 }

--- "4096", "500M", "20GiB" in bytes (powers of 1024), or nil.
---@param text string
---@return integer?
function M.size(text)
  local amount, unit = text:lower():match("^(%d+%.?%d*)([kmgt]?)i?b?$")
  return amount and math.floor(tonumber(amount) * 2.0 ^ UNITS[unit]) or nil
end

--- Converters return the value, or nil and what would have been right.
local CONVERT = {
  string = function(text)
    return text
  end,
  integer = function(text)
    local value = math.tointeger(tonumber(text))
    if value and not text:find("[%.eExX]") then
      return value
    end
    return nil, "a whole number"
  end,
  number = function(text)
    local value = tonumber(text)
    if value then
      return value
    end
    return nil, "a number"
  end,
  boolean = function(text)
    local word = text:lower()
    if TRUE[word] then
      return true
    elseif FALSE[word] then
      return false
    end
    return nil, "true or false (also 1/0, yes/no, t/f)"
  end,
  duration = function(text)
    local value = M.duration(text)
    if value then
      return value
    end
    return nil, "a time such as 90, 90s, 15m or 1h30m"
  end,
  size = function(text)
    local value = M.size(text)
    if value then
      return value
    end
    return nil, "a number of bytes such as 4096, 500M or 20G"
  end,
  directory = function(text)
    local stat = uv.fs_stat(text)
    if stat and stat.type == "directory" then
      return text
    end
    return nil, stat and "a directory, not a file" or "a directory, and there is none of that name"
  end,
  list = function(text)
    local list = {}
    for word in text:gmatch("[^,]+") do
      table.insert(list, (word:match("^%s*(.-)%s*$")))
    end
    return list
  end,
}

--- The key under which a flag's value is found.
---@param flag ciranda.cli.Flag
---@return string
function M.key(flag)
  return (flag.name:gsub("%-", "_"))
end

--- Refuses a recipe whose declaration is wrong; the recipe's author reads this.
local function check_declaration(recipe_name, flag)
  local where = ("recipe %s, flag %s: "):format(recipe_name, tostring(flag.name))
  if type(flag.name) ~= "string" or not flag.name:find("^[%a][%w_%-]*$") then
    errors.raise { code = "misuse", message = where .. "a flag needs a name of letters, digits, '_' and '-'" }
  end
  if not CONVERT[flag.type or "string"] then
    local message = "%sthere is no type '%s'; there are string, integer, number, boolean, duration, size, list, "
      .. "directory"
    errors.raise { code = "misuse", message = message:format(where, tostring(flag.type)) }
  end
end

--- One line of help: what it is, its choices, its default.
local function describe(flag)
  local text = flag.help or ""
  local parts = { text:find("%w$") and text .. "." or text }
  if flag.choices then
    table.insert(parts, ("One of %s."):format(table.concat(flag.choices, ", ")))
  end
  if flag.default ~= nil and flag.default ~= "" then
    local default = type(flag.default) == "table" and table.concat(flag.default, ",")
      or tostring(flag.default)
    table.insert(parts, ("Default: %s."):format(default))
  elseif flag.required then
    table.insert(parts, "Required.")
  end
  return (table.concat(parts, " "):gsub("^%s+", ""))
end

--- Converts what was typed for one flag; raises code "usage".
local function convert(flag, text)
  if text == "" and flag.required then
    errors.raise {
      code = "usage",
      message = ("--%s is empty; is the variable that you give it set?"):format(flag.name),
    }
  end
  local value, wanted = CONVERT[flag.type or "string"](text)
  if value == nil then
    errors.raise { code = "usage", message = ("--%s is '%s', but takes %s"):format(flag.name, text, wanted) }
  end
  if flag.choices then
    for _, choice in ipairs(flag.choices) do
      if choice == value then
        return value
      end
    end
    errors.raise {
      code = "usage",
      message = ("--%s is '%s', but takes one of: %s"):format(
        flag.name,
        text,
        table.concat(flag.choices, ", ")
      ),
    }
  end
  return value
end

--- Declares a recipe's flags on an argparse parser or command.
---@param parser table
---@param recipe_name string
---@param recipe table {flags}
function M.declare(parser, recipe_name, recipe)
  parser:option("-h --help", "Show this help and end."):args(0):action("store_true")
  for index, flag in ipairs(recipe.flags or {}) do
    check_declaration(recipe_name, flag)
    local element
    if flag.positional then
      element = parser:argument(flag.name, describe(flag)):target("p" .. index)
      element:args(flag.many and "*" or "?") -- what is missing is told below
      element:argname(flag.name)
    else
      element = parser:option("--" .. flag.name, describe(flag)):target("p" .. index)
      element:args(flag.type == "boolean" and "?" or 1)
      element:count("*")
      element:argname("<" .. (flag.type or "string") .. ">")
    end
  end
end

--- The line of usage: what must be given, by name and by place. All other flags stand below it, with their help.
---@param recipe_name string
---@param recipe table
---@return string
local function usage(recipe_name, recipe)
  local words = { "Usage: ciranda", recipe_name }
  local places = {}
  for _, flag in ipairs(recipe.flags or {}) do
    if flag.positional then
      local word = flag.many and flag.name .. "..." or flag.name
      table.insert(places, flag.required and word or "[" .. word .. "]")
    elseif flag.required then
      table.insert(words, ("--%s=%s"):format(flag.name, flag.type or "string"))
    end
  end
  table.insert(words, "[--FLAG=value ...]")
  table.move(places, 1, #places, #words + 1, words)
  return table.concat(words, " ")
end

--- The argparse parser for a recipe.
---@param recipe_name string
---@param recipe table {summary, description, flags}
local function parser_of(recipe_name, recipe)
  local parser = argparse("ciranda " .. recipe_name, recipe.description or recipe.summary)
  parser:usage(usage(recipe_name, recipe))
  parser:help_max_width(100)
  parser:add_help(false)
  M.declare(parser, recipe_name, recipe)
  return parser
end

--- The help text of a recipe.
---@param recipe_name string
---@param recipe table
---@return string
function M.help(recipe_name, recipe)
  return parser_of(recipe_name, recipe):get_help()
end

--- Rewrites the short forms ("-dd 4", "-dd=4", "-b4") to the long ones: argparse reads "-dd" as "-d d". A boolean that
--- stands before a word which is none ("--recurse DIRECTORY") gets its value, or it would take that word.
local function expand_short(flags, words)
  local long, boolean, has_positional = {}, {}, false
  for _, flag in ipairs(flags) do
    if flag.short then
      long[flag.short] = "--" .. flag.name
    end
    boolean["--" .. flag.name] = flag.type == "boolean"
    has_positional = has_positional or flag.positional
  end
  local out = {}
  for i, word in ipairs(words) do
    if word == "--" then
      table.move(words, i, #words, #out + 1, out)
      break
    end
    local name, value = word:match("^(%-%a+)=(.*)$")
    if long[word] then
      table.insert(out, long[word])
    elseif name and long[name] then
      table.insert(out, long[name] .. "=" .. value)
    elseif word:find("^%-%d+%.?%d*$") and (out[#out] or ""):find("^%-%-[^=]+$") then
      out[#out] = out[#out] .. "=" .. word -- a negative number: no flag begins with a digit
    else
      table.insert(out, word)
    end
    local following = words[i + 1] and words[i + 1]:lower()
    if
      has_positional
      and boolean[out[#out]]
      and following
      and TRUE[following] == nil
      and FALSE[following] == nil
    then
      out[#out] = out[#out] .. "=true"
    end
  end
  return out
end

--- The flag that an unknown one must mean: its name but for capitals, "-" and "_".
---@param flags ciranda.cli.Flag[]
---@param problem string what argparse says
---@return string problem
local function with_meant(flags, problem)
  local function fold(name)
    return (name:lower():gsub("[-_]", ""))
  end
  local typed = problem:match("^unknown option '%-%-([^']+)'$")
  for _, flag in ipairs(typed and flags or {}) do
    if not flag.positional and fold(flag.name) == fold(typed) then
      return ("%s\nDid you mean '--%s'?"):format(problem, flag.name)
    end
  end
  return problem
end

--- Parses a recipe's arguments.
---@param recipe_name string
---@param recipe table {flags = ciranda.cli.Flag[]}
---@param words string[]
---@return table values by key; `help = true` when --help was given
---@return table given set of the keys that were typed
---@error code "usage"
function M.parse(recipe_name, recipe, words)
  local flags = recipe.flags or {}
  local parser = parser_of(recipe_name, recipe)
  local problem
  function parser:error(message) ---@diagnostic disable-line: duplicate-set-field
    problem = problem or message
    error("usage", 0)
  end
  local ok, result = pcall(parser.parse, parser, expand_short(flags, words))
  if not ok then
    for _, word in ipairs(words) do
      if word == "--help" or word == "-h" then
        return { help = true }, {}
      end
    end
    if not problem then
      error(result, 0)
    end
    errors.raise {
      code = "usage",
      message = ("%s (ciranda %s --help lists the flags)"):format(with_meant(flags, problem), recipe_name),
    }
  end
  if result.help then
    return { help = true }, {}
  end

  local values, given, missing = {}, {}, {}
  for index, flag in ipairs(flags) do
    local key, raw = M.key(flag), result["p" .. index]
    if type(raw) == "table" and not flag.positional and #raw == 0 then
      raw = nil -- not typed
    end
    if raw == nil then
      if flag.required then
        local what = flag.help and (" (%s)"):format(flag.help:gsub("%.$", "")) or ""
        table.insert(missing, flag.positional and flag.name .. what or "--" .. flag.name)
      end
      values[key] = flag.default
    else
      given[key] = true
      local typed = type(raw) == "table" and raw or { raw }
      local converted = {}
      for _, item in ipairs(typed) do
        if type(item) == "table" then
          item = item[1] or "true" -- a boolean that stands alone
        end
        table.insert(converted, convert(flag, item))
      end
      if flag.many then
        values[key] = converted
      else
        values[key] = converted[#converted] -- the last one wins, as in the scripts people come from
      end
    end
  end
  if #missing > 0 then
    errors.raise {
      code = "usage",
      message = ("%s needs %s; see ciranda %s --help"):format(
        recipe_name,
        table.concat(missing, " and "),
        recipe_name
      ),
    }
  end
  return values, given
end

return M
