local output = require("ciranda.run.output")
local task = require("ciranda.task")
local uv = require("luv")

describe("run.output", function()
  --- A pipe whose writing end is a descriptor of ours; reading is by hand.
  local function pipe()
    local ends = uv.pipe({ nonblock = true })
    return ends.read, ends.write
  end

  local function with_output(fn)
    local read, write = pipe()
    local out = output.new(write)
    local ok, problem = pcall(fn, out, read)
    out:close()
    uv.fs_close(read)
    uv.fs_close(write)
    if not ok then
      error(problem, 0)
    end
  end

  it("writes what it is given, in order", function()
    with_output(function(out, read)
      out:write("one ")
      out:write("two")
      out:flush()
      assert.equal("one two", uv.fs_read(read, 100))
    end)
  end)

  it("lets others run while nobody reads, and takes no more than so much", function()
    with_output(function(out, read)
      local turns, written = 0, 0
      local scope <close> = task.scope()
      local writer = scope:spawn(function()
        out:run()
      end)
      local producer = scope:spawn(function()
        for _ = 1, 100 do
          out:write(("x"):rep(100000))
          written = written + 1
        end
      end)
      for _ = 1, 20 do
        task.sleep(0.005)
        turns = turns + 1
      end
      assert.equal(20, turns)
      assert.is_true(written < 100)
      producer:cancel("enough")
      writer:cancel("enough")
      assert.is_true(#uv.fs_read(read, 1000) > 0)
    end)
  end)

  it(
    "flushes what another task is writing too: then that one may be cancelled, and nothing is lost",
    function()
      with_output(function(out, read)
        local whole = {}
        for line = 1, 100000 do
          whole[line] = ("%d\n"):format(line)
        end
        whole = table.concat(whole)
        local got = {}
        local scope <close> = task.scope()
        local writer = scope:spawn(function()
          out:run()
        end)
        out:write(whole)
        task.sleep(0.01) -- the pipe is full, and nothing waits any more
        local reader = scope:spawn(function()
          local size = 0
          while size < #whole do
            got[#got + 1] = uv.fs_read(read, 65536) or ""
            size = size + #got[#got]
            task.sleep(0.001)
          end
        end)
        out:flush()
        writer:cancel("the end")
        local in_time = pcall(task.timeout, 20, reader.wait, reader)
        assert.is_true(in_time, "not all of it has been written")
        assert.is_true(whole == table.concat(got))
      end)
    end
  )

  it("goes on when nobody will ever read again", function()
    local read, write = pipe()
    local out = output.new(write)
    uv.fs_close(read)
    out:write("lost")
    out:flush()
    out:write("lost as well")
    out:flush()
    out:close()
    uv.fs_close(write)
  end)
end)
