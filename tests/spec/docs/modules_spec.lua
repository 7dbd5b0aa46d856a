-- The index of modules is what the modules say of themselves, and every page that the README names is there.
local fs = require("ciranda.io.fs")

describe("the documentation", function()
  it("lists every module with its purpose: ciranda cmake/module_index.lua > docs/modules.md", function()
    local index = dofile("cmake/module_index.lua")
    local page = index.page(".")
    assert.equal(page, fs.read("docs/modules.md"))
    for line in page:gmatch("%- `[^\n]+") do
      assert.matches("^%- `[%w_%.]+`: %S+ %S+", line)
    end
  end)

  it("has every page that another page or the README leads to", function()
    local pages = { "README.md" }
    for _, entry in ipairs(fs.list("docs")) do
      if entry.name:find("%.md$") then
        table.insert(pages, "docs/" .. entry.name)
      end
    end
    for _, page in ipairs(pages) do
      for target in fs.read(page):gmatch("%]%(([%w_%-/%.]+%.md)[^)]*%)") do
        local path = page:find("/") and "docs/" .. target or target
        assert.is_truthy(fs.exists(path), ("%s leads to %s, which is not there"):format(page, target))
      end
    end
  end)

  it("has a page for every recipe", function()
    for _, entry in ipairs(fs.list("recipes")) do
      local name = entry.name:match("^(.*)%.lua$")
      if name then
        local found = fs.exists("docs/recipe-" .. name .. ".md") or fs.exists("docs/" .. name .. ".md")
        assert.is_truthy(found, "no page for the recipe " .. name)
      end
    end
  end)

  it("says the truth about the arrows: no room requires one above it", function()
    local rank = { task = 1, io = 2, ssh = 3, gcp = 3, provider = 4, fleet = 5, run = 6, cli = 7 }
    -- Error values are everybody's; `ciranda run --sim` is the command line's own.
    local allowed = { ["task io.error"] = true, ["cli sim"] = true }
    local wrong, seen = {}, 0
    for room, own in pairs(rank) do
      for _, entry in ipairs(fs.list("lua/ciranda/" .. room)) do
        local path = ("lua/ciranda/%s/%s"):format(room, entry.name)
        for module in fs.read(path):gmatch('require%(?%s*"ciranda%.([%w_%.]+)"') do
          local other = module:match("^[%w_]+")
          seen = seen + 1
          local up = other == "sim" or (rank[other] or 0) > own
          if up and not allowed[room .. " " .. module] and not allowed[room .. " " .. other] then
            wrong[#wrong + 1] = ("%s requires ciranda.%s"):format(path, module)
          end
        end
      end
    end
    assert.is_true(seen > 500, "only " .. seen)
    assert.same({}, wrong)
  end)
end)
