--- One field of an answer made to be what it should not be: a number where a string belongs, a page without
--- its continuation. Tests of clients, and tests of those tests, ask for it.

local json = require("ciranda.io.json")

local M = {}

local function is_array(value)
  return json.kind(value) == "array" or value[1] ~= nil
end

local function set(container, steps, at, value)
  if type(container) ~= "table" then
    return
  end
  local step, last = steps[at], at == #steps
  local keys = { step }
  if step == "*" then
    keys = {}
    for key in pairs(container) do
      keys[#keys + 1] = key
    end
  elseif is_array(container) then
    return
  end
  for _, key in ipairs(keys) do
    if last then
      container[key] = value
    else
      set(container[key], steps, at + 1, value)
    end
  end
end

--- Set a field of an answer, or take it out. An answer without the message around the field stays as it is.
---@param text string JSON
---@param path string names with dots between them, "nodes.*.id"; "*" is every element of a list or an object
---@param value any nil takes the field out
---@return string text JSON
function M.apply(text, path, value)
  local ok, answer = pcall(json.decode, text)
  if not ok then
    return text
  end
  local steps = {}
  for step in path:gmatch("[^.]+") do
    steps[#steps + 1] = step
  end
  set(answer, steps, 1, value)
  return json.encode(answer) .. "\n"
end

return M
