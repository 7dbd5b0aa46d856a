--- The SSH agent, over its socket (draft-ietf-sshm-ssh-agent): which keys it holds, and signatures by them.
---
--- libssh2's own agent calls block the loop. RSA signatures are asked for with SHA-2, which an agent that is too old
--- answers with SHA-1; that is noticed and refused, since servers refuse it too.

local errors = require("ciranda.io.error")
local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

local FAILURE, REQUEST_IDENTITIES, IDENTITIES_ANSWER, SIGN_REQUEST, SIGN_RESPONSE = 5, 11, 12, 13, 14
local FLAG_OF = { ["rsa-sha2-256"] = 2, ["rsa-sha2-512"] = 4 }

-- No agent sends more; a length beyond it is not an agent's.
local MAX_MESSAGE = 256 * 1024

-- Seconds to wait for an agent that should answer at once; a signature may need a person's consent.
local CONNECT_SECONDS, LIST_SECONDS, SIGN_SECONDS = 5, 10, 60

local function fail(path, message, code)
  errors.raise({
    code = code or "auth",
    reason = "agent",
    phase = "auth",
    op = "ssh.agent",
    target = path,
    message = message,
  })
end

---@class ciranda.ssh.Agent
---@field path string
---@field private pipe userdata
---@field private turn ciranda.Semaphore one question at a time: answers carry no number
local Agent = {}
Agent.__index = Agent

--- Connect to an agent.
---@async
---@param path string the socket
---@return ciranda.ssh.Agent
--- Raises `auth` with reason "agent".
function M.connect(path)
  local pipe = uv.new_pipe(false)
  local agent = setmetatable({ path = path, pipe = pipe, turn = task.semaphore(1), buffer = "" }, Agent)
  local ok, err = pcall(task.timeout, CONNECT_SECONDS, scheduler.await, function(done)
    pipe:connect(path, function(failure)
      done(failure and ("the agent at %s cannot be reached (%s)"):format(path, failure))
    end)
  end, "the SSH agent")
  if not ok then
    agent:close()
    if errors.is(err, "cancelled") then
      error(err, 0)
    end
    fail(path, errors.text(err))
  end
  pipe:read_start(function(failure, data)
    agent:_receive(failure, data)
  end)
  return agent
end

---@private
function Agent:_receive(failure, data)
  if failure or not data then
    self.ended = ("the agent at %s has closed the connection%s"):format(
      self.path,
      failure and " (" .. failure .. ")" or ""
    )
  else
    self.buffer = self.buffer .. data
  end
  local waiting = self.waiting
  if waiting and self:_answered() then
    self.waiting = nil
    waiting()
  end
end

--- Whether a whole answer is there, or none will come.
---@private
function Agent:_answered()
  local size = #self.buffer >= 4 and (">I4"):unpack(self.buffer)
  if size and size > MAX_MESSAGE then
    self.ended = self.ended or ("what listens at %s is no SSH agent"):format(self.path)
  end
  return self.ended ~= nil or (size and #self.buffer >= 4 + size)
end

--- Ask and wait for the answer's type and content.
---@private
function Agent:_ask(message, seconds)
  return self.turn:with(function()
    if self.ended then
      fail(self.path, self.ended)
    end
    self.buffer = ""
    self.pipe:write((">s4"):pack(message))
    local ok, err = pcall(task.timeout, seconds, scheduler.await, function(done)
      -- The task of the time limit begins later than the answer may come.
      if self:_answered() then
        done()
        return nil
      end
      self.waiting = done
      return function()
        self.waiting = nil
        return true
      end
    end, "the SSH agent")
    if not ok then
      -- An answer that comes later must not be taken for the next one's.
      self:close()
      if errors.is(err, "timeout") then
        fail(self.path, ("the agent at %s has not answered within %g s"):format(self.path, seconds))
      end
      error(err, 0)
    end
    if self.ended then
      fail(self.path, self.ended)
    end
    local answer = (">s4"):unpack(self.buffer)
    return answer:byte(1) or FAILURE, answer:sub(2)
  end)
end

--- The keys that the agent holds.
---@async
---@return { blob: string, comment: string, type: string }[]
--- Raises `auth` with reason "agent".
function Agent:identities()
  local kind, body = self:_ask(string.char(REQUEST_IDENTITIES), LIST_SECONDS)
  if kind ~= IDENTITIES_ANSWER then
    fail(self.path, ("the agent at %s does not tell its keys; is it locked?"):format(self.path))
  end
  local list = {}
  local ok = pcall(function()
    local count, at = (">I4"):unpack(body)
    for _ = 1, count do
      local blob, comment
      blob, comment, at = (">s4s4"):unpack(body, at)
      list[#list + 1] = { blob = blob, comment = comment, type = (">s4"):unpack(blob) }
    end
  end)
  if not ok then
    fail(self.path, ("the answer of the agent at %s cannot be read"):format(self.path))
  end
  return list
end

--- A signature.
---@async
---@param blob string the public key
---@param algorithm string as the server wants it
---@param data string
---@return string signature what belongs inside the signature's inner string
--- Raises `auth` with reason "agent".
function Agent:sign(blob, algorithm, data)
  local flags = FLAG_OF[algorithm] or 0
  local kind, body = self:_ask((">Bs4s4I4"):pack(SIGN_REQUEST, blob, data, flags), SIGN_SECONDS)
  if kind ~= SIGN_RESPONSE then
    fail(self.path, ("the agent at %s refuses to sign (a key that asks for consent?)"):format(self.path))
  end
  local ok, made, signature = pcall(function()
    return (">s4s4"):unpack(((">s4"):unpack(body)))
  end)
  if not ok then
    fail(self.path, ("the signature of the agent at %s cannot be read"):format(self.path))
  end
  if made ~= algorithm then
    fail(
      self.path,
      ("the agent at %s signs with %s where %s was asked for: it is too old for RSA keys"):format(
        self.path,
        made,
        algorithm
      )
    )
  end
  return signature
end

--- Close the connection.
function Agent:close()
  if self.pipe and not self.pipe:is_closing() then
    self.pipe:close()
  end
  self.ended = self.ended or "the connection to the agent is closed"
end

Agent.__close = Agent.close

return M
