local engine = require("ciranda.core.engine")
local journal = require("ciranda.run.journal")
local json = require("ciranda.io.json")
local task = require("ciranda.task")
local uv = require("luv")

local environment = dofile("tests/fixtures/environment.lua")

--- Runs inside a task whether the test runner itself is one or not.
local function in_task(fn)
  return function()
    if task.current() then
      return fn()
    end
    return task.run(fn)
  end
end

describe("run.journal", function()
  local saved, directory

  before_each(function()
    directory = uv.fs_mkdtemp("/tmp/journal-XXXXXX")
    saved = environment.set({ XDG_STATE_HOME = directory })
  end)

  after_each(function()
    saved:back()
    os.execute(("rm -rf '%s'"):format(directory))
  end)

  local function text(run)
    local file = assert(io.open(journal.path(run)))
    local all = file:read("a")
    file:close()
    return all
  end

  local function write(run, bytes, mode)
    local file = assert(io.open(journal.path(run), mode))
    file:write(bytes)
    file:close()
  end

  it(
    "keeps directories and file to the user",
    in_task(function()
      local open <close> = journal.open("r1", { recipe = "x" })
      assert.equal(448, uv.fs_stat(open.directory).mode & 511)
      assert.equal(384, uv.fs_stat(open.path).mode & 511)
    end)
  )

  it(
    "folds objects, attempts and exits",
    in_task(function()
      local open <close> = journal.open("r1", { recipe = "multihost_job" })
      open:intent("object", { kind = "queued_resource", name = "q", phase = "intent", request_id = "u1" })
      open:append("object", { kind = "queued_resource", name = "q", phase = "created" })
      open:append("attempt", { attempt = "0001-aaaaaa", command = "true" })
      assert.equal("0002", open:new_attempt_id():sub(1, 4))
      open:intent("go", { attempt = "0001-aaaaaa" })
      open:append("exit", { attempt = "0001-aaaaaa", slice = 1, worker = 2, code = 7 })
      local state = journal.read("r1")
      assert.equal("multihost_job", state.recipe)
      assert.equal("created", state.objects["queued_resource q"].phase)
      assert.equal("u1", state.objects["queued_resource q"].request_id)
      assert.is_number(state.attempts[1].gone)
      assert.equal(7, state.attempts[1].exits["1/2"].code)
      assert.same({ "r1" }, journal.list())
    end)
  )

  it(
    "forgets nothing over several runners, and says how the last one ended",
    in_task(function()
      local first = journal.open("r1")
      first:append("object", { kind = "node", name = "n", phase = "intent" })
      first:close(0, "user")
      local second = journal.open("r1")
      assert.equal("intent", second:state().objects["node n"].phase)
      assert.is_nil(second:state().ended)
      second:close(137, "user")
      second:close()
      assert.same({ status = 137, kind = "user" }, journal.read("r1").ended)
      assert.equal(0, #journal.read("r1").runners)
    end)
  )

  it(
    "gives a run to one runner only",
    in_task(function()
      local first <close> = journal.open("r1")
      local ok, e = pcall(journal.open, "r1")
      assert.is_false(ok)
      assert.equal("busy", e.code)
      assert.matches(("process %d on"):format(uv.os_getpid()), e.message, 1, true)
      first:append("attempt", { attempt = "a" })
      assert.equal(1, #journal.read("r1").runners)
    end)
  )

  it(
    "takes a run over from a dead runner, of this boot or an earlier one",
    in_task(function()
      local host = uv.os_gethostname()
      journal.open("r1"):close()
      for _, dead in ipairs({
        { id = "x", pid = uv.os_getpid(), start_time = 1, boot_id = "", host = host },
        { id = "y", pid = 2 ^ 22 | 0, start_time = 1, boot_id = "other", host = host },
      }) do
        dead.fact, dead.us = "runner", 1
        write("r1", json.encode(dead) .. "\n", "a")
      end
      journal.open("r1"):close(0)
    end)
  )

  it(
    "takes a runner for dead that goes in the moment in which it is looked for",
    in_task(function()
      local open, gone = io.open, false
      local _ <close> = journal.open("r1")
      rawset(io, "open", function(path, ...)
        local file = open(path, ...)
        if path ~= ("/proc/%d/stat"):format(uv.os_getpid()) or gone then
          return file
        end
        gone = true
        return {
          -- What the kernel says of a process that was there when its file was opened.
          read = function()
            return nil, "No such process", 3
          end,
          close = function()
            return file:close()
          end,
        }
      end)
      local ok, state = pcall(journal.runner_state, journal.read("r1").runners[1])
      rawset(io, "open", open)
      assert.same({ true, "dead" }, { ok, state })
      assert.is_true(gone)
    end)
  )

  it(
    "does not take a run from another machine unless asked",
    in_task(function()
      journal.open("r1"):close()
      write(
        "r1",
        json.encode({ fact = "runner", us = 1, id = "z", pid = 1, host = "elsewhere", boot_id = "b" }) .. "\n",
        "a"
      )
      local ok, e = pcall(journal.open, "r1")
      assert.is_false(ok)
      assert.matches("on elsewhere", e.message)
      journal.open("r1", { take = true }):close()
    end)
  )

  it(
    "bears a line torn by a crash at every byte, and goes on after it",
    in_task(function()
      local open = journal.open("r1")
      open:append("object", { kind = "node", name = "kept", phase = "created" })
      open:close()
      local whole = text("r1")
      local last = '{"fact":"object","kind":"node","name":"torn","phase":"intent","us":1}'
      for cut = 1, #last do
        write("r1", whole .. last:sub(1, cut), "w")
        assert.equal("created", journal.read("r1").objects["node kept"].phase)
        local again = journal.open("r1")
        again:append("object", { kind = "node", name = "after", phase = "created" })
        again:close()
        local state = journal.read("r1")
        assert.equal("created", state.objects["node kept"].phase)
        assert.equal("created", state.objects["node after"].phase)
        if cut < #last then
          assert.is_nil(state.objects["node torn"])
        end
        assert.equal(1, #journal.list())
      end
    end)
  )

  it(
    "bears a crash between the newline and the fact that explains it",
    in_task(function()
      journal.open("r1"):close()
      write("r1", '{"fact":"obj\n', "a")
      local again <close> = journal.open("r1")
      again:append("attempt", { attempt = "a" })
      assert.equal(1, #journal.read("r1").attempts)
    end)
  )

  it(
    "refuses a journal that was damaged in the middle, naming file and line",
    in_task(function()
      journal.open("r1"):close()
      write("r1", "garbage\n" .. text("r1"), "w")
      local ok, e = pcall(journal.read, "r1")
      assert.is_false(ok)
      assert.equal("parse", e.code)
      assert.matches("line 1 is no fact", e.message)
      assert.matches("Mend that line, or move %S+/runs/[^/]+ away: ", e.message)
    end)
  )

  it(
    "refuses a line whose fields are not what such a fact has, and knows nothing of facts to come",
    in_task(function()
      journal.open("r1"):close()
      local good = text("r1")
      for _, line in ipairs({
        '{"fact":"later","us":"x"}',
        '{"fact":"later"}',
        '{"fact":"runner","us":1,"id":"i","pid":"1","host":"h","boot_id":"b"}',
        '{"fact":"runner","us":1,"id":"i","pid":1.5,"host":"h","boot_id":"b"}',
        '{"fact":"object","us":1,"kind":"node","phase":"created"}',
        '{"fact":"attempt","us":1}',
        '{"fact":"exit","us":1,"attempt":"a","slice":0}',
      }) do
        write("r1", line .. "\n" .. good, "w")
        local ok, e = pcall(journal.read, "r1")
        assert.is_false(ok, line)
        assert.matches("line 1 is no fact", e.message)
      end
      write("r1", '{"fact":"later","us":1,"runner":{}}\n' .. good, "w")
      assert.equal(1, journal.read("r1").first_us)
    end)
  )

  it(
    "says where its place is from when that cannot be made",
    in_task(function()
      local file = assert(io.open(directory .. "/file", "w"))
      file:close()
      uv.os_setenv("XDG_STATE_HOME", directory .. "/file")
      local ok, e = pcall(journal.open, "r1")
      assert.is_false(ok)
      assert.matches("/file/ciranda. Runs are kept below it; XDG_STATE_HOME names another place", e.message)
    end)
  )

  it(
    "refuses names that are paths or options",
    in_task(function()
      for _, name in ipairs({ "", "../x", "a/b", ".hidden", "-rf", ("x"):rep(129), "a b" }) do
        assert.is_false(journal.valid_name(name))
        assert.has_error(function()
          journal.open(name)
        end)
      end
      assert.is_true(journal.valid_name("2026-01-02-03-04-05"))
    end)
  )

  it(
    "has nothing to say of a run that is not there",
    in_task(function()
      assert.is_nil(journal.read("nobody"))
      assert.same({}, journal.list())
    end)
  )

  it(
    "keeps what it only notes until there is room again, in order",
    in_task(function()
      local open <close> = journal.open("kept")
      local fs_write, full = uv.fs_write, true
      finally(function()
        uv.fs_write = fs_write
      end)
      uv.fs_write = function(...)
        if full then
          return nil, "ENOSPC: no space left on device"
        end
        return fs_write(...)
      end
      open:note("attempt", { attempt = "0001-a" })
      open:note("go", { attempt = "0001-a" })
      assert.equal("number", type(open:state().attempts[1].gone))
      assert.equal(0, #journal.read("kept").attempts)
      local ok, problem = pcall(open.append, open, "saved", { attempt = "0001-a", step = 3 })
      assert.is_false(ok)
      assert.equal("no_space", problem.code)
      full = false
      open:append("attempt_end", { attempt = "0001-a", status = 0, kind = "done" })
      local kept = journal.read("kept").attempts[1]
      assert.same({ "done", nil }, { kept.ended.kind, kept.saved })
      assert.equal("number", type(kept.gone))
    end)
  )

  it(
    "says when the disk is full, and leaves no half line",
    in_task(function()
      -- A file size limit stands for a full disk: the write comes back short.
      local script = [[
        ulimit -f 1
        trap '' XFSZ
        exec "$@"
      ]]
      local child = [[
        local journal = require("ciranda.run.journal")
        local task = require("ciranda.task")
        task.run(function()
          local open = journal.open("full")
          local ok, e
          for _ = 1, 100 do
            ok, e = pcall(open.append, open, "note", { text = ("x"):rep(100) })
            if not ok then break end
          end
          io.stdout:write(tostring(e and e.code), "\n")
        end)
      ]]
      local source = directory .. "/child.lua"
      local file = assert(io.open(source, "w"))
      file:write(child)
      file:close()
      local line = "bash -c '%s' bash '%s' '%s' 2>&1"
      local pipe = io.popen(line:format(script:gsub("'", "'\\''"), engine.executable, source))
      local output = pipe:read("a")
      pipe:close()
      assert.matches("no_space", output)
      local facts, torn = require("ciranda.run.journal_facts").parse(text("full"), "x")
      assert.is_nil(torn)
      assert.is_true(#facts > 3)
    end)
  )
end)
