"""Draft and verifier fused or apart, on two devices: tokens/s and the gap between two outputs. Some minutes.

    python benchmarks/dual_device.py --json benchmarks/results/dual-device.json
    python benchmarks/dual_device.py --part simulated

*measured*: two processes on two cores of this machine, each pinned to its own; the arms of one process have both cores.
The pair is made here: a Llama of random weights whose later layers say little, and its first layers as the draft. Texts
mean nothing, but drafts are drawn and judged as any others, with seeds (coupled sampling). Arms in turn, in rounds:

- `plain`: no drafts; `fused`: draft and verifier in one process, one after the other
- `apart`: the draft in its own process, which rests until it is asked again
- `ahead`: the same, which drafts on from the verdict it expects

*simulated*: the same policies in the simulator, with costs measured on one H200 (7B verifier, 1.1B draft), and scaled
from them for a 34B verifier, taken for two of them. NOT a measurement of two GPUs. Apart, every step waits for
`TRANSFER` beside the drafts it lacks. A guess of the token after a draft is right as often as a draft of it, as with
greedy or coupled sampling.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from script import command_line, keep

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.bench.simulated import DRAFT, VERIFIER, pair_costs
from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.observe import StepTiming
from verifypd.control.snapshot import Plan
from verifypd.drafters.remote import RemoteDrafter
from verifypd.simulate.engine import Simulation
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import Acceptance, Arrival, poisson
from verifypd.simulate.world import TrueCosts, gpu_settings

ARMS = ("plain", "fused", "apart", "ahead")
HIDDEN, HEADS, MLP, VOCAB = 512, 8, 1408, 8192
LAYERS, DRAFT_LAYERS = 16, 2
FAINT = 0.06  # what later layers add, relative to the first ones: about seven drafts of ten stand
SHARP = 12.0  # of the head: a token's entropy is about two nats
DRAFTS = 3  # tokens
SIMULATED = (1, 8, 32)  # requests
PAIRS = (f"{DRAFT}:{VERIFIER}", f"{DRAFT}:codellama-34b")
TRANSFER = 0.5e-3  # s that tokens take from one GPU's process to the other's and back: an assumption


# -- measured ----------------------------------------------------------------------------------------------------------


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A verifier, and a draft that is its first layers."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": random(VOCAB, HIDDEN, SHARP / 4),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        name, faint = f"model.layers.{layer}.", 1.0 if layer < DRAFT_LAYERS else FAINT
        weights |= {name + f"self_attn.{part}_proj.weight": random(HIDDEN, HIDDEN) for part in "qkv"}
        weights[name + "self_attn.o_proj.weight"] = random(HIDDEN, HIDDEN, faint)
        weights |= {name + f"mlp.{part}_proj.weight": random(MLP, HIDDEN) for part in ("gate", "up")}
        weights[name + "mlp.down_proj.weight"] = random(HIDDEN, MLP, faint)
        weights |= {name + f"{part}_layernorm.weight": torch.ones(HIDDEN) for part in ("input", "post_attention")}
    found = []
    for which, layers in (("verifier", LAYERS), ("draft", DRAFT_LAYERS)):
        place = folder / which
        place.mkdir()
        kept = {n: w for n, w in weights.items() if ".layers." not in n or int(n.split(".")[2]) < layers}
        save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
            "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
            "intermediate_size": MLP, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 1,
        }  # fmt: skip
        (place / "config.json").write_text(json.dumps(config))
        found.append(place)
    return found[0], found[1]


def start(arm: str, pair: tuple[Path, Path], cores: Sequence[int], requests: int) -> LLM:
    """The engine of an arm: one process over both cores, or one on each."""
    apart = arm in ("apart", "ahead")
    torch.set_num_threads(1 if apart else len(set(cores)))
    os.sched_setaffinity(0, cores)
    llm = LLM(
        str(pair[0]),
        draft=None if arm == "plain" else str(pair[1]),
        arch="plain" if arm == "plain" else "pd",
        placement="decode=process" if apart else "fused",
        controller="fixed",
        measure_costs=False,
        max_draft=DRAFTS,
        dtype="float32",
        device="cpu",
        batch_size=requests,
        kv_memory="300MB",
        max_model_len=512,
    )
    drafter = llm.engine.drafter
    if isinstance(drafter, RemoteDrafter) and drafter.keeper.peer is not None:
        drafter.patient = arm == "apart"
        os.sched_setaffinity(drafter.keeper.peer.process.pid, {cores[1]})
        os.sched_setaffinity(0, {cores[0]})
    return llm


def decode(llm: LLM, requests: int, tokens: int) -> tuple[float, list[float]]:
    """Tokens/s of requests that run together, and every gap between two outputs of one, s."""
    prompts = [[3 + (i * 37 + j * j) % 4000 for j in range(16)] for i in range(requests)]
    params = [SamplingParams(seed=i, temperature=1.0, max_tokens=tokens, ignore_eos=True) for i in range(requests)]
    llm._submit(prompts, params)
    last: dict[int, float] = {}
    gaps: list[float] = []
    begun, before = time.perf_counter(), llm.engine.stats.emitted
    while llm.engine.busy:
        for request in llm.engine.step():
            now = time.perf_counter()
            if request.order in last:
                gaps.append(now - last[request.order])
            last[request.order] = now
    return (llm.engine.stats.emitted - before) / (time.perf_counter() - begun), gaps


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def measured(arms: Sequence[str], counts: Sequence[int], tokens: int, rounds: int) -> dict[str, Any]:
    """Every arm at every number of requests, in turn. Where this process may use one core only, all share it."""
    allowed = os.sched_getaffinity(0)
    cores = (min(allowed), max(allowed))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(Path(folder))
        for _ in range(rounds):
            for count in counts:
                for arm in arms:
                    with start(arm, pair, cores, count) as llm:
                        decode(llm, count, 8)  # warm
                        stats, drafter = llm.engine.stats, llm.engine.drafter
                        drafted, accepted = stats.drafted, stats.accepted
                        speed, gaps = decode(llm, count, tokens)
                        run = {"tokens_per_s": speed, "gap_p95_ms": 1e3 * p95(gaps)}
                        run["acceptance"] = (stats.accepted - accepted) / max(1, stats.drafted - drafted)
                        if isinstance(drafter, RemoteDrafter):
                            run["ahead"] = drafter.ahead / max(1, drafter.proposed)
                            run["late"] = drafter.late
                    found.setdefault((arm, count), []).append(run)
                    print(arm, count, {name: round(value, 3) for name, value in run.items()}, flush=True)
    os.sched_setaffinity(0, allowed)
    return {
        "what": "two processes on two cores, one each; one process has both",
        "cores": cores,
        "pair": {"hidden": HIDDEN, "layers": LAYERS, "draft_layers": DRAFT_LAYERS, "vocab": VOCAB, "weights": "random"},
        "drafts": DRAFTS,
        "tokens": tokens,
        "rounds": rounds,
        "load_average": os.getloadavg(),
        "arms": [
            {
                "arm": arm,
                "requests": count,
                **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
                "rounds": runs,
            }
            for (arm, count), runs in found.items()
        ],
    }


# -- simulated ---------------------------------------------------------------------------------------------------------


class Ahead(Simulation):
    """Two devices and steps that draft, then verify: what was drafted ahead need not be drafted."""

    ahead = True
    _lines: dict[int, int]  # slot -> tokens that its line has now

    def timing(self, plan: Plan) -> StepTiming:
        """The draft loop takes as many steps as the shortest line lacks; then lines grow while the pass runs."""
        lines, found = self.__dict__.setdefault("_lines", {}), super().timing(plan)
        if not plan.draft:
            return found
        drafting = {span.slot: span.drafts for span in plan.draft.spans if span.drafts}
        missing = max([max(0, count - lines.get(slot, 0)) for slot, count in drafting.items()], default=0)
        context = sum(self.running[slot].device_length for slot in drafting)
        loop = self.model.draft_seconds(missing, found.draft_rows, context) if missing else 0.0
        step = self.model.draft_seconds(2, 0, context) - self.model.draft_seconds(1, 0, context)
        grown = min(max(drafting.values(), default=0) + 1, int(found.verify_seconds / step)) if self.ahead else 0
        for slot, count in drafting.items():
            lines[slot], request = 0, self.running[slot]
            at = request.device_length - request.arrival.prompt
            stands = request.arrival.stands[at : at + count + 1]  # the draft, and the guess of the next token
            if all(stands) and len(stands) == count + 1:
                lines[slot] = max(0, grown - 1)
        return replace(found, draft_seconds=loop + TRANSFER)


def simulate(arm: str, pair: str, requests: int, alpha: float, seed: int) -> dict[str, float]:
    """One run of requests that come at once."""
    settings = gpu_settings(batch_size=requests, max_draft=DRAFTS)
    costs = pair_costs(h200().coefficients, pair)
    world, cost = TrueCosts(costs, noise=0.03), CostModel(costs)
    architecture = make_architecture(
        "plain" if arm == "plain" else "pd", make_controller("fixed", 0 if arm == "plain" else DRAFTS), cost
    )
    arrivals: list[Arrival] = poisson(1e9, 4 * requests, Acceptance(alpha), seed=seed)
    kind = Simulation if arm in ("plain", "fused") else Ahead
    run = kind(architecture, arrivals, world, settings, seed=seed)
    if isinstance(run, Ahead):
        run.ahead = arm == "ahead"
    report = run.run()
    gaps = [gap for outcome in report.outcomes for gap in outcome.gaps]
    return {"tokens_per_s": report.throughput, "gap_p95_ms": 1e3 * p95(gaps)}


def simulated(counts: Sequence[int]) -> dict[str, Any]:
    """Every arm, number of requests and acceptance; medians over seeds."""
    seeds = (501, 502, 503)
    arms = []
    for pair, alpha, count, arm in itertools.product(PAIRS, (0.6, 0.8), counts, ARMS):
        runs = [simulate(arm, pair, count, alpha, seed) for seed in seeds]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        arms.append({"pair": pair, "alpha": alpha, "requests": count, "arm": arm, **medians})
        print("simulated", pair, alpha, count, arm, {k: round(v, 2) for k, v in medians.items()}, flush=True)
    return {
        "what": "SIMULATED: two H200s, from costs measured on one; not a measurement of two GPUs",
        "transfer_s": TRANSFER,
        "drafts": DRAFTS,
        "seeds": seeds,
        "costs": asdict(h200().coefficients),
        "arms": arms,
    }


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the parts that are asked for."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("all", "measured", "simulated"), default="all")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=ARMS, help="of those that are measured")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(given)
    result: dict[str, Any] = provenance(args.commit)
    if args.part != "simulated":
        result["measured"] = measured(args.arms, args.requests, args.tokens, args.rounds)
    if args.part != "measured":
        result["simulated"] = simulated(SIMULATED)
    keep(result, args.json)
    return result


if __name__ == "__main__":
    main()
