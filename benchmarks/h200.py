"""The engine on one GPU: exactness, floors, step times, closed loop, mixed traffic, bursts, and `auto` against `plain`.

    python benchmarks/h200.py --json benchmarks/results/h200.json          # all parts
    python benchmarks/h200.py --parts floors,steps,closed --levels 1,32
    python benchmarks/h200.py --pair llama-2-7b,eagle --parts steps,closed # a head for a draft
    python benchmarks/h200.py --pair llama-2-7b,eagle --parts record       # what every step did and took: record-*.json
    python benchmarks/h200.py --tiny --parts steps,closed,mixed,burst,auto # small model on a CPU: a test of this script

Random weights in the shapes of Llama-2-7B and TinyLlama-1.1B, or of --pair, with synthetic acceptance 0.8; prompts of
random tokens, temperature 0, no end of text. All parts but `exact`, `invariant` and `placements` run on one engine, in
one configuration: `plain` is that engine told to speculate no more. `--set NAME=VALUE` gives a setting to every engine,
e.g. `--set graphs=off`.

Figures: `token_ms_128` is ms a token and request at 128 requests, at the draft length where it is least; the others are
named as in docs/gpu-measured.md.

`verifypd bench` has closed loops and mixed traffic too, as campaigns of arms with intervals. Here they are parts of one
sitting: a GPU is held for ten minutes, the model is loaded once, and the same engine gives floors, step times and idle
shares, without HTTP, which `verifypd bench` does not measure.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from script import command_line, keep

from verifypd import LLM
from verifypd.bench.device import copy_tb_s, product_tflop_s
from verifypd.bench.drive import Drive
from verifypd.bench.dummy import dummy_draft, dummy_model, parsed
from verifypd.bench.exact import check_all
from verifypd.bench.profile import host_ms, look
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import Arrival, mixed, read
from verifypd.control.cost import CostModel
from verifypd.control.observe import StepTiming
from verifypd.engine.engine import Engine
from verifypd.engine.measure import time_points
from verifypd.engine.scratch import Point
from verifypd.engine.synthetic import SyntheticAcceptance
from verifypd.engine.wiring import policies
from verifypd.metrics.pauses import freeze_heap

T = TypeVar("T")
WORKLOADS = Path(__file__).resolve().parent / "workloads"
ALPHA = 0.8
TARGETS = {"tpot_ms_p95": 15.0, "ttft_ms_p95": 200.0}  # of max_rate
MIXED = ("tpot_ms_p95", "ttft_ms_p95", "gap_ms_p99", "gap_ms_max")
RECORDED = (16, 14)  # requests/s, and for how many seconds
FOUND = [f"{name}_ms_{share}" for name in ("ttft", "tpot", "gap") for share in ("p50", "p95")]
SECONDS = ("draft_seconds", "verify_seconds", "prefill_seconds", "step_seconds")  # of a step, kept in µs


def packed(timings: Sequence[StepTiming]) -> dict[str, Any]:
    """Steps as rows of whole numbers, without the columns that are nothing but zeros."""
    names = [f.name for f in fields(StepTiming) if f.name != "decode_wait"]
    rows = [[round(getattr(each, n) * (1e6 if n in SECONDS else 1)) for n in names] for each in timings]
    used = [i for i in range(len(names)) if any(row[i] for row in rows)]
    columns = [names[i].replace("_seconds", "_us") if names[i] in SECONDS else names[i] for i in used]
    return {"columns": columns, "steps": [[row[i] for i in used] for row in rows]}


def unpacked(kept: dict[str, Any]) -> list[StepTiming]:
    """The steps of `packed`."""
    names = [name.replace("_us", "_seconds") for name in kept["columns"]]
    return [
        StepTiming(**{n: value * 1e-6 if n in SECONDS else value for n, value in zip(names, row, strict=True)})
        for row in kept["steps"]
    ]


class Bench:
    """The parts, the pair they run on, and the figures they come to."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.tiny = args.tiny
        self.folder = folder
        self.levels = [int(level) for level in args.levels.split(",")]
        self.settings = parsed(args.set)
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        verifier, draft = args.pair.split(",")
        self.model = dummy_model(verifier, folder, self.tiny)
        self.draft = dummy_draft(draft, folder, self.tiny)
        self._llm: LLM | None = None

    def options(self, **changes: Any) -> dict[str, Any]:
        """Settings of an engine of the pair."""
        options: dict[str, Any] = {
            "draft": self.draft, "load_format": "dummy", "batch_size": 4 if self.tiny else 128, "max_draft": 4,
            "synthetic_acceptance": ALPHA, "prefix_cache": False, "measure_costs": not self.tiny,
        }  # fmt: skip
        if self.tiny:
            options |= {"kv_memory": "32MB", "dtype": "float32"}
        return {**options, **changes, **self.settings}

    @property
    def engine(self) -> Engine:
        """The engine all parts share, made when it is first asked for."""
        if self._llm is None:
            begun = time.perf_counter()
            self._llm = LLM(self.model, **self.options())
            self.details["start_seconds"] = time.perf_counter() - begun
            if self._llm.engine.cost is not None:
                self.details["costs_at_start"] = asdict(self._llm.engine.cost.coefficients)
            if self.device.type == "cuda":
                free, total = torch.cuda.mem_get_info()
                self.details["device_gib"] = {"used": (total - free) / 2**30, "free": free / 2**30}
            drive = Drive(self._llm.engine)
            for arm in ("plain", "auto"):
                self._llm.engine.switch(arm)
                drive.closed(4, 8, 20, 8)  # warm-up
            freeze_heap()
        return self._llm.engine

    def close(self) -> None:
        """End the engine."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def alone(self, options: dict[str, Any], work: Callable[[Engine], T]) -> T:
        """What comes of `work` on an engine of its own, whose memory is free again afterwards."""
        llm = LLM(self.model, **options)
        try:
            return work(llm.engine)
        finally:
            llm.shutdown()
            del llm
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def told(self, arm: str, alpha: float = ALPHA) -> Drive:
        """The engine under one architecture, with beliefs of its own, at an acceptance."""
        engine = self.engine
        engine.synthetic = SyntheticAcceptance((alpha,))
        engine.architectures = policies(engine.config, engine.cost or CostModel())
        engine.architecture = engine.architectures(arm)
        return Drive(engine)

    # -- parts ----------------------------------------------------------------------------------------------------

    def exact(self) -> None:
        """Texts are the verifier's own, on a small checkpoint: see verifypd/bench/exact.py."""
        draws, tokens = (300, 12) if self.tiny else (4000, 60)
        graphs = {"graphs": "lazy"} if self.device.type == "cuda" else {}  # few passes come: no need for all of them
        found = check_all(self.folder / "exact", draws, tokens, **graphs, **self.settings)
        self.details["exact"] = found
        failed = [name for name, result in found.items() if not result["passed"]]
        print("exact: " + ("all passed" if not failed else f"FAILED {failed}: {found}"), flush=True)

    def floors(self) -> None:
        """What the device can do at most."""
        if self.device.type != "cuda":
            raise SystemExit("floors are measured on a GPU: leave them out with --parts")
        self.figures["copy_tb_s"] = copy_tb_s(self.device)
        self.details["product_tflop_s"] = product_tflop_s(self.device)

    def steps(self) -> None:
        """Device time of single steps at 512 tokens of context."""
        context, most = 64 if self.tiny else 512, self.engine.config.batch_size
        named = {n: min(n, most) for n in (1, 8, 32, 128) if n <= most or self.tiny}  # tiny: names as of a full run
        wanted = sorted(set(named.values()))
        points = [Point(n, drafts, context) for n in wanted for drafts in range(5)]
        found = dict(zip(points, time_points(self.engine, points), strict=True))
        rows = {(p.requests, p.drafts): t for p, t in found.items() if t is not None}
        if self.engine.cost is not None:
            self.details["costs"] = asdict(self.engine.cost.coefficients)  # as learnt up to now
        self.details["steps"] = {
            f"{n}x{drafts + 1}": {"draft_ms": 1e3 * t.draft_seconds, "verify_ms": 1e3 * t.verify_seconds}
            for (n, drafts), t in rows.items()
        }
        self.figures["plain_step_ms_1"] = 1e3 * rows[1, 0].verify_seconds
        self.figures["draft_step_ms_1"] = 1e3 * rows[1, 4].draft_seconds / 4
        for name, n in named.items():
            self.figures[f"cycle_ms_{name}"] = 1e3 * rows[n, 4].device_seconds
        if 128 in named:
            self.figures["token_ms_128"] = min(
                1e3 * t.device_seconds / sum(ALPHA**i for i in range(drafts + 1))
                for (n, drafts), t in rows.items()
                if n == named[128]
            )

    def closed(self) -> None:
        """Closed loop, 384 tokens in and 256 out, `plain` and `auto`."""
        prompt, output = (20, 8) if self.tiny else (384, 256)
        for level in self.levels:
            for arm, prefix in (("plain", "plain_"), ("auto", "")):
                drive = self.told(arm)
                drive.closed(level, level, prompt, min(output, 16))  # warm-up
                found = drive.closed(level, max(3 * level, 8), prompt, output, cap=120.0)
                self.details[f"closed_{arm}_{level}"] = found
                self.figures[f"{prefix}tpot_ms_p50_{level}"] = found["tpot_ms_p50"]
                self.figures[f"{prefix}tok_s_{level}"] = found["tok_s"]

    def idle(self) -> None:
        """Share of a steady batch's time in which the device had nothing to do, by its own account."""
        if self.device.type != "cuda":
            raise SystemExit("idle time is measured on a GPU: leave it out with --parts")
        hosts = {level: host_ms(self.told("auto").engine, level, 100) for level in self.levels}
        for level, host in hosts.items():
            found = look(self.told("auto").engine, level, 24)
            measured = {name: found[name] for name in ("cycle_ms", "idle", "gaps")}
            self.details[f"idle_{level}"] = measured | {"host_ms": host}
            self.figures[f"host_share_{level}"] = host / found["cycle_ms"]
            self.figures["idle_fraction"] = max(self.figures.get("idle_fraction", 0.0), found["idle"])

    def mixed(self) -> None:
        """Mixed traffic as it arrives, and the highest rate that meets the targets."""
        meets = [0]
        for rate in [int(rate) for rate in self.args.rates.split(",")]:
            workload = read(WORKLOADS / f"mixed-{rate}.json")
            found = self.told("auto").arriving((workload.scaled(60, 8) if self.tiny else workload).arrivals)
            self.details[f"mixed_{rate}"] = found
            if rate in (4, 8, 16):
                self.figures.update({f"mixed_{rate}_{name}": found[name] for name in MIXED})
            if not found["unfinished"] and all(found[name] <= limit for name, limit in TARGETS.items()):
                meets.append(rate)
        self.figures["max_rate"] = max(meets)

    def record(self) -> None:
        """Every step of some mixed traffic, what it did and took, for the simulator to be held against."""
        rate, seconds = (16, 1) if self.tiny else RECORDED
        for seed in (0, 1):
            workload = mixed(rate, seconds, seed)
            drive, timings = self.told("auto"), list[StepTiming]()
            architecture = drive.engine.architecture
            learn = architecture.observe_step

            def note(timing: StepTiming, learn: Any = learn, timings: list[StepTiming] = timings) -> None:
                timings.append(timing)
                learn(timing)

            architecture.observe_step = note  # type: ignore[method-assign]
            found = drive.arriving((workload.scaled(60, 8) if self.tiny else workload).arrivals)
            figures = {name: round(found[name], 3) for name in FOUND}
            self.details[f"record_{seed}"] = found
            made = {**provenance(self.args.commit), "pair": self.args.pair, "alpha": ALPHA, "seed": seed,
                    "rate": rate, "seconds": seconds, "batch_size": drive.engine.config.batch_size,
                    "costs_at_start": self.details.get("costs_at_start"),
                    "figures": figures, **packed(timings)}  # fmt: skip
            file = (self.args.json or Path("record.json")).with_name(f"record-{rate}-seed{seed}.json")
            file.write_text(json.dumps(made, separators=(",", ":")) + "\n")
            print(f"record seed {seed}: {len(timings)} steps, {figures}", flush=True)

    def prompts(self, length: int, count: int) -> tuple[list[Arrival], list[Arrival]]:
        """Long prompts half a second apart, and as many that ask for next to nothing."""
        times = [(0.05 if self.tiny else 0.5) * (i + 1) for i in range(count)]
        return [Arrival(at, length, 16) for at in times], [Arrival(at, 1, 2) for at in times]

    def lone(self) -> None:
        """First token of a prompt that has the engine to itself."""
        for length in (40, 60) if self.tiny else (2048, 4000):
            found = self.told("auto").arriving(self.prompts(length, 2 if self.tiny else 6)[0])
            self.figures[f"lone_ttft_ms_{length}"] = found["ttft_ms_p50"]

    def burst(self) -> None:
        """Long prompts beside eight running requests, against the same eight alone."""
        beside, length, count = (2, 60, 3) if self.tiny else (8, 4096, 12)
        long, quiet = self.prompts(length, count)
        drive = self.told("auto")
        alone, found = drive.arriving(quiet, beside), drive.arriving(long, beside)
        self.details["burst"] = {"quiet": alone, "burst": found}
        self.figures["burst_gap_ratio"] = found["beside_gap_ms_p99"] / max(alone["beside_gap_ms_p99"], 1e-9)
        self.figures["burst_ttft_ms_p95"] = found["ttft_ms_p95"]

    def placements(self) -> None:
        """Where prompts and drafts run, as ablations: long prompts beside eight requests, and draft beside verify."""
        beside, length, count = (2, 60, 2) if self.tiny else (8, 4096, 6)
        long, quiet = self.prompts(length, count)
        common = {"controller": "fixed", "measure_costs": False, "max_draft": 4}
        sizes = {"batch_size": 4 if self.tiny else 16, "max_model_len": 500 if self.tiny else 4500}

        def bursts(engine: Engine) -> dict[str, float]:
            drive = Drive(engine)
            drive.closed(2, 4, 20, 8)
            alone, found = drive.arriving(quiet, beside), drive.arriving(long, beside)
            return {
                "gap_ms_p99": found["beside_gap_ms_p99"],
                "quiet_gap_ms_p99": alone["beside_gap_ms_p99"],
                "ttft_ms_p95": found["ttft_ms_p95"],
                "beside_tok_s": found["beside_tok_s"],
            }

        for where, chunk in (("fused", 512), ("stream", 4096), ("partition:48", 4096)):
            own = {"placement": f"prefill={where}", "prefill_chunk": 16 if self.tiny else chunk, "arch": "pd"}
            self.details[f"prompts {where}"] = self.alone(self.options(**common, **sizes, **own), bursts)
        level = 4 if self.tiny else 32

        def closed(engine: Engine) -> dict[str, float]:
            drive = Drive(engine)
            drive.closed(level, level, 20, 8)
            found = drive.closed(level, 2 * level, 20 if self.tiny else 384, 8 if self.tiny else 128)
            return {name: found[name] for name in ("tok_s", "tpot_ms_p50")}

        for where, graphs in (("fused", "start"), ("fused", "off"), ("stream", "off"), ("partition:32", "off")):
            own = {"placement": f"decode={where}", "arch": "pdv", "batch_size": level, "verify_batch": level // 2}
            own |= {} if self.device.type == "cpu" else {"graphs": graphs}
            self.details[f"drafts {where}, graphs {graphs}"] = self.alone(self.options(**common, **own), closed)

    def auto(self) -> None:
        """Tokens/s of `auto` over `plain` in the same closed loop, by acceptance; `plain` before and after."""
        prompt, output = (20, 8) if self.tiny else (384, 256)
        arms = (("plain", ALPHA), ("auto", 0.3), ("auto", 0.5), ("auto", 0.8), ("plain", ALPHA))
        for level in [n for n in self.levels if n in (1, 32, 128)]:
            rates: dict[tuple[str, float], list[float]] = {}
            for arm, alpha in arms:
                drive = self.told(arm, alpha)
                drive.closed(level, level, prompt, min(output, 16))
                found = drive.closed(level, max(2 * level, 4), prompt, output)
                rates.setdefault((arm, alpha), []).append(found["tok_s"])
            plain = statistics.mean(rates["plain", ALPHA])
            self.details[f"auto_{level}"] = {f"{arm} {alpha}": found for (arm, alpha), found in rates.items()}
            for alpha in (0.3, 0.5, 0.8):
                self.figures[f"auto_over_plain_{alpha}_{level}"] = rates["auto", alpha][0] / plain

    def invariant(self) -> None:
        """What a fixed order of sums costs: plain and verify steps with `batch_invariant` over those without."""
        context, most = (64, 4) if self.tiny else (512, 32)
        points = [Point(n, drafts, context) for n in (1, most) for drafts in (0, 4)]
        found = {}
        for fixed in (False, True):
            options = self.options(batch_invariant=fixed, batch_size=most, measure_costs=False, graphs="lazy")
            if self.device.type == "cpu":
                options.pop("graphs")
            found[fixed] = self.alone(options, lambda engine: time_points(engine, points))
        self.details["invariant"] = {
            f"{point.requests}x{point.drafts + 1}": {"ms": 1e3 * a.verify_seconds, "fixed_ms": 1e3 * b.verify_seconds}
            for point, a, b in zip(points, found[False], found[True], strict=True)
            if a is not None and b is not None
        }


PARTS: dict[str, Callable[[Bench], None]] = {
    name: getattr(Bench, name)
    for name in (
        "exact",
        "floors",
        "steps",
        "closed",
        "idle",
        "lone",
        "burst",
        "auto",
        "mixed",
        "record",
        "invariant",
        "placements",
    )
}


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--pair",
        default="llama-2-7b,tinyllama-1.1b",
        help="verifier,draft: built-in shapes; the draft may be a head: eagle, eagle3",
    )
    parser.add_argument("--levels", default="1,8,32,128", help="concurrent requests")
    parser.add_argument("--rates", default="4,8,16,20,24,28,32", help="of mixed traffic, requests/s")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every engine")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and short work: tests this script, means nothing"
    )
    args = parser.parse_args(given)
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: {unknown[0]} is none of {', '.join(PARTS)}")
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --tiny runs a small model on the CPU")
    return args


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run the parts and report."""
    args = arguments(given)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        report = {**provenance(args.commit), "tiny": args.tiny, "pair": args.pair, "settings": bench.settings,
                  "seconds": {}, "figures": bench.figures, "details": bench.details}  # fmt: skip
        for name in args.parts.split(","):
            begun = time.perf_counter()
            if name in ("invariant", "placements"):
                bench.close()  # their engines need the memory
            freeze_heap()  # what a part left behind, a profile say, is not for the next to collect
            PARTS[name](bench)
            report["seconds"][name] = time.perf_counter() - begun
            print(f"{name}: {report['seconds'][name]:.1f} s", flush=True)
            keep(report, args.json)  # after every part: what was measured is kept, whatever comes
        bench.close()
    print("\n".join(f"{name:32} {value:10.3f}" for name, value in sorted(bench.figures.items())))
    return report


if __name__ == "__main__":
    main()
