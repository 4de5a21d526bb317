"""The async API: an engine in a thread of its own, its outputs as async iterators. Knows threads; nothing of tensors.

The thread alone touches the engine. Callers leave orders for it and find in their mailbox the output so far: a slow
reader misses steps in between, never tokens, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from verifypd.config import EngineConfig
from verifypd.engine.llm import LLM, Message, Prompt, _Job
from verifypd.errors import ConfigError, EngineError
from verifypd.request import RequestOutput, SamplingParams
from verifypd.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncLLM:
    """`LLM` for programs with an event loop: as many calls at once as there are, batched together.

    >>> llm = AsyncLLM("smollm2")
    >>> async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
    ...     print(output.outputs[0].text)

    Making one loads the model and takes as long as that does.
    """

    def __init__(self, model: str = "smollm2", draft: str | None = "auto", **settings: Any) -> None:
        """`settings` are those of EngineConfig, as for `LLM`."""
        self.config = EngineConfig.from_kwargs(model=model, draft=draft, **settings)
        self._engine = _EngineThread(lambda: LLM(model, draft, **settings))
        # the thread knows nothing of this object: it ends when the last reference to it is gone, or the program is
        self._end = weakref.finalize(self, self._engine.stop)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """The output so far, each time it has grown; the last one is finished. Leaving the loop aborts the request.

        A text is encoded beside the event loop and the engine. One that cannot fit is refused by its length, so nobody
        encodes for longer than the longest prompt takes.
        """
        if isinstance(prompt, str | Mapping):
            text, ids = await asyncio.to_thread(self._engine.llm._encode, prompt)
            prompt = {"prompt": text, "prompt_token_ids": ids}
        call = _Call(prompt, sampling_params or SamplingParams(), _Mailbox())
        self._engine.order(call)
        finished = False
        try:
            while not finished:
                output = await call.mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._engine.order(_Abort(call))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        special_tokens_in_content: bool = False,
        **template_arguments: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """As `generate`, for a conversation through the model's chat template.

        Special tokens spelt out in messages, tools and template variables are text, unless special_tokens_in_content.
        """
        ids = await asyncio.to_thread(
            self._engine.llm._chat_ids, messages, True, special_tokens_in_content, **template_arguments
        )
        async with aclosing(self.generate(ids, sampling_params)) as outputs:
            async for output in outputs:
                yield output

    def get_tokenizer(self) -> Tokenizer:
        """The verifier's tokenizer."""
        return self._engine.llm.get_tokenizer()

    async def switch_architecture(self, name: str) -> None:
        """Run under another architecture from the next step on, as `LLM.switch_architecture`; returns when it is so."""
        await self.between_steps(lambda llm: llm.switch_architecture(name))
        self.config = self.config.switched(name)

    async def between_steps(self, work: Callable[[LLM], T]) -> T:
        """Run `work` in the engine's thread before its next step; returns or raises what it does."""
        errand = _Errand(work)
        self._engine.order(errand)
        return await asyncio.wrap_future(errand.done)

    def shutdown(self) -> None:
        """Abort what runs and free everything; waits for the step that is under way. A second call does nothing."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


class _Mailbox:
    """Holds the latest output of a call, or what went wrong, for the coroutine that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def put(self, latest: RequestOutput | BaseException) -> None:
        """From the engine's thread. Replaces what has not been read yet; an event loop that is gone reads nothing."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, latest)

    def _set(self, latest: RequestOutput | BaseException) -> None:
        self._latest = latest
        self._news.set()

    async def take(self) -> RequestOutput:
        """The next output; raises what went wrong."""
        await self._news.wait()
        self._news.clear()
        assert self._latest is not None
        if isinstance(self._latest, BaseException):
            raise self._latest
        return self._latest


class _Call:
    """A prompt for the engine, and once it is taken in, its job."""

    def __init__(self, prompt: Prompt, params: SamplingParams, mailbox: _Mailbox) -> None:
        self.prompt = prompt
        self.params = params
        self.mailbox = mailbox
        self.job: _Job | None = None
        self.shown: object = None  # the progress that was last told


class _Abort:
    """An order to end a call."""

    def __init__(self, call: _Call) -> None:
        self.call = call


class _Errand(Generic[T]):
    """Something to do between two steps, and what came of it."""

    def __init__(self, work: Callable[[LLM], T]) -> None:
        self.work = work
        self.done: Future[T] = Future()

    def obey(self, llm: LLM) -> None:
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.work(llm))
            except Exception as error:  # noqa: BLE001  # whoever ordered it hears of it
                self.done.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Nobody is left to obey."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class _EngineThread:
    """Runs an engine: takes orders between steps, and tells each call how far it is."""

    def __init__(self, make: Callable[[], LLM]) -> None:
        """Returns when the engine is there; raises what kept it from being made."""
        self._orders: deque[_Call | _Abort | _Errand[Any]] = deque()
        self._awake = threading.Condition()
        self._stopping = False
        self._calls: list[_Call] = []
        self._failure: BaseException | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, ready), name="verifypd-engine", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def order(self, order: _Call | _Abort | _Errand[Any]) -> None:
        """Leave an order. Raises ConfigError for a call after the end."""
        with self._awake:
            if self._stopping:
                if isinstance(order, _Abort):
                    return
                raise ConfigError("this AsyncLLM was shut down; make a new one")
            self._orders.append(order)
            self._awake.notify()

    def stop(self) -> None:
        """End the thread and with it the engine."""
        with self._awake:
            self._stopping = True
            self._awake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- inside the thread --------------------------------------------------------------------------------------------

    def _run(self, make: Callable[[], LLM], ready: threading.Event) -> None:
        try:
            self.llm = make()
        except BaseException as error:  # noqa: BLE001  # raised where the engine was asked for
            self._failure = error
            ready.set()
            return
        ready.set()
        try:
            with self.llm:
                while self._take_orders():
                    self._step()
        finally:
            with self._awake:
                self._stopping = True
            for call in [*self._calls, *(order for order in self._orders if isinstance(order, _Call))]:
                call.mailbox.put(EngineError("the engine was shut down before the request ended"))
            for order in self._orders:
                if isinstance(order, _Errand):
                    order.fail(EngineError("the engine was shut down before that was done"))

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and do what was ordered; False: it is time to stop."""
        with self._awake:
            self._awake.wait_for(lambda: self._stopping or self._orders or self.llm.engine.busy)
            if self._stopping:
                return False
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            if isinstance(order, _Call):
                self._begin(order)
            elif isinstance(order, _Errand):
                order.obey(self.llm)
            elif order.call in self._calls:
                self._calls.remove(order.call)
                assert order.call.job is not None
                self.llm._drop([order.call.job])
        return True

    def _begin(self, call: _Call) -> None:
        try:
            [call.job] = self.llm._submit([call.prompt], [call.params])
        except Exception as error:  # noqa: BLE001  # whatever it is, it concerns this call alone
            call.mailbox.put(error)
            return
        call.shown = call.job.progress()
        self._calls.append(call)

    def _step(self) -> None:
        """One step, and news of it. When it fails, every call of it does; those that come later are served."""
        try:
            self.llm._step()
        except Exception as error:  # noqa: BLE001
            failed, self._calls = self._calls, []
            for call in failed:
                call.mailbox.put(error)
            self.llm._drop([call.job for call in failed if call.job is not None])
            return
        for call in list(self._calls):
            assert call.job is not None
            progress = call.job.progress()
            if progress == call.shown:
                continue
            call.shown = progress
            call.mailbox.put(call.job.output())
            if call.job.finished:
                self._calls.remove(call)
