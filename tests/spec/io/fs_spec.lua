local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local task = require("ciranda.task")
local uv = require("luv")

local octal = function(text)
  return tonumber(text, 8)
end

local function refused(code, pattern, fn, ...)
  local ok, e = pcall(fn, ...)
  assert.is_false(ok)
  assert.is_true(errors.is(e, code), tostring(e))
  assert.matches(pattern, tostring(e))
  return e
end

--- Every test runs in a task and outside of one, with a directory of its own.
local function both(name, fn)
  local function with_directory()
    local directory = fs.tempdir("ciranda-spec-")
    local _ <close> = setmetatable({}, {
      __close = function()
        fs.remove_tree(directory)
      end,
    })
    fn(directory)
  end
  it(name .. " (blocking)", with_directory)
  it(name .. " (in a task)", function()
    task.run(with_directory)
  end)
end

describe("paths", function()
  it("leaves out of a listing what is gone before it has been looked at", function()
    -- As /proc does with a process that ends: its name is told, its type no more.
    local directory = fs.tempdir("ciranda-fs-spec")
    fs.write(directory .. "/stays", "")
    fs.write(directory .. "/goes", "")
    local next_entry = uv.fs_scandir_next
    uv.fs_scandir_next = function(scan)
      local name = next_entry(scan)
      if name == "goes" then
        os.remove(directory .. "/goes")
      end
      return name, "unknown"
    end
    local ok, entries = pcall(fs.list, directory)
    uv.fs_scandir_next = next_entry
    fs.remove_tree(directory)
    assert.is_true(ok, tostring(entries))
    assert.same({ { name = "stays", type = "file" } }, entries)
  end)

  it("are joined and taken apart", function()
    assert.equal("a/b", fs.join("a", "b"))
    assert.equal("a/b", fs.join("a/", "", "b"))
    assert.equal("/b", fs.join("a", "/b"))
    assert.equal("/a", fs.join("/", "a"))
    for path, parts in pairs({
      ["/a/b"] = { "/a", "b" },
      ["/a/b/"] = { "/a", "b" },
      ["b"] = { ".", "b" },
      ["/a"] = { "/", "a" },
    }) do
      assert.same(parts, { fs.dirname(path), fs.basename(path) })
    end
    assert.equal("/", fs.dirname("/"))
  end)
end)

describe("fs.write", function()
  both("writes what is read again, nothing included", function(directory)
    local path = fs.join(directory, "file")
    for _, data in ipairs({ "text\n", "", ("\0\255x"):rep(100000) }) do
      fs.write(path, data)
      assert.equal(data, fs.read(path))
      assert.equal(#data, fs.stat(path).size)
    end
  end)

  both("replaces as a whole and leaves no temporary file", function(directory)
    local path = fs.join(directory, "file")
    fs.write(path, "old")
    local before = fs.stat(path).ino
    local reader <close> = fs.open(path)
    fs.write(path, "new")
    assert.equal("old", reader:read())
    assert.not_equal(before, fs.stat(path).ino)
    assert.same({ { name = "file", type = "file" } }, fs.list(directory))
  end)

  both("keeps the mode of the old file, and takes one", function(directory)
    local path = fs.join(directory, "file")
    fs.write(path, "x", { mode = octal("600") })
    assert.equal(octal("600"), fs.stat(path).mode)
    fs.write(path, "y")
    assert.equal(octal("600"), fs.stat(path).mode)
    fs.write(path, "z", { mode = octal("666"), sync = false })
    assert.equal(octal("666"), fs.stat(path).mode)
  end)

  both("writes through a symbolic link, also a chain of them", function(directory)
    local target = fs.join(directory, "target")
    fs.write(target, "old")
    fs.symlink("target", fs.join(directory, "link"))
    fs.symlink("link", fs.join(directory, "chain"))
    fs.write(fs.join(directory, "chain"), "new")
    assert.equal("new", fs.read(target))
    assert.equal("link", fs.lstat(fs.join(directory, "chain")).type)
    assert.equal("link", fs.readlink(fs.join(directory, "chain")))
  end)

  both("fails cleanly: no directory, a directory in its place", function(directory)
    refused(
      "not_found",
      "none/file: no such file or directory %(ENOENT%)",
      fs.write,
      directory .. "/none/file",
      "x"
    )
    refused("invalid", "is a directory", fs.write, directory, "x")
    assert.same({}, fs.list(directory))
  end)

  it("writes to a device instead of replacing it", function()
    fs.write("/dev/null", "x")
    assert.equal("char", fs.stat("/dev/null").type)
  end)

  it("refuses unknown options and data that is no string", function()
    refused("misuse", "unknown option 'moed'", fs.write, "/nowhere/x", "x", { moed = 1 })
    refused("misuse", "a string expected, got nil", fs.write, "/nowhere/x")
  end)

  it("reports a full disk, and keeps the old file", function()
    if not fs.exists("/dev/full") then
      pending("this machine has no /dev/full")
      return
    end
    refused("no_space", "no space left on device", fs.write, "/dev/full", "x")
  end)
end)

describe("fs.read", function()
  both("reads files whose size says 0", function()
    assert.matches("^Name:", fs.read("/proc/self/status"))
  end)

  both("stops at its limit", function(directory)
    local path = fs.join(directory, "file")
    fs.write(path, ("x"):rep(1000))
    assert.equal(1000, #fs.read(path, 1000))
    refused("invalid", "more than the 999 bytes allowed", fs.read, path, 999)
  end)

  both("names operation and path", function(directory)
    local e = refused("not_found", "no such file or directory", fs.read, directory .. "/none")
    assert.equal(directory .. "/none", e.target)
    assert.equal("ENOENT", e.errno)
    refused("invalid", "EISDIR", fs.read, directory)
  end)

  it("refuses paths that are none, at the caller's line", function()
    for _, path in ipairs({ "", "a\0b", 5, {} }) do
      local e = refused("misuse", "a path expected", function()
        fs.read(path)
      end)
      assert.matches("fs_spec%.lua:%d+:", e.message)
    end
  end)
end)

describe("an appender", function()
  both("adds records that do not mix", function(directory)
    local path = fs.join(directory, "journal")
    fs.write(path, "first\n")
    local appender <close> = fs.appender(path)
    if task.current() then
      task.map({ 1, 2, 3, 4, 5, 6, 7, 8 }, function(index)
        appender:append(("%d"):format(index):rep(5000) .. "\n")
      end)
      local seen = 0
      for line in fs.read(path):gmatch("[^\n]+") do
        if line ~= "first" then
          assert.equal(5000, #line)
          assert.equal(line:sub(1, 1):rep(5000), line)
          seen = seen + 1
        end
      end
      assert.equal(8, seen)
    else
      appender:append("second\n")
      assert.equal("first\nsecond\n", fs.read(path))
    end
  end)

  it("finishes a record although its task is cancelled", function()
    task.run(function()
      local directory = fs.tempdir()
      local _ <close> = setmetatable({}, {
        __close = function()
          fs.remove_tree(directory)
        end,
      })
      local path = fs.join(directory, "journal")
      local appender <close> = fs.appender(path)
      local scope <close> = task.scope()
      local child = scope:spawn(function()
        appender:append("whole\n")
        task.sleep(60)
      end)
      task.yield()
      child:cancel()
      pcall(child.wait, child)
      assert.equal("whole\n", fs.read(path))
    end)
  end)

  both("is of no use once closed", function(directory)
    local appender = fs.appender(fs.join(directory, "journal"))
    appender:close()
    appender:close()
    refused("misuse", "is closed", appender.append, appender, "x")
  end)
end)

describe("files and directories", function()
  both("are made, listed, copied, renamed, linked and removed", function(directory)
    local function at(name)
      return fs.join(directory, name)
    end
    fs.mkdir(at("d"))
    refused("exists", "EEXIST", fs.mkdir, at("d"))
    refused("not_found", "ENOENT", fs.stat, at("none"))
    assert.is_nil(fs.stat(at("none"), { missing_ok = true }))
    assert.is_nil(fs.lstat(at("none"), { missing_ok = true }))
    refused("invalid", "ENAMETOOLONG", fs.stat, at(("x"):rep(300)), { missing_ok = true })
    fs.write(at("d/f"), "x", { mode = octal("755") })
    fs.copy(at("d/f"), at("d/g"))
    assert.equal(octal("755"), fs.stat(at("d/g")).mode)
    fs.rename(at("d/g"), at("d/h"))
    fs.symlink("nowhere", at("d/l"))
    fs.append(at("d/h"), "y")
    fs.append(at("d/h"), "z")
    assert.equal("xyz", fs.read(at("d/h")))
    assert.same({
      { name = "f", type = "file" },
      { name = "h", type = "file" },
      { name = "l", type = "link" },
    }, fs.list(at("d")))
    fs.chmod(at("d/f"), octal("400"))
    assert.equal(octal("400"), fs.stat(at("d/f")).mode)
    assert.equal("file", fs.exists(at("d/f")))
    assert.is_nil(fs.exists(at("d/l")))
    assert.equal("link", fs.lstat(at("d/l")).type)
    assert.equal(fs.realpath(at("d")), fs.realpath(at("d/../d")))
    assert.is_true(fs.remove(at("d/f")))
    refused("not_found", "ENOENT", fs.remove, at("d/f"))
    assert.is_false(fs.remove(at("d/f"), { missing_ok = true }))
  end)

  both("have times in seconds and nanoseconds", function(directory)
    local path = fs.join(directory, "f")
    fs.write(path, "x")
    local stat = fs.stat(path)
    assert.is_true(math.abs(stat.mtime - os.time()) < 60)
    assert.equal("integer", math.type(stat.mtime_ns))
    assert.equal(stat.mtime_ns // 1000000000, math.floor(stat.mtime))
  end)

  both("mkdir_p makes what is missing, and says what is in the way", function(directory)
    fs.mkdir_p(fs.join(directory, "a/b/c"))
    fs.mkdir_p(fs.join(directory, "a/b/c"))
    fs.mkdir_p(directory)
    assert.equal("directory", fs.exists(fs.join(directory, "a/b/c")))
    fs.write(fs.join(directory, "file"), "x")
    refused("exists", "EEXIST", fs.mkdir_p, fs.join(directory, "file"))
    refused("not_found", "ENOTDIR", fs.mkdir_p, fs.join(directory, "file/below"))
    -- Nothing can be made there, although all that is above exists.
    refused("not_found", "ENOENT", fs.mkdir_p, "/proc/ciranda/below")
  end)

  both("walk visits a directory before what is in it, and can stay out of one", function(directory)
    fs.mkdir_p(fs.join(directory, "b/inner"))
    fs.write(fs.join(directory, "a"), "x")
    fs.write(fs.join(directory, "b/inner/z"), "x")
    fs.symlink("/", fs.join(directory, "c"))
    local seen = {}
    for path, entry, relative in fs.walk(directory) do
      assert.equal(fs.join(directory, relative), path)
      seen[#seen + 1] = relative .. " " .. entry.type
    end
    assert.same({ "a file", "b directory", "b/inner directory", "b/inner/z file", "c link" }, seen)
    seen = {}
    for _, _, relative in
      fs.walk(directory, function(_, entry)
        return entry.name ~= "b"
      end)
    do
      seen[#seen + 1] = relative
    end
    assert.same({ "a", "b", "c" }, seen)
  end)

  both("remove_tree removes links, never what they lead to", function(directory)
    local outside = fs.join(directory, "outside")
    fs.mkdir(outside)
    fs.write(fs.join(outside, "precious"), "x")
    local tree = fs.join(directory, "tree")
    fs.mkdir_p(fs.join(tree, "a/b"))
    fs.symlink(outside, fs.join(tree, "a/link"))
    fs.symlink("dangling", fs.join(tree, "a/b/dangling"))
    fs.symlink(outside, fs.join(directory, "top"))
    assert.is_true(fs.remove_tree(tree))
    assert.is_nil(fs.exists(tree))
    assert.is_true(fs.remove_tree(fs.join(directory, "top")))
    assert.equal("x", fs.read(fs.join(outside, "precious")))
    assert.is_false(fs.remove_tree(tree))
  end)

  both("tempdir is private and new", function(directory)
    local one, two = fs.tempdir(), fs.tempdir()
    assert.not_equal(one, two)
    assert.equal(octal("700"), fs.stat(one).mode)
    assert.same({}, fs.list(one))
    fs.remove_tree(one)
    fs.remove_tree(two)
    assert.is_string(directory)
  end)
end)

describe("an open file", function()
  both("reads and writes at places, is cut and synced", function(directory)
    local file <close> = fs.open(fs.join(directory, "f"), "w+")
    file:write("hello world")
    file:write("J", 0)
    assert.equal("Jello", file:read(5, 0))
    file:truncate(5)
    file:sync()
    assert.equal(5, file:stat().size)
    assert.equal("", file:read(10, 5))
  end)

  both("is refused when it must not exist", function(directory)
    local path = fs.join(directory, "f")
    fs.write(path, "x")
    refused("exists", "EEXIST", fs.open, path, "wx")
    refused("misuse", "unknown flags", fs.open, path, "q")
  end)

  it("is closed even when its task is cancelled just then", function()
    task.run(function()
      local function descriptors()
        return #fs.list("/proc/self/fd")
      end
      collectgarbage() -- a file that nobody has closed must not be closed meanwhile
      local before = descriptors()
      do
        local scope <close> = task.scope()
        for _ = 1, 20 do
          scope:spawn(function()
            while true do
              local file <close> = fs.open("/proc/self/status")
              file:read()
            end
          end)
        end
        task.sleep(0.005)
        scope:cancel()
      end
      assert.equal(before, descriptors())
    end)
  end)
end)
