"""A report as one HTML file: charts within it, light and dark, nothing fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from verifypd.bench import charts, modes, part_charts, svg
from verifypd.bench.pipelining import APART, LEAST_LEFT, MARK, SAID, mark, said
from verifypd.bench.results import (
    ALL_LATENCIES,
    HEADER,
    LATENCIES,
    NAMES,
    interval,
    itself_line,
    judged,
    latency_row,
    number,
    over_seeds,
    published,
    row,
    won_rows,
)
from verifypd.bench.statistics import COMPARED

STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f8fa; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --good: #1a7f37; --bad: #b3261e; --c0: #2563c9; --c1: #b35900; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989;
  --c5: #0e7490; --c6: #6b7280; --c7: #a16207; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --card: #161b22; --ink: #e6edf3; --soft: #9198a1;
  --line: #30363d; --good: #3fb950; --bad: #ff7b72; --c0: #6ea8fe; --c1: #f0883e; --c2: #3fb950; --c3: #b392f0;
  --c4: #f778ba; --c5: #39c5cf; --c6: #9ca3af; --c7: #d4a72c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 24px 20px 60px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2, h3, p, figcaption { overflow-wrap: anywhere; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 10px; }
p { margin: 6px 0; } .soft, .note { color: var(--soft); } .note { font-size: 12.5px; margin: 2px 0 0; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; }
.banner { padding: 8px 12px; border-radius: 8px; background: var(--card); border: 1px solid var(--line); }
.banner.bad { border-color: var(--bad); }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow-x: auto; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; white-space: pre-line; }
svg { display: block; width: 100%; min-width: 430px; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } text.end { text-anchor: end; }
text.mid { text-anchor: middle; } svg text.point { font-size: 9.5px; }
.grid { stroke: var(--line); stroke-width: 1; } .base { stroke: var(--soft); stroke-width: 1; }
.line { fill: none !important; stroke-width: 2; } .faint { opacity: 0.35; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12.5px; color: var(--soft); margin-top: 4px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
table.dense { font-size: 11.5px; } .dense th, .dense td { padding: 5px 6px; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--soft); white-space: normal; }
.faster { color: var(--good); font-weight: 600; } .slower { color: var(--bad); font-weight: 600; }
.map th:not(:first-child) { text-align: center; }
.map td { text-align: center; border: 2px solid var(--card); } .map small { display: block; }
.heat.up { background: color-mix(in srgb, var(--c0) calc(var(--share) * 0.6), transparent); }
.heat.down { background: color-mix(in srgb, var(--c1) calc(var(--share) * 0.6), transparent); }
details { margin: 10px 0; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
details h3 { font-size: 14px; color: var(--soft); margin: 14px 0 6px; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px;
  font-size: 12px; }
.words td, .words th { text-align: left; white-space: normal; } .words td:last-child { min-width: 16em; }
"""
COLOUR_RULES = "".join(
    f"rect.s{i}, circle.s{i}, i.s{i} {{ fill: var(--c{i}); background: var(--c{i}); }}\n"
    f"svg text.s{i} {{ fill: var(--c{i}); }}\n"
    f".line.s{i} {{ stroke: var(--c{i}); }}\n"
    for i in range(svg.COLOURS)
)
MEANING = (
    ("closed N", "N clients; each sends its next request when its last answer is complete"),
    ("poisson R/s", "R requests a second arrive at random times, whatever became of those before"),
    ("C=8, n=5, 8/s", "the load of a protocol: its C as above, so many requests, so many requests a second"),
    ("A/A", "the reference runs twice; what differs between its two runs is chance"),
    ("p50, p95, p99", "50, 95 or 99 % of the values are no higher"),
    ("TTFT", "time to the first token: first output less the time the request was due"),
    ("TPOT", "time per output token: (last output − first) / (tokens − 1) of one request"),
    ("gap", "time between two outputs of one request as the client sees them"),
    ("E2E", "last output less the time the request was due; one that was stopped counts until then"),
    ("tokens/s", "all output tokens of the window / window, those of unfinished requests too"),
    ("good/s, good share", "requests a second, and of all requests, that ended and kept to both targets"),
    ("accepted", "accepted draft tokens / draft tokens; the correction does not count"),
    (
        "accepted, by place",
        "of the drafts that had a token there, the share in which it was accepted; of all where no lengths are known",
    ),
    (
        "pass, draft loop",
        "one reading of the verifier's weights, for all its requests; the writing of drafts before it",
    ),
    ("verdict", "how many tokens of one draft are accepted, and the token that follows them"),
    (
        "plans that left a draft",
        f"steps after which a draft waited for a later verify; with under {LEAST_LEFT:.0%} PDV plans as PD does",
    ),
    (MARK, SAID.removeprefix(f"{MARK} ")),
    ("faster, slower", "the 95 % interval of the ratio over the seeds leaves 1 out; else “no difference”"),
)
ARCHITECTURES = {
    "baseline": "each request by itself, with a draft and a verify pass of its own, taking turns",
    "plain": "no drafts: one token for each request in each pass",
    "pd": "PD: all requests draft, then all are verified; prompts are read in passes of their own",
    "pdv": "PDV: as PD, but verification is a lane of its own, so that some requests draft while others are verified",
    "unified": "all requests draft, then one pass verifies them and reads prompts",
    "table": "PD or PDV by the number of requests and the verifier's size, as the original advises",
    "auto": "as many drafts as pay now by measured costs, or none; prompts are read in the same pass",
}  # of engines, by their arms' spec
VARIANTS = (
    ("whole", "its verify batch is as large as the batch"),
    ("pipelined", "its verify batch is half the batch, and all requests are admitted"),
    ("verify", "its verify batch is so many requests"),
    ("batch", "its batch is so many requests, whatever the scenario's"),
    ("queue", "it admits so many times the batch, and its verify batch is half of it"),
)  # of an architecture, by a word behind its name


def words(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What the words of a report mean: its protocol and arms, then figures."""
    protocol = found.get("protocol") or {}
    made = [(f"protocol {protocol['letter']}", protocol["title"])] if protocol.get("title") else []
    made.append(("arm", "what is measured: a server at a URL, or an engine of some settings"))
    for name, arm in found["arms"].items():
        spec = arm.get("spec") or {}
        parts = [ARCHITECTURES.get((spec.get("policy") or spec.get("settings") or {}).get("arch", ""), "")]
        parts += [text for word, text in VARIANTS if spec.get("policy") and word in name.split()[1:]]
        if parts[0]:
            made.append((name, "; ".join(parts)))
    return [*made, *MEANING]


def page(found: dict[str, Any]) -> str:
    """The whole file."""
    last = found["sittings"][-1]
    arms = " · ".join(found["arms"])
    code = f"commit {escape(last['commit'][:12])}{_modified(last['modified'])}"
    facts = [
        escape(last["date"]),
        escape(last["gpu"] or last["cpu"]),
        code,
        f"seeds {', '.join(map(str, found['seeds']))}",
    ]
    sections = [
        f"<h1>Benchmark: {escape(arms)}</h1>",
        f"<p class='soft'>{' · '.join(facts)}</p>",
        *_banners(found),
        "<h2>Overview</h2><div class='grid2'>",
        *(
            svg.draw(charts.labelled(found, part))
            for each in (*charts.overview(found), *part_charts.overview(found))
            for part in charts.by_pair(found, each)
        ),
        "</div>",
        *_compared(found),
        "<h2>Figures</h2>",
        *(_figures(found, scenario, own) for scenario, own in found["scenarios"].items()),
        *_modes(found),
        *_by_scenario(found),
        "<h2>What the words mean</h2>",
        _table(
            ("", ""),
            [(escape(word), escape(text)) for word, text in words(found)],
            "words",
        ),
        "<h2>Where the figures come from</h2>",
        _provenance(found),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Benchmark: {escape(arms)}</title><style>{STYLE}{COLOUR_RULES}</style></head><body>"
        f"{''.join(sections)}</body></html>\n"
    )


def _modified(modified: bool | None) -> str:
    return {True: " (modified)", None: " (no git: see the hash below)"}.get(modified, "")


def _banners(found: dict[str, Any]) -> list[str]:
    made = [f"<p class='banner bad'>{escape(found['note'])}</p>"] if found["note"] else []
    cells = found["cells"]
    if not found["complete"]:
        made.append(
            f"<p class='banner bad'>Partial: {cells['run']} of {cells['planned']} runs. The same command goes on.</p>"
        )
    if len(found["trees"]) > 1:
        made.append(
            f"<p class='banner bad'>{len(found['trees'])} states of the code were measured; they are mixed here.</p>"
        )
    lost = [
        f"{arm}, {scenario}: {own['figures']['failed']} failed, {own['figures']['unfinished']} unfinished"
        + (f" ({next(iter(own['errors']))})" if own["errors"] else "")
        for scenario, each in found["scenarios"].items()
        for arm, own in each["arms"].items()
        if own["figures"]["failed"] or own["figures"]["unfinished"]
    ]
    if lost:
        made.append(f"<p class='banner bad'>{'<br>'.join(map(escape, lost))}</p>")
    return [*made, f"<p class='banner'>{escape(itself_line(found))}</p>"]


def _compared(found: dict[str, Any]) -> list[str]:
    """Heatmap, comparison and counts, where there is more than one arm."""
    parts = []
    if (heat := charts.improvement(found, found["headline"])) is not None and found["scenarios"]:
        parts.append(svg.heatmap(heat, found["note"]))
    body = []
    for scenario, own in found["scenarios"].items():
        for arm, metrics in own["compared"].items():
            cells = [_verdict(metrics[metric]) if metric in metrics else "–" for metric in COMPARED]
            body.append((f"<b>{escape(scenario)}</b><br>{escape(arm)}{mark(own, arm)}", *cells))
    if body:
        arms = (arm for own in found["scenarios"].values() for arm in own["compared"].values())
        spread = over_seeds(each for arm in arms for each in arm.values())
        title = f"<p>Ratios over <b>{escape(found['reference'])}</b>, {spread}. Above 1 is more.</p>"
        legend = said(found)
        parts += [title, _table(("", *(NAMES[metric] for metric in COMPARED)), body, "dense"), _note(legend)]
        if counts := won_rows(found):
            header, *lines = counts
            parts += ["<h2>Scenarios won and lost</h2>", _table(header, lines), _note(APART if legend else "")]
    return [f"<h2>Compared with {escape(found['reference'])}</h2>", *parts] if parts else []


def _verdict(each: dict[str, Any]) -> str:
    word = escape(each["verdict"])
    spread = f"{interval(each)}<br>" if judged(each) else ""
    return f"<b>{number(each['ratio'])}</b><br>{spread}<span class='{word}'>{word}</span>"


def _figures(found: dict[str, Any], scenario: str, own: dict[str, Any]) -> str:
    arms = {arm + mark(own, arm): each for arm, each in own["arms"].items()}
    body = [tuple(map(escape, row(arm, each))) for arm, each in arms.items()]
    latencies = _table(LATENCIES, [tuple(map(escape, latency_row(arm, each))) for arm, each in arms.items()])
    folded = f"<details><summary>{ALL_LATENCIES}</summary>{latencies}</details>"
    marked = f" <span class='soft'>({escape(found['note'])})</span>" if found["note"] else ""
    original = [f"{escape(arm)} {each['figures']['tok_s_original']:,.1f}" for arm, each in own["arms"].items()]
    note = f"<p class='note'>The original's metric, tokens of finished requests / window: {'; '.join(original)}</p>"
    claims = "".join(
        f"<p class='note'>Published by the original, {escape(what)}: {escape(each)}</p>"
        for what, each in published(found, scenario)
    )
    legend = _note(SAID if any(mark(own, arm) for arm in own["arms"]) else "")
    return f"<h3>{escape(scenario)}{marked}</h3>{_table(HEADER, body)}{legend}{note}{claims}{folded}"


def _modes(found: dict[str, Any]) -> list[str]:
    """Why arms win and lose."""
    rows = modes.explained(found)
    if not rows:
        return []
    body = [
        tuple(map(escape, (each["scenario"], each["arm"] + mark(found["scenarios"][each["scenario"]], each["arm"]),
                           each["E2E"], each["why"])))
        for each in rows
    ]  # fmt: skip
    named = [tuple(map(escape, (m.name, m.claim, m.seen, m.figures))) for m in modes.shown_modes(found)]
    return [
        f"<h2>Why arms win and lose against {escape(found['reference'])}</h2>",
        _table(("scenario", "arm", "mean E2E", "why"), body, "words"),
        _note(said(found)),
        "<h3>The original's success and failure modes</h3>",
        _table(("mode", "its claim", "here", "figures"), named, "words"),
    ]


def index(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A page that leads to reports, each with what it compares and how many runs it has."""
    body = []
    for name, found in reports:
        cells = found["cells"]
        protocol = found.get("protocol") or {}
        link = f"<a href='{escape(name)}/report.html'>{escape(name)}</a>"
        runs = f"{cells['run']} of {cells['planned']}"
        body.append(
            (link, escape(protocol.get("title", "")), escape(", ".join(found["arms"])), runs, escape(found["note"]))
        )
    table = _table(("report", "what", "arms", "runs", "note"), body, "words")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Benchmarks</title><style>{STYLE}</style></head><body><h1>Benchmarks</h1>{table}</body></html>\n"
    )


def _by_scenario(found: dict[str, Any]) -> list[str]:
    """What arms were doing in each, and curves of single times; results that were kept without them have none."""
    made = [_distributions(found, scenario, i == 0) for i, scenario in enumerate(found["scenarios"])]
    return ["<h2>Scenario by scenario</h2>", *made] if any(made) else []


def _distributions(found: dict[str, Any], scenario: str, shown: bool) -> str:
    def drawn(parts: Sequence[charts.Chart]) -> str:
        return "".join(svg.draw(charts.labelled(found, each)) for each in parts)

    parts = (
        ("What arms were doing", drawn(part_charts.of_scenario(found, scenario))),
        ("Share that took no longer", drawn(charts.distributions(found, scenario))),
        ("Histograms", drawn(charts.histograms(found, scenario))),
    )
    inside = "".join(f"<h3>{head}</h3><div class='grid2'>{each}</div>" for head, each in parts if each)
    if not inside:
        return ""
    return f"<details{' open' if shown else ''}><summary>{escape(scenario)}</summary>{inside}</details>"


def _provenance(found: dict[str, Any]) -> str:
    commands = "".join(f"<p><code>{escape(each['command'])}</code></p>" for each in found["sittings"])
    started = {name: launch for name, arm in found["arms"].items() if (launch := arm.get("about", {}).get("launch"))}
    commands += "".join(f"<p>{escape(name)}: <code>{escape(text)}</code></p>" for name, text in started.items())
    text = json.dumps({"sittings": found["sittings"], "arms": found["arms"]}, indent=1, ensure_ascii=False)
    return (
        f"{commands}<details><summary>Versions, machine, hashes, settings</summary><pre>{escape(text)}</pre></details>"
    )


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>" if text else ""


def _table(header: Sequence[str], body: Sequence[Sequence[str]], name: str = "") -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in header)
    lines = "".join("<tr>" + "".join(f"<td>{each}</td>" for each in line) + "</tr>" for line in body)
    return f"<div class='scroll'><table class='{name}'><tr>{head}</tr>{lines}</table></div>"
