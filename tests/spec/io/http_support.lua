--- What the HTTP specs share: servers that misbehave byte by byte, foreign servers, and errors as values.

local task = require("ciranda.task")
local uv = require("luv")

local M = {}

--- The error that a function raises; fails when it raises none.
function M.raised(fn, ...)
  local ok, err = pcall(fn, ...)
  assert(not ok, "no error was raised")
  return err
end

--- Listen on a loopback port and give each connection to `on_connection(client)`, a luv stream. No task is involved: it
--- behaves as badly as its function says. Returns the URL, the listening handle, and the list of clients.
function M.raw(on_connection)
  local server = uv.new_tcp()
  assert(server:bind("127.0.0.1", 0))
  local clients = {}
  assert(server:listen(64, function()
    local client = uv.new_tcp()
    server:accept(client)
    clients[#clients + 1] = client
    on_connection(client)
  end))
  local self = { url = ("http://127.0.0.1:%d"):format(server:getsockname().port), clients = clients }
  function self.close()
    for _, handle in ipairs { server, table.unpack(clients) } do
      if not handle:is_closing() then
        handle:close()
      end
    end
  end
  return setmetatable(self, { __close = self.close })
end

--- Answer every request on a connection with the same bytes, then do `after(client)`.
function M.answering(bytes, after)
  return M.raw(function(client)
    client:read_start(function(_, data)
      if data then
        client:write(bytes, function()
          if after then
            after(client)
          end
        end)
      end
    end)
  end)
end

--- A loopback port that is free and stays so: below those that the system gives to whoever asks for none of its own,
--- of which there are many in a second, and none twice.
function M.free_port()
  local file <close> = assert(io.open("/proc/sys/net/ipv4/ip_local_port_range"))
  local high = assert(file:read("n")) - 1
  local low = math.max(1024, high // 2)
  if high - low < 1000 then -- the system gives them all away
    high = 65535
  end
  for _ = 1, 100 do
    local server = uv.new_tcp()
    local port = math.random(low, high)
    local is_free = server:bind("127.0.0.1", port) and server:listen(1, function() end) -- bind alone reports late
    server:close()
    if is_free then
      return port
    end
  end
  return error("no port is free")
end

--- The path of a program, or nil.
function M.program(name)
  for directory in ((os.getenv("PATH") or "") .. ":/usr/sbin"):gmatch("[^:]+") do
    if uv.fs_access(directory .. "/" .. name, "X") then
      return directory .. "/" .. name
    end
  end
  return nil
end

--- Start a process; its `__close` ends it and waits. Only what it started is ended, by its handle.
function M.start(program, args, options)
  options = options or {}
  local ended = task.event()
  local handle, pid = uv.spawn(program, {
    args = args,
    cwd = options.cwd,
    stdio = { nil, options.stdout, options.stderr },
  }, function()
    ended:set()
  end)
  assert(handle, pid)
  local self = { pid = pid, ended = ended }
  return setmetatable(self, {
    __close = function()
      if not ended:is_set() then
        handle:kill("sigkill")
        ended:wait()
      end
      handle:close()
    end,
  })
end

--- Wait until something accepts connections on a loopback port.
function M.wait_for_port(port)
  task.timeout(60, function()
    while true do
      local up = task.await(function(done)
        local tcp = uv.new_tcp()
        tcp:connect("127.0.0.1", port, function(err)
          tcp:close()
          done(nil, not err)
        end)
      end)
      if up then
        return
      end
      task.sleep(0.02)
    end
  end)
end

--- A directory of its own for `fn`, removed afterwards.
function M.with_directory(fn)
  local directory = assert(uv.fs_mkdtemp((os.getenv("TMPDIR") or "/tmp") .. "/ciranda-http-XXXXXX"))
  local ok, err = pcall(fn, directory)
  for name in uv.fs_scandir_next, assert(uv.fs_scandir(directory)) do
    os.remove(directory .. "/" .. name)
  end
  uv.fs_rmdir(directory)
  if not ok then
    error(err, 0)
  end
end

function M.write_file(path, content)
  local file = assert(io.open(path, "wb"))
  file:write(content)
  file:close()
  return path
end

return M
