--- The bundle: what of a directory goes to the workers, and what stays.
--
-- By default what .gitignore files match stays, and so does everything called `tmp`; a file that git tracks
-- goes although a rule matches it, as git itself has it. What stayed is said in one line, and a COMMAND that
-- names something that stayed is stopped before anything is staged.
local archive = require("ciranda.fleet.archive")
local err = require("ciranda.io.error")
local ignore = require("ciranda.run.ignore")
local process = require("ciranda.io.process")
local uv = require("luv")

local M = {}

---@param path string
---@return string? text nil when there is no such file or it cannot be read
local function read(path)
  local file = io.open(path, "r")
  if not file then
    return nil
  end
  local text = file:read("a")
  file:close()
  return text
end

--- The top of the git work tree that holds a directory, and the directory's path in it.
---@param directory string absolute
---@return string? top, string? inside "" at the top, else with a closing "/"
local function work_tree(directory)
  local top = directory
  while true do
    if uv.fs_stat(top .. "/.git") then
      return top, directory:sub(#top + 2):gsub("([^/])$", "%1/")
    end
    local parent = top:match("^(.+)/[^/]+$")
    if not parent then
      return nil
    end
    top = parent
  end
end

--- The rule files that hold for a directory before any inside it, outermost first.
---@param directory string absolute
---@return { inside: string, rules: ciranda.ignore.Rule[] }[] inside: the path of `directory` as the rules see it
local function outer_rules(directory)
  local list = {}
  local top, inside = work_tree(directory)
  if not top then
    return list
  end
  local function add(path, prefix)
    local text = read(path)
    if text then
      list[#list + 1] = { inside = prefix, rules = ignore.parse(text) }
    end
  end
  add(top .. "/.git/info/exclude", inside)
  local at = top
  while inside ~= "" do
    add(at .. "/.gitignore", inside)
    local first, rest = inside:match("^([^/]+)/(.*)$")
    at, inside = at .. "/" .. first, rest
  end
  return list
end

--- Files that git tracks although a rule matches them, and the directories on the way to them.
---@param directory string
---@return table<string, true>
local function tracked_although_ignored(directory)
  local set = {}
  local ok, answer = pcall(process.run, {
    "git",
    "-C",
    directory,
    "ls-files",
    "--cached",
    "--ignored",
    "--exclude-standard",
    "-z",
    timeout = 60,
  })
  if not ok then
    if err.is_fatal(answer) then
      error(answer, 0)
    end
    return set -- there is no git here: the rules decide alone
  elseif answer.code == 0 then
    for path in answer.stdout:gmatch("[^%z]+") do
      set[path] = true
      local parent = path
      repeat
        parent = parent:match("^(.*)/[^/]*$")
        if parent then
          set[parent .. "/"] = true
        end
      until not parent
    end
  end
  return set
end

--- The filter that leaves out what git ignores and what is called `tmp`.
---@param directory string absolute
---@return fun(path: string, is_directory: boolean): "keep"|"leave"|"inside"
local function default_filter(directory)
  local outer = outer_rules(directory)
  local tracked = work_tree(directory) and tracked_although_ignored(directory) or {}
  local inner = {}
  local outside = {} -- directories that are left out but looked into

  --- The rules of the .gitignore in `parent` ("" or "a/b/"), read once.
  local function rules_of(parent)
    local rules = inner[parent]
    if rules == nil then
      local text = read(directory .. "/" .. parent .. ".gitignore")
      rules = text and ignore.parse(text) or false
      inner[parent] = rules
    end
    return rules
  end

  local function ignored(path, is_directory)
    -- The nearest file that speaks of the path decides.
    local parent = path:match("^(.*/)[^/]*$") or ""
    while true do
      local rules = rules_of(parent)
      local verdict = rules and ignore.verdict(rules, path:sub(#parent + 1), is_directory)
      if verdict ~= nil and rules then
        return verdict
      elseif parent == "" then
        break
      end
      parent = parent:match("^(.*/)[^/]+/$") or ""
    end
    for index = #outer, 1, -1 do
      local verdict = ignore.verdict(outer[index].rules, outer[index].inside .. path, is_directory)
      if verdict ~= nil then
        return verdict
      end
    end
    return false
  end

  return function(path, is_directory)
    local parent = path:match("^(.*/)[^/]*$") or ""
    local is_tmp = path:match("[^/]*$") == "tmp"
    if not is_tmp and not outside[parent] and not ignored(path, is_directory) then
      return "keep"
    elseif is_directory and tracked[path .. "/"] and not is_tmp then
      outside[path .. "/"] = true
      return "inside"
    end
    return not is_tmp and tracked[path] and "keep" or "leave"
  end
end

---@class ciranda.bundle.Options
---@field output string path of the archive, ending in .tar.gz
---@field all_files boolean? everything but `tmp`, as tar --exclude=tmp would

--- Makes the bundle of a directory: its manifest and its archive.
---@param directory string
---@param options ciranda.bundle.Options
---@return ciranda.archive.Manifest
-- Raises "not_found" when there is no such directory; what `archive.write` raises.
function M.make(directory, options)
  err.check_options(options, { output = true, all_files = true }, "bundle.make")
  local real, message = uv.fs_realpath(directory)
  if not real then
    err.raise(err.wrap(message, { op = "bundle", target = directory }))
  elseif uv.fs_stat(real).type ~= "directory" then
    err.raise({
      code = "invalid",
      op = "bundle",
      target = directory,
      message = directory .. " is a file; give the directory that holds the code (--SCRIPT_DIR)",
    })
  end
  local filter = options.all_files
      and function(path)
        return path:match("[^/]*$") == "tmp" and "leave" or "keep"
      end
    or default_filter(real)
  local manifest = archive.write(archive.walk(real, filter), options.output)
  -- It may go to machines that are made days later. Whoever makes another of that name takes the name, not these bytes.
  manifest.archive_fd = uv.fs_open(manifest.archive, "r", 0)
  return manifest
end

--- A number of bytes for a person: "812 B", "3.1 GB" (powers of 1000).
---@param bytes integer
---@return string
function M.size_text(bytes)
  local units = { "B", "kB", "MB", "GB", "TB" }
  local value, unit = bytes, 1
  while value >= 999.5 and unit < #units do
    value, unit = value / 1000, unit + 1
  end
  return unit == 1 and ("%d B"):format(value) or ("%.1f %s"):format(value, units[unit])
end

--- The one line on what stayed, or nil when nothing did.
---@param manifest ciranda.archive.Manifest
---@return string?
function M.left_out_line(manifest)
  local left_out = manifest.left_out
  if #left_out.paths == 0 then
    return nil
  end
  return ("left out %s%d files, %s (what .gitignore matches, and tmp; --ALL_FILES=true sends what git ignores)"):format(
    left_out.more and "more than " or "",
    left_out.files,
    M.size_text(left_out.bytes)
  )
end

--- What a COMMAND names of the things that stayed.
--
-- The command is cut where a shell or an option would cut it (blanks, quotes, `=`, `:`, `,`, operators); a
-- piece counts when it is, or lies inside, something that stayed. Absolute paths are the worker's own.
---@param manifest ciranda.archive.Manifest
---@param command string
---@return string? path the first one named
function M.left_out_named(manifest, command)
  local names = {}
  for _, path in ipairs(manifest.left_out.paths) do
    names[path:gsub("/$", "")] = true
  end
  for piece in command:gmatch("[^%s'\"=:,;|&()<>`${}]+") do
    local path = piece:gsub("^%./+", ""):gsub("/+", "/"):gsub("/$", "")
    while path ~= "" do
      if names[path] then
        return piece
      end
      path = path:match("^(.*)/[^/]*$") or ""
    end
  end
  return nil
end

--- The flags of recipes that send a directory.
---@type ciranda.cli.Flag[]
M.flags = {
  { name = "SCRIPT_DIR", type = "directory", help = "The directory to send (the working directory)." },
  {
    name = "ALL_FILES",
    type = "boolean",
    default = false,
    help = "Send what .gitignore matches too (tmp stays).",
  },
  {
    name = "LEFT_OUT_OK",
    type = "boolean",
    default = false,
    help = "Go on although COMMAND names something that is not sent.",
  },
}

--- Makes the bundle that those flags mean and says what stays.
---@param context ciranda.cli.Context
---@param output string path of the archive
---@param command string
---@return ciranda.archive.Manifest
-- Raises "usage" when the command names something that stays; what `make` raises.
function M.from_flags(context, output, command)
  local flags = context.flags
  local manifest = M.make(flags.SCRIPT_DIR or ".", { output = output, all_files = flags.ALL_FILES })
  local line = M.left_out_line(manifest)
  if line then
    context.progress:say("%s", line)
  end
  local named = not flags.LEFT_OUT_OK and M.left_out_named(manifest, command)
  if named then
    err.raise({
      code = "usage",
      message = ("COMMAND names %s, which is not sent to the workers; "):format(named)
        .. "--ALL_FILES=true sends what .gitignore matches, --LEFT_OUT_OK=true goes on without it",
    })
  end
  return manifest
end

return M
