--- bench-startup: `ciranda -e ''` against `lua5.4 -e ''`, alternating; the last line is JSON.
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY"), "CIRANDA_BINARY names the program to measure")
local RUNS = os.getenv("CIRANDA_SHORT") and 10 or 50

--- Wall time (s) from spawn to exit, without the task scheduler in between.
local function once(program)
  return task.await(function(done)
    local started = uv.hrtime()
    local handle
    handle = assert(uv.spawn(program, { args = { "-e", "" } }, function(code, signal)
      local seconds = (uv.hrtime() - started) / 1e9
      handle:close()
      assert(code == 0 and signal == 0, program .. " failed")
      done(nil, seconds)
    end))
  end)
end

local function median(list)
  table.sort(list)
  local middle = #list // 2
  return #list % 2 == 1 and list[middle + 1] or (list[middle] + list[middle + 1]) / 2
end

local ours, theirs = {}, {}
once(BINARY)
once("lua5.4")
for _ = 1, RUNS do
  table.insert(ours, once(BINARY))
  table.insert(theirs, once("lua5.4"))
end

local directory = fs.tempdir()
local stripped = directory .. "/ciranda"
process.run({ "strip", "-o", stripped, BINARY }):check()
local binary_bytes = fs.stat(stripped).size
fs.remove_tree(directory)

local ciranda_ms, lua_ms = median(ours) * 1000, median(theirs) * 1000
print(json.encode {
  bench = "startup",
  runs = RUNS,
  ciranda_ms = ciranda_ms,
  lua_ms = lua_ms,
  ratio_lua = lua_ms / ciranda_ms,
  lua_command = "lua5.4 -e ''",
  binary_bytes = binary_bytes,
})
