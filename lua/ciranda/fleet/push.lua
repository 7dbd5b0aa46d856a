--- A directory to every worker of a fleet: one archive that is made once, without what is there already.
--
-- A worker that has the destination is asked what is in it, with few bytes: it hashes the files that would come and
-- answers with one digest for every GROUP of them. Those of groups that differ are asked for one by one. What differs
-- in content, mode or type is sent; times of what stays are left alone. Archives are kept by what is in them: workers
-- that miss the same files get the same one.
local archive = require("ciranda.fleet.archive")
local crypto = require("ciranda.io.crypto")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
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

---@param text string
---@return string one word for sh
local function quote(text)
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

--- A script with its `{name}`s filled in, for the login shell, whichever that is.
local function command(script, values)
  return "sh -c " .. quote((script:gsub("{(%l+)}", values)))
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
---@field bucket ciranda.fleet.Bucket? where workers fetch archives
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
  local values = { destination = quote(self.destination), group = tostring(GROUP) }
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
  local values = { destination = quote(self.destination) }
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

--- The archive piece by piece, each read once for all workers unless that takes too much memory.
---@private
function Parcel:reader(part)
  local offset = 0
  local function read(at)
    local file <close> = fs.open(part.archive)
    return file:read(PIECE, at)
  end
  return function()
    local at = offset
    offset = at + PIECE
    if at >= part.archive_size then
      return nil
    elseif part.archive_size > SHARED then
      return read(at)
    end
    return self:once(("%s %d"):format(part.archive, at), function()
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

--- Bring one worker what it misses.
---@private
---@return table answer of the command that unpacked it
---@return string? note why it did not come by the bucket
function Parcel:deliver(connection)
  local part = self:archive_without(self:found_by(connection))
  local patience = PATIENCE + part.archive_size / SLOWEST
  local values = {
    archive = (".ciranda-push-%s.tar.gz"):format(crypto.hex(crypto.random(6))),
    destination = quote(self.destination),
    size = tostring(part.archive_size),
  }
  local note
  if self.bucket then
    values.url, values.sum = quote(self:object(part)), part.archive_sha256
    values.patience, values.refusal = ("%d"):format(math.ceil(patience)), tostring(NOT_FETCHED)
    local answer = connection:exec(command(FETCH, values), { timeout = patience + PATIENCE })
    if answer.code ~= NOT_FETCHED then
      return answer
    end
    note = answer.stderr:match("[^\n]+") or "what it fetched was not what was put there"
  end
  return connection:exec(command(UNPACK, values), { stdin = self:reader(part), timeout = patience }), note
end

--- Push a directory with everything in it. See `fleet:push`.
---@async
---@param fleet ciranda.Fleet
---@param source string
---@param destination string
---@param options { limit: integer?, on_result: function?, via: string?, on_note: fun(text: string)? }
---@return ciranda.fleet.Results
function M.directory(fleet, source, destination, options)
  local bucket = options.via and bucket_of(options.via)
  local temporary = fs.tempdir("ciranda-push")
  local _ <close> = setmetatable({}, {
    __close = function()
      fs.remove_tree(temporary)
      for name in pairs(bucket and bucket.put or {}) do
        pcall(bucket.storage.delete, bucket.storage, bucket.name, name)
      end
    end,
  })
  local parcel = setmetatable({
    destination = destination,
    directory = temporary,
    level = #fleet <= FEW and 1 or 6,
    manifest = archive.walk(source, function()
      return "keep"
    end),
    bucket = bucket,
    lock = task.semaphore(1),
    made = {},
  }, Parcel)
  return fleet:gather_results(function(worker, link)
    return link:use(function(connection)
      local answer, note = parcel:deliver(connection)
      if note and options.on_note then
        options.on_note(
          ("slice %d worker %d could not fetch from %s (%s): it got the files over its connection"):format(
            worker.slice,
            worker.index,
            options.via,
            note
          )
        )
      end
      return { code = answer.code, signal = answer.signal, stdout = answer.stdout, stderr = answer.stderr }
    end)
  end, options.limit, options.on_result)
end

return M
