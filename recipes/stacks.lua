--- stacks: where the processes of a run wait.
local err = require("ciranda.io.error")
local known = require("ciranda.run.known")
local nodeset = require("ciranda.provider.nodeset")
local stacks = require("ciranda.run.stacks")

return {
  summary = "show where the processes of a run wait",
  description = "For every process that COMMAND started, on every worker: each thread's state, the kernel function "
    .. "and the system call it waits in, and its kernel stack (root only). A Python program that registers "
    .. "faulthandler for a signal and has CIRANDA_STACK_SIGNAL=USR1 in its environment prints its own stacks too. "
    .. "Nothing is stopped; it needs no runner.",
  flags = {
    { name = "RUN", positional = true, required = true, help = "Name of the run." },
    { name = "show", help = "These workers: a node set such as slice[0-1]/worker0 (all)." },
    { name = "threads", type = "integer", default = 16, help = "Threads shown of a process." },
  },
  run = function(context)
    local flags = context.flags
    if flags.threads < 1 then
      err.raise({ code = "usage", message = ("--threads is %d, but counts from 1"):format(flags.threads) })
    end
    local last = known.find(flags.RUN, "stacks")
    local fleet <close> = known.fleet(last, {})
    local workers = flags.show and fleet:select(flags.show) or fleet
    local unseen = 0
    for _, one in ipairs(stacks.look(workers, flags.RUN, last.attempt, { threads = flags.threads })) do
      unseen = unseen + (one.problem and 1 or 0)
      if context.json then
        context.progress:event({
          event = "stacks",
          slice = one.worker.slice,
          worker = one.worker.index,
          idle = one.idle,
          text = one.text,
          problem = one.problem,
        })
      else
        io.write(
          ("== %s: %s\n"):format(
            nodeset.fold({ one.worker }),
            one.problem or ("its log grew %.0f s ago\n%s"):format(one.idle, (one.text:gsub("\n$", "")))
          )
        )
      end
    end
    return unseen > 0 and 1 or 0
  end,
}
