-- Progress on a terminal of 60 columns (tmux), and away from one.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local HAVE_TMUX = process.run({ "sh", "-c", "command -v tmux" }).code == 0

describe("progress", function()
  local directory

  before_each(function()
    directory = fs.tempdir()
  end)

  after_each(function()
    fs.remove_tree(directory)
  end)

  it("keeps a status on one line of a narrow terminal, and takes it away for what a worker prints", function()
    if not HAVE_TMUX then
      pending("progress in a terminal: needs tmux (apt-get install tmux)")
    end
    local recipe = directory .. "/narrow.lua"
    fs.write(
      recipe,
      [[
      return {
        summary = "statuses",
        run = function(context)
          local output = require("ciranda.run.output").new(1, function()
            context.progress:clear()
          end)
          for i = 1, 3 do
            context.progress:status(("status %d: é "):format(i) .. ("slice0/worker[0-3],"):rep(9) .. "END")
          end
          output:write("completed step: 1\n")
          output:flush()
          context.progress:status(("last status "):rep(20))
          require("ciranda.task").sleep(3600)
        end,
      }
    ]]
    )
    local socket = directory .. "/tmux"
    local function tmux(...)
      return process.run { "tmux", "-S", socket, "-f", "/dev/null", timeout = 60, ... }
    end
    local _ <close> = setmetatable({}, {
      __close = function()
        tmux("kill-server")
      end,
    })
    local command = ("env HOME=%s TERM=screen %s run %s"):format(directory, BINARY, recipe)
    assert.equal(0, tmux("new-session", "-d", "-s", "narrow", "-x", "60", "-y", "20", command).code)
    local screen
    task.timeout(60, function()
      repeat
        task.sleep(0.05)
        screen = tmux("capture-pane", "-p", "-t", "narrow").stdout
      until screen:find("last status [^\n]+%.%.%.")
    end)
    assert.matches("^completed step: 1\nlast status [^\n]+%.%.%.\n+$", screen)
  end)

  it("repeats a status elsewhere only when more than its time has changed", function()
    local recipe = directory .. "/plain.lua"
    fs.write(
      recipe,
      [[
      return {
        summary = "statuses",
        run = function(context)
          for second = 1, 5 do
            local state = second < 4 and "told: all" or "ended: all"
            context.progress:status(("Saving, %d s: %s"):format(second, state), state)
          end
        end,
      }
    ]]
    )
    local result = process.run { BINARY, "run", recipe, env = { HOME = directory }, timeout = 100 }
    assert.equal("Saving, 1 s: told: all\nSaving, 4 s: ended: all\n", result.stderr)
  end)
end)
