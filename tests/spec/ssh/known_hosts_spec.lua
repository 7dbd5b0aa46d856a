local crypto = require("ciranda.io.crypto")
local fs = require("ciranda.io.fs")
local known_hosts = require("ciranda.ssh.known_hosts")
local process = require("ciranda.io.process")

local support = dofile("tests/spec/ssh/support.lua")

--- A key that is none, but reads like one.
local function fake_key(text)
  return "ssh-ed25519", (">s4s4"):pack("ssh-ed25519", (text .. ("\0"):rep(32)):sub(1, 32))
end

local function line_of(names, text)
  local key_type, blob = fake_key(text)
  return ("%s %s %s\n"):format(names, key_type, crypto.base64(blob))
end

local function blobs(list)
  local texts = {}
  for index, entry in ipairs(list) do
    texts[index] = entry.blob:sub(20):gsub("%z+$", "")
  end
  return texts
end

local function lookup(text, host, port)
  return known_hosts.lookup(known_hosts.parse(text, "known_hosts"), host, port or 22)
end

describe("known_hosts", function()
  teardown(support.clean)

  it("finds names, lists, ports and addresses", function()
    local text = line_of("alpha,Beta,10.0.0.1", "one") .. line_of("[gamma]:2222", "two")
    for _, host in ipairs({ "alpha", "ALPHA", "beta", "10.0.0.1" }) do
      assert.are.same({ "one" }, blobs(lookup(text, host).keys))
    end
    assert.are.same({ "two" }, blobs(lookup(text, "gamma", 2222).keys))
    assert.are.same({}, lookup(text, "gamma").keys)
    assert.are.same({}, lookup(text, "alph").keys)
  end)

  it("lets a name at port 22 vouch for another port, without contradicting", function()
    local known = lookup(line_of("alpha", "one"), "alpha", 2222)
    assert.are.same({}, known.keys)
    assert.are.same({ "one" }, blobs(known.fallback))
  end)

  it("understands wildcards and negation", function()
    local text = line_of("*.example,!bad.example,node?", "one") .. line_of("[10.1.*]:2201", "two")
    assert.are.same({ "one" }, blobs(lookup(text, "good.example").keys))
    assert.are.same({}, lookup(text, "bad.example").keys)
    assert.are.same({ "one" }, blobs(lookup(text, "node7").keys))
    assert.are.same({}, lookup(text, "node77").keys)
    assert.are.same({ "two" }, blobs(lookup(text, "10.1.2.3", 2201).keys))
    -- A dot is a dot.
    assert.are.same({}, lookup(line_of("a.b", "one"), "axb").keys)
  end)

  it("finds hashed names", function()
    local file = support.write("known_hosts", line_of("alpha", "one") .. line_of("[beta]:2222", "two"))
    process.run({ "ssh-keygen", "-q", "-H", "-f", file }):check()
    local text = fs.read(file)
    assert.is_nil(text:find("alpha", 1, true))
    assert.are.same({ "one" }, blobs(lookup(text, "alpha").keys))
    assert.are.same({ "two" }, blobs(lookup(text, "beta", 2222).keys))
    assert.are.same({}, lookup(text, "gamma").keys)
  end)

  it("keeps revoked keys and authorities apart", function()
    local text = "@revoked "
      .. line_of("*", "bad")
      .. "@cert-authority "
      .. line_of("*.example", "ca")
      .. line_of("alpha.example", "one")
    local known = lookup(text, "alpha.example")
    assert.are.same({ "bad" }, blobs(known.revoked))
    assert.are.same({ "ca" }, blobs(known.authorities))
    assert.are.same({ "one" }, blobs(known.keys))
  end)

  it("leaves out what it cannot understand, and says where the rest is", function()
    local good = line_of("alpha", "one")
    local text = "# comment\n\n   \nalpha\nalpha ssh-ed25519\nalpha ssh-ed25519 ????\n@odd "
      .. good
      .. "alpha ssh-rsa "
      .. good:match("%S+\n")
      .. "|1|???|??? ssh-ed25519 "
      .. good:match("%S+\n")
      .. "\r\n"
      .. good
    local entries = known_hosts.parse(text, "here")
    assert.are.equal(1, #entries)
    assert.are.equal("here:11", entries[1].where)
  end)

  it("adds a line after one that has no end", function()
    local file = support.write("known_hosts", (line_of("alpha", "one"):gsub("\n$", "")))
    local key_type, blob = fake_key("two")
    known_hosts.add(file, "beta", 2222, key_type, blob)
    local entries = known_hosts.load({ file, support.path("missing") })
    assert.are.same({ "one" }, blobs(known_hosts.lookup(entries, "alpha", 22).keys))
    assert.are.same({ "two" }, blobs(known_hosts.lookup(entries, "beta", 2222).keys))
  end)

  it("makes the file and its directory private", function()
    local file = support.path("home") .. "/.ssh/known_hosts"
    known_hosts.add(file, "alpha", 22, fake_key("one"))
    assert.are.equal(tonumber("600", 8), fs.stat(file).mode)
    assert.are.equal(tonumber("700", 8), fs.stat(fs.dirname(file)).mode)
  end)

  it("agrees with ssh-keygen -F on files made at random", function()
    -- CIRANDA_SEED makes other files; a failure prints the seed, so that they can be made again.
    local seed = math.tointeger(tonumber(os.getenv("CIRANDA_SEED"))) or 1
    local state = seed
    local function random(limit)
      state = (state * 6364136223846793005 + 1442695040888963407) & 0x7fffffffffffffff
      return (state >> 33) % limit + 1
    end
    local function pick(list)
      return list[random(#list)]
    end
    local NAMES = { "alpha", "beta.example", "10.0.0.1", "::1", "gamma-1" }
    local PATTERNS = { "*", "al*", "*.example", "10.0.?.1", "!beta.example", "!*", "gamma-?", "?" }
    for round = 1, 60 do
      local parts = {}
      for index = 1, random(6) do
        local names = {}
        for _ = 1, random(3) do
          local name = random(2) == 1 and pick(NAMES) or pick(PATTERNS)
          if random(4) == 1 and name:sub(1, 1) ~= "!" then
            name = ("[%s]:%d"):format(name, pick({ 22, 2222 }))
          end
          names[#names + 1] = name
        end
        local marker = pick({ "", "", "", "", "@revoked ", "@cert-authority " })
        parts[#parts + 1] = marker .. line_of(table.concat(names, ","), ("key%d"):format(index))
      end
      local file = support.write("known_hosts", table.concat(parts))
      if random(3) == 1 then
        process.run({ "ssh-keygen", "-q", "-H", "-f", file })
      end
      local text = fs.read(file)
      for _, host in ipairs(NAMES) do
        for _, port in ipairs({ 22, 2222 }) do
          local name = known_hosts.name(host, port)
          local said = process.run({ "ssh-keygen", "-F", name, "-f", file }).stdout
          local theirs = {}
          for line in said:gmatch("[^\n]+") do
            local key = line:sub(1, 1) ~= "#" and line:match("ssh%-ed25519 (%S+)")
            if key then
              theirs[#theirs + 1] = key
            end
          end
          local known = lookup(text, host, port)
          local ours = {}
          for _, list in ipairs({ known.keys, known.revoked, known.authorities }) do
            for _, entry in ipairs(list) do
              ours[#ours + 1] = crypto.base64(entry.blob)
            end
          end
          -- Revoked lines and authorities are also found by the bare name, as ssh itself looks for them.
          local found = {}
          for _, key in ipairs(ours) do
            found[key] = true
          end
          for _, key in ipairs(theirs) do
            assert.is_true(
              found[key] ~= nil,
              ("seed %d round %d %s: %s\n%s"):format(seed, round, name, key, text)
            )
          end
          if port == 22 then
            assert.are.equal(#theirs, #ours, ("seed %d round %d %s\n%s"):format(seed, round, name, text))
          end
        end
      end
    end
  end)
end)
