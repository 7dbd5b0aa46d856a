-- What Multislice's variables are where the platform's do not fit the machines that a run is on.
local repair = require("ciranda.run.repair")

describe("run.repair.multislice", function()
  --- A fleet whose workers' platform says so of itself; false: it cannot be asked.
  local function fleet_of(slices, says)
    return {
      run = function()
        local results = {}
        for _, slice in ipairs(slices) do
          for _, worker in ipairs(slice.workers) do
            local said = says(worker)
            results[#results + 1] = said and { worker = worker, code = 0, stdout = said }
              or { worker = worker, err = { code = "timeout" }, stdout = "" }
          end
        end
        return results
      end,
    }
  end

  local function slices_of(...)
    local list = {}
    for place, index in ipairs({ ... }) do
      local slice = { index = index, workers = {} }
      for number = 0, 1 do
        slice.workers[number + 1] = {
          slice = index,
          index = number,
          address = ("203.0.113.%d"):format(10 * index + number),
          internal_address = ("10.0.%d.%d"):format(index, number),
        }
      end
      list[place] = slice
    end
    return list
  end

  local function tpu_env(coordinator, count, id)
    return ("ACCELERATOR_TYPE: 'v5litepod-8'\nMEGASCALE_COORDINATOR_ADDRESS: '%s'\n"):format(coordinator)
      .. ("MEGASCALE_NUM_SLICES: '%d'\nMEGASCALE_SLICE_ID: '%d'\n"):format(count, id)
  end

  it("says nothing while the platform is right or says nothing", function()
    local slices = slices_of(0, 1)
    local fleet = fleet_of(slices, function(worker)
      return tpu_env("10.0.0.0:8080", 2, worker.slice)
    end)
    assert.is_nil(repair.multislice(fleet, slices))
    slices = slices_of(0)
    fleet = fleet_of(slices, function()
      return "ACCELERATOR_TYPE: 'v5litepod-8'\n"
    end)
    assert.is_nil(repair.multislice(fleet, slices))
  end)

  it("tells one slice of several that it is alone: it would wait for the others", function()
    local slices = slices_of(3)
    local fleet = fleet_of(slices, function()
      return tpu_env("10.0.0.0:8080", 4, 3)
    end)
    local environment_of, note = repair.multislice(fleet, slices)
    assert.matches("4 slices in place of 1 on slice3/worker[0-1]", note, 1, true)
    assert.same({
      MEGASCALE_COORDINATOR_ADDRESS = "10.0.3.0:8080",
      MEGASCALE_NUM_SLICES = "1",
      MEGASCALE_SLICE_ID = "0",
    }, environment_of(slices[1].workers[2]))
  end)

  it("names the coordinator that is there now, with the port that the platform has", function()
    local slices = slices_of(0, 1)
    local fleet = fleet_of(slices, function(worker)
      return worker.slice == 0 and tpu_env("10.0.0.0:8080", 2, 0) or tpu_env("10.7.7.7:8080", 2, 1)
    end)
    local environment_of, note = repair.multislice(fleet, slices)
    assert.matches("coordinator 10.7.7.7:8080 in place of 10.0.0.0:8080", note, 1, true)
    assert.matches("slice1/worker[0-1]", note, 1, true)
    -- All of them are told: a gang whose members disagree waits for ever.
    for _, slice in ipairs(slices) do
      assert.same({
        MEGASCALE_COORDINATOR_ADDRESS = "10.0.0.0:8080",
        MEGASCALE_NUM_SLICES = "2",
        MEGASCALE_SLICE_ID = tostring(slice.index),
      }, environment_of(slice.workers[2]))
    end
  end)

  it("sets right a number of slices, and a slice's own, that are not those of the run", function()
    -- Two of four slices: their numbers for Multislice have no gaps.
    local slices = slices_of(1, 3)
    local fleet = fleet_of(slices, function(worker)
      return tpu_env("10.0.1.0", 4, worker.slice)
    end)
    local environment_of, note = repair.multislice(fleet, slices)
    assert.matches("4 slices in place of 2", note, 1, true)
    assert.same({
      MEGASCALE_COORDINATOR_ADDRESS = "10.0.1.0",
      MEGASCALE_NUM_SLICES = "2",
      MEGASCALE_SLICE_ID = "1",
    }, environment_of(slices[2].workers[1]))
    slices = slices_of(0, 1)
    fleet = fleet_of(slices, function()
      return tpu_env("10.0.0.0", 2, 0)
    end)
    environment_of, note = repair.multislice(fleet, slices)
    assert.matches("slice 0 in place of 1", note, 1, true)
    assert.equal("1", environment_of(slices[2].workers[1]).MEGASCALE_SLICE_ID)
  end)

  it("leaves a platform alone that says nothing, or that cannot be asked", function()
    local slices = slices_of(0, 1)
    for _, said in ipairs({ false, "", "ACCELERATOR_TYPE: 'v5litepod-8'\n" }) do
      assert.is_nil(repair.multislice(
        fleet_of(slices, function()
          return said
        end),
        slices
      ))
    end
  end)
end)
