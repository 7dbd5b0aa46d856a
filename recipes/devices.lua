--- devices: does every worker have the same JAX, and do all of them together see every chip?
local err = require("ciranda.io.error")
local fan = require("ciranda.run.fan")
local json = require("ciranda.io.json")
local named_target = require("ciranda.run.named_target")
local nodeset = require("ciranda.provider.nodeset")
local results_of = require("ciranda.fleet.results")
local tables = require("ciranda.cli.table")
local topology = require("ciranda.mesh.topology")

local M = {
  summary = "check that JAX sees every chip, and is the same everywhere",
  description = "First asks every worker for its versions of jax, jaxlib and libtpu, which does not touch the "
    .. "accelerator. When they are the same, JAX is started on all workers at once, and len(jax.devices()) must be the "
    .. "number of chips (twice that on v2 and v3, whose chips have two devices). Status 1 when something is missing, "
    .. "with the slices named. The accelerators must be free.",
}

M.flags = {
  {
    name = "NAME",
    positional = true,
    help = "[USER@]NAME of a queued resource, a node, or a prefix of nodes.",
  },
  {
    name = "PYTHON",
    default = "python3",
    help = "The interpreter on the workers, such as ~/venv/bin/python.",
  },
  { name = "TPU_TYPE", help = "Accelerator type of each slice, where the fleet does not say it." },
  { name = "timeout", type = "duration", default = 300, help = "Longest time JAX may take to start." },
}
table.move(named_target.flags, 1, #named_target.flags, #M.flags + 1, M.flags)

--- What begins the line of an answer, whatever else a worker prints.
local MARKER = "ciranda-devices "
--- Seconds for the first question, and for the others once one worker has failed in the second.
local VERSIONS_TIMEOUT, COMPANY = 60, 10

local PRINT = ('print("\\n%s" + json.dumps(answer), flush=True)\n'):format(MARKER)

local VERSIONS = [[
import importlib.metadata, json, platform
answer = {"python": platform.python_version()}
for name in ("jax", "jaxlib", "libtpu", "libtpu-nightly"):
    try:
        answer[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
]] .. PRINT

local DEVICES = [[
import json
import jax
if %s:
    jax.distributed.initialize()
slices = {}
for device in jax.devices():
    index = str(getattr(device, "slice_index", 0))
    slices[index] = slices.get(index, 0) + 1
answer = {
    "devices": len(jax.devices()),
    "local": len(jax.local_devices()),
    "kind": jax.devices()[0].device_kind,
    "slices": slices,
}
]] .. PRINT

---@class recipes.devices.Slice
---@field index integer
---@field name string
---@field workers ciranda.Worker[]
---@field chips integer
---@field devices integer as JAX counts them
---@field problem string? what is wrong with it

---@param slice recipes.devices.Slice
---@return string
local function title(slice)
  return ("slice %d (%s)"):format(slice.index, slice.name)
end

--- The slices that are asked, with what they should have.
---@param found ciranda.run.Target
---@param type_given string?
---@return recipes.devices.Slice[]
local function expected(found, type_given)
  local by_index, list = {}, {}
  for _, worker in ipairs(found.fleet:workers()) do
    by_index[worker.slice] = by_index[worker.slice] or {}
    table.insert(by_index[worker.slice], worker)
  end
  for _, slice in ipairs(found.slices) do
    local workers = by_index[slice.index]
    if workers then
      local accelerator = slice.accelerator or type_given
      if not accelerator then
        err.raise({
          code = "usage",
          message = "the fleet does not say what its slices are; give --TPU_TYPE, such as v5litepod-16",
        })
      end
      local shape = topology.of({ type = accelerator, topology = slice.topology })
      if #workers ~= shape.hosts then
        err.raise({
          code = "usage",
          message = ("JAX waits for every worker of a slice: %s of %s has %d, and %d are chosen"):format(
            accelerator,
            slice.name,
            shape.hosts,
            #workers
          ),
        })
      end
      list[#list + 1] = {
        index = slice.index,
        name = slice.name,
        workers = workers,
        chips = shape.chips,
        devices = shape.devices,
      }
    end
  end
  return list
end

--- Runs a piece of Python on every worker at once.
---@return ciranda.run.Fan done
---@return table<ciranda.Worker, table> answers
local function ask(context, fleet, script, options)
  local mark = fan.mark()
  local answers = {}
  local environment = { [fan.MARK] = mark }
  for name, value in pairs(options.environment or {}) do
    environment[name] = value
  end
  local done = fan.run({
    fleet = fleet,
    context = context,
    mark = mark,
    company = options.company,
    work = function(part, on_result)
      return part:run(context.flags.PYTHON .. " -", {
        stdin = script,
        env = environment,
        timeout = options.timeout,
        on_result = on_result,
      })
    end,
    on_result = function(result)
      local line = ("\n" .. result.stdout):match(".*\n" .. MARKER:gsub("%-", "%%-") .. "([^\n]*)")
      local ok, answer = pcall(json.decode, line or "")
      answers[result.worker] = ok and type(answer) == "table" and answer or nil
    end,
  })
  return done, answers
end

--- Why a worker has no answer.
---@param result ciranda.fleet.Result?
---@param vain boolean? it was ended since others had failed
---@return string
local function why(result, vain)
  if vain or not result then
    return "ended, since it would have waited for the others in vain"
  elseif result.err then
    return results_of.describe(result)
  end
  local words = (result.stderr or ""):match("([^\n]+)%s*$") or (result.stdout or ""):match("([^\n]+)%s*$")
  return results_of.describe(result) .. (words and ": " .. words or "")
end

--- Says who has no answer, equal reasons once, and notes it with their slices.
---@param slices recipes.devices.Slice[]
---@return boolean all everybody has answered
local function check_answers(context, slices, done, answers)
  local by_worker, groups, order = {}, {}, {}
  for _, result in ipairs(done.results) do
    by_worker[result.worker] = result
  end
  local vain = {}
  for _, worker in ipairs(done.vain) do
    vain[worker] = true
  end
  for _, slice in ipairs(slices) do
    local silent = 0
    for _, worker in ipairs(slice.workers) do
      if not answers[worker] then
        silent = silent + 1
        local reason = why(by_worker[worker], vain[worker])
        if not groups[reason] then
          groups[reason] = {}
          order[#order + 1] = reason
        end
        table.insert(groups[reason], worker)
      end
    end
    if silent > 0 then
      slice.problem = ("%d of its %d workers gave no answer"):format(silent, #slice.workers)
    end
  end
  for _, reason in ipairs(order) do
    context.progress:say("%s: %s", nodeset.fold(groups[reason]), reason)
  end
  return #order == 0
end

--- The versions as one text; nil for what has no jax.
local function version_text(answer)
  local parts = {}
  for _, name in ipairs({ "jax", "jaxlib", "libtpu", "libtpu-nightly" }) do
    if answer[name] then
      parts[#parts + 1] = name .. " " .. answer[name]
    end
  end
  return answer.jax and table.concat(parts, ", ") or nil
end

--- Says which workers have other versions than most, or none.
---@return string? versions those that all have
local function check_versions(context, slices, answers)
  local groups, order = {}, {}
  for _, slice in ipairs(slices) do
    for _, worker in ipairs(slice.workers) do
      local versions = version_text(answers[worker])
      local text = versions or "no jax for " .. context.flags.PYTHON
      if not groups[text] then
        groups[text] = { text = text, versions = versions, workers = {}, slices = {} }
        order[#order + 1] = groups[text]
      end
      table.insert(groups[text].workers, worker)
      groups[text].slices[slice] = true
    end
  end
  if #order == 1 and order[1].versions then
    return order[1].versions
  end
  table.sort(order, function(a, b)
    if #a.workers ~= #b.workers then
      return #a.workers > #b.workers
    end
    return a.text < b.text
  end)
  for place, group in ipairs(order) do
    context.progress:say("%s: %s", nodeset.fold(group.workers), group.text)
    if place > 1 or not group.versions then
      for slice in pairs(group.slices) do
        slice.problem = group.versions and "its versions are not those of most" or "jax is missing"
      end
    end
  end
  return nil
end

--- Compares what JAX sees with what is there.
---@param slices recipes.devices.Slice[]
---@param answers table<ciranda.Worker, table>
---@return integer total devices that there should be
---@return boolean good
local function check_devices(slices, answers)
  local total, good = 0, true
  for _, slice in ipairs(slices) do
    total = total + slice.devices
  end
  local function blame(slice, format, ...)
    slice.problem = slice.problem or format:format(...)
    good = false
  end
  for _, slice in ipairs(slices) do
    slice.here, slice.seen = 0, answers[slice.workers[1]].devices
    for _, worker in ipairs(slice.workers) do
      slice.here = slice.here + answers[worker]["local"]
      slice.seen = math.min(slice.seen, answers[worker].devices)
    end
    if slice.here ~= slice.devices then
      blame(slice, "%d of its %d devices are there", slice.here, slice.devices)
    end
  end
  for _, slice in ipairs(slices) do
    for _, other in ipairs(slices) do
      for _, worker in ipairs(slice.workers) do
        if #slices > 1 and other ~= slice and not answers[worker].slices[tostring(other.index)] then
          blame(other, "slice %d does not see it", slice.index)
        end
      end
    end
  end
  -- A slice that others do not see is missing, not those that do not see it; these are named when nobody else is.
  for _, slice in ipairs(good and slices or {}) do
    if slice.seen ~= total then
      blame(slice, "it sees %d of %d devices", slice.seen, total)
    end
  end
  return total, good
end

--- What is on standard output.
local function print_slices(context, slices)
  if context.json then
    for _, slice in ipairs(slices) do
      context.progress:event({
        event = "slice",
        slice = slice.index,
        name = slice.name,
        workers = #slice.workers,
        chips = slice.chips,
        devices = slice.devices,
        present = slice.here,
        seen = slice.seen,
        problem = slice.problem,
      })
    end
    return
  end
  local rows = { { "SLICE", "NAME", "WORKERS", "CHIPS", "DEVICES", "SEES", "PROBLEM" } }
  for place, slice in ipairs(slices) do
    rows[place + 1] = {
      tostring(slice.index),
      slice.name,
      tostring(#slice.workers),
      tostring(slice.chips),
      slice.here and ("%d of %d"):format(slice.here, slice.devices) or "-",
      slice.seen and tostring(slice.seen) or "-",
      slice.problem or "-",
    }
  end
  io.write(tables.text(rows), "\n")
end

--- The end of a check that found something.
local function failure(context, slices, missing, what)
  print_slices(context, slices)
  local named = {}
  for _, slice in ipairs(slices) do
    if slice.problem then
      named[#named + 1] = ("%s: %s"):format(title(slice), slice.problem)
    end
  end
  for _, name in ipairs(missing) do
    named[#named + 1] = ("%s is missing: there is no such node"):format(name)
  end
  context.finish({ kind = "failed", status = 1, message = ("%s; %s"):format(what, table.concat(named, "; ")) })
  return 1
end

---@param context ciranda.cli.Context
---@param done ciranda.run.Fan
---@return integer status
local function interrupted(context, done)
  local result = fan.conclude(done, context.progress)
  context.finish(result)
  return result.status
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags, progress = context.flags, context.progress
  local found <close> = named_target.open(context, flags.NAME, { all = true })
  local slices = expected(found, flags.TPU_TYPE)
  found.login()
  local done, answers = ask(context, found.fleet, VERSIONS, { timeout = VERSIONS_TIMEOUT })
  if done.stopped then
    return interrupted(context, done)
  end
  if not check_answers(context, slices, done, answers) or #found.missing > 0 then
    return failure(
      context,
      slices,
      found.missing,
      "JAX was not started, since it would wait for what is missing"
    )
  end
  local versions = check_versions(context, slices, answers)
  if not versions then
    return failure(context, slices, {}, "JAX was not started, since its versions differ")
  end
  progress:say("%s on all %d workers; starting it", versions, #found.fleet)
  local script = DEVICES:format(#found.fleet > 1 and "True" or "False")
  -- One slice of several would wait for the others.
  local alone = #slices == 1 and found.multislice()
  done, answers = ask(context, found.fleet, script, {
    timeout = flags.timeout,
    company = COMPANY,
    environment = alone and alone(slices[1].workers[1]) or nil,
  })
  if done.stopped then
    return interrupted(context, done)
  end
  if not check_answers(context, slices, done, answers) then
    return failure(context, slices, {}, "JAX did not start everywhere")
  end
  local total, good = check_devices(slices, answers)
  if not good then
    return failure(context, slices, {}, ("JAX does not see all %d devices"):format(total))
  end
  print_slices(context, slices)
  context.finish({
    kind = "done",
    message = ("All %d devices (%s) of %d slice%s are seen by all %d workers: %s"):format(
      total,
      answers[found.fleet:workers()[1]].kind,
      #slices,
      #slices == 1 and "" or "s",
      #found.fleet,
      versions
    ),
  })
  return 0
end

return M
