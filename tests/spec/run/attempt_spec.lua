--- One attempt's dealings with its worker, without one.
local attempt = require("ciranda.run.attempt")
local errors = require("ciranda.io.error")
local lag = require("ciranda.io.lag")

describe("run.attempt", function()
  local function attempt_of()
    return attempt.new({
      run = "r1",
      id = "0001-abcdef",
      worker = { slice = 0, index = 0, address = "10.0.0.1" },
      link = { waited = 0 },
      guard = { bytes = "", sha256 = "0" },
    })
  end

  --- An attempt whose step fails so twice, and then succeeds.
  local function persists(problem, seconds)
    lag.clock(true) -- an exact reading later may be before one that is not: by how long this program has had to wait
    local one = attempt_of()
    local tries = 0
    local ok, result = pcall(one.persist, one, 0.05, "stage", function()
      tries = tries + 1
      if tries < 3 then
        errors.raise(problem)
      end
      return "staged"
    end, seconds)
    return ok and result or result.code
  end

  it(
    "waits for a worker that is slow as long as staging may take, and not for one that is not there",
    function()
      local slow = { code = "timeout", op = "ssh.exec", message = "no answer within 60 s" }
      assert.equal("staged", persists(slow, 60))
      assert.equal("staged", persists({ code = "timeout", phase = "kex", message = "no answer" }, 60))
      assert.equal("lost", persists(slow))
      assert.equal("lost", persists({ code = "timeout", phase = "connect", message = "no answer" }, 60))
      assert.equal("lost", persists({ code = "refused", phase = "connect", message = "refused" }, 60))
    end
  )

  it("asks again to end an earlier attempt whose guard is killed meanwhile", function()
    local one, asked, script = attempt_of(), 0, nil
    local answers = {
      {
        code = 1,
        stdout = "{}\n",
        stderr = "ciranda-guard: r0 has lost its guard: ask again; the line above says what is known\n",
      },
      { code = 3, stdout = "{}\n", stderr = "" },
    }
    function one.ask_guard()
      asked = asked + 1
      return answers[asked]
    end
    function one.shell(_, text)
      script = text
    end
    one:end_earlier(".ciranda/r0/0001-aaaaaa", 1)
    assert.same({ 2, "touch .ciranda/r0/0001-aaaaaa/forgotten" }, { asked, script })
  end)
end)
