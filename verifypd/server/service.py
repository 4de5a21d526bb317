"""What the routes share: limits, the model's name, and a call from its body to its answer. Knows no paths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from verifypd.config import EngineConfig
from verifypd.server.ask import Limits, Prepared
from verifypd.server.bridge import Bridge
from verifypd.server.calls import Call, CallError, unavailable
from verifypd.server.config import ServerConfig
from verifypd.server.formats import check
from verifypd.server.metrics import ServerMetrics
from verifypd.server.render import Renderer
from verifypd.server.schema import GenerationBody
from verifypd.server.streams import EventStream, Sweeper, whole
from verifypd.server.tools import ToolFormat
from verifypd.tokenizer import Tokenizer

T = TypeVar("T")
LONG_BODY = 1 << 14  # bytes from which a prompt is tokenised beside the event loop, not in it


async def aside(request: Request, work: Callable[[], T]) -> T:
    """The result of `work`: beside the event loop where the body is long, else at once."""
    long = len(await request.body()) > LONG_BODY
    return await asyncio.to_thread(work) if long else work()


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
        self.metrics = ServerMetrics(bridge, self.model, engine_config.slo_ttft, engine_config.slo_tpot)
        self.sweeper = Sweeper(config.send_timeout)

    @property
    def limits(self) -> Limits:
        """What requests are held to; needs an engine that has been up."""
        info = self.bridge.info
        if not info:
            raise unavailable("the model is still loading; try again soon", "starting", 5)
        return Limits(info["max_model_len"], info["vocab"], self.config.max_output_tokens, self.config.max_choices)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served."""
        if name is not None and name != self.model:
            raise CallError(
                404, f"no model {name!r} here; this server has {self.model!r}", code="model_not_found", param="model"
            )

    async def run(
        self, request: Request, body: GenerationBody, prepare: Callable[[], Prepared], renderer: Callable[..., Renderer]
    ) -> Response:
        """A call from body to answer. `renderer` takes the call, what was prepared, and what it needs of the model."""
        self.check_model(body.model)
        state = request.scope["state"]
        name = state["request_id"] = body.request_id or state["request_id"]
        prepared = await aside(request, prepare)
        if prepared.ask.grammar is not None:
            check(prepared.ask.grammar)
        state["log"] = self._log_fields(prepared)
        try:
            call = await self.bridge.open(name, prepared.ask, state["arrival"])
        except CallError as error:
            self.metrics.refused.labels(error.code or str(error.status)).inc()
            raise

        def finished(call: Call, outcome: str) -> None:
            self.metrics.finished(call, outcome)
            state["log"].update(outcome=outcome, tokens=sum(choice.tokens for choice in call.choices))
            if self.config.log_prompts:
                state["log"]["outputs"] = [choice.text.text for choice in call.choices]

        draft = self.bridge.info.get("max_draft", 0)
        made = renderer(call, prepared, self.model, self.tokenizer, draft)
        if prepared.stream:
            return EventStream(call, made, self.bridge, self.sweeper, finished)
        await whole(call, self.bridge, request.receive, finished)
        return Response(made.whole(), media_type="application/json")

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
