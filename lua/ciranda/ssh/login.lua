--- Authentication: which keys are offered to a server, in which order.
---
--- Servers allow few attempts (OpenSSH's MaxAuthTries is 6), so the order matters: keys that were named come first,
--- each by way of the agent when that holds it; then the agent's other keys, unless only the named ones are wanted.
--- When none is named: the agent's keys, then the default files.

local agents = require("ciranda.ssh.agent")
local core = require("ciranda.core.ssh")
local errors = require("ciranda.io.error")
local keys = require("ciranda.ssh.keys")
local task = require("ciranda.task")

local M = {}

--- Keys offered on one connection; the server counts each.
M.MAX_OFFERS = 6

-- Candidates -------------------------------------------------------------------------------------------------------

---@class ciranda.ssh.Candidate
---@field blob string?                       the public key, when it is known without the private one
---@field name string                        for messages
---@field load (fun(): ciranda.ssh.Key)?     the private key; else the agent signs

--- The agent's socket that the settings mean, or nil.
local function agent_path(agent)
  if agent == false then
    return nil
  end
  local path = type(agent) == "string" and agent or os.getenv("SSH_AUTH_SOCK")
  if not path or path == "" or path == "none" then
    return nil
  end
  return keys.expand(path)
end

--- Connect to the agent. One that was asked for must be there; the environment's need not.
local function open_agent(settings)
  local path = agent_path(settings.agent)
  if not path then
    return nil, {}
  end
  local ok, agent = pcall(agents.connect, path)
  if not ok then
    if type(settings.agent) == "string" or errors.is(agent, "cancelled") then
      error(agent, 0)
    end
    return nil, {}
  end
  local good, list = pcall(agent.identities, agent)
  if not good then
    agent:close()
    if type(settings.agent) == "string" or errors.is(list, "cancelled") then
      error(list, 0)
    end
    return nil, {}
  end
  return agent, list
end

local function of_agent(identity)
  return {
    blob = identity.blob,
    name = ("%s of the agent (%s %s)"):format(
      identity.comment ~= "" and identity.comment or "a key",
      identity.type,
      core.fingerprint(identity.blob)
    ),
  }
end

local function of_file(path, passphrase)
  return {
    blob = keys.public_of(path),
    name = path,
    load = function()
      return keys.load(path, passphrase)
    end,
  }
end

local function of_key(key)
  return {
    blob = key.blob,
    name = key.path or ("a key (%s %s)"):format(key.type, core.fingerprint(key.blob)),
    load = function()
      return key
    end,
  }
end

--- The candidates, in order.
local function candidates(settings, identities)
  local list, held, used = {}, {}, {}
  for _, identity in ipairs(identities) do
    held[identity.blob] = identity
  end
  local function add(candidate)
    local identity = candidate.blob and held[candidate.blob]
    if identity then
      if used[candidate.blob] then
        return
      end
      used[candidate.blob] = true
      list[#list + 1] = of_agent(identity)
    else
      list[#list + 1] = candidate
    end
  end
  local function add_agent()
    for _, identity in ipairs(identities) do
      add(of_agent(identity))
    end
  end
  if not settings.keys then
    add_agent()
  end
  for _, key in ipairs(settings.keys or keys.default_files()) do
    add(type(key) == "string" and of_file(keys.expand(key), settings.passphrase) or of_key(key))
  end
  if settings.keys and not settings.identities_only then
    add_agent()
  end
  return list
end

-- Offers -----------------------------------------------------------------------------------------------------------

--- Authenticate with a private key.
local function offer_key(session, settings, key)
  return task.call(session.authenticate, session, {
    user = settings.user,
    key = key.handle,
    timeout = math.floor(settings.timeouts.auth * 1000),
  })
end

--- Authenticate with a signature of the agent's. The engine asks for it in a callback, where nothing may wait: a task
--- of its own asks the agent.
local function offer_agent(session, settings, agent, blob)
  local scope <close> = task.scope()
  local asked = task.event()
  local request
  scope:spawn("signature of the agent", function()
    asked:wait()
    local ok, signature = pcall(agent.sign, agent, blob, request.algorithm, request.data)
    if ok then
      request.reply(signature)
    else
      request.reply(nil, errors.text(signature):sub(1, 150))
    end
  end)
  task.call(session.authenticate, session, {
    user = settings.user,
    public = blob,
    sign = function(algorithm, data, reply)
      request = { algorithm = algorithm, data = data, reply = reply }
      asked:set()
    end,
    timeout = math.floor(settings.timeouts.auth * 1000),
  })
  scope:cancel("the server has answered")
end

local function raise(settings, err, message)
  errors.raise({
    code = err and err.code or "auth",
    phase = "auth",
    reason = err and err.reason,
    op = "ssh.connect",
    target = settings.label,
    cause = err,
    message = ("%s: %s"):format(settings.label, message),
  })
end

--- What to do when nothing was accepted.
local function give_up(session, settings, tried, left)
  if #tried == 0 then
    raise(
      settings,
      nil,
      "there is no key to log in with: name one (keys, --key, IdentityFile), add one to the agent, or make one with "
        .. "ssh-keygen"
    )
  end
  local methods
  local ok, list =
    pcall(task.call, session.auth_methods, session, settings.user, math.floor(settings.timeouts.auth * 1000))
  if ok then
    methods = list
  end
  local lines = {}
  for index, attempt in ipairs(tried) do
    lines[index] = ("%s: %s"):format(attempt.name, attempt.err.message)
  end
  local story = ("none of the keys is accepted for user %s. Tried: %s%s. The server takes: %s. "):format(
    settings.user,
    table.concat(lines, "; "),
    left > 0 and ("; not tried, because servers allow few attempts: %d more"):format(left) or "",
    methods or "no answer"
  )
  raise(
    settings,
    #tried == 1 and tried[1].err or nil,
    story
      .. "Is it the right user, and is the public key in its authorized_keys (or the project's or instance's ssh-keys)?"
  )
end

--- Log in.
---@async
---@param session userdata the engine's, its host key verified
---@param settings table of ciranda.ssh.connect
---@return string name what was accepted, for messages
--- Raises `auth`; `closed` and the like when the connection ended.
function M.authenticate(session, settings)
  local agent, identities = open_agent(settings)
  local _ <close> = agent
  local list = candidates(settings, identities)
  local tried, offered = {}, 0
  local left = 0
  for index, candidate in ipairs(list) do
    if offered == M.MAX_OFFERS then
      left = #list - index + 1
      break
    end
    local ok, err
    if candidate.load then
      local good, key = pcall(candidate.load)
      ok, err = good, key
      if good then
        offered = offered + 1
        ok, err = pcall(offer_key, session, settings, key)
      end
    else
      offered = offered + 1
      ok, err = pcall(offer_agent, session, settings, agent, candidate.blob)
    end
    if ok then
      return candidate.name
    end
    if not errors.is(err) or errors.is(err, "cancelled", "misuse", "internal") then
      error(err, 0)
    end
    if session:status() == "dead" then
      raise(
        settings,
        err,
        ("the connection ended while %s was offered: %s%s"):format(
          candidate.name,
          err.message,
          offered > 1 and " (too many keys were offered? Name the right one)" or ""
        )
      )
    end
    tried[#tried + 1] = { name = candidate.name, err = err }
  end
  -- A single named key that cannot be read is the whole story.
  if #tried == 1 and offered == 0 then
    error(tried[1].err, 0)
  end
  give_up(session, settings, tried, left)
end

return M
