local tar = require("ciranda.fleet.tar")

--- Writes an archive of the entries and has tar(1) list or unpack it.
local function with_archive(entries, command)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  for _, entry in ipairs(entries) do
    local data = entry.data or ""
    entry.size = #data
    file:write(tar.header(entry), data, tar.padding(#data))
  end
  file:write(tar.trailer())
  file:close()
  local pipe = io.popen((command:gsub("ARCHIVE", path)) .. " 2>&1; echo status=$?")
  local output = pipe:read("a")
  pipe:close()
  os.remove(path)
  return output
end

local function entry(path, fields)
  local made = { path = path, type = "file", mode = 420, mtime = 1700000000, size = 0 }
  for key, value in pairs(fields or {}) do
    made[key] = value
  end
  return made
end

describe("fleet.tar", function()
  it("writes what tar(1) reads: files, modes, times, directories, links", function()
    local listing = with_archive({
      entry("dir", { type = "directory", mode = 493 }),
      entry("dir/run.sh", { mode = 493, data = "#!/bin/sh\n" }),
      entry("empty"),
      entry("link", { type = "link", mode = 511, target = "dir/run.sh" }),
    }, "TZ=UTC tar -tvf ARCHIVE")
    assert.matches("drwxr%-xr%-x .- 0 2023%-11%-14 22:13 dir/", listing)
    assert.matches("%-rwxr%-xr%-x .- 10 2023%-11%-14 22:13 dir/run.sh", listing)
    assert.matches("%-rw%-r%-%-r%-%- .- 0 2023%-11%-14 22:13 empty", listing)
    assert.matches("link %-> dir/run.sh", listing)
    assert.matches("status=0", listing)
  end)

  it("keeps the bytes, whatever their number", function()
    for _, size in ipairs({ 1, 511, 512, 513, 100000 }) do
      local data = ("\0\1\255x"):rep(size // 4 + 1):sub(1, size)
      local expected = os.tmpname()
      local file = assert(io.open(expected, "wb"))
      file:write(data)
      file:close()
      local output =
        with_archive({ entry("data", { data = data }) }, "tar -xOf ARCHIVE data | cmp - " .. expected)
      os.remove(expected)
      assert.equal("status=0\n", output)
    end
  end)

  it("takes paths and targets that ustar cannot hold", function()
    local deep = ("directory-of-thirty-characters/"):rep(5) .. "file"
    local long = ("n"):rep(180)
    local target = ("t"):rep(150)
    local listing = with_archive({
      entry(deep, { data = "x" }),
      entry(long, { data = "y" }),
      entry("l", { type = "link", target = target }),
      entry(("d"):rep(120), { type = "directory" }),
    }, "tar -tvf ARCHIVE")
    assert.matches(deep, listing, 1, true)
    assert.matches(long, listing, 1, true)
    assert.matches("l -> " .. target, listing, 1, true)
    assert.matches(("d"):rep(120) .. "/", listing, 1, true)
    assert.matches("status=0", listing)
  end)

  it("takes a size of 8 GiB and more in a pax header", function()
    local header = tar.header(entry("huge", { size = 9 * 2 ^ 30 | 0 }))
    assert.matches("19 size=9663676416\n", header, 1, true)
  end)

  it("takes names that are not ASCII", function()
    local listing =
      with_archive({ entry("modèle-é.py", { data = "x" }) }, "tar --quoting-style=literal -tf ARCHIVE")
    assert.matches("modèle-é.py", listing, 1, true)
  end)
end)
