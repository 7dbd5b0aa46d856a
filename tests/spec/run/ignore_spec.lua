local ignore = require("ciranda.run.ignore")

local function verdict(rules, path, is_directory)
  return ignore.verdict(ignore.parse(rules), path, is_directory or false)
end

describe("run.ignore", function()
  -- { rules, path, directory?, verdict }
  local cases = {
    { "*.o", "a.o", false, true },
    { "*.o", "deep/in/a.o", false, true },
    { "*.o", "a.ok", false, nil },
    { "/a.o", "a.o", false, true },
    { "/a.o", "b/a.o", false, nil },
    { "build/", "build", true, true },
    { "build/", "build", false, nil },
    { "build/", "x/build", true, true },
    { "doc/*.txt", "doc/a.txt", false, true },
    { "doc/*.txt", "doc/sub/a.txt", false, nil },
    { "doc/*.txt", "x/doc/a.txt", false, nil },
    { "**/foo", "foo", false, true },
    { "**/foo", "a/b/foo", false, true },
    { "**/foo/bar", "x/foo/bar", false, true },
    { "a/**", "a/b", false, true },
    { "a/**", "a", true, nil },
    { "a/**/b", "a/b", false, true },
    { "a/**/b", "a/x/y/b", false, true },
    { "a/**/b", "a/x/y/c", false, nil },
    { "*.log\n!keep.log", "keep.log", false, false },
    { "!keep.log\n*.log", "keep.log", false, true },
    { "# comment", "# comment", false, nil },
    { "\\#file", "#file", false, true },
    { "\\!file", "!file", false, true },
    { "name   ", "name", false, true },
    { "name\\ ", "name ", false, true },
    { "name\r", "name", false, true },
    { "[abc].x", "b.x", false, true },
    { "[!abc].x", "b.x", false, nil },
    { "[^abc].x", "d.x", false, true },
    { "[a-f]0", "c0", false, true },
    { "[[:digit:]]x", "7x", false, true },
    { "[]]x", "]x", false, true },
    { "[a", "[a", false, nil },
    { "a?c", "abc", false, true },
    { "a?c", "a/c", false, nil },
    { "a.b+c(d)%", "a.b+c(d)%", false, true },
    { "foo*bar", "foo/bar", false, nil },
    { "caf\u{e9}*", "caf\u{e9}s", false, true },
    { "", "x", false, nil },
  }
  for _, case in ipairs(cases) do
    it(("says %s of %q under %q"):format(tostring(case[4]), case[2], case[1]), function()
      assert.equal(case[4], verdict(case[1], case[2], case[3]))
    end)
  end

  it("agrees with git on drawn rules and paths", function()
    local probe = io.popen("git --version 2>/dev/null")
    local version = probe:read("a")
    probe:close()
    if version == "" then
      pending("git is not installed")
      return
    end
    local directory = os.tmpname()
    os.remove(directory)
    os.execute(("mkdir -p '%s' && git init -q '%s'"):format(directory, directory))
    local seed = 42
    local function random(limit)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return seed // 65536 % limit + 1
    end
    local atoms = { "a", "b", "*", "?", "**", "[ab]", "[!a]", "ab", "a*", "*b" }
    local rules = {}
    for _ = 1, 60 do
      local pieces = {}
      for piece = 1, random(3) do
        pieces[piece] = atoms[random(#atoms)]
      end
      local rule = table.concat(pieces, "/")
      rule = (random(4) == 1 and "!" or "") .. (random(4) == 1 and "/" or "") .. rule
      rules[#rules + 1] = rule
    end
    local paths = {}
    for _, one in ipairs({ "a", "b", "ab", "ba" }) do
      paths[#paths + 1] = one
      for _, two in ipairs({ "a", "b", "aab" }) do
        paths[#paths + 1] = one .. "/" .. two
        for _, three in ipairs({ "a", "bb" }) do
          paths[#paths + 1] = one .. "/" .. two .. "/" .. three
        end
      end
    end
    local wrong = {}
    for _, rule in ipairs(rules) do
      local file = assert(io.open(directory .. "/.gitignore", "w"))
      file:write(rule, "\n")
      file:close()
      local list = assert(io.open(directory .. "/.git/paths", "w"))
      list:write(table.concat(paths, "\n"), "\n")
      list:close()
      local git = io.popen(("cd '%s' && git check-ignore --stdin --no-index < .git/paths"):format(directory))
      local ignored = {}
      for path in git:lines() do
        ignored[path] = true
      end
      git:close()
      local parsed = ignore.parse(rule)
      for _, path in ipairs(paths) do
        -- A path is left out when it or any directory above it is.
        local ours, parent = false, ""
        for part in path:gmatch("[^/]+") do
          local whole = parent .. part
          ours = ours or ignore.verdict(parsed, whole, whole ~= path) == true
          parent = whole .. "/"
        end
        if ours ~= (ignored[path] or false) then
          wrong[#wrong + 1] = ("%s under %s: git %s"):format(path, rule, tostring(ignored[path] or false))
        end
      end
    end
    os.execute(("rm -rf '%s'"):format(directory))
    assert.same({}, wrong)
  end)
end)
