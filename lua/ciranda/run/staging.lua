--- Staging: everything an attempt needs on its worker, so that one small command starts it.
--
-- Two commands and, the first time, the guard: what is there already is not sent. Every step may be done again after a
-- lost connection; what arrives is checked there (size, SHA-256) and takes its name by rename. Scripts are one line for
-- `sh -c`, whatever the login shell is.
local err = require("ciranda.io.error")
local link_of = require("ciranda.fleet.link")
local tar = require("ciranda.fleet.tar")
local uv = require("luv")

local M = {}

--- Where everything of ours is on a worker, below the login directory.
M.ROOT = require("ciranda.fleet.signal").ROOT

--- Bundles kept on a worker, newest first; the others make room.
local BUNDLES_KEPT = 3
--- Bytes of an archive that are read at once, and the size up to which an archive is kept in memory for all workers.
local PIECE, SHARED = 262144, 67108864
--- Seconds that unpacking may take, and the bytes a second that at least are sent.
local UNPACK, SLOWEST = 600, 10000
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

-- Everything comes in one archive. A name with the shell's pid: a try that was cut off may still be ending there.
local RECEIVE = [[
before=$(umask); umask 077; new={new}.$$; trap "rm -rf $new" EXIT; trap "exit 1" HUP INT TERM; rm -rf {new}.*;
mkdir $new && tar -xf - -C $new || exit 1;]]

-- The hash is taken there: what was stored is what counts.
local STORE_BUNDLE = [[
[ "$(sha256sum < $new/bundle | cut -c1-64)" = {sha256} ] || {
echo "the bundle that arrived is not the one that was sent" >&2; exit 1; };
mv -f $new/bundle {bundle} || exit 1;
(cd {root}/bundles && ls -t | grep "tar[.]gz$" | tail -n +{first_old} | xargs rm -f);]]

local PLACE_EXISTING = [[
umask $before;
[ -d {directory} ] || { echo "there is no directory ~/{directory} (USE_EXISTING_FOLDER)" >&2; exit 1; };]]

local PLACE_NEW = [[
umask $before;
mkdir -p {directory} || exit 1;]]

local PLACE_BUNDLE = [[
tar -xzpf {bundle} --no-same-owner -C {directory} || exit 1;]]

-- The attempt's directory appears whole, by rename; a second time it is there already.
local PLACE_ATTEMPT = [[
[ -d {path} ] || mv $new {path} || exit 1;
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

--- A file of the archive that is sent, up to its bytes.
---@param path string
---@param size integer
---@return string
local function file_header(path, size)
  return tar.header({ path = path, type = "file", mode = 384, size = size, mtime = os.time() })
end

--- The attempt's directory as a tar archive without its end: command, environment, cwd, and whose it is.
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
    pieces[#pieces + 1] = file_header(file[1], #file[2]) .. file[2] .. tar.padding(#file[2])
  end
  return table.concat(pieces)
end

-- Pieces of archives by offset: a fleet's workers all get the same ones.
local archives = setmetatable({}, { __mode = "k" })

--- A piece of the bundle's archive.
---@param bundle ciranda.archive.Manifest
---@param offset integer
---@return string
local function archive_piece(bundle, offset)
  local kept = archives[bundle] or {}
  archives[bundle] = kept
  if kept[offset] then
    return kept[offset]
  end
  local size = math.min(PIECE, bundle.archive_size - offset)
  local bytes, problem
  local fd, message = uv.fs_open(bundle.archive, "r", 0)
  if fd then
    bytes, problem = uv.fs_read(fd, size, offset)
    uv.fs_close(fd)
  end
  if not bytes or #bytes ~= size then
    err.raise({
      code = "invalid",
      op = "stage",
      target = bundle.archive,
      message = ("the archive %s cannot be read as it was written: %s"):format(
        bundle.archive,
        message or problem or "it has become shorter"
      ),
    })
  end
  if bundle.archive_size <= SHARED then
    kept[offset] = bytes
  end
  return bytes
end

--- What the worker is sent: the attempt's directory, and in it the bundle where that is not there yet.
---@param attempt ciranda.run.Attempt
---@param with_bundle boolean
---@return string|fun(): string? stdin
local function archive_of(attempt, with_bundle)
  local directory = directory_archive(attempt)
  if not with_bundle then
    return directory .. tar.trailer()
  end
  local bundle = attempt.bundle
  local size = bundle.archive_size
  local offset, ended
  return function()
    if not offset then
      offset = 0
      return directory .. file_header("bundle", size)
    elseif offset < size then
      local bytes = archive_piece(bundle, offset)
      offset = offset + #bytes
      return bytes
    elseif not ended then
      ended = true
      return tar.padding(size) .. tar.trailer()
    end
    return nil
  end
end

--- Unpacks the bundle, sent or kept, over what is there and makes the attempt's directory.
---@param attempt ciranda.run.Attempt
---@param with_bundle boolean the bundle has to be sent
local function place(attempt, with_bundle)
  local values = names(attempt)
  values.sha256 = attempt.bundle and attempt.bundle.archive_sha256
  values.first_old = BUNDLES_KEPT + 1
  local script = RECEIVE
    .. (with_bundle and STORE_BUNDLE or "")
    .. (attempt.use_existing and PLACE_EXISTING or PLACE_NEW)
    .. (attempt.bundle and PLACE_BUNDLE or "")
    .. PLACE_ATTEMPT
  local answer = attempt:shell(fill(script, values), {
    stdin = archive_of(attempt, with_bundle),
    timeout = UNPACK + (with_bundle and attempt.bundle.archive_size / SLOWEST or 0),
  })
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
  local with_bundle = attempt.bundle ~= nil and facts.bundle ~= "yes"
  attempt:set_phase(
    with_bundle and ("sending the bundle (%d kB)"):format(attempt.bundle.archive_size // 1000)
      or "making the attempt"
  )
  place(attempt, with_bundle)
  attempt:set_phase("staged")
end

return M
