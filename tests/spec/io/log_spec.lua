local errors = require("ciranda.io.error")
local json = require("ciranda.io.json")
local log = require("ciranda.io.log")

describe("a log line", function()
  local lines

  before_each(function()
    lines = {}
    log.reset()
    log.configure({
      level = "info",
      form = "plain",
      colour = false,
      write = function(line)
        lines[#lines + 1] = line
      end,
    })
  end)

  after_each(function()
    log.reset()
  end)

  it("has the time, the level, the message and the fields by name", function()
    log.warn("slice is late", { slice = 2, name = "a b", note = "", quote = 'x"y', plain = "word" })
    assert.equal(1, #lines)
    assert.matches(
      '^%d%d:%d%d:%d%d%.%d%d%d warn  slice is late name="a b" note="" plain=word quote="x\\"y" slice=2\n$',
      lines[1]
    )
  end)

  it("is formatted when values follow", function()
    log.info("%d of %s", 3, "8")
    log.info("100% as it is")
    log.info(errors.new({ code = "failed", message = "an error value" }))
    assert.matches("info  3 of 8\n$", lines[1])
    assert.matches("info  100%% as it is\n$", lines[2])
    assert.matches("info  an error value\n$", lines[3])
  end)

  it("is written from its level on", function()
    log.debug("not seen")
    log.configure({ level = "debug" })
    log.debug("seen")
    log.trace("not seen")
    log.configure({ level = "off" })
    log.error("not seen")
    assert.equal(1, #lines)
    assert.is_false(log.enabled("error"))
    log.configure({ level = "trace" })
    assert.is_true(log.enabled("debug"))
  end)

  it("cannot move the cursor, and further lines are indented", function()
    log.info("one\ntwo\27[31m\r\7three")
    assert.matches("one\n    two\\x1b%[31m\\x0d\\x07three\n$", lines[1])
  end)

  it("may be JSON, whatever the fields are", function()
    log.configure({ form = "json" })
    log.error(
      "went wrong",
      { count = 3, ok = true, e = errors.new({ code = "failed", message = "why" }), bad = "\xff" }
    )
    local line = json.decode(lines[1])
    assert.equal("error", line.level)
    assert.equal("went wrong", line.message)
    assert.equal(3, line.count)
    assert.is_true(line.ok)
    assert.equal("why", line.e)
    assert.equal("\u{FFFD}", line.bad)
    assert.matches("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%d%.%d%d%dZ$", line.time)
    assert.equal(1, select(2, lines[1]:gsub("\n", "")))
  end)

  it("never holds a secret, in any form it takes", function()
    local secret = 'ya29.s3cr3t/"token"+\\x'
    log.secret(secret)
    local key = "-----BEGIN KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\nshort\n-----END KEY-----"
    log.secret(key)
    local function both(message, fields)
      log.configure({ form = "plain" })
      log.info(message, fields)
      log.configure({ form = "json" })
      log.info(message, fields)
    end
    both("token is " .. secret .. " and " .. secret)
    both(
      "in a field",
      { token = secret, e = errors.new({ code = "auth", message = "bad token " .. secret }) }
    )
    both("in JSON " .. json.encode({ token = secret }))
    both("in a URL ?t=ya29.s3cr3t%2F%22token%22%2B%5Cx&x=1")
    both("base64 eWEyOS5zM2NyM3QvInRva2VuIitceA==")
    both("whole " .. key)
    both("a line b3BlbnNzaC1rZXktdjEAAAAABG5vbmU of it, and a short one")
    for _, line in ipairs(lines) do
      for _, part in ipairs({ "s3cr3t", "eWEyOS5z", "b3BlbnNzaC1r" }) do
        assert.is_nil(line:find(part, 1, true), line)
      end
      assert.is_truthy(line:find("***", 1, true), line)
    end
    assert.is_truthy(lines[#lines]:find("a short one", 1, true))
    assert.equal("x *** y", log.redact("x " .. secret .. " y"))
  end)

  it("stays readable when a text too short to be a secret is registered", function()
    log.secret("s")
    assert.equal("lists of messages", log.redact("lists of messages"))
  end)

  it("hides a secret that contains another as a whole", function()
    log.secret("inner-secret")
    log.secret("outer-inner-secret-outer")
    assert.equal("***", log.redact("outer-inner-secret-outer"))
  end)

  it("hides secrets registered through another instance of the module", function()
    local saved = package.loaded["ciranda.io.log"]
    package.loaded["ciranda.io.log"] = nil
    local other = require("ciranda.io.log")
    package.loaded["ciranda.io.log"] = saved
    other.secret("told-to-the-other-one")
    log.info("told-to-the-other-one")
    assert.is_nil(lines[1]:find("told", 1, true))
  end)

  it("has no colour when NO_COLOR or a pipe says so, and some when asked", function()
    log.configure({ colour = true })
    log.error("red")
    log.configure({ colour = false })
    log.error("plain")
    assert.matches("\27%[31merror\27%[0m red", lines[1])
    assert.not_matches("\27", lines[2])
  end)

  it("refuses settings that are none", function()
    for _, options in ipairs({ { level = "loud" }, { form = "xml" }, { levle = "info" } }) do
      local ok, e = pcall(log.configure, options)
      assert.is_false(ok)
      assert.is_true(errors.is(e, "misuse"))
    end
    assert.is_false(pcall(log.secret, nil))
    assert.is_false(pcall(log.enabled, "loud"))
  end)
end)

describe("CIRANDA_LOG", function()
  local process = require("ciranda.io.process")
  local task = require("ciranda.task")
  local uv = require("luv")

  local function run(value, extra)
    return task.run(function()
      local script = os.tmpname()
      local _ <close> = setmetatable({}, {
        __close = function()
          os.remove(script)
        end,
      })
      local file <close> = assert(io.open(script, "w"))
      file:write('local log = require("ciranda.io.log") log.debug("low") log.error("high")')
      file:flush()
      local env = { CIRANDA_LOG = value }
      for name, more in pairs(extra or {}) do
        env[name] = more
      end
      return process.run({ uv.exepath(), script, env = env, timeout = 30 }).stderr
    end)
  end

  it("chooses level and form", function()
    assert.matches("^%S+ error high\n$", run(false))
    assert.matches("^%S+ debug low\n%S+ error high\n$", run("debug"))
    assert.equal("", run("off"))
    assert.equal("low", json.decode(run("json,debug"):match("^[^\n]+")).message)
  end)

  it("is not silently wrong", function()
    assert.matches("CIRANDA_LOG: 'loud' is no level", run("loud"))
  end)
end)
