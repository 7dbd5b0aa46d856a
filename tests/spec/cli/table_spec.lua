-- Lists: fields, filters, formats.
local tables = require("ciranda.cli.table")

describe("tables", function()
  local ITEMS = {
    {
      name = "projects/p/locations/z-a/nodes/job-0",
      state = "READY",
      acceleratorType = "v4-8",
      labels = { t = "x" },
    },
    { name = "projects/p/locations/z-a/nodes/job-1", state = "STOPPED", acceleratorType = "v4-16" },
    {
      name = "projects/p/locations/z-b/nodes/other",
      state = { state = "READY" },
      list = { { id = "a" }, { id = "b" } },
    },
  }

  local function names(filter)
    local matches, found = tables.filter(filter), {}
    for _, item in ipairs(ITEMS) do
      if matches(item) then
        found[#found + 1] = item.name:match("[^/]*$")
      end
    end
    return table.concat(found, " ")
  end

  it("finds fields by path", function()
    assert.equal("b", tables.field(ITEMS[3], "list[1].id"))
    assert.equal("READY", tables.field(ITEMS[3], "state.state"))
    assert.equal("other", tables.field(ITEMS[3], "name.basename()"))
    for _, path in ipairs({ "nothing", "state.state.state", "list[7].id", "name.x" }) do
      assert.is_nil(tables.field(ITEMS[3], path))
    end
  end)

  it("filters by field and by word", function()
    for filter, expected in pairs({
      ["state=READY"] = "job-0 other",
      ["state=ready AND name:job"] = "job-0",
      ["state!=READY"] = "job-1",
      ["name=job-1"] = "job-1",
      ["acceleratorType:v4"] = "job-0 job-1",
      ["labels.t='x'"] = "job-0",
      ["labels.t!=x"] = "job-1 other",
      ["STOPPED"] = "job-1",
      ["oth"] = "other",
      ["no-such"] = "",
    }) do
      assert.equal(expected, names(filter), filter)
    end
    assert.equal("job-0 job-1 other", names(nil))
  end)

  it("refuses what it does not understand, rather than match everything", function()
    for _, filter in ipairs({
      "state=READY OR",
      "a==b",
    }) do
      local ok, problem = pcall(tables.filter, filter)
      assert.is_false(ok, filter)
      assert.equal("usage", problem.code)
      assert.matches("--filter", problem.message, 1, true)
    end
    local ok, problem = pcall(tables.check_format, "yaml")
    assert.is_false(ok)
    assert.matches("takes json or value", problem.message, 1, true)
  end)

  it("knows the fields that a list needs", function()
    assert.is_nil(tables.needed({}))
    assert.is_nil(tables.needed({ format = "json", filter = "state=READY" }))
    assert.same({ "name", "state.state" }, tables.needed({ format = "value(name, state.state)" }))
    assert.same(
      { "name.basename()", "labels.t", "name", "state" },
      tables.needed({ format = "value(name.basename())", filter = "labels.t:x AND READY" })
    )
    assert.same(
      { "name", "zone", "labels.t" },
      tables.needed({ format = "value(name)", filter = "NOT (zone~^us OR -labels.t:*)" })
    )
  end)

  it("sorts by name what is not sorted", function()
    local list = { { name = "b" }, { name = "c" }, { name = "a" } }
    tables.sort(list)
    assert.same({ { name = "a" }, { name = "b" }, { name = "c" } }, list)
  end)

  it("aligns columns by characters and leaves no blanks at the ends", function()
    assert.equal("A    BB\né    x\nccc", tables.text({ { "A", "BB" }, { "é", "x" }, { "ccc", "" } }))
  end)
end)
