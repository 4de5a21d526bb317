"""Tables of the documentation, made from the JSON of the results they show.

    python benchmarks/tables.py            # write them into the pages
    python benchmarks/tables.py --check    # say which are out of date

A page has a table between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verifypd.bench import advice, modes
from verifypd.bench.figures import Outcome, Record, cut, figures
from verifypd.bench.results import HEADER, ratio, row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {
    "ours:head": "ours, head",
    "vllm:eagle": "vLLM, head",
    "ours:plain": "ours, plain",
    "vllm:plain": "vLLM, plain",
}
SERVED = {
    "ours": "ours",
    "early": "ours, `--slo-ttft 200 --slo-gap 45`",
    "vllm": "vLLM",
    "vllm again": "vLLM, again (control)",
}


def read(name: str) -> dict[str, Any]:
    """A result."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def rows(header: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines]) + "\n"


def source(*names: str) -> str:
    """Where a table comes from."""
    commits = {name: read(name)["commit"][:7] for name in names}
    links = ", ".join(f"[`{name}.json`](RESULTS/{name}.json) ({commit})" for name, commit in commits.items())
    return f"\nFrom {links}.\n"


def over(cell: dict[str, Any], arm: str, reference: str, figure: str) -> str:
    """A ratio with its interval."""
    found = cell[arm]["over"][reference][figure]
    return f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


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


def closed_tails() -> str:
    """Latencies of the closed loop."""
    cells = read("beside-vllm-closed")["cells"]
    lines = []
    for level in sorted(cells, key=lambda name: int(name.split()[1])):
        for arm in ("ours:head", "vllm:eagle"):
            lines.append([level.split()[1], NAMES[arm], *_tails(cells[level][arm]["figures"])])
    return rows(["at once", "arm", *TAILS], lines) + source("beside-vllm-closed")


def serve_h200(name: str, load: str) -> Callable[[], str]:
    """Our server and vLLM's over HTTP: what each arm reached, and ours over vLLM's."""

    def table() -> str:
        found = read(name)
        lines = []
        for scenario in sorted(found["scenarios"], key=lambda each: int(re.findall(r"\d+", each)[-1])):
            own, level = found["scenarios"][scenario], re.findall(r"\d+", scenario)[-1]
            for arm, each in own["arms"].items():
                compared = own["compared"].get(arm)
                names = ("tok_s", "ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")
                ratios = [
                    ratio(compared[figure]).removesuffix(" no difference") if compared else "" for figure in names
                ]
                speed = f"{each['figures']['tok_s']:,.0f}"
                lines.append([level, SERVED.get(arm, arm), speed, *_tails(each["figures"]), *ratios])
        header = [load, "server", "tokens/s", *TAILS, "× tokens/s", "× TTFT p95", "× TPOT p95", "× gap p99"]
        return rows(header, lines) + source(name)

    return table


TAILS = ["TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "gap p99 (longest), ms"]


def _tails(figures: dict[str, float]) -> list[str]:
    return [
        f"{figures['ttft_ms_p50']:.0f} / {figures['ttft_ms_p95']:.0f}",
        f"{figures['tpot_ms_p50']:.1f} / {figures['tpot_ms_p95']:.1f}",
        f"{figures['gap_ms_p99']:.0f} ({figures['gap_ms_max']:.0f})",
    ]


def low_acceptance() -> str:
    """The head's engine over one without a draft, where few drafts stand."""
    lines = []
    for alpha, names in (("0.3", ("head-alpha-0.3", "head-alpha-0.3-128")), ("0.5", ("head-alpha-0.5",))):
        cells = {level: cell for name in names for level, cell in read(name)["cells"].items()}
        levels = ("closed 1", "closed 32", "closed 128")
        lines.append([alpha, *(over(cells[level], "ours:head", "ours:plain", "tok_s") for level in levels)])
    cells = read("beside-vllm-closed")["cells"]
    lines.append(
        [
            "0.8",
            *(
                over(cells[level], "ours:head", "ours:plain", "tok_s")
                for level in ("closed 1", "closed 32", "closed 128")
            ),
        ]
    )
    names = ("head-alpha-0.3", "head-alpha-0.3-128", "head-alpha-0.5", "beside-vllm-closed")
    return rows(["α", "1 request", "32", "128"], lines) + source(*names)


def original_metric() -> str:
    """One arm that ran twice, cut off at three times: all tokens of the window, and those of finished requests."""
    found = read("bench-original-metric")
    one, two = (Outcome.unpacked(run) for run in found["runs"].values())
    lines = []
    for seconds in (39.0, 39.5, 45.0):
        both = [figures([cut(each, seconds)]) for each in (one, two)]
        line = [f"{seconds:g} s"]
        for figure in ("tok_s", "tok_s_original"):
            first, second = (each[figure] for each in both)
            more = f"{100 * (second / first - 1):+,.0f} %" if first else "from nothing"
            line += [f"{first:.1f}", f"{second:.1f}", more]
        lines.append(line)
    header = ["cut off at", "all tokens/s: once", "again", "", "of finished requests: once", "again", ""]
    return rows(header, lines) + source("bench-original-metric")


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


def planner() -> str:
    """The planner beside the rules before it, with a draft model; ratios are over the rule of the same ms."""
    lines = []
    for cell in read("h200-planner")["cells"]:
        mine, _, budget = cell["arm"].partition("=")
        arm = f"planner, `--slo-gap {budget}`" if mine == "gap" else f"4342614, {cell['arm'][6:]} ms rule"
        over = _intervals(cell["over"][f"other:{budget}"]) if mine == "gap" else [""] * 3
        lines.append([str(cell["rate"]), arm, *_tails(cell["figures"]), *over])
    header = ["requests/s", "planner", *TAILS, "× TTFT p95", "× TPOT p95", "× gap p99"]
    return rows(header, lines) + source("h200-planner")


def targets() -> str:
    """The planner under other targets; ratios are over the first line."""
    lines = []
    for cell in [cell for cell in read("h200-targets")["cells"] if cell["rate"] == 16 and "gap" not in cell["arm"]]:
        over = _intervals(cell["over"]["ttft=500"]) if cell["over"] else [""] * 3
        lines.append([f"`--slo-{cell['arm'].replace('=', ' ')}`", *_tails(cell["figures"]), *over])
    return rows(["target, ms", *TAILS, "× TTFT p95", "× TPOT p95", "× gap p99"], lines) + source("h200-targets")


def _intervals(found: dict[str, dict[str, float]]) -> list[str]:
    names = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")
    return [f"{found[name]['ratio']:.2f} ({found[name]['low']:.2f}–{found[name]['high']:.2f})" for name in names]


def toy() -> str:
    """The engine and a toy of its schedule on the same arrivals, with the same costs of steps."""
    lines = []
    for cell in sorted(read("toy-schedule")["cells"], key=lambda each: (each["arm"].startswith("plain"), each["rate"])):
        ours, theirs, over = cell["engine"], cell["toy"], cell["over"]
        arm = "`plain`" if cell["arm"].startswith("plain") else "`auto`, 1.1B draft"
        line = [arm, str(cell["rate"])]
        for name, digits in (("ttft_ms_p95", 0), ("tpot_ms_p95", 1)):
            line += [f"{ours[name]:.{digits}f}", f"{theirs[name]:.{digits}f}", f"{over[name]:.2f}"]
        lines.append([*line, f"{ours['gap_ms_max']:.0f}"])
    header = ["", "requests/s", "TTFT p95, ms", "toy", "×", "TPOT p95, ms", "toy", "×", "longest gap, ms"]
    return rows(header, lines) + source("h200-targets", "toy-schedule")


def host() -> str:
    """What the host works in a step, against the cycle of the device."""
    found = read("h200-head")
    levels = sorted((int(name[5:]), each) for name, each in found["details"].items() if name.startswith("idle_"))
    lines = [
        ["host, ms a step", *(f"{each['host_ms']:.2f}" for _, each in levels)],
        ["device's cycle, ms", *(f"{each['cycle_ms']:.2f}" for _, each in levels)],
        ["share", *(f"{each['host_ms'] / each['cycle_ms']:.2f}" for _, each in levels)],
        ["device idle", *(f"{each['idle']:.1%}" for _, each in levels)],
    ]
    return rows(["requests", *(str(level) for level, _ in levels)], lines) + source("h200-head")


def eight_bits() -> str:
    """Steps and KV capacity with weights, keys and values in fp8."""
    arms, levels = read("fp8-h200")["steps"], (1, 8, 32, 128)
    lines = [
        [
            name,
            *(f"{arm[f'{kind}_ms_{n}']:.2f}" for kind in ("plain", "cycle") for n in levels),
            f"{arm['kv_tokens']:,}",
        ]
        for name, arm in arms.items()
    ]
    header = ["", *(f"{kind}, {n}" for kind in ("plain", "cycle") for n in levels), "KV tokens"]
    return rows(header, lines) + source("fp8-h200")


def draft_kinds() -> str:
    """What the built-in draft's tokens come to, on kinds of prompts it was distilled on and on others."""
    lines = []
    for name, title in ((SEEN, "distilled on"), (UNSEEN, "**not distilled on**")):
        found = read(name)["acceptance"]
        for kind in sorted(found["0"], key=lambda each: each != "all"):
            line = [f"{title}, all" if kind == "all" else kind]
            for temperature in ("0", "0.8"):
                own = found[temperature][kind]
                line += [" ".join(f"{alpha:.2f}" for alpha in own["alpha"]), f"{own['mean_accepted_length']:.2f}"]
            lines.append(line)
    header = ["kinds of prompts", "greedy: α by position", "tokens a pass", "temperature 0.8: α", "tokens a pass"]
    return rows(header, lines) + source(SEEN, UNSEEN)


def equal_systems() -> tuple[Outcome, Outcome]:
    """Two systems that emit 100 tokens/s for 50 requests of 20 tokens that came at once: in turn, and all together."""
    in_turn = [[(20 * i + k + 1) / 100 for k in range(20)] for i in range(50)]
    together = [[(50 * k + i + 1) / 100 for k in range(20)] for i in range(50)]

    def whole(outputs: list[list[float]]) -> Outcome:
        return Outcome(tuple(Record(0.0, 0.0, tuple(each), 20, 1, True) for each in outputs), 50, 10.0)

    return whole(in_turn), whole(together)


def equal_metric() -> str:
    """What the original's metric makes of them at some cut-offs."""
    lines = []
    for seconds in (9.505, 9.515, 9.535, 9.75, 10.0):
        one, two = (figures([cut(each, seconds)]) for each in equal_systems())
        line = [f"{seconds:g} s", f"{two['tok_s']:.0f}", f"{one['tok_s']:.0f}", f"{two['tok_s_original']:.1f}"]
        more = one["tok_s_original"] / two["tok_s_original"] - 1 if two["tok_s_original"] else None
        lines.append(
            [*line, f"{one['tok_s_original']:.1f}", "from nothing" if more is None else f"{100 * more:+,.0f} %"]
        )
    header = ["cut off at", "all tokens/s: together", "in turn", "of finished requests: together", "in turn", ""]
    return rows(header, lines)


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e4 else f"{value:.0f} ms"


def deploy(*names: str) -> Callable[[], str]:
    """Mean E2E of every arm in every scenario of some results, and the fastest."""

    def table() -> str:
        founds = [read(name) for name in names]
        arms = list(dict.fromkeys(arm for found in founds for arm in found["arms"]))
        lines = []
        for found in founds:
            for scenario, own in found["scenarios"].items():
                cells = []
                for arm in arms:
                    each = own["arms"].get(arm)
                    word = own["compared"].get(arm, {}).get("e2e_ms_mean", {}).get("verdict", "")
                    mark = {"faster": " ↓", "slower": " ↑"}.get(word, "")
                    cells.append(_ms(each["figures"]["e2e_ms_mean"]) + mark if each else "–")
                lines.append([scenario, *cells, advice.fastest(own)])
        said = "; ".join(dict.fromkeys(f"{found['note']}; against {found['reference']}" for found in founds))
        return rows(["mean E2E", *arms, "lowest"], lines) + f"\n↓ faster, ↑ slower at 95 %. {said}.\n" + source(*names)

    return table


def deploy_tails() -> str:
    """Mixed traffic on a GPU: what every arm reached, and its tails over those of the reference."""
    found = read(MIXED_H200)
    lines = []
    for scenario, own in found["scenarios"].items():
        rate = scenario.partition(",")[0].removeprefix("E ").removesuffix("/s")
        for arm, each in own["arms"].items():
            compared = own["compared"].get(arm)
            names = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")
            ratios = [ratio(compared[name]).removesuffix(" no difference") if compared else "" for name in names]
            lines.append([rate, f"`{arm}`", *_tails(each["figures"]), *ratios])
    header = ["requests/s", "arm", *TAILS, "× TTFT p95", "× TPOT p95", "× gap p99"]
    return rows(header, lines) + f"\n{found['note']}; over {found['reference']}.\n" + source(MIXED_H200)


def deploy_rules() -> str:
    """The original's selection rules against what was measured."""
    founds = [read(name) for name in RULED]
    lines = []
    for variant, counts in advice.rule_counts(founds).items():
        right, wrong = counts[advice.RIGHT], counts[advice.WRONG]
        word = "holds" if right > wrong else "as good as chance" if right == wrong else "oftener wrong than right"
        figures = [str(counts[each]) for each in (advice.RIGHT, advice.WRONG, advice.EITHER)]
        lines.append([f"`{variant}`", *figures, word])
    header = ["rule", "its choice was the faster one", "the slower one", "no difference", "verdict"]
    return rows(header, lines) + source(*RULED)


def deploy_claims() -> str:
    """Its other statements, each with figures and a word."""
    sweep, batches = read(SWEEP), read(BATCHES)
    lines = []
    told = [("A", modes.named_modes(sweep)), ("B", modes.named_modes(read(THREE)))]
    poor = {mode.name: mode for mode in modes.named_modes(read(POOR))}
    for own in zip(*(each for _, each in told), strict=True):
        said = [(letter, mode) for (letter, _), mode in zip(told, own, strict=True) if mode.seen != modes.OPEN]
        for letter, mode in said or [("B, α = 0.3", poor[own[0].name])]:
            figures = mode.figures.partition(" (mean E2E")[0]
            lines.append([f"{mode.name}: {mode.claim}", f"{letter}: {figures}", mode.seen])
    for _, size, levels in advice.gains(sweep):
        low, high = (f"{pick(each['ratio'] for _, each in levels):.2f}" for pick in (min, max))
        faster = sum(each["verdict"] == "slower" for _, each in levels)
        lines.append(
            [f"best at 3–7 × the draft's size: here {size:.0f} ×", f"plain takes {low}–{high} of PD's time",
             f"PD is faster in {faster} of {len(levels)} loads"]
        )  # fmt: skip
    shown = [each for each in advice.verification_cost() if each[0] in (1, 16, 64, 256)]
    costs = ", ".join(f"{share:.2f} at {count}" for count, share in shown)
    claim = "four times the verification for nearly one request's cost"
    most = max(count for count, share in advice.verification_cost() if share < 1.25)
    lines.append([claim, f"five tokens a request over one: {costs} requests", f"holds up to about {most} requests"])
    for level, arms in advice.batch_verdicts(batches):
        best = min(arms, key=lambda name: arms[name][0])
        shown = ", ".join(
            f"{name.split()[-1]}: {_ms(value)}{f' ({word})' if word else ''}" for name, (value, word) in arms.items()
        )
        lines.append(
            [f"batch 16 at 16–32, 32 at C ≥ 32, 64 at C ≥ 64: at {level}", shown, f"{best.split()[-1]} is lowest"]
        )
    return rows(["its claim", "here", "verdict"], lines) + source(SWEEP, THREE, POOR, BATCHES)


def capacity() -> str:
    """Requests/s that clusters of several sizes take, all replicas up and one of them dead."""
    plan, death = read(PLAN)["runs"], read(DEATH)["runs"]
    lines = []
    for size in sorted({run["replicas"] for run in plan}):
        whole = [_holds(plan, size, share) for share in SERVED_SHARES]
        rest = [_holds(death, size, share) for share in SERVED_SHARES] if size > 1 else [None, None]
        each = [f"{value:.0f}" if value else "–" for value in (*whole, *rest)]
        lines.append([str(size), *each, f"{whole[0] / size:.1f}" if whole[0] else "–"])
    header = ["replicas"]
    header += [f"{share:.0%} in both targets" for share in SERVED_SHARES]
    header += [f"one dead: {share:.0%}" for share in SERVED_SHARES]
    return rows([*header, "for each, 95%"], lines) + source(PLAN, DEATH)


def _holds(runs: list[dict[str, Any]], size: int, share: float) -> float | None:
    """The highest rate at which so many requests meet both targets; straight between the rates that were run."""
    own = sorted((run["rate"], run["figures"]["attainment"]) for run in runs if run["replicas"] == size)
    best = None
    for (low, more), (high, less) in zip(own, own[1:], strict=False):
        if more >= share > less:
            best = low + (high - low) * (more - share) / (more - less)
    return own[-1][0] if own and own[-1][1] >= share else best


def needed() -> str:
    """Replicas for a rate, without and with one that may die, from the largest cluster no larger than them."""
    plan, death = read(PLAN)["runs"], read(DEATH)["runs"]
    sizes = sorted({run["replicas"] for run in plan})

    def count(rate: float, runs: list[dict[str, Any]], least: int) -> str:
        for number in range(least, 10_000):
            known = max(size for size in sizes if size <= number)
            found = _holds(runs, known, SERVED_SHARES[0])
            lost = known / (known - 1) * (number - 1) / number if runs is death else 1.0
            if found is not None and found / known * lost * number >= rate:
                return str(number)
        return "–"

    lines = [[f"{rate:,}", count(rate, plan, 1), count(rate, death, 2)] for rate in (10, 20, 50, 100, 200, 500, 1000)]
    return rows(["requests/s", "replicas", "one of which may die"], lines) + source(PLAN, DEATH)


def routings() -> str:
    """What each routing finds in caches, and what that is worth."""
    lines = []
    for name in (ROUTING, ROUTING_8):
        for run in read(name)["runs"]:
            own = run["figures"]
            tails = f"{own['ttft_ms_p50']:.0f} / {own['ttft_ms_p95']:.0f}"
            place = [str(run["replicas"]), str(run["ingress_replicas"]), run["routing"]]
            lines.append(
                [*place, f"{own['cached']:.0%}", tails, f"{own['tpot_ms_p95']:.1f}", f"{own['attainment']:.1%}"]
            )
    header = ["replicas", "ingresses", "routing", "of prompts found read", "TTFT p50 / p95, ms", "TPOT p95, ms"]
    return rows([*header, "in both targets"], lines) + source(ROUTING, ROUTING_8)


def thousand() -> str:
    """A thousand replicas, some of which die."""
    lines = []
    for run in read(THOUSAND)["runs"]:
        own = run["figures"]
        figures = [f"{run['replicas']:,}", f"{run['rate']:,.0f}", f"{own['requests']:,}", str(own["deaths"])]
        figures += [str(own["moved"]), f"{own['pause_ms_p50']:.0f} / {own['pause_ms_p95']:.0f}", str(own["lost"])]
        lines.append([*figures, f"{own['attainment']:.1%}", f"{run['simulated_in_s']:.0f} s"])
    header = ["replicas", "requests/s", "requests", "deaths", "streams moved", "pause p50 / p95, ms", "lost"]
    return rows([*header, "in both targets", "simulated in"], lines) + source(THOUSAND)


def beside_ray() -> str:
    """Ray's two replicas and the simulated ones, on the same requests."""
    lines = []
    for run in read("cluster_simulated")["runs"]:
        for name, title in (
            ("tok_s", "tokens/s"), ("ttft_ms_mean", "TTFT mean, ms"), ("ttft_ms_p95", "TTFT p95, ms"),
            ("e2e_ms_mean", "stream mean, ms"), ("e2e_ms_p95", "stream p95, ms"),
        ):  # fmt: skip
            both = [f"{run[part][name]:,.0f}" for part in ("measured", "simulated")]
            lines.append([f"{run['load']:.0%}", title, *both, f"{run['ratios'][name]:.2f}"])
    return rows(["load", "", "Ray", "simulated", "ratio"], lines) + source("cluster_simulated")


SEEN, UNSEEN = "evaluate-draft", "evaluate-draft-unseen"
SERVED_SHARES = (0.95, 0.99)
PLAN, DEATH, ROUTING, ROUTING_8, THOUSAND = (
    f"simulated-cluster-{part}-h200" for part in ("plan", "death", "routing", "routing-8", "thousand")
)
SWEEP, MIXED, BATCHES = "simulated-sweep-h200", "simulated-mixed-h200", "simulated-batches-h200"
THREE, POOR = "simulated-three-way-h200", "simulated-poor-drafts-h200"
RULED = (SWEEP, THREE)
MIXED_H200, SWEEP_H200 = "bench-mixed-h200", "bench-sweep-h200"
THREE_H200, EVERY_H200 = "bench-three-way-h200", "bench-comprehensive-h200"

TABLES: dict[str, Callable[[], str]] = {
    "planner": planner,
    "planner-targets": targets,
    "planner-toy": toy,
    "host-work": host,
    "fp8-steps": eight_bits,
    "draft-kinds": draft_kinds,
    "deploy-sweep": deploy(SWEEP),
    "deploy-mixed": deploy(MIXED),
    "deploy-three-way": deploy(THREE),
    "deploy-h200": deploy(THREE_H200, EVERY_H200),
    "deploy-h200-sweep": deploy(SWEEP_H200),
    "deploy-h200-mixed": deploy_tails,
    "deploy-cpu": deploy("bench-three-way-cpu", "bench-comprehensive-cpu"),
    "deploy-rules": deploy_rules,
    "deploy-claims": deploy_claims,
    "equal-systems": equal_metric,
    "bench-original-metric": original_metric,
    "bench-serve-cpu": serve_cpu,
    "head-closed": closed,
    "head-closed-tails": closed_tails,
    "serve-closed": serve_h200("bench-serve-h200-closed", "at once"),
    "serve-mixed": serve_h200("bench-serve-h200-mixed", "requests/s"),
    "head-low-acceptance": low_acceptance,
    "cluster-capacity": capacity,
    "cluster-needed": needed,
    "cluster-routing": routings,
    "cluster-thousand": thousand,
    "cluster-beside-ray": beside_ray,
}


def written(page: Path) -> str:
    """The page with its tables made anew."""
    results = "benchmarks/results" if page.parent == ROOT else "../benchmarks/results"
    return PLACE.sub(
        lambda match: match[1] + TABLES[match[2]]().replace("RESULTS", results) + match[4], page.read_text()
    )


def main(given: list[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(given)
    old = [page for page in PAGES if written(page) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
        if not args.check:
            page.write_text(written(page))
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
