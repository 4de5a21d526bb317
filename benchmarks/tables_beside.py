"""Tables of engines and servers side by side: ours and vLLM's, with a head and without."""

from __future__ import annotations

import re
from collections.abc import Callable

from cells import TAIL_FIGURES, TAIL_RATIOS, TAILS, ratios, read, rows, source, tails

from verifypd.bench.results import HEADER, ratio, row

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


def mixed_ratios() -> str:
    """Ours over each of vLLM's two runs, of figures pooled over seeds."""
    found = read("bench-serve-h200-mixed")
    rates = {int(re.findall(r"\d+", name)[-1]): own["arms"] for name, own in found["scenarios"].items()}
    lines = [
        [text]
        + [
            f"{arms['ours']['figures'][name] / arms[arm]['figures'][name]:.2f}"
            for _, arms in sorted(rates.items())
            for arm in ("vllm", "vllm again")
        ]
        for name, text in GLANCE.items()
    ]
    header = ["× vLLM's", *(f"{rate} requests/s{again}" for rate in sorted(rates) for again in ("", ", again"))]
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
    """`auto` with a head over an engine without a draft, where few drafts stand and where many do."""
    figures, levels = read("h200-auto")["figures"], (1, 32, 128)
    lines = [[a, *(f"{figures[f'auto_over_plain_{a}_{n}']:.2f}" for n in levels)] for a in ("0.3", "0.5", "0.8")]
    return rows(["α", "1 request", "32", "128"], lines) + source("h200-auto")
