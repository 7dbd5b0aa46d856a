local target = require("ciranda.run.target")
local uv = require("luv")

describe("run.target", function()
  it("reads slice numbers as a node set", function()
    assert.equal("slice[0-3,7]", target.slice_set("0-3,7"))
    assert.equal("slice[2]", target.slice_set("2"))
    assert.equal("slice[0,1]", target.slice_set("0, 1"))
    assert.equal("slice0/worker1", target.slice_set("slice0/worker1"))
  end)

  it("refuses to run on one of the fleet's own workers, and knows loopback from that", function()
    local own
    for _, addresses in pairs(uv.interface_addresses()) do
      for _, address in ipairs(addresses) do
        if not address.internal then
          own = address.ip
        end
      end
    end
    local function slices(address)
      return {
        {
          index = 0,
          name = "s",
          workers = { { slice = 0, index = 3, address = "203.0.113.1", internal_address = address } },
        },
      }
    end
    target.refuse_own_worker(slices("127.0.0.1"))
    target.refuse_own_worker(slices("192.0.2.77"))
    if not own then
      pending("this machine has no address but loopback")
      return
    end
    local ok, e = pcall(target.refuse_own_worker, slices(own))
    assert.is_false(ok)
    assert.equal("usage", e.code)
    assert.matches("this machine is slice 0 worker 3 itself", e.message, 1, true)
  end)
end)
