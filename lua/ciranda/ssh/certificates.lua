--- User certificates in OpenSSH's format (PROTOCOL.certkeys): a public key that an authority has signed for some users
--- and some time. The server judges them; here they are read, matched with their private key, and one that cannot
--- work, since it has expired or is a host's, is told by name and not offered.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")

local M = {}

local SUFFIX = "-cert-v01@openssh.com"

-- How many of a key's own fields stand between the nonce and the serial number.
local FIELDS = {
  ["ssh-ed25519"] = 1,
  ["ssh-rsa"] = 2,
  ["ecdsa-sha2-nistp256"] = 2,
  ["ecdsa-sha2-nistp384"] = 2,
  ["ecdsa-sha2-nistp521"] = 2,
}

---@class ciranda.ssh.Certificate
---@field name string     for messages: the file, or what the agent calls it
---@field blob string     the certificate in bytes
---@field public string   the public key that it certifies, as servers know it
---@field user boolean    false: it is a host's
---@field id string       what the authority has called it
---@field after integer   seconds since 1970 from which it holds
---@field before integer  seconds since 1970 until which it holds; math.maxinteger: for ever

--- Whether a type of key is a certificate's.
---@param key_type string
---@return boolean
function M.is_type(key_type)
  return key_type:sub(-#SUFFIX) == SUFFIX
end

--- A certificate from its bytes; nil when they hold none that we know.
---@param blob string
---@param name string for messages
---@return ciranda.ssh.Certificate?
function M.parse(blob, name)
  local ok, certificate = pcall(function()
    local key_type, _, at = (">s4s4"):unpack(blob)
    local plain = M.is_type(key_type) and key_type:sub(1, -1 - #SUFFIX)
    local public = { (">s4"):pack(plain) }
    for _ = 1, FIELDS[plain] do
      local field
      field, at = (">s4"):unpack(blob, at)
      public[#public + 1] = (">s4"):pack(field)
    end
    local _, kind, id, _, after, before = (">I8I4s4s4i8i8"):unpack(blob, at)
    return {
      name = name,
      blob = blob,
      public = table.concat(public),
      user = kind == 1,
      id = id,
      after = after < 0 and math.maxinteger or after, -- unsigned there: "for ever" is all ones
      before = before < 0 and math.maxinteger or before,
    }
  end)
  return ok and certificate or nil
end

-- Larger than any certificate.
local MAX_FILE = 256 * 1024

--- The certificate in a file; nil when the file is not there or cannot be read.
---@async
---@param path string
---@return ciranda.ssh.Certificate?
--- Raises `invalid` when it is there and holds no certificate of a type we know.
function M.load(path)
  local ok, text = pcall(function()
    -- Most keys have none, and a question costs less than a failure.
    return fs.exists(path) and fs.read(path, MAX_FILE)
  end)
  if not ok or not text then
    return errors.is(text, "cancelled") and error(text, 0) or nil
  end
  local base64 = text:match("^%s*%S+%s+(%S+)")
  local decoded, blob = pcall(crypto.unbase64, base64 or "")
  return decoded and M.parse(blob, path)
    or errors.raise({
      code = "invalid",
      phase = "auth",
      op = "ssh.certificate",
      target = path,
      message = ("%s is no certificate that can be used: one begins with a type such as ssh-ed25519%s"):format(
        path,
        SUFFIX
      ),
    })
end

local function moment(seconds)
  return os.date("!%Y-%m-%dT%H:%M:%SZ", seconds)
end

--- Why a certificate cannot let anybody in now; nil when it may.
---@param certificate ciranda.ssh.Certificate
---@param now integer? seconds since 1970
---@return string?
function M.problem(certificate, now)
  now = now or os.time()
  if not certificate.user then
    return ("it is a host's certificate (%q), not a user's"):format(certificate.id)
  elseif now >= certificate.before then
    return ("it has expired at %s; have a new one signed"):format(moment(certificate.before))
  elseif now < certificate.after then
    return ("it is not valid before %s, by this machine's clock"):format(moment(certificate.after))
  end
  return nil
end

return M
