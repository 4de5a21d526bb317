/* The dashboard: reads frames from /dashboard/events and draws them. Text is only ever set as text, never as markup. */

import { $, ago, duration, known, make, number, percent, say, sum, whole } from "./basics.js";
import { Chart } from "./charts.js";
import { byLabel, LATENCIES, LONG, makeHistory, SPREAD, WINDOW } from "./history.js";
import { startOperator } from "./operator.js";
import { startPlayer } from "./player.js";
import { startPlayground } from "./playground.js";

const MODE = document.documentElement.dataset.mode || "live"; // "arm": one of several; "replay": what was recorded
const FRAMED = window.parent !== window; // a part of another page
const SILENCE = 5000; // ms without a frame after which the connection is given up
const LANES = ["prefill", "decode", "verify"];
const NOT_UP = "the engine is not up";
const NAMES = { waiting: "waiting", prefill: "prefill", decode: "draft", verify: "verify" };
const SINCE = [
  ["Tokens written", "vllm:generation_tokens_total"],
  ["Prompt tokens", "vllm:prompt_tokens_total"],
  ["Prompt tokens found in the prefix cache", "vllm:prefix_cache_hits_total"],
  ["Drafts verified", "vllm:spec_decode_num_drafts_total"],
  ["Draft tokens verified", "vllm:spec_decode_num_draft_tokens_total"],
  ["Draft tokens accepted", "vllm:spec_decode_num_accepted_tokens_total"],
  ["Passes of the verifier", "verifypd:verifier_passes_total"],
  ["Requests that ended well", 'verifypd:calls_total{outcome="ok"}'],
  ["Requests within their targets", "verifypd:requests_within_slo_total"],
  ["Changes of architecture", "verifypd:architecture_switches_total"],
  ["Preemptions", "vllm:num_preemptions_total"],
  ["Steps out of memory", "verifypd:out_of_memory_steps_total"],
  ["Times the engine was started again", "verifypd:engine_restarts_total"],
  ["Running now", "vllm:num_requests_running"],
  ["Waiting now", "vllm:num_requests_waiting"],
];

const lookAt = { latency: "ttft" };
const { frames, base, growth, buckets, latency, remember, clear, reach } = makeHistory();
const operator = MODE === "live" ? startOperator({ frames, buckets }) : () => {};
const charts = {};

function chart(id, series, options) {
  charts[id] = new Chart($(id), series, { over: () => [-reach(), 0], ...options });
}

const shareRange = () => [0, 1];
const shareTick = (v) => `${Math.round(100 * v)} %`;

function makeCharts() {
  chart("c-tokens", [
    { name: "written", hue: "blue", fill: true }, { name: "prompt tokens taken in", hue: "grey", dash: "dash" },
  ], { title: "Tokens per second", unit: "tokens/s", empty: "nothing runs" });
  chart("c-requests", [
    { name: "finished", hue: "blue" }, { name: "within targets (goodput)", hue: "green", dash: "dash" },
  ], { title: "Requests per second", unit: "requests/s" });
  chart("c-latency", [
    { name: "p50", hue: "blue" }, { name: "p95", hue: "orange", dash: "dash" }, { name: "p99", hue: "red", dash: "dot" },
    { name: "target", hue: "grey", width: 1 },
  ], { title: "Latency percentiles", unit: "ms", format: duration, empty: "no request has ended lately" });
  chart("c-spread", [{ name: "counted", hue: "blue", bars: 0.82, format: whole.format }], {
    title: "Latency histogram", unit: "count", xUnit: "ms, up to", splits: true, xLabels: () => spreadLabels, total: sum, height: 218,
    tick: (v) => (Number.isInteger(v) ? whole.format(v) : ""), empty: "no request has ended lately",
  });
  chart("c-steps", [
    { name: "rest (host, waiting)", hue: "grey", bars: 0.8 }, { name: "verify", hue: "green", bars: 0.8 },
    { name: "verify with prompts in it", hue: "pink", bars: 0.8 }, { name: "draft", hue: "orange", bars: 0.8 },
    { name: "prefill", hue: "blue", bars: 0.8 },
  ], { title: "Time of the latest steps", unit: "ms", xUnit: "step", splits: true, xLabels: () => stepLabels, format: duration, total: (column) => (column.length ? sum(column) / column.length : null), empty: "no step yet" });
  chart("c-gain", [
    { name: "tokens per pass ÷ cost", hue: "green" }, { name: "predicted by the controller", hue: "orange", dash: "dash" },
    { name: "plain", hue: "grey", width: 1, quiet: true },
  ], { title: "Gain against plain decoding", unit: "times plain", format: (v) => (known(v) ? `×${v.toFixed(2)}` : "–"), tick: (v) => `×${v}`, range: (low, high) => [Math.min(0.8, (low ?? 1) * 0.95), Math.max(1.25, (high ?? 1) * 1.1)] });
  chart("c-length", [
    { name: "drafted", hue: "orange" }, { name: "stood", hue: "green", dash: "dash" }, { name: "chosen (longest)", hue: "grey", dash: "dot", width: 1.5 },
  ], { title: "Draft length", unit: "tokens a draft", height: 218, empty: "nothing is drafted" });
  chart("c-position", [
    { name: "measured", hue: "green", bars: 0.7, quiet: true }, { name: "predicted by the controller", hue: "red", dots: true, quiet: true },
  ], { title: "Acceptance by position in the draft", unit: "share of drafts", xUnit: "token of the draft", splits: true, xLabels: () => positionLabels, range: shareRange, tick: shareTick, format: percent, empty: "nothing is drafted" });
  chart("c-context", [{ name: "measured", hue: "green", bars: 0.7, quiet: true }], {
    title: "Acceptance by context length", unit: "share of tokens", xUnit: "tokens of the request, up to", splits: true, xLabels: () => contextLabels, range: shareRange, tick: shareTick, format: percent, empty: "nothing is drafted",
  });
  chart("c-device", [{ name: "engine's CPU", hue: "blue", fill: true, format: (v) => (known(v) ? `${v.toFixed(2)} cores` : "–") }], { title: "CPU of the engine", unit: "cores busy", empty: "nothing yet" });
}

let spreadLabels = [], stepLabels = [], positionLabels = [], contextLabels = [];

/** Columns over time of what `derive` made. */
function overTime(...names) {
  const now = frames[frames.length - 1].at;
  return [frames.map((frame) => frame.at - now), ...names.map((name) => frames.map((frame) => (known(frame.derived[name]) ? frame.derived[name] : null)))];
}

// -- panels ------------------------------------------------------------------------------------------------------

function drawTiles(frame) {
  const d = frame.derived, m = frame.metrics;
  say($("t-tokens"), number(d.tokens));
  say($("t-requests"), number(d.requests));
  say($("t-good"), number(d.good));
  const ended = growth(frame, 'verifypd:calls_total{outcome="ok"}', SPREAD);
  const good = growth(frame, "verifypd:requests_within_slo_total", SPREAD);
  const { slo_ttft: first, slo_tpot: each } = frame.server;
  const targets = `first token ${known(first) ? duration(first) : "any"}, then ${known(each) ? duration(each) : "any"} each`;
  say($("t-good-sub"), ended ? `of the last ${SPREAD} s ${percent(good / ended)} within ${targets}` : `targets: ${targets}`);
  say($("t-running"), frame.server.ready ? number(m["vllm:num_requests_running"]).replace(/\.00?$|\.0$/, "") : "–");
  say($("t-slots"), known(frame.server.slots) ? `of ${frame.server.slots} slots` : "");
  say($("t-waiting"), frame.server.ready ? `${whole.format(m["vllm:num_requests_waiting"] || 0)} wait for a slot` : NOT_UP);
  say($("t-gain"), known(d.gain) ? `×${d.gain.toFixed(2)}` : "–");
  say($("t-gain-sub"), known(d.perPass) ? `${d.perPass.toFixed(2)} tokens a pass${known(d.stretch) ? `, ×${d.stretch.toFixed(2)} its cost` : ""}` : "nothing decodes now");
  const drafted = growth(frame, "vllm:spec_decode_num_draft_tokens_total", LONG);
  const accepted = growth(frame, "vllm:spec_decode_num_accepted_tokens_total", LONG);
  say($("t-accept"), drafted ? percent(accepted / drafted) : "–");
  say($("t-accept-sub"), drafted ? `of ${number(drafted / Math.max(0.5, frame.at - base(frame, LONG).at))} draft tokens/s, mean of 10 s` : frame.server.drafter ? "nothing is drafted now" : "this server has no drafter");
}

const dots = new Map(); // request number -> element

function drawLanes(frame) {
  const m = frame.metrics, live = frame.live;
  const steps = live.steps || [], step = steps[steps.length - 1];
  placeDots(frame);
  for (const lane of document.querySelectorAll(".lane")) {
    const name = lane.dataset.lane, [wait, batch] = lane.querySelectorAll("[data-say]");
    if (!frame.server.ready) {
      say(lane.querySelector("b"), "–");
      say(wait, NOT_UP);
      say(batch, "");
      continue;
    }
    if (name === "waiting") {
      say(lane.querySelector("b"), whole.format(m["vllm:num_requests_waiting"] || 0));
      const waits = (live.waiting || []).map((each) => each[1]);
      say(wait, waits.length ? `longest wait ${duration(Math.max(...waits))}` : "nobody waits");
      continue;
    }
    say(lane.querySelector("b"), whole.format(m[`verifypd:lane_depth{lane="${name}"}`] || 0));
    const quantile = (q) => duration(1e3 * m[`verifypd:lane_wait_seconds{lane="${name}",quantile="0.${q}"}`] || null);
    say(wait, `wait p50 ${quantile(50)}, p95 ${quantile(95)}`);
    say(batch, step ? `latest batch: ${batchWords(name, step)}` : "no batch yet");
  }
}

function batchWords(name, [, , , , , , drafting, longest, verifying, chunk]) {
  if (name === "prefill") return chunk ? `${whole.format(chunk)} prompt tokens` : "none";
  if (name === "decode") return longest ? `${drafting} × up to ${longest} tokens` : "none";
  return verifying ? `${verifying} request${verifying === 1 ? "" : "s"}` : "none";
}

function placeDots(frame) {
  const holder = $("dots"), origin = holder.getBoundingClientRect(), live = frame.server.ready ? frame.live : {};
  const places = (live.waiting || []).map(([order]) => [order, "waiting", 0]);
  for (const [order, lane, carried] of live.requests || []) places.push([order, LANES[lane], carried]);
  const pens = {};
  for (const lane of document.querySelectorAll(".lane")) {
    const box = lane.querySelector(".pen").getBoundingClientRect();
    pens[lane.dataset.lane] = { x: box.left - origin.left + 8, y: box.top - origin.top + 8, across: Math.max(1, Math.floor((box.width - 12) / 18)), down: 4, used: 0 };
  }
  const here = new Set();
  places.sort((a, b) => b[2] - a[2] || a[0] - b[0]);
  for (const [order, lane, carried] of places) {
    const pen = pens[lane], nth = pen.used++;
    if (nth >= pen.across * pen.down) continue; // the number above says how many there are
    here.add(order);
    let dot = dots.get(order);
    if (!dot) {
      dot = make("div", undefined, "dot");
      dot.style.transform = `translate(${pens.waiting.x}px, ${pens.waiting.y}px)`;
      holder.append(dot);
      dots.set(order, dot);
      dot.getBoundingClientRect(); // so that it sets out from there
    }
    dot.dataset.lane = lane;
    dot.dataset.carried = carried;
    dot.style.transform = `translate(${pen.x + (nth % pen.across) * 18}px, ${pen.y + Math.floor(nth / pen.across) * 18}px)`;
  }
  for (const [order, dot] of dots) {
    if (here.has(order)) continue;
    dots.delete(order);
    dot.classList.add("left");
    setTimeout(() => dot.remove(), 450);
  }
}

function drawLatency(frame) {
  const which = lookAt.latency, about = LATENCIES[which], now = frame.at;
  const target = about.target ? frame.server[about.target] : null;
  const lines = [0, 1, 2].map((i) => frames.map((each) => latency(each, which)[i]));
  const top = Math.max(0, ...lines.flat().filter(known));
  const near = known(target) && target < 4 * top; // one far above would flatten the lines
  charts["c-latency"].draw(
    [frames.map((each) => each.at - now), ...lines, frames.map(() => (near ? target : null))],
    [...lines, frames.map(() => target)],
  );
  say($("latency-note"), `${about.text} Of the last ${SPREAD} s, read from the buckets of /metrics.`);
  const spread = buckets(frame, about.metric, WINDOW);
  const first = spread.findIndex((bucket) => bucket.count), last = spread.findLastIndex((bucket) => bucket.count);
  const shown = first < 0 ? [] : spread.slice(Math.max(0, first - 1), Math.min(spread.length, last + 2));
  spreadLabels = shown.map(({ bound }) => (bound === Infinity ? "more" : String(+(1e3 * bound).toPrecision(3))));
  charts["c-spread"].draw([shown.map((_, i) => i), shown.map((bucket) => bucket.count)]);
  const span = Math.round(now - base(frame, WINDOW).at);
  say($("spread-note"), `${about.text} Of the last ${span < WINDOW ? `${span} s` : "two minutes"}, ${about.of} by bucket.`);
}

function drawSteps(frame) {
  const steps = frame.live.steps || [];
  stepLabels = steps.map((step) => String(step[0]));
  const part = (i) => steps.map((step) => step[i] / 1e3);
  const [prefill, draft, passes, rest] = [2, 3, 4, 5].map(part);
  const riding = steps.map((step) => step[9] > 0 && step[2] === 0); // prompt chunks in the verify pass
  const verify = passes.map((ms, i) => (riding[i] ? 0 : ms)), mixed = passes.map((ms, i) => (riding[i] ? ms : 0));
  const upTo = (...columns) => steps.map((_, i) => sum(columns.map((column) => column[i])));
  charts["c-steps"].draw(
    [steps.map((_, i) => i), upTo(prefill, draft, passes, rest), upTo(prefill, draft, passes), upTo(prefill, draft, mixed), upTo(prefill, draft), prefill],
    [rest, verify, mixed, draft, prefill],
  );
  const mean = steps.length ? sum(steps.map((_, i) => prefill[i] + draft[i] + passes[i] + rest[i])) / steps.length : null;
  say($("steps-note"), steps.length ? `The latest ${steps.length} steps of the engine, oldest left: ${duration(mean)} each on average. The key gives means; point at a step for its own times.` : "The engine has not run a step yet.");
}

function drawGain(frame) {
  const columns = overTime("gain", "predicted");
  charts["c-gain"].draw([...columns, frames.map(() => 1)]);
  say($("why"), reason(frame));
  const policy = frame.live.policy || {}, body = $("policy").tBodies[0];
  const names = Object.keys(policy);
  if (body.rows.length !== names.length) body.replaceChildren(...names.map(() => { const row = make("tr"), head = make("th"); head.scope = "row"; row.append(head, make("td")); return row; }));
  names.forEach((name, i) => {
    const value = policy[name];
    say(body.rows[i].cells[0], name.replaceAll("_", " "));
    say(body.rows[i].cells[1], typeof value === "number" ? String(+value.toPrecision(4)) : String(value));
  });
}

/** Why drafts are as long as they are, from what the engine measured and predicted. */
function reason(frame) {
  const d = frame.derived, price = d.price, policy = frame.live.policy || {};
  if (!known(d.perPass)) return "Nothing decodes now.";
  if (!d.length) {
    const gain = known(policy.gain) ? ` The controller predicts ×${policy.gain.toFixed(2)} from drafting; it asks for more than ×${(1 + (policy.margin || 0)).toFixed(2)}.` : "";
    return `Nothing is drafted: a pass gives every request one token.${gain}`;
  }
  const start = `Drafts of ${d.length.toFixed(1)} tokens, of which ${d.stood.toFixed(1)} stand: a pass gives a request ${d.perPass.toFixed(2)} tokens.`;
  if (!price || !known(d.stretch)) return `${start} No cost model has been fitted, so their price is not known.`;
  const each = (seconds) => duration(1e3 * seconds / price.steps);
  return `${start} The cost model puts a step without prompts at ${each(price.predicted)} with its drafts and ${each(price.undrafted)} without them (measured: ${each(price.measured)}): ${d.perPass.toFixed(2)} ÷ ${d.stretch.toFixed(2)} = ×${d.gain.toFixed(2)}.`;
}

function drawAcceptance(frame) {
  const old = base(frame, WINDOW);
  const grown = (name, label) => {
    const now = byLabel(frame.metrics, name, label), then = byLabel(old.metrics, name, label);
    return Object.fromEntries(Object.entries(now).map(([key, value]) => [key, value - (then[key] || 0)]));
  };
  const judged = grown("verifypd:draft_tokens_per_pos_total", "position");
  const stood = grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position");
  const predicted = frame.live.survival || [];
  const places = Object.keys(judged).map(Number).filter((i) => judged[i] > 0).sort((a, b) => a - b);
  positionLabels = places.map((i) => String(i + 1));
  charts["c-position"].draw([places.map((_, i) => i), places.map((i) => (stood[i] || 0) / judged[i]), places.map((i) => predicted[i] ?? null)]);
  const all = byLabel(frame.metrics, "verifypd:draft_tokens_by_context_total", "context");
  const kept = byLabel(frame.metrics, "verifypd:accepted_tokens_by_context_total", "context");
  const sizes = Object.keys(all).map(Number).filter((size) => all[size] > 0).sort((a, b) => a - b);
  contextLabels = sizes.map((size) => whole.format(size));
  charts["c-context"].draw([sizes.map((_, i) => i), sizes.map((size) => (kept[size] || 0) / all[size])]);
}

function drawArchitecture(frame) {
  say($("arch-ran"), frame.architecture || "–");
  say($("arch-policy"), frame.policy && frame.policy !== frame.architecture ? `plans now, chosen by “${frame.policy}”` : frame.policy ? "is set and plans every step" : "");
  const steps = byLabel(frame.metrics, "verifypd:architecture_steps_total", "architecture");
  const total = sum(Object.values(steps)), holder = $("arch-shares");
  const names = Object.keys(steps).sort((a, b) => steps[b] - steps[a]);
  while (holder.children.length > names.length) holder.lastChild.remove();
  names.forEach((name, i) => {
    const row = holder.children[i] || holder.appendChild(bar());
    fill(row, `${name}: ${whole.format(steps[name])} steps (${percent(steps[name] / total)})`, [["step", steps[name] / total]]);
  });
  const changes = [...(frame.live.changes || [])].reverse();
  const list = $("changes"), wanted = Math.max(1, changes.length);
  while (list.children.length > wanted) list.lastChild.remove();
  while (list.children.length < wanted) list.append(make("li"));
  if (!changes.length) say(list.children[0], "none so far");
  changes.forEach(([at, before, after, why], i) => say(list.children[i], `${ago(frame.live.time - at)}: ${before} → ${after}: ${why}`));
}

function bar() {
  const row = make("div", undefined, "row"), line = make("div", undefined, "bar");
  line.setAttribute("aria-hidden", "true");
  row.append(make("span"), line);
  return row;
}

/** A row of text and a bar of parts, [[class, share]]. */
function fill(row, text, parts) {
  say(row.firstChild, text);
  const line = row.lastChild;
  while (line.children.length > parts.length) line.lastChild.remove();
  parts.forEach(([kind, share], i) => {
    const piece = line.children[i] || line.appendChild(make("i"));
    piece.className = kind;
    piece.style.width = `${Math.min(100, 100 * share).toFixed(2)}%`;
  });
}

function drawMemory(frame) {
  const found = {};
  for (const key in frame.metrics) {
    const match = /^verifypd:kv_blocks\{pool="([^"]*)",state="([^"]*)"\}$/.exec(key);
    if (match) (found[match[1]] = found[match[1]] || {})[match[2]] = frame.metrics[key];
  }
  const holder = $("pools"), names = frame.server.ready ? Object.keys(found) : [];
  if (holder.firstChild?.tagName === "P") holder.replaceChildren();
  while (holder.children.length > Math.max(1, names.length)) holder.lastChild.remove();
  names.forEach((name, i) => {
    const { used = 0, cached = 0, free = 0 } = found[name], total = used + cached + free || 1;
    const row = holder.children[i] || holder.appendChild(bar());
    fill(row, `${name === "draft" ? "Draft model" : "Verifier"}: ${whole.format(used)} of ${whole.format(used + cached + free)} blocks in use (${percent(used / total)}), ${whole.format(cached)} kept for prefixes (hatched)`, [["used", used / total], ["cached", cached / total]]);
  });
  if (!frame.server.ready) holder.replaceChildren(make("p", NOT_UP, "quiet"));
  const usage = frame.metrics["vllm:kv_cache_usage_perc"];
  if (frame.server.ready && !names.length && known(usage)) fill(holder.children[0] || holder.appendChild(bar()), `${percent(usage)} of the KV cache in use`, [["used", usage]]);
  const hits = frame.metrics["vllm:prefix_cache_hits_total"] || 0, asked = frame.metrics["vllm:prefix_cache_queries_total"] || 0;
  say($("prefix"), asked ? `${whole.format(hits)} of ${whole.format(asked)} prompt tokens were found there (${percent(hits / asked)}).` : "No prompt has been looked up yet.");
}

const GPU = [["gpu", "GPU busy", "blue"], ["sm", "multiprocessors busy", "green", "dash"], ["occupancy", "SM occupancy", "pink", "dot"], ["dram", "memory bandwidth", "orange", "dash"]];

function drawDevice(frame) {
  const m = frame.metrics, there = GPU.filter(([name]) => known(frame.derived[name]));
  if (there.length && charts["c-device"].series.length !== there.length) {
    charts["c-device"].u.destroy();
    $("c-device").replaceChildren();
    chart("c-device", there.map(([, name, hue, dash]) => ({ name, hue, dash, format: percent })), { title: "GPU", unit: "share", range: shareRange, tick: shareTick });
  }
  charts["c-device"].draw(there.length ? overTime(...there.map(([name]) => name)) : overTime("cpu"));
  const gigabytes = (name) => (m[name] / 2 ** 30).toFixed(1);
  say($("device-note"), there.length
    ? `${gigabytes("verifypd:memory_used_bytes")} of ${gigabytes("verifypd:memory_total_bytes")} GiB of memory in use, ${number(m["verifypd:power_watts"])} W. The engine's process uses ${number(frame.derived.cpu)} CPU cores.`
    : "Processor time of the engine's process, in cores; this server's engine reports no GPU.");
}

function drawSince(frame) {
  const body = $("since").tBodies[0];
  if (!body.rows.length) {
    for (const [name, metric] of SINCE) {
      const row = make("tr"), head = make("th", name), cell = make("td");
      head.scope = "row";
      head.append(make("code", metric));
      cell.dataset.metric = metric;
      row.append(head, cell);
      body.append(row);
    }
  }
  SINCE.forEach(([, metric], i) => {
    const value = frame.metrics[metric] ?? 0;
    say(body.rows[i].cells[1], Number.isInteger(value) ? whole.format(value) : String(value));
    body.rows[i].cells[1].dataset.value = value;
  });
}

let paused = false, drawn = 0;

/** Away from a server of our own, hide what nobody knows: another server's lanes, a record's memory. */
function offer(frame) {
  const m = frame.metrics, has = (start) => Object.keys(m).some((name) => name.startsWith(start));
  const there = {
    "h-lanes": frame.live.requests, "h-steps": frame.live.steps, "h-gain": frame.live.policy, "h-arch": frame.architecture,
    "h-context": has("verifypd:draft_tokens_by_context_total"), "h-memory": has("verifypd:kv_blocks") || has("vllm:kv_cache_usage_perc"),
    "h-device": has("verifypd:engine_cpu_seconds_total") || known(frame.derived.gpu), "h-position": has("vllm:spec_decode_num_drafts_total"),
    "h-length": has("vllm:spec_decode_num_drafts_total"),
  };
  for (const [id, some] of Object.entries(there)) $(id).closest("section").hidden = !some;
}

function draw() {
  const frame = frames[frames.length - 1];
  if (!frame || paused || document.hidden) return;
  say($("model"), frame.server.model);
  say($("version"), frame.server.version ? `version ${frame.server.version}` : "");
  if (MODE !== "live") offer(frame);
  drawTiles(frame);
  drawLanes(frame);
  charts["c-tokens"].draw(overTime("tokens", "prompts"));
  charts["c-requests"].draw(overTime("requests", "good"));
  charts["c-length"].draw(overTime("length", "stood", "chosen"));
  drawLatency(frame);
  drawSteps(frame);
  drawGain(frame);
  drawAcceptance(frame);
  drawArchitecture(frame);
  drawMemory(frame);
  drawDevice(frame);
  drawSince(frame);
  operator(frame);
  document.documentElement.dataset.frames = ++drawn;
}

// -- the connection ----------------------------------------------------------------------------------------------

let key = ""; // kept here and nowhere else
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

function status(state, text) {
  const shown = paused && state === "live" ? ["paused", "Paused"] : [state, text];
  $("status").dataset.state = shown[0];
  say($("status"), shown[1]);
}

function take(frame) {
  const { server } = remember(frame);
  if (server.draining) status("down", "Shutting down");
  else if (!server.ready) status("down", server.lost ? "The engine is gone" : server.epoch ? "The engine stopped; it is being started again" : "The engine is starting");
  else status("live", "Live");
  draw();
}

/** Read frames until the stream ends; true when there were any. Raises where there is no connection. */
async function read() {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENCE), some = false;
  try {
    const answer = await fetch(`${location.pathname}/events`, { headers: headers(), signal: stop.signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 401) return "key";
    if (!answer.ok) return "later";
    showKeyForm(false);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return some ? "again" : "later";
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      const last = parts.findLast((part) => part.startsWith("data: ")); // other lines only say that it lives
      if (last) take(JSON.parse(last.slice("data: ".length))), (some = true);
    }
  } finally {
    clearTimeout(timer);
  }
}

async function connect() {
  for (let delay = 250; ; delay = Math.min(2000, 2 * delay)) {
    let outcome = "later";
    try {
      outcome = await read();
    } catch {
      // the server is away; what it was is still drawn
    }
    if (outcome === "key") return showKeyForm(true);
    if (outcome === "again") delay = 250;
    status("down", frames.length ? "Connection lost; trying again" : "No connection; trying again");
    await new Promise((resolve) => setTimeout(resolve, delay));
  }
}

function showKeyForm(wanted) {
  $("key-form").hidden = !wanted;
  if (!wanted) return;
  $("key-wrong").hidden = !key;
  key = "";
  status("down", "Key needed");
  $("key").focus();
}

// -- playing back ------------------------------------------------------------------------------------------------

/** Frames that were recorded, shown up to a moment that a slider here, or the page around this one, sets. */
async function replay() {
  const answer = await fetch(`${location.pathname}/frames`, { cache: "no-store", credentials: "omit" });
  const all = await answer.json();
  let shown = 0; // frames that are in the history
  function move(at) {
    let wanted = all.findIndex((frame) => frame.time > at);
    wanted = wanted < 0 ? all.length : Math.max(1, wanted);
    if (wanted < shown || (wanted > shown && all[wanted - 1].time - all[Math.max(0, shown - 1)].time > WINDOW)) {
      clear();
      shown = all.findIndex((frame) => frame.time >= all[wanted - 1].time - WINDOW);
    }
    for (; shown < wanted; shown++) remember(all[shown]);
    draw();
  }
  status("replay", "Replay");
  const end = all[all.length - 1].time;
  if (!FRAMED) return startPlayer(end, move);
  addEventListener("message", (event) => {
    if (event.origin === location.origin && event.source === window.parent && Number.isFinite(event.data)) move(event.data);
  });
  move(end);
  document.documentElement.dataset.replay = "ready";
}

// -- start -------------------------------------------------------------------------------------------------------

makeCharts();
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  if (key) connect();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Go on" : "Pause");
  if ($("status").dataset.state === "live" || $("status").dataset.state === "paused") status("live", "Live");
  draw();
});
for (const choice of document.querySelectorAll("input[name=latency]")) {
  choice.addEventListener("change", () => { lookAt.latency = choice.value; if (frames.length) drawLatency(frames[frames.length - 1]); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of Object.values(charts)) chart.build(); });
document.addEventListener("visibilitychange", draw);
if (FRAMED) document.documentElement.dataset.framed = "1";
if (MODE === "live") startPlayground({ headers, refused: () => showKeyForm(true) });
else for (const id of ["playground", "pause", "metrics-note"]) $(id).hidden = true;
if (MODE === "replay") replay();
else connect();
