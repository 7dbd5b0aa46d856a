-- What befalls a simulated cloud at times of its own, and the flags of `ciranda sim` that say so.
local engine = require("ciranda.core.engine")
local process = require("ciranda.io.process")
local directory = debug.getinfo(1, "S").source:match("@(.*/)")
local client = dofile(directory .. "client.lua")
local support = dofile(directory .. "support.lua")

local BINARY = os.getenv("CIRANDA_BINARY") or engine.executable

-- A project with two slices that are ACTIVE.
local function active(options)
  local project = support.project(options)
  local body = support.queued_resource(2, nil, options and options.spot and { spot = {} } or nil)
  local path = "/v2/" .. support.ZONE .. "/queuedResources"
  assert.are.equal(200, (project.call("POST", path .. "?queuedResourceId=job", body)))
  project.settle()
  return project
end

local function told(project, pattern)
  local list = {}
  for _, event in ipairs(project.world.events:since()) do
    local line = ("%s %s %s"):format(event.time, event.subject, event.text)
    if line:find(pattern) then
      list[#list + 1] = line
    end
  end
  return list
end

describe("an accident", function()
  it("strikes when it is time, whom it names", function()
    local project = active()
    project.world.faults:add({ kind = "halt", name = "job-1", worker = 2, after = 100 })
    project.clock:advance(99)
    assert.are.equal(0, #told(project, " halt$"))
    assert.are.equal(1, #project.world.faults:pending())
    project.clock:advance(1)
    assert.are.equal("halt job-1/2", project.machines.log[#project.machines.log])
    assert.are.equal(0, #project.world.faults:pending())
  end)

  it("comes again and again at random, and stops when it is taken back", function()
    local project = active()
    project.world.faults:add({ kind = "halt", every = 600 })
    project.clock:advance(86400)
    local count = #told(project, " halt$")
    assert.is_true(count > 90 and count < 200, tostring(count))
    project.world.faults:clear()
    project.clock:advance(86400)
    assert.are.equal(count, #told(project, " halt$"))
    project.world.faults:add({ kind = "halt", every = 600, count = 3 })
    project.clock:advance(86400)
    assert.are.equal(count + 3, #told(project, " halt$"))
    assert.are.equal(0, #project.world.faults:pending())
  end)

  it("passes as fast as the rest of the cloud", function()
    local project = active({ scale = 60 })
    project.world.faults:add({ kind = "halt", after = 600 })
    project.clock:advance(10)
    assert.are.equal(1, #told(project, " halt$"))
  end)

  it("that finds nobody is told and does no harm", function()
    local project = active()
    project.world.faults:add({ kind = "lose", name = "nobody" })
    project.world.faults:add({ kind = "preempt" }) -- nothing here is spot
    project.clock:advance(1)
    assert.are.equal(2, #told(project, "there is no such node or worker$"))
    assert.are.equal(
      "ACTIVE",
      project.world.queued_resources:find(support.ZONE .. "/queuedResources/job").state
    )
  end)

  it("of each kind can be had on request and from a seed", function()
    local project = active({ spot = true, grace = { notice = 30 } })
    project.world.faults:add({ kind = "maintain", name = "job-0" })
    project.settle()
    assert.are.equal(1, #told(project, "job%-0 maintenance$"))
    project.world.faults:add({ kind = "lose", name = "job-1" })
    project.settle()
    assert.are.equal(1, #told(project, "job%-1 REPAIRING$") - 1) -- taken away, then replaced
    project.world.faults:add({ kind = "preempt" })
    project.settle()
    assert.are.equal(1, #told(project, "preemption notice$"))
    local _, message = project.call("GET", "/v2/" .. support.ZONE .. "/queuedResources/job")
    assert.are.equal("SUSPENDED", message.state.state)
  end)

  it("makes the same day of the same seed, however often clients ask", function()
    local function day(seed, looks)
      local project = active({ seed = seed })
      project.world.faults:add({
        kind = "error",
        method = "nodes.list",
        status = "UNAVAILABLE",
        probability = 0.5,
      })
      project.world.faults:add({ kind = "lose", every = 4 * 3600 })
      project.world.faults:add({ kind = "halt", every = 3600 })
      for _ = 1, looks do
        pcall(project.world.faults.on_call, project.world.faults, "nodes.list")
      end
      project.settle()
      return table.concat(told(project, "job"), "\n")
    end
    assert.are.equal(day(3, 0), day(3, 25))
    assert.are_not.equal(day(3, 0), day(4, 0))
  end)
end)

describe("ciranda sim", function()
  local running

  local function start(...)
    local argv = { BINARY, "sim", "--isolation=none", ... }
    argv.stdout, argv.stderr = process.PIPE, process.DISCARD
    running = process.spawn(argv)
    local text = ""
    while not text:find("\nready\n") do
      text = text .. assert(running.stdout:read(), "it ended: " .. text)
    end
    local env = {}
    for name, value in text:gmatch("export ([%w_]+)=([^\n]*)") do
      env[name] = value
    end
    return { url = env.CIRANDA_SIM_URL, env = env }
  end

  after_each(function()
    if running then
      running:signal("sigterm")
      running:wait()
      running:close()
      running = nil
    end
  end)

  it("has a day made to order", function()
    local simulator = start(
      "--quota=v5p=64",
      "--capacity=v4=32",
      "--reservation=mine:v6e=16",
      "--creates-per-minute=1",
      "--delay=accept=0",
      "--delay=wait=0-1",
      "--grace=notice=2",
      "--fault=error,method=nodes.get,status=UNAVAILABLE,message=busy, come back,probability=1",
      "--fault=lose,every=3600"
    )
    local _, status = client.curl(simulator, "GET", "/sim/v1/status")
    assert.are.equal(32, status.capacity["us-west4-a/v4"].limit)
    assert.are.equal(16, status.capacity["us-west4-a/v6e/reserved"].limit)
    assert.is_truthy(next(status.quota))
    assert.are.equal(2, #status.faults)
    local path = "/v2/" .. client.PARENT
    local code, refusal = client.curl(simulator, "GET", path .. "/nodes/any")
    assert.are.equal(503, code)
    assert.are.equal("busy, come back", refusal.error.message)
    client.create(simulator, "one", 1, {
      acceleratorType = "v4-64",
      runtimeVersion = "tpu-ubuntu2204-base",
    })
    code = client.curl(simulator, "POST", path .. "/queuedResources?queuedResourceId=two", {
      tpu = {
        nodeSpec = {
          {
            parent = client.PARENT,
            nodeId = "two",
            node = { acceleratorType = "v4-8", runtimeVersion = "tpu-ubuntu2204-base" },
          },
        },
      },
    })
    assert.are.equal(429, code)
    client.wait_for(simulator, "one", "WAITING_FOR_RESOURCES")
  end)

  for flag, text in pairs({
    ["--fault=bad"] = "there is no fault of the kind 'bad'; there are alter, ",
    ["--fault=error,method=x"] = "is no status",
    ["--fault=lose,after=soon"] = "after must be a number",
    ["--fault=lose,when=1"] = "no field 'when'",
    ["--delay=nap=1"] = "there is no 'nap'; there are accept, ",
    ["--delay=reset=5-1"] = "neither NAME=SECONDS",
    ["--grace=notice=soon"] = "neither NAME=SECONDS",
    ["--reservation=mine"] = "is not NAME:TYPE=UNITS",
  }) do
    it("refuses " .. flag, function()
      local answer = process.run({ BINARY, "sim", flag, timeout = 60 })
      assert.are.equal(2, answer.code)
      assert.is_truthy(answer.stderr:find(text, 1, true), answer.stderr)
    end)
  end
end)
