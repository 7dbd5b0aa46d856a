--- Words for a shell come back from it as they were.
local process = require("ciranda.io.process")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

--- Each byte but NUL, alone and before a quote, and what means something to a shell.
local function texts()
  local all =
    { "", "'\\''", "$(echo x)", "`echo x`", "a b", "~root", "-n", "--x=y", "a=b", "=ls", "%1", "!!" }
  for byte = 1, 255 do
    all[#all + 1] = string.char(byte)
    all[#all + 1] = "a" .. string.char(byte) .. "'"
  end
  return all
end

local function quoted(list)
  local words = {}
  for place, text in ipairs(list) do
    words[place] = shell.quote(text)
  end
  return table.concat(words, " ")
end

describe("ciranda.io.shell", function()
  for _, program in ipairs({ "dash", "bash" }) do
    for how, line in pairs({ words = shell.words, quote = quoted }) do
      it(("gives %s what it was given, with %s"):format(program, how), function()
        task.run(function()
          local result = process.run({ program, "-c", "printf '%s\\0' " .. line(texts()) }):check()
          assert.equal(table.concat(texts(), "\0") .. "\0", result.stdout)
        end)
      end)
    end
  end

  it("leaves bare what people type bare, and nothing that a shell reads something into", function()
    local typed = "python3 -m maxtext base.yml run_name=a --dcn=2,1 /a/b:c@d"
    local words = {}
    for word in typed:gmatch("%S+") do
      words[#words + 1] = word
    end
    assert.equal(typed, shell.words(words))
    assert.equal("'' '=ls' '%1' '~' 'a b'", shell.words({ "", "=ls", "%1", "~", "a b" }))
  end)

  it("gives a script to sh through a login shell", function()
    task.run(function()
      local script = [[for x in "it's" '$HOME'; do echo "$x"; done]]
      assert.equal("it's\n$HOME\n", process.run({ "bash", "-c", shell.sh(script) }):check().stdout)
    end)
  end)
end)
