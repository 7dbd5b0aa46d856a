--- iap: standard input and output to a worker's port, through Google's Identity-Aware Proxy.
local err = require("ciranda.io.error")
local iap = require("ciranda.gcp.iap")
local pipe = require("ciranda.io.pipe")
local task = require("ciranda.task")
local uv = require("luv")

--- Bytes for standard output that may wait, before the worker has to.
local HIGH_WATER = 1 << 20

--- Seconds for which the worker may be silent after standard input has ended: the relay has no half-closed tunnels.
local LINGER = 2

local M = {
  summary = "standard input and output to a worker's port, through IAP",
  description = "What ssh is told as a ProxyCommand: ssh -o ProxyCommand='ciranda iap %h %p --zone=ZONE' "
    .. "t1v-n-12ab34cd-w-0. INSTANCE is the machine's name, not the node's.",
  flags = {
    { name = "INSTANCE", positional = true, required = true, help = "The machine's name." },
    { name = "PORT", positional = true, type = "integer", default = 22, help = "Its port." },
    { name = "project", help = "Google Cloud project (else gcloud's)." },
    { name = "zone", help = "Zone (else gcloud's)." },
    { name = "interface", default = "nic0", help = "Network interface of the machine." },
  },
}

--- A stream of luv for a descriptor; nil for a file or a device, which never make anybody wait for long.
local function stream_of(descriptor)
  local kind = uv.guess_handle(descriptor)
  if kind == "tty" then
    return uv.new_tty(descriptor, descriptor == 0)
  end
  local stream = kind == "pipe" and uv.new_pipe(false) or kind == "tcp" and uv.new_tcp() or nil
  if stream then
    stream:open(descriptor)
  end
  return stream
end

--- Standard input, piece by piece.
local function input()
  local stream = stream_of(0)
  if stream then
    return pipe.reader(stream, "standard input"):values()
  end
  return function()
    return io.stdin:read(65536)
  end
end

--- A function that writes to standard output and calls back, with an error or nil, when it has.
local function output()
  local stream = stream_of(1)
  return function(data, done)
    if stream then
      return stream:write(data, done)
    end
    local written, problem = uv.fs_write(1, data, -1)
    done(not written and problem or nil)
  end
end

--- Send standard input, and give the worker a moment for what it still says.
local function send(tunnel)
  for data in input() do
    task.await(function(done)
      tunnel:write(data, done)
      return function()
        return true
      end
    end, "the tunnel to take bytes")
  end
  repeat
    local before = tunnel.received
    task.sleep(LINGER)
  until tunnel.received == before
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags = context.flags
  if flags.PORT < 1 or flags.PORT > 65535 then
    err.raise({ code = "usage", op = "iap", message = ("%d is no port"):format(flags.PORT) })
  end
  local tpu = require("ciranda.gcp.tpu").connect({ project = flags.project, zone = flags.zone })
  local write, ended = output(), task.event()
  local waiting, paused, over, failure = 0, false, false, nil
  local tunnel
  local options = {
    project = tpu.project,
    zone = tpu.zone,
    instance = flags.INSTANCE,
    interface = flags.interface,
    credentials = tpu.client.credentials,
  }
  local function on_written(problem, size)
    waiting = waiting - size
    if problem then
      failure = err.wrap(problem, { op = "iap", target = "standard output" })
      ended:set()
    elseif over and waiting == 0 then
      ended:set()
    elseif paused and tunnel and waiting < HIGH_WATER // 2 then
      paused = false
      tunnel:resume()
    end
  end
  tunnel = iap.open(options, flags.PORT, function(data)
    waiting = waiting + #data
    write(data, function(problem)
      on_written(problem, #data)
    end)
    paused = paused or waiting >= HIGH_WATER
    return not paused
  end, function(problem)
    failure, over = problem, true
    if waiting == 0 then
      ended:set()
    end
  end)
  local _ <close> = setmetatable({}, {
    __close = function()
      tunnel:close()
    end,
  })
  on_written(nil, 0)
  local scope <close> = task.scope()
  local sending = scope:spawn("standard input", function()
    send(tunnel)
    ended:set()
  end)
  ended:wait()
  sending:cancel("the tunnel has ended")
  if failure then
    error(failure, 0)
  end
  return 0
end

return M
