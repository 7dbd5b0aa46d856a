-- The end of the program: what is still under way, and finalisers that run when there is little left to use.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

--- Runs a chunk to its end.
local function run(chunk, ...)
  return process.run { BINARY, "-e", chunk, ..., timeout = 40 }
end

-- A server with a request that waits and an answer that is not read, connections that nobody serves, an SSH session
-- without a server: each says its name and the code of its error when it is told.
local EVERYTHING = [[
  local http, server = require("ciranda.core.http"), require("ciranda.core.server")
  local ssh, task, uv = require("ciranda.core.ssh"), require("ciranda.task"), require("luv")
  local function told(name)
    return function(err)
      print(name .. " " .. (err and err.code or "fine"))
    end
  end

  local exchanges, head = {}, false
  local own = server.start({}, function(exchange, request)
    table.insert(exchanges, exchange)
    if request.target == "/stream" then
      exchange:start(200, {})
      exchange:write(("x"):rep(24 << 20), told("exchange:write"))
    end
  end)
  local url = "http://127.0.0.1:" .. own:listen("127.0.0.1", 0)
  http.request({ url = url .. "/wait" }, told("http.request waiting"))
  http.request({
    url = url .. "/stream",
    on_response = function() head = true end,
    on_data = function() end,
  }, told("http.request streaming")):pause()

  local deaf = uv.new_tcp() -- connections are made, and nothing of them is read
  deaf:bind("127.0.0.1", 0)
  deaf:listen(8, function() end)
  local nowhere = "127.0.0.1:" .. deaf:getsockname().port
  local socket = task.call(http.connect, { url = "http://" .. nowhere })
  socket:write(("x"):rep(24 << 20), told("socket:write"))
  socket:read_start(told("socket:read_start"))
  http.connect({ url = "http://anything/", proxy = "http://" .. nowhere }, told("http.connect"))

  local session
  task.await(function(done)
    local options = { write = function() done() end, methods = { kex = "curve25519-sha256" } }
    session = select(2, ssh.open(options, told("ssh.open")))
    session:on_close(told("session:on_close"))
  end)
  repeat task.sleep(0.01) until #exchanges == 2 and head
  local how = ...
  if how == "exit" then
    os.exit(7)
  end
  assert(how == "nothing", "an error at the top")
]]

describe("the end of the program", function()
  it("leaves work of the thread pool that does not end, also after a slow finaliser", function()
    local fifo = os.tmpname()
    os.remove(fifo)
    assert(os.execute("mkfifo " .. fifo))
    local result = run(([[
      local uv = require("luv")
      collectgarbage("stop")
      uv.fs_open(%q, "r", 0, function() end)
      setmetatable({}, { __gc = function()
        local start = uv.hrtime()
        while uv.hrtime() - start < 5e8 do end
      end })
      print("over")]]):format(fifo))
    os.remove(fifo)
    assert.equal(0, result.code)
    assert.equal("over\n", result.stdout)
  end)

  it("does not call back into a state that is closed", function()
    for _, start in ipairs {
      [[local timer = uv.new_timer() timer:start(0, 0, function() print("late") end)]],
      [[uv.fs_stat("/", function() print("late") end)]],
      [[require("ciranda.core.crypto").digest_file("/etc/passwd", { md5 = true }, function() print("late") end)]],
      [[http.request({ url = "http://127.0.0.1:1/" }, function() print("late") end)]],
    } do
      local result = run(([[
        local uv, http = require("luv"), require("ciranda.core.http")
        http.request({ url = "http://127.0.0.1:1/" }, function() end)
        KEPT = setmetatable({}, { __gc = function() %s end })
        print("over")]]):format(start))
      assert.equal(0, result.code, start .. result.stderr)
      assert.equal("over\n", result.stdout)
    end
  end)

  it("tells whatever is open that it is over, once, however the program ends", function()
    local directory = fs.tempdir("ciranda-shutdown-spec")
    local script = directory .. "/open.lua"
    fs.write(script, EVERYTHING)
    for how, status in pairs { exit = 7, error = 1, nothing = 0 } do
      local result = process.run { BINARY, script, how, timeout = 60 }
      assert.equal(status, result.code, result.stderr)
      local lines = {}
      for line in result.stdout:gmatch("[^\n]+") do
        table.insert(lines, line)
      end
      table.sort(lines)
      assert.same({
        "exchange:write closed",
        "http.connect cancelled",
        "http.request streaming cancelled",
        "http.request waiting cancelled",
        "session:on_close closed",
        "socket:write cancelled",
        "ssh.open closed",
      }, lines, how)
    end
    fs.remove_tree(directory)
  end)
end)
