/* The dashboard: reads frames from /dashboard/events and draws them. Text is only ever set as text, never as markup.
   A frame holds every sample of /metrics by name, the engine's live view, and what the server is. */
"use strict";
(() => {
  const WINDOW = 120; // s of history that is drawn
  const SHORT = 2, LONG = 10, SPREAD = 30; // s over which rates and percentiles are taken
  const SILENCE = 5000; // ms without a frame after which the connection is given up
  const LANES = ["prefill", "decode", "verify"];
  const NAMES = { waiting: "waiting", prefill: "prefill", decode: "draft", verify: "verify" };
  const LATENCIES = {
    ttft: { metric: "vllm:time_to_first_token_seconds", text: "From the request to its first token.", target: "slo_ttft", of: "requests" },
    tpot: { metric: "vllm:request_time_per_output_token_seconds", text: "A request's time per token after the first.", target: "slo_tpot", of: "requests" },
    gap: { metric: "verifypd:inter_token_latency_seconds", text: "Between two arrivals of tokens; a verified draft is one arrival.", of: "gaps" },
    e2e: { metric: "vllm:e2e_request_latency_seconds", text: "From the request to its last token.", of: "requests" },
  };
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

  // -- small things ----------------------------------------------------------------------------------------------

  const $ = (id) => document.getElementById(id);
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }

  /** A number in as many digits as it deserves. */
  function number(value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 1 : 2)}M`;
    if (size >= 100) return whole.format(value);
    return value.toFixed(size >= 10 ? 1 : 2);
  }

  /** The same without zeros at the end, for axes. */
  const short = (value) => (number(value).includes(".") ? number(value).replace(/\.?0+(M?)$/, "$1") : number(value));
  const percent = (share) => (known(share) ? `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %` : "–");

  /** Milliseconds, or seconds where they are many. */
  function duration(ms) {
    if (!known(ms)) return "–";
    if (ms >= 10000) return `${(ms / 1e3).toFixed(1)} s`;
    return `${ms >= 100 ? whole.format(ms) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
  }

  function ago(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
  }

  // -- history: frames of the last two minutes ---------------------------------------------------------------------

  const frames = []; // {at, life, metrics, live, server, derived}
  let life = 0; // grows when counters begin anew

  /** Samples of a family by the value of one label: {value: number}. */
  function byLabel(metrics, name, label) {
    const start = `${name}{`, mark = `${label}="`, found = {};
    for (const key in metrics) {
      if (!key.startsWith(start)) continue;
      const from = key.indexOf(mark);
      if (from >= 0) found[key.slice(from + mark.length, key.indexOf('"', from + mark.length))] = metrics[key];
    }
    return found;
  }

  /** The frame from which to count the last `seconds`: the oldest within them, of the same life. */
  function base(frame, seconds) {
    for (const old of frames) if (old.life === frame.life && frame.at - old.at <= seconds + 0.3) return old;
    return frame;
  }

  /** How much a counter grew in the last `seconds`. A counter that was not there began at 0. */
  function growth(frame, name, seconds) {
    return (frame.metrics[name] || 0) - (base(frame, seconds).metrics[name] || 0);
  }

  function rate(frame, name, seconds) {
    const passed = frame.at - base(frame, seconds).at;
    return passed > 0.1 ? growth(frame, name, seconds) / passed : null;
  }

  /** Buckets of a histogram over the last `seconds`: [{bound, count}], by rising bound, not cumulative. */
  function buckets(frame, name, seconds) {
    const now = byLabel(frame.metrics, `${name}_bucket`, "le");
    const then = byLabel(base(frame, seconds).metrics, `${name}_bucket`, "le");
    const bounds = Object.keys(now).map((le) => [le === "+Inf" ? Infinity : Number(le), now[le] - (then[le] || 0)]);
    bounds.sort((a, b) => a[0] - b[0]);
    return bounds.map(([bound, total], i) => ({ bound, count: total - (i ? bounds[i - 1][1] : 0) }));
  }

  /** A percentile in ms, on a straight line within its bucket, as Prometheus does; null without anything. */
  function percentile(spread, share) {
    const total = sum(spread.map((bucket) => bucket.count));
    if (!total) return null;
    let before = 0, low = 0;
    for (const { bound, count } of spread) {
      if (before + count >= share * total && count) {
        return 1e3 * (bound === Infinity ? low : low + ((share * total - before) / count) * (bound - low));
      }
      before += count;
      low = bound;
    }
    return 1e3 * low;
  }

  /** Seconds of the steps of the last `seconds` by the cost model, summed; null where nothing is known. */
  function priced(frame, seconds) {
    const total = { steps: 0, measured: 0, foretold: 0, undrafted: 0 };
    const start = base(frame, seconds), seen = new Set([start.live.time]);
    for (const each of frames) {
      if (each.life !== frame.life || each.at <= start.at || !each.live.price || seen.has(each.live.time)) continue;
      seen.add(each.live.time); // a frame may repeat the engine's last report
      for (const name in total) total[name] += each.live.price[name];
    }
    return total.steps ? total : null;
  }

  const lookAt = { latency: "ttft" };

  /** What is drawn over time, worked out once for each frame. */
  function derive(frame) {
    const drafts = growth(frame, "vllm:spec_decode_num_drafts_total", SHORT);
    const drafted = growth(frame, "vllm:spec_decode_num_draft_tokens_total", SHORT);
    const accepted = growth(frame, "vllm:spec_decode_num_accepted_tokens_total", SHORT);
    const verdicts = growth(frame, "verifypd:verdicts_total", SHORT);
    const perPass = verdicts ? growth(frame, "verifypd:verdict_tokens_total", SHORT) / verdicts : null;
    const price = priced(frame, SHORT);
    const stretch = price && price.undrafted > 0 ? price.foretold / price.undrafted : null;
    const policy = frame.live.policy || {};
    const busy = verdicts > 0;
    return {
      tokens: rate(frame, "vllm:generation_tokens_total", SHORT),
      prompts: rate(frame, "vllm:prompt_tokens_total", LONG),
      requests: rate(frame, 'verifypd:calls_total{outcome="ok"}', LONG),
      good: rate(frame, "verifypd:requests_within_slo_total", LONG),
      length: drafts ? drafted / drafts : busy ? 0 : null,
      stood: drafts ? accepted / drafts : busy ? 0 : null,
      chosen: busy && known(policy.draft_length) ? policy.draft_length : null,
      perPass, stretch, price,
      gain: perPass !== null && stretch ? perPass / stretch : null,
      foretold: busy && known(policy.gain) ? policy.gain : null,
      cpu: rate(frame, "verifypd:engine_cpu_seconds_total", SHORT),
      gpu: frame.metrics["verifypd:gpu_utilization"], sm: frame.metrics["verifypd:sm_activity"],
      occupancy: frame.metrics["verifypd:sm_occupancy"], dram: frame.metrics["verifypd:dram_bandwidth"],
    };
  }

  /** p50, p95 and p99 of a latency at a frame; kept with the frame. */
  function latency(frame, which) {
    frame.latencies = frame.latencies || {};
    if (!frame.latencies[which]) {
      const spread = buckets(frame, LATENCIES[which].metric, SPREAD);
      frame.latencies[which] = [0.5, 0.95, 0.99].map((share) => percentile(spread, share));
    }
    return frame.latencies[which];
  }

  /** Add a frame, and forget the oldest. */
  function remember(data) {
    const last = frames[frames.length - 1];
    const name = "vllm:generation_tokens_total", calls = 'verifypd:calls_total{outcome="ok"}';
    const fewer = (key) => last && (data.metrics[key] || 0) < (last.metrics[key] || 0);
    if (last && (last.server.epoch !== data.server.epoch || fewer(name) || fewer(calls))) life += 1;
    const frame = { at: data.time, life, metrics: data.metrics, live: data.live, server: data.server, policy: data.policy, architecture: data.architecture };
    if (last && frame.at < last.at) frames.length = 0; // another machine's clock
    frames.push(frame);
    while (frame.at - frames[0].at > WINDOW + 1) frames.shift();
    frame.derived = derive(frame);
    return frame;
  }

  // -- charts ------------------------------------------------------------------------------------------------------

  const charts = {};
  /** Seconds that charts over time reach back: what there is, between half a minute and two. */
  const reach = () => (frames.length ? Math.min(WINDOW, Math.max(30, Math.ceil((frames[frames.length - 1].at - frames[0].at) / 5) * 5)) : 30);
  const DASHES = { solid: [], dash: [7, 4], dot: [2, 3], thin: [] };

  /** A chart with its key above it. series: [{name, hue, dash, bars, fill, format}]. */
  class Chart {
    constructor(id, series, options) {
      this.box = $(id);
      this.series = series;
      this.options = options;
      this.keys = make("ul", undefined, "keys");
      this.plot = make("div");
      this.plot.setAttribute("role", "img");
      this.empty = make("p", options.empty || "nothing yet", "empty");
      this.box.append(this.keys, this.plot, this.empty);
      this.values = series.map((each) => {
        const item = make("li"), value = make("b");
        item.append(this.swatch(each), `${each.name} `, value);
        this.keys.append(item);
        return value;
      });
      this.data = [[], ...series.map(() => [])];
      this.hover = null;
      this.told = 0;
      this.build();
      new ResizeObserver(() => this.resize()).observe(this.box);
      charts[id] = this;
    }

    swatch({ hue, dash, bars, dots: dotted }) {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const kind = bars ? "rect" : dotted ? "circle" : "line";
      const mark = document.createElementNS("http://www.w3.org/2000/svg", kind);
      const shape = {
        rect: { x: 4, y: 1, width: 12, height: 12, rx: 2 },
        circle: { cx: 11, cy: 7, r: 4, "stroke-width": 2, fill: "none" },
        line: { x1: 0, y1: 7, x2: 22, y2: 7, "stroke-width": 2.5 },
      }[kind];
      for (const [name, value] of Object.entries({ ...shape, [bars ? "fill" : "stroke"]: `var(--${hue})` })) mark.setAttribute(name, value);
      if (!bars && dash) mark.setAttribute("stroke-dasharray", DASHES[dash].join(" "));
      svg.setAttribute("width", bars ? 18 : 22);
      svg.setAttribute("height", 14);
      svg.setAttribute("aria-hidden", "true");
      svg.append(mark);
      return svg;
    }

    build() {
      if (this.u) this.u.destroy();
      const { unit, xUnit, splits, xLabels, range, height = 190, tick = short } = this.options;
      const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 2 };
      const time = !splits;
      this.u = new uPlot({
        width: Math.max(200, this.box.clientWidth), height,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { size: 7 } },
        scales: {
          x: { time: false, range: () => (time ? [-reach(), 0] : [-0.6, Math.max(1, this.data[0].length) - 0.4]) },
          y: { range: (u, low, high) => (range ? range(low, high) : [0, high > 0 ? high * 1.12 : 1]) },
        },
        axes: [
          { ...axis, label: time ? undefined : xUnit, size: 26, space: time ? 60 : 34, incrs: time ? [5, 10, 15, 30, 60] : [1, 2, 4, 8, 16],
            values: time ? (u, at) => at.map((v) => (v === 0 ? "now" : `−${-v} s`)) : (u, at) => at.map((v) => (Number.isInteger(v) && xLabels()[v]) || "") },
          { ...axis, label: unit, size: 50, space: 34, values: (u, at) => at.map((v) => (v === 0 ? "0" : tick(v))) },
        ],
        series: [{}, ...this.series.map(({ hue, dash, bars, width, dots, fill }) => ({
          stroke: colour(hue), width: bars ? 0 : width || 2, dash: DASHES[dash || "solid"], spanGaps: false,
          fill: bars ? colour(hue) : fill ? `${colour(hue)}22` : undefined,
          paths: bars ? uPlot.paths.bars({ size: [bars, 64] }) : dots ? () => null : undefined,
          points: dots ? { show: true, size: 9, width: 2, stroke: colour(hue), fill: colour("card") } : { show: false },
        }))],
        hooks: { setCursor: [(u) => { this.hover = u.cursor.idx ?? null; this.label(); }] },
      }, this.data, this.plot);
    }

    resize() {
      const width = this.box.clientWidth;
      if (width > 0 && Math.abs(width - this.u.width) > 1) this.u.setSize({ width, height: this.options.height || 190 });
    }

    /** Draw columns: x, then one per series. `shown`: what the key says, where it is not the columns' own. */
    draw(data, shown) {
      this.data = data;
      this.shown = shown || data.slice(1);
      this.u.setData(data);
      if (this.options.splits) this.u.redraw(false, true); // the same places may have other names now
      const some = data.slice(1).some((column) => column.some(known));
      this.empty.hidden = some;
      this.box.dataset.points = data.slice(1).reduce((n, column) => n + column.filter(known).length, 0);
      this.label();
      if (Date.now() - this.told > 5000) { // for readers of the screen; seldom, and never announced
        this.told = Date.now();
        this.plot.setAttribute("aria-label", `${this.options.title}: ${some ? this.words() : "nothing yet"}`);
      }
    }

    at(column) {
      if (this.hover !== null && this.hover < column.length) return column[this.hover];
      return column[column.length - 1];
    }

    label() {
      if (!this.shown) return;
      this.series.forEach((each, i) => {
        if (each.quiet) return;
        const value = this.options.total && this.hover === null ? this.options.total(this.shown[i]) : this.at(this.shown[i]);
        say(this.values[i], (each.format || this.options.format || number)(value));
      });
    }

    words() {
      return this.series.filter((each) => !each.quiet).map((each, i) => `${each.name} ${this.values[i].textContent}`).join(", ");
    }
  }

  const shareRange = () => [0, 1];
  const shareTick = (v) => `${Math.round(100 * v)} %`;

  function makeCharts() {
    new Chart("c-tokens", [
      { name: "written", hue: "blue", fill: true }, { name: "prompt tokens taken in", hue: "grey", dash: "dash" },
    ], { title: "Tokens per second", unit: "tokens/s", empty: "nothing runs" });
    new Chart("c-requests", [
      { name: "finished", hue: "blue" }, { name: "within targets (goodput)", hue: "green", dash: "dash" },
    ], { title: "Requests per second", unit: "requests/s" });
    new Chart("c-latency", [
      { name: "p50", hue: "blue" }, { name: "p95", hue: "orange", dash: "dash" }, { name: "p99", hue: "red", dash: "dot" },
      { name: "target", hue: "grey", width: 1 },
    ], { title: "Latency percentiles", unit: "ms", format: duration, empty: "no request has ended lately" });
    new Chart("c-spread", [{ name: "counted", hue: "blue", bars: 0.82, format: whole.format }], {
      title: "Latency histogram", unit: "count", xUnit: "ms, up to", splits: true, xLabels: () => spreadLabels, total: sum, height: 218,
      tick: (v) => (Number.isInteger(v) ? whole.format(v) : ""), empty: "no request has ended lately",
    });
    new Chart("c-steps", [
      { name: "rest (host, waiting)", hue: "grey", bars: 0.8 }, { name: "verify", hue: "green", bars: 0.8 },
      { name: "verify with prompts in it", hue: "pink", bars: 0.8 }, { name: "draft", hue: "orange", bars: 0.8 },
      { name: "prefill", hue: "blue", bars: 0.8 },
    ], { title: "Time of the latest steps", unit: "ms", xUnit: "step", splits: true, xLabels: () => stepLabels, format: duration, total: (column) => (column.length ? sum(column) / column.length : null), empty: "no step yet" });
    new Chart("c-gain", [
      { name: "tokens per pass ÷ cost", hue: "green" }, { name: "foretold by the controller", hue: "orange", dash: "dash" },
      { name: "plain", hue: "grey", width: 1, quiet: true },
    ], { title: "Gain against plain decoding", unit: "times plain", format: (v) => (known(v) ? `×${v.toFixed(2)}` : "–"), tick: (v) => `×${v}`, range: (low, high) => [Math.min(0.8, (low ?? 1) * 0.95), Math.max(1.25, (high ?? 1) * 1.1)] });
    new Chart("c-length", [
      { name: "drafted", hue: "orange" }, { name: "stood", hue: "green", dash: "dash" }, { name: "chosen (longest)", hue: "grey", dash: "dot", width: 1.5 },
    ], { title: "Draft length", unit: "tokens a draft", height: 218, empty: "nothing is drafted" });
    new Chart("c-position", [
      { name: "measured", hue: "green", bars: 0.7, quiet: true }, { name: "foretold by the controller", hue: "red", dots: true, quiet: true },
    ], { title: "Acceptance by position in the draft", unit: "share of drafts", xUnit: "token of the draft", splits: true, xLabels: () => positionLabels, range: shareRange, tick: shareTick, format: percent, empty: "nothing is drafted" });
    new Chart("c-context", [{ name: "measured", hue: "green", bars: 0.7, quiet: true }], {
      title: "Acceptance by context length", unit: "share of tokens", xUnit: "tokens of the request, up to", splits: true, xLabels: () => contextLabels, range: shareRange, tick: shareTick, format: percent, empty: "nothing is drafted",
    });
    new Chart("c-device", [{ name: "engine's CPU", hue: "blue", fill: true, format: (v) => (known(v) ? `${v.toFixed(2)} cores` : "–") }], { title: "CPU of the engine", unit: "cores busy", empty: "nothing yet" });
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
    say($("t-good-sub"), ended ? `${percent(good / ended)} within ${targets}` : `targets: ${targets}`);
    say($("t-running"), number(m["vllm:num_requests_running"]).replace(/\.00?$|\.0$/, ""));
    say($("t-slots"), known(frame.server.slots) ? `of ${frame.server.slots} slots` : "");
    say($("t-waiting"), `${whole.format(m["vllm:num_requests_waiting"] || 0)} wait for a slot`);
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
    for (const lane of document.querySelectorAll(".lane")) {
      const name = lane.dataset.lane, [wait, batch] = lane.querySelectorAll("[data-say]");
      if (name === "waiting") {
        say(lane.querySelector("b"), whole.format(m["vllm:num_requests_waiting"] || 0));
        const waits = (live.waiting || []).map((each) => each[1]);
        say(wait, waits.length ? `longest wait ${duration(Math.max(...waits))}` : "nobody waits");
        continue;
      }
      say(lane.querySelector("b"), whole.format(m[`verifypd:lane_depth{lane="${name}"}`] || 0));
      const quantile = (q) => duration(1e3 * m[`verifypd:lane_wait_seconds{lane="${name}",quantile="0.${q}"}`]);
      say(wait, `wait p50 ${quantile(50)}, p95 ${quantile(95)}`);
      say(batch, step ? `latest batch: ${batchWords(name, step)}` : "no batch yet");
    }
    placeDots(frame);
  }

  function batchWords(name, [, , , , , , drafting, longest, verifying, chunk]) {
    if (name === "prefill") return chunk ? `${whole.format(chunk)} prompt tokens` : "none";
    if (name === "decode") return longest ? `${drafting} × up to ${longest} tokens` : "none";
    return verifying ? `${verifying} request${verifying === 1 ? "" : "s"}` : "none";
  }

  function placeDots(frame) {
    const holder = $("dots"), origin = holder.getBoundingClientRect(), live = frame.live;
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
    say($("spread-note"), `${about.text} Of the last two minutes, ${about.of} by bucket.`);
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
    const columns = overTime("gain", "foretold");
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

  /** Why drafts are as long as they are, from what the engine measured and foretold. */
  function reason(frame) {
    const d = frame.derived, price = d.price, policy = frame.live.policy || {};
    if (!known(d.perPass)) return "Nothing decodes now.";
    if (!d.length) {
      const gain = known(policy.gain) ? ` The controller foretells ×${policy.gain.toFixed(2)} from drafting; it asks for more than ×${(1 + (policy.margin || 0)).toFixed(2)}.` : "";
      return `Nothing is drafted: a pass gives every request one token.${gain}`;
    }
    const start = `Drafts of ${d.length.toFixed(1)} tokens, of which ${d.stood.toFixed(1)} stand: a pass gives a request ${d.perPass.toFixed(2)} tokens.`;
    if (!price || !known(d.stretch)) return `${start} No cost model has been fitted, so their price is not known.`;
    const each = (seconds) => duration(1e3 * seconds / price.steps);
    return `${start} The cost model puts a step without prompts at ${each(price.foretold)} with its drafts and ${each(price.undrafted)} without them (measured: ${each(price.measured)}): ${d.perPass.toFixed(2)} ÷ ${d.stretch.toFixed(2)} = ×${d.gain.toFixed(2)}.`;
  }

  function drawAcceptance(frame) {
    const old = base(frame, WINDOW);
    const grown = (name, label) => {
      const now = byLabel(frame.metrics, name, label), then = byLabel(old.metrics, name, label);
      return Object.fromEntries(Object.entries(now).map(([key, value]) => [key, value - (then[key] || 0)]));
    };
    const judged = grown("verifypd:draft_tokens_per_pos_total", "position");
    const stood = grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position");
    const foretold = frame.live.survival || [];
    const places = Object.keys(judged).map(Number).filter((i) => judged[i] > 0).sort((a, b) => a - b);
    positionLabels = places.map((i) => String(i + 1));
    charts["c-position"].draw([places.map((_, i) => i), places.map((i) => (stood[i] || 0) / judged[i]), places.map((i) => foretold[i] ?? null)]);
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
    const holder = $("pools"), names = Object.keys(found);
    while (holder.children.length > names.length) holder.lastChild.remove();
    names.forEach((name, i) => {
      const { used = 0, cached = 0, free = 0 } = found[name], total = used + cached + free || 1;
      const row = holder.children[i] || holder.appendChild(bar());
      fill(row, `${name === "draft" ? "Draft model" : "Verifier"}: ${whole.format(used)} of ${whole.format(used + cached + free)} blocks in use (${percent(used / total)}), ${whole.format(cached)} kept for prefixes (hatched)`, [["used", used / total], ["cached", cached / total]]);
    });
    const hits = frame.metrics["vllm:prefix_cache_hits_total"] || 0, asked = frame.metrics["vllm:prefix_cache_queries_total"] || 0;
    say($("prefix"), asked ? `${whole.format(hits)} of ${whole.format(asked)} prompt tokens were found there (${percent(hits / asked)}).` : "No prompt has been looked up yet.");
  }

  const GPU = [["gpu", "GPU busy", "blue"], ["sm", "multiprocessors busy", "green", "dash"], ["occupancy", "SM occupancy", "pink", "dot"], ["dram", "memory bandwidth", "orange", "dash"]];

  function drawDevice(frame) {
    const m = frame.metrics, there = GPU.filter(([name]) => known(frame.derived[name]));
    if (there.length && charts["c-device"].series.length !== there.length) {
      charts["c-device"].u.destroy();
      $("c-device").replaceChildren();
      new Chart("c-device", there.map(([, name, hue, dash]) => ({ name, hue, dash, format: percent })), { title: "GPU", unit: "share", range: shareRange, tick: shareTick });
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

  function draw() {
    const frame = frames[frames.length - 1];
    if (!frame || paused || document.hidden) return;
    say($("model"), frame.server.model);
    say($("version"), `version ${frame.server.version}`);
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
    document.documentElement.dataset.frames = ++drawn;
  }

  // -- the connection ----------------------------------------------------------------------------------------------

  let key = ""; // kept here and nowhere else

  function status(state, text) {
    const shown = paused && state === "live" ? ["paused", "Paused"] : [state, text];
    $("status").dataset.state = shown[0];
    say($("status"), shown[1]);
  }

  function take(frame) {
    const { server } = remember(frame);
    if (server.draining) status("down", "Shutting down");
    else if (!server.ready) status("down", server.lost ? "The engine is gone" : "The engine is starting");
    else status("live", "Live");
    draw();
  }

  /** Read frames until the stream ends; true when there were any. Raises where there is no connection. */
  async function read() {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENCE), some = false;
    try {
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const answer = await fetch("/dashboard/events", { headers, signal: stop.signal, cache: "no-store", credentials: "omit" });
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
        if (parts.length) take(JSON.parse(parts[parts.length - 1].slice("data: ".length))), (some = true);
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
  connect();
})();
