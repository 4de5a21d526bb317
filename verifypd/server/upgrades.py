"""Requests that offer to go on in another protocol (`Upgrade: h2c`, as Java's client sends), read as if they did not.

A server may pass over the offer (RFC 9110, 7.8). The parser cannot: it takes what follows the head for that protocol,
and the body would be lost. So a new parser gets the head once more, without the offer. Knows bytes; no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import httptools  # type: ignore[attr-defined]  # the one uvicorn reads with

OFFER = (b"upgrade", b"http2-settings")  # headers of the offer, which `Connection` names too


class Parser(httptools.HttpRequestParser):
    """Hands over what comes after the head of such a request, instead of giving up there."""

    def __init__(self, protocol: Any) -> None:
        """`protocol` has `pass_over` beside httptools' own callbacks."""
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._protocol = protocol

    @property
    def offered(self) -> bool:
        """Whether the head that is whole now makes an offer; CONNECT asks for a tunnel, which is none."""
        return bool(self.should_upgrade() and self.get_method() != b"CONNECT")

    def feed_data(self, data: Any) -> None:
        """Read on."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self.offered:
                raise
            self._protocol.pass_over(memoryview(data)[offer.args[0] :])

    def plain_head(self, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The head without its offer; names of headers are in small letters."""
        lines = [b"%b %b HTTP/%b" % (self.get_method(), url, self.get_http_version().encode())]
        for name, value in headers:
            if name == b"connection":
                value = b", ".join(word for word in value.split(b",") if word.strip().lower() not in OFFER)
            if name not in OFFER:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])
