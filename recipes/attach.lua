--- attach: takes up a run whose runner is gone.
local err = require("ciranda.io.error")
local launch = require("ciranda.run.launch")
local runs = require("ciranda.run.runs")

return {
  summary = "take up a run whose runner is gone: follow its logs to the end",
  description = "A run goes on on its workers when its runner was detached, killed, or lost its machine. This "
    .. "connects to them again, brings the rest of the logs home and ends with the run's status, as the "
    .. "runner would have. COMMAND is never started a second time.",
  flags = {
    { name = "RUN", positional = true, required = true, help = "Name of the run." },
    { name = "show", help = "Show these workers' output with a prefix: a node set, or all." },
    {
      name = "detach",
      type = "boolean",
      default = false,
      help = "Return when it has been taken up; the runner goes on without this terminal.",
    },
    {
      name = "TAKE",
      type = "boolean",
      default = false,
      help = "Take the run although a runner on another machine never said goodbye.",
    },
  },
  run = function(context)
    local run = context.flags.RUN
    local runner, life = runs.runner(runs.read(run))
    if life == "alive" then
      local form = "run %s is in the hands of process %d on this machine: `ciranda logs %s --follow` shows it, "
        .. "`ciranda stop %s` ends it"
      err.raise { code = "busy", op = "attach", target = run, message = form:format(run, runner.pid, run, run) }
    end
    if context.flags.detach then
      return require("ciranda.run.detach").run(context, run, true)
    end
    local result = launch.attach({
      run = run,
      connect_options = {},
      progress = context.progress,
      json = context.json,
      on_interrupt = context.on_interrupt,
      show = context.flags.show,
      take = context.flags.TAKE,
    })
    context.finish(result)
    return result.status
  end,
}
