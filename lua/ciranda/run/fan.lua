--- Set-up work on many workers for somebody who watches: all at once or in batches, who is still running at the first
--- Ctrl-C, an orderly stop at the second, and an exit status.
--
-- Batches are for work whose workers need not meet. A job whose workers wait for each other would wait for ever for
-- those of the next batch: that is what gangs are for.
local crypto = require("ciranda.io.crypto")
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")
local results_of = require("ciranda.fleet.results")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {}

--- Marks a command and everything it starts, so that a stop finds it: a channel's signal does not reach root logins.
M.MARK = "CIRANDA_COMMAND"

--- Seconds between TERM and KILL for commands that are stopped, and until the workers must have answered.
local GRACE, ANSWER = 5, 20
--- Seconds after which KILL is sent in any case: a machine with much to do takes long for the looks of a grace.
local LATEST = 8
--- Looks, after the grace, at which whatever is found is killed: what was started meanwhile, too.
local KILLS = 10
--- Seconds in which what the stopped commands still said, and their ends, may arrive: a machine with much to do passes
--- them on late.
local LAST_WORDS = 5

local STATUS = require("ciranda.fleet.signals").STOPPED

--- Failures that are about a file, or of this side, and not about a worker.
local FILES = { "not_found", "permission", "invalid", "exists", "no_space", "failed" }

--- Ends every process with the mark: TERM once each, a grace, KILL. In the middle of an exec a process shows no
--- environment (measured: 2 of 100 reads just after a start), so one look without a find proves nothing, and who is
--- found only later gets its TERM then.
local STOP = [[
marked() { grep -alsF "{mark}" /proc/[0-9]*/environ | tr -dc "0-9\n"; };
told=" "; n=0; clear=0; while [ $clear -lt 2 ] && [ $n -lt {last} ]; do [ $n = 0 ] || sleep 0.2; n=$((n+1));
read -r up idle < /proc/uptime; up=${up%.*}; [ $n != 1 ] || from=$up;
clear=$((clear+1)); for p in $(marked); do
case "$told" in *" $p "*) s=0;; *) s=TERM; told="$told$p ";; esac;
[ $n -le {tries} ] && [ $((up-from)) -le {latest} ] || s=KILL;
kill -$s $p 2>/dev/null && clear=0; done; done; test $clear = 2]]

--- How many workers a batch has: --batch-size as it was typed.
---@param text string?
---@return integer? nil for all at once
-- Raises "usage".
function M.batch_size(text)
  if text == nil or text == "all" then
    return nil
  end
  local size = text:match("^%d+$") and math.tointeger(tonumber(text))
  if not size or size < 1 then
    err.raise({
      code = "usage",
      op = "batch size",
      message = ("--batch-size is %q, but takes a number of workers, or all"):format(text),
    })
  end
  return size
end

---@class ciranda.run.FanOptions
---@field fleet ciranda.Fleet
---@field context ciranda.cli.Context
---@field work fun(part: ciranda.Fleet, on_result: fun(result: ciranda.fleet.Result)): ciranda.fleet.Results
---@field batch_size integer?
---@field mark string? what the commands are marked with: a stop ends them on the workers
---@field company number? seconds that the others get once one has failed: for workers that wait for each other
---@field on_result fun(result: ciranda.fleet.Result)?

---@class ciranda.run.Fan
---@field results ciranda.fleet.Results of those that have ended, in the fleet's order
---@field never ciranda.Worker[] those whose batch never came
---@field running ciranda.Worker[] those that were running when it was stopped, and whose end never came
---@field vain ciranda.Worker[] those that were ended since others had failed
---@field stopped string? the signal that stopped it

--- A new mark, for `env` of a command.
---@return string
function M.mark()
  return crypto.hex(crypto.random(12))
end

--- Ends the marked commands on workers.
---@async
---@param fleet ciranda.Fleet
---@param mark string
---@return ciranda.fleet.Results
local function end_commands(fleet, mark)
  local tries = math.tointeger(GRACE * 5)
  local script = STOP:gsub("{(%l+)}", {
    mark = M.MARK .. "=" .. mark,
    tries = tries,
    last = tries + KILLS,
    latest = LATEST,
  })
  return fleet:run(shell.sh((script:gsub("\n", " "))), { timeout = ANSWER })
end

--- A worker's error without the worker's name, which is told beside it: so equal failures are told once.
---@param problem ciranda.Error
---@return ciranda.Error
local function nameless(problem)
  if problem.phase == "exec" and problem.code == "timeout" then
    return err.new({ code = "timeout", phase = "exec", message = "it had not ended in time and was stopped" })
  end
  local text =
    problem.message:gsub("^ssh%.connect: ", ""):gsub("^%S+@%S+:%d+: ", ""):gsub("^%S+@%S+:%d+ %b(): ", "")
  if err.is(problem, table.unpack(FILES)) and problem.target and not text:find(problem.target, 1, true) then
    text = problem.target:gsub("^%S+@%S+:%d+:", "") .. ": " .. text -- a path
  end
  return err.new({ code = problem.code, phase = problem.phase, message = text, cause = problem })
end

--- Runs the work on all workers of a fleet.
---@async
---@param options ciranda.run.FanOptions
---@return ciranda.run.Fan
-- Raises what the work raises beyond its workers' own failures.
function M.run(options)
  local fleet, context = options.fleet, options.context
  local workers = fleet:workers()
  local ended, running = {}, {}
  local stop, stopped, listed = task.event(), nil, false
  local failed, vain = task.event(), {}

  local function still_running()
    local list = {}
    for _, worker in ipairs(workers) do
      list[#list + 1] = running[worker] and worker or nil
    end
    return list
  end
  local remove = context.on_interrupt(function(name)
    if name == "SIGINT" and not listed then
      listed = true
      local list = still_running()
      context.progress:say(
        "%d of %d still running: %s. Ctrl-C once more stops %s.",
        #list,
        #workers,
        nodeset.fold(list),
        #list == 1 and "it" or "them"
      )
      return true
    elseif STATUS[name] and not stopped then
      stopped = name
      stop:set()
      return true
    end
    return false
  end)
  local _ <close> = setmetatable({}, { __close = remove })

  local late = {}
  local function on_result(result)
    running[result.worker] = nil
    if result.err then
      if result.err.phase == "exec" then
        late[#late + 1] = result.worker
      end
      result.err = nameless(result.err)
    end
    ended[result.worker] = result
    if result.err or result.code ~= 0 then
      failed:set()
    end
    if options.on_result then
      options.on_result(result)
    end
  end
  local never = {}
  local function all_batches()
    local size = options.batch_size or #workers
    for first = 1, #workers, size do
      local part = table.move(workers, first, math.min(first + size - 1, #workers), 1, {})
      for _, worker in ipairs(part) do
        running[worker] = true
      end
      if not options.work(fleet:select(part), on_result):ok() or stopped then
        table.move(workers, first + size, #workers, 1, never)
        return
      end
    end
  end
  local function end_on(list)
    if not options.mark or #list == 0 then
      return
    end
    for _, result in ipairs(end_commands(fleet:select(list), options.mark)) do
      if result.err or result.code ~= 0 then
        context.progress:say(
          "%s: the command may live on: %s",
          nodeset.fold({ result.worker }),
          results_of.describe(result)
        )
      end
    end
  end
  local function until_stopped()
    stop:wait()
    local list = still_running()
    context.progress:say("Stopping %s", nodeset.fold(list))
    end_on(list)
    task.sleep(LAST_WORDS) -- their ends are on the way; when all have come nobody waits
  end
  local function until_vain()
    failed:wait()
    task.sleep(options.company)
    vain = still_running()
    end_on(vain)
    task.sleep(LAST_WORDS)
  end
  -- What was running when the stop came was stopped, also when it has ended of it meanwhile.
  task.race({ all_batches, until_stopped, options.company and until_vain or nil })
  end_on(late)
  local list = {}
  for _, worker in ipairs(workers) do
    list[#list + 1] = ended[worker]
  end
  return {
    results = results_of.new(list),
    never = never,
    vain = vain,
    running = still_running(),
    stopped = stopped,
  }
end

--- Says what went wrong, and what the recipe ends with.
---@param done ciranda.run.Fan
---@param progress ciranda.cli.Progress
---@return { status: integer, kind: string, message: string? }
function M.conclude(done, progress)
  local groups, order = {}, {}
  for _, result in ipairs(done.results:failures()) do
    local why = results_of.describe(result)
    if not groups[why] then
      groups[why] = {}
      order[#order + 1] = why
    end
    table.insert(groups[why], result.worker)
  end
  local total = #done.results + #done.never + #done.running
  for _, why in ipairs(total > 1 and order or {}) do
    progress:say("%s: %s", nodeset.fold(groups[why]), why)
  end
  if #done.never > 0 then
    progress:say(
      "Never ran%s: %s",
      done.stopped and "" or ", since a batch before failed",
      nodeset.fold(done.never)
    )
  end
  if done.stopped then
    local status = STATUS[done.stopped]
    return {
      status = status,
      kind = "interrupted",
      message = ("interrupted: stopped by %s, exit status %d"):format(done.stopped, status),
    }
  end
  local first = done.results:failures()[1]
  if not first then
    return { status = 0, kind = "done" }
  end
  if first.err and first.err.phase == "exec" and first.err.code == "timeout" then
    return { status = 124, kind = "deadline", message = "deadline: a command took too long, exit status 124" }
  end
  local status = done.results:status()
  local own = first.err and err.is(first.err, table.unpack(FILES)) or first.code or first.signal
  local kind = own and "user" or "infra"
  return {
    status = status,
    kind = kind,
    message = ("%s: %d of %d workers failed; slice %d worker %d: %s"):format(
      kind,
      #done.results:failures(),
      total,
      first.worker.slice,
      first.worker.index,
      results_of.describe(first)
    ),
  }
end

return M
