--- Files to and from every worker of a fleet.
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")

local M = {}

--- See `fleet:push`.
---@async
---@param fleet ciranda.Fleet
---@param source string
---@param destination string
---@param options { mode: integer?, limit: integer?, on_result: function? }
---@return ciranda.fleet.Results
function M.push(fleet, source, destination, options)
  err.check_options(options, { mode = true, limit = true, on_result = true }, "fleet:push", 3)
  local stat = fs.stat(source)
  if stat.type == "directory" then
    if options.mode then
      err.misuse(3, "fleet:push: 'mode' is for a file, and %s is a directory", source)
    end
    return require("ciranda.fleet.push").directory(fleet, source, destination, options)
  end
  return fleet:gather_results(function(_, link)
    link:use(function(connection)
      connection:put(source, destination, { mode = options.mode })
    end)
    return { code = 0, stdout = "", stderr = "" }
  end, options.limit, options.on_result)
end

--- See `fleet:pull`.
---@async
---@param fleet ciranda.Fleet
---@param source string
---@param directory string
---@param options { limit: integer?, on_result: function? }
---@return ciranda.fleet.Results
function M.pull(fleet, source, directory, options)
  err.check_options(options, { limit = true, on_result = true }, "fleet:pull", 3)
  local name = source:gsub("/+$", ""):match("[^/]+$")
  if not name or name == ".." or name == "." then
    err.misuse(3, "fleet:pull: %q names no file", source)
  end
  return fleet:gather_results(function(worker, link)
    local own = ("%s/slice_%04d_worker_%04d"):format(directory, worker.slice, worker.index)
    fs.mkdir_p(own)
    local path = own .. "/" .. name
    link:use(function(connection)
      local ok, problem = pcall(connection.get, connection, source, path)
      if not ok then
        if not err.is(problem, "invalid") then
          error(problem, 0)
        end
        -- It is a directory.
        connection:get_tree(source, path)
      end
    end)
    return { code = 0, stdout = "", stderr = "", path = path }
  end, options.limit, options.on_result)
end

return M
