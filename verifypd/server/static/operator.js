/* The operator's control: another architecture, with a key of its own, and whether any stream noticed. */

import { $, duration, make, say, sum } from "./basics.js";
import { byLabel, percentile } from "./history.js";

const GAP = "verifypd:inter_token_latency_seconds";
const WATCHED = 30; // s after a switch in which streams are looked at

/** Set the form up. history: the frames so far, and figures of them. Returns what to call with each new frame. */
export function startOperator({ frames, buckets }) {
  let key = ""; // kept here and nowhere else
  let before = null; // {frame, orders}: what ran when the switch was made

  $("switch-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    key = $("switch-key").value.trim() || key;
    $("switch-key").value = "";
    const frame = frames[frames.length - 1];
    const answer = await fetch("v1/admin/architecture", {
      method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}` },
      body: JSON.stringify({ architecture: $("switch-to").value }), cache: "no-store", credentials: "omit",
    });
    const said = await answer.json();
    say($("switch-error"), answer.ok ? "" : said.error.message);
    $("switch-error").hidden = answer.ok;
    $("switch-key").placeholder = answer.ok ? "kept in memory" : "";
    if (answer.ok) before = { frame, to: said.policy, orders: new Set((frame.live.requests || []).map(([order]) => order)) };
  });

  /** Requests that ended otherwise than well, by how. */
  const troubles = (metrics) => sum(Object.entries(byLabel(metrics, "verifypd:calls_total", "outcome")).filter(([name]) => !["ok", "gone", "unread"].includes(name)).map(([, count]) => count));

  return (frame) => {
    const names = frame.server.architectures || [];
    $("operator").hidden = !names.length;
    if ($("switch-to").options.length !== names.length) $("switch-to").replaceChildren(...names.map((name) => make("option", name)));
    if (!before || frame.life !== before.frame.life) { $("noticed").hidden = true; before = null; return; }
    const seconds = Math.min(WATCHED, frame.at - before.frame.at);
    if (seconds <= 0) return;
    if (frame.at - before.frame.at > WATCHED) return; // what was said then stays
    const going = (frame.live.requests || []).filter(([order]) => before.orders.has(order)).length;
    const failed = troubles(frame.metrics) - troubles(before.frame.metrics);
    const gap = (at, span) => duration(percentile(buckets(at, GAP, span), 0.99));
    const words = `Set to ${before.to}. Of ${before.orders.size} requests under way then, ${going} go on and ${before.orders.size - going} have ended;`
      + ` ${failed ? `${failed} requests failed since` : "none failed"}. Gap between tokens, p99: ${gap(before.frame, WATCHED)} before, ${gap(frame, seconds)} since.`;
    say($("noticed"), words);
    $("noticed").dataset.failed = failed;
    $("noticed").hidden = false;
  };
}
