--- The flags of MaxText's shardings.py, and whether it would accept them.
--
-- The script wants the product of all sizes to be len(jax.devices()), and dcn_data to be the number of slices; its
-- ici_fsdp is 4 unless it is told otherwise. It does not know -1: that is filled in here, before the run.
local check = require("ciranda.mesh.check")
local fault = require("ciranda.mesh.fault")

local M = {}

M.names = { "data", "fsdp", "tensor" }

-- Long flag, short flag, default; sizes first.
local FLAGS = {
  { "dcn_data_parallelism", "dd", 1, side = "dcn", axis = 1 },
  { "dcn_fsdp_parallelism", "df", 1, side = "dcn", axis = 2 },
  { "dcn_tensor_parallelism", "dt", 1, side = "dcn", axis = 3 },
  { "ici_data_parallelism", "id", 1, side = "ici", axis = 1 },
  { "ici_fsdp_parallelism", "if", 4, side = "ici", axis = 2 },
  { "ici_tensor_parallelism", "it", 1, side = "ici", axis = 3 },
  { "embedding_dimension", "d", 2048 },
  { "batch_size", "b", 131072 },
  { "num_layers", "n", 4 },
  { "profiler_path", "p", "" },
}

local BY_NAME = {}
for _, flag in ipairs(FLAGS) do
  BY_NAME["--" .. flag[1]], BY_NAME["-" .. flag[2]] = flag, flag
end

local function usage(format, ...)
  local known = {}
  for _, flag in ipairs(FLAGS) do
    known[#known + 1] = ("--%s (-%s)"):format(flag[1], flag[2])
  end
  fault.raise({
    code = "usage",
    op = "shardings",
    message = ("%s; shardings.py knows %s"):format(format:format(...), table.concat(known, ", ")),
  })
end

--- The flag a word names; long flags may be cut short while they stay unique, as argparse allows.
local function flag_of(word)
  if BY_NAME[word] then
    return BY_NAME[word]
  end
  local found
  if word:sub(1, 2) == "--" and #word > 2 then
    for _, flag in ipairs(FLAGS) do
      if ("--" .. flag[1]):sub(1, #word) == word then
        if found then
          usage("'%s' could be --%s or --%s", word, found[1], flag[1])
        end
        found = flag
      end
    end
  end
  if not found then
    usage("'%s' is no flag of shardings.py", word)
  end
  return found
end

--- Reads a command line: `--ici_fsdp_parallelism 16`, `--ici_fsdp_parallelism=16`, `-if 16`.
---@param argv string[]
---@return table<string, string> values by long name, only those given
--- Raises "usage" for what shardings.py does not know.
function M.parse(argv)
  local values, index = {}, 1
  while index <= #argv do
    local word, value = argv[index], nil
    if word:find("=", 1, true) then
      word, value = word:match("^(.-)=(.*)$")
    end
    local flag = flag_of(word)
    if not value then
      index = index + 1
      value = argv[index]
      if value == nil then
        usage("--%s needs a value", flag[1])
      end
    end
    values[flag[1]] = value
    index = index + 1
  end
  return values
end

local OPTIONS = { type = true, topology = true, slices = true, argv = true, values = true, jax = true }

--- Checks shardings.py's flags against slices.
---@param options { type: string?, topology: string|ciranda.mesh.Topology|nil, slices: integer|table[]|nil,
---       argv: string[]?, values: table<string, integer|string>?, jax: string? }
---       `argv` a command line, or `values` by long flag name; what is absent has shardings.py's default
---@return ciranda.mesh.Mesh with flags.shardings, the command line to run
--- Raises "usage" for unknown flags, "invalid" for what does not fit.
function M.check(options)
  options = fault.options(options, OPTIONS, "check.shardings")
  local values = options.argv and M.parse(options.argv) or {}
  for name, value in pairs(options.values or {}) do
    if not BY_NAME["--" .. name] then
      usage("'%s' is no flag of shardings.py", name)
    end
    values[name] = value
  end
  local sides = { ici = {}, dcn = {} }
  for _, flag in ipairs(FLAGS) do
    if flag.side then
      local value = values[flag[1]]
      sides[flag.side][flag.axis] = value == nil and flag[3] or value
    end
  end
  local defaulted = values.ici_fsdp_parallelism == nil

  local mesh = check.mesh({
    what = "shardings.py",
    type = options.type,
    topology = options.topology,
    slices = options.slices,
    jax = options.jax,
    names = M.names,
    ici = sides.ici,
    dcn = sides.dcn,
    accept_dcn = function(sizes)
      return sizes[2] == 1 and sizes[3] == 1
    end,
    split_hint = "shardings.py has no flag that allows it",
    hint = function(side)
      if side.name == "ICI" and defaulted then
        return "ici_fsdp is 4 because it was not given: that is shardings.py's default"
      end
    end,
    extra = function(both)
      local dcn = both[2]
      if dcn.values[1] ~= dcn.target then
        return {
          side = dcn,
          text = (
            "the product is right, but shardings.py stops unless dcn_data equals the number of slices (%d); "
            .. "dcn_fsdp and dcn_tensor must be 1 there"
          ):format(dcn.target),
          near = { { dcn.target, 1, 1 } },
        }
      end
    end,
  })

  local flags = {}
  for _, flag in ipairs(FLAGS) do
    local value = flag.side and mesh[flag.side][flag.axis] or values[flag[1]]
    if value ~= nil then
      flags[#flags + 1] = "--" .. flag[1]
      flags[#flags + 1] = tostring(value)
    end
  end
  mesh.flags.shardings = flags
  return mesh
end

return M
