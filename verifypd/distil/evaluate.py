"""How good a draft is for its verifier: acceptance, cost, calibration, and what they come to. Knows the engine from
outside; any drafter it runs can be evaluated.

Acceptance is counted on real verdicts at a fixed draft length. The overlap Σ min(p, q) of the first draft position is
computed besides, for drafters that draw: it is the exact chance to stand, and tells at which temperature to draw.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verifypd.batch import VerifySpan
from verifypd.control.observe import Observation, StepTiming
from verifypd.distil.measure import Acceptance
from verifypd.distil.prompts import Prompt
from verifypd.engine.llm import LLM
from verifypd.errors import ConfigError
from verifypd.lanes.verify import VerifyLane
from verifypd.models.hub import resolve
from verifypd.progress import Bar, bar
from verifypd.request import SamplingParams
from verifypd.sampling.case import Verdicts

LONGEST = 1024  # tokens of a prompt and its answer at most
TAUS = tuple(round(0.6 + 0.1 * i, 1) for i in range(11))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to evaluate."""

    model: str
    draft: str
    prompts: tuple[Prompt, ...]
    temperatures: tuple[float, ...] = (0.0, 0.8)
    tau_temperatures: tuple[float, ...] = (0.3, 0.7, 1.0)
    tokens: int = 96  # of an answer at most
    length: int = 4  # of a draft
    timed: int = 6  # prompts that are timed, one at a time
    batch: int = 8
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, for every run


class WatchedLane(VerifyLane):
    """A verify lane that adds up the overlap of p and q at the first draft position, for q drawn at other heats."""

    def __init__(self, lane: VerifyLane) -> None:
        super().__init__(lane.runner, lane.slots, lane.sampling, lane.drafters, lane.wait)
        self.overlap = torch.zeros(len(TAUS), dtype=torch.float64, device=lane.slots.device)
        self.rows = 0

    def verdict(self, spans: Sequence[VerifySpan], logits: Tensor, mask: Tensor | None = None) -> Verdicts:
        """As the lane does, after a look at both distributions."""
        first = 0
        for span in spans:
            drawn = span.drafter is not None and not self.drafters[span.drafter].point_mass
            if span.drafts and drawn and self.slots.draft_q is not None:
                vocab = self.sampling.vocab
                p = (logits[first, :vocab] / self.sampling.temperature[span.slot]).softmax(-1)
                q = self.slots.draft_q[span.slot, 0, :vocab].log()
                heated = (q[None] / torch.tensor(TAUS, device=q.device)[:, None]).softmax(-1)
                self.overlap += torch.minimum(p[None], heated).sum(-1).double()
                self.rows += 1
            first += span.drafts + 1
        return super().verdict(spans, logits, mask)


class Listener:
    """Between the engine and its policy: keeps what the policy is told."""

    def __init__(self, llm: LLM) -> None:
        self.seen: list[Observation] = []
        self.steps: list[StepTiming] = []
        policy: Any = llm.engine.architecture
        observe, observe_step = policy.observe, policy.observe_step

        def note(seen: Observation) -> None:
            self.seen.append(seen)
            observe(seen)

        def note_step(timing: StepTiming) -> None:
            self.steps.append(timing)
            observe_step(timing)

        policy.observe, policy.observe_step = note, note_step


def evaluate(trial: Trial, progress: bool = True) -> dict[str, Any]:
    """Everything that is said about a pair, for JSON."""
    sweeps = len({*trial.temperatures, *trial.tau_temperatures}) + 1  # the last one for the calibration
    timed = 2 * (len(_timed(trial)) + 1)  # with and without drafts, and one that warms up
    total = sweeps * len(trial.prompts) + timed
    with bar(total=total, desc="evaluating", unit="prompts", shown=progress) as shown:
        shown.set_postfix_str("acceptance")
        found, taus, dtype = _acceptance(trial, shown)
        shown.set_postfix_str("speed")
        speed = _speed(trial, shown)
        shown.set_postfix_str("calibration")
        calibration = _calibration(trial, shown)
    return {
        "verifier": trial.model,
        "draft": trial.draft,
        "settings": trial.settings,
        "dtype": dtype,
        "draft_length": trial.length,
        "prompts": len(trial.prompts),
        "tokens": trial.tokens,
        "acceptance": {
            f"{temperature:g}": {kind: each.report() for kind, each in sorted(kinds.items())}
            for temperature, kinds in found.items()
        },
        "overlap_by_tau": taus,
        "speed": speed,
        "calibration": calibration,
    }


def _open(trial: Trial, **settings: Any) -> LLM:
    length = min(LONGEST, resolve(trial.model).config.max_position)
    options = {"max_model_len": length, "batch_size": trial.batch, "seed": 0, **trial.settings, **settings}
    return LLM(trial.model, **options)


def _render(llm: LLM, prompt: Prompt) -> list[int]:
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.chat_template.available
    ids = llm.render([{"role": "user", "content": prompt.text}]) if chat else tokenizer.encode(prompt.text)
    longest = llm.config.max_model_len or LONGEST
    if len(ids) >= longest:
        raise ConfigError(
            f"the prompt {prompt.text[:30]!r}… has {len(ids)} tokens, and {longest} with its answer are what is"
            " evaluated: give --prompts without it"
        )
    return ids


def _timed(trial: Trial) -> Sequence[Prompt]:
    """The prompts that are timed, spread over all."""
    return trial.prompts[:: max(1, len(trial.prompts) // trial.timed)][: trial.timed]


def _acceptance(trial: Trial, shown: Bar) -> tuple[dict[float, dict[str, Acceptance]], dict[str, Any], str]:
    """Counts by temperature and kind, the overlap by drafter temperature, and the dtype that `auto` chose."""
    found: dict[float, dict[str, Acceptance]] = {}
    taus: dict[str, Any] = {}
    with _open(trial, draft=trial.draft, arch="unified", controller="fixed", max_draft=trial.length) as llm:
        prompts = [_render(llm, prompt) for prompt in trial.prompts]
        dtype = str(llm.engine.verify.runner.model.dtype).removeprefix("torch.")
        listener = Listener(llm)
        for temperature in (*trial.temperatures, *(t for t in trial.tau_temperatures if t not in trial.temperatures)):
            lane = llm.engine.verify
            watched = WatchedLane(lane) if temperature in trial.tau_temperatures else None
            if watched is not None:
                llm.engine.verify = watched
            listener.seen.clear()
            params = SamplingParams(temperature=temperature, max_tokens=trial.tokens, acceptance="rejection")
            outputs = llm.generate(prompts, params, tick=shown.update)
            llm.engine.verify = lane
            of = {int(out.request_id): prompt.kind for out, prompt in zip(outputs, trial.prompts, strict=True)}
            kinds: dict[str, Acceptance] = defaultdict(lambda: Acceptance(trial.length))
            for seen in listener.seen:
                for kind in {"all", of[seen.request_id]}:
                    _count(kinds[kind], seen)
            found[temperature] = dict(kinds)
            if watched is not None and watched.rows:
                mean = (watched.overlap / watched.rows).numpy(force=True)
                taus[f"{temperature:g}"] = {f"{tau:g}": round(float(x), 4) for tau, x in zip(TAUS, mean, strict=True)}
    return found, taus, dtype


def _count(acceptance: Acceptance, seen: Observation) -> None:
    for position in range(min(seen.drafted, seen.accepted + 1, acceptance.depth)):
        acceptance.drafted[position] += 1
        acceptance.accepted[position] += position < seen.accepted


def _speed(trial: Trial, shown: Bar) -> dict[str, Any]:
    """One greedy request at a time, with and without drafts in turn; what was measured, and what costs and acceptance
    of the same requests predict."""
    params = SamplingParams(temperature=0.0, max_tokens=trial.tokens)
    seconds: dict[str, list[float]] = {"plain": [], "draft": []}
    same = 0
    with (
        _open(trial, draft=None, arch="plain") as plain,
        _open(trial, draft=trial.draft, arch="unified", controller="fixed", max_draft=trial.length) as draft,
    ):
        arms = {"plain": (plain, Listener(plain)), "draft": (draft, Listener(draft))}
        chosen = [_render(plain, prompt) for prompt in _timed(trial)]
        for llm, listener in arms.values():
            llm.generate([chosen[0]], params, tick=shown.update)  # warm
            listener.steps.clear()
            listener.seen.clear()
        for prompt in chosen:
            texts = []
            for name, (llm, _) in arms.items():
                begun = time.perf_counter()
                [output] = llm.generate([prompt], params, tick=shown.update)
                seconds[name].append((time.perf_counter() - begun) / len(output.outputs[0].token_ids))
                texts.append(output.outputs[0].token_ids)
            same += texts[0] == texts[1]
        one = _median(t.verify_seconds for t in arms["plain"][1].steps if t.verify_rows == 1)
        whole = [
            t for t in arms["draft"][1].steps if t.draft_steps == trial.length and t.draft_rows <= trial.length + 1
        ]
        several = _median(t.verify_seconds for t in whole)
        step = _median(t.draft_seconds / t.draft_steps for t in whole)
        greedy = Acceptance(trial.length)
        for seen in arms["draft"][1].seen:
            _count(greedy, seen)
    length = greedy.mean_accepted_length
    spent = several + trial.length * step
    return {
        "verifier_step_ms": round(1e3 * one, 3),
        "verify_span_ms": round(1e3 * several, 3),
        "draft_step_ms": round(1e3 * step, 3),
        "cost_ratio": round(step / one, 4) if one else None,
        "mean_accepted_length": round(length, 4),
        "predicted_speedup": round(length * one / spent, 3) if spent else None,
        "measured_speedup": round(sum(seconds["plain"]) / sum(seconds["draft"]), 3),
        "prompts": len(seconds["plain"]),
        "same_text": same,
    }


def _median(values: Any) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else 0.0


def _calibration(trial: Trial, shown: Bar) -> dict[str, Any]:
    """Predicted against observed chances of the `throughput` controller, over all prompts, greedy."""
    settings = {"arch": "auto", "controller": "throughput", "max_draft": 2 * trial.length}
    with _open(trial, draft=trial.draft, **settings) as llm:
        prompts = [_render(llm, prompt) for prompt in trial.prompts]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=trial.tokens), tick=shown.update)
        reliability = llm.engine.architecture.controller.acceptance.reliability  # type: ignore[attr-defined]
    rows = [[round(f, 3), round(c, 3), round(n, 1)] for f, c, n in reliability.rows()]
    return {"error": round(reliability.error, 4), "predicted_came_trials": rows}


def draw(report: dict[str, Any], path: Any) -> None:
    """Acceptance by position, overlap by drafter temperature, and calibration, as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for temperature, kinds in report["acceptance"].items():
        alpha = kinds["all"]["alpha"]
        left.plot(range(1, len(alpha) + 1), alpha, "o-", label=f"T = {temperature}")
    positions = range(1, report["draft_length"] + 1)
    left.set(xlabel="draft position", ylabel="α", title="acceptance", ylim=(0, 1), xticks=positions)
    for temperature, taus in report["overlap_by_tau"].items():
        middle.plot([float(tau) for tau in taus], list(taus.values()), "o-", label=f"T = {temperature}")
    middle.set(xlabel="drafter temperature τ", ylabel="Σ min(p, q)", title="first position")
    rows = report["calibration"]["predicted_came_trials"]
    right.plot([0, 1], [0, 1], color="0.7")
    right.scatter([r[0] for r in rows], [r[1] for r in rows], s=[min(400.0, r[2]) for r in rows], alpha=0.6)
    right.set(xlabel="predicted", ylabel="came", title=f"calibration, error {report['calibration']['error']:.3f}")
    for axes in (left, middle):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
