-- Places the same 65,536 devices, compares every id with jax's, and prints one line of JSON.
--
--     lua5.4 lua_side.lua REPEATS IDS TIMES      (package.path must find ciranda)
--
-- `ratio_cpu` is jax's CPU time over ours for a set of whole slices, the smaller of two meshes. `ratio_cpu_list` is
-- the same where ours walks a list of 65,536 devices as jax does. Making either set is not timed, as on jax's side.
-- `plan_s` is one exhaustive plan of 256 slices of v5litepod-256 with a model and a batch.
local mesh = require("ciranda.mesh")

local repeats = assert(math.tointeger(tonumber(arg[1])))

local times, versions = {}, {}
for line in assert(io.open(arg[3])):lines() do
  local name, rest = line:match("^(%S+) (.*)$")
  if name == "versions" then
    versions.jax, versions.numpy, versions.python = rest:match("^(%S+) (%S+) (%S+)$")
  else
    times[name] = assert(tonumber(rest))
  end
end

local function median_of(run)
  local seconds, result = {}, nil
  for index = 1, repeats do
    collectgarbage()
    local start = os.clock()
    result = run()
    seconds[index] = os.clock() - start
  end
  table.sort(seconds)
  return seconds[(#seconds + 1) // 2], result
end

local function same(ids, line)
  local index = 0
  for number in line:gmatch("%d+") do
    index = index + 1
    if ids[index] ~= math.tointeger(tonumber(number)) then
      return false
    end
  end
  return index == #ids
end

local grid = mesh.devices.grid({ kind = "TPU v5 lite", topology = { 16, 16, 1 }, slices = 256 })
local list = grid:as_list()
local shapes = {
  { "ring", { 1, 256, 1 }, { 256, 1, 1 } },
  { "square", { 1, 16, 16 }, { 256, 1, 1 } },
}

local equal, ours, ratio, ratio_list, jax_seconds = true, nil, math.huge, math.huge, nil
local ids = assert(io.open(arg[2]))
for _, shape in ipairs(shapes) do
  local name, ici, dcn = table.unpack(shape)
  local expected = ids:read("l")
  for _, set in ipairs({ grid, list }) do
    local seconds, placed = median_of(function()
      return mesh.placement.create_hybrid_device_mesh(ici, dcn, set, { jax = versions.jax })
    end)
    equal = equal and same(placed.ids, expected)
    if set == list then
      ratio_list = math.min(ratio_list, times[name] / seconds)
    elseif times[name] / seconds < ratio then
      ratio, ours, jax_seconds = times[name] / seconds, seconds, times[name]
    end
  end
end

local plan_seconds, plan = median_of(function()
  return mesh.plan({
    type = "v5litepod-256",
    slices = 256,
    tokens = 256 * 400000,
    model = {
      layers = 80,
      width = 8192,
      ff = 28672,
      heads = 64,
      kv_heads = 8,
      head_size = 128,
      vocabulary = 128256,
    },
  })
end)

print(
  (
    '{"bench":"mesh","devices":%d,"ratio_cpu":%.1f,"jax_cpu_s":%.6f,"ciranda_cpu_s":%.6f,"ratio_cpu_list":%.1f,'
    .. '"plan_s":%.4f,"layouts":%d,"layouts_expected":%d,"equal":%s,"repeats":%d,"jax":"%s","numpy":"%s",'
    .. '"python":"%s","lua":"%s"}'
  ):format(
    grid.count,
    ratio,
    jax_seconds,
    ours,
    ratio_list,
    plan_seconds,
    plan.count,
    plan.expected,
    tostring(equal),
    repeats,
    versions.jax,
    versions.numpy,
    versions.python,
    _VERSION
  )
)
os.exit(equal and plan.count == plan.expected and 0 or 1)
