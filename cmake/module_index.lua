--- Writes docs/modules.md: every Lua module with the sentence that its file begins with.
---
---     build/ciranda cmake/module_index.lua > docs/modules.md
---
--- A spec compares the page with what this prints, so it stays true.
local fs = require("ciranda.io.fs")

local M = {}

local ROOMS = {
  { "task", "Structured concurrency" },
  { "io", "The engine's primitives made pleasant" },
  { "ssh", "Connections to workers and other hosts" },
  { "gcp", "Google's APIs" },
  { "provider", "Where a fleet comes from" },
  { "fleet", "A set of workers" },
  { "run", "What survives" },
  { "mesh", "Placing a sharding: arithmetic, no I/O" },
  { "sim", "The simulated cloud" },
  { "cli", "The command line" },
}

--- The first sentence of a file's opening comment.
---@param path string
---@return string
local function purpose(path)
  local words = {}
  for line in fs.read(path):gmatch("([^\n]*)\n") do
    local text = line:match("^%-%-%-?%s?(.*)$")
    if not text or text == "" then
      break
    end
    table.insert(words, text)
  end
  local sentence = table.concat(words, " ")
  return sentence:match("^(.-[%.!])%s") or sentence
end

--- The page.
---@param root string the source tree
---@return string
function M.page(root)
  local out = {
    "# Modules",
    "",
    "Every Lua module, by room, with the sentence that its file begins with. Made by `cmake/module_index.lua`.",
  }
  local function list(title, directory, name_of)
    table.insert(out, "")
    table.insert(out, "## " .. title)
    table.insert(out, "")
    for _, entry in ipairs(fs.list(root .. "/" .. directory)) do
      local name = entry.name:match("^(.*)%.lua$")
      if name then
        table.insert(
          out,
          ("- `%s`: %s"):format(name_of(name), purpose(("%s/%s/%s"):format(root, directory, entry.name)))
        )
      end
    end
  end
  for _, room in ipairs(ROOMS) do
    list(
      ("%s/: %s"):format(room[1], room[2]:sub(1, 1):lower() .. room[2]:sub(2)),
      "lua/ciranda/" .. room[1],
      function(name)
        return "ciranda." .. room[1] .. (name == "init" and "" or "." .. name)
      end
    )
  end
  list("recipes/", "recipes", function(name)
    return name
  end)
  return table.concat(out, "\n") .. "\n"
end

if arg and arg[0] and arg[0]:find("module_index") then
  io.write(M.page("."))
end

return M
