"""Requests, engines and walks that the tests of the architectures share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verifypd import LLM, SamplingParams
from verifypd.request import Request

ARCHITECTURES = ("baseline", "pd", "pdv", "unified", "table", "auto")
LENGTHS = (1, 3, 8, 17, 33, 40, 12, 26, 5, 21)
TOKENS = 40
LANES: dict[str, dict[str, Any]] = {
    "pdv": {"verify_batch": 2, "verify_wait_ms": 200.0},
    "table": {"verify_batch": 2, "verify_wait_ms": 200.0},
    "baseline": {"workers": 3},
}


def prompts(count: int) -> list[list[int]]:
    """Random ids, the longer ones with a stretch that repeats so that n-grams match."""
    made = []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        ids = [3 + ((i // 2) * 17 + j * j * 7) % 300 for j in range(length)]
        made.append((ids[: length // 2] * 2 + ids)[:length] if length > 8 else ids)
    return made


def parameters(count: int) -> list[SamplingParams]:
    """Greedy and seeded requests in turn: with both, the text is what plain decoding gives."""
    base: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "temperature": 0.7},
        {"temperature": 0.0, "priority": 1},
        {"seed": 2, "top_p": 0.8, "repetition_penalty": 1.2},
    ]
    return [SamplingParams(**base, **kinds[i % len(kinds)]) for i in range(count)]


def make(pair: tuple[Path, Path], arch: str, drafter: str = "model", **settings: Any) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "max_draft": 3, "max_model_len": 128, "kv_memory": "32MB"}
    options |= {"controller": "fixed", "measure_costs": False}
    options |= {"batch_size": 8, "prefill_chunk": 11, "draft_chunk": 13, "block_size": 8, **LANES.get(arch, {})}
    head = str(pair[0].parent / "head")
    named = {"model": str(pair[1]), "head": head, "both": f"{head},ngram"}.get(drafter, drafter)
    return LLM(str(pair[0]), draft=named, arch=arch, **{**options, **settings})


def texts(llm: LLM, count: int) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(count), parameters(count))]


def switch_every(llm: LLM, steps: int) -> None:
    """From now on the architecture changes every `steps` steps, through all of them."""
    engine, original = llm.engine, llm.engine.step
    names = ["pdv", "plain", "pd", "auto", "pdv", "baseline", "unified", "pdv", "table"]

    def step() -> list[Request]:
        if engine.stats.steps % steps == steps - 1:
            engine.switch(names[engine.stats.steps // steps % len(names)])
        return original()

    engine.step = step  # type: ignore[method-assign]


def until(llm: LLM, wanted: Callable[[Request], bool]) -> Request:
    """Submit requests and step until one of them is as wanted."""
    llm._submit(prompts(10), parameters(10))
    for _ in range(200):
        everyone = [*llm.engine.waiting, *llm.engine.running.values()]
        found = next((r for r in everyone if not r.finished and wanted(r)), None)
        if found is not None:
            return found
        llm.engine.step()
    raise AssertionError("no request got there")


def preempt_or_abort(llm: LLM, request: Request, leave: str) -> None:
    """Make a request leave one way or the other; the books must hold at once."""
    if leave == "abort":
        llm.engine.finish(request)
    else:
        llm.engine.residents.preempt(request)
    llm.engine.check()


def finish(llm: LLM) -> None:
    for _ in range(2000):
        if not llm.engine.busy:
            return
        llm.engine.step()
        llm.engine.check()
    raise AssertionError("every request must end")
