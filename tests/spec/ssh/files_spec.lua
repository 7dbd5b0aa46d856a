local crypto = require("ciranda.io.crypto")
local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local ssh = require("ciranda.ssh")
local task = require("ciranda.task")
local uv = require("luv")

local support = dofile("tests/spec/ssh/support.lua")
local fails = support.fails

--- Bytes that are not all the same, and the same each time.
local block = {}
for index = 0, 4095 do
  block[index + 1] = string.char((index * 7 + index // 256) % 256)
end
block = table.concat(block)

local function pattern(size)
  return block:rep(size // #block + 1):sub(1, size)
end

local function octal(text)
  return tonumber(text, 8)
end

describe("files over SFTP", function()
  local server, connection

  setup(function()
    server = support.server()
  end)

  teardown(function()
    server:stop()
    support.clean()
  end)

  before_each(function()
    connection = ssh.connect(server:options())
  end)

  after_each(function()
    connection:close()
  end)

  local function there(name)
    return server.home .. "/" .. name
  end

  --- The names in the login directory that a transfer might have left.
  local function leftovers()
    local found = {}
    for _, entry in ipairs(fs.list(server.home)) do
      if entry.name:find("part", 1, true) then
        found[#found + 1] = entry.name
      end
    end
    return found
  end

  it("go there and come back, of any size", function()
    for _, size in ipairs({ 0, 1, 32767, 32768, 32769, 5 * 1024 * 1024 + 3 }) do
      local data = pattern(size)
      connection:put({ data = data }, "sized")
      assert.are.equal(size, fs.stat(there("sized")).size)
      assert.is_true(fs.read(there("sized")) == data)
      assert.is_true(connection:get("sized") == data)
    end
    assert.are.same({}, leftovers())
  end)

  it("keep the mode of a local file, or have the one that is asked for, whatever the umask", function()
    local path = support.write("script", "#!/bin/sh\n", octal("755"))
    connection:put(path, "script")
    assert.are.equal(octal("755"), fs.stat(there("script")).mode)
    connection:put(path, "secret", { mode = octal("600") })
    assert.are.equal(octal("600"), fs.stat(there("secret")).mode)
    connection:put({ data = "x" }, "open", { mode = octal("666") })
    assert.are.equal(octal("666"), fs.stat(there("open")).mode)
    local target = support.path("back")
    connection:get("script", target)
    assert.are.equal(octal("755"), fs.stat(target).mode)
  end)

  it("keep their time when asked", function()
    local path = support.write("old", "x")
    assert(uv.fs_utime(path, 1000000000, 1000000000))
    connection:put(path, "old", { times = true })
    assert.are.equal(1000000000, fs.stat(there("old")).mtime)
    local target = support.path("old")
    connection:get("old", target, { times = true })
    assert.are.equal(1000000000, fs.stat(target).mtime)
    connection:put(path, "new")
    assert.is_true(fs.stat(there("new")).mtime > 1700000000)
  end)

  it("replace what was there, whole", function()
    connection:put({ data = pattern(100000) }, "same")
    connection:put({ data = "short" }, "same")
    assert.are.equal("short", connection:get("same"))
    local target = support.write("target", pattern(100000))
    connection:get("same", target)
    assert.are.equal("short", fs.read(target))
  end)

  it("appear only when they are complete", function()
    local seen = {}
    connection:put({ data = pattern(3000000) }, "slow", {
      progress = function(done, total)
        seen[#seen + 1] = { done, total, fs.exists(there("slow")) }
      end,
    })
    assert.is_nil(seen[1][3])
    assert.are.same({ 3000000, 3000000 }, { seen[#seen][1], seen[#seen][2] })
    assert.are.equal("file", fs.exists(there("slow")))
  end)

  it("leave nothing when the transfer is cancelled", function()
    local scope <close> = task.scope()
    local going = scope:spawn(function()
      connection:put({ data = pattern(20000000) }, "never", {
        progress = function(done)
          if done > 1000000 then
            task.sleep(10)
          end
        end,
      })
    end)
    assert.is_true(support.wait_for(function()
      return #leftovers() > 0
    end))
    going:cancel("enough")
    pcall(going.wait, going)
    assert.is_nil(fs.exists(there("never")))
    assert.are.same({}, leftovers())
  end)

  it("are gone on with where a transfer has stopped", function()
    local data = pattern(2000000)
    local path = support.write("big", data)
    -- What a broken transfer has left.
    connection:put({ data = data:sub(1, 1500000) }, ".big.part")
    local first
    connection:put(path, "big", {
      resume = true,
      progress = function(done)
        first = first or done
      end,
    })
    assert.are.equal(1500000, first)
    assert.is_true(fs.read(there("big")) == data)
    assert.are.same({}, leftovers())

    local target = support.path("big-back")
    local part = target:gsub("([^/]+)$", ".%1.part")
    fs.write(part, data:sub(1, 700000))
    first = nil
    connection:get("big", target, {
      resume = true,
      progress = function(done)
        first = first or done
      end,
    })
    assert.is_true(first > 700000 and first < 900000, tostring(first))
    assert.is_true(fs.read(target) == data)
    -- A part that is longer than the file is no part of it.
    connection:put({ data = data .. "more" }, ".big.part")
    connection:put(path, "big", { resume = true })
    assert.is_true(fs.read(there("big")) == data)
  end)

  it("go into directories that are made on the way", function()
    connection:put({ data = "deep" }, "a/b c/d/file", { parents = true })
    assert.are.equal("deep", fs.read(there("a/b c/d/file")))
    connection:put({ data = "deeper" }, "a/b c/d/file", { parents = true })
    assert.are.equal("deeper", connection:get("a/b c/d/file"))
  end)

  it("that are missing, forbidden or directories are errors with their path", function()
    local err = fails("not_found", nil, connection.get, connection, "no/such/file")
    assert.is_truthy(tostring(err):find("no/such/file", 1, true))
    assert.is_truthy(tostring(err):find(server.address, 1, true))
    fails("not_found", nil, connection.put, connection, { data = "x" }, "no/such/directory/file")
    fails("not_found", nil, connection.put, connection, "/nonexistent/local", "x")
    fails("invalid", nil, connection.put, connection, support.directory(), "x")
    connection:exec("mkdir directory")
    fails("invalid", nil, connection.get, connection, "directory")
    local ok, problem = pcall(connection.put, connection, { data = "x" }, "/proc/nothing")
    assert.is_false(ok)
    assert.is_true(errors.is(problem, "permission", "not_found", "failed"), tostring(problem))
    assert.are.same({}, leftovers())
  end)

  it("that are pipes or sockets are refused: opening one waits for somebody at its other end", function()
    local pipe, here = server.home .. "/pipe", support.path("pipe")
    process.run({ "mkfifo", "-m", "666", pipe, here }):check()
    local err = fails("invalid", nil, connection.get, connection, "pipe")
    assert.is_truthy(tostring(err):find("pipe is a pipe: it has no content", 1, true), tostring(err))
    fails("invalid", nil, connection.get, connection, "pipe", here .. ".got")
    assert.is_nil(fs.exists(here .. ".got"))
    fails("invalid", nil, connection.put, connection, here, "sent")
    fails("invalid", nil, connection.put, connection, { data = "x" }, "pipe", { direct = true })
    connection:put({ data = "x" }, "plain")
    fails("invalid", nil, connection.get, connection, "plain", here, { direct = true })
    -- What is moved into its place does not open it.
    connection:put({ data = "x" }, "pipe")
    assert.equal("x", connection:get("pipe"))
    connection:get("plain", here)
    assert.equal("x", fs.read(here))
  end)

  it("may be written to directly, as devices must", function()
    connection:put({ data = "gone" }, "/dev/null", { direct = true })
    connection:put({ data = "here" }, "direct", { direct = true })
    assert.are.equal("here", connection:get("direct"))
  end)

  it("of /proc, whose size says nothing, are read to their end", function()
    local text = connection:get("/proc/self/status")
    assert.is_truthy(text:find("Pid:", 1, true))
  end)

  it("in directories go there and come back, with links and modes", function()
    local source = support.path("tree")
    fs.mkdir_p(source .. "/empty")
    fs.mkdir_p(source .. "/one/two")
    for index = 1, 60 do
      fs.write(("%s/one/file%d"):format(source, index), ("content %d\n"):format(index):rep(index), {
        sync = false,
      })
    end
    fs.write(source .. "/one/two/run", "#!/bin/sh\n", { mode = octal("750") })
    fs.write(source .. "/skip", "x")
    fs.symlink("one/file1", source .. "/link")
    fs.symlink("/nonexistent", source .. "/dangling")
    local files
    local options = {
      exclude = function(relative)
        return relative == "skip"
      end,
      progress = function(count)
        files = count
      end,
    }
    connection:put_tree(source, "tree/copy", options)
    assert.are.equal(63, files)
    -- Again: what is there is replaced.
    connection:put_tree(source, "tree/copy", options)
    local back = support.path("tree-back")
    connection:get_tree("tree/copy", back)
    local function listing(root)
      local lines = {}
      for path, entry, relative in fs.walk(root) do
        local text = ""
        if entry.type == "file" then
          text = ("%o %s"):format(fs.stat(path).mode, crypto.hex(crypto.sha256(fs.read(path))))
        elseif entry.type == "link" then
          text = fs.readlink(path)
        end
        lines[#lines + 1] = ("%s %s %s"):format(relative, entry.type, text)
      end
      return table.concat(lines, "\n")
    end
    fs.remove(source .. "/skip")
    assert.are.equal(listing(source), listing(back))
  end)

  it("may be many at once on one client", function()
    local client <close> = connection:sftp()
    local numbers = {}
    for index = 1, 50 do
      numbers[index] = index
    end
    task.map(numbers, function(number)
      local data = pattern(number * 1000)
      connection:put({ data = data }, "many" .. number, { sftp = client })
      assert.is_true(connection:get("many" .. number, nil, { sftp = client }) == data)
    end)
  end)

  it("have names of any bytes", function()
    local name = "odd \n name \xff'\"$"
    connection:put({ data = "odd" }, name)
    assert.are.equal("odd", connection:get(name))
    local client <close> = connection:sftp()
    local found = false
    for _, entry in ipairs(client:list(".")) do
      found = found or entry.name == name
    end
    assert.is_true(found)
  end)

  it("can be asked about, moved and removed", function()
    local client <close> = connection:sftp()
    connection:put({ data = "12345" }, "thing", { sftp = client, mode = octal("640") })
    local stat = client:stat("thing")
    assert.are.same({ "file", 5, octal("640") }, { stat.type, stat.size, stat.mode })
    client:symlink("thing", "pointer")
    assert.are.equal("link", client:lstat("pointer").type)
    assert.are.equal("thing", client:readlink("pointer"))
    assert.are.equal(there("thing"), client:realpath("./pointer"))
    client:rename("thing", "other")
    assert.is_nil(client:exists("thing"))
    client:setstat("other", { mode = octal("400"), mtime = 1234567890 })
    assert.are.equal(1234567890, client:stat("other").mtime)
    client:remove("other")
    fails("not_found", nil, client.stat, client, "other")
    client:mkdir("fresh")
    fails("failed", nil, client.mkdir, client, "fresh")
    client:rmdir("fresh")
    local file <close> = client:open("appended", "wx")
    fails("failed", nil, client.open, client, "appended", "wx")
    assert.is_true(file:sync())
  end)

  it("end with an error when the connection breaks", function()
    local scope <close> = task.scope()
    local ok, err
    local going = scope:spawn(function()
      ok, err = pcall(connection.put, connection, { data = pattern(30000000) }, "broken", {
        progress = function(done)
          if done > 2000000 then
            for _, pid in ipairs(server:sessions()) do
              uv.kill(pid, "sigkill")
            end
          end
        end,
      })
    end)
    going:wait()
    assert.is_false(ok)
    assert.is_true(errors.is(err, "closed", "reset"), tostring(err))
  end)

  it("are not there when the server has no SFTP", function()
    local bare <close> = support.server({ config = { "Subsystem other /bin/true" } })
    local other <close> = ssh.connect(bare:options())
    local err = fails("refused", "exec", other.put, other, { data = "x" }, "x")
    assert.is_truthy(err.message:find("subsystem", 1, true))
  end)

  it("fail clearly where a login script prints something", function()
    local noisy <close> = support.server({
      config = { "Subsystem sftp /bin/echo Welcome to this machine, dear user of it" },
    })
    local other <close> = ssh.connect(noisy:options())
    local err = fails("protocol", nil, other.put, other, { data = "x" }, "x")
    assert.is_truthy(err.message:find("login script", 1, true), err.message)
  end)
end)
