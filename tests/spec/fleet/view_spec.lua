local view = require("ciranda.fleet.view")

describe("fleet.view", function()
  local out, now, workers, shown

  before_each(function()
    out, now, workers = {}, 0, {}
    for slice = 0, 1 do
      for index = 0, 1 do
        workers[#workers + 1] = { slice = slice, index = index }
      end
    end
    shown = view.new({
      hold = 1,
      clock = function()
        return now
      end,
      write = function(text)
        out[#out + 1] = text
      end,
    })
    for _, worker in ipairs(workers) do
      shown:add(worker)
    end
  end)

  local function text()
    return table.concat(out)
  end

  it("folds a line that everybody wrote, at once", function()
    for _, worker in ipairs(workers) do
      shown:feed(worker, "step 1\n")
    end
    shown:flush()
    assert.equal("slice[0-1]/worker[0-1]: step 1\n", text())
  end)

  it("holds a line for its equals, but no longer than it was told", function()
    shown:feed(workers[1], "step 1\n")
    now = 0.9
    shown:flush()
    assert.equal("", text())
    now = 1
    shown:flush()
    assert.equal("slice0/worker0: step 1\n", text())
    shown:feed(workers[2], "step 1\n")
    shown:feed(workers[4], "step 1\n")
    now = 2
    shown:flush()
    assert.equal("slice0/worker0: step 1\nslice[0-1]/worker1: step 1\n", text())
  end)

  it("keeps each worker's order and never cuts a line with another's", function()
    shown:feed(workers[1], "a1\nsh")
    shown:feed(workers[2], "b1\nshared\n")
    shown:feed(workers[1], "ared\na2\n")
    now = 5
    shown:flush()
    assert.equal(
      "slice0/worker0: a1\nslice0/worker1: b1\nslice0/worker[0-1]: shared\nslice0/worker0: a2\n",
      text()
    )
  end)

  it("writes every line as many times as it was written, whatever the interleaving", function()
    local expected, seed = {}, 7
    local function random(limit)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return seed // 65536 % limit
    end
    for round = 1, 400 do
      local worker = workers[random(4) + 1]
      local line = "line " .. random(3)
      expected[worker] = expected[worker] or {}
      table.insert(expected[worker], line)
      shown:feed(worker, line .. "\n")
      now = now + random(2) / 4
      if round % 7 == 0 then
        shown:flush()
      end
    end
    shown:close()
    local got = {}
    for _, line in ipairs(out) do
      local set, body = line:match("^(%S+): (.*)\n$")
      for _, worker in ipairs(require("ciranda.provider.nodeset").select(workers, set)) do
        got[worker] = got[worker] or {}
        table.insert(got[worker], body)
      end
    end
    for _, worker in ipairs(workers) do
      assert.same(expected[worker], got[worker])
    end
  end)

  it("shows a last line that has no newline when its worker ends", function()
    shown:feed(workers[1], "no newline")
    shown:flush(true)
    assert.equal("", text())
    shown:finish(workers[1])
    shown:flush(true)
    assert.equal("slice0/worker0: no newline\n", text())
  end)

  it("does not wait for workers that have ended", function()
    shown:finish(workers[3])
    shown:finish(workers[4])
    shown:feed(workers[1], "x\n")
    shown:feed(workers[2], "x\n")
    shown:flush()
    assert.equal("slice0/worker[0-1]: x\n", text())
  end)

  it("cuts a line without end, and loses none of its bytes", function()
    local long = ("x"):rep(200000)
    shown:feed(workers[1], long)
    shown:finish(workers[1])
    shown:flush(true)
    assert.equal(long, (text():gsub("slice0/worker0: ", ""):gsub("\n", "")))
    assert.is_true(#out >= 3)
  end)

  it("shows the last state of a progress bar", function()
    shown:feed(workers[1], "10%\r50%\r100%\r\n")
    shown:flush(true)
    shown:feed(workers[1], ("\r"):rep(30000) .. ("x"):rep(30000) .. "\rend\r\n")
    shown:flush(true)
    assert.equal("slice0/worker0: 100%\nslice0/worker0: end\n", text())
  end)

  it("knows what a failure looks like", function()
    assert.is_true(view.alarming("Traceback (most recent call last):"))
    assert.is_true(view.alarming("E0000 open(/dev/vfio/0): Device or resource busy"))
    assert.is_false(view.alarming("completed step: 3, loss: 2.0"))
  end)
end)
