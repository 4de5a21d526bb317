/* Several servers or records side by side: their figures in one table and in the same charts, and each one's own dashboard
   below. Reads events, live or recorded. Text is only ever set as text, never as markup. */

import { $, known, make, number, say } from "./basics.js";
import { Chart } from "./charts.js";
import { startPlayer } from "./player.js";

const LOOKS = [["blue", "solid"], ["orange", "dash"], ["green", "dot"], ["pink", "solid"], ["red", "dash"], ["grey", "dot"]];
const charts = []; // [{name, chart}]
const lines = []; // of each arm {x: [], values: {name: []}}
const frames = []; // the arms' own pages
let about = null;

function status(state, text) {
  $("status").dataset.state = state;
  say($("status"), text);
}

// -- what is drawn ---------------------------------------------------------------------------------------------------

function build() {
  say($("title"), about.title);
  for (const { name, title, unit } of about.charts) {
    const section = make("section", undefined, "card"), box = make("div", undefined, "chart");
    section.append(make("h2", title), box);
    $("main").append(section);
    const series = about.arms.map((arm, i) => ({ name: arm.name, hue: LOOKS[i % LOOKS.length][0], dash: LOOKS[i % LOOKS.length][1], spans: true }));
    const options = { title, unit, over: () => [0, Math.max(5, ...lines.map((each) => each.x[each.x.length - 1] || 0))], timeTick: (v) => `${v} s` };
    charts.push({ name, chart: new Chart(box, series, options) });
    box.dataset.chart = name;
  }
  for (const arm of about.arms) {
    const section = make("section"), frame = make("iframe");
    frame.title = `Dashboard of ${arm.name}`;
    frame.src = arm.page;
    frame.addEventListener("load", () => fit(frame));
    section.append(make("h2", arm.name), frame);
    $("columns").append(section);
    frames.push(frame);
  }
  if (about.control) buildControl(about.control);
}

/** Make a frame as tall as what it shows. */
function fit(frame) {
  const page = frame.contentDocument;
  if (!page) return;
  const grow = () => { frame.style.height = `${page.body.scrollHeight + 8}px`; };
  new frame.contentWindow.ResizeObserver(grow).observe(page.body);
  grow();
}

function forget() {
  lines.length = 0;
  for (const _ of about.arms) lines.push({ x: [], values: {} });
}

/** Take an event in: points of the arms that run. A run that begins anew begins a new line. */
function gather(event) {
  for (const [index, point] of Object.entries(event.now || {})) {
    const line = lines[index];
    if (!line) continue;
    if (line.x.length && point.x < line.x[line.x.length - 1]) { line.x = []; line.values = {}; }
    line.x.push(point.x);
    for (const { name } of about.charts) (line.values[name] = line.values[name] || []).push(point[name] ?? null);
  }
}

function draw(event) {
  say($("words"), event.words || "–");
  drawTable(event.columns || [], event.rows || []);
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  for (const { name, chart } of charts) {
    const columns = lines.map((line) => {
      const at = new Map(line.x.map((x, i) => [x, (line.values[name] || [])[i] ?? null]));
      return places.map((x) => at.get(x) ?? null);
    });
    const carried = columns.map((column) => { let last = null; return column.map((value) => (last = value ?? last)); });
    chart.draw([places, ...columns], carried);
  }
  const verdict = event.verdict || [];
  $("verdict").hidden = !verdict.length;
  if (verdict.length !== $("verdict-lines").children.length) $("verdict-lines").replaceChildren(...verdict.map((text) => make("li", text)));
  $("report").hidden = !event.report;
  document.documentElement.dataset.state = event.state || "";
}

function drawTable(columns, rows) {
  const table = $("rows"), [head, body] = [table.tHead, table.tBodies[0]];
  if (head.rows.length !== 1 || head.rows[0].cells.length !== columns.length + 1) {
    const row = make("tr");
    row.append(make("th", "arm"), ...columns.map((name) => make("th", name)));
    for (const cell of row.cells) cell.scope = "col";
    head.replaceChildren(row);
    body.replaceChildren();
  }
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((values, i) => {
    let row = body.rows[i];
    if (!row) {
      row = make("tr");
      const name = make("th");
      name.scope = "row";
      row.append(name, ...columns.map(() => make("td")));
      body.append(row);
    }
    values.forEach((value, j) => { if (row.cells[j]) say(row.cells[j], typeof value === "number" ? number(value) : known(value) || value ? String(value) : "–"); });
  });
}

// -- the load --------------------------------------------------------------------------------------------------------

function buildControl({ rate, mixes, burst }) {
  $("control").hidden = false;
  say($("control-note"), `All arms get the same. Between ${rate[0]} and ${rate[1]} requests/s; a burst is ${burst} at once. Where arms take turns, changes count while the first one runs; the others get the same requests. The key stays in this page's memory.`);
  Object.assign($("control-rate"), { min: rate[0], max: rate[1], value: rate[2] });
  $("control-mix").append(...mixes.map((name) => make("option", name)));
  const send = async (change) => {
    const answer = await fetch("/compare/control", {
      method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${$("control-key").value.trim()}` },
      body: JSON.stringify(change), credentials: "omit",
    });
    const said = await answer.json();
    say($("control-said"), answer.ok ? "Set." : said.error.message);
  };
  $("control-form").addEventListener("submit", (event) => { event.preventDefault(); send({ rate: Number($("control-rate").value), mix: $("control-mix").value }); });
  $("control-burst").addEventListener("click", () => send({ burst: true }));
}

// -- where events come from ------------------------------------------------------------------------------------------

async function live() {
  let seen = 0; // events of earlier connections
  for (;;) {
    try {
      const answer = await fetch("/compare/events", { cache: "no-store", credentials: "omit" });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", place = 0, last = null;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          if (!part.startsWith("data: ")) continue;
          last = JSON.parse(part.slice("data: ".length));
          if (place++ >= seen) gather(last);
        }
        seen = Math.max(seen, place);
        if (!last) continue;
        status(last.state === "failed" ? "down" : last.state === "done" ? "replay" : "live", { running: "Live", done: "Done", failed: "Failed" }[last.state] || "Starting");
        draw(last);
      }
    } catch {
      // it has ended; what it was is still drawn
    }
    if (document.documentElement.dataset.state === "done") return;
    status("down", "Connection lost; trying again");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function replay() {
  const answer = await fetch("/compare/events", { cache: "no-store", credentials: "omit" });
  const events = await answer.json();
  status("replay", "Replay");
  let shown = 0;
  startPlayer(events[events.length - 1].time, (at) => {
    let wanted = events.findIndex((event) => event.time > at);
    wanted = wanted < 0 ? events.length : Math.max(1, wanted);
    if (wanted < shown) { forget(); shown = 0; }
    for (; shown < wanted; shown++) gather(events[shown]);
    draw(events[wanted - 1]);
    for (const frame of frames) frame.contentWindow?.postMessage(at, location.origin);
  });
}

about = await (await fetch("/compare/about", { cache: "no-store", credentials: "omit" })).json();
forget();
build();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const { chart } of charts) chart.build(); });
if (about.live) live();
else replay();
