"""The draft model in a process of its own: the same texts, whatever becomes of that process."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import finish, make, parameters, prompts, switch_every, texts
from tests.engine.pairs import preempt_every
from verifypd import LLM, SamplingParams
from verifypd.config import EngineConfig
from verifypd.drafters.ahead import LEVEL
from verifypd.drafters.remote import LONGEST_WAIT, RemoteDrafter
from verifypd.engine.build import seen_from_the_verifier
from verifypd.engine.measure import time_points
from verifypd.engine.scratch import Point
from verifypd.errors import ConfigError, ModelError
from verifypd.request import Request

pytestmark = pytest.mark.xdist_group("apart")

START = 60.0  # s that a process may take to come up on a busy machine


def drafter_of(llm: LLM) -> RemoteDrafter:
    assert isinstance(llm.engine.drafter, RemoteDrafter)
    return llm.engine.drafter


@pytest.fixture(scope="module")
def apart(pair: tuple[Path, Path]) -> Iterator[LLM]:
    """An engine whose draft model has a process of its own; its answers are always waited for."""
    with make(pair, "pd", placement="decode=process", max_model_len=256) as llm:
        drafter_of(llm).wait = START
        peer = drafter_of(llm).keeper.peer
        yield llm
    assert peer is not None and peer.process.poll() is not None, "the draft process ends with its engine"


@pytest.fixture
def steps(apart: LLM) -> Iterator[LLM]:
    """The same, whose steps a test may change."""
    yield apart
    apart.engine.__dict__.pop("step", None)
    apart.engine.inflight.delay = 0
    apart.engine.switch("pd")


def slowly(llm: LLM) -> None:
    """From now on steps take their time, and the other process may go ahead."""
    original = llm.engine.step

    def step() -> list[Request]:
        time.sleep(0.02)
        return original()

    llm.engine.step = step  # type: ignore[method-assign]


def test_drafting_ahead_gives_the_texts_of_one_process(steps: LLM, plain: Any) -> None:
    """Greedy and seeded requests, drafted for ahead of the verdict: as plain decoding alone gives them."""
    slowly(steps)
    assert texts(steps, 10) == plain
    stats, drafter = steps.engine.stats, drafter_of(steps)
    assert stats.drafted > stats.accepted > 0, "some drafts stand and some do not"
    assert 0 < drafter.ahead < drafter.proposed, "some were drafted before they were asked for"
    steps.engine.check()


def test_preemption_late_verdicts_and_every_architecture(steps: LLM, plain: Any) -> None:
    steps.engine.inflight.delay = 1
    switch_every(steps, 7)
    preempt_every(steps, 9)
    assert texts(steps, 10) == plain
    assert steps.engine.stats.preemptions and steps.engine.stats.switches


def test_rejection_sampling_draws_the_very_tokens_of_one_process(pair: tuple[Path, Path], steps: LLM) -> None:
    """Noise belongs to positions: with the same drafts and the same q, every verdict is the same."""
    shared: dict[str, Any] = {"acceptance": "rejection", "seed": 5, "max_tokens": 30, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 40, "draft_temperature": 0.7},
        {"logit_bias": {7: 4.0, 9: -3.0}, "presence_penalty": 0.5, "min_tokens": 5, "ignore_eos": False},
        {"allowed_token_ids": [5, 6, 7], "temperature": 1.5},
        {"allowed_token_ids": list(range(3, 40)), "top_p": 0.9, "repetition_penalty": 1.3, "min_p": 0.01},
    ]
    params = [SamplingParams(**{**shared, **kind}) for kind in kinds]

    def drawn(llm: LLM) -> list[list[int]]:
        return [llm.generate([prompts(6)[5]], each)[0].outputs[0].token_ids for each in params]

    before = drafter_of(steps).ahead
    slowly(steps)
    with make(pair, "pd", draft_chunk=1024) as fused:
        assert drawn(steps) == drawn(fused)
    assert drafter_of(steps).ahead > before


def test_a_long_prompt_is_read_before_it_is_drafted_for(apart: LLM) -> None:
    """Until then it is decoded without drafts."""
    drafter = drafter_of(apart)
    assert drafter.keeper.peer is not None
    os.kill(drafter.keeper.peer.process.pid, signal.SIGSTOP)
    long = [3 + (i * i) % 300 for i in range(LEVEL + 50)]
    [job] = apart._submit([long], [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)])
    request = job.texts[0].request
    walk(apart, lambda: request.output_len > 3)
    assert drafter.expected(request) == 0 and not request.metrics.drafted
    os.kill(drafter.keeper.peer.process.pid, signal.SIGCONT)
    walk(apart, lambda: request.metrics.drafted > 0, pause=0.02)
    finish(apart)
    assert request.output_len == 60


def test_times_are_measured_of_whole_drafts(apart: LLM) -> None:
    """However long a text is, and nothing of it is drafted ahead."""
    drafter = drafter_of(apart)
    before = drafter.proposed, drafter.ahead
    [timing] = time_points(apart.engine, [Point(1, 3, LEVEL + 60)], seconds=1.0)
    assert timing is not None and timing.draft_seconds > 0
    assert drafter.proposed >= before[0] + 2 * 3 and drafter.ahead == before[1] and not drafter.patient


# -- what may become of the process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frail(pair: tuple[Path, Path]) -> Iterator[LLM]:
    """The same with look-up beside it, as by default, asked for from the verifier's side. Nobody waits long."""
    with make(pair, "pd", f"{pair[1]},ngram", placement="verify=cpu", max_model_len=256) as llm:
        assert (llm.engine.config.device, llm.engine.config.placement) == ("cpu", "decode=cpu")
        yield llm


@pytest.fixture(scope="module")
def lasting(pair: tuple[Path, Path]) -> list[list[int]]:
    """What plain decoding gives the requests of `Run`."""
    with make(pair, "plain", "none", max_model_len=256) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


PROMPTS = [prompts(10)[i] for i in (2, 3, 4, 7)]
PARAMS = [replace(each, max_tokens=120) for each in parameters(4)]


class Run:
    """Requests that are stepped by hand, and that are being drafted for."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.stats, self.drafter = llm, llm.engine.stats, drafter_of(llm)
        self.jobs = llm._submit(PROMPTS, PARAMS)
        walk(llm, self.drafted_by_model())

    def signal(self, number: int) -> None:
        assert self.drafter.keeper.peer is not None
        os.kill(self.drafter.keeper.peer.process.pid, number)

    def drafted_by_model(self, count: int = 5) -> Callable[[], bool]:
        """Whether that many tokens more came from the process."""
        goal = self.drafter.proposed + count
        return lambda: self.drafter.proposed >= goal

    def texts(self) -> list[list[int]]:
        finish(self.llm)
        return [job.texts[0].request.output_ids for job in self.jobs]


def walk(llm: LLM, until: Callable[[], bool], pause: float = 0.0) -> float:
    """Step until it is so; the longest step, s."""
    longest, deadline = 0.0, time.monotonic() + START
    while not until():
        assert time.monotonic() < deadline and llm.engine.busy
        begun = time.monotonic()
        llm.engine.step()
        longest = max(longest, time.monotonic() - begun)
        time.sleep(pause)
    return longest


def test_a_pause_of_two_seconds_is_a_time_of_plain_decoding(frail: LLM, lasting: Any) -> None:
    run = Run(frail)
    run.signal(signal.SIGSTOP)
    try:
        began, before, late = time.monotonic(), run.stats.emitted, run.drafter.late
        longest = walk(frail, lambda: time.monotonic() > began + 2.0, pause=0.1)
        emitted, proposed = run.stats.emitted - before, run.drafter.proposed
    finally:
        run.signal(signal.SIGCONT)
    assert emitted >= 10 and longest < LONGEST_WAIT + 1.5, "decoding went on"
    assert run.drafter.late <= late + 1, "it was waited for once"
    walk(frail, run.drafted_by_model())
    assert run.texts() == lasting and run.drafter.keeper.restarts == 0 and run.drafter.proposed > proposed


def test_a_killed_process_is_started_again_and_catches_up(frail: LLM, lasting: Any) -> None:
    """The requests that run meanwhile go on without drafts, and with them afterwards."""
    run = Run(frail)
    restarts, before = run.drafter.keeper.restarts, run.stats.emitted
    run.signal(signal.SIGKILL)
    walk(frail, lambda: run.drafter.keeper.restarts > restarts and run.stats.emitted >= before + 20)
    assert not run.drafter.listening
    deadline = time.monotonic() + START
    request = next(iter(frail.engine.running.values()))
    while not run.drafter.expected(request):
        run.drafter.observe([request])
        assert time.monotonic() < deadline
        time.sleep(0.02)
    walk(frail, run.drafted_by_model())
    assert run.texts() == lasting and run.drafter.keeper.restarts == restarts + 1
    frail.engine.check()


def test_a_silent_process_is_replaced(frail: LLM, lasting: Any) -> None:
    run = Run(frail)
    restarts, run.drafter.silent = run.drafter.keeper.restarts, 0.7
    run.signal(signal.SIGSTOP)
    walk(frail, lambda: run.drafter.keeper.restarts > restarts, pause=0.02)
    assert run.texts() == lasting


def test_a_verifier_apart_is_a_draft_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes with its verifier; the draft is where the engine would have been."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def seen(placement: str, device: str = "cuda:0") -> tuple[str, str]:
        made = seen_from_the_verifier(EngineConfig(device=device, placement=placement, arch="pd"))
        assert made.verify_apart is None and made.draft_apart
        return made.device, made.placement

    assert seen("verify=cuda:1") == ("cuda:1", "decode=cuda:0")
    assert seen("prefill=cpu, verify=cuda", "cpu") == ("cuda", "prefill=cpu, decode=cpu")
    assert seen("verify=process", "auto") == ("auto", "decode=process")
    assert seen("decode=cuda:1") == ("cuda:0", "decode=cuda:1")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "placement", "words"),
    [
        ("head", "decode=process", "reads the verifier's states"),
        ("ngram", "decode=process", "looks text up"),
        ("model", "decode=cuda:7", "CUDA devices"),
        ("model", "verify=cuda:7", "--placement verify=cuda:7: PyTorch sees"),
        ("model", "cpu", "use decode=cpu"),
        ("none", "decode=cpu", "nothing is drafted"),
    ],
)
def test_placements_that_cannot_be_are_refused_at_once(
    pair: tuple[Path, Path], drafter: str, placement: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(pair, "pd", drafter, placement=placement)


def test_what_the_process_cannot_load_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = shutil.copytree(pair[1], tmp_path / "broken")
    for path in broken.glob("*.safetensors"):
        path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"the draft process did not start: .*safetensors"):
        make(pair, "pd", str(broken), placement="decode=process")
