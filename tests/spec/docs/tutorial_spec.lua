-- The tutorial and the README do what they say: their commands run in one shell, their output is compared.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
-- Seconds for a page: nearly all that a test may take (ciranda.cli.testing).
local LIMIT = (tonumber(os.getenv("CIRANDA_TEST_TIMEOUT")) or 120) - 10

--- The blocks of a page, in order: {kind, text}.
local function blocks(text)
  local list = {}
  for kind, body in text:gmatch("\n```(%l+)\n(.-)\n```") do
    table.insert(list, { kind = kind, text = body })
  end
  return list
end

--- Whether `expected` occurs in `found` from `from` on, "..." standing for anything within a line; where it ends.
local function find_line(expected, found, from)
  for index = from, #found do
    local rest, position = found[index], 1
    local fits = true
    for part in (expected .. "..."):gmatch("(.-)%.%.%.") do
      local first, last = rest:find(part, position, true)
      if not first or (position == 1 and part ~= "" and first ~= 1) then
        fits = false
        break
      end
      position = last + 1
    end
    if fits then
      return index + 1
    end
  end
end

--- What a page shows of a shell: `$ COMMAND`, continued after a backslash or by `> INPUT`, and the lines that follow.
local function session()
  local self = { script = { "exec 2>&1" }, expectations = {} }
  local command
  function self.take(line)
    local begins, more = line:match("^%$ (.*)$"), line:match("^> (.*)$")
    if more then
      -- A line of a here-document: it stands before the mark of its command.
      table.insert(self.script, #self.script, more)
    elseif begins or command then
      command = (command and command .. "\n" or "") .. (begins or line)
      if command:sub(-1) ~= "\\" then
        table.insert(self.expectations, { command = command, lines = {} })
        table.insert(self.script, command)
        local mark = "status_=$?; printf '\\n=== %d\\n'; (exit $status_)"
        table.insert(self.script, mark:format(#self.expectations))
        command = nil
      end
    elseif line ~= "" then
      table.insert(self.expectations[#self.expectations].lines, line)
    end
  end
  return self
end

--- Runs it in `directory`, which is the home too, and compares.
local function run(directory, shown)
  fs.write(directory .. "/session.sh", table.concat(shown.script, "\n") .. "\n")
  local result = process.run({
    "bash",
    "-m",
    directory .. "/session.sh",
    cwd = directory,
    timeout = LIMIT,
    env = {
      HOME = directory,
      TMPDIR = directory,
      PATH = directory .. "/bin:" .. os.getenv("PATH"),
      USER = uv.os_get_passwd().username,
      XDG_STATE_HOME = false,
      XDG_CONFIG_HOME = false,
      XDG_CACHE_HOME = false,
      SSH_AUTH_SOCK = false,
      NO_COLOR = "1",
    },
  })
  local outputs, index, lines = {}, 0, {}
  for line in (result.stdout .. "\n"):gmatch("(.-)\n") do
    local number = tonumber(line:match("^=== (%d+)$"))
    if number then
      outputs[number], lines = lines, {}
      index = number
    else
      table.insert(lines, line)
    end
  end
  assert.equal(#shown.expectations, index, "the session ended early:\n" .. result.stdout)
  for number, expectation in ipairs(shown.expectations) do
    local from = 1
    for _, line in ipairs(expectation.lines) do
      -- Times differ.
      line = line:gsub("%d%d:%d%d:%d%d", "..."):gsub(", %d+%.%d s after", ", ... s after")
      from = find_line(line, outputs[number], from)
      assert.is_truthy(
        from,
        ("$ %s\nshould print: %s\nbut printed:\n%s"):format(
          expectation.command,
          line,
          table.concat(outputs[number], "\n")
        )
      )
    end
  end
end

describe("what a page shows happens:", function()
  local directory

  before_each(function()
    directory = fs.tempdir()
    fs.mkdir(directory .. "/bin")
    fs.mkdir(directory .. "/build")
    fs.symlink(BINARY, directory .. "/bin/ciranda")
    fs.symlink(BINARY, directory .. "/build/ciranda")
  end)

  after_each(function()
    fs.remove_tree(directory)
  end)

  it("the tutorial", function()
    local shown = session()
    for _, block in ipairs(blocks(fs.read("docs/tutorial.md"))) do
      if block.kind == "lua" then
        local name, body = block.text:match("^%-%- file: (%S+)\n(.*)$")
        fs.write(directory .. "/" .. assert(name, "a Lua block that names no file"), body .. "\n")
      elseif block.kind == "console" then
        for line in (block.text .. "\n"):gmatch("(.-)\n") do
          shown.take(line)
        end
      end
    end
    assert.is_true(#shown.expectations > 8)
    run(directory, shown)
  end)

  it("the README", function()
    local page, shown = fs.read("README.md"), session()
    local part = assert(page:match("\n## Try it\n(.-)\n## "))
    for line in part:gmatch("\n    ([^\n]+)") do
      shown.take(line)
    end
    for body in part:gmatch("\n```lua\n(.-)\n```") do
      fs.write(directory .. "/by-hand.lua", body .. "\nprint(qr:state())\n")
      shown.take("$ ciranda by-hand.lua")
      shown.take("ACTIVE")
    end
    shown.take("$ kill %1; wait")
    assert.is_true(#shown.expectations > 6)
    run(directory, shown)
  end)
end)
