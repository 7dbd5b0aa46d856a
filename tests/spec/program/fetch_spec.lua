-- cmake/fetch.sh: what is fetched from the network is tried again, within bounds, and a failure is named.
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")

describe("fetch", function()
  local directory
  before_each(function()
    directory = fs.tempdir()
  end)
  after_each(function()
    fs.remove_tree(directory)
  end)

  --- A command that fails so many times, each with status 7; how the fetch of it ended, and how often it was run.
  local function fetch(failures)
    local command = 'echo . >>runs; echo said; [ "$(wc -l <runs)" -gt %d ] || exit 7'
    local result = process.run({
      "sh",
      "-euc",
      '. "$1"; fetch "a thing" sh -c "$2"; echo "after"',
      "sh",
      fs.realpath("cmake/fetch.sh"),
      command:format(failures),
      cwd = directory,
      env = { FETCH_PAUSES = "0 0.01" },
      timeout = 60,
    })
    return result, #fs.read(directory .. "/runs") // 2
  end

  it("runs a command once when that is enough, and again when it is not", function()
    local result, runs = fetch(0)
    assert.same({ 0, "said\nafter\n", "" }, { result.code, result.stdout, result.stderr })
    assert.equal(1, runs)
    fs.remove(directory .. "/runs")
    result, runs = fetch(2)
    assert.same({ 0, 3 }, { result.code, runs })
    assert.matches("fetching a thing failed (exit status 7): again in 0 s\n", result.stderr, 1, true)
    assert.not_matches("times", result.stderr)
  end)

  it("gives up with the command's status, and says what it was", function()
    local result, runs = fetch(99)
    assert.same({ 7, 3 }, { result.code, runs })
    assert.not_matches("after", result.stdout)
    assert.matches("\nfetching a thing failed 3 times: sh -c ", result.stderr, 1, true)
  end)
end)
