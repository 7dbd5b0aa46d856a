local err = require("ciranda.io.error")
local job = require("ciranda.run.job")
local job_script = require("ciranda.run.job_script")
local process = require("ciranda.io.process")

describe("run.job", function()
  it("makes legal names", function()
    assert.equal("me-2026-01-02", job.legal_name("Me_2026-01-02"))
    assert.equal("x", job.legal_name("123-x-"))
    assert.equal("job", job.legal_name("___"))
    assert.equal(58, #job.legal_name(("a"):rep(100)))
    assert.equal("a-b", job.legal_name("a..--__b"))
  end)

  it("finds the place of a job's objects however people write it", function()
    for _, case in ipairs({
      { "bucket", "", "bucket", "run" },
      { "gs://bucket/", nil, "bucket", "run" },
      { "bucket", "gs://bucket/dir/", "bucket", "dir/run" },
      { "bucket", "/a/b/", "bucket", "a/b/run" },
      { "bucket", "gs://bucket", "bucket", "run" },
    }) do
      local place = job.place({ bucket = case[1], directory = case[2], run = "run" })
      assert.same({ case[3], case[4] }, { place.bucket, place.prefix })
    end
    for _, bad in ipairs({ { "bucket/dir", "" }, { "", "" }, { "bucket", "a b" }, { "bucket", "a;b" } }) do
      local ok, e = pcall(job.place, { bucket = bad[1], directory = bad[2], run = "run" })
      assert.is_false(ok)
      assert.equal("usage", e.code)
    end
  end)

  it("knows the usual runtime", function()
    assert.equal("v2-alpha-tpuv5-lite", job.usual_runtime("v5litepod-16"))
    assert.equal("tpu-ubuntu2204-base", job.usual_runtime("v4-8"))
    assert.is_nil(job.usual_runtime("v99-8"))
  end)

  local function values(more)
    local all = {
      RUN = "r",
      COMMAND = "true",
      BUCKET = "b",
      PREFIX = "p/r",
      STORAGE = "http://127.0.0.1:1/",
      TPU = "http://127.0.0.1:1/",
      VERSION = "v2",
      BUNDLE = "x.tar.gz",
      BUNDLE_SHA256 = "0",
      GUARD = "g",
      GUARD_SHA256 = "0",
      PROJECT = "p",
      ZONE = "z",
      QUEUED_RESOURCE = "",
      NUM_SLICES = 1,
      NUM_WORKERS = 1,
      UPLOAD_EVERY = 30,
    }
    for name, value in pairs(more or {}) do
      all[name] = value
    end
    return all
  end

  it("writes a script that every POSIX shell here can read, whatever COMMAND is", function()
    local command = "echo 'it''s' \"$X\" `date` \\ # ! \n second line; exit 3"
    local text = job_script.text(values({ COMMAND = command }))
    for _, shell in ipairs({ "dash", "bash" }) do
      local checked = process.run({ shell, "-n", stdin = text })
      assert.equal(0, checked.code, checked.stderr)
      -- The assignments give back what was put in.
      local assignments = text:match("^(.-)\nset %-u\n")
      local said = process.run({ shell, stdin = assignments .. "\nprintf '%s' \"$COMMAND\"\n" })
      assert.equal(command, said.stdout)
    end
  end)

  it("refuses to be written without one of its values", function()
    local incomplete = values()
    incomplete.BUCKET = nil
    assert.has_error(function()
      job_script.text(incomplete)
    end)
  end)

  it("reads statuses and logs from the bucket, in order, each status once", function()
    local downloads = 0
    local storage = {
      list = function()
        return {
          { name = "p/r/main_command_log_slice_0_worker_0", size = "12" },
          { name = "p/r/status_slice_10_worker_0", size = "9" },
          { name = "p/r/status_slice_2_worker_1", size = "9" },
          { name = "p/r/manifest.json", size = "2" },
        }
      end,
      download = function(_, _, name)
        downloads = downloads + 1
        return name:find("_10_") and '{"status":7}' or '{"status":0}'
      end,
    }
    local known = {}
    local view
    for _ = 1, 2 do
      view = job.look(storage, { bucket = "b", prefix = "p/r" }, known)
    end
    assert.equal(2, downloads)
    assert.same({ 2, 0, 10, 7 }, {
      view.statuses[1].slice,
      view.statuses[1].status,
      view.statuses[2].slice,
      view.statuses[2].status,
    })
    assert.equal(12, view.logs[1].size)
  end)

  -- A job of two workers of which nothing is in the bucket but what `objects` says.
  local function follow(state, code, objects, more)
    local options = {
      storage = {
        list = function()
          return objects
        end,
        download = function()
          return '{"status":0}'
        end,
        delete = function(_, _, name)
          table.remove(objects, 1)
          objects.deleted = name
        end,
      },
      place = { bucket = "b", prefix = "p", workers = 2 },
      progress = { say = function() end, status = function() end },
      queued_resource = setmetatable({
        id = "q",
        state = function()
          return state
        end,
        wait = function()
          err.raise({ code = code, message = "the reason of " .. code })
        end,
      }, {
        __tostring = function()
          return "queued resource q"
        end,
      }),
      every = 0,
    }
    for name, value in pairs(more or {}) do
      options[name] = value
    end
    return pcall(job.follow, options)
  end

  it("ends with the reason when the queued resource ends before the job", function()
    for state, code in pairs({ SUSPENDED = "preempted", FAILED = "quota", DELETING = "failed" }) do
      local ok, e = follow(state, code, {})
      assert.is_false(ok)
      assert.equal(code, e.code)
      assert.matches("the reason of " .. code, e.message, 1, true)
      assert.matches("only 0 of 2 workers have finished", e.message, 1, true)
    end
  end)

  it("asks again where that may help, and forgets what the failed slices have finished", function()
    local objects, asked = { { name = "p/status_slice_0_worker_0", size = "1" } }, {}
    local ok, e = follow("FAILED", "stockout", objects, {
      again = function(reason)
        asked[#asked + 1] = reason.code
        if #asked == 1 then
          return {
            id = "q",
            state = function()
              return "FAILED"
            end,
            wait = function()
              err.raise({ code = "quota", message = "no more" })
            end,
          }
        end
      end,
    })
    assert.is_false(ok)
    assert.equal("quota", e.code)
    assert.same({ "stockout", "quota" }, asked)
    assert.equal("p/status_slice_0_worker_0", objects.deleted)
    assert.matches("only 0 of 2", e.message, 1, true)
  end)
end)
