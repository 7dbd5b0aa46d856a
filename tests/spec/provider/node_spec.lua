local errors = require("ciranda.io.error")
local node = require("ciranda.provider.node")
local queued_resource = require("ciranda.provider.queued_resource")

local PARENT = "projects/p/locations/us-central2-b/nodes/"

local function message(id, fields)
  local made = {
    name = PARENT .. id,
    id = "77" .. #id,
    state = "READY",
    acceleratorType = "v4-16",
    networkEndpoints = {
      { ipAddress = "10.0.0.1", accessConfig = { externalIp = "34.1.1.1" } },
      { ipAddress = "10.0.0.2", accessConfig = {} },
    },
  }
  for name, value in pairs(fields or {}) do
    made[name] = value
  end
  return made
end

local function names(found)
  local out = {}
  for place, entry in ipairs(found) do
    out[place] = entry.index .. ":" .. node.short_name(entry.node.name)
  end
  return table.concat(out, " ")
end

describe("provider.node", function()
  it("takes the exact name alone, else numbered ones in the order of their numbers", function()
    local nodes = {
      message("job-10"),
      message("job-2"),
      message("job-x"),
      message("job-2-old"),
      message("jobs-1"),
      message("job-"),
    }
    assert.equal("2:job-2 10:job-10", names(node.matching(nodes, "job")))
    nodes[#nodes + 1] = message("job")
    assert.equal("0:job", names(node.matching(nodes, "job")))
    assert.equal("", names(node.matching(nodes, "other")))
  end)

  it("makes a slice: addresses, host keys, names, gaps kept", function()
    local attributes = {
      {
        queryValue = {
          items = {
            { namespace = "hostkeys", key = "ssh-ed25519", value = "AAAA1" },
            { namespace = "guestInventory", key = "Hostname", value = "x" },
            { namespace = "", key = "hostname", value = "t1v-n-1-w-0" },
          },
        },
      },
      {},
    }
    local slice = node.slice(message("job-7"), 7, attributes)
    assert.equal("us-central2-b", slice.zone)
    assert.equal("v4-16", slice.accelerator)
    local first, second = slice.workers[1], slice.workers[2]
    assert.same(
      { 7, 0, "34.1.1.1", "10.0.0.1" },
      { first.slice, first.index, first.address, first.internal_address }
    )
    assert.same({ "ssh-ed25519 AAAA1" }, first.pins)
    assert.equal("t1v-n-1-w-0", first.hostname)
    assert.equal("10.0.0.2", second.address)
    assert.is_nil(second.pins)
    assert.equal("job-7", second.node)
  end)

  it("takes every n-th endpoint when there are n networks", function()
    local slice = node.slice(
      message("a", {
        networkConfigs = { {}, {} },
        networkEndpoints = {
          { ipAddress = "10.0.0.1" },
          { ipAddress = "10.1.0.1" },
          { ipAddress = "10.0.0.2" },
          { ipAddress = "10.1.0.2" },
        },
      }),
      0
    )
    assert.equal(2, #slice.workers)
    assert.equal("10.0.0.2", slice.workers[2].address)
    assert.equal(1, slice.workers[2].index)
  end)

  it("says what would hang a job", function()
    local function problem(...)
      local slices = {}
      for place, made in ipairs({ ... }) do
        slices[place] = node.slice(made[1], made[2])
      end
      return node.problem(slices)
    end
    local function one(fields)
      return message("a", fields)
    end
    assert.is_nil(problem({ one(), 0 }, { one(), 1 }))
    assert.is_nil(problem({ one(), 0 }))
    assert.matches("slice 1 is missing", problem({ one(), 0 }, { one(), 2 }))
    assert.matches("PREEMPTED, not READY", problem({ one({ state = "PREEMPTED" }), 0 }))
    assert.matches("mixed types", problem({ one(), 0 }, { one({ acceleratorType = "v4-32" }), 1 }))
    assert.matches(
      "more than one queued resource",
      problem({ one({ queuedResource = "x/q1" }), 0 }, { one(), 1 })
    )
    assert.matches(
      "unequal worker counts",
      problem({ one(), 0 }, { one({ networkEndpoints = { { ipAddress = "10.0.0.3" } } }), 1 })
    )
    assert.matches("no workers yet", problem({ one({ networkEndpoints = {} }), 0 }))
  end)

  it("writes a table for a person", function()
    local text = node.table_text({
      node.slice(message("job-0"), 0),
      node.slice(message("job-2", { state = "REPAIRING" }), 2),
    })
    assert.matches("SLICE  NAME   STATE", text, 1, true)
    assert.matches("2      job-2  REPAIRING", text, 1, true)
  end)

  --- A TPU API that is a table.
  local function api(nodes, attributes)
    return {
      zone = "z",
      project = "p",
      list_nodes = function()
        return nodes
      end,
      guest_attributes = attributes or function()
        return {}
      end,
      queued_resource = function(_, id)
        return {
          get = function()
            return nodes.queued[id] or errors.raise({ code = "not_found", message = "no " .. id })
          end,
        }
      end,
    }
  end

  it("finds by prefix, names what there is when nothing fits, and refuses an empty prefix", function()
    local tpu = api({ message("job-0"), message("job-1") })
    assert.equal(2, #node.slices({ tpu = tpu, prefix = "job" }))
    local ok, e = pcall(node.slices, { tpu = tpu, prefix = "jub" })
    assert.is_false(ok)
    assert.equal("not_found", e.code)
    assert.matches("there are job-0, job-1", e.message, 1, true)
    ok, e = pcall(node.slices, { tpu = tpu, prefix = "" })
    assert.is_false(ok)
    assert.equal("usage", e.code)
  end)

  it("goes on without guest attributes where they are forbidden, and fails where they fail", function()
    local function refusing(code)
      return function()
        errors.raise({ code = code, message = "no" })
      end
    end
    local slices = node.slices({ tpu = api({ message("job-0") }, refusing("permission")), prefix = "job" })
    assert.is_nil(slices[1].workers[1].pins)
    local ok, e =
      pcall(node.slices, { tpu = api({ message("job-0") }, refusing("unavailable")), prefix = "job" })
    assert.is_false(ok)
    assert.equal("unavailable", e.code)
  end)

  it("takes of a queued resource the nodes that it names, and keeps the gap of one that is gone", function()
    local nodes = { message("q-0"), message("q-2"), message("q-10") }
    nodes.queued = {
      q = {
        name = "projects/p/locations/z/queuedResources/q",
        state = { state = "ACTIVE" },
        tpu = { nodeSpec = { { multisliceParams = { nodeCount = 3 } } } },
      },
      one = { name = "x/one", state = { state = "ACCEPTED" }, tpu = { nodeSpec = { { nodeId = "n" } } } },
    }
    local slices, state = queued_resource.slices({ tpu = api(nodes), id = "q" })
    assert.equal("ACTIVE", state)
    assert.same({ 0, 2 }, { slices[1].index, slices[2].index })
    assert.equal(2, #slices)
    local ok, e = pcall(queued_resource.slices, { tpu = api(nodes), id = "one" })
    assert.is_false(ok)
    assert.equal("precondition", e.code)
    assert.matches("ACCEPTED and has no node yet", e.message)
  end)

  it("reads node ids in each form the API gives them", function()
    assert.same(
      { { id = "p-0", index = 0 }, { id = "p-1", index = 1 } },
      queued_resource.node_ids({
        name = "x/q",
        tpu = { nodeSpec = { { multiNodeParams = { nodeCount = 2, nodeIdPrefix = "p" } } } },
      })
    )
    assert.same(
      { { id = "q-0", index = 0 }, { id = "q-3", index = 3 } },
      queued_resource.node_ids({
        name = "x/q",
        tpu = { nodeSpec = { { nodeId = "q-3" }, { nodeId = "q-0" } } },
      })
    )
    assert.same(
      { { id = "solo", index = 0 } },
      queued_resource.node_ids({ name = "x/q", tpu = { nodeSpec = { { nodeId = "solo" } } } })
    )
  end)
end)
