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

  local function values()
    return {
      RUN = "r",
      BUCKET = "b",
      PREFIX = "p/r",
      STORAGE = "http://127.0.0.1:1/",
      TPU = "http://127.0.0.1:1/",
      VERSION = "v2",
      PROJECT = 'it\'s "$X" `date` \\ # !',
      ZONE = "z",
      QUEUED_RESOURCE = "r",
      NUM_SLICES = 1,
      NUM_WORKERS = 1,
      UPLOAD_EVERY = 30,
      PEERS_EVERY = 10,
      SETTLE = 5,
      GRACE = 300,
    }
  end

  it("writes a script that every POSIX shell here can read, whatever its values are", function()
    local text = job_script.text(values())
    for _, shell in ipairs({ "dash", "bash" }) do
      local checked = process.run({ shell, "-n", stdin = text })
      assert.equal(0, checked.code, checked.stderr)
      -- The assignments give back what was put in.
      local assignments = text:match("^(.-)\nset %-u\n")
      local said = process.run({ shell, stdin = assignments .. "\nprintf '%s' \"$PROJECT\"\n" })
      assert.equal(values().PROJECT, said.stdout)
    end
  end)

  it("refuses to be written without one of its values", function()
    local incomplete = values()
    incomplete.BUCKET = nil
    assert.has_error(function()
      job_script.text(incomplete)
    end)
  end)

  --- A bucket in memory.
  local function bucket()
    local objects, version = {}, 0
    return {
      objects = objects,
      stat = function(_, _, name)
        return objects[name]
      end,
      download = function(_, _, name)
        return objects[name].data
      end,
      upload = function(_, _, name, source, options)
        local wanted = options and options.if_generation_match
        if wanted and wanted ~= (objects[name] and objects[name].generation or "0") then
          error("precondition", 0)
        end
        version = version + 1
        objects[name] = {
          data = type(source) == "table" and source.path or source,
          generation = tostring(version),
        }
      end,
    }
  end

  it("publishes what is to be run as a generation, the object that names it last and guarded", function()
    local storage = bucket()
    local content = {
      command = "echo 1",
      bundle = { name = "x.tar.gz", path = "/tmp/x", sha256 = "b1" },
      manifest = {},
      guard = { bytes = "guard", sha256 = "g1" },
    }
    local place = { bucket = "b", prefix = "p/r" }
    assert.equal(0, (job.generation(storage, place)))
    job.publish(storage, place, content)
    content.command = "echo 2"
    job.publish(storage, place, content)
    assert.equal(2, place.generation)
    assert.equal(2, (job.generation(storage, place)))
    -- printf 'echo 2\n' | sha256sum
    local sha256 = "03623d0eb5add7bae44b980a4b4867e6908b38385d9bb9057ae3e3d779d303f9"
    assert.equal(
      "GENERATION=2\nBUNDLE=x.tar.gz\nBUNDLE_SHA256=b1\nCOMMAND_SHA256="
        .. sha256
        .. "\nGUARD=ciranda-guard-g1\nGUARD_SHA256=g1\n",
      storage.objects["p/r/generation"].data
    )
    assert.equal("echo 2\n", storage.objects["p/r/command-" .. sha256].data)
    local found = { bucket = "b", prefix = "p/r" }
    assert.is_true(job.is_published(storage, found, content))
    assert.equal(2, found.generation)
    content.command = "echo 3"
    assert.is_false(job.is_published(storage, found, content))
    assert.is_false(job.is_published(storage, { bucket = "b", prefix = "p/nothing" }, content))
    -- Somebody else's generation in between is not overwritten.
    local upload = storage.upload
    function storage.upload(self, name, object, source, options)
      if object:find("generation") then
        upload(self, name, object, "GENERATION=3\n")
      end
      return upload(self, name, object, source, options)
    end
    assert.is_false((pcall(job.publish, storage, place, content)))
  end)
end)
