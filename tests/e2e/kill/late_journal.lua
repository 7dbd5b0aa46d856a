--- The control of the walks: a program that writes what it is about to do when it has done it.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local M = {}

--- A tree of modules whose journal writes an intent when the next one comes: after the call it speaks of.
---@param scratch string where it may be put
---@return string directory
function M.tree(scratch)
  local tree = scratch .. "/late"
  fs.mkdir_p(tree)
  process.run({ "cp", "-R", "lua", "recipes", tree, timeout = 60 }):check()
  local path = tree .. "/lua/ciranda/run/journal.lua"
  local text, count = fs.read(path):gsub(
    "\nfunction Journal:intent%(kind, fields%)\n",
    [[

function Journal:intent(kind, fields)
  if kind ~= "runner" then
    if self.late then
      self:append(self.late[1], self.late[2])
    end
    self.late = { kind, fields }
    return
  end
]]
  )
  assert(count == 1, "the journal is not what the control changes")
  fs.write(path, text)
  return tree
end

return M
