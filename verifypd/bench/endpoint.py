"""An arm that is a server: anything at a URL that speaks OpenAI's API (vLLM, SGLang, llama.cpp, Verify-PD, …)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import time
from typing import Any

from verifypd.bench.client import Address, Client, HTTPError
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.provenance import relative
from verifypd.bench.workload import Arrival
from verifypd.errors import ConfigError

METRIC = re.compile(
    rb"^(?:vllm|verifypd):(generation_tokens|draft_tokens_per_pos"
    rb"|spec_decode_num_(?:drafts|draft_tokens|accepted_tokens_per_pos))(?:_total)?"
    rb"(\{[^\n]*\})? (\S+)$",
    re.MULTILINE,
)
DRAFTS, DRAFT_TOKENS, EMITTED = (
    b"spec_decode_num_drafts", b"spec_decode_num_draft_tokens", b"generation_tokens",
)  # fmt: skip
ACCEPTED, HAD = b"spec_decode_num_accepted_tokens_per_pos", b"draft_tokens_per_pos"  # the second is ours alone
VERSIONS = (("/version", "version"), ("/props", "build_info"))  # vLLM's and ours, llama.cpp's
NOT_YET = (502, 503, 504)  # of a server that loads, and of a proxy before one that is not there
LOOK = 0.5  # s between two looks at a server that is awaited
PLACE = re.compile(rb'position="(\d+)"')
PAUSE = re.compile(
    rb'^verifypd:(pauses|pause_seconds|memory_calls)_total\{[^\n]*?kind="(\w+)"[^\n]*\} (\S+)$', re.MULTILINE
)


class Endpoint:
    """One server. Prompts that are so many random tokens are sent as token ids below `vocab`, or as so many words."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        model: str | None = None,
        key: str | None = None,
        vocab: int | None = None,
        fields: dict[str, Any] | None = None,
        patience: float = 60.0,
        launch: str = "",
    ) -> None:
        """fields: more of each request's body. patience: s that a server may take to be there. launch: its command."""
        self.address = Address.parse(url)
        self._name = name or f"{self.address.host}:{self.address.port}"
        self.model = model  # found at the start where it is not given
        self._given = model
        self.vocab = vocab
        self.fields = {"temperature": 0.0, "ignore_eos": True} if fields is None else fields
        self.patience = patience
        self.launch = launch
        self._client = Client(self.address, key)

    @property
    def name(self) -> str:
        """As given, or the server's host and port."""
        return self._name

    @property
    def spec(self) -> dict[str, Any]:
        """Its address, the model and what is asked for."""
        return {"url": str(self.address), "model": self._given, "vocab": self.vocab, "fields": self.fields}

    async def start(self) -> dict[str, Any]:
        """Wait until it takes requests, and find its model."""
        until = time.monotonic() + self.patience
        listed = await self._awaited("/v1/models", until)
        try:
            models = json.loads(listed)["data"]
            names, owners = ([str(each.get(key) or "") for each in models] for key in ("id", "owned_by"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{self.address}/v1/models gives no list of models; is it an OpenAI server?") from None
        with contextlib.suppress(ConfigError):  # ours lists its model while it loads; others have no such page
            await self._awaited("/ready", until)
        if self.model is None:
            if not any(names):
                raise ConfigError(f"{self.address} serves no model; give --model")
            self.model = next(filter(None, names))
        said = await self._version() or ", ".join(dict.fromkeys(filter(None, (*owners[:1], self._client.software))))
        more = {"server": said, "launch": self.launch}
        return {"model": relative(self.model)} | {name: text for name, text in more.items() if text}

    async def _awaited(self, path: str, until: float) -> bytes:
        """The answer to a GET; a server that is not there, or not ready, is asked again."""
        while True:
            try:
                return await self._client.get(path)
            except (OSError, TimeoutError, HTTPError) as error:
                refused = isinstance(error, HTTPError) and error.status not in NOT_YET
                final = refused or isinstance(error, ssl.SSLCertVerificationError)
                if final or time.monotonic() > until:
                    raise ConfigError(f"{self.address} does not answer {path}: {error}") from None
                await asyncio.sleep(LOOK)

    async def _version(self) -> str:
        """As it says itself; nothing where it does not."""
        for path, key in VERSIONS:
            with contextlib.suppress(OSError, TimeoutError, HTTPError, ValueError, KeyError, TypeError):
                if version := json.loads(await self._client.get(path))[key]:
                    return str(version)
        return ""

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Stream an answer. Tokens are what the server's usage says, and one an event where it says nothing."""
        path, body = self.request(arrival, seed)
        usage: dict[str, Any] = {}
        ended = False
        async for events in self._client.events(path, body):
            if error := next((event["error"] for event in events if event.get("error")), None):
                raise HTTPError(str(error.get("message", error) if isinstance(error, dict) else error))
            choices = [choice for event in events for choice in _choices(event)]
            if shown := sum(_shows(choice) for choice in choices):
                answer.came(shown)
            usage = next((event["usage"] for event in reversed(events) if event.get("usage")), usage)
            ended = ended or any(choice.get("finish_reason") for choice in choices)
        if ended or usage:
            answer.ended(usage.get("completion_tokens") or 0, usage.get("prompt_tokens") or 0)

    def request(self, arrival: Arrival, seed: int) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": arrival.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if arrival.messages is not None:
            return "/v1/chat/completions", body | {"messages": list(arrival.messages)}
        return "/v1/completions", body | {"prompt": arrival.text_or_ids(seed, self.vocab)}

    async def drafts(self) -> Drafts | None:
        """From the server's metrics, by vLLM's names, which ours has too."""
        text = await self._metrics()
        if text is None:
            return None
        totals = {DRAFTS: 0.0, DRAFT_TOKENS: 0.0, EMITTED: 0.0}
        places: dict[bytes, dict[int, float]] = {ACCEPTED: {}, HAD: {}}
        for name, labels, value in METRIC.findall(text):
            place = PLACE.search(labels)
            if name in totals:
                totals[name] += float(value)
            elif place:
                places[name][int(place[1])] = places[name].get(int(place[1]), 0.0) + float(value)
        accepted, drafted = (
            tuple(round(own.get(i, 0.0)) for i in range(max(own, default=-1) + 1)) for own in places.values()
        )
        spans, tokens, emitted = (round(totals[name]) for name in (DRAFTS, DRAFT_TOKENS, EMITTED))
        return Drafts(spans, tokens, accepted, emitted or None, drafted)

    async def pauses(self) -> dict[str, float] | None:
        """From the metrics of our own server; no other has them."""
        found: dict[str, float] = {}
        for name, label, value in PAUSE.findall(await self._metrics() or b""):
            kind = label.decode()
            if name == b"pause_seconds":
                found[f"{kind}_ms"] = found.get(f"{kind}_ms", 0.0) + 1e3 * float(value)
            else:
                found[kind] = found.get(kind, 0) + round(float(value))
        return found or None

    async def _metrics(self) -> bytes | None:
        """None: the server has none."""
        try:
            return await self._client.get("/metrics", 10.0)
        except (OSError, TimeoutError, HTTPError):
            return None

    async def close(self) -> None:
        """The server is somebody else's."""


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What an event says of each choice; HTTPError where it is not of OpenAI's form."""
    choices, usage = event.get("choices") or [], event.get("usage") or {}
    whole = isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)
    if not whole or not all(isinstance(part, dict) for part in (usage, *(each.get("delta") or {} for each in choices))):
        raise HTTPError(f"an event is not of OpenAI's form: {json.dumps(event)[:80]}")
    return list(choices)


def _shows(choice: dict[str, Any]) -> int:
    """Tokens that a choice brings, by its ids where the server is asked for them; else 1 for something to see."""
    delta = choice.get("delta") or {}
    shown = any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    return len(choice.get("token_ids") or ()) or int(bool(choice.get("text") or shown))
