local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local gcloud_config = require("ciranda.gcp.gcloud_config")
local json = require("ciranda.io.json")
local storage_module = require("ciranda.gcp.storage")
local task = require("ciranda.task")
local url = require("ciranda.io.url")

local support = dofile("tests/spec/gcp/support.lua")
local fails = support.fails

--- As much of Cloud Storage as an upload and a download see: offsets, 308, generations, checksums, preconditions.
--- `fault(kind, request)` may answer in its place; kinds: "start", "chunk", "status", "once", "get", "media".
local function bucket_server()
  local self = { objects = {}, sessions = {}, generation = 0, requests = {} }

  local function refuse(status, reason, message)
    return {
      status = status,
      json = {
        error = {
          code = status,
          message = message or reason,
          errors = { { domain = "global", reason = reason } },
        },
      },
    }
  end

  local function resource(object)
    return {
      kind = "storage#object",
      name = object.name,
      bucket = "b",
      generation = tostring(object.generation),
      size = tostring(#object.data),
      crc32c = crypto.base64(crypto.digest("crc32c", object.data)),
      contentType = object.contentType,
      metadata = object.metadata,
    }
  end

  local function precondition(args, name)
    local wanted = args.ifGenerationMatch
    local object = self.objects[name]
    return wanted == nil or tonumber(wanted) == (object and object.generation or 0)
  end

  local function store(meta, data, args)
    if meta.crc32c and meta.crc32c ~= crypto.base64(crypto.digest("crc32c", data)) then
      return refuse(400, "invalid", "Provided CRC32C does not match")
    end
    if not precondition(args, meta.name) then
      return refuse(412, "conditionNotMet")
    end
    self.generation = self.generation + 1
    local object = {
      name = meta.name,
      data = self.corrupt and self.corrupt(data) or data,
      contentType = meta.contentType,
      metadata = meta.metadata,
      generation = self.generation,
    }
    self.objects[meta.name] = object
    return { json = resource(object) }
  end

  local function chunk(request, session)
    local first, last, total = request.headers["content-range"]:match("^bytes (%d+)-(%d+)/(%d+)$")
    first, last, total = math.tointeger(first), math.tointeger(last), math.tointeger(total)
    assert(last - first + 1 == #request.body, "a chunk is as long as it says")
    assert(last + 1 == total or #request.body % (256 * 1024) == 0, "a chunk is a multiple of 256 KiB")
    if first > #session.data then
      return refuse(503, "backendError", "a gap")
    end
    local kept = session.keep and session.keep(request.body) or request.body
    session.data = session.data:sub(1, first) .. kept
    if #session.data == total then
      return store(session.meta, session.data, session.args)
    end
    return { status = 308, headers = #session.data > 0 and { Range = "bytes=0-" .. #session.data - 1 } or {} }
  end

  local function upload(request, args)
    if args.upload_id then
      local session = self.sessions[args.upload_id]
      if not session then
        return refuse(404, "notFound")
      end
      if request.headers["content-range"]:find("^bytes %*/") then
        return self.fault and self.fault("status", request)
          or {
            status = 308,
            headers = #session.data > 0 and { Range = "bytes=0-" .. #session.data - 1 } or {},
          }
      end
      local spoiled = self.fault and self.fault("chunk", request, session)
      if spoiled then
        return spoiled
      end
      return chunk(request, session)
    elseif args.uploadType == "resumable" then
      local id = tostring(#self.sessions + 1)
      self.sessions[id] = { data = "", meta = request:json(), args = args }
      return (self.fault and self.fault("start", request))
        or { headers = { Location = ("%s/upload/storage/v1/b/b/o?upload_id=%s"):format(self.url, id) } }
    end
    local boundary = request.headers["content-type"]:match("^multipart/related; boundary=(.+)$")
    local mark = "--" .. boundary
    local _, head_end = request.body:find("\r\n\r\n", 1, true)
    local meta_end = request.body:find("\r\n" .. mark, head_end, true)
    local meta = json.decode(request.body:sub(head_end + 1, meta_end - 1))
    local _, data_start = request.body:find("\r\n\r\n", meta_end, true)
    local data = request.body:sub(data_start + 1, -#("\r\n" .. mark .. "--\r\n") - 1)
    local answer = store(meta, data, args)
    return self.fault and self.fault("once", request) or answer
  end

  local function media(request, object)
    local spoiled = self.fault and self.fault("media", request, object)
    if spoiled then
      return spoiled
    end
    local headers = {
      ["X-Goog-Generation"] = object.generation,
      ["X-Goog-Hash"] = {
        "crc32c=" .. resource(object).crc32c,
        "md5=" .. crypto.base64(crypto.digest("md5", object.data)),
      },
    }
    local data = self.lie and self.lie(object.data) or object.data
    local range = request.headers.range
    if not range then
      return { headers = headers, body = data }
    end
    local first, last = range:match("^bytes=(%d+)-(%d*)$")
    first, last = math.tointeger(first), math.tointeger(last) or #data - 1
    if first >= #data then
      return refuse(416, "requestedRangeNotSatisfiable")
    end
    return { status = 206, headers = headers, body = data:sub(first + 1, last + 1) }
  end

  local function list(args)
    local names = {}
    for name in pairs(self.objects) do
      names[#names + 1] = name
    end
    table.sort(names)
    local items, prefixes, seen, token = {}, {}, {}, nil
    for _, name in ipairs(names) do
      if name:sub(1, #(args.prefix or "")) == (args.prefix or "") and name > (args.pageToken or "") then
        if #items == tonumber(args.maxResults or 1000) then
          token = items[#items].name
          break
        end
        local rest = name:sub(#(args.prefix or "") + 1)
        local deeper = args.delimiter and rest:match("^[^" .. args.delimiter .. "]*" .. args.delimiter)
        if deeper then
          if not seen[deeper] then
            seen[deeper] = true
            prefixes[#prefixes + 1] = (args.prefix or "") .. deeper
          end
        else
          items[#items + 1] = resource(self.objects[name])
        end
      end
    end
    return { json = { items = items, prefixes = #prefixes > 0 and prefixes or nil, nextPageToken = token } }
  end

  function self.handler(request)
    self.requests[#self.requests + 1] = request
    local args = request:args()
    if request.path == "/upload/storage/v1/b/b/o" then
      return upload(request, args)
    elseif request.path == "/storage/v1/b/b/o" then
      return list(args)
    elseif not request.path:find("/b/b/o", 1, true) then
      return refuse(404, "notFound", "The specified bucket does not exist.")
    end
    local name = url.unescape(request.path:match("^/storage/v1/b/b/o/([^/]+)$"))
    local object = self.objects[name]
    if not object or (args.generation and tonumber(args.generation) ~= object.generation) then
      return refuse(404, "notFound", "No such object: b/" .. name)
    elseif request.method == "DELETE" then
      self.objects[name] = nil
      return { status = 204 }
    elseif args.alt == "media" then
      return media(request, object)
    end
    return { json = resource(object) }
  end
  return self
end

--- Run `fn(storage, bucket)`.
local function with_bucket(fn)
  local bucket = bucket_server()
  support.with_server(bucket.handler, function(s)
    bucket.url = s.url
    local storage = storage_module.connect { client = support.client(), endpoint = s.url }
    fn(storage, bucket)
  end)
end

local BIG = {}
for i = 1, 20000 do
  BIG[i] = ("%063d\n"):format(i)
end
BIG = table.concat(BIG) -- 1.28 MB
local CHUNK = { chunk = 256 * 1024 }

describe("ciranda.gcp.storage", function()
  it("finds the emulator that the environment names, with no credentials", function()
    local function endpoint(variables)
      return storage_module.connect({
        client = variables.STORAGE_EMULATOR_HOST == nil and support.client() or nil,
        config = gcloud_config.load { env = support.env(variables) },
      }).endpoint
    end
    assert.equal("http://127.0.0.1:4443/", endpoint { STORAGE_EMULATOR_HOST = "127.0.0.1:4443" })
    assert.equal(
      "http://127.0.0.1:4443/",
      endpoint { STORAGE_EMULATOR_HOST = "http://127.0.0.1:4443/storage/v1/" }
    )
    assert.equal("https://h/", endpoint { CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE = "https://h/storage/v1" })
    assert.equal("https://storage.googleapis.com/", endpoint {})
  end)

  it("understands gs:// addresses", function()
    assert.same({ "b-1", "a/b" }, { storage_module.parse("gs://b-1/a/b") })
    assert.same({ "bucket", "" }, { storage_module.parse("bucket") })
    fails("usage", storage_module.parse, "gs:///x")
    fails("usage", storage_module.parse, "")
  end)

  it("uploads in one request, with the checksum, type and metadata", function()
    with_bucket(function(storage, bucket)
      local data = "a\0b--\r\n" .. crypto.random(1000)
      local object = storage:upload("b", "dir/näme ?#%", data, {
        content_type = "text/plain",
        metadata = { k = "v" },
      })
      assert.equal("1", object.generation)
      local stored = bucket.objects["dir/näme ?#%"]
      assert.is_true(stored.data == data)
      assert.equal("text/plain", stored.contentType)
      assert.same({ k = "v" }, stored.metadata)
      assert.equal(1, #bucket.requests)
      assert.is_true(storage:download("b", "dir/näme ?#%") == data)
      assert.equal("0", storage:upload("b", "empty", "").size)
      assert.equal("", (storage:download("b", "empty")))
    end)
  end)

  it("uploads a file in chunks and tells how far it is", function()
    with_bucket(function(storage, bucket)
      support.with_directory(function(directory)
        local path = support.write(directory .. "/big", BIG)
        local progress = {}
        storage:upload("b", "big", { path = path }, {
          chunk = CHUNK.chunk,
          on_progress = function(sent, total)
            assert.equal(#BIG, total)
            progress[#progress + 1] = sent
          end,
        })
        assert.is_true(bucket.objects.big.data == BIG)
        assert.same({ 262144, 524288, 786432, 1048576, #BIG }, progress)
        local last = bucket.requests[#bucket.requests]
        assert.equal("crc32c=" .. crypto.base64(crypto.digest("crc32c", BIG)), last.headers["x-goog-hash"])
        storage:upload("b", "text", BIG, CHUNK)
        assert.is_true(bucket.objects.text.data == BIG)
        fails("misuse", storage.upload, storage, "b", "x", "", { chunk = 1000 })
        fails("misuse", storage.upload, storage, "b", "x", "", { contenttype = "x" })
        fails("not_found", storage.upload, storage, "b", "x", { path = directory .. "/gone" })
      end)
    end)
  end)

  it("goes on from what was confirmed after a chunk was lost, cut or partly kept", function()
    for name, fault in pairs {
      lost = { reset = true },
      failed = { status = 503, body = "" },
      dropped = { drop = true },
    } do
      with_bucket(function(storage, bucket)
        local chunks, asked = 0, 0
        function bucket.fault(kind, request, session)
          if kind == "status" then
            asked = asked + 1
          elseif kind == "chunk" then
            chunks = chunks + 1
            if chunks == 2 then
              session.data = session.data .. request.body:sub(1, 262144 // 2) -- a part had arrived
              return fault
            end
          end
        end
        storage:upload("b", "big", BIG, CHUNK)
        assert.is_true(bucket.objects.big.data == BIG, name)
        assert.equal(1, asked, name)
      end)
    end
    with_bucket(function(storage, bucket)
      function bucket.fault(kind, _, session)
        if kind == "chunk" then
          session.keep = function(body)
            return body:sub(1, math.max(1, #body - 1000)) -- stores less than was sent
          end
        end
      end
      storage:upload("b", "big", BIG:sub(1, 600000), CHUNK)
      assert.is_true(bucket.objects.big.data == BIG:sub(1, 600000))
    end)
  end)

  it("begins again when the session is lost, and gives up when nothing moves", function()
    with_bucket(function(storage, bucket)
      local lost = 0
      function bucket.fault(kind)
        if kind == "chunk" and lost == 0 then
          lost = 1
          bucket.sessions = { gap = true } -- 404 from now on, for this one
          return { status = 503, body = "" }
        end
      end
      storage:upload("b", "big", BIG, CHUNK)
      assert.is_true(bucket.objects.big.data == BIG)
    end)
    with_bucket(function(storage, bucket)
      function bucket.fault(kind)
        return kind == "chunk" and { status = 503, body = "" } or nil
      end
      local err = fails("unavailable", storage.upload, storage, "b", "big", BIG, CHUNK)
      assert.matches("gs://b/big", tostring(err), 1, true)
    end)
    with_bucket(function(storage, bucket)
      function bucket.fault(kind)
        return kind == "chunk" and { status = 308, headers = {} } or nil
      end
      local err = fails("protocol", storage.upload, storage, "b", "big", BIG, CHUNK)
      assert.matches("does not move", tostring(err), 1, true)
    end)
  end)

  it("never shows an upload session, which is as good as a credential", function()
    with_bucket(function(storage, bucket)
      function bucket.fault(kind)
        return kind == "chunk" and { status = 403, body = "" } or nil
      end
      local err = fails("permission", storage.upload, storage, "b", "big", BIG, CHUNK)
      assert.is_nil(err:describe():find("upload_id", 1, true))
    end)
  end)

  it("does not leave an object that is not what was sent", function()
    with_bucket(function(storage, bucket)
      function bucket.corrupt(data)
        return data .. "x"
      end
      local err = fails("io", storage.upload, storage, "b", "o", "data")
      assert.matches("CRC-32C", tostring(err), 1, true)
      assert.is_nil(bucket.objects.o)
    end)
  end)

  it("keeps preconditions, and knows its own object after a lost answer", function()
    with_bucket(function(storage, bucket)
      storage:upload("b", "o", "one", { if_generation_match = 0 })
      fails("precondition", storage.upload, storage, "b", "o", "two", { if_generation_match = 0 })
      storage:upload("b", "o", "two", { if_generation_match = 1 })
      local count = 0
      function bucket.fault(kind)
        if kind == "once" then
          count = count + 1
          return count == 1 and { reset = true } or nil
        end
      end
      local object = storage:upload("b", "fresh", "data", { if_generation_match = 0 })
      assert.equal("4", object.size)
      assert.equal(2, count)
      count = 0
      object = storage:upload("b", "fresh", "next", { if_generation_match = object.generation })
      assert.equal("next", (storage:download("b", "fresh", { generation = object.generation })))
      assert.equal(2, count)
      count = 0
      storage:upload("b", "o", "mine", { repeatable = true })
      assert.equal(2, count)
      count = 0
      local err = support.raised(storage.upload, storage, "b", "o", "three")
      assert.is_true(errors.is(err, "reset", "closed")) -- without a condition it is not sent again
      assert.equal(1, count)
    end)
  end)

  it("lists in pages, with prefixes", function()
    with_bucket(function(storage)
      for _, name in ipairs { "a/1", "a/2", "a/b/3", "a/b/4", "a/c/5", "z" } do
        storage:upload("b", name, name)
      end
      local objects, prefixes = storage:list("b", { prefix = "a/", delimiter = "/", page_size = 1 })
      assert.equal(2, #objects)
      assert.equal("a/2", objects[2].name)
      assert.same({ "a/b/", "a/c/" }, prefixes)
      assert.equal(6, #(storage:list("b")))
      assert.same({}, (storage:list("b", { prefix = "none" })))
    end)
  end)

  it("tells about objects, and deletes them once", function()
    with_bucket(function(storage)
      storage:upload("b", "o", "data")
      assert.equal("4", storage:stat("b", "o").size)
      assert.is_nil(storage:stat("b", "none"))
      assert.is_false(storage:delete("b", "o", { generation = 77 }))
      assert.is_true(storage:delete("b", "o"))
      assert.is_false(storage:delete("b", "o"))
      local err = fails("not_found", storage.download, storage, "b", "o")
      assert.matches("gs://b/o: ", tostring(err), 1, true)
      assert.matches("No such object", tostring(err), 1, true)
      err = fails("not_found", storage.upload, storage, "absent", "o", "data")
      assert.matches(
        "does not exist; make it with: gcloud storage buckets create gs://absent",
        tostring(err),
        1,
        true
      )
    end)
  end)

  it("downloads to a file that appears whole or not at all", function()
    with_bucket(function(storage, bucket)
      support.with_directory(function(directory)
        storage:upload("b", "big", BIG)
        local path = directory .. "/out"
        local _, generation = storage:download("b", "big", { path = path })
        assert.is_true(fs.read(path) == BIG)
        assert.equal("1", generation)
        function bucket.lie(data)
          return data:sub(1, -2) .. "X"
        end
        local err = fails("io", storage.download, storage, "b", "big", { path = directory .. "/bad" })
        assert.matches("CRC-32C", tostring(err), 1, true)
        fails("io", storage.download, storage, "b", "big")
        fails("not_found", storage.download, storage, "b", "none", { path = directory .. "/none" })
        local names = {}
        for _, entry in ipairs(fs.list(directory)) do
          names[#names + 1] = entry.name or entry
        end
        assert.same({ "out" }, names)
      end)
    end)
  end)

  it("takes a download up where it broke off, always of one generation", function()
    with_bucket(function(storage, bucket)
      storage:upload("b", "big", BIG)
      local tries = {}
      function bucket.fault(kind, request, object)
        if kind ~= "media" then
          return nil
        end
        tries[#tries + 1] = request
        if #tries <= 3 then
          local first = math.tointeger((request.headers.range or "bytes=0-"):match("^bytes=(%d+)-"))
          return {
            status = first > 0 and 206 or 200,
            headers = {
              ["X-Goog-Generation"] = object.generation,
              ["X-Goog-Hash"] = "crc32c=" .. crypto.base64(crypto.digest("crc32c", object.data)),
            },
            body = object.data:sub(first + 1),
            truncate = 300000,
          }
        end
      end
      assert.is_true(storage:download("b", "big") == BIG)
      assert.equal(4, #tries)
      assert.equal("bytes=900000-", tries[4].headers.range)
      assert.equal("1", tries[2]:args().generation)
    end)
  end)

  it("downloads a part", function()
    with_bucket(function(storage)
      storage:upload("b", "big", BIG)
      assert.equal(BIG:sub(101, 200), (storage:download("b", "big", { first = 100, last = 199 })))
      assert.equal(BIG:sub(-10), (storage:download("b", "big", { first = #BIG - 10 })))
      fails("invalid", storage.download, storage, "b", "big", { first = #BIG + 1 })
    end)
  end)

  it("can be cancelled in the middle, leaving no file", function()
    with_bucket(function(storage, bucket)
      support.with_directory(function(directory)
        storage:upload("b", "big", BIG)
        function bucket.fault(kind)
          if kind == "media" or kind == "chunk" then
            return {
              body = function(write)
                write(("x"):rep(1000))
                task.sleep(60)
              end,
            }
          end
        end
        fails(
          "timeout",
          task.timeout,
          0.2,
          storage.download,
          storage,
          "b",
          "big",
          { path = directory .. "/out" }
        )
        assert.same({}, fs.list(directory))
        fails("timeout", task.timeout, 0.2, storage.upload, storage, "b", "big", BIG, CHUNK)
      end)
    end)
  end)
end)
