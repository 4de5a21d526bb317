"""Tables of engines and servers side by side: ours and vLLM's, with a head and without."""

from __future__ import annotations

import re
from collections.abc import Callable

from cells import (
    TAIL_FIGURES,
    TAIL_RATIOS,
    TAILS,
    over_vllm,
    quotients,
    ratios,
    read,
    rows,
    scenarios,
    source,
    tails,
    which_certain,
)

from verifypd.bench.results import HEADER, ratio, row

CLIENTS, RATES = "at once", "requests/s"
SERVED = {
    "ours": "ours",
    "sooner": "ours, `slo_ttft: 200`",
    "vllm": "vLLM",
    "vllm again": "vLLM, again (control)",
}

GLANCE = {
    "tok_s": "tokens/s",
    "e2e_ms_mean": "whole answer, mean",
    "tpot_ms_p50": "time per token, median",
    "tpot_ms_p95": "time per token, p95",
    "gap_ms_p50": "pause in a stream, median",
    "gap_ms_p99": "pause in a stream, p99",
    "ttft_ms_p50": "first token, median",
    "ttft_ms_p95": "first token, p95",
    "gap_ms_max": "longest pause",
    "ttft_ms_p99": "first token, p99",
}


def serve_h200(name: str, load: str) -> Callable[[], str]:
    """Our server and vLLM's over HTTP: what each reached, and ours over vLLM's; of a closed loop tokens/s in words."""

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
        speeds = over_vllm(name, "tok_s")
        first = f"Ours writes {quotients(speeds)} × vLLM's tokens/s. {which_certain(speeds)}.\n\n"
        header = [load, "server", "tokens/s", *TAILS, "× tokens/s", *TAIL_RATIOS]
        said = dict.fromkeys(f"{each} of {requests}" for each, requests in failed if each)
        note = f"\nToo long for the servers, refused by each: {', '.join(said)}.\n" if said else ""
        return (first if load == CLIENTS else "") + rows(header, lines) + note + source(name)

    return table


def traffic(name: str) -> Callable[[], str]:
    """Ours over vLLM's in mixed traffic, figure by figure; those without an interval over each of vLLM's runs."""

    def table() -> str:
        found = scenarios(name)
        lines = []
        for figure, title in GLANCE.items():
            line = [title]
            for own in found.values():
                theirs = [each["figures"][figure] for arm, each in own["arms"].items() if arm != "ours"]
                pooled = ", ".join(f"{own['arms']['ours']['figures'][figure] / each:.2f}" for each in theirs)
                compared = own["compared"]["ours"]
                line.append(ratios(compared, figure)[0] if figure in compared else pooled)
            lines.append(line)
        header = ["× vLLM's", *(f"{rate} requests/s" for rate in found)]
        runs = max(len(own["arms"]) for own in found.values()) - 1
        said = "\nThe last two lines have no interval: figures are pooled over seeds"
        return rows(header, lines) + said + (", over each of vLLM's runs.\n" if runs > 1 else ".\n") + source(name)

    return table


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
