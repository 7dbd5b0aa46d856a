--- Whether the key that a server shows is the one it should have.
---
--- The order of trust: a revoked key is refused always; pins given by the caller (from a cloud's API) beat every file;
--- then known_hosts. A host that nobody knows is refused, unless "accept-new" was asked for by name, which writes it
--- down. A key that differs from a known one is refused under every policy.

local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local keys = require("ciranda.ssh.keys")
local known_hosts = require("ciranda.ssh.known_hosts")

local M = {}

-- The host key algorithms we take, best first; RSA with SHA-2 signatures only. Each with the type of key it uses.
local ALGORITHMS = {
  { "ssh-ed25519", "ssh-ed25519" },
  { "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp256" },
  { "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384" },
  { "ecdsa-sha2-nistp521", "ecdsa-sha2-nistp521" },
  { "rsa-sha2-512", "ssh-rsa" },
  { "rsa-sha2-256", "ssh-rsa" },
}

---@class ciranda.ssh.HostKeys  what is known of a host before it is connected to
---@field label string            "name:port", for messages
---@field host string             the name its key is looked up by
---@field port integer
---@field pins { type: string, blob: string }[]?
---@field known ciranda.ssh.Known
---@field file string?            where "accept-new" writes

--- The key of a pin, "ssh-ed25519 AAAA...", with anything after it ignored.
---@param text string
---@return { type: string, blob: string }
--- Raises `invalid`.
function M.parse_pin(text)
  local key_type, base64 = tostring(text):match("^%s*(%S+)%s+(%S+)")
  local ok, blob = pcall(crypto.unbase64, base64 or "")
  if not key_type or not ok or #blob < 4 or blob:sub(5, 4 + (">I4"):unpack(blob)) ~= key_type then
    errors.raise({
      code = "invalid",
      op = "ssh.connect",
      message = ('%q is no host key; one looks like "ssh-ed25519 AAAA..."'):format(tostring(text)),
    })
  end
  return { type = key_type, blob = blob }
end

--- What known_hosts says of a host: of its name, and where that says nothing, of its address.
local function look_up(options)
  local entries = known_hosts.load(options.files)
  local known = known_hosts.lookup(entries, options.host, options.port)
  if #known.keys > 0 or #known.fallback > 0 or not options.address or options.address == options.host then
    return known
  end
  local by_address = known_hosts.lookup(entries, options.address, options.port)
  local revoked = { table.unpack(known.revoked) }
  table.move(by_address.revoked, 1, #by_address.revoked, #revoked + 1, revoked)
  return {
    keys = by_address.keys,
    fallback = by_address.fallback,
    revoked = revoked,
    authorities = known.authorities,
  }
end

--- What is known of a host.
---@async
---@param options { host: string, port: integer, address: string?, label: string, pins: string[]?, files: string[] }
---@return ciranda.ssh.HostKeys
function M.expect(options)
  local pins
  if options.pins then
    pins = {}
    for index, pin in ipairs(options.pins) do
      pins[index] = M.parse_pin(pin)
    end
  end
  return {
    label = options.label,
    host = options.host,
    port = options.port,
    pins = pins,
    known = look_up(options),
    file = options.files[1],
  }
end

-- A bit for each type of key in ALGORITHMS, and what `algorithms` has answered, by the bits of the known types.
local bits, lists = {}, {}
for place, algorithm in ipairs(ALGORITHMS) do
  bits[algorithm[2]] = bits[algorithm[2]] or 1 << place
end

--- The algorithms to offer: first those whose keys we can judge, so that the server shows one of them.
---@param expected ciranda.ssh.HostKeys
---@return string list comma-separated
function M.algorithms(expected)
  local known = expected.known
  local judged = 0
  for _, list in ipairs(expected.pins and { expected.pins } or { known.keys, known.fallback }) do
    for _, key in ipairs(list) do
      judged = judged | (bits[key.type] or 0)
    end
  end
  if not lists[judged] then
    local first, rest = {}, {}
    for _, algorithm in ipairs(ALGORITHMS) do
      table.insert(judged & bits[algorithm[2]] ~= 0 and first or rest, algorithm[1])
    end
    lists[judged] = table.concat(table.move(rest, 1, #rest, #first + 1, first), ",")
  end
  return lists[judged]
end

local function contains(list, blob)
  for _, key in ipairs(list) do
    if key.blob == blob then
      return key
    end
  end
  return nil
end

--- "SHA256:... (ssh-ed25519)" of each key, once.
local function fingerprints(list)
  local parts, seen = {}, {}
  for _, key in ipairs(list) do
    local text = ("%s (%s)"):format(keys.fingerprint(key.blob), key.type)
    if not seen[text] then
      seen[text] = true
      parts[#parts + 1] = text
    end
  end
  return table.concat(parts, ", ")
end

local function refuse(expected, reason, message)
  errors.raise({
    code = "hostkey",
    reason = reason,
    phase = "hostkey",
    op = "ssh.connect",
    target = expected.label,
    message = message,
  })
end

--- Judge the key that the server showed. Does not wait.
---@param expected ciranda.ssh.HostKeys
---@param policy "strict"|"accept-new"
---@param key_type string
---@param blob string
---@return "pinned"|"known"|"new" new: nobody knows it, and it is to be accepted and written down
--- Raises `hostkey`, with reason "revoked", "changed", "unknown" or "authority".
function M.judge(expected, policy, key_type, blob)
  local known = expected.known
  local revoked = contains(known.revoked, blob)
  if not revoked and expected.pins and contains(expected.pins, blob) then
    return "pinned"
  end
  if not revoked and not expected.pins and (contains(known.keys, blob) or contains(known.fallback, blob)) then
    return "known"
  end
  local shown = fingerprints({ { type = key_type, blob = blob } })
  if revoked then
    refuse(
      expected,
      "revoked",
      ("%s shows the host key %s, which is revoked in %s: do not trust this machine"):format(
        expected.label,
        shown,
        revoked.where
      )
    )
  end
  if expected.pins then
    refuse(
      expected,
      "changed",
      ("%s shows the host key %s, but %s was expected: it is another machine, or was made anew"):format(
        expected.label,
        shown,
        #expected.pins > 0 and fingerprints(expected.pins) or "none (the list of pins is empty)"
      )
    )
  end
  if #known.keys > 0 then
    local where = {}
    for _, entry in ipairs(known.keys) do
      where[#where + 1] = entry.where
    end
    refuse(
      expected,
      "changed",
      ("the host key of %s has changed: it shows %s, but %s is known (%s). If the machine was made anew, "):format(
        expected.label,
        shown,
        fingerprints(known.keys),
        table.concat(where, ", ")
      )
        .. ("remove the old key: ssh-keygen -R '%s'"):format(known_hosts.name(expected.host, expected.port))
    )
  end
  if policy == "accept-new" and expected.file then
    return "new"
  end
  if #known.authorities > 0 then
    refuse(
      expected,
      "authority",
      ("%s is vouched for by a certificate authority (%s) only, and host certificates are not supported: "):format(
        expected.label,
        known.authorities[1].where
      ) .. ("compare %s with the machine's own and add it to known_hosts"):format(shown)
    )
  end
  refuse(
    expected,
    "unknown",
    ("the host key of %s is not known: it shows %s. Compare that with the machine's own "):format(
      expected.label,
      shown
    )
      .. "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there) and add it to known_hosts, or accept it unseen "
      .. 'with host_key_policy = "accept-new"'
  )
end

--- Judge the key that the server showed, and write it down when it is new and accepted.
---@async
---@param expected ciranda.ssh.HostKeys
---@param key_type string
---@param blob string
---@param policy "strict"|"accept-new"
---@return "pinned"|"known"|"added"
--- Raises as `judge` does; `permission`, `io`, ... when it cannot be written down.
function M.verify(expected, key_type, blob, policy)
  local trust = M.judge(expected, policy, key_type, blob)
  if trust == "new" then
    known_hosts.add(expected.file, expected.host, expected.port, key_type, blob)
    return "added"
  end
  return trust
end

return M
