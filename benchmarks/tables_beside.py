"""Tables of engines and servers side by side: ours and vLLM's, with a head and without."""

from __future__ import annotations

import re
from collections.abc import Callable

from cells import TAIL_FIGURES, TAIL_RATIOS, TAILS, over, ratios, read, rows, source, tails

from verifypd.bench.results import HEADER, ratio, row

NAMES = {
    "ours:head": "ours, head",
    "vllm:eagle": "vLLM, head",
    "ours:plain": "ours, plain",
    "vllm:plain": "vLLM, plain",
}
SERVED = {
    "ours": "ours",
    "sooner": "ours, `slo_ttft: 200`",
    "vllm": "vLLM",
    "vllm again": "vLLM, again (control)",
}

GLANCE = {
    "e2e_ms_mean": "whole answer, mean",
    "tpot_ms_p95": "time per token, p95",
    "gap_ms_p99": "pause in a stream, p99",
    "gap_ms_max": "longest pause",
    "ttft_ms_p50": "first token, median",
    "ttft_ms_p95": "first token, p95",
    "ttft_ms_p99": "first token, p99",
}


def closed() -> str:
    """Tokens/s of all arms in the closed loop, and ours over vLLM's."""
    cells = read("beside-vllm-closed")["cells"]
    levels = sorted(cells, key=lambda name: int(name.split()[1]))
    lines = [
        [NAMES[arm], *(f"{cells[level][arm]['figures']['tok_s']:,.0f}" for level in levels)]
        for arm in ("ours:head", "vllm:eagle", "ours:plain", "vllm:plain")
    ]
    for ours, theirs in (("ours:head", "vllm:eagle"), ("ours:plain", "vllm:plain")):
        label = f"{NAMES[ours]} over {NAMES[theirs]}"
        lines.append([label, *(over(cells[level], ours, theirs, "tok_s") for level in levels)])
    header = ["tokens/s at requests at once", *(level.split()[1] for level in levels)]
    return rows(header, lines) + source("beside-vllm-closed")


def serve_h200(name: str, load: str) -> Callable[[], str]:
    """Our server and vLLM's over HTTP: what each arm reached, and ours over vLLM's."""

    def table() -> str:
        found = read(name)
        lines, failed = [], []
        for scenario in sorted(found["scenarios"], key=lambda each: int(re.findall(r"\d+", each)[-1])):
            own, level = found["scenarios"][scenario], re.findall(r"\d+", scenario)[-1]
            for arm, each in own["arms"].items():
                over_theirs = ratios(own["compared"].get(arm), "tok_s", *TAIL_FIGURES)
                speed = f"{each['figures']['tok_s']:,.0f}"
                lines.append([level, SERVED.get(arm, arm), speed, *tails(each["figures"]), *over_theirs])
                failed.append((each["figures"]["failed"], each["figures"]["requests"]))
        header = [load, "server", "tokens/s", *TAILS, "× tokens/s", *TAIL_RATIOS]
        said = dict.fromkeys(f"{each} of {requests}" for each, requests in failed if each)
        note = f"\nToo long for the servers, refused by each: {', '.join(said)}.\n" if said else ""
        return rows(header, lines) + note + source(name)

    return table


def at_a_glance() -> str:
    """Latencies of mixed traffic, ours beside vLLM's, which ran twice; the better in bold where that is certain."""
    found = read("bench-serve-h200-mixed")
    rates = {int(re.findall(r"\d+", name)[-1]): own for name, own in found["scenarios"].items()}
    lines = []
    for name, text in GLANCE.items():
        cells = []
        for _, own in sorted(rates.items()):
            digits = 1 if name.startswith("tpot") else 0
            mine, other, again = (
                f"{own['arms'][arm]['figures'][name]:.{digits}f}" for arm in ("ours", "vllm", "vllm again")
            )
            verdict = own["compared"]["ours"].get(name, {}).get("verdict", "")
            mine = f"**{mine}**" if verdict == "faster" else mine
            cells.append(f"{mine} / {f'**{other}**' if verdict == 'slower' else other}, {again}")
        lines.append([text, *cells])
    header = ["ms, ours / vLLM, again", *(f"{rate} requests/s" for rate in sorted(rates))]
    return rows(header, lines) + source("bench-serve-h200-mixed")


def serve_cpu() -> str:
    """Two servers over HTTP on a CPU."""
    found = read("bench-serve-cpu")
    lines = []
    for scenario, own in found["scenarios"].items():
        lines += [[scenario, *row(arm, each)[:7]] for arm, each in own["arms"].items()]
    lines += [
        [scenario, f"{arm} over {found['reference']}", ratio(each["tok_s"]), "", "", "", ratio(each["e2e_ms_mean"]), ""]
        for scenario, own in found["scenarios"].items()
        for arm, each in own["compared"].items()
    ]
    return rows(["scenario", *HEADER[:7]], lines) + source("bench-serve-cpu")


def low_acceptance() -> str:
    """The head's engine over one without a draft, where few drafts stand."""
    lines, levels = [], ("closed 1", "closed 32", "closed 128")
    for alpha, names in (("0.3", ("head-alpha-0.3", "head-alpha-0.3-128")), ("0.5", ("head-alpha-0.5",))):
        cells = {level: cell for name in names for level, cell in read(name)["cells"].items()}
        lines.append([alpha, *(over(cells[level], "ours:head", "ours:plain", "tok_s") for level in levels)])
    cells = read("beside-vllm-closed")["cells"]
    lines.append(["0.8", *(over(cells[level], "ours:head", "ours:plain", "tok_s") for level in levels)])
    names = ("head-alpha-0.3", "head-alpha-0.3-128", "head-alpha-0.5", "beside-vllm-closed")
    return rows(["α", "1 request", "32", "128"], lines) + source(*names)
