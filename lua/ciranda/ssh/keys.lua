--- Private keys of the person who logs in.
---
--- A key file is parsed once and serves every session; a passphrase is asked for once. What a key file holds never
--- enters Lua: the engine reads it on the thread pool and wipes its copies.

local account = require("ciranda.io.account")
local certificates = require("ciranda.ssh.certificates")
local core = require("ciranda.core.ssh")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local log = require("ciranda.io.log")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- Attempts at a passphrase when a function is asked.
local ATTEMPTS = 3

-- Milliseconds for which a file that has been read is taken to be unchanged: a fleet asks once a worker.
local FRESH_MS = 2000

---@class ciranda.ssh.Key
---@field path string?   the file
---@field type string    "ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", ...
---@field blob string    the public key in bytes
---@field comment string
---@field certificate ciranda.ssh.Certificate?  from the file beside it, PATH-cert.pub
---@field private handle userdata the engine's key

---@alias ciranda.ssh.Passphrase string|fun(path: string, attempt: integer): string?

-- The function asked when neither the caller nor the environment has a passphrase.
local prompt

--- Set the function that asks a person for a key's passphrase: `fn(path, attempt)` returns it, or nil to give up. It
--- runs in a task, one at a time.
---@param fn (fun(path: string, attempt: integer): string?)?
function M.set_prompt(fn)
  prompt = fn
end

--- `~` and `~/...` with the home directory in its place.
---@param path string
---@return string
function M.expand(path)
  if path == "~" or path:sub(1, 2) == "~/" then
    return account.home() .. path:sub(2)
  end
  return path
end

local function wrap_key(handle, path)
  return {
    path = path,
    handle = handle,
    type = handle:type(),
    blob = handle:public(),
    comment = handle:comment(),
  }
end

--- OpenSSH's rule: a private key that others may read is refused.
local function check_mode(path)
  local stat = fs.stat(path)
  if stat.uid == uv.getuid() and stat.mode & tonumber("077", 8) ~= 0 then
    errors.raise({
      code = "permission",
      op = "ssh.key",
      target = path,
      message = ("%s may be read by others (mode %o); say: chmod 600 '%s'"):format(path, stat.mode, path),
    })
  end
  return ("%d.%d.%d"):format(stat.ino or 0, stat.mtime_ns, stat.size)
end

--- The passphrases to try, one after the other.
---@param passphrase ciranda.ssh.Passphrase?
---@return fun(path: string, attempt: integer): string?
---@return integer attempts
local function source_of(passphrase)
  if type(passphrase) == "function" then
    return passphrase, ATTEMPTS
  end
  local fixed = passphrase or os.getenv("CIRANDA_SSH_PASSPHRASE")
  if fixed then
    return function()
      return fixed
    end, 1
  end
  return prompt or function() end, ATTEMPTS
end

--- Parse with what can be had of passphrases.
local function open(path, passphrase, quiet)
  local ok, handle = pcall(task.call, core.key_read, path, nil)
  if ok then
    return handle
  end
  if quiet or not (errors.is(handle, "auth") and handle.reason == "passphrase_needed") then
    error(handle, 0)
  end
  local ask, attempts = source_of(passphrase)
  for attempt = 1, attempts do
    local text = ask(path, attempt)
    if not text then
      errors.raise({
        code = "auth",
        reason = "passphrase_needed",
        phase = "auth",
        op = "ssh.key",
        target = path,
        message = ("%s is encrypted: add it to the agent (ssh-add '%s') or put its passphrase into "):format(
          path,
          path
        ) .. "CIRANDA_SSH_PASSPHRASE",
      })
    end
    log.secret(text)
    ok, handle = pcall(task.call, core.key_read, path, text)
    if ok then
      return handle
    end
    if not (errors.is(handle, "auth") and handle.reason == "passphrase_wrong") then
      error(handle, 0)
    end
  end
  error(errors.wrap(handle, { op = "ssh.key", target = path }), 0)
end

-- Keys that have been read, by path; and a lock a path, so that a thousand sessions ask once.
local cache, locks = {}, {}

--- The key in a file.
---@async
---@param path string `~` is the home directory
---@param passphrase ciranda.ssh.Passphrase? for an encrypted key; else CIRANDA_SSH_PASSPHRASE, else the prompt
---@param quiet boolean? true: nobody is asked for a passphrase
---@return ciranda.ssh.Key
--- Raises `not_found`, `permission` (others may read it), `auth` (the passphrase), `invalid` or `unsupported`.
function M.load(path, passphrase, quiet)
  path = M.expand(path)
  locks[path] = locks[path] or task.semaphore(1)
  return locks[path]:with(function()
    local cached = cache[path]
    if cached and uv.now() - cached.checked < FRESH_MS then
      return cached.key
    end
    local stamp = check_mode(path)
    if not cached or cached.stamp ~= stamp then
      cached = { stamp = stamp, key = wrap_key(open(path, passphrase, quiet), path) }
    end
    -- Certificates live for hours and are made anew beside a key that stays.
    cached.key.certificate = M.certificate_of(path)
    cached.checked = uv.now()
    cache[path] = cached
    return cached.key
  end)
end

--- The key in a file when it has been read lately, else nil. Does not wait.
---@param path string
---@return ciranda.ssh.Key?
function M.loaded(path)
  local cached = cache[M.expand(path)]
  return cached and uv.now() - cached.checked < FRESH_MS and cached.key or nil
end

--- The key in a text, such as a secret store gives.
---@async
---@param text string
---@param passphrase string?
---@return ciranda.ssh.Key
--- Raises `auth` (the passphrase), `invalid` or `unsupported`.
function M.parse(text, passphrase)
  return wrap_key(task.call(core.key_parse, text, passphrase))
end

--- The blob of the public key beside a private one (PATH.pub), or nil.
---@async
---@param path string
---@return string?
function M.public_of(path)
  local ok, text = pcall(fs.read, M.expand(path) .. ".pub", 64 * 1024)
  local base64 = ok and text:match("^%S+%s+(%S+)")
  if not base64 then
    return nil
  end
  local good, blob = pcall(require("ciranda.io.crypto").unbase64, base64)
  return good and blob or nil
end

--- What people compare: "SHA256:...", as `ssh-keygen -l` prints it.
---@param blob string a public key, in bytes
---@return string
function M.fingerprint(blob)
  local crypto = require("ciranda.io.crypto")
  return "SHA256:" .. crypto.base64(crypto.sha256(blob)):gsub("=+$", "")
end

--- The certificate beside a private key (PATH-cert.pub), or nil when there is none that can be read: then the key
--- counts by itself.
---@async
---@param path string
---@return ciranda.ssh.Certificate?
function M.certificate_of(path)
  local ok, certificate = pcall(certificates.load, M.expand(path) .. "-cert.pub")
  if not ok then
    if not errors.is(certificate, "invalid") then
      error(certificate, 0)
    end
    log.debug("%s", certificate.message)
    return nil
  end
  return certificate
end

--- The files that are tried when none is named, those that exist: gcloud's key, then OpenSSH's own in its order.
---@async
---@return string[]
function M.default_files()
  local found = {}
  for _, name in ipairs({ "google_compute_engine", "id_ed25519", "id_ecdsa", "id_rsa" }) do
    local path = ("%s/.ssh/%s"):format(account.home(), name)
    if fs.exists(path) == "file" then
      found[#found + 1] = path
    end
  end
  return found
end

-- One maker at a time: two tasks must not both find that there is no key.
local making = task.semaphore(1)

--- gcloud's key, ~/.ssh/google_compute_engine: made by ssh-keygen (RSA, as gcloud does, without a passphrase) when it
--- is not there, never overwritten.
---@async
---@param path string? another place
---@return string path
---@return string public the line for a server: "ssh-rsa AAAA... comment"
--- Raises `failed` when ssh-keygen is missing or fails, `permission`, `io`.
function M.ensure(path)
  path = M.expand(path or "~/.ssh/google_compute_engine")
  return making:with(function()
    if not fs.exists(path) then
      fs.mkdir_p(fs.dirname(path), tonumber("700", 8))
      local user = account.user()
      -- It asks before it overwrites, and reads its answer from a standard input that has none.
      process
        .run({ "ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-C", user, "-f", path, timeout = 60 })
        :check()
    end
    if not fs.exists(path .. ".pub") then
      local made = process.run({ "ssh-keygen", "-y", "-P", "", "-f", path, timeout = 60 }):check()
      fs.write(path .. ".pub", made.stdout, { mode = tonumber("644", 8) })
    end
    return path, (fs.read(path .. ".pub", 64 * 1024):match("^[^\r\n]*"))
  end)
end

return M
