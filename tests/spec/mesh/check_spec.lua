local mesh = require("ciranda.mesh")

local HERE = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
local S = dofile(HERE .. "/support.lua")

local function shardings(type_, slices, ...)
  return mesh.check.shardings({ type = type_, slices = slices, argv = { ... } })
end

local function levels(fits, level)
  local out = {}
  for _, note in ipairs(fits.notes) do
    if note.level == level then
      out[#out + 1] = ("%s %s"):format(note.side or "", note.axis or "")
    end
  end
  return out
end

describe("shardings.py's flags", function()
  it("are those of the guide's table for v4-8", function()
    assert.are.same({ 1, 4, 1 }, shardings("v4-8", 1, "--ici_fsdp_parallelism", "4").ici)
    assert.are.same({ 1, 1, 4 }, shardings("v4-8", 1, "-if", "1", "-it", "4").ici)
    assert.are.same({ 1, 2, 2 }, shardings("v4-8", 1, "-if=2", "-it=2").ici)
  end)

  it("give two slices as (2, 1, 1)", function()
    local fits = shardings("v5litepod-16", 2, "--dcn_data_parallelism", "2", "--ici_fsdp_parallelism", "16")
    assert.are.same({ 2, 1, 1 }, fits.dcn)
    assert.are.same({ 2, 16, 1 }, fits.shape)
    assert.are.equal(32, fits.devices)
    assert.are.equal("mesh_utils.create_hybrid_device_mesh((1, 16, 1), (2, 1, 1))", fits.jax_line)
    assert.are.equal("mesh_utils.create_device_mesh((2, 16, 1))", fits.instead_of)
    assert.are.equal(
      "--dcn_data_parallelism 2 --dcn_fsdp_parallelism 1 --dcn_tensor_parallelism 1 --ici_data_parallelism 1 "
        .. "--ici_fsdp_parallelism 16 --ici_tensor_parallelism 1",
      table.concat(fits.flags.shardings, " ")
    )
  end)

  it("refuse the guide's ici_fsdp 4 on v5litepod-16, and offer 16", function()
    local err = S.refusal(shardings, "v5litepod-16", 1, "--ici_fsdp_parallelism", "4")
    assert.are.equal("invalid", err.code)
    assert.are.equal("ICI", err.side)
    assert.are.equal("ici_fsdp=16", err.near[1])
    assert.matches(
      "ICI: ici_fsdp=4 multiplies to 4, but there are 16 devices in a v5litepod%-16 slice",
      err.message
    )
    assert.matches("nearest on the ICI side: ici_fsdp=16", err.message)
    assert.matches("ICI +1 +4 +1 +4 +16  <%- wrong", err.table)
    assert.matches("DCN +1 +1 +1 +1 +1$", err.table)
  end)

  it("count 4 slices of v4-16 as 32 devices", function()
    assert.are.equal(32, shardings("v4-16", 4, "-dd", "4", "-if", "-1").devices)
  end)

  it("say that ici_fsdp is 4 by default", function()
    local err = S.refusal(shardings, "v4-8", 1, "--ici_tensor_parallelism", "4")
    assert.are.equal("ICI", err.side)
    assert.matches("ici_fsdp is 4 because it was not given", err.message)
    assert.are.equal("ici_tensor=4", err.near[1])
  end)

  it("fill in one -1 a side", function()
    local fits = shardings("v5litepod-16", 4, "-dd", "-1", "-if", "-1", "-it", "4")
    assert.are.same({ 1, 4, 4 }, fits.ici)
    assert.are.same({ 4, 1, 1 }, fits.dcn)
    local err = S.refusal(shardings, "v5litepod-16", 1, "-if", "-1", "-it", "-1")
    assert.matches("ici_fsdp and ici_tensor are both %-1", err.message)
    err = S.refusal(shardings, "v5litepod-16", 1, "-if", "-1", "-it", "3")
    assert.matches("multiply to 3, which does not divide the 16 devices", err.message)
    assert.are.equal("ICI", err.side)
  end)

  it("refuse zero, negative and broken sizes", function()
    for _, case in ipairs({
      { "0", "is 0; an axis that is not used has size 1" },
      { "-2", "is %-2; sizes are positive" },
      { "2.5", "is '2.5', which is no integer" },
      { "four", "is 'four', which is no integer" },
    }) do
      local err = S.refusal(shardings, "v5litepod-16", 1, "-if", "16", "-it", case[1])
      assert.are.equal("ICI", err.side)
      assert.matches("ici_tensor " .. case[2], err.message)
    end
    local err = S.refusal(shardings, "v5litepod-16", 2, "-if", "16", "-dd", "0")
    assert.are.equal("DCN", err.side)
    assert.are.equal("dcn_data=2", err.near[1])
  end)

  it("demand dcn_data of the number of slices, as the script does", function()
    local err = S.refusal(shardings, "v5litepod-16", 4, "-dd", "2", "-df", "2", "-if", "16")
    assert.are.equal("DCN", err.side)
    assert.matches("shardings.py stops unless dcn_data equals the number of slices %(4%)", err.message)
    assert.are.same({ "dcn_data=4" }, err.near)
  end)

  it("name both sides when both are wrong", function()
    local err = S.refusal(shardings, "v5litepod-16", 4, "-dd", "3", "-if", "8")
    assert.are.equal("ICI and DCN", err.side)
    assert.matches("dcn_data=3 multiplies to 3, but there are 4 slices", err.message)
    assert.matches("nearest on the DCN side: dcn_data=4", err.message)
  end)

  it("refuse what JAX would not place, and offer what it does", function()
    local err = S.refusal(shardings, "v5litepod-16", 2, "-dd", "2", "-if", "8", "-it", "2")
    assert.are.equal("ICI", err.side)
    assert.are.equal("NotImplementedError", err.exception)
    assert.matches("JAX places no %(1, 8, 2%) on 4x4 without splitting", err.message)
    assert.are.same({ "ici_fsdp=4 ici_tensor=4", "ici_fsdp=16", "ici_tensor=16" }, err.near)
    assert.matches("mesh.best_order places it", err.message)
  end)

  it("read the command line as argparse does", function()
    local fits = mesh.check.shardings({
      type = "v5litepod-16",
      argv = { "--ici_f", "16", "-b", "1024", "--embedding_dimension=4096", "-n", "2" },
    })
    assert.are.same({ 1, 16, 1 }, fits.ici)
    assert.matches(
      "%-%-embedding_dimension 4096 %-%-batch_size 1024 %-%-num_layers 2$",
      table.concat(fits.flags.shardings, " ")
    )
    for _, argv in ipairs({ { "--fsdp", "4" }, { "-x", "4" }, { "--ici", "4" }, { "-if" }, { "4" } }) do
      assert.are.equal("usage", S.refusal(mesh.check.shardings, { type = "v4-8", argv = argv }).code)
    end
    assert.are.equal("usage", S.refusal(mesh.check.shardings, { type = "v4-8", values = { fsdp = 4 } }).code)
  end)

  it("refuse more than one slice of what cannot be joined, and too many", function()
    assert.matches("joins no v3 slices", S.refusal(shardings, "v3-8", 2, "-dd", "2", "-if", "8").message)
    assert.matches("at most 256", S.refusal(shardings, "v4-8", 257, "-dd", "257").message)
    assert.matches("positive integer", S.refusal(shardings, "v4-8", 0).message)
  end)
end)

describe("live slices", function()
  local function slice(index, accelerator, workers)
    return { index = index, name = "job-" .. index, accelerator = accelerator, workers = workers }
  end

  it("are checked in place of a type and a number", function()
    local fits = mesh.check.shardings({
      slices = { slice(0, "v5litepod-16", 4), slice(3, "v5litepod-16", { {}, {}, {}, {} }) },
      argv = { "-dd", "2", "-if", "16" },
    })
    assert.are.equal(2, fits.slices)
    assert.are.equal(32, fits.devices)
  end)

  it("are refused when one lacks workers", function()
    local err = S.refusal(mesh.check.slices, { slice(0, "v4-16", 2), slice(3, "v4-16", 1) })
    assert.are.equal("ICI", err.side)
    assert.are.equal("slice 3 (job-3)", err.target)
    assert.matches("is not whole: 1 of the 2 workers of a v4%-16", err.message)
    local ragged = slice(1, "v4-16", 2)
    ragged.devices = 7
    assert.matches(
      "7 of the 8 devices",
      S.refusal(mesh.check.slices, { slice(0, "v4-16", 2), ragged }).message
    )
  end)

  it("are refused when types or topologies differ", function()
    local err = S.refusal(mesh.check.slices, { slice(0, "v4-16"), slice(1, "v4-32") })
    assert.are.equal("DCN", err.side)
    assert.matches("slice 1 %(job%-1%) is v4%-32 %(2x2x4%), but slice 0 %(job%-0%) is v4%-16", err.message)
    local twisted = slice(1, "v4-512")
    twisted.topology = "4x4x16"
    assert.matches("4x4x16", S.refusal(mesh.check.slices, { slice(0, "v4-512"), twisted }).message)
  end)

  it("need an accelerator type", function()
    assert.are.equal("misuse", S.refusal(mesh.check.slices, { { index = 0 } }).code)
    assert.are.equal("misuse", S.refusal(mesh.check.slices, {}).code)
    assert.are.equal("misuse", S.refusal(mesh.check.mesh, { names = { "a" }, ici = { 4 } }).code)
  end)

  it("need axes", function()
    assert.are.equal("misuse", S.refusal(mesh.check.mesh).code)
    assert.are.equal("misuse", S.refusal(mesh.check.mesh, { type = "v4-8", names = {}, ici = {} }).code)
    assert.are.equal("misuse", S.refusal(mesh.check.mesh, { type = "v4-8", names = { "a" } }).code)
  end)
end)

describe("a mesh of any axes", function()
  it("refuses sides of different rank, which JAX accepts silently", function()
    local err = S.refusal(mesh.check.mesh, {
      type = "v5litepod-4",
      slices = 2,
      names = { "data", "fsdp", "tensor" },
      ici = { 4, 1 },
      dcn = { 2, 1, 1 },
    })
    assert.are.equal("ICI", err.side)
    assert.matches("2 sizes for 3 axes", err.message)
    err = S.refusal(mesh.check.mesh, {
      type = "v5litepod-4",
      slices = 2,
      names = { "data", "fsdp", "tensor" },
      ici = { 1, 4, 1 },
      dcn = { 2, 1 },
    })
    assert.are.equal("DCN", err.side)
  end)

  it("remarks on data inside a slice, fsdp and tensor across slices, each with a reason", function()
    local fits = mesh.check.mesh({
      type = "v5litepod-16",
      slices = 4,
      names = { "data", "fsdp", "tensor" },
      ici = { 4, 4, 1 },
      dcn = { 1, 2, 2 },
    })
    assert.are.same({ "DCN fsdp", "DCN tensor" }, levels(fits, "warning"))
    assert.are.equal("ICI data", levels(fits, "advice")[1])
    for _, note in ipairs(fits.notes) do
      assert.is_true(#note.text > 40)
    end
  end)

  it("remarks on axes in an order that gives the best links to the wrong one", function()
    local fits = mesh.check.mesh({ type = "v5litepod-16", names = { "tensor", "fsdp" }, ici = { 4, 4 } })
    assert.are.same({ "ICI fsdp" }, levels(fits, "warning"))
    assert.matches("stands after tensor", fits.notes[1].text)
    assert.are.same(
      { "ICI fsdp" },
      levels(
        mesh.check.mesh({ type = "v4-16", names = { "data", "tensor", "fsdp" }, ici = { 2, 2, 2 } }),
        "warning"
      )
    )
    assert.are.same(
      {},
      levels(
        mesh.check.mesh({
          type = "v5litepod-16",
          names = { "fsdp", "tensor" },
          ici = { 4, 4 },
        }),
        "warning"
      )
    )
  end)

  it("remarks on rings that could be shorter", function()
    local fits = mesh.check.mesh({ type = "v6e-8", names = { "fsdp" }, ici = { 8 } })
    assert.matches("cross 12 links in JAX's order and 8 in the best one", fits.notes[1].text)
  end)

  it("remarks on slices Google does not document", function()
    local fits = mesh.check.mesh({ type = "v5p-17920", names = { "fsdp" }, ici = { -1 } })
    assert.matches("more than the largest v5p slice", fits.notes[1].text)
  end)

  it("takes another topology of the type", function()
    local fits = mesh.check.mesh({
      type = "v4-512",
      topology = "4x4x16",
      names = { "fsdp", "tensor" },
      ici = { 16, 16 },
    })
    assert.are.equal("4x4x16", fits.topology.name)
  end)

  it("counts the two devices of a TPU7x chip", function()
    assert.are.same({ 8 }, mesh.check.mesh({ type = "tpu7x-8", names = { "fsdp" }, ici = { -1 } }).ici)
  end)
end)

describe("MaxText's parameters", function()
  local function maxtext(type_, slices, values, more)
    local options = { type = type_, slices = slices, values = values }
    for key, value in pairs(more or {}) do
      options[key] = value
    end
    return mesh.check.maxtext(options)
  end

  it("fill dcn_data and ici_fsdp by default", function()
    local fits = maxtext("v5litepod-256", 2)
    assert.are.equal("dcn_data_parallelism=2 ici_fsdp_parallelism=256", table.concat(fits.flags.maxtext, " "))
    assert.are.equal(512, fits.devices)
    assert.are.equal(12, #fits.names)
  end)

  it("fill [2,-1,5] of 20 and refuse [2,-1,3] of 10", function()
    -- 20 devices exist in no slice; the DCN side takes any number.
    local fits = maxtext("v4-8", 20, {
      dcn_data_parallelism = 2,
      dcn_fsdp_parallelism = -1,
      dcn_pipeline_parallelism = 5,
    })
    assert.are.equal(20, S.product(fits.dcn))
    for index, name in ipairs(fits.names) do
      if name == "fsdp" then
        assert.are.equal(2, fits.dcn[index])
      end
    end
    local err = S.refusal(maxtext, "v4-8", 10, {
      dcn_data_parallelism = 2,
      dcn_fsdp_parallelism = -1,
      dcn_pipeline_parallelism = 3,
    })
    assert.are.equal("DCN", err.side)
    assert.matches("multiply to 6, which does not divide the 10 slices", err.message)
  end)

  it("refuse two -1 on a side, zero and a wrong product", function()
    local err = S.refusal(maxtext, "v5litepod-16", 1, { ici_tensor_parallelism = -1 })
    assert.matches("ici_fsdp_parallelism and ici_tensor_parallelism are both %-1", err.message)
    err = S.refusal(maxtext, "v5litepod-16", 1, { ici_tensor_parallelism = 0 })
    assert.matches("ici_tensor_parallelism is 0", err.message)
    err = S.refusal(maxtext, "v5litepod-16", 2, { dcn_data_parallelism = 3 })
    assert.are.equal("DCN", err.side)
    assert.are.equal("dcn_data_parallelism=2", err.near[1])
    err = S.refusal(maxtext, "v5litepod-16", 1, { ici_fsdp_parallelism = 8 })
    assert.are.equal("ICI", err.side)
    assert.are.equal("ici_fsdp_parallelism=16", err.near[1])
  end)

  it("leave DCN alone on one slice", function()
    local fits = maxtext("v5p-128", 1)
    assert.are.equal(1, S.product(fits.dcn))
    local err = S.refusal(maxtext, "v5p-128", 1, { dcn_data_parallelism = 2 })
    assert.are.equal("DCN", err.side)
    assert.matches("there is one slice", err.message)
  end)

  it("resolve dcn_diloco first", function()
    local fits = maxtext("v5p-128", 4, { dcn_diloco_parallelism = -1 })
    assert.are.equal(
      "dcn_diloco_parallelism=4 dcn_data_parallelism=1 ici_fsdp_parallelism=64",
      table.concat(fits.flags.maxtext, " ")
    )
    local err = S.refusal(maxtext, "v5p-128", 4, { dcn_diloco_parallelism = -1, dcn_fsdp_parallelism = 3 })
    assert.are.equal("AssertionError", err.exception)
    assert.matches("4 slices are not divisible by the product of the other DCN sizes %(3%)", err.message)
  end)

  it("put stage before data when pipelining", function()
    local fits = maxtext("v5p-128", 4, { dcn_pipeline_parallelism = 2 })
    assert.are.same({ "diloco", "stage", "data" }, table.move(fits.names, 1, 3, 1, {}))
    assert.are.same({ 1, 2, 2 }, table.move(fits.dcn, 1, 3, 1, {}))
    assert.are.same({ "diloco", "data", "stage" }, table.move(maxtext("v5p-128", 4).names, 1, 3, 1, {}))
  end)

  it("warn of tensor and sequence over DCN", function()
    local fits = maxtext("v5p-128", 4, { dcn_tensor_parallelism = 2, dcn_tensor_sequence_parallelism = 2 })
    assert.are.same({ "DCN tensor", "DCN tensor_sequence" }, levels(fits, "warning"))
  end)

  it("refuse what is no parameter, or one the mesh has no axis for", function()
    assert.are.equal("usage", S.refusal(maxtext, "v4-8", 1, { ici_fsdp = 4 }).code)
    local err = S.refusal(maxtext, "v4-8", 1, { ici_sequence_parallelism = 4 })
    assert.are.equal("ICI", err.side)
    assert.matches("is ignored by MaxText", err.message)
    local fits = maxtext("v4-8", 1, { ici_sequence_parallelism = 4, ici_fsdp_parallelism = 1 }, {
      mesh_axes = { "data", "fsdp", "sequence", "model", "attn_dp" },
    })
    assert.are.same({ 1, 1, 4, 1, 1 }, fits.ici)
    assert.are.equal("usage", S.refusal(maxtext, "v4-8", 1, {}, { mesh_axes = { "colour" } }).code)
  end)

  it("allow split axes when told to, and say how", function()
    local err = S.refusal(maxtext, "v5litepod-256", 2, { ici_tensor_parallelism = 4 })
    assert.matches("allow_split_physical_axes=true allows it", err.message)
    local fits = maxtext("v5litepod-256", 2, { ici_tensor_parallelism = 4 }, { allow_split = true })
    assert.matches("allow_split_physical_axes=True%)$", fits.jax_line)
    assert.matches("allow_split_physical_axes=true$", table.concat(fits.flags.maxtext, " "))
  end)

  it("count the global batch", function()
    assert.are.equal(256, maxtext("v5litepod-256", 2, nil, { per_device_batch_size = 0.5 }).global_batch)
    assert.are.equal(
      1024,
      maxtext("v5litepod-256", 2, nil, { per_device_batch_size = 1, gradient_accumulation_steps = 2 }).global_batch
    )
    assert.matches(
      "which is no whole number",
      S.refusal(maxtext, "v4-8", 1, nil, { per_device_batch_size = 0.3 }).message
    )
  end)

  it("check pipelines", function()
    local fits = mesh.check.pipeline({ stages = 4, layers = 32, layers_per_stage = 2 })
    assert.are.same({ 4, 4, 4 }, { fits.repeats, fits.microbatches, fits.stages })
    assert.are.equal(8, mesh.check.pipeline({ stages = 4, layers = 8, delayed = true }).microbatches)
    for text, options in pairs({
      ["30 layers cannot be shared by 4 stages"] = { stages = 4, layers = 30 },
      ["are 8 layers, not 16"] = { stages = 4, layers = 16, repeats = 2 },
      ["6 microbatches are no multiple of 4 stages"] = { stages = 4, layers = 16, microbatches = 6 },
      ["cannot be cut into 8 microbatches"] = { stages = 4, layers = 16, microbatches = 8, micro_batch = 12 },
      ["needs 8 microbatches"] = { stages = 4, layers = 16, microbatches = 4, delayed = true },
      ["must be a positive integer"] = { stages = 4, layers = 0 },
    }) do
      assert.matches(text, S.refusal(mesh.check.pipeline, options).message)
    end
    assert.are.equal("misuse", S.refusal(mesh.check.pipeline, { stages = 4 }).code)
  end)
end)
