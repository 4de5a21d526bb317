"""Engines and an ingress of one cluster in this process, without Ray: calls, cancelling, a lost engine, its load."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.server.serving import TINY
from verifypd.cluster.bridge import ClusterBridge, counts, merged
from verifypd.cluster.host import EngineHost
from verifypd.cluster.lines import connect, listen
from verifypd.config import EngineConfig
from verifypd.errors import EngineError
from verifypd.request import SamplingParams
from verifypd.server.calls import Ask, Call, CallError
from verifypd.server.config import ServerConfig
from verifypd.server.mailbox import Mailbox
from verifypd.server.messages import Abort, GrammarSpec, Outputs, Stats, Submit, Up, encode
from verifypd.tokenizer import Tokenizer

HERE = "127.0.0.1"
PROMPT = [26, 9, 193, 31, 7, 9, 193, 31]


def host(folders: tuple[Path, Path], on_failure: Callable[[], None] = lambda: None, **server: Any) -> EngineHost:
    names = ("arch", "controller", "dtype", "kv-memory", "batch-size", "max-draft", "max-model-len", "block-size")
    settings = {name.replace("-", "_"): TINY[name] for name in names}
    config = EngineConfig(model=str(folders[0]), draft=str(folders[1]), **settings)
    return EngineHost(config, ServerConfig(metrics_interval=0.02, **server), str(folders[0]), HERE, on_failure)


@asynccontextmanager
async def ingress(tokenizer: Tokenizer, hosts: list[EngineHost], retries: int = 2) -> AsyncIterator[ClusterBridge]:
    """A bridge to these hosts; the first gets every call, whatever state it is in."""
    context = zmq.Context()
    inbox, address = listen(context, HERE)

    async def run(message: Submit) -> None:
        sent = encode(msgspec.structs.replace(message, arrival=time.monotonic() - message.arrival))
        await hosts[0].run(address, sent)

    def line(place: str) -> Callable[[Any], None]:
        socket = connect(context, place)
        return lambda message: socket.send(encode(message))

    bridge = ClusterBridge(secrets.randbits(48), tokenizer, retries, run, line, hosts[0]._loop.model)
    mailbox = Mailbox(bridge)
    mailbox.open(inbox)
    bridge.begin(hosts[0].info)
    try:
        yield bridge
    finally:
        mailbox.shut()
        context.destroy(linger=0)


async def finished(bridge: ClusterBridge, call: Call) -> Call:
    while not call.done:
        await call.news()
    bridge.close(call)
    return call


def ask(grammar: GrammarSpec | None = None, **params: Any) -> Ask:
    fields = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **params}
    return Ask([PROMPT], SamplingParams(**fields), [11], grammar=grammar, fields=fields)


def play(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))  # type: ignore[arg-type]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_call_goes_on_in_another_engine_to_the_same_text(
    folders: tuple[Path, Path], tokenizer: Tokenizer, hangs: bool
) -> None:
    """The engine fails or hangs in mid-call, and its process ends, or it would be sent the calls again.

    Penalties, a seed, a format and two choices go on elsewhere as if nothing was.
    """
    hosts: list[EngineHost] = []
    over = threading.Event()

    def end_process() -> None:
        hosts[:] = [second]

    first, second = host(folders, end_process, step_timeout=2.0 if hangs else 60), host(folders)
    sampled = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.8, "n": 2}
    asked = [
        ask(),
        ask(**sampled),
        ask(GrammarSpec("regex", "[a-z ]{80,120}"), ignore_eos=False, max_tokens=150),
        ask(logprobs=2),
    ]

    async def texts(bridge: ClusterBridge, break_at: int | None) -> list[list[str]]:
        calls = [await bridge.open("r", each, time.monotonic()) for each in asked]
        if break_at is not None:
            while min(choice.tokens for call in calls for choice in call.choices) < break_at:
                await asyncio.sleep(0)

            def fail() -> None:
                over.wait(30 if hangs else 0)
                raise ZeroDivisionError("injected")

            first._loop.engine.step = fail  # type: ignore[method-assign]
        done = [await finished(bridge, call) for call in calls]
        assert all(len(c.request.logprobs or ()) == c.tokens for c in done[3].choices)
        return [[choice.text.text for choice in call.choices] for call in done]

    async def run() -> None:
        async with ingress(tokenizer, [second]) as bridge:
            expected = await texts(bridge, None)
        hosts.extend([first, second])
        async with ingress(tokenizer, hosts) as bridge:
            assert await texts(bridge, 4) == expected
            assert bridge.restarts == 1 and hosts == [second]
        with pytest.raises(EngineError, match="longer than 2 s" if hangs else "injected"):
            first.check()

    try:
        play(run())
    finally:
        over.set()
        first.close()
        second.close()


def test_tokens_that_a_line_loses_are_asked_for_again(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """One message of a step does not arrive; no token of it is missing in the end, and nothing runs on unheard."""
    engine = host(folders)
    asked = ask(temperature=1.0, seed=5, n=2)

    async def texts(bridge: ClusterBridge) -> list[str]:
        call = await finished(bridge, await bridge.open("r", asked, time.monotonic()))
        assert [choice.tokens for choice in call.choices] == [60, 60]
        return [choice.text.text for choice in call.choices]

    def lossy(take: Callable[[Any], None], lost: int) -> Callable[[Any], None]:
        turns = itertools.count(1)
        return lambda message: None if isinstance(message, Outputs) and next(turns) == lost else take(message)

    async def run() -> None:
        async with ingress(tokenizer, [engine]) as bridge:
            expected = await texts(bridge)
            take = bridge.take
            for lost in (1, 3):
                bridge.take = lossy(take, lost)  # type: ignore[method-assign]
                assert await texts(bridge) == expected
            while engine._open or engine._loop.calls:
                await asyncio.sleep(0.01)
            assert bridge.restarts == 0, "no replica was lost"

    try:
        play(run())
    finally:
        engine.close()


def test_a_call_that_is_cancelled_in_its_replica_goes_on(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """Ray ends what waits for it as if it were cancelled here: another replica is to take it up."""
    engine = host(folders)
    kept = engine.run
    waits: list[asyncio.Future[None]] = []

    async def cancelled_once(address: str, data: bytes) -> None:
        waits.append(asyncio.ensure_future(kept(address, data)))
        await waits[-1]

    engine.run = cancelled_once  # type: ignore[method-assign]

    async def run() -> None:
        async with ingress(tokenizer, [engine]) as bridge:
            call = await bridge.open("r", ask(), time.monotonic())
            waits[0].cancel()
            assert (await finished(bridge, call)).choices[0].tokens == 60 and len(waits) == 2

            call = await bridge.open("r", ask(max_tokens=380), time.monotonic())
            task = bridge._tasks[call.number]
            bridge.close(call)
            await asyncio.wait([task])
            assert task.cancelled() and len(waits) == 3, "who leaves is not taken up"

    try:
        play(run())
    finally:
        engine.close()


def test_no_call_goes_on_in_another_model(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """A rolling update replaces the model: what was begun and what comes from the old ingress ends with an error."""
    hosts: list[EngineHost] = []

    def end_process() -> None:
        hosts[:] = [other]

    engine, other = host(folders, end_process), host(folders[::-1])
    hosts.append(engine)

    def fail() -> None:
        raise ZeroDivisionError("injected")

    async def run() -> None:
        async with ingress(tokenizer, hosts) as bridge:
            call = await bridge.open("r", ask(max_tokens=380), time.monotonic())
            while call.choices[0].tokens < 4:
                await asyncio.sleep(0)
            engine._loop.engine.step = fail  # type: ignore[method-assign]
            with pytest.raises(CallError, match="the model was replaced") as ended:
                await finished(bridge, call)
            assert (ended.value.status, ended.value.code) == (503, "model_replaced")
            with pytest.raises(CallError, match="the model was replaced"):
                await bridge.open("r", ask(), time.monotonic())
            assert not other._open and not other._loop.calls

    try:
        play(run())
    finally:
        engine.close()
        other.close()


def test_calls_end_everywhere(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """A call that is closed is aborted in its engine, a refusal is told, and figures and load follow."""
    engine = host(folders, max_queue=0)

    async def idle() -> None:
        while engine._loop.calls or engine._open or engine.load().running:
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with ingress(tokenizer, [engine]) as bridge:
            slots = engine.info["slots"]
            calls = [await bridge.open("r", ask(max_tokens=380), time.monotonic()) for _ in range(slots)]
            while engine.load().running < slots:
                await asyncio.sleep(0.01)
            with pytest.raises(CallError) as refused:
                await bridge.open("r", ask(), time.monotonic())
            assert refused.value.status == 429 and refused.value.code == "queue_full"
            for call in calls:
                bridge.close(call)
            await idle()
            assert engine.load().good == 1.0, "who left met no target and missed none"
            slow = ask(slo_ttft=1e-3)
            for each in (slow, ask(slo_ttft=1e6, slo_tpot=1e6)):
                await finished(bridge, await bridge.open("r", each, time.monotonic()))
            await idle()
            assert engine.load().good == 0.5
            stopped = ask(n=2, stop=["\n"], max_tokens=300, temperature=1.0)
            call = await finished(bridge, await bridge.open("r", stopped, time.monotonic()))
            assert {choice.finish for choice in call.choices} <= {"stop", "length"}
            await idle()
            while bridge.figures.get("finished", {}).get("length") is None:
                await asyncio.sleep(0.01)

    try:
        play(run())
    finally:
        engine.close()


def test_an_ingress_that_takes_nothing_is_given_up(
    folders: tuple[Path, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifypd.cluster.lines.MOST_QUEUED", 20)
    engine = host(folders)
    message = Submit(
        3, 1, "r", [PROMPT], 1, {"max_tokens": 380, "ignore_eos": True}, [0], 0.0, 0, [], model=engine._loop.model
    )
    nobody = f"{HERE}:9#{zmq.curve_keypair()[0].decode()}"

    async def run() -> None:
        await engine.run(nobody, encode(message))
        assert not engine._lines and not engine._addresses and not engine._loop.workers
        engine.check()

    try:
        play(run())
    finally:
        engine.close()


def test_calls_of_an_ingress_that_is_gone_end(
    folders: tuple[Path, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line breaks in mid-call: after a while the engine drops the call, and that of another ingress goes on."""
    engine = host(folders)
    step = engine._loop.engine.step

    def slow() -> Any:
        time.sleep(0.01)
        return step()

    engine._loop.engine.step = slow  # type: ignore[method-assign]
    context = zmq.Context()
    inbox, address = listen(context, HERE)
    fields = {"max_tokens": 380, "ignore_eos": True, "temperature": 0.0}
    message = Submit(3, 1, "r", [PROMPT], 1, fields, [0], 0.0, 0, [], model=engine._loop.model)

    async def run() -> None:
        async with ingress(tokenizer, [engine]) as bridge:
            other = await bridge.open("other", ask(max_tokens=380), time.monotonic())
            call = asyncio.ensure_future(engine.run(address, encode(message)))
            while not inbox.poll(0) or not other.choices[0].tokens:  # until both lines are up
                await asyncio.sleep(0.01)
            monkeypatch.setattr("verifypd.cluster.host.GONE", 0.2)
            context.destroy(linger=0)
            before = other.choices[0].tokens
            await call
            assert 0 < other.choices[0].tokens - before < 300, "not when the call had run to its end"
            assert set(engine._lines) == {bridge.worker} and list(engine._presence) == [bridge.worker]
            before = other.choices[0].tokens
            while other.choices[0].tokens < before + 5:
                await asyncio.sleep(0.01)
            bridge.close(other)

    try:
        play(run())
    finally:
        context.destroy(linger=0)
        engine.close()


@pytest.mark.parametrize(("interval", "silent"), [(0.5, 10.0), (20.0, 60.0)])
def test_a_replica_that_was_silent_counts_once_and_is_heard(
    monkeypatch: pytest.MonkeyPatch, interval: float, silent: float
) -> None:
    told: list[Any] = []

    async def run() -> None:
        now = [0.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        bridge = ClusterBridge(1, None, 2, run=lambda message: asyncio.sleep(60), line=lambda address: told.append)
        bridge.begin({})
        for name in (7, 8):
            bridge.take(Up(name, "there", {"metrics_interval": interval}))
            bridge.take(Stats(name, {"running": 1, "passes": 10}))
        assert bridge.figures == {"running": 2, "passes": 20}
        now[0] = silent - 1
        bridge.take(Stats(8, {"running": 1, "passes": 11}))
        assert bridge.figures == {"running": 2, "passes": 21}, "it has time yet"
        now[0] = silent + 1
        bridge.take(Stats(8, {"running": 1, "passes": 12}))
        assert bridge.figures == {"running": 1, "passes": 22}
        bridge.take(Stats(7, {"running": 3, "passes": 15}))
        assert bridge.figures == {"running": 4, "passes": 27}
        bridge._homes[5] = 7
        bridge._pass_on(Abort(1, 5, -1))
        assert told == [Abort(1, 5, -1)]

    asyncio.run(run())


def test_figures_of_replicas_are_added() -> None:
    one = {"running": 2, "lanes": {"prefill": {"depth": 1, "wait_p95_ms": 3.0}}, "policy": "auto", "live": {"a": 1}}
    other = {"running": 1, "lanes": {"prefill": {"depth": 2, "wait_p95_ms": 9.0}}, "policy": "auto", "live": {"a": 5}}
    assert merged([one, other]) == {
        "running": 3,
        "lanes": {"prefill": {"depth": 3, "wait_p95_ms": 9.0}},
        "policy": "auto",
        "live": {"a": 1},
    }
    assert merged([one]) == merged([one, {}]) == one
    assert counts(one) == {"lanes": {"prefill": {}}, "policy": "auto"}
    assert counts({"steps": {"0.1": 4}, "pools": {"verifier": {"used": 3}}, "passes": 9}) == {
        "steps": {"0.1": 4},
        "passes": 9,
    }
