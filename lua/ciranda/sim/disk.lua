--- Taking away what a worker's users have left on its disk.

local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local M = {}

--- Remove a directory with everything in it, directories that their owner has locked included.
---@async
---@param path string
--- Raises what the file system says when something stays.
function M.remove(path)
  if pcall(fs.remove_tree, path) then
    return
  end
  process.run({ "chmod", "-R", "u+rwX", path, timeout = 30 })
  fs.remove_tree(path)
end

return M
