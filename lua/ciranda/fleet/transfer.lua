--- Files to and from every worker of a fleet.
local err = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local glob = require("ciranda.ssh.sftp_glob")

local M = {}

--- See `fleet:push`.
---@async
---@param fleet ciranda.Fleet
---@param source string
---@param destination string
---@param options { mode: integer?, limit: integer?, on_result: function?, via: string?, on_note: function? }
---@return ciranda.fleet.Results
function M.push(fleet, source, destination, options)
  err.check_options(
    options,
    { mode = true, limit = true, on_result = true, via = true, on_note = true },
    "fleet:push",
    3
  )
  local stat = fs.stat(source)
  if stat.type == "directory" then
    if options.mode then
      err.misuse(3, "fleet:push: 'mode' is for a file, and %s is a directory", source)
    end
    return require("ciranda.fleet.push").directory(fleet, source, destination, options)
  elseif options.via then
    err.misuse(3, "fleet:push: 'via' is for a directory, and %s is a file", source)
  end
  return fleet:gather_results(function(_, link)
    link:use(function(connection)
      connection:put(source, destination, { mode = options.mode })
    end)
    return { code = 0, stdout = "", stderr = "" }
  end, options.limit, options.on_result)
end

---@param path string
---@return string the last part of its name
local function last_part(path)
  return path:gsub("/+$", ""):match("[^/]+$") or path
end

--- Brings one path, a file or a directory with everything in it.
---@async
local function fetch(connection, source, target)
  local ok, problem = pcall(connection.get, connection, source, target)
  if not ok then
    if not err.is(problem, "invalid") then
      error(problem, 0)
    end
    connection:get_tree(source, target) -- it is a directory
  end
end

--- Brings what a path or a pattern means on one worker.
---@async
---@param connection ciranda.ssh.Connection
---@param source string
---@param place fun(path: string, several: boolean): string the local path of each; several: there may be more
---@return string[] paths where they are
-- Raises "not_found" when it means nothing there, "exists" when two would be one here, and what a transfer raises.
function M.bring(connection, source, place)
  local found = { { path = source } }
  if glob.is_pattern(source) then
    local client <close> = connection:sftp()
    found = glob.expand(client, source)
  end
  if #found == 0 then
    err.raise({
      code = "not_found",
      op = "pull",
      target = source,
      message = ("nothing there matches %s"):format(source),
    })
  end
  local paths, taken = {}, {}
  for index, each in ipairs(found) do
    local path = place(each.path, #found > 1 or each.path ~= source)
    if taken[path] then
      err.raise({
        code = "exists",
        op = "pull",
        target = source,
        message = ("%s and %s would both be %s here"):format(taken[path], each.path, path),
      })
    end
    taken[path], paths[index] = each.path, path
  end
  for index, each in ipairs(found) do
    fetch(connection, each.path, paths[index])
  end
  return paths
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
  local name = last_part(source)
  if not source:find("[^/]") or name == ".." or name == "." then
    err.misuse(3, "fleet:pull: %q names no file", source)
  end
  return fleet:gather_results(function(worker, link)
    local own = ("%s/slice_%04d_worker_%04d"):format(directory, worker.slice, worker.index)
    fs.mkdir_p(own)
    local paths = link:use(function(connection)
      return M.bring(connection, source, function(path)
        return own .. "/" .. last_part(path)
      end)
    end)
    return { code = 0, stdout = "", stderr = "", path = paths[1], paths = paths }
  end, options.limit, options.on_result)
end

return M
