--- e2e-jobwalk: the job recipe and the stand-in trainer, walked through days drawn from seeds; see jobwalk.sh.
---
--- Each walk has a simulated cloud of its own whose answers fail as its plan says. Wherever it was struck, the job must
--- have gone on from the newest step that was saved, on all workers, must not have been run again once it had finished,
--- and must leave whole logs, no queued resource and no process. The last line is JSON; `failed` has the seeds of the
--- walks that were not good, each of which was told with what it takes to repeat it.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local plans = require("jobwalk.plan")
local task = require("ciranda.task")
local uv = require("luv")
local walks = require("jobwalk.walk")

local SCRATCH = assert(arg[1], "a scratch directory is expected")
local SHORT = os.getenv("CIRANDA_SHORT") ~= nil
local COUNT = math.tointeger(tonumber(os.getenv("CIRANDA_WALKS") or (SHORT and 10 or 100)))
local SEED = math.tointeger(tonumber(os.getenv("CIRANDA_SEED") or os.time()))
local AT_ONCE = math.tointeger(tonumber(os.getenv("CIRANDA_AT_ONCE") or (SHORT and 10 or 5)))
local LIMIT = 1800 -- s, for one walk

local function say(format, ...)
  io.stderr:write(string.format(format, ...), "\n")
end

local function main()
  local began = uv.hrtime()
  local total = { walks = COUNT, seed = SEED, failed = json.array({}), events = {} }
  local numbers = {}
  for number = 0, COUNT - 1 do
    numbers[#numbers + 1] = SEED + number
  end
  task.map(numbers, function(seed)
    local plan = plans.draw(seed, SHORT)
    local text = plans.text(plan)
    local started = uv.hrtime()
    local root = ("%s/%d"):format(SCRATCH, seed)
    local ok, figures, problems, explanation = pcall(task.timeout, LIMIT, walks.run, plan, root, text)
    if not ok then
      figures, problems = {}, { tostring(figures) }
    end
    say("seed %d, %.0f s: %s", seed, (uv.hrtime() - started) / 1e9, text)
    if #problems > 0 then
      table.insert(total.failed, seed)
      say(
        "seed %d FAILED; to repeat it: CIRANDA_SEED=%d CIRANDA_WALKS=1%s tests/e2e/jobwalk.sh",
        seed,
        seed,
        SHORT and " CIRANDA_SHORT=1" or ""
      )
      say("  %s\n%s", table.concat(problems, "\n  "), explanation or "")
    end
    for _, event in ipairs(plan.events) do
      total.events[event.kind] = (total.events[event.kind] or 0) + 1
    end
    for name, value in pairs(figures) do
      if name == "idle" then
        total.idle_s = math.max(total.idle_s or 0, value)
      else
        total[name] = (total[name] or 0) + value
      end
    end
    fs.remove_tree(root)
  end, AT_ONCE)
  total.e2e, total.seconds = "jobwalk", (uv.hrtime() - began) / 1e9
  print(json.encode(total))
  return #total.failed == 0
end

os.exit(main() and 0 or 1)
