local config = require("ciranda.ssh.config")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

local environment = dofile("tests/fixtures/environment.lua")
local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

local function resolve(text, host, options)
  options = options or {}
  options.file = support.write("config", text)
  return config.resolve(host, options)
end

describe("ssh_config", function()
  teardown(support.clean)

  it("takes the first value, in the blocks that match", function()
    local text = [[
      # a comment
      Host alpha beta*
        HostName 10.0.0.1   # where it is
        Port 2201
        User first
      Host beta2
        Port 2202
        User second
      Host * !gamma
        User rest
        ConnectTimeout 1m5s
    ]]
    local alpha = resolve(text, "alpha")
    assert.are.same({ "10.0.0.1", 2201, "first", 65 }, {
      alpha.hostname,
      alpha.port,
      alpha.user,
      alpha.connect_timeout,
    })
    local beta2 = resolve(text, "beta2")
    assert.are.same({ 2201, "first" }, { beta2.port, beta2.user })
    local gamma = resolve(text, "gamma")
    assert.are.same({ nil, nil, nil }, { gamma.hostname, gamma.user, gamma.connect_timeout })
  end)

  it("reads equal signs, quotes and any case of keywords", function()
    local found = resolve('HOSTNAME=host.example\nuser = "two words"\nPort=  "2203"\n', "x")
    assert.are.same({ "host.example", "two words", 2203 }, { found.hostname, found.user, found.port })
  end)

  it("replaces tokens and finds identity files that exist", function()
    local key = support.key("ed25519")
    local name = key:match("[^/]+$")
    local found = resolve(
      ("IdentityFile %s/%%h\nIdentityFile /nonexistent\nHostName %s\n"):format(support.directory(), name),
      "x"
    )
    assert.are.same({ key }, found.identity_files)
    assert.are.equal("x.example", resolve("HostName %h.example", "x").hostname)
    local jump = resolve("HostName inner\nPort 7\nUser u\nProxyCommand nc -x %n %h %p %r %%", "x")
    assert.are.equal("nc -x x inner 7 u %", jump.proxy_command)
  end)

  it("includes files, within the block that includes them", function()
    local inner = support.write("inner", "User inner\nHost zeta\n  Port 99\n")
    local text = ("Host alpha\n  Include %s\nHost *\n  User outer\n"):format(inner)
    assert.are.equal("inner", resolve(text, "alpha").user)
    assert.are.equal("outer", resolve(text, "beta").user)
    -- The included Host line counts only for hosts of the including block.
    assert.is_nil(resolve(text, "zeta").port)
    assert.are.equal(99, resolve(("Include %s\n"):format(inner), "zeta").port)
    -- With wildcards, and files that are not there.
    local pattern = inner:gsub("[^/]+$", "*-inner")
    assert.are.equal("inner", resolve(("Include %s /nonexistent/*\n"):format(pattern), "y").user)
  end)

  it("ends files that include themselves", function()
    local path = support.path("circle")
    fs.write(path, ("Include %s\n"):format(path))
    local err = fails("usage", nil, config.resolve, "x", { file = path })
    assert.is_truthy(err.message:find("too deeply", 1, true))
  end)

  it("matches by host, original host and user, negated too", function()
    local text = [[
      Match originalhost short
        HostName long.example
      Match host long.example user special
        Port 2205
      Match !user special
        Port 2206
      Match host other exec "touch /nonexistent/file"
        Port 2207
      Match all
        User everybody
    ]]
    assert.are.equal(2205, resolve(text, "short", { user = "special" }).port)
    assert.are.equal(2206, resolve(text, "short").port)
    assert.are.equal(2206, resolve(text, "other").port)
    assert.are.equal("everybody", resolve(text, "other").user)
  end)

  it("knows policies, agents, jumps and their opposites", function()
    local found = resolve(
      "StrictHostKeyChecking accept-new\nIdentityAgent none\nProxyJump a@b:7,c\nServerAliveInterval 0\n",
      "x"
    )
    assert.are.equal("accept-new", found.host_key_policy)
    assert.is_false(found.identity_agent)
    assert.are.equal("a@b:7,c", found.proxy_jump)
    assert.is_false(found.keepalive)
    found = resolve(
      "StrictHostKeyChecking yes\nProxyJump none\nProxyCommand nc\nServerAliveInterval 7\nServerAliveCountMax 2\n",
      "x"
    )
    assert.are.equal("strict", found.host_key_policy)
    assert.is_nil(found.proxy_jump)
    assert.is_nil(found.proxy_command)
    assert.are.same({ interval = 7, count = 2 }, found.keepalive)
  end)

  it("collects the variables to send", function()
    local _ <close> = environment.set({ CIRANDA_SPEC_A = "1", CIRANDA_SPEC_B = "2" })
    local found = resolve('SetEnv X="a b" Y=z\nSendEnv CIRANDA_SPEC_* -CIRANDA_SPEC_B*\n', "x")
    local pairs_found = {}
    for _, pair in ipairs(found.send_env) do
      pairs_found[pair[1]] = pair[2]
    end
    assert.are.same({ X = "a b", Y = "z", CIRANDA_SPEC_A = "1", CIRANDA_SPEC_B = "2" }, pairs_found)
  end)

  it("knows the files of host keys", function()
    local global = { "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2" }
    assert.is_nil(resolve("User x\n", "x").known_hosts)
    assert.are.same(
      { "/one", "/two/x", global[1], global[2] },
      resolve("UserKnownHostsFile /one /two/%n\n", "x").known_hosts
    )
    assert.are.same(
      { "/three" },
      resolve("UserKnownHostsFile none\nGlobalKnownHostsFile /three\n", "x").known_hosts
    )
  end)

  it("names the line of a mistake", function()
    for text, what in pairs({
      ["User x\nPort many\n"] = ":2: port",
      ['User "x\n'] = "a quote is not closed",
      ["Host *\nIdentitiesOnly perhaps\n"] = ":2: identitiesonly",
      ["HostName\n"] = "value is missing",
      ["IdentityFile %z\n"] = "token %z",
      ["SetEnv X\n"] = "NAME=VALUE",
    }) do
      local err = fails("usage", nil, resolve, text, "x")
      assert.is_truthy(err.message:find(what, 1, true), err.message)
    end
    fails("usage", nil, config.resolve, "x", { file = "/nonexistent/config" })
  end)

  it("is read when it is there, and not when it is not wanted", function()
    assert.are.same({}, config.resolve("x", { file = false }).identity_files or {})
  end)

  -- ssh's own answer -----------------------------------------------------------------------------------------------

  local KEYS = {
    hostname = "hostname",
    port = "port",
    user = "user",
    hostkeyalias = "host_key_alias",
    connecttimeout = "connect_timeout",
    serveraliveinterval = "alive_interval",
    serveralivecountmax = "alive_count",
    bindaddress = "bind_address",
    proxyjump = "proxy_jump",
    addressfamily = "address_family",
  }

  --- What `ssh -G` says, by lower-case keyword; lists for those that come several times.
  local function ssh_says(file, host)
    local said = process.run({ "ssh", "-G", "-F", file, host })
    if said.code ~= 0 then
      return nil
    end
    local values, identities, sent, set = {}, {}, {}, {}
    for line in said.stdout:gmatch("[^\n]+") do
      local keyword, value = line:match("^(%S+) (.*)$")
      if keyword == "identityfile" then
        identities[#identities + 1] = value
      elseif keyword == "sendenv" then
        sent[#sent + 1] = value
      elseif keyword == "setenv" then
        set[#set + 1] = value
      elseif keyword then
        values[keyword] = value
      end
    end
    return { values = values, identities = identities, sent = sent, set = set }
  end

  it("runs the programs of Match exec only when asked, and then as ssh does", function()
    local ran = support.path("ran")
    local file = support.write(
      "config",
      ([[
Host inner
  HostName real.%%h
Match exec "echo %%h %%n %%p >> %s; test %%n = inner"
  User right
Match !exec "test %%n = inner"
  Port 2201
Match user nobody-here exec "touch %s.never"
  Port 2202
Match originalhost inner exec "exit 3"
  ServerAliveCountMax 7
]]):format(ran, ran)
    )
    for _, host in ipairs({ "inner", "outer" }) do
      local quiet = config.evaluate(host, { file = file })
      assert.is_nil(quiet.user)
      assert.is_nil(quiet.port)
      assert.is_nil(fs.exists(ran))
      local ours = config.evaluate(host, { file = file, exec = true })
      local mine = fs.read(ran)
      fs.remove(ran)
      local theirs = ssh_says(file, host).values
      assert.are.equal(fs.read(ran), mine)
      fs.remove(ran)
      assert.are.equal(host == "inner" and "right" or nil, ours.user)
      assert.are.equal(theirs.port, tostring(ours.port or 22))
      assert.are.equal(host == "inner" and "right" or theirs.user, theirs.user)
      assert.are.equal(theirs.serveralivecountmax, tostring(ours.alive_count or 3))
    end
    assert.is_nil(fs.exists(ran .. ".never"))
  end)

  it("runs no program of Match exec for a connection that has not asked for it", function()
    local ran = support.path("ran")
    local file = support.write("config", ('Match exec "touch %s"\n  Port 1\n'):format(ran))
    local ssh = require("ciranda.ssh")
    local unasked = select(2, pcall(ssh.connect, { host = "127.0.0.1", port = 2, config = file }))
    assert.are.equal("refused", unasked.code)
    assert.is_nil(fs.exists(ran))
    local asked = select(2, pcall(ssh.connect, { host = "127.0.0.1", config = file, match_exec = true }))
    assert.are.equal("refused", asked.code)
    assert.is_truthy(asked.message:find("127.0.0.1:1:", 1, true), asked.message)
    assert.are.equal("file", fs.exists(ran))
  end)

  it("means the same as to ssh -G, for configurations made at random", function()
    local seed = math.tointeger(tonumber(os.getenv("CIRANDA_SEED"))) or 1
    local state = seed
    local function random(limit)
      state = (state * 6364136223846793005 + 1442695040888963407) & 0x7fffffffffffffff
      return (state >> 33) % limit + 1
    end
    local function pick(list)
      return list[random(#list)]
    end
    local HOSTS = { "alpha", "beta", "alpha.example", "10.0.0.1" }
    local VALUES = {
      HostName = { "real.example", "10.9.9.9", "%h.internal" },
      Port = { "22", "2222", "65535" },
      User = { "one", "two" },
      HostKeyAlias = { "alias1", "alias2" },
      ConnectTimeout = { "5", "1m", "none" },
      ServerAliveInterval = { "0", "15", "1m10s" },
      ServerAliveCountMax = { "1", "9" },
      BindAddress = { "127.0.0.1" },
      AddressFamily = { "inet", "any", "inet6" },
      ProxyJump = { "none", "jump.example", "u@j1:2,j2" },
      IdentityFile = { "~/.ssh/a", "/keys/%r", '"/a b/c"' },
      CertificateFile = { "~/.ssh/a-cert.pub", "/keys/%r-cert.pub" },
      SendEnv = { "LANG LC_*", "A B", "-LC_*" },
      SetEnv = { "A=1", 'B="x y" C=3' },
      StrictHostKeyChecking = { "yes", "accept-new", "no", "ask" },
    }
    local names = {}
    for name in pairs(VALUES) do
      names[#names + 1] = name
    end
    table.sort(names)
    local function write(level)
      local lines = {}
      for _ = 1, random(10) do
        local kind = random(8)
        if kind == 1 then
          lines[#lines + 1] = "Host "
            .. pick({ "*", "alpha", "al*", "* !beta", "!alpha *", "10.0.?.1", "beta alpha" })
        elseif kind == 2 then
          lines[#lines + 1] = "Match "
            .. pick({
              "all",
              "host alpha",
              "host *.example",
              "originalhost alpha,beta",
              "user one",
              "!user one",
              "!host beta user two",
              "host real.example,10.*",
              "final host alpha",
              "localuser nosuchuser",
            })
        elseif kind == 3 and level < 2 then
          local content = write(level + 1)
          lines[#lines + 1] = "# holds:\n#" .. content:gsub("\n(.)", "\n#%1")
          lines[#lines + 1] = "Include " .. support.write("include", content)
        else
          local name = pick(names)
          lines[#lines + 1] = ("%s%s%s%s"):format(
            pick({ "", "  ", "\t" }),
            pick({ name, name:lower(), name:upper() }),
            pick({ " ", "=", " = " }),
            pick(VALUES[name])
          )
        end
      end
      return table.concat(lines, "\n") .. "\n"
    end

    local compared = 0
    for round = 1, 250 do
      local text = write(0)
      local file = support.write("config", text)
      local host = pick(HOSTS)
      local theirs = ssh_says(file, host)
      if theirs then
        compared = compared + 1
        local ours = config.evaluate(host, { file = file })
        local story = ("seed %d round %d host %s\n%s"):format(seed, round, host, text)
        for keyword, field in pairs(KEYS) do
          local mine = ours[field]
          if field == "hostname" then
            mine = mine or host
          end
          if field == "proxy_jump" and mine == "none" then
            mine = nil
          end
          -- What we leave at nil is ssh's default, which it prints.
          if mine ~= nil then
            assert.are.equal(theirs.values[keyword], tostring(mine), keyword .. ": " .. story)
          elseif keyword == "proxyjump" or keyword == "hostkeyalias" or keyword == "bindaddress" then
            assert.is_nil(theirs.values[keyword], keyword .. ": " .. story)
          end
        end
        local identities = {}
        for index, path in ipairs(ours.identity_files or {}) do
          identities[index] = path
        end
        if #identities > 0 then
          assert.are.same(theirs.identities, identities, story)
        end
        assert.are.same(theirs.sent, ours.send_patterns, story)
        local set = {}
        for index, pair in ipairs(ours.set_env or {}) do
          set[index] = pair[1] .. "=" .. pair[2]
        end
        assert.are.same(theirs.set, set, story)
        local policy =
          { ["true"] = "strict", ask = "strict", ["accept-new"] = "accept-new", ["false"] = "accept-new" }
        assert.are.equal(policy[theirs.values.stricthostkeychecking], ours.host_key_policy or "strict", story)
      end
    end
    assert.is_true(compared > 200, "too few could be compared: " .. compared)
  end)
end)
