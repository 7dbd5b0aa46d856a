-- The examples of this room's pages are run, and must print what `-->` says they print.
local PAGES = { "mesh", "mesh-check", "mesh-placement", "mesh-cost" }

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")

--- The indented blocks of a page, one after the other: later ones use the locals of earlier ones.
local function code_of(page)
  local file <close> = assert(io.open(HERE .. "/../../../docs/" .. page .. ".md"))
  local lines, expected, inside = {}, {}, false
  for line in file:lines() do
    local code = line:match("^    (.*)$")
    if code then
      inside = true
      local output = code:match("^%-%-> ?(.*)$")
      if output then
        expected[#expected + 1] = output
      else
        -- Locals of the page's own are shared between its examples.
        lines[#lines + 1] = (code:gsub("^local ", ""))
      end
    elseif inside then
      inside = false
      lines[#lines + 1] = ""
    end
  end
  return table.concat(lines, "\n"), expected
end

describe("the examples of", function()
  for _, page in ipairs(PAGES) do
    it("docs/" .. page .. ".md print what they say", function()
      local code, expected = code_of(page)
      local printed = {}
      local environment = setmetatable({
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
        os = {
          tmpname = function()
            return "/dev/null"
          end,
        },
      }, { __index = _G })
      assert(load(code, "=docs/" .. page .. ".md", "t", environment))()
      assert.is_true(#expected > 0)
      assert.are.same(expected, printed)
    end)
  end
end)
