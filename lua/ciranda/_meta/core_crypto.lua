---@meta ciranda.core.crypto
--- Digests, RS256, AES-256-CTR, base64 and random bytes (engine/crypto.c). Private: use ciranda.io.crypto.

---@class ciranda.core.crypto
local M = {}

---@class ciranda.core.Digest
local Digest = {}

---@param data string
---@return ciranda.core.Digest self
function Digest:update(data) end

--- The digest's bytes. It cannot be used afterwards.
---@return string
function Digest:finish() end

---@param algorithm "sha256"|"sha1"|"md5"|"crc32c"
---@param data string
---@return string bytes
function M.digest(algorithm, data) end

---@param algorithm "sha256"|"sha1"|"md5"|"crc32c"
---@return ciranda.core.Digest
function M.start(algorithm) end

---@param algorithm "sha256"|"sha1"|"md5"
---@param key string
---@param data string
---@return string bytes
function M.hmac(algorithm, key, data) end

--- AES-256 in counter mode, which encrypts and decrypts alike.
---@param key string 32 bytes
---@param counter string 16 bytes, of the first block
---@param data string
---@return string
function M.aes256_ctr(key, counter, data) end

---@class ciranda.core.crypto.Wanted
---@field sha256 boolean?
---@field sha1 boolean?
---@field md5 boolean?
---@field crc32c boolean?
---@field offset integer?
---@field length integer?

--- On the thread pool. The callback gets err, or the digests asked for and `size`, the bytes read.
---@param path string
---@param wanted ciranda.core.crypto.Wanted
---@param callback fun(err: table?, result: table?)
---@return { cancel: fun(self) } handle
function M.digest_file(path, wanted, callback) end

--- On the thread pool.
---@param text string
---@param level integer 1 to 9
---@param callback fun(err: table?, packed: string?)
---@return { cancel: fun(self) } handle
function M.gzip(text, level, callback) end

--- On the thread pool. The keys are PEM.
---@param bits integer 2048 to 8192
---@param callback fun(err: table?, pair: { private_key: string, public_key: string }?)
---@return { cancel: fun(self) } handle
function M.rsa_generate(bits, callback) end

---@param private_key_pem string
---@param data string
---@return string? signature
---@return table? err
function M.rs256_sign(private_key_pem, data) end

---@param public_key_pem string
---@param data string
---@param signature string
---@return boolean? good nil for a key that is none
---@return table? err
function M.rs256_verify(public_key_pem, data, signature) end

---@param data string
---@param url boolean? the alphabet of URLs, without padding
---@return string
function M.base64(data, url) end

---@param text string
---@param url boolean?
---@return string? data
---@return table? err
function M.unbase64(text, url) end

---@param count integer at most 1048576
---@return string
function M.random(count) end

---@param a string
---@param b string
---@return boolean
function M.equal(a, b) end

return M
