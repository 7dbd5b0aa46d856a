local evidence = require("ciranda.run.evidence")
local launch = require("ciranda.run.launch")
local uv = require("luv")

local runs_of = dofile("tests/fixtures/fleet/runs.lua")

local function worker(slice, index)
  return { slice = slice, index = index, node = "node-" .. slice }
end

describe("run.evidence", function()
  it("knows when a kernel's messages were by the time since its start, and leaves out older ones", function()
    local text = "[   12.500000] Out of memory: Killed process 1 (old)\n"
      .. "[  990.250000] Out of memory: Killed process 4711 (python3) total-vm:9kB\nuptime=1000.25\n"
    local found = evidence.parse(worker(0, 0), text, 5000, 4900)
    assert.equal(1, #found)
    assert.equal(4990, found[1].at)
    assert.matches("^Out of memory: Killed process 4711", found[1].text)
    assert.same({}, evidence.parse(worker(0, 0), "", 5000, 4900))
  end)

  it("tells equal messages once, those of the first worker before others, and of many only some", function()
    local first, messages = worker(1, 2), {}
    for place = 0, 3 do
      messages[#messages + 1] = {
        worker = worker(0, place),
        at = 100 + place,
        text = ("Killed process %d (python3)"):format(4000 + place),
      }
    end
    messages[#messages + 1] = { worker = first, at = 200, text = "vfio-pci 0000:05:00.0: broken" }
    local lines = evidence.kernel_lines(messages, first)
    assert.equal(2, #lines)
    assert.matches("^Kernel of slice1/worker2, %d%d:%d%d:%d%d: vfio%-pci", lines[1])
    assert.matches("^Kernel of slice0/worker%[0%-3%], %d%d:%d%d:%d%d: Killed process 4000", lines[2])
    for _, name in ipairs({ "a", "b", "c", "d", "e", "f", "g", "h" }) do
      messages[#messages + 1] = { worker = first, at = 300, text = "mce: " .. ("zyx"):rep(#messages) .. name }
    end
    lines = evidence.kernel_lines(messages, first)
    assert.equal(7, #lines)
    assert.equal("Kernels said 4 things more: dmesg there shows them", lines[7])
  end)

  it("tells what is wrong with the fleet's nodes, and nothing of others, nor what was before", function()
    local nodes = {
      { name = "projects/p/locations/z/nodes/node-0", state = "READY", health = "HEALTHY" },
      {
        name = "projects/p/locations/z/nodes/node-1",
        state = "READY",
        health = "UNHEALTHY_MAINTENANCE",
        healthDescription = "maintenance",
        symptoms = {
          {
            symptomType = "MESH_BUILD_FAIL",
            workerId = "2",
            createTime = "1970-01-01T00:10:00Z",
            details = "chip 3",
          },
          { symptomType = "LOW_MEMORY", workerId = "1", createTime = "1970-01-01T00:00:10Z" },
        },
      },
      { name = "projects/p/locations/z/nodes/other", state = "PREEMPTED" },
    }
    local lines = evidence.node_lines(nodes, { worker(0, 0), worker(1, 0) }, 500)
    assert.equal(2, #lines)
    assert.equal("Node node-1 is READY, UNHEALTHY_MAINTENANCE: maintenance", lines[1])
    assert.matches("^Node node%-1, slice 1 worker 2, %d%d:10:00: MESH_BUILD_FAIL, chip 3$", lines[2])
  end)

  it(
    "says of a failure what the kernels and the cloud know, and nothing of one that they know nothing of",
    function()
      local place = runs_of.open(2, 1)
      finally(function()
        place:close()
      end)
      for address, machine in pairs(place.machines) do
        uv.fs_mkdir(machine.home .. "/tools", 448)
        local file = assert(io.open(machine.home .. "/tools/dmesg", "w"))
        file:write(([[#!/bin/sh
        [ %s = 1.0 ] || { echo "dmesg: read kernel buffer failed: Operation not permitted" >&2; exit 1; }
        read -r up _ < /proc/uptime; echo "[    1.000000] mce: before"
        echo "[$up""0000] Out of memory: Killed process 77 (python3)"; echo "[$up""0000] audit: nothing"
      ]]):format(address))
        file:close()
        uv.fs_chmod(machine.home .. "/tools/dmesg", 493)
        machine.env.PATH = machine.home .. "/tools:" .. os.getenv("PATH")
      end
      local asked = 0
      local options = place:settings("[ $CIRANDA_SLICE_ID = 1 ] && exit 137; sleep 300", {
        nodes = function()
          asked = asked + 1
          return { { name = "node-1", symptoms = { { symptomType = "OUT_OF_MEMORY", workerId = "0" } } } }
        end,
      })
      assert.equal(137, launch.run(options).status)
      assert.matches(
        "Kernel of slice1/worker0, %d%d:%d%d:%d%d: Out of memory: Killed process 77 %(python3%)\n",
        place:text()
      )
      assert.matches("Node node-1, slice 1 worker 0: OUT_OF_MEMORY\n", place:text(), 1, true)
      assert.is_nil(place:text():find("before", 1, true))
      assert.is_nil(place:text():find("audit", 1, true))
      assert.equal(1, asked)
      place.said = {}
      assert.equal(0, launch.run(place:settings("true", { run = "r2", nodes = options.nodes })).status)
      assert.equal(1, asked)
    end
  )
end)
