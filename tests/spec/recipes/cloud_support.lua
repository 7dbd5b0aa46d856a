-- A simulated project and the program itself, pointed there by ordinary variables, with a home of its own.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local sim = require("ciranda.sim")
local patience = dofile("tests/fixtures/patience.lua")
local uv = require("luv")

local M = {}

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

---@class recipes.Cloud
---@field root string
---@field simulator ciranda.Simulator
local Cloud = {}
Cloud.__index = Cloud

---@param options table? of ciranda.sim
---@return recipes.Cloud
function M.start(options)
  local cloud = setmetatable({ root = fs.tempdir("ciranda-cloud") }, Cloud)
  fs.mkdir(cloud.root .. "/code")
  fs.mkdir(cloud.root .. "/home")
  cloud.simulator = sim.start(options)
  return cloud
end

--- The program's arguments and environment.
function Cloud:command(words)
  local argv = { BINARY, table.unpack(words) }
  argv.cwd = self.root .. "/code"
  argv.env = {
    HOME = self.root .. "/home",
    TMPDIR = self.root,
    XDG_STATE_HOME = self.root .. "/state",
    XDG_CONFIG_HOME = false,
    SSH_AUTH_SOCK = false,
  }
  for name, value in pairs(self.simulator.env) do
    argv.env[name] = value
  end
  return argv
end

--- Runs `ciranda ...` to its end.
---@return { code: integer, out: string, err: string }
function Cloud:run(...)
  local argv = self:command({ ... })
  argv.timeout = 250
  local answer = process.run(argv)
  return { code = answer.code, signal = answer.signal, out = answer.stdout, err = answer.stderr }
end

--- Starts `ciranda ...`; `running.wait()` gives its result, `running.errors()` what it has said so far.
function Cloud:start_program(...)
  local argv = self:command({ ... })
  -- Programs run side by side: each has files of its own.
  self.started = (self.started or 0) + 1
  local out, errors =
    ("%s/out.%d"):format(self.root, self.started), ("%s/err.%d"):format(self.root, self.started)
  argv.stdout = assert(uv.fs_open(out, "w", 384))
  argv.stderr = assert(uv.fs_open(errors, "w", 384))
  local program = process.spawn(argv)
  uv.fs_close(argv.stdout)
  uv.fs_close(argv.stderr)
  return {
    program = program,
    out = function()
      return fs.read(out)
    end,
    errors = function()
      return fs.read(errors)
    end,
    wait = function()
      local answer = program:wait()
      return { code = answer.code, signal = answer.signal, out = fs.read(out), err = fs.read(errors) }
    end,
  }
end

--- Waits until something holds, 150 s at most, and returns what it is.
---@async
---@param what string|fun(): string for the message when it never does
---@param holds fun(): any
---@return any
function M.wait(what, holds)
  return patience.wait_for(what, holds, 150)
end

--- How many processes have exactly this command line.
---@param ... string
---@return integer
function M.processes(...)
  local wanted, count = table.concat({ ... }, "\0") .. "\0", 0
  for _, entry in ipairs(fs.list("/proc")) do
    local ok, line = pcall(fs.read, "/proc/" .. entry.name .. "/cmdline")
    if entry.name:find("^%d+$") and ok and line == wanted then
      count = count + 1
    end
  end
  return count
end

--- Ends the simulator and removes everything.
function Cloud:stop()
  self.simulator:close()
  fs.remove_tree(self.root)
end

return M
