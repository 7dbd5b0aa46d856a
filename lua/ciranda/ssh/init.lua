--- SSH: connections to workers and other hosts, in this process. See docs/ssh.md.
---
---     local ssh = require("ciranda.ssh")
---     local connection <close> = ssh.connect({ host = "worker-0", user = "trainer" })
---     print(connection:exec("hostname"):check().stdout)

local connect = require("ciranda.ssh.connect")
local keys = require("ciranda.ssh.keys")

local M = {
  connect = connect.connect,
  key = keys.load,
  parse_key = keys.parse,
  ensure_key = keys.ensure,
  set_prompt = keys.set_prompt,
}

return M
