---@meta ciranda.core.json

--- What must be known of a JSON text before it is decoded (engine/json_scan.c).
---@class ciranda.core.json
local json = {}

--- Look through a text.
---@param text string
---@return integer? bad place of the first byte that is not UTF-8
---@return boolean special whether there is a number outside strings, or an empty array or object
function json.scan(text) end

return json
