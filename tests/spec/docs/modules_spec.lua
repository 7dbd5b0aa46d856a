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
end)
