--- Authentication: which keys are offered to a server, in which order.
---
--- Servers allow few attempts (OpenSSH's MaxAuthTries is 6), so the order matters: keys that were named come first, a
--- file that is encrypted by way of the agent when that holds its key; then the agent's other keys, unless only the
--- named ones are wanted. When none is named: the agent's keys, then the default files. The agent is asked only when
--- its turn comes. A key's certificates (CertificateFile, PATH-cert.pub) are offered just before the key itself, signed
--- with by whoever holds the key.

local certificates = require("ciranda.ssh.certificates")
local errors = require("ciranda.io.error")
local keys = require("ciranda.ssh.keys")
local task = require("ciranda.task")

local M = {}

--- Keys offered on one connection; the server counts each.
M.MAX_OFFERS = 6

-- The agent --------------------------------------------------------------------------------------------------------

--- The agent, connected to when it is first asked for.
---@class ciranda.ssh.LazyAgent
---@field private settings table
local LazyAgent = {}
LazyAgent.__index = LazyAgent

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

--- Its keys; none when there is no agent. One that was asked for by name must be there, the environment's need not.
---@return { blob: string, comment: string, type: string }[]
function LazyAgent:identities()
  if self.list then
    return self.list
  end
  self.list = {}
  local path = agent_path(self.settings.agent)
  if path then
    local ok, problem = pcall(function()
      self.agent = require("ciranda.ssh.agent").connect(path)
      self.list = self.agent:identities()
    end)
    if not ok and (type(self.settings.agent) == "string" or errors.is_fatal(problem)) then
      error(problem, 0)
    end
  end
  return self.list
end

--- The agent's identity of a public key, or nil.
function LazyAgent:find(blob)
  for _, identity in ipairs(blob and self:identities() or {}) do
    if identity.blob == blob then
      return identity
    end
  end
  return nil
end

function LazyAgent:close()
  if self.agent then
    self.agent:close()
  end
end

LazyAgent.__close = LazyAgent.close

local function name_of(identity)
  return ("%s of the agent (%s %s)"):format(
    identity.comment ~= "" and identity.comment or "a key",
    identity.type,
    keys.fingerprint(identity.blob)
  )
end

-- Offers -----------------------------------------------------------------------------------------------------------

local function with_key(settings, key, certificate)
  return {
    user = settings.user,
    key = key.handle,
    public = certificate,
    timeout = math.floor(settings.timeouts.auth * 1000),
  }
end

--- Authenticate with a private key, under its certificate when there is one.
local function offer_key(session, settings, certificate, key)
  return task.call(session.authenticate, session, with_key(settings, key, certificate))
end

--- Authenticate with a signature of the agent's. The engine asks for it in a callback, where nothing may wait: a task
--- of its own asks the agent.
local function offer_agent(session, settings, certificate, agent, blob)
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
    public = certificate or blob,
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

-- The attempts of one login.
local Attempts = {}
Attempts.__index = Attempts

--- The certificates of a public key that have not been offered yet: those of CertificateFile, then the one beside it.
function Attempts:certificates_of(public, beside)
  if not self.certificates then
    self.certificates = {}
    for _, path in ipairs(self.settings.certificates or {}) do
      local ok, certificate = pcall(certificates.load, keys.expand(path))
      if ok then
        table.insert(self.certificates, certificate)
      else
        self:failed(path, certificate)
      end
    end
  end
  local candidates = table.move(self.certificates, 1, #self.certificates, 1, {})
  candidates[#candidates + 1] = beside
  local list = {}
  for _, certificate in ipairs(candidates) do
    if certificate.public == public and not self.used[certificate.blob] then
      self.used[certificate.blob] = true
      list[#list + 1] = certificate
    end
  end
  return list
end

--- Offer a key under each of its certificates, then as it is. Returns whether it was accepted.
function Attempts:try_key(name, public, beside, offer, ...)
  self.used[public] = true
  for _, certificate in ipairs(self:certificates_of(public, beside)) do
    local problem = certificates.problem(certificate)
    if problem then
      self:failed(certificate.name, errors.new({ code = "auth", phase = "auth", message = problem }))
    elseif self:try(certificate.name, offer, certificate.blob, ...) then
      return true
    end
  end
  return self:try(name, offer, nil, ...)
end

--- Offer a key by calling `offer`. Returns whether it was accepted; raises when nothing else can be tried.
function Attempts:try(name, offer, ...)
  if self.offered == M.MAX_OFFERS then
    self.left = self.left + 1
    return false
  end
  self.offered = self.offered + 1
  local ok, err = pcall(offer, self.session, self.settings, ...)
  if ok then
    self.accepted = name
    return true
  end
  self:failed(name, err)
  return false
end

--- Note why a key was not accepted, or could not be offered.
function Attempts:failed(name, err)
  if errors.is_fatal(err) then
    error(err, 0)
  end
  if self.session:status() == "dead" then
    raise(
      self.settings,
      err,
      ("the connection ended while %s was offered: %s%s"):format(
        name,
        err.message,
        self.offered > 1 and " (too many keys were offered? Name the right one)" or ""
      )
    )
  end
  self.tried[#self.tried + 1] = { name = name, err = err }
end

--- Offer the key in a file.
function Attempts:try_file(path, agent)
  path = keys.expand(path)
  local passphrase = self.settings.passphrase
  local ok, key = pcall(keys.load, path, passphrase, passphrase == nil)
  if not ok and errors.is(key, "auth") and key.reason == "passphrase_needed" then
    local identity = agent:find(keys.public_of(path))
    if identity then
      return self:try_key(
        path .. " of the agent",
        identity.blob,
        keys.certificate_of(path),
        offer_agent,
        agent.agent,
        identity.blob
      )
    end
    ok, key = pcall(keys.load, path, passphrase)
  end
  if not ok then
    self:failed(path, key)
    return false
  end
  return self:try_key(path, key.blob, key.certificate, offer_key, key)
end

--- Offer the agent's keys and certificates that have not been offered yet.
function Attempts:try_agent(agent)
  for _, identity in ipairs(agent:identities()) do
    local certificate = certificates.is_type(identity.type) and certificates.parse(identity.blob, "")
    local problem = certificate and certificates.problem(certificate)
    if problem then
      self:failed(name_of(identity), errors.new({ code = "auth", phase = "auth", message = problem }))
    elseif not self.used[identity.blob] then
      if self:try_key(name_of(identity), identity.blob, nil, offer_agent, agent.agent, identity.blob) then
        return true
      end
    end
  end
  return false
end

--- The key that is offered first, when that is known without waiting, with its name.
---@param settings table of ciranda.ssh.connect
---@return ciranda.ssh.Key?
---@return string? name
local function first_key(settings)
  local first = settings.keys and settings.keys[1]
  if type(first) == "string" then
    return keys.loaded(first), keys.expand(first)
  elseif first then
    return first, first.path or ("a key (%s)"):format(first.type)
  end
  return nil
end

--- Offer the first key at once, in the engine's callback: most logins need no other, and no task need be woken for
--- it. Returns nil when the first key is not at hand, or has certificates.
---@param session userdata
---@param settings table
---@param done fun(outcome: { name: string, key: ciranda.ssh.Key, err: any? })
---@return userdata? operation
function M.begin(session, settings, done)
  local key, name = first_key(settings)
  if not key or key.certificate or (settings.certificates and settings.certificates[1]) then
    return nil
  end
  return session:authenticate(with_key(settings, key), function(err)
    done({ name = name, key = key, err = err and errors.wrap(err) })
  end)
end

--- Log in.
---@async
---@param session userdata the engine's, its host key verified
---@param settings table of ciranda.ssh.connect
---@param begun { name: string, key: ciranda.ssh.Key, err: any? }? what `begin` has found out
---@return string name what was accepted, for messages
--- Raises `auth`; `closed` and the like when the connection ended.
function M.authenticate(session, settings, begun)
  if begun and not begun.err then
    return begun.name
  end
  local agent <close> = setmetatable({ settings = settings }, LazyAgent)
  local attempts = setmetatable({
    session = session,
    settings = settings,
    tried = {},
    used = {}, -- by public key
    offered = 0,
    left = 0,
  }, Attempts)
  if begun then
    attempts.offered = 1
    attempts.used[begun.key.blob] = true
    attempts:failed(begun.name, begun.err)
  end
  local named = settings.keys
  if not named and attempts:try_agent(agent) then
    return attempts.accepted
  end
  for index, key in ipairs(named or keys.default_files()) do
    if begun and index == 1 then
      goto continue
    end
    local accepted
    if type(key) == "string" then
      accepted = attempts:try_file(key, agent)
    else
      accepted = attempts:try_key(
        key.path or ("a key (%s)"):format(key.type),
        key.blob,
        key.certificate,
        offer_key,
        key
      )
    end
    if accepted then
      return attempts.accepted
    end
    ::continue::
  end
  if named and not settings.identities_only and attempts:try_agent(agent) then
    return attempts.accepted
  end
  -- A single named key that cannot be read is the whole story.
  if #attempts.tried == 1 and attempts.offered == 0 then
    error(attempts.tried[1].err, 0)
  end
  give_up(session, settings, attempts.tried, attempts.left)
end

return M
