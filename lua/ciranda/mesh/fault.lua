--- How this room raises: every refusal is a ciranda.Error with the fields a program needs.
--
-- Refusals that JAX would make carry JAX's own text as `message` and its exception's name as `exception`
-- ("ValueError", "AssertionError", "NotImplementedError", ...). The others are ours.
local M = {}

--- Raises. `fields.code` is "invalid" when absent.
---@param fields { code: string?, message: string, op: string?, target: string?, [string]: any }
function M.raise(fields)
  fields.code = fields.code or "invalid"
  require("ciranda.io.error").raise(fields)
end

--- Raises what JAX would raise.
---@param exception string the name of Python's exception
---@param format string JAX's text
---@param ... any for string.format
function M.jax(exception, format, ...)
  M.raise({
    code = exception == "NotImplementedError" and "unsupported" or "invalid",
    exception = exception,
    message = select("#", ...) > 0 and format:format(...) or format,
  })
end

--- Raises a misuse at the line that called the function which calls this one.
---@param format string
---@param ... any for string.format
function M.misuse(format, ...)
  require("ciranda.io.error").misuse(3, format, ...)
end

--- Refuses options that are not known: a misspelt one must not be ignored.
---@param options table?
---@param known table<string, any> keys are the names that are known
---@param what string the function, for the message
---@return table options an empty table when there are none
function M.options(options, known, what)
  if options == nil then
    return {}
  end
  local errors = require("ciranda.io.error")
  if type(options) ~= "table" then
    errors.misuse(3, "%s: options must be a table, got %s", what, type(options))
  end
  errors.check_options(options, known, what, 3)
  return options
end

return M
