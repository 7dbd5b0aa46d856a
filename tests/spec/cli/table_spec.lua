-- Lists: fields, filters, formats.
local json = require("ciranda.io.json")
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
    assert.matches("none of gcloud's other formats", problem.message, 1, true)
  end)

  it("prints fields in gcloud's formats", function()
    local written = {}
    local write = io.write
    local function printed(format, one)
      written = {}
      io.write = function(...) -- luacheck: ignore 122
        written[#written + 1] = table.concat({ ... })
      end
      local ok, problem = pcall(one and tables.print_one or tables.print, one or ITEMS, one and format or {
        columns = {},
        format = format,
        filter = "name:job",
      })
      io.write = write -- luacheck: ignore 122
      assert.is_true(ok, tostring(problem))
      return table.concat(written)
    end
    for format, expected in pairs({
      ["value(name.basename(),state)"] = "job-0\tREADY\njob-1\tSTOPPED\n",
      ["get(state)"] = "READY\nSTOPPED\n",
      ['value[separator=" "](state,labels.t)'] = "READY x\nSTOPPED \n",
      ["csv(name.basename(),acceleratorType)"] = "name,accelerator_type\njob-0,v4-8\njob-1,v4-16\n",
      ["csv[no-heading](state,labels)"] = 'READY,"{""t"":""x""}"\nSTOPPED,\n',
      ["csv[no-heading,separator=';'](state,labels.t)"] = "READY;x\nSTOPPED;\n",
      ["table(name.basename(),acceleratorType:label=TYPE)"] = "NAME   TYPE\njob-0  v4-8\njob-1  v4-16\n",
      ["table[no-heading](state)"] = "READY\nSTOPPED\n",
    }) do
      assert.equal(expected, printed(format), format)
    end
    -- With --json each is a record of its own, and the filter holds.
    written = {}
    io.write = function(...) -- luacheck: ignore 122
      written[#written + 1] = table.concat({ ... })
    end
    local fine, trouble = pcall(function()
      tables.print(ITEMS, { columns = {}, filter = "name:job-0", format = "json", event = "node" })
      tables.print_one(ITEMS[2], "value(name)", "node")
    end)
    io.write = write -- luacheck: ignore 122
    assert.is_true(fine, tostring(trouble))
    local records = {}
    for line in table.concat(written):gmatch("[^\n]+") do
      local record = json.decode(line)
      records[#records + 1] = record.event .. " " .. record.node.state
    end
    assert.same({ "node READY", "node STOPPED" }, records)
    assert.equal("state,id\nREADY,a\n", printed("csv(state.state,list[0].id)", ITEMS[3]))
    for _, format in ipairs({
      "yaml",
      "table",
      "value()",
      "value(,)",
      "xml(name)",
      "csv[quote](name)",
      "table[separator=','](name)",
      "value(name.scope())",
      "table(name:sort=1)",
    }) do
      local ok, problem = pcall(tables.check, { format = format })
      assert.is_false(ok, format)
      assert.equal("usage", problem.code)
      assert.matches("^%-%-format: ", problem.message)
    end
  end)

  it("knows the fields that a list needs", function()
    assert.is_nil(tables.needed({}))
    assert.is_nil(tables.needed({ format = "value(name)" }, true))
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
