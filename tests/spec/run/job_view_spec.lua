local err = require("ciranda.io.error")
local json = require("ciranda.io.json")
local view = require("ciranda.run.job_view")

describe("run.job_view", function()
  --- A bucket in memory: contents by name.
  local function bucket(contents)
    local storage = { contents = contents, downloads = 0 }
    function storage.list(_, _, options)
      local list = {}
      for name, data in pairs(contents) do
        if name:sub(1, #options.prefix) == options.prefix then
          list[#list + 1] = { name = name, size = tostring(#data), generation = tostring(#data) }
        end
      end
      return list
    end
    function storage.delete(_, _, name)
      contents[name] = nil
    end
    function storage.download(_, _, name, range)
      storage.downloads = storage.downloads + 1
      if not contents[name] then
        require("ciranda.io.error").raise({ code = "not_found", message = name })
      end
      return range and contents[name]:sub(range.first + 1, range.last + 1) or contents[name]
    end
    return storage
  end

  local function status(number, generation)
    return json.encode({ generation = generation or 1, status = number, attempt = 1, time = "t" })
  end

  local place = { bucket = "b", prefix = "p/r", workers = 2, generation = 1 }

  it("reads stages, statuses and logs, in order, each object once", function()
    local storage = bucket({
      ["p/r/main_command_log_slice_0_worker_0"] = "completed step: 3, x\ncompleted step: 4, x\n",
      ["p/r/status_slice_10_worker_0"] = status(7),
      ["p/r/status_slice_2_worker_1"] = status(0),
      ["p/r/stage_slice_2_worker_1"] = '{"stage":"finished","generation":1,"attempt":3,"time":"t"}',
      ["p/r/stage_slice_3_worker_0"] = "not JS",
      ["p/r/manifest.json"] = "[]",
    })
    local known, workers, finished = {}, nil, nil
    for _ = 1, 2 do
      workers, finished = view.look(storage, place, known)
    end
    assert.equal(4, storage.downloads)
    assert.equal(2, finished)
    local shown = {}
    for i, worker in ipairs(workers) do
      shown[i] = ("%d/%d %s %s"):format(worker.slice, worker.worker, worker.status, worker.stage)
    end
    assert.same({ "0/0 nil nil", "2/1 0 finished", "3/0 nil nil", "10/0 7 nil" }, shown)
    assert.equal(4, view.step(storage, place, workers[1]))
    assert.is_nil(view.step(storage, place, workers[2]))
  end)

  it("takes nothing of an older generation for this one", function()
    local storage = bucket({ ["p/r/status_slice_0_worker_0"] = status(0, 1) })
    local _, finished = view.look(storage, { bucket = "b", prefix = "p/r", generation = 2 })
    assert.equal(0, finished)
  end)

  it("names the failure that the workers have settled as the first, else the first in order", function()
    local workers = { { slice = 0, worker = 0, status = 3 }, { slice = 1, worker = 0, status = 5 } }
    local storage = bucket({ ["p/r/failed-1"] = '{"slice":1,"worker":0,"status":5}' })
    assert.equal(5, view.first_failure(storage, place, workers).status)
    assert.equal(3, view.first_failure(bucket({}), place, workers).status)
    assert.is_nil(view.first_failure(bucket({}), place, { { slice = 0, worker = 0, status = 0 } }))
  end)

  --- A queued resource that is in one state after another.
  local function queued_resource(states, log)
    return setmetatable({
      id = "q",
      tpu = { project = "p", zone = "z" },
      state = function()
        return #states > 1 and table.remove(states, 1) or states[1]
      end,
      delete = function()
        log[#log + 1] = "delete"
      end,
      wait = function(_, wanted)
        if wanted == "ACTIVE" then
          local code = ({ SUSPENDED = "preempted", FAILED = "quota" })[states[1]] or "failed"
          err.raise({ code = code, message = "the reason of " .. code })
        end
      end,
    }, {
      __tostring = function()
        return "queued resource q"
      end,
    })
  end

  local function follow(options)
    options.place = place
    options.progress = { say = function() end, status = function() end }
    options.journal = { intent = function() end, append = function() end }
    options.json, options.every = true, 0
    return view.follow(options)
  end

  it("ends with the reason when the queued resource ends before the job", function()
    for state, code in pairs({
      SUSPENDED = "preempted",
      FAILED = "quota",
      DELETING = "failed",
      gone = "failed",
    }) do
      local ok, e = pcall(follow, {
        storage = bucket({}),
        queued_resource = queued_resource({ state ~= "gone" and state or nil }, {}),
      })
      assert.is_false(ok)
      assert.equal(code, e.code)
      assert.matches(
        ("the reason of %s, and only 0 of 2 workers have finished"):format(code),
        e.message,
        1,
        true
      )
    end
  end)

  it("asks again where that may help, and forgets what the workers of before had settled", function()
    local log, asked = {}, {}
    local contents = {
      ["p/r/status_slice_0_worker_0"] = status(0),
      ["p/r/finished-1_slice_0_worker_0"] = "",
      ["p/r/failed-1"] = '{"slice":0,"worker":0,"status":1}',
      ["p/r/interruption_slice_1_worker_0"] = "",
      ["p/r/main_command_log_slice_0_worker_0"] = "log",
      ["p/r/generation"] = "",
    }
    local storage = bucket(contents)
    local ended = follow({
      storage = storage,
      queued_resource = queued_resource({ "ACTIVE", "SUSPENDED" }, log),
      again = function(reason)
        asked[#asked + 1] = reason.code
        view.forget(storage, place)
        local second = queued_resource({ "ACTIVE" }, log)
        second.state = function()
          -- What is left when the second request is first looked at; then its workers finish.
          for name in pairs(contents) do
            log[#log + 1] = name
          end
          contents["p/r/status_slice_0_worker_0"] = status(0)
          contents["p/r/status_slice_1_worker_0"] = status(0)
          return "ACTIVE"
        end
        return second
      end,
    })
    assert.equal(0, ended.status)
    assert.same({ "preempted" }, asked)
    table.sort(log)
    assert.same({ "delete", "p/r/generation", "p/r/main_command_log_slice_0_worker_0" }, log)
  end)
end)
