local hosts = require("ciranda.provider.hosts")

local function shape(slices)
  local out = {}
  for _, slice in ipairs(slices) do
    for _, worker in ipairs(slice.workers) do
      out[#out + 1] = ("%d/%d=%s%s"):format(
        worker.slice,
        worker.index,
        worker.address,
        worker.port and ":" .. worker.port or ""
      )
    end
  end
  return table.concat(out, " ")
end

local function failure(options)
  local ok, e = pcall(hosts.slices, options)
  assert.is_false(ok)
  return e
end

describe("provider.hosts", function()
  it("numbers hosts in the order given, so many a slice", function()
    assert.equal("0/0=a 0/1=b 0/2=c", shape(hosts.slices({ hosts = { "a", "b", "c" } })))
    assert.equal(
      "0/0=10.0.0.1 0/1=10.0.0.2 1/0=10.0.0.3 1/1=10.0.0.4",
      shape(hosts.slices({ hosts = "10.0.0.[1-4]", workers_per_slice = 2 }))
    )
  end)

  it("takes ports, IPv6 and numbers of the host's own, gaps kept", function()
    assert.equal(
      "0/0=::1:22 3/1=b:2222",
      shape(hosts.slices({ hosts = { { address = "b", port = 2222, slice = 3, worker = 1 }, "[::1]:22" } }))
    )
    assert.equal("0/0=fe80::1", shape(hosts.slices({ hosts = { "fe80::1" } })))
  end)

  it("reads a file", function()
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(
      "# ours\n\n10.0.0.1 slice=1 worker=1 port=2200 name=second\n10.0.0.2 slice=1 worker=0 internal=10.9.9.9\n"
    )
    file:close()
    local slices = hosts.slices({ file = path })
    assert.equal("1/0=10.0.0.2 1/1=10.0.0.1:2200", shape(slices))
    assert.equal("second", slices[1].workers[2].name)
    assert.equal("10.9.9.9", slices[1].workers[1].internal_address)
    file = assert(io.open(path, "w"))
    file:write("10.0.0.1\n10.0.0.2 slots=4\n")
    file:close()
    assert.matches('line 2: "slots=4" is not slice=', failure({ file = path }).message, 1, true)
    os.remove(path)
    assert.equal("not_found", failure({ file = path }).code)
  end)

  for name, options in pairs({
    ["nothing"] = { hosts = {} },
    ["a port of 0"] = { hosts = { "a:0" } },
    ["a port beyond 65535"] = { hosts = { "a:70000" } },
    ["user@host"] = { hosts = { "me@a" } },
    ["an option for a host"] = { hosts = { "-oProxyCommand=x" } },
    ["two with one number"] = {
      hosts = { { address = "a", slice = 0, worker = 0 }, { address = "b", slice = 0, worker = 0 } },
    },
  }) do
    it("refuses " .. name, function()
      assert.equal("usage", failure(options).code)
    end)
  end

  it("refuses an option it does not know", function()
    assert.equal("misuse", failure({ hosts = { "a" }, user = "me" }).code)
  end)
end)
