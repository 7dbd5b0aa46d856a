--- runs: the runs that this machine knows, how each stands, and when its runner last breathed.
local clock = require("ciranda.io.clock")
local journals = require("ciranda.run.journal")
local runs = require("ciranda.run.runs")
local tables = require("ciranda.cli.table")

local M = {
  summary = "list the runs that this machine knows, and how each stands",
  description = "STATE is running (a runner has it), detached (its command may go on on the workers, and no runner "
    .. "watches: ciranda attach RUN), unstarted (its runner was gone before its command was started: ciranda stop RUN "
    .. "gives its workers back), job (it runs by itself in the cloud), made (it only made something there), "
    .. "ended, or unreadable. BREATHED is when its runner last gave a sign of life; one that lives does so every 20 s.",
  flags = { { name = "RUN", positional = true, help = "Only this one, with everything known of it." } },
}
table.move(tables.flags, 1, #tables.flags, #M.flags + 1, M.flags)

---@param now number
---@return ciranda.cli.Column[]
local function columns(now)
  return {
    { "RUN", "name" },
    { "RECIPE", "recipe" },
    { "STATE", "state" },
    { "WORKERS", "workers" },
    { "ATTEMPTS", "attempts" },
    {
      "STATUS",
      function(item)
        return item.status and ("%d (%s)"):format(item.status, item.kind or "?") or item.kind
      end,
    },
    {
      "BEGAN",
      function(item)
        return item.began and os.date("%Y-%m-%d %H:%M:%S", math.floor(item.began))
      end,
    },
    {
      "BREATHED",
      function(item)
        return item.breathed and clock.span(now - item.breathed) .. " ago"
      end,
    },
  }
end

---@param context ciranda.cli.Context
---@return integer? status
function M.run(context)
  local flags, now = context.flags, os.time()
  tables.check(flags)
  local event = context.json and "run" or nil
  if flags.RUN then
    runs.read(flags.RUN)
    tables.print_one(runs.standing(flags.RUN, now), flags.format, event)
    return
  end
  local items, unreadable = {}, 0
  for _, name in ipairs(journals.list()) do
    local item = runs.standing(name, now)
    items[#items + 1] = item
    if item.problem then
      unreadable = unreadable + 1
      context.progress:say("%s: %s", name, item.problem)
    end
  end
  table.sort(items, function(a, b)
    if (a.began or 0) ~= (b.began or 0) then
      return (a.began or 0) < (b.began or 0)
    end
    return a.name < b.name
  end)
  if #items == 0 and not (flags.format or context.json) then
    context.progress:say("There are no runs in %s", journals.directory())
  else
    tables.print(
      items,
      { columns = columns(now), filter = flags.filter, format = flags.format, event = event }
    )
  end
  return unreadable > 0 and 1 or 0
end

return M
