local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local environment = dofile("tests/fixtures/environment.lua")
local patience = dofile("tests/fixtures/patience.lua")

local function within(fn)
  return function()
    return task.run(fn)
  end
end

local function sh(line, options)
  local argv = { "sh", "-c", line }
  for key, value in pairs(options or {}) do
    argv[key] = value
  end
  return argv
end

local function refused(code, pattern, fn, ...)
  local ok, e = pcall(fn, ...)
  assert.is_false(ok)
  assert.is_true(errors.is(e, code), tostring(e))
  assert.matches(pattern, tostring(e))
  return e
end

--- Whether a process exists, zombies included.
local function exists(pid)
  return fs.exists("/proc/" .. pid) ~= nil
end

--- Wait until a process has ended. Who has become its parent by then may bury it when it likes.
local function gone(pid)
  patience.wait_for(("the end of process %s"):format(pid), function()
    local ok, stat = pcall(fs.read, ("/proc/%s/stat"):format(pid))
    return not ok or stat:find("^%d+ %(.*%) [ZX]")
  end)
  return true
end

describe("process.run", function()
  it(
    "gives status and output apart",
    within(function()
      local result = process.run(sh("printf out; printf err >&2; exit 3"))
      assert.equal(3, result.code)
      assert.is_nil(result.signal)
      assert.equal("out", result.stdout)
      assert.equal("err", result.stderr)
      assert.equal("exit status 3", result:reason())
      assert.is_false(exists(result.pid))
    end)
  )

  it(
    "gives the signal that ended it",
    within(function()
      local result = process.run(sh("kill -KILL $$"))
      assert.is_nil(result.code)
      assert.equal("SIGKILL", result.signal)
      assert.equal(9, result.signal_number)
      assert.equal("SIGKILL", result:reason())
      refused("failed", "sh ended with SIGKILL", result.check, result)
    end)
  )

  it(
    "check raises with what the program said, and passes success",
    within(function()
      local e = refused("failed", "sh ended with exit status 4: no luck", function()
        process.run(sh("echo no luck >&2; exit 4")):check()
      end)
      assert.equal(4, e.result.code)
      assert.equal("fine", process.run(sh("printf fine")):check().stdout)
    end)
  )

  it(
    "passes arguments as they are, with no shell between",
    within(function()
      local arguments = { "a b", "$HOME", "*", "'quoted'", "", "-n", "new\nline", 5 }
      local argv = { "sh", "-c", 'for a in "$@"; do printf "%s|" "$a"; done', "sh" }
      table.move(arguments, 1, #arguments, 5, argv)
      assert.equal("a b|$HOME|*|'quoted'||-n|new\nline|5|", process.run(argv).stdout)
    end)
  )

  it(
    "sets directory and environment",
    within(function()
      local directory = fs.realpath(fs.tempdir())
      assert.equal(directory .. "\n", process.run({ "pwd", "-P", cwd = directory }).stdout)
      fs.remove_tree(directory)
      local _ <close> = environment.set({ CIRANDA_SPEC = "inherited" })
      local line = 'printf "%s|" "$CIRANDA_SPEC" "$ADDED"'
      assert.equal("inherited|x=y|", process.run(sh(line, { env = { ADDED = "x=y" } })).stdout)
      assert.equal("changed||", process.run(sh(line, { env = { CIRANDA_SPEC = "changed" } })).stdout)
      assert.equal("||", process.run(sh(line, { env = { CIRANDA_SPEC = false } })).stdout)
      assert.equal("ONLY=1\n", process.run({ "/usr/bin/env", clear_env = true, env = { ONLY = 1 } }).stdout)
    end)
  )

  it(
    "feeds standard input from a string or a function; without one it is empty",
    within(function()
      local big = ("0123456789"):rep(100000)
      assert.equal(big, process.run({ "cat", stdin = big }).stdout)
      local count = 0
      local result = process.run({
        "cat",
        stdin = function()
          task.sleep(0.001)
          count = count + 1
          return count <= 3 and ("part %d;"):format(count) or nil
        end,
      })
      assert.equal("part 1;part 2;part 3;", result.stdout)
      assert.equal("", process.run({ "cat" }).stdout)
    end)
  )

  it(
    "does not mind a program that reads nothing",
    within(function()
      assert.equal(0, process.run({ "true", stdin = ("x"):rep(10000000) }).code)
      -- Nor is a program that has ended waited for by who waits for something to write.
      local never = task.event()
      assert.equal(
        0,
        process.run({
          "true",
          stdin = function()
            never:wait()
          end,
        }).code
      )
    end)
  )

  it(
    "raises what a function of standard input raises, and ends the program",
    within(function()
      local ok, err = pcall(process.run, {
        "cat",
        stdin = function()
          error("no more", 0)
        end,
      })
      assert.is_false(ok)
      assert.equal("no more", err)
    end)
  )

  it(
    "streams to callbacks, which may wait; the program waits for them",
    within(function()
      local size, most_ahead = 0, 0
      local written = fs.tempdir() .. "/count"
      local result = process.run(
        sh(
          "i=0; while [ $i -lt 40 ]; do head -c 100000 /dev/zero; i=$((i+1)); echo $i > "
            .. written
            .. "; done",
          {
            on_stdout = function(chunk)
              size = size + #chunk
              task.sleep(0.002)
              local ahead = (tonumber(fs.exists(written) and fs.read(written)) or 0) * 100000 - size
              most_ahead = math.max(most_ahead, ahead)
            end,
          }
        )
      )
      fs.remove_tree(fs.dirname(written))
      assert.equal(0, result.code)
      assert.is_nil(result.stdout)
      assert.equal(4000000, size)
      assert.is_true(most_ahead < 1500000, "the program was ahead by " .. most_ahead)
    end)
  )

  it(
    "raises what a callback raises, and ends a program that would write for ever",
    within(function()
      local pid
      local ok, err = pcall(
        process.run,
        sh("echo $$; exec yes", {
          on_stdout = function(chunk)
            pid = pid or chunk:match("^%d+")
            error("enough", 0)
          end,
        })
      )
      assert.is_false(ok)
      assert.equal("enough", err)
      assert.is_true(gone(pid))
    end)
  )

  it(
    "puts both streams in one, in order",
    within(function()
      local result = process.run(sh("echo 1; echo 2 >&2; echo 3", { stderr = process.STDOUT }))
      assert.equal("1\n2\n3\n", result.stdout)
      assert.is_nil(result.stderr)
    end)
  )

  it(
    "throws output away when told to",
    within(function()
      local result = process.run(sh("echo 1; echo 2 >&2", { stdout = process.DISCARD }))
      assert.is_nil(result.stdout)
      assert.equal("2\n", result.stderr)
      result = process.run(sh("echo 1; echo 2 >&2", { stdout = process.DISCARD, stderr = process.STDOUT }))
      assert.is_nil(result.stdout)
      assert.is_nil(result.stderr)
    end)
  )

  it(
    "writes to a descriptor of ours",
    within(function()
      local path = fs.tempdir() .. "/log"
      do
        local file <close> = fs.open(path, "w")
        process.run(sh("echo to the file", { stdout = file.fd }))
      end
      assert.equal("to the file\n", fs.read(path))
      fs.remove_tree(fs.dirname(path))
    end)
  )

  it(
    "ends a program that writes more than is kept",
    within(function()
      refused(
        "failed",
        "yes wrote more than 100000 bytes to its stdout",
        process.run,
        { "yes", max_output = 100000 }
      )
    end)
  )

  it(
    "result comes after the end of output, also of what the program left running",
    within(function()
      local result =
        process.run(sh("(while kill -0 $$ 2>/dev/null; do sleep 0.01; done; echo late) & echo early"))
      assert.equal("early\nlate\n", result.stdout)
    end)
  )
end)

describe("a program that cannot be started", function()
  it(
    "is named, or the directory that is missing",
    within(function()
      refused(
        "not_found",
        "%(cmd%) 'no%-such%-program': not found in PATH",
        process.run,
        { "no-such-program" }
      )
      refused("not_found", "%(cmd%) '/no/such': no such file", process.run, { "/no/such" })
      refused("permission", "%(cmd%) '/etc/passwd': permission denied", process.run, { "/etc/passwd" })
      refused("not_found", "%(cwd%) '/no/such/directory': no such directory", process.run, {
        "true",
        cwd = "/no/such/directory",
      })
      refused(
        "not_found",
        "%(cwd%) '/etc/passwd': not a directory",
        process.run,
        { "true", cwd = "/etc/passwd" }
      )
    end)
  )

  it(
    "leaves no descriptor behind",
    within(function()
      process.run({ "true", stdout = process.DISCARD })
      collectgarbage() -- a file that nobody has closed must not be closed meanwhile
      local before = #fs.list("/proc/self/fd")
      for _ = 1, 5 do
        pcall(process.run, { "no-such-program", stdin = "x" })
        pcall(process.run, { "no-such-program", stderr = process.STDOUT })
        process.run(sh("echo x", { stdin = "x", stderr = process.STDOUT }))
      end
      patience.wait_for(function()
        return ("%d descriptors as before; there are %d"):format(before, #fs.list("/proc/self/fd"))
      end, function()
        return #fs.list("/proc/self/fd") == before
      end)
    end)
  )

  it(
    "because it is no list of arguments is a misuse at the caller's line",
    within(function()
      for pattern, argv in pairs({
        ["a table expected, got string; a shell's line must be {'sh', '%-c', line}"] = "ls -l",
        ["no program given"] = {},
        ["argument 2 must be a string, got table"] = { "ls", {} },
        ["argument 2 holds a NUL"] = { "ls", "a\0b" },
        ["unknown option 'timout'"] = { "ls", timout = 1 },
        ["timeout must be a number"] = { "ls", timeout = "1" },
        ["'A=B' is no variable's name"] = { "ls", env = { ["A=B"] = "x" } },
        ["stdout must be one of"] = { "ls", stdout = "capture" },
        ["process%.PIPE is for process%.spawn"] = { "ls", stdout = process.PIPE },
      }) do
        local e = refused("misuse", pattern, function()
          process.run(argv)
        end)
        assert.matches("process_spec%.lua:%d+:", e.message)
      end
    end)
  )
end)

describe("a program whose time is up", function()
  it(
    "gets TERM, and what it wrote is in the error",
    within(function()
      local e = patience.within_more(0.1, function(seconds)
        local line = "trap 'echo stopping; exit 0' TERM; echo begun; while :; do sleep 0.01; done"
        local e = refused(
          "timeout",
          ("sh did not end within %g s and was stopped"):format(seconds),
          process.run,
          sh(line, { timeout = seconds })
        )
        return e.result.stdout ~= "", e
      end)
      assert.equal("begun\nstopping\n", e.result.stdout)
      assert.equal(0, e.result.code)
    end)
  )

  it(
    "gets KILL after the grace, with its whole group",
    within(function()
      local e = patience.within_more(0.1, function(seconds)
        local line = "trap '' TERM; (trap '' TERM; sleep 60) & echo $!; wait; sleep 60"
        local e = refused("timeout", "stopped", process.run, sh(line, { timeout = seconds, grace = seconds }))
        return e.result.stdout ~= "", e
      end)
      assert.equal("SIGKILL", e.result.signal)
      assert.is_true(gone(e.result.stdout:match("%d+")))
    end)
  )

  it(
    "does not hold us up when something outside its group keeps its output open",
    within(function()
      local e = patience.within_more(0.2, function(seconds)
        local line = "setsid sh -c 'echo $$; sleep 300' & sleep 300"
        local e = refused("timeout", "stopped", process.run, sh(line, { timeout = seconds, grace = 0.05 }))
        return e.result.stdout ~= "", e
      end)
      local pid = math.tointeger(e.result.stdout:match("%d+"))
      assert.is_true(exists(pid))
      uv.kill(-pid, "sigkill")
    end)
  )
end)

describe("cancelling the task of a program", function()
  it(
    "ends it, waits for its clean-up, and leaves no process",
    within(function()
      local path = fs.tempdir() .. "/log"
      local child
      local pid
      pcall(function()
        local scope <close> = task.scope()
        child = scope:spawn(function()
          process.run(
            sh(
              "trap 'sleep 0.05; echo cleaned >> "
                .. path
                .. "; exit 0' TERM; echo $$ > "
                .. path
                .. "; while :; do sleep 0.01; done"
            )
          )
        end)
        while not (fs.exists(path) and fs.read(path):find("\n")) do
          task.sleep(0.01)
        end
        pid = fs.read(path):match("%d+")
        child:cancel("test")
      end)
      assert.equal("cancelled", child:status())
      assert.matches("cleaned", fs.read(path))
      assert.is_false(exists(pid))
      fs.remove_tree(fs.dirname(path))
    end)
  )

  it(
    "while a callback waits ends it too",
    within(function()
      local child
      local called = task.event()
      pcall(function()
        local scope <close> = task.scope()
        child = scope:spawn(function()
          process.run({
            "yes",
            on_stdout = function()
              called:set()
              task.sleep(60)
            end,
          })
        end)
        called:wait()
        child:cancel("test")
      end)
      assert.equal("cancelled", child:status())
    end)
  )
end)

describe("process.spawn", function()
  it(
    "gives pipes to talk through",
    within(function()
      local cat <close> = process.spawn({ "cat", stdin = process.PIPE, stdout = process.PIPE })
      for _, text in ipairs({ "one", "two" }) do
        cat.stdin:write(text)
        assert.equal(text, cat.stdout:read())
      end
      cat.stdin:close()
      assert.is_nil(cat.stdout:read())
      assert.equal(0, cat:wait().code)
      assert.equal(0, cat:wait().code)
      refused("closed", "closed", cat.stdin.write, cat.stdin, "late")
    end)
  )

  it(
    "says when nobody reads what is written",
    within(function()
      local program <close> = process.spawn({ "true", stdin = process.PIPE })
      program:wait()
      refused("closed", "nobody reads it any more", function()
        for _ = 1, 100 do
          program.stdin:write(("x"):rep(10000))
        end
      end)
    end)
  )

  it(
    "takes signals, by any name",
    within(function()
      for _, signal in ipairs({ "SIGUSR1", "USR1", "usr1", uv.constants.SIGUSR1 }) do
        local program <close> = process.spawn(
          sh("trap 'exit 5' USR1; echo ready; while :; do sleep 0.01; done", { stdout = process.PIPE })
        )
        assert.equal("ready\n", program.stdout:read())
        assert.is_true(program:signal(signal))
        program.stdout:discard()
        assert.equal(5, program:wait().code)
        assert.is_false(program:signal(signal))
      end
      local program <close> = process.spawn({ "sleep", "60" })
      refused("misuse", "unknown signal 'SIGNONE'", program.signal, program, "SIGNONE")
    end)
  )

  it(
    "ends the program when the block is left",
    within(function()
      local pid
      do
        local program <close> = process.spawn({ "sleep", "60" })
        pid = program.pid
        assert.is_true(exists(pid))
      end
      assert.is_false(exists(pid))
    end)
  )

  it(
    "ends the program when its task is cancelled, although output is unread",
    within(function()
      local pid, child
      pcall(function()
        local scope <close> = task.scope()
        child = scope:spawn(function()
          local program <close> = process.spawn({ "yes", stdout = process.PIPE })
          pid = program.pid
          program:wait()
        end)
        task.sleep(0.02)
        child:cancel()
      end)
      assert.equal("cancelled", child:status())
      assert.is_false(exists(pid))
    end)
  )

  it(
    "refuses a second reader, and what is for run",
    within(function()
      local program <close> = process.spawn({ "sleep", "60", stdout = process.PIPE })
      local scope <close> = task.scope()
      scope:spawn(function()
        program.stdout:read()
      end)
      task.sleep(0.001)
      refused("misuse", "another task is reading it already", program.stdout.read, program.stdout)
      scope:cancel()
      refused("misuse", "on_stdout is for process%.run", process.spawn, { "x", on_stdout = print })
      refused("misuse", "process%.run takes a string", process.spawn, { "x", stdin = "text" })
    end)
  )

  it(
    "makes a group of its own, unless it is in the foreground",
    within(function()
      local function group(options)
        local stat = process.run(sh("cat /proc/$$/stat; kill -0 $$", options)).stdout
        local pid, group_id = stat:match("^(%d+) %(.-%) %S %d+ (%d+)")
        return pid == group_id
      end
      assert.is_true(group({}))
      assert.is_false(group({ foreground = true }))
    end)
  )

  it(
    "leaves no zombie of many programs at once",
    within(function()
      local results = task.map({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, function(index)
        return process.run(sh("exit " .. index))
      end)
      for index = 1, 10 do
        assert.equal(index, results[index].code)
        assert.is_false(exists(results[index].pid))
      end
    end)
  )
end)
