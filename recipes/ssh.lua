--- ssh: a command on some or all workers, or a session on one.
local err = require("ciranda.io.error")
local fan = require("ciranda.run.fan")
local fs = require("ciranda.io.fs")
local logs = require("ciranda.run.logs")
local named_target = require("ciranda.run.named_target")
local nodeset = require("ciranda.provider.nodeset")
local openssh = require("ciranda.run.openssh")
local screens = require("ciranda.run.screen")
local task = require("ciranda.task")

--- Bytes of standard input that are taken: they are kept for all workers.
local INPUT = 64 << 20

local M = {
  summary = "run a command on workers, or open a session on one",
  description = "NAME is a queued resource, a node, or the prefix of nodes; --HOSTS needs none. Without --command a "
    .. "session on one worker is opened by OpenSSH's own ssh, with the right key, port and user, and the host's "
    .. "key from the cloud. With --command on several workers equal output is gathered under the workers it came "
    .. "from; --live shows lines as they come. The exit status is the first failing worker's. Ctrl-C lists who is "
    .. "still running, once more stops them.",
}

M.flags = {
  {
    name = "NAME",
    positional = true,
    help = "[USER@]NAME of a queued resource, a node, or a prefix of nodes.",
  },
  {
    name = "SSH_ARGS",
    positional = true,
    many = true,
    help = "After --: arguments for ssh in a session, such as -L 6006:localhost:6006.",
  },
  { name = "command", help = "What to run, by the login user's shell." },
  {
    name = "batch-size",
    help = "How many workers at once, or all (all). The first batch that fails is the last. Only for commands whose "
      .. "workers do not wait for each other.",
  },
  {
    name = "live",
    type = "boolean",
    default = false,
    help = "Show lines as they come, each with its workers.",
  },
  {
    name = "stdin",
    type = "boolean",
    default = false,
    help = "Send what standard input holds, 64 MiB at most, to every worker.",
  },
  { name = "timeout", type = "duration", help = "Longest time the command may take on a worker (none)." },
  {
    name = "output-directory",
    help = "Write each worker's output and errors to a file in this directory, too.",
  },
  { name = "ssh-flag", many = true, help = "One more argument for ssh in a session." },
}
table.move(named_target.flags, 1, #named_target.flags, #M.flags + 1, M.flags)

local RULE = ("-"):rep(15)

--- Prints what several workers said, equal output once.
---@param results ciranda.fleet.Results
local function print_gathered(results)
  for _, group in ipairs(results:gather()) do
    if group.stdout ~= "" then
      local failed = group.outcome ~= "exit status 0"
      local count = #group.workers
      io.write(
        RULE,
        ("\n%s (%d)%s\n"):format(group.nodes, count, failed and ": " .. group.outcome or ""),
        RULE,
        "\n",
        group.stdout,
        group.stdout:sub(-1) == "\n" and "" or "\n"
      )
    end
  end
end

---@param progress ciranda.cli.Progress
---@param result ciranda.fleet.Result
local function event(progress, result)
  progress:event({
    event = "result",
    slice = result.worker.slice,
    worker = result.worker.index,
    node = result.worker.node,
    code = result.code,
    signal = result.signal,
    stdout = result.stdout,
    stderr = result.stderr,
    error = result.err and tostring(result.err),
  })
end

--- A file for each worker's output and errors, in the order they come.
---@param directory string
---@param workers ciranda.Worker[]
---@return table<ciranda.Worker, ciranda.fs.File> files to be closed; a `<close>` variable may hold them
local function files_in(directory, workers)
  local files = setmetatable({}, {
    __close = function(files)
      for _, file in pairs(files) do
        file:close()
      end
    end,
  })
  fs.mkdir_p(directory)
  for _, worker in ipairs(workers) do
    files[worker] = fs.open(directory .. "/" .. logs.file_name(worker), "w")
  end
  return files
end

--- Runs the command on the fleet, its output shown as asked.
local function run_command(context, fleet)
  local flags = context.flags
  local workers = fleet:workers()
  local one = #workers == 1
  local files <close> = flags.output_directory and files_in(flags.output_directory, workers) or nil
  local kept = {}
  local out <close> = screens.new(1)
  local errors <close> = screens.new(2)
  local scope <close> = task.scope()
  for _, screen in ipairs({ out, errors }) do
    screen:expect(workers)
    screen:start(scope)
  end

  --- What happens to a stream's bytes.
  local function sink(screen, name)
    return function(worker, bytes)
      if files then
        files[worker]:write(bytes)
      end
      if screen:is_gone() and not files then
        -- As with `| head`: a command whose output nobody reads is ended.
        err.raise({
          code = "failed",
          phase = "exec",
          message = "nobody reads its output any more, so it was stopped",
        })
      end
      if context.json or (name == "stdout" and not one and not flags.live) then
        local pieces = kept[worker][name]
        pieces[#pieces + 1] = bytes
      elseif one then
        screen:raw(bytes)
      else
        screen:feed(worker, bytes)
      end
    end
  end
  for _, worker in ipairs(workers) do
    kept[worker] = { stdout = {}, stderr = {} }
  end
  local mark = fan.mark()
  local input = flags.stdin and require("ciranda.io.pipe").input(INPUT) or nil
  local done = fan.run({
    fleet = fleet,
    context = context,
    batch_size = fan.batch_size(flags.batch_size),
    mark = mark,
    work = function(part, on_result)
      return part:run(flags.command, {
        stdin = input,
        env = { [fan.MARK] = mark },
        timeout = flags.timeout,
        on_stdout = sink(out, "stdout"),
        on_stderr = sink(errors, "stderr"),
        on_result = on_result,
      })
    end,
    on_result = function(result)
      for _, name in ipairs({ "stdout", "stderr" }) do
        result[name] = table.concat(kept[result.worker][name])
      end
      out:finish(result.worker)
      errors:finish(result.worker)
      event(context.progress, result)
    end,
  })
  out:close()
  errors:close()
  if not (one or flags.live or context.json) then
    print_gathered(done.results)
  end
  return done
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  local extra = {}
  local name = flags.NAME
  if name and name:sub(1, 1) == "-" then
    extra[1], name = name, nil -- the first word after --, where hosts are given in place of a name
  end
  for _, list in ipairs({ flags.SSH_ARGS or {}, flags.ssh_flag or {} }) do
    table.move(list, 1, #list, #extra + 1, extra)
  end
  fan.batch_size(flags.batch_size)
  if flags.command and #extra > 0 then
    err.raise({
      code = "usage",
      message = ("with --command nothing else is taken, but there is %q"):format(extra[1]),
    })
  elseif not flags.command then
    for _, flag in ipairs({ "batch_size", "live", "stdin", "timeout", "output_directory" }) do
      if context.given[flag] then
        err.raise({ code = "usage", message = ("--%s is for --command"):format((flag:gsub("_", "-"))) })
      end
    end
  end
  local found <close> = named_target.open(context, name, {})
  local workers = found.fleet:workers()
  if not flags.command then
    if #workers > 1 then
      err.raise({
        code = "usage",
        message = (
          "a session is with one worker, and these are %d (%s); choose with --node= and --worker=, or give "
          .. "--command="
        ):format(#workers, nodeset.fold(workers)),
      })
    end
    return openssh.session(context, found, extra)
  end
  found.login()
  local result = fan.conclude(run_command(context, found.fleet), context.progress)
  context.finish(result)
  return result.status
end

return M
