-- A fleet of real sshds and the program itself, for specs of recipes that run on hosts.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local ssh = dofile("tests/spec/ssh/support.lua")
local uv = require("luv")

local M = { ssh = ssh }

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)

---@class recipes.Place
local Place = {}
Place.__index = Place

--- Servers, a hosts file, a home for the runner with the servers' keys in its known_hosts.
---@param slices integer
---@param workers integer
function M.place(slices, workers)
  local place = setmetatable({ root = fs.tempdir("ciranda-recipe"), servers = {} }, Place)
  -- An ordinary user's servers have that user's own home: what is made there has a name of its own, and goes.
  place.mark = ("spec-%d-"):format(uv.os_getpid())
  fs.chmod(place.root, 493)
  fs.mkdir(place.root .. "/runner")
  fs.mkdir(place.root .. "/runner/.ssh", 448)
  fs.mkdir(place.root .. "/tmp", 511)
  fs.mkdir(place.root .. "/code")
  local hosts, known = {}, {}
  for slice = 0, slices - 1 do
    for worker = 0, workers - 1 do
      -- All servers are on one machine: each worker has its own place for devices, lock and lease.
      local own = ("%s/worker-%d-%d"):format(place.root, slice, worker)
      fs.mkdir(own)
      fs.chmod(own, 511)
      local server = ssh.server({
        config = { ('SetEnv "CIRANDA_GUARD_OPTIONS=--devices %s/accel --lock %s/lock"'):format(own, own) },
      })
      place.servers[slice .. "/" .. worker] = server
      place.user = server.user
      hosts[#hosts + 1] = ("%s slice=%d worker=%d port=%d"):format(server.address, slice, worker, server.port)
      known[#known + 1] = ("[%s]:%d %s"):format(server.address, server.port, server:pin())
    end
  end
  fs.write(place.root .. "/hosts", table.concat(hosts, "\n") .. "\n")
  fs.write(place.root .. "/runner/.ssh/known_hosts", table.concat(known, "\n") .. "\n")
  fs.write(place.root .. "/config", ("UserKnownHostsFile %s/runner/.ssh/known_hosts\n"):format(place.root))
  return place
end

--- The environment of the runner: a home of its own.
function Place:env(more)
  local env = {
    HOME = self.root .. "/runner",
    XDG_STATE_HOME = self.root .. "/state",
    XDG_CONFIG_HOME = self.root .. "/configuration",
    TMPDIR = self.root .. "/tmp",
    SSH_AUTH_SOCK = false,
  }
  for name, value in pairs(more or {}) do
    env[name] = value
  end
  return env
end

--- Starts `ciranda RECIPE ...` on the servers. Returns the running program; `program:wait()` its result.
---@param recipe string
---@param arguments string[]
---@param options table? env, fleet = false: without the flags that name the fleet, program in place of the binary
function Place:start(recipe, arguments, options)
  options = options or {}
  local words = { options.program or BINARY, recipe, table.unpack(arguments) }
  if options.fleet ~= false then
    for _, word in ipairs({
      "--HOSTS_FILE=" .. self.root .. "/hosts",
      "--ssh-user=" .. self.user,
      "--ssh-key=" .. ssh.key("ed25519"),
    }) do
      words[#words + 1] = word
    end
  end
  words.cwd = self.root .. "/code"
  words.env = self:env(options.env)
  words.env.CIRANDA_BINARY = BINARY
  -- Programs run side by side: each has files of its own.
  self.started = (self.started or 0) + 1
  local out, errors =
    ("%s/out.%d"):format(self.root, self.started), ("%s/err.%d"):format(self.root, self.started)
  words.stdout = assert(uv.fs_open(out, "w", 384))
  words.stderr = assert(uv.fs_open(errors, "w", 384))
  local program = process.spawn(words)
  uv.fs_close(words.stdout)
  uv.fs_close(words.stderr)
  local running = { program = program, err_path = errors }
  function running.wait()
    local answer = program:wait()
    return { code = answer.code, signal = answer.signal, out = fs.read(out), err = fs.read(errors) }
  end
  return running
end

--- Runs `ciranda RECIPE ...` to its end.
function Place:run(recipe, arguments, options)
  return self:start(recipe, arguments, options).wait()
end

--- A worker's home.
function Place:home(slice, worker)
  return self.servers[slice .. "/" .. worker].home
end

--- Waits until a worker's log on the runner has what matches a pattern.
function Place:log_has(run, slice, worker, pattern)
  local path = ("%s/tmp/%s/output_slice_%04d_worker_%04d.txt"):format(self.root, run, slice, worker)
  local last = ""
  local found = ssh.wait_for(function()
    local ok, text = pcall(fs.read, path)
    last = ok and text or ""
    return last:find(pattern) ~= nil
  end)
  assert(found, ("%s never had %s: %s"):format(path, pattern, last))
end

--- A name for a run that nobody else has.
function Place:name(short)
  return self.mark .. short
end

--- Ends what our guards still run on the servers (their programs live in sessions of their own), then the servers.
function Place:stop()
  local marks = {}
  for _, server in pairs(self.servers) do
    marks[#marks + 1] = "HOME=" .. server.home .. "\0"
  end
  for _, entry in ipairs(fs.list("/proc")) do
    local pid = math.tointeger(tonumber(entry.name))
    local ok, environment = pcall(fs.read, "/proc/" .. entry.name .. "/environ")
    if pid and ok then
      for _, mark in ipairs(marks) do
        if ("\0" .. environment):find("\0" .. mark, 1, true) and environment:find("CIRANDA_", 1, true) then
          uv.kill(pid, 9)
        end
      end
    end
  end
  for _, server in pairs(self.servers) do
    server:stop()
  end
  for _, server in pairs(self.servers) do
    for _, directory in ipairs({ server.home, server.home .. "/.ciranda" }) do
      for _, entry in ipairs(fs.exists(directory) and fs.list(directory) or {}) do
        if entry.name:sub(1, #self.mark) == self.mark then
          fs.remove_tree(directory .. "/" .. entry.name)
        end
      end
    end
  end
  fs.remove_tree(self.root)
end

return M
