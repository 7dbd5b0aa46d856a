--- Digests, checksums, signatures, a cipher, base64 and random bytes.
---
--- Digests and signatures are raw bytes; `hex` and `base64` make text of them.

local core = require("ciranda.core.crypto")
local errors = require("ciranda.io.error")
local task = require("ciranda.task")

local M = {}

---@alias ciranda.crypto.Algorithm "sha256"|"sha1"|"md5"|"crc32c"

--- The digest of a string. CRC-32C (Castagnoli) is four bytes, big-endian, as Cloud Storage writes it.
---@param algorithm ciranda.crypto.Algorithm
---@param data string
---@return string digest raw bytes
function M.digest(algorithm, data)
  return core.digest(algorithm, data)
end

--- The SHA-256 of a string.
---@param data string
---@return string digest 32 raw bytes
function M.sha256(data)
  return core.digest("sha256", data)
end

--- Begin a digest whose data comes in pieces.
---@param algorithm ciranda.crypto.Algorithm
---@return ciranda.core.Digest digest `digest:update(data)` returns the digest; `digest:finish()` its bytes, once
function M.start(algorithm)
  return core.start(algorithm)
end

---@class ciranda.crypto.FileDigest
---@field size integer    bytes that were read
---@field sha256 string?
---@field sha1 string?
---@field md5 string?
---@field crc32c string?

local FILE_OPTIONS = { offset = true, length = true }

--- Digests of a file or of a part of it, all in one reading, on the thread pool.
---@async
---@param path string
---@param algorithms ciranda.crypto.Algorithm[]
---@param options { offset: integer?, length: integer? }? bytes; the whole file by default
---@return ciranda.crypto.FileDigest
--- Raises `not_found`, `permission` or `io`.
function M.digest_file(path, algorithms, options)
  local wanted = {}
  if options then
    errors.check_options(options, FILE_OPTIONS, "crypto.digest_file")
    wanted.offset, wanted.length = options.offset, options.length
  end
  for _, algorithm in ipairs(algorithms) do
    wanted[algorithm] = true
  end
  return task.call(core.digest_file, path, wanted)
end

--- Compress as gzip(1) does, on the thread pool.
---@async
---@param data string
---@param level integer 1 (quick) to 9 (small)
---@return string packed
function M.gzip(data, level)
  return task.call(core.gzip, data, level)
end

--- The keyed hash of RFC 2104.
---@param algorithm "sha256"|"sha1"|"md5"
---@param key string
---@param data string
---@return string mac raw bytes
function M.hmac(algorithm, key, data)
  return core.hmac(algorithm, key, data)
end

--- Encrypt or decrypt with AES-256 in counter mode (NIST SP 800-38A). It hides the data and does not protect them from
--- being changed: send their digest or MAC another way. A key and counter are for one text only.
---@param key string 32 bytes
---@param counter string 16 bytes: the first block's, big-endian
---@param data string
---@param offset integer? where the data are in the whole text: a multiple of 16 bytes; 0
---@return string
function M.aes256_ctr(key, counter, data, offset)
  if offset and offset > 0 then
    if offset % 16 ~= 0 then
      errors.misuse(2, "crypto.aes256_ctr: the offset %d is not that of a block of 16 bytes", offset)
    end
    local high, low = (">i8i8"):unpack(counter)
    local sum = low + offset // 16
    counter = (">i8i8"):pack(math.ult(sum, low) and high + 1 or high, sum)
  end
  return core.aes256_ctr(key, counter, data)
end

--- Sign with RSASSA-PKCS1-v1_5 and SHA-256 (RFC 7518's RS256).
---@param private_key string PEM, without a passphrase
---@param data string
---@return string signature raw bytes
--- Raises `invalid` when the key is no RSA private key.
function M.rs256_sign(private_key, data)
  local signature, err = core.rs256_sign(private_key, data)
  if not signature then
    errors.raise(errors.wrap(err, { op = "crypto.rs256_sign" }))
  end
  return signature
end

--- Whether a signature is that of the data.
---@param public_key string PEM ("BEGIN PUBLIC KEY")
---@param data string
---@param signature string raw bytes
---@return boolean
--- Raises `invalid` when the key is no RSA public key.
function M.rs256_verify(public_key, data, signature)
  local good, err = core.rs256_verify(public_key, data, signature)
  if good == nil then
    errors.raise(errors.wrap(err, { op = "crypto.rs256_verify" }))
  end
  return good
end

--- Make an RSA key pair, on the thread pool.
---@async
---@param bits integer? 2048 by default; to 8192
---@return { private_key: string, public_key: string } pair PEM: PKCS #8 and SubjectPublicKeyInfo
function M.rsa_generate(bits)
  return task.call(core.rsa_generate, bits or 2048)
end

--- Base64 with padding (RFC 4648, section 4).
---@param data string
---@return string
function M.base64(data)
  return core.base64(data)
end

--- Base64 for URLs and JWTs: `-` and `_`, no padding (RFC 4648, section 5).
---@param data string
---@return string
function M.base64url(data)
  return core.base64(data, true)
end

--- The data in a base64 text. White space is skipped, padding may be absent.
---@param text string
---@return string
--- Raises `parse`.
function M.unbase64(text)
  local data, err = core.unbase64(text)
  if not data then
    errors.raise(errors.wrap(err, { op = "crypto.unbase64" }))
  end
  return data
end

--- The data in a base64url text.
---@param text string
---@return string
--- Raises `parse`.
function M.unbase64url(text)
  local data, err = core.unbase64(text, true)
  if not data then
    errors.raise(errors.wrap(err, { op = "crypto.unbase64url" }))
  end
  return data
end

--- Lower-case hexadecimal digits.
---@param data string
---@return string
function M.hex(data)
  if #data <= 64 then -- a digest: what `string.byte` can return at once
    return ("%02x"):rep(#data):format(data:byte(1, -1))
  end
  return (data:gsub(".", function(byte)
    return ("%02x"):format(byte:byte())
  end))
end

--- Bytes from the system's source of randomness.
---@param count integer at most 1048576
---@return string
function M.random(count)
  return core.random(count)
end

--- A random UUID (RFC 9562, version 4), such as the request ids of Google's APIs.
---@return string
function M.uuid4()
  local bytes = { core.random(16):byte(1, 16) }
  bytes[7] = bytes[7] & 0x0f | 0x40
  bytes[9] = bytes[9] & 0x3f | 0x80
  local form = ("%02x"):rep(4) .. ("-" .. ("%02x"):rep(2)):rep(3) .. "-" .. ("%02x"):rep(6)
  return form:format(table.unpack(bytes))
end

--- Whether two secrets are equal, in a time that does not depend on where they differ.
---@param a string
---@param b string
---@return boolean
function M.equal(a, b)
  return core.equal(a, b)
end

return M
