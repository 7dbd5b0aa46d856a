local fan = require("ciranda.run.fan")
local fleet = require("ciranda.fleet")
local task = require("ciranda.task")
local uv = require("luv")

local gangs = dofile("tests/fixtures/fleet/gangs.lua")

describe("run.fan", function()
  local place

  before_each(function()
    place = gangs.place(1, 1)
  end)

  after_each(function()
    place:close()
  end)

  --- Runs a marked command and stops it when it has made a file `up`; gives what `fan.run` gave, and what was said.
  local function stopped(command, connect)
    local mark = fan.mark()
    local workers <close> = fleet.new(place.slices, { connect = connect or place.connect })
    local interrupt, said = nil, {}
    local context = {
      on_interrupt = function(fn)
        interrupt = fn
        return function() end
      end,
      progress = {
        say = function(_, ...)
          said[#said + 1] = string.format(...)
        end,
      },
    }
    local scope <close> = task.scope()
    scope:spawn(function()
      place.wait(function()
        return uv.fs_stat(place:path("0.0", "up"))
      end)
      interrupt("SIGTERM")
    end)
    local done = fan.run({
      fleet = workers,
      context = context,
      mark = mark,
      work = function(part, on_result)
        return part:run(command, { env = { [fan.MARK] = mark }, on_result = on_result })
      end,
    })
    return done, said
  end

  it("ends a command with TERM", function()
    local done, said = stopped(": > up; exec sleep 600")
    assert.equal("SIGTERM", done.stopped)
    assert.same({ "Stopping slice0/worker0" }, said)
    assert.equal("TERM", done.results[1].signal)
  end)

  it("tells a command once, and kills it after the grace", function()
    local done = stopped("trap 'echo told' TERM; : > up; while :; do sleep 0.1; done")
    assert.equal("KILL", done.results[1].signal)
    assert.equal("told\n", done.results[1].stdout)
  end)

  it("kills also what it did not see when it first killed", function()
    -- The look at which the grace is over comes back as in the middle of an exec, the next one as it is.
    place:shadow(
      "0.0",
      "grep",
      'echo >> ~/looks; [ "$(wc -l < ~/looks)" != 26 ] || exit 1\nexec {real} "$@"\n'
    )
    local done = stopped("trap '' TERM; : > up; exec sleep 600")
    assert.equal("KILL", done.results[1].signal)
  end)

  it("kills after the grace also where each look takes long", function()
    place:shadow("0.0", "grep", 'sleep 1.2\nexec {real} "$@"\n')
    local done = stopped("trap '' TERM; : > up; exec sleep 600")
    assert.equal("KILL", done.results[1].signal)
  end)

  it("waits for the end of what it has stopped, which a machine with much to do passes on late", function()
    local command = ": > up; exec sleep 600"
    local function connect(settings)
      local connection = place.connect(settings)
      local exec = connection.exec
      function connection:exec(text, options)
        local answer = exec(self, text, options)
        if text:find(command, 1, true) then
          task.sleep(1.5)
        end
        return answer
      end
      return connection
    end
    local done = stopped(command, connect)
    assert.same({}, done.running)
    assert.equal("TERM", done.results[1].signal)
  end)

  it("finds a command that was in the middle of an exec when it was first looked for", function()
    -- The first look through the environments comes back as it does in that moment: without it.
    place:shadow("0.0", "grep", '[ -e ~/looked ] || { : > ~/looked; exit 1; }\nexec {real} "$@"\n')
    local done = stopped(": > up; exec sleep 600")
    assert.is_truthy(uv.fs_stat(place:path("0.0", "looked")))
    assert.equal("TERM", done.results[1].signal)
  end)
end)
