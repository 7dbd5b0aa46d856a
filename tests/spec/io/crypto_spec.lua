local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local task = require("ciranda.task")

--- The error that a function raises.
local function raised(fn, ...)
  local ok, err = pcall(fn, ...)
  assert.is_false(ok, "no error was raised")
  return err
end

local function unhex(text)
  return (text:gsub("%x%x", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

--- Run a command of the system; its output, or nil when it is not there or fails.
local function output_of(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local text = pipe:read("a")
  return pipe:close() and text or nil
end

local function with_file(content, fn)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  file:write(content)
  file:close()
  local ok, err = pcall(fn, path)
  os.remove(path)
  if not ok then
    error(err, 0)
  end
end

describe("ciranda.io.crypto", function()
  describe("digests", function()
    it("agree with the published vectors", function()
      -- FIPS 180-4 and RFC 1321 examples; CRC-32C from RFC 3720, B.4
      assert.equal(
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        crypto.hex(crypto.sha256("abc"))
      )
      assert.equal("a9993e364706816aba3e25717850c26c9cd0d89d", crypto.hex(crypto.digest("sha1", "abc")))
      assert.equal("900150983cd24fb0d6963f7d28e17f72", crypto.hex(crypto.digest("md5", "abc")))
      assert.equal("e3069283", crypto.hex(crypto.digest("crc32c", "123456789")))
      assert.equal("8a9136aa", crypto.hex(crypto.digest("crc32c", ("\0"):rep(32))))
      assert.equal("62a8ab43", crypto.hex(crypto.digest("crc32c", ("\xff"):rep(32))))
      local rising = {}
      for byte = 0, 31 do
        rising[#rising + 1] = string.char(byte)
      end
      assert.equal("46dd794e", crypto.hex(crypto.digest("crc32c", table.concat(rising))))
      assert.equal("00000000", crypto.hex(crypto.digest("crc32c", "")))
    end)

    it("are the same in pieces of any size", function()
      local data = crypto.random(10007)
      for _, algorithm in ipairs { "sha256", "sha1", "md5", "crc32c" } do
        for _, size in ipairs { 1, 3, 7, 8, 4096, 20000 } do
          local digest = crypto.start(algorithm)
          for from = 1, #data, size do
            digest:update(data:sub(from, from + size - 1))
          end
          assert.equal(crypto.digest(algorithm, data), digest:finish())
        end
      end
    end)

    it("cannot be used after they are finished", function()
      local digest = crypto.start("sha256")
      digest:finish()
      assert.has_error(function()
        digest:update("x")
      end)
      assert.has_error(function()
        digest:finish()
      end)
    end)

    it("refuse an algorithm that is not known", function()
      assert.has_error(function()
        crypto.digest("sha512", "")
      end)
    end)
  end)

  describe("digest_file", function()
    it("reads once for all algorithms, and a part when asked", function()
      local data = crypto.random(700000)
      with_file(data, function(path)
        local all = crypto.digest_file(path, { "sha256", "md5", "crc32c" })
        assert.equal(#data, all.size)
        assert.equal(crypto.sha256(data), all.sha256)
        assert.equal(crypto.digest("md5", data), all.md5)
        assert.equal(crypto.digest("crc32c", data), all.crc32c)
        assert.is_nil(all.sha1)
        local part = crypto.digest_file(path, { "sha256" }, { offset = 300001, length = 12345 })
        assert.equal(12345, part.size)
        assert.equal(crypto.sha256(data:sub(300002, 300001 + 12345)), part.sha256)
        assert.equal(0, crypto.digest_file(path, { "sha256" }, { offset = 900000 }).size)
      end)
    end)

    it("names the file and the reason when it cannot", function()
      local err = raised(crypto.digest_file, "/nonexistent/file", { "sha256" })
      assert.is_true(errors.is(err, "not_found"))
      assert.matches("/nonexistent/file", tostring(err), 1, true)
      assert.is_true(errors.is(raised(crypto.digest_file, "/tmp", { "sha256" }), "io"))
      assert.is_true(errors.is(raised(crypto.digest_file, "/tmp", { "sha256" }, { offse = 1 }), "misuse"))
    end)

    it("refuses a digest that it does not know, rather than leave it out", function()
      assert.matches("unknown option 'sha%-256'", raised(crypto.digest_file, "/etc/passwd", { "sha-256" }))
      assert.matches(
        "option 'length'",
        raised(crypto.digest_file, "/etc/passwd", { "md5" }, { length = "x" })
      )
    end)

    it("can be cancelled", function()
      -- /dev/zero has no end: only cancelling ends this
      local scope <close> = task.scope()
      local reading = scope:spawn(crypto.digest_file, "/dev/zero", { "sha256" })
      task.sleep(0.02)
      reading:cancel()
      local err = raised(reading.wait, reading)
      assert.is_true(errors.is(err, "cancelled"))
      assert.equal("cancelled", reading:status())
    end)
  end)

  describe("gzip", function()
    it("packs what gzip unpacks, in pieces and of any size", function()
      local process = require("ciranda.io.process")
      local long = ("0123456789abcdef"):rep(40000)
      for _, text in ipairs({ "", "x", long, crypto.random(300000) }) do
        for _, level in ipairs({ 1, 9 }) do
          local packed = crypto.gzip(text, level)
          local unpacked = process.run({ "gzip", "-dc", stdin = packed, timeout = 60 }):check()
          assert.is_true(unpacked.stdout == text)
        end
      end
      assert.is_true(#crypto.gzip(long, 1) < #long // 20)
    end)

    it("refuses levels that are none, and can be cancelled", function()
      assert.matches("from 1 to 9", raised(crypto.gzip, "x", 0))
      local scope <close> = task.scope()
      local packing = scope:spawn(crypto.gzip, crypto.random(1 << 20):rep(64), 9)
      task.yield()
      packing:cancel()
      assert.is_true(errors.is(raised(packing.wait, packing), "cancelled"))
    end)
  end)

  describe("what the machine may have", function()
    local process = require("ciranda.io.process")
    local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

    it("a FIFO that nobody writes is refused, at once", function()
      local fifo = os.tmpname()
      os.remove(fifo)
      assert(os.execute("mkfifo " .. fifo))
      local ok, err = pcall(task.timeout, 5, crypto.digest_file, fifo, { "sha256" })
      local pipe = io.open(fifo, "r+") -- whoever still waits for a writer has one
      pipe:close()
      os.remove(fifo)
      assert.is_false(ok)
      assert.is_true(errors.is(err, "io"), tostring(err))
    end)

    it("an OpenSSL that is told to refuse MD5 is named as the reason", function()
      with_file("openssl_conf = s\n[s]\nalg_section = a\n[a]\ndefault_properties = fips=yes\n", function(path)
        local result = process.run {
          "env",
          "OPENSSL_CONF=" .. path,
          BINARY,
          "-e",
          [[local crypto = require("ciranda.core.crypto")
          print(select(2, pcall(crypto.digest, "md5", "")))
          print(select(2, pcall(crypto.start, "md5")))
          print(select(2, pcall(crypto.digest_file, "/", { md5 = true }, print)))]],
        }
        local count = select(2, result.stdout:gsub("OpenSSL, as this machine configures it", ""))
        assert.equal(3, count, result.stdout .. result.stderr)
      end)
    end)
  end)

  describe("aes256_ctr", function()
    -- NIST SP 800-38A, F.5.5 and F.5.6.
    local function bytes(hex)
      return (
        hex:gsub("%s", ""):gsub("..", function(pair)
          return string.char(tonumber(pair, 16))
        end)
      )
    end
    local key = bytes("603deb1015ca71be2b73aef0857d7781 1f352c073b6108d72d9810a30914dff4")
    local counter = bytes("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    local plain = bytes([[6bc1bee22e409f96e93d7e117393172a ae2d8a571e03ac9c9eb76fac45af8e51
      30c81c46a35ce411e5fbc1191a0a52ef f69f2445df4f9b17ad2b417be66c3710]])
    local sealed = bytes([[601ec313775789a5b7a7f504bbf3d228 f443e3ca4d62b59aca84e990cacaf5c5
      2b0930daa23de94ce87017ba2d84988d dfc9c58db67aada613c2dd08457941a6]])

    it("gives what the standard gives, both ways and from any block", function()
      assert.equal(sealed, crypto.aes256_ctr(key, counter, plain))
      assert.equal(plain, crypto.aes256_ctr(key, counter, sealed))
      for _, offset in ipairs({ 16, 32, 48 }) do
        assert.equal(sealed:sub(offset + 1), crypto.aes256_ctr(key, counter, plain:sub(offset + 1), offset))
      end
      -- The counter is one number of 128 bits.
      local last = ("\0"):rep(7) .. "\1" .. ("\255"):rep(8)
      local text = ("x"):rep(40)
      local whole = crypto.aes256_ctr(key, last, text)
      assert.equal(whole:sub(17), crypto.aes256_ctr(key, last, text:sub(17), 16))
      assert.equal(whole:sub(33), crypto.aes256_ctr(key, last, text:sub(33), 32))
      assert.equal("", crypto.aes256_ctr(key, counter, ""))
    end)

    it("refuses keys and counters of other sizes, and an offset within a block", function()
      for _, call in ipairs({
        { "short", counter, plain },
        { key, "short", plain },
        { key, counter, plain, 8 },
      }) do
        assert.is_false(pcall(crypto.aes256_ctr, table.unpack(call)))
      end
    end)
  end)

  describe("hmac", function()
    it("agrees with RFC 2202 and RFC 4231", function()
      assert.equal(
        "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79",
        crypto.hex(crypto.hmac("sha1", "Jefe", "what do ya want for nothing?"))
      )
      assert.equal(
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
        crypto.hex(crypto.hmac("sha256", "Jefe", "what do ya want for nothing?"))
      )
    end)

    it("refuses a checksum", function()
      assert.has_error(function()
        crypto.hmac("crc32c", "key", "data")
      end)
    end)
  end)

  describe("RS256", function()
    it("signs what others verify and verifies what others sign", function()
      if not output_of("openssl version") then
        pending("the openssl command is not installed")
        return
      end
      local pair = crypto.rsa_generate(2048)
      with_file(pair.private_key, function(private)
        with_file(pair.public_key, function(public)
          with_file("the data", function(data)
            with_file(crypto.rs256_sign(pair.private_key, "the data"), function(signature)
              assert.matches(
                "Verified OK",
                output_of(
                  ("openssl dgst -sha256 -verify %s -signature %s %s"):format(public, signature, data)
                )
              )
            end)
            local theirs = output_of(("openssl dgst -sha256 -sign %s %s"):format(private, data))
            assert.is_true(crypto.rs256_verify(pair.public_key, "the data", theirs))
            assert.is_false(crypto.rs256_verify(pair.public_key, "the dat4", theirs))
            assert.is_false(crypto.rs256_verify(pair.public_key, "the data", theirs:sub(2) .. "x"))
            assert.is_false(crypto.rs256_verify(pair.public_key, "the data", ""))
          end)
        end)
      end)
    end)

    it("refuses what is no RSA key, without showing it", function()
      local secret = "-----BEGIN PRIVATE KEY-----\nSECRETSECRET\n-----END PRIVATE KEY-----\n"
      local err = raised(crypto.rs256_sign, secret, "data")
      assert.is_true(errors.is(err, "invalid"))
      assert.is_nil(tostring(err):find("SECRET", 1, true))
      assert.is_true(errors.is(raised(crypto.rs256_verify, "nonsense", "data", "signature"), "invalid"))
      local ec = output_of("openssl ecparam -name prime256v1 -genkey -noout")
      if ec then
        assert.is_true(errors.is(raised(crypto.rs256_sign, ec, "data"), "invalid"))
      end
    end)
  end)

  describe("base64", function()
    it("agrees with RFC 4648, section 10", function()
      local vectors = {
        [""] = "",
        f = "Zg==",
        fo = "Zm8=",
        foo = "Zm9v",
        foob = "Zm9vYg==",
        fooba = "Zm9vYmE=",
        foobar = "Zm9vYmFy",
      }
      for data, text in pairs(vectors) do
        assert.equal(text, crypto.base64(data))
        assert.equal(data, crypto.unbase64(text))
        assert.equal((text:gsub("=", "")), crypto.base64url(data))
        assert.equal(data, crypto.unbase64url((text:gsub("=", ""))))
      end
      assert.equal("-_-_", crypto.base64url(unhex("fbffbf")))
      assert.equal("+/+/", crypto.base64(unhex("fbffbf")))
    end)

    it("brings every length back", function()
      for size = 0, 70 do
        local data = crypto.random(size)
        assert.equal(data, crypto.unbase64(crypto.base64(data)))
        assert.equal(data, crypto.unbase64url(crypto.base64url(data)))
      end
    end)

    it("skips white space and refuses everything else", function()
      assert.equal("foobar", crypto.unbase64("Zm9v\r\n YmFy\n"))
      for _, bad in ipairs {
        "Zm9v!",
        "Z",
        "Zm9vY",
        "Zg=",
        "Zg===",
        "Zh==",
        "Zm9=",
        "=Zg=",
        "Zg==Zg==",
        "-_-_",
        "Zm9v\0",
      } do
        assert.is_true(errors.is(raised(crypto.unbase64, bad), "parse"), bad)
      end
      assert.is_true(errors.is(raised(crypto.unbase64url, "+/+/"), "parse"))
    end)
  end)

  it("makes UUIDs of version 4, each another", function()
    local seen = {}
    for _ = 1, 200 do
      local id = crypto.uuid4()
      assert.matches("^%x%x%x%x%x%x%x%x%-%x%x%x%x%-4%x%x%x%-[89ab]%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$", id)
      assert.is_nil(seen[id])
      seen[id] = true
    end
  end)

  it("gives as many random bytes as asked, and not the same ones", function()
    assert.equal("", crypto.random(0))
    assert.equal(32, #crypto.random(32))
    assert.not_equal(crypto.random(32), crypto.random(32))
    assert.has_error(function()
      crypto.random(-1)
    end)
  end)

  it("compares secrets", function()
    assert.is_true(crypto.equal("abc", "abc"))
    assert.is_false(crypto.equal("abc", "abd"))
    assert.is_false(crypto.equal("abc", "ab"))
    assert.is_true(crypto.equal("", ""))
  end)
end)
