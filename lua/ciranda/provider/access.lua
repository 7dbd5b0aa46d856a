--- Login to cloud workers: the key, the user, and the key's way into the nodes' metadata.
--
-- A key may be let in by the project's metadata, by a node's, or by OS Login; which one holds is known only when one
-- has knocked. So one worker is tried first, and only when it refuses the key is it added to the nodes.
local err = require("ciranda.io.error")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Seconds that a new key may take to reach the workers: gcloud tries ten times at 5 s.
local PROPAGATION = 60
local PAUSE = 2

--- The user that logs in: CIRANDA_SSH_USER, else the local user's name, as gcloud has it.
---@param given string?
---@return string
function M.user(given)
  local user = given or os.getenv("CIRANDA_SSH_USER")
  if not user or user == "" then
    user = os.getenv("USER") or os.getenv("LOGNAME") or uv.os_get_passwd().username
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

--- Makes sure that the key is let in everywhere: tries one worker, and when it refuses the key adds it to the metadata
--- of the nodes that do not have it, and waits until that worker lets it in.
---@async
---@param options { tpu: ciranda.gcp.Tpu, fleet: ciranda.Fleet, user: string, public: string,
---  on_note: fun(text: string)? }
-- Raises "auth" when the key is refused all the same; what connecting raises otherwise.
function M.ensure(options)
  local fleet = options.fleet
  local first = fleet:workers()[1]
  local link = fleet:link(first)
  local ok, problem = pcall(link.connection, link)
  if ok then
    return
  elseif not err.is(problem, "auth") then
    error(problem, 0)
  end
  local note = options.on_note or function() end
  note(
    ("The workers do not know the key yet: adding it to the nodes' metadata (user %s)"):format(options.user)
  )
  task.map(fleet.slices, function(slice)
    options.tpu:add_ssh_keys(slice.name, { options.user .. ":" .. options.public })
  end, 16)
  local deadline = uv.hrtime() / 1e9 + PROPAGATION
  while true do
    ok, problem = pcall(link.connection, link)
    if ok then
      return
    elseif not err.is(problem, "auth") or uv.hrtime() / 1e9 > deadline then
      error(problem, 0)
    end
    task.sleep(PAUSE)
  end
end

return M
