local bundle = require("ciranda.run.bundle")
local uv = require("luv")

local function shell(command)
  local pipe = io.popen(command .. " 2>&1")
  local output = pipe:read("a")
  local ok = pipe:close()
  assert(ok, output)
  return output
end

describe("run.bundle", function()
  local root, archive_path

  before_each(function()
    root = uv.fs_mkdtemp("/tmp/bundle-XXXXXX")
    archive_path = root .. "/out.tar.gz"
    shell(("mkdir '%s/code'"):format(root))
  end)

  after_each(function()
    shell(("chmod -R u+rwX '%s'; rm -rf '%s'"):format(root, root))
  end)

  local function write(path, text)
    local whole = root .. "/code/" .. path
    shell(("mkdir -p '%s'"):format(whole:match("^(.*)/")))
    local file = assert(io.open(whole, "wb"))
    file:write(text)
    file:close()
  end

  local function make(all_files, directory)
    return bundle.make(directory or root .. "/code", { output = archive_path, all_files = all_files })
  end

  local function paths(manifest)
    local list = {}
    for place, entry in ipairs(manifest.entries) do
      list[place] = entry.path
    end
    return list
  end

  it("unpacks to the same tree: bytes, modes, links, empty directories, times", function()
    write("train.py", "print(1)\n")
    write("data/blob.bin", ("\0\255"):rep(700000))
    shell(("cd '%s/code' && chmod 755 train.py && ln -s data/blob.bin link && mkdir empty"):format(root))
    shell(("touch -d 2001-02-03T04:05:06 '%s/code/train.py'"):format(root))
    local manifest = make()
    assert.same({ "data", "data/blob.bin", "empty", "link", "train.py" }, paths(manifest))
    shell(("mkdir '%s/copy' && tar -xzf '%s' -C '%s/copy'"):format(root, archive_path, root))
    local list =
      "find . -printf '%%p %%y %%m %%l %%TY %%s\\n' | grep -v '^./empty d\\|^. d\\|^./data d' | sort"
    assert.equal(
      shell(("cd '%s/code' && " .. list):format(root)),
      shell(("cd '%s/copy' && " .. list):format(root))
    )
    shell(("diff -r '%s/code' '%s/copy'"):format(root, root))
    local sum = shell(("sha256sum < '%s/code/data/blob.bin'"):format(root)):match("^%x+")
    assert.equal(sum, manifest.entries[2].sha256)
    assert.equal(shell(("sha256sum < '%s'"):format(archive_path)):match("^%x+"), manifest.archive_sha256)
    assert.equal(uv.fs_stat(archive_path).size, manifest.archive_size)
  end)

  it("has a hash of what is in it and not of when it was written", function()
    write("a.py", "1")
    local first = make().sha256
    shell(("touch -d 2001-02-03 '%s/code/a.py'"):format(root))
    assert.equal(first, make().sha256)
    shell(("chmod 700 '%s/code/a.py'"):format(root))
    local other_mode = make().sha256
    assert.is_not.equal(first, other_mode)
    write("a.py", "2")
    assert.is_not.equal(other_mode, make().sha256)
  end)

  it("leaves out what .gitignore matches and what is called tmp, and says so", function()
    write(".gitignore", "*.log\n/out/\n!keep.log\n")
    write("src/.gitignore", "secret\n!*.log\n")
    write("a.log", "x")
    write("keep.log", "x")
    write("src/b.log", "x")
    write("src/secret", "x")
    write("out/big", ("x"):rep(5000))
    write("src/tmp/scratch", "x")
    write("tmp", "x")
    local manifest = make()
    assert.same({ ".gitignore", "keep.log", "src", "src/.gitignore", "src/b.log" }, paths(manifest))
    assert.same({ "a.log", "out/", "src/secret", "src/tmp/", "tmp" }, manifest.left_out.paths)
    assert.matches("^left out 5 files, 5.0 kB", bundle.left_out_line(manifest))
  end)

  it("takes everything but tmp when asked, and then has less to say", function()
    write(".gitignore", "*.log\n")
    write("a.log", "x")
    write("tmp/x", "x")
    local manifest = make(true)
    assert.same({ ".gitignore", "a.log" }, paths(manifest))
    assert.same({ "tmp/" }, manifest.left_out.paths)
    shell(("rm -r '%s/code/tmp'"):format(root))
    assert.is_nil(bundle.left_out_line(make(true)))
  end)

  it("obeys the rules of the repository around it, and keeps what git tracks", function()
    if not pcall(shell, "git --version") then
      pending("git is not installed")
      return
    end
    write(".gitignore", "*.bin\n/sub/ignored/\n")
    write("sub/a.bin", "x")
    write("sub/tracked.bin", "x")
    write("sub/ignored/deep/kept.txt", "x")
    write("sub/ignored/other.txt", "x")
    write("sub/b.py", "x")
    shell(
      ("cd '%s/code' && git init -q . && git add -f sub/tracked.bin sub/ignored/deep/kept.txt"):format(root)
    )
    local manifest = make(false, root .. "/code/sub")
    assert.same({ "b.py", "ignored/deep/kept.txt", "tracked.bin" }, paths(manifest))
    assert.same({ "a.bin", "ignored/other.txt" }, manifest.left_out.paths)
  end)

  it("finds a left-out path in a command, and nothing else", function()
    local manifest = { left_out = { paths = { "data/", "tmp/", "cfg/local.yaml" } } }
    local function named(command)
      return bundle.left_out_named(manifest, command)
    end
    assert.equal("data/train.bin", named("python3 t.py --in=data/train.bin"))
    assert.equal("./data", named("ls ./data"))
    assert.equal("cfg/local.yaml", named("python3 'cfg/local.yaml'"))
    assert.equal("tmp", named("cd tmp && ./run"))
    assert.is_nil(named("python3 t.py --out=/tmp/x --cfg cfg/main.yaml"))
    assert.is_nil(named("python3 mydata/x data2"))
    assert.is_nil(named("cat /data/x"))
  end)

  it("skips sockets and the like", function()
    write("a", "x")
    shell(("mkfifo '%s/code/pipe'"):format(root))
    local manifest = make()
    assert.same({ "a" }, paths(manifest))
    assert.same({ "pipe" }, manifest.skipped)
  end)

  it("names a file that may not be read", function()
    if uv.getuid() == 0 then
      pending("root may read everything")
      return
    end
    write("locked", "x")
    shell(("chmod 000 '%s/code/locked'"):format(root))
    local ok, e = pcall(make)
    assert.is_false(ok)
    assert.equal("permission", e.code)
    assert.matches("locked", tostring(e), 1, true)
    assert.is_nil(uv.fs_stat(root .. "/out.tar"))
  end)

  it("names a directory that is not there, and a file in its place", function()
    local ok, e = pcall(make, false, root .. "/nowhere")
    assert.is_false(ok)
    assert.equal("not_found", e.code)
    write("a", "x")
    ok, e = pcall(make, false, root .. "/code/a")
    assert.is_false(ok)
    assert.matches("SCRIPT_DIR", e.message)
  end)

  it("takes hundreds of files in well under the time of a turn's limit each", function()
    for number = 1, 300 do
      write(("many/%03d"):format(number), ("x"):rep(number))
    end
    local manifest = make()
    assert.equal(301, #manifest.entries)
    assert.equal(300 * 301 // 2, manifest.size)
  end)

  it("writes sizes for people", function()
    assert.equal("812 B", bundle.size_text(812))
    assert.equal("1.0 kB", bundle.size_text(1000))
    assert.equal("3.1 GB", bundle.size_text(3.1e9))
    assert.equal("1.0 MB", bundle.size_text(999960))
  end)
end)
