local errors = require("ciranda.io.error")

--- Another instance of the module, as a test runner makes one for each file.
local function another_instance()
  local saved = package.loaded["ciranda.io.error"]
  package.loaded["ciranda.io.error"] = nil
  local other = require("ciranda.io.error")
  package.loaded["ciranda.io.error"] = saved
  assert.not_equal(errors, other)
  return other
end

describe("an error", function()
  it("says operation, target and message, each once", function()
    local function text(fields)
      fields.code = "failed"
      return tostring(errors.new(fields))
    end
    assert.equal("it broke", text({ message = "it broke" }))
    assert.equal(
      "fs.read /etc/x: no such file",
      text({ message = "no such file", op = "fs.read", target = "/etc/x" })
    )
    assert.equal(
      "fs.read: cannot open /etc/x",
      text({
        message = "cannot open /etc/x",
        op = "fs.read",
        target = "/etc/x",
      })
    )
  end)

  it("is recognised across instances of the module, by kind and by code", function()
    local other = another_instance()
    local e = other.new({ code = "timeout", message = "too late" })
    assert.is_true(errors.is(e))
    assert.is_true(errors.is(e, "timeout"))
    assert.is_true(errors.is(e, "auth", "timeout"))
    assert.is_false(errors.is(e, "auth"))
    for _, value in ipairs({ "timeout", { code = "timeout" }, 5, print }) do
      assert.is_false(errors.is(value, "timeout"))
    end
    assert.is_false(errors.is(nil))
  end)

  it("is fatal for whoever catches it when it is a cancellation, a mistake, or none of ours", function()
    for _, code in ipairs({ "cancelled", "misuse", "internal" }) do
      assert.is_true(errors.is_fatal(errors.new({ code = code, message = "m" })), code)
    end
    for _, value in ipairs({ "attempt to index a nil value", { code = "timeout", message = "m" } }) do
      assert.is_true(errors.is_fatal(value))
    end
    assert.is_false(errors.is_fatal(errors.new({ code = "timeout", message = "m" })))
  end)

  it("is raised with the traceback of the place", function()
    local function culprit()
      errors.raise({ code = "auth", message = "no key fits" })
    end
    local ok, e = pcall(function()
      culprit()
    end)
    assert.is_false(ok)
    assert.equal("auth", e.code)
    assert.matches("'culprit'", e.traceback)
    local again
    ok, again = pcall(errors.raise, e)
    assert.is_false(ok)
    assert.equal(e, again)
    assert.matches("'culprit'", again.traceback)
  end)

  it("needs a code that is known and a message", function()
    for _, fields in ipairs({
      { code = "nonsense", message = "x" },
      { code = "failed" },
      { message = "x" },
      "x",
    }) do
      local ok, e = pcall(function()
        errors.new(fields)
      end)
      assert.is_false(ok)
      assert.is_true(errors.is(e, "misuse"))
      assert.matches("error_spec%.lua:%d+: error%.new", e.message)
    end
  end)

  it("describes its causes, what came after it, and where", function()
    local e = errors.new({
      code = "failed",
      message = "cannot start",
      cause = errors.new({ code = "refused", message = "connection refused", cause = "ECONNREFUSED" }),
    })
    e.suppressed = { "clean-up failed" }
    e.traceback = "stack traceback:\n\tsomewhere"
    assert.equal(
      "cannot start\n  because: connection refused\n  because: ECONNREFUSED\n  also: clean-up failed\n"
        .. "stack traceback:\n\tsomewhere",
      e:describe()
    )
  end)
end)

describe("error.wrap", function()
  it("keeps what the engine passed and adds what is known here", function()
    local engine = { code = "refused", message = "connection refused", phase = "connect" }
    local e = errors.wrap(engine, { op = "ssh.connect", target = "10.0.0.1:22" })
    assert.is_true(errors.is(e, "refused"))
    assert.equal("connect", e.phase)
    assert.equal("ssh.connect 10.0.0.1:22: connection refused", tostring(e))
    assert.is_nil(getmetatable(engine))
  end)

  it("reads the names of libuv", function()
    for text, code in pairs({
      ["ENOENT: no such file or directory: /x"] = "not_found",
      ["ECONNREFUSED"] = "refused",
      ["ENOSPC: no space left on device"] = "no_space",
      ["EAI_AGAIN: temporary failure"] = "resolve",
      ["EWHATEVER: never heard of"] = "io",
      ["just a text"] = "failed",
    }) do
      assert.equal(code, errors.wrap(text).code, text)
    end
    assert.equal("parse", errors.wrap("just a text", { code = "parse" }).code)
  end)

  it("makes a new error of one of ours, with the same code and the old one as its cause", function()
    local inner = errors.new({ code = "timeout", message = "too late", op = "connect", target = "10.0.0.1" })
    local outer = errors.wrap(inner, { op = "fleet.run", target = "slice 0 worker 1" })
    assert.is_true(errors.is(outer, "timeout"))
    assert.equal(inner, outer.cause)
    assert.equal("fleet.run slice 0 worker 1: connect 10.0.0.1: too late", tostring(outer))
    assert.equal(inner, errors.wrap(inner))
    assert.equal("connect 10.0.0.1: too late", tostring(inner))
  end)

  it("lets a cancellation through untouched", function()
    local cancelled = errors.new({ code = "cancelled", message = "cancelled" })
    assert.equal(cancelled, errors.wrap(cancelled, { op = "x", target = "y" }))
  end)

  it("keeps any other value as the cause", function()
    local value = { anything = 1 }
    local e = errors.wrap(value)
    assert.equal("failed", e.code)
    assert.equal(value, e.cause)
    assert.equal("error(nil)", errors.wrap(nil).message)
  end)
end)

describe("error.misuse", function()
  it("names the line of the level asked for", function()
    local function api()
      errors.misuse(2, "api: %s expected, got %s", "a string", "nil")
    end
    local ok, e = pcall(function()
      api()
    end)
    assert.is_false(ok)
    assert.is_true(errors.is(e, "misuse"))
    local here = debug.getinfo(1, "l").currentline - 4
    assert.equal(
      ("%s:%d: api: a string expected, got nil"):format(debug.getinfo(1, "S").short_src, here),
      e.message
    )
  end)

  it("takes a message with a percent sign as it is", function()
    local _, e = pcall(errors.misuse, 1, "100%")
    assert.matches("100%%$", e.message)
  end)
end)

describe("error.check_options", function()
  it("refuses what is not known, and says what is", function()
    local function api(options)
      errors.check_options(options, { mode = true, sync = true }, "api")
    end
    api({ mode = 1 })
    local ok, e = pcall(function()
      api({ moed = 1 })
    end)
    assert.is_false(ok)
    assert.matches("error_spec%.lua:%d+: api: unknown option 'moed' %(known: mode, sync%)", e.message)
  end)
end)

describe("error.text", function()
  it("is made of any value, whatever its __tostring does", function()
    assert.equal("x", errors.text("x"))
    assert.equal("error(nil)", errors.text(nil))
    assert.equal("5", errors.text(5))
    assert.equal("late (timeout)", errors.text({ code = "timeout", message = "late" }))
    assert.equal("{a = 1, b = x}", errors.text({ b = "x", a = 1 }))
    local broken = setmetatable({}, {
      __tostring = function()
        error("no text", 0)
      end,
    })
    assert.matches("no text", errors.text(broken))
    assert.equal(
      "custom",
      errors.text(setmetatable({}, {
        __tostring = function()
          return "custom"
        end,
      }))
    )
  end)
end)
