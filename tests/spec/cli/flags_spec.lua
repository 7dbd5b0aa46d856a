local errors = require("ciranda.io.error")
local flags = require("ciranda.cli.flags")

local RECIPE = {
  summary = "a recipe",
  flags = {
    { name = "COMMAND", required = true, help = "what to run" },
    { name = "COUNT", type = "integer", default = 3, short = "-c" },
    { name = "RATE", type = "number" },
    { name = "DEEP", type = "boolean", default = false, short = "-dd" },
    { name = "WAIT", type = "duration", default = 60 },
    { name = "NAMES", type = "list" },
    { name = "MODE", choices = { "fast", "safe" }, default = "safe" },
    { name = "label", many = true },
    { name = "PLACE", type = "directory" },
  },
}

local function parse(...)
  return flags.parse("thing", RECIPE, { ... })
end

local function refusal(...)
  local words = { ... }
  local ok, err = pcall(flags.parse, "thing", RECIPE, words)
  assert.is_false(ok)
  assert.is_true(errors.is(err, "usage"), tostring(err))
  return err.message
end

describe("flags", function()
  it("come as --NAME=value and as --NAME value", function()
    local values, given = parse("--COMMAND=python3 train.py --steps=3", "--COUNT", "5")
    assert.equal("python3 train.py --steps=3", values.COMMAND)
    assert.equal(5, values.COUNT)
    assert.same({ COMMAND = true, COUNT = true }, given)
  end)

  it("have defaults", function()
    local values = parse("--COMMAND=x")
    assert.equal(3, values.COUNT)
    assert.is_false(values.DEEP)
    assert.equal("safe", values.MODE)
    assert.is_nil(values.RATE)
  end)

  it("leave the word after a lone boolean to the arguments that go by place", function()
    local recipe = {
      flags = {
        { name = "PATHS", positional = true, many = true },
        { name = "deep", type = "boolean", default = false },
        { name = "at", type = "integer" },
      },
    }
    for _, words in ipairs({
      { "--deep", "a", "b" },
      { "--deep", "true", "a", "b" },
      { "a", "--deep", "--at=1", "b" },
      { "a", "b", "--deep" },
    }) do
      local values = flags.parse("thing", recipe, words)
      assert.same({ "a", "b" }, values.PATHS)
      assert.is_true(values.deep)
    end
    assert.is_false(flags.parse("thing", recipe, { "--deep", "no", "a" }).deep)
  end)

  it("take booleans as people write them, and refuse the rest", function()
    for word, value in pairs {
      ["true"] = true,
      ["1"] = true,
      yes = true,
      T = true,
      ["false"] = false,
      no = false,
    } do
      assert.equal(value, parse("--COMMAND=x", "--DEEP=" .. word).DEEP)
    end
    assert.is_true(parse("--COMMAND=x", "--DEEP").DEEP)
    assert.matches("true or false", refusal("--COMMAND=x", "--DEEP=maybe"))
  end)

  it("have short forms of one dash and several letters", function()
    assert.is_true(parse("--COMMAND=x", "-dd=yes").DEEP)
    assert.equal(9, parse("--COMMAND=x", "-c", "9").COUNT)
  end)

  it("convert durations, lists and repeated flags", function()
    local values = parse("--COMMAND=x", "--WAIT=1h30m", "--NAMES=a, b,c", "--label=k=v", "--label=l")
    assert.equal(5400, values.WAIT)
    assert.same({ "a", "b", "c" }, values.NAMES)
    assert.same({ "k=v", "l" }, values.label)
  end)

  it("the last one wins when a flag that takes one value is repeated", function()
    assert.equal(2, parse("--COMMAND=x", "--COUNT=1", "--COUNT=2").COUNT)
  end)

  it("say what is wrong and where", function()
    assert.matches("needs %-%-COMMAND", refusal("--COUNT=1"))
    assert.matches("%-%-COUNT is 'many', but takes a whole number", refusal("--COMMAND=x", "--COUNT=many"))
    assert.matches("%-%-COUNT is '1.5'", refusal("--COMMAND=x", "--COUNT=1.5"))
    assert.matches("unknown option '%-%-COMAND'", refusal("--COMAND=x"))
    assert.matches("COMMAND", refusal("--COMAND=x")) -- what is near
    assert.matches("Did you mean '--COMMAND'?", refusal("--command=x"), 1, true)
    assert.matches("--COMMAND is empty", refusal("--COMMAND="), 1, true)
    assert.matches(
      "--PLACE is '/not/there', but takes a directory, and there is none",
      refusal("--COMMAND=x", "--PLACE=/not/there"),
      1,
      true
    )
    assert.matches("takes a directory, not a file", refusal("--COMMAND=x", "--PLACE=README.md"), 1, true)
    assert.equal("docs", parse("--COMMAND=x", "--PLACE=docs").PLACE)
    local two = { flags = { { name = "A", required = true }, { name = "B", required = true } } }
    local _, err = pcall(flags.parse, "thing", two, {})
    assert.matches("thing needs --A and --B", err.message, 1, true)
    assert.matches("one of: fast, safe", refusal("--COMMAND=x", "--MODE=slow"))
    assert.matches("takes a time", refusal("--COMMAND=x", "--WAIT=soon"))
  end)

  it("have help that names each flag, its default and whether it is required", function()
    local help = flags.help("thing", RECIPE)
    assert.matches("%-%-COMMAND", help)
    assert.matches("Required", help)
    assert.matches("Default: 3", help)
    assert.is_true(parse("--help").help)
  end)

  it("refuse a recipe whose declaration is wrong", function()
    local ok, err = pcall(flags.parse, "thing", { flags = { { name = "X", type = "colour" } } }, {})
    assert.is_false(ok)
    assert.is_true(errors.is(err, "misuse"))
  end)
end)
