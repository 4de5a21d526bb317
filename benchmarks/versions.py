"""Two checkouts of this project by turns on the built-in pair: is the newer one as fast?

    git worktree add ../before COMMIT
    python benchmarks/versions.py --before ../before --json benchmarks/results/versions.json

Each checkout is a process with an engine of its own in its default configuration; this one has two, as a control. They
take turns, round by round, and the order changes. Ratios are of medians, with the lowest and the highest of any round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from script import command_line, keep

from verifypd.bench.provenance import provenance

HERE = Path(__file__).resolve().parents[1]
WORK = """
import json, sys, time
from verifypd import LLM, SamplingParams
from verifypd.bench.texts import PROSE
prompts = list(PROSE)
llm = LLM("smollm2", batch_size=16, max_model_len=1024, prefix_cache=False)
def run(texts, tokens, at_once):
    params = SamplingParams(**{"temperature": 0.0, **json.loads(sys.argv[1])}, max_tokens=tokens, ignore_eos=True)
    begun, made = time.perf_counter(), []
    for first in range(0, len(texts), at_once):
        made += llm.generate(texts[first : first + at_once], params)
    seconds = time.perf_counter() - begun
    return sum(len(o.outputs[0].token_ids) for o in made) / seconds, [o.outputs[0].token_ids for o in made]
run(prompts[:2], 16, 1)
print("ready", flush=True)
for line in sys.stdin:
    one, texts = run(prompts[:4], 64, 1)
    many, more = run((prompts * 16)[:16], 48, 16)
    print(json.dumps({"one": one, "sixteen": many, "texts": texts + more}), flush=True)
"""


class Checkout:
    """An engine of one checkout in a process of its own."""

    def __init__(self, folder: Path, sampling: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK, sampling], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
        if self._line() != "ready":
            raise SystemExit(f"{folder} did not start")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self) -> dict[str, Any]:
        """One round."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return dict(json.loads(self._line()))


def main() -> None:
    """Run and report."""
    parser = command_line(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sampling", default="{}", metavar="JSON", help='e.g. {"temperature": 0.8} (default: greedy)')
    args = parser.parse_args()
    commit = ["git", "-C", str(args.before), "rev-parse", "HEAD"]
    arms = {"before": args.before.resolve(), "now": HERE, "now again": HERE}
    running = {name: Checkout(folder, args.sampling) for name, folder in arms.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(args.rounds):
        names = list(arms)
        for name in names[turn % 3 :] + names[: turn % 3]:
            found[name].append(running[name].run())
            print(turn, name, *(f"{key} {found[name][-1][key]:.1f}" for key in ("one", "sixteen")), flush=True)
    for checkout in running.values():
        checkout.process.terminate()
    report: dict[str, Any] = {**provenance(args.commit), "before": subprocess.check_output(commit, text=True).strip()}
    for key in ("one", "sixteen"):
        rates = {name: [each[key] for each in rounds] for name, rounds in found.items()}
        ratios = {
            f"{name} over {base}": sorted(a / b for a, b in zip(rates[name], rates[base], strict=True))
            for name, base in (("now", "before"), ("now again", "now"))
        }
        report[key] = {
            "tok_s": rates,
            "ratios": {
                name: {"median": statistics.median(r), "least": r[0], "most": r[-1]} for name, r in ratios.items()
            },
        }
        print(key, report[key]["ratios"])
    report["same_texts"] = all(
        each["texts"] == found["before"][0]["texts"] for rounds in found.values() for each in rounds
    )
    keep(report, args.json)


if __name__ == "__main__":
    main()
