local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")

local function integer(expected, value)
  assert.equal("integer", math.type(value))
  assert.equal(expected, value)
end

describe("json.decode", function()
  it("makes integers of integral numbers, and floats of the others", function()
    local value = json.decode("[0, 1, -7, 1e3, 2.0, 9007199254740991, 0.5, 1e300, -0.0]")
    for index, expected in ipairs({ 0, 1, -7, 1000, 2, 9007199254740991 }) do
      integer(expected, value[index])
    end
    assert.equal("float", math.type(value[7]))
    assert.equal(0.5, value[7])
    assert.equal(1e300, value[8])
    assert.equal(0, value[9])
    integer(3, json.decode("3"))
  end)

  it("is exact for every integer of 64 bits", function()
    for _, text in ipairs({
      "9007199254740993",
      "1234567890123456789",
      "9223372036854775807",
      "-9223372036854775808",
      "-9223372036854775807",
    }) do
      integer(math.tointeger(text), json.decode(text))
      integer(math.tointeger(text), json.decode('{"deep": [[' .. text .. "]]}").deep[1][1])
    end
    assert.equal("float", math.type(json.decode("18446744073709551616")))
    -- A text with a long number is decoded another way: the other numbers must come out alike.
    local mixed =
      json.decode('{"long": 1234567890123456789, "float": 2.0, "short": 1, "text": "1234567890123456789"}')
    integer(2, mixed.float)
    integer(1, mixed.short)
    assert.equal("1234567890123456789", mixed.text)
  end)

  it("tells [] from {}, and null from what is absent", function()
    local value = json.decode('{"a": [], "o": {}, "n": null, "list": [null, 1]}')
    assert.equal("array", json.kind(value.a))
    assert.equal("object", json.kind(value.o))
    assert.equal(json.null, value.n)
    assert.equal(json.null, value.list[1])
    assert.is_nil(value.absent)
    assert.equal(json.null, json.decode("null"))
    assert.equal('{"a":[],"list":[null,1],"n":null,"o":{}}', json.encode(value))
  end)

  it("reads escapes and keeps UTF-8", function()
    assert.equal(
      'é"\\/\b\f\n\r\t\0\u{1F600}ü',
      json.decode('"\\u00e9\\"\\\\\\/\\b\\f\\n\\r\\t\\u0000\\ud83d\\ude00ü"')
    )
    assert.equal("\u{1F600}", json.decode('["\\ud83d\\ude00", {}]')[1])
  end)

  local function refused(text, pattern)
    local ok, e = pcall(json.decode, text, "http://example/x")
    assert.is_false(ok, text)
    assert.is_true(errors.is(e, "parse"))
    assert.matches("http://example/x", tostring(e), 1, true)
    assert.matches(pattern or ".", e.message)
  end

  it("refuses what is not JSON, and says where", function()
    for _, text in ipairs({
      "",
      "   ",
      "{",
      "[1,]",
      '{"a":1,}',
      "{'a':1}",
      "{a:1}",
      "[1] x",
      "[1 2]",
      "01",
      "[NaN]",
      "[Infinity]",
      "[0x10]",
      "[+1]",
      "[.5]",
      "nul",
      '"unfinished',
      '["\\x41"]',
      '["\\ud800"]',
      "[1] // comment, 1234567890123456789",
      "/* comment */ [1234567890123456789]",
      "[{}, /* comment */ 1]",
    }) do
      refused(text)
    end
    refused("[1] x", "character 5")
  end)

  it("refuses bytes that are no UTF-8, and says which", function()
    refused('{"a":"\xff"}', "byte 7")
    refused('"\xed\xa0\x80"', "byte 2")
  end)

  it("looks through a text before it is decoded", function()
    local scan = require("ciranda.core.json").scan
    for text, special in pairs({
      ['{"a":"b","c":[true,null]}'] = false,
      ['"1 [] {} \\" 2 \\\\"'] = false,
      ['["1",{"a-1":"[]"}]'] = false,
      ['["\\\\",1]'] = true,
      ['{"a": -1}'] = true,
      ['{"a":"long enough to be gone over in words","b":7}'] = true,
      ['{"a":[ \n\t\r]}'] = true,
      ["{ }"] = true,
      ["[{}]"] = true,
      ["["] = false,
      [""] = false,
    }) do
      local bad, found = scan(text)
      assert.is_nil(bad, text)
      assert.equal(special, found, text)
    end
  end)

  it("finds what is not UTF-8 as utf8.len does", function()
    local scan = require("ciranda.core.json").scan
    local pieces =
      { "a", '"', "\\", "\0", "\127", "\u{80}", "\u{7FF}", "\u{800}", "\u{D7FF}", "\u{E000}", "\u{FFFF}" }
    table.move({ "\u{10000}", "\u{10FFFF}" }, 1, 2, #pieces + 1, pieces)
    for _, bad in ipairs({
      "\x80",
      "\xBF",
      "\xC0\x80",
      "\xC1\xBF",
      "\xC2",
      "\xE0\x9F\xBF",
      "\xED\xA0\x80",
      "\xE2\x82",
      "\xF0\x8F\xBF\xBF",
      "\xF4\x90\x80\x80",
      "\xF5\x80\x80\x80",
      "\xFF",
    }) do
      pieces[#pieces + 1] = bad
    end
    for _, first in ipairs(pieces) do
      for _, second in ipairs(pieces) do
        for _, before in ipairs({ "", '"', '"seven b', '"and more than eight bytes' }) do
          local text = before .. first .. second
          local length, place = utf8.len(text)
          assert.equal(place, (scan(text)), ("%q"):format(text))
          assert.equal(length == nil, place ~= nil)
        end
      end
    end
  end)

  it("refuses nesting deeper than it says", function()
    local function nested(depth)
      return ("["):rep(depth) .. ("]"):rep(depth)
    end
    local value = json.decode(nested(json.MAX_DEPTH))
    for _ = 2, json.MAX_DEPTH do
      value = value[1]
    end
    assert.same({}, value)
    refused(nested(json.MAX_DEPTH + 1), "nested")
    refused(nested(100000), "nested")
    refused(('{"a":'):rep(100000), "nested")
  end)

  it("refuses to decode what is no string", function()
    local ok, e = pcall(function()
      json.decode(nil)
    end)
    assert.is_false(ok)
    assert.matches("json_spec%.lua:%d+: json%.decode", e.message)
  end)
end)

describe("json.encode", function()
  it("writes numbers so that reading them gives the same", function()
    for _, number in ipairs({
      0,
      -1,
      1700000000123456,
      9007199254740993,
      math.maxinteger,
      math.mininteger,
      0.1,
      0.1 + 0.2,
      1 / 3,
      1e300,
      5e-324,
      2 ^ 53,
      2 ^ 70,
      -1.5,
    }) do
      local text = json.encode({ number })
      local back = json.decode(text)[1]
      assert.equal(number, back, text)
      if math.type(number) == "integer" then
        integer(number, back)
      end
    end
    assert.equal("[3]", json.encode({ 3.0 }))
  end)

  it("writes objects with sorted keys, also one whose only key is n", function()
    assert.equal(
      '{"a":1,"b":{"c":[1,2,{"d":true}]},"z":"x"}',
      json.encode({
        z = "x",
        b = { c = { 1, 2, { d = true } } },
        a = 1,
      })
    )
    assert.equal('{"n":3}', json.encode({ n = 3 }))
    assert.equal('{"n":3.5}', json.encode({ n = 3.5 }))
    assert.equal("{}", json.encode({}))
    assert.equal("[]", json.encode(json.array()))
    assert.equal("{}", json.encode(json.object()))
    assert.equal("null", json.encode(nil))
    assert.equal("null", json.encode(json.null))
    assert.equal('"x"', json.encode("x"))
  end)

  it("escapes what must be, and replaces bytes that are no UTF-8", function()
    assert.equal('"\\"\\\\\\n\\u0000é"', json.encode('"\\\n\0é'))
    assert.equal("a\u{FFFD}b\u{FFFD}", json.decode(json.encode("a\xffb\xc3")))
    assert.equal("\u{FFFD}\u{FFFD}\u{FFFD}", json.utf8("\xed\xa0\x80"))
    assert.equal("ok", json.utf8("ok"))
    assert.same({ ["k\u{FFFD}"] = 1 }, json.decode(json.encode({ ["k\xff"] = 1 })))
  end)

  it("indents", function()
    assert.equal('{\n  "a":1,\n  "b":2\n}', json.encode({ b = 2, a = 1 }, { indent = true }))
  end)

  it("does not touch what it is given", function()
    local value = { 1, { a = 0.1, n = 2 }, {} }
    json.encode(value)
    assert.same({ 1, { a = 0.1, n = 2 }, {} }, value)
    assert.is_nil(getmetatable(value))
    assert.is_nil(getmetatable(value[3]))
  end)

  local function refused(value, pattern)
    local ok, e = pcall(function()
      json.encode(value)
    end)
    assert.is_false(ok)
    assert.is_true(errors.is(e, "misuse"))
    assert.matches("json_spec%.lua:%d+: json%.encode: ", e.message)
    assert.matches(pattern, e.message)
  end

  it("refuses what has no form in JSON, and says where it is", function()
    refused({ a = { b = { 1, print } } }, "%.a%.b%[2%]: a function has no form")
    refused({ a = 0 / 0 }, "%.a: .*nan has no form")
    refused({ math.huge }, "%[1%]: inf has no form")
    refused({ 1, 2, x = 3 }, "the value: an array with the key x besides 1 to 2")
    refused({ a = { [1] = 1, [1000] = 2 } }, "%.a: an array with the key 1000")
    refused({ [1.5] = 1 }, "key 1.5 is a number")
    refused({ [true] = 1 }, "key true is a boolean")
    local circle = { a = {} }
    circle.a.b = circle
    refused(circle, "%.a%.b: the table contains itself")
    local deep = {}
    for _ = 1, json.MAX_DEPTH + 1 do
      deep = { deep }
    end
    refused(deep, "nested deeper than 256")
  end)

  it("allows a table twice that does not contain itself", function()
    local shared = { 1 }
    assert.equal("[[1],[1]]", json.encode({ shared, shared }))
  end)

  it("refuses unknown options", function()
    assert.is_false(pcall(json.encode, {}, { pretty = true }))
  end)
end)

describe("a value", function()
  it("comes back as it was, at random", function()
    math.randomseed(7)
    local function random(depth)
      local kind = math.random(depth > 0 and 7 or 5)
      if kind == 1 then
        return math.random(0)
      elseif kind == 2 then
        return (math.random() - 0.5) * 10 ^ math.random(-300, 300)
      elseif kind == 3 then
        return math.random() < 0.5
      elseif kind == 4 then
        return json.null
      elseif kind == 5 then
        local bytes = {}
        for index = 1, math.random(0, 12) do
          bytes[index] = utf8.char(math.random(0, 0xD7FF))
        end
        return table.concat(bytes)
      elseif kind == 6 then
        local list = json.array()
        for index = 1, math.random(0, 4) do
          list[index] = random(depth - 1)
        end
        return list
      end
      local object = json.object()
      for _ = 1, math.random(0, 4) do
        object["k" .. math.random(100)] = random(depth - 1)
      end
      return object
    end
    for _ = 1, 300 do
      local value = random(4)
      local text = json.encode(value)
      assert.same(value, json.decode(text))
      assert.equal(text, json.encode(json.decode(text)))
    end
  end)
end)
