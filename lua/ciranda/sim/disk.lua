--- Taking away what a worker's users have left on its disk.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local M = {}

-- Seconds for one go at it: a disk may hold a training run's files.
local DEADLINE = 120

--- Remove a directory with everything in it, directories that their owner has locked included. rm does it: a call to
--- the thread pool for each of thousands of files takes many times as long.
---@async
---@param path string absolute
--- Raises `io` when something stays.
function M.remove(path)
  local result = process.run({ "rm", "-rf", "--", path, timeout = DEADLINE })
  if result.code ~= 0 then
    process.run({ "chmod", "-R", "u+rwX", "--", path, timeout = DEADLINE })
    result = process.run({ "rm", "-rf", "--", path, timeout = DEADLINE })
  end
  if fs.exists(path) then
    errors.raise({
      code = "io",
      op = "sim.remove",
      target = path,
      message = result.stderr:match("[^\n]+") or "something of it stays",
    })
  end
end

return M
