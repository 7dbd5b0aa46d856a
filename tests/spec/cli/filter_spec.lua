-- --filter: gcloud's grammar, over a table of cases.
local fields = require("ciranda.cli.field")
local filter = require("ciranda.cli.filter")
local regex = require("ciranda.cli.regex")

local ITEMS = {
  {
    name = "projects/p/locations/us-east1-d/queuedResources/train-1",
    zone = "us-east1-d",
    createTime = "2026-11-28T10:00:00.5Z",
    size = 8,
    state = { state = "ACTIVE", activeData = {} },
    labels = { env = "prod", team = "vision" },
    tags = { "a", "tpu-b" },
    spot = {},
    note = "abc.pdq.xyz",
  },
  {
    name = "projects/p/locations/us-west4-a/queuedResources/train-22",
    zone = "us-west4-a",
    createTime = "2026-11-29T10:00:00Z",
    size = 100,
    state = { state = "FAILED" },
    labels = { env = "dev", ["my-key"] = "A B" },
    note = 'say "hi"',
  },
  {
    name = "projects/p/locations/europe-west4-b/queuedResources/eval",
    zone = "europe-west4-b",
    createTime = "2026-11-30T10:00:00Z",
    state = { state = "SUSPENDED" },
    note = "",
  },
}

local function chosen(text)
  local matches, found = filter.compile(text), {}
  for place, item in ipairs(ITEMS) do
    found[#found + 1] = matches(item) and place or nil
  end
  return table.concat(found, " ")
end

describe("a filter", function()
  it("chooses", function()
    for _, case in ipairs({
      { "", "1 2 3" },
      { "state=ACTIVE", "1" },
      { "state.state=active", "1" },
      { "state:(ACTIVE FAILED)", "1 2" },
      { "state=(ACTIVE,SUSPENDED)", "1 3" },
      { "state:(ACTIVE OR FAILED)", "1 2" },
      { "state!=ACTIVE", "2 3" },
      { "state = ACTIVE", "1" },
      -- joining
      { "zone:us AND size>10", "2" },
      { "zone:us size>10", "2" },
      { "state=ACTIVE OR state=FAILED", "1 2" },
      { "NOT state=ACTIVE", "2 3" },
      { "NOT (state=ACTIVE OR state=FAILED)", "3" },
      { "zone:us AND (state=FAILED OR labels.env=prod)", "1 2" },
      { "zone:us state=FAILED OR state=SUSPENDED", "2" },
      { "(((eval)))", "3" },
      { "zone:us AND NOT labels.env=prod", "2" },
      { "-state:ACTIVE", "2 3" },
      { "-labels.env:*", "3" },
      { "labels.env:*", "1 2" },
      { "spot:*", "1" },
      { "note:*", "1 2" },
      { "note=''", "3" },
      { "labels.env=''", "3" },
      -- parts, and patterns with one *
      { "note:PDQ", "1" },
      { "note:abc*", "1" },
      { "note:pdq*", "" },
      { "note:*xyz", "1" },
      { "note:a*z", "1" },
      { "note:abc.pdq.xyz*", "1" },
      { "name:train*", "1 2" },
      { "name=eval", "3" },
      { "name!=eval", "1 2" },
      { "name=projects/p/locations/europe-west4-b/queuedResources/eval", "3" },
      { "name.basename()=eval", "3" },
      -- maps and lists
      { "labels:team", "1" },
      { "labels:vision", "1" },
      { "tags:tpu-b", "1" },
      { "tags[1]=tpu-b", "1" },
      { "labels.'my-key'='A B'", "2" },
      { "labels.my-key:a", "2" },
      -- quotes
      { [[note="say \"hi\""]], "2" },
      { [[note='say "hi"']], "2" },
      { "labels.'my-key'=A' 'B", "2" },
      -- order
      { "size<100", "1" },
      { "size>=8", "1 2" },
      { "size=8.0", "1" },
      { "zone<us", "3" },
      { "createTime>2026-11-29", "2 3" },
      { "createTime<=2026-11-29T10:00:00Z", "1 2" },
      { "createTime<2026-11-28T10:00", "" },
      { "createTime>P36500D", "" },
      { "createTime>-P36500D", "1 2 3" },
      { "nothing<1", "" },
      -- regular expressions
      { "zone~^us", "1 2" },
      { "zone ~ ^us AND -state:FAILED", "1" },
      { "zone!~^us", "3" },
      { "name~'train-(1|22)$'", "1 2" },
      { "name~^train-[0-9]{2,3}$", "2" },
      { "state.state~'ACTIVE|SUSPENDED'", "1 3" },
      { "nothing~.", "" },
      { "nothing!~.", "1 2 3" },
      -- words
      { "ACTIVE", "1" },
      { "train", "1 2" },
      { "-train", "3" },
      { "train OR eval", "1 2 3" },
    }) do
      assert.equal(case[2], chosen(case[1]), case[1])
    end
  end)

  it("is refused with a mark under the place", function()
    for text, expected in pairs({
      ["state="] = { 7, "value is missing" },
      ["state= AND x"] = { 8, "not the word" },
      ["a==b"] = { 2, "no operator '=='" },
      ["a AND b OR c"] = { 9, "parentheses" },
      ["a OR b c AND d"] = { 10, "parentheses" },
      ["a AND"] = { 6, "term was expected" },
      ["OR a"] = { 1, "term was expected" },
      ["NOT"] = { 4, "term was expected" },
      ["(a=b"] = { 1, "has no )" },
      ["a=b)"] = { 4, "no ( before" },
      ["()"] = { 2, "term was expected" },
      ["a:(b"] = { 3, "has no )" },
      ["a:()"] = { 3, "empty" },
      ["a:(b (c))"] = { 6, "no lists in it" },
      ["a<(b)"] = { 3, "goes with : and =" },
      ["a='b"] = { 3, "no end" },
      ["name.date()=b"] = { 1, "basename()" },
      ["name.basename()"] = { 16, "operator was expected" },
      ["a:*b*"] = { 3, "at most one *" },
      ["a~'x(y'"] = { 5, "'(' has no ')'" },
      ["é=ü AND ="] = { 9, "field, a word" },
      [":x"] = { 1, "field, a word" },
    }) do
      local ok, problem = pcall(filter.compile, text)
      assert.is_false(ok, text)
      assert.equal("usage", problem.code)
      assert.matches(expected[2], problem.message, 1, true)
      local mark = problem.message:match("\n( *)%^$")
      assert.equal(expected[1], #mark - 2 + 1, text .. "\n" .. problem.message)
    end
  end)

  it("reads fields by quoted keys and by places", function()
    local item = { a = { { b = 1 }, { ["x.y"] = { "p/q" } } } }
    assert.equal(1, fields.reader("a[0].b")(item))
    assert.equal("p/q", fields.reader("a[1].'x.y'[0]")(item))
    assert.equal("q", fields.reader('a[1]."x.y"[0].basename()')(item))
    for _, path in ipairs({ "a[2].b", "a.b", "a[0].b.c", "b" }) do
      assert.is_nil(fields.reader(path)(item), path)
    end
  end)
end)

describe("a regular expression", function()
  it("matches as usual", function()
    for _, case in ipairs({
      { "", "x", true },
      { "b", "abc", true },
      { "B", "abc", false },
      { "(?i)B", "abc", true },
      { "(?i)[A-B]c", "bc", true },
      { "^b", "abc", false },
      { "c$", "abc", true },
      { "^$", "", true },
      { "a.c", "abc", true },
      { "a.c", "a\nc", false },
      { "^ab*c$", "ac", true },
      { "^ab+c$", "ac", false },
      { "^ab?c$", "abbc", false },
      { "^a{2}$", "aa", true },
      { "^a{2,}$", "a", false },
      { "^a{1,2}$", "aaa", false },
      { "^a{x}$", "a{x}", true },
      { "^.*?c.*$", "abc", true },
      { "^(ab|cd)+$", "abcd", true },
      { "^(ab|cd)+$", "abc", false },
      { "^(a|ab)(c|bcd)$", "abcd", true },
      { "^(?:a|b){3}$", "aba", true },
      { "^(a*)*$", "aaa", true },
      { "^(a*)+b$", "aac", false },
      { "a|", "x", true },
      { "[^a-c]", "abc", false },
      { "[]x]", "]", true },
      { "[a-]", "-", true },
      { "[\\d_]", "5", true },
      { "\\d+\\.\\w", "12.a", true },
      { "\\bjob\\b", "my-job-1", true },
      { "\\bjob\\b", "jobs", false },
      { "\\S\\s\\D\\W", "a b.", true },
      { "\\(", "(", true },
    }) do
      assert.equal(case[3], regex.compile(case[1])(case[2]), case[1] .. " " .. case[2])
    end
  end)

  it("is refused when it is none", function()
    for _, pattern in ipairs({
      "(",
      ")",
      "[a",
      "*",
      "a**",
      "a|+",
      "\\",
      "\\q",
      "[z-a]",
      "(?=a)",
      "a{3,2}",
      "a{2000}",
    }) do
      local ok, problem = pcall(regex.compile, pattern)
      assert.is_false(ok, pattern)
      assert.equal("string", type(problem.regex), pattern)
    end
  end)

  it("takes long texts, and gives up what would take for ever", function()
    assert.is_true(regex.compile("^.*z$")(("a"):rep(100000) .. "z"))
    local ok, problem = pcall(regex.compile("^(a|aa)+$"), ("a"):rep(200) .. "b")
    assert.is_false(ok)
    assert.matches("too long", problem.regex, 1, true)
    ok, problem = pcall(filter.compile("note~'^(a|aa)+$'"), { note = ("a"):rep(200) .. "b" })
    assert.is_false(ok)
    assert.matches("takes too long", problem.message, 1, true)
  end)
end)
