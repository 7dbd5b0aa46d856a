--- Staging: everything an attempt needs on its worker, so that one small command starts it.
--
-- Two short commands and, the first time, the guard and the bundle: what is there already is not sent. Every step
-- may be done again after a lost connection; what arrives is checked there (size, SHA-256) and takes its name by
-- rename. Scripts are one line for `sh -c`, whatever the login shell is.
local err = require("ciranda.io.error")
local link_of = require("ciranda.fleet.link")
local tar = require("ciranda.fleet.tar")
local uv = require("luv")

local M = {}

--- Where everything of ours is on a worker, below the login directory.
M.ROOT = require("ciranda.fleet.signal").ROOT

--- Bundles kept on a worker, newest first; the others make room.
local BUNDLES_KEPT = 3
--- Seconds that unpacking may take.
local UNPACK = 600
--- Seconds between TERM and KILL for an earlier attempt that is still running.
local EARLIER_GRACE = 30

local PROBE = [[
umask 022;
mkdir -p {root}/bin {root}/bundles {root}/{run} && chmod 700 {root} || exit 1;
echo ciranda-probe;
echo "now=$(date +%s.%N)";
echo "machine=$(uname -m)";
[ -x {guard} ] && echo "guard=$(wc -c < {guard})";
[ -f {bundle} ] && echo "bundle=yes";
[ -d {path} ] && echo "attempt=yes";
df -Pk . | { read -r _; read -r _ _ _ free _; echo "free_kb=$free"; };
for started in {root}/*/*/started; do
attempt=${started%/started};
if [ -d "$started" ] && [ ! -e "$attempt/exit" ] && [ ! -e "$attempt/forgotten" ] && [ "$attempt" != {path} ];
then echo "running=$attempt"; fi;
done;
exit 0]]

local STORE_GUARD = [[
umask 077; cat > {part} && [ $(wc -c < {part}) -eq {size} ] && chmod 700 {part} && mv -f {part} {guard}
|| { rm -f {part}; echo "the file that arrived is not whole" >&2; exit 1; }]]

-- The hash is taken there: what was stored is what counts.
local STORE_BUNDLE = [[
if [ "$(sha256sum < {part} | cut -c1-64)" = {sha256} ]; then mv -f {part} {bundle};
else rm -f {part}; echo "the bundle that arrived is not the one that was sent" >&2; exit 1; fi;
cd {root}/bundles && ls -t | grep "tar[.]gz$" | tail -n +{first_old} | xargs rm -f]]

local PLACE_EXISTING = [[
[ -d {directory} ] || { echo "there is no directory ~/{directory} (USE_EXISTING_FOLDER)" >&2; exit 1; };]]

local PLACE_NEW = [[
mkdir -p {directory} || exit 1;]]

local PLACE_BUNDLE = [[
tar -xzpf {bundle} --no-same-owner -C {directory} || exit 1;]]

-- The attempt's directory appears whole, by rename; a second time it is there already.
local PLACE_ATTEMPT = [[
umask 077;
[ -d {path} ] || { rm -rf {new} && mkdir {new} && tar -xf - -C {new} && mv {new} {path}; } || exit 1;
[ "$(cat {path}/worker)" = "{worker}" ] || {
echo "this home directory is also that of $(cat {path}/worker); every worker needs its own" >&2; exit 1; }]]

--- Fills `{name}` in a template and makes one line of it (csh cannot have a newline inside quotes).
---@param template string
---@param values table<string, any>
---@return string
local function fill(template, values)
  return (
    template
      :gsub("{(%l[%l%d_]*)}", function(name)
        return tostring(values[name])
      end)
      :gsub("\n", " ")
  )
end

---@return number seconds since 1970
local function wall()
  local seconds, microseconds = uv.gettimeofday()
  return seconds + microseconds / 1e6
end

---@param attempt ciranda.run.Attempt
---@return string
local function owner_of(attempt)
  return ("slice %d worker %d"):format(attempt.worker.slice, attempt.worker.index)
end

--- What the templates name.
---@param attempt ciranda.run.Attempt
---@return table<string, any>
local function names(attempt)
  local bundle = attempt.bundle
  return {
    root = M.ROOT,
    run = attempt.run,
    path = attempt.path,
    new = attempt.path .. "." .. attempt.part,
    guard = attempt.guard_path,
    bundle = ("%s/bundles/%s.tar.gz"):format(M.ROOT, bundle and bundle.archive_sha256 or "none"),
    directory = attempt.directory,
    worker = owner_of(attempt),
  }
end

--- Asks the worker what is there, and makes our directories.
---@param attempt ciranda.run.Attempt
---@return table<string, string> facts, string[] running paths of earlier attempts that have not ended
local function probe(attempt)
  local sent = wall()
  local answer = attempt:expect(attempt:shell(fill(PROBE, names(attempt))), "looking around")
  local received = wall()
  local facts, running = {}, {}
  -- A shell's start-up file may print things of its own before the marker.
  local text = answer.stdout:match("ciranda%-probe\n(.*)$") or ""
  for name, value in text:gmatch("(%l[%l_]*)=([^\n]*)") do
    if name == "running" then
      running[#running + 1] = value
    else
      facts[name] = value
    end
  end
  local there = tonumber(facts.now)
  if there then
    attempt.clock_offset = there - (sent + received) / 2
  end
  return facts, running
end

---@param attempt ciranda.run.Attempt
local function push_guard(attempt)
  local values = names(attempt)
  values.part, values.size = attempt.guard_path .. "." .. attempt.part, #attempt.guard.bytes
  local answer = attempt:shell(fill(STORE_GUARD, values), { stdin = attempt.guard.bytes })
  attempt:expect(answer, "sending the guard")
end

---@param attempt ciranda.run.Attempt
local function push_bundle(attempt)
  local values = names(attempt)
  values.part = values.bundle .. "." .. attempt.part
  values.sha256 = attempt.bundle.archive_sha256
  values.first_old = BUNDLES_KEPT + 1
  attempt.link:use(function(connection)
    connection:put(attempt.bundle.archive, values.part, { mode = 384 })
  end)
  attempt:expect(attempt:shell(fill(STORE_BUNDLE, values)), "storing the bundle")
end

--- The attempt's directory as a tar archive: command, environment, cwd, and whose it is.
---@param attempt ciranda.run.Attempt
---@return string
local function directory_archive(attempt)
  local variables = {}
  for name, value in pairs(attempt.environment) do
    variables[#variables + 1] = name .. "=" .. value .. "\0"
  end
  table.sort(variables)
  local pieces = {}
  for _, file in ipairs({
    { "command", attempt.command .. "\n" },
    { "cwd", attempt.directory .. "\n" },
    { "environment", table.concat(variables) },
    { "worker", owner_of(attempt) .. "\n" },
  }) do
    local entry = { path = file[1], type = "file", mode = 384, size = #file[2], mtime = os.time() }
    pieces[#pieces + 1] = tar.header(entry) .. file[2] .. tar.padding(#file[2])
  end
  return table.concat(pieces) .. tar.trailer()
end

--- Unpacks the bundle over what is there and makes the attempt's directory.
---@param attempt ciranda.run.Attempt
local function place(attempt)
  local script = (attempt.use_existing and PLACE_EXISTING or PLACE_NEW)
    .. (attempt.bundle and PLACE_BUNDLE or "")
    .. PLACE_ATTEMPT
  local answer =
    attempt:shell(fill(script, names(attempt)), { stdin = directory_archive(attempt), timeout = UNPACK })
  attempt:expect(answer, "making the attempt")
end

--- Refuses a worker that cannot take the attempt.
---@param attempt ciranda.run.Attempt
---@param facts table<string, string>
local function check(attempt, facts)
  local title = link_of.title(attempt.worker)
  local function refuse(code, format, ...)
    err.raise({ code = code, op = "stage", target = title, message = format:format(title, ...) })
  end
  if facts.machine and facts.machine ~= "x86_64" and not os.getenv("CIRANDA_GUARD") then
    refuse(
      "unsupported",
      "%s is a %s machine, and the guard that this program carries is for x86_64; let CIRANDA_GUARD name one for it",
      facts.machine
    )
  end
  local needed = attempt.bundle and (attempt.bundle.size + attempt.bundle.archive_size) // 1024 or 0
  local free = math.tointeger(tonumber(facts.free_kb))
  if free and free < needed then
    refuse("no_space", "%s has %d MB of disk left, and the bundle needs %d MB", free // 1024, needed // 1024)
  end
end

---@param attempt ciranda.run.Attempt
---@param facts table<string, string>
local function provide_guard(attempt, facts)
  if math.tointeger(tonumber(facts.guard)) ~= #attempt.guard.bytes then
    attempt:set_phase("sending the guard")
    push_guard(attempt)
  end
end

--- Finds an attempt that was staged earlier, by a runner that may have carried another guard. Stages nothing.
---@param attempt ciranda.run.Attempt
---@return boolean there
function M.rejoin(attempt)
  attempt:set_phase("connecting")
  attempt.link:connection()
  attempt:set_phase("looking around")
  local facts = probe(attempt)
  if facts.attempt ~= "yes" then
    return false
  end
  provide_guard(attempt, facts)
  attempt:set_phase("staged")
  return true
end

--- Stages an attempt.
---@param attempt ciranda.run.Attempt
-- Raises what connecting raises; "no_space", "permission", "unsupported", "failed" with the worker's own words.
function M.stage(attempt)
  attempt:set_phase("connecting")
  attempt.link:connection()
  attempt:set_phase("looking around")
  local facts, running = probe(attempt)
  check(attempt, facts)
  provide_guard(attempt, facts)
  for _, path in ipairs(running) do
    attempt:set_phase(("ending the earlier attempt %s"):format(path))
    attempt:end_earlier(path, EARLIER_GRACE)
  end
  if attempt.bundle and facts.bundle ~= "yes" then
    attempt:set_phase(("sending the bundle (%d kB)"):format(attempt.bundle.archive_size // 1000))
    push_bundle(attempt)
  end
  attempt:set_phase("making the attempt")
  place(attempt)
  attempt:set_phase("staged")
end

return M
