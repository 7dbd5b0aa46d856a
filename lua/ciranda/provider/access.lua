--- Login to cloud workers: the key, the user, and the key's way into the nodes' metadata.
--
-- A key may be let in by the project's metadata, by a node's, or by OS Login; which one holds is known only when one
-- has knocked. So one worker is tried first, and only when it refuses the key is it added to the nodes.
local accounts = require("ciranda.io.account")
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")

local M = {}

--- Seconds that a new key may take to reach the workers (gcloud tries ten times at 5 s), and between two tries.
M.PROPAGATION, M.PAUSE = 60, 2

--- The user that logs in: CIRANDA_SSH_USER, else the local user's name, as gcloud has it.
---@param given string?
---@return string
function M.user(given)
  local user = given or os.getenv("CIRANDA_SSH_USER")
  if not user or user == "" then
    user = accounts.user()
  end
  return user
end

--- The key that logs in to cloud workers: the file given, else gcloud's, which is made when it is not there.
---@async
---@param given string? path of a private key
---@return string path, string public the public line
function M.key(given)
  return ssh.ensure_key(given)
end

--- The metadata of the first slice that says something about OS Login, else of the first.
local function node_metadata(slices)
  local os_login = require("ciranda.gcp.os_login")
  for _, slice in ipairs(slices) do
    if os_login.said(slice.metadata) ~= nil then
      return slice.metadata
    end
  end
  return slices[1] and slices[1].metadata
end

--- Imports the key into the account's OS Login profile, and has the fleet log in as the user that it names.
---@return string user the profile's
local function import(options, note)
  local user, account = require("ciranda.gcp.os_login").import(options.tpu, options.public)
  note(("OS Login is on: the key belongs to %s now"):format(account))
  if not options.user_given and user ~= options.user then
    note(("Logging in as %s, which OS Login calls %s"):format(user, account))
    options.fleet:log_in_as(user)
    options.user = user
  end
  return user
end

--- Makes sure that the key is let in everywhere: tries one worker, and when it refuses the key adds it to the metadata
--- of the nodes that do not have it, or, where OS Login is on, to the account's profile; then waits until the workers
--- let it in. Where the nodes' own metadata turns OS Login on, the key is imported first.
---@async
---@param options { tpu: ciranda.gcp.Tpu, fleet: ciranda.Fleet, user: string, user_given: boolean?, public: string,
---  on_note: fun(text: string)? } user_given: OS Login must not choose another
---@return string user who logs in
-- Raises "auth" when that worker refuses the key all the same; what connecting to it and the API's calls raise
-- otherwise.
function M.ensure(options)
  local os_login = require("ciranda.gcp.os_login")
  local fleet = options.fleet
  local first = fleet:workers()[1]
  local link = fleet:link(first)
  local note = options.on_note or function() end
  local metadata = node_metadata(fleet.slices)
  local known_as
  if os_login.said(metadata) == true then
    known_as = import(options, note)
  end
  local ok, problem = pcall(link.connection, link)
  if ok then
    return options.user
  elseif not err.is(problem, "auth") then
    error(problem, 0)
  end
  if not known_as and os_login.enabled(options.tpu, metadata) then
    known_as = import(options, note)
  elseif not known_as then
    note(
      ("The workers do not know the key yet: adding it to the nodes' metadata (user %s)"):format(options.user)
    )
    task.map(fleet.slices, function(slice)
      options.tpu:add_ssh_keys(slice.name, { options.user .. ":" .. options.public })
    end, 16)
  end
  if known_as and known_as ~= options.user then
    problem.message = ("%s; OS Login lets this key in as %s, not as %s"):format(
      problem.message,
      known_as,
      options.user
    )
    error(problem, 0)
  end
  local deadline = clock.now() + M.PROPAGATION
  local function knock(at)
    while true do
      local let_in, why = pcall(at.connection, at)
      if let_in or not err.is(why, "auth") or clock.now() > deadline then
        return let_in, why
      end
      task.sleep(M.PAUSE)
    end
  end
  ok, problem = knock(link)
  if not ok then
    error(problem, 0)
  end
  -- The others hear of the key each in its own time. What else keeps one from us is told by whoever wants it.
  task.map(fleet:workers(), function(worker)
    local let_in, why = knock(fleet:link(worker))
    if not let_in and err.is_fatal(why) then
      error(why, 0)
    end
  end)
  return options.user
end

return M
