--- A runner that goes on without its terminal: it runs under the guard on this machine, and one that crashed is started
--- again as `attach`.
local engine = require("ciranda.core.engine")
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local local_guard = require("ciranda.run.local_guard")
local runs = require("ciranda.run.runs")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- How often a runner that ended before its run is taken up again.
local AGAIN = 3
--- Bytes of the runner's own output that are kept at least.
local KEEP = 64 << 20
--- Seconds between two looks at how far it has got, and for a stop while it is still staging.
local LOOK, GRACE = 0.2, 60

-- A run whose state is "detached" is on its workers and has no runner. Who left it on purpose (129) leaves it.
local SCRIPT = [[
{runner}
code=$?
again=0
while [ $code -ne 129 ] && [ $again -lt {again} ] &&
  [ "$({ciranda} runs {run} '--format=value(state)')" = detached ]; do
  again=$((again + 1))
  echo "The runner has ended before its run ($code); taking it up again, $again of {again}" >&2
  sleep $((again * again))
  {ciranda} attach {run}
  code=$?
done
exit $code
]]

--- The words of this program's command line, up to the recipe's name and from it on; without --detach.
---@return string[] before, string[] after
local function own_words()
  local before, after = { engine.executable }, nil
  local argv, place = engine.argv, 1
  while argv[place] do
    local word = argv[place]
    if word == "--sim" or word:find("^%-%-sim%-") then
      err.raise({
        code = "usage",
        message = "--detach cannot be with --sim: that simulated cloud ends with this program (ciranda sim goes on)",
      })
    elseif after and word:find("^%-%-detach") then
      local following = argv[place + 1]
      if word == "--detach" and following and not following:find("^%-") then
        place = place + 1 -- its value
      end
    elseif after then
      after[#after + 1] = word
    elseif word == "--lua-dir" or word == "--path" then
      before[#before + 1] = word
      before[#before + 1] = argv[place + 1]
      place = place + 1
    elseif word:find("^%-%-") then
      before[#before + 1] = word
    else
      after = { word }
    end
    place = place + 1
  end
  return before, after
end

--- What shows the runner's own output here, on standard error; with --json its records, but the last one, on standard
--- output.
---@param context ciranda.cli.Context
---@return fun(bytes: string) sink
---@return table last has the field `record`, the runner's last record, when that has come
local function shown(context)
  local last, rest = {}, ""
  local function sink(bytes)
    if not context.json then
      io.stderr:write(bytes)
      return
    end
    rest = (rest .. bytes):gsub("[^\n]*\n", function(line)
      local ok, record = pcall(json.decode, line)
      record = ok and type(record) == "table" and record.event and record
      if record and record.event == "end" then
        last.record = record
      elseif record then
        context.progress:event(record)
      else
        io.stderr:write(line)
      end
      return ""
    end)
  end
  return sink, last
end

--- Starts the runner that this command line means, without --detach, waits until COMMAND runs on the workers (or the
--- runner has ended), and says how to follow.
---@async
---@param context ciranda.cli.Context
---@param run string the run's name
---@param attaching boolean? it takes up a run that has been started
---@return integer status 0 when it goes on, 129 when the terminal was lost before that; the runner's own when it has
---  ended before
-- Raises "usage" with `run --sim`, "busy" when a runner has the run; what starting raises.
function M.run(context, run, attaching)
  local before, after = own_words()
  if not attaching and not context.given.RUN_NAME then
    after[#after + 1] = "--RUN_NAME=" .. run
  end
  local words = table.move(after, 1, #after, #before + 1, table.move(before, 1, #before, 1, {}))
  local script = SCRIPT:gsub("{(%l+)}", {
    runner = shell.words(words),
    ciranda = shell.words(before),
    run = shell.words({ run }),
    again = tostring(AGAIN),
  })
  -- Two programs may detach the same run within a second.
  local guarded = local_guard.named(
    ("%s-%s-%d"):format(run:sub(1, 96), os.date("%Y-%m-%d-%H-%M-%S"), math.tointeger(uv.os_getpid()))
  )
  -- Whoever has the run already is not the runner that is waited for: that one will find it taken, and end.
  local known, before_it = pcall(runs.read, run)
  local earlier = attaching and known and runs.runner(before_it)
  local began = os.time()
  -- The terminal may be lost before COMMAND runs: the runner does without it.
  local lost = task.event()
  local remove = context.on_interrupt(function(name)
    if name == "SIGHUP" then
      lost:set()
    end
    return name == "SIGHUP"
  end)
  local _ <close> = setmetatable({}, { __close = remove })
  guarded:start(script, { shell = "/bin/sh", keep = KEEP })
  local sink, last = shown(context)
  local ok, first, record = pcall(task.race, {
    function()
      return guarded:follow(0, sink)
    end,
    function()
      repeat
        task.sleep(LOOK)
        local there, state = pcall(runs.read, run)
        local open = there and runs.open_attempt(state)
        local runner = open and runs.runner(state)
      until runner
        and not (earlier and runner.id == earlier.id)
        and (attaching or (open.gone or 0) / 1e6 >= began - 1)
    end,
    function()
      lost:wait()
    end,
  })
  if not ok then
    -- Told to end while it is still staging: nothing is left behind.
    task.shield(guarded.stop, guarded, GRACE, "the program that detached it was told to end")
    error(first, 0)
  elseif first == 1 then
    local status = record and math.tointeger(record.status) or 1
    local said = last.record or { kind = status == 0 and "done" or "failed" }
    context.finish({ kind = said.kind, status = status, message = said.message })
    return status
  end
  local status = first == 3 and 129 or 0
  context.finish({
    kind = "detached",
    status = status,
    message = (
      "Detached: run %s goes on under a guard of its own, and does without this terminal.\n"
      .. "  ciranda logs %s --follow   shows it; ciranda runs %s   how it stands\n"
      .. "  ciranda stop %s            saves and stops it\n"
      .. "  %s/log   is what its runner says"
    ):format(run, run, run, run, guarded.directory),
  })
  return status
end

return M
