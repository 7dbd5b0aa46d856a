--- A directory to every worker of a fleet: one archive that is made once, without what is there already.
--
-- A worker that has the destination is asked what is in it, with few bytes: it hashes the files that would come and
-- answers with one digest for every GROUP of them. Those of groups that differ are asked for one by one. What differs
-- in content, mode or type is sent; times of what stays are left alone. Archives are kept by what is in them: workers
-- that miss the same files get the same one. A worker gets it over its connection, from a bucket, or from another
-- worker (`ciranda.fleet.relay`).
local archive = require("ciranda.fleet.archive")
local crypto = require("ciranda.io.crypto")
local fs = require("ciranda.io.fs")
local nodeset = require("ciranda.provider.nodeset")
local process = require("ciranda.io.process")
local shell = require("ciranda.io.shell")
local task = require("ciranda.task")

local M = {}

--- Seconds that hashing or unpacking may take there, and the bytes a second that at least are sent.
local PATIENCE, SLOWEST = 600, 10000

--- Files that share a digest.
local GROUP = 64

--- Bytes of an archive that are read at once, and the size up to which one is kept in memory for all workers.
local PIECE, SHARED = 262144, 67108864

--- What `sha256sum` says of nothing: none of a group's files is there.
local NONE = crypto.hex(crypto.digest("sha256", ""))

--- Up to so many workers a quick compression costs less in all than a thorough one: it is paid for once, and what it
--- leaves is encrypted for each (gzip -1 against -6, with libssh2's ChaCha20).
local FEW = 64

-- The marker tells our lines from what a shell's start-up file may print.
local MARKER = "ciranda-push "

local DIGESTS = [[cd {destination} 2>/dev/null || { echo ciranda-push absent; exit 0; }; echo ciranda-push there; ]]
  .. [[gzip -dc | xargs -0 -n {group} sh -c '{ sha256sum -- "$@"; stat -c %f -- "$@"; } 2>/dev/null | sha256sum' sh]]

local FILES = [[cd {destination} && echo ciranda-push there && ]]
  .. [[xargs -0 sh -c 'sha256sum -- "$@"; stat -c "%f  %n" -- "$@"' sh 2>/dev/null]]

-- What has arrived is whole before any of it is unpacked.
local UNPACK = [[umask=$(umask); umask 077; cat > {archive} && [ $(wc -c < {archive}) -eq {size} ] && umask $umask && ]]
  .. [[mkdir -p {destination} && tar -xzpf {archive} --no-same-owner -C {destination}; ]]
  .. [[status=$?; rm -f {archive}; exit $status]]

--- What keeps a worker from fetching is told by this status; it then gets the archive over its connection.
local NOT_FETCHED = 90

-- The worker's own service account, so that no token of ours leaves this machine; the worker's token is given to curl
-- on its standard input and so is not in its list of processes.
local FETCH = [[umask=$(umask); umask 077; ]]
  .. [[token=$(curl -sf --max-time 10 -H "Metadata-Flavor: Google" ]]
  .. [["http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/]]
  .. [[service-accounts/default/token" ]]
  .. [[| sed -n "s/.*\"access_token\" *: *\"\([^\"]*\)\".*/\1/p"); ]]
  .. [[{ [ -z "$token" ] || printf "header = \"Authorization: Bearer %s\"\n" "$token"; } | ]]
  .. [[curl -sSf --max-time {patience} -K - -o {archive} {url} && ]]
  .. [[[ "$(sha256sum < {archive} | cut -c1-64)" = {sum} ] || { rm -f {archive}; exit {refusal}; }; ]]
  .. [[umask $umask && mkdir -p {destination} && tar -xzpf {archive} --no-same-owner -C {destination}; ]]
  .. [[status=$?; rm -f {archive}; exit $status]]

--- A script with its `{name}`s filled in, for the login shell, whichever that is.
local function command(script, values)
  return shell.sh((script:gsub("{(%l+)}", values)))
end

--- What `stat -c %f` says of a file that is as it should be.
local function mode_text(entry)
  return ("%x"):format(32768 | entry.mode)
end

---@class ciranda.fleet.Parcel what one push has made so far
---@field source string
---@field destination string
---@field directory string for archives
---@field level integer of gzip
---@field manifest ciranda.archive.Manifest
---@field workers integer how many workers there are
---@field bucket ciranda.fleet.Bucket? where workers fetch archives
---@field seeds integer? workers fetch them from each other, and so many from here
---@field relays ciranda.fleet.Relay[]
---@field scope ciranda.Scope in which these run
---@field private lock ciranda.task.Semaphore
---@field private made table<string, any>
local Parcel = {}
Parcel.__index = Parcel

--- What `make` returns, made once; others who need it wait.
---@private
function Parcel:once(name, make)
  return self.made[name]
    or self.lock:with(function()
      self.made[name] = self.made[name] or make()
      return self.made[name]
    end)
end

--- The files that can be compared, the compressed list of their names, and the digests of their groups. `sha256sum`
--- writes a backslash and a newline in a name in another way: such files are always sent.
---@private
function Parcel:listing()
  return self:once("listing", function()
    archive.hash(self.manifest)
    local files, names, digests = {}, {}, {}
    for _, entry in ipairs(self.manifest.entries) do
      if entry.sha256 and not entry.path:find("[\\\n]") then
        files[#files + 1] = entry
        names[#names + 1] = entry.path .. "\0"
      end
    end
    for first = 1, #files, GROUP do
      local lines, modes = {}, {}
      for place = first, math.min(first + GROUP - 1, #files) do
        local entry = files[place]
        lines[#lines + 1] = ("%s  %s\n"):format(entry.sha256, entry.path)
        modes[#modes + 1] = mode_text(entry) .. "\n"
      end
      digests[#digests + 1] = crypto.hex(crypto.digest("sha256", table.concat(lines) .. table.concat(modes)))
    end
    local zipped =
      process.run({ "gzip", "-nc", stdin = table.concat(names), timeout = PATIENCE }):check().stdout
    return { files = files, names = zipped, digests = digests }
  end)
end

--- The lines behind the marker, or nil where it is missing.
local function lines_of(answer)
  local said = answer.stdout:match("[^\n]*" .. MARKER:gsub("%-", "%%-") .. "(.*)$")
  return said and said:gmatch("([^\n]*)\n")
end

--- Those of our files that the worker has as they should be, by path; nil when it has nothing.
---@private
function Parcel:found_by(connection)
  local values = { destination = shell.quote(self.destination), group = tostring(GROUP) }
  local exists = connection:exec(command("[ -d {destination} ]", values), { timeout = PATIENCE })
  if exists.code ~= 0 then
    return nil
  end
  local listing = self:listing()
  local answer = connection:exec(command(DIGESTS, values), { stdin = listing.names, timeout = PATIENCE })
  local lines = lines_of(answer)
  if not lines or lines() ~= "there" then
    return nil
  end
  local found, doubtful = {}, {}
  for place, digest in ipairs(listing.digests) do
    local said = (lines() or ""):sub(1, 64)
    for index = (place - 1) * GROUP + 1, math.min(place * GROUP, #listing.files) do
      local entry = listing.files[index]
      if said == digest then
        found[entry.path] = true
      elseif said ~= NONE then
        doubtful[#doubtful + 1] = entry
      end
    end
  end
  if #doubtful > 0 then
    self:compare(connection, doubtful, found)
  end
  return found
end

--- Ask for files one by one.
---@private
function Parcel:compare(connection, entries, found)
  local names, expected = {}, {}
  for index, entry in ipairs(entries) do
    names[index] = entry.path .. "\0"
    expected[entry.path] = entry
  end
  local values = { destination = shell.quote(self.destination) }
  local answer = connection:exec(command(FILES, values), { stdin = table.concat(names), timeout = PATIENCE })
  local same = {}
  for line in lines_of(answer) or function() end do
    local word, path = line:match("^(%x+)  (.*)$")
    local entry = expected[path]
    if entry and word == entry.sha256 then
      same[path] = true
    elseif entry and word == mode_text(entry) and same[path] then
      found[path] = true
    end
  end
end

--- The archive without these files. Directories and links always go: they cost little.
---@private
---@param found table<string, boolean>?
function Parcel:archive_without(found)
  local entries, names = {}, {}
  for _, entry in ipairs(self.manifest.entries) do
    if not (found and found[entry.path]) then
      entries[#entries + 1] = entry
      names[#names + 1] = entry.path
    end
  end
  return self:once("archive " .. table.concat(names, "\0"), function()
    local part = {
      directory = self.manifest.directory,
      entries = entries,
      size = 0,
    }
    local path = ("%s/%s.tar.gz"):format(self.directory, crypto.hex(crypto.random(6)))
    return archive.write(part, path, self.level)
  end)
end

--- A file piece by piece, each read once for all workers unless that takes too much memory.
---@private
---@param path string
---@param size integer
function Parcel:reader(path, size)
  local offset = 0
  local function read(at)
    local file <close> = fs.open(path)
    return file:read(PIECE, at)
  end
  return function()
    local at = offset
    offset = at + PIECE
    if at >= size then
      return nil
    elseif size > SHARED then
      return read(at)
    end
    return self:once(("%s %d"):format(path, at), function()
      return read(at)
    end)
  end
end

---@class ciranda.fleet.Bucket a place in Cloud Storage that archives go by
---@field storage ciranda.gcp.Storage
---@field name string
---@field prefix string "" or ending in "/"
---@field put table<string, boolean> objects that are ours to delete

--- A place "gs://BUCKET/DIRECTORY" as archives' way.
---@param address string
---@return ciranda.fleet.Bucket
-- Raises "usage" for what is no such place.
local function bucket_of(address)
  local storages = require("ciranda.gcp.storage")
  local name, prefix = storages.parse(address)
  prefix = prefix:gsub("/+$", "")
  return {
    storage = storages.connect(),
    name = name,
    prefix = prefix ~= "" and prefix .. "/" or "",
    put = {},
  }
end

--- The archive's object, put there once; its name is its content's, so one that is there already is right.
---@private
---@return string url
function Parcel:object(part)
  local bucket = self.bucket
  local name = ("%sciranda-push-%s.tar.gz"):format(bucket.prefix, part.archive_sha256)
  return self:once("object " .. name, function()
    if not bucket.storage:stat(bucket.name, name) then
      bucket.storage:upload(bucket.name, name, { path = part.archive })
      bucket.put[name] = true
    end
    return bucket.storage:media_url(bucket.name, name)
  end)
end

--- What brings the archive from worker to worker, made once.
---@private
---@return ciranda.fleet.Relay
function Parcel:relay(part, patience)
  local relay = require("ciranda.fleet.relay")
  return self:once("relay " .. part.archive, function()
    local sealed = relay.seal(part.archive, part.archive_size, part.archive .. ".sealed")
    local made = relay.new(self.scope, {
      sealed = sealed,
      reader = function()
        return self:reader(sealed.path, sealed.size)
      end,
      destination = self.destination,
      seeds = self.seeds,
      patience = patience,
      slowest = SLOWEST,
      command = command,
    })
    table.insert(self.relays, made)
    return made
  end)
end

--- Let the worker fetch the archive by itself, where that was asked for and is worth it.
---@private
---@param values table<string, string> for commands
---@return table? answer of the command that unpacked it; nil: it has to be sent
---@return string? reason why it could not fetch it
---@return ciranda.Worker? from whom it has it
function Parcel:fetched(worker, connection, part, values, patience)
  if self.bucket then
    values.url, values.sum = shell.quote(self:object(part)), part.archive_sha256
    values.patience, values.refusal = ("%d"):format(math.ceil(patience)), tostring(NOT_FETCHED)
    local answer = connection:exec(command(FETCH, values), { timeout = patience + PATIENCE })
    if answer.code ~= NOT_FETCHED then
      return answer
    end
    return nil, answer.stderr:match("[^\n]+") or "what it fetched was not what was put there"
  elseif self.seeds and self.workers > self.seeds then
    if part.archive_size >= require("ciranda.fleet.relay").LEAST then
      return self:relay(part, patience):deliver(worker, connection)
    end
  end
end

--- Bring one worker what it misses.
---@private
---@param on_failure fun(reason: string) told why it could not fetch it by itself
---@return table answer of the command that unpacked it
---@return ciranda.Worker? from whom it has it
function Parcel:deliver(worker, connection, on_failure)
  local part = self:archive_without(self:found_by(connection))
  local patience = PATIENCE + part.archive_size / SLOWEST
  local values = {
    archive = (".ciranda-push-%s.tar.gz"):format(crypto.hex(crypto.random(6))),
    destination = shell.quote(self.destination),
    size = tostring(part.archive_size),
  }
  local answer, reason, from = self:fetched(worker, connection, part, values, patience)
  if answer then
    return answer, from
  elseif reason then
    on_failure(reason)
  end
  local stdin = self:reader(part.archive, part.archive_size)
  return connection:exec(command(UNPACK, values), { stdin = stdin, timeout = patience })
end

--- Says who could not fetch the files and why: the first of each reason at once, the others in the end.
---@param way string
---@param say fun(text: string)?
---@return fun(worker: ciranda.Worker, reason: string) note
---@return fun() tell
local function notes_of(way, say)
  local text = "%s could not fetch from %s (%s): over the connection instead"
  local reasons, others = {}, {}
  local function note(worker, reason)
    if not others[reason] then
      others[reason] = {}
      table.insert(reasons, reason)
      if say then
        say(text:format(("slice %d worker %d"):format(worker.slice, worker.index), way, reason))
      end
    else
      table.insert(others[reason], worker)
    end
  end
  return note,
    function()
      for _, reason in ipairs(reasons) do
        if say and #others[reason] > 0 then
          say(text:format(nodeset.fold(others[reason]), way, reason))
        end
      end
    end
end

--- Push a directory with everything in it. See `fleet:push`.
---@async
---@param fleet ciranda.Fleet
---@param source string
---@param destination string
---@param options { limit: integer?, on_result: function?, via: string?, on_note: fun(text: string)? }
---@return ciranda.fleet.Results
function M.directory(fleet, source, destination, options)
  local via = options.via
  local seeds = via and require("ciranda.fleet.relay").seeds(via)
  local bucket = via and not seeds and bucket_of(via)
  local temporary = fs.tempdir("ciranda-push")
  local _ <close> = setmetatable({}, {
    __close = function()
      fs.remove_tree(temporary)
      for name in pairs(bucket and bucket.put or {}) do
        pcall(bucket.storage.delete, bucket.storage, bucket.name, name)
      end
    end,
  })
  local scope <close> = task.scope()
  local parcel = setmetatable({
    destination = destination,
    directory = temporary,
    level = #fleet <= FEW and 1 or 6,
    manifest = archive.walk(source, function()
      return "keep"
    end),
    workers = #fleet,
    bucket = bucket,
    seeds = seeds,
    relays = {},
    scope = scope,
    lock = task.semaphore(1),
    made = {},
  }, Parcel)
  local note, tell = notes_of(seeds and "other workers" or via, options.on_note)
  local results = fleet:gather_results(function(worker, link)
    return link:use(function(connection)
      local answer, from = parcel:deliver(worker, connection, function(reason)
        note(worker, reason)
      end)
      return {
        code = answer.code,
        signal = answer.signal,
        stdout = answer.stdout,
        stderr = answer.stderr,
        from = from,
      }
    end)
  end, options.limit, options.on_result)
  for _, relay in ipairs(parcel.relays) do
    relay:finish()
  end
  tell()
  return results
end

return M
