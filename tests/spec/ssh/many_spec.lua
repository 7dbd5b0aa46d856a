local ssh = require("ciranda.ssh")
local support = dofile("tests/spec/ssh/support.lua")
local task = require("ciranda.task")

describe("many sessions at once", function()
  local server

  setup(function()
    server = support.server({ config = { "MaxStartups 100:30:200", "LogLevel INFO" } })
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  -- More than a turn of the loop has time for: those of whom epoll tells last have their turn too.
  it("are served alike while each sends without end", function()
    local COUNT, ENOUGH = 32, 512 * 1024
    local each = {}
    for index = 1, COUNT do
      each[index] = index
    end
    local connections = task.map(each, function()
      return ssh.connect(server:options())
    end, 8)
    local received, begun, left = {}, 0, COUNT
    -- From when all have begun to send until each has sent enough.
    local function count(index, bytes)
      local before = received[index]
      if not before then
        begun = begun + 1
      end
      received[index] = begun < COUNT and 0 or (before or 0) + bytes
      if received[index] >= ENOUGH and (before or 0) < ENOUGH then
        left = left - 1
      end
    end
    task.timeout(90, function()
      local scope <close> = task.scope()
      for index, connection in ipairs(connections) do
        scope:spawn(function()
          local channel <close> = connection:start("exec cat /dev/zero")
          while left > 0 do
            count(index, #channel:read())
          end
        end)
      end
    end)
    local most = math.max(table.unpack(received))
    for _, connection in ipairs(connections) do
      connection:close()
    end
    assert.are.equal(0, left)
    assert.is_true(
      most < 32 * ENOUGH,
      ("one has sent %d bytes when another had sent %d"):format(most, ENOUGH)
    )
  end)
end)
