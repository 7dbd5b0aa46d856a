-- The simulator's page in a browser: headless Chromium, which is told what happens while it looks.
local control = require("ciranda.sim.control")
local disk = require("ciranda.sim.disk")
local fs = require("ciranda.io.fs")
local gateway = require("ciranda.sim.gateway")
local json = require("ciranda.io.json")
local oauth = require("ciranda.sim.oauth")
local process = require("ciranda.io.process")
local request_log = require("ciranda.sim.request_log")
local server = require("ciranda.io.server")
local status_page = require("ciranda.sim.status_page")
local task = require("ciranda.task")
local support = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "support.lua")

-- How often the page looks, in steps of 80 seconds of the simulated day; and seconds for all of it, nearly all that a
-- test may take (ciranda.cli.testing).
local LOOKS = 26
local DEADLINE = (tonumber(os.getenv("CIRANDA_TEST_TIMEOUT")) or 120) - 10

local function browser()
  for _, name in ipairs({ "chromium", "chromium-browser", "google-chrome" }) do
    local found = process.run({ "/bin/sh", "-c", "command -v " .. name })
    if found.code == 0 then
      return found.stdout:match("%S+")
    end
  end
end

-- What the page shows each time it is another thing: the text of both tables, in order. After each look, in place of
-- the pause until the next, the whole page is handed in, with how large a table is drawn: the browser does so itself
-- only when it ends, which it may fail to do.
local RECORDER = [[
<pre id="seen"></pre>
<script>
const seen = document.getElementById("seen");
let before = "";
new MutationObserver(() => {
  const text = ["queued", "nodes"].map((id) => document.getElementById(id).tBodies[0].innerText).join(" / ")
    .replace(/\s+/g, " ");
  if (text !== before) seen.append(text + "\n");
  before = text;
}).observe(document.body, { childList: true, subtree: true });
window.setTimeout = async (next) => {
  const drawn = document.getElementById("nodes").getBoundingClientRect();
  await fetch("/recorded", {
    method: "POST", headers: { Drawn: drawn.width + " " + drawn.height }, body: document.documentElement.outerHTML,
  });
  next();
};
</script>
]]

describe("the simulator's page in a browser", function()
  it("shows slices, workers, states and events, and follows them", function()
    local program = browser()
    if not program then
      pending("chromium is not installed")
      return
    end
    local _ <close> = task.scope()
    local project = support.project({ capacity = 64 })
    local requests = request_log.new(project.clock)
    local handler = gateway.new({
      world = project.world,
      oauth = oauth.new({ clock = project.clock, project = "p", project_number = "42" }),
      requests = requests,
      services = { control.new(project.world, requests), project.service, status_page.new() },
    })
    -- Each look of the page is a step of the day.
    local looks = 0
    local queued = "/v2/" .. support.ZONE .. "/queuedResources"
    local steps = {
      [3] = function()
        project.call(
          "POST",
          queued .. "?queuedResourceId=job",
          support.queued_resource(2, nil, { spot = json.object() })
        )
      end,
      [10] = function()
        project.world.faults:add({ kind = "lose", name = "job-1" })
      end,
      [18] = function()
        project.world.faults:add({ kind = "halt", name = "nobody-<b>", after = 1e6 })
        project.world.queued_resources:preempt(project.world.nodes:list(function()
          return true
        end)[1])
      end,
    }
    local dom, drawn
    local recorded = task.event()
    local page <close> = server.listen({
      handler = function(request)
        if request.path == "/recorded" then
          dom, drawn = request.body, request.headers["Drawn"]
          if looks == LOOKS then
            recorded:set()
          end
          return { status = 204 }
        elseif request.path == "/sim/v1/status" then
          looks = looks + 1
          project.clock:advance(80)
          if steps[looks] then
            steps[looks]()
          end
        end
        local answer = handler(request)
        if request.path == "/" then
          answer.body = answer.body .. RECORDER
        end
        return answer
      end,
    })
    local directory = fs.tempdir("ciranda-page-")
    local argv = {
      program,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--disable-dev-shm-usage",
      "--no-first-run",
      "--user-data-dir=" .. directory .. "/profile",
      "--window-size=1200,900",
      page.url .. "/",
      env = { HOME = directory, XDG_CONFIG_HOME = directory, XDG_CACHE_HOME = directory },
    }
    local _, which, ended = pcall(task.timeout, DEADLINE, task.race, {
      function()
        recorded:wait()
      end,
      function()
        return process.run(argv)
      end,
    })
    disk.remove(directory)
    assert.are.equal(
      1,
      which,
      ("after %d looks: %s"):format(looks, ended and ended.stderr or tostring(which))
    )

    -- As they happened.
    local seen = assert(dom:match('<pre id="seen">(.-)</pre>'), dom)
    local at = 1
    for _, text in ipairs({
      "none / none\n",
      "job us%-west4%-a v5litepod%-16 2 CREATING / none\n",
      "2 PROVISIONING / job%-0 slice 0 of job us%-west4%-a v5litepod%-16 CREATING",
      "2 ACTIVE / job%-0 .-READY HEALTHY 0 192%.0%.2%.1%s?1 192%.0%.2%.2",
      "job%-1 slice 1 of job us%-west4%-a v5litepod%-16 REPAIRING",
      "2 ACTIVE / job%-0 .-READY HEALTHY .-job%-1 .-READY HEALTHY",
      "2 SUSPENDING by SERVICE / ",
      "2 SUSPENDED by SERVICE / none\n",
    }) do
      local first, last = seen:find(text, at)
      assert.is_truthy(first, text .. " does not come after " .. at .. " in:\n" .. seen)
      at = last
    end

    -- And at the end.
    local events = dom:match('<div id="events".->(.-)</div></div>') or dom:match('<div id="events".*')
    local _, created = events:gsub("job%-0  CREATING", "")
    assert.are.equal(1, created, "each event once")
    assert.is_truthy(events:find('class="fault"', 1, true))
    assert.is_truthy(
      events:find("SUSPENDED", 1, true) < events:find("PROVISIONING", 1, true),
      "the last first"
    )
    assert.is_truthy(dom:find("Faults to come", 1, true))
    assert.is_truthy(dom:find('name="nobody-&lt;b&gt;"', 1, true), "names are text")
    assert.is_truthy(dom:find('<span id="trouble" role="status"></span>', 1, true))
    local width, height = drawn:match("^([%d.]+) ([%d.]+)$")
    assert.is_true(tonumber(width) > 600 and tonumber(height) > 20, drawn)
  end)
end)
