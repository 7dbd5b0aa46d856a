--- The public table. Its fields are the library's modules, loaded when they are first used:
---
---     local ciranda = require("ciranda")
---     ciranda.task.sleep(1)
---
--- The five primitives: create a queued resource and wait for a state (`provider`, `tpu`), run on every worker
--- (`fleet`), place a sharding (`mesh`), checkpoint on a signal (`checkpoint`).
local MODULES = {
  task = "ciranda.task",
  error = "ciranda.io.error",
  fs = "ciranda.io.fs",
  http = "ciranda.io.http",
  server = "ciranda.io.server",
  process = "ciranda.io.process",
  json = "ciranda.io.json",
  log = "ciranda.io.log",
  crypto = "ciranda.io.crypto",
  ssh = "ciranda.ssh",
  tpu = "ciranda.gcp.tpu",
  storage = "ciranda.gcp.storage",
  provider = "ciranda.provider",
  fleet = "ciranda.fleet",
  mesh = "ciranda.mesh",
  journal = "ciranda.run.journal",
  bundle = "ciranda.run.bundle",
  gang = "ciranda.run.gang",
  checkpoint = "ciranda.run.checkpoint",
}

---@class ciranda
---@field version string
---@field task table
---@field error table
---@field fs table
---@field http table
---@field server table
---@field process table
---@field json table
---@field log table
---@field crypto table
---@field ssh table
---@field tpu table
---@field storage table
---@field provider table
---@field fleet table
---@field mesh table
---@field journal table
---@field bundle table
---@field gang table
---@field checkpoint table
local M = {}

local names = { "version" }
for name in pairs(MODULES) do
  table.insert(names, name)
end
table.sort(names)

return setmetatable(M, {
  __names = names, -- for completion at the prompt, which loads nothing
  __index = function(self, name)
    local value
    if name == "version" then
      value = require("ciranda.core.engine").version
    elseif MODULES[name] then
      value = require(MODULES[name])
    end
    rawset(self, name, value)
    return value
  end,
  __pairs = function(self)
    for _, name in ipairs(names) do
      local _ = self[name]
    end
    return next, self, nil
  end,
})
