--- Signals to what runs on the workers under our guard.
--
-- A signal over SSH is no good for this: OpenSSH's server ignores it without a word for root logins, and a shell in
-- between dies of it before the program it wraps. The guard delivers it to the programs it is meant for, and says to
-- whom.
local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local shell = require("ciranda.io.shell")
local signals = require("ciranda.fleet.signals")

local M = {}

--- Where everything of ours is on a worker, below the login directory.
M.ROOT = ".ciranda"

--- Seconds that delivering may take.
local DELIVERY = 60

-- The newest guard there speaks for all attempts. A stop returns when the attempt has ended, so all are asked at once.
local SCRIPT = [[
guard=$(ls -t {root}/bin/guard-* 2>/dev/null | head -n 1);
for started in {root}/{run}/{attempt}/started; do
attempt=${started%/started};
if [ -d "$started" ] && [ ! -e "$attempt/exit" ] && [ ! -e "$attempt/forgotten" ]; then
{ "$guard" {words} $CIRANDA_GUARD_OPTIONS | while read -r line; do echo "$attempt $line"; done; } & fi;
done; wait]]

local OPTIONS = { run = true, attempt = true, grace = true, limit = true }

---@param text string?
---@param what string
---@return string a name, or `*`
local function pattern(text, what)
  if text == nil then
    return "*"
  elseif not text:match("^[%w_][%w_.%-]*$") then
    err.misuse(4, "fleet:signal: %q is no name for %s", text, what)
  end
  return text
end

--- See `fleet:signal`.
---@async
---@param fleet ciranda.Fleet
---@param name string
---@param options { run: string?, attempt: string?, grace: number?, limit: integer? }
---@return ciranda.fleet.Results each with `attempts`: path -> what the guard says
function M.send(fleet, name, options)
  err.check_options(options, OPTIONS, "fleet:signal", 3)
  local number = type(name) == "string" and signals.number(name)
  if not number then
    err.misuse(3, "fleet:signal: %s is no signal; it is TERM, USR1, ...", tostring(name))
  end
  local short = signals.name(number):gsub("^SIG", "")
  local grace = options.grace or 300
  local is_stop = short == "TERM"
  local values = {
    root = M.ROOT,
    run = pattern(options.run, "a run"),
    attempt = pattern(options.attempt, "an attempt"),
    words = is_stop and ('stop "$attempt" --grace %.3f --reason "fleet:signal TERM"'):format(grace)
      or ('signal "$attempt" %s'):format(short),
  }
  local script = SCRIPT:gsub("{(%l+)}", values):gsub("\n", " ")
  local results = fleet:run(shell.sh(script), {
    timeout = is_stop and grace + DELIVERY or DELIVERY,
    limit = options.limit,
  })
  for _, result in ipairs(results) do
    result.attempts = {}
    for path, line in (result.stdout or ""):gmatch("(%S+) ({[^\n]*})\n") do
      local ok, value = pcall(json.decode, line)
      result.attempts[path] = ok and value or nil
    end
  end
  return results
end

return M
