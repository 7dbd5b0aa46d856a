--- Log lines for people and programs, on standard error.
---
--- CIRANDA_LOG chooses the level and the form: `debug`, `warn`, `json`, `debug,json`. The level is `info`
--- otherwise. What was registered with `log.secret` is never printed, in no form it commonly takes.

local uv = require("luv")
local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")

local M = {}

--- Levels and their ranks; a line is written when its rank is at most that of the level in force.
local RANK = { off = 0, error = 1, warn = 2, info = 3, debug = 4, trace = 5 }

local COLOUR = { error = "\27[31m", warn = "\27[33m", debug = "\27[2m", trace = "\27[2m" }
local PLAIN = "\27[0m"

-- One set a process: a test runner that loads this module again must not forget what is secret.
local REGISTRY_KEY = "ciranda.io.log.secrets"
local registry = debug.getregistry()
---@type { known: table<string, true>, list: string[] }
local secrets = registry[REGISTRY_KEY] or { known = {}, list = {} }
registry[REGISTRY_KEY] = secrets

local settings -- made from the environment when the first line is written

local function from_environment()
  local level, form = "info", "plain"
  for word in (os.getenv("CIRANDA_LOG") or ""):gmatch("[^,%s]+") do
    if RANK[word] then
      level = word
    elseif word == "json" or word == "plain" then
      form = word
    else
      io.stderr:write(
        ("ciranda: CIRANDA_LOG: '%s' is no level (off, error, warn, info, debug, trace) "):format(word)
      )
      io.stderr:write("and no form (plain, json); it is ignored\n")
    end
  end
  return { level = level, form = form, write = nil, colour = nil }
end

local function current()
  settings = settings or from_environment()
  return settings
end

-- Secrets ---------------------------------------------------------------------------------------------------

local function percent(text)
  return (text:gsub("[^%w%-%._~]", function(char)
    return ("%%%02X"):format(char:byte())
  end))
end

local BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

local function base64(text)
  local out = {}
  for index = 1, #text, 3 do
    local a, b, c = text:byte(index, index + 2)
    local bits = a << 16 | (b or 0) << 8 | (c or 0)
    for place = 0, 3 do
      local digit = bits >> (18 - 6 * place) & 63
      local absent = (place == 2 and not b) or (place == 3 and not c)
      out[#out + 1] = absent and "=" or BASE64:sub(digit + 1, digit + 1)
    end
  end
  return table.concat(out)
end

local function hide(text)
  if text ~= "" and not secrets.known[text] then
    secrets.known[text] = true
    table.insert(secrets.list, text)
    -- The longest first: a secret that contains another must go as a whole.
    table.sort(secrets.list, function(a, b)
      return #a > #b
    end)
  end
end

-- A text shorter than this keeps no secret, and hiding it would make every line unreadable.
local SHORTEST_SECRET = 4

-- A line of a key file shorter than this tells nothing, and hiding it would hide ordinary words.
local SHORTEST_LINE = 16

--- Never print this text, of four bytes at least: as it is, as JSON or a URL would hold it, in base64, nor a long line
--- of it.
---@param text string
function M.secret(text)
  if type(text) ~= "string" then
    errors.misuse(2, "log.secret: a string expected, got %s", type(text))
  end
  if #text < SHORTEST_SECRET then
    return
  end
  hide(text)
  hide(percent(text))
  hide(base64(text))
  hide(json.encode(text):sub(2, -2))
  if text:find("\n", 1, true) then
    for line in text:gmatch("[^\r\n]+") do
      if #line >= SHORTEST_LINE then
        hide(line)
      end
    end
  end
end

--- Replace every registered secret by "***". For whoever prints without this module.
---@param text string
---@return string
function M.redact(text)
  for _, secret in ipairs(secrets.list) do
    local from, to = text:find(secret, 1, true)
    while from do
      text = text:sub(1, from - 1) .. "***" .. text:sub(to + 1)
      from, to = text:find(secret, from + 3, true)
    end
  end
  return text
end

-- Lines -----------------------------------------------------------------------------------------------------

--- Bytes that would move the cursor or hide text are shown as \xNN; further lines are indented.
local function printable(text)
  return (
    json
      .utf8(text)
      :gsub("[%z\1-\8\11-\31\127]", function(char)
        return ("\\x%02x"):format(char:byte())
      end)
      :gsub("\n(.)", "\n    %1")
  )
end

local function field_text(value)
  local text = M.redact(errors.text(value)) -- before quoting, which would change its form
  if text == "" or text:find('[%s"=]') then
    return ("%q"):format(text):gsub("\\\n", "\\n")
  end
  return text
end

local function timestamp()
  local seconds, microseconds = uv.gettimeofday()
  return seconds, microseconds // 1000
end

local function plain_line(level, message, fields, colour)
  local seconds, milliseconds = timestamp()
  local parts = { M.redact(message) }
  local keys = {}
  for key in pairs(fields or {}) do
    keys[#keys + 1] = tostring(key)
  end
  table.sort(keys)
  for _, key in ipairs(keys) do
    parts[#parts + 1] = key .. "=" .. field_text(fields[key])
  end
  local text = printable(M.redact(table.concat(parts, " ")))
  local shade = colour and COLOUR[level]
  return ("%s.%03d %s%-5s%s %s\n"):format(
    os.date("%H:%M:%S", seconds),
    milliseconds,
    shade or "",
    level,
    shade and PLAIN or "",
    text
  )
end

local function json_line(level, message, fields)
  local seconds, milliseconds = timestamp()
  local line = {}
  for key, value in pairs(fields or {}) do
    local kind = type(value)
    local fits = kind == "boolean" or math.type(value) == "integer"
    line[tostring(key)] = fits and value or M.redact(errors.text(value))
  end
  line.time = ("%s.%03dZ"):format(os.date("!%Y-%m-%dT%H:%M:%S", seconds), milliseconds)
  line.level = level
  line.message = M.redact(message)
  return M.redact(json.encode(line)) .. "\n"
end

local function use_colour(state)
  if state.colour == nil then
    local no_colour = os.getenv("NO_COLOR")
    state.colour = not state.write and (no_colour == nil or no_colour == "") and uv.guess_handle(2) == "tty"
  end
  return state.colour
end

local function write(level, message, fields, ...)
  local state = current()
  if RANK[level] > RANK[state.level] then
    return
  end
  if type(message) ~= "string" then
    message = errors.text(message)
  end
  if fields ~= nil and (type(fields) ~= "table" or getmetatable(fields)) then
    message = message:format(fields, ...)
    fields = nil
  end
  local line
  if state.form == "json" then
    line = json_line(level, message, fields)
  else
    line = plain_line(level, message, fields, use_colour(state))
  end
  if state.write then
    state.write(line)
  else
    io.stderr:write(line)
  end
end

--- Something failed that the user must know of.
---@param message any a string, or an error value
---@param ... any a table of fields, printed as key=value; or values for string.format
function M.error(message, ...)
  write("error", message, ...)
end

--- Something is not as it should be; the work goes on.
---@param message any
---@param ... any as for `error`
function M.warn(message, ...)
  write("warn", message, ...)
end

--- What a person who watches wants to see.
---@param message any
---@param ... any as for `error`
function M.info(message, ...)
  write("info", message, ...)
end

--- What helps to find a fault.
---@param message any
---@param ... any as for `error`
function M.debug(message, ...)
  write("debug", message, ...)
end

--- Everything.
---@param message any
---@param ... any as for `error`
function M.trace(message, ...)
  write("trace", message, ...)
end

--- Whether a line of this level would be written: ask before making an expensive one.
---@param level string
---@return boolean
function M.enabled(level)
  if not RANK[level] then
    errors.misuse(2, "log.enabled: unknown level '%s'", tostring(level))
  end
  return RANK[level] <= RANK[current().level]
end

--- Change how lines are written, for the rest of the process.
---@param options { level: string?, form: "plain"|"json"?, write: fun(line: string)?, colour: boolean? }
---       write: takes the place of standard error; false goes back to it
function M.configure(options)
  errors.check_options(options, { level = true, form = true, write = true, colour = true }, "log.configure")
  if options.level ~= nil and not RANK[options.level] then
    errors.misuse(2, "log.configure: unknown level '%s'", tostring(options.level))
  end
  if options.form ~= nil and options.form ~= "plain" and options.form ~= "json" then
    errors.misuse(2, "log.configure: unknown form '%s' (plain, json)", tostring(options.form))
  end
  local state = current()
  for key, value in pairs(options) do
    state[key] = value or nil
  end
  if options.colour ~= nil then
    state.colour = options.colour
  end
end

--- Forget what `configure` set and read the environment again.
function M.reset()
  settings = nil
end

return M
