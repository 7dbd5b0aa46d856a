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

  it("has a comment for each public function, and in it each parameter", function()
    local wrong, seen = {}, 0
    local function look(path)
      local comment = ""
      for line in fs.read(path):gmatch("([^\n]*)\n") do
        local name, parameters = line:match("^function (M%.[%w_]+)%((.*)%)")
        if name then
          seen = seen + 1
          local missing = comment == "" and { "a comment" } or {}
          for parameter in parameters:gmatch("%a[%w_]*") do
            if not comment:find("@param " .. parameter .. "[ ?]") then
              table.insert(missing, parameter)
            end
          end
          if #missing > 0 then
            table.insert(wrong, ("%s: %s: %s"):format(path, name, table.concat(missing, ", ")))
          end
        end
        comment = line:find("^%-%-") and comment .. line .. "\n" or ""
      end
    end
    local function walk(directory)
      for _, entry in ipairs(fs.list(directory)) do
        local path = directory .. "/" .. entry.name
        if entry.type == "directory" then
          walk(path)
        elseif path:find("%.lua$") then
          look(path)
        end
      end
    end
    walk("lua")
    assert.is_true(seen > 400, "only " .. seen)
    assert.same({}, wrong)
  end)

  it("names files that are there, and every primitive of the engine", function()
    local page, missing = fs.read("docs/architecture.md"), {}
    for path in page:gmatch("`([%w_/%.%-]+%.%a+)`") do
      local kind = path:match("%.(%a+)$")
      local there = not ("lua c h md sh"):find(kind, 1, true)
      for _, room in ipairs { "", "lua/ciranda/", "engine/", "docs/" } do
        there = there or fs.exists(room .. path)
      end
      if not there then
        table.insert(missing, path)
      end
    end
    for _, entry in ipairs(fs.list("engine")) do
      local named = page:find(entry.name, 1, true) or entry.name:find("^ssh_") or not entry.name:find("%.c$")
      if not named then
        table.insert(missing, "engine/" .. entry.name)
      end
    end
    assert.same({}, missing)
  end)
end)
