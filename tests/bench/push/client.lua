-- The client under measurement: ciranda client.lua SOURCE DESTINATION PREFIX WORKERS PORT USER KEY HOSTKEY.pub [VIA]
local fleets = require("ciranda.fleet")
local fs = require("ciranda.io.fs")

local source, destination, prefix, count, port, user, key, host_key, via = table.unpack(arg)
local workers = {}
for index = 0, count - 1 do
  workers[index + 1] = {
    slice = 0,
    index = index,
    name = prefix .. index + 1,
    address = prefix .. index + 1,
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
fleet:push(source, destination, { via = via, on_note = error }):check()
