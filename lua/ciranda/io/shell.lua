--- Text for a POSIX shell: whatever it holds, the shell reads it back as it was.

local M = {}

--- Text as one word.
---@param text string
---@return string
function M.quote(text)
  return "'" .. (text:find("'", 1, true) and text:gsub("'", "'\\''") or text) .. "'"
end

--- Words in a row, each bare where no shell would read anything into it, so that people can read and type them. One
--- that begins with an `=` is a path to zsh, with a `%` a job to fish.
---@param words string[]
---@return string
function M.words(words)
  local line = {}
  for place, word in ipairs(words) do
    line[place] = word:find("^[%w_./:@+-][%w_./:@%%,=+-]*$") and word or M.quote(word)
  end
  return table.concat(line, " ")
end

--- A script as a command that any login shell gives to `sh`.
---@param script string
---@return string
function M.sh(script)
  return "sh -c " .. M.quote(script)
end

return M
