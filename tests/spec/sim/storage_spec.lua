-- The simulated Cloud Storage, called directly.
local crypto = require("ciranda.io.crypto")
local fs = require("ciranda.io.fs")
local json = require("ciranda.io.json")
local storage = require("ciranda.sim.storage")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "support.lua")

local KIB = 1024

describe("the simulated Cloud Storage", function()
  local project, service, directory

  before_each(function()
    directory = fs.tempdir("ciranda-spec-")
    project = support.project()
    service = storage.new(project.world, directory, { buckets = { "bucket" } })
  end)

  after_each(function()
    fs.remove_tree(directory)
  end)

  local function header_table(headers)
    return setmetatable(headers or {}, {
      __index = function(self, name)
        return rawget(self, name:lower())
      end,
    })
  end

  -- Call the service: status, decoded body or bytes, headers.
  local function call(verb, target, body, headers)
    local path, text = target:gsub("^http://[^/]*", ""):match("^([^?]*)%??(.*)$")
    local query = {}
    for name, value in text:gmatch("([^&=]+)=([^&]*)") do
      query[name] = value:gsub("%%(%x%x)", function(digits)
        return string.char(tonumber(digits, 16))
      end)
    end
    local lower = { host = "storage" }
    for name, value in pairs(headers or {}) do
      lower[name:lower()] = value
    end
    local answer = service:handle({
      method = verb,
      path = path,
      query = query,
      headers = header_table(lower),
      body = type(body) == "table" and json.encode(body) or body or "",
    })
    local bytes = answer.body
    if type(bytes) == "function" then
      local parts = {}
      bytes(function(chunk)
        parts[#parts + 1] = chunk
      end)
      bytes = table.concat(parts)
      assert.are.equal(answer.length, #bytes)
    end
    local ok, value = pcall(json.decode, bytes)
    return answer.status, ok and type(value) == "table" and value or bytes, answer.headers
  end

  local function upload(name, data, query)
    return call(
      "POST",
      ("/upload/storage/v1/b/bucket/o?uploadType=media&name=%s%s"):format(name, query or ""),
      data
    )
  end

  it("stores and returns an object with its sums", function()
    local status, object = upload("dir%2Fa.txt", "hello", "")
    assert.are.equal(200, status)
    assert.are.equal("dir/a.txt", object.name)
    assert.are.equal("5", object.size)
    assert.are.equal("mnG7TA==", object.crc32c)
    assert.are.equal("XUFAKrxLKna5cZ2REBfFkg==", object.md5Hash)
    assert.are.equal("1", object.metageneration)
    local bytes, headers
    status, bytes, headers = call("GET", "/storage/v1/b/bucket/o/dir%2Fa.txt?alt=media")
    assert.are.equal(200, status)
    assert.are.equal("hello", bytes)
    assert.are.equal("crc32c=mnG7TA==,md5=XUFAKrxLKna5cZ2REBfFkg==", headers["X-Goog-Hash"])
    status, bytes = call("GET", "/download/storage/v1/b/bucket/o/dir%2Fa.txt?alt=media")
    assert.are.equal(200, status)
    assert.are.equal("hello", bytes)
  end)

  it("refuses what is not there, in the form of Google's older APIs", function()
    local status, body = call("GET", "/storage/v1/b/bucket/o/none")
    assert.are.equal(404, status)
    assert.are.equal("notFound", body.error.errors[1].reason)
    assert.are.equal("No such object: bucket/none", body.error.message)
    assert.are.equal(404, (call("GET", "/storage/v1/b/nowhere/o")))
    assert.are.equal(404, (call("POST", "/upload/storage/v1/b/nowhere/o?uploadType=media&name=a", "x")))
    assert.are.equal(404, (call("DELETE", "/storage/v1/b/bucket/o/none")))
    assert.are.equal(404, (call("GET", "/storage/v1/x")))
  end)

  it("makes buckets, and refuses to delete one that holds something", function()
    assert.are.equal(200, (call("POST", "/storage/v1/b?project=p", { name = "second" })))
    assert.are.equal(409, (call("POST", "/storage/v1/b?project=p", { name = "second" })))
    assert.are.equal(400, (call("POST", "/storage/v1/b?project=p", { name = "No" })))
    upload("a", "1")
    assert.are.equal(409, (call("DELETE", "/storage/v1/b/bucket")))
    assert.are.equal(204, (call("DELETE", "/storage/v1/b/second")))
    local _, list = call("GET", "/storage/v1/b?project=p")
    assert.are.equal(1, #list.items)
  end)

  it("keeps what is said of a bucket, field by field", function()
    local _, made = call("POST", "/storage/v1/b?project=p", {
      name = "second",
      labels = { a = "1" },
      location = "us-west4",
      iamConfiguration = { uniformBucketLevelAccess = { enabled = true } },
    })
    assert.are.equal("US-WEST4", made.location)
    assert.are.equal("region", made.locationType)
    assert.are.equal("1", made.metageneration)
    local status, changed = call(
      "PATCH",
      "/storage/v1/b/second?ifMetagenerationMatch=1",
      { labels = { a = json.null, b = "2" }, storageClass = "NEARLINE" }
    )
    assert.are.equal(200, status)
    assert.are.same({ b = "2" }, changed.labels)
    assert.are.equal("NEARLINE", changed.storageClass)
    assert.are.equal("2", changed.metageneration)
    assert.is_true(changed.iamConfiguration.uniformBucketLevelAccess.enabled)
    assert.are_not.equal(made.etag, changed.etag)
    _, changed = call("PUT", "/storage/v1/b/second", { labels = { c = "3" } })
    assert.are.same({ c = "3" }, changed.labels)
    assert.is_nil(changed.iamConfiguration)
    assert.are.equal("US-WEST4", changed.location)
    assert.are.same(changed, select(2, call("GET", "/storage/v1/b/second")))
    assert.are.equal(412, (call("PATCH", "/storage/v1/b/second?ifMetagenerationMatch=1", {})))
    assert.are.equal(400, (call("PATCH", "/storage/v1/b/second", { labels = { a = 1 } })))
    assert.are.equal(400, (call("PATCH", "/storage/v1/b/second", { versioning = { enabled = true } })))
  end)

  it("lists buckets in pages", function()
    for i = 1, 4 do
      call("POST", "/storage/v1/b?project=p", { name = "many-" .. i })
    end
    local names, token = {}, ""
    repeat
      local path = "/storage/v1/b?project=p&prefix=many&maxResults=3&pageToken=" .. token
      local _, page = call("GET", path)
      for _, item in ipairs(page.items) do
        names[#names + 1] = item.name
      end
      token = page.nextPageToken
    until not token
    assert.are.same({ "many-1", "many-2", "many-3", "many-4" }, names)
    assert.is_nil(select(2, call("GET", "/storage/v1/b?project=p&prefix=none")).items)
  end)

  it("keeps what is said of an object, and sends it as headers", function()
    local body = '--X\r\n\r\n{"name":"a","contentLanguage":"pt","contentDisposition":"attachment","storageClass":'
      .. '"NEARLINE","cacheControl":"no-store"}\r\n--X\r\nContent-Type: text/plain\r\n\r\nhello\r\n--X--'
    local headers = { ["Content-Type"] = "multipart/related; boundary=X" }
    local status, object = call("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart", body, headers)
    assert.are.equal(200, status, json.encode(object))
    assert.are.equal("NEARLINE", object.storageClass)
    local _, _, sent = call("GET", "/storage/v1/b/bucket/o/a?alt=media")
    assert.are.equal("pt", sent["Content-Language"])
    assert.are.equal("attachment", sent["Content-Disposition"])
    assert.are.equal("no-store", sent["Cache-Control"])
    local change = { storageClass = "STANDARD", cacheControl = json.null }
    _, object = call("PATCH", "/storage/v1/b/bucket/o/a", change)
    assert.are.equal("NEARLINE", object.storageClass)
    assert.is_nil(object.cacheControl)
    local path = "/storage/v1/b/bucket/o/a/rewriteTo/b/bucket/o/a"
    assert.are.equal("STANDARD", select(2, call("POST", path, change)).resource.storageClass)
    assert.are.equal(400, (call("PATCH", "/storage/v1/b/bucket/o/a", { contentType = 1 })))
    assert.are.equal(400, (call("PATCH", "/storage/v1/b/bucket/o/a", { metadata = { a = 1 } })))
  end)

  it("sends an object to its end, though it is deleted meanwhile, and then removes the bytes", function()
    upload("a", "hello")
    local request = { method = "GET", path = "/storage/v1/b/bucket/o/a", query = { alt = "media" } }
    request.headers, request.body = header_table(), ""
    local answer = service:handle(request)
    assert.are.equal(204, (call("DELETE", "/storage/v1/b/bucket/o/a")))
    assert.are.equal(404, (call("GET", "/storage/v1/b/bucket/o/a")))
    local parts = {}
    answer.body(function(chunk)
      parts[#parts + 1] = chunk
    end)
    assert.are.equal("hello", table.concat(parts))
    assert.are.same({}, fs.list(directory))
  end)

  it("makes a bucket for an upload only when told to", function()
    service = storage.new(project.world, directory, { make_buckets = true })
    assert.are.equal(404, (call("GET", "/storage/v1/b/fresh/o")))
    assert.are.equal(200, (call("POST", "/upload/storage/v1/b/fresh/o?uploadType=media&name=a", "x")))
    assert.are.equal(200, (call("GET", "/storage/v1/b/fresh/o")))
  end)

  it("honours preconditions", function()
    local _, first = upload("a", "1", "&ifGenerationMatch=0")
    local status, body = upload("a", "2", "&ifGenerationMatch=0")
    assert.are.equal(412, status)
    assert.are.equal("conditionNotMet", body.error.errors[1].reason)
    local second
    status, second = upload("a", "2", "&ifGenerationMatch=" .. first.generation)
    assert.are.equal(200, status)
    assert.is_true(tonumber(second.generation) > tonumber(first.generation))
    assert.are.equal(
      304,
      (call("GET", "/storage/v1/b/bucket/o/a?ifGenerationNotMatch=" .. second.generation))
    )
    assert.are.equal(412, (call("DELETE", "/storage/v1/b/bucket/o/a?ifMetagenerationMatch=2")))
    assert.are.equal(404, (call("GET", "/storage/v1/b/bucket/o/a?generation=" .. first.generation)))
    assert.are.equal(
      204,
      (call("DELETE", "/storage/v1/b/bucket/o/a?ifGenerationMatch=" .. second.generation))
    )
    assert.are.equal(400, (upload("a", "1", "&ifGenerationMatch=x")))
  end)

  it("gives ranges", function()
    upload("a", "0123456789")
    local function get(range)
      local status, bytes, headers =
        call("GET", "/storage/v1/b/bucket/o/a?alt=media", nil, { Range = "bytes=" .. range })
      return status, bytes, headers["Content-Range"]
    end
    assert.are.same({ 206, "234", "bytes 2-4/10" }, { get("2-4") })
    assert.are.same({ 206, "89", "bytes 8-9/10" }, { get("8-") })
    assert.are.same({ 206, "789", "bytes 7-9/10" }, { get("-3") })
    assert.are.same({ 206, "9", "bytes 9-9/10" }, { get("9-99") })
    assert.are.equal(416, (get("10-")))
    assert.are.equal(416, (get("5-4")))
  end)

  it("lists with prefix, delimiter, offsets, glob and pages", function()
    for _, name in ipairs({ "a/1", "a/2", "a/b/3", "c", "d/" }) do
      upload(name:gsub("/", "%%2F"), name)
    end
    local function list(query)
      local _, body = call("GET", "/storage/v1/b/bucket/o?" .. query)
      local names = {}
      for i, item in ipairs(body.items or {}) do
        names[i] = item.name
      end
      return names, body.prefixes, body.nextPageToken
    end
    assert.are.same({ "a/1", "a/2", "a/b/3", "c", "d/" }, (list("")))
    assert.are.same({ "a/1", "a/2", "a/b/3" }, (list("prefix=a/")))
    local names, prefixes = list("delimiter=/")
    assert.are.same({ "c" }, names)
    assert.are.same({ "a/", "d/" }, prefixes)
    names, prefixes = list("prefix=a/&delimiter=/")
    assert.are.same({ "a/1", "a/2" }, names)
    assert.are.same({ "a/b/" }, prefixes)
    names = list("delimiter=/&includeTrailingDelimiter=true")
    assert.are.same({ "c", "d/" }, names)
    assert.are.same({ "a/2", "a/b/3" }, (list("startOffset=a/2&endOffset=c")))
    assert.are.same({ "a/1", "a/2" }, (list("matchGlob=a/*")))
    assert.are.same({ "a/1", "a/2", "a/b/3" }, (list("matchGlob=a/**")))
    local seen, token = {}, ""
    repeat
      local page, more, next_token = list("delimiter=/&maxResults=1&pageToken=" .. token)
      seen[#seen + 1] = page[1] or more[1]
      token = next_token
    until not token
    assert.are.same({ "a/", "c", "d/" }, seen)
  end)

  it("takes metadata and bytes in one multipart body, and checks the sums in it", function()
    local function multipart(metadata, data)
      local head = "--b\r\nContent-Type: application/json\r\n\r\n" .. json.encode(metadata)
      local body = head .. "\r\n--b\r\nContent-Type: text/plain\r\n\r\n" .. data .. "\r\n--b--"
      return call(
        "POST",
        "/upload/storage/v1/b/bucket/o?uploadType=multipart",
        body,
        { ["Content-Type"] = 'multipart/related; boundary="b"' }
      )
    end
    local status, object = multipart({ name = "m", metadata = { k = "v" }, crc32c = "mnG7TA==" }, "hello")
    assert.are.equal(200, status)
    assert.are.same({ k = "v" }, object.metadata)
    assert.are.equal("text/plain", object.contentType)
    local body
    status, body = multipart({ name = "m", md5Hash = "AAAA" }, "hello")
    assert.are.equal(400, status)
    assert.is_truthy(body.error.message:find("doesn't match calculated MD5 hash", 1, true))
    status, object = multipart({ name = "m" }, "--b and \r\n--x stay")
    assert.are.equal(200, status)
    assert.are.equal(tostring(#"--b and \r\n--x stay"), object.size)
    assert.are.equal(400, (call("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart", "x")))
  end)

  describe("in a resumable upload", function()
    local address

    local function begin(query, headers)
      local status, _, answer = call(
        "POST",
        "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=big" .. (query or ""),
        "",
        headers
      )
      assert.are.equal(200, status)
      address = answer.Location
    end

    local function put(data, range, headers)
      headers = headers or {}
      headers["Content-Range"] = range and "bytes " .. range
      local status, body, answer = call("PUT", address, data, headers)
      return status, answer.Range, body
    end

    local data = ("0123456789abcdef"):rep(64 * KIB) -- 1 MiB

    it("stores chunks in order and finishes with the object", function()
      begin()
      local half = 512 * KIB
      local status, range = put(data:sub(1, half), ("0-%d/*"):format(half - 1))
      assert.are.equal(308, status)
      assert.are.equal("bytes=0-524287", range)
      local object, _
      status, _, object = put(data:sub(half + 1), ("%d-%d/%d"):format(half, #data - 1, #data))
      assert.are.equal(200, status)
      assert.are.equal(tostring(#data), object.size)
      assert.are.equal(crypto.base64(crypto.digest("crc32c", data)), object.crc32c)
      local bytes
      _, bytes = call("GET", "/storage/v1/b/bucket/o/big?alt=media")
      assert.is_true(bytes == data)
      -- Asked again, it is still that object.
      assert.are.equal(200, (put("", ("*/%d"):format(#data))))
    end)

    it("tells what is stored and goes on from there after a loss", function()
      begin()
      assert.are.equal(308, (put("", "*/*")))
      put(data:sub(1, 256 * KIB), ("0-%d/*"):format(256 * KIB - 1))
      local status, range = put("", ("*/%d"):format(#data))
      assert.are.equal(308, status)
      assert.are.equal("bytes=0-262143", range)
      -- The question has not ended it; a chunk that begins before that point is stored from there on.
      status, range = put(data:sub(1, 512 * KIB), ("0-%d/%d"):format(512 * KIB - 1, #data))
      assert.are.equal(308, status)
      assert.are.equal("bytes=0-524287", range)
      -- One that begins beyond it stores nothing.
      status, range = put(data:sub(768 * KIB + 1), ("%d-%d/%d"):format(768 * KIB, #data - 1, #data))
      assert.are.equal(308, status)
      assert.are.equal("bytes=0-524287", range)
      status = put(data:sub(512 * KIB + 1), ("%d-%d/%d"):format(512 * KIB, #data - 1, #data))
      assert.are.equal(200, status)
      local _, bytes = call("GET", "/storage/v1/b/bucket/o/big?alt=media")
      assert.is_true(bytes == data)
    end)

    it("stores of a chunk that is not the last only whole quarters of a mebibyte", function()
      begin()
      local status, range = put(data:sub(1, 300 * KIB), ("0-%d/*"):format(300 * KIB - 1))
      assert.are.equal(308, status)
      assert.are.equal("bytes=0-262143", range)
    end)

    it("checks the sum that comes with the last chunk", function()
      begin()
      local status = put("hello", "0-4/5", { ["X-Goog-Hash"] = "crc32c=AAAAAA==" })
      assert.are.equal(400, status)
      assert.are.equal(404, (call("GET", "/storage/v1/b/bucket/o/big")))
    end)

    it("can say 308 as 200, for clients that would follow it", function()
      begin()
      local status, _, headers = call("PUT", address, "", {
        ["Content-Range"] = "bytes */*",
        ["X-Guploader-No-308"] = "yes",
      })
      assert.are.equal(200, status)
      assert.are.equal("308", headers["X-Http-Status-Code-Override"])
    end)

    it("takes everything at once, and nothing at all", function()
      begin()
      assert.are.equal(200, (put("hello")))
      begin()
      local status, _, object = put("", "*/0")
      assert.are.equal(200, status)
      assert.are.equal("0", object.size)
    end)

    it("refuses chunks that do not fit", function()
      begin()
      assert.are.equal(400, (put("hello", "0-9/10")))
      assert.are.equal(400, (put("hello", "nonsense")))
      put(data:sub(1, 256 * KIB), ("0-%d/%d"):format(256 * KIB - 1, #data))
      assert.are.equal(400, (put("x", ("%d-%d/%d"):format(256 * KIB, 256 * KIB, 300 * KIB))))
      address = address:gsub("upload_id=%x+", "upload_id=00")
      assert.are.equal(404, (put("hello", "0-4/5")))
    end)

    it("is cancelled with 499 and gone after a week", function()
      begin()
      assert.are.equal(499, (call("DELETE", address)))
      assert.are.equal(404, (put("", "*/*")))
      begin()
      project.clock:advance(8 * 86400)
      assert.are.equal(404, (put("", "*/*")))
    end)

    it("checks the condition again when it ends", function()
      begin("&ifGenerationMatch=0")
      upload("big", "meanwhile")
      assert.are.equal(412, (put("hello", "0-4/5")))
    end)
  end)

  it("composes, copies, rewrites and patches", function()
    upload("a", "hello ")
    upload("b", "world")
    local status, object = call(
      "POST",
      "/storage/v1/b/bucket/o/ab/compose",
      { sourceObjects = { { name = "a" }, { name = "b" } } }
    )
    assert.are.equal(200, status)
    assert.is_nil(object.md5Hash)
    assert.are.equal(2, object.componentCount)
    assert.are.equal(crypto.base64(crypto.digest("crc32c", "hello world")), object.crc32c)
    local rewritten
    status, rewritten = call("POST", "/storage/v1/b/bucket/o/ab/rewriteTo/b/bucket/o/dir%2Fcopy")
    assert.are.equal(200, status)
    assert.is_true(rewritten.done)
    local _, bytes = call("GET", "/storage/v1/b/bucket/o/dir%2Fcopy?alt=media")
    assert.are.equal("hello world", bytes)
    status, object =
      call("PATCH", "/storage/v1/b/bucket/o/a", { metadata = { k = "v" }, contentType = "x/y" })
    assert.are.equal(200, status)
    assert.are.equal("2", object.metageneration)
    assert.are.equal("x/y", object.contentType)
    assert.are.equal(
      404,
      (call("POST", "/storage/v1/b/bucket/o/c/compose", { sourceObjects = { { name = "z" } } }))
    )
    assert.are.equal(400, (call("POST", "/storage/v1/b/bucket/o/c/compose", {})))
  end)

  it("fails where it is asked to, by the method's id", function()
    upload("a", "1")
    project.world.faults:add({ kind = "error", method = "storage.objects.get", status = "UNAVAILABLE" })
    assert.are.equal(200, (call("GET", "/storage/v1/b/bucket/o")))
    local status, body = call("GET", "/storage/v1/b/bucket/o/a")
    assert.are.equal(503, status)
    assert.are.equal("backendError", body.error.errors[1].reason)
    assert.are.equal(200, (call("GET", "/storage/v1/b/bucket/o/a")))
  end)

  it("answers with the fields that are asked for", function()
    upload("a", "1")
    local _, body = call("GET", "/storage/v1/b/bucket/o?fields=items/name")
    assert.are.same({ items = { { name = "a" } } }, body)
  end)
end)
