local addresses = require("ciranda.sim.addresses")
local errors = require("ciranda.sim.errors")
local events = require("ciranda.sim.events")
local faults = require("ciranda.sim.faults")
local fieldmask = require("ciranda.sim.fieldmask")
local clock = require("ciranda.sim.clock")
local patience = dofile("tests/fixtures/patience.lua")
local pool = require("ciranda.sim.pool")
local process = require("ciranda.io.process")
local processes = require("ciranda.sim.processes")
local random = require("ciranda.sim.random")
local request_log = require("ciranda.sim.request_log")
local uv = require("luv")

describe("addresses", function()
  it("come from a block that nobody else gets", function()
    local first = addresses.claim(20)
    local second = addresses.claim(20)
    assert.are_not.equal(first.block, second.block)
    local held = first.block
    first:close()
    second:close()
    local again = addresses.claim(held - addresses.FIRST_BLOCK)
    if again.block ~= held then
      -- Another simulator on this machine was faster.
      local socket = uv.new_tcp()
      assert(socket:bind(("127.%d.0.1"):format(held), addresses.CLAIM_PORT))
      assert.are.equal("EADDRINUSE", select(3, socket:listen(1, function() end)))
      socket:close()
    end
    again:close()
  end)

  it("are given out once, and again when they have come back", function()
    local block = addresses.claim()
    local first, second = block:take(), block:take()
    assert.are_not.equal(first, second)
    block:give_back(first)
    assert.are_not.equal(first, block:take())
    assert.are.equal(("127.%d.129.1"):format(block.block), block:external(("127.%d.1.1"):format(block.block)))
    block:close()
  end)

  it("skip ports that somebody has", function()
    local block = addresses.claim()
    local socket = uv.new_tcp()
    assert(socket:bind("0.0.0.0", 0))
    assert(socket:listen(1, function() end))
    local port = socket:getsockname().port
    assert.is_true(block:port(port, "a test") > port)
    assert.is_false(block:available(port))
    socket:close()
    block:close()
  end)
end)

describe("a pool", function()
  it("holds up to its limit and not beyond", function()
    local p = pool.new({ a = 10 })
    assert.is_true(p:take("x", "a", 6))
    assert.is_false(p:take("y", "a", 5))
    assert.is_true(p:take("y", "a", 4))
    p:release("x")
    assert.are.equal(4, p:in_use("a"))
    assert.is_true(p:take("y", "a", 10))
    assert.are.equal(10, p:in_use("a"))
    assert.is_true(p:take("z", "b", 1000000))
    assert.are.same({ a = { limit = 10, in_use = 10 }, b = { in_use = 1000000 } }, p:report())
  end)
end)

describe("chance", function()
  it("is the same for the same seed and stays within its range", function()
    local a, b = random.new(5), random.new(5)
    for _ = 1, 1000 do
      local value = a:integer(3, 7)
      assert.are.equal(value, b:integer(3, 7))
      assert.is_true(value >= 3 and value <= 7)
    end
    assert.are_not.equal(random.new(5):hex(16), random.new(6):hex(16))
    local parent = random.new(9)
    assert.are_not.equal(parent:fork("x"):bits(), parent:fork("y"):bits())
  end)
end)

describe("faults", function()
  local list

  before_each(function()
    local time = clock.manual()
    list = faults.new({ random = random.new(1), events = events.new(time) })
  end)

  it("strike as often as they are counted, at what they name", function()
    list:add({ kind = "slow", method = "nodes.*", count = 2 })
    assert.is_nil(list:on_call("queuedResources.get"))
    assert.are.equal("slow", list:on_call("nodes.get").kind)
    assert.are.equal("slow", list:on_call("nodes.list").kind)
    assert.is_nil(list:on_call("nodes.list"))
    assert.are.same({}, list:pending())
  end)

  it("strike with their probability, from the seed", function()
    list:add({ kind = "error", status = "UNAVAILABLE", probability = 0.25 })
    local struck = 0
    for _ = 1, 1000 do
      local ok, err = pcall(list.on_call, list, "nodes.get")
      if not ok then
        assert.is_true(errors.is(err))
        struck = struck + 1
      end
    end
    assert.is_true(struck > 180 and struck < 320, tostring(struck))
    list:clear()
    assert.is_nil(list:on_call("nodes.get"))
  end)
end)

describe("a field mask", function()
  it("keeps what it names", function()
    local value = { a = { { x = 1, y = 2 }, { x = 3 } }, b = 4, c = { d = { e = 5, f = 6 } } }
    assert.are.same(
      { a = { { x = 1 }, { x = 3 } }, c = { d = { e = 5 } } },
      fieldmask.apply(fieldmask.parse("a(x),c/d/e"), value)
    )
    assert.are.same({ b = 4 }, fieldmask.apply(fieldmask.parse("b"), value))
    for _, text in ipairs({ "", "a(", "a)", "a,,b", "a/" }) do
      assert.has_error(function()
        fieldmask.parse(text)
      end)
    end
  end)
end)

describe("the request log", function()
  it("keeps no credentials", function()
    local log = request_log.new(clock.manual())
    log:add(
      { method = "GET", target = "/v2/x?access_token=secret&a=1", headers = {}, called = "nodes.get" },
      200
    )
    log:add({ method = "PUT", target = "/upload?upload_id=secret", headers = {} })
    local list = log:since(0)
    assert.are.equal("/v2/x?access_token=...&a=1", list[1].path)
    assert.are.equal("nodes.get", list[1].method)
    assert.are.equal(200, list[1].status)
    assert.are.equal("/upload?upload_id=...", list[2].path)
    assert.are.equal(1, #log:since(1))
  end)
end)

describe("processes", function()
  --- A shell with a mark, a file that it holds, and a child that has just been started.
  local function marked_shell()
    local shell = process.spawn({
      "/bin/sh",
      "-c",
      "exec 8</dev/full; sleep 60 & echo up; wait",
      env = { CIRANDA_SPEC_MARK = "here" },
      stdout = process.PIPE,
    })
    assert.are.equal("up\n", shell.stdout:read())
    return shell
  end

  it("are found as a family, by what they hold, and by their environment", function()
    local shell <close> = marked_shell()
    local family = processes.descendants(shell.pid)
    assert.are.equal(1, #family)
    assert.are.equal(shell.pid, family[1].parent)
    assert.is_true(processes.holds(shell.pid, "/dev/ful"))
    assert.is_false(processes.holds(shell.pid, "/dev/vfio/"))
    patience.wait_for("the end of its exec", function()
      return processes.has_environment(family[1].pid, "CIRANDA_SPEC_MARK=here") ~= nil
    end)
    assert.is_true(processes.has_environment(family[1].pid, "CIRANDA_SPEC_MARK=here"))
    assert.is_false(processes.has_environment(family[1].pid, "CIRANDA_SPEC_MARK=her"))
    assert.is_true(processes.signal(family[1], "sigkill"))
    shell:wait()
    assert.is_false(processes.signal(family[1], "sigkill"))
    assert.is_nil(processes.get(shell.pid))
  end)

  it("that are in the middle of an exec are never taken for others", function()
    for _ = 1, 100 do
      local shell <close> = marked_shell()
      local child = processes.descendants(shell.pid)[1]
      local looks, marked = 0
      local deadline = uv.hrtime() + 60e9
      repeat
        marked = processes.has_environment(child.pid, "CIRANDA_SPEC_MARK=here")
        looks = looks + 1
      until marked == false or looks > 20 and marked ~= nil or uv.hrtime() > deadline
      assert.is_true(processes.signal(child, "sigkill"))
      shell:wait()
      assert.is_true(marked)
    end
  end)

  it("with an empty environment, threads of the kernel and zombies have no variable", function()
    local bare <close> = process.spawn({ "/bin/sleep", "60", env = {}, clear_env = true })
    patience.wait_for("the end of its exec", function()
      return processes.has_environment(bare.pid, "A=b") ~= nil
    end)
    assert.is_false(processes.has_environment(bare.pid, "A=b"))
    for _, pid in ipairs(processes.pids()) do
      local found = processes.get(pid)
      if found and (found.state == "Z" or found.parent == 2) then
        assert.is_not_true(processes.has_environment(pid, "A=b"))
      end
    end
  end)
end)
