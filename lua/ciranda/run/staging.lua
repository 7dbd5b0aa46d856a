--- Staging: everything an attempt needs on its worker, so that one small command starts it.
--
-- Two commands and, the first time, the guard: what is there already is not sent. Every step may be done again after a
-- lost connection; what arrives is checked there (size, SHA-256) and takes its name by rename. What is looked at before
-- is in `probe`, what is refused in `checks` and `holders`.
local checks = require("ciranda.run.checks")
local err = require("ciranda.io.error")
local holders = require("ciranda.run.holders")
local probe = require("ciranda.run.probe")
local tar = require("ciranda.fleet.tar")
local uv = require("luv")
local worker_script = require("ciranda.run.worker_script")

local M = {}

--- Where everything of ours is on a worker, below the login directory.
M.ROOT = require("ciranda.fleet.signal").ROOT
--- Where the SETUPs are, by hash; no run can have this name.
M.SETUP = M.ROOT .. "/.setup"

--- Bundles kept on a worker, newest first; the others make room.
local BUNDLES_KEPT = 3
--- Bytes of an archive that are read at once, and the size up to which an archive is kept in memory for all workers.
local PIECE, SHARED = 262144, 67108864
--- Seconds that unpacking may take, and the bytes a second that at least are sent.
local UNPACK, SLOWEST = 600, 10000
--- Seconds between TERM and KILL for an earlier attempt that is still running.
local EARLIER_GRACE = 30

-- What arrives, until it is whole. A name with the shell's pid: a try that was cut off may still be ending there. A
-- signal that comes to all processes of the session (a machine that shuts down) must not end the `rm` as well.
local NEW = [[
umask 077; new={new}.$$; trap "trap \"\" HUP INT TERM; rm -rf $new" EXIT; trap "exit 1" HUP INT TERM;
rm -rf {new}.*;
]]

local STORE_GUARD = NEW
  .. [[
cat > $new && [ $(wc -c < $new) -eq {size} ] && chmod 700 $new && mv -f $new {guard}
|| { echo "the file that arrived is not whole" >&2; exit 1; }]]

-- Everything comes in one archive.
local RECEIVE = "before=$(umask); " .. NEW .. [[
mkdir $new && tar -xf - -C $new || exit 1;]]

-- The hash is taken there: what was stored is what counts. The newest is told by that machine's clock, not by ours.
local STORE_BUNDLE = [[
[ "$(sha256sum < $new/bundle)" = "{sha256}  -" ] || {
echo "the bundle that arrived is not the one that was sent" >&2; exit 1; };
touch $new/bundle && mv -f $new/bundle {bundle} || exit 1;
(cd {root}/bundles && set -- *.tar.gz && [ $# -ge {first_old} ] && rm -f $(ls -t *.tar.gz | tail -n +{first_old}));]]

local PLACE_EXISTING = [[
umask $before;
[ -d {directory} ] || { echo "there is no directory ~/{directory} (USE_EXISTING_FOLDER)" >&2; exit 1; };]]

local PLACE_NEW = [[
umask $before;
mkdir -p {directory} || exit 1;]]

local PLACE_BUNDLE = [[
tar -xzpf {bundle} --no-same-owner -C {directory} || exit 1;]]

local DROP_SETUP = [[
rm -rf {setup};]]

local PLACE_SETUP = [[
mkdir -p {setup_parent} || exit 1; [ -d {setup} ] || mv $new/setup {setup} || exit 1; rm -rf $new/setup;]]

-- The guard touches `alive` as long as the command runs: so it keeps the lease alive.
local PLACE_LEASE = [[
ln -s $mine $new/alive;]]

-- The attempt's directory appears whole, by rename; a second time it is there already.
local PLACE_ATTEMPT = [[
[ -d {path} ] || mv $new {path} || exit 1;
[ "$(cat {path}/worker)" = "{worker}" ] || {
echo "this home directory is also that of $(cat {path}/worker); every worker needs its own" >&2; exit 1; }]]

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
    setup_parent = M.SETUP,
    setup = M.SETUP .. "/" .. (attempt.setup and attempt.setup.hash or "none"),
  }
end

---@param attempt ciranda.run.Attempt
local function push_guard(attempt)
  local values = names(attempt)
  -- Whoever looks for the newest guard (`guard-*`) must not find one that is still on its way.
  values.new, values.size = ("%s/bin/%s"):format(M.ROOT, attempt.part), attempt.guard.size
  local answer = attempt:shell(worker_script.fill(STORE_GUARD, values), { stdin = attempt.guard.bytes })
  attempt:expect(answer, "sending the guard")
end

-- Headers by path and size, of one second: a fleet's workers get the same ones.
local headers, headers_of = {}, 0

--- A file of the archive that is sent, up to its bytes.
---@param path string
---@param size integer
---@return string
local function file_header(path, size)
  local now, key = os.time(), path .. " " .. size
  if now ~= headers_of then
    headers, headers_of = {}, now
  end
  headers[key] = headers[key]
    or tar.header({ path = path, type = "file", mode = 384, size = size, mtime = now })
  return headers[key]
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
  local function add(prefix, command)
    for _, file in ipairs({
      { "command", command .. "\n" },
      { "cwd", attempt.directory .. "\n" },
      { "environment", table.concat(variables) },
      { "worker", owner_of(attempt) .. "\n" },
    }) do
      pieces[#pieces + 1] = file_header(prefix .. file[1], #file[2]) .. file[2] .. tar.padding(#file[2])
    end
  end
  add("", attempt.command)
  if attempt.setup then
    add("setup/", attempt.setup.command)
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
  local fd, message = bundle.archive_fd, nil
  if not fd then
    fd, message = uv.fs_open(bundle.archive, "r", 0)
  end
  if fd then
    bytes, problem = uv.fs_read(fd, size, offset)
  end
  if fd and fd ~= bundle.archive_fd then
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

--- Unpacks the bundle, sent or kept, over what is there and makes the attempt's directory, and that of its SETUP.
---@param attempt ciranda.run.Attempt
---@param with_bundle boolean the bundle has to be sent
---@param drop_setup boolean what there is of its SETUP has failed
local function place(attempt, with_bundle, drop_setup)
  local values = names(attempt)
  values.sha256 = attempt.bundle and attempt.bundle.archive_sha256
  values.first_old = BUNDLES_KEPT + 1
  local script = (attempt.lease and worker_script.LOCATE or "")
    .. RECEIVE
    .. (with_bundle and STORE_BUNDLE or "")
    .. (attempt.use_existing and PLACE_EXISTING or PLACE_NEW)
    .. (attempt.bundle and PLACE_BUNDLE or "")
    .. (drop_setup and DROP_SETUP or "")
    .. (attempt.setup and PLACE_SETUP or "")
    .. (attempt.lease and PLACE_LEASE or "")
    .. PLACE_ATTEMPT
  local answer = attempt:shell(worker_script.fill(script, values), {
    stdin = archive_of(attempt, with_bundle),
    timeout = UNPACK + (with_bundle and attempt.bundle.archive_size / SLOWEST or 0),
  })
  attempt:expect(answer, "making the attempt")
end

---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
local function provide_guard(attempt, facts)
  if math.tointeger(tonumber(facts.guard)) ~= attempt.guard.size then
    attempt:set_phase("sending the guard")
    push_guard(attempt)
  end
end

--- Finds an attempt that was staged earlier, by a runner that may have carried another guard. Stages nothing; takes the
--- lease, unless another run has got it since.
---@param attempt ciranda.run.Attempt
---@return boolean there
function M.rejoin(attempt)
  attempt:set_phase("connecting")
  attempt.link:connection()
  attempt:set_phase("looking around")
  local facts = probe.run(attempt, names(attempt), "join")
  if facts.attempt ~= "yes" then
    return false
  end
  provide_guard(attempt, facts)
  attempt:set_phase("staged")
  return true
end

--- Connects, takes the lease and looks around: the first half of staging, after which the worker is ours.
---@param attempt ciranda.run.Attempt
-- Raises what connecting raises; "busy" with `held` when another run has the worker.
function M.claim(attempt)
  attempt:set_phase("connecting")
  attempt.link:connection()
  attempt:set_phase("looking around")
  attempt.facts = probe.run(attempt, names(attempt), "take")
  attempt.claimed = true
end

--- Ends what earlier attempts of ours still run, and what else may be ended of those who hold the accelerators.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
local function make_free(attempt, facts)
  for _, path in ipairs(facts.running) do
    attempt:set_phase(("ending the earlier attempt %s"):format(path))
    attempt:end_earlier(path, EARLIER_GRACE)
  end
  if #facts.holders > 0 then
    attempt:set_phase("waiting for the accelerators")
    facts.lock_file = holders.free(attempt, M.ROOT, attempt.kill)
    checks.lock_file(attempt, facts)
  end
end

--- What there is of the attempt's SETUP.
---@param attempt ciranda.run.Attempt
---@param facts ciranda.run.Facts
---@return boolean done, boolean drop it has failed, and is done again
local function setup_state(attempt, facts)
  if not attempt.setup or not facts.setup or facts.setup == "running" then
    return false, false
  end
  local status = facts.setup:match('"status":(%d+)')
  if facts.setup == "stale" then
    attempt:end_earlier(names(attempt).setup, EARLIER_GRACE)
  end
  -- One that was stopped has not done its work, whatever its status.
  local done = status == "0" and not facts.setup:find('"stopped":true', 1, true)
  return done, not done
end

--- Stages an attempt.
---@param attempt ciranda.run.Attempt
-- Raises what `claim` raises; "no_space", "permission", "unsupported", "precondition", "busy", "failed" with the
-- worker's own words.
function M.stage(attempt)
  if not attempt.claimed then
    M.claim(attempt)
  end
  attempt.claimed = false -- when the connection breaks from here on, all is looked at anew
  local facts = attempt.facts
  checks.worker(attempt, facts)
  holders.check(attempt, facts, attempt.kill)
  provide_guard(attempt, facts)
  make_free(attempt, facts)
  local with_bundle = attempt.bundle ~= nil and facts.bundle ~= "yes"
  local done, drop = setup_state(attempt, facts)
  attempt.setup_done = done
  attempt:set_phase(
    with_bundle and ("sending the bundle (%d kB)"):format(attempt.bundle.archive_size // 1000)
      or "making the attempt"
  )
  place(attempt, with_bundle, drop)
  attempt:set_phase("staged")
end

--- Asks again for the versions on a worker, which its SETUP may have changed.
---@param attempt ciranda.run.Attempt
function M.fingerprint(attempt)
  probe.fingerprint(attempt, names(attempt), attempt.facts)
end

return M
