--- Where jax's releases place devices differently.
--
-- Read in `jax/_src/mesh_utils.py` of every release from 0.5.0 to 0.12.0.1, and checked against those releases by
-- the walk in tests/e2e/mesh. Each row says what changed with that release.
local fault = require("ciranda.mesh.fault")

local M = {}

---@class ciranda.mesh.Rules
---@field release string             the release these are the rules of
---@field v6e_ring boolean           "TPU v6 lite" is ordered like v5e
---@field v5p_exact boolean          the order of a 2x2x2 v5p asks for exactly 8 devices
---@field v5p_cores boolean          "TPU v5p" may have two devices a chip
---@field v4_lite boolean            "TPU v4 lite" of 4 devices is a ring
---@field tpu7x false|"tray"|"strict"|"blocks"  how small TPU7x slices are ordered
---@field tpu7x_ring "2x4"|"2x2x2"   the order of a block of 8 devices
---@field tpu7 boolean               "TPU7" is treated like "TPU7x"
---@field tpu8i boolean              "TPU8i" is known
---@field gpu_by_id boolean          GPUs are sorted by id
---@field v5e_kind boolean           "TPU v5e" is treated like "TPU v5 lite"
---@field v5_kind boolean            "TPU v5" is treated like "TPU v5p"
---@field core_first boolean         the two cores of a TPU7x chip go to the most intensive axis first
---@field prime_factors boolean      numbers with a large prime are factored correctly when axes are split

M.oldest = "0.5.0"
M.newest = "0.12.0.1"

local START = {
  v6e_ring = false,
  v5p_exact = false,
  v5p_cores = false,
  v4_lite = false,
  tpu7x = false,
  tpu7x_ring = "2x4",
  tpu7 = false,
  tpu8i = false,
  gpu_by_id = false,
  v5e_kind = false,
  v5_kind = false,
  core_first = false,
  prime_factors = false,
}

local CHANGES = {
  { "0.6.1", { v6e_ring = true } },
  { "0.7.0", { v5p_exact = true } },
  { "0.7.1", { tpu7x = "tray" } },
  { "0.7.2", { tpu7x = "strict" } },
  { "0.8.0", { tpu7x_ring = "2x2x2", v5p_cores = true } },
  { "0.8.1", { tpu7x = "blocks", v4_lite = true } },
  { "0.9.1", { tpu7 = true } },
  { "0.10.1", { tpu8i = true } },
  { "0.10.2", { gpu_by_id = true } },
  { "0.11.0", { v5e_kind = true } },
  { "0.11.1", { v5_kind = true, core_first = true, prime_factors = true } },
}

--- "0.10.2.dev3+abc" -> {0, 10, 2}.
local function parse(version)
  local numbers = {}
  for part in (version:match("^%d+[%d.]*") or ""):gmatch("%d+") do
    numbers[#numbers + 1] = math.tointeger(tonumber(part))
  end
  return #numbers >= 2 and numbers or nil
end

local function before(a, b)
  for index = 1, math.max(#a, #b) do
    local left, right = a[index] or 0, b[index] or 0
    if left ~= right then
      return left < right
    end
  end
  return false
end

local cache = {}

--- The rules of a release. A release newer than the newest that was read gets the newest rules.
---@param release string|ciranda.mesh.Rules|nil "0.10.2"; the newest when absent; a table of rules is used as it is
---@return ciranda.mesh.Rules
--- Raises "unsupported" for a release before `M.oldest`, "invalid" for what is no version.
function M.rules(release)
  if type(release) == "table" then
    return release
  end
  release = release or M.newest
  if cache[release] then
    return cache[release]
  end
  local version = type(release) == "string" and parse(release)
  if not version then
    fault.raise({
      op = "jax release",
      target = tostring(release),
      message = ("'%s' is no version of jax; write it like 0.10.2"):format(tostring(release)),
    })
  end
  if before(version, parse(M.oldest)) then
    fault.raise({
      code = "unsupported",
      op = "jax release",
      target = release,
      message = ("how jax %s places devices is not known; %s is the oldest"):format(release, M.oldest),
    })
  end
  local rules = { release = release }
  for key, value in pairs(START) do
    rules[key] = value
  end
  for _, change in ipairs(CHANGES) do
    if not before(version, parse(change[1])) then
      for key, value in pairs(change[2]) do
        rules[key] = value
      end
    end
  end
  cache[release] = rules
  return rules
end

return M
