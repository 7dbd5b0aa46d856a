-- shardings: what --plan shows, and what is said of the TFLOP/s of simulated workers.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/cloud_support.lua")

--- Prints what the example prints; the values come by worker from a table in the script.
local EXAMPLE = [[
import os, sys
values = %s
value = values.get(os.environ["CIRANDA_SLICE_ID"] + "/" + os.environ["CIRANDA_WORKER_ID"])
if value is not None:
    print("time is 0.5 seconds, TFLOP is 105.6, TFLOP/s is", value)
sys.exit(%d)
]]

local function event_of(result, name)
  for line in result.out:gmatch("[^\n]+") do
    local record = json.decode(line)
    if record.event == name then
      return record
    end
  end
  error("there is no event " .. name .. " in: " .. result.out .. result.err)
end

describe("shardings", function()
  local cloud

  setup(function()
    cloud = support.start({ slices = 2, type = "v5litepod-16", prefix = "job" })
  end)

  teardown(function()
    cloud:stop()
  end)

  local function plan(...)
    return cloud:run("shardings", "--plan", ...)
  end

  describe("--plan", function()
    it("draws the mesh, says what bounds a step and ranks the layouts", function()
      local result = plan("--TPU_TYPE=v5litepod-16", "--NUM_SLICES=2", "-dd", "2", "-if", "16")
      assert.equal(0, result.code, result.err)
      assert.matches("each chip: fsdp (16)", result.out, 1, true)
      assert.matches("\n 0  1   2  3\n15  6   5  4\n14  7   8  9\n13 12  11 10\n", result.out, 1, true)
      assert.matches("slice 0: data 0 | slice 1: data 1", result.out, 1, true)
      assert.matches("JAX's order is the best one found", result.out, 1, true)
      assert.matches("A step takes at least 536 ms, bound by compute", result.out, 1, true)
      assert.matches("Memory: about 10.9 of 16.0 GB a device", result.out, 1, true)
      assert.matches("needs 63k (130k with margin) in the arithmetic of Google's", result.out, 1, true)
      assert.matches("This layout is number 1 of 45", result.out, 1, true)
      assert.matches("\n  3. ", result.out, 1, true)
      assert.matches("One more slice:\n  3 slices are 48 devices", result.out, 1, true)
      assert.is_nil(result.out:find("\27", 1, true))
    end)

    it("shows the hops of JAX's order and of a better one, in terminal and SVG", function()
      local svg = cloud.root .. "/mesh.svg"
      local result = plan("--TPU_TYPE=v6e-8", "-if", "8", "--svg=" .. svg)
      assert.equal(0, result.code, result.err)
      assert.matches("12 links a ring, longest step 2", result.out, 1, true)
      assert.matches("8 links a ring, longest step 1 (JAX's: 12, longest 2)", result.out, 1, true)
      assert.matches("[[0, 2, 4, 6, 7, 5, 3, 1]].reshape((1, 8, 1))", result.out, 1, true)
      assert.is_nil(result.out:find("in place of", 1, true))
      local first, best = fs.read(svg), fs.read(cloud.root .. "/mesh-best.svg")
      assert.matches("^<svg", first)
      assert.matches("JAX's order", first, 1, true)
      assert.matches("ciranda's order", best, 1, true)
    end)

    it("is coloured on a terminal, unless NO_COLOR is set", function()
      local function on_terminal(variables)
        local argv = cloud:command({ "shardings", "--plan", "--TPU_TYPE=v6e-8", "-if", "8" })
        local line = ("env TERM=xterm %s %s"):format(variables, table.concat(argv, " "))
        local answer = process.run({ "script", "-qec", line, "/dev/null", env = argv.env, timeout = 60 })
        assert.equal(0, answer.code, answer.stdout)
        assert.matches("each chip: fsdp (8)", answer.stdout, 1, true)
        return answer.stdout:find("\27[48;2;", 1, true) ~= nil
      end
      assert.is_true(on_terminal("NO_COLOR="))
      assert.is_false(on_terminal("NO_COLOR=1"))
    end)

    it("gives the same as a record", function()
      local result = cloud:run("--json", "shardings", "--plan", "--TPU_TYPE=v6e-8", "-if", "8")
      local record = event_of(result, "plan")
      assert.equal(12, record.jax.hops.fsdp.links)
      assert.equal(8, record.best.hops.fsdp.links)
      assert.same({ 0, 2, 4, 6, 7, 5, 3, 1 }, { table.unpack(record.best.devices) })
      assert.equal(1, record.place)
    end)

    it("draws slices that are there", function()
      local result = plan("--TPU_PREFIX=job", "-dd", "2", "-if", "4", "-it", "4")
      assert.equal(0, result.code, result.err)
      assert.matches("each chip: fsdp (4) . tensor (4)", result.out, 1, true)
      assert.matches("This layout is number 2 of 45", result.out, 1, true)
    end)

    it("says what is not known of a chip, and draws", function()
      local result = plan("--TPU_TYPE=v2-8", "-if", "8")
      assert.equal(0, result.code, result.err)
      assert.matches(
        "What bounds a step cannot be said: the ICI bandwidth of v2 is not known",
        result.out,
        1,
        true
      )
      assert.matches("0/1 2/3\n6/7 4/5", result.out, 1, true)
    end)

    it("refuses what cannot be", function()
      local result = plan("--TPU_TYPE=v5litepod-16", "-if", "4")
      assert.equal(2, result.code)
      assert.equal("", result.out)
      result = plan("--TPU_TYPE=v5litepod-16", "-if", "16", "-b", "0")
      assert.equal(2, result.code)
      assert.matches("--batch_size is 0, but must be at least 1", result.err, 1, true)
      result = cloud:run("shardings", "--TPU_PREFIX=job", "--svg=x.svg")
      assert.equal(2, result.code)
      assert.matches("--svg is for --plan", result.err, 1, true)
      result = plan("--TPU_TYPE=v5litepod-16", "-if", "16", "--svg=" .. cloud.root .. "/none/x.svg")
      assert.equal(1, result.code)
      assert.matches("none/x.svg: no such file or directory", result.err, 1, true)
    end)
  end)

  describe("a run", function()
    local function run(values, status, option)
      fs.write(cloud.root .. "/code/example.py", EXAMPLE:format(values, status))
      local words = { "shardings", "--TPU_PREFIX=job", "-dd", "2", "-if", "16", "--PROGRAM=example.py" }
      if option then
        table.insert(words, 1, option)
      end
      return cloud:run(table.unpack(words))
    end

    it("compares the TFLOP/s of all workers", function()
      local values =
        '{"0/0": 90.0, "0/1": 90.5, "0/2": 91.0, "0/3": 260.0, "1/0": 91.5, "1/1": 92.0, "1/2": 70.0}'
      local result = run(values, 0)
      assert.equal(0, result.code, result.err)
      assert.equal("time is 0.5 seconds, TFLOP is 105.6, TFLOP/s is 90.0\n", result.out)
      assert.matches(
        "TFLOP/s a device: min 70.0, median 91.0 (46 % of the peak); laggard: slice 1 worker 2 with 70.0, 23 % below "
          .. "the median\n"
          .. "TFLOP/s missing from 1 of 8 workers: slice1/worker3\n"
          .. "TFLOP/s above the peak of 197.0 of a v5e chip: slice0/worker3, up to 260.0: ",
        result.err,
        1,
        true
      )
      result = run(values, 0, "--json")
      local record = event_of(result, "throughput")
      assert.equal(70, record.min)
      assert.equal(91, record.median)
      assert.equal(197, record.peak)
      assert.same({ slice = 1, worker = 2, tflops = 70 }, record.laggard)
      assert.same({ slice = 1, worker = 3 }, record.missing[1])
      assert.equal(1, #record.missing)
      assert.same({ slice = 0, worker = 3, tflops = 260 }, record.above_peak[1])
      assert.equal(0, event_of(result, "end").status)
    end)

    it("keeps the run's exit status, whatever was printed", function()
      local result = run("{}", 7)
      assert.equal(7, result.code, result.err)
      assert.is_nil(result.err:find("TFLOP/s", 1, true))
      result = run("{}", 0)
      assert.equal(0, result.code, result.err)
      assert.matches("TFLOP/s: no worker printed any\n", result.err, 1, true)
    end)
  end)
end)
