-- maxtext, pax, orbax: the command that each makes, tried on stand-ins, and a run of each.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/support.lua")
local uv = require("luv")

-- What stands for a trainer says who it is and what it was given.
local TELL = 'import sys\nprint("%s", *sys.argv[1:])\n'

describe("the recipes of frameworks", function()
  local place, count = nil, 0

  setup(function()
    place = support.place(1, 1)
  end)

  teardown(function()
    place:stop()
    support.ssh.clean()
  end)

  local function write(directory, files)
    for name, text in pairs(files) do
      local path = directory .. "/" .. name
      fs.mkdir_p(path:match("^(.*)/[^/]*$"))
      fs.write(path, text, { sync = false })
    end
  end

  --- Runs a command by sh in a directory of its own.
  local function try(command, files)
    count = count + 1
    local directory = ("%s/try-%d"):format(place.root, count)
    fs.mkdir(directory)
    write(directory, files)
    local env = { PYTHONPATH = false, PYTHONSAFEPATH = false, PYTHONDONTWRITEBYTECODE = "1" }
    local answer = process.run({ "sh", "-c", command, cwd = directory, env = env, timeout = 60 })
    answer.directory = directory
    return answer
  end

  --- What --DRY_RUN prints for a job, of which nobody is asked anything.
  local function dry(recipe, ...)
    local words = { recipe, "--RUNNER=multihost_job", "--DRY_RUN", "--BUCKET_NAME=b", "--RUN_NAME=r", ... }
    local name = table.remove(words, 1)
    return place:run(name, words, { fleet = false })
  end

  local function refused(result, text)
    assert.equal(2, result.code, result.out .. result.err)
    assert.equal("", result.out)
    assert.matches(text, result.err, 1, true)
  end

  describe("maxtext", function()
    local function made(...)
      local result = dry("maxtext", "--TPU_TYPE=v5litepod-16", "--ici_fsdp_parallelism=16", ...)
      assert.equal(0, result.code, result.err)
      return result.out, result.err
    end

    it("sets what its flags say, and leaves what the user sets", function()
      local out, said = made(
        "--MODEL=llama2-7b",
        "--BASE_OUTPUT_DIRECTORY=gs://b/out",
        "--ENABLE_AUTOCHECKPOINT=true",
        "steps=10",
        "dataset_path=a b"
      )
      assert.matches(
        '"$config" run_name=r base_output_directory=gs://b/out model_name=llama2-7b enable_autocheckpoint=true '
          .. "ici_fsdp_parallelism=16 steps=10 'dataset_path=a b'",
        out,
        1,
        true
      )
      assert.matches("ICI +1 +16 +16 +16", said)
      assert.is_nil(said:find("Warning", 1, true))
      out = made("--ENABLE_AUTOCHECKPOINT=true", "run_name=mine", "enable_autocheckpoint=false")
      assert.matches(
        '"$config" ici_fsdp_parallelism=16 run_name=mine enable_autocheckpoint=false;',
        out,
        1,
        true
      )
    end)

    it("warns when only the platform's half of autocheckpoint is asked for", function()
      local _, said = made("--CQR_EXTRA_ARGS=--autocheckpoint-enabled", "enable_autocheckpoint=false")
      assert.matches(
        "Warning: the platform will send SIGTERM before maintenance, but COMMAND runs",
        said,
        1,
        true
      )
    end)

    it("refuses before anything is sent", function()
      local type = "--TPU_TYPE=v5litepod-16"
      refused(dry("maxtext", type, "ici_fsdp_parallelism=4"), "there are 16 devices in a v5litepod-16 slice")
      refused(dry("maxtext", type, "--dcn_data_parallelism=4"), "dcn_data_parallelism=4 multiplies to 4")
      refused(dry("maxtext", type, "--steps"), "--steps")
      refused(dry("maxtext", type, "steps"), "'steps' is no parameter of MaxText: they are written KEY=VALUE")
      refused(
        dry("maxtext", type, "--ici_fsdp_parallelism=16", "ici_fsdp_parallelism=16"),
        "ici_fsdp_parallelism is given twice"
      )
      refused(dry("maxtext", type, "--TPU_PREFIX=x"), "--TPU_PREFIX is no flag of multihost_job")
      local result = place:run("maxtext", { "--RUNNER=multihost_job", "--DRY_RUN" }, { fleet = false })
      refused(result, "--RUNNER=multihost_job needs --BUCKET_NAME")
    end)

    it("finds the trainer and its configuration wherever that MaxText has them", function()
      local command = made("steps=10")
      local config = { ["MaxText/configs/base.yml"] = "" }
      local tail = " MaxText/configs/base.yml run_name=r ici_fsdp_parallelism=16 steps=10\n"
      local function with(files)
        for name, text in pairs(config) do
          files[name] = text
        end
        return try(command, files)
      end
      local flat = with({
        ["MaxText/train.py"] = "import max_utils\n" .. TELL:format("flat"),
        ["MaxText/max_utils.py"] = "",
      })
      assert.equal("flat" .. tail, flat.stdout, flat.stderr)
      local module = with({
        ["MaxText/__init__.py"] = "print('imported once')\n",
        ["MaxText/train.py"] = "from MaxText import other\n" .. TELL:format("module"),
        ["MaxText/other.py"] = "",
      })
      assert.equal("imported once\nmodule" .. tail, module.stdout, module.stderr)
      local newest = try(command, {
        ["src/maxtext/__init__.py"] = "",
        ["src/maxtext/trainers/pre_train/train.py"] = TELL:format("newest"),
        ["src/maxtext/configs/base.yml"] = "",
        ["src/MaxText/train.py"] = TELL:format("a leftover"),
      })
      assert.matches("^newest src/maxtext/configs/base.yml run_name=r ", newest.stdout, 1, false)
      assert.equal(0, newest.code, newest.stderr)
    end)

    it("says on the worker what is not there", function()
      local command = made()
      local nothing = try(command, { ["configs/base.yml"] = "" })
      assert.equal(127, nothing.code)
      assert.matches("MaxText is not here: send its repository", nothing.stderr, 1, true)
      local no_config = try(command, { ["MaxText/train.py"] = TELL:format("never") })
      assert.equal(127, no_config.code)
      assert.equal("", no_config.stdout)
      assert.matches(
        "the configuration configs/base.yml is neither here nor in MaxText",
        no_config.stderr,
        1,
        true
      )
      local program = try(made("--PROGRAM=mine.py", "--CONFIG=my.yml"), {
        ["mine.py"] = TELL:format("mine"),
        ["my.yml"] = "",
      })
      assert.equal("mine my.yml run_name=r ici_fsdp_parallelism=16\n", program.stdout, program.stderr)
    end)

    it("runs by multihost_runner", function()
      write(place.root .. "/code", {
        ["MaxText/configs/base.yml"] = "",
        ["MaxText/train.py"] = TELL:format("trains with"),
      })
      local run = place:name("m")
      local result = place:run("maxtext", { "--RUN_NAME=" .. run, "--ici_fsdp_parallelism=4", "steps=2" })
      assert.equal(0, result.code, result.err)
      assert.equal(
        ("trains with MaxText/configs/base.yml run_name=%s ici_fsdp_parallelism=4 steps=2\n"):format(run),
        result.out
      )
      assert.matches("the parallelism is not checked", result.err, 1, true)
      assert.matches("Multihost runner finished successfully!", result.err, 1, true)
    end)
  end)

  describe("pax", function()
    local function made(...)
      return dry("pax", "--exp=a.B", "--job_log_dir=gs://b/log/", "--TPU_TYPE=v5litepod-8", ...)
    end

    --- A paxml of some release, whose main is `text`.
    local function paxml(release, text)
      return {
        ["paxml/__init__.py"] = "",
        ["paxml/main.py"] = text,
        ["paxml.dist-info/METADATA"] = ("Metadata-Version: 2.1\nName: paxml\nVersion: %s\n"):format(release),
      }
    end

    it("checks the experiment's mesh against the slices", function()
      local shape = "--ICI_MESH_SHAPE=[1, 8, 1]"
      local result = made(shape, "--NUM_SLICES=2", "--DCN_MESH_SHAPE=2,1,1", "--ENABLE_AUTOCHECKPOINT=true")
      assert.equal(0, result.code, result.err)
      assert.matches("ICI +1 +8 +1 +8 +8", result.err)
      assert.is_nil(result.err:find("Warning", 1, true))
      refused(made("--ICI_MESH_SHAPE=1,4,1", "--NUM_SLICES=1"), "there are 8 devices in a v5litepod-8 slice")
      refused(made(shape, "--NUM_SLICES=2"), "DCN")
      refused(made(shape, "--DCN_MESH_SHAPE=2,1"), "2 sizes for 3 axes")
      refused(made("--ICI_MESH_SHAPE=-1,8,1"), "--ICI_MESH_SHAPE has '-1', but takes positive whole numbers")
      refused(made("--DCN_MESH_SHAPE=2,1,1"), "--DCN_MESH_SHAPE needs --ICI_MESH_SHAPE")
      assert.matches("The experiment's mesh is not checked", made().err, 1, true)
    end)

    it("runs paxml 1.1.0 or newer, by name, and keeps its status through tee", function()
      local command = made("--", "--mode=train").out
      local arguments = "--jax_fully_async_checkpoint=1 --exit_after_ondemand_checkpoint=1 --exp=a.B "
        .. "--job_log_dir=gs://b/log/ --mode=train\n"
      for _, release in ipairs({ "1.1.0", "1.10.0", "2.0" }) do
        local good = try(command, paxml(release, TELL:format("pax") .. "sys.exit(1)\n"))
        assert.equal("pax " .. arguments, good.stdout, good.stderr)
        assert.equal(1, good.code)
        assert.equal(good.stdout, fs.read(good.directory .. "/pax_logs.txt"))
      end
      local old = try(command, paxml("1.0.9", TELL:format("never")))
      assert.equal(126, old.code)
      assert.equal("", old.stdout)
      assert.matches("paxml is 1.0.9 here, and saving on SIGTERM needs 1.1.0 or newer", old.stderr, 1, true)
      local none = try(command, {})
      assert.equal(127, none.code)
      assert.matches("paxml is not installed for python3 here", none.stderr, 1, true)
    end)

    it("saves on a signal to the runner, whose step is found although the status is 1", function()
      write(
        place.root .. "/code",
        paxml(
          "1.4.0",
          [[
import os, signal, sys, time
top = [word[14:] for word in sys.argv if word.startswith("--job_log_dir=")][0] + "/checkpoints"
def save(*_):
    os.mkdir(top + "/checkpoint_00000007")
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
os.umask(0)
os.makedirs(top)
print("completed step: 7", flush=True)
while True:
    time.sleep(0.05)
]]
        )
      )
      local run = place:name("p")
      local log = place.root .. "/pax"
      fs.mkdir(log)
      fs.chmod(log, 511)
      local running = place:start("pax", { "--RUN_NAME=" .. run, "--exp=a.B", "--job_log_dir=" .. log })
      place:log_has(run, 0, 0, "completed step: 7")
      uv.kill(running.program.pid, "sigterm")
      local result = running.wait()
      assert.equal(143, result.code, result.err)
      assert.matches(
        ("Checkpoint: saved: step 7 is on disk in %s/checkpoints"):format(log),
        result.err,
        1,
        true
      )
    end)
  end)

  describe("orbax", function()
    local GOOD = "import jax\njax.distributed.initialize()\nif m.reached_preemption(step): pass\n"

    local function made(text, ...)
      fs.write(place.root .. "/code/script.py", text, { sync = false })
      return dry("orbax", "--SCRIPT=script.py", "--CHECKPOINT_DIR=gs://b/c", ...)
    end

    it("warns of what the script lacks", function()
      local result = made(GOOD, "--", "--steps=3")
      assert.equal("exec python3 script.py --checkpoint_dir=gs://b/c --steps=3\n", result.out)
      assert.equal("", result.err)
      result = made("# jax.distributed.initialize()\nm.reached_preemption(step)\n", "--CHECKPOINT_FLAG=")
      assert.equal("exec python3 script.py\n", result.out)
      assert.matches(
        "Warning: script.py: it has no jax.distributed.initialize: nothing catches",
        result.err,
        1,
        true
      )
      assert.is_nil(result.err:find("reached_preemption", 1, true))
      result = made(GOOD:gsub("reached_preemption", "other") .. "signal.signal(signal.SIGTERM, f)\n")
      assert.matches("it has no reached_preemption: it does not leave after a save", result.err, 1, true)
      assert.matches("it sets a handler for SIGTERM of its own", result.err, 1, true)
    end)

    it("refuses a script that is not sent", function()
      refused(
        dry("orbax", "--SCRIPT=none.py", "--CHECKPOINT_DIR=/c"),
        "--SCRIPT=none.py: there is no such file"
      )
      refused(dry("orbax", "--SCRIPT=none.py"), "--CHECKPOINT_DIR")
    end)

    it("runs by multihost_runner, and gives a dry run as a record", function()
      fs.write(place.root .. "/code/script.py", TELL:format("orbax") .. "sys.exit(3)\n", { sync = false })
      local words = { "--SCRIPT=script.py", "--CHECKPOINT_DIR=/c d", "--RUN_NAME=" .. place:name("o") }
      local result = place:run("orbax", words)
      assert.equal(3, result.code, result.err)
      assert.equal("orbax --checkpoint_dir=/c d\n", result.out)
      result = place:run("--json", { "orbax", "--DRY_RUN", table.unpack(words) })
      assert.equal(0, result.code, result.err)
      local record
      for line in result.out:gmatch("[^\n]+") do
        local one = json.decode(line)
        record = one.event == "command" and one or record
      end
      assert.equal("exec python3 script.py '--checkpoint_dir=/c d'", record.command)
    end)
  end)
end)

describe("the recipes of frameworks, by multihost_job on the simulated cloud", function()
  it("become a job, with both halves of autocheckpoint", function()
    local cloud = dofile("tests/spec/recipes/cloud_support.lua").start({ slices = 0, buckets = { "bucket" } })
    finally(function()
      cloud:stop()
    end)
    local result = cloud:run(
      "maxtext",
      "--RUNNER=multihost_job",
      "--TPU_TYPE=v5litepod-4",
      "--NUM_SLICES=1",
      "--BUCKET_NAME=bucket",
      "--RUN_NAME=Night",
      "--ENABLE_AUTOCHECKPOINT=true",
      "--ici_fsdp_parallelism=4"
    )
    assert.equal(0, result.code, result.err)
    -- One half without the other would be a warning.
    assert.is_nil(result.err:find("Warning", 1, true))
    local storage = require("ciranda.gcp.storage").connect({
      endpoint = cloud.simulator.env.STORAGE_EMULATOR_HOST,
      client = require("ciranda.gcp.client").new({
        credentials = require("ciranda.gcp.credentials").none(),
      }),
    })
    local named = storage:download("bucket", "night/generation"):match("COMMAND_SHA256=(%x+)")
    assert.matches(
      'exec python3 MaxText/train.py "$config" run_name=night enable_autocheckpoint=true ici_fsdp_parallelism=4;',
      (storage:download("bucket", "night/command-" .. named)),
      1,
      true
    )
  end)
end)
