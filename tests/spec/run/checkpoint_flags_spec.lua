local flags = require("ciranda.run.checkpoint_flags")

describe("run.checkpoint_flags", function()
  local MAXTEXT = "python3 -m MaxText.train MaxText/configs/base.yml run_name=r "
  local PAX =
    "{ python3 .local/lib/python3.10/site-packages/paxml/main.py %s --exp=tasks.lm.X; } 2>&1 | tee pax_logs.txt"

  local function only(command, autocheckpoint)
    local list = flags.warnings(command, autocheckpoint)
    assert.equal(1, #list, table.concat(list, "\n"))
    return list[1]
  end

  it("knows the framework by its module's or file's name", function()
    assert.equal("maxtext", flags.framework(MAXTEXT))
    assert.equal("maxtext", flags.framework("bash -c 'python3 MaxText/train.py x.yml'"))
    assert.equal("maxtext", flags.framework("python3 -m maxtext.trainers.pre_train.train x.yml"))
    assert.equal("maxtext", flags.framework("cd ~/src && python3 src/MaxText/train.py"))
    assert.equal("pax", flags.framework(PAX:format("")))
    assert.is_nil(flags.framework("python3 train.py --model=maxtext_like"))
  end)

  it("misses the framework's half when only the platform's is there", function()
    assert.matches("without enable_autocheckpoint=true", only(MAXTEXT, true), 1, true)
    assert.matches(
      "without enable_autocheckpoint=true",
      only(MAXTEXT .. "enable_autocheckpoint=False", true),
      1,
      true
    )
    assert.matches("without --jax_fully_async_checkpoint=1", only(PAX:format(""), true), 1, true)
    assert.matches(
      "goes on after the save",
      only(PAX:format("--jax_fully_async_checkpoint=1"), true),
      1,
      true
    )
  end)

  it("misses the platform's half when only the framework's is there", function()
    assert.matches(
      "ENABLE_AUTOCHECKPOINT=true",
      only(MAXTEXT .. "enable_autocheckpoint=true", false),
      1,
      true
    )
    local command = PAX:format("--jax_fully_async_checkpoint=1 --exit_after_ondemand_checkpoint=1")
    assert.matches("ENABLE_AUTOCHECKPOINT=true", only(command, false), 1, true)
  end)

  it("says that MaxText without checkpoints saves nothing", function()
    local command = MAXTEXT .. "enable_autocheckpoint=true enable_checkpointing=false"
    assert.matches("enable_checkpointing=false", only(command, true), 1, true)
  end)

  it("is quiet when both halves are there, neither is, or nobody knows", function()
    for _, value in ipairs({ "true", "True", "1" }) do
      assert.same({}, flags.warnings(MAXTEXT .. "enable_autocheckpoint=" .. value, true))
    end
    assert.same({}, flags.warnings(MAXTEXT .. '"enable_autocheckpoint=$SAVE"', true))
    assert.same({}, flags.warnings(MAXTEXT, false))
    assert.same({}, flags.warnings(MAXTEXT, nil))
    assert.same({}, flags.warnings(MAXTEXT .. "enable_autocheckpoint=true", nil))
    for _, both in ipairs({
      "--jax_fully_async_checkpoint=1 --exit_after_ondemand_checkpoint=1",
      "--jax_fully_async_checkpoint --exit_after_ondemand_checkpoint",
    }) do
      assert.same({}, flags.warnings(PAX:format(both), true))
    end
    assert.same({}, flags.warnings(PAX:format("--jax_fully_async_checkpoint=1"), false))
    assert.same({}, flags.warnings("python3 train.py", true))
  end)

  it("takes the last mention of a flag, and --noNAME for what it is", function()
    local command = MAXTEXT .. "enable_autocheckpoint=true enable_autocheckpoint=false"
    assert.matches("without enable_autocheckpoint=true", only(command, true), 1, true)
    assert.matches(
      "without --jax_fully_async_checkpoint=1",
      only(PAX:format("--nojax_fully_async_checkpoint"), true),
      1,
      true
    )
  end)
end)
