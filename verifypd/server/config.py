"""Server settings: frozen, checked at birth, the one source of the `serve` flags. Knows nothing of sockets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from verifypd.config import check_range, parse_bytes, setting
from verifypd.errors import ConfigError

LOG_FORMATS = ("json", "text")
GENERATION_CONFIGS = ("auto", "none")


def _is_origin(text: str) -> bool:
    """Whether a browser could send it as `Origin`, or it stands for all. A browser leaves out a scheme's own port."""
    if text in ("*", "null"):
        return True
    try:
        parts = urlsplit(text)
        own = parts.port is not None and parts.port == {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return False
    host = re.fullmatch(r"[a-z0-9.\-_]+|\[[0-9a-f:.]+\]", parts.netloc.removesuffix(f":{parts.port}"))
    return bool(parts.scheme and host and not own and text == f"{parts.scheme}://{parts.netloc}")


def _is_key(text: str) -> bool:
    """Whether a client can send it: a header loses the spaces at its ends."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything the server needs beside the engine's settings."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = setting(8000, "port to listen on; 0 lets the system choose")
    api_workers: int = setting(1, "processes that speak HTTP, tokenise and detokenise")
    served_model_name: str | None = setting(None, "model id clients use (default: what --model says)", metavar="NAME")
    api_key: tuple[str, ...] = setting(
        (), "a key clients must send; may be repeated, and $VERIFYPD_API_KEY adds one", metavar="KEY", secret=True
    )
    admin_key: str | None = setting(
        None,
        "key that opens /v1/admin/architecture (default: $VERIFYPD_ADMIN_KEY; without either it is not there)",
        metavar="KEY",
        secret=True,
    )
    max_queue: int = setting(256, "requests that may wait for a slot; beyond it the answer is 429")
    max_streams_per_key: int | None = setting(None, "calls one key may have open at once; beyond it the answer is 429")
    max_connections: int = setting(
        4096, "connections one API worker keeps open; beyond it an idle one is closed, else the answer is 503"
    )
    max_choices: int = setting(128, "prompts × n of one call")
    max_scores: int = setting(
        1 << 20, "logprobs in one answer: for each choice, tokens of output and scored prompt × (1 + top logprobs)"
    )
    max_output_tokens: int | None = setting(None, "most output tokens a request may ask for (default: the model's)")
    max_body: str | int = setting("8MB", "largest request body; beyond it the answer is 413")
    drain_timeout: float = setting(30.0, "s that running requests get to finish after SIGTERM")
    step_timeout: float = setting(120.0, "s after which an engine step counts as hung and the engine is restarted")
    start_timeout: float = setting(1800.0, "s the engine may take to load")
    send_timeout: float = setting(60.0, "s a client may leave its stream unread before it is dropped")
    header_timeout: float = setting(30.0, "s a client may take to send a request")
    keep_alive_timeout: float = setting(
        75.0, "s an idle connection stays open for the next request; more than a load balancer keeps it, or calls fail"
    )
    retries: int = setting(
        2,
        "times in a row a request goes on where it stood after the engine died under it; then it ends with an error."
        " The count starts again after a minute of output",
    )
    max_restarts: int = setting(
        5, "times in a row a dead engine is started again, unless it was up for 30 s; then the server gives up"
    )
    tls_cert: str | None = setting(None, "certificate file (PEM); with --tls-key, serves https", metavar="FILE")
    tls_key: str | None = setting(None, "private key file (PEM)", metavar="FILE")
    cors_origin: tuple[str, ...] = setting((), "origin browsers may call from; may be repeated", metavar="ORIGIN")
    special_tokens_in_content: bool = setting(
        False, "let special tokens that clients write into messages act as such; by default they are text"
    )
    generation_config: str = setting(
        "auto",
        "sampling of requests that do not say: temperature, top_p, top_k, min_p and repetition_penalty of the model's"
        " generation_config.json, or none: temperature 1 and all tokens",
        choices=GENERATION_CONFIGS,
    )
    log_format: str = setting("text", "log lines", choices=LOG_FORMATS)
    log_prompts: bool = setting(False, "write prompts and outputs into the log")
    metrics_interval: float = setting(0.5, "s between two reports of the engine to /metrics")
    engine_factory: str = setting(
        "verifypd.engine.build:build", "module:function that makes the engine from its settings", hidden=True
    )

    def __post_init__(self) -> None:
        if not self.host:  # the system takes it for every interface
            raise ConfigError("--host is empty: give 127.0.0.1, or 0.0.0.0 for every interface")
        if self.served_model_name == "":
            raise ConfigError("--served-model-name is empty: give a name, or leave it out")
        self._check_range("port", 0, 65535)
        self._check_range("api_workers", 1, 64)
        self._check_range("max_queue", 0, 1 << 20)
        self._check_range("max_connections", 1, 1 << 20)
        self._check_range("max_choices", 1, 1 << 14)
        self._check_range("max_scores", 1, 1 << 30)
        for name in ("max_streams_per_key", "max_output_tokens"):
            if getattr(self, name) is not None:
                self._check_range(name, 1, 1 << 30)
        self._check_range("retries", 0, 100)
        self._check_range("max_restarts", 0, 1000)
        self._check_range("drain_timeout", 0.0, math.inf)
        for name in ("step_timeout", "start_timeout"):
            self._check_range(name, 0.1, math.inf)
        for name in ("send_timeout", "header_timeout", "keep_alive_timeout"):
            self._check_range(name, 0.1, 86400.0)
        self._check_range("metrics_interval", 0.01, 60.0)
        parse_bytes(self.max_body, "max_body")
        for name, known in (("log_format", LOG_FORMATS), ("generation_config", GENERATION_CONFIGS)):
            if getattr(self, name) not in known:
                flag = f"--{name.replace('_', '-')} {getattr(self, name)!r}"
                raise ConfigError(f"{flag} is not known; choose from {', '.join(known)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
        if not all(map(_is_key, self.api_key)):
            raise ConfigError("--api-key must be printable ASCII, not empty, and without a space at either end")
        if self.admin_key and not _is_key(self.admin_key):
            raise ConfigError("--admin-key must be printable ASCII, without a space at either end")
        if self.admin_key is not None and (not self.admin_key or self.admin_key in self.api_key):
            raise ConfigError("--admin-key must not be empty, nor one of the keys of --api-key")
        for origin in self.cors_origin:
            if not _is_origin(origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is no origin: give what browsers send, such as https://example.org,"
                    " without a path or a slash at its end; or *"
                )
        module, _, name = self.engine_factory.partition(":")
        if not module or not name:
            raise ConfigError(f"--engine-factory {self.engine_factory!r}: give module:function")

    def _check_range(self, name: str, low: float, high: float) -> None:
        check_range(name, getattr(self, name), low, high)

    @property
    def body_bytes(self) -> int:
        """`max_body` in bytes."""
        return parse_bytes(self.max_body, "max_body")

    @property
    def scheme(self) -> str:
        """How the server is addressed."""
        return "https" if self.tls_cert else "http"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All setting names."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerConfig:
        """Build from keyword arguments; a name that is not a setting is refused."""
        unknown = next((name for name in kwargs if name not in cls.names()), None)
        if unknown is not None:
            raise ConfigError(f"unknown server setting {unknown!r}")
        return cls(**kwargs)
