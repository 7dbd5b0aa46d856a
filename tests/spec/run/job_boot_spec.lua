-- The functions of a job's start-up script, each with a curl that answers what the test says: a call that failed says
-- nothing, and nothing follows from it.
local boot = require("ciranda.run.job_boot")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

describe("a job's start-up script", function()
  local state

  before_each(function()
    state = fs.tempdir("ciranda-job-boot")
  end)

  after_each(function()
    fs.remove_tree(state)
  end)

  local function body_of(name)
    return assert(boot:match("\n(" .. name .. "%(%) {\n.-\n}\n)"), "there is no function " .. name)
  end

  --- Runs `what` with the named functions. Each line of `answers` is one call of curl: its exit status, the HTTP status
  --- it prints, its body. Without more of them the last one stays.
  local function run(names, answers, what)
    local parts = {
      "set -u\nstate=" .. state .. "\n",
      "GENERATION=1 NUM_SLICES=2 NODE_ID=n-0 SLICE_ID=0 STORAGE= BUCKET=b PREFIX=p TPU= VERSION= PROJECT= ZONE=\n",
      'object() { echo "$1"; }\nescaped() { echo "$1"; }\nsleep() { :; }\n',
      [[
google() {
  calls=$(($(cat "$state/calls") + 1))
  echo "$calls" > "$state/calls"
  line=$(sed -n "${calls}p" "$state/answers")
  [ -n "$line" ] || line=$(tail -n 1 "$state/answers")
  file= told=
  while [ $# -gt 0 ]; do
    case $1 in -o) file=$2 && shift ;; -w) told=yes ;; esac
    shift
  done
  status=${line%% *} rest=${line#* }
  if [ -n "$file" ]; then printf '%s' "${rest#* }" > "$file"; else printf '%s' "${rest#* }"; fi
  [ -z "$told" ] || printf '%s' "${rest%% *}"
  return "$status"
}
]],
    }
    for _, name in ipairs(names) do
      parts[#parts + 1] = body_of(name)
    end
    fs.write(state .. "/calls", "0\n")
    fs.write(state .. "/answers", table.concat(answers, "\n") .. "\n")
    parts[#parts + 1] = what
    local result = process.run({ "sh", stdin = table.concat(parts), timeout = 30 })
    assert.equal("", result.stderr)
    return result.code, tonumber(fs.read(state .. "/calls"))
  end

  it("takes an object for missing only when the bucket says so", function()
    local function read(answer)
      fs.write(state .. "/status", "before")
      local code = run({ "read_object" }, { answer }, 'read_object status "$state/status"\n')
      return code, fs.read(state .. "/status")
    end
    for answer, expected in pairs({
      ["0 200 text"] = { 0, "text" },
      ["22 404 not found"] = { 0, "" },
      ["22 503 try later"] = { 1, "before" },
      ["18 200 te"] = { 1, "before" },
      ["52 000 "] = { 1, "before" },
    }) do
      assert.same(expected, { read(answer) })
    end
  end)

  it("tries an upload of the log again until the bucket has it, and the stage with it", function()
    fs.write(state .. "/log", "a line\n")
    fs.write(state .. "/stage", "{}\n")
    local names = { "persist", "upload_log", "upload_stage", "store", "put" }
    local set = "log=$state/log log_object=log stage_object=stage\n"
    local code, calls =
      run(names, { "22 503 -", "22 503 -", "0 200 -", "0 200 -" }, set .. "persist 60 upload_log\n")
    assert.same({ 0, 4 }, { code, calls })
    assert.is_falsy(fs.exists(state .. "/stage"))
    -- One that has not grown is not sent again.
    code, calls = run(names, { "0 200 -" }, set .. "upload_log && upload_log\n")
    assert.same({ 0, 1 }, { code, calls })
  end)

  it("tells its failure until one worker's is there", function()
    for answer, expected in pairs({ ["0 200 -"] = 0, ["22 412 -"] = 0, ["22 503 -"] = 1, ["18 200 -"] = 1 }) do
      assert.equal(expected, (run({ "tell_failure", "put" }, { answer }, "tell_failure\n")))
    end
  end)

  it("waits for the end of maintenance, and of no preemption, before it goes on", function()
    local names = { "persist", "event", "notices_over" }
    local stubs = 'list_objects() { printf \'%s\' "$listed" > "$state/list"; }\nnodes_broken() { return 1; }\n'
      .. "interruption_object=i\nmetadata() { case $1 in preempted) echo $preempted ;; *) echo $event ;; esac; }\n"
    for _, case in ipairs({
      { "preempted=FALSE event=NONE listed=", 0, 1 },
      { "preempted=FALSE event=NONE listed=another", 1, 1 },
      { "preempted=FALSE event=TERMINATE_ON_HOST_MAINTENANCE listed=ours", 1, 0 },
      { "preempted=TRUE event=NONE listed=", 1, 0 }, -- the others have to see its notice until it is gone
    }) do
      local code, calls = run(names, { "0 200 -" }, stubs .. case[1] .. "\nnotices_over\n")
      assert.same({ case[2], case[3] }, { code, calls }, case[1])
    end
  end)

  it("takes nodes for broken only when it has been told so, and asks again meanwhile", function()
    local function ready(count)
      local nodes = {}
      for slice = 0, 1 do
        nodes[slice + 1] = ('{"name":"x/nodes/n-%d","state":"%s"}'):format(
          slice,
          slice < count and "READY" or "x"
        )
      end
      return '0 200 {"nodes":[' .. table.concat(nodes, ",") .. "]}"
    end
    local names = { "persist", "list_nodes", "nodes_broken" }
    for _, case in ipairs({
      { { ready(2) }, 1, 1 },
      { { ready(1) }, 0, 1 },
      { { "22 503 -", "18 200 {}", ready(1) }, 0, 3 },
      { { "22 403 -" }, 1, 1 },
    }) do
      local code, calls = run(names, case[1], "nodes_broken\n")
      assert.same({ case[2], case[3] }, { code == 0 and 0 or 1, calls })
    end
    -- Whoever waits for an hour with it does wait for an hour.
    local code =
      run(names, { ready(1) }, 'persist 3600 nodes_broken && [ "$limit" -gt $(($(date +%s) + 3000)) ]\n')
    assert.equal(0, code)
  end)

  it("takes a notice for the cause of an end though COMMAND was still being started", function()
    -- COMMAND saves and ends with 0 at once, and nobody watches in time: curl, which waits for changes, never answers.
    local stubs = ([[
metadata() {
  if [ -e "$state/begun" ]; then n=2; else n=1; fi
  case $1 in preempted) echo "$first" ;; *) echo "$second" ;; esac | cut -d, -f$n
}
curl() { command sleep 0.1; return 7; }
list_objects() { : > "$state/list"; }
store() { cp "$1" "$state/$2"; }
somebody_failed() { return 1; }
stage() { :; }
upload_log() { :; }
nodes_broken() { return 1; }
place=here directory=/ venv=$state/venv log=$state/log attempts=$state/attempts interruption_object=shown
server=http://127.0.0.1:1 WORKER_ID=0 ZONE=z NUM_WORKERS=2 RUN=r UPLOAD_EVERY=30 PEERS_EVERY=10 SETTLE=0
CIRANDA_GUARD_OPTIONS= guard=$state/guard
echo 0 > "$attempts"; : > "$log"; : > "$state/command"
printf '%%s\n' '#!/bin/sh' ': > %s/begun' 'echo "{\"version\":1,\"status\":0,}" > "$2/exit"' > "$guard"
chmod 755 "$guard"
]]):format(state)
    local names = {
      "now",
      "say",
      "persist",
      "event",
      "noticed",
      "watch_notice",
      "interrupted",
      "mend_log",
      "upload_all",
      "run_attempt",
    }
    local quiet, event = "FALSE,FALSE", "NONE,NONE"
    for _, case in ipairs({
      { quiet, event, 1 },
      { "FALSE,TRUE", event, 0 },
      { "TRUE,TRUE", event, 0 },
      { quiet, "NONE,TERMINATE_ON_HOST_MAINTENANCE", 0 },
      { quiet, "MIGRATE_ON_HOST_MAINTENANCE,MIGRATE_ON_HOST_MAINTENANCE", 0 },
      { quiet, "MIGRATE_ON_HOST_MAINTENANCE,NONE", 1 },
      {
        quiet,
        "MIGRATE_ON_HOST_MAINTENANCE,MIGRATE_ON_HOST_MAINTENANCE",
        1,
        "MIGRATE_ON_HOST_MAINTENANCE",
      },
    }) do
      local values = ("first=%s second=%s outlived=%s\n"):format(case[1], case[2], case[4] or "")
      fs.remove_tree(state)
      fs.mkdir(state)
      local code = run(
        names,
        {},
        stubs .. values .. 'run_attempt > "$state/said"\n[ "$status" = 0 ] || exit 9\ninterrupted 0\n'
      )
      assert.equal(case[3], code, values)
      assert.equal(case[3] == 0, fs.exists(state .. "/shown") == "file", values)
    end
  end)

  it(
    "keeps the count of attempts in the bucket at each stage, and has it there before COMMAND is started",
    function()
      local stubs = ([[
store() { cp "$1" "$state/$2"; }
curl() { :; }
metadata() { :; }
event() { :; }
watch_notice() { :; }
list_objects() { : > "$state/list"; }
somebody_failed() { return 1; }
place=here directory=/ venv=$state/venv log=$state/log log_object=log-object stage_object=told
server=http://127.0.0.1:1 WORKER_ID=0 SLICE_ID=0 NODE_ID=n ZONE=z PROJECT=p NUM_WORKERS=1 NUM_SLICES=1 RUN=r
UPLOAD_EVERY=30 PEERS_EVERY=10 CIRANDA_GUARD_OPTIONS= guard=$state/guard
: > "$log"; : > "$state/command"
printf '%%s\n' '#!/bin/sh' 'cp %s/told %s/told-before' 'echo "{\"version\":1,\"status\":0,}" > "$2/exit"' > "$guard"
chmod 755 "$guard"
]]):format(state, state)
      local names =
        { "now", "say", "persist", "mend_log", "stage", "upload_stage", "upload_log", "upload_all" }
      names = table.move({ "read_count", "run_attempt" }, 1, 2, #names + 1, names)
      local function told(name)
        return fs.read(state .. "/" .. name):match('"generation":%d+,"attempt":%d+')
      end
      -- A machine in the place of one that was lost; it boots again, and is lost in its turn before it starts anything.
      fs.write(state .. "/stage-before", '{"stage":"running","generation":3,"attempt":2,"time":"t"}\n')
      assert.equal(0, (run(names, {}, stubs .. "read_count\nstage fetch\n")))
      assert.equal('"generation":3,"attempt":2', told("told"))
      local again = "read_count\nattempts=$state/attempts-3\nrun_attempt > $state/said\n"
      assert.equal(0, (run(names, {}, stubs .. again)))
      assert.equal('"generation":3,"attempt":3', told("told-before"))
      assert.equal(0, (run(names, {}, stubs .. "read_count\nstage fetch\n")))
      assert.equal('"generation":3,"attempt":3', told("told"))
    end
  )

  it("tells the others of a notice that was not there before COMMAND began", function()
    local stubs = 'server=http://127.0.0.1:1\ninterruption_object=shown\nstore() { cp "$1" "$state/$2"; }\n'
      .. "curl() { google; }\n"
    local names = { "now", "persist", "noticed", "watch_notice" }
    for before, answers in pairs({
      FALSE = { "7 -", "0 - FALSE", "0 - TRUE" },
      TRUE = { "0 - TRUE", "7 -", "0 - FALSE", "0 - TRUE" },
      [""] = { "0 - TRUE" }, -- nothing was known of it
    }) do
      local code, calls = run(names, answers, stubs .. ("watch_notice preempted '%s'\n"):format(before))
      assert.same({ 0, #answers }, { code, calls }, before)
      assert.matches('{"notice":"preempted","value":"TRUE",', fs.read(state .. "/shown"), 1, true)
    end
  end)

  it("does not run again what had ended before the boot, once a peer has finished too", function()
    local names = { "persist", "others_finished", "ended_before_boot" }
    local own = '{"version":1,"status":7,"leader":{"code":7},"stopped":false,"reason":""}'
    local stubs = "SETTLE=0 GENERATION=1 attempts=$state/attempts-1\n"
      .. 'list_objects() { printf \'%s\' "$listed" > "$state/list"; }\n'
    for _, case in ipairs({
      { own, 'listed=\'"name":"a"\'', "NUM_WORKERS=2", 0 },
      { own, "listed=", "NUM_WORKERS=2", 1 }, -- it may have been the platform: the others go on as well
      { own, "listed=", "NUM_WORKERS=1", 1 }, -- nobody can be asked
      { own, 'listed=\'"name":"a"\'', "NUM_WORKERS=2", 1, "notice" },
      { own, 'listed=\'"name":"a"\'', "NUM_WORKERS=2", 1, "attempt-1-3/interrupted" },
      { own:gsub("false", "true"), 'listed=\'"name":"a"\'', "NUM_WORKERS=2", 1 },
      { nil, 'listed=\'"name":"a"\'', "NUM_WORKERS=2", 1 },
    }) do
      fs.remove_tree(state)
      fs.mkdir_p(state .. "/attempt-1-3")
      fs.write(state .. "/attempts-1", "3\n")
      if case[1] then
        fs.write(state .. "/attempt-1-3/exit", case[1] .. "\n")
      end
      if case[5] then
        fs.write(state .. "/" .. case[5], "x")
      end
      local what = stubs .. case[2] .. " " .. case[3] .. '\nended_before_boot && [ "$status" = 7 ]\n'
      assert.equal(case[4], (run(names, {}, what)), what)
    end
  end)

  it(
    "does not start alone on a new machine when all others have finished: how it ended is unknown",
    function()
      local names = { "persist", "others_finished", "left_alone" }
      local stubs = "GENERATION=1 NUM_WORKERS=3 attempts=$state/attempts-1\n"
        .. 'list_objects() { printf \'%b\' "$listed" > "$state/list"; }\n'
      local two, one = 'listed=\'"name":"a"\\n"name":"b"\\n\'', 'listed=\'"name":"a"\\n\''
      local ran = '{"stage":"running","generation":1,"attempt":1,"time":"t"}'
      for _, case in ipairs({
        { ran, two, 0 },
        { ran, one, 1 },
        { ran:gsub("running", "interrupted"), two, 1 },
        { ran:gsub('"generation":1', '"generation":2'), two, 1 },
        { "", two, 1 },
        { ran, two, 1, "attempts-1" }, -- the machine that ran it: it was cut off, and goes on
      }) do
        fs.remove_tree(state)
        fs.mkdir(state)
        fs.write(state .. "/stage-before", case[1])
        if case[4] then
          fs.write(state .. "/" .. case[4], "1\n")
        end
        local code = run(names, {}, stubs .. case[2] .. "\nleft_alone && exit 0\nexit 1\n")
        assert.equal(case[3], code, case[1] .. case[2])
      end
    end
  )

  it("gives up a bucket that takes a connection and never answers, reads or goes on", function()
    -- What is waited for is shorter here; how long it is in the script is looked at besides.
    local limit = tonumber(boot:match("%-%-speed%-limit 1 %-%-speed%-time (%d+)"))
    assert.is_true(limit <= 60)
    local call = body_of("call"):gsub("%-%-speed%-time %d+", "--speed-time 1")
    local server = assert(uv.new_tcp())
    server:bind("127.0.0.1", 0)
    local taken = {}
    server:listen(16, function()
      local client = uv.new_tcp()
      server:accept(client)
      taken[#taken + 1] = client
      client:read_start(function(_, bytes)
        -- An answer that begins, and does not go on.
        if bytes and bytes:find("GET /half", 1, true) then
          client:write("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        elseif bytes and bytes:find("POST /deaf", 1, true) then
          client:read_stop()
        end
      end)
    end)
    fs.write(state .. "/large", ("x"):rep(16777216), { sync = false })
    local url = ("http://127.0.0.1:%d"):format(server:getsockname().port)
    local calls = {
      url .. "/none",
      url .. "/half",
      ("-H Expect: -X POST -T '%s/large' %s/deaf"):format(state, url),
      ("-X POST -T '%s/large' %s/read"):format(state, url),
    }
    task.map(calls, function(arguments)
      local script = call .. "call -o /dev/null " .. arguments .. " 2>/dev/null\n"
      local result = process.run({ "sh", stdin = script, timeout = 60 })
      assert.equal(28, result.code, arguments) -- curl's for an operation that takes too long
    end)
    for _, client in ipairs(taken) do
      client:close()
    end
    server:close()
  end)
end)
