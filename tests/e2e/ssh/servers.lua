-- OpenSSH's own server in bad moods, and output that no line ends.
local cases = dofile("tests/e2e/ssh/cases.lua")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local support = dofile("tests/spec/ssh/support.lua")
local task = require("ciranda.task")
local uv = require("luv")

local executable = require("ciranda.core.engine").executable

-- MaxStartups -----------------------------------------------------------------------------------------------------

--- Take a place among those that are not authenticated, and keep it. sshd counts who has left until it has seen
--- their child's end, and a newcomer whom it turns away has no place: so a place is had once sshd has said its own
--- name, and is asked for again until then. Its log cannot tell: it speaks of MaxStartups once in five minutes, and
--- also when there is room again.
---@return uv_tcp_t client
local function take_place(server)
  for _ = 1, 200 do
    local client, said, ended = uv.new_tcp(), "", false
    client:connect(server.address, server.port, function(failure)
      ended = failure ~= nil
      if not ended then
        client:read_start(function(err, chunk)
          said = said .. (chunk or "")
          ended = ended or err ~= nil or chunk == nil
        end)
      end
    end)
    assert(support.wait_for(function()
      return ended or said:find("\n", 1, true)
    end, 20))
    if said:find("^SSH%-2%.0%-") then
      return client
    end
    client:close()
    task.sleep(0.1)
  end
  error("sshd let nobody in 200 times")
end

--- Connections that say nothing, each in a place of its own.
local function occupy(server, count)
  local clients = {}
  for index = 1, count do
    clients[index] = take_place(server)
  end
  return function()
    for _, client in ipairs(clients) do
      client:close()
    end
  end
end

do
  local server = support.server({ config = { "MaxStartups 2:100:2", "LoginGraceTime 120" } })
  cases.case("control: a server with room for two who are not logged in", function()
    for _, result in
      ipairs(task.map({ 1, 2, 3, 4, 5, 6 }, function()
        local connection <close> = ssh.connect(server:options())
        return connection:exec("echo in").stdout
      end, 2))
    do
      assert(result == "in\n")
    end
  end)
  cases.case("a server that is full of others who are not logged in", function()
    local leave = occupy(server, 2)
    local err =
      cases.fails(server.address, { "closed", "reset" }, "banner", 25, ssh.connect, server:options())
    assert(err.message:find("MaxStartups", 1, true), err.message)
    leave()
  end)
  cases.case("a server that is full for a moment is tried again", function()
    local leave = occupy(server, 2)
    local result = task.all({
      function()
        -- More patience than one connect has is the fleet's affair.
        for _ = 1, 20 do
          local ok, connection = pcall(ssh.connect, server:options())
          if ok then
            local said = connection:exec("echo in").stdout
            connection:close()
            return said
          end
        end
        return nil
      end,
      function()
        task.sleep(0.5)
        leave()
      end,
    })
    assert(result[1] == "in\n")
  end)
  server:stop()
end

-- A stopped server ------------------------------------------------------------------------------------------------

do
  local server = support.server()
  cases.case("a server that is stopped takes connections and says nothing", function()
    uv.kill(server.pid, "sigstop")
    cases.fails(
      server.address,
      { "timeout" },
      "banner",
      20,
      ssh.connect,
      server:options({ timeouts = { banner = 1 } })
    )
  end)
  cases.case("control: it goes on while it is waited for", function()
    task.all({
      function()
        local connection <close> = ssh.connect(server:options())
        assert(connection:exec("echo in").stdout == "in\n")
      end,
      function()
        task.sleep(0.5)
        uv.kill(server.pid, "sigcont")
      end,
    })
  end)
  server:stop()
end

-- Output ----------------------------------------------------------------------------------------------------------

do
  local servers, hosts, known = {}, {}, {}
  for index = 1, 2 do
    local server = support.server()
    servers[index] = server
    hosts[index] = ("%s:%d"):format(server.address, server.port)
    known[index] = ("[%s]:%d %s"):format(server.address, server.port, server:pin())
  end
  local home = support.path("home")
  fs.mkdir_p(home .. "/.ssh", 448)
  fs.write(home .. "/.ssh/known_hosts", table.concat(known, "\n") .. "\n")
  local config = home .. "/.ssh/config"
  fs.write(config, "UserKnownHostsFile " .. home .. "/.ssh/known_hosts\n")

  --- Run the recipe on both. Returns the result, the most memory it has had in bytes, and the bytes that it showed.
  local function run(words, to)
    local argv = { executable, table.unpack(words) }
    for _, word in ipairs({
      "--HOSTS=" .. table.concat(hosts, ","),
      "--ssh-user=" .. servers[1].user,
      "--ssh-key=" .. support.key("ed25519"),
    }) do
      argv[#argv + 1] = word
    end
    argv.env = { HOME = home, SSH_AUTH_SOCK = false }
    local fd = assert(uv.fs_open(to, "w", 384))
    argv.stdout, argv.stderr = fd, process.PIPE
    local program = process.spawn(argv)
    local peak = 0
    local status
    local said = {}
    task.all({
      function()
        for data in program.stderr.read, program.stderr do
          said[#said + 1] = data
        end
      end,
      function()
        status = program:wait()
      end,
      function()
        while not status do
          local ok, text = pcall(fs.read, ("/proc/%d/status"):format(program.pid))
          peak = math.max(peak, 1024 * (tonumber(ok and text:match("VmHWM:%s*(%d+)")) or 0))
          task.sleep(0.05)
        end
      end,
    })
    uv.fs_close(fd)
    return status, peak, table.concat(said)
  end

  -- 1 GiB of both, or less where time is short.
  local size = cases.short and 48 * 1024 * 1024 or 512 * 1024 * 1024
  local control = support.path("control")
  local small_peak
  cases.case("control: 1 MiB without a newline", function()
    local status, peak, said =
      run({ "ssh", "--live", "--command=head -c 1048576 /dev/zero | tr '\\0' x" }, control)
    assert(status.code == 0, said)
    small_peak = peak
  end)
  cases.case(
    ("%d MiB without a newline from each of two: the view and the files lose nothing"):format(size >> 20),
    function()
      local logs, shown = support.path("logs"), support.path("shown")
      local status, peak, said = run({
        "ssh",
        "--live",
        "--output-directory=" .. logs,
        ("--command=head -c %d /dev/zero | tr '\\0' x"):format(size),
      }, shown)
      assert(status.code == 0, said)
      for index = 0, 1 do
        local path = ("%s/output_slice_0000_worker_%04d.txt"):format(logs, index)
        assert(fs.stat(path).size == size, ("%s has %d bytes"):format(path, fs.stat(path).size))
      end
      local count = process.run({ "sh", "-c", 'tr -dc x <"$0" | wc -c', shown, timeout = 100 }):check()
      local seen = tonumber(count.stdout)
      -- Equal pieces of both are folded into one.
      assert(seen >= size and seen <= 2 * size, ("%d bytes were shown"):format(seen))
      local more = peak - small_peak
      assert(more < 64 * 1024 * 1024, ("it took %d MiB more than 1 MiB did"):format(more >> 20))
      fs.remove_tree(logs)
      fs.remove(shown)
    end,
    cases.short and 90 or 1500
  )
  cases.case("bytes that are no text come through: NUL, invalid UTF-8, carriage returns", function()
    local logs, shown = support.path("logs"), support.path("shown")
    local command = [[--command=printf 'a\000b\377\376\303(\r\n\033]0;x\007end']]
    local bytes = "a\0b\xff\xfe\xc3(\r\n\27]0;x\7end"
    local status, _, said = run({ "ssh", "--live", "--output-directory=" .. logs, command }, shown)
    assert(status.code == 0, said)
    for index = 0, 1 do
      assert(fs.read(("%s/output_slice_0000_worker_%04d.txt"):format(logs, index)) == bytes)
    end
    status, _, said = run({ "--json", "ssh", command }, shown)
    assert(status.code == 0, said)
    local results = 0
    for line in fs.read(shown):gmatch("[^\n]+") do
      local record = json.decode(line) -- every line is JSON, whatever was printed
      if record.event == "result" then
        results = results + 1
        assert(record.stdout:find("a\0b", 1, true) and record.stdout:find("end", 1, true))
      end
    end
    assert(results == 2)
  end)
  for _, server in ipairs(servers) do
    server:stop()
  end
end

support.clean()
cases.finish("servers")
