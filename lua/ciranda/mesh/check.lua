--- Does this parallelism fit these slices? Says no before a chip is paid for, and why.
--
-- A mesh has one size an axis inside a slice (ICI) and one across slices (DCN). ICI sizes multiply to the devices of
-- a slice, DCN sizes to the number of slices; on each side one size may be -1 and is filled in. An error names the
-- side that is wrong, shows the whole table and the nearest shapes that fit.
local devices_room = require("ciranda.mesh.devices")
local fault = require("ciranda.mesh.fault")
local order = require("ciranda.mesh.order")
local placement = require("ciranda.mesh.placement")
local python = require("ciranda.mesh.python")
local remarks = require("ciranda.mesh.remarks")
local suggest = require("ciranda.mesh.suggest")
local topology = require("ciranda.mesh.topology")
local types = require("ciranda.mesh.types")
local view = require("ciranda.mesh.view")

local M = {}

--- Most slices of one queued resource (Multislice guide).
M.SLICE_LIMIT = 256

---@class ciranda.mesh.Mesh
---@field names string[]
---@field ici integer[]
---@field dcn integer[]
---@field shape integer[]            their products: the mesh JAX makes
---@field slices integer
---@field devices_per_slice integer  as JAX counts them
---@field devices integer            len(jax.devices()) of the whole job
---@field topology ciranda.mesh.Topology
---@field notes ciranda.mesh.Note[]
---@field table string               the resolved table, for a person
---@field jax_line string            the call that makes this mesh
---@field instead_of string          the call it replaces on more than one slice
---@field allow_split boolean
---@field flags { shardings: string[]?, maxtext: string[]? }  what to pass to either program
---@field global_batch number?       sequences a step, when MaxText's per_device_batch_size was given

--- The two sides as a table; of many axes, those that are 1 on both sides are left out.
local function render(names, sides)
  local shown = {}
  for index in ipairs(names) do
    if #names <= 4 or sides[1].values[index] ~= 1 or sides[2].values[index] ~= 1 then
      shown[#shown + 1] = index
    end
  end
  local columns, width = { "" }, { 5 }
  for _, index in ipairs(shown) do
    columns[#columns + 1] = names[index]
    width[#width + 1] = math.max(#names[index], 4)
  end
  columns[#columns + 1], width[#width + 1] = "product", 7
  columns[#columns + 1], width[#width + 1] = "needed", 6
  local lines = {}
  local function line(cells, tail)
    local parts = {}
    for index, cell in ipairs(cells) do
      parts[index] = index == 1 and ("%-5s"):format(cell) or ("%" .. width[index] .. "s"):format(cell)
    end
    lines[#lines + 1] = "  " .. table.concat(parts, "  ") .. tail
  end
  line(columns, #shown < #names and "   (other axes are 1)" or "")
  for _, side in ipairs(sides) do
    local cells, product = { side.name }, 1
    for _, index in ipairs(shown) do
      local value = side.values[index]
      cells[#cells + 1] = tostring(value)
      product = math.type(value) == "integer" and product and product * value or nil
    end
    cells[#cells + 1] = product and tostring(product) or "-"
    cells[#cells + 1] = tostring(side.target)
    line(cells, side.wrong and "  <- wrong" or "")
  end
  return table.concat(lines, "\n")
end

--- "ici_fsdp=16" of a shape: the axes above 1, or the first preferred one.
local function spelled(context, side, shape)
  local parts = {}
  for index, size in ipairs(shape) do
    if size > 1 then
      parts[#parts + 1] = ("%s=%d"):format(context.label(side, index), size)
    end
  end
  return #parts > 0 and table.concat(parts, " ") or ("all %s sizes 1"):format(side)
end

--- Raises what is wrong with one side or both.
local function refuse(context, problems)
  local sides, texts, near = {}, {}, {}
  for _, problem in ipairs(problems) do
    sides[#sides + 1] = problem.side.name
    problem.side.wrong = true
    texts[#texts + 1] = problem.side.name .. ": " .. problem.text
  end
  local lines = { table.concat(texts, "\n"), render(context.names, context.sides) }
  for _, problem in ipairs(problems) do
    local spellings = {}
    for index, shape in ipairs(problem.near or {}) do
      spellings[index] = spelled(context, problem.side.name, shape)
      near[#near + 1] = spellings[index]
    end
    if #spellings > 0 then
      lines[#lines + 1] = ("  nearest on the %s side: %s"):format(
        problem.side.name,
        table.concat(spellings, "; ")
      )
    end
    if problem.hint then
      lines[#lines + 1] = "  " .. problem.hint
    end
  end
  fault.raise({
    op = context.what,
    side = table.concat(sides, " and "),
    table = lines[2],
    near = near,
    exception = problems[1].exception,
    message = table.concat(lines, "\n"),
  })
end

--- Reads a size: an integer, or a string that is one.
local function size_of(value)
  if math.type(value) == "integer" then
    return value
  elseif type(value) == "string" and value:match("^%s*[+-]?%d+%s*$") then
    return math.tointeger(tonumber(value))
  end
  return nil
end

--- Sizes that can never be, and a second -1.
local function read_side(context, side)
  local free
  for index = 1, #context.names do
    local given = side.values[index]
    local size = size_of(given)
    local label = context.label(side.name, index)
    local why
    if not size then
      why = ("%s is %s, which is no integer"):format(label, python.repr(given))
    elseif size == 0 then
      why = ("%s is 0; an axis that is not used has size 1"):format(label)
    elseif size < -1 then
      why = ("%s is %d; sizes are positive, and -1 means: whatever is left"):format(label, size)
    elseif size == -1 and free then
      why = ("%s and %s are both -1; only one size a side can be filled in"):format(
        context.label(side.name, free),
        label
      )
    end
    if why then
      return {
        side = side,
        text = why,
        near = suggest.nearest(side.name, context.names, side.values, side.target, side.fits),
      }
    end
    side.values[index] = size
    free = size == -1 and index or free
  end
  side.free = free
end

--- Fills the -1 and compares the product.
local function resolve_side(context, side)
  local product = 1
  for index, size in ipairs(side.values) do
    if index ~= side.free then
      product = product * size
    end
  end
  if side.free then
    if side.target % product ~= 0 then
      return {
        side = side,
        text = ("the other sizes multiply to %d, which does not divide %s, so %s=-1 cannot be filled in"):format(
          product,
          side.what,
          context.label(side.name, side.free)
        ),
        near = suggest.nearest(side.name, context.names, side.values, side.target, side.fits),
      }
    end
    side.values[side.free] = side.target // product
    return nil
  end
  if product ~= side.target then
    local factors = {}
    for index, size in ipairs(side.values) do
      if size ~= 1 then
        factors[#factors + 1] = ("%s=%d"):format(context.label(side.name, index), size)
      end
    end
    return {
      side = side,
      text = ("%s multiplies to %d, but there %s"):format(
        #factors > 0 and table.concat(factors, " x ") or "every size 1",
        product,
        side.what_is
      ),
      near = suggest.nearest(side.name, context.names, side.values, side.target, side.fits),
      hint = side.hint and side.hint(side),
    }
  end
end

--- Live slices: that they are alike, and whole.
---@param slices { index: integer, name: string?, accelerator: string?, topology: string?, workers: table|integer|nil,
---       devices: integer? }[] as a provider gives them
---@return ciranda.mesh.Topology topology of each, integer count
--- Raises "invalid" naming the slice that differs or is not whole.
function M.slices(slices)
  if type(slices) ~= "table" or #slices == 0 then
    fault.misuse("check.slices: a non-empty list of slices expected")
  end
  local first, shape
  local function name(slice, position)
    return ("slice %s%s"):format(
      tostring(slice.index or position - 1),
      slice.name and " (" .. slice.name .. ")" or ""
    )
  end
  for position, slice in ipairs(slices) do
    if not slice.accelerator then
      fault.misuse("check.slices: slice %d has no accelerator type", position)
    end
    local own = topology.of(
      slice.topology and { type = slice.accelerator, topology = slice.topology } or slice.accelerator
    )
    if not shape then
      first, shape = slice, own
    elseif own.type ~= shape.type or own.name ~= shape.name then
      fault.raise({
        op = "slices",
        side = "DCN",
        target = name(slice, position),
        message = ("%s is %s (%s), but %s is %s (%s); all slices of a mesh have one type and one topology"):format(
          name(slice, position),
          own.type,
          own.name,
          name(first, 1),
          shape.type,
          shape.name
        ),
      })
    end
    local workers = type(slice.workers) == "table" and #slice.workers or slice.workers
    local devices = slice.devices
    local what, have, want
    if workers and workers ~= own.hosts then
      what, have, want = "workers", workers, own.hosts
    elseif devices and devices ~= own.devices then
      what, have, want = "devices", devices, own.devices
    end
    if what then
      fault.raise({
        op = "slices",
        side = "ICI",
        target = name(slice, position),
        message = ("%s is not whole: %d of the %d %s of a %s. JAX would call it a wrong product"):format(
          name(slice, position),
          have,
          want,
          what,
          own.type
        ),
      })
    end
  end
  return shape, #slices
end

local SPEC = {
  type = true,
  topology = true,
  slices = true,
  names = true,
  ici = true,
  dcn = true,
  allow_split = true,
  jax = true,
  what = true,
  extra = true,
  hint = true,
  label = true,
  accept_dcn = true,
  split_hint = true,
}

--- The topology of each slice, and how many slices there are.
---@param spec table as of M.mesh
---@param what string
---@return ciranda.mesh.Topology topology
---@return integer slices
--- Raises "invalid" for a number that cannot be.
local function extent(spec, what)
  local shape, slices
  if type(spec.slices) == "table" then
    shape, slices = M.slices(spec.slices)
  else
    if getmetatable(spec.topology) == topology.Topology then
      shape = spec.topology
    else
      shape = topology.of(spec.topology and { type = spec.type, topology = spec.topology } or spec.type)
    end
    slices = spec.slices or 1
  end
  if math.type(slices) ~= "integer" or slices < 1 then
    fault.raise({
      op = what,
      side = "DCN",
      message = ("the number of slices must be a positive integer, got %s"):format(tostring(slices)),
    })
  elseif slices > M.SLICE_LIMIT then
    fault.raise({
      op = what,
      side = "DCN",
      message = ("%d slices; a queued resource has at most %d"):format(slices, M.SLICE_LIMIT),
    })
  elseif slices > 1 and not types.generations[shape.generation].multislice then
    fault.raise({
      op = what,
      side = "DCN",
      message = ("%d slices, but the platform joins no %s slices; v4 and later can be"):format(
        slices,
        shape.generation
      ),
    })
  end
  return shape, slices
end

--- The sizes of both sides, one an axis; DCN's are 1 where none are given.
---@param spec table as of M.mesh
---@param what string
---@return any[] ici
---@return any[] dcn
--- Raises "invalid" when a side has more or fewer sizes than there are axes.
local function sizes_of(spec, what)
  local names, ici = spec.names, spec.ici
  local dcn = spec.dcn
  if not dcn then
    dcn = {}
    for index = 1, #ici do
      dcn[index] = 1
    end
  end
  for side, values in pairs({ ICI = ici, DCN = dcn }) do
    if #values ~= #names then
      fault.raise({
        op = what,
        side = side,
        message = (
          "%s: %d sizes for %d axes (%s). JAX pads the shorter side with 1s in front, which gives sizes to "
          .. "the wrong axes without a word; give every axis a size"
        ):format(side, #values, #names, table.concat(names, ", ")),
      })
    end
  end
  return ici, dcn
end

--- The two sides, as the steps of the check go over them.
---@param spec table as of M.mesh
---@param shape ciranda.mesh.Topology
---@param slices integer
---@param fits fun(sizes: integer[]): boolean
---@return table[] ICI, DCN
--- Raises what `sizes_of` raises.
local function sides_of(spec, shape, slices, fits)
  local ici, dcn = sizes_of(spec, spec.what or "mesh")
  return {
    {
      name = "ICI",
      values = table.move(ici, 1, #ici, 1, {}),
      target = shape.devices,
      what = ("the %d devices of a %s slice"):format(shape.devices, shape.type),
      what_is = ("are %d devices in a %s slice"):format(shape.devices, shape.type),
      fits = fits,
      hint = spec.hint,
    },
    {
      name = "DCN",
      values = table.move(dcn, 1, #dcn, 1, {}),
      target = slices,
      what = ("the %d slice%s"):format(slices, slices == 1 and "" or "s"),
      what_is = slices == 1 and "is 1 slice" or ("are %d slices"):format(slices),
      fits = spec.accept_dcn,
      hint = spec.hint,
    },
  }
end

--- Refuses sizes with the right product that JAX cannot place, and says what would.
---@param context table
---@param spec table as of M.mesh
---@param fits fun(sizes: integer[]): boolean
---@param refusal table what placement says
local function refuse_placement(context, spec, fits, refusal)
  local names, shape, sizes = context.names, context.topology, context.sides[1].values
  local best = order.best_order({ devices = context.slice, ici = sizes, jax = spec.jax })
  local total = 0
  for _, hops in ipairs(best.hops) do
    total = total + hops.total
  end
  refuse(context, {
    {
      side = context.sides[1],
      text = ("%d devices are right, but JAX places no %s on %s without splitting a physical axis"):format(
        shape.devices,
        python.tuple(sizes),
        shape.name
      ),
      near = suggest.nearest("ICI", names, sizes, shape.devices, fits),
      hint = ("%s; mesh.best_order places it, with %d links in all its rings"):format(
        spec.split_hint or "allow_split_physical_axes=True would allow it",
        total
      ),
      exception = refusal.exception,
    },
  })
end

--- Checks a mesh and resolves it.
---@param spec { type: string?, topology: string|ciranda.mesh.Topology|nil, slices: integer|table[]|nil,
---       names: string[], ici: any[], dcn: any[]?, allow_split: boolean?, jax: string?, what: string?,
---       extra: (fun(sides: table): table?)?, hint: (fun(side: table): string?)?,
---       label: (fun(side: "ICI"|"DCN", axis: integer): string)?, accept_dcn: (fun(sizes: integer[]): boolean)?,
---       split_hint: string? }
---       `type` with or without another `topology`; `slices` a number (1 when absent) or the live slices;
---       `names` the axes by increasing network intensity, `ici` and `dcn` a size each, one -1 a side;
---       `allow_split` is jax's allow_split_physical_axes, `jax` the release to follow; the rest is for the programs
---       whose flags these are: `what` names it, `extra` finds a problem of its own ({side, text, near}), `hint` adds
---       a line to a wrong product, `label` spells an axis, `accept_dcn` says which DCN sizes may be suggested,
---       `split_hint` how the program is told to split physical axes
---@return ciranda.mesh.Mesh
--- Raises "invalid" with `side` ("ICI", "DCN", "ICI and DCN"), `table` and `near`.
function M.mesh(spec)
  spec = fault.options(spec, SPEC, "check.mesh")
  local what = spec.what or "mesh"
  local names = spec.names
  if type(names) ~= "table" or type(names[1]) ~= "string" then
    fault.misuse("check.mesh needs names=, the axes by increasing traffic")
  elseif type(spec.ici) ~= "table" then
    fault.misuse("check.mesh needs ici=, a size for each axis")
  end
  local shape, slices = extent(spec, what)
  local slice = devices_room.grid({ topology = shape })
  local options = { allow_split_physical_axes = spec.allow_split, jax = spec.jax }
  local function fits(sizes)
    return (placement.accepts(sizes, slice, options))
  end
  local context = {
    what = what,
    names = names,
    topology = shape,
    slice = slice,
    allow_split = spec.allow_split or false,
    jax = spec.jax,
    label = spec.label or function(side, index)
      return side:lower() .. "_" .. names[index]
    end,
  }
  local sides = sides_of(spec, shape, slices, fits)
  context.sides = sides
  for _, step in ipairs({ read_side, resolve_side }) do
    local problems = {}
    for _, side in ipairs(sides) do
      problems[#problems + 1] = step(context, side)
    end
    if #problems > 0 then
      refuse(context, problems)
    end
  end
  local problem = spec.extra and spec.extra(sides)
  if problem then
    refuse(context, { problem })
  end

  local sizes, across = sides[1].values, sides[2].values
  local accepted, refusal = placement.accepts(sizes, slice, options)
  if not accepted then
    refuse_placement(context, spec, fits, refusal)
  end

  local whole = {}
  for index in ipairs(names) do
    whole[index] = sizes[index] * across[index]
  end
  local split = context.allow_split and ", allow_split_physical_axes=True" or ""
  local plain = ("mesh_utils.create_device_mesh(%s%s)"):format(python.tuple(whole), split)
  return {
    names = names,
    ici = sizes,
    dcn = across,
    shape = whole,
    slices = slices,
    devices_per_slice = shape.devices,
    devices = view.product(whole),
    topology = shape,
    notes = remarks.of(context, sizes, across),
    table = render(names, sides),
    instead_of = plain,
    jax_line = slices > 1 and ("mesh_utils.create_hybrid_device_mesh(%s, %s%s)"):format(
      python.tuple(sizes),
      python.tuple(across),
      split
    ) or plain,
    allow_split = context.allow_split,
    flags = {},
  }
end

return M
