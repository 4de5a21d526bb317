"""What the routes share: limits, the model's name, and a call from its body to its answer. Knows no paths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response

from verifypd.config import EngineConfig
from verifypd.server.ask import Limits, Prepared
from verifypd.server.bridge import Bridge
from verifypd.server.calls import Call, CallError, unavailable
from verifypd.server.config import ServerConfig
from verifypd.server.formats import check, told
from verifypd.server.logs import event
from verifypd.server.metrics import ServerMetrics
from verifypd.server.reader import Readers
from verifypd.server.render import Renderer
from verifypd.server.schema import GenerationBody
from verifypd.server.streams import ClientGoneError, EventStream, Sweeper, gone, whole
from verifypd.server.tools import ToolFormat
from verifypd.server.works import Desk, Done, do
from verifypd.tokenizer import Tokenizer
from verifypd.tokenizer.defaults import sampling_defaults

log = logging.getLogger(__name__)


class Service:
    """What the routes share."""

    def __init__(
        self, engine_config: EngineConfig, config: ServerConfig, bridge: Bridge, tokenizer: Tokenizer | None
    ) -> None:
        self.engine_config = engine_config
        self.config = config
        self.bridge = bridge
        self.tokenizer = tokenizer
        self.model = config.served_model_name or engine_config.model
        self.created = int(time.time())
        self.tool_format = ToolFormat.of(tokenizer)
        self.metrics = ServerMetrics(bridge, self.model)
        self.sweeper = Sweeper(config.send_timeout)
        folder = tokenizer.folder if tokenizer is not None else None
        self.defaults = sampling_defaults(folder) if config.generation_config == "auto" else {}
        if self.defaults:
            event(log, "sampling of requests that do not say, from generation_config.json", **self.defaults)
        self.readers = Readers(folder, config.log_format, bridge.worker)

    @property
    def limits(self) -> Limits:
        """What requests are held to; needs an engine that has been up."""
        info = self.bridge.info
        if not info:
            raise unavailable("the model is still loading; try again soon", "starting", 5)
        return Limits(
            max_model_len=info["max_model_len"],
            vocab=info["vocab"],
            max_output_tokens=self.config.max_output_tokens,
            max_choices=self.config.max_choices,
            max_scores=self.config.max_scores,
            special_in_content=self.config.special_tokens_in_content,
            defaults=self.defaults,
        )

    def desk(self, request: Request) -> Desk:
        """What works on a body of this request need."""
        return Desk(self.limits, self.tokenizer, self.tool_format, request.scope["state"]["key"])

    async def read(self, request: Request, work: str) -> Done:
        """The result of a work on a large body; nobody reads it for a client that has left."""
        state, data = request.scope["state"], await request.body()
        with self.bridge.reading(state["arrival"]) as ended:
            reading = asyncio.ensure_future(self.readers.read(work, data, self.limits, state["key"]))
            leaving = asyncio.ensure_future(gone(request.receive))
            try:
                await asyncio.wait((reading, leaving, ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise ended.result()
                if not reading.done():
                    raise ClientGoneError
                done = reading.result()
            finally:
                reading.cancel()
                leaving.cancel()
        self.check_model(done.model)
        return done

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served."""
        if name is not None and name != self.model:
            raise CallError(
                404, f"no model {name!r} here; this server has {self.model!r}", code="model_not_found", param="model"
            )

    async def run(self, request: Request, body: GenerationBody, work: str, renderer: type[Renderer]) -> Response:
        """A call from body to answer."""
        with self._counting():
            self.check_model(body.model)
            prepared = do(work, body, self.desk(request))
        return await self._answer(request, body.request_id, prepared, renderer)

    async def run_large(self, request: Request, work: str, renderer: type[Renderer]) -> Response:
        """The same for a large body."""
        with ExitStack() as open_:  # until the call is open
            with self._counting():
                open_.enter_context(self.bridge.reading(request.scope["state"]["arrival"]))
                done = await self.read(request, work)
            return await self._answer(request, done.request_id, done.value, renderer)

    def count(self, error: CallError) -> None:
        """Count a generation call that is turned away."""
        if not isinstance(error, ClientGoneError):
            self.metrics.refused.labels(error.code or str(error.status)).inc()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            self.count(error)
            raise

    async def _answer(
        self, request: Request, request_id: str | None, prepared: Prepared, renderer: type[Renderer]
    ) -> Response:
        state = request.scope["state"]
        name = state["request_id"] = request_id or state["request_id"]
        state["log"] = self._log_fields(prepared)
        try:
            with self._counting():
                if prepared.ask.grammar is not None:
                    check(prepared.ask.grammar)
                call = await self.bridge.open(name, prepared.ask, state["arrival"])
        except CallError as error:
            raise renderer.told(told(error, prepared.format_field)) from None

        def finished(call: Call, outcome: str) -> None:
            self.metrics.finished(call, outcome)
            state["log"].update(outcome=outcome, tokens=sum(choice.tokens for choice in call.choices))
            if self.config.log_prompts:
                state["log"]["outputs"] = [choice.text.text for choice in call.choices]

        draft = self.bridge.info.get("max_draft", 0)
        made = renderer(call, prepared, self.model, self.tokenizer, draft)
        if prepared.stream:
            return EventStream(call, made, self.bridge, self.sweeper, finished)
        with self.bridge.reading(state["arrival"]):  # until the answer is written: a long one takes seconds
            try:
                await whole(call, self.bridge, request.receive, finished)
            except CallError as error:
                raise renderer.told(told(error, prepared.format_field)) from None
            return Response(await made.whole(), media_type="application/json")

    def _log_fields(self, prepared: Prepared) -> dict[str, Any]:
        ask = prepared.ask
        fields: dict[str, Any] = {
            "prompt_tokens": sum(len(ids) for ids in ask.prompts),
            "choices": ask.choices,
            "stream": prepared.stream,
        }
        if self.config.log_prompts:
            texts = [
                self.tokenizer.decode(ids, skip_special_tokens=False) if self.tokenizer else ids for ids in ask.prompts
            ]
            fields["prompts"] = texts
        return fields
