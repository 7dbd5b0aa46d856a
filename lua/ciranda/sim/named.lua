--- What the service knows by full resource name: the part that nodes, queued resources and operations share.

local errors = require("ciranda.sim.errors")

---@class ciranda.sim.Named
---@field protected by_name table<string, table> by full resource name; each has it as `name`
local Named = {}

---@param name string
---@return table?
function Named:find(name)
  return self.by_name[name]
end

---@param name string
---@return table
--- Raises ciranda.sim.Status NOT_FOUND.
function Named:get(name)
  return self.by_name[name] or errors.raise(errors.not_found(name))
end

--- Those whose names match, sorted by name.
---@param matches fun(name: string): boolean
---@return table[]
function Named:list(matches)
  local result = {}
  for name, one in pairs(self.by_name) do
    if matches(name) then
      result[#result + 1] = one
    end
  end
  table.sort(result, function(a, b)
    return a.name < b.name
  end)
  return result
end

return Named
