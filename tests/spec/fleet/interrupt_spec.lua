-- Ctrl-C at a real terminal (tmux) while workers run something: the first one tells, the second stops.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local support = dofile("tests/spec/recipes/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

local BINARY = assert(os.getenv("CIRANDA_BINARY") or require("ciranda.core.engine").executable)
local HAVE_TMUX = process.run({ "sh", "-c", "command -v tmux" }).code == 0
local MARK = ("471%d.25"):format(uv.os_getpid())

describe("Ctrl-C at a terminal", function()
  local place, hosts
  local walks = 0

  setup(function()
    if HAVE_TMUX then
      place = support.place(1, 2)
      hosts = ("--HOSTS_FILE=%s/hosts --ssh-user=%s --ssh-key=%s"):format(
        place.root,
        place.user,
        support.ssh.key("ed25519")
      )
    end
  end)

  teardown(function()
    if place then
      place:stop()
    end
  end)

  local function sleepers()
    local list = process.run({ "pgrep", "-fc", "^sleep " .. MARK })
    return tonumber(list.stdout)
  end

  --- Type Ctrl-C twice at `ciranda ARGUMENTS`; `is_running` says when it is time for the first.
  local function walk(arguments, is_running)
    if not HAVE_TMUX then
      pending("Ctrl-C at a terminal: needs tmux (apt-get install tmux)")
    end
    walks = walks + 1
    local socket = ("%s/tmux-%d"):format(place.root, walks) -- a server that ends takes its socket away late
    local function tmux(...)
      return process.run({ "tmux", "-S", socket, "-f", "/dev/null", timeout = 60, ... })
    end
    local _ <close> = setmetatable({}, {
      __close = function()
        tmux("kill-server")
      end,
    })
    local script = ("trap : INT; cd %s; HOME=%s/runner SSH_AUTH_SOCK= '%s' %s; echo status $?; sleep 60"):format(
      place.root,
      place.root,
      BINARY,
      arguments
    )
    fs.write(place.root .. "/walk.sh", script)
    local start =
      tmux("new-session", "-d", "-s", "walk", "-x", "140", "-y", "40", "sh " .. place.root .. "/walk.sh")
    assert(start.code == 0, start.stderr)
    local last
    local function until_true(fn)
      local ok = pcall(task.timeout, 120, function()
        while not fn() do
          task.sleep(0.05)
        end
      end)
      last = ok and last or tmux("capture-pane", "-p", "-t", "walk").stdout
      assert(ok, "it did not come to that; the screen shows:\n" .. (last or ""))
    end
    local function until_shown(text)
      until_true(function()
        last = tmux("capture-pane", "-p", "-t", "walk").stdout
        return last:find(text, 1, true)
      end)
    end
    until_true(is_running)
    tmux("send-keys", "-t", "walk", "C-c")
    until_shown("2 of 2 still running: slice0/worker[0-1]. Ctrl-C once more stops them.")
    assert.is_true(is_running(), "the first one has stopped them")
    assert.is_nil(last:find("status", 1, true), last)
    tmux("send-keys", "-t", "walk", "C-c")
    until_shown("status 130")
    until_true(function()
      return not is_running()
    end)
  end

  local function both_sleep()
    return sleepers() == 2
  end

  it("during fleet:run in a program of one's own", function()
    if HAVE_TMUX then
      fs.write(
        place.root .. "/own.lua",
        ([[
        local fleets = require("ciranda.fleet")
        local slices = require("ciranda.provider").hosts({ file = %q })
        local fleet <close> = fleets.new(slices, { user = %q, keys = { %q }, config = %q })
        fleet:run("exec sleep %s")
      ]]):format(
          place.root .. "/hosts",
          place.user,
          support.ssh.key("ed25519"),
          place.root .. "/config",
          MARK
        )
      )
    end
    walk("own.lua", both_sleep)
  end)

  it("during ssh", function()
    walk(("ssh %s --command='exec sleep %s'"):format(hosts or "", MARK), both_sleep)
  end)

  it("during scp", function()
    -- A file that takes seconds, though it is all hole.
    local name = "interrupt-" .. uv.os_getpid()
    for _, server in pairs(place and place.servers or {}) do
      process.run({ "truncate", "-s", "2G", server.home .. "/" .. name }):check()
    end
    -- A session that serves files says so in its title. It is held as soon as it does: the copies do not end.
    local held = setmetatable({}, {
      __close = function(held)
        for pid in pairs(held) do
          uv.kill(pid, "sigkill")
        end
      end,
    })
    local _ <close> = held
    local function both_read()
      local serving = 0
      for _, server in pairs(place.servers) do
        for _, pid in ipairs(server:sessions()) do
          local ok, text = pcall(fs.read, ("/proc/%d/cmdline"):format(pid))
          if ok and text:find("internal-sftp", 1, true) then
            serving = serving + 1
            if not held[pid] then
              uv.kill(pid, "sigstop")
              held[pid] = true
            end
            break
          end
        end
      end
      return serving == 2
    end
    walk(("scp %s :%s/%s back"):format(hosts or "", "~", name), both_read)
  end)
end)
