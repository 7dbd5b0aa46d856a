--- Where modules are found: beside the recipe or script, --path and CIRANDA_PATH, the user's configuration, the
--- distribution's directories. The working directory is never searched by accident, nor LUA_PATH without being asked.
local M = {}

--- Absolute directories of Debian's and of a local installation's Lua 5.4 modules.
local LUA_DIRECTORIES = { "/usr/local/share/lua/5.4", "/usr/share/lua/5.4" }
local C_DIRECTORIES = { "/usr/local/lib/lua/5.4", "/usr/lib/x86_64-linux-gnu/lua/5.4", "/usr/lib/lua/5.4" }

--- Both forms in which a directory holds a module.
local function templates(directory)
  return { directory .. "/?.lua", directory .. "/?/init.lua" }
end

---@class ciranda.cli.PathOptions
---@field beside? string directory of the recipe or script
---@field command? ciranda.cli.Command

--- Sets package.path and package.cpath.
---@param options ciranda.cli.PathOptions
function M.install(options)
  local command = options.command or { paths = {} }
  local directories = {}
  local function add(directory)
    if directory and directory ~= "" then
      table.insert(directories, directory)
    end
  end
  add(options.beside)
  for _, directory in ipairs(command.paths) do
    add(directory)
  end
  for directory in (os.getenv("CIRANDA_PATH") or ""):gmatch("[^:]+") do
    add(directory)
  end
  local home = os.getenv("HOME")
  local config = os.getenv("XDG_CONFIG_HOME")
  if not config or config:sub(1, 1) ~= "/" then
    config = home and home .. "/.config"
  end
  add(config and config .. "/ciranda/lua")

  local path, cpath = {}, {}
  for _, list in ipairs { directories, LUA_DIRECTORIES } do
    for _, directory in ipairs(list) do
      table.move(templates(directory), 1, 2, #path + 1, path)
    end
  end
  for _, directory in ipairs(C_DIRECTORIES) do
    table.insert(cpath, directory .. "/?.so")
  end
  if command.use_lua_path then
    local extra = os.getenv("LUA_PATH_5_4") or os.getenv("LUA_PATH")
    local extra_c = os.getenv("LUA_CPATH_5_4") or os.getenv("LUA_CPATH")
    if extra then
      table.insert(path, 1, (extra:gsub("^;;", ""):gsub(";;$", ""):gsub(";;", ";")))
    end
    if extra_c then
      table.insert(cpath, 1, (extra_c:gsub("^;;", ""):gsub(";;$", ""):gsub(";;", ";")))
    end
  end
  package.path = table.concat(path, ";")
  package.cpath = table.concat(cpath, ";")
end

return M
