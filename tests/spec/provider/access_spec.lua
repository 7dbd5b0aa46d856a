-- The way of a key into the workers: whoever is told of it hears of it in its own time.
local access = require("ciranda.provider.access")
local errors = require("ciranda.io.error")
local fleets = require("ciranda.fleet")

describe("provider.access", function()
  local propagation, pause = access.PROPAGATION, access.PAUSE
  local added, knocks, patience

  before_each(function()
    access.PAUSE = 0.01
    added, knocks, patience = {}, {}, {}
  end)

  after_each(function()
    access.PROPAGATION, access.PAUSE = propagation, pause
  end)

  --- Workers at 0 to 2, each of which refuses a key that was added so many times yet (`patience`; math.huge: for ever).
  local function fleet()
    local slice = { index = 0, name = "node", metadata = { ["enable-oslogin"] = "FALSE" }, workers = {} }
    for index = 0, 2 do
      slice.workers[index + 1] = { slice = 0, index = index, address = tostring(index) }
    end
    return fleets.new({ slice }, {
      retry_for = 0,
      connect = function(options)
        local address = options.address or options.host
        knocks[address] = (knocks[address] or 0) + (#added > 0 and 1 or 0)
        local left = patience[address]
        if type(left) == "string" then
          errors.raise({ code = left, message = "no" })
        elseif #added == 0 or left and knocks[address] <= left then
          errors.raise({ code = "auth", message = "no key was accepted" })
        end
        return { close = function() end }
      end,
    })
  end

  local function ensure(workers)
    return access.ensure({
      fleet = workers,
      user = "me",
      public = "ssh-ed25519 AAAA me",
      tpu = {
        add_ssh_keys = function(_, name, keys)
          table.insert(added, name .. " " .. keys[1])
        end,
      },
    })
  end

  it("waits until every worker lets in a key that has just been added", function()
    patience = { ["0"] = 1, ["2"] = 3 }
    local workers <close> = fleet()
    assert.equal("me", ensure(workers))
    assert.same({ "node me:ssh-ed25519 AAAA me" }, added)
    for _, worker in ipairs(workers:workers()) do
      assert.is_true(workers:link(worker):connected(), worker.address)
    end
    assert.same({ ["0"] = 2, ["1"] = 1, ["2"] = 4 }, knocks)
  end)

  it("leaves a worker that is not to be had to whoever wants it, but for the first", function()
    patience = { ["1"] = "unreachable" }
    local workers <close> = fleet()
    assert.equal("me", ensure(workers))
    access.PROPAGATION, added, patience = 0.02, {}, { ["2"] = math.huge }
    local others <close> = fleet()
    assert.equal("me", ensure(others))
    added, patience = {}, { ["0"] = math.huge }
    local refused <close> = fleet()
    local ok, problem = pcall(ensure, refused)
    assert.is_false(ok)
    assert.equal("auth", problem.code)
  end)
end)
