local errors = require("ciranda.io.error")
local loader = require("ciranda.task.loader")
local task = require("ciranda.task")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

--- Provide modules for the time of a test.
local function with_modules(modules, fn)
  local names = {}
  for name, load_it in pairs(modules) do
    package.preload[name] = load_it
    names[#names + 1] = name
  end
  local _ <close> = setmetatable({}, {
    __close = function()
      for _, name in ipairs(names) do
        package.preload[name] = nil
        package.loaded[name] = nil
      end
    end,
  })
  return fn()
end

describe("require in Lua", function()
  it("returns what the stock one returns", function()
    with_modules({
      ["test.table"] = function(name, data)
        return { name = name, data = data }
      end,
      ["test.nothing"] = function() end,
      ["test.itself"] = function(name)
        package.loaded[name] = "set by itself"
      end,
      ["test.false"] = function()
        return false
      end,
    }, function()
      local module, data = loader.require("test.table")
      assert.same({ name = "test.table", data = ":preload:" }, module)
      assert.equal(":preload:", data)
      assert.equal(module, loader.require("test.table"))
      assert.equal(module, require("test.table"))
      assert.is_true(loader.require("test.nothing"))
      assert.equal("set by itself", loader.require("test.itself"))
      assert.is_false(loader.require("test.false"))
    end)
  end)

  it("finds files, and passes their name", function()
    local directory = os.getenv("TMPDIR") or "/tmp"
    local name = ("ciranda_loader_%d"):format(require("luv").os_getpid() // 1 | 0)
    local path = directory .. "/" .. name .. ".lua"
    local file <close> = assert(io.open(path, "w"))
    file:write("return { ... }")
    file:flush()
    local saved = package.path
    local _ <close> = setmetatable({}, {
      __close = function()
        package.path = saved
        package.loaded[name] = nil
        os.remove(path)
      end,
    })
    package.path = directory .. "/?.lua"
    assert.same({ name, path }, loader.require(name))
    package.loaded[name] = nil
    file:seek("set")
    file:write("return nonsense nonsense")
    file:flush()
    local ok, err = pcall(loader.require, name)
    assert.is_false(ok)
    assert.matches("error loading module '" .. name .. "' from file", err)
  end)

  it("says where it looked, and nowhere else", function()
    local saved, csaved = package.path, package.cpath
    package.path, package.cpath = "/nowhere/lua/?.lua;/nowhere/lua/?/init.lua", ""
    local ok, err = pcall(function()
      loader.require("no.such.module")
    end)
    package.path, package.cpath = saved, csaved
    assert.is_false(ok)
    assert.matches(
      "loader_spec%.lua:%d+: module 'no%.such%.module' not found:\n\tno field package%.preload",
      err
    )
    assert.matches(
      "\n\tno file '/nowhere/lua/no/such/module%.lua'\n\tno file '/nowhere/lua/no/such/module/init%.lua'",
      err
    )
    assert.not_matches("usr", err)
  end)

  it("raises what the module raises, and can try again", function()
    local attempts = 0
    with_modules({
      ["test.flaky"] = function()
        attempts = attempts + 1
        if attempts == 1 then
          error("not yet", 0)
        end
        return "ready"
      end,
    }, function()
      local ok, err = pcall(loader.require, "test.flaky")
      assert.is_false(ok)
      assert.equal("not yet", err)
      assert.equal("ready", loader.require("test.flaky"))
    end)
  end)

  it("refuses a module that requires itself, and says how", function()
    with_modules({
      ["test.a"] = function()
        local value = loader.require("test.b")
        return value
      end,
      ["test.b"] = function()
        local value = loader.require("test.a")
        return value
      end,
    }, function()
      local ok, err = pcall(loader.require, "test.a")
      assert.is_false(ok)
      assert.is_true(errors.is(err, "misuse"))
      assert.matches("test%.a %-> test%.b %-> test%.a", err.message)
    end)
  end)

  it("refuses what is no name", function()
    assert.has_error(function()
      loader.require({})
    end, "bad argument #1 to 'require' (string expected, got table)")
  end)

  it(
    "loads a module that waits, once for all who require it meanwhile",
    within(function()
      local loaded = 0
      with_modules({
        ["test.waits"] = function()
          task.sleep(0.002)
          loaded = loaded + 1
          return { number = loaded }
        end,
      }, function()
        local modules = task.map({ 1, 2, 3 }, function()
          return (loader.require("test.waits"))
        end)
        assert.equal(1, loaded)
        assert.equal(modules[1], modules[2])
        assert.equal(modules[1], modules[3])
      end)
    end)
  )

  it(
    "refuses a circle across tasks instead of waiting for ever",
    within(function()
      local function requires(other)
        return function()
          task.sleep(0.001)
          local value = loader.require(other)
          return value
        end
      end
      with_modules({ ["test.x"] = requires("test.y"), ["test.y"] = requires("test.x") }, function()
        local results = task.map({ "test.x", "test.y" }, function(name)
          local ok, err = pcall(loader.require, name)
          return ok and "loaded" or err.code
        end)
        assert.same({ "misuse", "misuse", n = 2 }, results)
      end)
    end)
  )

  it(
    "lets the next in line load what a cancelled task began to load",
    within(function()
      local tries = 0
      with_modules({
        ["test.slow"] = function()
          tries = tries + 1
          if tries == 1 then
            task.sleep(60)
          end
          return "loaded"
        end,
      }, function()
        local scope <close> = task.scope()
        local first = scope:spawn(loader.require, "test.slow")
        local second = scope:spawn(loader.require, "test.slow")
        while tries == 0 do
          task.sleep(0.001)
        end
        first:cancel()
        assert.equal("loaded", (second:wait()))
        assert.equal("cancelled", first:status())
      end)
    end)
  )
end)
