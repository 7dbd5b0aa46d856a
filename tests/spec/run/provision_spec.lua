local err = require("ciranda.io.error")
local provisions = require("ciranda.run.provision")

describe("run.provision", function()
  --- A project in which every request is accepted, and what is done in it.
  local function project()
    local log = {}
    local tpu = { project = "p", zone = "z" }
    function tpu.create(_, request)
      log[#log + 1] = "create"
      return {
        tpu = tpu,
        id = request.id,
        version = "v2",
        delete = function()
          log[#log + 1] = "delete"
        end,
        wait = function() end,
      }
    end
    local facts = function() end
    return tpu,
      {
        intent = facts,
        append = facts,
        state = function()
          return { objects = {} }
        end,
      },
      log
  end

  it("asks again for what was preempted, so often as it was told, and says so", function()
    local tpu, journal, log = project()
    local notes = {}
    local provision = provisions.start({
      tpu = tpu,
      journal = journal,
      request = { id = "q", slices = 2 },
      preemptions = 2,
      pause = 0,
      on_note = function(text)
        notes[#notes + 1] = text:match("asking again.*")
      end,
    })
    local reason = err.new({ code = "preempted", message = "SUSPENDED" })
    assert.is_true(provision:again(reason))
    assert.is_true(provision:again(reason))
    assert.is_false(provision:again(reason))
    assert.same({ "create", "delete", "create", "delete", "create" }, log)
    assert.same({ "asking again in 0 s (1 of 2 times)", "asking again in 0 s (2 of 2 times)" }, notes)
  end)

  it("asks again for nothing that was preempted unless it was told, nor after quota", function()
    for _, code in ipairs({ "preempted", "quota", "stockout" }) do
      local tpu, journal, log = project()
      local provision = provisions.start({
        tpu = tpu,
        journal = journal,
        request = { id = "q" },
        pause = 0,
        preemptions = code ~= "preempted" and 1 or nil,
        on_note = error,
      })
      assert.is_false(provision:again(err.new({ code = code, message = code })))
      assert.same({ "create" }, log)
    end
  end)
end)
