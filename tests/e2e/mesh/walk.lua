-- Places again what walk.py let jax place, and compares: every device id, every refusal by type and text.
--
--     lua5.4 walk.lua CASES      (package.path must find ciranda)
--
-- Grids are placed twice, by arithmetic and as lists of devices; both must be right. Ends with one line of JSON and
-- status 0, or 1 when anything differs.
local granules = require("ciranda.mesh.granule")
local placement = require("ciranda.mesh.placement")

local walk = assert(loadfile((assert(arg[1], "usage: walk.lua CASES"))))()
local rules = placement.rules(walk.jax)
print(
  ("jax %s, numpy %s, seed %d: %d cases, %d refusals, by the rules of %s"):format(
    walk.jax,
    walk.numpy,
    walk.seed,
    #walk.cases,
    walk.refusals,
    rules.release
  )
)

local function place(case, devices)
  if case.fn == "physical" then
    local granule = devices.regular and granules.of_grid(devices)
      or granules.of_list(devices, devices:slots())
    local physical = granule:physical(rules)
    local view = require("ciranda.mesh.view")
    local slots = view.fill(physical.axes, physical.base)
    if physical.lookup then
      for index, position in ipairs(slots) do
        slots[index] = physical.lookup[position + 1]
      end
    end
    return { shape = physical.shape, ids = devices:ids_of(slots) }
  end
  local options = { jax = rules }
  for key, value in pairs(case.options) do
    options[key] = value
  end
  if case.fn == "create_device_mesh" then
    return placement.create_device_mesh(case.shapes[1], devices, options)
  end
  return placement.create_hybrid_device_mesh(case.shapes[1], case.shapes[2], devices, options)
end

local function difference(case, devices)
  local ok, made = pcall(place, case, devices)
  if case.exception then
    if ok then
      return ("jax raises %s: %s"):format(case.exception, case.message)
    elseif type(made) ~= "table" or made.exception ~= case.exception or made.message ~= case.message then
      return ("jax raises %s: %s\n      ours %s: %s"):format(
        case.exception,
        case.message,
        type(made) == "table" and tostring(made.exception) or "?",
        type(made) == "table" and made.message or tostring(made)
      )
    end
    return nil
  end
  if not ok then
    return "jax places it; ours refuses: " .. tostring(made)
  end
  if table.concat(made.shape, ",") ~= table.concat(case.shape, ",") then
    return ("shape %s, jax has %s"):format(table.concat(made.shape, "x"), table.concat(case.shape, "x"))
  end
  if #made.ids ~= #case.ids then
    return ("%d devices, jax has %d"):format(#made.ids, #case.ids)
  end
  for index, id in ipairs(case.ids) do
    if made.ids[index] ~= id then
      return ("element %d is %d, jax has %d"):format(index - 1, made.ids[index], id)
    end
  end
end

local failures, refusals, compared = 0, 0, 0
for number, make in ipairs(walk.cases) do
  local case = make()
  local sets = {}
  if case.grid then
    sets[1] = placement.grid(case.grid)
    sets[2] = sets[1]:as_list()
  else
    sets[1] = placement.list(case.list)
  end
  refusals = refusals + (case.exception and 1 or 0)
  for _, devices in ipairs(sets) do
    local why = difference(case, devices)
    compared = compared + 1
    if why then
      failures = failures + 1
      if failures <= 10 then
        local grid = case.grid
        print(
          ("  case %d: %s(%s) on %s: %s"):format(
            number,
            case.fn,
            table.concat(case.shapes[1] or {}, ",")
              .. (case.shapes[2] and "; " .. table.concat(case.shapes[2], ",") or ""),
            grid
                and ("%s %s, %d cores, %d slices"):format(
                  grid.kind,
                  table.concat(grid.topology, "x"),
                  grid.cores,
                  grid.slices
                )
              or #case.list .. " devices",
            why
          )
        )
      end
    end
  end
end

local enough = refusals * 4 >= #walk.cases
if not enough then
  print(("  only %d of %d cases are refusals; a quarter is asked for"):format(refusals, #walk.cases))
end
local ok = failures == 0 and enough and #walk.cases > 0
print(
  (
    '{"test":"e2e-mesh","ok":%s,"jax":"%s","numpy":"%s","seed":%d,"shapes":%d,"refusals":%d,"compared":%d,'
    .. '"differences":%d}'
  ):format(tostring(ok), walk.jax, walk.numpy, walk.seed, #walk.cases, refusals, compared, failures)
)
os.exit(ok and 0 or 1)
