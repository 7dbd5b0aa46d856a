local nodeset = require("ciranda.provider.nodeset")

local function gang(slices, workers)
  local list = {}
  for slice = 0, slices - 1 do
    for index = 0, workers - 1 do
      list[#list + 1] = {
        slice = slice,
        index = index,
        node = "job-" .. slice,
        name = ("job-%d-w-%d"):format(slice, index),
        address = ("10.0.%d.%d"):format(slice, index),
      }
    end
  end
  return list
end

local function names(workers)
  local out = {}
  for place, worker in ipairs(workers) do
    out[place] = worker.slice .. "/" .. worker.index
  end
  return table.concat(out, " ")
end

local function selected(text, slices, workers)
  return names(nodeset.select(gang(slices or 3, workers or 4), text))
end

local function failure(fn, ...)
  local ok, e = pcall(fn, ...)
  assert.is_false(ok)
  return e
end

describe("nodeset.select", function()
  it("takes ranges on both sides", function()
    assert.equal("0/0 0/2 1/0 1/2", selected("slice[0-1]/worker[0,2]"))
  end)

  it("takes a slice, a worker number, a star and all", function()
    assert.equal("1/0 1/1 1/2 1/3", selected("slice1"))
    assert.equal("0/0 1/0 2/0", selected("worker0"))
    assert.equal("2/0 2/1 2/2 2/3", selected("slice2/*"))
    assert.equal("2/3", selected("2/3"))
    assert.equal(12, #nodeset.select(gang(3, 4), "all"))
  end)

  it("takes node names, worker names and addresses, with patterns", function()
    assert.equal("1/0 1/1 1/2 1/3", selected("job-1"))
    assert.equal("0/0 1/0", selected("job-[0-1]/worker0"))
    assert.equal("0/2 1/2 2/2", selected("job-?-w-2"))
    assert.equal("2/1", selected("10.0.2.1"))
    assert.equal("0/2 1/2 2/0 2/1 2/2 2/3", selected("*-2"))
  end)

  it("takes away, wherever the exclusion stands and when it stands alone", function()
    assert.equal("0/0 1/0", selected("worker0,!slice2"))
    assert.equal("0/0 1/0", selected("!slice2,worker0"))
    assert.equal("0/0 0/1 0/2 0/3", selected("!slice[1-2]"))
  end)

  it("keeps the order of the fleet and names nobody twice", function()
    assert.equal("0/1 2/0", selected("slice2/worker0 slice0/worker1,slice2/worker[0,0-0]"))
  end)

  it("does not take worker1 for worker10 nor slice1 for slice11", function()
    assert.equal("1/1", selected("slice1/worker1", 12, 12))
  end)

  it("fails when a term names nobody, and says who is there", function()
    local e = failure(selected, "slice0,slice7")
    assert.equal("not_found", e.code)
    assert.matches('"slice7" names no worker', e.message, 1, true)
    assert.matches("slice[0-2]/worker[0-3]", e.message, 1, true)
    assert.equal("not_found", failure(selected, "slice0,!slice9").code)
    assert.equal("not_found", failure(selected, "slice0,!slice0").code)
  end)

  it("keeps gaps in slice numbers", function()
    local workers = { { slice = 0, index = 0 }, { slice = 7, index = 0 } }
    assert.equal("7/0", names(nodeset.select(workers, "slice[5-9]")))
  end)
end)

describe("nodeset.parse", function()
  for text, expected in pairs({
    [""] = "it is empty",
    [" , "] = "it is empty",
    ["slice[0-3"] = "[ without ]",
    ["slice0]"] = "] without [",
    ["slice[[0]]"] = "[ inside [ ]",
    ["slice[3-1]"] = "runs backwards",
    ["slice[a]"] = "neither a number nor a range",
    ["slice[]"] = "neither a number nor a range",
    ["slice[99999999999999999999]"] = "too large",
    ["slice0/"] = "nothing on one side",
    ["a/b/c"] = "more than one /",
    ["3"] = "could be a slice or a worker",
    ["!"] = "names nothing",
  }) do
    it(("refuses %q"):format(text), function()
      local e = failure(nodeset.parse, text)
      assert.equal("usage", e.code)
      assert.matches(expected, e.message, 1, true)
    end)
  end

  it("refuses what is no string", function()
    assert.equal("misuse", failure(nodeset.parse, 3).code)
  end)
end)

describe("nodeset.fold", function()
  it("writes the shortest set", function()
    assert.equal("slice[0-1]/worker[0-3]", nodeset.fold(gang(2, 4)))
    assert.equal("slice0/worker0", nodeset.fold({ { slice = 0, index = 0 } }))
    assert.equal(
      "slice[0,2]/worker[0-1],slice1/worker1",
      nodeset.fold({
        { slice = 2, index = 1 },
        { slice = 0, index = 0 },
        { slice = 1, index = 1 },
        { slice = 2, index = 0 },
        { slice = 0, index = 1 },
      })
    )
    assert.equal("none", nodeset.fold({}))
  end)

  it("says the same thing back: select(fold(some)) is some", function()
    local random = 12345
    local function chance()
      random = (random * 1103515245 + 12345) % 2147483648
      return random // 65536 % 3 == 0
    end
    for _ = 1, 50 do
      local all, some = gang(6, 5), {}
      for _, worker in ipairs(all) do
        if chance() then
          some[#some + 1] = worker
        end
      end
      if #some > 0 then
        assert.equal(names(some), names(nodeset.select(all, nodeset.fold(some))))
      end
    end
  end)
end)

describe("nodeset.expand_names", function()
  it("expands brackets, keeps the padding", function()
    assert.same({ "n08.lan", "n09.lan", "n10.lan", "x" }, nodeset.expand_names("n[08-10].lan,x"))
    assert.same({ "a0b1", "a0b2", "a1b1", "a1b2" }, nodeset.expand_names("a[0-1]b[1-2]"))
  end)

  it("refuses to fill memory", function()
    assert.matches("more than 100000 names", failure(nodeset.expand_names, "n[0-99999999]").message, 1, true)
    assert.matches("more than 100000", failure(nodeset.expand_names, "a[0-999]b[0-999]").message, 1, true)
  end)
end)
