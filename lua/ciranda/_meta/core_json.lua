---@meta ciranda.core.json

--- JSON becomes Lua values (engine/json_decode.c).
---@class ciranda.core.json
---@field null lightuserdata
---@field max_depth integer deepest nesting that is read
local json = {}

--- Decode a text.
---@param text string
---@param object table metatable of empty objects
---@param array table metatable of empty arrays
---@return any value nil after a failure: JSON's null is not nil
---@return integer? place the byte, from 1, at which the text is wrong
---@return string? what is wrong there
---@return boolean? invalid whether it is not UTF-8 there
function json.decode(text, object, array) end

return json
