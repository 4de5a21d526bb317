"""One arm in a process of its own: starts an engine, then runs what it is told and answers with the times of requests.

It reads and writes JSON lines on what were its standard input and output when it began; whatever else is printed, also
by processes that it starts, goes to standard error. Messages in: {"kind": "start", "engine", "settings"}, then tasks:

    {"kind": "closed", "concurrency", "requests", "prompt", "output", "seed", "vocab", "cap"}
    {"kind": "open", "workload": [[at, prompt, output], …], "seed", "vocab", "cap"}

Messages out: "ready", and for each task "done" with an `Outcome`, or "error". It ends when its input does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any, Protocol

from verifypd.bench.figures import Outcome, Record
from verifypd.bench.workload import Arrival, prompts
from verifypd.metrics.pauses import freeze_heap

Task = dict[str, Any]


class Served(Protocol):
    """An engine that is up."""

    async def run(self, task: Task) -> Outcome:
        """Do what a task says."""
        ...

    def about(self) -> dict[str, Any]:
        """Versions, and what may matter to a reader of its figures."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


class Ours:
    """This project's engine, stepped by this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from verifypd import LLM

        self.llm = LLM(**settings)
        freeze_heap()

    async def run(self, task: Task) -> Outcome:
        """In the loop of `Drive`: a request is sent between two steps, and its outputs are seen when a step ends."""
        from verifypd.bench.drive import Drive

        engine = self.llm.engine
        if engine.sampling.vocab != task["vocab"]:
            raise ValueError(f"the engine has {engine.sampling.vocab} token ids, the task {task['vocab']}")
        drive = Drive(engine, task["seed"])
        if task["kind"] == "closed":
            wanted = task["requests"]
            drive.closed(task["concurrency"], wanted, task["prompt"], task["output"], task["cap"])
        else:
            arrivals = [Arrival(*each) for each in task["workload"]]
            wanted = len(arrivals)
            drive.arriving(arrivals, cap=task["cap"])
        assert drive.last is not None
        return drive.last.outcome(wanted)

    def about(self) -> dict[str, Any]:
        """Versions and memory."""
        return {
            "versions": installed("verifypd", "torch", "triton"),
            "memory": str(self.llm.budget),
            "kv_tokens": self.llm.budget.tokens,
        }

    def close(self) -> None:
        """End the engine."""
        self.llm.shutdown()


class Vllm:
    """vLLM's asynchronous engine: its own process computes, this one sends and receives."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self.names = itertools.count()

    async def run(self, task: Task) -> Outcome:
        """A closed loop of clients, or one client a request, which sleeps until it is due."""
        closed = task["kind"] == "closed"
        work = [[0.0, task["prompt"], task["output"]]] * task["requests"] if closed else task["workload"]
        ids = prompts([each[1] for each in work], task["vocab"], task["seed"])
        calls = [Call(tokens, output, at) for tokens, (at, _, output) in zip(ids, work, strict=True)]
        began = time.perf_counter()
        if closed:
            queue = iter(calls)
            clients = [self._client(queue, began) for _ in range(task["concurrency"])]
        else:
            clients = [self._due(call, began) for call in calls]
        tasks = [asyncio.ensure_future(client) for client in clients]
        _, late = await asyncio.wait(tasks, timeout=task["cap"])
        over = time.perf_counter() - began
        for each in late:
            each.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found
        records = tuple(call.record() for call in calls if call.begun)
        if not late:
            over = max(record.outputs[-1] for record in records)
        return Outcome(records, len(calls), over)

    async def _client(self, queue: Iterator[Call], began: float) -> None:
        for call in queue:
            call.due = time.perf_counter() - began
            await self._serve(call, began)

    async def _due(self, call: Call, began: float) -> None:
        await asyncio.sleep(max(0.0, began + call.due - time.perf_counter()))
        await self._serve(call, began)

    async def _serve(self, call: Call, began: float) -> None:
        """Send a request and note when its outputs come."""
        call.begun, call.sent = True, time.perf_counter() - began
        async for output in self._outputs(call):
            got = len(output.outputs[0].token_ids)
            if got:
                call.take(got, time.perf_counter() - began)

    def _outputs(self, call: Call) -> AsyncIterator[Any]:
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        params = SamplingParams(
            temperature=0.0, max_tokens=call.output, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = {"prompt_token_ids": call.prompt}
        outputs: AsyncIterator[Any] = self.engine.generate(prompt, params, f"request-{next(self.names)}")
        return outputs

    def about(self) -> dict[str, Any]:
        """Versions, and which of its ways of running it chose."""
        config = self.engine.vllm_config
        return {
            "versions": installed("vllm", "torch", "triton", "transformers"),
            "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
            "asynchronous_scheduling": bool(config.scheduler_config.async_scheduling),
            "kv_tokens": getattr(config.cache_config, "kv_cache_size_tokens", None),
        }

    def close(self) -> None:
        """End its process."""
        self.engine.shutdown()


class Call:
    """A request on its way, s from the start of the run."""

    def __init__(self, prompt: list[int], output: int, due: float) -> None:
        self.prompt = prompt
        self.output = output
        self.due = due
        self.sent = due
        self.begun = False
        self.outputs: list[float] = []
        self.tokens = self.first = 0

    def take(self, tokens: int, at: float) -> None:
        """Some tokens came."""
        self.first = self.first or tokens
        self.tokens += tokens
        self.outputs.append(at)

    def record(self) -> Record:
        """What became of it."""
        done = self.tokens == self.output
        return Record(self.due, self.sent, tuple(self.outputs), self.tokens, self.first, done)


def installed(*names: str) -> dict[str, str]:
    """Versions of packages, as far as they say."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = getattr(sys.modules.get(name), "__version__", "unknown")
    return found


ENGINES: dict[str, type[Ours] | type[Vllm]] = {"ours": Ours, "vllm": Vllm}


async def serve(lines: IO[str], channel: IO[str]) -> None:
    """Start the engine that the first line asks for, then do the tasks of the others."""

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    try:
        first = json.loads(await loop.run_in_executor(None, lines.readline))
        engine: Served = ENGINES[first["engine"]](first["settings"])
    except Exception as error:  # noqa: BLE001  # whatever it is, the other side is told
        traceback.print_exc()
        say(kind="error", message=f"{type(error).__name__}: {error}")
        return
    try:
        say(kind="ready", start_seconds=time.perf_counter() - begun, **engine.about())
        while line := await loop.run_in_executor(None, lines.readline):
            try:
                say(kind="done", outcome=(await engine.run(json.loads(line))).packed())
            except Exception as error:  # noqa: BLE001  # the same
                traceback.print_exc()
                say(kind="error", message=f"{type(error).__name__}: {error}")
    finally:
        engine.close()


def main() -> None:
    """Keep the two channels for messages; everybody else prints to standard error."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.close(silence)
    os.dup2(2, 1)
    asyncio.run(serve(lines, channel))


if __name__ == "__main__":
    main()
