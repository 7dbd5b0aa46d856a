local scheduler = require("ciranda.task.scheduler")
local task = require("ciranda.task")

--- Programs made at random of everything tasks can do. Whatever happens in them, afterwards no task is left, every
--- clean-up has run, and every permit is back.
local SEEDS = 60
local DEPTH = 5
local ACTIONS = 60
local TICK = 0.0005

local function on_close(fn)
  return setmetatable({}, { __close = fn })
end

local function count(set)
  local number = 0
  for _ in pairs(set) do
    number = number + 1
  end
  return number
end

--- One program.
local function program(random)
  local self = { tasks = {}, opened = 0, closed = 0, inside = 0, semaphore = task.semaphore(2) }
  local left = ACTIONS
  local body

  local function nap()
    task.sleep(random(4) * TICK)
  end

  local function any_task()
    return self.tasks[1] and self.tasks[random(#self.tasks)]
  end

  local act
  local actions = {
    nap,
    function(depth)
      local scope <close> = task.scope()
      for _ = 1, random(3) do
        table.insert(self.tasks, scope:spawn(body(depth)))
      end
      if random(2) == 1 then
        nap()
      end
      if random(5) == 1 then
        scope:cancel()
      end
    end,
    function(depth)
      pcall(act, depth)
    end,
    function(depth)
      pcall(task.race, { body(depth), body(depth) })
    end,
    function(depth)
      pcall(task.timeout, random(4) * TICK, body(depth))
    end,
    function()
      local victim = any_task()
      if victim then
        victim:cancel("at random")
      end
    end,
    function()
      self.semaphore:with(function()
        self.inside = self.inside + 1
        local _ <close> = on_close(function()
          self.inside = self.inside - 1
        end)
        assert(self.inside <= 2)
        nap()
      end)
    end,
    function(depth)
      local limit = random(3)
      for value in
        coroutine.wrap(function()
          for index = 1, 3 do
            act(depth)
            coroutine.yield(index)
          end
        end)
      do
        task.yield()
        if value == limit then
          break
        end
      end
    end,
    function(depth)
      task.shield(act, depth)
    end,
    function()
      local other = any_task()
      if other then
        pcall(other.wait, other)
      end
    end,
    function()
      repeat
        local ok = pcall(nap) -- swallows a cancellation
      until not ok or random(3) == 1
    end,
  }

  function act(depth)
    left = left - 1
    local choice = (left <= 0 or depth <= 0) and 1 or random(#actions)
    actions[choice](depth - 1)
  end

  function body(depth)
    return function()
      self.opened = self.opened + 1
      local _ <close> = on_close(function()
        self.closed = self.closed + 1
        if random(4) == 1 then
          nap()
        end
      end)
      for _ = 1, random(4) do
        act(depth)
      end
      local fate = random(20)
      if fate == 1 then
        error("at random")
      elseif fate == 2 then
        error({ code = "x" })
      end
    end
  end

  self.main = body(DEPTH)
  return self
end

describe("programs made at random", function()
  it("leave nothing behind", function()
    local previous = task.set_grace(0.02)
    for seed = 1, SEEDS do
      math.randomseed(seed)
      local before = count(scheduler.live)
      local made = program(math.random)
      pcall(task.run, made.main)
      local where = "seed " .. seed
      assert.equal(before, count(scheduler.live), where)
      assert.equal(made.opened, made.closed, where)
      assert.equal(0, made.inside, where)
      assert.equal(2, made.semaphore.free, where)
      for _, child in ipairs(made.tasks) do
        assert.is_true(child:ended(), where)
      end
    end
    task.set_grace(previous)
  end)
end)
