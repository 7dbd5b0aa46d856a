-- The client under measurement: ciranda client.lua SOURCE DESTINATION WORKERS PORT USER KEY HOSTKEY.pub
local fleets = require("ciranda.fleet")
local fs = require("ciranda.io.fs")

local source, destination, count, port, user, key, host_key = table.unpack(arg)
local workers = {}
for index = 0, count - 1 do
  workers[index + 1] = {
    slice = 0,
    index = index,
    name = ("127.1.0.%d"):format(index + 1),
    address = ("127.1.0.%d"):format(index + 1),
    pins = { fs.read(host_key) },
  }
end
local fleet <close> = fleets.new({ { index = 0, name = "bench", workers = workers } }, {
  user = user,
  port = math.tointeger(tonumber(port)),
  keys = { key },
  agent = false,
  config = false,
  known_hosts = false,
})
fleet:push(source, destination):check()
