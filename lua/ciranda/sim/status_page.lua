--- A page for a browser at the simulator's root: slices, workers, states, and events as they happen.

local M = {}

local PAGE = [==[
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Simulated cloud</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --dim: #888; }
  body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
  table { border-collapse: collapse; width: 100%; } caption { text-align: left; color: var(--dim); }
  th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
  th { font-weight: 600; color: var(--dim); }
  .state { display: inline-block; padding: 0 .5rem; border-radius: .7rem; background: #8883; font-size: .85rem; }
  .good { background: #2a94; } .bad { background: #d336; } .busy { background: #c906; }
  .worker { display: inline-block; margin: 0 .4rem .2rem 0; padding: 0 .4rem; border: 1px solid var(--line);
    border-radius: .3rem; font: 12px/1.6 ui-monospace, monospace; }
  .off { text-decoration: line-through; color: var(--dim); }
  #events { font: 12px/1.6 ui-monospace, monospace; max-height: 24rem; overflow: auto; white-space: pre-wrap; }
  #trouble { color: #c22; } time { color: var(--dim); }
</style>
<h1>Simulated cloud <span id="project"></span></h1>
<div><time id="time"></time> <span id="trouble" role="status"></span></div>
<h2>Queued resources</h2>
<table id="queued"><thead><tr><th>Name<th>Zone<th>Type<th>Slices<th>State</thead><tbody></tbody></table>
<h2>Nodes</h2>
<table id="nodes"><thead><tr><th>Name<th>Zone<th>Type<th>State<th>Workers</thead><tbody></tbody></table>
<h2>Events</h2>
<div id="events" role="log"></div>
<script>
const GOOD = new Set(["ACTIVE", "READY"]);
const BAD = new Set(["FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED"]);
const $ = (id) => document.getElementById(id);
const cell = (content) => {
  const td = document.createElement("td");
  td.append(content);
  return td;
};
const badge = (state, title) => {
  const span = document.createElement("span");
  span.className = "state " + (GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "busy");
  span.textContent = state;
  if (title) span.title = title;
  return span;
};
const fill = (id, rows, none) => {
  const body = $(id).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const tr = document.createElement("tr");
    tr.append(...cells);
    return tr;
  }));
  if (!rows.length) {
    const tr = document.createElement("tr"), td = cell(none);
    td.colSpan = 5;
    tr.append(td);
    body.append(tr);
  }
};
const workers = (list) => {
  const box = document.createElement("span");
  for (const worker of list) {
    const item = document.createElement("span");
    item.className = "worker" + (worker.running ? "" : " off");
    item.textContent = worker.index + " " + (worker.address || "-");
    item.title = worker.hostname || "";
    box.append(item);
  }
  return box;
};
let last = 0;
const refresh = async () => {
  const status = await (await fetch("/sim/v1/status")).json();
  $("project").textContent = status.project;
  $("time").textContent = status.time;
  fill("queued", status.queuedResources.map((q) =>
    [cell(q.id), cell(q.zone), cell(q.acceleratorType), cell(q.slices), cell(badge(q.state, q.error))]),
    "none");
  fill("nodes", status.nodes.map((n) =>
    [cell(n.id), cell(n.zone), cell(n.acceleratorType), cell(badge(n.state, n.health)), cell(workers(n.workers))]),
    "none");
  const news = (await (await fetch("/sim/v1/events?since=" + last)).json()).events;
  for (const event of news) {
    last = event.id;
    const line = document.createElement("div");
    line.textContent = event.time.slice(11, 23) + "  " + event.subject.split("/").pop() + "  " + event.text;
    $("events").prepend(line);
  }
  while ($("events").childElementCount > 500) $("events").lastChild.remove();
};
const loop = async () => {
  try {
    await refresh();
    $("trouble").textContent = "";
  } catch (problem) {
    $("trouble").textContent = "the simulator does not answer";
  }
  setTimeout(loop, 500);
};
loop();
</script>
]==]

---@class ciranda.sim.StatusPage
local Page = {}
Page.__index = Page

---@return ciranda.sim.StatusPage
function M.new()
  return setmetatable({}, Page)
end

---@param path string
---@return boolean
function Page:serves(path)
  return path == "/"
end

--- Answer a request.
---@param request table
---@return table answer
function Page:handle(request)
  local headers = {
    ["Content-Type"] = "text/html; charset=utf-8",
    ["Cache-Control"] = "no-store",
    -- Clients that look for Compute Engine ping this address and expect the header.
    ["Metadata-Flavor"] = "Google",
  }
  if request.method ~= "GET" and request.method ~= "HEAD" then
    return { status = 405, headers = { Allow = "GET, HEAD" }, body = "" }
  end
  return { status = 200, headers = headers, body = PAGE }
end

return M
