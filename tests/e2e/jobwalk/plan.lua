--- What happens in a walk, drawn from its seed: the slices, who watches, what the platform does and when, what fails.
local random = require("ciranda.sim.random")

local M = {}

---@class jobwalk.Event something that happens once so many steps have been done since the last one
---@field kind "maintain"|"simulate"|"preempt"|"lose"|"reset"|"kill"
---@field after integer steps
---@field slice integer
---@field worker integer

---@class jobwalk.Plan
---@field seed integer
---@field slices integer
---@field type string
---@field workers integer a slice
---@field runner "gone"|"follows"|"killed" killed: it follows, dies at the first event, and its command is typed again
---@field autocheckpoint boolean
---@field spot boolean
---@field events jobwalk.Event[] "kill" can only be the last: it fails the job, which is then given again
---@field save_every integer
---@field late "lose"|"reset"|nil what strikes when all have finished, with nobody watching
---@field faults table[] as ciranda.sim takes them

local SHAPES = {
  { slices = 1, type = "v5litepod-4", workers = 1 },
  { slices = 2, type = "v5litepod-4", workers = 1 },
  { slices = 1, type = "v4-16", workers = 2 },
  { slices = 2, type = "v4-16", workers = 2 },
}

--- What may fail for as long as a walk lasts; each is there with the given chance.
local FAULTS = {
  { 0.6, { kind = "error", method = "storage.*", status = "UNAVAILABLE", most = 0.08 } },
  { 0.5, { kind = "error", method = "nodes.*", status = "UNAVAILABLE", most = 0.15 } },
  { 0.5, { kind = "error", method = "queuedResources.*", status = "UNAVAILABLE", most = 0.15 } },
  { 0.3, { kind = "error", method = "*", status = "RESOURCE_EXHAUSTED", most = 0.03 } },
  { 0.4, { kind = "truncate", method = "storage.*", most = 0.05 } },
  { 0.3, { kind = "truncate", method = "*", most = 0.03 } },
  { 0.4, { kind = "reset", method = "*", most = 0.04 } },
  { 0.3, { kind = "error", method = "metadata", status = "UNAVAILABLE", most = 0.08 } },
  { 0.3, { kind = "slow", method = "*", seconds = 1, most = 0.1 } },
  { 0.4, { kind = "slow_operation", method = "queuedResources.*", seconds = 5, most = 1 } },
}

local function pick(chance, list)
  return list[chance:integer(1, #list)]
end

--- The walk of a seed.
---@param seed integer
---@param short boolean? few workers and events, and none that takes minutes
---@return jobwalk.Plan
function M.draw(seed, short)
  local chance = random.new(seed):fork("jobwalk")
  local shape = SHAPES[chance:integer(1, short and 3 or #SHAPES)]
  local plan = {
    seed = seed,
    slices = shape.slices,
    type = shape.type,
    workers = shape.workers,
    runner = pick(chance, { "gone", "gone", "follows", "follows", "killed" }),
    autocheckpoint = chance:number() < 0.6,
    spot = chance:number() < 0.4,
    save_every = chance:integer(5, 15),
    events = {},
    faults = {},
  }
  local kinds = { "maintain", "simulate", "lose", "reset" }
  if plan.spot then
    table.move({ "preempt", "preempt" }, 1, 2, #kinds + 1, kinds)
  end
  for place = 1, chance:integer(1, short and 2 or 3) do
    plan.events[place] = {
      kind = pick(chance, kinds),
      after = chance:integer(2, 20),
      slice = chance:integer(0, plan.slices - 1),
      worker = chance:integer(0, plan.workers - 1),
    }
  end
  if chance:number() < 0.25 and not short then
    plan.events[#plan.events].kind = "kill"
  end
  local late = pick(chance, { "lose", "reset", false, false })
  plan.late = plan.runner == "gone" and not short and late or nil
  for _, entry in ipairs(FAULTS) do
    local there, probability = chance:number() < entry[1], chance:number() * entry[2].most
    if there then
      local fault = { probability = probability }
      for name, value in pairs(entry[2]) do
        if name ~= "most" then
          fault[name] = value
        end
      end
      plan.faults[#plan.faults + 1] = fault
    end
  end
  return plan
end

--- A plan in one line.
---@param plan jobwalk.Plan
---@return string
function M.text(plan)
  local events = {}
  for place, event in ipairs(plan.events) do
    events[place] = ("%s %d/%d after %d"):format(event.kind, event.slice, event.worker, event.after)
  end
  local faults = {}
  for place, fault in ipairs(plan.faults) do
    faults[place] = ("%s %s %.3f"):format(fault.kind, fault.method, fault.probability)
  end
  return ("%d x %s, runner %s%s%s; %s%s; %s"):format(
    plan.slices,
    plan.type,
    plan.runner,
    plan.autocheckpoint and ", autocheckpoint" or "",
    plan.spot and ", spot" or "",
    table.concat(events, ", "),
    plan.late and ", at last " .. plan.late or "",
    #faults > 0 and table.concat(faults, ", ") or "nothing fails"
  )
end

return M
