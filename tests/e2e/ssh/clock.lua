-- A clock that jumps, by ten years and in both directions: this runs under libfaketime, which takes the time from a
-- file at every look. Only the wall clock can be moved; deadlines must not notice.
local cases = dofile("tests/e2e/ssh/cases.lua")
local fs = require("ciranda.io.fs")
local ssh = require("ciranda.ssh")
local support = dofile("tests/spec/ssh/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

local TEN_YEARS = 3650 * 86400
local file = assert(os.getenv("FAKETIME_TIMESTAMP_FILE"))

local function set_clock(offset)
  fs.write(file, offset .. "\n", { sync = false })
end

local server = support.server()
cases.explain = function()
  return server:log()
end
local silent = support.tcp(function() end)
local slow_shell = "sleep 1; echo done"

--- Call `fn`; after a moment the clock jumps.
local function with_jump(offset, fn)
  set_clock("+0")
  local before = os.time()
  task.all({
    fn,
    function()
      task.sleep(0.3)
      set_clock(offset)
      -- The clock does jump: else this part shows nothing.
      assert(math.abs(os.time() - before) > TEN_YEARS / 2, "the clock has not jumped")
    end,
  })
  set_clock("+0")
end

--- A call that must be given up after its 1.2 s, neither earlier nor much later.
local function timed(address, phase, ...)
  local began = cases.now()
  cases.fails(address, { "timeout" }, phase, 20, ...)
  assert(cases.now() - began > 1.1, "the deadline came too early")
end

local function waits()
  local connection <close> = ssh.connect(server:options({ keepalive = { interval = 0.3, count = 30 } }))
  task.all({
    function()
      timed(
        silent.address,
        "banner",
        ssh.connect,
        server:options({ host = silent.address, port = silent.port, timeouts = { banner = 1.2 } })
      )
    end,
    function()
      timed(server.address, "exec", connection.exec, connection, "sleep 30", { timeout = 1.2 })
    end,
    function()
      local result = connection:exec(slow_shell, { timeout = 25 })
      assert(result.code == 0 and result.stdout == "done\n")
    end,
    function()
      task.sleep(0.6) -- after the jump
      local later <close> = ssh.connect(server:options())
      assert(later:exec("echo later").stdout == "later\n")
    end,
  })
  assert(connection:exec("echo still").stdout == "still\n")
end

cases.case("control: the clock stays", waits)
cases.case("the clock jumps ahead during a connect and commands", function()
  with_jump("+3650d", waits)
end)
cases.case("the clock jumps back during a connect and commands", function()
  with_jump("-3650d", waits)
end)

-- The server is stopped for as long, so that the jump does come between a request and its answer.
for name, offsets in pairs({ ahead = { "+0", "+7300d" }, ["back and on again"] = { "-3650d", "+3650d" } }) do
  cases.case(("the clock jumps %s while an answer is under way"):format(name), function()
    set_clock(offsets[1])
    local connection <close> = ssh.connect(server:options({ keepalive = { interval = 0.1, count = 300 } }))
    assert(connection:exec("echo first").stdout == "first\n")
    local stopped = {}
    for _, pid in ipairs(server:sessions()) do
      -- One of an earlier connection may have ended since.
      stopped[#stopped + 1] = uv.kill(pid, "sigstop") and pid or nil
    end
    assert(#stopped > 0, "no process of the server to stop")
    task.all({
      function()
        local result = connection:exec("echo second", { timeout = 25 })
        assert(result.stdout == "second\n")
      end,
      function()
        task.sleep(0.3)
        set_clock(offsets[2])
        task.sleep(0.6) -- in which libssh2 is called for the sign of life, and looks at the clock
        for _, pid in ipairs(stopped) do
          uv.kill(pid, "sigcont")
        end
      end,
    })
    set_clock("+0")
  end)
end

server:stop()
silent:stop()
support.clean()
cases.finish("clock")
