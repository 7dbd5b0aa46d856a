-- A fan-out for valgrind: several hosts, all that a fleet does to them, failures among it, and everything given back.
local cases = dofile("tests/e2e/ssh/cases.lua")
local fleets = require("ciranda.fleet")
local fs = require("ciranda.io.fs")
local support = dofile("tests/spec/ssh/support.lua")

local COUNT = cases.short and 6 or 24
local server = support.server({
  every_address = true,
  config = { ("MaxStartups %d"):format(2 * COUNT) }, -- it stands for many: their own would turn nobody away
  authorized = { support.key("rsa"), support.key("ed25519") },
})
local workers = {}
for index = 0, COUNT - 1 do
  workers[index + 1] = {
    slice = index % 2,
    index = index // 2,
    address = ("127.61.0.%d"):format(index + 1),
    port = server.port,
    pins = { server:pin() },
  }
end
-- valgrind makes everything some thirty times slower.
local slow = { connect = 60, banner = 60, kex = 120, auth = 120, channel = 120 }
local fleet = fleets.new({ { index = 0, name = "all", workers = workers } }, {
  user = server.user,
  keys = { support.key("rsa"), support.key("ed25519") },
  agent = false,
  config = false,
  timeouts = slow,
  retry_for = 2,
})

cases.case("commands, with output, input and failures", function()
  for _, result in ipairs(fleet:run("echo $((6 * 7)); cat; exit 3", { stdin = ("in"):rep(50000) })) do
    assert(not result.err, tostring(result.err))
    assert(result.code == 3 and #result.stdout == 100003)
  end
  for _, result in ipairs(fleet:run("kill -9 $$")) do
    assert(result.signal == "KILL")
  end
end, 300)

cases.case("files there and back", function()
  local from, back = support.path("from"), support.path("back")
  fs.mkdir(from)
  fs.write(from .. "/a", ("a"):rep(100000))
  local part = fleet:select("slice0")
  part:push(from, "fanout-" .. server.port, { limit = 1 }):check() -- they share a home
  part:pull("fanout-" .. server.port, back):check()
  assert(#fs.read(back .. ("/slice_0000_worker_0000/fanout-%d/a"):format(server.port)) == 100000)
  part:select("worker0"):run("rm -r fanout-" .. server.port):check()
end, 300)

cases.case("a command that is given up, and a server that goes away", function()
  local results = fleet:run("sleep 100", { timeout = 1 })
  assert(results[1].err and results[1].err.code == "timeout")
  server:stop()
  assert(fleet:run("true")[1].err)
end, 300)

fleet:close()
support.clean()
cases.finish("fanout")
