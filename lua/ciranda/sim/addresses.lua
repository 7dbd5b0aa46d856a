--- Loopback addresses of a simulator: a block of its own, and one for every worker.
--
-- A simulator has 127.N.0.0/16 for itself. It holds the block by listening on one port of it, which the kernel gives
-- to one process only and takes back whenever that ends, however it ends; so simulators that run side by side, of
-- whatever user, never meet. 127.N.0.1 is the simulator; workers count up from 127.N.1.1. An external address is the
-- internal one with 128 added to its third part.

local errors = require("ciranda.io.error")
local uv = require("luv")

local M = {}

-- The port by which a block is held. Nothing is said on it. It is below those that the kernel gives to connections and
-- to who listens on any: such a one, on all addresses, would hold every block.
M.CLAIM_PORT = 31131

-- 127.0/16 is everybody's, the first blocks are what people type by hand, the last is left alone.
M.FIRST_BLOCK = 16
M.LAST_BLOCK = 250

local WORKERS = 127 * 254

---@class ciranda.sim.Addresses
---@field block integer
---@field private claim userdata
---@field private used table<string, boolean>
---@field private next integer
local Addresses = {}
Addresses.__index = Addresses

local function bind(address, port)
  local socket = uv.new_tcp()
  local ok, err, code = socket:bind(address, port)
  if ok then
    ok, err, code = socket:listen(1, function() end)
  end
  if ok then
    return socket
  end
  socket:close()
  return nil, err, code
end

--- Claim a block.
---@param start integer? which block to try first; by default one that depends on the process
---@return ciranda.sim.Addresses
--- Raises `busy` when all are taken, `unsupported` where 127.0.0.0/8 is not all loopback.
function M.claim(start)
  local count = M.LAST_BLOCK - M.FIRST_BLOCK + 1
  start = start or uv.os_getpid() * 7
  for i = 0, count - 1 do
    local block = M.FIRST_BLOCK + (start + i) % count
    local socket, err, code = bind(("127.%d.0.1"):format(block), M.CLAIM_PORT)
    if socket then
      return setmetatable({ block = block, socket = socket, used = {}, next = 0 }, Addresses)
    elseif code ~= "EADDRINUSE" then
      errors.raise({
        code = "unsupported",
        op = "sim.addresses",
        target = ("127.%d.0.1"):format(block),
        message = ("the simulated workers need all of 127.0.0.0/8 to be this machine's: %s"):format(err),
      })
    end
  end
  return errors.raise({
    code = "busy",
    op = "sim.addresses",
    message = ("all %d blocks of loopback addresses are taken by other simulators"):format(count),
  })
end

--- The simulator's own address.
---@return string
function Addresses:main()
  return ("127.%d.0.1"):format(self.block)
end

--- A port that is free on the addresses of the block, which a program that listens on every address may spoil.
---@param wanted integer the first to try
---@param what string for the message
---@return integer
--- Raises `busy`.
function Addresses:port(wanted, what)
  local reason
  for port = wanted, wanted + 100 do
    local socket, err = bind(self:main(), port)
    if socket then
      socket:close()
      return port
    end
    reason = err
  end
  return errors.raise({
    code = "busy",
    op = "sim.addresses",
    target = self:main(),
    message = ("no port from %d to %d is free for %s: %s"):format(wanted, wanted + 100, what, reason),
  })
end

--- Whether a port can be had: those below 1024 often cannot.
---@param port integer
---@return boolean
function Addresses:available(port)
  local socket = bind(self:main(), port)
  if socket then
    socket:close()
  end
  return socket ~= nil
end

--- A worker's address. An address that was given back is not given out again before all others have been.
---@return string
--- Raises `busy` when there is none left.
function Addresses:take()
  for _ = 1, WORKERS do
    local number = self.next
    self.next = (self.next + 1) % WORKERS
    local address = ("127.%d.%d.%d"):format(self.block, 1 + number // 254, 1 + number % 254)
    if not self.used[address] then
      self.used[address] = true
      return address
    end
  end
  return errors.raise({
    code = "busy",
    op = "sim.addresses",
    message = "no address is left for another worker",
  })
end

--- The external address that goes with a worker's address.
---@param address string
---@return string
function Addresses:external(address)
  local block, third, fourth = address:match("^127%.(%d+)%.(%d+)%.(%d+)$")
  return ("127.%s.%d.%s"):format(block, third + 128, fourth)
end

---@param address string
function Addresses:give_back(address)
  self.used[address] = nil
end

--- Let go of the block.
function Addresses:close()
  if not self.socket:is_closing() then
    self.socket:close()
  end
end

return M
