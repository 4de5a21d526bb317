/* What frames of one server say over time: growth of counters, rates, percentiles. Draws nothing.
   A frame holds every sample of /metrics by name, the engine's live view, and what the server is. */

import { known, sum } from "./basics.js";

export const WINDOW = 120; // s of history that is kept
export const SHORT = 2, LONG = 10, SPREAD = 30; // s over which rates and percentiles are taken
export const LATENCIES = {
  ttft: { metric: "vllm:time_to_first_token_seconds", text: "From the request to its first token.", target: "slo_ttft", of: "requests" },
  tpot: { metric: "vllm:request_time_per_output_token_seconds", text: "A request's time per token after the first.", target: "slo_tpot", of: "requests" },
  gap: { metric: "verifypd:inter_token_latency_seconds", text: "Between two arrivals of tokens; a verified draft is one arrival.", of: "gaps" },
  e2e: { metric: "vllm:e2e_request_latency_seconds", text: "From the request to its last token.", of: "requests" },
};

/** Samples of a family by the value of one label: {value: number}. */
export function byLabel(metrics, name, label) {
  const start = `${name}{`, mark = `${label}="`, found = {};
  for (const key in metrics) {
    if (!key.startsWith(start)) continue;
    const from = key.indexOf(mark);
    if (from >= 0) found[key.slice(from + mark.length, key.indexOf('"', from + mark.length))] = metrics[key];
  }
  return found;
}

/** A percentile in ms, on a straight line within its bucket, as Prometheus does; null without anything. */
export function percentile(spread, share) {
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

/** The frames of one server, and what they say. */
export function makeHistory() {
  const frames = []; // {at, life, metrics, live, server, derived}
  let life = 0; // grows when counters begin anew

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
    return passed >= seconds / 2 ? growth(frame, name, seconds) / passed : null;
  }

  /** Buckets of a histogram over the last `seconds`: [{bound, count}], by rising bound, not cumulative. */
  function buckets(frame, name, seconds) {
    const now = byLabel(frame.metrics, `${name}_bucket`, "le");
    const then = byLabel(base(frame, seconds).metrics, `${name}_bucket`, "le");
    const bounds = Object.keys(now).map((le) => [le === "+Inf" ? Infinity : Number(le), now[le] - (then[le] || 0)]);
    bounds.sort((a, b) => a[0] - b[0]);
    return bounds.map(([bound, total], i) => ({ bound, count: total - (i ? bounds[i - 1][1] : 0) }));
  }

  /** Seconds of the steps of the last `seconds` by the cost model, summed; null where nothing is known. */
  function priced(frame, seconds) {
    const total = { steps: 0, measured: 0, predicted: 0, undrafted: 0 };
    const start = base(frame, seconds), seen = new Set([start.live.time]);
    for (const each of frames) {
      if (each.life !== frame.life || each.at <= start.at || !each.live.price || seen.has(each.live.time)) continue;
      seen.add(each.live.time); // a frame may repeat the engine's last report
      for (const name in total) total[name] += each.live.price[name];
    }
    return total.steps ? total : null;
  }

  /** What is drawn over time, worked out once for each frame. */
  function derive(frame) {
    const drafts = growth(frame, "vllm:spec_decode_num_drafts_total", SHORT);
    const drafted = growth(frame, "vllm:spec_decode_num_draft_tokens_total", SHORT);
    const accepted = growth(frame, "vllm:spec_decode_num_accepted_tokens_total", SHORT);
    const verdicts = growth(frame, "verifypd:verdicts_total", SHORT);
    const perPass = verdicts ? growth(frame, "verifypd:verdict_tokens_total", SHORT) / verdicts : null;
    const price = priced(frame, SHORT);
    const stretch = price && price.undrafted > 0 ? price.predicted / price.undrafted : null;
    const policy = frame.live.policy || {};
    const busy = verdicts > 0;
    return {
      tokens: rate(frame, "vllm:generation_tokens_total", SHORT),
      prompts: rate(frame, "vllm:prompt_tokens_total", LONG),
      requests: rate(frame, 'verifypd:calls_total{outcome="ok"}', LONG),
      good: "verifypd:requests_within_slo_total" in frame.metrics ? rate(frame, "verifypd:requests_within_slo_total", LONG) : null,
      length: drafts ? drafted / drafts : busy ? 0 : null,
      stood: drafts ? accepted / drafts : busy ? 0 : null,
      chosen: busy && known(policy.draft_length) ? policy.draft_length : null,
      perPass, stretch, price,
      gain: perPass !== null && stretch ? perPass / stretch : null,
      predicted: busy && known(policy.gain) ? policy.gain : null,
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

  /** Forget everything. */
  function clear() {
    frames.length = 0;
    life = 0;
  }

  /** Seconds that charts over time reach back: what there is, between half a minute and two. */
  const reach = () => (frames.length ? Math.min(WINDOW, Math.max(30, Math.ceil((frames[frames.length - 1].at - frames[0].at) / 5) * 5)) : 30);

  return { frames, base, growth, rate, buckets, latency, remember, clear, reach };
}
