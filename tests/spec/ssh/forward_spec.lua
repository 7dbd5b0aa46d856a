local http = require("ciranda.io.http")
local server_room = require("ciranda.io.server")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")

local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

describe("a forwarded port", function()
  local server, connection

  setup(function()
    server = support.server()
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  before_each(function()
    connection = ssh.connect(server:options())
  end)

  after_each(function()
    connection:close()
  end)

  it("reaches a web server over there, several times at once", function()
    local scope <close> = task.scope()
    local web <close> = server_room.listen({
      address = "127.0.0.1",
      port = 0,
      handler = function(request)
        return { status = 200, headers = {}, body = ("x"):rep(300000) .. request.path }
      end,
    })
    local forward <close> = connection:forward(scope, { host = "127.0.0.1", to_port = web.port })
    assert.is_true(forward.port > 0)
    local bodies = task.map({ 1, 2, 3, 4, 5, 6 }, function(number)
      return http.get(("http://127.0.0.1:%d/%d"):format(forward.port, number), { timeout = 60 }).body
    end)
    for number, body in ipairs(bodies) do
      assert.is_true(body == ("x"):rep(300000) .. "/" .. number)
    end
    assert.is_true(forward.accepted >= 1)
    forward:close()
    scope:cancel("done")
  end)

  it("whose place is not there closes its clients, and says why", function()
    local scope <close> = task.scope()
    local closed = support.tcp(function() end)
    closed.stop()
    task.sleep(0.05)
    local forward <close> = connection:forward(scope, { host = closed.address, to_port = closed.port })
    local ok = pcall(http.get, ("http://127.0.0.1:%d/"):format(forward.port), { timeout = 60 })
    assert.is_false(ok)
    assert.are.equal(1, forward.failed)
    scope:cancel("done")
  end)

  it("that is taken is refused with its number", function()
    local scope <close> = task.scope()
    local taken <close> = support.tcp(function() end)
    local err = fails("busy", nil, connection.forward, connection, scope, {
      host = "127.0.0.1",
      to_port = 1,
      address = taken.address,
      port = taken.port,
    })
    assert.is_truthy(tostring(err):find(tostring(taken.port), 1, true))
  end)

  it("ends with its scope", function()
    local forward
    do
      local scope <close> = task.scope()
      forward = connection:forward(scope, { host = "127.0.0.1", to_port = 1 })
      scope:cancel("enough")
    end
    assert.is_true(forward.closed)
  end)
end)
