--- scp: files and directories to some or all workers, and from them.
local clock = require("ciranda.io.clock")
local err = require("ciranda.io.error")
local fan = require("ciranda.run.fan")
local fs = require("ciranda.io.fs")
local glob = require("ciranda.ssh.sftp_glob")
local named_target = require("ciranda.run.named_target")
local nodeset = require("ciranda.provider.nodeset")
local results_of = require("ciranda.fleet.results")
local transfer = require("ciranda.fleet.transfer")

--- Seconds between two lines on how far it is.
local STATUS_EVERY = 2

local M = {
  summary = "copy files to workers, and from them",
  description = "ciranda scp FILE... [USER@]NAME:PATH copies to the workers, ciranda scp [USER@]NAME:PATH DIRECTORY "
    .. "from them; there PATH may have * ? [a-z]. NAME is a queued resource, a node, or the prefix of nodes; --HOSTS "
    .. "needs none (:PATH). From several workers each one's files come into DIRECTORY/slice_S_worker_W. A file appears "
    .. "under its name only when all of it is there.",
}

M.flags = {
  { name = "PATHS", positional = true, many = true, help = "What to copy, and last where to." },
  { name = "recurse", type = "boolean", default = false, help = "Directories with everything in them." },
  {
    name = "via",
    help = "How directories come to workers. gs://BUCKET/DIRECTORY: they go there once, and each worker fetches them "
      .. "by its own service account. workers, or workers:N: they go to 2, or N, of the workers, and from them to the "
      .. "others over the internal network. A worker that cannot fetch them gets them over its connection.",
  },
  {
    name = "batch-size",
    help = "How many workers at once, or all (all). The first batch that fails is the last.",
  },
}
table.move(named_target.flags, 1, #named_target.flags, #M.flags + 1, M.flags)

---@param format string
local function usage(format, ...)
  err.raise({ code = "usage", op = "scp", message = format:format(...) })
end

--- "[USER@]NAME:PATH" in its parts; nil for a local path. As in scp, a path with a slash before the colon is local.
---@param text string
---@return string? name, string? path relative to the login directory unless absolute
local function remote(text)
  local name, path = text:match("^([^/:]*):(.*)$")
  if not name then
    return nil
  end
  if path:match("^~[^/]") then
    usage("%s: another user's home is given by its path", text)
  end
  path = path:gsub("^~/*", "")
  return name, path == "" and "." or path
end

--- What the words mean.
---@param words string[]
---@return { name: string, sources: string[], target: string, push: boolean, via: string?, on_note: function? }
local function plan(words)
  if #words < 2 then
    usage("what to copy, and where to? ciranda scp FILE NAME:PATH, or NAME:PATH DIRECTORY")
  end
  local target = words[#words]
  local name, path = remote(target)
  local sources = {}
  for place = 1, #words - 1 do
    local from, from_path = remote(words[place])
    if from and name then
      usage("%s and %s are both on workers; copy by way of here", words[place], target)
    elseif not from and not name then
      usage("neither %s nor %s is on a worker: NAME:PATH", words[place], target)
    elseif from and place > 1 and from ~= remote(words[1]) then
      usage("%s and %s are on different slices; copy one after the other", words[1], words[place])
    end
    sources[place] = from and from_path or words[place]
  end
  if name then
    return { name = name, sources = sources, target = path, push = true }
  end
  return { name = remote(words[1]), sources = sources, target = target, push = false }
end

--- The name that a copy of this has in a directory; nil for ".", ".." and "/", whose content is copied.
---@param path string
---@return string?
local function last_part(path)
  local name = path:gsub("/+$", ""):match("[^/]+$")
  return name ~= "." and name ~= ".." and name or nil
end

--- What a path is on every worker; failures to find out are the workers' own.
---@param fleet ciranda.Fleet
---@param path string
---@param pattern boolean? the path may be a pattern: then it is a directory where it means one
---@return table<ciranda.Worker, string> kinds "file", "directory", ..., or "absent"
local function kinds_of(fleet, path, pattern)
  local kinds = {}
  fleet:each(function(worker, link)
    local ok, kind = pcall(link.use, link, function(connection)
      local client <close> = connection:sftp()
      local what
      for _, found in ipairs(pattern and glob.expand(client, path) or {}) do
        what = found.type == "directory" and found.type or what or found.type
      end
      return what or not pattern and client:exists(path) or "absent"
    end)
    if ok then
      kinds[worker] = kind
    elseif err.is_fatal(kind) then
      error(kind, 0)
    end
  end)
  return kinds
end

--- Copies one source to a part of the fleet. As in scp, what exists as a directory is copied into.
local function push(part, source, copy, on_result)
  local options = { on_result = on_result }
  if copy.via and fs.stat(source).type == "directory" then
    options.via, options.on_note = copy.via, copy.on_note
  end
  local kinds = kinds_of(part, copy.target)
  local name = last_part(source)
  local groups, collected = { into = {}, onto = {} }, {}
  local must_be_directory = #copy.sources > 1 or copy.target:sub(-1) == "/"
  for _, worker in ipairs(part:workers()) do
    local kind = kinds[worker]
    if kind and kind ~= "directory" and must_be_directory then
      local result = {
        worker = worker,
        stdout = "",
        stderr = "",
        err = err.new({
          code = kind == "absent" and "not_found" or "invalid",
          message = ("%s is no directory there"):format(copy.target),
        }),
      }
      table.insert(collected, result)
      on_result(result)
    else
      table.insert(kind == "directory" and groups.into or groups.onto, worker)
    end
  end
  for how, workers in pairs(groups) do
    if #workers > 0 then
      local target = how == "into" and name and copy.target:gsub("(.)/+$", "%1") .. "/" .. name or copy.target
      for _, result in ipairs(part:select(workers):push(source, target, options)) do
        table.insert(collected, result)
      end
    end
  end
  return results_of.new(collected)
end

--- Copies one source from the only worker, to where scp would put it.
local function pull_one(part, source, copy, on_result)
  local target = copy.target
  local into = fs.exists(target) == "directory"
  if not into and (#copy.sources > 1 or target:sub(-1) == "/") then
    usage("%s is no directory", target)
  end
  local worker = part:workers()[1]
  local result = { worker = worker, code = 0, stdout = "", stderr = "" }
  local link = part:link(worker)
  local ok, problem = pcall(link.use, link, function(connection)
    return transfer.bring(connection, source, function(path, several)
      local name = last_part(path)
      if several and not into then
        usage("%s may mean several files, so %s must be a directory", source, target)
      end
      return into and name and target:gsub("(.)/+$", "%1") .. "/" .. name or target
    end)
  end)
  if not ok then
    if not err.is(problem) or err.is(problem, "cancelled", "misuse", "internal", "usage") then
      error(problem, 0)
    end
    result.code, result.err = nil, problem
  end
  on_result(result)
  return results_of.new({ result })
end

--- Copies one source from every worker of a part, each into a directory of its own.
local function pull(part, source, copy, on_result)
  if not last_part(source) then
    usage("%s of several workers: name the directory", source)
  end
  return part:pull(source, copy.target, { on_result = on_result })
end

--- Refuses directories without --recurse.
local function check_directories(copy, fleet, recurse)
  for _, source in ipairs(copy.sources) do
    if copy.push then
      if fs.stat(source).type == "directory" and not recurse then
        usage("%s is a directory; add --recurse", source)
      end
    elseif not recurse then
      for worker, kind in pairs(kinds_of(fleet, source, true)) do
        if kind == "directory" then
          usage("%s is a directory on %s; add --recurse", source, nodeset.fold({ worker }))
        end
      end
    end
  end
end

---@param context ciranda.cli.Context
---@return integer status
function M.run(context)
  local flags, progress = context.flags, context.progress
  local size = fan.batch_size(flags.batch_size)
  local copy = plan(flags.PATHS or {})
  if copy.push then
    check_directories(copy, nil, flags.recurse)
  end
  if flags.via and not (copy.push and flags.recurse) then
    usage("--via is for directories to workers: --recurse DIRECTORY NAME:PATH")
  end
  copy.via = flags.via
  copy.on_note = function(text)
    progress:say("%s", text)
  end
  local found <close> = named_target.open(context, copy.name, {})
  found.login()
  if not copy.push then
    check_directories(copy, found.fleet, flags.recurse)
  end
  local workers = found.fleet:workers()
  local one = #workers == 1
  local copy_source = copy.push and push or one and pull_one or pull
  local finished, total, told = 0, #workers * #copy.sources, clock.now()
  local done = fan.run({
    fleet = found.fleet,
    context = context,
    batch_size = size,
    work = function(part, on_result)
      local all = {}
      for place, source in ipairs(copy.sources) do
        local good = {}
        for _, result in
          ipairs(copy_source(part, source, copy, function(result)
            finished = finished + 1
            if result.err or result.code ~= 0 or place == #copy.sources then
              on_result(result)
            end
            local now = clock.now()
            if now - told > STATUS_EVERY then
              told = now
              progress:status(("Copied: %d of %d"):format(finished, total))
            end
          end))
        do
          all[#all + 1] = result
          if not result.err and result.code == 0 then
            good[#good + 1] = result.worker
          end
        end
        if #good == 0 then
          break
        end
        part = part:select(good) -- a worker that failed gets no more
      end
      return results_of.new(all)
    end,
  })
  local result = fan.conclude(done, progress)
  if result.status == 0 then
    result.message = ("%s %s %s"):format(
      #copy.sources == 1 and copy.sources[1] or #copy.sources .. " sources",
      copy.push and "is on" or ("is in %s, from"):format(copy.target),
      nodeset.fold(workers)
    )
  end
  context.finish(result)
  return result.status
end

return M
