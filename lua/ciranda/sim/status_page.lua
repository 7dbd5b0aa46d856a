--- A page for a browser at the simulator's root: slices, workers, states, and events as they happen.

local M = {}

local PAGE = [==[
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Simulated cloud</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --dim: #777; }
  body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
  th { font-weight: 600; color: var(--dim); } td:last-child { width: 55%; }
  small, time, .none { color: var(--dim); } small { display: block; }
  .state { display: inline-block; padding: 0 .5rem; border-radius: .7rem; background: #8883; font-size: .85rem; }
  .good { background: #2a94; } .bad { background: #d336; } .busy { background: #c906; }
  .worker { display: inline-block; margin: 0 .4rem .2rem 0; padding: 0 .4rem; border: 1px solid var(--line);
    border-radius: .3rem; font: 12px/1.6 ui-monospace, monospace; }
  .off { text-decoration: line-through; color: var(--dim); } .full { background: #d336; }
  #events { font: 12px/1.6 ui-monospace, monospace; max-height: 24rem; overflow: auto; white-space: pre-wrap; }
  #events .fault { color: #c33; font-weight: 600; } #trouble { color: #c22; }
</style>
<h1>Simulated cloud <span id="project"></span></h1>
<div><time id="time"></time> <span id="trouble" role="status"></span></div>
<h2>Queued resources</h2>
<table id="queued"><thead><tr><th>Name<th>Zone<th>Type<th>Slices<th>State</thead><tbody></tbody></table>
<h2>Slices and their workers</h2>
<table id="nodes"><thead><tr><th>Node<th>Zone<th>Type<th>State<th>Workers</thead><tbody></tbody></table>
<div id="more"></div>
<h2>Events</h2>
<div id="events" role="log"></div>
<script>
const GOOD = new Set(["ACTIVE", "READY"]);
const BAD = new Set(["FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED"]);
const $ = (id) => document.getElementById(id);
const make = (tag, text, name) => {
  const element = document.createElement(tag);
  element.append(text);
  if (name) element.className = name;
  return element;
};
const cell = (...content) => {
  const td = document.createElement("td");
  td.append(...content);
  return td;
};
const badge = (state) => make("span", state, "state " + (GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "busy"));
const fill = (body, rows) => {
  body.replaceChildren(...rows.map((cells) => {
    const tr = document.createElement("tr");
    tr.append(...cells);
    return tr;
  }));
  if (!rows.length) {
    const td = cell("none");
    td.colSpan = 5;
    td.className = "none";
    body.append(td);
  }
};
const workers = (list) => list.map((worker) => {
  const full = worker.diskFull ? " disk full" : "";
  const item = make("span", worker.index + " " + (worker.address || "-") + full, "worker");
  if (!worker.running) item.classList.add("off");
  if (full) item.classList.add("full");
  item.title = (worker.hostname || "") + (worker.running ? "" : ", off");
  return item;
});
// Limits and faults have a heading only when there are any.
const lists = (status) => {
  const limits = [];
  for (const kind of ["capacity", "quota"]) {
    for (const [place, use] of Object.entries(status[kind]).sort()) {
      if (use.limit !== undefined && use.in_use > 0) {
        limits.push([cell(kind), cell(place), cell(use.in_use + " of " + use.limit)]);
      }
    }
  }
  const faults = status.faults.map(({ id, kind, ...fields }) => [cell(kind), cell(
    Object.entries(fields).map(([name, value]) => name + "=" + JSON.stringify(value)).join(" "))]);
  const box = document.createDocumentFragment();
  for (const [title, rows] of [["Limits in use", limits], ["Faults to come", faults]]) {
    if (rows.length) {
      const table = make("table", document.createElement("tbody"));
      fill(table.tBodies[0], rows);
      box.append(make("h2", title), table);
    }
  }
  $("more").replaceChildren(box);
};
let last = 0;
const refresh = async () => {
  const status = await (await fetch("/sim/v1/status")).json();
  $("project").textContent = status.project;
  $("time").textContent = status.time.slice(0, 19).replace("T", " ") + " UTC";
  fill($("queued").tBodies[0], status.queuedResources.map((q) => [cell(q.id), cell(q.zone), cell(q.acceleratorType),
    cell(q.slices), cell(badge(q.state), q.initiator ? " by " + q.initiator : "", make("small", q.error || ""))]));
  fill($("nodes").tBodies[0], status.nodes.map((n) => [
    cell(n.id, make("small", n.queuedResource ? "slice " + n.slice + " of " + n.queuedResource : "")), cell(n.zone),
    cell(n.acceleratorType), cell(badge(n.state), make("small", n.health || "")), cell(...workers(n.workers))]));
  lists(status);
  const news = (await (await fetch("/sim/v1/events?since=" + last)).json()).events;
  for (const event of news) {
    last = event.id;
    $("events").prepend(make("div",
      event.time.slice(11, 23) + "  " + event.subject.split("/").pop() + "  " + event.text, event.kind));
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
