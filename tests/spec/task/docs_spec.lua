local task = require("ciranda.task")

--- The examples of these pages are run, and must print what `-->` says they print.
local PAGES = { "task", "io-error", "io-json", "io-log", "io-process", "io-fs" }

local root = debug.getinfo(1, "S").source:match("^@(.*)tests/spec/task/[^/]+$")

--- The indented blocks of a page, without those that are no Lua.
local function examples(page)
  local file <close> = assert(io.open(root .. "docs/" .. page .. ".md"))
  local blocks, block = {}, nil
  for line in file:lines() do
    local code = line:match("^    (.*)")
    if code then
      block = block or {}
      block[#block + 1] = code
    elseif line ~= "" and block then
      blocks[#blocks + 1] = table.concat(block, "\n")
      block = nil
    elseif block then
      block[#block + 1] = ""
    end
  end
  blocks[#blocks + 1] = block and table.concat(block, "\n")
  local lua = {}
  for _, text in ipairs(blocks) do
    if not text:find("^stack traceback") then
      lua[#lua + 1] = text
    end
  end
  return lua
end

local PRELUDE = [[
  local task = require("ciranda.task")
  local process = require("ciranda.io.process")
  local uv = require("luv")
]]

--- Run an example and collect what it prints.
local function run(text, name)
  local printed = {}
  local env = setmetatable({
    print = function(...)
      local parts = table.pack(...)
      for index = 1, parts.n do
        parts[index] = tostring(parts[index])
      end
      for line in (table.concat(parts, " ") .. "\n"):gmatch("(.-)\n") do
        if line ~= "" then
          printed[#printed + 1] = line
        end
      end
    end,
  }, { __index = _G })
  local chunk = assert(load(PRELUDE .. text, "=" .. name, "t", env))
  task.run(chunk)
  return printed
end

for _, page in ipairs(PAGES) do
  describe("docs/" .. page .. ".md", function()
    for number, text in ipairs(examples(page)) do
      it(("example %d works"):format(number), function()
        local log = require("ciranda.io.log")
        log.configure({ write = function() end }) -- what goes to standard error has the time in it
        local printed = run(text, page)
        log.reset()
        if text:find("log%.") then
          return
        end
        local expected = {}
        for line in text:gmatch("%-%->%s*([^\n]*)") do
          expected[#expected + 1] = (line:gsub("%s+", " "))
        end
        for index, line in ipairs(expected) do
          assert.equal(line, (tostring(printed[#printed - #expected + index]):gsub("%s+", " ")))
        end
      end)
    end
  end)
end
