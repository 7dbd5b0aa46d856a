-- The tutorial does what it says: its files are written, its commands run in one shell, its output is compared.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

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

describe("the tutorial", function()
  it("does what it says", function()
    local directory = fs.tempdir()
    local finally <close> = setmetatable({}, {
      __close = function()
        fs.remove_tree(directory)
      end,
    })
    assert(finally)
    fs.mkdir(directory .. "/bin")
    fs.symlink(BINARY, directory .. "/bin/ciranda")

    local script, expectations, mark = { "exec 2>&1" }, {}, 0
    for _, block in ipairs(blocks(fs.read("docs/tutorial.md"))) do
      if block.kind == "lua" then
        local name, body = block.text:match("^%-%- file: (%S+)\n(.*)$")
        fs.write(directory .. "/" .. assert(name, "a Lua block that names no file"), body .. "\n")
      elseif block.kind == "console" then
        for line in (block.text .. "\n"):gmatch("(.-)\n") do
          local command, more = line:match("^%$ (.*)$"), line:match("^> (.*)$")
          if more then
            -- A line of a here-document: it stands before the mark of its command.
            table.insert(script, #script, more)
          elseif command then
            mark = mark + 1
            expectations[mark] = { command = command, lines = {} }
            table.insert(script, command)
            table.insert(script, ("printf '\\n=== %d\\n'"):format(mark))
          elseif line ~= "" then
            table.insert(expectations[mark].lines, line)
          end
        end
      end
    end
    assert.is_true(mark > 8)
    fs.write(directory .. "/session.sh", table.concat(script, "\n") .. "\n")

    local result = process.run({
      "bash",
      "-m",
      directory .. "/session.sh",
      cwd = directory,
      timeout = 110,
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
    local outputs, index, lines = {}, 1, {}
    for line in (result.stdout .. "\n"):gmatch("(.-)\n") do
      local number = tonumber(line:match("^=== (%d+)$"))
      if number then
        outputs[number], lines = lines, {}
        index = number
      else
        table.insert(lines, line)
      end
    end
    assert.equal(mark, index, "the session ended early:\n" .. result.stdout)
    for number, expectation in ipairs(expectations) do
      local from = 1
      for _, line in ipairs(expectation.lines) do
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
  end)
end)
